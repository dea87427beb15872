"""What a program is made of, found from its loss function, and how it is left as it was found."""

from __future__ import annotations

import functools
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

__all__ = ["Parts", "Snapshot", "find_parts"]

# A loss function reaches few objects; the bound only keeps a pathological program from being searched for ever.
_MOST_OBJECTS = 20_000


@dataclass
class Parts:
    """What a loss function reaches: name -> object, the name as the user's code has it."""

    modules: dict[str, nn.Module] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    generators: list[torch.Generator] = field(default_factory=list)

    def names_of_leaves(self) -> dict[int, str]:
        """Return id -> name of every tensor and parameter that was found."""
        names = {id(tensor): name for name, tensor in self.tensors.items()}
        for prefix, module in self.modules.items():
            for name, parameter in module.named_parameters(prefix):
                names.setdefault(id(parameter), name)
        return names


def find_parts(loss: Callable[..., Any], *more: Any) -> Parts:
    """Return the modules, tensors and generators that `loss` reaches.

    Closures, defaults, bound objects, partial arguments, the globals that its code names, containers and the
    attributes of plain objects are followed; imported modules are not.
    """
    parts = Parts()
    seen: set[int] = set()
    queue: deque[tuple[str, Any]] = deque([("", loss), *(("", extra) for extra in more)])
    while queue and len(seen) < _MOST_OBJECTS:
        name, found = queue.popleft()
        if id(found) in seen:
            continue
        seen.add(id(found))
        if isinstance(found, torch.Generator):
            parts.generators.append(found)
        elif isinstance(found, Tensor):
            parts.tensors[name] = found
        elif isinstance(found, nn.Module):
            parts.modules[name] = found
        else:
            queue.extend(_children(name, found))
    return parts


class Snapshot:
    """The state of a program before its loss function ran: random numbers, modes, buffers, gradients."""

    def __init__(self, parts: Parts, parameters: Mapping[str, Tensor]) -> None:
        """Take the random state now; the rest is set aside by `set_aside`."""
        self._modules = list(dict.fromkeys(m for module in parts.modules.values() for m in module.modules()))
        leaves = [p for module in self._modules for p in module.parameters(recurse=False)]
        self._leaves = list(
            {id(leaf): leaf for leaf in [*leaves, *parts.tensors.values(), *parameters.values()]}.values()
        )
        self._generators = parts.generators
        self._random = _RandomState(self._generators)

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Run a body on the program as it was, and restore everything after it, also when it raises.

        Buffers are replaced by copies, not written back: writing to them would invalidate the graph that was made of
        them. Gradients are moved away likewise.
        """
        now = _RandomState(self._generators)
        self._random.restore()
        gradients = [(leaf, leaf.grad) for leaf in self._leaves if leaf.is_leaf]
        modes = [(module, module.training) for module in self._modules]
        buffers = [(module, name, buffer) for module in self._modules for name, buffer in module._buffers.items()]
        with ExitStack() as stack:
            stack.callback(now.restore)
            for leaf, _ in gradients:
                leaf.grad = None
            for module, name, buffer in buffers:
                module._buffers[name] = None if buffer is None else buffer.clone()
            try:
                yield
            finally:
                for leaf, gradient in gradients:
                    leaf.grad = gradient
                for module, training in modes:
                    module.training = training
                for module, name, buffer in buffers:
                    module._buffers[name] = buffer


class _RandomState:
    def __init__(self, generators: list[torch.Generator]) -> None:
        self._python, self._numpy, self._torch = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        self._generators = [(generator, generator.get_state()) for generator in generators]

    def restore(self) -> None:
        random.setstate(self._python)
        np.random.set_state(self._numpy)  # noqa: NPY002
        torch.set_rng_state(self._torch)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)
        for generator, state in self._generators:
            generator.set_state(state)


def _children(name: str, parent: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(parent, functools.partial):
        yield name, parent.func
        yield from _children(name, [*parent.args, *parent.keywords.values()])
    elif isinstance(parent, types.MethodType):
        yield name, parent.__self__
        yield name, parent.__func__
    elif isinstance(parent, types.FunctionType):
        for variable, cell in zip(parent.__code__.co_freevars, parent.__closure__ or (), strict=True):
            try:
                yield variable, cell.cell_contents
            except ValueError:  # a cell that is not filled yet
                continue
        for variable in _global_names(parent.__code__):
            if variable in parent.__globals__:
                yield variable, parent.__globals__[variable]
        yield from _children(name, [*(parent.__defaults__ or ()), *(parent.__kwdefaults__ or {}).values()])
    elif isinstance(parent, Mapping):
        for key, value in parent.items():
            yield _join(name, f"{key}"), value
    elif isinstance(parent, (list, tuple, set, frozenset)):
        for index, value in enumerate(parent):
            yield f"{name}[{index}]", value
    elif _is_plain_object(parent):
        for key, value in vars(parent).items():
            yield _join(name, key), value


def _global_names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _global_names(constant)


def _is_plain_object(value: Any) -> bool:
    if isinstance(value, (type, types.ModuleType)) or not hasattr(value, "__dict__"):
        return False
    home = type(value).__module__.partition(".")[0]
    return (
        home not in sys.stdlib_module_names
        and home not in ("numpy", "builtins")
        and (home != "torch" or isinstance(value, torch.optim.Optimizer))
    )


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
