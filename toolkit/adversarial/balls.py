"""Threat models: the inputs within epsilon of a clean one in some norm, and inside a box.

Every set here keeps its promise in exact arithmetic: no coordinate, and no norm, is beyond its bound by a rounding.

N samples, each of shape (...) with D features in all.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from toolkit.blocks import carries_gradient, no_graph

__all__ = ["Ball", "Bounds", "L2Ball", "LinfBall", "Norm", "box", "make_ball", "per_sample"]

Norm = Literal["linf", "l2"]
Bounds = tuple[float | Tensor, float | Tensor] | None


class Ball(Protocol):
    """What an attack asks of a threat model. Every tensor has the shape and dtype of the clean inputs, (N, ...)."""

    def direction(self, gradient: Tensor) -> Tensor:
        """Return the steepest ascent direction of unit norm; zero for samples whose gradient is zero."""

    def project(self, example: Tensor) -> Tensor:
        """Return the nearest point of the set, up to rounding."""

    def sample(self, generator: torch.Generator) -> Tensor:
        """Draw a start from the ball, uniformly, and bring it into the box."""

    def settle(self, example: Tensor) -> Tensor:
        """Return the projected `example`, moved towards the clean input by the roundings that took it out."""


def make_ball(norm: Norm, x: Tensor, epsilon: float | Tensor, bounds: Bounds) -> Ball:
    """Return the inputs within `epsilon` of `x` and inside `bounds`.

    Args:
        norm: ``"linf"`` or ``"l2"``.
        x: Clean inputs, (N, ...), floating point.
        epsilon: Radius; one for all, or (N,).
        bounds: Least and greatest value, each a number or broadcast to `x`; None for no box. A clean value that is
            out of them by a rounding stays allowed.

    Raises:
        TypeError: If `x` is not floating point.
        ValueError: If `norm` is unknown, `x` is not a batch of samples or lies outside of `bounds`, or `epsilon` is
            negative, infinite or of another shape.
    """
    if not x.is_floating_point():
        raise TypeError(f"`x` should be floating point. Found {x.dtype}.")
    if x.dim() < 2:
        raise ValueError(f"`x` should have shape (N, ...). Found {tuple(x.shape)}.")
    if norm not in _BALLS:
        raise ValueError(f"`norm` should be one of {', '.join(map(repr, _BALLS))}. Found {norm!r}.")
    radius = per_sample("epsilon", epsilon, x)
    with no_graph():
        lower, upper = box(x, bounds)
    return _BALLS[norm].around(x, radius, lower, upper)


def per_sample(argument: str, value: float | Tensor, x: Tensor) -> Tensor:
    """Return a size as float64 of shape (N or 1, 1, ...), to be broadcast against `x`.

    Raises:
        ValueError: If a value is negative or not finite, or there is neither one for all nor one per sample.
    """
    with no_graph():
        sizes = torch.as_tensor(value, dtype=torch.float64, device=x.device)
        if sizes.dim() > 1 or sizes.numel() not in {1, len(x)}:
            raise ValueError(
                f"`{argument}` should be one number or one per sample, ({len(x)},). Found shape {tuple(sizes.shape)}."
            )
        if not ((sizes >= 0) & sizes.isfinite()).all():
            found = f"{value:g}" if isinstance(value, int | float) else f"a smallest value of {sizes.min().item():g}"
            raise ValueError(f"`{argument}` should be finite and not negative. Found {found}.")
        return sizes.reshape(-1, *[1] * (x.dim() - 1))


def box(x: Tensor, bounds: Bounds) -> tuple[Tensor, Tensor]:
    """Return the least and greatest value of every coordinate: the bounds, rounded inwards, but never beyond `x`.

    Raises:
        ValueError: If `x` is out of the bounds by more than a rounding.
    """
    least, most = bounds or (-math.inf, math.inf)
    lower, upper = _bound(least, x, math.inf), _bound(most, x, -math.inf)
    if x.numel():
        rounding = 8 * torch.finfo(x.dtype).eps * max(1.0, x.abs().max().item())
        if not max((lower - x).max().item(), (x - upper).max().item()) <= rounding:
            raise ValueError(
                f"`x` should lie within `bounds`, {_in_words(lower)} to {_in_words(upper)}. "
                f"Found values from {x.min().item():.9g} to {x.max().item():.9g}."
            )
    return torch.minimum(lower, x), torch.maximum(upper, x)


@dataclass(frozen=True)
class LinfBall:
    """``{x + d : |d_i| <= epsilon, lower <= x_i + d_i <= upper}``.

    Attributes:
        lower: Least value of every coordinate, rounded inwards once.
        upper: Greatest value of every coordinate, rounded inwards once.
    """

    lower: Tensor
    upper: Tensor

    @classmethod
    def around(cls, x: Tensor, radius: Tensor, lower: Tensor, upper: Tensor) -> LinfBall:
        """Return the ball around `x`, cut by the box."""
        with no_graph():
            radius = to_dtype_inward(radius, x.dtype)
            least, most = add_inward(x, -radius), add_inward(x, radius)
        return cls(torch.maximum(follow(least, x), lower), torch.minimum(follow(most, x), upper))

    def direction(self, gradient: Tensor) -> Tensor:
        """Return the signs. Their derivative is zero, so nothing is ever differentiated through such a step."""
        return gradient.sign()

    def project(self, example: Tensor) -> Tensor:
        """Return the nearest point of the set, exactly."""
        return torch.clamp(example, self.lower, self.upper)

    def sample(self, generator: torch.Generator) -> Tensor:
        """Draw uniformly from the set."""
        position = _draw(torch.rand, self.lower, generator)
        return self.project((self.lower + position * (self.upper - self.lower)).to(self.lower.dtype))

    def settle(self, example: Tensor) -> Tensor:
        """Return `example`: the bounds are rounded inwards already."""
        return example


@dataclass(frozen=True)
class L2Ball:
    """``{x + d : |d|_2 <= epsilon, lower <= x_i + d_i <= upper}``.

    Attributes:
        x: Clean inputs.
        radius: Epsilon, float64, (N or 1, 1, ...).
        lower: Least value in the box.
        upper: Greatest value in the box.
        down: ``lower - x``, in at least single precision.
        up: ``upper - x``, in at least single precision.
    """

    x: Tensor
    radius: Tensor
    lower: Tensor
    upper: Tensor
    down: Tensor
    up: Tensor

    @classmethod
    def around(cls, x: Tensor, radius: Tensor, lower: Tensor, upper: Tensor) -> L2Ball:
        """Return the ball around `x`, cut by the box."""
        wide = x.to(_wide(x))
        return cls(x, radius, lower, upper, lower.to(wide.dtype) - wide, upper.to(wide.dtype) - wide)

    def direction(self, gradient: Tensor) -> Tensor:
        """Return ``gradient / |gradient|_2``, also where the squares of the gradient overflow or vanish."""
        gradient = gradient.to(_wide(gradient))
        with no_graph():  # the direction does not depend on this factor, so neither does its derivative
            largest = gradient.abs().amax(_features(gradient), keepdim=True)
            largest = largest.masked_fill(largest == 0, math.inf)
        scaled = gradient / largest
        unit: Tensor = scaled / _norm(scaled).clamp(min=0.5)  # the norm is at least 1, or 0
        return unit.to(self.x.dtype)

    def project(self, example: Tensor) -> Tensor:
        """Return the nearest point of the ball and the box together, up to rounding.

        With ``v = example - x`` it is ``clip(x + s v)``, where s is 1 if that lies in the ball, and else puts it on
        the sphere (the conditions of Karush, Kuhn and Tucker). To project on the ball alone and clip afterwards gives
        a point inside of the sphere: a weaker attack.
        """
        wide = self.down.dtype
        x = self.x.to(wide)
        offset = example.to(wide) - x
        return torch.clamp((x + self._scale(offset) * offset).to(self.x.dtype), self.lower, self.upper)

    def sample(self, generator: torch.Generator) -> Tensor:
        """Draw uniformly from the ball; what falls out of the box is brought to its face."""
        with no_graph():
            towards = self.direction(_draw(torch.randn, self.x, generator))
            share = _draw(torch.rand, self.radius.expand(len(self.x), *self.radius.shape[1:]), generator)
            features = max(1, self.x[:1].numel())
            offset = self.radius * share ** (1 / features) * towards
        return self.project(self.x + offset.to(self.x.dtype))

    def settle(self, example: Tensor) -> Tensor:
        """Shrink what is out of the ball by a rounding, in float64, then round towards the clean input."""
        with no_graph():
            offset = example.double() - self.x.double()
            slack = (self.x[:1].numel() + 8) * torch.finfo(torch.float64).eps  # rounding of the norm itself
            norm, limit = _norm(offset), self.radius * (1 - slack)
            offset = torch.where(norm > limit, offset * (limit / norm), offset)
            inside = add_inward(self.x, to_dtype_inward(offset, self.x.dtype))
        return follow(inside, example)

    def _scale(self, offset: Tensor) -> Tensor:
        """Return the s of `project`: ``s^2 = (epsilon^2 - |held|^2) / |free|^2``, at most 1.

        Held are the coordinates of ``s v`` that lie on the box, free the others. Starting with none held, each round
        puts the free ones on the sphere and holds those that leave the box. The scale only grows, so what is held
        stays held, and a few rounds are enough (at most D, as in Michelot 1986). A coordinate is held once s is
        beyond the share of it that fits the box, so no rounds are differentiated but the last.
        """
        tiny = torch.finfo(offset.dtype).tiny
        squares, on_box = offset.square(), torch.clamp(offset, self.down, self.up).square()
        radius = self.radius.square().to(offset.dtype)
        with no_graph():
            fits = on_box / squares  # s^2 at which the coordinate meets the box
            held = torch.zeros_like(offset)
        while True:
            room = (radius - _sum(held * on_box)).clamp(min=tiny)
            squared = (room / _sum((1 - held) * squares).clamp(min=tiny)).clamp(max=1)
            with no_graph():
                leaving = torch.maximum(held, _is_positive(squared - fits))
            if torch.equal(leaving, held):
                return squared.sqrt()
            held = leaving


_BALLS: dict[str, type[LinfBall] | type[L2Ball]] = {"linf": LinfBall, "l2": L2Ball}


def add_inward(x: Tensor, displacement: Tensor) -> Tensor:
    """Return ``x + displacement``, rounded towards x: exactly no farther from x than asked.

    Args:
        x: Any floating-point type.
        displacement: Of the same type, broadcast to `x`.
    """
    total = x + displacement
    # Knuth's two-sum (The Art of Computer Programming 2, section 4.2.2, theorem B): total + error is the exact sum.
    virtual = total - x
    error = (x - (total - virtual)) + (displacement - virtual)
    return _step_towards(x, total, too_far=_is_positive(error * -displacement.sign()))


def to_dtype_inward(displacement: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `displacement` in a dtype, rounded towards zero."""
    rounded = displacement.to(dtype)
    too_far = _is_positive(rounded.to(displacement.dtype).abs() - displacement.abs()).to(dtype)
    return _step_towards(torch.zeros_like(rounded), rounded, too_far=too_far)


def follow(value: Tensor, source: Tensor) -> Tensor:
    """Return `value`, to the bit, with the derivative of `source`: for a change that is only a rounding."""
    if not carries_gradient(source):
        return value
    with no_graph():
        constant = source.clone()
    return value + (source - constant)


def _bound(value: float | Tensor, x: Tensor, inwards: float) -> Tensor:
    """Return one side of the box in x's dtype, rounded inwards."""
    exact = torch.as_tensor(value, dtype=torch.float64, device=x.device)
    rounded = exact.to(x.dtype)
    outside = rounded.double() < exact if inwards > 0 else rounded.double() > exact
    return torch.where(outside, torch.nextafter(rounded, torch.full_like(rounded, inwards)), rounded)


def _step_towards(target: Tensor, value: Tensor, *, too_far: Tensor) -> Tensor:
    """Return the next number towards `target` where `too_far` is 1, and `value` where it is 0."""
    return torch.nextafter(value, torch.lerp(value, target, too_far))


def _is_positive(input: Tensor) -> Tensor:
    """Return 1 or 0 in the input's dtype: on a CPU several times faster than a comparison and `torch.where`."""
    return input.sign().clamp(min=0)


def _in_words(bound: Tensor) -> str:
    least, most = bound.min().item(), bound.max().item()
    return f"{least:g}" if least == most else f"({least:g} to {most:g})"


def _draw(distribution: Callable[..., Tensor], like: Tensor, generator: torch.Generator) -> Tensor:
    """Draw on the generator's device, so that a seed means the same on every device."""
    drawn = distribution(like.shape, generator=generator, dtype=_wide(like), device=generator.device)
    return drawn.to(like.device)


def _wide(tensor: Tensor) -> torch.dtype:
    """Return the dtype in which norms are taken: half precision overflows at the square of 256."""
    return torch.promote_types(tensor.dtype, torch.float32)


def _features(tensor: Tensor) -> tuple[int, ...]:
    return tuple(range(1, tensor.dim()))


def _norm(tensor: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(tensor, 2, _features(tensor), keepdim=True)
    return norm


def _sum(tensor: Tensor) -> Tensor:
    return tensor.sum(_features(tensor), keepdim=True)
