"""Checks of shapes. Reinforcement learning's classic silent error is (N,) against (N, 1), which broadcast to (N, N)."""

from __future__ import annotations

from torch import Tensor

from toolkit._tensors import floating, integers, shape_of

__all__ = ["actions_of", "one_for_each_row", "scalar"]


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
    """Raise a ValueError unless `a_t` are integers, one for each row of floating-point `logits_t`."""
    floating(logits_t=logits_t)
    one_for_each_row(logits_t=logits_t, a_t=a_t)
    integers(a_t=a_t)


def scalar(name: str, tensor: Tensor) -> None:
    """Raise a ValueError unless `tensor` is a floating-point tensor without dimensions."""
    floating(**{name: tensor})
    if tensor.ndim:
        raise ValueError(f"`{name}` should be a tensor without dimensions. Found shape {tuple(tensor.shape)}.")
