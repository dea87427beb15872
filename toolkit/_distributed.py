"""Data-parallel training over the ranks of a process group: the split of the data, and collective operations.

Parameters are equal on all ranks. Rows of data, persistent chains and random streams are split between them. Without a
group (None) the process is the only rank, and no operation communicates.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed import (
    ProcessGroup,
    all_gather_object,
    all_reduce,
    broadcast,
    gather_object,
    get_global_rank,
    get_rank,
    get_world_size,
    scatter_object_list,
)

from toolkit._checkpoint import alike
from toolkit._checks import integer
from toolkit.blocks import no_graph

__all__ = [
    "exchange",
    "from_first_rank",
    "gather",
    "raise_together",
    "rank_generator",
    "rank_of",
    "same_on_all",
    "scatter",
    "shard",
    "together",
    "world_of",
]

Rows = TypeVar("Rows", bound=Any)  # a tensor or an array


def rank_of(group: ProcessGroup | None) -> int:
    """Return the number of this process in the group."""
    return 0 if group is None else get_rank(group)


def world_of(group: ProcessGroup | None) -> int:
    """Return the number of processes in the group."""
    return 1 if group is None else get_world_size(group)


def shard(rows: Rows, group: ProcessGroup | None) -> Rows:
    r"""Return this rank's part of rows that all ranks know: data, or persistent chains.

    Every row goes to exactly one rank, in order, and no rank has more than one row more than another. Chains are split,
    not copied, so that M of them on any number of ranks are M draws.

    Args:
        rows: (N, \*), a tensor or an array, memory-mapped ones included; the part is a view of it.
        group: The ranks. None: this process alone, which gets all rows.

    Example:
        >>> shard(torch.arange(5), None).tolist()
        [0, 1, 2, 3, 4]
    """
    rank, world = rank_of(group), world_of(group)
    part: Rows = rows[len(rows) * rank // world : len(rows) * (rank + 1) // world]
    return part


def rank_generator(seed: int, group: ProcessGroup | None, *, device: torch.device | str = "cpu") -> torch.Generator:
    """Return a generator of this rank alone, with the seed `seed` + rank.

    If ranks drew the same numbers, their chains would depend on each other.

    Args:
        seed: The seed of the first rank.
        group: The ranks. None: this process alone.
        device: The device on which it draws.

    Example:
        >>> rank_generator(3, None).initial_seed()
        3
    """
    return torch.Generator(device).manual_seed(integer("seed", seed, 0) + rank_of(group))


def exchange(numbers: Sequence[int], group: ProcessGroup | None, device: torch.device) -> list[list[int]]:
    """Return the numbers of every rank, equally many of each, by one reduction."""
    if group is None:
        return [list(numbers)]
    table = torch.zeros(get_world_size(group), len(numbers), dtype=torch.int64, device=device)
    table[get_rank(group)] = torch.tensor(numbers, dtype=torch.int64, device=device)
    all_reduce(table, group=group)
    rows: list[list[int]] = table.tolist()
    return rows


def raise_together(error: Exception | None, group: ProcessGroup | None) -> None:
    """Raise on all ranks if any rank has an error: its own error, or else one that names the failed rank."""
    if group is None:
        if error is not None:
            raise error
        return
    reports: list[str | None] = [None] * get_world_size(group)
    all_gather_object(reports, None if error is None else f"{type(error).__name__}: {error}", group=group)
    if error is not None:
        raise error
    for rank, report in enumerate(reports):
        if report is not None:
            raise RuntimeError(f"Rank {rank} stopped. {report}")


@contextmanager
def together(group: ProcessGroup | None) -> Iterator[None]:
    """Raise on all ranks if the body raises on any, as `raise_together` does; no rank leaves before all are done."""
    error = None
    try:
        yield
    except Exception as found:
        error = found
    raise_together(error, group)


def same_on_all(values: dict[str, Any], group: ProcessGroup | None) -> None:
    """Raise ValueError unless these arguments, as JSON, have the same values on all ranks."""
    if group is None:
        return
    found: list[Any] = [None] * get_world_size(group)
    all_gather_object(found, values, group=group)
    for name in values:
        if not all(alike(found[0][name], other[name]) for other in found):
            raise ValueError(
                f"`{name}` should be the same on all ranks. Found {', '.join(str(other[name]) for other in found)}."
            )


def from_first_rank(tensors: Iterable[Tensor], group: ProcessGroup | None) -> None:
    """Overwrite these tensors with the first rank's."""
    if group is not None:
        with no_graph():
            for tensor in tensors:
                broadcast(tensor, src=get_global_rank(group, 0), group=group)


def gather(value: Any, group: ProcessGroup | None) -> list[Any] | None:
    """Return the values of all ranks on the first rank, None on the others."""
    if group is None:
        return [value]
    values: list[Any] | None = [None] * get_world_size(group) if get_rank(group) == 0 else None
    gather_object(value, values, dst=get_global_rank(group, 0), group=group)
    return values


def scatter(values: Sequence[Any] | None, group: ProcessGroup | None) -> Any:
    """Return this rank's entry of the values on the first rank."""
    if group is None:
        assert values is not None
        return values[0]
    own: list[Any] = [None]
    sent = None if values is None else list(values)
    scatter_object_list(own, sent, src=get_global_rank(group, 0), group=group)
    return own[0]
