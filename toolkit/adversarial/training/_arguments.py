"""Arguments of the trainer: read, checked, and named, so that a checkpoint can tell that they are the same."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from toolkit._checkpoint import fingerprint
from toolkit._checks import choice, integer, number, real
from toolkit.adversarial.training import schedules
from toolkit.adversarial.training._batches import check_scale, pair_of
from toolkit.adversarial.training._evaluation import HeldOut
from toolkit.adversarial.training.methods import METHODS, BallArguments, Method
from toolkit.adversarial.training.schedules import Schedule

__all__ = [
    "check_arguments",
    "check_files",
    "check_group",
    "factor_at",
    "method_of",
    "name_of",
    "name_of_score",
    "schedule_of",
    "score_of",
]

_SCHEDULES: dict[str, Callable[[], Schedule]] = {
    "constant": schedules.constant,
    "cosine": schedules.cosine,
    "one_cycle": schedules.one_cycle,
    "piecewise": schedules.piecewise,
}


def method_of(method: str | Method) -> Method:
    """Return a method, or the one of this name with its default settings; raise if it is neither."""
    if isinstance(method, Method):
        return method
    if not isinstance(method, str):
        raise TypeError(f"`method` should be a Method, or the name of one. Found {type(method).__name__}.")
    choice("method", method, METHODS)
    return METHODS[method]()


def schedule_of(schedule: str | Schedule) -> tuple[Schedule, Any]:
    """Return a schedule, or the one of this name, and by what it is known in a checkpoint; raise if it is neither."""
    if isinstance(schedule, str):
        if schedule not in _SCHEDULES:
            names = ", ".join(map(repr, _SCHEDULES))
            raise ValueError(f"`schedule` should be one of {names}, or a function. Found {schedule!r}.")
        return _SCHEDULES[schedule](), schedule
    if not callable(schedule):
        raise TypeError(f"`schedule` should be a name or a function. Found {type(schedule).__name__}.")
    # By its values a function is known better than by its name, which many may share.
    values = [factor_at(schedule, part / 64) for part in range(64)]
    return schedule, [name_of(schedule), fingerprint(torch.tensor(values, dtype=torch.float64))]


def factor_at(schedule: Schedule, part: float) -> float:
    """Return the value of a schedule; raise if it is no rate."""
    found = schedule(part)
    factor = real(found)
    if factor is None or not 0 <= factor < math.inf:
        raise ValueError(f"`schedule` should return finite numbers, not negative. Found {found!r} at {part:.4g}.")
    return factor


def score_of(
    evaluate: object, ball: BallArguments, group: ProcessGroup | None
) -> Callable[[nn.Module], Mapping[str, float]] | None:
    """Return what evaluates a model, of held-out data or a function; raise if it is neither."""
    if evaluate is None:
        return None
    pair = pair_of(evaluate, None)
    if pair is not None:
        check_scale("evaluate", pair[0], ball)
        return HeldOut(*pair, ball, group)
    if not callable(evaluate):
        raise TypeError(
            "`evaluate` should be held-out inputs and labels, or a function of the model. "
            f"Found {type(evaluate).__name__}."
        )
    return evaluate


def name_of_score(score: Callable[..., Any]) -> Any:
    """Return by what an evaluation is known in a checkpoint: the held-out data, or a name."""
    if isinstance(score, HeldOut):
        return [fingerprint(score.inputs), fingerprint(score.labels)]
    return name_of(score)


def name_of(function: Callable[..., Any]) -> str:
    """Return by what a function is known in a checkpoint: its name, and of a `partial` its arguments, too."""
    if isinstance(function, partial):
        return f"{name_of(function.func)} with {function.args} {function.keywords}"
    module, name = getattr(function, "__module__", ""), getattr(function, "__qualname__", type(function).__qualname__)
    return f"{module}.{name}"


def check_arguments(
    epsilon: float,
    epochs: int,
    batch_size: int,
    epsilon_warmup: float,
    average: float | None,
    evaluate_every: int,
    keep: str,
    patience: int | None,
    evaluate: object,
) -> None:
    """Raise a ValueError if an argument that decides the course of training is out of its range."""
    counts = {"epochs": epochs, "batch_size": batch_size, "evaluate_every": evaluate_every}
    for name, value in (counts if patience is None else counts | {"patience": patience}).items():
        integer(name, value, 1)
    number("epsilon", epsilon, least=0)
    number("epsilon_warmup", epsilon_warmup, least=0, most=1)
    if average is not None:
        number("average", average, least=0, below=1)
    choice("keep", keep, ("last", "best"))
    if evaluate is None and (keep == "best" or patience is not None):
        raise ValueError("`evaluate` should be given to find the best epoch. Found None.")


def check_group(group: object) -> None:
    """Raise a TypeError if what should be the ranks is no group of them."""
    if group is not None and not isinstance(group, ProcessGroup):
        raise TypeError(f"`group` should be a torch.distributed.ProcessGroup, or None. Found {type(group).__name__}.")


def check_files(
    model: nn.Module,
    generator: torch.Generator,
    learning_rate: float | None,
    checkpoint: str | os.PathLike[str] | None,
    checkpoint_every: int,
    augment: Callable[..., Tensor] | None,
    callback: Callable[[int, int], None] | None,
) -> None:
    """Raise if a model, a generator, a function or a file is none, or a count or rate is out of its range."""
    for name, value, kind in (("model", model, nn.Module), ("generator", generator, torch.Generator)):
        if not isinstance(value, kind):
            raise TypeError(f"`{name}` should be a torch.{kind.__name__}. Found {type(value).__name__}.")
    if any(generator is own for own in (torch.default_generator, *torch.cuda.default_generators)):
        raise ValueError(
            "`generator` should be one of your own, as `torch.Generator().manual_seed(0)` makes one: torch's global "
            "ones are left as they were. Found a global one."
        )
    for name, function in (("augment", augment), ("callback", callback)):
        if function is not None and not callable(function):
            raise TypeError(f"`{name}` should be a function, or None. Found {type(function).__name__}.")
    integer("checkpoint_every", checkpoint_every, 1)
    if learning_rate is not None:
        number("learning_rate", learning_rate, above=0)
    if checkpoint is not None:
        if not isinstance(checkpoint, str | os.PathLike):
            raise TypeError(f"`checkpoint` should be a path, or None. Found {checkpoint!r}.")
        if Path(checkpoint).is_dir() or not Path(checkpoint).absolute().parent.is_dir():
            raise ValueError(f"`checkpoint` should be a file in a folder that exists. Found {str(checkpoint)!r}.")
