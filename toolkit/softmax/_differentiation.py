"""Derivatives of softmax and related functions: products that lose no component, in every mode and order.

Each function gives the same bits for a shifted and an unshifted row, and does not see the shift. It saves one tensor of
the input's size. The derivatives consist of the same functions, so they can be differentiated again.

The classes whose names end in ``InGraph`` are for a compiler, which does not take forward-mode rules.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch._functorch.utils import unwrap_dead_wrappers
from torch.autograd import Function
from torch.compiler import is_compiling

from toolkit._tensors import HALF, wide
from toolkit.softmax._kernels import (
    centred_in_plain_operations,
    centred_product,
    is_small,
    is_unsure,
    log_probabilities,
    log_softmax_product,
    log_softmax_product_in_plain_operations,
    log_sum_exp,
    maximum_and_log_sum,
    probabilities,
    scaled_probabilities,
    small_probabilities,
)


def softmax_of_rows(x: Tensor, dim: int) -> Tensor:
    """Return the probabilities, in float32 at least."""
    if is_small(x) and (y := small_probabilities(x, dim)) is not None:
        return y
    return _applied(_Softmax, _SoftmaxInGraph, x, dim)


def log_softmax_of_rows(x: Tensor, dim: int) -> Tensor:
    """Return the log-probabilities, in float32 at least."""
    if is_small(x) and is_unsure(log_y := torch.log_softmax(x, dim)):
        return log_y  # with the derivatives of torch
    return _applied(_LogSoftmax, _LogSoftmaxInGraph, x, dim)


def log_sum_exp_of_rows(x: Tensor, dim: int) -> Tensor:
    """Return the log-sum-exp (*, 1), in float32 at least."""
    return _applied(_LogSumExp, _LogSumExpInGraph, x, dim)


def cross_entropy_of_rows(x: Tensor, labels: Tensor, dim: int) -> Tensor:
    """Return the losses (*, 1) of labels (*, 1), in float32 at least."""
    return _applied(_CrossEntropy, _CrossEntropyInGraph, x, labels, dim)


def _applied(function: type[Function], in_graph: type[Function], *arguments: Any) -> Tensor:
    """Apply a function on the shortest path that this mode allows."""
    if is_compiling():
        return in_graph.apply(*arguments)  # type: ignore[no-any-return]
    if torch._C._are_functorch_transforms_active():
        return function.apply(*arguments)  # type: ignore[no-any-return]
    # `Function.apply` first inspects the signature, which takes longer than the softmax of a small batch.
    return super(Function, function).apply(*unwrap_dead_wrappers(arguments))  # type: ignore[misc, no-any-return]


def _is_differentiated_again() -> bool:
    """Return whether a backward pass is itself differentiated, in either mode."""
    return not is_compiling() and (torch.is_grad_enabled() or forward_ad._current_level >= 0)


class _SoftmaxInGraph(Function):
    """Softmax; saves the input in half precision, else the result: the derivative needs all digits."""

    @staticmethod
    def forward(x: Tensor, dim: int) -> Tensor:
        return probabilities(wide(x), dim)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
        x, ctx.dim = inputs
        _keep(ctx, x if x.dtype in HALF else output)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, None]:
        (kept,) = ctx.saved_tensors
        again = _is_differentiated_again()
        y = kept
        if kept.dtype in HALF:
            y = softmax_of_rows(wide(kept), ctx.dim) if again else probabilities(wide(kept), ctx.dim)
        product = _CentredProduct.apply if again else centred_product
        return product(y, cotangent, ctx.dim).to(kept.dtype), None


class _Softmax(_SoftmaxInGraph):
    """Softmax in eager mode: also in forward mode and `torch.func`."""

    generate_vmap_rule = True

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        (kept,) = ctx.saved_tensors
        y = softmax_of_rows(wide(kept), ctx.dim) if kept.dtype in HALF else kept
        return _CentredProduct.apply(y, wide(tangent), ctx.dim)  # type: ignore[no-any-return, no-untyped-call]


class _CentredProduct(Function):
    r"""The product :math:`p_i = y_i (g_i - \sum_j y_j g_j)`, of probabilities y: a symmetric Jacobian times g.

    With a cotangent v of p, that of g is the same product with v; that of y is
    :math:`(v_i - \sum_j y_j v_j)(g_i - \sum_j y_j g_j)`, up to a constant of the row that softmax ignores.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(y: Tensor, cotangent: Tensor, dim: int) -> Tensor:
        return centred_product(y, cotangent, dim)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, int], output: Tensor) -> None:
        y, cotangent, ctx.dim = inputs
        _keep(ctx, y, cotangent)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        y, g = ctx.saved_tensors
        of_y = of_g = None
        if ctx.needs_input_grad[0]:
            deviations = (centred_in_plain_operations(y, vector, ctx.dim) for vector in (cotangent, g))
            of_y = next(deviations) * next(deviations)
        if ctx.needs_input_grad[1]:
            of_g = _CentredProduct.apply(y, cotangent, ctx.dim)  # type: ignore[no-untyped-call]
        return of_y, of_g, None

    @staticmethod
    def jvp(ctx: Any, tangent_of_y: Tensor | None, tangent: Tensor | None, _: None) -> Tensor:
        y, g = ctx.saved_tensors
        result: Any = 0
        if tangent is not None:
            result = _CentredProduct.apply(y, tangent, ctx.dim)  # type: ignore[no-untyped-call]
        if tangent_of_y is not None:
            change = tangent_of_y * centred_in_plain_operations(y, g, ctx.dim)
            result = result + (change - y * change.sum(ctx.dim, keepdim=True))
        return result  # type: ignore[no-any-return]


class _LogSoftmaxInGraph(Function):
    """Logarithm of softmax; saves the input in half precision, else the result."""

    @staticmethod
    def forward(x: Tensor, dim: int) -> Tensor:
        return log_probabilities(wide(x), dim)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
        x, ctx.dim = inputs
        _keep(ctx, x if x.dtype in HALF else output)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, None]:
        (kept,) = ctx.saved_tensors
        again = _is_differentiated_again()
        log_y = kept
        if kept.dtype in HALF:
            log_y = log_softmax_of_rows(wide(kept), ctx.dim) if again else log_probabilities(wide(kept), ctx.dim)
        product = log_softmax_product_in_plain_operations if again else log_softmax_product
        return product(log_y, cotangent, ctx.dim).to(kept.dtype), None


class _LogSoftmax(_LogSoftmaxInGraph):
    """Logarithm of softmax in eager mode: also in forward mode and `torch.func`."""

    generate_vmap_rule = True

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        (kept,) = ctx.saved_tensors
        log_y = log_softmax_of_rows(wide(kept), ctx.dim) if kept.dtype in HALF else kept
        return centred_in_plain_operations(log_y.exp(), wide(tangent), ctx.dim)


class _LogSumExpInGraph(Function):
    """Log-sum-exp; saves the input."""

    @staticmethod
    def forward(x: Tensor, dim: int) -> Tensor:
        return log_sum_exp(wide(x), dim)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
        x, ctx.dim = inputs
        _keep(ctx, x)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        if _is_differentiated_again():
            return (softmax_of_rows(x, ctx.dim) * cotangent).to(x.dtype), None
        return scaled_probabilities(wide(x), cotangent, ctx.dim).to(x.dtype), None


class _LogSumExp(_LogSumExpInGraph):
    """Log-sum-exp in eager mode: also in forward mode and `torch.func`."""

    generate_vmap_rule = True

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        (x,) = ctx.saved_tensors
        return (softmax_of_rows(x, ctx.dim) * wide(tangent)).sum(ctx.dim, keepdim=True)


class _CrossEntropyInGraph(Function):
    r"""Cross entropy; saves the input and the losses.

    The label's component :math:`y_{label} - 1` is :math:`e^{-loss} - 1`, so it is as exact as the loss.
    """

    @staticmethod
    def forward(x: Tensor, labels: Tensor, dim: int) -> Tensor:
        peak, log_sum = maximum_and_log_sum(wide(x), dim)
        return log_sum.clamp(min=0) - (wide(x.gather(dim, labels)) - peak)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, int], output: Tensor) -> None:
        x, labels, ctx.dim = inputs
        _keep(ctx, x, labels, output)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, None, None]:
        x, labels, losses = ctx.saved_tensors
        if _is_differentiated_again():
            at_label = _probability_minus_one(losses) * cotangent
            gradient = (softmax_of_rows(x, ctx.dim) * cotangent).scatter(ctx.dim, labels, at_label)
        else:
            at_label = losses.neg().expm1() * cotangent
            gradient = scaled_probabilities(wide(x), cotangent, ctx.dim).scatter_(ctx.dim, labels, at_label)
        return gradient.to(x.dtype), None, None


class _CrossEntropy(_CrossEntropyInGraph):
    """Cross entropy in eager mode: also in forward mode and `torch.func`."""

    generate_vmap_rule = True

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        x, labels, losses = ctx.saved_tensors
        slopes = softmax_of_rows(x, ctx.dim).scatter(ctx.dim, labels, _probability_minus_one(losses))
        return (slopes * wide(tangent)).sum(ctx.dim, keepdim=True)


def _probability_minus_one(losses: Tensor) -> Tensor:
    """Return :math:`e^{-loss} - 1`. The derivative of `expm1`, result + 1, cancels where the probability is small."""
    return torch.where(losses > math.log(2), losses.neg().exp() - 1, losses.neg().expm1())


def _keep(ctx: Any, *tensors: Tensor) -> None:
    ctx.save_for_backward(*tensors)
    ctx.save_for_forward(*tensors)
