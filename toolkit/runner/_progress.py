"""A progress bar for each config, or a line for each seed where there is no terminal."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from toolkit.runner._config import ExperimentConfig

__all__ = ["Progress"]


class Progress:
    """Shows how far the runs of one config are; one unit is a training step of one variant."""

    def __init__(self, name: str, config: ExperimentConfig) -> None:
        console = Console(stderr=True)
        self._name, self._config = name, config
        self._steps = config.steps * len(config.variants)
        self._plain = not console.is_terminal
        self._bar = RichProgress(
            TextColumn("{task.description:<28}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            TimeRemainingColumn(), console=console, disable=self._plain,
        )  # fmt: skip
        self._task = self._bar.add_task(name, total=self._steps * config.seeds)
        self._console = console

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.stop()

    def on_seed(self, seed: int, skipped: bool) -> None:
        """A seed begins, or is skipped because its record is there."""
        self._bar.update(self._task, completed=seed * self._steps, description=self._name)
        if skipped:
            self._bar.update(self._task, completed=(seed + 1) * self._steps)
        if self._plain:
            state = "has a record already" if skipped else "runs"
            self._console.print(f"{self._name}: seed {seed + 1} of {self._config.seeds} {state}", highlight=False)

    def on_method(self, name: str) -> None:
        """Another method is trained."""
        self._bar.update(self._task, description=f"{self._name}: {name}")
        if self._plain:
            self._console.print(f"{self._name}: {name}", highlight=False)

    def on_step(self) -> None:
        """One variant has made one step."""
        self._bar.advance(self._task)
