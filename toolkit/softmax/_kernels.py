"""The kernels of softmax and its derivatives, without autograd, each beside the plain operations that specify it.

A long input is processed in pieces of a few rows, which stay in the cache from the first pass to the last. The choice
of a kernel may depend on the values (is any probability above one half?), but only where values can be read: not under
`torch.func`, a tracer or a compiler, and not on an accelerator, where reading a value waits for the device.

C classes along ``dim``; ``*`` all other dimensions, independent rows. Row quantities have shape (*, 1).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch.compiler import is_compiling

from toolkit._tensors import bounded, is_dense

# Elements from which an input is processed in pieces, and of one piece: 1 MiB of float32. Smaller pieces stay in a
# cache that is nearer, but the calls for each of them take longer than that saves.
_LONG = 1 << 16
_PIECE = 1 << 18
# Elements of an input for which kernels of torch may answer at once, and of one whose time is that of the calls.
_SHORT = _LONG
_SMALL = 1 << 12
# Up to this probability y the fused kernel of log-softmax and its derivative lose at most 1 / (1 - y) = 16 roundoffs.
_SURE = math.log(15 / 16)
# From this sum of shifted exponentials on, its logarithm loses at most as much.
_SEVERAL = 16 / 15
_PLAIN = (Tensor, torch.nn.Parameter)
_FULL = (torch.float32, torch.float64)
# Classes up to which any pivot is good enough.
_FEW = 32


def finite_maximum(x: Tensor, dim: int) -> Tensor:
    """Return the shift (*, 1): the maximum, made finite so that ``inf - inf`` stays out of rows of -inf."""
    # The maximum of an empty row is not defined, and there is no entry to shift.
    peak = x.amax(dim, keepdim=True) if x.numel() else x.sum(dim, keepdim=True)
    limits = torch.finfo(x.dtype)
    return peak.clamp(limits.min, limits.max)


# --- probabilities -----------------------------------------------------------------------------------------------


def probabilities(x: Tensor, dim: int) -> Tensor:
    """Return the softmax of `x`, shifted or not: the same bits."""
    if is_compiling():
        return probabilities_in_plain_operations(x, dim)
    y = torch.softmax(x, dim)
    if _may_look(x):
        if y.numel() == 0 or not _has_nan(y, dim):
            return y
    elif y.numel() == 0:
        return y
    return _with_infinite_rows(y, x, dim)


def probabilities_in_plain_operations(z: Tensor, dim: int) -> Tensor:
    """Specify `probabilities`, of shifted inputs."""
    e = z.exp()
    # The maximum alone contributes 1: the sum is smaller only in a row of -inf, where it is 0.
    return e / bounded(e.sum(dim, keepdim=True), 1)


def small_probabilities(x: Tensor, dim: int) -> Tensor | None:
    """Return `torch.softmax` of a small input, with the derivative of `centred_product`; None if that is not possible.

    The pivot is the cotangent at the maximum, so that the error of a component is up to 1 + C times its condition.
    """
    if not -x.dim() <= dim < x.dim() or x.shape[dim] > _FEW:
        return None
    y = torch.softmax(x, dim)
    if _has_nan(y, dim):
        return None
    if (node := y.grad_fn) is not None:
        top = y.argmax(dim, keepdim=True)

        def centred(cotangents: tuple[Tensor | None, ...]) -> tuple[Tensor | None]:
            g = cotangents[0]
            return (None if g is None else g - g.gather(dim, top),)

        # Of the node and not of `y`: a gradient with respect to `y` itself has to stay. It does not keep `y`, which
        # keeps the node.
        node.register_prehook(centred)
    return y


def _with_infinite_rows(y: Tensor, x: Tensor, dim: int) -> Tensor:
    """Set the rows whose maximum is not finite, which `torch.softmax` fills with NaN."""
    peak = x.amax(dim, keepdim=True)
    at_peak = torch.where(peak == -math.inf, 0.0, math.nan)
    elsewhere = torch.where(peak.isnan(), math.nan, 0.0)
    return torch.where(peak.isfinite(), y, torch.where(x == peak, at_peak, elsewhere).to(y.dtype))


def _has_nan(y: Tensor, dim: int) -> bool:
    """Return whether `torch.softmax` met a maximum that is not finite: then the whole row is NaN."""
    one_of_a_row = y if y.numel() <= _SMALL else y.select(dim, 0)
    return not torch.equal(one_of_a_row, one_of_a_row)


def scaled_probabilities(x: Tensor, scale: Tensor, dim: int) -> Tensor:
    """Return ``scale * softmax(x)`` for a row quantity `scale`: the gradient of log-sum-exp."""
    if not (_in_pieces(x, dim) and _is_itself(scale)):
        return probabilities(x, dim) * scale
    result = torch.empty_like(x)
    for y, part, factor in _pieces(dim, result, x, scale):
        torch.softmax(part, -1, out=y)
        if _has_nan(y, -1):
            y.copy_(_with_infinite_rows(y, part, -1))
        y.mul_(factor)
    return result


# --- log-sum-exp -------------------------------------------------------------------------------------------------


def maximum_and_log_sum(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    r"""Return the shift m and :math:`\log \sum_j e^{x_j - m}`, both (*, 1): at least 0, or -inf.

    In a row with one dominant probability, the others are summed separately and go through `log1p`, so that no digit is
    lost beside the 1.
    """
    if x.numel() == 0:
        total = x.sum(dim, keepdim=True)
        return total, total.log()
    if is_compiling():
        return torch.zeros_like(x.sum(dim, keepdim=True)), log_sum_in_plain_operations(x, dim)
    if _in_pieces(x, dim):
        peak = x.new_empty(*x.shape[:-1], 1)
        log_sum = torch.empty_like(peak)
        room = _room(x)
        for part, top, total in _pieces(dim, x, peak, log_sum):
            torch.amax(part, -1, keepdim=True, out=top)
            total.copy_(_log_sum(torch.softmax(part, -1, out=room[: len(part)])))
    else:
        peak = x.amax(dim, keepdim=True)
        log_sum = _log_sum_of_fused(x, peak, dim)
    limits = torch.finfo(x.dtype)
    # An infinite or undefined maximum is its row's log-sum-exp.
    return peak.clamp(limits.min, limits.max), torch.where(peak.isfinite(), log_sum, peak)


def log_sum_exp(x: Tensor, dim: int) -> Tensor:
    """Return the log-sum-exp (*, 1) of inputs, shifted or not, in the fewest calls if there are few inputs.

    A row's bits do not depend on other rows: each row with a sum of `_SEVERAL` or more has the logarithm of that sum.
    """
    if is_small(x):
        peak = x.amax(dim, keepdim=True)
        e = (x - peak).exp_()
        total = e.sum(dim, keepdim=True)
        if total.amin().item() >= _SEVERAL:  # and no infinite maximum, which would make its row NaN
            return total.log_().add_(peak)
        # Only the exponential of the one maximum is an integer, and an integer has no fraction.
        log_sum = torch.where(total >= _SEVERAL, total.log(), e.frac_().sum(dim, keepdim=True).log1p_())
        return torch.where(peak.isfinite(), log_sum.add_(peak), peak)
    peak, log_sum = maximum_and_log_sum(x, dim)
    return peak + log_sum


def _log_sum(y: Tensor) -> Tensor:
    """Return the log-sum-exp (*, 1) of shifted inputs from their softmax (*, C), which is overwritten."""
    top = y.amax(-1, keepdim=True)
    log_sum = top.log().neg_()
    sure = top > 2 / 3
    if not sure.any():
        return log_sum
    # e / 1 is e; of the exponentials only that of the maximum is an integer, and an integer has no fraction.
    return torch.where(sure, y.div_(top).frac_().sum(-1, keepdim=True).log1p(), log_sum)


def _log_sum_of_fused(x: Tensor, peak: Tensor, dim: int) -> Tensor:
    """Return the log-sum-exp of shifted inputs: minus the logarithm of the largest probability, as torch rounds it."""
    top = torch.log_softmax(x, dim).amax(dim, keepdim=True)
    sure = ~(top <= _SURE)
    if _may_look(x) and not sure.any():
        return top.neg_()
    # Only the exponential of the one maximum is an integer, and an integer has no fraction.
    others = (x - peak).exp_().frac_().sum(dim, keepdim=True)
    return torch.where(sure, others.log1p(), -top)


def log_sum_in_plain_operations(z: Tensor, dim: int) -> Tensor:
    """Specify the log-sum-exp of shifted inputs."""
    e = z.exp()
    at_peak = z == 0
    # The term of one maximum is exactly 1 and belongs to log1p; as `e - 1` it only adds its derivative.
    excess = (e - at_peak.to(e.dtype)).sum(dim, keepdim=True) + (at_peak.sum(dim, keepdim=True) - 1)
    return bounded(excess, 0).log1p().masked_fill(excess < 0, -math.inf)


def log_probabilities(x: Tensor, dim: int) -> Tensor:
    """Return the logarithm of the softmax of `x`, shifted or not: the same bits."""
    if not _in_pieces(x, dim):
        return _log_probabilities(x, dim)
    result = torch.empty_like(x)
    for part, log_y in _pieces(dim, x, result):
        torch.log_softmax(part, -1, out=log_y)
        # The rows with a probability close to 1, and those with NaN.
        (rows,) = torch.where(~(log_y.amax(-1) <= _SURE))
        if len(rows) == len(part):
            log_y.copy_(_log_probabilities(part, -1))
        elif len(rows):
            log_y[rows] = _log_probabilities(part[rows], -1)
    return result


def _log_probabilities(x: Tensor, dim: int) -> Tensor:
    peak, log_sum = maximum_and_log_sum(x, dim)
    return x - peak - log_sum.clamp(min=0)


def is_unsure(log_y: Tensor) -> bool:
    """Return whether no probability is close to 1, nor NaN: the fused kernel and its derivative are exact enough."""
    return log_y.amax().item() <= _SURE


# --- products with Jacobians -------------------------------------------------------------------------------------


def centred_product(y: Tensor, cotangent: Tensor, dim: int) -> Tensor:
    r"""Return :math:`y_i (g_i - \sum_j y_j g_j)`, each component to its own rounding.

    The Jacobian of softmax ignores a constant in g. So the pivot is subtracted first: g at the maximum where that has
    more than half of the probability, else the mean of g. Both terms of a component are then no larger than the
    component itself, up to the condition :math:`y_i \sum_j y_j |g_i - g_j|`.
    """
    if y.numel() == 0 or not (_may_look(y) and _is_itself(cotangent)):
        return centred_product_in_plain_operations(y, cotangent, dim)
    if not _in_pieces(y, dim):
        centred = cotangent - _pivot(y, cotangent, dim)
        return torch._softmax_backward_data(centred, y, dim, y.dtype)
    result = torch.empty_like(y)
    for out, part, g in _pieces(dim, result, y, cotangent):
        centred = torch.sub(g, _pivot(part, g, -1, out), out=out)
        torch._softmax_backward_data(centred, part, -1, y.dtype, grad_input=out)
    return result


def _pivot(y: Tensor, g: Tensor, dim: int, room: Tensor | None = None) -> Tensor:
    """Return the pivot that is subtracted from the cotangent (*, 1)."""
    if y.amax().item() > 0.5:
        # 1 at a probability above one half, else 0: in a row without one, all probabilities are the weights.
        weights = torch.round(y, out=room) if room is not None else y.round()
        unsure = 1 - weights.amax(dim, keepdim=True)
        if y.numel() < _SMALL or unsure.any():
            weights.addcmul_(y, unsure)
        return weights.mul_(g).sum(dim, keepdim=True)
    return torch.mul(y, g, out=room).sum(dim, keepdim=True)


def centred_product_in_plain_operations(y: Tensor, cotangent: Tensor, dim: int) -> Tensor:
    """Specify `centred_product`."""
    return y * centred_in_plain_operations(y, cotangent, dim)


def centred_in_plain_operations(y: Tensor, cotangent: Tensor, dim: int) -> Tensor:
    r"""Return :math:`g_i - \sum_j y_j g_j`."""
    if y.numel() == 0:
        return cotangent
    # One maximum finds both whether there is such an entry and its value; a compiled `any` beside it costs more.
    at_top = torch.where(y > 0.5, cotangent, -math.inf).amax(dim, keepdim=True)
    pivot = torch.where(at_top > -math.inf, at_top, (y * cotangent).sum(dim, keepdim=True))
    centred = cotangent - pivot
    return centred - (y * centred).sum(dim, keepdim=True)


def log_softmax_product(log_y: Tensor, cotangent: Tensor, dim: int) -> Tensor:
    r"""Return :math:`g_i - y_i \sum_j g_j`, each component to its own rounding.

    At a probability close to 1 this is :math:`g_i (1 - y_i) - y_i \sum_{j \neq i} g_j`, with :math:`1 - y_i` from
    `expm1`.
    """
    flat = log_y.dim() == 2 and dim % 2 == 1
    if not (flat and _may_look(log_y) and _is_itself(cotangent) and log_y.numel() > _SMALL):
        return log_softmax_product_in_plain_operations(log_y, cotangent, dim)
    result = torch._log_softmax_backward_data(cotangent, log_y, dim, log_y.dtype)
    (sure,) = torch.where(log_y.amax(dim) > -math.log(2))
    if len(sure):
        g, rows = cotangent[sure], log_y[sure]
        top = rows.argmax(dim, keepdim=True)
        at_top, log_top = g.gather(dim, top), rows.gather(dim, top)
        others = g.scatter_(dim, top, 0.0).sum(dim, keepdim=True)
        result[sure, top.squeeze(dim)] = (-at_top * log_top.expm1() - log_top.exp() * others).squeeze(dim)
    return result


def log_softmax_product_in_plain_operations(log_y: Tensor, cotangent: Tensor, dim: int) -> Tensor:
    """Specify `log_softmax_product`."""
    top = log_y > -math.log(2)
    others = torch.where(top, 0.0, cotangent).sum(dim, keepdim=True)
    at_top = torch.where(top, cotangent, 0.0).sum(dim, keepdim=True)
    y = log_y.exp()
    return torch.where(top, -cotangent * log_y.expm1() - y * others, cotangent - y * (others + at_top))


# --- pieces ------------------------------------------------------------------------------------------------------


def _is_itself(x: Tensor) -> bool:
    """Return whether `x` is one tensor: of no subclass, and not several that a backward pass maps over."""
    return type(x) in _PLAIN and not torch._C._functorch.is_legacy_batchedtensor(x)


def _may_look(x: Tensor) -> bool:
    """Return whether the choice of a kernel may depend on the values."""
    return (
        type(x) in _PLAIN
        and x.is_cpu
        and not is_compiling()
        and not torch._C._are_functorch_transforms_active()
        and torch._C._len_torch_dispatch_stack() == 0
    )


def is_small(x: Tensor) -> bool:
    """Return whether `x` is too short for pieces, in no half precision, and its values may be read.

    Not in forward mode: torch's derivative of its own derivative of `log_softmax` fails there.
    """
    if forward_ad._current_level >= 0:
        return False
    return is_dense(x) and 0 < x.numel() <= _SHORT and x.dim() > 0 and x.dtype in _FULL and _may_look(x)


def _in_pieces(x: Tensor, dim: int) -> bool:
    """Return whether `x` should be processed in pieces: it is long, and its rows are contiguous."""
    return x.numel() > _LONG and dim in (-1, x.dim() - 1) and x.is_contiguous() and _may_look(x)


def laid_out(x: Tensor) -> Tensor:
    """Return `x` in the memory layout of ``x - shift``, on which the choice of a kernel depends."""
    if x.is_contiguous() or x.numel() <= _LONG or x.dtype not in _FULL or not _may_look(x):
        return x
    return x if torch.empty_like(x, device="meta").stride() == x.stride() else x.clone()


def _pieces(dim: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Return views of the same few rows of all the tensors, which differ in their last dimension at most."""
    n_classes = max(tensor.shape[-1] for tensor in tensors)
    rows = max(1, _PIECE // n_classes)
    flat = [tensor.reshape(-1, tensor.shape[-1]) for tensor in tensors]
    return zip(*(tensor.split(rows) for tensor in flat), strict=True)


def _room(x: Tensor) -> Tensor:
    """Return space for one piece."""
    return x.new_empty(max(1, min(_PIECE, x.numel()) // x.shape[-1]), x.shape[-1])
