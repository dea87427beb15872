"""Gates: identity nodes in the graph that decide at backward time whether a block passes the gradient.

One forward pass with gates gives the gradient for any set of open blocks, on the same random draws. A tensor that is
stopped gets a gate of its own. A region stays what it is, unless a derivative of second order or a picture needs what
is behind it. Then it is recorded, and every node that was made in it becomes a gate: autograd numbers its nodes, so a
node belongs to the regions that were entered when its number was given out, whatever made it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from toolkit.blocks import Gates, Site, alias, carries_gradient, gated, without_tangents

__all__ = [
    "EVERY_BLOCK",
    "GateBoard",
    "Meeting",
    "gate_of",
    "is_foreign",
    "next_number",
    "reachable_nodes",
    "regions_of",
]


@dataclass
class Meeting:
    """How one block was met during a forward pass.

    Attributes:
        site: Where it was met first.
        calls: How many tensors, or regions, it was applied to.
        carried: How many tensors, or operations of a region, carried a gradient.
    """

    site: Site
    calls: int = 0
    carried: int = 0


@dataclass
class GateBoard(Gates):
    """The gates of one forward pass, and which of them pass.

    Attributes:
        records: Whether regions are recorded, for a derivative of second order or a picture. Otherwise they are what
            they are without a board: constants, and to open one is to run the program again.
        puts_gates: Whether there are gates; otherwise tensors are stopped, and the board only notes what was met.
        meetings: Block -> how it was met, in the order of the program.
        arrivals: While it is a list, every gate that a backward pass reaches adds its block, the edge behind it, and
            the cotangent that arrived.
        linear: Whether nothing was seen in the forward pass that may act on cotangents other than linearly.
        inner: Blocks that no gate can answer for: a derivative *inside* the forward pass met them, or they stand where
            nothing is recorded.
        pierced: Recorded regions inside which the program switched the recording on again, so that some of their nodes
            are recorded also while they are closed, and nobody can tell which.
        regions: Blocks that are regions.
        elsewhere: Blocks that other threads met meanwhile.
    """

    records: bool = False
    puts_gates: bool = True
    meetings: dict[str, Meeting] = field(default_factory=dict)
    arrivals: list[tuple[str, GradientEdge, Tensor]] | None = None
    linear: bool = True
    inner: set[str] = field(default_factory=set)
    pierced: set[str] = field(default_factory=set)
    regions: set[str] = field(default_factory=set)
    elsewhere: set[str] = field(default_factory=set)
    start: int = 0
    _open: Collection[str] = frozenset()
    _in_forward: bool = False
    _regions: list[_Region] = field(default_factory=list)
    _aliases: list[tuple[str, Tensor, int]] = field(default_factory=list)

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Record a forward pass: every block it meets becomes a gate, closed for derivatives inside of the pass."""
        self._in_forward, self.start = True, next_number()
        try:
            with gated(self), _Watch(self):
                yield
        finally:
            self._in_forward = False
            # An open block is the tensor itself, so that a change in place changes both.
            self.inner.update(name for name, alias, version in self._aliases if alias._version != version)
            self._aliases.clear()
            for region in self._regions:  # a generator that is kept holds its region open for longer than the program
                self._end(region)

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Note what a forward pass meets, and change nothing."""
        self._in_forward = True
        try:
            yield
        finally:
            self._in_forward = False

    @contextmanager
    def backward(self, open: Collection[str]) -> Iterator[None]:
        """Let the gates of `open` pass in a backward pass; a checkpoint that recomputes meets gates again."""
        outer, self._open = self._open, open if open is EVERY_BLOCK else frozenset(open)
        try:
            with gated(self):
                yield
        finally:
            self._open = outer

    def needs_rerun(self, open: Collection[str]) -> bool:
        """Say whether only another forward pass can tell the gradient for these open blocks."""
        alone = self.inner if self.records else self.inner | self.regions
        return bool(self.pierced or alone & set(open))

    def passes(self, name: str) -> bool:
        """Say whether the gate passes now, and note a derivative that was taken inside of the forward pass."""
        if self._in_forward:
            self.inner.add(name)
        return name in self._open

    def tensor(self, input: Tensor, name: str, site: Site) -> Tensor | None:
        """Put a gate behind `input`; None: it is to be stopped."""
        carries = carries_gradient(input)
        # Functions and hooks may meet blocks in the backward pass; only what carries a gradient there is a block of it.
        if self._in_forward or (carries and not self.puts_gates):
            meeting = self.meetings.setdefault(name, Meeting(site))
            meeting.calls += 1
            meeting.carried += carries
        # Where nothing is recorded, an open block is the tensor itself.
        if carries and not (torch.is_grad_enabled() and all(region.end is not None for region in self._regions)):
            self.inner.add(name)
        if not carries or not self.puts_gates or not torch.is_grad_enabled():
            return None
        if torch._C._are_functorch_transforms_active():
            self.linear = False  # its nodes belong to graphs of their own
            return _Gate.apply(input, self, name)  # type: ignore[no-untyped-call, no-any-return]
        if self._in_forward:
            self._aliases.append((name, input.detach(), input._version))
        # What `Function.apply` ends in, without the ten times longer way there.
        return super(torch.autograd.Function, _Gate).apply(input, self, name)  # type: ignore[no-any-return, no-untyped-call]

    def region(self, name: str, site: Site, *, both_modes: bool) -> AbstractContextManager[None] | None:
        """Record a region, and which numbers autograd gives to its nodes; None: nothing is to be recorded in it."""
        if not self._in_forward:  # a checkpoint computes it again, for its values
            return nullcontext() if self.records else None
        meeting = self.meetings.setdefault(name, Meeting(site))
        meeting.calls += 1
        self.regions.add(name)
        if forward_ad._current_level >= 0:  # tangents have no nodes to be decided about later
            meeting.carried += 1
            self.inner.add(name)
        return self._recorded(name, both_modes=both_modes) if self.records else None

    def stops(self, name: str, site: Site) -> bool:
        """Say to code that asks whether the block itself is in place; a board that only notes has seen it then."""
        if not self.puts_gates and self._in_forward:
            self.meetings.setdefault(name, Meeting(site))
        return not self.puts_gates

    @contextmanager
    def _recorded(self, name: str, *, both_modes: bool) -> Iterator[None]:
        region = _Region(name, next_number())
        self._regions.append(region)
        try:
            with without_tangents() if both_modes else nullcontext():
                yield
        finally:
            self._end(region)

    def _end(self, region: _Region) -> None:
        if region.end is None:
            region.end = next_number()
            self.meetings[region.name].carried += region.end - region.start

    def is_linear(self, root: Any) -> bool:
        """Say whether a backward pass from `root` is linear in the cotangent as far as anybody can see.

        No hooks, no functions of the user's own, and nothing that was there before the forward pass.
        """
        return self.linear and all(map(self._is_plain, reachable_nodes(root, EVERY_BLOCK)))

    def _is_plain(self, node: Any) -> bool:
        if gate_of(node):
            return True
        if (leaf := getattr(node, "variable", None)) is not None:
            return not leaf._backward_hooks
        return not is_foreign(node) and node._sequence_nr() >= self.start

    def pierce(self) -> None:
        """Note that the program switches the recording on, which regions that are entered would have switched off."""
        self.pierced.update(region.name for region in self._regions if region.end is None)

    def note_elsewhere(self, name: str) -> None:
        """Note a block that another thread met."""
        self.elsewhere.add(name)

    def close_regions(self, *roots: Tensor) -> None:
        """Make gates of the nodes behind `roots` that were made in a region."""
        if not self._regions:
            return
        for root in roots:
            if root.grad_fn is None:
                continue
            for node in reachable_nodes(root.grad_fn, EVERY_BLOCK):
                names = self._regions_of(node)
                if names and _REGIONS not in node.metadata:
                    node.metadata[_REGIONS] = names
                    node.register_hook(functools.partial(self._cross, names))

    def _regions_of(self, node: Any) -> frozenset[str]:
        number = node._sequence_nr()
        return frozenset(region.name for region in self._regions if region.holds(number))

    def _cross(self, names: frozenset[str], results: tuple[Tensor | None, ...], _: Any) -> tuple[None, ...] | None:
        """Drop what a node of these regions found, unless they pass or the derivative is taken inside of them."""
        entered = {region.name for region in self._regions if region.end is None}
        passing = [self.passes(name) for name in names - entered]
        return None if all(passing) else (None,) * len(results)


@dataclass
class _Region:
    """The numbers that autograd gave to the nodes made in one passage through a region: ``start <= number < end``."""

    name: str
    start: int
    end: int | None = None

    def holds(self, number: int) -> bool:
        """Say whether a node of this number was made inside; autograd counts from 0 in each thread."""
        return self.start <= number and (self.end is None or number < self.end)


def reachable_nodes(root: Any, open: Collection[str]) -> Iterator[Any]:
    """Yield the nodes of the autograd graph that a gradient from `root` reaches while only `open` pass."""
    stack, seen = [root], {root}
    while stack:
        node = stack.pop()
        yield node
        if any(name not in open for name in gate_of(node) | regions_of(node)):
            continue
        for successor, _ in node.next_functions:
            if successor is not None and successor not in seen:
                seen.add(successor)
                stack.append(successor)


def gate_of(node: Any) -> frozenset[str]:
    """Return the block that this node is the gate of; most are none's."""
    return frozenset({node.block_name}) if getattr(node, "_forward_cls", None) is _Gate else frozenset()


def is_foreign(node: Any) -> bool:
    """Say whether a node is of a function that a user wrote; what is written in C++ has no class in Python."""
    return (isinstance(node, BackwardCFunction) and not gate_of(node)) or type(node).__name__ == "CppFunction"


def regions_of(node: Any) -> frozenset[str]:
    """Return the blocks in whose regions this node was made, once `GateBoard.close_regions` was there."""
    regions: frozenset[str] = node.metadata.get(_REGIONS, frozenset())
    return regions


class _Everything(frozenset[str]):
    def __contains__(self, item: object) -> bool:
        return True


EVERY_BLOCK: Collection[str] = _Everything()
"""For `reachable_nodes`: as if every block were open."""


class _Gate(torch.autograd.Function):
    """An identity whose derivative is 1 while its block is open, and no derivative at all while it is not.

    No derivative, rather than 0 times the cotangent: zero times infinity is NaN.
    """

    board: GateBoard
    block_name: str

    @staticmethod
    def forward(input: Tensor, board: GateBoard, name: str) -> Tensor:
        return input.detach()  # and not a view, which an operation in place would be refused

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, GateBoard, str], output: Tensor) -> None:
        _, ctx.board, ctx.block_name = inputs
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor | None) -> tuple[Tensor | None, None, None]:
        if ctx.board.arrivals is not None and cotangent is not None:
            ctx.board.arrivals.append((ctx.block_name, GradientEdge(*ctx.next_functions[0]), cotangent))
        return (cotangent if ctx.board.passes(ctx.block_name) else None), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> Tensor:
        return alias(tangent) if ctx.board.passes(ctx.block_name) else torch.zeros_like(tangent)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], input: Tensor, board: GateBoard, name: str
    ) -> tuple[Tensor, int | None]:
        return _Gate.apply(input, board, name), in_dims[0]  # type: ignore[no-untyped-call]


_REGIONS = "toolkit.gradients.regions"
next_number: Callable[[], int] = torch._C._autograd._get_sequence_nr


class _Watch(TorchFunctionMode):
    """Sees every call of a forward pass: derivatives before they are taken, `enable_grad`, and hooks."""

    _derivatives = frozenset({torch.autograd.grad, torch.autograd.backward, Tensor.backward})
    # A node that the program holds may get hooks that nobody sees.
    _hooks = frozenset({Tensor.register_hook, torch._C.TensorBase.__dict__["grad_fn"].__get__})

    def __init__(self, board: GateBoard) -> None:
        super().__init__()
        self._board = board

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in self._derivatives:
            self._board.close_regions(*(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)))
        elif func is torch._C._set_grad_enabled and args == (True,):
            self._board.pierce()
        elif func in self._hooks:
            self._board.linear = False
        return func(*args, **kwargs)
