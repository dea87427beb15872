"""Sufficient statistics of a Gaussian mixture, and the M-step from them.

D features, K components.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from toolkit._checks import instance, number
from toolkit.em.covariance import CovarianceType, soft_counts, structure_of
from toolkit.em.engine.checks import check_prior
from toolkit.em.gaussian import GaussianParameters

__all__ = ["MomentsPrior", "Statistics"]


class MomentsPrior(Protocol):
    """A prior whose mode can be found from weighted moments."""

    def maximise(
        self, counts: Tensor, means: Tensor, scatter: Tensor, covariance_type: CovarianceType
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return weights, means and covariances at the mode, from counts, means and scatter about the means."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Statistics:
    """Sufficient statistics of samples weighted by responsibilities, float64.

    Attributes:
        counts: (K,): sums of responsibilities.
        means: (K, D): means of the samples, weighted by responsibilities; any finite value where the count is 0.
        scatter: Sums of second moments about `means`: (K, D, D) for full, their sum over components (D, D) for tied,
            (K, D) for diag, (K,) summed over features for spherical.
        covariance_type: The type.
    """

    counts: Tensor
    means: Tensor
    scatter: Tensor
    covariance_type: CovarianceType

    @classmethod
    def implied_by(cls, parameters: GaussianParameters) -> Statistics:
        """Return the statistics, with a total count of 1, whose M-step returns these parameters."""
        weights, means = parameters.weights, parameters.means
        totals = structure_of(parameters.covariance_type).totals(weights[:, None].expand(means.shape))
        scatter = totals * parameters.covariances
        return cls(counts=weights, means=means, scatter=scatter, covariance_type=parameters.covariance_type)

    def scaled(self, factor: float) -> Statistics:
        """Return the statistics with the weight of each sample multiplied by `factor`."""
        factor = number("factor", factor, least=0)
        return dataclasses.replace(self, counts=factor * self.counts, scatter=factor * self.scatter)

    def merged(self, other: Statistics) -> Statistics:
        """Return the statistics of the samples of both together.

        References:
            Chan, Golub & LeVeque, "Algorithms for computing the sample variance", 1983, equation 2.1.
        """
        instance("other", other, Statistics)
        counts = self.counts + other.counts
        share = other.counts / soft_counts(counts)
        steps = other.means - self.means
        between = structure_of(self.covariance_type).products((self.counts * share)[:, None] * steps, steps)
        return dataclasses.replace(
            self,
            counts=counts,
            means=self.means + share[:, None] * steps,
            scatter=self.scatter + other.scatter + between,
        )

    def maximise(self, *, reg_covar: float | Tensor = 0.0, prior: MomentsPrior | None = None) -> GaussianParameters:
        """Return the M-step, or the mode given a prior.

        Args:
            reg_covar: Added to every variance; or a matrix (D, D) that is added to every covariance.
            prior: The prior.

        Raises:
            TypeError: If `prior` is no prior.
            ValueError: If a covariance is singular, or `reg_covar` is negative or not finite.
        """
        if not isinstance(reg_covar, Tensor):
            reg_covar = number("reg_covar", reg_covar, least=0)
        check_prior(prior)
        kind, structure = self.covariance_type, structure_of(self.covariance_type)
        if prior is not None:
            weights, means, covariances = prior.maximise(self.counts, self.means, self.scatter, kind)
        else:
            counts = soft_counts(self.counts)
            weights, means = counts / counts.sum(), self.means
            covariances = structure.estimate(self.scatter, counts[:, None].expand(means.shape))
        return GaussianParameters(
            log_weights=weights.log(),
            means=means,
            precisions_cholesky=structure.factor(structure.regularise(covariances, reg_covar)),
            covariance_type=kind,
        )

    def expected_log_joint(self, parameters: GaussianParameters) -> Tensor:
        """Return the expected complete-data log-likelihood, a scalar in nats, summed over the samples."""
        shifts = self.means - parameters.means
        about = structure_of(self.covariance_type).products(self.counts[:, None] * shifts, shifts)
        moments, precisions = self.scatter + about, parameters.precisions
        volumes = parameters.log_determinants - 0.5 * parameters.n_features * math.log(2 * math.pi)
        # A component without weight has the log-weight minus infinity, and no samples.
        constants = torch.where(self.counts > 0, self.counts * (parameters.log_weights + volumes), 0.0)
        total: Tensor = constants.sum() - 0.5 * (moments * precisions).sum()
        return total
