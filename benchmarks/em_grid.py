"""Time and memory of EM and of scikit-learn over the whole grid of sizes: takes half an hour."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from benchmarks._measure import Row
from benchmarks.em import cells, measure, row_of, summaries

__all__ = ["ON_REQUEST", "rows"]

ON_REQUEST = True

_PEAK = """
import sys, time, warnings
import torch
sys.path.insert(0, sys.argv[1])
from benchmarks.em import Cell, problem
from toolkit.em import fit
torch.set_num_threads(1)
warnings.simplefilter("ignore")
x, first = problem(Cell("full", int(sys.argv[3]), 64, 50, torch.float64))
def ours(samples, cache=False):
    fit(samples, 50, init=first, tol=0, max_iter=1, accelerate="none", cache=cache)
def theirs(samples):
    from sklearn.mixture import GaussianMixture
    GaussianMixture(50, max_iter=1, tol=0, weights_init=first.weights.numpy(), means_init=first.means.numpy(),
        precisions_init=first.precisions.numpy()).fit(samples.numpy())
run = {"ours": ours, "theirs": theirs}[sys.argv[2]]
run(x[:5000])
def resident(name):
    line = next(line for line in open("/proc/self/status") if line.startswith(name))
    return int(line.split()[1]) / 1024
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # forget the peak so far
before, begin = resident("VmRSS"), time.perf_counter()
run(x)
print(resident("VmHWM") - before, time.perf_counter() - begin)
"""

_FILE = """
import sys, time
import numpy as np, torch
from toolkit.em import fit
torch.set_num_threads(1)
x = np.load(sys.argv[1], mmap_mode="r")
begin = time.perf_counter()
found = fit(x, 5, covariance_type="diag", cache=False, max_iter=3, tol=0, generator=torch.Generator().manual_seed(0))
# Not `ru_maxrss`: it begins with the memory of the process that started this one.
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(int(peak.split()[1]) / 1024, time.perf_counter() - begin, found.log_likelihood)
"""


def rows() -> Iterator[Row]:
    """Measure every cell, then memory beside scikit-learn, then a file that is larger than it may use of memory."""
    for n_samples in (10_000, 100_000, 1_000_000):
        measured = []
        for cell in cells(n_samples):
            if cell.n_samples * cell.n_features * cell.n_components > 2e9:
                continue  # scikit-learn needs minutes for a step
            measured.append(measure(cell))
            yield row_of(measured[-1])
        yield from summaries(measured)
    yield _memory(1_000_000)
    yield _file(gigabytes=20)


def _memory(n_samples: int) -> Row:
    peaks, seconds = {}, {}
    for who in ("ours", "theirs"):
        peaks[who], seconds[who] = _run(_PEAK, str(Path(__file__).parent.parent), who, str(n_samples))
    return Row(
        f"memory over the data, without a copy / scikit-learn, full, {n_samples} x 64, 50 components, float64",
        peaks["ours"] / peaks["theirs"],
        "",
        f"{peaks['ours']:.0f} MB (goal 40) against {peaks['theirs']:.0f} MB; 2 passes {seconds['ours']:.0f} s "
        f"against {seconds['theirs']:.0f} s",
    )


def _file(gigabytes: float) -> Row:
    n_samples = round(gigabytes * 1e9 / (64 * 8))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.npy"
        array = np.lib.format.open_memmap(path, mode="w+", dtype=np.float64, shape=(n_samples, 64))
        block = torch.randn(100_000, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64).numpy()
        for first in range(0, n_samples, len(block)):
            part = array[first : first + len(block)]
            part[:] = block[: len(part)] + first % 5
        array.flush()
        del array
        peak, seconds, _ = _run(_FILE, str(path))
    return Row(
        f"memory of the whole process / 1 GB, a file of {gigabytes:g} GB, diag, 5 components",
        peak / 1000,
        "1",
        f"{peak:.0f} MB; 3 steps, two passes to start: {seconds:.0f} s",
    )


def _run(program: str, *arguments: str) -> list[float]:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], env=environment, capture_output=True, text=True, check=True
    )
    return [float(word) for word in done.stdout.split()]
