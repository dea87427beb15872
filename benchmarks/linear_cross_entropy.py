"""Time and memory of cross entropy over a large vocabulary: in chunks, with all logits at once, in torch's chunks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from benchmarks._measure import Row, timed_row
from toolkit.softmax import linear_cross_entropy

ON_REQUEST = True

# Samples, features, classes: the logits wait in the weight's gradient; or have to be computed again.
SIZES = ((128, 4096, 50_257), (1024, 512, 50_257))


def rows() -> Iterator[Row]:
    """Measure forward plus backward in float32: time, and the memory of a process beyond its gradients."""
    for size in SIZES:
        yield _time(size)
        yield from _memory(size)


def _leaves(size: tuple[int, int, int]) -> tuple[Tensor, Tensor, Tensor]:
    n_samples, n_features, n_classes = size
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(n_samples, n_features, generator=generator).requires_grad_()
    weight = torch.randn(n_classes, n_features, generator=generator).div_(n_features**0.5).requires_grad_()
    return hidden, weight, torch.randint(n_classes, (n_samples,), generator=generator)


def _programs(size: tuple[int, int, int]) -> dict[str, Callable[[], tuple[Tensor, ...]]]:
    hidden, weight, labels = _leaves(size)
    losses: dict[str, Callable[[], Tensor]] = {
        "ours": lambda: linear_cross_entropy(hidden, weight, labels),
        "all logits": lambda: cross_entropy(linear(hidden, weight), labels),
    }
    if hasattr(torch.nn, "LinearCrossEntropyOptions"):
        options = torch.nn.LinearCrossEntropyOptions()
        losses["torch's chunks"] = lambda: torch.nn.functional.linear_cross_entropy(
            hidden, weight, labels, options=options
        )

    def step(loss: Callable[[], Tensor]) -> Callable[[], tuple[Tensor, ...]]:
        return lambda: torch.autograd.grad(loss(), (hidden, weight))

    return {name: step(loss) for name, loss in losses.items()}


def _time(size: tuple[int, int, int]) -> Row:
    programs = _programs(size)
    what, goal = (
        f"linear_cross_entropy / cross_entropy(linear), {_text(size)}",
        "at most 1.2" if size == SIZES[0] else "",
    )
    return timed_row(what, programs["ours"], programs["all logits"], goal, repeats=5)


def _memory(size: tuple[int, int, int]) -> Iterator[Row]:
    grown = {name: _grown(name, size) for name in _programs((1, 1, 1))}
    for name, theirs in grown.items():
        if name == "ours":
            continue
        for i, what in enumerate(("peak beside inputs and gradients", "whole peak beside inputs")):
            goal = "at most 0.125" if (size, name, i) == (SIZES[0], "all logits", 0) else ""
            note = f"{grown['ours'][i] / 1e6:.1f} MB against {theirs[i] / 1e6:.1f} MB"
            yield Row(f"linear_cross_entropy / {name}: {what}, {_text(size)}", grown["ours"][i] / theirs[i], goal, note)


def _text(size: tuple[int, int, int]) -> str:
    n_samples, n_features, n_classes = size
    return f"{n_samples} x {n_classes} from {n_features}"


def _grown(name: str, size: tuple[int, int, int]) -> list[int]:
    """Return the growth of a process in bytes, from its start to its peak, without and with the gradients."""
    # Large blocks go back to the system at once: the second step starts where the first did.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000"}
    command = [sys.executable, "-m", "benchmarks.linear_cross_entropy", json.dumps([name, size])]
    found: list[int] = json.loads(subprocess.run(command, env=environment, check=True, capture_output=True).stdout)
    return found


def _peak_of_a_step(step: Callable[[], tuple[Tensor, ...]]) -> list[int]:
    for _ in range(2):  # the first time wakes up what stays
        with open("/proc/self/clear_refs", "w") as peak:  # noqa: PTH123
            peak.write("5")
        before = _status("VmRSS")
        gradients = step()
        grown = _status("VmHWM") - before
        size = sum(gradient.nbytes for gradient in gradients)
        del gradients
    return [grown - size, grown]


def _status(field: str) -> int:
    with open("/proc/self/status") as status:  # noqa: PTH123
        return next(int(line.split()[1]) for line in status if line.startswith(field)) * 1024


if __name__ == "__main__":
    torch.set_num_threads(1)
    program, (n_samples, n_features, n_classes) = json.loads(sys.argv[1])
    print(json.dumps(_peak_of_a_step(_programs((n_samples, n_features, n_classes))[program])))
