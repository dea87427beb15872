r"""One trainer for all methods of adversarial training: epochs, schedules, averages, checkpoints and ranks.

N samples, each of shape (...), C classes.
"""

from __future__ import annotations

import math
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup, all_reduce

from toolkit._checkpoint import alike, fingerprint, read_checkpoint, write_checkpoint
from toolkit._distributed import (
    exchange,
    from_first_rank,
    gather,
    raise_together,
    rank_of,
    same_on_all,
    scatter,
    world_of,
)
from toolkit._divergence import DivergenceError
from toolkit.adversarial._untouched import untouched
from toolkit.adversarial.balls import Bounds, Norm
from toolkit.adversarial.training import _evaluation
from toolkit.adversarial.training._arguments import (
    check_arguments,
    check_files,
    check_group,
    factor_at,
    method_of,
    name_of,
    name_of_score,
    schedule_of,
    score_of,
)
from toolkit.adversarial.training._batches import Batches, Part, batches_of, seed_of
from toolkit.adversarial.training._evaluation import CatastrophicOverfittingWarning, Collapse
from toolkit.adversarial.training._model import (
    global_generator,
    infinite_buffers,
    named,
    not_sound,
    undisturbed,
)
from toolkit.adversarial.training._optimizers import (
    MakeOptimizer,
    load_state,
    make_optimizer,
    set_rates,
    settings_of,
    state_of,
)
from toolkit.adversarial.training._rows import RowsOfBatch
from toolkit.adversarial.training.methods import BallArguments, Method
from toolkit.adversarial.training.schedules import Schedule
from toolkit.blocks import no_graph, ordinary_tensors

__all__ = ["CatastrophicOverfittingWarning", "DivergenceError", "History", "train"]

_SAME = "`checkpoint` should be of the same model, method, settings and data, or a new file."

_LARGEST_LOSS = 1e8  # nats per sample: Adam can take huge steps for ever and stay finite
_CHECK_EVERY = 100  # updates: what is checked then costs a thousandth of them


@dataclass
class History:
    """What happened while a model was trained.

    Attributes:
        losses: The mean of the method's surrogate in each epoch, in nats per sample.
        seconds: How long each epoch took, without its evaluation.
        evaluated: The epochs after which the model was evaluated, from 1.
        scores: What was found then, by name; of held-out data ``clean``, ``fgsm`` and ``robust``, shares of them.
        best: The epoch with the highest robust score, from 1; None without such scores.
        updates: How many batches were trained on, those before an interruption among them.
    """

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    evaluated: list[int] = field(default_factory=list)
    scores: dict[str, list[float]] = field(default_factory=dict)
    best: int | None = None
    updates: int = 0


def train(
    model: nn.Module,
    data: object,
    labels: Tensor | None = None,
    *,
    method: str | Method,
    epsilon: float,
    norm: Norm = "linf",
    bounds: Bounds = (0, 1),
    epochs: int,
    batch_size: int = 128,
    optimizer: str | MakeOptimizer = "adam",
    learning_rate: float | None = None,
    schedule: str | Schedule = "one_cycle",
    epsilon_warmup: float = 0.0,
    average: float | None = None,
    augment: Callable[..., Tensor] | None = None,
    generator: torch.Generator,
    evaluate: object = None,
    evaluate_every: int = 1,
    keep: Literal["last", "best"] = "last",
    patience: int | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    checkpoint_every: int = 1000,
    group: ProcessGroup | None = None,
    callback: Callable[[int, int], None] | None = None,
) -> History:
    r"""Train a model to be right in a ball around every input: `Method.step` for every batch of every epoch.

    In every epoch each sample is in one batch, in a new random order. Batches have nearly the same size, `batch_size`
    rows at most. All that is random, the model's own dropout too, is drawn from `generator`; torch's global generators
    are as before afterwards, and so are the modes of the modules. Gradients are cleared, also after an error.

    With a `checkpoint`, a call that finds the file goes on from it and ends with the same bits as one that was never
    interrupted; one that finds a finished run returns at once. All that decides the result has to be as it was and is
    compared, functions by their names: the data (all of them up to 256 MiB, of larger ones and of batches that are
    given some), the seed, the settings, and the shapes of the model. The last digits of floating-point numbers may be
    others, as another processor computes them.

    On several ranks each calls this function with the same arguments and its `group`. Data in memory are the same on
    all of them, and every rank takes its part of each batch, with the random numbers that its rows would have had on
    one rank; a DataLoader gives each rank its own part. Gradients are added in one reduction for each update, so that
    the model is, up to rounding, the one of a single process. Batch normalisation sees the rows of its rank alone,
    unless it is a `torch.nn.SyncBatchNorm`, and running statistics are averaged over ranks after each epoch.

    Args:
        model: Inputs (N, ...) to logits (N, C). Trained in place. If it is in training mode, parts of it that are in
            evaluation mode (frozen batch normalisation) stay so; if it is not, all of it is trained in training mode.
            Parameters that do not require gradients are left alone.
        data: Inputs (N, ...) with `labels`; a data set with the attributes `inputs` and `labels`; a pair of these; or
            an iterable with a length that gives batches (inputs, labels) anew for each epoch, a DataLoader say. They
            are floating point, or bytes from 0 to 255, which stay bytes and are divided by 255 batch by batch: radius
            and bounds are those of inputs from 0 to 1.
        labels: (N,), integers.
        method: What is minimised: a `Method`, or its name (``"standard"``, ``"fgsm"``, ``"rs_fgsm"``, ``"pgd"``,
            ``"trades"``, ...) for its default settings.
        epsilon: Radius of the ball.
        norm: ``"linf"``, ``"l2"`` or ``"l1"``.
        bounds: Least and greatest value of an input; None for no box.
        epochs: How often the data are read.
        batch_size: The most rows of a batch, of all ranks together. Of no meaning where batches are given.
        optimizer: ``"adam"``; ``"sgd"``, with Nesterov momentum 0.9 and weight decay 5e-4; or a function of parameters
            that returns a `torch.optim.Optimizer`.
        learning_rate: Its rate where `schedule` is 1. None: 0.002 for Adam, 0.1 for SGD, that of an optimiser given.
        schedule: What the rate is multiplied by: ``"one_cycle"``, ``"cosine"``, ``"piecewise"``, ``"constant"``, or a
            function of the part of training that is done, from 0 to 1.
        epsilon_warmup: The part of training, from 0 to 1, in which the radius rises from 0 to `epsilon` in a straight
            line.
        average: If given, the model is evaluated with, and ends with, a running mean of its parameters (and
            statistics), in which those of k updates ago weigh ``average**k`` as much as the last ones, 0.995 say.
        augment: Called with inputs (N, ...), scaled, and ``generator=``; returns inputs. `random_crop_flip` is one.
        generator: Chooses the order of samples and seeds all else, on any device. Not torch's global one.
        evaluate: Held-out data, as `data` in memory; or a function of the model that returns scores by name, of which
            the one called ``"robust"`` decides which epoch is best. It is called with the model in evaluation mode and
            with nothing recorded, and leaves no trace in its modes, its buffers and the global generators. What takes
            gradients itself does so in ``torch.enable_grad()``. On ranks it is called on each; those of the first
            count.
        evaluate_every: Epochs from one evaluation to the next; there is one at the end, too.
        keep: Which parameters the model ends with: those of the last epoch, or of the one with the best robust score.
            Robust accuracy of held-out data often falls late in training (Rice et al. 2020).
        patience: If given, training stops after so many evaluations without a better robust score.
        checkpoint: A file to write to, and to go on from.
        checkpoint_every: Updates from one checkpoint to the next; there is one at the end, too.
        group: The ranks. None: this process alone.
        callback: Called after each update with the number of updates, and of the epoch, from 1.

    Returns:
        Losses, times and scores, those before an interruption among them.

    Raises:
        DivergenceError: If a parameter or a statistic is not finite, or the loss is not, or above 1e8. The model has
            its last good ones again, and the last checkpoint stays. A buffer that has infinities from the start, such
            as a mask, may keep them.
        TypeError: If an argument is of another type than it should be, or `evaluate` returns no scores.
        ValueError: If an argument is out of its range, a label is none of the classes, bytes come with the radius or
            the bounds of inputs to 255, or the checkpoint is of something else.
        RuntimeError: If another rank has raised.

    Warns:
        CatastrophicOverfittingWarning: If held-out accuracy under PGD collapses while that under FGSM does not
            (Wong, Rice and Kolter, "Fast is better than free: revisiting adversarial training", 2020).

    References:
        Madry, Makelov, Schmidt, Tsipras and Vladu, "Towards deep learning models resistant to adversarial attacks",
        2018. Rice, Wong and Kolter, "Overfitting in adversarially robust deep learning", 2020, for `keep`.

    Example:
        >>> x, labels = torch.tensor([[0.2], [0.8]]).repeat(50, 1), torch.tensor([0, 1]).repeat(50)
        >>> model, generator = torch.nn.Linear(1, 2), torch.Generator().manual_seed(0)
        >>> settings = {"method": "pgd", "epsilon": 0.2, "epochs": 50, "learning_rate": 0.1}
        >>> history = train(model, x, labels, **settings, generator=generator, evaluate=(x, labels))
        >>> history.scores["robust"][-1]
        1.0
    """
    check_group(group)
    error = None
    try:
        chosen = method_of(method)
        check_arguments(epsilon, epochs, batch_size, epsilon_warmup, average, evaluate_every, keep, patience, evaluate)
        check_files(model, generator, learning_rate, checkpoint, checkpoint_every, augment, callback)
        factor, factor_name = schedule_of(schedule)
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if not parameters:
            raise ValueError("`model` should have parameters that require gradients. Found none.")
        name = not_sound(dict(named(model)), infinite_buffers(model))
        if name is not None:
            raise ValueError(f"`model` should be finite. Found that `{name}` is not.")
        made, rates = make_optimizer(optimizer, parameters, learning_rate)
        ball: BallArguments = {"epsilon": float(epsilon), "norm": norm, "bounds": bounds}
        batches = batches_of(
            data,
            labels,
            batch_size=batch_size,
            model=model,
            ball=ball,
            augment=augment,
            group=group,
            noted=checkpoint is not None or group is not None,
        )
        score = score_of(evaluate, ball, group)
    except (TypeError, ValueError) as found:
        error = found
    raise_together(error, group)
    settings: dict[str, Any] = {
        "method": repr(chosen),
        "epsilon": float(epsilon),
        "norm": norm,
        "bounds": repr(bounds),
        "epochs": int(epochs),
        "batch_size": int(batch_size),
        "batches": batches.n_batches,
        "optimizer": settings_of(made, rates),
        "schedule": factor_name,
        "epsilon_warmup": float(epsilon_warmup),
        "average": None if average is None else float(average),
        "augment": None if augment is None else name_of(augment),
        "evaluate": None if score is None else name_of_score(score),
        "evaluate_every": int(evaluate_every),
        "keep": keep,
        "patience": patience,
        "seed": generator.initial_seed(),
        "data": batches.known,
    }
    same_on_all(settings | {"checkpoint": checkpoint is not None, "checkpoint_every": checkpoint_every}, group)
    _warn_of_local_statistics(model, group)
    with ordinary_tensors(), undisturbed(model), _without_gradients(parameters):
        from_first_rank((tensor for _, tensor in named(model)), group)
        run = _Run(
            model=model,
            method=chosen,
            ball=ball,
            optimizer=made,
            rates=rates,
            schedule=factor,
            batches=batches,
            generator=generator,
            score=score,
            settings=settings,
            path=None if checkpoint is None else Path(checkpoint),
            save_every=int(checkpoint_every),
            group=group,
            callback=callback or (lambda update, epoch: None),
        )
        run.resume()
        while run.epoch < epochs and not run.stopped:
            run.train_epoch()
        run.finish()
    return run.history


class _Run:
    """Training as it goes on: where it is, what has been good, and what it averages."""

    def __init__(
        self,
        *,
        model: nn.Module,
        method: Method,
        ball: BallArguments,
        optimizer: torch.optim.Optimizer,
        rates: list[float],
        schedule: Schedule,
        batches: Batches,
        generator: torch.Generator,
        score: Callable[[nn.Module], Mapping[str, float]] | None,
        settings: dict[str, Any],
        path: Path | None,
        save_every: int,
        group: ProcessGroup | None,
        callback: Callable[[int, int], None],
    ) -> None:
        self.model, self.method, self.ball, self.schedule = model, method, ball, schedule
        self.optimizer, self.rates, self.batches, self.score = optimizer, rates, batches, score
        self.settings, self.path, self.save_every, self.group = settings, path, save_every, group
        self.callback, self.collapse, self.history = callback, Collapse(), History()
        self.epochs, self.total = settings["epochs"], settings["epochs"] * batches.n_batches
        self.infinite = infinite_buffers(model)
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.device = self.parameters[0].device
        # Where training is: epochs that are over, updates of the one that is not, updates in all.
        self.epoch = self.batch = self.update = 0
        self.stopped = self.finished = False
        # The running epoch can be read once more from its seed and the states that the data's generators had then.
        self.seed = 0
        self.order, self.draws = torch.Generator(), torch.Generator(generator.device)
        streams = {id(stream): stream for stream in (generator, *batches.streams)}
        self.generator, self.streams = generator, list(streams.values())
        self.at_start: list[Tensor] = []
        self.state: Mapping[str, Tensor] = {}
        self.first: list[dict[str, Any]] | None = None
        self.rows = 0
        self.n_classes: int | None = None
        with no_graph():
            self.good = {name: tensor.clone() for name, tensor in self.tensors.items()}
            self.loss = torch.zeros((), dtype=torch.float64, device=self.device)
            self.mean: dict[str, Tensor] = {}
            self.best: dict[str, Tensor] = {}
        self.last_good, self.n_averaged, self.best_score, self.waited, self.spent = 0, 0, -math.inf, 0, 0.0

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The model's parameters and buffers, asked for anew: a model may put a new tensor in a buffer's place."""
        return dict(named(self.model))

    # --- the steps ---------------------------------------------------------------------------------------------------

    def train_epoch(self) -> None:
        """Make the updates of an epoch, or those that are left of it; then evaluate, if it is time to."""
        if not self.batch:
            self.seed = seed_of(self.generator)
            self.at_start = self._stream_states()
        started = time.perf_counter()
        order = self.order.manual_seed(self.seed)
        seeds = torch.Generator().manual_seed(self.seed ^ 1)
        drawn = [seed_of(seeds) for _ in range(self.batches.n_batches)]
        for part in self.batches.read(order, self.batch, self._note_first):
            if self.batch >= self.batches.n_batches:
                raise ValueError(f"`data` should have as many batches as its length. Found more than {self.batch}.")
            self._step(part, drawn[self.batch])
            self.batch += 1
            self.update += 1
            self._average()
            # On one processor a look at the loss costs nothing; elsewhere it would wait for the device, or for ranks.
            alone = self.device.type == "cpu" and self.group is None
            if self.update % _CHECK_EVERY == 0 or (alone and self._loss_is_bad()):
                self._check()
            if self.path is not None and self.update % self.save_every == 0 and self.batch < self.batches.n_batches:
                self.spent, started = self.spent + time.perf_counter() - started, time.perf_counter()
                self._save()
            self.callback(self.update, self.epoch + 1)
        if self.batch < self.batches.n_batches:
            raise ValueError(
                f"`data` should have as many batches as its length, {self.batches.n_batches}. Found {self.batch}."
            )
        self._check()
        self._average_statistics()
        self._close_epoch(self.spent + time.perf_counter() - started)
        if self.update % self.save_every < self.batches.n_batches and self.epoch < self.epochs:
            self._save()

    def _step(self, part: Part, seed: int) -> None:
        """Train on one batch. Whatever is drawn follows from the seed."""
        done = self.update / self.total
        set_rates(self.optimizer, self.rates, factor_at(self.schedule, done))
        warmup = self.settings["epsilon_warmup"]
        share = min(1.0, (self.update + 1) / (self.total * warmup)) if warmup else 1.0
        ball: BallArguments = {**self.ball, "epsilon": self.settings["epsilon"] * share}
        rank = rank_of(self.group)
        global_generator(self.device).manual_seed((seed + rank) % 2**63)
        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            stack.enter_context(self._labels_checked(part))
            if part.total is None:
                self.draws.manual_seed((seed + rank) % 2**63)
            else:
                self.draws.manual_seed(seed)
                if self.group is not None:
                    rows = slice(rank, None, world_of(self.group))
                    stack.enter_context(RowsOfBatch(self.draws, rows=rows, total=part.total))
            loss, self.state = self.method.step(
                self.model,
                part.x,
                part.labels,
                ball=ball,
                generator=self.draws,
                update=lambda loss: self._update(loss, len(part.x)),
                state=self.state,
            )
        with no_graph():
            self.loss += loss * len(part.x)
        self.rows += len(part.x)

    def _update(self, loss: Tensor, rows: int) -> None:
        """Move the parameters against the gradient of the mean loss of all ranks' rows."""
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        if self.group is not None:
            _add_up(self.parameters, rows, self.group)
        self.optimizer.step()

    @contextmanager
    def _labels_checked(self, part: Part) -> Iterator[None]:
        """Raise a ValueError if a label is none of the classes that the model has, which its first answer shows.

        On a GPU torch would end the process.
        """
        least = self.method.least_label

        def check(*_: Any) -> None:
            wrong = [label for label in part.ends if least is not None and not least <= label < (self.n_classes or 0)]
            if wrong and self.n_classes:
                raise ValueError(
                    f"`labels` should be from {least} to {self.n_classes - 1}: the model has {self.n_classes} classes. "
                    f"Found {wrong[0]}."
                )

        def look(module: nn.Module, inputs: Any, logits: Any) -> None:
            self.n_classes = logits.shape[1] if isinstance(logits, Tensor) and logits.dim() == 2 else 0
            check()

        if self.n_classes is not None:
            check()
            yield
            return
        hook = self.model.register_forward_hook(look)
        try:
            yield
        finally:
            hook.remove()

    def _average(self) -> None:
        """Take the model into its running mean, whose weights add up to 1 from the first update on."""
        decay = self.settings["average"]
        if decay is None:
            return
        self.n_averaged += 1
        weight = 1.0 if decay == 0 else (1 - decay) / (1 - decay**self.n_averaged)
        with no_graph():
            if not self.mean:
                self.mean = {name: _wide(tensor) for name, tensor in self.tensors.items()}
            for name, tensor in self.tensors.items():
                if tensor.is_floating_point() and name not in self.infinite:
                    self.mean[name].lerp_(tensor.to(self.mean[name].dtype), weight)
                else:
                    self.mean[name].copy_(tensor)

    def _average_statistics(self) -> None:
        """Give all ranks the mean of their running statistics, and the first one's of what cannot be averaged."""
        if self.group is None:
            return
        with no_graph():
            parameters = dict(self.model.named_parameters())
            for name, buffer in self.tensors.items():
                if name in parameters:
                    continue
                first = buffer.clone()
                from_first_rank([first], self.group)
                if buffer.is_floating_point() and name not in self.infinite:
                    # The mean of what they differ by: a constant stays as it is to the bit, also the least of numbers.
                    change = buffer - first
                    all_reduce(change, group=self.group)
                    first += change / world_of(self.group)
                buffer.copy_(first)

    # --- the ends of epochs ------------------------------------------------------------------------------------------

    def _close_epoch(self, seconds: float) -> None:
        total = torch.stack([self.loss, self.loss.new_tensor(float(self.rows))])
        if self.group is not None:
            all_reduce(total, group=self.group)
        self.epoch, self.batch, self.rows, self.spent = self.epoch + 1, 0, 0, 0.0
        with no_graph():
            self.loss.zero_()
        self.history.losses.append((total[0] / total[1]).item())
        self.history.seconds.append(seconds)
        if self.score is not None and (self.epoch % self.settings["evaluate_every"] == 0 or self.epoch == self.epochs):
            self._evaluate(self.score)

    def _evaluate(self, score: Callable[[nn.Module], Mapping[str, float]]) -> None:
        with self._averaged():
            with untouched(self.model), no_graph():
                found = score(self.model)
            scores = _of_first_rank(_as_scores(found, self.group), self.group)
            self.history.evaluated.append(self.epoch)
            for name, value in scores.items():
                self.history.scores.setdefault(name, []).append(value)
            if "robust" in scores and scores["robust"] > self.best_score:
                self.best_score, self.waited = scores["robust"], 0
                self.history.best = self.epoch
                if self.settings["keep"] == "best":
                    with no_graph():
                        self.best = {name: tensor.clone() for name, tensor in self.tensors.items()}
            else:
                self.waited += 1
        patience = self.settings["patience"]
        if (self.settings["keep"] == "best" or patience is not None) and "robust" not in scores:
            raise ValueError(f"`evaluate` should return a score called 'robust'. Found {sorted(scores)}.")
        before = self.collapse.best.get("robust", 0.0)
        if self.collapse.look(scores):
            _evaluation.warn(self.epoch, scores, before)
        self.stopped = patience is not None and self.waited >= patience

    @contextmanager
    def _averaged(self) -> Iterator[None]:
        """Give the model its running mean for a while, if there is one; then its own values, to the bit."""
        if not self.mean:
            yield
            return
        with no_graph():
            own = {name: tensor.clone() for name, tensor in self.tensors.items()}
        self._set(self.mean)
        try:
            yield
        finally:
            self._set(own)

    def finish(self) -> None:
        """Save a last time, and give the model the parameters that it is to end with."""
        self.history.updates = self.update
        if not self.finished:
            self.finished = True
            self._save()
        if self.best:
            self._set(self.best)
        elif self.mean:
            self._set(self.mean)

    def _set(self, values: Mapping[str, Tensor]) -> None:
        with no_graph():
            for name, tensor in self.tensors.items():
                tensor.copy_(values[name])

    def _check(self) -> None:
        """Keep the model if all is finite; otherwise bring the last one back that was, and raise."""
        if self.last_good == self.update:
            return
        name = not_sound(self.tensors, self.infinite) or ("the loss" if self._loss_is_bad() else None)
        if any(bad for (bad,) in exchange((name is not None,), self.group, self.device)):
            self._set(self.good)
            name = name or "a part of another rank's state"
            what = f"above {_LARGEST_LOSS:g}, or not finite," if name == "the loss" else "not finite"
            kept = f" `{self.path}` stays as it was." if self.path is not None and self.path.exists() else ""
            raise DivergenceError(
                f"Training diverged: `{name}` is {what} after update {self.update}; after update {self.last_good} "
                f"all was well, and the model has its parameters of then again.{kept} Lower the learning rate.",
                update=self.update,
                last_good=self.last_good,
                name=name,
            )
        with no_graph():
            for key, tensor in self.tensors.items():
                self.good[key].copy_(tensor)
        self.last_good = self.update

    def _loss_is_bad(self) -> bool:
        return self.rows > 0 and not self.loss.item() / self.rows < _LARGEST_LOSS

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def resume(self) -> None:
        """Go on from the checkpoint, if there is one."""
        if self.path is None:
            return
        parts, error = None, None
        if rank_of(self.group) == 0:
            try:
                parts = self._read() if self.path.exists() else [None] * world_of(self.group)
            except (ValueError, OSError) as found:
                error = found
        raise_together(error, self.group)
        part = scatter(parts, self.group)
        if part is None:
            return
        tensors, facts = part
        try:
            self._compare(tensors, facts)
        except ValueError as found:
            error = found
        raise_together(error, self.group)
        self._go_on_from(tensors, facts)

    def _read(self) -> list[tuple[dict[str, Tensor], dict[str, Any]]]:
        """Return what the checkpoint has for each rank."""
        assert self.path is not None
        tensors, facts = read_checkpoint(self.path, room="adversarial")
        if facts["ranks"] != world_of(self.group):
            raise ValueError(self._mismatch("number of ranks", facts["ranks"], world_of(self.group)))
        for name, value in self.settings.items():
            if not alike(facts["settings"].get(name), value):
                raise ValueError(self._mismatch(name, facts["settings"].get(name), value))
        shared = {name: tensor for name, tensor in tensors.items() if not name.startswith("rank")}
        own = [_with_prefix(tensors, f"rank{rank}.") for rank in range(facts["ranks"])]
        return [(shared | part, facts | facts["own"][rank]) for rank, part in enumerate(own)]

    def _compare(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        """Raise a ValueError unless a checkpoint is of this model and, as far as can be seen, of these batches."""
        saved = _with_prefix(tensors, "model.")
        for name in sorted(saved.keys() | self.tensors.keys()):
            found, expected = (_kind(values.get(name)) for values in (saved, self.tensors))
            if found != expected:
                raise ValueError(self._mismatch(name, found, expected))
        if facts["streams"] != len(self.streams):
            raise ValueError(self._mismatch("number of generators", facts["streams"], len(self.streams)))
        if self.batches.known is None and facts["update"]:
            now = self._stream_states()
            self._set_streams(tensors, "start.")
            try:
                next(self.batches.read(self.order.manual_seed(facts["seed"]), 0, self._note_first), None)
            finally:
                for stream, state in zip(self.streams, now, strict=True):
                    stream.set_state(state)
            if not alike(self.first, facts["first"]):
                raise ValueError(f"{_SAME} Found other data in {self.path} than there are now.")

    def _go_on_from(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        self._set(_with_prefix(tensors, "model."))
        with no_graph():
            for name, tensor in self.tensors.items():
                self.good[name].copy_(tensor)
            self.loss.fill_(facts["loss"])
        self.mean, self.best, self.state = (
            {name: tensor.to(self.device) for name, tensor in _with_prefix(tensors, prefix).items()}
            for prefix in ("mean.", "best.", "state.")
        )
        load_state(self.optimizer, _with_prefix(tensors, "optimizer."), facts["optimizer"])
        self.epoch, self.batch, self.update, self.rows = (facts[name] for name in ("epoch", "batch", "update", "rows"))
        self.last_good, self.seed, self.spent = self.update, facts["seed"], facts["spent"]
        self.stopped, self.finished, self.first = facts["stopped"], facts["finished"], facts["first"]
        self.n_averaged, self.waited = facts["n_averaged"], facts["waited"]
        self.best_score = -math.inf if facts["best_score"] is None else facts["best_score"]
        self.collapse.best, self.collapse.found = facts["collapse"]
        self.history = History(**facts["history"])
        self.at_start = [tensors[f"start.{number}"] for number in range(len(self.streams))]
        self._set_streams(tensors, "start." if self.batch else "now.")

    def _set_streams(self, tensors: Mapping[str, Tensor], prefix: str) -> None:
        for number, stream in enumerate(self.streams):
            stream.set_state(tensors[f"{prefix}{number}"])

    def _note_first(self, x: Tensor, labels: Tensor) -> None:
        """Note by what the batches of an epoch are known again, which are not in memory."""
        if self.path is not None:
            self.first = [fingerprint(x), fingerprint(labels)]

    def _save(self) -> None:
        """Write the checkpoint, of all ranks, if what it would hold is finite."""
        if self.path is None:
            return
        self._check()
        numbers, facts = self._facts()
        parts, error = gather((self._own_tensors(), {"first": self.first}), self.group), None
        if parts is not None:
            own = {f"rank{rank}.{key}": tensor for rank, (part, _) in enumerate(parts) for key, tensor in part.items()}
            try:
                tensors = self._shared_tensors() | numbers | own
                write_checkpoint(self.path, tensors, facts | {"own": [part for _, part in parts]}, room="adversarial")
            except OSError as found:
                error = found
        raise_together(error, self.group)

    def _facts(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the state of the optimiser in tensors, and all else that there is to know."""
        tensors, numbers = state_of(self.optimizer)
        facts = {
            "settings": self.settings,
            "ranks": world_of(self.group),
            "streams": len(self.streams),
            "optimizer": numbers,
            "epoch": self.epoch,
            "batch": self.batch,
            "update": self.update,
            "rows": self.rows,
            "loss": self.loss.item(),
            "seed": self.seed,
            "spent": self.spent,
            "stopped": self.stopped,
            "finished": self.finished,
            "n_averaged": self.n_averaged,
            "waited": self.waited,
            "best_score": None if self.best_score == -math.inf else self.best_score,
            "collapse": [self.collapse.best, self.collapse.found],
            "history": asdict(self.history),
        }
        return {f"optimizer.{name}": tensor for name, tensor in tensors.items()}, facts

    def _shared_tensors(self) -> dict[str, Tensor]:
        """Return what is the same on all ranks."""
        kept = {"model": self.tensors, "mean": self.mean, "best": self.best}
        return {f"{kind}.{name}": tensor for kind, tensors in kept.items() for name, tensor in tensors.items()}

    def _own_tensors(self) -> dict[str, Tensor]:
        """Return what each rank has of its own."""
        return {
            **{f"start.{number}": state for number, state in enumerate(self.at_start)},
            **{f"now.{number}": state for number, state in enumerate(self._stream_states())},
            **{f"state.{name}": tensor for name, tensor in self.state.items()},
        }

    def _stream_states(self) -> list[Tensor]:
        return [stream.get_state() for stream in self.streams]

    def _mismatch(self, name: str, found: Any, expected: Any) -> str:
        return f"{_SAME} Found `{name}` {found} in {self.path}, where it is {expected} now."


# --- gradients of several ranks --------------------------------------------------------------------------------------


def _add_up(parameters: list[nn.Parameter], rows: int, group: ProcessGroup) -> None:
    """Give all ranks the gradient of the mean over the rows of all of them, by one reduction."""
    wide = torch.float32
    for parameter in parameters:
        wide = torch.promote_types(wide, parameter.dtype)
    device = parameters[0].device
    with no_graph():
        parts = [p.grad if p.grad is not None else torch.zeros_like(p) for p in parameters]
        has = torch.tensor([float(p.grad is not None) for p in parameters], dtype=wide, device=device)
        flat = torch.cat([*(part.reshape(-1).to(wide) * rows for part in parts), has, has.new_tensor([float(rows)])])
        all_reduce(flat, group=group)
        *slices, has, total = flat.split([*(part.numel() for part in parts), len(parts), 1])
        for number, (parameter, part) in enumerate(zip(parameters, slices, strict=True)):
            # A parameter that no rank has used keeps no gradient, so that the optimiser passes it over.
            if parameter.grad is not None or bool(has[number] > 0):
                parameter.grad = (part / total).reshape(parameter.shape).to(parameter.dtype)


def _of_first_rank(value: Any, group: ProcessGroup | None) -> Any:
    found = gather(value, group)
    return scatter(None if found is None else [found[0]] * len(found), group)


def _as_scores(found: object, group: ProcessGroup | None) -> dict[str, float]:
    """Return scores by name; raise a TypeError, on all ranks, if they are none."""
    scores: dict[str, float] = {}
    error = None
    try:
        scores = {name: float(value) for name, value in found.items()}  # type: ignore[attr-defined]
    except (AttributeError, TypeError, ValueError):
        kind = repr(found) if isinstance(found, Mapping) else type(found).__name__
        error = TypeError(f"`evaluate` should return scores, a number by name. Found {kind}.")
    raise_together(error, group)
    return scores


# --- the model -------------------------------------------------------------------------------------------------------


@contextmanager
def _without_gradients(parameters: list[nn.Parameter]) -> Iterator[None]:
    """Leave no gradient behind, however training ends."""
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.grad = None


def _warn_of_local_statistics(model: nn.Module, group: ProcessGroup | None) -> None:
    if group is None or world_of(group) == 1:
        return
    norms = nn.modules.batchnorm._BatchNorm
    if any(isinstance(m, norms) and m.training and not isinstance(m, nn.SyncBatchNorm) for m in model.modules()):
        warnings.warn(
            "Batch normalisation sees the rows of its rank alone, so that ranks do not train quite as one process "
            "would. On GPUs `torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)` makes it see all rows.",
            stacklevel=3,
        )


# --- small things ----------------------------------------------------------------------------------------------------


def _wide(tensor: Tensor) -> Tensor:
    """Return a zero for a running mean of a tensor, in at least single precision."""
    dtype = torch.promote_types(tensor.dtype, torch.float32) if tensor.is_floating_point() else tensor.dtype
    return torch.zeros_like(tensor, dtype=dtype)


def _kind(tensor: Tensor | None) -> str | None:
    return None if tensor is None else f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _with_prefix(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
