"""A check of labels against a model's classes, before torch indexes with them: on a GPU that ends the process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from toolkit.adversarial.training._terms import checked

__all__ = ["LabelCheck"]


class LabelCheck:
    """Compares labels with the classes of a model, counted in its first output.

    Args:
        model: The model.
        least: The least label that a sample may have; None if labels are not classes.
    """

    def __init__(self, model: nn.Module, least: int | None) -> None:
        self.model, self.least = model, least
        self.n_classes: int | None = None

    @contextmanager
    def of(self, ends: tuple[int, ...]) -> Iterator[None]:
        """Raise unless labels are classes: before the body, or inside it at the first output of the model, a tensor.

        Args:
            ends: The least and the greatest label; empty if unknown.
        """
        if self.n_classes is not None:
            self._check(ends)
            yield
            return

        def look(module: nn.Module, inputs: Any, logits: Any) -> None:
            self.n_classes = logits.shape[1] if checked(logits).dim() == 2 else 0
            self._check(ends)

        hook = self.model.register_forward_hook(look)
        try:
            yield
        finally:
            hook.remove()

    def _check(self, ends: tuple[int, ...]) -> None:
        if self.least is None or not self.n_classes:
            return
        wrong = [label for label in ends if not self.least <= label < self.n_classes]
        if wrong:
            raise ValueError(
                f"`labels` should be from {self.least} to {self.n_classes - 1}: the model has {self.n_classes} "
                f"classes. Found {wrong[0]}."
            )
