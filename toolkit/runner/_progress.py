"""A progress bar for each unit that runs, or a line for each seed and method where there is no terminal."""

from __future__ import annotations

from typing import Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

__all__ = ["Progress"]


class Progress:
    """Shows how far each unit is; one step is a training step of one variant."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._plain = not self._console.is_terminal
        self._bars = RichProgress(
            TextColumn("{task.description:<36}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            TimeRemainingColumn(), console=self._console, disable=self._plain, transient=True,
        )  # fmt: skip
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def begin(self, unit: str, steps: int | None, verb: str = "runs") -> None:
        """Begin the bar of a unit; `steps` is None if their number is not known."""
        self._remove(unit)  # of a process that was killed
        self._tasks[unit] = self._bars.add_task(escape(unit), total=steps)
        if self._plain:
            self.say(f"{unit} {verb}")

    def step(self, unit: str, count: int) -> None:
        """Move the bar of a unit on by `count` steps."""
        if unit in self._tasks:
            self._bars.advance(self._tasks[unit], count)

    def method(self, unit: str, name: str) -> None:
        """Name the method that a unit trains now."""
        if unit in self._tasks:
            self._bars.update(self._tasks[unit], description=escape(f"{unit}: {name}"))
        if self._plain:
            self.say(f"{unit.partition(':')[0]}: {name}")

    def end(self, unit: str, line: str = "") -> None:
        """Remove the bar of a unit, and leave a line in its place."""
        self._remove(unit)
        if line:
            self.say(f"{unit} {line}")

    def say(self, line: str) -> None:
        """Print a line that stays."""
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def _remove(self, unit: str) -> None:
        if unit in self._tasks:
            self._bars.remove_task(self._tasks.pop(unit))
