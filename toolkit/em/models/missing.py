r"""Gaussian mixtures of samples with missing values (NaN): the exact likelihood of the observed values, and its EM.

A sample has the marginal density of its observed features :math:`o`, so values must be missing at random. Given the
component, the missing features :math:`m` are normal, with the precision :math:`\Lambda_{mm}` and the mean
:math:`\mu_m - \Lambda_{mm}^{-1} \Lambda_{mo} (x_o - \mu_o)`. The E-step returns responsibilities *and* these two
moments; the block `em.responsibilities` holds both constant.

- full and tied: the M-step completes each sample by its conditional mean, and adds the conditional covariance.
- diag and spherical: given the component, missing features do not depend on the observed ones. They drop out of the
  expected log-likelihood, and the M-step averages over the observed values: fewer unknowns, faster convergence.

A sample without any value has the log-density 0; it counts as a sample, and has no effect on the parameters.

N samples, D features, K components; P patterns of missing features with up to B samples each.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from toolkit._checks import integer, number
from toolkit._random import device_of
from toolkit.blocks import no_graph, stop_gradient
from toolkit.em.covariance import CovarianceType, structure_of
from toolkit.em.engine.acceleration import Accelerate, Climb, ClimbOptions, ranked
from toolkit.em.engine.checks import check_covariance, check_prior
from toolkit.em.engine.starts import LLOYD_STEPS, Init, check_given, first_samples, lloyd, squared_distances
from toolkit.em.gaussian import GaussianParameters, check_features
from toolkit.em.mixture import RESPONSIBILITIES, check_shape_of_weights, e_step
from toolkit.em.models._patterns import Incomplete, MissingEngine, Moments, Pass, check_incomplete, em_step, maximise
from toolkit.em.models.prior import Prior

__all__ = [
    "MissingGaussian",
    "draw_missing",
    "em_step_missing",
    "fit_missing",
    "impute",
    "marginal_log_joint",
    "start_missing",
    "surrogate_missing",
]


@dataclass(frozen=True)
class MissingGaussian:
    """A Gaussian mixture as a `Family` of samples with missing values, for `e_step`, `maximise_likelihood` and others.

    Attributes:
        parameters: The mixture of complete samples.

    Example:
        >>> one = GaussianParameters.from_covariances(weights=torch.ones(1), means=torch.zeros(1, 2),
        ...     covariances=torch.ones(1, 2), covariance_type="diag")
        >>> MissingGaussian(one).log_joint(torch.tensor([[0.0, 0.0], [0.0, torch.nan], [torch.nan, torch.nan]]))
        tensor([[-1.8379],
                [-0.9189],
                [ 0.0000]])
    """

    parameters: GaussianParameters

    def log_joint(self, x: Tensor) -> Tensor:
        """Return the log of weight times marginal density (see `marginal_log_joint`)."""
        return marginal_log_joint(self.parameters, x)

    def m_step(self, x: Tensor, responsibilities: Tensor) -> MissingGaussian:
        """Return the maximum of the expected complete-data log-likelihood.

        The moments of the missing values are those under the current parameters, held constant by the block.

        Args:
            x: (N, D), NaN where missing.
            responsibilities: (N, K), times the samples' weights if there are any.

        Raises:
            ValueError: If the shapes do not fit together, or a covariance is singular.
        """
        moments = _expected_moments(self.parameters, x, responsibilities)
        return MissingGaussian(maximise(self.parameters, moments, reg_covar=0.0, prior=None))

    def unconstrained(self) -> dict[str, Tensor]:
        """Return unconstrained coordinates."""
        return self.parameters.unconstrained()

    def with_unconstrained(self, values: Mapping[str, Tensor]) -> MissingGaussian:
        """Return the mixture at these coordinates."""
        return MissingGaussian(self.parameters.with_unconstrained(values))


def marginal_log_joint(parameters: GaussianParameters, x: Tensor) -> Tensor:
    r"""Return :math:`\log \pi_k + \log \mathcal N(x_{n, o} \mid \mu_{k, o}, \Sigma_{k, oo})`.

    Differentiable, also in the observed values of `x`.

    Args:
        parameters: The mixture.
        x: (N, D), NaN where missing.

    Returns:
        (N, K), nats. The log of the weights for a sample without any value.

    Raises:
        ValueError: If `x` does not have the features of the means.

    References:
        Ghahramani & Jordan, "Supervised learning from incomplete data via an EM approach", 1994, section 3.

    Example:
        >>> from toolkit.em import GaussianParameters
        >>> one = GaussianParameters.from_covariances(weights=torch.ones(1), means=torch.tensor([[0.0, 3.0]]),
        ...     covariances=torch.tensor([[[1.0, 0.5], [0.5, 1.0]]]), covariance_type="full")
        >>> x = torch.tensor([[2.0, torch.nan]])
        >>> marginal_log_joint(one, x)  # the log-density of 2 under N(0, 1)
        tensor([[-2.9189]])
    """
    check_features(parameters, x)
    data = Incomplete.of(x, None, parameters.n_components)
    joints = [Pass.of(parameters, part).log_joint.flatten(1) for part in data.parts]
    return torch.cat(joints, 1).mT[data.order]


def surrogate_missing(parameters: GaussianParameters, x: Tensor, sample_weight: Tensor | None = None) -> Tensor:
    r"""Return the expected complete-data log-likelihood, whose maximum is the M-step of `em_step_missing`.

    .. math::
        \frac1N \sum_{nk} \bar r_{nk} \left(\log \pi_k
        - \tfrac D2 \log 2\pi - \tfrac12 \log|\Sigma_k|
        - \tfrac12 (\hat x_{nk} - \mu_k)^\top \Lambda_k (\hat x_{nk} - \mu_k)
        - \tfrac12 \mathrm{tr}\, \Lambda_k \hat C_{nk}\right)

    The block `em.responsibilities` holds the responsibilities, the completed samples :math:`\hat x_{nk}` and the
    conditional covariances :math:`\hat C_{nk}` of the missing values constant. Then the **gradient** is that of the
    log-likelihood of the observed values (Fisher's identity); as in `surrogate`, the value and the Hessian are not. For
    diag and spherical covariances nothing is completed: the sums run over the observed features.

    Args:
        parameters: The mixture.
        x: (N, D), NaN where missing.
        sample_weight: (N,): weights of the mean over the samples. None: all 1.

    Returns:
        Scalar, nats per sample, to be maximised.

    Raises:
        ValueError: If `x` does not have the features of the means.

    References:
        Little & Rubin, "Statistical analysis with missing data", 2002, sections 8.4 and 11.2.

    Example:
        >>> from toolkit.em import GaussianParameters
        >>> one = GaussianParameters.from_covariances(weights=torch.ones(1), means=torch.tensor([[0.0, 3.0]]),
        ...     covariances=torch.tensor([[[1.0, 0.5], [0.5, 1.0]]]), covariance_type="full")
        >>> x = torch.tensor([[2.0, torch.nan]])
        >>> surrogate_missing(one, x)
        tensor(-4.1940)
    """
    responsibilities, _ = e_step(MissingGaussian(parameters), x)
    weights = x.new_ones(len(x)) if sample_weight is None else sample_weight
    check_shape_of_weights(weights, (len(x),))
    moments = _expected_moments(parameters, x, responsibilities * weights[:, None])
    # Zero in value, not in gradient: the moments are about the same means, held constant.
    shifts = parameters.means - moments.origins
    factor = parameters.precisions_cholesky
    log_2pi = math.log(2 * math.pi)
    if structure_of(parameters.covariance_type).is_matrix:
        crossed = moments.first[..., None] * shifts[:, None]
        about = moments.counts[:, None, None] * shifts[..., None] * shifts[:, None]
        second = moments.second - crossed - crossed.mT + about
        squares = (second * parameters.precisions).sum((-1, -2))
        normalisers = moments.counts * (parameters.log_determinants - 0.5 * parameters.n_features * log_2pi)
    else:
        factor = factor if factor.ndim == 2 else factor[:, None]
        second = moments.second - 2 * moments.first * shifts + moments.seen * shifts.square()
        squares = (second * factor.square()).sum(-1)
        normalisers = (moments.seen * (factor.log() - 0.5 * log_2pi)).sum(-1)
    # A component without weight has the log-weight minus infinity, and no samples.
    log_weights = parameters.log_weights.masked_fill(moments.counts == 0, 0.0)
    return (moments.counts * log_weights + normalisers - 0.5 * squares).sum() / weights.sum()


@no_graph()
def em_step_missing(
    parameters: GaussianParameters,
    x: Tensor,
    *,
    sample_weight: Tensor | None = None,
    reg_covar: float = 0.0,
    prior: Prior | None = None,
) -> tuple[GaussianParameters, Tensor]:
    """Return the parameters after one EM step, and the log-likelihood of the observed values *before* it.

    Without missing values the step is `em_step`. The step has no gradient: differentiate `MissingGaussian.m_step`
    instead.

    Args:
        parameters: The mixture.
        x: (N, D), float32 or float64, NaN where missing.
        sample_weight: (N,), finite, not negative, not all 0. None: all 1.
        reg_covar: Added to every variance. 0 is maximum likelihood, for which the log-likelihood never falls.
        prior: A prior (MAP). With it, ``log_likelihood + prior.log_density(parameters) / N`` never falls.

    Returns:
        The new mixture, and a float64 scalar in nats per sample.

    Raises:
        TypeError: If `x` is not a float32 or float64 tensor.
        ValueError: If an argument is out of range, a feature has no value at all, or a covariance becomes singular.

    References:
        Ghahramani & Jordan, "Supervised learning from incomplete data via an EM approach", 1994, section 3.

    Example:
        >>> x = torch.tensor([[0.0, 1.0], [2.0, torch.nan], [4.0, 2.0]])
        >>> one = GaussianParameters.from_covariances(weights=torch.ones(1), means=torch.zeros(1, 2),
        ...     covariances=torch.eye(2), covariance_type="tied")
        >>> em_step_missing(one, x)[0].means
        tensor([[2., 1.]])
    """
    check_features(parameters, x)
    check_incomplete(x, sample_weight)
    reg_covar = number("reg_covar", reg_covar, least=0)
    check_prior(prior)
    data = Incomplete.of(x.double(), sample_weight, parameters.n_components)
    after, value = em_step(parameters.to(torch.float64), data, reg_covar, prior)
    return after.to(parameters.means.dtype), value


@no_graph()
def fit_missing(
    x: Tensor,
    n_components: int,
    *,
    covariance_type: CovarianceType = "full",
    sample_weight: Tensor | None = None,
    tol: float = 1e-6,
    max_iter: int = 1000,
    n_init: int = 1,
    init: Init | GaussianParameters = "kmeans",
    reg_covar: float = 1e-6,
    prior: Prior | None = None,
    accelerate: Accelerate = "anderson",
    generator: torch.Generator | None = None,
    callback: Callable[[int, float], None] | None = None,
) -> Climb[GaussianParameters]:
    """Maximise the log-likelihood of the observed values of samples with missing values.

    Args:
        x: (N, D), float32 or float64, finite where observed, NaN where missing.
        n_components: Number of components, K; at most the number of samples with a value.
        covariance_type: ``"full"``, ``"tied"``, ``"diag"`` or ``"spherical"``.
        sample_weight: (N,), finite, not negative, not all 0. None: all 1.
        tol: As in `climb`.
        max_iter: As in `climb`. 0 returns the start.
        n_init: Number of starts; the best fit is returned.
        init: How to start (see `start_missing`), or the start itself.
        reg_covar: Added to every variance, in the data's units squared.
        prior: A prior, for MAP estimates. None: maximum likelihood.
        accelerate: As in `climb`.
        generator: Randomness of the start. None is torch's global generator.
        callback: As in `climb`.

    Returns:
        The fit result, with the mixture in the type of `x`. With a prior, `history` has the log-likelihood plus the
        log-prior over the sum of weights; `log_likelihood` is the log-likelihood alone.

    Raises:
        TypeError: If `x` is not a float32 or float64 tensor.
        ValueError: If an argument is out of range, a feature has no value at all, or a covariance becomes singular.

    References:
        Ghahramani & Jordan, "Supervised learning from incomplete data via an EM approach", 1994, section 3.

    Example:
        >>> x = torch.tensor([[0.0, 0.2], [1.0, torch.nan], [8.0, 4.0], [9.0, 5.0], [torch.nan, 6.0], [0.5, 0.0]])
        >>> two = fit_missing(x, 2, covariance_type="diag", generator=torch.Generator().manual_seed(0))
        >>> two.parameters.means
        tensor([[0.5000, 0.1000],
                [8.5000, 5.0000]])
    """
    check_incomplete(x, sample_weight)
    n_components, n_init = integer("n_components", n_components, 1, len(x)), integer("n_init", n_init)
    reg_covar = number("reg_covar", reg_covar, least=0)
    check_prior(prior)
    structure_of(covariance_type)
    if isinstance(init, GaussianParameters):
        check_given(init, n_components, x.shape[1], covariance_type)
    engine = MissingEngine(Incomplete.of(x.double(), sample_weight, n_components), reg_covar, prior)
    options = ClimbOptions(accelerate=accelerate, tol=tol, max_iter=max_iter, callback=callback)
    fits: list[Climb[GaussianParameters]] = []
    for _ in range(n_init):
        first = init
        if not isinstance(first, GaussianParameters):
            first = start_missing(
                x,
                n_components,
                covariance_type=covariance_type,
                sample_weight=sample_weight,
                init=first,
                reg_covar=reg_covar,
                generator=generator,
            )
        fits.append(engine.climb(first, options))
    best = ranked(fits, torch.float64)[0]
    log_likelihood = best.log_likelihood - engine.log_prior(best.parameters)
    return dataclasses.replace(best, parameters=best.parameters.to(x.dtype), log_likelihood=log_likelihood)


@no_graph()
def start_missing(
    x: Tensor,
    n_components: int,
    *,
    covariance_type: CovarianceType,
    sample_weight: Tensor | None = None,
    init: Init = "kmeans",
    reg_covar: float = 1e-6,
    generator: torch.Generator | None = None,
) -> GaussianParameters:
    """Choose a start as `start` does, for samples with missing values.

    Means are chosen among the samples, by distances in the features observed in both samples. A missing value of a
    chosen sample is filled by the mean of the samples nearest to it. For ``"kmeans"`` the means are improved by Lloyd's
    steps on the observed values: each sample goes to the nearest mean in the sample's observed features. This equals
    k-means with missing values filled by the mean of their cluster. The variances are those of the observed values
    about the nearest means; correlations count missing values as 0, which keeps the covariance positive definite.

    Args:
        x: (N, D), NaN where missing.
        n_components: Number of components, K; at most the number of samples with a value and a weight.
        covariance_type: As in `fit_missing`.
        sample_weight: (N,), not negative: samples of weight 0 are left out, the others count alike. None: all 1.
        init: As in `start`.
        reg_covar: Added to every variance.
        generator: Randomness. None is torch's global generator.

    Returns:
        A mixture in float64.

    Raises:
        TypeError: If `x` is not a float32 or float64 tensor.
        ValueError: If an argument is out of range, or a feature has no value at all.

    References:
        Chi, Chi & Baraniuk, "k-POD: a method for k-means clustering of missing data", 2016, section 2.

    Example:
        >>> x = torch.tensor([[0.0, 0.2], [1.0, torch.nan], [8.0, 4.0], [9.0, 5.0], [torch.nan, 6.0], [0.5, 0.0]])
        >>> start_missing(x, 2, covariance_type="diag", generator=torch.Generator().manual_seed(0)).means
        tensor([[0.5000, 0.1000],
                [8.5000, 5.0000]], dtype=torch.float64)
    """
    check_incomplete(x, sample_weight)
    n_components, reg_covar = integer("n_components", n_components, 1, len(x)), number("reg_covar", reg_covar, least=0)
    structure_of(covariance_type)
    here = ~x.isnan().all(1) if sample_weight is None else ~x.isnan().all(1) & (sample_weight > 0)
    if n_components > int(here.sum()):
        raise ValueError(
            f"`n_components` should be at most {int(here.sum())}, the number of samples with a value. "
            f"Found {n_components}."
        )
    x = x[here].double()
    seen = (~x.isnan()).to(x.dtype)
    centre = x.nanmean(0)
    x = (x - centre).nan_to_num(0.0)
    weights = torch.ones_like(x[:, 0])
    means = _first_means(x, seen, weights, n_components, init, generator)
    found = lloyd(x, means[None], LLOYD_STEPS if init == "kmeans" else 0, weights=weights, seen=seen)
    means, nearest = found[0][0], found[1][0]
    shares = nearest.bincount(minlength=n_components).clamp(min=1).to(x.dtype)
    covariance = _covariance_of_seen(seen * (x - means[nearest]), seen)
    check_covariance(covariance)
    structure = structure_of(covariance_type)
    regularised = structure.regularise(structure.restrict(covariance), reg_covar)
    return GaussianParameters.from_covariances(
        weights=shares / shares.sum(),
        means=centre + means,
        covariances=structure.repeat(regularised, n_components),
        covariance_type=covariance_type,
    )


def _first_means(
    x: Tensor,
    seen: Tensor,
    weights: Tensor,
    n_components: int,
    init: Init,
    generator: torch.Generator | None,
) -> Tensor:
    """Return samples as means (K, D); their missing values are the means of the samples that are nearest to them."""
    chosen = first_samples(x, n_components, weights, init, generator, seen=seen)[0]
    nearest = squared_distances(x, chosen[None], seen)[0].argmin(0)
    own = torch.nn.functional.one_hot(nearest, n_components).to(x).mT
    counts = own @ seen
    filled = torch.where(counts > 0, own @ x / counts, 0.0)
    return torch.where(seen[chosen] > 0, x[chosen], filled)


def impute(parameters: GaussianParameters, x: Tensor) -> Tensor:
    r"""Return the samples with missing values replaced by their expectation given the observed ones.

    The expectation is
    :math:`\sum_k r_{nk} (\mu_{k, m} - \Lambda_{k, mm}^{-1} \Lambda_{k, mo} (x_{n, o} - \mu_{k, o}))`, the best guess in
    squared error. The spread of imputed values is too small for later estimates: see `draw_missing`.

    Args:
        parameters: The mixture.
        x: (N, D), NaN where missing.

    Returns:
        (N, D). Observed values are unchanged.

    Raises:
        ValueError: If `x` does not have the features of the means.

    Example:
        >>> one = GaussianParameters.from_covariances(weights=torch.ones(1), means=torch.tensor([[0.0, 3.0]]),
        ...     covariances=torch.tensor([[1.0, 0.5], [0.5, 1.0]]), covariance_type="tied")
        >>> impute(one, torch.tensor([[2.0, torch.nan]]))
        tensor([[2., 4.]])
    """
    check_features(parameters, x)
    data = Incomplete.of(x, None, parameters.n_components)
    guesses = []
    for part in data.parts:
        current = Pass.of(parameters, part)
        responsibilities = current.log_joint.softmax(0)[..., None]
        completed = current.complete() + parameters.means[:, None, None]
        guesses.append((responsibilities * completed).sum(0).flatten(0, 1))
    return torch.where(x.isnan(), torch.cat(guesses)[data.order].to(x.dtype), x)


@no_graph()
def draw_missing(
    parameters: GaussianParameters, x: Tensor, n_draws: int, *, generator: torch.Generator | None = None
) -> Tensor:
    """Draw missing values from their distribution given the observed ones, for multiple imputation.

    For each sample, a component is drawn by the responsibilities, then all missing features together.

    Args:
        parameters: The mixture.
        x: (N, D), NaN where missing.
        n_draws: Number of draws.
        generator: Randomness. None is torch's global generator.

    Returns:
        (n_draws, N, D). Observed values are unchanged.

    Raises:
        ValueError: If `x` does not have the features of the means, or `n_draws` is not a positive integer.

    References:
        Little & Rubin, "Statistical analysis with missing data", 2002, section 5.4.

    Example:
        >>> from toolkit.em import GaussianParameters
        >>> one = GaussianParameters.from_covariances(weights=torch.ones(1), means=torch.tensor([[0.0, 3.0]]),
        ...     covariances=torch.tensor([[[1.0, 0.5], [0.5, 1.0]]]), covariance_type="full")
        >>> x = torch.tensor([[2.0, torch.nan]])
        >>> draws = draw_missing(one, x, 1000, generator=torch.Generator().manual_seed(0))
        >>> draws.shape, round(draws[:, 0, 1].mean().item())  # 3 + 0.5 * 2
        (torch.Size([1000, 1, 2]), 4)
    """
    check_features(parameters, x)
    n_draws = integer("n_draws", n_draws)
    device = device_of(generator, x)
    data = Incomplete.of(x, None, parameters.n_components)
    draws = []
    for _ in range(n_draws):
        values = []
        for part in data.parts:
            current = Pass.of(parameters, part)
            completed = current.complete() + parameters.means[:, None, None]
            shape = part.x.shape
            noise = torch.randn(shape, generator=generator, device=device, dtype=completed.dtype).to(x.device)
            completed = completed + current.spread(noise)
            chances = current.log_joint.softmax(0).flatten(1).mT.to(device)
            chosen = torch.multinomial(chances, 1, generator=generator).to(x.device)
            picked = completed.flatten(1, 2).gather(0, chosen.view(1, -1, 1).expand(1, -1, shape[-1]))
            values.append(picked[0])
        draws.append(torch.where(x.isnan(), torch.cat(values)[data.order].to(x.dtype), x))
    return torch.stack(draws)


# --- the E-step and the M-step ----------------------------------------------------------------------------------------


def _expected_moments(parameters: GaussianParameters, x: Tensor, responsibilities: Tensor) -> Moments:
    """Return the moments of samples completed under the parameters, the second output of the E-step, blocked."""
    check_features(parameters, x)
    if responsibilities.shape != (len(x), parameters.n_components):
        raise ValueError(
            f"`responsibilities` should have shape {(len(x), parameters.n_components)}. "
            f"Found {tuple(responsibilities.shape)}."
        )
    sums = []
    for part in Incomplete.of(x, None, parameters.n_components).parts:
        weights = responsibilities[part.rows].movedim(-1, 0) * part.telling
        sums.append(Pass.of(parameters, part).moments(weights))
    moments = Moments.of(sums, parameters.means)
    return Moments(**{name: stop_gradient(value, RESPONSIBILITIES) for name, value in vars(moments).items()})


def _covariance_of_seen(residuals: Tensor, seen: Tensor) -> Tensor:
    """Return the covariance (D, D) of residuals that are 0 where missing, scaled to the variances of observed ones."""
    share = seen.mean(0).rsqrt()
    covariance: Tensor = share[:, None] * (residuals.mT @ residuals / len(residuals)) * share
    return covariance
