"""What a program is made of, found from its loss function, and how it is left as it was found."""

from __future__ import annotations

import functools
import itertools
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

__all__ = ["Parts", "Snapshot", "find_parts", "without_compiled_code"]

# A loss function reaches few objects; the bound only keeps a pathological program from being searched for ever.
_MOST_OBJECTS = 20_000


# The state of these libraries is restored by name, not by a search through their insides.
_LIBRARIES = sys.stdlib_module_names | {"torch", "numpy"}
_STATELESS = ("toolkit.blocks", "toolkit.gradients")


@dataclass
class Parts:
    """What a loss function reaches: name -> object, the name as the user's code has it."""

    modules: dict[str, nn.Module] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    generators: list[Any] = field(default_factory=list)

    def leaves(self) -> list[Tensor]:
        """Return every tensor and parameter that was found, buffers not included."""
        return [*self.tensors.values(), *(p for module in self.modules.values() for p in module.parameters())]

    def names_of_leaves(self) -> dict[int, str]:
        """Return id -> name of every tensor and parameter that was found."""
        names: dict[int, str] = {}
        for prefix, module in self.modules.items():  # before what an optimiser calls the same parameters
            for name, parameter in module.named_parameters(prefix):
                names.setdefault(id(parameter), name)
        for name, tensor in self.tensors.items():
            names.setdefault(id(tensor), name)
        return names


def find_parts(loss: Callable[..., Any], *more: Any) -> Parts:
    """Return the modules, tensors and generators that `loss` reaches.

    Closures, defaults, bound objects, partial arguments, the globals that its code names, containers, and the
    attributes and methods of objects are followed; imported modules as far as the code names what is in them.
    """
    parts = Parts()
    seen: set[int] = set()
    queue: deque[tuple[str, Any]] = deque([("", loss), *(("", extra) for extra in more)])
    while queue and len(seen) < _MOST_OBJECTS:
        name, found = queue.popleft()
        if id(found) in seen or isinstance(found, (str, bytes, int, float, complex, type(None))):
            continue
        seen.add(id(found))
        if isinstance(found, (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)):
            parts.generators.append(found)
        elif isinstance(found, Tensor):
            parts.tensors[_unique(name, parts.tensors)] = found
        else:
            if isinstance(found, nn.Module):
                parts.modules[_unique(name, parts.modules)] = found
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
        leaves = [(leaf, leaf.grad, leaf.requires_grad) for leaf in self._leaves if leaf.is_leaf]
        modes = [(module, module.training) for module in self._modules]
        buffers = [(module, name, buffer) for module in self._modules for name, buffer in module._buffers.items()]
        copies = {id(buffer): None if buffer is None else buffer.clone() for _, _, buffer in buffers}
        with ExitStack() as stack:
            stack.callback(now.restore)
            for leaf, _, _ in leaves:
                leaf.grad = None
            for module, name, buffer in buffers:
                module._buffers[name] = copies[id(buffer)]
            try:
                yield
            finally:
                for leaf, gradient, required in leaves:
                    if not leaf.is_leaf:  # an average of parameters, say, that was updated inside of an open region
                        leaf.detach_()
                    if leaf.requires_grad != required:
                        leaf.requires_grad_(required)
                    leaf.grad = gradient
                for module, training in modes:
                    module.training = training
                for module, name, buffer in buffers:
                    module._buffers[name] = buffer


class _RandomState:
    def __init__(self, generators: list[Any]) -> None:
        self._python, self._numpy, self._torch = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        self._generators = [(generator, _get_state(generator)) for generator in generators]

    def restore(self) -> None:
        random.setstate(self._python)
        np.random.set_state(self._numpy)  # noqa: NPY002
        torch.set_rng_state(self._torch)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)
        for generator, state in self._generators:
            _set_state(generator, state)


def _get_state(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
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
        if not _is_library(parent.__module__):
            yield from _named_globals(parent)
        arguments = parent.__code__.co_varnames[: parent.__code__.co_argcount]
        defaults = parent.__defaults__ or ()
        yield from zip(arguments[len(arguments) - len(defaults) :], defaults, strict=True)
        yield from (parent.__kwdefaults__ or {}).items()
    elif isinstance(parent, Mapping):
        for key, value in parent.items():
            yield _join(name, f"{key}"), value
    elif isinstance(parent, (list, tuple, set, frozenset)):
        for index, value in enumerate(parent):
            yield f"{name}[{index}]", value
    elif isinstance(parent, nn.Module):
        for prefix, module in parent.named_modules(prefix=name):
            for key, value in vars(module).items():
                if key not in ("_parameters", "_buffers", "_modules"):
                    yield _join(prefix, key), value
            yield from _methods(module)
    elif _is_plain_object(parent):
        for key, value in vars(parent).items():
            yield _join(name, key), value
        yield from _methods(parent)


def _named_globals(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    names = set(_names_in(function.__code__))
    for name in sorted(names & function.__globals__.keys()):
        value = function.__globals__[name]
        if not isinstance(value, types.ModuleType):
            yield name, value
        elif not _is_library(value.__name__):
            yield from ((f"{name}.{key}", vars(value)[key]) for key in sorted(names & vars(value).keys()))


def _names_in(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)


def _methods(value: Any) -> Iterator[tuple[str, Any]]:
    for parent in type(value).__mro__:
        if not _is_library(parent.__module__):
            yield from (("", method) for method in vars(parent).values() if isinstance(method, types.FunctionType))


def _is_plain_object(value: Any) -> bool:
    if isinstance(value, (type, types.ModuleType)) or not hasattr(value, "__dict__"):
        return False
    followed = isinstance(value, (torch.optim.Optimizer, types.SimpleNamespace))
    return followed or not _is_library(type(value).__module__)


def _is_library(module: str | None) -> bool:
    return module is None or module.partition(".")[0] in _LIBRARIES or module.startswith(_STATELESS)


def _unique(name: str, taken: Mapping[str, Any]) -> str:
    numbered = (f"{name}#{i}" for i in itertools.count(2))
    return next(candidate for candidate in itertools.chain([name], numbered) if candidate not in taken)


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def without_compiled_code() -> AbstractContextManager[None]:
    """A compiled graph has no gates in it: run the Python that it was made of."""
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    stance: AbstractContextManager[None] = torch.compiler.set_stance("force_eager")
    return stance
