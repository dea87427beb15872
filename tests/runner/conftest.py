"""Runs of tests are no longer than they have to be: their processes start warm, and a step is timed three times."""

import fcntl
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import toy
import warm

from toolkit.runner import _comparison
from toolkit.runner._config import load_config


@pytest.fixture(scope="session", autouse=True)
def _short_runs() -> Iterator[None]:
    multiprocessing.set_executable(warm.python())
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(_comparison, "_TIMING_SECONDS", 0)
        yield
    multiprocessing.set_executable(sys.executable)


@pytest.fixture(scope="session")
def two_steps(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Path]:
    """Return a function from a config to the folder of its record of two steps, which all processes of tests share."""
    root = tmp_path_factory.getbasetemp()
    root = (root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / "two-steps"
    root.mkdir(exist_ok=True)

    def folder(path: Path) -> Path:
        with (root / f"{path.stem}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not list(root.glob(f"results/{path.stem}/*/seed-000/record.json")):
                short = toy.rewrite(path, root / path.name, toy.two_steps(path))
                _comparison.run_config(load_config(short), root / "results")
        (found,) = root.glob(f"results/{path.stem}/*")
        return found

    return folder
