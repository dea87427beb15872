"""One test that asks the same of many values: an item instead of hundreds, each of which takes milliseconds by itself.

    @each("name", NAMES)
    def test_a_rule(name): ...

It is written as `pytest.mark.parametrize` is, tries all values, and fails with every failure, labelled by its value.
With the environment variable ``EACH`` set, every value is an item of its own, to run one of them:
``EACH=1 pytest -k "rule and NAME"``.
"""

import functools
import inspect
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch

Label = Callable[[Any], object]


def each(
    names: str | tuple[str, ...], values: Iterable[Any], *, ids: Label | Iterable[object] | None = None
) -> Callable[[Callable[..., None]], Any]:
    """Return a decorator that calls a test once for each value, with torch's global generator seeded anew."""
    values = list(values)
    labels = list(map(ids, values)) if callable(ids) else list(ids or map(_label, values))
    if len(labels) != len(values) or not values:
        raise ValueError(f"`ids` should be one for each value. Found {len(labels)} for {len(values)}.")
    if "EACH" in os.environ:
        return pytest.mark.parametrize(names, values, ids=list(map(str, labels)))

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def tried(**fixtures: Any) -> None:
            failures, skipped = [], []
            for label, value in zip(labels, values, strict=True):
                torch.default_generator.manual_seed(0)
                try:
                    test(**fixtures, **_given(names, value))
                except pytest.skip.Exception as skip:
                    skipped.append(skip)
                except (Exception, pytest.fail.Exception) as error:
                    error.add_note(f"for {names if isinstance(names, str) else ', '.join(names)} = {label}")
                    failures.append(error)
            if len(failures) == 1:
                raise failures[0]
            if failures:
                raise BaseExceptionGroup(f"{len(failures)} of {len(values)} values fail", failures)
            if len(skipped) == len(values):
                raise skipped[0]

        parameters = inspect.signature(test).parameters
        missing = [parameters[name] for name in parameters if name not in _given(names, values[0])]
        tried.__signature__ = inspect.Signature(missing)
        return tried

    return decorate


def _given(names: str | tuple[str, ...], value: Any) -> dict[str, Any]:
    return {names: value} if isinstance(names, str) else dict(zip(names, value, strict=True))


def _label(value: Any) -> object:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(str(_label(part)) for part in value)
    return getattr(value, "__name__", value)
