"""Bounds of rounding errors: smaller differences decide neither convergence, nor the best fit, nor the nearest mean.

Two numbers that are equal in exact arithmetic differ in their last bits, by the processor, the number of threads and
the order of the samples. Here they count as equal, and the first comes first.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["ROUNDING", "leaders"]

# Rounding error of a log-likelihood, in units of 1 nat and its size, by the type of the data.
ROUNDING = {torch.float64: 1e-14, torch.float32: 1e-7}

# Nats per sample, by the type of the data: starts that end closer to each other than this found the same maximum.
_TIE = {torch.float64: 1e-9, torch.float32: 1e-6}


def leaders(merits: Sequence[tuple[bool, float]], dtype: torch.dtype, count: int = 1) -> list[int]:
    """Return the places of the best fits, best first: sound ones before others, then by log-likelihood.

    Fits to the same maximum differ by rounding. They count as equal, and the first comes first; otherwise the last bit
    would decide the order of the components.

    Args:
        merits: Whether each fit is sound, and its log-likelihood, nats per sample.
        dtype: Floating-point type of the data.
        count: The most places to return.
    """
    tie = _TIE.get(dtype, _TIE[torch.float64])
    left = list(range(len(merits)))
    found: list[int] = []
    while left and len(found) < count:
        sound, most = max(merits[i] for i in left)
        found.append(next(i for i in left if merits[i][0] == sound and merits[i][1] >= most - tie))
        left.remove(found[-1])
    return found
