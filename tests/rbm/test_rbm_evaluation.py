"""Annealed importance sampling and what is reported of a machine, held against sums over all states.

The witnesses are written in NumPy, from the definition of the energy; random estimates are held to their own spread.
"""

import functools
import itertools
import math

import numpy as np
import pytest
import torch
from accelerator import ACCELERATOR
from scipy.special import expit, logsumexp
from torch import Tensor
from values import seeded

from toolkit.datasets import bars_and_stripes, digits
from toolkit.rbm import (
    RBM,
    FusedTrainer,
    LogPartition,
    Sandwich,
    ais,
    base_rate_bias,
    estimated_log_likelihood,
    pseudo_log_likelihood,
    reconstruction_error,
    reverse_ais,
    salakhutdinov_schedule,
    sandwich,
)
from toolkit.rbm import annealing as annealing_module
from toolkit.rbm import evaluation as evaluation_module
from toolkit.rbm.annealing import (
    _FastChains,
    log_weights_by_definition,
)

BERNOULLI = {"visible": "bernoulli", "hidden": "bernoulli"}
GAUSSIAN = {"visible": "gaussian", "hidden": "bernoulli"}
CATEGORICAL = {"visible": "categorical", "hidden": "bernoulli", "categories": 3}
RECTIFIED = {"visible": "bernoulli", "hidden": "rectified"}
BOTH = {"visible": "gaussian", "hidden": "rectified"}
UNITS = [BERNOULLI, GAUSSIAN, CATEGORICAL, RECTIFIED, BOTH]
DEVICES = [
    "cpu",
    pytest.param(
        ACCELERATOR,
        marks=pytest.mark.gpu,
    ),
]

units_of_all_kinds = pytest.mark.parametrize("units", UNITS, ids=lambda units: f"{units['visible']}-{units['hidden']}")
both_directions = pytest.mark.parametrize("direction", ["forward", "reverse"])
on_all_devices = pytest.mark.parametrize("device", DEVICES)


# --- machines and witnesses -------------------------------------------------------------------------------------


def _rbm(units: dict | None = None, n_visible: int = 3, n_hidden: int = 2, scale: float = 1.0, **kwargs) -> RBM:
    """A machine without any symmetry: a transposed or swapped formula gives another number."""
    units = BERNOULLI if units is None else units
    rbm = RBM(n_visible, n_hidden, **units, dtype=torch.float64)
    if units["hidden"] == "rectified":
        # Counts multiply the weights; with real numbers, larger weights have no distribution.
        scale *= 0.5 if units["visible"] == "bernoulli" else 0.25
    generator = seeded(5)
    with torch.no_grad():
        for parameter in rbm.parameters():
            parameter.copy_(scale * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return rbm.to(**kwargs)


@functools.cache
def _digital(base: int, n_units: int) -> np.ndarray:
    return np.array(list(itertools.product(range(base), repeat=n_units)), dtype=float)


def _parameters(rbm: RBM) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    w, b, c = (getattr(rbm, n).detach().cpu().double().numpy() for n in ("weights", "visible_bias", "hidden_bias"))
    z = (
        rbm.visible_log_variance.detach().cpu().double().numpy()
        if rbm.visible_units == "gaussian"
        else np.zeros_like(b)
    )
    return w, b, c, np.exp(z)


def _hidden_states(rbm: RBM) -> tuple[np.ndarray, np.ndarray]:
    """Return states of the hidden layer (S, H), all of them or all that matter, and a(h) without the bias (S,)."""
    if rbm.hidden_units == "bernoulli":
        states = _digital(2, rbm.n_hidden)
        return states, np.zeros(len(states))
    states = _digital(40, rbm.n_hidden)
    ways = np.array([sum(math.log(1 - math.exp(-m)) for m in range(1, n + 1)) for n in range(40)])
    return states, -(states**2 / 2 + ways[states.astype(int)]).sum(1)


def _log_partition(rbm: RBM) -> float:
    """Return log Z: a sum over the hidden states, with a closed form for each visible unit."""
    w, b, c, variance = _parameters(rbm)
    states, log_weight = _hidden_states(rbm)
    x = states @ w.T
    if rbm.visible_units == "bernoulli":
        visible = np.logaddexp(0, x + b).sum(1)
    elif rbm.visible_units == "categorical":
        visible = logsumexp((x + b).reshape(len(x), -1, rbm.categories), axis=2).sum(1)
    else:
        visible = (((b + x) ** 2 - b**2) / (2 * variance) + np.log(2 * math.pi * variance) / 2).sum(1)
    return float(logsumexp(states @ c + log_weight + visible))


def _free_energy(rbm: RBM, visible: np.ndarray) -> np.ndarray:
    """Return F(v) of Bernoulli or categorical units, as a sum over the hidden states."""
    w, b, c, _ = _parameters(rbm)
    states, log_weight = _hidden_states(rbm)
    return -visible @ b - logsumexp(visible @ w @ states.T + states @ c + log_weight, axis=1)


def _draws(rbm: RBM, n: int, seed: int = 3) -> Tensor:
    """Draw from the machine itself, by the table of its hidden states."""
    states, log_weight = _hidden_states(rbm)
    w, b, c, variance = _parameters(rbm)
    x = states @ w.T
    if rbm.visible_units == "bernoulli":
        visible = np.logaddexp(0, x + b).sum(1)
    elif rbm.visible_units == "categorical":
        visible = logsumexp((x + b).reshape(len(x), -1, rbm.categories), axis=2).sum(1)
    else:
        visible = ((b + x) ** 2 / (2 * variance)).sum(1)
    table = torch.from_numpy(states @ c + log_weight + visible).softmax(0)
    generator = seeded(seed)
    chosen = torch.multinomial(table, n, replacement=True, generator=generator)
    hidden = torch.from_numpy(states)[chosen].to(rbm.weights)
    with torch.no_grad():
        return rbm.sample_visible(hidden, generator=seeded(seed + 1, rbm.weights.device.type))


def _reference(rbm: RBM) -> Tensor:
    """Biases of a machine without weights that is neither this machine's nor zero."""
    return rbm.visible_bias.detach() + torch.linspace(-0.7, 0.4, rbm.n_columns).to(rbm.weights)


def _run(rbm: RBM, direction: str, chains: int, inverse_temperatures, *, seed: int = 1, **kwargs) -> LogPartition:
    kwargs = {
        "inverse_temperatures": inverse_temperatures,
        "generator": seeded(seed, rbm.weights.device.type),
    } | kwargs
    if direction == "forward":
        return ais(rbm, chains=chains, **kwargs)
    return reverse_ais(rbm, _draws(rbm, chains, seed=100 + seed), **kwargs)


def _groups(found: LogPartition, size: int) -> list[LogPartition]:
    """Return what smaller runs would have reported: chains are independent."""
    return [LogPartition(part, found.log_reference, found.direction) for part in found.log_weights.split(size)]


# --- annealed importance sampling: exact cases ------------------------------------------------------------------


@units_of_all_kinds
@both_directions
@pytest.mark.parametrize("temperatures", [2, 7])
def test_machine_without_weights_is_done_exactly(units: dict, direction: str, temperatures: int) -> None:
    rbm = _rbm(units)
    torch.nn.init.zeros_(rbm.weights)
    found = _run(rbm, direction, 5, temperatures)
    assert found.estimate == pytest.approx(_log_partition(rbm), abs=1e-12)
    assert found.bound == pytest.approx(_log_partition(rbm), abs=1e-12)
    assert found.standard_error < 1e-7
    assert found.bound_standard_error < 1e-12
    assert found.effective_sample_size == pytest.approx(5)


@units_of_all_kinds
@both_directions
@pytest.mark.parametrize("temperatures", [2, 6])
def test_mean_weight_is_the_ratio_of_partition_functions(units: dict, direction: str, temperatures: int) -> None:
    rbm = _rbm(units)
    reference = _reference(rbm)
    found = _run(rbm, direction, 20_000, temperatures, reference=reference)
    sign = 1 if direction == "forward" else -1
    start = _rbm(units)
    with torch.no_grad():
        start.weights.zero_()
        start.hidden_bias.zero_()
        start.visible_bias.copy_(reference)
    assert found.log_reference == pytest.approx(_log_partition(start), abs=1e-12)
    weights = (found.log_weights - sign * (_log_partition(rbm) - _log_partition(start))).exp()
    assert weights.std() > 0.05  # else there is nothing to see
    z = float(weights.mean() - 1) / float(weights.std() / math.sqrt(len(weights)))
    assert abs(z) < 4
    assert found.standard_error < 0.1


@pytest.mark.slow
@units_of_all_kinds
def test_expectations_are_on_either_side_of_log_z(units: dict) -> None:
    rbm = _rbm(units, 4, 2, scale=1.5)
    truth = _log_partition(rbm)
    for direction, sign in (("forward", 1), ("reverse", -1)):
        # Few chains and temperatures, so that the bounds are not tight.
        runs = _groups(_run(rbm, direction, 12_000, 3, reference=_reference(rbm)), 4)
        for numbers in ([run.estimate for run in runs], [run.bound for run in runs]):
            distance = sign * (truth - np.array(numbers))
            assert distance.mean() > 4 * distance.std() / math.sqrt(len(distance))
        assert sign * np.mean([run.bound - run.estimate for run in runs]) < 0


@pytest.mark.parametrize("units", [BERNOULLI, GAUSSIAN], ids=["bernoulli", "gaussian"])
@both_directions
def test_more_temperatures_and_more_chains_come_closer(units: dict, direction: str) -> None:
    rbm = _rbm(units, 6, 3, scale=1.5 if units is BERNOULLI else 0.6)
    truth = _log_partition(rbm)
    coarse, fine = (_run(rbm, direction, 4000, temperatures) for temperatures in (3, 60))
    assert abs(fine.bound - truth) < 0.2 * abs(coarse.bound - truth)
    assert abs(fine.estimate - truth) < 4 * fine.standard_error < 0.04
    # With the same temperatures more chains help the estimate alone.
    few = _groups(coarse, 4)
    assert abs(coarse.estimate - truth) < 0.3 * abs(np.mean([run.estimate for run in few]) - truth)
    assert np.mean([run.bound for run in few]) == pytest.approx(coarse.bound)


@both_directions
def test_standard_errors_are_those_of_many_runs(direction: str) -> None:
    rbm = _rbm(n_visible=5, n_hidden=3)
    truth = _log_partition(rbm)
    runs = _groups(_run(rbm, direction, 60_000, 10), 100)
    z = np.array([(run.estimate - truth) / run.standard_error for run in runs])
    assert 0.9 < z.std() < 1.1
    assert abs(z.mean()) < 0.25  # the bias of the bound is small beside a standard error, and there
    found, spread = np.mean([run.bound_standard_error for run in runs]), np.std([run.bound for run in runs])
    assert found == pytest.approx(spread, rel=0.1)
    assert all(1 <= run.effective_sample_size <= 100 for run in runs)


def test_numbers_of_a_run_follow_from_its_weights() -> None:
    weights = np.array([0.5, 2.0, 3.5, 0.25])
    found = LogPartition(torch.from_numpy(np.log(weights)), 1.5, "forward")
    assert found.estimate == pytest.approx(1.5 + math.log(weights.mean()))
    assert found.standard_error == pytest.approx(weights.std(ddof=1) / weights.mean() / 2)
    assert found.bound == pytest.approx(1.5 + np.log(weights).mean())
    assert found.bound_standard_error == pytest.approx(np.log(weights).std(ddof=1) / 2)
    assert found.effective_sample_size == pytest.approx(weights.sum() ** 2 / (weights**2).sum())
    back = LogPartition(found.log_weights, 1.5, "reverse")
    assert back.estimate == pytest.approx(1.5 - math.log(weights.mean()))
    assert back.bound == pytest.approx(1.5 - np.log(weights).mean())
    assert back.standard_error == found.standard_error
    assert str(found) == (
        f"log Z = {found.estimate:.4f} ± {found.standard_error:.4f} (AIS, lower bound in expectation; effective chains "
        f"2.4 of 4; mean of log w {found.bound:.4f} ± {found.bound_standard_error:.4f})"
    )
    assert "reverse AIS, upper bound in expectation" in str(back)


def test_a_few_heavy_chains_show_in_the_effective_sample_size() -> None:
    found = LogPartition(torch.tensor([800.0] + [0.0] * 99, dtype=torch.float64), 0.0, "forward")
    assert found.effective_sample_size == pytest.approx(1)
    assert found.standard_error == pytest.approx(1)
    assert found.estimate == pytest.approx(800 - math.log(100))


# --- annealed importance sampling: the fast path -----------------------------------------------------------------

COARSE, FINE = 4, torch.cat([torch.linspace(0, 0.2, 9), torch.linspace(0.21, 1, 30)]).double()


@on_all_devices
@both_directions
@pytest.mark.parametrize("temperatures", [COARSE, FINE], ids=["coarse", "fine"])
@pytest.mark.parametrize("units", [BERNOULLI, GAUSSIAN, CATEGORICAL], ids=lambda units: units["visible"])
def test_fast_chains_do_what_the_definition_says(units: dict, temperatures, direction: str, device: str) -> None:
    rbm = _rbm(units, 6, 5, device=device)
    reference = _reference(rbm)
    found = _run(rbm, direction, 50, temperatures, reference=reference)
    betas = FINE.tolist() if temperatures is FINE else [0.0, 1 / 3, 2 / 3, 1.0]
    generator = seeded(1, device)
    with torch.no_grad():
        if direction == "forward":
            start = rbm.joint.annealed(0.0, reference)
            visible = start.sample_visible(rbm.weights.new_zeros(50, 5), generator)
        else:
            visible, betas = _draws(rbm, 50, seed=101), betas[::-1]
        expected = log_weights_by_definition(rbm.joint, visible, betas, reference, generator)
    assert expected.std() > 0.05
    assert torch.equal(found.log_weights.isfinite(), expected.isfinite())
    assert (found.log_weights - expected).abs().max() < 1e-10


@pytest.mark.parametrize("numbers", [1, 20, 64])
def test_draws_do_not_depend_on_the_size_of_the_chunks(monkeypatch: pytest.MonkeyPatch, numbers: int) -> None:
    rbm = _rbm(n_visible=7, n_hidden=5)
    whole = _run(rbm, "forward", 33, 12)
    monkeypatch.setattr(annealing_module, "_CHUNK", numbers)
    chunked = _run(rbm, "forward", 33, 12)
    assert (whole.log_weights - chunked.log_weights).abs().max() < 1e-12


def test_small_steps_of_the_temperature_are_exact_in_float32() -> None:
    rbm = _rbm(n_visible=40, n_hidden=30)
    visible = _draws_of_a_wide_layer(rbm, 64)
    expected = rbm.joint.annealed(0.7).free_energy(visible) - rbm.joint.annealed(0.70001).free_energy(visible)
    single = _rbm(n_visible=40, n_hidden=30).float()
    with torch.no_grad():
        chains = _FastChains(single.joint, visible.float(), single.visible_bias.new_zeros(40), seeded(1))
        chains._weigh_and_draw_hidden(slice(None), 0.7, 0.70001)
        naive = single.joint.annealed(0.7).free_energy(visible.float())
        naive -= single.joint.annealed(0.70001).free_energy(visible.float())
    size = expected.abs().mean()
    assert (naive - expected).abs().max() > 1e-2 * size  # the difference of two free energies is lost in rounding
    assert (chains.log_weights - expected).abs().max() < 1e-5 * size


@pytest.mark.parametrize("scale", [0.1, 3.0, 30.0])
def test_large_steps_of_the_temperature_are_exact_in_float32(scale: float) -> None:
    rbm = _rbm(n_visible=20, n_hidden=10, scale=scale)
    visible = _draws_of_a_wide_layer(rbm, 64)
    expected = rbm.free_energy(visible) - rbm.joint.annealed(0.0, rbm.visible_bias).free_energy(visible)
    found = reverse_ais(_rbm(n_visible=20, n_hidden=10, scale=scale).float(), visible.float(), inverse_temperatures=2)
    assert (found.log_weights - expected).abs().max() < 1e-6 * expected.abs().max()


def _far_from_zero(units: dict, bias: float) -> tuple[RBM, Tensor]:
    """Return a machine of real units far from 0, and a reference near its biases; both are the same in float32."""
    rbm = _rbm(units, 100, 4, scale=0.05)
    with torch.no_grad():
        rbm.visible_bias.add_(bias)
    return rbm.float().double(), torch.full((100,), bias, dtype=torch.float64)


@both_directions
@pytest.mark.parametrize("bias", [128.0, 1000.0])
def test_real_units_far_from_zero_are_exact_in_float32(bias: float, direction: str) -> None:
    rbm, reference = _far_from_zero(GAUSSIAN, bias)
    truth = _log_partition(rbm)
    found = _run(rbm.float(), direction, 500, 200, reference=reference.float())
    assert abs(found.estimate - truth) < 4 * found.standard_error < 0.1


@pytest.mark.parametrize("units", [GAUSSIAN, BOTH], ids=["bernoulli", "rectified"])
@pytest.mark.parametrize("bias", [128.0, 1000.0])
def test_weights_of_real_units_far_from_zero_are_exact_in_float32(bias: float, units: dict) -> None:
    rbm, reference = _far_from_zero(units, bias)
    visible = bias + torch.randn(50, 100, generator=seeded(1), dtype=torch.float64)
    visible = visible.float()
    options = {"inverse_temperatures": torch.tensor([0.0, 1.0]), "reference": reference}
    # As from the definition: the difference of two free energies, with what completes the squares.
    expected = reverse_ais(rbm, visible.double(), **options).log_weights
    by_definition = rbm.free_energy(visible.double()) - rbm.joint.annealed(0.0, reference).free_energy(visible.double())
    assert torch.allclose(expected, by_definition, rtol=1e-12, atol=1e-8)
    found = reverse_ais(rbm.float(), visible, **options).log_weights
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


def test_reference_log_z_is_summed_in_float64() -> None:
    rbm = RBM(20_000, 2, generator=seeded(1))
    found = ais(rbm, chains=2, inverse_temperatures=2, generator=seeded(1))
    assert found.log_reference == pytest.approx(20_002 * math.log(2), abs=1e-8)


@pytest.mark.filterwarnings("error")
@both_directions
@units_of_all_kinds
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_warnings_and_no_number_of_torchs_own_generator(units: dict, dtype: torch.dtype, direction: str) -> None:
    rbm = _rbm(units, dtype=dtype)
    assert rbm.weights.requires_grad
    visible = _draws(rbm, 5)
    state = torch.get_rng_state()
    if direction == "forward":
        ais(rbm, chains=5, inverse_temperatures=3, generator=seeded(1))
    else:
        reverse_ais(rbm, visible, inverse_temperatures=3, generator=seeded(1))
        if units["visible"] != "gaussian":
            pseudo_log_likelihood(rbm, visible)
    assert torch.equal(torch.get_rng_state(), state)


def _draws_of_a_wide_layer(rbm: RBM, n: int) -> Tensor:
    return (torch.rand(n, rbm.n_columns, generator=seeded(1), dtype=torch.float64) < 0.4).double()


@pytest.mark.slow
@on_all_devices
def test_float32_agrees_with_float64(device: str) -> None:
    rbm = _rbm(n_visible=8, n_hidden=4, device=device)
    truth = _log_partition(rbm)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        machine = _rbm(n_visible=8, n_hidden=4, device=device, dtype=dtype)
        exact = truth if dtype != torch.bfloat16 else _log_partition(machine)
        both = [_run(machine, direction, 2000, 200) for direction in ("forward", "reverse")]
        for found in both:
            assert found.log_weights.dtype == torch.float64
            assert abs(found.estimate - exact) < 4 * found.standard_error < 0.02
    assert abs(exact - truth) > 1e-3  # the machine in half precision is another one, and was summed as what it is


def test_draws_in_float32_have_their_probabilities() -> None:
    rbm = RBM(8, 1)
    mean = torch.tensor([0.0, 1e-5, 0.1, 0.5, 0.9, 1 - 1e-5, 1 - 2**-24, 1.0]).repeat(200_000, 1)
    with torch.no_grad():
        chains = _FastChains(rbm.joint, torch.zeros_like(mean), torch.zeros(8), seeded(1))
        assert chains.bits is not None
        chains.bits = torch.empty(mean.numel() // 2, dtype=torch.int64)
        draws = torch.empty_like(mean)
        chains._draw(mean.clone(), out=draws)
        odd = torch.empty(3, 1)
        chains._draw(torch.full((3, 1), 0.5), out=odd)
    assert set(draws.unique().tolist()) == set(odd.unique().tolist()) == {0.0, 1.0}
    expected = mean[0].double()
    spread = (expected * (1 - expected) / len(draws)).sqrt()
    assert bool(((draws.double().mean(0) - expected).abs() <= 4 * spread).all())
    neighbours = torch.corrcoef(draws[:, 2:5].T) - torch.eye(3)  # the two halves of a word are independent
    assert neighbours.abs().max() < 4 / math.sqrt(len(draws))


@both_directions
def test_only_the_generator_is_drawn_from_and_nothing_is_changed(direction: str) -> None:
    rbm = _rbm()
    visible = _draws(rbm, 20)
    before, state = visible.clone(), torch.get_rng_state()

    def run(seed: int) -> Tensor:
        options = {"inverse_temperatures": 5, "generator": seeded(seed)}
        return (
            ais(rbm, chains=20, **options) if direction == "forward" else reverse_ais(rbm, visible, **options)
        ).log_weights

    first, again, other = run(1), run(1), run(2)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(visible, before)
    assert not first.requires_grad
    assert all(parameter.grad is None for parameter in rbm.parameters())


@pytest.mark.slow
def test_schedule_of_salakhutdinov_and_murray() -> None:
    betas = salakhutdinov_schedule()
    assert len(betas) == 14_501
    assert betas[0] == 0
    assert betas[-1] == 1
    steps = betas.diff()
    for part, step in ((steps[:500], 1e-3), (steps[500:4500], 1e-4), (steps[4500:], 1e-5)):
        assert torch.allclose(part, torch.full_like(part, step), rtol=1e-9, atol=1e-13)
    assert ais(_rbm(), chains=2, inverse_temperatures=betas).log_weights.isfinite().all()


# --- the sandwich ------------------------------------------------------------------------------------------------


def _pair_of_gaussian_weights(truth: float, spread: float, n: int, m: int, seed: int) -> Sandwich:
    """Log-weights whose distribution is known: normal ones that obey the relation of both directions."""
    random = np.random.default_rng(seed)
    forward = random.normal(truth - spread**2 / 2, spread, n)
    reverse = random.normal(-truth - spread**2 / 2, spread, m)
    return Sandwich(
        LogPartition(torch.from_numpy(forward), 2.0, "forward"),
        LogPartition(torch.from_numpy(reverse), 2.0, "reverse"),
    )


@pytest.mark.parametrize(("n", "m"), [(100, 100), (50, 300)])
def test_the_middle_of_a_sandwich_is_bennetts_estimate(n: int, m: int) -> None:
    found = _pair_of_gaussian_weights(3.0, 1.5, n, m, seed=0)
    # Bennett's pair of equations: the ratio of means of Fermi functions, and the best shift of them, in turn.
    u, r = found.lower.log_weights.numpy(), -found.upper.log_weights.numpy()
    constant = 0.0
    for _ in range(200):
        ratio = math.log(expit(u - constant).mean() / expit(constant - r).mean()) + constant
        constant = ratio + math.log(n / m)
    root = ratio
    assert found.estimate == pytest.approx(2 + root, abs=1e-11)
    runs = [_pair_of_gaussian_weights(3.0, 1.5, n, m, seed=seed) for seed in range(200)]

    def error(numbers: list[float]) -> float:
        return float(np.sqrt(np.mean((np.array(numbers) - 5.0) ** 2)))

    middle = error([run.estimate for run in runs])
    assert middle < 0.8 * error([run.lower.estimate for run in runs])
    assert middle < 0.8 * error([run.upper.estimate for run in runs])


def test_sandwich_is_both_runs_one_after_the_other() -> None:
    rbm = _rbm(n_visible=5)
    visible, generator = _draws(rbm, 30), seeded(1)
    found = sandwich(rbm, visible, chains=20, inverse_temperatures=5, generator=seeded(1))
    lower = ais(rbm, chains=20, inverse_temperatures=5, generator=generator)
    upper = reverse_ais(rbm, visible, inverse_temperatures=5, generator=generator)
    assert torch.equal(found.lower.log_weights, lower.log_weights)
    assert torch.equal(found.upper.log_weights, upper.log_weights)
    assert found.width == upper.estimate - lower.estimate
    assert found.standard_error == math.hypot(lower.standard_error, upper.standard_error)
    assert sandwich(rbm, visible, inverse_temperatures=5).lower.chains == 30
    assert "\n" not in str(found)
    for number in (found.estimate, lower.estimate, lower.standard_error, upper.estimate, upper.standard_error):
        assert f"{number:.4f}" in str(found)


def test_sandwich_shows_a_mode_that_one_side_misses_without_a_trace() -> None:
    rbm = RBM(20, 1, dtype=torch.float64)
    with torch.no_grad():  # the mode of the hidden unit has e^5 times the weight of the rest, at full temperature only
        rbm.weights.fill_(6.0)
        rbm.visible_bias.fill_(-3.0)
        rbm.hidden_bias.fill_(-55.0)
    truth = _log_partition(rbm)
    found = sandwich(rbm, _draws(rbm, 300), inverse_temperatures=100, generator=seeded(1))
    assert found.lower.estimate < truth - 3
    assert found.lower.standard_error < 0.1
    assert found.upper.estimate > truth - 0.1
    assert found.width > 3


@pytest.fixture(scope="module")
def digits_machine() -> tuple[RBM, Tensor, float]:
    """Return a machine with 16 hidden units that has learned digits, the data, and its log Z."""
    torch.set_num_threads(1)
    data = (digits().inputs >= 0.5).float()
    generator = seeded(0)
    rbm = RBM(64, 16, generator=generator)
    rbm.start_at_base_rates(data)
    trainer = FusedTrainer(rbm, batch_size=100, steps=1, chains=torch.zeros(100, 16), generator=generator)
    epochs = 120
    for epoch in range(epochs):
        for rows in torch.randperm(len(data), generator=generator).split(100):
            trainer.step(data[rows], learning_rate=0.2 * (1 - epoch / epochs))
    return rbm, data, _log_partition(rbm)


@pytest.mark.slow
def test_log_z_of_digits_to_its_standard_error(digits_machine: tuple[RBM, Tensor, float]) -> None:
    """The chains are in float32, and part at the first draw that rounding decides: bounds are for any draws."""
    rbm, data, truth = digits_machine
    assert (-rbm.free_energy(data) - truth).mean() > -19.0  # independent pixels: -25
    reference = base_rate_bias(data)
    errors: dict[str, list[float]] = {"lower": [], "upper": [], "middle": []}
    for seed in range(4):
        found = sandwich(
            rbm,
            rbm.sample_exactly(500, generator=seeded(seed + 10))[0],
            inverse_temperatures=1000,
            reference=reference,
            generator=seeded(seed),
        )
        for side in (found.lower, found.upper):
            assert abs(side.estimate - truth) < 4.5 * side.standard_error < 0.045  # it is 0.0071 +- 0.0002
        errors["lower"].append(found.lower.estimate - truth)
        errors["upper"].append(found.upper.estimate - truth)
        errors["middle"].append(found.estimate - truth)
    # Means of four, to four of their standard errors.
    assert all(abs(np.mean(error)) < 4 * 0.0071 / math.sqrt(4) for error in errors.values())


# --- what is refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"chains": 1}, "`chains` should be an integer from 2. Found 1."),
        ({"chains": 2.0}, "`chains` should be an integer from 2. Found 2.0."),
        (
            {"inverse_temperatures": 1},
            "`inverse_temperatures` should be an integer from 2. Found 1.",
        ),
        (
            {"inverse_temperatures": 0.5},
            "`inverse_temperatures` should be an integer or a tensor (K,). Found 0.5.",
        ),
        (
            {"inverse_temperatures": torch.tensor([0.0, 0.75, 0.5, 1.0])},
            "`inverse_temperatures` should rise from 0 to 1. Found [0.0, 0.75, 0.5, 1.0].",
        ),
        (
            {"inverse_temperatures": torch.tensor([0.25, 1.0])},
            "`inverse_temperatures` should rise from 0 to 1. Found [0.25, 1.0].",
        ),
        (
            {"inverse_temperatures": torch.tensor([0.0, 0.5])},
            "`inverse_temperatures` should rise from 0 to 1. Found [0.0, 0.5].",
        ),
        (
            {"inverse_temperatures": torch.tensor([0.0, math.nan, 1.0])},
            "`inverse_temperatures` should rise from 0 to 1. Found [0.0, nan, 1.0].",
        ),
        ({"reference": torch.zeros(2)}, "`reference` should have shape (3,). Found (2,)."),
        ({"reference": torch.tensor([0.0, math.inf, 0.0])}, "`reference` should be finite. Found inf."),
    ],
    ids=str,
)
def test_ais_refuses(change: dict, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        ais(_rbm(), **({"chains": 5, "inverse_temperatures": 5} | change))
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("visible", "message"),
    [
        (
            torch.zeros(1, 3).double(),
            "`visible` should have at least 2 rows, so that there is a standard error. Found 1.",
        ),
        (torch.zeros(3).double(), "`visible` should have shape (N, 3) with N > 0. Found (3,)."),
        (torch.zeros(5, 2).double(), "`visible` should have shape (N, 3) with N > 0. Found (5, 2)."),
        (torch.full((5, 3), 0.25).double(), "`visible` should be zeros and ones. Found 0.25."),
        (torch.full((5, 3), math.nan).double(), "`visible` should be finite. Found nan."),
        (torch.full((5, 3), 2.0).double(), "`visible` should be between 0 and 1. Found 2.0."),
    ],
    ids=["one row", "no matrix", "columns", "probabilities", "nan", "outside"],
)
def test_reverse_ais_refuses(visible: Tensor, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        reverse_ais(_rbm(), visible, inverse_temperatures=5)
    assert str(caught.value) == message


@pytest.mark.parametrize("value", [math.nan, math.inf], ids=str)
def test_a_machine_that_is_not_finite_is_refused(value: float) -> None:
    rbm = _rbm()
    visible = _draws(rbm, 5)
    with torch.no_grad():
        rbm.weights[1, 0] = value
    found = sandwich(_rbm(), visible, inverse_temperatures=3)
    programs = [
        lambda: ais(rbm, chains=5, inverse_temperatures=5),
        lambda: reverse_ais(rbm, visible, inverse_temperatures=5),
        lambda: pseudo_log_likelihood(rbm, visible),
        lambda: estimated_log_likelihood(rbm, visible, found),
    ]
    for program in programs:
        with pytest.raises(ValueError, match=rf"`rbm` should have finite parameters. Found {value} in `weights`\."):
            program()


# --- likelihoods -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("units", [BERNOULLI, CATEGORICAL, GAUSSIAN], ids=lambda units: units["visible"])
def test_estimated_log_likelihood_has_the_ends_of_the_sandwich(units: dict) -> None:
    rbm = _rbm(units, 4)
    visible = _draws(rbm, 400)
    log_partition = sandwich(rbm, visible, inverse_temperatures=100, generator=seeded(1))
    found = estimated_log_likelihood(rbm, visible[:7], log_partition)
    exact = rbm.log_likelihood(visible[:7]).detach()
    truth = _log_partition(rbm)
    for value, log_z in zip(
        found, (log_partition.upper.estimate, log_partition.estimate, log_partition.lower.estimate), strict=True
    ):
        assert value.shape == (7,)
        assert not value.requires_grad
        assert (value - (exact + truth - log_z)).abs().max() < 1e-12
        assert (value - exact).abs().max() < 4 * log_partition.standard_error < 0.2


def test_what_is_no_reference_and_no_sandwich_is_called_so() -> None:
    rbm = _rbm()
    visible = _draws(rbm, 5)
    with pytest.raises(TypeError, match=r"^`reference` should be a tensor\. Found ndarray\.$"):
        ais(rbm, chains=5, inverse_temperatures=5, reference=np.zeros(3))
    found = sandwich(rbm, visible, inverse_temperatures=3)
    with pytest.raises(TypeError, match=r"^`log_partition` should be a Sandwich, .* Found LogPartition\.$"):
        estimated_log_likelihood(rbm, visible, found.lower)


def _pseudo_log_likelihood(rbm: RBM, visible: np.ndarray) -> np.ndarray:
    """Return it from the definition: the free energies of all states of each unit, given the others."""
    q = rbm.categories or 1
    total = np.zeros(len(visible))
    for first in range(0, rbm.n_columns, q):
        states = [[0.0], [1.0]] if q == 1 else np.eye(q)
        energies = []
        for state in states:
            changed = visible.copy()
            changed[:, first : first + q] = state
            energies.append(-_free_energy(rbm, changed))
        total += -_free_energy(rbm, visible) - logsumexp(energies, axis=0)
    return total


@on_all_devices
@pytest.mark.parametrize("scale", [0.5, 2.0, 300.0])
@pytest.mark.parametrize(
    "units", [BERNOULLI, CATEGORICAL, RECTIFIED], ids=lambda units: f"{units['visible']}-{units['hidden']}"
)
def test_pseudo_log_likelihood_asks_every_unit(units: dict, scale: float, device: str) -> None:
    if units is RECTIFIED and scale > 2:
        pytest.skip("counts in the hundreds are more than the witness sums over")
    rbm = _rbm(units, 5, 2 if units is RECTIFIED else 4, scale=scale, device=device)
    visible = _draws(_rbm(units, 5, 2), 20)
    found = pseudo_log_likelihood(rbm, visible.to(device))
    expected = _pseudo_log_likelihood(rbm, visible.numpy())
    assert found.shape == (20,)
    assert not found.requires_grad
    assert found.cpu().numpy() == pytest.approx(expected, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("largest", [1e9, 3.0, 1.0, 1e-3], ids=["all", "some", "few", "none"])
def test_pseudo_log_likelihood_does_not_depend_on_how_it_is_grouped(
    monkeypatch: pytest.MonkeyPatch, largest: float
) -> None:
    rbm = _rbm(n_visible=5, n_hidden=7, scale=0.3)
    visible = _draws(rbm, 20)
    monkeypatch.setitem(evaluation_module.LARGEST_LOG, torch.float64, largest)
    found = pseudo_log_likelihood(rbm, visible)
    assert found.numpy() == pytest.approx(_pseudo_log_likelihood(rbm, visible.numpy()), rel=1e-12)


@pytest.mark.parametrize("scale", [0.5, 5.0, 60.0])
def test_pseudo_log_likelihood_in_float32(scale: float) -> None:
    rbm = _rbm(n_visible=30, n_hidden=40, scale=scale)
    visible = _draws_of_a_wide_layer(rbm, 300)
    expected = pseudo_log_likelihood(rbm, visible)
    found = pseudo_log_likelihood(rbm.float(), visible.float())
    assert found.dtype == torch.float32
    assert (found - expected).abs().max() < 3e-6 * expected.abs().max()


def test_pseudo_log_likelihood_of_independent_units_is_their_likelihood() -> None:
    rbm = _rbm(n_visible=6)
    torch.nn.init.zeros_(rbm.weights)
    visible = _draws(rbm, 10)
    assert torch.allclose(pseudo_log_likelihood(rbm, visible), rbm.log_likelihood(visible), rtol=1e-12)


@pytest.mark.parametrize(
    ("units", "visible", "message"),
    [
        (
            GAUSSIAN,
            torch.zeros(4, 3),
            "`rbm` should have Bernoulli or categorical visible units, whose states can be summed. "
            "Found gaussian units, whose conditional density has no closed form.",
        ),
        (BERNOULLI, torch.full((4, 3), 0.5), "`visible` should be zeros and ones. Found 0.5."),
        (CATEGORICAL, torch.ones(4, 9), "`visible` should have one 1 in each group of 3."),
        (BERNOULLI, torch.zeros(0, 3), "`visible` should have shape (N, 3) with N > 0. Found (0, 3)."),
    ],
    ids=["gaussian", "probabilities", "categories", "empty"],
)
def test_pseudo_log_likelihood_refuses(units: dict, visible: Tensor, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        pseudo_log_likelihood(_rbm(units), visible.double())
    assert str(caught.value).startswith(message)


# --- reconstruction error ----------------------------------------------------------------------------------------


def test_reconstruction_error_is_that_of_one_step_there_and_back() -> None:
    rbm = _rbm(n_visible=5)
    visible = _draws(rbm, 6)
    w, b, c, _ = _parameters(rbm)
    v = visible.numpy()
    expected = ((v - expit(expit(v @ w + c) @ w.T + b)) ** 2).mean(1)
    found = reconstruction_error(rbm, visible)
    assert found.numpy() == pytest.approx(expected, rel=1e-12)
    assert not found.requires_grad


def test_reconstruction_error_of_real_numbers_is_in_their_units_squared() -> None:
    rbm = _rbm(GAUSSIAN, 5)
    visible = _draws(rbm, 6)
    w, b, c, variance = _parameters(rbm)
    v = visible.numpy()
    expected = ((v - b - expit((v / variance) @ w + c) @ w.T) ** 2).mean(1)
    assert reconstruction_error(rbm, visible).numpy() == pytest.approx(expected, rel=1e-12)


@pytest.mark.slow
def test_reconstruction_error_falls_while_the_likelihood_falls() -> None:
    data = bars_and_stripes(3).inputs
    rbm = RBM(9, 8, dtype=torch.float64, generator=seeded(0))
    trainer = FusedTrainer(rbm, batch_size=len(data), steps=1, generator=seeded(1))
    errors, likelihoods = [], []
    for updates in (3000, 9000):
        for _ in range(updates):
            trainer.step(data, learning_rate=0.2)
        errors.append(float(reconstruction_error(rbm, data).mean()))
        likelihoods.append(float(rbm.log_likelihood(data).detach().mean()))
    assert errors[1] < 0.9 * errors[0]
    assert likelihoods[1] < likelihoods[0] - 0.1
