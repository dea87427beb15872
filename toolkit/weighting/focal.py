r"""Focal loss as in its paper, without a block; and with its weight held constant.

Focal loss multiplies the cross entropy of each sample by :math:`(1 - p)^\gamma`, p the probability of the label. The
paper differentiates this weight too. Code that holds the weight constant minimises another loss: its gradient is that
of

.. math:: \int_p^1 \frac{(1 - q)^\gamma}{q} dq = -\log p - \sum_{j=1}^{\gamma} \frac{(1 - p)^j}{j}

(the sum for integer :math:`\gamma`). This is the cross entropy without the first :math:`\gamma` terms of its expansion
in :math:`1 - p`. Its slope in the logit of the label is :math:`-(1 - p)^{\gamma + 1}`, the paper's
:math:`-(1 - p)^\gamma (1 - p - \gamma p \log p)`: it is always smaller.

N samples, C classes; ``*`` any shape. Half precision is computed in float32 and rounded once.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from toolkit._checks import choice, number
from toolkit._tensors import floating, floating_alike, gathered, integers, promoted, wide
from toolkit.blocks import block, stop_gradient

__all__ = ["FOCAL_WEIGHT", "focal_loss", "held_focal_loss", "held_sigmoid_focal_loss", "sigmoid_focal_loss"]

FOCAL_WEIGHT = block(
    "weighting.focal_weight",
    "A weight that only says how much a sample counts; the paper's focal loss differentiates it, so this block makes "
    "another loss.",
)

Reduction = Literal["none", "mean", "sum"]


def sigmoid_focal_loss(
    inputs: Tensor,
    targets: Tensor,
    alpha: float | None = 0.25,
    gamma: float = 2.0,
    reduction: Reduction = "none",
) -> Tensor:
    r"""Return focal losses :math:`-\alpha_t (1 - p_t)^\gamma \log p_t` of independent binary decisions, in nats.

    With :math:`y = 2t - 1` for a target t of 0 or 1, :math:`p_t` is the sigmoid of :math:`y x`, and the gradient with
    respect to the logit x is :math:`\alpha_t y (1 - p_t)^\gamma (\gamma p_t \log p_t + p_t - 1)`. Nothing is held
    constant.

    Args:
        inputs: Logits, (\*); infinite logits are certain decisions.
        targets: (\*), 0 or 1, or soft targets in between: :math:`1 - p_t` and the cross entropy are then means over
            both outcomes.
        alpha: Weight of positive targets; negative targets get ``1 - alpha``. None: no weights.
        gamma: Exponent from 0; 0 gives the cross entropy.
        reduction: ``"none"``, ``"mean"`` or ``"sum"``.

    Returns:
        (\*), or a scalar.

    Raises:
        ValueError: If the shapes differ, `alpha` is not from 0 to 1, `gamma` is negative, or `reduction` is unknown.

    References:
        Lin, Goyal, Girshick, He and Dollár, "Focal loss for dense object detection", 2017, equation 5.

    Example:
        >>> sigmoid_focal_loss(torch.tensor([0.4, -1.2]), torch.tensor([1.0, 0.0]), alpha=None)
        tensor([0.0826, 0.0141])
    """
    weight, loss = _sigmoid_parts(inputs, targets, alpha, gamma)
    return _reduced(weight * loss, reduction).to(inputs.dtype)


def held_sigmoid_focal_loss(
    inputs: Tensor,
    targets: Tensor,
    alpha: float | None = 0.25,
    gamma: float = 2.0,
    reduction: Reduction = "none",
) -> Tensor:
    r"""Return the values of `sigmoid_focal_loss` with the weights :math:`(1 - p_t)^\gamma` held constant.

    With the block `FOCAL_WEIGHT` in place the gradient with respect to the logit is :math:`-\alpha_t y (1 -
    p_t)^{\gamma + 1}`. Opened, it is that of `sigmoid_focal_loss`.

    Args:
        inputs: As in `sigmoid_focal_loss`, like all arguments below.
        targets: (\*).
        alpha: Weight of positive targets, or None.
        gamma: Exponent.
        reduction: ``"none"``, ``"mean"`` or ``"sum"``.

    Returns:
        (\*), or a scalar.

    Raises:
        ValueError: As in `sigmoid_focal_loss`.

    References:
        As `sigmoid_focal_loss`. Leng et al., "PolyLoss: a polynomial expansion perspective of classification loss
        functions", 2022, expand cross entropy and focal loss in powers of ``1 - p``.

    Example:
        >>> x = torch.tensor([0.4, -1.2], requires_grad=True)
        >>> held_sigmoid_focal_loss(x, torch.tensor([1.0, 0.0]), alpha=None, reduction="sum").backward()
        >>> x.grad
        tensor([-0.0646,  0.0124])
    """
    weight, loss = _sigmoid_parts(inputs, targets, alpha, gamma)
    return _reduced(stop_gradient(weight, FOCAL_WEIGHT) * loss, reduction).to(inputs.dtype)


def focal_loss(logits: Tensor, labels: Tensor, gamma: float = 2.0, reduction: Reduction = "mean") -> Tensor:
    r"""Return focal losses :math:`-(1 - p)^\gamma \log p` of one label among C classes, in nats.

    p is the softmax probability of the label, and nothing is held constant. The gradient with respect to the logits is
    :math:`((1 - p)^\gamma - \gamma (1 - p)^{\gamma - 1} p \log p) (\mathrm{softmax}(x) - e)`, e the label's indicator.

    Args:
        logits: (\*, C).
        labels: (\*), integers from 0 to C - 1.
        gamma: Exponent from 0; 0 gives the cross entropy.
        reduction: ``"none"``, ``"mean"`` or ``"sum"``.

    Returns:
        (\*), or a scalar.

    Raises:
        ValueError: If the shapes do not fit, `labels` has no integers below C, `gamma` is negative or not finite,
            or `reduction` is unknown.

    References:
        Lin, Goyal, Girshick, He and Dollár, "Focal loss for dense object detection", 2017, equation 4.

    Example:
        >>> focal_loss(torch.tensor([[0.4, -1.2, 0.3]]), torch.tensor([0]))
        tensor(0.2056)
    """
    weight, loss = _softmax_parts(logits, labels, gamma)
    return _reduced(weight * loss, reduction).to(logits.dtype)


def held_focal_loss(logits: Tensor, labels: Tensor, gamma: float = 2.0, reduction: Reduction = "mean") -> Tensor:
    r"""Return the values of `focal_loss` with the weights :math:`(1 - p)^\gamma` held constant.

    With the block `FOCAL_WEIGHT` in place the gradient with respect to the logits is :math:`(1 - p)^\gamma
    (\mathrm{softmax}(x) - e)`, that of the cross entropy without its first terms (see the module). Opened, it is that
    of `focal_loss`.

    Args:
        logits: As in `focal_loss`, like all arguments below.
        labels: (\*).
        gamma: Exponent.
        reduction: ``"none"``, ``"mean"`` or ``"sum"``.

    Returns:
        (\*), or a scalar.

    Raises:
        ValueError: As in `focal_loss`.

    References:
        As `held_sigmoid_focal_loss`.

    Example:
        >>> x = torch.tensor([[0.4, -1.2, 0.3]], requires_grad=True)
        >>> held_focal_loss(x, torch.tensor([0])).backward()
        >>> x.grad
        tensor([[-0.1450,  0.0264,  0.1185]])
    """
    weight, loss = _softmax_parts(logits, labels, gamma)
    return _reduced(stop_gradient(weight, FOCAL_WEIGHT) * loss, reduction).to(logits.dtype)


def _sigmoid_parts(x: Tensor, targets: Tensor, alpha: float | None, gamma: float) -> tuple[Tensor, Tensor]:
    """Return the focal weights, and the cross entropies weighted by class."""
    targets = promoted(targets, x)
    floating_alike(inputs=x, targets=targets)
    x = wide(x)
    bound = torch.finfo(x.dtype).max
    x = x.clamp(-bound, bound)  # the logit of a sure decision may be infinite
    t = targets.to(x.dtype)
    weight = _weight(torch.lerp(torch.sigmoid(x), torch.sigmoid(-x), t), gamma)
    loss = functional.binary_cross_entropy_with_logits(x, t, reduction="none")
    if alpha is None:
        return weight, loss
    alpha = number("alpha", alpha, least=0, most=1)
    return weight, loss * ((1 - alpha) + (2 * alpha - 1) * t)


def _softmax_parts(logits: Tensor, labels: Tensor, gamma: float) -> tuple[Tensor, Tensor]:
    """Return the focal weights and the cross entropies."""
    floating(logits=logits)
    integers(labels=labels)
    if logits.ndim == 0 or logits.shape[:-1] != labels.shape:
        raise ValueError(f"`labels` should have shape {tuple(logits.shape[:-1])}. Found {tuple(labels.shape)}.")
    log_p = gathered("labels", functional.log_softmax(wide(logits), -1), -1, labels.long()[..., None]).squeeze(-1)
    return _weight(-torch.expm1(log_p), gamma), -log_p


def _weight(missed: Tensor, gamma: float) -> Tensor:
    """Return ``missed ** gamma``, whose derivative is finite where the probability underflows."""
    gamma = number("gamma", gamma, least=0)
    return missed.clamp(min=torch.finfo(missed.dtype).tiny) ** gamma


def _reduced(loss: Tensor, reduction: Reduction) -> Tensor:
    choice("reduction", reduction, ("none", "mean", "sum"))
    if reduction == "none":
        return loss
    return loss.mean() if reduction == "mean" else loss.sum()
