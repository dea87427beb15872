"""Losses that attacks raise: logits and labels to one number per sample, positive or rising where the model errs.

N samples, C classes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from toolkit.adversarial._classes import check_classes

__all__ = [
    "Loss",
    "class_index",
    "difference_loss",
    "dlr_loss",
    "margin_loss",
    "margin_slope",
    "targeted_dlr_loss",
    "without_label",
]

# Logits (N, C) and labels (N,) -> losses (N,).
Loss = Callable[[Tensor, Tensor], Tensor]


def margin_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the log odds against the label, in nats per sample.

    ``logsumexp_{j != y} z_j - z_y = log((1 - p_y) / p_y)``. Its gradient is the gradient of the cross entropy, divided
    by ``1 - p_y``: the same signs and the same direction, so an attack takes the same steps. Where the softmax rounds
    p_y to 1, the gradient of the cross entropy loses the label's part and points elsewhere; the gradient of this loss
    does not.

    Args:
        logits: (N, C), at least two classes.
        labels: (N,), integers.

    Returns:
        (N,). Positive where the label has less than half of the probability.

    Raises:
        ValueError: If the shapes are others, or there are fewer than two classes.
        TypeError: If `labels` are not integers, or `logits` are.

    Example:
        >>> margin_loss(torch.tensor([[200.0, 0.0]]), torch.tensor([0]))
        tensor([-200.])
    """
    index = class_index(logits, labels)
    return _others(logits, index).logsumexp(1) - logits.gather(1, index)[:, 0]


def difference_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the lead of the best other class over the label, ``max_{j != y} z_j - z_y``, in the units of the logits.

    Args:
        logits: (N, C), at least two classes.
        labels: (N,), integers.

    Returns:
        (N,). Positive where the model errs.

    Raises:
        ValueError: If the shapes are others, or there are fewer than two classes.
        TypeError: If `labels` are not integers, or `logits` are.

    References:
        Carlini and Wagner, "Towards evaluating the robustness of neural networks", 2017, their loss f6 without its
        confidence.

    Example:
        >>> difference_loss(torch.tensor([[2.0, 5.0, 1.0]]), torch.tensor([0]))
        tensor([3.])
    """
    index = class_index(logits, labels)
    return _others(logits, index).amax(1) - logits.gather(1, index)[:, 0]


def dlr_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the difference of logits ratio: the lead of the best other class over the label, without a scale.

    ``(max_{j != y} z_j - z_y) / (z_(1) - z_(3))`` with ``z_(i)`` the i-th largest logit. It does not change if all
    logits are shifted or scaled. Where the model is right it lies between -1 and 0.

    Args:
        logits: (N, C), at least three classes.
        labels: (N,), integers.

    Returns:
        (N,). Positive where the model errs; 0 where the three largest logits are equal.

    Raises:
        ValueError: If the shapes are others, or there are fewer than three classes.
        TypeError: If `labels` are not integers, or `logits` are.

    References:
        Croce and Hein, "Reliable evaluation of adversarial robustness with an ensemble of diverse parameter-free
        attacks", 2020, section 4.2.

    Example:
        >>> dlr_loss(torch.tensor([[5.0, 2.0, 1.0]]), torch.tensor([0]))
        tensor([-0.7500])
    """
    difference = difference_loss(logits, labels)
    _check_classes(logits, 3)
    largest = logits.topk(3).values
    return _ratio(difference, largest[:, 0] - largest[:, 2])


def targeted_dlr_loss(logits: Tensor, labels: Tensor, targets: Tensor) -> Tensor:
    """Return the targeted difference of logits ratio: the lead of one class over the label, without a scale.

    ``(z_t - z_y) / (z_(1) - (z_(3) + z_(4)) / 2)`` with ``z_(i)`` the i-th largest logit. With the denominator of
    `dlr_loss` it would be constant, -1, wherever y is the largest and t the third.

    Args:
        logits: (N, C), at least four classes.
        labels: (N,), integers.
        targets: (N,), integers.

    Returns:
        (N,). Positive where the target beats the label; 0 where the four largest logits are equal.

    Raises:
        ValueError: If the shapes are others, or there are fewer than four classes.
        TypeError: If `labels` or `targets` are not integers.

    References:
        Croce and Hein, "Reliable evaluation of adversarial robustness with an ensemble of diverse parameter-free
        attacks", 2020, section 4.2.

    Example:
        >>> targeted_dlr_loss(torch.tensor([[5.0, 3.0, 2.0, 0.0]]), torch.tensor([0]), torch.tensor([2]))
        tensor([-0.7500])
    """
    beaten, beating = class_index(logits, labels), class_index(logits, targets)
    _check_classes(logits, 4)
    largest = logits.topk(4).values
    difference = (logits.gather(1, beating) - logits.gather(1, beaten))[:, 0]
    return _ratio(difference, largest[:, 0] - (largest[:, 2] + largest[:, 3]) / 2)


def margin_slope(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the gradient of `margin_loss` by the logits: the softmax of the other classes, and -1 at the label."""
    index = class_index(logits, labels)
    return _others(logits, index).softmax(1).scatter(1, index, -1.0)


def without_label(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the logits with minus infinity at the label."""
    return _others(logits, class_index(logits, labels))


def _others(logits: Tensor, index: Tensor) -> Tensor:
    return logits.scatter(1, index, -torch.inf)


def class_index(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the labels as an index (N, 1) into the logits; raise if they cannot be one."""
    if not isinstance(logits, Tensor):
        raise TypeError(f"`logits` should be a tensor. Found {type(logits).__name__}.")
    if not logits.is_floating_point():
        raise TypeError(f"`logits` should be floating point. Found {logits.dtype}.")
    if logits.dim() != 2 or logits.shape[1] < 2:
        raise ValueError(f"`logits` should have shape (N, C) with at least two classes. Found {tuple(logits.shape)}.")
    return check_classes("labels", labels, len(logits))[:, None]


def _check_classes(logits: Tensor, least: int) -> None:
    if logits.shape[1] < least:
        raise ValueError(f"`logits` should have at least {least} classes for this loss. Found {logits.shape[1]}.")


def _ratio(difference: Tensor, scale: Tensor) -> Tensor:
    """Return the quotient; 0 with zero gradient where the scale is 0, because its logits are equal."""
    return torch.where(scale > 0, difference / torch.where(scale > 0, scale, 1), 0)
