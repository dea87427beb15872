"""Arguments of the trainer: read, checked, and named, so that they can be compared with a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from toolkit._checkpoint import fingerprint
from toolkit._checks import choice, integer, number
from toolkit._divergence import not_finite
from toolkit._run import rate_at
from toolkit.adversarial.balls import Bounds, Norm
from toolkit.adversarial.training import schedules
from toolkit.adversarial.training._batches import check_scale, pair_of
from toolkit.adversarial.training._evaluation import HeldOut, Score
from toolkit.adversarial.training._model import infinite_buffers, named, trained
from toolkit.adversarial.training._optimizers import Descent, MakeOptimizer, make_optimizer
from toolkit.adversarial.training.methods import METHODS, BallArguments, Method
from toolkit.adversarial.training.schedules import Schedule

__all__ = ["Plan", "Settings", "check_group", "check_model", "descent_of", "method_of", "name_of", "score_of"]

_SCHEDULES: dict[str, Callable[[], Schedule]] = {
    "constant": schedules.constant,
    "cosine": schedules.cosine,
    "one_cycle": schedules.one_cycle,
    "piecewise": schedules.piecewise,
}


def method_of(method: str | Method) -> Method:
    """Return the method, or the method of this name with its default settings; raise for anything else."""
    if isinstance(method, Method):
        return method
    if not isinstance(method, str):
        raise TypeError(f"`method` should be a Method, or the name of one. Found {type(method).__name__}.")
    choice("method", method, METHODS)
    return METHODS[method]()


def descent_of(
    model: nn.Module, optimizer: str | MakeOptimizer, learning_rate: float | None, schedule: str | Schedule
) -> Descent:
    """Return the optimiser of a model with its rates; raise if an argument is invalid."""
    if learning_rate is not None:
        learning_rate = number("learning_rate", learning_rate, above=0)
    factor, name = _schedule_of(schedule)
    parameters = trained(model)
    made, rates = make_optimizer(optimizer, parameters, learning_rate)
    return Descent(parameters, made, rates, factor, name)


def _schedule_of(schedule: str | Schedule) -> tuple[Schedule, Any]:
    """Return the schedule, or the schedule of this name, and its name in a checkpoint; raise for anything else."""
    if isinstance(schedule, str):
        if schedule not in _SCHEDULES:
            names = ", ".join(map(repr, _SCHEDULES))
            raise ValueError(f"`schedule` should be one of {names}, or a function. Found {schedule!r}.")
        return _SCHEDULES[schedule](), schedule
    if not callable(schedule):
        raise TypeError(f"`schedule` should be a name or a function. Found {type(schedule).__name__}.")
    # The values of a function identify it better than its name, which many may share.
    values = [rate_at("schedule", schedule, part / 64) for part in range(64)]
    return schedule, [name_of(schedule), fingerprint(torch.tensor(values, dtype=torch.float64, device="cpu"))]


def score_of(evaluate: object, ball: BallArguments, group: ProcessGroup | None) -> Score | None:
    """Return the given score function, or one on the held-out data given; raise if `evaluate` is neither."""
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


def name_of(function: Callable[..., Any]) -> str:
    """Return the name of a function in a checkpoint; the name of a `partial` includes its arguments."""
    if isinstance(function, partial):
        return f"{name_of(function.func)} with {function.args} {function.keywords}"
    module, name = getattr(function, "__module__", ""), getattr(function, "__qualname__", type(function).__qualname__)
    return f"{module}.{name}"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """`TrainingOptions` with their defaults, checked."""

    epsilon: float
    norm: Norm = "linf"
    bounds: Bounds = (0, 1)
    batch_size: int = 128
    optimizer: str | MakeOptimizer = "adam"
    learning_rate: float | None = None
    schedule: str | Schedule = "one_cycle"
    epsilon_warmup: float = 0.0
    average: float | None = None
    augment: Callable[..., Tensor] | None = None
    evaluate_every: int = 1
    keep: Literal["last", "best"] = "last"
    patience: int | None = None
    checkpoint_every: int = 1000
    group: ProcessGroup | None = None
    callback: Callable[[int, int], None] | None = None
    verbose: int = 0

    def __post_init__(self) -> None:
        """Raise a ValueError if a value is out of its range; numbers of any type become Python's."""
        sizes: object = self.epsilon
        if isinstance(sizes, list | tuple) or (isinstance(sizes, Tensor) and sizes.numel() != 1):
            found = f"{type(sizes).__name__} of {len(sizes)}"
            raise TypeError(f"`epsilon` should be one radius for all samples in training. Found a {found}.")
        checked: dict[str, float] = {
            "epsilon": number("epsilon", self.epsilon, least=0),
            "epsilon_warmup": number("epsilon_warmup", self.epsilon_warmup, least=0, most=1),
            "evaluate_every": integer("evaluate_every", self.evaluate_every),
            "batch_size": integer("batch_size", self.batch_size),
        }
        if self.patience is not None:
            checked["patience"] = integer("patience", self.patience)
        if self.average is not None:
            checked["average"] = number("average", self.average, least=0, below=1)
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        choice("keep", self.keep, ("last", "best"))

    @property
    def ball(self) -> BallArguments:
        """The ball in which inputs are attacked."""
        return {"epsilon": self.epsilon, "norm": self.norm, "bounds": self.bounds}


@dataclass(frozen=True, kw_only=True)
class Plan(Settings):
    """The settings, method and evaluation of a run.

    Attributes:
        method: The training method.
        score: Function of a model that returns its scores. None: no evaluation.
    """

    method: Method
    score: Score | None

    def __post_init__(self) -> None:
        """Raise a ValueError if the best epoch is asked for without an evaluation."""
        super().__post_init__()
        if self.score is None and self.ranks_epochs:
            raise ValueError("`evaluate` should be given to find the best epoch. Found None.")

    @property
    def ranks_epochs(self) -> bool:
        """Whether a robust score is needed, to find the best epoch."""
        return self.keep == "best" or self.patience is not None

    def ball_of(self, update: int, total: int) -> BallArguments:
        """Return the ball of an update, counted from 1, of `total` updates."""
        share = min(1.0, update / (total * self.epsilon_warmup)) if self.epsilon_warmup else 1.0
        return {**self.ball, "epsilon": self.epsilon * share}

    def settings(self) -> dict[str, Any]:
        """Return the settings that a checkpoint has to share, by name, as JSON."""
        held = self.score
        known = [fingerprint(held.inputs), fingerprint(held.labels)] if isinstance(held, HeldOut) else None
        same = ("epsilon", "norm", "epsilon_warmup", "average", "evaluate_every", "keep", "patience", "batch_size")
        return {name: getattr(self, name) for name in same} | {
            "method": repr(self.method),
            "bounds": repr(self.bounds),
            "evaluate": known if held is None or known is not None else name_of(held),
            "augment": None if self.augment is None else name_of(self.augment),
        }


def check_group(group: object) -> None:
    """Raise a TypeError if `group` is not a torch.distributed process group."""
    if group is not None and not isinstance(group, ProcessGroup):
        raise TypeError(f"`group` should be a torch.distributed.ProcessGroup, or None. Found {type(group).__name__}.")


def check_model(model: nn.Module, generator: torch.Generator, augment: Callable[..., Tensor] | None) -> None:
    """Raise unless a model can be trained: it is finite, has parameters to train, and `generator` is not global."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"`model` should be a torch.nn.Module. Found {type(model).__name__}.")
    if not isinstance(generator, torch.Generator):
        raise TypeError(f"`generator` should be a torch.Generator. Found {type(generator).__name__}.")
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError(f"`model` should be a module before it is scripted or traced. Found {type(model).__name__}.")
    if any(generator is own for own in (torch.default_generator, *torch.cuda.default_generators)):
        raise ValueError(
            "`generator` should be one of your own, as `torch.Generator().manual_seed(0)` makes one: torch's global "
            "ones are left as they were. Found a global one."
        )
    if augment is not None and not callable(augment):
        raise TypeError(f"`augment` should be a function, or None. Found {type(augment).__name__}.")
    if not trained(model):
        raise ValueError("`model` should have parameters that require gradients. Found none.")
    spoilt = not_finite(named(model), infinite=infinite_buffers(model))
    if spoilt is not None:
        raise ValueError(f"`model` should be finite. Found that `{spoilt}` is not.")
