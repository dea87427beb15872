"""What a unit with two states passes on, given the probability that it is 1.

The three kinds have different derivatives, and two of them the same value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from toolkit.blocks import block, carries_gradient, stop_gradient

__all__ = ["STRAIGHT_THROUGH", "UNITS", "Chain", "sampled"]

Chain: TypeAlias = Literal["sampled", "straight_through", "mean_field"]

STRAIGHT_THROUGH = block(
    "rbm.straight_through",
    "A straight-through unit adds its mean and subtracts it again as a constant, so that its value is the draw and "
    "its derivative that of the mean.",
)


def sampled(mean: Tensor, generator: torch.Generator | None) -> Tensor:
    """Return a draw: 1 with probability `mean`, else 0. Its derivative is zero, as that of `torch.bernoulli` is."""
    # Half precision has too few values between 0 and 1 to draw from.
    dtype = torch.promote_types(mean.dtype, torch.float32)
    uniform = torch.empty(mean.shape, dtype=dtype, device=mean.device).uniform_(generator=generator)
    if not carries_gradient(mean):
        return uniform.lt_(mean).to(mean.dtype)
    # In the graph, with a derivative of zero: the ceiling of a number in (-1, 1] is 1 if it is positive. -0 + 0 = 0.
    return (torch.ceil(mean - uniform) + 0.0).to(mean.dtype)


def straight_through(mean: Tensor, generator: torch.Generator | None) -> Tensor:
    """Return the same draw as `sampled`, bit for bit, with the derivative of the mean."""
    sample = sampled(mean, generator)
    if not carries_gradient(mean):
        return sample
    return sample + (mean - stop_gradient(mean, STRAIGHT_THROUGH))


def mean_field(mean: Tensor, generator: torch.Generator | None) -> Tensor:
    """Return the mean: no draw at all."""
    return mean


UNITS: dict[str, Callable[[Tensor, torch.Generator | None], Tensor]] = {
    "sampled": sampled,
    "straight_through": straight_through,
    "mean_field": mean_field,
}
assert tuple(UNITS) == get_args(Chain)
