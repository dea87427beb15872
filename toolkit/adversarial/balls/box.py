"""Shared parts of all threat models: sizes per sample, the box, the mask, and norms over the features of a sample.

N samples, each of shape (...) with D features in all.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from toolkit._tensors import dense
from toolkit.adversarial._warnings import warn
from toolkit.adversarial.balls._rounding import round_inward
from toolkit.blocks import no_graph

__all__ = [
    "Bounds",
    "box",
    "by_row",
    "check_inputs",
    "column",
    "draw",
    "ends_of",
    "features",
    "free",
    "norm_of",
    "per_sample",
    "remark_on_width",
    "sizes_of",
    "sum_of",
    "wide",
    "width_remarked_on",
]

Bounds = tuple[float | Tensor, float | Tensor] | None


def check_inputs(name: str, x: object) -> None:
    """Raise unless `x` is a batch of floating-point samples.

    Raises:
        TypeError: If `x` is not a tensor, or not floating point.
        ValueError: If `x` does not have shape (N, ...).
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"`{name}` should be a tensor. Found {type(x).__name__}.")
    if not x.is_floating_point():
        scaled = (
            f" Pixels from 0 to 255 become numbers from 0 to 1 by `{name} / 255`." if x.dtype == torch.uint8 else ""
        )
        raise TypeError(f"`{name}` should be floating point. Found {x.dtype}.{scaled}")
    dense(**{name: x})
    if x.dim() < 2:
        raise ValueError(f"`{name}` should have shape (N, ...). Found {tuple(x.shape)}.")


def per_sample(argument: str, value: object, x: Tensor, *, by_feature: bool = False) -> Tensor:
    """Return a size as float64 of shape (N or 1, 1, ...), to be broadcast against `x`.

    Args:
        argument: Its name.
        value: One for all, or one per sample, (N,).
        x: Inputs, (N, ...).
        by_feature: Whether to accept a size for each feature as well, with as many dimensions as `x`.

    Raises:
        TypeError: As in `sizes_of`.
        ValueError: As in `sizes_of`, or if `value` is neither one size for all samples nor one per sample.
    """
    sizes = sizes_of(argument, value, x.device)
    if by_feature and sizes.dim() == x.dim() and all(n in {1, m} for n, m in zip(sizes.shape, x.shape, strict=True)):
        return sizes
    if sizes.dim() > 1 or sizes.numel() not in {1, len(x)}:
        raise ValueError(
            f"`{argument}` should be one number or one per sample, ({len(x)},). Found shape {tuple(sizes.shape)}."
        )
    return column(sizes, x)


def sizes_of(argument: str, value: object, device: torch.device | None = None) -> Tensor:
    """Return one size, or several, as float64.

    Raises:
        TypeError: If `value` is not a number, nor a tensor or array of numbers; also if it is a list of several
            numbers, which might be one per sample, one per feature, or radii to try in turn.
        ValueError: If a value is negative or not finite.
    """
    if type(value) in (int, float) and 0 <= value <= sys.float_info.max:  # type: ignore[operator]
        return torch.tensor(value, dtype=torch.float64, device=device)
    if isinstance(value, list | tuple) and len(value) > 1:
        raise TypeError(
            f"`{argument}` should be a number, or a tensor with one per sample. Found a {type(value).__name__} of "
            f"{len(value)}: give a `torch.tensor` for one per sample. `robustness_curve` takes several `epsilons`."
        )
    with no_graph():
        try:
            if torch.as_tensor(value).dtype == torch.bool:
                raise TypeError
            sizes = torch.as_tensor(value, dtype=torch.float64, device=device)
        except (TypeError, ValueError, RuntimeError):
            found = repr(value) if isinstance(value, str) else type(value).__name__
            raise TypeError(
                f"`{argument}` should be a number, or a tensor with one per sample. Found {found}."
            ) from None
        if sizes.numel() and not (sizes.min() >= 0 and sizes.max() < math.inf):
            found = f"{value:g}" if isinstance(value, int | float) else f"a smallest value of {sizes.min().item():g}"
            raise ValueError(f"`{argument}` should be finite and not negative. Found {found}.")
        return sizes


def box(x: Tensor, bounds: object) -> tuple[Tensor, Tensor]:
    """Return the least and greatest value of every coordinate: the bounds, rounded inwards but no further than `x`.

    Raises:
        TypeError: If `bounds` is not a pair of numbers.
        ValueError: If the bounds are in the wrong order, or `x` exceeds them by more than rounding.
    """
    least, most = ends_of(bounds)
    lower, upper = round_inward(least, x, math.inf), round_inward(most, x, -math.inf)
    if not (lower <= upper).all():
        least_first = f"Found {_in_words(lower)} and {_in_words(upper)}."
        raise ValueError(f"`bounds` should have the least value before the greatest. {least_first}")
    if x.numel() and not _are_within(x, lower, upper):
        sizes = [side.abs().masked_fill(side.isinf(), 0) for side in (lower, upper)]
        rounding = 2 * torch.finfo(x.dtype).eps * torch.maximum(*sizes)
        if not ((lower - x <= rounding) & (x - upper <= rounding)).all():
            if x.isnan().any():
                raise ValueError(f"`x` should be finite. Found NaN in row {int(x.isnan().nonzero()[0, 0])}.")
            raise ValueError(
                f"`x` should lie within `bounds`, {_in_words(lower)} to {_in_words(upper)}. "
                f"Found values from {x.min().item():.9g} to {x.max().item():.9g}."
                + (" Pixels from 0 to 255 become these by `x / 255`." if (upper == 1).all() and x.max() > 2 else "")
            )
    return torch.minimum(lower, x), torch.maximum(upper, x)


def _are_within(x: Tensor, lower: Tensor, upper: Tensor) -> bool:
    """Return whether all values are numbers in the box."""
    if lower.dim() or upper.dim():
        return bool(torch.maximum(lower - x, x - upper).max() <= 0)
    least, most = x.aminmax()
    return bool((lower <= least) & (most <= upper))


def ends_of(bounds: object) -> tuple[Tensor, Tensor]:
    """Return the bounds as float64, infinite without a box.

    Raises:
        TypeError: If `bounds` is not a pair of numbers.
    """
    wanted = "`bounds` should be the least and the greatest value of an input, or None."
    pair = (-math.inf, math.inf) if bounds is None else bounds
    if not isinstance(pair, tuple | list):
        raise TypeError(f"{wanted} Found {type(pair).__name__}.")
    if len(pair) != 2:
        raise TypeError(f"{wanted} Found {len(pair)} of them.")
    try:
        least, most = (torch.as_tensor(side, dtype=torch.float64) for side in pair)
    except (TypeError, ValueError, RuntimeError):
        kinds = " and ".join(type(side).__name__ for side in pair)
        raise TypeError(f"{wanted} Found {kinds}.") from None
    return least, most


def free(x: Tensor, mask: Tensor | None) -> Tensor | None:
    """Return 1 where a coordinate may change and 0 where it may not, in the shape and dtype of `x`; None if all may.

    Raises:
        TypeError: If `mask` is not a Boolean tensor.
        ValueError: If `mask` does not broadcast to `x`.
    """
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        found = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"`mask` should be a Boolean tensor, True where an input may change. Found {found}.")
    try:
        return mask.to(x.device).expand(x.shape).to(x.dtype)
    except RuntimeError:
        raise ValueError(
            f"`mask` should broadcast to the shape of `x`, {tuple(x.shape)}. Found {tuple(mask.shape)}."
        ) from None


def draw(distribution: Callable[..., Tensor], like: Tensor, generator: torch.Generator) -> Tensor:
    """Draw on the generator's device, so that a seed gives the same numbers on every device.

    Raises:
        TypeError: If `generator` is not a `torch.Generator`.
    """
    if not isinstance(generator, torch.Generator):
        raise TypeError(f"`generator` should be a torch.Generator. Found {type(generator).__name__}.")
    drawn = distribution(like.shape, generator=generator, dtype=wide(like), device=generator.device)
    return drawn.to(like.device)


def wide(tensor: Tensor) -> torch.dtype:
    """Return the dtype in which norms are taken: half precision overflows at the square of 256."""
    return torch.promote_types(tensor.dtype, torch.float32)


def features(tensor: Tensor) -> tuple[int, ...]:
    """Return all dimensions but the first, which counts samples."""
    return tuple(range(1, tensor.dim()))


def column(values: Tensor, like: Tensor) -> Tensor:
    """Return one value per sample as (N, 1, ...), to be broadcast against `like`, (N, ...)."""
    return values.reshape(-1, *[1] * (like.dim() - 1))


def by_row(condition: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """Return the samples of `one` where the condition, (N,), holds, and those of `other` elsewhere."""
    return torch.where(column(condition, one), one, other)


def norm_of(tensor: Tensor, order: int = 2) -> Tensor:
    """Return the norm of every sample, (N, 1, ...)."""
    norm: Tensor = torch.linalg.vector_norm(tensor, order, features(tensor), keepdim=True)
    return norm


def sum_of(tensor: Tensor) -> Tensor:
    """Return the sum over the features of every sample, (N, 1, ...)."""
    return tensor.sum(features(tensor), keepdim=True)


# The remarks inside of `width_remarked_on`.
_REMARKED: ContextVar[list[str] | None] = ContextVar("_REMARKED", default=None)
# The diagonal of a box with D sides of length 1 is D to this power.
_DIAGONAL = {"linf": 0.0, "l2": 0.5, "l1": 1.0}


def remark_on_width(epsilon: float | Tensor | None, norm: str, bounds: object, n_features: int | None) -> None:
    """Warn if the whole box is in the ball around any of its points, as with radius 8 in Linf for pixels in [0, 1].

    Args:
        epsilon: Radius; None is the whole box on purpose.
        norm: The norm.
        bounds: Least and greatest value of an input, or None.
        n_features: Number of features of a sample. None: not known yet, which is enough in Linf alone.
    """
    if epsilon is None or bounds is None or (n_features is None and norm != "linf"):
        return
    least, most = ends_of(bounds)
    width, sizes = float(most.max() - least.min()) * (n_features or 0) ** _DIAGONAL[norm], sizes_of("epsilon", epsilon)
    if not (sizes.numel() and sizes.min() >= width > 0):
        return
    remarks = _REMARKED.get()
    if remarks:
        return
    where = "" if norm == "linf" else f" in {norm.upper()}"
    remark = (
        f"`epsilon` should be less than the width of the box{where}, {width:g}. Found {sizes.min().item():g}, "
        "with which everything in the box is allowed. Are the pixels on another scale?"
    )
    if remarks is not None:
        remarks.append(remark)
    warn(remark)


@contextmanager
def width_remarked_on(
    epsilon: float | Tensor | None, norm: str, bounds: object, n_features: int | None = None
) -> Iterator[None]:
    """Warn as `remark_on_width`, once for all balls inside."""
    remarks = _REMARKED.get()
    token = _REMARKED.set([] if remarks is None else remarks)
    try:
        remark_on_width(epsilon, norm, bounds, n_features)
        yield
    finally:
        _REMARKED.reset(token)


def _in_words(bound: Tensor) -> str:
    least, most = bound.min().item(), bound.max().item()
    return f"{least:g}" if least == most else f"({least:g} to {most:g})"
