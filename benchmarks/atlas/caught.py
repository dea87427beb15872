"""The loss of code that differentiates it by itself."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["caught"]


class _Caught(Exception):
    """Leaves the code at the call of ``backward``."""


def caught(run: Callable[[], object], number: int = 0) -> Callable[[], Tensor]:
    """Return a function that runs `run` up to a call of ``backward``, and returns the loss that was passed to it.

    Args:
        run: Runs a training step.
        number: How many losses are differentiated before it.
    """

    def loss() -> Tensor:
        found: list[Tensor] = []
        original = torch.Tensor.backward

        def backward(self: Tensor, *args: object, **kwargs: object) -> None:
            if not any(self is each for each in found):  # a mode calls the method once more
                found.append(self)
            if len(found) > number:
                raise _Caught
            original(self, *args, **kwargs)

        torch.Tensor.backward = backward  # type: ignore[method-assign]
        try:
            run()
        except _Caught:
            return found[number]
        finally:
            torch.Tensor.backward = original  # type: ignore[method-assign]
        raise ValueError(f"`number` should be below the count of losses. Found {number}, and {len(found)} losses.")

    return loss
