r"""Samples in the coordinates of the fast pass, from any source: memory, a file, chunks, several ranks.

Any centre and scale give the same EM steps (they are affinely equivariant). The mean and the Cholesky factor of the
covariance are chosen, with which the expansion of `toolkit.em.engine.fused` cancels least.

B samples of a chunk, D features, K components.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, all_reduce

from toolkit._data import Chunk, Rows, as_arrays, as_tensor, doubles, parts_of, pieces_of, refuse_masked, rows_of
from toolkit.blocks import no_graph
from toolkit.em.covariance import Quadratics, structure_of
from toolkit.em.engine.checks import FLOATS, check_covariance, check_finite, check_weights

__all__ = [
    "Prepared",
    "check_rows",
    "chunk_length",
    "expanded",
    "gathered",
    "prepare",
    "total_over_ranks",
]

# Bytes of a chunk's working set: large enough to hide the overhead of calls, small enough for caches; or enough to fill
# a GPU.
_CHUNK_BYTES = {"cpu": 2**22, "cuda": 2**28}


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Data in the coordinates of the pass.

    Attributes:
        centre: (D,), float64: the origin.
        scale: (D, D), float64, lower triangular: a sample is ``centre + scale @ z``. None: it is ``centre + z``.
        whitening: (D, D), the inverse of `scale`, or None.
        scatter: (D, D) for full and tied, else (D,), float64: the weighted mean of ``z z^T``, or of ``z * z``.
        total_weight: The sum of the weights over all ranks; the number of samples if there are none.
        n_samples: Number of samples with a weight, over all ranks.
        dtype: Floating-point type of the chunks.
        group: The ranks that hold parts of the data; None: this process alone.
        is_cached: Whether `chunks` reads from memory.
        chunks: Function that iterates over the chunks (D, B) of this rank, with weights (B,) or None.
    """

    centre: Tensor
    scale: Tensor | None
    whitening: Tensor | None
    scatter: Tensor
    total_weight: float
    n_samples: int
    dtype: torch.dtype
    group: ProcessGroup | None
    is_cached: bool
    chunks: Callable[[], Iterator[Chunk]]

    def to_frame(self, points: Tensor) -> Tensor:
        """Return points (M, D), float64, in the coordinates of the pass, (M, D)."""
        centred = points - self.centre
        return centred if self.scale is None else torch.linalg.solve_triangular(self.scale, centred.mT, upper=False).mT

    def from_frame(self, points: Tensor) -> Tensor:
        """Return the samples (M, D) of coordinates of the pass (M, D)."""
        return self.centre + (points if self.scale is None else points @ self.scale.mT)

    def factor_to_frame(self, factor: Tensor) -> Tensor:
        """Return upper triangular factors of precisions of samples as those of coordinates of the pass."""
        return factor if self.scale is None else self.scale.mT @ factor

    def factor_from_frame(self, factor: Tensor) -> Tensor:
        """Return upper triangular factors of precisions of coordinates of the pass as those of samples."""
        return factor if self.scale is None else torch.linalg.solve_triangular(self.scale.mT, factor, upper=True)

    def ridge(self, reg_covar: float) -> Tensor | float:
        """Return the addition to covariances of coordinates for an addition of `reg_covar` to variances of samples."""
        return reg_covar if self.whitening is None else reg_covar * (self.whitening @ self.whitening.mT)

    @functools.cached_property
    def log_volume(self) -> float:
        """The increase of a log-density in the coordinates of the pass, nats."""
        return 0.0 if self.scale is None else float(self.scale.diagonal().log().sum())

    def as_samples(self) -> Prepared:
        """Return the coordinates of the pass as if they were the samples."""
        return dataclasses.replace(self, centre=torch.zeros_like(self.centre), scale=None, whitening=None)


@no_graph()
def prepare(
    x: Tensor | Rows,
    covariance_type: str,
    n_components: int,
    *,
    sample_weight: Tensor | None = None,
    cache: bool = True,
    group: ProcessGroup | None = None,
) -> Prepared:
    """Return the data, centred, whitened where it helps, feature by feature, in chunks that fit a cache.

    Args:
        x: (N, D), or a reader of its rows.
        covariance_type: ``"full"``, ``"tied"``, ``"diag"`` or ``"spherical"``.
        n_components: Number of components, K.
        sample_weight: (N,), not negative.
        cache: Whether the transposed data are kept. If not, every pass transposes them again.
        group: The ranks that hold parts of the data.

    Raises:
        TypeError: If `x` is neither float32 nor float64.
    """
    rows = rows_of(x, sample_weight) if isinstance(x, Tensor) else x
    correlated = structure_of(covariance_type).is_matrix
    first = next(rows(2**14), None)
    if first is None:
        raise ValueError("`x` should have a chunk, if only an empty one. Found none.")
    if first[0].dtype not in FLOATS:
        raise TypeError(f"`x` should be a float32 or float64 tensor. Found {first[0].dtype}.")
    length = chunk_length(first[0], covariance_type, n_components)
    weight, n_samples, centre, covariance = _moments(rows(length), first[0], correlated, group)
    scale = _cholesky_of_correlations(covariance) if correlated else None
    whitening = None if scale is None else torch.linalg.inv(scale)
    scatter = covariance if whitening is None else whitening @ covariance @ whitening.mT

    def chunks() -> Iterator[Chunk]:
        for part, weights in rows(length):
            centred = part.to(torch.float64) - centre
            if weights is not None and not bool(weights.all()):
                # A sample of weight 0 may have any value, but must not give an infinity.
                centred = centred.masked_fill((weights == 0)[:, None], 0.0)
            framed = centred.mT if whitening is None else whitening @ centred.mT
            # Copies of the weights as well: a source may fill the same memory again.
            yield framed.to(part.dtype).contiguous(), weights if weights is None or not cache else weights.clone()

    return Prepared(
        centre=centre,
        scale=scale,
        whitening=whitening,
        scatter=scatter,
        total_weight=weight,
        n_samples=n_samples,
        dtype=first[0].dtype,
        group=group,
        is_cached=cache,
        chunks=functools.partial(iter, list(chunks())) if cache else chunks,
    )


def gathered(data: Prepared) -> Prepared:
    """Return the data in one chunk, which is kept; for few samples on the CPU, not distributed over ranks."""
    parts, weights = zip(*data.chunks(), strict=True)
    if len(parts) == 1 and data.is_cached:
        return data
    every = None if any(part is None for part in weights) else torch.cat(weights)
    chunk = (parts[0] if len(parts) == 1 else torch.cat(parts, 1)), every
    return dataclasses.replace(data, is_cached=True, chunks=functools.partial(iter, [chunk]))


def expanded(groups: list[Quadratics], z: Tensor) -> Tensor:
    """Return quadratic features of samples (D, B), the features, and 1, one below the other: (F + D + 1, B)."""
    sizes = [group.size for group in groups]
    features = torch.cat([z.new_empty(sum(sizes), z.shape[1]), z, torch.ones_like(z[:1])])
    for group, out in zip(groups, features.split([*sizes, len(z) + 1]), strict=False):
        group.write(z, out)
    return features


def chunk_length(like: Tensor, covariance_type: str, n_components: int) -> int:
    """Return the number of samples in a chunk that keeps the working set of a pass in the cache."""
    n_features, structure = like.shape[1], structure_of(covariance_type)
    n_quadratics = 1 if structure.is_shared else min(structure.n_parameters_of_one(n_features), max(n_features, 128))
    per_sample = (n_quadratics + 2 * n_features + 2 * n_components) * like.element_size()
    return min(max(_CHUNK_BYTES.get(like.device.type, 2**22) // per_sample, 512), 2**20)


def check_rows(source: Iterable[Any] | Callable[[], Iterable[Any]], *, missing: bool = False) -> Rows:
    """Return the reader of a re-iterable of arrays, of tensors, or of pairs of samples and weights.

    Each chunk is checked when it is read: a sample that is not finite raises a ValueError with its row, and so do
    masked values.

    Raises:
        TypeError: If the source can be read only once, or weights are integers.
    """
    if not callable(source) and iter(source) is source:
        raise TypeError(
            "`x` should be chunks that can be read again for each pass, such as a list or a DataLoader. "
            f"Found a {type(source).__name__}, which can be read once."
        )

    def rows(length: int) -> Iterator[Chunk]:
        n_features, start = None, 0
        for piece in pieces_of(source):
            values, weights = parts_of(piece)
            refuse_masked("x", values)
            refuse_masked("sample_weight", weights)
            x = values if isinstance(values, Tensor) else torch.as_tensor(values, device="cpu")
            x = x if x.dtype in FLOATS else x.to(torch.float64)
            n_features = x.shape[-1] if n_features is None and x.ndim == 2 else n_features
            if x.ndim != 2 or x.shape[1] != n_features:
                raise ValueError(f"Every chunk should have shape (B, {n_features or 'D'}). Found {tuple(x.shape)}.")
            if not missing:
                check_finite(x, start)
            start += len(x)
            w = None if weights is None else torch.as_tensor(weights, device=x.device)
            check_weights(w, len(x), allow_zeros=True)
            yield from rows_of(x, None if w is None else w.to(x))(length)

    return rows


def total_over_ranks(group: ProcessGroup | None, *parts: Tensor) -> list[Tensor]:
    """Return the sums of these float64 tensors over the ranks, by one reduction."""
    if group is None:
        return list(parts)
    flat = torch.cat([part.reshape(-1) for part in parts])
    all_reduce(flat, op=ReduceOp.SUM, group=group)
    return [piece.view_as(part) for piece, part in zip(flat.split([p.numel() for p in parts]), parts, strict=True)]


def _moments(
    chunks: Iterator[Chunk], like: Tensor, correlated: bool, group: ProcessGroup | None
) -> tuple[float, int, Tensor, Tensor]:
    """Return total weight, number of weighted samples, mean (D,) and covariance, (D, D) or its diagonal (D,), float64.

    One pass: the moments of each chunk about its own mean are merged (Chan, Golub & LeVeque 1983, equation 2.1).
    """
    n_features = like.shape[1]
    zeros = torch.zeros(n_features, dtype=torch.float64, device=like.device)
    sums = zeros.sum(), zeros, zeros[:, None] * zeros if correlated else zeros
    count = 0
    for part, weights in chunks:
        if not len(part):
            continue
        own = _own_moments(part, weights, correlated)
        sums = _merge(sums, own) if count else own
        count += len(part) if weights is None else int((weights > 0).sum())
    weight, mean, scatter = sums
    if group is not None:
        weight, mean, scatter, counts = _merge_ranks(weight, mean, scatter, mean.new_tensor(count), group)
        count = int(counts)
    total_weight = float(weight)
    covariance = scatter / max(total_weight, torch.finfo(torch.float64).tiny)
    check_covariance(covariance)
    return total_weight, count, mean, covariance


_Sums: TypeAlias = tuple[Tensor, Tensor, Tensor]


def _own_moments(part: Tensor, weights: Tensor | None, correlated: bool) -> _Sums:
    """Return total weight, mean and scatter of a chunk; samples of weight 0 may have any value."""
    if weights is None:
        (x,) = as_arrays(part.numel(), part)
        x = doubles(x)
        own = x.mean(0)
        x = x - own
        with np.errstate(over="ignore", invalid="ignore"):  # infinite moments are refused where they are used
            inner = x.mT @ x if correlated else (x * x).sum(0)
        return as_tensor(own).new_tensor(len(part)), as_tensor(own), as_tensor(inner)
    x, w = part.to(torch.float64), weights.to(torch.float64)
    if not bool(w.all()):
        x, w = x[w > 0], w[w > 0]
    total = w.sum()
    mean = (w @ x) / total.clamp(min=torch.finfo(torch.float64).tiny)
    x = x - mean
    y = x * w[:, None]
    return total, mean, y.mT @ x if correlated else (y * x).sum(0)


def _merge(a: _Sums, b: _Sums) -> _Sums:
    weight = a[0] + b[0]
    share = b[0] / weight.clamp(min=torch.finfo(torch.float64).tiny)
    step = b[1] - a[1]
    between = step[:, None] * step if a[2].ndim == 2 else step.square()
    return weight, a[1] + share * step, a[2] + b[2] + a[0] * share * between


def _merge_ranks(
    weight: Tensor, mean: Tensor, scatter: Tensor, count: Tensor, group: ProcessGroup
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the moments of all ranks, and the number of samples; the scatter is about the common mean."""
    total, first, counts = total_over_ranks(group, weight, weight * mean, count)
    common = first / total.clamp(min=torch.finfo(torch.float64).tiny)
    step = mean - common
    between = step[:, None] * step if scatter.ndim == 2 else step.square()
    (second,) = total_over_ranks(group, scatter + weight * between)
    return total, common, second, counts


def _cholesky_of_correlations(covariance: Tensor) -> Tensor:
    """Return a lower triangular L with L L^T near `covariance`, invertible also where that is singular."""
    deviations = covariance.diagonal().sqrt()
    deviations = torch.where(deviations > 0, deviations, 1.0)
    correlations = covariance / deviations / deviations[:, None]
    ridge = 1e-10 * torch.eye(len(covariance), dtype=covariance.dtype, device=covariance.device)
    factor: Tensor = torch.linalg.cholesky(correlations + ridge)
    return deviations[:, None] * factor
