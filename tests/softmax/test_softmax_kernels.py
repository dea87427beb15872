"""The fast ways of softmax beside the plain ones that specify them, and masks beside the entries that they leave."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from each import each
from torch import Tensor
from torch.func import jacfwd, jacrev, vmap
from values import seeded

from toolkit import unblock
from toolkit.blocks import watched
from toolkit.gradients.memory import measure_memory
from toolkit.softmax import SHIFT, _kernels, cross_entropy, log_softmax, logsumexp, naive_softmax, softmax

pytestmark = [
    # Dynamo makes an instance of `torch.autograd.Function` when it traces one.
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]

INF, NAN = math.inf, math.nan
EPS = torch.finfo(torch.float64).eps


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Several pieces in the long inputs of a test."""
    monkeypatch.setattr(_kernels, "_PIECE", 1 << 15)


# --- twins -----------------------------------------------------------------------------------------------------------

SHAPES = {
    "small": ((6, 5), -1),
    "long": ((700, 130), -1),
    "long with a part of a piece": ((259, 300), 1),
    "long, three dimensions": ((10, 70, 130), 2),
    "first dimension": ((130, 700), 0),
    "middle dimension": ((10, 130, 70), 1),
    "one row": ((80_000,), -1),
}
# No row is sure of a class, some are, all are.
SPREADS = {"unsure": 0.1, "mixed": 2.0, "sure": 200.0}


def shifted(shape: tuple[int, ...], dim: int, spread: float) -> Tensor:
    x = spread * torch.randn(shape, dtype=torch.float64, generator=seeded())
    return x - x.amax(dim, keepdim=True)


def row_of_its_own(x: Tensor, dim: int) -> Tensor:
    """Return a row quantity (*, 1)."""
    return torch.randn(x.sum(dim, keepdim=True).shape, dtype=x.dtype, generator=seeded(2))


@pytest.mark.portable
@pytest.mark.parametrize("spread", SPREADS.values(), ids=SPREADS)
@pytest.mark.parametrize(("shape", "dim"), SHAPES.values(), ids=SHAPES)
def test_fast_ways_have_the_numbers_of_their_plain_twins(shape, dim, spread):
    z = shifted(shape, dim, spread)
    y = _kernels.probabilities(z, dim)
    g = 10 + torch.randn(shape, dtype=torch.float64, generator=seeded(1))
    scale = row_of_its_own(z, dim)
    log_sum = _kernels.log_sum_in_plain_operations(z, dim)
    log_y = _kernels.log_probabilities(z, dim)
    at_top = torch.where(y > 0.5, g, 0.0)
    pairs = {
        "probabilities": (y, _kernels.probabilities_in_plain_operations(z, dim)),
        "log-sum-exp": (_kernels.maximum_and_log_sum(z, dim)[1], log_sum),
        "logarithms": (log_y, z - log_sum),
        "scaled": (_kernels.scaled_probabilities(z, scale, dim), y * scale),
        "product": (_kernels.centred_product(y, g, dim), _kernels.centred_product_in_plain_operations(y, g, dim)),
        "log product": (
            _kernels.log_softmax_product(log_y, g, dim),
            _kernels.log_softmax_product_in_plain_operations(log_y, g, dim),
        ),
        "log product with the maximum alone": (
            _kernels.log_softmax_product(log_y, at_top, dim),
            _kernels.log_softmax_product_in_plain_operations(log_y, at_top, dim),
        ),
    }
    # What a component of a product is the difference of: at least half of y_i sum_j y_j |g_j - mean|, and
    # (1 - y_i) |g_i| + y_i sum_{j != i} |g_j|. To 100 roundoffs of that it may cancel.
    spread = (y * (g - (y * g).sum(dim, keepdim=True)).abs()).sum(dim, keepdim=True)
    conditions = {
        "product": y * spread / 2,
        "log product": -log_y.expm1() * g.abs() + y * (g.abs().sum(dim, keepdim=True) - g.abs()),
    }
    for name, (fast, plain) in pairs.items():
        bound = 1e-12 * plain.abs() + 1e-280 + 50 * EPS * conditions.get(name, torch.zeros(()))
        assert ((fast - plain).abs() <= bound).all(), name


@pytest.mark.keeps_its_sums
def test_the_pieces_are_really_taken(monkeypatch):
    taken = []
    pieces = _kernels._pieces
    monkeypatch.setattr(_kernels, "_pieces", lambda *args: taken.append(len(args)) or pieces(*args))
    for shape, dim in SHAPES.values():
        _kernels.log_probabilities(shifted(shape, dim, 1.0), dim)
    assert len(taken) == 4  # all but "small" and the two whose rows do not lie together


@pytest.mark.parametrize("layout", ["transposed", "expanded cotangent", "three dimensions", "0-dimensional"])
def test_layouts_change_no_gradient(layout):
    x = 3 * torch.randn(500, 200, dtype=torch.float64, generator=seeded())
    g = torch.randn(500, 200, dtype=torch.float64, generator=seeded(1))
    dim = -1
    if layout == "transposed":
        x, g, dim = x.T, g.T, 0
    elif layout == "expanded cotangent":
        g = g[:1].expand(500, 200)
    elif layout == "three dimensions":
        x, g = x.view(5, 100, 200), g.view(5, 100, 200)
    else:
        x, g = x[0, 0], g[0, 0]
    x = x.clone(memory_format=torch.preserve_format).requires_grad_()
    (found,) = torch.autograd.grad(softmax(x, dim), x, g)
    (expected,) = torch.autograd.grad(torch.softmax(x, dim), x, g)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-15)


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": softmax,
    "log_softmax": log_softmax,
    "logsumexp": logsumexp,
    "cross_entropy": lambda x: cross_entropy(
        x, torch.zeros(x.shape[:-1], dtype=torch.int64, device=x.device), reduction="none"
    ),
}
functions = pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)


@functions
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_a_recorded_shift_changes_no_bit(function, dtype):
    x = (5 * torch.randn(300, 250, generator=seeded())).to(dtype)
    x[7] = -INF
    x[8, 3:9] = -INF
    x.requires_grad_()
    value = function(x)
    cotangent = torch.randn(value.shape, generator=seeded(1)).to(dtype)
    (gradient,) = torch.autograd.grad(value, x, cotangent)
    shifts = []
    with watched(lambda shift, name, site: shifts.append(name)):
        recorded = function(x)
    assert shifts == ["softmax.shift"]
    assert recorded.equal(value)
    (through_the_subtraction,) = torch.autograd.grad(recorded, x, cotangent)
    torch.testing.assert_close(through_the_subtraction, gradient, rtol=0, atol=0, equal_nan=True)


@functions
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_one_input_is_kept_and_nothing_else(function, dtype):
    x = torch.randn(300, 400, generator=seeded()).to(dtype).requires_grad_()
    kept = measure_memory(lambda: function(x.clone()).sum()).graph
    assert kept == pytest.approx(x.numel() * x.element_size(), rel=0.04)


@functions
def test_values_are_not_looked_at_where_they_cannot_be(function):
    x = torch.randn(4, 6, dtype=torch.float64, generator=seeded(), requires_grad=True)

    def gradient(x: Tensor) -> Tensor:
        return torch.autograd.grad(function(x).square().sum(), x)[0]

    traced = torch.fx.experimental.proxy_tensor.make_fx(gradient)(x)
    other = x.detach().flip(0).requires_grad_() + 0.5
    torch.testing.assert_close(traced(other), gradient(other), rtol=1e-12, atol=1e-14)
    meta = x.detach().to("meta").requires_grad_()
    assert torch.autograd.grad(function(meta).sum(), meta)[0].shape == (4, 6)


@functions
@pytest.mark.parametrize("scale", [1.0, 30.0], ids=["unsure", "sure"])
@pytest.mark.parametrize("shape", [(6, 5), (300, 250)], ids=["small", "long"])
def test_several_cotangents_at_once_and_forward_mode_go_through_every_backward_pass(function, shape, scale):
    x = (scale * torch.randn(shape, dtype=torch.float64, generator=seeded())).requires_grad_()
    t = torch.randn(shape, dtype=torch.float64, generator=seeded(1))
    value = function(x)
    g = torch.randn(2, *value.shape, dtype=torch.float64, generator=seeded(2))
    expected = [torch.autograd.grad(value, x, each_g, create_graph=True)[0] for each_g in g]
    (found,) = torch.autograd.grad(value, x, g, is_grads_batched=True, retain_graph=True)
    close = {"rtol": 1e-10, "atol": 1e-13}
    torch.testing.assert_close(found, torch.stack(expected), **close)
    (curvature,) = torch.autograd.grad((expected[0] * t).sum(), x, retain_graph=True)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, t)
        value, tangent = forward_ad.unpack_dual(function(dual))
        torch.testing.assert_close((tangent * g[0]).sum(), (expected[0] * t).sum(), **close)
        torch.testing.assert_close(torch.autograd.grad(tangent, x, g[0], retain_graph=True)[0], curvature, **close)
        (gradient,) = torch.autograd.grad(function(dual), dual, g[0])
        torch.testing.assert_close(forward_ad.unpack_dual(gradient).primal, expected[0], **close)
        torch.testing.assert_close(forward_ad.unpack_dual(gradient).tangent, curvature, **close)


@functions
def test_a_recorded_shift_changes_no_bit_of_an_input_with_gaps(function):
    x = (5 * torch.randn(300, 250, 2, dtype=torch.float64, generator=seeded()))[..., 1].requires_grad_()
    value = function(x)
    with watched(lambda *_: None):
        assert function(x).equal(value)


def test_a_mapped_number_has_a_sum_of_its_own():
    x = torch.randn(3, dtype=torch.float64, generator=seeded())
    for function in (logsumexp, softmax, log_softmax):
        assert vmap(lambda x, function=function: function(x, -1))(x).equal(torch.stack([function(v, -1) for v in x]))


# --- masks -----------------------------------------------------------------------------------------------------------

MASK = torch.tensor([[True, False, True, True], [True, True, True, True], [False, True, False, False]])
LABELS = torch.tensor([2, 0, 1])
MASKED: dict[str, Callable[..., Tensor]] = {
    "softmax": softmax,
    "log_softmax": log_softmax,
    "logsumexp": logsumexp,
    "cross_entropy": lambda x, **options: cross_entropy(x, LABELS, reduction="none", **options),
}
masked = pytest.mark.parametrize("name", MASKED)


def batch() -> Tensor:
    return torch.tensor([[0.3, -1.2, 2.0, 0.7], [1.0, 2.0, 2.0, -0.5], [-0.1, 0.2, -3.0, 1.1]], dtype=torch.float64)


@masked
@pytest.mark.parametrize("opened", [(), (SHIFT,)], ids=["blocked", "open"])
@each("fill", [None, 100.0, NAN, INF, -INF], ids=str)
def test_a_mask_is_as_if_the_entries_were_not_there(name, opened, fill):
    x = batch() if fill is None else batch().masked_fill(~MASK, fill)
    x.requires_grad_()
    function = MASKED[name]
    with unblock(*opened):
        found = function(x, where=MASK)
        cotangent = torch.randn(found.shape, dtype=torch.float64, generator=seeded())
        (gradient,) = torch.autograd.grad(found, x, cotangent)
    for row, mask in enumerate(MASK):
        short = batch()[row][mask].requires_grad_()
        label = mask[: LABELS[row]].sum()
        alone = cross_entropy(short, label) if name == "cross_entropy" else function(short)
        (expected,) = torch.autograd.grad(alone, short, cotangent[row][mask] if alone.dim() else cotangent[row])
        torch.testing.assert_close(found[row][mask] if alone.dim() else found[row], alone, rtol=1e-14, atol=0)
        torch.testing.assert_close(gradient[row][mask], expected, rtol=1e-13, atol=1e-16)
        assert (gradient[row][~mask] == 0).all()
        if alone.dim():
            assert (found[row][~mask] == (0 if name == "softmax" else -INF)).all()


@masked
def test_rows_that_are_left_out_whole_have_gradient_zero(name):
    x = batch().requires_grad_()
    found = MASKED[name](x, where=torch.tensor([[False], [True], [False]]))
    empty = {"softmax": 0.0, "log_softmax": -INF, "logsumexp": -INF, "cross_entropy": INF}[name]
    assert (found[[0, 2]] == empty).all()
    torch.testing.assert_close(found[1], MASKED[name](batch())[1], rtol=1e-15, atol=0)
    (gradient,) = torch.autograd.grad(found, x, torch.ones_like(found))
    assert (gradient[[0, 2]] == 0).all()
    assert gradient[1].isfinite().all()


@masked
@pytest.mark.parametrize("shape", [(3, 4), (4,), (3, 1), (1, 4), ()], ids=str)
def test_masks_broadcast(name, shape):
    mask = torch.rand(shape, generator=seeded(4)) < 0.7
    mask = torch.tensor(True) if shape == () else mask
    x = batch()
    assert MASKED[name](x, where=mask).equal(MASKED[name](x, where=mask.expand(3, 4)))


@masked
@pytest.mark.parametrize("dim", [0, 1])
def test_masks_go_with_every_mode(name, dim):
    def function(x: Tensor) -> Tensor:
        if name == "cross_entropy":
            return cross_entropy(x, torch.tensor([2, 2, 0, 1] if dim == 0 else [2, 0, 1]), dim, where=mask)
        y = {"softmax": softmax, "log_softmax": log_softmax, "logsumexp": logsumexp}[name](x, dim, where=mask)
        return torch.where(y.isfinite(), y, 0.0).square().sum()

    mask = MASK | (torch.arange(4) == 1) if dim == 0 else MASK
    mask = mask | torch.eye(3, 4, dtype=torch.bool).flip(0) if dim == 0 else mask
    x = batch()
    gradient = torch.autograd.grad(function(x.requires_grad_()), x)[0]
    torch.testing.assert_close(jacfwd(function)(x), gradient, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(jacrev(function)(x), gradient, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(jacfwd(jacrev(function))(x), jacrev(jacfwd(function))(x), rtol=1e-11, atol=1e-14)
    assert (gradient[~mask] == 0).all()
    assert torch.autograd.gradgradcheck(function, x)
    rows = vmap(lambda row, m: softmax(row, where=m))(x, mask)
    assert rows.equal(softmax(x, where=mask))


@pytest.mark.slow
@pytest.mark.keeps_its_sums
def test_the_mask_of_a_compiled_function():
    torch.compiler.reset()
    compiled = torch.compile(lambda x, mask: softmax(x, where=mask), fullgraph=True, backend="aot_eager")
    x = batch().masked_fill(~MASK, NAN).requires_grad_()
    for opened in ((), (SHIFT,), ()):
        with unblock(*opened):
            found = compiled(x, MASK)
            (gradient,) = torch.autograd.grad(found.square().sum(), x)
        expected = softmax(x, where=MASK)
        torch.testing.assert_close(found, expected, rtol=1e-14, atol=0)  # other kernels
        (truth,) = torch.autograd.grad(expected.square().sum(), x)
        torch.testing.assert_close(gradient, truth, rtol=1e-13, atol=4 * EPS)


def test_a_label_that_is_left_out_costs_infinity():
    x = batch().requires_grad_()
    losses = cross_entropy(x, torch.tensor([1, 0, 0]), where=MASK, reduction="none")
    assert losses.isinf().tolist() == [True, False, True]
    (gradient,) = torch.autograd.grad(losses[1], x)
    assert gradient[1].isfinite().all()


# --- several dimensions ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dims", [(0,), (0, 1), (1, 0), (-1, 0), (0, 1, 2), [1, 2]], ids=str)
@pytest.mark.parametrize("keepdim", [False, True])
def test_a_sum_over_several_dimensions_is_that_of_torch(dims, keepdim):
    x = torch.randn(3, 4, 5, dtype=torch.float64, generator=seeded(), requires_grad=True)
    found, expected = logsumexp(x, dims, keepdim), torch.logsumexp(x, dims, keepdim)
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=1e-15)
    gradients = [torch.autograd.grad(y.square().sum(), x)[0] for y in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-15)


def test_dimensions_may_be_integers_of_numpy():
    for dim in (np.int64(0), (np.int64(0),), range(1)):
        torch.testing.assert_close(logsumexp(batch(), dim), logsumexp(batch(), 0), rtol=1e-14, atol=0)
    assert softmax(batch(), np.int64(0)).equal(softmax(batch(), 0))


def test_a_sum_over_several_dimensions_of_nothing_and_of_one_number():
    assert logsumexp(torch.zeros(3, 0, 2), (0, 1)).tolist() == [-INF, -INF]
    assert logsumexp(torch.zeros(0, 3), (1,)).shape == (0,)
    assert logsumexp(torch.tensor(2.5), (0,)) == 2.5
    assert logsumexp(torch.zeros(2, 3), (0, 1), where=torch.tensor([True, False, False])).item() == (
        pytest.approx(math.log(2), rel=1e-6)
    )


def test_one_number_is_a_row_of_one_class():
    x = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
    for dim in (0, -1):
        losses = cross_entropy(x, torch.tensor(0), dim), cross_entropy(x, torch.tensor(0), dim, reduction="none")
        for loss in losses:
            assert loss.shape == ()
            assert loss == 0
            assert torch.autograd.grad(loss, x) == (0,)
    with pytest.raises(IndexError):
        cross_entropy(x, torch.tensor(0), 1)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: softmax(batch(), where=MASK.int()),
            TypeError,
            "`where` should be a boolean tensor. Found torch.int32",
        ),
        (lambda: softmax(batch(), where=[True]), TypeError, "Found list"),
        (lambda: log_softmax(batch(), where=MASK[:, :3]), ValueError, r"broadcasts to \(3, 4\). Found \(3, 3\)"),
        (lambda: logsumexp(batch()[0], where=MASK), ValueError, r"broadcasts to \(4,\). Found \(3, 4\)"),
        (lambda: softmax(torch.tensor([1, 2]), where=MASK[0, :2]), TypeError, "`input` should be a floating-point"),
        (lambda: cross_entropy(LABELS[None], LABELS[:1], where=MASK), TypeError, "`logits` should be a floating-point"),
        (lambda: logsumexp(batch(), ()), ValueError, r"at least one dimension, and none of them twice. Found \(\)"),
        (lambda: logsumexp(batch(), (0, -2)), ValueError, r"none of them twice. Found \(0, -2\)"),
        (lambda: logsumexp(batch(), (0, 2)), IndexError, "from -2 to 1. Found 2, which is out of range"),
        (lambda: softmax(batch(), 1.0), TypeError, "`dim` should be an integer or several. Found 1.0"),
        (lambda: log_softmax(batch(), dim="a"), TypeError, "`dim` should be an integer or several. Found 'a'"),
        (lambda: naive_softmax(batch(), None), TypeError, "`dim` should be an integer. Found None"),
        (lambda: cross_entropy(batch(), LABELS, None), TypeError, "`dim` should be an integer. Found None"),
        (lambda: logsumexp(batch(), dim=None), TypeError, "`dim` should be an integer or several. Found None"),
        (lambda: logsumexp(batch(), "ab"), TypeError, "`dim` should be an integer or several. Found 'ab'"),
        (lambda: logsumexp(batch(), (0, 1.0)), TypeError, "`dim` should be an integer or several. Found 1.0"),
    ],
    ids=lambda value: "" if not isinstance(value, str) else value[:40],
)
def test_errors_name_what_was_found(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_the_log_sum_of_a_row_does_not_depend_on_other_rows(dim):
    rows = torch.randn(6, 5, dtype=torch.float64, generator=seeded())
    rows[1] = torch.tensor([40.0, 0.0, -3.0, 1.0, 2.0])
    rows[2], rows[3, 0], rows[4, 1], rows[5, 2] = -INF, INF, NAN, -INF
    x = rows.T.contiguous() if dim == 0 else rows
    found = logsumexp(x, dim)
    for row, value in zip(rows, found, strict=True):
        assert torch.equal(logsumexp(row), value) or (row.isnan().any() and value.isnan())
    with watched(lambda *_: None):
        assert torch.equal(logsumexp(x, dim).nan_to_num(), found.nan_to_num())


@pytest.mark.parametrize("scale", [1.0, 3.0, 30.0], ids=["unsure", "some rows sure", "sure"])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_a_small_input_has_the_values_and_gradients_of_a_large_one(scale, dim, monkeypatch):
    x = (scale * torch.randn(30, 7, dtype=torch.float64, generator=seeded())).requires_grad_()
    g = 1000 + torch.randn(30, 7, dtype=torch.float64, generator=seeded(1))
    labels = torch.zeros(x.select(dim, 0).shape, dtype=torch.int64)
    programs = {
        "softmax": (lambda: softmax(x, dim), g),
        "log_softmax": (lambda: log_softmax(x, dim), g),
        "cross_entropy": (lambda: cross_entropy(x, labels, dim, reduction="none"), g.select(dim, 0)),
    }
    small = {name: (run(), *torch.autograd.grad(run(), x, v)) for name, (run, v) in programs.items()}
    monkeypatch.setattr(_kernels, "_SHORT", 0)
    monkeypatch.setattr(_kernels, "_SMALL", 0)
    for name, (run, v) in programs.items():
        assert torch.equal(small[name][0], run()), name
        (expected,) = torch.autograd.grad(run(), x, v)
        # The condition of a component of softmax, of order 1, and of log-softmax and its pivot, of order 1000.
        torch.testing.assert_close(small[name][1], expected, rtol=1e-10, atol=1e-12 if name == "log_softmax" else 1e-15)


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("offset", [0.0, -5.0, 1e4], ids=["near", "below", "far"])
@pytest.mark.parametrize("scale", [1.0, 3.0, 30.0], ids=["unsure", "some rows sure", "sure"])
def test_a_small_log_sum_exp_is_exact_to_its_own_rounding(scale, offset, dim):
    x = offset + scale * torch.randn(30, 7, generator=seeded())
    exact = x.double().requires_grad_()
    x.requires_grad_()
    g = torch.randn(x.select(dim, 0).shape, generator=seeded(1))
    found, expected = logsumexp(x, dim), torch.logsumexp(exact, dim)
    torch.testing.assert_close(found.double(), expected, rtol=3e-7, atol=1e-6 if offset else 3e-7)
    (slope,), (exact_slope,) = torch.autograd.grad(found, x, g), torch.autograd.grad(expected, exact, g.double())
    # A nat between the logits costs a roundoff, the size of the logits costs nothing.
    torch.testing.assert_close(slope.double(), exact_slope, rtol=(30 + 8 * scale) * 6e-8, atol=1e-38)


def test_the_gradient_by_the_probabilities_themselves_is_not_centred():
    x = torch.randn(4, 3, generator=seeded()).requires_grad_()
    y, g = softmax(x), torch.randn(4, 3, generator=seeded(1))
    (by_y,) = torch.autograd.grad((y * g).sum(), y, retain_graph=True)
    assert torch.equal(by_y, g)
    by_y, by_x = torch.autograd.grad((y * g).sum(), (y, x))
    assert torch.equal(by_y, g)
    torch.testing.assert_close(by_x, torch.autograd.grad(torch.softmax(x, -1), x, g)[0])


@pytest.mark.parametrize("row", [[200.0, 0.0, -50.0], [200.0]], ids=["sure", "single"])
def test_plain_operations_have_the_gradient_of_a_row_without_doubt(row):
    """All but one of the exponentials are 0, so that sums are at the bounds that hold them."""
    z = (torch.tensor([row]) - max(row)).requires_grad_()
    y = _kernels.probabilities_in_plain_operations(z, 1)
    log_sum = _kernels.log_sum_in_plain_operations(z, 1)
    assert torch.autograd.grad(y[0, 0], z)[0].tolist() == [[0.0] * len(row)]
    assert torch.autograd.grad(log_sum.sum(), z)[0].tolist() == [[1.0] + [0.0] * (len(row) - 1)]
