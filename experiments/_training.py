"""Gradients by name, and the training loop of the other methods that experiments compare their variants with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from toolkit.runner import ExperimentConfig

__all__ = ["gradient_of", "steps_of", "trained"]


def gradient_of(output: Tensor, parameters: Mapping[str, Tensor], cotangent: Tensor | None = None) -> dict[str, Tensor]:
    """Return name -> gradient of a loss, or of the inner product of an output with a cotangent of its shape."""
    found = torch.autograd.grad(output, list(parameters.values()), cotangent)
    return dict(zip(parameters, found, strict=True))


def steps_of(config: ExperimentConfig) -> tuple[int, ...]:
    """Return the steps of evaluation."""
    return tuple(sorted({*range(0, config.steps + 1, config.evaluate_every), config.steps}))


def trained(
    config: ExperimentConfig,
    loss: Callable[[], Tensor],
    optimizer: torch.optim.Optimizer,
    advance: Callable[[int], None],
    judge: Callable[[], Mapping[str, float]],
) -> dict[str, Sequence[float]]:
    """Train by a loss, and return the metrics at each step of evaluation."""
    found: list[Mapping[str, float]] = []
    judged = frozenset(steps_of(config))
    for step in range(config.steps + 1):
        if step in judged:
            found.append(judge())
        if step < config.steps:
            optimizer.zero_grad()
            loss().backward()
            optimizer.step()
            advance(step + 1)
    return {name: [each[name] for each in found] for name in found[0]}
