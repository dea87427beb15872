"""What an attack or a certificate leaves as it was: modes, buffers and the global random states."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from toolkit.blocks import no_graph

__all__ = ["untouched"]


@contextmanager
def untouched(model: object) -> Iterator[None]:
    """Run every module of `model` in evaluation mode, and leave no trace in it, also after an error.

    Given back are the mode of each module, the values of its buffers (a model may count its calls), and the state of
    torch's global generators, from which a model may draw even in evaluation mode. Modes are set one by one rather
    than by ``model.eval()`` and ``model.train()``: a model may be partly in evaluation mode (frozen batch
    normalisation), and its ``train`` may do more than set flags.

    Args:
        model: What is not a `torch.nn.Module` has no modes and no buffers.
    """
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    training = [module for module in modules if module.training]
    with no_graph():
        buffers = [(buffer, buffer.clone(), buffer._version) for buffer in _buffers(modules)]
    devices = sorted({tensor.device.index for tensor in _tensors(modules) if tensor.is_cuda})
    try:
        with torch.random.fork_rng(devices):
            for module in training:
                module.training = False
            yield
    finally:
        for module in training:
            module.training = True
        with no_graph():
            for buffer, value, version in buffers:
                if buffer._version != version:
                    buffer.copy_(value)


def _buffers(modules: list[nn.Module]) -> Iterator[Tensor]:
    seen: set[int] = set()
    for module in modules:
        for buffer in module._buffers.values():
            if buffer is not None and not buffer.is_inference() and id(buffer) not in seen:
                seen.add(id(buffer))
                yield buffer


def _tensors(modules: list[nn.Module]) -> Iterator[Tensor]:
    for module in modules:
        yield from (tensor for tensor in module._parameters.values() if tensor is not None)
        yield from (tensor for tensor in module._buffers.values() if tensor is not None)
