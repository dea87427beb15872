"""Sums over all samples but one."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["of_the_others"]

Scan = Callable[[Tensor, int], Tensor]
Join = Callable[[Tensor, Tensor], Tensor]


def of_the_others(values: Tensor, scan: Scan, join: Join) -> Tensor:
    """Return, for each entry along dimension 0, the sum of the other ones.

    It is the sum of those before joined with that of those after: nothing is subtracted, so nothing cancels. The sum of
    no values is never joined: for a log-sum it is ``-inf``, where `torch.logaddexp` has no second derivative.

    Args:
        values: (S, *), S at least 2.
        scan: The cumulative sum along a dimension.
        join: The sum of two sums.
    """
    before = scan(values[:-1], 0)
    after = scan(values[1:].flip(0), 0).flip(0)
    return torch.cat([after[:1], join(before[:-1], after[1:]), before[-1:]])
