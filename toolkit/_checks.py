"""Checks of the numbers and choices that a caller gives: one rule, and one form of error, in every room.

A number is Python's, a scalar of NumPy or of torch, or an array or a tensor without dimensions. A truth value is no
number, and neither is a tensor that carries a gradient: as a plain number it would lose it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from numbers import Integral, Real
from typing import Any

__all__ = ["broadcasts", "choice", "function", "index", "instance", "integer", "level", "number", "real"]


def integer(name: str, value: object, least: int = 1, most: int | None = None) -> int:
    """Return an integer of any kind as Python's.

    Raises:
        ValueError: If `value` is not an integer, below `least` or above `most`.
    """
    found = index(value)
    if found is None or found < least or (most is not None and found > most):
        expected = "a positive integer" if least == 1 else f"an integer from {least}"
        if most is not None:
            expected = f"an integer from {least} to {most}"
        raise ValueError(f"`{name}` should be {expected}. Found {value!r}.")
    return found


def index(value: object) -> int | None:
    """Return an integer of any kind as Python's, None for anything else."""
    if type(value) is int:
        return value
    found = _plain(value)
    return int(found) if isinstance(found, Integral) else None


def number(
    name: str,
    value: object,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
    infinite: bool = False,
) -> float:
    """Return a number of any kind as a Python float; `least` and `most` are allowed, `above` and `below` not.

    The number has to be finite, unless `infinite`.

    Raises:
        ValueError: If `value` is not a number, not finite, or out of its range.
    """
    found = real(value)
    if found is not None and (math.isfinite(found) or (infinite and found == math.inf)):
        high_enough = (least is None or found >= least) and (above is None or found > above)
        if high_enough and (most is None or found <= most) and (below is None or found < below):
            return found
    expected = _range(least, above, most, below)
    expected = expected.removesuffix(" and finite") if infinite else expected
    raise ValueError(f"`{name}` should be {expected}. Found {value!r}.")


def real(value: object) -> float | None:
    """Return a real number of any kind as a Python float, None for anything else."""
    if type(value) is float:
        return value
    found = _plain(value)
    return float(found) if isinstance(found, Real) else None


def level(value: object) -> int:
    """Return a level of detail, `verbose`, as a Python int; it may be a truth value, as elsewhere in scikit-learn.

    Raises:
        ValueError: If `value` is not an integer from 0.
    """
    return integer("verbose", int(value) if isinstance(value, bool) else value, 0)


def choice(name: str, value: object, choices: Iterable[str]) -> None:
    """Raise a ValueError unless `value` is one of the `choices`."""
    choices = tuple(choices)
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"`{name}` should be one of {', '.join(map(repr, choices))}. Found {value!r}.")


def instance(name: str, value: object, kind: type) -> None:
    """Raise a TypeError unless `value` is of a class; the message names its attribute to pass instead."""
    if not isinstance(value, kind):
        held = [each for each in ("parameters", "parameters_") if isinstance(getattr(value, each, None), kind)]
        hint = f" Pass its `{held[0]}`." if held else ""
        raise TypeError(
            f"`{name}` should be of type {kind.__name__}. Found an object of type {type(value).__name__}.{hint}"
        )


def function(name: str, value: object, of: str = "the inputs") -> None:
    """Raise a TypeError unless `value` can be called."""
    if not callable(value):
        raise TypeError(f"`{name}` should be a function of {of}. Found {type(value).__name__}.")


def broadcasts(shape: Sequence[int], to: Sequence[int]) -> bool:
    """Say whether an array of a shape broadcasts to another shape, without making it larger."""
    pairs = zip(reversed(shape), reversed(to), strict=False)
    return len(shape) <= len(to) and all(size in (1, other) for size, other in pairs)


def _plain(value: Any) -> object:
    """Return the Python scalar of a scalar of NumPy or torch; None for a truth value; anything else unchanged."""
    if getattr(value, "ndim", None) == 0 and not getattr(value, "requires_grad", False):
        value = value.item()
    return None if isinstance(value, bool) else value


def _range(least: float | None, above: float | None, most: float | None, below: float | None) -> str:
    """Return a range in words."""
    match least, above, most, below:
        case None, None, None, None:
            return "a finite number"
        case 0, None, None, None:
            return "finite and not negative"
        case None, 0, None, None:
            return "positive and finite"
        case _, None, None, None:
            return f"finite and at least {least:g}"
        case None, _, None, None:
            return f"finite and above {above:g}"
        case _, None, _, None:
            return f"from {least:g} to {most:g}"
        case None, _, None, _:
            return f"between {above:g} and {below:g}"
    return f"at least {least:g} and less than {below:g}" if above is None else f"above {above:g} and at most {most:g}"
