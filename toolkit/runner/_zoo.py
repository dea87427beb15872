"""Audits the bug zoo: small programs with a stop-gradient missing, misplaced or needless, and the same without the bug.

A program is a file of plain torch. Its docstring describes the bug, title first. ``SOURCES`` names public threads that
report the bug, ``MOVES`` and ``STAYS`` the networks that its loss should and should not train. ``buggy()`` and
``fixed()`` return the loss and the networks, as ``python -m toolkit audit file.py:buggy`` expects.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from toolkit.gradients.audit import HIDDEN_CHANGE, Audit, audit

__all__ = ["Program", "complaints", "examine", "read_programs"]

VARIANTS = ("buggy", "fixed")

# Their results are constants unless `create_graph` is true, as every first-order attack intends.
DERIVATIVES = ("grad()", "backward()")


@dataclass(frozen=True)
class Program:
    """One program of the zoo.

    Attributes:
        path: Its file.
        source: Its text.
        module: The same, imported.
    """

    path: Path
    source: str
    module: ModuleType

    @property
    def title(self) -> str:
        """The bug in one sentence."""
        return (self.module.__doc__ or "").strip().splitlines()[0]

    @property
    def story(self) -> str:
        """The cause of the bug and its effect."""
        return " ".join((self.module.__doc__ or "").strip().splitlines()[1:]).strip()

    def audit(self, variant: str, *, seed: int = 0) -> Audit:
        """Return the audit of ``"buggy"`` or ``"fixed"``; both draw the same random numbers."""
        with torch.random.fork_rng(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(seed)
            loss, networks = getattr(self.module, variant)()
            return audit(loss, networks)

    def changed_lines(self) -> dict[str, list[tuple[int, str]]]:
        """Return for each variant the lines that the other does not have, with their numbers in the file."""
        functions = {node.name: node for node in ast.parse(self.source).body if isinstance(node, ast.FunctionDef)}
        lines = list(enumerate(self.source.splitlines(), 1))
        buggy, fixed = (lines[functions[name].lineno : functions[name].end_lineno] for name in VARIANTS)
        before, after = ([text for _, text in body] for body in (buggy, fixed))
        changed: dict[str, list[tuple[int, str]]] = {name: [] for name in VARIANTS}
        for tag, *span in difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
            if tag != "equal":
                changed["buggy"] += buggy[span[0] : span[1]]
                changed["fixed"] += fixed[span[2] : span[3]]
        return changed


def read_programs(folder: Path) -> list[Program]:
    """Return the programs of a folder, sorted by name.

    Raises:
        ValueError: If the folder has no program, or a program lacks a part.
    """
    found = []
    for path in sorted(folder.glob("*.py")):
        spec = importlib.util.spec_from_file_location(f"zoo_{path.stem}", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        missing = [part for part in ("SOURCES", "MOVES", "STAYS", *VARIANTS) if not hasattr(module, part)]
        if missing or not module.__doc__:
            raise ValueError(
                f"{path}: a program of the zoo should have {', '.join(missing) or 'a docstring'}. Found none."
            )
        found.append(Program(path, path.read_text("utf-8"), module))
    if not found:
        raise ValueError(f"FOLDER should hold programs of the zoo. Found no .py files in {folder}: see `docs/zoo/`.")
    return found


def complaints(found: Audit, *, moves: list[str], stays: list[str]) -> list[str]:
    """Return the faults that an audit finds in a program, in sentences; empty if it finds none.

    Args:
        found: The audit.
        moves: Names of networks that the loss should train. Every parameter of them should get a gradient.
        stays: Names of networks that the loss should not train. No parameter of them should get a gradient.
    """
    return list(_complaints(found, moves, stays))


def _complaints(found: Audit, moves: list[str], stays: list[str]) -> Iterator[str]:
    if not found.valid:
        yield f"The audit is not valid: {found.reason}."
    moved = {name: bool(gradient.count_nonzero()) for name, gradient in found.blocked.items()}
    wrongly = [name for network in stays for name in moved if name.startswith(f"{network}.") and moved[name]]
    if wrongly:
        yield f"The loss moves {', '.join(wrongly)}, which should stay."
    still = [name for network in moves for name in moved if name.startswith(f"{network}.") and not moved[name]]
    if still:
        cuts = [
            f"{found.kinds[effect.name]} at {effect.site}"
            for effect in found.effects
            if any(effect.per_parameter[name].leak > 0 for name in still)
        ]
        yield f"The loss does not move {', '.join(still)}{': cut by ' + ', '.join(cuts) if cuts else ''}."
    for effect in found.effects:
        if effect.verdict.kind == "no-op":
            yield f"There is nothing to stop for {found.kinds[effect.name]} at {effect.site}."
    for escape in found.escapes:
        if escape.kind in DERIVATIVES:
            continue
        yield f"A value leaves the graph: {escape.kind} at {escape.site}."
    for entry in found.unopened:
        if entry.reason == HIDDEN_CHANGE:
            yield f"{entry.kind} at {entry.site}: {entry.reason}."
    for site in found.one_mode:
        yield f"{found.kinds[site]} at {site} stops reverse mode alone: a forward-mode derivative passes."


def examine(program: Program) -> dict[str, Any]:
    """Return the audit of both variants of a program, as plain JSON for a record."""
    lines = program.changed_lines()
    variants = {}
    for variant in VARIANTS:
        found = program.audit(variant)
        variants[variant] = {
            "lines": [{"number": number, "text": text} for number, text in lines[variant]],
            "loss": found.loss,
            "places": [(effect.name, found.kinds[effect.name], str(effect.verdict)) for effect in found.effects],
            "complaints": complaints(found, moves=program.module.MOVES, stays=program.module.STAYS),
        }
    return {
        "name": program.path.stem,
        "title": program.title,
        "story": program.story,
        "sources": program.module.SOURCES,
        "moves": program.module.MOVES,
        "stays": program.module.STAYS,
        **variants,
    }
