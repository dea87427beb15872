"""APGD, the core of AutoAttack: projected gradient ascent with an adaptive step size.

N samples, each of shape (...), C classes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Literal, Unpack

import torch
from torch import Tensor

from toolkit._checks import choice, integer
from toolkit._random import own_generator, starts_at_random
from toolkit.adversarial.attacks._setting import GradientOptions, Setting, setting
from toolkit.adversarial.attacks.losses import Loss, dlr_loss, margin_loss, targeted_dlr_loss
from toolkit.adversarial.balls.box import by_row
from toolkit.blocks import no_graph

__all__ = ["apgd"]

_NEW: dict[str, float] = {"linf": 0.75, "l2": 0.75, "l1": 1.0}  # weight of a new step; the rest is momentum
_RISING = 0.75  # share of the steps since the last checkpoint that have to raise the loss


def apgd(
    model: Callable[[Tensor], Tensor],
    x: Tensor,
    labels: Tensor | None = None,
    *,
    steps: int = 100,
    loss: Literal["margin", "dlr"] | Loss = "margin",
    until: Literal["success", "end"] = "success",
    restarts: int = 1,
    random_start: bool | None = None,
    generator: torch.Generator | None = None,
    **options: Unpack[GradientOptions],
) -> Tensor:
    """Ascend the loss by projected gradient steps with momentum; the step size halves where progress stops.

    With ``u = step(x_t, length_t)``, a step as in `pgd` with a length of ``2 epsilon`` at first,

        ``x_{t+1} = project(x_t + 3/4 (u - x_t) + 1/4 (x_t - x_{t-1}))``.

    At checkpoints, which become more frequent, a sample halves its length and returns to its best point in two cases:
    fewer than three quarters of its steps since the last checkpoint raised the loss; or the last checkpoint left the
    length as it was, and the best loss has not risen since. There is no step size to tune. Every sample has its own
    length and its own best point.

    The default loss is the log odds against the label rather than the cross entropy. It is an increasing function of
    the cross entropy, so it has the same maxima and the same steps, but its gradient does not vanish where the softmax
    rounds to 1. The loss ``"dlr"`` needs no such form, because it does not depend on the scale of the logits.

    In L1 a step goes towards the farthest point of the set, as in `pgd`: such steps are sparse, and take no momentum.
    The paper on L1 (Croce and Hein, "Mind the box: L1-APGD for sparse adversarial attacks on image classifiers", 2021)
    steps along an adaptive share of the gradient's coordinates, unlike this implementation.

    Args:
        model: Inputs (N, ...) to logits (N, C). It is run in evaluation mode, module by module.
        x: Clean inputs, (N, ...), inside of `bounds`.
        labels: (N,). None: the model's predictions at `x`.
        steps: Number of gradient steps.
        loss: ``"margin"`` for `margin_loss`; ``"dlr"`` for `dlr_loss`, or `targeted_dlr_loss` with targets. Or a
            function of logits and labels that returns the losses (N,) to raise, or of logits and targets: to lower.
        until: ``"success"``, to evaluate: the attack leaves a sample as soon as it has succeeded, which saves most of
            the time. ``"end"``, to train: all steps are taken, and the greatest loss counts.
        restarts: Number of ascents, each from its own start.
        random_start: As in `pgd`.
        generator: As in `pgd`.
        **options: `epsilon`, `norm`, `bounds`, `mask` or `ball`; `targets`, `logits`, `gradient_dtype`.

    Returns:
        Adversarial examples with the shape, dtype and device of `x`: with ``until="success"`` the first example that
        fools the model, and otherwise the example with the greatest loss, over all steps and ascents. They are
        constants while the block `EXAMPLE` is in place. While it is open they are differentiated through the steps that
        led to them; the lengths of the steps are constants.

    Raises:
        TypeError: As in `pgd`.
        ValueError: As in `pgd`, or if `loss` or `until` is unknown, or there are too few classes for the loss.

    References:
        Croce and Hein, "Reliable evaluation of adversarial robustness with an ensemble of diverse parameter-free
        attacks", 2020, algorithm 1.

    Example:
        >>> weight = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
        >>> model = lambda x: x @ weight.T
        >>> apgd(model, torch.ones(1, 2), torch.tensor([0]), epsilon=0.5, norm="l2", steps=10)
        tensor([[0.7000, 0.6000]])
    """
    steps = integer("steps", steps)
    restarts = integer("restarts", restarts)
    draws = own_generator(generator) if starts_at_random(random_start, generator, restarts) else None
    if not callable(loss) and loss not in ("margin", "dlr"):
        raise ValueError(f"`loss` should be 'margin', 'dlr' or a function. Found {loss!r}.")
    choice("until", until, ("success", "end"))
    with setting(model, x, labels, **options) as attack:
        length, share = attack.stride(2), _NEW[attack.threat.norm]
        length = length.expand(len(attack.x), *length.shape[1:])
        found = _Found.at(attack)
        for _ in range(restarts):
            rows = (~found.succeeded).nonzero()[:, 0]
            if len(rows):
                part = attack if len(rows) == len(x) else attack.rows(rows)
                start = part.x if draws is None else part.ball.sample(draws)
                _ascend(_Climb.start(part, rows, start, length[rows]), steps, loss, until, share, found)
        return attack.ball.settle(found.examples)


class _Found:
    """The best example of every sample so far.

    Attributes:
        examples: The best example, (N, ...).
        losses: The loss there, (N,), with the sign that makes larger better, with or without targets.
        succeeded: Whether the search is over, (N,).
    """

    def __init__(self, examples: Tensor, losses: Tensor, succeeded: Tensor) -> None:
        self.examples, self.losses, self.succeeded = examples, losses, succeeded

    @classmethod
    def at(cls, attack: Setting) -> _Found:
        """Return the record before the first step."""
        losses = torch.full(attack.x.shape[:1], -torch.inf, device=attack.x.device, dtype=attack.x.dtype)
        return cls(attack.x.clone(), losses, torch.zeros_like(losses, dtype=torch.bool))

    def keep(self, rows: Tensor, examples: Tensor, losses: Tensor, succeeded: Tensor) -> None:
        """Keep the examples that succeed or have a greater loss than the record."""
        better = (succeeded | (losses > self.losses[rows])).nonzero()[:, 0]
        index = rows[better]
        self.examples = self.examples.index_copy(0, index, examples[better])
        self.losses = self.losses.index_copy(0, index, losses[better].to(self.losses.dtype))
        self.succeeded = self.succeeded.index_copy(0, index, succeeded[better])


@dataclass
class _Climb:
    """The samples that are still climbing, M of them.

    Attributes:
        attack: The samples.
        rows: Their numbers, (M,).
        point: Their current points, (M, ...).
        before: Their points a step ago, (M, ...).
        best: The best point so far, (M, ...).
        slope: The gradient at `best`, (M, ...).
        length: Length of a step, negative to lower the loss, (M, 1, ...).
        last: The loss a step ago, (M,).
        greatest: The greatest loss so far, (M,).
        reference: The greatest loss at the last checkpoint, (M,).
        kept: Whether the length stayed at the last checkpoint, (M,).
        rises: The number of steps that raised the loss since then, (M,).
    """

    attack: Setting
    rows: Tensor
    point: Tensor
    before: Tensor
    best: Tensor
    slope: Tensor
    length: Tensor
    last: Tensor
    greatest: Tensor
    reference: Tensor
    kept: Tensor
    rises: Tensor

    @classmethod
    def start(cls, attack: Setting, rows: Tensor, start: Tensor, length: Tensor) -> _Climb:
        """Return samples at their start, before their first step."""
        least = torch.full(start.shape[:1], -torch.inf, device=start.device, dtype=start.dtype)
        none = torch.zeros_like(least)
        slope = torch.zeros_like(start)
        return cls(attack, rows, start, start, start, slope, length, least, least, least, none > 0, none)

    def take(self, index: Tensor) -> _Climb:
        """Return some of the samples."""
        return _Climb(self.attack.rows(index), *(getattr(self, field.name)[index] for field in fields(self)[1:]))


def _ascend(climb: _Climb, steps: int, loss: str | Loss, until: str, share: float, found: _Found) -> None:
    checkpoints = _checkpoints(steps)
    for step in range(steps + 1):
        objective = _objective(climb.attack, loss)
        if step < steps:
            climb.point, gradient, logits = climb.attack.gradient(climb.point, objective)
        else:
            gradient, logits = climb.slope, climb.attack.logits(climb.point)
        with no_graph():
            losses = climb.attack.sign * (objective or margin_loss)(logits, climb.attack.goal)
            if step:
                climb.rises = climb.rises + (losses > climb.last)
            climb.last = losses
            better = losses > climb.greatest
            climb.greatest = torch.where(better, losses, climb.greatest)
        climb.best = by_row(better, climb.point, climb.best)
        climb.slope = by_row(better, gradient, climb.slope)
        if until == "success":
            succeeded = climb.attack.succeeds(logits)
            if succeeded.any():
                index = succeeded.nonzero()[:, 0]
                found.keep(climb.rows[index], climb.point[index], losses[index], succeeded[index])
                index = (~succeeded).nonzero()[:, 0]
                if len(index) == 0:
                    return
                climb, gradient = climb.take(index), gradient[index]
        if step == steps:
            break
        if step in checkpoints:
            gradient = _check(climb, gradient, step - checkpoints[step])
        target = climb.attack.ball.step(climb.point, gradient, climb.length)
        if step and share < 1:
            target = climb.attack.ball.project(
                climb.point + share * (target - climb.point) + (1 - share) * (climb.point - climb.before)
            )
        climb.before, climb.point = climb.point, target
    found.keep(climb.rows, climb.best, climb.greatest, torch.zeros_like(climb.rows, dtype=torch.bool))


def _check(climb: _Climb, gradient: Tensor, n_steps: int) -> Tensor:
    """Halve the step length of samples that stopped improving, and move them back to their best point.

    Returns:
        The gradient at the points after that.
    """
    stalled = climb.kept & (climb.greatest <= climb.reference)
    halved = (climb.rises < _RISING * n_steps) | stalled
    climb.length = by_row(halved, climb.length / 2, climb.length)
    climb.kept, climb.reference, climb.rises = ~halved, climb.greatest, torch.zeros_like(climb.rises)
    climb.point = by_row(halved, climb.best, climb.point)
    climb.last = torch.where(halved, climb.greatest, climb.last)
    return by_row(halved, climb.slope, gradient)


def _checkpoints(steps: int) -> dict[int, int]:
    """Return the checkpoints: the steps at which to look back, each with the checkpoint before.

    The first is at 22 % of the steps; each gap is 3 % smaller than the one before, but at least 6 %.
    """
    shares, gap = [0.0, 0.22], 0.22
    while shares[-1] < 1:
        gap = max(gap - 0.03, 0.06)
        shares.append(shares[-1] + gap)
    at = [-int(-steps * round(share, 9) // 1) for share in shares]
    return {now: before for before, now in pairwise(at) if before < now <= steps}


def _objective(attack: Setting, loss: str | Loss) -> Loss | None:
    """Return the loss of logits and `attack.goal`; None for `margin_loss`."""
    if callable(loss):
        return loss
    if loss == "margin":
        return None
    if attack.targets is None:
        return dlr_loss
    labels = attack.labels
    return lambda logits, targets: -targeted_dlr_loss(logits, labels, targets)
