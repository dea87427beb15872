"""TRADES: the cross entropy of clean inputs, and the change of the prediction in the ball around them.

N samples, each of shape (...), C classes.
"""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from toolkit._checks import integer, number
from toolkit._random import own_generator, starts_at_random
from toolkit.adversarial._untouched import untouched
from toolkit.adversarial.attacks._setting import EXAMPLE, GradientOptions, setting
from toolkit.adversarial.attacks.gradient import ascend
from toolkit.adversarial.attacks.losses import Loss
from toolkit.adversarial.training._terms import (
    Attack,
    Model,
    clean_and_moved,
    cross_entropy,
    divergence,
    divergence_from,
    found_by,
    logits_at,
    start_near,
)
from toolkit.blocks import block, ordinary_tensors, stop_gradient, stop_recording

__all__ = ["CLEAN_DISTRIBUTION", "divergence_from_clean", "held_trades_loss", "nearby_pgd", "trades_loss"]

CLEAN_DISTRIBUTION = block(
    "adversarial.clean_distribution",
    "The clean answer is a target: the answer in the ball moves towards it, and it moves towards the label alone.",
)


def trades_loss(model: Model, x: Tensor, labels: Tensor, *, beta: float = 6.0, attack: Attack) -> Tensor:
    """Return the surrogate of TRADES: ``mean(-log p_y(x) + beta * KL(p(x) || p(x')))``.

    It stands for ``E[-log p_y(x) + beta * max_{x' in ball(x)} KL(p(x) || p(x'))]``. With the block `EXAMPLE` in place
    its gradient is the gradient of this mean at the example found. The clean distribution p(x) is differentiated too,
    as in the code of the paper's authors; `held_trades_loss` holds it constant.

    Clean inputs and examples share one forward pass. In training mode batch normalisation sees them as one batch and
    updates its running statistics once.

    Args:
        model: Inputs (N, ...) to logits (N, C). The loss is computed in the current mode of the model.
        x: Clean inputs, (N, ...).
        labels: (N,).
        beta: Weight of the divergence, not negative: ``1 / lambda`` of the paper.
        attack: Called as ``attack(model, x, labels, loss=loss)`` with the divergence from the clean distribution as the
            loss to be raised; returns examples of the shape of `x`. For example
            ``partial(nearby_pgd, epsilon=0.1, steps=10, generator=generator)``. The gradient of the divergence is zero
            at `x`, so the attack should start elsewhere: `nearby_pgd`, or `pgd` with a generator.

    Returns:
        A scalar, in nats per sample.

    Raises:
        ValueError: If `beta` is negative or not finite, or examples have another shape than `x`.

    References:
        Zhang, Yu, Jiao, Xing, El Ghaoui and Jordan, "Theoretically principled trade-off between robustness and
        accuracy", 2019, algorithm 1.

    Example:
        >>> from functools import partial
        >>> import torch
        >>> x, weight = torch.full((1, 2), 0.5), torch.tensor([[1.0, 1.0], [0.0, 0.0]])
        >>> from toolkit.adversarial.training.trades import nearby_pgd
        >>> attack = partial(nearby_pgd, epsilon=0.25, steps=2)
        >>> trades_loss(lambda x: x @ weight.T, x, torch.tensor([0]), beta=6.0, attack=attack)
        tensor(0.4713)
    """
    beta = number("beta", beta, least=0)
    clean, moved = _logits(model, x, labels, attack)
    return (cross_entropy(clean, labels) + beta * divergence(clean, moved)).mean()


def held_trades_loss(model: Model, x: Tensor, labels: Tensor, *, beta: float = 6.0, attack: Attack) -> Tensor:
    """Return the value of `trades_loss` with the clean distribution held constant in the divergence.

    With the block `CLEAN_DISTRIBUTION` in place the divergence only draws p(x') towards p(x), and p(x) only follows the
    label, as in virtual adversarial training. With the block open it is `trades_loss`. The arguments are those of
    `trades_loss`.

    Returns:
        A scalar, in nats per sample.

    Raises:
        ValueError: As in `trades_loss`.

    References:
        As `trades_loss`, with the clean distribution held as in Miyato, Maeda, Koyama and Ishii, "Virtual adversarial
        training: a regularization method for supervised and semi-supervised learning", 2018.

    Example:
        >>> from functools import partial
        >>> x, weight = torch.full((1, 2), 0.5), torch.tensor([[1.0, 1.0], [0.0, 0.0]])
        >>> from toolkit.adversarial.training.trades import nearby_pgd
        >>> attack = partial(nearby_pgd, epsilon=0.25, steps=2)
        >>> held_trades_loss(lambda x: x @ weight.T, x, torch.tensor([0]), beta=6.0, attack=attack)
        tensor(0.4713)
    """
    beta = number("beta", beta, least=0)
    clean, moved = _logits(model, x, labels, attack)
    return (cross_entropy(clean, labels) + beta * divergence(stop_gradient(clean, CLEAN_DISTRIBUTION), moved)).mean()


def divergence_from_clean(model: Model, x: Tensor) -> Loss:
    """Return the loss that the attack of TRADES climbs: ``KL(p(x) || p(x'))`` of every sample, in nats.

    The clean distribution is computed once, in evaluation mode, and not in every step of the attack. It is a constant
    while the block `EXAMPLE` is in place.

    Returns:
        A function of logits (N, C) and labels (N,), which it ignores, to losses (N,); for attacks that keep the order
        of the samples.
    """
    with ordinary_tensors(), stop_recording(EXAMPLE), untouched(model):
        from_clean = divergence_from(logits_at(model, x))

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        return from_clean(logits)

    return loss


def nearby_pgd(
    model: Model,
    x: Tensor,
    labels: Tensor,
    *,
    steps: int,
    step_size: float | Tensor | None = None,
    start: float = 1e-3,
    loss: Loss | None = None,
    random_start: bool | None = None,
    generator: torch.Generator | None = None,
    **options: Unpack[GradientOptions],
) -> Tensor:
    """Ascend a loss as `pgd` does, but from a point close to `x`: for losses with zero gradient at `x` itself.

    A random start is ``x + start * n``, n standard normal, as in TRADES. Otherwise the attack starts one step of length
    `start` up the gradient of the label's margin; it is then deterministic, and its rows do not depend on each other.
    The length `start` is in the units of `x`. The other arguments are those of `pgd`.

    Returns:
        Adversarial examples like `x`, inside of ball and box; a constant while the block `EXAMPLE` is in place.

    Raises:
        TypeError: As in `pgd`.
        ValueError: As in `pgd`, or if `start` is negative or not finite.

    References:
        Zhang et al., "Theoretically principled trade-off between robustness and accuracy", 2019, algorithm 1.
    """
    steps = integer("steps", steps)
    draws = own_generator(generator) if starts_at_random(random_start, generator) else None
    with setting(model, x, labels, **options) as attack:
        stride = attack.stride(2.5 / steps, step_size)
        example = start_near(attack, attack.stride(value=start, name="start"), draws)
        return attack.ball.settle(ascend(attack, example, loss, steps, stride))


def _logits(model: Model, x: Tensor, labels: Tensor, attack: Attack) -> tuple[Tensor, Tensor]:
    example = found_by(attack, model, x, labels, loss=divergence_from_clean(model, x))
    return clean_and_moved(model, x, example)
