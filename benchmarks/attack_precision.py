"""Time of PGD with gradients in bfloat16 and of torchattacks' PGD, and the strength that the attack loses."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import torchattacks
from torch import Tensor, nn

from benchmarks._measure import Row, timed_pair
from toolkit.adversarial import PGD, Method, Standard, pgd, small_cnn, train
from toolkit.datasets import digits

STEPS, EPSILON = 20, 0.1


def rows() -> Iterator[Row]:
    """Measure on 540 held-out digits: a convolutional network trained as usual, and one trained against PGD."""
    data = digits(dtype=torch.float32)
    order = torch.randperm(len(data.labels), generator=torch.Generator().manual_seed(0))
    images, labels = data.inputs.reshape(-1, 1, 8, 8)[order], data.labels[order]
    methods: dict[str, Method] = {"standard": Standard(), "PGD": PGD(steps=5)}
    for name, method in methods.items():
        generator = torch.Generator().manual_seed(0)
        model = small_cnn(10, image_size=8, generator=generator)
        train(model, images[:1257], labels[:1257], method=method, epsilon=EPSILON, epochs=15, generator=generator)
        yield from _measured(name, model.eval(), images[1257:], labels[1257:])


def _measured(name: str, model: nn.Module, x: Tensor, labels: Tensor) -> Iterator[Row]:
    theirs = torchattacks.PGD(model, eps=EPSILON, alpha=2.5 * EPSILON / STEPS, steps=STEPS, random_start=False)
    whole = partial(pgd, model, x, labels, epsilon=EPSILON, steps=STEPS)
    for dtype, goal in ((None, ""), (torch.bfloat16, "at most 0.56")):
        ours = partial(whole, gradient_dtype=dtype)
        ratio, own, other = timed_pair(ours, partial(theirs, x, labels), repeats=7)
        accuracies = [_accuracy(model, example, labels) for example in (ours(), whole(), theirs(x, labels))]
        note = (
            f"{own * 1e3:.0f} ms against {other * 1e3:.0f} ms, {len(x)} digits; robust accuracy "
            f"{accuracies[0]:.4f}, in float32 {accuracies[1]:.4f}, torchattacks {accuracies[2]:.4f}"
        )
        kind = "float32" if dtype is None else "bfloat16 gradients"
        yield Row(f"PGD-{STEPS}, {kind} / torchattacks, CNN, {name} training", ratio, goal, note)


def _accuracy(model: nn.Module, x: Tensor, labels: Tensor) -> float:
    with torch.no_grad():
        return (model(x).argmax(1) == labels).double().mean().item()
