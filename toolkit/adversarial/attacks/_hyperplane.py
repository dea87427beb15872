"""The shortest way to a hyperplane inside a box: where a linearised model changes its mind.

N samples, each of shape (...) with D features in all.
"""

from __future__ import annotations

import torch
from torch import Tensor

from toolkit.adversarial.balls import Norm
from toolkit.adversarial.balls.box import column, sum_of, wide
from toolkit.blocks import no_graph

__all__ = ["ORDER", "inner", "reach_together", "shortest_move"]

ORDER: dict[Norm, float] = {"linf": torch.inf, "l2": 2, "l1": 1}


def shortest_move(
    norm: Norm,
    point: Tensor,
    slope: Tensor,
    gain: Tensor,
    lower: Tensor,
    upper: Tensor,
    scale: Tensor | None = None,
) -> Tensor:
    """Return the shortest d with ``slope . d = gain`` and ``lower <= point + d <= upper``, exactly.

    The conditions of Karush, Kuhn and Tucker give ``|d_i| = min(t r_i, room_i)``, where the rate r_i is 1 in Linf, or
    the scale of the feature, and ``|slope_i|`` in L2, and t is such that the gain is reached; in L1 the steepest
    coordinates use up their room one after the other. If the hyperplane does not meet the box, d leads to the corner
    nearest to it.

    Args:
        norm: The norm in which d is shortest.
        point: Start of the move, (N, ...), inside of the box.
        slope: Normal of the hyperplane, (N, ...).
        gain: Change of ``slope . x`` to reach, (N,), of either sign.
        lower: Least value in the box.
        upper: Greatest value in the box.
        scale: Units of the features in Linf, broadcast to `point`; 0 where a feature does not move. None: all are 1.

    Returns:
        The move d, (N, ...), in at least single precision. The set of coordinates on the box is not differentiated.
    """
    dtype = wide(point)
    slope, gain, start = slope.to(dtype), gain.to(dtype), point.to(dtype)
    with no_graph():
        towards = (slope * column(gain.sign(), slope)).sign()
        largest = slope.abs().flatten(1).amax(1, keepdim=True)
        largest = largest.masked_fill(largest == 0, 1)
    room = torch.where(towards > 0, upper.to(dtype) - start, start - lower.to(dtype)).masked_fill(towards == 0, 0)
    size = (slope * slope.sign()).flatten(1) / largest  # so that no square overflows or vanishes
    need = (gain * gain.sign())[:, None] / largest
    room = room.flatten(1)
    if norm == "l1":
        length = _greedy(size, room, need)
    elif norm == "l2":
        length = reach_together(size, room, need, size)
    else:
        rate = (size > 0).to(dtype) if scale is None else (size > 0) * scale.to(dtype).expand_as(start).flatten(1)
        length = reach_together(rate, room, need, size)
    return length.view_as(slope) * towards


def inner(slope: Tensor, offset: Tensor) -> Tensor:
    """Return the inner product of every sample, (N,), in at least single precision."""
    return sum_of(slope.to(wide(slope)) * offset.to(wide(offset))).flatten()


def reach_together(rate: Tensor, room: Tensor, need: Tensor, price: Tensor | None = None) -> Tensor:
    """Return ``min(t * rate, room)`` with the t at which ``sum price * min(t * rate, room) = need``, exactly.

    Each round finds the t at which the free coordinates gain the missing part, and holds those that leave their room.
    As t only grows, held coordinates stay held, and the last round is exact (at most D rounds, a few in practice).

    Args:
        rate: Length per unit of t, not negative, (N, ...).
        room: Greatest length, not negative, (N, ...).
        need: The sum to reach, (N or 1, 1, ...). Where it is out of reach, all rooms are used up.
        price: Weights of the sum, not negative, (N, ...). None: all weights are 1.
    """
    paid = rate if price is None else rate * price
    full = torch.where(rate == 0, 0, room)  # also where the room is infinite
    with no_graph():
        held = full == 0
    while True:
        used = full if price is None else full * price
        missing = need - sum_of(torch.where(held, used, 0))
        speed = sum_of(torch.where(held, 0, paid))
        still = speed == 0
        t = torch.where(still, 0, missing / torch.where(still, 1, speed))
        with no_graph():
            leaving = held | (t * rate > room)
        if torch.equal(leaving, held):
            return torch.where(held, full, t * rate)
        held = leaving


def _greedy(size: Tensor, room: Tensor, need: Tensor) -> Tensor:
    """Use up the room of the steepest coordinates first: the fractional knapsack, turned round."""
    size, order = size.sort(dim=1, descending=True, stable=True)
    room = room.gather(1, order)
    gains = torch.where(room > 0, size * room, 0)
    before = torch.cat([torch.zeros_like(need), gains.cumsum(1)[:, :-1]], 1)
    missing = (need - before).clamp(min=0)
    flat = size == 0
    # A room that is used up in part is a quotient; one that is used up is the room itself, free of rounding.
    length = torch.where(gains <= missing, room, missing / torch.where(flat, 1, size)).masked_fill(flat, 0)
    return torch.zeros_like(length).scatter(1, order, length)
