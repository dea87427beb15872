"""The state that attacks and certificates restore: modes, buffers and the global random states."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from toolkit.blocks import no_graph

__all__ = ["modules_in", "untouched"]

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
        model: The model, or a function of models: modules that a function, a `functools.partial` or a bound method
            refers to are treated alike.
    """
    modules = list({id(module): module for root in modules_in(model) for module in root.modules()}.values())
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


def modules_in(model: object) -> list[nn.Module]:
    """Return the modules that a callable refers to: by its closure, its defaults, its global names or its arguments."""
    found: list[nn.Module] = []
    seen: set[int] = set()
    pending: list[Any] = [model]
    while pending:
        value = pending.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, nn.Module):
            found.append(value)
        else:
            pending.extend(_referred(value))
    return found


def _referred(value: Any) -> list[Any]:
    """Return the values that a function or a container refers to; nothing for anything else."""
    match value:
        case functools.partial():
            return [value.func, *value.args, *value.keywords.values()]
        case types.MethodType():
            return [value.__self__, value.__func__]
        case types.FunctionType():
            cells = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
            names = [value.__globals__[name] for name in _names(value.__code__) if name in value.__globals__]
            named = [one for one in names if isinstance(one, nn.Module | types.FunctionType | functools.partial)]
            return [*cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values(), *named]
        case list() | tuple():
            return list(value)
        case dict():
            return list(value.values())
    return []


def _is_filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:  # a variable that has no value yet
        return False
    return True


def _names(code: types.CodeType) -> list[str]:
    """Return the global names that a function uses, those of the functions inside of it included."""
    inner = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return [*code.co_names, *(name for function in inner for name in _names(function))]


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
