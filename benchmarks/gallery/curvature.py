"""Divergences, robust losses and products with a Fisher matrix, beside torch and BackPACK."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.distributions import Categorical, kl_divergence
from torch.nn.functional import cross_entropy, huber_loss

from benchmarks._measure import Row, gradient, timed_row
from toolkit.curvature import hessian_product, kl_from_held, robust_loss, scale_gradient


def rows() -> Iterator[Row]:
    """Measure forward plus backward in float32."""
    logits, held = torch.randn(256, 64, requires_grad=True), torch.randn(256, 64)
    yield timed_row(
        "kl_from_held / torch.distributions, 256 x 64",
        gradient(lambda: kl_from_held(logits, held).mean(), logits),
        gradient(lambda: kl_divergence(Categorical(logits=held), Categorical(logits=logits)).mean(), logits),
        "at most 1.1",
    )
    r = torch.randn(65536, requires_grad=True)
    yield timed_row(
        "robust_loss / huber_loss of torch without reduction, 65,536",
        gradient(lambda: robust_loss(r, kind="huber", scale=1.0).mean(), r),
        gradient(lambda: huber_loss(r, torch.zeros_like(r), reduction="none").mean(), r),
        "at most 1.1",
    )
    yield timed_row(
        "scale_gradient / x.detach() * (1 - s) + x * s, 65,536",
        gradient(lambda: scale_gradient(r, 0.5).sum(), r),
        gradient(lambda: (r.detach() * 0.5 + r * 0.5).sum(), r),
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

    yield timed_row("Fisher product by kl_from_held / BackPACK's Gauss-Newton product", ours, theirs, "at most 1.1")
