"""A run of adversarial training: its steps, its evaluations, and its state in a checkpoint."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import all_reduce

from toolkit._checkpoint import fingerprint
from toolkit._distributed import rank_of, world_of
from toolkit._progress import Progress
from toolkit._run import Course, Run, global_generator, seed_of, with_prefix
from toolkit.adversarial.training._arguments import Plan
from toolkit.adversarial.training._batches import Batches, Part
from toolkit.adversarial.training._evaluation import Collapse, Score, scores_of, warn_of_collapse
from toolkit.adversarial.training._labels import LabelCheck
from toolkit.adversarial.training._model import average_statistics, infinite_buffers, named
from toolkit.adversarial.training._optimizers import Descent
from toolkit.adversarial.training._rows import RowsOfBatch
from toolkit.blocks import no_graph

__all__ = ["History", "Training"]

_LARGEST_LOSS = 1e8  # nats per sample: Adam can take huge steps forever and stay finite


@dataclass
class History:
    """The course of a training run.

    Attributes:
        losses: The mean of the method's surrogate in each epoch, in nats per sample.
        seconds: Duration of each epoch, without its evaluation.
        evaluated: The epochs after which the model was evaluated, from 1.
        scores: The scores after these epochs; for held-out data the accuracies ``clean``, ``fgsm`` and ``robust``.
        best: The epoch with the highest robust score, from 1; None without such scores.
        updates: Number of updates, those before an interruption included.
    """

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    evaluated: list[int] = field(default_factory=list)
    scores: dict[str, list[float]] = field(default_factory=dict)
    best: int | None = None
    updates: int = 0


class Training(Run[tuple[Part, int]]):
    """Training of a model: a batch comes with a seed, which determines all draws for it."""

    room = "adversarial"
    same = "`checkpoint` should be of the same model, method, settings and data, or a new file."

    def __init__(
        self,
        course: Course,
        plan: Plan,
        model: nn.Module,
        descent: Descent,
        batches: Batches,
        generator: torch.Generator,
        settings: Mapping[str, Any],
    ) -> None:
        self.plan, self.model, self.descent, self.source = plan, model, descent, batches
        self.infinite, self.n_batches = infinite_buffers(model), batches.n_batches
        self.total = course.epochs * batches.n_batches
        self.labels = LabelCheck(model, plan.method.least_label)
        self.draws = torch.Generator(generator.device)
        self.kept: Mapping[str, Tensor] = {}
        # The losses of this rank's rows in the running epoch, summed, and how many rows these are.
        self.sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        self.history, self.collapse = History(), Collapse()
        self.progress: Progress | None = None
        self.best: dict[str, Tensor] = {}
        self.best_score, self.waited = -math.inf, 0
        self.spent = self.started = 0.0
        super().__init__(course, generator=generator, streams=batches.streams, settings=settings)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The current parameters and buffers: a model may replace the tensor of a buffer."""
        return dict(named(self.model))

    @property
    def device(self) -> torch.device:
        """The device of the trained parameters."""
        return self.descent.parameters[0].device

    # --- the steps ---------------------------------------------------------------------------------------------------

    def batches(self) -> Iterator[tuple[Part, int]]:
        """Yield the batches of an epoch, each with its seed."""
        self.started = time.perf_counter()
        expected, found = self.source.n_batches, 0
        seeds = torch.Generator().manual_seed(self.seed ^ 1)
        for part in self.source.read(self.order, self._note_first):
            if found == expected:
                raise ValueError(f"`data` should have as many batches as its length. Found more than {expected}.")
            yield part, seed_of(seeds)
            found += 1
        if found < expected:
            raise ValueError(f"`data` should have as many batches as its length, {expected}. Found {found}.")

    def _note_first(self, x: Tensor, labels: Tensor) -> None:
        if self.path is not None:
            self.first = [fingerprint(x), fingerprint(labels)]

    def step(self, batch: tuple[Part, int]) -> None:
        """Train on one batch, and average the model if `average` is given."""
        part, seed = batch
        self.descent.set_rates(self.update / self.total)
        with torch.enable_grad(), self.labels.of(part.ends), self._drawing(part, seed):
            loss, self.kept = self.plan.method.step(
                self.model,
                part.x,
                part.labels,
                ball=self.plan.ball_of(self.update + 1, self.total),
                generator=self.draws,
                update=lambda loss: self.descent.update(loss, len(part.x), self.group),
                state=self.kept,
            )
        with no_graph():
            self.sums[0] += loss * len(part.x)
            self.sums[1] += len(part.x)
        decay = self.plan.average
        if decay is not None:  # weights that add up to 1 from the first update on
            self.average((1 - decay) / (1 - decay ** (self.n_averaged + 1)))

    @contextmanager
    def _drawing(self, part: Part, seed: int) -> Iterator[None]:
        """Seed all draws for a batch. In a batch that ranks share, each row gets the draws it would get on one rank."""
        rank, world = rank_of(self.group), world_of(self.group)
        own = (seed + rank) % 2**63
        global_generator(self.device).manual_seed(own)
        self.draws.manual_seed(own if part.total is None else seed)
        if part.total is None or self.group is None:
            yield
            return
        with RowsOfBatch(self.draws, rows=slice(rank, None, world), total=part.total):
            yield

    def is_suspect(self) -> bool:
        """Look at the loss on one processor, where that costs nothing; elsewhere it would wait for others."""
        return self.device.type == "cpu" and self.group is None and self._loss_is_bad()

    def _loss_is_bad(self) -> bool:
        loss, rows = self.sums.tolist()
        return rows > 0 and not loss / rows < _LARGEST_LOSS

    def fault(self) -> tuple[str, str] | None:
        """Look at the model, and at the loss."""
        how = f"above {_LARGEST_LOSS:g}, or not finite,"
        return super().fault() or (("the loss", how) if self._loss_is_bad() else None)

    # --- the ends of epochs ------------------------------------------------------------------------------------------

    def close_epoch(self) -> None:
        """Record the mean loss of an epoch, and evaluate the model if an evaluation is due."""
        self.check()
        average_statistics(self.model, self.infinite, self.group)
        seconds = self.spent + time.perf_counter() - self.started
        if self.group is not None:
            all_reduce(self.sums, group=self.group)
        self.history.losses.append((self.sums[0] / self.sums[1]).item())
        self.history.seconds.append(seconds)
        self.spent = 0.0
        with no_graph():
            self.sums.zero_()
        due = self.epoch % self.plan.evaluate_every == 0 or self.epoch == self.course.epochs
        if self.plan.score is not None and due:
            self._evaluate(self.plan.score)
        if self.progress is not None:
            self._show(self.progress)

    def _show(self, progress: Progress) -> None:
        """Show the loss of an epoch, and its scores if it was evaluated."""
        progress.begin(f"Epoch {self.epoch} of {self.course.epochs}")
        is_evaluated = self.history.evaluated[-1:] == [self.epoch]
        scores = {name: values[-1] for name, values in self.history.scores.items()} if is_evaluated else {}
        found = "".join(f", {name} {value:.4f}" for name, value in scores.items())
        progress.say(f"{self.history.losses[-1]:.6f} nats per sample{found}", self.history.seconds[-1])

    def _evaluate(self, score: Score) -> None:
        with self._averaged():
            scores = scores_of(score, self.model, self.group)
            self.history.evaluated.append(self.epoch)
            for name, value in scores.items():
                self.history.scores.setdefault(name, []).append(value)
            self.waited += 1
            if scores.get("robust", -math.inf) > self.best_score:
                self.best_score, self.waited, self.history.best = scores["robust"], 0, self.epoch
                self.best = self.copies() if self.plan.keep == "best" else {}
        if self.plan.ranks_epochs and "robust" not in scores:
            raise ValueError(f"`evaluate` should return a score called 'robust'. Found {sorted(scores)}.")
        before = self.collapse.best.get("robust", 0.0)
        if self.collapse.look(scores):
            warn_of_collapse(self.epoch, scores, before)
        self.stopped = self.plan.patience is not None and self.waited >= self.plan.patience

    @contextmanager
    def _averaged(self) -> Iterator[None]:
        """Give the model its running mean, if any, inside the body; then restore its own values, to the bit."""
        own = self.copies() if self.mean else {}
        self.set(self.mean)
        try:
            yield
        finally:
            self.set(own)

    def result(self) -> Mapping[str, Tensor]:
        """Return the tensors of the best epoch if they are kept, or the running mean if there is one."""
        return self.best or self.mean

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the optimiser's state, the best epoch, and the history of epochs."""
        tensors, numbers = self.descent.state()
        kept = {"optimizer": tensors, "best": self.best}
        return {f"{kind}.{name}": tensor for kind, parts in kept.items() for name, tensor in parts.items()}, {
            "optimizer": numbers,
            "spent": self.spent + (time.perf_counter() - self.started if self.batch else 0.0),
            "waited": self.waited,
            "best_score": None if self.best_score == -math.inf else self.best_score,
            "collapse": [self.collapse.best, self.collapse.found],
            "history": asdict(self.history),
        }

    def own_state(self) -> dict[str, Tensor]:
        """Return the sum of the losses so far, and the state of the method."""
        return {"sums": self.sums, **{f"kept.{name}": tensor for name, tensor in self.kept.items()}}

    def load(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Restore `state` and `own_state`."""
        self.best, self.kept = (
            {name: tensor.to(self.device) for name, tensor in with_prefix(tensors, prefix).items()}
            for prefix in ("best.", "kept.")
        )
        self.descent.load(with_prefix(tensors, "optimizer."), facts["optimizer"])
        with no_graph():
            self.sums.copy_(tensors["sums"])
        self.spent, self.waited = facts["spent"], facts["waited"]
        self.best_score = -math.inf if facts["best_score"] is None else facts["best_score"]
        self.collapse.best, self.collapse.found = facts["collapse"]
        self.history = History(**facts["history"])
