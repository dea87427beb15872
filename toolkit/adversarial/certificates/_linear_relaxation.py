"""Bounds of every unit of a ReLU network on a ball, by linear functions that lie below and above each rectifier.

N samples, D inputs, M units of a layer, C classes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from toolkit.adversarial.certificates._farthest import BallAndBox
from toolkit.adversarial.certificates._layers import Affine

__all__ = [
    "EPSILON",
    "Interval",
    "errors_of",
    "interval_of_affine",
    "lines",
    "pieces",
    "relaxed_bounds",
    "relaxed_lower_bound",
    "rounding",
    "rounding_of",
    "width_of",
]

# Of float64: the distance from 1 to the next number.
EPSILON = 2.0**-52


class Interval(NamedTuple):
    """Least and greatest value, each (N, M)."""

    lower: Tensor
    upper: Tensor

    def rows(self, index: slice) -> Interval:
        """Return the intervals of the selected samples."""
        return Interval(self.lower[index], self.upper[index])


def interval_of_affine(layer: Affine, input: Interval) -> Interval:
    """Return the bounds of ``W z + b`` for z in the interval: ``W m + b - |W| r`` and ``W m + b + |W| r``."""
    middle = (input.lower / 2 + input.upper / 2) @ layer.weight.T + layer.bias
    half = (input.upper / 2 - input.lower / 2) @ layer.weight.abs().T
    return Interval(middle - half, middle + half)


def rounding_of(chain: list[Affine], ball: BallAndBox) -> float:
    """Return how far float64 rounds the sum of a unit, relative to the sum of the absolute values of its terms.

    References:
        Higham, "Accuracy and stability of numerical algorithms", 2002, section 3.1: n terms, at most n roundings each.
    """
    return rounding(max([width_of(chain, ball), *(layer.terms for layer in chain)]) + 2 * len(chain))


def rounding(terms: int) -> float:
    """Return how far float64 rounds a sum of terms, relative to the sum of their absolute values, with a margin."""
    return 2 * EPSILON * (terms + 8)


def errors_of(chain: list[Affine], hidden: list[Interval], ball: BallAndBox) -> list[Tensor]:
    """Return how far float64 may round every unit, computed from exact inputs of its layer: (N, M) for each layer.

    Args:
        chain: Layers between rectifiers.
        hidden: Bounds before the rectifier of each layer of `chain` but, perhaps, the last.
        ball: The inputs.
    """
    share, (below, above) = rounding_of(chain, ball), ball.enclosing()
    inputs = [ball.start.abs() + torch.maximum(-below, above), *(upper.clamp(min=0) for _, upper in hidden)]
    return [
        share * (input @ layer.weight_size.T + layer.bias_size) for input, layer in zip(inputs, chain, strict=False)
    ]


def relaxed_bounds(chain: list[Affine], ball: BallAndBox, *, outward: bool = False) -> list[Interval]:
    """Return the bounds before each rectifier, and of the last layer: the tighter of relaxation and intervals.

    The linear functions of all units and all samples together would need too much memory. They are processed in pieces,
    so that memory does not grow with the number of samples.

    Args:
        chain: Layers between rectifiers.
        ball: The inputs.
        outward: Whether the bounds are to hold in spite of rounding.
    """
    below, above = ball.enclosing()
    input = Interval(ball.start + below, ball.start + above)
    found: list[Interval] = []
    for depth, layer in enumerate(chain):
        plain = interval_of_affine(layer, input)
        errors = errors_of(chain[: depth + 1], found, ball) if outward else None
        objective, constant = torch.cat([layer.weight, -layer.weight]), torch.cat([layer.bias, -layer.bias])
        width = width_of(chain[:depth], ball)
        both = []
        for rows in pieces(len(ball.start), len(objective) * width):
            part, before = ball.rows(rows), [interval.rows(rows) for interval in found]
            n_rows = len(part.start)
            sides = [
                relaxed_lower_bound(
                    objective[units].expand(n_rows, -1, -1),
                    constant[units].expand(n_rows, -1),
                    chain[:depth],
                    before,
                    part,
                    errors and [error[rows] for error in errors[:-1]],
                )[0]
                for units in pieces(len(objective), n_rows * width)
            ]
            both.append(torch.cat(sides, 1))
        lower, negated = torch.cat(both).chunk(2, 1)
        bounds = Interval(torch.maximum(lower, plain.lower), torch.minimum(-negated, plain.upper))
        if errors is not None:
            bounds = Interval(bounds.lower - errors[-1], bounds.upper + errors[-1])
        found.append(bounds)
        input = Interval(bounds.lower.clamp(min=0), bounds.upper.clamp(min=0))
    return found


def relaxed_lower_bound(
    objective: Tensor,
    constant: Tensor,
    chain: list[Affine],
    hidden: list[Interval],
    ball: BallAndBox,
    errors: list[Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return a lower bound of ``objective . z + constant``, where z is the output of the last rectifier of `chain`.

    For a unit with ``l < 0 < u`` before its rectifier, ``a z <= relu(z) <= u (z - l) / (u - l)``, with a = 1 if u > -l
    and else 0. A positive coefficient takes the lower line and a negative one the upper line, layer by layer from the
    last to the first; the resulting linear function of the inputs is minimised on the ball exactly.

    Args:
        objective: (N, K, M): K objectives.
        constant: (N, K).
        chain: The layers before z; empty: z is the input.
        hidden: Bounds before the rectifier of each layer of `chain`.
        ball: The inputs.
        errors: By how much each unit of `chain` may be wrong for rounding, (N, M) each: then the bounds hold in spite
            of it, but for the rounding of `objective` itself.

    Returns:
        The bounds, (N, K), and the inputs at which the linear functions reach them, (N, K, D).
    """
    for depth in reversed(range(len(chain))):
        layer, (lower, upper) = chain[depth], hidden[depth]
        slope_below, slope_above, offset = lines(lower, upper)
        positive, negative = objective.clamp(min=0), objective.clamp(max=0)
        constant = constant + (negative @ offset[:, :, None])[..., 0]
        through = positive * slope_below[:, None] + negative * slope_above[:, None]
        constant = constant + through @ layer.bias
        if errors is not None:
            constant = constant - (objective.abs() @ errors[depth][:, :, None])[..., 0]
        objective = through @ layer.weight
    point = ball.start[:, None] + ball.farthest(-objective)
    return (objective * point).sum(-1) + constant, point


def width_of(chain: list[Affine], ball: BallAndBox) -> int:
    """Return the largest number of inputs or units of a layer that linear functions pass through."""
    return max(ball.start.shape[1], *(len(layer.bias) for layer in chain), 1)


def pieces(count: int, numbers: int) -> list[slice]:
    """Return slices of `count` items that each need a number of values; at least one slice, which may be empty."""
    at_once = max(1, _NUMBERS // max(1, numbers))
    return [slice(begin, begin + at_once) for begin in range(0, max(1, count), at_once)]


# Values in a tensor of a piece: 8 MiB in float64, of which about twenty live at once (in L1, which sorts).
_NUMBERS = 2**20


def lines(lower: Tensor, upper: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the slope of the line below a rectifier, and the slope and the offset of the line above it."""
    active, crossing = lower >= 0, (lower < 0) & (upper > 0)
    width = torch.where(crossing, upper - lower, 1)
    slope_above = torch.where(crossing, upper / width, active.to(upper.dtype))
    offset = torch.where(crossing, -lower * slope_above, 0)
    slope_below = (active | (crossing & (upper > -lower))).to(upper.dtype)
    return slope_below, slope_above, offset
