"""Runs the examples: in docstrings (by pytest itself), and in README.md and docs/ (by sybil)."""

from typing import Any

import pytest
from sybil import Sybil
from sybil.parsers.myst import PythonCodeBlockParser

# The tests' own files and Sphinx's settings have no examples; a doctest run would import them a second time.
collect_ignore_glob = ["docs/conf.py", "docs/_build/*"]

pytest_collect_file = Sybil(parsers=[PythonCodeBlockParser()], patterns=["README.md", "docs/*.md"]).pytest()


@pytest.fixture(autouse=True)
def _names_of_examples(request: pytest.FixtureRequest) -> None:
    """Give docstrings what a reader of them has imported; documents import for themselves."""
    if isinstance(request.node, pytest.DoctestItem):
        import torch

        import toolkit

        names: dict[str, Any] = request.getfixturevalue("doctest_namespace")
        names |= {"torch": torch, **{name: getattr(toolkit, name) for name in toolkit.__all__}}
