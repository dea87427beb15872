"""One run of an experiment: the interface of an experiment's module, and how a run is trained and measured."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from experiments._config import ExperimentConfig

__all__ = ["Event", "Methods", "Objective", "Run", "Sweep", "Training", "train", "train_methods"]


@dataclass(frozen=True, kw_only=True)
class Objective:
    """The measure of training: the same quantity for every variant, never the surrogate.

    Attributes:
        label: The quantity with its unit: ``"log-likelihood (nats per sample)"``.
        higher_is_better: Whether training should raise it.
        best: The optimum, where it is known exactly.
    """

    label: str
    higher_is_better: bool
    best: float | None = None


@dataclass(frozen=True, kw_only=True)
class Event:
    """A possible outcome of a run, which the report counts over the seeds.

    Attributes:
        says: The event as a clause: ``"a component died"``.
        metric: The name of a metric of `Run.evaluate` or of `Run.sweep`, taken after training.
        below: The event happened if the metric is less than this.
        above: The event happened if the metric is more than this. Exactly one of the two limits is given.

    Raises:
        ValueError: If both limits are given, or neither.
    """

    says: str
    metric: str
    below: float | None = None
    above: float | None = None

    def __post_init__(self) -> None:
        if (self.below is None) == (self.above is None):
            raise ValueError(
                f"An event should have one limit, `below` or `above`. Found {self.below} and {self.above}."
            )

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain JSON."""
        return dataclasses.asdict(self)


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Results of a run for each value of a swept quantity; the problems are trained side by side.

    Attributes:
        label: The quantity, with its unit.
        values: Its values.
        evaluate: Computes name -> one number for each value, after training, without side effects on the run. A number
            that does not exist is NaN.
    """

    label: str
    values: tuple[float, ...]
    evaluate: Callable[[], Mapping[str, Sequence[float]]]


@dataclass(frozen=True, kw_only=True)
class Methods:
    """Other ways to learn the same model from the same data, as a comparison for the variants.

    Attributes:
        label: The name of one step: ``"update"``.
        steps: The steps at which they are evaluated.
        train: Name of a method -> function that trains it from its start and returns its metrics, as `Run.evaluate`
            does, at each of `steps`; one number each if only the end is known. The function does not change the run,
            and all its randomness comes from the seed.
    """

    label: str
    steps: tuple[int, ...]
    train: Mapping[str, Callable[[], Mapping[str, Sequence[float]]]]


@dataclass(frozen=True, kw_only=True)
class Run:
    """One seeded run, ready to train. `run(config, seed)` of an experiment makes a new one for every variant.

    Two runs of the same config and seed must be identical: all randomness comes from generators that are seeded with
    `seed` for each run. Only the open blocks may make a difference.

    Attributes:
        parameters: Name -> leaf tensor with ``requires_grad``; training updates them in place.
        loss: Computes the surrogate on the current batch: a scalar whose gradient is used for the update. Its value
            must not depend on which blocks are open.
        objective: The measure by which the variants are compared.
        evaluate: Computes the metrics at the current parameters, without side effects on the run; the key
            ``"objective"`` is required, others are drawn as well.
        optimizer: Updates the parameters.
        target: Computes the stated target of the *blocked* gradient at the current parameters by an independent
            witness, by parameter name, for the draws that the next call of `loss` would make. None: this config has no
            witness.
        after_step: Called after every update with the step's number (from 1): next batch, learning rate.
        events: Possible outcomes of a run, counted over the seeds.
        sweep: Results for each value of a swept quantity, or None.
        methods: Other ways to learn the same model, or None.
    """

    parameters: Mapping[str, Tensor]
    loss: Callable[[], Tensor]
    objective: Objective
    evaluate: Callable[[], Mapping[str, float]]
    optimizer: torch.optim.Optimizer
    target: Callable[[], Mapping[str, Tensor]] | None = None
    after_step: Callable[[int], None] = field(default=lambda step: None)
    events: Sequence[Event] = ()
    sweep: Sweep | None = None
    methods: Methods | None = None


@dataclass(frozen=True)
class Training:
    """The result of training one variant.

    Attributes:
        first_loss: The surrogate before the first update.
        steps: The steps at which the metrics were evaluated; the step counts the updates before it.
        metrics: Name -> value at each of these steps.
        diverged_at: The step at which the loss was not finite, or None. Nothing is recorded after it.
        sweep: Results of `Run.sweep` after training; None if there is no sweep, or the run diverged.
    """

    first_loss: float
    steps: list[int]
    metrics: dict[str, list[float]]
    diverged_at: int | None
    sweep: dict[str, list[float]] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain JSON; values that are not finite become None."""
        return {
            "first_loss": _finite(self.first_loss),
            "steps": self.steps,
            "metrics": {name: [_finite(value) for value in values] for name, values in self.metrics.items()},
            "diverged_at": self.diverged_at,
            "sweep": None
            if self.sweep is None
            else {name: [_finite(value) for value in values] for name, values in self.sweep.items()},
        }


def train_methods(methods: Methods, on_method: Callable[[str], None] = lambda name: None) -> dict[str, dict[str, Any]]:
    """Train each method, and return name -> its metrics and its processor time in seconds.

    Raises:
        ValueError: If a metric does not have a value for every step, or a single one.
    """
    trained = {}
    for name, method in methods.train.items():
        on_method(name)
        begin = time.process_time()
        metrics = {metric: [_finite(float(value)) for value in values] for metric, values in method().items()}
        seconds = time.process_time() - begin
        for metric, values in metrics.items():
            if len(values) not in (1, len(methods.steps)):
                raise ValueError(
                    f"{name!r} should have {len(methods.steps)} values of {metric!r}, or 1. Found {len(values)}."
                )
        trained[name] = {"metrics": metrics, "seconds": seconds}
    return trained


def train(run: Run, config: ExperimentConfig, on_step: Callable[[], None] = lambda: None) -> Training:
    """Train a run for `config.steps` steps, and evaluate its metrics every `config.evaluate_every` steps."""
    steps: list[int] = []
    metrics: dict[str, list[float]] = {}
    first_loss, diverged_at = math.nan, None
    for step in range(config.steps + 1):
        if step % config.evaluate_every == 0 or step == config.steps:
            steps.append(step)
            for name, value in run.evaluate().items():
                metrics.setdefault(name, []).append(float(value))
        if step == config.steps:
            break
        run.optimizer.zero_grad()
        loss = run.loss()
        value = loss.item()
        if step == 0:
            first_loss = value
        if not math.isfinite(value):
            diverged_at = step
            break
        loss.backward()
        run.optimizer.step()
        run.after_step(step + 1)
        on_step()
    swept = None
    if run.sweep is not None and diverged_at is None:
        swept = {name: [float(value) for value in values] for name, values in run.sweep.evaluate().items()}
    return Training(first_loss, steps, metrics, diverged_at, swept)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
