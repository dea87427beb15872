"""Exact worst cases of linear classifiers: what every attack on them is held against.

A linear function on a ball cut by a box is maximal at a point that can be written down, so the worst case of each
margin is exact. How it is found shares no code with the attacks.

N samples, D features, C classes.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from toolkit.adversarial.balls import Bounds, Norm, box, per_sample
from toolkit.blocks import no_graph

__all__ = ["certify_linear", "robust_loss_linear"]


def certify_linear(
    weight: Tensor,
    bias: Tensor | None,
    x: Tensor,
    labels: Tensor,
    *,
    epsilon: float | Tensor,
    norm: Norm = "linf",
    bounds: Bounds = (0, 1),
) -> Tensor:
    """Return the smallest margin that any perturbation can reach, exactly.

    ``min_{j != y} min_{x' in ball(x)} z_y(x') - z_j(x')`` with ``z = W x + b``. The two minima change places, and the
    inner one is that of a linear function: in Linf every coordinate moves to the end of its interval; in L2 the
    displacement is ``clip(t (w_j - w_y))``, with t such that it has length epsilon. A classifier is robust at a sample
    exactly if the result is positive. Differentiable in `weight` and `bias`; `x` is data.

    Args:
        weight: (C, D).
        bias: (C,) or None.
        x: Clean inputs, (N, D), inside of `bounds`.
        labels: (N,), integers.
        epsilon: Radius of the ball; one for all, or (N,).
        norm: ``"linf"`` or ``"l2"``.
        bounds: Least and greatest value of an input, numbers or broadcast to `x`; None for no box.

    Returns:
        (N,), float64, in the units of the logits.

    Raises:
        ValueError: If `norm` is unknown, shapes do not fit, `epsilon` is negative or not finite, or `x` lies outside
            of `bounds`.

    Source:
        Linf without a box: Goodfellow, Shlens and Szegedy, "Explaining and harnessing adversarial examples", 2015,
        section 5. With a box: the Karush-Kuhn-Tucker conditions.

    Example:
        >>> weight = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
        >>> certify_linear(weight, None, torch.ones(1, 2), torch.tensor([0]), epsilon=0.5, norm="l2")
        tensor([4.5000], dtype=torch.float64)
    """
    if weight.dim() != 2 or len(weight) < 2:
        raise ValueError(f"`weight` should have shape (C, D), at least two classes. Found {tuple(weight.shape)}.")
    if x.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(f"`x` should have shape (N, {weight.shape[1]}). Found {tuple(x.shape)}.")
    if labels.shape != x.shape[:1]:
        raise ValueError(f"`labels` should have shape ({len(x)},). Found {tuple(labels.shape)}.")
    if norm not in _FARTHEST:
        raise ValueError(f"`norm` should be one of {', '.join(map(repr, _FARTHEST))}. Found {norm!r}.")
    weight = weight.double()
    bias = weight.new_zeros(len(weight)) if bias is None else bias.double()
    with no_graph():
        start = x.double()
        radius = per_sample("epsilon", epsilon, x)
        lower, upper = (bound - start for bound in box(start, bounds))
    margins = []
    for other in range(len(weight)):
        towards = weight[other] - weight[labels]
        with no_graph():
            worst = start + _FARTHEST[norm](towards, radius, lower, upper)
        gain = (towards * worst).sum(1) + bias[other] - bias[labels]
        margins.append(torch.where(labels == other, math.inf, -gain))
    return torch.stack(margins).amin(0)


def robust_loss_linear(
    weight: Tensor,
    bias: Tensor | None,
    x: Tensor,
    labels: Tensor,
    *,
    epsilon: float | Tensor,
    norm: Norm = "linf",
    bounds: Bounds = (0, 1),
) -> Tensor:
    """Return the mean worst-case cross entropy of a linear classifier of two classes, exactly.

    ``E max_{x' in ball(x)} L(x') = E softplus(-margin)`` with the worst-case margin of `certify_linear`, because with
    two classes the cross entropy falls as the margin grows. Its gradient in `weight` and `bias` is Danskin's. With
    more classes the maximum of the cross entropy has no closed form; the margins of `certify_linear` are exact still.

    Args:
        weight: (2, D).
        bias: (2,) or None.
        x: Clean inputs, (N, D), inside of `bounds`.
        labels: (N,), 0 or 1.
        epsilon: Radius of the ball; one for all, or (N,).
        norm: ``"linf"`` or ``"l2"``.
        bounds: Least and greatest value of an input, numbers or broadcast to `x`; None for no box.

    Returns:
        A scalar, float64, in nats per sample.

    Raises:
        ValueError: If there are not two classes, or as in `certify_linear`.

    Source:
        Xu, Caramanis and Mannor, "Robustness and regularization of support vector machines", 2009 (the same exchange
        for the hinge loss); Danskin, "The theory of max-min", 1967.

    Example:
        >>> weight = torch.tensor([[1.0, 1.0], [0.0, 0.0]])
        >>> robust_loss_linear(weight, None, torch.full((1, 2), 0.5), torch.tensor([0]), epsilon=0.5)
        tensor(0.6931, dtype=torch.float64)
    """
    if len(weight) != 2:
        raise ValueError(
            f"`weight` should have shape (2, D): the worst case is exact for two classes. Found {tuple(weight.shape)}."
        )
    margin = certify_linear(weight, bias, x, labels, epsilon=epsilon, norm=norm, bounds=bounds)
    return F.softplus(-margin).mean()


def _farthest_linf(towards: Tensor, radius: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
    """Return the displacement d that maximises ``towards . d``, |d_i| <= radius, lower <= d <= upper."""
    return torch.where(towards > 0, torch.minimum(upper, radius), torch.maximum(lower, -radius))


def _farthest_l2(towards: Tensor, radius: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
    """Return the displacement d that maximises ``towards . d``, |d|_2 <= radius, lower <= d <= upper.

    Where the farthest corner of the box is inside of the ball it is that corner; else ``clip(t * towards)``, whose
    length grows with t, found by bisection of log t.
    """
    corner = torch.where(towards > 0, upper, lower).masked_fill(towards == 0, 0)
    inside = torch.linalg.vector_norm(corner, dim=1, keepdim=True) <= radius
    low = radius / torch.linalg.vector_norm(towards, dim=1, keepdim=True)
    # Here every coordinate has reached its face, or is alone as long as the radius.
    high = (torch.minimum(corner.abs(), radius) / towards.abs()).masked_fill(towards == 0, 0).amax(1, keepdim=True)
    for _ in range(_HALVINGS):
        middle = (low * high).sqrt()
        length = torch.linalg.vector_norm(torch.clamp(middle * towards, lower, upper), dim=1, keepdim=True)
        low, high = torch.where(length <= radius, middle, low), torch.where(length <= radius, high, middle)
    return torch.where(inside, corner, torch.clamp(low * towards, lower, upper))


_FARTHEST = {"linf": _farthest_linf, "l2": _farthest_l2}
# log(high / low) is below 2^11 in float64, and is to be known to 2^-53.
_HALVINGS = 64
