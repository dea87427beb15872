"""What the test suites of JAX, scipy and torch ask of their own softmax and log-sum-exp, asked of ours.

Each section says which suite has the question; the tests are written anew. torch's own samples are taken from its
OpInfo database at run time.
"""

import itertools
import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import scipy.special
import torch
from each import each
from torch import Tensor
from torch.func import hessian, jacfwd, jacrev
from values import doubles

from toolkit.gradients.memory import measure_memory
from toolkit.softmax import cross_entropy, log_softmax, logsumexp, softmax

INF, NAN = math.inf, math.nan
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
NORMALISERS: dict[str, Callable[..., Tensor]] = {"softmax": softmax, "log_softmax": log_softmax}
FUNCTIONS: dict[str, Callable[..., Tensor]] = {**NORMALISERS, "logsumexp": logsumexp}
normalisers = pytest.mark.parametrize("function", NORMALISERS.values(), ids=NORMALISERS)
functions = pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)


def draw(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape) + 1)
    return (scale * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype)


# --- JAX: tests/nn_test.py -------------------------------------------------------------------------------------------


@normalisers
@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (2, 0, 4)], ids=str)
@pytest.mark.parametrize("dim", [0, -1])
def test_an_empty_array_stays_empty(function, shape, dim):
    x = torch.zeros(shape, requires_grad=True)
    assert function(x, dim).shape == shape
    assert torch.autograd.grad(function(x, dim).sum(), x)[0].shape == shape


@normalisers
@pytest.mark.parametrize("shape", [(3,), (2, 3)], ids=str)
def test_an_empty_mask_leaves_nothing_and_no_gradient(function, shape):
    x = draw(*shape).requires_grad_()
    y = function(x, where=torch.zeros(shape, dtype=torch.bool))
    assert (y == (0 if function is softmax else -INF)).all()
    assert (torch.autograd.grad(y, x, torch.ones_like(y))[0] == 0).all()


@normalisers
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_a_mask_gives_what_the_other_entries_give_alone(function, dim):
    x = draw(4, 5)
    where = torch.tensor([True, False, True, True, False])[: x.shape[dim]]
    broadcast = where if dim else where[:, None]
    found = function(x, dim, where=broadcast)
    kept = where.nonzero()[:, 0]
    torch.testing.assert_close(found.index_select(dim, kept), function(x.index_select(dim, kept), dim))
    left = found.index_select(dim, (~where).nonzero()[:, 0])
    assert (left == (0 if function is softmax else -INF)).all()


@functions
@pytest.mark.parametrize("under", [100.0, -1e300, INF, -INF, NAN])
def test_the_gradient_through_a_mask_does_not_see_what_lies_under_it(function, under):
    where = torch.tensor([True, False, True, True])
    x = doubles(0.3, under, -1.0, 2.0).requires_grad_()
    clean = doubles(0.3, -1.0, 2.0).requires_grad_()
    weights = doubles(0.5, -1.0, 2.0)
    value, expected = function(x, where=where), function(clean)
    if value.dim():
        value, expected = (value[where] * weights).sum(), (expected * weights).sum()
    slope, expected_slope = torch.autograd.grad(value, x)[0], torch.autograd.grad(expected, clean)[0]
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(slope[where], expected_slope)
    assert slope[1] == 0


@functions
def test_the_second_order_through_a_mask_is_that_of_the_other_entries(function):
    where = torch.tensor([True, False, True, True])
    x, clean = doubles(0.3, 100.0, -1.0, 2.0), doubles(0.3, -1.0, 2.0)

    def masked(x: Tensor) -> Tensor:
        y = function(x, where=where)
        return y[[0, 2, 3]] if y.dim() else y

    found, expected = hessian(masked)(x), hessian(function)(clean)
    kept = [0, 2, 3]
    torch.testing.assert_close(found[..., kept, :][..., kept], expected)
    assert (found[..., 1, :] == 0).all()
    assert (found[..., 1] == 0).all()


@normalisers
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_gradients_of_two_orders_in_both_modes_are_those_of_finite_differences(function, dtype):
    x = draw(3, 4, scale=2.0).requires_grad_()
    assert torch.autograd.gradcheck(function, x, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(function, x, check_fwd_over_rev=True)
    single = x.detach().to(dtype)
    torch.testing.assert_close(jacrev(function)(single), jacfwd(function)(single), rtol=1e-4, atol=1e-6)


@normalisers
def test_one_residual_is_kept(function):
    x = draw(50, 60).requires_grad_()
    size = x.numel() * x.element_size()
    assert measure_memory(lambda: function(x).sum()).graph <= 1.05 * size


@normalisers
def test_the_values_do_not_change_under_a_shift_of_the_input(function):
    x = torch.tensor([5.0, -3.0, 2.5, 0.25])  # with few bits, so that the shifted input is exact
    for shift in (-1e3, 1e3, 2.0**20):
        torch.testing.assert_close(function(x + shift), function(x), rtol=1e-6, atol=1e-7)


# --- JAX: tests/lax_scipy_test.py, TestLogSumExp ---------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@each(
    ("shape", "dim"), [((7,), 0), ((3, 4), -1), ((3, 4), (0, 1)), ((2, 3, 4), (0, 2)), ((2, 3, 4), (-1, 0)), ((), -1)]
)
@each("keepdim", [False, True])
def test_logsumexp_over_any_dimensions_is_that_of_scipy(dtype, shape, dim, keepdim):
    x = draw(*shape, scale=3.0, dtype=dtype)
    found = logsumexp(x, dim, keepdim)
    axis = None if not shape else dim
    expected = scipy.special.logsumexp(x.double().numpy(), axis=axis, keepdims=keepdim and bool(shape))
    assert found.dtype == dtype
    eps = torch.finfo(dtype).eps
    # Half precision is rounded once, at the end; else each of the terms of a sum adds its own rounding.
    atol = (x.numel() + 6) * eps if dtype in (torch.float32, torch.float64) else 0.0
    torch.testing.assert_close(found.double(), torch.as_tensor(expected), rtol=2 * eps, atol=atol)


# github.com/jax-ml/jax/issues/5370, 7390, 7634
@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ([0.0] * 4, math.log(4)),
        ([1.0] * 4, 1 + math.log(4)),
        ([NAN, 0.0], NAN),
        ([NAN, INF], NAN),
        ([NAN, -INF], NAN),
        ([INF, 0.0], INF),
        ([INF, INF], INF),
        ([INF, -INF], INF),
        ([-INF, 0.0], 0.0),
        ([-INF, -INF], -INF),
        ([-INF], -INF),
        ([], -INF),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_logsumexp_of_special_rows(row, expected, dtype):
    x = torch.tensor(row, dtype=dtype)
    expected = torch.tensor(expected, dtype=dtype)
    torch.testing.assert_close(logsumexp(x), expected, equal_nan=True)
    torch.testing.assert_close(logsumexp(x.expand(2, -1), 1), expected.expand(2), equal_nan=True)


@pytest.mark.parametrize("row", [[0.0] * 4, [1.0] * 4, [-INF, 0.0, 1.0], [-INF, -INF]], ids=str)
def test_the_gradient_of_logsumexp_of_special_rows_is_the_softmax(row):
    x = doubles(*row).requires_grad_()
    (slope,) = torch.autograd.grad(logsumexp(x), x)
    torch.testing.assert_close(slope, softmax(x.detach()))


@pytest.mark.parametrize(
    ("shape", "where"),
    [((1, 4, 5, 6), (1, 4, 5, 6)), ((4, 5, 6), (6,)), ((4, 5), (4, 1)), ((5,), (1,)), ((5,), ())],
    ids=str,
)
@pytest.mark.parametrize("several", [False, True], ids=["last", "several"])
def test_logsumexp_under_a_mask_of_any_shape_is_that_of_scipy_with_zero_weights(shape, where, several):
    x = draw(*shape, scale=2.0)
    mask = torch.rand(where, generator=torch.Generator().manual_seed(1)) < 0.6
    dim = tuple(range(len(shape))) if several else -1
    with np.errstate(divide="ignore"):
        expected = scipy.special.logsumexp(x.numpy(), axis=dim, b=mask.expand(shape).numpy())
    torch.testing.assert_close(logsumexp(x, dim, where=mask), torch.as_tensor(expected), rtol=1e-14, atol=1e-15)


# --- scipy: special/tests/test_logsumexp.py --------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 200, 10_000])
def test_logsumexp_of_equal_terms_is_their_logarithm_and_that_of_their_number(n):
    for value in (0.0, 1.5, 1e3, -1e4, 1e-10):
        x = torch.full((n,), value, dtype=torch.float64)
        torch.testing.assert_close(logsumexp(x), doubles(value + math.log(n))[0], rtol=1e-14, atol=1e-15)


def test_logsumexp_is_that_of_exponentials_where_they_do_not_overflow():
    x = torch.arange(200, dtype=torch.float64)
    torch.testing.assert_close(logsumexp(x), x.exp().sum().log(), rtol=4e-15, atol=0)
    pair = doubles(1000.0, 1000.0)
    torch.testing.assert_close(logsumexp(pair), doubles(1000 + math.log(2))[0], rtol=1e-15, atol=0)
    rows = torch.stack([x, x - 1e4, x + 1e4])
    torch.testing.assert_close(logsumexp(rows), logsumexp(x) + doubles(0.0, -1e4, 1e4), rtol=1e-14, atol=0)


# github.com/scipy/scipy/issues/18295
@pytest.mark.parametrize("row", [[0.0, -40.0], [-40.0, 0.0], [0.0, -700.0], [0.0, -40.0, -41.0], [0.0, -36.0, -100.0]])
def test_what_is_tiny_beside_one_is_kept(row):
    expected = math.log1p(math.fsum(math.exp(value) for value in row if value != 0))
    # An exponential, a sum and a logarithm here, and others there, each to its last bit or two.
    assert logsumexp(doubles(*row)).item() == pytest.approx(expected, rel=8 * 2**-52, abs=0)


# github.com/scipy/scipy/issues/21610
@pytest.mark.portable
@pytest.mark.parametrize("scale", [1.0, 1e3, 1e5, 1e8])
def test_equal_terms_do_not_lose_the_digits_of_their_number(scale):
    x = doubles(scale, scale, scale)
    # Each logarithm to its last bit or two, and the sum rounded once more.
    assert logsumexp(x).item() == pytest.approx(scale + math.log(3), rel=4 * 2**-52)
    assert log_softmax(x)[0].item() == pytest.approx(-math.log(3), rel=4 * 2**-52)


# github.com/scipy/scipy/issues/22601
@each("values", list(itertools.product([-INF, 0.0, 2.0, INF], repeat=3)), ids=str)
def test_infinite_elements_anywhere(values):
    with np.errstate(all="ignore"):
        expected = scipy.special.logsumexp(np.array(values))
    torch.testing.assert_close(logsumexp(doubles(*values)), doubles(float(expected))[0], rtol=1e-15, atol=0)


@functions
def test_the_input_is_not_written_to(function):
    x = doubles(1.0, -INF, 3.0, NAN)
    before = x.clone()
    function(x)
    function(x, where=torch.tensor([True, False, True, False]))
    torch.testing.assert_close(x, before, equal_nan=True, rtol=0, atol=0)


@functions
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_type_and_the_device_stay(function, dtype):
    found = function(draw(3, 4, dtype=dtype))
    assert found.dtype == dtype
    assert found.device.type == "cpu"


@functions
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64], ids=str)
def test_other_types_are_refused(function, dtype):
    with pytest.raises(TypeError, match=f"`input` should be a floating-point tensor. Found {dtype}"):
        function(torch.ones(3, dtype=dtype))


@pytest.mark.parametrize(
    "x",
    [np.arange(4.0), np.array([1000.0, 0.0, 0.0, 0.0]), np.array([1.0, 1.0, 1.0, 1.0]), np.arange(-5.0, 6.0)],
    ids=str,
)
def test_softmax_and_its_logarithm_are_those_of_scipy(x):
    torch.testing.assert_close(
        softmax(torch.as_tensor(x)), torch.as_tensor(scipy.special.softmax(x)), rtol=1e-13, atol=0
    )
    expected = torch.as_tensor(scipy.special.log_softmax(x))
    torch.testing.assert_close(log_softmax(torch.as_tensor(x)), expected, rtol=1e-13, atol=1e-300)


@functions
@pytest.mark.parametrize("shape", [(2, 3), (3, 2, 2), (2, 1, 3)], ids=str)
def test_every_dimension_is_that_of_scipy(function, shape):
    x = draw(*shape, scale=5.0)
    theirs = getattr(scipy.special, function.__name__)
    for dim in range(-len(shape), len(shape)):
        torch.testing.assert_close(
            function(x, dim), torch.as_tensor(theirs(x.numpy(), axis=dim)), rtol=1e-13, atol=1e-15
        )


# --- torch: torch.testing._internal.common_methods_invocations, op_db ------------------------------------------------

OPERATORS = {
    "softmax": (softmax, ""),
    "log_softmax": (log_softmax, ""),
    "logsumexp": (logsumexp, ""),
    "softmax with dtype": (softmax, "with_dtype"),
    "log_softmax with dtype": (log_softmax, "with_dtype"),
    "nn.functional.cross_entropy": (cross_entropy, ""),
}
# Arguments that we do not have: such samples are skipped, and counted.
UNKNOWN = {"weight", "ignore_index", "label_smoothing"}


def opinfo_samples(name: str, dtype: torch.dtype) -> Iterator[tuple[Callable[..., Tensor], Tensor, tuple, dict]]:
    """Yield torch's function and the samples that its own tests try it with."""
    database = pytest.importorskip("torch.testing._internal.common_methods_invocations").op_db
    operator_name, variant = name.removesuffix(" with dtype"), OPERATORS[name][1]
    (operator,) = [info for info in database if info.name == operator_name and info.variant_test_name == variant]
    for sample in operator.sample_inputs("cpu", dtype, requires_grad=True):
        yield operator.op, sample.input, sample.args, sample.kwargs


def translated(
    name: str, input: Tensor, arguments: tuple, options: dict
) -> tuple[Callable[[Tensor], Tensor], Tensor] | None:
    """Return our call of a sample, or None if it has an argument that we do not have."""
    function = OPERATORS[name][0]
    if name == "nn.functional.cross_entropy":
        options = dict(options)
        (labels,) = arguments
        if set(options) & UNKNOWN or labels.is_floating_point():
            return None
        return lambda x: function(x, labels, 1 if x.dim() > 1 else 0, **options), input
    if name == "logsumexp":
        dim, *keepdim = arguments
        keepdim = keepdim[0] if keepdim else options.get("keepdim", False)
        return (lambda x: function(x, dim if isinstance(dim, int) else tuple(dim), keepdim)), input
    dim = arguments[0] if arguments else options["dim"]
    dtype = options.get("dtype", input.dtype)
    return lambda x: function(x.to(dtype), dim), input


@pytest.mark.filterwarnings("ignore")  # of importing torch's test utilities
@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_samples_of_torch_have_the_values_and_gradients_of_torch(name, dtype):
    tried = skipped = 0
    for theirs, input, arguments, options in opinfo_samples(name, dtype):
        call = translated(name, input, arguments, options)
        if call is None:
            skipped += 1
            continue
        tried += 1
        ours, x = call
        expected, found = theirs(x, *arguments, **options), ours(x)
        assert found.shape == expected.shape
        assert found.dtype == expected.dtype
        tolerance = {"rtol": 8 * torch.finfo(dtype).eps, "atol": 8 * torch.finfo(dtype).eps}
        torch.testing.assert_close(found, expected, equal_nan=True, **tolerance)
        cotangent = torch.ones_like(found) * torch.linspace(0.5, 2, max(found.numel(), 1))[: found.numel()].view(
            found.shape
        )
        slopes = [torch.autograd.grad(y, x, cotangent.to(y.dtype))[0] for y in (found, expected)]
        # torch differentiates log-sum-exp by exp(x - result), whose error grows with x.
        scales = [slopes[1], x] if name == "logsumexp" else [slopes[1]]
        tolerance["atol"] *= max([1.0, *(float(scale.abs().max()) for scale in scales if scale.numel())])
        torch.testing.assert_close(*slopes, equal_nan=True, **tolerance)
    # Those left out of cross entropy have class weights, a label to ignore, smoothing or probabilities for labels.
    assert tried >= 4
    assert (skipped > 0) == (name == "nn.functional.cross_entropy")
