"""Cuts: the blocks of a program that runs only once, and continues as if it had not been recorded."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_leaves

from toolkit._swapped import swapped
from toolkit.blocks import Site, carries_gradient
from toolkit.gradients._as_plain import PRODUCTS, choosing, computed_as_plain, may_depend, unfolded
from toolkit.gradients._gates import GateBoard, Meeting, is_checkpointed
from toolkit.gradients._nodes import (
    EVERY_BLOCK,
    Cut,
    forget_source,
    gate_of,
    is_cut,
    made_leaf,
    reachable_nodes,
    source_of,
    successors,
)
from toolkit.gradients._passages import next_number
from toolkit.gradients._places import TOOLKIT, TORCH
from toolkit.gradients._resident import RegionMemory

__all__ = ["NO_DERIVATIVE", "WRITES_STAY_BLOCKED", "CutBoard", "Unrecordable", "changed_by"]

WRITES_STAY_BLOCKED = "it updates older tensors in place, as an average of weights does; these updates stay blocked"
"""The reason why a region opens only in part."""

NO_DERIVATIVE = "it enters an operation that is not differentiable in it"
"""The reason why a constant is not recorded that an operation takes only as a constant."""

_VIEW = "a view of it, which is in use, becomes a leaf that requires a gradient"
_CHECKPOINTED = "a checkpoint multiplies by it, and would multiply in another way when it computes again"
_TAKES_NO_GRADIENT = (
    "is not differentiable with respect to argument",
    "don't support automatic differentiation",
    "derivative for ",  # "... is not implemented"
    "cannot resize variables that require grad",
)
_HOOKS = "toolkit.gradients.hooks"
_OVERRIDES = TORCH + "overrides.py"


class Unrecordable(RuntimeError):
    """A step whose gradient would not be that of the plain step.

    Attributes:
        places: Place -> the reason why it should not be recorded.
    """

    def __init__(self, places: Mapping[str, str]) -> None:
        """Name the places."""
        listed = "; ".join(f"{place}: {reason}" for place, reason in places.items())
        super().__init__(f"The step should be recorded without these places. Found {listed}.")
        self.places = places


class CutBoard(GateBoard):
    """Cuts instead of gates, for a program that runs only once and continues afterwards.

    Nothing behind a cut runs in the program's own backward passes, as nothing runs behind a detached tensor. Regions
    are recorded.

    Attributes:
        written: Regions with changes in place of a tensor that has its gradient from outside.
        nested: Blocks that stop a nested tensor with strides, which cannot be cut.
        before: Block -> the node of a tensor from before the recording that it stops.
        asked: Blocks for whose results the program reads `requires_grad` or `grad_fn`.
        memory: The memory that recorded regions take.
        too_large: Regions that are no longer recorded, because that takes too much memory -> this reason.
        first: The number of the first node.
        latest: The block met last.
    """

    def __init__(self, real: Mapping[str, str], memory: float | None = None) -> None:
        """Record every block from now on, except those in `real`: block -> the reason.

        Args:
            real: See above.
            memory: The most memory that recorded regions may take, in MB; None for half of the free memory.
        """
        super().__init__(records=True)
        self.written: set[str] = set()
        self.nested: set[str] = set()
        self.before: dict[str, Any] = {}
        self.asked: set[str] = set()
        self.memory, self.too_large = RegionMemory(memory), dict[str, str]()
        self.first, self.latest = next_number(), ""
        self._real, self._leaves, self._is_inside, self._process = real, list[Any](), False, os.getpid()
        self._anchor = torch.empty((), device="cpu", requires_grad=True)
        self._anchored = get_gradient_edge(self._anchor)  # made now, unseen by a `node_creation_hook` of the program

    def tensor(self, input: Tensor, name: str, site: Site) -> Tensor | None:
        """Return `input` behind a cut; None if it should be stopped, as in a child process."""
        carries = self._note(input, name, site)
        if not carries or name in self._real or os.getpid() != self._process:
            return None
        if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
            self.inner.add(name)
            return None
        if not torch.is_grad_enabled():
            return None
        if self._derives and not is_checkpointed():
            return None
        if input.is_nested and input.layout is torch.strided:  # autograd gives it no node with another input
            self.nested.add(name)
            return None
        if self.is_earlier(node := get_gradient_edge(input).node):  # it may be freed: it is known, and never passes
            self.before.setdefault(name, node)
            input = input.detach()
        self.latest = name
        return super(torch.autograd.Function, Cut).apply(self._anchor, (input,), name)  # type: ignore[no-any-return, no-untyped-call]

    def region(self, name: str, site: Site, *, both_modes: bool) -> AbstractContextManager[None] | None:
        """Record a region; None if it should not be recorded, as in a child process."""
        if self._derives:
            if not is_checkpointed():
                self.meetings.setdefault(name, Meeting(site)).carried += 1
                self.inner.add(name)
                return None
            return None if name in self._real else self._again(name)
        self._give_up([name])
        if name in self._real or name in self.too_large or os.getpid() != self._process:
            self.meetings.setdefault(name, Meeting(site)).calls += 1
            return None
        self.latest = name
        return super().region(name, site, both_modes=both_modes)

    @contextmanager
    def _recorded(self, name: str, *, both_modes: bool) -> Iterator[None]:
        if not self.open_regions():
            self.memory.enter()
        before = torch.is_grad_enabled()
        try:
            with super()._recorded(name, both_modes=both_modes):
                yield
                if torch.is_grad_enabled():
                    self.memory.look()
        finally:
            if name in self.too_large:  # recording ended inside
                _switch_recording(before)

    def weigh(self) -> None:
        """Stop recording in the regions that the program is in, once regions take too much memory."""
        if not torch.is_grad_enabled():
            return
        entered = self._entered()
        if entered and all(region.is_of_this_level for region in entered):
            self.memory.look_at_times()
            self._give_up([region.name for region in entered])
            if any(region.name in self.too_large for region in entered):
                _switch_recording(False)

    def _give_up(self, names: Collection[str]) -> None:
        """Record these regions no more if recorded regions take too much memory."""
        if reason := self.memory.excess:
            self.too_large = dict.fromkeys(names, reason) | self.too_large
            self.memory.excuse()

    @contextmanager
    def _again(self, name: str) -> Iterator[None]:
        """Pass a region that a checkpoint computes again: a derivative inside of the checkpoint ends there again."""
        region = self._passages.begin(name)
        try:
            yield
        finally:
            self._passages.end(region)

    @property
    def _derives(self) -> bool:
        """Whether a derivative runs functions and hooks of the program: a backward pass, or one inside of the step."""
        return self._is_inside or not self._in_forward

    def deriving(self) -> AbstractContextManager[None]:
        """Take a derivative inside of the step, whose functions and hooks stop their gradients for real."""
        return swapped(self, "_is_inside", True)

    def _note(self, input: Tensor, name: str, site: Site) -> bool:
        """Note the use of a block; return whether it stops a gradient.

        A backward pass meets a block in a checkpoint, for the second time, and in a function or hook of its own.
        """
        carries = carries_gradient(input)
        own = carries and self._derives and not is_checkpointed()
        if own:
            self.inner.add(name)
        if self._in_forward or own:
            meeting = self.meetings.setdefault(name, Meeting(site))
            meeting.calls += 1
            meeting.carried += carries
        return carries

    def is_earlier(self, node: Any) -> bool:
        """Return whether a node was made before the recording, and may be freed."""
        return not hasattr(node, "variable") and node._sequence_nr() < self.first

    def is_constant(self, tensor: Tensor) -> bool:
        """Return whether a tensor with a recorded graph is a constant of the plain program."""
        node = tensor.grad_fn
        return not (node is None or self.is_earlier(node) or self.leads_to_a_leaf(node, {}))

    def poses_as_constant(self, tensor: Tensor) -> bool:
        """Return whether the program, and not torch, looks at a tensor that is a constant of the plain program."""
        if tensor.grad_fn is None or not _is_asked_by_program() or not self.is_constant(tensor):
            return False
        self.asked |= self.making([tensor.grad_fn])
        return True

    def leads_to_a_leaf(self, node: Any, known: dict[Any, bool]) -> bool:
        """Return whether the plain program has a graph behind this node; `known` caches the answers by node."""
        order, stack = list[Any](), [node]
        while stack:
            here = stack.pop()
            if here in known:
                continue
            known[here] = hasattr(here, "variable") or self.is_earlier(here)
            closed = is_cut(here) or self.regions_of(here)
            if not (known[here] or closed):
                order.append(here)
                stack.extend(successors(here))
        for here in sorted(order, key=lambda node: node._sequence_nr()):  # the nodes behind a node were made before it
            known[here] = any(known[behind] for behind in successors(here))
        return known[node]

    def may_require(self, tensor: Tensor, *, required: bool) -> bool:
        """Return whether the program may set `requires_grad` of a tensor.

        A constant of the plain program is a leaf there. If it should require a gradient, it becomes a leaf here, too,
        from which derivatives of open stops go on. If it should not, it stays as it is.
        """
        if not self.is_constant(tensor):
            return True
        if required:
            source = get_gradient_edge(tensor)
            self._detach(tensor)
            tensor.requires_grad_()
            self._leaves.append(made_leaf(tensor, source))
        return required

    def _detach(self, tensor: Tensor) -> None:
        if not tensor._is_view():
            tensor.detach_()
            return
        node = tensor.grad_fn
        try:
            torch.utils.swap_tensors(tensor, tensor.detach())
        except RuntimeError as error:
            places = {name for behind in reachable_nodes(node, EVERY_BLOCK) for name in self._blocks_of(behind)}
            raise Unrecordable(dict.fromkeys(sorted(places), _VIEW)) from error

    def _blocks_of(self, node: Any) -> frozenset[str]:
        return gate_of(node) | self.regions_of(node)

    def forget_leaves(self) -> None:
        """Turn the leaves that stand for constants back into ordinary leaves."""
        for node in self._leaves:
            forget_source(node)

    def hook(self, tensor: Tensor) -> None:
        """Note that a tensor has a new hook, which may act nonlinearly on cotangents."""
        node: Any = get_gradient_edge(tensor).node
        node.metadata.setdefault(_HOOKS, []).append(tensor._backward_hooks)

    def hand_out_a_node(self) -> None:
        """Note that the program looks at a node, which may get hooks unseen; torch's optimisers look, and set none."""
        if _is_asked_by_program():
            self.linear = False

    def is_hooked(self, node: Any) -> bool:
        """Return whether the program has set a hook on the result of this node."""
        return self.hooked or bool(_hooks(node))

    @contextmanager
    def keeping_hooks(self, nodes: Iterable[Any]) -> Iterator[None]:
        """Put back the hooks that remove themselves when they are called."""
        before = [(hooks, dict(hooks)) for node in nodes for hooks in _hooks(node)]
        try:
            yield
        finally:
            for hooks, kept in before:
                hooks.update(kept)

    def keeps_out(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Return whether a call changes a tensor from outside of a region; such a change opens with no region."""
        open = self.open_regions()
        for tensor in changed_by(func, args, kwargs) if open else ():
            if tensor.requires_grad and (outer := open - self.regions_of(get_gradient_edge(tensor).node)):
                self.written |= outer
                return True
        return False

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call one of the functions that depend on a graph; its gradients, too, are those of the plain program."""
        if self._entered() or not may_depend(func, args, kwargs):
            return super().call(func, args, kwargs)
        carrying = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.requires_grad]
        constant = [tensor for tensor in carrying if self.is_constant(tensor)]
        if constant and len(constant) == len(carrying):
            return computed_as_plain(func, args, kwargs, self.is_constant)
        if not constant:
            return func(*args, **kwargs)
        chosen_by, reason = choosing(func, args, kwargs)
        if all(tensor is not chosen_by for tensor in constant):
            reason = ""
        if func in PRODUCTS and torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            reason = _CHECKPOINTED
        if reason:
            raise Unrecordable(dict.fromkeys(sorted(self.making(tensor.grad_fn for tensor in constant)), reason))
        return unfolded(func, args, kwargs, self.is_constant)

    def explain(self, error: RuntimeError, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Raise Unrecordable if a call takes no gradient for an argument that is a constant of the plain program."""
        if not any(words in str(error) for words in _TAKES_NO_GRADIENT):
            return
        given = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.grad_fn is not None)
        if places := self.making(tensor.grad_fn for tensor in filter(self.is_constant, given)):
            raise Unrecordable(dict.fromkeys(sorted(places), NO_DERIVATIVE)) from error

    def making(self, roots: Iterable[Any]) -> set[str]:
        """Return the blocks that make constants of these results: the first on each path."""
        stack, seen, places = [*roots], set[Any](), set[str]()
        while stack:
            node = stack.pop()
            if node not in seen:
                seen.add(node)
                found = self._blocks_of(node)
                places |= found
                stack += [] if found else successors(node)
        return places

    @contextmanager
    def of_the_program(self) -> Iterator[None]:
        """Enter a backward pass of the program itself."""
        with swapped(self, "_in_forward", False), self.backward(()):
            yield

    def close_regions(self, roots: Iterable[Any]) -> None:
        """Close regions. If a function or a hook differentiates in a backward pass, the blocks behind are `inner`."""
        roots = list(roots)
        super().close_regions(roots)
        if torch._C._current_autograd_node() is not None:
            self.inner.update(*(self._blocks_of(node) for root in roots for node in reachable_nodes(root, EVERY_BLOCK)))

    def derive(self, roots: Collection[Any], ends: Collection[Any] | None) -> None:
        """Prepare for a derivative that the program takes: blocks on its paths, once they are open, are `inner`."""
        self.close_regions(roots)
        if self._in_forward:
            nodes = {node for root in roots for node in reachable_nodes(root, EVERY_BLOCK)}
            self.inner.update(*map(gate_of, nodes if ends is None else self._leading_to(ends, nodes)))

    def _leading_to(self, ends: Collection[Any], nodes: Collection[Any]) -> Iterator[Any]:
        """Yield the nodes with a path to one of these tensors and gradient edges.

        An end that was made of a constant may itself be the tensor behind a stop, so the nodes behind it count, too.
        """
        edges = {end.node if isinstance(end, GradientEdge) else getattr(end, "grad_fn", None) for end in ends}
        leaves = {id(end) for end in ends}
        known = {*nodes, *self._leaves}
        stack = [node for node in known if node in edges or id(getattr(node, "variable", None)) in leaves]
        for made in filter(source_of, stack):
            yield from reachable_nodes(made, EVERY_BLOCK)
        before, seen = dict[Any, list[Any]](), set(stack)
        for node in nodes:
            for behind in successors(node):
                before.setdefault(behind, []).append(node)
        while stack:
            for node in before.get(stack.pop(), ()):
                if node not in seen:
                    seen.add(node)
                    stack.append(node)
                    yield node


def _switch_recording(to: bool) -> None:
    """Switch the recording of a graph on or off, unseen by the modes that watch the program."""
    with torch._C.DisableTorchFunction():
        torch._C._set_grad_enabled(to)


def _is_asked_by_program() -> bool:
    """Return whether the call that a mode sees comes from other code than that of torch and of this library."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and (
        frame.f_code.co_name == "__torch_function__" or _OVERRIDES in frame.f_code.co_filename
    ):
        frame = frame.f_back
    return frame is not None and not frame.f_code.co_filename.startswith((TORCH, TOOLKIT))


def _hooks(node: Any) -> list[dict[int, Any]]:
    """Return the hooks on the results of a node, or on a leaf."""
    leaf = getattr(node, "variable", None)
    hooks = node.metadata.get(_HOOKS, []) if leaf is None else [leaf._backward_hooks]
    return [found for found in hooks if found]


def changed_by(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors that an operation changes in place."""
    name = getattr(func, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__") and func is not Tensor.requires_grad_
    changed = kwargs.get("out")
    if changed is None and (in_place or name == "__setitem__" or name in _IN_PLACE_OPERATORS):
        changed = args[:1]
    return [] if changed is None else [leaf for leaf in tree_leaves(changed) if isinstance(leaf, Tensor)]


_IN_PLACE_OPERATORS = frozenset(
    f"__i{operator}__" for operator in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
)
