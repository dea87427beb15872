"""GradNorm on digits: three tasks of very different size share a layer, and learn how much each of them counts.

The tasks are the digit (cross entropy in nats), its pixels, and its centre of mass (mean squared errors). The weights
are trained so that the gradients of all tasks have the same norm at the shared layer, and are divided by their mean
after each step, as in the paper. Other methods: the weights stay equal; and the weights are not divided, with the
stop and without it.

N images, T tasks, G norms of gradients, w weights of losses.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from toolkit.adversarial.networks import mlp
from toolkit.runner import Event, ExperimentConfig, Objective, Run
from toolkit.weighting import GRADNORM_TARGET, gradnorm_loss

from ._digits import Batches, digits_of
from ._training import gradient_of, learned, methods_of, run_of

__all__ = ["Config", "run"]

_LEAST = 1e-3  # of a weight, so that none changes its sign
_TOTAL = "mean weight"


class Config(ExperimentConfig):
    """Values of an experiment on weights of tasks.

    Attributes:
        batch_size: Number of images in a batch.
        width: Number of units in the shared layer.
        alpha: Strength that pulls slow tasks forward.
        weight_rate: Learning rate of the weights.
    """

    batch_size: Annotated[int, Field(ge=1)] = 128
    width: Annotated[int, Field(ge=1)] = 64
    alpha: Annotated[float, Field(ge=0)] = 1.5
    weight_rate: Annotated[float, Field(gt=0)] = 0.025


def _centre(images: Tensor) -> Tensor:
    """Return the centre of mass of square images (N, pixels), (N, 2), as shares of the side."""
    side = math.isqrt(images.shape[1])
    places = (torch.arange(side, dtype=images.dtype, device=images.device) + 0.5) / side
    squares = images.reshape(-1, side, side)
    mass = squares.sum((1, 2))[:, None]
    return torch.stack([squares.sum(2) @ places, squares.sum(1) @ places], 1) / mass


class _Learner:
    """A shared layer, three heads, and the weights of their losses.

    Args:
        config: The values.
        seed: The seed of the run.
        learns: Whether the weights are learnt.
        divided: Whether they are divided by their mean after each step.
    """

    def __init__(self, config: Config, seed: int, *, learns: bool = True, divided: bool = True) -> None:
        train, self.test = digits_of(config)
        self.config, self._learns, self._divided = config, learns, divided
        generator = torch.Generator().manual_seed(seed)
        pixels, classes = train.inputs.shape[1], int(train.labels.max()) + 1
        sizes = {"shared": (pixels, config.width), **{
            name: (config.width, size) for name, size in (("digit", classes), ("pixels", pixels), ("centre", 2))
        }}  # fmt: skip
        networks = {name: mlp(a, b, widths=[], generator=generator) for name, (a, b) in sizes.items()}
        self.networks = nn.ModuleDict(networks).to(train.inputs)
        self.weights = train.inputs.new_ones(3).requires_grad_()
        self.parameters: dict[str, Tensor] = {**dict(self.networks.named_parameters()), "weights": self.weights}
        self.batches = Batches(train, config.batch_size, generator)
        self._middle, self._spread = _centre(train.inputs).mean(0), _centre(train.inputs).std(0)
        with torch.no_grad():
            self._first = self.losses(self.batches.inputs, self.batches.labels)
            self._constants = torch.stack(
                [
                    self._entropy(),
                    self.test.inputs.var(0).mean(),
                    (_centre(self.test.inputs) / self._spread).var(0).mean(),
                ]
            )
        self.optimizer = torch.optim.SGD(self.networks.parameters(), lr=config.learning_rate, momentum=0.9)
        self.optimizer.add_param_group({"params": [self.weights], "lr": config.weight_rate, "momentum": 0.0})

    def _entropy(self) -> Tensor:
        """Return the cross entropy of the best constant answer."""
        shares = torch.bincount(self.test.labels) / len(self.test.labels)
        entropy: Tensor = torch.special.entr(shares).sum().to(self.test.inputs)
        return entropy

    def losses(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return the losses of the tasks, (3,)."""
        centres = (_centre(images) - self._middle) / self._spread
        hidden = torch.relu(self.networks["shared"](images))
        return torch.stack(
            [
                functional.cross_entropy(self.networks["digit"](hidden), labels),
                functional.mse_loss(self.networks["pixels"](hidden), images),
                functional.mse_loss(self.networks["centre"](hidden), centres),
            ]
        )

    def _norms(self, losses: Tensor) -> Tensor:
        """Return G, (3,)."""
        shared = self.parameters["shared.0.weight"]
        return torch.stack([torch.autograd.grad(loss, shared, retain_graph=True)[0].norm() for loss in losses])

    def loss(self) -> Tensor:
        """Return the weighted losses, with constant weights, plus the loss of the weights."""
        losses = self.losses(self.batches.inputs, self.batches.labels)
        total = (self.weights.detach() * losses).sum()
        if not self._learns:
            return total
        return total + gradnorm_loss(
            self.weights, self._norms(losses), losses.detach(), self._first, alpha=self.config.alpha
        )

    def target(self) -> dict[str, Tensor]:
        """Return the blocked gradient: that of the weighted losses, and each norm with the sign of its excess."""
        losses = self.losses(self.batches.inputs, self.batches.labels)
        norms, weights = self._norms(losses), self.weights.detach()
        networks = {name: value for name, value in self.parameters.items() if name != "weights"}
        found = gradient_of((weights * losses).sum(), networks)
        progress = losses.detach() / self._first
        goal = (weights * norms).mean() * (progress / progress.mean()) ** self.config.alpha
        return {**found, "weights": norms * (weights * norms - goal).sign()}

    def advance(self, step: int) -> None:
        """Divide the weights by their mean, and draw the next batch."""
        with torch.no_grad():
            self.weights.clamp_(min=_LEAST)
            if self._divided:
                self.weights.div_(self.weights.mean())
        self.batches.advance(step)

    def judge(self) -> dict[str, float]:
        """Return the metrics on held-out images."""
        losses = self.losses(self.batches.inputs, self.batches.labels)
        norms = self._norms(losses) * self.weights.detach()
        with torch.no_grad():
            shares = self.losses(self.test.inputs, self.test.labels) / self._constants
        digit, pixels, centre = shares.tolist()
        return {
            "objective": shares.mean().item(),
            "digit": digit,
            "pixels": pixels,
            "centre of mass": centre,
            "largest gradient over the smallest": (norms.max() / norms.min()).item(),
            _TOTAL: self.weights.mean().item(),
        }


def run(config: Config, seed: int) -> Run:
    """Return one seeded run."""
    made = _Learner(config, seed)

    def other(opened: Sequence[str], *, learns: bool = True) -> Mapping[str, Sequence[float]]:
        return learned(config, _Learner(config, seed, learns=learns, divided=False), opened)

    others = {
        "equal weights": partial(other, (), learns=False),
        "weights not divided, with the stop": partial(other, ()),
        "weights not divided, without the stop": partial(other, (GRADNORM_TARGET.name,)),
    }
    return run_of(
        made,
        Objective(label="held-out loss, as a share of that of the best constants", higher_is_better=False),
        made.target,
        events=[Event(says="the weights fell below half of their start", metric=_TOTAL, below=0.5)],
        methods=methods_of(config, others),
    )
