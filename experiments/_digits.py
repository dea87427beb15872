"""Parts that the experiments on images share: the split of the digits, batches, networks.

N images, D pixels, C classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from toolkit.adversarial.networks import mlp, small_cnn
from toolkit.datasets import Dataset, digits
from toolkit.runner import ExperimentConfig

from ._training import descend

__all__ = [
    "BALLS",
    "Activation",
    "Batches",
    "Kind",
    "digits_of",
    "network",
    "on_device",
    "split_digits",
    "train_cleanly",
]

Activation = Literal["relu", "tanh"]
Kind = Literal["linear", "mlp", "cnn"]

BALLS = {"linf": "Linf", "l2": "L2", "l1": "L1"}
"""Names of norms in the report."""

_ACTIVATIONS: dict[Activation, type[nn.Module]] = {"relu": nn.ReLU, "tanh": nn.Tanh}


class Batches:
    """The batch of the current step, and a seeded source of the next ones.

    Args:
        data: The images to draw from.
        size: Number of images in a batch.
        generator: Draws a new permutation every epoch.
        prepare: Changes the images of each batch.
    """

    def __init__(
        self,
        data: Dataset,
        size: int,
        generator: torch.Generator,
        prepare: Callable[[Tensor], Tensor] = lambda images: images,
    ) -> None:
        self._data, self._prepare = data, prepare
        self._indices = _shuffled(len(data.inputs), size, generator)
        self.advance(0)

    def advance(self, step: int) -> None:
        """Advance to the next batch after `step` updates."""
        chosen = next(self._indices).to(self._data.labels.device)
        self.step, self.labels = step, self._data.labels[chosen]
        self.inputs = self._prepare(self._data.inputs[chosen])


def _shuffled(n_images: int, size: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Yield the indices of batches for ever; the incomplete batch of an epoch is dropped."""
    size = min(size, n_images)
    while True:
        order = torch.randperm(n_images, generator=generator)
        yield from order[: n_images - n_images % size].split(size)


def split_digits(dtype: torch.dtype = torch.float64) -> tuple[Dataset, Dataset]:
    """Return 70 % of the digits for training and 30 % held out, (N, D): the same split for every seed."""
    data = digits(dtype=dtype)
    order = torch.randperm(len(data.inputs), generator=torch.Generator().manual_seed(0))
    cut = round(0.7 * len(order))
    train, test = (Dataset(data.inputs[part], data.labels[part], data.name) for part in (order[:cut], order[cut:]))
    return train, test


def digits_of(config: ExperimentConfig) -> tuple[Dataset, Dataset]:
    """Return the two parts of `split_digits` in the dtype and on the device of a config."""
    train, test = split_digits(getattr(torch, config.dtype))
    return on_device(train, config.device), on_device(test, config.device)


def on_device(data: Dataset, device: str) -> Dataset:
    """Return the data on a device."""
    return Dataset(data.inputs.to(device), data.labels.to(device), data.name)


def train_cleanly(model: nn.Module, batches: Batches, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Train a classifier on the images as they are."""
    for step in range(steps):
        descend(optimizer, nn.functional.cross_entropy(model(batches.inputs), batches.labels))
        batches.advance(step)


def network(
    kind: Kind, data: Dataset, *, widths: Sequence[int], activation: Activation, generator: torch.Generator
) -> nn.Module:
    """Return a classifier of flat images, its parameters drawn from `generator`.

    Args:
        kind: ``"linear"``, ``"mlp"`` (fully connected) or ``"cnn"`` (3 x 3 convolutions with stride 2).
        data: Its images, (N, D), and labels; the network has their dtype and device.
        widths: Units, or channels, of the hidden layers.
        activation: The activation between the layers.
        generator: Draws the initial parameters.
    """
    features, classes = data.inputs.shape[1], int(data.labels.max()) + 1
    made: dict[str, Any] = {"widths": widths, "activation": _ACTIVATIONS[activation], "generator": generator}
    model: nn.Module
    if kind == "linear":
        (model,) = mlp(features, classes, widths=[], generator=generator)
    elif kind == "mlp":
        model = mlp(features, classes, **made)
    else:
        side = math.isqrt(features)
        layers = small_cnn(classes, image_size=side, strides=[2] * len(widths), **made)
        model = nn.Sequential(nn.Unflatten(1, (1, side, side)), *layers)
    return model.to(data.inputs)
