"""A callback for the trainer of Hugging Face: audits every n-th step, and logs the leaks through the trainer."""

from __future__ import annotations

from typing import Any

from toolkit.gradients.audit.history import LeakHistory, RepeatedAudit

try:
    from transformers import TrainerCallback
except ModuleNotFoundError:  # blocks and documents are found by importing every module
    TrainerCallback = object

__all__ = ["AuditCallback"]


class AuditCallback(TrainerCallback):
    """Audits every n-th step of a Hugging Face trainer: ``trainer.add_callback(AuditCallback(trainer))``.

    The trainer logs ``stops/<place>/leak`` and ``stops/<place>/ratio`` to all places of its ``report_to``. The audited
    step computes the same numbers as without the callback.

    Attributes:
        history: The leaks so far; ``history.plot()`` draws them against the step.
    """

    history: LeakHistory

    def __init__(self, trainer: Any, every: int = 100) -> None:
        """Audit every n-th step.

        Args:
            trainer: The trainer, which logs.
            every: n, in optimiser steps.

        Raises:
            ValueError: If `every` is not a positive integer.
        """
        self._trainer, self._audit = trainer, RepeatedAudit(every)
        self.history = self._audit.history

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Begin to record a step that is due."""
        self._audit.begin(state.global_step, model, args.world_size)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Log the answer."""
        if metrics := self._audit.end(state.global_step):
            self._trainer.log(metrics)
