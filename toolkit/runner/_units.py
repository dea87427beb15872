"""Units of work: one seed of one config, small enough to be sent to any process and run there.

A unit holds the path of its config, the overrides and the seed. Its answer is data alone: the main process writes the
records.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from toolkit.runner._comparison import RunError, folder_of, record_of, times_of
from toolkit.runner._config import ConfigError, LoadedConfig, load_config
from toolkit.runner._discovery import sources_of

__all__ = ["Answer", "Message", "Tell", "Unit", "measured", "trained", "units_of"]

_TOLD_EVERY = 0.2  # seconds between two messages of a unit about its steps


@dataclass(frozen=True)
class Unit:
    """One seed of one config.

    Attributes:
        label: The config's name for the reader.
        path: The config.
        overrides: A ``key=value`` for each value that replaces one of the file.
        seed: The seed.
        seeds: Number of seeds of the config.
        steps: Training steps of all variants.
    """

    label: str
    path: Path
    overrides: tuple[str, ...]
    seed: int
    seeds: int
    steps: int

    def __str__(self) -> str:
        return f"{self.label}: seed {self.seed} ({self.seed + 1} of {self.seeds})"

    @property
    def config(self) -> LoadedConfig:
        """The config, which each process reads once."""
        return _loaded(self.path, self.overrides)

    @property
    def sources(self) -> list[Path]:
        """The file of its experiment, and those of the modules that the experiment shares."""
        return sources_of(self.config.module)

    def folder(self, root: Path) -> Path:
        """Return the folder of its record in a results folder."""
        return folder_of(self.config, root)


@dataclass(frozen=True)
class Answer:
    """The result of a unit: a record and its gradients, or times, or an error in one line; and the time it took."""

    values: tuple[Any, ...] = ()
    error: str = ""
    seconds: float = 0.0


# What a unit says while it runs: ("begin" | "step" | "method", unit, value).
Message = tuple[str, Unit, Any]
Tell = Callable[[Message], None]


def units_of(config: LoadedConfig) -> list[Unit]:
    """Return the seeds of a config."""
    seeds, steps = config.config.seeds, config.config.steps * len(config.config.variants)
    return [Unit(config.label, config.path, config.overrides, seed, seeds, steps) for seed in range(seeds)]


@lru_cache(maxsize=64)
def _loaded(path: Path, overrides: tuple[str, ...]) -> LoadedConfig:
    return load_config(path, overrides)


def trained(unit: Unit, tell: Tell) -> Answer:
    """Train the variants of a unit, and return its record and its gradients as an answer."""
    steps, told = 0, time.monotonic()

    def on_step() -> None:
        nonlocal steps, told
        steps += 1
        if time.monotonic() - told > _TOLD_EVERY:
            tell(("step", unit, steps))
            steps, told = 0, time.monotonic()

    def on_method(name: str) -> None:
        tell(("method", unit, name))

    tell(("begin", unit, unit.steps))
    return _answer(unit, lambda config: record_of(config, unit.seed, on_step=on_step, on_method=on_method))


def measured(unit: Unit, tell: Tell) -> Answer:
    """Measure the times of a unit. Nothing else should run beside it."""
    return _answer(unit, lambda config: (times_of(config, unit.seed),))


def _answer(unit: Unit, function: Callable[[LoadedConfig], tuple[Any, ...]]) -> Answer:
    try:
        config, begin = unit.config, time.monotonic()
        return Answer(function(config), seconds=time.monotonic() - begin)
    except ConfigError as error:
        return Answer(error=str(error))
    except RunError as error:
        return Answer(error=f"{unit.path}: seed {unit.seed}: {error}")
    except (Exception, SystemExit) as error:
        line = next(iter(str(error).splitlines()), repr(error))
        at = _place(error, unit.sources[0].parent)
        return Answer(error=f"{unit.path}: seed {unit.seed}: {type(error).__name__}: {line}{at}")


def _place(error: BaseException, experiments: Path) -> str:
    """Return the innermost place of an error in the experiments, or in this library if it is in none of them."""
    frames = traceback.extract_tb(error.__traceback__)[::-1]
    for folder in (experiments, Path(__file__).parents[1]):
        for frame in frames:
            if Path(frame.filename).is_relative_to(folder):
                return f" (at {frame.filename}:{frame.lineno})"
    return ""
