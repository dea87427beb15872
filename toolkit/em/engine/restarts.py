r"""Many starts of one Gaussian mixture at once: seeding, Lloyd's steps and EM steps of all of them in one pass.

For small data the overhead of its calls dominates a step; for large data the matrix products of many components are
more efficient than those of few. So R starts together are much cheaper than R starts in turn.

Everything is in the coordinates of the pass (`toolkit.em.engine.samples`), in which EM is the same.

N samples, D features, K components, R starts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from toolkit.blocks import no_graph
from toolkit.em.covariance import Structure, soft_counts, structure_of
from toolkit.em.engine.acceleration import Climb, ClimbOptions
from toolkit.em.engine.fused import Expansion, expansion_error
from toolkit.em.engine.ranks import sums_over_ranks
from toolkit.em.engine.rounding import ROUNDING, leaders
from toolkit.em.engine.samples import Prepared
from toolkit.em.gaussian import GaussianParameters

__all__ = ["NARROWEST", "Heat", "Mixtures", "climb_together", "heats"]

# A component is degenerate if its variance in some direction is less than this, in units of the average component's.
NARROWEST = 1e-3

# Starts iterated together are compared when they gain less than `HEATS`, or after `HEAT_STEPS` steps.
HEATS = 1e-4
HEAT_STEPS = 100

# The most terms of a sum whose errors add up, about those of a chunk. On copies of one sample, among 10 to 1e6 samples
# of 1 to 16 features, second moments and squared means were at most 4 roundoffs apart, or a sixth of the number of
# samples, or a tenth of this.
_TERMS = 2**16


@dataclass(frozen=True)
class Mixtures:
    """R mixtures in the coordinates of the pass, float64.

    `log_weights` (R, K), `means` (R, K, D); `factor`: factors of the precisions, R times the shape of the structure.
    """

    log_weights: Tensor
    means: Tensor
    factor: Tensor
    structure: Structure

    @classmethod
    def of(cls, starts: list[GaussianParameters], data: Prepared) -> Mixtures:
        """Return these mixtures of samples in the coordinates of the pass."""
        factor = torch.stack([start.precisions_cholesky.double() for start in starts])
        return cls(
            log_weights=torch.stack([start.log_weights.double() for start in starts]),
            means=torch.stack([data.to_frame(start.means.double()) for start in starts]),
            factor=data.factor_to_frame(factor),
            structure=structure_of(starts[0].covariance_type),
        )

    def one(self, index: int, data: Prepared) -> GaussianParameters:
        """Return one mixture, as a mixture of samples."""
        return GaussianParameters(
            log_weights=self.log_weights[index],
            means=data.from_frame(self.means[index]),
            precisions_cholesky=data.factor_from_frame(self.factor[index]),
            covariance_type=self.structure.name,
        )

    def narrowest(self) -> Tensor:
        """Return the least variance of a component in any direction, in units of the components' average: (R,).

        The result does not depend on the coordinates. A value far below 1 means a degenerate component on a few
        samples.
        """
        return self.structure.narrowest(self.log_weights.exp(), self.factor).amin(-1)

    def copy(self) -> Mixtures:
        """Return mixtures that `put` may change."""
        return Mixtures(self.log_weights.clone(), self.means.clone(), self.factor.clone(), self.structure)

    def put(self, places: Tensor, others: Mixtures, which: Tensor) -> None:
        """Replace the mixtures at `places` by others."""
        self.log_weights[places] = others.log_weights[which]
        self.means[places] = others.means[which]
        self.factor[places] = others.factor[which]

    def __getitem__(self, which: Tensor) -> Mixtures:
        """Return some of the mixtures."""
        return Mixtures(self.log_weights[which], self.means[which], self.factor[which], self.structure)


@dataclass(frozen=True)
class Heat:
    """A start, and its result in the joint iteration; a singular covariance has log-likelihood minus infinity."""

    start: GaussianParameters
    reached: Climb[GaussianParameters]


def heats(
    starts: list[GaussianParameters],
    data: Prepared,
    options: ClimbOptions,
    *,
    are_sound: Callable[[Mixtures], list[bool]],
    keep: int,
    reg_covar: float,
) -> list[Heat]:
    """Take plain EM steps from all starts together, and return the points to continue from.

    The likelihood of a degenerate component has no bound and no meaning: such results come last. With plain steps only
    the best result is returned; otherwise the best `keep`, after enough steps to tell them from most. Starts that
    became singular are returned as well: the joint iteration uses expansions, which are too imprecise for very narrow
    components; a fit from one start takes differences from the means there.

    Args:
        starts: R mixtures of one structure.
        data: The data.
        options: The options of the fits that follow.
        are_sound: Takes several mixtures to the mask of those without a degenerate component.
        keep: The most results to go on from, where steps are accelerated.
        reg_covar: Added to every variance.

    Returns:
        The results to go on from, the highest likelihood first, then those that became singular. None if all did.
    """
    plain = options.accelerate == "none"
    mixtures, values, steps, converged = climb_together(
        Mixtures.of(starts, data),
        data,
        tol=options.tol if plain else max(options.tol, HEATS),
        max_iter=options.max_iter if plain else min(options.max_iter, HEAT_STEPS),
        reg_covar=reg_covar,
    )

    def heat(i: int) -> Heat:
        value = float(values[i])
        return Heat(starts[i], Climb(mixtures.one(i, data), value, bool(converged[i]), int(steps[i]), (value,)))

    alive = values.isfinite().nonzero()[:, 0]
    if not len(alive):
        return []
    merits = list(zip(are_sound(mixtures[alive]), values[alive].tolist(), strict=True))
    best = [int(alive[place]) for place in leaders(merits, data.dtype, 1 if plain else keep)]
    return [heat(i) for i in [*best, *values.isneginf().nonzero()[:, 0].tolist()]]


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
            # Falls within rounding do not count, as in `climb`.
            error = expansion_error(now.factor, now.structure, data.scatter, torch.float64)
            stays = stays | (value >= last - error.maximum(ROUNDING[torch.float64] * (1 + last.abs())))
        gains = value - last > tol if tol > 0 else stays
        over = ~gains | ~stays if step < max_iter else torch.ones_like(value, dtype=torch.bool)
        if bool(over.any()):
            # After a fall the point before it is kept; after a step without a value nothing is.
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
    """Return the expansion into quadratic features if the data are one chunk, to write them only once, else None."""
    chunks = list(itertools.islice(data.chunks(), 2))
    if len(chunks) > 1:
        return None
    return Expansion(mixtures.structure, mixtures.means.shape[2], chunks[0][0].shape[1], like=mixtures.means)


def _step(
    mixtures: Mixtures, data: Prepared, ridge: Tensor | float, expansion: Expansion | None
) -> tuple[Mixtures, Tensor]:
    """Return all mixtures after an EM step, and their log-likelihoods before it, (R,)."""
    structure, means, factor = mixtures.structure, mixtures.means, mixtures.factor
    n_starts, _, n_features = means.shape
    log_determinants = structure.log_determinants(factor, n_features).view(n_starts, -1)
    constant = mixtures.log_weights + log_determinants - data.log_volume - 0.5 * n_features * math.log(2 * math.pi)
    quadratic, linear = structure.coefficients(factor, means)
    theta = torch.cat([quadratic, linear, (constant - 0.5 * (linear * means).sum(-1))[..., None]], -1)
    # A weight of exactly 0 is sound, and stays 0.
    sound = (constant.isfinite() | mixtures.log_weights.isneginf()).all(-1)
    if not bool(sound.all()):
        theta = torch.where(sound[:, None, None], theta, 0.0)
        constant = torch.where(sound[:, None], constant, 0.0)
    highest = constant.max() if not structure.is_shared else None
    sums, total = sums_over_ranks(structure, theta, highest, data, expansion)
    quadratic, first, counts = sums.split([sums.shape[2] - n_features - 1, n_features, 1], 2)
    counts = soft_counts(counts)
    moved = first / counts
    if structure.is_shared:
        total = total - 0.5 * data.total_weight * structure.squared_distances(factor, data.scatter)
        second = data.total_weight * data.scatter
    else:
        second = structure.second_moments(quadratic, n_features)
    seen = counts.expand(means.shape)
    scatter = second - structure.products(counts * moved, moved)
    covariances = structure.estimate(scatter, seen) + ridge
    second = structure.estimate(second, seen)
    second = second.diagonal(dim1=-2, dim2=-1) if structure.is_matrix else second
    lost = torch.finfo(second.dtype).eps * (8 + min(data.n_samples, _TERMS)) * second
    log_weights = (counts.log() - counts.sum(1, keepdim=True).log())[..., 0]
    after = Mixtures(log_weights, moved, structure.factor_or_nan(covariances, lost), structure)
    return after, (total / data.total_weight).where(sound, -math.inf)
