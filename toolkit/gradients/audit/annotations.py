"""Annotations: lines of output that GitHub Actions shows beside the code of a pull request."""

from __future__ import annotations

import os
from pathlib import Path

from toolkit.gradients.audit.answer import Audit
from toolkit.gradients.audit.expectations import Difference

__all__ = ["error_of", "notices_of"]


def notices_of(found: Audit) -> list[str]:
    """Return a notice for each stop that a gradient reaches; an error if the answer is not valid."""
    if not found.valid:
        return [_annotation("error", f"The audit is not valid: {found.reason}")]
    return [
        _annotation(
            "notice",
            f"{found.kinds[effect.name]}: {effect.verdict}, leak {effect.leak:.3g}",
            Path(found.sites[effect.name].file),
            found.sites[effect.name].line,
        )
        for effect in found.effects
        if effect.verdict.kind != "no-op"
    ]


def error_of(difference: Difference, folder: Path) -> str:
    """Return an error for a stop that is not as expected; `folder` has the table.

    The error of a stop that is gone names its file, without a line.
    """
    site = difference.stop.site
    file = folder / difference.stop.file if site is None else Path(site.file)
    return _annotation("error", str(difference), file, site.line if site else 0)


def _annotation(level: str, message: str, file: Path | None = None, line: int = 0) -> str:
    """Return a line of GitHub's workflow commands; files are relative to the repository."""
    root = os.environ.get("GITHUB_WORKSPACE", ".")
    where = {"file": os.path.relpath(file, root)} if file is not None else {}
    where |= {"line": str(line)} if line else {}
    listed = ",".join(
        f"{key}={_escaped(value).replace(':', '%3A').replace(',', '%2C')}" for key, value in where.items()
    )
    return f"::{level} {listed}::{_escaped(message)}" if where else f"::{level}::{_escaped(message)}"


def _escaped(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
