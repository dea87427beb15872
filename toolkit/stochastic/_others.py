"""Sums over all samples but one."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["of_the_others"]

Scan = Callable[[Tensor, int], Tensor]
Join = Callable[[Tensor, Tensor], Tensor]


def of_the_others(values: Tensor, scan: Scan, zero: float, join: Join) -> Tensor:
    """Return, for each entry along dimension 0, the sum of the other ones.

    It is the sum of those before joined with that of those after: nothing is subtracted, so nothing cancels.

    Args:
        values: (S, *), S at least 2.
        scan: The cumulative sum along a dimension.
        zero: The sum of no values.
        join: The sum of two sums.
    """
    edge = torch.full_like(values[:1], zero)
    before = torch.cat([edge, scan(values[:-1], 0)])
    after = torch.cat([scan(values[1:].flip(0), 0).flip(0), edge])
    return join(before, after)
