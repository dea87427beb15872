"""Time of held weights and statistics beside pytorch-metric-learning, POT, geomloss and torch's own layers."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn

from benchmarks._measure import Row, gradient, timed_row
from toolkit import unblock
from toolkit.weighting import (
    POTENTIALS,
    BatchRenorm,
    circle_loss,
    focal_loss,
    sigmoid_focal_loss,
    sinkhorn_loss,
)

_GOAL = "at most 1.1"


def rows() -> Iterator[Row]:
    """Measure forward plus backward in float32."""
    yield from _focal()
    yield from _circle()
    yield from _renorm()
    yield from _sinkhorn()


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def _row(what: str, ours: Callable[[], Tensor], theirs: Callable[[], Tensor], by: Tensor, goal: str = _GOAL) -> Row:
    return timed_row(what, gradient(ours, by), gradient(theirs, by), goal)


def _naive_sigmoid_focal(x: Tensor, t: Tensor) -> Tensor:
    """Return the formula with its powers, as torchvision writes it."""
    p = torch.sigmoid(x)
    loss = nn.functional.binary_cross_entropy_with_logits(x, t, reduction="none")
    loss = loss * (1 - (p * t + (1 - p) * (1 - t))) ** 2
    return ((0.25 * t + 0.75 * (1 - t)) * loss).sum()


def _naive_focal(x: Tensor, labels: Tensor) -> Tensor:
    loss = nn.functional.cross_entropy(x, labels, reduction="none")
    return ((1 - torch.exp(-loss)) ** 2 * loss).mean()


def _focal() -> Iterator[Row]:
    x = _random(8192, 90).requires_grad_()
    t = (_random(8192, 90) > 2).float()
    labels = torch.arange(8192) % 90
    yield _row(
        "sigmoid_focal_loss / the formula, 8192 x 90",
        lambda: sigmoid_focal_loss(x, t, reduction="sum"),
        lambda: _naive_sigmoid_focal(x, t),
        x,
    )
    yield _row("focal_loss / the formula, 8192 x 90", lambda: focal_loss(x, labels), lambda: _naive_focal(x, labels), x)


def _circle() -> Iterator[Row]:
    if importlib.util.find_spec("pytorch_metric_learning"):
        from pytorch_metric_learning.losses import CircleLoss

        e, labels, theirs = _random(256, 128).requires_grad_(), torch.arange(256) % 16, CircleLoss()
        yield _row(
            "circle_loss / pytorch-metric-learning, 256 x 128",
            lambda: circle_loss(e, labels),
            lambda: theirs(e, labels),
            e,
        )


def _renorm() -> Iterator[Row]:
    for shape in ((256, 512), (32, 64, 16, 16)):
        x, c = _random(*shape).requires_grad_(), _random(*shape)
        ours = BatchRenorm(shape[1])
        theirs = (nn.BatchNorm1d if len(shape) == 2 else nn.BatchNorm2d)(shape[1])
        size = " x ".join(map(str, shape))
        yield _row(
            f"BatchRenorm / torch's fused batch normalisation, {size}",
            lambda x=x, c=c, ours=ours: (c * ours(x)).sum(),
            lambda x=x, c=c, theirs=theirs: (c * theirs(x)).sum(),
            x,
            goal="",
        )


def _sinkhorn() -> Iterator[Row]:
    x, y = _random(200, 2).requires_grad_(), _random(200, 2) + 1

    def cost() -> Tensor:
        return (x[:, None] - y).square().sum(-1) / 2

    def ours() -> Tensor:
        return sinkhorn_loss(cost(), epsilon=0.5, iterations=50)

    def opened() -> Tensor:
        with unblock(POTENTIALS):
            return ours()

    yield _row("sinkhorn_loss, 50 iterations of 200 x 200: blocked / open", ours, opened, x, goal="at most 0.6")
    if importlib.util.find_spec("ot"):
        import ot

        weights = torch.full((200,), 1 / 200)
        for grad in ("envelope", "autodiff"):
            yield _row(
                f"sinkhorn_loss / POT, grad={grad!r}, 50 iterations of 200 x 200",
                ours,
                lambda grad=grad: ot.solve(cost(), weights, weights, reg=0.5, grad=grad, tol=0, max_iter=50).value,
                x,
            )
    if importlib.util.find_spec("geomloss"):
        from geomloss import SamplesLoss

        theirs = SamplesLoss("sinkhorn", p=2, blur=0.5**0.5, debias=False, backend="tensorized")
        few = partial(sinkhorn_loss, epsilon=0.5, iterations=5)
        yield _row(
            "sinkhorn_loss, 5 iterations / geomloss, its own schedule, 200 x 200",
            lambda: few(cost()),
            lambda: theirs(x, y),
            x,
        )
