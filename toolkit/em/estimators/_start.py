"""Starts of the estimator's fits: responsibilities or means by `init_params`, or the parameters given by the user.

N samples, D features, K components.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Literal, cast

import torch
from torch import Tensor

from toolkit.blocks import no_graph
from toolkit.em.covariance import CovarianceType, structure_of
from toolkit.em.engine.starts import Init, choose_means, start_at, start_from
from toolkit.em.gaussian import GaussianParameters
from toolkit.em.models.missing import start_missing

InitParams = Literal["kmeans", "k-means++", "random", "random_from_data"]


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
    samples are the means, and each sample belongs to the nearest mean. If `means` are given, each sample belongs to the
    nearest of them, for all `init_params`, so that covariances fit the given means.

    A component with too few samples for its own covariance gets the covariance of all samples about their means. With a
    variance of `reg_covar` alone the component would stay at one sample.

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
    near = partial(start_at, x, sample_weight, covariance_type=covariance_type, reg_covar=reg_covar)
    if means is not None:
        return iter([partial(near, means, keep=True)] * n_starts)
    if seeded:
        found = choose_means(x, sample_weight, n_components, n_starts, cast(Init, init_params), generator)
        return (partial(near, one, keep=init_params != "kmeans") for one in found)
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
    weights = x.new_ones(len(x), dtype=torch.float64) if sample_weight is None else sample_weight
    origins = (weights @ x.double() / weights.sum()).expand(n_components, -1)
    draws = torch.rand(len(x), n_components, generator=generator, device=generator.device).to(x.device)
    return start_from(x, draws / draws.sum(1, keepdim=True), origins, covariance_type, reg_covar, sample_weight)


def check_init_parameters(
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
