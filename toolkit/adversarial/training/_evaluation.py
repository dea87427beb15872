"""Held-out scores of a model in training, and the detection of catastrophic overfitting to its attack.

N samples, each of shape (...).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from toolkit._distributed import exchange, gather, rank_of, scatter, together, world_of
from toolkit.adversarial._untouched import untouched
from toolkit.adversarial._warnings import warn
from toolkit.adversarial.attacks.gradient import fgsm, pgd
from toolkit.adversarial.training._batches import as_input
from toolkit.adversarial.training._terms import Attack
from toolkit.adversarial.training.methods import BallArguments
from toolkit.blocks import no_graph

__all__ = ["CatastrophicOverfittingWarning", "Collapse", "HeldOut", "Score", "scores_of", "warn_of_collapse"]

Score = Callable[[nn.Module], Mapping[str, float]]

_STEPS, _RESTARTS = 20, 2  # of PGD: enough to find examples that one step misses
_ROWS = 256  # attacked together


class CatastrophicOverfittingWarning(UserWarning):
    """A model has become robust to the single step that it is trained against, and to nothing else.

    Attributes:
        epoch: The epoch after which the overfitting was found, from 1.
    """

    def __init__(self, message: str, *, epoch: int) -> None:
        super().__init__(message)
        self.epoch = epoch


@dataclass(frozen=True)
class HeldOut:
    """Accuracies on held-out samples, clean and under attack.

    Attributes:
        inputs: (N, ...), as `train` takes data.
        labels: (N,).
        ball: The ball in which inputs are attacked.
        group: The ranks, which share the samples among them.
    """

    inputs: Tensor
    labels: Tensor
    ball: BallArguments
    group: ProcessGroup | None

    def __call__(self, model: nn.Module) -> dict[str, float]:
        """Return the accuracy on inputs as they are (``clean``), after FGSM, and after FGSM and PGD (``robust``)."""
        counts = [0, 0, 0]
        starts = range(0, len(self.inputs), _ROWS)
        for number, start in list(enumerate(starts))[rank_of(self.group) :: world_of(self.group)]:
            x = as_input(self.inputs[start : start + _ROWS], model)
            labels = self.labels[start : start + _ROWS].to(x.device).long()
            attacks: list[Attack] = [lambda model, x, labels: x, partial(fgsm, **self.ball), self._pgd(number)]
            for place, attack in enumerate(attacks):
                with untouched(model), no_graph():
                    stands = model(attack(model, x, labels)).argmax(1) == labels
                counts[place] += int(stands.sum())
                x, labels = x[stands], labels[stands]
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        clean, single, many = map(sum, zip(*exchange(counts, self.group, device), strict=True))
        return {name: n / len(self.inputs) for name, n in (("clean", clean), ("fgsm", single), ("robust", many))}

    def _pgd(self, number: int) -> Attack:
        # The same starts in every epoch: scores then differ only because of the model, and not by luck.
        draws = torch.Generator().manual_seed(number)
        return partial(pgd, **self.ball, steps=_STEPS, restarts=_RESTARTS, generator=draws)


def scores_of(score: Score, model: nn.Module, group: ProcessGroup | None) -> dict[str, float]:
    """Return the scores of a model in evaluation mode, those of the first rank on all; the model stays unchanged.

    Raises:
        TypeError: If `score` does not return scores by name.
    """
    with untouched(model), no_graph():
        found = score(model)
    scores: dict[str, float] = {}
    with together(group):
        try:
            scores = {name: float(value) for name, value in found.items()}
        except (AttributeError, TypeError, ValueError):
            kind = repr(found) if isinstance(found, Mapping) else type(found).__name__
            raise TypeError(f"`evaluate` should return scores, a number by name. Found {kind}.") from None
    every = gather(scores, group)
    first: dict[str, float] = scatter(None if every is None else [every[0]] * len(every), group)
    return first


class Collapse:
    """Detects catastrophic overfitting: accuracy under FGSM rises, and accuracy under PGD falls to almost nothing.

    In a robust model the two accuracies are a few hundredths apart.
    """

    def __init__(self) -> None:
        self.best: dict[str, float] = {}
        self.found = False

    def look(self, scores: Mapping[str, float]) -> bool:
        """Return whether robustness has collapsed; True only once."""
        if self.found or "robust" not in scores or "fgsm" not in scores:
            return False
        if scores["robust"] >= self.best.get("robust", 0.0):
            self.best = {name: scores[name] for name in ("robust", "fgsm")}
            return False
        gap, before = (found["fgsm"] - found["robust"] for found in (scores, self.best))
        self.found = scores["robust"] < scores["fgsm"] / 3 and gap > 0.2 and gap > before + 0.1
        return self.found


def warn_of_collapse(epoch: int, scores: Mapping[str, float], best: float) -> None:
    """Warn of catastrophic overfitting."""
    warn(
        CatastrophicOverfittingWarning(
            f"Catastrophic overfitting by epoch {epoch}: held-out accuracy is {scores['fgsm']:.2f} under FGSM, and "
            f"under PGD {scores['robust']:.2f}, down from {best:.2f}. The model is robust to a single step alone. "
            "Train with several steps ('pgd', 'trades'), with a random start ('rs_fgsm'), with a penalty on curvature "
            "('cure'), or with a smaller epsilon; `keep='best'` returns the parameters before the collapse.",
            epoch=epoch,
        )
    )
