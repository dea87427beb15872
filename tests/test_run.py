"""The core of resumable runs, by a kind of run of its own: gradient descent on a line, with noise that is drawn.

The two rooms that use the core have tests of their own. Here the core is tested by itself: a run that is stopped,
killed or split ends with the same bits, one that diverges goes back, and a checkpoint of another run is refused.
"""

import contextlib
import math
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import warm
from interrupted import Stop, answers_of_ranks, start_process, stopping_at
from torch import Tensor
from torch.distributed import all_reduce
from values import seeded

from toolkit import _checkpoint as checkpoint_module
from toolkit._checkpoint import fingerprint
from toolkit._divergence import DivergenceError
from toolkit._run import Course, Run, seed_of

F64 = torch.float64
N, SIZE = 23, 4  # six batches an epoch, the last one smaller


def points(seed: int = 7) -> Tensor:
    """Rows (x, y) around the line y = 2 x - 1."""
    x = torch.randn(N, generator=seeded(seed), dtype=F64)
    return torch.stack([x, 2 * x - 1 + 0.1 * torch.randn(N, generator=seeded(seed + 1), dtype=F64)], 1)


class Line(Run[Tensor]):
    """Slope and intercept by gradient descent on squares, with momentum, noise on x, and a count of the updates.

    Args:
        rows: Of this rank.
        noise: Draws the noise.
        seed: Of the order of the rows.
        told: Whether the core knows how many batches an epoch has, and so when one is over.
        rate: The learning rate.
        best: Whether training stops after an epoch that was worse than another.
        start: Slope and intercept at the start.
    """

    room = "line"
    same = "`checkpoint` should be of the same line, or a new file."
    infinite = frozenset({"mask"})

    def __init__(
        self,
        course: Course,
        rows: Tensor,
        noise: torch.Generator,
        *,
        seed: int = 1,
        told: bool = True,
        rate: float = 0.05,
        best: bool = False,
        start: tuple[float, ...] = (0.0, 0.0),
    ) -> None:
        self.rows, self.noise, self.rate, self.best = rows, noise, rate, best
        self.line, self.count = torch.tensor(start, dtype=F64), torch.zeros((), dtype=torch.int64)
        self.mask = torch.tensor([0.0, -math.inf])
        self.momentum, self.losses, self.least = torch.zeros(len(start), dtype=F64), [], math.inf
        if told:
            self.n_batches = math.ceil(len(rows) / SIZE)
        super().__init__(
            course,
            generator=seeded(seed),
            streams=(noise,),
            settings={"seed": seed, "rate": rate},
            own_settings={"rows": len(rows)},
        )

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {"line": self.line, "count": self.count, "mask": self.mask}

    def batches(self) -> Iterator[Tensor]:
        for chosen in torch.randperm(len(self.rows), generator=self.order).split(SIZE):
            batch = self.rows[chosen] + 0.01 * torch.randn(len(chosen), 1, generator=self.noise, dtype=F64)
            self.first = self.first or fingerprint(batch)  # with its noise, which has to be the same again
            yield batch

    def step(self, batch: Tensor) -> None:
        x = torch.stack([batch[:, 0], torch.ones(len(batch), dtype=F64)], 1)
        slope, n = x.T @ (x @ self.line - batch[:, 1]), torch.tensor(float(len(batch)), dtype=F64)
        if self.group is not None:
            all_reduce(slope, group=self.group)
            all_reduce(n, group=self.group)
        self.momentum.mul_(0.5).add_(slope / n)
        self.line -= self.rate * self.momentum
        self.count += 1
        self.average(1 / (self.n_averaged + 1))

    def close_epoch(self) -> None:
        self.losses.append((self.rows[:, 0] * self.line[0] + self.line[1] - self.rows[:, 1]).square().mean().item())
        self.stopped = self.best and self.losses[-1] > min(self.losses)

    def is_suspect(self) -> bool:
        return self.line.abs().max().item() > 1e6

    def state(self) -> tuple[dict[str, Tensor], dict[str, object]]:
        return {"momentum": self.momentum}, {"best": self.best}

    def own_state(self) -> dict[str, Tensor]:
        return {"losses": torch.tensor(self.losses, dtype=F64)}

    def load(self, tensors, facts) -> None:
        assert facts["best"] == self.best
        self.momentum.copy_(tensors["momentum"])
        self.losses = tensors["losses"].tolist()


def run(
    path: Path | None = None,
    *,
    epochs: int = 3,
    every: int = 4,
    callback: Callable[[int, int], None] | None = None,
    resumed: Callable[[int], None] | None = None,
    rows: Tensor | None = None,
    noise: int = 5,
    group: object = None,
    **options,
) -> Line:
    course = Course(
        epochs=epochs, checkpoint=path, checkpoint_every=every, callback=callback, resumed=resumed, group=group
    )
    line = Line(course, points() if rows is None else rows, seeded(noise), **options)
    line.train()
    return line


def ends(line: Line) -> list[Tensor]:
    """Return all that a run has changed."""
    return [*line.tensors.values(), line.momentum, torch.tensor(line.losses), line.noise.get_state()]


def equal(a: Line, b: Line) -> bool:
    return all(torch.equal(x, y) for x, y in zip(ends(a), ends(b), strict=True))


# --- what is trained ------------------------------------------------------------------------------------------------


def test_a_run_is_its_steps_one_after_the_other():
    """A loop without the core: the same order, the same noise, and the mean of all iterates at the end."""
    told: list[tuple[int, int]] = []
    found = run(callback=lambda *numbers: told.append(numbers))
    order, noise = seeded(1), seeded(5)
    line, momentum, iterates = torch.zeros(2, dtype=F64), torch.zeros(2, dtype=F64), []
    for _ in range(3):
        where = torch.randperm(N, generator=seeded(seed_of(order)))
        for chosen in where.split(SIZE):
            x, y = (points()[chosen] + 0.01 * torch.randn(len(chosen), 1, generator=noise, dtype=F64)).T
            error = x * line[0] + line[1] - y
            momentum = 0.5 * momentum + torch.stack([(x * error).mean(), error.mean()])
            line = line - 0.05 * momentum
            iterates.append(line)
    torch.testing.assert_close(found.line, torch.stack(iterates).mean(0), rtol=0, atol=1e-14)
    assert found.count == 18 == found.update
    assert found.mask.tolist() == [0, -math.inf]
    assert told == [(update, 1 + (update - 1) // 6) for update in range(1, 19)]


def test_a_run_may_stop_before_its_last_epoch():
    found = run(epochs=50, best=True)
    assert found.epoch == len(found.losses) < 50
    assert found.losses[-1] > min(found.losses)


# --- checkpoints ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("told", [True, False], ids=["length known", "length unknown"])
@pytest.mark.parametrize("every", [1, 4, 6])
@pytest.mark.parametrize("stop", [1, 6, 7, 12, 17, 18], ids="stopped after {}".format)
def test_a_run_that_was_stopped_goes_on_to_the_same_bits(told, every, stop, tmp_path):
    expected, again, resumed = run(told=told), [], []
    with pytest.raises(Stop):
        run(tmp_path / "c", every=every, told=told, callback=stopping_at(stop))
    # The end of an epoch is saved after the callback of its last update, where the core can tell that it is the end.
    done = stop - 1 if told and stop % 6 == 0 else stop
    saved = done - done % every
    more = {"callback": lambda update, _: again.append(update), "resumed": resumed.append}
    other = 99 if saved else 5  # the seed of a noise generator whose state the checkpoint brings back
    assert equal(run(tmp_path / "c", every=every, told=told, noise=other, **more), expected)
    assert again == list(range(saved + 1, 19))
    assert resumed == ([saved] if saved else [])


def test_a_finished_run_is_found_finished_and_not_written_again(tmp_path):
    expected = run(tmp_path / "c")
    before = (tmp_path / "c").stat().st_mtime_ns
    assert equal(run(tmp_path / "c", noise=99, callback=stopping_at(1)), expected)
    assert (tmp_path / "c").stat().st_mtime_ns == before


def test_a_run_that_stopped_early_stays_stopped(tmp_path):
    expected = run(tmp_path / "c", epochs=50, best=True)
    assert equal(run(tmp_path / "c", epochs=50, best=True, callback=stopping_at(expected.update + 1)), expected)


KILLED = """
from pathlib import Path
from test_run import run
run(Path(sys.argv[1]), epochs=10**9, every=1)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="kills without asking")
def test_a_killed_run_leaves_a_whole_checkpoint_and_goes_on_to_the_same_bits(tmp_path):
    """Killed while it does little else than writing checkpoints."""
    path = tmp_path / "c"
    process = start_process(__file__, KILLED, path, stdout=subprocess.PIPE)
    try:
        updates = 0
        while updates < 9:
            assert process.poll() is None
            signal.sigtimedwait([], 0.01)
            with contextlib.suppress(FileNotFoundError, RuntimeError):  # replaced while it is read
                updates = checkpoint_module.read_checkpoint(path, room="line")[1]["update"]
    finally:
        warm.kill(process)
    epochs = checkpoint_module.read_checkpoint(path, room="line")[1]["epoch"] + 2
    assert equal(run(path, epochs=epochs), run(epochs=epochs))


OTHERS = {
    "a setting": ({"rate": 0.1}, "Found `rate` 0.05 in .*, where it is 0.1 now"),
    "the seed": ({"seed": 2}, "Found `seed` 1 in .*, where it is 2 now"),
    "a setting of the rank": ({"rows": points()[:9]}, "Found `rows` 23 in .*, where it is 9 now"),
    "a shape": ({"start": (0.0,)}, r"Found `parameters.line` \(2,\) float64 in .*, where it is \(1,\) float64 now"),
    "other data": ({"rows": points(8)}, "Found other data in .* than there are now"),
}


@pytest.mark.parametrize("stop", [7, None], ids=["stopped", "finished"])
@pytest.mark.parametrize(("others", "message"), OTHERS.values(), ids=OTHERS)
def test_what_differs_from_the_checkpoint_is_named_and_nothing_is_changed(others, message, stop, tmp_path):
    path = tmp_path / "c"
    with contextlib.suppress(Stop):
        run(path, callback=None if stop is None else stopping_at(stop))
    before = path.read_bytes()
    options = {"rows": points(), "noise": seeded(5)} | others
    line = Line(Course(epochs=3, checkpoint=path), **options)
    with pytest.raises(ValueError, match=r"`checkpoint` should be of the same line, or a new file\. " + message):
        line.train()
    assert path.read_bytes() == before
    assert not line.line.any()
    assert line.update == 0


def test_fewer_batches_than_the_checkpoints_are_noticed(tmp_path):
    class Short(Line):
        def batches(self) -> Iterator[Tensor]:
            yield from list(super().batches())[:3]

    with pytest.raises(Stop):
        run(tmp_path / "c", callback=stopping_at(5))
    line = Short(Course(epochs=3, checkpoint=tmp_path / "c"), points(), seeded(5))
    with pytest.raises(ValueError, match=r"`data` should be those of the checkpoint. Found fewer than its 4 batches"):
        line.train()


def test_a_checkpoint_of_another_kind_or_version_is_refused(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_module, "_FORMAT", 3)
        run(tmp_path / "old")
    checkpoint_module.write_checkpoint(tmp_path / "other", {"x": torch.zeros(1)}, {}, room="rbm")
    for name, what in (
        ("old", "of another version of this library"),
        ("other", "a safetensors file of something else"),
    ):
        with pytest.raises(
            ValueError, match=f"should be a file that `train` wrote, or a new one. Found .*{name}, {what}"
        ):
            run(tmp_path / name)


# --- divergence -----------------------------------------------------------------------------------------------------


def test_a_line_that_diverges_goes_back_to_the_last_good_one(tmp_path):
    path = tmp_path / "c"
    line = Line(Course(epochs=40, checkpoint=path, checkpoint_every=60), points(), seeded(5))
    kept = {}

    def spoil(update: int, epoch: int) -> None:
        if update in (60, 100):
            kept[update] = line.copies()
        if update == 110:
            line.line[1] = math.nan

    line.course = Course(epochs=40, checkpoint=path, checkpoint_every=60, callback=spoil)
    with pytest.raises(
        DivergenceError, match=r"`line` is not finite after update 120; after update 100 all was well"
    ) as found:
        line.train()
    assert (found.value.update, found.value.last_good, found.value.name) == (120, 100, "line")
    assert f"`{path}` stays as it was. Lower the learning rate." in str(found.value)
    assert all(torch.equal(value, kept[100][name]) for name, value in line.tensors.items())
    tensors, facts = checkpoint_module.read_checkpoint(path, room="line")
    assert facts["update"] == 60
    assert torch.equal(tensors["parameters.line"], kept[60]["line"])


def test_a_run_that_went_on_and_diverges_is_back_at_its_checkpoint(tmp_path):
    with pytest.raises(Stop):
        run(tmp_path / "c", callback=stopping_at(5))
    line = Line(Course(epochs=3, checkpoint=tmp_path / "c"), points(), seeded(5))
    line.course = Course(epochs=3, checkpoint=tmp_path / "c", callback=lambda *_: line.line.fill_(math.nan))
    with pytest.raises(DivergenceError, match=r"`line` is not finite after update 18; after update 4 all was well"):
        line.train()
    kept, _ = checkpoint_module.read_checkpoint(tmp_path / "c", room="line")
    assert torch.equal(line.line, kept["parameters.line"])


def test_a_mask_may_have_infinities_and_no_nan():
    line = Line(Course(epochs=1), points(), seeded(5))
    line.mask[0] = math.nan
    with pytest.raises(DivergenceError, match=r"`mask` is not finite after update 6; after update 0 all was well"):
        line.train()
    assert line.mask.tolist() == [0, -math.inf]


def test_what_is_suspect_is_looked_at_at_once():
    class Bounded(Line):
        def fault(self) -> tuple[str, str] | None:
            return ("line", "above a million") if self.is_suspect() else super().fault()

    line = Bounded(Course(epochs=40), points(), seeded(5), rate=20.0)
    with pytest.raises(DivergenceError, match="`line` is above a million after update") as found:
        line.train()
    assert found.value.update < 50
    assert not line.line.any()


# --- ranks ----------------------------------------------------------------------------------------------------------


def as_rank(rank: int, world: int, folder: Path) -> dict[str, object]:
    """Train as one of two ranks."""
    group = torch.distributed.group.WORLD
    mine, found = points().tensor_split(world)[rank], {}
    start = (0.0, 0.0) if rank == 0 else (7.0, 7.0)  # those of the first rank count
    found["alone"] = ends(run(rows=mine, group=group, noise=5 + rank, start=start))
    with contextlib.suppress(Stop):
        run(folder / "c", rows=mine, group=group, noise=5 + rank, callback=stopping_at(6))
    found["went on"] = ends(run(folder / "c", rows=mine, group=group, noise=99))
    errors = []
    for case in CASES.values():
        try:
            run(**{"path": folder / "c", "rows": mine, "group": group, "noise": 5 + rank, **case(rank)})
            errors.append("")
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
    found["errors"] = errors
    return found


# What is wrong on the second rank, and what each is told.
CASES: dict[str, Callable[[int], dict[str, object]]] = {
    "a setting": lambda rank: {"rate": 0.05 * (1 + rank)},
    "epochs": lambda rank: {"epochs": 3 + rank},
    "rows of a checkpoint": lambda rank: {"rows": points()[:3]} if rank else {},
    "data of a checkpoint": lambda rank: {"rows": points(8).tensor_split(2)[1]} if rank else {},
}
TOLD = {
    "a setting": ("ValueError: `rate` should be the same on all ranks. Found 0.05, 0.1",) * 2,
    "epochs": ("ValueError: `epochs` should be the same on all ranks. Found 3, 4",) * 2,
    "rows of a checkpoint": ("RuntimeError: Rank 1 stopped. ValueError: .*`rows` 11", "ValueError: .*`rows` 11 in"),
    "data of a checkpoint": ("RuntimeError: Rank 1 stopped. ValueError: .* other data", "ValueError: .* other data"),
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> tuple[list[dict], Path]:
    folder = tmp_path_factory.mktemp("ranks")
    return answers_of_ranks(__file__, 2, folder), folder


def test_ranks_train_the_line_of_one_process_on_the_joined_batches(ranks):
    parts = points().tensor_split(2)
    orders, noises = [seeded(1) for _ in parts], [seeded(5 + rank) for rank in range(2)]
    line, momentum, iterates = torch.zeros(2, dtype=F64), torch.zeros(2, dtype=F64), []
    for _ in range(3):
        epoch = []
        for rows, order, noise in zip(parts, orders, noises, strict=True):
            where = torch.randperm(len(rows), generator=seeded(seed_of(order)))
            draws = lambda n, noise=noise: 0.01 * torch.randn(n, 1, generator=noise, dtype=F64)  # noqa: E731
            epoch.append([rows[chosen] + draws(len(chosen)) for chosen in where.split(SIZE)])
        for joined in map(torch.cat, zip(*epoch, strict=True)):
            x, y = joined.T
            error = x * line[0] + line[1] - y
            momentum = 0.5 * momentum + torch.stack([(x * error).mean(), error.mean()])
            line = line - 0.05 * momentum
            iterates.append(line)
    for found in ranks[0]:
        torch.testing.assert_close(found["alone"][0], torch.stack(iterates).mean(0), rtol=0, atol=1e-13)
        assert torch.equal(found["alone"][0], ranks[0][0]["alone"][0])


def test_stopped_ranks_go_on_to_the_same_bits(ranks):
    for found in ranks[0]:
        assert all(torch.equal(a, b) for a, b in zip(found["alone"], found["went on"], strict=True))


def test_a_checkpoint_of_two_ranks_is_refused_by_one(ranks):
    with pytest.raises(ValueError, match=r"Found `number of ranks` 2 in .*, where it is 1 now"):
        run(ranks[1] / "c")


def test_an_error_on_one_rank_is_raised_on_all(ranks):
    for case, told in zip(TOLD, zip(*(found["errors"] for found in ranks[0]), strict=True), strict=True):
        for rank, text in enumerate(told):
            assert re.match(TOLD[case][rank], text), (case, rank, text)


# --- arguments ------------------------------------------------------------------------------------------------------

WRONG = [
    ({"epochs": 0}, ValueError, "`epochs` should be a positive integer. Found 0"),
    ({"checkpoint_every": 0}, ValueError, "`checkpoint_every` should be a positive integer. Found 0"),
    ({"callback": 3}, TypeError, "`callback` should be a function, or None. Found int"),
    ({"checkpoint": 3}, TypeError, "`checkpoint` should be a path, or None. Found 3"),
    ({"checkpoint": "."}, ValueError, "`checkpoint` should be a file, not a folder. Found '.'"),
    ({"checkpoint": "no/c"}, ValueError, "`checkpoint` should be a file in a folder that exists. Found 'no/c'"),
]


@pytest.mark.parametrize(("options", "kind", "message"), WRONG, ids=[message[:40] for *_, message in WRONG])
def test_wrong_arguments_are_refused(options, kind, message):
    with pytest.raises(kind, match=re.escape(message)):
        Course(**{"epochs": 1} | options)
