r"""The fourteen parsimonious Gaussian mixtures: covariances that share volume, shape or orientation.

A model is named by three letters, for the volume, the shape and the orientation of the covariances. Each is equal for
all components (E), varies between them (V), or is the identity (I): ``VEV`` has ellipsoids of equal shape, ``EEI``
equal axis-aligned ones. ``VVV`` is scikit-learn's ``full``, ``EEE`` its ``tied``, ``VVI`` its ``diag`` and ``VII`` its
``spherical``. `ParsimoniousCovariances` defines their parameters.

N samples, D features, K components.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from toolkit.em.components import Located
from toolkit.em.covariance import Structure, soft_counts
from toolkit.em.covariance.models import (
    COVARIANCE_MODELS,
    CovarianceModel,
    Model,
    ParsimoniousCovariances,
    covariances_from_scatter,
    model_of,
    n_free_parameters,
)
from toolkit.em.engine.acceleration import Climb, ClimbOptions, climb_family
from toolkit.em.engine.checks import check_weights
from toolkit.em.engine.fused import Moments, accumulate, rounding_error, statistics_of
from toolkit.em.engine.samples import Prepared, prepare
from toolkit.em.gaussian import GaussianParameters, moments_of
from toolkit.em.models._common import check_shape, check_table

__all__ = [
    "COVARIANCE_MODELS",
    "CovarianceModel",
    "ParsimoniousCovariances",
    "ParsimoniousParameters",
    "covariances_from_scatter",
    "n_free_parameters",
]

# Inner iterations of an EM step after the first: each starts where the last one ended, and a step need only improve the
# surrogate (generalised EM).
INNER_STEPS_OF_EM = 3


@dataclass(frozen=True, kw_only=True, eq=False)
class ParsimoniousParameters(Located):
    """Parameters of a parsimonious Gaussian mixture; satisfies `toolkit.em.Family`.

    Attributes:
        log_weights: (K,), nats; the weights sum to 1.
        means: (K, D).
        structure: The covariances.

    Raises:
        ValueError: If the shapes do not fit together.

    References:
        Banfield & Raftery, "Model-based Gaussian and non-Gaussian clustering", 1993, section 2. Celeux & Govaert,
        "Gaussian parsimonious clustering models", 1995, table 1.

    Example:
        >>> two = ParsimoniousParameters(log_weights=torch.tensor([0.25, 0.75]).log(), means=torch.tensor([[0.], [3.]]),
        ...     structure=covariances_from_scatter("VII", torch.ones(2), torch.tensor([[1.0], [4.0]])))
        >>> two.log_joint(torch.tensor([[1.0]]))
        tensor([[-2.8052, -2.3998]])
    """

    structure: ParsimoniousCovariances

    def __post_init__(self) -> None:
        super().__post_init__()
        k, d = self.means.shape
        if self.log_weights.shape != (k,):
            raise ValueError(f"`log_weights` should have shape {(k,)}. Found {tuple(self.log_weights.shape)}.")
        structure = self.structure
        groups = {value.shape[0] for value in (structure.log_volumes, structure.log_shapes, structure.axes)}
        if structure.n_features != d or not groups <= {1, k}:
            raise ValueError(
                f"`structure` should be of {k} components and {d} features. "
                f"Found {max(groups)} and {structure.n_features}."
            )

    @property
    def model(self) -> CovarianceModel:
        """One of the fourteen."""
        return self.structure.model

    @property
    def covariances(self) -> Tensor:
        """Covariances, (K, D, D)."""
        return self.structure.covariances.expand(self.n_components, -1, -1)

    @property
    def n_parameters(self) -> int:
        """Free parameters (see `n_free_parameters`)."""
        return n_free_parameters(self.model, self.n_components, self.n_features)

    def log_joint(self, x: Tensor) -> Tensor:
        """Return the log of weight times density of each component.

        Args:
            x: (N, D).

        Returns:
            (N, K), nats.

        Raises:
            ValueError: If `x` does not have the features of the means.
        """
        check_shape(x, self.n_features)
        differences = x.mT.contiguous() - self.means[:, :, None]
        if self._kind.structure.is_matrix:
            whitened = self.structure.factors.mT @ differences
        else:
            whitened = differences * (-0.5 * self.structure.log_variances).exp()[:, :, None]
        log_determinants = self.n_features * (self.structure.log_volumes + math.log(2 * math.pi))
        constant = self.log_weights - 0.5 * log_determinants
        return (constant[:, None] - 0.5 * whitened.square().sum(1)).mT

    def m_step(self, x: Tensor, responsibilities: Tensor) -> ParsimoniousParameters:
        """Return the maximum-likelihood M-step of this model (see `covariances_from_scatter`).

        An M-step without a closed form starts from these parameters, so the expected log-joint never falls.

        Args:
            x: (N, D).
            responsibilities: (N, K).

        Raises:
            ValueError: If the shapes do not fit together, or a covariance is singular.
        """
        expected = (len(x), self.n_components)
        if x.ndim != 2 or x.shape[1] != self.n_features or responsibilities.shape != expected:
            raise ValueError(
                f"`x` and `responsibilities` should have shapes (N, {self.n_features}) and (N, {self.n_components}). "
                f"Found {tuple(x.shape)} and {tuple(responsibilities.shape)}."
            )
        counts, means, scatter = moments_of(x, responsibilities, self._kind.structure.wide)
        return ParsimoniousParameters(
            log_weights=counts.log() - counts.sum().log(),
            means=means,
            structure=covariances_from_scatter(self.model, counts, scatter, start=self.structure),
        )

    @property
    def _kind(self) -> Model:
        return model_of(self.model)

    def unconstrained(self) -> dict[str, Tensor]:
        """Return free coordinates: those of the structure, ``means``, and ``log_weights`` (K,), up to a constant."""
        return {"log_weights": self.log_weights, "means": self.means, **self.structure.unconstrained()}

    def with_unconstrained(self, values: Mapping[str, Tensor]) -> ParsimoniousParameters:
        """Return the mixture of this model at these coordinates."""
        return ParsimoniousParameters(
            log_weights=values["log_weights"].log_softmax(0),
            means=values["means"],
            structure=self.structure.with_unconstrained(values),
        )

    def to_gaussian(self) -> GaussianParameters:
        """Return the same mixture as `GaussianParameters`.

        The covariances are spherical for EII and VII, diag for the other axis-aligned models, tied for EEE, else full.
        """
        structure, factor = self._kind.structure, self._kind.factor(self.structure)
        return GaussianParameters(
            log_weights=self.log_weights,
            means=self.means,
            precisions_cholesky=factor.expand(structure.shape(self.n_components, self.n_features)),
            covariance_type=structure.name,
        )


# --- EM on prepared data ---------------------------------------------------------------------------------------------


class Climber:
    """EM for one model on one data set, which is prepared once."""

    def __init__(
        self,
        x: Tensor,
        n_components: int,
        model: CovarianceModel,
        reg_covar: float,
        sample_weight: Tensor | None = None,
    ) -> None:
        self.model, self.reg_covar = model_of(model), reg_covar
        structure = self.model.structure
        # In float32 the likelihood's rounding would end a fit where EM is slow.
        self.prepared = prepare(x.to(torch.float64), structure.name, n_components, sample_weight=sample_weight)
        problem = problem_of_constants(self.prepared, self.model, reg_covar)
        if problem:
            raise ValueError(problem)

    def step(self, parameters: GaussianParameters | ParsimoniousParameters) -> tuple[ParsimoniousParameters, float]:
        """Return the parameters after one EM step, and the log-likelihood before it, nats per sample.

        `parameters` may have another structure.
        """
        viewed = _viewed(parameters, self.model.structure)
        # An extrapolated jump may overflow.
        if not bool(viewed.log_determinants.isfinite().all() and viewed.precisions.isfinite().all()):
            raise ValueError("The covariances should be finite and positive. Found some that overflow.")
        moments = accumulate(viewed, self.prepared)
        structure = parameters.structure if isinstance(parameters, ParsimoniousParameters) else None
        return _maximise(self.model, moments, self.prepared, structure, self.reg_covar), float(moments.log_likelihood)

    def climb(
        self, start: GaussianParameters | ParsimoniousParameters, options: ClimbOptions
    ) -> Climb[ParsimoniousParameters]:
        """Fit from one start; the first step from a mixture of another structure is not counted."""
        first = start if isinstance(start, ParsimoniousParameters) else self.step(start)[0]

        def error(parameters: ParsimoniousParameters) -> float:
            return rounding_error(_viewed(parameters, self.model.structure), self.prepared)

        def check(parameters: ParsimoniousParameters) -> None:
            self.model.structure.check_least(parameters.to_gaussian().precisions_cholesky, self.reg_covar)

        return climb_family(self.step, first, options, error=error, check=check if self.model.keeps_variances else None)


def problem_of_constants(data: Prepared, model: Model, reg_covar: float) -> str:
    """Return the error message for constant features, or ""; rounding may make their scatter differ from 0."""
    if reg_covar > 0 or not model.structure.shape_of_one(len(data.centre)):
        return ""
    scatter = data.scatter
    if data.scale is not None:
        scatter = (data.scale @ scatter @ data.scale.mT).diagonal()
    rounding = torch.finfo(scatter.dtype).eps * len(scatter) * data.centre
    constant = (scatter <= rounding.square()).nonzero().ravel().tolist()
    if not constant:
        return ""
    return (
        "`x` should have no constant feature unless `reg_covar` is positive. "
        f"Found {', '.join(map(str, constant))}, counted from 0."
    )


def _viewed(parameters: GaussianParameters | ParsimoniousParameters, structure: Structure) -> GaussianParameters:
    """Return a mixture in float64 as one of this structure, or of a narrower one by its average variances."""
    if isinstance(parameters, ParsimoniousParameters):
        return parameters.to_gaussian()
    return parameters.to(torch.float64).as_type(structure.name)


def _maximise(
    model: Model,
    moments: Moments,
    data: Prepared,
    before: ParsimoniousCovariances | None,
    reg_covar: float,
) -> ParsimoniousParameters:
    """Return the M-step from the moments of prepared data, float64."""
    structure, statistics = model.structure, statistics_of(moments, data, model.structure.name)
    counts, means, scatter = soft_counts(statistics.counts), statistics.means, statistics.scatter
    n_features = means.shape[1]
    added = structure.regularise(torch.zeros_like(scatter), reg_covar)
    scatter = scatter + structure.totals(counts[:, None].expand(means.shape)) * added
    if structure.is_shared:
        scatter = scatter[None]
    elif scatter.ndim == 1:  # only the trace is known, and it suffices
        scatter = (scatter / n_features)[:, None].expand(-1, n_features)
    return ParsimoniousParameters(
        log_weights=counts.log() - counts.sum().log(),
        means=means,
        structure=covariances_from_scatter(
            model.name, counts, scatter, start=before, inner_steps=(4 if before is None else 1) * INNER_STEPS_OF_EM
        ),
    )


def check_samples(x: Tensor, sample_weight: Tensor | None) -> None:
    """Raise a TypeError or ValueError unless `x` (N, D) is finite, and the weights (N,) also not negative."""
    check_table(x)
    check_weights(sample_weight, len(x))
