"""The places at which a program without blocks stops a gradient, as an audit finds them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Container, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils import checkpoint
from torch.utils.weak import WeakIdKeyDictionary

from toolkit._swapped import swapped
from toolkit.blocks import Site, carries_gradient, has_storage, region_at, site_of
from toolkit.gradients._nodes import reachable_nodes
from toolkit.gradients._places import TOOLKIT, TORCH, decorated, is_wrapper_of_torch
from toolkit.gradients._snapshot import Kept
from toolkit.gradients._threads import this_thread
from toolkit.gradients.audit._frames import (
    calling_frame,
    is_machinery,
    is_standard,
    outside_of_wrapper,
    passes_on,
    span,
)

__all__ = ["BareBlocks", "Escape", "Replacement"]

Replacement = tuple[Any, str, Callable[[Any], Any]]
"""An attribute to replace: its owner, its name, and the function that makes the new value from the old one."""


@dataclass(frozen=True)
class Escape:
    """A place where a value leaves the graph for good and cannot be opened.

    Attributes:
        kind: The call, for example ``"item()"``.
        site: The place.
    """

    kind: str
    site: str


@dataclass
class BareBlocks:
    """The places found by the replaced attributes, with the places that keep their original meaning.

    Attributes:
        kinds: Place -> the call that stops the gradient, in the order of the program.
        sites: Place -> its file, line, column and function; of escapes as well.
        real: Place -> the reason why it keeps its original meaning.
        escapes: Places where a value leaves the graph.
        partly: Place of a region -> the parts that stay blocked while it is open.
        one_mode: Places of regions that pass a forward-mode derivative, open or closed.
        nested: Place -> the regions around it, from the outside.
        decorators: Places of calls that turned out to make a decorator; the decorated function is the place instead.
        spares: Regions whose writes into older tensors stay blocked.
        is_constant: Says whether a tensor is a constant while every place is closed.
        close_regions: Closes regions behind tensors before a derivative; None without recorded regions.
        open_regions: Gives the recorded regions that the program is in, including those of declared blocks.
        regions_without_casts: Gives the same regions, also where the program turns recording on again; autocast keeps
            no casts there.
        is_active: Whether the attributes are replaced now.
        elsewhere: Calls of other threads in the meantime, which are not analysed.
        state: The memory that existed before the program ran.
        region: The open region that the program is in, by its place.
        closed: The closed regions that the program is in, from the outside.
        here: The frame to take for the caller, while a subclass of tensors takes itself apart.
        writes: Regions that write into older tensors.
        undone: Gets the state of older tensors before each change in place; None outside of `undoing`.
        bound_earlier: Function of torch -> the attribute that now stands for it.
        aliases: ``.data`` of a constant -> its place.
        unrepeated: Recorded regions with a checkpoint that recomputes nothing there.
        casts: Weight -> its version at its first cast by autocast, and the regions that it was in.
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
    region: str | None = None
    closed: tuple[str, ...] = ()
    here: FrameType | None = None
    writes: set[str] = field(default_factory=set)
    undone: list[Kept] | None = None
    unrepeated: set[str] = field(default_factory=set)
    bound_earlier: dict[Any, Callable[..., Any]] = field(default_factory=dict)
    aliases: Any = field(default_factory=WeakIdKeyDictionary)
    casts: Any = field(default_factory=WeakIdKeyDictionary)
    state: Container[int] = frozenset()
    _thread: tuple[int, int] = field(default_factory=this_thread)
    _copies: Container[int] = frozenset()
    _calls: dict[str, dict[tuple[int, int], tuple[CodeType, Any]]] = field(default_factory=dict)

    def copied(self, state: Iterable[Tensor]) -> AbstractContextManager[None]:
        """Treat these tensors as copies that stand for the program's state."""
        return swapped(self, "_copies", {tensor.untyped_storage()._cdata for tensor in state if has_storage(tensor)})

    @contextmanager
    def sparing(self, places: Iterable[str]) -> Iterator[bool]:
        """Block the writes of these regions into older tensors; yield whether any of them were not blocked before."""
        outer, partly = self.spares, dict(self.partly)
        self.spares = self.writes.intersection(places).union(outer)
        try:
            yield len(self.spares) > len(outer)
        except BaseException:
            self.partly = partly
            raise
        finally:
            self.spares = outer

    @contextmanager
    def undoing(self) -> Iterator[None]:
        """Undo the changes in place that functions and hooks of the program make to older tensors."""
        outer, self.undone = self.undone, []
        try:
            yield
        finally:
            undone, self.undone = self.undone, outer
            with torch._C.DisableTorchFunction():  # these changes are not noted
                for kept in reversed(undone):
                    kept.put_back()

    def chains(self) -> list[str]:
        """Return a sentence for each place that stands for several stops, such as those of a chain of calls."""
        numbers = {place: len({span for _, span in calls.values()}) for place, calls in self._calls.items()}
        return [
            f"{place} stands for {number} stops, which open together: their expressions begin there"
            for place, number in numbers.items()
            if number > 1
        ]

    def through_data(self) -> list[str]:
        """Return the recorded places of `.data`, through which a program may change memory unseen by autograd."""
        return [place for place, kind in self.kinds.items() if kind == ".data" and place not in self.real]

    # --- notes -------------------------------------------------------------------------------------------------------

    def note_writes(self, changed: Iterable[Tensor], values: Iterable[Tensor]) -> None:
        """Note values with a gradient that are written through `.data`."""
        bases = [tensor if tensor._base is None else tensor._base for tensor in changed] if self.aliases else []
        sites = [self.aliases[base] for base in bases if base in self.aliases]
        if sites and any(carries_gradient(value) and not self.is_constant(value) for value in values):
            for site in sites:
                self.sites.setdefault(str(site), site)
                self.escapes[Escape("write through .data", str(site))] = None

    def note_nested(self, site: Site) -> None:
        """Note the regions in which a place stops something."""
        if self.closed:
            self.nested.setdefault(str(site), self.closed)

    def note_without_a_block(self, site: Site, reason: str) -> None:
        """Note a call that no block can stand for: another run of the program can leave it out, if there is one."""
        if self.close_regions is None:
            region_at(site, both_modes=False)
        else:
            self.real[str(site)] = reason

    def note_escape(self, kind: str, frame: FrameType | None) -> None:
        """Note that a value leaves the graph at the user's place above a frame."""
        if (site := self.site_of_escape(frame)) is not None:
            self.sites.setdefault(str(site), site)
            self.escapes[Escape(kind, str(site))] = None

    def note_blind_checkpoint(self, frame: FrameType) -> None:
        """Note a reentrant checkpoint that records no graph, because no input carries a gradient."""
        if frame.f_code is checkpoint.CheckpointFunction.forward.__code__:
            inputs = frame.f_locals["args"]
            if not any(isinstance(input, Tensor) and input.requires_grad for input in inputs):
                self.note_escape("checkpoint(use_reentrant=True)", frame)

    # --- where -------------------------------------------------------------------------------------------------------

    def caller(self) -> FrameType:
        """Return the frame that called a replaced attribute."""
        return self.here or calling_frame()

    def user_site(self) -> Site | None:
        """Return the place in the user's code, or in a package, that called torch."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename.startswith((TOOLKIT, TORCH)):
            frame = frame.f_back
        return None if frame is None else site_of(frame)

    def entered(self) -> Collection[str]:
        """Return the regions that this thread is in, and that record a graph although the program's own do not."""
        if not self.is_mine():
            return ()
        return self.open_regions() or ([self.region] if self.region is not None else ())

    def is_state(self, tensor: Tensor) -> bool:
        """Return whether a tensor existed before the program ran, by its memory, or is a parameter made since."""
        if tensor.is_leaf and tensor.requires_grad:
            return True
        if not has_storage(tensor):
            return False
        memory = tensor.untyped_storage()._cdata
        return memory in self.state or memory in self._copies

    def is_mine(self) -> bool:
        """Return whether this is the thread of the audit."""
        return this_thread() == self._thread

    def site(self, kind: str, frame: FrameType | None) -> Site | None:
        """Return the place of a call that becomes a block, or None if the call keeps its meaning."""
        while frame is not None and frame.f_globals.get("__name__") == "contextlib":  # an `ExitStack`
            frame = frame.f_back
        if frame is None:
            return None
        file = frame.f_code.co_filename
        if not self.is_mine():
            if not is_machinery(file):
                self.elsewhere[f"{kind} at {site_of(frame)}"] = None
            return None
        if is_wrapper_of_torch(frame):  # the decorator form: the function's place
            site = decorated(frame.f_locals["func"], is_machinery)
            if site is None:
                return None
        elif is_machinery(file):
            return None
        else:
            frame = outside_of_wrapper(frame, kind)
            site = site_of(frame)
            calls = self._calls.setdefault(str(site), {})
            if (call := (id(frame.f_code), frame.f_lasti)) not in calls:
                calls[call] = (frame.f_code, span(frame))  # of code that is kept, as its number is its key
        key = str(site)
        self.kinds.setdefault(key, kind)
        self.sites.setdefault(key, site)
        return None if key in self.real else site

    def site_of_escape(self, frame: FrameType | None) -> Site | None:
        """Return the user's place above a frame, or None if an escape there is not reported."""
        while frame is not None and _hands_on(frame):
            frame = frame.f_back
        if frame is None or is_machinery(frame.f_code.co_filename) or not self.is_mine():
            return None
        return site_of(frame)


def _hands_on(frame: FrameType) -> bool:
    """Return whether the place is that of the caller: torch and the standard library act for it, as `logging` does."""
    return frame.f_code.co_filename.startswith(TORCH) or is_standard(frame) or passes_on(frame)


def _is_stopped(tensor: Tensor) -> bool:
    """Return whether every path from a tensor ends at a closed gate."""
    return not any(hasattr(node, "variable") for node in reachable_nodes(tensor.grad_fn, ()))
