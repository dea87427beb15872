"""Targets of the blocked gradient of each training method: the gradient of a loss at given examples, in plain torch.

These programs have no blocks: a quantity that a block holds is plain data here, or is detached.

N images, C classes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from toolkit.adversarial import AWP, CURE, LLR, MART, PGD, TRADES, VAT, HeldTRADES, Method, Standard
from toolkit.adversarial.training.methods import ALP, FGSM, RSFGSM, BallArguments

__all__ = ["TARGETS", "Examples"]


class Examples(NamedTuple):
    """A batch beside its adversarial examples, for a model in training mode."""

    method: Any
    model: nn.Module
    x: Tensor
    labels: Tensor
    example: Tensor
    ball: BallArguments

    def both(self) -> tuple[Tensor, Tensor]:
        """Return the logits of the images and of their examples, from one pass."""
        clean, moved = self.model(torch.cat([self.x, self.example])).chunk(2)
        return clean, moved

    def slopes(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss of every image and its gradient with respect to the image, both differentiable."""
        point = x.detach().requires_grad_()
        losses = F.cross_entropy(self.model(point), self.labels, reduction="none")
        (slope,) = torch.autograd.grad(losses.sum(), point, create_graph=True)
        return losses, slope


Target = Callable[[Examples], Tensor]

TARGETS: dict[type[Method], Target] = {}


def _of(*methods: type[Method]) -> Callable[[Target], Target]:
    def keep(target: Target) -> Target:
        TARGETS.update(dict.fromkeys(methods, target))
        return target

    return keep


def _divergences(clean: Tensor, moved: Tensor) -> Tensor:
    """Return KL(clean || moved) of every image, in nats."""
    return F.kl_div(moved.log_softmax(1), clean.log_softmax(1), log_target=True, reduction="none").sum(1)


@_of(Standard, FGSM, RSFGSM, PGD)
def _at_the_example(of: Examples) -> Tensor:
    return F.cross_entropy(of.model(of.example), of.labels)


@_of(TRADES)
def _trades(of: Examples) -> Tensor:
    clean, moved = of.both()
    return F.cross_entropy(clean, of.labels) + float(of.method.beta) * _divergences(clean, moved).mean()


@_of(HeldTRADES, VAT)
def _held(of: Examples) -> Tensor:
    clean, moved = of.both()
    weight = float(of.method.weight if isinstance(of.method, VAT) else of.method.beta)
    return F.cross_entropy(clean, of.labels) + weight * _divergences(clean.detach(), moved).mean()


@_of(MART)
def _mart(of: Examples) -> Tensor:
    clean, moved = of.both()
    true = of.labels[:, None]
    others = moved.softmax(1).scatter(1, true, 0).amax(1)
    boosted = F.cross_entropy(moved, of.labels, reduction="none") - torch.log1p(-others)
    wrong = 1 - clean.softmax(1).gather(1, true)[:, 0]
    return (boosted + float(of.method.beta) * wrong * _divergences(clean, moved)).mean()


@_of(ALP)
def _paired(of: Examples) -> Tensor:
    clean, moved = of.both()
    distance = (clean - moved).square().sum(1).mean()
    return F.cross_entropy(torch.cat([clean, moved]), of.labels.repeat(2)) + float(of.method.weight) * distance


@_of(CURE)
def _curvature(of: Examples) -> Tensor:
    supervised = F.cross_entropy(of.model(of.x), of.labels)
    of.model.eval()
    _, slope = of.slopes(of.x)
    towards = _steepest(slope.detach().flatten(1), of.ball["norm"]).reshape(of.x.shape)
    _, moved = of.slopes(of.x + float(of.method.h) * of.ball["epsilon"] * towards)
    return supervised + float(of.method.weight) * (moved - slope).square().sum() / len(of.x)


@_of(LLR)
def _linearity(of: Examples) -> Tensor:
    supervised = F.cross_entropy(of.model(of.x), of.labels)
    of.model.eval()
    losses, slope = of.slopes(of.x)
    along = ((of.example - of.x) * slope).flatten(1).sum(1)
    beside = F.cross_entropy(of.model(of.example), of.labels, reduction="none") - losses - along
    return supervised + (float(of.method.weight) * beside.abs() + float(of.method.slope_weight) * along.abs()).mean()


@_of(AWP)
def _at_the_worst_weights(of: Examples) -> Tensor:
    inner = TARGETS[type(of.method.method)]
    held = of._replace(method=of.method.method)
    value = inner(held)
    of.model.train()
    weights = dict(of.model.named_parameters())
    slopes = torch.autograd.grad(value, list(weights.values()))
    size = float(of.method.gamma)
    step = {
        name: size * weight.detach().norm() / slope.norm() * slope if weight.dim() > 1 else 0 * slope
        for (name, weight), slope in zip(weights.items(), slopes, strict=True)
    }
    return inner(held._replace(model=_Moved(of.model, step)))


class _Moved(nn.Module):
    """A model whose weights are moved by constants."""

    def __init__(self, model: nn.Module, step: dict[str, Tensor]) -> None:
        super().__init__()
        self.model, self.step = model, step

    def forward(self, x: Tensor) -> Tensor:
        moved = {name: weight + self.step[name] for name, weight in self.model.named_parameters()}
        logits: Tensor = torch.func.functional_call(self.model, moved, x)
        return logits


def _steepest(rows: Tensor, norm: str) -> Tensor:
    """Return the direction of steepest ascent of each row, with norm 1."""
    if norm == "linf":
        return rows.sign()
    if norm == "l2":
        return F.normalize(rows, eps=torch.finfo(rows.dtype).tiny)
    best = rows.abs().argmax(1, keepdim=True)
    return torch.zeros_like(rows).scatter(1, best, rows.gather(1, best).sign())
