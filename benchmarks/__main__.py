"""Print a table of ratios: ``python -m benchmarks [--threads N] [module ...]``, for example ``... blocks em``.

One thread unless more are asked for. Modules with ``ON_REQUEST = True``, which take long, run only if they are named.
"""

from __future__ import annotations

import os
import sys

# Before torch is imported: two small thread pools that spin-wait for each other measure nothing but themselves.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ["OMP_NUM_THREADS"] = sys.argv[sys.argv.index("--threads") + 1] if "--threads" in sys.argv[:-1] else "1"

import ctypes
import difflib
import importlib
import pkgutil
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import benchmarks

# Options of glibc's `mallopt`, and the largest value of both.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MOST = -1, -3, 2**30

_VERSIONS = ("stopgrad", "torch", "numpy", "scipy", "scikit-learn")


def main(chosen: list[str]) -> int:
    """Run the chosen modules, or all of them, and return the exit code."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    _keep_memory()
    options = {place for place, word in enumerate(chosen) if word.startswith("--")}
    chosen = [word for place, word in enumerate(chosen) if not {place, place - 1} & options]
    names = [info.name for info in pkgutil.iter_modules(benchmarks.__path__) if not info.name.startswith("_")]
    for name in chosen:
        if name not in names:
            close = difflib.get_close_matches(name, names, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            print(f"A benchmark should be one of {', '.join(names)}. Found {name!r}.{hint}", file=sys.stderr)
            return 2
    console = Console(width=None if sys.stdout.isatty() else 150)
    console.print(_machine(), highlight=False)
    table = Table("what", "ratio", "goal", "measured", title="ours / theirs: below 1 is better", title_justify="left")
    table.columns[1].justify = "right"
    skipped = []
    for name in chosen or names:
        try:
            module = importlib.import_module(f"benchmarks.{name}")
            if not chosen and getattr(module, "ON_REQUEST", False):
                skipped.append(f"{name}: runs only if it is named")
                continue
            for row in module.rows():
                if not sys.stderr.isatty():
                    print(f"{row.ratio:6.3f}  {row.what}: {row.note}", file=sys.stderr, flush=True)
                table.add_row(row.what, f"{row.ratio:.2f}", row.goal, row.note)
        except ModuleNotFoundError as error:
            skipped.append(f"{name}: stopped, because the optional peer {error.name!r} is not installed")
        table.add_section()
    console.print(table)
    for line in skipped:
        console.print(line, highlight=False)
    return 0


def _keep_memory() -> None:
    """Let the allocator keep freed memory.

    Otherwise a large tensor lies on new pages or on old ones, by chance. New pages take several times as long as the
    computation, which is then not measured.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_TRIM_THRESHOLD, _MOST)
        mallopt(_MMAP_THRESHOLD, _MOST)


def _machine() -> str:
    versions = ", ".join(f"{name} {_version(name)}" for name in _VERSIONS)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return (
        f"{_cpu()}, {cores} cores, {torch.get_num_threads()} thread(s) used, {platform.system()} {platform.machine()}\n"
        f"Python {platform.python_version()}, {versions}"
    )


def _cpu() -> str:
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown processor"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "(not installed)"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
