r"""The closed-form EM step as one pass over the data, with bounded memory.

`em_step` is the fast twin of ``m_step(x, e_step(parameters, x)[0])``. What makes it fast:

- **Features of features.** The log-joint is linear in :math:`\phi(x) = (x_i x_j, x_i, 1)`, and so are the sufficient
  statistics: :math:`A = \Theta \phi`, :math:`S = R \phi^\top`. Both steps are one matrix product each, of half the
  work because the symmetric products are there once. Tied covariances need only :math:`(x_i, 1)`: what is quadratic is
  the same for all components, and its sum is known beforehand.
- **One pass.** A chunk that fits the cache is expanded, weighed, and added up; nothing of size N x K is ever stored.
- **Components first.** Sums over components run along the long dimension of memory.
- **Clamped exponents.** Where a result would be denormal, the exponential is an order of magnitude slower. The clamp
  changes responsibilities by less than the smallest normal number.

What keeps it exact: data are centred, and whitened where covariances are correlated, so that the expansion cancels
only as far as a component is narrower than the data. When the digits lost would show (`_NARROW`), it is left for
moments about each component's own mean, which do not cancel; also for few components of many features, where writing
the expansion would cost more than it saves. Sums are in float64 whatever the data are.

B samples of a chunk, D features, K components, F features of features.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from toolkit.blocks import no_graph
from toolkit.em.gaussian import (
    CovarianceType,
    GaussianParameters,
    check_features,
    precisions_cholesky,
    regularise,
    soft_counts,
)

__all__ = ["Moments", "Prepared", "accumulate", "em_step", "maximise", "prepare"]

# Bytes of a chunk's working set: the second-level cache of a core, or enough to fill a GPU.
_CHUNK_BYTES = {"cpu": 2**22, "cuda": 2**28}

# The largest mean squared distance of the data from a component, in units of its covariance, for which the expansion
# is used. The log-likelihood loses about a tenth of a machine epsilon times it.
_NARROW = {torch.float32: 250.0, torch.float64: 1e6}

# Below these the exponential is denormal.
_SMALLEST_EXPONENT = {torch.float32: -87.0, torch.float64: -708.0}


@dataclass(frozen=True)
class Prepared:
    """Data in the coordinates of the pass.

    Attributes:
        centre: (D,), float64: the origin.
        scale: (D, D), float64, lower triangular: a sample is ``centre + scale @ z``. None: it is ``centre + z``.
        chunks: (D, B) each.
        scatter: (D, D) for full and tied, else (D,), float64: the mean of ``z z^T``, or of ``z * z``.
        n_samples: N.
    """

    centre: Tensor
    scale: Tensor | None
    chunks: list[Tensor]
    scatter: Tensor
    n_samples: int


@dataclass(frozen=True)
class Moments:
    """Sums over the samples, weighed by responsibilities, about `origins` (K, D).

    `counts` (K,); `first` (K, D); `second`: (K, D, D) for full, its sum over components (D, D) for tied, (K, D) for
    diag, its trace (K,) for spherical; `log_likelihood`: nats per sample.
    """

    counts: Tensor
    first: Tensor
    second: Tensor
    origins: Tensor
    log_likelihood: Tensor


@no_graph()
def em_step(parameters: GaussianParameters, x: Tensor, *, reg_covar: float = 0.0) -> tuple[GaussianParameters, Tensor]:
    """Return the parameters after one EM step, and the log-likelihood *before* it.

    The result is that of ``m_step(x, e_step(parameters, x)[0])`` to rounding, in one pass and bounded memory. It has no
    gradient: differentiate those two instead.

    Args:
        parameters: The mixture.
        x: (N, D), float32 or float64.
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
    kind = parameters.covariance_type
    data = prepare(x, kind, parameters.n_components)
    moments = accumulate(parameters, data)
    return maximise(moments, data, kind, reg_covar).to(parameters.means.dtype), moments.log_likelihood


@no_graph()
def prepare(x: Tensor, covariance_type: CovarianceType, n_components: int) -> Prepared:
    """Return the data, centred, whitened where it helps, transposed, and cut into chunks of bounded size.

    Any centre and scale give the same steps; these make the expansion accurate.
    """
    if x.dtype not in _NARROW:
        raise TypeError(f"`x` should be a float32 or float64 tensor. Found {x.dtype}.")
    n_samples, n_features = x.shape
    correlated = covariance_type in ("full", "tied")
    per_sample = (_n_expanded(n_features, covariance_type) + 2 * n_components + n_features) * x.element_size()
    size = min(max(_CHUNK_BYTES.get(x.device.type, 2**22) // per_sample, 512), 2**20)
    rows = x.tensor_split(math.ceil(n_samples / size))
    centre = x.mean(0, dtype=torch.float64)
    scale = _cholesky_of_correlations(_mean_products((part - centre).mT for part in rows)) if correlated else None
    chunks = [_to_frame(part.double(), centre, scale).to(x.dtype) for part in rows]
    scatter = _mean_products(chunks) if correlated else _mean_squares(chunks)
    return Prepared(centre, scale, chunks, scatter, n_samples)


@no_graph()
def accumulate(parameters: GaussianParameters, data: Prepared) -> Moments:
    """Return what the M-step needs to know of the data, in one pass: the E-step of prepared data."""
    framed = _Framed.of(parameters.to(torch.float64), data)
    n_components, n_features = framed.means.shape
    few = framed.kind == "full" and 4 * n_components <= n_features
    if few or framed.mean_squared_distance(data.scatter) > _NARROW[data.chunks[0].dtype]:
        return _moments_about_means(framed, data)
    return _moments_by_expansion(framed, data)


@no_graph()
def maximise(moments: Moments, data: Prepared, kind: CovarianceType, reg_covar: float) -> GaussianParameters:
    """Return the mixture with these moments, float64: the M-step of prepared data."""
    counts = soft_counts(moments.counts)
    shifts = moments.first / counts[:, None]
    # An empty component is left at the centre, wherever its moments were taken about.
    means = torch.where((moments.counts < counts)[:, None], 0.0, moments.origins + shifts)
    covariances = _covariances(moments.second, shifts, counts, kind)
    if data.scale is not None:
        means, covariances = means @ data.scale.mT, data.scale @ covariances @ data.scale.mT
    return GaussianParameters(
        log_weights=counts.log() - counts.sum().log(),
        means=data.centre + means,
        precisions_cholesky=precisions_cholesky(regularise(covariances, kind, reg_covar), kind),
        covariance_type=kind,
    )


@dataclass(frozen=True)
class _Framed:
    """A mixture in the coordinates of the data: float64.

    `means` are (K, D); `factor` is shaped by the type; `constant` (K,) is the log-joint at each component's mean.
    """

    means: Tensor
    factor: Tensor
    constant: Tensor
    kind: CovarianceType

    @classmethod
    def of(cls, parameters: GaussianParameters, data: Prepared) -> _Framed:
        normaliser = 0.5 * parameters.n_features * math.log(2 * math.pi)
        factor = parameters.precisions_cholesky
        return cls(
            means=_to_frame(parameters.means, data.centre, data.scale).mT,
            factor=factor if data.scale is None else data.scale.mT @ factor,
            constant=parameters.log_weights + parameters.log_determinants - normaliser,
            kind=parameters.covariance_type,
        )

    def mean_squared_distance(self, scatter: Tensor) -> float:
        """Return how far the data are from the origin in units of the narrowest component: tr(precision scatter)."""
        match self.kind:
            case "full" | "tied":
                distances = ((scatter @ self.factor) * self.factor).sum((-1, -2))
            case "diag":
                distances = (self.factor.square() * scatter).sum(-1)
            case "spherical":
                distances = self.factor.square() * scatter.sum()
        return float(distances.max())

    def coefficients(self) -> Tensor:
        """Return Theta (K, F): the log-joint of each component as a linear function of the expanded features."""
        match self.kind:
            case "full":
                precisions = self.factor @ self.factor.mT
                rows, columns = torch.triu_indices(*precisions.shape[-2:], device=precisions.device)
                quadratic = torch.where(rows == columns, -0.5, -1.0) * precisions[:, rows, columns]
                linear = (precisions @ self.means[..., None])[..., 0]
            case "tied":
                quadratic = self.means[:, :0]
                linear = self.means @ self.factor @ self.factor.mT
            case "diag":
                quadratic = -0.5 * self.factor.square()
                linear = self.factor.square() * self.means
            case "spherical":
                quadratic = -0.5 * self.factor.square()[:, None]
                linear = self.factor.square()[:, None] * self.means
        constant = self.constant - 0.5 * (linear * self.means).sum(-1)
        return torch.cat([quadratic, linear, constant[:, None]], 1)


def _moments_by_expansion(framed: _Framed, data: Prepared) -> Moments:
    theta = framed.coefficients()
    n_components, n_expanded = theta.shape
    n_features = framed.means.shape[1]
    weights = theta.to(data.chunks[0].dtype)
    longest = max(chunk.shape[1] for chunk in data.chunks)
    expanded = weights.new_empty(n_expanded, longest)
    expanded[-1] = 1
    joint = weights.new_empty(n_components, longest)
    sums = torch.zeros_like(theta)
    total = theta.new_zeros(())
    for chunk in data.chunks:
        phi, log_joint = expanded[:, : chunk.shape[1]], joint[:, : chunk.shape[1]]
        _expand(chunk, phi, framed.kind)
        torch.mm(weights, phi, out=log_joint)
        total += _weigh(log_joint)
        sums += log_joint @ phi.mT
    quadratic, first, counts = sums.split([n_expanded - n_features - 1, n_features, 1], 1)
    match framed.kind:
        case "full":
            rows, columns = torch.triu_indices(n_features, n_features, device=sums.device)
            second = sums.new_empty(n_components, n_features, n_features)
            second[:, rows, columns] = second[:, columns, rows] = quadratic
        case "tied":
            second = data.n_samples * data.scatter
            total -= 0.5 * data.n_samples * framed.mean_squared_distance(data.scatter)
        case "diag":
            second = quadratic
        case "spherical":
            second = quadratic[:, 0]
    return Moments(counts[:, 0], first, second, torch.zeros_like(first), total / data.n_samples)


def _moments_about_means(framed: _Framed, data: Prepared) -> Moments:
    n_components, n_features = framed.means.shape
    matrix = framed.kind in ("full", "tied")
    counts, first, total = (
        framed.means.new_zeros(n_components),
        torch.zeros_like(framed.means),
        framed.means.new_zeros(()),
    )
    second = first.new_zeros((n_components, n_features, n_features) if matrix else (n_components, n_features))
    size = max(1, _CHUNK_BYTES.get(first.device.type, 2**20) // (8 * n_components * n_features))
    for part in (part for chunk in data.chunks for part in chunk.split(size, 1)):
        differences = part.double() - framed.means[:, :, None]
        match framed.kind:
            case "full" | "tied":
                whitened = framed.factor.mT @ differences
            case "diag":
                whitened = framed.factor[:, :, None] * differences
            case "spherical":
                whitened = framed.factor[:, None, None] * differences
        log_joint = framed.constant[:, None] - 0.5 * whitened.square_().sum(1)
        total += _weigh(log_joint)
        weighted = log_joint[:, None] * differences
        counts += log_joint.sum(1)
        first += weighted.sum(2)
        second += weighted @ differences.mT if matrix else (weighted * differences).sum(2)
    if framed.kind == "tied":
        second = second.sum(0)
    elif framed.kind == "spherical":
        second = second.sum(1)
    return Moments(counts, first, second, framed.means, total / data.n_samples)


def _covariances(second: Tensor, shifts: Tensor, counts: Tensor, kind: CovarianceType) -> Tensor:
    """Return the covariances from second moments about the origins, where the means are at `shifts` (K, D)."""
    match kind:
        case "full":
            return second / counts[:, None, None] - shifts[:, :, None] * shifts[:, None]
        case "tied":
            return (second - (counts[:, None] * shifts).mT @ shifts) / counts.sum()
        case "diag":
            return second / counts[:, None] - shifts.square()
        case "spherical":
            return (second / counts - shifts.square().sum(1)) / shifts.shape[1]


def _n_expanded(n_features: int, kind: CovarianceType) -> int:
    quadratic = {"full": n_features * (n_features + 1) // 2, "tied": 0, "diag": n_features, "spherical": 1}[kind]
    return quadratic + n_features + 1


def _expand(z: Tensor, phi: Tensor, kind: CovarianceType) -> None:
    """Write the expanded features of a chunk (D, B) to `phi` (F, B), whose last row is 1 already."""
    n_features = len(z)
    match kind:
        case "full":
            row = 0
            for i in range(n_features):
                torch.mul(z[i:], z[i], out=phi[row : row + n_features - i])
                row += n_features - i
        case "diag":
            torch.mul(z, z, out=phi[:n_features])
        case "spherical":
            torch.sum(z * z, 0, out=phi[0])
    phi[-1 - n_features : -1] = z


def _weigh(log_joint: Tensor) -> Tensor:
    """Turn log-joints (K, B) into responsibilities in place, and return the sum of log-densities, float64."""
    peak = log_joint.amax(0)
    log_joint.sub_(peak).clamp_(min=_SMALLEST_EXPONENT[log_joint.dtype]).exp_()
    total = log_joint.sum(0)
    log_joint.div_(total)
    return total.log_().add_(peak).sum(dtype=torch.float64)


def _to_frame(points: Tensor, centre: Tensor, scale: Tensor | None) -> Tensor:
    """Return points (M, D) in the coordinates of the pass, (D, M)."""
    centred = (points - centre).mT
    return centred.contiguous() if scale is None else torch.linalg.solve_triangular(scale, centred, upper=False)


def _mean_products(chunks: Iterable[Tensor]) -> Tensor:
    """Return the mean of z z^T over chunks (D, B), float64."""
    return _mean((z.double() @ z.double().mT, z.shape[1]) for z in chunks)


def _mean_squares(chunks: Iterable[Tensor]) -> Tensor:
    """Return the mean of z * z over chunks (D, B), float64."""
    return _mean((z.double().square().sum(1), z.shape[1]) for z in chunks)


def _mean(sums: Iterable[tuple[Tensor, int]]) -> Tensor:
    total, count = functools.reduce(lambda a, b: (a[0] + b[0], a[1] + b[1]), sums)
    return total / count


def _cholesky_of_correlations(covariance: Tensor) -> Tensor:
    """Return a lower triangular L with L L^T near `covariance`, invertible also where that is singular."""
    deviations = covariance.diagonal().sqrt()
    deviations = torch.where(deviations > 0, deviations, 1.0)
    correlations = covariance / deviations / deviations[:, None]
    ridge = 1e-10 * torch.eye(len(covariance), dtype=covariance.dtype, device=covariance.device)
    factor: Tensor = torch.linalg.cholesky(correlations + ridge)
    return deviations[:, None] * factor
