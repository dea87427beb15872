"""An atlas of the stops in public packages: each answer of an audit beside the package without these stops.

    python -m benchmarks atlas [--package NAME]

Each program in `programs/` builds the losses of one package; `records/` holds the answers. The packages are pinned in
`requirements.txt`; ``make atlas`` installs them into a virtual environment of their own.
"""

from __future__ import annotations

import math
import pkgutil
import warnings
from collections.abc import Iterator
from importlib.metadata import version

import torch

from benchmarks._measure import Row
from benchmarks._options import options
from benchmarks.atlas import programs
from benchmarks.atlas.comparison import compared_losses
from benchmarks.atlas.links import repository
from benchmarks.atlas.processes import Failure
from benchmarks.atlas.records import Record

ON_REQUEST = True


def rows() -> Iterator[Row]:
    """Write the record of each package, or of the one that is named; yield the share of answers that differ."""
    chosen = options().package
    for info in pkgutil.iter_modules(programs.__path__, f"{programs.__name__}."):
        package = info.name.rpartition(".")[2].replace("_", "-")
        if chosen in (None, package):
            yield row_of(package, info.name)


def row_of(package: str, module: str) -> Row:
    """Write the record of a package, and return its row; an earlier record stays if the package fails."""
    try:
        return _row(_surveyed(package, module))
    except Failure as failure:
        return Row(f"{package} {version(package)}: not audited", math.nan, "0", str(failure))


def _surveyed(package: str, module: str) -> Record:
    """Return the record of a package, and write it."""
    warnings.simplefilter("ignore")  # of the packages
    released = torch.__version__.partition("+")[0]
    record = Record(package, version(package), released, compared_losses(module), repository(package))
    record.write()
    return record


def _row(record: Record) -> Row:
    compared = [answer for _, answer in record.answers() if answer.agrees is not None]
    wrong = [answer for answer in compared if not answer.agrees]
    failed = [loss for loss in record.losses if loss.failure]
    note = f"{len(compared)} answers of {len(record.losses)} losses compared, {len(failed)} losses without an answer"
    what = f"{record.package} {record.version}: answers that differ from the removal"
    return Row(what, len(wrong) / len(compared) if compared else 0.0, "0", note)
