"""Optimisers of the trainer: made by name, and their state as tensors and numbers that a checkpoint can hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from toolkit.blocks import no_graph

__all__ = ["MakeOptimizer", "load_state", "make_optimizer", "set_rates", "settings_of", "state_of"]

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

_DEFAULT_RATES = {"adam": 2e-3, "sgd": 0.1}


def make_optimizer(
    optimizer: str | MakeOptimizer, parameters: list[nn.Parameter], learning_rate: float | None
) -> tuple[torch.optim.Optimizer, list[float]]:
    """Return the optimiser of these parameters, and the rate of each of its groups before any schedule.

    Raises:
        TypeError: If `optimizer` is no name and makes no optimiser.
        ValueError: If it is an unknown name.
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
    return made, [float(group["lr"]) for group in made.param_groups]


def set_rates(optimizer: torch.optim.Optimizer, rates: list[float], factor: float) -> None:
    """Give every group of parameters its rate times a factor."""
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        if isinstance(group["lr"], Tensor):
            with no_graph():
                group["lr"].fill_(rate * factor)
        else:
            group["lr"] = rate * factor


def settings_of(optimizer: torch.optim.Optimizer, rates: list[float]) -> dict[str, Any]:
    """Return what decides the steps of an optimiser, as JSON."""
    groups = [
        {name: _plain(value) for name, value in sorted(group.items()) if name not in ("params", "lr")}
        | {"lr": rate, "parameters": len(group["params"])}
        for group, rate in zip(optimizer.param_groups, rates, strict=True)
    ]
    return {"kind": type(optimizer).__name__, "groups": groups}


def state_of(optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return what an optimiser carries from step to step: its tensors, and all else, by ``<parameter>.<name>``."""
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, Any] = {}
    for index, values in optimizer.state_dict()["state"].items():
        for name, value in values.items():
            (tensors if isinstance(value, Tensor) else numbers)[f"{index}.{name}"] = value
    return tensors, numbers


def load_state(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> None:
    """Give an optimiser what `state_of` returned."""
    state: dict[int, dict[str, Any]] = {}
    for key, value in [*tensors.items(), *numbers.items()]:
        index, name = key.split(".", 1)
        state.setdefault(int(index), {})[name] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, Tensor):
        return value.tolist()
    return value if isinstance(value, int | float | str | list | None) else repr(value)
