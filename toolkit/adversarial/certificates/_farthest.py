"""The farthest point of a ball and a box in a direction, in closed form: the maximum of a linear function on them.

This module shares no code with the attacks, so that results based on it can check the attacks.

N samples, D features. Directions may be (N, D), or (N, M, D) with everything else (N, 1, D).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from toolkit._checks import choice
from toolkit.adversarial.balls import Bounds, box, per_sample
from toolkit.adversarial.balls._rounding import add_inward, shrink
from toolkit.adversarial.balls.box import check_inputs, ends_of, free, remark_on_width
from toolkit.blocks import no_graph

__all__ = ["FARTHEST", "BallAndBox", "ball_and_box", "least_rate"]


class BallAndBox(NamedTuple):
    """The allowed displacements: ``|d| <= radius``, ``lower <= d <= upper``.

    Attributes:
        norm: ``"linf"``, ``"l2"`` or ``"l1"``.
        start: The clean inputs, flat, (N, D).
        radius: (N or 1, 1).
        lower: Not positive, (N, D).
        upper: Not negative, (N, D).
    """

    norm: str
    start: Tensor
    radius: Tensor
    lower: Tensor
    upper: Tensor

    def farthest(self, towards: Tensor) -> Tensor:
        """Return the displacement that maximises ``towards . d``, of the shape of `towards`: (N, D) or (N, M, D)."""
        radius, lower, upper = self.radius, self.lower, self.upper
        if towards.dim() == 3:
            radius, lower, upper = (tensor[:, None] for tensor in (radius, lower, upper))
        with no_graph():
            return FARTHEST[self.norm](towards, radius, lower, upper)

    def enclosing(self) -> tuple[Tensor, Tensor]:
        """Return the least and greatest displacement of every coordinate, (N, D)."""
        return torch.maximum(self.lower, -self.radius), torch.minimum(self.upper, self.radius)

    def settle(self, displacement: Tensor) -> Tensor:
        """Return a displacement moved inside by a rounding: clipped, and in L1 and L2 shrunk."""
        clipped = torch.clamp(displacement, *self.enclosing())
        if self.norm == "linf":
            return clipped
        size: Tensor = torch.linalg.vector_norm(clipped, int(self.norm[1]), dim=1, keepdim=True)
        return clipped * (self.radius / size.clamp(min=torch.finfo(size.dtype).tiny)).clamp(max=1)

    def inward(self, point: Tensor) -> Tensor:
        """Return inputs, (N, D), moved towards the clean inputs where rounding put them outside of ball or box."""
        lower, upper = (add_inward(self.start, side) for side in self.enclosing())
        inside = torch.clamp(point, lower, upper)
        return inside if self.norm == "linf" else shrink(inside, self.start, self.radius, int(self.norm[1]))

    def rows(self, index: Tensor | slice) -> BallAndBox:
        """Return the set of the selected samples."""
        radius = self.radius.expand(len(self.start), 1)
        return BallAndBox(self.norm, self.start[index], radius[index], self.lower[index], self.upper[index])


def ball_and_box(
    x: Tensor,
    epsilon: float | Tensor,
    norm: str,
    bounds: Bounds,
    mask: Tensor | None,
    dtype: torch.dtype = torch.float64,
) -> BallAndBox:
    """Return the displacements within `epsilon` of `x` that stay inside of `bounds`, 0 where `mask` is False.

    Raises:
        TypeError: If `x` is not floating point, or `mask` not Boolean.
        ValueError: If `x` is not a batch, `norm` is unknown, `epsilon` is negative or not finite, `x` is outside
            of `bounds`, or `mask` does not broadcast to `x`.
    """
    check_inputs("x", x)
    choice("norm", norm, FARTHEST)
    with no_graph():
        start = x.to(dtype)
        box(x, bounds)  # checks in the dtype of x: there 0.1 may be a little more than 0.1, and is still inside
        ends = (end.to(x.device, dtype) for end in ends_of(bounds))
        lower, upper = (take(end.expand_as(start), start) for take, end in zip(_OUTWARD, ends, strict=True))
        change = free(start, mask)
        if change is not None:
            lower, upper = torch.where(change > 0, lower, start), torch.where(change > 0, upper, start)
        radius = per_sample("epsilon", epsilon, x).reshape(-1, 1).to(dtype)
        remark_on_width(epsilon, norm, bounds, x[:1].numel())
        flat = start.flatten(1)
        return BallAndBox(norm, flat, radius, lower.flatten(1) - flat, upper.flatten(1) - flat)


def _farthest_linf(towards: Tensor, radius: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
    """Return the displacement d that maximises ``towards . d``, |d_i| <= radius, lower <= d <= upper."""
    return torch.where(towards > 0, torch.minimum(upper, radius), torch.maximum(lower, -radius))


def _farthest_l2(towards: Tensor, radius: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
    """Return the displacement d that maximises ``towards . d``, |d|_2 <= radius, lower <= d <= upper.

    If the farthest corner of the box is inside of the ball, the result is this corner. Otherwise it is ``clip(t *
    towards)``, whose length grows with t; bisection of log t finds t.
    """
    largest = towards.abs().amax(-1, keepdim=True)
    towards = towards / torch.where(largest > 0, largest, 1)  # no square or product of the bisection leaves the range
    corner = torch.where(towards > 0, upper, lower).masked_fill(towards == 0, 0)
    inside = torch.linalg.vector_norm(corner, dim=-1, keepdim=True) <= radius
    low = radius / torch.linalg.vector_norm(towards, dim=-1, keepdim=True)
    # Here every coordinate has reached its face, or is as long as the radius.
    high = (torch.minimum(corner.abs(), radius) / towards.abs()).masked_fill(towards == 0, 0).amax(-1, keepdim=True)
    for _ in range(_HALVINGS):
        middle = (low * high).sqrt()
        length = torch.linalg.vector_norm(torch.clamp(middle * towards, lower, upper), dim=-1, keepdim=True)
        low, high = torch.where(length <= radius, middle, low), torch.where(length <= radius, high, middle)
    return torch.where(inside, corner, torch.clamp(low * towards, lower, upper))


def _farthest_l1(towards: Tensor, radius: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
    """Return the displacement d that maximises ``towards . d``, |d|_1 <= radius, lower <= d <= upper.

    This is the fractional knapsack: the length is spent on the steepest coordinate until it meets the box, then on the
    next.
    """
    room = torch.minimum(torch.where(towards > 0, upper, -lower), radius).masked_fill(towards == 0, 0)
    order = towards.abs().argsort(dim=-1, descending=True, stable=True)
    sizes = room.gather(-1, order)
    spent = torch.cat([torch.zeros_like(sizes[..., :1]), sizes.cumsum(-1)[..., :-1]], -1)
    taken = torch.minimum(sizes, (radius - spent).clamp(min=0))
    return torch.zeros_like(room).scatter(-1, order, taken) * towards.sign()


def least_rate(rates: Tensor, limits: Tensor, gain: Tensor) -> Tensor:
    """Return the least ``t >= 0`` with ``sum_i min(t rates_i, limits_i) >= gain``; infinite if no such t exists.

    The sum is piecewise linear in t, and a term that meets its limit begins a new piece. The equation is solved on the
    right piece.

    Args:
        rates: Not negative, (N, D).
        limits: Not negative, perhaps infinite, (N, D).
        gain: (N,).
    """
    corners, order = (limits / rates).masked_fill(rates == 0, math.inf).sort(1)
    rates, limits = rates.gather(1, order), limits.gather(1, order)
    # Piece k: the k earliest terms are at their limits, the others still grow.
    none = torch.zeros_like(rates[:, :1])
    reached = torch.cat([none, torch.where(corners.isfinite(), limits, 0).cumsum(1)], 1)
    growing = torch.cat([rates.flip(1).cumsum(1).flip(1), none], 1)
    missing = gain[:, None] - reached
    solved = torch.where(growing > 0, missing / growing, torch.where(missing > 0, math.inf, 0))
    begins = torch.cat([none, corners], 1)
    ends = torch.cat([corners, torch.full_like(none, math.inf)], 1)
    # The sum is concave: solutions of pieces before the right one lie beyond their end, of later pieces before their
    # start.
    return torch.where(solved <= ends, torch.maximum(solved, begins), math.inf).amin(1)


FARTHEST: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "linf": _farthest_linf,
    "l2": _farthest_l2,
    "l1": _farthest_l1,
}
# A clean value that is out of the box by a rounding stays allowed.
_OUTWARD = (torch.minimum, torch.maximum)
# log(high / low) is below 2^11 in float64, and is needed to 2^-53.
_HALVINGS = 64
