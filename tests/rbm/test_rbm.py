"""Restricted Boltzmann machines: enumeration as the oracle, and what leaks through the negative samples.

The witnesses are written in NumPy, without autograd and without the code under test.
"""

import itertools
import math
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from contract import BlockCase, finite_differences, relative_error
from scipy.special import expit
from torch import Tensor, nn
from values import binary_states, seeded, summed

from toolkit import compare, unblock
from toolkit.datasets import bars_and_stripes
from toolkit.gradients import measure_memory
from toolkit.rbm import (
    ENUMERABLE_UNITS,
    NEGATIVE_SAMPLES,
    PERSISTENT_CHAINS,
    RBM,
    STRAIGHT_THROUGH,
    Bernoulli,
    FusedTrainer,
    base_rate_bias,
    cd_gradient,
    contrastive_divergence,
    gibbs,
    likelihood_gradient,
    persistent_contrastive_divergence,
)
from toolkit.rbm.chains.units import straight_through
from toolkit.rbm.machine.layers import (
    draw_bernoulli,
)

CHAINS = ["sampled", "mean_field", "straight_through"]
NAMES = ["weights", "visible_bias", "hidden_bias"]


# --- machines and witnesses -------------------------------------------------------------------------------------


def _parameters(n_visible: int = 4, n_hidden: int = 3, scale: float = 1.0, seed: int = 0) -> dict[str, nn.Parameter]:
    """Parameters without any symmetry: a transposed or swapped formula gives another number."""
    generator = seeded(seed)
    shapes = {"weights": (n_visible, n_hidden), "visible_bias": (n_visible,), "hidden_bias": (n_hidden,)}
    return {
        name: nn.Parameter(scale * torch.randn(shape, generator=generator, dtype=torch.float64))
        for name, shape in shapes.items()
    }


def _machine(parameters: Mapping[str, Tensor]) -> RBM:
    rbm = RBM(*parameters["weights"].shape, dtype=torch.float64)
    for name, parameter in parameters.items():
        setattr(rbm, name, parameter)
    return rbm


def _rbm(n_visible: int = 4, n_hidden: int = 3, **kwargs) -> RBM:
    return _machine(_parameters(n_visible, n_hidden, **kwargs))


def _binary(n: int, n_units: int, seed: int = 7) -> Tensor:
    return (torch.rand(n, n_units, generator=seeded(seed), dtype=torch.float64) < 0.4).double()


def _numpy(parameters: Mapping[str, Tensor]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    w, b, c = (parameters[name].detach().numpy() for name in NAMES)
    return w, b, c


def _joint(rbm: RBM) -> np.ndarray:
    """Return the table p(v, h), (2^V, 2^H), from the definition: one energy for every joint state."""
    w, b, c = _numpy(dict(rbm.named_parameters()))
    table = np.empty((2 ** len(b), 2 ** len(c)))
    for (i, v), (j, h) in itertools.product(enumerate(binary_states(len(b))), enumerate(binary_states(len(c)))):
        table[i, j] = math.exp(sum(v * b) + sum(h * c) + sum(v[i] * w[i, j] * h[j] for i, j in np.ndindex(w.shape)))
    return table


def _as_tensors(w: np.ndarray, b: np.ndarray, c: np.ndarray) -> dict[str, Tensor]:
    return {"weights": torch.tensor(w), "visible_bias": torch.tensor(b), "hidden_bias": torch.tensor(c)}


def _free_energy_gradient(parameters: Mapping[str, Tensor], visible: np.ndarray) -> dict[str, Tensor]:
    """Gradient of the mean free energy by the parameters."""
    w, _, c = _numpy(parameters)
    hidden = expit(visible @ w + c)
    return _as_tensors(-visible.T @ hidden / len(visible), -visible.mean(0), -hidden.mean(0))


def _run_chain(
    parameters: Mapping[str, Tensor], start: np.ndarray, steps: int, chain: str, generator: torch.Generator
) -> list[tuple[np.ndarray, ...]]:
    """Return for every step the visible units before, the means and values of the hidden, and of the visible units."""
    w, b, c = _numpy(parameters)

    def pass_on(mean: np.ndarray) -> np.ndarray:
        if chain == "mean_field":
            return mean
        return (torch.rand(mean.shape, generator=generator, dtype=torch.float32).numpy() < mean).astype(float)

    trace, visible = [], start
    for _ in range(steps):
        hidden_mean = expit(visible @ w + c)
        hidden = pass_on(hidden_mean)
        visible_mean = expit(hidden @ w.T + b)
        following = pass_on(visible_mean)
        trace.append((visible, hidden_mean, hidden, visible_mean, following))
        visible = following
    return trace


def _pull_back(
    parameters: Mapping[str, Tensor], trace: list[tuple[np.ndarray, ...]], cotangent: np.ndarray
) -> dict[str, Tensor]:
    """Pull a cotangent of the last visible units back through a chain whose units have the derivative of the mean."""
    w, b, c = _numpy(parameters)
    w_bar, b_bar, c_bar = np.zeros_like(w), np.zeros_like(b), np.zeros_like(c)
    for visible, hidden_mean, hidden, visible_mean, _ in reversed(trace):
        through_visible = cotangent * visible_mean * (1 - visible_mean)
        through_hidden = (through_visible @ w) * hidden_mean * (1 - hidden_mean)
        w_bar += through_visible.T @ hidden + visible.T @ through_hidden
        b_bar += through_visible.sum(0)
        c_bar += through_hidden.sum(0)
        cotangent = through_hidden @ w.T
    return _as_tensors(w_bar, b_bar, c_bar)


def _slope_of_mean_free_energy(parameters: Mapping[str, Tensor], visible: np.ndarray) -> np.ndarray:
    """Derivative of the mean free energy by the visible units: a cotangent for `_pull_back`."""
    w, b, c = _numpy(parameters)
    return -(b + expit(visible @ w + c) @ w.T) / len(visible)


def _cd_witness(parameters: Mapping[str, Tensor], data: np.ndarray, negative: np.ndarray) -> dict[str, Tensor]:
    positive, other = _free_energy_gradient(parameters, data), _free_energy_gradient(parameters, negative)
    return {name: positive[name] - other[name] for name in positive}


def _leak_witness(parameters: Mapping[str, Tensor], trace: list[tuple[np.ndarray, ...]]) -> dict[str, Tensor]:
    """What flows from minus the mean free energy of the negative samples into the chain."""
    return _pull_back(parameters, trace, -_slope_of_mean_free_energy(parameters, trace[-1][-1]))


# --- the block contract -------------------------------------------------------------------------------------------

DATA = _binary(6, 4)
STARTS = _binary(5, 4, seed=8)  # persistent chains: not as many as data


def _cd_case(chain: str) -> BlockCase:
    def trace(parameters):
        return _run_chain(parameters, DATA.numpy(), 2, chain, seeded(1))

    def loss(parameters):
        return contrastive_divergence(_machine(parameters), DATA, steps=2, chain=chain, generator=seeded(1))

    def blocked(parameters):
        return _cd_witness(parameters, DATA.numpy(), trace(parameters)[-1][-1])

    def opened(parameters):
        leak = _leak_witness(parameters, trace(parameters))
        return blocked(parameters) if chain == "sampled" else summed(blocked(parameters), leak)

    return BlockCase(
        id=f"cd-{chain}", block=NEGATIVE_SAMPLES, parameters=_parameters, loss=loss, blocked=blocked, opened=opened
    )


def _two_updates(parameters: Mapping[str, Tensor], chain: str = "straight_through") -> Tensor:
    """Two updates of persistent chains, then the mean free energy of where they are: a user's own monitor."""
    rbm, generator, chains, losses = _machine(parameters), seeded(1), STARTS, []
    for _ in range(2):
        loss, chains = persistent_contrastive_divergence(rbm, DATA, chains, steps=1, chain=chain, generator=generator)
        losses.append(loss)
    return losses[0] + losses[1] + rbm.free_energy(chains).mean()


def _two_updates_blocked(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    first, second = _run_chain(parameters, STARTS.numpy(), 2, "straight_through", seeded(1))
    return summed(
        _cd_witness(parameters, DATA.numpy(), first[-1]),
        _cd_witness(parameters, DATA.numpy(), second[-1]),
        _free_energy_gradient(parameters, second[-1]),
    )


def _two_updates_with_samples_open(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    first, second = _run_chain(parameters, STARTS.numpy(), 2, "straight_through", seeded(1))
    # The second update's samples depend on the parameters through its own step alone.
    return summed(
        _two_updates_blocked(parameters), _leak_witness(parameters, [first]), _leak_witness(parameters, [second])
    )


def _two_updates_with_chains_open(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    trace = _run_chain(parameters, STARTS.numpy(), 2, "straight_through", seeded(1))
    slope = _slope_of_mean_free_energy(parameters, trace[-1][-1])
    return summed(_two_updates_blocked(parameters), _pull_back(parameters, trace, slope))


def _at_the_chains_end(parameters: Mapping[str, Tensor]) -> Tensor:
    moved = gibbs(_machine(parameters), DATA, steps=2, chain="straight_through", generator=seeded(1))
    return _machine(parameters).free_energy(moved).mean()


def _at_the_chains_end_straight_through(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    trace = _run_chain(parameters, DATA.numpy(), 2, "straight_through", seeded(1))
    end = trace[-1][-1]
    through_the_chain = _pull_back(parameters, trace, _slope_of_mean_free_energy(parameters, end))
    return summed(_free_energy_gradient(parameters, end), through_the_chain)


def _at_the_chains_end_sampled(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    trace = _run_chain(parameters, DATA.numpy(), 2, "straight_through", seeded(1))
    return _free_energy_gradient(parameters, trace[-1][-1])


BLOCK_CASES: list[BlockCase] = [
    *(_cd_case(chain) for chain in CHAINS),
    BlockCase(
        id="pcd-negative-samples",
        block=NEGATIVE_SAMPLES,
        parameters=_parameters,
        loss=_two_updates,
        blocked=_two_updates_blocked,
        opened=_two_updates_with_samples_open,
    ),
    BlockCase(
        id="pcd-persistent-chains",
        block=PERSISTENT_CHAINS,
        parameters=_parameters,
        loss=_two_updates,
        blocked=_two_updates_blocked,
        opened=_two_updates_with_chains_open,
    ),
    BlockCase(
        id="straight-through",
        block=STRAIGHT_THROUGH,
        parameters=_parameters,
        loss=_at_the_chains_end,
        blocked=_at_the_chains_end_straight_through,
        opened=_at_the_chains_end_sampled,
    ),
]


def _gradient(loss: Tensor, rbm: RBM) -> dict[str, Tensor]:
    names, parameters = zip(*rbm.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


def _norm(tree: Mapping[str, Tensor]) -> float:
    return math.sqrt(sum(float(value.square().sum()) for value in tree.values()))


# --- the model, by enumeration of all joint states ----------------------------------------------------------------

SIZES = [pytest.param(4, 3, id="hidden-smaller"), pytest.param(3, 4, id="visible-smaller")]


@pytest.mark.parametrize(("n_visible", "n_hidden"), SIZES)
class TestEnumeration:
    def test_energy(self, n_visible, n_hidden):
        rbm = _rbm(n_visible, n_hidden)
        v, h = torch.tensor(binary_states(n_visible)), torch.tensor(binary_states(n_hidden))
        expected = -np.log(_joint(rbm))
        np.testing.assert_allclose(rbm.energy(v[:, None], h).detach(), expected, rtol=0, atol=1e-13)

    def test_free_energy_sums_hidden_states_out(self, n_visible, n_hidden):
        rbm = _rbm(n_visible, n_hidden)
        found = rbm.free_energy(torch.tensor(binary_states(n_visible)))
        np.testing.assert_allclose(found.detach(), -np.log(_joint(rbm).sum(1)), rtol=0, atol=1e-13)
        assert torch.equal(rbm(torch.tensor(binary_states(n_visible))), found)

    def test_log_partition_and_log_likelihood(self, n_visible, n_hidden):
        rbm = _rbm(n_visible, n_hidden)
        joint = _joint(rbm)
        assert rbm.log_partition().item() == pytest.approx(math.log(joint.sum()), abs=1e-13)
        found = rbm.log_likelihood(torch.tensor(binary_states(n_visible)))
        np.testing.assert_allclose(found.detach(), np.log(joint.sum(1) / joint.sum()), rtol=0, atol=1e-13)

    def test_conditional_means(self, n_visible, n_hidden):
        rbm = _rbm(n_visible, n_hidden)
        joint = _joint(rbm)
        v, h = binary_states(n_visible), binary_states(n_hidden)
        hidden = rbm.hidden_mean(torch.tensor(v)).detach()
        visible = rbm.visible_mean(torch.tensor(h)).detach()
        np.testing.assert_allclose(hidden, joint @ h / joint.sum(1, keepdims=True), rtol=1e-13)
        np.testing.assert_allclose(visible, joint.T @ v / joint.T.sum(1, keepdims=True), rtol=1e-13)

    def test_model_statistics(self, n_visible, n_hidden):
        rbm = _rbm(n_visible, n_hidden)
        joint = _joint(rbm) / _joint(rbm).sum()
        v, h = binary_states(n_visible), binary_states(n_hidden)
        expected = _as_tensors(v.T @ joint @ h, joint.sum(1) @ v, joint.sum(0) @ h)
        assert relative_error(rbm.model_statistics(), expected) < 1e-14
        assert relative_error(_gradient(rbm.log_partition(), rbm), expected) < 1e-14

    def test_likelihood_gradient(self, n_visible, n_hidden):
        rbm, data = _rbm(n_visible, n_hidden), _binary(6, n_visible)
        found = likelihood_gradient(rbm, data)
        assert relative_error(found, _gradient(-rbm.log_likelihood(data).mean(), rbm)) < 1e-13
        numerical = finite_differences(
            lambda parameters: -_machine(parameters).log_likelihood(data).mean(), dict(rbm.named_parameters())
        )
        assert relative_error(found, numerical) < 1e-9


@pytest.mark.parametrize(("n_visible", "n_hidden"), [(20, 16), (16, 20)], ids=["hidden", "visible"])
def test_chunks_of_states_give_what_all_at_once_gives(n_visible, n_hidden):
    rbm = _rbm(n_visible, n_hidden, scale=0.5)
    small = min(n_visible, n_hidden)
    w, b, c = _numpy(dict(rbm.named_parameters()))
    w, b, c = (w.T, c, b) if n_hidden == small else (w, b, c)
    states = ((np.arange(2**small)[:, None] >> np.arange(small)) & 1).astype(float)
    expected = np.logaddexp.reduce(states @ b + np.logaddexp(0, states @ w + c).sum(1))
    found = rbm.log_partition()
    assert found.item() == pytest.approx(expected, abs=1e-11)
    assert relative_error(_gradient(found, rbm), rbm.model_statistics()) < 1e-12


def test_gradient_of_log_partition_keeps_no_chunk_alive():
    for n_hidden in (11, 14):
        rbm = _rbm(30, n_hidden, scale=0.1)
        memory = measure_memory(rbm.log_partition)
        assert memory.graph <= sum(parameter.nbytes for parameter in rbm.parameters())


def test_enumeration_has_a_limit_with_a_clear_message():
    rbm = RBM(ENUMERABLE_UNITS + 1, ENUMERABLE_UNITS + 2)
    for attempt in (rbm.log_partition, rbm.model_statistics, lambda: rbm.log_likelihood(torch.zeros(1, rbm.n_visible))):
        with pytest.raises(
            ValueError,
            match=r"at most 2\^25 states, .*\. Found 2\^27 hidden states and 2\^26 visible states\.",
        ):
            attempt()


@pytest.mark.portable
@pytest.mark.parametrize("x", [-800.0, -40.0, -1e-3, 0.0, 9.9, 10.0, 10.1, 19.9, 20.1, 39.9, 40.1, 800.0])
def test_free_energy_is_exact_where_others_switch_formula(x):
    rbm = RBM(1, 1, dtype=torch.float64)
    with torch.no_grad():
        rbm.weights.fill_(x)
    expected = -max(x, 0.0) - math.log1p(math.exp(-abs(x)))
    free_energy = rbm.free_energy(torch.ones(1, 1, dtype=torch.float64))
    rounding = 8 * torch.finfo(torch.float64).eps  # exp, log1p and a sum, each to two units in the last place
    assert free_energy.item() == pytest.approx(expected, rel=rounding, abs=0)
    free_energy.backward()
    assert rbm.weights.grad.item() == pytest.approx(-expit(x), rel=rounding, abs=0)


def test_likelihood_is_a_sum_over_units_without_weights():
    rbm, data = _rbm(), _binary(50, 4)
    with torch.no_grad():
        rbm.weights.zero_()
        rbm.visible_bias.copy_(base_rate_bias(data))
    rate = (data.sum(0) + 1) / (len(data) + 2)
    expected = (data * rate.log() + (1 - data) * (1 - rate).log()).sum(1)
    torch.testing.assert_close(rbm.log_likelihood(data), expected, rtol=0, atol=1e-12)


# --- chains -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 4])
def test_chains_from_exact_draws_stay_there(steps):
    """Stationarity: total variation from the exact distribution stays at the Monte Carlo floor."""
    rbm, n = _rbm(scale=0.8), 200_000
    p = _joint(rbm).sum(1)
    p = torch.tensor(p / p.sum())
    start = torch.tensor(binary_states(4))[torch.multinomial(p, n, replacement=True, generator=seeded(2))]
    with torch.no_grad():
        end = gibbs(rbm, start, steps=steps, generator=seeded(3))
    counts = torch.bincount((end @ torch.tensor([8.0, 4.0, 2.0, 1.0], dtype=torch.float64)).long(), minlength=16)
    distance = 0.5 * (counts / n - p).abs().sum().item()
    floor = 0.5 * (2 * p * (1 - p) / (math.pi * n)).sqrt().sum().item()
    assert distance < 2 * floor


def test_samples_have_the_conditional_means():
    rbm, n = _rbm(), 100_000
    visible, hidden = torch.tensor([[1.0, 0, 1, 1]]).double(), torch.tensor([[0.0, 1, 1]]).double()
    with torch.no_grad():
        for draw, mean in (
            (rbm.sample_hidden(visible.expand(n, -1), generator=seeded(1)), rbm.hidden_mean(visible)[0]),
            (rbm.sample_visible(hidden.expand(n, -1), generator=seeded(1)), rbm.visible_mean(hidden)[0]),
        ):
            assert set(draw.unique().tolist()) <= {0.0, 1.0}
            assert ((draw.mean(0) - mean).abs() < 4.5 * (mean * (1 - mean) / n).sqrt()).all()


@pytest.mark.parametrize("chain", CHAINS)
def test_value_is_the_same_bits_with_and_without_a_graph(chain):
    rbm, start = _rbm(), _binary(500, 4)
    with_graph = gibbs(rbm, start, steps=3, chain=chain, generator=seeded(1))
    with torch.no_grad():
        without = gibbs(rbm, start, steps=3, chain=chain, generator=seeded(1))
    assert with_graph.requires_grad
    assert not without.requires_grad
    assert torch.equal(with_graph.detach().view(torch.int64), without.view(torch.int64)), "-0 is not 0 here"


def test_straight_through_has_the_bits_of_a_draw():
    start = _binary(500, 4)
    sample, same = (
        gibbs(_rbm(), start, steps=3, chain=chain, generator=seeded(1)).detach()
        for chain in ("sampled", "straight_through")
    )
    assert torch.equal(sample.view(torch.int64), same.view(torch.int64))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_units_at_the_ends_of_the_unit_interval(dtype):
    tiny = torch.finfo(dtype).smallest_normal
    mean = torch.tensor([0.0, tiny, 0.5, 1.0], dtype=dtype).repeat(2000, 1).requires_grad_()
    value = draw_bernoulli(mean, seeded(1))
    with torch.no_grad():
        assert torch.equal(value, draw_bernoulli(mean, seeded(1)))
    assert value.dtype == dtype
    assert not value[:, 0].any()
    assert value[:, 3].all()
    assert not value.signbit().any()
    (slope,) = torch.autograd.grad(value.sum(), mean)
    assert torch.equal(slope, torch.zeros_like(mean))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_saturated_straight_through_units_are_zeros_and_ones(dtype):
    layer, x = Bernoulli(torch.zeros(2, dtype=dtype)), torch.tensor([-60000.0, 60000.0], dtype=dtype).requires_grad_()
    value = straight_through(layer, x, seeded(1))
    assert value.tolist() == [0.0, 1.0]
    assert not value.signbit().any()
    (slope,) = torch.autograd.grad(straight_through(layer, x / 60000.0, seeded(1)).sum(), x)
    assert (slope > 0).all()


@pytest.mark.parametrize("needs_graph", [False, True], ids=["no-graph", "graph"])
def test_a_draw_is_one_exactly_where_the_uniform_is_below_the_mean(needs_graph):
    uniform = torch.rand(1000, generator=seeded(1), dtype=torch.float32).double()
    for mean, expected in ((uniform, 0.0), (uniform.nextafter(torch.ones(())), 1.0)):
        value = draw_bernoulli(mean.clone().requires_grad_(needs_graph), seeded(1))
        assert torch.equal(value, torch.full_like(uniform, expected))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_small_probabilities_are_kept_in_low_precision(dtype):
    """Uniform draws in bfloat16 would be 0 once in 256 times, and a probability of 1/1024 no less than that."""
    n, p = 200_000, 2.0**-10
    frequency = draw_bernoulli(torch.full((n,), p, dtype=dtype), seeded(1)).double().mean().item()
    assert abs(frequency - p) < 4.5 * math.sqrt(p * (1 - p) / n)


def test_a_chain_draws_from_its_generator_alone():
    rbm, start = _rbm(), _binary(20, 4)
    before = torch.get_rng_state()
    first, again, other = (gibbs(rbm, start, steps=2, generator=seeded(seed)) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), before)


# --- what the negative samples leak -------------------------------------------------------------------------------


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("steps", [1, 3])
def test_blocked_surrogate_has_the_closed_form_update(chain, steps):
    rbm, data = _rbm(9, 5), _binary(14, 9)
    loss = contrastive_divergence(rbm, data, steps=steps, chain=chain, generator=seeded(1))
    negative = gibbs(rbm, data, steps=steps, chain=chain, generator=seeded(1)).detach()
    assert relative_error(_gradient(loss, rbm), cd_gradient(rbm, data, negative)) < 1e-14
    assert (
        relative_error(
            cd_gradient(rbm, data, negative), _cd_witness(dict(rbm.named_parameters()), data.numpy(), negative.numpy())
        )
        < 1e-14
    )


def test_update_is_the_negative_of_learning():
    """Data below the model's mean: a descent step on the surrogate must lower the bias, so the gradient is positive."""
    rbm = RBM(2, 1, dtype=torch.float64)
    update = cd_gradient(rbm, torch.zeros(1, 2).double(), torch.tensor([[1.0, 0.0]]).double())
    assert update["visible_bias"].tolist() == [1.0, 0.0]


def test_each_side_is_a_mean_over_its_own_rows():
    """A small last batch weighs as much as any other, and so do few chains."""
    rbm, data, chains = _rbm(), _binary(3, 4), _binary(5, 4, seed=9)
    repeated = cd_gradient(rbm, data.repeat(4, 1), chains.repeat(7, 1))
    assert relative_error(cd_gradient(rbm, data, chains), repeated) < 1e-14
    losses = [
        persistent_contrastive_divergence(rbm, rows, starts, steps=1, chain="mean_field")[0].item()
        for rows, starts in ((data, chains), (data.repeat(4, 1), chains.repeat(7, 1)))
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-14)


@pytest.mark.parametrize("steps", [1, 5])
def test_a_sampled_chain_leaks_exactly_nothing(steps):
    rbm, data = _rbm(9, 5), _binary(14, 9)

    def gradient():
        return _gradient(contrastive_divergence(rbm, data, steps=steps, generator=seeded(1)), rbm)

    blocked = gradient()
    with unblock(NEGATIVE_SAMPLES):
        opened = gradient()
    assert all(torch.equal(opened[name], blocked[name]) for name in NAMES)


@pytest.mark.parametrize("chain", ["mean_field", "straight_through"])
def test_other_chains_leak_what_a_pull_back_predicts(chain):
    rbm, data = _rbm(9, 5, scale=0.5), _binary(14, 9)
    parameters, ratios = dict(rbm.named_parameters()), []
    for seed in range(20):
        comparison = compare(
            lambda seed=seed: contrastive_divergence(rbm, data, steps=3, chain=chain, generator=seeded(seed)),
            parameters,
        )
        opened = comparison.gradient([NEGATIVE_SAMPLES])
        leak = {name: opened[name] - comparison.blocked[name] for name in NAMES}
        expected = _leak_witness(parameters, _run_chain(parameters, data.numpy(), 3, chain, seeded(seed)))
        assert relative_error(leak, expected) < 1e-12
        ratios.append(_norm(leak) / _norm(comparison.blocked))
    assert sum(ratios) / 20 > 0.5  # from .45 to .78 with straight-through units


def test_mean_field_leak_is_the_rest_of_a_true_derivative():
    """Without the block the mean-field surrogate is a smooth function, and its gradient that of finite differences."""
    data = _binary(14, 9)

    def loss(parameters):
        return contrastive_divergence(_machine(parameters), data, steps=3, chain="mean_field")

    parameters = _parameters(9, 5, scale=0.5)
    numerical = finite_differences(loss, parameters)
    with unblock(NEGATIVE_SAMPLES):
        opened = _gradient(loss(parameters), _machine(parameters))
    assert relative_error(opened, numerical) < 1e-9
    assert relative_error(_gradient(loss(parameters), _machine(parameters)), numerical) > 0.1


def test_straight_through_without_its_own_block_leaks_nothing_again():
    rbm, data = _rbm(9, 5), _binary(14, 9)
    comparison = compare(
        lambda: contrastive_divergence(rbm, data, steps=2, chain="straight_through", generator=seeded(1)),
        dict(rbm.named_parameters()),
    )
    both = comparison.gradient([NEGATIVE_SAMPLES, STRAIGHT_THROUGH])
    assert relative_error(both, comparison.blocked) < 1e-14
    assert relative_error(comparison.gradient([NEGATIVE_SAMPLES]), comparison.blocked) > 0.1


def test_a_leak_pulls_the_sampler_up_the_energy():
    """A step along the leak alone: the mean-field chain then ends at higher free energy, at the energies of before."""
    parameters, data = _parameters(9, 5, scale=0.3), _binary(200, 9)
    rbm = _machine(parameters)
    with unblock(NEGATIVE_SAMPLES):
        opened = _gradient(contrastive_divergence(rbm, data, steps=1, chain="mean_field"), rbm)
    blocked = _gradient(contrastive_divergence(rbm, data, steps=1, chain="mean_field"), rbm)
    energy_now = rbm.free_energy(gibbs(rbm, data, steps=1, chain="mean_field")).mean()
    moved = _machine({name: nn.Parameter(parameters[name] - 0.1 * (opened[name] - blocked[name])) for name in NAMES})
    energy_then = rbm.free_energy(gibbs(moved, data, steps=1, chain="mean_field")).mean()
    assert energy_then > energy_now + 0.01


def test_blocked_chain_costs_no_memory_however_long():
    rbm, data = _rbm(64, 32, scale=0.1), _binary(100, 64)

    def memory(steps):
        return measure_memory(lambda: contrastive_divergence(rbm, data, steps=steps, generator=seeded(1)))

    assert memory(20).graph == memory(2).graph
    assert memory(20).peak < 1.1 * memory(2).peak, "no graph is built, not even one that is thrown away"
    with unblock(NEGATIVE_SAMPLES):
        assert memory(20).graph > 5 * memory(2).graph


def test_persistent_chains_go_on_where_they_were():
    rbm, data, generator = _rbm(), _binary(3, 4), seeded(1)
    chains = STARTS
    for _ in range(2):
        loss, chains = persistent_contrastive_divergence(rbm, data, chains, steps=2, generator=generator)
    straight = gibbs(rbm, STARTS, steps=4, generator=seeded(1)).detach()
    assert torch.equal(chains, straight)
    assert relative_error(_gradient(loss, rbm), cd_gradient(rbm, data, straight)) < 1e-14


def test_open_persistent_chains_keep_the_graph_of_every_update():
    rbm, data = _rbm(), _binary(3, 4)

    def nodes_after(updates):
        chains, generator = STARTS, seeded(1)
        for _ in range(updates):
            _, chains = persistent_contrastive_divergence(rbm, data, chains, steps=1, generator=generator)
        stack, seen = [chains.grad_fn], set()
        while stack:
            node = stack.pop()
            if node is not None and node not in seen:
                seen.add(node)
                stack += [following for following, _ in node.next_functions]
        return len(seen)

    assert nodes_after(3) == 0
    with unblock(PERSISTENT_CHAINS):
        one, two, three = (nodes_after(updates) for updates in (1, 2, 3))
    assert three - two == two - one > 5


def test_both_open_persistent_blocks_give_the_whole_derivative():
    """Mean-field chains through two updates, nothing blocked: finite differences of the sum of both surrogates."""

    def loss(parameters):
        return _two_updates(parameters, chain="mean_field")

    parameters = _parameters()
    with unblock(NEGATIVE_SAMPLES, PERSISTENT_CHAINS):
        found = _gradient(loss(parameters), _machine(parameters))
    assert relative_error(found, finite_differences(loss, parameters)) < 1e-9


def test_exact_gradient_learns_bars_and_stripes():
    """Plain gradient descent on the exact gradient rises in every step at a small rate."""
    data = bars_and_stripes(3).inputs
    rbm = RBM(9, 6, generator=seeded(1), dtype=torch.float64)
    last = -math.inf
    with torch.no_grad():
        for _ in range(100):
            now = rbm.log_likelihood(data).mean().item()
            assert now > last
            last = now
            for name, gradient in likelihood_gradient(rbm, data).items():
                getattr(rbm, name).sub_(gradient, alpha=0.5)
    assert -math.log(512) < last < -math.log(14)


# --- the fused trainer --------------------------------------------------------------------------------------------


def _descend(rbm: RBM, loss: Tensor, learning_rate: float) -> None:
    gradients = _gradient(loss, rbm)
    with torch.no_grad():
        for name, parameter in rbm.named_parameters():
            parameter.sub_(gradients[name], alpha=learning_rate)


BATCHES = [_binary(7, 9, seed=3), _binary(7, 9, seed=4), _binary(2, 9, seed=5)]  # the last one is smaller


@pytest.mark.parametrize("steps", [1, 3])
def test_fused_cd_is_descent_on_the_surrogate(steps):
    fused, twin = _rbm(9, 5), _rbm(9, 5)
    trainer, generator = FusedTrainer(fused, batch_size=7, steps=steps, generator=seeded(1)), seeded(1)
    for data in BATCHES:
        trainer.step(data.to(torch.uint8), learning_rate=0.3)
        _descend(twin, contrastive_divergence(twin, data, steps=steps, generator=generator), 0.3)
        assert relative_error(dict(fused.named_parameters()), dict(twin.named_parameters())) < 1e-13


@pytest.mark.parametrize("steps", [1, 3])
def test_fused_persistent_cd_is_descent_on_the_surrogate(steps):
    """Its twin carries hidden states too: they are drawn with the parameters whose update they are part of."""
    fused, twin, hidden = _rbm(9, 5), _rbm(9, 5), _binary(4, 5, seed=6)
    trainer = FusedTrainer(fused, batch_size=7, steps=steps, chains=hidden, generator=seeded(1))
    generator = seeded(1)
    for data in BATCHES:
        trainer.step(data, learning_rate=0.3)
        with torch.no_grad():
            negative = twin.sample_visible(hidden, generator=generator)
            if steps > 1:
                negative = gibbs(twin, negative, steps=steps - 1, generator=generator)
            hidden = twin.sample_hidden(negative, generator=generator)
        _descend(twin, twin.free_energy(data).mean() - twin.free_energy(negative).mean(), 0.3)
        assert relative_error(dict(fused.named_parameters()), dict(twin.named_parameters())) < 1e-13
        assert torch.equal(trainer.chains, hidden)


def test_fused_trainer_leaves_no_trace_in_autograd():
    rbm, start = _rbm(9, 5), _binary(4, 5)
    trainer = FusedTrainer(rbm, batch_size=7, steps=1, chains=start, generator=seeded(1))
    before = torch.get_rng_state()
    trainer.step(BATCHES[0], learning_rate=0.1)
    assert all(parameter.grad is None and parameter.is_leaf for parameter in rbm.parameters())
    assert not trainer.chains.requires_grad
    assert trainer.chains.data_ptr() != start.data_ptr()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_fused_trainer_learns(dtype):
    data = bars_and_stripes(3, dtype=dtype).inputs
    rbm = RBM(9, 8, generator=seeded(1), dtype=dtype)
    trainer = FusedTrainer(rbm, batch_size=14, steps=10, generator=seeded(1))
    for _ in range(2000):
        trainer.step(data, learning_rate=0.3)
    with torch.no_grad():
        # Without weights at best -log 512 = -6.24; the optimum is -log 14 = -2.64.
        assert -3.6 < rbm.log_likelihood(data).mean().item() < -math.log(14)


# --- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("attempt", "error", "message"),
    [
        (lambda: RBM(0, 3), ValueError, "`n_visible` should be a positive integer. Found 0."),
        (lambda: RBM(3, 2.0), ValueError, "`n_hidden` should be a positive integer. Found 2.0."),
        (lambda: RBM(3, 2, dtype=torch.int64), ValueError, "should be a floating-point type. Found torch.int64."),
        (
            lambda: _rbm().free_energy(torch.zeros(2, 5).double()),
            ValueError,
            "`visible` should have shape (*, 4). Found (2, 5).",
        ),
        (
            lambda: _rbm().free_energy(torch.zeros(2, 4)),
            TypeError,
            "`visible` should have the parameters' type torch.float64. Found torch.float32.",
        ),
        (lambda: gibbs(_rbm(), DATA, steps=0), ValueError, "`steps` should be a positive integer. Found 0."),
        (
            lambda: gibbs(_rbm(), DATA, steps=1, chain="sample"),
            ValueError,
            "`chain` should be one of 'sampled', 'straight_through', 'mean_field', 'concrete', 'noisy_rectified'.",
        ),
        (
            lambda: contrastive_divergence(_rbm(), DATA[:0], steps=1),
            ValueError,
            "`data` should have shape (N, 4) with N > 0. Found (0, 4).",
        ),
        (
            lambda: contrastive_divergence(_rbm(), DATA.bool(), steps=1),
            TypeError,
            "`data` should have the parameters' type torch.float64. Found torch.bool.",
        ),
        (
            lambda: persistent_contrastive_divergence(_rbm(), DATA, torch.zeros(2, 3).double(), steps=1),
            ValueError,
            "`chains` should have shape (N, 4) with N > 0. Found (2, 3).",
        ),
        (
            lambda: cd_gradient(_rbm(), DATA, DATA[0]),
            ValueError,
            "`negative` should have shape (N, 4) with N > 0. Found (4,).",
        ),
        (
            lambda: FusedTrainer(_rbm(), batch_size=0, steps=1),
            ValueError,
            "`batch_size` should be a positive integer. Found 0.",
        ),
        (
            lambda: FusedTrainer(_rbm(), batch_size=4, steps=1, chains=torch.zeros(2, 4)),
            ValueError,
            "`chains` should have shape (M, 3), M > 0. Found (2, 4).",
        ),
        (
            lambda: FusedTrainer(_rbm(), batch_size=4, steps=1).step(DATA, learning_rate=0.1),
            ValueError,
            "`data` should have shape (N, 4) with 0 < N <= 4. Found (6, 4).",
        ),
    ],
)
def test_a_clear_error(attempt, error, message):
    with pytest.raises(error) as raised:
        attempt()
    assert message in str(raised.value)


def test_machine_is_a_module():
    rbm = RBM(5, 3, generator=seeded(1), dtype=torch.float64)
    again = RBM(5, 3, generator=seeded(1), dtype=torch.float64)
    assert [name for name, _ in rbm.named_parameters()] == NAMES
    assert all(torch.equal(a, b) for a, b in zip(rbm.parameters(), again.parameters(), strict=True))
    assert 0.004 < rbm.weights.std().item() < 0.02
    other = RBM(5, 3)
    other.load_state_dict(rbm.float().state_dict())
    assert torch.equal(other.weights, rbm.weights)
    assert repr(rbm) == "RBM(n_visible=5, n_hidden=3)"
