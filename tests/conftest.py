"""Tests have no examples in docstrings: they are imported once, as tests."""

from collections.abc import Generator, Iterator

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_collect_file() -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    """Leave out the second collector of each file, which would look for examples."""
    found = yield
    return [collector for collector in found if type(collector) is pytest.Module]


@pytest.fixture(autouse=True)
def _an_accelerator(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.node.get_closest_marker("gpu") is None:
        yield
        return
    from accelerator import accelerator

    with accelerator():
        yield
