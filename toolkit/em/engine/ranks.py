"""A fit over ranks: the first rank decides, and all ranks sum over their part of the data on request.

If each rank decided, all would need the same bits, on any processors: a rank that stopped a step early would leave the
others waiting.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, broadcast_object_list, get_rank

from toolkit.em.covariance import Structure, structure_of
from toolkit.em.engine.fused import Expansion, Moments, accumulate, expanded_sums
from toolkit.em.engine.samples import Prepared
from toolkit.em.gaussian import GaussianParameters

__all__ = ["led", "pass_over_ranks", "sums_over_ranks"]

T = TypeVar("T")

_CPU = torch.device("cpu")


def led(decide: Callable[[], T], data: Prepared, to_device: Callable[[T, torch.device], T]) -> T:
    """Return the decision of the first rank on all ranks.

    Args:
        decide: Computes the result, on the first rank. It reads the data by `pass_over_ranks` and `sums_over_ranks`
            alone.
        data: The data of this rank, in the coordinates of the pass.
        to_device: Moves the result to a device.

    Raises:
        Exception: Whatever `decide` raises, on the first rank. The others raise it too if it is a ValueError, and
            otherwise a RuntimeError with its text.
    """
    if data.group is None:
        return decide()
    if get_rank(data.group) != 0:
        return to_device(_serve(data, data.group), data.centre.device)
    try:
        found = decide()
    except BaseException as error:
        refused = str(error) if isinstance(error, ValueError) else None
        _tell(data.group, _raise, refused, f"The first rank stopped: {type(error).__name__}: {error}")
        raise
    _tell(data.group, None, to_device(found, _CPU))
    return found


def pass_over_ranks(parameters: GaussianParameters, data: Prepared) -> Moments:
    """Return the moments of the samples of all ranks: `accumulate`, asked for by the first rank."""
    if data.group is not None:
        _tell(data.group, _accumulate, parameters.to(_CPU))
    return accumulate(parameters, data)


def sums_over_ranks(
    structure: Structure, theta: Tensor, highest: Tensor | None, data: Prepared, expansion: Expansion | None
) -> tuple[Tensor, Tensor]:
    """Return the sums of many mixtures over all ranks: `expanded_sums` in float64, asked for by the first rank."""
    if data.group is not None:
        _tell(data.group, _sum, structure.name, theta.cpu(), None if highest is None else highest.cpu())
    return expanded_sums(structure, theta, highest, data, torch.float64, expansion)


def _tell(group: ProcessGroup, *message: object) -> None:
    broadcast_object_list([message], group=group, group_src=0)


def _serve(data: Prepared, group: ProcessGroup) -> Any:
    """Carry out the requests of the first rank until its decision."""
    while True:
        told: list[Any] = [None]
        broadcast_object_list(told, group=group, group_src=0)
        task, *arguments = told[0]
        if task is None:
            return arguments[0]
        task(data, *arguments)


def _accumulate(data: Prepared, parameters: GaussianParameters) -> None:
    accumulate(parameters.to(data.centre.device), data)


def _sum(data: Prepared, name: str, theta: Tensor, highest: Tensor | None) -> None:
    device = data.centre.device
    highest = None if highest is None else highest.to(device)
    expanded_sums(structure_of(name), theta.to(device), highest, data, torch.float64)


def _raise(data: Prepared, refused: str | None, stopped: str) -> None:
    raise RuntimeError(stopped) if refused is None else ValueError(refused)
