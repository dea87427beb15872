"""EM of data so few that calls of torch would take longer than their arithmetic: the same formulas by NumPy.

The twin of `accumulate` and `maximise` in `toolkit.em.engine.fused` for one chunk. The quadratic features are written
once, so a step is two matrix products and some thirty calls of NumPy, whose products of so few rows take half of the
time of torch's.

N samples, D features, K components, F quadratic features, P free coordinates.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from toolkit.blocks import no_graph
from toolkit.em.covariance import Structure, soft_counts, structure_of
from toolkit.em.engine.fused import accumulate, error_of_distance, expansion_error, loses_digits, maximise
from toolkit.em.engine.samples import Prepared, expanded
from toolkit.em.gaussian import GaussianParameters

__all__ = ["SmallData", "SmallMixture", "is_small"]

# The most numbers in the features (F, N) and in the responsibilities (K, N). With more, products dominate a step.
_FEATURES = 2**19
_RESPONSIBILITIES = 2**16

# The most samples of one product for the sums: with more, products of few rows leave the cache, and take twice as long.
_SAMPLES = 2**10


@dataclass(frozen=True)
class SmallMixture:
    """A mixture in the coordinates of the pass, in arrays of float64; or R of them, with R as the first dimension.

    `log_weights` (K,), `means` (K, D); `factor`: that of the precisions, shaped by the structure.
    """

    log_weights: Any
    means: Any
    factor: Any
    structure: Structure

    @classmethod
    def of(cls, mixture: GaussianParameters) -> SmallMixture:
        """Return this mixture in arrays."""
        return cls(
            log_weights=_array(mixture.log_weights),
            means=_array(mixture.means),
            factor=_array(mixture.precisions_cholesky),
            structure=structure_of(mixture.covariance_type),
        )

    @classmethod
    def stack(cls, mixtures: Sequence[SmallMixture]) -> SmallMixture:
        """Return R mixtures of one structure as one."""
        return cls(
            log_weights=np.stack([one.log_weights for one in mixtures]),
            means=np.stack([one.means for one in mixtures]),
            factor=np.stack([one.factor for one in mixtures]),
            structure=mixtures[0].structure,
        )

    def __getitem__(self, which: Any) -> SmallMixture:
        """Return one or some of R mixtures."""
        return SmallMixture(self.log_weights[which], self.means[which], self.factor[which], self.structure)

    def as_gaussian(self) -> GaussianParameters:
        """Return this mixture in tensors."""
        log_weights, means, factor = map(torch.from_numpy, (self.log_weights, self.means, self.factor))
        return GaussianParameters(
            log_weights=log_weights, means=means, precisions_cholesky=factor, covariance_type=self.structure.name
        )

    def position(self) -> Any:
        """Return free coordinates (P,): the values of `to_unconstrained`, side by side; or (R, P)."""
        leading = self.log_weights.shape[:-1]
        leaves = (self.log_weights, self.means, self.structure.pack(self.factor))
        return np.concatenate([leaf.reshape(*leading, -1) for leaf in leaves], -1)

    def pack(self) -> Tensor:
        """Return free coordinates as a tensor."""
        return torch.from_numpy(self.position())

    def unpack(self, position: Tensor) -> SmallMixture:
        """Return the mixture of this shape at these coordinates (P,).

        Raises:
            ValueError: If a coordinate is not a number, or plus infinity. A weight may be 0.
        """
        values = _array(position)
        if not (values < math.inf).all():
            raise ValueError("A jump should lead to finite coordinates.")
        return self.at(values)

    def at(self, positions: Any) -> SmallMixture:
        """Return the mixture of this shape at these coordinates (P,), or R mixtures at (R, P)."""
        leading, (k, d) = positions.shape[:-1], self.means.shape[-2:]
        log_weights, coordinates = positions[..., :k], positions[..., k + k * d :]
        highest = log_weights.max(-1, keepdims=True)
        log_weights = log_weights - (highest + np.log(np.exp(log_weights - highest).sum(-1, keepdims=True)))
        each = () if self.structure.is_shared else (k,)
        packed: Any = coordinates.reshape(*leading, *each, *([-1] if self.structure.shape_of_one(d) else []))
        means = positions[..., k : k + k * d].reshape(*leading, k, d)
        return SmallMixture(log_weights, means, self.structure.unpack(packed, d), self.structure)


class SmallData:
    """Data of one chunk with their quadratic features, and the EM map of mixtures on them.

    Args:
        data: The data as samples, one chunk on the CPU (see `is_small`).
        structure: That of the covariances.
        n_components: Number of components, K.
        ridge: Added to every variance, or a matrix (D, D) that is added to every covariance.

    Attributes:
        structure: That of the covariances.
        weights: (N,), or None if all are 1.
        total_weight: The sum of the weights.
        ridge: (D, D), which is added to every covariance.
    """

    def __init__(self, data: Prepared, structure: Structure, n_components: int, ridge: Tensor | float) -> None:
        self._prepared, self.structure, self._scatter = data, structure, _array(data.scatter)
        self._ridge, self._added = ridge, _array(ridge) if isinstance(ridge, Tensor) else ridge
        ((z, weights),) = data.chunks()
        z = z.double()
        self._z, self.weights = _array(z), None if weights is None else weights.double().numpy()
        self.total_weight = data.total_weight
        self.ridge = self._added if isinstance(ridge, Tensor) else ridge * np.eye(len(z))
        self._features = _array(expanded(structure.quadratics(len(z), _FEATURES), z))
        self._joint = np.empty((n_components, z.shape[1]))

    def em(self, mixture: SmallMixture) -> tuple[SmallMixture, float]:
        """Return the mixture after one EM step, and the log-likelihood before it, nats per sample.

        Raises:
            ValueError: If a covariance becomes singular.
        """
        data, structure = self._prepared, self.structure
        distance = float(structure.squared_distances(mixture.factor, self._scatter).max())
        if loses_digits(distance):
            moments = accumulate(mixture.as_gaussian(), data)
            return SmallMixture.of(maximise(moments, data, structure.name, self._ridge)), float(moments.log_likelihood)
        with np.errstate(all="ignore"):
            sums, value = self._sums(mixture)
        if structure.is_shared:
            value -= 0.5 * self.total_weight * distance
        return self._maximised(sums), float(value / self.total_weight)

    def em_of_several(self, mixtures: SmallMixture) -> tuple[Any, Any, Any]:
        """Take an EM step of R mixtures: the sums of all are one product.

        Returns:
            The coordinates after it (R, P), NaN where a covariance becomes singular; the log-likelihoods before it
            (R,), nats per sample; and bounds of their rounding errors (R,).
        """
        n, total, structure = len(mixtures.means), self.total_weight, self.structure
        distances = np.asarray(structure.squared_distances(mixtures.factor, self._scatter)).reshape(n, -1).max(1)
        positions, values = mixtures.position(), np.full(n, math.nan)
        near = np.array([not loses_digits(distance) for distance in distances.tolist()])
        alone = (~near).nonzero()[0].tolist()
        if near.any():
            with np.errstate(all="ignore"):
                sums, found = self._sums(mixtures if near.all() else mixtures[near])
            found = found - 0.5 * total * distances[near] if structure.is_shared else found
            try:
                with np.errstate(all="ignore"):
                    positions[near], values[near] = self._maximised(sums).position(), found / total
            except ValueError:  # of some
                alone = list(range(n))
        for i in alone:
            positions[i] = math.nan
            with contextlib.suppress(ValueError):
                moved, values[i] = self.em(mixtures[i])
                positions[i] = moved.position()
        return positions, values, error_of_distance(torch.from_numpy(distances), torch.float64).numpy()

    def whitened(self, transposed: Any, means: Any) -> Any:
        """Return the samples in units of each component, (K, D, N), given transposed factors (K, D, D)."""
        found = transposed @ self._z
        found -= transposed @ means[:, :, None]
        return found

    @no_graph()
    def error(self, mixture: SmallMixture) -> float:
        """Return a bound of the rounding error of the log-likelihood, nats per sample."""
        factor = torch.from_numpy(mixture.factor)
        return float(expansion_error(factor, self.structure, self._prepared.scatter, torch.float64))

    def _sums(self, mixture: SmallMixture) -> tuple[Any, Any]:
        """Return sums of quadratic features by responsibility (..., K, F), and of log-densities (...), nats."""
        structure, means, features = self.structure, mixture.means, self._features
        quadratic, linear = structure.coefficients(mixture.factor, means)
        normaliser = 0.5 * means.shape[-1] * math.log(2 * math.pi)
        determinants: Any = structure.log_determinants(mixture.factor, means.shape[-1])
        constant = mixture.log_weights + (determinants[..., None] if structure.is_shared else determinants) - normaliser
        theta = np.concatenate([quadratic, linear, (constant - 0.5 * (linear * means).sum(-1))[..., None]], -1)
        out = self._joint if theta.ndim == 2 else None
        joint = np.matmul(theta.reshape(-1, theta.shape[-1]), features, out=out).reshape(*theta.shape[:-1], -1)
        peak = joint.max(-2)
        joint -= peak[..., None, :]
        np.exp(joint, out=joint)
        densities = joint.sum(-2)
        log_densities = np.log(densities) + peak
        joint *= (1 / densities if self.weights is None else self.weights / densities)[..., None, :]
        value = log_densities.sum(-1) if self.weights is None else log_densities @ self.weights
        rows, starts = joint.reshape(-1, joint.shape[-1]), range(0, joint.shape[-1], _SAMPLES)
        sums: Any = sum(rows[:, i : i + _SAMPLES] @ features[:, i : i + _SAMPLES].T for i in starts)
        return sums.reshape(*theta.shape[:-1], -1), value

    def _maximised(self, sums: Any) -> SmallMixture:
        """Return the M-step from sums of quadratic features (..., K, F)."""
        structure, n_features = self.structure, len(self._scatter)
        counts = soft_counts(sums[..., -1:])
        # An empty component is put at the centre.
        means: Any = np.where(sums[..., -1:] < counts, 0.0, sums[..., -n_features - 1 : -1] / counts)
        if structure.is_shared:
            second: Any = self.total_weight * self._scatter
        else:
            second = structure.second_moments(sums[..., : -n_features - 1], n_features)
        scatter = second - structure.products(counts * means, means)
        covariances = structure.estimate(scatter, counts.repeat(n_features, -1))
        log_weights = np.log(counts[..., 0] / counts.sum(-2))
        factor = structure.factor(structure.regularise(covariances, self._added))
        return SmallMixture(log_weights, means, factor, structure)


def _array(values: Tensor) -> Any:
    return values.contiguous().numpy()


def is_small(data: Prepared, structure: Structure, n_components: int) -> bool:
    """Return whether the data are one chunk in memory of this process, small enough for NumPy."""
    n_features = len(data.centre)
    n_quadratics = 0 if structure.is_shared else structure.n_parameters_of_one(n_features)
    most = min(_FEATURES // (n_quadratics + n_features + 1), _RESPONSIBILITIES // n_components)
    if data.group is not None or data.centre.device.type != "cpu" or not data.is_cached or data.n_samples > most:
        return False
    return len(list(data.chunks())) == 1
