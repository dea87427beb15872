"""Places in Python that hold objects, with their content to be put back: containers, attributes, variables, caches."""

from __future__ import annotations

import array
import collections
import functools
import itertools
import operator
import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["Holder", "Taken", "attribute", "can_be_copied", "content", "global_variable", "put_back"]

# Iterators that can be copied, with their sources, so that a run advances the copy.
_EMPTY: tuple[Any, ...] = ([], (), "", b"", range(0), {}, {}.values(), {}.items(), set())
_COPIED = frozenset(
    [
        *(type(iter(empty)) for empty in _EMPTY),
        *(enumerate, filter, map, reversed, zip, type(reversed([]))),
        *(itertools.accumulate, itertools.chain, itertools.count, itertools.cycle, itertools.islice, itertools.repeat),
    ]
)


@dataclass(frozen=True)
class Taken:
    """The content of a holder at one time."""

    holder: Holder
    held: Any
    moves: bool

    def is_held(self) -> bool:
        """Return whether the holder still has it."""
        return self.holder.holds(self.held)

    def put_back(self) -> None:
        """Restore the content."""
        if not self.is_held():
            self.holder.hold(self.held)

    def lend(self, copies: dict[int, Any]) -> None:
        """Restore the content for a run, with copies of iterators, because iterators cannot be reset."""
        if self.moves:
            self.holder.hold(self.holder.lent(self.held, copies))
        elif not self.holder.holds(self.held):
            self.holder.hold(self.held)


def put_back(state: Iterable[Taken]) -> None:
    """Put back all changed state, also if putting back one part raises."""
    with ExitStack() as stack:
        for taken in state:
            if not taken.holder.holds(taken.held):
                stack.callback(taken.put_back)


@dataclass(frozen=True, eq=False)
class Holder:
    """A place in Python that holds objects: a container, the attributes of an object, a variable of a closure."""

    owner: Any

    def taken(self) -> Taken:
        """Return the present content."""
        held = self.held()
        return Taken(self, held, any(type(value) in _COPIED for value in self.values(held)))

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
        if can_be_copied(value):
            with _undeprecated():
                make, arguments, *state = value.__reduce__()
                copies[id(value)] = fresh = make(*(_copied(argument, copies) for argument in arguments))
                if state:
                    fresh.__setstate__(*state)
    return copies[id(value)]


def can_be_copied(value: Any) -> bool:
    """Return whether a value is unaffected when a copy of its iterator advances."""
    if type(value) not in _COPIED:
        return not isinstance(value, collections.abc.Iterator)
    try:
        with _undeprecated():
            return all(map(can_be_copied, value.__reduce__()[1]))
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


class _Variable(_Attribute):
    """A variable in the globals of a module."""

    def held(self) -> Any:
        return self.owner.get(self.name, _Attribute)

    def hold(self, held: Any) -> None:
        if held is _Attribute:
            del self.owner[self.name]
        else:
            self.owner[self.name] = held


_KINDS: dict[type, type[Holder]] = {
    array.array: _Numbers,
    collections.deque: _Sequence,
    functools._lru_cache_wrapper: _Cache,
    list: _Sequence,
    np.ndarray: _Array,
    set: _Set,
}


def content(owner: Any) -> Holder:
    """Return the holder of the content of a container, an array, or a cache of bounded size."""
    if type(owner) is dict:  # most are: a module alone has four
        return _Mapping(owner)
    return next((kind for parent, kind in _KINDS.items() if isinstance(owner, parent)), _Mapping)(owner)


def attribute(owner: Any, name: str) -> Holder:
    """Return the holder of a slot of an object, an attribute of a class, or the content of a closure's cell."""
    return _Attribute(owner, name)


def global_variable(variables: dict[str, Any], name: str) -> Holder:
    """Return the holder of a variable of a module."""
    return _Variable(variables, name)
