"""MixStyle on digits: a network sees digits in two styles, and is asked about a third one.

A style is a contrast and a brightness: an image x becomes ``a x + b``. After the first convolution each image gets a
mixture of its own style and that of another image of the batch, in training alone. Other method: no mixing.

N images, C channels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from toolkit.adversarial.networks import small_cnn
from toolkit.runner import ExperimentConfig, Objective, Run
from toolkit.weighting import mixstyle

from ._digits import Batches, digits_of
from ._training import accuracy, gradient_of, learned, methods_of, run_of

__all__ = ["Config", "run"]

Mix = Callable[[Tensor, Tensor, Tensor], Tensor]


class Config(ExperimentConfig):
    """Values of an experiment on mixed styles.

    Attributes:
        batch_size: Number of images in a batch.
        widths: Channels of the two convolutions.
        seen: Styles of the training images, pairs of contrast and brightness: the first half of a batch has the
            first one, the rest the second.
        unseen: Style of the held-out images.
    """

    batch_size: Annotated[int, Field(ge=2)] = 64
    widths: Annotated[list[Annotated[int, Field(ge=1)]], Field(min_length=2, max_length=2)]
    seen: Annotated[list[list[float]], Field(min_length=2, max_length=2)]
    unseen: Annotated[list[float], Field(min_length=2, max_length=2)]


def _styled(images: Tensor, style: Sequence[float]) -> Tensor:
    contrast, brightness = style
    return contrast * images + brightness


class _Learner:
    """A convolutional network, its batches in two styles, and the partners and shares of the mixture.

    Args:
        config: The values.
        seed: The seed of the run.
        mix: Mixes styles, `mixstyle` or a function of the same arguments.
    """

    def __init__(self, config: Config, seed: int, mix: Mix = mixstyle) -> None:
        train, self.test = digits_of(config)
        self.config, self._mix, self._generator = config, mix, torch.Generator().manual_seed(seed)
        self._side = math.isqrt(train.inputs.shape[1])
        classes = int(train.labels.max()) + 1
        made = small_cnn(
            classes, image_size=self._side, widths=config.widths, strides=[1, 2], generator=self._generator
        )
        first, activation, *rest = made.to(train.inputs)
        self._first, self._rest = nn.Sequential(first, activation), nn.Sequential(*rest)
        self.parameters: dict[str, Tensor] = dict(made.named_parameters())
        self.optimizer = torch.optim.Adam(self.parameters.values(), lr=config.learning_rate)
        self.batches = Batches(train, config.batch_size, self._generator)
        self._draw()

    def _draw(self) -> None:
        """Draw the partner of each image and the share of its own style."""
        n, like = len(self.batches.inputs), self.batches.inputs
        self._partners = torch.randperm(n, generator=self._generator).to(like.device)
        self._shares = torch.rand(n, generator=self._generator, dtype=like.dtype).to(like)

    def loss(self, mix: Mix | None = None) -> Tensor:
        """Return the cross entropy of a batch in both styles with mixed features.

        Args:
            mix: Instead of the learner's.
        """
        one, other = self.batches.inputs.tensor_split(2)
        images = torch.cat([_styled(one, self.config.seen[0]), _styled(other, self.config.seen[1])])
        features = (mix or self._mix)(self._first(self._squares(images)), self._partners, self._shares)
        return functional.cross_entropy(self._rest(features), self.batches.labels)

    def _squares(self, images: Tensor) -> Tensor:
        return images.reshape(-1, 1, self._side, self._side)

    def advance(self, step: int) -> None:
        """Draw the next batch, and its partners."""
        self.batches.advance(step)
        self._draw()

    @torch.no_grad()
    def judge(self) -> dict[str, float]:
        """Return the metrics on held-out images, without mixing."""
        found = {}
        for name, style in (("unseen", self.config.unseen), ("seen", self.config.seen[0])):
            logits = self._rest(self._first(self._squares(_styled(self.test.inputs, style))))
            found[name] = functional.cross_entropy(logits, self.test.labels).item()
            found[f"accuracy, {name} style"] = accuracy(logits, self.test.labels)
        return {"objective": found.pop("unseen"), "cross entropy, seen style": found.pop("seen"), **found}


def _scaled_and_shifted(features: Tensor, partners: Tensor, shares: Tensor) -> Tensor:
    """Return ``a h + b`` with numbers a, b of each channel, as on paper; features have two dimensions of places."""
    places = features.detach().flatten(2)
    mean = places.mean(2)
    std = (((places - mean[..., None]) ** 2).sum(2) / (places.shape[2] - 1) + 1e-6).sqrt()
    own = shares[:, None]
    factor = (own * std + (1 - own) * std[partners]) / std
    offset = own * mean + (1 - own) * mean[partners] - factor * mean
    return factor[..., None, None] * features + offset[..., None, None]


def _unmixed(features: Tensor, partners: Tensor, shares: Tensor) -> Tensor:
    return features


def run(config: Config, seed: int) -> Run:
    """Return one seeded run."""
    made = _Learner(config, seed)

    def unmixed() -> Mapping[str, Sequence[float]]:
        return learned(config, _Learner(config, seed, _unmixed))

    return run_of(
        made,
        Objective(label="cross entropy in the unseen style (nats per image)", higher_is_better=False),
        lambda: gradient_of(made.loss(_scaled_and_shifted), made.parameters),
        methods=methods_of(config, {"no mixing": unmixed}),
    )
