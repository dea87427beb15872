"""Starts of a Gaussian mixture: means that are far from each other, and one M-step from the samples nearest to them.

The means are samples, chosen one by one, and improved by Lloyd's steps; for several starts at once. The M-step also
takes responsibilities instead of means.

N samples, D features, K components or means, R starts.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import torch
from scipy.spatial.distance import cdist
from torch import Tensor

from toolkit._checks import integer, number
from toolkit._data import all_weights, as_arrays, as_tensor, doubles, library
from toolkit._random import device_of
from toolkit.blocks import no_graph
from toolkit.em.covariance import CovarianceType, Structure, structure_of
from toolkit.em.engine.checks import check_covariance, check_tensor
from toolkit.em.gaussian import GaussianParameters

__all__ = [
    "LLOYD_STEPS",
    "Init",
    "check_given",
    "choose_means",
    "choose_starts",
    "first_samples",
    "lloyd",
    "nearest",
    "seeds",
    "squared_distances",
    "start",
    "start_alike",
    "start_at",
    "start_at_random",
    "start_from",
]

Init = Literal["kmeans", "k-means++", "random_from_data"]

_CHUNK = 2**14

# The least share of the common variance that counts as a component's own, and not as rounding.
_LEAST = 1e-8

# With ten, EM from ten overlapping clusters took 51 steps, with thirty 15: k-means then ends nearly everywhere.
LLOYD_STEPS = 30

# Tensors, or arrays: the same code takes both.
_Values: TypeAlias = Any

# Candidates for each mean beside log K. With two, as in scikit-learn, k-means from one start missed one of twelve blobs
# in 4 of 400 cases, with four in none.
_CANDIDATES = 4

# Sums of squared distances that differ by less than this, in proportion, differ by rounding.
_ROUNDING = 1e-5


@no_graph()
def start(
    x: Tensor,
    n_components: int,
    *,
    covariance_type: CovarianceType,
    sample_weight: Tensor | None = None,
    init: Init = "kmeans",
    reg_covar: float = 1e-6,
    generator: torch.Generator | None = None,
) -> GaussianParameters:
    """Choose the means, and assign each sample to the nearest one.

    The weights are the shares of the samples, at least one sample each. All components start with the same covariance,
    that of the samples about their nearest mean; the covariance of a cluster of few samples could be singular.

    Args:
        x: (N, D), float32 or float64, finite.
        n_components: Number of components, K; at most N.
        covariance_type: As in `fit`.
        sample_weight: (N,), not negative: how often each sample counts.
        init: How to choose the means. ``"random_from_data"``: distinct samples. ``"k-means++"``: samples that are far
            from each other (Arthur & Vassilvitskii). ``"kmeans"``: the means of k-means++, improved by at most
            thirty of Lloyd's steps.
        reg_covar: Added to every variance.
        generator: Randomness. None is torch's global generator.

    Returns:
        A mixture in float64, for the digits of large offsets and small widths.

    Raises:
        TypeError: If `x` is not a float32 or float64 tensor.
        ValueError: If an argument is out of range, or all samples lie at the means and `reg_covar` is 0.

    References:
        Arthur & Vassilvitskii, "k-means++: the advantages of careful seeding", 2007, section 2.2.

    Example:
        >>> x = torch.tensor([[0.0], [1.0], [8.0], [9.0], [10.0]])
        >>> start(x, 2, covariance_type="tied", generator=torch.Generator().manual_seed(0)).means
        tensor([[9.0000],
                [0.5000]], dtype=torch.float64)
    """
    n_components = integer("n_components", n_components)
    structure_of(covariance_type)
    reg_covar = number("reg_covar", reg_covar, least=0)
    check_tensor(x, sample_weight, n_components)
    means = choose_means(x, sample_weight, n_components, 1, init, generator)[0]
    labels = nearest(x - means[0], (means - means[0])[None])[0]
    return start_alike(x, sample_weight, labels, means, covariance_type, reg_covar)


def start_alike(
    x: Tensor,
    sample_weight: Tensor | None,
    labels: Tensor,
    means: Tensor,
    covariance_type: CovarianceType,
    reg_covar: float,
) -> GaussianParameters:
    """Return the means (K, D) with the shares of their samples, at least one each, and one common covariance."""
    weights = all_weights(x, sample_weight)
    total, structure = weights.sum(), structure_of(covariance_type)
    counts = weights.new_zeros(len(means)).index_add(0, labels, weights).clamp(min=float(total) / len(x))
    residuals = (x - means[labels]).mT[None]
    scatter = structure.separate.moments(residuals * (weights / total), residuals)
    one = structure.separate.estimate(scatter, torch.ones_like(means[:1]))
    check_covariance(one)
    factor = structure.separate.factor(structure.separate.regularise(one, reg_covar))[0]
    return GaussianParameters(
        log_weights=counts.log() - counts.sum().log(),
        means=means,
        precisions_cholesky=structure.repeat(factor, len(means)),
        covariance_type=covariance_type,
    )


def choose_starts(
    x: Tensor,
    sample_weight: Tensor | None,
    n_components: int,
    n_starts: int,
    *,
    covariance_type: CovarianceType,
    init: Init,
    reg_covar: float,
    generator: torch.Generator | None,
) -> list[GaussianParameters]:
    """Choose the means of several starts, and return the parameters that `start_at` gives for each."""
    return [
        start_at(x, sample_weight, means, keep=init != "kmeans", covariance_type=covariance_type, reg_covar=reg_covar)
        for means in choose_means(x, sample_weight, n_components, n_starts, init, generator)
    ]


def choose_means(
    x: Tensor,
    sample_weight: Tensor | None,
    n_components: int,
    n_starts: int,
    init: Init,
    generator: torch.Generator | None,
) -> list[Tensor]:
    """Return the means (K, D), float64, of several starts: all are seeded and improved at once."""
    weights = all_weights(x, sample_weight)
    centre = (weights @ x.double()) / weights.sum()
    x = x - centre
    together = max(1, 2**24 // (len(x) * max(n_components, x.shape[1])))
    found: list[Tensor] = []
    for first in range(0, n_starts, together):
        count = min(together, n_starts - first)
        means = x[first_samples(x, n_components, weights, init, generator, n_starts=count)]
        if init == "kmeans":
            means, _ = lloyd(x, means, LLOYD_STEPS, weights=weights)
        found += (centre + means).unbind()
    return found


def start_at(
    x: Tensor,
    sample_weight: Tensor | None,
    origins: Tensor,
    *,
    keep: bool,
    covariance_type: CovarianceType,
    reg_covar: float,
) -> GaussianParameters:
    """Assign each sample to its nearest origin (K, D), float64, and return one M-step; `keep` the origins as means."""
    moved = start_from(x, None, origins, covariance_type, reg_covar, sample_weight)
    return dataclasses.replace(moved, means=origins) if keep else moved


@np.errstate(all="ignore")
def start_from(
    x: Tensor,
    responsibilities: Tensor | None,
    origins: Tensor,
    covariance_type: CovarianceType,
    reg_covar: float,
    sample_weight: Tensor | None,
) -> GaussianParameters:
    """Return the M-step from responsibilities (N, K), by default those of the nearest origin (K, D)."""
    n_components, n_features = origins.shape
    structure = structure_of(covariance_type)
    wide = structure.wide
    shape = wide.shape(n_components, n_features)
    size = x.numel() * n_components + math.prod(shape)
    x, responsibilities, origins, sample_weight = as_arrays(size, x, responsibilities, origins, sample_weight)
    of = library(origins)
    counts, first = of.zeros_like(origins[:, 0]), of.zeros_like(origins)
    second = of.zeros(shape, dtype=origins.dtype, device=origins.device)
    for rows, part, weights in _parts(x, sample_weight):
        if responsibilities is None:
            labels = nearest(part - origins[0], (origins - origins[0])[None])[0]
        for k in range(n_components):
            if responsibilities is None:
                mine = labels == k
                differences, shares = part[mine] - origins[k], weights[mine]
            else:
                differences, shares = part - origins[k], weights * responsibilities[rows, k]
            counts[k] += shares.sum()
            first[k] += shares @ differences
            second[k] += wide.moments((shares[:, None] * differences).mT[None], differences.mT[None])[0]
    # A count of at least one sample: an empty component would be lost before the first step.
    total = counts.sum()
    weights = of.maximum(counts, total / len(x))
    safe = of.where(counts > 0, counts, 1.0)
    shifts = first / safe[:, None]
    scatter = second - wide.products(counts[:, None] * shifts, shifts)
    covariances = _covariances(scatter, safe, total, structure)
    return GaussianParameters(
        log_weights=as_tensor(of.log(weights) - of.log(weights.sum())),
        means=as_tensor(origins + shifts),
        precisions_cholesky=as_tensor(structure.factor(structure.regularise(covariances, reg_covar))),
        covariance_type=covariance_type,
    )


def start_at_random(
    x: Tensor,
    sample_weight: Tensor | None,
    n_components: int,
    generator: torch.Generator,
    *,
    covariance_type: CovarianceType,
    reg_covar: float,
) -> GaussianParameters:
    """Return the M-step from random responsibilities."""
    weights = all_weights(x, sample_weight)
    origins = (weights @ x.double() / weights.sum()).expand(n_components, -1)
    draws = torch.rand(len(x), n_components, generator=generator, device=generator.device).to(x.device)
    return start_from(x, draws / draws.sum(1, keepdim=True), origins, covariance_type, reg_covar, sample_weight)


def _covariances(scatter: Any, counts: Any, total: Any, structure: Structure) -> Any:
    """Return covariances from the components' `wide` scatter; the common one where a component is degenerate."""
    of, n_features = library(scatter), scatter.shape[-1]
    pooled = structure.pool(scatter.sum(0)[None])
    common = structure.estimate(pooled, of.broadcast_to(total, (1, n_features)))
    if structure.is_shared:
        return common
    own = structure.estimate(structure.pool(scatter), of.broadcast_to(counts[:, None], (len(scatter), n_features)))
    sound = structure.has_variance(own, common[0], _LEAST)
    return of.where(sound.reshape(-1, *[1] * (own.ndim - 1)), own, common)


def _parts(x: Any, sample_weight: Any) -> Iterator[tuple[slice, Any, Any]]:
    """Yield slices of rows, their samples and their weights, float64, in small parts; tensors or arrays."""
    of = library(x)
    for i in range(0, len(x), _CHUNK):
        part = doubles(x[i : i + _CHUNK])
        every = of.ones(len(part), device=part.device) if sample_weight is None else sample_weight[i : i + _CHUNK]
        yield slice(i, i + len(part)), part, doubles(every)


def check_given(init: GaussianParameters, n_components: int, n_features: int, covariance_type: CovarianceType) -> None:
    """Raise a ValueError unless the mixture to start from is of this shape and type."""
    found = (init.n_components, init.n_features, init.covariance_type)
    expected = (n_components, n_features, covariance_type)
    if found != expected:
        raise ValueError(f"`init` should have (n_components, n_features, covariance_type) {expected}. Found {found}.")


# --- means ---


def first_samples(
    x: Tensor,
    n_means: int,
    weights: Tensor,
    init: Init,
    generator: torch.Generator | None,
    *,
    n_starts: int = 1,
    seen: Tensor | None = None,
) -> Tensor:
    """Return the indices (R, K) of the samples that `init` chooses as means; the arguments are those of `seeds`."""
    if init not in get_args(Init):
        raise ValueError(f"`init` should be {', '.join(get_args(Init))} or GaussianParameters. Found {init!r}.")
    if init == "random_from_data":
        return torch.stack([_distinct(x, weights, n_means, generator) for _ in range(n_starts)])
    return seeds(x, n_means, weights, generator, n_starts=n_starts, seen=seen)


def _distinct(x: Tensor, weights: Tensor, n_means: int, generator: torch.Generator | None) -> Tensor:
    """Choose different samples (K,); repeated ones, and then those without weight, only if there are too few others.

    Args:
        x: (N, D).
        weights: (N,).
        n_means: Number of means, K.
        generator: Randomness. None is torch's global generator.
    """
    order = torch.randperm(len(weights), generator=generator, device=device_of(generator, weights)).to(weights.device)
    order = order[(weights[order] == 0).to(torch.int8).argsort(stable=True)]
    if len(x[order[:n_means]].unique(dim=0)) == n_means:
        return order[:n_means]
    labels, places = x[order].unique(dim=0, return_inverse=True)[1].sort(stable=True)
    repeated = torch.zeros_like(places, dtype=torch.int8)
    repeated[places[1:]] = (labels[1:] == labels[:-1]).to(torch.int8)
    return order[(repeated + 2 * (weights[order] == 0)).argsort(stable=True)][:n_means]


@np.errstate(all="ignore")
def seeds(
    x: Tensor,
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
        x: (N, D), finite; 0 where a feature is missing.
        n_means: Number of means, K.
        weights: (N,): multiplies the probabilities. None: all 1.
        generator: Randomness. None is torch's global generator.
        n_starts: Number of starts, R.
        seen: As in `lloyd`. Two samples are compared in the features that both have.

    Returns:
        Indices of the samples, (R, K).

    References:
        Arthur & Vassilvitskii, "k-means++: the advantages of careful seeding", 2007, sections 2.2 and 5.
    """
    weights = torch.ones_like(x[:, 0]) if weights is None else weights
    x, weights, seen = as_arrays(x.numel() * n_starts * (_CANDIDATES + n_means), x, weights, seen)
    of, n_candidates = library(x), _CANDIDATES + int(math.log(n_means))
    rows = of.arange(n_starts, device=x.device)
    n_draws = n_starts * (1 + n_candidates * (n_means - 1))
    draws = torch.rand(n_draws, generator=generator, device=device_of(generator, weights), dtype=torch.float64)
    uniform = draws.to(x.device) if of is torch else draws.numpy()
    first, others = uniform[:n_starts].reshape(n_starts, 1), uniform[n_starts:].reshape(-1, n_starts, n_candidates)
    odds = of.broadcast_to(weights, (n_starts, len(x)))
    chosen = []
    for i in range(n_means):
        cumulative = doubles(odds).cumsum(1)
        enough = cumulative[:, -1:] > 0  # else there are fewer distinct samples than means
        if not bool(enough.all()):
            cumulative = doubles(of.where(enough, odds, weights)).cumsum(1)
        target = (others[i - 1] if i else first) * cumulative[:, -1:]
        drawn = (cumulative[:, None] <= target[:, :, None]).sum(2).clip(max=len(x) - 1)
        after = squared_distances(x, drawn, seen) * weights
        if i:
            after = of.minimum(odds[:, None], after)
        best = _first_least(after.sum(2))
        chosen.append(drawn[rows, best])
        odds = after[rows, best]
    return as_tensor(of.stack(chosen, 1))


def squared_distances(x: _Values, chosen: _Values, seen: _Values) -> Any:
    """Return the squared distances of all samples from chosen ones, (R, C, N).

    Args:
        x: (N, D), a tensor or an array as all others; 0 where a feature is missing.
        chosen: (R, C): indices of samples.
        seen: As in `lloyd`. Features that one of both samples lacks do not count, so samples with many features are
            the more likely seeds.
    """
    # As differences: products would cancel.
    if seen is None and isinstance(x, Tensor):
        return torch.cdist(x[chosen], x, compute_mode="donot_use_mm_for_euclid_dist").square()
    if seen is None:
        return np.stack([cdist(some, x, "sqeuclidean") for some in x[chosen]])
    differences = x[chosen][:, :, None] - x
    return (seen[chosen][:, :, None] * seen * differences**2).sum(3)


def _first_least(values: _Values) -> Any:
    """Return the place of the least value in each row (R, C); values that differ by rounding count as equal."""
    of = library(values)
    least = of.amin(values, 1)[:, None]
    return of.asarray(values <= (1 + _ROUNDING) * least, dtype=of.int8).argmax(1)


@np.errstate(all="ignore")
def lloyd(
    x: Tensor, means: Tensor, n_steps: int, *, weights: Tensor, seen: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return means (R, K, D) after at most `n_steps` of Lloyd's steps, and the nearest mean of each sample (R, N).

    Args:
        x: (N, D); 0 where a feature is missing.
        means: (R, K, D).
        n_steps: The most steps. They end earlier when no sample changes its mean.
        weights: (N,).
        seen: (N, D): 1 where a feature is observed, 0 where it is missing. None: all are observed.
    """
    x, means, weights, seen = as_arrays(x.numel() * means[:, :, 0].numel(), x, means, weights, seen)
    of = library(x)
    labels = of.arange(means.shape[1], device=x.device)[:, None]
    weighted = weights[:, None] * x
    mass = weights[:, None] if seen is None else weights[:, None] * seen
    members_of = nearest(x, means, seen)
    for _ in range(n_steps):
        members = of.asarray(members_of[:, None] == labels, dtype=x.dtype)
        counts = members @ mass
        means = of.where(counts > 0, members @ weighted / of.where(counts > 0, counts, 1.0), means)
        before, members_of = members_of, nearest(x, means, seen)
        if bool((members_of == before).all()):
            break
    return as_tensor(means), as_tensor(members_of)


def nearest(x: _Values, means: _Values, seen: _Values = None) -> Any:
    """Return the index of the nearest mean of each sample, in the observed features: (R, N).

    Distances that differ by rounding count as equal, and the first mean comes first: see `toolkit.em.engine.rounding`.

    Args:
        x: As in `lloyd`, a tensor or an array as all others.
        means: (R, K, D).
        seen: As in `lloyd`.
    """
    of, half_squares = library(x), means * means / 2
    size = max(1, 2**20 // math.prod(means.shape[:2]))
    found = []
    for first in range(0, len(x), size):
        part = x[first : first + size]
        own = half_squares.sum(2)[..., None] if seen is None else half_squares @ seen[first : first + size].mT
        distances = own - means @ part.mT
        error = 64 * of.finfo(x.dtype).eps * own
        low, high = distances - error, distances + error
        # One by one: `argmin` over a dimension that is not the last takes thirty times as long.
        least = of.amin(high, 1)
        index = of.zeros_like(least, dtype=of.int64)
        for k in range(means.shape[1] - 1, -1, -1):
            index = of.where(low[:, k] <= least, k, index)
        found.append(index)
    return of.concatenate(found, 1)
