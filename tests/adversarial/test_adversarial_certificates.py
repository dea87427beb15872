"""Verification of ReLU networks and the bounds it rests on: against enumeration, grids, closed forms, and the model."""

import copy
import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from relu_networks import make, relu_network, split_digits, train
from scipy.optimize import linprog
from torch import Tensor, nn

from toolkit.adversarial.certificates import (
    certify_crown,
    certify_interval,
    certify_linear,
    crown_bounds,
    interval_bounds,
    interval_loss,
    verify_relu,
)
from toolkit.adversarial.certificates._branching import Cases, optimise, split
from toolkit.adversarial.certificates._farthest import ball_and_box
from toolkit.adversarial.certificates._layers import affine_chain
from toolkit.adversarial.certificates._linear_relaxation import relaxed_bounds
from toolkit.adversarial.certificates._programs import Program
from toolkit.adversarial.networks import Normalize, mlp, small_cnn

REACHED = {"linf": 0.2, "l1": 0.7}
INSIDE = verify_relu.__globals__
# The rounding of each layer is not taken off.
EXACT = [0.0] * 3


def network(*widths: int, seed: int = 0) -> nn.Sequential:
    """Return a network of random weights, in float64, with some rectifiers that are always off and always on."""
    generator = torch.Generator().manual_seed(seed)
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layer = nn.Linear(before, after, dtype=torch.float64)
        with torch.no_grad():
            layer.weight.copy_(torch.randn(after, before, generator=generator, dtype=torch.float64))
            layer.bias.copy_(0.5 * torch.randn(after, generator=generator, dtype=torch.float64))
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def batch(n_samples: int, n_features: int, n_classes: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(n_samples, n_features, generator=generator, dtype=torch.float64).mul(1.4).sub(0.2).clamp(0, 1)
    return x, torch.arange(n_samples) % n_classes


def own_labels(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).argmax(1)


def worst_margins(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    """The margin at the points themselves, (N,)."""
    logits = model(x)
    margins = logits.gather(1, labels[:, None]) - logits
    return margins.scatter(1, labels[:, None], math.inf).amin(1)


def draws(x: Tensor, epsilon: float, norm: str, count: int, seed: int = 0) -> Tensor:
    """Points of the ball and the box, many at its corners, (count, N, D)."""
    generator = torch.Generator().manual_seed(seed)
    shape = (count, *x.shape)
    direction = torch.randn(shape, generator=generator, dtype=x.dtype)
    if norm == "linf":
        direction = torch.where(torch.rand(shape, generator=generator) < 0.5, direction.sign(), direction.clamp(-1, 1))
    else:
        keep = torch.rand(shape, generator=generator) < 0.5
        direction = direction * keep
        order = 1 if norm == "l1" else 2
        direction = direction / direction.flatten(2).norm(order, dim=2).clamp(min=1e-9).reshape(
            *shape[:2], *[1] * (x.dim() - 1)
        )
    return (x + epsilon * direction).clamp(0, 1)


def size(displacement: Tensor, norm: str) -> Tensor:
    return torch.linalg.vector_norm(displacement.flatten(1), {"linf": math.inf, "l2": 2, "l1": 1}[norm], dim=1)


# --- exact verification ------------------------------------------------------------------------------------------


def by_enumeration(model: nn.Sequential, x: Tensor, label: int, epsilon: float, norm: str) -> float:
    """Return the least margin over all patterns of rectifiers that are on: in each the network is affine."""
    linear = [layer for layer in model if isinstance(layer, nn.Linear)]
    weights = [layer.weight.numpy() for layer in linear]
    biases = [layer.bias.numpy() for layer in linear]
    clean, features = x.numpy(), len(x)
    # Variables: x', and in L1 the sizes of the displacement.
    if norm == "linf":
        bounds = np.stack([np.maximum(clean - epsilon, 0), np.minimum(clean + epsilon, 1)], 1)
        fixed, limits = np.zeros((0, features)), np.zeros(0)
    else:
        bounds = np.concatenate([np.tile([0.0, 1.0], (features, 1)), np.tile([0.0, 9.0], (features, 1))])
        eye = np.eye(features)
        fixed = np.vstack([np.hstack([eye, -eye]), np.hstack([-eye, -eye]), np.append(0 * clean, 0 * clean + 1)])
        limits = np.concatenate([clean, -clean, [epsilon]])
    more = fixed.shape[1] - features
    least = math.inf
    for pattern in itertools.product([0, 1], repeat=sum(len(bias) for bias in biases[:-1])):
        state, constant, rows, right, begin = np.eye(features), np.zeros(features), [fixed], [limits], 0
        for weight, bias in zip(weights[:-1], biases[:-1], strict=True):
            on = np.array(pattern[begin : begin + len(bias)])
            begin += len(bias)
            state, constant = weight @ state, weight @ constant + bias
            sign = (1 - 2 * on)[:, None]
            rows.append(np.hstack([sign * state, np.zeros((len(on), more))]))
            right.append(-sign[:, 0] * constant)
            state, constant = state * on[:, None], constant * on
        for other in set(range(len(biases[-1]))) - {label}:
            u = weights[-1][label] - weights[-1][other]
            shift = u @ constant + biases[-1][label] - biases[-1][other]
            objective = np.append(u @ state, np.zeros(more))
            found = linprog(objective, np.vstack(rows), np.concatenate(right), bounds=bounds)
            if found.status == 0:
                least = min(least, found.fun + shift)
    return least


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["linf", "l1"])
@pytest.mark.parametrize("widths", [(3, 6, 3), (2, 3, 3, 2)], ids=str)
def test_worst_margin_is_the_least_over_all_patterns(widths: tuple[int, ...], norm: str) -> None:
    model = network(*widths)
    x, _ = batch(4, widths[0], widths[-1])
    labels, epsilon = own_labels(model, x), REACHED[norm]
    with torch.no_grad():
        expected = [
            by_enumeration(model, row, label, epsilon, norm) for row, label in zip(x, labels.tolist(), strict=True)
        ]
    found = verify_relu(model, x, labels, epsilon=epsilon, norm=norm, goal="margin", tolerance=1e-8)
    np.testing.assert_allclose(found.upper, expected, rtol=0, atol=2e-6)
    np.testing.assert_allclose(found.lower, expected, rtol=0, atol=2e-6)
    verdict = verify_relu(model, x, labels, epsilon=epsilon, norm=norm)
    assert torch.equal(verdict.robust, torch.tensor(expected) > 0)
    assert torch.equal(verdict.broken, torch.tensor(expected) < 0)


@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
@pytest.mark.parametrize("seed", range(2))
def test_worst_margin_in_the_plane_is_that_of_a_grid(seed: int, norm: str) -> None:
    model = network(2, 8, 8, 3, seed=seed)
    x, _ = batch(3, 2, 3, seed)
    labels, epsilon, n_points = own_labels(model, x), 0.15, 301
    steps = torch.linspace(-epsilon, epsilon, n_points, dtype=torch.float64)
    offsets = torch.cartesian_prod(steps, steps)
    offsets = offsets[size(offsets, norm) <= epsilon * (1 + 1e-9)]
    found = verify_relu(model, x, labels, epsilon=epsilon, norm=norm, bounds=None, goal="margin")
    with torch.no_grad():
        for row in range(len(x)):
            margins = worst_margins(model, x[row] + offsets, labels[row].expand(len(offsets)))
            slack = 40 * 2 * epsilon / (n_points - 1)  # a steep slope over a cell
            assert found.lower[row] <= margins.min() + 1e-9
            if norm == "l2":  # has no programs: the two may stay apart
                assert found.upper[row] <= margins.min() + 0.05
            else:
                assert found.lower[row] >= margins.min() - slack
                assert found.upper[row] <= margins.min() + 1e-5


@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
def test_network_without_rectifiers_is_a_linear_classifier(norm: str) -> None:
    model = nn.Sequential(network(6, 5)[0], network(5, 4, seed=1)[0])
    x, labels = batch(7, 6, 4)
    weight, bias = model[1].weight @ model[0].weight, model[1].weight @ model[0].bias + model[1].bias
    exact = certify_linear(weight, bias, x, labels, epsilon=0.2, norm=norm).detach()
    found = verify_relu(model, x, labels, epsilon=0.2, norm=norm, goal="margin")
    torch.testing.assert_close(found.upper, exact, rtol=0, atol=1e-12)
    # Rounded outward, by 60 roundings of 1e-16 of terms that sum to 200.
    torch.testing.assert_close(found.lower, exact, rtol=0, atol=2e-12)


@pytest.mark.parametrize("goal", ["verdict", "margin"])
def test_at_epsilon_zero_it_is_the_margin_of_the_model(goal: str) -> None:
    model = network(5, 7, 4)
    x, labels = batch(9, 5, 4)
    found = verify_relu(model, x, labels, epsilon=0.0, goal=goal)
    margins = worst_margins(model, x, labels).detach()
    assert torch.equal(found.examples, x)
    torch.testing.assert_close(found.upper, margins, rtol=0, atol=1e-13)
    # What is proved is proved less the rounding of proof and model: some 30 ulp of sums of a hundred terms.
    assert (found.lower < margins).all()
    torch.testing.assert_close(found.lower, margins, rtol=0, atol=1e-11)
    assert torch.equal(found.broken, margins <= 0)


def test_rectifiers_that_never_change_need_no_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the first layer one half is always off and the other always on."""
    model = network(4, 6, 3)
    with torch.no_grad():
        model[0].bias.copy_(torch.tensor([-50.0, 50, -50, 50, -50, 50]))
    x, labels = batch(5, 4, 3)
    weight = model[2].weight[:, 1::2] @ model[0].weight[1::2]
    bias = model[2].weight[:, 1::2] @ model[0].bias[1::2] + model[2].bias
    monkeypatch.setitem(INSIDE, "Program", None)
    found = verify_relu(model, x, labels, epsilon=0.2, goal="margin")
    exact = certify_linear(weight, bias, x, labels, epsilon=0.2).detach()
    # The rounding that is taken off is relative to the terms, which are as large as the biases.
    torch.testing.assert_close(found.lower, exact, rtol=0, atol=1e-12 * 50)
    torch.testing.assert_close(found.upper, exact, rtol=0, atol=1e-11)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["64-32-10 at .2", "64-24-24-10 at .1"])
def test_proofs_by_cases_and_by_programs_agree(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, labels, epsilon = relu_network(name)
    x, labels = x[:40], labels[:40]
    with monkeypatch.context() as patch:
        patch.setitem(INSIDE, "Program", None)
        cases = verify_relu(model, x, labels, epsilon=epsilon)
    monkeypatch.setitem(INSIDE, "_CASES", 0)
    programs = verify_relu(model, x, labels, epsilon=epsilon)
    assert (programs.robust & (certify_crown(model, x, labels, epsilon=epsilon) <= 0)).sum() >= 2
    assert torch.equal(cases.robust, programs.robust)
    assert torch.equal(cases.broken, programs.broken)
    assert not cases.unknown.any()


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
def test_verdicts_do_not_depend_on_the_units_of_a_model(norm: str) -> None:
    """Rectified units are scaled over 14 decades and back in the next layer: the same function."""
    for seed in range(8):
        model = network(4, 8, 8, 3, seed=seed)
        x, _ = batch(6, 4, 3, seed)
        labels, epsilon = own_labels(model, x), 2 * REACHED.get(norm, 0.3)
        expected = verify_relu(model, x, labels, epsilon=epsilon, norm=norm)
        for base in (2.0, 10.0):
            exponents = torch.rand(8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 14 - 7
            scale = base ** (exponents * math.log(10, base)).round()
            scaled = copy.deepcopy(model)
            with torch.no_grad():
                scaled[0].weight.mul_(scale[:, None])
                scaled[0].bias.mul_(scale)
                scaled[2].weight.div_(scale)
            found = verify_relu(scaled, x, labels, epsilon=epsilon, norm=norm)
            assert torch.equal(found.robust, expected.robust)
            assert torch.equal(found.broken, expected.broken)
            if base == 2.0:  # without a rounding
                assert torch.equal(found.lower, expected.lower)


@pytest.mark.parametrize("norm", ["linf", "l1"])
@pytest.mark.parametrize("unit", [1e-8, 1e8])
def test_programs_do_not_depend_on_the_units_of_inputs(norm: str, unit: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(INSIDE, "_CASES", 0)
    for seed in range(4):
        model = network(4, 8, 8, 3, seed=seed)
        x, _ = batch(6, 4, 3, seed)
        labels, epsilon = own_labels(model, x), 2 * REACHED[norm]
        expected = verify_relu(model, x, labels, epsilon=epsilon, norm=norm)
        scaled = copy.deepcopy(model)
        with torch.no_grad():
            scaled[0].weight.div_(unit)
        found = verify_relu(scaled, unit * x, labels, epsilon=unit * epsilon, norm=norm, bounds=(0, unit))
        assert torch.equal(found.robust, expected.robust)
        assert torch.equal(found.broken, expected.broken)


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["linf", "l1"])
def test_a_solver_that_answers_anything_proves_nothing_false(norm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(0)
    weak_dual = Program._weak_dual

    def disturbed(self: Program, cost: np.ndarray, prices: np.ndarray, *ends: np.ndarray) -> float:
        kind = generator.integers(3)
        noise = generator.normal(size=prices.shape)
        return weak_dual(self, cost, [prices * (1 + 1e-3 * noise), prices + 0.1 * noise, 1e6 * noise][kind], *ends)

    monkeypatch.setattr(Program, "_weak_dual", disturbed)
    monkeypatch.setitem(INSIDE, "_CASES", 0)
    x, _ = batch(3, 3, 3)
    for seed in range(4):
        model = network(3, 6, 3, seed=seed)
        labels = own_labels(model, x)
        with torch.no_grad():
            least = [
                by_enumeration(model, row, int(label), REACHED[norm], norm)
                for row, label in zip(x, labels, strict=True)
            ]
        found = verify_relu(model, x, labels, epsilon=REACHED[norm], norm=norm, goal="margin", time_limit=0.2)
        assert (found.lower <= torch.tensor(least) + 1e-12).all()


def test_bounds_of_units_hold_in_exact_arithmetic() -> None:
    """At epsilon 0 a bound in float64 is the unit itself, rounded: as often too high as too low."""
    model = network(5, 9, 9, 9, 2)
    x, _ = batch(20, 5, 2)
    ball = ball_and_box(x, 0.0, "linf", None, None)
    with torch.no_grad():
        chain = affine_chain(model, x, torch.float64)
        plain, outward = (relaxed_bounds(chain, ball, outward=outward) for outward in (False, True))
    misses = 0
    for row in range(len(x)):
        values = [Fraction(value) for value in x[row].tolist()]
        for layer, near, safe in zip(chain, plain, outward, strict=True):
            terms = [[Fraction(weight) for weight in weights] for weights in layer.weight.tolist()]
            values = [
                sum((a * b for a, b in zip(weights, values, strict=True)), Fraction(bias))
                for weights, bias in zip(terms, layer.bias.tolist(), strict=True)
            ]
            for value, low, high, least, most in zip(
                values, *(side[row].tolist() for bounds in (near, safe) for side in bounds), strict=True
            ):
                misses += not Fraction(low) <= value <= Fraction(high)
                assert Fraction(least) <= value <= Fraction(most)
                assert most - least < 1e-11
            values = [max(value, Fraction(0)) for value in values]
    assert misses


@pytest.mark.slow
def test_the_solver_prints_nothing(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(INSIDE, "_CASES", 0)
    model, x, labels, epsilon = relu_network("64-32-10 at .1")
    verify_relu(model, x[:20], labels[:20], epsilon=epsilon)
    assert capfd.readouterr() == ("", "")


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**20),
    widths=st.lists(st.integers(2, 6), min_size=2, max_size=4),
    epsilon=st.floats(0.05, 1),
    norm=st.sampled_from(["linf", "l2", "l1"]),
)
def test_bound_of_every_case_holds_where_its_assumptions_do(
    seed: int, widths: list[int], epsilon: float, norm: str
) -> None:
    model = network(*widths, 2, seed=seed)
    x, _ = batch(1, widths[0], 2, seed)
    ball = ball_and_box(x, epsilon, norm, (0, 1), None)
    with torch.no_grad():
        chain = affine_chain(model, x, torch.float64)
        hidden = relaxed_bounds(chain[:-1], ball)
        objective, constant = chain[-1].weight[:1] - chain[-1].weight[1:], chain[-1].bias[:1] - chain[-1].bias[1:]
        cases = Cases.begin(torch.zeros(1, dtype=torch.long), objective, constant, ball, hidden)
        before, value = [], draws(x, epsilon, norm, 2000, seed)[:, 0]
        for layer in chain[:-1]:
            before.append(value @ layer.weight.T + layer.bias)
            value = before[-1].clamp(min=0)
        margins = value @ objective[0] + constant
        for _ in range(4):
            cases, _, gaps = optimise(cases, chain[:-1], 6, EXACT)
            covered = torch.zeros(len(margins), dtype=torch.bool)
            for case in range(len(cases.bound)):
                signs = [sign[case] for sign in cases.signs]
                holds = torch.stack([(z * sign >= 0).all(1) for z, sign in zip(before, signs, strict=True)]).all(0)
                covered |= holds
                assert (margins[holds] >= cases.bound[case] - 1e-12 * (1 + margins.abs().max())).all()
            assert covered.all()
            cases, splittable = split(cases, gaps)
            if not splittable.all():
                break


@pytest.mark.portable
def test_slopes_and_prices_raise_the_bound() -> None:
    """What is optimised is better than the lines alone, and assumptions with a price better than without.

    Of 100 bounds, in networks of six seeds: 7 to 34, 94 to 100, 5 to 31, and 70 to 85; none where nothing moves.
    """
    model, x, labels, epsilon = relu_network("64-24-24-10 at .1")
    ball = ball_and_box(x, epsilon, "linf", (0, 1), None)
    chain = affine_chain(model, x, torch.float64)
    hidden = relaxed_bounds(chain[:-1], ball)
    other = (labels + 1) % 10
    objective = chain[-1].weight[labels] - chain[-1].weight[other]
    constant = chain[-1].bias[labels] - chain[-1].bias[other]
    root = Cases.begin(torch.arange(len(x)), objective, constant, ball, hidden)
    once, _, _ = optimise(root, chain[:-1], 1, EXACT)
    often, _, gaps = optimise(root, chain[:-1], 16, EXACT)
    assert (often.bound >= once.bound).all()
    assert (often.bound > once.bound + 0.01).sum() > 3
    halves, splittable = split(often, gaps)
    assert splittable.all()
    free, priced = (optimise(halves, chain[:-1], steps, EXACT)[0].bound.chunk(2) for steps in (1, 16))
    assert (torch.minimum(*priced) > often.bound + 1e-3).sum() > 60
    assert (torch.minimum(*priced) > torch.minimum(*free) + 1e-3).sum() > 2
    ended = replace(optimise(halves, chain[:-1], 16, EXACT)[0], bound=torch.full_like(halves.bound, -math.inf))
    unpriced = replace(ended, prices=[torch.zeros_like(price) for price in ended.prices])
    with_prices, without = (optimise(cases, chain[:-1], 1, EXACT)[0].bound for cases in (ended, unpriced))
    assert (with_prices > without + 1e-3).sum() > 30


CASES = [
    ("64-32-10 at .1", "linf"),
    ("64-24-24-10 at .1", "linf"),
    ("convolution at .1", "linf"),
    ("64-32-10 at .1", "l1"),
    ("64-24-24-10 at .1", "l2"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "norm"), CASES, ids=[f"{name}, {norm}" for name, norm in CASES])
def test_every_digit_has_a_verdict_and_what_is_broken_is_shown(name: str, norm: str) -> None:
    model, x, labels, epsilon = relu_network(name)
    epsilon = {"linf": epsilon, "l2": 0.5, "l1": 1.5}[norm]
    found = verify_relu(model, x, labels, epsilon=epsilon, norm=norm)
    assert not found.unknown.any()
    assert 30 < found.robust.sum() < 90
    assert (model(found.examples).argmax(1) != labels)[found.broken].all()
    assert (size(found.examples - x, norm) <= epsilon * (1 + 1e-9)).all()
    assert (found.examples >= 0).all()
    assert (found.examples <= 1).all()
    assert (found.lower <= found.upper).all()
    for points in draws(x, epsilon, norm, 200):
        assert (worst_margins(model, points, labels)[found.robust] > 0).all()


def test_margin_and_verdict_agree() -> None:
    model, x, labels, epsilon = relu_network("64-32-10 at .1")
    x, labels = x[:20], labels[:20]
    verdict = verify_relu(model, x, labels, epsilon=epsilon)
    margin = verify_relu(model, x, labels, epsilon=epsilon, goal="margin")
    assert torch.equal(verdict.robust, margin.robust)
    assert torch.equal(verdict.broken, margin.broken)
    assert (margin.upper - margin.lower <= 1.2e-5).all()
    assert (verdict.lower <= margin.upper + 1e-12).all()
    assert (verdict.upper >= margin.lower - 1e-12).all()


@pytest.mark.parametrize(
    ("by", "height", "verdict"),
    [
        ("cases", 1e-16, "unknown"),
        ("cases", 5e-10, "robust"),
        ("cases", 1e-6, "robust"),
        ("programs", 1e-6, "robust"),
        ("programs", 1e-12, "robust"),
        ("programs", 1e-16, "unknown"),
        ("programs", 1e-3, "robust"),
        ("cases", 0.0, "broken"),
        ("programs", 0.0, "broken"),
        ("cases", -1e-3, "broken"),
    ],
)
def test_a_margin_within_rounding_is_unknown(
    by: str, height: float, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The margin is ``|x - 1/2| + height``, and no line below both rectifiers touches it."""
    model = nn.Sequential(nn.Linear(1, 2), nn.ReLU(), nn.Linear(2, 2)).double()
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1.0], [-1.0]]))
        model[0].bias.copy_(torch.tensor([-0.5, 0.5]))
        model[2].weight.copy_(torch.tensor([[1.0, 1.0], [0.0, 0.0]]))
        model[2].bias.copy_(torch.tensor([height, 0.0]))
    if by == "programs":
        monkeypatch.setitem(INSIDE, "_CASES", 0)
        monkeypatch.setitem(INSIDE, "_FIRST_STEPS", 1)
    found = verify_relu(model, torch.tensor([[0.6]], dtype=torch.float64), torch.tensor([0]), epsilon=0.4)
    assert getattr(found, verdict).item()


@pytest.mark.parametrize("at", ["cases", "programs"])
def test_a_sample_beyond_the_time_limit_is_unknown(at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if at == "programs":
        monkeypatch.setitem(INSIDE, "_CASES", 0)
    model, x, labels, epsilon = relu_network("64-24-24-10 at .1")
    full = verify_relu(model, x[:40], labels[:40], epsilon=epsilon)
    found = verify_relu(model, x[:40], labels[:40], epsilon=epsilon, time_limit=1e-9)
    assert found.unknown.any()
    assert not full.unknown.any()
    assert not (found.robust & ~full.robust).any()
    assert not (found.broken & ~full.broken).any()


def test_samples_do_not_depend_on_each_other() -> None:
    model, x, labels, _ = relu_network("64-32-10 at .1")
    x, labels, epsilon = x[:6], labels[:6], torch.linspace(0.05, 0.2, 6)
    together = verify_relu(model, x, labels, epsilon=epsilon, goal="margin")
    for i in range(6):
        alone = verify_relu(model, x[i : i + 1], labels[i : i + 1], epsilon=epsilon[i].item(), goal="margin")
        torch.testing.assert_close(alone.lower, together.lower[i : i + 1], rtol=0, atol=2e-5)
        torch.testing.assert_close(alone.upper, together.upper[i : i + 1], rtol=0, atol=2e-5)


# --- any chain of layers -----------------------------------------------------------------------------------------


def convolutional() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = nn.Sequential(
            nn.Sequential(nn.Conv2d(2, 3, 3, stride=2, padding=1, groups=1), nn.BatchNorm2d(3), nn.ReLU()),
            nn.Identity(),
            nn.Conv2d(3, 4, 2, bias=False, padding=1, padding_mode="circular"),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.AvgPool2d(2),
            nn.Flatten(),
            nn.Linear(8, 6),
            nn.BatchNorm1d(6, affine=False),
            nn.ReLU(),
            nn.ReLU(),
            nn.Unflatten(1, (6, 1)),
            nn.Flatten(),
            nn.Linear(6, 3),
        ).double()
        model(torch.rand(32, 2, 5, 4, dtype=torch.float64))  # moves the running statistics
        model[0][1].weight.data.uniform_(-1, 1)
    return model.eval().requires_grad_(False)


def test_convolutions_and_normalisations_are_their_matrices() -> None:
    """Zero radius leaves only the network itself; a ball holds what is drawn from it."""
    model = convolutional()
    x = torch.rand(5, 2, 5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for bounds in (interval_bounds, crown_bounds):
        for found in bounds(model, x, x):
            torch.testing.assert_close(found, model(x), rtol=0, atol=1e-13)
    labels = own_labels(model, x)
    found = verify_relu(model, x, labels, epsilon=0.1, goal="margin")
    assert found.examples.shape == x.shape
    torch.testing.assert_close(found.upper, worst_margins(model, found.examples, labels), rtol=0, atol=0)
    assert (found.upper - found.lower).abs().max() < 2e-5
    for points in draws(x, 0.1, "linf", 100):
        assert (worst_margins(model, points, labels) >= found.lower - 1e-6).all()


@pytest.mark.keeps_its_sums
def test_modes_do_not_matter_and_nothing_is_touched() -> None:
    model = convolutional().train().requires_grad_(True)
    model[0][1].eval()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 7)
    before, modes = copy.deepcopy(model.state_dict()), [module.training for module in model.modules()]
    x = torch.rand(4, 2, 5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    kept, state = x.clone(), torch.get_rng_state()
    labels = torch.tensor([0, 1, 2, 0])
    expected = verify_relu(convolutional(), x, labels, epsilon=0.05)
    with torch.inference_mode():
        inside = verify_relu(model, x, labels, epsilon=0.05)
    for found in (verify_relu(model, x, labels, epsilon=0.05), inside):
        assert torch.equal(found.lower, expected.lower)
        assert torch.equal(found.upper, expected.upper)
        assert not found.lower.requires_grad
    interval_loss(model, x, labels, epsilon=0.05)
    certify_crown(model, x, labels, epsilon=0.05)
    certify_interval(model, x, labels, epsilon=0.05)
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all((parameter.grad == 7).all() for parameter in model.parameters())
    assert torch.equal(x, kept)
    assert torch.equal(torch.get_rng_state(), state)


def normalised() -> dict[str, tuple[nn.Sequential, nn.Sequential]]:
    """Networks with constants, and the same with a batch normalisation that has them for statistics."""
    generator = torch.Generator().manual_seed(0)
    mean, std = [0.4, -0.2, 0.7], [0.5, 1.5, 0.2]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = [nn.Conv2d(1, 3, 2), nn.ReLU()], [nn.Flatten(), nn.Linear(27, 3)]
    image = small_cnn(3, 3, image_size=4, widths=[2, 3], generator=generator)
    flat = mlp(3, 2, widths=[5], generator=generator)
    after = [nn.Flatten(), nn.Unflatten(1, (3, 16)), nn.Flatten()]
    widened = nn.Linear(48, 3)
    found = {}
    for name, make_model in {
        "in front": lambda norm: nn.Sequential(norm(mean, std, 2), image),
        "inside": lambda norm: nn.Sequential(nn.Sequential(*layers[0], norm(mean, std, 2)), nn.Sequential(*layers[1])),
        "of features": lambda norm: nn.Sequential(nn.Sequential(nn.Identity(), norm(mean, std, 1)), flat),
        "of one channel": lambda norm: nn.Sequential(nn.Flatten(2), norm(mean, std, 1), *after, widened),
    }.items():
        found[name] = make_model(_constants).double(), make_model(_statistics).double().eval()
    one = nn.Sequential(Normalize(0.3, 0.5), nn.Flatten(), mlp(12, 3, widths=[4], generator=generator)).double()
    found["one for all"] = one, nn.Sequential(_statistics([0.3] * 3, [0.5] * 3, 2), *one[1:]).double().eval()
    return found


def _constants(mean: list[float], std: list[float], dimensions: int) -> nn.Module:
    del dimensions
    return Normalize(mean, std)


def _statistics(mean: list[float], std: list[float], dimensions: int) -> nn.Module:
    norm = (nn.BatchNorm2d if dimensions == 2 else nn.BatchNorm1d)(len(mean), eps=0, affine=False)
    norm.running_mean.copy_(torch.tensor(mean))
    norm.running_var.copy_(torch.tensor(std).double().square())
    return norm


SHAPES = {"in front": (3, 4, 4), "inside": (1, 4, 4), "of features": (3,), "of one channel": (3, 4, 4)}


@pytest.mark.parametrize("name", [*SHAPES, "one for all"])
def test_constants_of_a_normalisation_are_its_statistics(name: str) -> None:
    model, other = (copy.deepcopy(model).requires_grad_(False) for model in normalised()[name])
    x = torch.rand(4, *SHAPES.get(name, (3, 2, 2)), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    labels, near = own_labels(model, x), {"rtol": 0, "atol": 1e-6}  # the squares of the deviations are rounded
    torch.testing.assert_close(model(x), other(x), **near)
    for bounds in (interval_bounds, crown_bounds):
        for found in bounds(model, x, x):
            torch.testing.assert_close(found, model(x), rtol=0, atol=1e-13)
        torch.testing.assert_close(bounds(model, x - 0.1, x + 0.2), bounds(other, x - 0.1, x + 0.2), **near)
    for certify in (certify_crown, certify_interval, interval_loss):
        found = certify(model, x, labels, epsilon=0.05)
        torch.testing.assert_close(found, certify(other, x, labels, epsilon=0.05), **near)
    found = verify_relu(model, x, labels, epsilon=0.05, goal="margin")
    torch.testing.assert_close(found.upper, worst_margins(model, found.examples, labels), rtol=0, atol=0)
    assert (found.upper - found.lower).abs().max() < 2e-5
    for points in draws(x, 0.05, "linf", 50):
        assert (worst_margins(model, points, labels) >= found.lower - 1e-6).all()


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
def test_what_a_mask_holds_is_part_of_the_biases(norm: str) -> None:
    """A network of the free inputs alone, whose first biases have what the others contribute, is another witness."""
    model = network(6, 6, 3)
    x, _ = batch(4, 6, 3)
    labels = own_labels(model, x)
    mask = torch.tensor([True, False, True, True, True, False])
    arguments = {"epsilon": {"linf": 0.15, "l2": 0.3, "l1": 0.5}[norm], "norm": norm}
    masked = verify_relu(model, x, labels, mask=mask, goal="margin", **arguments)
    assert torch.equal(masked.examples[:, ~mask], x[:, ~mask])
    assert (size(masked.examples - x, norm) <= arguments["epsilon"] * (1 + 1e-9)).all()
    crown = certify_crown(model, x, labels, mask=mask, **arguments)
    interval = certify_interval(model, x, labels, mask=mask, epsilon=0.15)
    losses = []
    for row in range(len(x)):
        first = nn.Linear(4, 6, dtype=torch.float64)
        with torch.no_grad():
            first.weight.copy_(model[0].weight[:, mask])
            first.bias.copy_(model[0].bias + model[0].weight[:, ~mask] @ x[row, ~mask])
        reduced, one = nn.Sequential(first, *model[1:]), (x[row : row + 1, mask], labels[row : row + 1])
        alone = verify_relu(reduced, *one, goal="margin", **arguments)
        for found, expected in ((masked.lower, alone.lower), (masked.upper, alone.upper)):
            torch.testing.assert_close(found[row : row + 1], expected, rtol=0, atol=2e-5 if norm != "l2" else 2e-2)
        torch.testing.assert_close(crown[row : row + 1], certify_crown(reduced, *one, **arguments), rtol=0, atol=1e-9)
        torch.testing.assert_close(interval[row : row + 1], certify_interval(reduced, *one, epsilon=0.15))
        losses.append(interval_loss(reduced, *one, epsilon=0.15))
    torch.testing.assert_close(interval_loss(model, x, labels, mask=mask, epsilon=0.15), torch.stack(losses).mean())
    everywhere = verify_relu(model, x, labels, goal="margin", **arguments)
    assert (everywhere.upper < masked.lower - 0.01).sum() >= 2
    held = verify_relu(model, x, labels, mask=torch.zeros(4, 1, dtype=torch.bool), **arguments)
    assert torch.equal(held.examples, x)
    torch.testing.assert_close(held.upper, worst_margins(model, x, labels).detach(), rtol=0, atol=0)


@pytest.mark.parametrize("order", ["first", "last", "twice"])
def test_rectifiers_may_stand_anywhere(order: str) -> None:
    layers = list(network(3, 4, 3))
    model = {
        "first": nn.Sequential(nn.ReLU(), *layers),
        "last": nn.Sequential(*layers, nn.ReLU()),
        "twice": nn.Sequential(layers[0], nn.ReLU(), nn.Identity(), nn.ReLU(), layers[2]),
    }[order]
    x, _ = batch(4, 3, 3)
    labels = own_labels(model, x)
    found = verify_relu(model, x - 0.3, labels, epsilon=0.2, bounds=None, goal="margin")
    torch.testing.assert_close(found.upper, worst_margins(model, found.examples, labels).detach(), rtol=0, atol=0)
    assert (found.upper - found.lower).abs().max() < 2e-5
    points = draws(x, 0.2, "linf", 200) - 0.3
    assert all((worst_margins(model, point, labels) >= found.lower - 1e-6).all() for point in points)


# --- bounds ------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:`epsilon` should be less than the width of the box")  # the whole box is meant
@pytest.mark.slow
@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**20),
    widths=st.lists(st.integers(1, 7), min_size=2, max_size=4),
    epsilon=st.floats(0, 2),
    norm=st.sampled_from(["linf", "l2", "l1"]),
)
def test_no_point_of_the_ball_is_out_of_the_bounds(seed: int, widths: list[int], epsilon: float, norm: str) -> None:
    model = network(*widths, 3, seed=seed)
    x, labels = batch(3, widths[0], 3, seed)
    points = draws(x, epsilon, norm, 100, seed)
    lower, upper = (x - epsilon).clamp(0, 1), (x + epsilon).clamp(0, 1)
    plain, relaxed = interval_bounds(model, lower, upper), crown_bounds(model, lower, upper)
    logits = model(points.flatten(0, 1)).reshape(*points.shape[:2], 3)
    slack = 1e-12 * (1 + logits.abs().max().item())
    for low, high in (plain, relaxed):
        assert (logits >= low - slack).all()
        assert (logits <= high + slack).all()
    assert (relaxed[0] >= plain[0] - slack).all()
    assert (relaxed[1] <= plain[1] + slack).all()
    margins = torch.stack([worst_margins(model, point, labels) for point in points])
    assert (margins >= certify_crown(model, x, labels, epsilon=epsilon, norm=norm) - slack).all()
    if norm == "linf":
        assert (margins >= certify_interval(model, x, labels, epsilon=epsilon) - slack).all()


def test_bounds_of_a_linear_model_are_exact() -> None:
    model = network(6, 4)
    x, labels = batch(7, 6, 4)
    for norm in ("linf", "l2", "l1"):
        exact = certify_linear(model[0].weight, model[0].bias, x, labels, epsilon=0.3, norm=norm).detach()
        found = certify_crown(model, x, labels, epsilon=0.3, norm=norm)
        torch.testing.assert_close(found, exact, rtol=0, atol=2e-13)  # rounded outward: 64 times 1e-16 of terms of 15
    found = certify_interval(model, x, labels, epsilon=0.3)
    torch.testing.assert_close(found, certify_linear(model[0].weight, model[0].bias, x, labels, epsilon=0.3).detach())


def test_relaxation_of_one_rectifier_by_hand() -> None:
    """relu(2 x - 1/2) on [0, 1] lies between 2 x - 1/2 and 3 x / 2, because 3/2 > 1/2."""
    model = nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 2, bias=False)).double()
    with torch.no_grad():
        model[0].weight.fill_(2)
        model[0].bias.fill_(-0.5)
        model[2].weight.copy_(torch.tensor([[1.0], [-4.0]]))
    low, high = crown_bounds(model, torch.zeros(1, 1).double(), torch.ones(1, 1).double())
    torch.testing.assert_close(low, torch.tensor([[0.0, -6.0]], dtype=torch.float64))
    torch.testing.assert_close(high, torch.tensor([[1.5, 0.0]], dtype=torch.float64))


@pytest.mark.parametrize(
    "activation",
    [nn.ReLU(), nn.LeakyReLU(0.3), nn.ELU(), nn.Softplus(), nn.Sigmoid(), nn.Tanh(), nn.MaxPool1d(2)],
    ids=lambda activation: type(activation).__name__,
)
def test_intervals_pass_activations_that_do_not_fall(activation: nn.Module) -> None:
    first = network(4, 6)[0]
    model = nn.Sequential(first, nn.Unflatten(1, (1, 6)), activation, nn.Flatten())
    x, _ = batch(5, 4, 2)
    low, high = interval_bounds(model, x, x)
    torch.testing.assert_close(low, model(x), rtol=0, atol=1e-14)
    low, high = interval_bounds(model, (x - 0.2), (x + 0.2))
    # Each unit alone reaches its bounds, at the corners of its own weights.
    if not isinstance(activation, nn.MaxPool1d):
        for unit, weight in enumerate(first.weight):
            torch.testing.assert_close(high[:, unit], model(x + 0.2 * weight.sign())[:, unit], rtol=0, atol=1e-13)
            torch.testing.assert_close(low[:, unit], model(x - 0.2 * weight.sign())[:, unit], rtol=0, atol=1e-13)


def test_interval_loss_is_the_loss_at_the_bounds_of_the_margins() -> None:
    model = network(4, 5, 3)
    x, labels = batch(6, 4, 3)
    low, high = interval_bounds(nn.Sequential(model[0], model[1]), (x - 0.1).clamp(0, 1), (x + 0.1).clamp(0, 1))
    expected = []
    for row, label in enumerate(labels.tolist()):
        margins = []
        for other in set(range(3)) - {label}:
            u = model[2].weight[label] - model[2].weight[other]
            margins.append(
                (torch.where(u > 0, low[row], high[row]) * u).sum() + model[2].bias[label] - model[2].bias[other]
            )
        expected.append(torch.log1p(torch.stack([torch.exp(-margin) for margin in margins]).sum()))
    found = interval_loss(model, x, labels, epsilon=0.1)
    torch.testing.assert_close(found, torch.stack(expected).mean(), rtol=0, atol=1e-13)
    exact = F.cross_entropy(model(x), labels)
    torch.testing.assert_close(interval_loss(model, x, labels, epsilon=0.0), exact, rtol=0, atol=1e-13)
    # A model that ends in something else has bounds of its logits only: looser, and right.
    looser = interval_loss(nn.Sequential(*model, nn.LeakyReLU(1.0)), x, labels, epsilon=0.1)
    assert looser > found


@pytest.mark.parametrize("bounded", ["interval loss", "intervals", "relaxation"])
def test_bounds_are_differentiable_in_the_parameters(bounded: str) -> None:
    model = network(3, 4, 3)
    x, labels = batch(4, 3, 3)

    def loss(*values: Tensor) -> Tensor:
        changed = copy.deepcopy(model)
        for layer, weight, bias in zip((changed[0], changed[2]), values[::2], values[1::2], strict=True):
            del layer.weight, layer.bias
            layer.weight, layer.bias = weight, bias
        if bounded == "interval loss":
            return interval_loss(changed, x, labels, epsilon=0.1)
        function = interval_bounds if bounded == "intervals" else crown_bounds
        low, high = function(changed, x - 0.1, x + 0.1)
        return (low * torch.arange(3)).sum() - high.square().sum()

    assert torch.autograd.gradcheck(
        loss, [parameter.detach().clone().requires_grad_() for parameter in model.parameters()]
    )


@pytest.mark.slow
def test_training_on_intervals_certifies_what_ordinary_training_does_not() -> None:
    x, labels, held_out, held_out_labels = split_digits()
    held_out, held_out_labels = held_out[:200], held_out_labels[:200]
    ordinary = train(make((64,)), x, labels, epsilon=0.0, epochs=15)
    model, generator, n_epochs = make((64,)), torch.Generator().manual_seed(0), 25
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    for epoch in range(n_epochs):
        share = min(1.0, epoch / (0.6 * n_epochs))
        for rows in torch.randperm(len(x), generator=generator).split(128):
            inputs, targets = x[rows], labels[rows]
            optimizer.zero_grad()
            loss = (1 - share / 2) * F.cross_entropy(model(inputs), targets)
            (loss + share / 2 * interval_loss(model, inputs, targets, epsilon=0.1 * share)).backward()
            optimizer.step()
    model.requires_grad_(False)
    certified = [
        (certify_interval(network, held_out, held_out_labels, epsilon=0.1) > 0).double().mean()
        for network in (ordinary, model)
    ]
    assert certified[0] < 0.05
    assert certified[1] > 0.4
    assert (own_labels(model, held_out) == held_out_labels).double().mean() > 0.85


# --- refusals ----------------------------------------------------------------------------------------------------


class Residual(nn.Sequential):
    def forward(self, input: Tensor) -> Tensor:
        return input + super().forward(input)


def hooked() -> nn.Sequential:
    model = network(3, 4, 2)
    model[0].register_forward_hook(lambda *_: None)
    return model


REFUSED = {
    "layer": (nn.Sequential(nn.Linear(3, 2), nn.GELU()), {}, TypeError, "Sequential. Found GELU."),
    "own forward": (Residual(nn.Linear(3, 3)), {}, TypeError, "Sequential. Found Residual."),
    "hook": (hooked(), {}, TypeError, "`model` should have no forward hooks. Found one on Linear."),
    "activation": (nn.Sequential(nn.Linear(3, 2), nn.Tanh()), {}, TypeError, "ReLU and Sequential. Found Tanh."),
    "statistics": (
        nn.Sequential(nn.BatchNorm1d(3, track_running_stats=False)),
        {},
        ValueError,
        "`model` should normalise by running statistics.",
    ),
    "channels": (
        nn.Sequential(nn.Unflatten(1, (1, 3)), Normalize([0.1, 0.2], [1, 2]), nn.Flatten()),
        {},
        ValueError,
        "should have 2 channels. Found 1.",
    ),
    "no logits": (
        nn.Sequential(nn.Unflatten(1, (3, 1)), nn.Linear(1, 2)),
        {},
        ValueError,
        "`model` should return logits of shape (N, C). Found (N, 3, 2).",
    ),
    "mask": (network(3, 2), {"mask": torch.ones(3)}, TypeError, "`mask` should be a Boolean tensor,"),
    "shape of the mask": (
        network(3, 2),
        {"mask": torch.ones(2, dtype=torch.bool)},
        ValueError,
        "`mask` should broadcast to the shape of `x`, (2, 3). Found (2,).",
    ),
    "batch": (nn.Sequential(nn.Flatten(0), nn.Linear(3, 2)), {}, TypeError, "the samples of a batch apart."),
    "one logit": (network(3, 1), {}, ValueError, "`model` should return at least two logits. Found 1."),
    "norm": (network(3, 2), {"norm": "l0"}, ValueError, "`norm` should be one of 'linf', 'l2', 'l1'. Found 'l0'."),
    "goal": (network(3, 2), {"goal": "best"}, ValueError, "`goal` should be one of 'verdict', 'margin'. Found 'best'."),
    "tolerance": (
        network(3, 2),
        {"tolerance": 0.0},
        ValueError,
        "`tolerance` should be positive and finite. Found 0.0.",
    ),
    "time": (
        network(3, 2),
        {"time_limit": -1.0},
        ValueError,
        "`time_limit` should be positive. Found -1.0.",
    ),
    "epsilon": (network(3, 2), {"epsilon": -1.0}, ValueError, "`epsilon` should be finite and not negative."),
    "labels": (
        network(3, 2),
        {"labels": torch.tensor([0])},
        ValueError,
        "`labels` should have shape (2,). Found (1,).",
    ),
    "range": (network(3, 2), {"labels": torch.tensor([0, 2])}, ValueError, "should be from 0 to 1. Found 0 to 2."),
    "box": (network(3, 2), {"bounds": (0.9, 1)}, ValueError, "`x` should lie within `bounds`, 0.9 to 1."),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    model, changed, error, message = REFUSED[name]
    x, labels = batch(2, 3, 2)
    arguments = {"x": x, "labels": labels, "epsilon": 0.1} | changed
    with pytest.raises(error) as raised:
        verify_relu(model, **arguments)
    assert message in str(raised.value)


@pytest.mark.parametrize("certify", [certify_crown, certify_interval, interval_loss], ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", ["layer", "no logits", "one logit", "labels", "range", "box", "mask"])
def test_refused_by_bounds(certify: Callable[..., Tensor], name: str) -> None:
    model, changed, error, message = REFUSED[name]
    x, labels = batch(2, 3, 2)
    with pytest.raises(error) as raised:
        certify(model, **({"x": x, "labels": labels, "epsilon": 0.1} | changed))
    assert message in str(raised.value)


def test_activations_that_fall_are_refused() -> None:
    x, _ = batch(2, 3, 2)
    with pytest.raises(ValueError, match=r"that do not fall\. Found LeakyReLU"):
        interval_bounds(nn.Sequential(nn.Linear(3, 2), nn.LeakyReLU(-0.1)), x, x)


@pytest.mark.parametrize("of", ["relu", "crown", "interval"])
def test_a_refusal_names_the_layers_that_are_taken_and_no_others(of: str) -> None:
    def ask(model: nn.Module) -> None:
        x = torch.full((1, 1, 2, 2), 0.5, dtype=torch.float64)
        if of == "relu":
            verify_relu(model.double(), x, torch.tensor([0]), epsilon=0.1)
        else:
            (crown_bounds if of == "crown" else interval_bounds)(model.double(), x, x)

    with pytest.raises(TypeError) as raised:
        ask(nn.Sequential(nn.GELU()))
    named = str(raised.value).removeprefix("`model` should be a torch.nn.Sequential of ").split(". Found")[0]
    flat, row, image = (nn.Flatten(),), (nn.Flatten(), nn.Unflatten(1, (1, 4))), ()
    layers: dict[str, tuple[tuple[nn.Module, ...], nn.Module]] = {
        "Linear": (flat, nn.Linear(4, 2)),
        "Conv1d": (row, nn.Conv1d(1, 2, 3)),
        "Conv2d": (image, nn.Conv2d(1, 2, 2)),
        "BatchNorm1d": (row, nn.BatchNorm1d(1)),
        "BatchNorm2d": (image, nn.BatchNorm2d(1)),
        "AvgPool2d": (image, nn.AvgPool2d((1, 2))),
        "AdaptiveAvgPool2d": (image, nn.AdaptiveAvgPool2d((1, 2))),
        "Normalize": (image, Normalize(0.5, 0.25)),
        "Flatten": (image, nn.Flatten()),
        "Unflatten": (flat, nn.Unflatten(1, (2, 2))),
        "Dropout1d": (row, nn.Dropout1d()),
        "MaxPool1d": (row, nn.MaxPool1d(2)),
        "MaxPool2d": (image, nn.MaxPool2d((1, 2))),
        "Sequential": (image, nn.Sequential()),
    }
    names = named.replace(" and ", ", ").split(", ")
    assert {"Linear", "Normalize", "ReLU"} <= set(names)
    assert ("LeakyReLU" in names) == (of == "interval")
    for name in names:
        before, layer = layers[name] if name in layers else (image, getattr(nn, name)())
        ask(nn.Sequential(*before, layer, nn.Flatten()))


LABELS = {
    "float": (torch.tensor([0.0, 1.0]), "`labels` should be integers. Found torch.float32."),
    "boolean": (torch.tensor([False, True]), "`labels` should be integers. Found torch.bool."),
    "complex": (torch.tensor([0j, 1j]), "`labels` should be integers. Found torch.complex64."),
    "list": ([0, 1], "`labels` should be a tensor of integers. Found list."),
    "array": (np.array([0, 1]), "`labels` should be a tensor of integers. Found ndarray."),
    "none": (None, "`labels` should be a tensor of integers. Found NoneType."),
}
INPUTS = {
    "one dimension": (torch.zeros(2), ValueError, "`x` should have shape (N, ...). Found (2,)."),
    "no dimension": (torch.tensor(0.0), ValueError, "`x` should have shape (N, ...). Found ()."),
    "integers": (torch.zeros(2, 3, dtype=torch.long), TypeError, "`x` should be floating point. Found torch.int64."),
    "array": (np.zeros((2, 3)), TypeError, "`x` should be a tensor. Found ndarray."),
}
CERTIFICATES = {
    "relu": lambda model, x, labels: verify_relu(model, x, labels, epsilon=0.1, goal="margin").upper,
    "crown": partial(certify_crown, epsilon=0.1),
    "interval": partial(certify_interval, epsilon=0.1),
    "interval loss": partial(interval_loss, epsilon=0.1),
}


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.uint16], ids=str)
@pytest.mark.parametrize("certificate", CERTIFICATES)
def test_labels_may_have_any_width(certificate: str, dtype: torch.dtype) -> None:
    model = network(3, 4, 2)
    x, labels = batch(5, 3, 2)
    certify = CERTIFICATES[certificate]
    assert torch.equal(certify(model, x, labels.to(dtype)), certify(model, x, labels))


@pytest.mark.parametrize("name", LABELS)
@pytest.mark.parametrize("certificate", CERTIFICATES)
def test_labels_that_are_no_integers_are_refused(certificate: str, name: str) -> None:
    labels, message = LABELS[name]
    with pytest.raises(TypeError) as raised:
        CERTIFICATES[certificate](network(3, 4, 2), batch(2, 3, 2)[0], labels)
    assert message == str(raised.value)


@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("certificate", CERTIFICATES)
def test_inputs_that_are_no_batch_of_numbers_are_refused(certificate: str, name: str) -> None:
    x, error, message = INPUTS[name]
    with pytest.raises(error) as raised:
        CERTIFICATES[certificate](network(3, 4, 2), x, torch.tensor([0, 1]))
    assert message == str(raised.value)


@pytest.mark.parametrize("bounds", [interval_bounds, crown_bounds], ids=lambda f: f.__name__)
def test_ends_that_are_no_batch_of_numbers_are_refused(bounds: Callable[..., tuple[Tensor, Tensor]]) -> None:
    for x, error, message in INPUTS.values():
        with pytest.raises(error) as raised:
            bounds(network(3, 2), x, x)
        assert message.replace("`x`", "`lower`") == str(raised.value)


def test_bounds_that_cross_are_refused() -> None:
    with pytest.raises(ValueError, match="`lower` should not be above `upper`"):
        crown_bounds(network(3, 2), torch.ones(1, 3), torch.zeros(1, 3))
    with pytest.raises(ValueError, match="should have one shape"):
        interval_bounds(network(3, 2), torch.ones(1, 3), torch.ones(2, 3))


def test_no_samples() -> None:
    found = verify_relu(network(3, 4, 2), torch.zeros(0, 3), torch.zeros(0, dtype=torch.long), epsilon=0.1)
    assert str(found) == "0 samples: 0 robust, 0 broken, 0 unknown"
