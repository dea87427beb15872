"""Exact worst cases of linear classifiers, as a check of attacks.

A linear function on the intersection of a ball and a box has its maximum in closed form, so the worst case of each
margin is exact. The computation shares no code with the attacks.

N samples, D features, C classes.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from toolkit._tensors import shape_of, tensors
from toolkit.adversarial._classes import check_classes
from toolkit.adversarial.balls import Bounds, Norm
from toolkit.adversarial.balls.box import check_inputs
from toolkit.adversarial.certificates._farthest import ball_and_box, least_rate
from toolkit.blocks import no_graph

__all__ = ["certify_linear", "distance_linear", "robust_loss_linear"]


def certify_linear(
    weight: Tensor,
    bias: Tensor | None,
    x: Tensor,
    labels: Tensor,
    *,
    epsilon: float | Tensor,
    norm: Norm = "linf",
    bounds: Bounds = (0, 1),
    mask: Tensor | None = None,
) -> Tensor:
    """Return the smallest margin that any perturbation can reach, exactly.

    ``min_{j != y} min_{x' in ball(x)} z_y(x') - z_j(x')`` with ``z = W x + b``. The two minima are exchanged, and the
    inner minimum is that of a linear function: in Linf every coordinate moves to the end of its interval; in L2 the
    displacement is ``clip(t (w_j - w_y))``, with t such that it has length epsilon; in L1 the steepest coordinate moves
    until it meets the box, then the next, until epsilon is used up (the fractional knapsack). A classifier is robust at
    a sample exactly if the result is positive. Differentiable in `weight` and `bias`; `x` is data.

    Args:
        weight: (C, D).
        bias: (C,) or None.
        x: Clean inputs, (N, D), inside of `bounds`.
        labels: (N,), integers of any width.
        epsilon: Radius of the ball; one for all, or (N,).
        norm: ``"linf"``, ``"l2"`` or ``"l1"``.
        bounds: Least and greatest value of an input, numbers or broadcast to `x`; None for no box.
        mask: True where an input may change, broadcast to `x`; None: everywhere.

    Returns:
        (N,), float64, in the units of the logits.

    Raises:
        TypeError: If `x` is not floating point, `labels` are not integers, or `mask` is not Boolean.
        ValueError: If `norm` is unknown, shapes do not fit, a label is not a class, `epsilon` is negative or not
            finite, or `x` lies outside of `bounds`.

    References:
        Linf without a box: Goodfellow, Shlens and Szegedy, "Explaining and harnessing adversarial examples", 2015,
        section 5. With a box: the Karush-Kuhn-Tucker conditions. L1: Dantzig, "Discrete-variable extremum problems",
        1957 (the greedy solution of the knapsack whose items may be cut).

    Example:
        >>> weight = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
        >>> certify_linear(weight, None, torch.ones(1, 2), torch.tensor([0]), epsilon=0.5, norm="l2")
        tensor([4.5000], dtype=torch.float64)
    """
    weight, bias, labels = _check_classifier(weight, bias, x, labels)
    ball = ball_and_box(x, epsilon, norm, bounds, mask)
    margins = []
    for other in range(len(weight)):
        towards = weight[other] - weight[labels]
        worst = ball.start + ball.farthest(towards)
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
    mask: Tensor | None = None,
) -> Tensor:
    """Return the mean worst-case cross entropy of a linear classifier of two classes, exactly.

    ``E max_{x' in ball(x)} L(x') = E softplus(-margin)`` with the worst-case margin of `certify_linear`, because with
    two classes the cross entropy falls as the margin grows. Its gradient in `weight` and `bias` is Danskin's. With more
    classes the maximum of the cross entropy has no closed form; the margins of `certify_linear` are still exact. The
    arguments are those of `certify_linear`, with a `weight` (2, D).

    Returns:
        A scalar, float64, in nats per sample.

    Raises:
        TypeError: As in `certify_linear`.
        ValueError: If there are not two classes, or as in `certify_linear`.

    References:
        Xu, Caramanis and Mannor, "Robustness and regularization of support vector machines", 2009 (the same exchange of
        minima for the hinge loss); Danskin, "The theory of max-min", 1967.

    Example:
        >>> weight = torch.tensor([[1.0, 1.0], [0.0, 0.0]])
        >>> robust_loss_linear(weight, None, torch.full((1, 2), 0.5), torch.tensor([0]), epsilon=0.5)
        tensor(0.6931, dtype=torch.float64)
    """
    if len(shape_of("weight", weight)) != 2 or len(weight) != 2:
        raise ValueError(
            f"`weight` should have shape (2, D): the worst case is exact for two classes. Found {tuple(weight.shape)}."
        )
    margin = certify_linear(weight, bias, x, labels, epsilon=epsilon, norm=norm, bounds=bounds, mask=mask)
    return F.softplus(-margin).mean()


def distance_linear(
    weight: Tensor,
    bias: Tensor | None,
    x: Tensor,
    labels: Tensor,
    *,
    norm: Norm = "linf",
    bounds: Bounds = (0, 1),
    mask: Tensor | None = None,
) -> Tensor:
    """Return the exact distance to the nearest input on which the classifier errs, the target of minimal-norm attacks.

    ``min_{j != y} min |d|`` with ``(w_j - w_y) . d >= z_y(x) - z_j(x)`` and ``x + d`` in the box. Without a box it is
    ``(z_y - z_j) / |w_j - w_y|_*`` with the dual norm. With a box, the gain at length t is ``sum_i min(t |u_i|,
    |u_i| r_i)`` in Linf and, for ``d = clip(t u)``, ``sum_i min(t u_i^2, |u_i| r_i)`` in L2, with ``u = w_j - w_y`` and
    the room r in the direction of u; both are piecewise linear and are solved on the right piece. In L1 the steepest
    coordinates go first. With the result as epsilon, `certify_linear` returns 0. The arguments are those of
    `certify_linear`.

    Returns:
        (N,), float64. Zero where the classifier errs at `x` or is undecided; infinite where it is correct on the whole
        box.

    Raises:
        TypeError: As in `certify_linear`.
        ValueError: As in `certify_linear`.

    References:
        Without a box: Moosavi-Dezfooli, Fawzi and Frossard, "DeepFool: a simple and accurate method to fool deep
        neural networks", 2016, section 3. With a box: the Karush-Kuhn-Tucker conditions.

    Example:
        >>> weight = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
        >>> distance_linear(weight, None, torch.ones(1, 2), torch.tensor([0]), norm="l2", bounds=None)
        tensor([1.4000], dtype=torch.float64)
    """
    weight, bias, labels = _check_classifier(weight, bias, x, labels)
    ball = ball_and_box(x, 0.0, norm, bounds, mask)
    with no_graph():
        logits = ball.start @ weight.T + bias
        distances = []
        for other in range(len(weight)):
            towards = weight[other] - weight[labels]
            gain = logits.gather(1, labels[:, None])[:, 0] - logits[:, other]
            towards, gain = _of_order_one(towards, gain)
            room = torch.where(towards > 0, ball.upper, -ball.lower).masked_fill(towards == 0, 0)
            distance = _DISTANCE[norm](towards.abs(), room, gain)
            distances.append(torch.where(labels == other, math.inf, distance.masked_fill(gain <= 0, 0)))
        return torch.stack(distances).amin(0)


def _of_order_one(towards: Tensor, gain: Tensor) -> tuple[Tensor, Tensor]:
    """Return both sides of ``towards . d >= gain``, scaled: no square of a weight leaves the range of float64."""
    scale = towards.abs().amax(1)
    scale = torch.where(scale > 0, scale, 1)
    return towards / scale[:, None], gain / scale


def _distance_linf(slope: Tensor, room: Tensor, gain: Tensor) -> Tensor:
    return least_rate(slope, _product(slope, room), gain)


def _distance_l2(slope: Tensor, room: Tensor, gain: Tensor) -> Tensor:
    rate = least_rate(slope.square(), _product(slope, room), gain)
    reached = torch.minimum(_product(slope, rate[:, None]), room)
    return torch.where(rate.isinf(), math.inf, torch.linalg.vector_norm(reached, dim=1))


def _distance_l1(slope: Tensor, room: Tensor, gain: Tensor) -> Tensor:
    """Return the length spent on the steepest coordinates first: whole rooms until the gain is reached, then a part."""
    slope, order = slope.sort(stable=True, dim=1, descending=True)
    gains = _product(slope, room.gather(1, order))
    before = torch.cat([torch.zeros_like(gains[:, :1]), gains.cumsum(1)[:, :-1]], 1)
    taken = torch.minimum(gains, (gain[:, None] - before).clamp(min=0))
    length = torch.where(taken > 0, taken / slope, 0).sum(1)
    reached = before[:, -1] + gains[:, -1]
    return torch.where(reached >= gain, length, math.inf)


def _product(slope: Tensor, room: Tensor) -> Tensor:
    """Return ``slope * room``; zero where the slope is, also where there is no box."""
    return torch.where(slope > 0, slope * room, 0)


def _check_classifier(weight: Tensor, bias: Tensor | None, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return weight and bias in float64 and the labels as an index; raise ValueError if shapes do not fit."""
    tensors(weight=weight, **({} if bias is None else {"bias": bias}))
    if weight.dim() != 2 or len(weight) < 2:
        raise ValueError(f"`weight` should have shape (C, D), at least two classes. Found {tuple(weight.shape)}.")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"`bias` should have shape ({len(weight)},). Found {tuple(bias.shape)}.")
    check_inputs("x", x)
    if x.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(f"`x` should have shape (N, {weight.shape[1]}). Found {tuple(x.shape)}.")
    index = check_classes("labels", labels, len(x), len(weight))
    weight = weight.double()
    return weight, weight.new_zeros(len(weight)) if bias is None else bias.double(), index


_DISTANCE = {"linf": _distance_linf, "l2": _distance_l2, "l1": _distance_l1}
