"""Numbers that a caller gives: every public function takes and refuses the same ones, and says so in one form."""

import itertools
import math
import re
from collections.abc import Collection

import calls
import numpy as np
import pytest
import torch
from each import each

from toolkit._checks import broadcasts, choice, integer, number

NUMBERS = {name: found for name, function in calls.FUNCTIONS.items() if (found := calls.numbers_of(function))}

# The rooms of functions of tensors.
OF_TENSORS = (
    "adversarial",
    "em",
    "games",
    "policy_gradient",
    "quantization",
    "rbm",
    "self_supervised",
    "softmax",
    "stochastic",
    "value_learning",
    "weighting",
)

# In inner loops, whose callers check: the layers of a machine, and the examples of a method of training. The swap rates
# may be a list.
UNCHECKED = re.compile(
    r"rbm\.(Bernoulli|Categorical|Gaussian|Rectified|Joint)\b|adversarial\.\w+\.example$|rbm\.spread_temperatures$"
)


def _annotated(rooms: Collection[str], *annotations: str) -> dict[str, list[str]]:
    """Return the parameters of public functions that have one of the annotations."""
    return {
        name: found
        for name, function in calls.FUNCTIONS.items()
        if name.split(".")[0] in rooms and isinstance(calls.CALLS.get(name), calls.Call) and not UNCHECKED.match(name)
        if (found := [key for key, given in calls.parameters_of(function).items() if given.annotation in annotations])
    }


TENSORS = _annotated(OF_TENSORS, "Tensor")
MODELS = _annotated(["adversarial"], "Model", "Attack", "Callable[[Tensor], Tensor]", "nn.Module") | _annotated(
    ["rbm"], "RBM", "RBM | Joint", "TemperedState"
)

REFUSED = [True, np.True_, "2", math.nan]

# A level of detail may be a truth value, as elsewhere in scikit-learn.
LEVELS = {"verbose"}


def test_every_public_function_with_a_number_has_a_call() -> None:
    assert set(NUMBERS) - set(calls.CALLS) == set()


@each("name", NUMBERS)
def test_numbers_of_numpy_and_torch_are_taken(name: str) -> None:
    values = {argument: calls.given(name, argument) for argument in NUMBERS[name]}
    dtypes = {argument: torch.int64 if "int" in kinds else torch.float64 for argument, kinds in NUMBERS[name].items()}
    calls.CALLS[name](**{argument: np.asarray(value)[()] for argument, value in values.items()})
    calls.CALLS[name](**{argument: np.asarray(value) for argument, value in values.items()})
    calls.CALLS[name](**{argument: torch.tensor(value, dtype=dtypes[argument]) for argument, value in values.items()})


@each("name", NUMBERS)
def test_all_else_is_refused(name: str) -> None:
    for argument, kinds in NUMBERS[name].items():
        a_fraction = [2.5] if "int" in kinds else []
        tensors = [] if "Tensor" in kinds else [torch.tensor(True), torch.tensor(2.0, requires_grad=True)]
        for value in [*REFUSED, *a_fraction, *tensors]:
            if not (value is True and argument in LEVELS):
                with pytest.raises((ValueError, TypeError), match=rf"^`{argument}` should .*\. Found .*\.$"):
                    calls.CALLS[name](**{argument: value})


@each("name", TENSORS)
def test_all_but_tensors_is_refused(name: str) -> None:
    for argument in TENSORS[name]:
        for value in (None, "2", [1.0, 2.0], 0.5, np.ones(2)):
            with pytest.raises((ValueError, TypeError), match=rf"^`{argument}` should .*\. Found .*\.$"):
                calls.CALLS[name](**{argument: value})


@each("name", MODELS)
def test_all_but_models_is_refused(name: str) -> None:
    for argument in set(MODELS[name]) & set(calls.CALLS[name].arguments):
        for value in (None, "2", [1.0, 2.0], 0.5, torch.ones(2)):
            with pytest.raises(TypeError, match=rf"^`{argument}` should .*\. Found .*\.$"):
                calls.CALLS[name](**{argument: value})


COUNTS = [
    (0, {}, "a positive integer. Found 0."),
    (1, {"least": 2}, "an integer from 2. Found 1."),
    (5, {"least": 2, "most": 4}, "an integer from 2 to 4. Found 5."),
    (np.float64(2), {}, "a positive integer. Found np.float64(2.0)."),
]

RANGES = [
    ({}, math.inf, "a finite number"),
    ({"least": 0}, -1, "finite and not negative"),
    ({"above": 0}, 0, "positive and finite"),
    ({"least": 2}, 1.5, "finite and at least 2"),
    ({"above": 2}, 2, "finite and above 2"),
    ({"least": 0, "most": 1}, 1.5, "from 0 to 1"),
    ({"above": 0, "below": 1}, 1, "between 0 and 1"),
    ({"least": 0, "below": 1}, 1, "at least 0 and less than 1"),
    ({"above": 0, "most": 1}, 0, "above 0 and at most 1"),
]


@pytest.mark.parametrize(("value", "limits", "error"), COUNTS)
def test_counts(value: object, limits: dict[str, int], error: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"`n` should be {error}")):
        integer("n", value, **limits)


def test_ends_of_counts_are_taken() -> None:
    assert integer("n", np.int8(2), 2, 2) == 2
    assert type(integer("n", torch.tensor(2, dtype=torch.uint8))) is int


@pytest.mark.parametrize(("limits", "value", "error"), RANGES)
def test_ranges(limits: dict[str, float], value: float, error: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"`rate` should be {error}. Found {value!r}.")):
        number("rate", value, **limits)
    ends = [limits[end] for end in ("least", "most") if end in limits]
    assert [number("rate", end, **limits) for end in ends] == ends


def test_numbers_come_back_as_they_are() -> None:
    assert number("rate", np.float32(0.1)) == float(np.float32(0.1))
    assert type(number("rate", torch.tensor(1))) is float


def test_choices() -> None:
    choice("mode", "a", ("a", "b"))
    for value in ("c", None, ["a"], torch.tensor(1)):
        with pytest.raises(ValueError, match=re.escape(f"`mode` should be one of 'a', 'b'. Found {value!r}.")):
            choice("mode", value, ("a", "b"))


def test_shapes_that_broadcast_without_growth() -> None:
    sizes = [(), (1,), (3,), (2,), (1, 3), (3, 1), (3, 3), (1, 1, 3), (0,), (2, 3)]
    for shape, to in itertools.product(sizes, sizes):
        try:
            expected = torch.broadcast_shapes(shape, to) == to
        except RuntimeError:
            expected = False
        assert broadcasts(shape, to) == expected, (shape, to)
