"""The parameters of a hidden Markov model, their prior, and the output of the E-step.

S sequences, N steps in all, M symbols, K states.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from torch import Tensor

from toolkit.em.components import Movable
from toolkit.em.hmm._emissions import CategoricalEmissions, Emissions, check_prior, normalise

__all__ = ["DirichletPrior", "HMMParameters", "Posteriors"]


@dataclass(frozen=True, kw_only=True, eq=False)
class HMMParameters(Movable):
    """Parameters of a hidden Markov model.

    Attributes:
        log_start: (K,), nats: the first state's distribution.
        log_transition: (K, K), nats: row i is the distribution of the state after i. Minus infinity forbids a
            transition, and EM keeps it forbidden.
        emissions: The emission distributions of the states.

    Raises:
        ValueError: If the shapes do not fit together.

    Example:
        >>> from toolkit.em.hmm import posteriors
        >>> weather = HMMParameters.of(
        ...     start=torch.tensor([0.5, 0.5]), transition=torch.tensor([[0.7, 0.3], [0.3, 0.7]]),
        ...     emissions=CategoricalEmissions(log_probabilities=torch.tensor([[0.9, 0.1], [0.2, 0.8]]).log()))
        >>> posteriors(weather, torch.tensor([0, 0, 1, 0, 0])).states[:, 0]
        tensor([0.8673, 0.8204, 0.3075, 0.8204, 0.8673])
    """

    log_start: Tensor
    log_transition: Tensor
    emissions: Emissions

    def __post_init__(self) -> None:
        k = self.emissions.n_states
        for name, value, shape in (
            ("log_start", self.log_start, (k,)),
            ("log_transition", self.log_transition, (k, k)),
        ):
            if value.shape != shape:
                raise ValueError(f"`{name}` should have shape {shape}. Found {tuple(value.shape)}.")

    @classmethod
    def of(cls, *, start: Tensor, transition: Tensor, emissions: Emissions) -> Self:
        """Return the parameters with these probabilities (K,) and (K, K), whose rows sum to 1."""
        return cls(log_start=start.log(), log_transition=transition.log(), emissions=emissions)

    @property
    def n_states(self) -> int:
        """K."""
        return len(self.log_start)

    def unconstrained(self) -> dict[str, Tensor]:
        """Return unconstrained coordinates; logarithms are free up to a constant in each row."""
        return {"log_start": self.log_start, "log_transition": self.log_transition, **self.emissions.unconstrained()}

    def with_unconstrained(self, values: Mapping[str, Tensor]) -> Self:
        """Return the model at these coordinates; probabilities of 0 stay 0."""
        rest = {name: value for name, value in values.items() if name not in ("log_start", "log_transition")}
        return dataclasses.replace(
            self,
            log_start=values["log_start"].log_softmax(0),
            log_transition=values["log_transition"].log_softmax(1),
            emissions=self.emissions.with_unconstrained(rest),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Posteriors:
    """The output of the E-step; with sequence weights, times the weight of the sequence.

    Attributes:
        states: (N, K): probability of each state at each step, given the whole sequence.
        start: (K,): sum of `states` over the sequences' first steps.
        transitions: (K, K): expected numbers of transitions.
        log_likelihoods: (S,), nats per sequence, not weighted.
    """

    states: Tensor
    start: Tensor
    transitions: Tensor
    log_likelihoods: Tensor


@dataclass(frozen=True, kw_only=True)
class DirichletPrior(Movable):
    """Dirichlet concentrations, each one number or a tensor that broadcasts. 1 is no prior: maximum likelihood.

    Attributes:
        start: (K,).
        transition: (K, K).
        emission: (K, M), for symbols.
    """

    start: float | Tensor = 1.0
    transition: float | Tensor = 1.0
    emission: float | Tensor = 1.0

    def __post_init__(self) -> None:
        for name in ("start", "transition", "emission"):
            check_prior(name, getattr(self, name))

    def log_density(self, parameters: HMMParameters) -> Tensor:
        """Return the log of the prior density up to a constant, nats; probabilities of 0 are left out."""
        terms = [(self.start, parameters.log_start), (self.transition, parameters.log_transition)]
        if isinstance(parameters.emissions, CategoricalEmissions):
            terms.append((self.emission, parameters.emissions.log_probabilities))
        terms = [(prior, logs) for prior, logs in terms if isinstance(prior, Tensor) or prior != 1]
        values = (((prior - 1) * logs.masked_fill(logs == -math.inf, 0.0)).sum() for prior, logs in terms)
        return sum(values, start=parameters.log_start.new_zeros(()))


def with_counts(
    parameters: HMMParameters, start: Tensor, transitions: Tensor, emissions: Emissions, prior: DirichletPrior
) -> HMMParameters:
    """Return the M-step of the probabilities of paths, from expected counts and a prior, with the emissions given."""
    return dataclasses.replace(
        parameters,
        log_start=normalise(start, parameters.log_start, prior.start),
        log_transition=normalise(transitions, parameters.log_transition, prior.transition),
        emissions=emissions,
    )
