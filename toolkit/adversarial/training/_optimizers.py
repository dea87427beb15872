"""Optimisers of the trainer: their names, their rates, and their state for a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup, all_reduce

from toolkit._checkpoint import as_json
from toolkit._run import rate_at
from toolkit.adversarial.training.schedules import Schedule
from toolkit.blocks import no_graph

__all__ = ["Descent", "MakeOptimizer", "make_optimizer"]

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

_DEFAULT_RATES = {"adam": 2e-3, "sgd": 0.1}


def make_optimizer(
    optimizer: str | MakeOptimizer, parameters: list[nn.Parameter], learning_rate: float | None
) -> tuple[torch.optim.Optimizer, list[float]]:
    """Return the optimiser of these parameters, and the rate of each of its groups before any schedule.

    Raises:
        TypeError: If `optimizer` is neither a name nor a function that returns an optimiser.
        ValueError: If `optimizer` is an unknown name, or divides by numbers that underflow.
    """
    if isinstance(optimizer, str):
        if optimizer not in _DEFAULT_RATES:
            names = ", ".join(map(repr, _DEFAULT_RATES))
            raise ValueError(f"`optimizer` should be one of {names}, or make one of parameters. Found {optimizer!r}.")
        rate = _DEFAULT_RATES[optimizer] if learning_rate is None else learning_rate
        made: torch.optim.Optimizer
        if optimizer == "adam":
            made = torch.optim.Adam(parameters, lr=rate)
        else:
            made = torch.optim.SGD(parameters, lr=rate, momentum=0.9, nesterov=True, weight_decay=5e-4)
    else:
        found = optimizer(parameters) if callable(optimizer) else optimizer
        if not callable(optimizer) or not isinstance(found, torch.optim.Optimizer):
            raise TypeError(
                "`optimizer` should be a name, or a function of parameters that returns a torch.optim.Optimizer. "
                f"Found {type(found).__name__}."
            )
        made = found
        if learning_rate is not None:
            for group in made.param_groups:
                group["lr"] = learning_rate
    for group in made.param_groups:
        for parameter in group["params"]:
            # Small gradients have squares of 0 in float16, and are then divided by this number.
            if group.get("eps") and torch.tensor(group["eps"], dtype=parameter.dtype) == 0:
                raise ValueError(
                    f"`optimizer` should have an `eps` that is not 0 in {parameter.dtype}. Found {group['eps']:g}: "
                    'train in float32 or bfloat16, give `optimizer="sgd"`, or a function that makes one with a larger '
                    "`eps`."
                )
    return made, [float(group["lr"]) for group in made.param_groups]


@dataclass(frozen=True)
class Descent:
    """The steps of training: an optimiser, its rates, and their schedule.

    Attributes:
        parameters: The trained parameters.
        optimizer: The optimiser of these parameters.
        rates: The rate of each parameter group before any schedule.
        schedule: Function of the part of training done that returns the factor of all rates.
        schedule_name: The name of the schedule in a checkpoint.
    """

    parameters: list[nn.Parameter]
    optimizer: torch.optim.Optimizer
    rates: list[float]
    schedule: Schedule
    schedule_name: Any

    def set_rates(self, done: float) -> None:
        """Set the rate of every parameter group for the part of training that is done."""
        factor = rate_at("schedule", self.schedule, done)
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            if isinstance(group["lr"], Tensor):
                with no_graph():
                    group["lr"].fill_(rate * factor)
            else:
                group["lr"] = rate * factor

    def update(self, loss: Tensor, rows: int, group: ProcessGroup | None) -> None:
        """Move the parameters against the gradient of the mean loss of all ranks' rows."""
        if not loss.requires_grad:
            raise RuntimeError(
                "`model` should be differentiable with respect to its parameters. Found a loss that does not depend on "
                "them: is its forward pass in `torch.no_grad()`?"
            )
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        if group is not None:
            _add_up(self.parameters, rows, group)
        self.optimizer.step()

    def settings(self) -> dict[str, Any]:
        """Return the settings of the optimiser and the schedule, as JSON."""
        groups = [
            {name: as_json(value) for name, value in sorted(group.items()) if name not in ("params", "lr")}
            | {"lr": rate, "parameters": len(group["params"])}
            for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True)
        ]
        kind = type(self.optimizer).__name__
        return {"optimizer": {"kind": kind, "groups": groups}, "schedule": self.schedule_name}

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the state of the optimiser: its tensors, and its numbers, by ``<parameter>.<name>``."""
        tensors: dict[str, Tensor] = {}
        numbers: dict[str, Any] = {}
        for index, values in self.optimizer.state_dict()["state"].items():
            for name, value in values.items():
                (tensors if isinstance(value, Tensor) else numbers)[f"{index}.{name}"] = value
        return tensors, numbers

    def load(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> None:
        """Give the optimiser the state that `state` returned."""
        state: dict[int, dict[str, Any]] = {}
        for key, value in [*tensors.items(), *numbers.items()]:
            index, name = key.split(".", 1)
            state.setdefault(int(index), {})[name] = value
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})


def _add_up(parameters: list[nn.Parameter], rows: int, group: ProcessGroup) -> None:
    """Give all ranks the gradient of the mean over the rows of all ranks, by one reduction."""
    wide = torch.float32
    for parameter in parameters:
        wide = torch.promote_types(wide, parameter.dtype)
    device = parameters[0].device
    with no_graph():
        parts = [p.grad if p.grad is not None else torch.zeros_like(p) for p in parameters]
        has = torch.tensor([float(p.grad is not None) for p in parameters], dtype=wide, device=device)
        flat = torch.cat([*(part.reshape(-1).to(wide) * rows for part in parts), has, has.new_tensor([float(rows)])])
        all_reduce(flat, group=group)
        *slices, has, total = flat.split([*(part.numel() for part in parts), len(parts), 1])
        for number, (parameter, part) in enumerate(zip(parameters, slices, strict=True)):
            # A parameter that no rank has used keeps no gradient, so that the optimiser passes it over.
            if parameter.grad is not None or bool(has[number] > 0):
                parameter.grad = (part / total).reshape(parameter.shape).to(parameter.dtype)
