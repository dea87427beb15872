"""The algorithms of the gallery beside live peers, or beside their plain forms: a module for each family.

    python -m benchmarks gallery

Peers that are missing are left out with a word; the dependency group ``gallery-peers`` has them.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Iterator

from benchmarks._measure import Row

ON_REQUEST = True


def rows() -> Iterator[Row]:
    """Yield the rows of every family."""
    for family in pkgutil.iter_modules(__path__, f"{__name__}."):
        try:
            yield from importlib.import_module(family.name).rows()
        except ModuleNotFoundError as error:
            name = family.name.rpartition(".")[2]
            print(f"{name}: stopped, because the optional peer {error.name!r} is not installed", file=sys.stderr)
