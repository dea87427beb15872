"""The state that attacks and certificates restore: modes, buffers and the global random states."""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from toolkit.adversarial._functional import all_kept, reentrant_kept
from toolkit.blocks import no_graph

__all__ = ["modules_in", "untouched"]

# The longest search for modules.
_MOST_SEARCHED, _MOST_ENTRIES = 20_000, 1_000

# Values that refer to no module.
_ATOMS = (
    str,
    bytes,
    bool,
    int,
    float,
    complex,
    type(None),
    Tensor,
    np.ndarray,
    np.generic,
    torch.dtype,
    torch.Generator,
)

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_LIBRARIES = ("torch.", "numpy.")

_Buffers = dict[str, Tensor | None]


@contextmanager
def untouched(model: object) -> Iterator[None]:
    """Run every module of `model` in evaluation mode, and leave no trace in it, also after an error.

    The mode of each module is restored, its buffers (a model may count its calls), and the state of torch's global
    generators, from which a model may draw even in evaluation mode. Modes are set one by one rather than by
    ``model.eval()`` and ``model.train()``: a model may be partly in evaluation mode (frozen batch normalisation), and
    its ``train`` may do more than set flags.

    Meanwhile the model works on copies of its buffers. A graph recorded here may be differentiated after a training
    pass, which moves the statistics of batch normalisation in place, unseen by autograd. For the same reason the
    activations of such a graph are kept, even if the model checkpoints them: they would be computed again in another
    mode. No gradient with respect to an input passes a checkpoint with ``use_reentrant=True``, so those are kept too.

    Args:
        model: The model, or a callable that uses models: modules that it refers to are treated alike; see `modules_in`.
    """
    modules = modules_in(model)
    modes = [module.training for module in modules]
    kept = [(module._buffers, name, buffer) for module in modules for name, buffer in module._buffers.items()]
    devices = sorted({tensor.device.index for tensor in _tensors(modules) if tensor.is_cuda})
    try:
        with torch.random.fork_rng(devices), all_kept() if torch.is_grad_enabled() else reentrant_kept():
            for buffers, name, copy in _copies(kept):
                buffers[name] = copy
            _set_modes(modules, [False] * len(modules))
            yield
    finally:
        _set_modes(modules, modes)
        for buffers, name, buffer in kept:
            buffers[name] = buffer


def modules_in(model: object) -> list[nn.Module]:
    """Return the modules that a callable refers to, by its closure, defaults, global names, arguments or attributes.

    The search looks at the first 1,000 entries of a container, and at 20,000 values.
    """
    found: list[nn.Module] = []
    seen: dict[int, Any] = {}  # with the values, so that no number is taken twice
    pending = deque[Any]([model])
    while pending and len(seen) < _MOST_SEARCHED:
        value = pending.popleft()
        if id(value) in seen or isinstance(value, _ATOMS):
            continue
        for one in value.modules() if isinstance(value, nn.Module) else [value]:
            if id(one) not in seen:
                seen[id(one)] = one
                found += [one] if isinstance(one, nn.Module) else []
                pending.extend(islice(_referred(one), _MOST_ENTRIES))
    return found


def _referred(value: Any) -> Iterable[Any]:
    """Return the values that a function, a container or an object refers to."""
    match value:
        case type() | types.ModuleType():
            return []
        case nn.Module():
            own = vars(value)
            return [_function_of(type(value), "forward"), *(own[key] for key in own.keys() - _OF_EVERY_MODULE)]
        case functools.partial():
            return [value.func, *value.args, *value.keywords.values()]
        case types.MethodType():
            return [value.__self__, value.__func__]
        case types.FunctionType():
            cells = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
            names = _names(value.__code__) if _is_own(value) else []
            named = [value.__globals__[name] for name in names if name in value.__globals__]
            return [*cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values(), *named]
        case list() | tuple():
            return value
        case dict():
            return value.values()
    return [_function_of(type(value), "__call__"), *getattr(value, "__dict__", {}).values()]


def _function_of(kind: type, name: str) -> Any:
    """Return a method of a class; None for one of a library, which names no models."""
    method = getattr(kind, name, None)
    return method if isinstance(method, types.FunctionType) and _is_own(method) else None


def _is_own(function: types.FunctionType) -> bool:
    return not (function.__module__ or "").startswith(_LIBRARIES)


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
