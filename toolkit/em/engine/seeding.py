"""Starting means: samples that are far from each other, improved by Lloyd's steps; for several starts at once.

N samples, D features, K means, R starts.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["LLOYD_STEPS", "device_of", "distinct", "lloyd", "nearest", "seeds", "squared_distances"]

LLOYD_STEPS = 10

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
    odds = weights.expand(n_starts, -1)
    chosen: list[Tensor] = []
    for i in range(n_means):
        enough = (odds > 0).any(1, keepdim=True)  # else there are fewer distinct samples than means
        cumulative = torch.where(enough, odds, weights).double().cumsum(1)
        shape = n_starts, _CANDIDATES + int(math.log(n_means)) if i else 1
        draws = torch.rand(shape, generator=generator, device=device_of(generator, points), dtype=torch.float64)
        drawn = torch.searchsorted(cumulative, draws.to(points.device) * cumulative[:, -1:], right=True)
        drawn = drawn.clamp(max=len(points) - 1)
        after = squared_distances(points, drawn, seen) * weights
        if i:
            after = torch.minimum(odds[:, None], after)
        best = _first_least(after.sum(2))[:, None]
        chosen.append(drawn.gather(1, best)[:, 0])
        odds = after.take_along_dim(best[:, :, None], 1)[:, 0]
    return torch.stack(chosen, 1)


def squared_distances(points: Tensor, chosen: Tensor, seen: Tensor | None) -> Tensor:
    """Return the squared distances of all samples from chosen ones, (R, C, N).

    Args:
        points: (N, D); 0 where a feature is missing.
        chosen: (R, C): indices of samples.
        seen: As in `lloyd`. Features that one of both samples lacks do not count, so samples with many features are
            the more likely seeds.
    """
    if seen is None:
        # As differences: products would cancel.
        return torch.cdist(points[chosen], points, compute_mode="donot_use_mm_for_euclid_dist").square()
    both = seen[chosen][:, :, None] * seen
    return (both * (points[chosen][:, :, None] - points).square()).sum(3)


def _first_least(values: Tensor) -> Tensor:
    """Return the place of the least value in each row (R, C); values that differ by rounding count as equal."""
    least = values.amin(1, keepdim=True)
    return (values <= (1 + _ROUNDING) * least).to(torch.int8).argmax(1)


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
    labels = torch.arange(means.shape[1], device=means.device)[:, None]
    weighted = weights[:, None] * points
    mass = weights[:, None] if seen is None else weights[:, None] * seen
    members_of = nearest(points, means, seen)
    for _ in range(n_steps):
        members = (members_of[:, None] == labels).to(points.dtype)
        counts = members @ mass
        means = torch.where(counts > 0, members @ weighted / counts, means)
        before, members_of = members_of, nearest(points, means, seen)
        if torch.equal(members_of, before):
            break
    return means, members_of


def nearest(points: Tensor, means: Tensor, seen: Tensor | None = None) -> Tensor:
    """Return the index of the nearest mean of each sample, in the observed features: (R, N).

    Distances that differ by rounding count as equal, and the first mean comes first: see `toolkit.em.engine.rounding`.

    Args:
        points: As in `lloyd`.
        means: (R, K, D).
        seen: As in `lloyd`.
    """
    half_squares = means.square() / 2
    size = max(1, 2**20 // means[:, :, 0].numel())
    found = []
    for start in range(0, len(points), size):
        part = points[start : start + size]
        own = half_squares.sum(2)[..., None] if seen is None else half_squares @ seen[start : start + size].mT
        distances = torch.baddbmm(own, means, part.mT.expand(len(means), -1, -1), alpha=-1)
        error = 64 * torch.finfo(points.dtype).eps * own
        # One by one: `argmin` over a dimension that is not the last takes thirty times as long.
        least = distances[:, 0] - error[:, 0]
        index = torch.zeros_like(least, dtype=torch.int64)
        for k in range(1, means.shape[1]):
            nearer = distances[:, k] + error[:, k] < least
            index.masked_fill_(nearer, k)
            least = torch.where(nearer, distances[:, k] - error[:, k], least)
        found.append(index)
    return torch.cat(found, 1)


def device_of(generator: torch.Generator | None, x: Tensor) -> torch.device:
    """Return the device on which random numbers are drawn."""
    return x.device if generator is None else generator.device
