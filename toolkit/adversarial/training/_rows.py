"""Random numbers of the rows of a batch that several ranks share: each row gets the numbers it would get on one rank.

N rows of the joined batch, n of them on this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["RowsOfBatch"]

_SIZE_AT = {torch.rand: 0, torch.randn: 0, torch.randint: None}


class RowsOfBatch(TorchFunctionMode):
    """Turns a generator's draws for n rows into draws for all N rows, and keeps this rank's.

    Drawing for rows that others have is cheap beside the gradients of an attack, and a generator cannot be moved ahead
    by a number of rows: the count of numbers behind a normal draw is internal to torch.

    Args:
        generator: The generator whose draws change; other generators draw as usual.
        rows: This rank's rows of the N.
        total: N.
    """

    def __init__(self, generator: torch.Generator, *, rows: slice, total: int) -> None:
        super().__init__()
        self.generator, self.rows, self.total = generator, rows, total
        self.own = len(range(total)[rows])

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation of torch, with a draw of n rows replaced by a draw of N."""
        kwargs = dict(kwargs or {})
        if func not in _SIZE_AT or kwargs.get("generator") is not self.generator:
            return func(*args, **kwargs)
        before, size = _split(func, args, kwargs)
        if not size or size[0] != self.own:
            return func(*args, **kwargs)
        drawn = func(*before, (self.total, *size[1:]), **kwargs)
        return drawn[self.rows].clone()


def _split(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    """Return the arguments before the size, and the size, which is removed from `kwargs` if it is there."""
    if "size" in kwargs:
        return args, tuple(kwargs.pop("size"))
    if func is torch.randint or (args and isinstance(args[0], tuple | list)):
        return args[:-1], tuple(args[-1])
    return (), tuple(args)
