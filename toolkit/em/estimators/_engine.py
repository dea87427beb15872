"""What the estimator climbs with: one EM map for each kind of covariance, on data that are prepared once.

N samples, D features, K components.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from toolkit._data import Rows
from toolkit.em._rounding import leaders
from toolkit.em.acceleration import Accelerate, Climb
from toolkit.em.estimators._collapse import collapsed_components
from toolkit.em.gaussian._fit import FINALISTS, HEAT_STEPS, HEATS, climb_prepared
from toolkit.em.gaussian._restarts import Mixtures, climb_together
from toolkit.em.gaussian._samples import prepare
from toolkit.em.gaussian.missing import fit_missing, marginal_log_joint
from toolkit.em.gaussian.parameters import CovarianceType, GaussianParameters
from toolkit.em.gaussian.parsimonious import Climber, CovarianceModel
from toolkit.em.gaussian.prior import Prior


@dataclass(frozen=True, kw_only=True)
class Options:
    """How to climb: as in `climb`."""

    accelerate: Accelerate
    tol: float
    max_iter: int
    callback: Callable[[int, float], None] | None


class Engine(Protocol):
    """Climbs from a start on the data that it holds."""

    def climb(self, start: GaussianParameters, options: Options) -> Climb[Any]:
        """Return the highest point found, float64."""


class GaussianEngine:
    """The four types, by the fast pass; with a prior the value is ``log-likelihood + log-prior / N``."""

    def __init__(
        self,
        x: Tensor | Rows,
        n_components: int,
        covariance_type: CovarianceType,
        *,
        sample_weight: Tensor | None,
        reg_covar: float,
        prior: Prior | None,
        cache: bool,
    ) -> None:
        self.reg_covar, self.prior = reg_covar, prior
        self.prepared = prepare(x, covariance_type, n_components, sample_weight=sample_weight, cache=cache)

    def climb(self, start: GaussianParameters, options: Options) -> Climb[GaussianParameters]:
        """Return the highest point found, float64."""
        return climb_prepared(start, data=self.prepared, reg_covar=self.reg_covar, prior=self.prior, **vars(options))

    def heats(self, starts: list[GaussianParameters], options: Options) -> list[tuple[GaussianParameters, int]]:
        """Climb from all starts together, plainly, and say from where to go on.

        Collapsed ones come last: the likelihood says nothing about them. With plain steps the best start is all there
        is to say; otherwise the highest points are, after so many steps that they can be told from the others. So are
        starts that became singular: together they are expanded, which very narrow components do not bear; alone they
        are not.

        Returns:
            Points from which to go on and the steps taken to them.
        """
        plain = options.accelerate == "none"
        mixtures, values, steps, _ = climb_together(
            Mixtures.of(starts, self.prepared),
            self.prepared,
            tol=options.tol if plain else max(options.tol, HEATS),
            max_iter=options.max_iter if plain else min(options.max_iter, HEAT_STEPS),
            reg_covar=self.reg_covar,
        )
        if not bool(values.isfinite().any()):
            return [(start, 0) for start in starts]
        reached = [(i, mixtures.one(i, self.prepared)) for i in range(len(starts))]
        alive = [(i, parameters) for i, parameters in reached if values[i].isfinite()]
        merits = [(not collapsed_components(parameters, self.reg_covar), float(values[i])) for i, parameters in alive]
        best = [alive[place] for place in leaders(merits, self.prepared.dtype, 1 if plain else FINALISTS)]
        best += [(i, parameters) for i, parameters in reached if not values[i].isfinite()]
        return [(starts[i], 0) if plain else (parameters, int(steps[i])) for i, parameters in best]


class ParsimoniousEngine:
    """The fourteen models of volume, shape and orientation."""

    def __init__(
        self,
        x: Tensor,
        n_components: int,
        model: CovarianceModel,
        *,
        sample_weight: Tensor | None,
        reg_covar: float,
    ) -> None:
        self.climber = Climber(x, n_components, model, reg_covar, sample_weight)

    def climb(self, start: GaussianParameters, options: Options) -> Climb[Any]:
        """Return the highest point found, float64."""
        return self.climber.climb(start, **vars(options))


class MissingEngine:
    """The four types, of samples with missing values."""

    def __init__(
        self,
        x: Tensor,
        *,
        sample_weight: Tensor | None,
        reg_covar: float,
        prior: Prior | None,
    ) -> None:
        self.x, self.sample_weight, self.reg_covar, self.prior = x.double(), sample_weight, reg_covar, prior

    def climb(self, start: GaussianParameters, options: Options) -> Climb[GaussianParameters]:
        """Return the highest point found, float64."""
        return fit_missing(
            self.x,
            start.n_components,
            covariance_type=start.covariance_type,
            sample_weight=self.sample_weight,
            init=start,
            reg_covar=self.reg_covar,
            prior=self.prior,
            **vars(options),
        )


@dataclass(frozen=True)
class Marginal:
    """A mixture of whole samples, seen where there is something to see."""

    parameters: GaussianParameters

    def log_joint(self, x: Tensor) -> Tensor:
        """Return the log of weight times density of the values that are not NaN, (N, K)."""
        return marginal_log_joint(self.parameters, x) if bool(x.isnan().any()) else self.parameters.log_joint(x)
