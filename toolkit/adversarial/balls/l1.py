"""The threat model that moves a sample by at most epsilon in the sum of absolute changes.

N samples, each of shape (...) with D features in all.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from toolkit.adversarial.balls.box import column, draw, sum_of
from toolkit.adversarial.balls.region import RoundRegion
from toolkit.blocks import no_graph

__all__ = ["L1Ball"]

_FEW = 32  # coordinates to select before all are sorted


@dataclass(frozen=True)
class L1Ball(RoundRegion):
    """``{x + d : |d|_1 <= epsilon, lower <= x_i + d_i <= upper}``."""

    order = 1

    @classmethod
    def around(cls, x: Tensor, radius: Tensor, lower: Tensor, upper: Tensor, free: Tensor | None) -> Self:
        """Return the ball around `x`, cut by the box."""
        ball = super().around(x, radius, lower, upper, free)
        most = radius.to(ball.up.dtype)
        return replace(ball, down=torch.maximum(ball.down, -most), up=torch.minimum(ball.up, most))

    def direction(self, gradient: Tensor) -> Tensor:
        """Return the unit vector of the coordinate with the largest gradient, shared evenly among ties."""
        gradient = self.masked(gradient)
        size = gradient.abs()
        largest = (size == column(size.flatten(1).amax(1), size)) & (size > 0)
        signs = gradient.sign() * largest
        return signs / sum_of(largest.to(signs.dtype)).clamp(min=1)

    def step(self, example: Tensor, gradient: Tensor, stride: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Return the point at a distance of at most `stride` on the way to `farthest`, from a point of the set.

        The step needs no projection, because the set is convex. A steepest step would move one coordinate, which soon
        meets the box. A plain gradient step would move all coordinates a little, and the projection would undo most of
        the move. This step heads for the maximum of the linearised function, and stands still only where no point of
        the set is better to first order.

        References:
            Frank and Wolfe, "An algorithm for quadratic programming", 1956 (steps towards the vertex).
        """
        move = self._greedy(gradient * stride.sign())
        start, end = example.to(move.dtype), self.x.to(move.dtype) + move
        length = sum_of((end - start).abs())
        share = stride.abs().to(move.dtype) / length.masked_fill(length == 0, torch.inf)
        moved = torch.lerp(start, end, share.clamp(max=1)).to(example.dtype)
        return torch.clamp(moved, self.lower, self.upper, out=out)

    def farthest(self, gradient: Tensor) -> Tensor:
        """Return the point of the set at which a linear function with this gradient is largest, up to rounding.

        The coordinates with the largest gradients move as far as the box lets them, until epsilon is used up: the
        greedy solution of the fractional knapsack.
        """
        with no_graph():
            move = self._greedy(gradient)
            moved = (self.x.to(move.dtype) + move).to(self.x.dtype)
            return self.settle(torch.clamp(moved, self.lower, self.upper))

    def project(self, example: Tensor, *, out: Tensor | None = None) -> Tensor:
        r"""Return the nearest point of the ball and the box together, up to rounding.

        With ``v = example - x`` and ``u_i`` the room in the direction of ``v_i`` the displacements of this point are
        :math:`\operatorname{sign}(v_i) \min(\max(|v_i| - \lambda, 0), u_i)`. If these lie in the ball with
        :math:`\lambda = 0`, lambda is 0; otherwise their lengths add up to epsilon (the Karush-Kuhn-Tucker conditions).
        The sum is a decreasing, piecewise linear function of lambda with 2 D breakpoints, so lambda is found by sorting
        the breakpoints.
        """
        offset = example.to(self.down.dtype) - self.x.to(self.down.dtype)
        signs = offset.sign()
        size = offset * signs
        limit = torch.where(offset < 0, -self.down, self.up)
        threshold = self._threshold(size, limit)
        shrunk = torch.minimum((size - threshold).clamp(min=0), limit)
        moved = (self.x.to(shrunk.dtype) + signs * shrunk).to(self.x.dtype)
        return torch.clamp(moved, self.lower, self.upper, out=out)

    def sample(self, generator: torch.Generator) -> Tensor:
        """Draw uniformly from the ball, and clip to the box."""
        with no_graph():
            # Of D + 1 exponential draws, D divided by the sum of all are uniform in the simplex.
            size = self.masked(self._exponential(self.x, generator))
            rest = self._exponential(self.radius.expand(len(self.x), *self.radius.shape[1:]), generator)
            share = size / (sum_of(size) + rest.to(size.dtype))
            signs = draw(torch.rand, self.x, generator).sub_(0.5).sign()
        return self.project((self.x + self.radius * signs * share).to(self.x.dtype))

    @staticmethod
    def _exponential(like: Tensor, generator: torch.Generator) -> Tensor:
        """Draw from the exponential distribution of mean 1."""
        return -torch.log1p(-draw(torch.rand, like, generator))

    def _greedy(self, gradient: Tensor) -> Tensor:
        """Return the displacement in the set that raises a linear function most; its direction is a constant."""
        gradient = self.masked(gradient.to(self.down.dtype))
        budget, signs = self.radius.to(self.down.dtype).flatten(1), gradient.sign()
        limit = torch.maximum(signs * self.up, signs * self.down).flatten(1)
        with no_graph():
            order = _steepest(gradient.abs().flatten(1), limit, budget)
        taken = limit.gather(1, order)
        before = F.pad(taken.cumsum(1), (1, -1))
        length = torch.minimum(taken, (budget - before).clamp(min=0))
        return torch.zeros_like(limit).scatter(1, order, length).view_as(gradient) * signs

    def _threshold(self, size: Tensor, limit: Tensor) -> Tensor:
        """Return the lambda of `project`, (N, 1, ...), 0 for samples in the ball.

        It is differentiated as the solution of ``sum_free (|v_i| - lambda) + sum_held u_i = epsilon``, with free
        coordinates between 0 and their limit, and held coordinates at their limit.
        """
        radius = self.radius.to(size.dtype)
        with no_graph():
            flat, most = size.flatten(1), limit.flatten(1)
            target = radius.flatten(1).expand(len(flat), 1)
            # Above its size a coordinate is 0, below size - limit it is at its limit; between, it falls with slope 1.
            bends = torch.cat([flat, (flat - most).clamp(min=0)], 1)
            turns = torch.cat([torch.ones_like(flat), -torch.ones_like(flat)], 1)
            bends, order = bends.sort(1, descending=True)
            slopes = turns.gather(1, order).cumsum(1)  # of the sum, just below each bend
            gaps = bends[:, :-1] - bends[:, 1:]
            sums = torch.cat([torch.zeros_like(target), (slopes[:, :-1] * gaps).cumsum(1)], 1)  # at each bend
            reached = (sums <= target).sum(1, keepdim=True) - 1  # the last bend at which the sum is not yet too large
            slope = slopes.gather(1, reached).clamp(min=1)
            guess = bends.gather(1, reached) - (target - sums.gather(1, reached)) / slope
            inside = torch.minimum(flat, most).sum(1, keepdim=True) <= target
            guess = column(guess.clamp(min=0).masked_fill(inside, 0), size)
            held = size - guess >= limit
            between = ((size > guess) & ~held).to(size.dtype)
            outside = column((~inside).to(size.dtype), size)
        count = sum_of(between)
        exact = (sum_of(between * size) + sum_of(limit.masked_fill(~held, 0)) - radius) / count.clamp(min=1)
        # With no coordinate between 0 and its limit lambda does not move with the point.
        return torch.where(count > 0, exact.clamp(min=0), guess) * outside


def _steepest(size: Tensor, limit: Tensor, budget: Tensor) -> Tensor:
    """Return the coordinates in falling order of `size`, (N, K), at least until their limits use up the budget.

    Args:
        size: Absolute slopes, (N, D).
        limit: Room of every coordinate, (N, D).
        budget: Sum of the room to use, (N or 1, 1).
    """
    n, count = size.shape[1], _FEW
    while 2 * count <= n:
        order = size.topk(count, 1).indices
        if (limit.gather(1, order).sum(1, keepdim=True) >= budget).all():
            return order
        count *= 2
    return size.argsort(dim=1, descending=True, stable=True)
