"""A search without gradients among the points of the ball that are farthest along random directions.

N samples, each of shape (...) with D features in all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Unpack

import torch
from torch import Tensor

from toolkit._random import own_generator
from toolkit.adversarial.attacks._setting import CommonOptions, setting
from toolkit.adversarial.balls.box import by_row, draw, norm_of

__all__ = ["random_directions"]

_FRESH = 5  # draws from one direction that is entirely new to the next
_WIDTH = 0.6  # length of the change of the best direction, in units of its own


def random_directions(
    model: Callable[[Tensor], Tensor],
    x: Tensor,
    labels: Tensor | None = None,
    *,
    draws: int,
    generator: torch.Generator | None,
    **options: Unpack[CommonOptions],
) -> Tensor:
    """Return the best of the points of ball and box that are farthest along `draws` random directions.

    Where a piecewise linear model is flat, no gradient leads anywhere, but its other pieces often reach the surface of
    the ball. Every fifth direction is new, and the others are changes of the best one so far. Each costs an evaluation
    of the model. The other arguments are those of `square`.
    """
    generator = own_generator(generator)
    with setting(model, x, labels, **options) as attack:
        example, best = attack.x.clone(), attack.strength(attack.logits(attack.x))
        towards = torch.zeros_like(draw(torch.randn, attack.x, generator))
        for number in range(draws):
            noise = draw(torch.randn, attack.x, generator)
            direction = noise if number % _FRESH == 0 else towards + _WIDTH * noise
            tried = attack.ball.farthest(direction.to(attack.x.dtype))
            value = attack.strength(attack.logits(tried))
            better = value > best
            best = torch.maximum(value, best)
            example = by_row(better, tried, example)
            unit = direction * noise[:1].numel() ** 0.5 / norm_of(direction)
            towards = by_row(better, unit, towards)
        return attack.ball.settle(example)
