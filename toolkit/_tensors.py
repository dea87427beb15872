"""Checks and precisions of tensors that several rooms share.

Tensors of different shapes would broadcast: (N,) against (N, 1) is a matrix of pairs that do not belong together.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

__all__ = ["common_dtype", "exact_products", "same_shape", "unit", "wide"]

_HALF = (torch.float16, torch.bfloat16)


def wide(input: Tensor) -> Tensor:
    """Return a tensor of half precision as float32, any other unchanged."""
    return input.float() if input.dtype in _HALF else input


def common_dtype(*tensors: Tensor) -> torch.dtype:
    """Return the type of a result of all of the tensors."""
    return functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors))


def unit(input: Tensor) -> Tensor:
    """Return vectors divided by their norms along the last dimension; 0 stays 0 and gets no gradient."""
    norms = torch.linalg.vector_norm(input, dim=-1, keepdim=True)
    return input / torch.where(norms > 0, norms, torch.inf)


def exact_products(input: Tensor) -> AbstractContextManager[object]:
    """Return a region whose matrix products keep the precision of their factors, also under autocast."""
    return nullcontext() if input.device.type == "meta" else torch.autocast(input.device.type, enabled=False)


def same_shape(name: str, value: Tensor, other_name: str, other: Tensor, ndim: int = 0) -> None:
    """Raise a ValueError unless two tensors have the same shape, of at least `ndim` dimensions."""
    if value.shape != other.shape or value.ndim < ndim:
        least = f", with {ndim} or more dimensions" if ndim else ""
        raise ValueError(
            f"`{name}` should have the shape of `{other_name}`{least}. Found {tuple(value.shape)} and "
            f"{tuple(other.shape)}."
        )
