"""Stable softmax: exact values, exact gradients, and a shift that leaks nothing unless it is blocked by half."""

import math
from collections.abc import Callable, Mapping
from functools import partial

import mpmath
import numpy as np
import pytest
import scipy.special
import torch
from contract import BlockCase
from each import each
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.func import jacfwd, jacrev, vmap

from experiments.softmax import (
    INNER,
    OUTER,
    Config,
    calibration_error,
    half_blocked_logsumexp,
    maximum_likelihood,
    run,
)
from toolkit import Block, block, declared_blocks, stop_gradient, unblock
from toolkit.gradients.memory import measure_memory
from toolkit.softmax import (
    SHIFT,
    cross_entropy,
    linear_cross_entropy,
    log_softmax,
    logsumexp,
    naive_softmax,
    softmax,
)

pytestmark = [
    # Dynamo makes an instance of `torch.autograd.Function` when it traces one.
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]

INF, NAN = math.inf, math.nan
EPS = torch.finfo(torch.float64).eps


def declared(name: str, why: str) -> Block:
    """Return the block: the common suite executes this file once more, and a name is declared once."""
    return declared_blocks().get(name) or block(name, why)


CLAMPED = declared("test_softmax.clamped_shift", "A shift that the clamp after it does not undo: it leaks.")
UNDIVIDED = declared("test_softmax.undivided_shift", "A shift that no division undoes: it leaks.")
COARSE = declared("test_softmax.coarse_shift", "A maximum taken in another precision: its gradient is 0 / 0.")

POINTS = {
    "asymmetric": [0.3, -1.2, 2.0, 0.7],
    "two maxima": [1.0, 2.0, 2.0, -0.5],
    "all tied": [0.4, 0.4, 0.4, 0.4],
    "masked": [-INF, 0.5, 1.5, -0.25],
    "far apart": [800.0, -3.0, 799.0, -1e4],
}
LABELS = torch.tensor([2, 0, 3])


def _of_ragged_rows(function):
    """Call it with two rows of different lengths; the first tensor of this kind imports Dynamo."""
    return function(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged))


def batch() -> Tensor:
    """Three rows; one has a tie at its maximum."""
    return torch.tensor([[0.3, -1.2, 2.0, 0.7], [1.0, 2.0, 2.0, -0.5], [-0.1, 0.2, -3.0, 1.1]], dtype=torch.float64)


def weights() -> Tensor:
    """Make a scalar of a batch that is symmetric in nothing."""
    return torch.tensor([[0.5, -1.0, 2.0, 0.25], [1.5, 0.3, -0.7, 1.0], [-2.0, 0.1, 0.6, 0.9]], dtype=torch.float64)


def scipy_softmax(x: Tensor) -> Tensor:
    return torch.from_numpy(scipy.special.softmax(x.detach().numpy(), axis=-1))


# --- witnesses: Jacobians on paper, values by scipy ------------------------------------------------------------------


def softmax_jacobian(y: Tensor) -> Tensor:
    return torch.diag(y) - torch.outer(y, y)


def softmax_second_derivative(y: Tensor) -> Tensor:
    """``d2 y_i / dx_j dx_k``, by differentiating ``y_i (delta_ij - y_j)`` once more."""
    first = torch.eye(len(y)) - y
    return torch.einsum("i,ij,ik->ijk", y, first, first) - torch.einsum("i,jk->ijk", y, softmax_jacobian(y))


JACOBIANS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "softmax": (softmax, softmax_jacobian, softmax_second_derivative),
    "log_softmax": (
        log_softmax,
        lambda y: torch.eye(len(y)) - y,
        lambda y: -softmax_jacobian(y).expand(len(y), -1, -1),
    ),
    "logsumexp": (logsumexp, lambda y: y, softmax_jacobian),
    "cross_entropy": (
        lambda x: cross_entropy(x, torch.tensor(1)),
        lambda y: y - torch.eye(len(y), dtype=y.dtype)[1],
        softmax_jacobian,
    ),
}
functions = pytest.mark.parametrize("name", JACOBIANS)
both_ways = pytest.mark.parametrize("opened", [(), (SHIFT,)], ids=["blocked", "open"])


# --- what the common suite is given ----------------------------------------------------------------------------------


def case(
    id: str,
    loss: Callable[[Tensor], Tensor],
    blocked: Callable[[Tensor], Tensor],
    opened: Callable[[Tensor], Tensor] | None = None,
    block: Block = SHIFT,
) -> BlockCase:
    """Make a case of a program of one batch; without `opened`, the open gradient is the blocked one: no leak."""

    def lift(function: Callable[[Tensor], Tensor]) -> Callable[[Mapping[str, Tensor]], dict[str, Tensor]]:
        return lambda parameters: {"x": function(parameters["x"].detach())}

    return BlockCase(
        id=id,
        block=block,
        parameters=lambda: {"x": batch().requires_grad_()},
        loss=lambda parameters: loss(parameters["x"]),
        blocked=lift(blocked),
        opened=lift(opened or blocked),
    )


def at_maximum(x: Tensor) -> Tensor:
    """Indicator of the maximum, shared evenly between ties."""
    mask = (x == x.max(-1, keepdim=True).values).to(x.dtype)
    return mask / mask.sum(-1, keepdim=True)


def clamped(x: Tensor) -> Tensor:
    z = x - stop_gradient(x.amax(-1, keepdim=True), CLAMPED)
    return (weights() * z.clamp(min=-1.5).exp()).sum()


def clamped_gradient(x: Tensor) -> Tensor:
    z = x - x.max(-1, keepdim=True).values
    return weights() * z.exp() * (z > -1.5)


def undivided(x: Tensor) -> Tensor:
    return (weights() * (x - stop_gradient(x.amax(-1, keepdim=True), UNDIVIDED)).exp()).sum()


def undivided_gradient(x: Tensor) -> Tensor:
    return weights() * (x - x.max(-1, keepdim=True).values).exp()


def with_leak(gradient: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Add what flows through a subtracted maximum: minus the row's sum, at the maximum."""
    return lambda x: gradient(x) - at_maximum(x) * gradient(x).sum(-1, keepdim=True)


def softmax_gradient(x: Tensor) -> Tensor:
    return torch.stack([softmax_jacobian(y) @ w for y, w in zip(scipy_softmax(x), weights(), strict=True)])


def log_softmax_gradient(x: Tensor) -> Tensor:
    return weights() - scipy_softmax(x) * weights().sum(-1, keepdim=True)


def row_weights() -> Tensor:
    return torch.tensor([0.7, -1.3, 2.1], dtype=torch.float64)


def half_blocked(x: Tensor) -> Tensor:
    return (row_weights() * half_blocked_logsumexp(x)).sum()


def weighted_logsumexp(x: Tensor) -> Tensor:
    total = logsumexp(x, b=signed_weights(x), return_sign=True)[0]
    return (row_weights() * total).sum()


def weighted_logsumexp_gradient(x: Tensor) -> Tensor:
    terms = signed_weights(x) * (x - x.amax(1, keepdim=True)).exp()
    return row_weights()[:, None] * terms / terms.sum(1, keepdim=True)


def signed_weights(x: Tensor) -> Tensor:
    return torch.tensor([1.0, 2.0, -0.25, 0.5], dtype=x.dtype)


def logsumexp_gradient(x: Tensor) -> Tensor:
    return row_weights()[:, None] * scipy_softmax(x)


BLOCK_CASES: list[BlockCase] = [
    case("softmax", lambda x: (weights() * softmax(x)).sum(), softmax_gradient),
    case("log_softmax", lambda x: (weights() * log_softmax(x)).sum(), log_softmax_gradient),
    case("logsumexp", lambda x: (row_weights() * logsumexp(x)).sum(), logsumexp_gradient),
    case("weighted_logsumexp", weighted_logsumexp, weighted_logsumexp_gradient),
    case(
        "cross_entropy",
        lambda x: cross_entropy(x, LABELS),
        lambda x: (scipy_softmax(x) - torch.eye(4, dtype=x.dtype)[LABELS]) / 3,
    ),
    case(
        "half_blocked_inner",
        half_blocked,
        logsumexp_gradient,
        lambda x: logsumexp_gradient(x) - row_weights()[:, None] * at_maximum(x),
        INNER,
    ),
    case(
        "half_blocked_outer",
        half_blocked,
        logsumexp_gradient,
        lambda x: logsumexp_gradient(x) + row_weights()[:, None] * at_maximum(x),
        OUTER,
    ),
    case("clamped_exponent", clamped, clamped_gradient, with_leak(clamped_gradient), CLAMPED),
    case("undivided", undivided, undivided_gradient, with_leak(undivided_gradient), UNDIVIDED),
]


# --- values ----------------------------------------------------------------------------------------------------------

logit = st.floats(-800, 800) | st.sampled_from([0.0, 1.0, -40.0, 36.7, 700.0, -800.0])
rows = st.lists(logit, min_size=1, max_size=6)


def exact(row: list[float]) -> tuple[list[mpmath.mpf], mpmath.mpf]:
    """Return softmax and log-sum-exp to 50 digits."""
    with mpmath.workdps(50):
        exponentials = [mpmath.exp(mpmath.mpf(x)) for x in row]
        total = mpmath.fsum(exponentials)
        return [e / total for e in exponentials], mpmath.log(total)


@settings(deadline=None, max_examples=150)
@given(rows)
def test_softmax_is_exact_to_the_rounding_of_its_exponents(row):
    found = softmax(torch.tensor(row, dtype=torch.float64)).tolist()
    for y, truth, x in zip(found, exact(row)[0], row, strict=True):
        # z = x - m is rounded by |z| eps / 2, the sum of n terms by n eps / 2.
        bound = (abs(x - max(row)) + len(row) + 4) * EPS
        assert abs(y - truth) <= bound * truth + 1e-307


@settings(deadline=None, max_examples=150)
@given(st.lists(st.floats(-800, 0), max_size=5).map(lambda row: [0.0, *row]))
def test_logarithms_next_to_zero_keep_all_their_digits(row):
    x = torch.tensor(row, dtype=torch.float64)
    with mpmath.workdps(400):  # the smallest excess over 1 is e^-800
        exponentials = [mpmath.exp(mpmath.mpf(value)) for value in row]
        total = mpmath.log(mpmath.fsum(exponentials))
        bound = (len(row) + 6) * EPS
        assert abs(logsumexp(x).item() - total) <= bound * total + 1e-307
        for found, value in zip(log_softmax(x).tolist(), row, strict=True):
            assert abs(found - (value - total)) <= bound * abs(value - total) + 1e-307


@settings(deadline=None, max_examples=150)
@given(rows)
def test_logsumexp_is_exact_to_its_own_rounding(row):
    found, truth = logsumexp(torch.tensor(row, dtype=torch.float64)).item(), exact(row)[1]
    assert abs(found - truth) <= EPS * (abs(truth) + abs(max(row)) + len(row) + 6)


@pytest.mark.portable
def test_what_is_left_of_a_probability_next_to_one_is_kept_as_in_scipy():
    x = torch.tensor([0.0, -40.0], dtype=torch.float64)
    # One exponential, one quotient, one logarithm, each to its last bit: which one that is, the library decides.
    exactly = pytest.approx(4.248354255291589e-18, rel=4 * EPS, abs=0)
    assert scipy.special.logsumexp(x.numpy()) == exactly
    assert logsumexp(x).item() == exactly
    assert -log_softmax(x)[0].item() == exactly
    assert cross_entropy(x, torch.tensor(0)).item() == exactly
    assert torch.logsumexp(x, -1).item() == 0  # what a plain logarithm of the sum leaves


@functions
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_agrees_with_torch_in_every_dimension(name, dim):
    x = torch.randn(3, 4, 5, dtype=torch.float64)
    labels = torch.randint(3, x.select(dim, 0).shape)
    ours, theirs = {
        "softmax": (softmax(x, dim), torch.softmax(x, dim)),
        "log_softmax": (log_softmax(x, dim), torch.log_softmax(x, dim)),
        "logsumexp": (logsumexp(x, dim), torch.logsumexp(x, dim)),
        "cross_entropy": (
            cross_entropy(x, labels, dim),
            torch.nn.functional.cross_entropy(x.movedim(dim, 1), labels.reshape(x.select(dim, 0).shape)),
        ),
    }[name]
    torch.testing.assert_close(ours, theirs, rtol=1e-14, atol=1e-14)


def test_keepdim_keeps_the_dimension():
    x = torch.randn(3, 4, 5)
    assert logsumexp(x, 1, keepdim=True).shape == (3, 1, 5)
    assert logsumexp(x, 1).shape == (3, 5)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_reductions_are_those_of_torch(reduction):
    x = batch()
    expected = torch.nn.functional.cross_entropy(x, LABELS, reduction=reduction)
    torch.testing.assert_close(cross_entropy(x, LABELS, reduction=reduction), expected, rtol=1e-14, atol=0)


def test_losses_within_two_forward_derivatives_are_the_same():
    """There they are plain operations. Along t the second derivative is the variance of t under the softmax."""
    x = torch.tensor([[0.3, -1.2, 2.0], [1e3, 1e3, -1.0]], dtype=torch.float64)
    t = torch.tensor([[1.0, -0.5, 0.25], [0.5, 2.0, 1.0]], dtype=torch.float64)
    labels = torch.tensor([2, 0])

    def slope(x):
        return torch.func.jvp(lambda x: cross_entropy(x, labels, reduction="none"), (x,), (t,))

    (losses, slopes), (same, curvature) = torch.func.jvp(slope, (x,), (t,))
    y = x.softmax(1)
    mean = (y * t).sum(1)
    torch.testing.assert_close(losses, torch.nn.functional.cross_entropy(x, labels, reduction="none"))
    torch.testing.assert_close(slopes, mean - t.gather(1, labels[:, None])[:, 0])
    torch.testing.assert_close(same, slopes)
    torch.testing.assert_close(curvature, (y * t.square()).sum(1) - mean.square())


def test_the_shift_comes_before_the_label_is_subtracted():
    large = torch.tensor([1e8, 1e8])
    assert cross_entropy(large, torch.tensor(1)).item() == pytest.approx(math.log(2), rel=1e-7)
    torch.testing.assert_close(log_softmax(large), torch.full((2,), -math.log(2)), rtol=1e-7, atol=0)


def test_naive_softmax_is_right_until_it_overflows():
    x = batch()
    torch.testing.assert_close(naive_softmax(x), softmax(x), rtol=1e-14, atol=0)
    assert naive_softmax(x + 710).isnan().any()
    assert naive_softmax(x - 750).isnan().all()
    torch.testing.assert_close(softmax(x + 710), softmax(x), rtol=1e-12, atol=0)


# --- gradients -------------------------------------------------------------------------------------------------------


@functions
@both_ways
@each("point", POINTS)
@each("derivative", [jacrev, jacfwd, "backward"], ids=["reverse", "forward", "backward"])
def test_jacobian_is_the_one_on_paper_blocked_or_not(name, opened, point, derivative):
    function, jacobian, _ = JACOBIANS[name]
    x = torch.tensor(POINTS[point], dtype=torch.float64)
    expected = jacobian(scipy_softmax(x))
    with unblock(*opened):
        if derivative == "backward":
            found = torch.autograd.functional.jacobian(function, x)
        else:
            found = derivative(function)(x)
    torch.testing.assert_close(found, expected.to(found.dtype), rtol=1e-13, atol=4 * EPS)


ORDERS = {
    "reverse over reverse": lambda f: jacrev(jacrev(f)),
    "forward over reverse": lambda f: jacfwd(jacrev(f)),
    "reverse over forward": lambda f: jacrev(jacfwd(f)),
    "forward over forward": lambda f: jacfwd(jacfwd(f)),
}


@functions
@both_ways
@each("order", ORDERS)
@each("point", ["asymmetric", "two maxima", "all tied"])
def test_second_derivative_is_the_one_on_paper_blocked_or_not(name, opened, order, point):
    function, _, second = JACOBIANS[name]
    x = torch.tensor(POINTS[point], dtype=torch.float64)
    with unblock(*opened):
        found = ORDERS[order](function)(x)
    torch.testing.assert_close(found, second(scipy_softmax(x)), rtol=1e-12, atol=4 * EPS)


@functions
@both_ways
def test_double_backward_is_the_second_derivative(name, opened):
    function = JACOBIANS[name][0]
    x = batch()[1].requires_grad_()
    with unblock(*opened):
        assert torch.autograd.gradcheck(function, x, check_forward_ad=True, check_batched_grad=True)
        assert torch.autograd.gradgradcheck(function, x)


# --- the block -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", BLOCK_CASES, ids=lambda case: case.id)
def test_value_has_the_same_bits_blocked_or_open(case):
    blocked = case.loss(case.parameters())
    with unblock(case.block):
        opened = case.loss(case.parameters())
    assert blocked.equal(opened)


@pytest.mark.parametrize("case", BLOCK_CASES, ids=lambda case: case.id)
@pytest.mark.parametrize("is_open", [False, True], ids=["blocked", "open"])
def test_gradient_is_its_witness(case, is_open):
    parameters = case.parameters()
    with unblock(*[case.block] * is_open):
        (found,) = torch.autograd.grad(case.loss(parameters), parameters["x"])
    witness = (case.opened if is_open else case.blocked)(parameters)["x"]
    torch.testing.assert_close(found, witness, rtol=1e-13, atol=4 * EPS)


@functions
def test_the_open_block_keeps_the_input_alive_for_nothing(name):
    x = torch.randn(300, 400, dtype=torch.float64, requires_grad=True)
    one_input = x.numel() * x.element_size()
    function = (lambda x: cross_entropy(x, torch.zeros(300).long())) if name == "cross_entropy" else JACOBIANS[name][0]
    blocked = measure_memory(lambda: function(x.clone()).sum()).graph
    with unblock(SHIFT):
        opened = measure_memory(lambda: function(x.clone()).sum()).graph
    assert blocked == pytest.approx(one_input, rel=0.03)
    assert opened - blocked == pytest.approx(one_input, rel=0.03)


@pytest.mark.parametrize(
    ("opened", "expected"),
    [
        ((), [0.155, 0.422, 0.422]),
        ((INNER,), [0.155, -0.078, -0.078]),
        ((OUTER,), [0.155, 0.922, 0.922]),
        ((INNER, OUTER), [0.155, 0.422, 0.422]),
    ],
    ids=["both blocked", "inner open", "outer open", "both open"],
)
def test_half_blocked_logsumexp_leaks_and_whole_ones_do_not(opened, expected):
    x = torch.tensor([1.0, 2.0, 2.0], dtype=torch.float64, requires_grad=True)
    with unblock(*opened):
        half_blocked_logsumexp(x).backward()
    torch.testing.assert_close(x.grad, torch.tensor(expected).double(), rtol=0, atol=5e-4)


class _CoarseMaximum(torch.autograd.Function):
    """The maximum in float32, its gradient by equality with the float64 input: what a fusing compiler may do."""

    @staticmethod
    def forward(ctx, x):
        maximum = x.float().amax(-1, keepdim=True).double()
        ctx.save_for_backward(x, maximum)
        return maximum

    @staticmethod
    def backward(ctx, cotangent):
        x, maximum = ctx.saved_tensors
        mask = (x == maximum).double()
        return cotangent * mask / mask.sum(-1, keepdim=True)


def test_a_maximum_in_another_precision_is_nan_without_the_block():
    x = torch.randn(32, 5, dtype=torch.float64, requires_grad=True)

    def program() -> Tensor:
        e = (x - stop_gradient(_CoarseMaximum.apply(x), COARSE)).exp()
        return (e / e.sum(-1, keepdim=True)).square().sum()

    (blocked,) = torch.autograd.grad(program(), x)
    with unblock(COARSE):
        (opened,) = torch.autograd.grad(program(), x)
    assert opened.isnan().any(-1).all()
    (expected,) = torch.autograd.grad(torch.softmax(x, -1).square().sum(), x)
    torch.testing.assert_close(blocked, expected, rtol=1e-13, atol=4 * EPS)


@pytest.mark.slow
@pytest.mark.keeps_its_sums
@functions
def test_compiles_whole_and_follows_the_block(name):
    torch.compiler.reset()
    function = JACOBIANS[name][0]
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    x = batch()[1].requires_grad_()
    expected = function(x)
    for opened in ((), (SHIFT,), ()):
        with unblock(*opened):
            found = compiled(x)
            torch.testing.assert_close(found, expected, rtol=1e-14, atol=0)  # other kernels
            (gradient,) = torch.autograd.grad(found.square().sum(), x)
        (truth,) = torch.autograd.grad(expected.square().sum(), x, retain_graph=True)
        torch.testing.assert_close(gradient, truth, rtol=1e-13, atol=4 * EPS)


@pytest.mark.keeps_its_sums
def test_compiled_half_blocked_logsumexp_follows_the_block():
    torch.compiler.reset()
    compiled = torch.compile(half_blocked_logsumexp, fullgraph=True, backend="aot_eager")
    x = torch.tensor([1.0, 2.0, 2.0], dtype=torch.float64, requires_grad=True)
    sums = []
    for opened in ((), (INNER,), (OUTER,), (INNER, OUTER), ()):
        with unblock(*opened):
            sums.append(torch.autograd.grad(compiled(x), x)[0].sum().item())
    assert sums == pytest.approx([1, 0, 2, 1, 1])


@both_ways
def test_vmap_maps_rows(opened):
    x = batch().requires_grad_()
    with unblock(*opened):
        assert vmap(softmax)(x).equal(softmax(x))
        assert vmap(log_softmax)(x).equal(log_softmax(x))
        assert vmap(logsumexp)(x).equal(logsumexp(x))
        assert vmap(cross_entropy)(x, LABELS).equal(cross_entropy(x, LABELS, reduction="none"))


# --- edges -----------------------------------------------------------------------------------------------------------


@both_ways
@pytest.mark.parametrize(
    ("row", "probabilities", "logs", "total", "total_gradient"),
    [
        ([-INF, -INF], [0, 0], [-INF, -INF], -INF, [0, 0]),
        ([-INF, 3.0], [0, 1], [-INF, 0], 3.0, [0, 1]),
        ([INF, 0.0], [NAN, 0], [NAN, -INF], INF, [NAN, 0]),
        ([INF, -INF], [NAN, 0], [NAN, -INF], INF, [NAN, 0]),
        ([NAN, 0.0], [NAN, NAN], [NAN, NAN], NAN, [NAN, NAN]),
        ([NAN, INF], [NAN, NAN], [NAN, NAN], NAN, [NAN, NAN]),
        ([NAN, -INF], [NAN, NAN], [NAN, NAN], NAN, [NAN, NAN]),
        ([-1.7e308, -1.7e308], [0.5, 0.5], [-math.log(2)] * 2, -1.7e308, [0.5, 0.5]),
        ([1.7e308, -1.7e308], [1, 0], [0, -INF], 1.7e308, [1, 0]),
    ],
    ids=["all -inf", "-inf", "+inf", "+inf and -inf", "nan", "nan and inf", "nan and -inf", "lowest", "both ends"],
)
def test_infinite_rows(row, probabilities, logs, total, total_gradient, opened):
    x = torch.tensor(row, dtype=torch.float64, requires_grad=True)

    def same(found: Tensor, expected: list[float] | float) -> None:
        truth = torch.tensor(expected, dtype=torch.float64)
        torch.testing.assert_close(found, truth, equal_nan=True, rtol=1e-15, atol=0)

    with unblock(*opened):
        same(softmax(x), probabilities)
        same(log_softmax(x), logs)
        same(logsumexp(x), total)
        same(torch.autograd.grad(logsumexp(x), x)[0], total_gradient)


@both_ways
def test_a_masked_row_has_gradient_zero_and_poisons_no_other(opened):
    x = torch.tensor([[-INF, -INF, -INF], [0.5, -INF, 1.0]], dtype=torch.float64, requires_grad=True)
    vector = torch.tensor([[2.0, -1.0, 0.5], [2.0, -1.0, 0.5]], dtype=torch.float64)
    with unblock(*opened):
        (gradient,) = torch.autograd.grad(softmax(x), x, vector)
        (through_logs,) = torch.autograd.grad(log_softmax(x), x, vector)
    y = scipy_softmax(x[1])
    torch.testing.assert_close(gradient, torch.stack([torch.zeros(3).double(), softmax_jacobian(y) @ vector[1]]))
    torch.testing.assert_close(through_logs, torch.stack([vector[0], vector[1] - y * vector[1].sum()]))


def test_a_label_that_is_masked_out_costs_infinity():
    x = torch.tensor([[-INF, 1.0], [-INF, -INF]], dtype=torch.float64, requires_grad=True)
    losses = cross_entropy(x, torch.tensor([0, 1]), reduction="none")
    assert losses.tolist() == [INF, INF]
    (gradient,) = torch.autograd.grad(losses.sum(), x)
    assert gradient.tolist() == [[-1, 1], [0, -1]]


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0,)], ids=str)
def test_empty_inputs(shape):
    x = torch.zeros(shape, requires_grad=True)
    for function, expected in (
        (softmax, torch.softmax),
        (log_softmax, torch.log_softmax),
        (logsumexp, torch.logsumexp),
    ):
        y = function(x)
        assert y.equal(expected(x, -1))
        assert torch.autograd.grad(y.sum(), x)[0].shape == shape


def test_no_samples():
    logits, labels = torch.zeros(0, 3), torch.zeros(0).long()
    assert cross_entropy(logits, labels, reduction="sum") == 0
    assert cross_entropy(logits, labels, reduction="none").shape == (0,)
    assert cross_entropy(logits, labels).isnan()


def test_a_scalar_is_its_own_row():
    x = torch.tensor(3.5, requires_grad=True)
    assert softmax(x) == 1
    assert log_softmax(x) == 0
    assert logsumexp(x) == 3.5
    assert torch.autograd.grad(logsumexp(x), x)[0] == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@both_ways
def test_low_precision_is_rounded_once(dtype, opened):
    x = (8 * torch.randn(50, 30)).to(dtype).requires_grad_()
    truth = x.detach().double().requires_grad_()
    labels, vector = torch.randint(30, (50,)), torch.randn(50, 30).to(dtype)
    with unblock(*opened):
        found = [softmax(x), log_softmax(x), logsumexp(x), cross_entropy(x, labels, reduction="none")]
        expected = [softmax(truth), log_softmax(truth), logsumexp(truth)]
        expected.append(cross_entropy(truth, labels, reduction="none"))
        (gradient,) = torch.autograd.grad(found[0], x, vector)
    (true_gradient,) = torch.autograd.grad(expected[0], truth, vector.double())
    precision = torch.finfo(dtype).eps
    # Half precision: half a unit, because float32 is exact next to it. float32 itself: the rounding of its own sums.
    slack = 0.51 if dtype != torch.float32 else 20
    for y, exactly in zip(found, expected, strict=True):
        assert y.dtype == dtype
        torch.testing.assert_close(y.double(), exactly, rtol=slack * precision, atol=torch.finfo(dtype).smallest_normal)
    assert gradient.dtype == dtype
    torch.testing.assert_close(gradient.double(), true_gradient, rtol=slack * precision, atol=slack * precision)


def test_a_sum_beyond_the_range_of_float16_does_not_overflow():
    x = torch.zeros(100_000, dtype=torch.float16)
    assert softmax(x)[0].item() == torch.tensor(1e-5, dtype=torch.float16).item()
    assert logsumexp(x).item() == pytest.approx(math.log(100_000), rel=1e-3)


def test_input_is_left_as_it_was():
    x = batch()
    for function in (softmax, log_softmax, logsumexp, naive_softmax):
        function(x)
    cross_entropy(x, LABELS)
    assert x.equal(batch())
    torch.testing.assert_close(softmax(x.T, 0).T, softmax(x), rtol=1e-14, atol=0)  # not contiguous: another kernel


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: softmax(torch.tensor([1, 2])),
            TypeError,
            "`input` should be a floating-point tensor. Found torch.int64",
        ),
        (lambda: log_softmax(torch.tensor([True])), TypeError, "Found torch.bool"),
        (lambda: logsumexp(torch.tensor([1j])), TypeError, "Found torch.complex64"),
        (lambda: naive_softmax(torch.tensor([1])), TypeError, "Found torch.int64"),
        (lambda: softmax([1.0, 2.0]), TypeError, "Found list"),
        (lambda: cross_entropy(torch.tensor([[1, 2]]), torch.tensor([0])), TypeError, "`logits` should be a floating"),
        (lambda: cross_entropy(batch(), LABELS.float()), ValueError, r"should have shape \(3, 4\). Found \(3,\)"),
        (lambda: cross_entropy(batch(), [0, 1, 2]), TypeError, "Found list"),
        (lambda: cross_entropy(batch(), LABELS > 1), TypeError, "Found torch.bool"),
        *(
            (partial(function, batch().to_sparse()), TypeError, "should be a dense tensor. Found torch.sparse_coo")
            for function in (softmax, log_softmax, logsumexp, naive_softmax)
        ),
        *(
            (partial(_of_ragged_rows, function), TypeError, "`input` should be a dense tensor. Found a nested tensor")
            for function in (softmax, log_softmax, logsumexp, naive_softmax)
        ),
        (lambda: cross_entropy(batch(), LABELS.to_sparse()), TypeError, "`labels` should be a dense tensor"),
        (
            lambda: cross_entropy(batch(), LABELS, weight=torch.ones(4).to_sparse()),
            TypeError,
            "`weight` should be a dense",
        ),
        (lambda: softmax(batch(), where=torch.ones(3, 4).bool().to_sparse()), TypeError, "`where` should be a dense"),
        (lambda: logsumexp(batch(), b=torch.ones(3, 4).to_sparse()), TypeError, "`b` should be a dense"),
        (
            lambda: linear_cross_entropy(torch.ones(3, 4).to_sparse(), torch.ones(5, 4), LABELS),
            TypeError,
            "`input` should be a dense",
        ),
        (lambda: cross_entropy(batch(), LABELS * 1j), TypeError, "Found torch.complex64"),
        (lambda: cross_entropy(batch(), LABELS[:2]), ValueError, r"`labels` should have shape \(3,\). Found \(2,\)"),
        (
            lambda: cross_entropy(batch(), LABELS, reduction="avg"),
            ValueError,
            "`reduction` should be one of 'mean', 'sum', 'none'",
        ),
        (lambda: cross_entropy(batch(), LABELS + 2), RuntimeError, "should be from 0 to 3. Found 4, .*out of bounds"),
        (lambda: cross_entropy(batch(), LABELS - 1), RuntimeError, "should be from 0 to 3. Found -1, .*out of bounds"),
        (
            lambda: cross_entropy(torch.zeros(2, 3, 4), torch.tensor([[0, 1, 2, 7]] * 2), 1, ignore_index=1),
            RuntimeError,
            "`labels` should be from 0 to 2. Found 7, which is out of bounds",
        ),
        *(
            (
                lambda function=function: function(torch.zeros(2, 3, dtype=torch.float8_e4m3fn)),
                TypeError,
                "`(input|logits|weight)` should have at least 16 bits a number",
            )
            for function in (
                softmax,
                log_softmax,
                logsumexp,
                lambda logits: cross_entropy(logits, torch.tensor([0, 1])),
                lambda weight: linear_cross_entropy(torch.ones(1, 3), weight, torch.tensor([0])),
            )
        ),
        (lambda: softmax(batch(), 2), IndexError, "`dim` should be from -2 to 1. Found 2, which is out of range"),
        (lambda: softmax(batch(), -3), IndexError, "`dim` should be from -2 to 1. Found -3"),
        (lambda: cross_entropy(batch(), LABELS, 2), IndexError, "out of range"),
    ],
    ids=lambda value: "" if not isinstance(value, str) else value[:40],
)
def test_errors_name_what_was_found(call, error, message):
    with pytest.raises(error, match=message):
        call()


# --- the experiment --------------------------------------------------------------------------------------------------


def config(task: str, **values: object) -> Config:
    common = {"title": "t", "finding": "f", "open": ["softmax.shift"], "steps": 20, "learning_rate": 0.1}
    return Config(experiment="softmax", task=task, **(common | values))


@pytest.mark.parametrize(
    ("task", "harmless"),
    [("calibrate_digits", [SHIFT]), ("fit_synthetic", [INNER, OUTER])],
    ids=["calibrate_digits", "fit_synthetic"],
)
def test_the_blocked_gradient_is_the_target_and_so_is_the_harmless_opening(task, harmless):
    for opened in ([], harmless):
        prepared = run(config(task, copies=2), 1)
        with unblock(*opened):
            prepared.loss().backward()
        target = prepared.target()
        for name, parameter in prepared.parameters.items():
            torch.testing.assert_close(parameter.grad, target[name], rtol=1e-12, atol=1e-14)


def test_the_target_is_the_slope_of_the_objective_that_is_trained_on():
    prepared = run(config("fit_synthetic", n_samples=60), 3)
    slopes = prepared.target()["bias"]
    with torch.no_grad():
        for c in range(5):
            ends = []
            for step in (-1e-5, 1e-5):
                prepared.parameters["bias"][c] += step
                ends.append(prepared.evaluate()["objective"])
                prepared.parameters["bias"][c] -= step
            assert (ends[1] - ends[0]) / 2e-5 == pytest.approx(slopes[c].item(), abs=1e-9)


@pytest.mark.parametrize("task", ["calibrate_digits", "fit_synthetic"])
def test_a_run_depends_on_its_seed_alone(task):
    torch.manual_seed(1)
    first = run(config(task, copies=2), 5)
    torch.manual_seed(2)
    again, other = run(config(task, copies=2), 5), run(config(task, copies=2), 6)
    assert first.loss().equal(again.loss())
    assert first.evaluate() == again.evaluate()
    assert not first.loss().equal(other.loss())


def test_naive_exponentials_would_overflow_on_the_logits_that_are_calibrated(monkeypatch):
    prepared, seen = run(config("calibrate_digits"), 0), []
    monkeypatch.setattr("experiments.softmax.cross_entropy", lambda logits, labels: seen.append(logits))
    prepared.loss()
    (logits,) = seen
    assert logits.shape == (10_000, 10)
    assert naive_softmax(logits).isnan().any(-1).double().mean() > 0.5
    assert softmax(logits).isfinite().all()


def test_half_a_block_loses_likelihood_and_no_block_does_not():
    """With twenty seeds the blocked loss comes within 0.01 of the best, and half a block stays 0.34 away or more."""
    objectives = []
    for opened in ([], [INNER], [OUTER], [INNER, OUTER]):
        prepared = run(config("fit_synthetic", learning_rate=0.5), 0)
        with unblock(*opened):
            for _ in range(100):
                prepared.optimizer.zero_grad()
                prepared.loss().backward()
                prepared.optimizer.step()
        objectives.append(prepared.evaluate()["objective"] - prepared.objective.best)
    blocked, inner, outer, both = objectives
    assert 0 < blocked < 0.05
    assert both == pytest.approx(blocked, rel=1e-9)
    assert min(inner, outer) > 0.2


def test_maximum_likelihood_of_groups_is_their_conditional_entropy():
    counts = np.array([[3, 1, 4], [1, 5, 9]])
    inputs = torch.eye(2, dtype=torch.float64).repeat_interleave(torch.from_numpy(counts.sum(1)), 0)
    labels = torch.cat([torch.arange(3).repeat_interleave(torch.from_numpy(row)) for row in counts])
    entropy = -(counts * np.log(counts / counts.sum(1, keepdims=True))).sum() / counts.sum()
    assert maximum_likelihood(inputs, labels, 3) == pytest.approx(entropy, abs=1e-12)


def test_calibration_error_of_a_forecast_that_can_be_counted():
    # Four forecasts of confidence 3/4, of which two are right: |1/2 - 3/4|. Two of 9/10, both right: 1/10.
    confidence = torch.tensor([0.75] * 4 + [0.9] * 2, dtype=torch.float64)
    logits = torch.stack([confidence, 1 - confidence], 1).log()
    labels = torch.tensor([0, 1, 0, 1, 0, 0])
    assert calibration_error(logits, labels) == pytest.approx((4 * 0.25 + 2 * 0.1) / 6)
