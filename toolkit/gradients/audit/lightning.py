"""A callback for Lightning: audits every n-th batch, and writes the leaks into the trainer's loggers."""

from __future__ import annotations

from typing import Any

from toolkit.gradients.audit.history import LeakHistory, RepeatedAudit

try:
    from lightning.pytorch import Callback
except ModuleNotFoundError:  # blocks and documents are found by importing every module
    Callback = object

__all__ = ["AuditCallback"]


class AuditCallback(Callback):
    """Audits every n-th optimiser step of a Lightning trainer.

    Each logger of the trainer gets ``stops/<place>/leak`` and ``stops/<place>/ratio``. The audited step computes the
    same numbers as without the callback.

    Attributes:
        history: The leaks so far; ``history.plot()`` draws them against the step.
    """

    history: LeakHistory

    def __init__(self, every: int = 100) -> None:
        """Audit every n-th step.

        Args:
            every: n, in optimiser steps.

        Raises:
            ValueError: If `every` is not a positive integer.
        """
        super().__init__()
        self._audit = RepeatedAudit(every)
        self.history = self._audit.history

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """Begin to record a batch that is due."""
        self._audit.begin(trainer.global_step, pl_module, trainer.world_size)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Log the answer, at the step at which the trainer logs the values of this batch."""
        step = trainer.fit_loop.epoch_loop._batches_that_stepped
        if metrics := self._audit.end(step):
            for logger in trainer.loggers:
                logger.log_metrics(metrics, step)

    def on_exception(self, *_: Any) -> None:
        """Stop recording."""
        self._audit.abandon()
