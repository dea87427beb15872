"""How a run is trained and measured."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from toolkit.blocks import unblock
from toolkit.runner._config import ExperimentConfig
from toolkit.runner._experiment import Methods, Run

__all__ = ["Training", "measure_sweep", "train", "train_methods"]


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


def measure_sweep(run: Run, opened: Collection[str]) -> dict[str, list[float]]:
    """Return the times of a sweep while some blocks are open, each for every value."""
    if run.sweep is None or not run.sweep.times:
        return {}
    with unblock(*opened):
        return {name: [float(value) for value in measure()] for name, measure in run.sweep.times.items()}


def train(run: Run, config: ExperimentConfig, on_step: Callable[[], None] = lambda: None) -> Training:
    """Train a run for `config.steps` steps, and evaluate its metrics every `config.evaluate_every` steps."""
    steps: list[int] = []
    metrics: dict[str, list[float]] = {}
    first_loss, diverged_at = math.nan, None
    for step in range(config.steps + 1):
        if step % config.evaluate_every == 0 or step == config.steps:
            steps.append(step)
            found = run.evaluate()
            if "objective" not in found:
                raise ValueError(f"`evaluate` should return a metric 'objective'. Found {sorted(found)}.")
            for name, value in found.items():
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
        swept |= {name: [math.nan] * len(run.sweep.values) for name in run.sweep.times}  # measured later
    return Training(first_loss, steps, metrics, diverged_at, swept)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
