"""Gates: identity nodes in the graph that decide at backward time whether a block passes the gradient.

One forward pass with gates gives the gradient for any set of open blocks, on the same random draws.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from toolkit.blocks import Site, alias, carries_gradient, gated

__all__ = ["EVERY_BLOCK", "GateBoard", "Meeting", "reachable_nodes"]


@dataclass
class Meeting:
    """How one block was met during a forward pass.

    Attributes:
        site: Where it was met first.
        calls: How many tensors, or regions, it was applied to.
        carried: How many of these carried a gradient.
    """

    site: Site
    calls: int = 0
    carried: int = 0


@dataclass
class GateBoard:
    """The gates of one forward pass, and which of them pass.

    Attributes:
        meetings: Block -> how it was met, in the order of the program.
        inner: Blocks that a derivative *inside* the forward pass met: their gates have decided already, and cannot be
            opened after the fact.
    """

    meetings: dict[str, Meeting] = field(default_factory=dict)
    inner: set[str] = field(default_factory=set)
    _open: frozenset[str] = frozenset()
    _in_forward: bool = False
    _regions: list[str] = field(default_factory=list)
    _products: _Products = field(default_factory=lambda: _Products())

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Record a forward pass: every block it meets becomes a gate, closed for derivatives inside of the pass."""
        self._in_forward = True
        try:
            with gated(self), _RegionExits(self):
                yield
        finally:
            self._in_forward = False

    @contextmanager
    def backward(self, open: Collection[str]) -> Iterator[None]:
        """Let the gates of `open` pass in a backward pass; a checkpoint that recomputes meets gates again."""
        outer, self._open = self._open, frozenset(open)
        try:
            with gated(self):
                yield
        finally:
            self._open = outer

    def passes(self, name: str) -> bool:
        """Say whether the gate passes now, and note a derivative that was taken inside of the forward pass."""
        if self._in_forward:
            self.inner.add(name)
        return name in self._open

    def tensor(self, input: Tensor, name: str, site: Site) -> Tensor:
        """Put a gate behind `input`."""
        meeting = self.meetings.setdefault(name, Meeting(site))
        meeting.calls += 1
        if not carries_gradient(input):
            return input.detach()
        meeting.carried += 1
        return self._gate(input, name)

    @contextmanager
    def region(self, name: str, site: Site) -> Iterator[None]:
        """Record what a region makes; each of its results gets a gate where it is used outside."""
        self.meetings.setdefault(name, Meeting(site)).calls += 1
        self._regions.append(name)
        try:
            yield
        finally:
            self._regions.pop()

    def leave(self, value: Tensor) -> Tensor:
        """Return `value` behind the gate of the region that made it, if one did that is left by now."""
        name = self._products.region_of(value)
        if name is None or name in self._regions:
            return value
        return self._products.exit(value, lambda: self._gate(value, name))

    def note_products(self, result: Any) -> None:
        """Remember that the innermost region made `result`."""
        if not self._regions:
            return
        name = self._regions[-1]

        def note(tensor: Tensor) -> Tensor:
            if carries_gradient(tensor):
                self.meetings[name].carried += 1
                self._products.add(tensor, name)
            return tensor

        tree_map_only(Tensor, note, result)

    def _gate(self, input: Tensor, name: str) -> Tensor:
        return _Gate.apply(input, self, name)  # type: ignore[no-untyped-call, no-any-return]


def reachable_nodes(root: Any, open: Collection[str]) -> Iterator[Any]:
    """Yield the nodes of the autograd graph that a gradient from `root` reaches while only `open` pass."""
    stack, seen = [root], {root}
    while stack:
        node = stack.pop()
        yield node
        if isinstance(node, _Gate) and node.block_name not in open:
            continue
        for successor, _ in node.next_functions:
            if successor is not None and successor not in seen:
                seen.add(successor)
                stack.append(successor)


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
        return alias(input)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, GateBoard, str], output: Tensor) -> None:
        _, ctx.board, ctx.block_name = inputs
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor | None) -> tuple[Tensor | None, None, None]:
        return (cotangent if ctx.board.passes(ctx.block_name) else None), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> Tensor:
        return alias(tangent) if ctx.board.passes(ctx.block_name) else torch.zeros_like(tangent)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], input: Tensor, board: GateBoard, name: str
    ) -> tuple[Tensor, int | None]:
        return _Gate.apply(input, board, name), in_dims[0]  # type: ignore[no-untyped-call]


class _Products:
    """Which region made which tensor, for tensors that are still alive."""

    def __init__(self) -> None:
        self._regions: Any = WeakIdKeyDictionary()
        self._exits: Any = WeakIdKeyDictionary()

    def __bool__(self) -> bool:
        return bool(self._regions)

    def add(self, tensor: Tensor, region: str) -> None:
        self._regions[tensor] = region

    def region_of(self, tensor: Tensor) -> str | None:
        name: str | None = self._regions.get(tensor)
        return name

    def exit(self, tensor: Tensor, make: Callable[[], Tensor]) -> Tensor:
        if tensor not in self._exits:
            self._exits[tensor] = make()
        gated_exit: Tensor = self._exits[tensor]
        return gated_exit


class _RegionExits(TorchFunctionMode):
    """Sees every operation of a forward pass: notes what regions make, and gates it where it is used outside."""

    def __init__(self, board: GateBoard) -> None:
        super().__init__()
        self._board = board

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        board = self._board
        kwargs = kwargs or {}
        if board._products:
            args, kwargs = tree_map_only(Tensor, board.leave, (args, kwargs))
        result = func(*args, **kwargs)
        if board._regions:
            board.note_products(result)
        return result
