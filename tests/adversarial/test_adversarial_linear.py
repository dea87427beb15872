"""Exact worst cases of linear classifiers: against programs that know nothing of closed forms, and against attacks."""

import itertools
import math
from functools import cache, partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.optimize import linprog, minimize
from torch import Tensor

from toolkit.adversarial import certify_linear, fgsm, pgd, robust_loss_linear
from toolkit.adversarial.balls import Ball
from toolkit.adversarial.certificates import distance_linear
from toolkit.datasets import digits

NORMS = ["linf", "l2", "l1"]
N, D, C = 7, 6, 4


def classifier(n_classes: int = C, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(n_classes, D, generator=generator, dtype=torch.float64)
    bias = 0.3 * torch.randn(n_classes, generator=generator, dtype=torch.float64)
    x = torch.rand(N, D, generator=generator, dtype=torch.float64).mul(1.8).sub(0.4).clamp(0, 1)
    return weight, bias, x, torch.arange(N) % n_classes


def margins(weight: Tensor, bias: Tensor, x: Tensor, labels: Tensor) -> Tensor:
    """The margin of every class, (N, C); infinite at the label."""
    z = x @ weight.T + bias
    margin = z.gather(1, labels[:, None]) - z
    return margin.scatter(1, labels[:, None], math.inf)


def worst_by_program(weight: Tensor, bias: Tensor, x: Tensor, label: int, epsilon: float, norm: str) -> float:
    """Minimise each margin by a solver: a linear program, or the dual of a second-order cone program."""
    clean = x.numpy()
    low, high = -clean, 1 - clean
    worst = math.inf
    for other in set(range(len(weight))) - {label}:
        u = (weight[other] - weight[label]).numpy()
        if norm == "linf":
            ends = np.stack([np.maximum(low, -epsilon), np.minimum(high, epsilon)], 1)
            gain = -linprog(-u, bounds=ends).fun
        elif norm == "l1":  # the displacement's positive and negative part
            ends = np.concatenate([np.stack([0 * high, high], 1), np.stack([0 * low, -low], 1)])
            gain = -linprog(np.append(-u, u), np.ones((1, 2 * len(u))), [epsilon], bounds=ends).fun
        else:
            gain = _cone_program(u, low, high, epsilon)
        worst = min(worst, float(-(u @ clean) - bias[other] + bias[label] - gain))
    return worst


def _cone_program(u: np.ndarray, low: np.ndarray, high: np.ndarray, epsilon: float) -> float:
    """Return ``max u . d`` over ball and box, from ``min_v eps |u - v| + max_box v . d``: equal by strong duality."""

    def dual(parts: np.ndarray) -> tuple[float, np.ndarray]:
        up, down = parts[: len(u)], parts[len(u) :]  # v = up - down, both not negative
        rest = u - up + down
        size = np.linalg.norm(rest) + 1e-300
        value = epsilon * size + up @ high - down @ low
        return value, np.concatenate([-epsilon * rest / size + high, epsilon * rest / size - low])

    start = np.full(2 * len(u), 0.01)
    options = {"maxiter": 5000, "ftol": 1e-16, "gtol": 1e-12}
    return minimize(dual, start, jac=True, bounds=[(0, None)] * len(start), method="L-BFGS-B", options=options).fun


@pytest.mark.filterwarnings("ignore:`epsilon` should be less than the width of the box")  # the whole box is meant
@pytest.mark.parametrize("epsilon", [0.0, 0.08, 0.5, 3.0])
@pytest.mark.parametrize("norm", NORMS)
def test_worst_margin_is_that_of_a_solver(norm: str, epsilon: float) -> None:
    weight, bias, x, labels = classifier()
    found = certify_linear(weight, bias, x, labels, epsilon=epsilon, norm=norm)
    expected = [
        worst_by_program(weight, bias, row, label, epsilon, norm) for row, label in zip(x, labels.tolist(), strict=True)
    ]
    assert found.dtype == torch.float64
    np.testing.assert_allclose(found.numpy(), expected, rtol=0, atol=2e-7 if norm == "l2" else 1e-12)


@pytest.mark.parametrize("epsilon", [0.08, 0.5])
def test_worst_margin_in_linf_is_at_a_corner(epsilon: float) -> None:
    weight, bias, x, labels = classifier()
    low, high = (x - epsilon).clamp(min=0), (x + epsilon).clamp(max=1)
    corners = [torch.where(torch.tensor(signs), high, low) for signs in itertools.product([False, True], repeat=D)]
    expected = torch.stack([margins(weight, bias, corner, labels).amin(1) for corner in corners]).amin(0)
    found = certify_linear(weight, bias, x, labels, epsilon=epsilon)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize(("norm", "dual"), [("linf", 1), ("l2", 2), ("l1", math.inf)])
def test_without_a_box_it_is_the_dual_norm(norm: str, dual: int) -> None:
    weight, bias, x, labels = classifier(2)
    size = (weight[0] - weight[1]).norm(dual)
    expected = margins(weight, bias, x, labels).amin(1) - 0.7 * size
    found = certify_linear(weight, bias, x, labels, epsilon=0.7, norm=norm, bounds=None)
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=0)


@pytest.mark.filterwarnings("ignore:`epsilon` should be less than the width of the box")  # the whole box is meant
@pytest.mark.parametrize("epsilon", [0.1, 0.6, 1.2])
@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_attack_reaches_the_worst_case_of_two_classes(norm: str, epsilon: float) -> None:
    weight, bias, x, labels = classifier(2)
    exact = certify_linear(weight, bias, x, labels, epsilon=epsilon, norm=norm)
    attack = partial(pgd, partial(F.linear, weight=weight, bias=bias), x, labels, epsilon=epsilon, norm=norm)
    examples = [attack(steps=40, step_size=epsilon)]
    if norm == "linf":
        examples += [fgsm(*attack.args, epsilon=epsilon), attack(steps=1), attack(steps=10)]
    for example in examples:
        torch.testing.assert_close(margins(weight, bias, example, labels).amin(1), exact, rtol=0, atol=1e-13)


@pytest.mark.parametrize("norm", NORMS)
def test_no_attack_goes_below_it(norm: str) -> None:
    weight, bias, x, labels = classifier()
    exact = certify_linear(weight, bias, x, labels, epsilon=0.4, norm=norm)
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        example = pgd(
            partial(F.linear, weight=weight, bias=bias),
            x,
            labels,
            epsilon=0.4,
            norm=norm,
            steps=20,
            generator=generator,
        )
        assert (margins(weight, bias, example, labels).amin(1) >= exact - 1e-14).all()


@pytest.mark.parametrize(("norm", "epsilon"), [("linf", 0.1), ("l2", 0.5)])
def test_targeted_attacks_find_every_worst_case_on_digits(norm: str, epsilon: float) -> None:
    """One attack for each wrong class, on its own margin, is exact; one attack on all of them together is not."""
    weight, bias, x, labels = softmax_regression()
    robust = certify_linear(weight, bias, x, labels, epsilon=epsilon, norm=norm) > 0
    model = partial(F.linear, weight=weight, bias=bias)

    def survives(example: Tensor) -> Tensor:
        return margins(weight, bias, example, labels).amin(1) > 0

    def margin(target: int, z: Tensor, labels: Tensor) -> Tensor:
        return z[:, target] - z.gather(1, labels[:, None])[:, 0]

    steps = 1 if norm == "linf" else 10
    attack = partial(pgd, model, x, labels, epsilon=epsilon, norm=norm, steps=steps, step_size=epsilon)
    found = torch.stack([survives(attack(loss=partial(margin, target))) for target in range(10)]).all(0)
    assert torch.equal(found, robust)
    assert 0.2 < robust.double().mean() < 0.9
    assert survives(attack()).sum() > robust.sum()


@cache
def softmax_regression() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from sklearn.linear_model import LogisticRegression

    data = digits()
    fitted = LogisticRegression(C=1.0, max_iter=1000).fit(data.inputs[:1257], data.labels[:1257])
    return torch.from_numpy(fitted.coef_), torch.from_numpy(fitted.intercept_), data.inputs[1257:], data.labels[1257:]


@pytest.mark.parametrize("bounds", [None, (0, 1)], ids=["no box", "box"])
@pytest.mark.parametrize("norm", NORMS)
def test_at_the_distance_the_worst_margin_is_zero(norm: str, bounds: tuple[float, float] | None) -> None:
    weight, bias, x, _ = classifier(seed=2)
    weight[1, 2] = weight[0, 2]  # a coordinate that one pair of classes does not use
    labels = F.linear(x, weight, bias).argmax(1)
    distance = distance_linear(weight, bias, x, labels, norm=norm, bounds=bounds)
    reached = distance.isfinite()
    assert reached.sum() >= 4
    at = partial(certify_linear, weight, bias, norm=norm, bounds=bounds)
    margin = at(x[reached], labels[reached], epsilon=distance[reached])
    torch.testing.assert_close(margin, torch.zeros_like(margin), rtol=0, atol=1e-13)
    assert (at(x[reached], labels[reached], epsilon=distance[reached] * (1 - 1e-6)) > 0).all()
    if not reached.all():
        assert bounds is not None
        assert (at(x[~reached], labels[~reached], epsilon=9.0) > 0).all()


def test_distance_in_the_box_by_hand() -> None:
    """``4 a + 3 b`` has to fall by 5: a falls by 1, its whole room, and b by 1/3; all distances are without the box
    5/7, 5/5 and 5/4."""
    weight = torch.tensor([[4.0, 3.0], [0.0, 0.0]], dtype=torch.float64)
    arguments = (weight, torch.tensor([-2.0, 0.0]), torch.tensor([[1.0, 1.0]]), torch.tensor([0]))
    for norm, free, held in (("linf", 5 / 7, 5 / 7), ("l2", 1, 1), ("l1", 5 / 4, 4 / 3)):
        assert distance_linear(*arguments, norm=norm, bounds=None).item() == pytest.approx(free, rel=1e-14)
        assert distance_linear(*arguments, norm=norm).item() == pytest.approx(held, rel=1e-14)
    for norm, held in (("linf", 2 / 3), ("l2", math.hypot(0.5, 1)), ("l1", 1.5)):
        # In [1/2, 1] x [0, 1] a gives at most 2, so b has to give 3: its whole room.
        low = torch.tensor([0.5, 0.0])
        found = distance_linear(*arguments, norm=norm, bounds=(low, 1)).item()
        assert found == pytest.approx(1.0 if norm == "linf" else held, rel=1e-14)
    low = torch.tensor([0.5, 0.1])
    assert distance_linear(*arguments, norm="l1", bounds=(low, 1)).item() == math.inf


@pytest.mark.parametrize("norm", ["linf", "l1"])
def test_distance_is_that_of_a_linear_program(norm: str) -> None:
    """Minimise t with ``|d| <= t``, ``(w_j - w_y) . d >= z_y - z_j`` and x + d in the box."""
    weight, bias, x, _ = classifier(seed=4)
    labels = F.linear(x, weight, bias).argmax(1)
    found = distance_linear(weight, bias, x, labels, norm=norm)
    eye, one = np.eye(D), np.ones((D, 1))
    for row in range(N):
        clean, label, least = x[row].numpy(), int(labels[row]), math.inf
        for other in set(range(C)) - {label}:
            u = (weight[other] - weight[label]).numpy()
            gain = float(-(u @ clean) + bias[label] - bias[other])
            if norm == "linf":  # variables d, t
                rows = np.vstack([np.hstack([eye, -one]), np.hstack([-eye, -one]), np.append(-u, 0)])
                ends = [*zip(-clean, 1 - clean, strict=True), (0, None)]
                program = linprog(np.append(0 * u, 1), rows, np.append(np.zeros(2 * D), -gain), bounds=ends)
            else:  # variables: the two parts of d
                ends = [*((0, 1 - value) for value in clean), *((0, value) for value in clean)]
                program = linprog(np.ones(2 * D), np.append(-u, u)[None], [-gain], bounds=ends)
            least = min(least, program.fun if program.status == 0 else math.inf)
        assert found[row].item() == pytest.approx(least, rel=1e-10)


@pytest.mark.parametrize("norm", NORMS)
def test_distance_is_zero_where_the_classifier_errs(norm: str) -> None:
    weight, bias, x, _ = classifier()
    logits = F.linear(x, weight, bias)
    assert (distance_linear(weight, bias, x, logits.argmin(1), norm=norm) == 0).all()
    tied = distance_linear(torch.ones(2, D), None, x, torch.zeros(N, dtype=torch.long), norm=norm)
    assert (tied == 0).all()


@pytest.mark.parametrize("norm", NORMS)
def test_distance_on_digits_splits_them_as_the_worst_margins_do(norm: str) -> None:
    weight, bias, x, labels = softmax_regression()
    distance = distance_linear(weight, bias, x, labels, norm=norm)
    epsilon = {"linf": 0.1, "l2": 0.5, "l1": 1.5}[norm]
    robust = certify_linear(weight, bias, x, labels, epsilon=epsilon, norm=norm) > 0
    assert torch.equal(distance > epsilon, robust)
    assert 0.2 < robust.double().mean() < 0.9


@pytest.mark.filterwarnings("ignore:`epsilon` should be less than the width of the box")  # the whole box is meant
def test_epsilon_may_differ_between_samples() -> None:
    weight, bias, x, labels = classifier()
    epsilon = torch.linspace(0, 1, N)
    for norm in NORMS:
        together = certify_linear(weight, bias, x, labels, epsilon=epsilon, norm=norm)
        alone = [
            certify_linear(weight, bias, x[i : i + 1], labels[i : i + 1], epsilon=epsilon[i].item(), norm=norm)
            for i in range(N)
        ]
        torch.testing.assert_close(together, torch.cat(alone), rtol=0, atol=1e-15)


@pytest.mark.parametrize("bounds", [None, (0, 1)], ids=["no box", "box"])
@pytest.mark.parametrize("norm", NORMS)
def test_robust_loss_is_the_loss_at_the_worst_case_and_so_is_its_gradient(
    norm: str, bounds: tuple[float, float] | None
) -> None:
    """Danskin: the gradient of the maximum is the gradient at the maximiser, and finite differences agree."""
    weight, bias, x, labels = classifier(2)
    parameters = (weight.requires_grad_(), bias.requires_grad_())
    settings = {"epsilon": 0.6, "norm": norm, "bounds": bounds}
    if norm == "l1":  # projected steps come near it only
        towards = (weight[1 - labels] - weight[labels]).detach()
        example = Ball(0.6, norm, bounds).around(x).farthest(towards)
    else:
        example = pgd(partial(F.linear, weight=weight, bias=bias), x, labels, steps=40, step_size=0.6, **settings)
    at_example = F.cross_entropy(F.linear(example, weight, bias), labels)
    exact = robust_loss_linear(weight, bias, x, labels, **settings)
    torch.testing.assert_close(exact, at_example, rtol=0, atol=1e-13)
    for found, expected in zip(
        torch.autograd.grad(exact, parameters), torch.autograd.grad(at_example, parameters), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert torch.autograd.gradcheck(lambda w, b: robust_loss_linear(w, b, x, labels, **settings), parameters)


@pytest.mark.parametrize("norm", NORMS)
def test_classes_that_are_equal_are_no_trouble(norm: str) -> None:
    weight = torch.ones(2, D, dtype=torch.float64)
    weight[:, 0] = torch.tensor([1.0, 2.0])
    x = torch.full((1, D), 0.5, dtype=torch.float64)
    for w, expected in ((weight, -0.5 - 0.25), (torch.ones(2, D), 0.0)):
        found = certify_linear(w, None, x, torch.tensor([0]), epsilon=0.25, norm=norm)
        torch.testing.assert_close(found, torch.tensor([expected], dtype=torch.float64))


REFUSED = {
    "one class": (
        {"weight": torch.ones(1, D)},
        "`weight` should have shape (C, D), at least two classes. Found (1, 6)",
    ),
    "features": ({"x": torch.ones(N, 5)}, "`x` should have shape (N, 6). Found (7, 5)."),
    "norm": ({"norm": "l0"}, "`norm` should be one of 'linf', 'l2', 'l1'. Found 'l0'."),
    "epsilon": ({"epsilon": -1.0}, "`epsilon` should be finite and not negative. Found -1."),
    "out of the box": ({"bounds": (0.2, 1)}, "`x` should lie within `bounds`, 0.2 to 1."),
    "labels": ({"labels": torch.zeros(3, dtype=torch.long)}, "`labels` should have shape (7,). Found (3,)."),
}


LINEAR = {
    "margin": partial(certify_linear, epsilon=0.1),
    "distance": distance_linear,
    "loss": partial(robust_loss_linear, epsilon=0.1),
}


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.uint16], ids=str)
@pytest.mark.parametrize("function", LINEAR)
def test_labels_may_have_any_width(function: str, dtype: torch.dtype) -> None:
    weight, bias, x, labels = classifier(2)
    found = LINEAR[function](weight, bias, x, labels.to(dtype))
    assert torch.equal(found, LINEAR[function](weight, bias, x, labels))


@pytest.mark.parametrize("function", LINEAR)
@pytest.mark.parametrize(
    ("argument", "value", "error", "message"),
    [
        ("labels", torch.ones(N), TypeError, "`labels` should be integers. Found torch.float32."),
        ("labels", torch.ones(N, dtype=torch.bool), TypeError, "`labels` should be integers. Found torch.bool."),
        ("labels", [0] * N, TypeError, "`labels` should be a tensor of integers. Found list."),
        ("labels", np.zeros(N, int), TypeError, "`labels` should be a tensor of integers. Found ndarray."),
        ("labels", torch.arange(N) - 1, ValueError, "`labels` should be from 0 to 1. Found -1 to 5."),
        ("x", torch.zeros(N), ValueError, "`x` should have shape (N, ...). Found (7,)."),
        ("x", np.zeros((N, D)), TypeError, "`x` should be a tensor. Found ndarray."),
        ("x", torch.zeros(N, D).byte(), TypeError, "`x` should be floating point. Found torch.uint8."),
        ("mask", torch.ones(D), TypeError, "`mask` should be a Boolean tensor, True where an input may change. "),
    ],
    ids=["float", "bool", "list", "array", "class", "one dimension", "array of inputs", "bytes", "mask"],
)
def test_wrong_kinds_are_refused(
    function: str, argument: str, value: object, error: type[Exception], message: str
) -> None:
    weight, bias, x, labels = classifier(2)
    with pytest.raises(error) as raised:
        LINEAR[function](weight, bias, **({"x": x, "labels": labels} | {argument: value}))
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize("norm", NORMS)
def test_what_a_mask_holds_is_a_part_of_the_bias(norm: str) -> None:
    weight, bias, x, labels = classifier(2)
    mask = torch.rand(N, D, generator=torch.Generator().manual_seed(3)) < 0.6
    margin = certify_linear(weight, bias, x, labels, epsilon=0.3, norm=norm, mask=mask)
    distance = distance_linear(weight, bias, x, labels, norm=norm, mask=mask)
    for row, free in enumerate(mask):
        constant = bias + weight[:, ~free] @ x[row, ~free]
        reduced = (weight[:, free], constant, x[row : row + 1, free], labels[row : row + 1])
        expected = certify_linear(*reduced, epsilon=0.3, norm=norm)
        torch.testing.assert_close(margin[row : row + 1], expected, rtol=0, atol=1e-12)
        expected = distance_linear(*reduced, norm=norm)
        torch.testing.assert_close(distance[row : row + 1], expected, rtol=0, atol=1e-12)
    loss = robust_loss_linear(weight, bias, x, labels, epsilon=0.3, norm=norm, mask=mask)
    torch.testing.assert_close(loss, F.softplus(-margin).mean(), rtol=0, atol=1e-14)
    assert (margin > certify_linear(weight, bias, x, labels, epsilon=0.3, norm=norm) + 0.01).sum() >= 2


@pytest.mark.filterwarnings("ignore:`epsilon` should be less than the width of the box")  # the whole box is meant
def test_inputs_of_single_precision_may_lie_on_bounds_that_it_does_not_have() -> None:
    """The nearest number to 0.1 in float32 is above 0.1: inside for an attack, so also here; it can only go down."""
    x, labels = torch.tensor([[0.1, 0.05]]).repeat(2, 1), torch.tensor([0, 1])
    found = certify_linear(torch.eye(2), None, x, labels, epsilon=0.2, bounds=(0, 0.1))
    most = x[0, 0].double()
    torch.testing.assert_close(found, torch.stack([0 - most.new_tensor(0.1), 0 - most]), rtol=0, atol=1e-15)
    fixed = certify_linear(torch.eye(2), None, x, labels, epsilon=0.0, bounds=(0, 0.1))
    margin = most - x[0, 1].double()
    torch.testing.assert_close(fixed, torch.stack([margin, -margin]), rtol=0, atol=1e-17)


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    changed, message = REFUSED[name]
    weight, bias, x, labels = classifier()
    arguments = {"weight": weight, "bias": bias, "x": x, "labels": labels, "epsilon": 0.1}
    with pytest.raises(ValueError) as raised:
        certify_linear(**(arguments | changed))
    assert message in str(raised.value)


def test_robust_loss_of_more_than_two_classes_is_refused() -> None:
    with pytest.raises(ValueError, match="exact for two classes"):
        robust_loss_linear(*classifier(3), epsilon=0.1)
