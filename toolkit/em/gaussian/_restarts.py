r"""Many starts of one Gaussian mixture at once: seeding, Lloyd's steps and EM steps of all of them in one pass.

For small data a step costs what its calls cost, whatever they work on; for large data the matrix products of many
components are more efficient than those of few. Both make R starts together much cheaper than R starts in turn.

Everything is in the coordinates of the pass (`toolkit.em.gaussian._samples`), in which EM is the same.

N samples, D features, K components, R starts.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from toolkit.blocks import no_graph
from toolkit.em._rounding import ROUNDING
from toolkit.em.gaussian._fused import Expansion, expansion_error, quadratic_form, symmetric_products
from toolkit.em.gaussian._ranks import sums_over_ranks
from toolkit.em.gaussian._samples import Prepared
from toolkit.em.gaussian.parameters import CovarianceType, GaussianParameters, soft_counts

__all__ = ["NARROWEST", "Mixtures", "climb_together"]

# A component is a spike if in some direction its variance is less than this, in units of the average component's.
NARROWEST = 1e-3

# The most terms of a sum whose errors add up, about those of a chunk. On copies of one sample, among 10 to 1e6 samples
# of 1 to 16 features, second moments and squared means were at most 4 roundoffs apart, or a sixth of the number of
# samples, or a tenth of this.
_TERMS = 2**16


@dataclass(frozen=True)
class Mixtures:
    """R mixtures in the coordinates of the pass, float64.

    `log_weights` (R, K), `means` (R, K, D); `factor`: upper triangular factors of the precisions, (R, K, D, D) for
    full, (R, D, D) for tied, (R, K, D) for diag, (R, K) for spherical.
    """

    log_weights: Tensor
    means: Tensor
    factor: Tensor
    kind: CovarianceType

    @classmethod
    def of(cls, starts: list[GaussianParameters], data: Prepared) -> Mixtures:
        """Return these mixtures of samples in the coordinates of the pass."""
        factor = torch.stack([start.precisions_cholesky.double() for start in starts])
        return cls(
            log_weights=torch.stack([start.log_weights.double() for start in starts]),
            means=torch.stack([data.to_frame(start.means.double()) for start in starts]),
            factor=data.factor_to_frame(factor),
            kind=starts[0].covariance_type,
        )

    def one(self, index: int, data: Prepared) -> GaussianParameters:
        """Return one of them, as a mixture of samples."""
        return GaussianParameters(
            log_weights=self.log_weights[index],
            means=data.from_frame(self.means[index]),
            precisions_cholesky=data.factor_from_frame(self.factor[index]),
            covariance_type=self.kind,
        )

    def narrowest(self) -> Tensor:
        """Return the least variance of a component in any direction, in units of the components' average: (R,).

        It does not depend on the coordinates. What is far below 1 is a spike on a few samples.
        """
        match self.kind:
            case "full":
                inverse = torch.linalg.inv(self.factor)
                covariances = inverse.mT @ inverse
                average = (self.log_weights.exp()[..., None, None] * covariances).sum(1, keepdim=True)
                largest = torch.linalg.eigvalsh(self.factor.mT @ average @ self.factor)[..., -1]
            case "tied":
                return torch.ones_like(self.log_weights[:, 0])
            case "diag" | "spherical":
                precisions = self.factor.square().flatten(2) if self.kind == "diag" else self.factor.square()[..., None]
                average = (self.log_weights.exp()[..., None] / precisions).sum(1, keepdim=True)
                largest = (precisions * average).amax(-1)
        least: Tensor = largest.amax(-1).reciprocal()
        return least

    def copy(self) -> Mixtures:
        """Return mixtures that `put` may change."""
        return Mixtures(self.log_weights.clone(), self.means.clone(), self.factor.clone(), self.kind)

    def put(self, places: Tensor, others: Mixtures, which: Tensor) -> None:
        """Replace those at `places` by some of the others."""
        self.log_weights[places] = others.log_weights[which]
        self.means[places] = others.means[which]
        self.factor[places] = others.factor[which]

    def __getitem__(self, which: Tensor) -> Mixtures:
        """Return some of them."""
        return Mixtures(self.log_weights[which], self.means[which], self.factor[which], self.kind)


@no_graph()
def climb_together(
    mixtures: Mixtures, data: Prepared, *, tol: float, max_iter: int, reg_covar: float
) -> tuple[Mixtures, Tensor, Tensor, Tensor]:
    """Take EM steps from every start until each gains too little.

    A start that leads to a singular covariance ends with a log-likelihood of minus infinity.

    Returns:
        The mixtures, their log-likelihoods (R,) in nats per sample, the steps taken (R,), and whether each converged.
    """
    n_starts = len(mixtures.means)
    steps = torch.zeros(n_starts, dtype=torch.int64, device=mixtures.means.device)
    values = mixtures.means.new_full((n_starts,), -math.inf)
    converged = torch.zeros_like(steps, dtype=torch.bool)
    found = mixtures.copy()
    ridge = data.ridge(reg_covar)
    expansion = _expansion_of_all(mixtures, data)
    climbing, before, now, last = torch.arange(n_starts, device=steps.device), mixtures, mixtures, values.clone()
    for step in range(max_iter + 1):
        after, value = _step(now, data, ridge, expansion)
        stays = value >= last if step else value.isfinite()
        if step and not bool(stays.all()):
            # Falls within rounding are none, as in `climb`.
            error = expansion_error(now.factor, now.kind, data.scatter, torch.float64)
            stays = stays | (value >= last - error.maximum(ROUNDING[torch.float64] * (1 + last.abs())))
        gains = value - last > tol if tol > 0 else stays
        over = ~gains | ~stays if step < max_iter else torch.ones_like(value, dtype=torch.bool)
        if bool(over.any()):
            # Where the last step went down, the one before it is kept; where it went nowhere, nothing is.
            higher = over & stays
            found.put(climbing[higher], now, higher)
            lower = over & (value < last) & ~stays
            found.put(climbing[lower], before, lower)
            values[climbing[over]] = torch.where(value.isfinite(), torch.maximum(value, last), -math.inf)[over]
            steps[climbing[over]] = step - lower.long()[over]
            converged[climbing[over]] = ((~gains | ~stays) & value.isfinite())[over]
            if bool(over.all()):
                break
            rest = ~over
            climbing, now, after, value, last = climbing[rest], now[rest], after[rest], value[rest], last[rest]
        before, now, last = now, after, torch.maximum(value, last)
    return found, values, steps, converged


def _expansion_of_all(mixtures: Mixtures, data: Prepared) -> Expansion | None:
    """Return the features of features of data that are one chunk, to be written only once; None if they are more."""
    chunks = list(itertools.islice(data.chunks(), 2))
    if len(chunks) > 1:
        return None
    return Expansion(mixtures.kind, mixtures.means.shape[2], chunks[0][0].shape[1], like=mixtures.means)


def _step(
    mixtures: Mixtures, data: Prepared, ridge: Tensor | float, expansion: Expansion | None
) -> tuple[Mixtures, Tensor]:
    """Return all mixtures after an EM step, and their log-likelihoods before it, (R,)."""
    kind, means, factor = mixtures.kind, mixtures.means, mixtures.factor
    n_features = means.shape[2]
    log_determinants = _log_determinants(factor, kind, n_features)
    constant = mixtures.log_weights + log_determinants - data.log_volume - 0.5 * n_features * math.log(2 * math.pi)
    match kind:
        case "full":
            precisions = factor @ factor.mT
            quadratic, linear = quadratic_form(-0.5 * precisions), (precisions @ means[..., None])[..., 0]
        case "tied":
            quadratic, linear = means[..., :0], means @ factor @ factor.mT
        case "diag":
            quadratic, linear = -0.5 * factor.square(), factor.square() * means
        case "spherical":
            quadratic, linear = -0.5 * factor.square()[..., None], factor.square()[..., None] * means
    theta = torch.cat([quadratic, linear, (constant - 0.5 * (linear * means).sum(-1))[..., None]], -1)
    # A weight of exactly 0 is sound, and stays 0.
    sound = (constant.isfinite() | mixtures.log_weights.isneginf()).all(-1)
    if not bool(sound.all()):
        theta = torch.where(sound[:, None, None], theta, 0.0)
        constant = torch.where(sound[:, None], constant, 0.0)
    highest = constant.max() if kind != "tied" else None
    sums, total = sums_over_ranks(kind, theta, highest, data, expansion)
    products, first, counts = sums.split([sums.shape[2] - n_features - 1, n_features, 1], 2)
    counts = soft_counts(counts[..., 0])
    moved = first / counts[..., None]
    if kind == "tied":
        total = total - 0.5 * data.total_weight * ((data.scatter @ factor) * factor).sum((-1, -2))
    match kind:
        case "full":
            second = symmetric_products(products, n_features) / counts[..., None, None]
            covariances = second - moved[..., :, None] * moved[..., None, :] + ridge
            second = second.diagonal(dim1=-2, dim2=-1)
        case "tied":
            covariances = data.scatter - (counts[..., None] * moved).mT @ moved / data.total_weight + ridge
            second = data.scatter.diagonal()
        case "diag":
            second = products / counts[..., None]
            covariances = second - moved.square() + ridge
        case "spherical":
            second = products[..., 0] / counts / n_features
            covariances = second - moved.square().sum(-1) / n_features + ridge
    lost = torch.finfo(second.dtype).eps * (8 + min(data.n_samples, _TERMS)) * second
    log_weights = counts.log() - counts.sum(-1, keepdim=True).log()
    after = Mixtures(log_weights, moved, _factor(covariances, kind, lost), kind)
    return after, (total / data.total_weight).where(sound, -math.inf)


def _log_determinants(factor: Tensor, kind: CovarianceType, n_features: int) -> Tensor:
    match kind:
        case "full":
            return factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        case "tied":
            return factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)[:, None]
        case "diag":
            return factor.log().sum(-1)
        case "spherical":
            return n_features * factor.log()


def _factor(covariances: Tensor, kind: CovarianceType, lost: Tensor) -> Tensor:
    """Return the upper triangular factors of the precisions; NaN where a covariance is singular.

    What rounding decides is singular. `lost` is how much of each variance, (..., D) or (R, K), is rounding since the
    squared mean was subtracted.
    """
    if kind in ("diag", "spherical"):
        return torch.where(covariances > lost, covariances, math.nan).rsqrt()
    n_features = covariances.shape[-1]
    lower, failed = torch.linalg.cholesky_ex(covariances)
    eye = torch.eye(n_features, dtype=lower.dtype, device=lower.device)
    inverse: Tensor = torch.linalg.solve_triangular(lower, eye, upper=False)
    error = lost + n_features * torch.finfo(lower.dtype).eps * covariances.diagonal(dim1=-2, dim2=-1)
    # Where the errors are less than 1 in units of the covariance; what failed is NaN, or anything.
    sound = ((inverse.square() * error[..., None, :]).sum((-1, -2)) < 1) & (failed == 0)
    if not bool(sound.all()):
        inverse = torch.where(sound[..., None, None], inverse, math.nan)
    return inverse.mT
