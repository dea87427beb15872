"""Expected stops: a table in a TOML file that says which place should stop which gradient.

A stop is known by its file, its function and the source text of its expression, so that a table changes when a stop
moves to another function, and not when its line number changes. Files are relative to the folder of the table.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import sys
import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from toolkit.blocks import Site
from toolkit.gradients._parts import INSTALLED
from toolkit.gradients.audit.answer import Audit
from toolkit.gradients.audit.source import text_of
from toolkit.gradients.verdict import Kind

__all__ = ["Difference", "Stop", "differences", "read_tables", "stops_of", "write_tables"]

_NOT_OPENED = "not opened"
_VERDICTS = frozenset({*get_args(Kind), _NOT_OPENED})
_KEYS = frozenset({"file", "function", "source", "verdict"})
_HEAD = """\
# Stops of the gradient, and the effect that each should have. Lines do not count: a stop is known by its file, its
# function and its source text. Written by `{command}`; changes are made by the same command.
"""


@dataclass(frozen=True)
class Stop:
    """A stop of an audited program.

    Attributes:
        file: The file, relative to the folder of the table; in an installed package, relative to the folder from which
            Python imports it.
        function: The function, by its qualified name.
        source: The expression that stops the gradient.
        verdict: The kind of the verdict, or ``"not opened"``.
        parameters: The parameters that the verdict names; ``target.*`` stands for all parameters of a module.
        backward: The backward pass of a training step, from 1; 0 for a loss function.
        site: The place of a stop that was found.
    """

    file: str
    function: str
    source: str
    verdict: str
    parameters: tuple[str, ...] = ()
    backward: int = 0
    site: Site | None = field(default=None, compare=False)

    @property
    def identity(self) -> tuple[str, str, str, int]:
        """File, function, source text and backward pass: two stops that share these are the same."""
        return self.file, self.function, self.source, self.backward

    @property
    def effect(self) -> str:
        """The verdict with its parameters."""
        return f"{self.verdict} {', '.join(self.parameters)}" if self.parameters else self.verdict

    def is_met_by(self, found: Stop) -> bool:
        """Return whether a stop has the expected effect.

        Rounding decides between ``redundant`` and ``noise``, so each is accepted for the other.
        """
        silent = {"redundant", "noise"}
        same = self.verdict == found.verdict or {self.verdict, found.verdict} == silent
        return same and set(self.parameters) == set(found.parameters)

    def to_dict(self) -> dict[str, Any]:
        """Return the row of a table."""
        row: dict[str, Any] = {"file": self.file, "function": self.function, "source": self.source}
        row |= {"backward": self.backward} if self.backward else {}
        row["verdict"] = self.verdict
        return row | ({"parameters": list(self.parameters)} if self.parameters else {})


@dataclass(frozen=True)
class Difference:
    """A stop that is not as expected.

    Attributes:
        stop: The stop: as it was found, or as it was expected if it is gone.
        text: The difference in words.
    """

    stop: Stop
    text: str

    def __str__(self) -> str:
        line = f":{self.stop.site.line}" if self.stop.site else ""
        backward = f", backward pass {self.stop.backward}" if self.stop.backward > 1 else ""
        return f"{self.stop.file}{line}: `{self.stop.source}` in {self.stop.function}{backward}: {self.text}"


def stops_of(found: Audit, folder: Path, backward: int = 0) -> list[Stop]:
    """Return the stops of an answer, sorted by their place.

    Args:
        found: The answer.
        folder: The folder of the table, to which files are relative.
        backward: See `Stop`.
    """
    effects: dict[str, tuple[str, tuple[str, ...]]] = {entry.site: (_NOT_OPENED, ()) for entry in found.unopened}
    for effect in found.effects:
        effects[effect.name] = effect.verdict.kind, _by_module(effect.verdict.parameters, found.blocked)
    ordered = sorted(
        effects, key=lambda name: (found.sites[name].file, found.sites[name].line, found.sites[name].column)
    )
    return [_stop(found.sites[name], found.kinds[name], *effects[name], folder, backward) for name in ordered]


def differences(expected: Sequence[Stop], found: Sequence[Stop]) -> list[Difference]:
    """Return the stops that are gone, new, or have another effect than expected; sorted as they were found."""
    told = []
    for identity in dict.fromkeys(stop.identity for stop in [*found, *expected]):
        pairs = ([stop for stop in stops if stop.identity == identity] for stops in (expected, found))
        for wanted, seen in itertools.zip_longest(*pairs):
            if seen is None:
                told.append(Difference(wanted, f"the stop is gone; expected {wanted.effect}"))
            elif wanted is None:
                told.append(Difference(seen, f"a new stop: {seen.effect}"))
            elif not wanted.is_met_by(seen):
                told.append(Difference(seen, f"{seen.effect}; expected {wanted.effect}"))
    return told


def read_tables(path: Path) -> dict[str, list[Stop]]:
    """Return name -> expected stops of every table of a file.

    Raises:
        ValueError: If the file does not hold such tables.
    """
    try:
        tables = tomllib.loads(path.read_text("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"`{path.name}` should be a TOML file. Found: {error}.") from error
    return {name: [_read(row, path.name) for row in _rows(table, path.name)] for name, table in tables.items()}


def write_tables(path: Path, tables: Mapping[str, Iterable[Stop]], command: str) -> None:
    """Write tables of expected stops, with the command that makes them in the first lines."""
    rows = [_row(name, stop) for name, stops in tables.items() for stop in stops]
    path.write_text("\n".join([_HEAD.format(command=" ".join(command.split())), *rows]), "utf-8")


def _stop(site: Site, kind: str, verdict: str, parameters: tuple[str, ...], folder: Path, backward: int) -> Stop:
    source = text_of(site, kind)
    return Stop(_file_from(folder, site.file), site.function, source, verdict, parameters, backward, site)


def _file_from(folder: Path, file: str) -> str:
    """Return a path that is the same on other machines."""
    roots = [root for root in map(Path, sys.path) if Path(file).is_relative_to(root)]
    if file.startswith(tuple(INSTALLED)) and roots:
        return Path(file).relative_to(max(roots, key=lambda root: len(root.parts))).as_posix()
    return Path(os.path.relpath(file, folder)).as_posix()


def _by_module(names: Collection[str], known: Iterable[str]) -> tuple[str, ...]:
    """Return names of parameters, with ``module.*`` for a module all of whose parameters are among them."""
    others = set(known).difference(names)
    found: dict[str, None] = {}
    for name in names:
        levels = name.split(".")
        modules = (".".join(levels[:depth]) + "." for depth in range(1, len(levels)))
        whole = next((module for module in modules if not any(other.startswith(module) for other in others)), "")
        found[f"{whole}*" if whole else name] = None
    return tuple(sorted(found))


def _rows(table: Any, file: str) -> list[Any]:
    if not isinstance(table, list):
        raise ValueError(f"`{file}` should hold arrays of tables. Found {table!r}.")
    return table


def _read(row: Any, file: str) -> Stop:
    has_keys = isinstance(row, dict) and _KEYS <= row.keys() <= _KEYS | {"backward", "parameters"}
    if not has_keys or not all(isinstance(row[key], str) for key in _KEYS):
        raise ValueError(f"A stop in `{file}` should have the texts file, function, source, verdict. Found {row!r}.")
    if row["verdict"] not in _VERDICTS:
        raise ValueError(f"A verdict in `{file}` should be one of {sorted(_VERDICTS)}. Found {row['verdict']!r}.")
    return Stop(**{**row, "parameters": tuple(row.get("parameters", ()))})


def _row(name: str, stop: Stop) -> str:
    values = (f"{key} = {_toml(value)}\n" for key, value in stop.to_dict().items())
    return f"[[{name if re.fullmatch(r'[A-Za-z0-9_-]+', name) else _toml(name)}]]\n{''.join(values)}"


def _toml(value: str | int | list[str]) -> str:
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
