"""Gates: identity nodes in the graph that decide at backward time whether a block passes the gradient.

One forward pass with gates gives the gradient for any set of open blocks, on the same random draws. Each stopped tensor
gets its own gate. A region stays a region, unless a second-order derivative or a picture needs the graph inside. Then
the region is recorded, and every node made inside becomes a gate: autograd numbers its nodes, so a node belongs to the
regions that were active when its number was assigned.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import FrameType, FunctionType
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
import torch.utils.checkpoint
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from toolkit._swapped import swapped
from toolkit.blocks import Gates, Site, carries_gradient, gated, without_tangents
from toolkit.gradients._as_plain import DEPENDS_ON_A_GRAPH, computed_as_plain, unrecorded
from toolkit.gradients._nodes import (
    EVERY_BLOCK,
    REGIONS,
    Gate,
    gate_of,
    is_cut,
    is_foreign,
    reachable_nodes,
    roots_in,
)
from toolkit.gradients._passages import Passages, Region, next_number
from toolkit.gradients._places import TOOLKIT, TORCH, serves_toolkit

__all__ = [
    "GateBoard",
    "Meeting",
    "is_called_by_checkpoint",
    "is_checkpointed",
    "replaced_by",
    "replacing",
    "unwraps",
]


@dataclass
class Meeting:
    """The uses of one block during a forward pass.

    Attributes:
        site: The place of the first use.
        calls: The number of tensors, or regions, that the block was applied to.
        carried: The number of tensors, or operations of a region, that carried a gradient.
    """

    site: Site
    calls: int = 0
    carried: int = 0


@dataclass
class GateBoard(Gates):
    """The gates of one forward pass, and the set of open gates.

    Attributes:
        records: Whether regions are recorded, for a second-order derivative or a picture. Otherwise regions give
            constants, as without a board, and opening one needs another run of the program.
        puts_gates: Whether there are gates; otherwise tensors are stopped, and the board only notes blocks.
        meetings: Block -> its uses, in the order of the program.
        arrivals: While it is a list, every gate that a backward pass reaches adds its block, the edge behind it, and
            the cotangent that arrived.
        linear: Whether the forward pass showed no operation that may act nonlinearly on cotangents.
        inner: Blocks that no gate can answer for: a derivative *inside* the forward pass reached them, or no graph is
            recorded at their place.
        overwritten: Blocks whose memory was changed in place after them.
        pierced: Recorded regions in which the program switched recording on again, so that some nodes made meanwhile
            are recorded even while the regions are closed.
        blurred: Pierced regions whose recorded nodes are not known.
        forward_mode: Recorded regions in a forward-mode derivative, which keep no graph.
        regions: Blocks that are regions.
        elsewhere: Blocks that other threads reached meanwhile.
        hooked: Whether a tensor got a hook, which acts on every derivative through it.
        opened: The blocks that a derivative passes now.
        unrecorded: The number of operations on tensors that carry a gradient where nothing is recorded.
    """

    records: bool = False
    puts_gates: bool = True
    meetings: dict[str, Meeting] = field(default_factory=dict)
    arrivals: list[tuple[str, GradientEdge, Tensor]] | None = None
    linear: bool = True
    hooked: bool = False
    inner: set[str] = field(default_factory=set)
    overwritten: set[str] = field(default_factory=set)
    pierced: set[str] = field(default_factory=set)
    blurred: set[str] = field(default_factory=set)
    forward_mode: set[str] = field(default_factory=set)
    regions: set[str] = field(default_factory=set)
    elsewhere: set[str] = field(default_factory=set)
    start: int = 0
    opened: Collection[str] = frozenset()
    unrecorded: int = 0
    _in_forward: bool = False
    _passages: Passages = field(default_factory=Passages)
    _aliases: list[tuple[str, Tensor, int]] = field(default_factory=list)

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Record a forward pass: every block in it becomes a gate, closed for derivatives inside of the pass."""
        self._in_forward, self.start = True, next_number()
        try:
            with gated(self), _Watch(self), _noting_hooks_of_every_node(self):
                yield
        finally:
            self._in_forward = False
            # An open block returns the tensor itself, so that an in-place change affects both.
            self.overwritten.update(name for name, alias, version in self._aliases if alias._version != version)
            self.inner |= self.overwritten
            self._aliases.clear()
            for region in [*self._passages.active]:  # a generator that outlives the program keeps its region open
                self._end(region)

    def noting(self) -> AbstractContextManager[None]:
        """Note the blocks of a forward pass without changing it."""
        return swapped(self, "_in_forward", True)

    @contextmanager
    def backward(self, open: Collection[str]) -> Iterator[None]:
        """Open the gates of `open` in a backward pass; the recomputation of a checkpoint reaches gates again."""
        with swapped(self, "opened", open if open is EVERY_BLOCK else frozenset(open)), gated(self):
            yield

    def needs_rerun(self, open: Collection[str]) -> bool:
        """Return whether the gradient for these open blocks needs another forward pass."""
        alone = self.inner if self.records else self.inner | self.regions
        return bool(self.pierced or alone & set(open))

    def passes(self, name: str) -> bool:
        """Return whether the gate passes now, and note a derivative that was taken inside of the forward pass."""
        if self._in_forward:
            self.inner.add(name)
        return name in self.opened

    def tensor(self, input: Tensor, name: str, site: Site) -> Tensor | None:
        """Return `input` behind a gate; None if it should be stopped."""
        if type(input) is Tensor:
            with torch._C.DisableTorchFunction():  # no mode sees the steps of a gate: `_Watch` costs 10 us for each
                return self._gate(input, name, site)
        return self._gate(input, name, site)

    def _gate(self, input: Tensor, name: str, site: Site) -> Tensor | None:
        carries = carries_gradient(input)
        # Functions and hooks may reach blocks in the backward pass; only gradient-carrying tensors count there, and not
        # for a second time in a checkpoint.
        if self._in_forward or (carries and not self.puts_gates and not is_checkpointed()):
            meeting = self.meetings.setdefault(name, Meeting(site))
            meeting.calls += 1
            meeting.carried += carries
        # Where no graph is recorded, an open block returns the tensor itself.
        if carries and not (torch.is_grad_enabled() and not self._passages.active):
            self.inner.add(name)
        if not carries or not self.puts_gates or not torch.is_grad_enabled():
            return None
        if torch._C._are_functorch_transforms_active():
            self.linear = False  # its nodes belong to separate graphs
            return Gate.apply(input, self, name)  # type: ignore[no-untyped-call, no-any-return]
        if self._in_forward:
            self._aliases.append((name, input.detach(), input._version))
        # The last step of `Function.apply`, at a tenth of its cost.
        return super(torch.autograd.Function, Gate).apply(input, self, name)  # type: ignore[no-any-return, no-untyped-call]

    def region(self, name: str, site: Site, *, both_modes: bool) -> AbstractContextManager[None] | None:
        """Record a region and the numbers of its nodes; None if the region should not be recorded."""
        if not self._in_forward:  # a checkpoint computes the region again, for its values
            return nullcontext() if self.records else None
        meeting = self.meetings.setdefault(name, Meeting(site))
        meeting.calls += 1
        self.regions.add(name)
        if forward_ad._current_level >= 0:  # tangents have no nodes that could be opened later
            meeting.carried += 1
            self.inner.add(name)
        return self._recorded(name, both_modes=both_modes) if self.records else None

    def stops(self, name: str, site: Site) -> bool:
        """Return whether the block is in place, for code that asks; a board that only notes counts this as a use."""
        if not self.puts_gates and self._in_forward:
            self.meetings.setdefault(name, Meeting(site))
        return not self.puts_gates

    @contextmanager
    def _recorded(self, name: str, *, both_modes: bool) -> Iterator[None]:
        region, caches = self._passages.begin(name), torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)  # a cast that is made inside is not one for the outside
        if both_modes and forward_ad._current_level >= 0:
            self.forward_mode.add(name)
        try:
            with without_tangents() if both_modes else nullcontext():
                yield
        finally:
            torch.set_autocast_cache_enabled(caches)
            self._end(region)

    def _end(self, region: Region) -> None:
        if region.end is None:
            self.meetings[region.name].carried += self._passages.end(region)

    def is_linear(self, nodes: Iterable[Any]) -> bool:
        """Return whether no step of the backward pass through these nodes is known to be nonlinear in the cotangent.

        The graph must have no hooks, no custom functions, and no nodes from before the forward pass.
        """
        return self.linear and all(map(self._is_plain, nodes))

    def _is_plain(self, node: Any) -> bool:
        if gate_of(node):
            return True
        if (leaf := getattr(node, "variable", None)) is not None:
            return not leaf._backward_hooks
        return not is_foreign(node) and node._sequence_nr() >= self.start

    def pierce(self, switch: object) -> None:
        """Note that the program switches recording on inside of active regions, by a context or for good.

        Inside of a transform of `torch.func` it is switched on for the level of this transform alone.
        """
        entered = self._entered()
        self.pierced.update(region.name for region in entered)
        self.blurred.update(region.name for region in entered if not region.pierce(switch))

    def mend(self, switch: object) -> None:
        """Note the end of a context that may have switched recording on."""
        self._passages.mend(switch)

    def note_elsewhere(self, name: str) -> None:
        """Note a block that another thread reached."""
        self.elsewhere.add(name)

    def make_views(self, tensors: Iterable[Tensor]) -> None:
        """Let autograd make the nodes of views now, whose base has changed, and keep them out of regions."""
        entered = self._entered()
        for tensor in tensors if entered else ():
            if tensor._is_view():
                start = next_number()
                _ = tensor.grad_fn
                for region in entered:
                    region.views.update(range(start, next_number()))

    def weigh(self) -> None:
        """Look at the memory that recorded regions take, in front of a call."""

    def open_regions(self) -> set[str]:
        """Return the recorded regions that the program is in."""
        return {region.name for region in self._entered()}

    def regions_without_casts(self) -> set[str]:
        """Return the recorded regions that the program is in, also where it has switched recording on again."""
        return {region.name for region in self._passages.active}

    def keeps_out(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Return whether a call stays out of the graph."""
        return False

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call one of the functions that depend on a graph: its values are those of the plain program to the bit."""
        if self._entered():
            return computed_as_plain(func, args, kwargs, self._is_from_inside)
        return func(*args, **kwargs)

    def _is_from_inside(self, tensor: Tensor) -> bool:
        """Return whether a tensor was made in a region, and requires no gradient in the plain program."""
        return tensor.grad_fn is not None and bool(self.regions_of(tensor.grad_fn))

    def explain(self, error: RuntimeError, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Raise another error in the place of that of a call, if the board is its cause."""

    def derive(self, roots: Collection[Any], ends: Collection[Any] | None) -> None:
        """Prepare for a derivative that the program takes from these nodes by `ends`; see `_ends_of`.

        A custom function runs in it with zeros behind a closed gate, and its result keeps a path that no plain run has.
        """
        self.close_regions(roots)
        if self.linear and self.meetings:
            nodes = (node for root in roots for node in reachable_nodes(root, EVERY_BLOCK))
            self.linear = not any(map(is_foreign, nodes))

    def deriving(self) -> AbstractContextManager[None]:
        """Make the context of a derivative that the program takes."""
        return nullcontext()

    def hook(self, tensor: Tensor) -> None:
        """Note that a tensor has a new hook, which may act nonlinearly on cotangents."""
        self.linear, self.hooked = False, True

    def hook_every_node(self) -> None:
        """Note that the program may set a hook on each node as it is made."""
        self.linear, self.hooked = False, True

    def hand_out_a_node(self) -> None:
        """Note that the program looks at a node, which may get hooks unseen."""
        self.linear = False

    def poses_as_constant(self, tensor: Tensor) -> bool:
        """Return whether the program should see a tensor that carries a gradient as a constant."""
        return False

    def may_require(self, tensor: Tensor, *, required: bool) -> bool:
        """Return whether the program may set `requires_grad` of a tensor."""
        return True

    def close_regions(self, roots: Iterable[Any]) -> None:
        """Turn `roots` and the nodes behind them into gates, if they were made in a region.

        A cut is not turned into a gate: if open, it is the tensor behind it, which may be from outside of the region.
        """
        if not self._passages:
            return
        for root in roots:
            for node in reachable_nodes(root, EVERY_BLOCK):
                names = self.regions_of(node)
                if names and REGIONS not in node.metadata and not is_cut(node):
                    node.metadata[REGIONS] = names
                    node.register_hook(functools.partial(self._cross, names))
                    if is_foreign(node) and isinstance(node, BackwardCFunction):
                        self._hold(node, names)

    def _entered(self) -> list[Region]:
        """Return the regions that the program is in, and in which it has not switched recording on again."""
        return [region for region in self._passages.active if not region.is_pierced]

    def regions_of(self, node: Any) -> frozenset[str]:
        """Return the regions in which a node was made."""
        return self._passages.around(node._sequence_nr())

    def _hold(self, node: Any, names: frozenset[str]) -> None:
        """Keep the backward pass of a custom function, which may have effects, from running where none passes."""
        kind, owner, count = type(node), weakref.ref(node), len(node.needs_input_grad)

        def apply(*cotangents: Tensor | None) -> Any:
            return kind.apply(owner(), *cotangents) if self._is_passed(names) else (None,) * count

        node.apply = apply

    def _cross(self, names: frozenset[str], results: tuple[Tensor | None, ...], _: Any) -> tuple[None, ...] | None:
        """Drop the gradients of a node of these regions, unless they are open or the derivative is taken inside."""
        return None if self._is_passed(names) else (None,) * len(results)

    def _is_passed(self, names: frozenset[str]) -> bool:
        passing = [self.passes(name) for name in names - self.open_regions()]
        return all(passing)


_REPLACES = "toolkit.gradients.replaces"


# Under another name than that of torch, which an audit of a script replaces.
_GRAD = torch.autograd.grad
_GRAD_FN = torch._C.TensorBase.__dict__["grad_fn"].__get__
_REQUIRE_GRADIENT = torch._C.TensorBase.__dict__["requires_grad"].__set__
# Attribute of a tensor -> its value for a constant.
_SHOWING_A_GRAPH: dict[Any, bool | None] = {
    _GRAD_FN: None,
    torch._C.TensorBase.__dict__["requires_grad"].__get__: False,
    torch._C.TensorBase.__dict__["is_leaf"].__get__: True,
}


def _ends_of(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any] | None:
    """Return the tensors and gradient edges at which a derivative ends; None if it may end at every leaf."""
    inputs = args[1] if func is _GRAD and len(args) > 1 else kwargs.get("inputs")
    return None if inputs is None else tree_leaves(inputs, is_leaf=lambda found: isinstance(found, GradientEdge))


_DERIVATIVES = frozenset({_GRAD, torch.autograd.backward, Tensor.backward})

# One look-up tells most calls from these.
_OBSERVED = _DERIVATIVES.union(
    _SHOWING_A_GRAPH,
    [torch._C._set_grad_enabled, Tensor.register_hook, _GRAD_FN, Tensor.requires_grad_, _REQUIRE_GRADIENT],
)


class _Watch(TorchFunctionMode):
    """Observes every call of a forward pass: derivatives before they are taken, `enable_grad`, and hooks."""

    def __init__(self, board: GateBoard) -> None:
        super().__init__()
        self._board = board

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs, func = kwargs or {}, replaced_by(func)
        if self._board.records:
            self._board.weigh()
            self._board.make_views(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
        elif not torch._C.is_grad_enabled() and not serves_toolkit(sys._getframe(1)):
            self._board.unrecorded += any(getattr(leaf, "requires_grad", False) for leaf in tree_leaves((args, kwargs)))
        if func not in _OBSERVED:
            pass
        elif func in _DERIVATIVES:
            self._board.derive(roots_in((args, kwargs)), _ends_of(func, args, kwargs))
            with self._board.deriving():
                return func(*args, **kwargs)
        elif func is torch._C._set_grad_enabled:
            self._switch(args)
        elif func is Tensor.register_hook:
            handle = func(*args, **kwargs)
            self._board.hook(args[0])
            return handle
        elif func in _SHOWING_A_GRAPH and self._board.poses_as_constant(args[0]):
            return _SHOWING_A_GRAPH[func]
        elif func == _GRAD_FN:
            self._board.hand_out_a_node()
        elif func is Tensor.requires_grad_ or func == _REQUIRE_GRADIENT:
            if unwraps(args[0]):
                with self:  # the tensor inside of it is the one that is set
                    return type(args[0]).__torch_function__(func, (type(args[0]),), args, kwargs)
            if not self._board.may_require(args[0], required=all(args[1:]) and kwargs.get("requires_grad", True)):
                return args[0]
        if self._board.keeps_out(func, args, kwargs):
            with unrecorded():
                return func(*args, **kwargs)
        try:
            if func in DEPENDS_ON_A_GRAPH and self._board.records:
                return self._board.call(func, args, kwargs)
            return func(*args, **kwargs)
        except RuntimeError as error:
            self._board.explain(error, args, kwargs)
            raise

    def _switch(self, args: tuple[Any, ...]) -> None:
        """Note that recording is switched on, or off; the end of a context restores the state before it."""
        frame = _end_of_context(_beyond_modes(sys._getframe(2)))
        context = frame.f_locals.get("self")
        if frame.f_code.co_name == "__exit__":
            self._board.mend(context)
        elif args == (True,):
            self._board.pierce(context)


@contextmanager
def _noting_hooks_of_every_node(board: GateBoard) -> Iterator[None]:
    """Tell the board of each `node_creation_hook`, the caller's earlier ones included."""
    hooks: Any = torch._C._autograd
    push = getattr(hooks, "_push_node_creation_hook", None)  # newer than torch 2.13
    if push is None:
        yield
        return

    def pushed(hook: Any) -> None:
        board.hook_every_node()
        push(hook)

    if _runs_python(lambda: torch.empty((), device="cpu", requires_grad=True).sin()):
        board.hook_every_node()
    with swapped(hooks, "_push_node_creation_hook", pushed):
        yield


def _runs_python(operation: Callable[[], Any]) -> bool:
    """Return whether an operation of torch, outside of all modes, calls a function in Python."""
    called, profile = [0], sys.getprofile()
    with torch._C.DisableTorchFunction(), _disable_current_modes():

        def note(frame: FrameType, event: str, argument: Any) -> None:
            called[0] += event == "call" and frame.f_code is not operation.__code__

        sys.setprofile(note)
        try:
            operation()
        finally:
            sys.setprofile(profile)
    return called[0] > 0


def unwraps(input: Any) -> bool:
    """Return whether a subclass of tensors handles torch's functions itself."""
    return (
        type(input) not in (Tensor, torch.nn.Parameter)
        and isinstance(input, Tensor)
        and type(input).__torch_function__ is not torch._C._disabled_torch_function_impl
        and torch._C._is_torch_function_enabled()
    )


def replaced_by(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that a function marked by `replacing` replaces; return any other function unchanged.

    A function of torch passes the object to modes that its own name refers to, which may be a replacement.
    """
    return func.__dict__.get(_REPLACES, func) if type(func) is FunctionType else func


def replacing(original: Callable[..., Any], by: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a function as a replacement."""
    by.__dict__[_REPLACES] = original
    return by


def _beyond_modes(frame: FrameType) -> FrameType:
    """Return the frame of a call that passed through modes."""
    while frame.f_code.co_name == "__torch_function__" and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _end_of_context(frame: FrameType) -> FrameType:
    """Return the frame of a context's end that calls the function `set_grad_enabled`; any other frame unchanged."""
    outer: FrameType | None = frame
    while outer is not None and outer.f_code.co_filename.startswith((TORCH, TOOLKIT)):
        if outer.f_code.co_name == "__exit__" and outer.f_code.co_filename == torch.autograd.grad_mode.__file__:
            return outer
        outer = outer.f_back
    return frame


def is_checkpointed() -> bool:
    """Return whether a checkpoint, perhaps around others, computes its values again."""
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
        return False
    return is_called_by_checkpoint("unpack_hook")


def is_called_by_checkpoint(name: str) -> bool:
    """Return whether a function of that name in torch's module of checkpoints is running."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == name and frame.f_code.co_filename == torch.utils.checkpoint.__file__:
            return True
        frame = frame.f_back
    return False
