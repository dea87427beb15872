"""Threat models: the inputs within epsilon of a clean one in some norm, and inside a box.

Every set here keeps its promise in exact arithmetic: no coordinate, and no norm, is beyond its bound by a rounding.

N samples, each of shape (...) with D features in all.
"""

from __future__ import annotations

from typing import Literal, Protocol

import torch
from torch import Tensor

from toolkit._checks import choice
from toolkit.adversarial.balls.box import Bounds, box, free, per_sample
from toolkit.adversarial.balls.l1 import L1Ball
from toolkit.adversarial.balls.l2 import L2Ball
from toolkit.adversarial.balls.linf import LinfBall
from toolkit.blocks import no_graph

__all__ = ["Ball", "Bounds", "L1Ball", "L2Ball", "LinfBall", "Norm", "box", "make_ball", "per_sample"]

Norm = Literal["linf", "l2", "l1"]


class Ball(Protocol):
    """The threat model of an attack. Every tensor has the shape and dtype of the clean inputs, (N, ...)."""

    @property
    def x(self) -> Tensor:
        """Clean inputs."""

    @property
    def lower(self) -> Tensor:
        """Least value of every coordinate in the box (in Linf: in the set)."""

    @property
    def upper(self) -> Tensor:
        """Greatest value of every coordinate in the box (in Linf: in the set)."""

    def direction(self, gradient: Tensor) -> Tensor:
        """Return the steepest ascent direction of unit norm; zero for samples whose gradient is zero."""

    def step(self, example: Tensor, gradient: Tensor, stride: Tensor) -> Tensor:
        """Return the projection of a step of length `stride`, (N or 1, 1, ...), up the gradient; down if negative."""

    def farthest(self, gradient: Tensor) -> Tensor:
        """Return the point of the set at which a linear function with this gradient is largest. Not differentiable."""

    def project(self, example: Tensor) -> Tensor:
        """Return the nearest point of the set, up to rounding."""

    def sample(self, generator: torch.Generator) -> Tensor:
        """Draw a start from the ball, uniformly, and bring it into the box."""

    def settle(self, example: Tensor) -> Tensor:
        """Return the projected `example`, moved towards the clean input by the roundings that left the set."""

    def rows(self, index: Tensor) -> Ball:
        """Return the ball of some samples, by their indices or a Boolean tensor, (N,)."""


def make_ball(
    norm: Norm, x: Tensor, epsilon: float | Tensor | None, bounds: Bounds, mask: Tensor | None = None
) -> Ball:
    """Return the inputs within `epsilon` of `x` and inside `bounds`.

    Args:
        norm: ``"linf"``, ``"l2"`` or ``"l1"``.
        x: Clean inputs, (N, ...), floating point.
        epsilon: Radius; one for all, or (N,). None: the whole box.
        bounds: Least and greatest value, each a number or broadcast to `x`; None for no box. A clean value that is
            out of them by a rounding stays allowed.
        mask: True where an input may change, broadcast to `x`; None: everywhere.

    Raises:
        TypeError: If `x` is not floating point, or `mask` not Boolean.
        ValueError: If `norm` is unknown, `x` is not a batch of samples or lies outside of `bounds`, `epsilon` is
            negative, infinite or of another shape, or `mask` does not broadcast to `x`.
    """
    if not x.is_floating_point():
        raise TypeError(f"`x` should be floating point. Found {x.dtype}.")
    if x.dim() < 2:
        raise ValueError(f"`x` should have shape (N, ...). Found {tuple(x.shape)}.")
    choice("norm", norm, _BALLS)
    # A finite radius beyond any difference of two inputs: infinity minus infinity would be NaN.
    radius = per_sample("epsilon", torch.finfo(x.dtype).max / 4 if epsilon is None else epsilon, x)
    with no_graph():
        lower, upper = box(x, bounds)
        change = free(x, mask)
        if change is not None:
            lower, upper = torch.where(change > 0, lower, x), torch.where(change > 0, upper, x)
    return _BALLS[norm].around(x, radius, lower, upper, change)


_BALLS: dict[str, type[LinfBall] | type[L2Ball] | type[L1Ball]] = {"linf": LinfBall, "l2": L2Ball, "l1": L1Ball}
