"""Targets of the blocked gradient of each training method: the gradient of a loss at given examples, in plain torch.

These programs have no blocks: a quantity that a block holds is plain data here, or is detached.

N images, C classes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from toolkit.adversarial import AWP, CURE, LLR, MART, PGD, TRADES, VAT, HeldTRADES, Method, Standard
from toolkit.adversarial.training.methods import ALP, FGSM, RSFGSM, BallArguments

__all__ = ["TARGETS"]

# Called as target(method, model, x, labels, example, ball) with constants; the model is in training mode.
Target = Callable[[Any, nn.Module, Tensor, Tensor, Tensor, BallArguments], Tensor]

TARGETS: dict[type[Method], Target] = {}


def _of(*methods: type[Method]) -> Callable[[Target], Target]:
    def keep(target: Target) -> Target:
        TARGETS.update(dict.fromkeys(methods, target))
        return target

    return keep


def _both(model: nn.Module, x: Tensor, example: Tensor) -> tuple[Tensor, Tensor]:
    clean, moved = model(torch.cat([x, example])).chunk(2)
    return clean, moved


def _divergences(clean: Tensor, moved: Tensor) -> Tensor:
    """Return KL(clean || moved) of every image, in nats."""
    return F.kl_div(moved.log_softmax(1), clean.log_softmax(1), log_target=True, reduction="none").sum(1)


@_of(Standard, FGSM, RSFGSM, PGD)
def _at_the_example(
    method: Any, model: nn.Module, x: Tensor, labels: Tensor, example: Tensor, ball: BallArguments
) -> Tensor:
    return F.cross_entropy(model(example), labels)


@_of(TRADES)
def _trades(method: Any, model: nn.Module, x: Tensor, labels: Tensor, example: Tensor, ball: BallArguments) -> Tensor:
    clean, moved = _both(model, x, example)
    return F.cross_entropy(clean, labels) + float(method.beta) * _divergences(clean, moved).mean()


@_of(HeldTRADES)
def _held_trades(
    method: Any, model: nn.Module, x: Tensor, labels: Tensor, example: Tensor, ball: BallArguments
) -> Tensor:
    clean, moved = _both(model, x, example)
    return F.cross_entropy(clean, labels) + float(method.beta) * _divergences(clean.detach(), moved).mean()


@_of(VAT)
def _virtual(method: Any, model: nn.Module, x: Tensor, labels: Tensor, example: Tensor, ball: BallArguments) -> Tensor:
    clean, moved = _both(model, x, example)
    return F.cross_entropy(clean, labels) + float(method.weight) * _divergences(clean.detach(), moved).mean()


@_of(MART)
def _mart(method: Any, model: nn.Module, x: Tensor, labels: Tensor, example: Tensor, ball: BallArguments) -> Tensor:
    clean, moved = _both(model, x, example)
    others = moved.softmax(1).scatter(1, labels[:, None], 0).amax(1)
    boosted = F.cross_entropy(moved, labels, reduction="none") - torch.log1p(-others)
    wrong = 1 - clean.softmax(1).gather(1, labels[:, None])[:, 0]
    return (boosted + float(method.beta) * wrong * _divergences(clean, moved)).mean()


@_of(ALP)
def _paired(method: Any, model: nn.Module, x: Tensor, labels: Tensor, example: Tensor, ball: BallArguments) -> Tensor:
    clean, moved = _both(model, x, example)
    distance = (clean - moved).square().sum(1).mean()
    return F.cross_entropy(torch.cat([clean, moved]), torch.cat([labels] * 2)) + float(method.weight) * distance


@_of(CURE)
def _curvature(
    method: Any, model: nn.Module, x: Tensor, labels: Tensor, example: Tensor, ball: BallArguments
) -> Tensor:
    supervised = F.cross_entropy(model(x), labels)
    model.eval()
    _, slope = _slopes(model, x, labels)
    towards = _steepest(slope.detach().flatten(1), ball["norm"]).reshape(x.shape)
    _, moved = _slopes(model, x + float(method.h) * ball["epsilon"] * towards, labels)
    return supervised + float(method.weight) * (moved - slope).square().sum() / len(x)


@_of(LLR)
def _linearity(
    method: Any, model: nn.Module, x: Tensor, labels: Tensor, example: Tensor, ball: BallArguments
) -> Tensor:
    supervised = F.cross_entropy(model(x), labels)
    model.eval()
    losses, slope = _slopes(model, x, labels)
    along = ((example - x) * slope).flatten(1).sum(1)
    beside = F.cross_entropy(model(example), labels, reduction="none") - losses - along
    return supervised + (float(method.weight) * beside.abs() + float(method.slope_weight) * along.abs()).mean()


@_of(AWP)
def _at_the_worst_weights(
    method: Any, model: nn.Module, x: Tensor, labels: Tensor, example: Tensor, ball: BallArguments
) -> Tensor:
    inner = TARGETS[type(method.method)]
    value = inner(method.method, model, x, labels, example, ball)
    model.train()
    weights = dict(model.named_parameters())
    slopes = torch.autograd.grad(value, list(weights.values()))
    step = {
        name: float(method.gamma) * weight.detach().norm() / slope.norm() * slope if weight.dim() > 1 else 0 * slope
        for (name, weight), slope in zip(weights.items(), slopes, strict=True)
    }
    return inner(method.method, _Moved(model, step), x, labels, example, ball)


class _Moved(nn.Module):
    """A model whose weights are moved by constants."""

    def __init__(self, model: nn.Module, step: dict[str, Tensor]) -> None:
        super().__init__()
        self.model, self.step = model, step

    def forward(self, x: Tensor) -> Tensor:
        moved = {name: weight + self.step[name] for name, weight in self.model.named_parameters()}
        logits: Tensor = torch.func.functional_call(self.model, moved, x)
        return logits


def _slopes(model: nn.Module, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss of every image and its gradient with respect to the image, both differentiable."""
    point = x.detach().requires_grad_()
    losses = F.cross_entropy(model(point), labels, reduction="none")
    (slope,) = torch.autograd.grad(losses.sum(), point, create_graph=True)
    return losses, slope


def _steepest(rows: Tensor, norm: str) -> Tensor:
    """Return the direction of steepest ascent of each row, with norm 1."""
    if norm == "linf":
        return rows.sign()
    if norm == "l2":
        return F.normalize(rows, eps=torch.finfo(rows.dtype).tiny)
    best = rows.abs().argmax(1, keepdim=True)
    return torch.zeros_like(rows).scatter(1, best, rows.gather(1, best).sign())
