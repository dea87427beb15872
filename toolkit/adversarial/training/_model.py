"""A model while it is trained: its tensors as they are written, what of them has to be finite, and its modes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from toolkit._divergence import not_finite
from toolkit.blocks import no_graph

__all__ = ["global_generator", "infinite_buffers", "named", "not_sound", "undisturbed"]


def named(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters and the buffers of a model, each once, and of an expanded one the part that has memory."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        yield name, _with_memory(tensor)


def infinite_buffers(model: nn.Module) -> frozenset[str]:
    """Return the names of the buffers that hold an infinity on purpose, as the mask of causal attention does.

    The statistics of normalisation are none of them: once infinite, they would stay so.
    """
    norms = (module for module in model.modules() if isinstance(module, nn.modules.batchnorm._NormBase))
    statistics = {id(buffer) for module in norms for buffer in module.buffers(recurse=False)}
    return frozenset(
        name
        for name, buffer in model.named_buffers()
        if buffer.is_floating_point() and id(buffer) not in statistics and bool(buffer.isinf().any())
    )


def not_sound(tensors: Mapping[str, Tensor], infinite: frozenset[str]) -> str | None:
    """Return the name of the first tensor that has a NaN, or an infinity that it may not have."""
    name = not_finite((name, tensor) for name, tensor in tensors.items() if name not in infinite)
    with no_graph():
        return name or next((name for name in tensors if name in infinite and bool(tensors[name].isnan().any())), None)


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Train a model, and give back the modes of its modules and the states of torch's global generators."""
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


def global_generator(device: torch.device) -> torch.Generator:
    """Return torch's own generator of a device, from which modules such as dropout draw."""
    return torch.cuda.default_generators[device.index or 0] if device.type == "cuda" else torch.default_generator


def _with_memory(tensor: Tensor) -> Tensor:
    """Return the part of a tensor in which every element has memory of its own: an expanded one cannot be written."""
    if tensor.layout != torch.strided:
        return tensor
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1 and stride == 0:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor
