r"""Many starts of one Gaussian mixture at once: EM steps of all of them in one pass.

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
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from toolkit.blocks import no_graph
from toolkit.em.covariance import Structure, soft_counts, structure_of
from toolkit.em.engine.acceleration import Climb, ClimbOptions
from toolkit.em.engine.fused import Expansion, expansion_error
from toolkit.em.engine.ranks import sums_over_ranks
from toolkit.em.engine.rounding import leaders
from toolkit.em.engine.samples import Prepared
from toolkit.em.engine.together import climb_together
from toolkit.em.gaussian import GaussianParameters

__all__ = ["NARROWEST", "Heat", "Mixtures", "climb_starts", "heats"]

_Floats: TypeAlias = npt.NDArray[np.float64]

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

    def pack(self) -> Tensor:
        """Return free coordinates (R, P): those of each mixture side by side."""
        leaves = (self.log_weights, self.means, self.structure.pack(self.factor))
        return torch.cat([leaf.reshape(len(self.means), -1) for leaf in leaves], 1)

    def at(self, positions: Tensor) -> Mixtures:
        """Return mixtures of this kind at these coordinates."""
        _, k, d = self.means.shape
        log_weights, means, coordinates = positions.split([k, k * d, positions.shape[1] - k - k * d], 1)
        shape = self.structure.pack(self.factor).shape[1:]
        return Mixtures(
            log_weights=log_weights,
            means=means.unflatten(1, (k, d)),
            factor=self.structure.unpack(coordinates.reshape(-1, *shape), d),
            structure=self.structure,
        )

    def __getitem__(self, which: Tensor) -> Mixtures:
        """Return some of the mixtures."""
        return Mixtures(self.log_weights[which], self.means[which], self.factor[which], self.structure)


@dataclass(frozen=True)
class Heat:
    """A start, and its result in the joint iteration; a singular covariance has log-likelihood minus infinity."""

    start: GaussianParameters
    reached: Climb[GaussianParameters]


@no_graph()
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
        The results to follow: by likelihood, the highest first, then the singular ones. Empty if all became singular.
    """
    plain = options.accelerate == "none"
    mixtures, values, steps, converged = climb_starts(
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
def climb_starts(
    mixtures: Mixtures, data: Prepared, *, tol: float, max_iter: int, reg_covar: float
) -> tuple[Mixtures, Tensor, Tensor, Tensor]:
    """Take EM steps from every start until each gains too little.

    A start that leads to a singular covariance ends with a log-likelihood of minus infinity.

    Returns:
        The mixtures, their log-likelihoods (R,) in nats per sample, the steps taken (R,), and whether each converged.
    """
    ridge, expansion, device = data.ridge(reg_covar), _expansion_of_all(mixtures, data), mixtures.means.device

    def em(_: object, positions: _Floats) -> tuple[_Floats, _Floats, _Floats]:
        now = mixtures.at(torch.from_numpy(positions).to(device))
        after, values = _step(now, data, ridge, expansion)
        errors = expansion_error(now.factor, now.structure, data.scatter, torch.float64)
        return after.pack().cpu().numpy(), values.cpu().numpy(), errors.cpu().numpy()

    first = mixtures.pack().cpu().numpy()
    found = climb_together(em, first, accelerate="none", tol=tol, limits=np.full(len(first), max_iter))
    values = np.where(found.failed, -math.inf, [history[-1] for history in found.histories])
    positions, highest, steps, converged = (
        torch.from_numpy(result).to(device) for result in (found.positions, values, found.n_iter, found.converged)
    )
    return mixtures.at(positions), highest, steps, converged


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
