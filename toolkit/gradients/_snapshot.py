"""The state of a program, found from its loss function, with copies to restore it."""

from __future__ import annotations

import array
import collections
import functools
import gc
import itertools
import operator
import random
import sys
import sysconfig
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from toolkit.blocks import has_storage, no_graph

__all__ = ["INSTALLED", "Kept", "Parts", "RandomState", "Snapshot", "find_parts", "without_compiled_code"]

# A loss function reaches few objects; the bound only ends the search of a pathological program.
_MOST_OBJECTS = 1_000_000

# A larger array, or a larger tensor outside of modules, is data and not state: a copy would cost too much.
_LARGEST_STATE = 2**24

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
# Iterators that can be copied, with their sources, so that a run advances the copy.
_EMPTY: tuple[Any, ...] = ([], (), "", b"", range(0), {}, {}.values(), {}.items(), set())
_COPIED = frozenset(
    [
        *(type(iter(empty)) for empty in _EMPTY),
        *(enumerate, filter, map, reversed, zip, type(reversed([]))),
        *(itertools.accumulate, itertools.chain, itertools.count, itertools.cycle, itertools.islice, itertools.repeat),
    ]
)

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


class Snapshot:
    """The state of a program before its loss function ran.

    It covers random numbers, modes, buffers, gradients, the values of tensors, and the contents of containers and
    attributes.
    """

    def __init__(self, parts: Parts, parameters: Mapping[str, Tensor]) -> None:
        """Take the state now."""
        self._modules = list(dict.fromkeys(m for module in parts.modules.values() for m in module.modules()))
        leaves = [p for module in self._modules for p in module.parameters(recurse=False)]
        buffers = [b for module in self._modules for b in module.buffers(recurse=False)]
        tensors = {id(t): t for t in [*leaves, *buffers, *parts.tensors.values(), *parameters.values()]}
        self._tensors = [tensor for tensor in tensors.values() if not tensor.is_inference()]
        self.leaves = [tensor for tensor in self._tensors if tensor.is_leaf]
        self._parts = parts
        self._random = RandomState(parts.generators)
        self._state = [holder.taken() for holder in parts.state]
        small = {id(t) for t in [*leaves, *buffers, *parameters.values()]}
        self._data = {id(t) for t in self._tensors if id(t) not in small and _size(t) > _LARGEST_STATE}
        self._names = {id(t): name for name, t in parts.tensors.items()}
        self._values: list[Kept] | None = self._kept_now()
        self._is_lent = self._is_new = self._draws_anew = False

    @contextmanager
    def session(self, *, is_new: bool = False) -> Iterator[None]:
        """Restore random numbers and state in Python at the end of a ``with``, once for all runs inside of it.

        Args:
            is_new: Whether nothing has run since this state was taken.
        """
        if self._is_lent:
            yield
            return
        now = self._random if is_new else RandomState(self._parts.generators)
        state = self._state if is_new else [taken if taken.is_held() else taken.holder.taken() for taken in self._state]
        self._is_lent, self._is_new, self._draws_anew = True, is_new, is_new or now.equals(self._random)
        try:
            with ExitStack() as stack:
                stack.callback(now.restore)
                stack.callback(_put_back, state)
                yield
        finally:
            self._is_lent = False

    def _lend(self, *, runs: bool) -> None:
        """Restore random numbers and state in Python for a run, or state alone for a derivative."""
        iterators: dict[int, Any] = {}
        for taken in self._state:
            if taken.moves or not self._is_new:
                taken.lend(iterators)
        if runs and not self._draws_anew:
            self._random.restore()
        self._is_new = self._draws_anew = False

    @contextmanager
    def set_aside(self, *, runs: bool = True) -> Iterator[_Moved]:
        """Run a body on the program in its saved state, and restore everything afterwards, also after an error.

        Buffers are replaced by copies, not written back: writing to them would invalidate the graph that uses them.
        Gradients are moved aside in the same way.

        Args:
            runs: Whether the program runs; otherwise only a derivative of an earlier run is taken, which changes no
                values.
        """
        moved = _Moved()
        if self._values is None and runs:
            self._values = self._kept_now()
        initial = self._values if runs and self._values is not None else []
        values = [kept.again() for kept in initial if kept.is_touched()]
        leaves = [(leaf, leaf.grad, leaf.requires_grad) for leaf in self.leaves if leaf.is_leaf]
        with self.session():
            self._lend(runs=runs)
            for kept in initial if values else ():
                kept.put_back()
            for leaf, gradient, _ in leaves if runs else ():
                leaf.grad = None if gradient is None else gradient.clone()
            buffers = [(module, name, b) for module in self._modules for name, b in module._buffers.items()]
            copies = {id(buffer): None if buffer is None else buffer.clone() for _, _, buffer in buffers}
            for module, name, buffer in buffers:
                module._buffers[name] = copies[id(buffer)]
            try:
                yield moved
            finally:
                for leaf, gradient, required in leaves:
                    if not leaf.is_leaf:  # such as an average of parameters, updated inside of an open region
                        leaf.detach_()
                    if leaf.requires_grad != required:
                        leaf.requires_grad_(required)
                    leaf.grad = gradient
                for module, name, buffer in buffers:
                    module._buffers[name] = buffer
                changed = [kept for kept in initial if kept.is_changed()]
                moved.values |= bool(changed)
                # Data last, which cannot be put back: that is an error, and everything else is in its place by then.
                for kept in sorted([*changed, *values], key=lambda kept: kept.values is None):
                    kept.put_back()

    def _kept_now(self) -> list[Kept]:
        return [Kept.now(tensor, self._names.get(id(tensor), ""), id(tensor) in self._data) for tensor in self._tensors]

    def storages(self) -> set[int]:
        """Return the present memory of the program's tensors, buffers included."""
        buffers = [b for module in self._modules for b in module._buffers.values() if b is not None]
        return {tensor.untyped_storage()._cdata for tensor in [*self._tensors, *buffers] if has_storage(tensor)}

    def forget_values(self) -> None:
        """Free the copies of values; the next run takes new ones."""
        self._values = None


@dataclass
class _Moved:
    """The changes by a run: whether it changed the values of tensors that existed before."""

    values: bool = False


@dataclass(frozen=True)
class Kept:
    """The state of a leaf at one time: its memory, its values, and autograd's count of their changes.

    Of data there is no copy of the values: a program that writes into them is refused.
    """

    leaf: Tensor
    name: str
    memory: Tensor
    values: Tensor | None
    version: int

    @classmethod
    def now(cls, leaf: Tensor, name: str, is_data: bool) -> Kept:
        """Take the state of a leaf; of data without its values."""
        memory = torch._C.TensorBase.detach(leaf)
        return cls(leaf, name, memory, None if is_data else memory.clone(), leaf._version)

    def again(self) -> Kept:
        """Return what it is now."""
        return self.now(self.leaf, self.name, self.values is None)

    def is_touched(self) -> bool:
        """Return whether the leaf may have changed."""
        return self.leaf._version != self.version or _address(self.leaf) != _address(self.memory)

    def is_changed(self) -> bool:
        """Return whether the leaf has changed."""
        if self.values is None:
            return self.is_touched()
        return self.is_touched() or not _same(torch._C.TensorBase.detach(self.leaf), self.values)

    def put_back(self) -> None:
        """Restore the state."""
        if self.values is None:
            raise RuntimeError(
                f"`loss` should not write into its data. Found `{self.name}` changed, too large to be put back."
            )
        with no_graph():
            if _address(self.leaf) != _address(self.memory) or _shape(self.leaf) != _shape(self.memory):
                self.leaf.data = self.memory
            self.leaf.copy_(self.values)
        torch._C._autograd._unsafe_set_version_counter((self.leaf,), (self.version,))


def _address(tensor: Tensor) -> int:
    return 0 if tensor.layout is not torch.strided else tensor.data_ptr()


def _components(tensor: Tensor) -> list[Tensor]:
    """Return the dense tensors that a sparse or nested tensor consists of; of any other the tensor itself."""
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    if tensor.layout is torch.strided and tensor.is_nested:  # its shape cannot be asked for
        return [tensor._nested_tensor_size(), tensor.values()]
    if tensor.layout is torch.jagged:
        return [tensor.offsets(), tensor.values()]  # type: ignore[attr-defined]
    return [tensor if tensor.layout is torch.strided else tensor.to_dense()]


def _shape(tensor: Tensor) -> torch.Size | None:
    """Return the shape; None for a nested tensor with strides, which has none."""
    return None if tensor.layout is torch.strided and tensor.is_nested else tensor.shape


def _size(tensor: Tensor) -> int:
    return sum(part.nbytes for part in _components(tensor))


def _same(a: Tensor, b: Tensor) -> bool:
    if a.layout is not b.layout or a.is_nested != b.is_nested:
        return False
    if isinstance(a, FakeTensor):  # without values
        return True
    return all(map(_same_numbers, _components(a), _components(b)))


def _same_numbers(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.is_meta:  # without values
        return True
    return torch.equal(a, b) or bool(
        a.is_floating_point() and torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())
    )


class RandomState:
    """The states of the global generators and of those given, to be restored."""

    def __init__(self, generators: list[Any]) -> None:
        self._python, self._numpy, self._torch = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        self._generators = [(generator, _get_state(generator)) for generator in generators]

    def equals(self, other: RandomState) -> bool:
        """Return whether all draws will be the same."""
        return (
            self._python == other._python
            and all(map(np.array_equal, self._numpy, other._numpy))
            and torch.equal(self._torch, other._torch)
            and not (self._cuda or other._cuda or self._generators or other._generators)
        )

    def restore(self) -> None:
        """Draw again from here."""
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


# --- state in Python ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Taken:
    """The content of a holder at one time."""

    holder: Holder
    held: Any
    moves: bool

    def is_held(self) -> bool:
        return self.holder.holds(self.held)

    def put_back(self) -> None:
        if not self.is_held():
            self.holder.hold(self.held)

    def lend(self, copies: dict[int, Any]) -> None:
        """Restore the content for a run, with copies of iterators, because iterators cannot be reset."""
        if self.moves:
            self.holder.hold(self.holder.lent(self.held, copies))
        else:
            self.put_back()


def _put_back(state: Iterable[_Taken]) -> None:
    """Put back what is no more as it was, also when something else raises."""
    with ExitStack() as stack:
        for taken in state:
            if not taken.is_held():
                stack.callback(taken.put_back)


@dataclass(frozen=True, eq=False)
class Holder:
    """A place in Python that holds objects: a container, the attributes of an object, a variable of a closure."""

    owner: Any

    def taken(self) -> _Taken:
        """Return the present content."""
        held = self.held()
        return _Taken(self, held, any(type(value) in _COPIED for value in self.values(held)))

    def held(self) -> Any:
        """Return the content in a form that does not change with the holder."""
        raise NotImplementedError

    def holds(self, held: Any) -> bool:
        """Return whether the holder has exactly these objects, by identity."""
        raise NotImplementedError

    def hold(self, held: Any) -> None:
        """Set the content."""
        raise NotImplementedError

    def values(self, held: Any) -> Iterable[Any]:
        """Return the objects in a content."""
        return (held,)

    def lent(self, held: Any, copies: dict[int, Any]) -> Any:
        """Return the content, with copies in place of iterators."""
        return _copied(held, copies)


def _copied(value: Any, copies: dict[int, Any]) -> Any:
    """Return a copy of an iterator and its sources; return other objects, or iterators without a copy, unchanged."""
    if type(value) not in _COPIED:
        return value
    if id(value) not in copies:
        copies[id(value)] = value
        if _can_be_copied(value):
            with _undeprecated():
                make, arguments, *state = value.__reduce__()
                copies[id(value)] = fresh = make(*(_copied(argument, copies) for argument in arguments))
                if state:
                    fresh.__setstate__(*state)
    return copies[id(value)]


def _can_be_copied(value: Any) -> bool:
    """Return whether a value is unaffected when a copy of its iterator advances."""
    if type(value) not in _COPIED:
        return not isinstance(value, collections.abc.Iterator)
    try:
        with _undeprecated():
            return all(map(_can_be_copied, value.__reduce__()[1]))
    except TypeError:  # iterators of `itertools`, from Python 3.14 on
        return False


@contextmanager
def _undeprecated() -> Iterator[None]:
    """Ignore the warnings of Python 3.12 and 3.13 that iterators of `itertools` lose their copies in 3.14."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


class _Sequence(Holder):
    """A list, a deque."""

    def values(self, held: Any) -> Iterable[Any]:
        return held  # type: ignore[no-any-return]

    def lent(self, held: Any, copies: dict[int, Any]) -> Any:
        return [_copied(value, copies) for value in held]

    def held(self) -> Any:
        return list(self.owner)

    def holds(self, held: Any) -> bool:
        return len(held) == len(self.owner) and all(map(operator.is_, held, self.owner))

    def hold(self, held: Any) -> None:
        plain = list if isinstance(self.owner, list) else collections.deque
        plain.clear(self.owner)
        plain.extend(self.owner, held)


class _Mapping(Holder):
    """A dict, or the attributes of an object."""

    def values(self, held: Any) -> Iterable[Any]:
        return held.values()  # type: ignore[no-any-return]

    def lent(self, held: Any, copies: dict[int, Any]) -> Any:
        return {key: _copied(value, copies) for key, value in held.items()}

    def held(self) -> Any:
        return dict(self.owner.items())

    def holds(self, held: Any) -> bool:
        owner = self.owner
        return (
            len(held) == len(owner)
            and all(map(operator.is_, held, owner))
            and all(map(operator.is_, held.values(), owner.values()))
        )

    def hold(self, held: Any) -> None:
        plain: Any = collections.OrderedDict if isinstance(self.owner, collections.OrderedDict) else dict
        plain.clear(self.owner)  # and not a method of a subclass, which may have side effects
        plain.update(self.owner, held)


class _Set(Holder):
    def held(self) -> Any:
        return set(self.owner)

    def holds(self, held: Any) -> bool:
        return bool(held == self.owner)

    def hold(self, held: Any) -> None:
        self.owner.clear()
        self.owner.update(held)


class _Array(Holder):
    """The numbers of a NumPy array."""

    def held(self) -> Any:
        return self.owner.copy()

    def holds(self, held: Any) -> bool:
        return bool(held.tobytes() == self.owner.tobytes())

    def hold(self, held: Any) -> None:
        self.owner[...] = held


class _Numbers(Holder):
    """The numbers of an `array.array`."""

    def held(self) -> Any:
        return self.owner[:]

    def holds(self, held: Any) -> bool:
        return bool(held == self.owner)

    def hold(self, held: Any) -> None:
        self.owner[:] = held


class _Cache(Holder):
    """The content of a `functools.lru_cache` of bounded size, which is emptied if a run has added to it."""

    def held(self) -> Any:
        return self.owner.cache_info().misses

    def holds(self, held: Any) -> bool:
        return bool(self.owner.cache_info().misses == held)

    def hold(self, held: Any) -> None:
        self.owner.cache_clear()


@dataclass(frozen=True, eq=False)
class _Attribute(Holder):
    """A slot of an object, an attribute of a class, the content of a closure's cell."""

    name: str

    def held(self) -> Any:
        return getattr(self.owner, self.name, _Attribute)

    def holds(self, held: Any) -> bool:
        return self.held() is held

    def hold(self, held: Any) -> None:
        if held is _Attribute:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, held)


@dataclass(frozen=True, eq=False)
class _Global(Holder):
    """A variable of a module."""

    name: str

    def held(self) -> Any:
        return self.owner.get(self.name, _Global)

    def holds(self, held: Any) -> bool:
        return self.held() is held

    def hold(self, held: Any) -> None:
        if held is _Global:
            del self.owner[self.name]
        else:
            self.owner[self.name] = held


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
                state.append(_Set(found) if isinstance(found, set) else _Sequence(found))
            for index, value in enumerate(found):
                self.add(f"{name}[{index}]", value)
            self._add_object(name, found)
        elif isinstance(found, array.array):
            state.append(_Numbers(found))
        elif isinstance(found, np.ndarray):
            if found.dtype != object and found.flags.writeable and found.nbytes <= _LARGEST_STATE:
                state.append(_Array(found))
        elif isinstance(found, collections.abc.Iterator) and not (_has_attributes(found) and _is_followed(found)):
            if not _can_be_copied(found):
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
                state.append(_Cache(found))
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
            self.parts.state.append(_Mapping(found))
        for key, value in found.items():
            if not isinstance(value, _ATOMS):
                self.add(_join(name, str(key) if isinstance(key, _ATOMS) else type(key).__name__), value)

    def _add_module(self, prefix: str, module: nn.Module) -> None:
        own = vars(module)
        self.parts.state.append(_Mapping(own))
        for key, value in own.items():
            if key in ("_parameters", "_buffers", "_modules"):
                if isinstance(value, dict):  # a module in TorchScript keeps them elsewhere, and never has others
                    self.parts.state.append(_Mapping(value))
            elif not (key in _OF_EVERY_MODULE and isinstance(value, dict) and not value):
                self.add(_join(prefix, key), value)
        self._add_class(prefix, type(module))

    def _add_object(self, name: str, found: Any) -> None:
        if not _has_attributes(found) or not _is_followed(found):
            return
        if (own := getattr(found, "__dict__", None)) is not None:
            self.parts.state.append(_Mapping(own))
            for key, value in own.items():
                self.add(_join(name, key), value)
        for slot in _slots(type(found)):
            self.parts.state.append(_Attribute(found, slot))
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
                    self.parts.state.append(_Attribute(parent, key))
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
                self.parts.state.append(_Attribute(cell, "cell_contents"))
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
        self.parts.state.append(_Mapping(vars(found)))
        for name, value in vars(found).items():
            self.add(name, value)
        names, variables = set(_names_in(found.__code__)), found.__globals__
        for name in sorted(names & variables.keys()):
            value = variables[name]
            if isinstance(value, types.ModuleType):
                self._add_variables(name, value, names)
                continue
            if not isinstance(value, (types.FunctionType, type)):
                self.parts.state.append(_Global(variables, name))
            self.add(name, value)

    def _add_variables(self, name: str, module: types.ModuleType, names: Set[str]) -> None:
        """Follow those variables of a module that code names."""
        if _is_library(module.__name__) or (getattr(module, "__file__", None) or "").startswith(self._left_out):
            return
        for key in sorted(names & vars(module).keys()):
            self.parts.state.append(_Global(vars(module), key))
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


@contextmanager
def without_compiled_code() -> Iterator[None]:
    """Run compiled functions and branches of `torch.cond` as Python, because a compiled graph has no gates."""
    branches, compile = torch.cond.__code__, torch.compile
    with ExitStack() as stack:

        def eager() -> None:
            stack.enter_context(torch.compiler.set_stance("force_eager"))

        def compiled(*args: Any, **kwargs: Any) -> Any:
            """Compile for the first time: the import of the compiler, which takes a second, waits until here."""
            if torch.compile is compiled:
                torch.compile = compile
                eager()
            return compile(*args, **kwargs)

        torch.cond.__code__ = _branch.__code__  # for every name that the function has, as of `from torch import cond`
        if "torch._dynamo" in sys.modules:
            eager()
        else:
            torch.compile = compiled
        try:
            yield
        finally:
            torch.cond.__code__, torch.compile = branches, compile


def _branch(pred: Any, true_fn: Callable[..., Any], false_fn: Callable[..., Any], operands: Sequence[Any] = ()) -> Any:
    return (true_fn if pred else false_fn)(*operands)
