"""Estimators of hidden Markov models: thin classes for users of scikit-learn and hmmlearn.

N steps in all, D features, M symbols, K states.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from toolkit._checks import integer, number
from toolkit._data import Array, Form, RandomState, from_numpy, read, refuse_masked
from toolkit.em import hmm
from toolkit.em.covariance import CovarianceType, structure_of
from toolkit.em.engine.acceleration import Accelerate
from toolkit.em.engine.starts import Init, start
from toolkit.em.estimators.base_hmm import BaseHMM, Decoder, concentration, dirichlet

__all__ = ["CategoricalHMM", "GaussianHMM"]

# The most symbols that `fit` takes from the largest one of the data: more are numbers of another kind, and the columns
# of their probabilities would fill the memory.
_MOST_SYMBOLS = 2**22


class GaussianHMM(BaseHMM):
    r"""A hidden Markov model whose states emit Gaussian vectors, fitted by Baum-Welch.

    Parameters, attributes and methods are those of hmmlearn, with these differences. `tol` bounds the remaining gain in
    nats per step, and steps are accelerated unless ``accelerate="none"``. Variances have no prior; instead `reg_covar`
    is added to them. `covars_` is shaped by the type, when read and when set. Attributes are float64, also for samples
    in float32.

    Args:
        n_components: Number of hidden states, K.
        covariance_type: ``"full"``, ``"tied"``, ``"diag"`` or ``"spherical"``.
        reg_covar: Added to every variance, in the data's units squared.
        startprob_prior: Dirichlet concentrations, one or (K,). 1 is no prior.
        transmat_prior: Dirichlet concentrations, one or (K, K). 1 is no prior.
        algorithm: How `predict` decodes: ``"viterbi"`` or ``"map"``.
        random_state: An integer, a numpy.random.RandomState, a torch.Generator, or None for NumPy's global state.
        max_iter: The most EM steps. 0 sets the attributes to the start.
        tol: The fit has converged when the remaining gain is about `tol`, in nats per step.
        n_init: Number of starts. The best fit is kept.
        params: Parameters to estimate: s (start), t (transitions), m (means), c (covariances).
        init_params: Parameters to initialise, by the same letters; the other attributes must be set.
        init: How means are initialised: ``"kmeans"``, ``"k-means++"`` or ``"random_from_data"``.
        accelerate: ``"anderson"``, ``"squarem"`` or ``"none"``.
        verbose: 1 shows progress, 2 also the time.
        callback: Called after each step with the number of steps and the log-likelihood.

    Attributes:
        startprob_: (K,).
        transmat_: (K, K). A transition that is 0 at the start stays 0.
        means_: (K, D).
        covars_: (K, D, D), (D, D), (K, D) or (K,), by the type.
        converged_: Whether the fit converged.
        n_iter_: EM steps that the fit took.
        log_likelihood_: Nats per step, with the priors' log-densities.
        history_: `log_likelihood_` at the start and after each step taken, (n,). It never falls.
        n_features_in_: Number of features, D.

    References:
        Rabiner, "A tutorial on hidden Markov models and selected applications in speech recognition", 1989.

    Example:
        >>> x = np.array([[0.0], [0.1], [-0.1], [5.0], [5.2], [4.9], [0.1], [0.0]])
        >>> model = GaussianHMM(2, random_state=0).fit(x)
        >>> states = model.predict(x)
        >>> (states == states[0]).tolist()
        [True, True, True, False, False, False, True, True]
    """

    _letters = {"s": "startprob", "t": "transmat", "m": "means", "c": "covars"}  # noqa: RUF012 - a constant

    means_: Array
    covars_: Array

    def __init__(
        self,
        n_components: int = 1,
        covariance_type: CovarianceType = "diag",
        *,
        reg_covar: float = 1e-6,
        startprob_prior: float | Array = 1.0,
        transmat_prior: float | Array = 1.0,
        algorithm: Decoder = "viterbi",
        random_state: RandomState = None,
        max_iter: int = 1000,
        tol: float = 1e-6,
        n_init: int = 1,
        params: str = "stmc",
        init_params: str = "stmc",
        init: Init = "kmeans",
        accelerate: Accelerate = "anderson",
        verbose: int = 0,
        callback: Callable[[int, float], None] | None = None,
    ) -> None:
        self.n_components = n_components
        self.covariance_type = covariance_type
        self.reg_covar = reg_covar
        self.startprob_prior = startprob_prior
        self.transmat_prior = transmat_prior
        self.algorithm = algorithm
        self.random_state = random_state
        self.max_iter = max_iter
        self.tol = tol
        self.n_init = n_init
        self.params = params
        self.init_params = init_params
        self.init = init
        self.accelerate = accelerate
        self.verbose = verbose
        self.callback = callback

    def _read(self, x: object, *, reset: bool) -> tuple[Tensor, Form]:
        return read(self, x, reset=reset, missing=False)

    def _emissions(self) -> hmm.GaussianEmissions:
        means = self._given("means_")
        return hmm.GaussianEmissions.from_covariances(
            means=means, covariances=self._covariances(means), covariance_type=self.covariance_type
        )

    def _covariances(self, means: Tensor) -> Tensor:
        k, d = int(self.n_components), means.shape[-1]
        if means.ndim != 2 or len(means) != k:
            raise ValueError(f"`means_` should have shape ({k}, D). Found {tuple(means.shape)}.")
        if not bool(means.isfinite().all()):
            raise ValueError(f"`means_` should be finite. Found {means.tolist()}.")
        shape = structure_of(self.covariance_type).shape(k, d)
        covariances = self._given("covars_")
        if tuple(covariances.shape) != shape:
            raise ValueError(f"`covars_` should have shape {shape}. Found {tuple(covariances.shape)}.")
        return covariances

    def _start_emissions(self, x: Tensor, generator: torch.Generator) -> hmm.GaussianEmissions:
        if not set(self.init_params) & set("mc"):
            return self._emissions().to(x.device)
        first = start(
            x,
            int(self.n_components),
            covariance_type=self.covariance_type,
            init=self.init,
            reg_covar=float(self.reg_covar),
            generator=generator,
        )
        means = first.means if "m" in self.init_params else self._given("means_").to(x.device)
        covariances = first.covariances if "c" in self.init_params else self._covariances(means).to(x.device)
        return hmm.GaussianEmissions.from_covariances(
            means=means, covariances=covariances, covariance_type=self.covariance_type
        )

    def _set_emissions(self, emissions: hmm.GaussianEmissions, form: Form) -> None:
        self.means_ = form.give(emissions.means)
        self.covars_ = form.give(emissions.covariances)

    def _n_emission_parameters(self) -> int:
        k, d = self.means_.shape
        return int(k * d + structure_of(self.covariance_type).n_parameters(k, d))

    def _check_parameters(self) -> None:
        super()._check_parameters()
        structure_of(self.covariance_type)
        number("reg_covar", self.reg_covar, least=0)


class CategoricalHMM(BaseHMM):
    """A hidden Markov model whose states emit symbols, fitted by Baum-Welch.

    Args:
        n_components: Number of hidden states, K.
        startprob_prior: Dirichlet concentrations, one or (K,). 1 is no prior.
        transmat_prior: Dirichlet concentrations, one or (K, K). 1 is no prior.
        emissionprob_prior: Dirichlet concentrations, one or (K, M). 1 is no prior.
        n_features: M. None: one more than the largest symbol that `fit` sees.
        algorithm: How `predict` decodes: ``"viterbi"`` or ``"map"``.
        params: Parameters to estimate: s (start), t (transitions), e (emissions).
        init_params: Parameters to initialise, by the same letters; the other attributes must be set.
        random_state, max_iter, tol, n_init, accelerate, verbose, callback: As in `GaussianHMM`.

    Attributes:
        startprob_: (K,).
        transmat_: (K, K). A transition that is 0 at the start stays 0.
        emissionprob_: (K, M).
        converged_: Whether the fit converged.
        n_iter_: EM steps that the fit took.
        log_likelihood_: Nats per step, with the priors' log-densities.
        history_: `log_likelihood_` at the start and after each step taken, (n,). It never falls.

    References:
        Rabiner, "A tutorial on hidden Markov models and selected applications in speech recognition", 1989.

    Example:
        >>> weather = CategoricalHMM(2)
        >>> weather.startprob_, weather.transmat_ = [0.6, 0.4], [[0.7, 0.3], [0.4, 0.6]]
        >>> weather.emissionprob_ = [[0.1, 0.4, 0.5], [0.6, 0.3, 0.1]]
        >>> log_prob, states = weather.decode([[0], [1], [2]])
        >>> round(float(np.exp(log_prob)), 5), states.tolist()
        (0.01344, [1, 0, 0])
    """

    _letters = {"s": "startprob", "t": "transmat", "e": "emissionprob"}  # noqa: RUF012 - a constant

    emissionprob_: Array

    def __init__(
        self,
        n_components: int = 1,
        *,
        startprob_prior: float | Array = 1.0,
        transmat_prior: float | Array = 1.0,
        emissionprob_prior: float | Array = 1.0,
        n_features: int | None = None,
        algorithm: Decoder = "viterbi",
        random_state: RandomState = None,
        max_iter: int = 1000,
        tol: float = 1e-6,
        n_init: int = 1,
        params: str = "ste",
        init_params: str = "ste",
        accelerate: Accelerate = "anderson",
        verbose: int = 0,
        callback: Callable[[int, float], None] | None = None,
    ) -> None:
        self.n_components = n_components
        self.startprob_prior = startprob_prior
        self.transmat_prior = transmat_prior
        self.emissionprob_prior = emissionprob_prior
        self.n_features = n_features
        self.algorithm = algorithm
        self.random_state = random_state
        self.max_iter = max_iter
        self.tol = tol
        self.n_init = n_init
        self.params = params
        self.init_params = init_params
        self.accelerate = accelerate
        self.verbose = verbose
        self.callback = callback

    def _read(self, x: object, *, reset: bool) -> tuple[Tensor, Form]:
        refuse_masked("X", x)
        found = x if isinstance(x, Tensor) else np.asarray(x)
        if found.ndim not in (1, 2) or found.shape[1:] not in ((), (1,)) or len(found) == 0:
            raise ValueError(f"`X` should have shape (N, 1) or (N,), N at least 1. Found {tuple(found.shape)}.")
        if isinstance(found, np.ndarray):
            whole = found.dtype.kind in "iu"
        else:
            whole = not (found.is_floating_point() or found.is_complex() or found.dtype == torch.bool)
        if not whole:
            raise TypeError(f"`X` should be integers, symbols from 0. Found {found.dtype}.")
        values = found if isinstance(found, Tensor) else from_numpy(found)
        symbols = values.reshape(-1).to(torch.int64)
        if int(symbols.min()) < 0:
            raise ValueError(f"`X` should hold symbols from 0. Found {int(symbols.min())}.")
        return symbols, Form(not isinstance(x, Tensor), torch.float64, symbols.device)

    def _emissions(self) -> hmm.CategoricalEmissions:
        values = self._given("emissionprob_")
        m = values.shape[-1] if self.n_features is None else integer("n_features", self.n_features, 1)
        return hmm.CategoricalEmissions(
            log_probabilities=self._probabilities("emissionprob_", (int(self.n_components), m)).log()
        )

    def _start_emissions(self, x: Tensor, generator: torch.Generator) -> hmm.CategoricalEmissions:
        if "e" not in self.init_params:
            return self._emissions().to(x.device)
        largest = int(x.max())
        if self.n_features is None and largest >= _MOST_SYMBOLS:
            raise ValueError(
                "`X` should hold symbols from 0, each a column of `emissionprob_`. "
                f"Found a largest one of {largest}: number the symbols by `np.unique(X, return_inverse=True)[1]`, or "
                "set `n_features`."
            )
        m = largest + 1 if self.n_features is None else integer("n_features", self.n_features, 1)
        drawn = dirichlet(int(self.n_components), m, generator)
        return hmm.CategoricalEmissions(log_probabilities=drawn.log().to(x.device))

    def _set_emissions(self, emissions: hmm.CategoricalEmissions, form: Form) -> None:
        self.emissionprob_ = form.give(emissions.log_probabilities.exp())

    def _n_emission_parameters(self) -> int:
        k, m = np.shape(self.emissionprob_)
        return int(k * (m - 1))

    def _prior(self) -> hmm.DirichletPrior:
        prior = super()._prior()
        emission = concentration("emissionprob_prior", self.emissionprob_prior)
        return hmm.DirichletPrior(start=prior.start, transition=prior.transition, emission=emission)

    def _shape(self, x: Tensor) -> Tensor:
        return x[:, None]
