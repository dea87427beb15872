"""Names of a package that are imported when they are first used."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Collection
from typing import Any

__all__ = ["lazy"]


def lazy(package: str, source: str, names: Collection[str]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package that imports these names from the module `source`, once."""

    def find(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        found = getattr(importlib.import_module(source), name)
        setattr(sys.modules[package], name, found)
        return found

    return find
