r"""Consistency training: the same image at two noise levels should have the same prediction.

The prediction at the lower level is the target for the prediction at the higher level. In consistency training both
come from the same network; in earlier work the target network is a moving average. The block holds the target constant
either way. Without it the two predictions move towards each other, and the gradient is that of the expected squared
difference, which also counts the noise of the target.

N images, each of shape (...).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from toolkit._checks import integer, number
from toolkit._tensors import floating
from toolkit.blocks import block, stop_recording

__all__ = ["CONSISTENCY_TARGET", "consistency_function", "consistency_loss", "karras_times"]

CONSISTENCY_TARGET = block(
    "weighting.consistency_target",
    "The prediction at the lower noise level is the label of the one at the higher level: only the latter moves.",
)

Network = Callable[[Tensor, Tensor], Tensor]


def consistency_loss(
    model: Network,
    x: Tensor,
    noise: Tensor,
    t: Tensor,
    earlier: Tensor,
    *,
    target: Network | None = None,
    c: float | None = None,
) -> Tensor:
    r"""Return :math:`\|f(x + t z, t) - \mathrm{sg}\, f(x + s z, s)\|^2` for every image, noise z, levels s < t.

    With the block `CONSISTENCY_TARGET` in place and :math:`\Delta` the difference, the gradient is
    :math:`2 \Delta\, \partial f(x + t z, t)`, a semi-gradient, not the gradient of any loss. Opened, it is
    :math:`2 \Delta\, (\partial f(x + t z, t) - \partial f(x + s z, s))`.

    Args:
        model: Noisy images (N, ...) and their levels (N,) to predicted images (N, ...); `consistency_function` makes
            a model that is the identity at the lowest level.
        x: Images, (N, ...).
        noise: Standard normal draws z, (N, ...), the same for both levels.
        t: Higher levels, (N,).
        earlier: Lower levels s, (N,).
        target: The model of the target, a moving average for example. None: `model` itself.
        c: If given, the loss is the pseudo-Huber distance :math:`\sqrt{\|\Delta\|^2 + c^2} - c`, whose gradient with
            respect to the prediction is :math:`\Delta / \sqrt{\|\Delta\|^2 + c^2}`.

    Returns:
        (N,). The caller chooses the weight of a level, for example ``1 / (t - earlier)``.

    Raises:
        ValueError: If the shapes do not fit, also those of the two predictions, or `c` is not positive.

    References:
        Song, Dhariwal, Chen and Sutskever, "Consistency models", 2023; Song and Dhariwal, "Improved techniques for
        training consistency models", 2023, for ``target=None`` and the pseudo-Huber distance.

    Example:
        >>> z = torch.tensor([[0.5]])
        >>> consistency_loss(lambda x, t: x / (1 + t[:, None]), torch.tensor([[1.0]]), z, z[0] * 2, z[0])
        tensor([0.0069])
    """
    floating(x=x, noise=noise, t=t, earlier=earlier)
    if noise.shape != x.shape or not t.shape == earlier.shape == x.shape[:1]:
        shapes = [tuple(each.shape) for each in (x, noise, t, earlier)]
        raise ValueError(
            f"`x`, `noise`, `t`, `earlier` should have shapes (N, ...) twice and (N,) twice. Found {shapes}."
        )
    prediction = model(x + _as(t, x) * noise, t)
    with stop_recording(CONSISTENCY_TARGET):
        label = (target or model)(x + _as(earlier, x) * noise, earlier)
    if label.shape != prediction.shape:
        raise ValueError(
            "`model` and `target` should return predictions of one shape. "
            f"Found {tuple(prediction.shape)} and {tuple(label.shape)}."
        )
    squares = (prediction - label).square()[:, None].flatten(1).sum(1)
    if c is None:
        return squares
    c = number("c", c, above=0)
    # Not sqrt(squares + c^2) - c, which cancels where the difference is small.
    return squares / ((squares + c**2).sqrt() + c)


def consistency_function(network: Network, *, sigma_data: float = 0.5, sigma_min: float = 0.002) -> Network:
    r"""Return :math:`f(x, t) = c_{skip}(t)\, x + c_{out}(t)\, F(x, t)`, the identity at the lowest level.

    .. math:: c_{skip}(t) = \frac{\sigma_d^2}{(t - \sigma_{min})^2 + \sigma_d^2}, \qquad
        c_{out}(t) = \frac{\sigma_d (t - \sigma_{min})}{\sqrt{\sigma_d^2 + t^2}}

    Without this boundary condition a constant would be the best prediction.

    Args:
        network: F, images (N, ...) and levels (N,) to images (N, ...).
        sigma_data: Standard deviation of the data.
        sigma_min: The lowest level.

    Returns:
        A function like `network`.

    Raises:
        ValueError: If `sigma_data` is not positive, or `sigma_min` is negative.

    References:
        Song, Dhariwal, Chen and Sutskever, "Consistency models", 2023, appendix C.

    Example:
        >>> f = consistency_function(lambda x, t: torch.zeros_like(x))
        >>> f(torch.ones(2, 1), torch.tensor([0.002, 0.502])).T
        tensor([[1.0000, 0.5000]])
    """
    d, lowest = number("sigma_data", sigma_data, above=0), number("sigma_min", sigma_min, least=0)

    def predict(x: Tensor, t: Tensor) -> Tensor:
        above, level = _as(t - lowest, x), _as(t, x)
        return d**2 / (above**2 + d**2) * x + d * above / (d**2 + level**2).sqrt() * network(x, t)

    return predict


def karras_times(n: int, *, sigma_min: float = 0.002, sigma_max: float = 80.0, rho: float = 7.0) -> Tensor:
    r"""Return n noise levels, ascending, evenly spaced in :math:`t^{1/\rho}`.

    Args:
        n: Number of levels, at least 2.
        sigma_min: The first.
        sigma_max: The last.
        rho: Larger values put more levels at low noise.

    Returns:
        (n,), float64.

    Raises:
        ValueError: If `n` is below 2, `sigma_min` is not positive, `sigma_max` is not above it, or `rho` not positive.

    References:
        Karras, Aittala, Aila and Laine, "Elucidating the design space of diffusion-based generative models", 2022,
        equation 5.

    Example:
        >>> karras_times(4)
        tensor([2.0000e-03, 4.6998e-01, 9.7232e+00, 8.0000e+01], dtype=torch.float64)
    """
    low = number("sigma_min", sigma_min, above=0)
    high, rho = number("sigma_max", sigma_max, above=low), number("rho", rho, above=0)
    times = torch.linspace(low ** (1 / rho), high ** (1 / rho), integer("n", n, 2), dtype=torch.float64) ** rho
    times[0], times[-1] = low, high
    return times


def _as(levels: Tensor, x: Tensor) -> Tensor:
    """Return one level for each image, in a shape that broadcasts."""
    return levels.view(-1, *[1] * (x.ndim - 1)).to(x.dtype)
