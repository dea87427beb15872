"""The autograd graph with its cut edges, as a picture.

While the program runs, every block is a gate, so autograd keeps the graph behind it. This graph shows, without a
backward pass, which parameters a gradient reaches with a block and without it.
"""

from __future__ import annotations

import bisect
import re
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from toolkit._checks import index
from toolkit.blocks import Block, declared_blocks, opened
from toolkit.gradients import _drawing
from toolkit.gradients._drawing import Arrow, Box
from toolkit.gradients._folding import Call, Node, folded, innermost_common
from toolkit.gradients._gates import GateBoard
from toolkit.gradients._nodes import gate_of, leaves_in, regions_of, roots_in, successors
from toolkit.gradients._parts import Parts, find_parts
from toolkit.gradients._passages import next_number
from toolkit.gradients._program import Parameters, Program, named_parameters, reached

__all__ = ["Graph", "graph", "graph_of", "graph_of_recorded"]

Fold = int | None | Literal["auto"]

_MOST_BOXES = 60


@dataclass(frozen=True, repr=False, eq=False)
class Graph:
    """The autograd graph of a loss, as names and edges, without tensors. Made by `graph`; a notebook displays it.

    Attributes:
        blocks: The blocks that the program reached, in program order.
        parameters: The parameters of `reachable`, in the order of the program's backward pass.
    """

    blocks: tuple[str, ...]
    parameters: tuple[str, ...]
    _nodes: Sequence[Node]
    _edges: Sequence[tuple[int, int]]
    _calls: Sequence[Call]
    _remarks: Sequence[str] = ()
    _run_again: Callable[[frozenset[str]], frozenset[str] | None] | None = None

    def reachable(self, without_blocks: Collection[Block | str] | Block | Literal["all"] = ()) -> frozenset[str]:
        """Return the parameters that a gradient can reach, without a backward pass.

        If a derivative inside of the program reached a block, the block changed the graph itself; the program then runs
        again to open this block.

        Args:
            without_blocks: The blocks to open. All others are in place.

        Raises:
            ValueError: If the program did not reach a block.

        Example:
            >>> net = torch.nn.ModuleDict({"encoder": torch.nn.Linear(3, 2), "head": torch.nn.Linear(2, 1)})
            >>> found = graph(
            ...     lambda: net["head"](stop_gradient(net["encoder"](torch.ones(3)), "doc.features")), net
            ... )
            >>> sorted(found.reachable()), sorted(found.reachable("all") - found.reachable())
            (['head.bias', 'head.weight'], ['encoder.bias', 'encoder.weight'])
        """
        open = self._selected(without_blocks)
        found = None if self._run_again is None else self._run_again(open)
        if found is None:
            found = frozenset(name for node in self._reached(open) for name in self._nodes[node].parameters)
        return found

    def to_dot(self, *, fold: Fold = "auto") -> str:
        """Return the picture as text for Graphviz.

        Args:
            fold: As in `svg`.

        Raises:
            ValueError: If `fold` is invalid.
        """
        return _drawing.dot(*self._drawn(fold), self._title)

    def svg(self, *, fold: Fold = "auto") -> str:
        """Return the picture as SVG; Graphviz is not needed.

        The loss is at the top, and arrows point along its gradient. At a block they are dashed; nodes that a gradient
        reaches only through a block are grey.

        Args:
            fold: Depth to which calls of modules are expanded: with 1 each module called by the loss function is one
                box, with 2 each module called by these, and so on. A module that contains a block is always expanded.
                None draws every node; ``"auto"`` takes the largest depth with at most 60 boxes.

        Raises:
            ValueError: If `fold` is invalid.
        """
        return _drawing.svg(*self._drawn(fold), self._title, self._caption)

    def _repr_svg_(self) -> str:
        return self.svg()

    def _repr_html_(self) -> str:
        return f'<div style="overflow: auto; max-height: 50em">{self.svg()}</div>'

    def __repr__(self) -> str:
        return f"Graph({len(self._nodes)} nodes, {len(self.parameters)} parameters, blocks: {list(self.blocks)})"

    @property
    def _title(self) -> str:
        cutting = [block for block in self.blocks if any(block in node.blocks for node in self._nodes)]
        cut = f", cut by {', '.join(cutting)}" if cutting else ""
        return f"The way of a gradient from the loss to {len(self.parameters)} parameters{cut}"

    @property
    def _caption(self) -> list[str]:
        is_cut = any(node.kind == "block" for node in self._nodes)
        legend = "Arrows: the way of the gradient. Dashed: cut by a block. Grey: reached only through a cut."
        return [*([legend] if is_cut else []), *self._remarks]

    def _selected(self, blocks: Collection[Block | str] | Block | str) -> frozenset[str]:
        if blocks == "all":
            return frozenset(self.blocks)
        given = [blocks] if isinstance(blocks, (str, Block)) else blocks
        names = frozenset(block.name if isinstance(block, Block) else block for block in given)
        for name in sorted(names - set(self.blocks)):
            raise ValueError(
                f"`without_blocks` should be 'all' or among those that the program meets: {sorted(self.blocks)}. "
                f"Found {name!r}."
            )
        return names

    @cached_property
    def _producers(self) -> list[list[int]]:
        producers: list[list[int]] = [[] for _ in self._nodes]
        for start, end in self._edges:
            producers[start].append(end)
        return producers

    def _reached(self, open: Collection[str]) -> set[int]:
        """Return the nodes that a gradient reaches."""
        stack, seen = [0], {0}
        while stack:
            node = stack.pop()
            if self._nodes[node].blocks.issubset(open):
                new = [producer for producer in self._producers[node] if producer not in seen]
                seen.update(new)
                stack.extend(new)
        return seen

    def _drawn(self, fold: Fold) -> tuple[list[Box], list[Arrow]]:
        level = index(fold)
        if fold != "auto" and fold is not None and (level is None or level < 1):
            raise ValueError(f"`fold` should be 'auto', None or a positive integer. Found {fold!r}.")
        deepest = max((call.level for call in self._calls), default=1)
        levels = range(deepest, 0, -1) if fold == "auto" else [level]
        reached, drawn = self._reached(()), (list[Box](), list[Arrow]())
        for level in levels:
            drawn = folded(self._nodes, self._edges, self._calls, reached, level)
            if len(drawn[0]) <= _MOST_BOXES:
                break
        return drawn


def graph(loss: Callable[[], Tensor] | Tensor, params: Parameters = None) -> Graph:
    """Return the autograd graph of `loss` with all blocks that it reaches, and the graph behind each block.

    The program runs once, without a backward pass. Random state, ``.grad``, training modes and buffers are restored,
    also if `loss` raises an error. Compiled functions run in eager mode.

    Args:
        loss: Runs the program and returns a tensor of any shape. Or a tensor: its graph has no blocks, unless a
            comparison made it, because autograd records no graph behind a block.
        params: The parameters of `reachable`, as in `compare`; None for every leaf that the loss depends on.

    Raises:
        TypeError: If `loss` is neither a function nor a tensor, or does not return a tensor, or `params` holds other
            objects.
        ValueError: If the loss does not depend on a tensor that requires a gradient, or `params` holds none.

    Example:
        >>> x = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> found = graph(lambda: (x * stop_gradient(x.exp(), "doc.scale")).sum())
        >>> found
        Graph(6 nodes, 1 parameters, blocks: ['doc.scale'])
        >>> print(found.to_dot().splitlines()[5])
          n1 [label="sum", tooltip="SumBackward0 (scalar)", style="filled", fillcolor="#ffffff", ...
    """
    if not isinstance(loss, Tensor) and not callable(loss):
        raise TypeError(f"`loss` should be a function or a tensor. Found {type(loss).__name__}.")
    if not isinstance(loss, Tensor):
        return graph_of(Program(loss, params))
    parts = find_parts(params) if isinstance(params, nn.Module) else Parts()
    given = None if params is None else named_parameters(params, parts)
    return _recorded(_checked(loss), given, parts, GateBoard(), _ModuleCalls(parts))[0]


def graph_of(program: Program, params: Mapping[str, Tensor] | None = None) -> Graph:
    """Return the graph of a program; see `graph`."""
    given = program.given if params is None else params
    board = GateBoard(records=True)
    try:
        found, tensors = _run(program, given, board)
    except Exception:  # not every program runs with gates; otherwise the graph behind blocks is not drawn
        board = GateBoard(puts_gates=False)
        found, tensors = _run(program, given, board)
    with program.aside(around=False):
        differs = reached(program.run(), tensors) != found.reachable()
    if not (differs or board.inner or board.pierced):
        return found

    def run_again(open: frozenset[str]) -> frozenset[str] | None:
        if not (differs or board.needs_rerun(open)):
            return None
        with program.aside(), opened(*open, leaves_out=True):
            return reached(program.run(), tensors)

    return replace(found, _run_again=run_again)


def graph_of_recorded(value: Tensor, params: Mapping[str, Tensor], parts: Parts, board: GateBoard) -> Graph:
    """Return the graph of a loss that was computed while `board` recorded; its regions are closed."""
    return _recorded(value, params, parts, board, _ModuleCalls(Parts()))[0]


def _run(program: Program, given: Mapping[str, Tensor] | None, board: GateBoard) -> tuple[Graph, Mapping[str, Tensor]]:
    calls = _ModuleCalls(program.parts)
    with program.aside():
        with board.forward(), calls.watched():
            value = _checked(program.run())
        board.close_regions(roots_in(value))
        return _recorded(value, given, program.parts, board, calls)


class _ModuleCalls:
    """The module call that made each node: autograd numbers its nodes, and a call has the numbers of its time.

    Attributes:
        calls: The calls, in the order of their start.
    """

    def __init__(self, parts: Parts) -> None:
        self.calls: list[Call] = []
        self._names: dict[int, str] = {}
        for prefix, root in parts.modules.items():
            for name, module in root.named_modules(prefix=prefix):
                self._names.setdefault(id(module), name)
        self._entered: list[tuple[nn.Module, int]] = []
        self._thread = threading.get_ident()
        self._numbers: list[int] = []
        self._innermost: list[int | None] = []

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Note the calls of every module, also of modules that only the program knows."""
        before = register_module_forward_pre_hook(self._enter)
        after = register_module_forward_hook(self._leave, always_call=True)
        try:
            yield
        finally:
            before.remove()
            after.remove()

    def of(self, node: Any) -> int | None:
        """Return the innermost call that made a node, by index."""
        position = bisect.bisect_right(self._numbers, node._sequence_nr())
        return self._innermost[position - 1] if position else None

    def _enter(self, module: nn.Module, *_: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        parent = self._entered[-1][1] if self._entered else None
        if parent is not None:
            self.calls[parent] = replace(self.calls[parent], is_leaf=False)
        kind = type(module).__name__
        self._entered.append((module, len(self.calls)))
        self.calls.append(Call(self._names.get(id(module)) or kind, kind, parent, len(self._entered), is_leaf=True))
        self._note()

    def _leave(self, module: nn.Module, *_: Any) -> None:
        if threading.get_ident() == self._thread and self._entered and self._entered[-1][0] is module:
            self._entered.pop()
            self._note()

    def _note(self) -> None:
        self._numbers.append(next_number())
        self._innermost.append(self._entered[-1][1] if self._entered else None)


def _recorded(
    value: Tensor, given: Mapping[str, Tensor] | None, parts: Parts, board: GateBoard, calls: _ModuleCalls
) -> tuple[Graph, Mapping[str, Tensor]]:
    """Return the graph of `value`, and the parameters by name."""
    found = list(_nodes_behind(value))
    names = parts.names_of_leaves()
    if given is not None:
        names |= {id(tensor): name for name, tensor in given.items()}
    leaves = leaves_in(found)
    labels = {id(leaf): names.get(id(leaf), f"leaf {tuple(leaf.shape)} #{i}") for i, leaf in enumerate(leaves)}
    parameters = {labels[id(leaf)]: leaf for leaf in leaves} if given is None else given
    index = {node: i for i, node in enumerate(found, start=1)}
    nodes = [Node("loss", "loss", f"the loss {_shape(found[0])}")]
    for node, arriving in zip(found, _arrivals(found, parameters), strict=True):
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            label = labels[id(leaf)]
            nodes.append(Node("parameter", label, f"{label} {_shape(node)}", parameters=arriving))
        elif gate := gate_of(node):
            nodes.append(_cut(gate, board, calls.of(node)))
        else:
            tip = f"{node.name()} {_shape(node)}{''.join(f', {name}' for name in arriving)}"
            nodes.append(Node("operation", _operation(node), tip, calls.of(node), parameters=arriving))
    edges: dict[tuple[int, int], None] = {}
    entries: dict[tuple[int, frozenset[str]], int] = {}
    ways = [(0, found[0], frozenset[str]())]
    ways += [(index[node], next, regions_of(node)) for node in found for next in successors(node)]
    for start, node, left in ways:
        end = index[node]
        # A region is cut where the gradient would enter; its inside is not visible.
        if entered := regions_of(node) - left:
            if (end, entered) not in entries:
                entries[end, entered] = len(nodes)
                nodes.append(_cut(entered, board, nodes[end].call))
            cut = entries[end, entered]
            nodes[cut] = replace(nodes[cut], call=innermost_common(nodes[cut].call, nodes[start].call, calls.calls))
            edges[start, cut] = None
            start = cut
        edges[start, end] = None
    blocks = dict.fromkeys([*board.meetings, *sorted(name for node in nodes for name in node.blocks)])
    return Graph(tuple(blocks), tuple(parameters), nodes, list(edges), calls.calls, _remarks(board)), parameters


def _nodes_behind(value: Tensor) -> Iterator[Any]:
    """Yield the nodes of the graph of `value`, each before the nodes behind it, in the order of their arguments."""
    stack, seen = [get_gradient_edge(value).node], set()
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            yield node
            stack.extend(reversed(successors(node)))


def _arrivals(nodes: Sequence[Any], parameters: Mapping[str, Tensor]) -> list[tuple[str, ...]]:
    """Return for each node the names of the parameters whose gradient it receives."""
    names: dict[int, list[str]] = {}
    for name, parameter in parameters.items():
        names.setdefault(id(parameter if parameter.grad_fn is None else parameter.grad_fn), []).append(name)
    return [tuple(names.get(id(getattr(node, "variable", node)), ())) for node in nodes]


def _cut(blocks: frozenset[str], board: GateBoard, call: int | None) -> Node:
    declared = declared_blocks()
    tips = []
    for name in sorted(blocks):
        why = f": {declared[name].why}" if name in declared and declared[name].why else ""
        site = f"\n{board.meetings[name].site}" if name in board.meetings else ""
        tips.append(f"{name}{why}{site}")
    return Node("block", " + ".join(sorted(blocks)), "\n".join(tips), call, blocks)


def _remarks(board: GateBoard) -> list[str]:
    return [
        *(
            f"{name}: met by a derivative inside of the program, so not all of it is here."
            for name in sorted(board.inner)
        ),
        *(f"{name}: in part recorded also while it is in place, which is not shown." for name in sorted(board.pierced)),
    ]


def _operation(node: Any) -> str:
    """Return the name of an operation as a PyTorch function: ``log_softmax`` for ``LogSoftmaxBackward0``."""
    if hasattr(node, "_forward_cls"):
        return str(node._forward_cls.__name__)
    name = re.sub(r"Backward\d*$", "", node.name().rpartition("::")[2])
    return re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[0-9])(?=[A-Z][a-z])", "_", name).lower()


def _shape(node: Any) -> str:
    """Return the shape of the first result of an operation."""
    if not node._input_metadata or node._input_metadata[0].is_nested_tensor:
        return ""
    shape = tuple(node._input_metadata[0].shape)
    return str(shape) if shape else "(scalar)"


def _checked(value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        raise TypeError(f"`loss` should return a tensor. Found {type(value).__name__}.")
    if not value.requires_grad:
        raise ValueError("`loss` should depend on a tensor that requires a gradient. Found a constant.")
    return value
