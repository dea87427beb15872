"""Attacks that follow the gradient: one step (FGSM, RS-FGSM) and many (PGD), in a ball and inside a box.

An attack searches for an input near `x` on which the model errs. It has no side effects: no parameter's ``.grad``, no
module's mode and no running statistic is different afterwards, also when the model raises. The global random state is
unchanged too, unless the attack itself draws and has no `generator`.

N samples, each of shape (...), C classes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Unpack

import torch
from torch import Tensor

from toolkit._checks import integer
from toolkit._random import own_generator, starts_at_random
from toolkit.adversarial.attacks._setting import GradientOptions, Setting, setting
from toolkit.adversarial.attacks.losses import Loss, margin_loss
from toolkit.adversarial.balls.box import by_row

__all__ = ["ascend", "fgsm", "pgd", "rs_fgsm"]


def fgsm(
    model: Callable[[Tensor], Tensor],
    x: Tensor,
    labels: Tensor | None = None,
    *,
    loss: Loss | None = None,
    **options: Unpack[GradientOptions],
) -> Tensor:
    """Move every input once, by epsilon in the direction of steepest ascent of the loss.

    ``clip(x + epsilon * sign(grad loss))`` in Linf and ``x + epsilon * grad / |grad|_2`` in L2: the maximum of the
    linearised loss if the box does not interfere. In L1 the result is this maximum also in a box: the coordinates with
    the largest gradients go as far as the box lets them, until epsilon is used up.

    Args:
        model: Inputs (N, ...) to logits (N, C).
        x: Clean inputs, (N, ...), inside of `bounds`.
        labels: (N,). None: the model's predictions at `x`.
        loss: As in `pgd`.
        **options: `epsilon`, `norm`, `bounds`, `mask` or `ball`; `targets`, `logits`, `gradient_dtype`.

    Returns:
        Adversarial examples with the shape, dtype and device of `x`; a constant while the block `EXAMPLE` is in place.

    Raises:
        TypeError: If `x` is not floating point.
        ValueError: As in `pgd`.

    References:
        Goodfellow, Shlens and Szegedy, "Explaining and harnessing adversarial examples", 2015, section 4.

    Example:
        >>> model = torch.nn.Linear(2, 2)
        >>> _ = model.load_state_dict({"weight": torch.tensor([[1.0, -2.0], [0.0, 0.0]]), "bias": torch.zeros(2)})
        >>> fgsm(model, torch.tensor([[0.5, 0.5]]), torch.tensor([0]), epsilon=0.25)
        tensor([[0.2500, 0.7500]])
    """
    with setting(model, x, labels, **options) as attack:
        return attack.ball.settle(ascend(attack, attack.x.clone(), loss, 1, attack.stride()))


def rs_fgsm(
    model: Callable[[Tensor], Tensor],
    x: Tensor,
    labels: Tensor | None = None,
    *,
    step_size: float | Tensor | None = None,
    loss: Loss | None = None,
    generator: torch.Generator | None,
    **options: Unpack[GradientOptions],
) -> Tensor:
    """Move every input once, from a start that is drawn uniformly from the ball: the attack of fast training.

    Args:
        model: Inputs (N, ...) to logits (N, C).
        x: Clean inputs, (N, ...), inside of `bounds`.
        labels: (N,). None: the model's predictions at `x`.
        step_size: Length of the step; one for all, or (N,). None: ``1.25 * epsilon``, as in the paper.
        loss: As in `pgd`.
        generator: Draws the start. None: torch's global generator.
        **options: `epsilon`, `norm`, `bounds`, `mask` or `ball`; `targets`, `logits`, `gradient_dtype`.

    Returns:
        Adversarial examples with the shape, dtype and device of `x`; a constant while the block `EXAMPLE` is in place.

    Raises:
        TypeError: As in `pgd`.
        ValueError: As in `pgd`.

    References:
        Wong, Rice and Kolter, "Fast is better than free: revisiting adversarial training", 2020, algorithm 3.

    Example:
        >>> generator = torch.Generator().manual_seed(0)
        >>> x = torch.full((1, 2), 0.5)
        >>> example = rs_fgsm(torch.nn.Linear(2, 2), x, torch.tensor([0]), epsilon=0.25, generator=generator)
        >>> bool(((example - x).abs() <= 0.25).all())
        True
    """
    draws = own_generator(generator)
    with setting(model, x, labels, **options) as attack:
        return attack.ball.settle(ascend(attack, attack.start(draws), loss, 1, attack.stride(1.25, step_size)))


def pgd(
    model: Callable[[Tensor], Tensor],
    x: Tensor,
    labels: Tensor | None = None,
    *,
    steps: int = 10,
    step_size: float | Tensor | None = None,
    loss: Loss | None = None,
    restarts: int = 1,
    random_start: bool | None = None,
    generator: torch.Generator | None = None,
    **options: Unpack[GradientOptions],
) -> Tensor:
    """Ascend the loss inside a ball around every input by projected gradient steps.

    ``x_{t+1} = project(x_t + step_size * direction(grad loss(model(x_t), labels)))``, where the direction is the sign
    in Linf and the normalised gradient in L2, and the projection is onto the intersection of ball and box. In L1 a step
    moves the coordinates with the largest gradients to the box, one after the other.

    While the block `EXAMPLE` is in place no graph outlives a step, so memory does not grow with `steps`. While it is
    open the steps are differentiated. In Linf that adds exactly zero, because the sign has derivative zero; in L2 it
    adds the effect of the parameters on the direction of the steps. The examples are the same, bit for bit, where torch
    computes a backward pass in the same way with ``create_graph``. For SiLU and group normalisation torch does not, and
    the examples agree up to rounding.

    Args:
        model: Inputs (N, ...) to logits (N, C). It is run in evaluation mode, module by module, and so are the
            modules that a function refers to.
        x: Clean inputs, (N, ...), inside of `bounds`.
        labels: (N,). None: the model's predictions at `x`.
        steps: Number of gradient steps.
        step_size: Length of a step in the norm; one for all, or (N,). None: ``2.5 * epsilon / steps``, enough to reach
            the boundary from anywhere in the ball (Madry et al. 2018, section 5).
        loss: Function of logits and labels that returns losses (N,) to raise; with `targets`, a function of logits and
            targets that returns losses to lower. None: `margin_loss`.
        restarts: Number of ascents, each from its own start. For every sample the ascent with the greatest final loss
            is kept.
        random_start: Start at points drawn uniformly from the ball, instead of at `x`, where the attack is
            deterministic and its rows do not depend on each other. None: if there are several `restarts`, or a
            `generator`.
        generator: Draws the starts, if they are random. None: torch's global generator.
        **options: `epsilon`, `norm`, `bounds`, `mask` or `ball`; `targets`, `logits`, `gradient_dtype`.

    Returns:
        Adversarial examples with the shape, dtype and device of `x`, inside of ball and box in exact arithmetic; a
        constant while the block `EXAMPLE` is in place. With epsilon 0 they are the values of `x`.

    Raises:
        TypeError: If `x` is not floating point, labels, targets are not integers or `mask` is not Boolean; if a
            `gradient_dtype` is given and `model` is not a `torch.nn.Module`.
        ValueError: If `norm` is unknown, `steps` or `restarts` is not positive, or there are `restarts` without a
            `random_start`. If `epsilon` or `step_size` is negative, not finite or of another shape. If `x` lies outside
            of `bounds`, there is not one label per sample, or `loss` does not return one value per sample.

    References:
        Madry, Makelov, Schmidt, Tsipras and Vladu, "Towards deep learning models resistant to adversarial attacks",
        2018, section 2.1.

    Example:
        >>> weight = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
        >>> model = lambda x: x @ weight.T
        >>> pgd(model, torch.ones(1, 2), torch.tensor([0]), epsilon=0.5, norm="l2", steps=5)
        tensor([[0.7000, 0.6000]])
    """
    steps = integer("steps", steps)
    restarts = integer("restarts", restarts)
    draws = own_generator(generator) if starts_at_random(random_start, generator, restarts) else None
    with setting(model, x, labels, **options) as attack:
        stride = attack.stride(2.5 / steps, step_size)
        best = ascend(attack, attack.start(draws), loss, steps, stride)
        for _ in range(restarts - 1):
            best = _stronger(attack, loss, best, ascend(attack, attack.start(draws), loss, steps, stride))
        return attack.ball.settle(best)


def ascend(attack: Setting, example: Tensor, loss: Loss | None, steps: int, stride: Tensor) -> Tensor:
    """Return the last point of an ascent of the loss, before `settle`; it takes the memory of `example`."""
    for _ in range(steps):
        point, gradient, _ = attack.gradient(example, loss)
        example = attack.ball.step(point, gradient, stride, out=None if torch.is_grad_enabled() else example)
    return example


def _stronger(attack: Setting, loss: Loss | None, one: Tensor, other: Tensor) -> Tensor:
    """Return for every sample the example with the greater loss."""
    measure = margin_loss if loss is None else loss
    values = [attack.sign * measure(attack.logits(example), attack.goal) for example in (one, other)]
    return by_row(values[1] > values[0], other, one)
