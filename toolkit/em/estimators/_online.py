"""Online EM of Gaussian mixtures as a scikit-learn estimator: `partial_fit`.

B samples of a batch, D features, K components.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Self, cast

from sklearn.utils.metaestimators import available_if
from torch import Tensor

from toolkit._data import Form, is_chunked, read, read_chunks, read_weights
from toolkit.blocks import no_graph
from toolkit.em.covariance import COVARIANCE_TYPES, CovarianceType
from toolkit.em.covariance.models import CovarianceModel, type_of
from toolkit.em.engine.acceleration import Climb
from toolkit.em.engine.ascent import Fit
from toolkit.em.estimators.base_mixture import BaseMixture
from toolkit.em.gaussian import GaussianParameters
from toolkit.em.models.online import OnlineState, online_start, online_step
from toolkit.em.models.prior import Prior

__all__ = ["OnlineMixture"]

# Steps of EM on the first batch of `partial_fit`, and samples for each component before the first step changes it.
_FIRST_STEPS = 5
_BURN_IN = 20.0


@dataclass(frozen=True)
class OnlineFit:
    """State of `partial_fit`, the form of its first batch, and the log-likelihood of each batch before its step."""

    state: OnlineState
    form: Form
    history: tuple[float, ...]


def _learns_online(mixture: OnlineMixture) -> bool:
    """Say whether an estimator has `partial_fit`, for ``hasattr`` in scikit-learn."""
    if type_of(mixture.covariance_type) is None or mixture.missing:
        raise AttributeError(
            f"`partial_fit` is there for the types {', '.join(COVARIANCE_TYPES)} without missing values. "
            f"Found covariance_type={mixture.covariance_type!r}, missing={mixture.missing!r}."
        )
    return True


class OnlineMixture(BaseMixture):
    """Base of Gaussian mixtures that learn batch by batch."""

    covariance_type: CovarianceType | CovarianceModel
    missing: bool
    reg_covar: float
    prior: Prior | Literal["default"] | None
    learning_decay: float
    learning_offset: float

    # --- hooks ---

    def _check_parameters(self) -> None:
        """Raise a ValueError for the first parameter that is out of range."""
        raise NotImplementedError

    def _first(self, x: Tensor, weights: Tensor | None, form: Form, n_steps: int) -> GaussianParameters:
        """Return the mixture after some plain EM steps on the first batch, in which each sample has a weight."""
        raise NotImplementedError

    def _last(self, x: Tensor) -> GaussianParameters:
        """Return the parameters of the last fit, for a warm start."""
        raise NotImplementedError

    def _set(self, found: Fit, form: Form) -> None:
        """Set the attributes."""
        raise NotImplementedError

    # --- online EM ---

    @available_if(_learns_online)  # type: ignore[untyped-decorator]
    @no_graph()
    def partial_fit(self, X: object, y: object = None, sample_weight: object = None) -> Self:
        """Take one step of online EM by a batch of samples, which are not kept.

        The start comes from the first batch, by `init_params` and a few EM steps. The parameters stay there until 20
        samples for each component have been seen. After `fit`, the start is the fitted mixture, and the fitted samples
        count as earlier batches of this size. Later batches may have any size. `lower_bound_` is the log-likelihood of
        the batch before its step, `history_` has the values of all batches, and `n_iter_` counts the batches.

        Args:
            X: (B, D), at least `n_components` samples in the first batch; or chunks, each a batch.
            y: Ignored.
            sample_weight: (B,), not negative: how often each sample counts. None: once each.

        Returns:
            The estimator.

        Raises:
            TypeError: If `X` is sparse or complex.
            AttributeError: For a covariance model that is not one of the four types, and for missing values.
            ValueError: If a parameter is out of range, `X` or `sample_weight` has another shape or is not finite, or a
                covariance becomes singular.

        References:
            Cappé & Moulines, "On-line expectation-maximization algorithm for latent data models", 2009, section 2.2.
        """
        self._check_parameters()
        fitted = hasattr(self, "converged_")
        if is_chunked(X):
            chunks = read_chunks(self, X, sample_weight, reset=not fitted, missing=False)
            form, batches = chunks.form, chunks.again()
        else:
            x, form = read(self, X, reset=not fitted, missing=False)
            batches = iter([(x, read_weights(sample_weight, len(x), x, total=False))])
        for x, weights in batches:
            self._learn(x, weights, form)
        return self

    def _learn(self, x: Tensor, weights: Tensor | None, form: Form) -> None:
        """Take one online step, and set the attributes."""
        if not hasattr(self, "_online"):
            self._online = OnlineFit(self._begin(x, weights, form), form, ())
        before = self._online
        state = online_step(before.state, x.to(before.form.device), sample_weight=weights)
        history = (*before.history, state.log_likelihood) if state.n_steps > before.state.n_steps else before.history
        self._online = OnlineFit(state, before.form, history)
        self._set(Climb(state.estimate, state.log_likelihood, False, state.n_steps, history), before.form)
        self.n_iter_ = state.n_steps

    def _begin(self, x: Tensor, weights: Tensor | None, form: Form) -> OnlineState:
        """Return the first state of online EM: the last fit, or the result of a few steps on the first batch."""
        if weights is not None:
            x, weights = x[weights > 0], weights[weights > 0]
        offset, burn_in = float(self.learning_offset), _BURN_IN * float(self.n_components)
        if hasattr(self, "converged_"):
            first = self._last(x)
            offset, burn_in = offset + self._n_fitted / max(1, len(x)), 0.0
        elif len(x) < self.n_components:
            raise ValueError(
                f"`n_components` should be at most {len(x)}, the number of samples of the first batch. "
                f"Found {self.n_components}."
            )
        else:
            first = self._first(x, weights, form, _FIRST_STEPS)
        return online_start(
            first,
            exponent=float(self.learning_decay),
            offset=offset,
            burn_in=burn_in,
            reg_covar=float(self.reg_covar),
            prior=self._default_prior(x, weights) if self.prior == "default" else self.prior,
        )

    def _default_prior(self, x: Tensor, weights: Tensor | None) -> Prior:
        """Return the default prior, which depends on the samples."""
        kind = cast(CovarianceType, type_of(self.covariance_type))
        return Prior.default(x, int(self.n_components), kind, sample_weight=weights)
