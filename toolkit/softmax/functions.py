"""Softmax, its logarithm, log-sum-exp and cross entropy that neither overflow nor underflow.

All of them subtract the maximum before they exponentiate, and the maximum is held constant by the block
`softmax.shift`. The functions do not depend on what is subtracted, so *opening the block leaks exactly nothing*: the
cotangents that reach the shift sum to zero, whatever ties there are, in every order. What the block saves is the
backward pass through the maximum and the input that it would keep alive.

That holds because each function undoes its shift completely. A program that does not, or that blocks only one of the
two uses of a shift, does leak: `experiments/softmax.py` trains one.

Half precision is computed in float32 and rounded once at the end. Rows with infinite entries:

- A row of ``-inf`` throughout (every class masked out) has probabilities 0 with gradient 0, log-probabilities and
  log-sum-exp ``-inf``. `torch.softmax` gives NaN there, and one such row poisons the gradient of the whole batch.
- ``+inf`` has log-sum-exp ``+inf`` and no probability: NaN at that entry, 0 at the finite ones.
- NaN makes its whole row NaN.

C classes along the dimension ``dim``; ``*`` all other dimensions, which are independent rows.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch.compiler import is_compiling

from toolkit.blocks import block, stop_gradient

__all__ = ["SHIFT", "cross_entropy", "log_softmax", "logsumexp", "naive_softmax", "softmax"]

SHIFT = block(
    "softmax.shift",
    "The maximum is subtracted to keep the exponentials in range; the result does not depend on it, so its gradient "
    "is zero, and computing that zero would cost a pass over the input and the memory to keep it.",
)

_HALF = (torch.float16, torch.bfloat16)
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def softmax(input: Tensor, dim: int = -1) -> Tensor:
    r"""Return probabilities :math:`y_i = e^{x_i - m} / \sum_j e^{x_j - m}` with the shift :math:`m = \max_j x_j`.

    It divides; ``exp(input - logsumexp(input))`` is less accurate, by a factor that grows with the log-sum-exp.

    Args:
        input: (\*, C), floating point.
        dim: The dimension of the classes.

    Returns:
        (\*, C), like `input`; sums to 1 along `dim`, or to 0 where every entry is ``-inf``.

    Raises:
        TypeError: If `input` is not a floating-point tensor.
        IndexError: If `input` has no dimension `dim`.

    References:
        Blanchard, Higham & Higham, "Accurately computing the log-sum-exp and softmax functions", 2021: the
        recommended form.

    Example:
        >>> softmax(torch.tensor([1000.0, 1000.0, -torch.inf]))
        tensor([0.5000, 0.5000, 0.0000])
    """
    _check(input, "input")
    z, _ = _shifted(input, dim)
    return _exp_over_sum(z, dim).to(input.dtype)


def log_softmax(input: Tensor, dim: int = -1) -> Tensor:
    r"""Return log-probabilities :math:`x_i - m - \log \sum_j e^{x_j - m}` in nats.

    The shift is subtracted before the logarithm of the sum is, so large inputs cost no accuracy; and what is left of
    a probability next to 1 is kept (see `logsumexp`).

    Args:
        input: (\*, C), floating point.
        dim: The dimension of the classes.

    Returns:
        (\*, C), like `input`.

    Raises:
        TypeError: If `input` is not a floating-point tensor.
        IndexError: If `input` has no dimension `dim`.

    References:
        Blanchard, Higham & Higham, "Accurately computing the log-sum-exp and softmax functions", 2021.

    Example:
        >>> log_softmax(torch.tensor([0.0, -40.0], dtype=torch.float64))
        tensor([-4.2484e-18, -4.0000e+01], dtype=torch.float64)
    """
    _check(input, "input")
    z, _ = _shifted(input, dim)
    return (z - _log_sum_exp(z, dim).clamp(min=0)).to(input.dtype)


def logsumexp(input: Tensor, dim: int = -1, keepdim: bool = False) -> Tensor:
    r"""Return :math:`m + \log \sum_j e^{x_j - m}` in nats.

    Both uses of the shift :math:`m = \max_j x_j` are the same blocked value. Blocking only one of them would give a
    wrong gradient. The term of one maximum is exactly 1 and is left to `log1p`, so that a sum next to 1 loses
    nothing: ``logsumexp([0, -40])`` is 4.248e-18, where `torch.logsumexp` has 0.

    Args:
        input: (\*, C), floating point.
        dim: The dimension to sum over.
        keepdim: Whether the result keeps `dim` with size 1.

    Returns:
        (\*), or (\*, 1). An empty sum has logarithm ``-inf``.

    Raises:
        TypeError: If `input` is not a floating-point tensor.
        IndexError: If `input` has no dimension `dim`.

    References:
        Blanchard, Higham & Higham, "Accurately computing the log-sum-exp and softmax functions", 2021.

    Example:
        >>> logsumexp(torch.tensor([1000.0, 1000.0], dtype=torch.float64))
        tensor(1000.6931, dtype=torch.float64)
    """
    _check(input, "input")
    z, shift = _shifted(input, dim)
    result = (shift + _log_sum_exp(z, dim)).to(input.dtype)
    return result if keepdim else result.squeeze(dim)


def cross_entropy(
    logits: Tensor, labels: Tensor, dim: int = -1, *, reduction: Literal["mean", "sum", "none"] = "mean"
) -> Tensor:
    r"""Return the cross entropy :math:`-\log \operatorname{softmax}(x)_{label}` in nats, by default per sample.

    Both terms are taken after the shift: ``[1e8, 1e8]`` gives log 2. The loss of a class whose logit is ``-inf`` is
    infinite.

    Args:
        logits: (\*, C), floating point.
        labels: (\*), integers from 0 to C - 1.
        dim: The dimension of the classes in `logits`.
        reduction: ``"mean"`` over all samples (NaN if there are none), their ``"sum"``, or ``"none"``.

    Returns:
        A scalar, or (\*) for ``"none"``; the type of `logits`.

    Raises:
        TypeError: If `logits` is not a floating-point tensor, or `labels` not a tensor of integers.
        ValueError: If `labels` does not have the shape of `logits` without `dim`, or `reduction` is unknown.
        IndexError: If `logits` has no dimension `dim`.
        RuntimeError: If a label is out of range (found where labels are read, without a pass to look for it).

    Example:
        >>> cross_entropy(torch.tensor([[2.0, 0.0], [1e8, 1e8]]), torch.tensor([0, 1]), reduction="none")
        tensor([0.1269, 0.6931])
    """
    _check(logits, "logits")
    if not isinstance(labels, Tensor) or labels.dtype not in _INTEGERS:
        found = labels.dtype if isinstance(labels, Tensor) else type(labels).__name__
        raise TypeError(f"`labels` should be a tensor of integers. Found {found}.")
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"`reduction` should be 'mean', 'sum' or 'none'. Found {reduction!r}.")
    expected = logits.select(dim, 0).shape if logits.size(dim) else logits.sum(dim).shape
    if labels.shape != expected:
        raise ValueError(f"`labels` should have shape {tuple(expected)}. Found {tuple(labels.shape)}.")
    z, _ = _shifted(logits, dim)
    losses = _log_sum_exp(z, dim).clamp(min=0) - z.gather(dim, labels.long().unsqueeze(dim))
    losses = losses.squeeze(dim).to(logits.dtype)
    if reduction == "none":
        return losses
    return losses.mean() if reduction == "mean" else losses.sum()


def naive_softmax(input: Tensor, dim: int = -1) -> Tensor:
    r"""Return :math:`e^{x_i} / \sum_j e^{x_j}` as it is written, for teaching: there is no shift, and it overflows.

    NaN as soon as an entry exceeds 88 (float32) or 709 (float64), or all of them are below -104 or -746.

    Args:
        input: (\*, C), floating point.
        dim: The dimension of the classes.

    Returns:
        (\*, C), like `input`.

    Raises:
        TypeError: If `input` is not a floating-point tensor.
        IndexError: If `input` has no dimension `dim`.

    Example:
        >>> naive_softmax(torch.tensor([1000.0, 0.0]))
        tensor([nan, 0.])
    """
    _check(input, "input")
    e = input.exp()
    return e / e.sum(dim, keepdim=True)


def _check(input: Tensor, argument: str) -> None:
    if not isinstance(input, Tensor) or not input.is_floating_point():
        found = input.dtype if isinstance(input, Tensor) else type(input).__name__
        raise TypeError(f"`{argument}` should be a floating-point tensor. Found {found}.")


def _shifted(input: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Return ``input - shift``, at most 0, and the blocked shift (*, 1)."""
    x = input.float() if input.dtype in _HALF else input
    # An empty maximum is not defined; there is nothing to subtract from either.
    peak = x.amax(dim, keepdim=True) if x.numel() else x.sum(dim, keepdim=True)
    # A finite shift keeps inf - inf out of rows of -inf.
    limits = torch.finfo(x.dtype)
    shift = stop_gradient(peak.clamp(limits.min, limits.max), SHIFT)
    return x - shift, shift


def _exp_over_sum(z: Tensor, dim: int) -> Tensor:
    """Return the softmax of shifted inputs.

    Forward mode, `torch.func` and a compiler need to see every operation; plain reverse mode is better off without.
    """
    if is_compiling() or forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active():
        return _exp_over_sum_in_plain_autograd(z, dim)
    return _ExpOverSum.apply(z, dim)  # type: ignore[no-any-return, no-untyped-call]


def _exp_over_sum_in_plain_autograd(z: Tensor, dim: int) -> Tensor:
    """Specify `_exp_over_sum`: the same bits forward, the same gradient to rounding."""
    e = z.exp()
    # The maximum alone contributes 1: the sum is smaller only in a row of -inf, where it is 0.
    return e / e.sum(dim, keepdim=True).clamp(min=1)


class _ExpOverSum(torch.autograd.Function):
    r"""The softmax of shifted inputs, differentiated by its Jacobian :math:`\operatorname{diag}(y) - y y^\top`.

    The shift is no part of it: autograd records the subtraction, so an open block is differentiated through. Forward
    mode and `torch.func` would raise here, never answer wrongly: it defines neither `jvp` nor `vmap`.
    """

    @staticmethod
    def forward(ctx: Any, z: Tensor, dim: int) -> Tensor:
        e = z.exp()
        y = e.div_(e.sum(dim, keepdim=True).clamp_(min=1))
        ctx.save_for_backward(y)
        ctx.dim = dim
        return y

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, None]:
        (y,) = ctx.saved_tensors
        product = y * cotangent
        return product.addcmul_(y, product.sum(ctx.dim, keepdim=True), value=-1), None


def _log_sum_exp(z: Tensor, dim: int) -> Tensor:
    """Return the log-sum-exp (*, 1) of shifted inputs: at least 0, or -inf."""
    if z.numel() == 0:
        return z.sum(dim, keepdim=True).log()
    e, top = z.exp(), z.argmax(dim, keepdim=True)
    # The term of one maximum is exactly 1 and belongs to log1p; as `e - 1` it adds nothing but its derivative.
    excess = e.scatter(dim, top, 0.0).sum(dim, keepdim=True) + (e.gather(dim, top) - 1)
    return excess.clamp(min=0).log1p().masked_fill(excess < 0, -math.inf)
