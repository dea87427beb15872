"""The interface of an experiment: the `Run` that its module makes, and the parts of a run. Imports no torch."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from toolkit._checks import number

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["Event", "Methods", "Objective", "Run", "Sweep"]


@dataclass(frozen=True, kw_only=True)
class Objective:
    """The measure of training: the same quantity for every variant, never the surrogate.

    Attributes:
        label: The quantity with its unit: ``"log-likelihood (nats per sample)"``.
        higher_is_better: Whether training should raise it.
        best: The optimum, where it is known exactly.

    Raises:
        TypeError: If `label` is not text, or `higher_is_better` not a truth value.
        ValueError: If `best` is not a finite number.
    """

    label: str
    higher_is_better: bool
    best: float | None = None

    def __post_init__(self) -> None:
        for name, value, kind in (("label", self.label, str), ("higher_is_better", self.higher_is_better, bool)):
            if not isinstance(value, kind):
                raise TypeError(f"`{name}` should be of the type {kind.__name__}. Found {value!r}.")
        _numbers_of(self, "best")


@dataclass(frozen=True, kw_only=True)
class Event:
    """A possible outcome of a run, which the report counts over the seeds.

    Attributes:
        says: The event as a clause: ``"a component died"``.
        metric: The name of a metric of `Run.evaluate` or of `Run.sweep`, taken after training.
        below: The event happened if the metric is less than this.
        above: The event happened if the metric is more than this. Give exactly one of the two limits.

    Raises:
        ValueError: If both limits are given, or neither, or if a limit is not a finite number.
    """

    says: str
    metric: str
    below: float | None = None
    above: float | None = None

    def __post_init__(self) -> None:
        if (self.below is None) == (self.above is None):
            raise ValueError(f"`below` or `above` should be given, not both. Found {self.below} and {self.above}.")
        _numbers_of(self, "below", "above")

    def to_dict(self) -> dict[str, Any]:
        """Return the event as plain JSON."""
        return dataclasses.asdict(self)


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Results of a run for each value of a swept quantity; the problems are trained side by side.

    Attributes:
        label: The quantity, with its unit.
        values: Its values.
        evaluate: Computes name -> one number for each value, after training, without side effects on the run. A number
            that does not exist is NaN.
        times: Name of a time -> function that measures it for each value, on a run that is not trained. Nothing else
            runs meanwhile, and only the first seeds are measured.
    """

    label: str
    values: tuple[float, ...]
    evaluate: Callable[[], Mapping[str, Sequence[float]]]
    times: Mapping[str, Callable[[], Sequence[float]]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Methods:
    """Other ways to learn the same model from the same data, as a comparison for the variants.

    Attributes:
        label: The name of one step: ``"update"``.
        steps: The steps at which they are evaluated.
        train: Name of a method -> function that trains it from its start and returns its metrics, as `Run.evaluate`
            does, at each of `steps`; one number each if only the end is known. The function does not change the run,
            and all its randomness comes from the seed.
        times: Name of a method -> function that measures the seconds of one step. Nothing else runs meanwhile, and only
            the first seeds are measured.
    """

    label: str
    steps: tuple[int, ...]
    train: Mapping[str, Callable[[], Mapping[str, Sequence[float]]]]
    times: Mapping[str, Callable[[], float]] = field(default_factory=dict)


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
        plane: Two metrics that are coordinates, drawn as the path of a run through a plane and not as curves, or None.

    Raises:
        TypeError: If a part has another type.
        ValueError: If `parameters` are not leaf tensors with ``requires_grad``, or `optimizer` does not hold the same
            tensors.
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
    plane: tuple[str, str] | None = None

    def __post_init__(self) -> None:
        _check_parameters(self.parameters)
        for name in ("loss", "evaluate", "after_step", "target"):
            part = getattr(self, name)
            if not callable(part) and (name, part) != ("target", None):
                raise TypeError(f"`{name}` should be a function. Found {type(part).__name__}.")
        for name, kind in (("objective", Objective), ("sweep", Sweep), ("methods", Methods)):
            part = getattr(self, name)
            if not isinstance(part, kind) and (name == "objective" or part is not None):
                raise TypeError(f"`{name}` should be of the class {kind.__name__}. Found {type(part).__name__}.")
        if not (isinstance(self.events, Sequence) and all(isinstance(event, Event) for event in self.events)):
            raise TypeError(f"`events` should be a list of Event. Found {self.events!r}.")
        if self.plane is not None and (isinstance(self.plane, str) or len(self.plane) != 2):
            raise TypeError(f"`plane` should be the names of two metrics. Found {self.plane!r}.")
        _check_optimizer(self.optimizer, self.parameters)


def _check_parameters(parameters: Mapping[str, Tensor]) -> None:
    import torch

    if not isinstance(parameters, Mapping) or not parameters:
        found = type(parameters).__name__ if not isinstance(parameters, Mapping) else "none"
        raise TypeError(f"`parameters` should map names to tensors: {{'weight': weight}}. Found {found}.")
    for name, value in parameters.items():
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"`parameters` should map names to tensors. Found {type(value).__name__} as {name!r}.")
        if not (value.is_leaf and value.requires_grad):
            found = "a tensor without it" if value.is_leaf else "the result of an operation"
            raise ValueError(f"`parameters` should be leaf tensors with requires_grad. Found {found} as {name!r}.")


def _check_optimizer(optimizer: object, parameters: Mapping[str, Tensor]) -> None:
    """Raise unless every parameter is trained, and nothing else: the gradients of other tensors are not compared."""
    import torch

    if not isinstance(optimizer, torch.optim.Optimizer):
        found = f"the class {optimizer.__name__}" if isinstance(optimizer, type) else type(optimizer).__name__
        raise TypeError(f"`optimizer` should be a torch.optim.Optimizer. Found {found}.")
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise TypeError(f"`optimizer` should take a step without a closure. Found {type(optimizer).__name__}.")
    held = {id(tensor) for group in optimizer.param_groups for tensor in group["params"]}
    absent = [name for name, tensor in parameters.items() if id(tensor) not in held]
    others = len(held) - (len(parameters) - len(absent))
    if absent or others:
        found = " and ".join(
            [f"no {', '.join(map(repr, absent))}"] * bool(absent)
            + [f"{others} other tensor{'s' * (others > 1)}"] * bool(others)
        )
        raise ValueError(f"`optimizer` should hold the tensors of `parameters` and no others. Found {found}.")


def _numbers_of(part: Objective | Event, *names: str) -> None:
    """Make Python's numbers of these fields, if they are given."""
    for name in names:
        if (value := getattr(part, name)) is not None:
            object.__setattr__(part, name, number(name, value))
