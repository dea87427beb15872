"""Mixtures of independent categorical features: latent class analysis.

N samples, D features, K components, C categories of all features together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from toolkit._checks import integer, number
from toolkit._random import device_of
from toolkit._tensors import tensors
from toolkit.blocks import no_graph
from toolkit.em.components import Components
from toolkit.em.engine.starts import seeds
from toolkit.em.models._common import (
    check_shape,
    check_start,
    clamp_coordinates,
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
    float_type,
)

__all__ = ["CategoricalMixture"]


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
        super().__post_init__()
        if not self.n_categories:
            raise ValueError("`n_categories` should be at least one number. Found none.")
        for n in self.n_categories:
            integer("n_categories", n)
        check_parameters("log_probabilities", self.log_probabilities)
        self._check_fields(log_probabilities=(self.n_components, sum(self.n_categories)))
        number("pseudo_count", self.pseudo_count, least=0)

    @classmethod
    def from_probabilities(cls, *, weights: Tensor, probabilities: Sequence[Tensor], pseudo_count: float = 0.0) -> Self:
        """Return the mixture with these weights (K,) and, for each feature, a table (K, categories) of rows of sum 1.

        Raises:
            ValueError: If a probability is negative, a row does not sum to 1, or the shapes do not fit together.
        """
        tensors(weights=weights)
        for table in probabilities:
            tensors(probabilities=table)
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
            n_components: Number of components, K; at most N.
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
        indicators, weights = filled(_one_hot(_codes(x, sizes), sizes, float_type(x)), sample_weight)
        # Half a sample of each category keeps a probability from 0, where it would stay.
        middle = _normalised(indicators.mT @ weights.to(indicators) + 0.5, sizes)
        chosen = indicators[seeds(indicators, n_components, weights, generator)[0]]
        uniform = _normalised(torch.ones_like(middle), sizes)
        rows = SEED * chosen + (1 - SEED) * (0.5 * middle + 0.5 * uniform)
        return cls(
            log_weights=equal_log_weights(n_components, indicators),
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


def _largest_codes(x: Tensor) -> list[int]:
    known = x.nan_to_num(nan=-1) if x.is_floating_point() else x
    return [max(1, int(value) + 1) for value in known.amax(0)]


def _check_codes(x: Tensor, n_categories: Sequence[int]) -> None:
    if len(n_categories) != x.shape[1]:
        raise ValueError(f"`n_categories` should have {x.shape[1]} entries, one a feature. Found {len(n_categories)}.")
    bad = x >= torch.tensor(n_categories, device=x.device)
    if x.is_floating_point():
        bad = bad | ((x != x.floor()) & ~x.isnan())
    raise_row(x, bad, f"hold codes below {list(n_categories)}, or a negative number where nothing was observed")
