r"""Mixtures of Student's t: heavy tails, by a second latent variable that scales each sample's covariance.

Given the component, :math:`u_{nk} \sim \mathrm{Gamma}(\nu_k / 2, \nu_k / 2)` and
:math:`x_n \sim \mathcal N(\mu_k, \Sigma_k / u_{nk})`. The E-step weights the samples twice: by responsibilities, and
by the expected :math:`u_{nk}`, which is small for an outlier. The block `em.responsibilities` holds both constant.

N samples, D features, K components.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Self

import torch
from torch import Tensor
from torch.special import polygamma

from toolkit._checks import choice, number
from toolkit._random import device_of
from toolkit._tensors import tensors
from toolkit.blocks import no_graph, stop_gradient
from toolkit.em.components import Located
from toolkit.em.covariance import Structure, structure_of
from toolkit.em.gaussian import GaussianParameters, from_unconstrained, m_step, to_unconstrained
from toolkit.em.mixture import RESPONSIBILITIES, e_step, expectation, mean
from toolkit.em.models._common import (
    centres,
    check_shape,
    check_start,
    check_table,
    clamp_coordinates,
    is_wrapped,
    partition,
    shares,
    standard_normal,
)

__all__ = ["ScatterType", "StudentMixture"]

ScatterType = Literal["full", "diag"]

# The range of estimated degrees of freedom. Below 1, the Cauchy distribution, a component that narrows onto a few
# samples keeps tails heavy enough for all others. At the upper end the density is a Gaussian's to about D^2 / 10^6.
_LEAST_DEGREES, _MOST_DEGREES = 1.0, 1e6

_NEWTON_STEPS = 60

# From here on, half the degrees of freedom are large enough for Stirling's series to be exact to rounding.
_STIRLING = 32.0


@dataclass(frozen=True, kw_only=True, eq=False)
class StudentMixture(Located):
    r"""A mixture of multivariate Student's t distributions.

    .. math:: a_{nk} = \log \pi_k + \log \frac{\Gamma(\frac{\nu_k + D}{2})}{\Gamma(\frac{\nu_k}{2})}
        - \frac D2 \log \pi \nu_k + \log|P_k| - \frac{\nu_k + D}{2} \log(1 + \delta_{nk} / \nu_k),
        \quad \delta_{nk} = |P_k^\top (x_n - \mu_k)|^2

    Attributes:
        log_weights: (K,), nats; the weights sum to 1.
        means: (K, D); where :math:`\nu \le 1` the component has a centre but no mean.
        precisions_cholesky: Upper triangular :math:`P` with :math:`\Sigma^{-1} = P P^\top`, (K, D, D); for diag (K, D).
        degrees_of_freedom: (K,), positive; infinite for a Gaussian component.
        covariance_type: ``"full"`` or ``"diag"``.
        estimate_degrees: Whether the M-step estimates `degrees_of_freedom`, from 1 to a million.
        reg_covar: Added to the diagonal of the scatter by the M-step. 0 is maximum likelihood.

    Raises:
        ValueError: If the type is unknown, the shapes do not fit together, or `reg_covar` is negative.

    References:
        Peel & McLachlan, "Robust mixture modelling using the t distribution", 2000, section 3.
        Liu & Rubin, "ML estimation of the t distribution using EM and its extensions, ECM and ECME", 1995, section 4.

    Example:
        >>> from toolkit.em.models import StudentMixture
        >>> one = StudentMixture.from_scatters(
        ...     weights=torch.ones(1), means=torch.zeros(1, 1), scatters=torch.ones(1, 1),
        ...     degrees_of_freedom=torch.ones(1), covariance_type="diag")
        >>> one.log_joint(torch.tensor([[0.0], [1.0]])).exp() * torch.pi
        tensor([[1.0000],
                [0.5000]])
    """

    precisions_cholesky: Tensor
    degrees_of_freedom: Tensor
    covariance_type: ScatterType
    estimate_degrees: bool = True
    reg_covar: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        choice("covariance_type", self.covariance_type, ("full", "diag"))
        k, d = self.n_components, self.means.shape[1]
        factor = self._structure.shape(k, d)
        self._check_fields(means=(k, d), precisions_cholesky=factor, degrees_of_freedom=(k,))
        number("reg_covar", self.reg_covar, least=0)

    @classmethod
    def from_scatters(
        cls,
        *,
        weights: Tensor,
        means: Tensor,
        scatters: Tensor,
        degrees_of_freedom: Tensor,
        covariance_type: ScatterType,
        estimate_degrees: bool = True,
        reg_covar: float = 0.0,
    ) -> Self:
        """Return the mixture with these weights (K,), means (K, D) and scatters, (K, D, D) or (K, D).

        Raises:
            ValueError: If a scatter is not positive definite, degrees of freedom are not positive, or the shapes do
                not fit together.
        """
        tensors(degrees_of_freedom=degrees_of_freedom, scatters=scatters)
        if not bool((degrees_of_freedom > 0).all()):
            raise ValueError(f"`degrees_of_freedom` should be positive. Found {degrees_of_freedom.tolist()}.")
        gaussian = GaussianParameters.from_covariances(
            weights=weights, means=means, covariances=scatters, covariance_type=covariance_type
        )
        return cls(
            log_weights=gaussian.log_weights,
            means=means,
            precisions_cholesky=gaussian.precisions_cholesky,
            degrees_of_freedom=degrees_of_freedom,
            covariance_type=covariance_type,
            estimate_degrees=estimate_degrees,
            reg_covar=reg_covar,
        )

    @classmethod
    @no_graph()
    def start(
        cls,
        x: Tensor,
        n_components: int,
        *,
        covariance_type: ScatterType = "full",
        degrees_of_freedom: float | None = None,
        sample_weight: Tensor | None = None,
        reg_covar: float = 1e-6,
        generator: torch.Generator | None = None,
    ) -> Self:
        """Return a start: means by a few steps of k-means, and one common scatter, that of the samples about them.

        For k-means, features are clipped to about the range of nine tenths of their values; otherwise outliers would
        form clusters.

        Args:
            x: (N, D), floating point, finite.
            n_components: Number of components, K; at most N.
            covariance_type: ``"full"`` or ``"diag"``.
            degrees_of_freedom: One fixed value for all components. None: estimated, starting at 10.
            sample_weight: (N,), not negative. None: all 1.
            reg_covar: As in the class, in the data's units squared.
            generator: Randomness. None is torch's global generator.

        Raises:
            TypeError: If `x` is not a real tensor.
            ValueError: If an argument is out of range, or a scatter is singular.
        """
        n_components = check_start(x, n_components, sample_weight)
        check_table(x)
        if degrees_of_freedom is not None:
            degrees_of_freedom = number("degrees_of_freedom", degrees_of_freedom, above=0, infinite=True)
        reg_covar = number("reg_covar", reg_covar, least=0)
        labels, weights = partition(_clipped(x), n_components, sample_weight, generator)
        hard = torch.nn.functional.one_hot(labels, n_components).to(x) * weights[:, None]
        about = centres(x, hard)
        one = m_step(x - about[labels], weights[:, None], covariance_type=covariance_type, reg_covar=reg_covar)
        return cls(
            log_weights=shares(hard.sum(0)),
            means=about,
            precisions_cholesky=one.precisions_cholesky.expand(n_components, *one.precisions_cholesky.shape[1:]),
            degrees_of_freedom=x.new_full((n_components,), degrees_of_freedom or 10.0),
            covariance_type=covariance_type,
            estimate_degrees=degrees_of_freedom is None,
            reg_covar=reg_covar,
        )

    @property
    def n_parameters(self) -> int:
        """Number of free parameters: K - 1 weights, means, scatters, and degrees of freedom if they are estimated."""
        k, d = self.means.shape
        return k - 1 + k * (d + self.estimate_degrees) + self._structure.n_parameters(k, d)

    @property
    def scatters(self) -> Tensor:
        r"""The :math:`\Sigma_k`, (K, D, D) or (K, D). The covariance is :math:`\nu / (\nu - 2)` times it."""
        return self._gaussian.covariances

    def check(self, x: Tensor) -> None:
        """Raise a ValueError unless `x` (N, D) is finite."""
        check_shape(x, self.n_features)
        check_table(x)

    def check_jump(self) -> None:
        """Raise a ValueError unless the scatters are those of an M-step, at least `reg_covar` in every direction."""
        self._structure.check_least(self.precisions_cholesky, self.reg_covar)

    def distances(self, x: Tensor) -> Tensor:
        r"""Return :math:`\delta_{nk}`, squared distances in units of the scatter: (N, K)."""
        check_shape(x, self.n_features)
        differences = x.mT.contiguous() - self.means[:, :, None]
        return self._structure.whiten(self.precisions_cholesky, differences).square().sum(1).mT

    def log_joint(self, x: Tensor) -> Tensor:
        """Return the log of weight times density, (N, K), nats.

        Args:
            x: (N, D).

        Raises:
            ValueError: If `x` does not have the features of the means.
        """
        distances = self.distances(x)
        half = 0.5 * self.n_features
        constant = self.log_weights + self._gaussian.log_determinants - half * math.log(2 * math.pi)
        infinite = self.degrees_of_freedom.isinf()
        degrees = self._finite_degrees
        constant = constant + _log_normaliser(degrees / 2, half).masked_fill(infinite, 0.0)
        tail = (degrees / 2 + half) * (distances / degrees).log1p()
        return constant - torch.where(infinite, 0.5 * distances, tail)

    def e_step_of_scales(self, x: Tensor) -> tuple[Tensor, Tensor]:
        r"""Return the expectations of :math:`u_{nk}` and :math:`\log u_{nk}` given sample and component, blocked.

        With :math:`\alpha = (\nu + D) / 2` and :math:`\beta = (\nu + \delta) / 2` the expectations are
        :math:`\alpha / \beta` and :math:`\psi(\alpha) - \log \beta`; 1 and 0 for a Gaussian component.

        Args:
            x: (N, D).

        Returns:
            Two tensors (N, K), held constant by `em.responsibilities`.

        References:
            Peel & McLachlan, 2000, equations 17 and 20.
        """
        return _expected_scales(self.distances(x), self.degrees_of_freedom, self.n_features)

    def complete_surrogate(self, x: Tensor, sample_weight: Tensor | None = None) -> Tensor:
        r"""Return the expected log-joint of samples, components **and scales**: the surrogate of both E-steps.

        .. math:: \frac1N \sum_{nk} \bar r_{nk} \, \mathrm E_{u | x_n, k}
            \left[\log \pi_k \, \mathcal N(x_n | \mu_k, \Sigma_k / u) \, \mathrm{Gamma}(u | \nu_k/2, \nu_k/2)\right]

        With both posteriors held by the block, the gradient is that of the log-likelihood. `toolkit.em.surrogate`,
        which integrates over the scales, has the same gradient. The open block leaks minus the gradient of the
        entropies of components and scales.

        Args:
            x: (N, D).
            sample_weight: (N,): weights of the mean over the samples. None: all 1.

        Returns:
            Scalar, nats per sample, to be maximised.

        Raises:
            ValueError: If `sample_weight` has another shape.
        """
        responsibilities, _ = e_step(self, x)
        scales, log_scales = self.e_step_of_scales(x)
        half, degrees = self.n_features / 2, self._finite_degrees
        normal = self.log_weights + self._gaussian.log_determinants - half * math.log(2 * math.pi)
        normal = normal + half * log_scales - 0.5 * scales * self.distances(x)
        shape = degrees / 2
        gamma = torch.xlogy(shape, shape) - shape.lgamma() + (shape - 1) * log_scales - shape * scales
        expected = normal + gamma.masked_fill(self.degrees_of_freedom.isinf(), 0.0)
        return mean(expectation(responsibilities, expected), sample_weight)

    def m_step(self, x: Tensor, responsibilities: Tensor) -> Self:
        r"""Return means and scatters by one EM step over the scales, then the best degrees of freedom given these.

        Means and scatters are weighted by :math:`r_{nk} u_{nk}`, and divided by the sum of these weights (not of
        :math:`r_{nk}`: PX-EM, which is faster). Degrees of freedom maximise :math:`\sum_n r_{nk} a_{nk}` itself, with
        the scales integrated out (ECME). Both steps raise this sum, so the likelihood never falls. The expected scales
        use the parameters before the step. A component without samples keeps its parameters.

        Args:
            x: (N, D).
            responsibilities: (N, K).

        Raises:
            ValueError: If the shapes do not fit together, or a scatter is singular.

        References:
            Liu & Rubin, 1995, section 4 (ECME). Liu, Rubin & Wu, "Parameter expansion to accelerate EM: the PX-EM
            algorithm", 1998, section 4.2.
        """
        counts = responsibilities.sum(0)
        empty = counts <= 0
        # The result of an empty component is discarded, but must not be singular.
        weights = torch.where(empty, 1.0, responsibilities * self.e_step_of_scales(x)[0])
        gaussian = m_step(x, weights, covariance_type=self.covariance_type, reg_covar=self.reg_covar)
        factors = self.precisions_cholesky
        found = dataclasses.replace(
            self,
            log_weights=shares(counts),
            means=torch.where(empty[:, None], self.means, gaussian.means),
            precisions_cholesky=torch.where(
                empty.view(-1, *[1] * (factors.ndim - 1)), factors, gaussian.precisions_cholesky
            ),
        )
        if not self.estimate_degrees:
            return found
        share = responsibilities / torch.where(empty, 1.0, counts)
        degrees = _best_degrees(found.distances(x), share, self.degrees_of_freedom, self.n_features)
        return dataclasses.replace(found, degrees_of_freedom=torch.where(empty, self.degrees_of_freedom, degrees))

    def unconstrained(self) -> dict[str, Tensor]:
        """Return coordinates: those of the Gaussian, and ``log_degrees`` (K,) if they are estimated."""
        values = to_unconstrained(self._gaussian)
        values["log_weights"] = clamp_coordinates(values["log_weights"])
        if self.estimate_degrees:
            values["log_degrees"] = self.degrees_of_freedom.log().clamp(max=math.log(_MOST_DEGREES))
        return values

    def with_unconstrained(self, values: Mapping[str, Tensor]) -> Self:
        """Return the mixture at these coordinates."""
        gaussian = from_unconstrained(values, self.covariance_type)
        return dataclasses.replace(
            self,
            log_weights=gaussian.log_weights,
            means=gaussian.means,
            precisions_cholesky=gaussian.precisions_cholesky,
            degrees_of_freedom=values["log_degrees"].exp() if self.estimate_degrees else self.degrees_of_freedom,
        )

    @no_graph()
    def sample(self, n: int, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Draw `n` samples (n, D), and their components (n,)."""
        labels = self._labels(n, generator)
        normal = standard_normal((n, self.n_features), self.means, generator)
        deviations = self._structure.colour(self.precisions_cholesky, normal, labels)
        shape = 0.5 * self._finite_degrees[labels]
        device = device_of(generator, shape)
        scales = torch._standard_gamma(shape.to(device), generator=generator).to(shape.device) / shape
        scales = torch.where(self.degrees_of_freedom[labels].isinf(), 1.0, scales)
        return self.means[labels] + deviations * scales.rsqrt()[:, None], labels

    @property
    def _structure(self) -> Structure:
        return structure_of(self.covariance_type)

    @property
    def _gaussian(self) -> GaussianParameters:
        return GaussianParameters(
            log_weights=self.log_weights,
            means=self.means,
            precisions_cholesky=self.precisions_cholesky,
            covariance_type=self.covariance_type,
        )

    @property
    def _finite_degrees(self) -> Tensor:
        """Degrees of freedom with 1 for infinite ones, so that the discarded values of those are not NaN."""
        return self.degrees_of_freedom.masked_fill(self.degrees_of_freedom.isinf(), 1.0)


def _expected_scales(distances: Tensor, degrees: Tensor, d: int) -> tuple[Tensor, Tensor]:
    """Return expectations of the scales and of their logarithms, both (N, K), blocked."""
    infinite = degrees.isinf()
    finite = degrees.masked_fill(infinite, 1.0)
    alpha, beta = (finite + d) / 2, (finite + distances) / 2
    scales = torch.where(infinite, 1.0, alpha / beta)
    log_scales = torch.where(infinite, 0.0, alpha.digamma() - beta.log())
    return stop_gradient((scales, log_scales), RESPONSIBILITIES)


def _clipped(x: Tensor) -> Tensor:
    """Return features within, or a little beyond, the range of nine tenths of their values."""
    tail = len(x) // 20
    low, high = x.kthvalue(1 + tail, 0).values, x.kthvalue(len(x) - tail, 0).values
    margin = torch.where(high > low, 0.1 * (high - low), torch.inf)
    return torch.clamp(x, low - margin, high + margin)


def _log_normaliser(a: Tensor, b: float) -> Tensor:
    r"""Return :math:`\log \Gamma(a + b) - \log \Gamma(a) - b \log a`, which is about :math:`b (b - 1) / 2a`."""
    large = a > _STIRLING
    safe, small = torch.where(large, a, _STIRLING), torch.where(large, 1.0, a)
    by_series = (safe + b - 0.5) * (b / safe).log1p() - b + _stirling(safe + b) - _stirling(safe)
    return torch.where(large, by_series, (small + b).lgamma() - small.lgamma() - b * small.log())


def _stirling(z: Tensor) -> Tensor:
    square = z.square().reciprocal()
    return (1 / 12 - square * (1 / 360 - square * (1 / 1260 - square / 1680))) / z


def _digamma_gap(a: Tensor, b: float) -> Tensor:
    r"""Return :math:`\psi(a + b) - \psi(a) - b / a`, the derivative of `_log_normaliser`."""
    large = a > _STIRLING
    safe, small = torch.where(large, a, _STIRLING), torch.where(large, 1.0, a)
    by_series = (b / safe).log1p() - b / safe + _digamma_series(safe + b) - _digamma_series(safe)
    return torch.where(large, by_series, (small + b).digamma() - small.digamma() - b / small)


def _digamma_series(z: Tensor) -> Tensor:
    r"""Return :math:`\psi(z) - \log z`."""
    square = z.square().reciprocal()
    return -0.5 / z - square * (1 / 12 - square * (1 / 120 - square * (1 / 252 - square / 240)))


def _slope_and_curvature(distances: Tensor, share: Tensor, degrees: Tensor, d: int) -> tuple[Tensor, Tensor]:
    r"""Return the first and second derivative of the mean log-density by :math:`\log \nu`, two of (K,).

    With :math:`w = \delta / (\nu + \delta)`, the tail's derivative with respect to :math:`\nu` is
    :math:`\frac12 \log(1 - w) + \frac12 (1 + D / \nu) w`.
    """
    w = distances / (degrees + distances)
    tail = 0.5 * ((1 + d / degrees) * w - (distances / degrees).log1p())
    tail_slope = 0.5 * (w - d * w / degrees - (1 + d / degrees) * w * (1 - w)) / degrees
    a, b = degrees / 2, d / 2
    first = 0.5 * _digamma_gap(a, b) + (share * tail).sum(0)
    second = 0.25 * (polygamma(1, a + b) - polygamma(1, a) + b / a.square()) + (share * tail_slope).sum(0)
    return degrees * first, degrees * first + degrees.square() * second


def _mean_log_density(distances: Tensor, share: Tensor, degrees: Tensor, d: int) -> Tensor:
    """Return the terms of the mean log-density that depend on the degrees of freedom, (K,)."""
    tail = (degrees + d) / 2 * (distances / degrees).log1p()
    return _log_normaliser(degrees / 2, d / 2) - (share * tail).sum(0)


def _best_degrees(distances: Tensor, share: Tensor, before: Tensor, d: int) -> Tensor:
    """Return the degrees of freedom that maximise the mean log-density, (K,), differentiable in the share (N, K)."""
    before = before.clamp(_LEAST_DEGREES, _MOST_DEGREES)
    root = _search_degrees(distances, share, before, d)
    slope, curvature = _slope_and_curvature(distances, share, root, d)
    # At the root this step is 0, and its derivative is that of the implicit function theorem.
    inside = (curvature < 0) & (root > 1.001 * _LEAST_DEGREES) & (root < 0.999 * _MOST_DEGREES)
    step = torch.where(inside, -slope / torch.where(inside, curvature, -1.0), 0.0)
    return root * step.clamp(-1e-6, 1e-6).exp()


@no_graph()
def _search_degrees(distances: Tensor, share: Tensor, before: Tensor, d: int) -> Tensor:
    """Find where the slope vanishes, by Newton's method in log degrees between ends that enclose it."""
    bounds = math.log(_LEAST_DEGREES), math.log(_MOST_DEGREES)
    t = before.log()
    low, high = torch.full_like(t, -torch.inf), torch.full_like(t, torch.inf)
    for _ in range(_NEWTON_STEPS):
        slope, curvature = _slope_and_curvature(distances, share, t.exp(), d)
        low, high = torch.where(slope > 0, t, low), torch.where(slope < 0, t, high)
        concave = curvature < 0
        step = torch.where(concave, -slope / torch.where(concave, curvature, -1.0), 2 * slope.sign()).clamp(-2, 2)
        target = t + step
        middle = torch.where(low.isfinite() & high.isfinite(), (low + high) / 2, target)
        target = torch.where((target > low) & (target < high) | (step == 0), target, middle).clamp(*bounds)
        moved, t = (target - t).abs(), target
        if not is_wrapped(moved) and bool((moved <= 4 * torch.finfo(t.dtype).eps * (1 + t.abs())).all()):
            break
    found = t.exp().clamp(_LEAST_DEGREES, _MOST_DEGREES)
    better = _mean_log_density(distances, share, found, d) >= _mean_log_density(distances, share, before, d)
    return torch.where(better, found, before)
