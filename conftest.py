"""Settings that every test and example shares; runs the examples, in docstrings (pytest) and documents (sybil)."""

import atexit
import contextlib
import gc
import importlib
import os
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

# Small models on two threads that spin while they wait run up to ten times slower than on one.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# No other package adds strategies to hypothesis here. It would import trio to ask.
os.environ.setdefault("HYPOTHESIS_NO_PLUGINS", "1")

import pytest
from sybil import Sybil
from sybil.parsers.myst import PythonCodeBlockParser

# Sphinx's settings, the notebooks and the picture's script have no examples; a doctest run would import and run them.
# The project that `stopgrad init` lays out has an `experiments` too: `test_commands.py` runs its tests in a process.
collect_ignore_glob = [
    "docs/project/*",
    "docs/conf.py",
    "docs/block_atlas.py",
    "docs/pictures.py",
    "docs/notebooks/*",
    "docs/gallery/*",
    "docs/_build/*",
]

pytest_collect_file = Sybil(parsers=[PythonCodeBlockParser()], patterns=["README.md", "docs/*.md"]).pytest()


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out modules without examples, most of all: each would be imported, and all of its objects looked at.

    A package is imported first: its modules would be made twice if it imported them while pytest does.
    """
    rooms = [Path(__file__).with_name(room) for room in ("toolkit", "experiments")]
    if collection_path.suffix != ".py" or not any(room in collection_path.parents for room in rooms):
        return None
    if collection_path.name == "__init__.py":
        return None
    return ">>> " not in collection_path.read_text("utf-8") or None


class _TorchAlone:
    """Stands for `gc` where recorded steps look for torch's objects: of all that is there by now, it has these alone.

    There are millions of others, the tests themselves. Tests of `gc.freeze` take `gc` itself. Of the referrers among
    them it has those of `torch.is_grad_enabled`, directly, in static methods and in bodies of classes: no step asks for
    others.
    """

    def __init__(self) -> None:
        import torch
        from warm import objects_of_torch

        self._found = objects_of_torch()
        self._holders = gc.get_referrers(torch.is_grad_enabled)
        if methods := [holder for holder in self._holders if isinstance(holder, staticmethod)]:
            self._holders += gc.get_referrers(*methods)
        if bodies := [holder for holder in self._holders if isinstance(holder, dict) and "__module__" in holder]:
            self._holders += gc.get_referrers(*bodies)

    def get_freeze_count(self) -> int:
        return 0

    def get_objects(self) -> list[Any]:
        return [*self._found, *gc.get_objects()]

    def get_referrers(self, *objects: object) -> list[Any]:
        wanted = set(map(id, objects))
        hidden = [holder for holder in self._holders if not wanted.isdisjoint(map(id, gc.get_referents(holder)))]
        return [*hidden, *gc.get_referrers(*objects)]


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Keep the garbage collector from the tests themselves: they stay to the end, and it takes a fifth of this time."""
    gc.disable()
    found = yield
    if "toolkit.gradients.audit.steps" in sys.modules and not session.config.option.collectonly:
        from toolkit.gradients.audit import _regions, variables

        importlib.import_module("torch._dynamo")  # as the first transform of `torch.func` does, and some audit
        variables.gc = _regions.gc = _TorchAlone()  # type: ignore[attr-defined]
    gc.freeze()
    gc.enable()
    return found


def pytest_sessionstart(session: pytest.Session) -> None:
    """Leave the objects of the session to the system: Python takes longer to destroy them than to collect the tests."""
    atexit.register(_leave, session)  # called after whatever is registered from now on


def _leave(session: pytest.Session) -> None:
    if hasattr(sys, "last_type"):  # of an exception that pytest did not catch: Python knows the exit status
        return
    with contextlib.suppress(OSError, ValueError):  # of a pipe that nobody reads, and of a closed file
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(int(session.exitstatus))


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Forget compiled code at the end of a file: torch compiles one function in eight ways at most, in all files."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None and dynamo.utils.counters and (nextitem is None or nextitem.path != item.path):
        dynamo.reset()
        dynamo.utils.counters.clear()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put files with slow tests first among several processes, none of which is then left with one at the end."""
    if hasattr(config, "workerinput"):
        slow = {item.path for item in items if item.get_closest_marker("slow")}
        items.sort(key=lambda item: item.path not in slow)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let a run round otherwise: `make test-portable` does."""
    group = parser.getgroup("rounding")
    group.addoption("--torch-threads", type=int, default=1, metavar="N", help="threads of each operation (default: 1)")
    group.addoption("--reversed-sums", action="store_true", help="add the terms of every sum in reverse")


def pytest_configure(config: pytest.Config) -> None:
    """Reverse the sums of every test, if this is asked for."""
    if config.getoption("--reversed-sums"):
        config.pluginmanager.register(_ReversedSums())


class _ReversedSums:
    @pytest.fixture(autouse=True)
    def _sums(self, request: pytest.FixtureRequest) -> Iterator[None]:
        if request.node.get_closest_marker("keeps_its_sums"):
            yield
            return
        from reversed_sums import reversed_sums

        with reversed_sums():
            yield


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Set threads and seed before the fixtures of a test; a fixture of every test would take longer than most tests."""
    _set_threads_and_seed(item.config)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    """Set threads and seed again: what a test draws does not depend on the fixtures that others have made."""
    _set_threads_and_seed(item.config)


def _set_threads_and_seed(config: pytest.Config) -> None:
    import torch

    torch.set_num_threads(config.getoption("--torch-threads"))
    if torch.accelerator.is_available():
        torch.manual_seed(0)
    else:  # without one `torch.manual_seed` keeps a call with its stack for each kind, which takes milliseconds
        torch.default_generator.manual_seed(0)


@pytest.fixture(scope="session")
def doctest_namespace() -> dict[str, Any]:
    """Return the names that docstrings use; documents import for themselves."""
    import torch

    import toolkit

    return {"torch": torch, **{name: getattr(toolkit, name) for name in toolkit.__all__}}
