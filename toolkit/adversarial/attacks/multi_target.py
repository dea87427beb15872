"""Attacks on every margin of a sample at once: one linearised step for each other class, and ascents from there.

The worst case of a classifier is the worst of its margins ``z_t - z_y``, one for each other class t. An attack on the
cross entropy follows a mixture of the margins and ends where the mixture is largest; here each margin is followed on
its own.

N samples, each of shape (...), C classes, T classes that are tried per sample. A pair is a sample and a class to try.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Unpack

import torch
from torch import Tensor

from toolkit._checks import integer
from toolkit._random import own_generator
from toolkit.adversarial.attacks._setting import CommonOptions, Setting, setting, untargeted
from toolkit.adversarial.attacks.losses import difference_loss, without_label
from toolkit.adversarial.balls._rounding import follow
from toolkit.adversarial.balls.box import by_row, draw
from toolkit.blocks import no_graph

__all__ = ["linearised", "multi_target"]

_AT_ONCE = 1024  # pairs that are run at once unless more samples are given: enough to hide the cost of a call


def multi_target(
    model: Callable[[Tensor], Tensor],
    x: Tensor,
    labels: Tensor | None = None,
    *,
    steps: int = 40,
    n_targets: int = 9,
    restarts: int = 1,
    at_once: int | None = None,
    gradient_dtype: torch.dtype | None = None,
    generator: torch.Generator | None = None,
    **options: Unpack[CommonOptions],
) -> Tensor:
    """Ascend the margin ``z_t - z_y`` of each of the most likely other classes t, until the model errs.

    The first ascent begins where the linearised margin is largest in ball and box, so it ends at once if the model is
    linear (see `linearised`). Each of its `steps` goes up the gradient of the margin, as in `pgd`, with a length that
    falls linearly from ``2 epsilon``, the width of the ball, to 0: the first steps go from corner to corner, the last
    steps are fine. A margin is linear in the logits, so multiplying the logits by a number changes nothing, and its
    gradient does not vanish where the softmax rounds to 1.

    Further ascents begin at `x` and at a point of the ball in turn. Each of their steps moves a random half of the
    coordinates, because coordinates that all move at once undo each other's gains. On small ReLU networks, whose errors
    are known from mixed-integer programs, such ascents find the rarest errors several times as often as plain ascents
    from random points.

    The attack leaves a sample as soon as one of its classes beats the label, and a class as soon as its ascent stands
    still.

    Args:
        model: Inputs (N, ...) to logits (N, C). It is run in evaluation mode, module by module.
        x: Clean inputs, (N, ...), inside of `bounds`.
        labels: (N,). None: the model's predictions at `x`. There are no `targets`: the attack chooses its own.
        steps: Number of gradient steps in each ascent.
        n_targets: T, at most C - 1 in effect; the classes with the largest logits at `x` are tried.
        restarts: Number of ascents for each class. All but the first are random.
        at_once: Number of pairs that the model is run on at once, which bounds the memory. All T pairs of a sample
            stay together, so it is never less than T. None: the larger of N and 1024.
        gradient_dtype: As in `pgd`.
        generator: Draws starts, and the coordinates that move, of the ascents after the first. None: torch's global
            generator.
        **options: `epsilon`, `norm`, `bounds`, `mask` or `ball`; `logits`.

    Returns:
        Adversarial examples with the shape, dtype and device of `x`, the values of `x` where the model errs there
        already. Where the model never errs they have the largest ``max_t z_t - z_y`` that was met. They are constants
        while the block `EXAMPLE` is in place. While it is open they are differentiated through the steps that led to
        them, the linearised one included; the choice among them is a constant.

    Raises:
        TypeError: As in `pgd`, or if there are `targets`.
        ValueError: As in `pgd`, or if `n_targets` or `at_once` is not positive.

    References:
        Gowal, Uesato, Qin, Huang, Mann and Kohli, "An alternative surrogate loss for PGD-based adversarial testing",
        2019 (one ascent per class on its margin).

    Example:
        >>> weight = torch.tensor([[3.0, 4.0], [0.0, 0.0], [4.0, -4.0]])
        >>> x = torch.full((1, 2), 0.5)
        >>> multi_target(lambda x: x @ weight.T, x, torch.tensor([0]), epsilon=0.25)
        tensor([[0.7500, 0.2500]])
    """
    steps = integer("steps", steps, 0)
    restarts = integer("restarts", restarts)
    draws = own_generator(generator) if restarts > 1 else None
    with setting(model, x, labels, gradient_dtype=gradient_dtype, **untargeted(options)) as attack:
        return _search(attack, steps=steps, n_targets=n_targets, restarts=restarts, at_once=at_once, generator=draws)


def linearised(
    model: Callable[[Tensor], Tensor],
    x: Tensor,
    labels: Tensor | None = None,
    *,
    n_targets: int = 9,
    at_once: int | None = None,
    gradient_dtype: torch.dtype | None = None,
    **options: Unpack[CommonOptions],
) -> Tensor:
    """Move every input once, to where one of its linearised margins ``z_t - z_y`` is largest in ball and box.

    For each of the T classes with the largest logits, compute the gradient of its margin and the point of the set that
    is farthest along this gradient: a corner in Linf, a clipped multiple of the gradient in L2, the steepest
    coordinates in L1. Of these T points return the point at which the model is most wrong. If the model is linear and T
    is C - 1 no attack is stronger: its margins are those of `certify_linear`. The arguments are those of
    `multi_target`.

    Returns:
        As in `multi_target`.

    Raises:
        TypeError: As in `pgd`.
        ValueError: As in `multi_target`.

    Example:
        >>> weight = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
        >>> linearised(lambda x: x @ weight.T, torch.ones(1, 2), torch.tensor([0]), epsilon=0.5, norm="l2")
        tensor([[0.7000, 0.6000]])
    """
    with setting(model, x, labels, gradient_dtype=gradient_dtype, **untargeted(options)) as attack:
        return _search(attack, steps=0, n_targets=n_targets, restarts=1, at_once=at_once, generator=None)


_WIDTH = 2.0  # length of an ascent's first step in units of epsilon
_EVERY = 4  # steps between two looks for ascents that stand still


def _search(
    attack: Setting,
    *,
    steps: int,
    n_targets: int,
    restarts: int,
    at_once: int | None,
    generator: torch.Generator | None,
) -> Tensor:
    n_targets = integer("n_targets", n_targets)
    if at_once is not None:
        at_once = integer("at_once", at_once)
    width = attack.stride(_WIDTH)
    width = width.expand(len(attack.x), *width.shape[1:])
    logits = attack.logits(attack.x)
    tried = without_label(logits, attack.labels).topk(min(n_targets, logits.shape[1] - 1)).indices
    found = _Found(attack.x.clone(), difference_loss(logits, attack.labels))
    right = (~attack.succeeds(logits)).nonzero()[:, 0]
    for samples in (
        () if len(right) == 0 else right.split(max(1, (at_once or max(len(attack.x), _AT_ONCE)) // tried.shape[1]))
    ):
        pairs = _Pairs.of(attack, samples, tried[samples], width, logits)
        _ascend(pairs, pairs.farthest(), steps, found)
        for restart in range(1, restarts):
            pairs = pairs.rows((found.values[pairs.samples] <= 0).nonzero()[:, 0])
            if len(pairs.samples):
                _ascend(pairs, pairs.attack.start(None if restart % 2 else generator), steps, found, generator)
    return attack.ball.settle(found.examples)


class _Found:
    """The best example of every sample so far.

    Attributes:
        examples: The best example, (N, ...).
        values: Margin of the best other class over the label there, (N,).
    """

    def __init__(self, examples: Tensor, values: Tensor) -> None:
        self.examples, self.values = examples, values

    def keep(self, samples: Tensor, examples: Tensor, values: Tensor) -> None:
        """Keep the examples with a greater margin than the record. A sample may have several."""
        order = values.argsort(descending=True, stable=True)
        order = order[samples[order].argsort(stable=True)]  # by sample, the best of each first
        first = torch.ones_like(order, dtype=torch.bool)
        first[1:] = samples[order[1:]] != samples[order[:-1]]
        best = order[first]
        best = best[values[best] > self.values[samples[best]]]
        self.examples = self.examples.index_copy(0, samples[best], examples[best])
        self.values = self.values.index_copy(0, samples[best], values[best])


@dataclass(frozen=True)
class _Pairs:
    """Samples and the classes that are tried for them, P pairs.

    Attributes:
        attack: The samples under attack, one for each pair.
        samples: Their numbers, (P,).
        slope: 1 at the class, -1 at the label, 0 elsewhere: the derivative of the margin with respect to the logits,
            (P, C).
        width: Length of the first step, (P, 1, ...).
    """

    attack: Setting
    samples: Tensor
    slope: Tensor
    width: Tensor

    @classmethod
    def of(cls, attack: Setting, samples: Tensor, tried: Tensor, width: Tensor, logits: Tensor) -> _Pairs:
        """Return the pairs of some samples with the classes to try for them, (len(samples), T)."""
        repeated = samples.repeat_interleave(tried.shape[1])
        slope = logits.new_zeros(len(repeated), logits.shape[1])
        slope = slope.scatter(1, attack.labels[repeated][:, None], -1.0).scatter(1, tried.reshape(-1, 1), 1.0)
        return cls(attack.rows(repeated), repeated, slope, width[repeated])

    def rows(self, index: Tensor) -> _Pairs:
        """Return some of the pairs, by their indices."""
        return _Pairs(self.attack.rows(index), self.samples[index], self.slope[index], self.width[index])

    def gradient(self, example: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the point, the gradient of every margin at its own input, and the logits, as `Setting.gradient`."""
        return self.attack.gradient(example, slope=self.slope)

    def farthest(self) -> Tensor:
        """Return where the linearised margin is largest in ball and box."""
        point, gradient, _ = self.gradient(self.attack.x)
        farthest = self.attack.ball.farthest(gradient)
        if not torch.is_grad_enabled():
            return farthest
        # A step that is long enough ends there too, and unlike `farthest` it is differentiable.
        return follow(farthest, self.attack.ball.step(point, gradient, 1000 * self.width))


def _ascend(
    pairs: _Pairs, example: Tensor, steps: int, found: _Found, generator: torch.Generator | None = None
) -> None:
    """Climb from the given points, and keep better examples in `found`.

    With a generator each step moves a random half of the coordinates, the same for all pairs.
    """
    best, values = example, torch.full_like(pairs.slope[:, 0], -torch.inf)
    for step in range(steps):
        point, gradient, logits = pairs.gradient(example)
        best, values = _better(pairs, point, logits, best, values)
        if generator is not None:
            gradient = gradient * (draw(torch.rand, gradient[0], generator) < 0.5)
        example = pairs.attack.ball.step(point, gradient, pairs.width * (1 - step / steps))
        still = generator is None and step % _EVERY == 0
        finished = values > 0
        if still:  # the steps to come are shorter and go the same way, so they will not move it either
            finished = finished | ((example - point).abs().flatten(1).amax(1) == 0)
        if finished.any():
            index = finished.nonzero()[:, 0]
            found.keep(pairs.samples[index], best[index], values[index])
            index = (~finished & (found.values[pairs.samples] <= 0)).nonzero()[:, 0]
            if len(index) == 0:
                return
            pairs, example, best, values = pairs.rows(index), example[index], best[index], values[index]
    best, values = _better(pairs, example, pairs.attack.logits(example), best, values)
    found.keep(pairs.samples, best, values)


def _better(pairs: _Pairs, example: Tensor, logits: Tensor, best: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the better of two examples for every pair, and by how much the label is beaten there."""
    with no_graph():
        reached = difference_loss(logits, pairs.attack.labels)
        better = reached > values
        values = torch.where(better, reached, values)
    return by_row(better, example, best), values
