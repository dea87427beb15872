"""The precision of the functions that several rooms share."""

import math
from fractions import Fraction

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from toolkit._tensors import bounded, exponential_remainder, lengths, unit


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


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("transform", [lambda f: f, torch.vmap], ids=["plain", "mapped"])
def test_norms_and_directions_do_not_depend_on_the_size_of_a_vector(dtype, transform):
    """Squares of 1e-30 are 0 and those of 1e30 infinite in single precision."""
    most = math.frexp(torch.finfo(dtype).max)[1]
    vectors = torch.tensor([[3.0, -4.0, 0.5], [0.25, 1.0, -2.0]], dtype=dtype)
    for exponent in (-most + 8, -most // 2, -3, 0, 5, most // 2, most - 5):
        scaled = (vectors * 2.0**exponent).requires_grad_()
        found, expected = transform(lengths)(scaled), transform(lengths)(vectors)
        assert torch.equal(found, expected * 2.0**exponent)
        assert torch.equal(transform(unit)(scaled), transform(unit)(vectors))
        (slope,) = torch.autograd.grad(found.sum(), scaled)
        torch.testing.assert_close(slope, transform(unit)(vectors))


def test_norms_of_zeros_missing_and_no_vectors():
    vectors = torch.tensor([[0.0, 0.0], [math.nan, 1.0], [math.inf, 1.0], [1e-30, 0.0]], requires_grad=True)
    assert lengths(vectors).squeeze(-1).nan_to_num(nan=-1, posinf=-2).tolist() == pytest.approx([0, -1, -2, 1e-30])
    (slope,) = torch.autograd.grad(unit(vectors)[0].sum(), vectors)
    assert slope[0].tolist() == [0, 0]
    assert lengths(torch.ones(0, 2)).shape == (0, 1)
    assert lengths(torch.ones(2, 0)).tolist() == [[0], [0]]


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_a_traced_program_takes_the_norms_of_any_vectors(mode):
    """Tracers have no values to look at; the graph is right for vectors of other sizes than the traced ones."""
    vectors = torch.tensor([[3.0, -4.0], [1e-30, 2e-30]])
    graph = make_fx(lengths, tracing_mode=mode)(torch.ones(2, 2))
    assert torch.equal(graph(vectors), lengths(vectors))
    with FakeTensorMode():
        assert lengths(torch.empty(3, 2)).shape == (3, 1)
