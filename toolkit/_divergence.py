"""The error that stops training when values are no longer finite."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

from torch import Tensor

from toolkit.blocks import no_graph

__all__ = ["DivergenceError", "not_finite"]


class DivergenceError(ArithmeticError):
    """Training has diverged.

    Attributes:
        update: The update after which the divergence was found.
        last_good: The last update found good; the model's parameters after that update are restored.
        name: The name of the diverged parameter, or of the diverged part of the state of training.
    """

    def __init__(self, message: str, *, update: int, last_good: int, name: str) -> None:
        super().__init__(message)
        self.update, self.last_good, self.name = update, last_good, name


def not_finite(tensors: Iterable[tuple[str, Tensor]], *, infinite: Collection[str] = ()) -> str | None:
    """Return the name of the first tensor that has a NaN or an infinity, or None.

    Args:
        tensors: Pairs of name and tensor.
        infinite: Names of tensors that may have infinities, in which only a NaN counts.
    """
    with no_graph():
        for name, tensor in tensors:
            if not tensor.is_floating_point():
                continue
            if name in infinite:
                if bool(tensor.isnan().any()):
                    return name
            # A finite sum means that all entries are finite. Any other sum may itself have overflowed.
            elif not math.isfinite(tensor.sum()) and not bool(tensor.isfinite().all()):
                return name
    return None
