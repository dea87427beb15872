"""Learning rates that fall during training, as functions of the fraction of training done, from 0 to 1."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

from toolkit._checks import number

__all__ = ["Schedule", "cosine_decay", "linear_decay"]

# The part of training that is done, from 0 to 1 -> a learning rate.
Schedule: TypeAlias = Callable[[float], float]


def linear_decay(initial: float, *, hold: float = 0.0) -> Schedule:
    r"""Return a learning rate that is constant at first, and then falls linearly to zero.

    .. math::
        \eta(t) = \eta_0 \min\Bigl(1, \frac{1 - t}{1 - t_0}\Bigr)

    Persistent chains reach the distribution of the model only if the parameters stop changing.

    Args:
        initial: :math:`\eta_0`, positive.
        hold: :math:`t_0`, the fraction of training before the rate falls, less than 1.

    Raises:
        ValueError: If an argument is out of its range.

    References:
        Tieleman, "Training restricted Boltzmann machines using approximations to the likelihood gradient", 2008:
        without `hold`.

    Example:
        >>> [linear_decay(0.1, hold=0.5)(part) for part in (0, 0.5, 0.75, 1)]
        [0.1, 0.1, 0.05, 0.0]
    """
    initial, hold = number("initial", initial, above=0), number("hold", hold, least=0, below=1)
    return lambda part: initial * min(1.0, (1 - part) / (1 - hold))


def cosine_decay(initial: float) -> Schedule:
    r"""Return a learning rate that falls to zero along half a cosine, :math:`\eta_0 (1 + \cos \pi t) / 2`.

    Args:
        initial: :math:`\eta_0`, positive.

    Raises:
        ValueError: If `initial` is not positive.

    References:
        Loshchilov & Hutter, "SGDR: stochastic gradient descent with warm restarts", 2017, equation 5, one period.

    Example:
        >>> [round(cosine_decay(0.1)(part), 3) for part in (0, 0.25, 0.5, 1)]
        [0.1, 0.085, 0.05, 0.0]
    """
    initial = number("initial", initial, above=0)
    return lambda part: initial * (1 + math.cos(math.pi * part)) / 2
