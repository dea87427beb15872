"""What the estimator climbs with: one EM map for each kind of covariance, on data that are prepared once.

N samples, D features, K components.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor

from toolkit.blocks import no_graph
from toolkit.em._fused import accumulate, maximise
from toolkit.em._samples import Rows, prepare
from toolkit.em.acceleration import Accelerate, Climb, climb
from toolkit.em.gaussian import COVARIANCE_TYPES, CovarianceType, GaussianParameters
from toolkit.em.missing import fit_missing, marginal_log_joint
from toolkit.em.mixture import Family
from toolkit.em.parsimonious import Climber, CovarianceModel, ParsimoniousParameters
from toolkit.em.prior import Prior

F = TypeVar("F", bound=Family)


# The models that are scikit-learn's types under another name.
_TYPES: dict[CovarianceModel, CovarianceType] = {"VVV": "full", "EEE": "tied", "VVI": "diag", "VII": "spherical"}


def gaussian_type(covariance: CovarianceType | CovarianceModel) -> CovarianceType | None:
    """Return the type if it is one of scikit-learn's four, None for a model."""
    return covariance if covariance in COVARIANCE_TYPES else None


def engine_type(covariance: CovarianceType | CovarianceModel) -> CovarianceType | None:
    """Return the type of which a model is another name, or None."""
    return gaussian_type(covariance) or _TYPES.get(cast(CovarianceModel, covariance))


def start_type(covariance: CovarianceType | CovarianceModel) -> CovarianceType:
    """Return the type of mixture that a fit starts from."""
    return engine_type(covariance) or ("diag" if covariance[2] == "I" else "full")


def model_of(covariance: CovarianceType | CovarianceModel) -> CovarianceModel:
    """Return the model of which a type is another name, or the model itself."""
    names = {kind: model for model, kind in _TYPES.items()}
    return names.get(cast(CovarianceType, covariance)) or cast(CovarianceModel, covariance)


def as_gaussian(parameters: GaussianParameters | ParsimoniousParameters) -> GaussianParameters:
    """Return any mixture of Gaussians in the common form, float64."""
    return (parameters if isinstance(parameters, GaussianParameters) else parameters.to_gaussian()).to(torch.float64)


def as_type(parameters: GaussianParameters, kind: CovarianceType) -> GaussianParameters:
    """Return the mixture as one of a wider type, or of a narrower one if it is of that already."""
    if parameters.covariance_type == kind:
        return parameters
    k, d = parameters.means.shape
    factor = parameters.precisions_cholesky
    match parameters.covariance_type:
        case "tied":
            factor = factor.expand(k, d, d)
        case "diag":
            factor = factor.diag_embed()
        case "spherical":
            factor = factor[:, None].expand(k, d).diag_embed()
    match kind:
        case "tied":
            factor = factor[0]
        case "diag":
            factor = factor.diagonal(dim1=-2, dim2=-1)
        case "spherical":
            factor = factor[:, 0, 0]
    return dataclasses.replace(parameters, precisions_cholesky=factor, covariance_type=kind)


@dataclass(frozen=True, kw_only=True)
class Options:
    """How to climb: as in `climb`."""

    accelerate: Accelerate
    tol: float
    max_iter: int
    callback: Callable[[int, float], None] | None


class Engine(Protocol):
    """Climbs from a start on the data that it holds."""

    def climb(self, start: GaussianParameters, options: Options) -> Climb[Any]:
        """Return the highest point found, float64."""


class GaussianEngine:
    """The four types, by the fast pass; with a prior the value is ``log-likelihood + log-prior / N``."""

    def __init__(
        self,
        x: Tensor | Rows,
        n_components: int,
        covariance_type: CovarianceType,
        *,
        sample_weight: Tensor | None,
        reg_covar: float,
        prior: Prior | None,
        cache: bool,
    ) -> None:
        self.kind, self.reg_covar, self.prior = covariance_type, reg_covar, prior
        self.data = prepare(x, covariance_type, n_components, sample_weight=sample_weight, cache=cache)

    def climb(self, start: GaussianParameters, options: Options) -> Climb[GaussianParameters]:
        """Return the highest point found, float64."""
        return climb_family(self.step, start.to(torch.float64), options)

    @no_graph()
    def step(self, parameters: GaussianParameters) -> tuple[GaussianParameters, float]:
        """Return the parameters after one EM step, and the value before it."""
        moments = accumulate(parameters, self.data)
        value = float(moments.log_likelihood)
        if self.prior is not None:
            value += float(self.prior.log_density(parameters)) / self.data.total_weight
        return maximise(moments, self.data, self.kind, self.reg_covar, self.prior), value


class ParsimoniousEngine:
    """The fourteen models of volume, shape and orientation."""

    def __init__(self, x: Rows, n_components: int, model: CovarianceModel, *, reg_covar: float) -> None:
        # The rows bring their weights with them.
        self.climber = Climber(x, n_components, model, reg_covar)  # type: ignore[arg-type]

    def climb(self, start: GaussianParameters, options: Options) -> Climb[Any]:
        """Return the highest point found, float64."""
        return climb_family(self.climber.step, self.climber.step(start)[0], options)


class MissingEngine:
    """The four types, of samples with missing values."""

    def __init__(
        self,
        x: Tensor,
        *,
        sample_weight: Tensor | None,
        reg_covar: float,
        prior: Prior | None,
    ) -> None:
        self.x, self.sample_weight, self.reg_covar, self.prior = x.double(), sample_weight, reg_covar, prior

    def climb(self, start: GaussianParameters, options: Options) -> Climb[GaussianParameters]:
        """Return the highest point found, float64."""
        return fit_missing(
            self.x,
            start.n_components,
            covariance_type=start.covariance_type,
            sample_weight=self.sample_weight,
            init=start,
            reg_covar=self.reg_covar,
            prior=self.prior,
            **dataclasses.asdict(options),
        )


@dataclass(frozen=True)
class Marginal:
    """A mixture of whole samples, seen where there is something to see."""

    parameters: GaussianParameters

    def log_joint(self, x: Tensor) -> Tensor:
        """Return the log of weight times density of the values that are not NaN, (N, K)."""
        return marginal_log_joint(self.parameters, x) if bool(x.isnan().any()) else self.parameters.log_joint(x)


def climb_family(step: Callable[[F], tuple[F, float]], start: F, options: Options) -> Climb[F]:
    """Climb by the EM map of any mixture, in its own free coordinates."""
    leaves = start.unconstrained()
    sizes = [leaf.numel() for leaf in leaves.values()]

    def pack(parameters: F) -> Tensor:
        return torch.cat([leaf.reshape(-1) for leaf in parameters.unconstrained().values()])

    def unpack(position: Tensor) -> F:
        # A jump to nowhere is refused here, before anything is computed from it. A weight may be 0.
        if not bool((position.isfinite() | position.isneginf()).all()):
            raise ValueError("The coordinates of a mixture should be finite.")
        parts = zip(leaves.items(), position.split(sizes), strict=True)
        return start.with_unconstrained({name: part.view(leaf.shape) for (name, leaf), part in parts})

    return climb(
        step,
        start,
        pack=pack,
        unpack=unpack,
        accelerate=options.accelerate,
        tol=options.tol,
        max_iter=options.max_iter,
        callback=options.callback,
    )
