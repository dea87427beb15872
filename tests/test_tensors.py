"""The precision of the functions that several rooms share."""

import math
from fractions import Fraction

import pytest
import torch

from toolkit._tensors import bounded, exponential_remainder


def exact(x: float) -> float:
    """Return ``exp(x) - 1 - x`` by its series, in rational numbers."""
    term, total, k = Fraction(x), Fraction(0), 1
    while k < 60:
        k += 1
        term = term * Fraction(x) / k
        total += term
    return float(total)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_remainder_of_an_exponential_has_full_precision(dtype):
    """The direct form loses all digits below the rounding, and half of them at its root."""
    sizes = torch.logspace(-12, 0.9, 200, dtype=torch.float64)
    x = torch.cat([sizes, -sizes]).to(dtype).requires_grad_()
    found = exponential_remainder(x)
    (slope,) = torch.autograd.grad(found.sum(), x, create_graph=True)
    (curvature,) = torch.autograd.grad(slope.sum(), x)
    expected = torch.tensor([exact(value) for value in x.tolist()], dtype=torch.float64)
    eps = torch.finfo(dtype).eps
    assert ((found.double() - expected).abs() <= 12 * eps * expected).all()  # twelve terms and a difference
    assert (found > 0).all()
    torch.testing.assert_close(slope.double(), x.detach().double().expm1(), rtol=32 * eps, atol=0)
    torch.testing.assert_close(curvature.double(), x.detach().double().exp(), rtol=32 * eps, atol=eps)


def test_the_remainder_of_an_exponential_at_its_ends():
    x = torch.tensor([0.0, -math.inf, 100.0, math.inf], requires_grad=True)
    found = exponential_remainder(x)
    assert found.tolist() == [0, math.inf, math.inf, math.inf], "the exponential of 100 is beyond float32"
    assert torch.autograd.grad(found.sum(), x)[0].tolist() == [0, -1, math.inf, math.inf]


@pytest.mark.parametrize(
    ("bounds", "slopes"), [((0, 1), [0, 1, 1, 1, 0]), ((0,), [0, 1, 1, 1, 1]), ((-9, 1), [1, 1, 1, 1, 0])]
)
def test_a_bounded_tensor_has_a_gradient_at_its_bounds(bounds, slopes):
    x = torch.tensor([-1.0, 0.0, 0.5, 1.0, 2.0], requires_grad=True)
    found = bounded(x, *bounds)
    assert torch.equal(found, x.clamp(*bounds))
    assert torch.autograd.grad(found.sum(), x)[0].tolist() == slopes
    assert bounded(torch.tensor(math.nan), 0, 1).isnan()
