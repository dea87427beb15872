"""The loss that adversarial training minimises: the cross entropy at the examples an attack finds."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from toolkit.adversarial.attacks._setting import EXAMPLE
from toolkit.adversarial.training._terms import logits_at
from toolkit.blocks import stop_gradient

__all__ = ["adversarial_loss"]


def adversarial_loss(
    model: Callable[[Tensor], Tensor],
    x: Tensor,
    labels: Tensor,
    *,
    attack: Callable[[Callable[[Tensor], Tensor], Tensor, Tensor], Tensor],
) -> Tensor:
    """Return the mean cross entropy at adversarial examples: the surrogate of adversarial training.

    It stands for the robust loss ``E max_{x' in ball(x)} L(theta, x')``. With the block `EXAMPLE` in place its gradient
    is ``dL/dtheta`` at the example found. By Danskin's theorem this is the gradient of the robust loss, if the attack
    found the maximum. The term that an open block adds, ``(dx'/dtheta)^T dL/dx'``, is zero at the maximum, because the
    example can only move along the surface of the ball, orthogonally to ``dL/dx'``.

    Args:
        model: Inputs (N, ...) to logits (N, C). The loss is computed in the current mode of the model.
        x: Clean inputs, (N, ...).
        labels: (N,).
        attack: Called as ``attack(model, x, labels)``; returns examples of the shape of `x`. For example
            ``functools.partial(pgd, epsilon=0.1, steps=10)``.

    Returns:
        A scalar, in nats per sample.

    References:
        Madry, Makelov, Schmidt, Tsipras and Vladu, "Towards deep learning models resistant to adversarial attacks",
        2018, equation 2.1 and appendix A (Danskin's theorem).

    Example:
        >>> from functools import partial
        >>> import torch
        >>> from toolkit.adversarial import fgsm
        >>> x, weight = torch.full((1, 2), 0.5), torch.tensor([[1.0, 1.0], [0.0, 0.0]])
        >>> adversarial_loss(lambda x: x @ weight.T, x, torch.tensor([0]), attack=partial(fgsm, epsilon=0.5))
        tensor(0.6931)
    """
    example = stop_gradient(attack(model, x, labels), EXAMPLE)
    return F.cross_entropy(logits_at(model, example), labels)
