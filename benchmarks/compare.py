"""Time and memory of a comparison against the plain runs that it replaces, and the time to print it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from benchmarks._measure import Row, timed_row
from toolkit import compare, stop_gradient, stop_recording
from toolkit.gradients import Comparison
from toolkit.gradients.memory import LiveBytes


def rows() -> Iterator[Row]:
    """Measure tanh MLPs with a block at each layer, in float32, and a loop through one block."""
    for n_layers, n_samples, width, goal in ((8, 64, 64, 1.0), (8, 128, 128, 0.75), (8, 256, 256, 0.75)):
        yield from _runs(n_layers, n_samples, width, goal)
    yield from _steps(16, 128, 400)
    yield from _loops(4000)


class _Network:
    """An MLP with a stop at each layer."""

    def __init__(self, n_layers: int, n_samples: int, width: int) -> None:
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(n_layers))
        self.inputs = torch.randn(n_samples, width)
        self.parameters = list(self.layers.parameters())
        self.names = [f"benchmarks.layer{index}" for index in range(n_layers)]
        self.text = f"{n_layers} x {width} MLP, {n_samples} samples"

    def loss(self, stop: Callable[[Tensor, str], Tensor]) -> Tensor:
        hidden = self.inputs
        for layer, name in zip(self.layers, self.names, strict=True):
            hidden = torch.tanh(layer(hidden)) + stop(hidden, name)
        return hidden.square().mean()

    def without(self, opened: str | None) -> tuple[Tensor, ...]:
        """Return the gradient of the program without any switch, and without one of its stops."""
        value = self.loss(lambda hidden, name: hidden if name == opened else hidden.detach())
        return torch.autograd.grad(value, self.parameters)

    def compared(self, blocks: list[str] | None = None) -> Comparison:
        return compare(lambda: self.loss(stop_gradient), self.layers, blocks=blocks)


def _runs(n_layers: int, n_samples: int, width: int, goal: float) -> Iterator[Row]:
    network = _Network(n_layers, n_samples, width)
    variants = [None, *network.names]

    def gradients() -> list[dict[str, Tensor]]:
        comparison = network.compared([])
        return [comparison.gradient([name]) for name in network.names]

    comparison = network.compared()
    for opened in variants:
        found = comparison.gradient([opened] if opened else []).values()
        expected = network.without(opened)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), "not the same computation"

    def plain_runs() -> list[tuple[Tensor, ...]]:
        return [network.without(opened) for opened in variants]

    what = f"{len(variants)} plain runs, {network.text}"
    yield timed_row(f"compare, {n_layers} blocks / {what}", network.compared, plain_runs, f"at most {goal:g}")
    yield timed_row(f"its gradients alone / {what}", gradients, plain_runs)


def _steps(n_layers: int, n_samples: int, width: int) -> Iterator[Row]:
    network = _Network(n_layers, n_samples, width)
    comparison = network.compared()

    def step() -> tuple[Tensor, ...]:
        return network.without(None)

    yield timed_row(f"compare, {n_layers} blocks / 1 plain run, {network.text}", network.compared, step, "at most 12")
    yield timed_row("print it / 1 plain run", lambda: str(comparison), step, "at most 0.1")
    size = sum(parameter.nbytes for parameter in network.parameters)
    peaks = []
    for run in (network.compared, step):
        with LiveBytes() as live:
            run()
        peaks.append(live.peak)
    ratio = (peaks[0] - peaks[1]) / size
    measured = f"{peaks[0] / 2**20:.3g} MiB against {peaks[1] / 2**20:.3g} MiB"
    yield Row("peak memory beyond that of a plain run / 1 gradient", ratio, "at most 3", measured)


def _loops(n_steps: int) -> Iterator[Row]:
    torch.manual_seed(0)
    weight = (0.1 * torch.randn(8, 8)).requires_grad_()

    def loss(target: Callable[[Tensor], Tensor]) -> Tensor:
        hidden, total = torch.ones(8), torch.zeros(())
        for _ in range(n_steps):
            hidden = (weight @ hidden).tanh() + target(hidden)
            total = total + hidden.sum()
        return total

    def recorded(hidden: Tensor) -> Tensor:
        with stop_recording("benchmarks.region"):
            return (weight @ hidden).tanh()

    def without_graph(hidden: Tensor) -> Tensor:
        with torch.no_grad():
            return (weight @ hidden).tanh()

    def plain() -> object:
        return torch.autograd.grad(loss(without_graph), weight)

    what = f"{n_steps} passages through one block / 1 plain run"
    stops = [("stop_gradient", lambda hidden: stop_gradient((weight @ hidden).tanh(), "benchmarks.stop"))]
    for name, target in [*stops, ("stop_recording", recorded)]:
        yield timed_row(f"compare, {name}, {what}", lambda: compare(lambda: loss(target), weight), plain, "at most 9")  # noqa: B023
