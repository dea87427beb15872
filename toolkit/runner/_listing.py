"""The text of `stopgrad list`: experiments, blocks and configs, or the keys of an experiment's config."""

from __future__ import annotations

import ast
import difflib
import importlib
import inspect
import pkgutil
import re
import textwrap
import tomllib
from collections.abc import Collection
from pathlib import Path
from typing import Any

from pydantic import BaseModel

import toolkit
from toolkit.runner._config import ConfigError, load_experiment
from toolkit.runner._discovery import experiment_folders, here_or_bundled, import_experiment

__all__ = ["import_everything", "keys_of", "listing"]


_NO_LIBRARY = ("__main__", "pytest_plugin")  # a program; a plugin, which needs an extra and declares no block


def import_everything() -> None:
    """Import all of `toolkit` and every bundled experiment, so that every declared block is known."""
    for info in pkgutil.walk_packages(toolkit.__path__, "toolkit."):
        if not info.name.endswith(_NO_LIBRARY):
            importlib.import_module(info.name)
    for name, folder in experiment_folders().items():
        import_experiment(name, folder)


def listing(configs: Path) -> str:
    """Return the list of experiments, blocks and configs, at most 80 columns wide where names allow.

    Args:
        configs: Folder of the configs. The experiments of its project are listed with the bundled ones.
    """
    import_everything()
    lines = ["Experiments"]
    bundled = experiment_folders()
    for name, folder in experiment_folders(configs / "any.toml").items():
        if bundled.get(name) == folder or _is_experiment(name, folder):
            lines += _entry(name, _about(name, folder))
    lines += ["", "Blocks"]
    for block in toolkit.declared_blocks().values():
        if block.why:  # else a name that ran in this process, declared nowhere
            lines += _entry(block.name, block.why)
    lines += ["", f"Configs in {configs}/"]
    # Configs that need the user's own data are in subfolders, which `run` skips.
    for path in sorted(configs.rglob("*.toml"), key=lambda path: (len(path.parts), path)):
        try:
            title = str(tomllib.loads(path.read_text(encoding="utf-8-sig")).get("title", ""))
        except (OSError, ValueError):
            title = "cannot be read"
        lines += _entry(str(path.relative_to(configs)), title)
    return "\n".join(lines)


def _is_experiment(name: str, folder: Path) -> bool:
    """Return whether a module names a `Config` and a `run`. Another one may be a program, and is not imported."""
    file = folder / f"{name}.py"
    try:
        program = ast.parse((file if file.is_file() else folder / name / "__init__.py").read_bytes())
    except (OSError, SyntaxError, ValueError):
        return True  # the import tells the reason
    named = set[str]()
    for node in program.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            named.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            named |= {alias.asname or alias.name for alias in node.names}
    return {"Config", "run"} <= named


def _about(experiment: str, folder: Path) -> str:
    """Return the first line of an experiment's docstring, or the reason why it cannot run."""
    try:
        return next(iter((load_experiment(experiment, folder).__doc__ or "").strip().splitlines()), "")
    except ConfigError as error:
        return f"cannot be run: {error}"


def keys_of(experiment: str, configs: Path) -> str:
    """Return the keys of an experiment's config with their types, defaults and meanings.

    Raises:
        ValueError: If there is no such experiment.
        ConfigError: As `load_experiment`.
    """
    known = experiment_folders(configs / "any.toml")
    if experiment not in known:
        of_config = _experiment_of(here_or_bundled(configs / f"{experiment}.toml"))
        hint = _hint(experiment, of_config, known)
        raise ValueError(f"`experiment` should be one of {', '.join(known)}. Found {experiment!r}{hint}")
    module = load_experiment(experiment, known[experiment])
    config: type[BaseModel] = module.Config
    lines = [f"Keys of a config with experiment = {experiment!r}", f"The module: {module.__file__}"]
    for name, key in config.model_fields.items():
        default = key.get_default(call_default_factory=True)
        need = "required" if key.is_required() else "optional" if default is None else f"default {default!r}"
        lines += _entry(f"{name}: {_type(key.annotation)}, {need}", _meaning(config, name))
    return "\n".join(lines)


def _hint(found: str, of_config: str, known: Collection[str]) -> str:
    """Return the end of a sentence, with the command that may be meant."""
    if of_config in known:
        return f", a config of the experiment {of_config}: `stopgrad list {of_config}`."
    near = difflib.get_close_matches(found, known, n=1)
    return f"; did you mean `stopgrad list {near[0]}`?" if near else "."


def _experiment_of(config: Path) -> str:
    """Return the experiment that a config names; empty if there is no such config."""
    try:
        return str(tomllib.loads(config.read_text(encoding="utf-8-sig")).get("experiment", ""))
    except (OSError, ValueError):
        return ""


def _type(annotation: Any) -> str:
    """Return a type as a reader writes it: without the modules of its parts, and without None, which TOML lacks."""
    name = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    name = re.sub(r"Annotated\[([\w.]+), .*?\]\)\]", r"\1", name)
    name = re.sub(r"(?<!['\w.])(?:typing|toolkit|experiments)[\w.]*\.|<class '|'>", "", name)
    name = re.sub(r"Literal\[([^]]*)\]", lambda found: found[1].replace(", ", " | "), name)
    return re.sub(r"^Optional\[(.*)\]$| \| None$", r"\1", name)


def _meaning(config: type, key: str) -> str:
    """Return the description of a key, from the docstring of the class that declares it, without its markup."""
    for owner in config.__mro__:
        if key in inspect.get_annotations(owner):
            found = re.search(rf"^ {{4}}{key}: (.*(?:\n {{8}}.*)*)", inspect.getdoc(owner) or "", re.MULTILINE)
            return " ".join(found[1].replace("`", "").split()) if found else ""
    return ""


def _entry(name: str, text: str) -> list[str]:
    heading = textwrap.wrap(name, 80, initial_indent="  ", subsequent_indent="    ", break_long_words=False)
    return [*heading, *textwrap.wrap(text, 74, initial_indent="      ", subsequent_indent="      ")]
