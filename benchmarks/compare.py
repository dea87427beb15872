"""What a comparison of 8 blocks costs beside the 9 plain runs that it replaces."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from benchmarks._measure import Row, timed_pair
from toolkit import compare, stop_gradient
from toolkit.gradients import Comparison

N_LAYERS = 8


def rows() -> Iterator[Row]:
    """Measure a tanh MLP of 8 layers with a block at each, for two sizes, in float32."""
    for n_samples, width in ((64, 64), (128, 128), (256, 256)):
        yield from _sizes(n_samples, width)


def _sizes(n_samples: int, width: int) -> Iterator[Row]:
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(width, width) for _ in range(N_LAYERS))
    inputs = torch.randn(n_samples, width)
    parameters = list(layers.parameters())

    def program(stops: list[Callable[[Tensor], Tensor]]) -> Tensor:
        hidden = inputs
        for layer, stop in zip(layers, stops, strict=True):
            hidden = torch.tanh(layer(hidden)) + stop(hidden)
        return hidden.square().mean()

    def passed(hidden: Tensor) -> Tensor:
        return hidden

    def plain_runs() -> list[tuple[Tensor, ...]]:
        """Run the program without any switch: written with every block, and nine times less one."""
        variants = [[Tensor.detach] * N_LAYERS]
        variants += [[passed if i == opened else Tensor.detach for i in range(N_LAYERS)] for opened in range(N_LAYERS)]
        return [torch.autograd.grad(program(stops), parameters) for stops in variants]

    def compared() -> Comparison:
        return compare(lambda: program(stops), layers)

    def gradients() -> list[dict[str, Tensor]]:
        comparison = compare(lambda: program(stops), layers, blocks=[])
        return [comparison.gradient([name]) for name in names]

    def stop_at(index: int) -> Callable[[Tensor], Tensor]:
        return lambda hidden: stop_gradient(hidden, names[index])

    names = [f"benchmarks.layer{index}" for index in range(N_LAYERS)]
    stops = [stop_at(index) for index in range(N_LAYERS)]
    comparison = compared()
    for opened, expected in zip(itertools.chain([()], ([name] for name in names)), plain_runs(), strict=True):
        found = comparison.gradient(opened).values()
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), "not the same computation"
    size = f"{N_LAYERS} x {width} MLP, {n_samples} samples"
    yield _row(f"compare, 8 blocks / 9 plain runs, {size}", compared, plain_runs, "at most 0.75")
    yield _row(f"its gradients alone / 9 plain runs, {size}", gradients, plain_runs)


def _row(what: str, ours: Callable[[], object], theirs: Callable[[], object], goal: str = "") -> Row:
    ratio, seconds, their_seconds = timed_pair(ours, theirs)
    return Row(what, ratio, goal, f"{seconds * 1e3:.3g} ms against {their_seconds * 1e3:.3g} ms")
