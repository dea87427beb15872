"""Time of an attack against its forward and backward passes alone, and the savings of its block in training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks._measure import Row, timed_row
from toolkit import unblock
from toolkit.adversarial import EXAMPLE, adversarial_loss, pgd
from toolkit.gradients.memory import measure_memory

T = TypeVar("T")

STEPS = 10


def rows() -> Iterator[Row]:
    """Measure on images of 28 x 28, in float32: a convolutional and a fully connected network."""
    for name, (model, x, labels) in {"CNN": _cnn(), "MLP": _mlp()}.items():
        yield _step(f"PGD step in Linf / forward + backward to the input, {name}", model, x, labels, "linf")
        yield _step(f"PGD step in L2 / forward + backward to the input, {name}", model, x, labels, "l2")
    yield from _block(*_mlp())


def _step(what: str, model: nn.Module, x: Tensor, labels: Tensor, norm: str) -> Row:
    def floor() -> None:
        for _ in range(STEPS):
            point = x.clone().requires_grad_()
            torch.autograd.grad(F.cross_entropy(model(point), labels, reduction="sum"), point)

    attack = partial(pgd, model, x, labels, epsilon=0.1 if norm == "linf" else 1.0, norm=norm, steps=STEPS)
    goal = "at most 1.05" if norm == "linf" else ""
    note = f"batch {len(x)}, PGD-{STEPS} in all"
    return timed_row(what, attack, floor, goal, note=note, steps=STEPS, repeats=9)


def _block(model: nn.Module, x: Tensor, labels: Tensor) -> Iterator[Row]:
    attack = partial(pgd, epsilon=1.0, norm="l2", steps=STEPS)

    def loss() -> Tensor:
        return adversarial_loss(model, x, labels, attack=attack)

    def blocked() -> None:
        torch.autograd.grad(loss(), list(model.parameters()))

    what, note = "adversarial training step: blocked / open", f"MLP, PGD-{STEPS} in L2"
    yield timed_row(what, blocked, _opened(blocked), "at most 0.7", note=note, repeats=9)
    peak, open_peak = measure_memory(loss).peak, _opened(lambda: measure_memory(loss).peak)()
    note = f"{peak / 2**20:.1f} MiB against {open_peak / 2**20:.1f} MiB"
    yield Row("adversarial training step: peak bytes, blocked / open", peak / open_peak, "at most 0.25", note)
    attack = partial(pgd, epsilon=1.0, norm="l2", steps=1)
    short = measure_memory(loss).peak
    note = f"{peak / 2**20:.1f} MiB against {short / 2**20:.1f} MiB"
    yield Row(f"adversarial training step: peak bytes, blocked, PGD-{STEPS} / PGD-1", peak / short, "at most 1.2", note)


def _opened(program: Callable[[], T]) -> Callable[[], T]:
    def run() -> T:
        with unblock(EXAMPLE):
            return program()

    return run


def _cnn() -> tuple[nn.Module, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * 14 * 14, 10),
    )
    return model, torch.rand(64, 1, 28, 28, generator=generator), torch.randint(10, (64,), generator=generator)


def _mlp() -> tuple[nn.Module, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    return model, torch.rand(128, 784, generator=generator), torch.randint(10, (128,), generator=generator)
