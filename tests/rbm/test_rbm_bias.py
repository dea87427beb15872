"""The exact bias of contrastive divergence: tables of all joint states, and derivatives of chains written out.

The witnesses are written in NumPy, without autograd and without the code under test.
"""

import functools
import itertools
import math
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from contract import BlockCase, finite_differences, relative_error
from torch import Tensor, nn
from values import binary_states, seeded

from toolkit import unblock
from toolkit.datasets import bars_and_stripes
from toolkit.gradients import field_jacobian
from toolkit.rbm import (
    RBM,
    cd_gradient,
    gibbs,
    likelihood_gradient,
)
from toolkit.rbm.bias import (
    CHAIN_DISTRIBUTION,
    CHAIN_ENERGY,
    bias,
    chain_distribution,
    data_distribution,
    exact_divergence,
    gradient_fields,
    transition_matrix,
    visible_states,
)

KINDS = ["bernoulli", "categorical"]
DIVERGENCES = ["free_energy", "kullback_leibler", "improved"]
NAMES = ["weights", "visible_bias", "hidden_bias"]
Tree = Mapping[str, Tensor]


# --- machines and witnesses ---------------------------------------------------------------------------------------


def _shapes(kind: str) -> dict[str, tuple[int, ...]]:
    columns = 6 if kind == "categorical" else 4
    return {"weights": (columns, 3), "visible_bias": (columns,), "hidden_bias": (3,)}


def _parameters(kind: str = "bernoulli") -> dict[str, nn.Parameter]:
    """Parameters without any symmetry: a transposed or swapped formula gives another number."""
    generator = seeded(0)
    return {
        name: nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64))
        for name, shape in _shapes(kind).items()
    }


def _machine(parameters: Tree, kind: str = "bernoulli") -> RBM:
    units = {"visible": kind, "categories": 3} if kind == "categorical" else {}
    rbm = RBM(2 if kind == "categorical" else 4, 3, dtype=torch.float64, **units)
    for name, parameter in parameters.items():
        setattr(rbm, name, parameter)
    return rbm


def _visible(kind: str) -> np.ndarray:
    if kind == "bernoulli":
        return binary_states(4)
    return np.array([np.eye(3)[list(digits)].ravel() for digits in itertools.product(range(3), repeat=2)])


HIDDEN = binary_states(3)
START = {kind: torch.linspace(0.2, 3, len(_visible(kind)), dtype=torch.float64).sin().square() for kind in KINDS}
START = {kind: start / start.sum() for kind, start in START.items()}
STEPS = 3


class Tables:
    """Everything about a machine, from the definition: one energy for every joint state."""

    def __init__(self, parameters: Tree, kind: str) -> None:
        w, b, c = (parameters[name].detach().numpy() for name in NAMES)
        self.v, self.h = _visible(kind), HIDDEN
        joint = np.empty((len(self.v), len(self.h)))
        for (i, v), (j, h) in itertools.product(enumerate(self.v), enumerate(self.h)):
            joint[i, j] = math.exp(v @ b + h @ c + v @ w @ h)
        self.free_energy = -np.log(joint.sum(1))
        self.probability = joint.sum(1) / joint.sum()
        self.to_hidden = joint / joint.sum(1, keepdims=True)
        self.to_visible = (joint / joint.sum(0)).T
        self.step = self.to_hidden @ self.to_visible

    def end(self, start: np.ndarray, steps: int) -> np.ndarray:
        return start @ np.linalg.matrix_power(self.step, steps)

    def slope_of_energy(self, weight: np.ndarray) -> dict[str, np.ndarray]:
        """The derivative of the free energies' sum, weighted."""
        hidden = self.to_hidden @ self.h
        return {
            "weights": -(weight[:, None] * self.v).T @ hidden,
            "visible_bias": -weight @ self.v,
            "hidden_bias": -weight @ hidden,
        }

    def slope_of_end(self, start: np.ndarray, steps: int, values: np.ndarray) -> dict[str, np.ndarray]:
        """The derivative of the expectation of `values` at the chain's end: likelihood ratios, summed over paths."""
        w, b, c = np.zeros((self.v.shape[1], 3)), np.zeros(self.v.shape[1]), np.zeros(3)
        for t in range(steps):
            before, later = self.end(start, t), np.linalg.matrix_power(self.step, steps - 1 - t) @ values
            # d log p(h | v) = (h - E[h | v]) (v, 1)
            paths = before[:, None] * self.to_hidden * (self.to_visible @ later)
            surprise = paths @ self.h - paths.sum(1, keepdims=True) * (self.to_hidden @ self.h)
            w, c = w + self.v.T @ surprise, c + surprise.sum(0)
            # d log p(v | h) = (v - E[v | h]) (h, 1)
            paths = (before @ self.to_hidden)[:, None] * self.to_visible * later
            surprise = paths @ self.v - paths.sum(1, keepdims=True) * (self.to_visible @ self.v)
            w, b = w + surprise.T @ self.h, b + surprise.sum(0)
        return {"weights": w, "visible_bias": b, "hidden_bias": c}


def _sum(*trees: Mapping[str, np.ndarray], signs: tuple[float, ...] = (1, 1, 1)) -> dict[str, Tensor]:
    pairs = list(zip(signs, trees, strict=False))
    return {name: torch.from_numpy(sum(sign * tree[name] for sign, tree in pairs)) for name in NAMES}


def _witness(parameters: Tree, kind: str, divergence: str, opened: str = "", steps: int = STEPS) -> dict[str, Tensor]:
    """The gradient of a surrogate with all blocks in place, or one of them open."""
    tables, start = Tables(parameters, kind), START[kind].numpy()
    end = tables.end(start, steps)
    energy, surprise = tables.free_energy, np.log(end)
    update = tables.slope_of_energy(start - end)

    def through_the_end(values: np.ndarray) -> dict[str, np.ndarray]:
        return tables.slope_of_end(start, steps, values)

    match divergence, opened:
        case (("free_energy" | "kullback_leibler"), ""):
            return _sum(update)
        case "free_energy", "rbm.chain_distribution":
            return _sum(update, through_the_end(energy), signs=(1, -1))
        case "kullback_leibler", "rbm.chain_distribution":
            return _sum(update, through_the_end(energy + surprise), signs=(1, -1))
        case "improved", "":
            return _sum(update, through_the_end(energy + surprise))
        case "improved", "rbm.chain_distribution":  # the sampler's pull up the energy, and down again: entropy is left
            return _sum(update, through_the_end(surprise))
        case "improved", "rbm.chain_energy":  # no negative phase
            return _sum(tables.slope_of_energy(start), through_the_end(energy + surprise))
    raise AssertionError


def _case(kind: str, divergence: str, block) -> BlockCase:
    return BlockCase(
        id=f"exact-{divergence}-{block.name.split('.')[1]}-{kind}",
        block=block,
        parameters=lambda: _parameters(kind),
        loss=lambda p: exact_divergence(_machine(p, kind), START[kind], steps=STEPS, divergence=divergence),
        blocked=lambda p: _witness(p, kind, divergence),
        opened=lambda p: _witness(p, kind, divergence, block.name),
        tolerance=1e-12,
    )


BLOCK_CASES: list[BlockCase] = [
    *(_case(kind, divergence, CHAIN_DISTRIBUTION) for kind in KINDS for divergence in DIVERGENCES),
    *(_case(kind, "improved", CHAIN_ENERGY) for kind in KINDS),
]


# --- distributions ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
class TestDistributions:
    def test_states(self, kind):
        np.testing.assert_array_equal(visible_states(_machine(_parameters(kind), kind)), _visible(kind))

    def test_transition_matrix(self, kind):
        rbm, tables = _machine(_parameters(kind), kind), Tables(_parameters(kind), kind)
        step = transition_matrix(rbm).detach().numpy()
        np.testing.assert_allclose(step, tables.step, rtol=1e-12)
        np.testing.assert_allclose(step.sum(1), 1, rtol=1e-14)
        flow = tables.probability[:, None] * step
        np.testing.assert_allclose(flow, flow.T, rtol=1e-12, err_msg="detailed balance with the model")

    def test_chain_distribution(self, kind):
        rbm, tables = _machine(_parameters(kind), kind), Tables(_parameters(kind), kind)
        found = chain_distribution(rbm, START[kind], steps=4).detach()
        np.testing.assert_allclose(found, tables.end(START[kind].numpy(), 4), rtol=1e-12)
        model = torch.from_numpy(tables.probability)
        torch.testing.assert_close(chain_distribution(rbm, model, steps=5).detach(), model, rtol=1e-12, atol=0)

    @pytest.mark.slow
    def test_chains_end_there(self, kind):
        """Sampled chains, started at the states that `data_distribution` counted."""
        rbm, states = _machine(_parameters(kind), kind), visible_states(_machine(_parameters(kind), kind))
        data = states[START[kind].multinomial(200_000, replacement=True, generator=seeded(1))]
        with torch.no_grad():
            start = data_distribution(rbm, data)
            ends = gibbs(rbm, data, steps=2, generator=seeded(2))
            found, expected = data_distribution(rbm, ends), chain_distribution(rbm, start, steps=2)
        assert (start - START[kind]).abs().max() < 0.005
        floor = (expected * (1 - expected) / len(data)).sqrt().sum() / 2  # about the total variation of exact draws
        assert (found - expected).abs().sum() / 2 < 2 * floor
        assert (start - expected).abs().sum() / 2 > 20 * floor


def test_data_are_counted():
    rbm = _machine(_parameters())
    data = torch.tensor([[0, 1, 1, 0], [1, 1, 1, 1], [0, 1, 1, 0]], dtype=torch.uint8)
    assert data_distribution(rbm, data).nonzero().tolist() == [[6], [15]]
    assert data_distribution(rbm, data)[6].item() == pytest.approx(2 / 3)


# --- divergences --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_what_they_are_called(kind):
    rbm, tables, start = _machine(_parameters(kind), kind), Tables(_parameters(kind), kind), START[kind].numpy()
    end, p = tables.end(start, STEPS), tables.probability
    expected = {
        "free_energy": (start - end) @ tables.free_energy,
        "kullback_leibler": (start * np.log(start / p)).sum() - (end * np.log(end / p)).sum(),
        "improved": start @ tables.free_energy + (end * np.log(end)).sum(),
    }
    assert expected["kullback_leibler"] > 0
    for divergence, value in expected.items():
        found = exact_divergence(rbm, START[kind], steps=STEPS, divergence=divergence).item()
        assert found == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_third_term_gives_the_derivative_of_hintons_divergence(kind):
    """Nothing is left out: finite differences of the difference of two divergences, by the tables alone."""
    start = START[kind].numpy()

    def divergence(parameters: Tree) -> Tensor:
        tables = Tables(parameters, kind)
        end, p = tables.end(start, STEPS), tables.probability
        return torch.tensor((start * np.log(start / p)).sum() - (end * np.log(end / p)).sum())

    parameters = _parameters(kind)
    with unblock(CHAIN_DISTRIBUTION):
        loss = exact_divergence(_machine(parameters, kind), START[kind], steps=STEPS, divergence="kullback_leibler")
    found = dict(zip(NAMES, torch.autograd.grad(loss, list(parameters.values())), strict=True))
    assert relative_error(found, finite_differences(divergence, parameters)) < 1e-9


@pytest.mark.parametrize("kind", KINDS)
def test_fields(kind):
    parameters = _parameters(kind)
    tables, fields = Tables(parameters, kind), gradient_fields(_machine(parameters, kind), START[kind], steps=STEPS)
    expected = {
        "likelihood": _sum(tables.slope_of_energy(START[kind].numpy() - tables.probability)),
        "blocked": _witness(parameters, kind, "free_energy"),
        "third_term": _witness(parameters, kind, "kullback_leibler", "rbm.chain_distribution"),
        "improved": _witness(parameters, kind, "improved"),
        "unblocked": _witness(parameters, kind, "free_energy", "rbm.chain_distribution"),
    }
    assert list(fields) == list(expected)
    for name, field in fields.items():
        assert relative_error(field, expected[name]) < 1e-12, name


def test_fields_do_not_depend_on_what_is_open_or_recorded_around_them():
    rbm, start = _machine(_parameters()), START["bernoulli"]
    expected = gradient_fields(rbm, start, steps=2)
    with unblock(CHAIN_DISTRIBUTION), torch.no_grad():
        found = gradient_fields(rbm, start, steps=2)
        with torch.enable_grad():
            exact_divergence(rbm, start, steps=2, divergence="free_energy")  # `unblock` wants to be reached
    assert all(torch.equal(found[name][key], field[key]) for name, field in expected.items() for key in NAMES)


def test_blocked_field_is_the_mean_over_chains():
    rbm, states = _machine(_parameters()), visible_states(_machine(_parameters()))
    data = states[START["bernoulli"].multinomial(200_000, replacement=True, generator=seeded(1))]
    negative = gibbs(rbm, data, steps=1, generator=seeded(2)).detach()
    fields = gradient_fields(rbm, data_distribution(rbm, data), steps=1)
    sampled = cd_gradient(rbm, data, negative)
    assert relative_error(sampled, fields["blocked"]) < 0.02
    assert relative_error(sampled, fields["likelihood"]) > 0.05
    assert relative_error(fields["likelihood"], likelihood_gradient(rbm, data)) < 1e-10


def test_data_without_some_states_and_energies_out_of_range_stay_finite():
    parameters = {name: nn.Parameter(3000 * value.detach()) for name, value in _parameters().items()}
    start = torch.zeros(16, dtype=torch.float64)
    start[3] = 1
    for divergence in DIVERGENCES:
        loss = exact_divergence(_machine(parameters), start, steps=2, divergence=divergence)
        assert loss.isfinite()
        assert all(value.isfinite().all() for value in torch.autograd.grad(loss, list(parameters.values())))
    fields = gradient_fields(_machine(parameters), start, steps=2)
    assert all(value.isfinite().all() for field in fields.values() for value in field.values())


# --- bias, squared and doubled ------------------------------------------------------------------------------------

IMAGES = bars_and_stripes(3).inputs
# Ascents of the exact gradient at rate 1: after so many steps the log-likelihood is -6.05, and -4.98.
LEARNED = {"init": 0, "early": 100, "mid": 200}


@functools.cache
def _point(name: str) -> tuple[RBM, Tensor]:
    """Return a machine of 5 hidden units for images of 3 x 3, and the distribution of the images."""
    rbm = RBM(9, 5, dtype=torch.float64, generator=seeded(0))
    with torch.no_grad():
        if name == "random":
            generator = seeded(0)
            for parameter in rbm.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
        for _ in range(LEARNED.get(name, 0)):
            for parameter, gradient in likelihood_gradient(rbm, IMAGES).items():
                getattr(rbm, parameter).sub_(gradient)
    return rbm, data_distribution(rbm, IMAGES)


@functools.cache
def _biases(name: str, steps: int) -> dict[str, float]:
    rbm, start = _point(name)
    fields = gradient_fields(rbm, start, steps=steps)
    return {key: bias(field, fields["likelihood"]).relative for key, field in fields.items()}


POINTS = ["init", "random", "early", "mid"]
# relative bias of the update, with the third term, with its opposite sign, and without the block
TABLE = {
    ("init", 1): ("1.2e-04", "3.0e-08", "2.4e-04", "0.97"),
    ("random", 1): ("0.19", "0.074", "0.33", "0.50"),
    ("random", 3): ("0.011", "0.00057", "0.022", "0.72"),
    ("early", 1): ("0.52", "0.19", "0.85", "0.70"),
    ("early", 10): ("1.4e-05", "1.3e-10", "2.8e-05", "0.45"),
    ("mid", 1): ("0.70", "0.52", "0.90", "1.3"),
    ("mid", 10): ("0.030", "0.0011", "0.059", "1.4"),
}


@pytest.mark.parametrize(("point", "steps"), TABLE, ids=str)
def test_table_of_biases(point, steps):
    found = _biases(point, steps)
    for name, printed in zip(("blocked", "third_term", "improved", "unblocked"), TABLE[point, steps], strict=True):
        assert found[name] == pytest.approx(float(printed), rel=0.06), name


@pytest.mark.parametrize("point", POINTS)
def test_the_three_readings_lie_on_a_line(point):
    rbm, start = _point(point)
    fields = gradient_fields(rbm, start, steps=2)
    there = {name: fields["improved"][name] - fields["blocked"][name] for name in NAMES}
    back = {name: fields["blocked"][name] - fields["third_term"][name] for name in NAMES}
    # Relative to the fields: at the start the difference is a hundred million times smaller than they are.
    scale = sum(float(fields["blocked"][name].square().sum()) for name in NAMES) ** 0.5
    assert max(float((there[name] - back[name]).abs().max()) for name in NAMES) < 1e-12 * scale


@pytest.mark.parametrize("point", POINTS)
def test_the_third_term_always_helps_and_its_opposite_always_harms(point):
    for steps in (1, 2, 3, 5):
        found = _biases(point, steps)
        if found["third_term"] > 1e-10:  # else it is rounding
            assert found["third_term"] < found["blocked"] < found["improved"]
        if 1e-9 < found["blocked"] < 0.05:
            assert found["improved"] == pytest.approx(2 * found["blocked"], rel=0.06)


def test_bias_with_the_third_term_is_the_slope_of_the_divergence_that_is_left():
    """Its gradient minus the likelihood's is that of -KL(p_k || p), which is of second order in p_k - p."""
    parameters, kind = _parameters(), "bernoulli"
    fields = gradient_fields(_machine(parameters), START[kind], steps=1)
    found = {name: fields["third_term"][name] - fields["likelihood"][name] for name in NAMES}

    def rest(parameters: Tree) -> Tensor:
        tables = Tables(parameters, kind)
        end = tables.end(START[kind].numpy(), 1)
        return -torch.tensor((end * np.log(end / tables.probability)).sum())

    assert relative_error(found, finite_differences(rest, parameters)) < 1e-8


def test_the_third_term_is_worth_as_many_steps_again():
    """To first order in the distance from data to model, CD-k with its third term has the bias of CD-2k, as a vector.

    The bias of CD-k is (p_0 - p) T^k times the score s, the derivative of log p. That which is left with the third term
    is the inner product of (p_0 - p) T^k with (d p) T^k / p, which is T^k s because T is in detailed balance with p.
    """
    rbm, start = _point("mid")
    with torch.no_grad():
        model = rbm.log_likelihood(visible_states(rbm)).exp()

    def bias_of(name: str, steps: int, share: float) -> dict[str, Tensor]:
        fields = gradient_fields(rbm, model + share * (start - model), steps=steps)
        return {key: fields[name][key] - fields["likelihood"][key] for key in NAMES}

    for steps in (1, 3):
        apart = [
            relative_error(bias_of("third_term", steps, share), bias_of("blocked", 2 * steps, share))
            for share in (0.1, 0.01, 0.001)
        ]
        assert apart[0] < 0.1
        assert apart[0] / apart[1] == pytest.approx(10, rel=0.05)
        assert apart[1] / apart[2] == pytest.approx(10, rel=0.05)


@pytest.mark.parametrize("point", ["early", "mid"])
def test_far_from_the_model_it_is_worth_almost_as_many(point):
    for steps in (1, 2, 3, 5):
        assert 1 < _biases(point, steps)["third_term"] / _biases(point, 2 * steps)["blocked"] < 1.15


@pytest.mark.parametrize(("point", "ks"), [("random", (2, 4, 8)), ("early", (2, 4, 8)), ("mid", (8, 16, 32))])
def test_longer_chains_square_it_too(point, ks):
    """As k grows one bias falls nearly twice as steeply as the other, on a logarithmic scale."""
    found = [_biases(point, k) for k in ks]
    for before, after in itertools.pairwise(found):
        slope = math.log(before["third_term"] / after["third_term"]) / math.log(before["blocked"] / after["blocked"])
        assert 1.6 < slope < 2.05


def test_unblocked_bias_does_not_go_away_with_longer_chains():
    found = [_biases("mid", steps)["unblocked"] for steps in (1, 10, 100)]
    assert min(found) > 1.2
    rbm, start = _point("mid")
    fields = gradient_fields(rbm, start, steps=100)
    assert bias(fields["blocked"], fields["likelihood"]).relative < 1e-12
    assert bias(fields["unblocked"], fields["likelihood"]).cosine < 0.5


def test_bias_measures_size_and_angle():
    exact = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([[4.0]])}
    assert bias(exact, exact).relative == 0
    turned = bias({"a": torch.tensor([0.0, 3.0]), "b": torch.tensor([[4.0]])}, exact)
    assert turned.relative == pytest.approx(math.sqrt(18) / 5)
    assert turned.cosine == pytest.approx(16 / 25)


# --- is it the gradient of anything? ------------------------------------------------------------------------------


def _turning(jacobian: Tensor) -> float:
    """The antisymmetric part's size over that of the symmetric part."""
    return ((jacobian - jacobian.T).norm() / (jacobian + jacobian.T).norm()).item()


@pytest.mark.parametrize(
    ("point", "steps", "expected"),
    [("init", 1, 5.0e-5), ("early", 1, 0.0153), ("mid", 1, 0.0952), ("mid", 3, 0.0277), ("random", 1, 0.121)],
)
def test_the_update_is_the_gradient_of_nothing(point, steps, expected):
    rbm, start = _point(point)
    field = field_jacobian(lambda: exact_divergence(rbm, start, steps=steps, divergence="free_energy"), rbm)
    assert _turning(field.jacobian) == pytest.approx(expected, rel=0.02)
    assert not field.is_gradient_field


@pytest.mark.portable
@pytest.mark.parametrize("point", POINTS)
def test_the_likelihood_has_no_curl(point):
    rbm, _ = _point(point)
    # Rounding of sums over 512 states turns it by some 4e-16, the least curl of an update by 5e-5.
    assert _turning(field_jacobian(lambda: -rbm.log_likelihood(IMAGES).mean(), rbm).jacobian) < 1e-13


@pytest.mark.parametrize("divergence", ["free_energy", "kullback_leibler"])
def test_without_the_block_it_is_the_gradient_of_something_else(divergence):
    rbm, start = _point("mid")
    parameters = list(rbm.parameters())

    def joined(values: tuple[Tensor, ...]) -> Tensor:
        return torch.cat([value.flatten() for value in values])

    with unblock(CHAIN_DISTRIBUTION):
        loss = exact_divergence(rbm, start, steps=1, divergence=divergence)
    gradient = joined(torch.autograd.grad(loss, parameters, create_graph=True))
    rows = [joined(torch.autograd.grad(entry, parameters, retain_graph=True)) for entry in gradient]
    assert _turning(torch.stack(rows)) < 1e-13


# --- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        (
            lambda rbm: exact_divergence(rbm, START["bernoulli"], steps=1, divergence="kl"),
            "`divergence` should be one of 'free_energy', 'kullback_leibler', 'improved'. Found 'kl'.",
        ),
        (
            lambda rbm: exact_divergence(rbm, START["bernoulli"], steps=0, divergence="improved"),
            "`steps` should be a positive integer. Found 0.",
        ),
        (
            lambda rbm: chain_distribution(rbm, START["bernoulli"][:4], steps=1),
            "`start` should have shape (16,). Found (4,).",
        ),
        (
            lambda rbm: data_distribution(rbm, torch.zeros(0, 4)),
            "`data` should have shape (N, 4) with N > 0. Found (0, 4).",
        ),
        (
            lambda rbm: data_distribution(rbm, torch.tensor([[0.0, 1.0, 0.5, 0.0]])),
            "`data` should be states of the visible units. Found [0.0, 1.0, 0.5, 0.0].",
        ),
        (
            lambda rbm: visible_states(RBM(3, 2, visible="gaussian")),
            "The visible units should have finitely many states. Found Gaussian units.",
        ),
        (
            lambda rbm: visible_states(RBM(3, 2, hidden="rectified")),
            "The hidden units should have finitely many states. Found Rectified units.",
        ),
        (lambda rbm: visible_states(RBM(20, 5)), "Both layers together should have at most 2^24 states. Found 2^25."),
        (lambda rbm: transition_matrix(RBM(13, 2)), "The visible layer should have at most 2^12 states. Found 8192."),
    ],
)
def test_a_clear_error(attempt, message):
    with pytest.raises(ValueError) as raised:
        attempt(_machine(_parameters()))
    assert message in str(raised.value)


@pytest.mark.portable
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda start: 7 * start, "`start` should be probabilities that add up to 1. Found a sum of 7."),
        (lambda start: 1.001 * start, "`start` should be probabilities that add up to 1. Found a sum of 1.001."),
        (
            lambda start: torch.cat([start[:-2], start[-2:] * 0 + 1]).sub(1 / 3),
            "`start` should be probabilities. Found -0.",
        ),
        (lambda start: start * math.nan, "`start` should be probabilities. Found nan."),
    ],
    ids=["seven", "off", "negative", "nan"],
)
def test_a_start_that_is_no_distribution_is_refused(change, message):
    rbm, start = _machine(_parameters()), change(START["bernoulli"])
    for attempt in (
        lambda: chain_distribution(rbm, start, steps=1),
        lambda: exact_divergence(rbm, start, steps=1, divergence="free_energy"),
        lambda: gradient_fields(rbm, start, steps=1),
    ):
        with pytest.raises(ValueError) as raised:
            attempt()
        assert str(raised.value).startswith(message)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_data_are_counted_in_every_precision(dtype):
    rbm = _machine(_parameters()).to(dtype)
    found = data_distribution(rbm, torch.eye(4, dtype=dtype)[[0, 0, 1, 2]])
    assert found.dtype == dtype
    assert {place: found[place].item() for place in found.nonzero()[:, 0].tolist()} == {2: 0.25, 4: 0.25, 8: 0.5}


def test_data_that_are_no_tensor_are_refused():
    with pytest.raises(ValueError, match=r"^`data` should be a tensor\. Found ndarray\.$"):
        data_distribution(_machine(_parameters()), np.eye(4))


def test_a_start_of_another_type_is_refused():
    with pytest.raises(TypeError) as raised:
        gradient_fields(_machine(_parameters()), START["bernoulli"].float(), steps=1)
    assert str(raised.value) == "`start` should have the parameters' type torch.float64. Found torch.float32."
    machine = _machine(_parameters()).bfloat16()
    assert chain_distribution(machine, START["bernoulli"].bfloat16(), steps=1).dtype == torch.bfloat16


@pytest.mark.parametrize("frozen", [["visible_bias"], NAMES], ids=["one", "all"])
def test_frozen_parameters_have_gradients_too(frozen):
    rbm = _machine(_parameters())
    expected = gradient_fields(rbm, START["bernoulli"], steps=STEPS)
    for name in frozen:
        getattr(rbm, name).requires_grad_(False)
    with torch.no_grad():
        found = gradient_fields(rbm, START["bernoulli"], steps=STEPS)
    for field, values in expected.items():
        assert list(values) == list(found[field]) == NAMES
        for name in NAMES:
            assert not values[name].requires_grad
            assert torch.equal(found[field][name], values[name])


def test_bias_of_gradients_that_are_zero():
    zero, other = {"weights": torch.zeros(3)}, {"weights": torch.ones(3)}
    assert bias(zero, zero).relative == 0
    assert bias(zero, other).relative == 1
    assert bias(other, zero).relative == math.inf
    assert all(math.isnan(bias(*pair).cosine) for pair in ((zero, zero), (zero, other), (other, zero)))
    assert math.isnan(bias({"weights": torch.full((3,), math.nan)}, other).relative)
