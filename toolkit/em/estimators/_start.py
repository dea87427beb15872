"""Starts of the estimator's fits: responsibilities or means by `init_params`, or the parameters given by the user.

N samples, D features, K components.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Literal, cast

import torch
from torch import Tensor

from toolkit.blocks import no_graph
from toolkit.em.covariance import CovarianceType, Structure, structure_of
from toolkit.em.engine.fit import Init, choose_starts
from toolkit.em.engine.seeding import nearest
from toolkit.em.gaussian import GaussianParameters
from toolkit.em.models.missing import start_missing

InitParams = Literal["kmeans", "k-means++", "random", "random_from_data"]

_CHUNK = 2**14

# The least share of the common variance that counts as a component's own, and not as rounding.
_LEAST = 1e-8


@no_graph()
def starts_by(
    x: Tensor,
    n_components: int,
    n_starts: int,
    *,
    covariance_type: CovarianceType,
    init_params: InitParams,
    reg_covar: float,
    generator: torch.Generator,
    sample_weight: Tensor | None = None,
    means: Tensor | None = None,
) -> Iterator[Callable[[], GaussianParameters]]:
    """Yield functions that make the starts named as in scikit-learn: one M-step from responsibilities.

    ``"kmeans"``: the clusters of k-means. ``"random"``: uniform draws. ``"random_from_data"``, ``"k-means++"``: some
    samples are the means, and each sample belongs to the nearest mean. With `means` each sample belongs to the nearest
    of these, whatever `init_params` says, so that covariances fit the given means.

    A component with too few samples for a covariance of its own gets the covariance of all samples about their means.
    With a variance of `reg_covar` alone the component would stay at one sample.

    Args:
        x: (N, D), finite, or NaN where missing: see `start_missing`.
        n_components: K.
        n_starts: Number of starts.
        covariance_type: As in `fit`.
        init_params: One of the four.
        reg_covar: Added to every variance.
        generator: Randomness.
        sample_weight: (N,).
        means: (K, D), or None.

    Returns:
        Functions that return a mixture in float64, or raise a ValueError if all samples lie at the means and
        `reg_covar` is 0.
    """
    seeded = means is None and init_params != "random"
    if bool(x.isnan().any()):
        if seeded:
            missing = partial(
                start_missing,
                x,
                n_components,
                covariance_type=covariance_type,
                sample_weight=sample_weight,
                init=cast(Init, init_params),
                reg_covar=reg_covar,
                generator=generator,
            )
            return iter([missing] * n_starts)
        x = torch.where(x.isnan(), x.nanmean(0), x)
    near = partial(_start_at, x, sample_weight, covariance_type=covariance_type, reg_covar=reg_covar)
    if means is not None:
        return iter([partial(near, means, keep=True)] * n_starts)
    if seeded:
        # Only the means are needed, and they exist whatever the regularisation.
        found = choose_starts(
            x,
            sample_weight,
            n_components,
            n_starts,
            covariance_type="spherical",
            init=cast(Init, init_params),
            reg_covar=1.0,
            generator=generator,
        )
        return (partial(near, one.means, keep=init_params != "kmeans") for one in found)
    draw = partial(
        _random_start,
        x,
        n_components,
        sample_weight,
        generator,
        covariance_type=covariance_type,
        reg_covar=reg_covar,
    )
    return iter([draw] * n_starts)


def _start_at(
    x: Tensor,
    sample_weight: Tensor | None,
    origins: Tensor,
    *,
    keep: bool,
    covariance_type: CovarianceType,
    reg_covar: float,
) -> GaussianParameters:
    """Return the M-step from the samples nearest to each origin; the origins may be kept as means."""
    moved = _m_step(x, None, origins, covariance_type, reg_covar, sample_weight)
    return dataclasses.replace(moved, means=origins) if keep else moved


def _random_start(
    x: Tensor,
    n_components: int,
    sample_weight: Tensor | None,
    generator: torch.Generator,
    *,
    covariance_type: CovarianceType,
    reg_covar: float,
) -> GaussianParameters:
    """Return the M-step from random responsibilities."""
    sampled, total = torch.zeros_like(x[0], dtype=torch.float64), 0.0
    for _, part, weights in _parts(x, sample_weight):
        sampled, total = sampled + weights @ part, total + float(weights.sum())
    origins = (sampled / total).expand(n_components, -1)
    draws = torch.rand(len(x), n_components, generator=generator, device=generator.device).to(x.device)
    return _m_step(x, draws / draws.sum(1, keepdim=True), origins, covariance_type, reg_covar, sample_weight)


def _m_step(
    x: Tensor,
    responsibilities: Tensor | None,
    origins: Tensor,
    covariance_type: CovarianceType,
    reg_covar: float,
    sample_weight: Tensor | None,
) -> GaussianParameters:
    """Return the M-step from responsibilities (N, K), by default those of the nearest origin (K, D)."""
    n_components, n_features = origins.shape
    counts, first = origins.new_zeros(n_components), torch.zeros_like(origins)
    structure = structure_of(covariance_type)
    wide = structure.wide
    second = origins.new_zeros(wide.shape(n_components, n_features))
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
    weights = torch.maximum(counts, total / len(x))
    safe = torch.where(counts > 0, counts, 1.0)
    shifts = first / safe[:, None]
    scatter = second - wide.products(counts[:, None] * shifts, shifts)
    covariances = _covariances(scatter, safe, total, structure)
    return GaussianParameters(
        log_weights=weights.log() - weights.sum().log(),
        means=origins + shifts,
        precisions_cholesky=structure.factor(structure.regularise(covariances, reg_covar)),
        covariance_type=covariance_type,
    )


def _covariances(scatter: Tensor, counts: Tensor, total: Tensor, structure: Structure) -> Tensor:
    """Return covariances from the components' `wide` scatter; the common one where a component is degenerate."""
    n_components, n_features = len(scatter), scatter.shape[-1]
    pooled = structure.pool(scatter.sum(0, keepdim=True))
    common = structure.estimate(pooled, total.expand(1, n_features))
    if structure.is_shared:
        return common
    own = structure.estimate(structure.pool(scatter), counts[:, None].expand(n_components, n_features))
    sound = structure.has_variance(own, common[0], _LEAST)
    return torch.where(sound.view(-1, *[1] * (own.ndim - 1)), own, common)


def _parts(x: Tensor, sample_weight: Tensor | None) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield slices of rows, their samples and their weights, float64, in small parts."""
    for i in range(0, len(x), _CHUNK):
        part = x[i : i + _CHUNK].double()
        weights = part.new_ones(len(part)) if sample_weight is None else sample_weight[i : i + _CHUNK]
        yield slice(i, i + len(part)), part, weights


def check_given(
    weights: Tensor | None,
    means: Tensor | None,
    precisions: Tensor | None,
    shape: tuple[int, int],
    kind: CovarianceType,
) -> Tensor | None:
    """Return the precisions' Cholesky factor, or None; raise a ValueError if a given parameter is invalid."""
    k, d = shape
    if weights is not None:
        _check_shape("weights_init", weights, (k,))
        if bool((weights < 0).any()) or not abs(float(weights.sum()) - 1) < 1e-6:
            raise ValueError(
                "`weights_init` should be not negative and sum to 1. "
                f"Found {weights.tolist()}, which sum to {float(weights.sum()):.6g}."
            )
    if means is not None:
        _check_shape("means_init", means, (k, d))
    if precisions is None:
        return None
    structure = structure_of(kind)
    _check_shape("precisions_init", precisions, structure.shape(k, d))
    factor, sound = structure.factor_of_precisions(precisions)
    if not bool(sound.all()) and not structure.is_matrix:
        raise ValueError(f"`precisions_init` should be positive. Found {float(precisions.min())}.")
    if not bool(sound.all()):
        which = "" if structure.is_shared else f" Found one that is not, of component {int((~sound).nonzero()[0])}."
        raise ValueError(f"`precisions_init` should be symmetric and positive definite.{which}")
    return factor


def _check_shape(name: str, value: Tensor, expected: tuple[int, ...]) -> None:
    if value.shape != expected:
        raise ValueError(f"`{name}` should have shape {expected}. Found {tuple(value.shape)}.")
    if not bool(value.isfinite().all()):
        raise ValueError(f"`{name}` should be finite. Found {value.tolist()}.")
