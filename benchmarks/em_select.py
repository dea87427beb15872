"""`select` beside mclust on data of R and drawn ones: the BIC of every fit, the choice, and the time.

Nothing is measured where R with its package mclust is missing.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from benchmarks._measure import Row
from toolkit import em
from toolkit.em import select
from toolkit.em.models.parsimonious import ParsimoniousParameters, covariances_from_scatter

__all__ = ["ON_REQUEST", "rows"]

ON_REQUEST = True

# Components tried.
_MOST = 9

# Repeats of mclust in one process; the median counts.
_REPEATS = 5

_DATA = """
suppressMessages(library(mclust))
data(banknote); data(diabetes)
name <- "{name}"
if (startsWith(name, "drawn")) {{
  set.seed(as.integer(substring(name, 7)))
  d <- sample(1:4, 1); k <- sample(2:4, 1)
  centres <- matrix(rnorm(k * d, sd = 4), k)
  x <- centres[sample(k, 150, replace = TRUE), , drop = FALSE] + matrix(rnorm(150 * d), 150)
}} else {{
  found <- list(faithful = faithful, iris = iris[, 1:4], banknote = banknote[, -1], diabetes = diabetes[, -1])
  x <- as.matrix(found[[name]])
}}
save <- function(values, file) write.table(
  values, file.path("{folder}", file), sep = ",", na = "nan", row.names = FALSE, col.names = FALSE)
"""

# Samples, and mclust's BIC (minus that here) of the numbers of components (rows) and its models (columns).
_TABLE = """
seconds <- replicate({repeats}, sum(system.time(found <<- Mclust(x, G = 1:{most}, verbose = FALSE))[1:2]))
save(x, "x.csv")
save(t(colnames(found$BIC)), "models.csv")
save(unclass(found$BIC), "bic.csv")
cat(median(seconds))
"""

# The responsibilities of one fit.
_CELL = """
save(Mclust(x, G = {k}, modelNames = "{model}", verbose = FALSE)$z, "{model}{k}.csv")
"""

# mclust's names of the models of a single feature.
_OF_ONE = {"E": "EII", "V": "VII", "X": "EII", "XII": "EII", "XXI": "EEI", "XXX": "EEE"}


def rows() -> Iterator[Row]:
    """Compare processor time, and the cells of the tables of BIC; fit again from mclust's end where ours is worse."""
    if shutil.which("Rscript") is None or _run("library(mclust)") is None:
        raise ModuleNotFoundError("R's package mclust is missing", name="mclust")
    for name in ("faithful", "iris", "banknote", "diabetes", *(f"drawn {seed}" for seed in range(4))):
        with tempfile.TemporaryDirectory() as folder:
            yield _row(name, folder)


def _row(name: str, folder: str) -> Row:
    """Return the comparison on one data set."""
    data = _DATA.format(name=name, folder=folder)
    said = _run(data + _TABLE.format(repeats=_REPEATS, most=_MOST))
    if said is None:
        raise RuntimeError(f"mclust failed on {name}.")
    x = torch.from_numpy(np.loadtxt(Path(folder, "x.csv"), delimiter=",", ndmin=2))
    models = Path(folder, "models.csv").read_text().replace('"', "").strip().split(",")
    theirs = -np.loadtxt(Path(folder, "bic.csv"), delimiter=",", ndmin=2)
    start = time.process_time()
    found = select(x, range(1, _MOST + 1), generator=torch.Generator().manual_seed(0))
    ratio = (time.process_time() - start) / float(said.split()[-1])
    sound = {(each.model, each.n_components): each for each in found.ranked}
    both = lower = 0
    higher, explained = [], 0
    for (k, place), value in np.ndenumerate(theirs):
        model = _OF_ONE.get(models[place], models[place])
        ours = sound.get((model, k + 1))
        if not np.isfinite(value) or ours is None:
            continue
        both += 1
        lower += ours.bic < value - 1e-3
        if ours.bic > value + 1e-3:
            higher.append(f"{model},{k + 1}")
            explained += _is_reached_from_theirs(x, model, models[place], k + 1, value, data, folder)
    best = np.nanmin(theirs)
    k, place = np.argwhere(theirs == best)[0]
    choice = f"{found.best.model},{found.best.n_components}"
    note = f"BIC lower by more than .001 in {lower} and higher in {len(higher)} of {both}"
    if higher:
        note += f" ({', '.join(higher)}; from mclust's own end a fit here is as low in {explained})"
    note += f"; chosen {choice}, {found.best.bic:.3f}, and {models[place]},{k + 1}, {best:.3f}"
    return Row(f"select of {len(models)} models, 1 to {_MOST} components / mclust's, {name}", ratio, "at most 3", note)


def _is_reached_from_theirs(
    x: torch.Tensor, model: str, their_name: str, k: int, bic: float, data: str, folder: str
) -> bool:
    """Say whether a fit here from mclust's responsibilities is as low: another start explains the difference."""
    if _run(data + _CELL.format(k=k, model=their_name)) is None:
        return False
    z = torch.from_numpy(np.loadtxt(Path(folder, f"{their_name}{k}.csv"), delimiter=",", ndmin=2))
    counts = z.sum(0)
    means = z.mT @ x / counts[:, None]
    differences = x - means[:, None]
    structure = covariances_from_scatter(model, counts, (z.mT[:, :, None] * differences).mT @ differences)
    first = ParsimoniousParameters(log_weights=(counts / counts.sum()).log(), means=means, structure=structure)
    again = em.fit_parsimonious(x, k, model, init=first)
    return em.bic(again.log_likelihood, first.n_parameters, len(x)) <= bic + 1e-3


def _run(program: str) -> str | None:
    """Return the output of an R program, or None if it fails."""
    ended = subprocess.run(["Rscript", "-e", program], capture_output=True, text=True, check=False)
    return None if ended.returncode else ended.stdout
