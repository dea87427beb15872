"""Bounds of every unit of a ReLU network on a ball, by linear functions that lie below and above each rectifier.

N samples, D inputs, M units of a layer, C classes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from toolkit.adversarial.certificates._farthest import BallAndBox
from toolkit.adversarial.certificates._layers import Affine

__all__ = ["Interval", "interval_of_affine", "lines", "relaxed_bounds", "relaxed_lower_bound"]


class Interval(NamedTuple):
    """Least and greatest value, each (N, M)."""

    lower: Tensor
    upper: Tensor


def interval_of_affine(layer: Affine, input: Interval) -> Interval:
    """Return the bounds of ``W z + b`` for z in the interval: ``W m + b - |W| r`` and ``W m + b + |W| r``."""
    middle = (input.lower + input.upper) / 2 @ layer.weight.T + layer.bias
    half = (input.upper - input.lower) / 2 @ layer.weight.abs().T
    return Interval(middle - half, middle + half)


def relaxed_bounds(chain: list[Affine], ball: BallAndBox) -> list[Interval]:
    """Return the bounds before each rectifier, and of the last layer: the tighter of the relaxed and the interval's.

    Args:
        chain: Layers between rectifiers.
        ball: The inputs.
    """
    below, above = ball.enclosing()
    input = Interval(ball.start + below, ball.start + above)
    found: list[Interval] = []
    for depth, layer in enumerate(chain):
        plain = interval_of_affine(layer, input)
        objective = torch.cat([layer.weight, -layer.weight]).expand(len(ball.start), -1, -1)
        constant = torch.cat([layer.bias, -layer.bias]).expand(len(ball.start), -1)
        lower, negated = relaxed_lower_bound(objective, constant, chain[:depth], found, ball)[0].chunk(2, 1)
        bounds = Interval(torch.maximum(lower, plain.lower), torch.minimum(-negated, plain.upper))
        found.append(bounds)
        input = Interval(bounds.lower.clamp(min=0), bounds.upper.clamp(min=0))
    return found


def relaxed_lower_bound(
    objective: Tensor, constant: Tensor, chain: list[Affine], hidden: list[Interval], ball: BallAndBox
) -> tuple[Tensor, Tensor]:
    """Return a lower bound of ``objective . z + constant``, where z comes out of the last rectifier of `chain`.

    For a unit with ``l < 0 < u`` before its rectifier, ``a z <= relu(z) <= u (z - l) / (u - l)``, with a = 1 if u > -l
    and else 0. A positive coefficient takes the lower line and a negative one the upper line, layer by layer from the
    last to the first; the linear function of the inputs that is left is minimised on the ball exactly.

    Args:
        objective: (N, K, M): K objectives.
        constant: (N, K).
        chain: The layers before z; none: z is the input.
        hidden: Bounds before the rectifier of each layer of `chain`.
        ball: The inputs.

    Returns:
        The bounds, (N, K), and the inputs at which the linear functions reach them, (N, K, D).
    """
    for layer, (lower, upper) in zip(reversed(chain), reversed(hidden[: len(chain)]), strict=True):
        slope_below, slope_above, offset = lines(lower, upper)
        positive, negative = objective.clamp(min=0), objective.clamp(max=0)
        constant = constant + (negative @ offset[:, :, None])[..., 0]
        through = positive * slope_below[:, None] + negative * slope_above[:, None]
        constant = constant + through @ layer.bias
        objective = through @ layer.weight
    point = ball.start[:, None] + ball.farthest(-objective)
    return (objective * point).sum(-1) + constant, point


def lines(lower: Tensor, upper: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the slope of the line below a rectifier, and the slope and the offset of the line above it."""
    active, crossing = lower >= 0, (lower < 0) & (upper > 0)
    width = torch.where(crossing, upper - lower, 1)
    slope_above = torch.where(crossing, upper / width, active.to(upper.dtype))
    offset = torch.where(crossing, -lower * slope_above, 0)
    slope_below = (active | (crossing & (upper > -lower))).to(upper.dtype)
    return slope_below, slope_above, offset
