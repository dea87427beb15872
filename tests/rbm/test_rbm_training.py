"""Training around the engine: the input of each update, and that nothing is lost when it is stopped, split or spoilt.

The engine's own tests compare its updates with autograd. These tests check the rows and the learning rate of each
update, and that other ways of running (resumed, on several ranks) give the same final parameters, bit for bit.
"""

import contextlib
import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import warm
from each import each
from folders import ROOT
from interrupted import Stop, answers_of_ranks, start_process, stopping_at
from scipy import sparse
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler, TensorDataset
from values import seeded

from toolkit import _checkpoint as checkpoint_module
from toolkit._checkpoint import alike, fingerprint
from toolkit.rbm import (
    RBM,
    DivergenceError,
    FusedTrainer,
    cosine_decay,
    linear_decay,
    rank_generator,
    shard,
    train,
)

F64 = torch.float64
N, V, H = 23, 5, 4


# --- machines, data and trainers ------------------------------------------------------------------------------------


def rows(n: int = N, n_visible: int = V, seed: int = 7) -> Tensor:
    """Zeros and ones; with 23 of 5 units some rows are equal."""
    return torch.randint(2, (n, n_visible), generator=seeded(seed), dtype=torch.uint8)


def numbered(n: int, n_bits: int = 8) -> Tensor:
    """Rows that are all different: the binary digits of 0..n-1."""
    return ((torch.arange(n)[:, None] >> torch.arange(n_bits)) & 1).to(torch.uint8)


def numbers(batch: Tensor) -> list[int]:
    """Return which of the numbered rows these are."""
    return (batch.long() << torch.arange(batch.shape[1])).sum(1).tolist()


def machine(n_visible: int = V, n_hidden: int = H, **options) -> RBM:
    rbm = RBM(n_visible, n_hidden, dtype=F64, generator=seeded(0), **options)
    with torch.no_grad():
        for parameter in rbm.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=seeded(3), dtype=F64))
    return rbm


class Recorder(FusedTrainer):
    """A trainer that writes down what it was given."""

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **options)
        self.batches: list[Tensor] = []
        self.rates: list[float] = []
        self.iterates: list[dict[str, Tensor]] = []

    def step(self, data: Tensor, *, learning_rate: float) -> None:
        super().step(data, learning_rate=learning_rate)
        self.batches.append(data.clone())
        self.rates.append(learning_rate)
        self.iterates.append({name: value.clone() for name, value in self.rbm.state_dict().items()})


def recorder(n_visible: int = 8, batch_size: int = 5, **options) -> Recorder:
    return Recorder(machine(n_visible), batch_size=batch_size, steps=1, generator=seeded(2), **options)


def equal(a: RBM, b: RBM) -> bool:
    """Say whether two machines are the same to the bit."""
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


# --- epochs and batches ---------------------------------------------------------------------------------------------


def file_of(path: Path, data: Tensor) -> np.memmap:
    np.save(path / "data.npy", data.numpy())
    return np.load(path / "data.npy", mmap_mode="r")


class Sampler(torch.utils.data.Sampler):
    """Batches of indices in a random order of its own."""

    def __init__(self, n: int) -> None:
        self.n, self.generator = n, seeded(9)

    def __iter__(self) -> Iterator[list[int]]:
        return iter([part.tolist() for part in torch.randperm(self.n, generator=self.generator).split(7)])


SOURCES: dict[str, Callable[[Tensor, Path], object]] = {
    "tensor": lambda data, path: data,
    "array": lambda data, path: data.numpy(),
    "file": lambda data, path: file_of(path, data),
    "list of chunks": lambda data, path: list(data.split(7)),
    "chunks smaller than a batch": lambda data, path: list(data.split(2)),
    "function": lambda data, path: lambda: iter(data.split(7)),
    "arrays": lambda data, path: [part.numpy() for part in data.split(7)],
    "chunks without rows": lambda data, path: [data[:0], data[:9], data[:0], data[9:], data[:0]],
    "DataLoader": lambda data, path: DataLoader(TensorDataset(data), batch_size=7, shuffle=True, generator=seeded(9)),
    "DataLoader of a sampler that draws": lambda data, path: DataLoader(
        TensorDataset(data), batch_size=7, sampler=RandomSampler(data, generator=seeded(9))
    ),
    "DataLoader of batches that are drawn": lambda data, path: DataLoader(
        TensorDataset(data), batch_sampler=Sampler(len(data))
    ),
}
every_source = pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)


@every_source
@pytest.mark.parametrize("n", [23, 20, 3], ids=["a smaller last batch", "full batches", "less than a batch"])
def test_every_epoch_gives_every_row_once_in_full_batches(source, n, tmp_path):
    trainer = recorder()
    updates = train(trainer, source(numbered(n), tmp_path), epochs=3, learning_rate=0.1, generator=seeded(1))
    per_epoch = math.ceil(n / 5)
    assert updates == 3 * per_epoch == len(trainer.batches)
    for epoch in range(3):
        batches = trainer.batches[epoch * per_epoch : (epoch + 1) * per_epoch]
        assert [len(batch) for batch in batches[:-1]] == [5] * (per_epoch - 1)
        assert sorted(number for batch in batches for number in numbers(batch)) == list(range(n))
        assert all(batch.dtype == torch.uint8 for batch in batches)


@every_source
def test_rows_are_in_a_new_order_in_each_epoch_and_the_same_in_each_run(source, tmp_path):
    runs = []
    for seed in (1, 1, 2):
        trainer = recorder()
        train(trainer, source(numbered(200), tmp_path), epochs=2, learning_rate=0.1, generator=seeded(seed))
        runs.append([number for batch in trainer.batches for number in numbers(batch)])
    assert runs[0] == runs[1] != runs[2]
    assert runs[0][:200] != runs[0][200:]
    assert runs[0][:200] != list(range(200))


@pytest.mark.slow
def test_an_order_in_memory_is_a_uniform_permutation():
    """Each of the 6 orders of three rows comes in a sixth of the epochs, to five standard deviations."""
    trainer = recorder(batch_size=3)
    train(trainer, numbered(3), epochs=3000, learning_rate=1e-9, generator=seeded(1))
    counts = np.unique([tuple(numbers(batch)) for batch in trainer.batches], axis=0, return_counts=True)[1]
    assert len(counts) == 6
    assert np.abs(counts - 500).max() < 5 * math.sqrt(3000 / 6 * 5 / 6)


@pytest.mark.slow
def test_a_file_is_read_in_blocks_from_all_over_it(tmp_path):
    """A file whose rows are sorted gives batches that are not: what one chunk holds is spread over the file."""
    data = (torch.arange(40_000)[:, None] >= 20_000).to(torch.uint8).expand(-1, 784)
    trainer = Recorder(RBM(784, 2), batch_size=2000, steps=1, generator=seeded(2))
    train(trainer, file_of(tmp_path, data), epochs=1, learning_rate=1e-3, generator=seeded(1))
    halves = torch.stack([batch[:, 0].double().mean() for batch in trainer.batches])
    assert halves.mean() == 0.5
    assert ((halves > 0.2) & (halves < 0.8)).all()


def test_updates_are_those_of_the_engine(tmp_path):
    """The batches that were given, one by one to another engine, lead to the same machine."""
    trainer, chains = recorder(chains=torch.zeros(6, H)), torch.zeros(6, H)
    train(trainer, numbered(N), epochs=4, learning_rate=linear_decay(0.1), generator=seeded(1))
    twin = recorder(chains=chains)
    for batch, rate in zip(trainer.batches, trainer.rates, strict=True):
        twin.step(batch, learning_rate=rate)
    assert equal(trainer.rbm, twin.rbm)


def test_an_iterator_serves_one_epoch():
    trainer = recorder()
    train(trainer, iter(numbered(N).split(4)), epochs=1, learning_rate=0.1, generator=seeded(1))
    assert sorted(number for batch in trainer.batches for number in numbers(batch)) == list(range(N))
    with pytest.raises(TypeError, match=r"can be read again for each epoch.*Found a generator, which can be read once"):
        train(trainer, (x for x in ()), epochs=2, learning_rate=0.1, generator=seeded(1))


def test_one_chunk_is_held_at_a_time():
    alive: list[weakref.ref] = []

    def chunks() -> Iterator[Tensor]:
        for start in range(0, 60, 12):
            assert sum(ref() is not None for ref in alive) == 0
            chunk = numbered(60)[start : start + 12].clone()
            alive.append(weakref.ref(chunk))
            yield chunk
            del chunk

    train(recorder(), chunks, epochs=2, learning_rate=0.1, generator=seeded(1))
    assert len(alive) == 10


def test_without_a_generator_torchs_own_one_orders_rows():
    orders = []
    for seed in (4, 4, 5):
        torch.manual_seed(seed)
        trainer = recorder()
        train(trainer, numbered(N), epochs=1, learning_rate=0.1, generator=None)
        orders.append([number for batch in trainer.batches for number in numbers(batch)])
    assert orders[0] == orders[1] != orders[2]


def test_the_callback_is_told_updates_and_epochs():
    told = []
    train(
        recorder(), numbered(12), epochs=2, learning_rate=0.1, generator=seeded(1), callback=lambda *a: told.append(a)
    )
    assert told == [(1, 1), (2, 1), (3, 1), (4, 2), (5, 2), (6, 2)]


def test_nothing_is_printed(capfd, tmp_path):
    train(recorder(), numbered(12), epochs=2, learning_rate=0.1, generator=seeded(1), checkpoint=tmp_path / "c")
    assert capfd.readouterr() == ("", "")


# --- learning rates and means ---------------------------------------------------------------------------------------


@every_source
def test_a_learning_rate_is_told_which_part_is_done(source, tmp_path):
    trainer = recorder()
    data = source(numbered(N), tmp_path)
    train(trainer, data, epochs=2, learning_rate=lambda part: 1e-3 + part, generator=seeded(1), n_rows=N)
    done = [epoch * N + 5 * batch for epoch in range(2) for batch in range(5)]
    assert trainer.rates == pytest.approx([1e-3 + rows / (2 * N) for rows in done], abs=1e-15)


def test_linear_decay_is_flat_and_then_a_line():
    rate = linear_decay(0.3, hold=0.2)
    assert [rate(part) for part in (0.0, 0.1, 0.2)] == [0.3] * 3
    assert [rate(part) for part in (0.4, 0.6, 1.0)] == pytest.approx([0.225, 0.15, 0.0], abs=1e-16)


def test_cosine_decay_is_half_a_cosine():
    rate = cosine_decay(0.3)
    assert [rate(part) for part in (0.0, 1 / 3, 0.5, 1.0)] == pytest.approx([0.3, 0.225, 0.15, 0.0], abs=1e-16)


def test_the_machine_ends_with_the_mean_of_its_last_parameters():
    trainer = recorder()
    train(trainer, numbered(20), epochs=4, learning_rate=0.2, generator=seeded(1), average_from=0.5)
    for name, value in trainer.rbm.state_dict().items():
        expected = torch.stack([iterate[name] for iterate in trainer.iterates[8:]]).mean(0)
        torch.testing.assert_close(value, expected, rtol=0, atol=1e-14)


@pytest.mark.slow
def test_a_mean_is_of_about_a_thousand_evenly_spaced_parameters():
    trainer = recorder(batch_size=1)
    train(trainer, numbered(5), epochs=1000, learning_rate=0.2, generator=seeded(1), average_from=0.25)
    for name, value in trainer.rbm.state_dict().items():
        expected = torch.stack([iterate[name] for iterate in trainer.iterates[1250:]][::3]).mean(
            0
        )  # updates 1251, 1254, ...
        close = torch.stack([iterate[name] for iterate in trainer.iterates[1250:]]).mean(0)
        assert (value - close).abs().max() < 0.01
        torch.testing.assert_close(value, expected, rtol=0, atol=1e-13)


@pytest.mark.portable
def test_the_mean_of_a_machine_in_half_precision_is_kept_in_single():
    rbm = RBM(8, 4, generator=seeded(0), dtype=torch.bfloat16)
    trainer = Recorder(rbm, batch_size=5, steps=1, generator=seeded(2))
    train(trainer, numbered(20), epochs=4, learning_rate=0.2, generator=seeded(1), average_from=0)
    expected = torch.stack([iterate["weights"].double() for iterate in trainer.iterates]).mean(0)
    # Rounded once: half a step of bfloat16, and a little for means in the middle between two of its numbers.
    assert ((rbm.weights - expected).abs() <= (1 + 1e-4) * torch.finfo(torch.bfloat16).eps / 2 * expected.abs()).all()


# --- checkpoints ----------------------------------------------------------------------------------------------------


TRAINERS: dict[str, dict[str, object]] = {
    "CD": {},
    "persistent, centred": {"chains": torch.zeros(6, H), "offset_rate": 0.1, "weight_decay": 1e-3},
    "fast weights": {"chains": torch.zeros(6, H), "fast_rate": 0.1},
    "parallel tempering": {"chains": torch.zeros(6, H), "inverse_temperatures": torch.tensor([0.0, 0.5, 1.0])},
}


def run_of(
    source: Callable[[], object], options: dict[str, object], streams: str = "two"
) -> Callable[..., tuple[RBM, list[int]]]:
    """Return what trains from the same start each time it is called."""

    def run(**more) -> tuple[RBM, list[int]]:
        own = None if streams in ("none", "order") else seeded(2)
        order = {"none": None, "one": own, "two": seeded(5), "order": seeded(5)}[streams]
        trainer = FusedTrainer(machine(), batch_size=4, steps=2, generator=own, **options)
        told: list[int] = []
        then = more.pop("callback", lambda *_: None)

        def callback(update: int, epoch: int) -> None:
            told.append(update)
            then(update, epoch)

        settings = {"epochs": 3, "learning_rate": linear_decay(0.2), "average_from": 0.5, "n_rows": N} | more
        train(trainer, source(), generator=order, callback=callback, **settings)
        return trainer.rbm, told

    return run


def assert_goes_on(run: Callable[..., tuple[RBM, list[int]]], path: Path, *, stop: int, every: int) -> None:
    """Stop a run after an update, run again, and compare with a run that was never stopped."""
    torch.manual_seed(11)
    expected, told = run()
    torch.manual_seed(11)
    with pytest.raises(Stop):
        run(checkpoint=path, checkpoint_every=every, callback=stopping_at(stop))
    torch.manual_seed(99)  # of the process that goes on
    found, again = run(checkpoint=path, checkpoint_every=every)
    assert equal(found, expected)
    assert again == told[stop - stop % every :]


@pytest.mark.parametrize("options", TRAINERS.values(), ids=TRAINERS)
@pytest.mark.parametrize("stop", [1, 6, 7, 12, 13], ids="stopped after {}".format)
def test_a_run_that_was_stopped_goes_on_to_the_same_bits(options, stop, tmp_path):
    assert_goes_on(run_of(rows, options), tmp_path / "c", stop=stop, every=3 if stop > 1 else 1)


@every_source
@pytest.mark.parametrize("streams", ["none", "one", "two", "order"], ids="own generators: {}".format)
def test_data_go_on_where_they_were(source, streams, tmp_path):
    """Also where the order of the rows, the chains and the data are drawn from one stream."""
    run = run_of(lambda: source(rows(), tmp_path), TRAINERS["persistent, centred"], streams)
    assert_goes_on(run, tmp_path / "c", stop=9, every=1)


@pytest.mark.parametrize("kind", ["gaussian", "rectified"])
def test_other_units_go_on_to_the_same_bits(kind, tmp_path):
    units = {"visible": "gaussian", "hidden": "rectified" if kind == "rectified" else "bernoulli"}

    def run(**more) -> tuple[RBM, list[int]]:
        told: list[int] = []
        callback = more.pop("callback", lambda *_: None)
        trainer = FusedTrainer(machine(**units), batch_size=4, steps=1, chains=torch.zeros(3, H), generator=seeded(2))
        data = torch.randn(N, V, generator=seeded(8))

        def told_and(update: int, epoch: int) -> None:
            told.append(update)
            callback(update, epoch)

        train(trainer, data, epochs=2, learning_rate=0.01, generator=seeded(1), callback=told_and, **more)
        return trainer.rbm, told

    assert_goes_on(run, tmp_path / "c", stop=7, every=2)


def test_a_finished_run_is_found_finished(tmp_path):
    run = run_of(rows, {})
    first, _ = run(checkpoint=tmp_path / "c")
    again, told = run(checkpoint=tmp_path / "c")
    assert equal(first, again)
    assert told == []


def test_a_finished_run_can_go_on_for_longer(tmp_path):
    run = run_of(rows, {})
    run(checkpoint=tmp_path / "c", learning_rate=0.1)
    longer, told = run(checkpoint=tmp_path / "c", learning_rate=0.1, epochs=5, average_from=None)
    expected, _ = run(epochs=5, learning_rate=0.1, average_from=None)
    assert equal(longer, expected)
    assert told == list(range(19, 31))


def test_a_longer_run_averages_its_own_last_part(tmp_path):
    run = run_of(rows, {})
    run(checkpoint=tmp_path / "c", learning_rate=0.1, average_from=0)
    longer, _ = run(checkpoint=tmp_path / "c", learning_rate=0.1, epochs=5, average_from=0.8)
    expected, _ = run(epochs=5, learning_rate=0.1, average_from=0.8)
    assert equal(longer, expected)


KILLED = """
from test_rbm_training import TRAINERS, rows, run_of
print("ready", flush=True)
run = run_of(rows, TRAINERS["persistent, centred"])
run(checkpoint=sys.argv[1], checkpoint_every=1, epochs=10**9, average_from=None, learning_rate=1e-4)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="kills without asking")
def test_a_killed_run_leaves_a_whole_checkpoint_and_goes_on_to_the_same_bits(tmp_path):
    """Killed twice, in the second process while it goes on, where it does little else than writing checkpoints."""
    path = tmp_path / "c"
    for wait in (0.0037, 0.0191):
        before = path.stat().st_mtime_ns if path.exists() else 0
        process = start_process(__file__, KILLED, path, stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        while not path.exists() or path.stat().st_mtime_ns == before:  # however busy the machine is
            assert process.poll() is None
            signal.sigtimedwait([], 0.01)
        signal.sigtimedwait([], wait)
        warm.kill(process)
    _, facts = checkpoint_module.read_checkpoint(path, room="rbm")
    epochs = facts["epoch"] + 2
    run = run_of(rows, TRAINERS["persistent, centred"])
    settings = {"epochs": epochs, "average_from": None, "learning_rate": 1e-4}
    expected, _ = run(**settings)
    found, told = run(checkpoint=path, **settings)
    assert equal(found, expected)
    assert told[0] == facts["update"] + 1


def test_a_checkpoint_that_fails_leaves_the_one_before(tmp_path, monkeypatch):
    path, run = tmp_path / "c", run_of(rows, {})
    with pytest.raises(Stop):
        run(checkpoint=path, checkpoint_every=2, callback=stopping_at(3))
    before = path.read_bytes()

    def half(tensors, file, metadata) -> None:
        Path(file).write_bytes(before[:100])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint_module, "save_file", half)
    with pytest.raises(OSError, match=r"No space left"):
        run(checkpoint=path, checkpoint_every=2)
    assert path.read_bytes() == before
    monkeypatch.undo()
    assert equal(run(checkpoint=path)[0], run()[0])
    assert sorted(file.name for file in tmp_path.iterdir()) == ["c"]


OTHERS = [
    ({"n_hidden": 3}, {}, r"Found `machine` RBM\(n_visible=5, n_hidden=4\) in .*, where it is RBM\(.*n_hidden=3\) now"),
    ({"dtype": torch.float32}, {}, r"`parameters.hidden_bias` \(4,\) float64 in .*, where it is \(4,\) float32 now"),
    ({}, {"batch_size": 3}, "Found `batch_size` 4 in .*, where it is 3 now"),
    ({}, {"chains": torch.zeros(2, H)}, "Found `trainer.kernel.* in .*, where it is"),
    ({}, {"offset_rate": 0.1}, "Found `offset_rate` None in .*, where it is 0.1 now"),
    ({}, {"data": rows(22)}, "Found `n_rows` 23 in .*, where it is 22 now"),
]


@pytest.mark.parametrize(("machine_options", "others", "message"), OTHERS, ids=[case[2][:25] for case in OTHERS])
def test_a_checkpoint_of_something_else_is_refused(machine_options, others, message, tmp_path):
    options = {"batch_size": 4, "data": rows(), "chains": torch.zeros(6, H), **others}
    settings = {"epochs": 1, "learning_rate": 0.1, "checkpoint": tmp_path / "c"}
    chains = {"steps": 1, "generator": seeded(1)}
    first = FusedTrainer(RBM(V, H, dtype=F64), batch_size=4, chains=torch.zeros(6, H), **chains)
    train(first, rows(), generator=seeded(1), **settings)
    rbm = RBM(V, machine_options.get("n_hidden", H), dtype=machine_options.get("dtype", F64))
    before = {name: value.clone() for name, value in rbm.state_dict().items()}
    data = options.pop("data")
    options["chains"] = options["chains"][:, : rbm.n_hidden]
    with pytest.raises(ValueError, match=r"`checkpoint` should be of the same machine.*" + message):
        train(FusedTrainer(rbm, **chains, **options), data, generator=seeded(1), **settings)
    assert all(torch.equal(value, before[name]) for name, value in rbm.state_dict().items())


def test_other_data_than_the_checkpoints_are_noticed(tmp_path):
    run = run_of(lambda: [rows()[:4], rows()], {})
    with pytest.raises(Stop):
        run(checkpoint=tmp_path / "c", checkpoint_every=5, callback=stopping_at(5))
    run = run_of(lambda: [rows()[:4], rows()[:9]], {})
    with pytest.raises(ValueError, match=r"`data` should be those of the checkpoint. Found fewer than its 5 batches"):
        run(checkpoint=tmp_path / "c")


UNLIKE = {
    "steps": ({}, {"steps": 3}, "`steps` 2 in .*, where it is 3 now"),
    "weight_decay": ({}, {"weight_decay": 0.1}, "`weight_decay` 0.0 in .*, where it is 0.1 now"),
    "fast_rate": ({"fast_rate": 0.1}, {"fast_rate": 0.2}, "`fast_rate` 0.1 in .*, where it is 0.2 now"),
    "inverse_temperatures": (
        {"inverse_temperatures": torch.tensor([0.0, 0.5, 1.0])},
        {"inverse_temperatures": torch.tensor([0.0, 0.25, 1.0])},
        r"`inverse_temperatures` \[0.0, 0.5, 1.0\] in .*, where it is \[0.0, 0.25, 1.0\] now",
    ),
    "seed of the order": ({}, {"order": 6}, "`seed of generator` 5 in .*, where it is 6 now"),
    "seed of the chains": ({}, {"draws": 6}, "`seed of the trainer's generator` 2 in .*, where it is 6 now"),
    "average_from": ({}, {"average_from": 0.75}, "`average_from` 0.5 in .*, where it is 0.75 now"),
    "no mean": ({}, {"average_from": None}, "`average_from` 0.5 in .*, where it is None now"),
    "a row": ({}, {"spoil": slice(22, 23)}, "other data in .* than there are now"),
    "all rows": ({}, {"spoil": slice(None)}, "other data in .* than there are now"),
}
WHOLE = ("tensor", "array", "file")  # of others the first chunk is looked at


@pytest.mark.parametrize("stop", [7, None], ids=["stopped", "finished"])
@each(("name", "case"), [(n, c) for n in SOURCES for c in UNLIKE if c != "a row" or n in WHOLE])
def test_what_differs_from_the_checkpoint_is_named(name, case, stop, tmp_path):
    """Nothing that decides the result may be another one unnoticed, and the machine stays what it was."""
    tmp_path = tmp_path / f"{name}, {case}"
    tmp_path.mkdir()
    path, source, (options, others, message) = tmp_path / "c", SOURCES[name], UNLIKE[case]

    def run(spoil=slice(0), order=5, draws=2, callback=None, average_from=0.5, **options) -> RBM:
        data = rows()
        data[spoil] ^= 1
        settings = {"batch_size": 4, "steps": 2, "chains": torch.zeros(6, H), "generator": seeded(draws)} | options
        torch.manual_seed(0)
        rbm = machine()
        before = [parameter.clone() for parameter in rbm.parameters()]
        more = {"average_from": average_from, "callback": callback, "n_rows": N, "checkpoint": path}
        more |= {"generator": seeded(order), "checkpoint_every": 3}
        try:
            train(FusedTrainer(rbm, **settings), source(data, tmp_path), epochs=2, learning_rate=0.1, **more)
        except ValueError:
            assert all(torch.equal(a, b) for a, b in zip(rbm.parameters(), before, strict=True))
            raise
        return rbm

    with contextlib.suppress(Stop):
        run(callback=None if stop is None else stopping_at(stop), **options)
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r"`checkpoint` should be of the same machine, trainer and data.*" + message):
        run(**options | others)
    assert path.read_bytes() == before


def moved(x: Tensor, seed: int = 0) -> Tensor:
    """Return x with every entry moved by an ulp, up or down."""
    up = torch.rand(x.shape, generator=seeded(seed)) < 0.5
    return torch.nextafter(x, torch.where(up, math.inf, -math.inf).to(x))


LARGE = torch.Size([3001, 101])  # more than are looked at together


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("shape", [torch.Size([1, 1]), torch.Size([N, V]), LARGE], ids=str)
def test_data_that_differ_by_rounding_are_alike(shape, dtype):
    for seed in range(20 if shape != LARGE else 2):
        x = torch.randn(shape, generator=seeded(seed), dtype=dtype) + 3 * (seed % 2)
        known = fingerprint(x)
        ulp = torch.finfo(dtype).eps
        noise = [moved(x, seed), torch.nextafter(x, x + 1), torch.nextafter(x, 0 * x), x * (1 + ulp), x * (1 - 4 * ulp)]
        for other in noise:
            assert not torch.equal(other, x)
            assert alike(json.loads(json.dumps(known)), fingerprint(other))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_data_that_were_whitened_in_another_order_are_alike(dtype):
    """Single precision, where the sums of a product have their terms in reverse, rounded to the type."""
    x, mixing = torch.randn(500, 40, generator=seeded(0)), torch.randn(40, 40, generator=seeded(1))
    found = []
    for order in (range(40), reversed(range(40))):
        total = torch.zeros(500, 40)
        for k in order:
            total = total + x[:, k, None] * mixing[k]
        found.append(total.to(dtype))
    assert not torch.equal(*found)
    assert alike(*map(fingerprint, found))


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_other_data_are_not_alike(dtype):
    """An entry that is another by a thousandth of it, wherever it is, if it is not small among the others."""
    x = 1 + torch.rand(N, V, generator=seeded(0), dtype=dtype)
    known = fingerprint(x)
    for entry in range(x.numel()):
        other = x.clone()
        other.view(-1)[entry] *= 1.001
        assert not alike(known, fingerprint(other)), entry
    for a, b in itertools.combinations(range(N), 2):
        order = torch.arange(N)
        order[a], order[b] = b, a
        assert not alike(known, fingerprint(x[order])), (a, b)
    others = [
        x[:-1],
        x.T.contiguous(),
        x.flip(0),
        x.flip(1),
        -x,
        x.to(F64 if dtype == torch.float32 else torch.float32),
    ]
    others += [torch.cat([x[:-1], x[:1]]), x.roll(1, 0), 1 + torch.rand(N, V, generator=seeded(1), dtype=dtype)]
    assert not any(alike(known, fingerprint(other)) for other in others)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_of_many_is_not_alike(dtype):
    x = torch.randn(LARGE, generator=seeded(0)).to(dtype)
    half = len(x) // 2  # of another piece
    for a, b in ((0, 1), (0, half), (half, 2 * half)):
        order = torch.arange(len(x))
        order[a], order[b] = b, a
        assert not alike(fingerprint(x), fingerprint(x[order]))


def test_numbers_that_are_not_finite_are_compared_exactly():
    x = torch.randn(LARGE, generator=seeded(0), dtype=F64)

    def with_(*values: float, rows: tuple[int, ...] = (3, 2000)) -> dict[str, object]:
        other = moved(x)
        for row, value in zip(rows, values, strict=True):
            other[row, 4] = value
        return fingerprint(other)

    known = with_(math.nan, math.inf)
    assert alike(known, with_(math.nan, math.inf))
    assert alike(known, with_(-torch.tensor(math.nan).item(), math.inf))
    others = [with_(math.inf, math.nan), with_(math.nan, -math.inf), with_(math.nan, 0.0), with_(2.0, math.inf)]
    others += [with_(math.nan, math.inf, rows=rows) for rows in ((3, 2001), (2000, 3))]
    assert not any(alike(known, other) for other in [*others, fingerprint(x)])
    a, b = 3, 3 + 2**20 // x[0].nbytes  # the same place of two pieces
    assert not alike(with_(math.nan, 0.0, rows=(a, b)), with_(math.nan, 0.0, rows=(b, a)))


def test_integers_are_compared_exactly():
    x = torch.randint(2**62, (N, V), generator=seeded(0))
    assert alike(fingerprint(x), fingerprint(x.clone()))
    other = x.clone()
    other[4, 2] ^= 1
    assert not alike(fingerprint(x), fingerprint(other))


def test_settings_are_alike_to_their_last_digits():
    known = {"rate": 0.1, "steps": 2, "names": ["a", 0.3], "none": None}
    assert alike(known, known | {"rate": math.nextafter(0.1, 1), "names": ["a", 0.1 + 0.2]})
    for other in ({"rate": 0.1 + 1e-9}, {"steps": 3}, {"names": ["b", 0.3]}, {"names": ["a"]}, {"none": 0.0}):
        assert not alike(known, known | other)


@pytest.mark.parametrize("stop", [7, None], ids=["stopped", "finished"])
@pytest.mark.parametrize("name", SOURCES)
def test_data_that_another_processor_has_rounded_are_gone_on_with(name, stop, tmp_path):
    """Data, the temperatures and the biases that are theirs; a thousandth more in one entry is refused."""
    data = torch.randn(N, V, generator=seeded(8), dtype=F64)
    betas, reference = torch.tensor([0.0, 1 / 3, 1.0]), data.mean(0)

    def run(data: Tensor, betas: Tensor, reference: Tensor, callback=None) -> tuple[RBM, list[int]]:
        torch.manual_seed(0)
        rbm, told = machine(visible="gaussian"), []
        options = {"chains": torch.zeros(6, H), "inverse_temperatures": betas, "reference": reference}
        trainer = FusedTrainer(rbm, batch_size=4, steps=1, generator=seeded(2), **options)
        settings = {"epochs": 2, "learning_rate": 0.01, "n_rows": N, "generator": seeded(5), "checkpoint_every": 3}
        told_and = lambda update, epoch: (told.append(update), callback and callback(update, epoch))  # noqa: E731
        source = SOURCES[name](data, tmp_path)
        train(trainer, source, checkpoint=path, callback=told_and, **settings)
        return rbm, told

    path = tmp_path / "never stopped"
    expected, all_told = run(data, betas, reference)
    path = tmp_path / "c"
    with contextlib.suppress(Stop):
        run(data, betas, reference, callback=None if stop is None else stopping_at(stop))
    more = data.clone()
    more[:, 2] *= 1.001
    with pytest.raises(ValueError, match=r"other data in .* than there are now"):
        run(more, betas, reference)
    for others, what in (
        ((betas**1.001, reference), "inverse_temperatures"),
        ((betas, reference * 1.001), "reference"),
    ):
        with pytest.raises(ValueError, match=rf"`{what}` \[.*\] in .*, where it is \[.*\] now"):
            run(data, *others)
    betas[1] = moved(betas[1])
    found, told = run(moved(data), betas, moved(reference))
    assert told == (all_told[6:] if stop else [])
    for a, b in zip(found.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)  # the temperatures are in single precision


def test_fewer_epochs_than_are_done_are_refused(tmp_path):
    run = run_of(rows, {})
    run(checkpoint=tmp_path / "c")
    with pytest.raises(
        ValueError, match=r"`checkpoint` should be of no more epochs than .* Found 3 in .*, where it is 2 now"
    ):
        run(checkpoint=tmp_path / "c", epochs=2)


def test_the_same_objects_go_on_where_they_were_stopped(tmp_path):
    """As in a notebook, where generators and machine are those of the call that was interrupted."""
    own, order, rbm = seeded(2), seeded(5), machine()
    trainer = FusedTrainer(rbm, batch_size=4, steps=2, generator=own)
    settings = {"epochs": 3, "learning_rate": 0.1, "generator": order, "checkpoint": tmp_path / "c"}
    with pytest.raises(Stop):
        train(trainer, rows(), checkpoint_every=3, callback=stopping_at(8), **settings)
    train(trainer, rows(), **settings)
    assert equal(rbm, run_of(rows, {})(learning_rate=0.1, average_from=None)[0])


def test_a_file_that_is_no_checkpoint_is_refused(tmp_path):
    from safetensors.torch import save_file

    run = run_of(rows, {})
    (tmp_path / "text").write_text("no checkpoint")
    save_file({"x": torch.zeros(1)}, tmp_path / "tensors")
    save_file({"x": torch.zeros(1)}, tmp_path / "old", metadata={"toolkit.rbm": '{"format": 0}'})
    for name, what in (("text", "not a safetensors"), ("tensors", "of something else"), ("old", "of another version")):
        with pytest.raises(
            ValueError, match=f"should be a file that `train` wrote, or a new one. Found .*{name}, .*{what}"
        ):
            run(checkpoint=tmp_path / name)


# --- divergence -----------------------------------------------------------------------------------------------------


def test_parameters_that_leave_the_finite_numbers_stop_training(tmp_path):
    path = tmp_path / "c"
    trainer = Recorder(machine(8), batch_size=5, steps=1, generator=seeded(2))
    rate = [0.1]

    def callback(update: int, epoch: int) -> None:
        if update == 110:
            trainer.rbm.visible_bias.data[3] = math.nan

    with pytest.raises(
        DivergenceError, match=r"`(weights|visible_bias)` is not finite after update 120; after update 100 all was"
    ) as found:
        train(
            trainer,
            numbered(20),
            epochs=100,
            learning_rate=lambda part: rate[0],
            generator=seeded(1),
            checkpoint=path,
            checkpoint_every=60,
            callback=callback,
        )
    assert found.value.update == 120
    assert found.value.last_good == 100
    assert isinstance(found.value, ArithmeticError)
    assert all(torch.equal(value, trainer.iterates[99][name]) for name, value in trainer.rbm.state_dict().items())
    tensors, facts = checkpoint_module.read_checkpoint(path, room="rbm")
    assert facts["update"] == 60
    assert torch.equal(tensors["parameters.weights"], trainer.iterates[59]["weights"])
    assert "Lower the learning rate" in str(found.value)
    assert f"`{path}` stays" in str(found.value)


def test_a_run_that_went_on_and_diverges_is_back_at_its_checkpoint(tmp_path):
    path, run = tmp_path / "c", run_of(rows, {})
    with pytest.raises(Stop):
        run(checkpoint=path, checkpoint_every=5, callback=stopping_at(5))
    before = path.read_bytes()
    trainer = FusedTrainer(machine(), batch_size=4, steps=2, generator=seeded(2))

    def callback(update: int, epoch: int) -> None:
        trainer.rbm.weights.data[0, 0] = math.nan

    settings = {"epochs": 3, "learning_rate": 0.1, "generator": seeded(5), "checkpoint": path, "average_from": 0.5}
    with pytest.raises(DivergenceError) as found:
        train(trainer, rows(), callback=callback, **settings)
    assert found.value.last_good == 5
    assert path.read_bytes() == before
    kept, _ = checkpoint_module.read_checkpoint(path, room="rbm")
    assert all(torch.equal(value, kept[f"parameters.{name}"]) for name, value in trainer.rbm.state_dict().items())


def test_gaussian_units_at_a_high_rate_diverge_by_themselves():
    trainer = FusedTrainer(machine(visible="gaussian"), batch_size=5, steps=1, generator=seeded(2))
    data = 10 * torch.randn(40, V, generator=seeded(8), dtype=F64)
    with pytest.raises(DivergenceError):
        train(trainer, data, epochs=40, learning_rate=10.0, generator=seeded(1))
    assert all(parameter.isfinite().all() for parameter in trainer.rbm.parameters())


def test_what_a_trainer_carries_on_is_looked_at():
    """Fast weights that are no numbers make all chains zero, and the parameters stay finite."""
    trainer = recorder(chains=torch.zeros(6, H), fast_rate=0.1)

    def callback(update: int, epoch: int) -> None:
        if update == 5:
            state = trainer.state_dict()
            state["fast.hidden_bias"][0] = math.inf
            trainer.load_state_dict(state)

    with pytest.raises(DivergenceError, match=r"`fast.hidden_bias` is not finite"):
        train(trainer, numbered(20), epochs=30, learning_rate=1e-3, generator=seeded(1), callback=callback)


def test_large_finite_parameters_are_no_divergence():
    """Their sum is infinite in float32, they are not."""
    rbm = RBM(4, 2, dtype=torch.float32)
    with torch.no_grad():
        rbm.hidden_bias.fill_(3e38)
    trainer = FusedTrainer(rbm, batch_size=5, steps=1, generator=seeded(1))
    assert train(trainer, numbered(10, 4), epochs=1, learning_rate=0.1, generator=seeded(1)) == 2


def test_a_machine_that_is_not_finite_is_refused():
    trainer = recorder()
    with torch.no_grad():
        trainer.rbm.weights[0, 0] = math.inf
    with pytest.raises(ValueError, match=r"parameters should be finite"):
        train(trainer, numbered(10), epochs=1, learning_rate=0.1, generator=seeded(1))


# --- input ----------------------------------------------------------------------------------------------------------


def spoilt(value: float, dtype: torch.dtype = F64) -> Tensor:
    data = numbered(200).to(dtype)
    data[150, 3] = value
    return data


BAD = {
    "NaN": ("bernoulli", spoilt(math.nan), ValueError, "should be finite. Found nan. It is in row 150"),
    "infinite": ("bernoulli", spoilt(-math.inf), ValueError, "should be finite. Found -inf. It is in row 150"),
    "above 1": ("bernoulli", spoilt(1.5), ValueError, r"should be between 0 and 1. Found 1.5. It is in row 150"),
    "below 0": ("bernoulli", spoilt(-0.5), ValueError, "should be between 0 and 1. Found -0.5. It is in row 150"),
    "grey integers": (
        "bernoulli",
        spoilt(200, torch.uint8),
        ValueError,
        r"should be 0 or 1 if they are integers. Found 200. Compare .*`data >= 128`.*, or divide .* 150",
    ),
    "negative integers": (
        "bernoulli",
        spoilt(-1, torch.int16),
        ValueError,
        "should be 0 or 1 if they are integers. Found -1.* in row 150",
    ),
    "real NaN": ("gaussian", spoilt(math.nan), ValueError, "should be finite. Found nan. It is in row 150"),
    "too large for the machine": ("gaussian float32", spoilt(1e300), ValueError, "should be finite. Found inf"),
    "two categories": ("categorical", spoilt(3), ValueError, "should have one 1 in each group of 4. .* in row"),
    "other columns": ("bernoulli", numbered(20, 7), ValueError, r"should have shape \(N, 8\). Found \(20, 7\)"),
    "images": ("bernoulli", torch.zeros(9, 2, 4), ValueError, r"should have shape \(N, 8\). Found \(9, 2, 4\)"),
    "complex": ("bernoulli", torch.zeros(9, 8) * 1j, TypeError, "should be real numbers. Found torch.complex64"),
    "empty": ("bernoulli", torch.zeros(0, 8), ValueError, "should have at least one row. Found none"),
}
HANDED = {
    "tensor": lambda data, path: data,
    "array": lambda data, path: data.numpy(),
    "file": lambda data, path: file_of(path, data) if len(data) else data,
    "chunks": lambda data, path: list(data.split(40)),
}


@pytest.mark.parametrize("handed", HANDED.values(), ids=HANDED)
@pytest.mark.parametrize(("kind", "data", "error", "message"), BAD.values(), ids=BAD)
def test_data_that_are_not_the_machines_are_refused(kind, data, error, message, handed, tmp_path):
    units, _, dtype = kind.partition(" ")
    options = {"categories": 4} if units == "categorical" else {}
    rbm = RBM(2 if options else 8, 3, visible=units, dtype=getattr(torch, dtype or "float64"), **options)
    trainer = FusedTrainer(rbm, batch_size=50, steps=1, generator=seeded(1))
    with pytest.raises(error, match=r"`data` " + message):
        train(trainer, handed(data, tmp_path), epochs=2, learning_rate=0.1, generator=seeded(1))


GOOD = {
    "bool": ("bernoulli", numbered(9).bool()),
    "int64": ("bernoulli", numbered(9).long()),
    "probabilities": ("bernoulli", torch.rand(9, 8, generator=seeded(1))),
    "half precision": ("bernoulli", numbered(9).half()),
    "numbers": ("gaussian", 9 * torch.randn(9, 8, generator=seeded(1))),
    "integers": ("gaussian", numbered(9) * 200),
    "categories": ("categorical", torch.eye(4, dtype=torch.bool).repeat(3, 2)),
}


@pytest.mark.parametrize("handed", HANDED.values(), ids=HANDED)
@pytest.mark.parametrize(("kind", "data"), GOOD.values(), ids=GOOD)
def test_data_of_any_type_are_taken(kind, data, handed, tmp_path):
    """They lead to the same machine as the same numbers in float64."""
    found = []
    for values in (data, data.double()):
        size, options = (2, {"categories": 4}) if kind == "categorical" else (8, {})
        rbm = RBM(size, 3, visible=kind, dtype=F64, generator=seeded(0), **options)
        trainer = FusedTrainer(rbm, batch_size=4, steps=1, generator=seeded(1))
        train(trainer, handed(values, tmp_path), epochs=2, learning_rate=1e-4, generator=seeded(1))
        found.append(rbm)
    assert equal(*found)


def test_values_of_a_source_are_looked_at_once():
    """In the first epoch, when they come: what is spoilt later is left to the check of the parameters."""
    epochs = []

    def source() -> list[Tensor]:
        epochs.append(1)
        data = numbered(20)
        return [data] if len(epochs) == 1 else [data * 3]

    train(recorder(), source, epochs=2, learning_rate=1e-3, generator=seeded(1))
    assert len(epochs) == 2


def test_chunks_with_labels_are_refused():
    loader = DataLoader(TensorDataset(numbered(9), torch.arange(9)), batch_size=3)
    with pytest.raises(ValueError, match=r"should be one array or tensor, without labels. Found 2 parts"):
        train(recorder(), loader, epochs=1, learning_rate=0.1, generator=seeded(1))


def test_what_a_function_raises_comes_out():
    def source() -> Iterator[Tensor]:
        yield numbered(9)
        raise FileNotFoundError("part 2")

    with pytest.raises(FileNotFoundError, match=r"part 2"):
        train(recorder(), source, epochs=1, learning_rate=0.1, generator=seeded(1))


WRONG = [
    ({"epochs": 0}, "`epochs` should be a positive integer. Found 0"),
    ({"epochs": 2.0}, "`epochs` should be a positive integer. Found 2.0"),
    ({"learning_rate": 0.0}, "`learning_rate` should be positive and finite. Found 0.0"),
    ({"learning_rate": math.inf}, "`learning_rate` should be positive and finite. Found inf"),
    (
        {"learning_rate": lambda part: -part},
        "`learning_rate` should return finite numbers, not negative. Found -0.5 at 0.5",
    ),
    ({"learning_rate": lambda part: math.nan}, "`learning_rate` should return finite numbers, .* Found nan at 0"),
    ({"checkpoint": "no/such/folder/file"}, "`checkpoint` should be a file in a folder that exists. Found 'no/such"),
    ({"checkpoint_every": 0}, "`checkpoint_every` should be a positive integer. Found 0"),
    ({"average_from": 1.0}, "`average_from` should be at least 0 and less than 1. Found 1.0"),
    ({"n_rows": -1}, "`n_rows` should be an integer from 0. Found -1"),
    ({"n_rows": 11}, "`n_rows` should be how many rows there are, or None. Found 11, and 10 rows"),
    ({"epochs": True}, "`epochs` should be a positive integer. Found True"),
    ({"learning_rate": "a"}, "`learning_rate` should be positive and finite. Found 'a'"),
    ({"learning_rate": lambda part: "a"}, "`learning_rate` should return finite numbers, .* Found 'a' at 0"),
    ({"average_from": "a"}, "`average_from` should be at least 0 and less than 1. Found 'a'"),
    ({"generator": 3}, "`generator` should be a torch.Generator, or None. Found int"),
    ({"callback": "foo"}, "`callback` should be a function, or None. Found str"),
    ({"checkpoint": "."}, "`checkpoint` should be a file, not a folder. Found '.'"),
    ({"checkpoint": 3}, "`checkpoint` should be a path, or None. Found 3"),
    ({"data": "abc"}, "`data` should be a tensor, an array, or give chunks.* Found a str"),
    ({"data": ["abc"]}, "`data` should be numbers, or chunks of them. Found a str"),
    ({"data": np.array([["a"] * 8])}, "`data` should be numbers, or chunks of them. Found an array of <U1"),
    ({"data": sparse.csr_array(np.eye(8))}, r"`data` should be a tensor, .* Found a csr_array. `toarray\(\)` makes"),
    ({"data": torch.eye(8).to_sparse()}, "`data` should be a dense tensor. Found torch.sparse_coo"),
    ({"data": 3}, "`data` should be a tensor, an array, or give chunks.* Found a int"),
    ({"data": [numbered(9)], "average_from": 0.5}, "`n_rows` should be given with chunks if"),
    ({"data": [numbered(9)], "learning_rate": linear_decay(0.1)}, "`n_rows` should be given with chunks if"),
    ({"data": []}, "`data` should have at least one row. Found none"),
]


@pytest.mark.parametrize(
    ("options", "message"), WRONG, ids=[message[:40] + str(i) for i, (_, message) in enumerate(WRONG)]
)
def test_wrong_arguments_are_refused(options, message):
    settings = {"data": numbered(10), "epochs": 1, "learning_rate": 0.1, "generator": seeded(1), **options}
    with pytest.raises((TypeError, ValueError), match=message):
        train(recorder(), settings.pop("data"), **settings)


def test_numbers_of_any_type_are_written(tmp_path):
    numbers = {"epochs": np.int64(2), "checkpoint_every": np.int32(2), "n_rows": np.int64(N)}
    numbers |= {"average_from": np.float64(0.5), "learning_rate": np.float64(0.1)}
    run = run_of(lambda: [rows()], {"weight_decay": np.float64(0.01)})
    found, _ = run(**numbers, checkpoint=tmp_path / "c")
    run = run_of(lambda: [rows()], {"weight_decay": 0.01})
    again, told = run(epochs=2, learning_rate=0.1, checkpoint=tmp_path / "c")
    assert equal(found, again)
    assert told == []


@pytest.mark.parametrize("schedule", [linear_decay, cosine_decay])
def test_wrong_schedules_are_refused(schedule):
    with pytest.raises(ValueError, match=r"`initial` should be positive and finite. Found -0.1"):
        schedule(-0.1)
    with pytest.raises(ValueError, match=r"`initial` should be positive and finite. Found 'a'"):
        schedule("a")
    for hold in (1, "a"):
        with pytest.raises(ValueError, match=rf"`hold` should be at least 0 and less than 1. Found {hold!r}"):
            linear_decay(0.1, hold=hold)


@pytest.mark.parametrize("n_rows", [N - 1, N + 1, 2 * N])
@pytest.mark.parametrize("name", ["list of chunks", "function", "DataLoader"])
def test_another_number_of_rows_than_was_told_is_noticed(name, n_rows, tmp_path):
    trainer = recorder()
    message = f"`n_rows` should be how many rows an epoch has. Found {n_rows}, and an epoch of {N}"
    with pytest.raises(ValueError, match=message):
        train(
            trainer,
            SOURCES[name](numbered(N), tmp_path),
            epochs=3,
            learning_rate=linear_decay(0.1),
            generator=seeded(1),
            n_rows=n_rows,
        )
    assert len(trainer.batches) == math.ceil(N / 5)


def test_a_loader_that_drops_its_last_rows_is_counted_without_them():
    trainer = recorder()
    loader = DataLoader(numbered(N), batch_size=7, drop_last=True)
    train(trainer, loader, epochs=2, learning_rate=linear_decay(0.1), generator=seeded(1))
    assert trainer.rates[5] == pytest.approx(0.05, abs=1e-15)


def test_data_in_the_byte_order_of_another_processor(tmp_path):
    machines = []
    array = np.random.default_rng(0).random((N, 8))
    for values in (array, array.astype(">f8"), file_of(tmp_path, torch.from_numpy(array))):
        trainer = recorder()
        if isinstance(values, np.memmap):
            np.save(tmp_path / "data.npy", array.astype(">f8"))
            values = np.load(tmp_path / "data.npy", mmap_mode="r")
        train(trainer, values, epochs=1, learning_rate=0.1, generator=seeded(1))
        machines.append(torch.cat(trainer.batches).sort(0).values)
    assert torch.equal(machines[0], machines[1])
    assert torch.equal(machines[0], machines[2])


# --- ranks ----------------------------------------------------------------------------------------------------------


class Steady(Recorder):
    """A recorder whose draws are those of the same number everywhere: they do not depend on who draws."""

    def step(self, data: Tensor, *, learning_rate: float) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Tensor, "uniform_", lambda self, *_, **__: self.fill_(0.37))
            patch.setattr(Tensor, "random_", lambda self, *_, **__: self.fill_(int(0.37 * 2**31)))
            super().step(data, learning_rate=learning_rate)


def ends_of(world: int) -> list[int]:
    """Return where the ranks' rows of data begin: unevenly, and with a rank that has none."""
    return {2: [0, 4, N], 3: [0, 11, 11, N]}[world]


RANKED = {name: options for name, options in TRAINERS.items() if name != "parallel tempering"}
M = 7


def chains_of(options: dict[str, object]) -> Tensor | None:
    """Return chains that are all different, if there are any."""
    return None if "chains" not in options else numbered(M, H).flip(1).double()


def as_rank(rank: int, world: int, folder: Path) -> dict[str, object]:
    """Train as one of several ranks: the batches that it is given, and the parameters that it gets."""
    group = torch.distributed.group.WORLD
    assert group is not None
    data = rows()
    mine = data[slice(*ends_of(world)[rank : rank + 2])]
    found: dict[str, object] = {}
    for name, options in RANKED.items():
        chains = chains_of(options)
        options = options | ({} if chains is None else {"chains": shard(chains, group)})
        rbm = machine()
        if rank:  # those of the first rank count
            torch.nn.init.zeros_(rbm.weights)
        trainer = Steady(rbm, batch_size=5, steps=1, generator=rank_generator(2, group), group=group, **options)
        source = list(mine.split(3)) if name == "CD" else mine
        settings = {"epochs": 2, "learning_rate": linear_decay(0.2), "n_rows": len(mine)}
        train(trainer, source, generator=rank_generator(1, group), **settings)
        found[name] = trainer.batches, trainer.rates, dict(rbm.state_dict()), trainer.state_dict()

    def stopped_or_not(path: Path | None, stop: int) -> tuple[list[Tensor], list[int]]:
        own = rank_generator(2, group)
        options = {"chains": shard(torch.zeros(M, H), group), "offset_rate": 0.1, "generator": own, "group": group}
        trainer = FusedTrainer(machine(), batch_size=3, steps=1, **options)
        told: list[int] = []

        def callback(update: int, epoch: int) -> None:
            told.append(update)
            stopping_at(stop)(update, epoch)

        settings = {"epochs": 2, "learning_rate": 0.1, "checkpoint": path, "checkpoint_every": 4}
        with contextlib.suppress(Stop):
            train(trainer, mine, generator=own, callback=callback, **settings)
        assert trainer.chains is not None
        return [*trainer.rbm.parameters(), trainer.chains], told

    found["never stopped"] = stopped_or_not(None, 0)
    stopped_or_not(folder / "c", 6)
    found["went on"] = stopped_or_not(folder / "c", 0)

    errors = []
    for spoil in SPOILT.values():
        options = {"chains": torch.zeros(3, H), "fast_rate": 0.1, "generator": seeded(1), "group": group}
        rbm = machine()
        if rank:
            torch.nn.init.zeros_(rbm.weights)
        trainer = FusedTrainer(rbm, batch_size=5, steps=1, **options)
        settings = {"data": data, "epochs": 2, "learning_rate": 0.1, "generator": seeded(1)}
        settings |= spoil(trainer, rank)
        try:
            train(trainer, settings.pop("data"), **settings)
            errors.append("")
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
            if isinstance(error, DivergenceError):
                found["after divergence"] = dict(rbm.state_dict())
    found["errors"] = errors
    return found


def raises_in_the_middle() -> Iterator[Tensor]:
    yield rows()[:9]
    raise FileNotFoundError("part 2")


def infinite_fast_weights(trainer: FusedTrainer, rank: int) -> dict[str, object]:
    state = trainer.state_dict()
    state["fast.weights"].fill_(math.inf if rank else 0.0)
    trainer.load_state_dict(state)
    return {}


# What is wrong on all ranks but the first.
SPOILT: dict[str, Callable[[FusedTrainer, int], dict[str, object]]] = {
    "data": lambda trainer, rank: {"data": rows() * (1 + rank)},
    "an argument": lambda trainer, rank: {"epochs": 2 - 2 * rank},
    "another argument": lambda trainer, rank: {"epochs": 2 + rank},
    "a later chunk": lambda trainer, rank: {"data": raises_in_the_middle if rank else [rows()]},
    "the trainer": infinite_fast_weights,
    "nothing anywhere": lambda trainer, rank: {"data": rows()[:0]},
}


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow)], ids="{} ranks".format)
def ranks(request, tmp_path_factory) -> tuple[list[dict], Path]:
    folder = tmp_path_factory.mktemp("ranks")
    return answers_of_ranks(__file__, request.param, folder), folder


@pytest.mark.parametrize("name", RANKED)
def test_ranks_make_the_updates_of_one_process_on_the_joined_batches(ranks, name):
    found = [rank[name] for rank in ranks[0]]
    options, chains = RANKED[name], chains_of(RANKED[name])
    options = options | ({} if chains is None else {"chains": chains})
    alone = Steady(machine(), batch_size=5 * len(found), steps=1, generator=seeded(1), **options)
    n_updates = len(found[0][0])
    assert n_updates == sum(1 for _ in found[-1][0]) > 4
    for update in range(n_updates):
        joined = torch.cat([batches[update] for batches, *_ in found])
        alone.step(joined, learning_rate=found[0][1][update])
    state = alone.state_dict()
    for rank, (_, rates, parameters, own) in enumerate(found):
        assert rates == found[0][1]
        for key, value in alone.rbm.state_dict().items():
            torch.testing.assert_close(parameters[key], value, rtol=0, atol=1e-12)
            assert torch.equal(parameters[key], found[0][2][key])
        if chains is not None:  # split, not copied
            first, last = len(chains) * rank // len(found), len(chains) * (rank + 1) // len(found)
            key = next(key for key, value in state.items() if value.shape == chains.shape)
            assert torch.equal(own[key], state[key][first:last])


@pytest.mark.parametrize("name", RANKED)
def test_ranks_give_every_row_once(ranks, name):
    found = [rank[name][0] for rank in ranks[0]]
    ends = ends_of(len(found))
    for rank, batches in enumerate(found):
        mine, half = rows()[ends[rank] : ends[rank + 1]], len(batches) // 2
        for epoch in (batches[:half], batches[half:]):
            assert sorted(torch.cat(epoch).tolist()) == sorted(mine.tolist())


def test_a_rank_with_few_rows_spreads_them(ranks):
    found = [[len(batch) for batch in rank["fast weights"][0]] for rank in ranks[0]]
    expected = {2: [[2, 1, 1, 0], [5, 5, 5, 4]], 3: [[5, 5, 1], [0, 0, 0], [5, 5, 2]]}[len(found)]
    assert found == [sizes * 2 for sizes in expected]


def test_ranks_draw_different_chains_from_equal_starts(ranks):
    found = ranks[0]
    parts = [rank["never stopped"][0][-1] for rank in found]
    assert sum(len(part) for part in parts) == M
    assert len({str(part[:2].tolist()) for part in parts}) == len(parts)


def test_stopped_ranks_go_on_to_the_same_bits(ranks):
    for rank in ranks[0]:
        (expected, told), (found, again) = rank["never stopped"], rank["went on"]
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
        assert again == told[4:]


def test_a_checkpoint_of_other_ranks_is_refused(ranks):
    trainer = FusedTrainer(machine(), batch_size=3, steps=1, generator=seeded(1))
    message = rf"Found `number of ranks` {len(ranks[0])} in .*, where it is 1 now"
    with pytest.raises(ValueError, match=message):
        train(trainer, rows(), epochs=2, learning_rate=0.1, generator=None, checkpoint=ranks[1] / "c")


def test_an_error_on_one_rank_is_raised_on_all(ranks):
    found = ranks[0]
    for others, (name, error) in zip(
        zip(*(rank["errors"] for rank in found), strict=True), EXPECTED.items(), strict=True
    ):
        assert name in SPOILT
        for rank, text in enumerate(others):
            assert re.match(error[min(rank, 1)], text), (name, rank, text)


EXPECTED = {
    "data": (
        "RuntimeError: Rank 1 stopped. ValueError: `data` should be 0 or 1 .* Found 2.",
        "ValueError: `data` should be 0 or 1 .* Found [23].",
    ),
    "an argument": ("RuntimeError: Rank 1 stopped. .*`epochs`", "ValueError: `epochs`"),
    "another argument": ("ValueError: `epochs` should be the same on all ranks. Found 2, 3",) * 2,
    "a later chunk": ("RuntimeError: Rank 1 stopped. FileNotFoundError: part 2", "FileNotFoundError: part 2"),
    "the trainer": (
        "DivergenceError: Training diverged: `a part of another rank's state` is not finite",
        "DivergenceError: Training diverged: `fast.weights` is not finite",
    ),
    "nothing anywhere": ("ValueError: `data` should have at least one row. Found none",) * 2,
}


def test_after_divergence_ranks_have_the_same_parameters(ranks):
    """Those of the first rank at the start: nothing has been checked since."""
    for rank in ranks[0]:
        assert all(torch.equal(value, machine().state_dict()[name]) for name, value in rank["after divergence"].items())


def test_shards_are_every_row_once():
    class Group:
        pass

    for n, world in ((23, 4), (3, 4), (8, 2)):
        parts = []
        for rank in range(world):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("toolkit._distributed.get_rank", lambda group, rank=rank: rank)
                patch.setattr("toolkit._distributed.get_world_size", lambda group, world=world: world)
                parts.append(shard(torch.arange(n), Group()))
                assert rank_generator(5, Group()).initial_seed() == 5 + rank
        assert torch.equal(torch.cat(parts), torch.arange(n))
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


# --- memory ---------------------------------------------------------------------------------------------------------

BOUNDED = """
import sys
import numpy as np, torch
from toolkit.rbm import RBM, FusedTrainer, linear_decay, train
torch.set_num_threads(1)
kind, path, checkpoint = sys.argv[1:]
generator = torch.Generator().manual_seed(0)
def trainer():
    return FusedTrainer(RBM(784, 500, generator=generator), batch_size=100, steps=1, chains=torch.zeros(100, 500),
                        generator=generator)
def run(data, **options):
    train(trainer(), data, epochs=1, learning_rate=linear_decay(0.01), generator=generator, **options)
run(torch.zeros(300, 784, dtype=torch.uint8), checkpoint=checkpoint + "0")
if kind == "file":
    data = np.load(path, mmap_mode="r")
else:
    data = torch.from_numpy(np.load(path))[:20_000].clone()
def resident(name):
    line = next(line for line in open("/proc/self/status") if line.startswith(name))
    return int(line.split()[1]) / 1024
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # forget the peak so far
before = resident("VmRSS")
run(data, checkpoint=checkpoint, average_from=0.5)
print(resident("VmHWM") - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="asks Linux for the peak of memory")
@pytest.mark.parametrize("kind", ["tensor", "file"])
def test_memory_stays_bounded(kind, tmp_path):
    """Megabytes over the data, of a tensor; and of a file of 30 MB, of which one chunk is in memory."""
    array = np.lib.format.open_memmap(tmp_path / "x.npy", mode="w+", dtype=np.uint8, shape=(40_000, 784))
    for first in range(0, len(array), 10_000):
        array[first : first + 10_000] = np.random.default_rng(first).integers(2, size=(10_000, 784), dtype=np.uint8)
    array.flush()
    del array
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", BOUNDED, kind, str(tmp_path / "x.npy"), str(tmp_path / "checkpoint")]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert float(run.stdout) < 15
