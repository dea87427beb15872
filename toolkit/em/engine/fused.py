r"""The closed-form EM step as one pass over the data, with bounded memory.

`em_step` is the fast twin of ``m_step(x, e_step(parameters, x)[0])``. Reasons for its speed:

- **Quadratic features.** The log-joint is linear in :math:`\phi(x) = (x_i x_j, x_i, 1)`, and so are the sufficient
  statistics: :math:`A = \Theta \phi`, :math:`S = R \phi^\top`. Both steps are one matrix product each, of half the work
  because each symmetric product is taken once. Tied covariances need only :math:`(x_i, 1)`: the quadratic term is the
  same for all components, and its sum is known beforehand.
- **One pass.** A chunk that fits the cache is expanded, weighted, and added up; nothing of size N x K is ever stored.
  Quadratic features that do not fit are written in groups, twice, which is cheaper than to read them back.
- **Components first.** Sums over components run along the long dimension of memory.
- **No maximum.** A log-joint is at most the component's constant. So exponentials are taken at a fixed shift; only if
  the densities of a sample vanish, because it is far from all components, the maximum is computed after all.
- **Powers of two.** Log-joints are computed in bits, because torch's `exp2` takes a third of the time of its `exp`.
- **Clamped exponents.** An exponential with a denormal result is an order of magnitude slower. The clamp changes
  responsibilities by less than the smallest normal number.
- **Triangles.** For few components of many features the expansion costs more than it saves. Then each component has its
  own triangular product in the E-step and symmetric product in the M-step, each half the work of a general product.

Precision: data are centred, and whitened for structures with correlations, so the expansion cancels only as far as a
component is narrower than the data. If too many digits would be lost (`_EXPANDED`), float32 data are expanded in
float64, and beyond that moments are taken about each component's own mean, without cancellation. Sums are in float64
for all data.

B samples of a chunk, D features, K components, F quadratic features.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from scipy.linalg import blas
from torch import Tensor

from toolkit._checks import number
from toolkit._data import Chunk
from toolkit.blocks import no_graph
from toolkit.em.covariance import CovarianceType, Structure, soft_counts, structure_of
from toolkit.em.engine.checks import check_weights
from toolkit.em.engine.samples import Prepared, prepare, total_over_ranks
from toolkit.em.engine.statistics import MomentsPrior, Statistics
from toolkit.em.gaussian import GaussianParameters, check_features

__all__ = ["Expansion", "Moments", "accumulate", "em_step", "maximise", "statistics_of"]

# The largest mean squared distance of the data from a component, in units of its covariance, for which the expansion is
# used. The log-likelihood loses about a twentieth of a machine epsilon times it: 3e-6 nats, and 1e-11.
_EXPANDED = {torch.float32: 400.0, torch.float64: 1e6}

# The largest distance for which differences from a component's mean are taken in float32, and the nats that this may
# lose.
_SINGLE = 1e6
_LOST_ABOUT_MEANS = 1e-6

# Below these a power of two is denormal.
_SMALLEST_EXPONENT = {torch.float32: -126.0, torch.float64: -1022.0}
_LOG2_E = math.log2(math.e)

# Densities are taken relative to the largest possible one times e^-shift, and a sample may be e^-depth below that.
# Float32 needs the shift for its range; float64 has none, as the shift costs every logarithm digits.
_SHIFT = {torch.float32: 40.0, torch.float64: 0.0}
_DEPTH = {torch.float32: 40.0, torch.float64: 600.0}

# The most quadratic features that are written at once.
_GROUP = 320


@dataclass(frozen=True)
class Moments:
    """Sums over the samples, weighted by responsibilities, about `origins` (K, D).

    `counts` (K,); `first` (K, D); `second`: (K, D, D) for full, its sum over components (D, D) for tied, (K, D) for
    diag, its trace (K,) for spherical; `log_likelihood`: nats per sample.
    """

    counts: Tensor
    first: Tensor
    second: Tensor
    origins: Tensor
    log_likelihood: Tensor


@no_graph()
def em_step(
    parameters: GaussianParameters, x: Tensor, *, sample_weight: Tensor | None = None, reg_covar: float = 0.0
) -> tuple[GaussianParameters, Tensor]:
    """Return the parameters after one EM step, and the log-likelihood *before* it.

    The result is that of ``m_step(x, e_step(parameters, x)[0])`` to rounding, in one pass and bounded memory. It has no
    gradient: differentiate `m_step` and `e_step` instead.

    Args:
        parameters: The mixture.
        x: (N, D), float32 or float64.
        sample_weight: (N,), not negative. None: all 1.
        reg_covar: Added to every variance. 0 is maximum likelihood, for which the log-likelihood never falls.

    Returns:
        The new mixture, and a float64 scalar in nats per sample.

    Raises:
        TypeError: If `x` is neither float32 nor float64.
        ValueError: If `x` does not have the features of the means, or a covariance becomes singular.

    References:
        Dempster, Laird & Rubin, "Maximum likelihood from incomplete data via the EM algorithm", 1977, section 4.3.

    Example:
        >>> x = torch.tensor([[0.0], [1.0], [4.0], [5.0]])
        >>> two = GaussianParameters.from_covariances(
        ...     weights=torch.tensor([0.5, 0.5]), means=torch.tensor([[1.0], [3.0]]),
        ...     covariances=torch.tensor([[1.0], [1.0]]), covariance_type="diag")
        >>> em_step(two, x)[0].means
        tensor([[0.5125],
                [4.2683]])
    """
    check_features(parameters, x)
    check_weights(sample_weight, len(x))
    reg_covar = number("reg_covar", reg_covar, least=0)
    kind = parameters.covariance_type
    data = prepare(x, kind, parameters.n_components, sample_weight=sample_weight)
    moments = accumulate(parameters, data)
    return maximise(moments, data, kind, reg_covar).to(parameters.means.dtype), moments.log_likelihood


@no_graph()
def accumulate(parameters: GaussianParameters, data: Prepared) -> Moments:
    """Return the moments of the data that the M-step needs, in one pass: the E-step of prepared data."""
    framed = _Framed.of(parameters.to(torch.float64), data)
    distance = framed.mean_squared_distance(data.scatter)
    if _is_about_means(framed, distance):
        by_triangles = _has_triangles(framed.structure) and data.centre.device.type == "cpu"
        dtype = data.dtype if distance <= _SINGLE else torch.float64
        moments = _moments_by_triangles(framed, data, dtype) if by_triangles else _moments_about_means(framed, data)
    else:
        dtype = data.dtype if distance <= _EXPANDED[data.dtype] else torch.float64
        moments = _moments_by_expansion(framed, data, dtype)
    return dataclasses.replace(moments, log_likelihood=moments.log_likelihood / data.total_weight)


@no_graph()
def rounding_error(parameters: GaussianParameters, data: Prepared) -> float:
    """Return a bound of the rounding error of a pass's log-likelihood, nats per sample."""
    framed = _Framed.of(parameters.to(torch.float64), data)
    distance = framed.mean_squared_distance(data.scatter)
    if _is_about_means(framed, distance):
        return _LOST_ABOUT_MEANS if data.dtype == torch.float32 and distance <= _SINGLE else 0.0
    dtype = data.dtype if distance <= _EXPANDED[data.dtype] else torch.float64
    return float(expansion_error(framed.factor, framed.structure, data.scatter, dtype))


def expansion_error(factor: Tensor, structure: Structure, scatter: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a bound of the rounding errors of log-likelihoods of `expanded_sums`, nats per sample: (...,).

    Log-joints are sums whose largest terms are the shift and half the squared distance from the origin. On 320 mixtures
    of 1 to 16 features, with distances up to 1e6, steps at the maximum fell by at most two fifths of this.

    Args:
        factor: Factors of the precisions in the coordinates of the pass, shaped by the structure.
        structure: That of the covariances.
        scatter: Scatter of the data, in the coordinates of the pass.
        dtype: In which the pass is computed.
    """
    distances = structure.squared_distances(factor, scatter)
    return error_of_distance(distances if structure.is_shared else distances.amax(-1), dtype)


def error_of_distance(farthest: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `expansion_error` where the data have this mean squared distance from a component."""
    return torch.finfo(dtype).eps * (_SHIFT[dtype] + 2 * farthest)


@no_graph()
def maximise(
    moments: Moments,
    data: Prepared,
    kind: CovarianceType,
    reg_covar: float | Tensor,
    prior: MomentsPrior | None = None,
) -> GaussianParameters:
    """Return the mixture with these moments, or the mode given a prior, float64: the M-step of prepared data.

    Args:
        moments: The result of `accumulate`.
        data: The data.
        kind: The type.
        reg_covar: Added to every variance; or a matrix (D, D) that is added to every covariance.
        prior: The prior.

    Raises:
        ValueError: If a covariance is singular.
    """
    return statistics_of(moments, data, kind).maximise(reg_covar=reg_covar, prior=prior)


def statistics_of(moments: Moments, data: Prepared, kind: CovarianceType) -> Statistics:
    """Return the statistics of the samples, in their own coordinates, from the moments of prepared data."""
    counts = soft_counts(moments.counts)
    shifts = moments.first / counts[:, None]
    # An empty component is put at the centre, whatever the origin of its moments.
    means = torch.where((moments.counts < counts)[:, None], 0.0, moments.origins + shifts)
    scatter = moments.second - structure_of(kind).products(counts[:, None] * shifts, shifts)
    if data.scale is not None:
        scatter = data.scale @ scatter @ data.scale.mT
    return Statistics(counts=moments.counts, means=data.from_frame(means), scatter=scatter, covariance_type=kind)


def _is_about_means(framed: _Framed, distance: float) -> bool:
    """Say whether the pass takes differences from each component's mean, and expands nothing."""
    n_components, n_features = framed.means.shape
    few = _has_triangles(framed.structure) and 4 * n_components <= n_features
    return few or loses_digits(distance)


def loses_digits(distance: float) -> bool:
    """Say whether the expansion loses digits in float64, at this mean squared distance of the data."""
    return not distance <= _EXPANDED[torch.float64]


def _has_triangles(structure: Structure) -> bool:
    """Say whether each component has a triangular factor of its own."""
    return structure.is_matrix and not structure.is_shared


@dataclass(frozen=True)
class _Framed:
    """A mixture in the coordinates of the data: float64.

    `means` are (K, D); `factor` is shaped by the type; `constant` (K,) is the log-joint at each component's mean.
    """

    means: Tensor
    factor: Tensor
    constant: Tensor
    structure: Structure

    @classmethod
    def of(cls, parameters: GaussianParameters, data: Prepared) -> _Framed:
        normaliser = 0.5 * parameters.n_features * math.log(2 * math.pi)
        factor = parameters.precisions_cholesky
        return cls(
            means=data.to_frame(parameters.means),
            factor=data.factor_to_frame(factor),
            constant=parameters.log_weights + parameters.log_determinants - normaliser,
            structure=structure_of(parameters.covariance_type),
        )

    def mean_squared_distance(self, scatter: Tensor) -> float:
        """Return the largest tr(precision scatter), the data's mean squared distance from the origin."""
        return float(self.structure.squared_distances(self.factor, scatter).max())

    def coefficients(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the log-joint of each component as a function of products, features and 1: (K, .), (K, D), (K,)."""
        quadratic, linear = self.structure.coefficients(self.factor, self.means)
        return quadratic, linear, self.constant - 0.5 * (linear * self.means).sum(-1)


class Expansion:
    """Writes the quadratic features of a chunk, in groups of rows that fit the cache."""

    def __init__(self, structure: Structure, n_features: int, length: int, *, like: Tensor) -> None:
        self.length = length
        self.groups = structure.quadratics(n_features, _GROUP)
        self.sizes = [group.size for group in self.groups] or [0]
        # The last group also has the features themselves, and 1.
        self.widths = [*self.sizes[:-1], self.sizes[-1] + n_features + 1]
        self.buffer = like.new_empty(max(self.widths), length)
        self.written: Tensor | None = None  # the chunk whose only group is in the buffer

    def write(self, group: int, z: Tensor) -> Tensor:
        """Return the quadratic features of one group (F, B), which are overwritten by the next."""
        size, length = self.sizes[group], z.shape[1]
        phi = self.buffer[: self.widths[group], :length]
        if z is self.written:
            return phi
        self.written = z if len(self.sizes) == 1 else None
        if size:
            self.groups[group].write(z, phi[:size])
        if group == len(self.sizes) - 1:
            phi[size:-1] = z
            phi[-1] = 1
        return phi


def _moments_by_expansion(framed: _Framed, data: Prepared, dtype: torch.dtype) -> Moments:
    quadratic, linear, constant = framed.coefficients()
    n_features = framed.means.shape[1]
    theta = torch.cat([quadratic, linear, constant[:, None]], 1)
    # With shared covariances the common part of the log-joint is left out, so it has no highest value.
    structure = framed.structure
    highest = framed.constant.max() if not structure.is_shared else None
    sums, total = expanded_sums(structure, theta[None], highest, data, dtype)
    quadratic, first, counts = sums[0].split([sums.shape[2] - n_features - 1, n_features, 1], 1)
    if structure.is_shared:
        second = data.total_weight * data.scatter
        total = total - 0.5 * data.total_weight * framed.mean_squared_distance(data.scatter)
    else:
        second = structure.second_moments(quadratic, n_features)
    return Moments(counts[:, 0], first, second, torch.zeros_like(first), total[0])


@no_graph()
def expanded_sums(
    structure: Structure,
    theta: Tensor,
    highest: Tensor | None,
    data: Prepared,
    dtype: torch.dtype,
    expansion: Expansion | None = None,
) -> tuple[Tensor, Tensor]:
    """Return sums of quadratic features by responsibility, and of log-densities, of R mixtures in one pass.

    Args:
        structure: That of the covariances.
        theta: (R, K, F), float64: log-joints as functions of the quadratic features.
        highest: Scalar: an upper bound of the log-joints, or None if there is none.
        data: The data.
        dtype: In which the pass is computed.
        expansion: The expansion of an earlier pass, which may hold the data already.

    Returns:
        (R, K, F) and (R,), float64.
    """
    n_mixtures, n_components, _ = theta.shape
    n_features = data.centre.shape[0]
    # A shift of all log-joints, so that their exponentials need no maximum.
    shift = float(highest) - _SHIFT[dtype] if highest is not None else 0.0
    bounded = highest is not None and theta.device.type == "cpu"
    in_bits = _LOG2_E * theta.flatten(0, 1)
    in_bits[:, -1] -= _LOG2_E * shift
    sums, total = torch.zeros_like(in_bits), theta.new_zeros(n_mixtures)
    buffer = theta.new_empty(0, 0)
    weight = total.new_zeros(())
    for z, weights in _in(dtype, data):
        length = z.shape[1]
        weight += length if weights is None else weights.sum(dtype=torch.float64)
        if expansion is None or length > expansion.length:
            expansion = Expansion(structure, n_features, length, like=in_bits.to(dtype))
        if length > buffer.shape[1]:
            buffer = in_bits.new_empty((len(in_bits), expansion.length), dtype=dtype)
            coefficients = in_bits.to(dtype).split(expansion.widths, 1)
            statistics = sums.split(expansion.widths, 1)
        flat = buffer[:, :length]
        phi = _log_joint(expansion, coefficients, z, flat)
        joint = flat.unflatten(0, (n_mixtures, n_components))
        if bounded:
            densities = _exponentials(joint)
            if not _is_near(densities):
                # There may be more such samples in the rest of the pass.
                bounded = False
                phi = _log_joint(expansion, coefficients, z, flat)
        if not bounded:
            peak = joint.amax(1, keepdim=True)
            densities = _exponentials(joint.sub_(peak))
            total += _dot(peak[:, 0], weights) / _LOG2_E
        total += _dot(densities.log(), weights)
        share = densities.reciprocal_() if weights is None else weights.to(dtype) / densities
        many = len(expansion.sizes) > 1
        by_component = many or n_mixtures > 1 or n_components <= len(phi)
        if by_component:
            joint.mul_(share[:, None])
        for group, statistic in enumerate(statistics):
            if many:
                phi = expansion.write(group, z)
            if not by_component:
                phi = phi.mul_(share)
                expansion.written = None
            if dtype == torch.float64:
                statistic.addmm_(flat, phi.mT)
            else:
                statistic += flat @ phi.mT
    # Each rank adds its own shift, which depends on the type.
    sums, total = total_over_ranks(data.group, sums, total + weight * shift)
    return sums.view_as(theta), total


def _log_joint(expansion: Expansion, coefficients: tuple[Tensor, ...], z: Tensor, out: Tensor) -> Tensor:
    """Write the log-joints (K, B) of a chunk, in bits, and return the quadratic features of the last group."""
    for group, theta in enumerate(coefficients):
        phi = expansion.write(group, z)
        if group:
            out.addmm_(theta, phi)
        else:
            torch.mm(theta, phi, out=out)
    return phi


def _exponentials(joint: Tensor) -> Tensor:
    """Turn shifted log-joints (..., K, B), in bits, into densities in place, and return their sums (..., B)."""
    joint.clamp_(min=_SMALLEST_EXPONENT[joint.dtype]).exp2_()
    return joint.sum(-2)


def _is_near(densities: Tensor) -> bool:
    """Say whether every sample is near enough to a component for its densities to lose no digits to the clamp."""
    return float(densities.min()) > math.exp(-_DEPTH[densities.dtype])


def _dot(values: Tensor, weights: Tensor | None) -> Tensor:
    """Return the sum of values (..., B), weighted, in float64."""
    return values.sum(-1, dtype=torch.float64) if weights is None else values.double() @ weights.double()


def _in(dtype: torch.dtype, data: Prepared) -> Iterator[Chunk]:
    for z, weights in data.chunks():
        if z.shape[1]:
            yield z.to(dtype), weights


def _moments_by_triangles(framed: _Framed, data: Prepared, dtype: torch.dtype) -> Moments:
    """Return moments about the means of full covariances: products with a triangle, and products that are symmetric.

    These products are functions of BLAS, for float32 and float64 on the CPU, but not of torch.
    """
    n_components, n_features = framed.means.shape
    triangular, symmetric = (blas.strmm, blas.ssyrk) if dtype == torch.float32 else (blas.dtrmm, blas.dsyrk)
    means = framed.means.to(dtype)[:, :, None]
    factors = [np.asfortranarray(factor.to(dtype).numpy()) for factor in framed.factor]
    counts, first = framed.constant.new_zeros(n_components), torch.zeros_like(framed.means)
    second = framed.means.new_zeros(n_components, n_features, n_features)
    total = framed.constant.new_zeros(())
    constant = (_LOG2_E * framed.constant).to(dtype)[:, None]
    joint, work = means.new_empty(0), means.new_empty(0)
    for z, weights in _in(dtype, data):
        if z.shape[1] > joint.shape[-1]:
            joint = means.new_empty(n_components, z.shape[1])
            work = torch.empty_like(z)
        log_joint, differences = joint[:, : z.shape[1]], work[:, : z.shape[1]].contiguous()
        rows = differences.numpy().T  # (B, D) with features side by side, as Fortran has it
        for k in range(n_components):
            torch.sub(z, means[k], out=differences)
            triangular(1.0, factors[k], rows, side=1, overwrite_b=1)
            torch.sum(differences.square_(), 0, out=log_joint[k])
        log_joint.mul_(-0.5 * _LOG2_E).add_(constant)
        peak = log_joint.amax(0)
        densities = _exponentials(log_joint.sub_(peak))
        total += _dot(densities.log().add_(peak, alpha=1 / _LOG2_E), weights)
        log_joint.mul_(densities.reciprocal_() if weights is None else weights.to(dtype) / densities)
        counts += log_joint.sum(1)
        roots = log_joint.sqrt()
        for k in range(n_components):
            torch.sub(z, means[k], out=differences)
            first[k] += differences @ log_joint[k]
            differences.mul_(roots[k])
            second[k] += torch.from_numpy(symmetric(1.0, rows, trans=1))
    # BLAS fills the upper triangle, seen from Fortran.
    counts, first, second, total = total_over_ranks(data.group, counts, first, second, total)
    second = second.triu() + second.triu(1).mT
    return Moments(counts, first, second, framed.means, total)


def _moments_about_means(framed: _Framed, data: Prepared) -> Moments:
    n_components, n_features = framed.means.shape
    structure = framed.structure
    counts, first, total = (
        framed.means.new_zeros(n_components),
        torch.zeros_like(framed.means),
        framed.means.new_zeros(()),
    )
    second = first.new_zeros(structure.wide.shape(n_components, n_features))
    budget = 2**26 if first.device.type == "cuda" else 2**20
    size = max(1, budget // (8 * n_components * n_features))
    for z, w in data.chunks():
        weights = z.new_ones(z.shape[1]) if w is None else w
        for part, share in zip(z.split(size, 1), weights.double().split(size), strict=True):
            differences = part.double() - framed.means[:, :, None]
            whitened = structure.whiten(framed.factor, differences)
            log_joint = _LOG2_E * (framed.constant[:, None] - 0.5 * whitened.square_().sum(1))
            peak = log_joint.amax(0)
            densities = _exponentials(log_joint.sub_(peak))
            total += share @ densities.log().add_(peak, alpha=1 / _LOG2_E)
            log_joint.mul_(share / densities)
            weighted = log_joint[:, None] * differences
            counts += log_joint.sum(1)
            first += weighted.sum(2)
            second += structure.wide.moments(weighted, differences)
    second = structure.pool(second)
    counts, first, second, total = total_over_ranks(data.group, counts, first, second, total)
    return Moments(counts, first, second, framed.means, total)
