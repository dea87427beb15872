"""MART: misclassification-aware adversarial training, which weights a sample by its probability of a wrong class.

N samples, each of shape (...), C classes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from toolkit._checks import number
from toolkit.adversarial.attacks.losses import margin_loss, without_label
from toolkit.adversarial.training._terms import (
    Attack,
    Model,
    clean_and_moved,
    cross_entropy,
    divergence,
    found_by,
)

__all__ = ["boosted_cross_entropy", "mart_loss"]


def mart_loss(model: Model, x: Tensor, labels: Tensor, *, beta: float = 5.0, attack: Attack) -> Tensor:
    """Return the surrogate of MART: ``mean(BCE(p(x'), y) + beta * KL(p(x) || p(x')) * (1 - p_y(x)))``.

    BCE is the `boosted_cross_entropy`. Samples whose clean inputs are misclassified count most in the second term. With
    the block `EXAMPLE` in place the gradient is the gradient of this mean at the examples found: the clean distribution
    and the weight ``1 - p_y(x)`` move with the model, as in the code of the paper's authors.

    Every term is computed from the logits in a stable form, for example ``1 - p_y = sigmoid(margin_loss)``, so no
    constants are added to keep logarithms finite. Clean inputs and examples share one forward pass, so that in training
    mode batch normalisation updates its running statistics once.

    Args:
        model: Inputs (N, ...) to logits (N, C). The loss is computed in the current mode of the model.
        x: Clean inputs, (N, ...).
        labels: (N,).
        beta: Weight of the divergence, not negative.
        attack: Called as ``attack(model, x, labels)``; returns examples of the shape of `x`. For example
            ``partial(pgd, epsilon=0.1, steps=10, generator=generator)``.

    Returns:
        A scalar, in nats per sample.

    Raises:
        ValueError: If `beta` is negative or not finite, or examples have another shape than `x`.

    References:
        Wang, Zou, Yi, Bailey, Ma and Gu, "Improving adversarial robustness requires revisiting misclassified examples",
        2020, section 3.

    Example:
        >>> import torch
        >>> weight = torch.tensor([[1.0, 1.0], [0.0, 0.0]])
        >>> x = torch.full((1, 2), 0.5)
        >>> mart_loss(lambda x: x @ weight.T, x, torch.tensor([0]), attack=lambda model, x, labels: x)
        tensor(0.6265)
    """
    beta = number("beta", beta, least=0)
    clean, moved = clean_and_moved(model, x, found_by(attack, model, x, labels))
    weight = torch.sigmoid(margin_loss(clean, labels))
    return (boosted_cross_entropy(moved, labels) + beta * weight * divergence(clean, moved)).mean()


def boosted_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return ``-log p_y - log(1 - max_{k != y} p_k)`` in nats, (N,), for the arguments of `margin_loss`.

    References:
        Wang et al., "Improving adversarial robustness requires revisiting misclassified examples", 2020, section 3.
    """
    best_other = without_label(logits, labels).argmax(1)
    # 1 - p_k is the sigmoid of the margin of k.
    return cross_entropy(logits, labels) - F.logsigmoid(margin_loss(logits, best_other))
