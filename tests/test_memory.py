"""Bytes that the graph keeps and the peak of a step, against sizes that can be counted by hand."""

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from toolkit import stop_gradient, stop_recording, unblock
from toolkit.gradients import measure_memory

N, D, LAYERS = 128, 256, 8
ACTIVATION = N * D * 4
SCALAR = 4


class _Target:
    """A network of eight tanh layers whose output is used as a constant, in every way to make it one."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(*(part for _ in range(LAYERS) for part in (nn.Linear(D, D), nn.Tanh())))
        self.inputs, self.weight = torch.randn(N, D), nn.Parameter(torch.ones(D))

    def plain(self) -> Tensor:
        return (self.weight * self.net(self.inputs)).sum()

    def detached_after(self) -> Tensor:
        return (self.weight * self.net(self.inputs).detach()).sum()

    def stopped_after(self) -> Tensor:
        return (self.weight * stop_gradient(self.net(self.inputs), "memory.after")).sum()

    def no_grad(self) -> Tensor:
        with torch.no_grad():
            target = self.net(self.inputs)
        return (self.weight * target).sum()

    def not_recorded(self) -> Tensor:
        with stop_recording("memory.region"):
            target = self.net(self.inputs)
        return (self.weight * target).sum()


@pytest.fixture(scope="module")
def target() -> _Target:
    return _Target()


def test_without_a_block_the_graph_keeps_every_layer(target: _Target) -> None:
    use = measure_memory(target.plain)
    assert use.graph == LAYERS * ACTIVATION + SCALAR
    assert use.peak > 2 * LAYERS * ACTIVATION  # the gradients of 16 activations' worth of weights come on top


@pytest.mark.parametrize("name", ["detached_after", "stopped_after"])
def test_a_block_afterwards_frees_the_graph_and_not_the_peak(target: _Target, name: str) -> None:
    use = measure_memory(getattr(target, name))
    assert use.graph == ACTIVATION + SCALAR
    assert use.peak == (LAYERS + 1) * ACTIVATION  # all eight outputs, and one that is not squashed yet


@pytest.mark.parametrize("name", ["no_grad", "not_recorded"])
def test_a_region_saves_the_peak_too(target: _Target, name: str) -> None:
    use = measure_memory(getattr(target, name))
    assert use.graph == ACTIVATION + SCALAR
    assert 2 * ACTIVATION <= use.peak < 2.1 * ACTIVATION


@pytest.mark.parametrize(
    ("name", "block"), [("stopped_after", "memory.after"), ("not_recorded", "memory.region")], ids=["gate", "region"]
)
def test_an_open_block_costs_what_no_block_costs(target: _Target, name: str, block: str) -> None:
    loss = getattr(target, name)
    loss()
    with unblock(block):
        opened = measure_memory(loss)
    assert opened == measure_memory(target.plain)


def test_a_checkpoint_keeps_its_input_alone() -> None:
    x = torch.ones(1000, dtype=torch.float64, requires_grad=True)

    def run(x: Tensor) -> Tensor:
        return x.exp().exp().exp()

    recorded = measure_memory(lambda: run(x).sum())
    recomputed = measure_memory(lambda: checkpoint(run, x, use_reentrant=False).sum())
    assert recorded.graph == 3 * 8000 + 8
    assert recomputed.graph == 8


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda x: x.exp().sum(), 8000 + 8),
        (lambda x: x.view(10, 100).T.sum(), 8),
        (lambda x: (x + 1).mul_(2).exp().sum(), 8000 + 8),
        (lambda x: (x.exp()[:10]).sum(), 8000 + 8),
        (lambda x: (x + x).sum(), 8),
        (lambda x: torch.vmap(lambda v: v.exp())(x).sum(), 8000 + 8),
    ],
    ids=["one result", "views", "in place", "a slice keeps the whole", "nothing is saved", "vmap"],
)
def test_storages_are_counted_once_and_while_they_live(make: Callable[[Tensor], Tensor], expected: int) -> None:
    x = torch.linspace(0, 1, 1000, dtype=torch.float64, requires_grad=True)

    def loss() -> Tensor:
        return make(x)

    first = measure_memory(loss)
    assert first.graph == expected
    assert first.peak >= first.graph
    assert measure_memory(loss) == first


def test_the_program_is_left_as_it_was_found() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))
    inputs = torch.randn(4, 3)
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)

    def state() -> list:
        buffers = [(id(buffer), buffer.tolist()) for buffer in net.buffers()]
        return [buffers, [(id(p.grad), p.grad.tolist()) for p in net.parameters()], torch.get_rng_state().tolist()]

    before = state()
    measure_memory(lambda: net(inputs).sum())
    assert state() == before
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        measure_memory(lambda: net(inputs.T).sum())
    assert state() == before


@pytest.mark.parametrize(
    ("loss", "error", "message"),
    [
        (lambda: torch.ones(()), ValueError, "`loss` should depend on a tensor that requires a gradient."),
        (lambda: torch.ones(2, requires_grad=True), ValueError, "`loss` should return a scalar."),
        (lambda: 1.0, TypeError, "`loss` should return a tensor. Found float."),
    ],
    ids=["constant", "no scalar", "float"],
)
def test_wrong_input_gives_one_clear_error(loss: Callable, error: type, message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        measure_memory(loss)
