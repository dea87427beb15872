"""Divergences, robust losses and products with a Fisher matrix, beside torch and BackPACK."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.distributions import Categorical, kl_divergence
from torch.nn.functional import cross_entropy, huber_loss

from benchmarks._measure import Row, timed_pair
from toolkit.curvature import hessian_product, kl_from_held, robust_loss, scale_gradient


def rows() -> Iterator[Row]:
    """Measure forward plus backward in float32."""
    logits, held = torch.randn(256, 64, requires_grad=True), torch.randn(256, 64)
    yield _row(
        "kl_from_held / torch.distributions, 256 x 64",
        _gradient(lambda: kl_from_held(logits, held).mean(), logits),
        _gradient(lambda: kl_divergence(Categorical(logits=held), Categorical(logits=logits)).mean(), logits),
        "at most 1.1",
    )
    r = torch.randn(65536, requires_grad=True)
    yield _row(
        "robust_loss / huber_loss of torch without reduction, 65,536",
        _gradient(lambda: robust_loss(r, kind="huber", scale=1.0).mean(), r),
        _gradient(lambda: huber_loss(r, torch.zeros_like(r), reduction="none").mean(), r),
        "at most 1.1",
    )
    yield _row(
        "scale_gradient / x.detach() * (1 - s) + x * s, 65,536",
        _gradient(lambda: scale_gradient(r, 0.5).sum(), r),
        _gradient(lambda: (r.detach() * 0.5 + r * 0.5).sum(), r),
        "at most 1.1",
    )
    yield from _products()


def _products() -> Iterator[Row]:
    try:
        from backpack.hessianfree.ggnvp import ggn_vector_product
    except ModuleNotFoundError:
        return
    network = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 10))
    inputs, labels = torch.randn(128, 64), torch.randint(10, (128,))
    parameters = list(network.parameters())
    vector = [torch.randn_like(parameter) for parameter in parameters]

    def ours() -> object:
        logits = network(inputs)
        return hessian_product(kl_from_held(logits, logits).mean(), parameters, vector)

    def theirs() -> object:
        logits = network(inputs)
        return ggn_vector_product(cross_entropy(logits, labels), logits, network, vector)

    yield _row("Fisher product by kl_from_held / BackPACK's Gauss-Newton product", ours, theirs, "at most 1.1")


def _row(what: str, ours: Callable[[], object], theirs: Callable[[], object], goal: str) -> Row:
    ratio, seconds, their_seconds = timed_pair(ours, theirs)
    return Row(what, ratio, goal, f"{1e6 * seconds:.0f} us against {1e6 * their_seconds:.0f} us")


def _gradient(loss: Callable[[], Tensor], x: Tensor) -> Callable[[], object]:
    return lambda: torch.autograd.grad(loss(), x)
