"""Checks of the tensors that every function of the room takes, and their choice by action."""

from __future__ import annotations

import torch
from torch import Tensor

from toolkit._tensors import floating, gathered, integers

__all__ = ["bootstrapped", "chosen", "expected", "floating", "of_actions", "of_shape"]


def of_shape(shape: torch.Size, whose: str, **tensors: Tensor) -> None:
    """Raise a ValueError unless all of the tensors are floating-point and have this shape: nothing is broadcast."""
    floating(**tensors)
    for name, tensor in tensors.items():
        if tensor.shape != shape:
            raise ValueError(f"`{name}` should have the shape {whose}, {tuple(shape)}. Found {tuple(tensor.shape)}.")


def of_actions(shape: torch.Size, whose: str, **actions: Tensor) -> None:
    """Raise a ValueError unless the actions are integers and have this shape."""
    integers(**actions)
    for name, action in actions.items():
        if action.shape != shape:
            raise ValueError(f"`{name}` should have the shape {whose}, {tuple(shape)}. Found {tuple(action.shape)}.")


def chosen(values: Tensor, actions: Tensor, dim: int = -1, name: str = "a_tm1") -> Tensor:
    """Return the values of the actions: (*, A, ...) and (*) to (*, ...), with A at `dim`.

    Raises:
        ValueError: If an action is out of range, with the `name` of the actions.
    """
    index = actions.long().unsqueeze(-1)
    if dim == -1 and values.ndim == actions.ndim + 1:
        return gathered(name, values, -1, index).squeeze(-1)
    shape = list(values.shape)
    shape[dim] = 1
    return gathered(name, values, dim, index.unsqueeze(-1).expand(shape)).squeeze(dim)


def bootstrapped(r_t: Tensor, discount_t: Tensor, value: Tensor) -> Tensor:
    """Return ``r_t + discount_t value``, where 0 times the value of a state without legal actions, -inf, is 0."""
    ended = (discount_t == 0) & value.isneginf()
    return torch.addcmul(r_t, discount_t, value.masked_fill(ended, 0.0))


def expected(probs: Tensor, values: Tensor) -> Tensor:
    """Return the mean value, (*, A) to (*), where 0 times the value of an illegal action, -inf, is 0."""
    never = (probs == 0) & values.isneginf()
    return (probs * values.masked_fill(never, 0.0)).sum(-1)
