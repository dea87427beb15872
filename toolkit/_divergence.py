"""What stops training that has left the finite numbers."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

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


def not_finite(tensors: Iterable[tuple[str, Tensor]], *, infinite: Collection[str] = ()) -> str | None:
    """Return the name of the first tensor that has a NaN or an infinity.

    Args:
        tensors: With their names.
        infinite: Names of tensors that may have infinities: of these only a NaN counts.
    """
    with no_graph():
        for name, tensor in tensors:
            if not tensor.is_floating_point():
                continue
            if name in infinite:
                if bool(tensor.isnan().any()):
                    return name
            # One sum says that all is finite. If it does not, it may itself have left the range.
            elif not math.isfinite(tensor.sum()) and not bool(tensor.isfinite().all()):
                return name
    return None
