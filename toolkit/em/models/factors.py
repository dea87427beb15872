r"""Mixtures of factor analysers: covariances of low rank plus noise, for too many features for a full covariance.

Given the component, :math:`x_n = \mu_k + \Lambda_k f + \epsilon` with q standard normal factors f and independent noise
of variances :math:`\Psi_k`, so the covariance is :math:`\Lambda_k \Lambda_k^\top + \Psi_k`. The covariance is never
formed: all formulas use the q x q matrix :math:`M_k = I + \Lambda_k^\top \Psi_k^{-1} \Lambda_k`.

N samples, D features, K components, q factors.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Self, get_args

import torch
from torch import Tensor

from toolkit._checks import choice, integer, number
from toolkit._tensors import bounded
from toolkit.blocks import no_graph, stop_gradient
from toolkit.em.components import Located
from toolkit.em.mixture import RESPONSIBILITIES, e_step, expectation, mean
from toolkit.em.models._common import (
    centres,
    check_shape,
    check_start,
    check_table,
    clamp_coordinates,
    is_wrapped,
    log_weights_of,
    partition,
    shares,
    standard_normal,
)

__all__ = ["FactorAnalysers", "NoiseType"]

NoiseType = Literal["diag", "tied", "isotropic"]

# Steps of subspace iteration for the start's loadings, and directions beyond those asked for.
_SUBSPACE_STEPS = 8
_SPARE_DIRECTIONS = 5

# Steps of the start that alternate between loadings and noise, and its least noise, as a share of a feature's variance.
# The likelihood has several maxima: on the standardised breast cancer data EM from the principal directions alone ends
# 0.95 nats below the maximum that is found after 20 steps.
_ALTERNATIONS = 20
_LEAST_NOISE = 1e-6


@dataclass(frozen=True, kw_only=True, eq=False)
class FactorAnalysers(Located):
    r"""A mixture of factor analysers, or of probabilistic principal component analysers.

    Attributes:
        log_weights: (K,), nats; the weights sum to 1.
        means: (K, D).
        loadings: (K, D, q), free up to a rotation of the factors.
        noise: Variances of the noise, positive: (K, D) for ``"diag"``, (D,) for ``"tied"``, (K,) for ``"isotropic"``.
        noise_type: ``"diag"``: one variance for each feature of each component (factor analysis). ``"tied"``: one for
            each feature, shared by the components. ``"isotropic"``: one for each component (probabilistic PCA).
        noise_floor: Lower bound of the M-step's estimates of `noise`.

    Raises:
        ValueError: If the type is unknown, the shapes do not fit together, or `noise_floor` is negative.

    References:
        Ghahramani & Hinton, "The EM algorithm for mixtures of factor analyzers", 1996, section 3. McLachlan, Peel &
        Bean, "Modelling high-dimensional data by mixtures of factor analyzers", 2003, section 3. Tipping & Bishop,
        "Mixtures of probabilistic principal component analyzers", 1999, appendix C.

    Example:
        >>> from toolkit.em.models import FactorAnalysers
        >>> one = FactorAnalysers(
        ...     log_weights=torch.zeros(1), means=torch.zeros(1, 2), loadings=torch.tensor([[[1.0], [2.0]]]),
        ...     noise=torch.ones(1), noise_type="isotropic")
        >>> one.covariances, one.log_joint(torch.zeros(1, 2)).exp() * 2 * torch.pi
        (tensor([[[2., 2.],
                 [2., 5.]]]), tensor([[0.4082]]))
    """

    loadings: Tensor
    noise: Tensor
    noise_type: NoiseType
    noise_floor: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_noise_type(self.noise_type)
        if self.loadings.ndim != 3:
            raise ValueError(f"`loadings` should have shape (K, D, q). Found {tuple(self.loadings.shape)}.")
        k, (_, d, q) = self.n_components, self.loadings.shape
        noise = {"diag": (k, d), "tied": (d,), "isotropic": (k,)}[self.noise_type]
        self._check_fields(means=(k, d), loadings=(k, d, q), noise=noise)
        object.__setattr__(self, "noise_floor", number("noise_floor", self.noise_floor, least=0))

    @classmethod
    @no_graph()
    def start(
        cls,
        x: Tensor,
        n_components: int,
        *,
        n_factors: int,
        noise_type: NoiseType = "diag",
        sample_weight: Tensor | None = None,
        noise_floor: float | None = None,
        generator: torch.Generator | None = None,
    ) -> Self:
        """Return a start: means by a few steps of k-means, loadings by the principal directions about them.

        Args:
            x: (N, D), floating point, finite.
            n_components: Number of components, K; at most N.
            n_factors: q, at most D.
            noise_type: As in the class.
            sample_weight: (N,), not negative. None: all 1.
            noise_floor: As in the class. None: a millionth of the least variance of a feature that is not constant.
            generator: Randomness. None is torch's global generator.

        Raises:
            TypeError: If `x` is not a real tensor.
            ValueError: If an argument is out of range, or all samples are the same.
        """
        n_components = check_start(x, n_components, sample_weight)
        check_table(x)
        check_noise_type(noise_type)
        n_factors = integer("n_factors", n_factors, 1, x.shape[1])
        labels, weights = partition(x, n_components, sample_weight, generator)
        hard = torch.nn.functional.one_hot(labels, n_components).to(x) * weights[:, None]
        share = weights / weights.sum()
        whole = share @ (x - share @ x).square()
        varies = whole > (4 * torch.finfo(x.dtype).eps * x.abs().amax(0)).square()
        if not bool(varies.any()):
            raise ValueError(
                f"`x` should hold different samples. Found {x[0].tolist()}, and no difference from it whose square is "
                "above rounding."
            )
        least = float(whole[varies].min())
        floor = 1e-6 * least if noise_floor is None else number("noise_floor", noise_floor, least=0)
        means = centres(x, hard)
        residuals = share.sqrt()[:, None] * (x - means[labels])
        variances = residuals.square().sum(0)
        loadings = _principal(residuals, n_factors, generator)
        noise = (variances - loadings.square().sum(1)).clamp(min=max(floor, 1e-3 * float(variances.mean())))
        if noise_type == "isotropic":
            noise = noise.mean()
        else:
            bound = (_LEAST_NOISE * variances).clamp(min=max(floor, _LEAST_NOISE * least))
            first = (variances.mean().expand_as(variances), variances)
            found = [_alternated(residuals, torch.maximum(one, bound), bound, n_factors, generator) for one in first]
            loadings, noise, _ = max(found, key=lambda one: one[2])
        return cls(
            log_weights=shares(hard.sum(0)),
            means=means,
            loadings=loadings.expand(n_components, -1, -1),
            noise=noise if noise_type == "tied" else noise.expand(n_components, *noise.shape),
            noise_type=noise_type,
            noise_floor=floor,
        )

    @property
    def n_factors(self) -> int:
        """Number of factors, q."""
        return self.loadings.shape[2]

    @property
    def n_parameters(self) -> int:
        """Number of free parameters: K - 1 weights, means, noise, loadings up to a rotation; at most that of full."""
        k, d, q = self.loadings.shape
        covariances = self.noise.numel() + k * (d * q - q * (q - 1) // 2)
        return k - 1 + k * d + min(covariances, k * d * (d + 1) // 2)

    @property
    def covariances(self) -> Tensor:
        """Covariances, (K, D, D), for inspection; no other method forms them."""
        return self.loadings @ self.loadings.mT + torch.diag_embed(self._noise)

    def check(self, x: Tensor) -> None:
        """Raise a ValueError unless `x` (N, D) is finite."""
        check_shape(x, self.n_features)
        check_table(x)

    def log_joint(self, x: Tensor) -> Tensor:
        r"""Return the log of weight times density, (N, K), nats.

        With the expected factors :math:`\hat f = M^{-1} \Lambda^\top \Psi^{-1} (x - \mu)`, the squared distance is
        :math:`|\Psi^{-1/2} (x - \mu - \Lambda \hat f)|^2 + |\hat f|^2`: a sum, without the
        cancellation in Woodbury's identity. The differences take (K, D, N) of memory.

        Args:
            x: (N, D).

        Raises:
            ValueError: If `x` does not have the features of the means.
        """
        whitened, scaled, factors, cholesky = self._infer(x)
        distances = (whitened - scaled @ factors).square().sum(1) + factors.square().sum(1)
        log_determinants = self._noise.log().sum(1) + 2 * cholesky.diagonal(dim1=1, dim2=2).log().sum(1)
        constant = self.log_weights - 0.5 * (log_determinants + self.n_features * math.log(2 * math.pi))
        return (constant[:, None] - 0.5 * distances).mT

    def e_step_of_factors(self, x: Tensor) -> tuple[Tensor, Tensor]:
        r"""Return mean :math:`\hat f_{nk}` and covariance :math:`M_k^{-1}` of the factors given the sample, blocked.

        Args:
            x: (N, D).

        Returns:
            (K, q, N) and (K, q, q), held constant by `em.responsibilities`.

        References:
            Ghahramani & Hinton, 1996, equations 2 and 3.
        """
        _, _, factors, cholesky = self._infer(x)
        return _held_factors(factors, cholesky)

    def complete_surrogate(self, x: Tensor, sample_weight: Tensor | None = None) -> Tensor:
        r"""Return the expected log-joint of samples, components **and factors**: the surrogate of both E-steps.

        With both posteriors held by the block, the gradient is that of the log-likelihood. `toolkit.em.surrogate`,
        which integrates over the factors, has the same gradient. The open block leaks minus the gradient of the
        entropies of components and factors.

        Args:
            x: (N, D).
            sample_weight: (N,): weights of the mean over the samples. None: all 1.

        Returns:
            Scalar, nats per sample, to be maximised.

        Raises:
            ValueError: If `sample_weight` has another shape.
        """
        responsibilities, _ = e_step(self, x)
        factors, covariance = self.e_step_of_factors(x)
        noise = self._noise
        residuals = x.mT - self.means[:, :, None] - self.loadings @ factors
        errors = (residuals.square() / noise[:, :, None]).sum(1)
        spread = ((self.loadings @ covariance) * self.loadings).sum(2) / noise
        of_factors = factors.square().sum(1) + covariance.diagonal(dim1=1, dim2=2).sum(1)[:, None]
        constant = self.log_weights - 0.5 * (noise.log() + spread).sum(1)
        constant = constant - 0.5 * (self.n_features + self.n_factors) * math.log(2 * math.pi)
        expected = (constant[:, None] - 0.5 * (errors + of_factors)).mT
        return mean(expectation(responsibilities, expected), sample_weight)

    def m_step(self, x: Tensor, responsibilities: Tensor) -> Self:
        r"""Return weighted means, then loadings and noise by one EM step over the factors, about these means.

        Both raise :math:`\sum_n r_{nk} a_{nk}`, with the factors integrated out, so the likelihood never falls (AECM).
        The expected factors use the loadings and noise before the step. A component without samples keeps its
        parameters.

        With :math:`g` the factors' means and :math:`N_k = \sum_n r_{nk}`:
        :math:`\Lambda = (\sum r (x - \mu) g^\top)(\sum r g g^\top + N_k M^{-1})^{-1}`, and :math:`\Psi` is the diagonal
        of :math:`\frac{1}{N_k} \sum r (x - \mu - \Lambda g)(x - \mu - \Lambda g)^\top + \Lambda M^{-1} \Lambda^\top`.

        Args:
            x: (N, D).
            responsibilities: (N, K).

        Raises:
            ValueError: If the shapes do not fit together, or noise vanishes without a floor.

        References:
            McLachlan, Peel & Bean, 2003, section 3 (two cycles). Rubin & Thayer, "EM algorithms for ML factor
            analysis", 1982, equations 5 and 6.
        """
        counts = responsibilities.sum(0)
        empty = counts <= 0
        share = (responsibilities / torch.where(empty, 1.0, counts)).mT  # (K, N)
        means = torch.where(empty[:, None], self.means, centres(x, responsibilities))
        factors, covariance = dataclasses.replace(self, means=means).e_step_of_factors(x)
        differences = x.mT - means[:, :, None]
        weighted = share[:, None] * factors
        second = weighted @ factors.mT + covariance
        loadings = torch.linalg.solve(second, weighted @ differences.mT).mT
        errors = (share[:, None] * (differences - loadings @ factors).square()).sum(2)
        variances = errors + ((loadings @ covariance) * loadings).sum(2)
        match self.noise_type:
            case "diag":
                noise = torch.where(empty[:, None], self.noise, variances.clamp(min=self.noise_floor))
            case "tied":
                noise = (counts[:, None] * variances).sum(0) / counts.sum()
                noise = noise.clamp(min=self.noise_floor)
            case "isotropic":
                noise = torch.where(empty, self.noise, variances.mean(1).clamp(min=self.noise_floor))
        _raise_without_noise(noise)
        return dataclasses.replace(
            self,
            log_weights=shares(counts),
            means=means,
            loadings=torch.where(empty[:, None, None], self.loadings, loadings),
            noise=noise,
        )

    def unconstrained(self) -> dict[str, Tensor]:
        """Return ``log_weights``, ``means``, ``loadings`` and ``log_noise``, in the shapes of the attributes."""
        return {
            "log_weights": clamp_coordinates(self.log_weights),
            "means": self.means,
            "loadings": self.loadings,
            "log_noise": self.noise.log(),
        }

    def with_unconstrained(self, values: Mapping[str, Tensor]) -> Self:
        """Return the mixture at these coordinates."""
        return dataclasses.replace(
            self,
            log_weights=log_weights_of(values),
            means=values["means"],
            loadings=values["loadings"],
            noise=bounded(values["log_noise"].exp(), self.noise_floor),
        )

    @no_graph()
    def sample(self, n: int, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Draw `n` samples (n, D), and their components (n,)."""
        labels = self._labels(n, generator)
        factors = standard_normal((n, self.n_factors, 1), self.means, generator)
        noise = standard_normal((n, self.n_features), self.means, generator) * self._noise.sqrt()[labels]
        return self.means[labels] + (self.loadings[labels] @ factors)[..., 0] + noise, labels

    @property
    def _noise(self) -> Tensor:
        """Variances of the noise, (K, D), for every type."""
        noise = self.noise[:, None] if self.noise_type == "isotropic" else self.noise
        return noise.expand(self.n_components, self.n_features)

    def _infer(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        r"""Return :math:`\Psi^{-1/2} (x - \mu)` (K, D, N), :math:`\Psi^{-1/2} \Lambda`, factors (K, q, N), M's root."""
        check_shape(x, self.n_features)
        root = self._noise.rsqrt()[:, :, None]
        whitened = root * (x.mT.contiguous() - self.means[:, :, None])
        scaled = root * self.loadings
        identity = torch.eye(self.n_factors, dtype=scaled.dtype, device=scaled.device)
        cholesky = torch.linalg.cholesky(scaled.mT @ scaled + identity)
        return whitened, scaled, torch.cholesky_solve(scaled.mT @ whitened, cholesky), cholesky


def _held_factors(factors: Tensor, cholesky: Tensor) -> tuple[Tensor, Tensor]:
    """Return means and covariance of the factors, blocked, from the means and the Cholesky root of their precision."""
    return stop_gradient((factors, torch.cholesky_inverse(cholesky)), RESPONSIBILITIES)


def check_noise_type(noise_type: str) -> None:
    """Raise a ValueError unless the type is known."""
    choice("noise_type", noise_type, get_args(NoiseType))


def _principal(residuals: Tensor, q: int, generator: torch.Generator | None) -> Tensor:
    """Return loadings (D, q) along the principal directions of residuals (N, D)."""
    total, d = residuals.square().sum(), residuals.shape[1]
    directions, variances = _subspace(residuals, _basis(residuals, q, generator), _SUBSPACE_STEPS)
    rest = (total - variances.sum()).clamp(min=0.0) / max(1, d - len(variances))
    scale = (variances[:q] - rest).clamp(min=0.01 * total / d)
    return directions[:, :q] * scale.sqrt()


def _alternated(
    residuals: Tensor, noise: Tensor, least: Tensor, q: int, generator: torch.Generator | None
) -> tuple[Tensor, Tensor, float]:
    """Return loadings (D, q), noise (D,), and twice their log-likelihood up to a constant.

    The loadings are the most likely ones given the noise, and the noise the rest of the variances, in turn.

    Args:
        residuals: (N, D); their products are the covariance.
        noise: (D,): the first noise.
        least: (D,): the least noise.
        q: The number of factors.
        generator: Randomness of the first directions.

    References:
        Jöreskog, "Some contributions to maximum likelihood factor analysis", 1967, section 3.
    """
    basis = _basis(residuals, q, generator)
    variances, value = residuals.square().sum(0), -math.inf
    for step in range(_ALTERNATIONS):
        whitened = residuals / noise.sqrt()
        basis, sizes = _subspace(whitened, basis, 2 if step else _SUBSPACE_STEPS)
        kept = sizes[:q].clamp(min=1.0)
        value = float(-noise.log().sum() - (kept.log() + 1 - kept).sum() - whitened.square().sum())
        loadings = noise.sqrt()[:, None] * basis[:, :q] * (kept - 1).sqrt()
        before, noise = noise, torch.maximum(variances - loadings.square().sum(1), least)
    return loadings, before, value


def _basis(residuals: Tensor, q: int, generator: torch.Generator | None) -> Tensor:
    """Return random directions (D, q and some to spare)."""
    d = residuals.shape[1]
    return standard_normal((d, min(d, q + _SPARE_DIRECTIONS)), residuals, generator)


def _subspace(residuals: Tensor, basis: Tensor, n_steps: int) -> tuple[Tensor, Tensor]:
    """Return orthonormal directions (D, M), and the variances along them (M,), largest first: subspace iteration."""
    for _ in range(n_steps):
        basis, _ = torch.linalg.qr(residuals.mT @ (residuals @ basis) + 1e-12 * basis)
    projected = residuals @ basis
    variances, rotation = torch.linalg.eigh(projected.mT @ projected)
    return (basis @ rotation).flip(1), variances.flip(0)


def _raise_without_noise(noise: Tensor) -> None:
    # Under torch.func no value can be read; the results are infinite there.
    if is_wrapped(noise) or bool((noise > 0).all()):
        return
    raise ValueError(
        "`noise` should stay positive. Found a variance of 0: a constant feature, or too few distinct samples. A "
        "`noise_floor`, fewer components or fewer factors help."
    )
