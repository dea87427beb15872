"""One run of an experiment: what an experiment tells the machinery, and how it is trained and measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

__all__ = ["Objective", "Run"]


@dataclass(frozen=True, kw_only=True)
class Objective:
    """What training is judged by: the same quantity for every variant, never the surrogate.

    Attributes:
        label: What it is, with its unit: ``"log-likelihood (nats per sample)"``.
        higher_is_better: Whether training should raise it.
        best: The best value that can be reached, where it is known exactly.
    """

    label: str
    higher_is_better: bool
    best: float | None = None


@dataclass(frozen=True, kw_only=True)
class Run:
    """One seeded run, ready to train. `run(config, seed)` of an experiment makes a new one for every variant.

    Two runs of the same config and seed must be identical: all randomness comes from generators that are seeded with
    `seed` and made anew. Only the blocks that are open may make a difference.

    Attributes:
        parameters: Name -> leaf tensor with ``requires_grad``; training updates them in place.
        loss: Computes the surrogate on the current batch: a scalar whose gradient is used for the update. Its value
            must not depend on which blocks are open.
        objective: What the variants are compared by.
        evaluate: Computes the metrics at the current parameters, without side effects on the run; the key
            ``"objective"`` is required, others are drawn as well.
        optimizer: Updates the parameters.
        target: Computes the stated target of the *blocked* gradient at the current parameters by an independent
            witness, in the parameters' names. None if there is none for this config.
        after_step: Called after every update with the step's number (from 1): next batch, learning rate.
    """

    parameters: Mapping[str, Tensor]
    loss: Callable[[], Tensor]
    objective: Objective
    evaluate: Callable[[], Mapping[str, float]]
    optimizer: torch.optim.Optimizer
    target: Callable[[], Mapping[str, Tensor]] | None = None
    after_step: Callable[[int], None] = field(default=lambda step: None)
