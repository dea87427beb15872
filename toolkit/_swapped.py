"""Sets an attribute of something for the length of a ``with``. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["swapped"]


@contextmanager
def swapped(owner: Any, name: str, value: object) -> Iterator[None]:
    """Set an attribute for the length of a ``with``; afterwards it is what it was before."""
    outer = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, outer)
