"""Numbers as the report writes them: medians with their ranges, times, memory. Imports no torch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from toolkit.runner._chart import significant

__all__ = ["NOTHING", "brief", "degrees_of", "duration", "in_bytes", "ranged", "spread"]

# A smaller number in a table is rounding.
NOTHING = 1e-9


def ranged(values: Sequence[float | None], write: Callable[[float], str]) -> str:
    """Write the median, and the range of the seeds where it shows."""
    finite = [value for value in values if value is not None and math.isfinite(value)]
    if not finite:
        return "–"
    texts = [write(value) for value in (statistics.median(finite), min(finite), max(finite))]
    return texts[0] if texts[1] == texts[2] else f"{texts[0]} ({texts[1]} … {texts[2]})"


def spread(values: Sequence[float]) -> str:
    """Write the mean and the standard deviation of the finite values."""
    finite: NDArray[np.float64] = np.asarray([value for value in values if math.isfinite(value)])
    if not finite.size:
        return "–"
    if finite.size == 1:
        return f"{finite[0]:.5g}"
    return f"{finite.mean():.5g} ± {finite.std(ddof=1):.2g}"


def brief(value: float) -> str:
    """Write a number for a large table; a number that is only rounding becomes 0."""
    return significant(value, 4) if abs(value) > NOTHING else "0"


def duration(seconds: float) -> str:
    """Write a time."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def in_bytes(count: float) -> str:
    """Write an amount of memory in its largest fitting unit."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.3g} {unit}" if count < 1000 else f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.3g} GiB"


def degrees_of(cosine: float | None) -> float:
    """Return the angle of a cosine, 0 if it is only rounding of a cosine near 1; NaN without a cosine."""
    if cosine is None:
        return math.nan
    angle = math.degrees(math.acos(min(1.0, max(-1.0, cosine))))
    return angle if angle > 1e-4 else 0.0
