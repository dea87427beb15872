"""The sets that attacks stay in: projections are nearest points, and no bound is passed by a rounding."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from toolkit.adversarial import certify_linear
from toolkit.adversarial.balls import make_ball
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
@pytest.mark.parametrize("seed", range(4))
def test_projection_is_the_nearest_point(norm: str, epsilon: float, seed: int) -> None:
    """The definition of it for a convex set: ``(q - p) . (z - p) <= 0`` for every z in the set."""
    x, outside = points(seed)
    ball = make_ball(norm, x, epsilon, (0, 1))
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
    ball = make_ball(norm, x, 0.7, (0, 1))
    inside = x + 0.1 * (ball.project(outside) - x)
    torch.testing.assert_close(ball.project(inside), inside, rtol=0, atol=1e-16)


def test_projection_on_ball_and_box_together_goes_farther_than_one_after_the_other() -> None:
    """Half of the direction points out of the box; the other half can use the whole radius."""
    x = torch.tensor([[0.5, 1.0]], dtype=torch.float64)
    ball = make_ball("l2", x, 0.25, (0, 1))
    assert torch.equal(ball.project(torch.tensor([[1.5, 2.0]], dtype=torch.float64)), torch.tensor([[0.75, 1.0]]))


@pytest.mark.parametrize("norm", NORMS)
def test_bounds_may_differ_between_coordinates(norm: str) -> None:
    x, outside = points(1)
    x, outside = x[:, :4], outside[:, :4]
    least = torch.tensor([-0.5, 0.0, -math.inf, 0.0])
    most = torch.tensor([math.inf, 1.0, 1.0, 2.0])
    projected = make_ball(norm, x, 0.4, (least, most)).project(outside)
    shifted = make_ball(norm, x, 0.4, (least.expand(6, 4), most.expand(6, 4))).project(outside)
    assert torch.equal(projected, shifted)
    assert ((projected >= least) & (projected <= most)).all()
    assert _excess(projected - x, 0.4, norm) <= 1e-15


def test_without_bounds_there_is_only_the_ball() -> None:
    x, outside = points(2)
    expected = x + 0.3 * (outside - x) / (outside - x).norm(dim=1, keepdim=True)
    torch.testing.assert_close(make_ball("l2", x, 0.3, None).project(outside), expected, rtol=0, atol=1e-15)


def test_clean_value_out_of_the_box_by_a_rounding_is_accepted() -> None:
    x = torch.tensor([[-2.98e-8, 0.5, 1.0000001]])
    ball = make_ball("linf", x, 0.0, (0, 1))
    assert torch.equal(ball.project(x), x)
    with pytest.raises(ValueError, match="`x` should lie within `bounds`, 0 to 1"):
        make_ball("linf", x - 1e-3, 0.1, (0, 1))


def test_nan_is_refused() -> None:
    with pytest.raises(ValueError, match="Found values from nan to nan"):
        make_ball("linf", torch.tensor([[math.nan, 0.5]]), 0.1, (0, 1))


@pytest.mark.parametrize("bound", [0.1, 0.7, 1 / 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bounds_are_rounded_inwards(dtype: torch.dtype, bound: float) -> None:
    x = torch.zeros(1, 1, dtype=dtype)
    ball = make_ball("linf", x, 10, (-bound, bound))
    least, most = (Fraction(ball.project(value * torch.ones_like(x)).item()) for value in (-100, 100))
    assert -Fraction(bound) <= least < 0 < most <= Fraction(bound)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("shape", [(0, 4), (3, 2, 2, 2), (2, 1)], ids=str)
def test_shapes(shape: tuple[int, ...], norm: str) -> None:
    x = torch.full(shape, 0.5)
    ball = make_ball(norm, x, 0.25, (0, 1))
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


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("epsilon", [0.05, 0.7, 1.4, 30.0])
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
    reached = make_ball(norm, x, epsilon, bounds).farthest(slope)
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
    ball = make_ball(norm, x, 0.3, None, mask)
    kept = make_ball(norm, x[:, mask], 0.3, None)
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
        make_ball("linf", points(0)[0], 0.1, None, mask)


@pytest.mark.parametrize("norm", NORMS)
def test_rows_of_a_ball_are_the_balls_of_rows(norm: str) -> None:
    x, outside = points(6)
    epsilon = torch.linspace(0.1, 0.6, 6)
    index = torch.tensor([4, 1])
    some = make_ball(norm, x, epsilon, (0, 1)).rows(index)
    alone = make_ball(norm, x[index], epsilon[index], (0, 1))
    assert torch.equal(some.project(outside[index]), alone.project(outside[index]))
    assert torch.equal(some.x, x[index])


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_radius_is_the_whole_box(norm: str, dtype: torch.dtype) -> None:
    x = points(7)[0].to(dtype)
    far = x + 3 * torch.where(x > 0.5, 1, -1).to(dtype)
    assert torch.equal(make_ball(norm, x, None, (0, 1)).project(far), far.clamp(0, 1))
    ball = make_ball(norm, x, None, None)
    torch.testing.assert_close(ball.settle(ball.project(far)), far)


def test_start_is_uniform_in_the_ball_of_sums() -> None:
    """A share r^D of the L1 ball lies within r of its centre, and each orthant has as much of it as the others."""
    x = torch.zeros(20_000, 3, dtype=torch.float64)
    drawn = make_ball("l1", x, 0.5, None).sample(torch.Generator().manual_seed(0))
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
    ball = make_ball(norm, x, 0.7, (0, 1))
    for example in (ball.project(outside), ball.farthest(outside - x), x + 0.1 * (ball.project(outside) - x)):
        settled = ball.settle(example)
        assert torch.equal(ball.settle(settled), settled)
