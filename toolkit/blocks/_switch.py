"""The switch: the blocks that are open and the gates of a comparison, in each thread and in compiled code.

Names that are rebound here are read as ``_switch.quiet``, never imported.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from toolkit.blocks._names import Block, known_name, lock
from toolkit.blocks._sites import Site
from toolkit.blocks._tensors import alias, carries_gradient


class Gates(ABC):
    """The substitute of a comparison for every block while it runs (see `gated`)."""

    @abstractmethod
    def tensor(self, input: Tensor, name: str, site: Site) -> Tensor | None:
        """Return `input` behind a gate that decides at backward time; None: it is to be stopped as ever."""

    @abstractmethod
    def region(self, name: str, site: Site, *, both_modes: bool) -> AbstractContextManager[None] | None:
        """Return the context in which a body runs that is stopped later on; None: it is to be stopped as ever."""

    def stops(self, name: str, site: Site) -> bool:
        """Say whether the block itself is in place, and no gate, to code that asks."""
        return False

    def note_elsewhere(self, name: str) -> None:  # noqa: B027 - not every comparison wants to know
        """Be told of a block that another thread met."""


# Told of each tensor that `stop_gradient` gives out as a constant: the block, and where it was put in place.
Watch = Callable[[Tensor, str, Site], None]


class Reached(set[str]):
    """The blocks that were reached while they were open.

    Attributes:
        is_compared: Whether a comparison ran meanwhile, which closes them.
        elsewhere: The blocks among them that another thread reached meanwhile, where they are closed.
    """

    is_compared = False

    def __init__(self) -> None:
        super().__init__()
        self.elsewhere: set[str] = set()


class State(NamedTuple):
    """The differences from the normal case in this thread: open blocks, gates, the prefix of ad-hoc names.

    It is made of changes, one for each ``with`` that is entered, so that any of them can be taken back: generators
    need not leave theirs in the opposite order.
    """

    open: frozenset[str] = frozenset()
    reached: tuple[Reached, ...] = ()
    gates: Gates | None = None
    compares: bool = False
    left_out: frozenset[str] = frozenset()
    watches: tuple[Watch, ...] = ()
    prefix: str = ""
    changes: tuple[Callable[[State], State], ...] = ()


NORMAL = State()
current: ContextVar[State] = ContextVar("toolkit.blocks", default=NORMAL)
this_thread = current.get  # called by its name: Python looks up a method of an imported object more slowly

# True while no thread has anything but `NORMAL`: the whole cost of the switch in a program that does not use it.
quiet = True
_active = 0

# Of all threads, so that a block that is met in another one than its comparison does not go unnoticed.
_gates: dict[object, Gates] = {}
_openings: dict[int, tuple[Reached, frozenset[str]]] = {}

# For compiled code. Rebound, never mutated, so that Dynamo's guard notices.
open_when_compiled: frozenset[str] = frozenset()
prefix_when_compiled = ""
_prefixes: dict[object, str] = {}
_open_counts: Counter[str] = Counter()
# Blocks that a compiled graph holds in their open form: replaying it cannot report that they were reached.
compiled_open: set[str] = set()


def is_quiet() -> bool:
    """Say whether no block is open, compared or watched in any thread."""
    return quiet


@contextmanager
def opened(*names: Block | str, leaves_out: bool = False) -> Iterator[Reached]:
    """Open blocks as `unblock` does, and hand out the set of those reached instead of raising for the others.

    Args:
        names: The blocks.
        leaves_out: Whether these blocks give out their input itself, as if the source was without the call.
    """
    names_opened = frozenset(known_name(name) for name in names)
    reached = Reached()

    def change(state: State) -> State:
        reaching = (*state.reached, reached)
        left_out = state.left_out | names_opened if leaves_out else state.left_out
        return state._replace(open=state.open | names_opened, reached=reaching, left_out=left_out)

    with entered(change, names_opened):
        _openings[id(reached)] = reached, names_opened
        try:
            yield reached
        finally:
            del _openings[id(reached)]


@contextmanager
def gated(gates: Gates | None) -> Iterator[None]:
    """Put `gates`, or nothing but the block, in the place of every block, open or not: the slot for a comparison."""
    for reached in current.get().reached:
        reached.is_compared = True
    with entered(lambda state: state._replace(gates=gates, open=frozenset(), left_out=frozenset(), compares=True)):
        token = object()
        if gates is not None:
            _gates[token] = gates
        try:
            yield
        finally:
            _gates.pop(token, None)


@contextmanager
def watched(watch: Watch) -> Iterator[None]:
    """Tell `watch` of every tensor that `stop_gradient` gives out as a constant."""
    with entered(lambda state: state._replace(watches=(*state.watches, watch))):
        yield


def stop_at(input: Tensor, site: Site) -> Tensor | None:
    """Return the result of a place that does not call `stop_gradient` itself; None while it is plainly blocked."""
    state, key = current.get(), str(site)
    if key in state.open:
        return let_pass(state, key, input)
    return None if state.gates is None else state.gates.tensor(input, key, site)


def region_at(site: Site, *, both_modes: bool) -> AbstractContextManager[None] | None:
    """Return the context of a region that does not call `stop_recording`; None while it is plainly blocked."""
    state, key = current.get(), str(site)
    if key in state.open:
        return open_region(state, key)
    return None if state.gates is None else state.gates.region(key, site, both_modes=both_modes)


def is_left_out(site: Site) -> bool:
    """Return whether a call is to do nothing, because its place is open, and count the place as reached."""
    state, key = current.get(), str(site)
    if key not in state.open:
        return False
    _mark_reached(state, key)
    return True


def let_pass(state: State, name: str, input: Tensor) -> Tensor:
    """Return a tensor as its open block gives it out; where nothing is recorded that is the tensor itself."""
    if carries_gradient(input):
        _mark_reached(state, name)
    # Otherwise with the bits of an open gate.
    itself = name in state.left_out or not (torch.is_grad_enabled() or forward_ad._current_level >= 0)
    return input if itself else alias(input)


@contextmanager
def open_region(state: State, name: str) -> Iterator[None]:
    """Run an open region, which counts as reached if something was recorded in it."""
    records, start = torch.is_grad_enabled(), torch._C._autograd._get_sequence_nr()
    try:
        yield
    finally:
        if forward_ad._current_level >= 0 or (records and torch._C._autograd._get_sequence_nr() > start):
            _mark_reached(state, name)


def note_elsewhere(name: str) -> None:
    """Tell other threads, which compare or open blocks, of a block that they do not see."""
    for gates in tuple(_gates.values()):
        gates.note_elsewhere(name)
    for reached, names in tuple(_openings.values()):
        reached.elsewhere.update(names & {name})


@contextmanager
def prefix_in_graph(name: str) -> Iterator[None]:
    """Prefix names in code that Dynamo traces."""
    global prefix_when_compiled
    outer = prefix_when_compiled
    prefix_when_compiled = f"{outer}{name}/"
    try:
        yield
    finally:
        prefix_when_compiled = outer


def set_prefix_when_compiled(token: object, prefix: str | None) -> None:
    """Let compiled code see the prefix that was entered last and is not left yet, in whatever thread and order."""
    global prefix_when_compiled
    with lock:
        if prefix is None:
            del _prefixes[token]
        else:
            _prefixes[token] = prefix
        prefix_when_compiled = next(reversed(_prefixes.values()), "")


@contextmanager
def entered(change: Callable[[State], State], opened: Collection[str] = ()) -> Iterator[None]:
    """Change this thread's state, and count the blocks that are open in any thread for compiled code."""
    _count(+1, opened)
    before = current.get()
    inside = change(before)._replace(changes=(*before.changes, change))
    current.set(inside)
    try:
        yield
    finally:
        now = current.get()
        current.set(before if now is inside else _without(now, change))
        _count(-1, opened)


def _without(now: State, change: Callable[[State], State]) -> State:
    """Return a state without a change that is not its last one."""
    changes = tuple(other for other in now.changes if other is not change)
    state = NORMAL
    for change in changes:
        state = change(state)
    return state._replace(changes=changes) if changes else NORMAL


def _count(change: int, opened: Collection[str]) -> None:
    global quiet, _active, open_when_compiled
    with lock:
        _active += change
        quiet = _active == 0
        for name in opened:
            _open_counts[name] += change
        if opened:
            open_when_compiled = frozenset(name for name, count in _open_counts.items() if count > 0)


def _mark_reached(state: State, name: str) -> None:
    for reached in state.reached:
        reached.add(name)
