"""Time and memory of stable softmax and `torch.softmax`, eager and compiled, and the savings of its block."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from benchmarks._measure import Row, timed_row
from toolkit import unblock
from toolkit.gradients.memory import measure_memory
from toolkit.softmax import SHIFT, cross_entropy, log_softmax, logsumexp, softmax


def rows() -> Iterator[Row]:
    """Measure forward plus backward in float32, and the memory that the graph keeps."""
    for n_samples, n_classes in ((64, 10), (60, 100), (4096, 1000), (128, 50257)):
        yield from _times(n_samples, n_classes)
    yield _times_when_sure(4096, 1000)
    yield from _times_compiled(4096, 1000, "at most 1.1")
    yield from _times_compiled(128, 50257, "at most 1.7")
    yield from _memory(4096, 1000)


def _data(n_samples: int, n_classes: int, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits, a cotangent of their shape, and labels."""
    generator = torch.Generator().manual_seed(0)
    x = (scale * torch.randn(n_samples, n_classes, generator=generator)).requires_grad_()
    cotangent = torch.randn(n_samples, n_classes, generator=generator)
    return x, cotangent, torch.randint(n_classes, (n_samples,), generator=generator)


def _gradient(function: Callable[[Tensor], Tensor], x: Tensor, cotangent: Tensor) -> Callable[[], object]:
    return lambda: torch.autograd.grad(function(x), x, cotangent)


def _with_open_block(program: Callable[[], object]) -> Callable[[], None]:
    def opened() -> None:
        with unblock(SHIFT):
            program()

    return opened


def _times(n_samples: int, n_classes: int) -> Iterator[Row]:
    x, cotangent, labels = _data(n_samples, n_classes)
    size = f"{n_samples} x {n_classes}"
    blocked = _gradient(softmax, x, cotangent)
    theirs = _gradient(lambda x: torch.softmax(x, -1), x, cotangent)
    goal = "at most 1.5" if n_samples * n_classes < 1000 else "at most 2.2"
    yield timed_row(f"softmax / torch.softmax, {size}", blocked, theirs, goal)
    yield timed_row(f"softmax: blocked / open, {size}", blocked, _with_open_block(blocked), "at most 0.75")
    one = torch.ones(())
    for name, ours, torchs, vector in (
        ("log_softmax", log_softmax, lambda x: torch.log_softmax(x, -1), cotangent),
        ("logsumexp", logsumexp, lambda x: torch.logsumexp(x, -1), cotangent[:, 0]),
        (
            "cross_entropy",
            lambda x: cross_entropy(x, labels),
            lambda x: torch.nn.functional.cross_entropy(x, labels),
            one,
        ),
    ):
        yield timed_row(
            f"{name} / torch's, {size}", _gradient(ours, x, vector), _gradient(torchs, x, vector), "at most 1.5"
        )


def _times_when_sure(n_samples: int, n_classes: int) -> Row:
    """One class has nearly all of the probability, as in a trained classifier: the pivot is its cotangent."""
    x, cotangent, _ = _data(n_samples, n_classes, scale=30.0)
    theirs = _gradient(lambda x: torch.softmax(x, -1), x, cotangent)
    what = f"softmax / torch.softmax, {n_samples} x {n_classes}, sure of one class"
    return timed_row(what, _gradient(softmax, x, cotangent), theirs, "at most 2.2")


def _times_compiled(n_samples: int, n_classes: int, goal: str) -> Iterator[Row]:
    x, cotangent, _ = _data(n_samples, n_classes)
    torch.compiler.reset()
    compiled = _gradient(torch.compile(softmax, fullgraph=True), x, cotangent)
    native = torch.compile(lambda x: torch.softmax(x, -1), fullgraph=True)
    size = f"{n_samples} x {n_classes}"
    theirs = _gradient(lambda x: torch.softmax(x, -1), x, cotangent)
    yield timed_row(f"compiled softmax / torch.softmax, {size}", compiled, theirs, goal)
    yield timed_row(f"compiled softmax / compiled torch.softmax, {size}", compiled, _gradient(native, x, cotangent))
    yield timed_row(f"compiled softmax: blocked / open, {size}", compiled, _with_open_block(compiled), "at most 0.75")


def _memory(n_samples: int, n_classes: int) -> Iterator[Row]:
    x = torch.zeros(n_samples, n_classes, requires_grad=True)
    one_input = x.numel() * x.element_size()
    labels = torch.zeros(n_samples, dtype=torch.int64)
    size = f"{n_samples} x {n_classes}"
    for name, function in (("softmax", softmax), ("cross_entropy", lambda x: cross_entropy(x, labels))):

        def retained(function: Callable[[Tensor], Tensor] = function) -> int:
            return measure_memory(lambda: function(x.clone()).sum()).graph

        blocked = retained()
        with unblock(SHIFT):
            opened = retained()
        note = f"{blocked / 2**20:.1f} MiB against {opened / 2**20:.1f} MiB"
        yield Row(f"{name}: bytes that the graph keeps, blocked / open, {size}", blocked / opened, "at most 0.51", note)
        note = f"{blocked / 2**20:.1f} MiB"
        yield Row(f"{name}: bytes that the graph keeps / one input, {size}", blocked / one_input, "at most 1.01", note)
