"""Adversarial logit pairing: a penalty pulls the logits at an example towards the logits at the clean input.

N samples, each of shape (...), C classes.
"""

from __future__ import annotations

from torch import Tensor

from toolkit._checks import number
from toolkit.adversarial.training._terms import Attack, Model, clean_and_moved, cross_entropy, found_by

__all__ = ["alp_loss"]


def alp_loss(model: Model, x: Tensor, labels: Tensor, *, weight: float, attack: Attack) -> Tensor:
    """Return ``mean((-log p_y(x) - log p_y(x')) / 2 + weight * |z(x) - z(x')|_2^2)`` with logits z.

    With the block `EXAMPLE` in place its gradient is the gradient of this mean at the examples found; both sides of a
    pair move.

    Clean inputs and examples share one forward pass, so that in training mode batch normalisation updates its running
    statistics once.

    Args:
        model: Inputs (N, ...) to logits (N, C). The loss is computed in the current mode of the model.
        x: Clean inputs, (N, ...).
        labels: (N,).
        weight: Weight of the squared distance, not negative.
        attack: Called as ``attack(model, x, labels)``; returns examples of the shape of `x`.

    Returns:
        A scalar, in nats per sample.

    Raises:
        ValueError: If `weight` is negative or not finite, or examples have another shape than `x`.

    References:
        Kannan, Kurakin and Goodfellow, "Adversarial logit pairing", 2018, section 3 (mixed minibatches and pairing).

    Example:
        >>> import torch
        >>> weight = torch.tensor([[1.0, 1.0], [0.0, 0.0]])
        >>> x = torch.full((1, 2), 0.5)
        >>> alp_loss(lambda x: x @ weight.T, x, torch.tensor([0]), weight=1.0, attack=lambda model, x, labels: 0 * x)
        tensor(1.5032)
    """
    weight = number("weight", weight, least=0)
    clean, moved = clean_and_moved(model, x, found_by(attack, model, x, labels))
    mixed = (cross_entropy(clean, labels) + cross_entropy(moved, labels)) / 2
    return (mixed + weight * (clean - moved).square().sum(1)).mean()
