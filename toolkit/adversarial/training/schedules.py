"""Schedules: factors of the learning rate as functions of training progress, from 0 to 1."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

from toolkit._checks import number

__all__ = ["Schedule", "constant", "cosine", "one_cycle", "piecewise"]

# The part of training that is done, from 0 to 1 -> the factor of the learning rate.
Schedule: TypeAlias = Callable[[float], float]


def constant() -> Schedule:
    """Return the schedule that is 1 from beginning to end.

    Example:
        >>> constant()(0.9)
        1.0
    """
    return lambda part: 1.0


def one_cycle(*, peak: float = 0.3, first: float = 1 / 25, last: float = 4e-6) -> Schedule:
    """Return a schedule that rises to 1 as half a cosine does, and falls to almost nothing as another half.

    A high rate in the middle and a small rate at the end train a robust network in few epochs.

    Args:
        peak: The part of training at which the schedule is 1, between 0 and 1.
        first: Value at the beginning, from 0 to 1.
        last: Value at the end, from 0 to 1.

    Raises:
        ValueError: If an argument is out of its range.

    References:
        Smith and Topin, "Super-convergence: very fast training of neural networks using large learning rates", 2019;
        with cosines in place of straight lines, as in `torch.optim.lr_scheduler.OneCycleLR`.

    Example:
        >>> schedule = one_cycle(peak=0.5, first=0.2, last=0)
        >>> [round(schedule(part), 2) for part in (0, 0.25, 0.5, 0.75, 1)]
        [0.2, 0.6, 1.0, 0.5, 0.0]
    """
    peak = number("peak", peak, above=0, below=1)
    first, last = number("first", first, least=0, most=1), number("last", last, least=0, most=1)

    def schedule(part: float) -> float:
        if part <= peak:
            return 1 + (first - 1) * _half_cosine(part / peak)
        return last + (1 - last) * _half_cosine((part - peak) / (1 - peak))

    return schedule


def cosine(*, last: float = 0.0) -> Schedule:
    r"""Return a schedule that falls from 1 as half a cosine does, :math:`l + (1 - l) (1 + \cos \pi t) / 2`.

    Args:
        last: :math:`l`, the value at the end, from 0 to 1.

    Raises:
        ValueError: If `last` is out of its range.

    References:
        Loshchilov and Hutter, "SGDR: stochastic gradient descent with warm restarts", 2017, equation 5, one period.

    Example:
        >>> [round(cosine()(part), 2) for part in (0, 0.25, 0.5, 1)]
        [1.0, 0.85, 0.5, 0.0]
    """
    last = number("last", last, least=0, most=1)
    return lambda part: last + (1 - last) * _half_cosine(part)


def piecewise(milestones: Sequence[float] = (0.5, 0.75), *, factor: float = 0.1) -> Schedule:
    """Return a schedule that is multiplied by `factor` at every milestone.

    Args:
        milestones: Parts of training, each between 0 and 1, rising.
        factor: Factor at each milestone, between 0 and 1.

    Raises:
        ValueError: If the milestones do not rise, or an argument is out of its range.

    References:
        Rice, Wong and Kolter, "Overfitting in adversarially robust deep learning", 2020: a tenth at half of training
        and again at three quarters of it. Held-out robustness is best soon after the first milestone.

    Example:
        >>> [round(piecewise()(part), 2) for part in (0, 0.49, 0.5, 0.75)]
        [1.0, 1.0, 0.1, 0.01]
    """
    places = tuple(milestones)
    if not all(a < b for a, b in zip((0, *places), (*places, 1), strict=True)):
        raise ValueError(f"`milestones` should rise, from above 0 to below 1. Found {list(places)}.")
    factor = number("factor", factor, above=0, below=1)
    return lambda part: float(factor ** sum(part >= place for place in places))


def _half_cosine(part: float) -> float:
    return (1 + math.cos(math.pi * part)) / 2
