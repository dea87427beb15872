"""The state of tempered chains, and swaps of neighbours.

T temperatures or machines, M chains at each, V columns of the visible layer, H of the hidden one.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from toolkit._checks import instance
from toolkit.rbm.machine.joint import Joint

__all__ = ["TemperedState", "check_state", "new_state", "swap", "take"]


@dataclass(frozen=True)
class TemperedState:
    """The state of tempered chains: made by `tempered_start`, then passed from call to call.

    Attributes:
        visible: (T, M, V), the visible units at each temperature; the last is that of the model.
        hidden: (T, M, H), the hidden units from which `visible` was drawn.
        replica: (T, M), the index of the temperature at which each state started.
        fresh: (T, M), whether each state has visited the first temperature since its last visit to the last
            temperature.
        arrivals: (M,), the number of fresh states that arrived at the last temperature.
        steps: Number of steps taken; even steps swap the pairs (0, 1), (2, 3), ..., odd steps (1, 2), (3, 4), ...
    """

    visible: Tensor
    hidden: Tensor
    replica: Tensor
    fresh: Tensor
    arrivals: Tensor
    steps: int


def swap(
    probabilities: Tensor, state: TemperedState, generator: torch.Generator | None
) -> tuple[Tensor, TemperedState]:
    """Draw the swaps of the even or the odd pairs.

    Returns:
        (T, M), the row of (T M, ...) that moves to each place; and the state after the swaps, without its units.
    """
    n_temperatures, n_chains = state.replica.shape
    first = state.steps % 2
    tried = probabilities[first::2]
    place = torch.arange(n_temperatures * n_chains, device=tried.device).view(n_temperatures, n_chains)
    if len(tried):
        exchanged = n_chains * (torch.empty_like(tried).uniform_(generator=generator) < tried)
        place[first : n_temperatures - 1 : 2] += exchanged
        place[first + 1 :: 2] -= exchanged
    replica, fresh, arrivals = take(state.replica, place), take(state.fresh, place), state.arrivals
    if n_temperatures > 1:
        arrivals = arrivals + fresh[-1]
        fresh[-1] = False
        fresh[0] = True
    moved = dataclasses.replace(state, replica=replica, fresh=fresh, arrivals=arrivals, steps=state.steps + 1)
    return place, moved


def take(units: Tensor, rows: Tensor) -> Tensor:
    """Return the rows of (T, M, ...) that were drawn by `swap`."""
    return units.flatten(0, 1).index_select(0, rows.flatten()).view_as(units)


def new_state(visible: Tensor, hidden: Tensor) -> TemperedState:
    """Return the state of chains that have not moved."""
    n_temperatures, n_chains = visible.shape[:2]
    device = visible.device
    replica = torch.arange(n_temperatures, device=device)[:, None].expand(-1, n_chains)
    fresh = replica == (0 if n_temperatures > 1 else -1)
    return TemperedState(visible, hidden, replica, fresh, torch.zeros_like(replica[0]), 0)


def check_state(state: TemperedState, n_temperatures: int, joint: Joint) -> None:
    """Raise a ValueError or TypeError unless a state fits this machine and this number of temperatures."""
    instance("state", state, TemperedState)
    n_visible, n_hidden = joint.weights.shape[-2:]
    for name, units, columns in (("visible", state.visible, n_visible), ("hidden", state.hidden, n_hidden)):
        if units.ndim != 3 or len(units) != n_temperatures or units.shape[2] != columns or not units.shape[1]:
            raise ValueError(
                f"`state.{name}` should have shape ({n_temperatures}, M, {columns}), M > 0. Found {tuple(units.shape)}."
            )
        if units.dtype != joint.weights.dtype:
            raise TypeError(
                f"`state.{name}` should have the parameters' type {joint.weights.dtype}. Found {units.dtype}."
            )
