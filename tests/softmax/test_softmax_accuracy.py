"""Each component of each gradient is as exact as its own condition allows, against 50 digits."""

import math

import mpmath
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from toolkit import unblock
from toolkit.softmax import SHIFT, cross_entropy, log_softmax, logsumexp, softmax
from toolkit.softmax._kernels import centred_product, centred_product_in_plain_operations

Row = list[float]
# Some operations, an exponential and a logarithm among them, each to the last bit of its result or two.
LAST_BITS = 8 * 2.0**-52


def loss_of(name: str, x: Tensor, cotangent: Tensor, label: int) -> Tensor:
    """Return a scalar whose gradient is the function's product with `cotangent`, or with its first entry."""
    if name == "softmax":
        return (softmax(x) * cotangent).sum()
    if name == "log_softmax":
        return (log_softmax(x) * cotangent).sum()
    return cotangent[0] * (logsumexp(x) if name == "logsumexp" else cross_entropy(x, torch.tensor(label)))


def truth(name: str, x: Row, g: Row, label: int) -> tuple[list[mpmath.mpf], list[mpmath.mpf]]:
    """Return the gradient and the condition of each component: the sum of what it is a difference of."""
    indices = range(len(x))
    e = [mpmath.exp(mpmath.mpf(value) - max(x)) for value in x]
    total = mpmath.fsum(e)
    y, g = [value / total for value in e], [mpmath.mpf(value) for value in g]
    others = [mpmath.fsum(e[j] for j in indices if j != i) / total for i in indices]
    if name == "softmax":
        pairs = [[y[i] * y[j] * (g[i] - g[j]) for j in indices] for i in indices]
        return [mpmath.fsum(row) for row in pairs], [mpmath.fsum(map(abs, row)) for row in pairs]
    if name == "log_softmax":
        gradient = [g[i] * others[i] - y[i] * mpmath.fsum(g[j] for j in indices if j != i) for i in indices]
        size = [abs(g[i]) * others[i] + y[i] * mpmath.fsum(abs(g[j]) for j in indices if j != i) for i in indices]
        return gradient, size
    gradient = [g[0] * (-others[i] if name == "cross_entropy" and i == label else y[i]) for i in indices]
    return gradient, [abs(value) for value in gradient]


def worst_error(name: str, x: Tensor, cotangent: Tensor, label: int) -> float:
    """Return the largest error of a component, in roundoffs of its condition."""
    limits = torch.finfo(x.dtype)
    x = x.clone().requires_grad_()
    (found,) = torch.autograd.grad(loss_of(name, x, cotangent, label), x)
    with mpmath.workdps(50):
        exactly, conditions = truth(name, x.tolist(), cotangent.tolist(), label)
        errors = [
            float(abs(value - expected) / condition) / (limits.eps / 2)
            for value, expected, condition in zip(found.tolist(), exactly, conditions, strict=True)
            # What is below the range of normal numbers has fewer digits.
            if condition > 4 * limits.smallest_normal and abs(expected) > limits.smallest_normal
        ]
    return max(errors, default=0.0)


names = pytest.mark.parametrize("name", ["softmax", "log_softmax", "logsumexp", "cross_entropy"])

# Differences of up to 80 logits: the smallest probability is a normal number in float32. They are rounded by up to 64
# roundoffs of float32 and float64 before they are exponentiated, which is most of the error that is allowed.
logits = st.floats(-40, 40) | st.sampled_from([0.0, 0.1, 1.0, -40.0, 16.6, 36.7, 39.9, -0.7])
cotangents = st.floats(-1e3, 1e3) | st.sampled_from([0.0, 1.0, -1.0, 1000.0, 1000.001, 1e-4])
rows = st.lists(st.tuples(logits, cotangents), min_size=2, max_size=9)


@names
@pytest.mark.parametrize(
    ("dtype", "roundoffs"),
    [(torch.float64, 100), (torch.float32, 100), (torch.bfloat16, 1), (torch.float16, 1)],
    ids=["float64", "float32", "bfloat16", "float16"],
)
def test_every_component_is_exact(name, dtype, roundoffs):
    @settings(deadline=None, max_examples=40, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
    @given(rows, st.integers(0, 8))
    @example([(40.0, 1.0), (0.0, 0.0)], 0)  # the larger component is lost by `torch.softmax`
    @example([(0.0, 1000.0), (-30.0, 1000.001), (-35.0, 3.0)], 0)
    @example([(0.0, 1.1), (-34.0, 1.1), (-79.0, 5.0)], 0)  # the rounded mean is not the maximum's cotangent
    @example([(0.01, 1e3), (0.0, 1e3), (-20.0, 0.5)], 1)  # close to the gate at one half
    def check(row, label):
        x, g = (torch.tensor(column, dtype=torch.float64).to(dtype) for column in zip(*row, strict=True))
        assert worst_error(name, x, g, label % len(row)) <= roundoffs

    check()


@pytest.mark.parametrize("product", [centred_product, centred_product_in_plain_operations], ids=["fast", "plain"])
@pytest.mark.parametrize(
    ("x", "g"),
    [([0.0, -34.0, -79.0], [1.1, 1.1, 5.0]), ([-79.0, 0.0, -30.0], [7.0, -1000.1, -1000.1])],
    ids=["first", "second"],
)
def test_the_pivot_is_the_cotangent_of_the_maximum_and_not_a_rounded_mean(product, x, g):
    found = product(softmax(torch.tensor(x, dtype=torch.float64)), torch.tensor(g, dtype=torch.float64), -1)
    with mpmath.workdps(50):
        exactly, conditions = truth("softmax", x, g, 0)
        for value, expected, condition in zip(found.tolist(), exactly, conditions, strict=True):
            assert abs(value - expected) <= 100 * 2.0**-53 * condition


@names
def test_every_component_is_exact_with_the_block_open(name):
    generator = torch.Generator().manual_seed(3)
    for scale in (1.0, 8.0, 15.0):
        x = scale * torch.randn(7, dtype=torch.float64, generator=generator)
        g = 100 + torch.randn(7, dtype=torch.float64, generator=generator)
        with unblock(SHIFT):
            assert worst_error(name, x, g, 2) <= 100


@pytest.mark.parametrize("opened", [(), (SHIFT,)], ids=["blocked", "open"])
@pytest.mark.parametrize("spread", [100.0, 300.0, 700.0])
def test_a_wider_spread_costs_the_rounding_of_the_logit_differences_and_no_more(spread, opened):
    # Up to |x - max| roundoffs enter each probability, whatever its derivative is multiplied with.
    generator = torch.Generator().manual_seed(4)
    worst = 0.0
    for _ in range(10):
        x = torch.rand(8, dtype=torch.float64, generator=generator)
        x = spread * (x - x.min()) / (x.max() - x.min()) + 0.1
        g = torch.randn(8, dtype=torch.float64, generator=generator)
        for name in ("softmax", "log_softmax", "logsumexp", "cross_entropy"):
            with unblock(*opened):
                error = worst_error(name, x, g, 0)
            assert error <= 40 + spread
            worst = max(worst, error)
    if spread == 700:
        assert worst > 100  # so it has to be said


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scale", [0.3, 1.0, 6.0])
def test_wide_rows_keep_their_components_too(dtype, scale):
    generator = torch.Generator().manual_seed(5)
    x = (scale * torch.randn(100, 1000, generator=generator)).to(dtype).requires_grad_()
    g = (3000 + torch.randn(100, 1000, generator=generator)).to(dtype)
    (found,) = torch.autograd.grad(softmax(x), x, g)
    y = torch.softmax(x.detach().double(), -1)  # float64 is exact beside both
    for row in range(0, 100, 9):
        pairs = y[row][:, None] * y[row] * (g[row].double()[:, None] - g[row].double())
        error = (found[row].double() - pairs.sum(1)).abs() / pairs.abs().sum(1) / (torch.finfo(dtype).eps / 2)
        assert error.max() <= (1 if dtype == torch.bfloat16 else 100)


@pytest.mark.portable
def test_torch_loses_components_that_are_kept_here():
    x = torch.tensor([40.0, 0.0], dtype=torch.float64, requires_grad=True)
    g = torch.tensor([1.0, 0.0], dtype=torch.float64)
    exactly = 4.248354255291589e-18
    assert torch.autograd.grad(torch.softmax(x, -1), x, g)[0].tolist() == [0, pytest.approx(-exactly, abs=0)]
    found = torch.autograd.grad(softmax(x), x, g)[0]
    assert found.tolist() == pytest.approx([exactly, -exactly], rel=LAST_BITS, abs=0)
    assert torch.autograd.grad(torch.nn.functional.cross_entropy(x, torch.tensor(0)), x)[0][0] == 0
    found = torch.autograd.grad(cross_entropy(x, torch.tensor(0)), x)[0]
    assert found.tolist() == pytest.approx([-exactly, exactly], rel=LAST_BITS, abs=0)


@pytest.mark.parametrize("way", ["double backward", "torch.func"])
def test_the_second_derivative_keeps_small_components(way):
    # With probabilities (1 - q, q), q = e^-40 / (1 + e^-40), and one cotangent at the small one: d2 y_2 / dx_2 dx_1 =
    # -q (1 - q) (1 - 2 q), and so on: every second derivative of y_2 is plus or minus that.
    x = torch.tensor([40.0, 0.0], dtype=torch.float64)
    q = math.exp(-40) / (1 + math.exp(-40))
    expected = q * (1 - q) * (1 - 2 * q)
    if way == "torch.func":
        hessian = torch.func.jacrev(torch.func.jacrev(lambda x: softmax(x)[0]))(x)
    else:
        hessian = torch.autograd.functional.hessian(lambda x: softmax(x)[0], x)
    assert hessian.flatten().tolist() == pytest.approx([-expected, expected, expected, -expected], rel=1e-14, abs=0)
    for function in (logsumexp, lambda x: cross_entropy(x, torch.tensor(0))):
        hessian = torch.autograd.functional.hessian(function, x).flatten()
        assert hessian.tolist() == pytest.approx([q, -q, -q, q], rel=1e-14, abs=0)


@pytest.mark.portable
@names
def test_forward_mode_keeps_small_components(name):
    x = torch.tensor([40.0, 0.0], dtype=torch.float64)
    g = torch.tensor([0.3, 1.0], dtype=torch.float64)
    with mpmath.workdps(50):
        exactly = [float(value) for value in truth(name, x.tolist(), g.tolist(), 0)[0]]
    gradient = torch.func.jacfwd(lambda x: loss_of(name, x, g, 0))(x)
    assert gradient.tolist() == pytest.approx(exactly, rel=1e-14 if name != "log_softmax" else 1e-12, abs=0)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ([0.0, -40.0], 4.248354255291589e-18),
        ([0.0, -700.0], 9.859676543759770e-305),
        ([-40.0, 0.0, -40.0], 2 * 4.248354255291589e-18),
        ([1e308, 1e308], 1e308),
        ([-1e308, -1e308], -1e308),
        ([1e-310, 1e-310], math.log(2)),
        ([5.0], 5.0),
    ],
    ids=str,
)
def test_hard_sums_have_the_logarithm_of_scipy(row, expected):
    assert logsumexp(torch.tensor(row, dtype=torch.float64)).item() == pytest.approx(expected, rel=LAST_BITS, abs=0)


@pytest.mark.parametrize("way", ["double backward", "forward over reverse", "reverse over forward"])
@pytest.mark.parametrize("label", [0, 1, 2])
def test_the_curvature_of_cross_entropy_keeps_an_improbable_label(way, label):
    # H v has the components y_i sum_j y_j (v_i - v_j), whatever the label.
    x = torch.tensor([3.0, -51.0, 0.5], dtype=torch.float64)
    v = torch.tensor([0.7, -1.3, 0.4], dtype=torch.float64)
    with mpmath.workdps(50):
        exactly, _ = truth("softmax", x.tolist(), v.tolist(), label)

    def loss(x: Tensor) -> Tensor:
        return cross_entropy(x, torch.tensor(label))

    if way == "double backward":
        found = torch.autograd.functional.hvp(loss, x, v)[1]
    elif way == "forward over reverse":
        found = torch.func.jvp(torch.func.grad(loss), (x,), (v,))[1]
    else:
        found = torch.func.grad(lambda x: torch.func.jvp(loss, (x,), (v,))[1])(x)
    # 54 nats between the logits, and some operations.
    assert found.tolist() == pytest.approx([float(value) for value in exactly], rel=(54 + 40) * 2.0**-53, abs=0)
