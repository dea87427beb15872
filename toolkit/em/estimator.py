"""Mixtures as scikit-learn estimators: its parameters and attributes, for arrays and for tensors.

What stands behind is the functional core of `toolkit.em`; nothing here knows how a step is made.

N samples, D features, K components.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Self, cast, get_args

import numpy as np
import torch
from sklearn.base import BaseEstimator, DensityMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from toolkit.blocks import no_graph
from toolkit.em._estimator_collapse import collapsed_components
from toolkit.em._estimator_data import (
    Array,
    Form,
    RandomState,
    generator_of,
    integer,
    not_negative,
    read,
    read_parts,
    read_weights,
)
from toolkit.em._estimator_progress import Progress
from toolkit.em._estimator_start import InitParams, check_given, check_init_params, start_by
from toolkit.em._fit import Fit, fit
from toolkit.em.acceleration import Accelerate
from toolkit.em.gaussian import CovarianceType, GaussianParameters, check_covariance_type
from toolkit.em.mixture import Mixture

__all__ = ["BaseMixture", "CollapseWarning", "GaussianMixture"]

# Numbers of a batch's (K, D, B) array: what a prediction needs beside its input and output.
_BATCH = 2**20


class CollapseWarning(UserWarning):
    """A component has shrunk to so few distinct samples that only regularisation keeps its variance from 0."""


class BaseMixture(DensityMixin, BaseEstimator):  # type: ignore[misc]
    """What mixtures share once they are fitted.

    A subclass has the parameters `n_components` and `random_state`, sets `weights_` in `fit`, and says by four hooks
    what its components are.
    """

    n_components: int
    random_state: RandomState
    weights_: Array

    # --- hooks ---

    def _mixture(self) -> Mixture:
        """Return the fitted mixture, float64, from its public attributes: a user may have set them."""
        raise NotImplementedError

    def _n_parameters(self) -> int:
        """Return the number of free parameters."""
        raise NotImplementedError

    def _draw(self, labels: Tensor, generator: torch.Generator) -> Tensor:
        """Return a sample of each of these components, (N, D), float64."""
        raise NotImplementedError

    def _read(self, x: object) -> tuple[Iterable[Tensor], Form]:
        """Return the samples for a fitted model in parts, and the form of an answer."""
        return read_parts(self, x, missing=False)

    # --- what all have ---

    def fit(self, X: object, y: object = None, sample_weight: object = None) -> Self:
        """Fit the mixture."""
        raise NotImplementedError

    def fit_predict(self, X: object, y: object = None, sample_weight: object = None) -> Array:
        """Fit the mixture, and return the most probable component of each sample.

        Args:
            X: (N, D).
            y: Ignored.
            sample_weight: (N,), or None.

        Returns:
            (N,), integers: what `predict` gives afterwards.
        """
        return self.fit(X, y, sample_weight).predict(X)

    def predict(self, X: object) -> Array:
        """Return the most probable component of each sample.

        Args:
            X: (N, D).

        Returns:
            (N,), integers.

        Raises:
            NotFittedError: If the mixture is not fitted.
            ValueError: If the samples do not have the features that were fitted, or are not finite.
        """
        return self._answer(X, lambda log_joint: log_joint.argmax(1))

    def predict_proba(self, X: object) -> Array:
        """Return the responsibilities: the probability of each component given the sample.

        Args:
            X: (N, D).

        Returns:
            (N, K); rows sum to 1.

        Raises:
            NotFittedError: If the mixture is not fitted.
            ValueError: If the samples do not have the features that were fitted, or are not finite.
        """
        return self._answer(X, lambda log_joint: log_joint.softmax(1))

    def score_samples(self, X: object) -> Array:
        """Return the log-density of each sample.

        Args:
            X: (N, D).

        Returns:
            (N,), nats.

        Raises:
            NotFittedError: If the mixture is not fitted.
            ValueError: If the samples do not have the features that were fitted, or are not finite.
        """
        return self._answer(X, lambda log_joint: log_joint.logsumexp(1))

    def score(self, X: object, y: object = None, sample_weight: object = None) -> float:
        """Return the log-likelihood, nats per sample.

        Args:
            X: (N, D).
            y: Ignored.
            sample_weight: (N,): weighs the mean over samples.

        Raises:
            NotFittedError: If the mixture is not fitted.
            ValueError: If the samples do not have the features that were fitted, or are not finite.
        """
        total, count, _ = self._totals(X, sample_weight)
        return total / count

    def aic(self, X: object, sample_weight: object = None) -> float:
        """Return Akaike's information criterion; the lower the better.

        Args:
            X: (N, D).
            sample_weight: (N,): how often each sample counts.
        """
        total, _, _ = self._totals(X, sample_weight)
        return -2 * total + 2 * self._n_parameters()

    def bic(self, X: object, sample_weight: object = None) -> float:
        """Return the Bayesian information criterion; the lower the better.

        Args:
            X: (N, D).
            sample_weight: (N,): how often each sample counts; N is their sum.
        """
        total, count, _ = self._totals(X, sample_weight)
        return -2 * total + self._n_parameters() * math.log(count)

    def icl(self, X: object, sample_weight: object = None) -> float:
        r"""Return the integrated completed likelihood: BIC plus twice the entropy of the responsibilities.

        It asks for components that do not overlap, where BIC asks for the density. The lower the better.

        Args:
            X: (N, D).
            sample_weight: (N,): how often each sample counts.

        References:
            Biernacki, Celeux & Govaert, "Assessing a mixture model for clustering with the integrated completed
            likelihood", 2000, section 4.
        """
        total, count, entropy = self._totals(X, sample_weight)
        return -2 * total + self._n_parameters() * math.log(count) + 2 * entropy

    @no_graph()
    def sample(self, n_samples: int = 1) -> tuple[Array, Array]:
        """Draw samples from the mixture, ordered by component.

        Args:
            n_samples: How many. An integer `random_state` draws the same ones in each call.

        Returns:
            Samples (N, D), and the component of each, (N,).

        Raises:
            NotFittedError: If the mixture is not fitted.
            ValueError: If `n_samples` is not a positive integer.
        """
        check_is_fitted(self, "weights_")
        n_samples = integer("n_samples", n_samples, 1)
        form = Form.of(self.weights_)
        weights = tensor(self.weights_)
        generator = generator_of(self.random_state, weights.device)
        labels = (
            weights.to(generator.device).multinomial(n_samples, replacement=True, generator=generator).sort().values
        )
        return form.give(self._draw(labels.to(form.device), generator)), form.give(labels)

    # --- how ---

    @no_graph()
    def _answer(self, x: object, question: Callable[[Tensor], Tensor]) -> Array:
        """Return the answer to a question about log-joints (B, K), asked of all samples batch by batch."""
        check_is_fitted(self, "weights_")
        parts, form = self._read(x)
        mixture = self._mixture()
        return form.give(torch.cat([question(mixture.log_joint(batch)) for batch in self._batches(parts)]))

    @no_graph()
    def _totals(self, x: object, sample_weight: object) -> tuple[float, float, float]:
        """Return log-likelihood, number of samples, and entropy of the responsibilities: nats, summed by weight."""
        check_is_fitted(self, "weights_")
        parts, _ = self._read(x)
        mixture = self._mixture()
        log_densities, entropies = [], []
        for batch in self._batches(parts):
            log_joint = mixture.log_joint(batch)
            log_densities.append(log_joint.logsumexp(1))
            entropies.append(torch.special.entr(log_joint.softmax(1)).sum(1))
        log_density, entropy = torch.cat(log_densities), torch.cat(entropies)
        weights = read_weights(sample_weight, len(log_density), log_density)
        if weights is None:
            return float(log_density.sum()), float(len(log_density)), float(entropy.sum())
        return float(weights @ log_density), float(weights.sum()), float(weights @ entropy)

    def _batches(self, parts: Iterable[Tensor]) -> Iterator[Tensor]:
        weights = tensor(self.weights_)
        for part in parts:
            for batch in part.split(max(1, _BATCH // (len(weights) * part.shape[1]))):
                yield batch.to(weights.device, torch.float64)


def tensor(values: Any) -> Tensor:
    """Return an attribute, an array or a tensor, as float64."""
    return values.to(torch.float64) if isinstance(values, Tensor) else torch.as_tensor(np.array(values, np.float64))


class GaussianMixture(BaseMixture):
    r"""A mixture of Gaussians, fitted by EM.

    Parameters, attributes and methods are those of ``sklearn.mixture.GaussianMixture``, and mean the same except for:

    - **The end.** `tol` bounds what is left to gain, not the last step's gain, because steps are accelerated; and its
      default is lower. ``accelerate="none", tol=1e-3, max_iter=100`` are scikit-learn's steps and its defaults.
    - **`lower_bound_`** is the log-likelihood of the parameters that are returned, not of those one step before.
    - **Starts** from samples have the covariance of the samples near them, where scikit-learn's have `reg_covar`.
    - **Restarts.** Of `n_init` fits the best is kept among those in which no component collapsed, if there are any: the
      likelihood of a component on one sample has no bound, so that the highest need not be the best.

    What is added: `sample_weight`, tensors on any device, chunks of samples, missing values, priors, the other models
    of covariance, `partial_fit`, `icl`, `standard_errors`.

    Args:
        n_components: K.
        covariance_type: ``"full"``, ``"tied"``, ``"diag"`` or ``"spherical"``.
        tol: The fit has converged when what is left to gain is about this, in nats per sample. With
            ``accelerate="none"``: when a step gains no more.
        reg_covar: Added to every variance, in the data's units squared.
        max_iter: The most EM steps. 0 sets the attributes to the start.
        n_init: Fits from this many starts, of which the best is kept.
        init_params: ``"kmeans"``: one M-step from the clusters of k-means. ``"k-means++"``, ``"random_from_data"``: the
            means are samples, far from each other or at random. ``"random"``: one M-step from random responsibilities.
        weights_init: (K,), which sum to 1. None: by `init_params`.
        means_init: (K, D). None: by `init_params`. What is not given is estimated from the samples nearest to them.
        precisions_init: Inverse covariances, shaped by the type. None: by `init_params`.
        random_state: An integer, a numpy.random.RandomState, a torch.Generator, or None for NumPy's global state.
        warm_start: Whether `fit` goes on from the last fit's parameters; `n_init` is then ignored.
        verbose: 1 shows progress, 2 also the time.
        verbose_interval: Steps between two lines of progress where it is not drawn in a terminal.
        accelerate: ``"anderson"`` or ``"squarem"``: extrapolate the steps, and take what raises the likelihood.
            ``"none"``: plain EM.
        callback: Called after each step with the number of steps and the log-likelihood.

    Attributes:
        weights_: (K,).
        means_: (K, D).
        covariances_: Shaped by the type.
        precisions_: Their inverses.
        precisions_cholesky_: Upper triangular factors of these.
        converged_: Whether the fit converged.
        n_iter_: EM steps that it took.
        lower_bound_: Log-likelihood of the attributes, nats per sample.
        history_: Log-likelihood at the start and after each step that was taken, (n,). It never falls.
        lower_bounds_: The same without the start, as a list.
        collapsed_: The components that only `reg_covar` keeps from being singular, or that have no sample left, as
            indices. A `CollapseWarning` names them.
        n_features_in_: D.
        feature_names_in_: (D,), if the samples came with names.

    References:
        Dempster, Laird & Rubin, "Maximum likelihood from incomplete data via the EM algorithm", 1977, section 4.3.

    Example:
        >>> x = np.array([[0.0], [1.0], [8.0], [9.0], [10.0]])
        >>> two = GaussianMixture(2, random_state=0).fit(x, sample_weight=[1, 1, 1, 1, 2])
        >>> two.means_.round(4).tolist(), two.predict([[2.0], [7.0]]).tolist()
        ([[9.25], [0.5]], [1, 0])
    """

    weights_: Array
    means_: Array
    precisions_cholesky_: Array

    def __init__(
        self,
        n_components: int = 1,
        *,
        covariance_type: CovarianceType = "full",
        tol: float = 1e-6,
        reg_covar: float = 1e-6,
        max_iter: int = 1000,
        n_init: int = 1,
        init_params: InitParams = "kmeans",
        weights_init: Array | None = None,
        means_init: Array | None = None,
        precisions_init: Array | None = None,
        random_state: RandomState = None,
        warm_start: bool = False,
        verbose: int = 0,
        verbose_interval: int = 10,
        accelerate: Accelerate = "anderson",
        callback: Callable[[int, float], None] | None = None,
    ) -> None:
        self.n_components = n_components
        self.covariance_type = covariance_type
        self.tol = tol
        self.reg_covar = reg_covar
        self.max_iter = max_iter
        self.n_init = n_init
        self.init_params = init_params
        self.weights_init = weights_init
        self.means_init = means_init
        self.precisions_init = precisions_init
        self.random_state = random_state
        self.warm_start = warm_start
        self.verbose = verbose
        self.verbose_interval = verbose_interval
        self.accelerate = accelerate
        self.callback = callback

    @no_graph()
    def fit(self, X: object, y: object = None, sample_weight: object = None) -> Self:
        """Maximise the log-likelihood by EM.

        Args:
            X: (N, D), N at least 2 and K: an array, a tensor, or what scikit-learn reads as an array.
            y: Ignored.
            sample_weight: (N,), not negative: how often each sample counts. None: once each.

        Returns:
            The estimator.

        Warns:
            ConvergenceWarning: If `max_iter` steps did not suffice.
            CollapseWarning: If a component collapsed.

        Raises:
            TypeError: If `X` is sparse or complex.
            ValueError: If a parameter is out of range, `X` or `sample_weight` has another shape or is not finite, or a
                covariance becomes singular.
        """
        self._check_parameters()
        x, form = read(self, X, reset=True, missing=False, least=2)
        weights = read_weights(sample_weight, len(x), x)
        if weights is not None and not bool(weights.all()):
            # A sample of no weight is no sample, neither for the start.
            x, weights = x[weights > 0], weights[weights > 0]
        if self.n_components > len(x):
            raise ValueError(
                f"`n_components` should be at most {len(x)}, the number of samples. Found {self.n_components}."
            )
        going_on = self.warm_start and hasattr(self, "converged_")
        generator = generator_of(self.random_state, x.device)
        fits = []
        n_init = 1 if going_on else int(self.n_init)
        with Progress(verbose=int(self.verbose), interval=self.verbose_interval, callback=self.callback) as progress:
            for i in range(n_init):
                progress.begin(f"Start {i + 1} of {n_init}")
                first = self._last(x) if going_on else self._start(x, weights, generator)
                fits.append(self._climb(first, x, weights, progress))
                how = "converged" if fits[-1].converged else "not converged"
                progress.end(how, fits[-1].log_likelihood)
        best = max(fits, key=self._merit)
        self._set(best, form)
        return self

    # --- hooks of the base ---

    def _mixture(self) -> GaussianParameters:
        return GaussianParameters(
            log_weights=tensor(self.weights_).log(),
            means=tensor(self.means_),
            precisions_cholesky=tensor(self.precisions_cholesky_),
            covariance_type=self.covariance_type,
        )

    def _n_parameters(self) -> int:
        k, d = self.means_.shape
        triangle = d * (d + 1) // 2
        covariances = {"full": k * triangle, "tied": triangle, "diag": k * d, "spherical": k}[self.covariance_type]
        return covariances + k * d + k - 1

    def _draw(self, labels: Tensor, generator: torch.Generator) -> Tensor:
        mixture = self._mixture()
        shape = len(labels), mixture.n_features
        draws = torch.randn(shape, generator=generator, device=generator.device, dtype=torch.float64)
        draws = draws.to(labels.device)
        factor = mixture.precisions_cholesky
        match mixture.covariance_type:
            case "tied":
                spread = torch.linalg.solve_triangular(factor.mT, draws.mT, upper=False).mT
            case "full":
                counts = labels.bincount(minlength=mixture.n_components).tolist()
                parts = zip(factor.mT, draws.split(counts), strict=True)
                spread = torch.cat([torch.linalg.solve_triangular(p, z.mT, upper=False).mT for p, z in parts])
            case "diag":
                spread = draws / factor[labels]
            case "spherical":
                spread = draws / factor[labels, None]
        drawn: Tensor = mixture.means[labels] + spread
        return drawn

    # --- how ---

    def _check_parameters(self) -> None:
        """Raise a ValueError for the first parameter that is out of range."""
        for name, least in (
            ("n_components", 1),
            ("n_init", 1),
            ("max_iter", 0),
            ("verbose", 0),
            ("verbose_interval", 1),
        ):
            value = getattr(self, name)
            integer(name, int(value) if name == "verbose" and isinstance(value, bool) else value, least)
        for name in ("tol", "reg_covar"):
            not_negative(name, getattr(self, name))
        check_covariance_type(self.covariance_type)
        check_init_params(self.init_params)
        if self.accelerate not in get_args(Accelerate):
            raise ValueError(
                f"`accelerate` should be one of {', '.join(get_args(Accelerate))}. Found {self.accelerate!r}."
            )

    def _start(self, x: Tensor, weights: Tensor | None, generator: torch.Generator) -> GaussianParameters:
        """Return one start, float64: what the user gave, and the rest by `init_params`."""
        given = {
            name: None if (value := getattr(self, f"{name}_init")) is None else tensor(value).to(x.device)
            for name in ("weights", "means", "precisions")
        }
        shape = int(self.n_components), x.shape[1]
        factor = check_given(given["weights"], given["means"], given["precisions"], shape, self.covariance_type)
        found = None
        if given["weights"] is None or given["means"] is None or factor is None:
            found = start_by(
                x,
                shape[0],
                covariance_type=self.covariance_type,
                init_params=self.init_params,
                reg_covar=float(self.reg_covar),
                generator=generator,
                sample_weight=weights,
                means=given["means"],
            )
        log_weights = None if given["weights"] is None else given["weights"].log()
        return GaussianParameters(
            log_weights=log_weights if log_weights is not None else cast(GaussianParameters, found).log_weights,
            means=given["means"] if given["means"] is not None else cast(GaussianParameters, found).means,
            precisions_cholesky=factor if factor is not None else cast(GaussianParameters, found).precisions_cholesky,
            covariance_type=self.covariance_type,
        )

    def _last(self, x: Tensor) -> GaussianParameters:
        """Return the parameters of the last fit."""
        last = self._mixture().to(x.device)
        if (last.n_components, last.n_features) != (self.n_components, x.shape[1]):
            raise ValueError(
                f"`warm_start` should go on with the last fit's n_components={last.n_components} and "
                f"{last.n_features} features. Found {self.n_components} and {x.shape[1]}."
            )
        return last

    def _climb(self, first: GaussianParameters, x: Tensor, weights: Tensor | None, progress: Progress) -> Fit:
        return fit(
            x,
            int(self.n_components),
            covariance_type=self.covariance_type,
            tol=float(self.tol),
            max_iter=int(self.max_iter),
            init=first,
            reg_covar=float(self.reg_covar),
        )

    def _merit(self, found: Fit) -> tuple[bool, float]:
        """Return what the fit with the best start has most of."""
        return not collapsed_components(found.parameters, float(self.reg_covar)), found.log_likelihood

    def _set(self, found: Fit, form: Form) -> None:
        """Set the attributes, and warn of what a user should know."""
        parameters = found.parameters.to(torch.float64)
        self.weights_ = form.give(parameters.weights)
        self.means_ = form.give(parameters.means)
        self.covariances_ = form.give(parameters.covariances)
        self.precisions_ = form.give(parameters.precisions)
        self.precisions_cholesky_ = form.give(parameters.precisions_cholesky)
        self.converged_ = found.converged
        # A fit that finds nothing to gain has taken the step that says so.
        self.n_iter_ = max(found.n_iter, min(1, int(self.max_iter)))
        self.lower_bound_ = found.log_likelihood
        self.history_ = np.array(found.history)
        self.lower_bounds_ = list(found.history[1:])
        collapsed = collapsed_components(parameters, float(self.reg_covar))
        self.collapsed_ = np.array(collapsed, dtype=np.int64)
        if not found.converged and self.max_iter > 0:
            warnings.warn(
                f"The fit did not converge in {self.max_iter} steps: more than `tol` is left to gain, {self.tol} nats "
                "per sample. Raise `max_iter` or `tol`, try other starts, or look for degenerate data.",
                ConvergenceWarning,
                stacklevel=4,
            )
        if collapsed:
            warnings.warn(
                f"Component {', '.join(map(str, collapsed))} collapsed: it has too few distinct samples for a "
                "covariance, and the likelihood says nothing about the fit. More starts (`n_init`), fewer components, "
                "a more restricted `covariance_type` or a larger `reg_covar` help.",
                CollapseWarning,
                stacklevel=4,
            )
