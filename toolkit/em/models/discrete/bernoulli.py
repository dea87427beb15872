"""Mixtures of independent binary features: latent class analysis of yes and no.

N samples, D features, K components.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

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

__all__ = ["BernoulliMixture"]


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
        super().__post_init__()
        check_parameters("logits", self.logits)
        self._check_fields(logits=(self.n_components, self.logits.shape[1]))
        number("pseudo_count", self.pseudo_count, least=0)

    @classmethod
    def from_probabilities(cls, *, weights: Tensor, probabilities: Tensor, pseudo_count: float = 0.0) -> Self:
        """Return the mixture with these weights (K,) and probabilities of a one (K, D), from 0 to 1.

        Raises:
            ValueError: If a probability is out of range, or the shapes do not fit together.
        """
        tensors(weights=weights, probabilities=probabilities)
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
            n_components: Number of components, K; at most N.
            sample_weight: (N,), not negative. None: all 1.
            pseudo_count: As in the class.
            generator: Randomness. None is torch's global generator.

        Raises:
            TypeError: If `x` is no real tensor.
            ValueError: If an argument is out of range.
        """
        n_components = check_start(x, n_components, sample_weight)
        _check_binary(x)
        x, weights = filled(x, sample_weight)
        middle = 0.25 + 0.5 * weighted_mean(x, weights)  # away from 0 and 1, where a probability would stay
        chosen = x[seeds(x, n_components, weights, generator)[0]]
        probabilities = (1 - SEED) * middle + SEED * (0.25 + 0.5 * chosen)
        return cls(
            log_weights=equal_log_weights(n_components, x), logits=probabilities.logit(), pseudo_count=pseudo_count
        )

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
        ones, observed = split(x, self.logits)
        certain = self.logits.isinf()
        logits = self.logits.masked_fill(certain, 0.0)
        of_zero = logsigmoid(-logits).masked_fill(certain, 0.0)
        log_joint = self.log_weights + ones @ logits.mT + product(observed, of_zero)
        if not is_wrapped(certain) and not bool(certain.any()):
            return log_joint
        zeros = _complement(ones, observed)
        against = ones @ (self.logits == -torch.inf).to(ones).mT + zeros @ (self.logits == torch.inf).to(ones).mT
        return log_joint.masked_fill(against > 0, -torch.inf)

    def m_step(self, x: Tensor, responsibilities: Tensor) -> Self:
        """Return shares of ones, weighted by responsibilities (N, K); an empty component keeps its probabilities."""
        check_shape(x, self.n_features)
        ones, observed = split(x, self.logits)
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


def _complement(ones: Tensor, observed: Tensor | None) -> Tensor:
    return 1 - ones if observed is None else observed - ones


def _check_binary(x: Tensor) -> None:
    if x.dtype != torch.bool:
        raise_row(x, (x != 0) & (x != 1) & ~x.isnan(), "hold 0, 1, or NaN where nothing was observed")
