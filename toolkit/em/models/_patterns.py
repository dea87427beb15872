"""EM of samples with missing values: sorted by their pattern of missing features, read in one pass, and iterated.

The matrices of each pattern are factored once, those of many patterns in one batch.

N samples, D features, K components; P patterns with up to B samples each.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from toolkit.blocks import no_graph
from toolkit.em.covariance import DIAG, soft_counts, structure_of
from toolkit.em.engine.acceleration import Climb, ClimbOptions, climb_family
from toolkit.em.engine.checks import check_weights
from toolkit.em.gaussian import GaussianParameters
from toolkit.em.models._common import check_table, is_wrapped
from toolkit.em.models.prior import Prior

__all__ = ["Incomplete", "MissingEngine", "Moments", "Pass", "check_incomplete", "em_step", "maximise"]

# Bytes of one (K, P, B, D) array, which bounds the memory of a pass, and the most samples of one pattern in it.
_CHUNK_BYTES = 2**21
_LONGEST = 2048


@dataclass(frozen=True)
class Part:
    """Samples of P patterns, padded to B each.

    Attributes:
        x: (P, B, D), 0 where missing.
        seen: (P, D): 1 where observed, 0 where missing.
        weights: (P, B); 0 where padded.
        rows: (P, B): the index of each sample; arbitrary where padded.
        real: (P, B): True where not padded.
    """

    x: Tensor
    seen: Tensor
    weights: Tensor
    rows: Tensor
    real: Tensor

    @property
    def telling(self) -> Tensor:
        """The weights, but 0 for samples without any value, which would only slow EM down."""
        return self.weights * self.seen.amax(-1, keepdim=True)


@dataclass(frozen=True)
class Incomplete:
    """Samples sorted by pattern.

    Attributes:
        parts: The samples in parts of bounded size.
        order: (N,): the place of each sample among the samples of all parts.
        total_weight: Sum of the weights.
    """

    parts: list[Part]
    order: Tensor
    total_weight: Tensor

    @classmethod
    def of(cls, x: Tensor, sample_weight: Tensor | None, n_components: int) -> Incomplete:
        """Sort samples (N, D), NaN where missing, for a mixture of K components."""
        weights = x.new_ones(len(x)) if sample_weight is None else sample_weight.to(x)
        missing = x.isnan()
        values = x.masked_fill(missing, 0.0)
        parts = []
        for rows, real in _rows_by_pattern(missing, n_components):
            parts.append(
                Part(
                    x=values[rows],
                    seen=(~missing[rows[:, 0]]).to(x.dtype),
                    weights=weights[rows] * real,
                    rows=rows,
                    real=real,
                )
            )
        places = torch.cat([part.rows.flatten().masked_fill(~part.real.flatten(), len(x)) for part in parts])
        order = torch.empty(len(x) + 1, dtype=torch.long, device=x.device)
        order = order.scatter(0, places, torch.arange(len(places), device=x.device))
        return cls(parts, order[:-1], weights.sum())


def _rows_by_pattern(missing: Tensor, n_components: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield rows (P, B), one pattern each, and the mask of rows that are not padding."""
    n, d = missing.shape
    device = missing.device
    if is_wrapped(missing) or n == 0:
        # Under torch.func.vmap no value can be read: each sample is a pattern of its own.
        yield torch.arange(n, device=device)[:, None], torch.ones(n, 1, dtype=torch.bool, device=device)
        return
    codes = _codes(missing)
    by_pattern, counts = codes.argsort(stable=True), codes.bincount()
    longest = min(_LONGEST, max(d, _CHUNK_BYTES // (8 * n_components * d)))
    n_blocks = (counts + longest - 1) // longest
    pattern = torch.arange(len(counts), device=device).repeat_interleave(n_blocks)
    done = longest * (torch.arange(len(pattern), device=device) - (n_blocks.cumsum(0) - n_blocks)[pattern])
    first = (counts.cumsum(0) - counts)[pattern] + done
    lengths = (counts[pattern] - done).clamp(max=longest)
    # Blocks of similar length are batched, so that less than half is padding.
    size = lengths.double().log2().ceil().long()
    for one in size.unique().tolist():
        (blocks,) = (size == one).nonzero(as_tuple=True)
        width = int(lengths[blocks].max())
        at_once = max(1, _CHUNK_BYTES // (8 * n_components * d * max(width, d)))
        steps = torch.arange(width, device=device)
        for some in blocks.split(at_once):
            yield (
                by_pattern[(first[some][:, None] + steps).clamp(max=n - 1)].where(
                    steps < lengths[some][:, None], by_pattern[first[some]][:, None]
                ),
                steps < lengths[some][:, None],
            )


def _codes(missing: Tensor) -> Tensor:
    """Return the number of each sample's pattern, (N,), from 0 without gaps."""
    codes = torch.zeros(len(missing), dtype=torch.long, device=missing.device)
    for bits in missing.long().split(30, 1):
        words = (bits << torch.arange(bits.shape[1], device=bits.device)).sum(1)
        codes = (codes << 30 | words).unique(return_inverse=True)[1]
    return codes


@dataclass(frozen=True)
class Pass:
    """A mixture evaluated at the samples of one part.

    Attributes:
        differences: (K, P, B, D): from the means, 0 where missing.
        completion: (K, P, D, D), K = 1 if tied: ``completion @ differences`` are the expected differences of all
            features. None for diag and spherical: the expected differences of missing features are 0.
        root: (K, P, D, D): lower triangular factor of the missing features' precision, with the identity where seen;
            for diag and spherical (K, D or 1): the precisions' factor.
        hidden: (P, D): 1 where missing, 0 where seen.
        log_joint: (K, P, B).
    """

    differences: Tensor
    completion: Tensor | None
    root: Tensor
    hidden: Tensor
    log_joint: Tensor

    @classmethod
    def of(cls, parameters: GaussianParameters, part: Part) -> Pass:
        """Evaluate a mixture at the samples of one part."""
        seen = part.seen.to(torch.promote_types(part.seen.dtype, parameters.means.dtype))
        differences = (part.x - parameters.means[:, None, None]) * seen[:, None]
        factor = parameters.precisions_cholesky
        completion = None
        if structure_of(parameters.covariance_type).is_matrix:
            factor = factor.view(-1, 1, *factor.shape[-2:])
            precisions = factor @ factor.mT
            hidden, identity = (1 - seen)[:, :, None], torch.diag_embed(seen)
            root = torch.linalg.cholesky(hidden * precisions * hidden.mT + identity)
            completion = identity - torch.cholesky_solve(hidden * precisions * seen[:, None], root)
            whitened = differences @ (completion.mT @ factor)
            volumes = parameters.log_determinants[..., None] - root.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        else:
            root = factor if factor.ndim == 2 else factor[:, None]
            whitened = differences * root[:, None, None]
            volumes = (root[:, None].log() * seen).sum(-1)
        constants = parameters.log_weights[:, None] + volumes - 0.5 * math.log(2 * math.pi) * seen.sum(-1)
        log_joint = constants[..., None] - 0.5 * whitened.square().sum(-1)
        return cls(differences, completion, root, 1 - seen, log_joint)

    def complete(self) -> Tensor:
        """Return the expected differences from the means of all features, (K, P, B, D)."""
        return self.differences if self.completion is None else self.differences @ self.completion.mT

    def spread(self, noise: Tensor) -> Tensor:
        """Return standard normal noise (P, B, D) with the covariances of missing features where they are missing."""
        if self.completion is None:
            return noise / self.root[:, None, None]
        wide = noise.expand(len(self.root), *noise.shape)
        drawn: Tensor = torch.linalg.solve_triangular(self.root, wide, upper=False, left=False)
        return drawn

    def moments(self, responsibilities: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return counts, sums, second moments and counts of seen features under responsibilities (K, P, B)."""
        counts = responsibilities.sum(-1)
        weighted = responsibilities[..., None] * self.differences
        first = weighted.sum(-2)
        seen = 1 - self.hidden
        if self.completion is None:
            second = (weighted * self.differences).sum(-2)
        else:
            first = (self.completion @ first[..., None])[..., 0]
            inverse = torch.cholesky_inverse(self.root) - torch.diag_embed(seen)
            second = self.completion @ (weighted.mT @ self.differences) @ self.completion.mT
            second = second + counts[..., None, None] * inverse
        return counts.sum(1), first.sum(1), second.sum(1), counts @ seen


@dataclass(frozen=True)
class Moments:
    """Statistics of the M-step: sums, weighted by responsibilities, of differences from `origins` (K, D).

    `counts` (K,); `first` (K, D); `second` (K, D, D) for full and tied, (K, D) for diag and spherical; `seen` (K, D):
    the counts of samples in which a feature is seen.
    """

    counts: Tensor
    first: Tensor
    second: Tensor
    seen: Tensor
    origins: Tensor

    @classmethod
    def of(cls, sums: list[tuple[Tensor, Tensor, Tensor, Tensor]], origins: Tensor) -> Moments:
        """Add the sums of all parts, from `Pass.moments`."""
        counts, first, second, seen = (torch.stack(parts).sum(0) for parts in zip(*sums, strict=True))
        return cls(counts, first, second, seen, origins)


def em_step(
    parameters: GaussianParameters, data: Incomplete, reg_covar: float, prior: Prior | None
) -> tuple[GaussianParameters, Tensor]:
    """Return the parameters after one EM step, float64, and the log-likelihood before it, nats per sample."""
    sums, total = [], data.total_weight.new_zeros(())
    for part in data.parts:
        current = Pass.of(parameters, part)
        log_density = current.log_joint.logsumexp(0)
        total += (part.weights * log_density).sum()
        sums.append(current.moments((current.log_joint - log_density).exp() * part.telling))
    after = maximise(parameters, Moments.of(sums, parameters.means), reg_covar, prior)
    return after, total / data.total_weight


def maximise(before: GaussianParameters, moments: Moments, reg_covar: float, prior: Prior | None) -> GaussianParameters:
    """Return the M-step. A component without samples is kept, as is a feature of a component without values."""
    kind, structure = before.covariance_type, structure_of(before.covariance_type)
    counts = soft_counts(moments.counts)
    seen = counts[:, None].expand(moments.seen.shape) if structure.is_matrix else soft_counts(moments.seen)
    shifts = moments.first / seen
    means = moments.origins + shifts
    scatter = structure.pool(moments.second - structure.wide.products(moments.first, shifts))
    weights = counts / counts.sum()
    if prior is not None:
        weights, means, covariances = prior.maximise(
            moments.counts, means, scatter, kind, feature_counts=None if structure.is_matrix else moments.seen
        )
        covariances = structure.regularise(covariances, reg_covar)
    else:
        covariances = structure.regularise(structure.estimate(scatter, seen), reg_covar)
        if structure is DIAG:
            covariances = torch.where(moments.seen < seen, before.covariances, covariances)
    return GaussianParameters(
        log_weights=weights.log(),
        means=means,
        precisions_cholesky=structure.factor(covariances),
        covariance_type=kind,
    )


@dataclass(frozen=True)
class MissingEngine:
    """EM of the four types on one data set, which is arranged once."""

    incomplete: Incomplete
    reg_covar: float
    prior: Prior | None

    @classmethod
    def of(
        cls, x: Tensor, n_components: int, reg_covar: float, sample_weight: Tensor | None, prior: Prior | None
    ) -> MissingEngine:
        """Arrange samples (N, D), with weights (N,), for mixtures of K components.

        Raises:
            ValueError: If a feature has no value at all.
        """
        check_incomplete(x, sample_weight)
        return cls(Incomplete.of(x.double(), sample_weight, n_components), reg_covar, prior)

    @no_graph()
    def climb(self, start: GaussianParameters, options: ClimbOptions) -> Climb[GaussianParameters]:
        """Return the highest point found, float64; values include the log-prior over the sum of weights."""
        structure = structure_of(start.covariance_type)

        def em(parameters: GaussianParameters) -> tuple[GaussianParameters, float]:
            after, value = em_step(parameters, self.incomplete, self.reg_covar, self.prior)
            return after, float(value) + self.log_prior(parameters)

        def check(there: GaussianParameters) -> None:
            structure.check_least(there.precisions_cholesky, self.reg_covar)

        return climb_family(em, start.to(torch.float64), options, check=check)

    def log_prior(self, parameters: GaussianParameters) -> float:
        """Return the log-density of the prior over the sum of weights; 0 without a prior."""
        return 0.0 if self.prior is None else float(self.prior.log_density(parameters) / self.incomplete.total_weight)


def check_incomplete(x: Tensor, sample_weight: Tensor | None) -> None:
    """Raise a TypeError or ValueError unless `x` (N, D) is finite or NaN, with at least one value of every feature."""
    check_table(x, missing=True)
    check_weights(sample_weight, len(x))
    empty = (x if sample_weight is None else x[sample_weight > 0]).isnan().all(0)
    if bool(empty.any()):
        features = ", ".join(map(str, empty.nonzero().ravel().tolist()))
        raise ValueError(f"`x` should have at least one value of every feature. Found none of feature {features}.")
