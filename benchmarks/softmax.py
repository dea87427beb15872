"""What stable softmax costs beside `torch.softmax`, and what its block saves."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from benchmarks._measure import Row, timed_pair
from toolkit import unblock
from toolkit.gradients.memory import measure_memory
from toolkit.softmax import SHIFT, cross_entropy, softmax


def rows() -> Iterator[Row]:
    """Measure forward plus backward in float32, and what the graph keeps."""
    for n_samples, n_classes in ((64, 10), (4096, 1000)):
        yield from _times(n_samples, n_classes)
    yield _memory(4096, 1000)


def _times(n_samples: int, n_classes: int) -> Iterator[Row]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n_samples, n_classes, generator=generator).requires_grad_()
    cotangent = torch.randn(n_samples, n_classes, generator=generator)
    labels = torch.randint(n_classes, (n_samples,), generator=generator)

    def gradient(function: Callable[[Tensor], Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(function(x), x, cotangent)

    def loss_gradient(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(function(x, labels), x)

    def opened() -> None:
        with unblock(SHIFT):
            blocked()

    blocked = gradient(softmax)
    size = f"{n_samples} x {n_classes}"
    theirs = gradient(lambda x: torch.softmax(x, -1))
    yield _row(f"softmax / torch.softmax, {size}", blocked, theirs, "at most 2.2")
    ours, theirs = loss_gradient(cross_entropy), loss_gradient(torch.nn.functional.cross_entropy)
    yield _row(f"cross_entropy / torch's, {size}", ours, theirs)
    yield _row(f"softmax: blocked / open, {size}", blocked, opened, "at most 0.75")


def _memory(n_samples: int, n_classes: int) -> Row:
    x = torch.zeros(n_samples, n_classes, requires_grad=True)

    def retained() -> int:
        return measure_memory(lambda: softmax(x.clone()).sum()).graph

    blocked = retained()
    with unblock(SHIFT):
        opened = retained()
    note = f"{blocked / 2**20:.1f} MiB against {opened / 2**20:.1f} MiB"
    what = f"softmax: bytes that the graph keeps, blocked / open, {n_samples} x {n_classes}"
    return Row(what, blocked / opened, "at most 0.51", note)


def _row(what: str, ours: Callable[[], object], theirs: Callable[[], object], goal: str = "") -> Row:
    ratio, seconds, their_seconds = timed_pair(ours, theirs)
    return Row(what, ratio, goal, f"{seconds * 1e3:.3g} ms against {their_seconds * 1e3:.3g} ms, forward + backward")
