"""Constants that change: `alias_guard` watches the memory of blocked values.

A blocked value shares its memory with the input of the block, so an optimizer's step can change a constant.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from toolkit.blocks import Site, has_storage, watched
from toolkit.gradients._eager import without_compiled_code
from toolkit.gradients._places import user_site
from toolkit.gradients._zeros import with_memory

__all__ = ["AliasWarning", "alias_guard"]


class AliasWarning(UserWarning):
    """A value that a block holds constant was changed in memory after the block."""


@dataclass
class _Held:
    """A constant that was returned by a block.

    Attributes:
        block: The block.
        site: The place of the block.
        views: The constant, and its views on the same memory, for as long as they are referenced, also by the graph.
        changed: The place and the operation that wrote to its memory since.
    """

    block: str
    site: Site
    views: dict[int, weakref.ref[Tensor]] = field(default_factory=dict)
    changed: str = ""

    def add(self, view: Tensor) -> None:
        """Add a tensor to the views of the constant."""
        self.views[id(view)] = weakref.ref(view)

    def has(self, tensor: Any) -> bool:
        """Return whether a tensor is a view of the constant, by identity."""
        return id(tensor) in self.views and self.views[id(tensor)]() is tensor

    @property
    def is_alive(self) -> bool:
        """Whether the constant is still referenced."""
        return any(view() is not None for view in self.views.values())


@contextmanager
def alias_guard() -> Iterator[None]:
    """Warn if a blocked value changes because its shared memory is written to.

    `stop_gradient` makes no copy: its result shares the memory of its input. If an optimizer's step, ``add_`` or a
    write through ``.data`` changes that memory, the constant changes too, and autograd detects only some of these
    writes.

    A warning is issued if a constant is *used* after its memory was written to, in the forward or in the backward pass.
    At the end of the ``with``, a warning is also issued for each changed constant that is still referenced. A constant
    that is no longer used causes no warning: an optimizer step after the backward pass is fine. The guard watches the
    results of `stop_gradient`, while eager or compiled functions run as Python. Writes outside of torch, for example by
    numpy on shared memory, are not seen. Outside of the ``with`` there is no cost.

    Warns:
        AliasWarning: Once for each call of a block, with its name, its place, the place of the write, and the place of
            the use.

    Example:
        >>> w = torch.ones(2, requires_grad=True)
        >>> with warnings.catch_warnings(record=True) as caught, alias_guard():
        ...     warnings.simplefilter("always")
        ...     target = stop_gradient(w, "doc.target")
        ...     distance = (w.data.add_(1) - target).norm()  # 0, and not 1.4
        >>> caught[0].category.__name__
        'AliasWarning'
    """
    memory = _Memory()
    with without_compiled_code(), watched(memory.hold), memory:
        yield
    memory.finish()


class _Memory(TorchDispatchMode):
    """Observes every operation on memory, of the program, its backward pass and its optimizer."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._held: dict[int, list[_Held]] = {}

    def hold(self, value: Tensor, block: str, site: Site) -> None:
        """Watch a constant from now on."""
        while torch._C._functorch.is_functorch_wrapped_tensor(value):
            value = torch._C._functorch.get_unwrapped(value)
        if has_storage(value):
            held = _Held(block, site)
            held.add(value)
            alive = [other for other in self._held.get(_memory_of(value), []) if other.is_alive]
            self._held[_memory_of(value)] = [*alive, held]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        args, kwargs = with_memory(args, kwargs)
        written = [leaf for leaf in tree_leaves(_written(func, args, kwargs)) if has_storage(leaf)]
        if self._held:
            for leaf in tree_leaves((args, kwargs)):
                if has_storage(leaf) and not any(leaf is other for other in written):
                    self._use(leaf)
        result = func(*args, **kwargs)
        if self._held:
            for leaf in written:
                self._write(leaf, func)
            self._follow(args, result)
        return result

    def finish(self) -> None:
        """Warn of changed constants that are still referenced."""
        for held in [held for group in self._held.values() for held in group]:
            if held.changed and held.is_alive:
                _warn(held, "is still held at the end of `alias_guard`", held.site)

    def _use(self, leaf: Tensor) -> None:
        for held in self._held.get(_memory_of(leaf), []):
            if held.changed and held.has(leaf):
                place = user_site(sys._getframe(1))
                self._held[_memory_of(leaf)].remove(held)
                _warn(held, f"is used after that at {place}", place)
                return

    def _write(self, leaf: Tensor, func: Any) -> None:
        for held in self._held.get(_memory_of(leaf), []):
            if not held.changed:
                held.changed = f"{func._schema.name.removeprefix('aten::')} at {user_site(sys._getframe(1))}"

    def _follow(self, args: tuple[Any, ...], result: Any) -> None:
        """Add a view of a constant to its views."""
        for leaf in tree_leaves(result):
            if has_storage(leaf):
                for held in self._held.get(_memory_of(leaf), []):
                    if any(held.has(given) for given in tree_leaves(args)):
                        held.add(leaf)


def _written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the arguments that an operation writes to, by its schema."""
    found = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(args[index] if index < len(args) else kwargs.get(argument.name))
    return found


def _memory_of(tensor: Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata
    return key


def _warn(held: _Held, how: str, place: Site) -> None:
    message = (
        f"The value that {held.block!r} holds constant at {held.site} {how}, but its memory was changed by "
        f"{held.changed}: the constant has changed. A clone before the block would keep it."
    )
    warnings.warn_explicit(message, AliasWarning, place.file, place.line)
