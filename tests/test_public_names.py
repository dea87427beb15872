"""Every public function has a test, a short example that runs and, if it is a method's, the source of the method.

The public functions are those that the rooms of `toolkit` export. The lists of exceptions only become shorter.
"""

import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from folders import TESTS

import toolkit

ROOMS = [room.name for room in pkgutil.iter_modules(toolkit.__path__) if not room.name.startswith("_")]
# Rooms that ask questions of programs and give data: they are this project's own.
WITHOUT_METHODS = {"blocks", "datasets", "gradients", "testing"}

# Functions of algorithms that no paper introduces: plain definitions, changes of form, and ways into other functions.
OF_NO_PAPER = {
    "adversarial.certify_interval", "adversarial.ensemble", "adversarial.linearised", "adversarial.margin_loss",
    "adversarial.mlp", "adversarial.small_cnn",
    "em.fit_family", "em.fit_parsimonious", "em.from_unconstrained", "em.impute", "em.incremental_start",
    "em.log_density", "em.log_likelihood", "em.maximise_likelihood", "em.precisions_cholesky", "em.to_unconstrained",
    "rbm.adapt_temperatures", "rbm.exact_samples", "rbm.likelihood_gradient", "rbm.rank_generator", "rbm.shard",
    "rbm.swap_probabilities", "rbm.tempered_start", "softmax.naive_softmax",
}  # fmt: skip

# The most parameters of a function; ``**options``, the keywords that functions of a room share, are one.
MOST_PARAMETERS = {"adversarial": 10}


def functions(room: str) -> dict[str, Callable[..., object]]:
    """Return name -> function of the exports of a room."""
    module = importlib.import_module(f"toolkit.{room}")
    return {name: value for name in module.__all__ if inspect.isfunction(value := getattr(module, name))}


FUNCTIONS = {f"{room}.{name}": function for room in ROOMS for name, function in functions(room).items()}


def has_example(function: Callable[..., object]) -> bool:
    return 0 < len(re.findall(r"^ *(?:>>>|\.\.\.) ", inspect.getdoc(function) or "", re.MULTILINE)) <= 6


def has_source(function: Callable[..., object]) -> bool:
    return bool(re.search(r"^References:|\b(?:1[6-9]|20)\d\d\b", inspect.getdoc(function) or "", re.MULTILINE))


def test_a_public_function_is_tested() -> None:
    texts = "\n".join(path.read_text("utf-8") for path in TESTS.rglob("*.py") if path != Path(__file__))
    words = set(re.findall(r"\w+", texts))
    assert sorted(name for name in FUNCTIONS if name.split(".")[1] not in words) == []


def test_a_public_function_has_a_short_example() -> None:
    assert [name for name, function in FUNCTIONS.items() if not has_example(function)] == []


def test_a_function_of_an_algorithm_has_its_source() -> None:
    methods = {name: function for name, function in FUNCTIONS.items() if name.split(".")[0] not in WITHOUT_METHODS}
    assert {name for name, function in methods.items() if not has_source(function)} == OF_NO_PAPER


@pytest.mark.parametrize("room", MOST_PARAMETERS)
def test_no_function_has_too_many_parameters(room: str) -> None:
    counts = {name: len(inspect.signature(function).parameters) for name, function in functions(room).items()}
    assert {name: n for name, n in counts.items() if n > MOST_PARAMETERS[room]} == {}


@pytest.mark.parametrize("lines", [0, 7])
def test_no_example_and_a_long_one_are_noticed(lines: int) -> None:
    def function() -> None: ...

    function.__doc__ = "Do it.\n\n" + ">>> 1\n" * lines + "(see page 1234 of 'A')"
    assert not has_example(function)
    assert not has_source(function)
