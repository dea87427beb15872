"""The table of mutants is up to date: each line is there, once, and breaking it leaves a program."""

import ast

import pytest
from folders import ROOT, TESTS
from mutants import MUTANTS, TABLE, Mutant


def stale(mutant: Mutant) -> str:
    """Return why a mutant cannot be made, or nothing."""
    try:
        ast.parse(mutant.file(ROOT).read_text("utf-8").replace(mutant.line, mutant.broken))
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
