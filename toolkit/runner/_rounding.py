"""Bounds below which a relative difference counts as rounding, which varies with processor and number of threads.

Rounding must not decide whether a run counts, which variant is better, or the words of the report. Imports neither
torch nor toolkit.
"""

from __future__ import annotations

__all__ = ["OF_ONE_PASS", "OF_TARGET", "OF_TRAINING"]

OF_ONE_PASS = {"float32": 2**-17.25, "float64": 2**-39.0}
"""Relative bound for a loss, by dtype: eps^(3/4), which leaves room for the rounding of long sums."""

OF_TRAINING = {"float32": 1e-5, "float64": 1e-9}
"""Relative bound for an objective after training, which amplifies rounding; float32 hardly resolves more."""

OF_TARGET = {"float32": 2**-7.5, "float64": 2**-17.0}
"""Relative bound for a gradient and its target, by dtype: eps^(1/3), as near an optimum both are small differences."""
