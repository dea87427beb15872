"""Places the boxes of a directed acyclic graph in layers, so that every edge points downwards and few of them cross.

The steps are those of Sugiyama, Tagawa and Toda, "Methods for visual understanding of hierarchical system structures",
1981: longest-path layers, dummy vertices where an edge passes a layer, sweeps of barycentres. Edges of one kind to one
box share their dummy vertices, as wires share a bus. Coordinates are then, layer by layer, the least-squares positions
for the pulls of the neighbours, with order and distances kept.
"""

from __future__ import annotations

import bisect
import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter

__all__ = ["Kind", "Layout", "Route", "layered"]

Point = tuple[float, float]
Kind = tuple[str, ...]
Edge = tuple[int, int, Kind]
Route = tuple[Kind, bool, list[Point]]
Neighbours = Mapping[int, Sequence[int]]

# Pixels. The gap below a layer grows with the horizontal distance of its edges.
_GAP_ACROSS = 20.0
_GAP_DOWN = 26.0
_MOST_EXTRA_DOWN = 44.0

_SWEEPS = 8

# If edges would pass more layers than this in total, the longest are drawn straight.
_MOST_DUMMIES = 20_000


@dataclass(frozen=True)
class Layout:
    """Positions in pixels from the upper left corner.

    Attributes:
        width: Width of the picture.
        height: Height of the picture.
        centres: The centre of each box.
        routes: For each stretch of an edge its kind, whether a box is at its end, and its points from top to bottom; it
            passes each point vertically.
    """

    width: float
    height: float
    centres: list[Point]
    routes: list[Route]


def layered(sizes: Sequence[Point], edges: Iterable[Edge]) -> Layout:
    """Place boxes of these widths and heights; an edge is (upper box, lower box, kind).

    Raises:
        graphlib.CycleError: If the edges have a cycle.
    """
    edges = list(dict.fromkeys(edges))
    n_boxes = len(sizes)
    segments, rank = _with_dummies(edges, _longest_paths(n_boxes, edges))
    above, below = defaultdict[int, list[int]](list), defaultdict[int, list[int]](list)
    for upper, lower, _ in segments:
        below[upper].append(lower)
        above[lower].append(upper)
    layers: list[list[int]] = [[] for _ in range(max(rank, default=-1) + 1)]
    for vertex, layer in enumerate(rank):
        layers[layer].append(vertex)
    layers = _ordered(layers, above, below)
    widths = [*(width for width, _ in sizes), *itertools.repeat(0.0, len(rank) - n_boxes)]
    x = _across(layers, above, below, widths, n_boxes)
    heights = [max((sizes[v][1] for v in layer if v < n_boxes), default=0.0) for layer in layers]
    sideways = [0.0] * len(layers)
    for upper, lower, _ in segments:
        sideways[rank[upper]] = max(sideways[rank[upper]], abs(x[upper] - x[lower]))
    gaps = [_GAP_DOWN + min(_MOST_EXTRA_DOWN, 0.12 * distance) for distance in sideways[:-1]]
    tops = list(itertools.accumulate((h + gap for h, gap in zip(heights, gaps, strict=False)), initial=0.0))

    def extent(vertex: int) -> Point:
        """Return the vertical extent of a vertex; a dummy takes the whole height of its layer."""
        top, height = tops[rank[vertex]], heights[rank[vertex]]
        inset = (height - sizes[vertex][1]) / 2 if vertex < n_boxes else 0.0
        return top + inset, top + height - inset

    routes: list[Route] = []
    for upper, lower, kind in segments:
        ends_here = lower < n_boxes
        points = [(x[upper], extent(upper)[1]), *((x[lower], y) for y in extent(lower)[: 1 if ends_here else 2])]
        routes.append((kind, ends_here, points))
    return Layout(
        width=max((x[v] + widths[v] / 2 for v in range(len(x))), default=0.0),
        height=tops[-1] + heights[-1] if layers else 0.0,
        centres=[(x[box], tops[rank[box]] + heights[rank[box]] / 2) for box in range(n_boxes)],
        routes=routes,
    )


def _longest_paths(n_boxes: int, edges: Iterable[Edge]) -> list[int]:
    """Return the layer of each box: one below the lowest box that points to it."""
    above: dict[int, set[int]] = {box: set() for box in range(n_boxes)}
    for upper, lower, _ in edges:
        above[lower].add(upper)
    rank = [0] * n_boxes
    for box in TopologicalSorter(above).static_order():
        rank[box] = 1 + max((rank[upper] for upper in above[box]), default=-1)
    return rank


def _with_dummies(edges: Sequence[Edge], rank: list[int]) -> tuple[list[Edge], list[int]]:
    """Return the edges cut at a dummy vertex in each layer that they pass, and the layer of every vertex."""
    rank = list(rank)
    highest: dict[tuple[int, Kind], int] = {}
    for upper, lower, kind in edges:
        highest[lower, kind] = min(rank[upper], highest.get((lower, kind), rank[upper]))
    room = _MOST_DUMMIES
    dummies: dict[tuple[int, Kind, int], int] = {}
    segments: dict[Edge, None] = {}
    for (lower, kind), top in sorted(highest.items(), key=lambda item: rank[item[0][0]] - item[1]):
        room -= rank[lower] - top - 1
        if room < 0:
            break
        end = lower
        for layer in range(rank[lower] - 1, top, -1):
            dummies[lower, kind, layer] = len(rank)
            segments[len(rank), end, kind] = None
            end = len(rank)
            rank.append(layer)
    for upper, lower, kind in edges:
        segments[upper, dummies.get((lower, kind, rank[upper] + 1), lower), kind] = None
    return list(segments), rank


def _ordered(layers: list[list[int]], above: Neighbours, below: Neighbours) -> list[list[int]]:
    """Return the layers with each vertex near the mean place of its neighbours: of some sweeps, the least crossed."""
    best, fewest = layers, _crossings(layers, below)
    for sweep in range(_SWEEPS):
        if not fewest:
            break
        layers = [list(layer) for layer in layers]
        place = {vertex: float(i) for layer in layers for i, vertex in enumerate(layer)}
        downwards = sweep % 2 == 0
        for layer in layers if downwards else reversed(layers):
            neighbours = above if downwards else below
            pull = {v: _mean([place[n] for n in neighbours.get(v, ())], place[v]) for v in layer}
            layer.sort(key=pull.__getitem__)
            place.update((vertex, float(i)) for i, vertex in enumerate(layer))
        crossings = _crossings(layers, below)
        if crossings < fewest:
            best, fewest = layers, crossings
    return best


def _crossings(layers: Sequence[Sequence[int]], below: Neighbours) -> int:
    place = {vertex: i for layer in layers for i, vertex in enumerate(layer)}
    total = 0
    for layer in layers:
        ends: list[int] = []
        for vertex in layer:
            for end in sorted(place[lower] for lower in below.get(vertex, ())):
                total += len(ends) - bisect.bisect_right(ends, end)
                bisect.insort(ends, end)
    return total


def _across(
    layers: Sequence[Sequence[int]], above: Neighbours, below: Neighbours, widths: Sequence[float], n_boxes: int
) -> list[float]:
    """Return the horizontal centre of every vertex, from 0 at the left: near its neighbours, in order, not too near."""
    x = [0.0] * len(widths)
    distances = {}
    for index, layer in enumerate(layers):
        distances[index] = [(widths[a] + widths[b]) / 2 + _GAP_ACROSS for a, b in itertools.pairwise(layer)]
        for vertex, place in zip(layer, itertools.accumulate(distances[index], initial=0.0), strict=False):
            x[vertex] = place - sum(distances[index]) / 2
    upwards = [_pulls(vertex, above.get(vertex, ()), n_boxes) for vertex in range(len(x))]
    down = [_pulls(vertex, below.get(vertex, ()), n_boxes) for vertex in range(len(x))]
    both = [[*pulls, *more] for pulls, more in zip(upwards, down, strict=True)]
    for vertex, pulls in enumerate(upwards):
        if len(pulls) == 1 and (len(down[pulls[0][0]]) == 1 or min(vertex, pulls[0][0]) >= n_boxes):
            both[vertex] = [(pulls[0][0], 1000.0)]  # a chain hangs straight from its first box: a crowd gives way
    for pulls_of, downwards in [(upwards, True), (down, False)] * _SWEEPS + [(both, True)] * 2:
        for index in range(len(layers)) if downwards else reversed(range(len(layers))):
            wanted, weights = [], []
            for vertex in layers[index]:
                total = pulled = 0.0
                for other, pull in pulls_of[vertex]:
                    total += pull
                    pulled += pull * x[other]
                wanted.append(pulled / total if total else x[vertex])
                weights.append(total or 0.01)
            for vertex, place in zip(layers[index], _apart(wanted, weights, distances[index]), strict=True):
                x[vertex] = place
    left = min((place - width / 2 for place, width in zip(x, widths, strict=True)), default=0.0)
    return [place - left for place in x]


def _pulls(vertex: int, others: Iterable[int], n_boxes: int) -> list[tuple[int, float]]:
    """Return the weight of each neighbour's pull: largest between two dummies of a long edge, then at its ends."""
    return [(other, (1.0, 3.0, 9.0)[(vertex >= n_boxes) + (other >= n_boxes)]) for other in others]


def _apart(wanted: Sequence[float], weights: Sequence[float], distances: Sequence[float]) -> list[float]:
    """Return the places nearest to `wanted`, by weighted squares, that are in order and `distances` apart at least.

    After subtracting the distances, the places only have to be in order: isotonic regression, by pooling adjacent
    violators.
    """
    offsets = list(itertools.accumulate(distances, initial=0.0))
    pools: list[tuple[float, float, int]] = []
    for place, weight, offset in zip(wanted, weights, offsets, strict=False):
        mean, total, count = place - offset, weight, 1
        while pools and pools[-1][0] > mean:
            other, more, members = pools.pop()
            mean, total, count = (mean * total + other * more) / (total + more), total + more, count + members
        pools.append((mean, total, count))
    flat = itertools.chain.from_iterable(itertools.repeat(mean, count) for mean, _, count in pools)
    return [place + offset for place, offset in zip(flat, offsets, strict=False)]


def _mean(values: Sequence[float], default: float) -> float:
    return sum(values) / len(values) if values else default
