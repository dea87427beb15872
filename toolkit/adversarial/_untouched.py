"""The state that attacks and certificates restore: modes, buffers and the global random states."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from toolkit.blocks import no_graph

__all__ = ["untouched"]

_Buffers = dict[str, Tensor | None]


@contextmanager
def untouched(model: object) -> Iterator[None]:
    """Run every module of `model` in evaluation mode, and leave no trace in it, also after an error.

    The mode of each module is restored, its buffers (a model may count its calls), and the state of torch's global
    generators, from which a model may draw even in evaluation mode. Modes are set one by one rather than by
    ``model.eval()`` and ``model.train()``: a model may be partly in evaluation mode (frozen batch normalisation), and
    its ``train`` may do more than set flags.

    Meanwhile the model works on copies of its buffers. A graph recorded here may be differentiated after a training
    pass, which moves the statistics of batch normalisation in place, unseen by autograd.

    Args:
        model: The model. A callable that is not a `torch.nn.Module` has no modes and no buffers.
    """
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    modes = [module.training for module in modules]
    kept = [(module._buffers, name, buffer) for module in modules for name, buffer in module._buffers.items()]
    devices = sorted({tensor.device.index for tensor in _tensors(modules) if tensor.is_cuda})
    try:
        with torch.random.fork_rng(devices):
            for buffers, name, copy in _copies(kept):
                buffers[name] = copy
            _set_modes(modules, [False] * len(modules))
            yield
    finally:
        _set_modes(modules, modes)
        for buffers, name, buffer in kept:
            buffers[name] = buffer


def _set_modes(modules: list[nn.Module], modes: list[bool]) -> None:
    for module, mode in zip(modules, modes, strict=True):
        if module.training != mode:
            module.training = mode


def _copies(kept: list[tuple[_Buffers, str, Tensor | None]]) -> Iterator[tuple[_Buffers, str, Tensor]]:
    """Return a copy of every buffer; a buffer that several modules share stays shared."""
    copies: dict[int, Tensor] = {}
    with no_graph():
        for buffers, name, buffer in kept:
            if buffer is not None:
                if id(buffer) not in copies:
                    copies[id(buffer)] = buffer.clone()
                yield buffers, name, copies[id(buffer)]


def _tensors(modules: list[nn.Module]) -> Iterator[Tensor]:
    for module in modules:
        yield from (tensor for tensor in module._parameters.values() if tensor is not None)
        yield from (tensor for tensor in module._buffers.values() if tensor is not None)
