"""Trains a run, evaluates its metrics, and refuses a run that is not repeatable."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from toolkit.blocks import unblock
from toolkit.gradients.verdict import finite
from toolkit.runner._config import ExperimentConfig
from toolkit.runner._experiment import Methods, Run
from toolkit.runner._rounding import OF_ONE_PASS

__all__ = ["RunError", "Training", "alike", "measure_sweep", "metrics_of", "rehearse", "train", "train_methods"]

REHEARSED = 3  # steps: the third has another batch, and updates before it


class RunError(Exception):
    """A run that cannot be compared; its text says why."""


@dataclass(frozen=True)
class Training:
    """The result of training one variant.

    Attributes:
        losses: The surrogate before each of the first `REHEARSED` updates.
        steps: The numbers of updates after which the metrics were evaluated; the first is 0.
        metrics: Name -> value at each of these steps.
        diverged_at: The step at which the loss was not finite, or None. Nothing is recorded after it.
        sweep: Results of `Run.sweep` after training; None if there is no sweep, or the run diverged.
    """

    losses: list[float]
    steps: list[int]
    metrics: dict[str, list[float]]
    diverged_at: int | None
    sweep: dict[str, list[float]] | None = None

    @property
    def first_loss(self) -> float:
        """The surrogate before the first update."""
        return self.losses[0]

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain JSON; values that are not finite become None."""
        return {
            "first_loss": finite(self.first_loss),
            "steps": self.steps,
            "metrics": _finite(self.metrics),
            "diverged_at": self.diverged_at,
            "sweep": None if self.sweep is None else _finite(self.sweep),
        }


def train_methods(methods: Methods, on_method: Callable[[str], None] = lambda name: None) -> dict[str, dict[str, Any]]:
    """Train each method; return name -> its metrics, and None for the seconds of a step, which are measured later.

    Raises:
        RunError: If a metric has neither a value for every step nor a single one, or ``"objective"`` is missing.
    """
    trained = {}
    for name, method in methods.train.items():
        on_method(name)
        series = _series(repr(name), method(), len(methods.steps), or_one=True)
        if "objective" not in series:
            raise RunError(f"{name!r} should have values of 'objective'. Found {', '.join(sorted(series)) or 'none'}.")
        trained[name] = {"metrics": _finite(series), "seconds_per_step": None}
    return trained


def measure_sweep(run: Run, opened: Collection[str]) -> dict[str, list[float]]:
    """Return the times of a sweep while some blocks are open, each for every value."""
    if run.sweep is None or not run.sweep.times:
        return {}
    with unblock(*opened):
        times = {name: measure() for name, measure in run.sweep.times.items()}
    return _series("`sweep.times`", times, len(run.sweep.values))


def _series(what: str, found: object, count: int, *, or_one: bool = False) -> dict[str, list[float]]:
    """Return name -> numbers, as many as there are steps or swept values.

    Raises:
        RunError: If something else is found.
    """
    if not isinstance(found, Mapping):
        raise RunError(f"{what} should return a dict of lists of numbers. Found {type(found).__name__}.")
    series = {}
    for name, values in found.items():
        try:
            series[name] = [float(value) for value in values]
        except (TypeError, ValueError):
            raise RunError(f"{what} should return a list of numbers as {name!r}. Found {values!r}.") from None
        if len(series[name]) != count and not (or_one and len(series[name]) == 1):
            more = ", or 1" if or_one else ""
            raise RunError(f"{what} should have {count} values of {name!r}{more}. Found {len(series[name])}.")
    return series


def train(run: Run, config: ExperimentConfig, on_step: Callable[[], None] = lambda: None) -> Training:
    """Train a run for `config.steps` steps, and evaluate its metrics every `config.evaluate_every` steps.

    Raises:
        RunError: If the metrics are not numbers, change their names, or the objective is not finite before training.
    """
    steps: list[int] = []
    metrics: dict[str, list[float]] = {}
    losses: list[float] = []
    diverged_at = None
    for step in range(config.steps + 1):
        if step % config.evaluate_every == 0 or step == config.steps:
            steps.append(step)
            found = metrics_of(run)
            if step == 0 and not math.isfinite(found["objective"]):
                raise RunError(
                    f"The objective should be finite before training. Found {found['objective']}: "
                    "look at the data and the initial parameters of `run`."
                )
            if step and found.keys() != metrics.keys():
                raise RunError(
                    f"`evaluate` should return the same metrics each time, {', '.join(sorted(metrics))}. "
                    f"Found {', '.join(sorted(found))} after step {step}."
                )
            for name, value in found.items():
                metrics.setdefault(name, []).append(value)
        if step == config.steps:
            break
        value = _updated(run, step)
        if step < REHEARSED:
            losses.append(value)
        if not math.isfinite(value):
            diverged_at = step
            break
        on_step()
    swept = None
    if run.sweep is not None and diverged_at is None:
        swept = _series("`sweep.evaluate`", run.sweep.evaluate(), len(run.sweep.values))
        swept |= {name: [math.nan] * len(run.sweep.values) for name in run.sweep.times}  # measured later
    return Training(losses, steps, metrics, diverged_at, swept)


def rehearse(run: Run, config: ExperimentConfig) -> Training:
    """Train a run for its first steps, and evaluate it once.

    Raises:
        RunError: If its loss or its metrics change a parameter.
    """
    start = {name: value.clone() for name, value in run.parameters.items()}
    metrics = {name: [value] for name, value in metrics_of(run).items()}
    _check_unchanged("evaluate", run, start)
    for name, value in metrics_of(run).items():
        if not alike(value, metrics[name][0], OF_ONE_PASS[config.dtype]):
            raise RunError(f"`evaluate` should return the same when it is called again. Found another {name!r}.")
    losses: list[float] = []
    for step in range(min(REHEARSED, config.steps)):
        losses.append(_updated(run, step, start if step == 0 else None))
        if not math.isfinite(losses[-1]):
            break
    return Training(losses, [0], metrics, None)


def _updated(run: Run, step: int, start: Mapping[str, Tensor] | None = None) -> float:
    """Take a step of training if the loss is finite, and return the loss; with `start`, it should change no value."""
    run.optimizer.zero_grad()
    loss = run.loss()
    if start is not None:
        _check_unchanged("loss", run, start)
    value = loss.item()
    if math.isfinite(value):
        loss.backward()
        run.optimizer.step()
        run.after_step(step + 1)
    return value


def alike(one: float, two: float, rounding: float) -> bool:
    """Return whether two numbers are equal up to rounding, or both NaN."""
    return math.isclose(one, two, rel_tol=rounding, abs_tol=rounding) or (math.isnan(one) and math.isnan(two))


def _check_unchanged(function: str, run: Run, start: Mapping[str, Tensor]) -> None:
    for name, value in run.parameters.items():
        if not torch.equal(value, start[name]) and not value.isnan().any():
            raise RunError(f"`{function}` should not change a parameter. Found another {name!r} after it.")


def metrics_of(run: Run) -> dict[str, float]:
    """Return the metrics of a run at its current parameters.

    Raises:
        RunError: If they are not a mapping of names to numbers, or ``"objective"`` is missing.
    """
    found = run.evaluate()
    if not isinstance(found, Mapping):
        raise RunError(f"`evaluate` should return a dict of metrics. Found {type(found).__name__}.")
    if "objective" not in found:
        raise RunError(f"`evaluate` should return a metric 'objective'. Found {sorted(found)}.")
    metrics = {}
    for name, value in found.items():
        try:
            metrics[name] = float(value)
        except (TypeError, ValueError, RuntimeError):
            shown = f"a tensor of shape {tuple(value.shape)}" if hasattr(value, "shape") else repr(value)
            raise RunError(f"`evaluate` should return one number a metric. Found {shown} as {name!r}.") from None
    return metrics


def _finite(series: Mapping[str, list[float]]) -> dict[str, list[float | None]]:
    return {name: [finite(value) for value in values] for name, values in series.items()}
