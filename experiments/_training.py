"""Parts of training that the experiments share: gradients by name, small networks, and the other methods of a run."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from toolkit import unblock
from toolkit.runner import ExperimentConfig, Methods, Objective, Run

__all__ = [
    "Learner",
    "accuracy",
    "descend",
    "followed",
    "gradient_of",
    "learned",
    "methods_of",
    "perceptron",
    "run_of",
    "steps_of",
    "trained",
]

Series = Mapping[str, Sequence[float]]


def accuracy(logits: Tensor, labels: Tensor) -> float:
    """Return the share of samples whose label has the largest logit."""
    return (logits.argmax(-1) == labels).double().mean().item()


def gradient_of(output: Tensor, parameters: Mapping[str, Tensor], cotangent: Tensor | None = None) -> dict[str, Tensor]:
    """Return name -> gradient of a loss, or of the inner product of an output with a cotangent of its shape."""
    found = torch.autograd.grad(output, list(parameters.values()), cotangent)
    return dict(zip(parameters, found, strict=True))


def perceptron(
    sizes: Sequence[int],
    activation: type[nn.Module],
    *,
    generator: torch.Generator,
    dtype: torch.dtype,
    last: float = 1.0,
) -> nn.Sequential:
    """Return linear layers with activations between them.

    Args:
        sizes: The inputs, the units of each hidden layer, and the outputs.
        activation: The class of the activations.
        generator: Draws the weights, normal with a variance of one over the inputs; the biases are zero.
        dtype: Floating-point type of the parameters.
        last: Factor on the weights of the last layer.
    """
    layers: list[nn.Module] = []
    for number, (inside, outside) in enumerate(itertools.pairwise(sizes), start=2):
        layer = nn.Linear(inside, outside, dtype=dtype)
        nn.init.normal_(layer.weight, std=(last if number == len(sizes) else 1) * inside**-0.5, generator=generator)
        nn.init.zeros_(layer.bias)
        layers += [layer, activation()]
    return nn.Sequential(*layers[:-1])


# --- other methods ---------------------------------------------------------------------------------------------------


def steps_of(config: ExperimentConfig) -> tuple[int, ...]:
    """Return the steps of evaluation."""
    return tuple(sorted({*range(0, config.steps + 1, config.evaluate_every), config.steps}))


def methods_of(config: ExperimentConfig, train: Mapping[str, Callable[[], Series]], label: str = "update") -> Methods:
    """Return methods that are judged at the same steps as the run."""
    return Methods(label=label, steps=steps_of(config), train=train)


def descend(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    """Take a step of an optimiser."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def followed(
    config: ExperimentConfig, update: Callable[[int], None], judge: Callable[[], Mapping[str, float]]
) -> dict[str, Sequence[float]]:
    """Make the updates 0, 1, ..., and return the metrics at each step of evaluation."""
    found: list[Mapping[str, float]] = []
    judged = frozenset(steps_of(config))
    for step in range(config.steps + 1):
        if step in judged:
            found.append(judge())
        if step < config.steps:
            update(step)
    return {name: [each[name] for each in found] for name in found[0]}


def trained(
    config: ExperimentConfig,
    loss: Callable[[], Tensor],
    optimizer: torch.optim.Optimizer,
    advance: Callable[[int], None],
    judge: Callable[[], Mapping[str, float]],
) -> dict[str, Sequence[float]]:
    """Train by a loss, and return the metrics at each step of evaluation."""

    def update(step: int) -> None:
        descend(optimizer, loss())
        advance(step + 1)

    return followed(config, update, judge)


# --- learners --------------------------------------------------------------------------------------------------------


class Learner(Protocol):
    """A model with its batches: the parts that a run and its other methods are made of."""

    @property
    def parameters(self) -> Mapping[str, Tensor]:
        """Name -> parameter."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Updates the parameters."""

    def loss(self) -> Tensor:
        """Return the surrogate."""

    def advance(self, step: int) -> None:
        """Go on to the next batch."""

    def judge(self) -> Mapping[str, float]:
        """Return the metrics."""


def learned(config: ExperimentConfig, learner: Learner, opened: Sequence[str] = ()) -> dict[str, Sequence[float]]:
    """Train a learner with some blocks open, and return the metrics at each step of evaluation."""
    with unblock(*opened):
        return trained(config, learner.loss, learner.optimizer, learner.advance, learner.judge)


def run_of(learner: Learner, objective: Objective, target: Callable[[], Mapping[str, Tensor]], **more: Any) -> Run:
    """Return the run of a learner."""
    return Run(
        parameters=learner.parameters,
        loss=learner.loss,
        objective=objective,
        evaluate=learner.judge,
        optimizer=learner.optimizer,
        target=target,
        after_step=learner.advance,
        **more,
    )
