"""Tempered chains: every temperature keeps its distribution; the gradient through a swap.

The witnesses are written in NumPy from the energies, without the code under test.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from accelerator import ACCELERATOR
from contract import BlockCase, relative_error
from scipy.special import expit, logsumexp
from torch import Tensor, nn
from values import binary_states, seeded, summed

from toolkit import unblock
from toolkit.rbm import (
    NEGATIVE_SAMPLES,
    PERSISTENT_CHAINS,
    RBM,
    TemperedState,
    adapt_temperatures,
    cd_gradient,
    diagnose_tempering,
    gibbs,
    parallel_tempering,
    spread_temperatures,
    swap_probabilities,
    tempered_contrastive_divergence,
    tempered_start,
    trajectory_tempering,
)

DEVICES = ["cpu", pytest.param(ACCELERATOR, marks=pytest.mark.gpu)]


# --- machines and what is known of them ---------------------------------------------------------------------------

UNITS = {
    "bernoulli": {},
    "categorical": {"visible": "categorical", "categories": 3},
    "rectified": {"hidden": "rectified"},
    "gaussian": {"visible": "gaussian"},
    "gaussian-rectified": {"visible": "gaussian", "hidden": "rectified"},
}
KINDS = [*UNITS, "bernoulli-reference", "categorical-reference", "gaussian-reference"]


def _machine(kind: str, scale: float = 1.0) -> tuple[RBM, Tensor | None]:
    """Return a machine without any symmetry, and the reference that it is annealed from."""
    units = kind.removesuffix("-reference")
    generator = seeded(0)
    n_visible, n_hidden = (2, 2) if "categorical" in kind or "rectified" in kind else (3, 2)
    rbm = RBM(n_visible, n_hidden, dtype=torch.float64, **UNITS[units])
    with torch.no_grad():
        for parameter in rbm.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
        rbm.weights *= 0.5 * scale if "rectified" in kind else scale
    reference = torch.randn(rbm.n_columns, generator=generator, dtype=torch.float64)
    return rbm, reference if kind.endswith("reference") else None


def _one_hot_states(n_units: int, n_states: int) -> np.ndarray:
    return np.array([np.eye(n_states)[list(s)].ravel() for s in itertools.product(range(n_states), repeat=n_units)])


COUNTS = 25  # of a rectified unit; more have no probability here


@dataclass(frozen=True)
class Truth:
    """The joint distribution at one inverse temperature, from its energy.

    Attributes:
        hidden: (S, H), the states of the hidden layer.
        visible: (R, V), those of the visible layer; None if they are real.
        log_p: (R, S), or (S,) if the visible units are real.
        mean: (S, V), E[v | h] of real units.
        deviation: (V,), theirs.
    """

    hidden: np.ndarray
    visible: np.ndarray | None
    log_p: np.ndarray
    mean: np.ndarray | None
    deviation: np.ndarray | None
    log_partition: float

    def draw(self, n: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        states = rng.choice(self.log_p.size, size=n, p=np.exp(self.log_p).ravel())
        if self.visible is None:
            noise = rng.standard_normal((n, self.mean.shape[1]))
            return self.mean[states] + self.deviation * noise, self.hidden[states]
        v, h = np.unravel_index(states, self.log_p.shape)
        return self.visible[v], self.hidden[h]

    def cells(self, visible: np.ndarray, hidden: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return for each draw the number of its cell, and the probability of each cell.

        Real units are looked at by the sign of v_i - E[v_i | h], which has probability 1/2 given h.
        """
        h = _find(hidden, self.hidden)
        if self.visible is None:
            above = (visible > self.mean[h]) @ 2 ** np.arange(visible.shape[1])
            n_signs = 2 ** visible.shape[1]
            return h * n_signs + above, np.repeat(np.exp(self.log_p) / n_signs, n_signs)
        return _find(visible, self.visible) * len(self.hidden) + h, np.exp(self.log_p).ravel()


def _find(rows: np.ndarray, table: np.ndarray) -> np.ndarray:
    base = int(table.max()) + 1
    powers = base ** np.arange(table.shape[1])
    keys = (table @ powers).astype(np.int64)
    order = np.argsort(keys)
    place = order[np.searchsorted(keys, rows @ powers, sorter=order)]
    assert (table[place] == rows).all()
    return place


def _truth(kind: str, rbm: RBM, reference: Tensor | None, beta: float) -> Truth:
    """Write down E_beta: the visible bias goes from the reference to b, all that couples or biases h is scaled."""
    b, w, c = (getattr(rbm, f"{n}").detach().cpu().numpy() for n in ("visible_bias", "weights", "hidden_bias"))
    counts = range(COUNTS) if "rectified" in kind else range(2)
    hidden = np.array(list(itertools.product(counts, repeat=len(c))), dtype=float)
    of_hidden = beta * hidden @ c
    if "rectified" in kind:
        ways = np.cumsum([0.0] + [math.log1p(-math.exp(-m)) for m in range(1, COUNTS)])
        of_hidden = of_hidden - (hidden**2 / 2).sum(1) - ways[hidden.astype(int)].sum(1)
    if "gaussian" in kind:
        start = b if reference is None else reference.cpu().numpy()
        bias = start + beta * (b - start)
        variance = np.exp(rbm.visible_log_variance.detach().cpu().numpy())
        coupling = beta * hidden @ w.T
        # The integral over v of e^{-(v - bias)^2 / 2 variance + v coupling / variance}.
        log_weight = of_hidden + ((coupling * bias + coupling**2 / 2) / variance).sum(1)
        total = logsumexp(log_weight)
        log_partition = total + 0.5 * np.log(2 * np.pi * variance).sum()
        return Truth(hidden, None, log_weight - total, bias + coupling, np.sqrt(variance), log_partition)
    start = 0 if reference is None else reference.cpu().numpy()
    visible = _one_hot_states(rbm.n_visible, 3) if "categorical" in kind else binary_states(rbm.n_visible)
    of_visible = visible @ (start + beta * (b - start))
    log_weight = of_visible[:, None] + of_hidden + beta * visible @ w @ hidden.T
    total = logsumexp(log_weight)
    return Truth(hidden, visible, log_weight - total, None, None, total)


def _exact_state(truths: list[Truth], n_chains: int, device: str = "cpu", seed: int = 3) -> TemperedState:
    rng = np.random.default_rng(seed)
    pairs = [truth.draw(n_chains, rng) for truth in truths]
    visible, hidden = (torch.tensor(np.stack(layer), device=device) for layer in zip(*pairs, strict=True))
    empty = torch.zeros(visible.shape[:2], dtype=torch.int64, device=device)
    return TemperedState(visible, hidden, empty, empty.bool(), empty[0], 0)


def _distances(truth: Truth, visible: Tensor, hidden: Tensor) -> tuple[float, float, float]:
    """Return the total variation from the truth, what it is expected to be by chance, and chi^2 in its sigmas."""
    cell, p = truth.cells(visible.cpu().numpy(), hidden.cpu().numpy())
    n = len(cell)
    found = np.bincount(cell, minlength=len(p)) / n
    floor = 0.5 * np.sqrt(2 * p * (1 - p) / (np.pi * n)).sum()
    enough = p * n > 5
    q, f = np.append(p[enough], p[~enough].sum()), np.append(found[enough], found[~enough].sum())
    q, f = (q, f) if q[-1] * n > 5 else (q[:-1], f[:-1])
    chi2 = n * ((f - q) ** 2 / q).sum()
    return 0.5 * np.abs(found - p).sum(), floor, (chi2 - (len(q) - 1)) / math.sqrt(2 * (len(q) - 1))


BETAS = [0.1, 0.4, 0.5, 1.0]


def _check_no_drift(kind: str, n_chains: int, steps: int, device: str = "cpu", swaps: str = "joint") -> None:
    # A Gaussian machine couples by W^2; with rectified hidden units it has no distribution at all if that is 1 or more.
    rbm, reference = _machine(kind, scale={"gaussian-rectified": 0.5}.get(kind, 1.0 if "gaussian" in kind else 3.0))
    rbm, reference = rbm.to(device), None if reference is None else reference.to(device)
    truths = [_truth(kind, rbm, reference, beta) for beta in BETAS]
    start = _exact_state(truths, n_chains, device)
    with torch.no_grad():
        end, rates = parallel_tempering(
            rbm,
            start,
            inverse_temperatures=BETAS,
            steps=steps,
            reference=reference,
            swaps=swaps,
            generator=seeded(4, device),
        )
    assert (rates > 0.05).all()
    assert (rates < 0.99).any(), "swaps that are always accepted prove nothing"
    for truth, visible, hidden in zip(truths, end.visible, end.hidden, strict=True):
        distance, floor, sigmas = _distances(truth, visible, hidden)
        assert distance < 4 * floor
        assert abs(sigmas) < 5


# --- the distribution is kept -------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_chains_from_exact_draws_stay_there_at_every_temperature(kind, steps, device):
    _check_no_drift(kind, 20_000, steps, device)


@pytest.mark.parametrize("kind", KINDS)
def test_swaps_of_visible_units_keep_every_temperature_too(kind):
    _check_no_drift(kind, 20_000, 3, swaps="marginal")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_half_a_million_chains_stay_there_at_every_temperature(kind):
    """Five times finer than above; four steps swap every pair of neighbours twice, and a drift adds up."""
    _check_no_drift(kind, 200_000 if "rectified" in kind else 500_000, 4)


@pytest.mark.parametrize("kind", ["gaussian", "gaussian-reference"])
def test_moments_of_real_units_are_kept_at_every_temperature(kind):
    """Mean and covariance, which the signs around the conditional means do not see."""
    n = 100_000
    rbm, reference = _machine(kind, scale=1.0)
    truths = [_truth(kind, rbm, reference, beta) for beta in BETAS]
    with torch.no_grad():
        end, _ = parallel_tempering(
            rbm,
            _exact_state(truths, n),
            inverse_temperatures=BETAS,
            steps=3,
            reference=reference,
            generator=seeded(5),
        )
    for truth, visible in zip(truths, end.visible.numpy(), strict=True):
        p = np.exp(truth.log_p)
        mean = p @ truth.mean
        second = (truth.mean.T * p) @ truth.mean + np.diag(truth.deviation**2)
        scale = np.sqrt(np.diag(second - np.outer(mean, mean)))
        assert (np.abs(visible.mean(0) - mean) < 5 * scale / math.sqrt(n)).all()
        found = visible.T @ visible / n
        spread = np.sqrt(((visible[:, :, None] * visible[:, None]) ** 2).mean(0) - found**2)
        assert (np.abs(found - second) < 5 * spread / math.sqrt(n)).all()


PAIR = [0.5, 1.0]


def _states_of_pair(scale: float = 3.0) -> tuple[RBM, list[Truth], Tensor, Tensor, np.ndarray]:
    """Return every pair of joint states of two temperatures, as chains, and their probabilities."""
    rbm, _ = _machine("bernoulli", scale)
    truths = [_truth("bernoulli", rbm, None, beta) for beta in PAIR]
    v, h = truths[0].visible, truths[0].hidden
    states = np.array([np.concatenate(pair) for pair in itertools.product(v, h)])
    first, second = np.divmod(np.arange(len(states) ** 2), len(states))
    both = torch.tensor(np.stack([states[first], states[second]]))
    p = np.exp(truths[0].log_p).ravel()[first] * np.exp(truths[1].log_p).ravel()[second]
    return rbm, truths, both[..., :3], both[..., 3:], p


def _after_swaps(p: np.ndarray, accept: np.ndarray) -> np.ndarray:
    """Return the distribution of pairs of states after each was exchanged with its probability."""
    size = math.isqrt(len(p))
    flow = p * accept
    return p - flow + flow.reshape(size, size).T.ravel()


def test_swap_of_joint_energies_keeps_the_pair_of_temperatures_exactly():
    rbm, _, visible, hidden, p = _states_of_pair()
    accept = swap_probabilities(rbm, visible, hidden, inverse_temperatures=PAIR).numpy()[0]
    assert np.abs(_after_swaps(p, accept) - p).max() < 1e-15
    assert 0.05 < p @ accept < 0.95


def test_swap_of_scaled_free_energies_of_the_model_does_not_keep_it():
    """The rule that published code has: beta F(v), where the machine at beta has another free energy."""
    rbm, _, visible, _, p = _states_of_pair()
    free = rbm.free_energy(visible).detach().numpy()
    wrong = np.minimum(1, np.exp((PAIR[0] - PAIR[1]) * (free[0] - free[1])))
    moved = _after_swaps(p, wrong)
    # Hidden units are drawn anew afterwards: what matters is the distribution of the visible ones.
    by_visible = np.abs((moved - p).reshape(8, 4, 8, 4).sum((1, 3)))
    assert by_visible.sum() / 2 > 0.01


@pytest.mark.parametrize("kind", KINDS)
def test_difference_and_layers_are_those_of_annealed(kind):
    """The scaled input gives what scaled copies of the weights would."""
    rbm, reference = _machine(kind)
    state = _exact_state([_truth(kind, rbm, reference, beta) for beta in BETAS], 50)
    betas = torch.tensor(BETAS, dtype=torch.float64)
    with torch.no_grad():
        difference = rbm.joint.annealed_difference(state.visible, state.hidden, reference)
        found = swap_probabilities(rbm, state.visible, state.hidden, inverse_temperatures=betas, reference=reference)
        ratio = (betas[1:] - betas[:-1])[:, None] * (difference[1:] - difference[:-1])
        torch.testing.assert_close(found, ratio.exp().clamp(max=1), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("kind", KINDS)
def test_sweep_draws_what_the_annealed_machines_draw(kind):
    """The scaled input gives what scaled copies of the weights would."""
    rbm, reference = _machine(kind)
    pair = torch.tensor([0.3, 1.0], dtype=torch.float64)
    start = _exact_state([_truth(kind, rbm, reference, float(beta)) for beta in pair], 50)
    start = dataclasses.replace(start, steps=1)  # an odd step of two temperatures tries no swap
    with torch.no_grad():
        moved, _ = parallel_tempering(
            rbm, start, inverse_temperatures=pair, steps=1, reference=reference, generator=seeded(6)
        )
        annealed, generator = rbm.joint.annealed(pair, reference), seeded(6)
        hidden = annealed.sample_hidden(start.visible, generator)
        visible = annealed.sample_visible(hidden, generator)
    torch.testing.assert_close(moved.hidden, hidden, rtol=0, atol=1e-12)
    torch.testing.assert_close(moved.visible, visible, rtol=0, atol=1e-12)


# --- a twin in NumPy, draw by draw --------------------------------------------------------------------------------


@dataclass
class Step:
    """What one step did: means and units before the swap, and the row that came to each place."""

    start: np.ndarray
    hidden_mean: np.ndarray
    hidden: np.ndarray
    visible_mean: np.ndarray
    visible: np.ndarray
    source: np.ndarray


def _run_tempered(
    parameters: Mapping[str, Tensor],
    visible: np.ndarray,
    betas: list[float],
    steps: int,
    generator: torch.Generator,
    first_step: int = 0,
) -> tuple[list[Step], np.ndarray]:
    """Return the trace, and the visible units after the last swap. Zeros and ones, in the order that is specified."""
    w, b, c = (parameters[name].detach().numpy() for name in ("weights", "visible_bias", "hidden_bias"))
    beta, trace = np.array(betas)[:, None, None], []

    def uniform(*shape: int, dtype: torch.dtype = torch.float32) -> np.ndarray:
        return torch.rand(shape, generator=generator, dtype=dtype).numpy()

    for step in range(first_step, first_step + steps):
        hidden_mean = expit(beta * (visible @ w + c))
        hidden = (uniform(*hidden_mean.shape) < hidden_mean).astype(float)
        visible_mean = expit(beta * (hidden @ w.T + b))
        following = (uniform(*visible_mean.shape) < visible_mean).astype(float)
        energy = -following @ b - hidden @ c - np.einsum("tmv,vh,tmh->tm", following, w, hidden)
        pairs = list(range(step % 2, len(betas) - 1, 2))
        draws = uniform(len(pairs), visible.shape[1], dtype=torch.float64) if pairs else []
        source = np.arange(len(betas))[:, None].repeat(visible.shape[1], 1)
        for i, u in zip(pairs, draws, strict=True):
            for m in range(visible.shape[1]):
                if u[m] < math.exp(min(0.0, (betas[i] - betas[i + 1]) * (energy[i, m] - energy[i + 1, m]))):
                    source[[i, i + 1], m] = source[[i + 1, i], m]
        trace.append(Step(visible, hidden_mean, hidden, visible_mean, following, source))
        visible = np.take_along_axis(following, source[..., None], 0)
    return trace, visible


def _parameters() -> dict[str, nn.Parameter]:
    generator = seeded(0)
    shapes = {"weights": (4, 3), "visible_bias": (4,), "hidden_bias": (3,)}
    return {
        name: nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64))
        for name, shape in shapes.items()
    }


def _with(parameters: Mapping[str, Tensor]) -> RBM:
    visible = "gaussian" if "visible_log_variance" in parameters else "bernoulli"
    rbm = RBM(*parameters["weights"].shape, visible=visible, dtype=torch.float64)
    for name, parameter in parameters.items():
        setattr(rbm, name, parameter)
    return rbm


LADDER = [0.0, 0.3, 0.6, 0.8, 1.0]


def _binary(*shape: int, seed: int = 7) -> Tensor:
    return (torch.rand(shape, generator=seeded(seed), dtype=torch.float64) < 0.4).double()


def _state(visible: Tensor, n_hidden: int = 3) -> TemperedState:
    empty = torch.zeros(visible.shape[:2], dtype=torch.int64)
    hidden = visible.new_zeros(*visible.shape[:2], n_hidden)
    return TemperedState(visible, hidden, torch.arange(len(visible))[:, None] + empty, empty.bool(), empty[0], 0)


@pytest.mark.portable
@pytest.mark.parametrize("n_temperatures", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("n_chains", [1, 7])
def test_every_draw_is_where_the_specification_says(n_temperatures, n_chains):
    parameters, betas = _parameters(), LADDER[-n_temperatures:]
    start = _state(_binary(n_temperatures, n_chains, 4))
    trace, visible = _run_tempered(parameters, start.visible.numpy(), betas, 5, seeded(1))
    generator = seeded(1)
    with torch.no_grad():
        middle, _ = parallel_tempering(
            _with(parameters), start, inverse_temperatures=betas, steps=2, generator=generator
        )
        end, _ = parallel_tempering(_with(parameters), middle, inverse_temperatures=betas, steps=3, generator=generator)
    np.testing.assert_array_equal(end.visible.numpy(), visible)
    np.testing.assert_array_equal(
        end.hidden.numpy(), np.take_along_axis(trace[-1].hidden, trace[-1].source[..., None], 0)
    )
    replica = start.replica.numpy()
    for step in trace:
        replica = np.take_along_axis(replica, step.source, 0)
    np.testing.assert_array_equal(end.replica.numpy(), replica)
    assert end.steps == 5


@pytest.mark.parametrize("kind", list(UNITS))
@pytest.mark.parametrize("chain", ["sampled", "mean_field", "straight_through"])
def test_a_single_temperature_of_one_is_gibbs_bit_for_bit(kind, chain):
    rbm, _ = _machine(kind)
    truth = _truth(kind, rbm, None, 1.0)
    start = _exact_state([truth], 30)
    with torch.no_grad():
        moved, rates = parallel_tempering(
            rbm, start, inverse_temperatures=[1.0], steps=3, chain=chain, generator=seeded(1)
        )
        expected = gibbs(rbm, start.visible[0], steps=3, chain=chain, generator=seeded(1))
    assert torch.equal(moved.visible[0], expected)
    assert rates.shape == (0,)


@pytest.mark.parametrize("swaps", ["joint", "marginal"])
def test_value_is_the_same_bits_with_and_without_a_graph(swaps):
    rbm, start = _with(_parameters()), _state(_binary(5, 20, 4))
    options = {"inverse_temperatures": LADDER, "steps": 4, "swaps": swaps}
    with_graph, rates = parallel_tempering(rbm, start, **options, generator=seeded(1))
    with torch.no_grad():
        without, _ = parallel_tempering(rbm, start, **options, generator=seeded(1))
    assert with_graph.visible.requires_grad
    assert not rates.requires_grad
    assert torch.equal(with_graph.visible.detach(), without.visible)


def test_swap_rates_are_the_mean_probabilities_over_steps_for_all_pairs():
    rbm, state, generator, expected = _with(_parameters()), _state(_binary(5, 20, 4)), seeded(1), []
    with torch.no_grad():
        _, rates = parallel_tempering(rbm, state, inverse_temperatures=LADDER, steps=6, generator=seeded(1))
        trace, _ = _run_tempered(_parameters(), state.visible.numpy(), LADDER, 6, generator)
        for step in trace:
            before_the_swap = torch.tensor(step.visible), torch.tensor(step.hidden)
            expected.append(swap_probabilities(rbm, *before_the_swap, inverse_temperatures=LADDER).mean(1))
    torch.testing.assert_close(rates, torch.stack(expected).mean(0), rtol=1e-13, atol=0)


# --- modes --------------------------------------------------------------------------------------------------------


def _two_modes(n: int = 8, coupling: float = 1.2) -> RBM:
    """All units on, or all off: by symmetry with the same probability."""
    rbm = RBM(n, n, dtype=torch.float64)
    with torch.no_grad():
        rbm.weights.fill_(coupling)
        rbm.visible_bias.fill_(-coupling * n / 2)
        rbm.hidden_bias.fill_(-coupling * n / 2)
    return rbm


def test_swaps_find_the_mode_where_gibbs_chains_never_come():
    rbm, n, betas = _two_modes(), 500, torch.linspace(0, 1, 8, dtype=torch.float64)
    with torch.no_grad():
        stuck = gibbs(rbm, torch.zeros(n, 8, dtype=torch.float64), steps=300, generator=seeded(1))
        state = _state(torch.zeros(8, n, 8, dtype=torch.float64), 8)
        state, rates = parallel_tempering(rbm, state, inverse_temperatures=betas, steps=300, generator=seeded(1))
    assert (stuck.mean(1) > 0.5).double().mean() < 0.05
    found = (state.visible[-1].mean(1) > 0.5).double().mean().item()
    assert abs(found - 0.5) < 4 * math.sqrt(0.25 / n)
    assert rates.min() > 0.1


# --- temperatures -------------------------------------------------------------------------------------------------


def test_labels_follow_the_states_and_count_arrivals():
    rbm, betas, generator = _with(_parameters()), LADDER[-3:], seeded(1)
    state = _state(_binary(3, 40, 4))
    trace, _ = _run_tempered(_parameters(), state.visible.numpy(), betas, 60, seeded(1))
    fresh, arrivals = np.zeros((3, 40), dtype=bool), np.zeros(40, dtype=int)
    for step in trace:
        fresh = np.take_along_axis(fresh, step.source, 0)
        arrivals += fresh[2]
        fresh[2], fresh[0] = False, True
    with torch.no_grad():
        state, _ = parallel_tempering(rbm, state, inverse_temperatures=betas, steps=60, generator=generator)
    np.testing.assert_array_equal(state.fresh.numpy(), fresh)
    np.testing.assert_array_equal(state.arrivals.numpy(), arrivals)
    assert arrivals.sum() > 100
    assert (state.replica.sort(0).values == torch.arange(3)[:, None]).all(), "nothing is lost, nothing is twice there"


def test_arrivals_are_as_frequent_as_the_theory_of_even_and_odd_swaps_says():
    """The theory asks for energies that are forgotten between swaps: a machine that mixes well."""
    rbm, betas = _with(_parameters()), torch.tensor(LADDER)
    with torch.no_grad():
        rbm.weights *= 0.3
        rbm.visible_bias *= 2
    state = tempered_start(rbm, n_temperatures=5, n_chains=400, generator=seeded(2))
    generator = seeded(3)
    with torch.no_grad():
        before, _ = parallel_tempering(rbm, state, inverse_temperatures=betas, steps=50, generator=generator)
        after, rates = parallel_tempering(rbm, before, inverse_temperatures=betas, steps=400, generator=generator)
    diagnosis = diagnose_tempering(before, after, rates)
    rejected = 1 - rates.numpy()
    assert diagnosis.barrier == pytest.approx(rejected.sum(), abs=1e-12)
    assert diagnosis.expected_arrival_rate == pytest.approx(1 / (2 + 2 * (rejected / (1 - rejected)).sum()), abs=1e-12)
    assert diagnosis.arrival_rate == pytest.approx((after.arrivals - before.arrivals).double().mean().item() / 400)
    assert diagnosis.arrival_rate == pytest.approx(diagnosis.expected_arrival_rate, rel=0.1)
    assert diagnosis.suggested_temperatures == max(2, math.ceil(2 * rejected.sum() + 1))


def test_diagnosis_tells_chains_that_are_stuck():
    rbm, betas = _two_modes(coupling=2.5), torch.tensor([0.5, 0.75, 1.0], dtype=torch.float64)
    before = _state(torch.zeros(3, 50, 8, dtype=torch.float64), 8)
    with torch.no_grad():
        after, rates = parallel_tempering(rbm, before, inverse_temperatures=betas, steps=100, generator=seeded(1))
    stuck = diagnose_tempering(before, after, rates)
    assert stuck.arrival_rate > 0, "the swaps go on; within a mode they tell nothing of the other"
    with pytest.raises(ValueError, match=r"`after` should be later than `before`. Found 0 and 100 steps\."):
        diagnose_tempering(after, before, rates)
    for wrong in (rates[:0], rates[:1], rates[None], 2 * torch.ones(2)):
        with pytest.raises(ValueError, match=r"`swap_rates` should be 2 probabilities, one for each pair\. Found "):
            diagnose_tempering(before, after, wrong)
    other = _state(torch.zeros(2, 50, 8, dtype=torch.float64), 8)
    with pytest.raises(ValueError, match=r"temperatures and chains, \(T, M\)\. Found \(2, 50\) and \(3, 50\)\."):
        diagnose_tempering(other, after, rates)
    single = _state(torch.zeros(1, 50, 8, dtype=torch.float64), 8)
    with pytest.raises(ValueError, match=r"`after` should have at least two temperatures\. Found 1\."):
        diagnose_tempering(single, dataclasses.replace(single, steps=5), rates[:0])


def test_spread_temperatures_divides_the_barrier():
    betas = [0.0, 0.1, 0.4, 1.0]
    rates = torch.tensor([0.9, 0.5, 0.8], dtype=torch.float64)
    # Barrier 0, .1, .6, .8 at these: thirds are at .8/3 = .1 + .5 (x - .1)/.3, and at 1.6/3.
    expected = [0.0, 0.1 + 0.3 * (0.8 / 3 - 0.1) / 0.5, 0.1 + 0.3 * (1.6 / 3 - 0.1) / 0.5, 1.0]
    np.testing.assert_allclose(spread_temperatures(betas, rates), expected, atol=1e-5)
    np.testing.assert_allclose(spread_temperatures(betas, torch.ones(3)), np.linspace(0, 1, 4), atol=1e-12)
    more = spread_temperatures(betas, rates, n_temperatures=9)
    assert more.shape == (9,)
    assert (more.diff() > 0).all()


def test_adapted_temperatures_have_even_swap_rates():
    rbm, start = _with(_parameters()), [0.0, 0.02, 0.05, 0.1, 1.0]
    with torch.no_grad():
        rbm.weights *= 2
    state = tempered_start(rbm, n_temperatures=5, n_chains=200, generator=seeded(2))
    generator = seeded(3)
    with torch.no_grad():
        _, before = parallel_tempering(rbm, state, inverse_temperatures=start, steps=200, generator=generator)
        betas, state = adapt_temperatures(
            rbm, state, inverse_temperatures=start, rounds=5, steps=20, generator=generator
        )
        _, after = parallel_tempering(rbm, state, inverse_temperatures=betas, steps=400, generator=generator)
    assert betas[0] == 0
    assert betas[-1] == 1
    assert before.max() - before.min() > 0.4
    assert after.max() - after.min() < 0.05
    assert state.steps == 20 + 40 + 80 + 160 + 320


@pytest.mark.parametrize("kind", KINDS)
def test_start_is_a_draw_of_the_machine_without_weights(kind):
    rbm, reference = _machine(kind)
    truth, n = _truth(kind, rbm, reference, 0.0), 20_000
    state = tempered_start(rbm, n_temperatures=2, n_chains=n, reference=reference, generator=seeded(1))
    for visible, hidden in zip(state.visible, state.hidden, strict=True):
        distance, floor, sigmas = _distances(truth, visible, hidden)
        assert distance < 4 * floor
        assert abs(sigmas) < 5
    assert state.fresh.tolist() == [[True] * n, [False] * n]
    assert state.replica[:, 0].tolist() == [0, 1]


# --- the block contract -------------------------------------------------------------------------------------------

DATA = _binary(6, 4)
STARTS = _binary(3, 5, 4, seed=8)
THREE = [0.2, 0.6, 1.0]


def _free_energy_gradient(parameters: Mapping[str, Tensor], visible: np.ndarray) -> dict[str, Tensor]:
    """Gradient of the mean free energy by the parameters, the units held."""
    w, b, c = (parameters[name].detach().numpy() for name in ("weights", "visible_bias", "hidden_bias"))
    visible = visible.reshape(-1, len(b))
    hidden = expit(visible @ w + c)
    found = (-visible.T @ hidden / len(visible), -visible.mean(0), -hidden.mean(0))
    return dict(zip(("weights", "visible_bias", "hidden_bias"), map(torch.tensor, found), strict=True))


def _slope(parameters: Mapping[str, Tensor], visible: np.ndarray, counted: int) -> np.ndarray:
    w, b, c = (parameters[name].detach().numpy() for name in ("weights", "visible_bias", "hidden_bias"))
    return -(b + expit(visible @ w + c) @ w.T) / counted


def _pull_back(
    parameters: Mapping[str, Tensor], betas: list[float], trace: list[Step], cotangent: np.ndarray
) -> dict[str, Tensor]:
    """Pull a cotangent of the visible units at all temperatures back: with a state through its swaps, at their beta."""
    w, b, c = (parameters[name].detach().numpy() for name in ("weights", "visible_bias", "hidden_bias"))
    w_bar, b_bar, c_bar = np.zeros_like(w), np.zeros_like(b), np.zeros_like(c)
    for step in reversed(trace):
        before_swap = np.zeros_like(cotangent)
        np.put_along_axis(before_swap, np.broadcast_to(step.source[..., None], cotangent.shape), cotangent, 0)
        cotangent = np.empty_like(cotangent)
        for t, beta in enumerate(betas):
            through_visible = beta * before_swap[t] * step.visible_mean[t] * (1 - step.visible_mean[t])
            through_hidden = beta * (through_visible @ w) * step.hidden_mean[t] * (1 - step.hidden_mean[t])
            w_bar += through_visible.T @ step.hidden[t] + step.start[t].T @ through_hidden
            b_bar += through_visible.sum(0)
            c_bar += through_hidden.sum(0)
            cotangent[t] = through_hidden @ w.T
    found = (w_bar, b_bar, c_bar)
    return dict(zip(("weights", "visible_bias", "hidden_bias"), map(torch.tensor, found), strict=True))


def _two_updates(chain: str):
    def loss(parameters: Mapping[str, Tensor]) -> Tensor:
        """Two updates, then the mean free energy of the chains at all temperatures: a user's own monitor."""
        rbm, generator, state, losses = _with(parameters), seeded(1), _state(STARTS), []
        for _ in range(2):
            part, state, _ = tempered_contrastive_divergence(
                rbm, DATA, state, inverse_temperatures=THREE, steps=2, chain=chain, generator=generator
            )
            losses.append(part)
        return losses[0] + losses[1] + rbm.free_energy(state.visible).mean()

    return loss


def _trace(parameters: Mapping[str, Tensor]) -> tuple[list[Step], list[np.ndarray]]:
    """Return the four steps of two updates, and the visible units at the end of each update."""
    generator = seeded(1)
    first, middle = _run_tempered(parameters, STARTS.numpy(), THREE, 2, generator)
    second, end = _run_tempered(parameters, middle, THREE, 2, generator, first_step=2)
    assert any((step.source != np.arange(3)[:, None]).any() for step in first), "a swap is on the way"
    return [*first, *second], [middle, end]


def _two_updates_blocked(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    _, ends = _trace(parameters)
    positive = _free_energy_gradient(parameters, DATA.numpy())
    negative = [{k: -v for k, v in _free_energy_gradient(parameters, end[-1]).items()} for end in ends]
    return summed(positive, positive, *negative, _free_energy_gradient(parameters, ends[1]))


def _two_updates_with_samples_open(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    trace, ends = _trace(parameters)
    leaks = []
    for steps, end in zip((trace[:2], trace[2:]), ends, strict=True):
        cotangent = np.zeros_like(end)
        cotangent[-1] = -_slope(parameters, end[-1], len(end[-1]))
        leaks.append(_pull_back(parameters, THREE, steps, cotangent))
    return summed(_two_updates_blocked(parameters), *leaks)


def _two_updates_with_chains_open(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    trace, ends = _trace(parameters)
    cotangent = _slope(parameters, ends[1], ends[1].shape[0] * ends[1].shape[1])
    return summed(_two_updates_blocked(parameters), _pull_back(parameters, THREE, trace, cotangent))


def _gaussian_parameters() -> dict[str, nn.Parameter]:
    parameters = _parameters()
    log_variance = torch.tensor([0.3, -0.4, 0.1, 0.2], dtype=torch.float64)
    return {**parameters, "visible_log_variance": nn.Parameter(log_variance)}


GAUSSIAN_DATA = torch.randn(6, 4, generator=seeded(11), dtype=torch.float64)
GAUSSIAN_STARTS = torch.randn(3, 5, 4, generator=seeded(12), dtype=torch.float64)


def _gaussian_loss(parameters: Mapping[str, Tensor]) -> Tensor:
    loss, _, _ = tempered_contrastive_divergence(
        _with(parameters),
        GAUSSIAN_DATA,
        _state(GAUSSIAN_STARTS),
        inverse_temperatures=THREE,
        steps=2,
        generator=seeded(1),
    )
    return loss


def _gaussian_blocked(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    rbm = _with(parameters)
    with torch.no_grad():
        moved, _ = parallel_tempering(
            rbm, _state(GAUSSIAN_STARTS), inverse_temperatures=THREE, steps=2, generator=seeded(1)
        )
    return cd_gradient(rbm, GAUSSIAN_DATA, moved.visible[-1])


BLOCK_CASES: list[BlockCase] = [
    BlockCase(
        id="tempered-negative-samples-straight-through",
        block=NEGATIVE_SAMPLES,
        parameters=_parameters,
        loss=_two_updates("straight_through"),
        blocked=_two_updates_blocked,
        opened=_two_updates_with_samples_open,
    ),
    BlockCase(
        id="tempered-negative-samples-sampled",
        block=NEGATIVE_SAMPLES,
        parameters=_parameters,
        loss=_two_updates("sampled"),
        blocked=_two_updates_blocked,
        opened=_two_updates_blocked,
    ),
    BlockCase(
        id="tempered-persistent-chains",
        block=PERSISTENT_CHAINS,
        parameters=_parameters,
        loss=_two_updates("straight_through"),
        blocked=_two_updates_blocked,
        opened=_two_updates_with_chains_open,
    ),
    BlockCase(
        id="tempered-negative-samples-gaussian",  # a path through draws and swaps; the witness is finite differences
        block=NEGATIVE_SAMPLES,
        parameters=_gaussian_parameters,
        loss=_gaussian_loss,
        blocked=_gaussian_blocked,
    ),
]


def test_surrogate_gradient_is_the_closed_form_for_other_numbers_of_chains():
    rbm, data = _with(_parameters()), DATA
    for n_chains in (1, 9):
        state = tempered_start(rbm, n_temperatures=3, n_chains=n_chains, generator=seeded(2))
        loss, moved, rates = tempered_contrastive_divergence(
            rbm, data, state, inverse_temperatures=THREE, steps=1, generator=seeded(1)
        )
        names, parameters = zip(*rbm.named_parameters(), strict=True)
        found = dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))
        assert relative_error(found, cd_gradient(rbm, data, moved.visible[-1])) < 1e-12
        assert not moved.visible.requires_grad
        assert not moved.hidden.requires_grad
        assert rates.shape == (2,)


def test_no_graph_is_built_while_both_blocks_are_in_place():
    rbm, state = _with(_parameters()), _state(STARTS)

    def saved(steps: int, *opened) -> int:
        kept = []
        with unblock(*opened), torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
            _, moved, _ = tempered_contrastive_divergence(
                rbm,
                DATA,
                state,
                inverse_temperatures=THREE,
                steps=steps,
                chain="straight_through",
                generator=seeded(1),
            )
        assert moved.visible.requires_grad == moved.hidden.requires_grad == (PERSISTENT_CHAINS in opened)
        return len(kept)

    assert saved(1) == saved(5)
    assert saved(1, PERSISTENT_CHAINS) < saved(5, PERSISTENT_CHAINS)
    assert saved(1, NEGATIVE_SAMPLES) < saved(5, NEGATIVE_SAMPLES)


# --- machines along a training ------------------------------------------------------------------------------------


def _trajectory(kind: str, n_machines: int = 4) -> list[RBM]:
    """Return machines of one kind that share no parameter: not temperatures of each other."""
    machines = []
    for age in range(n_machines):
        rbm, _ = _machine(kind)
        with torch.no_grad():
            for parameter in rbm.parameters():
                parameter += 0.3 * torch.randn(parameter.shape, generator=seeded(50 + age), dtype=torch.float64)
            rbm.weights *= (0.3 if kind == "gaussian-rectified" else 1.0) * age / (n_machines - 1)
        machines.append(rbm)
    return machines


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("kind", list(UNITS))
def test_chains_of_a_trajectory_stay_at_every_machine(kind, steps, device):
    machines = [machine.to(device) for machine in _trajectory(kind)]
    truths = [_truth(kind, machine, None, 1.0) for machine in machines]
    start = _exact_state(truths, 20_000, device)
    end, ratios = trajectory_tempering(machines, start, steps=steps, generator=seeded(4, device))
    assert ((ratios.swap_rates > 0.05) & (ratios.swap_rates < 0.99)).all()
    for truth, visible, hidden in zip(truths, end.visible, end.hidden, strict=True):
        distance, floor, sigmas = _distances(truth, visible, hidden)
        assert distance < 4 * floor
        assert abs(sigmas) < 5


@pytest.mark.parametrize("kind", list(UNITS))
def test_ratios_of_partition_functions_are_within_their_errors(kind):
    machines = _trajectory(kind)
    truths = [_truth(kind, machine, None, 1.0) for machine in machines]
    start = _exact_state(truths, 2000)
    _, ratios = trajectory_tempering(machines, start, steps=20, generator=seeded(4))
    expected = np.diff([truth.log_partition for truth in truths])
    assert 0 < ratios.error < 0.02
    assert abs(ratios.log_ratios.sum().item() - expected.sum()) < 4 * ratios.error
    np.testing.assert_allclose(ratios.log_ratios, expected, atol=0.03)


def test_error_of_the_ratios_is_how_much_they_vary():
    machines = _trajectory("bernoulli")
    truths = [_truth("bernoulli", machine, None, 1.0) for machine in machines]
    found, errors = [], []
    for seed in range(60):
        start = _exact_state(truths, 100, seed=seed)
        _, ratios = trajectory_tempering(machines, start, steps=5, generator=seeded(100 + seed))
        found.append(ratios.log_ratios.sum().item())
        errors.append(ratios.error)
    assert np.std(found) == pytest.approx(np.mean(errors), rel=0.3)
    exact = truths[-1].log_partition - truths[0].log_partition
    assert abs(np.mean(found) - exact) < 4 * np.mean(errors) / math.sqrt(60)


@pytest.mark.parametrize("kind", KINDS)
def test_trajectory_of_temperatures_is_tempering_with_marginal_swaps(kind):
    """Temperatures are machines too."""
    rbm, reference = _machine(kind, scale=0.5 if kind == "gaussian-rectified" else 1.0)
    truths = [_truth(kind, rbm, reference, beta) for beta in BETAS]
    start = _exact_state(truths, 200)
    machines = [rbm.joint.annealed(beta, reference) for beta in BETAS]
    end, ratios = trajectory_tempering(machines, start, steps=3, generator=seeded(1))
    options = {"inverse_temperatures": BETAS, "steps": 3, "reference": reference}
    with torch.no_grad():
        same, rates = parallel_tempering(rbm, start, swaps="marginal", **options, generator=seeded(1))
        _, joint_rates = parallel_tempering(rbm, start, **options, generator=seeded(1))
    torch.testing.assert_close(same.visible, end.visible, rtol=0, atol=1e-11)
    torch.testing.assert_close(same.hidden, end.hidden, rtol=0, atol=1e-11)
    torch.testing.assert_close(rates, ratios.swap_rates, rtol=1e-11, atol=0)
    assert (rates > joint_rates).all(), "with hidden units summed out, swaps are accepted more often"


def test_trajectory_of_temperatures_has_the_distributions_of_tempering():
    rbm, _ = _machine("bernoulli", scale=3.0)
    truths = [_truth("bernoulli", rbm, None, beta) for beta in BETAS]
    start = _exact_state(truths, 20_000)
    machines = [rbm.joint.annealed(beta) for beta in BETAS]
    end, ratios = trajectory_tempering(machines, start, steps=3, generator=seeded(1))
    for truth, visible, hidden in zip(truths, end.visible, end.hidden, strict=True):
        assert abs(_distances(truth, visible, hidden)[2]) < 5
    assert abs(ratios.log_ratios.sum().item() - truths[-1].log_partition + truths[0].log_partition) < 4 * ratios.error


@pytest.mark.slow
def test_trajectory_finds_the_mode_where_gibbs_chains_never_come():
    age, n = torch.linspace(0, 1, 8, dtype=torch.float64), 500
    machines = [_two_modes(coupling=1.2 * float(beta)) for beta in age]
    state = _state(torch.zeros(8, n, 8, dtype=torch.float64), 8)
    state, _ = trajectory_tempering(machines, state, steps=200, generator=seeded(1))
    state, ratios = trajectory_tempering(machines, state, steps=100, generator=seeded(2))
    found = (state.visible[-1].mean(1) > 0.5).double().mean().item()
    assert abs(found - 0.5) < 4 * math.sqrt(0.25 / n)
    exact = machines[-1].log_partition().item()
    assert abs(16 * math.log(2) + ratios.log_ratios.sum().item() - exact) < min(0.05, 4 * ratios.error)
    assert not state.visible.requires_grad


def test_a_single_machine_is_gibbs_and_has_no_ratios():
    rbm = _with(_parameters())
    start = _state(_binary(1, 20, 4))
    moved, ratios = trajectory_tempering([rbm], start, steps=3, generator=seeded(1))
    with torch.no_grad():
        expected = gibbs(rbm, start.visible[0], steps=3, generator=seeded(1))
    assert torch.equal(moved.visible[0], expected)
    assert ratios.log_ratios.shape == ratios.swap_rates.shape == (0,)


def test_error_of_a_single_chain_is_unknown():
    machines = _trajectory("bernoulli", 2)
    start = _state(torch.zeros(2, 1, 3).double(), 2)
    _, ratios = trajectory_tempering(machines, start, steps=5, generator=seeded(1))
    assert math.isnan(ratios.error)


# --- half precision -----------------------------------------------------------------------------------------------

HALF = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


@pytest.mark.slow
@HALF
@pytest.mark.parametrize("swaps", ["joint", "marginal"])
def test_rates_in_half_precision_count_every_step(dtype, swaps):
    rbm = RBM(2, 2, dtype=dtype)
    torch.nn.init.zeros_(rbm.weights)
    start = tempered_start(rbm, n_temperatures=2, n_chains=2, generator=seeded(1))
    options = {"steps": 2500, "generator": seeded(1)}
    with torch.no_grad():
        _, rates = parallel_tempering(rbm, start, inverse_temperatures=[0, 1], swaps=swaps, **options)
        _, ratios = trajectory_tempering([rbm, rbm], start, **options)
    for found in (rates, ratios.swap_rates):
        assert found.dtype == torch.float32
        assert found.item() == pytest.approx(1, abs=1e-6)


@HALF
def test_rare_swaps_in_half_precision_are_as_rare_as_they_should_be(dtype):
    rbm, n = RBM(1, 1, dtype=dtype), 300_000
    with torch.no_grad():
        rbm.weights.zero_()
        rbm.visible_bias.fill_(14.0)
        start = tempered_start(rbm, n_temperatures=2, n_chains=n, generator=seeded(1))
        # Means in the place of draws: all chains have the same energies, and their swaps a probability of e^-7.
        end, rates = parallel_tempering(
            rbm, start, inverse_temperatures=[0, 1], steps=1, chain="mean_field", generator=seeded(1)
        )
    assert rates.item() == pytest.approx(math.exp(-7), rel=1e-3)
    swapped = (end.replica[0] == 1).double().mean().item()
    assert abs(swapped - math.exp(-7)) < 4 * math.sqrt(math.exp(-7) / n)


@HALF
@pytest.mark.parametrize("kind", KINDS)
def test_swap_probabilities_in_half_precision_are_those_of_the_machine(kind, dtype):
    rbm, reference = _machine(kind, scale=3.0)
    machine, exact = rbm.to(dtype), _machine(kind, scale=3.0)[0].to(dtype).double()
    reference = None if reference is None else reference.to(dtype)
    state = tempered_start(machine, n_temperatures=3, n_chains=20, reference=reference, generator=seeded(1))
    betas = [0.25, 0.5, 1.0]
    found = swap_probabilities(machine, state.visible, state.hidden, inverse_temperatures=betas, reference=reference)
    expected = swap_probabilities(
        exact, state.visible.double(), state.hidden.double(), inverse_temperatures=betas, reference=reference
    )
    assert found.dtype == torch.float32
    assert ((expected > 0.01) & (expected < 0.9)).any()
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-6)


# --- arguments ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"inverse_temperatures": [0.5, 0.5, 1.0]},
            r"should increase from 0 or more to 1 or less\. Found \[0\.5, ",
        ),
        ({"inverse_temperatures": [-0.1, 0.5, 1.0]}, r"should increase from 0 or more"),
        ({"inverse_temperatures": [0.1, 0.5, 1.1]}, r"should increase from 0 or more"),
        ({"inverse_temperatures": [0.1, math.nan, 1.0]}, r"should increase from 0 or more"),
        ({"inverse_temperatures": []}, r"should increase from 0 or more"),
        (
            {"inverse_temperatures": [0.5, 1.0]},
            r"should have shape \(2, M, 4\), M > 0\. Found \(3, 5, 4\)",
        ),
        ({"steps": 0}, r"`steps` should be a positive integer\. Found 0\."),
        ({"swaps": "free"}, r"`swaps` should be one of 'joint', 'marginal'\. Found 'free'\."),
        ({"chain": "exact"}, r"`chain` should be one of .*\. Found 'exact'\."),
        ({"chain": "concrete"}, r"`chain` should be one of 'sampled', .*'noisy_rectified'\. Found 'concrete'\."),
        ({"chain": "noisy_rectified"}, r"`chain` should be 'noisy_rectified' only for rectified units"),
        ({"reference": torch.zeros(1)}, r"`reference` should have shape \(4,\)\. Found \(1,\)\."),
        ({"state": _state(torch.zeros(3, 5, 2).double())}, r"`state\.visible` should have shape \(3, M, 4\)"),
        ({"state": _state(torch.zeros(3, 0, 4).double())}, r"M > 0\. Found \(3, 0, 4\)"),
        ({"state": _state(torch.zeros(3, 5, 4).double(), 2)}, r"`state\.hidden` should have shape \(3, M, 3\)"),
    ],
)
def test_wrong_arguments_are_refused(change, message):
    arguments = {"state": _state(STARTS), "inverse_temperatures": THREE, "steps": 1, **change}
    with pytest.raises(ValueError, match=message):
        parallel_tempering(_with(_parameters()), arguments.pop("state"), **arguments)


def test_wrong_types_and_machines_are_refused():
    rbm = _with(_parameters())
    with pytest.raises(TypeError, match=r"`state\.visible` should have the parameters' type torch\.float64"):
        parallel_tempering(rbm, _state(STARTS.float()), inverse_temperatures=THREE, steps=1)
    for values, found in ((None, "NoneType"), ("0, 1", "str")):
        with pytest.raises(TypeError, match=rf"`inverse_temperatures` should be a tensor or a list .* Found {found}\."):
            tempered_contrastive_divergence(rbm, DATA, _state(STARTS), inverse_temperatures=values, steps=1)
    with pytest.raises(ValueError, match=r"`inverse_temperatures` should end with 1, the model\. Found 0\.5\."):
        tempered_contrastive_divergence(rbm, DATA, _state(STARTS), inverse_temperatures=[0.1, 0.2, 0.5], steps=1)
    with pytest.raises(ValueError, match=r"`data` should have shape \(N, 4\)"):
        tempered_contrastive_divergence(rbm, DATA[:, :2], _state(STARTS), inverse_temperatures=THREE, steps=1)
    with pytest.raises(ValueError, match=r"`machines` should hold at least one machine\. Found none\."):
        trajectory_tempering([], _state(STARTS), steps=1)
    with pytest.raises(ValueError, match=r"`machines` should all have .* weights \(4, 3\).*Found Gaussian units and"):
        trajectory_tempering([rbm, RBM(4, 3, visible="gaussian").double()], _state(STARTS[:2]), steps=1)
    two, three = (RBM(n, 3, visible="categorical", categories=6 // n) for n in (2, 3))  # six columns each
    with pytest.raises(ValueError, match=r"with 9 states.*Found Categorical units with 8 states"):
        trajectory_tempering([two, three], _state(torch.zeros(2, 5, 6)), steps=1)
    with pytest.raises(ValueError, match=r"`n_temperatures` should be a positive integer\. Found 0\."):
        tempered_start(rbm, n_temperatures=0, n_chains=3)
    with pytest.raises(ValueError, match=r"`n_chains` should be a positive integer\. Found 0\."):
        tempered_start(rbm, n_temperatures=2, n_chains=0)
    with pytest.raises(ValueError, match=r"`rounds` should be a positive integer\. Found 0\."):
        adapt_temperatures(rbm, _state(STARTS), inverse_temperatures=THREE, rounds=0, steps=1)
    with pytest.raises(ValueError, match=r"`swap_rates` should be 2 probabilities, one for each pair\. Found \[2\.0"):
        spread_temperatures(THREE, torch.tensor([2.0, 0.5]))
    for wrong in (torch.tensor([0.5]), torch.full((2, 1), 0.5)):
        with pytest.raises(ValueError, match=r"`swap_rates` should be 2 probabilities, one for each pair\. Found "):
            spread_temperatures(THREE, wrong)
    with pytest.raises(ValueError, match=r"`reference` should have shape \(4,\)\. Found \(4, 1\)\."):
        tempered_start(rbm, n_temperatures=2, n_chains=3, reference=torch.zeros(4, 1))
    with pytest.raises(ValueError, match=r"`reference` should be finite\. Found nan\."):
        parallel_tempering(
            rbm, _state(STARTS), inverse_temperatures=THREE, steps=1, reference=torch.full((4,), math.nan)
        )
    with pytest.raises(TypeError, match=r"`reference` should be a tensor\. Found ndarray\."):
        swap_probabilities(rbm, STARTS, STARTS, inverse_temperatures=THREE, reference=np.zeros(4))
    with pytest.raises(ValueError, match=r"`inverse_temperatures` should be at least two\. Found \[1\.0\]\."):
        spread_temperatures([1.0], torch.zeros(0))
    with pytest.raises(ValueError, match=r"`n_temperatures` should be an integer from 2\. Found 1\."):
        spread_temperatures(THREE, torch.tensor([0.2, 0.5]), n_temperatures=1)
