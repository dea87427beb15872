"""The threat model that moves a sample by at most epsilon in Euclidean distance.

N samples, each of shape (...) with D features in all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from toolkit.adversarial.balls._rounding import follow, is_positive
from toolkit.adversarial.balls.box import draw, features, norm_of, sum_of, wide
from toolkit.adversarial.balls.region import RoundRegion
from toolkit.blocks import carries_gradient, no_graph

__all__ = ["L2Ball"]


@dataclass(frozen=True)
class L2Ball(RoundRegion):
    """``{x + d : |d|_2 <= epsilon, lower <= x_i + d_i <= upper}``."""

    order = 2

    def direction(self, gradient: Tensor) -> Tensor:
        """Return ``gradient / |gradient|_2``, also where the squares of the gradient overflow or vanish."""
        gradient, norm = self._with_norm(gradient)
        return (gradient * norm.reciprocal()).to(self.x.dtype)

    def step(self, example: Tensor, gradient: Tensor, stride: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Return ``project(example + stride * direction(gradient))``."""
        gradient, norm = self._with_norm(gradient)
        moved = torch.addcmul(example.to(gradient.dtype), gradient, stride / norm, out=self._working(out))
        return self.project(moved, out=out)

    def project(self, example: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Return the nearest point of the ball and the box together, up to rounding.

        With ``v = example - x`` this point is ``clip(x + s v)``, where s is 1 if the point then lies in the ball, and
        otherwise the factor that puts it on the sphere (the Karush-Kuhn-Tucker conditions). Projecting onto the ball
        alone and clipping afterwards would end inside of the sphere: a weaker attack.
        """
        x, work = self.x.to(self.down.dtype), self._working(out)
        offset = torch.sub(example.to(x.dtype), x, out=work)
        moved = torch.addcmul(x, offset, self._scale(offset), out=work)
        return torch.clamp(moved.to(self.x.dtype), self.lower, self.upper, out=out)

    def sample(self, generator: torch.Generator) -> Tensor:
        """Draw uniformly from the ball, and clip to the box."""
        with no_graph():
            towards = self.direction(draw(torch.randn, self.x, generator))
            share = draw(torch.rand, self.radius.expand(len(self.x), *self.radius.shape[1:]), generator)
            dimensions = max(1, self.x[:1].numel()) if self.free is None else sum_of(self.free).clamp(min=1)
            offset = self.radius * share ** (1 / dimensions) * towards
        return self.project(self.x + offset.to(self.x.dtype))

    def farthest(self, gradient: Tensor) -> Tensor:
        """Return the point of the set at which a linear function with this gradient is largest, up to rounding.

        This point is ``x + clip(t * gradient)`` with the t at which the displacement has length epsilon, or the corner
        of the box if no t reaches that length. Between the values of t at which a coordinate meets the box, the squared
        length is ``|held|^2 + t^2 |free|^2``, so t is found by sorting these values.
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

    def _working(self, out: Tensor | None) -> Tensor | None:
        """Return the memory of a result if it is wide enough to work in."""
        return out if out is None or out.dtype == self.down.dtype else None

    def _with_norm(self, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Return a multiple of each gradient, and its norm; 1 for zeros."""
        gradient = self.masked(gradient.to(wide(gradient)))
        norm = norm_of(gradient)
        with no_graph():
            limits = torch.finfo(norm.dtype)
            is_exact = norm.clamp(limits.tiny**0.25, limits.max**0.25) == norm
        return (gradient, norm) if is_exact.all() else _rescaled(gradient, is_exact)

    def _scale(self, offset: Tensor) -> Tensor:
        """Return the s of `project`: ``s^2 = (epsilon^2 - |held|^2) / |free|^2``, at most 1.

        Held are the coordinates of ``s v`` that lie on the box, free the others: ``|s v_i|^2 > |clip(v)_i|^2`` for the
        held ones. Only the last of the rounds that find them is differentiated.
        """
        radius = self.radius.square().to(offset.dtype)
        with no_graph():
            squared = _share(offset, self.down, self.up, radius)
        if carries_gradient(offset) or carries_gradient(self.down):
            squares, on_box = offset.square(), torch.clamp(offset, self.down, self.up).square()
            with no_graph():
                held = is_positive(squared * squares - on_box)
            tiny = torch.finfo(offset.dtype).tiny
            room = (radius - sum_of(held * on_box)).clamp(min=tiny)
            squared = follow(squared, (room / sum_of((1 - held) * squares).clamp(min=tiny)).clamp(max=1))
        return squared.sqrt()


def _rescaled(gradient: Tensor, is_exact: Tensor) -> tuple[Tensor, Tensor]:
    """Return gradients with a largest component of 1 where the norm is not exact, and their norms; 1 for zeros.

    Among infinite components the others count as 0, and so does NaN.
    """
    gradient = gradient.nan_to_num(0.0)
    with no_graph():  # the direction does not depend on this factor, so neither does its derivative
        largest = gradient.abs().amax(features(gradient), keepdim=True)
        largest = largest.masked_fill(is_exact | (largest == 0), 1)
    scaled = gradient / largest
    norm = norm_of(scaled)
    return scaled, norm.masked_fill(norm == 0, 1)


def _share(offset: Tensor, down: Tensor, up: Tensor, target: Tensor) -> Tensor:
    """Return the q at which ``f(q) = |clip(sqrt(q) offset)|^2`` is `target`, (N, 1, ...); 1 if ``f(1)`` is less.

    f is concave and made of straight pieces. Secants through two points up to the root meet `target` before f does, so
    q rises to the root: through 0 and the first point, then through the last two points.

    Args:
        offset: (N, ...).
        down: Least value of an offset in the box, at most 0, (N, ...).
        up: Greatest value of an offset in the box, at least 0, (N, ...).
        target: Squared radius, (N or 1, 1, ...).
    """
    limits = torch.finfo(offset.dtype)
    share = (target / norm_of(offset).square_().clamp_(min=limits.tiny)).clamp_(max=1)
    if not (share < 1).any():
        return share
    enough = target * (1 - 8 * limits.eps)  # up to the rounding of a sum
    least = target * (4 * limits.eps)  # a rise that can be told from rounding
    before, reached_before = torch.zeros_like(share), torch.zeros_like(share)
    clipped = torch.empty_like(offset)
    while True:
        torch.mul(offset, share.sqrt(), out=clipped)
        reached = norm_of(torch.clamp(clipped, down, up, out=clipped)).square_()
        is_short = (reached < enough) & (share < 1)
        if not is_short.any():
            return share
        rise = torch.maximum(reached - reached_before, least)
        following = torch.addcdiv(share, (share - before) * (target - reached), rise).clamp_(max=1)
        following = torch.where(is_short, following, share)
        if torch.equal(following, share):
            return share
        before, reached_before, share = share, reached, following
