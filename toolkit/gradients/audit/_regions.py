"""The regions in which nothing is recorded, as an audit replaces them: ``no_grad`` and similar contexts."""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from types import CellType, FrameType
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils import checkpoint
from torch.utils.weak import WeakIdKeyDictionary

from toolkit.blocks import Site, is_left_out, region_at
from toolkit.gradients._cuts import Unrecordable
from toolkit.gradients._gates import unwraps
from toolkit.gradients._parts import INSTALLED
from toolkit.gradients._places import TOOLKIT, TORCH
from toolkit.gradients.audit._frames import calling_frame, is_decorating, opens_with
from toolkit.gradients.audit._tensors import requires_gradient
from toolkit.gradients.audit.places import BareBlocks, Replacement

__all__ = ["WITHOUT_END", "RegionStops"]

WITHOUT_END = "a call without `with` has no end at which a region could be closed"
"""The reason not to open a call that switches recording off for good."""

# Modules that compute in another way while no gradient is recorded and no mode is active.
_WITH_FAST_PATHS = frozenset(TORCH + f"nn/modules/{name}.py" for name in ("activation", "transformer"))
_FAST_PATH = "a module of torch takes a fast path inside of it, which has no derivative"
_INSIDE = "_toolkit_inside"  # of recorded regions, where the plain program records nothing
_PACKAGE = __name__.partition(".")[0] + "."
_SCRIPTED = "TorchScript runs outside of Python, where its stops cannot be opened"

# Under another name than that of torch, which an audit replaces.
_is_recording = torch.is_grad_enabled


class RegionStops:
    """``with torch.no_grad():`` as ``with stop_recording(place):``, and likewise.

    Inside of a recorded region the program is answered as if nothing was recorded.
    """

    def __init__(self, bare: BareBlocks) -> None:
        self._bare = bare
        self._scripts: Any = WeakIdKeyDictionary()

    def replacements(self) -> list[Replacement]:
        """Return owner, attribute, and the function that makes the new attribute of the old one."""
        contexts = ((torch.no_grad, "no_grad"), (torch.inference_mode, "inference_mode"), (torch.enable_grad, None))
        found: list[Replacement] = [
            *((context, "__enter__", functools.partial(self._enter, kind)) for context, kind in contexts),
            *((context, "__exit__", self._exit) for context, _ in contexts),
            (torch.set_grad_enabled, "__init__", self._set_grad_enabled),
            (torch.set_grad_enabled, "__call__", self._decorate),
            (torch.set_grad_enabled, "__enter__", self._enter_set_grad_enabled),
            (torch.set_grad_enabled, "__exit__", self._exit),
            *((owner, name, self._is_grad_enabled) for owner, name in self._names_of(torch.is_grad_enabled)),
            *((owner, "prev", self._before) for owner in (torch.no_grad, torch.enable_grad, torch.set_grad_enabled)),
            (torch.overrides, "has_torch_function", self._has_torch_function),
            (torch.jit.ScriptFunction, "__call__", self._scripted),
            (torch._C.ScriptMethod, "__call__", self._scripted),
        ]
        if wrap := sys.modules.get("torch._higher_order_ops.wrap"):  # of an exported program
            found.append((wrap.WrapWithSetGradEnabled, "__call__", self._exported_region))
        return found

    # --- their ends --------------------------------------------------------------------------------------------------

    def _enter(self, kind: str | None, original: Any) -> Any:
        def enter(context: Any) -> Any:
            mode = getattr(context, "mode", True)
            site = self._bare.site(kind, calling_frame()) if kind is not None and mode else None
            if not self._begin(context, site, kind):
                self._bare.note_blind_checkpoint(calling_frame())
                self._bare.region = None if kind is None else self._bare.region
                return original(context)
            return context

        return enter

    def _exit(self, original: Any) -> Any:
        def leave(context: Any, *error: Any) -> Any:
            entered = context.__dict__.get("_toolkit")
            inner, self._bare.region, self._bare.closed = (
                entered.pop() if entered else (None, self._bare.region, self._bare.closed)
            )
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
        context.__dict__.setdefault("_toolkit", []).append((inner, self._bare.region, self._bare.closed))
        if site is not None:
            self._bare.note_nested(site)
        if inner is None:
            self._bare.closed = self._bare.closed if site is None else (*self._bare.closed, str(site))
            return False
        context.prev = _is_recording()  # for an end after the attributes are restored
        self._bare.region = str(site)
        inner.__enter__()
        return True

    def _set_grad_enabled(self, original: Any) -> Any:
        def init(context: Any, mode: bool) -> None:
            caller = calling_frame()
            site = None if mode or is_decorating(caller) else self._bare.site("set_grad_enabled", caller)
            # Without a ``with`` its end cannot be seen.
            if site is not None and not opens_with(caller):
                context.prev, context.mode = _is_recording(), mode
                context.__dict__["_toolkit_place"] = str(site)
                if is_left_out(site):
                    context.__dict__["_toolkit"] = [(None, self._bare.region, self._bare.closed)]
                    return
                self._bare.note_without_a_block(site, WITHOUT_END)
                site = None
            context.prev, context.mode = _is_recording(), mode
            if site is None or not self._begin(context, site, "set_grad_enabled"):
                context.__dict__.pop("_toolkit", None)
                original(context, mode)

        return init

    def _decorate(self, original: Any) -> Any:
        def decorate(context: Any, function: Callable[..., Any]) -> Any:
            place = context.__dict__.pop("_toolkit_place", None)  # it is none: the place is the function's
            for places in (self._bare.real, self._bare.kinds, self._bare.sites):
                places.pop(place, None)
            self._bare.decorators.update([place] if place else [])
            with torch._C.DisableTorchFunction():  # the program itself switches nothing on
                return original(context, function)

        return decorate

    def _enter_set_grad_enabled(self, original: Any) -> Any:
        def enter(context: Any) -> None:
            if context.__dict__.get("_toolkit"):
                return
            caller = calling_frame()
            site = self._bare.site("set_grad_enabled", caller) if is_decorating(caller) and not context.mode else None
            if site is not None:
                with torch._C.DisableTorchFunction():  # the program itself switches nothing on
                    torch._C._set_grad_enabled(context.prev)
            if site is None or not self._begin(context, site, "set_grad_enabled"):
                original(context)
                if context.mode:  # as `enable_grad`
                    context.__dict__["_toolkit"] = [(None, self._bare.region, self._bare.closed)]
                    self._bare.region = None

        return enter

    def _exported_region(self, original: Any) -> Any:
        def run(operator: Any, mode: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            with torch.enable_grad() if mode else torch.no_grad():
                return function(*args, **kwargs)

        return run

    def _scripted(self, original: Any) -> Any:
        def call(function: Any, *args: Any, **kwargs: Any) -> Any:
            """Note a call into TorchScript if it has stops."""
            if _is_recording() and self._bare.is_mine():
                if function not in self._scripts:
                    graph = function.inlined_graph
                    self._scripts[function] = "no_grad" in str(graph) or any(
                        graph.findAllNodes(stop) for stop in ("aten::detach", "aten::detach_", "prim::data")
                    )
                if self._scripts[function] and (site := self._bare.site("TorchScript", calling_frame())):
                    self._bare.real[str(site)] = _SCRIPTED
            return original(function, *args, **kwargs)

        return call

    # --- questions that the program asks inside of them --------------------------------------------------------------

    def _is_grad_enabled(self, original: Any) -> Any:
        def is_grad_enabled() -> bool:
            frame, regions = calling_frame(), self._bare.entered()
            self._refuse_fast_path(frame, regions)
            if frame.f_code.co_filename == checkpoint.__file__:
                if self._bare.close_regions is None:  # the region is really open in this run
                    return bool(original())
                self._bare.unrepeated.update(regions)  # without a graph it keeps values, runs nothing again
                return bool(original()) and not regions
            if not regions or frame.f_code.co_filename.startswith((TOOLKIT, TORCH)):
                return bool(original())
            for region in regions:
                self._bare.partly.setdefault(region, "`is_grad_enabled()` answers in it as if it were closed")
            return False

        return is_grad_enabled

    def _names_of(self, function: Any) -> list[tuple[Any, str]]:
        """Return the modules that have imported a function. Where regions are recorded, its aliases count as well."""
        if self._bare.close_regions is None:
            return _naming(function, by_any_name=False)
        return [*_naming(function, by_any_name=True), *_holding(function)]

    def _before(self, _: Any) -> Any:
        """Give the program the `prev` that a context has in the plain program; torch reads the real one."""

        def get(context: Any) -> bool:
            regions, before = context.__dict__.get(_INSIDE), bool(context.__dict__["prev"])
            if not (regions and before) or sys._getframe(1).f_code.co_filename.startswith((TOOLKIT, TORCH)):
                return before
            for region in regions:
                self._bare.partly.setdefault(region, "`prev` of a context in it answers as if it were closed")
            return False

        def set(context: Any, value: bool) -> None:
            context.__dict__["prev"], context.__dict__[_INSIDE] = value, tuple(self._bare.entered())

        return property(get, set)

    def _refuse_fast_path(self, frame: FrameType, regions: Collection[str]) -> None:
        """Raise Unrecordable if a module of torch has a fast path, without a derivative, that it takes unrecorded."""
        if not regions or self._bare.close_regions is None:
            return
        if frame.f_code.co_filename in _WITH_FAST_PATHS and any(map(requires_gradient, frame.f_locals["tensor_args"])):
            raise Unrecordable(dict.fromkeys(sorted(regions), _FAST_PATH))

    def _has_torch_function(self, original: Any) -> Any:
        def has_torch_function(arguments: Any) -> bool:
            """Leave out the modes that watch the program: a module would not take its fast path."""
            modes = _get_current_function_mode_stack()
            ours = all(type(mode).__module__.startswith(_PACKAGE) for mode in modes)
            if not (ours and calling_frame().f_code.co_filename in _WITH_FAST_PATHS):
                return bool(original(arguments))
            return any(map(unwraps, arguments))

        return has_torch_function


def _naming(function: Any, *, by_any_name: bool) -> list[tuple[Any, str]]:
    """Return the modules that have imported a function of torch, and its name there."""
    name = function.__name__
    paths = list(sys.modules) if by_any_name else _naming_later(name, len(sys.modules), next(reversed(sys.modules)))
    found = list[tuple[Any, str]]()
    for path in paths:
        if _is_left_out(path):
            continue
        module = sys.modules.get(path)
        variables = getattr(module, "__dict__", {})
        names = list(variables) if by_any_name else (name,)
        found += [(module, known) for known in names if variables.get(known) is function]
    return found


def _holding(function: Any) -> list[tuple[Any, str]]:
    """Return the closures and the classes that hold a function, those of torch left out, and its name there."""
    if gc.get_freeze_count():  # frozen objects are not searched; frozen again, garbage of today would stay for ever
        gc.unfreeze()
    holders = gc.get_referrers(function)
    holders += _referrers(holder for holder in holders if isinstance(holder, staticmethod))
    cells = {id(holder): holder for holder in holders if isinstance(holder, CellType)}
    found: list[tuple[Any, str]] = [(cell, "cell_contents") for cell in cells.values()]
    bodies = (holder for holder in holders if isinstance(holder, dict) and "__module__" in holder)
    for owner in dict.fromkeys(holder for holder in _referrers(bodies) if isinstance(holder, type)):
        for name, value in vars(owner).items():
            if getattr(value, "__func__", value) is function and not _is_left_out(owner.__module__):
                found.append((owner, name))
    return found


def _referrers(held: Iterable[object]) -> list[Any]:
    """Return the objects that hold one of these; without any, spare a look at every object of the process."""
    objects = tuple(held)
    return gc.get_referrers(*objects) if objects else []


@functools.lru_cache(1)
def _naming_later(name: str, n_modules: int, latest: str) -> list[str]:
    """Return the modules that have a name, or may get it later; searched again after an import.

    Installed modules get their names when they are imported. There are a thousand of them, and their search takes
    longer than a small step of training.
    """
    return [
        path
        for path, module in list(sys.modules.items())
        if not _is_left_out(path)
        and (name in (variables := getattr(module, "__dict__", {})) or not _is_installed(path, variables))
    ]


def _is_installed(path: str, variables: Mapping[str, Any]) -> bool:
    return path in sys.stdlib_module_names or str(variables.get("__file__")).startswith(INSTALLED)


def _is_left_out(path: str) -> bool:
    return path.partition(".")[0] in ("torch", "toolkit") and path not in ("torch", "torch._C")
