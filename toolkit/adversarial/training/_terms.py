"""Terms that the losses of training methods share, and the examples at which they are taken.

N samples, each of shape (...), C classes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from toolkit._checks import function
from toolkit._tensors import tensors
from toolkit.adversarial._functional import reentrant_kept
from toolkit.adversarial.attacks._setting import EXAMPLE, Setting, at_a_copy
from toolkit.adversarial.attacks.losses import margin_loss
from toolkit.adversarial.balls.box import check_inputs, draw
from toolkit.blocks import stop_gradient, variable

__all__ = [
    "Attack",
    "Model",
    "checked",
    "clean_and_moved",
    "cross_entropy",
    "divergence",
    "divergence_from",
    "found_by",
    "given",
    "logits_at",
    "losses_and_slope",
    "point_and_logits",
    "start_near",
]

Model = Callable[[Tensor], Tensor]
# Called as ``attack(model, x, labels)``, by some losses with a ``loss`` to be raised; returns examples like x.
Attack = Callable[..., Tensor]


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return ``-log p_y`` in nats, (N,).

    Written as ``log(1 + exp(margin_loss))``, it keeps its digits, and its gradient all components, where p_y is nearly
    1. The difference of a logit and their logsumexp rounds to 0 there, and ``p_y - 1`` with it.
    """
    return -F.logsigmoid(-margin_loss(logits, labels))


def divergence(clean: Tensor, moved: Tensor) -> Tensor:
    """Return ``KL(softmax(clean) || softmax(moved))`` in nats, (N,).

    With the logits z and w, (N, C), taken relative to those of the most likely clean class m, it is
    ``sum_{j != m} p_j (z_j - w_j) - log(1 + sum_{j != m} e^{z_j}) + log(1 + sum_{j != m} e^{w_j})``.
    So the gradient at m is the sum of the others', which are small but exact, and not ``softmax(w)_m - p_m``, which
    rounds to 0 for a confident model.
    """
    return divergence_from(clean)(moved)


def divergence_from(clean: Tensor) -> Callable[[Tensor], Tensor]:
    """Return `divergence` as a function of the moved logits, with the terms of the clean ones computed once."""
    most_likely = clean.argmax(1, keepdim=True)
    probability = clean.softmax(1).scatter(1, most_likely, 0.0)
    relative = clean - clean.gather(1, most_likely)
    log_total = _log_total(relative, most_likely)

    def divergence(moved: Tensor) -> Tensor:
        moved = moved - moved.gather(1, most_likely)
        return (probability * (relative - moved)).sum(1) - log_total + _log_total(moved, most_likely)

    return divergence


def _log_total(relative: Tensor, reference: Tensor) -> Tensor:
    """Return ``log sum_j e^{z_j}``, (N,), of logits whose reference is 0."""
    others = relative.scatter(1, reference, -torch.inf).logsumexp(1)
    return torch.logaddexp(others, torch.zeros_like(others))


def found_by(attack: Attack, model: Model, x: Tensor, labels: Tensor, **arguments: object) -> Tensor:
    """Return the examples of any attack, as constants while the block `EXAMPLE` is in place.

    Raises:
        ValueError: If the examples have another shape than `x`.
    """
    function("model", model)
    function("attack", attack, "a model, inputs and labels")
    check_inputs("x", x)
    example = attack(model, x, labels, **arguments)
    if example.shape != x.shape:
        raise ValueError(
            f"`attack` should return examples of the shape of `x`, {tuple(x.shape)}. Found {tuple(example.shape)}."
        )
    return stop_gradient(example, EXAMPLE)


def given(example: Tensor) -> Attack:
    """Return an attack that always finds this example."""

    def attack(model: Model, x: Tensor, labels: Tensor, **_: object) -> Tensor:
        return example

    return attack


def clean_and_moved(model: Model, x: Tensor, example: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logits at clean inputs and at examples, (N, C) each, from one forward pass.

    One pass is faster than two. In training mode batch normalisation then sees both as one batch and updates its
    running statistics once.
    """
    clean, moved = checked(model(torch.cat([x, example.to(x.dtype)]))).split(len(x))
    return clean, moved


def logits_at(model: Model, x: Tensor) -> Tensor:
    """Return the logits at inputs, (N, C). The model gets a copy: it may write into its input."""
    function("model", model)
    tensors(x=x)
    return checked(model(x.clone()))


def point_and_logits(model: Model, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return inputs to differentiate by, (N, ...), and the logits there, (N, C); as in `logits_at` of a copy."""
    point, logits = at_a_copy(model, x.view_as(x) if x.requires_grad else variable(x))
    return point, checked(logits)


def losses_and_slope(model: Model, x: Tensor, loss: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Return the loss of every sample, (N,), and its input gradient, (N, ...), recorded if gradients are."""
    recorded = torch.is_grad_enabled()
    with torch.enable_grad(), reentrant_kept():
        point, logits = point_and_logits(model, x)
        losses = loss(logits)
    (slope,) = torch.autograd.grad(losses, point, torch.ones_like(losses), create_graph=recorded)
    return losses, slope


def checked(logits: object) -> Tensor:
    """Return the answer of a model.

    Raises:
        TypeError: If it is not a tensor.
    """
    if not isinstance(logits, Tensor):
        raise TypeError(
            "`model` should return logits, a tensor (N, C), to be trained. "
            f"Found {type(logits).__name__}: train a module that returns the logits alone."
        )
    return logits


def start_near(attack: Setting, distance: Tensor, generator: torch.Generator | None) -> Tensor:
    """Return a point close to the clean inputs, (N, ...): see `nearby_pgd`."""
    if generator is None:
        point, gradient, _ = attack.gradient(attack.x)
        return attack.ball.step(point, gradient, distance)
    noise = draw(torch.randn, attack.x, generator).to(attack.x.dtype)
    return attack.ball.project(attack.x + distance * noise)
