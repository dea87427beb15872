"""Measures of embeddings that the experiments on self-supervised learning share.

N embeddings with D features.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from toolkit.datasets import Dataset
from toolkit.runner import Event, Objective, Sweep

__all__ = ["COLLAPSE", "NEIGHBOURS", "effective_rank", "judged", "neighbour_accuracy", "spectrum_of", "unit"]

NEIGHBOURS = Objective(label="accuracy of the five nearest neighbours", higher_is_better=True)
_SPREAD = "spread of the directions (1: all, 0: one)"
COLLAPSE = Event(says="all embeddings pointed in one direction", metric=_SPREAD, below=0.1)


def effective_rank(embeddings: Tensor) -> float:
    """Return the exponential of the entropy of the shares of variance along the principal directions.

    It is the number of directions if all have the same variance, and 1 for embeddings on a line.

    Args:
        embeddings: (N, D).
    """
    shares = _spectrum(embeddings).square()
    return float(torch.special.entr(shares / shares.sum()).sum().exp())


def neighbour_accuracy(embeddings: Tensor, labels: Tensor, test: Tensor, test_labels: Tensor, *, k: int = 5) -> float:
    """Return the share of test points whose label is the most frequent one of the k nearest embeddings by angle.

    Args:
        embeddings: (N, D).
        labels: (N,).
        test: (M, D).
        test_labels: (M,).
        k: Neighbours that vote; a tie goes to the smaller label.
    """
    nearest = (unit(test) @ unit(embeddings).mT).topk(k).indices
    votes = nn.functional.one_hot(labels[nearest]).sum(1)
    return (votes.argmax(-1) == test_labels).double().mean().item()


def unit(x: Tensor) -> Tensor:
    """Return vectors of length 1."""
    return nn.functional.normalize(x, dim=-1)


def _spectrum(embeddings: Tensor) -> Tensor:
    """Return the singular values of the centred embeddings, the largest first."""
    values: Tensor = torch.linalg.svdvals(embeddings - embeddings.mean(0))
    return values


def spectrum_of(encoder: Callable[[Tensor], Tensor], images: Tensor, n_features: int) -> Sweep:
    """Return the sweep over the D singular values of the centred embeddings of images."""

    @torch.no_grad()
    def evaluate() -> Mapping[str, Sequence[float]]:
        values = _spectrum(encoder(images))
        return {"singular value, as a share of the largest": (values / values[0]).tolist()}

    return Sweep(
        label="number of the singular value",
        values=tuple(map(float, range(1, n_features + 1))),
        evaluate=evaluate,
    )


@torch.no_grad()
def judged(encoder: Callable[[Tensor], Tensor], train: Dataset, test: Dataset) -> dict[str, float]:
    """Return the metrics of the embeddings of held-out images."""
    known, asked = encoder(train.inputs), encoder(test.inputs)
    spread = unit(asked).std(0, correction=0).mean() * math.sqrt(asked.shape[1])
    return {
        "objective": neighbour_accuracy(known, train.labels, asked, test.labels),
        "effective rank": effective_rank(asked),
        _SPREAD: spread.item(),
    }
