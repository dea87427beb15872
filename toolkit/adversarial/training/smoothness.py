"""Losses that smooth the loss surface around the data: they penalise curvature (CURE) or nonlinearity (LLR).

N samples, each of shape (...) with D features in all, C classes.
"""

from __future__ import annotations

from functools import partial
from typing import Unpack

import torch
from torch import Tensor

from toolkit._checks import integer, number
from toolkit._random import own_generator, starts_at_random
from toolkit.adversarial._untouched import untouched
from toolkit.adversarial.attacks._setting import GradientOptions, setting
from toolkit.adversarial.balls import Ball, Norm, per_sample
from toolkit.adversarial.balls.box import by_row, features
from toolkit.adversarial.training._terms import (
    Attack,
    Model,
    cross_entropy,
    found_by,
    logits_at,
    losses_and_slope,
    start_near,
)
from toolkit.blocks import block, stop_gradient

__all__ = ["CURVATURE_DIRECTION", "cure_loss", "linearity_pgd", "llr_loss"]

CURVATURE_DIRECTION = block(
    "adversarial.curvature_direction",
    "The direction says where the curvature is measured: the loss flattens the surface there, it does not turn away.",
)


def cure_loss(
    model: Model, x: Tensor, labels: Tensor, *, h: float | Tensor, weight: float, norm: Norm = "linf"
) -> Tensor:
    """Return the cross entropy and its curvature in an adversarial direction: curvature regularisation.

    ``mean(l(x) + weight * |grad l(x + h z) - grad l(x)|_2^2)`` with the cross entropy l of every sample and its
    gradient with respect to the input, where z is the steepest direction of unit norm: ``sign(grad l(x))`` in Linf, and
    ``grad l(x) / |grad l(x)|_2`` in L2. With the block `CURVATURE_DIRECTION` in place z is a constant. Opened, the
    block adds exactly zero in Linf, because the sign has derivative zero; in L2 it adds the effect of the parameters on
    z.

    The first term is computed in the current mode of the model, with one update of running statistics; the gradients
    are computed in evaluation mode, in which the samples do not depend on each other and nothing is updated.

    Args:
        model: Inputs (N, ...) to logits (N, C), twice differentiable (with ReLU almost everywhere).
        x: Clean inputs, (N, ...).
        labels: (N,).
        h: Length of the finite difference in the norm. The paper's step of Euclidean length h corresponds to
            ``h / sqrt(D)`` in Linf. One for all, or (N,).
        weight: Weight of the curvature, not negative.
        norm: ``"linf"``, ``"l2"`` or ``"l1"``.

    Returns:
        A scalar, in nats per sample.

    Raises:
        TypeError: If `x` is not floating point.
        ValueError: If `h` or `weight` is negative or not finite, or `norm` is unknown.

    References:
        Moosavi-Dezfooli, Fawzi, Uesato and Frossard, "Robustness via curvature regularization, and vice versa", 2019,
        section 4.

    Example:
        >>> weight = torch.tensor([[1.0, 1.0], [0.0, 0.0]])
        >>> cure_loss(lambda x: x @ weight.T, torch.full((1, 2), 0.5), torch.tensor([0]), h=0.5, weight=4.0)
        tensor(0.7404, grad_fn=<MeanBackward0>)
    """
    weight = number("weight", weight, least=0)
    loss = cross_entropy(logits_at(model, x), labels)
    ball = Ball(0.0, norm, None).around(x)
    length = per_sample("h", h, x).to(x.dtype)
    loss_of = partial(cross_entropy, labels=labels)
    with untouched(model):
        _, slope = losses_and_slope(model, x, loss_of)
        towards = stop_gradient(ball.direction(slope), CURVATURE_DIRECTION)
        _, moved_slope = losses_and_slope(model, x + length * towards, loss_of)
    return (loss + weight * (moved_slope - slope).square().sum(features(x))).mean()


def llr_loss(
    model: Model, x: Tensor, labels: Tensor, *, weight: float = 4.0, slope_weight: float = 3.0, attack: Attack
) -> Tensor:
    """Return the cross entropy and its deviation from linear in the ball: local linearity regularisation.

    ``mean(l(x) + weight * |l(x + d) - l(x) - d . grad l(x)| + slope_weight * |d . grad l(x)|)``, where d is the
    displacement at which the loss is farthest from its tangent (`linearity_pgd`). With the block `EXAMPLE` in place the
    gradient is the gradient of this mean with d held constant; ``grad l(x)`` itself is differentiated.

    The first term is computed in the current mode of the model, with one update of running statistics; the others are
    computed in evaluation mode, in which the samples do not depend on each other and nothing is updated.

    Args:
        model: Inputs (N, ...) to logits (N, C), twice differentiable (with ReLU almost everywhere).
        x: Clean inputs, (N, ...).
        labels: (N,).
        weight: Weight of the distance from the tangent, not negative: lambda of the paper.
        slope_weight: Weight of the change along the tangent, not negative: mu of the paper.
        attack: Called as ``attack(model, x, labels)``; returns examples ``x + d``. For example
            ``partial(linearity_pgd, epsilon=0.1, steps=10, generator=generator)``.

    Returns:
        A scalar, in nats per sample.

    Raises:
        ValueError: If a weight is negative or not finite, or examples have another shape than `x`.

    References:
        Qin, Martens, Gowal, Krishnan, Dvijotham, Fawzi, De, Stanforth and Kohli, "Adversarial robustness through local
        linearization", 2019, section 4.

    Example:
        >>> from functools import partial
        >>> weight = torch.tensor([[1.0, 1.0], [0.0, 0.0]])
        >>> attack = partial(linearity_pgd, epsilon=0.25, steps=3)
        >>> llr_loss(lambda x: x @ weight.T, torch.full((1, 2), 0.5), torch.tensor([0]), attack=attack)
        tensor(0.8221, grad_fn=<MeanBackward0>)
    """
    weight = number("weight", weight, least=0)
    slope_weight = number("slope_weight", slope_weight, least=0)
    example = found_by(attack, model, x, labels)
    loss = cross_entropy(logits_at(model, x), labels)
    loss_of = partial(cross_entropy, labels=labels)
    with untouched(model):
        clean, slope = losses_and_slope(model, x, loss_of)
        change = cross_entropy(logits_at(model, example), labels) - clean
    along = ((example - x) * slope).sum(features(x))
    return (loss + weight * (change - along).abs() + slope_weight * along.abs()).mean()


def linearity_pgd(
    model: Model,
    x: Tensor,
    labels: Tensor,
    *,
    steps: int,
    step_size: float | Tensor | None = None,
    random_start: bool | None = None,
    generator: torch.Generator | None = None,
    **options: Unpack[GradientOptions],
) -> Tensor:
    """Search for the point of the ball at which the cross entropy is farthest from its tangent at `x`.

    Projected gradient ascent of ``|l(x + d) - l(x) - d . grad l(x)|``, with the arguments of `pgd`. Without a random
    start the attack starts a thousandth of epsilon up the label's margin, because the gradient is zero at `x` itself;
    it is then deterministic, and its rows do not depend on each other.

    Returns:
        Adversarial examples like `x`, inside of ball and box; a constant while the block `EXAMPLE` is in place.

    Raises:
        TypeError: As in `pgd`.
        ValueError: As in `pgd`.

    References:
        Qin et al., "Adversarial robustness through local linearization", 2019, section 4.
    """
    steps = integer("steps", steps)
    draws = own_generator(generator) if starts_at_random(random_start, generator) else None
    with setting(model, x, labels, **options) as attack:
        stride = attack.stride(2.5 / steps, step_size)
        _, slope, logits = attack.gradient(attack.x, cross_entropy)
        clean = cross_entropy(logits, attack.labels)
        example = start_near(attack, attack.stride(1e-3), None) if draws is None else attack.start(draws)
        for _ in range(steps):
            point, gradient, logits = attack.gradient(example, cross_entropy)
            along = ((point - attack.x) * slope).sum(features(point))
            above = cross_entropy(logits, attack.labels) - clean >= along
            towards = by_row(above, gradient - slope, slope - gradient)
            example = attack.ball.step(point, towards, stride)
        return attack.ball.settle(example)
