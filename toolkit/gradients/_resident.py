"""The memory that recorded regions take, and the bound beyond which regions are no longer recorded."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from toolkit._checks import number

__all__ = ["RegionMemory", "takes_memory"]

_MB = 10**6
_NOTABLE = 100 * _MB

_IN_REGIONS, _MORE_THAN = " in recorded regions", ", more than "
_PROCESS, _DEVICE = "the process", "the CUDA device"

# A look takes some 10 us, as long as a call takes to be watched.
_CALLS_PER_LOOK = 16


class RegionMemory:
    """How far this process, and its present CUDA device, grow inside of recorded regions."""

    def __init__(self, bound: float | None = None) -> None:
        """Begin to measure.

        Args:
            bound: The most memory that recorded regions may take, in MB; None for half of the free memory.

        Raises:
            ValueError: If `bound` is negative.
        """
        self._bound = None if bound is None else number("memory", bound, least=0) * _MB
        self._meters: dict[str, _Meter] = {}
        self._calls = 0
        self.enter()

    def enter(self) -> None:
        """Measure at the beginning of an outermost region."""
        for where, size in _sizes().items():
            self._meter(where, size).last = size

    def look(self) -> None:
        """Measure inside of a region, or at its end."""
        for where, size in _sizes().items():
            self._meter(where, size).grow(size)

    def look_at_times(self) -> None:
        """Measure inside of a region at some of the calls of this function."""
        self._calls += 1
        if self._calls % _CALLS_PER_LOOK == 0:
            self.look()

    @property
    def excess(self) -> str:
        """The reason not to record a region any more; empty within the bound."""
        for where, meter in self._meters.items():
            if meter.most > meter.bound:
                bound = "half of the free memory" if self._bound is None else "the bound `memory`"
                return f"{_growth(where, meter)}{_MORE_THAN}{bound}, {_shown(meter.bound)}"
        return ""

    def excuse(self) -> None:
        """Halve the memory that further regions may take, because the last regions took too much."""
        for meter in self._meters.values():
            if meter.most > meter.bound:
                meter.allowance /= 2
                meter.bound = meter.most + meter.allowance

    @property
    def remarks(self) -> list[str]:
        """A remark if recorded regions held much memory."""
        return [
            f"{_growth(where, meter)}, which keep a graph"
            for where, meter in self._meters.items()
            if meter.most >= _NOTABLE
        ]

    def _meter(self, where: str, size: int) -> _Meter:
        if where not in self._meters:
            bound = _free(where) / 2 if self._bound is None else self._bound
            self._meters[where] = _Meter(size, size, bound, bound)
        return self._meters[where]


@dataclass
class _Meter:
    """A size that is measured in bytes.

    Attributes:
        start: The first size.
        last: The last size.
        bound: The most that recorded regions may take.
        allowance: The part of it that the present regions may take.
        grown: The growth inside of regions.
        most: The most that regions have held at a time: no more than the growth since the start.
    """

    start: int
    last: int
    bound: float
    allowance: float
    grown: int = 0
    most: int = 0

    def grow(self, size: int) -> None:
        """Note the size inside of a region."""
        self.grown, self.last = self.grown + size - self.last, size
        self.most = max(self.most, min(self.grown, size - self.start))


def takes_memory(reason: str) -> bool:
    """Return whether a reason is the `excess` of a `RegionMemory`."""
    return _IN_REGIONS + _MORE_THAN in reason


def _sizes() -> dict[str, int]:
    """Return the bytes in use."""
    device = {_DEVICE: torch.cuda.memory_allocated()} if torch.cuda.is_initialized() else {}
    return {_PROCESS: _resident(), **device}


def _resident() -> int:
    """Return the resident bytes of this process; where they are not known, the most so far, or 0."""
    try:
        with open("/proc/self/statm", "rb") as file:  # noqa: PTH123 - a Path takes twice the time
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        pass
    try:
        import resource
    except ModuleNotFoundError:  # on Windows
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _free(where: str) -> float:
    """Return the bytes that can still be taken."""
    if where == _DEVICE:
        return torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    return min(_free_of_machine(), _free_of_group())


def _free_of_machine() -> float:
    try:
        lines = Path("/proc/meminfo").read_text("ascii").splitlines()
        return next(int(line.split()[1]) * 1024.0 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        pass
    try:
        return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") - _resident())
    except (AttributeError, ValueError, OSError):  # not on every system
        return float("inf")


def _free_of_group(folder: Path = Path("/sys/fs/cgroup")) -> float:
    """Return the bytes that a container may still take; the cache of files does not count."""
    try:
        limit = (folder / "memory.max").read_text("ascii").strip()
        used = int((folder / "memory.current").read_text("ascii"))
        statistics = (folder / "memory.stat").read_text("ascii").splitlines()
    except OSError:
        return float("inf")
    cached = sum(int(line.split()[1]) for line in statistics if line.startswith("inactive_file "))
    return float("inf") if limit == "max" else float(limit) - used + cached


def _growth(where: str, meter: _Meter) -> str:
    return f"{where} grew by {_shown(meter.most)}{_IN_REGIONS}"


def _shown(size: float) -> str:
    return f"{size / _MB:.0f} MB"
