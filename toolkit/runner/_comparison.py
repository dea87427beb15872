"""Runs a config with its blocks in place and with each of them open, and records the difference."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from toolkit.blocks import declared_blocks, unblock
from toolkit.gradients import compare, measure_memory
from toolkit.gradients.memory import MemoryUse
from toolkit.gradients.verdict import finite
from toolkit.runner._config import ExperimentConfig, LoadedConfig
from toolkit.runner._experiment import Methods, Run
from toolkit.runner._records import (
    environment,
    is_finished,
    lacks_seconds,
    results_folder,
    variant_name,
    write_record,
    write_times,
)
from toolkit.runner._rounding import OF_ONE_PASS
from toolkit.runner._training import RunError, Training, alike, measure_sweep, rehearse, train, train_methods

__all__ = ["RunError", "folder_of", "record_of", "run_config", "times_of"]

Variant = frozenset[str]

# Rounds in which the variants are timed in turn: enough for a steady median, short beside the training.
_TIMING_ROUNDS = 15
_TIMING_SECONDS = 0.5


def run_config(loaded: LoadedConfig, root: Path, *, on_method: Callable[[str], None] = lambda name: None) -> Path:
    """Run every seed of a config that has no record yet, one after the other, and return the folder of the records.

    Args:
        loaded: The config.
        root: The results folder.
        on_method: Called with the name of each of the other methods before it is trained.

    Raises:
        RunError: As `record_of`.
    """
    folder = folder_of(loaded, root)
    for seed in range(loaded.config.seeds):
        if not is_finished(folder, seed):
            write_record(folder, seed, *record_of(loaded, seed, on_method=on_method))
        if lacks_seconds(folder, seed):
            write_times(folder, seed, times_of(loaded, seed))
    return folder


def folder_of(loaded: LoadedConfig, root: Path) -> Path:
    """Return the folder of a config's records."""
    return results_folder(root, loaded.name, loaded.config.resolved())


def record_of(
    loaded: LoadedConfig,
    seed: int,
    *,
    on_step: Callable[[], None] = lambda: None,
    on_method: Callable[[str], None] = lambda name: None,
) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """Train every variant of one seed; return its record and its gradients.

    Times are left out, and measured later.

    Raises:
        RunError: If two variants differ before any gradient was used, or the program does not reach an opened block.
    """
    config = loaded.config
    torch.set_num_threads(config.threads)
    started = datetime.now(UTC)

    make = partial(_made, loaded, seed)
    first = _Gradients(make(), config.variants)
    memory = {variant: _memory(make(), variant) for variant in config.variants}
    rehearsal = rehearse(make(), config)
    begin = time.perf_counter()  # the first seed of a process has imported all that it needs
    trained, end = _train_variants(make, config, on_step)
    last = first if end is None else _Gradients(end, config.variants)
    _check_repeats(rehearsal, trained[frozenset()], OF_ONE_PASS[config.dtype])
    _check_first_losses(trained, OF_ONE_PASS[config.dtype])
    run = make()
    _check_names(run, trained[frozenset()])
    variants = {
        variant_name(variant): {
            "open": sorted(variant),
            **training.to_dict(),
            "seconds_per_step": None,
            "graph_bytes": memory[variant].graph,
            "peak_bytes": memory[variant].peak,
        }
        for variant, training in trained.items()
    }
    known = declared_blocks()
    data = {
        "name": loaded.name,
        "path": str(loaded.path),
        "seed": seed,
        "started": started.isoformat(timespec="seconds"),
        "source": loaded.source,
        "overrides": list(loaded.overrides),
        "config": config.resolved(),
        "about": (loaded.module.__doc__ or "").strip(),
        **environment(config.threads),
        "blocks": {name: known[name].why for variant in config.variants for name in sorted(variant)},
        **_description(run),
        "methods": None if run.methods is None else _methods(run.methods, on_method),
        "comparison": {"first": first.to_dict(), "last": last.to_dict()},
        "variants": variants,
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": time.perf_counter() - begin,
    }
    arrays = {
        f"{when}/{key}": value
        for when, part in (("first", first), ("last", last))
        for key, value in part.arrays.items()
    }
    return data, arrays


def _train_variants(
    make: Callable[[], Run], config: ExperimentConfig, on_step: Callable[[], None]
) -> tuple[dict[Variant, Training], Run | None]:
    """Return the training of every variant, and the run with all blocks in place at its end, None if it diverged."""
    trained: dict[Variant, Training] = {}
    end = None
    for variant in config.variants:
        run = make()
        with unblock(*variant):
            trained[variant] = train(run, config, on_step)
        if not variant and trained[variant].diverged_at is None:
            end = run
    return trained, end


def _description(run: Run) -> dict[str, Any]:
    """Return the labels of a run and the values of its sweep, as plain JSON."""
    sweep = run.sweep
    return {
        "objective": dataclasses.asdict(run.objective),
        "events": [event.to_dict() for event in run.events],
        "sweep": None if sweep is None else {"label": sweep.label, "values": list(sweep.values)},
        "plane": run.plane,
    }


def _methods(methods: Methods, on_method: Callable[[str], None]) -> dict[str, Any]:
    return {"label": methods.label, "steps": list(methods.steps), "trained": train_methods(methods, on_method)}


def _made(loaded: LoadedConfig, seed: int) -> Run:
    run = loaded.module.run(loaded.config, seed)
    if not isinstance(run, Run):
        raise RunError(f"`run` of the experiment should return a Run. Found {run!r}.")
    return run


class _Gradients:
    """The gradients of every variant at the present parameters of a run, and their distances from the target."""

    def __init__(self, run: Run, variants: list[Variant]) -> None:
        comparison = compare(run.loss, run.parameters)
        met = list(comparison.meetings)
        unmet = sorted(frozenset().union(*variants).difference(met))
        if unmet:
            raise RunError(
                f"`open` should name blocks that the program meets with these values: {', '.join(met) or 'none'}. "
                f"Found {', '.join(unmet)}."
            )
        target = None if run.target is None else _target(run.target(), comparison.blocked)
        self._comparison = comparison
        self._variants = variants
        self.arrays: dict[str, NDArray[Any]] = {}
        self._errors: dict[str, float | None] = {}
        for variant in variants:
            gradient = {name: value.cpu() for name, value in comparison.gradient(variant).items()}
            name = variant_name(variant)
            self.arrays.update({f"{name}/{key}": value.double().numpy() for key, value in gradient.items()})
            self._errors[name] = None if target is None else _relative_error(gradient, target)

    def to_dict(self) -> dict[str, Any]:
        met = self._comparison.to_dict()
        effects = {
            variant_name(variant): self._comparison.effect(sorted(variant)).to_dict()
            for variant in self._variants
            if variant
        }
        return {**met, "effects": effects, "target_error": self._errors}


def _check_repeats(rehearsal: Training, training: Training, rounding: float) -> None:
    """Raise unless two blocked runs of a seed begin alike: a draw without the seed would pass for an effect."""
    pairs = [
        ("loss", step, *losses) for step, losses in enumerate(zip(rehearsal.losses, training.losses, strict=False))
    ]
    pairs += [(name, 0, rehearsal.metrics[name][0], training.metrics[name][0]) for name in rehearsal.metrics]
    for name, step, one, two in pairs:
        if not alike(one, two, rounding):
            raise RunError(
                f"Two runs of a seed should be identical. Found another {name} after {step} updates with the same "
                "blocks: take each draw from a torch.Generator that `run` seeds with `seed`."
            )


def _check_names(run: Run, training: Training) -> None:
    """Raise if an event or the plane names an unknown metric; a sweep has no metrics after a run that broke off."""
    known = {*training.metrics, *(training.sweep or ())}
    named = [("plane", name) for name in run.plane or ()]
    if run.sweep is None or training.sweep is not None:
        named += [("events", event.metric) for event in run.events]
    for part, name in named:
        if name not in known:
            raise RunError(f"`{part}` should name metrics of `evaluate`: {', '.join(sorted(known))}. Found {name!r}.")


def _check_first_losses(trained: Mapping[Variant, Training], rounding: float) -> None:
    expected = trained[frozenset()].first_loss
    for variant, training in trained.items():
        same = math.isclose(training.first_loss, expected, rel_tol=rounding)
        if not same and not (math.isnan(training.first_loss) and math.isnan(expected)):
            raise RunError(
                f"The first loss should not depend on a block. Found {expected!r} blocked and {training.first_loss!r} "
                f"with {variant_name(variant)} open: a difference would not be due to the block."
            )


def times_of(loaded: LoadedConfig, seed: int) -> dict[str, Any]:
    """Return the times of the record. No other process should run meanwhile.

    Returns:
        ``"variants"``: for each variant the seconds of a step, and the times of the sweep. ``"methods"``: name of
        another method -> the seconds of a step.
    """
    config, make = loaded.config, partial(_made, loaded, seed)
    torch.set_num_threads(config.threads)
    variants = {
        variant_name(variant): {"seconds_per_step": seconds, "sweep": measure_sweep(make(), variant)}
        for variant, seconds in _seconds_per_step(make, config.variants).items()
    }
    methods = make().methods
    times = {} if methods is None else {name: float(measure()) for name, measure in methods.times.items()}
    return {"variants": variants, "methods": times}


def _memory(run: Run, variant: Variant) -> MemoryUse:
    with unblock(*variant):
        return measure_memory(run.loss)


def _seconds_per_step(make: Callable[[], Run], variants: list[Variant]) -> dict[Variant, float]:
    """Return the median seconds of loss and backward pass; the variants run in turn, so that drift hits all of them."""
    runs = {variant: make() for variant in variants}
    times: dict[Variant, list[float]] = {variant: [] for variant in variants}
    begin = time.perf_counter()
    for repetition in range(_TIMING_ROUNDS + 1):
        for variant, run in runs.items():
            run.optimizer.zero_grad()
            with unblock(*variant):
                start = time.perf_counter()
                run.loss().backward()
                _synchronize(run)
                elapsed = time.perf_counter() - start
            if repetition:  # the first round warms up
                times[variant].append(elapsed)
        if repetition >= 3 and time.perf_counter() - begin > _TIMING_SECONDS:
            break
    return {variant: statistics.median(elapsed) for variant, elapsed in times.items()}


def _synchronize(run: Run) -> None:
    if any(parameter.is_cuda for parameter in run.parameters.values()):
        torch.cuda.synchronize()


def _target(target: Mapping[str, Tensor], gradient: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the target, checked: a target of another shape would be broadcast, and its distance would mean nothing."""
    expected = {name: tuple(gradient[name].shape) for name in sorted(gradient)}
    found: object = type(target).__name__
    if isinstance(target, Mapping):
        found = {name: tuple(getattr(target[name], "shape", ("no tensor",))) for name in sorted(target)}
    if not isinstance(target, Mapping) or found != expected:
        raise RunError(f"`target` should return tensors of the parameters' shapes, {expected}. Found {found}.")
    return {name: value.cpu() for name, value in target.items()}


def _relative_error(found: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> float | None:
    error = sum(float((found[name].double() - target[name].double()).square().sum()) for name in found)
    size = sum(float(target[name].double().square().sum()) for name in found)
    value = (error / size) ** 0.5 if size else error**0.5
    return finite(value)
