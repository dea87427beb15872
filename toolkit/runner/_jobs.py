"""Runs units, the seeds of configs, in this process or side by side in others.

A unit is small enough to be sent anywhere: its config's path, the overrides, and the seed. Each leaves its record, so
units need no order, and those that finished are kept however a run ends.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import multiprocessing.connection
import os
import queue
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from toolkit.runner._comparison import RunError, folder_of, measure_seed, run_seed
from toolkit.runner._config import LoadedConfig, load_config
from toolkit.runner._progress import Progress
from toolkit.runner._records import claimed, finished_seeds

__all__ = ["Unit", "run_units", "units_of"]

_TRIES = 3  # of a unit whose process was killed

_SECONDS_PER_STEP = 1e-3  # of a small model

_TOLD_EVERY = 0.2  # seconds between two messages of a unit about its steps


@dataclass(frozen=True)
class Unit:
    """One seed of one config.

    Attributes:
        label: The config's name for the reader.
        path: The config.
        overrides: Its ``key=value``.
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
        return f"{self.label}: seed {self.seed + 1} of {self.seeds}"


@dataclass(frozen=True)
class Outcome:
    """The end of a unit: whether it left a record or failed, else why it was left out; in words for the reader."""

    text: str
    recorded: bool = False
    failed: bool = False


# Tells the main process about a unit: ("begin" | "step" | "method", unit, value).
Tell = Callable[[str, Unit, Any], None]


def units_of(loaded: LoadedConfig, label: str) -> list[Unit]:
    """Return the seeds of a config."""
    seeds, steps = loaded.config.seeds, loaded.config.steps * len(loaded.config.variants)
    return [Unit(label, loaded.path, loaded.overrides, seed, seeds, steps) for seed in range(seeds)]


def run_units(
    units: Sequence[Unit],
    root: Path,
    *,
    jobs: int,
    force: bool = False,
    on_record: Callable[[Unit], None] = lambda unit: None,
) -> list[str]:
    """Run every unit that has no record yet, and return the errors, one line for each unit that failed.

    The times of a step are measured while nothing else runs: after each unit of one job, after all units of several.

    Args:
        units: The units; several jobs run the longest first.
        root: The results folder.
        jobs: Processes. 1: this process runs the units in their order.
        force: Whether to run finished units again.
        on_record: Called in this process with each unit that has left a record.
    """
    with Progress() as progress:
        run = _Units(root, force, progress, on_record)
        left = run.without_records(units)
        if jobs == 1 or len(left) <= 1:
            run.one_after_the_other(left)
        else:
            run.side_by_side(sorted(left, key=partial(_expected_seconds, root), reverse=True), jobs)
        return run.errors


class _Units:
    """Units that run into one results folder."""

    def __init__(self, root: Path, force: bool, progress: Progress, on_record: Callable[[Unit], None]) -> None:
        self.errors: list[str] = []
        self._root, self._force, self._progress, self._on_record = root, force, progress, on_record
        self._unmeasured: list[Unit] = []

    def without_records(self, units: Sequence[Unit]) -> list[Unit]:
        """Return the units that have to run, and say so of the others."""
        left = [unit for unit in units if self._force or not _is_finished(unit, self._root)]
        for unit in units:
            if unit not in left:
                self._progress.say(f"{unit} has a record already")
                self._unmeasured.append(unit)
        return left

    def one_after_the_other(self, units: Sequence[Unit]) -> None:
        """Run the units in this process."""
        self._measure(_measure)
        for unit in units:
            self._end(unit, _run(unit, self._root, self._force, self._show))
            self._measure(_measure)

    def side_by_side(self, units: list[Unit], jobs: int) -> None:
        """Run the units in other processes; a unit whose process is killed runs again."""
        for _ in range(_TRIES):
            with _processes(min(jobs, len(units))) as (pool, messages):
                futures = {pool.submit(_run_there, unit, self._root, self._force): unit for unit in units}
                units = [futures[future] for future in self._killed(futures, messages)]
                if not units:
                    return self._measure(lambda *unit: pool.submit(_measure, *unit).result())
            self._progress.say(f"a process was killed; units without a record: {len(units)}")
        self.errors += [f"{unit.path}: seed {unit.seed}: its process was killed {_TRIES} times" for unit in units]
        return None

    def _measure(self, measure: Callable[[Unit, Path], Outcome]) -> None:
        while self._unmeasured:
            unit = self._unmeasured.pop(0)
            self._end(unit, measure(unit, self._root))

    def _killed(self, futures: dict[Future[Outcome], Unit], messages: Any) -> Iterator[Future[Outcome]]:
        """Wait for the units, and yield those whose process was killed."""
        pending = set(futures)
        while pending:
            ended, pending = wait(pending, timeout=_TOLD_EVERY, return_when=FIRST_COMPLETED)
            for message in _received(messages):
                self._show(*message)
            for future in ended:
                try:
                    self._end(futures[future], future.result())
                except BrokenProcessPool:
                    yield future

    def _show(self, kind: str, unit: Unit, value: Any) -> None:
        getattr(self._progress, kind)(str(unit), value)

    def _end(self, unit: Unit, outcome: Outcome) -> None:
        if outcome.text:
            self._progress.end(str(unit), "failed" if outcome.failed else outcome.text)
        if outcome.failed:
            self.errors.append(outcome.text)
        if outcome.recorded:
            self._unmeasured.append(unit)
            self._on_record(unit)


def _is_finished(unit: Unit, root: Path) -> bool:
    return unit.seed in finished_seeds(folder_of(_loaded(unit.path, unit.overrides), root))


def _expected_seconds(root: Path, unit: Unit) -> float:
    """Return the time of an earlier record of the same config, else that of the config, else a guess by its steps."""
    records = root.glob(f"{unit.path.stem}/*/seed-*/record.json")
    with contextlib.suppress(OSError, ValueError, KeyError):
        newest = max(records, key=lambda path: path.stat().st_mtime)
        return float(json.loads(newest.read_text(encoding="utf-8"))["seconds"])
    return _loaded(unit.path, unit.overrides).config.seconds or _SECONDS_PER_STEP * unit.steps


@contextlib.contextmanager
def _processes(jobs: int) -> Iterator[tuple[ProcessPoolExecutor, Any]]:
    """Yield a pool of processes and the queue of their messages. An error, or Ctrl-C, ends the processes at once."""
    context = multiprocessing.get_context("spawn")
    messages = context.Queue()
    pool = ProcessPoolExecutor(jobs, mp_context=context, initializer=_begin, initargs=(messages,))
    try:
        yield pool, messages
    except BaseException:
        for process in multiprocessing.active_children():
            process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
        messages.close()


def _received(messages: Any) -> Iterator[tuple[str, Unit, Any]]:
    with contextlib.suppress(queue.Empty):
        while True:
            yield messages.get_nowait()


# --- in the process of a unit ------------------------------------------------------------------------------------

_messages: Any = None


def _begin(messages: Any) -> None:
    global _messages
    _messages = messages
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the process without a traceback
    threading.Thread(target=_end_with_the_main_process, daemon=True).start()


def _end_with_the_main_process() -> None:
    main = multiprocessing.parent_process()
    assert main is not None
    multiprocessing.connection.wait([main.sentinel])
    os._exit(1)


def _run_there(unit: Unit, root: Path, force: bool) -> Outcome:
    return _run(unit, root, force, lambda *message: _messages.put(message))


def _run(unit: Unit, root: Path, force: bool, tell: Tell) -> Outcome:
    steps, told = 0, time.monotonic()

    def on_step() -> None:
        nonlocal steps, told
        steps += 1
        if time.monotonic() - told > _TOLD_EVERY:
            tell("step", unit, steps)
            steps, told = 0, time.monotonic()

    loaded, begin = _loaded(unit.path, unit.overrides), time.monotonic()
    try:
        folder = folder_of(loaded, root)
        with claimed(folder, unit.seed) as mine:
            if not mine:
                return Outcome("is left to another run")
            if not force and unit.seed in finished_seeds(folder):
                return Outcome("has a record from another run")
            tell("begin", unit, unit.steps)
            run_seed(loaded, unit.seed, root, on_step=on_step, on_method=lambda name: tell("method", unit, name))
    except Exception as error:
        return Outcome(_reason(unit, error), failed=True)
    return Outcome(f"took {time.monotonic() - begin:.1f} s", recorded=True)


def _measure(unit: Unit, root: Path) -> Outcome:
    try:
        measure_seed(_loaded(unit.path, unit.overrides), unit.seed, root)
    except Exception as error:
        return Outcome(_reason(unit, error), failed=True)
    return Outcome("")


@lru_cache(maxsize=64)
def _loaded(path: Path, overrides: tuple[str, ...]) -> LoadedConfig:
    return load_config(path, overrides)


def _reason(unit: Unit, error: Exception) -> str:
    """Return an error in one line, with its place outside of this library if it has one."""
    if isinstance(error, RunError):
        return str(error)
    here = str(Path(__file__).parents[1])
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(here)]
    at = f" (at {frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    line = next(iter(str(error).splitlines()), repr(error))
    return f"{unit.path}: seed {unit.seed}: {type(error).__name__}: {line}{at}"
