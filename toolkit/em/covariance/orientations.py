r"""Orientations of covariances: their coordinates, and the common orientation of several covariances.

An orientation is an orthogonal matrix. A rotation is the Cayley transform :math:`(I - S)(I + S)^{-1}` of a
skew-symmetric :math:`S`, whose entries above the diagonal are free.

D features, K components, R candidates.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from toolkit.blocks import no_graph
from toolkit.em.covariance.structure import identity_like

__all__ = [
    "INNER_STEPS_UNSEEN",
    "cayley",
    "common_axes",
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
    rotation: Tensor = torch.linalg.solve(identity + skew, identity - skew)
    return rotation


def to_skew(axes: Tensor) -> Tensor:
    """Return the skew-symmetric matrices whose Cayley transforms are the orthogonal `axes`, up to signs of columns.

    References:
        O'Dorney, "Minimizing the Cayley transform of an orthogonal matrix by multiplying by signature matrices", 2014:
        suitable signs always exist.
    """
    signed = axes * _signs(axes)[..., None, :]
    identity = identity_like(axes)
    skew: Tensor = torch.linalg.solve(identity + signed, identity - signed)
    return 0.5 * (skew - skew.mT)


@no_graph()
def _signs(axes: Tensor) -> Tensor:
    """Return signs (..., D) of the columns for which I + Q is far from singular: no pivot of it is below 1."""
    identity = identity_like(axes)
    elimination = identity.expand(axes.shape)
    signs = []
    for j in range(axes.shape[-1]):
        column = (elimination @ axes[..., j, None])[..., 0]
        signs.append(torch.where(column[..., j] < 0, -1.0, 1.0).to(axes.dtype))
        pivoted = elimination[..., j] + signs[-1][..., None] * column
        below = (torch.arange(axes.shape[-1], device=axes.device) > j) * pivoted / pivoted[..., j, None]
        elimination = elimination - below[..., :, None] * elimination[..., j, None, :]
    return torch.stack(signs, -1)


def upper_factor(factors: Tensor) -> Tensor:
    """Return the upper triangular U with U U^T = F F^T for factors (..., D, D): QR with both orders reversed."""
    triangular = torch.linalg.qr(factors.flip(-2).mT).R
    upper = triangular.mT.flip(-1, -2)
    positive: Tensor = upper * upper.diagonal(dim1=-2, dim2=-1).sign()[..., None, :]
    return positive


def strictly_upper(entries: Tensor, size: int) -> Tensor:
    """Return the matrices (..., D, D) with these entries (..., D(D-1)/2) above the diagonal, row by row, else 0."""
    if entries.shape[-1] != size * (size - 1) // 2:
        raise ValueError(
            f"`axes` should have {size * (size - 1) // 2} entries in its last dimension for {size} features. "
            f"Found shape {tuple(entries.shape)}."
        )
    return torch.cat([entries, torch.zeros_like(entries[..., :0].sum(-1, keepdim=True))], -1)[
        ..., _places_above_diagonal(size, entries.device)
    ]


@functools.lru_cache(maxsize=64)
def _places_above_diagonal(size: int, device: torch.device) -> Tensor:
    """Return the place of each entry of a strictly upper triangular matrix among its entries and, last, a zero."""
    rows, columns = torch.triu_indices(size, size, 1, device=device)
    places = torch.full((size, size), len(rows), device=device)
    places[rows, columns] = torch.arange(len(rows), device=device)
    return places


def is_batched(tensor: Tensor) -> bool:
    """Say whether a tensor is under vmap, where no value can be read."""
    batched: bool = torch._C._functorch.is_batchedtensor(tensor)
    return batched


# --- the orientation that components share ---


def common_axes(model: str, counts: Tensor, scatter: Tensor, start: Tensor | None, inner_steps: int) -> Tensor:
    """Return the common orientation (..., 1, D, D) of EVE or VVE, the best that is found from the starts.

    These are `start`, or if None the eigenvectors of each scatter and of the scatters' sum. Leading dimensions are
    batches. Components of count 0 are absent.
    """
    if start is None:
        start = torch.linalg.eigh(torch.cat([scatter.sum(-3, keepdim=True), scatter], -3)).eigenvectors
    axes, absent = start, counts == 0
    # Without a spread of 0, whose logarithm is infinite.
    scatter = torch.where(absent[..., None, None], identity_like(scatter), scatter)
    unseen = is_batched(scatter)
    settled = 100 * torch.finfo(scatter.dtype).eps
    for _ in range(INNER_STEPS_UNSEEN if unseen else inner_steps):
        axes, moved = _rotate(model, counts, scatter, axes)
        if not unseen and not bool((moved > settled).any()):
            break
    # One Newton-Schulz step: the product of many rotations stays a rotation.
    axes = 0.5 * axes @ (3 * identity_like(axes) - axes.mT @ axes)
    best = _misfit(model, counts, _spread_along(scatter, axes))[0].argmin(-1)
    chosen: Tensor = axes.take_along_dim(best[..., None, None, None], -3)
    return chosen


def _spread_along(scatter: Tensor, axes: Tensor) -> Tensor:
    """Return the scatter (..., K, D, D) along each of several systems of axes (..., R, D, D) as (..., R, K, D)."""
    return (axes[..., None, :, :] * (scatter[..., None, :, :, :] @ axes[..., None, :, :])).sum(-2)


def _misfit(model: str, counts: Tensor, spread: Tensor) -> tuple[Tensor, Tensor]:
    r"""Return the objective of a common orientation (..., R), from the scatter along it, and weights (..., R, K).

    The objective is twice the negative expected log-joint at the best volumes and shapes, up to a constant: for VVE
    :math:`\sum_k N_k \sum_j \log m_{kj}`, for EVE :math:`N D \log \sum_k \prod_j m_{kj}^{1/D}`. The derivative is that
    of the weighted sum of :math:`\sum_j \log m_{kj}`.
    """
    logs, counts = spread.log().sum(-1), counts[..., None, :]
    if model == "VVE":
        return (counts * logs).sum(-1), counts.expand(logs.shape)
    n_features, total = spread.shape[-1], counts.sum(-1)
    roots = (logs / n_features).masked_fill(counts == 0, -math.inf)
    return n_features * total * roots.logsumexp(-1), total[..., None] * roots.softmax(-1)


def _rotate(model: str, counts: Tensor, scatter: Tensor, axes: Tensor) -> tuple[Tensor, Tensor]:
    """Return axes (..., R, D, D) after one quasi-Newton step each, and the size of each move, (..., R).

    The Hessian is approximated by its value for axes that diagonalise every scatter, where it is diagonal in the planes
    of rotation.
    """
    rotated = axes.mT[..., None, :, :] @ scatter[..., None, :, :, :] @ axes[..., None, :, :]
    spread = rotated.diagonal(dim1=-2, dim2=-1)
    value, weights = _misfit(model, counts, spread)
    ratios = weights[..., None] / spread
    slopes = (rotated * ratios[..., None, :]).sum(-3)
    slopes = slopes - slopes.mT
    curvatures = spread.mT @ ratios
    curvatures = curvatures + curvatures.mT - 2 * weights.sum(-1)[..., None, None]
    eps, total = torch.finfo(scatter.dtype).eps, counts.sum(-1)[..., None]
    turn = -slopes / torch.maximum(curvatures, math.sqrt(eps) * total[..., None, None])
    longest = turn.abs().amax((-2, -1), keepdim=True)
    turn = turn * (_LONGEST_ROTATION / longest.clamp(min=_LONGEST_ROTATION))
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
            return whole.index_put((short,), found), size.index_put((short,), part * size[short])
    found, part = _line_search(model, counts, scatter, axes, turn, bound)
    return found, part * size


def _line_search(
    model: str, counts: Tensor, scatter: Tensor, axes: Tensor, turn: Tensor, bound: Tensor
) -> tuple[Tensor, Tensor]:
    """Return axes (..., R, D, D) after the longest part of each turn that does not exceed its bound, and the part."""
    fractions = turn.new_tensor(_FRACTIONS)
    candidates = axes[..., None, :, :] @ cayley(-0.5 * fractions[:, None, None] * turn[..., None, :, :])
    values = _misfit(model, counts, _spread_along(scatter, candidates.flatten(-4, -3)))[0]
    values = values.unflatten(-1, candidates.shape[-4:-2])
    acceptable = (values <= bound[..., None]) | (fractions == 0)
    chosen = acceptable.to(torch.uint8).argmax(-1)
    return candidates.take_along_dim(chosen[..., None, None, None], -3)[..., 0, :, :], fractions[chosen]
