"""The configs that a command names, with the values of `--set` and `--sweep`."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from toolkit.runner._config import ConfigError, LoadedConfig, load_config
from toolkit.runner._discovery import here_or_bundled

__all__ = ["chosen_configs"]


def chosen_configs(paths: Sequence[Path], overrides: Sequence[str], sweeps: Sequence[str]) -> list[LoadedConfig]:
    """Return each config with each combination of swept values.

    Args:
        paths: Files, or folders of them.
        overrides: ``key=value`` each.
        sweeps: ``key=value,value,...`` each.

    Raises:
        ConfigError: If there is no config, if two have one file name, or as `load_config`.
    """
    files = list(itertools.chain.from_iterable(map(_files, paths)))
    _check_names(files)
    return [load_config(file, overrides, values) for file in files for values in _products(sweeps)]


def _files(path: Path) -> list[Path]:
    """Return the config at a path; a folder stands for the configs directly in it."""
    path = here_or_bundled(path)
    if not path.is_dir():
        return [path]
    files = sorted(path.glob("*.toml"))
    if not files:
        raise ConfigError(f"{path}: no .toml files in this folder")
    return files


def _products(sweeps: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the overrides of every combination of swept values."""
    return list(itertools.product(*map(_values, sweeps)))


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
