"""Starting means: samples that are far from each other, improved by Lloyd's steps; for several starts at once.

N samples, D features, K means, R starts.
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import numpy as np
import torch
from scipy.spatial.distance import cdist
from torch import Tensor

from toolkit._random import check_generator
from toolkit.em.covariance.structure import as_arrays, as_tensor, doubles, library

__all__ = ["LLOYD_STEPS", "device_of", "distinct", "lloyd", "nearest", "seeds", "squared_distances"]

# With ten, EM from ten overlapping clusters took 51 steps, with thirty 15: k-means then ends nearly everywhere.
LLOYD_STEPS = 30

# Tensors, or arrays: the same code takes both.
_Values: TypeAlias = Any

# Candidates for each mean beside log K. With two, as in scikit-learn, k-means from one start missed one of twelve blobs
# in 4 of 400 cases, with four in none.
_CANDIDATES = 4

# Sums of squared distances that differ by less than this, in proportion, differ by rounding.
_ROUNDING = 1e-5


def distinct(points: Tensor, weights: Tensor, n_means: int, generator: torch.Generator | None) -> Tensor:
    """Choose different samples (K,); repeated ones, and then those without weight, only if there are too few others.

    Args:
        points: (N, D).
        weights: (N,).
        n_means: K.
        generator: Randomness. None is torch's global generator.
    """
    order = torch.randperm(len(weights), generator=generator, device=device_of(generator, weights)).to(weights.device)
    order = order[(weights[order] == 0).to(torch.int8).argsort(stable=True)]
    if len(points[order[:n_means]].unique(dim=0)) == n_means:
        return order[:n_means]
    labels, places = points[order].unique(dim=0, return_inverse=True)[1].sort(stable=True)
    repeated = torch.zeros_like(places, dtype=torch.int8)
    repeated[places[1:]] = (labels[1:] == labels[:-1]).to(torch.int8)
    return order[(repeated + 2 * (weights[order] == 0)).argsort(stable=True)][:n_means]


@np.errstate(all="ignore")
def seeds(
    points: Tensor,
    n_means: int,
    weights: Tensor | None,
    generator: torch.Generator | None,
    *,
    n_starts: int = 1,
    seen: Tensor | None = None,
) -> Tensor:
    """Choose samples one by one, far from the ones before: greedy k-means++.

    Candidates are drawn with probability proportional to their squared distance from the samples before. The best of
    ``4 + int(log K)`` candidates is chosen: that after which the sum of squared distances is least.

    Args:
        points: (N, D), finite; 0 where a feature is missing.
        n_means: K.
        weights: (N,): multiplies the probabilities. None: all 1.
        generator: Randomness. None is torch's global generator.
        n_starts: R.
        seen: As in `lloyd`. Two samples are compared in the features that both have.

    Returns:
        Indices of the samples, (R, K).

    References:
        Arthur & Vassilvitskii, "k-means++: the advantages of careful seeding", 2007, sections 2.2 and 5.
    """
    weights = torch.ones_like(points[:, 0]) if weights is None else weights
    points, weights, seen = as_arrays(points.numel() * n_starts * (_CANDIDATES + n_means), points, weights, seen)
    of, n_candidates = library(points), _CANDIDATES + int(math.log(n_means))
    rows = of.arange(n_starts, device=points.device)
    n_draws = n_starts * (1 + n_candidates * (n_means - 1))
    draws = torch.rand(n_draws, generator=generator, device=device_of(generator, points), dtype=torch.float64)
    uniform = draws.to(points.device) if of is torch else draws.numpy()
    first, others = uniform[:n_starts].reshape(n_starts, 1), uniform[n_starts:].reshape(-1, n_starts, n_candidates)
    odds = of.broadcast_to(weights, (n_starts, len(points)))
    chosen = []
    for i in range(n_means):
        cumulative = doubles(odds).cumsum(1)
        enough = cumulative[:, -1:] > 0  # else there are fewer distinct samples than means
        if not bool(enough.all()):
            cumulative = doubles(of.where(enough, odds, weights)).cumsum(1)
        target = (others[i - 1] if i else first) * cumulative[:, -1:]
        drawn = (cumulative[:, None] <= target[:, :, None]).sum(2).clip(max=len(points) - 1)
        after = squared_distances(points, drawn, seen) * weights
        if i:
            after = of.minimum(odds[:, None], after)
        best = _first_least(after.sum(2))
        chosen.append(drawn[rows, best])
        odds = after[rows, best]
    return as_tensor(of.stack(chosen, 1))


def squared_distances(points: _Values, chosen: _Values, seen: _Values) -> Any:
    """Return the squared distances of all samples from chosen ones, (R, C, N).

    Args:
        points: (N, D), a tensor or an array as all others; 0 where a feature is missing.
        chosen: (R, C): indices of samples.
        seen: As in `lloyd`. Features that one of both samples lacks do not count, so samples with many features are
            the more likely seeds.
    """
    # As differences: products would cancel.
    if seen is None and isinstance(points, Tensor):
        return torch.cdist(points[chosen], points, compute_mode="donot_use_mm_for_euclid_dist").square()
    if seen is None:
        return np.stack([cdist(some, points, "sqeuclidean") for some in points[chosen]])
    differences = points[chosen][:, :, None] - points
    return (differences * differences if seen is None else seen[chosen][:, :, None] * seen * differences**2).sum(3)


def _first_least(values: _Values) -> Any:
    """Return the place of the least value in each row (R, C); values that differ by rounding count as equal."""
    of = library(values)
    least = of.amin(values, 1)[:, None]
    return of.asarray(values <= (1 + _ROUNDING) * least, dtype=of.int8).argmax(1)


@np.errstate(all="ignore")
def lloyd(
    points: Tensor, means: Tensor, n_steps: int, *, weights: Tensor, seen: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return means (R, K, D) after at most `n_steps` of Lloyd's steps, and the nearest mean of each sample (R, N).

    Args:
        points: (N, D); 0 where a feature is missing.
        means: (R, K, D).
        n_steps: The most steps. They end earlier when no sample changes its mean.
        weights: (N,).
        seen: (N, D): 1 where a feature is observed, 0 where it is missing. None: all are observed.
    """
    points, means, weights, seen = as_arrays(points.numel() * means[:, :, 0].numel(), points, means, weights, seen)
    of = library(points)
    labels = of.arange(means.shape[1], device=points.device)[:, None]
    weighted = weights[:, None] * points
    mass = weights[:, None] if seen is None else weights[:, None] * seen
    members_of = nearest(points, means, seen)
    for _ in range(n_steps):
        members = of.asarray(members_of[:, None] == labels, dtype=points.dtype)
        counts = members @ mass
        means = of.where(counts > 0, members @ weighted / of.where(counts > 0, counts, 1.0), means)
        before, members_of = members_of, nearest(points, means, seen)
        if bool((members_of == before).all()):
            break
    return as_tensor(means), as_tensor(members_of)


def nearest(points: _Values, means: _Values, seen: _Values = None) -> Any:
    """Return the index of the nearest mean of each sample, in the observed features: (R, N).

    Distances that differ by rounding count as equal, and the first mean comes first: see `toolkit.em.engine.rounding`.

    Args:
        points: As in `lloyd`, a tensor or an array as all others.
        means: (R, K, D).
        seen: As in `lloyd`.
    """
    of, half_squares = library(points), means * means / 2
    size = max(1, 2**20 // math.prod(means.shape[:2]))
    found = []
    for start in range(0, len(points), size):
        part = points[start : start + size]
        own = half_squares.sum(2)[..., None] if seen is None else half_squares @ seen[start : start + size].mT
        distances = own - means @ part.mT
        error = 64 * of.finfo(points.dtype).eps * own
        low, high = distances - error, distances + error
        # One by one: `argmin` over a dimension that is not the last takes thirty times as long.
        least = of.amin(high, 1)
        index = of.zeros_like(least, dtype=of.int64)
        for k in range(means.shape[1] - 1, -1, -1):
            index = of.where(low[:, k] <= least, k, index)
        found.append(index)
    return of.concatenate(found, 1)


def device_of(generator: torch.Generator | None, x: Any) -> torch.device:
    """Return the device on which random numbers are drawn."""
    check_generator(generator)
    return x.device if generator is None else generator.device
