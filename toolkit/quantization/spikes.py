"""Spiking neurons: a step in the forward pass, a smooth slope in the backward pass, and a reset without a gradient.

T time steps, u membrane potentials (in the units of the threshold), s spikes (0 or 1).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from toolkit._checks import broadcasts, choice, number
from toolkit._tensors import floating, same_shape, wide
from toolkit.blocks import block, stop_gradient

__all__ = [
    "RESET",
    "SPIKES",
    "Reset",
    "SpikeTrains",
    "arctan_slope",
    "fast_sigmoid_slope",
    "leaky_integrate_and_fire",
    "sigmoid_slope",
    "spike",
]

SPIKES = block(
    "quantization.spikes",
    "A spike has slope zero except at the threshold, where it has none: a smooth slope at the potential, held "
    "constant, takes its place.",
)
RESET = block(
    "quantization.reset",
    "The reset repeats the spike: with a gradient of its own, a steep surrogate makes a unit avoid its threshold.",
)

Reset = Literal["subtract", "zero", "none"]
Slope = Callable[[Tensor], Tensor]


class SpikeTrains(NamedTuple):
    """Activity of a layer.

    Attributes:
        spikes: (T, ...), 0 or 1.
        potentials: (T, ...), before the reset that the spike of the same step causes.
    """

    spikes: Tensor
    potentials: Tensor


def arctan_slope(x: Tensor, alpha: float = 2.0) -> Tensor:
    r"""Return :math:`\frac{\alpha}{2} / (1 + (\pi \alpha x / 2)^2)`, the slope of an arctangent.

    Args:
        x: Distance from the threshold.
        alpha: Steepness, in the inverse units of `x`.

    Raises:
        ValueError: If `alpha` is not positive.

    References:
        Fang et al., "Incorporating learnable membrane time constant to enhance learning of spiking neural networks",
        2021.

    Example:
        >>> arctan_slope(torch.tensor([0.0, 1.0]))
        tensor([1.0000, 0.0920])
    """
    floating(x=x)
    half = number("alpha", alpha, above=0) / 2
    return half / ((math.pi * half * x).square() + 1)


def fast_sigmoid_slope(x: Tensor, beta: float = 25.0) -> Tensor:
    r"""Return :math:`1 / (1 + \beta |x|)^2`, the slope of a fast sigmoid.

    Args:
        x: Distance from the threshold.
        beta: Steepness, in the inverse units of `x`.

    Raises:
        ValueError: If `beta` is not positive.

    References:
        Zenke and Ganguli, "SuperSpike: supervised learning in multilayer spiking neural networks", 2018.

    Example:
        >>> fast_sigmoid_slope(torch.tensor([0.0, 0.04]))
        tensor([1.0000, 0.2500])
    """
    floating(x=x)
    return (x.abs() * number("beta", beta, above=0) + 1).square().reciprocal()


def sigmoid_slope(x: Tensor, beta: float = 25.0) -> Tensor:
    r"""Return :math:`\beta \sigma(\beta x) (1 - \sigma(\beta x))`, the slope of a logistic sigmoid.

    Args:
        x: Distance from the threshold.
        beta: Steepness, in the inverse units of `x`.

    Raises:
        ValueError: If `beta` is not positive.

    References:
        Neftci, Mostafa and Zenke, "Surrogate gradient learning in spiking neural networks", 2019.

    Example:
        >>> sigmoid_slope(torch.tensor([0.0, -100.0]))
        tensor([6.2500, 0.0000])
    """
    floating(x=x)
    beta = number("beta", beta, above=0)
    return beta * torch.sigmoid(beta * x) * torch.sigmoid(-beta * x)


def spike(x: Tensor, slope: Slope = arctan_slope) -> Tensor:
    r"""Return 1 where x is positive and 0 elsewhere, with a surrogate slope.

    .. math::
        H(x) + \sigma'(\operatorname{sg}(x)) \, (x - \operatorname{sg}(x))

    The value is exactly H(x). With the block in place the gradient is :math:`c\, \sigma'(x)`, and derivatives of higher
    order are 0; with the block open the gradient is 0.

    Args:
        x: Potential minus threshold.
        slope: :math:`\sigma'`, elementwise, finite; it gets half precision as float32.

    References:
        Neftci, Mostafa and Zenke, "Surrogate gradient learning in spiking neural networks", 2019.

    Example:
        >>> x = torch.tensor([-1.0, 0.0, 0.5], requires_grad=True)
        >>> spike(x).sum().backward()
        >>> spike(x).tolist(), x.grad
        ([0.0, 0.0, 1.0], tensor([0.0920, 1.0000, 0.2884]))
    """
    floating(x=x)
    if not callable(slope):
        raise ValueError(f"`slope` should be a function of a tensor, as `arctan_slope`. Found {slope!r}.")
    constant = stop_gradient(x, SPIKES)
    slopes = slope(wide(constant))
    same_shape(0, **{"x": x, "slope(x)": slopes})
    return (x > 0).to(x.dtype) + slopes.to(x.dtype) * (x - constant)


def leaky_integrate_and_fire(
    currents: Tensor,
    *,
    decay: float | Tensor,
    threshold: float = 1.0,
    reset: Reset = "subtract",
    slope: Slope = arctan_slope,
    start: Tensor | None = None,
) -> SpikeTrains:
    r"""Return the spikes and the potentials of leaky integrate-and-fire neurons.

    .. math::
        u_t = \beta u_{t-1} + I_t - \theta \operatorname{sg}(s_{t-1}), \qquad s_t = H(u_t - \theta)

    With ``reset="zero"`` it is :math:`u_t = (1 - \operatorname{sg}(s_{t-1})) \beta u_{t-1} + I_t`. With the block
    `RESET` in place :math:`du_t = \beta\, du_{t-1} + dI_t` for "subtract"; with the block open
    :math:`- \theta \sigma'(u_{t-1} - \theta)\, du_{t-1}` is added.

    Args:
        currents: I, (T, ...).
        decay: :math:`\beta`, the share of the potential that is left after a step, from 0 to 1; the values of a tensor
            that broadcasts to (...) are learnt and not checked.
        threshold: :math:`\theta`.
        reset: ``"subtract"`` the threshold after a spike, return to ``"zero"``, or ``"none"``.
        slope: Surrogate slope :math:`\sigma'` of a spike, as in `spike`.
        start: :math:`u_0`, broadcast to (...), the potential before the first current. A neuron above the threshold has
            just fired, so the last potential of one call can start the next call. None: 0.

    Returns:
        Spikes, (T, ...), in the precision of `currents`, and potentials, (T, ...). With half precision the potentials
        are integrated and returned in float32, because small currents would be rounded away.

    Raises:
        ValueError: If `decay` is not between 0 and 1, `threshold` is not positive, `reset` is unknown, `currents` has
            no time steps, or a shape does not fit.

    References:
        Neftci, Mostafa and Zenke, "Surrogate gradient learning in spiking neural networks", 2019.
        Zenke and Vogels, "The remarkable robustness of surrogate gradient learning for instilling complex function in
        spiking neural networks", 2021, for the block in the reset.

    Example:
        >>> spikes, potentials = leaky_integrate_and_fire(torch.tensor([0.9, 0.6, 0.8]), decay=0.8)
        >>> spikes, potentials
        (tensor([0., 1., 0.]), tensor([0.9000, 1.3200, 0.8560]))
    """
    threshold = number("threshold", threshold, above=0)
    choice("reset", reset, ("subtract", "zero", "none"))
    if not isinstance(decay, Tensor) or (decay.ndim == 0 and not decay.requires_grad):
        decay = number("decay", decay, least=0, most=1)
    floating(currents=currents)
    if currents.ndim == 0 or len(currents) == 0:
        raise ValueError(f"`currents` should have shape (T, ...) with T >= 1. Found {tuple(currents.shape)}.")
    if start is not None:
        floating(start=start)
    for name, value in (("decay", decay), ("start", start)):
        if isinstance(value, Tensor):
            _check_fits(name, value, currents[0])
    decay = wide(decay) if isinstance(decay, Tensor) else decay
    potential = torch.zeros_like(wide(currents[0])) if start is None else wide(start)
    last = None if start is None else spike(potential - threshold, slope)
    spikes: list[Tensor] = []
    potentials: list[Tensor] = []
    for current in wide(currents).unbind():
        kept = decay * potential
        if last is not None and reset != "none":
            fired = stop_gradient(last, RESET)
            kept = kept - threshold * fired if reset == "subtract" else kept * (1 - fired)
        potential = kept + current
        last = spike(potential - threshold, slope)
        spikes.append(last)
        potentials.append(potential)
    return SpikeTrains(torch.stack(spikes).to(currents.dtype), torch.stack(potentials))


def _check_fits(name: str, value: Tensor, current: Tensor) -> None:
    """Raise a ValueError unless a tensor broadcasts to the shape of a current: it would enlarge all others."""
    if not broadcasts(value.shape, current.shape):
        raise ValueError(f"`{name}` should broadcast to {tuple(current.shape)}. Found {tuple(value.shape)}.")
