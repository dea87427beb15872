"""Fits a Gaussian mixture by closed-form EM steps, from a start of one's own or one of the usual ones.

N samples, D features, K components.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from toolkit.blocks import no_graph
from toolkit.em._fused import accumulate, maximise
from toolkit.em._samples import Prepared, prepare
from toolkit.em.gaussian import (
    CovarianceType,
    GaussianParameters,
    check_covariance_type,
    regularise,
)

__all__ = ["Fit", "Init", "fit", "start"]

Init = Literal["kmeans", "k-means++", "random_from_data"]

_LLOYD_STEPS = 10


@dataclass(frozen=True, kw_only=True)
class Fit:
    """What `fit` found.

    Attributes:
        parameters: The mixture, in the data's floating-point type.
        log_likelihood: Of `parameters`, nats per sample.
        converged: Whether the last step gained at most `tol`.
        n_iter: EM steps from the start to `parameters`.
        history: The log-likelihood at the start and after each of these steps; it never falls.
    """

    parameters: GaussianParameters
    log_likelihood: float
    converged: bool
    n_iter: int
    history: tuple[float, ...]


@no_graph()
def fit(
    x: Tensor,
    n_components: int,
    *,
    covariance_type: CovarianceType = "full",
    tol: float = 1e-6,
    max_iter: int = 1000,
    n_init: int = 1,
    init: Init | GaussianParameters = "kmeans",
    reg_covar: float = 1e-6,
    generator: torch.Generator | None = None,
) -> Fit:
    """Maximise the log-likelihood of a Gaussian mixture by EM.

    Each step is `em_step`. A step that lowers the log-likelihood, by rounding or because `reg_covar` pulls away from
    maximum likelihood, is not taken, and ends the fit.

    Args:
        x: (N, D), float32 or float64, finite.
        n_components: K, at most N.
        covariance_type: ``"full"``, ``"tied"``, ``"diag"`` or ``"spherical"``.
        tol: The fit has converged when a step gains no more, in nats per sample. What is still to gain is
            ``tol / (1 - rate)`` at a linear rate of convergence, which is near 1 for components that overlap.
        max_iter: The most EM steps. 0 returns the start.
        n_init: Fits from this many starts, of which the best is returned.
        init: How to start (see `start`), or the start itself.
        reg_covar: Added to every variance, in the data's units squared.
        generator: Randomness of the start. None is torch's global generator.

    Raises:
        TypeError: If `x` is not a float32 or float64 tensor.
        ValueError: If an argument is out of range, `x` is not finite, or a covariance becomes singular.

    References:
        Dempster, Laird & Rubin, "Maximum likelihood from incomplete data via the EM algorithm", 1977, section 4.3.

    Example:
        >>> x = torch.tensor([[0.0], [1.0], [8.0], [9.0], [10.0]])
        >>> two = fit(x, 2, generator=torch.Generator().manual_seed(0))
        >>> two.parameters.means, two.converged
        (tensor([[9.0000],
                [0.5000]]), True)
    """
    _check(x, n_components, covariance_type, reg_covar)
    for name, value, least in (("max_iter", max_iter, 0), ("n_init", n_init, 1)):
        _check_integer(name, value, least)
    _check_not_negative("tol", tol)
    if isinstance(init, GaussianParameters):
        _check_start(init, x, n_components, covariance_type)
    data = prepare(x, covariance_type, n_components)
    fits = []
    for _ in range(n_init):
        if isinstance(init, GaussianParameters):
            first = init
        else:
            first = start(
                x,
                n_components,
                covariance_type=covariance_type,
                init=init,
                reg_covar=reg_covar,
                generator=generator,
            )
        fits.append(_climb(first, data, tol, max_iter, reg_covar))
    best = max(fits, key=lambda found: found.log_likelihood)
    return dataclasses.replace(best, parameters=best.parameters.to(x.dtype))


@no_graph()
def start(
    x: Tensor,
    n_components: int,
    *,
    covariance_type: CovarianceType,
    init: Init = "kmeans",
    reg_covar: float = 1e-6,
    generator: torch.Generator | None = None,
) -> GaussianParameters:
    """Choose the means, and give each the samples that are nearest to it.

    The weights are the shares of the samples, at least one sample each. All components start with the same covariance,
    that of the samples about their nearest mean: it is not singular where a cluster of few samples would be.

    Args:
        x: (N, D), float32 or float64, finite.
        n_components: K, at most N.
        covariance_type: As in `fit`.
        init: How to choose the means. ``"random_from_data"``: distinct samples. ``"k-means++"``: samples that are far
            from each other (Arthur & Vassilvitskii). ``"kmeans"``: those, improved by at most ten of Lloyd's steps.
        reg_covar: Added to every variance.
        generator: Randomness. None is torch's global generator.

    Returns:
        A mixture in float64, in which the squares of large offsets and small widths keep their digits.

    Raises:
        TypeError: If `x` is not a float32 or float64 tensor.
        ValueError: If an argument is out of range, or all samples lie at the means and `reg_covar` is 0.

    References:
        Arthur & Vassilvitskii, "k-means++: the advantages of careful seeding", 2007, section 2.2.

    Example:
        >>> x = torch.tensor([[0.0], [1.0], [8.0], [9.0], [10.0]])
        >>> start(x, 2, covariance_type="tied", generator=torch.Generator().manual_seed(0)).means
        tensor([[9.0000],
                [0.5000]], dtype=torch.float64)
    """
    _check(x, n_components, covariance_type, reg_covar)
    if init not in get_args(Init):
        raise ValueError(f"`init` should be {', '.join(get_args(Init))} or GaussianParameters. Found {init!r}.")
    centre = x.mean(0, dtype=torch.float64)
    points = x - centre
    if init == "random_from_data":
        chosen = torch.randperm(len(x), generator=generator, device=_device(generator, x))[:n_components]
        means = points[chosen.to(x.device)]
    else:
        means = _spread_out(points, n_components, generator)
    nearest = _nearest(points, means)
    for _ in range(_LLOYD_STEPS if init == "kmeans" else 0):
        counts = nearest.bincount(minlength=n_components)[:, None]
        sums = torch.zeros_like(means).index_add_(0, nearest, points)
        means = torch.where(counts > 0, sums / counts, means)
        before, nearest = nearest, _nearest(points, means)
        if torch.equal(nearest, before):
            break
    shares = nearest.bincount(minlength=n_components).clamp(min=1).to(means.dtype)
    residuals = points - means[nearest]
    covariances: Tensor
    match covariance_type:
        case "full":
            covariances = (residuals.mT @ residuals / len(x)).expand(n_components, -1, -1)
        case "tied":
            covariances = residuals.mT @ residuals / len(x)
        case "diag":
            covariances = residuals.square().mean(0).expand(n_components, -1)
        case "spherical":
            covariances = residuals.square().mean().expand(n_components)
    return GaussianParameters.from_covariances(
        weights=shares / shares.sum(),
        means=centre + means,
        covariances=regularise(covariances, covariance_type, reg_covar),
        covariance_type=covariance_type,
    )


def _climb(first: GaussianParameters, data: Prepared, tol: float, max_iter: int, reg_covar: float) -> Fit:
    """Take EM steps from one start until they gain too little."""
    parameters, moments = first.to(torch.float64), accumulate(first, data)
    history = [_finite(moments.log_likelihood)]
    converged = False
    while not converged and len(history) <= max_iter:
        candidate = maximise(moments, data, first.covariance_type, reg_covar)
        moments = accumulate(candidate, data)
        value = _finite(moments.log_likelihood)
        converged = value - history[-1] <= tol
        if value >= history[-1]:
            parameters = candidate
            history.append(value)
    return Fit(
        parameters=parameters,
        log_likelihood=history[-1],
        converged=converged,
        n_iter=len(history) - 1,
        history=tuple(history),
    )


def _spread_out(points: Tensor, n_components: int, generator: torch.Generator | None) -> Tensor:
    """Choose samples one by one, each with probability proportional to its squared distance from those before it."""
    distances = points.new_ones(len(points))
    chosen = []
    for i in range(n_components):
        cumulative = distances.cumsum(0)
        draw = torch.rand((), generator=generator, device=_device(generator, points), dtype=torch.float64)
        index = torch.searchsorted(cumulative, draw.to(points.device) * cumulative[-1], right=True)
        chosen.append(points[index.clamp(max=len(points) - 1)])
        squares = (points - chosen[-1]).square().sum(1)
        distances = torch.minimum(distances, squares) if i else squares
    return torch.stack(chosen)


def _nearest(points: Tensor, means: Tensor) -> Tensor:
    """Return the index of the nearest mean of each point, (N,)."""
    half_squares = means.square().sum(1) / 2
    size = max(1, 2**22 // len(means))
    return torch.cat([(half_squares - part @ means.mT).argmin(1) for part in points.split(size)])


def _device(generator: torch.Generator | None, x: Tensor) -> torch.device:
    return x.device if generator is None else generator.device


def _finite(value: Tensor) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"The log-likelihood should be finite. Found {number}: `x` is too large for its type.")
    return number


def _check(x: Tensor, n_components: int, covariance_type: CovarianceType, reg_covar: float) -> None:
    if not isinstance(x, Tensor) or x.dtype not in (torch.float32, torch.float64):
        found = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"`x` should be a float32 or float64 tensor. Found {found}.")
    if x.ndim != 2 or 0 in x.shape:
        raise ValueError(f"`x` should have shape (N, D), at least (1, 1). Found {tuple(x.shape)}.")
    if not bool(x.isfinite().all()):
        row = int((~x.isfinite()).any(1).nonzero()[0])
        raise ValueError(f"`x` should be finite. Found {x[row].tolist()} in row {row}.")
    _check_integer("n_components", n_components, 1)
    if n_components > len(x):
        raise ValueError(f"`n_components` should be at most {len(x)}, the number of samples. Found {n_components}.")
    check_covariance_type(covariance_type)
    _check_not_negative("reg_covar", reg_covar)


def _check_integer(name: str, value: int, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(
            f"`{name}` should be {'a positive integer' if least else 'an integer from 0'}. Found {value!r}."
        )


def _check_not_negative(name: str, value: float) -> None:
    if not 0 <= value < math.inf:
        raise ValueError(f"`{name}` should be finite and not negative. Found {value!r}.")


def _check_start(init: GaussianParameters, x: Tensor, n_components: int, covariance_type: CovarianceType) -> None:
    found = (init.n_components, init.n_features, init.covariance_type)
    expected = (n_components, x.shape[1], covariance_type)
    if found != expected:
        raise ValueError(f"`init` should have (n_components, n_features, covariance_type) {expected}. Found {found}.")
