r"""Training around a `FusedTrainer`: epochs, learning rates, checkpoints, ranks, and data larger than memory.

N rows of data, C columns of the visible layer, M persistent chains, H hidden units.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from toolkit._checkpoint import alike, fingerprint, read_checkpoint, write_checkpoint
from toolkit._checks import integer, number, real
from toolkit._distributed import (
    exchange,
    from_first_rank,
    gather,
    raise_together,
    rank_generator,
    rank_of,
    same_on_all,
    scatter,
    shard,
    world_of,
)
from toolkit._divergence import DivergenceError, not_finite
from toolkit.blocks import no_graph
from toolkit.rbm.training._batches import NO_ROWS, Chunks, Data, batches, chunks_of
from toolkit.rbm.training.fused import FusedTrainer

__all__ = ["DivergenceError", "Schedule", "cosine_decay", "linear_decay", "rank_generator", "shard", "train"]

# What a trainer has, if it has it, beside the rate of its steps, the sizes of its state and its generator.
_SETTINGS = (
    "steps",
    "weight_decay",
    "fast_rate",
    "offset_rate",
    "inverse_temperatures",
    "reference",
    "product_dtype",
)

# The part of training that is done, from 0 to 1 -> a learning rate.
Schedule: TypeAlias = Callable[[float], float]

_SAME = "`checkpoint` should be of the same machine, trainer and data, or a new file."

_CHECK_EVERY = 100  # updates: what is checked then costs a thousandth of them
_FIRST_BYTES = 2**20  # of the first chunk of an epoch, by which data are known again
_AVERAGED = 2**10  # more parameters in a mean gain little, and the mean of very many stops to move in float32


def linear_decay(initial: float, *, hold: float = 0.0) -> Schedule:
    r"""Return a learning rate that stays, and then falls to zero in a straight line.

    .. math::
        \eta(t) = \eta_0 \min\Bigl(1, \frac{1 - t}{1 - t_0}\Bigr)

    Persistent chains follow a machine only if it comes to rest.

    Args:
        initial: :math:`\eta_0`, positive.
        hold: :math:`t_0`, the part of training before it falls, less than 1.

    Raises:
        ValueError: If an argument is out of its range.

    References:
        Tieleman, "Training restricted Boltzmann machines using approximations to the likelihood gradient", 2008:
        without `hold`.

    Example:
        >>> [linear_decay(0.1, hold=0.5)(part) for part in (0, 0.5, 0.75, 1)]
        [0.1, 0.1, 0.05, 0.0]
    """
    initial, hold = number("initial", initial, above=0), number("hold", hold, least=0, below=1)
    return lambda part: initial * min(1.0, (1 - part) / (1 - hold))


def cosine_decay(initial: float) -> Schedule:
    r"""Return a learning rate that falls to zero as half a cosine does, :math:`\eta_0 (1 + \cos \pi t) / 2`.

    Args:
        initial: :math:`\eta_0`, positive.

    Raises:
        ValueError: If it is not positive.

    References:
        Loshchilov & Hutter, "SGDR: stochastic gradient descent with warm restarts", 2017, equation 5, one period.

    Example:
        >>> [round(cosine_decay(0.1)(part), 3) for part in (0, 0.25, 0.5, 1)]
        [0.1, 0.085, 0.05, 0.0]
    """
    initial = number("initial", initial, above=0)
    return lambda part: initial * (1 + math.cos(math.pi * part)) / 2


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

    In every epoch each row is in one batch, and rows are in a new random order: that of a permutation where all are in
    memory; where they are not, chunks are, and of a file blocks from all over it are read together. Batches have
    `trainer.batch_size` rows, and the last one what is left.

    With a `checkpoint`, a call that finds the file goes on from it, and ends with the same bits as one that was never
    interrupted. The learning rate may be another than before, and so may `epochs`, but not fewer than are done: a mean
    of parameters then begins anew, from a part that may be another, and where it goes on at the earliest. All else has
    to be as it was, the seeds of the generators too, and is compared; of data in memory all rows are up to 256 MiB, of
    larger ones and of a file some from all over them, and of chunks the first one of an epoch. So chunks should be
    the same ones if they are read again with the same states of torch's generators. The last digits of
    floating-point numbers may be others, as another processor computes them.

    On several ranks (`FusedTrainer` with a `group`) each calls this function with its own part of the data, which may
    be none, its own chains and its own generators: see `shard` and `rank_generator`. Parameters are those of the first
    rank at the start, and the same on all ranks from then on. What is wrong with the arguments, the data or the state
    of one rank is raised on all.

    Args:
        trainer: Makes the updates.
        data: (N, C), a tensor or an array, of any type, which it keeps (``uint8`` saves memory). Zeros and ones may be
            probabilities, grey values say, in a floating-point type. A memory-mapped array is read in chunks of 2 MiB.
            Or chunks of it, (B, C): an iterable that can be read again for each epoch, such as a list or a DataLoader,
            or a function that returns one; a plain iterator if `epochs` is 1. One of them is held at a time.
        epochs: How often the data are read.
        learning_rate: The step size, or how it depends on the part of training that is done, from 0 to 1:
            `linear_decay`, `cosine_decay`, or any function.
        generator: Chooses the order of the rows; on any device. None: torch's default one.
        n_rows: N of this rank; needed with chunks, unless of a DataLoader, if the part of training that is done is. It
            is compared with what is read in the first epoch.
        average_from: If given, the machine ends with the mean of its parameters over the part of training from here to
            the end, 0.5 for its second half: that of up to 1024 times or a few more, evenly spaced.
        checkpoint: A file to write to, and to go on from.
        checkpoint_every: Updates from one checkpoint to the next; there is one at the end, too.
        callback: Called after each update with the number of updates, and of the epoch, from 1.

    Returns:
        The number of updates, those before an interruption among them.

    Raises:
        DivergenceError: If a parameter, or what the trainer carries on, is not finite. It is looked at every hundred
            updates, before each checkpoint, and at the end. The machine has its last parameters that were finite
            again, and the last checkpoint stays.
        TypeError: If `data` is no data, or can be read only once and has to be read more often; if `generator` or
            `callback` is something else.
        ValueError: If an argument is out of its range; if data are empty, of another shape, not finite, or not what
            the machine's visible units can be (by the end of the first epoch, without another pass over data that are
            not in memory); or if the checkpoint is of another machine, trainer, seed or data, or of more epochs.
        RuntimeError: If another rank has raised.

    References:
        Polyak & Juditsky, "Acceleration of stochastic approximation by averaging", 1992, for the mean of parameters.
        Swersky et al., "A tutorial on stochastic approximation algorithms for training restricted Boltzmann machines
        and deep belief nets", 2010, for its use here.

    Example:
        >>> from toolkit.rbm import RBM
        >>> data, generator = torch.eye(4, dtype=torch.uint8)[:2].repeat(10, 1), torch.Generator().manual_seed(0)
        >>> machine = RBM(4, 3, generator=generator)
        >>> trainer = FusedTrainer(machine, batch_size=10, steps=1, chains=torch.zeros(50, 3), generator=generator)
        >>> updates = train(trainer, data, epochs=1000, learning_rate=linear_decay(0.5), generator=generator)
        >>> updates, machine.log_likelihood(data.float()).mean().item() > -1.5  # log 1/2 at best, and -2.8 at the start
        (2000, True)
    """
    return run_training(
        trainer,
        data,
        epochs=epochs,
        learning_rate=learning_rate,
        generator=generator,
        n_rows=n_rows,
        average_from=average_from,
        checkpoint=checkpoint,
        checkpoint_every=checkpoint_every,
        callback=callback,
    )


def run_training(
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
    belongs_to: Mapping[str, Any] | None = None,
    resumed: Callable[[int], None] | None = None,
) -> int:
    """Do what `train` does, for an estimator.

    Args:
        trainer: As of `train`, and so are those that are not described here.
        data: As of `train`.
        epochs: As of `train`; no fewer than the checkpoint was written for if it has to belong to something.
        learning_rate: As of `train`.
        generator: As of `train`.
        n_rows: As of `train`.
        average_from: As of `train`.
        checkpoint: As of `train`.
        checkpoint_every: As of `train`.
        callback: As of `train`.
        belongs_to: What a checkpoint belongs to, by name, as JSON: it is compared in the place of the seeds.
        resumed: Called with the number of updates that are done if it goes on from a checkpoint.

    Returns:
        As `train`.

    Raises:
        DivergenceError: As `train`.
        TypeError: As `train`.
        ValueError: As `train`; also if the checkpoint belongs to something else.
        RuntimeError: As `train`.
    """
    group, error = trainer.group, None
    try:
        _check_arguments(epochs, learning_rate, n_rows, average_from, checkpoint, checkpoint_every, generator, callback)
        chunks = chunks_of(data, trainer.rbm, n_rows=n_rows, once=epochs == 1)
        if not_finite(trainer.rbm.named_parameters()) is not None:
            raise ValueError("The machine's parameters should be finite. Found others.")
    except (TypeError, ValueError) as found:
        error = found
    raise_together(error, group)
    # Of any type, and from here on of one that a checkpoint can hold.
    epochs, checkpoint_every = int(epochs), int(checkpoint_every)
    average_from = None if average_from is None else float(average_from)
    same = {"epochs": epochs, "batch_size": trainer.batch_size, "checkpoint_every": checkpoint_every}
    same_on_all(same | {"average_from": average_from, "checkpoint": checkpoint is not None}, group)
    from_first_rank(trainer.rbm.parameters(), group)
    depends = callable(learning_rate) or average_from is not None
    run = _Run(
        trainer=trainer,
        chunks=chunks,
        epochs=epochs,
        learning_rate=learning_rate if callable(learning_rate) else lambda part: learning_rate,
        generator=torch.default_generator if generator is None else generator,
        n_rows=_total_rows(chunks, trainer, needed=depends),
        average_from=average_from,
        path=None if checkpoint is None else Path(checkpoint),
        save_every=checkpoint_every,
        callback=callback or (lambda update, epoch: None),
        belongs_to=belongs_to,
        told=n_rows is not None,
        depends=depends,
    )
    run.resume()
    if run.update and resumed is not None:
        resumed(run.update)
    while run.epoch < epochs:
        run.train_epoch()
    run.finish()
    return run.update


class _Run:
    """Training as it goes on: where it is, what has been good, and what it averages."""

    def __init__(
        self,
        *,
        trainer: FusedTrainer,
        chunks: Chunks,
        epochs: int,
        learning_rate: Schedule,
        generator: torch.Generator,
        n_rows: int | None,
        average_from: float | None,
        path: Path | None,
        save_every: int,
        callback: Callable[[int, int], None],
        belongs_to: Mapping[str, Any] | None,
        told: bool,
        depends: bool,
    ) -> None:
        self.trainer, self.chunks, self.epochs, self.learning_rate = trainer, chunks, epochs, learning_rate
        self.n_rows, self.average_from, self.path, self.save_every = n_rows, average_from, path, save_every
        self.generator, self.callback, self.belongs_to = generator, callback, belongs_to
        self.told, self.depends = told, depends
        self.parameters = dict(trainer.rbm.named_parameters())
        # Where training is: epochs that are over, updates of the one that is not, updates in all.
        self.epoch = self.batch = self.update = 0
        # The running epoch can be read once more, in the same order: the order's seed, and the states that the
        # generators of the data had at its start.
        self.seed = 0
        self.order = torch.Generator()
        streams = (generator, *chunks.streams, *_unseen_generators(trainer))
        self.streams = {str(number): stream for number, stream in enumerate(streams)}
        self.at_start: dict[str, Tensor] = {}
        # Fingerprints by which the data are known again: of all of them, or of the first chunk of the epoch.
        known = None if path is None or chunks.fingerprint is None else chunks.fingerprint()
        self.known: dict[str, Any] = {"data": known, "first": None}
        if path is not None and known is None:
            self.chunks = replace(chunks, read=self._read_noting_the_first)
        self.source = chunks
        self.expected: dict[str, Any] = {}
        self.to_restore: dict[str, Tensor] | None = None
        self.looked_at = False
        with no_graph():
            self.good = {name: parameter.clone() for name, parameter in self.parameters.items()}
            self.last_good, self.n_averaged = 0, 0
            self.mean: dict[str, Tensor] = {}
            if average_from is not None:
                self.mean = {
                    name: torch.zeros_like(parameter, dtype=torch.promote_types(parameter.dtype, torch.float32))
                    for name, parameter in self.parameters.items()
                }
        self.average_every = 1
        if average_from is not None and n_rows is not None:
            updates = (1 - average_from) * epochs * n_rows / (trainer.batch_size * world_of(trainer.group))
            self.average_every = max(1, math.floor(updates / _AVERAGED))

    def train_epoch(self) -> None:
        """Make the updates of an epoch, or those that are left of it."""
        if not self.batch:
            self.seed = int(
                torch.empty((), dtype=torch.int64, device=self.generator.device).random_(generator=self.generator)
            )
            self.at_start = self._states() if self.path is not None else {}
        stream = batches(
            self.chunks,
            self.trainer.rbm,
            batch_size=self.trainer.batch_size,
            order=self.order.manual_seed(self.seed),
            check=not self.looked_at,
            group=self.trainer.group,
        )
        again = list(itertools.islice((n for _, n in stream), self.batch))
        if self.to_restore is not None:
            self._restore(len(again))
        rows = sum(again)
        for batch, n in stream:
            part = 0.0
            if self.n_rows:
                part = min(1.0, (self.epoch * self.n_rows + rows) / (self.epochs * self.n_rows))
            self.trainer.step(batch, learning_rate=_rate(self.learning_rate, part))
            rows += n
            self.batch += 1
            self.update += 1
            if self.average_from is not None and part >= self.average_from and self.update % self.average_every == 0:
                self._average()
            if self.update % _CHECK_EVERY == 0:
                self._check()
            if self.path is not None and self.update % self.save_every == 0:
                self._save()
            self.callback(self.update, self.epoch + 1)
        # A learning rate that ends too early or too late, or a mean over another part, would not be seen.
        if self.n_rows is not None and rows != self.n_rows and not self.looked_at and (self.depends or self.told):
            raise ValueError(
                f"`n_rows` should be how many rows an epoch has. Found {self.n_rows}, and an epoch of {rows}."
            )
        self.epoch, self.batch, self.looked_at = self.epoch + 1, 0, True

    def finish(self) -> None:
        """Check and save a last time, and give the machine the mean of its parameters if there is one."""
        self._check()
        self._save()
        if self.n_averaged:
            with no_graph():
                for name, parameter in self.parameters.items():
                    parameter.copy_(self.mean[name])

    def resume(self) -> None:
        """Go on from the checkpoint, if there is one."""
        if self.path is None:
            return
        group, rank = self.trainer.group, rank_of(self.trainer.group)
        parts, error = None, None
        if rank == 0:
            try:
                parts = self._read() if self.path.exists() else [None] * world_of(group)
            except (ValueError, OSError) as found:
                error = found
        raise_together(error, group)
        part = scatter(parts, group)
        if part is None:
            return
        try:
            self._go_on_from(*part)
        except ValueError as found:
            error = found
        raise_together(error, group)

    def _read(self) -> list[tuple[dict[str, Tensor], dict[str, Any]]]:
        """Return what the checkpoint has for each rank."""
        assert self.path is not None
        tensors, facts = read_checkpoint(self.path, room="rbm")
        world = world_of(self.trainer.group)
        if facts["ranks"] != world:
            raise ValueError(self._mismatch("number of ranks", facts["ranks"], world))
        shared = {name: tensor for name, tensor in tensors.items() if not name.startswith("rank")}
        return [
            (
                shared
                | {
                    name.removeprefix(f"rank{rank}."): tensor
                    for name, tensor in tensors.items()
                    if name.startswith(f"rank{rank}.")
                },
                facts,
            )
            for rank in range(world)
        ]

    def _go_on_from(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        own_facts = facts["own"][rank_of(self.trainer.group)]
        self._compare(facts, own_facts)
        own = self._tensors() | self._own_tensors()
        for name in sorted(own.keys() | tensors.keys()):
            if name.startswith("average."):
                continue
            found, expected = (_kind(values.get(name)) for values in (tensors, own))
            if found != expected:
                raise ValueError(self._mismatch(name, found, expected))
        with no_graph():
            for name, parameter in self.parameters.items():
                parameter.copy_(tensors[f"parameters.{name}"])
            if self.mean and facts["averaged"] and facts["epochs"] == self.epochs:
                self.n_averaged = facts["averaged"]
                for name, mean in self.mean.items():
                    mean.copy_(tensors[f"average.{name}"])
        self.epoch, self.batch, self.update = facts["epoch"], facts["batch"], facts["update"]
        self.seed, self.last_good = int(tensors["order"]), facts["update"]
        self.at_start = _with_prefix(tensors, "start.")
        self.to_restore, self.expected = tensors, {name: own_facts[name] for name in self.known}
        self._set_states(self.at_start)
        if not self.batch:  # it was the end of training: of its last epoch one chunk with rows is enough
            if self.expected["first"] is not None:
                chunks = self.chunks.read(self.order.manual_seed(self.seed), False)
                next((True for chunk in chunks if len(chunk)), None)
            self._restore(0)

    def _compare(self, facts: Mapping[str, Any], own: Mapping[str, Any]) -> None:
        """Raise a ValueError unless a checkpoint was written for what is trained now."""
        for name, value in (self.belongs_to or {}).items():
            before = (facts["belongs_to"] or {}).get(name)
            if not alike(before, value):
                raise ValueError(self._mismatch(name, before, value))
        for name, value in self._facts().items():
            if name != "belongs_to" and not alike(facts[name], value):
                raise ValueError(self._mismatch(name, facts[name], value))
        if facts["epochs"] == self.epochs and not alike(facts["average_from"], self.average_from):
            raise ValueError(self._mismatch("average_from", facts["average_from"], self.average_from))
        done = facts["epochs"] if self.belongs_to is not None else facts["epoch"] + (facts["batch"] > 0)
        if self.epochs < done:
            raise ValueError(
                "`checkpoint` should be of no more epochs than are asked for, or a new file. Found "
                f"{done} in {self.path}, where it is {self.epochs} now."
            )
        if self.belongs_to is None:
            for name, seed in self._seeds().items():
                if own["seeds"][name] != seed:
                    raise ValueError(self._mismatch(f"seed of {name}", own["seeds"][name], seed))
        if not alike(own["data"], self.known["data"]):
            raise ValueError(self._other_data())

    def _restore(self, n_batches: int) -> None:
        """After the part of the epoch that was done is read once more: the states that generators and chains had."""
        assert self.to_restore is not None
        error = None
        if not alike(self.known["first"], self.expected["first"]):
            error = ValueError(self._other_data())
        elif n_batches < self.batch:
            error = ValueError(f"`data` should be those of the checkpoint. Found fewer than its {self.batch} batches.")
        with no_graph():
            for name, parameter in self.parameters.items():
                if error is not None:
                    parameter.copy_(self.good[name])
                else:
                    self.good[name].copy_(parameter)
        raise_together(error, self.trainer.group)
        self._set_states(_with_prefix(self.to_restore, "now."))
        self.trainer.load_state_dict(_with_prefix(self.to_restore, "trainer."))
        self.to_restore = None

    def _read_noting_the_first(self, order: torch.Generator, check: bool) -> Iterator[Tensor]:
        """Return what reads the chunks of an epoch, and takes the fingerprint of the first one that has rows."""
        self.known["first"] = None

        def noted(chunk: Tensor) -> Tensor:
            if self.known["first"] is None and len(chunk):
                self.known["first"] = fingerprint(chunk, most=_FIRST_BYTES)
            return chunk

        return map(noted, self.source.read(order, check))  # which keeps no chunk that it has given

    def _check(self) -> None:
        """Keep the parameters if all is finite; otherwise bring the last ones back, and raise."""
        if self.last_good == self.update:
            return
        name = not_finite([*self.parameters.items(), *self.trainer.state_dict().items()])
        group = self.trainer.group
        if any(bad for (bad,) in exchange((name is not None,), group, self.trainer.rbm.weights.device)):
            with no_graph():
                for key, parameter in self.parameters.items():
                    parameter.copy_(self.good[key])
            name = name or "a part of another rank's state"
            kept = f" `{self.path}` stays as it was." if self.path is not None and self.path.exists() else ""
            raise DivergenceError(
                f"Training diverged: `{name}` is not finite after update {self.update}; after update {self.last_good} "
                f"all was, and the machine has its parameters of then again.{kept} Lower the learning rate, with a new "
                "trainer.",
                update=self.update,
                last_good=self.last_good,
                name=name,
            )
        with no_graph():
            for key, parameter in self.parameters.items():
                self.good[key].copy_(parameter)
        self.last_good = self.update

    def _average(self) -> None:
        """Take the parameters into their mean."""
        self.n_averaged += 1
        with no_graph():
            for name, parameter in self.parameters.items():
                self.mean[name].lerp_(parameter.to(self.mean[name]), 1 / self.n_averaged)

    def _save(self) -> None:
        """Write the checkpoint, of all ranks, if what it would hold is finite."""
        if self.path is None:
            return
        self._check()
        parts, error = gather((self._own_tensors(), self._own_facts()), self.trainer.group), None
        if parts is not None:
            own = {
                f"rank{rank}.{name}": tensor for rank, (part, _) in enumerate(parts) for name, tensor in part.items()
            }
            position = {"epoch": self.epoch, "batch": self.batch, "update": self.update}
            more: dict[str, Any] = {
                "averaged": self.n_averaged,
                "epochs": self.epochs,
                "average_from": self.average_from,
            }
            more |= {"ranks": len(parts), "own": [facts for _, facts in parts]}
            try:
                write_checkpoint(self.path, self._tensors() | own, self._facts() | position | more, room="rbm")
            except OSError as found:
                error = found
        raise_together(error, self.trainer.group)

    def _tensors(self) -> dict[str, Tensor]:
        """Return what is the same on all ranks."""
        return {
            **{f"parameters.{name}": parameter for name, parameter in self.parameters.items()},
            **{f"average.{name}": mean for name, mean in self.mean.items()},
        }

    def _own_tensors(self) -> dict[str, Tensor]:
        """Return what each rank has of its own."""
        return {
            "order": torch.tensor(self.seed),
            **{f"trainer.{name}": value for name, value in self.trainer.state_dict().items()},
            **{f"start.{name}": state for name, state in (self.at_start or self._states()).items()},
            **{f"now.{name}": state for name, state in self._states().items()},
        }

    def _facts(self) -> dict[str, Any]:
        """Return what has to be as it was, so that the position means the same."""
        return {
            "belongs_to": None if self.belongs_to is None else dict(self.belongs_to),
            "machine": str(self.trainer.rbm),
            "batch_size": self.trainer.batch_size,
            "n_rows": self.n_rows,
            **{name: _plain(getattr(self.trainer, name, None)) for name in _SETTINGS},
        }

    def _own_facts(self) -> dict[str, Any]:
        """Return what each rank has of its own that has to be as it was."""
        return {"seeds": self._seeds(), **self.known}

    def _seeds(self) -> dict[str, int | None]:
        """Return the seeds of the generators that a caller has chosen."""
        chosen = {"generator": self.generator, "the trainer's generator": self.trainer.generator}
        return {
            name: None if stream is None or stream in _global_generators(stream.device) else stream.initial_seed()
            for name, stream in chosen.items()
        }

    def _mismatch(self, name: str, found: Any, expected: Any) -> str:
        found, expected = (
            value.get("values", value) if isinstance(value, dict) else value for value in (found, expected)
        )
        return f"{_SAME} Found `{name}` {found} in {self.path}, where it is {expected} now."

    def _other_data(self) -> str:
        return f"{_SAME} Found other data in {self.path} than there are now."

    def _states(self) -> dict[str, Tensor]:
        return {name: stream.get_state() for name, stream in self.streams.items()}

    def _set_states(self, states: Mapping[str, Tensor]) -> None:
        for name, stream in self.streams.items():
            stream.set_state(states[name])


def _total_rows(chunks: Chunks, trainer: FusedTrainer, *, needed: bool) -> int | None:
    """Return N of all ranks, or None if it is not known."""
    counts = exchange((chunks.n_rows or 0, chunks.n_rows is None), trainer.group, trainer.rbm.weights.device)
    total = None if any(unknown for _, unknown in counts) else sum(n for n, _ in counts)
    if total is None and needed:
        raise ValueError(
            "`n_rows` should be given with chunks if `learning_rate` is a function or `average_from` is given, which "
            "depend on the part of training that is done. Found None."
        )
    if total == 0:
        raise ValueError(NO_ROWS)
    return total


def _unseen_generators(trainer: FusedTrainer) -> list[torch.Generator]:
    """Return the generators that a trainer draws from without knowing them."""
    return _global_generators(trainer.rbm.weights.device) if trainer.generator is None else []


def _global_generators(device: torch.device) -> list[torch.Generator]:
    """Return torch's own generator of a device."""
    return [torch.cuda.default_generators[device.index or 0]] if device.type == "cuda" else [torch.default_generator]


def _plain(value: Any) -> Any:
    """Return a setting as JSON has it."""
    if isinstance(value, Tensor):
        return fingerprint(value) | ({"values": value.tolist()} if value.numel() <= 100 else {})
    if isinstance(value, np.generic):
        return value.item()
    return str(value) if isinstance(value, torch.dtype) else value


def _kind(tensor: Tensor | None) -> str | None:
    return None if tensor is None else f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _with_prefix(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _check_arguments(
    epochs: int,
    learning_rate: float | Schedule,
    n_rows: int | None,
    average_from: float | None,
    checkpoint: str | os.PathLike[str] | None,
    checkpoint_every: int,
    generator: torch.Generator | None,
    callback: Callable[[int, int], None] | None,
) -> None:
    for name, value in (("epochs", epochs), ("checkpoint_every", checkpoint_every)):
        integer(name, value, 1)
    if n_rows is not None:
        integer("n_rows", n_rows, 0)
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(f"`generator` should be a torch.Generator, or None. Found {generator!r}.")
    if callback is not None and not callable(callback):
        raise TypeError(f"`callback` should be a function, or None. Found {callback!r}.")
    if not callable(learning_rate):
        number("learning_rate", learning_rate, above=0)
    if average_from is not None:
        number("average_from", average_from, least=0, below=1)
    if checkpoint is None:
        return
    if not isinstance(checkpoint, str | os.PathLike):
        raise ValueError(f"`checkpoint` should be a path, or None. Found {checkpoint!r}.")
    if Path(checkpoint).is_dir():
        raise ValueError(f"`checkpoint` should be a file, not a folder. Found {str(checkpoint)!r}.")
    if not Path(checkpoint).absolute().parent.is_dir():
        raise ValueError(f"`checkpoint` should be a file in a folder that exists. Found {str(checkpoint)!r}.")


def _rate(learning_rate: Schedule, part: float) -> float:
    found = learning_rate(part)
    rate = real(found)
    if rate is None or not 0 <= rate < math.inf:
        raise ValueError(f"`learning_rate` should return finite numbers, not negative. Found {found!r} at {part:.4g}.")
    return rate
