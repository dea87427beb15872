"""Warnings of models for which an attack measures nothing: random, dependent on the batch, flat, or after a softmax.

N samples, each of shape (...), C classes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from toolkit.adversarial._warnings import warn
from toolkit.adversarial.attacks._setting import NoGradientError, Setting
from toolkit.adversarial.attacks.expectation import EOT

__all__ = ["warn_of_unsuited_models"]


def warn_of_unsuited_models(attack: Setting, logits: Tensor) -> None:
    """Warn if the model's logits are random, depend on the batch, are probabilities, or have no slope.

    It takes four more passes of one batch: the first two kinds show in a second evaluation, of the batch and of a half.

    Args:
        attack: The batch.
        logits: Its logits, (N, C).
    """
    if not len(attack.x) or not isinstance(logits, Tensor) or logits.dim() != 2:
        return
    for problem in (_random(attack, logits), _mixed(attack, logits), _normalised(logits), _flat(attack)):
        if problem is not None:
            warn(problem)
            break


def _random(attack: Setting, logits: Tensor) -> str | None:
    """Name the difference between two evaluations of one batch."""
    difference = _largest_difference(attack.logits(attack.x), logits)
    if not difference or isinstance(attack.model, EOT):
        return None
    return (
        f"`model` should give the same logits each time. Found a difference of {difference:.2g}, so attacks find lucky "
        "draws. Attack the mean of its answers: `EOT(model, samples=20)`."
    )


def _mixed(attack: Setting, logits: Tensor) -> str | None:
    """Name the difference between a batch and a part of it, or a larger one."""
    n = len(logits)
    other = attack.x[: (n + 1) // 2] if n > 1 else torch.cat([attack.x, attack.x.flip(1)])
    kept = min(n, len(other))
    difference = _largest_difference(attack.logits(other)[:kept], logits[:kept])
    if not difference or isinstance(attack.model, EOT):
        return None
    return (
        "`model` should answer each sample alone. Found logits that depend on the rest of the batch, by "
        f"{difference:.2g}, and attacks leave out samples as they go. Is a layer in training mode?"
    )


def _normalised(logits: Tensor) -> str | None:
    """Name a softmax at the end of the model."""
    sums = logits.double().sum(1)
    if (logits < 0).any() or not (sums - 1).abs().max() < 1e-3:
        return None
    return "`model` should return logits. Found probabilities, whose gradients vanish: leave out the softmax."


def _flat(attack: Setting) -> str | None:
    """Name the number of samples whose gradient vanishes."""
    try:
        _, gradient, _ = attack.gradient(attack.x)
    except NoGradientError:  # the attacks that need one are skipped
        return None
    count = int((gradient == 0).flatten(1).all(1).sum())
    if not count:
        return None
    return (
        "`model` should have a gradient with respect to its input. "
        f"Found a zero gradient for {count} of {len(attack.x)} samples, "
        "which attacks that follow it cannot move. Look for rounding or saturation."
    )


def _largest_difference(logits: Tensor, others: Tensor) -> float:
    """Return the largest difference in logits; 0 if it is no more than rounding."""
    difference = float((logits - others).abs().nan_to_num().max())
    size = float(others.abs().nan_to_num(posinf=0).max())
    return difference if difference > torch.finfo(logits.dtype).eps ** 0.5 * size else 0.0
