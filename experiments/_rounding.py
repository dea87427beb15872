"""Bounds of differences that are rounding: they vary with the processor and the number of threads.

Rounding must not decide whether a run counts, which variant is better, or the words of the report. Imports neither
torch nor toolkit.
"""

from __future__ import annotations

__all__ = ["OF_ONE_PASS", "OF_TRAINING"]

OF_ONE_PASS = {"float32": 2**-17.25, "float64": 2**-39.0}
"""Of a loss, relative, by its type: eps^(3/4), which is room for the rounding of long sums."""

OF_TRAINING = {"float32": 1e-5, "float64": 1e-9}
"""Of an objective at the end of training, which amplifies it; float32 does not resolve much more at all."""
