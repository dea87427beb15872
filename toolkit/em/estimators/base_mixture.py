"""The base of mixtures as scikit-learn estimators: their methods after a fit.

N samples, D features, K components, B samples of a batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator, DensityMixin
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from toolkit._checks import integer
from toolkit._data import (
    Array,
    Form,
    RandomState,
    generator_of,
    read_parts,
    read_weights,
    refuse_masked,
    weights_of_parts,
)
from toolkit.blocks import no_graph
from toolkit.em.mixture import Mixture

__all__ = ["BaseMixture", "numbers", "tensor"]

# The most numbers in a batch's (K, D, B) array, the working memory of a prediction.
_BATCH = 2**20


class BaseMixture(DensityMixin, BaseEstimator):  # type: ignore[misc]
    """Base of the mixtures: their methods after a fit.

    A subclass has the parameters `n_components` and `random_state`, sets `weights_` in `fit`, and defines its
    components by four hooks.
    """

    n_components: int
    random_state: RandomState
    weights_: Array

    # --- hooks ---

    def _mixture(self) -> Mixture:
        """Return the fitted mixture, float64, from its public attributes, which a user may have set."""
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

    # --- methods of all mixtures ---

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
            (N,), integers: the result of `predict` after the fit.
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
        return self._answer(X, lambda log_joint: log_joint.max(1).indices)  # `argmax` takes longer

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
            sample_weight: (N,): weights of the mean over samples.

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

        ICL prefers components that do not overlap; BIC judges the density alone. The lower the better.

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
            n_samples: Number of samples. An integer `random_state` gives the same samples in each call.

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
        generator = generator_of(self.random_state)
        labels = (
            weights.to(generator.device).multinomial(n_samples, replacement=True, generator=generator).sort().values
        )
        return form.give(self._draw(labels.to(form.device), generator)), form.give(labels)

    # --- how ---

    @no_graph()
    def _answer(self, x: object, question: Callable[[Tensor], Tensor]) -> Array:
        """Return a function of the log-joints (B, K) for all samples, computed batch by batch."""
        check_is_fitted(self, "weights_")
        parts, form = self._read(x)
        answers = [question(found) for found in self._log_joints(parts)]
        return form.give(answers[0] if len(answers) == 1 else torch.cat(answers))

    @no_graph()
    def _totals(self, x: object, sample_weight: object) -> tuple[float, float, float]:
        """Return log-likelihood, number of samples, and entropy of the responsibilities: nats, summed by weight."""
        check_is_fitted(self, "weights_")
        parts, _ = self._read(x)
        log_densities, entropies = [], []
        for found in self._log_joints(parts):
            log_densities.append(found.logsumexp(1))
            entropies.append(torch.special.entr(found.softmax(1)).sum(1))
        log_density, entropy = torch.cat(log_densities), torch.cat(entropies)
        if sample_weight is None:
            sample_weight = weights_of_parts(self, x, missing=True)
        weights = read_weights(sample_weight, len(log_density), log_density)
        if weights is None:
            return float(log_density.sum()), float(len(log_density)), float(entropy.sum())
        return float(weights @ log_density), float(weights.sum()), float(weights @ entropy)

    def _log_joints(self, parts: Iterable[Tensor]) -> Iterator[Tensor]:
        """Yield the log-joints (B, K) of the samples, batch by batch."""
        mixture = self._mixture()
        for batch in self._batches(parts):
            yield mixture.log_joint(batch)

    def _batches(self, parts: Iterable[Tensor]) -> Iterator[Tensor]:
        weights = tensor(self.weights_)
        for part in parts:
            for batch in part.split(max(1, _BATCH // (len(weights) * part.shape[1]))):
                yield batch.to(weights.device, torch.float64)


def tensor(values: Any) -> Tensor:
    """Return an attribute, an array or a tensor, as float64."""
    return values.to(torch.float64) if isinstance(values, Tensor) else torch.from_numpy(np.array(values, np.float64))


def numbers(name: str, values: object) -> Tensor:
    """Return numbers as float64; raise a ValueError for anything else."""
    if isinstance(values, Tensor):
        return values.to(torch.float64)
    refuse_masked(name, values)
    try:
        return torch.from_numpy(np.array(values, np.float64))
    except (TypeError, ValueError):
        raise ValueError(f"`{name}` should be numbers. Found {values!r}.") from None
