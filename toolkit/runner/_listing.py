"""The text of `stopgrad list`: experiments, blocks, configs."""

from __future__ import annotations

import importlib
import pkgutil
import textwrap
import tomllib
from pathlib import Path

import toolkit
from toolkit.runner._discovery import experiment_folders, import_experiment

__all__ = ["import_everything", "listing"]


def import_everything() -> None:
    """Import all of `toolkit` and every experiment, so that every declared block is known."""
    for info in pkgutil.walk_packages(toolkit.__path__, "toolkit."):
        if not info.name.endswith("__main__"):
            importlib.import_module(info.name)
    for name, folder in experiment_folders().items():
        import_experiment(name, folder)


def listing(configs: Path) -> str:
    """Return the text, at most 80 columns wide where names allow."""
    import_everything()
    lines = ["Experiments"]
    for name, folder in experiment_folders().items():
        about = (import_experiment(name, folder).__doc__ or "").strip().splitlines()[0]
        lines += _entry(name, about)
    lines += ["", "Blocks"]
    for block in toolkit.declared_blocks().values():
        lines += _entry(block.name, block.why)
    lines += ["", f"Configs in {configs}/"]
    # Configs that need the user's own data are in subfolders, which `run` skips.
    for path in sorted(configs.rglob("*.toml"), key=lambda path: (len(path.parts), path)):
        try:
            title = str(tomllib.loads(path.read_text(encoding="utf-8")).get("title", ""))
        except (OSError, ValueError):
            title = "cannot be read"
        lines += _entry(str(path.relative_to(configs)), title)
    return "\n".join(lines)


def _entry(name: str, text: str) -> list[str]:
    return [f"  {name}", *textwrap.wrap(text, 74, initial_indent="      ", subsequent_indent="      ")]
