"""The arguments that softmax and related functions share with torch and scipy, beside both, and beside 50 digits."""

import itertools
import math

import mpmath
import numpy as np
import pytest
import scipy.special
import torch
import torch.nn.functional as F
from each import each
from torch import Tensor
from values import seeded

from toolkit import unblock
from toolkit.softmax import SHIFT, _kernels, cross_entropy, log_softmax, logsumexp, softmax


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(shape, dtype=torch.float64, generator=seeded(seed))


WEIGHT = torch.tensor([0.3, 2.0, 0.0, 1.1, 0.7], dtype=torch.float64)
SIZES = {"small": 1 << 12, "large": 0}
every_size = pytest.mark.parametrize("size", SIZES)
every_reduction = pytest.mark.parametrize("reduction", ["mean", "sum", "none"])


@pytest.fixture
def of_size(size, monkeypatch):
    """Small inputs take the paths of small or of large ones."""
    monkeypatch.setattr(_kernels, "_SHORT", SIZES[size])
    monkeypatch.setattr(_kernels, "_SMALL", SIZES[size])


def same_with_gradient(ours, theirs, *inputs):
    """Compare the values, and the gradients of a sum of them with weights that are all different."""
    results = []
    for function in (ours, theirs):
        leaves = [x.clone().requires_grad_() for x in inputs]
        value = function(*leaves)
        vector = torch.linspace(1, 2, value.numel(), dtype=value.dtype).view_as(value)
        results.append((value, *torch.autograd.grad(value, leaves, vector)))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-13)


# --- cross entropy -----------------------------------------------------------------------------------------------


@every_size
@every_reduction
@each("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("weight", [None, WEIGHT], ids=["unweighted", "weighted"])
@pytest.mark.parametrize("ignore_index", [-100, 3, -1])
def test_cross_entropy_of_labels_is_torchs(reduction, smoothing, weight, ignore_index, of_size):
    logits, labels = normal(40, 5, scale=2), torch.randint(5, (40,), generator=seeded(1))
    labels[::7] = ignore_index
    options = {
        "weight": weight, "label_smoothing": smoothing, "ignore_index": ignore_index, "reduction": reduction
    }  # fmt: skip
    same_with_gradient(
        lambda x: cross_entropy(x, labels, **options), lambda x: F.cross_entropy(x, labels, **options), logits
    )


@every_size
@every_reduction
@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize("weight", [None, WEIGHT], ids=["unweighted", "weighted"])
def test_cross_entropy_of_probabilities_is_torchs(reduction, smoothing, weight, of_size):
    logits, q = normal(20, 5, scale=2), normal(20, 5, seed=1).softmax(-1)
    options = {"weight": weight, "label_smoothing": smoothing, "reduction": reduction}
    same_with_gradient(
        lambda x, q: cross_entropy(x, q, **options), lambda x, q: F.cross_entropy(x, q, **options), logits, q
    )


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_cross_entropy_of_images_has_torchs_dimension_of_classes(smoothing):
    logits, labels = normal(2, 5, 3, 4), torch.randint(5, (2, 3, 4), generator=seeded(1))
    labels[0, 1] = -100
    options = {"weight": WEIGHT, "label_smoothing": smoothing}
    same_with_gradient(
        lambda x: cross_entropy(x, labels, 1, **options), lambda x: F.cross_entropy(x, labels, **options), logits
    )
    q = normal(2, 5, 3, 4, seed=2).softmax(1)
    same_with_gradient(lambda x: cross_entropy(x, q, 1, **options), lambda x: F.cross_entropy(x, q, **options), logits)


@pytest.mark.parametrize("opened", [(), (SHIFT,)], ids=["blocked", "open"])
@pytest.mark.parametrize("kind", ["labels", "smoothed", "probabilities"])
def test_small_losses_keep_their_digits(kind, opened):
    """torch gives 0 for a loss below the rounding of 1."""
    x = torch.tensor([[40.0, 0.0, -3.0], [0.0, 37.0, 1.0]], dtype=torch.float64, requires_grad=True)
    q = torch.tensor([[1.0, 0.0, 0.0], [1e-20, 1.0, 0.0]], dtype=torch.float64)
    weight, labels = torch.tensor([2.0, 3.0, 5.0], dtype=torch.float64), torch.tensor([0, 1])
    smoothing = 1e-18 if kind == "smoothed" else 0.0
    target = q if kind == "probabilities" else labels
    with unblock(*opened):
        found = cross_entropy(x, target, weight=weight, label_smoothing=smoothing, reduction="none")
    with mpmath.workdps(50):
        for row, mine, label in zip(range(2), found.tolist(), labels.tolist(), strict=True):
            z = [mpmath.mpf(value) for value in x[row].tolist()]
            total = mpmath.log(mpmath.fsum(map(mpmath.exp, z)))
            own = [mpmath.mpf(value) for value in q[row].tolist()]
            if kind != "probabilities":
                own = [(1 - mpmath.mpf(smoothing)) * (c == label) + mpmath.mpf(smoothing) / 3 for c in range(3)]
            expected = mpmath.fsum(w * p * (total - v) for w, p, v in zip(weight.tolist(), own, z, strict=True))
            assert abs(mine / expected - 1) < 1e-14


def test_a_class_without_probability_may_be_impossible():
    x = torch.tensor([[1.0, 2.0, -math.inf]], dtype=torch.float64, requires_grad=True)
    q = torch.tensor([[0.25, 0.75, 0.0]], dtype=torch.float64)
    where = torch.tensor([True, True, False])
    expected = cross_entropy(x[:, :2], q[:, :2])
    for found in (cross_entropy(x, q), cross_entropy(torch.zeros_like(x) + x[:, :1] * 0 + x, q, where=where)):
        assert found == expected
        (gradient,) = torch.autograd.grad(found, x)
        assert gradient[0, 2] == 0
        assert gradient.isfinite().all()
    assert cross_entropy(x, torch.tensor([[0.2, 0.7, 0.1]], dtype=torch.float64)) == math.inf


@every_size
@every_reduction
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("kind", ["labels", "probabilities"])
def test_a_class_of_weight_zero_may_be_impossible(reduction, smoothing, kind, of_size):
    """An impossible class is the limit of unlikely ones, whose loss times 0 is 0."""
    logits, weight = normal(40, 5), WEIGHT.masked_fill(torch.arange(5) == 2, 0.0)
    target = torch.randint(5, (40,), generator=seeded(1)) if kind == "labels" else normal(40, 5, seed=1).softmax(1)
    found, expected = (logits.clone().requires_grad_() for _ in range(2))
    impossible = torch.arange(5) == 2
    options = {"weight": weight, "label_smoothing": smoothing, "reduction": reduction}
    losses = cross_entropy(found.masked_fill(impossible, -math.inf), target, **options)
    limits = cross_entropy(expected.masked_fill(impossible, -1e300), target, **options)
    torch.testing.assert_close(losses, limits, rtol=1e-14, atol=0)
    gradients = torch.autograd.grad([losses.sum(), limits.sum()], [found, expected])
    torch.testing.assert_close(*gradients, rtol=1e-14, atol=0)


def test_smoothing_leaves_masked_classes_out():
    x, where = normal(6, 4), torch.tensor([True, False, True, True])
    labels = torch.tensor([0, 2, 3, 0, 2, 3])
    found = cross_entropy(x, labels, where=where, label_smoothing=0.3)
    renumbered = torch.tensor([0, 1, 2, 0, 1, 2])
    torch.testing.assert_close(found, F.cross_entropy(x[:, where], renumbered, label_smoothing=0.3))


def test_no_label_at_all_has_the_mean_of_torch():
    labels = torch.full((3,), -100)
    assert cross_entropy(normal(3, 5), labels).isnan()
    assert cross_entropy(normal(3, 5), labels, reduction="sum") == 0


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"weight": [1.0] * 5}, TypeError, "`weight` should be a floating-point tensor. Found list"),
        ({"weight": torch.ones(4)}, ValueError, r"`weight` should have shape \(5,\). Found \(4,\)"),
        ({"ignore_index": 1.5}, TypeError, "`ignore_index` should be an integer. Found 1.5"),
        ({"label_smoothing": 1.5}, ValueError, "`label_smoothing` should be .* Found 1.5"),
        ({"label_smoothing": None}, ValueError, "`label_smoothing` should be .* Found None"),
    ],
    ids=str,
)
def test_errors_of_cross_entropy(options, error, message):
    with pytest.raises(error, match=message):
        cross_entropy(normal(2, 5), torch.tensor([0, 1]), **options)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64], ids=str)
def test_an_ignored_label_is_that_number_in_every_type(dtype):
    """In 8 bits 156 and -100 are the same, and so are 44 and 300."""
    logits = normal(2, 200, 1)
    for label, ignore_index in ((156, -100), (44, 300)):
        if label <= torch.iinfo(dtype).max:
            labels = torch.tensor([[label], [3]])
            found = cross_entropy(logits, labels.to(dtype), 1, ignore_index=ignore_index)
            torch.testing.assert_close(found, F.cross_entropy(logits, labels))


@every_size
@every_reduction
@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_weights_of_the_classes_may_carry_a_gradient(reduction, smoothing, of_size):
    logits, labels = normal(9, 5), torch.arange(9) % 5

    def of_its_definition(x, weight):
        q = (1 - smoothing) * F.one_hot(labels, 5).double() + smoothing / 5
        losses = -(weight * q * x.log_softmax(1)).sum(1)
        return (
            losses.sum() / weight[labels].sum() if reduction == "mean" else getattr(losses, reduction, lambda: losses)()
        )

    same_with_gradient(
        lambda x, w: cross_entropy(x, labels, weight=w, label_smoothing=smoothing, reduction=reduction),
        of_its_definition, logits, WEIGHT + 0.1,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_probabilities_and_weights_are_not_rounded_to_another_precision(dtype):
    logits, q = normal(4, 5, scale=3), normal(4, 5, seed=1).softmax(1).to(dtype)
    found = cross_entropy(logits, q, label_smoothing=0.1, reduction="none")
    expected = F.cross_entropy(logits, q.double(), label_smoothing=0.1, reduction="none")
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=0)
    x, weight, labels = logits.to(dtype), WEIGHT.float() + 1e-3, torch.arange(4)
    found = cross_entropy(x, labels, weight=weight, reduction="none")
    expected = F.cross_entropy(x.double(), labels, weight=weight.double(), reduction="none")
    assert found.dtype == dtype
    slack = 0.51 if dtype != torch.float32 else 4
    torch.testing.assert_close(found.double(), expected, rtol=slack * torch.finfo(dtype).eps, atol=0)


# --- log-sum-exp with factors ------------------------------------------------------------------------------------

PAIRS = {
    "signs": ([1.0, 2.0, -0.5], [1.0, -1.0, 2.0]),
    "positive": ([1000.0, 999.0, 0.0], [0.5, 3.0, 1.0]),
    "zero leaves out": ([math.inf, 1.0, 0.0], [0.0, 2.0, 1.0]),
    "cancels": ([3.0, 3.0, -50.0], [1.0, -1.0, 0.0]),
    "nearly cancels": ([3.0, 3.0, -30.0], [1.0, -1.0, -2.0]),
    "sum close to one": ([0.0, -40.0, -41.0], [1.0, 1.0, -0.5]),
    "no entry": ([1.0, 2.0, 3.0], [0.0, 0.0, 0.0]),
    "impossible": ([-math.inf, -math.inf, -math.inf], [1.0, 2.0, -1.0]),
    "infinite": ([math.inf, 1.0, 0.0], [-1.0, 2.0, 1.0]),
}


@pytest.mark.parametrize("name", PAIRS)
def test_logsumexp_with_factors_is_scipys(name):
    a, b = (torch.tensor(values, dtype=torch.float64) for values in PAIRS[name])
    with np.errstate(all="ignore"):
        expected, sign = scipy.special.logsumexp(a.numpy(), b=b.numpy(), return_sign=True)
        without = scipy.special.logsumexp(a.numpy(), b=b.numpy())
    found, found_sign = logsumexp(a, b=b, return_sign=True)
    assert found.item() == pytest.approx(expected, rel=1e-14, nan_ok=True)
    assert found_sign.item() == sign
    assert logsumexp(a, b=b).item() == pytest.approx(without, rel=1e-14, nan_ok=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_a_sum_below_the_range_of_its_type_is_positive(dtype):
    x = torch.tensor([[-9000.0, -9001.0], [-math.inf, -math.inf], [math.nan, 0.0]], dtype=dtype)
    for options in ({}, {"b": torch.ones(2)}):
        total, sign = logsumexp(x, return_sign=True, **options)
        assert total.tolist() == pytest.approx(x.double().logsumexp(1).tolist(), rel=1e-2, nan_ok=True)
        assert sign.tolist() == pytest.approx([1, 0, math.nan], nan_ok=True)


@pytest.mark.parametrize("opened", [(), (SHIFT,)], ids=["blocked", "open"])
def test_a_factor_of_zero_has_the_derivative_of_its_exponential(opened):
    x = torch.tensor([[0.5, 3.0, -1.0], [0.3, 0.2, math.inf], [1.0, math.nan, 0.0]], dtype=torch.float64)
    b = torch.tensor([[1.0, 0.0, -0.25], [2.0, 1.0, 0.0], [1.0, 0.0, 2.0]], dtype=torch.float64)
    x.requires_grad_()
    b.requires_grad_()
    with unblock(*opened):
        value = logsumexp(x, b=b)
        by_x, by_b = torch.autograd.grad(value.sum(), (x, b))
    kept = x.detach().where(x.isfinite(), -math.inf).exp()
    total = (b * kept).sum(1, keepdim=True)
    torch.testing.assert_close(value, total.log().squeeze(1))
    torch.testing.assert_close(by_x, b * kept / total)
    torch.testing.assert_close(by_b, kept / total)


@pytest.mark.parametrize("opened", [(), (SHIFT,)], ids=["blocked", "open"])
def test_a_row_whose_factors_leave_nothing_has_gradient_zero_and_poisons_no_other(opened):
    x = torch.tensor([[1.0, 2.0], [-math.inf, -math.inf], [0.5, -1.0]], dtype=torch.float64, requires_grad=True)
    b = torch.tensor([[0.0, 0.0], [1.0, -2.0], [1.0, 2.0]], dtype=torch.float64, requires_grad=True)
    with unblock(*opened):
        value, sign = logsumexp(x, b=b, return_sign=True)
        by_x, by_b = torch.autograd.grad(value, (x, b), torch.ones_like(value))
    assert value[:2].tolist() == [-math.inf, -math.inf]
    assert sign.tolist() == [0, 0, 1]
    assert (by_x[:2] == 0).all()
    assert (by_b[:2] == 0).all()
    torch.testing.assert_close(by_x[2], b[2] * x[2].exp() / (b[2] * x[2].exp()).sum())


@pytest.mark.parametrize("dim", [0, -1, (0, 2), (2, 1, 0)], ids=str)
@pytest.mark.parametrize("keepdim", [False, True])
def test_logsumexp_with_factors_over_any_dimensions(dim, keepdim):
    a, b = normal(2, 3, 4, scale=3), normal(3, 4, seed=1)
    expected = scipy.special.logsumexp(a.numpy(), axis=dim, b=b.numpy(), keepdims=keepdim, return_sign=True)
    found = logsumexp(a, dim, keepdim, b=b, return_sign=True)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, torch.as_tensor(theirs), rtol=1e-13, atol=0)
    plain, sign = logsumexp(a, dim, keepdim, return_sign=True)
    assert torch.equal(plain, logsumexp(a, dim, keepdim))
    assert torch.equal(sign, torch.ones_like(plain))


@pytest.mark.parametrize("name", ["signs", "positive", "nearly cancels", "sum close to one"])
@pytest.mark.parametrize("opened", [(), (SHIFT,)], ids=["blocked", "open"])
def test_logsumexp_with_factors_and_its_gradients_beside_fifty_digits(name, opened):
    a, b = (torch.tensor(values, dtype=torch.float64, requires_grad=True) for values in PAIRS[name])
    with unblock(*opened):
        value, _ = logsumexp(a, b=b, return_sign=True)
        by_a, by_b = torch.autograd.grad(value, (a, b))
    with mpmath.workdps(50):
        e = [mpmath.exp(mpmath.mpf(x)) for x in a.tolist()]
        terms = [mpmath.mpf(x) * y for x, y in zip(b.tolist(), e, strict=True)]
        total = mpmath.fsum(terms)
        # Each term has the rounding of its own, which a sum that cancels magnifies; open, of both ways of the shift.
        condition = float(mpmath.fsum(map(abs, terms)) / abs(total)) * 2.0**-52 * 8
        assert abs(value.item() - mpmath.log(abs(total))) < max(condition, abs(value.item()) * 2.0**-51)
        for found, exactly in zip(itertools.chain(by_a.tolist(), by_b.tolist()), [*terms, *e], strict=True):
            exactly /= total
            assert abs(found - exactly) < abs(exactly) * max(1e-12, 10 * condition) + torch.finfo(torch.float64).tiny


@pytest.mark.parametrize(
    ("b", "error", "message"),
    [
        ([1.0], TypeError, "`b` should be a tensor of real numbers. Found list"),
        (torch.ones(3, dtype=torch.complex64), TypeError, "Found torch.complex64"),
        (torch.ones(4), ValueError, r"`b` should have a shape that broadcasts to \(2, 3\). Found \(4,\)"),
    ],
    ids=["list", "complex", "shape"],
)
def test_errors_of_factors(b, error, message):
    with pytest.raises(error, match=message):
        logsumexp(normal(2, 3), b=b)


# --- several dimensions ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", [softmax, log_softmax], ids=lambda function: function.__name__)
@pytest.mark.parametrize("dim", [(0,), (0, 2), (-1, 0), (2, 1, 0)], ids=str)
def test_softmax_over_several_dimensions_is_scipys(function, dim):
    x = normal(2, 3, 4, scale=3)
    expected = getattr(scipy.special, function.__name__)(x.numpy(), axis=dim)
    torch.testing.assert_close(function(x, dim), torch.as_tensor(expected), rtol=1e-13, atol=0)
    where = torch.tensor([True, False, True])[:, None]
    places = [place % 3 for place in dim]
    masked = function(x, dim, where=where)
    left_out = x.masked_fill(~where, -math.inf).movedim(places, list(range(len(places)))).flatten(0, len(places) - 1)
    rows = masked.movedim(places, list(range(len(places)))).flatten(0, len(places) - 1)
    torch.testing.assert_close(rows, function(left_out, 0))
    for empty in ((), (0, 0)):
        with pytest.raises(ValueError, match="at least one dimension, and none of them twice"):
            function(x, empty)


def test_labels_that_are_smoothed_away_may_be_masked():
    logits = torch.tensor([[0.5, 1.0, -0.3], [0.1, 0.2, 0.3]], requires_grad=True)
    labels, where = torch.tensor([2, 0]), torch.tensor([[True, True, False], [True, True, True]])
    found = cross_entropy(logits, labels, where=where, label_smoothing=1.0)
    rows = [-row.log_softmax(0).mean() for row in (logits[0, :2], logits[1])]
    torch.testing.assert_close(found, torch.stack(rows).mean())
    (gradient,) = torch.autograd.grad(found, logits)
    assert gradient.isfinite().all()
