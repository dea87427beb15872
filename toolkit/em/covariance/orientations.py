r"""Orientations of covariances: their coordinates, and the common orientation of several covariances.

An orientation is an orthogonal matrix. A rotation is the Cayley transform :math:`(I - S)(I + S)^{-1}` of a
skew-symmetric :math:`S`, whose entries above the diagonal are free. All functions take tensors or NumPy arrays.

D features, K components, R candidates.
"""

from __future__ import annotations

import functools
import math
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from toolkit._data import library
from toolkit.blocks import no_graph
from toolkit.em.covariance.structure import identity_like

__all__ = [
    "INNER_STEPS_UNSEEN",
    "cayley",
    "common_axes",
    "entries_above_diagonal",
    "is_batched",
    "strictly_upper",
    "to_skew",
    "upper_factor",
]

# Under vmap no value can be read, so the number of inner iterations is fixed.
INNER_STEPS_UNSEEN = 100

# The steps of a line search; the last is 0.
_FRACTIONS = (1.0, 0.5, 0.25, 0.0625, 0.00390625, 0.0)
_LONGEST_ROTATION = 0.5


# --- coordinates ---


def cayley(skew: Tensor) -> Tensor:
    """Return the rotations (I - S)(I + S)^-1 of skew-symmetric matrices (..., D, D)."""
    identity = identity_like(skew)
    rotation: Tensor = library(skew).linalg.solve(identity + skew, identity - skew)
    return rotation


def to_skew(axes: Tensor) -> Tensor:
    """Return the skew-symmetric matrices whose Cayley transforms are the orthogonal `axes`, up to signs of columns.

    References:
        O'Dorney, "Minimizing the Cayley transform of an orthogonal matrix by multiplying by signature matrices", 2014:
        suitable signs always exist.
    """
    signed = axes * _signs(axes)[..., None, :]
    identity = identity_like(axes)
    skew: Tensor = library(axes).linalg.solve(identity + signed, identity - signed)
    return 0.5 * (skew - skew.mT)


@no_graph()
def _signs(axes: Tensor) -> Tensor:
    """Return signs (..., D) of the columns for which I + Q is far from singular: no pivot of it is below 1."""
    of, size = library(axes), axes.shape[-1]
    elimination = of.broadcast_to(identity_like(axes), axes.shape)
    one = of.ones_like(axes[..., 0, 0])
    signs = []
    for j in range(size):
        column = (elimination @ axes[..., j, None])[..., 0]
        signs.append(of.where(column[..., j] < 0, -one, one))
        if j + 1 < size:
            pivoted = elimination[..., j] + signs[-1][..., None] * column
            below = pivoted / pivoted[..., j, None]
            below = of.concatenate([of.zeros_like(below[..., : j + 1]), below[..., j + 1 :]], -1)
            elimination = elimination - below[..., :, None] * elimination[..., j, None, :]
    return cast(Tensor, of.stack(signs, -1))


def upper_factor(factors: Tensor) -> Tensor:
    """Return the upper triangular U with U U^T = F F^T for factors (..., D, D): QR with both orders reversed."""
    of = library(factors)
    triangular = of.linalg.qr(of.flip(factors, (-2,)).mT).R
    upper = of.flip(triangular.mT, (-1, -2))
    positive: Tensor = upper * of.sign(upper.diagonal(0, -2, -1))[..., None, :]
    return positive


def strictly_upper(entries: Tensor, size: int) -> Tensor:
    """Return the matrices (..., D, D) with these entries (..., D(D-1)/2) above the diagonal, row by row, else 0."""
    if entries.shape[-1] != size * (size - 1) // 2:
        raise ValueError(
            f"`axes` should have {size * (size - 1) // 2} entries in its last dimension for {size} features. "
            f"Found shape {tuple(entries.shape)}."
        )
    of = library(entries)
    padded = of.concatenate([entries, of.zeros_like(entries[..., :0].sum(-1)[..., None])], -1)
    placed: Tensor = padded[..., _places_above_diagonal(size, None if of is np else entries.device)]
    return placed


def entries_above_diagonal(matrices: Tensor) -> Tensor:
    """Return the entries (..., D(D-1)/2) above the diagonal of matrices (..., D, D), row by row."""
    rows, columns = _above_diagonal(matrices.shape[-1])
    if library(matrices) is not np:
        rows, columns = torch.from_numpy(rows).to(matrices.device), torch.from_numpy(columns).to(matrices.device)
    return matrices[..., rows, columns]


@functools.lru_cache(maxsize=64)
def _above_diagonal(size: int) -> tuple[Any, Any]:
    return np.triu_indices(size, 1)


@functools.lru_cache(maxsize=64)
def _places_above_diagonal(size: int, device: torch.device | None) -> Any:
    """Return the place of each entry of a strictly upper triangular matrix among its entries and, last, a zero.

    On a device, or None for an array.
    """
    rows, columns = _above_diagonal(size)
    places = np.full((size, size), len(rows))
    places[rows, columns] = np.arange(len(rows))
    return places if device is None else torch.from_numpy(places).to(device)


def is_batched(tensor: Tensor) -> bool:
    """Say whether a tensor is under vmap, where no value can be read."""
    return isinstance(tensor, Tensor) and bool(torch._C._functorch.is_batchedtensor(tensor))


# --- the orientation that components share ---


def common_axes(model: str, counts: Tensor, scatter: Tensor, start: Tensor | None, inner_steps: int) -> Tensor:
    """Return the common orientation (..., 1, D, D) of EVE or VVE, the best that is found from the starts.

    These are `start`, or if None the eigenvectors of each scatter and of the scatters' sum. Leading dimensions are
    batches. Components of count 0 are absent.
    """
    of = library(scatter)
    if start is None:
        start = of.linalg.eigh(of.concatenate([scatter.sum(-3)[..., None, :, :], scatter], -3)).eigenvectors
    axes, absent = start, counts == 0
    # Without a spread of 0, whose logarithm is infinite.
    scatter = of.where(absent[..., None, None], identity_like(scatter), scatter)
    unseen = is_batched(scatter)
    settled = 100 * float(of.finfo(scatter.dtype).eps)
    for _ in range(INNER_STEPS_UNSEEN if unseen else inner_steps):
        axes, moved = _rotate(model, counts, scatter, axes)
        if not unseen and not bool((moved > settled).any()):
            break
    # One Newton-Schulz step: the product of many rotations stays a rotation.
    axes = 0.5 * axes @ (3 * identity_like(axes) - axes.mT @ axes)
    best = _misfit(model, counts, _spread_along(scatter, axes))[0].argmin(-1)
    return _taken(axes, best)


def _put(values: Tensor, mask: Tensor, some: Tensor) -> Tensor:
    """Return values with some, those where a mask is true, replaced."""
    if library(values) is np:
        values[mask] = some
        return values
    return values.index_put((mask,), some)


def _taken(values: Tensor, which: Tensor) -> Tensor:
    """Return one of R candidates (..., R, D, D), (..., 1, D, D), for indices (...,)."""
    if library(values) is np:
        return cast(Tensor, np.take_along_axis(cast(Any, values), cast(Any, which)[..., None, None, None], -3))
    return values.take_along_dim(which[..., None, None, None], -3)


def _spread_along(scatter: Tensor, axes: Tensor) -> Tensor:
    """Return the scatter (..., K, D, D) along each of several systems of axes (..., R, D, D) as (..., R, K, D)."""
    return (axes[..., None, :, :] * (scatter[..., None, :, :, :] @ axes[..., None, :, :])).sum(-2)


def _misfit(model: str, counts: Tensor, spread: Tensor) -> tuple[Tensor, Tensor]:
    r"""Return the objective of a common orientation (..., R), from the scatter along it, and weights (..., R, K).

    The objective is twice the negative expected log-joint at the best volumes and shapes, up to a constant: for VVE
    :math:`\sum_k N_k \sum_j \log m_{kj}`, for EVE :math:`N D \log \sum_k \prod_j m_{kj}^{1/D}`. The derivative is that
    of the weighted sum of :math:`\sum_j \log m_{kj}`.
    """
    of = library(spread)
    logs, counts = of.log(spread).sum(-1), counts[..., None, :]
    if model == "VVE":
        return (counts * logs).sum(-1), of.broadcast_to(counts, logs.shape)
    n_features, total = spread.shape[-1], counts.sum(-1)
    roots = of.where(counts == 0, -math.inf, logs / n_features)
    highest = of.amax(roots, -1)
    densities = of.exp(roots - highest[..., None])
    sums = densities.sum(-1)
    return n_features * total * (highest + of.log(sums)), (total / sums)[..., None] * densities


def _rotate(model: str, counts: Tensor, scatter: Tensor, axes: Tensor) -> tuple[Tensor, Tensor]:
    """Return axes (..., R, D, D) after one quasi-Newton step each, and the size of each move, (..., R).

    The Hessian is approximated by its value for axes that diagonalise every scatter, where it is diagonal in the planes
    of rotation.
    """
    of = library(scatter)
    rotated = axes.mT[..., None, :, :] @ scatter[..., None, :, :, :] @ axes[..., None, :, :]
    spread = rotated.diagonal(0, -2, -1)
    value, weights = _misfit(model, counts, spread)
    ratios = weights[..., None] / spread
    slopes = (rotated * ratios[..., None, :]).sum(-3)
    slopes = slopes - slopes.mT
    curvatures = spread.mT @ ratios
    curvatures = curvatures + curvatures.mT - 2 * weights.sum(-1)[..., None, None]
    eps, total = float(of.finfo(scatter.dtype).eps), counts.sum(-1)[..., None]
    turn = -slopes / of.maximum(curvatures, math.sqrt(eps) * total[..., None, None])
    longest = of.amax(abs(turn), (-2, -1), keepdims=True)
    turn = turn * (_LONGEST_ROTATION / longest.clip(_LONGEST_ROTATION, None))
    # Near the minimum differences of values are rounding, while slopes still tell the direction.
    bound = value + 10 * eps * scatter.shape[-1] * total
    size = longest[..., 0, 0]
    if not is_batched(scatter):
        # Most steps are taken whole.
        whole = axes @ cayley(-0.5 * turn)
        short = ~(_misfit(model, counts, _spread_along(scatter, whole))[0] <= bound).all(-1)
        if not bool(short.any()):
            return whole, size
        if not bool(short.all()):
            found, part = _line_search(model, counts[short], scatter[short], axes[short], turn[short], bound[short])
            return _put(whole, short, found), _put(size, short, part * size[short])
    found, part = _line_search(model, counts, scatter, axes, turn, bound)
    return found, part * size


def _line_search(
    model: str, counts: Tensor, scatter: Tensor, axes: Tensor, turn: Tensor, bound: Tensor
) -> tuple[Tensor, Tensor]:
    """Return axes (..., R, D, D) after the longest part of each turn that does not exceed its bound, and the part."""
    of = library(turn)
    fractions = of.asarray(_FRACTIONS, dtype=turn.dtype, device=turn.device)
    candidates = axes[..., None, :, :] @ cayley(-0.5 * fractions[:, None, None] * turn[..., None, :, :])
    several = candidates.shape
    values = _misfit(model, counts, _spread_along(scatter, candidates.reshape(*several[:-4], -1, *several[-2:])))[0]
    acceptable = (values.reshape(several[:-2]) <= bound[..., None]) | (fractions == 0)
    chosen = of.where(acceptable, 1, 0).argmax(-1)
    return _taken(candidates, chosen)[..., 0, :, :], fractions[chosen]
