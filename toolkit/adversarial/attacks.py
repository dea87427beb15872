"""Attacks that follow the gradient: one step (FGSM) and many (PGD), in a ball and inside a box.

An attack searches an input near `x` on which the model errs. It leaves nothing behind: no parameter's ``.grad``, no
module's mode, no running statistic and no global random state is different afterwards, also when the model raises.

N samples, each of shape (...), C classes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from toolkit.adversarial._modes import evaluation
from toolkit.adversarial.balls import Bounds, Norm, make_ball, per_sample
from toolkit.blocks import block, ordinary_tensors, stop_recording, variable

__all__ = ["EXAMPLE", "fgsm", "margin_loss", "pgd"]

EXAMPLE = block(
    "adversarial.example",
    "The adversarial example is an input to train on: the loss moves the model, not the attack that made the input.",
)


def fgsm(
    model: Callable[[Tensor], Tensor],
    x: Tensor,
    labels: Tensor,
    *,
    epsilon: float | Tensor,
    norm: Norm = "linf",
    targets: Tensor | None = None,
    bounds: Bounds = (0, 1),
    loss: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> Tensor:
    """Move every input once, by epsilon in the direction of steepest ascent of the loss.

    ``clip(x + epsilon * sign(grad loss))`` in Linf, ``x + epsilon * grad / |grad|_2`` in L2, the point that maximises
    the linearised loss if the box does not interfere.

    Args:
        model: Inputs (N, ...) to logits (N, C).
        x: Clean inputs, (N, ...), inside of `bounds`.
        labels: (N,).
        epsilon: Radius of the ball; one for all, or (N,).
        norm: ``"linf"`` or ``"l2"``.
        targets: (N,); the classes to move towards. None moves away from `labels`.
        bounds: Least and greatest value of an input, numbers or broadcast to `x`; None for no box.
        loss: As in `pgd`.

    Returns:
        Adversarial examples with the shape, dtype and device of `x`; a constant while the block `EXAMPLE` is in place.

    Raises:
        TypeError: If `x` is not floating point.
        ValueError: As in `pgd`.

    Source:
        Goodfellow, Shlens and Szegedy, "Explaining and harnessing adversarial examples", 2015, section 4.

    Example:
        >>> model = torch.nn.Linear(2, 2)
        >>> _ = model.load_state_dict({"weight": torch.tensor([[1.0, -2.0], [0.0, 0.0]]), "bias": torch.zeros(2)})
        >>> fgsm(model, torch.tensor([[0.5, 0.5]]), torch.tensor([0]), epsilon=0.25)
        tensor([[0.2500, 0.7500]])
    """
    return pgd(
        model,
        x,
        labels,
        epsilon=epsilon,
        norm=norm,
        steps=1,
        step_size=epsilon,
        targets=targets,
        bounds=bounds,
        loss=loss,
    )


def pgd(
    model: Callable[[Tensor], Tensor],
    x: Tensor,
    labels: Tensor,
    *,
    epsilon: float | Tensor,
    norm: Norm = "linf",
    steps: int,
    step_size: float | Tensor | None = None,
    targets: Tensor | None = None,
    bounds: Bounds = (0, 1),
    loss: Callable[[Tensor, Tensor], Tensor] | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Ascend the loss inside a ball around every input by projected gradient steps.

    ``x_{t+1} = project(x_t + step_size * direction(grad loss(model(x_t), labels)))``, where the direction is the sign
    in Linf and the normalised gradient in L2, and the projection is onto the ball and the box together.

    While the block `EXAMPLE` is in place no graph outlives a step, so memory does not grow with `steps`. While it is
    open the steps themselves are differentiated. In Linf that adds exactly nothing, because the sign has derivative
    zero; in L2 it adds what the parameters do to the direction of the steps. The examples are the same, bit for bit,
    as long as torch evaluates a backward formula in the same way when it records it. It does not for SiLU and group
    normalisation: with these they agree to rounding.

    Args:
        model: Inputs (N, ...) to logits (N, C). It is run in evaluation mode, module by module. A callable that is
            not a `torch.nn.Module` is called as it is.
        x: Clean inputs, (N, ...), inside of `bounds`.
        labels: (N,).
        epsilon: Radius of the ball; one for all, or (N,).
        norm: ``"linf"`` or ``"l2"``.
        steps: Number of gradient steps.
        step_size: Length of a step in the norm; one for all, or (N,). None: ``2.5 * epsilon / steps``, enough to reach
            the boundary from anywhere in the ball (Madry et al. 2018, section 5).
        targets: (N,); the classes to move towards. None moves away from `labels`.
        bounds: Least and greatest value of an input, numbers or broadcast to `x`; None for no box.
        loss: Logits and labels to the losses (N,) to be raised, or lowered towards `targets`. None: `margin_loss`.
        generator: Where given, the start is drawn uniformly from the ball. None starts at `x`; the attack is then
            deterministic and its rows do not depend on each other.

    Returns:
        Adversarial examples with the shape, dtype and device of `x`, inside of ball and box in exact arithmetic; a
        constant while the block `EXAMPLE` is in place. With epsilon 0 they are the values of `x`.

    Raises:
        TypeError: If `x` is not floating point.
        ValueError: If `norm` is unknown, `steps` is not positive, `epsilon` or `step_size` is negative, not finite or
            of another shape, `x` lies outside of `bounds`, or `loss` does not return one value per sample.

    Source:
        Madry, Makelov, Schmidt, Tsipras and Vladu, "Towards deep learning models resistant to adversarial attacks",
        2018, section 2.1.

    Example:
        >>> weight = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
        >>> model = lambda x: x @ weight.T
        >>> pgd(model, torch.ones(1, 2), torch.tensor([0]), epsilon=0.5, norm="l2", steps=5)
        tensor([[0.7000, 0.6000]])
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(f"`steps` should be a positive integer. Found {steps!r}.")
    goal, sign = (labels, 1) if targets is None else (targets, -1)
    with ordinary_tensors(), stop_recording(EXAMPLE), evaluation(model):
        x, goal = (tensor.clone() if tensor.is_inference() else tensor for tensor in (x, goal))
        ball = make_ball(norm, x, epsilon, bounds)
        size = 2.5 / steps * torch.as_tensor(epsilon, dtype=torch.float64) if step_size is None else step_size
        stride = (sign * per_sample("step_size", size, x)).to(x.dtype)
        example = x.clone() if generator is None else ball.sample(generator)
        for _ in range(steps):
            point = variable(example)
            gradient = _input_gradient(model, point, goal, loss)
            example = ball.project(torch.addcmul(point, ball.direction(gradient), stride))
        return ball.settle(example)


def margin_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return by how much the other classes together beat the label, in nats per sample.

    ``logsumexp_{j != y} z_j - z_y = log((1 - p_y) / p_y)``. Its gradient is that of the cross entropy divided by
    ``1 - p_y``: the same signs and the same direction, so an attack takes the same steps. But where the softmax rounds
    p_y to 1 the gradient of the cross entropy loses the label's part and points elsewhere, and this one does not.

    Args:
        logits: (N, C), at least two classes.
        labels: (N,), integers.

    Returns:
        (N,). Positive where the label has less than half of the probability.

    Raises:
        ValueError: If the shapes are others, or there are fewer than two classes.
        TypeError: If `labels` are not integers.

    Example:
        >>> margin_loss(torch.tensor([[200.0, 0.0]]), torch.tensor([0]))
        tensor([-200.])
    """
    index = _class_index(logits, labels)
    return _without_label(logits, index).logsumexp(1) - logits.gather(1, index)[:, 0]


def _margin_slope(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the derivative of `margin_loss` by the logits: the softmax of the other classes, and -1 at the label."""
    index = _class_index(logits, labels)
    return _without_label(logits, index).softmax(1).scatter(1, index, -1.0)


def _without_label(logits: Tensor, index: Tensor) -> Tensor:
    return logits.scatter(1, index, -torch.inf)


def _class_index(logits: Tensor, labels: Tensor) -> Tensor:
    if logits.dim() != 2 or logits.shape[1] < 2:
        raise ValueError(f"`logits` should have shape (N, C) with at least two classes. Found {tuple(logits.shape)}.")
    if labels.shape != logits.shape[:1]:
        raise ValueError(f"`labels` should have shape ({len(logits)},). Found {tuple(labels.shape)}.")
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise TypeError(f"`labels` should be integers. Found {labels.dtype}.")
    return labels.long()[:, None]


def _input_gradient(
    model: Callable[[Tensor], Tensor],
    point: Tensor,
    labels: Tensor,
    loss: Callable[[Tensor, Tensor], Tensor] | None,
) -> Tensor:
    """Return the gradient of every sample's loss by its own input; recorded only if the attack is."""
    recorded = torch.is_grad_enabled()
    with torch.enable_grad():
        logits = model(point)
        losses = None if loss is None else loss(logits, labels)
    if losses is None:  # the derivative of `margin_loss`, without a graph of it
        outputs, slope = logits, _margin_slope(logits, labels)
    elif losses.shape == point.shape[:1]:
        outputs, slope = losses, torch.ones_like(losses)
    else:
        raise ValueError(
            f"`loss` should return one value per sample, ({len(point)},) (torch's losses: reduction='none'). "
            f"Found shape {tuple(losses.shape)}."
        )
    (gradient,) = torch.autograd.grad(outputs, point, slope, create_graph=recorded)
    return gradient
