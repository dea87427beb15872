"""A model in training: its tensors as they are written, its modes, and its statistics on several ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup, all_reduce

from toolkit._distributed import from_first_rank, world_of
from toolkit.adversarial._warnings import warn
from toolkit.blocks import no_graph

__all__ = [
    "average_statistics",
    "infinite_buffers",
    "named",
    "trained",
    "undisturbed",
    "warn_of_local_statistics",
    "without_gradients",
]


def named(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters and the buffers of a model, each once; of an expanded tensor, the part that has memory."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        yield name, _with_memory(tensor)


def trained(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that require gradients."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def infinite_buffers(model: nn.Module) -> frozenset[str]:
    """Return the names of the buffers that hold an infinity on purpose, as the mask of causal attention does.

    Statistics of normalisation are left out, because they would stay infinite.
    """
    norms = (module for module in model.modules() if isinstance(module, nn.modules.batchnorm._NormBase))
    statistics = {id(buffer) for module in norms for buffer in module.buffers(recurse=False)}
    return frozenset(
        name
        for name, buffer in model.named_buffers()
        if buffer.is_floating_point() and id(buffer) not in statistics and bool(buffer.isinf().any())
    )


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Put a model in training mode; afterwards restore the modes of its modules and the global random states."""
    modes = [(module, module.training) for module in model.modules()]
    devices = sorted({tensor.device.index for _, tensor in named(model) if tensor.is_cuda})
    try:
        with torch.random.fork_rng(devices):
            if not model.training:
                for module, _ in modes:
                    module.training = True
            yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def without_gradients(model: nn.Module) -> Iterator[None]:
    """Leave no gradient in the parameters that are trained, however training ends."""
    try:
        yield
    finally:
        for parameter in trained(model):
            parameter.grad = None


def average_statistics(model: nn.Module, infinite: frozenset[str], group: ProcessGroup | None) -> None:
    """Give all ranks the mean of their running statistics, and the first rank's buffers that have no mean."""
    if group is None:
        return
    parameters = dict(model.named_parameters())
    with no_graph():
        for name, buffer in named(model):
            if name in parameters:
                continue
            first = buffer.clone()
            from_first_rank([first], group)
            if buffer.is_floating_point() and name not in infinite:
                # The mean of the differences: a constant keeps its bits, even the smallest number.
                change = buffer - first
                all_reduce(change, group=group)
                first += change / world_of(group)
            buffer.copy_(first)


def warn_of_local_statistics(model: nn.Module, group: ProcessGroup | None) -> None:
    """Warn the caller of `train` if batch normalisation sees only the rows of its rank."""
    if group is None or world_of(group) == 1:
        return
    norms = nn.modules.batchnorm._BatchNorm
    if any(isinstance(m, norms) and m.training and not isinstance(m, nn.SyncBatchNorm) for m in model.modules()):
        warn(
            "Batch normalisation sees the rows of its rank alone, so that ranks do not train quite as one process "
            "would. On GPUs `torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)` makes it see all rows."
        )


def _with_memory(tensor: Tensor) -> Tensor:
    """Return the part of a tensor in which every element has memory of its own: an expanded one cannot be written."""
    if tensor.layout != torch.strided:
        return tensor
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1 and stride == 0:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor
