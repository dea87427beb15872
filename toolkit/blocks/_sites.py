"""Places in the source: where a block was met, and how its file is called."""

from __future__ import annotations

import dis
import functools
import itertools
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

__all__ = ["Site", "caller", "site_of"]

# Modules that only pass a call on: contexts, decorators of generator functions, compiled code.
_PASSING = ("contextlib", "torch.utils._contextlib", "torch._dynamo.eval_frame")
_ENTERS = dis.opmap.get("BEFORE_WITH")  # the instruction that enters a context, up to Python 3.13
_ROOM = os.path.normcase(f"{Path(__file__).parent}{os.sep}")


@dataclass(frozen=True)
class Site:
    """Where in the source a block was met: file, line and column (both from 1), and the function."""

    file: str
    line: int
    column: int
    function: str

    def __str__(self) -> str:
        return f"{_short_path(self.file)}:{self.line}:{self.column}"


# (id of the code, instruction) -> the code, which is kept so that its id stays its own, and the site.
_known: dict[tuple[int, int], tuple[CodeType, Site]] = {}
_MOST_KNOWN = 4096


def site_of(frame: FrameType) -> Site:
    """Return the place that a frame has reached."""
    key = id(frame.f_code), frame.f_lasti
    found = _known.get(key)
    if found is None:
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        found = _known[key] = frame.f_code, _searched_site(frame)
    return found[1]


def _searched_site(frame: FrameType) -> Site:
    code = frame.f_code
    reached = _further_items(code).get(frame.f_lasti, frame.f_lasti)
    positions = next(itertools.islice(code.co_positions(), reached // 2, None))
    line, column = positions[0] or frame.f_lineno, positions[2]
    return Site(code.co_filename, line, 0 if column is None else column + 1, code.co_qualname)


@functools.lru_cache(256)
def _further_items(code: CodeType) -> dict[int, int]:
    """Return for each context of a ``with``, except the first: the instruction that enters it -> the one before it.

    Before Python 3.13 all contexts of a ``with`` are entered at its own place. The instruction before that has the
    place of the expression.
    """
    instructions, places = code.co_code, list(code.co_positions())
    first, found = dict[Any, Any](), dict[int, int]()
    for offset in range(0, len(instructions), 2):
        if instructions[offset] == _ENTERS:
            expression = places[offset // 2 - 1]
            if first.setdefault(places[offset // 2], expression) != expression:
                found[offset] = offset - 2
    return found


@functools.lru_cache(1024)
def _is_in_room(file: str) -> bool:
    return os.path.normcase(file).startswith(_ROOM)


def caller() -> Site:
    """Return the place outside of this room from which a block was reached."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (_is_in_room(frame.f_code.co_filename) or frame.f_globals.get("__name__") in _PASSING):
        frame = frame.f_back
    assert frame is not None
    return site_of(frame)


def _short_path(file: str) -> str:
    return _short_path_from(file, os.getcwd())  # noqa: PTH109 - a fifth of the time, for every place that is met


@functools.cache  # besides the time it saves: a file keeps its name when `sys.path` changes later
def _short_path_from(file: str, folder: str) -> str:
    """Return a path as seen from a folder, or else from where Python imports, if no other file is found there by it."""
    path = Path(folder, file)
    if path.is_relative_to(folder):
        return str(path.relative_to(folder))
    roots = [Path(folder, entry) for entry in sys.path if isinstance(entry, str)]
    above = [root for root in roots if path.is_relative_to(root)]
    if not above:
        return str(path)
    short = path.relative_to(max(above, key=lambda root: len(root.parts)))
    others = {os.path.realpath(root / short) for root in (Path(folder), *roots)} - {os.path.realpath(path)}
    return str(path if any(map(os.path.exists, others)) else short)
