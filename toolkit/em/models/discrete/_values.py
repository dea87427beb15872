"""Values that may be missing, and the starts of mixtures of them.

N samples, D features, K components.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from toolkit.em.models._common import is_wrapped

# The share of the seed in a start; the rest is the mean of the data, so that no start excludes a sample.
SEED = 0.5


def split(x: Tensor, like: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the values in the parameters' type with 0 for NaN, and the mask of observed entries, None for all."""
    values = x.to(like.dtype)
    if not x.is_floating_point():
        return values, None
    missing = values.isnan()
    if not is_wrapped(missing) and not bool(missing.any()):
        return values, None
    return values.masked_fill(missing, 0.0), (~missing).to(like.dtype)


def product(observed: Tensor | None, table: Tensor) -> Tensor:
    """Return the sum of a table (K, D) over the observed features: (N, K), or (K,) if all are observed."""
    return table.sum(1) if observed is None else observed @ table.mT


def filled(x: Tensor, sample_weight: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return floating-point samples with missing entries replaced by the features' means, and the samples' weights."""
    x = x.to(float_type(x))
    weights = torch.ones_like(x[:, 0]) if sample_weight is None else sample_weight.to(x)
    missing = x.isnan()
    there = weights[:, None] * (~missing)
    total = there.sum(0)
    means = (there * x.masked_fill(missing, 0.0)).sum(0) / torch.where(total > 0, total, 1.0)
    return torch.where(missing, means, x), weights


def weighted_mean(x: Tensor, weights: Tensor) -> Tensor:
    """Return the means of the features, (D,)."""
    return (weights[:, None] * x).sum(0) / weights.sum()


def equal_log_weights(n: int, like: Tensor) -> Tensor:
    """Return the logarithms of n equal weights."""
    return like.new_full((n,), -math.log(n))


def float_type(x: Tensor) -> torch.dtype:
    """Return the type of the parameters: the samples', or float64 for integers."""
    return x.dtype if x.is_floating_point() else torch.float64


def check_parameters(name: str, table: Tensor) -> None:
    """Raise a ValueError unless the parameters are a table, one row a component."""
    if table.ndim != 2:
        raise ValueError(f"`{name}` should have two dimensions, the components first. Found {tuple(table.shape)}.")
