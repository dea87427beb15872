"""Free adversarial training: each backward pass updates the weights and the perturbation, several times per batch.

N samples, each of shape (...), C classes.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from toolkit._checks import function
from toolkit._tensors import same_shape
from toolkit.adversarial.attacks._setting import EXAMPLE, at_a_copy
from toolkit.adversarial.balls import Ball, Bounds, Norm, Region, per_sample
from toolkit.adversarial.balls.box import remark_on_width
from toolkit.adversarial.training._terms import Model, checked, cross_entropy
from toolkit.blocks import no_graph, stop_gradient, variable

__all__ = ["Replay", "free_loss"]


@dataclass(frozen=True)
class Replay:
    """One pass over a batch at perturbed inputs, whose backward pass gives both gradients.

    Attributes:
        loss: The mean cross entropy at the example, a scalar in nats per sample.
        example: Perturbed inputs, (N, ...), a leaf: ``loss.backward()`` leaves the gradient in its ``.grad``.
        ball: The set in which examples have to lie.
        stride: Length of the next step, (N or 1, 1, ...).
    """

    loss: Tensor
    example: Tensor
    ball: Region
    stride: Tensor

    def next_perturbation(self, gradient: Tensor | None = None) -> Tensor:
        """Return the perturbation for the next pass: a step of length epsilon up the gradient, kept in the ball.

        Args:
            gradient: Gradient of the loss by the example, (N, ...). None: the gradient that ``loss.backward()`` left.

        Raises:
            RuntimeError: If there is no gradient, because the backward pass has not run.
        """
        gradient = self.example.grad if gradient is None else gradient
        if gradient is None:
            raise RuntimeError("`loss.backward()` should have run before the next perturbation is taken.")
        with no_graph():
            return self.ball.step(self.example, gradient, self.stride) - self.ball.x


def free_loss(
    model: Model,
    x: Tensor,
    labels: Tensor,
    *,
    perturbation: Tensor,
    epsilon: float | Tensor,
    norm: Norm = "linf",
    bounds: Bounds = (0, 1),
) -> Replay:
    """Return the loss at perturbed inputs, prepared so that its backward pass gives the next perturbation as well.

    Free adversarial training replays every batch m times. ``loss.backward()`` gives two gradients: the weights take a
    step along their gradient, and the perturbation takes a step of length epsilon along the gradient of the inputs, in
    the ball. The next replay and the next batch start from this perturbation. So an epoch of m replays costs as much as
    m epochs of standard training.

    With the block `EXAMPLE` in place the gradient with respect to the weights is the gradient of the cross entropy at
    the example. The perturbation was made with earlier weights; opening the block matters only if the perturbation
    still has their graph.

    In training mode batch normalisation updates its running statistics in every replay, as in the paper.

    Args:
        model: Inputs (N, ...) to logits (N, C), in the mode in which it is trained.
        x: Clean inputs, (N, ...), inside of `bounds`.
        labels: (N,).
        perturbation: Added to `x` and brought into ball and box, (N, ...). Zeros at first.
        epsilon: Radius of the ball and length of a step; one for all, or (N,).
        norm: ``"linf"``, ``"l2"`` or ``"l1"``.
        bounds: Least and greatest value of an input; None for no box.

    Raises:
        TypeError: As in `pgd`.
        ValueError: As in `pgd`, or if `perturbation` has another shape than `x`.

    References:
        Shafahi, Najibi, Ghiasi, Xu, Dickerson, Studer, Davis, Taylor and Goldstein, "Adversarial training for free!",
        2019, algorithm 1.

    Example:
        >>> import torch
        >>> x, labels, weight = torch.full((1, 2), 0.5), torch.tensor([0]), torch.tensor([[1.0, 1.0], [0.0, 0.0]])
        >>> replay = free_loss(lambda x: x @ weight.T, x, labels, perturbation=torch.zeros(1, 2), epsilon=0.25)
        >>> replay.loss.backward()
        >>> replay.next_perturbation()
        tensor([[-0.2500, -0.2500]])
    """
    function("model", model)
    same_shape(x=x, perturbation=perturbation)
    ball = Ball(epsilon, norm, bounds).around(x)
    remark_on_width(epsilon, norm, bounds, x[:1].numel())
    example = variable(stop_gradient(ball.settle(ball.project(x + perturbation)), EXAMPLE))
    stride = per_sample("epsilon", epsilon, x).to(x.dtype)
    given, logits = at_a_copy(model, example)
    return Replay(cross_entropy(checked(logits), labels).mean(), given, ball, stride)
