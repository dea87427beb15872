"""Nodes of autograd graphs: those of gates and cuts, and questions about any node."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_leaves

from toolkit.blocks import alias

__all__ = [
    "EVERY_BLOCK",
    "REGIONS",
    "Cut",
    "Gate",
    "forget_source",
    "gate_of",
    "is_cut",
    "is_foreign",
    "is_freed",
    "leaves_in",
    "made_leaf",
    "reachable_nodes",
    "regions_of",
    "roots_in",
    "source_of",
    "successors",
]

REGIONS = "toolkit.gradients.regions"
_SOURCE = "toolkit.gradients.source"


class _Everything(frozenset[str]):
    def __contains__(self, item: object) -> bool:
        return True


EVERY_BLOCK: Collection[str] = _Everything()
"""For `reachable_nodes`: every block counts as open."""


class _Board(Protocol):
    """Decides which gates pass, and keeps the cotangents that arrive at gates on request."""

    arrivals: list[tuple[str, GradientEdge, Tensor]] | None

    def passes(self, name: str) -> bool: ...


class Gate(torch.autograd.Function):
    """An identity whose derivative is 1 while its block is open, and no derivative at all while it is not.

    No derivative, rather than 0 times the cotangent: zero times infinity is NaN.
    """

    board: _Board
    block_name: str

    @staticmethod
    def forward(input: Tensor, board: _Board, name: str) -> Tensor:
        """Return the same memory."""
        return input.detach()  # and not a view, for which autograd rejects in-place operations

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, _Board, str], output: Tensor) -> None:
        """Keep the board, which decides at backward time."""
        _, ctx.board, ctx.block_name = inputs
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor | None) -> tuple[Tensor | None, None, None]:
        """Pass the cotangent if the block is open."""
        if ctx.board.arrivals is not None and cotangent is not None:
            ctx.board.arrivals.append((ctx.block_name, GradientEdge(*ctx.next_functions[0]), cotangent))
        return (cotangent if ctx.board.passes(ctx.block_name) else None), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> Tensor:
        """Pass the tangent if the block is open."""
        return alias(tangent) if ctx.board.passes(ctx.block_name) else torch.zeros_like(tangent)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], input: Tensor, board: _Board, name: str
    ) -> tuple[Tensor, int | None]:
        """Pass the batch through one gate."""
        return Gate.apply(input, board, name), in_dims[0]  # type: ignore[no-untyped-call]


class Cut(torch.autograd.Function):
    """An identity at which the graph ends. It keeps the edge behind it, so that a derivative can go on from there.

    Its result has to require a gradient, so it depends on an anchor: a leaf that is used for nothing else. Behind a
    constant there is no edge.
    """

    block_name: str
    source: GradientEdge | None
    input: Tensor
    version: int

    @staticmethod
    def forward(anchor: Tensor, held: tuple[Tensor], name: str) -> Tensor:
        """Return the memory of the tensor that is held."""
        return held[0].detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, tuple[Tensor], str], output: Tensor) -> None:
        """Keep the edge behind the cut."""
        _, (input,), ctx.block_name = inputs
        ctx.source = get_gradient_edge(input) if input.requires_grad else None
        ctx.input, ctx.version = input.detach(), input._version
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor | None) -> tuple[None, None, None]:
        """End here."""
        return None, None, None


# The classes of the nodes of gates and cuts. Nodes written in C++ are slow to ask for an attribute that they lack.
_CUT = Cut._backward_cls
_NODES = frozenset({Gate._backward_cls, _CUT})


def reachable_nodes(root: Any, open: Collection[str]) -> Iterator[Any]:
    """Yield the nodes of the autograd graph that a gradient from `root` reaches while only `open` pass."""
    stack, seen, is_open = [root], {root}, open is EVERY_BLOCK
    while stack:
        node = stack.pop()
        yield node
        if not is_open and any(name not in open for name in gate_of(node) | regions_of(node)):
            continue
        for successor in successors(node):
            if successor not in seen:
                seen.add(successor)
                stack.append(successor)


def roots_in(arguments: Any) -> list[Any]:
    """Return the nodes of the tensors and gradient edges among the arguments of a derivative."""
    leaves = tree_leaves(arguments, is_leaf=lambda found: isinstance(found, GradientEdge))
    nodes = [leaf.node if isinstance(leaf, GradientEdge) else getattr(leaf, "grad_fn", None) for leaf in leaves]
    return [node for node in nodes if node is not None]


def successors(node: Any) -> list[Any]:
    """Return the nodes behind a node; behind a cut or a made leaf, the node whose gradient ends there."""
    found = [successor for successor, _ in node.next_functions if successor is not None]
    if found and type(node) is not _CUT:
        return found
    source = source_of(node)
    return [] if source is None else [source.node]


def leaves_in(nodes: Iterable[Any]) -> list[Tensor]:
    """Return the leaves whose gradients these nodes accumulate."""
    return [node.variable for node in nodes if hasattr(node, "variable")]


def source_of(node: Any) -> GradientEdge | None:
    """Return the edge whose gradient ends at a cut, or at a leaf that was made of a constant; None for other nodes."""
    if is_cut(node):
        source: GradientEdge = node.source
        return source
    return node.metadata.get(_SOURCE) if hasattr(node, "variable") else None


def made_leaf(tensor: Tensor, source: GradientEdge) -> Any:
    """Return the node of a leaf whose gradient goes on to `source` in a derivative of stops that are open."""
    node: Any = get_gradient_edge(tensor).node
    node.metadata[_SOURCE] = source
    return node


def forget_source(node: Any) -> None:
    """Make an ordinary leaf of a made one."""
    node.metadata.pop(_SOURCE, None)


def gate_of(node: Any) -> frozenset[str]:
    """Return the block whose gate or cut this node is; nothing for most nodes."""
    return frozenset({node.block_name}) if type(node) in _NODES else frozenset()


def is_cut(node: Any) -> bool:
    """Return whether a node is a cut."""
    return type(node) is _CUT


def is_freed(node: Any) -> bool:
    """Return whether a backward pass has freed the tensors that a node needs.

    All are freed at once, so one is read, which may cost a checkpoint a run.
    """
    try:
        saved = (getattr(node, name) for name in dir(node) if name.startswith("_saved_"))
        next((value for value in saved if isinstance(value, Tensor)), None)
    except RuntimeError as error:
        return "second time" in str(error)
    return False


def is_foreign(node: Any) -> bool:
    """Return whether a node is of a user's custom function; nodes written in C++ have no class in Python."""
    return (isinstance(node, BackwardCFunction) and not gate_of(node)) or type(node).__name__ == "CppFunction"


def regions_of(node: Any) -> frozenset[str]:
    """Return the blocks in whose regions this node was made; call `GateBoard.close_regions` first."""
    regions: frozenset[str] = node.metadata.get(REGIONS, frozenset())
    return regions
