"""The interface of all balls, and the code that several norms share.

N samples, each of shape (...) with D features in all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from toolkit.adversarial.balls._rounding import shrink
from toolkit.adversarial.balls.box import wide

__all__ = ["Region", "RoundRegion"]


@dataclass(frozen=True)
class Region(ABC):
    """A ball around given inputs, cut by a box.

    Attributes:
        x: Clean inputs, (N, ...).
        lower: Least value of every coordinate in the box (in Linf: in the set), in the shape and dtype of `x`.
        upper: Greatest value of every coordinate in the box (in Linf: in the set).
    """

    x: Tensor
    lower: Tensor
    upper: Tensor

    @abstractmethod
    def direction(self, gradient: Tensor) -> Tensor:
        """Return the steepest ascent direction of unit norm; zero for samples whose gradient is zero."""

    def step(self, example: Tensor, gradient: Tensor, stride: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Return ``project(example + stride * direction(gradient))`` for strides (N or 1, 1, ...) of either sign.

        Args:
            example: Points of the set, (N, ...).
            gradient: What to follow, (N, ...).
            stride: Length of the step.
            out: Memory that the result may take, that of `example` too. None where autograd records.
        """
        return self.project(torch.addcmul(example, self.direction(gradient), stride, out=out), out=out)

    @abstractmethod
    def farthest(self, gradient: Tensor) -> Tensor:
        """Return the point of the set at which a linear function with this gradient is largest. Not differentiable."""

    @abstractmethod
    def project(self, example: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Return the nearest point of the set, up to rounding; it may take the memory of `out`, as in `step`."""

    @abstractmethod
    def sample(self, generator: torch.Generator) -> Tensor:
        """Draw a start from the ball, uniformly, and bring it into the box."""

    @abstractmethod
    def settle(self, example: Tensor) -> Tensor:
        """Return the projected `example`, moved towards the clean input where rounding left the set."""

    def rows(self, index: Tensor) -> Self:
        """Return the region of some samples, by their indices or a Boolean tensor, (N,)."""
        n = len(self.x)
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        kept = {name: value for name, value in values.items() if value is not None}
        return replace(self, **{name: value.expand(n, *value.shape[1:])[index] for name, value in kept.items()})


@dataclass(frozen=True)
class RoundRegion(Region):
    """A ball that is not itself a box: the displacements with ``|d| <= radius`` in L1 or L2.

    Attributes:
        radius: Epsilon, float64, (N or 1, 1, ...).
        down: ``lower - x``, in at least single precision (in L1: at least ``-radius``).
        up: ``upper - x``, in at least single precision (in L1: at most `radius`).
        free: 1 where a coordinate may change, 0 where it may not; None if all may.
    """

    radius: Tensor
    down: Tensor
    up: Tensor
    free: Tensor | None = None

    order: ClassVar[int]

    @classmethod
    def around(cls, x: Tensor, radius: Tensor, lower: Tensor, upper: Tensor, free: Tensor | None) -> Self:
        """Return the ball around `x`, cut by the box."""
        centre = x.to(wide(x))
        down, up = (side.to(centre.dtype) - centre for side in (lower, upper))
        return cls(x, lower, upper, radius, down, up, free)

    def settle(self, example: Tensor) -> Tensor:
        """Shrink examples that rounding put outside of the ball, in float64, then round towards the clean input."""
        return shrink(example, self.x, self.radius, self.order)

    def masked(self, tensor: Tensor) -> Tensor:
        """Return a tensor with zeros at the coordinates that may not change."""
        return tensor if self.free is None else tensor * self.free
