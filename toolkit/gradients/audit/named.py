"""Places as a user names them: a line, a function or a class, and the stops of an audit there."""

from __future__ import annotations

import inspect
import linecache
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from toolkit.blocks import Site
from toolkit.gradients.audit.answer import Audit
from toolkit.gradients.audit.source import lines_of, text_of

__all__ = ["NamedPlace", "Place", "named_place", "told"]

Place = str | type | Callable[..., Any]
"""A line ``"model.py:88"``, also with its column, ``"model.py:88:12"``; a function; or a class."""

_LINE = re.compile(r"(?P<file>.+\.\w+):(?P<line>\d+)|(?P<path>.+):(?P<row>\d+):(?P<column>\d+)")
_MOST_NEAR = 3


@dataclass(frozen=True)
class NamedPlace:
    """Some lines of a file.

    Attributes:
        name: The place as it was given.
        file: The file, or the end of its path.
        lines: The numbers of the lines.
        column: The column of the stop, from 1; 0 for every column.
    """

    name: str
    file: str
    lines: range
    column: int = 0

    def source(self, found: Audit) -> str:
        """Return the code of a line; empty for several lines, and without the file."""
        file = next((site.file for site in found.sites.values() if self._is_in(site.file)), self.file)
        return linecache.getline(file, self.lines.start).strip() if len(self.lines) == 1 else ""

    def stops(self, found: Audit) -> list[str]:
        """Return the stops of an audit at this place."""
        return [name for name in _stops(found) if self._has(found.sites[name], found.kinds[name])]

    def nearest(self, found: Audit) -> list[str]:
        """Return the stops that are nearest to this place, those of its file first."""

        def distance(name: str) -> tuple[bool, int]:
            site = found.sites[name]
            return not self._is_in(site.file), abs(site.line - self.lines.start)

        return sorted(_stops(found), key=distance)[:_MOST_NEAR]

    def _has(self, site: Site, kind: str) -> bool:
        is_near = bool(set(self.lines) & set(lines_of(site, kind)))
        return self._is_in(site.file) and is_near and self.column in (0, site.column)

    def _is_in(self, file: str) -> bool:
        parts = PurePath(self.file).parts
        return PurePath(os.path.realpath(file)).parts[-len(parts) :] == parts


def named_place(place: object) -> NamedPlace | None:
    """Return the place that a user names; None for another object, such as the name of a block.

    Raises:
        ValueError: If a function or class has no source.
    """
    if isinstance(place, str) and (match := _LINE.fullmatch(place)):
        line = int(match["line"] or match["row"])
        return NamedPlace(place, match["file"] or match["path"], range(line, line + 1), int(match["column"] or 0))
    if not (inspect.isroutine(place) or isinstance(place, type)):
        return None
    subject: Any = inspect.unwrap(place) if inspect.isroutine(place) else place
    try:
        lines, first = inspect.getsourcelines(subject)
        file = os.path.realpath(inspect.getfile(subject))
    except (OSError, TypeError) as error:
        raise ValueError(f"A place should have a source. Found {place!r}.") from error
    return NamedPlace(subject.__qualname__, file, range(first, first + len(lines)))


def told(found: Audit, name: str) -> str:
    """Return a stop in words: its place, function and source text."""
    site = found.sites[name]
    return f"{site} `{text_of(site, found.kinds[name])}` in {site.function}"


def _stops(found: Audit) -> list[str]:
    names = [effect.name for effect in found.effects]
    return list(dict.fromkeys([*names, *(entry.site for entry in found.unopened)]))
