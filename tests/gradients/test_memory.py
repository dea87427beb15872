"""Bytes that the graph keeps and the peak of a step, against sizes that can be counted by hand."""

import itertools
import json
import queue
import re
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from toolkit import stop_gradient, stop_recording, unblock
from toolkit.blocks import Block, declared_blocks
from toolkit.gradients import LedgerEntry, MemoryUse, alias_guard, measure_memory, memory_ledger

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
        (torch.ones(()), TypeError, "`loss` should be a function that returns the loss. Found Tensor."),
    ],
    ids=["constant", "no scalar", "float", "tensor"],
)
def test_wrong_input_gives_one_clear_error(loss: Callable, error: type, message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        measure_memory(loss)
    with pytest.raises(error, match=re.escape(message)):
        memory_ledger(loss)


# --- the ledger --------------------------------------------------------------------------------------------------


def test_ledger_leaves_open_what_cannot_be_measured() -> None:
    """Open, a region may fail; and a derivative of torch.func refuses the hooks that measure a region."""
    w = torch.tensor([1.0, 2.0], requires_grad=True)

    def loss() -> Tensor:
        with stop_recording("ledger.average"):
            w.mul_(0.5).mul_(2)
        slope = torch.func.grad(lambda v: (v**3).sum())(w)
        return (stop_gradient(w.exp(), "ledger.factor") * slope).sum()

    average, factor = memory_ledger(loss).entries
    assert average.open is None
    assert factor.open is not None
    assert factor.as_region is None
    assert len(str(memory_ledger(loss)).splitlines()) == 4


def _entry(loss: Callable[[], Tensor]) -> LedgerEntry:
    (entry,) = memory_ledger(loss).entries
    return entry


def test_ledger_tells_a_block_afterwards_from_a_region(target: _Target) -> None:
    """Without a block, 8 layers are kept; a detach afterwards frees them, and needs the peak; a region neither."""
    after, region = memory_ledger(target.stopped_after), memory_ledger(target.not_recorded)
    assert after.in_place == measure_memory(target.detached_after)
    assert region.in_place == measure_memory(target.no_grad)
    (stopped,), (recorded,) = after.entries, region.entries
    assert (stopped.name, stopped.form) == ("memory.after", "tensor")
    assert (recorded.name, recorded.form) == ("memory.region", "region")
    assert stopped.open == recorded.open == measure_memory(target.plain)
    assert stopped.as_region == region.in_place
    assert recorded.as_region is None
    assert after.in_place.peak == (LAYERS + 1) * ACTIVATION
    assert re.search(r"test_memory\.py:\d+:\d+$", stopped.site)


class _Shared:
    """A hidden layer that the loss needs anyway, and a target that is made of it: only the target can be a region."""

    def __init__(self) -> None:
        self.x = torch.linspace(0, 1, 1000, dtype=torch.float64, requires_grad=True)

    def stopped(self) -> Tensor:
        hidden = self.x.exp()
        return (hidden * stop_gradient(hidden.sin().exp().cos().exp().sin().exp(), "memory.shared")).sum()

    def written_as_region(self) -> Tensor:
        hidden = self.x.exp()
        with stop_recording("memory.shared region"):
            target = hidden.sin().exp().cos().exp().sin().exp()
        return (hidden * target).sum()

    def two(self) -> Tensor:
        first = stop_gradient(self.x.exp().exp(), "memory.first")
        return (self.x * first).sum() * stop_gradient(self.x.sin().sin().sum(), "memory.second")

    def second_as_region(self) -> Tensor:
        first = stop_gradient(self.x.exp().exp(), "memory.first")
        loss = (self.x * first).sum()
        with stop_recording("memory.second region"):
            second = self.x.sin().sin().sum()
        return loss * second

    def leaf(self) -> Tensor:
        return (self.x * stop_gradient(self.x, "memory.leaf")).sum()

    def in_a_loop(self) -> Tensor:
        state = self.x * 1
        for _ in range(3):
            state = state * stop_gradient(state.sin().cos().sin().cos().sin().cos(), "memory.loop")
        return state.sum()

    def in_a_loop_as_region(self) -> Tensor:
        state = self.x * 1
        for _ in range(3):
            with stop_recording("memory.loop region"):
                factor = state.sin().cos().sin().cos().sin().cos()
            state = state * factor
        return state.sum()


@pytest.mark.parametrize(
    ("written", "as_region"),
    [("stopped", "written_as_region"), ("in_a_loop", "in_a_loop_as_region")],
)
def test_what_a_region_would_need_is_what_it_needs(written: str, as_region: str) -> None:
    shared = _Shared()
    ledger = memory_ledger(getattr(shared, written))
    assert ledger.entries[0].as_region == measure_memory(getattr(shared, as_region))
    assert ledger.entries[0].as_region.peak < ledger.in_place.peak


def test_every_block_by_itself() -> None:
    shared = _Shared()
    first, second = memory_ledger(shared.two).entries
    assert (first.name, second.name) == ("memory.first", "memory.second")
    for entry in (first, second):
        with unblock(entry.name):
            assert entry.open == measure_memory(shared.two)
    assert second.as_region == measure_memory(shared.second_as_region)


def test_a_block_on_a_leaf_has_nothing_to_save() -> None:
    ledger = memory_ledger(_Shared().leaf)
    assert ledger.entries[0].as_region == ledger.in_place


def test_what_cannot_be_told_is_none() -> None:
    x = torch.linspace(0, 1, 10, dtype=torch.float64, requires_grad=True)

    def inner() -> Tensor:
        y = x.exp().exp()
        stopped = stop_gradient(y, "memory.inner")
        (slope,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
        return (x * stopped * slope).sum()

    def transformed() -> Tensor:
        return torch.func.grad(lambda x: (x * x * stop_gradient(x.exp().exp(), "memory.func")).sum())(x).sum()

    def both() -> Tensor:
        with stop_recording("memory.both"):
            y = x.exp()
        return (x * y * stop_gradient(x.exp().exp(), "memory.both")).sum()

    runs = (number for number in itertools.count())

    def differs() -> Tensor:
        scale = x
        for _ in range(next(runs)):
            scale = scale * 1
        return (scale * stop_gradient(x.exp().exp(), "memory.differs")).sum()

    for program, form in [(inner, "tensor"), (transformed, "tensor"), (both, "both"), (differs, "tensor")]:
        entry = _entry(program)
        assert entry.form == form
        assert (entry.as_region is None) == (program is not both)
    assert _entry(both).open.graph > memory_ledger(both).in_place.graph


def test_second_derivatives_are_as_they_were() -> None:
    """The tensors that are kept come back with their history."""
    x = torch.linspace(0.1, 1, 10, dtype=torch.float64, requires_grad=True)
    found = queue.SimpleQueue[Tensor]()

    def loss() -> Tensor:
        (slope,) = torch.autograd.grad((x.exp() * x).sum(), x, create_graph=True)
        value = (slope * stop_gradient(x.sin().exp(), "memory.order")).sum()
        found.put(torch.autograd.grad(value, x, retain_graph=True)[0])
        return value

    assert _entry(loss).as_region is not None
    rolled, opened, as_region, in_place = (found.get() for _ in range(4))
    assert torch.equal(as_region, in_place)
    assert torch.equal(rolled, in_place)
    assert not torch.equal(opened, in_place)


def test_one_run_is_in_memory_at_a_time() -> None:
    x = torch.linspace(0, 1, 10, dtype=torch.float64, requires_grad=True)
    saved = queue.SimpleQueue[weakref.ref[Tensor]]()
    runs = (number for number in itertools.count())

    def loss() -> Tensor:
        assert saved.empty() or saved.get()() is None
        y = x.exp()
        saved.put(weakref.ref(y))
        next(runs)
        return (y.sin() * stop_gradient(x.exp().exp(), "memory.run")).sum()

    assert _entry(loss).form == "tensor"
    assert next(runs) == 4


def test_ledger_of_a_program_without_blocks() -> None:
    x = torch.ones(4, requires_grad=True)
    ledger = memory_ledger(lambda: x.exp().sum())
    assert ledger.entries == ()
    assert ledger.in_place == MemoryUse(
        16 + 4, 16 + 4 + 4 + 16
    )  # beside the loss and what is saved, its gradient and that of x
    assert str(ledger) == "every block in place: graph 20 bytes, peak 40 bytes\nno blocks were met"


def test_ledger_is_a_table_and_plain_json(target: _Target) -> None:
    ledger = memory_ledger(target.stopped_after)
    head, titles, row = str(ledger).splitlines()
    assert head == "every block in place: graph 128 KiB, peak 1.125 MiB"
    assert re.split(r"  +", titles) == [
        "block", "form", "graph open", "peak open", "graph as region", "peak as region", "where",
    ]  # fmt: skip
    assert re.split(r"  +", row)[:6] == ["memory.after", "tensor", "1 MiB", "2.134 MiB", "128 KiB", "257 KiB"]
    loaded = json.loads(json.dumps(ledger.to_dict()))
    assert loaded["in_place"] == {"graph": ACTIVATION + SCALAR, "peak": (LAYERS + 1) * ACTIVATION}
    assert loaded["entries"][0]["as_region"]["graph"] == ACTIVATION + SCALAR
    assert (
        re.split(r"  +", str(memory_ledger(target.not_recorded)).splitlines()[-1])[4]
        .rpartition("/")[2]
        .startswith("test_memory.py:")
    )


def test_ledger_leaves_the_program_as_it_was_found() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))
    inputs = torch.randn(4, 3)

    def loss() -> Tensor:
        return (net(inputs) * stop_gradient(net(inputs).exp(), "memory.left")).sum()

    def state() -> list:
        return [[(id(b), b.tolist()) for b in net.buffers()], [p.grad for p in net.parameters()], torch.get_rng_state()]

    before = str(state())
    assert _entry(loss).as_region is not None
    assert str(state()) == before
    assert declared_blocks()["memory.left"] == Block("memory.left", "")
    with pytest.raises(ValueError, match="`loss` should depend on a tensor that requires a gradient"):
        memory_ledger(lambda: net(inputs).detach().sum())
    assert str(state()) == before


def test_zeros_without_memory_are_measured() -> None:
    x, y = (torch.randn(4, 3, dtype=torch.float64).requires_grad_() for _ in range(2))

    def slope(of: Tensor, other: Tensor) -> Tensor:
        return torch.func.grad(lambda a, b: (a + b).square().sum())(other, of)

    def loss() -> Tensor:
        return torch.func.jvp(slope, (x, y), (y, x))[1].sum()

    plain = torch.autograd.grad(loss(), x)[0]
    assert measure_memory(loss).peak > 0  # torch crashes on such zeros under a dispatch mode
    with alias_guard():
        assert torch.equal(torch.autograd.grad(loss(), x)[0], plain)
