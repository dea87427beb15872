"""Data2vec on digits: a student that sees half of the pixels predicts the hidden layers of a teacher that sees all.

The teacher is the running average of past students. The target is the mean of its last layers, each normalised over
the features of one image, and two stops hold it: in the average, and on the target. Other methods: no average, so that
the student is its own teacher, with the stop and without it. A digit is one position here, not a sequence of them.

N images, D features, L layers.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from toolkit.adversarial.networks import mlp
from toolkit.runner import ExperimentConfig, Run
from toolkit.self_supervised import DATA2VEC_TARGET, EMA_STUDENT, data2vec_loss

from ._digits import digits_of
from ._embeddings import COLLAPSE, NEIGHBOURS, judged, spectrum_of
from ._teachers import Teacher, without_average
from ._training import gradient_of, learned, run_of
from ._views import Views

__all__ = ["Config", "Encoder", "run"]


class Config(ExperimentConfig):
    """Values of an experiment on the prediction of hidden layers.

    Attributes:
        batch_size: Number of images in a batch.
        width: Number of features of a layer, D.
        depth: Number of hidden layers of student and teacher.
        n_layers: L: the target is the mean of the teacher's last L layers.
        removed: Share of the pixels that the student lacks.
        momentum: Weight of the past in the teacher's running average.
        beta: Error up to which the loss is quadratic; beyond it, it is linear.
    """

    batch_size: Annotated[int, Field(ge=2)] = 128
    width: Annotated[int, Field(ge=2)] = 64
    depth: Annotated[int, Field(ge=1)] = 3
    n_layers: Annotated[int, Field(ge=1)] = 2
    removed: Annotated[float, Field(gt=0, lt=1)] = 0.5
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.99
    beta: Annotated[float, Field(gt=0)] = 1.0


class Encoder(nn.Module):
    """A perceptron with batch normalisation that returns its hidden layers, (depth, N, D).

    Args:
        n_inputs: Number of pixels.
        width: Number of features of a layer, D.
        depth: Number of layers.
        generator: Draws the parameters.
    """

    def __init__(self, n_inputs: int, width: int, depth: int, generator: torch.Generator) -> None:
        super().__init__()
        sizes = itertools.pairwise([n_inputs, *[width] * depth])
        self.layers = nn.ModuleList(mlp(a, b, widths=[], generator=generator) for a, b in sizes)
        self.norm = nn.BatchNorm1d(width, affine=False, track_running_stats=False)

    def forward(self, images: Tensor) -> Tensor:
        """Return the hidden layers of images (N, pixels)."""
        hidden = []
        for layer in self.layers:
            images = torch.relu(self.norm(layer(images)))
            hidden.append(images)
        return torch.stack(hidden)


class _Learner:
    """A student, its teacher, and the batches.

    Args:
        config: The values.
        seed: The seed of the run.
        average: Whether the teacher is an average; else it is the student itself.
    """

    def __init__(self, config: Config, seed: int, *, average: bool = True) -> None:
        self.train, self.test = digits_of(config)
        self.config, generator = config, torch.Generator().manual_seed(seed)
        images = self.train.inputs
        self.encoder = Encoder(images.shape[1], config.width, config.depth, generator).to(images)
        self.predictor = mlp(config.width, config.width, widths=[], generator=generator).to(images)
        self.views = Views(
            images, config.batch_size, noise=(0.0, 0.0), removed=(0.0, config.removed), generator=generator
        )
        self.parameters = {
            **dict(self.encoder.named_parameters()),
            **dict(self.predictor.named_parameters(prefix="predictor")),
        }
        self.optimizer = torch.optim.SGD(self.parameters.values(), lr=config.learning_rate, momentum=0.9)
        self._teacher = Teacher(self.encoder, config.momentum if average else 0.0)

    def outputs(self) -> tuple[Tensor, Tensor]:
        """Return the student's predictions, (N, D), and the teacher's last layers, (L, N, D)."""
        layers = self._teacher.updated()(self.views.first)[-self.config.n_layers :]
        return self.predictor(self.encoder(self.views.second)[-1]), layers

    def loss(self) -> Tensor:
        """Return the surrogate."""
        prediction, layers = self.outputs()
        return data2vec_loss(prediction, layers, beta=self.config.beta)

    def target(self) -> dict[str, Tensor]:
        """Return the blocked gradient: the slope at the prediction on paper, autograd for the network."""
        prediction, layers = self.outputs()
        with torch.no_grad():
            centred = layers - layers.mean(-1, keepdim=True)
            wanted = (centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()).mean(0)
            slope = ((prediction - wanted) / self.config.beta).clamp(-1, 1) / prediction.numel()
        return gradient_of(prediction, self.parameters, slope)

    def embeddings(self, images: Tensor) -> Tensor:
        """Return the student's last hidden layer."""
        last: Tensor = self.encoder(images)[-1]
        return last

    def judge(self) -> dict[str, float]:
        """Return the metrics."""
        return judged(self.embeddings, self.train, self.test)

    def advance(self, step: int) -> None:
        """Keep the teacher of the step, and draw the next views."""
        self._teacher.advance()
        self.views.advance(step)


def run(config: Config, seed: int) -> Run:
    """Return one seeded run."""
    made = _Learner(config, seed)

    def alone(opened: Sequence[str]) -> dict[str, Sequence[float]]:
        return learned(config, _Learner(config, seed, average=False), opened)

    return run_of(
        made,
        NEIGHBOURS,
        made.target,
        events=[COLLAPSE],
        sweep=spectrum_of(made.embeddings, made.test.inputs, config.width),
        methods=without_average(config, alone, (DATA2VEC_TARGET.name, EMA_STUDENT.name)),
    )
