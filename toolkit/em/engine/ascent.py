"""Climbs of a Gaussian mixture on prepared data, from one start, or from several at once.

N samples, D features, K components, R starts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from toolkit.blocks import no_graph
from toolkit.em.covariance import structure_of
from toolkit.em.engine.acceleration import Climb, ClimbOptions, climb, climb_family
from toolkit.em.engine.checks import check_variances, has_variances
from toolkit.em.engine.fused import maximise, rounding_error
from toolkit.em.engine.ranks import pass_over_ranks
from toolkit.em.engine.rounding import ROUNDING
from toolkit.em.engine.samples import Prepared
from toolkit.em.engine.small import SmallData, SmallMixture, is_small
from toolkit.em.engine.statistics import MomentsPrior
from toolkit.em.engine.together import climb_together
from toolkit.em.gaussian import GaussianParameters

__all__ = ["Fit", "GaussianPrior", "climb_prepared", "climb_side_by_side"]

# The result of a fit, with the mixture in the data's floating-point type, or in float64.
Fit: TypeAlias = Climb[GaussianParameters]

# The largest variance that `reg_covar` may add in the coordinates of the pass, where the data have variance 1.
_LARGEST_RIDGE = 1e6

# The most responsibilities (K, N) of fits that climb side by side, and of all of them: with more, the arithmetic of a
# step takes longer than its calls, and leaves the cache.
_FEW = 2**12
_FEW_OF_ALL = 2**16


class GaussianPrior(MomentsPrior, Protocol):
    """A prior of a Gaussian mixture: see `toolkit.em.models.prior`."""

    def log_density(self, parameters: GaussianParameters) -> Tensor:
        """Return its log-density, nats."""


@no_graph()
def climb_prepared(
    first: GaussianParameters,
    data: Prepared,
    options: ClimbOptions,
    *,
    reg_covar: float,
    prior: GaussianPrior | None,
) -> Fit:
    """Fit from one start on prepared data; float64.

    The iteration runs in the coordinates of the pass, in which means have no offset, and all features and directions
    have the same scale.
    """
    structure, ridge = structure_of(first.covariance_type), data.ridge(reg_covar)
    swallowed = _swallows(ridge)
    if prior is None and not swallowed and is_small(data, structure, first.n_components):
        return _climb_small(first, data, options, reg_covar=reg_covar)
    kind, pass_data, log_volume = first.covariance_type, data.as_samples(), data.log_volume

    def em(parameters: GaussianParameters) -> tuple[GaussianParameters, float]:
        moments = pass_over_ranks(parameters, pass_data)
        value = float(moments.log_likelihood) - log_volume
        if prior is None and not swallowed:
            return maximise(moments, pass_data, kind, ridge), value
        if prior is not None:
            value += float(prior.log_density(_unframed(parameters, data))) / data.total_weight
        return _framed(maximise(moments, data, kind, reg_covar, prior), data), value

    found = climb_family(
        em,
        _framed(first.to(torch.float64), data),
        options,
        rounding=ROUNDING[data.dtype],
        error=lambda there: rounding_error(there, pass_data),
        check=lambda there: check_variances(data.factor_from_frame(there.precisions_cholesky), structure, reg_covar),
    )
    return _finished(found, found.parameters, first, data)


def _climb_small(first: GaussianParameters, data: Prepared, options: ClimbOptions, *, reg_covar: float) -> Fit:
    """Fit from one start on data for which NumPy is the faster."""
    structure, unscale, log_volume = structure_of(first.covariance_type), _unscale(data), data.log_volume
    small = SmallData(data.as_samples(), structure, first.n_components, data.ridge(reg_covar))
    origin = SmallMixture.of(_framed(first.to(torch.float64), data))

    def unpack(position: Tensor) -> SmallMixture:
        there = origin.unpack(position)
        check_variances(there.factor if unscale is None else unscale @ there.factor, structure, reg_covar)
        return there

    def em(there: SmallMixture) -> tuple[SmallMixture, float]:
        moved, value = small.em(there)
        return moved, value - log_volume

    found = climb(
        em,
        origin,
        pack=SmallMixture.pack,
        unpack=unpack,
        rounding=ROUNDING[data.dtype],
        error=small.error,
        **vars(options),
    )
    return _finished(found, found.parameters.as_gaussian(), first, data)


@no_graph()
def climb_side_by_side(
    starts: Sequence[GaussianParameters],
    data: Prepared,
    options: ClimbOptions,
    *,
    reg_covar: float,
    prior: GaussianPrior | None,
    limits: Sequence[int] | None = None,
) -> list[Fit | None]:
    """Fit from several starts at once, if the data are so few that calls dominate a step, and nobody listens.

    Each fit is that of `climb_prepared`, up to rounding: an EM step of all is one call.

    Args:
        starts: R mixtures of one structure.
        data: The data.
        options: As in `climb_prepared`.
        reg_covar: As in `climb_prepared`.
        prior: As in `climb_prepared`.
        limits: (R,): the most steps of each. None: those of the options.

    Returns:
        The fit from each start, float64; None where it is left to `climb_prepared`: for other data, and where a
        covariance becomes singular.
    """
    structure, k = structure_of(starts[0].covariance_type), starts[0].n_components
    ridge, listened = data.ridge(reg_covar), options.callback is not None
    each = k * data.n_samples
    if len(starts) == 1 or prior is not None or listened or each > _FEW or _swallows(ridge):
        return [None] * len(starts)
    if not is_small(data, structure, k):
        return [None] * len(starts)
    limits = [options.max_iter] * len(starts) if limits is None else limits
    small = SmallData(data.as_samples(), structure, k, ridge)
    found: list[Fit | None] = []
    count = max(1, _FEW_OF_ALL // each)
    for i in range(0, len(starts), count):
        group, most = starts[i : i + count], np.array(limits[i : i + count])
        found += _climb_group(group, data, small, options, reg_covar=reg_covar, limits=most)
    return found


def _climb_group(
    starts: Sequence[GaussianParameters],
    data: Prepared,
    small: SmallData,
    options: ClimbOptions,
    *,
    reg_covar: float,
    limits: Any,
) -> list[Fit | None]:
    """Return the fit from each start, or None where a covariance becomes singular."""
    structure, unscale = small.structure, _unscale(data)
    framed = SmallMixture.stack([SmallMixture.of(_framed(first.to(torch.float64), data)) for first in starts])

    def em(_: object, positions: Any) -> tuple[Any, Any, Any]:
        images, values, errors = small.em_of_several(framed.at(positions))
        return images, values - data.log_volume, errors

    def allows(_: object, positions: Any) -> Any:
        factors = framed.at(positions).factor
        factors = factors if unscale is None else unscale @ factors
        return np.array([has_variances(factor, structure, reg_covar) for factor in factors])

    climbs = climb_together(
        em,
        framed.position(),
        accelerate=options.accelerate,
        tol=options.tol,
        limits=limits,
        allows=allows,
        rounding=ROUNDING[data.dtype],
    )
    reached = framed.at(climbs.positions)

    def fit_of(i: int) -> Fit | None:
        if climbs.failed[i]:
            return None
        history = tuple(climbs.histories[i])
        there = reached[i].as_gaussian()
        found = Climb(there, history[-1], bool(climbs.converged[i]), int(climbs.n_iter[i]), history)
        return _finished(found, there, starts[i], data)

    return [fit_of(i) for i in range(len(starts))]


def _swallows(ridge: Tensor | float) -> bool:
    """Say whether `reg_covar` would hide variances in the coordinates of the pass that are tiny beside it."""
    return isinstance(ridge, Tensor) and bool(ridge.diagonal().max() > _LARGEST_RIDGE)


def _unscale(data: Prepared) -> Any:
    """Return the matrix that takes factors of precisions to those of samples, an array, or None if there is none."""
    return None if data.whitening is None else data.whitening.mT.numpy()


def _finished(found: Climb[Any], there: GaussianParameters, first: GaussianParameters, data: Prepared) -> Fit:
    """Return a fit with its mixture as a mixture of samples, or as the start where it has not moved."""
    stayed = len(found.history) == 1
    return dataclasses.replace(found, parameters=first.to(torch.float64) if stayed else _unframed(there, data))


def _framed(parameters: GaussianParameters, data: Prepared) -> GaussianParameters:
    return dataclasses.replace(
        parameters,
        means=data.to_frame(parameters.means),
        precisions_cholesky=data.factor_to_frame(parameters.precisions_cholesky),
    )


def _unframed(parameters: GaussianParameters, data: Prepared) -> GaussianParameters:
    return dataclasses.replace(
        parameters,
        means=data.from_frame(parameters.means),
        precisions_cholesky=data.factor_from_frame(parameters.precisions_cholesky),
    )
