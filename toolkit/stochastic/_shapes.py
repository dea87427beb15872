"""Shapes that have to fit: tensors that broadcast to a larger shape would be averaged over pairs that do not belong."""

from __future__ import annotations

from torch import Tensor

from toolkit._checks import broadcasts
from toolkit._tensors import floating

__all__ = ["fits", "several"]


def fits(name: str, tensor: Tensor, into: str, other: Tensor) -> None:
    """Raise a ValueError unless a tensor broadcasts to the shape of another."""
    floating(**{name: tensor, into: other})
    if not broadcasts(tensor.shape, other.shape):
        shapes = f"{tuple(tensor.shape)} and {tuple(other.shape)}"
        raise ValueError(f"`{name}` should broadcast to the shape of `{into}`. Found {shapes}.")


def several(name: str, tensor: Tensor, least: int = 1) -> None:
    """Raise a ValueError unless the first dimension has one entry, or `least` of them."""
    floating(**{name: tensor})
    if tensor.ndim == 0 or len(tensor) < least:
        count = "a sample" if least == 1 else f"at least {least} samples"
        raise ValueError(f"`{name}` should have {count} along dimension 0. Found shape {tuple(tensor.shape)}.")
