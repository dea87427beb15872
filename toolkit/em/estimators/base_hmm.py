"""The base of hidden Markov models as scikit-learn estimators: everything but the emissions.

S sequences, N steps in all, D features, K states.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable
from typing import Any, Literal, Self, get_args

import numpy as np
import torch
from sklearn.base import BaseEstimator
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from toolkit._checks import choice, index, integer, level, number
from toolkit._data import Array, Form, RandomState, generator_of
from toolkit._progress import Progress
from toolkit.blocks import no_graph
from toolkit.em import hmm
from toolkit.em.engine.acceleration import Accelerate, Climb, ranked
from toolkit.em.engine.checks import check_callback
from toolkit.em.estimators.base_mixture import numbers
from toolkit.em.hmm.core import check_lengths

__all__ = ["BaseHMM", "Decoder", "concentration", "dirichlet"]

Decoder = Literal["viterbi", "map"]

# The largest difference to 1 of the sum of probabilities that a user has set.
_SUM_TOLERANCE = 1e-6


class BaseHMM(BaseEstimator):  # type: ignore[misc]
    """Base of the estimators: everything but the emissions.

    The attributes define the model: if all of them are set, no `fit` is needed. `X` and `lengths` have the same form in
    all methods (see `fit`).
    """

    _letters: dict[str, str]

    n_components: int
    startprob_prior: float | Array
    transmat_prior: float | Array
    params: str
    init_params: str
    algorithm: Decoder
    accelerate: Accelerate
    callback: Callable[[int, float], None] | None
    startprob_: Array
    transmat_: Array

    # --- hooks of a subclass ---

    def _read(self, x: object, *, reset: bool) -> tuple[Tensor, Form]:
        """Return data as a tensor, and their form."""
        raise NotImplementedError

    def _emissions(self) -> hmm.Emissions:
        """Return the attributes' emissions, float64."""
        raise NotImplementedError

    def _start_emissions(self, x: Tensor, generator: torch.Generator) -> hmm.Emissions:
        """Return emissions to start from: the attributes, except those named in `init_params`."""
        raise NotImplementedError

    def _set_emissions(self, emissions: Any, form: Form) -> None:
        """Set the attributes."""
        raise NotImplementedError

    def _n_emission_parameters(self) -> int:
        raise NotImplementedError

    def _prior(self) -> hmm.DirichletPrior:
        return hmm.DirichletPrior(
            start=concentration("startprob_prior", self.startprob_prior),
            transition=concentration("transmat_prior", self.transmat_prior),
        )

    def _shape(self, x: Tensor) -> Tensor:
        """Return drawn data in the shape that `fit` takes."""
        return x

    # --- fit ---

    @no_graph()
    def fit(self, X: object, lengths: object = None, sequence_weight: object = None) -> Self:
        """Maximise the log-likelihood, plus the priors' log-densities, by Baum-Welch.

        Args:
            X: The sequences, one after the other: (N, D) numbers, or (N, 1) or (N,) symbols.
            lengths: (S,), which sum to N. None: one sequence.
            sequence_weight: (S,), not negative: how often each sequence counts. None: once each.

        Returns:
            The estimator.

        Warns:
            ConvergenceWarning: If the fit has not converged after `max_iter` steps.
            UserWarning: If an attribute was set before the first fit and is overwritten because of `init_params`.

        Raises:
            ValueError: If a parameter is out of range, the data do not fit, or a covariance becomes singular.
        """
        self._check_parameters()
        self._warn_of_overwriting()
        x, form = self._read(X, reset=True)
        sizes = _lengths(lengths, len(x))
        weight = None if sequence_weight is None else numbers("sequence_weight", sequence_weight).to(x.device)
        generator = generator_of(self.random_state, x.device)
        n_init = integer("n_init", self.n_init, 1)
        update = "".join(letter for letter in self._letters if letter in self.params)
        fits: list[Climb[hmm.HMMParameters]] = []
        with Progress(verbose=int(self.verbose), interval=10, callback=self.callback) as progress:
            for i in range(n_init):
                progress.begin(f"Start {i + 1} of {n_init}")
                found = hmm.fit(
                    self._start(x, generator),
                    x,
                    sizes,
                    sequence_weight=weight,
                    prior=self._prior().to(x.device),
                    reg_covar=float(getattr(self, "reg_covar", 0.0)),
                    update=update,
                    accelerate=self.accelerate,
                    tol=float(self.tol),
                    max_iter=int(self.max_iter),
                    callback=progress.listener,
                )
                fits.append(found)
                progress.end("converged" if found.converged else "not converged", found.log_likelihood)
        # float32 would turn a covariance singular whose features nearly depend on each other.
        self._set(ranked(fits, x.dtype)[0], dataclasses.replace(form, dtype=torch.float64))
        return self

    def _warn_of_overwriting(self) -> None:
        for letter in self.init_params:
            name = f"{self._letters[letter]}_"
            if hasattr(self, name) and not hasattr(self, "converged_"):
                warnings.warn(
                    f"`{name}` will be overwritten, because `init_params` has the letter {letter!r}. Leave the letter "
                    "out to start from the attribute.",
                    stacklevel=4,
                )

    def _start(self, x: Tensor, generator: torch.Generator) -> hmm.HMMParameters:
        k, double = int(self.n_components), torch.float64
        emissions = self._start_emissions(x, generator)
        if "s" in self.init_params:
            first = torch.full((k,), 1 / k, dtype=double, device="cpu")
        else:
            first = self._probabilities("startprob_", (k,))
        if "t" in self.init_params:
            transition = (dirichlet(k, k, generator) + 1 / k) / 2
        else:
            transition = self._probabilities("transmat_", (k, k))
        return hmm.HMMParameters.of(start=first.to(x.device), transition=transition.to(x.device), emissions=emissions)

    def _set(self, found: Climb[hmm.HMMParameters], form: Form) -> None:
        parameters = found.parameters
        self.startprob_ = form.give(parameters.log_start.exp())
        self.transmat_ = form.give(parameters.log_transition.exp())
        self._set_emissions(parameters.emissions, form)
        self.converged_, self.n_iter_ = found.converged, found.n_iter
        self.log_likelihood_ = found.log_likelihood
        self.history_ = np.array(found.history)
        if not found.converged and self.max_iter:
            warnings.warn(
                f"The best of {self.n_init} fits did not converge in {self.max_iter} steps. More (`max_iter`), a "
                "larger `tol`, or another start help.",
                ConvergenceWarning,
                stacklevel=4,
            )

    # --- questions ---

    def score(self, X: object, lengths: object = None) -> float:
        """Return the log-likelihood of all sequences together, nats."""
        parameters, x, sizes, _ = self._ready(X, lengths)
        return float(hmm.total_log_likelihood(parameters, x, sizes))

    def score_samples(self, X: object, lengths: object = None) -> tuple[float, Array]:
        """Return the log-likelihood of all sequences together, and the posteriors of states, (N, K)."""
        parameters, x, sizes, form = self._ready(X, lengths)
        found = hmm.posteriors(parameters, x, sizes)
        return float(found.log_likelihoods.sum()), form.give(found.states)

    def predict_proba(self, X: object, lengths: object = None) -> Array:
        """Return the posteriors of states given the whole sequences, (N, K)."""
        return self.score_samples(X, lengths)[1]

    def decode(self, X: object, lengths: object = None, algorithm: Decoder | None = None) -> tuple[float, Array]:
        """Return the score of the best states, and the states (N,).

        Args:
            X: The sequences (see `fit`).
            lengths: As in `fit`.
            algorithm: ``"viterbi"``: the most probable paths, with the log of their joint density. ``"map"``: each
                step's most probable state, with the expected number of correct states. None: the estimator's
                `algorithm`.
        """
        algorithm = algorithm or self.algorithm
        choice("algorithm", algorithm, get_args(Decoder))
        parameters, x, sizes, form = self._ready(X, lengths)
        if algorithm == "viterbi":
            states, scores = hmm.viterbi(parameters, x, sizes)
            return float(scores.sum()), form.give(states)
        largest, states = hmm.posteriors(parameters, x, sizes).states.max(1)
        return float(largest.sum()), form.give(states)

    def predict(self, X: object, lengths: object = None) -> Array:
        """Return the best states, (N,) (see `decode`)."""
        return self.decode(X, lengths)[1]

    @no_graph()
    def sample(
        self, n_samples: int = 1, random_state: RandomState = None, currstate: int | None = None
    ) -> tuple[Array, Array]:
        """Draw one sequence.

        Args:
            n_samples: Length of the sequence.
            random_state: As in the class. None: the estimator's.
            currstate: The first state. None: drawn from `startprob_`.

        Returns:
            Data, (N, D) or (N, 1), and states (N,).
        """
        parameters = self._parameters()
        n_samples = integer("n_samples", n_samples, 1)
        generator = generator_of(self.random_state if random_state is None else random_state, torch.device("cpu"))
        first = None if currstate is None else torch.tensor([integer("currstate", currstate, 0)], device="cpu")
        x, states = hmm.sample(parameters.to(torch.device("cpu")), [n_samples], generator=generator, first=first)
        form = Form.of(self.startprob_) if hasattr(self.startprob_, "dtype") else Form.of(np.zeros(1))
        return form.give(self._shape(x)), form.give(states)

    def get_stationary_distribution(self) -> Array:
        """Return the stationary distribution of states, (K,), which a transition leaves unchanged."""
        k = int(self.n_components)
        transition = self._probabilities("transmat_", (k, k))
        system = torch.cat([transition.mT - torch.eye(k, dtype=torch.float64, device="cpu"), transition.new_ones(1, k)])
        right = transition.new_zeros(k + 1, 1)
        right[-1] = 1.0
        return Form.of(np.zeros(1)).give(torch.linalg.lstsq(system, right, driver="gelsd").solution[:, 0].clamp(min=0))

    def aic(self, X: object, lengths: object = None) -> float:
        """Return Akaike's information criterion; the lower the better."""
        return -2 * self.score(X, lengths) + 2 * self._n_parameters()

    def bic(self, X: object, lengths: object = None) -> float:
        """Return the Bayesian information criterion; the lower the better."""
        parameters, x, sizes, _ = self._ready(X, lengths)
        return -2 * float(hmm.total_log_likelihood(parameters, x, sizes)) + self._n_parameters() * math.log(len(x))

    # --- how ---

    def _ready(self, x: object, lengths: object) -> tuple[hmm.HMMParameters, Tensor, list[int], Form]:
        parameters = self._parameters()
        data, form = self._read(x, reset=False)
        return parameters.to(data.device), data, _lengths(lengths, len(data)), form

    @property
    def parameters_(self) -> hmm.HMMParameters:
        """The fitted model as `toolkit.em.hmm` parameters, float64: for `surrogate`, `viterbi`, `posteriors`."""
        return self._parameters()

    def _parameters(self) -> hmm.HMMParameters:
        check_is_fitted(self, ("startprob_", "transmat_"))
        k = integer("n_components", self.n_components, 1)
        return hmm.HMMParameters.of(
            start=self._probabilities("startprob_", (k,)),
            transition=self._probabilities("transmat_", (k, k)),
            emissions=self._emissions(),
        )

    def _n_parameters(self) -> int:
        k = int(self.n_components)
        return k - 1 + k * (k - 1) + self._n_emission_parameters()

    def _given(self, name: str) -> Tensor:
        """Return an attribute that a fit or a user has set, float64."""
        if not hasattr(self, name):
            raise ValueError(f"`{name}` should be set, because `init_params` does not ask for it. Found nothing.")
        return numbers(name, getattr(self, name))

    def _probabilities(self, name: str, shape: tuple[int, ...]) -> Tensor:
        values = self._given(name)
        if tuple(values.shape) != shape:
            raise ValueError(f"`{name}` should have shape {shape}. Found {tuple(values.shape)}.")
        sums = values.sum(-1)
        if not bool((values >= 0).all()) or not bool(((sums - 1).abs() < _SUM_TOLERANCE).all()):
            raise ValueError(
                f"`{name}` should be probabilities that sum to 1. Found a least of {float(values.min())} and sums "
                f"from {float(sums.min())} to {float(sums.max())}."
            )
        return values / sums[..., None]

    def _check_parameters(self) -> None:
        integer("n_components", self.n_components)
        check_callback(self.callback)
        integer("max_iter", self.max_iter, 0)
        level(self.verbose)
        number("tol", self.tol, least=0)
        choice("algorithm", self.algorithm, get_args(Decoder))
        for name in ("params", "init_params"):
            found = getattr(self, name)
            if not isinstance(found, str) or set(found) - set(self._letters):
                letters = ", ".join(f"{letter} ({what})" for letter, what in self._letters.items())
                raise ValueError(f"`{name}` should have the letters {letters}. Found {found!r}.")


def _lengths(lengths: Any, n_steps: int) -> list[int]:
    return check_lengths(lengths if index(lengths) is None else [lengths], n_steps)


def concentration(name: str, value: object) -> float | Tensor:
    """Return Dirichlet concentrations; raise a ValueError unless they are positive and finite."""
    values = numbers(name, value)
    if not bool((values > 0).all()) or not bool(values.isfinite().all()):
        raise ValueError(f"`{name}` should be positive and finite. Found a least of {float(values.min())}.")
    return float(values) if values.ndim == 0 else values


def dirichlet(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """Draw rows uniformly from the simplex, (rows, columns), float64."""
    draws = torch.rand(rows, columns, generator=generator, dtype=torch.float64, device=generator.device)
    exponential = -(1 - draws).log().clamp(max=-torch.finfo(torch.float64).tiny)
    return exponential / exponential.sum(1, keepdim=True)
