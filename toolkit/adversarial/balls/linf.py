"""The threat model that moves every coordinate by at most epsilon.

N samples, each of shape (...) with D features in all.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from toolkit.adversarial.balls._rounding import add_inward, follow, laid_out_as, to_dtype_inward
from toolkit.adversarial.balls.box import draw
from toolkit.adversarial.balls.region import Region
from toolkit.blocks import no_graph

__all__ = ["LinfBall"]


@dataclass(frozen=True)
class LinfBall(Region):
    """``{x + d : |d_i| <= epsilon, lower <= x_i + d_i <= upper}``, a box itself, with its ends rounded inwards."""

    @classmethod
    def around(cls, x: Tensor, radius: Tensor, lower: Tensor, upper: Tensor, free: Tensor | None) -> LinfBall:
        """Return the ball around `x`, cut by the box. Masked coordinates have radius 0."""
        with no_graph():
            radius = to_dtype_inward(radius, x.dtype)
            if free is not None:
                radius = radius * free
            least, most = add_inward(x, -radius), add_inward(x, radius)
        return cls(x, torch.maximum(follow(least, x), lower), torch.minimum(follow(most, x), upper))

    def direction(self, gradient: Tensor) -> Tensor:
        """Return the signs of the gradient. Their derivative is zero, so no gradient ever flows through them."""
        return gradient.sign()

    def farthest(self, gradient: Tensor) -> Tensor:
        """Return the corner of the set at which a linear function with this gradient is largest."""
        return torch.where(gradient > 0, self.upper, torch.where(gradient < 0, self.lower, self.x))

    def project(self, example: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Return the nearest point of the set, exactly."""
        return torch.clamp(example, self.lower, self.upper, out=out)

    def sample(self, generator: torch.Generator) -> Tensor:
        """Draw uniformly from the set."""
        position = draw(torch.rand, self.lower, generator)
        return self.project((self.lower + position * (self.upper - self.lower)).to(self.lower.dtype))

    def settle(self, example: Tensor) -> Tensor:
        """Return `example`, laid out as the clean inputs: the bounds are rounded inwards already."""
        return laid_out_as(self.x, example)
