"""EM of the estimator on data that are prepared once; `Climber` is the engine of the fourteen models.

N samples, D features, K components.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from toolkit.em.engine.acceleration import Climb, ClimbOptions
from toolkit.em.engine.ascent import climb_prepared, climb_side_by_side
from toolkit.em.engine.restarts import Mixtures, heats
from toolkit.em.engine.samples import Prepared
from toolkit.em.estimators._collapse import collapsed_components
from toolkit.em.gaussian import GaussianParameters
from toolkit.em.models.missing import fit_missing
from toolkit.em.models.prior import Prior


class Engine(Protocol):
    """The EM iteration of one kind of covariance, on prepared data."""

    def climb(self, start: GaussianParameters, options: ClimbOptions) -> Climb[Any]:
        """Return the highest point found, float64."""


@dataclass(frozen=True)
class GaussianEngine:
    """The four types, by the fast pass; with a prior the objective is ``log-likelihood + log-prior / N``."""

    prepared: Prepared
    reg_covar: float
    prior: Prior | None

    def climb(self, start: GaussianParameters, options: ClimbOptions) -> Climb[GaussianParameters]:
        """Return the highest point found, float64."""
        return climb_prepared(start, self.prepared, options, reg_covar=self.reg_covar, prior=self.prior)

    def climb_side_by_side(
        self, points: list[tuple[GaussianParameters, int]], options: ClimbOptions
    ) -> list[Climb[GaussianParameters] | None]:
        """Return the fit from each start and its number of steps taken, or None where `climb` has to find the fit."""
        starts, limits = zip(*((start, options.max_iter - n_iter) for start, n_iter in points), strict=True)
        return climb_side_by_side(
            starts, self.prepared, options, reg_covar=self.reg_covar, prior=self.prior, limits=limits
        )

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


@dataclass(frozen=True)
class MissingEngine:
    """The four types, of samples with missing values, float64."""

    x: Tensor
    sample_weight: Tensor | None
    reg_covar: float
    prior: Prior | None

    def climb(self, start: GaussianParameters, options: ClimbOptions) -> Climb[GaussianParameters]:
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
