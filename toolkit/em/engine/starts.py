"""Starts of a Gaussian mixture: one M-step from the samples nearest to chosen means, or from responsibilities.

N samples, D features, K components, R starts.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from toolkit._checks import integer, number
from toolkit.blocks import no_graph
from toolkit.em.covariance import CovarianceType, Structure, structure_of
from toolkit.em.covariance.structure import as_arrays, as_tensor, doubles, library
from toolkit.em.engine.checks import check_covariance, check_finite, check_floats, check_matrix, check_weights
from toolkit.em.engine.seeding import LLOYD_STEPS, distinct, lloyd, nearest, seeds
from toolkit.em.gaussian import GaussianParameters

__all__ = [
    "Init",
    "check_given",
    "check_init",
    "check_tensor",
    "choose_means",
    "choose_starts",
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
        n_components: K, at most N.
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
    weights = x.new_ones(len(x), dtype=torch.float64) if sample_weight is None else sample_weight.double()
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
    check_init(init)
    weights = x.new_ones(len(x), dtype=torch.float64) if sample_weight is None else sample_weight.double()
    centre = (weights @ x.double()) / weights.sum()
    points = x - centre
    together = max(1, 2**24 // (len(x) * max(n_components, x.shape[1])))
    found: list[Tensor] = []
    for first in range(0, n_starts, together):
        count = min(together, n_starts - first)
        if init == "random_from_data":
            means = points[torch.stack([distinct(points, weights, n_components, generator) for _ in range(count)])]
        else:
            means = points[seeds(points, n_components, weights, generator, n_starts=count)]
        if init == "kmeans":
            means, _ = lloyd(points, means, LLOYD_STEPS, weights=weights)
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
    weights = x.new_ones(len(x), dtype=torch.float64) if sample_weight is None else sample_weight
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


def check_init(init: str) -> None:
    """Raise a ValueError unless the name of a start is known."""
    if init not in get_args(Init):
        raise ValueError(f"`init` should be {', '.join(get_args(Init))} or GaussianParameters. Found {init!r}.")


def check_given(init: GaussianParameters, n_components: int, n_features: int, covariance_type: CovarianceType) -> None:
    """Raise a ValueError unless the mixture to start from is of this shape and type."""
    found = (init.n_components, init.n_features, init.covariance_type)
    expected = (n_components, n_features, covariance_type)
    if found != expected:
        raise ValueError(f"`init` should have (n_components, n_features, covariance_type) {expected}. Found {found}.")


def check_tensor(x: Tensor, sample_weight: Tensor | None, n_components: int, *, whole: bool = True) -> None:
    """Raise a TypeError or ValueError unless a mixture can be fitted to the samples with their weights."""
    check_floats(x)
    check_matrix(x, whole=whole)
    check_finite(x)
    if whole and n_components > len(x):
        raise ValueError(f"`n_components` should be at most {len(x)}, the number of samples. Found {n_components}.")
    check_weights(sample_weight, len(x), allow_zeros=not whole)
