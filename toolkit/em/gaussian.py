r"""Mixtures of Gaussians: parameters, densities, the closed-form M-step, and coordinates for gradient EM.

The shape of the covariances depends on their type, as in scikit-learn. `precisions_cholesky` is the upper triangular
:math:`P` with :math:`\Sigma^{-1} = P P^\top`, so that :math:`P^\top (x - \mu)` is standard normal:

=============  ===================  ============================================
type           shape                covariance
=============  ===================  ============================================
``full``       (K, D, D)            one matrix for each component
``tied``       (D, D)               one matrix for all components
``diag``       (K, D)               axis-aligned: one variance for each feature
``spherical``  (K,)                 one variance for all features
=============  ===================  ============================================

For diag and spherical, :math:`P` holds the reciprocals of the standard deviations.

N samples, D features, K components.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from toolkit._checks import instance, number
from toolkit._tensors import floating, tensors
from toolkit.em.components import Located
from toolkit.em.covariance import COVARIANCE_TYPES, CovarianceType, Structure, soft_counts, structure_of

__all__ = [
    "COVARIANCE_TYPES",
    "CovarianceType",
    "GaussianParameters",
    "from_unconstrained",
    "m_step",
    "precisions_cholesky",
    "to_unconstrained",
]

# The names of the coordinates of `to_unconstrained`.
_COORDINATES = ("log_weights", "means", "log_cholesky")


@dataclass(frozen=True, kw_only=True, eq=False)
class GaussianParameters(Located):
    """Parameters of a Gaussian mixture.

    Attributes:
        log_weights: (K,), nats; the weights sum to 1.
        means: (K, D).
        precisions_cholesky: Upper triangular factor of the precisions; the shape depends on the type (see the module).
        covariance_type: ``"full"``, ``"tied"``, ``"diag"`` or ``"spherical"``.

    Raises:
        ValueError: If the type is unknown, or the shapes do not fit together.

    Example:
        >>> two = GaussianParameters.from_covariances(
        ...     weights=torch.tensor([0.25, 0.75]), means=torch.tensor([[0.0], [3.0]]),
        ...     covariances=torch.tensor([1.0, 4.0]), covariance_type="spherical")
        >>> two.log_joint(torch.tensor([[1.0]]))
        tensor([[-2.8052, -2.3998]])
    """

    precisions_cholesky: Tensor
    covariance_type: CovarianceType

    def __post_init__(self) -> None:
        structure = structure_of(self.covariance_type)
        super().__post_init__()
        k, d = self.means.shape
        for name, value, shape in (
            ("log_weights", self.log_weights, (k,)),
            ("precisions_cholesky", self.precisions_cholesky, structure.shape(k, d)),
        ):
            if value.shape != shape:
                raise ValueError(f"`{name}` should have shape {shape}. Found {tuple(value.shape)}.")

    @classmethod
    def from_covariances(
        cls, *, weights: Tensor, means: Tensor, covariances: Tensor, covariance_type: CovarianceType
    ) -> GaussianParameters:
        """Return the parameters with these weights (K,), means (K, D) and covariances (shaped by the type).

        Raises:
            ValueError: If a covariance is not positive definite, or the shapes do not fit together.
        """
        tensors(weights=weights, means=means, covariances=covariances)
        return cls(
            log_weights=weights.log(),
            means=means,
            precisions_cholesky=precisions_cholesky(covariances, covariance_type),
            covariance_type=covariance_type,
        )

    @property
    def n_parameters(self) -> int:
        """Number of free parameters, for BIC and AIC."""
        k, d = self.means.shape
        return k - 1 + k * d + self._structure.n_parameters(k, d)

    @property
    def precisions(self) -> Tensor:
        """Inverse covariances, shaped by the type."""
        return self._structure.precisions(self.precisions_cholesky)

    @property
    def covariances(self) -> Tensor:
        """Covariances, shaped by the type."""
        return self._structure.covariances(self.precisions_cholesky)

    def log_joint(self, x: Tensor) -> Tensor:
        r"""Return :math:`a_{nk} = \log \pi_k - \frac D2 \log 2\pi + \log|P_k| - \frac12 |P_k^\top (x_n - \mu_k)|^2`.

        Means are subtracted before any product, so an offset of the data costs no accuracy. The differences take
        (K, D, N) of memory; `em_step` needs no such array.

        Args:
            x: (N, D).

        Returns:
            (N, K), nats.

        Raises:
            ValueError: If `x` does not have the features of the means.
        """
        check_features(self, x)
        distances = self.whiten(x.mT.contiguous() - self.means[:, :, None]).square().sum(1)
        constant = self.log_weights + self.log_determinants - 0.5 * self.n_features * math.log(2 * math.pi)
        return (constant[:, None] - 0.5 * distances).mT

    @property
    def log_determinants(self) -> Tensor:
        """Log-determinants of the precisions' factors, (K,), or a scalar if tied."""
        return self._structure.log_determinants(self.precisions_cholesky, self.n_features)

    def whiten(self, differences: Tensor) -> Tensor:
        """Return the factors' transposes times differences (K, D, N), which whitens differences from the means."""
        return self._structure.whiten(self.precisions_cholesky, differences)

    def m_step(self, x: Tensor, responsibilities: Tensor) -> GaussianParameters:
        """Return the maximum-likelihood M-step with this covariance type (see the function `m_step`)."""
        return m_step(x, responsibilities, covariance_type=self.covariance_type)

    def unconstrained(self) -> dict[str, Tensor]:
        """Return free coordinates (see `to_unconstrained`)."""
        return to_unconstrained(self)

    def with_unconstrained(self, values: Mapping[str, Tensor]) -> GaussianParameters:
        """Return the mixture of this type at these coordinates (see `from_unconstrained`)."""
        return from_unconstrained(values, self.covariance_type)

    def as_type(self, covariance_type: CovarianceType) -> GaussianParameters:
        """Return the mixture in another covariance type; a narrower type takes the diagonals, or their means."""
        if covariance_type == self.covariance_type:
            return self
        factor = self._structure.to_matrices(self.precisions_cholesky, *self.means.shape)
        narrow = structure_of(covariance_type).from_matrices(factor)
        return dataclasses.replace(self, precisions_cholesky=narrow, covariance_type=covariance_type)

    @property
    def _structure(self) -> Structure:
        return structure_of(self.covariance_type)


def m_step(
    x: Tensor, responsibilities: Tensor, *, covariance_type: CovarianceType, reg_covar: float = 0.0
) -> GaussianParameters:
    r"""Return the parameters that maximise :math:`\sum_{nk} r_{nk} \log \pi_k \mathcal N(x_n | \mu_k, \Sigma_k)`.

    With :math:`N_k = \sum_n r_{nk}`: :math:`\pi_k = N_k / N`, :math:`\mu_k = \sum_n r_{nk} x_n / N_k`,
    :math:`\Sigma_k = \sum_n r_{nk} (x_n - \mu_k)(x_n - \mu_k)^\top / N_k`. Moments are taken about the mean, never as
    a difference of raw moments. Differentiable; `em_step` is faster, an E-step and this M-step in one.

    Args:
        x: (N, D).
        responsibilities: (N, K).
        covariance_type: ``"full"``, ``"tied"``, ``"diag"`` or ``"spherical"``.
        reg_covar: Added to every variance. 0 is maximum likelihood.

    Raises:
        ValueError: If the shapes do not fit together, or a covariance is singular.

    References:
        Bishop, "Pattern recognition and machine learning", 2006, equations 9.24 to 9.26.

    Example:
        >>> x, r = torch.tensor([[0.0], [2.0], [5.0], [9.0]]), torch.tensor([[1.0, 0.0]] * 2 + [[0.0, 1.0]] * 2)
        >>> two = m_step(x, r, covariance_type="diag")
        >>> two.means, two.covariances
        (tensor([[1.],
                [7.]]), tensor([[1.],
                [4.]]))
    """
    structure = structure_of(covariance_type)
    reg_covar = number("reg_covar", reg_covar, least=0)
    floating(x=x, responsibilities=responsibilities)
    if x.ndim != 2 or responsibilities.ndim != 2 or len(x) != len(responsibilities):
        raise ValueError(
            "`x` and `responsibilities` should have shapes (N, D) and (N, K). "
            f"Found {tuple(x.shape)} and {tuple(responsibilities.shape)}."
        )
    counts, means, scatter = moments_of(x, responsibilities, structure)
    covariances = structure.estimate(scatter, counts[:, None].expand(means.shape))
    return GaussianParameters(
        log_weights=counts.log() - counts.sum().log(),
        means=means,
        precisions_cholesky=structure.factor(structure.regularise(covariances, reg_covar)),
        covariance_type=covariance_type,
    )


def moments_of(x: Tensor, responsibilities: Tensor, structure: Structure) -> tuple[Tensor, Tensor, Tensor]:
    """Return counts (K,), above 0, weighted means (K, D), and the scatter about them, shaped by the structure."""
    counts = soft_counts(responsibilities.sum(0))
    centre = x.mean(0)
    means = centre + responsibilities.mT @ (x - centre) / counts[:, None]
    differences = x.mT.contiguous() - means[:, :, None]
    return counts, means, structure.moments(responsibilities.mT.contiguous()[:, None] * differences, differences)


def precisions_cholesky(covariances: Tensor, covariance_type: CovarianceType) -> Tensor:
    """Return the upper triangular factors of the inverse covariances.

    A covariance counts as singular if rounding errors dominate its inverse, that is, if the conditional variance of a
    feature given the features before it is less than D machine epsilons of its variance.

    Args:
        covariances: Shaped by the type.
        covariance_type: The type.

    Raises:
        ValueError: If a covariance is singular or not positive definite; the message names the components.

    Example:
        >>> precisions_cholesky(torch.tensor([[4.0, 0.25]]), "diag")
        tensor([[0.5000, 2.0000]])
    """
    return structure_of(covariance_type).factor(covariances)


def to_unconstrained(parameters: GaussianParameters) -> dict[str, Tensor]:
    """Return unconstrained coordinates of a mixture, for gradients, optimisers and acceleration.

    Args:
        parameters: The mixture.

    Returns:
        ``log_weights`` (K,), free up to a common constant; ``means`` (K, D); ``log_cholesky``: the logarithms of the
        diagonal of the precisions' factor, then, for full and tied, the entries above the diagonal, row by row. Its
        shape is (K, D(D+1)/2), (D(D+1)/2,), (K, D) or (K,).

    Example:
        >>> two = from_unconstrained(
        ...     {"log_weights": torch.zeros(2), "means": torch.eye(2), "log_cholesky": torch.zeros(3)}, "tied")
        >>> {name: tuple(value.shape) for name, value in to_unconstrained(two).items()}
        {'log_weights': (2,), 'means': (2, 2), 'log_cholesky': (3,)}
    """
    instance("parameters", parameters, GaussianParameters)
    log_cholesky = structure_of(parameters.covariance_type).pack(parameters.precisions_cholesky)
    return {"log_weights": parameters.log_weights, "means": parameters.means, "log_cholesky": log_cholesky}


def from_unconstrained(unconstrained: Mapping[str, Tensor], covariance_type: CovarianceType) -> GaussianParameters:
    """Return the mixture at these coordinates: the inverse of `to_unconstrained`, with normalised weights.

    Args:
        unconstrained: ``log_weights``, ``means`` and ``log_cholesky``, as `to_unconstrained` returns them.
        covariance_type: The type.

    Raises:
        TypeError: If a coordinate is not a tensor.
        ValueError: If the type is unknown, a coordinate is missing, or the shapes do not fit together.

    Example:
        >>> two = {"log_weights": torch.zeros(2), "means": torch.eye(2), "log_cholesky": torch.zeros(2)}
        >>> from_unconstrained(two, "spherical").weights
        tensor([0.5000, 0.5000])
    """
    structure = structure_of(covariance_type)
    log_weights, means, log_cholesky = _coordinates(unconstrained)
    return GaussianParameters(
        log_weights=log_weights.log_softmax(0),
        means=means,
        precisions_cholesky=structure.unpack(log_cholesky, means.shape[-1]),
        covariance_type=covariance_type,
    )


def _coordinates(unconstrained: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    instance("unconstrained", unconstrained, Mapping)
    missing = [name for name in _COORDINATES if name not in unconstrained]
    if missing:
        raise ValueError(f"`unconstrained` should have {', '.join(_COORDINATES)}. Found {', '.join(unconstrained)}.")
    for name in _COORDINATES:
        if not isinstance(unconstrained[name], Tensor):
            found = type(unconstrained[name]).__name__
            raise TypeError(f"`unconstrained['{name}']` should be a tensor. Found {found}.")
    return tuple(unconstrained[name] for name in _COORDINATES)


def check_features(parameters: GaussianParameters, x: Tensor) -> None:
    """Raise an error unless the samples have as many features as the mixture; a single feature would broadcast."""
    instance("parameters", parameters, GaussianParameters)
    if not isinstance(x, Tensor):
        raise TypeError(f"`x` should be a tensor. Found {type(x).__name__}.")
    if x.ndim != 2 or x.shape[1] != parameters.n_features:
        raise ValueError(f"`x` should have shape (N, {parameters.n_features}). Found {tuple(x.shape)}.")
