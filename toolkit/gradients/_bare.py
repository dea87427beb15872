"""Makes blocks of what stops a gradient in code that was not written with blocks, for as long as an audit runs.

``x.detach()`` becomes ``stop_gradient(x, <file:line:column>)``, ``with torch.no_grad():`` becomes ``stop_recording``,
and so on. The attributes of torch's classes are replaced for that, because a `TorchFunctionMode` does not see what
functions of `torch.nn.functional` do inside. The replacements act in one thread, and only on calls from user code,
third-party packages, `torch.nn` and `torch.distributions`; torch's own machinery keeps what it needs. Nothing stays
replaced, also after an error.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from toolkit.blocks import Site, carries_gradient, region_at, site_of, stop_at

__all__ = ["BareBlocks", "Escape"]

_TOOLKIT = str(Path(__file__).parent.parent) + "/"
_TORCH = str(Path(torch.__file__).parent) + "/"
# Parts of torch that are models, not machinery: what they stop is the user's business.
_MODELS = tuple(_TORCH + part for part in ("nn/functional.py", "nn/modules/", "nn/utils/", "distributions/"))

# One audit at a time: the replaced attributes are those of the whole process.
_one_audit = threading.Lock()


@dataclass(frozen=True)
class Escape:
    """A place where a value leaves the graph for good: nothing can be opened there.

    Attributes:
        kind: What was called, ``"item()"`` say.
        site: Where.
    """

    kind: str
    site: str


@dataclass
class BareBlocks:
    """What the replaced attributes met, and which places they leave alone.

    Attributes:
        kinds: Place -> what stops the gradient there, in the order of the program.
        real: Place -> why it keeps its original meaning.
        escapes: Places where a value leaves the graph.
        changed: Places of regions that change tensors in place which were made before them.
    """

    kinds: dict[str, str] = field(default_factory=dict)
    real: dict[str, str] = field(default_factory=dict)
    escapes: dict[Escape, None] = field(default_factory=dict)
    changed: set[str] = field(default_factory=set)
    recent: list[str] = field(default_factory=list)
    _thread: int = field(default_factory=threading.get_ident)
    _region: Site | None = None

    @contextmanager
    def replaced(self) -> Iterator[None]:
        """Replace torch's attributes for the length of a ``with``.

        Raises:
            RuntimeError: If another audit is running in this process.
        """
        if not _one_audit.acquire(blocking=False):
            raise RuntimeError("`audit` should run once at a time in a process. Found another one running.")
        self._region = None
        try:
            with ExitStack() as stack:
                for owner, name, make in self._replacements():
                    stack.enter_context(_replaced(owner, name, make))
                stack.enter_context(_InPlace(self))
                yield
        finally:
            _one_audit.release()

    def _replacements(self) -> list[tuple[Any, str, Callable[[Any], Any]]]:
        stops: list[tuple[Any, str, Callable[[Any], Any]]] = [
            (Tensor, "detach", self._detach),
            (torch, "detach", self._detach),
            (Tensor, "detach_", self._detach_in_place),
            (Tensor, "data", self._data),
            (torch, "tensor", functools.partial(self._copy, "torch.tensor()", 0)),
            (Tensor, "new_tensor", functools.partial(self._copy, "new_tensor()", 1)),
            (nn.Parameter, "__new__", self._parameter),
            (torch, "is_grad_enabled", self._is_grad_enabled),
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
            (torch.set_grad_enabled, "__enter__", self._enter_set_grad_enabled),
            (torch.set_grad_enabled, "__exit__", self._exit),
        ]
        for name in ("item", "tolist", "numpy", "__array__", "__float__", "__int__", "__complex__", "__index__"):
            stops.append((Tensor, name, functools.partial(self._escape, name)))
        return stops

    # --- what stops a tensor ---

    def _detach(self, original: Any) -> Any:
        def detach(input: Tensor) -> Any:
            site = self._site("detach()", sys._getframe(1))
            return original(input) if site is None else stop_at(input, site)

        return detach

    def _detach_in_place(self, original: Any) -> Any:
        def detach_(input: Tensor) -> Any:
            site = self._site("detach_()", sys._getframe(1))
            if site is None or not carries_gradient(input):
                if site is not None:
                    stop_at(input, site)
                return original(input)
            # The name goes on to mean a stopped tensor, but the object cannot get a gate: it keeps the real block.
            self.real[str(site)] = "it stops the tensor object itself, which cannot be opened afterwards"
            return original(input)

        return detach_

    def _data(self, original: Any) -> Any:
        def get(input: Tensor) -> Any:
            if not carries_gradient(input):
                return original.__get__(input)
            site = self._site(".data", sys._getframe(1))
            return original.__get__(input) if site is None else stop_at(input, site)

        def set(input: Tensor, value: Tensor) -> None:
            if isinstance(value, Tensor) and carries_gradient(value):
                self._note_escape(".data = ...", sys._getframe(1))
            original.__set__(input, value)

        return property(get, set)

    def _copy(self, kind: str, position: int, original: Any) -> Any:
        def copy(*args: Any, **kwargs: Any) -> Any:
            source = args[position] if len(args) > position else kwargs.get("data")
            if not isinstance(source, Tensor) or kwargs.get("requires_grad"):
                if any(isinstance(leaf, Tensor) and carries_gradient(leaf) for leaf in tree_leaves(source)):
                    self._note_escape(kind, sys._getframe(1))
                return original(*args, **kwargs)
            site = self._site(kind, sys._getframe(1))
            if site is None:
                return original(*args, **kwargs)
            like = args[0] if position else source
            where = {"dtype": kwargs.get("dtype"), "device": kwargs.get("device")}
            copied = source.clone() if like is source else source.to(like.dtype, copy=True)
            return stop_at(copied.to(**{key: value for key, value in where.items() if value is not None}), site)

        return copy

    def _parameter(self, original: Any) -> Any:
        def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
            data = args[0] if args else kwargs.get("data")
            if isinstance(data, Tensor) and carries_gradient(data):
                self._note_escape("nn.Parameter()", sys._getframe(1))
            return original(cls, *args, **kwargs)

        return staticmethod(new)

    def _escape(self, name: str, original: Any) -> Any:
        kind = {"__float__": "float()", "__int__": "int()", "__complex__": "complex()"}.get(name, f"{name}()")

        def leave(input: Tensor, *args: Any, **kwargs: Any) -> Any:
            if not carries_gradient(input):
                return original(input, *args, **kwargs)
            self._note_escape(kind, sys._getframe(1))
            return original(torch._C.TensorBase.detach(input), *args, **kwargs)

        return leave

    # --- what stops a region ---

    def _enter(self, kind: str | None, original: Any) -> Any:
        def enter(context: Any) -> Any:
            outer = self._region
            mode = getattr(context, "mode", True)
            site = self._site(kind, sys._getframe(1)) if kind is not None and mode else None
            inner: AbstractContextManager[Any] | None = None if site is None else region_at(site)
            context.__dict__["_toolkit"] = (inner, outer)
            if inner is None:
                self._region = None if kind is None else self._region
                return original(context)
            self._region = site
            inner.__enter__()
            return context

        return enter

    def _exit(self, original: Any) -> Any:
        def leave(context: Any, *error: Any) -> Any:
            inner, self._region = context.__dict__.pop("_toolkit", (None, self._region))
            if inner is None:
                return original(context, *error)
            inner.__exit__(*error)
            return None

        return leave

    def _set_grad_enabled(self, original: Any) -> Any:
        def init(context: Any, mode: bool) -> None:
            site = None if mode else self._site("set_grad_enabled", sys._getframe(1))
            if site is None:
                original(context, mode)
                return
            # Without a ``with`` it has no end that could be seen: it keeps the real block.
            caller = sys._getframe(1)
            if not _opens_with(caller):
                self.real[str(site)] = "a call without `with` has no end at which a region could be closed"
                original(context, mode)
                return
            context.prev, context.mode = torch._C.is_grad_enabled(), mode
            inner = region_at(site)
            assert inner is not None
            context.__dict__["_toolkit"] = (inner, self._region)
            self._region = site
            inner.__enter__()

        return init

    def _enter_set_grad_enabled(self, original: Any) -> Any:
        def enter(context: Any) -> None:
            if "_toolkit" not in context.__dict__:
                original(context)

        return enter

    def _is_grad_enabled(self, original: Any) -> Any:
        def is_grad_enabled() -> bool:
            user = not sys._getframe(1).f_code.co_filename.startswith((_TOOLKIT, _TORCH))
            return bool(original()) and not (user and self._region is not None and self._mine())

        return is_grad_enabled

    # --- where ---

    def _mine(self) -> bool:
        return threading.get_ident() == self._thread

    def _site(self, kind: str, frame: FrameType | None) -> Site | None:
        """Return the place of a call that is to become a block, or None for one that keeps its meaning."""
        if frame is None or not self._mine():
            return None
        file = frame.f_code.co_filename
        if file.endswith("_contextlib.py") and "func" in frame.f_locals:  # the decorator form: the function's place
            code = getattr(frame.f_locals["func"], "__code__", None)
            if code is None or _is_machinery(code.co_filename):
                return None
            site = Site(code.co_filename, code.co_firstlineno, 1, code.co_qualname)
        elif _is_machinery(file):
            return None
        else:
            site = site_of(frame)
        key = str(site)
        self.kinds.setdefault(key, kind)
        if key in self.real:
            return None
        self.recent.append(key)
        return site

    def _note_escape(self, kind: str, frame: FrameType | None) -> None:
        while frame is not None and frame.f_code.co_filename.startswith(_TORCH):
            frame = frame.f_back
        if frame is not None and not _is_machinery(frame.f_code.co_filename) and self._mine():
            self.escapes[Escape(kind, str(site_of(frame)))] = None


class _InPlace(TorchFunctionMode):
    """Keeps operations in place on older tensors out of the graph of an opened region: they are state, not values."""

    def __init__(self, bare: BareBlocks) -> None:
        super().__init__()
        self._bare = bare

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        region = self._bare._region
        if region is not None and self._bare._mine() and _changes(func, kwargs):
            target = kwargs.get("out", args[0] if args else None)
            if isinstance(target, Tensor) and target.is_leaf:
                self._bare.changed.add(str(region))
                grad_mode = torch._C.is_grad_enabled()
                torch._C._set_grad_enabled(False)
                try:
                    return func(*args, **kwargs)
                finally:
                    torch._C._set_grad_enabled(grad_mode)
        return func(*args, **kwargs)


def _changes(func: Callable[..., Any], kwargs: dict[str, Any]) -> bool:
    name = getattr(func, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name == "__setitem__" or kwargs.get("out") is not None or name in _IN_PLACE_OPERATORS


_IN_PLACE_OPERATORS = frozenset(
    f"__i{operator}__" for operator in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
)


def _is_machinery(file: str) -> bool:
    return file.startswith((_TOOLKIT, _TORCH)) and not file.startswith(_MODELS)


def _opens_with(frame: FrameType) -> bool:
    """Say whether the call that a frame is at is the subject of a ``with`` statement."""
    code = frame.f_code.co_code
    step = frame.f_lasti + 2
    while step < len(code) and code[step] == 0:  # inline caches
        step += 2
    return dis.opname[code[step]] in ("BEFORE_WITH", "LOAD_SPECIAL", "COPY")


@contextmanager
def _replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    original = owner.__dict__.get(name)
    inherited = (
        getattr(owner, name) if not (name == "data" and owner is Tensor) else torch._C.TensorBase.__dict__["data"]
    )
    if isinstance(original, staticmethod):
        inherited = original.__func__
    setattr(owner, name, make(inherited))
    try:
        yield
    finally:
        if original is None:
            with contextlib.suppress(AttributeError):
                delattr(owner, name)
        else:
            setattr(owner, name, original)
