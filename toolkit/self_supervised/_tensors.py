"""Checks and parts that the losses of this room share.

V views, T of them seen by the teacher, N samples, K classes, prototypes or outputs.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from toolkit._tensors import floating, floating_alike

__all__ = ["cross_view_entropy", "logits_alike", "nats", "views"]


def logits_alike(**tensors: Tensor) -> None:
    r"""Raise a ValueError unless all of the tensors have one shape (\*, K) with at least one class."""
    floating_alike(1, **tensors)
    for name, tensor in tensors.items():
        if tensor.shape[-1] == 0:
            raise ValueError(f"`{name}` should have at least one class. Found shape {tuple(tensor.shape)}.")


def views(name: str, value: Tensor, shape: torch.Size | None = None, most: int | None = None) -> None:
    r"""Raise a ValueError unless a tensor is (V, \*, K): all views of one `shape`, and at most `most` of them."""
    floating(**{name: value})
    if value.ndim < 3 or value.shape[-1] == 0 or (shape is not None and value.shape[1:] != shape):
        expected = "(views, samples, outputs)" if shape is None else f"(views, {', '.join(map(str, shape))})"
        raise ValueError(f"`{name}` should have shape {expected}. Found {tuple(value.shape)}.")
    if len(value) < (2 if most is None else 1) or (most is not None and len(value) > most):
        expected = "at least two views" if most is None else f"from 1 to {most} views"
        raise ValueError(f"`{name}` should have {expected}. Found {len(value)}.")


def cross_view_entropy(targets: Tensor, log_probabilities: Tensor) -> Tensor:
    r"""Return the mean of :math:`-\sum_k q_{tk} \log p_{vk}` over samples and pairs of different views.

    The answers that a target is compared with are added first. A matrix product over all samples would be shorter, but
    its sums lose up to three digits of float32.

    Args:
        targets: Distributions q of the first T views, (T, \*, K).
        log_probabilities: log p of all views, (V, \*, K).
    """
    answers, seen = log_probabilities.unbind(0), len(targets)
    unseen = [_sum(answers[seen:])] if len(answers) > seen else []
    total = targets.new_zeros(())
    for t, target in enumerate(targets.unbind(0)):
        total = total + nats(target, _sum([*unseen, *answers[:t], *answers[t + 1 : seen]])).sum()
    return total / (seen * (len(answers) - 1) * targets[0, ..., 0].numel())


def nats(target: Tensor, log_probabilities: Tensor) -> Tensor:
    r"""Return :math:`-\sum_k q_k \log p_k`, (\*, K) to (\*), where :math:`0 \log 0` is 0."""
    return -(target * log_probabilities.where(target > 0, 0)).sum(-1)


def _sum(terms: Sequence[Tensor]) -> Tensor:
    return functools.reduce(torch.add, terms)
