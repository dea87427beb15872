"""Checks of shapes. Reinforcement learning's classic silent error is (N,) against (N, 1), which broadcast to (N, N)."""

from __future__ import annotations

import torch
from torch import Tensor

from toolkit._tensors import INTEGERS, shape_of

__all__ = ["actions_of", "floating", "one_for_each_row", "scalar"]


def one_for_each_row(**tensors: object) -> None:
    """Raise a ValueError unless the second tensor has the shape of the first without its last dimension."""
    (first, rows), (name, tensor) = tensors.items()
    shape, found = shape_of(first, rows), shape_of(name, tensor)
    if not shape:
        raise ValueError(f"`{first}` should have at least one dimension. Found none.")
    if found != shape[:-1]:
        raise ValueError(
            f"`{name}` should have the shape of `{first}` without its last dimension, {tuple(shape[:-1])}. "
            f"Found {tuple(found)}."
        )


def actions_of(logits_t: Tensor, a_t: Tensor) -> None:
    """Raise a ValueError unless `a_t` are integers, one for each row of `logits_t`."""
    one_for_each_row(logits_t=logits_t, a_t=a_t)
    if a_t.dtype not in INTEGERS:
        raise ValueError(f"`a_t` should be integers. Found {a_t.dtype}.")


def scalar(name: str, tensor: object) -> None:
    """Raise a ValueError unless `tensor` has one element and no dimensions."""
    if shape_of(name, tensor) != ():
        raise ValueError(f"`{name}` should be a tensor without dimensions. Found shape {tuple(tensor.shape)}.")  # type: ignore[attr-defined]


def floating(tensor: Tensor) -> Tensor:
    """Return integers in torch's default type, and anything else unchanged."""
    return tensor if tensor.is_floating_point() else tensor.to(torch.get_default_dtype())
