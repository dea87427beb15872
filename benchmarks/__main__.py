"""Print a table of ratios: ``python -m benchmarks [--threads N] [NAME ...]``, for example ``... blocks em``.

One thread unless more are asked for. Modules with ``ON_REQUEST = True``, which take long, run only if they are named.
``--help`` lists them all.
"""

from __future__ import annotations

import os
import sys

from benchmarks._options import names, options

# Before torch is imported: two small thread pools that spin-wait for each other measure nothing but themselves.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ["OMP_NUM_THREADS"] = str(options().threads)

import ctypes
import importlib
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

# Options of glibc's `mallopt`, and the largest value of both.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MOST = -1, -3, 2**30

_VERSIONS = ("stopgrad", "torch", "numpy", "scipy", "scikit-learn")


def main(chosen: list[str]) -> None:
    """Run the chosen modules, or all that do not take long."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    _keep_memory()
    console = Console(width=None if sys.stdout.isatty() else 150)
    console.print(_machine(), highlight=False)
    table = Table(
        "comparison", "ratio", "goal", "measured", title="ours / theirs: below 1 is better", title_justify="left"
    )
    table.columns[1].justify = "right"
    on_request = names()
    skipped = [f"{name}: runs only if it is named" for name, long in on_request.items() if long and not chosen]
    for name in chosen or [name for name, long in on_request.items() if not long]:
        try:
            module = importlib.import_module(f"benchmarks.{name}")
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
    main(options().names)
