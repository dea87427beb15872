"""The threat model that moves a sample by at most epsilon in Euclidean distance.

N samples, each of shape (...) with D features in all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from toolkit.adversarial.balls._rounding import is_positive, shrink
from toolkit.adversarial.balls.box import draw, features, norm_of, room, sum_of, wide
from toolkit.blocks import no_graph

__all__ = ["L2Ball"]


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
        free: 1 where a coordinate may change, 0 where it may not; None if all may.
    """

    x: Tensor
    radius: Tensor
    lower: Tensor
    upper: Tensor
    down: Tensor
    up: Tensor
    free: Tensor | None = None

    @classmethod
    def around(cls, x: Tensor, radius: Tensor, lower: Tensor, upper: Tensor, free: Tensor | None) -> L2Ball:
        """Return the ball around `x`, cut by the box."""
        return cls(x, radius, lower, upper, *room(x, lower, upper), free)

    def direction(self, gradient: Tensor) -> Tensor:
        """Return ``gradient / |gradient|_2``, also where the squares of the gradient overflow or vanish."""
        gradient = gradient.to(wide(gradient))
        if self.free is not None:
            gradient = gradient * self.free
        with no_graph():  # the direction does not depend on this factor, so neither does its derivative
            largest = gradient.abs().amax(features(gradient), keepdim=True)
            infinite = not largest.isfinite().all()
        if infinite:  # the steepest coordinates count, and those without a slope do not
            gradient = gradient.nan_to_num(0.0)
        with no_graph():
            if infinite:
                largest = gradient.abs().amax(features(gradient), keepdim=True)
            largest = largest.masked_fill(largest == 0, math.inf)
        scaled = gradient / largest
        unit: Tensor = scaled / norm_of(scaled).clamp(min=0.5)  # the norm is at least 1, or 0
        return unit.to(self.x.dtype)

    def project(self, example: Tensor) -> Tensor:
        """Return the nearest point of the ball and the box together, up to rounding.

        With ``v = example - x`` it is ``clip(x + s v)``, where s is 1 if that lies in the ball, and else puts it on
        the sphere (the conditions of Karush, Kuhn and Tucker). To project on the ball alone and clip afterwards gives
        a point inside of the sphere: a weaker attack.
        """
        x = self.x.to(self.down.dtype)
        offset = example.to(self.down.dtype) - x
        return torch.clamp((x + self._scale(offset) * offset).to(self.x.dtype), self.lower, self.upper)

    def sample(self, generator: torch.Generator) -> Tensor:
        """Draw uniformly from the ball, and clip to the box."""
        with no_graph():
            towards = self.direction(draw(torch.randn, self.x, generator))
            share = draw(torch.rand, self.radius.expand(len(self.x), *self.radius.shape[1:]), generator)
            dimensions = max(1, self.x[:1].numel()) if self.free is None else sum_of(self.free).clamp(min=1)
            offset = self.radius * share ** (1 / dimensions) * towards
        return self.project(self.x + offset.to(self.x.dtype))

    def step(self, example: Tensor, gradient: Tensor, stride: Tensor) -> Tensor:
        """Return ``project(example + stride * gradient / |gradient|_2)``."""
        return self.project(torch.addcmul(example, self.direction(gradient), stride))

    def farthest(self, gradient: Tensor) -> Tensor:
        """Return the point of the set at which a linear function with this gradient is largest, up to rounding.

        It is ``x + clip(t * gradient)`` with the t at which the displacement has length epsilon, or the corner of the
        box if no t reaches that length. Between the values of t at which a coordinate meets the box, the squared length
        is ``|held|^2 + t^2 |free|^2``, so t is found by sorting these values.
        """
        with no_graph():
            towards = self.direction(gradient).double()
            slope = towards.abs().flatten(1)
            limit = torch.where(towards > 0, self.up, -self.down).double().flatten(1)
            meets = (limit / slope).masked_fill(slope == 0, math.inf)
            meets, order = meets.sort(1)
            squares = slope.gather(1, order).square()
            free = squares.flip(1).cumsum(1).flip(1)
            held = F.pad(limit.gather(1, order).square().cumsum(1), (1, -1))
            target = self.radius.square().expand(len(slope), *self.radius.shape[1:]).flatten(1)
            # The number of coordinates that meet the box before the length is epsilon; without slope none ever does.
            n_held = ((held + meets.square() * free < target) & (meets < math.inf)).sum(1, keepdim=True)
            last = n_held.clamp(max=max(0, slope.shape[1] - 1))
            factor = ((target - held.gather(1, last)).clamp(min=0) / free.gather(1, last)).sqrt()
            factor = factor.masked_fill((n_held > last) | (free.gather(1, last) == 0), math.inf)
            length = torch.minimum((factor * slope).masked_fill(slope == 0, 0), limit)
            moved = self.x.double() + length.view_as(towards) * towards.sign()
            return self.settle(torch.clamp(moved.to(self.x.dtype), self.lower, self.upper))

    def settle(self, example: Tensor) -> Tensor:
        """Shrink examples that are out of the ball by a rounding, in float64, then round towards the clean input."""
        return shrink(example, self.x, self.radius, 2)

    def rows(self, index: Tensor) -> L2Ball:
        """Return the ball of some samples."""
        radius = self.radius.expand(len(self.x), *self.radius.shape[1:])[index]
        kept = (self.lower[index], self.upper[index], self.down[index], self.up[index])
        return L2Ball(self.x[index], radius, *kept, None if self.free is None else self.free[index])

    def _scale(self, offset: Tensor) -> Tensor:
        """Return the s of `project`: ``s^2 = (epsilon^2 - |held|^2) / |free|^2``, at most 1.

        Held are the coordinates of ``s v`` that lie on the box, free the others. Starting with none held, each round
        scales the free ones to reach the sphere and holds those that leave the box. The scale only grows, so held
        coordinates stay held, and a few rounds are enough (at most D, as in Michelot 1986). A coordinate is held once s
        is beyond the share of it that fits the box, so only the last round is differentiated.
        """
        tiny = torch.finfo(offset.dtype).tiny
        squares, on_box = offset.square(), torch.clamp(offset, self.down, self.up).square()
        radius = self.radius.square().to(offset.dtype)
        with no_graph():
            fits = on_box / squares  # s^2 at which the coordinate meets the box
            held = torch.zeros_like(offset)
        while True:
            room = (radius - sum_of(held * on_box)).clamp(min=tiny)
            squared = (room / sum_of((1 - held) * squares).clamp(min=tiny)).clamp(max=1)
            with no_graph():
                leaving = torch.maximum(held, is_positive(squared - fits))
            if torch.equal(leaving, held):
                return squared.sqrt()
            held = leaving
