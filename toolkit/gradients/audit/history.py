"""Audits of every n-th training step, and the leak of each stop over the steps."""

from __future__ import annotations

import math
import re
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from toolkit._checks import integer
from toolkit.gradients.audit.steps import AuditedStep, audited

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["LeakHistory", "LeakRecord", "RepeatedAudit"]

# Loggers accept other names with letters, digits and these signs only, and MLflow no empty part of a path.
_NOT_IN_NAMES = re.compile(r"[^\w./ -]")


@dataclass(frozen=True)
class LeakRecord:
    """The effect of a stop at one step.

    Attributes:
        step: The training step.
        stop: The place of the stop, or the name of a block; with the backward pass, if it is not the first of its step.
        verdict: The kind of the verdict.
        leak: Norm of the leak.
        ratio: Norm of the gradient with the stop open over the norm with it in place.
    """

    step: int
    stop: str
    verdict: str
    leak: float
    ratio: float


class LeakHistory:
    """The leaks of a model's stops over training.

    Attributes:
        records: The effects, step by step.

    Example:
        >>> net, history = torch.nn.Linear(3, 1), LeakHistory()
        >>> for step in range(2):
        ...     with audited(net) as answer:
        ...         y = net(torch.ones(2, 3))
        ...         (y * y.detach()).sum().backward()
        ...     metrics = history.add(step, answer)
        >>> len(history.records), len(metrics)
        (2, 2)
    """

    def __init__(self) -> None:
        """Begin without steps."""
        self.records: list[LeakRecord] = []

    def add(self, step: int, answer: AuditedStep) -> dict[str, float]:
        """Add the answers of a step, and return name -> number for a logger: the leak and the ratio of each stop."""
        found = [
            LeakRecord(step, _numbered(effect.name, number), effect.verdict.kind, effect.leak, effect.ratio)
            for number, audit in enumerate(answer.audits, start=1)
            for effect in audit.effects
            if effect.verdict.kind != "no-op"
        ]
        self.records += found
        metrics = {
            f"stops/{_NOT_IN_NAMES.sub('-', record.stop).lstrip('/')}/{kind}": value
            for record in found
            for kind, value in (("leak", record.leak), ("ratio", record.ratio))
        }
        return {name: value for name, value in metrics.items() if math.isfinite(value)}

    def plot(self) -> Figure:
        """Return a figure: the leak of each stop against the step."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.subplots()
        for stop in dict.fromkeys(record.stop for record in self.records):
            found = [record for record in self.records if record.stop == stop]
            axes.plot([record.step for record in found], [record.leak for record in found], marker=".", label=stop)
        axes.set_yscale("symlog", linthresh=min((r.leak for r in self.records if r.leak > 0), default=1.0))
        axes.set_ylim(bottom=0)
        axes.set_xlabel("step")
        axes.set_ylabel("leak")
        if self.records:
            axes.legend(fontsize="small")
        return figure


class RepeatedAudit:
    """Audits every n-th step of a training loop that calls it at the beginning and at the end of a step.

    Attributes:
        history: The leaks so far.
    """

    def __init__(self, every: int) -> None:
        """Audit the first step, and every n-th after it.

        Args:
            every: n.

        Raises:
            ValueError: If `every` is not a positive integer.
        """
        self.history = LeakHistory()
        self._every, self._next = integer("every", every), 0
        self._open, self._answer = ExitStack(), AuditedStep()

    def begin(self, step: int, model: nn.Module, n_ranks: int = 1) -> None:
        """Begin to record a step if it is due.

        Raises:
            ValueError: If the model trains on several ranks.
        """
        if n_ranks > 1:
            raise ValueError(f"`model` should train in one process while it is audited. Found {n_ranks} ranks.")
        self.abandon()
        if step >= self._next:
            self._answer = self._open.enter_context(audited(model))
            self._next = step + self._every

    def end(self, step: int) -> dict[str, float]:
        """Answer for a step; return name -> number for a logger, nothing for a step that was not due."""
        self.abandon()
        answer, self._answer = self._answer, AuditedStep()
        return self.history.add(step, answer)

    def abandon(self) -> None:
        """Stop recording, after an error in a step for example."""
        self._open.close()


def _numbered(name: str, backward: int) -> str:
    return name if backward == 1 else f"{name}, backward pass {backward}"
