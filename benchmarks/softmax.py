"""What stable softmax costs beside `torch.softmax`, and what its block saves."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks._measure import Row, timed_pair
from toolkit import unblock
from toolkit.gradients.memory import measure_memory
from toolkit.softmax import SHIFT, cross_entropy, softmax

SHAPES = ((64, 10), (4096, 1000))


def rows() -> Iterator[Row]:
    """Measure forward plus backward in float32."""
    generator = torch.Generator().manual_seed(0)
    for shape in SHAPES:
        x = torch.randn(shape, generator=generator).requires_grad_()
        cotangent = torch.randn(shape, generator=generator)
        labels = torch.randint(shape[1], shape[:1], generator=generator)
        size = f"{shape[0]} x {shape[1]}"

        ours = differentiated(softmax, x, cotangent)
        yield row(
            f"softmax / torch.softmax, {size}",
            ours,
            differentiated(lambda x: torch.softmax(x, -1), x, cotangent),
            "at most 2.2" if x.numel() > 10_000 else "",
        )
        yield row(
            f"cross_entropy / F.cross_entropy, {size}",
            differentiated(lambda x: cross_entropy(x, labels), x, torch.ones(())),
            differentiated(lambda x: F.cross_entropy(x, labels), x, torch.ones(())),
        )
        yield row(f"softmax: blocked / open, {size}", ours, opened(ours), "at most 0.75")

    blocked = measure_memory(lambda: softmax(x.clone()).sum()).graph
    with unblock(SHIFT):
        everything = measure_memory(lambda: softmax(x.clone()).sum()).graph
    note = f"{blocked / 2**20:.1f} MiB against {everything / 2**20:.1f} MiB kept alive by the graph"
    yield Row(f"softmax: bytes blocked / open, {size}", blocked / everything, "at most 0.5", note)


def differentiated(function: Callable[[Tensor], Tensor], x: Tensor, cotangent: Tensor) -> Callable[[], object]:
    return lambda: torch.autograd.grad(function(x), x, cotangent)


def opened(program: Callable[[], object]) -> Callable[[], object]:
    def run() -> None:
        with unblock(SHIFT):
            program()

    return run


def row(what: str, ours: Callable[[], object], theirs: Callable[[], object], goal: str = "") -> Row:
    ratio, seconds, their_seconds = timed_pair(ours, theirs)
    return Row(what, ratio, goal, f"{seconds * 1e3:.3g} ms against {their_seconds * 1e3:.3g} ms, forward + backward")
