r"""Cross entropy of a linear layer over a large vocabulary, in chunks, so that its logits are never all in memory.

The logits of one chunk of classes are computed and used; then those of the next chunk overwrite them. For each row only
a running maximum and a running sum of exponentials are kept (the online log-sum-exp). The block `softmax.shift` holds
the maximum constant, as in all functions of `toolkit.softmax`, and its leak is zero.

The label's term is kept out of the sum. With the log-sum-exp of the *other* classes, the loss is a function of one
number, the negative margin :math:`d`:

.. math:: d = \log \sum_{j \ne label} e^{x_j} - x_{label}, \qquad loss = \log(1 + e^d)

and its derivative with respect to the label's logit is :math:`-\sigma(d)`: minus the sum of the others' probabilities.
This sum keeps all its digits where ``probability - 1`` would cancel.

There are three implementations:

- `_losses_in_plain_autograd` is the specification. Autograd records each chunk, so all logits are kept. Forward mode,
  `torch.func`, ``torch.export``, `make_fx`, second derivatives and several cotangents at once go through it.
- `_Losses` is for plain reverse mode. Its backward pass needs the logits a second time. If the weight's gradient is at
  least as large as the logits, they are stored in the memory of this gradient, which is needed anyway; each chunk of
  the gradient overwrites logits that have been read. Otherwise the logits are computed again. Only one loss per weight
  stores logits at a time: if several losses precede the first backward pass, the others compute their logits again.
  While the block is open, or a comparison runs, the maximum is recorded too, and receives its gradient from `_Losses`.
- A custom operator is for `torch.compile`, where a tensor cannot be stored in the memory of another tensor.

N samples, D features, V classes, C classes in a chunk.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple
from weakref import WeakValueDictionary

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, library
from torch.compiler import is_compiling, is_exporting

from toolkit._checks import broadcasts, choice, index, integer
from toolkit._tensors import HALF, INTEGERS, autocasts, dense, exact_products, kind_of
from toolkit.blocks import is_blocked, no_graph, stop_gradient
from toolkit.softmax.functions import SHIFT, check_floating

__all__ = ["linear_cross_entropy"]


def linear_cross_entropy(
    input: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    where: Tensor | None = None,
    ignore_index: int | None = None,
    reduction: Literal["mean", "sum", "none"] = "mean",
    chunk_size: int | None = None,
) -> Tensor:
    r"""Return the cross entropy in nats of the logits :math:`x = W h + b`, which are never all in memory.

    The result equals ``cross_entropy(linear(input, weight, bias), labels)`` up to rounding. Beyond inputs, gradients
    and a few numbers per row it needs memory for N C numbers; half precision also needs a chunk of the weight in
    float32. If ``N <= D`` and the weight has a gradient (of the logits' precision), the loss costs three matrix
    products, which any gradient needs; otherwise a fourth product computes the logits again. To save the fourth
    product, a loss holds memory of the size of `weight` from the forward pass on; the backward pass writes the weight's
    gradient into it. Only one loss per weight holds such memory at a time; the others take the fourth product. Compute
    a loss that is never differentiated under `torch.no_grad`, which holds no memory.

    Autocast does not lower the precision: logits are computed in float32 at least, from inputs of any dtype. Second
    derivatives and forward mode work, and record all logits.

    Args:
        input: (\*, D), floating point: the input of the linear layer.
        weight: (V, D), floating point. It should be finite, also for masked classes.
        labels: (\*), integers from 0 to V - 1, or `ignore_index`.
        bias: (V,), floating point. ``-inf`` removes a class.
        where: Boolean, broadcast to (\*, V): False masks a class, which then has probability 0 and no gradient. The
            loss of a masked label is infinite.
        ignore_index: A label whose samples have loss 0 and no gradient, and do not count in the mean.
        reduction: ``"mean"`` over all samples that are not ignored (NaN if there are none), their ``"sum"``, or
            ``"none"``.
        chunk_size: C, the number of classes in a chunk. None: the chunk's logits fit a cache.

    Returns:
        A scalar, or (\*) for ``"none"``, in the promoted dtype of `input` and `weight`; float32 under autocast.

    Raises:
        TypeError: If a tensor is not floating-point, `labels` are not integers, or `where` is not boolean.
        ValueError: If shapes do not fit, a label is out of range, `chunk_size` is not positive or `reduction` is
            unknown.

    References:
        Milakov & Gimelshein, "Online normalizer calculation for softmax", 2018: the running maximum and sum.
        Wijmans, Huval, Hertzberg, Koltun & Krähenbühl, "Cut Your Losses in Large-Vocabulary Language Models", 2024:
        why the logits should not be stored.

    Example:
        >>> hidden, weight = torch.eye(2, requires_grad=True), torch.tensor([[3.0, 0.0], [0.0, 3.0], [0.0, 0.0]])
        >>> loss = linear_cross_entropy(hidden, weight, torch.tensor([0, 1]))
        >>> loss
        tensor(0.0949, grad_fn=<MeanBackward0>)
    """
    chunk_size = None if chunk_size is None else integer("chunk_size", chunk_size)
    ignored_label = index(ignore_index)
    if ignore_index is not None and ignored_label is None:
        raise ValueError(f"`ignore_index` should be an integer. Found {ignore_index!r}.")
    _check(input, weight, labels, bias, where, reduction)
    leading, (n_classes, n_features) = labels.shape, weight.shape
    common = torch.promote_types(input.dtype, weight.dtype)
    result_type = torch.float32 if autocasts(input.device) and common in HALF else common
    rows, labels = input.reshape(labels.numel(), n_features), labels.reshape(-1).long()
    if where is not None:
        where = where.expand(*leading, n_classes).reshape(len(rows), n_classes)
    ignored = None if ignored_label is None else labels.eq(ignored_label)
    if ignored is not None:
        labels = labels.masked_fill(ignored, 0)
    if chunk_size is None:
        chunk_size = _default_chunk_size(rows, weight)
    with exact_products(input.device):
        losses = _losses(rows, weight, bias, labels, where, chunk_size)
        if ignored is not None:
            losses = losses.masked_fill(ignored, 0)
        if reduction == "sum":
            losses = losses.sum()
        elif reduction == "mean":
            losses = losses.mean() if ignored is None else losses.sum() / (~ignored).sum()
        else:
            losses = losses.reshape(leading)
    return losses.to(result_type)


# --- what a caller may get wrong -------------------------------------------------------------------------------------


def _check(
    input: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    where: Tensor | None,
    reduction: str,
) -> None:
    floating = {"input": input, "weight": weight} | ({} if bias is None else {"bias": bias})
    for name, tensor in floating.items():
        check_floating(tensor, name)
    if not isinstance(labels, Tensor) or labels.dtype not in INTEGERS:
        raise TypeError(f"`labels` should be a tensor of integers. Found {kind_of(labels)}.")
    dense(labels=labels, where=where)
    if where is not None and (not isinstance(where, Tensor) or where.dtype != torch.bool):
        raise TypeError(f"`where` should be a boolean tensor. Found {kind_of(where)}.")
    if weight.dim() != 2 or len(weight) == 0:
        raise ValueError(f"`weight` should have shape (V, D) with at least one class. Found {tuple(weight.shape)}.")
    n_classes, n_features = weight.shape
    if input.dim() == 0 or input.shape[-1] != n_features:
        raise ValueError(f"`input` should have shape (*, {n_features}), as `weight` has. Found {tuple(input.shape)}.")
    if labels.shape != input.shape[:-1]:
        raise ValueError(f"`labels` should have shape {tuple(input.shape[:-1])}. Found {tuple(labels.shape)}.")
    if bias is not None and bias.shape != (n_classes,):
        raise ValueError(f"`bias` should have shape ({n_classes},). Found {tuple(bias.shape)}.")
    if where is not None and not broadcasts(where.shape, (*labels.shape, n_classes)):
        expected = (*labels.shape, n_classes)
        raise ValueError(f"`where` should have a shape that broadcasts to {expected}. Found {tuple(where.shape)}.")
    choice("reduction", reduction, ("mean", "sum", "none"))


def _check_range(labels: Tensor, n_classes: int) -> None:
    """Raise ValueError if a label is out of range. Where labels cannot be read, under `vmap`, its loss is NaN."""
    if labels.numel() == 0 or labels.is_meta or _is_traced():
        return
    for label in (int(labels.min()), int(labels.max())):
        if not 0 <= label < n_classes:
            raise ValueError(f"`labels` should lie from 0 to {n_classes - 1}. Found {label}.")


def _is_traced() -> bool:
    """Return whether tensors stand for others, without numbers or memory: under `make_fx` or a `FakeTensorMode`."""
    modes = torch._C._TorchDispatchModeKey
    return any(torch._C._get_dispatch_mode(mode) is not None for mode in (modes.PROXY, modes.FAKE))


# --- the ways to compute it ------------------------------------------------------------------------------------------


def _losses(
    input: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, where: Tensor | None, chunk_size: int
) -> Tensor:
    """Return the losses (N,) in float32 or float64, by the cheapest implementation with the required derivatives."""
    if is_compiling():
        if is_blocked(SHIFT) and not is_exporting():
            return _operator(input, weight, bias, labels, where, chunk_size)[0]  # type: ignore[no-any-return]
        return _losses_in_plain_autograd(input, weight, bias, labels, where, chunk_size)
    transformed = torch._C._are_functorch_transforms_active()
    if not transformed:
        _check_range(labels, len(weight))
    if transformed or forward_ad._current_level >= 0 or _is_traced():
        return _losses_in_plain_autograd(input, weight, bias, labels, where, chunk_size)
    parameters = [tensor for tensor in (input, weight, bias) if tensor is not None]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in parameters):
        shift = None if is_blocked(SHIFT) else _shift(input, weight, bias, labels, where, chunk_size)
        return _Losses.apply(input, weight, bias, shift, labels, where, chunk_size)  # type: ignore[no-any-return, no-untyped-call]
    with no_graph():
        return _forward(input, weight, bias, labels, where, chunk_size, None)[0]


def _losses_in_plain_autograd(
    input: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, where: Tensor | None, chunk_size: int
) -> Tensor:
    """Specify `_losses`: the same losses and gradients, to rounding."""
    x = input.to(_precision(input, weight))
    shift = _shift(input, weight, bias, labels, where, chunk_size)
    total = x.new_zeros(len(x))
    label_logit = x.new_full((len(x),), math.nan)
    for start, stop in _chunks(len(weight), chunk_size):
        z, own, inside = _others(x, weight, bias, labels, where, start, stop)
        label_logit = torch.where(inside, own, label_logit)
        total = total + (z - shift[:, None]).exp().sum(1)
    return _softplus(_negative_margin(shift, total, label_logit))


def _shift(
    input: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, where: Tensor | None, chunk_size: int
) -> Tensor:
    """Return the blocked maximum (N,) of the logits of all classes but the label's, finite."""
    x = input.to(_precision(input, weight))
    limits = torch.finfo(x.dtype)
    peak = x.new_full((len(x),), limits.min)
    for start, stop in _chunks(len(weight), chunk_size):
        peak = torch.maximum(peak, _others(x, weight, bias, labels, where, start, stop)[0].amax(1))
    # A finite shift keeps inf - inf out of rows of -inf.
    return stop_gradient(peak.clamp(limits.min, limits.max), SHIFT)


def _others(
    x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, where: Tensor | None, start: int, stop: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a chunk's logits (N, C) with the label's as ``-inf``, the label's, and whether it is in the chunk."""
    z = _logits(x, weight[start:stop].to(x.dtype), bias, start, stop)
    if where is not None:
        z = z.masked_fill(~where[:, start:stop], -math.inf)
    index, inside = _find(labels, start, stop)
    own = z.gather(1, index).squeeze(1)
    return z.scatter(1, index, torch.where(inside, -math.inf, own)[:, None]), own, inside


class _Losses(torch.autograd.Function):
    """The losses in plain reverse mode, which do not depend on `shift`. Second derivatives are the plain twin's."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        shift: Tensor | None,
        labels: Tensor,
        where: Tensor | None,
        chunk_size: int,
    ) -> Tensor:
        ctx.room = _room_for_logits(input, weight, chunk_size) if ctx.needs_input_grad[1] else None
        waiting = None if ctx.room is None else ctx.room.memory
        losses, *kept = _forward(input, weight, bias, labels, where, chunk_size, waiting)
        ctx.save_for_backward(input, weight, bias, labels, where, *kept)
        ctx.chunk_size = chunk_size
        return losses

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, bias, labels, where, *_ = kept = _Kept(*ctx.saved_tensors)
        needs = ctx.needs_input_grad[:4]
        # Once: the first backward pass overwrites the logits by the gradient, a second computes them again.
        room, ctx.room = ctx.room, None
        with exact_products(input.device):
            if torch.is_grad_enabled() or not _is_one_product(cotangent):
                # At views, which have no history in common: the input may depend on the weight, or be it.
                with torch.enable_grad():
                    input, weight = input.view_as(input), weight.view_as(weight)
                    bias = None if bias is None else bias.view_as(bias)
                    losses = _losses_in_plain_autograd(input, weight, bias, labels, where, ctx.chunk_size)
                parameters = zip((input, weight, bias), needs, strict=False)
                wanted = [tensor for tensor, need in parameters if need and tensor is not None]
                again = torch.is_grad_enabled()
                found = iter(torch.autograd.grad(losses, wanted, cotangent, create_graph=again))
                return *(next(found) if need else None for need in needs[:3]), None, None, None, None
            waiting = None if room is None else room.memory
            gradients = _backward(kept, cotangent, ctx.chunk_size, needs, waiting)
            return *gradients, None, None, None


def _is_one_product(cotangent: Tensor) -> bool:
    """Return whether a backward pass is neither differentiated in forward mode nor mapped over several cotangents."""
    transformed = torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    return not (transformed or torch._C._functorch.is_legacy_batchedtensor(cotangent))


def _forward(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    where: Tensor | None,
    chunk_size: int,
    waiting: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return losses, shift, sum of the other classes' exponentials and negative margin, each (N,).

    Args:
        input: (N, D).
        weight: (V, D).
        bias: (V,), or None.
        labels: (N,).
        where: (N, V), or None.
        chunk_size: C.
        waiting: (V, D) memory in which the logits are stored, the label's as ``-inf``. None: the logits are dropped.
    """
    x = input.to(_precision(input, weight))
    limits = torch.finfo(x.dtype)
    shift = x.new_full((len(x),), limits.min)
    total = x.new_zeros(len(x))
    label_logit = x.new_full((len(x),), math.nan)
    scratch, buffer = _scratch(x, weight, chunk_size)
    for start, stop in _chunks(len(weight), chunk_size):
        e = _part(scratch, len(x), stop - start)
        z = e if waiting is None else _place(waiting, x, start, stop)
        _logits(x, _converted(weight, start, stop, buffer), bias, start, stop, out=z)
        if where is not None:
            z.masked_fill_(~where[:, start:stop], -math.inf)
        index, inside = _find(labels, start, stop)
        own = z.gather(1, index).squeeze(1)
        label_logit = torch.where(inside, own, label_logit)
        z.scatter_(1, index, torch.where(inside, -math.inf, own)[:, None])
        larger = torch.maximum(shift, z.amax(1)).clamp_(limits.min, limits.max)
        torch.sub(z, larger[:, None], out=e).exp_()
        total = total.mul_(shift.sub_(larger).exp_()).add_(e.sum(1))
        shift = larger
    margin = _negative_margin(shift, total, label_logit)
    return _softplus(margin), shift, total, margin


class _Kept(NamedTuple):
    """The arguments and results of `_forward` that `_backward` reads."""

    input: Tensor
    weight: Tensor
    bias: Tensor | None
    labels: Tensor
    where: Tensor | None
    shift: Tensor
    total: Tensor
    margin: Tensor


def _backward(
    kept: _Kept, cotangent: Tensor, chunk_size: int, needs: Sequence[bool], waiting: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    r"""Return the gradients of input, weight, bias and shift, as far as `needs` asks for them; see `_forward`.

    With the derivative with respect to the negative margin, :math:`s = g \sigma(d)`, that by the logit of another class
    is :math:`s e^{x_j - m} / \sum_k e^{x_k - m}`, and by the label's it is :math:`-s`. The shift is subtracted from all
    of them, so its gradient is minus their sum: a rounding error.
    """
    input, weight, bias, labels, where, shift, total, margin = kept
    x = input.to(_precision(input, weight))
    slope = cotangent * margin.sigmoid()
    factor = torch.where(total > 0, slope / total, 0)[:, None]  # without other classes the sum is 0
    # Contiguous whatever the order of `x` in memory, as the compiler is told.
    by_input = x.new_zeros(x.shape) if needs[0] else None
    by_weight = waiting if waiting is not None else weight.new_empty(weight.shape) if needs[1] else None
    by_bias = torch.empty_like(bias) if bias is not None and needs[2] else None
    by_shift = torch.zeros_like(shift) if needs[3] else None
    scratch, buffer = _scratch(x, weight, chunk_size)
    for start, stop in _chunks(len(weight), chunk_size):
        p, w = _part(scratch, len(x), stop - start), _converted(weight, start, stop, buffer)
        if waiting is not None:
            torch.sub(_place(waiting, x, start, stop), shift[:, None], out=p)
        else:
            _logits(x, w, bias, start, stop, out=p).sub_(shift[:, None])
        p.exp_().mul_(factor)
        index, inside = _find(labels, start, stop)
        p.scatter_(1, index, torch.where(inside, -slope, p.gather(1, index).squeeze(1))[:, None])
        if where is not None:
            p.masked_fill_(~where[:, start:stop], 0)
        if by_input is not None:
            by_input.addmm_(p, w)
        if by_weight is not None:
            torch.mm(p.t(), x, out=by_weight[start:stop] if buffer is None else w)  # `w` is not read any more
            if buffer is not None:
                by_weight[start:stop] = w
        if by_bias is not None:
            by_bias[start:stop] = p.sum(0)
        if by_shift is not None:
            by_shift.sub_(p.sum(1))
    return None if by_input is None else by_input.to(input.dtype), by_weight, by_bias, by_shift


# --- the parts -------------------------------------------------------------------------------------------------------


def _precision(input: Tensor, weight: Tensor) -> torch.dtype:
    """Return the type to compute in: half precision is accumulated in float32."""
    common = torch.promote_types(input.dtype, weight.dtype)
    return torch.float32 if common in HALF else common


def _default_chunk_size(input: Tensor, weight: Tensor) -> int:
    """Return the number of classes whose logits fill a megabyte, but enough for an efficient matrix product."""
    size = max(2**18 // max(len(input), 1), 256)
    if weight.dtype != _precision(input, weight):  # a chunk of the weight is converted, and has to be small as well
        size = min(size, max(2**20 // max(weight.shape[1], 1), 64))
    return min(size, len(weight))


def _chunks(n_classes: int, chunk_size: int) -> Iterator[tuple[int, int]]:
    return ((start, min(start + chunk_size, n_classes)) for start in range(0, n_classes, chunk_size))


def _logits(x: Tensor, w: Tensor, bias: Tensor | None, start: int, stop: int, out: Tensor | None = None) -> Tensor:
    """Return the logits (N, C) of a chunk with the weight `w` (C, D)."""
    if bias is None:
        return torch.mm(x, w.t(), out=out)
    return torch.addmm(bias[start:stop].to(x.dtype), x, w.t(), out=out)


def _find(labels: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """Return each label's index (N, 1) in a chunk, and whether it is there (N,); if not, the index is arbitrary."""
    inside = (labels >= start) & (labels < stop)
    return (labels - start).clamp(0, stop - start - 1)[:, None], inside


def _negative_margin(shift: Tensor, total: Tensor, label_logit: Tensor) -> Tensor:
    r"""Return :math:`\log \sum_{j \ne label} e^{x_j} - x_{label}`; the large terms first, which may cancel."""
    present = total != 0
    of_others = (shift - label_logit) + torch.where(present, total, 1).log()
    of_none = torch.where(label_logit == -math.inf, math.inf, -math.inf).to(label_logit.dtype)
    return torch.where(present, of_others, torch.where(label_logit.isnan(), label_logit, of_none))


def _softplus(margin: Tensor) -> Tensor:
    # Beyond 40 the other term is below the rounding of float64.
    return torch.nn.functional.softplus(margin, threshold=40.0)


def _scratch(x: Tensor, weight: Tensor, chunk_size: int) -> tuple[Tensor, Tensor | None]:
    """Return memory for a chunk's logits, and for the chunk of the weight if that has to be converted.

    Once for all chunks: the pages of fresh memory cost more than the conversion.
    """
    size = min(chunk_size, len(weight))
    buffer = None if weight.dtype == x.dtype else x.new_empty(size, weight.shape[1])
    return x.new_empty(len(x) * size), buffer


def _converted(weight: Tensor, start: int, stop: int, buffer: Tensor | None) -> Tensor:
    w = weight[start:stop]
    return w if buffer is None else buffer[: stop - start].copy_(w)


def _part(scratch: Tensor, n_rows: int, n_columns: int) -> Tensor:
    return scratch[: n_rows * n_columns].view(n_rows, n_columns)


class _Room:
    """Memory (V, D) for stored logits and then the weight's gradient; registered while a loss holds it."""

    def __init__(self, weight: Tensor) -> None:
        self.memory = weight.new_empty(weight.shape)


# By where the weight begins: a loss that holds a room keeps its weight too, so nothing else begins there.
_rooms: WeakValueDictionary[tuple[torch.device, int], _Room] = WeakValueDictionary()


def _room_for_logits(input: Tensor, weight: Tensor, chunk_size: int) -> _Room | None:
    """Return a room if each chunk's logits fit into the chunk's rows, and no other loss of the weight holds one."""
    size, row = _precision(input, weight).itemsize, weight.shape[1] * weight.dtype.itemsize
    place = (weight.device, weight.data_ptr())
    if not 0 < len(input) * size <= row or chunk_size * row % size != 0 or place in _rooms:
        return None
    room = _rooms[place] = _Room(weight)
    return room


def _place(waiting: Tensor, x: Tensor, start: int, stop: int) -> Tensor:
    """Return the memory of a chunk's stored logits (N, C): the first bytes of the chunk's rows."""
    n_bytes = len(x) * (stop - start) * x.dtype.itemsize
    return waiting[start:stop].view(-1).view(torch.uint8)[:n_bytes].view(x.dtype).view(len(x), stop - start)


# --- the operator that a compiler sees -------------------------------------------------------------------------------


@library.custom_op("stopgrad::linear_cross_entropy", mutates_args=())
def _operator(
    input: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, where: Tensor | None, chunk_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _check_range(labels, len(weight))
    return _forward(input, weight, bias, labels, where, chunk_size, None)


@_operator.register_fake
def _(input: Tensor, weight: Tensor, *_: object) -> tuple[Tensor, ...]:
    return tuple(input.new_empty(len(input), dtype=_precision(input, weight)) for _ in range(4))


@library.custom_op("stopgrad::linear_cross_entropy_backward", mutates_args=())
def _backward_operator(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    where: Tensor | None,
    shift: Tensor,
    total: Tensor,
    margin: Tensor,
    cotangent: Tensor,
    chunk_size: int,
    needs: Sequence[bool],
) -> list[Tensor]:
    kept = _Kept(input, weight, bias, labels, where, shift, total, margin)
    gradients = _backward(kept, cotangent, chunk_size, needs, waiting=None)
    return [gradient for gradient in gradients if gradient is not None]


@_backward_operator.register_fake
def _(*arguments: Any) -> list[Tensor]:
    input, weight, bias, _, _, shift, *_, needs = arguments
    parameters = (input, weight, bias, shift)
    return [
        tensor.new_empty(tensor.shape)
        for tensor, need in zip(parameters, needs, strict=True)
        if need and tensor is not None
    ]


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.chunk_size = inputs
    ctx.save_for_backward(*tensors, *output[1:])


def _differentiate(ctx: Any, cotangent: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    needs = [*map(bool, ctx.needs_input_grad[:3]), False]
    found = iter(_backward_operator(*ctx.saved_tensors, cotangent, ctx.chunk_size, needs))
    return *(next(found) if need else None for need in needs[:3]), None, None, None


_operator.register_autograd(_differentiate, setup_context=_remember)
