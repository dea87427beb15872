"""The sets that attacks stay in: projections are nearest points, and no bound is passed by a rounding."""

import math
import warnings
from fractions import Fraction

import numpy as np
import pytest
import torch
from each import each
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from toolkit import adversarial as adv
from toolkit.adversarial import certify_linear
from toolkit.adversarial.balls import Ball
from toolkit.adversarial.balls._rounding import add_inward, follow, to_dtype_inward

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
NORMS = ["linf", "l2", "l1"]
ORDERS = {"linf": torch.inf, "l2": 2, "l1": 1}


def points(seed: int, *, epsilon: float = 0.7, norm: str = "l2") -> tuple[Tensor, Tensor]:
    """Clean inputs of which many lie on the box, and examples some way out of the ball."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(6, 9, generator=generator, dtype=torch.float64).mul(1.8).sub(0.4).clamp(0, 1)
    return x, x + epsilon * torch.randn(6, 9, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("epsilon", [0.05, 0.7, 1.4, 3.0])
@pytest.mark.parametrize("norm", NORMS)
@each("seed", range(4))
def test_projection_is_the_nearest_point(norm: str, epsilon: float, seed: int) -> None:
    """The definition of it for a convex set: ``(q - p) . (z - p) <= 0`` for every z in the set."""
    x, outside = points(seed)
    ball = Ball(epsilon, norm, (0, 1)).around(x)
    projected = ball.project(outside)
    generator = torch.Generator().manual_seed(seed + 100)
    for _ in range(60):
        inside = _anywhere(x, epsilon, norm, generator)
        assert (((outside - projected) * (inside - projected)).sum(1) <= 1e-12).all()
    assert _excess(projected - x, epsilon, norm) <= 1e-13
    assert 0 <= projected.min() <= projected.max() <= 1


def _anywhere(x: Tensor, epsilon: float, norm: str, generator: torch.Generator) -> Tensor:
    """Return points of the set: of its surface, of its faces and of its corners."""
    offset = torch.randn(x.shape, generator=generator, dtype=x.dtype)
    offset = offset * 10 ** (2 * torch.rand(len(x), 1, generator=generator, dtype=x.dtype) - 1)
    for _ in range(60):
        size = torch.linalg.vector_norm(offset, ORDERS[norm], 1, keepdim=True)
        offset = (x + offset * (epsilon / size).clamp(max=1)).clamp(0, 1) - x
    return x + offset


def _excess(offset: Tensor, epsilon: float, norm: str) -> float:
    size = torch.linalg.vector_norm(offset, ORDERS[norm], 1)
    return (size - epsilon).max().item()


@pytest.mark.parametrize("norm", NORMS)
def test_projection_leaves_what_is_inside(norm: str) -> None:
    x, outside = points(0)
    ball = Ball(0.7, norm, (0, 1)).around(x)
    inside = x + 0.1 * (ball.project(outside) - x)
    torch.testing.assert_close(ball.project(inside), inside, rtol=0, atol=1e-16)


def test_projection_on_ball_and_box_together_goes_farther_than_one_after_the_other() -> None:
    """Half of the direction points out of the box; the other half can use the whole radius."""
    x = torch.tensor([[0.5, 1.0]], dtype=torch.float64)
    ball = Ball(0.25, "l2", (0, 1)).around(x)
    assert torch.equal(ball.project(torch.tensor([[1.5, 2.0]], dtype=torch.float64)), torch.tensor([[0.75, 1.0]]))


@pytest.mark.parametrize("norm", NORMS)
def test_bounds_may_differ_between_coordinates(norm: str) -> None:
    x, outside = points(1)
    x, outside = x[:, :4], outside[:, :4]
    least = torch.tensor([-0.5, 0.0, -math.inf, 0.0])
    most = torch.tensor([math.inf, 1.0, 1.0, 2.0])
    projected = Ball(0.4, norm, (least, most)).around(x).project(outside)
    shifted = Ball(0.4, norm, (least.expand(6, 4), most.expand(6, 4))).around(x).project(outside)
    assert torch.equal(projected, shifted)
    assert ((projected >= least) & (projected <= most)).all()
    assert _excess(projected - x, 0.4, norm) <= 1e-15


def test_without_bounds_there_is_only_the_ball() -> None:
    x, outside = points(2)
    expected = x + 0.3 * (outside - x) / (outside - x).norm(dim=1, keepdim=True)
    torch.testing.assert_close(Ball(0.3, "l2", None).around(x).project(outside), expected, rtol=0, atol=1e-15)


def test_clean_value_out_of_the_box_by_a_rounding_is_accepted() -> None:
    x = torch.tensor([[-2.98e-8, 0.5, 1.0000001]])
    ball = Ball(0.0, "linf", (0, 1)).around(x)
    assert torch.equal(ball.project(x), x)
    with pytest.raises(ValueError, match="`x` should lie within `bounds`, 0 to 1"):
        Ball(0.1, "linf", (0, 1)).around(x - 1e-3)


def test_nan_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`x` should be finite\. Found NaN in row"):
        Ball(0.1, "linf", (0, 1)).around(torch.tensor([[math.nan, 0.5]]))


@pytest.mark.parametrize("bound", [0.1, 0.7, 1 / 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bounds_are_rounded_inwards(dtype: torch.dtype, bound: float) -> None:
    x = torch.zeros(1, 1, dtype=dtype)
    ball = Ball(10, "linf", (-bound, bound)).around(x)
    least, most = (Fraction(ball.project(value * torch.ones_like(x)).item()) for value in (-100, 100))
    assert -Fraction(bound) <= least < 0 < most <= Fraction(bound)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("shape", [(0, 4), (3, 2, 2, 2), (2, 1)], ids=str)
def test_shapes(shape: tuple[int, ...], norm: str) -> None:
    x = torch.full(shape, 0.5)
    ball = Ball(0.25, norm, (0, 1)).around(x)
    projected = ball.settle(ball.project(x + ball.direction(torch.ones(shape))))
    assert projected.shape == x.shape
    if norm == "l2" and len(x):
        assert torch.allclose((projected - x).flatten(1).norm(dim=1), torch.tensor(0.25))


# --- rounding ----------------------------------------------------------------------------------------------------


def finite(dtype: torch.dtype) -> st.SearchStrategy[float]:
    width = {torch.float16: 16, torch.bfloat16: 32, torch.float32: 32, torch.float64: 64}[dtype]
    bound = 2.0**12
    return st.floats(-bound, bound, width=width) | st.sampled_from([0.0, 1.0, 0.5, -0.25, 2.0**-14])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sum_is_rounded_to_the_nearest_number_that_is_not_too_far(dtype: torch.dtype) -> None:
    @settings(max_examples=120, deadline=None, derandomize=True)
    @given(finite(dtype), finite(dtype))
    def check(start: float, displacement: float) -> None:
        x, d = torch.tensor(start, dtype=dtype), torch.tensor(displacement, dtype=dtype)
        found = add_inward(x, d)
        sign = int(np.sign(d.item()))
        moved = sign * (Fraction(found.item()) - Fraction(x.item()))
        asked = sign * Fraction(d.item())
        assert 0 <= moved <= asked
        if sign:
            next_out = torch.nextafter(found, torch.full_like(found, sign * math.inf))
            assert sign * (Fraction(next_out.item()) - Fraction(x.item())) > asked

    check()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_displacement_is_rounded_to_the_nearest_number_that_is_not_longer(dtype: torch.dtype) -> None:
    @settings(max_examples=120, deadline=None, derandomize=True)
    @given(st.floats(-1000, 1000))
    def check(displacement: float) -> None:
        found = to_dtype_inward(torch.tensor(displacement, dtype=torch.float64), dtype)
        assert found.dtype == dtype
        assert 0 <= abs(Fraction(found.item())) <= abs(Fraction(displacement))
        outward = torch.nextafter(found, torch.full_like(found, math.copysign(math.inf, displacement)))
        assert abs(Fraction(outward.item())) > abs(Fraction(displacement)) or displacement == 0

    check()


def test_follow_has_the_value_of_one_and_the_derivative_of_the_other() -> None:
    source = torch.tensor([0.1, 1e8, 1e-30], requires_grad=True)
    value = torch.tensor([0.1 + 1e-8, 0.3, -7.0])
    result = follow(value, source)
    assert torch.equal(result, value)
    assert torch.equal(torch.autograd.grad(result.sum(), source)[0], torch.ones(3))
    assert follow(value, value) is value


@pytest.mark.filterwarnings("ignore:`epsilon` should be less than the width of the box")  # the whole box is meant
@pytest.mark.parametrize("norm", NORMS)
@each("epsilon", [0.05, 0.7, 1.4, 30.0])
@pytest.mark.parametrize("bounds", [(0, 1), None], ids=["box", "no box"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_farthest_point_is_the_worst_case_of_a_linear_function(
    norm: str, epsilon: float, bounds: tuple[float, float] | None, dtype: torch.dtype
) -> None:
    """The witness is `certify_linear`, which finds it on another way."""
    x, _ = points(3)
    x = x.to(dtype)
    slope = torch.randn(x.shape, generator=torch.Generator().manual_seed(4), dtype=dtype)
    slope[0, :3], slope[1] = 0, 0
    reached = Ball(epsilon, norm, bounds).around(x).farthest(slope)
    assert _excess(reached.double() - x.double(), epsilon, norm) <= 0
    tolerance = 1e-12 if dtype == torch.float64 else 3e-6
    for row in range(len(x)):
        weight = torch.stack([-slope[row], torch.zeros_like(slope[row])]).double()
        worst = certify_linear(
            weight, None, x[row : row + 1].double(), torch.tensor([0]), epsilon=epsilon, norm=norm, bounds=bounds
        )
        gain = (slope[row].double() * reached[row].double()).sum()
        torch.testing.assert_close(-gain, worst[0], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("norm", NORMS)
def test_masked_coordinates_stay_and_the_others_use_the_whole_radius(norm: str) -> None:
    x, outside = points(5)
    mask = torch.tensor([True, False, True] * 3)
    ball = Ball(0.3, norm, None, mask).around(x)
    kept = Ball(0.3, norm, None).around(x[:, mask])
    slope = outside - x
    for found, expected in [
        (ball.project(outside), kept.project(outside[:, mask])),
        (ball.farthest(slope), kept.farthest(slope[:, mask])),
        (ball.step(x, slope, torch.tensor(0.2)), kept.step(x[:, mask], slope[:, mask], torch.tensor(0.2))),
    ]:
        assert torch.equal(found[:, ~mask], x[:, ~mask])
        torch.testing.assert_close(found[:, mask], expected, rtol=0, atol=1e-14)
    drawn = ball.sample(torch.Generator().manual_seed(0))
    assert torch.equal(drawn[:, ~mask], x[:, ~mask])
    assert (drawn[:, mask] != x[:, mask]).all()


@pytest.mark.parametrize(
    ("mask", "error"),
    [(torch.ones(9), TypeError), ("all", TypeError), (torch.ones(5, dtype=torch.bool), ValueError)],
    ids=["numbers", "text", "shape"],
)
def test_mask_is_refused(mask: object, error: type[Exception]) -> None:
    with pytest.raises(error, match="`mask` should"):
        Ball(0.1, "linf", None, mask).around(points(0)[0])


@pytest.mark.parametrize("norm", NORMS)
def test_rows_of_a_ball_are_the_balls_of_rows(norm: str) -> None:
    x, outside = points(6)
    epsilon = torch.linspace(0.1, 0.6, 6)
    index = torch.tensor([4, 1])
    some = Ball(epsilon, norm, (0, 1)).around(x).rows(index)
    alone = Ball(epsilon[index], norm, (0, 1)).around(x[index])
    assert torch.equal(some.project(outside[index]), alone.project(outside[index]))
    assert torch.equal(some.x, x[index])


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_radius_is_the_whole_box(norm: str, dtype: torch.dtype) -> None:
    x = points(7)[0].to(dtype)
    far = x + 3 * torch.where(x > 0.5, 1, -1).to(dtype)
    assert torch.equal(Ball(None, norm, (0, 1)).around(x).project(far), far.clamp(0, 1))
    ball = Ball(None, norm, None).around(x)
    torch.testing.assert_close(ball.settle(ball.project(far)), far)


def test_start_is_uniform_in_the_ball_of_sums() -> None:
    """A share r^D of the L1 ball lies within r of its centre, and each orthant has as much of it as the others."""
    x = torch.zeros(20_000, 3, dtype=torch.float64)
    drawn = Ball(0.5, "l1", None).around(x).sample(torch.Generator().manual_seed(0))
    radius = drawn.abs().sum(1).sort().values / 0.5
    share = torch.linspace(0, 1, len(radius), dtype=torch.float64)
    assert (radius**3 - share).abs().max() < 1.6 / len(radius) ** 0.5  # Kolmogorov-Smirnov, one in a hundred
    orthants = torch.bincount(((drawn > 0) * torch.tensor([1, 2, 4])).sum(1))
    assert (orthants / len(x) - 1 / 8).abs().max() < 0.01


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_settling_twice_changes_nothing(norm: str, dtype: torch.dtype) -> None:
    """Else an example that just succeeds could be lost by being checked."""
    x, outside = (tensor.to(dtype) for tensor in points(8))
    ball = Ball(0.7, norm, (0, 1)).around(x)
    for example in (ball.project(outside), ball.farthest(outside - x), x + 0.1 * (ball.project(outside) - x)):
        settled = ball.settle(example)
        assert torch.equal(ball.settle(settled), settled)


@pytest.mark.parametrize("attack", [adv.fgsm, adv.pgd, adv.apgd, adv.deepfool, adv.linearised, adv.ensemble])
def test_a_ball_is_the_long_form_of_its_fields(attack):
    model = adv.mlp(4, 3, widths=[5], generator=torch.Generator().manual_seed(0)).double()
    x = torch.rand(3, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    short = {"epsilon": torch.tensor([0.1, 0.2, 0.3]), "norm": "l2", "bounds": (0, 2), "mask": torch.arange(4) > 0}
    labels = model(x).argmax(1)
    found = attack(model, x, labels, ball=Ball(**short))
    assert torch.equal(found, attack(model, x, labels, **short))
    assert not torch.equal(found, x)


def test_a_ball_of_some_rows_is_theirs():
    x, _ = points(0)
    x = x.clamp(-3, 3)
    least = torch.linspace(-5, -4, len(x), dtype=torch.float64)[:, None].expand_as(x)
    ball = Ball(torch.arange(len(x)) / 9, "l2", (least, 5.0), x > 0)
    some = ball.rows(torch.tensor([2, 0]), x).around(x[[2, 0]])
    whole = ball.around(x).rows(torch.tensor([2, 0]))
    for name in ("x", "radius", "lower", "upper"):
        assert torch.equal(getattr(some, name), getattr(whole, name))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({}, "`epsilon` should be given, or a `ball`. Found neither."),
        ({"ball": Ball(0.1), "norm": "l2"}, "`ball` should be given without its fields. Found `norm`."),
        ({"ball": 0.1}, "`ball` should be a Ball. Found float."),
        ({"epsilon": 0.1, "radius": 1}, "radius"),
    ],
)
def test_what_names_no_ball_is_refused(options, error):
    with pytest.raises(TypeError, match=error):
        adv.pgd(torch.nn.Linear(2, 2), torch.rand(1, 2), torch.tensor([0]), **options)


# --- cost ----------------------------------------------------------------------------------------------------------


class Passes(TorchDispatchMode):
    """Counts the operations that read or write a tensor of at least some size."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: torch._ops.OpOverload, types: object, args: tuple[object, ...] = (), kwargs: object = None
    ) -> object:
        out = func(*args, **(kwargs or {}))
        if not func.is_view and any(isinstance(one, Tensor) and one.numel() >= self.size for one in (*args, out)):
            self.names.append(func.overloadpacket.__name__)
        return out


@pytest.mark.parametrize(("norm", "epsilon", "limit"), [("linf", 0.1, 3), ("l2", 1.0, 17 + 3), ("l1", 5.0, 19 + 2)])
def test_a_step_reads_the_batch_a_few_times(norm: str, epsilon: float, limit: int) -> None:
    """The counts are those of three rounds in L2 and one selection in L1, and one of either more is allowed.

    No coordinates are sorted in full: in L1 a step that ends after a few of them took five times as long.
    """
    generator = torch.Generator().manual_seed(0)
    x, start, gradient = (torch.rand(16, 200, generator=generator) for _ in range(3))
    ball = Ball(epsilon, norm, (0, 1)).around(x)
    example, gradient = ball.project(2 * start - 0.5), gradient - 0.5
    with torch.no_grad(), Passes(x.numel()) as passes:
        ball.step(example, gradient, torch.full((1, 1), epsilon / 4))
    assert len(passes.names) <= limit
    assert "sort" not in passes.names


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_step_in_the_memory_of_the_example_has_the_same_bits(norm: str, dtype: torch.dtype) -> None:
    x, outside = (tensor.to(dtype) for tensor in points(9))
    gradient = (outside - x) * torch.tensor([1.0, 0.0, 1e-4, 1e4, 1.0, -1.0], dtype=dtype)[:, None]
    ball = Ball(0.7, norm, (0, 1)).around(x)
    start = ball.project(outside)
    for stride in (torch.tensor([[0.3]], dtype=dtype), torch.linspace(-1, 1, 6, dtype=dtype)[:, None]):
        own = start.clone()
        moved = ball.step(own, gradient, stride, out=own)
        assert moved.data_ptr() == own.data_ptr()
        assert torch.equal(moved, ball.step(start, gradient, stride))


def _nearest_by_breakpoints(x: Tensor, outside: Tensor, radius: float) -> Tensor:
    """Return the projections in L2 onto ball and box, by the order in which coordinates of ``s v`` meet the box."""
    found = []
    for clean, far in zip(x.double(), outside.double(), strict=True):
        way = far - clean
        limit = torch.where(way > 0, 1 - clean, clean)
        meets = torch.where(way == 0, math.inf, limit / way.abs())
        held, scale = torch.zeros_like(way, dtype=torch.bool), 1.0
        for start in [0.0, *meets.sort().values.tolist()]:
            held |= meets <= start
            rest = radius**2 - float(limit[held].square().sum())
            free = float(way[~held].square().sum())
            if free == 0 or rest <= start**2 * free:
                break
            scale = (rest / free) ** 0.5
        found.append((clean + min(scale, 1.0) * way).clamp(0, 1))
    return torch.stack(found)


@each("seed", range(30))
def test_projection_is_that_of_the_coordinates_in_order(seed: int) -> None:
    """Offsets over many decades, no room at some coordinates, and balls from a point to more than the box."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(8, 40, generator=generator, dtype=torch.float64).mul(2).sub(0.5).clamp(0, 1)
    decades = 6 * torch.rand((), generator=generator, dtype=torch.float64)
    offset = torch.randn(x.shape, generator=generator, dtype=torch.float64)
    offset *= 10 ** (decades * (torch.rand(x.shape, generator=generator, dtype=torch.float64) - 0.7))
    offset[torch.rand(x.shape, generator=generator) < 0.2] = 0
    radius = float(7 * torch.rand((), generator=generator, dtype=torch.float64) ** 3)
    ball = Ball(radius, "l2", (0, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = ball.around(x).project(x + offset)
    expected = _nearest_by_breakpoints(x, x + offset, radius)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    single = ball.around(x.float()).project((x + offset).float())
    torch.testing.assert_close(
        single.double(), _nearest_by_breakpoints(x.float(), (x + offset).float(), radius), rtol=0, atol=2e-5
    )


@pytest.mark.parametrize("epsilon", [0.3, 8.0, 20.0, 60.0, 500.0])
def test_steepest_coordinates_are_the_same_however_many_are_selected(epsilon: float) -> None:
    """Few coordinates use up the budget, many, all, or not even all; the witness fills them one after the other."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(3, 200, generator=generator, dtype=torch.float64)
    gradient = torch.randn(3, 200, generator=generator, dtype=torch.float64)
    gradient[2] *= torch.arange(200) < 30
    budgets = epsilon * torch.tensor([1.0, 0.1, 1.0], dtype=torch.float64)
    found = Ball(budgets, "l1", (0, 1)).around(x).farthest(gradient)
    for *row, left in zip(x.tolist(), gradient.tolist(), found.tolist(), budgets.tolist(), strict=True):
        clean, slopes, moved = row
        expected = list(clean)
        for i in sorted(range(200), key=lambda i, slopes=slopes: -abs(slopes[i])):
            room = (1 - clean[i] if slopes[i] > 0 else clean[i]) * (slopes[i] != 0)
            length = min(room, left)
            expected[i] += math.copysign(length, slopes[i])
            left -= length
        assert moved == pytest.approx(expected, abs=1e-12)  # 200 sums of numbers of size 10


@pytest.mark.parametrize("other", [math.inf, math.nan, 1e-200, 0.0], ids=str)
def test_direction_of_a_sample_has_the_same_bits_beside_any_other(other: float) -> None:
    gradient = torch.randn(1, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ball = Ball(0.5, "l2", None).around(torch.zeros(2, 9, dtype=torch.float64))
    beside = ball.direction(torch.cat([gradient, torch.full_like(gradient, other)]))
    assert torch.equal(beside[0], ball.direction(gradient.expand(2, 9))[0])
    assert beside[1].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_projection_of_points_far_out_of_the_box_ends(dtype: torch.dtype) -> None:
    """Offsets over twelve decades take the most rounds. The length is the radius, or all that the box leaves."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(40, 300, generator=generator, dtype=torch.float64).to(dtype)
    offset = 10 ** (12 * torch.rand(x.shape, generator=generator, dtype=torch.float64) - 6).to(dtype)
    radius = torch.linspace(0, 9, 40)
    projected = Ball(radius, "l2", (0, 1)).around(x).project(x + offset)
    length, clipped = ((point.double() - x.double()).norm(dim=1) for point in (projected, (x + offset).clamp(0, 1)))
    bound = 64 * torch.finfo(dtype).eps  # of sums over 300 squares, and of a quotient of them
    torch.testing.assert_close(length, torch.minimum(radius.double(), clipped), rtol=bound, atol=bound)


@pytest.mark.parametrize("sizes", [[0.1, 0.2, 0.3], (0.1, 0.2)], ids=["as many as samples", "others"])
def test_a_list_of_sizes_is_refused(sizes: list[float]) -> None:
    """It may mean one for each sample, or one after the other."""
    model, x, labels = torch.nn.Linear(3, 2), torch.full((3, 3), 0.5), torch.tensor([0, 1, 0])
    for name, options in (("epsilon", {"epsilon": sizes}), ("step_size", {"epsilon": 0.1, "step_size": sizes})):
        with pytest.raises(TypeError, match=rf"^`{name}` should be .* give a `torch.tensor` for one per sample\."):
            adv.pgd(model, x, labels, **options)


def test_an_array_of_sizes_is_one_for_each_sample() -> None:
    model, x, labels = torch.nn.Linear(3, 2), torch.full((3, 3), 0.5), torch.tensor([0, 1, 0])
    sizes = torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64)
    found, expected = (adv.evaluate_robustness(model, x, labels, epsilon=each) for each in (sizes.numpy(), sizes))
    assert torch.equal(found.examples, expected.examples)
