"""The calls that stop a tensor, or take its numbers out of the graph, as an audit replaces them."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from toolkit._swapped import swapped
from toolkit.blocks import carries_gradient, is_left_out, stop_at
from toolkit.gradients._gates import unwraps
from toolkit.gradients._places import TOOLKIT, TORCH
from toolkit.gradients.audit.places import BareBlocks, Replacement

__all__ = ["TensorStops", "requires_gradient"]

_NUMBERS = {"__float__": "float()", "__int__": "int()", "__complex__": "complex()", "__index__": "__index__()"}
_ITSELF = "it stops the tensor object itself, which cannot be opened afterwards"


class TensorStops:
    """``x.detach()`` as ``stop_gradient(x, place)``, and likewise; ``x.item()`` and likewise are noted."""

    def __init__(self, bare: BareBlocks) -> None:
        self._bare = bare

    def replacements(self) -> list[Replacement]:
        """Return owner, attribute, and the function that makes the new attribute of the old one."""
        return [
            (Tensor, "detach", self._detach),
            (torch, "detach", self._detach),
            (Tensor, "detach_", self._detach_in_place),
            (torch, "detach_", self._detach_in_place),
            (Tensor, "data", self._data),
            (torch, "asarray", self._asarray),
            (torch, "tensor", functools.partial(self._copy, "torch.tensor()", 0)),
            (Tensor, "new_tensor", functools.partial(self._copy, "new_tensor()", 1)),
            (nn.Parameter, "__new__", functools.partial(self._made, "nn.Parameter()")),
            (torch.nested, "nested_tensor", functools.partial(self._taken, "nested_tensor()")),
            (Tensor, "_make_subclass", functools.partial(self._taken, "_make_subclass()")),
            (torch, "linspace", functools.partial(self._taken, "linspace()")),
            (torch, "logspace", functools.partial(self._taken, "logspace()")),
            (torch.autograd.Variable, "__new__", self._variable),
            *(
                (Tensor, name, functools.partial(self._escape, name))
                for name in ("item", "tolist", "numpy", "__array__", "__dlpack__", *_NUMBERS)
            ),
            *((Tensor, name, functools.partial(self._memory, f"{name}()")) for name in ("untyped_storage", "storage")),
            (torch._C, "_AutoDispatchBelowAutograd", self._below_autograd),
            (Tensor, "__deepcopy__", self._copied),
            (Tensor, "__reduce_ex__", self._pickled),
        ]

    # --- calls that stop ---------------------------------------------------------------------------------------------

    def _detach(self, original: Any) -> Any:
        def detach(input: Tensor) -> Any:
            if unwraps(input):
                return self._unwrapped(detach, input)
            return self._stopped("detach()", input, lambda: original(input))

        return detach

    def _detach_in_place(self, original: Any) -> Any:
        def detach_(input: Tensor) -> Any:
            if unwraps(input):
                return self._unwrapped(detach_, input)
            site = self._bare.site("detach_()", self._bare.caller())
            if site is not None:
                self._bare.note_nested(site)
            if site is not None and carries_gradient(input):
                if is_left_out(site):
                    return input
                # The name refers to a stopped tensor from here on, but the object cannot get a gate.
                self._bare.note_without_a_block(site, _ITSELF)
            elif site is not None:
                stop_at(input, site)
            return original(input)

        return detach_

    def _data(self, original: Any) -> Any:
        def get(input: Tensor) -> Any:
            if unwraps(input):
                return self._unwrapped(get, input)
            if not (carries_gradient(input) or (self._bare.closed and not self._bare.is_state(input))):
                return self._aliased(original.__get__(input))
            return self._stopped(".data", input, lambda: original.__get__(input))

        def set(input: Tensor, value: Tensor) -> None:
            if isinstance(value, Tensor) and carries_gradient(value):
                self._bare.note_escape(".data = ...", self._bare.caller())
            original.__set__(input, value)

        return property(get, set)

    def _copy(self, kind: str, position: int, original: Any) -> Any:
        def copy(*args: Any, **kwargs: Any) -> Any:
            source = args[position] if len(args) > position else kwargs.get("data")
            if not isinstance(source, Tensor) or kwargs.get("requires_grad"):
                if any(isinstance(leaf, Tensor) and carries_gradient(leaf) for leaf in tree_leaves(source)):
                    self._bare.note_escape(kind, self._bare.caller())
                return original(*args, **kwargs)

            def copied() -> Tensor:
                like = args[0] if position else source
                where = {key: kwargs[key] for key in ("dtype", "device") if kwargs.get(key) is not None}
                made = source.clone() if like is source else source.to(like.dtype, copy=True)
                return made.to(**where)

            return self._stopped(kind, source, lambda: original(*args, **kwargs), copied)

        return copy

    def _asarray(self, original: Any) -> Any:
        def asarray(input: Any, **kwargs: Any) -> Any:
            if kwargs.get("requires_grad") is not False or not isinstance(input, Tensor):
                return original(input, **kwargs)
            kept = {**kwargs, "requires_grad": carries_gradient(input)}
            return self._stopped(
                "torch.asarray()", input, lambda: original(input, **kwargs), lambda: original(input, **kept)
            )

        return asarray

    def _variable(self, original: Any) -> Any:
        leaf = self._made("Variable()", original).__func__

        def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
            data = args[0] if args else kwargs.get("data")
            if not isinstance(data, Tensor) or kwargs.get("requires_grad") or any(args[1:]):
                return leaf(cls, *args, **kwargs)
            return self._stopped("Variable()", data, lambda: original(cls, *args, **kwargs))

        return staticmethod(new)

    def _stopped(
        self, kind: str, input: Tensor, plainly: Callable[[], Any], made: Callable[[], Tensor] | None = None
    ) -> Any:
        """Return a tensor, or a result made of it, as the place leaves it: stopped as usual, or behind a gate."""
        site = self._bare.site(kind, self._bare.caller())
        stopped = None
        if site is not None:
            self._bare.note_nested(site)
            stopped = stop_at(input if made is None or not carries_gradient(input) else made(), site)
        if stopped is not None:
            return stopped
        with torch._C.DisableTorchFunction():  # would call this function again
            return plainly()

    def _unwrapped(self, function: Callable[[Any], Any], input: Tensor) -> Any:
        """Let a subclass of tensors take itself apart first, as torch does for its own functions."""
        with swapped(self._bare, "here", self._bare.here or self._bare.caller()):
            return type(input).__torch_function__(function, (type(input),), (input,), {})

    # --- calls that leave the graph ----------------------------------------------------------------------------------

    def _made(self, kind: str, original: Any) -> Any:
        def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
            data = args[0] if args else kwargs.get("data")
            if isinstance(data, Tensor) and carries_gradient(data):
                self._bare.note_escape(kind, self._bare.caller())
            return original(cls, *args, **kwargs)

        return staticmethod(new)

    def _taken(self, kind: str, original: Any) -> Any:
        """Note a function that takes numbers out of tensors and leaves the gradient behind."""

        def take(*args: Any, **kwargs: Any) -> Any:
            given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            caller = self._bare.caller()
            if not caller.f_code.co_filename.startswith(TORCH) and any(map(carries_gradient, given)):
                self._bare.note_escape(kind, caller)
            return original(*args, **kwargs)

        return staticmethod(take)

    def _escape(self, name: str, original: Any) -> Any:
        kind = _NUMBERS.get(name, f"{name}()")

        def leave(input: Tensor, *args: Any, **kwargs: Any) -> Any:
            if not carries_gradient(input):
                return original(input, *args, **kwargs)
            self._bare.note_escape(kind, self._bare.caller())
            with torch._C.DisableTorchFunction():  # this call is not noted
                stopped = torch._C.TensorBase.detach(input)
            return original(stopped, *args, **kwargs)

        return leave

    def _memory(self, kind: str, original: Any) -> Any:
        def get(input: Tensor) -> Any:
            """Note that the program takes the memory of a result, of which it can make a tensor without a graph."""
            caller = sys._getframe(1)
            if not caller.f_code.co_filename.startswith((TOOLKIT, TORCH)) and not input.is_leaf:
                self._bare.note_escape(kind, caller)
            return original(input)

        return get

    def _below_autograd(self, original: Any) -> Any:
        def guard() -> Any:
            if not (caller := sys._getframe(1)).f_code.co_filename.startswith(TORCH):
                self._bare.note_escape("_AutoDispatchBelowAutograd()", caller)
            return original()

        return guard

    def _aliased(self, made: Tensor) -> Tensor:
        """Remember `.data` of a constant: gradients of values that are written through it do not reach the constant."""
        if (site := self._bare.site_of_escape(self._bare.caller())) is not None:
            self._bare.aliases[made] = site
        return made

    def _copied(self, original: Any) -> Any:
        return lambda input, memo: original(self._kept(input, "deepcopy()"), memo)

    def _pickled(self, original: Any) -> Any:
        return lambda input, protocol: original(self._kept(input, "pickle"), protocol)

    def _kept(self, input: Tensor, kind: str) -> Tensor:
        """Return a tensor as the program without gates would keep a copy of it: a constant, if it is stopped."""
        if input.grad_fn is None or not self._bare.is_constant(input):
            return input
        self._bare.note_escape(kind, self._bare.caller())
        with torch._C.DisableTorchFunction():
            return torch._C.TensorBase.detach(input)


def requires_gradient(value: Any) -> bool:
    """Return whether a value is a tensor with a gradient."""
    return isinstance(value, Tensor) and value.requires_grad
