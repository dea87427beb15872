"""Arithmetic that rounds towards the clean input, so that a bound holds exactly and not to a rounding."""

from __future__ import annotations

import torch
from torch import Tensor

from toolkit.blocks import carries_gradient, no_graph

__all__ = ["add_inward", "follow", "is_positive", "laid_out_as", "round_inward", "shrink", "to_dtype_inward"]


def add_inward(x: Tensor, displacement: Tensor) -> Tensor:
    """Return ``x + displacement``, rounded towards x: never farther from x than the exact sum. Both have one dtype."""
    total = x + displacement
    # Knuth's two-sum (The Art of Computer Programming 2, section 4.2.2, theorem B): total + error is the exact sum.
    virtual = total - x
    error = total - virtual
    torch.sub(x, error, out=error).add_(torch.sub(displacement, virtual, out=virtual))
    return _step_towards(x, total, too_far=error.mul_(-displacement.sign()).sign_().clamp_(min=0))


def to_dtype_inward(displacement: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `displacement` in a dtype, rounded towards zero."""
    rounded = displacement.to(dtype)
    too_far = is_positive(rounded.to(displacement.dtype).abs() - displacement.abs()).to(dtype)
    return _step_towards(torch.zeros_like(rounded), rounded, too_far=too_far)


def follow(value: Tensor, source: Tensor) -> Tensor:
    """Return `value`, to the bit, with the derivative of `source`, from which it differs only by a rounding."""
    if not carries_gradient(source):
        return value
    with no_graph():
        constant = source.clone()
    return value + (source - constant)


def round_inward(value: float | Tensor, x: Tensor, inwards: float) -> Tensor:
    """Return one side of the box in x's dtype, rounded inwards."""
    exact = torch.as_tensor(value, dtype=torch.float64, device=x.device)
    rounded = exact.to(x.dtype)
    if torch.equal(rounded.double(), exact):
        return rounded
    outside = rounded.double() < exact if inwards > 0 else rounded.double() > exact
    return torch.where(outside, torch.nextafter(rounded, torch.full_like(rounded, inwards)), rounded)


def shrink(example: Tensor, x: Tensor, radius: Tensor, order: int) -> Tensor:
    """Return `example`, moved towards `x` by the roundings that took it out of the ball.

    It is shrunk in float64, then rounded towards the clean input. Samples inside stay the same, to the bit.

    Args:
        example: Points in the ball up to rounding, (N, ...).
        x: Centre of the ball, (N, ...).
        radius: Radius, float64, (N or 1, 1, ...).
        order: Order of the norm, 1 or 2.
    """
    with no_graph():
        centre = x.double()
        offset = example.double() - centre
        slack = (x[:1].numel() + 8) * torch.finfo(torch.float64).eps  # rounding of the norm itself
        size = torch.linalg.vector_norm(offset, order, tuple(range(1, x.dim())), keepdim=True)
        # The factor is a little smaller than necessary, so that a second call would not shrink again.
        offset *= radius * (1 - 2 * slack) / size.masked_fill(size == 0, 1)
        moved = (centre + offset).to(x.dtype)
        too_far = (moved.double() - centre).abs_().sub_(offset.abs_()).sign_().clamp_(min=0).to(x.dtype)
        inside = torch.where(size > radius * (1 - slack), _step_towards(x, moved, too_far=too_far), example)
    return laid_out_as(x, follow(inside, example))


def _step_towards(target: Tensor, value: Tensor, *, too_far: Tensor) -> Tensor:
    """Return the next number towards `target` where `too_far` is 1, and `value` where it is 0; overwrite `too_far`."""
    towards = torch.lerp(value, target, too_far, out=too_far)
    return torch.nextafter(value, towards, out=towards)


def laid_out_as(x: Tensor, example: Tensor) -> Tensor:
    """Return `example` with the strides that a copy of `x` would have."""
    with no_graph():
        like = torch.empty_like(x)
    return example if example.stride() == like.stride() else like.copy_(example)


def is_positive(input: Tensor) -> Tensor:
    """Return 1 or 0 in the input's dtype: on a CPU several times faster than a comparison and `torch.where`."""
    return input.sign().clamp(min=0)
