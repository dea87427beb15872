r"""Mixtures of counts: independent Bernoulli, Poisson or categorical features within each component.

Within a component the features are independent, so a missing entry is left out exactly: its factor of the density is 1.
Missing entries are NaN (for categories also any negative code).

A prior is given as pseudo-counts: observations added to every component. MAP EM never lowers
``log_likelihood(mixture, x) + mixture.log_prior() / N``, where N is the sum of the sample weights.

N samples, D features, K components, C categories of all features together.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from toolkit._checks import integer, number
from toolkit.blocks import no_graph
from toolkit.em.engine.seeding import device_of, seeds
from toolkit.em.models._common import (
    Components,
    check_shape,
    check_start,
    clamp_coordinates,
    is_wrapped,
    log_of,
    log_weights_of,
    raise_row,
    shares,
)

__all__ = ["BernoulliMixture", "CategoricalMixture", "PoissonMixture"]

# The share of the seed in a start; the rest is the mean of the data, so that no start excludes a sample.
_SEED = 0.5

# The largest count for which x log(rate) - rate - log x!, a difference of large numbers, keeps enough digits.
_LARGEST_COUNT = {torch.float32: 64.0, torch.float64: 1e4}

# From here on Stirling's series is exact to rounding; below, log x! - x log x + x has few digits to lose.
_STIRLING = 32.0


@dataclass(frozen=True, kw_only=True, eq=False)
class BernoulliMixture(Components):
    r"""A mixture whose features are independent and binary: latent class analysis of yes and no.

    .. math:: a_{nk} = \log \pi_k + \sum_d x_{nd} \log p_{kd} + (1 - x_{nd}) \log (1 - p_{kd}), \quad 0 \log 0 = 0

    Attributes:
        log_weights: (K,), nats; the weights sum to 1.
        logits: (K, D), the log-odds :math:`\log p_{kd} / (1 - p_{kd})`; infinite where a probability is 0 or 1.
        pseudo_count: c, the number of ones and of zeros added to each feature of every component: a Beta(1 + c, 1 + c)
            prior. 0 is maximum likelihood.

    Raises:
        ValueError: If the shapes do not fit together, or `pseudo_count` is negative.

    References:
        Bishop, "Pattern recognition and machine learning", 2006, equations 9.48 to 9.60.

    Example:
        >>> from toolkit.em.models import BernoulliMixture
        >>> two = BernoulliMixture.from_probabilities(
        ...     weights=torch.tensor([0.5, 0.5]), probabilities=torch.tensor([[0.0, 0.5], [0.5, 1.0]]))
        >>> two.log_joint(torch.tensor([[0.0, 1.0], [1.0, 1.0]])).exp()
        tensor([[0.2500, 0.2500],
                [0.0000, 0.2500]])
    """

    logits: Tensor
    pseudo_count: float = 0.0

    def __post_init__(self) -> None:
        _check_table("logits", self.logits)
        self._check_fields(logits=(self.n_components, self.logits.shape[1]))
        number("pseudo_count", self.pseudo_count, least=0)

    @classmethod
    def from_probabilities(cls, *, weights: Tensor, probabilities: Tensor, pseudo_count: float = 0.0) -> Self:
        """Return the mixture with these weights (K,) and probabilities of a one (K, D), from 0 to 1.

        Raises:
            ValueError: If a probability is out of range, or the shapes do not fit together.
        """
        if not bool(((probabilities >= 0) & (probabilities <= 1)).all()):
            raise ValueError(f"`probabilities` should be from 0 to 1. Found {probabilities.tolist()}.")
        logits = log_of(probabilities) - log_of(1 - probabilities)
        return cls(log_weights=weights.log(), logits=logits, pseudo_count=pseudo_count)

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
        """Return equal weights, and probabilities half-way between the data's and those of samples far apart.

        Args:
            x: (N, D), each 0, 1 or NaN.
            n_components: K, at most N.
            sample_weight: (N,), not negative. None: all 1.
            pseudo_count: As in the class.
            generator: Randomness. None is torch's global generator.

        Raises:
            TypeError: If `x` is no real tensor.
            ValueError: If an argument is out of range.
        """
        n_components = check_start(x, n_components, sample_weight)
        _check_binary(x)
        points, weights = _filled(x, sample_weight)
        middle = 0.25 + 0.5 * _mean(points, weights)  # away from 0 and 1, where a probability would stay
        chosen = points[seeds(points, n_components, weights, generator)[0]]
        probabilities = (1 - _SEED) * middle + _SEED * (0.25 + 0.5 * chosen)
        return cls(log_weights=_equal(n_components, points), logits=probabilities.logit(), pseudo_count=pseudo_count)

    @property
    def n_features(self) -> int:
        """D."""
        return self.logits.shape[1]

    @property
    def n_parameters(self) -> int:
        """Free parameters: the weights but one, and the probabilities."""
        return self.n_components - 1 + self.logits.numel()

    @property
    def probabilities(self) -> Tensor:
        """Probabilities of a one, (K, D)."""
        return self.logits.sigmoid()

    def check(self, x: Tensor) -> None:
        """Raise a ValueError unless `x` (N, D) holds 0, 1 and NaN alone."""
        check_shape(x, self.n_features)
        _check_binary(x)

    def log_joint(self, x: Tensor) -> Tensor:
        """Return the log of weight times probability, (N, K), nats; minus infinity where it is 0.

        Args:
            x: (N, D), each 0, 1, or NaN where it was not observed. The values are not looked at; `check` does that.

        Raises:
            ValueError: If `x` does not have the features of the mixture.
        """
        check_shape(x, self.n_features)
        ones, observed = _split(x, self.logits)
        certain = self.logits.isinf()
        logits = self.logits.masked_fill(certain, 0.0)
        of_zero = logsigmoid(-logits).masked_fill(certain, 0.0)
        log_joint = self.log_weights + ones @ logits.mT + _product(observed, of_zero)
        if not is_wrapped(certain) and not bool(certain.any()):
            return log_joint
        zeros = _complement(ones, observed)
        against = ones @ (self.logits == -torch.inf).to(ones).mT + zeros @ (self.logits == torch.inf).to(ones).mT
        return log_joint.masked_fill(against > 0, -torch.inf)

    def m_step(self, x: Tensor, responsibilities: Tensor) -> Self:
        """Return shares of ones, weighted by responsibilities (N, K); an empty component keeps its probabilities."""
        check_shape(x, self.n_features)
        ones, observed = _split(x, self.logits)
        of_one = responsibilities.mT @ ones + self.pseudo_count
        of_zero = responsibilities.mT @ _complement(ones, observed) + self.pseudo_count
        logits = torch.where(of_one + of_zero > 0, log_of(of_one) - log_of(of_zero), self.logits)
        return dataclasses.replace(self, log_weights=shares(responsibilities.sum(0)), logits=logits)

    def log_prior(self) -> Tensor:
        """Return the log-density of the pseudo-counts' prior up to its constant: a scalar, nats."""
        if not self.pseudo_count:
            return self.logits.new_zeros(())
        return self.pseudo_count * (logsigmoid(self.logits) + logsigmoid(-self.logits)).sum()

    def unconstrained(self) -> dict[str, Tensor]:
        """Return ``log_weights`` (K,) and ``logits`` (K, D), finite: at most 40 from 0."""
        return {
            "log_weights": clamp_coordinates(self.log_weights),
            "logits": clamp_coordinates(self.logits, above=True),
        }

    def with_unconstrained(self, values: Mapping[str, Tensor]) -> Self:
        """Return the mixture at these coordinates."""
        return dataclasses.replace(self, log_weights=log_weights_of(values), logits=values["logits"])

    @no_graph()
    def sample(self, n: int, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Draw `n` samples: zeros and ones (n, D), and their components (n,)."""
        labels = self._labels(n, generator)
        probabilities = self.probabilities[labels].to(device_of(generator, self.logits))
        return torch.bernoulli(probabilities, generator=generator).to(self.logits.device), labels


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
        _check_table("log_rates", self.log_rates)
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
            n_components: K, at most N.
            sample_weight: (N,), not negative. None: all 1.
            pseudo_count: As in the class, with the means of the data for `prior_rates`.
            generator: Randomness. None is torch's global generator.

        Raises:
            TypeError: If `x` is no real tensor.
            ValueError: If an argument is out of range.
        """
        n_components = check_start(x, n_components, sample_weight)
        _check_counts(x)
        points, weights = _filled(x, sample_weight)
        middle = _mean(points, weights)
        chosen = points[seeds(points.sqrt(), n_components, weights, generator)[0]]
        return cls(
            log_weights=_equal(n_components, points),
            log_rates=log_of((1 - _SEED) * middle + _SEED * chosen),
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
        counts, observed = _split(x, self.log_rates)
        largest = _LARGEST_COUNT.get(counts.dtype, 0.0)
        if not is_wrapped(counts) and bool((counts <= largest).all()):
            never = self.log_rates == -torch.inf
            log_joint = counts @ self.log_rates.masked_fill(never, 0.0).mT - _product(observed, self.rates)
            log_joint = self.log_weights + log_joint - (counts + 1).lgamma().sum(1, keepdim=True)
            return log_joint.masked_fill(counts @ never.to(counts).mT > 0, -torch.inf)
        deviances = _half_deviance(counts[:, None], self.log_rates)
        if observed is not None:
            deviances = deviances * observed[:, None]
        return self.log_weights - deviances.sum(-1) - _stirling(counts).sum(1, keepdim=True)

    def m_step(self, x: Tensor, responsibilities: Tensor) -> Self:
        """Return means weighted by the responsibilities (N, K); an empty component keeps its rates."""
        check_shape(x, self.n_features)
        counts, observed = _split(x, self.log_rates)
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


@dataclass(frozen=True, kw_only=True, eq=False)
class CategoricalMixture(Components):
    r"""A mixture whose features are independent and categorical: latent class analysis.

    .. math:: a_{nk} = \log \pi_k + \sum_d \log p_{kd x_{nd}}

    Features may have different numbers of categories; their tables stand side by side.

    Attributes:
        log_weights: (K,), nats; the weights sum to 1.
        log_probabilities: (K, C), nats: first the categories of the first feature, then those of the second, ...
        n_categories: Number of categories of each of the D features; they sum to C.
        pseudo_count: c, the number of observations of each category added to every component: a Dirichlet(1 + c) prior.
            0 is maximum likelihood.

    Raises:
        ValueError: If the shapes do not fit together, or `pseudo_count` is negative.

    References:
        Goodman, "Exploratory latent structure analysis using both identifiable and unidentifiable models", 1974,
        equations 11 to 15.

    Example:
        >>> from toolkit.em.models import CategoricalMixture
        >>> colour, size = torch.tensor([[0.5, 0.25, 0.25], [0.0, 0.0, 1.0]]), torch.tensor([[0.5, 0.5], [0.1, 0.9]])
        >>> two = CategoricalMixture.from_probabilities(
        ...     weights=torch.tensor([0.5, 0.5]), probabilities=[colour, size])
        >>> two.log_joint(torch.tensor([[0, 1], [2, 1]])).exp()
        tensor([[0.1250, 0.0000],
                [0.0625, 0.4500]])
    """

    log_probabilities: Tensor
    n_categories: tuple[int, ...]
    pseudo_count: float = 0.0

    def __post_init__(self) -> None:
        if not self.n_categories:
            raise ValueError("`n_categories` should be at least one number. Found none.")
        for n in self.n_categories:
            integer("n_categories", n)
        _check_table("log_probabilities", self.log_probabilities)
        self._check_fields(log_probabilities=(self.n_components, sum(self.n_categories)))
        number("pseudo_count", self.pseudo_count, least=0)

    @classmethod
    def from_probabilities(cls, *, weights: Tensor, probabilities: Sequence[Tensor], pseudo_count: float = 0.0) -> Self:
        """Return the mixture with these weights (K,) and, for each feature, a table (K, categories) of rows of sum 1.

        Raises:
            ValueError: If a probability is negative, a row does not sum to 1, or the shapes do not fit together.
        """
        for table in probabilities:
            if not bool((table >= 0).all()) or not bool(((table.sum(1) - 1).abs() < 1e-4).all()):
                raise ValueError(f"`probabilities` should not be negative, and sum to 1. Found {table.tolist()}.")
        return cls(
            log_weights=weights.log(),
            log_probabilities=torch.cat([log_of(table / table.sum(1, keepdim=True)) for table in probabilities], 1),
            n_categories=tuple(table.shape[1] for table in probabilities),
            pseudo_count=pseudo_count,
        )

    @classmethod
    @no_graph()
    def start(
        cls,
        x: Tensor,
        n_components: int,
        *,
        n_categories: Sequence[int] | None = None,
        sample_weight: Tensor | None = None,
        pseudo_count: float = 0.0,
        generator: torch.Generator | None = None,
    ) -> Self:
        """Return equal weights, and probabilities half-way between the data's and those of samples far apart.

        Args:
            x: (N, D) codes from 0; negative or NaN where there is none.
            n_components: K, at most N.
            n_categories: Categories of each feature. None: one more than the largest code.
            sample_weight: (N,), not negative. None: all 1.
            pseudo_count: As in the class.
            generator: Randomness. None is torch's global generator.

        Raises:
            TypeError: If `x` is no real tensor.
            ValueError: If an argument is out of range.
        """
        n_components = check_start(x, n_components, sample_weight)
        if n_categories is None:
            n_categories = _largest_codes(x)
        sizes = tuple(n_categories)
        _check_codes(x, sizes)
        points, weights = _filled(_one_hot(_codes(x, sizes), sizes, _float_type(x)), sample_weight)
        # Half a sample of each category keeps a probability from 0, where it would stay.
        middle = _normalised(points.mT @ weights.to(points) + 0.5, sizes)
        chosen = points[seeds(points, n_components, weights, generator)[0]]
        uniform = _normalised(torch.ones_like(middle), sizes)
        rows = _SEED * chosen + (1 - _SEED) * (0.5 * middle + 0.5 * uniform)
        return cls(
            log_weights=_equal(n_components, points),
            log_probabilities=_normalised(rows, sizes).log(),
            n_categories=sizes,
            pseudo_count=pseudo_count,
        )

    @property
    def n_features(self) -> int:
        """D."""
        return len(self.n_categories)

    @property
    def n_parameters(self) -> int:
        """Free parameters: the weights but one, and of each table all columns but one."""
        return self.n_components - 1 + self.n_components * (sum(self.n_categories) - self.n_features)

    @property
    def probabilities(self) -> tuple[Tensor, ...]:
        """For each feature, (K, categories)."""
        tables: tuple[Tensor, ...] = self.log_probabilities.exp().split(self.n_categories, 1)
        return tables

    def check(self, x: Tensor) -> None:
        """Raise a ValueError unless `x` (N, D) holds codes of categories, NaN and negative numbers alone."""
        check_shape(x, self.n_features)
        _check_codes(x, self.n_categories)

    def log_joint(self, x: Tensor) -> Tensor:
        """Return the log of weight times probability, (N, K), nats; minus infinity where it is 0.

        Args:
            x: (N, D) codes from 0; negative or NaN where there is none.

        Raises:
            ValueError: If `x` does not have the features of the mixture.
            IndexError: If a code has no category; `check` shows the sample.
        """
        check_shape(x, self.n_features)
        # One more row, of zeros, for missing entries.
        table = torch.cat([self.log_probabilities.mT, torch.zeros_like(self.log_probabilities[:, :1].mT)])
        log_joint = self.log_weights
        for codes in _codes(x, self.n_categories).unbind(1):
            log_joint = log_joint + table[codes]
        return log_joint

    def m_step(self, x: Tensor, responsibilities: Tensor) -> Self:
        """Return the categories' shares, weighted by the responsibilities (N, K); an empty component keeps its own."""
        check_shape(x, self.n_features)
        counts = responsibilities.new_zeros(sum(self.n_categories) + 1, self.n_components)
        for codes in _codes(x, self.n_categories).unbind(1):
            counts = counts.index_add(0, codes, responsibilities)
        counts = counts[:-1].mT + self.pseudo_count
        total = _totals(counts, self.n_categories)
        log_probabilities = torch.where(total > 0, log_of(counts) - log_of(total), self.log_probabilities)
        return dataclasses.replace(
            self, log_weights=shares(responsibilities.sum(0)), log_probabilities=log_probabilities
        )

    def log_prior(self) -> Tensor:
        """Return the log-density of the pseudo-counts' prior up to its constant: a scalar, nats."""
        if not self.pseudo_count:
            return self.log_probabilities.new_zeros(())
        return self.pseudo_count * self.log_probabilities.sum()

    def unconstrained(self) -> dict[str, Tensor]:
        """Return ``log_weights`` (K,) and ``logits`` (K, C), finite; logits are free up to a constant per feature."""
        return {
            "log_weights": clamp_coordinates(self.log_weights),
            "logits": clamp_coordinates(self.log_probabilities),
        }

    def with_unconstrained(self, values: Mapping[str, Tensor]) -> Self:
        """Return the mixture at these coordinates."""
        tables = values["logits"].split(self.n_categories, 1)
        log_probabilities = torch.cat([table.log_softmax(1) for table in tables], 1)
        return dataclasses.replace(self, log_weights=log_weights_of(values), log_probabilities=log_probabilities)

    @no_graph()
    def sample(self, n: int, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Draw `n` samples: codes (n, D), int64, and their components (n,)."""
        labels = self._labels(n, generator)
        device = device_of(generator, self.log_weights)
        draws = [
            torch.multinomial(table[labels].to(device), 1, generator=generator).to(labels.device)
            for table in self.probabilities
        ]
        return torch.cat(draws, 1), labels


def _split(x: Tensor, like: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the values in the parameters' type with 0 for NaN, and the mask of observed entries, None for all."""
    values = x.to(like.dtype)
    if not x.is_floating_point():
        return values, None
    missing = values.isnan()
    if not is_wrapped(missing) and not bool(missing.any()):
        return values, None
    return values.masked_fill(missing, 0.0), (~missing).to(like.dtype)


def _product(observed: Tensor | None, table: Tensor) -> Tensor:
    """Return the sum of a table (K, D) over the observed features: (N, K), or (K,) if all are observed."""
    return table.sum(1) if observed is None else observed @ table.mT


def _complement(ones: Tensor, observed: Tensor | None) -> Tensor:
    return 1 - ones if observed is None else observed - ones


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


def _codes(x: Tensor, n_categories: Sequence[int]) -> Tensor:
    """Return the columns of the side-by-side tables (N, D); missing entries get the column after the last."""
    offsets = torch.tensor([0, *n_categories], device=x.device).cumsum(0)
    missing = x < 0
    if x.is_floating_point():
        missing = missing | x.isnan()
    codes = x.masked_fill(missing, 0).long()
    inside = codes < torch.tensor(n_categories, device=x.device)
    # A code too large would be read from the next feature's table; one past the end cannot be read at all.
    return torch.where(missing, offsets[-1], torch.where(inside, codes + offsets[:-1], offsets[-1] + 1))


def _one_hot(codes: Tensor, n_categories: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return 0 and 1 (N, C); NaN for missing features."""
    total = sum(n_categories)
    hot = torch.zeros(len(codes), total + 1, dtype=dtype, device=codes.device).scatter(1, codes, 1.0)[:, :-1]
    return torch.where(_totals(hot, n_categories) > 0, hot, torch.nan)


def _totals(table: Tensor, n_categories: Sequence[int]) -> Tensor:
    """Return sums over each feature's categories, repeated for each of them."""
    parts = table.split(list(n_categories), -1)
    return torch.cat([part.sum(-1, keepdim=True).expand_as(part) for part in parts], -1)


def _normalised(table: Tensor, n_categories: Sequence[int]) -> Tensor:
    return table / _totals(table, n_categories)


def _filled(x: Tensor, sample_weight: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return floating-point samples with missing entries replaced by the features' means, and the samples' weights."""
    points = x.to(_float_type(x))
    weights = torch.ones_like(points[:, 0]) if sample_weight is None else sample_weight.to(points)
    missing = points.isnan()
    there = weights[:, None] * (~missing)
    total = there.sum(0)
    means = (there * points.masked_fill(missing, 0.0)).sum(0) / torch.where(total > 0, total, 1.0)
    return torch.where(missing, means, points), weights


def _float_type(x: Tensor) -> torch.dtype:
    """Return the type of the parameters: the samples', or float64 for integers."""
    return x.dtype if x.is_floating_point() else torch.float64


def _mean(points: Tensor, weights: Tensor) -> Tensor:
    return (weights[:, None] * points).sum(0) / weights.sum()


def _equal(n: int, like: Tensor) -> Tensor:
    return like.new_full((n,), -math.log(n))


def _largest_codes(x: Tensor) -> list[int]:
    known = x.nan_to_num(nan=-1) if x.is_floating_point() else x
    return [max(1, int(value) + 1) for value in known.amax(0)]


def _check_binary(x: Tensor) -> None:
    if x.dtype != torch.bool:
        raise_row(x, (x != 0) & (x != 1) & ~x.isnan(), "hold 0, 1, or NaN where nothing was observed")


def _check_counts(x: Tensor) -> None:
    sound = (x >= 0) & (x < torch.inf)
    if x.is_floating_point():
        sound = (sound & (x == x.floor())) | x.isnan()
    raise_row(x, ~sound, "hold counts, integers from 0, or NaN where nothing was observed")


def _check_codes(x: Tensor, n_categories: Sequence[int]) -> None:
    if len(n_categories) != x.shape[1]:
        raise ValueError(f"`n_categories` should have {x.shape[1]} entries, one a feature. Found {len(n_categories)}.")
    bad = x >= torch.tensor(n_categories, device=x.device)
    if x.is_floating_point():
        bad = bad | ((x != x.floor()) & ~x.isnan())
    raise_row(x, bad, f"hold codes below {list(n_categories)}, or a negative number where nothing was observed")


def _check_table(name: str, table: Tensor) -> None:
    if table.ndim != 2:
        raise ValueError(f"`{name}` should have two dimensions, the components first. Found {tuple(table.shape)}.")
