"""The configs that a command names, with the values of `--set` and `--sweep`."""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from toolkit.runner._config import ConfigError, LoadedConfig, load_config
from toolkit.runner._discovery import BUNDLE, here_or_bundled

__all__ = ["chosen_configs"]

_MOST_HINTS = 3


def chosen_configs(paths: Sequence[Path], overrides: Sequence[str], sweeps: Sequence[str]) -> list[LoadedConfig]:
    """Return each config with each combination of swept values.

    Args:
        paths: Files, folders of them, or names of configs in the folder `configs`, here or bundled. A path that does
            not exist here is looked for among the bundled files.
        overrides: A ``key=value`` for each value that replaces one of the file.
        sweeps: ``key=value,value,...`` each.

    Raises:
        ConfigError: If there is no config, if two have one file name, or as `load_config`, with the mistakes of all
            configs.
    """
    files = list(dict.fromkeys(file for path in paths for file in _files(path)))
    _check_names(files)
    loaded: list[LoadedConfig] = []
    mistakes: list[str] = []
    products = _products(sweeps)
    for file in files:
        try:
            loaded += [load_config(file, overrides, values) for values in products]
        except ConfigError as error:
            mistakes += str(error).splitlines()
    if mistakes:
        raise ConfigError("\n".join(dict.fromkeys(mistakes)))
    return loaded


def _files(path: Path) -> list[Path]:
    """Return the config at a path; a folder stands for the configs directly in it."""
    found = next((one for one in map(here_or_bundled, (path, _named(path))) if one.exists()), None)
    if found is None:
        raise ConfigError(f"{path}: no such file or config; {_hint(path)}")
    if not found.is_dir():
        return [found]
    files = sorted(found.glob("*.toml"))
    if not files:
        raise ConfigError(f"{path}: no .toml files in this folder; name a config, or a folder of configs")
    return files


def _named(path: Path) -> Path:
    """Return the path of the config with this name."""
    return Path("configs") / (path if path.suffix == ".toml" else f"{path}.toml")


def _hint(path: Path) -> str:
    """Return the configs with a similar name, as they can be run."""
    named = {
        file.stem: file.stem
        for folder in (BUNDLE / "configs", Path("configs"))
        for file in sorted(folder.glob("*.toml"))
    }
    beside = {file.stem: str(file) for file in sorted(path.parent.glob("*.toml")) if path.parent != Path()}
    folders = {folder.name: str(folder) for folder in sorted(path.parent.glob("*/")) if any(folder.glob("*.toml"))}
    known = {"configs": "configs", **folders, **named, **beside}
    containing = sorted(name for name in known if f"_{path.stem}_" in f"_{name}_")
    near = containing or difflib.get_close_matches(path.stem, known)
    if not near:
        return "`stopgrad list` shows the bundled configs"
    return f"did you mean {' or '.join(f'`stopgrad run {known[name]}`' for name in near[:_MOST_HINTS])}?"


def _products(sweeps: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the overrides of every combination of swept values, each once."""
    return list(dict.fromkeys(itertools.product(*map(_values, sweeps))))


def _values(sweep: str) -> Iterator[str]:
    """Yield ``key=value`` for each value of a sweep."""
    key, separator, text = sweep.partition("=")
    # Commas inside of brackets and quotes belong to a value.
    values = re.findall(r"""(?:\[[^\]]*\]|\{[^}]*\}|"[^"]*"|'[^']*'|[^,])+""", text)
    if not separator or not values:
        raise ConfigError(f"--sweep {sweep}: should be key=value,value,...")
    return (f"{key.strip()}={value.strip()}" for value in values)


def _check_names(files: Sequence[Path]) -> None:
    """Raise ConfigError if two configs have one file name, which names the folder of the records."""
    named: dict[str, Path] = {}
    for file in files:
        other = named.setdefault(file.stem, file)
        if other.resolve() != file.resolve():
            raise ConfigError(f"{file}: the file name should differ from that of {other}, or run them one by one")
