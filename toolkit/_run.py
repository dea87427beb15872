"""The training loop of all resumable runs. Subclasses define the trained tensors, their batches and the step.

The loop counts updates, averages parameters, detects divergence, writes checkpoints, resumes bit for bit, and
synchronises distributed ranks.
"""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from toolkit._checkpoint import alike, read_checkpoint, write_checkpoint
from toolkit._checks import integer, real
from toolkit._distributed import (
    exchange,
    from_first_rank,
    gather,
    rank_of,
    same_on_all,
    scatter,
    together,
    world_of,
)
from toolkit._divergence import DivergenceError, not_finite
from toolkit.blocks import no_graph

__all__ = [
    "Course",
    "Run",
    "generators_of",
    "global_generator",
    "rate_at",
    "seed_of",
    "with_prefix",
]

_CHECK_EVERY = 100  # updates: the look at all parameters then costs a thousandth of them

Batch = TypeVar("Batch")


@dataclass(frozen=True, kw_only=True)
class Course:
    """The length of a run, its checkpoint, its callbacks and its ranks.

    Attributes:
        epochs: Number of passes over the data.
        checkpoint: The file to write to, and to resume from. None: no file.
        checkpoint_every: Updates from one checkpoint to the next; another one is written at the end.
        callback: Called after each update with the number of updates and the number of the epoch, from 1; or None.
        resumed: Called with the number of updates done, if the run resumes from a checkpoint.
        group: The ranks. None: this process alone.

    Raises:
        TypeError: If `checkpoint` is not a path, or `callback` not a function.
        ValueError: If a count is not positive, or `checkpoint` is not a file in a folder that exists.
    """

    epochs: int
    checkpoint: str | os.PathLike[str] | None = None
    checkpoint_every: int = 1000
    callback: Callable[[int, int], None] | None = None
    resumed: Callable[[int], None] | None = None
    group: ProcessGroup | None = None

    def __post_init__(self) -> None:
        for name in ("epochs", "checkpoint_every"):  # of any type of integers, and from here on of Python's
            object.__setattr__(self, name, integer(name, getattr(self, name), 1))
        if self.callback is not None and not callable(self.callback):
            raise TypeError(f"`callback` should be a function, or None. Found {type(self.callback).__name__}.")
        if self.path is None:
            return
        if self.path.is_dir():
            raise ValueError(f"`checkpoint` should be a file, not a folder. Found {str(self.path)!r}.")
        if not self.path.absolute().parent.is_dir():
            raise ValueError(f"`checkpoint` should be a file in a folder that exists. Found {str(self.path)!r}.")

    @property
    def path(self) -> Path | None:
        """The path of the checkpoint."""
        if not isinstance(self.checkpoint, str | os.PathLike | None):
            raise TypeError(f"`checkpoint` should be a path, or None. Found {self.checkpoint!r}.")
        return None if self.checkpoint is None else Path(self.checkpoint)


class _Saved(NamedTuple):
    """A checkpoint as one rank sees it: tensors by name, facts of all ranks, and facts of its own."""

    tensors: dict[str, Tensor]
    facts: dict[str, Any]
    own: dict[str, Any]


class Run(ABC, Generic[Batch]):
    """Training that may be killed at any time, and then resumes to the same bits.

    A kind of run defines `tensors`, `batches` and `step`, and where necessary `fault` and `is_suspect` for divergence,
    `close_epoch`, `state`, `own_state` and `load` for checkpoints, and `result`. `train` does the rest.

    An epoch is read from a seed and from the states that the generators had at its start. A checkpoint holds both, so
    the finished part of the epoch can be read once more, compared, and skipped.

    Attributes:
        epoch: Number of finished epochs.
        batch: Number of updates of the current epoch.
        update: Number of updates in all.
        stopped: Whether training ends with this epoch.
        order: Generator, seeded anew for each epoch, that draws the order of its batches.
        first: Fingerprint of the first rows of an epoch, if the data as a whole have none; set by `batches`.
        mean: The running mean of the tensors, by name; empty before the first `average`.
        n_averaged: Number of calls of `average`.
    """

    # The name of the kind in its checkpoints, and the beginning of the error about a checkpoint of another run.
    room: ClassVar[str]
    same: ClassVar[str]
    remedy: ClassVar[str] = "Lower the learning rate."
    # Beginnings of the names of tensors in a checkpoint that have a shape and a type from the start.
    fixed: ClassVar[tuple[str, ...]] = ("parameters.", "start.", "now.")
    # Buffers that hold infinities on purpose: they are not averaged, and only NaN spoils them.
    infinite: frozenset[str] = frozenset()
    # Batches of an epoch, if they are known: a checkpoint due after the last one is written when the epoch is closed.
    n_batches: int | None = None

    def __init__(
        self,
        course: Course,
        *,
        generator: torch.Generator,
        streams: Iterable[torch.Generator] = (),
        settings: Mapping[str, Any],
        own_settings: Mapping[str, Any] | None = None,
    ) -> None:
        """Give all ranks the tensors of the first rank.

        Args:
            course: Length, checkpoint, callbacks and ranks of the run.
            generator: Draws the seed of each epoch.
            streams: Further generators from which batches and steps draw.
            settings: All settings that decide the result, by name, as JSON: compared with a checkpoint, and between
                ranks.
            own_settings: Such settings of this rank alone.
        """
        self.course, self.path, self.group, self.generator = course, course.path, course.group, generator
        self.settings, self.own_settings = dict(settings), dict(own_settings or {})
        self.streams = list({id(stream): stream for stream in (generator, *streams)}.values())
        self.epoch = self.batch = self.update = self.seed = 0
        self.stopped = False
        self.order = torch.Generator()
        self.first: Any = None
        self.mean: dict[str, Tensor] = {}
        self.n_averaged = 0
        self._at_start: dict[str, Tensor] = {}
        self._rest: Iterator[Batch] | None = None
        self._saved: tuple[int, int] | None = None
        from_first_rank(self.tensors.values(), self.group)
        self._good, self._last_good = self.copies(), 0

    # --- filled in by a kind of run ----------------------------------------------------------------------------------

    @property
    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """The trained tensors, by name: the same on all ranks, and written in place."""

    @abstractmethod
    def batches(self) -> Iterator[Batch]:
        """Yield the batches of an epoch, which follow from `order` and the states of the generators."""

    @abstractmethod
    def step(self, batch: Batch) -> None:
        """Make one update."""

    def close_epoch(self) -> None:
        """Finish an epoch, which `epoch` counts already."""

    def is_suspect(self) -> bool:
        """Return, at no cost, whether to check for divergence at once; the same on all ranks."""
        return False

    def fault(self) -> tuple[str, str] | None:
        """Return the name of a diverged tensor and its state (``"not finite"``), or None if all tensors are good."""
        name = not_finite(self.tensors.items(), infinite=self.infinite)
        return None if name is None else (name, "not finite")

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the rest of the state of a run: tensors, and facts as JSON, the same on all ranks."""
        return {}, {}

    def own_state(self) -> dict[str, Tensor]:
        """Return the tensors of the state that are this rank's alone."""
        return {}

    def load(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Restore `state` and `own_state`; the position of the run is restored already."""

    def compare(self, facts: Mapping[str, Any]) -> None:
        """Raise ValueError if the facts of a checkpoint are of another run; its settings are compared already."""

    def result(self) -> Mapping[str, Tensor]:
        """Return the final values of the tensors, by name; empty to keep the current ones."""
        return self.mean

    # --- training ----------------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """The device on which ranks exchange numbers."""
        return next(iter(self.tensors.values())).device

    def train(self) -> None:
        """Train from the checkpoint, or from the start, to the end.

        Raises:
            DivergenceError: If training diverges.
            ValueError: If the checkpoint is of another run, or settings differ between ranks.
            RuntimeError: If another rank has raised.
        """
        same = {"epochs": self.course.epochs, "checkpoint": self.path is not None}
        same_on_all(self.settings | same | {"checkpoint_every": self.course.checkpoint_every}, self.group)
        self._resume()
        while self.epoch < self.course.epochs and not self.stopped:
            self._train_epoch()
        self.check()
        self._save()
        self.set(self.result())

    def _train_epoch(self) -> None:
        """Make the remaining updates of an epoch."""
        for batch in self._rest or self._begin_epoch():
            self.step(batch)
            self.batch += 1
            self.update += 1
            if self.update % _CHECK_EVERY == 0 or self.is_suspect():
                self.check()
            if self.batch != self.n_batches:
                self._save_if_due()
            if self.course.callback is not None:
                self.course.callback(self.update, self.epoch + 1)
        self.epoch, self.batch, self._rest = self.epoch + 1, 0, None
        self.close_epoch()
        if self.n_batches is not None:
            self._save_if_due()

    def _begin_epoch(self) -> Iterator[Batch]:
        self.seed = seed_of(self.generator)
        self._at_start = {} if self.path is None else self._states()
        return self._batches_of_seed()

    def _batches_of_seed(self) -> Iterator[Batch]:
        self.first = None
        self.order.manual_seed(self.seed)
        return self.batches()

    def copies(self) -> dict[str, Tensor]:
        """Return a copy of the tensors."""
        with no_graph():
            return {name: tensor.clone() for name, tensor in self.tensors.items()}

    def set(self, values: Mapping[str, Tensor]) -> None:
        """Set the tensors to these values; an empty mapping changes nothing."""
        with no_graph():
            for name, tensor in self.tensors.items() if values else ():
                tensor.copy_(values[name])

    def average(self, weight: float) -> None:
        """Update the mean of the tensors, in at least single precision; integers and masks enter with current values.

        Args:
            weight: Weight of the current tensors; the mean so far has the rest. The first call starts the mean.
        """
        self.n_averaged += 1
        with no_graph():
            for name, tensor in self.tensors.items():
                averaged = tensor.is_floating_point() and name not in self.infinite
                wide = tensor.to(torch.promote_types(tensor.dtype, torch.float32)) if averaged else tensor
                if averaged and name in self.mean:
                    self.mean[name].lerp_(wide, weight)
                else:
                    self.mean[name] = wide.clone()

    # --- divergence --------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Keep a copy of the tensors if all are good; otherwise restore the last copy, and raise.

        Raises:
            DivergenceError: On all ranks, if one has diverged.
        """
        if self._last_good == self.update:
            return
        fault = self.fault()
        if any(bad for (bad,) in exchange((fault is not None,), self.group, self.device)):
            self.set(self._good)
            raise self._divergence(*(fault or ("a part of another rank's state", "not finite")))
        with no_graph():
            for name, tensor in self.tensors.items():
                self._good[name].copy_(tensor)
        self._last_good = self.update

    def _divergence(self, name: str, how: str) -> DivergenceError:
        kept = f" `{self.path}` stays as it was." if self.path is not None and self.path.exists() else ""
        return DivergenceError(
            f"Training diverged: `{name}` is {how} after update {self.update}; after update {self._last_good} all was "
            f"well, and the parameters of that update are back.{kept} {self.remedy}",
            update=self.update,
            last_good=self._last_good,
            name=name,
        )

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def _save_if_due(self) -> None:
        if self.update % self.course.checkpoint_every == 0:
            self._save()

    def _save(self) -> None:
        """Write the checkpoint of all ranks, if all tensors are good and it is not written yet."""
        if self.path is None or self._saved == (self.epoch, self.batch):
            return
        self.check()
        parts = gather((self._own_tensors(), self._own_facts()), self.group)
        with together(self.group):
            if parts is not None:
                own = {f"rank{rank}.{name}": part for rank, (own, _) in enumerate(parts) for name, part in own.items()}
                tensors, facts = self._shared()
                facts |= {"ranks": len(parts), "own": [facts for _, facts in parts]}
                write_checkpoint(self.path, tensors | own, facts, room=self.room)
        self._saved = self.epoch, self.batch

    def _resume(self) -> None:
        """Resume from the checkpoint, if there is one."""
        if self.path is None:
            return
        parts = None
        with together(self.group):
            if rank_of(self.group) == 0:
                parts = self._read(self.path) if self.path.exists() else [None] * world_of(self.group)
        saved: _Saved | None = scatter(parts, self.group)
        if saved is None:
            return
        with together(self.group):
            self._compare(saved)
        rest = self._read_again(saved)
        self._take_over(saved.tensors, saved.facts)
        self._rest = rest if self.batch else None
        if self.course.resumed is not None:
            self.course.resumed(self.update)

    def _read(self, path: Path) -> list[_Saved | None]:
        """Return the part of the checkpoint of each rank."""
        tensors, facts = read_checkpoint(path, room=self.room)
        if facts["ranks"] != world_of(self.group):
            raise self.refusal("number of ranks", facts["ranks"], world_of(self.group))
        shared = {name: tensor for name, tensor in tensors.items() if not name.startswith("rank")}
        return [
            _Saved(shared | with_prefix(tensors, f"rank{rank}."), facts, own) for rank, own in enumerate(facts["own"])
        ]

    def _compare(self, saved: _Saved) -> None:
        """Raise ValueError unless a checkpoint is of this run, as far as that is known without reading the data."""
        before = saved.facts["settings"] | saved.own["settings"]
        for name, value in (self.settings | self.own_settings).items():
            if not alike(before.get(name), value):
                raise self._other_data() if name == "data" else self.refusal(name, before.get(name), value)
        self.compare(saved.facts)
        now = self._shared()[0] | self._own_tensors()
        for name in sorted(now.keys() | saved.tensors.keys()):
            found, expected = (_kind(tensors.get(name)) for tensors in (saved.tensors, now))
            if name.startswith(self.fixed) and found != expected:
                raise self.refusal(name, found, expected)

    def _read_again(self, saved: _Saved) -> Iterator[Batch]:
        """Read the trained batches of an epoch again, at least one, and return the remaining ones.

        Raises:
            ValueError: If the batches read again are not the batches of the checkpoint.
        """
        done, self.seed = saved.facts["batch"], saved.own["seed"]
        self._at_start = with_prefix(saved.tensors, "start.")
        self._set_states(self._at_start)
        rest = self._batches_of_seed()
        with together(self.group):
            found = sum(1 for _ in islice(rest, max(1, done)))
            if not alike(self.first, saved.own["first"]):
                raise self._other_data()
            if found < done:
                raise ValueError(f"`data` should be those of the checkpoint. Found fewer than its {done} batches.")
        return rest

    def _take_over(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        self.set(with_prefix(tensors, "parameters."))
        self._good, self._last_good = self.copies(), facts["update"]
        self.epoch, self.batch, self.update = facts["epoch"], facts["batch"], facts["update"]
        self.n_averaged, self.stopped = facts["averaged"], facts["stopped"]
        self.mean = {name: mean.to(self.device) for name, mean in with_prefix(tensors, "average.").items()}
        self._saved = self.epoch, self.batch
        self._set_states(with_prefix(tensors, "now."))
        self.load(tensors, facts)

    def _shared(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the tensors and the facts of a checkpoint that are the same on all ranks."""
        tensors, facts = self.state()
        kept = {"parameters": self.tensors, "average": self.mean}
        tensors |= {f"{kind}.{name}": tensor for kind, parts in kept.items() for name, tensor in parts.items()}
        position = {"epoch": self.epoch, "batch": self.batch, "update": self.update}
        averaged = {"averaged": self.n_averaged, "stopped": self.stopped, "settings": self.settings}
        return tensors, facts | position | averaged

    def _own_tensors(self) -> dict[str, Tensor]:
        """Return the tensors of a checkpoint that are this rank's."""
        now = self._states()
        return {
            **self.own_state(),
            **{f"start.{number}": state for number, state in (self._at_start or now).items()},
            **{f"now.{number}": state for number, state in now.items()},
        }

    def _own_facts(self) -> dict[str, Any]:
        return {"seed": self.seed, "first": self.first, "settings": self.own_settings}

    def _states(self) -> dict[str, Tensor]:
        return {str(number): stream.get_state() for number, stream in enumerate(self.streams)}

    def _set_states(self, states: Mapping[str, Tensor]) -> None:
        for number, stream in enumerate(self.streams):
            stream.set_state(states[str(number)])

    def refusal(self, name: str, found: Any, expected: Any) -> ValueError:
        """Return the error that names a difference between a checkpoint and this run."""
        found, expected = (
            value.get("values", value) if isinstance(value, dict) else value for value in (found, expected)
        )
        return ValueError(f"{self.same} Found `{name}` {found} in {self.path}, where it is {expected} now.")

    def _other_data(self) -> ValueError:
        return ValueError(f"{self.same} Found other data in {self.path} than there are now.")


def seed_of(generator: torch.Generator) -> int:
    """Draw a seed for another generator."""
    return int(torch.empty((), dtype=torch.int64, device=generator.device).random_(generator=generator))


def generators_of(source: object) -> tuple[torch.Generator, ...]:
    """Return the generators that a source of batches draws from: a DataLoader's own, and those of its samplers."""
    batch_sampler = getattr(source, "batch_sampler", None)
    owners = (source, getattr(source, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
    found = (getattr(owner, "generator", None) for owner in owners)
    own = (generator for generator in found if isinstance(generator, torch.Generator))
    return (*own, *getattr(source, "streams", ()))


def global_generator(device: torch.device) -> torch.Generator:
    """Return torch's own generator of a device, from which modules such as dropout draw."""
    return torch.cuda.default_generators[device.index or 0] if device.type == "cuda" else torch.default_generator


def rate_at(name: str, schedule: Callable[[float], float], part: float) -> float:
    """Return the value of a schedule at a part of training; raise ValueError if the value is not a rate.

    Args:
        name: Name of the argument that is the schedule.
        schedule: Function of the part of training that is done, from 0 to 1, that returns a number.
        part: The part of training that is done.
    """
    found = schedule(part)
    rate = real(found)
    if rate is None or not 0 <= rate < math.inf:
        raise ValueError(f"`{name}` should return finite numbers, not negative. Found {found!r} at {part:.4g}.")
    return rate


def with_prefix(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the tensors whose names begin with a prefix, by the rest of their names."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _kind(tensor: Tensor | None) -> str | None:
    return None if tensor is None else f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
