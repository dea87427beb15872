"""Time to draw all nodes of a graph of 2,000, beside the 2 s that a reader would wait."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from benchmarks._measure import Row
from toolkit import stop_gradient
from toolkit.gradients import graph

SECONDS = 2.0
N_NODES = 2000


def rows() -> Iterator[Row]:
    """Measure graphs that are deep, wide, and tangled."""
    for name, program in (("recurrent", _recurrent), ("wide", _wide), ("tangled", _tangled)):
        yield _row(name, program())


def _row(name: str, program: Callable[[], Tensor]) -> Row:
    found = graph(program)
    n_boxes = found.svg(fold=None).count("<rect")
    assert n_boxes >= N_NODES, f"{n_boxes} nodes are too few"
    recording = _seconds(lambda: graph(program))
    drawing = _seconds(lambda: found.svg(fold=None))
    note = f"{drawing:.2f} s for {n_boxes} boxes, after {recording:.2f} s to record them"
    return Row(f"svg of a {name} graph / {SECONDS:g} s", drawing / SECONDS, "at most 1", note)


def _seconds(run: Callable[[], object], repeats: int = 3) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _recurrent() -> Callable[[], Tensor]:
    """One chain, whose two weights are used at every step: two edges to each layer that pass all below it."""
    weight, bias = (torch.ones(2, requires_grad=True) for _ in range(2))

    def loss() -> Tensor:
        state = stop_gradient(bias, "benchmarks.state")
        for step in range(N_NODES // 3):
            state = torch.tanh(weight * (stop_gradient(state, "benchmarks.state") if step % 100 == 0 else state) + bias)
        return state.sum()

    return loss


def _wide() -> Callable[[], Tensor]:
    leaves = [torch.ones(2, requires_grad=True) for _ in range(N_NODES // 4)]

    def loss() -> Tensor:
        return torch.stack([stop_gradient(leaf.exp(), "benchmarks.branch").sin().sum() for leaf in leaves]).sum()

    return loss


def _tangled() -> Callable[[], Tensor]:
    """Each node uses two of the hundred before it; all are used."""
    leaves = [torch.ones((), requires_grad=True) for _ in range(100)]

    def loss() -> Tensor:
        generator = random.Random(0)
        values = list(leaves)
        while len(values) < N_NODES:
            values.append(values[-100] + values[-generator.randrange(1, 100)])
        return torch.stack(values[-100:]).sum()

    return loss
