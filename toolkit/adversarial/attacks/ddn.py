"""DDN: the nearest adversarial example by gradient steps on a sphere whose radius adapts.

N samples, each of shape (...), C classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Unpack

import torch
from torch import Tensor

from toolkit._checks import integer, number
from toolkit.adversarial.attacks._minimal import MinimalOptions, check_only_l2, minimal_search
from toolkit.adversarial.balls import L2Ball
from toolkit.adversarial.balls.box import column, norm_of
from toolkit.blocks import no_graph

__all__ = ["ddn"]


def ddn(
    model: Callable[[Tensor], Tensor],
    x: Tensor,
    labels: Tensor | None = None,
    *,
    steps: int = 50,
    shrinkage: float = 0.05,
    **options: Unpack[MinimalOptions],
) -> Tensor:
    """Decouple direction and norm: the gradient gives the direction, success or failure the radius.

    Each step is ``d <- d + alpha_t grad / |grad|_2``, projected onto the sphere of radius ``r``. An adversarial point
    multiplies r by ``1 - shrinkage``, any other point by ``1 + shrinkage``; alpha falls to a hundredth along half a
    cosine. Both r and alpha start at the distance to the boundary of the model linearised at `x` (the paper starts at
    1), so that nothing depends on the scale of inputs or logits. The gradient is that of `margin_loss`: it has the
    direction of the cross entropy's gradient and does not vanish. At the end examples are moved onto the boundary as in
    `deepfool`.

    Deterministic, and rows do not depend on each other. While the block `EXAMPLE` is open, steps are differentiated;
    the choice of the nearest point is constant.

    Args:
        model: Inputs (N, ...) to logits (N, C).
        x: Clean inputs, (N, ...), inside of `bounds`.
        labels: (N,). None: the model's predictions at `x`.
        steps: Number of gradient steps.
        shrinkage: Gamma in the paper, between 0 and 1.
        **options: `epsilon`, `norm`, `bounds`, `mask` or `ball`; `targets`, `logits`, `n_classes`.

    Returns:
        As in `deepfool`.

    Raises:
        TypeError: As in `pgd`.
        ValueError: As in `pgd`, if `norm` is not ``"l2"``, `n_classes` is less than 2, or `shrinkage` is not between 0
            and 1.

    References:
        Rony, Hafemann, Oliveira, Ben Ayed, Sabourin and Granger, "Decoupling direction and norm for efficient
        gradient-based L2 adversarial attacks and defenses", 2019, algorithm 1.

    Example:
        >>> weight = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
        >>> ddn(lambda x: x @ weight.T - torch.tensor([2.0, 0.0]), torch.ones(1, 2), torch.tensor([0]))
        tensor([[0.4000, 0.2000]])
    """
    steps = integer("steps", steps)
    shrinkage = number("shrinkage", shrinkage, least=0, most=1)
    with minimal_search(model, x, labels, **options) as search:
        check_only_l2("ddn", search.norm)
        attack = search.attack
        nearest, clean_logits = search.start()
        assert isinstance(attack.ball, L2Ball)
        example = attack.x
        _, slope, logits, value = search.linearise(example)
        way = search.to_plane(example, slope, search.margin(logits, slope, example) - value)
        first = radius = column(search.length(way), way)
        for step in range(steps):
            point, gradient, logits = attack.gradient(example)
            if step:
                nearest = search.offer(nearest, point, logits)
                with no_graph():
                    change = torch.where(attack.succeeds(logits), 1 - shrinkage, 1 + shrinkage)
                radius = radius * column(change.double(), way)
            alpha = attack.sign * first * (0.01 + 0.99 * (1 + math.cos(math.pi * step / steps)) / 2)
            offset = (point - attack.x).to(way.dtype) + alpha.to(way.dtype) * attack.ball.direction(gradient)
            length = norm_of(offset)
            # The ball's projection only shrinks, so it is given a point outside of the sphere.
            outside = (4 * radius / length.masked_fill(length == 0, 1)).to(way.dtype) * offset
            example = replace(attack.ball, radius=radius).project((attack.x + outside).to(attack.x.dtype))
        nearest = search.offer(nearest, example)
        return search.finish(search.bring_closer(nearest, search.rivals(clean_logits)))
