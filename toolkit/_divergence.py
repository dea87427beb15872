"""What stops training that has left the finite numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable

from torch import Tensor

from toolkit.blocks import no_graph

__all__ = ["DivergenceError", "not_finite"]


class DivergenceError(ArithmeticError):
    """Training has left the finite numbers.

    Attributes:
        update: The update after which this was found.
        last_good: The update after which all was finite; the model has its parameters of then.
        name: What is not finite: a parameter, or a part of the state of training.
    """

    def __init__(self, message: str, *, update: int, last_good: int, name: str) -> None:
        super().__init__(message)
        self.update, self.last_good, self.name = update, last_good, name


def not_finite(tensors: Iterable[tuple[str, Tensor]]) -> str | None:
    """Return the name of the first tensor that has a NaN or an infinity."""
    with no_graph():
        for name, tensor in tensors:
            # One sum says that all is finite. If it does not, it may itself have left the range.
            if tensor.is_floating_point() and not math.isfinite(tensor.sum()) and not bool(tensor.isfinite().all()):
                return name
    return None
