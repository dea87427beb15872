"""Turns the calls that stop gradients in code without blocks into blocks, for the length of an audit.

``x.detach()`` becomes ``stop_gradient(x, <file:line:column>)``, ``with torch.no_grad():`` becomes ``stop_recording``,
and so on. The attributes of torch's classes are replaced for that, because a `TorchFunctionMode` does not see calls
inside of functions of `torch.nn.functional`. The replacements act in one thread, and only on calls from user code,
third-party packages, `torch.nn` and `torch.distributions`; torch's own internals keep the originals. All attributes are
restored, also after an error.
"""

from __future__ import annotations

import copy
import dis
import functools
import itertools
import sys
import threading
from collections.abc import Callable, Collection, Container, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any, Protocol

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils import checkpoint
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from toolkit._tensors import HALF
from toolkit.blocks import Site, carries_gradient, has_storage, is_left_out, region_at, site_of, stop_at
from toolkit.gradients._as_plain import unrecorded
from toolkit.gradients._cuts import WRITES_STAY_BLOCKED, Unrecordable, changed_by
from toolkit.gradients._gates import replaced_by, unwraps
from toolkit.gradients._nodes import reachable_nodes, roots_in
from toolkit.gradients._parts import INSTALLED
from toolkit.gradients._places import TOOLKIT, TORCH, decorated
from toolkit.gradients._snapshot import Kept
from toolkit.gradients._threads import this_thread

__all__ = ["BareBlocks", "Escape"]

# Parts of torch that are models, not internals: their stops concern the user.
_MODELS = tuple(TORCH + part for part in ("nn/functional.py", "nn/modules/", "nn/utils/", "distributions/"))

# Parts of torch whose stops belong to the line that calls them: `load_state_dict`, `state_dict`, `clip_grad_norm_`.
_OF_THE_CALLER = tuple(TORCH + part for part in ("nn/modules/module.py", "nn/utils/clip_grad.py"))

# Functions that user code may have bound to a name before the replacement: then only a mode sees the call.
_BOUND_EARLIER: tuple[tuple[Any, Any, str], ...] = (
    (torch._C.TensorBase.detach, Tensor, "detach"),
    (torch.detach, Tensor, "detach"),
    (torch.ops.aten.detach, Tensor, "detach"),
    (torch.ops.aten.detach.default, Tensor, "detach"),
    (torch._C.TensorBase.detach_, Tensor, "detach_"),
    (torch.detach_, Tensor, "detach_"),
    (torch.ops.aten.detach_, Tensor, "detach_"),
    (torch.ops.aten.detach_.default, Tensor, "detach_"),
    (torch.tensor, torch, "tensor"),
    (torch._C.TensorBase.new_tensor, Tensor, "new_tensor"),
    (torch.asarray, torch, "asarray"),
)
# Modules that compute in another way while no gradient is recorded and no mode is active.
_WITH_FAST_PATHS = frozenset(TORCH + f"nn/modules/{name}.py" for name in ("activation", "transformer"))
_FAST_PATH = "a module of torch takes a fast path inside of it, which has no derivative"
_STALE = "autocast keeps the cast of a weight that is updated before its next use, and a recorded region keeps none"
_INSIDE = "_toolkit_inside"  # of recorded regions, where the plain program records nothing
_NUMBERS = {"__float__": "float()", "__int__": "int()", "__complex__": "complex()", "__index__": "__index__()"}
_PACKAGE = __name__.partition(".")[0] + "."
_DERIVATIVES = frozenset({torch.autograd.grad, torch.autograd.backward, Tensor.backward})
_ITSELF = "it stops the tensor object itself, which cannot be opened afterwards"
_WITHOUT_END = "a call without `with` has no end at which a region could be closed"
_SCRIPTED = "TorchScript runs outside of Python, where its stops cannot be opened"

# Under another name than that of torch, which an audit replaces.
_is_recording = torch.is_grad_enabled

# One audit at a time: the replaced attributes are those of the whole process.
_one_audit = threading.Lock()
_ANOTHER = "`audit` should run once at a time in a process. Found another one running."


@dataclass(frozen=True)
class Escape:
    """A place where a value leaves the graph for good and cannot be opened.

    Attributes:
        kind: The call, for example ``"item()"``.
        site: The place.
    """

    kind: str
    site: str


class HasStorages(Protocol):
    """A program that knows the memory of its tensors."""

    def storages(self) -> Container[int]:
        """Return the memory, by the address of each storage."""


@dataclass
class BareBlocks:
    """The places that the replaced attributes found, and those that they leave alone.

    Attributes:
        kinds: Place -> the call that stops the gradient, in the order of the program.
        sites: Place -> its file, line, column and function; of escapes as well.
        real: Place -> the reason why it keeps its original meaning.
        escapes: Places where a value leaves the graph.
        partly: Place of a region -> the parts that stay blocked while it is open.
        one_mode: Places of regions that pass a forward-mode derivative, open or closed.
        nested: Place -> the regions around it, from the outside.
        decorators: Places of calls that turned out to make a decorator, whose place is that of the function.
        spares: Regions whose writes into older tensors stay blocked.
        is_constant: Says whether a tensor is a constant while every place is closed.
        close_regions: Closes regions behind tensors before a derivative; None without recorded regions.
        open_regions: Gives the recorded regions that the program is in, those of declared blocks among them.
        regions_without_casts: Likewise, also where recording is switched on again; autocast keeps no casts there.
        is_active: Whether the attributes are replaced now.
        elsewhere: Calls of other threads in the meantime, which are not analysed.
    """

    kinds: dict[str, str] = field(default_factory=dict)
    sites: dict[str, Site] = field(default_factory=dict)
    real: dict[str, str] = field(default_factory=dict)
    escapes: dict[Escape, None] = field(default_factory=dict)
    partly: dict[str, str] = field(default_factory=dict)
    one_mode: dict[str, None] = field(default_factory=dict)
    elsewhere: dict[str, None] = field(default_factory=dict)
    nested: dict[str, tuple[str, ...]] = field(default_factory=dict)
    decorators: set[str] = field(default_factory=set)
    spares: Collection[str] = frozenset()
    is_constant: Callable[[Tensor], bool] = lambda tensor: _is_stopped(tensor)
    close_regions: Callable[..., None] | None = None
    open_regions: Callable[[], Collection[str]] = frozenset
    regions_without_casts: Callable[[], Collection[str]] = frozenset
    is_active: bool = False
    _thread: tuple[int, int] = field(default_factory=this_thread)
    _region: _Entered | None = None
    _here: FrameType | None = None
    _state: Container[int] = frozenset()
    _copies: Container[int] = frozenset()
    _closed: tuple[str, ...] = ()
    _writes: set[str] = field(default_factory=set)
    _undone: list[Kept] | None = None
    _bound_earlier: dict[Any, Callable[..., Any]] = field(default_factory=dict)
    _aliases: Any = field(default_factory=WeakIdKeyDictionary)
    _casts: Any = field(default_factory=WeakIdKeyDictionary)
    _scripts: Any = field(default_factory=WeakIdKeyDictionary)
    _calls: dict[str, dict[tuple[int, int], tuple[CodeType, Any]]] = field(default_factory=dict)

    @staticmethod
    def refuse_another() -> None:
        """Raise RuntimeError if another audit is running in this process."""
        if _one_audit.locked():
            raise RuntimeError(_ANOTHER)

    @contextmanager
    def replaced(self, program: HasStorages | None = None) -> Iterator[None]:
        """Replace torch's attributes for the length of a ``with`` that runs a program.

        Raises:
            RuntimeError: If another audit is running in this process.
        """
        outer = self._region, self._here, self._state
        self._region, self._here, self._state = None, None, program.storages() if program else frozenset()
        self._closed = ()
        if self.is_active:  # a run of the program between derivatives of an earlier one
            try:
                yield
            finally:
                self._region, self._here, self._state = outer
            return
        if not _one_audit.acquire(blocking=False):
            raise RuntimeError(_ANOTHER)
        self.is_active = True
        try:
            with _replaced(self._replacements()):
                self._bound_earlier = {original: getattr(owner, name) for original, owner, name in _BOUND_EARLIER}
                with _Watch(self):
                    yield
        finally:
            self.is_active = False
            _one_audit.release()

    @contextmanager
    def copied(self, state: Iterable[Tensor]) -> Iterator[None]:
        """Take tensors for copies of the program's state, which stand in its place."""
        outer = self._copies
        self._copies = {tensor.untyped_storage()._cdata for tensor in state if has_storage(tensor)}
        try:
            yield
        finally:
            self._copies = outer

    def _replacements(self) -> list[tuple[Any, str, Callable[[Any], Any]]]:
        stops: list[tuple[Any, str, Callable[[Any], Any]]] = [
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
            *((owner, name, self._is_grad_enabled) for owner, name in self._names_of(torch.is_grad_enabled)),
            *(
                (context, "prev", self._before)
                for context in (torch.no_grad, torch.enable_grad, torch.set_grad_enabled)
            ),
            (torch.overrides, "has_torch_function", self._has_torch_function),
            (torch.autograd, "_engine_run_backward", self._backward),
            (torch.jit.ScriptFunction, "__call__", self._scripted),
            (torch._C.ScriptMethod, "__call__", self._scripted),
            (torch, "clear_autocast_cache", self._clear_autocast_cache),
        ]
        for context, kind in (
            (torch.no_grad, "no_grad"),
            (torch.inference_mode, "inference_mode"),
            (torch.enable_grad, None),
        ):
            stops += [
                (context, "__enter__", functools.partial(self._enter, kind)),
                (context, "__exit__", self._exit),
            ]
        stops += [
            (torch.set_grad_enabled, "__init__", self._set_grad_enabled),
            (torch.set_grad_enabled, "__call__", self._decorate),
            (torch.set_grad_enabled, "__enter__", self._enter_set_grad_enabled),
            (torch.set_grad_enabled, "__exit__", self._exit),
        ]
        for name in ("item", "tolist", "numpy", "__array__", "__dlpack__", *_NUMBERS):
            stops.append((Tensor, name, functools.partial(self._escape, name)))
        for name in ("untyped_storage", "storage"):
            stops.append((Tensor, name, functools.partial(self._memory, f"{name}()")))
        stops.append((torch._C, "_AutoDispatchBelowAutograd", self._below_autograd))
        if wrap := sys.modules.get("torch._higher_order_ops.wrap"):  # of an exported program
            stops.append((wrap.WrapWithSetGradEnabled, "__call__", self._exported_region))
        stops += [(Tensor, "__deepcopy__", self._copied), (Tensor, "__reduce_ex__", self._pickled)]
        return stops

    @contextmanager
    def sparing(self, places: Iterable[str]) -> Iterator[bool]:
        """Keep the writes of these regions into older tensors blocked; give whether there are any that were not."""
        outer, partly = self.spares, dict(self.partly)
        self.spares = self._writes.intersection(places).union(outer)
        try:
            yield len(self.spares) > len(outer)
        except BaseException:
            self.partly = partly
            raise
        finally:
            self.spares = outer

    def chains(self) -> list[str]:
        """Return a sentence for each place that stands for several stops, as the links of a chain do."""
        numbers = {place: len({span for _, span in calls.values()}) for place, calls in self._calls.items()}
        return [
            f"{place} stands for {number} stops, which open together: their expressions begin there"
            for place, number in numbers.items()
            if number > 1
        ]

    def through_data(self) -> list[str]:
        """Return the recorded places of `.data`, through which a program may change memory unseen by autograd."""
        return [place for place, kind in self.kinds.items() if kind == ".data" and place not in self.real]

    @contextmanager
    def undoing(self) -> Iterator[None]:
        """Undo the changes in place that functions and hooks of the program make to older tensors."""
        outer, self._undone = self._undone, []
        try:
            yield
        finally:
            undone, self._undone = self._undone, outer
            with torch._C.DisableTorchFunction():  # these changes are not noted
                for kept in reversed(undone):
                    kept.put_back()

    # --- what stops a tensor ---

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
            site = self._site("detach_()", self._caller())
            if site is not None:
                self._note_nested(site)
            if site is not None and carries_gradient(input):
                if is_left_out(site):
                    return input
                # The name refers to a stopped tensor from here on, but the object cannot get a gate.
                self._note_without_a_block(site, _ITSELF)
            elif site is not None:
                stop_at(input, site)
            return original(input)

        return detach_

    def _data(self, original: Any) -> Any:
        def get(input: Tensor) -> Any:
            if unwraps(input):
                return self._unwrapped(get, input)
            if not (carries_gradient(input) or (self._closed and not self._is_state(input))):
                return self._aliased(original.__get__(input))
            return self._stopped(".data", input, lambda: original.__get__(input))

        def set(input: Tensor, value: Tensor) -> None:
            if isinstance(value, Tensor) and carries_gradient(value):
                self._note_escape(".data = ...", self._caller())
            original.__set__(input, value)

        return property(get, set)

    def _copy(self, kind: str, position: int, original: Any) -> Any:
        def copy(*args: Any, **kwargs: Any) -> Any:
            source = args[position] if len(args) > position else kwargs.get("data")
            if not isinstance(source, Tensor) or kwargs.get("requires_grad"):
                if any(isinstance(leaf, Tensor) and carries_gradient(leaf) for leaf in tree_leaves(source)):
                    self._note_escape(kind, self._caller())
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

    def _stopped(
        self, kind: str, input: Tensor, plainly: Callable[[], Any], made: Callable[[], Tensor] | None = None
    ) -> Any:
        """Return a tensor, or a result made of it, as the place leaves it: stopped as usual, or behind a gate."""
        site = self._site(kind, self._caller())
        stopped = None
        if site is not None:
            self._note_nested(site)
            stopped = stop_at(input if made is None or not carries_gradient(input) else made(), site)
        if stopped is not None:
            return stopped
        with torch._C.DisableTorchFunction():  # would call this function again
            return plainly()

    def _aliased(self, made: Tensor) -> Tensor:
        """Remember `.data` of a constant: gradients of values that are written through it do not reach the constant."""
        if (site := self._site_of_escape(self._caller())) is not None:
            self._aliases[made] = site
        return made

    def note_writes(self, changed: Iterable[Tensor], values: Iterable[Tensor]) -> None:
        """Note values with a gradient that are written through `.data`."""
        bases = [tensor if tensor._base is None else tensor._base for tensor in changed] if self._aliases else []
        sites = [self._aliases[base] for base in bases if base in self._aliases]
        if sites and any(carries_gradient(value) and not self.is_constant(value) for value in values):
            for site in sites:
                self.sites.setdefault(str(site), site)
                self.escapes[Escape("write through .data", str(site))] = None

    def _note_nested(self, site: Site) -> None:
        """Note the regions in which a place stops something."""
        if self._closed:
            self.nested.setdefault(str(site), self._closed)

    def _unwrapped(self, function: Callable[[Any], Any], input: Tensor) -> Any:
        """Let a subclass of tensors take itself apart first, as torch does for its own functions."""
        outer, self._here = self._here, self._here or self._caller()
        try:
            return type(input).__torch_function__(function, (type(input),), (input,), {})
        finally:
            self._here = outer

    def _caller(self) -> FrameType:
        return self._here or _caller()

    def _made(self, kind: str, original: Any) -> Any:
        def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
            data = args[0] if args else kwargs.get("data")
            if isinstance(data, Tensor) and carries_gradient(data):
                self._note_escape(kind, self._caller())
            return original(cls, *args, **kwargs)

        return staticmethod(new)

    def _taken(self, kind: str, original: Any) -> Any:
        """Note a function that takes numbers out of tensors and leaves the gradient behind."""

        def take(*args: Any, **kwargs: Any) -> Any:
            given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            caller = self._caller()
            if not caller.f_code.co_filename.startswith(TORCH) and any(map(carries_gradient, given)):
                self._note_escape(kind, caller)
            return original(*args, **kwargs)

        return staticmethod(take)

    def _variable(self, original: Any) -> Any:
        leaf = self._made("Variable()", original).__func__

        def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
            data = args[0] if args else kwargs.get("data")
            if not isinstance(data, Tensor) or kwargs.get("requires_grad") or any(args[1:]):
                return leaf(cls, *args, **kwargs)
            return self._stopped("Variable()", data, lambda: original(cls, *args, **kwargs))

        return staticmethod(new)

    def _escape(self, name: str, original: Any) -> Any:
        kind = _NUMBERS.get(name, f"{name}()")

        def leave(input: Tensor, *args: Any, **kwargs: Any) -> Any:
            if not carries_gradient(input):
                return original(input, *args, **kwargs)
            self._note_escape(kind, self._caller())
            with torch._C.DisableTorchFunction():  # this call is not noted
                stopped = torch._C.TensorBase.detach(input)
            return original(stopped, *args, **kwargs)

        return leave

    def _memory(self, kind: str, original: Any) -> Any:
        def get(input: Tensor) -> Any:
            """Note that the program takes the memory of a result, of which it can make a tensor without a graph."""
            caller = sys._getframe(1)
            if not caller.f_code.co_filename.startswith((TOOLKIT, TORCH)) and not input.is_leaf:
                self._note_escape(kind, caller)
            return original(input)

        return get

    def _below_autograd(self, original: Any) -> Any:
        def guard() -> Any:
            if not (caller := sys._getframe(1)).f_code.co_filename.startswith(TORCH):
                self._note_escape("_AutoDispatchBelowAutograd()", caller)
            return original()

        return guard

    def _copied(self, original: Any) -> Any:
        return lambda input, memo: original(self._kept(input, "deepcopy()"), memo)

    def _pickled(self, original: Any) -> Any:
        return lambda input, protocol: original(self._kept(input, "pickle"), protocol)

    def _kept(self, input: Tensor, kind: str) -> Tensor:
        """Return a tensor as the program without gates would keep a copy of it: a constant, if it is stopped."""
        if input.grad_fn is None or not self.is_constant(input):
            return input
        self._note_escape(kind, self._caller())
        with torch._C.DisableTorchFunction():
            return torch._C.TensorBase.detach(input)

    def _note_without_a_block(self, site: Site, reason: str) -> None:
        """Note a call that no block can stand for: another run of the program can leave it out, if there is one."""
        if self.close_regions is None:
            region_at(site, both_modes=False)
        else:
            self.real[str(site)] = reason

    # --- what stops a region ---

    def _enter(self, kind: str | None, original: Any) -> Any:
        def enter(context: Any) -> Any:
            mode = getattr(context, "mode", True)
            site = self._site(kind, _caller()) if kind is not None and mode else None
            if not self._begin(context, site, kind):
                self._note_blind_checkpoint(_caller())
                self._region = None if kind is None else self._region
                return original(context)
            return context

        return enter

    def _exit(self, original: Any) -> Any:
        def leave(context: Any, *error: Any) -> Any:
            entered = context.__dict__.get("_toolkit")
            inner, self._region, self._closed = entered.pop() if entered else (None, self._region, self._closed)
            if inner is None:
                return original(context, *error)
            inner.__exit__(*error)
            if _is_recording() != context.prev:  # switched inside, by a call without ``with``
                torch._C._set_grad_enabled(context.prev)
            return None

        return leave

    def _begin(self, context: Any, site: Site | None, kind: str | None) -> bool:
        """Open the region of `context` if its block is open; the end of the context closes the region."""
        # `torch.no_grad` and `torch.set_grad_enabled` leave forward mode on.
        inner = None if site is None else region_at(site, both_modes=kind == "inference_mode")
        context.__dict__.setdefault("_toolkit", []).append((inner, self._region, self._closed))
        if site is not None:
            self._note_nested(site)
        if inner is None:
            self._closed = self._closed if site is None else (*self._closed, str(site))
            return False
        context.prev = _is_recording()  # for an end after the attributes are restored
        self._region = _Entered(str(site))
        inner.__enter__()
        return True

    def _scripted(self, original: Any) -> Any:
        def call(function: Any, *args: Any, **kwargs: Any) -> Any:
            """Note a call into TorchScript if it has stops."""
            if _is_recording() and self._mine():
                if function not in self._scripts:
                    graph = function.inlined_graph
                    self._scripts[function] = "no_grad" in str(graph) or any(
                        graph.findAllNodes(stop) for stop in ("aten::detach", "aten::detach_", "prim::data")
                    )
                if self._scripts[function] and (site := self._site("TorchScript", _caller())):
                    self.real[str(site)] = _SCRIPTED
            return original(function, *args, **kwargs)

        return call

    def _exported_region(self, original: Any) -> Any:
        def run(operator: Any, mode: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            with torch.enable_grad() if mode else torch.no_grad():
                return function(*args, **kwargs)

        return run

    def _set_grad_enabled(self, original: Any) -> Any:
        def init(context: Any, mode: bool) -> None:
            caller = _caller()
            site = None if mode or _is_decorating(caller) else self._site("set_grad_enabled", caller)
            # Without a ``with`` its end cannot be seen.
            if site is not None and not _opens_with(caller):
                context.prev, context.mode = _is_recording(), mode
                context.__dict__["_toolkit_place"] = str(site)
                if is_left_out(site):
                    context.__dict__["_toolkit"] = [(None, self._region, self._closed)]
                    return
                self._note_without_a_block(site, _WITHOUT_END)
                site = None
            context.prev, context.mode = _is_recording(), mode
            if site is None or not self._begin(context, site, "set_grad_enabled"):
                context.__dict__.pop("_toolkit", None)
                original(context, mode)

        return init

    def _decorate(self, original: Any) -> Any:
        def decorate(context: Any, function: Callable[..., Any]) -> Any:
            place = context.__dict__.pop("_toolkit_place", None)  # it is none: the place is the function's
            for places in (self.real, self.kinds, self.sites):
                places.pop(place, None)
            self.decorators.update([place] if place else [])
            with torch._C.DisableTorchFunction():  # the program itself switches nothing on
                return original(context, function)

        return decorate

    def _enter_set_grad_enabled(self, original: Any) -> Any:
        def enter(context: Any) -> None:
            if context.__dict__.get("_toolkit"):
                return
            caller = _caller()
            site = self._site("set_grad_enabled", caller) if _is_decorating(caller) and not context.mode else None
            if site is not None:
                with torch._C.DisableTorchFunction():  # the program itself switches nothing on
                    torch._C._set_grad_enabled(context.prev)
            if site is None or not self._begin(context, site, "set_grad_enabled"):
                original(context)
                if context.mode:  # as `enable_grad`
                    context.__dict__["_toolkit"] = [(None, self._region, self._closed)]
                    self._region = None

        return enter

    def _is_grad_enabled(self, original: Any) -> Any:
        def is_grad_enabled() -> bool:
            frame, regions = _caller(), self._entered()
            self._refuse_fast_path(frame, regions)
            if frame.f_code.co_filename == checkpoint.__file__:  # without a graph it keeps values, runs nothing again
                return bool(original()) and not regions
            if not regions or frame.f_code.co_filename.startswith((TOOLKIT, TORCH)):
                return bool(original())
            for region in regions:
                self.partly.setdefault(region, "`is_grad_enabled()` answers in it as if it were closed")
            return False

        return is_grad_enabled

    def _names_of(self, function: Any) -> list[tuple[Any, str]]:
        """Return the modules that have imported a function. Where regions are recorded, its aliases count as well."""
        return _naming(function, by_any_name=self.close_regions is not None)

    def _before(self, _: Any) -> Any:
        """Give the program the `prev` that a context has in the plain program; torch reads the real one."""

        def get(context: Any) -> bool:
            regions, before = context.__dict__.get(_INSIDE), bool(context.__dict__["prev"])
            if not (regions and before) or sys._getframe(1).f_code.co_filename.startswith((TOOLKIT, TORCH)):
                return before
            for region in regions:
                self.partly.setdefault(region, "`prev` of a context in it answers as if it were closed")
            return False

        def set(context: Any, value: bool) -> None:
            context.__dict__["prev"], context.__dict__[_INSIDE] = value, tuple(self._entered())

        return property(get, set)

    def _entered(self) -> Collection[str]:
        """Return the regions that this thread is in, and that record a graph although the program's own do not."""
        if not self._mine():
            return ()
        return self.open_regions() or ([self._region.site] if self._region is not None else ())

    def _refuse_fast_path(self, frame: FrameType, regions: Collection[str]) -> None:
        """Raise Unrecordable if a module of torch has a fast path, without a derivative, that it takes unrecorded."""
        if not regions or self.close_regions is None:
            return
        if frame.f_code.co_filename in _WITH_FAST_PATHS and any(map(_requires_gradient, frame.f_locals["tensor_args"])):
            raise Unrecordable(dict.fromkeys(sorted(regions), _FAST_PATH))

    def refuse_stale_casts(self, inputs: Any, result: Any) -> None:
        """Raise Unrecordable if a call under autocast took a weight of which the plain step has an older cast.

        Autocast keeps the cast of a weight until its end, also past an update of the weight. In a recorded region it
        keeps none.
        """
        if not any(getattr(leaf, "dtype", None) in HALF for leaf in tree_leaves(result)):
            return
        regions = frozenset(self.regions_without_casts())
        for weight in tree_leaves(inputs):
            if not (_requires_gradient(weight) and weight.is_leaf and weight.dtype is torch.float32):
                continue
            version, earlier = self._casts.setdefault(weight, (weight._version, regions))
            if weight._version != version and (found := earlier | regions):
                raise Unrecordable(dict.fromkeys(sorted(found), _STALE))

    def _clear_autocast_cache(self, original: Any) -> Any:
        def clear_autocast_cache() -> None:
            self._casts.clear()
            original()

        return clear_autocast_cache

    def _has_torch_function(self, original: Any) -> Any:
        def has_torch_function(arguments: Any) -> bool:
            """Leave out the modes that watch the program: a module would not take its fast path."""
            modes = _get_current_function_mode_stack()
            ours = all(type(mode).__module__.startswith(_PACKAGE) for mode in modes)
            if not (ours and _caller().f_code.co_filename in _WITH_FAST_PATHS):
                return bool(original(arguments))
            return any(map(unwraps, arguments))

        return has_torch_function

    def _backward(self, original: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            """Watch the calls of functions and hooks: torch leaves the mode during a derivative."""
            if not self._mine() or any(isinstance(mode, _Watch) for mode in _get_current_function_mode_stack()):
                return original(*args, **kwargs)
            with _Watch(self):
                return original(*args, **kwargs)

        return run

    # --- where ---

    def user_site(self) -> Site | None:
        """Return the place in the user's code, or in a package, that called torch."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename.startswith((TOOLKIT, TORCH)):
            frame = frame.f_back
        return None if frame is None else site_of(frame)

    def _is_state(self, tensor: Tensor) -> bool:
        """Return whether a tensor existed before the program ran, by its memory, or is a parameter made since."""
        if tensor.is_leaf and tensor.requires_grad:
            return True
        if not has_storage(tensor):
            return False
        memory = tensor.untyped_storage()._cdata
        return memory in self._state or memory in self._copies

    def _mine(self) -> bool:
        return this_thread() == self._thread

    def _site(self, kind: str, frame: FrameType | None) -> Site | None:
        """Return the place of a call that becomes a block, or None if the call keeps its meaning."""
        while frame is not None and frame.f_globals.get("__name__") == "contextlib":  # an `ExitStack`
            frame = frame.f_back
        if frame is None:
            return None
        file = frame.f_code.co_filename
        if not self._mine():
            if not _is_machinery(file):
                self.elsewhere[f"{kind} at {site_of(frame)}"] = None
            return None
        if file.endswith("_contextlib.py") and "func" in frame.f_locals:  # the decorator form: the function's place
            site = decorated(frame.f_locals["func"], _is_machinery)
            if site is None:
                return None
        elif _is_machinery(file):
            return None
        else:
            frame = _outside_of_wrapper(frame, kind)
            site = site_of(frame)
            calls = self._calls.setdefault(str(site), {})
            if (call := (id(frame.f_code), frame.f_lasti)) not in calls:
                calls[call] = (frame.f_code, _span(frame))  # of code that is kept, as its number is its key
        key = str(site)
        self.kinds.setdefault(key, kind)
        self.sites.setdefault(key, site)
        return None if key in self.real else site

    def _note_escape(self, kind: str, frame: FrameType | None) -> None:
        if (site := self._site_of_escape(frame)) is not None:
            self.sites.setdefault(str(site), site)
            self.escapes[Escape(kind, str(site))] = None

    def _site_of_escape(self, frame: FrameType | None) -> Site | None:
        while frame is not None and (frame.f_code.co_filename.startswith((TORCH, copy.__file__)) or _passes_on(frame)):
            frame = frame.f_back
        if frame is None or _is_machinery(frame.f_code.co_filename) or not self._mine():
            return None
        return site_of(frame)

    def _note_blind_checkpoint(self, frame: FrameType) -> None:
        """Note a reentrant checkpoint that records no graph, because no input carries a gradient."""
        if frame.f_code is checkpoint.CheckpointFunction.forward.__code__:
            inputs = frame.f_locals["args"]
            if not any(isinstance(input, Tensor) and input.requires_grad for input in inputs):
                self._note_escape("checkpoint(use_reentrant=True)", frame)


class _Watch(TorchFunctionMode):
    """Observes every call inside of a region.

    In-place operations on older tensors are kept out of the graph of an opened region: they are state, not values.
    Operations on tangents are noted, because `torch.no_grad` does not stop them.
    """

    def __init__(self, bare: BareBlocks) -> None:
        super().__init__()
        self._bare = bare

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, func = kwargs or {}, replaced_by(func)
        if not self._bare._mine():
            return func(*args, **kwargs)
        result = self._watched(func, args, kwargs)
        if torch._C._is_any_autocast_enabled():
            self._bare.refuse_stale_casts((args, kwargs), result)
        return result

    def _watched(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        bare = self._bare
        if func in bare._bound_earlier:
            return bare._bound_earlier[func](*args, **kwargs)
        if func in _DERIVATIVES and bare.close_regions is not None:
            bare.close_regions(roots_in((args, kwargs)))
        if func in _DERIVATIVES and not kwargs.get("create_graph"):
            bare._note_escape(f"{func.__name__}()", _caller())
        elif (
            func is torch._C._set_grad_enabled
            and args == (False,)
            and (site := bare._site("_set_grad_enabled", _caller()))
        ):
            bare.real[str(site)] = _WITHOUT_END
        changed = changed_by(func, args, kwargs)
        if bare._undone is not None:
            bare._undone += [Kept.now(tensor, "", is_data=False) for tensor in filter(bare._is_state, changed)]
        region = bare._region
        if region is None and not changed:
            return func(*args, **kwargs)
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if region is None:
            if _is_recording():
                bare.note_writes(changed, leaves)
            return func(*args, **kwargs)
        one_mode = forward_ad._current_level >= 0 and bare.kinds[region.site] != "inference_mode"
        if one_mode and any(map(_has_tangent, leaves)):
            bare.one_mode[region.site] = None
        # Without a gradient, as a counter of a batch norm, there is nothing to keep out.
        states = [tensor for tensor in changed if bare._is_state(tensor)]
        changed = states if states and any(map(carries_gradient, leaves)) else []
        bare._writes.update([region.site] if changed else [])
        # A view cannot be made a constant again.
        if changed and (region.site in bare.spares or any(tensor._base is not None for tensor in changed)):
            bare.partly[region.site] = WRITES_STAY_BLOCKED
            with unrecorded():
                return func(*args, **kwargs)
        return func(*args, **kwargs)


@dataclass(frozen=True)
class _Entered:
    """An open region: its place."""

    site: str


def _is_stopped(tensor: Tensor) -> bool:
    """Return whether every path from a tensor ends at a closed gate."""
    return not any(hasattr(node, "variable") for node in reachable_nodes(tensor.grad_fn, ()))


def _has_tangent(input: Tensor) -> bool:
    """Return whether a forward-mode derivative of any level flows into `input`."""
    functorch = torch._C._functorch
    while True:
        wrapped = functorch.is_functorch_wrapped_tensor(input)
        batched = wrapped and functorch.is_batchedtensor(input)
        try:
            if not batched and forward_ad.unpack_dual(input).tangent is not None:
                return True
        except RuntimeError:  # torch differentiates one of its own operations, and has no tangent to show yet
            return True
        if not wrapped:
            return False
        input = functorch.get_unwrapped(input)


def _requires_gradient(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _naming(function: Any, *, by_any_name: bool) -> list[tuple[Any, str]]:
    """Return the modules that have imported a function of torch, and its name there."""
    found = list[tuple[Any, str]]()
    for path, module in list(sys.modules.items()):
        if path.partition(".")[0] in ("torch", "toolkit") and path not in ("torch", "torch._C"):
            continue
        variables = getattr(module, "__dict__", {})
        names = list(variables) if by_any_name else [function.__name__]
        found += [(module, name) for name in names if variables.get(name) is function]
    return found


def _is_machinery(file: str) -> bool:
    return file.startswith((TOOLKIT, TORCH)) and not file.startswith(_MODELS)


def _caller() -> FrameType:
    """Return the frame that called a replaced attribute, by its name or by an earlier binding."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (frame.f_code.co_filename == __file__ or _passes_on(frame)):
        frame = frame.f_back
    assert frame is not None
    return frame


def _outside_of_wrapper(frame: FrameType, kind: str) -> FrameType:
    """Return the frame that called a package's function of the same name, for example a container's ``detach()``."""
    if frame.f_code.co_filename in _OF_THE_CALLER:
        while frame.f_back is not None and frame.f_code.co_filename.startswith(TORCH):
            frame = frame.f_back
    if not frame.f_code.co_filename.startswith(INSTALLED):
        return frame
    name, package = kind.strip(".()"), _package(frame)
    found, inside = frame, frame
    while inside.f_back is not None and _package(inside) == package:
        decorates = inside is found is not frame and name not in inside.f_code.co_names
        if inside.f_code.co_name == name or decorates:
            found = inside.f_back
        inside = inside.f_back
    return found


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _span(frame: FrameType) -> Any:
    """Return where the expression that a frame has reached begins and ends in the source."""
    return next(itertools.islice(frame.f_code.co_positions(), frame.f_lasti // 2, None))


def _passes_on(frame: FrameType) -> bool:
    """Return whether a call only passes through this frame, by modes or by the names of `torch.ops`."""
    code = frame.f_code
    mode = code.co_name == "__torch_function__" and code.co_filename.startswith(TOOLKIT)
    return mode or code.co_filename == TORCH + "_ops.py"


def _is_decorating(frame: FrameType) -> bool:
    """Return whether torch enters a context for a function decorated with it."""
    return frame.f_code.co_filename.startswith(TORCH) and frame.f_code.co_name != "<module>"


def _opens_with(frame: FrameType) -> bool:
    """Return whether a frame's current call is the subject of a ``with`` statement."""
    code = frame.f_code.co_code
    step = frame.f_lasti + 2
    while step < len(code) and code[step] == 0:  # inline caches
        step += 2
    return dis.opname[code[step]] in ("BEFORE_WITH", "LOAD_SPECIAL", "COPY")


@contextmanager
def _replaced(attributes: Iterable[tuple[Any, str, Callable[[Any], Any]]]) -> Iterator[None]:
    """Replace attributes of owners by functions of their values; restore them at the end."""
    originals = []
    try:
        for owner, name, make in attributes:
            original = owner.__dict__.get(name)
            if owner is Tensor and name == "data":
                inherited = torch._C.TensorBase.__dict__["data"]
            else:
                inherited = original.__func__ if isinstance(original, staticmethod) else getattr(owner, name, None)
            originals.append((owner, name, original))
            setattr(owner, name, make(inherited))
        yield
    finally:
        for owner, name, original in reversed(originals):
            if original is not None:
                setattr(owner, name, original)
            elif name in owner.__dict__:
                delattr(owner, name)
