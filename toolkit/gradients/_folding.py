"""Folds the nodes of one call of a module into one box, without hiding a cut."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter

from toolkit.gradients._drawing import Arrow, Box

__all__ = ["Call", "Node", "folded", "innermost_common"]

# Names of parameters in the second line of a box; its tooltip has them all.
_MOST_NAMES = 3


@dataclass(frozen=True)
class Call:
    """One call of a module.

    Attributes:
        name: The module's path.
        type: The module's class.
        parent: The enclosing call, by index.
        level: The depth of the call: 1 for calls of the loss function itself.
        is_leaf: Whether no other module was called inside.
    """

    name: str
    type: str
    parent: int | None
    level: int
    is_leaf: bool


@dataclass(frozen=True)
class Node:
    """The loss, a node of autograd's, or a cut.

    Attributes:
        kind: As in `Box`; a node is no module.
        label: Its name.
        tip: Its tooltip.
        call: The innermost call of a module that made it, by index.
        blocks: The blocks that must be open for a gradient to pass.
        parameters: The parameters whose gradient arrives here.
    """

    kind: str
    label: str
    tip: str
    call: int | None = None
    blocks: frozenset[str] = frozenset()
    parameters: tuple[str, ...] = ()


def folded(
    nodes: Sequence[Node],
    edges: Collection[tuple[int, int]],
    calls: Sequence[Call],
    reached: set[int],
    level: int | None,
) -> tuple[list[Box], list[Arrow]]:
    """Return the boxes and arrows if calls at depth `level`, or without inner calls, are one box each.

    A call is expanded if it contains a block, or if a gradient reaches only some of its nodes: a fold hides no cut.
    None: no folding.
    """
    chains = [list(_outwards(node.call, calls)) for node in nodes]
    unfolded = _not_uniform(nodes, chains, reached)
    while True:
        homes = [
            next((c for c in reversed(chain) if c not in unfolded and _is_deep(calls[c], level)), None)
            for chain in chains
        ]
        members: dict[Hashable, list[int]] = {}
        shared = _parameters_by_users(homes, nodes, edges)
        for index, home in enumerate(homes):
            members.setdefault(shared.get(index, ("node", index) if home is None else home), []).append(index)
        place = {index: box for box, indices in enumerate(members.values()) for index in indices}
        arrows: dict[Arrow, None] = {}
        for start, end in edges:
            if place[start] != place[end]:
                cut = "block" in (nodes[start].kind, nodes[end].kind)
                arrows[Arrow(place[start], place[end], cut, start in reached)] = None
        try:
            _check_acyclic(arrows)
        except CycleError as error:
            # Nodes of another thread have their own numbers, without relation to the modules of this thread.
            homes_of_boxes = list(members)
            unfolded |= {home for box in error.args[1] if isinstance(home := homes_of_boxes[box], int)}
        else:
            several = {name for name, count in Counter(call.name for call in calls).items() if count > 1}
            boxes = []
            for key, indices in members.items():
                inside, is_reached = [nodes[index] for index in indices], indices[0] in reached
                if isinstance(key, int):
                    boxes.append(_module_box(key, calls, inside, several, is_reached))
                elif len(inside) > 1:
                    boxes.append(_parameters_box(inside, is_reached))
                else:
                    boxes.append(_node_box(inside[0], calls, is_reached))
            return boxes, list(arrows)


def innermost_common(first: int | None, second: int | None, calls: Sequence[Call]) -> int | None:
    """Return the innermost call that contains both calls, or None."""
    around = set(_outwards(first, calls))
    return next((call for call in _outwards(second, calls) if call in around), None)


def _outwards(call: int | None, calls: Sequence[Call]) -> Iterator[int]:
    while call is not None:
        yield call
        call = calls[call].parent


def _is_deep(call: Call, level: int | None) -> bool:
    return level is not None and (call.level >= level or call.is_leaf)


def _not_uniform(nodes: Sequence[Node], chains: Sequence[Sequence[int]], reached: set[int]) -> set[int]:
    found, states = set[int](), set[tuple[int, bool]]()
    for index, (node, chain) in enumerate(zip(nodes, chains, strict=True)):
        states.update((call, index in reached) for call in chain)
        if node.kind == "block":
            found.update(chain)
    return found | {call for call, is_reached in states if is_reached and (call, False) in states}


def _parameters_by_users(
    homes: Sequence[int | None], nodes: Sequence[Node], edges: Collection[tuple[int, int]]
) -> dict[int, Hashable]:
    """Return parameter -> its box: that of the call that uses it, or one shared by parameters of the same few calls."""
    users: dict[int, set[int | None]] = {}
    for start, end in edges:
        if nodes[end].kind == "parameter" and nodes[end].call is None:
            users.setdefault(end, set()).add(homes[start])
    return {
        leaf: next(iter(calls)) if len(calls) == 1 else ("parameters", frozenset(calls))
        for leaf, calls in users.items()
        if None not in calls
    }


def _check_acyclic(arrows: Collection[Arrow]) -> None:
    above: dict[int, set[int]] = {}
    for arrow in arrows:
        above.setdefault(arrow.end, set()).add(arrow.start)
    TopologicalSorter(above).prepare()


def _node_box(node: Node, calls: Sequence[Call], reached: bool) -> Box:
    inside = "" if node.call is None or not calls[node.call].name else f"\nin {calls[node.call].name}"
    return Box(node.kind, node.label, "", f"{node.tip}{inside}{_fate(reached)}", reached)


def _module_box(
    home: int, calls: Sequence[Call], nodes: Sequence[Node], several: Collection[str], reached: bool
) -> Box:
    call = calls[home]
    names = [name.removeprefix(f"{call.name}.") for node in nodes for name in node.parameters]
    about = [call.type] if call.name != call.type else []
    if call.name in several:
        about.append(f"call {sum(other.name == call.name for other in calls[: home + 1])}")
    if names:
        about.append(_listed(names))
    operations = [node.label for node in nodes if node.kind == "operation"]
    lines = [
        f"{call.name}: {call.type}",
        f"{len(operations)} operations: {', '.join(dict.fromkeys(reversed(operations)))}",
        *([f"parameters: {', '.join(names)}"] if names else []),
    ]
    return Box("module", call.name, " · ".join(about), "\n".join(lines) + _fate(reached), reached)


def _parameters_box(nodes: Sequence[Node], reached: bool) -> Box:
    names = [node.label for node in nodes]
    paths = zip(*(name.split(".")[:-1] for name in names), strict=False)
    common = ".".join(part for part, *_ in itertools.takewhile(lambda parts: len(set(parts)) == 1, paths))
    label, note = common or _listed(names), _listed([name.removeprefix(f"{common}.") for name in names])
    return Box(
        "parameter", label, note if common else "", "\n".join(node.tip for node in nodes) + _fate(reached), reached
    )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= _MOST_NAMES else f"{len(names)} parameters"


def _fate(reached: bool) -> str:
    return "" if reached else "\nreached only through a cut"
