"""From the starts of a Gaussian mixture to its fits: EM on data that are prepared once, and the soundness of a fit.

N samples, D features, K components, R starts.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from toolkit._data import Rows, as_arrays, library
from toolkit._progress import Progress
from toolkit.blocks import no_graph
from toolkit.em.covariance import Structure, structure_of
from toolkit.em.covariance.matrices import are_definite
from toolkit.em.engine.acceleration import MEMORY, Climb, ClimbOptions, climb, climb_family
from toolkit.em.engine.fused import maximise, rounding_error
from toolkit.em.engine.newton import climb_by_newton, has_few_parameters
from toolkit.em.engine.ranks import pass_over_ranks
from toolkit.em.engine.restarts import Mixtures, heats
from toolkit.em.engine.rounding import ROUNDING
from toolkit.em.engine.samples import Prepared, gathered
from toolkit.em.engine.small import SmallData, SmallMixture, is_small
from toolkit.em.engine.statistics import MomentsPrior
from toolkit.em.engine.together import climb_together
from toolkit.em.gaussian import GaussianParameters
from toolkit.em.mixture import log_density

__all__ = [
    "Engine",
    "Fit",
    "GaussianEngine",
    "GaussianPrior",
    "check_resolved",
    "climb_each",
    "collapsed_components",
    "lost_value",
]

# The result of a fit, with the mixture in the data's floating-point type, or in float64.
Fit: TypeAlias = Climb[GaussianParameters]

# The largest variance that `reg_covar` may add in the coordinates of the pass, where the data have variance 1.
_LARGEST_RIDGE = 1e6

# The most responsibilities (K, N) of fits that climb side by side, and of all of them: with more, the arithmetic of a
# step takes longer than its calls, and leaves the cache.
_FEW = 2**12
_FEW_OF_ALL = 2**16

# The gain of a step, nats per sample, below which Newton's steps follow plain ones: scikit-learn's `tol`, so that a fit
# is as high as plain steps from its start in scikit-learn.
_PLAIN = 1e-3

# The least variance of the whole mixture, in units of `reg_covar`, that counts as resolved.
_RESOLVED = 100.0

# The rounding of samples, in units of the width of a component, that may hide differences; and the difference of
# log-likelihoods, in units of 1 nat and their size, that shows it: an outlier causes far larger ones.
_HIDDEN = 0.01
_LOST = 0.1


class GaussianPrior(MomentsPrior, Protocol):
    """A prior of a Gaussian mixture: see `toolkit.em.models.prior`."""

    def log_density(self, parameters: GaussianParameters) -> Tensor:
        """Return its log-density, nats."""


class Engine(Protocol):
    """The EM iteration of one kind of covariance, on prepared data."""

    def climb(self, start: GaussianParameters, options: ClimbOptions) -> Climb[Any]:
        """Return the highest point found, float64."""


@dataclass(frozen=True)
class GaussianEngine:
    """The four types, by the fast pass; with a prior the objective is ``log-likelihood + log-prior / N``.

    The iteration runs in the coordinates of the pass, in which means have no offset, and all features and directions
    have the same scale.
    """

    prepared: Prepared
    reg_covar: float
    prior: GaussianPrior | None

    @no_graph()
    def climb(self, start: GaussianParameters, options: ClimbOptions) -> Fit:
        """Return the highest point found, float64."""
        data, prior, structure = self.prepared, self.prior, structure_of(start.covariance_type)
        ridge = data.ridge(self.reg_covar)
        swallowed = _swallows(ridge)
        if prior is None and _is_for_newton(data, structure, start.n_components, options):
            data = gathered(data)
        if prior is None and not swallowed and is_small(data, structure, start.n_components):
            return dataclasses.replace(self, prepared=data)._climb_small(start, options)
        kind, pass_data, log_volume = start.covariance_type, data.as_samples(), data.log_volume

        def em(parameters: GaussianParameters) -> tuple[GaussianParameters, float]:
            moments = pass_over_ranks(parameters, pass_data)
            value = float(moments.log_likelihood) - log_volume
            if prior is None and not swallowed:
                return maximise(moments, pass_data, kind, ridge), value
            if prior is not None:
                value += float(prior.log_density(_unframed(parameters, data))) / data.total_weight
            return _framed(maximise(moments, data, kind, self.reg_covar, prior), data), value

        def check(there: GaussianParameters) -> None:
            structure.check_least(data.factor_from_frame(there.precisions_cholesky), self.reg_covar)

        found = climb_family(
            em,
            _framed(start.to(torch.float64), data),
            options,
            rounding=ROUNDING[data.dtype],
            error=lambda there: rounding_error(there, pass_data),
            check=check,
        )
        return _finished(found, found.parameters, start, data)

    def _climb_small(self, start: GaussianParameters, options: ClimbOptions) -> Fit:
        """Fit from one start on data for which NumPy is the faster."""
        data, small = self.prepared, self._small(start)
        log_volume, unscale, structure = data.log_volume, _unscale(data), small.structure
        origin = SmallMixture.of(_framed(start.to(torch.float64), data))

        def unpack(position: Tensor) -> SmallMixture:
            there = origin.unpack(position)
            factor = there.factor if unscale is None else unscale @ there.factor
            structure.check_least(factor, self.reg_covar)
            return there

        def em(there: SmallMixture) -> tuple[SmallMixture, float]:
            moved, value = small.em(there)
            return moved, value - log_volume

        def go(there: SmallMixture, chosen: ClimbOptions) -> Climb[SmallMixture]:
            return climb(
                em,
                there,
                pack=SmallMixture.pack,
                unpack=unpack,
                rounding=ROUNDING[data.dtype],
                error=small.error,
                **vars(chosen),
            )

        def newton(there: SmallMixture, chosen: ClimbOptions) -> Climb[SmallMixture]:
            def allows(mixture: SmallMixture) -> bool:
                factor = mixture.factor if unscale is None else unscale @ mixture.factor
                return structure.has_least(factor, self.reg_covar)

            def tell(n_iter: int, value: float) -> None:
                if chosen.callback is not None:
                    chosen.callback(n_iter, value - log_volume)

            found = climb_by_newton(
                small,
                there,
                tol=chosen.tol,
                max_iter=chosen.max_iter,
                rounding=ROUNDING[data.dtype],
                allows=allows,
                tell=tell,
            )
            history = tuple(value - log_volume for value in found.history)
            return dataclasses.replace(found, log_likelihood=history[-1], history=history)

        if _is_for_newton(data, structure, start.n_components, options):
            plain = dataclasses.replace(options, accelerate="none", tol=max(options.tol, _PLAIN))
            found = _in_turn(origin, options, (plain, go), (options, newton), (options, go))
        else:
            found = go(origin, options)
        return _finished(found, found.parameters.as_gaussian(), start, data)

    @no_graph()
    def climb_side_by_side(
        self, points: Sequence[tuple[GaussianParameters, int]], options: ClimbOptions
    ) -> list[Fit | None]:
        """Fit from several points at once, if the data are so few that calls dominate a step, without callback.

        Each fit is that of `climb`, up to rounding: an EM step of all is one call.

        Args:
            points: R mixtures of one structure, with the steps that were taken to each: so many less are left.
            options: As in `climb`.

        Returns:
            The fit from each point, float64; None where it is left to `climb`: for other data, and where a covariance
            becomes singular.
        """
        starts = [start for start, _ in points]
        structure, k = structure_of(starts[0].covariance_type), starts[0].n_components
        data, each = self.prepared, k * self.prepared.n_samples
        alone: list[Fit | None] = [None] * len(starts)
        if len(starts) == 1 or self.prior is not None or options.callback is not None or each > _FEW:
            return alone
        if not is_small(data, structure, k) or _is_for_newton(data, structure, k, options):
            return alone
        if _swallows(data.ridge(self.reg_covar)):
            return alone
        limits, small = np.array([options.max_iter - n_iter for _, n_iter in points]), self._small(starts[0])
        found: list[Fit | None] = []
        count = max(1, _FEW_OF_ALL // each)
        for i in range(0, len(starts), count):
            found += self._climb_group(starts[i : i + count], small, options, limits[i : i + count])
        return found

    def _climb_group(
        self, starts: Sequence[GaussianParameters], small: SmallData, options: ClimbOptions, limits: Any
    ) -> list[Fit | None]:
        """Return the fit from each start, or None where a covariance becomes singular."""
        data, structure, unscale = self.prepared, small.structure, _unscale(self.prepared)
        framed = SmallMixture.stack([SmallMixture.of(_framed(first.to(torch.float64), data)) for first in starts])

        def em(_: object, positions: Any) -> tuple[Any, Any, Any]:
            images, values, errors = small.em_of_several(framed.at(positions))
            return images, values - data.log_volume, errors

        def allows(_: object, positions: Any) -> Any:
            factors = framed.at(positions).factor
            factors = factors if unscale is None else unscale @ factors
            return np.array([structure.has_least(factor, self.reg_covar) for factor in factors])

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

    def heats(
        self, starts: list[GaussianParameters], keep: int, options: ClimbOptions
    ) -> list[tuple[GaussianParameters, int]]:
        """Return the points to continue from, and the steps taken to each (see `toolkit.em.engine.restarts.heats`).

        With plain steps the starts themselves are returned, so that the history is complete.
        """

        def are_sound(mixtures: Mixtures) -> list[bool]:
            reached = (mixtures.one(i, self.prepared) for i in range(len(mixtures.means)))
            return [not collapsed_components(mixture, self.reg_covar) for mixture in reached]

        found = heats(starts, self.prepared, options, are_sound=are_sound, keep=keep, reg_covar=self.reg_covar)
        if not found or options.accelerate == "none":
            return [(heat.start, 0) for heat in found] or [(start, 0) for start in starts]
        return [(heat.reached.parameters, heat.reached.n_iter) for heat in found]

    def _small(self, start: GaussianParameters) -> SmallData:
        """Return the data, and the EM map of mixtures of this structure and size, by NumPy."""
        structure, ridge = structure_of(start.covariance_type), self.prepared.ridge(self.reg_covar)
        return SmallData(self.prepared.as_samples(), structure, start.n_components, ridge)


def _is_for_newton(data: Prepared, structure: Structure, n_components: int, options: ClimbOptions) -> bool:
    """Say whether Newton's steps follow plain ones; a fit of very few steps takes none."""
    if options.accelerate != "auto" or options.max_iter < MEMORY or data.group is not None:
        return False
    if data.centre.device.type != "cpu":
        return False
    return has_few_parameters(structure, n_components, len(data.centre), data.n_samples)


def _in_turn(
    start: SmallMixture, options: ClimbOptions, *stages: tuple[ClimbOptions, Callable[..., Climb[SmallMixture]]]
) -> Climb[SmallMixture]:
    """Return the fit by several methods, each from the result of the one before; the first only prepares."""
    found = Climb(start, -math.inf, False, 0, ())
    for i, (chosen, go) in enumerate(stages):
        before = found
        if i and (before.n_iter == options.max_iter or (i > 1 and before.converged)):
            break

        def tell(n_iter: int, value: float, before: Climb[SmallMixture] = before) -> None:
            if options.callback is not None and (n_iter or not before.history):
                options.callback(before.n_iter + n_iter, value)

        left = dataclasses.replace(chosen, max_iter=options.max_iter - before.n_iter, callback=tell)
        now = go(before.parameters, left)
        later = [max(value, before.log_likelihood) for value in now.history[min(i, 1) :]]
        history = (*before.history, *later)
        found = Climb(now.parameters, history[-1], now.converged, before.n_iter + now.n_iter, history)
    return found


def climb_each(
    engine: Engine,
    points: Sequence[tuple[GaussianParameters, int]],
    options: ClimbOptions,
    progress: Progress | None = None,
    name: str = "Start",
) -> tuple[list[Climb[Any]], list[ValueError]]:
    """Fit from each of several points; another point may not lead to a singular covariance.

    Args:
        engine: The EM iteration.
        points: Mixtures, with the steps that were taken to each.
        options: As in `climb`.
        progress: Shows the fits. None: nothing.
        name: The name of a point, to be shown.

    Returns:
        The fits, and the errors of those that became singular.
    """
    progress = progress or Progress(verbose=0, interval=1, callback=None)
    fits: list[Climb[Any]] = []
    errors: list[ValueError] = []
    ahead: list[Climb[Any] | None] = [None] * len(points)
    if isinstance(engine, GaussianEngine):
        ahead = engine.climb_side_by_side(points, options)
    for i, ((point, n_iter), done) in enumerate(zip(points, ahead, strict=True)):
        progress.begin(f"{name} {i + 1} of {len(points)}")
        try:
            found = done or engine.climb(point, dataclasses.replace(options, max_iter=options.max_iter - n_iter))
        except ValueError as singular:
            errors.append(singular)
            progress.say("became singular")
        else:
            fits.append(dataclasses.replace(found, n_iter=n_iter + found.n_iter))
            progress.end("converged" if found.converged else "not converged", found.history[-1])
    return fits, errors


@no_graph()
@np.errstate(all="ignore")
def collapsed_components(parameters: GaussianParameters, reg_covar: float) -> list[int]:
    """Return the components that are empty, or whose variance in some direction comes from `reg_covar` alone.

    Directions in which the whole mixture has no variance, such as a constant feature, do not count. If there is no
    other direction, all components are degenerate. After an M-step the covariance of the mixture is that of the data.

    Args:
        parameters: A fitted mixture.
        reg_covar: The number that was added to every variance.

    Returns:
        Their indices, in order.

    Example:
        >>> two = GaussianParameters.from_covariances(
        ...     weights=torch.tensor([0.9, 0.1]), means=torch.tensor([[0.0], [3.0]]),
        ...     covariances=torch.tensor([4.0, 1e-6]), covariance_type="spherical")
        >>> collapsed_components(two, 1e-6)
        [1]
    """
    parameters = parameters.to(torch.float64)
    full = parameters.as_type("full").covariances
    weights, means, covariances = as_arrays(full.numel(), parameters.weights, parameters.means, full)
    of = library(weights)
    shifts = means - weights @ means
    whole = (weights[:, None, None] * covariances).sum(0) + (weights[:, None] * shifts).mT @ shifts
    smallest = of.finfo(whole.dtype).eps * len(whole)
    empty = weights < of.finfo(whole.dtype).eps * len(weights)
    if of is np and not empty.any() and whole.trace() > len(whole) * _RESOLVED * reg_covar:
        # Enough, and faster: each covariance is larger than both bounds below in every direction.
        above = covariances - 2 * reg_covar * np.eye(len(whole)) - smallest * whole
        if are_definite(above):
            return []
    values, vectors = of.linalg.eigh(whole)
    resolved = values > max(_RESOLVED * reg_covar, smallest * float(values[-1]))
    if not bool(resolved.any()):
        return list(range(len(weights)))
    directions = vectors[:, resolved]
    own = directions.mT @ covariances @ directions
    # Twice `reg_covar`: half of the variance is then the data's own.
    held_up = of.linalg.eigvalsh(own)[..., 0] <= 2 * reg_covar
    scaled = directions / of.sqrt(values[resolved])
    singular = of.linalg.eigvalsh(scaled.mT @ covariances @ scaled)[..., 0] <= smallest
    return [k for k, yes in enumerate((empty | held_up | singular).tolist()) if yes]


@no_graph()
def check_resolved(found: Fit, rows: Rows, data: Prepared) -> None:
    """Raise a ValueError if rounding of the coordinates of the pass hides differences of the samples.

    An outlier at a distance of 1e30 sets the scale of the coordinates, in which all other samples are then the same.
    The samples are read once more if a component is nearly as narrow as rounding, as it is on repeated samples too.

    Args:
        found: A fit on prepared data, whose value is the log-likelihood.
        rows: The samples.
        data: The prepared data.
    """
    mixture = found.parameters.to(torch.float64)
    structure = structure_of(mixture.covariance_type)
    factor = data.factor_to_frame(mixture.precisions_cholesky)
    rounding = torch.finfo(data.dtype).eps / _HIDDEN
    if float(structure.squared_distances(factor, data.scatter).max()) * rounding**2 < 1:
        return
    value = lost_value(found, rows)
    if value is not None:
        advice = "remove the outlier" + (", or use float64." if data.dtype == torch.float32 else ".")
        raise ValueError(
            "`x` should have no outlier beside which the differences of the other samples are lost to rounding. Found "
            f"a fit of log-likelihood {found.log_likelihood:.6g} by rounded samples, and {value:.6g} by the samples "
            f"themselves: {advice}"
        )


def lost_value(found: Climb[Any], rows: Rows) -> float | None:
    """Return the log-likelihood of the samples, nats per sample, if rounding made that of a fit another; else None."""
    mixture, total, weight = found.parameters.to(torch.float64), 0.0, 0.0
    for part, weights in rows(2**14):
        densities = log_density(mixture, part.to(torch.float64))
        total += float(densities.sum() if weights is None else densities[weights > 0] @ weights[weights > 0].double())
        weight += float(len(part) if weights is None else weights.sum())
    value = total / max(weight, math.ulp(0.0))
    return None if abs(value - found.log_likelihood) <= _LOST * (1 + abs(found.log_likelihood)) else value


def _swallows(ridge: Tensor | float) -> bool:
    """Say whether `reg_covar` would hide variances in the coordinates of the pass that are tiny beside it."""
    return isinstance(ridge, Tensor) and bool(ridge.diagonal().max() > _LARGEST_RIDGE)


def _unscale(data: Prepared) -> Any:
    """Return the matrix that turns factors of precisions into those of samples, an array. None: they are the same."""
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
