r"""The conjugate prior of a Gaussian mixture, for maximum a posteriori EM: no component can shrink onto a few samples.

With :math:`\lambda` for `scale`, :math:`\nu` for `degrees_of_freedom`, :math:`\kappa` for `shrinkage` and
:math:`\alpha` for `concentration`, independently for each component (the covariance once if it is tied):

============================  =========================================================================
weights                       Dirichlet(:math:`\alpha`)
means, given the covariance   normal(:math:`m`, :math:`\Sigma_k / \kappa`)
full and tied covariances     inverse Wishart(:math:`\nu`, :math:`\lambda`)
diag variances                inverse gamma(:math:`\nu / 2`, :math:`\lambda_d / 2`), one for each feature
spherical variances           inverse gamma(:math:`\nu / 2`, :math:`\lambda / 2`)
============================  =========================================================================

Densities are those of weights, means and **covariances**; a density of precisions would have another mode.

N samples, D features, K components.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from toolkit._checks import integer, number
from toolkit._tensors import tensors
from toolkit.blocks import no_graph
from toolkit.em.components import Movable
from toolkit.em.covariance import CovarianceType, soft_counts, structure_of
from toolkit.em.engine.checks import check_matrix, check_weights
from toolkit.em.gaussian import GaussianParameters

__all__ = ["Prior"]

# The choice of Fraley & Raftery: the prior mean counts as a hundredth of a sample.
_SHRINKAGE = 0.01


@dataclass(frozen=True, kw_only=True, eq=False)
class Prior(Movable):
    r"""A conjugate prior of the parameters of a Gaussian mixture.

    MAP EM never lowers ``log_likelihood(parameters, x) + prior.log_density(parameters) / N``, in nats per sample, where
    N is the number of samples, or the sum of their weights. Its M-step is `maximise`.

    Results have the wider of the floating-point types of prior and arguments; `default` is float64.

    Attributes:
        concentration: (K,), at least 1 each. 1 has no effect; c counts as c - 1 more samples of the component.
        mean: (D,): prior mean of the components' means.
        shrinkage: Number of samples that `mean` counts as; positive.
        degrees_of_freedom: Number of samples that `scale` counts as: more than D - 1 for full and tied, positive for
            diag and spherical.
        scale: Sums of squares in the data's units squared: (D, D) for full and tied, (D,) for diag, () for spherical.

    Raises:
        ValueError: If a value is out of range, or the shapes do not fit together.

    References:
        Fraley & Raftery, "Bayesian regularization for normal mixture estimation and model-based clustering", 2007,
        section 3 (conjugate priors and posterior modes). Gauvain & Lee, "Maximum a posteriori estimation for
        multivariate Gaussian mixture observations of Markov chains", 1994, section II (weights).

    Example:
        >>> prior = Prior.default(torch.tensor([[0.0], [2.0], [4.0]]), 1, "diag")
        >>> counts, means, scatter = torch.tensor([3.0]), torch.tensor([[2.0]]), torch.tensor([[8.0]])
        >>> prior.maximise(counts, means, scatter, "diag")[2]
        tensor([[1.1852]], dtype=torch.float64)
    """

    concentration: Tensor
    mean: Tensor
    shrinkage: float
    degrees_of_freedom: float
    scale: Tensor

    def __post_init__(self) -> None:
        tensors(concentration=self.concentration, mean=self.mean, scale=self.scale)
        if self.concentration.ndim != 1 or not bool((self.concentration >= 1).all()):
            raise ValueError(
                f"`concentration` should be (K,) numbers, at least 1 each. Found {self.concentration.tolist()}."
            )
        if self.mean.ndim != 1 or len(self.mean) == 0 or not bool(self.mean.isfinite().all()):
            raise ValueError(f"`mean` should be (D,) finite numbers. Found {self.mean.tolist()}.")
        d = len(self.mean)
        if self.scale.shape not in ((d, d), (d,), ()):
            raise ValueError(f"`scale` should have shape {(d, d)}, {(d,)} or (). Found {tuple(self.scale.shape)}.")
        least = d - 1 if self.scale.ndim == 2 else 0
        for name, value, bound in (
            ("shrinkage", self.shrinkage, 0),
            ("degrees_of_freedom", self.degrees_of_freedom, least),
        ):
            number(name, value, above=bound)
        if not _is_positive_definite(self.scale):
            raise ValueError(f"`scale` should be positive, and symmetric if a matrix. Found {self.scale.tolist()}.")

    @classmethod
    @no_graph()
    def default(
        cls, x: Tensor, n_components: int, covariance_type: CovarianceType, *, sample_weight: Tensor | None = None
    ) -> Prior:
        r"""Return the weak prior that Fraley & Raftery propose, computed from the data.

        The weights are free, :math:`\alpha = 1`. The prior mean is the data's mean, with :math:`\kappa = 0.01` samples.
        The covariances have :math:`\nu = D + 2` and the data's covariance over :math:`K^{2/D}` as scale, so that K
        ellipsoids fill the volume of one. For diag, the scale has the variance of each feature, so that the features'
        units do not matter; for spherical it has the mean of the variances, as published.

        If features are linearly dependent, or outnumber the samples, the covariance is replaced by its diagonal.
        Missing values (NaN) are left out; correlations then count them as 0.

        Args:
            x: (N, D), finite or NaN.
            n_components: Number of components, K.
            covariance_type: The type, which sets the shape of the scale.
            sample_weight: (N,), not negative. None: all 1.

        Returns:
            A prior in float64.

        Raises:
            TypeError: If `sample_weight` is not a tensor.
            ValueError: If a feature has no value or is constant, the weights are negative, all 0 or of another shape,
                or the type is unknown.

        References:
            Fraley & Raftery, 2007, section 3 (choice of the hyperparameters).
        """
        n_components = integer("n_components", n_components)
        structure = structure_of(covariance_type)
        tensors(x=x)
        check_matrix(x)
        check_weights(sample_weight, len(x))
        mean, covariance = _mean_and_covariance(x.double(), sample_weight)
        d = x.shape[1]
        variances = covariance.diagonal()
        # The mean of equal values may differ from them by rounding.
        constant = variances <= (torch.finfo(torch.float64).eps * mean).square()
        if bool(constant.any()) or not bool(variances.isfinite().all()):
            feature = int((constant | ~variances.isfinite()).nonzero()[0])
            raise ValueError(f"`x` should have finite values that differ in every feature. Found none in {feature}.")
        if structure.is_matrix and not _is_positive_definite(covariance):
            covariance = variances.diag()
        return cls(
            concentration=torch.ones(n_components, dtype=torch.float64, device=x.device),
            mean=mean,
            shrinkage=_SHRINKAGE,
            degrees_of_freedom=d + 2.0,
            scale=structure.restrict(covariance) / n_components ** (2 / d),
        )

    def maximise(
        self,
        counts: Tensor,
        means: Tensor,
        scatter: Tensor,
        covariance_type: CovarianceType,
        *,
        feature_counts: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        r"""Return the weights, means and covariances that maximise expected log-likelihood plus log-prior.

        For full, with :math:`s_k = \kappa n_k / (\kappa + n_k)`:

        .. math::
            \mu_k = m + \tfrac{n_k}{\kappa + n_k} (\bar x_k - m), \quad
            \Sigma_k = \frac{\lambda + W_k + s_k (\bar x_k - m)(\bar x_k - m)^\top}{\nu + n_k + D + 2}

        A component without samples is at the mode of the prior. Leading dimensions are batches.

        Args:
            counts: (..., K): sums of the responsibilities.
            means: (..., K, D): the samples' means, weighted by responsibilities. Any finite value if the count is 0.
            scatter: Sums, weighted by responsibilities, of second moments about `means`: (..., K, D, D) for full, their
                sum over components (..., D, D) for tied, (..., K, D) for diag, (..., K) summed over features for
                spherical.
            covariance_type: The type.
            feature_counts: (..., K, D): sums of the responsibilities over the samples in which each feature was
                observed, for diag and spherical. None: no value is missing.

        Returns:
            Weights (..., K), means (..., K, D) and covariances, shaped as `scatter`.

        Raises:
            ValueError: If `scale` does not fit this type, or the numbers of components or features differ.

        References:
            Fraley & Raftery, 2007, section 3 (posterior modes of one component).
        """
        self._check(means.shape[-2], means.shape[-1], covariance_type)
        structure = structure_of(covariance_type)
        seen = (counts[..., None] if feature_counts is None else feature_counts).expand(means.shape)
        deviations = means - self.mean
        pull = self.shrinkage * seen / (self.shrinkage + seen)  # (..., K, D)
        covariances = structure.estimate(
            self.scale + scatter + structure.products(pull * deviations, deviations),
            seen,
            added=self.degrees_of_freedom + structure.prior_count(*means.shape[-2:]),
        )
        weights = soft_counts(counts + self.concentration - 1)
        return (
            weights / weights.sum(-1, keepdim=True),
            self.mean + seen / (self.shrinkage + seen) * deviations,
            covariances,
        )

    def log_density(self, parameters: GaussianParameters) -> Tensor:
        """Return the logarithm of the prior's density at these weights, means and covariances; normalised.

        Args:
            parameters: The mixture.

        Returns:
            Scalar, nats, summed over the components. Differentiable.

        Raises:
            ValueError: If `scale` does not fit the mixture's type, or the numbers of components or features differ.

        References:
            Gelman, Carlin, Stern & Rubin, "Bayesian data analysis", 2004, appendix A (the densities).
        """
        parameters = parameters.to(torch.promote_types(self.mean.dtype, parameters.means.dtype))
        kind = parameters.covariance_type
        k, d = parameters.n_components, parameters.n_features
        self._check(k, d, kind)
        log_determinants = parameters.log_determinants.expand(k)
        whitened = parameters.whiten((parameters.means - self.mean)[..., None])[..., 0]
        means = (
            0.5 * d * math.log(self.shrinkage / (2 * math.pi))
            + log_determinants
            - 0.5 * self.shrinkage * whitened.square().sum(-1)
        ).sum()
        return self._log_density_of_weights(parameters.log_weights) + means + self._log_density_of_spreads(parameters)

    def _log_density_of_weights(self, log_weights: Tensor) -> Tensor:
        alpha = self.concentration
        normaliser = alpha.sum().lgamma() - alpha.lgamma().sum()
        # A weight of 0 has density 1 where its concentration is 1.
        return normaliser + torch.where(alpha == 1, 0.0, (alpha - 1) * log_weights).sum()

    def _log_density_of_spreads(self, parameters: GaussianParameters) -> Tensor:
        factor, scale = parameters.precisions_cholesky, self.scale.to(parameters.means.dtype)
        nu, d = self.degrees_of_freedom, parameters.n_features
        half = scale.new_tensor(0.5 * nu)
        if scale.ndim == 2:
            volume = torch.linalg.slogdet(scale / 2).logabsdet
            normaliser = half * volume - torch.special.multigammaln(half, d)
            exponents, traces = (nu + d + 1) * parameters.log_determinants, (scale @ factor * factor).sum((-1, -2))
        else:
            normaliser = half * (scale / 2).log() - half.lgamma()
            exponents, traces = (nu + 2) * factor.log(), scale * factor.square()
        total: Tensor = (normaliser + exponents - 0.5 * traces).sum()
        return total

    def _check(self, n_components: int, n_features: int, covariance_type: CovarianceType) -> None:
        found = (len(self.concentration), len(self.mean))
        if found != (n_components, n_features):
            raise ValueError(
                "`concentration` and `mean` of the prior should have lengths "
                f"{(n_components, n_features)}. Found {found}."
            )
        shape = structure_of(covariance_type).shape_of_one(n_features)
        if self.scale.shape != shape:
            raise ValueError(
                f"`scale` of the prior should have {len(shape)} dimensions for {covariance_type} covariances. "
                f"Found shape {tuple(self.scale.shape)}."
            )


def _is_positive_definite(scale: Tensor) -> bool:
    if scale.ndim < 2:
        return bool(((scale > 0) & scale.isfinite()).all())
    if not torch.equal(scale, scale.mT):
        return False
    factor, failed = torch.linalg.cholesky_ex(scale)
    least = len(scale) * torch.finfo(scale.dtype).eps * scale.diagonal()
    return not bool(failed) and bool((factor.diagonal().square() > least).all())


def _mean_and_covariance(x: Tensor, sample_weight: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the mean (D,) and the positive semi-definite covariance (D, D) of the observed values."""
    weights = x.new_ones(len(x), 1) if sample_weight is None else sample_weight.to(x)[:, None]
    seen = ~x.isnan() * weights
    # Twice, so that the rounding of a mean far from 0 does not count.
    mean = torch.where(x.isnan(), 0.0, x * weights).sum(0) / seen.sum(0)
    centred = torch.where(x.isnan(), 0.0, x - mean)
    mean = mean + (weights * centred).sum(0) / seen.sum(0)
    centred = torch.where(x.isnan(), 0.0, x - mean)
    covariance = (weights * centred).mT @ centred / weights.sum()
    # Missing values counted as the mean; now each variance is that of the observed values.
    inflation = (weights.sum() / seen.sum(0)).sqrt()
    scaled = inflation[:, None] * covariance * inflation
    return mean, 0.5 * (scaled + scaled.mT)
