r"""The interface of a covariance structure: shapes, density, M-step, count of parameters and free coordinates.

A *factor* is the upper triangular :math:`P` with :math:`\Sigma^{-1} = P P^\top`, so that :math:`P^\top (x - \mu)` is
standard normal. A *scatter* is :math:`W_k = \sum_n r_{nk} (x_n - \mu_k)(x_n - \mu_k)^\top`. Factors, scatters,
covariances and precisions all have the shape of the structure.

N samples, D features, K components, F quadratic features.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from toolkit._data import library

__all__ = ["CovarianceType", "Quadratics", "Structure", "soft_counts"]

CovarianceType = Literal["full", "tied", "diag", "spherical"]


@dataclass(frozen=True)
class Quadratics:
    """Some of the quadratic features of samples.

    Attributes:
        size: F, the number of features.
        write: Takes samples (D, B), and writes their quadratic features into the second argument, (F, B).
    """

    size: int
    write: Callable[[Tensor, Tensor], object]


class Structure(ABC):
    """The shape, the density and the M-step of the covariances of K components.

    Leading dimensions are batches, except where a method says (K, ...). The methods of an EM step by quadratic
    features, of its coordinates and of a start take NumPy arrays as well: see `toolkit._data.as_arrays`.

    Attributes:
        name: The name in the public interface.
        is_matrix: Whether features may be correlated: a covariance is then a matrix.
        is_shared: Whether all components have the same covariance.
        wide: The least restricted structure with the same correlations, full or diag; `pool` turns its scatters into
            scatters of this structure.
        separate: The structure in which each component has its own covariance: this structure, unless it is shared.
    """

    name: ClassVar[CovarianceType]
    is_matrix: ClassVar[bool]
    is_shared: ClassVar[bool] = False

    def __init__(self, wide: Structure | None = None) -> None:
        self.wide = wide or self
        self.separate = self.wide if self.is_shared else self

    # --- shapes ---

    @abstractmethod
    def shape_of_one(self, n_features: int) -> tuple[int, ...]:
        """Return the shape of one component's covariance."""

    @abstractmethod
    def n_parameters_of_one(self, n_features: int) -> int:
        """Return the number of free parameters of one component's covariance."""

    def shape(self, n_components: int, n_features: int) -> tuple[int, ...]:
        """Return the shape of all covariances."""
        one = self.shape_of_one(n_features)
        return one if self.is_shared else (n_components, *one)

    def n_parameters(self, n_components: int, n_features: int) -> int:
        """Return the number of free parameters of all covariances."""
        return (1 if self.is_shared else n_components) * self.n_parameters_of_one(n_features)

    def repeat(self, one: Tensor, n_components: int) -> Tensor:
        """Return the covariances of components that all have the covariance `one`."""
        return one if self.is_shared else one.expand(n_components, *one.shape)

    @abstractmethod
    def pool(self, scatter: Tensor) -> Tensor:
        """Return the scatter of this structure from a scatter of the structure `wide`."""

    @abstractmethod
    def restrict(self, covariance: Tensor) -> Tensor:
        """Return one component's covariance from a matrix (D, D)."""

    @abstractmethod
    def to_matrices(self, factor: Tensor, n_components: int, n_features: int) -> Tensor:
        """Return factors as matrices (K, D, D)."""

    @abstractmethod
    def from_matrices(self, factor: Tensor) -> Tensor:
        """Return factors from matrices (K, D, D): of their diagonals or average variances for narrower structures."""

    # --- density ---

    @abstractmethod
    def precisions(self, factor: Tensor) -> Tensor:
        """Return inverse covariances from their factors."""

    @abstractmethod
    def covariances(self, factor: Tensor) -> Tensor:
        """Return covariances from the factors of their inverses."""

    @abstractmethod
    def factor(self, covariances: Tensor) -> Tensor:
        """Return the factors of the inverse covariances (see `toolkit.em.precisions_cholesky`).

        Raises:
            ValueError: If a covariance is singular or not positive definite; the message names the components.
        """

    @abstractmethod
    def factor_or_nan(self, covariances: Tensor, lost: Tensor) -> Tensor:
        """Return the factors of the inverse covariances, NaN where a covariance is singular.

        Args:
            covariances: Differences of a second moment and a squared mean.
            lost: Rounding error of each variance by that subtraction, (..., D), or (..., K) for spherical.
        """

    @abstractmethod
    def factor_of_precisions(self, precisions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the factors of precisions, and the mask of symmetric positive definite ones."""

    @abstractmethod
    def log_determinants(self, factor: Tensor, n_features: int) -> Tensor:
        """Return log-determinants of factors, (..., K), or (...,) if shared."""

    @abstractmethod
    def whiten(self, factor: Tensor, differences: Tensor) -> Tensor:
        """Return the factor's transpose times differences (K, D, N)."""

    @abstractmethod
    def colour(self, factor: Tensor, noise: Tensor, labels: Tensor) -> Tensor:
        """Turn standard normal noise (N, D) into noise with the covariances of the components `labels` (N,)."""

    @abstractmethod
    def squared_distances(self, factor: Tensor, scatter: Tensor) -> Tensor:
        """Return mean squared distances from the origin in units of each covariance, (..., K), or (...,) if shared.

        Args:
            factor: The factors.
            scatter: Mean second moment of the samples, (D, D) if `is_matrix`, else (D,).
        """

    @abstractmethod
    def largest_terms(self, factor: Tensor, widths: Tensor) -> Tensor:
        """Return the sum of the absolute terms of a squared distance, (K,), for features of these widths (D,)."""

    @abstractmethod
    def exceeds(self, factor: Tensor, largest: float) -> bool:
        """Say whether a precision in any direction is more than `largest`."""

    def has_least(self, factor: Tensor, reg_covar: float) -> bool:
        """Say whether every variance is at least `reg_covar`, up to rounding."""
        return reg_covar == 0 or not self.exceeds(factor, (1 + 1e-6) / reg_covar)

    def check_least(self, factor: Tensor, reg_covar: float) -> None:
        """Raise a ValueError if a variance is less than `reg_covar`: steps add it, but a jump may lead below."""
        if not self.has_least(factor, reg_covar):
            raise ValueError("A jump should lead to variances of at least `reg_covar`, as steps do.")

    @abstractmethod
    def narrowest(self, weights: Tensor, factor: Tensor) -> Tensor:
        """Return the least variance of each component in any direction, in units of their average: (..., K)."""

    @abstractmethod
    def has_variance(self, covariances: Tensor, common: Tensor, least: float) -> Tensor:
        """Return the mask (K,) of `separate` covariances (K, ...) with more than this share of the common variance."""

    # --- the density as a linear function of quadratic features, features, and 1 ---

    @abstractmethod
    def quadratics(self, n_features: int, most: int) -> list[Quadratics]:
        """Return the quadratic features in groups of about `most`; no group if components share the coefficients."""

    @abstractmethod
    def coefficients(self, factor: Tensor, means: Tensor) -> tuple[Tensor, Tensor]:
        """Return the coefficients of quadratic features (..., K, F) and of features (..., K, D) in the log-joint."""

    @abstractmethod
    def second_moments(self, sums: Tensor, n_features: int) -> Tensor:
        """Return second moments from sums of quadratic features (..., K, F)."""

    # --- M-step ---

    @abstractmethod
    def products(self, left: Tensor, right: Tensor) -> Tensor:
        """Return the products of two vectors of each component (..., K, D), in the shape of a scatter."""

    @abstractmethod
    def moments(self, left: Tensor, right: Tensor) -> Tensor:
        """Return the sums of products over samples, of (..., K, D, N) each, in the shape of a scatter."""

    @abstractmethod
    def totals(self, counts: Tensor) -> Tensor:
        """Return the divisor of a scatter, given the count of each feature (..., K, D)."""

    @abstractmethod
    def prior_count(self, n_components: int, n_features: int) -> int:
        """Return the number that the mode of a conjugate prior adds to `totals`, besides its degrees of freedom."""

    def estimate(self, scatter: Tensor, counts: Tensor, *, added: float = 0.0) -> Tensor:
        """Return the covariances of maximum likelihood given the scatter: the M-step.

        Args:
            scatter: Shaped by the structure; with the prior's scatter added, if there is one.
            counts: (..., K, D): sums of responsibilities over the samples in which each feature was observed.
            added: The number that a prior adds to `totals`.
        """
        totals = self.totals(counts)
        return scatter / (totals + added if added else totals)

    def regularise(self, covariances: Tensor, reg_covar: float | Tensor) -> Tensor:
        """Return the covariances with `reg_covar` added to every variance, or with a matrix added."""
        return covariances + reg_covar

    # --- coordinates ---

    @abstractmethod
    def pack(self, factor: Tensor) -> Tensor:
        """Return unconstrained coordinates of a factor; the logs of diagonals come first."""

    @abstractmethod
    def unpack(self, coordinates: Tensor, n_features: int) -> Tensor:
        """Return the factors at these coordinates: the inverse of `pack`."""


def soft_counts(sums: Tensor) -> Tensor:
    """Return the sums of responsibilities, bounded away from 0, so that an empty component gives no NaN.

    The bound is machine epsilon times their total, or times 1 if the total is larger: sample weights may be tiny.
    """
    of = library(sums)
    least = of.finfo(sums.dtype).eps
    if of is np:  # `clip` takes three times as long
        bounded: Tensor = np.maximum(sums, least * min(sums.sum(), 1.0))
        return bounded
    return sums.clip(min=least * sums.sum().clip(max=1))


def identity_like(matrices: Tensor) -> Tensor:
    """Return the identity (D, D), in the type and on the device of matrices (..., D, D)."""
    one: Tensor = library(matrices).eye(matrices.shape[-1], dtype=matrices.dtype, device=matrices.device)
    return one


def raise_if_singular(sound: Tensor, name: str = "covariances", restricted: str = "covariance_type") -> None:
    """Raise a ValueError unless all covariances are sound, () or (K,)."""
    # Under torch.func no value can be read; a singular covariance is NaN there.
    if not (torch._C._functorch.is_functorch_wrapped_tensor(sound) or bool(sound.all())):
        raise ValueError(singular(sound, name, restricted))


def singular(sound: Tensor, name: str, restricted: str) -> str:
    """Return the text of the error, given the mask of sound covariances, () or (K,)."""
    components = "" if sound.ndim == 0 else f" of component {', '.join(map(str, (~sound).nonzero().ravel().tolist()))}"
    return (
        f"`{name}` should be positive definite. Found a singular one{components}: too few distinct samples, or "
        "features that depend on each other. More regularisation (`reg_covar`), fewer components or a more "
        f"restricted `{restricted}` help."
    )
