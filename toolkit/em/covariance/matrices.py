"""Covariances that are matrices: one for each component (full), or one for all (tied).

N samples, D features, K components, F quadratic features.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
import torch
from scipy.linalg import lapack
from torch import Tensor

from toolkit._data import as_tensor, library
from toolkit.em.covariance.structure import Quadratics, Structure, identity_like, raise_if_singular

__all__ = ["FULL", "TIED", "are_definite", "factored", "quadratic_form", "symmetric_products"]

_EPS = float(np.finfo(np.float64).eps)


class _Matrices(Structure):
    """Covariances (D, D); a factor is the upper triangular factor of an inverse."""

    is_matrix = True

    def shape_of_one(self, n_features: int) -> tuple[int, ...]:
        return n_features, n_features

    def n_parameters_of_one(self, n_features: int) -> int:
        return n_features * (n_features + 1) // 2

    def restrict(self, covariance: Tensor) -> Tensor:
        return covariance

    def precisions(self, factor: Tensor) -> Tensor:
        return factor @ factor.mT

    def covariances(self, factor: Tensor) -> Tensor:
        inverse: Tensor = torch.linalg.solve_triangular(factor, identity_like(factor), upper=True)
        return inverse.mT @ inverse

    def factor(self, covariances: Tensor) -> Tensor:
        if library(covariances) is np:
            found = _factor_of_array(covariances)
            return cast(Tensor, self.factor(torch.from_numpy(covariances)).numpy() if found is None else found)
        factor, sound = factored(covariances)
        raise_if_singular(sound)
        return factor

    def factor_or_nan(self, covariances: Tensor, lost: Tensor) -> Tensor:
        lower, failed = torch.linalg.cholesky_ex(covariances)
        inverse: Tensor = torch.linalg.solve_triangular(lower, identity_like(lower), upper=False)
        rounding = covariances.shape[-1] * torch.finfo(lower.dtype).eps
        error = lost + rounding * covariances.diagonal(dim1=-2, dim2=-1)
        # Sound where the errors are less than 1 in units of the covariance; a failed factor may be NaN or arbitrary.
        sound = ((inverse.square() * error[..., None, :]).sum((-1, -2)) < 1) & (failed == 0)
        if not bool(sound.all()):
            inverse = torch.where(sound[..., None, None], inverse, math.nan)
        return inverse.mT

    def factor_of_precisions(self, precisions: Tensor) -> tuple[Tensor, Tensor]:
        size = precisions.abs().amax((-1, -2))
        symmetric = (precisions - precisions.mT).abs().amax((-1, -2)) <= 1e-5 * size
        # The Cholesky factor in reversed order is upper triangular.
        factor, failed = torch.linalg.cholesky_ex(precisions.flip((-1, -2)))
        return factor.flip((-1, -2)), symmetric & (failed == 0)

    def log_determinants(self, factor: Tensor, n_features: int) -> Tensor:
        found: Tensor = library(factor).log(factor.diagonal(0, -2, -1)).sum(-1)
        return found

    def whiten(self, factor: Tensor, differences: Tensor) -> Tensor:
        return factor.mT @ differences

    def squared_distances(self, factor: Tensor, scatter: Tensor) -> Tensor:
        return ((scatter @ factor) * factor).sum((-1, -2))

    def largest_terms(self, factor: Tensor, widths: Tensor) -> Tensor:
        return (self.precisions(factor).abs() * widths[:, None] * widths).sum((-1, -2))

    def exceeds(self, factor: Tensor, largest: float) -> bool:
        if not bool((factor * factor).sum((-1, -2)).max() > largest):  # the trace bounds the largest eigenvalue
            return False
        # A Cholesky factor of the difference from the bound takes a tenth of the time of singular values.
        differences = largest * identity_like(factor) - factor.mT @ factor
        if library(factor) is np:
            return not are_definite(differences)
        return bool(torch.linalg.cholesky_ex(differences)[1].any())

    def regularise(self, covariances: Tensor, reg_covar: float | Tensor) -> Tensor:
        return covariances + (
            reg_covar * identity_like(covariances) if isinstance(reg_covar, int | float) else reg_covar
        )

    def pack(self, factor: Tensor) -> Tensor:
        of, (rows, columns) = library(factor), _indices(_above_diagonal, factor.shape[-1], factor)
        packed: Tensor = of.concatenate([of.log(factor.diagonal(0, -2, -1)), factor[..., rows, columns]], -1)
        return packed

    def unpack(self, coordinates: Tensor, n_features: int) -> Tensor:
        n_entries = self.n_parameters_of_one(n_features)
        if coordinates.shape[-1:] != (n_entries,):
            raise ValueError(
                f"`log_cholesky` should have {n_entries} entries in its last dimension for {n_features} features. "
                f"Found shape {tuple(coordinates.shape)}."
            )
        of = library(coordinates)
        diagonal, above = of.exp(coordinates[..., :n_features]), coordinates[..., n_features:]
        entries = of.concatenate([diagonal, above, of.zeros_like(diagonal[..., :1])], -1)
        factor: Tensor = entries[..., _indices(_places, n_features, coordinates)[0]]
        return factor


class _Full(_Matrices):
    """One matrix of its own for each component: (K, D, D)."""

    name = "full"

    def pool(self, scatter: Tensor) -> Tensor:
        return scatter

    def to_matrices(self, factor: Tensor, n_components: int, n_features: int) -> Tensor:
        return factor

    def from_matrices(self, factor: Tensor) -> Tensor:
        return factor

    def colour(self, factor: Tensor, noise: Tensor, labels: Tensor) -> Tensor:
        coloured = torch.empty_like(noise)
        for k, one in enumerate(factor):
            mine = labels == k
            coloured[mine] = torch.linalg.solve_triangular(one.mT, noise[mine].mT, upper=False).mT
        return coloured

    def narrowest(self, weights: Tensor, factor: Tensor) -> Tensor:
        inverse = torch.linalg.inv(factor)
        average = (weights[..., None, None] * (inverse.mT @ inverse)).sum(-3, keepdim=True)
        least: Tensor = torch.linalg.eigvalsh(factor.mT @ average @ factor)[..., -1].reciprocal()
        return least

    def has_variance(self, covariances: Tensor, common: Tensor, least: float) -> Tensor:
        # Relative to the common covariance: a direction without any variance must not count.
        of = library(common)
        if of is np and are_definite(covariances - least * common):  # enough, and faster
            return cast(Tensor, np.ones(len(covariances), bool))
        values, vectors = of.linalg.eigh(common)
        kept = values > len(values) * of.finfo(values.dtype).eps * values[-1]
        if not bool(kept.any()):
            return cast(Tensor, of.ones_like(covariances[:, 0, 0], dtype=of.bool))
        directions = vectors[:, kept] / of.sqrt(values[kept])
        return cast(Tensor, of.linalg.eigvalsh(directions.mT @ covariances @ directions)[..., 0] > least)

    def quadratics(self, n_features: int, most: int) -> list[Quadratics]:
        return _groups(n_features, most)

    def coefficients(self, factor: Tensor, means: Tensor) -> tuple[Tensor, Tensor]:
        precisions = factor @ factor.mT
        return quadratic_form(-0.5 * precisions), (precisions @ means[..., None])[..., 0]

    def second_moments(self, sums: Tensor, n_features: int) -> Tensor:
        return symmetric_products(sums, n_features)

    def products(self, left: Tensor, right: Tensor) -> Tensor:
        return left[..., :, None] * right[..., None, :]

    def moments(self, left: Tensor, right: Tensor) -> Tensor:
        return left @ right.mT

    def totals(self, counts: Tensor) -> Tensor:
        return counts[..., :1, None]

    def prior_count(self, n_components: int, n_features: int) -> int:
        return n_features + 2


class _Tied(_Matrices):
    """One matrix for all components: (D, D)."""

    name = "tied"
    is_shared = True

    def pool(self, scatter: Tensor) -> Tensor:
        return scatter.sum(-3)

    def to_matrices(self, factor: Tensor, n_components: int, n_features: int) -> Tensor:
        return factor.expand(n_components, n_features, n_features)

    def from_matrices(self, factor: Tensor) -> Tensor:
        return factor[0]

    def colour(self, factor: Tensor, noise: Tensor, labels: Tensor) -> Tensor:
        coloured: Tensor = torch.linalg.solve_triangular(factor.mT, noise.mT, upper=False).mT
        return coloured

    def narrowest(self, weights: Tensor, factor: Tensor) -> Tensor:
        return torch.ones_like(weights)

    def has_variance(self, covariances: Tensor, common: Tensor, least: float) -> Tensor:
        return torch.ones_like(covariances[..., 0, 0], dtype=torch.bool)

    def quadratics(self, n_features: int, most: int) -> list[Quadratics]:
        return []

    def coefficients(self, factor: Tensor, means: Tensor) -> tuple[Tensor, Tensor]:
        return means[..., :0], means @ factor @ factor.mT

    def second_moments(self, sums: Tensor, n_features: int) -> Tensor:
        raise NotImplementedError("The quadratic part is the same for all components, and known before the pass.")

    def products(self, left: Tensor, right: Tensor) -> Tensor:
        return left.mT @ right

    def moments(self, left: Tensor, right: Tensor) -> Tensor:
        return (left @ right.mT).sum(-3)

    def totals(self, counts: Tensor) -> Tensor:
        return counts[..., 0].sum(-1)[..., None, None]

    def prior_count(self, n_components: int, n_features: int) -> int:
        return n_components + n_features + 1


def factored(covariances: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factors of the inverses of matrices (..., D, D), and the mask (...,) of positive definite ones."""
    lower, positive = cholesky(covariances)
    of, variances = library(covariances), covariances.diagonal(0, -2, -1)
    least = variances.shape[-1] * float(of.finfo(covariances.dtype).eps) * variances
    sound = positive & (lower.diagonal(0, -2, -1) ** 2 > least).all(-1)
    return inverse_of_lower(lower).mT, sound


def cholesky(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Return lower factors of matrices (..., D, D), tensor or array, and the mask (...,) of positive definite ones."""
    lower, failed = torch.linalg.cholesky_ex(as_tensor(matrices))
    if library(matrices) is np:  # NumPy's own function raises at the first that is not
        return cast(Tensor, lower.numpy()), cast(Tensor, failed.numpy() == 0)
    return lower, failed == 0


def inverse_of_lower(lower: Tensor) -> Tensor:
    """Return the inverses of lower triangular matrices (..., D, D), tensor or array."""
    several = as_tensor(lower)
    inverse: Tensor = torch.linalg.solve_triangular(several, identity_like(several), upper=False)
    return cast(Tensor, inverse.numpy()) if library(lower) is np else inverse


def are_definite(matrices: Any) -> bool:
    """Say whether symmetric matrices (..., D, D), an array, are finite and positive definite."""
    several = matrices.reshape(-1, *matrices.shape[-2:])
    return bool(np.isfinite(matrices).all()) and not any(lapack.dpotrf(one)[1] for one in several)


def _factor_of_array(covariances: Any) -> Any:
    """Return the factors of arrays, or None if one of the covariances is singular."""
    size = covariances.shape[-1]
    factors = np.empty_like(covariances)
    # One by one: LAPACK's own functions take a third of the time of NumPy's and torch's for all.
    for matrix, factor in zip(covariances.reshape(-1, size, size), factors.reshape(-1, size, size), strict=True):
        upper, failed = lapack.dpotrf(matrix)
        if failed:
            return None
        factor[:] = lapack.dtrtri(upper)[0]
    inverses, variances = factors.diagonal(0, -2, -1), covariances.diagonal(0, -2, -1)
    return factors if (size * _EPS * variances * (inverses * inverses) < 1).all() else None


FULL = _Full()
TIED = _Tied(FULL)


# --- quadratic features: products in blocks ---


@functools.lru_cache(maxsize=64)
def _groups(n_features: int, most: int) -> list[Quadratics]:
    groups: list[list[tuple[slice, int]]] = [[]]
    for block in _blocks(n_features):
        if groups[-1] and _size([*groups[-1], block], n_features) > most:
            groups.append([])
        groups[-1].append(block)
    return [Quadratics(_size(group, n_features), functools.partial(_write, group)) for group in groups]


def _blocks(n_features: int) -> Iterator[tuple[slice, int]]:
    """Return rows i of each block of products (i, j), and its first j.

    A block of several rows is written at once; it wastes the products below its diagonal.
    """
    height = 1 if n_features <= 4 else 2 if n_features <= 32 else 4
    for first in range(0, n_features, height):
        yield slice(first, min(first + height, n_features)), first


def _size(blocks: list[tuple[slice, int]], n_features: int) -> int:
    return sum((rows.stop - rows.start) * (n_features - first) for rows, first in blocks)


def _write(blocks: list[tuple[slice, int]], z: Tensor, out: Tensor) -> None:
    offset = 0
    for rows, first in blocks:
        height, width = rows.stop - rows.start, len(z) - first
        block = out[offset : offset + height * width].unflatten(0, (height, width))
        torch.mul(z[rows, None], z[None, first:], out=block)
        offset += height * width


def _indices(function: Callable[[int, torch.device], tuple[Tensor, ...]], size: int, like: Tensor) -> tuple[Any, ...]:
    """Return the indices that a function of size and device returns; for an array as arrays, which are kept."""
    return _arrays(function, size) if library(like) is np else function(size, like.device)


@functools.lru_cache(maxsize=64)
def _arrays(function: Callable[[int, torch.device], tuple[Tensor, ...]], size: int) -> tuple[Any, ...]:
    return tuple(values.numpy() for values in function(size, torch.device("cpu")))


@functools.lru_cache(maxsize=64)
def _layout(n_features: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return i and j of the products of all blocks, side by side, their multiplicities, and the place of (i, j)."""
    every = torch.arange(n_features, device=device)
    blocks = [(every[rows], every[first:]) for rows, first in _blocks(n_features)]
    rows = torch.cat([i.repeat_interleave(len(j)) for i, j in blocks])
    columns = torch.cat([j.repeat(len(i)) for i, j in blocks])
    # The product of i < j counts for (j, i) as well; the products below the diagonal in a block do not count.
    counts = (columns >= rows).double() + (columns > rows).double()
    places = torch.empty(n_features, n_features, dtype=torch.int64, device=device)
    upper = (columns >= rows).nonzero()[:, 0]
    places[rows[upper], columns[upper]] = places[columns[upper], rows[upper]] = upper
    return rows, columns, counts, places


def quadratic_form(matrices: Tensor) -> Tensor:
    """Return symmetric matrices (..., D, D) as coefficients of quadratic features, blocks side by side: (..., F)."""
    rows, columns, counts, _ = _indices(_layout, matrices.shape[-1], matrices)
    coefficients: Tensor = matrices[..., rows, columns] * counts
    return coefficients


def symmetric_products(products: Tensor, n_features: int) -> Tensor:
    """Return second moments (..., D, D) from sums of quadratic features, blocks side by side: (..., F)."""
    moments: Tensor = products[..., _indices(_layout, n_features, products)[3]]
    return moments


# --- free coordinates: the diagonal, then the entries above it ---


def _above_diagonal(size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    rows, columns = torch.triu_indices(size, size, 1, device=device)
    return rows, columns


def _places(size: int, device: torch.device) -> tuple[Tensor]:
    """Return the place of each entry of an upper triangular matrix in: diagonal, entries above it, a zero."""
    rows, columns = _above_diagonal(size, device)
    places = torch.full((size, size), size + len(rows), device=device)
    places[rows, columns] = torch.arange(size, size + len(rows), device=device)
    return (places.diagonal_scatter(torch.arange(size, device=device)),)
