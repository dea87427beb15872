"""`select` beside mclust on data of R: the BIC of every model with every number of components, the choice, the time.

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
from toolkit.em import select

__all__ = ["ON_REQUEST", "rows"]

ON_REQUEST = True

# Samples, and mclust's BIC (minus that here) of nine numbers of components (rows) and its fourteen models (columns).
_PROGRAM = """
library(mclust)
data(banknote); data(diabetes)
x <- as.matrix(switch("{name}", faithful = faithful, iris = iris[, 1:4], banknote = banknote[, -1], diabetes[, -1]))
seconds <- system.time(found <- Mclust(x, G = 1:9, verbose = FALSE))
write.table(x, "{folder}/x.csv", sep = ",", row.names = FALSE, col.names = FALSE)
write.table(t(colnames(found$BIC)), "{folder}/models.csv", sep = ",", row.names = FALSE, col.names = FALSE)
write.table(unclass(found$BIC), "{folder}/bic.csv", sep = ",", na = "nan", row.names = FALSE, col.names = FALSE)
cat(seconds[[1]] + seconds[[2]])
"""


def rows() -> Iterator[Row]:
    """Count the cells of the tables of BIC in which one is lower by more than .001 %, and compare processor time."""
    rscript = shutil.which("Rscript")
    if rscript is None:
        return
    for name in ("faithful", "iris", "banknote", "diabetes"):
        with tempfile.TemporaryDirectory() as folder:
            program = _PROGRAM.format(name=name, folder=folder)
            ended = subprocess.run([rscript, "-e", program], capture_output=True, text=True, check=False)
            if ended.returncode:
                return
            x = np.loadtxt(Path(folder, "x.csv"), delimiter=",")
            models = Path(folder, "models.csv").read_text().replace('"', "").strip().split(",")
            theirs = -np.loadtxt(Path(folder, "bic.csv"), delimiter=",")
        seconds = float(ended.stdout.split()[-1])
        start = time.process_time()
        found = select(torch.from_numpy(x), generator=torch.Generator().manual_seed(0))
        ratio = (time.process_time() - start) / seconds
        sound = {(each.model, each.n_components): each.bic for each in found.ranked}
        ours = np.array([[sound.get((model, k), np.nan) for model in models] for k in range(1, 10)])
        lower, higher = (
            int((one < other - 1e-5 * abs(other)).sum()) for one, other in ((ours, theirs), (theirs, ours))
        )
        note = f"BIC lower in {lower} and higher in {higher} of {int(np.isfinite(ours + theirs).sum())}, "
        note += f"the best {found.best.bic:.2f} against {np.nanmin(theirs):.2f}"
        yield Row(f"select of 14 models, 1 to 9 components / mclust's, {name}", ratio, "at most 3", note)
