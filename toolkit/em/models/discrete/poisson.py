"""Mixtures of independent counts, each with a Poisson distribution.

N samples, D features, K components.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from toolkit._checks import number
from toolkit._random import device_of
from toolkit._tensors import tensors
from toolkit.blocks import no_graph
from toolkit.em.components import Components
from toolkit.em.engine.starts import seeds
from toolkit.em.models._common import (
    check_shape,
    check_start,
    clamp_coordinates,
    is_wrapped,
    log_of,
    log_weights_of,
    raise_row,
    shares,
)
from toolkit.em.models.discrete._values import (
    SEED,
    check_parameters,
    equal_log_weights,
    filled,
    product,
    split,
    weighted_mean,
)

__all__ = ["PoissonMixture"]

# The largest count for which x log(rate) - rate - log x!, a difference of large numbers, keeps enough digits.
_LARGEST_COUNT = {torch.float32: 64.0, torch.float64: 1e4}

# From here on Stirling's series is exact to rounding; below, log x! - x log x + x has few digits to lose.
_STIRLING = 32.0


@dataclass(frozen=True, kw_only=True, eq=False)
class PoissonMixture(Components):
    r"""A mixture whose features are independent counts.

    .. math:: a_{nk} = \log \pi_k + \sum_d x_{nd} \log \lambda_{kd} - \lambda_{kd} - \log x_{nd}!, \quad 0 \log 0 = 0

    For large counts the sum is a small difference of large numbers, and the deviance is computed instead.

    Attributes:
        log_weights: (K,), nats; the weights sum to 1.
        log_rates: (K, D); minus infinity where a rate is 0.
        pseudo_count: c, the number of samples at `prior_rates` added to every component: a gamma prior of shape
            :math:`1 + c\lambda_0` and rate c. 0 is maximum likelihood.
        prior_rates: (D,), positive. None is allowed without pseudo-counts only.

    Raises:
        ValueError: If the shapes do not fit together, or `pseudo_count` is negative.

    References:
        Hasselblad, "Estimation of finite mixtures of distributions from the exponential family", 1969, section 3.
        Loader, "Fast and accurate computation of binomial probabilities", 2000, section 2 (the deviance).

    Example:
        >>> from toolkit.em.models import PoissonMixture
        >>> two = PoissonMixture.from_rates(weights=torch.tensor([0.5, 0.5]), rates=torch.tensor([[0.0], [2.0]]))
        >>> two.log_joint(torch.tensor([[0.0], [2.0]])).exp()
        tensor([[0.5000, 0.0677],
                [0.0000, 0.1353]])
    """

    log_rates: Tensor
    pseudo_count: float = 0.0
    prior_rates: Tensor | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_parameters("log_rates", self.log_rates)
        shapes: dict[str, tuple[int, ...]] = {"log_rates": (self.n_components, self.log_rates.shape[1])}
        if self.prior_rates is not None:
            shapes["prior_rates"] = (self.log_rates.shape[1],)
        elif self.pseudo_count:
            raise ValueError("`prior_rates` should be given with `pseudo_count`. Found None.")
        self._check_fields(**shapes)
        number("pseudo_count", self.pseudo_count, least=0)

    @classmethod
    def from_rates(
        cls, *, weights: Tensor, rates: Tensor, pseudo_count: float = 0.0, prior_rates: Tensor | None = None
    ) -> Self:
        """Return the mixture with these weights (K,) and rates (K, D), from 0.

        Raises:
            ValueError: If a rate is negative or not finite, or the shapes do not fit together.
        """
        tensors(weights=weights, rates=rates)
        if not bool(((rates >= 0) & (rates < torch.inf)).all()):
            raise ValueError(f"`rates` should be finite and not negative. Found {rates.tolist()}.")
        return cls(
            log_weights=weights.log(), log_rates=log_of(rates), pseudo_count=pseudo_count, prior_rates=prior_rates
        )

    @classmethod
    @no_graph()
    def start(
        cls,
        x: Tensor,
        n_components: int,
        *,
        sample_weight: Tensor | None = None,
        pseudo_count: float = 0.0,
        generator: torch.Generator | None = None,
    ) -> Self:
        """Return equal weights, and rates half-way between the data's and those of samples far apart.

        Distances are between square roots, whose variance is about the same for all rates.

        Args:
            x: (N, D) counts, or NaN.
            n_components: Number of components, K; at most N.
            sample_weight: (N,), not negative. None: all 1.
            pseudo_count: As in the class, with the means of the data for `prior_rates`.
            generator: Randomness. None is torch's global generator.

        Raises:
            TypeError: If `x` is no real tensor.
            ValueError: If an argument is out of range.
        """
        n_components = check_start(x, n_components, sample_weight)
        _check_counts(x)
        x, weights = filled(x, sample_weight)
        middle = weighted_mean(x, weights)
        chosen = x[seeds(x.sqrt(), n_components, weights, generator)[0]]
        return cls(
            log_weights=equal_log_weights(n_components, x),
            log_rates=log_of((1 - SEED) * middle + SEED * chosen),
            pseudo_count=pseudo_count,
            prior_rates=torch.where(middle > 0, middle, 1.0) if pseudo_count else None,
        )

    @property
    def n_features(self) -> int:
        """D."""
        return self.log_rates.shape[1]

    @property
    def n_parameters(self) -> int:
        """Free parameters: the weights but one, and the rates."""
        return self.n_components - 1 + self.log_rates.numel()

    @property
    def rates(self) -> Tensor:
        """(K, D)."""
        return self.log_rates.exp()

    def check(self, x: Tensor) -> None:
        """Raise a ValueError unless `x` (N, D) holds integers from 0 and NaN alone."""
        check_shape(x, self.n_features)
        _check_counts(x)

    def log_joint(self, x: Tensor) -> Tensor:
        """Return the log of weight times probability, (N, K), nats; minus infinity where it is 0.

        Large counts take (N, K, D) of memory; otherwise the log-joint is one matrix product.

        Args:
            x: (N, D) counts, or NaN where there is none. The values are not looked at; `check` does that.

        Raises:
            ValueError: If `x` does not have the features of the mixture.
        """
        check_shape(x, self.n_features)
        counts, observed = split(x, self.log_rates)
        largest = _LARGEST_COUNT.get(counts.dtype, 0.0)
        if not is_wrapped(counts) and bool((counts <= largest).all()):
            never = self.log_rates == -torch.inf
            log_joint = counts @ self.log_rates.masked_fill(never, 0.0).mT - product(observed, self.rates)
            log_joint = self.log_weights + log_joint - (counts + 1).lgamma().sum(1, keepdim=True)
            return log_joint.masked_fill(counts @ never.to(counts).mT > 0, -torch.inf)
        deviances = _half_deviance(counts[:, None], self.log_rates)
        if observed is not None:
            deviances = deviances * observed[:, None]
        return self.log_weights - deviances.sum(-1) - _stirling(counts).sum(1, keepdim=True)

    def m_step(self, x: Tensor, responsibilities: Tensor) -> Self:
        """Return means weighted by the responsibilities (N, K); an empty component keeps its rates."""
        check_shape(x, self.n_features)
        counts, observed = split(x, self.log_rates)
        total = responsibilities.mT @ counts
        exposure = responsibilities.sum(0)[:, None] if observed is None else responsibilities.mT @ observed
        if self.prior_rates is not None:
            total, exposure = total + self.pseudo_count * self.prior_rates, exposure + self.pseudo_count
        log_rates = torch.where(exposure > 0, log_of(total) - log_of(exposure), self.log_rates)
        return dataclasses.replace(self, log_weights=shares(responsibilities.sum(0)), log_rates=log_rates)

    def log_prior(self) -> Tensor:
        """Return the log-density of the pseudo-counts' prior on the rates up to its constant: a scalar, nats."""
        if self.prior_rates is None or not self.pseudo_count:
            return self.log_rates.new_zeros(())
        return self.pseudo_count * (self.prior_rates * self.log_rates - self.rates).sum()

    def unconstrained(self) -> dict[str, Tensor]:
        """Return ``log_weights`` (K,) and ``log_rates`` (K, D), finite: at least -40."""
        return {
            "log_weights": clamp_coordinates(self.log_weights),
            "log_rates": clamp_coordinates(self.log_rates),
        }

    def with_unconstrained(self, values: Mapping[str, Tensor]) -> Self:
        """Return the mixture at these coordinates."""
        return dataclasses.replace(self, log_weights=log_weights_of(values), log_rates=values["log_rates"])

    @no_graph()
    def sample(self, n: int, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Draw `n` samples: counts (n, D), and their components (n,)."""
        labels = self._labels(n, generator)
        rates = self.rates[labels].to(device_of(generator, self.log_rates))
        return torch.poisson(rates, generator=generator).to(self.log_rates.device), labels


def _half_deviance(counts: Tensor, log_rates: Tensor) -> Tensor:
    r"""Return :math:`\lambda - x + x \log(x / \lambda)`, at least 0, whose terms cancel to no more than rounding."""
    rates = log_rates.exp()
    some, never = counts > 0, rates == 0
    safe_counts, safe_rates = torch.where(some, counts, 1.0), torch.where(never, 1.0, rates)
    excess = (safe_rates - safe_counts) / safe_counts
    # Far off, log1p of an excess near -1 has lost the rate; the difference of logarithms has not.
    far = excess < -0.5
    logs = torch.where(
        far,
        torch.where(never, 0.0, log_rates) - safe_counts.log(),
        torch.where(far, 0.0, excess).log1p(),
    )
    deviance = torch.where(some, safe_counts * (excess - logs), rates)
    return deviance.masked_fill(some & never, torch.inf)


def _stirling(counts: Tensor) -> Tensor:
    r"""Return :math:`\log x! - x \log x + x`."""
    large = counts > _STIRLING
    safe, small = torch.where(large, counts, 1.0), torch.where(large, 0.0, counts)
    inverse = 1 / safe
    square = inverse.square()
    series = inverse * (1 / 12 - square * (1 / 360 - square * (1 / 1260 - square / 1680)))
    direct = (small + 1).lgamma() - torch.xlogy(small, small) + small
    return torch.where(large, 0.5 * (2 * math.pi * safe).log() + series, direct)


def _check_counts(x: Tensor) -> None:
    sound = (x >= 0) & (x < torch.inf)
    if x.is_floating_point():
        sound = (sound & (x == x.floor())) | x.isnan()
    raise_row(x, ~sound, "hold counts, integers from 0, or NaN where nothing was observed")
