"""Runs units in this process, side by side in others, or on a cluster, and keeps their records.

Each unit leaves its record, so units need no order, and those that finished are kept however a run ends.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Future, wait
from functools import partial
from pathlib import Path

from toolkit.runner._progress import Progress
from toolkit.runner._records import claimed, is_finished, is_older, lacks_seconds, write_record, write_times
from toolkit.runner._units import Answer, Message, Unit, measured, trained
from toolkit.runner._workers import Workers, in_processes, in_this_process

__all__ = ["run_units"]

_TRIES = 3  # of a unit whose process was killed

_SECONDS_PER_STEP = 1e-3  # of a small model

_SHOWN_EVERY = 0.2  # seconds between two looks at the messages of the units


def run_units(
    units: Sequence[Unit],
    root: Path,
    *,
    jobs: int,
    cluster: str | None = None,
    force: bool = False,
    on_record: Callable[[Unit], None] = lambda unit: None,
) -> list[str]:
    """Run every unit that has no record yet, and return the errors, one line for each reason.

    Times are measured while nothing else runs: after each unit of one job, after all units of several.

    Args:
        units: The units; several jobs run the shortest first, for a page to look at, and then the longest.
        root: The results folder.
        jobs: Processes. 1: this process runs the units in their order.
        cluster: The address of a Ray cluster that runs the units in place of processes. None: no cluster.
        force: Whether to run finished units again.
        on_record: Called in this process with each unit that has left a record.

    Raises:
        ConnectionError: If there is no cluster at the address.
    """
    with Progress() as progress:
        run = _Run(root, force, progress, on_record)
        left = run.without_records(units)
        if cluster is None and (jobs == 1 or len(left) <= 1):
            run.all_of(left, lambda count: in_this_process(run.show))
        else:
            ordered = _in_order(left, root)
            run.all_of(ordered, lambda count: _on_cluster(cluster) if cluster else in_processes(min(jobs, count)))
        return _merged(run.errors)


def _on_cluster(address: str) -> contextlib.AbstractContextManager[Workers]:
    from toolkit.runner._ray import on_ray

    return on_ray(address, _TRIES)


class _Run:
    """A run of units into one results folder."""

    def __init__(self, root: Path, force: bool, progress: Progress, on_record: Callable[[Unit], None]) -> None:
        self.errors: list[str] = []
        self._root, self._force, self._progress, self._on_record = root, force, progress, on_record
        self._claims: dict[Unit, contextlib.ExitStack] = {}
        self._unmeasured: list[Unit] = []

    def without_records(self, units: Sequence[Unit]) -> list[Unit]:
        """Return the units to run, each once, and report those that have records."""
        records: dict[tuple[Path, int], Unit] = {}
        for unit in units:
            records.setdefault((unit.folder(self._root), unit.seed), unit)
        left = [unit for unit in records.values() if self._force or not self._is_finished(unit)]
        finished = [unit for unit in records.values() if unit not in left]
        for (label, why), group in itertools.groupby(finished, lambda unit: (unit.label, self._age(unit))):
            same = list(group)
            if len(same) == same[0].seeds > 1:
                self._progress.say(f"{label}: all {len(same)} seeds have records already{why}")
            else:
                for unit in same:
                    self._progress.say(f"{unit} has a record already{why}")
        self._unmeasured += finished
        return left

    def _age(self, unit: Unit) -> str:
        """Return a remark if a record is older than its experiment, or than a module that the experiment shares."""
        newer = [file for file in unit.sources if is_older(unit.folder(self._root), unit.seed, file)]
        return f", older than {newer[0]}; renew with `--force`" if newer else ""

    def all_of(self, units: list[Unit], workers: Callable[[int], contextlib.AbstractContextManager[Workers]]) -> None:
        """Run the units in their order; a unit whose process is killed runs again.

        Args:
            units: The units.
            workers: Makes the workers for a number of units.
        """
        for _ in range(_TRIES):
            with workers(len(units)) as crew:
                units = self._killed(units, crew)
                if not units and not self._unmeasured:
                    return
            self._progress.say(f"a process was killed; seeds that run again or for the first time: {len(units)}")
        for unit in [*units, *self._unmeasured]:
            self.errors.append(f"{unit.path}: seed {unit.seed}: its process was killed {_TRIES} times")

    def show(self, message: Message) -> None:
        """Show a message of a unit."""
        kind, unit, value = message
        if kind != "begin" or unit in self._claims:  # messages of other processes may come late
            getattr(self._progress, kind)(str(unit), value)

    def _killed(self, units: list[Unit], crew: Workers) -> list[Unit]:
        """Run the units until a process is killed, and return those that did not end."""
        waiting, running = units[::-1], dict[Future[Answer], Unit]()
        try:
            while waiting or running or self._unmeasured:
                if not running:
                    self._measure(crew)
                while waiting and len(running) < crew.count:
                    if self._claim(unit := waiting.pop()):
                        running[crew.submit(trained, unit)] = unit
                for future in sorted(self._ended(running, crew), key=_was_killed):
                    self._end(running[future], future.result())
                    del running[future]
        except BrokenExecutor:
            pass
        finally:
            for claim in self._claims.values():
                claim.close()
        return [*running.values(), *waiting[::-1]]

    def _measure(self, crew: Workers) -> None:
        """Measure times while nothing else runs."""
        while self._unmeasured:
            unit = self._unmeasured[0]
            if lacks_seconds(unit.folder(self._root), unit.seed):
                self._progress.begin(str(unit), None, "is timed")
                future = crew.submit(measured, unit)
                while not self._ended({future: unit}, crew):
                    pass
                self._keep(unit, future.result(), write_times)
                self._progress.end(str(unit))
            del self._unmeasured[0]

    def _claim(self, unit: Unit) -> bool:
        """Claim a unit, so that no other run takes it, and return whether it has to run."""
        claim = self._claims[unit] = contextlib.ExitStack()
        try:
            mine = claim.enter_context(claimed(unit.folder(self._root), unit.seed))
        except OSError as reason:  # no record could be kept
            self.errors.append(_unwritable(unit, reason))
            self._progress.end(str(unit), "failed")
            return False
        if mine and (self._force or not self._is_finished(unit)):
            return True
        claim.close()
        self._progress.end(str(unit), "has a record from another run" if mine else "is left to another run")
        return False

    def _ended(self, running: Mapping[Future[Answer], Unit], crew: Workers) -> set[Future[Answer]]:
        """Wait a moment, show the messages of the units, and return the units that have ended."""
        ended, _ = wait(running, timeout=_SHOWN_EVERY, return_when=FIRST_COMPLETED)
        for message in crew.messages():
            self.show(message)
        return ended

    def _end(self, unit: Unit, answer: Answer) -> None:
        kept = self._keep(unit, answer, write_record)
        self._claims.pop(unit).close()
        self._progress.end(str(unit), f"took {answer.seconds:.1f} s" if kept else "failed")
        if kept:
            self._unmeasured.append(unit)
            self._on_record(unit)

    def _keep(self, unit: Unit, answer: Answer, write: Callable[..., object]) -> bool:
        """Write the values of an answer; return False, and add an error, if there are none or the disk is full."""
        error = answer.error
        if not error:
            try:
                write(unit.folder(self._root), unit.seed, *answer.values)
            except Exception as reason:
                error = _unwritable(unit, reason)
        self.errors += [error] if error else []
        return not error

    def _is_finished(self, unit: Unit) -> bool:
        return is_finished(unit.folder(self._root), unit.seed)


def _merged(errors: Sequence[str]) -> list[str]:
    """Return the errors, one line for all seeds of a config that fail for one reason."""
    seeds: dict[tuple[str, str], list[str]] = {}
    for error in errors:
        place, found, reason = error.partition(": seed ")
        seed, _, reason = reason.partition(": ")
        seeds.setdefault((place, reason), []).append(seed if found else "")
    return [
        f"{place}: seed{'s' * (len(failed) > 1)} {', '.join(sorted(failed, key=int))}: {reason}" if failed[0] else place
        for (place, reason), failed in seeds.items()
    ]


def _unwritable(unit: Unit, reason: Exception) -> str:
    return f"{unit.path}: seed {unit.seed}: the record cannot be written: {reason}"


def _was_killed(future: Future[Answer]) -> bool:
    return isinstance(future.exception(), BrokenExecutor)


def _in_order(units: Sequence[Unit], root: Path) -> list[Unit]:
    """Return the units, the longest first, so that no core waits for one at the end; but before them the shortest."""
    longest_first = sorted(units, key=partial(_expected_seconds, root), reverse=True)
    return longest_first[-1:] + longest_first[:-1]


def _expected_seconds(root: Path, unit: Unit) -> float:
    """Return the time of an earlier record of the same config, else that of the config, else a guess by its steps."""
    records = root.glob(f"{unit.path.stem}/*/seed-*/record.json")
    with contextlib.suppress(OSError, ValueError, KeyError):
        newest = max(records, key=lambda path: path.stat().st_mtime)
        return float(json.loads(newest.read_text(encoding="utf-8"))["seconds"])
    return unit.config.config.seconds or _SECONDS_PER_STEP * unit.steps
