"""SPSA: ascent by Adam, with gradients estimated from differences of the loss along random directions.

N samples, each of shape (...), S directions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Unpack

import torch
from torch import Tensor

from toolkit._checks import integer, number
from toolkit._random import own_generator
from toolkit._tensors import exact_products
from toolkit.adversarial.attacks._setting import AttackOptions, Setting, setting
from toolkit.adversarial.balls.box import wide

__all__ = ["spsa"]

_AT_ONCE = 1024  # rows that the model is run on at once, unless there are more samples


def spsa(
    model: Callable[[Tensor], Tensor],
    x: Tensor,
    labels: Tensor | None = None,
    *,
    steps: int = 20,
    directions: int = 128,
    delta: float = 0.01,
    learning_rate: float = 0.01,
    generator: torch.Generator | None,
    **options: Unpack[AttackOptions],
) -> Tensor:
    """Ascend the margin by gradients that are estimated from the logits alone.

    ``grad ~ mean_s (f(x + delta v_s) - f(x - delta v_s)) / (2 delta) v_s`` with random signs v_s, the same for all
    samples, and f the margin by which the model errs. The steps are Adam's, projected onto ball and box. The attack
    leaves a sample as soon as it is adversarial.

    Args:
        model: Inputs (N, ...) to logits (N, C). It need not be differentiable.
        x: Clean inputs, (N, ...), inside of `bounds`.
        labels: (N,). None: the model's predictions at `x`.
        steps: Number of steps.
        directions: S. A step costs 2 S evaluations of each sample.
        delta: Length of the differences, in the units of `x`.
        learning_rate: Adam's rate: about the change of a coordinate per step, in the units of `x`.
        generator: Draws the signs. None: torch's global generator.
        **options: `epsilon`, `norm`, `bounds`, `mask` or `ball`; `targets`, `logits`.

    Returns:
        Adversarial examples with the shape, dtype and device of `x`; the values of `x` where the model errs already.

    Raises:
        TypeError: As in `pgd`.
        ValueError: As in `pgd`, or if `directions`, `delta` or `learning_rate` is not positive.

    References:
        Spall, "Multivariate stochastic approximation using a simultaneous perturbation gradient approximation", 1992;
        Uesato, O'Donoghue, van den Oord and Kohli, "Adversarial risk and the dangers of evaluating against weak
        attacks", 2018, algorithm 1.

    Example:
        >>> decide = lambda x: torch.stack([x.sum(1), torch.full((len(x),), 1.7)], 1)
        >>> draws = torch.Generator().manual_seed(0)
        >>> example = spsa(decide, torch.full((1, 2), 0.9), torch.tensor([0]), epsilon=0.2, generator=draws)
        >>> decide(example).argmax(1)
        tensor([1])
    """
    steps, directions = integer("steps", steps), integer("directions", directions)
    delta, learning_rate = number("delta", delta, above=0), number("learning_rate", learning_rate, above=0)
    draws = own_generator(generator)
    with setting(model, x, labels, **options) as attack:
        example = attack.x.clone()
        mean, square = (torch.zeros_like(example, dtype=wide(example)) for _ in range(2))
        for step in range(1, steps + 1):
            rows = (~attack.succeeds(attack.logits(example))).nonzero()[:, 0]
            signs = _signs(directions, example, draws)  # also where nothing is left: the draws are the same for all
            if not len(rows):
                break
            part = attack.rows(rows)
            gradient = _estimate(part, example[rows], signs, delta)
            mean[rows] = 0.9 * mean[rows] + 0.1 * gradient
            square[rows] = 0.999 * square[rows] + 0.001 * gradient.square()
            first, second = 1 - 0.9**step, 1 - 0.999**step
            change = learning_rate * (mean[rows] / first) / ((square[rows] / second).sqrt() + 1e-8)
            example[rows] = part.ball.project(example[rows] + change.to(example.dtype))
        return attack.ball.settle(example)


def _signs(directions: int, like: Tensor, generator: torch.Generator) -> Tensor:
    """Draw signs, (S, ...)."""
    drawn = torch.rand(directions, *like.shape[1:], generator=generator, device=generator.device)
    return (drawn < 0.5).to(like.device, like.dtype) * 2 - 1


def _estimate(part: Setting, example: Tensor, signs: Tensor, delta: float) -> Tensor:
    """Return the estimated gradient of the margin by which the attack succeeds, (N, ...)."""
    total = torch.zeros_like(example, dtype=wide(example))
    for some in signs.split(max(1, _AT_ONCE // (2 * len(example)))):
        both = some.repeat(2, *[1] * (some.dim() - 1))
        both[len(some) :].neg_()
        points = example + delta * both[:, None]
        index = torch.arange(len(example), device=example.device).repeat(len(points))
        values = part.rows(index).strength(part.logits(points.flatten(0, 1))).view(len(points), -1)
        difference = (values[: len(some)] - values[len(some) :]).to(total.dtype)
        with exact_products(example.device):
            total += torch.einsum("sn,s...->n...", difference, some.to(total.dtype))
    return (total / (2 * delta * len(signs))).nan_to_num(0.0)  # of logits that are NaN nothing is known
