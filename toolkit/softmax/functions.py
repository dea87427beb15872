r"""The functions of `toolkit.softmax` and their block.

All of them subtract the maximum before they exponentiate, and the block `softmax.shift` holds the maximum constant. The
functions do not depend on the shift, so *the leak of the block is exactly zero*: the cotangents that reach the shift
sum to zero, for any ties, in every order. The block saves the backward pass through the maximum, and the memory of the
input, which that pass would keep alive.

The leak is zero because each function undoes its shift completely. A program that does not undo its shift, or that
blocks only one of its two uses, does leak; `experiments/softmax.py` trains such a program.

Gradients keep every component. Where one probability is close to 1, the formula :math:`y_i (g_i - \sum_j y_j g_j)`
cancels: on ``[40, 0]`` it loses the larger component completely. Here the cotangent is centred first, the remainder
:math:`1 - y` of such a probability is summed separately, and a label's :math:`y - 1` is computed from the loss. The
error of each component is some tens of roundoffs, relative to the component's scale in the table below. Each nat
between the smallest and the largest logit adds one roundoff, because their difference is rounded before it is
exponentiated: up to 700 roundoffs, where a probability is 1e-304. The scales:

=============  =======================================================
softmax        :math:`y_i \sum_j y_j |g_i - g_j|`
log_softmax    :math:`(1 - y_i) |g_i| + y_i \sum_{j \neq i} |g_j|`
logsumexp      :math:`y_i |g|`
cross_entropy  :math:`y_i |g|`, at the label :math:`(1 - y_i) |g|`
=============  =======================================================

Half precision is computed in float32 and rounded once at the end, forward and backward.

Entries that ``where`` masks have probability 0, log-probability ``-inf`` and gradient 0, whatever their value. Rows
with infinite entries:

- A row of only ``-inf``, or with every entry masked, has probabilities 0 with gradient 0, log-probabilities and
  log-sum-exp ``-inf``. `torch.softmax` gives NaN there, and one such row poisons the gradient of the whole batch.
- A row with ``+inf`` has log-sum-exp ``+inf``. Its probability is NaN at that entry, and 0 at finite entries.
- A NaN makes its whole row NaN.

C classes along the dimension ``dim``; ``*`` all other dimensions, which are independent rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, overload

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch.compiler import is_compiling, is_exporting
from torch.nn.functional import nll_loss

from toolkit._checks import broadcasts, choice, index, number
from toolkit._tensors import INTEGERS, bounded, dense, kind_of, largest_exponent, wide
from toolkit.blocks import block, is_quiet, stop_gradient
from toolkit.softmax._differentiation import (
    cross_entropy_of_rows,
    log_softmax_of_rows,
    log_sum_exp_of_rows,
    softmax_of_rows,
)
from toolkit.softmax._kernels import (
    finite_maximum,
    is_small,
    is_unsure,
    laid_out,
    log_sum_in_plain_operations,
    probabilities_in_plain_operations,
    small_probabilities,
)

__all__ = ["SHIFT", "cross_entropy", "log_softmax", "logsumexp", "naive_softmax", "softmax"]

SHIFT = block(
    "softmax.shift",
    "The maximum keeps the exponentials in range and does not change the result, so its gradient is zero; computing "
    "that zero would cost a pass over the input and the memory to keep it.",
)

_SEVERAL = "an integer or several"


def softmax(input: Tensor, dim: int | Sequence[int] = -1, *, where: Tensor | None = None) -> Tensor:
    r"""Return probabilities :math:`y_i = e^{x_i - m} / \sum_j e^{x_j - m}` with the shift :math:`m = \max_j x_j`.

    This quotient is more accurate than ``exp(input - logsumexp(input))``, by a factor that grows with the log-sum-exp.

    Args:
        input: (\*, C), floating point.
        dim: The dimension of the classes, or several dimensions that hold the classes together.
        where: Boolean, of a shape that broadcasts to that of `input`: False leaves an entry out.

    Returns:
        (\*, C), like `input`; sums to 1 along `dim`, or to 0 where every entry is ``-inf`` or masked.

    Raises:
        TypeError: If `input` is not a floating-point tensor, `where` not a boolean one, or `dim` not made of integers.
        ValueError: If `where` does not broadcast to the shape of `input`, or `dim` is empty or names a dimension twice.
        IndexError: If `input` has no dimension `dim`.

    References:
        Blanchard, Higham & Higham, "Accurately computing the log-sum-exp and softmax functions", 2021: the
        recommended form.

    Example:
        >>> softmax(torch.tensor([1000.0, 1000.0, -torch.inf]))
        tensor([0.5000, 0.5000, 0.0000])
    """
    if where is None and type(dim) is int and _is_short(input) and (y := small_probabilities(input, dim)) is not None:
        return y
    if where is not None:
        return softmax(_left_out(input, where, "input"), dim).masked_fill(~where, 0.0)
    if _is_several(dim):
        return _over_several(softmax, input, dim)
    dim = _checked(input, "input", dim, _SEVERAL)
    x, _ = _shifted(input, dim)
    y = probabilities_in_plain_operations(x, dim) if _is_plain() else softmax_of_rows(x, dim)
    return y if y.dtype == input.dtype else y.to(input.dtype)


def log_softmax(input: Tensor, dim: int | Sequence[int] = -1, *, where: Tensor | None = None) -> Tensor:
    r"""Return log-probabilities :math:`x_i - m - \log \sum_j e^{x_j - m}` in nats.

    The shift is subtracted before the logarithm of the sum, so large inputs cost no accuracy. The remainder of a
    probability close to 1 is kept (see `logsumexp`).

    Args:
        input: (\*, C), floating point.
        dim: The dimension of the classes, or several dimensions that hold the classes together.
        where: Boolean, of a shape that broadcasts to that of `input`: False leaves an entry out.

    Returns:
        (\*, C), like `input`.

    Raises:
        TypeError: If `input` is not a floating-point tensor, `where` not a boolean one, or `dim` not made of integers.
        ValueError: If `where` does not broadcast to the shape of `input`, or `dim` is empty or names a dimension twice.
        IndexError: If `input` has no dimension `dim`.

    References:
        Blanchard, Higham & Higham, "Accurately computing the log-sum-exp and softmax functions", 2021.

    Example:
        >>> log_softmax(torch.tensor([0.0, -40.0], dtype=torch.float64))
        tensor([-4.2484e-18, -4.0000e+01], dtype=torch.float64)
    """
    if where is None and type(dim) is int and _is_short(input) and is_unsure(log_y := torch.log_softmax(input, dim)):
        return log_y
    if where is not None:
        return log_softmax(_left_out(input, where, "input"), dim).masked_fill(~where, -math.inf)
    if _is_several(dim):
        return _over_several(log_softmax, input, dim)
    dim = _checked(input, "input", dim, _SEVERAL)
    x, _ = _shifted(input, dim)
    if _is_plain():
        log_y = x - bounded(log_sum_in_plain_operations(x, dim), 0)
    else:
        log_y = log_softmax_of_rows(x, dim)
    return log_y if log_y.dtype == input.dtype else log_y.to(input.dtype)


@overload
def logsumexp(
    input: Tensor,
    dim: int | Sequence[int] = -1,
    keepdim: bool = False,
    *,
    where: Tensor | None = None,
    b: Tensor | None = None,
    return_sign: Literal[False] = False,
) -> Tensor: ...


@overload
def logsumexp(
    input: Tensor,
    dim: int | Sequence[int] = -1,
    keepdim: bool = False,
    *,
    where: Tensor | None = None,
    b: Tensor | None = None,
    return_sign: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def logsumexp(
    input: Tensor,
    dim: int | Sequence[int] = -1,
    keepdim: bool = False,
    *,
    where: Tensor | None = None,
    b: Tensor | None = None,
    return_sign: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Return :math:`m + \log \sum_j b_j e^{x_j - m}` in nats, by default with all :math:`b_j = 1`.

    Both uses of the shift :math:`m = \max_j x_j` are the same blocked value. Blocking only one of them would give a
    wrong gradient. The term of one maximum is exactly 1 and is left to `log1p`, so that a sum close to 1 loses no
    digit: ``logsumexp([0, -40])`` is 4.248e-18, where `torch.logsumexp` has 0.

    Args:
        input: (\*, C), floating point.
        dim: The dimension to sum over, or several.
        keepdim: Whether the result keeps `dim` with size 1.
        where: Boolean, of a shape that broadcasts to that of `input`: False leaves an entry out.
        b: Real factors, of a shape that broadcasts to that of `input`: 0 leaves an entry out, as `where` does, except
            that the derivative with respect to the factor of a finite entry stays.
        return_sign: Whether the sign of the sum is returned as well. If not, a negative sum gives NaN.

    Returns:
        (\*), or (\*, 1). The logarithm of an empty sum is ``-inf``. With `return_sign`, the logarithm of the sum's
        absolute value, and the sign, -1, 0 or 1, of the same shape.

    Raises:
        TypeError: If `input` is not a floating-point tensor, `where` not a boolean one, `b` not a real one, or `dim`
            not made of integers.
        ValueError: If `where` or `b` does not broadcast to the shape of `input`, or `dim` is empty or names a dimension
            twice.
        IndexError: If `input` has no dimension `dim`.

    References:
        Blanchard, Higham & Higham, "Accurately computing the log-sum-exp and softmax functions", 2021.

    Example:
        >>> logsumexp(torch.tensor([1000.0, 1000.0], dtype=torch.float64))
        tensor(1000.6931, dtype=torch.float64)
        >>> logsumexp(torch.tensor([1.0, 2.0]), b=torch.tensor([1.0, -1.0]), return_sign=True)
        (tensor(1.5413), tensor(-1.))
    """
    if where is b is None and not return_sign and type(dim) is int and _is_short(input):
        _checked(input, "input", dim, _SEVERAL)
        result = log_sum_exp_of_rows(input, dim)
        return result if keepdim else result.squeeze(dim)
    if where is not None:
        input = _left_out(input, where, "input")
    _checked(input, "input")
    if b is None and not return_sign and not _is_several(dim):
        place = _checked(input, "input", dim, _SEVERAL)
        result = _logsumexp(input, place)
        return result if keepdim or input.dim() == 0 else result.squeeze(place)
    places = _places(input, dim)
    weights = None if b is None else _weights(b, input)
    total, sign = _signed_logsumexp(_as_one(input, places), None if weights is None else _as_one(weights, places))
    if not return_sign:
        total = torch.where(sign < 0, math.nan, total)
    for place in places if keepdim and input.dim() else ():
        total, sign = total.unsqueeze(place), sign.unsqueeze(place)
    return (total, sign) if return_sign else total


def _logsumexp(input: Tensor, dim: int) -> Tensor:
    """Return the log-sum-exp (*, 1)."""
    x, shift = _shifted(input, dim)
    total = log_sum_in_plain_operations(x, dim) if _is_plain() else log_sum_exp_of_rows(x, dim)
    return (total if shift is None else shift + total).to(input.dtype)


def _signed_logsumexp(x: Tensor, b: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the logarithm (*) of the absolute value of a weighted sum over the last dimension, and its sign (*)."""
    if b is None:
        total = _logsumexp(x, -1).squeeze(-1)
        # The sum itself may be below the range of its type, and is positive all the same.
        sign = torch.ones_like(total).masked_fill(total == -math.inf, 0.0)
        return total, sign.masked_fill(total.isnan(), math.nan)
    z, left_out = wide(x), b == 0
    z = z.masked_fill(left_out & ~z.isfinite(), -math.inf)
    shift = stop_gradient(finite_maximum(z.masked_fill(left_out, -math.inf), -1), SHIFT)
    exponents = z - shift
    # That of an entry that is left out is in the derivative with respect to its factor, and not below the shift.
    terms = b * torch.where(left_out, bounded(exponents, most=largest_exponent(z.dtype)), exponents).exp()
    at_peak = z == shift
    largest = torch.where(at_peak, terms, 0.0).sum(-1)
    others = torch.where(at_peak, 0.0, terms).sum(-1)
    empty = (terms == 0).all(-1)
    # The largest terms are exact, so that a sum close to them loses no digit, unless the others cancel them.
    together = (largest.abs() <= 2 * others.abs()) | ~others.isfinite()
    one = torch.where(together, 1.0, largest)
    logarithm = one.abs().log() + (torch.where(together, 0.0, others) / one).log1p()
    whole = largest + others
    total = torch.where(together, torch.where(empty, 1.0, whole).abs().log(), logarithm)
    total = (shift.squeeze(-1) + total).masked_fill(empty, -math.inf)
    return total.to(x.dtype), whole.sign().masked_fill(whole.isnan(), math.nan).to(x.dtype)


def _weights(b: Tensor, input: Tensor) -> Tensor:
    """Return the factors of exponentials in the shape of `input`."""
    if not isinstance(b, Tensor) or b.is_complex() or b.dtype == torch.bool:
        raise TypeError(f"`b` should be a tensor of real numbers. Found {kind_of(b)}.")
    dense(b=b)
    _check_broadcasts(b, "b", input)
    return b.to(wide(input).dtype).expand(input.shape)


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    dim: int = -1,
    *,
    where: Tensor | None = None,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: Literal["mean", "sum", "none"] = "mean",
) -> Tensor:
    r"""Return the cross entropy :math:`-\log \operatorname{softmax}(x)_{label}` in nats, by default its mean.

    With class weights w and class probabilities q in place of labels, the loss is

    .. math::
        -\sum_c w_c q_c \log \operatorname{softmax}(x)_c

    Both terms are taken after the shift: ``[1e8, 1e8]`` gives log 2. The loss of a class with logit ``-inf``, or of a
    masked class, is infinite, unless its probability q or its weight is 0.

    Args:
        logits: (\*, C), floating point.
        labels: (\*), integers from 0 to C - 1; or (\*, C), floating point: probabilities, which may carry a gradient.
        dim: The dimension of the classes in `logits`. In `torch.nn.functional.cross_entropy` it is 1.
        where: Boolean, broadcast to the shape of `logits`: False leaves a class out.
        weight: w, (C,). None: 1 for all classes.
        ignore_index: Samples with this label have loss 0, and do not count in the mean. It does not apply to
            probabilities.
        label_smoothing: :math:`\epsilon`, from 0 to 1: q is mixed with the uniform distribution over the classes that
            are not left out, :math:`(1 - \epsilon) q_c + \epsilon / C`.
        reduction: ``"mean"`` over all samples (NaN if there are none), their ``"sum"``, or ``"none"``. With integer
            labels and `weight`, the mean is weighted by the weights of the labels, as in PyTorch.

    Returns:
        A scalar, or (\*) for ``"none"``; the type of `logits`.

    Raises:
        TypeError: If `logits` is not a floating-point tensor, `labels` neither a tensor of integers nor a
            floating-point one, `weight` not a floating-point tensor, `where` not a boolean one, or `dim` or
            `ignore_index` not an integer.
        ValueError: If `labels` does not have the shape of `logits` without `dim`, or of `logits` for probabilities;
            `weight` not the shape (C,); `where` does not broadcast to the shape of `logits`; `label_smoothing` is not
            from 0 to 1; or `reduction` is unknown.
        IndexError: If `logits` has no dimension `dim`.
        RuntimeError: If a label is out of range; found when the label is used, without an extra pass.

    References:
        Szegedy et al., "Rethinking the inception architecture for computer vision", 2016, section 7, for smoothing.

    Example:
        >>> cross_entropy(torch.tensor([[2.0, 0.0], [1e8, 1e8]]), torch.tensor([0, 1]), reduction="none")
        tensor([0.1269, 0.6931])
    """
    if where is weight is None and type(label_smoothing) is float and type(ignore_index) is type(dim) is int:
        is_default = not label_smoothing and ignore_index == -100 and reduction == "mean"
        if is_default and _is_short(logits) and (loss := _mean_of_few(logits, labels, dim)) is not None:
            return loss
    if where is not None:
        logits = _left_out(logits, where, "logits")
    dim = _checked(logits, "logits", dim)
    smoothing = number("label_smoothing", label_smoothing, least=0, most=1)
    ignored = index(ignore_index)
    if ignored is None:
        raise TypeError(f"`ignore_index` should be an integer. Found {ignore_index!r}.")
    choice("reduction", reduction, ("mean", "sum", "none"))
    if logits.dim() == 0 and dim in (0, -1):
        logits = logits.unsqueeze(0)
    _check_labels(labels, logits, dim)
    weights = None if weight is None else _class_weights(weight, logits, dim)
    if labels.is_floating_point():
        q = labels.to(torch.promote_types(labels.dtype, wide(logits).dtype))
        found = _losses_of_probabilities(logits, _smoothed(q, smoothing, where, dim), weights, dim)
        return _reduced(found, None, reduction).to(logits.dtype)
    labels = labels.long()  # in a type of 8 bits, 156 would equal -100
    x, _ = _shifted(logits, dim)
    differentiable = weights is not None and weights.requires_grad  # the weights of torch's loss are not
    if is_small(x) and x.dim() == 2 and dim % 2 == 1 and not smoothing and not differentiable:
        log_y = log_softmax_of_rows(x, dim)
        log_y = log_y if weights is None else _without_impossible(log_y, weights)
        return _label_losses(log_y, labels, weight, ignored, reduction).to(logits.dtype)
    kept = (labels != ignored).to(x.device)
    at = labels.masked_fill(~kept, 0).unsqueeze(dim)
    if _is_plain():
        losses = bounded(log_sum_in_plain_operations(x, dim), 0) - x.gather(dim, at)
    elif is_compiling():
        losses = cross_entropy_of_rows(x, at, dim)
    else:
        with _naming_a_wrong_label(labels, ignored, x.shape[dim]):
            losses = cross_entropy_of_rows(x, at, dim)
    own = kept.to(losses.dtype)
    if weights is not None:
        own = own * weights.expand(x.shape).gather(dim, at).squeeze(dim)
        losses = _without_impossible(losses, own.unsqueeze(dim)) * own.unsqueeze(dim)
    losses = losses.squeeze(dim)
    if smoothing:
        uniform = _smoothed(torch.zeros_like(wide(logits)), 1.0, where, dim)
        spread = smoothing * _losses_of_probabilities(logits, uniform, weights, dim)
        losses = spread if smoothing == 1 else (1 - smoothing) * losses + spread  # a masked label has an infinite loss
    return _reduced(torch.where(kept, losses, 0.0), own, reduction).to(logits.dtype)


def _mean_of_few(logits: Tensor, labels: Tensor, dim: int) -> Tensor | None:
    """Return the mean loss of few samples in the fewest calls; None where more checks or another kernel are needed."""
    if not isinstance(labels, Tensor) or labels.dtype != torch.int64 or logits.dim() != 2 or dim not in (1, -1):
        return None
    if labels.shape != logits.shape[:1] or not is_unsure(log_y := torch.log_softmax(logits, 1)):
        return None
    try:
        return nll_loss(log_y, labels)
    except (IndexError, RuntimeError):  # because of a label, which the other path names
        return None


def _reduced(losses: Tensor, weights: Tensor | None, reduction: str) -> Tensor:
    """Return the losses, their sum, or their sum divided by that of the weights of samples."""
    if reduction == "mean":
        return losses.mean() if weights is None else losses.sum() / weights.sum()
    return losses.sum() if reduction == "sum" else losses


def _losses_of_probabilities(logits: Tensor, q: Tensor, weights: Tensor | None, dim: int) -> Tensor:
    """Return the losses (*) of probabilities of the classes (*, C)."""
    factors = q if weights is None else weights * q
    return -(factors * _without_impossible(log_softmax(wide(logits), dim), factors)).sum(dim)


def _without_impossible(values: Tensor, factors: Tensor) -> Tensor:
    """Return the values, 0 in place of an infinite one whose factor is 0."""
    return values.masked_fill((factors == 0) & values.isinf(), 0.0)


def _smoothed(q: Tensor, smoothing: float, where: Tensor | None, dim: int) -> Tensor:
    """Mix probabilities (*, C) with the uniform distribution over the classes that are not left out."""
    if not smoothing:
        return q
    classes = torch.ones_like(q) if where is None else where.expand(q.shape).to(q.dtype)
    return (1 - smoothing) * q + smoothing * classes / classes.sum(dim, keepdim=True).clamp(min=1)


def _check_labels(labels: Tensor, logits: Tensor, dim: int) -> None:
    if not isinstance(labels, Tensor) or not (labels.dtype in INTEGERS or labels.is_floating_point()):
        raise TypeError(f"`labels` should be a tensor of integers, or of probabilities. Found {kind_of(labels)}.")
    dense(labels=labels)
    logits.size(dim)  # raises IndexError
    shape = logits.shape
    expected = shape if labels.is_floating_point() else (*shape[:dim], *shape[dim:][1:])
    if labels.shape != expected:
        raise ValueError(f"`labels` should have shape {tuple(expected)}. Found {tuple(labels.shape)}.")


def _class_weights(weight: Tensor, logits: Tensor, dim: int) -> Tensor:
    """Return the weights of the classes as a tensor that broadcasts to `logits`, in the type of the computation."""
    if not isinstance(weight, Tensor) or not weight.is_floating_point():
        raise TypeError(f"`weight` should be a floating-point tensor. Found {kind_of(weight)}.")
    dense(weight=weight)
    if weight.shape != (logits.shape[dim],):
        raise ValueError(f"`weight` should have shape ({logits.shape[dim]},). Found {tuple(weight.shape)}.")
    return weight.to(wide(logits).dtype).view([-1 if i == dim % logits.dim() else 1 for i in range(logits.dim())])


def _label_losses(log_y: Tensor, labels: Tensor, weight: Tensor | None, ignored: int, reduction: str) -> Tensor:
    """Return the losses (N,) of labels (N,) from the log-probabilities (N, C), or their sum or mean."""
    weight = None if weight is None else weight.to(log_y.dtype)
    with _naming_a_wrong_label(labels, ignored, log_y.shape[1]):
        return nll_loss(log_y, labels, weight, ignore_index=ignored, reduction=reduction)


@contextmanager
def _naming_a_wrong_label(labels: Tensor, ignored: int, n_classes: int) -> Iterator[None]:
    """Raise a RuntimeError with the first label out of range where torch raises because of one."""
    try:
        yield
    except (IndexError, RuntimeError) as error:
        if torch._C._are_functorch_transforms_active():  # which hide the values
            raise
        wrong = [label for label in labels.flatten().tolist() if label != ignored and not 0 <= label < n_classes]
        if not wrong:
            raise
        raise RuntimeError(
            f"`labels` should be from 0 to {n_classes - 1}. Found {wrong[0]}, which is out of bounds."
        ) from error


def naive_softmax(input: Tensor, dim: int = -1) -> Tensor:
    r"""Return :math:`e^{x_i} / \sum_j e^{x_j}` without a shift, for teaching: it overflows.

    The result is NaN if an entry exceeds 88 (float32) or 709 (float64), or if all entries are below -104 or -746.

    Args:
        input: (\*, C), floating point.
        dim: The dimension of the classes.

    Returns:
        (\*, C), like `input`.

    Raises:
        TypeError: If `input` is not a floating-point tensor, or `dim` not an integer.
        IndexError: If `input` has no dimension `dim`.

    Example:
        >>> naive_softmax(torch.tensor([1000.0, 0.0]))
        tensor([nan, 0.])
    """
    dim = _checked(input, "input", dim)
    e = input.exp()
    return e / e.sum(dim, keepdim=True)


def _checked(input: Tensor, argument: str, dim: object = 0, dims: str = "an integer") -> int:
    """Return `dim` as Python's integer.

    Raises:
        TypeError: If `dim` is no integer, or `input` no floating-point tensor.
        IndexError: If `input` has no dimension `dim`.
    """
    check_floating(input, argument)
    place = dim if type(dim) is int else index(dim)
    if place is None:
        raise TypeError(f"`dim` should be {dims}. Found {dim!r}.")
    count = max(input.dim(), 1)
    if not -count <= place < count:
        raise IndexError(f"`dim` should be from {-count} to {count - 1}. Found {place}, which is out of range.")
    return place


def check_floating(input: Tensor, argument: str) -> None:
    """Raise TypeError unless `input` is a floating-point tensor in which torch can compute."""
    if not isinstance(input, Tensor) or not input.is_floating_point():
        raise TypeError(f"`{argument}` should be a floating-point tensor. Found {kind_of(input)}.")
    if input.dtype.itemsize < 2:
        raise TypeError(f"`{argument}` should have at least 16 bits a number: `.half()`. Found {input.dtype}.")
    dense(**{argument: input})


def _left_out(input: Tensor, where: Tensor, argument: str) -> Tensor:
    """Return `input` with ``-inf`` at the masked entries: no gradient passes there."""
    _checked(input, argument)
    if not isinstance(where, Tensor) or where.dtype != torch.bool:
        raise TypeError(f"`where` should be a boolean tensor. Found {kind_of(where)}.")
    dense(where=where)
    _check_broadcasts(where, "where", input)
    return input.masked_fill(~where, -math.inf)


def _check_broadcasts(factor: Tensor, argument: str, input: Tensor) -> None:
    if not broadcasts(factor.shape, input.shape):
        raise ValueError(
            f"`{argument}` should have a shape that broadcasts to {tuple(input.shape)}. Found {tuple(factor.shape)}."
        )


def _is_several(dim: object) -> bool:
    return isinstance(dim, Sequence) and not isinstance(dim, str)


def _places(input: Tensor, dims: Any) -> list[int]:
    """Return the dimensions that `dims` names, from 0 and in order."""
    count = max(input.dim(), 1)
    dims = [_checked(input, "input", dim, _SEVERAL) for dim in (dims if _is_several(dims) else (dims,))]
    places = sorted({dim % count for dim in dims})
    if not places or len(places) < len(dims):
        raise ValueError(f"`dim` should name at least one dimension, and none of them twice. Found {tuple(dims)}.")
    return places


def _as_one(input: Tensor, places: list[int]) -> Tensor:
    """Return the tensor with several dimensions as one, the last."""
    if input.dim() == 0:
        return input.unsqueeze(0)
    return input.movedim(places, list(range(-len(places), 0))).flatten(-len(places))


def _over_several(function: Callable[[Tensor, int], Tensor], input: Tensor, dims: object) -> Tensor:
    """Return a function of rows, for rows that several dimensions make up."""
    places = _places(input, dims)
    if input.dim() == 0:
        return function(input, 0)
    ends = list(range(-len(places), 0))
    sizes = [input.shape[place] for place in places]
    rows: Tensor = function(_as_one(input, places), -1).unflatten(-1, sizes)
    return rows.movedim(ends, places)


def _is_short(input: Tensor) -> bool:
    """Return whether a kernel of torch may answer at once: checks of more take longer than a small softmax."""
    return isinstance(input, Tensor) and is_small(input) and is_quiet()


def _is_plain() -> bool:
    """Return whether plain operations have to compute the derivatives.

    A compiler takes no rules for `torch.func` and forward mode. And `torch.func` runs a function's own forward-mode
    rule with forward mode off: forward over forward would silently find nothing in it.
    """
    if is_compiling():
        return is_exporting() or forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()
    if not torch._C._are_functorch_transforms_active():
        return False
    functorch = torch._C._functorch
    levels = [level.key() for level in functorch.get_interpreter_stack() or []]
    return levels.count(functorch.TransformType.Jvp) > 1


def _shifted(input: Tensor, dim: int) -> tuple[Tensor, Tensor | None]:
    """Return ``input - shift``, at most 0, and the blocked shift (*, 1).

    While no block is open, compared or watched anywhere, the shift need not be recorded. Eager code then passes the
    unshifted `input` to the kernels, which give the same bits with or without the shift.
    """
    if is_quiet() and not is_compiling() and not _is_plain():
        return laid_out(input), None
    x = wide(input)
    shift = stop_gradient(finite_maximum(x, dim), SHIFT)
    return x - shift, shift
