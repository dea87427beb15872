"""Square: finds what gradients cannot, stays in ball and box, and every sample is by itself."""

import contextlib
import math
from collections.abc import Callable
from fractions import Fraction
from functools import partial

import pytest
import torch
from test_adversarial import MODES, fragile, snapshot
from test_adversarial_minimal import ORDERS, distance, linear_model
from torch import Tensor
from values import seeded

from toolkit import unblock
from toolkit.adversarial.attacks import square as module
from toolkit.adversarial.attacks._setting import EXAMPLE
from toolkit.adversarial.attacks.square import square
from toolkit.adversarial.certificates.linear import certify_linear, distance_linear

every_norm = pytest.mark.parametrize("norm", ORDERS)
EPSILON = {"linf": 0.1, "l2": 0.4, "l1": 1.0}


def images(n: int = 12, channels: int = 2) -> Tensor:
    return torch.rand(n, channels, 6, 5, generator=seeded(1), dtype=torch.float64)


def linear_on_images(channels: int = 2) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    weight = torch.randn(3, channels * 30, generator=seeded(2), dtype=torch.float64)
    return weight, lambda x: x.flatten(1) @ weight.T


@every_norm
def test_robust_rows_of_a_linear_model_are_nearly_those_of_the_certificate(norm: str) -> None:
    model, x, labels = linear_model()
    weight, bias = model.weight.detach(), model.bias.detach()
    labels = model(x).argmax(1)
    epsilon = distance_linear(weight, bias, x, labels, norm=norm).median()
    robust = certify_linear(weight, bias, x, labels, epsilon=epsilon, norm=norm) > 0
    example = square(model, x, labels, epsilon=epsilon, norm=norm, queries=300, generator=seeded())
    holds = model(example).argmax(1) == labels
    assert holds[robust].all()
    assert (holds & ~robust).sum() <= {"linf": 3, "l2": 6, "l1": 8}[norm]
    assert 20 <= robust.sum() <= 40


@every_norm
def test_model_without_derivatives_is_attacked(norm: str) -> None:
    weight, logits = linear_on_images()
    x = images()
    labels = logits(x).argmax(1)

    def steps(x: Tensor) -> Tensor:
        """Logits in steps, by numpy: no graph, and a slope of zero wherever there is one."""
        return torch.from_numpy((4 * (x.numpy().reshape(len(x), -1) @ weight.numpy().T)).round() / 4)

    times = {"linf": 2.5, "l2": 4.0, "l1": 8.0}[norm]  # random search is weak where few coordinates have to change
    epsilon = times * distance_linear(weight, None, x.flatten(1), labels, norm=norm)
    example = square(steps, x, labels, epsilon=epsilon, norm=norm, queries=200, generator=seeded())
    assert (steps(example).argmax(1) != labels).double().mean() >= 0.9


@every_norm
def test_what_is_kept_never_gets_weaker(norm: str) -> None:
    """The margin of the result is the least of all that was tried."""
    weight, logits = linear_on_images()
    x, epsilon = images(), 0.02 * EPSILON[norm]
    labels = logits(x).argmax(1)
    seen: list[Tensor] = []

    def model(x: Tensor) -> Tensor:
        seen.append(x)
        return logits(x)

    example = square(model, x, labels, epsilon=epsilon, norm=norm, queries=60, generator=seeded())
    margin = lambda x: certify_linear(weight, None, x.flatten(1), labels, epsilon=0.0, bounds=None)  # noqa: E731
    tried = [row for row in seen[1:] if len(row) == len(x)]
    assert len(tried) == 59
    assert torch.allclose(margin(example), torch.stack([margin(row) for row in tried]).amin(0), rtol=1e-12)


@every_norm
def test_queries_are_counted_and_broken_rows_are_dropped(norm: str) -> None:
    _, logits = linear_on_images()
    x = images()
    labels = logits(x).argmax(1)
    labels[:3] = (labels[:3] + 1) % 3
    sizes: list[int] = []

    def model(x: Tensor) -> Tensor:
        sizes.append(len(x))
        return logits(x)

    example = square(model, x, labels, epsilon=0.2 * EPSILON[norm], norm=norm, queries=40, generator=seeded())
    assert len(sizes) <= 40
    assert sizes[:2] == [12, 9]
    assert sizes == sorted(sizes, reverse=True)
    assert torch.equal(example[:3], x[:3])


@every_norm
def test_other_rows_do_not_change_what_happens_to_a_row(norm: str) -> None:
    _, logits = linear_on_images()
    x = images()
    labels = logits(x).argmax(1)
    attack = partial(square, logits, epsilon=0.5 * EPSILON[norm], norm=norm, queries=80)
    expected = attack(x, labels, generator=seeded())
    easy = labels.clone()
    easy[1::2] = (easy[1::2] + 1) % 3  # done at once
    assert torch.allclose(attack(x, easy, generator=seeded())[::2], expected[::2], rtol=0, atol=1e-12)


@every_norm
def test_generator_decides(norm: str) -> None:
    _, logits = linear_on_images()
    x = images()
    attack = partial(square, logits, x, logits(x).argmax(1), epsilon=0.3 * EPSILON[norm], norm=norm, queries=30)
    assert torch.equal(attack(generator=seeded(0)), attack(generator=seeded(0)))
    assert not torch.equal(attack(generator=seeded(0)), attack(generator=seeded(1)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@every_norm
def test_example_lies_in_ball_and_box_in_exact_arithmetic(norm: str, dtype: torch.dtype) -> None:
    weight, _ = linear_on_images()
    x = images(6).to(dtype)
    x[0, 0, 0, :3] = torch.tensor([0.0, 1.0, 0.0])
    epsilon = EPSILON[norm] * torch.linspace(0, 1, 6, dtype=torch.float64)
    model = lambda x: x.double().flatten(1) @ weight.T  # noqa: E731
    labels = model(x).argmax(1)
    example = square(model, x, labels, epsilon=epsilon, norm=norm, queries=25, generator=seeded())
    assert example.dtype == dtype
    assert example.shape == x.shape
    assert torch.equal(example[0], x[0])
    for clean, moved, radius in zip(x.double(), example.double(), epsilon.tolist(), strict=True):
        values = zip(clean.flatten().tolist(), moved.flatten().tolist(), strict=True)
        offset = [abs(Fraction(b) - Fraction(a)) for a, b in values]
        size = {"linf": max(offset), "l1": sum(offset), "l2": sum(value**2 for value in offset)}[norm]
        assert size <= Fraction(radius) ** (2 if norm == "l2" else 1)
    assert example.min() >= 0
    assert example.max() <= 1


@every_norm
def test_start_and_steps_use_the_whole_radius(norm: str) -> None:
    _, logits = linear_on_images()
    x = images() * 0.1 + 0.45  # far from the box
    labels = logits(x).argmax(1)
    confident = lambda x: logits(x) + 1e3 * torch.nn.functional.one_hot(labels[: len(x)], 3)  # noqa: E731
    for queries in (2, 30):
        example = square(confident, x, labels, epsilon=0.3, norm=norm, queries=queries, generator=seeded())
        assert torch.allclose(distance(example, x, norm), torch.full((12,), 0.3, dtype=torch.float64), rtol=1e-9)


@every_norm
def test_target_and_mask(norm: str) -> None:
    _, logits = linear_on_images()
    x = images()
    labels = logits(x).argmax(1)
    targets = (labels + 1) % 3
    mask = torch.ones(6, 5, dtype=torch.bool)
    mask[2:4] = False
    example = square(
        logits,
        x,
        labels,
        epsilon=15 * EPSILON[norm],
        norm=norm,
        queries=300,
        targets=targets,
        bounds=None,
        mask=mask,
        generator=seeded(),
    )
    assert (logits(example).argmax(1) == targets).double().mean() >= 0.9
    assert torch.equal(example[:, :, 2:4], x[:, :, 2:4])


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((3, 2, 6, 5), (2, 6, 5)),
        ((3, 64), (1, 8, 8)),
        ((3, 12), (1, 1, 12)),
        ((3, 4, 9), (4, 1, 9)),
        ((3, 2, 2, 2, 2), (1, 1, 16)),
        ((3, 1), (1, 1, 1)),
    ],
    ids=str,
)
@every_norm
def test_inputs_of_any_shape(norm: str, shape: tuple[int, ...], expected: tuple[int, int, int]) -> None:
    x = torch.full(shape, 0.5, dtype=torch.float64)
    assert module._image_shape(x) == expected
    model = lambda x: torch.stack([x.flatten(1).sum(1), torch.full((len(x),), -1.0).double()], 1)  # noqa: E731
    labels = torch.zeros(3, dtype=torch.int64)
    example = square(model, x, labels, epsilon=0.25, norm=norm, queries=40, generator=seeded())
    assert example.shape == shape
    assert torch.allclose(distance(example, x, norm), torch.full((3,), 0.25).double(), rtol=1e-9)
    assert (model(example)[:, 0] < model(x)[:, 0]).all()


def test_windows_shrink_as_the_paper_says() -> None:
    """Halved after 10, 50, 200, 500, 1000, 2000, 4000, 6000 and 8000 of 10 000 queries."""
    sides = [module._window(0.8, query, 10_000, (3, 32, 32), "linf")[0] for query in (1, 10, 11, 51, 201, 501, 8001)]
    assert sides == [round(math.sqrt(0.8 / 2**k) * 32) for k in (0, 0, 1, 2, 3, 4, 9)]
    assert module._window(0.8, 2, 100, (3, 32, 32), "linf")[0] == round(math.sqrt(0.8 / 4) * 32)
    assert module._window(0.5, 1, 10_000, (1, 1, 40), "linf") == (1, 20)
    assert module._window(0.001, 1, 10_000, (1, 8, 8), "l2") == (3, 3)
    assert module._window(0.001, 1, 10_000, (1, 8, 8), "l1") == (1, 1)
    assert module._window(1.0, 1, 10_000, (1, 2, 2), "l1") == (2, 2)


def test_bumps_are_opposite_and_highest_at_their_centres() -> None:
    upright, turned = module._bump(5, 5, torch.zeros(1).double())
    assert torch.equal(turned, upright.T)
    assert (upright[:2] > 0).all()
    assert (upright[2:] < 0).all()
    # Rings of 1, 1/4 and 1/9 about the centre of a half.
    assert upright[1].tolist() == pytest.approx([1 / 9, 1 / 4 + 1 / 9, 1 + 1 / 4 + 1 / 9, 1 / 4 + 1 / 9, 1 / 9])
    assert upright[3, 2].item() == pytest.approx(-(1 + 1 / 4 + 1 / 9))


def test_windows_lie_everywhere_in_the_image() -> None:
    position = torch.rand(4000, 2, generator=seeded(), dtype=torch.float64)
    inside, (rows, columns) = module._place(position, (1, 6, 5), (3, 2))
    assert (inside.flatten(1).sum(1) == 6).all()
    first = inside.flatten(1).double().argmax(1)
    assert sorted(first.unique().tolist()) == [5 * i + j for i in range(4) for j in range(4)]
    assert first.bincount(minlength=30)[[0, 18]].min() > 180  # 250 expected of each of the 16
    assert int(rows.amax()) == 2
    assert int(columns.amax()) == 1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("breaks", [False, True], ids=["sound", "breaking"])
@every_norm
def test_attack_leaves_everything_as_it_was(norm: str, breaks: bool, mode: str) -> None:
    model, x, labels = fragile()
    model.calls_left = 3 if breaks else 1000
    before = snapshot(model, x, labels)
    broken = pytest.raises(FloatingPointError) if breaks else contextlib.nullcontext()
    # Labels that are never given, so that no row is done before the model breaks.
    with broken, MODES[mode]():
        example = square(
            model, x, labels, epsilon=1e-9, norm=norm, queries=9, targets=torch.full((5,), 2), generator=seeded()
        )
        assert not example.requires_grad
        assert not example.is_inference()
    assert all(map(torch.equal, snapshot(model, x, labels), before))
    assert model.modes == {False}


def test_open_attack_moves_with_its_input() -> None:
    _, logits = linear_on_images()
    x = images().requires_grad_()
    labels = logits(x).argmax(1)
    attack = partial(square, logits, x, labels, epsilon=0.05, norm="linf", queries=20)
    assert not attack(generator=seeded()).requires_grad
    with unblock(EXAMPLE):
        example = attack(generator=seeded())
    (gradient,) = torch.autograd.grad(example.sum(), x)
    on_the_box = (example == 0) | (example == 1)
    assert torch.equal(gradient[~on_the_box], torch.ones_like(gradient[~on_the_box]))
    assert on_the_box.any()
    assert gradient[on_the_box].abs().max() == 0


@pytest.mark.parametrize("shape", [(0, 9), (0, 1, 3, 3)], ids=str)
@every_norm
def test_empty_batch(norm: str, shape: tuple[int, ...]) -> None:
    x, model = torch.zeros(shape), lambda x: x.flatten(1)[:, :3]
    example = square(model, x, torch.zeros(0, dtype=torch.int64), epsilon=0.1, norm=norm, generator=seeded())
    assert example.shape == shape


REFUSED = {
    "queries": ({"queries": 0}, "`queries` should be a positive integer. Found 0"),
    "no proportion": ({"proportion": 0}, "`proportion` should be above 0 and at most 1. Found 0"),
    "proportion": ({"proportion": 1.5}, "`proportion` should be above 0 and at most 1. Found 1.5"),
    "norm": ({"norm": "l0"}, "`norm` should be one of .*'l1'. Found 'l0'"),
    "epsilon": ({"epsilon": -0.1}, "`epsilon` should be finite and not negative. Found -0.1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    arguments, message = REFUSED[name]
    model, x, labels = linear_model()
    with pytest.raises(ValueError, match=message):
        square(model, x, labels, **{"epsilon": 0.1, "generator": seeded(), **arguments})
