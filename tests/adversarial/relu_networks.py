"""Small ReLU networks trained on digits in about a second each: what attacks and certificates are compared on.

Drawn and trained in float64, so they are the same networks on every machine: with other instruction sets their weights
differ by less than 1e-13, where float32 draws them 1e-7 apart and training takes that further at every sign.
"""

from __future__ import annotations

from functools import cache, partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from toolkit.datasets import digits

# name -> (kind of network, epsilon it is trained at, epsilon it is judged at)
NETWORKS = {
    "64-32-10 at .1": ((32,), 0.1, 0.1),
    "64-32-10 at .2": ((32,), 0.2, 0.2),
    "64-32-10 standard": ((32,), 0.0, 0.05),
    "64-24-24-10 at .1": ((24, 24), 0.1, 0.1),
    "64-64-10 at .1": ((64,), 0.1, 0.1),
    "convolution at .1": ("convolution", 0.1, 0.1),
}


class Case(NamedTuple):
    """A trained network, in evaluation mode, 100 rows it has not seen, and the epsilon to judge it at."""

    model: nn.Sequential
    x: Tensor
    labels: Tensor
    epsilon: float


@cache
def relu_network(name: str) -> Case:
    """Return one of `NETWORKS`. It is shared: leave it as it is."""
    kind, trained_at, epsilon = NETWORKS[name]
    x, labels, held_out, held_out_labels = split_digits()
    model = train(make(kind), x, labels, epsilon=trained_at)
    return Case(model, held_out[:100], held_out_labels[:100], epsilon)


def split_digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return 1257 digits and their labels to train on, and 540 others. Mixed: the file goes from writer to writer."""
    data = digits()
    order = torch.randperm(len(data.labels), generator=torch.Generator().manual_seed(0))
    train, test = order[:1257], order[1257:]
    return data.inputs[train], data.labels[train], data.inputs[test], data.labels[test]


def make(kind: str | tuple[int, ...], seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """Return an untrained network of 64 inputs and 10 logits: hidden widths, or ``"convolution"``."""
    linear = partial(nn.Linear, dtype=dtype)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if kind == "convolution":
            convolution = nn.Conv2d(1, 4, 3, stride=2, padding=1, dtype=dtype)
            image = (nn.Unflatten(1, (1, 8, 8)), convolution, nn.ReLU(), nn.Flatten())
            return nn.Sequential(*image, linear(64, 16), nn.ReLU(), linear(16, 10))
        widths = [64, *kind]
        hidden = [layer for i in range(len(kind)) for layer in (linear(widths[i], widths[i + 1]), nn.ReLU())]
        return nn.Sequential(*hidden, linear(widths[-1], 10))


def train(
    model: nn.Sequential, x: Tensor, labels: Tensor, *, epsilon: float, epochs: int = 40, steps: int = 5
) -> nn.Sequential:
    """Train on the worst of a few sign steps in a Linf ball; return the model, frozen."""
    generator, batch = torch.Generator().manual_seed(1), 128
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    n_batches = -(-len(x) // batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=epochs * n_batches)
    for _ in range(epochs):
        for rows in torch.randperm(len(x), generator=generator).split(batch):
            example = sign_steps(model, x[rows], labels[rows], epsilon, steps, generator) if epsilon else x[rows]
            optimizer.zero_grad()
            F.cross_entropy(model(example), labels[rows]).backward()
            optimizer.step()
            schedule.step()
    return model.eval().requires_grad_(False)


def sign_steps(
    model: nn.Module, x: Tensor, labels: Tensor, epsilon: float, steps: int, generator: torch.Generator
) -> Tensor:
    """Return the last of a few sign steps on the cross entropy from a random start, in ball and box."""
    low, high = (x - epsilon).clamp(min=0), (x + epsilon).clamp(max=1)
    example = low + torch.rand(x.shape, generator=generator, dtype=x.dtype) * (high - low)
    for _ in range(steps):
        example = example.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(F.cross_entropy(model(example), labels), example)
        example = (example + 2.5 * epsilon / steps * gradient.sign()).clamp(low, high)
    return example.detach()
