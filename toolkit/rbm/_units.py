"""What a unit of a chain passes on, given the input that it gets from the other layer.

The kinds have different derivatives, and two of them the same value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from toolkit.blocks import block, carries_gradient, stop_gradient
from toolkit.rbm._layers import Layer

__all__ = ["STRAIGHT_THROUGH", "UNITS", "Chain", "sampled"]

Chain: TypeAlias = Literal["sampled", "straight_through", "mean_field"]

STRAIGHT_THROUGH = block(
    "rbm.straight_through",
    "A straight-through unit adds its mean and subtracts it again as a constant, so that its value is the draw and "
    "its derivative that of the mean.",
)


def sampled(layer: Layer, x: Tensor, generator: torch.Generator | None) -> Tensor:
    """Return a draw. Its derivative is zero, as that of `torch.bernoulli` is, unless the units are Gaussian."""
    return layer.sample(x, generator)


def straight_through(layer: Layer, x: Tensor, generator: torch.Generator | None) -> Tensor:
    """Return the same draw as `sampled`, bit for bit, with the derivative of the mean."""
    sample = layer.sample(x, generator)
    if layer.n_states is None and layer.more_parameters:  # a Gaussian draw has that derivative already
        return sample
    mean = layer.mean(x)
    if not carries_gradient(mean):
        return sample
    return sample + (mean - stop_gradient(mean, STRAIGHT_THROUGH))


def mean_field(layer: Layer, x: Tensor, generator: torch.Generator | None) -> Tensor:
    """Return the mean: no draw at all."""
    return layer.mean(x)


UNITS: dict[str, Callable[[Layer, Tensor, torch.Generator | None], Tensor]] = {
    "sampled": sampled,
    "straight_through": straight_through,
    "mean_field": mean_field,
}
assert tuple(UNITS) == get_args(Chain)
