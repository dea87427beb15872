"""Losses that an attack climbs: logits and labels to one number per sample, positive or rising where the model errs.

N samples, C classes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["Loss", "class_index", "difference_loss", "margin_loss", "margin_slope"]

# Logits (N, C) and labels (N,) -> losses (N,).
Loss = Callable[[Tensor, Tensor], Tensor]


def margin_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return by how much the other classes together beat the label, in nats per sample.

    ``logsumexp_{j != y} z_j - z_y = log((1 - p_y) / p_y)``. Its gradient is that of the cross entropy divided by
    ``1 - p_y``: the same signs and the same direction, so an attack takes the same steps. But where the softmax rounds
    p_y to 1 the gradient of the cross entropy loses the label's part and points elsewhere, and this one does not.

    Args:
        logits: (N, C), at least two classes.
        labels: (N,), integers.

    Returns:
        (N,). Positive where the label has less than half of the probability.

    Raises:
        ValueError: If the shapes are others, or there are fewer than two classes.
        TypeError: If `labels` are not integers.

    Example:
        >>> margin_loss(torch.tensor([[200.0, 0.0]]), torch.tensor([0]))
        tensor([-200.])
    """
    index = class_index(logits, labels)
    return _without_label(logits, index).logsumexp(1) - logits.gather(1, index)[:, 0]


def difference_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return by how much the best other class beats the label, ``max_{j != y} z_j - z_y``, in the units of the logits.

    Args:
        logits: (N, C), at least two classes.
        labels: (N,), integers.

    Returns:
        (N,). Positive where the model errs.

    Raises:
        ValueError: If the shapes are others, or there are fewer than two classes.
        TypeError: If `labels` are not integers.

    Source:
        Carlini and Wagner, "Towards evaluating the robustness of neural networks", 2017, their loss f6 without its
        confidence.

    Example:
        >>> difference_loss(torch.tensor([[2.0, 5.0, 1.0]]), torch.tensor([0]))
        tensor([3.])
    """
    index = class_index(logits, labels)
    return _without_label(logits, index).amax(1) - logits.gather(1, index)[:, 0]


def margin_slope(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the derivative of `margin_loss` by the logits: the softmax of the other classes, and -1 at the label."""
    index = class_index(logits, labels)
    return _without_label(logits, index).softmax(1).scatter(1, index, -1.0)


def _without_label(logits: Tensor, index: Tensor) -> Tensor:
    return logits.scatter(1, index, -torch.inf)


def class_index(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the labels as an index (N, 1) into the logits; raise if they cannot be one."""
    if logits.dim() != 2 or logits.shape[1] < 2:
        raise ValueError(f"`logits` should have shape (N, C) with at least two classes. Found {tuple(logits.shape)}.")
    if labels.shape != logits.shape[:1]:
        raise ValueError(f"`labels` should have shape ({len(logits)},). Found {tuple(labels.shape)}.")
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise TypeError(f"`labels` should be integers. Found {labels.dtype}.")
    return labels.long()[:, None]
