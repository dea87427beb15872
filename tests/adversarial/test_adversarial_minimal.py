"""Minimal-norm attacks: exact on linear models, close to the best on small networks, and nothing left behind."""

import contextlib
import functools
import itertools
import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from accelerator import ACCELERATOR
from contract import finite_differences, relative_error
from each import each
from scipy.optimize import linprog, minimize
from test_adversarial import MODES, Fragile, fragile, network, network_parameters, snapshot
from torch import Tensor, nn

from toolkit import unblock
from toolkit.adversarial.attacks._hyperplane import reach_together, shortest_move
from toolkit.adversarial.attacks._setting import EXAMPLE
from toolkit.adversarial.attacks.carlini_wagner import carlini_wagner
from toolkit.adversarial.attacks.ddn import ddn
from toolkit.adversarial.attacks.deepfool import deepfool
from toolkit.adversarial.attacks.fab import fab
from toolkit.adversarial.certificates.linear import distance_linear

ORDERS = {"linf": math.inf, "l2": 2.0, "l1": 1.0}
SHORT_FAB = partial(fab, steps=5)
SHORT_CW = partial(carlini_wagner, steps=20, searches=2)
SHORT_DDN = partial(ddn, steps=20)

# Readable id -> (attack, norm); all with few steps.
ATTACKS = {
    **{f"deepfool {norm}": (deepfool, norm) for norm in ORDERS},
    **{f"fab {norm}": (SHORT_FAB, norm) for norm in ORDERS},
    "ddn l2": (SHORT_DDN, "l2"),
    "carlini_wagner l2": (SHORT_CW, "l2"),
}
every_attack = pytest.mark.parametrize(("attack", "norm"), ATTACKS.values(), ids=ATTACKS)
DEVICES = ["cpu", pytest.param(ACCELERATOR, marks=pytest.mark.gpu)]


def distance(example: Tensor, x: Tensor, norm: str) -> Tensor:
    return torch.linalg.vector_norm((example.double() - x.double()).flatten(1), ORDERS[norm], 1)


# --- the shortest move to a hyperplane in a box ------------------------------------------------------------------


def plane(seed: int, n: int = 6) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A point in the unit box with coordinates on its faces, a slope with a zero, and the largest and least gain."""
    generator = torch.Generator().manual_seed(seed)
    point = torch.rand(1, n, generator=generator, dtype=torch.float64)
    point[0, 0], point[0, 1] = 0.0, 1.0
    slope = torch.randn(1, n, generator=generator, dtype=torch.float64)
    slope[0, 2] = 0.0
    most = (slope * torch.where(slope > 0, 1 - point, -point)).sum(1)
    least = (slope * torch.where(slope < 0, 1 - point, -point)).sum(1)
    return point, slope, least, most


def linear_program(norm: str, point: Tensor, slope: Tensor, gain: float) -> float:
    """The least norm by a linear program: d = p - q, and in Linf a bound t on all of them."""
    (p,), (w,) = point.tolist(), slope.tolist()
    n = len(p)
    room = [(0.0, 1 - value) for value in p] + [(0.0, value) for value in p]
    if norm == "l1":
        cost, equal = [1.0] * (2 * n), [w + [-v for v in w]]
        return linprog(cost, A_eq=equal, b_eq=[gain], bounds=room, method="highs").fun
    cost, equal = [0.0] * (2 * n) + [1.0], [w + [-v for v in w] + [0.0]]
    above = [[float(i == j) for j in range(2 * n)] + [-1.0] for i in range(2 * n)]
    solution = linprog(cost, above, [0.0] * (2 * n), equal, [gain], [*room, (0, None)], method="highs")
    return solution.fun


@each("share", [0.02, 0.3, 0.8, 0.99, -0.4, -0.95])
@each("seed", range(4))
@pytest.mark.parametrize("norm", ORDERS)
def test_move_to_a_hyperplane_is_the_shortest(norm: str, seed: int, share: float) -> None:
    point, slope, least, most = plane(seed)
    gain = share * (most if share > 0 else -least)
    move = shortest_move(norm, point, slope, gain, torch.zeros_like(point), torch.ones_like(point))
    assert (point + move).min() >= -1e-15
    assert (point + move).max() <= 1 + 1e-15
    assert (slope * move).sum().item() == pytest.approx(gain.item(), rel=1e-12)
    size = torch.linalg.vector_norm(move, ORDERS[norm]).item()
    if norm == "l2":
        p, w = point[0].numpy(), slope[0].numpy()
        inside = [(-v, 1 - v) for v in p]
        onto = {"type": "eq", "fun": lambda d: w @ d - gain.item(), "jac": lambda d: w}
        found = minimize(
            lambda d: d @ d, move[0].numpy() * 0, jac=lambda d: 2 * d, bounds=inside, constraints=onto, tol=1e-15
        )
        assert size == pytest.approx(math.sqrt(found.fun), rel=1e-6)
        assert size <= math.sqrt(found.fun) + 1e-9
    else:
        assert size == pytest.approx(linear_program(norm, point, slope, gain.item()), rel=1e-9)


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30], ids=str)
@pytest.mark.parametrize("norm", ORDERS)
def test_scale_of_the_slope_does_not_matter(norm: str, scale: float) -> None:
    point, slope, _, most = (value.float() for value in plane(1))
    box = torch.zeros_like(point), torch.ones_like(point)
    expected = shortest_move(norm, point, slope, 0.5 * most, *box)
    assert torch.allclose(shortest_move(norm, point, scale * slope, scale * 0.5 * most, *box), expected, rtol=1e-5)


@pytest.mark.parametrize("norm", ORDERS)
def test_without_a_box_the_move_has_the_length_of_the_dual_norm(norm: str) -> None:
    point, slope, _, _ = plane(2)
    box = torch.full_like(point, -torch.inf), torch.full_like(point, torch.inf)
    move = shortest_move(norm, point, slope, torch.tensor([1.7], dtype=torch.float64), *box)
    dual = {"linf": 1.0, "l2": 2.0, "l1": math.inf}[norm]
    size = torch.linalg.vector_norm(move, ORDERS[norm])
    assert size.item() == pytest.approx(1.7 / torch.linalg.vector_norm(slope, dual).item(), rel=1e-14)
    assert (slope * move).sum().item() == pytest.approx(1.7, rel=1e-14)


@pytest.mark.parametrize("norm", ORDERS)
def test_out_of_reach_goes_to_the_corner(norm: str) -> None:
    point, slope, _, most = plane(3)
    move = shortest_move(norm, point, slope, 2 * most, torch.zeros_like(point), torch.ones_like(point))
    corner = torch.where(slope > 0, 1.0, torch.where(slope < 0, 0.0, point))
    assert torch.allclose(point + move, corner, rtol=0, atol=1e-15)


@pytest.mark.parametrize("norm", ORDERS)
def test_move_is_differentiated(norm: str) -> None:
    point, slope, _, most = plane(0)
    slope = slope + 0.01  # away from the corner of the absolute value
    box = torch.zeros_like(point) - 0.01, torch.ones_like(point) + 0.01

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        move = shortest_move(norm, parameters["point"], parameters["slope"], parameters["gain"], *box)
        return (move * torch.arange(1.0, 7.0, dtype=torch.float64)).sum()

    parameters = {"point": point, "slope": slope, "gain": 0.6 * most}
    parameters = {name: value.clone().requires_grad_() for name, value in parameters.items()}
    found = dict(zip(parameters, torch.autograd.grad(loss(parameters), [*parameters.values()]), strict=True))
    assert relative_error(found, finite_differences(loss, parameters, step=1e-5)) < 1e-8


def test_together_uses_up_the_room_where_the_need_cannot_be_met() -> None:
    room = torch.tensor([[0.5, 0.25, 2.0]])
    rate = torch.tensor([[1.0, 2.0, 0.0]])
    assert reach_together(rate, room, torch.tensor([[9.0]])).tolist() == [[0.5, 0.25, 0.0]]
    assert reach_together(rate, room, torch.tensor([[0.45]])).tolist() == [[pytest.approx(0.2), 0.25, 0.0]]


# --- linear models: the distance is known exactly ----------------------------------------------------------------


def linear_model(n_classes: int = 5) -> tuple[nn.Linear, Tensor, Tensor]:
    """Inputs that touch the box, labels that are mostly right."""
    generator = torch.Generator().manual_seed(11)
    model = nn.Linear(12, n_classes, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(torch.randn(n_classes, 12, generator=generator, dtype=torch.float64))
        model.bias.copy_(torch.randn(n_classes, generator=generator, dtype=torch.float64))
    x = torch.rand(60, 12, generator=generator, dtype=torch.float64).mul(1.3).sub(0.15).clamp(0, 1)
    labels = model(x).argmax(1)
    labels[::10] = (labels[::10] + 1) % n_classes
    return model, x, labels


BOXES = {"unit box": (0, 1), "no box": None, "tight box": (-0.05, 1.02)}


@pytest.mark.parametrize("bounds", BOXES.values(), ids=BOXES)
@every_attack
def test_linear_model_is_attacked_at_the_exact_distance(attack: Callable, norm: str, bounds: tuple | None) -> None:
    model, x, labels = linear_model()
    exact = distance_linear(model.weight.detach(), model.bias.detach(), x, labels, norm=norm, bounds=bounds)
    example = attack(model, x, labels, norm=norm, bounds=bounds)
    reachable = exact.isfinite()
    found = distance(example, x, norm)
    assert reachable.sum() >= 40
    assert torch.equal(model(example).argmax(1) != labels, reachable)
    assert torch.allclose(found[reachable], exact[reachable], rtol=1e-11, atol=1e-13)
    assert torch.equal(example[exact == 0], x[exact == 0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@every_attack
def test_single_and_half_precision_succeed_to_their_rounding(attack: Callable, norm: str, dtype: torch.dtype) -> None:
    model, x, labels = linear_model()
    x = x.to(dtype)
    model = model.to(dtype)
    labels = model(x).argmax(1)
    weight, bias = model.weight.detach().double(), model.bias.detach().double()
    exact = distance_linear(weight, bias, x.double(), labels, norm=norm)
    example = attack(model, x, labels, norm=norm)
    assert example.dtype == dtype
    succeeded = model(example).argmax(1) != labels
    # Logits that round to each other may not tell two classes apart at all.
    assert succeeded.double().mean() >= exact.isfinite().double().mean() - (0 if dtype == torch.float32 else 0.05)
    excess = (distance(example, x, norm) - exact)[succeeded & exact.isfinite()]
    scale = exact[exact.isfinite()].median()
    assert excess.max() <= {torch.float32: 1e-5, torch.float16: 0.05, torch.bfloat16: 0.5}[dtype] * scale


@every_attack
def test_target_of_a_linear_model_is_reached(attack: Callable, norm: str) -> None:
    model, x, labels = linear_model(3)
    targets = (labels + 1) % 3
    example = attack(model, x, labels, norm=norm, targets=targets, bounds=None)
    assert torch.equal(model(example).argmax(1), targets)
    # At least as far as the boundary to the target alone, where the third class is not in the way just that.
    difference = model.weight[targets] - model.weight[model(x).argmax(1)]
    dual = {"linf": 1.0, "l2": 2.0, "l1": math.inf}[norm]
    gap = (model(x).amax(1) - model(x).gather(1, targets[:, None])[:, 0]).clamp(min=0)
    least = gap / torch.linalg.vector_norm(difference, dual, 1).clamp(min=1e-300)
    found = distance(example, x, norm)
    assert (found >= least * (1 - 1e-12)).all()
    assert (found <= least * (1 + 1e-11)).double().mean() > 0.6


@every_attack
def test_mask_is_kept_and_the_rest_is_exact(attack: Callable, norm: str) -> None:
    model, x, labels = linear_model()
    mask = torch.arange(12) % 3 != 0
    lower, upper = torch.where(mask, 0.0, x), torch.where(mask, 1.0, x)
    exact = distance_linear(model.weight.detach(), model.bias.detach(), x, labels, norm=norm, bounds=(lower, upper))
    example = attack(model, x, labels, norm=norm, mask=mask)
    assert torch.equal(example[:, ~mask], x[:, ~mask])
    reachable = exact.isfinite()
    assert torch.allclose(distance(example, x, norm)[reachable], exact[reachable], rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("scale", [1e-6, 1e6], ids=str)
@every_attack
def test_confidence_of_the_model_does_not_matter(attack: Callable, norm: str, scale: float) -> None:
    model, x, labels = linear_model()
    expected = attack(model, x, labels, norm=norm)
    assert torch.allclose(attack(lambda x: scale * model(x), x, labels, norm=norm), expected, rtol=0, atol=1e-9)


# --- in a ball ---------------------------------------------------------------------------------------------------


@every_attack
def test_epsilon_keeps_what_is_near_and_projects_what_is_far(attack: Callable, norm: str) -> None:
    model, x, labels = linear_model()
    free = attack(model, x, labels, norm=norm)
    found = distance(free, x, norm)
    epsilon = found.median() * torch.linspace(0.5, 1.5, len(x), dtype=torch.float64)
    example = attack(model, x, labels, norm=norm, epsilon=epsilon)
    assert (distance(example, x, norm) <= epsilon).all()
    near = found <= epsilon * (1 - 1e-12)
    assert near.any()
    assert not near.all()
    assert torch.equal(example[near], free[near])
    assert torch.allclose(distance(example, x, norm)[~near], epsilon[~near], rtol=1e-9)
    assert example.min() >= 0
    assert example.max() <= 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
@every_attack
def test_epsilon_zero_returns_the_values_of_the_input(attack: Callable, norm: str, dtype: torch.dtype) -> None:
    model, x, labels = linear_model()
    x = x.to(dtype)
    assert torch.equal(attack(model.to(dtype), x, labels, norm=norm, epsilon=0.0), x)


# --- networks ----------------------------------------------------------------------------------------------------


def two_dimensional() -> tuple[nn.Sequential, Tensor, Tensor]:
    """A network of two inputs and three classes with curved boundaries, and points in the unit square."""
    generator = torch.Generator().manual_seed(5)
    model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    x = torch.rand(40, 2, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
        model[0].weight.mul_(4)
        model[0].bias.sub_(model[0].weight.sum(1) / 2)
        model[2].bias.sub_(model(x).mean(0))
    return model, x, model(x).argmax(1)


@functools.cache
def distance_on_a_grid(norm: str) -> Tensor:
    """Return the distance of the points of `two_dimensional` to the nearest point of a grid in another class."""
    model, x, labels = two_dimensional()
    ticks = torch.linspace(0, 1, 401, dtype=torch.float64)
    grid = torch.cartesian_prod(ticks, ticks)
    predicted = model(grid).argmax(1)
    assert len(predicted.unique()) == 3
    others = [grid[predicted != label] for label in range(3)]
    return torch.stack(
        [
            torch.linalg.vector_norm(others[label] - row, ORDERS[norm], 1).min()
            for row, label in zip(x, labels.tolist(), strict=True)
        ]
    )


GRID_ATTACKS = {
    "deepfool": (deepfool, 0.7),
    "fab": (partial(fab, steps=20), 0.9),
    "ddn": (ddn, 0.75),
    "carlini_wagner": (carlini_wagner, 0.8),
}


@pytest.mark.parametrize(
    ("name", "norm"), [*itertools.product(["deepfool", "fab"], ORDERS), ("ddn", "l2"), ("carlini_wagner", "l2")]
)
def test_two_dimensional_network_agrees_with_a_dense_grid(name: str, norm: str) -> None:
    attack, share = GRID_ATTACKS[name]
    model, x, labels = two_dimensional()
    on_grid = distance_on_a_grid(norm)
    example = attack(model, x, labels, norm=norm)
    found = distance(example, x, norm)
    assert (model(example).argmax(1) != labels).all()
    assert (found >= on_grid - 2 / 400).all()  # twice the spacing: its length in L1, and more than that in the others
    assert (found <= 1.01 * on_grid + 1e-12).double().mean() >= share


@every_attack
def test_rows_do_not_depend_on_each_other(attack: Callable, norm: str) -> None:
    model, x, labels = two_dimensional()
    together = attack(model, x[:8], labels[:8], norm=norm)
    alone = [attack(model, x[i : i + 1], labels[i : i + 1], norm=norm) for i in range(8)]
    assert torch.allclose(together, torch.cat(alone), rtol=0, atol=1e-9)


@every_attack
def test_unreachable_rows_give_the_strongest_point_in_the_box(attack: Callable, norm: str) -> None:
    model = nn.Linear(2, 2, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[3.0, 1.0], [0.0, 0.0]]))
        model.bias.copy_(torch.tensor([1.0, 0.0]))
    x = torch.tensor([[0.5, 0.25]], dtype=torch.float64)
    example = attack(model, x, torch.tensor([0]), norm=norm)
    assert torch.allclose(example, torch.zeros(1, 2).double(), rtol=0, atol=1e-12)


@every_attack
def test_model_without_slope_leaves_the_input(attack: Callable, norm: str) -> None:
    model = lambda x: torch.stack([x.sum(1) * 0 + 1, x.sum(1) * 0], 1)  # noqa: E731
    x = torch.rand(3, 4, generator=torch.Generator().manual_seed(0))
    example = attack(model, x, torch.zeros(3, dtype=torch.int64), norm=norm)
    assert torch.equal(example, x)


@every_attack
def test_empty_batch(attack: Callable, norm: str) -> None:
    model, x, labels = linear_model()
    assert attack(model, x[:0], labels[:0], norm=norm).shape == (0, 12)


@pytest.mark.parametrize("norm", ORDERS)
def test_restarts_of_fab_are_drawn_and_never_worse(norm: str) -> None:
    model, x, labels = two_dimensional()
    one = fab(model, x, labels, norm=norm, steps=2)
    draws = [
        fab(model, x, labels, norm=norm, steps=2, restarts=4, generator=torch.Generator().manual_seed(seed))
        for seed in (0, 0, 1)
    ]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
    assert (distance(draws[0], x, norm) <= distance(one, x, norm) * (1 + 1e-12)).all()
    assert (distance(draws[0], x, norm) < distance(one, x, norm) - 1e-6).any()


# --- nothing is touched ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("breaks", [False, True], ids=["sound", "breaking"])
@every_attack
def test_attack_leaves_everything_as_it_was(attack: Callable, norm: str, breaks: bool, mode: str) -> None:
    model, x, labels = fragile()
    model.calls_left = 3 if breaks else 100_000
    labels = model.eval()(x).argmax(1) if not breaks else labels
    model, labels = (_again(model), labels)
    before = snapshot(model, x, labels)
    broken = pytest.raises(FloatingPointError) if breaks else contextlib.nullcontext()
    with broken, MODES[mode]():
        example = attack(model, x, labels, norm=norm)
        assert not example.requires_grad
        assert not example.is_inference()
    assert all(map(torch.equal, snapshot(model, x, labels), before))
    assert x.grad is None
    assert model.modes == {False}


def _again(model: Fragile) -> Fragile:
    """Put the model into the mixed modes of `fragile`, and forget the calls so far."""
    model.train()
    model.layers[1].eval()
    model.modes.clear()
    return model


# --- through the attack ------------------------------------------------------------------------------------------


OPEN = {**ATTACKS, "deepfool l2, projected": (partial(deepfool, epsilon=0.5), "l2")}


@pytest.mark.slow
@pytest.mark.parametrize(("attack", "norm"), OPEN.values(), ids=OPEN)
def test_open_attack_is_differentiated_through_its_steps(attack: Callable, norm: str) -> None:
    _, x, _ = two_dimensional()
    x = torch.cat([x, 1 - x, x.flip(1)[:, :1]], 1)[:3]
    constants = {name: value.detach() for name, value in network_parameters().items()}
    labels = network(constants)(x).argmax(1)
    weights = torch.linspace(-1, 1.3, x.numel(), dtype=torch.float64).view_as(x)

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        return (attack(network({**constants, **parameters}), x, labels, norm=norm, bounds=(-1, 2)) * weights).sum()

    parameters = {name: constants[name].clone().requires_grad_() for name in ("b1", "b2")}
    assert not loss(parameters).requires_grad
    with unblock(EXAMPLE):
        value = loss(parameters)
        found = dict(zip(parameters, torch.autograd.grad(value, [*parameters.values()]), strict=True))
    assert torch.equal(value.detach(), loss(parameters))
    assert all(gradient.abs().max() > 1e-3 for gradient in found.values())
    assert relative_error(found, finite_differences(loss, parameters, step=1e-5)) < 1e-7


# --- refused -----------------------------------------------------------------------------------------------------

REFUSED = {
    "norm of ddn": (partial(ddn, norm="linf"), "`norm` should be 'l2' for `ddn`.* Found 'linf'"),
    "norm of carlini_wagner": (partial(carlini_wagner, norm="l1"), "`norm` should be 'l2'.* Found 'l1'"),
    "unknown norm": (partial(deepfool, norm="l3"), "`norm` should be one of .*'l1'. Found 'l3'"),
    "steps": (partial(deepfool, steps=0), "`steps` should be a positive integer. Found 0"),
    "steps of fab": (partial(fab, steps=2.0), "`steps` should be a positive integer. Found 2.0"),
    "steps of ddn": (partial(ddn, steps=-1), "`steps` should be a positive integer. Found -1"),
    "searches": (partial(carlini_wagner, searches=0), "`searches` should be a positive integer. Found 0"),
    "learning_rate": (partial(carlini_wagner, learning_rate=0.0), "`learning_rate` should be positive .* Found 0.0"),
    "n_classes": (partial(deepfool, n_classes=1), "`n_classes` should be an integer from 2. Found 1"),
    "overshoot": (partial(deepfool, overshoot=-0.1), "`overshoot` should be finite and not negative. Found -0.1"),
    "shrinkage": (partial(ddn, shrinkage=1.5), "`shrinkage` should be from 0 to 1. Found 1.5"),
    "pull": (partial(fab, pull=math.nan), "`pull` should be from 0 to 1. Found nan"),
    "retreat": (partial(fab, retreat=-1.0), "`retreat` should be from 0 to 1. Found -1.0"),
    "extrapolation": (partial(fab, extrapolation=0.9), "`extrapolation` should be from 1 to 2. Found 0.9"),
    "epsilon": (partial(fab, epsilon=-1.0), "`epsilon` should be finite and not negative. Found -1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    attack, message = REFUSED[name]
    model, x, labels = linear_model()
    with pytest.raises(ValueError, match=message):
        attack(model, x, labels)
