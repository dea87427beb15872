"""Checks and precisions of tensors that several rooms share.

Tensors of different shapes would broadcast: (N,) against (N, 1) is a matrix of pairs that do not belong together.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

__all__ = [
    "HALF",
    "INTEGERS",
    "autocasts",
    "averaged",
    "bounded",
    "common_dtype",
    "dense",
    "exact_products",
    "exponential_remainder",
    "floating",
    "floating_alike",
    "gathered",
    "in_range",
    "integers",
    "is_dense",
    "is_visible",
    "kind_of",
    "largest_exponent",
    "lengths",
    "mappings",
    "promoted",
    "same_shape",
    "shape_of",
    "tensors",
    "unit",
    "wide",
    "with_norms",
]

HALF = (torch.float16, torch.bfloat16)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def wide(input: Tensor) -> Tensor:
    """Return a tensor of half precision as float32, any other unchanged."""
    return input.float() if input.dtype in HALF else input


def common_dtype(*tensors: Tensor) -> torch.dtype:
    """Return the type of a result of all of the tensors."""
    return functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors))


def largest_exponent(dtype: torch.dtype) -> float:
    """Return a number whose exponential is finite in this type, by a margin for sums."""
    return math.log(torch.finfo(dtype).max) - 1


def bounded(input: Tensor, least: float = -math.inf, most: float = math.inf) -> Tensor:
    """Return ``input.clamp(least, most)`` with the gradient 1 at the bounds, where that of torch is 0 since 2.14."""
    input = input if least == -math.inf else input.masked_fill(input < least, least)
    return input if most == math.inf else input.masked_fill(input > most, most)


def averaged(old: Tensor, new: Tensor, share: float) -> Tensor:
    """Return ``(1 - share) old + share new``, for 0 and 1 a copy; unlike `lerp`'s, an infinite number of both stays."""
    if share in (0, 1):
        return (new if share else old).clone()
    return torch.add((1 - share) * old, new, alpha=share)


def exponential_remainder(input: Tensor) -> Tensor:
    """Return ``exp(x) - 1 - x``, never negative, to a few roundings also where x is small: ``x^2 / 2 + x^3 / 6``."""
    small = 0.25  # the first term left out of the series is below the rounding
    inner = input.clamp(-small, small)
    series = one = input.new_ones(())
    for k in range(13 if input.dtype == torch.float64 else 8, 2, -1):
        series = torch.addcmul(one, inner, series, value=1 / k)
    finite = input.clamp(max=torch.finfo(input.dtype).max)  # where the exponential is infinite, too
    return torch.where(input.abs() < small, inner.square() / 2 * series, input.expm1() - finite)


def kind_of(value: object) -> str:
    """Return the dtype of a tensor, or the type of anything else, for a message."""
    return str(value.dtype) if isinstance(value, Tensor) else type(value).__name__


def is_dense(tensor: Tensor) -> bool:
    """Say whether a tensor is neither sparse nor nested."""
    return tensor.layout is torch.strided and not tensor.is_nested


def dense(**tensors: object) -> None:
    """Raise a TypeError if any of the tensors is sparse or nested; other values are left to other checks."""
    for name, tensor in tensors.items():
        if isinstance(tensor, Tensor) and not is_dense(tensor):
            found = "a nested tensor" if tensor.is_nested else tensor.layout
            raise TypeError(f"`{name}` should be a dense tensor. Found {found}.")


def floating(**tensors: Tensor) -> None:
    """Raise a ValueError unless all of the tensors are real floating-point numbers: a flag is neither 0 nor 1."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            raise ValueError(f"`{name}` should be a floating-point tensor. Found {kind_of(tensor)}.")


def integers(**tensors: Tensor) -> None:
    """Raise a ValueError unless all of the tensors are integers."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor) or tensor.dtype not in INTEGERS:
            raise ValueError(f"`{name}` should be a tensor of integers. Found {kind_of(tensor)}.")


def is_visible(input: Tensor) -> bool:
    """Say whether a value can be looked at, at no cost: on other devices the program would wait for it."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active() or is_in_torch_dispatch_mode():
        return False
    return type(input) in (Tensor, torch.nn.Parameter) and input.device.type == "cpu"


def unit(input: Tensor) -> Tensor:
    """Return vectors divided by their norms along the last dimension; 0 stays 0 and gets no gradient."""
    vectors, norms, _ = with_norms(input)
    return vectors / torch.where(norms > 0, norms, torch.inf)


def lengths(input: Tensor) -> Tensor:
    """Return the norms of vectors along the last dimension, which is kept."""
    _, norms, power = with_norms(input)
    return norms / power


def with_norms(input: Tensor) -> tuple[Tensor, Tensor, Tensor | float]:
    """Return vectors, their norms along the last dimension, which is kept, and the power of two that multiplies both.

    The power is 1 except where squares would over- or underflow.
    """
    norms = torch.linalg.vector_norm(input, dim=-1, keepdim=True)
    width = math.frexp(torch.finfo(input.dtype).max)[1]
    small, large = 2.0 ** (-width // 4), 2.0 ** (3 * width // 8)
    if is_visible(norms) and norms.numel() > 0:  # one look saves two passes over the vectors
        least, most = norms.aminmax()
        if small <= least.item() <= most.item() <= large:
            return input, norms, 1.0
    power = torch.ones_like(norms).masked_fill(norms > large, 2.0 ** (-3 * width // 4))
    power = power.masked_fill(norms < small, 2.0 ** (3 * width // 4))
    input = input * power
    return input, torch.linalg.vector_norm(input, dim=-1, keepdim=True), power


def autocasts(device: torch.device) -> bool:
    """Say whether ``torch.autocast`` takes products in half precision; not every kind of device knows it."""
    return torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)


def exact_products(device: torch.device) -> AbstractContextManager[object]:
    """Return a region whose matrix products keep the precision of their factors, also under autocast."""
    return torch.autocast(device.type, enabled=False) if autocasts(device) else nullcontext()


def same_shape(ndim: int = 0, **tensors: object) -> None:
    """Raise a ValueError unless all are tensors with the shape of the first, of at least `ndim` dimensions."""
    (first, reference), *others = tensors.items()
    shape = shape_of(first, reference)
    for name, tensor in others:
        found = shape_of(name, tensor)
        if found != shape or len(found) < ndim:
            least = f", with {ndim} or more dimensions" if ndim else ""
            raise ValueError(
                f"`{name}` should have the shape of `{first}`, {tuple(shape)}{least}. Found {tuple(found)}."
            )


def floating_alike(ndim: int = 0, **tensors: Tensor) -> None:
    """Raise a ValueError unless all are floating-point tensors with the shape of the first, as `same_shape` has it."""
    floating(**tensors)
    same_shape(ndim, **tensors)


def gathered(name: str, values: Tensor, dim: int, indices: Tensor) -> Tensor:
    """Return ``values.gather(dim, indices)``; raise a ValueError with the name of indices that are out of range."""
    try:
        return values.gather(dim, indices)
    except (IndexError, RuntimeError):
        in_range(name, indices, values.shape[dim])
        raise


def mappings(**values: object) -> None:
    """Raise a ValueError unless all are mappings of names to tensors."""
    for name, value in values.items():
        if not isinstance(value, Mapping):
            raise ValueError(f"`{name}` should be a dict of tensors. Found {type(value).__name__}.")
        tensors(**{f"{name}[{key!r}]": entry for key, entry in value.items()})


def promoted(input: Tensor, like: Tensor | None = None) -> Tensor:
    """Return integers and flags in the type of a floating-point tensor, or in torch's default; all else unchanged."""
    if not isinstance(input, Tensor) or input.is_floating_point() or input.is_complex():
        return input
    if like is None:
        return input.to(torch.get_default_dtype())
    return input.to(like.dtype) if isinstance(like, Tensor) and like.is_floating_point() else input


def in_range(name: str, indices: Tensor, below: int) -> None:
    """Raise a ValueError if an index is negative or too large; for indices that torch has refused, as it reads them."""
    wrong = indices[(indices < 0) | (indices >= below)]
    if len(wrong):
        raise ValueError(f"`{name}` should be at least 0 and below {below}. Found {int(wrong[0])}.")


def tensors(**values: object) -> None:
    """Raise a ValueError unless all are tensors."""
    for name, value in values.items():
        shape_of(name, value)


def shape_of(name: str, tensor: object) -> torch.Size:
    """Return the shape of a tensor; raise a ValueError if it is none."""
    if not isinstance(tensor, Tensor):
        raise ValueError(f"`{name}` should be a tensor. Found {type(tensor).__name__}.")
    return tensor.shape
