"""Covariances aligned with the axes: a variance for each feature of a component (diag), or one for all (spherical).

N samples, D features, K components.
"""

from __future__ import annotations

import math
from typing import cast

import numpy as np
import torch
from torch import Tensor

from toolkit._data import library
from toolkit.em.covariance.structure import Quadratics, Structure, raise_if_singular

__all__ = ["DIAG", "SPHERICAL"]


class _Axes(Structure):
    """Variances; a factor holds the reciprocals of their square roots."""

    is_matrix = False

    def precisions(self, factor: Tensor) -> Tensor:
        return factor.square()

    def covariances(self, factor: Tensor) -> Tensor:
        return factor.square().reciprocal()

    def factor(self, covariances: Tensor) -> Tensor:
        if library(covariances) is np:
            return cast(Tensor, self.factor(torch.from_numpy(covariances)).numpy())
        sound = covariances > 0
        raise_if_singular(sound if sound.ndim == 1 else sound.all(-1))
        return covariances.rsqrt()

    def factor_or_nan(self, covariances: Tensor, lost: Tensor) -> Tensor:
        return torch.where(covariances > lost, covariances, math.nan).rsqrt()

    def factor_of_precisions(self, precisions: Tensor) -> tuple[Tensor, Tensor]:
        return precisions.sqrt(), precisions > 0

    def largest_terms(self, factor: Tensor, widths: Tensor) -> Tensor:
        return self.squared_distances(factor, widths.square())

    def exceeds(self, factor: Tensor, largest: float) -> bool:
        return bool((factor * factor).max() > largest)

    def pack(self, factor: Tensor) -> Tensor:
        packed: Tensor = library(factor).log(factor)
        return packed

    def unpack(self, coordinates: Tensor, n_features: int) -> Tensor:
        factor: Tensor = library(coordinates).exp(coordinates)
        return factor


class _Diag(_Axes):
    """A variance for each feature of each component: (K, D)."""

    name = "diag"

    def shape_of_one(self, n_features: int) -> tuple[int, ...]:
        return (n_features,)

    def n_parameters_of_one(self, n_features: int) -> int:
        return n_features

    def pool(self, scatter: Tensor) -> Tensor:
        return scatter

    def restrict(self, covariance: Tensor) -> Tensor:
        return covariance.diagonal(dim1=-2, dim2=-1)

    def to_matrices(self, factor: Tensor, n_components: int, n_features: int) -> Tensor:
        return factor.diag_embed()

    def from_matrices(self, factor: Tensor) -> Tensor:
        return factor.diagonal(dim1=-2, dim2=-1)

    def log_determinants(self, factor: Tensor, n_features: int) -> Tensor:
        return self.pack(factor).sum(-1)

    def whiten(self, factor: Tensor, differences: Tensor) -> Tensor:
        return factor[:, :, None] * differences

    def colour(self, factor: Tensor, noise: Tensor, labels: Tensor) -> Tensor:
        return noise / factor[labels]

    def squared_distances(self, factor: Tensor, scatter: Tensor) -> Tensor:
        return (factor * factor * scatter).sum(-1)

    def narrowest(self, weights: Tensor, factor: Tensor) -> Tensor:
        precisions = factor.square()
        average = (weights[..., None] / precisions).sum(-2, keepdim=True)
        return (precisions * average).amax(-1).reciprocal()

    def has_variance(self, covariances: Tensor, common: Tensor, least: float) -> Tensor:
        return ((covariances > least * common) | (common == 0)).all(-1)

    def quadratics(self, n_features: int, most: int) -> list[Quadratics]:
        return [Quadratics(n_features, lambda z, out: torch.mul(z, z, out=out))]

    def coefficients(self, factor: Tensor, means: Tensor) -> tuple[Tensor, Tensor]:
        precisions = factor * factor
        return -0.5 * precisions, precisions * means

    def second_moments(self, sums: Tensor, n_features: int) -> Tensor:
        return sums

    def products(self, left: Tensor, right: Tensor) -> Tensor:
        return left * right

    def moments(self, left: Tensor, right: Tensor) -> Tensor:
        return (left * right).sum(-1)

    def totals(self, counts: Tensor) -> Tensor:
        return counts

    def prior_count(self, n_components: int, n_features: int) -> int:
        return 3


class _Spherical(_Axes):
    """One variance for all directions of a component: (K,). A scatter is summed over the features."""

    name = "spherical"

    def shape_of_one(self, n_features: int) -> tuple[int, ...]:
        return ()

    def n_parameters_of_one(self, n_features: int) -> int:
        return 1

    def pool(self, scatter: Tensor) -> Tensor:
        return scatter.sum(-1)

    def restrict(self, covariance: Tensor) -> Tensor:
        return covariance.diagonal(dim1=-2, dim2=-1).mean(-1)

    def to_matrices(self, factor: Tensor, n_components: int, n_features: int) -> Tensor:
        return factor[:, None].expand(n_components, n_features).diag_embed()

    def from_matrices(self, factor: Tensor) -> Tensor:
        return factor.diagonal(dim1=-2, dim2=-1).square().reciprocal().mean(-1).rsqrt()

    def log_determinants(self, factor: Tensor, n_features: int) -> Tensor:
        return n_features * self.pack(factor)

    def whiten(self, factor: Tensor, differences: Tensor) -> Tensor:
        return factor[:, None, None] * differences

    def colour(self, factor: Tensor, noise: Tensor, labels: Tensor) -> Tensor:
        return noise / factor[labels, None]

    def squared_distances(self, factor: Tensor, scatter: Tensor) -> Tensor:
        return factor * factor * scatter.sum()

    def narrowest(self, weights: Tensor, factor: Tensor) -> Tensor:
        precisions = factor.square()
        return (precisions * (weights / precisions).sum(-1, keepdim=True)).reciprocal()

    def has_variance(self, covariances: Tensor, common: Tensor, least: float) -> Tensor:
        return covariances > least * common

    def quadratics(self, n_features: int, most: int) -> list[Quadratics]:
        return [Quadratics(1, lambda z, out: torch.sum(z * z, 0, out=out[0]))]

    def coefficients(self, factor: Tensor, means: Tensor) -> tuple[Tensor, Tensor]:
        precisions = (factor * factor)[..., None]
        return -0.5 * precisions, precisions * means

    def second_moments(self, sums: Tensor, n_features: int) -> Tensor:
        return sums[..., 0]

    def products(self, left: Tensor, right: Tensor) -> Tensor:
        return (left * right).sum(-1)

    def moments(self, left: Tensor, right: Tensor) -> Tensor:
        return (left * right).sum((-2, -1))

    def totals(self, counts: Tensor) -> Tensor:
        return counts.sum(-1)

    def prior_count(self, n_components: int, n_features: int) -> int:
        return n_features + 2


DIAG = _Diag()
SPHERICAL = _Spherical(DIAG)
