r"""The functions of `toolkit.softmax` and their block.

All of them subtract the maximum before they exponentiate, and the block `softmax.shift` holds the maximum constant. The
functions do not depend on the shift, so *the leak of the block is exactly zero*: the cotangents that reach the shift
sum to zero, for any ties, in every order. The block saves the backward pass through the maximum, and the memory of the
input that this pass would keep alive.

The leak is zero because each function undoes its shift completely. A program that does not undo its shift, or that
blocks only one of its two uses, does leak; `experiments/softmax.py` trains such a program.

Gradients keep every component. Where one probability is close to 1, the formula :math:`y_i (g_i - \sum_j y_j g_j)`
cancels: on ``[40, 0]`` it loses the larger component completely. Here the cotangent is centred first, the remainder
:math:`1 - y` of such a probability is summed separately, and a label's :math:`y - 1` is computed from the loss. Each
component has an error of some tens of roundoffs of its own condition, and of one more roundoff for each nat between the
smallest logit and the largest, whose difference is rounded before it is exponentiated (up to 700 roundoffs, where a
probability is 1e-304):

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
- ``+inf`` has log-sum-exp ``+inf`` and no probability: NaN at that entry, 0 at the finite ones.
- NaN makes its whole row NaN.

C classes along the dimension ``dim``; ``*`` all other dimensions, which are independent rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch.compiler import is_compiling, is_exporting
from torch.nn.functional import nll_loss

from toolkit._checks import choice, index
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
    log_sum_in_plain_operations,
    probabilities_in_plain_operations,
    wide,
)

__all__ = ["SHIFT", "cross_entropy", "log_softmax", "logsumexp", "naive_softmax", "softmax"]

SHIFT = block(
    "softmax.shift",
    "The maximum keeps the exponentials in range and does not change the result, so its gradient is zero; computing "
    "that zero would cost a pass over the input and the memory to keep it.",
)

_NO_LABEL = -(2**63)
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def softmax(input: Tensor, dim: int = -1, *, where: Tensor | None = None) -> Tensor:
    r"""Return probabilities :math:`y_i = e^{x_i - m} / \sum_j e^{x_j - m}` with the shift :math:`m = \max_j x_j`.

    The quotient is more accurate than ``exp(input - logsumexp(input))``, by a factor that grows with the log-sum-exp.

    Args:
        input: (\*, C), floating point.
        dim: The dimension of the classes.
        where: Boolean, of a shape that broadcasts to that of `input`: False leaves an entry out.

    Returns:
        (\*, C), like `input`; sums to 1 along `dim`, or to 0 where every entry is ``-inf`` or masked.

    Raises:
        TypeError: If `input` is not a floating-point tensor, `where` not a boolean one, or `dim` not an integer.
        ValueError: If `where` does not broadcast to the shape of `input`.
        IndexError: If `input` has no dimension `dim`.

    References:
        Blanchard, Higham & Higham, "Accurately computing the log-sum-exp and softmax functions", 2021: the
        recommended form.

    Example:
        >>> softmax(torch.tensor([1000.0, 1000.0, -torch.inf]))
        tensor([0.5000, 0.5000, 0.0000])
    """
    if where is not None:
        return softmax(_left_out(input, where, "input"), dim).masked_fill(~where, 0.0)
    dim = _checked(input, "input", dim)
    x, _ = _shifted(input, dim)
    y = probabilities_in_plain_operations(x, dim) if _is_plain() else softmax_of_rows(x, dim)
    return y if y.dtype == input.dtype else y.to(input.dtype)


def log_softmax(input: Tensor, dim: int = -1, *, where: Tensor | None = None) -> Tensor:
    r"""Return log-probabilities :math:`x_i - m - \log \sum_j e^{x_j - m}` in nats.

    The shift is subtracted before the logarithm of the sum, so large inputs cost no accuracy. The remainder of a
    probability close to 1 is kept (see `logsumexp`).

    Args:
        input: (\*, C), floating point.
        dim: The dimension of the classes.
        where: Boolean, of a shape that broadcasts to that of `input`: False leaves an entry out.

    Returns:
        (\*, C), like `input`.

    Raises:
        TypeError: If `input` is not a floating-point tensor, `where` not a boolean one, or `dim` not an integer.
        ValueError: If `where` does not broadcast to the shape of `input`.
        IndexError: If `input` has no dimension `dim`.

    References:
        Blanchard, Higham & Higham, "Accurately computing the log-sum-exp and softmax functions", 2021.

    Example:
        >>> log_softmax(torch.tensor([0.0, -40.0], dtype=torch.float64))
        tensor([-4.2484e-18, -4.0000e+01], dtype=torch.float64)
    """
    if where is not None:
        return log_softmax(_left_out(input, where, "input"), dim).masked_fill(~where, -math.inf)
    dim = _checked(input, "input", dim)
    x, _ = _shifted(input, dim)
    if _is_plain():
        log_y = x - log_sum_in_plain_operations(x, dim).clamp(min=0)
    else:
        log_y = log_softmax_of_rows(x, dim)
    return log_y if log_y.dtype == input.dtype else log_y.to(input.dtype)


def logsumexp(
    input: Tensor, dim: int | Sequence[int] = -1, keepdim: bool = False, *, where: Tensor | None = None
) -> Tensor:
    r"""Return :math:`m + \log \sum_j e^{x_j - m}` in nats.

    Both uses of the shift :math:`m = \max_j x_j` are the same blocked value. Blocking only one of them would give a
    wrong gradient. The term of one maximum is exactly 1 and is left to `log1p`, so that a sum close to 1 loses no
    digit: ``logsumexp([0, -40])`` is 4.248e-18, where `torch.logsumexp` has 0.

    Args:
        input: (\*, C), floating point.
        dim: The dimension to sum over, or several.
        keepdim: Whether the result keeps `dim` with size 1.
        where: Boolean, of a shape that broadcasts to that of `input`: False leaves an entry out.

    Returns:
        (\*), or (\*, 1). An empty sum has logarithm ``-inf``.

    Raises:
        TypeError: If `input` is not a floating-point tensor, `where` not a boolean one, or `dim` not made of integers.
        ValueError: If `where` does not broadcast to the shape of `input`, or `dim` is empty or names a dimension twice.
        IndexError: If `input` has no dimension `dim`.

    References:
        Blanchard, Higham & Higham, "Accurately computing the log-sum-exp and softmax functions", 2021.

    Example:
        >>> logsumexp(torch.tensor([1000.0, 1000.0], dtype=torch.float64))
        tensor(1000.6931, dtype=torch.float64)
    """
    if where is not None:
        return logsumexp(_left_out(input, where, "input"), dim, keepdim)
    _checked(input, "input")
    if type(dim) is not int:
        return _logsumexp_over_several(input, dim, keepdim)
    x, shift = _shifted(input, dim)
    total = log_sum_in_plain_operations(x, dim) if _is_plain() else log_sum_exp_of_rows(x, dim)
    result = (total if shift is None else shift + total).to(input.dtype)
    return result if keepdim else result.squeeze(dim)


def _logsumexp_over_several(input: Tensor, dims: Any, keepdim: bool) -> Tensor:
    """Sum over several dimensions, as one that is made of them at the end."""
    if not isinstance(dims, Sequence) or isinstance(dims, str):
        return logsumexp(input, _checked(input, "input", dims, "an integer or several"), keepdim)
    count = max(input.dim(), 1)
    dims = [_checked(input, "input", dim, "an integer or several") for dim in dims]
    for dim in dims:
        if not -count <= dim < count:
            raise IndexError(f"`dim` should be from {-count} to {count - 1}. Found {dim}, which is out of range.")
    places = sorted(dim % count for dim in dims)
    if not places or len(set(places)) < len(places):
        raise ValueError(f"`dim` should name at least one dimension, and none of them twice. Found {tuple(dims)}.")
    if input.dim() == 0:
        return logsumexp(input, 0, keepdim)
    together = input.movedim(places, list(range(-len(places), 0))).flatten(-len(places))
    result = logsumexp(together, -1)
    for place in places if keepdim else ():
        result = result.unsqueeze(place)
    return result


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    dim: int = -1,
    *,
    where: Tensor | None = None,
    reduction: Literal["mean", "sum", "none"] = "mean",
) -> Tensor:
    r"""Return the cross entropy :math:`-\log \operatorname{softmax}(x)_{label}` in nats, by default its mean.

    Both terms are taken after the shift: ``[1e8, 1e8]`` gives log 2. The loss of a class with logit ``-inf``, or of a
    masked class, is infinite.

    Args:
        logits: (\*, C), floating point.
        labels: (\*), integers from 0 to C - 1.
        dim: The dimension of the classes in `logits`.
        where: Boolean, of a shape that broadcasts to that of `logits`: False leaves a class out.
        reduction: ``"mean"`` over all samples (NaN if there are none), their ``"sum"``, or ``"none"``.

    Returns:
        A scalar, or (\*) for ``"none"``; the type of `logits`.

    Raises:
        TypeError: If `logits` is not a floating-point tensor, `labels` not a tensor of integers, `where` not a
            boolean one, or `dim` not an integer.
        ValueError: If `labels` does not have the shape of `logits` without `dim`, `where` does not broadcast to that
            of `logits`, or `reduction` is unknown.
        IndexError: If `logits` has no dimension `dim`.
        RuntimeError: If a label is out of range; found when the label is used, without an extra pass.

    Example:
        >>> cross_entropy(torch.tensor([[2.0, 0.0], [1e8, 1e8]]), torch.tensor([0, 1]), reduction="none")
        tensor([0.1269, 0.6931])
    """
    if where is not None:
        return cross_entropy(_left_out(logits, where, "logits"), labels, dim, reduction=reduction)
    dim = _checked(logits, "logits", dim)
    if not isinstance(labels, Tensor) or labels.dtype not in _INTEGERS:
        found = labels.dtype if isinstance(labels, Tensor) else type(labels).__name__
        raise TypeError(f"`labels` should be a tensor of integers. Found {found}.")
    choice("reduction", reduction, ("mean", "sum", "none"))
    if logits.dim() == 0 and dim in (0, -1):
        logits = logits.unsqueeze(0)
    expected = logits.select(dim, 0).shape if logits.size(dim) else logits.sum(dim).shape
    if labels.shape != expected:
        raise ValueError(f"`labels` should have shape {tuple(expected)}. Found {tuple(labels.shape)}.")
    x, _ = _shifted(logits, dim)
    at = labels.long().unsqueeze(dim)
    if is_small(x) and x.dim() == 2 and dim % 2 == 1:
        return _label_losses(log_softmax_of_rows(x, dim), labels, reduction).to(logits.dtype)
    if _is_plain():
        losses = log_sum_in_plain_operations(x, dim).clamp(min=0) - x.gather(dim, at)
    else:
        losses = cross_entropy_of_rows(x, at, dim)
    losses = losses.squeeze(dim)
    if reduction != "none":
        losses = losses.mean() if reduction == "mean" else losses.sum()
    return losses.to(logits.dtype)


def _label_losses(log_y: Tensor, labels: Tensor, reduction: str) -> Tensor:
    """Return the losses (N,) of labels (N,) from the log-probabilities (N, C), or their sum or mean."""
    try:
        return nll_loss(log_y, labels.long(), reduction=reduction, ignore_index=_NO_LABEL)
    except IndexError as error:
        found = [label for label in labels.tolist() if not 0 <= label < log_y.shape[1]]
        raise RuntimeError(
            f"`labels` should be from 0 to {log_y.shape[1] - 1}. Found {found[0]}, which is out of bounds."
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
    """Return `dim` as Python's integer; raise a TypeError if it is none, or `input` is not floating point."""
    if not isinstance(input, Tensor) or not input.is_floating_point():
        found = input.dtype if isinstance(input, Tensor) else type(input).__name__
        raise TypeError(f"`{argument}` should be a floating-point tensor. Found {found}.")
    place = dim if type(dim) is int else index(dim)
    if place is None:
        raise TypeError(f"`dim` should be {dims}. Found {dim!r}.")
    return place


def _left_out(input: Tensor, where: Tensor, argument: str) -> Tensor:
    """Return `input` with ``-inf`` at the masked entries: no gradient passes there."""
    _checked(input, argument)
    if not isinstance(where, Tensor) or where.dtype != torch.bool:
        found = where.dtype if isinstance(where, Tensor) else type(where).__name__
        raise TypeError(f"`where` should be a boolean tensor. Found {found}.")
    ends = zip(reversed(where.shape), reversed(input.shape), strict=False)
    if where.dim() > input.dim() or any(n not in (1, size) for n, size in ends):
        raise ValueError(
            f"`where` should have a shape that broadcasts to {tuple(input.shape)}. Found {tuple(where.shape)}."
        )
    return input.masked_fill(~where, -math.inf)


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
        return input, None
    x = wide(input)
    shift = stop_gradient(finite_maximum(x, dim), SHIFT)
    return x - shift, shift
