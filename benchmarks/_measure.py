"""How two programs are timed side by side."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Row", "gradient", "side_by_side", "timed_pair", "timed_row"]


@dataclass(frozen=True)
class Row:
    """One line of the benchmark table.

    Attributes:
        what: Our code, and the code that it is compared with.
        ratio: Our figure divided by theirs: below 1 is better.
        goal: The ratio to reach, in words; empty if there is none.
        note: Both figures with their units, sizes, anything a reader needs to judge the ratio.
    """

    what: str
    ratio: float
    goal: str
    note: str


def side_by_side(ours: Callable[[], object], theirs: Callable[[], object], repeats: int = 15) -> float:
    """Return the median over pairs of (time of `ours`) / (time of `theirs`).

    The two run in turn, so a machine whose speed drifts slows both. Short programs are looped to at least 2 ms. On one
    thread the clock is that of the thread: on a shared machine the wall clock also times the other programs.
    """
    return timed_pair(ours, theirs, repeats)[0]


def timed_pair(
    ours: Callable[[], object],
    theirs: Callable[[], object],
    repeats: int = 15,
    clock: Callable[[], float] | None = None,
) -> tuple[float, float, float]:
    """Return the median ratio of the pairs, and the median seconds per call of both.

    A peer that hands its work to threads of its own needs another `clock`, `time.process_time`. Ours does not, and such
    threads go on for a moment after a call has returned.
    """
    sides = ((ours, None), (theirs, clock))
    for run, _ in sides:
        run()  # the first call of a compiled program compiles it, and would be taken for a long one
    loops = [max(1, round(2e-3 / max(_seconds(run, 1, clock), 1e-9))) for run, clock in sides]
    pairs = []
    enabled = gc.isenabled()
    gc.disable()
    try:
        for _ in range(1 + repeats):
            pairs.append([_seconds(run, count, clock) for (run, clock), count in zip(sides, loops, strict=True)])
    finally:
        if enabled:
            gc.enable()
    _, *pairs = pairs
    mine, others = zip(*pairs, strict=True)
    return statistics.median(a / b for a, b in pairs), statistics.median(mine), statistics.median(others)


def timed_row(
    what: str,
    ours: Callable[[], object],
    theirs: Callable[[], object],
    goal: str = "",
    *,
    note: str = "",
    steps: int = 1,
    repeats: int = 15,
    clock: Callable[[], float] | None = None,
) -> Row:
    """Return the row of a `timed_pair`, with the time of one of the `steps` of a call, and a further note."""
    ratio, *seconds = timed_pair(ours, theirs, repeats, clock)
    times = " against ".join(readable(each / steps) for each in seconds)
    return Row(what, ratio, goal, f"{times}, {note}" if note else times)


def readable(seconds: float) -> str:
    """Return a time in the unit in which it has one to three digits before the point."""
    unit, size = next((pair for pair in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)) if seconds >= pair[1]), ("ns", 1e-9))
    return f"{seconds / size:.3g} {unit}"


def gradient(loss: Callable[[], Tensor], *inputs: Tensor) -> Callable[[], object]:
    """Return the program that computes a loss and its gradient with respect to `inputs`."""
    return lambda: torch.autograd.grad(loss(), inputs)


def _seconds(run: Callable[[], object], loops: int, clock: Callable[[], float] | None = None) -> float:
    clock = clock or (time.thread_time if torch.get_num_threads() == 1 else time.perf_counter)
    start = clock()
    for _ in range(loops):
        run()
    return (clock() - start) / loops
