"""Finds experiments: in the folder `experiments` beside a config or above it, else among those of this project."""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import pkgutil
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

__all__ = ["BUNDLE", "experiment_folders", "here_or_bundled", "import_experiment", "sources_of"]

_INSTALLED = Path(__file__).with_name("bundled")

BUNDLE = _INSTALLED if _INSTALLED.is_dir() else Path(__file__).parents[2]
"""The folder with this project's `experiments`, `configs` and `docs/zoo`: in the wheel, or the top of a checkout."""

_ROOM = "experiments"


def here_or_bundled(path: Path) -> Path:
    """Return the path if it exists here, or else the same path among the bundled files if that exists."""
    bundled = BUNDLE / path
    return bundled if not path.exists() and not path.is_absolute() and bundled.exists() else path


def experiment_folders(config: Path | None = None) -> dict[str, Path]:
    """Return name -> folder of the experiments that a config can name.

    A module with a leading underscore is shared by experiments, and is none itself.

    Args:
        config: The config. None: only the experiments of this project are found.
    """
    folders = [BUNDLE / _ROOM]
    if config is not None:
        above = [folder / _ROOM for folder in config.resolve().parents]
        folders += [folder for folder in above if folder.is_dir()][:1]
    names = {name: folder for folder in folders for _, name, _ in pkgutil.iter_modules([str(folder)])}
    return {name: names[name] for name in sorted(names) if not name.startswith("_")}


def import_experiment(name: str, folder: Path) -> ModuleType:
    """Import an experiment. In a user's project, it can import modules that stand beside the folder of experiments.

    The bundled experiments import one another relatively, and leave the name `experiments` to the user's project.
    """
    if folder.parent != BUNDLE and str(folder.parent) not in sys.path:
        sys.path.append(str(folder.parent))
    return importlib.import_module(f"{_package(folder)}.{name}")


@cache
def sources_of(module: ModuleType) -> list[Path]:
    """Return the file of an experiment, and those of the modules it imports from its folder or from beside it."""
    places = (folder := Path(str(module.__file__)).parent, folder.parent)
    found: dict[str, Path] = {}
    waiting = [module]
    while waiting:
        one = waiting.pop()
        file = Path(getattr(one, "__file__", None) or "")
        if one.__name__ in found or file.parent not in places or file.suffix != ".py":
            continue
        found[one.__name__] = file
        for node in ast.walk(ast.parse(file.read_bytes())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            if isinstance(node, ast.ImportFrom):
                source = importlib.util.resolve_name("." * node.level + (node.module or ""), one.__package__)
                names = [source, *(f"{source}.{name}" for name in names)]
            waiting += [sys.modules[name] for name in names if name in sys.modules]
    return list(found.values())


def _package(folder: Path) -> str:
    """Return the name of a folder of experiments as a package; a second folder gets a name of its own."""
    spec = importlib.util.find_spec(_ROOM)
    if spec is not None and str(folder) in map(str, spec.submodule_search_locations or ()):
        return _ROOM
    name = f"{_ROOM}_{hashlib.sha256(bytes(folder)).hexdigest()[:8]}"
    if name not in sys.modules:
        sys.modules[name] = package = ModuleType(name)
        package.__path__ = [str(folder)]
    return name
