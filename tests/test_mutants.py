"""The table of mutants is up to date: each line is there, once, and breaking it leaves a program."""

import ast
import functools
from pathlib import Path

import pytest
from folders import ROOT, TESTS
from mutants import MUTANTS, TABLE, Mutant, texts


@functools.cache
def statements(file: Path) -> list[str]:
    """Return the text of a module, cut before each of its statements."""
    lines = texts(ROOT)[file].splitlines(keepends=True)
    body = ast.parse("".join(lines)).body
    starts = [min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))]) - 1 for node in body]
    return ["".join(lines[start:end]) for start, end in zip([0, *starts], [*starts, len(lines)], strict=True)]


def stale(mutant: Mutant) -> str:
    """Return why a mutant cannot be made, or nothing."""
    try:
        file = mutant.file(ROOT)
        parts = [part for part in statements(file) if mutant.line in part] or [texts(ROOT)[file]]
        ast.parse(parts[0].replace(mutant.line, mutant.broken))  # to parse the whole file takes ten times as long
    except (LookupError, SyntaxError) as error:
        return str(error)
    missing = [name for name in mutant.tests if len(list(TESTS.rglob(f"{name}.py"))) != 1]
    return f"{mutant.line!r} should name a file of tests. Found {missing}." if missing or not mutant.tests else ""


def test_lines_are_there_once_and_breaking_them_leaves_a_program():
    found = list(filter(None, map(stale, MUTANTS)))
    assert not found, "\n".join(found)


@pytest.mark.parametrize("line", ["no line of any module", "from __future__ import annotations\n"])
def test_a_line_that_is_gone_or_there_twice_is_an_error(line):
    with pytest.raises(LookupError, match="The line of a mutant should occur once"):
        Mutant("em", line, "", ("test_em",)).file(ROOT)


def test_every_room_has_mutants():
    rooms = {path.name for path in (ROOT / "toolkit").iterdir() if path.is_dir() and path.name[0] != "_"}
    assert rooms | {"lint"} <= set(TABLE)
    assert len(MUTANTS) >= 60
