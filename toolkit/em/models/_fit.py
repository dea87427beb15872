"""Fits a mixture of any family by accelerated EM from several starts, and returns the best.

N samples, D features, K components.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol, Self, TypeVar

import torch
from torch import Tensor

from toolkit._checks import integer
from toolkit.blocks import no_graph
from toolkit.em.engine.acceleration import Accelerate, Climb, ClimbOptions, maximise_posterior, ranked
from toolkit.em.mixture import Family, log_likelihood

__all__ = ["Kind", "fit_family"]


class Kind(Family, Protocol):
    """A family that chooses a start and checks the samples."""

    @classmethod
    def start(cls, x: Tensor, n_components: int, **options: Any) -> Self:
        """Return a mixture to start from, given `sample_weight`, `generator` and the family's own options."""

    def check(self, x: Tensor) -> None:
        """Raise a ValueError unless the samples are in the support of the family."""


F = TypeVar("F", bound=Kind)


@no_graph()
def fit_family(
    family: type[F],
    x: Tensor,
    n_components: int,
    *,
    n_init: int = 1,
    sample_weight: Tensor | None = None,
    accelerate: Accelerate = "anderson",
    tol: float = 1e-6,
    max_iter: int = 1000,
    generator: torch.Generator | None = None,
    callback: Callable[[int, float], None] | None = None,
    **options: Any,
) -> Climb[F]:
    """Maximise the likelihood of a mixture, or its posterior density if the family has a prior.

    Args:
        family: `BernoulliMixture`, `PoissonMixture`, `CategoricalMixture`, `StudentMixture`, `FactorAnalysers`,
            `DistributionMixture`, or another class with the same methods.
        x: (N, D).
        n_components: Number of components, K; at most N.
        n_init: Number of starts, which the family chooses. The best fit is returned.
        sample_weight: (N,), not negative, not all 0. None: all 1.
        accelerate: As in `climb`.
        tol: As in `climb`.
        max_iter: As in `climb`.
        generator: Randomness of the starts. None is torch's global generator.
        callback: As in `climb`.
        **options: Options of the family's `start`: `pseudo_count`, `covariance_type`, `n_factors`, ...

    Returns:
        The fit result. With pseudo-counts `history` has the log-likelihood plus the log-prior over N, which never
        falls; `log_likelihood` excludes the prior.

    Raises:
        TypeError: If `x` is not a real tensor, or `family` is not a family.
        ValueError: If an argument is out of range, or an EM step fails (a singular scatter, say).

    Example:
        >>> from toolkit.em.models import PoissonMixture
        >>> x = torch.tensor([[0.0], [1.0], [2.0], [30.0], [34.0]])
        >>> found = fit_family(PoissonMixture, x, 2, generator=torch.Generator().manual_seed(0))
        >>> found.parameters.rates.sort(0).values.T, found.converged
        (tensor([[ 1., 32.]]), True)
    """
    if not callable(getattr(family, "start", None)):
        raise TypeError(f"`family` should be a family of mixtures, `PoissonMixture` say. Found {family!r}.")
    n_components, n_init = integer("n_components", n_components), integer("n_init", n_init)
    climbing = ClimbOptions(accelerate=accelerate, tol=tol, max_iter=max_iter, callback=callback)
    fits: list[Climb[F]] = []
    for _ in range(n_init):
        first = family.start(x, n_components, sample_weight=sample_weight, generator=generator, **options)
        first.check(x)
        log_prior = getattr(family, "log_prior", None)
        fits.append(maximise_posterior(first, x, log_prior, climbing, sample_weight=sample_weight))
    best = ranked(fits, x.dtype)[0]
    if getattr(best.parameters, "log_prior", None) is not None:
        value = float(log_likelihood(best.parameters, x, sample_weight))
        best = dataclasses.replace(best, log_likelihood=value)
    return best
