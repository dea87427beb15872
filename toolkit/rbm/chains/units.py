"""The outputs of a chain's units, given the input from the other layer.

The kinds differ in their values or derivatives; `sampled` and `straight_through` have the same values.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal, TypeAlias, get_args, overload

import torch
from torch import Tensor

from toolkit._checks import choice, number
from toolkit.blocks import block, carries_gradient, stop_gradient
from toolkit.rbm.machine.joint import Joint
from toolkit.rbm.machine.layers import Layer, Rectified

__all__ = ["STRAIGHT_THROUGH", "UNITS", "Chain", "Unit", "unit_of"]

Chain: TypeAlias = Literal["sampled", "straight_through", "mean_field", "concrete", "noisy_rectified"]

# A layer, its input and a generator -> units. All of a chain's steps go through one of these.
Unit: TypeAlias = Callable[[Layer, Tensor, torch.Generator | None], Tensor]

STRAIGHT_THROUGH = block(
    "rbm.straight_through",
    "A straight-through unit adds its mean and subtracts the mean again as a constant, so that its value is the draw "
    "and its derivative that of the mean.",
)


def sampled(layer: Layer, x: Tensor, generator: torch.Generator | None) -> Tensor:
    """Return a draw. Its derivative is zero, as for `torch.bernoulli`, unless the units are Gaussian."""
    return layer.sample(x, generator)


def straight_through(layer: Layer, x: Tensor, generator: torch.Generator | None) -> Tensor:
    """Return the same draw as `sampled`, bit for bit, with the derivative of the mean."""
    sample = layer.sample(x, generator)
    if layer.draws_carry_gradients:  # has the derivative of the mean already
        return sample
    mean = layer.mean(x)
    if not carries_gradient(mean):
        return sample
    return sample + (mean - stop_gradient(mean, STRAIGHT_THROUGH))


def mean_field(layer: Layer, x: Tensor, generator: torch.Generator | None) -> Tensor:
    """Return the mean, without a draw."""
    return layer.mean(x)


def concrete(layer: Layer, x: Tensor, generator: torch.Generator | None, *, temperature: float | None = None) -> Tensor:
    """Return a relaxed draw, which is a differentiable function of the input.

    Raises:
        ValueError: If no temperature is given, or units of this kind have no relaxed form.
    """
    return layer.relaxed_sample(x, check_temperature("concrete", temperature), generator)


def noisy_rectified(layer: Layer, x: Tensor, generator: torch.Generator | None) -> Tensor:
    """Return noisy rectified units in place of counts, and draws of all other kinds."""
    return layer.noisy_sample(x, generator) if isinstance(layer, Rectified) else layer.sample(x, generator)


UNITS: dict[str, Unit] = {
    "sampled": sampled,
    "straight_through": straight_through,
    "mean_field": mean_field,
    "concrete": concrete,
    "noisy_rectified": noisy_rectified,
}
assert tuple(UNITS) == get_args(Chain)


def unit_of(chain: str, temperature: float | None, joint: Joint) -> Unit:
    """Return the output function of a chain's units.

    Args:
        chain: The name of its kind.
        temperature: Temperature of concrete units; None for all others.
        joint: The machine.

    Raises:
        ValueError: If the kind is unknown or does not fit the machine's units, or if `temperature` is missing for
            concrete units or given for others.
    """
    choice("chain", chain, UNITS)
    temperature = check_temperature(chain, temperature)
    layers = (joint.visible, joint.hidden)
    if chain == "noisy_rectified" and not any(isinstance(layer, Rectified) for layer in layers):
        found = " and ".join(type(layer).__name__ for layer in layers)
        raise ValueError(f"`chain` should be 'noisy_rectified' only for rectified units. Found {found} units.")
    if chain == "concrete":
        return functools.partial(concrete, temperature=temperature)
    return UNITS[chain]


@overload
def check_temperature(chain: Literal["concrete"], temperature: float | None) -> float: ...


@overload
def check_temperature(chain: str, temperature: float | None) -> float | None: ...


def check_temperature(chain: str, temperature: float | None) -> float | None:
    """Return the temperature; raise ValueError if it is missing for concrete units, or given for others."""
    if chain != "concrete":
        if temperature is not None:
            raise ValueError(f"`temperature` should be None unless `chain` is 'concrete'. Found `chain` {chain!r}.")
        return None
    return number("temperature", temperature, above=0)
