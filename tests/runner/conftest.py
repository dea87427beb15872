"""Runs of tests are no longer than they have to be: their processes start warm, and a step is timed three times."""

import multiprocessing
import sys
from collections.abc import Iterator

import pytest
import warm

from toolkit.runner import _comparison


@pytest.fixture(scope="session", autouse=True)
def _short_runs() -> Iterator[None]:
    multiprocessing.set_executable(warm.python())
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(_comparison, "_TIMING_SECONDS", 0)
        yield
    multiprocessing.set_executable(sys.executable)
