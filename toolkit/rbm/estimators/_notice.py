"""One line about a fit that takes longer than its user may expect."""

from __future__ import annotations

import sys
import time

__all__ = ["Notice"]

_PATIENCE = 2.0  # seconds


class Notice:
    """Prints the remaining time of a fit, once, to stderr.

    Args:
        name: Name of the estimator.
        epochs: Epochs of the fit.
        n_batches: Batches of an epoch.

    Example:
        >>> Notice("BernoulliRBM", epochs=1000, n_batches=1)(update=1)  # after less than two seconds
    """

    def __init__(self, name: str, epochs: int, n_batches: int) -> None:
        self._name, self._epochs, self._n_batches = name, epochs, n_batches
        self._begun, self._done = time.perf_counter(), False

    def __call__(self, update: int) -> None:
        """Look at the clock after an update."""
        passed = time.perf_counter() - self._begun
        if self._done or passed < _PATIENCE:
            return
        self._done = True
        left = passed * (self._epochs * self._n_batches / update - 1)
        print(
            f"{self._name}: {update // self._n_batches} of {self._epochs} epochs in {passed:.0f} s, about {left:.0f} s "
            "to go. `n_iter` sets the epochs, `verbose=1` shows progress, `verbose=0` nothing.",
            file=sys.stderr,
        )
