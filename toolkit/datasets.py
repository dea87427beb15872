"""Data sets: bundled real ones, and synthetic ones whose truth is known exactly.

N samples, D features.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["Dataset", "bars_and_stripes", "digits", "iris", "two_gaussians", "wine"]


@dataclass(frozen=True)
class Dataset:
    """Inputs and labels of one data set.

    Attributes:
        inputs: (N, D), floating point.
        labels: (N,), int64; which class or component each sample comes from.
        name: What to call it in a table.
    """

    inputs: Tensor
    labels: Tensor
    name: str


def iris(*, dtype: torch.dtype = torch.float64) -> Dataset:
    """Return Fisher's iris: 150 flowers, 4 lengths in centimetres, 3 species."""
    return _bundled("load_iris", "iris", dtype)


def wine(*, dtype: torch.dtype = torch.float64) -> Dataset:
    """Return the wine data: 178 wines, 13 chemical measurements in their original units, 3 cultivars."""
    return _bundled("load_wine", "wine", dtype)


def digits(*, dtype: torch.dtype = torch.float64) -> Dataset:
    """Return the handwritten digits: 1797 images of 8 x 8, flattened to 64 and scaled from 0..16 to [0, 1]."""
    raw = _bundled("load_digits", "digits", dtype)
    return Dataset(raw.inputs / 16, raw.labels, raw.name)


def bars_and_stripes(side: int, *, dtype: torch.dtype = torch.float64) -> Dataset:
    """Return every distinct image of `side` x `side` whose rows are constant, or whose columns are.

    There are ``2 * 2**side - 2`` (the empty and the full image are both), so the best log-likelihood of a model of
    them is ``-log(2 * 2**side - 2)`` nats per image (MacKay 2003, section 43.2).

    Returns:
        Inputs (2^(side+1) - 2, side^2) of zeros and ones; label 0 for rows and 1 for columns.

    Raises:
        ValueError: If `side` is not between 2 and 12.
    """
    if not 2 <= side <= 12:
        raise ValueError(f"`side` should be between 2 and 12. Found {side}.")
    codes = (torch.arange(2**side)[:, None] >> torch.arange(side)) & 1
    rows = codes[:, :, None].expand(-1, side, side).reshape(-1, side**2)
    columns = codes[1:-1, None, :].expand(-1, side, side).reshape(-1, side**2)
    labels = torch.cat([torch.zeros(len(rows)), torch.ones(len(columns))]).long()
    return Dataset(torch.cat([rows, columns]).to(dtype), labels, f"bars and stripes {side}x{side}")


def two_gaussians(
    n_samples: int,
    *,
    separation: float,
    n_features: int = 2,
    generator: torch.Generator,
    dtype: torch.dtype = torch.float64,
) -> Dataset:
    """Draw from two equally likely unit Gaussians whose means lie `separation` apart on the first axis.

    Raises:
        ValueError: If `n_samples` or `n_features` is not positive.
    """
    for argument, value in (("n_samples", n_samples), ("n_features", n_features)):
        if value < 1:
            raise ValueError(f"`{argument}` should be a positive integer. Found {value}.")
    labels = torch.randint(2, (n_samples,), generator=generator)
    inputs = torch.randn(n_samples, n_features, generator=generator, dtype=dtype)
    inputs[:, 0] += separation * (labels.to(dtype) - 0.5)
    return Dataset(inputs, labels, f"two Gaussians, separation {separation:g}")


def _bundled(loader: str, name: str, dtype: torch.dtype) -> Dataset:
    import sklearn.datasets

    load: Callable[..., Any] = getattr(sklearn.datasets, loader)
    inputs, labels = load(return_X_y=True)
    return Dataset(torch.from_numpy(inputs).to(dtype), torch.from_numpy(labels).long(), name)
