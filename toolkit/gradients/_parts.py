"""The objects that a loss function reaches in Python: modules, tensors, generators, and the places that hold state."""

from __future__ import annotations

import array
import collections
import functools
import gc
import itertools
import random
import sys
import sysconfig
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from toolkit.gradients._holders import Holder, attribute, can_be_copied, content, global_variable

__all__ = ["INSTALLED", "LARGEST_STATE", "Parts", "find_parts", "unique"]

# A loss function reaches few objects; the bound only ends the search of a pathological program.
_MOST_OBJECTS = 1_000_000

# A larger array, or a larger tensor outside of modules, is data and not state: a copy would cost too much.
LARGEST_STATE = 2**24

# The state of these libraries is restored by name, not by a search of their internals.
_LIBRARIES = sys.stdlib_module_names | {"torch", "numpy"}
_STATELESS = ("toolkit.blocks", "toolkit.gradients")


def _installed() -> tuple[str, ...]:
    """Return the folders of installed packages, also a user's own ones and those of ``pip install --target``."""
    own = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    return tuple(own | {path for path in sys.path if path and any(Path(path).glob("*.dist-info"))})


# Globals of third-party packages are not searched: they name thousands of objects.
INSTALLED = _installed()

_ATOMS = (str, bytes, int, float, complex, type(None), torch.dtype, torch.device, types.ModuleType, types.CodeType)

# Attributes of every module, most of them empty dicts of hooks.
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


@dataclass
class Parts:
    """The objects that a loss function reaches: name -> object, with names from the user's code.

    Attributes:
        modules: Modules that no other module contains.
        tensors: Tensors that are not parameters or buffers of these modules.
        generators: Sources of random numbers.
        moving: Iterators, which every run advances for good.
        cached: Functions with tensors of earlier calls in a cache of `functools`.
        state: Holders that may hold other objects after a run.
    """

    modules: dict[str, nn.Module] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    generators: list[Any] = field(default_factory=list)
    moving: dict[str, Any] = field(default_factory=dict)
    cached: dict[str, None] = field(default_factory=dict)
    state: list[Holder] = field(default_factory=list)

    def leaves(self) -> list[Tensor]:
        """Return every tensor and parameter that was found, buffers not included."""
        return [*self.tensors.values(), *(p for module in self.modules.values() for p in module.parameters())]

    def names_of_leaves(self) -> dict[int, str]:
        """Return id -> name of every tensor and parameter that was found."""
        names: dict[int, str] = {}
        for prefix, module in self.modules.items():  # before an optimiser's names of the same parameters
            for name, parameter in module.named_parameters(prefix):
                names.setdefault(id(parameter), name)
        for name, tensor in self.tensors.items():
            names.setdefault(id(tensor), name)
        return names


def find_parts(
    loss: Callable[..., Any], *more: Any, others: Mapping[str, Any] | None = None, everywhere: bool = False
) -> Parts:
    """Return the modules, tensors, generators and the state in Python that `loss` reaches.

    The search follows closures, defaults, bound objects, partial arguments, the globals that the code names,
    containers, caches, and the attributes, classes and methods of objects. Globals of installed packages are followed
    only with `everywhere`. Beyond a million objects the search ends with a `UserWarning`. An object that only `others`
    reach is named by them.
    """
    search = _Search(() if everywhere else INSTALLED)
    for found in (loss, *more):
        search.add("", found)
    search.run()
    for name, found in (others or {}).items():
        search.add(name, found)
        search.run()
    return search.parts


class _Search:
    """Breadth-first search of the objects that a function reaches, without the globals of code in some folders."""

    def __init__(self, left_out: tuple[str, ...]) -> None:
        self.parts, self._left_out = Parts(), left_out
        self._seen: set[int] = set()
        self._classes: set[type] = set()
        self._queue: collections.deque[tuple[str, Any]] = collections.deque()

    def add(self, name: str, found: Any) -> None:
        if not isinstance(found, _ATOMS):
            self._queue.append((name, found))

    def run(self) -> None:
        while self._queue:
            name, found = self._queue.popleft()
            if id(found) in self._seen:
                continue
            self._seen.add(id(found))
            if len(self._seen) > _MOST_OBJECTS:
                warnings.warn(
                    f"`loss` reaches more than {_MOST_OBJECTS} objects in Python. What is beyond them is not restored.",
                    stacklevel=2,
                )
                return
            self._visit(name, found)

    def _visit(self, name: str, found: Any) -> None:
        parts, state = self.parts, self.parts.state
        if isinstance(found, Tensor):
            parts.tensors[unique(name, parts.tensors)] = found
        elif isinstance(found, (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)):
            if not isinstance(found, random.SystemRandom):  # which has no state
                parts.generators.append(found)
        elif isinstance(found, nn.Module):
            parts.modules[unique(name, parts.modules)] = found
            for prefix, module in found.named_modules(prefix=name):
                self._seen.add(id(module))
                self._add_module(prefix, module)
        elif isinstance(found, types.FunctionType):
            self._add_function(found)
        elif isinstance(found, types.MethodType):
            self.add(name, found.__self__)
            self.add(name, found.__func__)
        elif isinstance(found, functools.partial):
            self.add(name, found.func)
            for index, value in enumerate(found.args):
                self.add(f"{name}[{index}]", value)
            for key, value in found.keywords.items():
                self.add(_join(name, key), value)
        elif isinstance(found, (dict, types.MappingProxyType)):
            self._add_items(name, found)
            self._add_object(name, found)
        elif isinstance(found, (collections.UserDict, collections.ChainMap)):
            self.add(name, getattr(found, "data", None) or getattr(found, "maps", None))
            self._add_object(name, found)
        elif isinstance(found, (list, collections.deque, tuple, set, frozenset)):
            if not isinstance(found, (tuple, frozenset)):
                state.append(content(found))
            for index, value in enumerate(found):
                self.add(f"{name}[{index}]", value)
            self._add_object(name, found)
        elif isinstance(found, array.array):
            state.append(content(found))
        elif isinstance(found, np.ndarray):
            if found.dtype != object and found.flags.writeable and found.nbytes <= LARGEST_STATE:
                state.append(content(found))
        elif isinstance(found, collections.abc.Iterator) and not (_has_attributes(found) and _is_followed(found)):
            if not can_be_copied(found):
                parts.moving[unique(name, parts.moving)] = found
            frame = getattr(found, "gi_frame", None)
            inside = {} if frame is None else frame.f_locals
            for key, value in inside.items():
                self.add(key, value)
            for value in gc.get_referents(found) if not inside else ():
                self.add(name, value)
        elif isinstance(found, functools._lru_cache_wrapper):
            self.add(name, found.__wrapped__)
            if any(isinstance(value, Tensor) and not isinstance(value, nn.Parameter) for value in _cached(found)):
                parts.cached[found.__qualname__] = None
            if found.cache_parameters()["maxsize"] is None:
                for value in gc.get_referents(found):
                    self.add(name, value)
            else:  # the links between its entries are internal
                state.append(content(found))
        elif isinstance(found, type):
            self._add_class(name, found)
        elif isinstance(found, (collections.abc.ValuesView, collections.abc.KeysView, collections.abc.ItemsView)):
            for value in gc.get_referents(found):
                self.add(name, value)
        else:
            self._add_object(name, found)

    def _add_items(self, name: str, found: Mapping[Any, Any]) -> None:
        # Other mappings may be files, which must not be read completely, or cleared.
        if isinstance(found, dict):
            self.parts.state.append(content(found))
        for key, value in found.items():
            if not isinstance(value, _ATOMS):
                self.add(_join(name, str(key) if isinstance(key, _ATOMS) else type(key).__name__), value)

    def _add_module(self, prefix: str, module: nn.Module) -> None:
        own = vars(module)
        self.parts.state.append(content(own))
        for key, value in own.items():
            if key not in _OF_EVERY_MODULE:
                self.add(_join(prefix, key), value)
            elif key in ("_parameters", "_buffers", "_modules"):
                if isinstance(value, dict):  # a module in TorchScript keeps them elsewhere, and never has others
                    self.parts.state.append(content(value))
            elif not isinstance(value, dict) or value:
                self.add(_join(prefix, key), value)
        self._add_class(prefix, type(module))

    def _add_object(self, name: str, found: Any) -> None:
        if not _has_attributes(found) or not _is_followed(found):
            return
        if (own := getattr(found, "__dict__", None)) is not None:
            self.parts.state.append(content(own))
            for key, value in own.items():
                self.add(_join(name, key), value)
        for slot in _slots(type(found)):
            self.parts.state.append(attribute(found, slot))
            self.add(_join(name, slot), getattr(found, slot, None))
        self._add_class(name, type(found))

    def _add_class(self, name: str, found: type) -> None:
        for parent in found.__mro__:
            if parent in self._classes or _is_library(parent.__module__):
                continue
            self._classes.add(parent)
            for key, value in vars(parent).items():
                value = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
                value = value.fget if isinstance(value, property) else value
                if isinstance(value, (types.FunctionType, functools._lru_cache_wrapper)):
                    self.add("", value)
                elif not key.startswith("__") and not _is_descriptor(value):
                    self.parts.state.append(attribute(parent, key))
                    self.add(_join(name, key), value)

    def _add_function(self, found: types.FunctionType) -> None:
        for variable, cell in zip(found.__code__.co_freevars, found.__closure__ or (), strict=True):
            try:
                value = cell.cell_contents
            except ValueError:  # a cell that is not filled yet
                continue
            if isinstance(value, types.ModuleType):
                self._add_variables(variable, value, set(_names_in(found.__code__)))
            elif not isinstance(value, types.FunctionType):
                self.parts.state.append(attribute(cell, "cell_contents"))
            self.add(variable, value)
        arguments = found.__code__.co_varnames[: found.__code__.co_argcount]
        defaults = found.__defaults__ or ()
        for name, value in zip(arguments[len(arguments) - len(defaults) :], defaults, strict=True):
            self.add(name, value)
        for name, value in (found.__kwdefaults__ or {}).items():
            self.add(name, value)
        wrapped = getattr(found, "__wrapped__", None)
        self.add("", wrapped)
        if _is_library(found.__module__) or found.__code__.co_filename.startswith(self._left_out):
            return
        self.parts.state.append(content(vars(found)))
        for name, value in vars(found).items():
            self.add(name, value)
        names, variables = set(_names_in(found.__code__)), found.__globals__
        for name in sorted(names & variables.keys()):
            value = variables[name]
            if isinstance(value, types.ModuleType):
                self._add_variables(name, value, names)
                continue
            if not isinstance(value, (types.FunctionType, type)):
                self.parts.state.append(global_variable(variables, name))
            self.add(name, value)

    def _add_variables(self, name: str, module: types.ModuleType, names: Set[str]) -> None:
        """Follow those variables of a module that code names."""
        if _is_library(module.__name__) or (getattr(module, "__file__", None) or "").startswith(self._left_out):
            return
        for key in sorted(names & vars(module).keys()):
            self.parts.state.append(global_variable(vars(module), key))
            self.add(f"{name}.{key}", vars(module)[key])


def _cached(function: Any) -> list[Any]:
    """Return the values in a cache of `functools`, including the entries of lists and tuples."""
    (entries,) = [found for found in gc.get_referents(function) if type(found) is dict and found is not vars(function)]
    links = [found for value in entries.values() for found in (value, *gc.get_referents(value))]
    return [leaf for found in links for leaf in (found if isinstance(found, (list, tuple)) else (found,))]


def _names_in(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)


def _slots(found: type) -> Iterator[str]:
    for parent in found.__mro__:
        slots = vars(parent).get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            if slot not in ("__dict__", "__weakref__"):
                yield slot


def _has_attributes(found: Any) -> bool:
    return hasattr(found, "__dict__") or any(_slots(type(found)))


def _is_descriptor(value: Any) -> bool:
    return hasattr(type(value), "__get__")


def _is_followed(found: Any) -> bool:
    if isinstance(found, (types.ModuleType, torch._C._FunctionBase)):
        return False
    followed = isinstance(found, (torch.optim.Optimizer, types.SimpleNamespace))
    return followed or not _is_library(type(found).__module__)


def _is_library(module: str | None) -> bool:
    return module is None or module.partition(".")[0] in _LIBRARIES or module.startswith(_STATELESS)


def unique(name: str, taken: Mapping[str, Any]) -> str:
    """Return a name, with a number if it is taken."""
    if name not in taken:
        return name
    return next(numbered for i in itertools.count(2) if (numbered := f"{name}#{i}") not in taken)


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
