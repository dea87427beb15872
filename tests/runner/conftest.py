"""Runs side by side start their processes warm."""

import multiprocessing
import sys
from collections.abc import Iterator

import pytest
import warm


@pytest.fixture(scope="session", autouse=True)
def _processes_start_warm() -> Iterator[None]:
    multiprocessing.set_executable(warm.python())
    yield
    multiprocessing.set_executable(sys.executable)
