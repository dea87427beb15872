r"""Training around a `FusedTrainer`: epochs, learning rates, checkpoints, ranks, and data larger than memory.

N rows of data, C columns of the visible layer, M persistent chains, H hidden units.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from toolkit._checkpoint import alike, as_json, fingerprint
from toolkit._checks import integer, number
from toolkit._distributed import exchange, same_on_all, together, world_of
from toolkit._divergence import not_finite
from toolkit._random import check_generator
from toolkit._run import Course, Run, global_generator, rate_at, with_prefix
from toolkit.rbm.training._batches import NO_ROWS, Chunks, Data, batches, chunks_of
from toolkit.rbm.training.fused import FusedTrainer
from toolkit.rbm.training.schedules import Schedule

__all__ = ["Plan", "run_training", "train"]

# Attributes of a trainer that decide its steps, beside the sizes of its state and its generator.
_SETTINGS = (
    "steps",
    "weight_decay",
    "fast_rate",
    "offset_rate",
    "inverse_temperatures",
    "reference",
    "product_dtype",
)

_FIRST_BYTES = 2**20  # of the first chunk of an epoch, for the fingerprint of data
_AVERAGED = 2**10  # more parameters in a mean gain little, and the mean of very many stops to move in float32


def train(
    trainer: FusedTrainer,
    data: Data,
    *,
    epochs: int,
    learning_rate: float | Schedule,
    generator: torch.Generator | None,
    n_rows: int | None = None,
    average_from: float | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    checkpoint_every: int = 10_000,
    callback: Callable[[int, int], None] | None = None,
) -> int:
    r"""Train a machine: `FusedTrainer.step` for every batch of every epoch.

    In every epoch each row is in one batch, and rows are in a new random order: a permutation of all rows in memory, or
    of the rows of each chunk. A chunk of a file joins blocks from all over the file. Batches have `trainer.batch_size`
    rows, and the last batch the remaining rows.

    With a `checkpoint`, a call that finds the file resumes from it, and ends with the same bits as an uninterrupted
    run. The learning rate may change, and so may `epochs`, but not below the epochs done. With other `epochs` the mean
    of parameters begins anew, from the new `average_from` or where the run resumes, whichever is later.

    All other settings and the seeds of the generators have to be the same, and are compared. Data are compared too: all
    rows of up to 256 MiB in memory, a sample of the rows of larger data or of a file, and the first chunk of an epoch.
    So chunks should be the same if they are read again with the same states of torch's generators. The last digits of
    floating-point numbers may differ, as between processors.

    On several ranks (`FusedTrainer` with a `group`) each rank calls this function with its own part of the data, which
    may be empty, its own chains and its own generators: see `shard` and `rank_generator`. All ranks start with the
    parameters of the first rank, and keep the same parameters from then on. An error in the arguments, the data or the
    state of one rank is raised on all.

    Args:
        trainer: Makes the updates.
        data: (N, C), a tensor or an array, of any type, which is kept (``uint8`` saves memory). In a floating-point
            type, probabilities such as grey values may take the place of zeros and ones. A memory-mapped array is read
            in chunks of 2 MiB. Or chunks (B, C) of such data: an iterable that can be read again for each epoch, such
            as a list or a DataLoader, or a function that returns an iterable; a plain iterator if `epochs` is 1. One
            chunk is held at a time.
        epochs: Number of passes over the data.
        learning_rate: The step size, or a function that returns it for the fraction of training done, from 0 to 1:
            `linear_decay`, `cosine_decay`, or any other.
        generator: Draws the order of the rows; on any device. None: torch's default generator.
        n_rows: N of this rank. Needed with chunks, unless from a DataLoader, if anything depends on the fraction of
            training done. It is compared with the rows of the first epoch.
        average_from: The fraction of training from which on parameters are averaged, 0.5 for the second half; the
            machine ends with the mean of fewer than 2048 values, evenly spaced. None: no averaging.
        checkpoint: The file to write to, and to resume from.
        checkpoint_every: Updates from one checkpoint to the next; another checkpoint is written at the end.
        callback: Called after each update with the number of updates and the number of the epoch, from 1.

    Returns:
        The number of updates, those before an interruption included.

    Raises:
        DivergenceError: If a parameter, or a tensor of the trainer's state, is not finite. Both are checked every
            hundred updates, before each checkpoint, and at the end. The machine's last finite parameters are restored,
            and the last checkpoint is kept.
        TypeError: If `data` has none of these types, or can be read only once and has to be read more often; if
            `trainer`, `generator`, `checkpoint` or `callback` has the wrong type.
        ValueError: If an argument is out of its range; if data are empty, of another shape, not finite, or not possible
            values of the visible units (found by the end of the first epoch, without another pass over data that are
            not in memory); or if the checkpoint is of another machine, trainer, seed or data, or of more epochs.
        RuntimeError: If another rank has raised.

    References:
        Polyak & Juditsky, "Acceleration of stochastic approximation by averaging", 1992, for the mean of parameters.
        Swersky et al., "A tutorial on stochastic approximation algorithms for training restricted Boltzmann machines
        and deep belief nets", 2010, for its use here.

    Example:
        >>> from toolkit.rbm import RBM, linear_decay
        >>> data, generator = torch.eye(4, dtype=torch.uint8)[:2].repeat(10, 1), torch.Generator().manual_seed(0)
        >>> machine = RBM(4, 3, generator=generator)
        >>> trainer = FusedTrainer(machine, batch_size=10, steps=1, chains=torch.zeros(50, 3), generator=generator)
        >>> updates = train(trainer, data, epochs=1000, learning_rate=linear_decay(0.5), generator=generator)
        >>> updates, machine.log_likelihood(data.float()).mean().item() > -1.5  # log 1/2 at best, and -2.8 at the start
        (2000, True)
    """
    if not isinstance(trainer, FusedTrainer):
        raise TypeError(f"`trainer` should be a FusedTrainer. Found an object of type {type(trainer).__name__}.")
    with together(trainer.group):
        course = Course(
            epochs=epochs,
            checkpoint=checkpoint,
            checkpoint_every=checkpoint_every,
            callback=callback,
            group=trainer.group,
        )
        plan = Plan(learning_rate, generator, n_rows, average_from)
    return run_training(trainer, data, course, plan)


@dataclass(frozen=True)
class Plan:
    """Rates, orders and means of a run: the arguments of `train` of the same names, checked.

    Attributes:
        learning_rate: The step size, or a function of the fraction of training done.
        generator: Draws the order of the rows.
        n_rows: N of this rank, if the caller knows it.
        average_from: The fraction of training from which on parameters are averaged.
        belongs_to: An estimator's parameters, by name, as JSON: a checkpoint is compared with them, and not with seeds.
    """

    learning_rate: float | Schedule
    generator: torch.Generator | None = None
    n_rows: int | None = None
    average_from: float | None = None
    belongs_to: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        """Raise TypeError or ValueError if a value has the wrong type or is out of its range."""
        check_generator(self.generator)
        if not callable(self.learning_rate):
            object.__setattr__(self, "learning_rate", number("learning_rate", self.learning_rate, above=0))
        if self.n_rows is not None:
            integer("n_rows", self.n_rows, 0)
        if self.average_from is not None:
            object.__setattr__(self, "average_from", number("average_from", self.average_from, least=0, below=1))

    @property
    def follows_rows(self) -> bool:
        """Whether anything depends on the fraction of training done, and so on N."""
        return callable(self.learning_rate) or self.average_from is not None

    def rate(self, part: float) -> float:
        """Return the learning rate after a fraction of training."""
        if not callable(self.learning_rate):
            return self.learning_rate
        return rate_at("learning_rate", self.learning_rate, part)


def run_training(trainer: FusedTrainer, data: Data, course: Course, plan: Plan) -> int:
    """Train as `train` does, with checked settings."""
    with together(course.group):
        chunks = chunks_of(data, trainer.rbm, n_rows=plan.n_rows, once=course.epochs == 1)
        if not_finite(trainer.rbm.named_parameters()) is not None:
            raise ValueError("The machine's parameters should be finite. Found NaN or infinity.")
    same_on_all({"average_from": plan.average_from}, course.group)
    run = _Training(course, plan, trainer, chunks)
    run.train()
    return run.update


class _Training(Run[tuple[Tensor, int]]):
    """Training of a machine: a batch is a pair of its rows and the number of rows of the epoch before it."""

    room = "rbm"
    same = "`checkpoint` should be of the same machine, trainer and data, or a new file."
    remedy = "Lower the learning rate, with a new trainer."
    fixed = (*Run.fixed, "trainer.")

    def __init__(self, course: Course, plan: Plan, trainer: FusedTrainer, chunks: Chunks) -> None:
        self.plan, self.trainer, self.chunks = plan, trainer, chunks
        self.n_rows = _total_rows(chunks, trainer, needed=plan.follows_rows)
        self.rows, self.looked_at = 0, False
        known = None
        if course.path is not None:
            known = None if chunks.fingerprint is None else chunks.fingerprint()
            self.chunks = chunks if known is not None else replace(chunks, read=self._read_noting_the_first)
        self.source = chunks
        generator = torch.default_generator if plan.generator is None else plan.generator
        unseen = [global_generator(trainer.rbm.weights.device)] if trainer.generator is None else []
        super().__init__(
            course,
            generator=generator,
            streams=(*chunks.streams, *unseen),
            settings=_settings(trainer, self.n_rows, plan),
            own_settings=_seeds(generator, trainer, plan) | {"data": known},
        )

    @property
    def tensors(self) -> dict[str, Tensor]:
        return dict(self.trainer.rbm.named_parameters())

    def batches(self) -> Iterator[tuple[Tensor, int]]:
        self.rows = 0
        for batch, n in batches(
            self.chunks,
            self.trainer.rbm,
            batch_size=self.trainer.batch_size,
            order=self.order,
            check=not self.looked_at,
            group=self.group,
        ):
            yield batch, self.rows
            self.rows += n

    def step(self, batch: tuple[Tensor, int]) -> None:
        rows, before = batch
        part = 0.0
        if self.n_rows:
            part = min(1.0, (self.epoch * self.n_rows + before) / (self.course.epochs * self.n_rows))
        self.trainer.step(rows, learning_rate=self.plan.rate(part))
        start = self.plan.average_from
        if start is not None and part >= start and (self.update + 1) % self._average_every(start) == 0:
            self.average(1 / (self.n_averaged + 1))

    def close_epoch(self) -> None:
        # A learning rate that ends too early or too late, or a mean over another part, would not be seen.
        matters = not self.looked_at and (self.plan.follows_rows or self.plan.n_rows is not None)
        if matters and self.n_rows not in (None, self.rows):
            raise ValueError(
                f"`n_rows` should be how many rows an epoch has. Found {self.n_rows}, and an epoch of {self.rows}."
            )
        self.looked_at = True

    def fault(self) -> tuple[str, str] | None:
        name = not_finite(self.trainer.state_dict().items())
        return super().fault() or (None if name is None else (name, "not finite"))

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        return {}, {"epochs": self.course.epochs, "average_from": self.plan.average_from}

    def own_state(self) -> dict[str, Tensor]:
        return {f"trainer.{name}": value for name, value in self.trainer.state_dict().items()}

    def compare(self, facts: Mapping[str, Any]) -> None:
        before, now = facts["average_from"], self.plan.average_from
        if facts["epochs"] == self.course.epochs and not alike(before, now):
            raise self.refusal("average_from", before, now)
        done = facts["epoch"] + (facts["batch"] > 0) if self.plan.belongs_to is None else facts["epochs"]
        if self.course.epochs < done:
            raise ValueError(
                "`checkpoint` should be of no more epochs than are asked for, or a new file. Found "
                f"{done} in {self.path}, where it is {self.course.epochs} now."
            )

    def load(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        self.trainer.load_state_dict(with_prefix(tensors, "trainer."))
        if facts["epochs"] != self.course.epochs:  # another part is averaged
            self.mean, self.n_averaged = {}, 0

    def _average_every(self, start: float) -> int:
        """Return the number of updates from one averaged value of the parameters to the next."""
        joined = self.trainer.batch_size * world_of(self.group)
        updates = (1 - start) * self.course.epochs * (self.n_rows or 0) / joined
        return max(1, math.floor(updates / _AVERAGED))

    def _read_noting_the_first(self, order: torch.Generator, check: bool) -> Iterator[Tensor]:
        """Return the chunks of an epoch, and take the fingerprint of the first one that has rows."""

        def noted(chunk: Tensor) -> Tensor:
            if self.first is None and len(chunk):
                self.first = fingerprint(chunk, most=_FIRST_BYTES)
            return chunk

        return map(noted, self.source.read(order, check))  # which keeps no chunk that it has given


def _settings(trainer: FusedTrainer, n_rows: int | None, plan: Plan) -> dict[str, Any]:
    """Return the settings of a run by name, as JSON: the position of a run is valid only with the same settings."""
    settings = {
        "machine": str(trainer.rbm),
        "batch_size": trainer.batch_size,
        "n_rows": n_rows,
        **{name: as_json(getattr(trainer, name, None)) for name in _SETTINGS},
    }
    estimator = plan.belongs_to or {}
    return {**estimator, **settings, **estimator}  # differences in an estimator's parameters are reported first


def _seeds(generator: torch.Generator, trainer: FusedTrainer, plan: Plan) -> dict[str, Any]:
    """Return the seeds of the generators that a caller has chosen."""
    if plan.belongs_to is not None:
        return {}
    chosen = {"generator": generator, "the trainer's generator": trainer.generator}
    return {
        f"seed of {name}": None if own is None or own is global_generator(own.device) else own.initial_seed()
        for name, own in chosen.items()
    }


def _total_rows(chunks: Chunks, trainer: FusedTrainer, *, needed: bool) -> int | None:
    """Return N of all ranks, or None if it is not known."""
    counts = exchange((chunks.n_rows or 0, chunks.n_rows is None), trainer.group, trainer.rbm.weights.device)
    total = None if any(unknown for _, unknown in counts) else sum(n for n, _ in counts)
    with together(trainer.group):
        if total is None and needed:
            raise ValueError(
                "`n_rows` should be given with chunks if `learning_rate` is a function or `average_from` is given, "
                "which depend on the part of training that is done. Found None."
            )
    if total == 0:
        raise ValueError(NO_ROWS)
    return total
