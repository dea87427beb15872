"""A plugin for pytest: the fixture `stops` holds the stops of a program against a table beside the test.

The plugin imports torch when the fixture is used, and not before.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from toolkit.gradients import Audit

__all__ = ["Stops", "stops"]

_UPDATE = "pytest --stops=update"
_WRITTEN = pytest.StashKey[dict[Path, int]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option ``--stops``."""
    parser.getgroup("stopgrad").addoption(
        "--stops",
        choices=["check", "update"],
        default="check",
        help="compare the stops of the gradient with their tables, or write the tables (default: check)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Refuse to write tables from several processes."""
    config.stash[_WRITTEN] = {}
    if config.getoption("--stops") == "update" and config.getoption("numprocesses", default=None):
        raise pytest.UsageError("`--stops=update` should run in one process. Found `--numprocesses`.")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Name the tables that were written."""
    for path, n_stops in config.stash[_WRITTEN].items():
        terminalreporter.write_line(f"stops: {n_stops} in {path}")


@pytest.fixture
def stops(request: pytest.FixtureRequest) -> Stops:
    """Hold the stops of a program against the table ``<test file>.stops.toml``; see `Stops`."""
    return Stops(request)


class Stops:
    """The expected stops of a test.

    Example:
        A test, whose table `pytest --stops=update` writes::

            def test_stops_of_the_loss(stops):
                model = Model()
                stops(lambda: model.loss(batch), model)
    """

    def __init__(self, request: pytest.FixtureRequest) -> None:
        """Name the table of a test."""
        self._config, self._path = request.config, request.path.with_suffix(".stops.toml")
        self._name, self._n_calls = request.node.nodeid.partition("::")[2], 0

    def __call__(self, loss: Callable[[], Any], params: Any = None) -> Audit:
        """Audit a loss function, and hold its stops against the table.

        Args:
            loss: As for `audit`.
            params: As for `audit`.

        Raises:
            AssertionError: If the audit is not valid, or a stop is gone, new, or of another effect than expected. With
                ``--stops=update`` the table is written instead.
        """
        __tracebackhide__ = True
        from toolkit.gradients import audit
        from toolkit.gradients.audit.expectations import differences, read_tables, stops_of

        found = audit(loss, params)
        if not found.valid:
            raise AssertionError(f"`loss` should do the same each time it runs. Found {found.reason}.")
        self._n_calls += 1
        name = self._name if self._n_calls == 1 else f"{self._name} ({self._n_calls})"
        tables = read_tables(self._path) if self._path.is_file() else {}
        seen = stops_of(found, self._path.parent)
        if self._config.getoption("--stops") == "update":
            self._write({**tables, name: seen})
        elif name not in tables:
            raise AssertionError(f"The stops of {name!r} should be in {self._path.name}. `{_UPDATE}` writes them.")
        elif told := differences(tables[name], seen):
            listed = "\n".join(map(str, told))
            raise AssertionError(f"The stops should be those of {self._path.name}. Found\n{listed}\n{found}")
        return found

    def _write(self, tables: dict[str, Any]) -> None:
        from toolkit.gradients.audit.expectations import write_tables

        write_tables(self._path, tables, _UPDATE)
        self._config.stash[_WRITTEN][self._path] = sum(map(len, tables.values()))
