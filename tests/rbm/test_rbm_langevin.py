"""Langevin moves of Gaussian units: exact when they are adjusted, off by the step size when not, and how they leak.

The witnesses are written in NumPy from the energies, without the code under test.
"""

import math
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from accelerator import ACCELERATOR
from contract import BlockCase, relative_error
from scipy.special import expit, logsumexp
from torch import Tensor, nn
from values import binary_states, seeded, summed

from toolkit import compare, unblock
from toolkit.rbm import (
    NEGATIVE_SAMPLES,
    PERSISTENT_CHAINS,
    RBM,
    cd_gradient,
    gibbs,
    gibbs_langevin,
    langevin_contrastive_divergence,
)

DEVICES = ["cpu", pytest.param(ACCELERATOR, marks=pytest.mark.gpu)]
NAMES = ["weights", "visible_bias", "hidden_bias", "visible_log_variance"]


def _parameters(n_visible: int = 3, n_hidden: int = 2, scale: float = 1.0) -> dict[str, nn.Parameter]:
    generator = seeded(0)
    shapes = {
        "weights": (n_visible, n_hidden),
        "visible_bias": (n_visible,),
        "hidden_bias": (n_hidden,),
        "visible_log_variance": (n_visible,),
    }
    values = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
    values["weights"] *= scale
    return {name: nn.Parameter(value) for name, value in values.items()}


def _machine(parameters: Mapping[str, Tensor]) -> RBM:
    rbm = RBM(*parameters["weights"].shape, visible="gaussian", dtype=torch.float64)
    for name, parameter in parameters.items():
        setattr(rbm, name, parameter)
    return rbm


def _numpy(parameters: Mapping[str, Tensor]) -> tuple[np.ndarray, ...]:
    return tuple(parameters[name].detach().cpu().numpy() for name in NAMES)


def _mixture(parameters: Mapping[str, Tensor]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the machine as what it is, a mixture of normals: weights (S,), means (S, V), deviations (V,)."""
    w, b, c, z = _numpy(parameters)
    hidden = binary_states(len(c))
    coupling, variance = hidden @ w.T, np.exp(z)
    log_weight = hidden @ c + (coupling * (b + coupling / 2) / variance).sum(1)
    return np.exp(log_weight - logsumexp(log_weight)), b + coupling, np.sqrt(variance)


def _exact_draws(parameters: Mapping[str, Tensor], n: int, seed: int = 2) -> np.ndarray:
    p, means, deviation = _mixture(parameters)
    rng = np.random.default_rng(seed)
    return means[rng.choice(len(p), size=n, p=p)] + deviation * rng.standard_normal((n, len(deviation)))


def _cells(parameters: Mapping[str, Tensor], visible: np.ndarray, n_draws: int = 400_000) -> tuple[np.ndarray, float]:
    """Return counts of the visible units in cells of space, whose edges are quantiles of other exact draws."""
    reference = _exact_draws(parameters, n_draws, seed=3)
    edges = np.quantile(reference, [0.25, 0.5, 0.75], axis=0)

    def count(rows: np.ndarray) -> np.ndarray:
        place = sum(4**i * np.searchsorted(edges[:, i], rows[:, i]) for i in range(rows.shape[1]))
        return np.bincount(place, minlength=4 ** rows.shape[1])

    return count(visible), count(reference) / n_draws


def _sigmas(parameters: Mapping[str, Tensor], visible: np.ndarray) -> tuple[float, float]:
    """Return the total variation over its floor, and chi^2 in its sigmas, both draws counted."""
    n_draws = 400_000
    found, p = _cells(parameters, visible, n_draws)
    n = len(visible)
    distance = 0.5 * np.abs(found / n - p).sum()
    floor = 0.5 * np.sqrt(2 * p * (1 - p) / np.pi * (1 / n + 1 / n_draws)).sum()
    chi2 = ((found / n - p) ** 2 / (p * (1 / n + 1 / n_draws))).sum()
    return distance / floor, (chi2 - (len(p) - 1)) / math.sqrt(2 * (len(p) - 1))


# --- the distribution ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("hidden", ["drawn", "summed_out"])
@pytest.mark.parametrize(("steps", "moves"), [(1, 1), (4, 1), (2, 3)])
@pytest.mark.parametrize("size", [0.3, 1.5])
def test_adjusted_chains_from_exact_draws_stay_there(size, steps, moves, hidden, device):
    parameters = _parameters(scale=1.5)
    start = torch.tensor(_exact_draws(parameters, 20_000), device=device)
    with torch.no_grad():
        end, accepted = gibbs_langevin(
            _machine(parameters).to(device),
            start,
            steps=steps,
            step_size=size,
            moves=moves,
            hidden=hidden,
            adjusted=True,
            generator=seeded(4, device),
        )
    assert 0.1 < accepted < 0.999
    assert not torch.equal(start, end)
    distance, sigmas = _sigmas(parameters, end.cpu().numpy())
    assert distance < 4
    assert abs(sigmas) < 5


@pytest.mark.slow
@pytest.mark.parametrize("hidden", ["drawn", "summed_out"])
@pytest.mark.parametrize("steps", [1, 4])
def test_a_million_adjusted_chains_stay_there(steps, hidden):
    parameters = _parameters(scale=1.5)
    start = torch.tensor(_exact_draws(parameters, 1_000_000))
    with torch.no_grad():
        end, _ = gibbs_langevin(
            _machine(parameters),
            start,
            steps=steps,
            step_size=1.0,
            hidden=hidden,
            adjusted=True,
            generator=seeded(4),
        )
    distance, sigmas = _sigmas(parameters, end.numpy())
    assert distance < 4
    assert abs(sigmas) < 5


@pytest.mark.parametrize("hidden", ["drawn", "summed_out"])
def test_chains_that_are_not_adjusted_drift(hidden):
    """The same test sees what the adjustment is for."""
    parameters = _parameters(scale=1.5)
    start = torch.tensor(_exact_draws(parameters, 20_000))
    with torch.no_grad():
        end, accepted = gibbs_langevin(
            _machine(parameters), start, steps=4, step_size=1.5, hidden=hidden, generator=seeded(4)
        )
    assert accepted == 1
    assert _sigmas(parameters, end.numpy())[1] > 20


@pytest.mark.parametrize("hidden", ["drawn", "summed_out"])
@pytest.mark.parametrize("size", [0.5, 1.0, 2.0, 3.0])
def test_variance_without_weights_is_too_large_by_the_closed_form(size, hidden):
    parameters = _parameters(scale=0.0)
    n = 100_000
    start = torch.tensor(_exact_draws(parameters, n))
    with torch.no_grad():
        end, _ = gibbs_langevin(
            _machine(parameters), start, steps=40, step_size=size, hidden=hidden, generator=seeded(4)
        )
    _, bias, _, log_variance = _numpy(parameters)
    excess = end.numpy().var(0) / np.exp(log_variance) * (1 - size / 4)
    assert (np.abs(excess - 1) < 5 * math.sqrt(2 / n)).all()
    assert (np.abs(end.numpy().mean(0) - bias) < 5 * end.numpy().std(0) / math.sqrt(n)).all()


@pytest.mark.slow
@pytest.mark.parametrize("hidden", ["drawn", "summed_out"])
def test_bias_is_of_the_order_of_the_step_size(hidden):
    """With weights too: a quarter of the step size, about a quarter of the excess of the second moment."""
    parameters, n = _parameters(), 60_000
    p, means, deviation = _mixture(parameters)
    exact = p @ means**2 + deviation**2
    excess = []
    for size in (1.2, 0.3):
        start = torch.tensor(_exact_draws(parameters, n))
        with torch.no_grad():
            end, _ = gibbs_langevin(
                _machine(parameters),
                start,
                steps=int(24 / size),
                step_size=size,
                hidden=hidden,
                generator=seeded(5),
            )
        excess.append(((end.numpy() ** 2).mean(0) - exact).sum() / exact.sum())
    assert excess[0] > 0.05
    assert 2.5 < excess[0] / excess[1] < 8


def test_moves_of_the_free_energy_go_down_its_gradient():
    parameters = _parameters()
    rbm, visible = _machine(parameters), torch.randn(5, 3, generator=seeded(3), dtype=torch.float64)
    leaf = visible.clone().requires_grad_()
    slope = torch.autograd.grad(rbm.free_energy(leaf).sum(), leaf)[0]
    size = 0.4
    with torch.no_grad():
        moved, _ = gibbs_langevin(rbm, visible, steps=1, step_size=size, hidden="summed_out", generator=seeded(6))
        variance = rbm.visible_log_variance.exp()
        noise = torch.empty_like(visible).normal_(generator=seeded(6))
        expected = visible - size / 2 * variance * slope + (size * variance).sqrt() * noise
    torch.testing.assert_close(moved, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.portable
@pytest.mark.parametrize("hidden", ["drawn", "summed_out"])
def test_probability_of_a_move_is_that_of_the_energies(hidden):
    """The rule from densities: exp(-U(v') + U(v)) q(v | v') / q(v' | v), where the code has less to compute."""
    parameters, size = _parameters(), 1.3
    w, b, c, z = _numpy(parameters)
    variance = np.exp(z)
    visible = torch.randn(50, 3, generator=seeded(3), dtype=torch.float64)
    generator = seeded(6)
    v = visible.numpy()
    if hidden == "drawn":
        h = (torch.rand(50, 2, generator=generator, dtype=torch.float32).numpy() < expit(v / variance @ w + c)).astype(
            float
        )
    noise = torch.empty_like(visible).normal_(generator=generator).numpy()

    def mean(v):
        return b + (h if hidden == "drawn" else expit(v / variance @ w + c)) @ w.T

    def density_of_move(to, start):
        return -((to - start - size / 2 * (mean(start) - start)) ** 2 / (2 * size * variance))

    def log_p(v):
        if hidden == "drawn":
            return -((v - mean(v)) ** 2) / (2 * variance)
        of_hidden = np.logaddexp(0, v / variance @ w + c).sum(1)
        return (-((v - b) ** 2) / (2 * variance)).sum(1) + of_hidden

    proposal = v + size / 2 * (mean(v) - v) + np.sqrt(size * variance) * noise
    moves = density_of_move(v, proposal) - density_of_move(proposal, v)
    log_ratio = log_p(proposal) - log_p(v) + (moves if hidden == "drawn" else moves.sum(1))
    probability = np.exp(np.minimum(log_ratio, 0))
    shape = (50, 3) if hidden == "drawn" else (50, 1)
    uniform = torch.rand(shape, generator=generator, dtype=torch.float64).numpy()
    expected = np.where(uniform < probability.reshape(shape), proposal, v)
    with torch.no_grad():
        end, accepted = gibbs_langevin(
            _machine(parameters),
            visible,
            steps=1,
            step_size=size,
            hidden=hidden,
            adjusted=True,
            generator=seeded(6),
        )
    np.testing.assert_allclose(end.numpy(), expected, rtol=1e-12, atol=1e-14)  # sums of terms of order 1
    assert accepted.item() == pytest.approx(probability.mean(), rel=1e-12)
    assert 0.1 < probability.mean() < 0.95


def test_units_are_accepted_one_by_one_however_many_there_are():
    rates = {}
    for n_visible in (10, 1000):
        rbm = RBM(n_visible, 4, visible="gaussian", dtype=torch.float64, generator=seeded(0))
        for hidden in ("drawn", "summed_out"):
            start = torch.randn(50, n_visible, generator=seeded(1), dtype=torch.float64)
            with torch.no_grad():
                _, rate = gibbs_langevin(
                    rbm, start, steps=5, step_size=1.0, hidden=hidden, adjusted=True, generator=seeded(2)
                )
            rates[n_visible, hidden] = rate.item()
    assert rates[1000, "drawn"] > 0.85
    assert rates[10, "drawn"] == pytest.approx(rates[1000, "drawn"], abs=0.02)
    assert rates[1000, "summed_out"] < 0.2


@pytest.mark.parametrize("size", [0.5, 1.0, 2.0, 3.0])
def test_gibbs_draws_come_to_the_other_mode_no_later_than_moves(size):
    distance = 4.0
    rbm = RBM(1, 1, visible="gaussian", dtype=torch.float64)
    with torch.no_grad():
        rbm.weights.fill_(distance)
        rbm.visible_bias.fill_(-distance / 2)  # modes at -2 and 2, of the same probability
        start = -distance / 2 + torch.randn(4000, 1, generator=seeded(1), dtype=torch.float64)
        drawn = gibbs(rbm, start, steps=12, generator=seeded(2))
        moved, _ = gibbs_langevin(rbm, start, steps=12, step_size=size, adjusted=True, generator=seeded(3))
    arrived = [(end > 0).double().mean().item() for end in (drawn, moved)]
    assert arrived[0] > arrived[1] - 0.02
    assert 0.05 < arrived[1] < 0.5


def test_step_sizes_may_differ_from_step_to_step():
    rbm, start, generator = _machine(_parameters()), torch.zeros(5, 3, dtype=torch.float64), seeded(1)
    with torch.no_grad():
        end, _ = gibbs_langevin(rbm, start, steps=3, step_size=[1.0, 0.5, 0.1], moves=2, generator=seeded(1))
        for size in (1.0, 0.5, 0.1):
            start, _ = gibbs_langevin(rbm, start, steps=1, step_size=size, moves=2, generator=generator)
    assert torch.equal(start, end)


@pytest.mark.parametrize("adjusted", [False, True], ids=["plain", "adjusted"])
@pytest.mark.parametrize("hidden", ["drawn", "summed_out"])
def test_value_is_the_same_bits_with_and_without_a_graph(hidden, adjusted):
    rbm, start = _machine(_parameters()), torch.zeros(50, 3, dtype=torch.float64)
    options = {"steps": 3, "step_size": 1.0, "moves": 2, "hidden": hidden, "adjusted": adjusted}
    with_graph, rate = gibbs_langevin(rbm, start, **options, generator=seeded(1))
    with torch.no_grad():
        without, _ = gibbs_langevin(rbm, start, **options, generator=seeded(1))
    assert with_graph.requires_grad
    assert not rate.requires_grad
    assert torch.equal(with_graph.detach(), without)


# --- the block contract -------------------------------------------------------------------------------------------

DATA = torch.randn(6, 3, generator=seeded(11), dtype=torch.float64)
STARTS = torch.randn(5, 3, generator=seeded(12), dtype=torch.float64)
SIZES = [1.0, 0.4]
MOVES = 2


def _free_energy_gradient(parameters: Mapping[str, Tensor], visible: np.ndarray) -> dict[str, Tensor]:
    """Gradient of the mean free energy by the parameters, the units held."""
    w, b, c, z = _numpy(parameters)
    n, variance = len(visible), np.exp(z)
    hidden = expit(visible / variance @ w + c)
    found = (
        -(visible / variance).T @ hidden / n,
        -((visible - b) / variance).mean(0),
        -hidden.mean(0),
        (-((visible - b) ** 2) / 2 + visible * (hidden @ w.T)).mean(0) / variance,
    )
    return dict(zip(NAMES, map(torch.tensor, found), strict=True))


def _run(parameters: Mapping[str, Tensor], visible: np.ndarray, updates: int, adjusted: bool) -> list[list[tuple]]:
    """Return for each update, for each move: hidden units, noise, what was accepted, its size, and units after it."""
    w, b, c, z = _numpy(parameters)
    variance, generator, trace = np.exp(z), seeded(1), []
    for _ in range(updates):
        trace.append([])
        for size in SIZES:
            uniform = torch.rand(len(visible), len(c), generator=generator, dtype=torch.float32).numpy()
            hidden = (uniform < expit(visible / variance @ w + c)).astype(float)
            mean = b + hidden @ w.T
            for _ in range(MOVES):
                noise = torch.empty(visible.shape, dtype=torch.float64).normal_(generator=generator).numpy()
                following = visible + size / 2 * (mean - visible) + np.sqrt(size * variance) * noise
                accepted = np.ones(visible.shape, dtype=bool)
                if adjusted:
                    ratio = np.exp(size / 8 * ((visible - mean) ** 2 - (following - mean) ** 2) / variance)
                    accepted = torch.rand(visible.shape, generator=generator, dtype=torch.float64).numpy() < ratio
                following = np.where(accepted, following, visible)
                trace[-1].append((hidden, noise, accepted, size, following))
                visible = following
    return trace


def _pull_back(parameters: Mapping[str, Tensor], moves: list[tuple], cotangent: np.ndarray) -> dict[str, Tensor]:
    """Pull a cotangent back through moves: hidden units are draws of zeros and ones, and pass nothing on."""
    w, b, c, z = _numpy(parameters)
    bars = {name: np.zeros_like(value) for name, value in zip(NAMES, (w, b, c, z), strict=True)}
    deviation = np.exp(z / 2)
    for hidden, noise, accepted, size, _ in reversed(moves):
        moved = np.where(accepted, cotangent, 0)
        bars["weights"] += size / 2 * moved.T @ hidden
        bars["visible_bias"] += size / 2 * moved.sum(0)
        bars["visible_log_variance"] += (moved * math.sqrt(size) * noise * deviation / 2).sum(0)
        cotangent = np.where(accepted, (1 - size / 2) * cotangent, cotangent)
    return {name: torch.tensor(value) for name, value in bars.items()}


def _slope(parameters: Mapping[str, Tensor], visible: np.ndarray) -> np.ndarray:
    """Derivative of the mean free energy by the visible units."""
    w, b, c, z = _numpy(parameters)
    variance = np.exp(z)
    return ((visible - b) - expit(visible / variance @ w + c) @ w.T) / variance / len(visible)


def _two_updates(adjusted: bool, hidden: str = "drawn"):
    def loss(parameters: Mapping[str, Tensor]) -> Tensor:
        """Two updates, then the mean free energy of where the chains are: a user's own monitor."""
        rbm, generator, chains, losses = _machine(parameters), seeded(1), STARTS, []
        for _ in range(2):
            part, chains = langevin_contrastive_divergence(
                rbm,
                DATA,
                chains,
                steps=len(SIZES),
                step_size=SIZES,
                moves=MOVES,
                hidden=hidden,
                adjusted=adjusted,
                generator=generator,
            )
            losses.append(part)
        return losses[0] + losses[1] + rbm.free_energy(chains).mean()

    return loss


def _blocked(adjusted: bool):
    def gradient(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        ends = [update[-1][-1] for update in _run(parameters, STARTS.numpy(), 2, adjusted)]
        positive = _free_energy_gradient(parameters, DATA.numpy())
        negative = [{k: -v for k, v in _free_energy_gradient(parameters, end).items()} for end in ends]
        return summed(positive, positive, *negative, _free_energy_gradient(parameters, ends[1]))

    return gradient


def _with_samples_open(adjusted: bool):
    def gradient(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        updates = _run(parameters, STARTS.numpy(), 2, adjusted)
        leaks = [_pull_back(parameters, moves, -_slope(parameters, moves[-1][-1])) for moves in updates]
        return summed(_blocked(adjusted)(parameters), *leaks)

    return gradient


def _with_chains_open(adjusted: bool):
    def gradient(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        first, second = _run(parameters, STARTS.numpy(), 2, adjusted)
        through = _pull_back(parameters, [*first, *second], _slope(parameters, second[-1][-1]))
        return summed(_blocked(adjusted)(parameters), through)

    return gradient


def _summed_out(parameters: Mapping[str, Tensor]) -> Tensor:
    loss, _ = langevin_contrastive_divergence(
        _machine(parameters), DATA, STARTS, steps=3, step_size=0.8, hidden="summed_out", generator=seeded(1)
    )
    return loss


def _summed_out_blocked(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    rbm = _machine(parameters)
    with torch.no_grad():
        moved, _ = gibbs_langevin(rbm, STARTS, steps=3, step_size=0.8, hidden="summed_out", generator=seeded(1))
    return cd_gradient(rbm, DATA, moved)


BLOCK_CASES: list[BlockCase] = [
    *(
        BlockCase(
            id=f"langevin-{block.name.removeprefix('rbm.')}-{'adjusted' if adjusted else 'plain'}",
            block=block,
            parameters=_parameters,
            loss=_two_updates(adjusted),
            blocked=_blocked(adjusted),
            opened=opened(adjusted),
        )
        for block, opened in ((NEGATIVE_SAMPLES, _with_samples_open), (PERSISTENT_CHAINS, _with_chains_open))
        for adjusted in (False, True)
    ),
    BlockCase(
        id="langevin-summed-out",  # a smooth path, so that finite differences are a witness
        block=NEGATIVE_SAMPLES,
        parameters=_parameters,
        loss=_summed_out,
        blocked=_summed_out_blocked,
    ),
]


def test_the_trace_of_the_witness_refuses_some_moves():
    updates = _run(_parameters(), STARTS.numpy(), 2, adjusted=True)
    accepted = np.stack([move[2] for moves in updates for move in moves])
    assert 0 < accepted.mean() < 1


def test_leak_is_large():
    """A path that stays differentiable leaks much."""
    rbm = _machine(_parameters())
    draws = seeded(1)

    def loss() -> Tensor:
        return langevin_contrastive_divergence(rbm, DATA, STARTS, steps=10, step_size=0.5, generator=draws)[0]

    effects = {effect.name: effect for effect in compare(loss, rbm).effects}
    effect = effects["rbm.negative_samples"]
    assert effect.verdict.kind == "partial"
    assert effect.leak > 0.3


def test_surrogate_gradient_is_the_closed_form():
    rbm = _machine(_parameters())
    loss, chains = langevin_contrastive_divergence(
        rbm, DATA, STARTS, steps=4, step_size=0.5, adjusted=True, generator=seeded(1)
    )
    names, parameters = zip(*rbm.named_parameters(), strict=True)
    found = dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))
    assert relative_error(found, cd_gradient(rbm, DATA, chains)) < 1e-12
    assert not chains.requires_grad


def test_no_graph_is_built_while_both_blocks_are_in_place():
    rbm = _machine(_parameters())

    def saved(steps: int, *opened) -> int:
        kept = []
        with unblock(*opened), torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
            langevin_contrastive_divergence(
                rbm, DATA, STARTS, steps=steps, step_size=0.5, adjusted=True, generator=seeded(1)
            )
        return len(kept)

    assert saved(1) == saved(5)
    assert saved(1, NEGATIVE_SAMPLES) < saved(5, NEGATIVE_SAMPLES)


# --- half precision -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("hidden", ["drawn", "summed_out"])
def test_rate_in_half_precision_counts_every_move(dtype, hidden):
    rbm, start = RBM(2, 1, visible="gaussian", dtype=dtype), torch.zeros(100, 2, dtype=dtype)
    options = {"steps": 1000, "moves": 3, "step_size": 1e-3, "hidden": hidden, "adjusted": True}
    _, found = gibbs_langevin(rbm, start, generator=seeded(1), **options)
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(1, abs=3e-3)
    assert not found.requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_moves_in_half_precision_that_are_hardly_accepted_hardly_are(dtype):
    rbm, n, size, far = RBM(10, 1, visible="gaussian", dtype=dtype), 1_000_000, 3.9, 3.6
    with torch.no_grad():
        rbm.weights.zero_()
        start = torch.zeros(n // 10, 10, dtype=dtype)
        end, _ = gibbs_langevin(rbm, start, steps=1, step_size=size, adjusted=True, generator=seeded(1))
    # Proposals are normal with this variance, and accepted with e^(-size v^2 / 8).
    variance = 1 / (1 / size + size / 4)
    expected = n * math.sqrt(variance / size) * math.erfc(far / math.sqrt(2 * variance))
    assert abs((end.abs() > far).sum().item() - expected) < 5 * math.sqrt(expected)


# --- arguments ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 0}, r"`steps` should be a positive integer\. Found 0\."),
        ({"moves": 0}, r"`moves` should be a positive integer\. Found 0\."),
        ({"step_size": 0.0}, r"`step_size` should be between 0 and 4\. Found 0\.0\."),
        ({"step_size": 4}, r"`step_size` should be between 0 and 4\. Found 4\."),
        ({"step_size": float("nan")}, r"`step_size` should be between 0 and 4\. Found nan\."),
        ({"step_size": [0.1, 0.2]}, r"`step_size` should be one number, or 3, one for each step\. Found 2\."),
        ({"step_size": torch.full((5,), 0.1)}, r"`step_size` should be one number, or 3, .*\. Found 5\."),
        ({"hidden": "mean"}, r"`hidden` should be one of 'drawn', 'summed_out'\. Found 'mean'\."),
        ({"visible": torch.zeros(2, 4).double()}, r"`visible` should have shape \(\*, 3\)\. Found \(2, 4\)\."),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_wrong_arguments_are_refused(change, message):
    arguments = {"visible": torch.zeros(2, 3, dtype=torch.float64), "steps": 3, "step_size": 0.5, **change}
    with pytest.raises(ValueError, match=message):
        gibbs_langevin(_machine(_parameters()), arguments.pop("visible"), **arguments)


@pytest.mark.parametrize("wrong", ["small", [0.1, None, 0.1], None, torch.full((3, 2), 0.1)], ids=repr)
def test_step_sizes_that_are_no_numbers_are_refused(wrong):
    with pytest.raises(ValueError, match=r"`step_size` should be between 0 and 4\. Found "):
        gibbs_langevin(_machine(_parameters()), torch.zeros(2, 3).double(), steps=3, step_size=wrong)


def test_step_sizes_may_be_a_tensor():
    rbm, start = _machine(_parameters()), torch.zeros(2, 3).double()
    for sizes in ([1.0, 0.5, 0.25], 0.5):
        listed, found = (
            gibbs_langevin(rbm, start, steps=3, step_size=size, generator=seeded(1))[0]
            for size in (sizes, torch.tensor(sizes))
        )
        assert torch.equal(listed, found)


def test_other_units_are_refused():
    with pytest.raises(ValueError, match=r"`rbm` should have Gaussian visible units\. Found Bernoulli units\."):
        gibbs_langevin(RBM(3, 2), torch.zeros(2, 3), steps=1, step_size=0.5)
    with pytest.raises(ValueError, match=r"`rbm` should have Gaussian visible units"):
        langevin_contrastive_divergence(RBM(3, 2), torch.zeros(2, 3), torch.zeros(2, 3), steps=1, step_size=0.5)
    with pytest.raises(ValueError, match=r"`chains` should have shape \(N, 3\)"):
        langevin_contrastive_divergence(_machine(_parameters()), DATA, torch.zeros(2, 4), steps=1, step_size=0.5)
