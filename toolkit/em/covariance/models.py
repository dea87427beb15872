r"""Covariances that share volume, shape or orientation, and their M-steps from sufficient statistics.

A covariance is :math:`\Sigma_k = \lambda_k Q_k A_k Q_k^\top`: a volume :math:`\lambda_k = |\Sigma_k|^{1/D}`, a shape
:math:`A_k`, diagonal with determinant 1, and an orientation :math:`Q_k`, orthogonal. A model is named by three letters,
for volume, shape and orientation: each is equal for all components (E), varies between them (V), or is the identity
(I). ``VVV`` is scikit-learn's ``full``, ``EEE`` its ``tied``, ``VVI`` its ``diag`` and ``VII`` its ``spherical``.

The stored parameters are those of :math:`\Sigma_k^{-1} = B_k \, \mathrm{diag}(e^{-v_k - s_k}) \, B_k^\top` with the
log-volume :math:`v`, log-shapes :math:`s` that sum to 0, and axes :math:`B`:

=======================  ====================================================================================
models                   axes
=======================  ====================================================================================
EII VII EEI VEI EVI VVI  the identity
EEV VEV EVE VVE          orthogonal: the orientation
EEE VEE EVV VVV          unit upper triangular: shape and orientation go together, so their product may be any
                         matrix of determinant 1, and this factor of it is smooth also where eigenvalues meet
=======================  ====================================================================================

N samples, D features, K components; G is K for parameters that vary, and 1 for parameters that all components share.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, cast, get_args

import torch
from torch import Tensor

from toolkit._checks import choice, integer
from toolkit._data import library
from toolkit._tensors import tensors
from toolkit.em.components import Movable
from toolkit.em.covariance.axes import DIAG, SPHERICAL
from toolkit.em.covariance.matrices import FULL, TIED, cholesky, factored, inverse_of_lower
from toolkit.em.covariance.orientations import (
    INNER_STEPS_UNSEEN,
    cayley,
    common_axes,
    entries_above_diagonal,
    is_batched,
    strictly_upper,
    to_skew,
    upper_factor,
)
from toolkit.em.covariance.structure import CovarianceType, Structure, identity_like, raise_if_singular

__all__ = [
    "COVARIANCE_MODELS",
    "CovarianceModel",
    "Model",
    "ParsimoniousCovariances",
    "covariances_from_scatter",
    "model_of",
    "n_free_parameters",
    "type_of",
]

CovarianceModel = Literal[
    "EII", "VII", "EEI", "VEI", "EVI", "VVI", "EEE", "VEE", "EVE", "VVE", "EEV", "VEV", "EVV", "VVV"
]
COVARIANCE_MODELS: tuple[CovarianceModel, ...] = get_args(CovarianceModel)

# The models that are scikit-learn's types under another name.
_TYPES: dict[str, CovarianceType] = {"VVV": "full", "EEE": "tied", "VVI": "diag", "VII": "spherical"}


@dataclass(frozen=True, kw_only=True, eq=False)
class ParsimoniousCovariances(Movable):
    """Covariances of K components that share volume, shape or orientation.

    Leading dimensions, the same for all three tensors, are batches.

    Attributes:
        model: One of the fourteen `COVARIANCE_MODELS`: three letters, for volume, shape and orientation.
        log_volumes: (..., G): the log of the D-th root of the determinant. Here and below, G is K if the letter is V,
            and 1 otherwise.
        log_shapes: (..., G, D): the logs of the variances along the axes, less the log volume; each row sums to 0.
        axes: (..., G, D, D): orthogonal matrices for EEV, VEV, EVE and VVE, unit upper triangular ones for EEE, VEE,
            EVV and VVV, and the identity for the others.

    Raises:
        ValueError: If the model is unknown, or the shapes do not fit together.
    """

    model: CovarianceModel
    log_volumes: Tensor
    log_shapes: Tensor
    axes: Tensor

    def __post_init__(self) -> None:
        model_of(self.model)
        d = self.log_shapes.shape[-1]
        leading = self.log_volumes.shape[:-1]
        for name, letter, value, tail in zip(
            ("log_volumes", "log_shapes", "axes"),
            self.model,
            (self.log_volumes, self.log_shapes, self.axes),
            ((), (d,), (d, d)),
            strict=True,
        ):
            n_leading = len(leading)
            groups = value.shape[n_leading : n_leading + 1] if letter == "V" else (1,)
            if value.shape != (*leading, *groups, *tail) or value.ndim == n_leading:
                wanted = ", ".join(map(str, ("K" if letter == "V" else 1, *tail)))
                raise ValueError(f"`{name}` of {self.model} should have shape ({wanted}). Found {tuple(value.shape)}.")

    @property
    def n_features(self) -> int:
        """D."""
        return self.log_shapes.shape[-1]

    @property
    def log_variances(self) -> Tensor:
        """Logs of the variances along the axes, (..., G, D)."""
        return self.log_volumes[..., None] + self.log_shapes

    @property
    def factors(self) -> Tensor:
        """Factors of the precisions, (..., G, D, D), triangular for triangular axes: precision = factor @ factor.T."""
        factors: Tensor = self.axes * library(self.axes).exp(-0.5 * self.log_variances)[..., None, :]
        return factors

    @property
    def covariances(self) -> Tensor:
        """Covariances, (..., G, D, D)."""
        return model_of(self.model).covariances(self.axes, self.log_variances)

    def decomposed(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return volumes (G,), shapes (G, D) and orientations (G, D, D), for any axes.

        The covariance is ``volume * orientation @ diag(shape) @ orientation.T``. For triangular axes the shapes ascend.
        """
        if model_of(self.model).is_orthogonal:
            return self.log_volumes.exp(), self.log_shapes.exp(), self.axes
        unit = ParsimoniousCovariances(
            model=self.model, log_volumes=torch.zeros_like(self.log_volumes), log_shapes=self.log_shapes, axes=self.axes
        )
        shapes, orientations = torch.linalg.eigh(unit.covariances)
        if self.model[1] == "E":
            shapes, orientations = shapes[..., :1, :], orientations[..., :1, :, :]
        return self.log_volumes.exp(), shapes, orientations

    def unconstrained(self) -> dict[str, Tensor]:
        """Return the free coordinates of the model.

        ``log_volumes`` (G,); ``log_shapes`` (G, D - 1), all but the last; ``axes`` (G, D(D-1)/2): the entries above the
        diagonal of triangular axes, else of the skew-symmetric :math:`S` whose Cayley transform
        :math:`(I - S)(I + S)^{-1}` is the orientation. The signs of an orientation's columns are arbitrary, and chosen
        such that S exists.
        """
        coordinates = {"log_volumes": self.log_volumes}
        if self.model[1] != "I":
            coordinates["log_shapes"] = self.log_shapes[..., :-1]
        if self.model[2] != "I":
            coordinates["axes"] = entries_above_diagonal(model_of(self.model).free_entries(self.axes))
        return coordinates

    def with_unconstrained(self, values: Mapping[str, Tensor]) -> ParsimoniousCovariances:
        """Return the covariances of this model at these coordinates: the inverse of `unconstrained`."""
        log_shapes, axes = self.log_shapes, self.axes
        if self.model[1] != "I":
            free = values["log_shapes"]
            log_shapes = library(free).concatenate([free, -free.sum(-1)[..., None]], -1)
        if self.model[2] != "I":
            axes = model_of(self.model).axes(strictly_upper(values["axes"], self.n_features))
        return dataclasses.replace(self, log_volumes=values["log_volumes"], log_shapes=log_shapes, axes=axes)


def n_free_parameters(model: CovarianceModel, n_components: int, n_features: int) -> int:
    """Return the number of free parameters: K - 1 weights, KD means, and those of the covariances.

    Args:
        model: One of the fourteen `COVARIANCE_MODELS`, ``"VEV"`` for example.
        n_components: Number of components, K.
        n_features: Number of features, D.

    References:
        Celeux & Govaert, "Gaussian parsimonious clustering models", 1995, table 1.

    Example:
        >>> [n_free_parameters(model, 2, 4) for model in ("EII", "VEV", "VVV")]
        [10, 26, 29]
    """
    n_components, n_features = integer("n_components", n_components), integer("n_features", n_features)
    return n_components - 1 + n_components * n_features + model_of(model).n_parameters(n_components, n_features)


def covariances_from_scatter(
    model: CovarianceModel,
    counts: Tensor,
    scatter: Tensor,
    *,
    start: ParsimoniousCovariances | None = None,
    inner_steps: int = 1000,
) -> ParsimoniousCovariances:
    r"""Return the M-step's covariances: the maximum of the expected log-joint, from sufficient statistics alone.

    With :math:`N_k = \sum_n r_{nk}` and :math:`W_k = \sum_n r_{nk} (x_n - \mu_k)(x_n - \mu_k)^\top` the covariances
    minimise :math:`\sum_k N_k \log|\Sigma_k| + \mathrm{tr}(W_k \Sigma_k^{-1})` within the model. Five have no closed
    form:

    - VEI, VEE, VEV: volumes and shared parameters are improved in turn;
    - EVE, VVE: the common orientation by quasi-Newton steps over the rotations, with a line search. There may be
      several local minima: without a `start` the lowest of the minima from K + 1 starts is returned.

    Args:
        model: One of the fourteen `COVARIANCE_MODELS`, ``"VEV"`` for example.
        counts: (K,), positive.
        scatter: (K, D, D). The diagonals (K, D) are enough for axis-aligned models; the sum (1, D, D) is for EEE.
        start: Covariances at which iterations start; the result is never worse.
        inner_steps: The most iterations; they end earlier once changes are within rounding.

    Raises:
        ValueError: If the model is unknown, the shapes do not fit together, or a covariance is singular.

    References:
        Celeux & Govaert, "Gaussian parsimonious clustering models", 1995, sections 3 and 4. Browne & McNicholas,
        "Estimating common principal components in high dimensions", 2014, section 2. Ablin, Cardoso & Gramfort,
        "Beyond Pham's algorithm for joint diagonalization", 2019, section 3.

    Example:
        >>> scatter = torch.tensor([[[2.0, 0.0], [0.0, 8.0]], [[18.0, 0.0], [0.0, 2.0]]])
        >>> shared = covariances_from_scatter("EEV", torch.tensor([2.0, 3.0]), scatter)
        >>> shared.covariances[0]
        tensor([[0.8000, 0.0000],
                [0.0000, 5.2000]])
    """
    chosen = model_of(model)
    inner_steps = integer("inner_steps", inner_steps, 0)
    tensors(counts=counts, scatter=scatter)
    diagonals = not chosen.structure.is_matrix and scatter.ndim == 2
    if counts.ndim != 1 or not (diagonals or (scatter.ndim == 3 and scatter.shape[1] == scatter.shape[2])):
        raise ValueError(
            "`counts` and `scatter` should have shapes (K,) and (K, D, D). "
            f"Found {tuple(counts.shape)} and {tuple(scatter.shape)}."
        )
    if len(scatter) != len(counts) and not (chosen.structure.is_shared and len(scatter) == 1):
        raise ValueError(f"`scatter` should be of {len(counts)} components, as `counts` are. Found {len(scatter)}.")
    if start is not None and start.model != model:
        raise ValueError(f"`start` should be of the model {model}. Found {start.model}.")
    found, sound = chosen.m_step(counts, scatter, start, inner_steps)
    raise_if_singular(sound[0] if len(sound) == 1 else sound, restricted="model")
    return found


# --- the models ------------------------------------------------------------------------------------------------------


class Model(ABC):
    """One of the fourteen: its axes, the identity or orthogonal unless a subclass says otherwise, and its M-step.

    Attributes:
        name: Its three letters.
        structure: The type of its covariances; a pass over the data in this type gives the M-step's moments.
        start: The type of the mixtures that fits start from.
        is_orthogonal: Whether the axes are orthogonal, and so are the orientation.
    """

    is_orthogonal: ClassVar[bool] = True

    def __init__(self, name: CovarianceModel, structure: Structure, start: Structure) -> None:
        self.name, self.structure, self.start = name, structure, start

    @property
    def keeps_variances(self) -> bool:
        """Whether every variance after an M-step is at least `reg_covar`.

        This holds if volume and shape are both equal or both vary, or if the shape is the identity.
        """
        return self.name[1] in (self.name[0], "I")

    def n_parameters(self, n_components: int, n_features: int) -> int:
        """Return the number of free parameters of all covariances."""
        volume, shape, orientation = ({"I": 0, "E": 1, "V": n_components}[letter] for letter in self.name)
        return volume + shape * (n_features - 1) + orientation * (n_features * (n_features - 1) // 2)

    def covariances(self, axes: Tensor, log_variances: Tensor) -> Tensor:
        """Return covariances (G, D, D) from axes (G, D, D) and logs of the variances along them (G, D)."""
        roots = self.inverse(axes).mT * (0.5 * log_variances).exp()[..., None, :]
        return roots @ roots.mT

    def inverse(self, axes: Tensor) -> Tensor:
        """Return the inverse of axes (G, D, D)."""
        return axes.mT

    def free_entries(self, axes: Tensor) -> Tensor:
        """Return matrices (G, D, D) whose entries above the diagonal are free coordinates of the axes."""
        return to_skew(axes)

    def axes(self, upper: Tensor) -> Tensor:
        """Return the axes of these `free_entries`, given as matrices that are 0 on and below the diagonal."""
        return cayley(upper - upper.mT)

    @abstractmethod
    def factor(self, covariances: ParsimoniousCovariances) -> Tensor:
        """Return the factors of the precisions in the shape of `structure`, for G or K components."""

    @abstractmethod
    def m_step(
        self, counts: Tensor, scatter: Tensor, start: ParsimoniousCovariances | None, inner_steps: int
    ) -> tuple[ParsimoniousCovariances, Tensor]:
        """Return the best covariances (see `covariances_from_scatter`), and the mask of sound ones, (..., G).

        Leading dimensions are batches. Components of count 0 are absent: their scatter is 0, they count as sound, and
        their own parameters are 0 or the identity. NumPy arrays are taken in place of tensors.
        """


class _AxisAligned(Model):
    """EII VII EEI VEI EVI VVI: the axes are the identity."""

    def factor(self, covariances: ParsimoniousCovariances) -> Tensor:
        factor: Tensor = library(covariances.axes).exp(-0.5 * covariances.log_variances)
        return factor[..., 0] if self.structure is SPHERICAL else factor

    def m_step(
        self, counts: Tensor, scatter: Tensor, start: ParsimoniousCovariances | None, inner_steps: int
    ) -> tuple[ParsimoniousCovariances, Tensor]:
        spread = scatter if scatter.ndim == counts.ndim + 1 else scatter.diagonal(0, -2, -1)
        # In the shape of a batch, also under vmap.
        axes = library(spread).ones_like(spread[..., :1, :, None]) * identity_like(spread)
        return _along(self.name, counts, spread, axes, start, inner_steps)


class _Triangular(Model):
    """EEE VEE EVV VVV: the axes are unit upper triangular."""

    is_orthogonal = False

    def inverse(self, axes: Tensor) -> Tensor:
        inverse: Tensor = torch.linalg.solve_triangular(axes, identity_like(axes), upper=True)
        return inverse

    def free_entries(self, axes: Tensor) -> Tensor:
        return axes

    def axes(self, upper: Tensor) -> Tensor:
        return identity_like(upper) + upper

    def factor(self, covariances: ParsimoniousCovariances) -> Tensor:
        return covariances.factors[..., 0, :, :] if self.structure.is_shared else covariances.factors

    def m_step(
        self, counts: Tensor, scatter: Tensor, start: ParsimoniousCovariances | None, inner_steps: int
    ) -> tuple[ParsimoniousCovariances, Tensor]:
        return _by_matrices(self.name, counts, scatter, start, inner_steps)


class _Orthogonal(Model):
    """EEV VEV: each component has an orientation of its own."""

    def factor(self, covariances: ParsimoniousCovariances) -> Tensor:
        return upper_factor(covariances.factors)

    def m_step(
        self, counts: Tensor, scatter: Tensor, start: ParsimoniousCovariances | None, inner_steps: int
    ) -> tuple[ParsimoniousCovariances, Tensor]:
        # The trace is least if the eigenvalues of both are paired in order (von Neumann).
        eigenvalues, axes = library(scatter).linalg.eigh(scatter)
        return _along(self.name, counts, eigenvalues, axes, start, inner_steps)


class _CommonOrientation(_Orthogonal):
    """EVE VVE: all components share the orientation."""

    def m_step(
        self, counts: Tensor, scatter: Tensor, start: ParsimoniousCovariances | None, inner_steps: int
    ) -> tuple[ParsimoniousCovariances, Tensor]:
        axes = common_axes(self.name, counts, scatter, None if start is None else start.axes, inner_steps)
        spread = (axes.mT @ scatter @ axes).diagonal(0, -2, -1)
        return _along(self.name, counts, spread, axes, start, inner_steps)


_MODELS: dict[str, Model] = {
    "EII": _AxisAligned("EII", SPHERICAL, SPHERICAL),
    "VII": _AxisAligned("VII", SPHERICAL, SPHERICAL),
    "EEI": _AxisAligned("EEI", DIAG, DIAG),
    "VEI": _AxisAligned("VEI", DIAG, DIAG),
    "EVI": _AxisAligned("EVI", DIAG, DIAG),
    "VVI": _AxisAligned("VVI", DIAG, DIAG),
    "EEE": _Triangular("EEE", TIED, TIED),
    "VEE": _Triangular("VEE", FULL, TIED),
    "EVE": _CommonOrientation("EVE", FULL, TIED),
    "VVE": _CommonOrientation("VVE", FULL, TIED),
    "EEV": _Orthogonal("EEV", FULL, TIED),
    "VEV": _Orthogonal("VEV", FULL, TIED),
    "EVV": _Triangular("EVV", FULL, TIED),
    "VVV": _Triangular("VVV", FULL, TIED),
}


def model_of(model: str) -> Model:
    """Return the model of this name.

    Raises:
        ValueError: If no model has this name.
    """
    choice("model", model, _MODELS)
    return _MODELS[model]


def type_of(covariance: CovarianceType | CovarianceModel) -> CovarianceType | None:
    """Return the type that a model is equal to, a type itself, or None for the other models."""
    return cast(CovarianceType, covariance) if covariance in get_args(CovarianceType) else _TYPES.get(covariance)


# --- M-steps ---------------------------------------------------------------------------------------------------------


def _along(
    model: CovarianceModel,
    counts: Tensor,
    spread: Tensor,
    axes: Tensor,
    start: ParsimoniousCovariances | None,
    inner_steps: int,
) -> tuple[ParsimoniousCovariances, Tensor]:
    """Return the best volumes and shapes for these axes (..., G, D, D), given the scatter along them (..., K, D)."""
    of, n_features, total = library(spread), spread.shape[-1], counts.sum(-1)[..., None]
    match model[:2]:
        case "EI":
            log_volumes = of.log(spread.sum((-2, -1))[..., None] / (n_features * total))
            log_shapes = of.zeros_like(spread[..., :1, :])
        case "VI":
            log_volumes = _log_of_means(spread.mean(-1), counts)
            log_shapes = of.zeros_like(spread[..., :1, :])
        case "EE":
            log_volumes, log_shapes = _split(of.log(spread.sum(-2)[..., None, :] / total[..., None]))
        case "VE":
            log_volumes, log_shapes = _volumes_and_common_shape(counts, spread, start, inner_steps)
        case "EV":
            separate, log_shapes = _split(_log_of_means(spread, counts[..., None]))
            log_volumes = of.log((counts * of.exp(separate)).sum(-1)[..., None] / total)
        case "VV":
            log_volumes, log_shapes = _split(_log_of_means(spread, counts[..., None]))
    found = ParsimoniousCovariances(model=model, log_volumes=log_volumes, log_shapes=log_shapes, axes=axes)
    # Features may have different scales; along axes that mix features, the largest scale sets the rounding error.
    scale = spread.sum(-2)[..., None, :] / total[..., None]
    if model_of(model).structure.is_matrix:
        scale = of.amax(scale, -1, keepdims=True)
    return found, _unless_absent((of.exp(found.log_variances) > _least(spread) * scale).all(-1), counts)


def _volumes_and_common_shape(
    counts: Tensor, spread: Tensor, start: ParsimoniousCovariances | None, inner_steps: int
) -> tuple[Tensor, Tensor]:
    """Return log-volumes (..., K) and log-shapes (..., 1, D): each is best given the other, both together are optimal.

    The objective is convex in the shape's logarithm: a sum of log-sum-exps.
    """
    of = library(spread)

    def shape(log_volumes: Tensor) -> Tensor:
        return _split(of.log((spread * of.exp(-log_volumes)[..., None]).sum(-2)[..., None, :]))[1]

    def improve(log_volumes: Tensor) -> Tensor:
        return _log_of_means((spread * of.exp(-shape(log_volumes))).mean(-1), counts)

    first = _log_of_means(spread.mean(-1), counts) if start is None else start.log_volumes
    log_volumes = _iterate(improve, inner_steps, first)
    return log_volumes, shape(log_volumes)


def _by_matrices(
    model: CovarianceModel, counts: Tensor, scatter: Tensor, start: ParsimoniousCovariances | None, inner_steps: int
) -> tuple[ParsimoniousCovariances, Tensor]:
    """Return the covariances of the models in which shape and orientation go together, scatter (..., K, D, D)."""
    of, total = library(scatter), counts.sum(-1)[..., None]
    pooled = scatter.sum(-3)[..., None, :, :] / total[..., None, None]
    match model:
        case "EEE":
            log_volumes, log_shapes, axes, sound = _factored(pooled)
        case "VEE":
            log_volumes, unit, sound = _volumes_and_common_matrix(counts, scatter, start, inner_steps)
            _, log_shapes, axes, _ = _factored(unit[..., None, :, :])
            sound = sound[..., None]
        case _:
            absent = (counts == 0)[..., None, None]
            own = scatter / of.where(absent, 1.0, counts[..., None, None])
            log_volumes, log_shapes, axes, sound = _factored(of.where(absent, identity_like(scatter), own))
            if model == "EVV":
                log_volumes = of.log((counts * of.exp(log_volumes)).sum(-1)[..., None] / total)
    found = ParsimoniousCovariances(model=model, log_volumes=log_volumes, log_shapes=log_shapes, axes=axes)
    if model != "EEE":
        factors = found.factors
        relative = (factors * (pooled @ factors)).sum(-2)
        sound = sound & (relative < 1 / _least(scatter)).all(-1)
    return found, _unless_absent(sound, counts)


def _volumes_and_common_matrix(
    counts: Tensor, scatter: Tensor, start: ParsimoniousCovariances | None, inner_steps: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-volumes (..., K), and the matrix of determinant 1 (..., D, D) that all covariances are multiples of.

    The third value says whether that is positive definite (...,).
    """
    of = library(scatter)

    def matrix(log_volumes: Tensor) -> tuple[Tensor, Tensor]:
        pooled = (scatter * of.exp(-log_volumes)[..., None, None]).sum(-3)
        factor, _ = cholesky(pooled)
        return pooled, factor * of.exp(-of.log(factor.diagonal(0, -2, -1)).mean(-1))[..., None, None]

    def improve(log_volumes: Tensor) -> Tensor:
        inverse = inverse_of_lower(matrix(log_volumes)[1])
        precision = inverse.mT @ inverse
        return _log_of_means((scatter * precision[..., None, :, :]).sum((-2, -1)) / scatter.shape[-1], counts)

    first = _log_of_means(scatter.diagonal(0, -2, -1).mean(-1), counts) if start is None else start.log_volumes
    log_volumes = _iterate(improve, inner_steps, first)
    pooled, factor = matrix(log_volumes)
    return log_volumes, factor @ factor.mT, factored(pooled)[1]


def _iterate(improve: Callable[[Tensor], Tensor], inner_steps: int, value: Tensor) -> Tensor:
    """Improve a value until it no longer changes."""
    settled, steps = 100 * float(library(value).finfo(value.dtype).eps), 0
    while steps < inner_steps:
        before, value, steps = value, improve(value), steps + 1
        if is_batched(value):
            inner_steps = INNER_STEPS_UNSEEN
        elif not bool((abs(value - before) > settled).any()):
            break
    return value


def _least(scatter: Tensor) -> float:
    """Return the least variance, in units of that of all components, that rounding does not decide."""
    return 100 * scatter.shape[-1] * float(library(scatter).finfo(scatter.dtype).eps)


def _log_of_means(sums: Tensor, counts: Tensor) -> Tensor:
    """Return the logs of sums over counts; 0 for absent components."""
    of, absent = library(sums), counts == 0
    means: Tensor = of.log(of.where(absent, 1.0, sums / of.where(absent, 1.0, counts)))
    return means


def _unless_absent(sound: Tensor, counts: Tensor) -> Tensor:
    """Return the mask of groups (..., G) that are sound; absent components are."""
    return sound | (counts == 0) if sound.shape == counts.shape else sound


def _split(log_variances: Tensor) -> tuple[Tensor, Tensor]:
    """Return log-volumes (..., G) and log-shapes (..., G, D)."""
    log_volumes = log_variances.mean(-1)
    return log_volumes, log_variances - log_volumes[..., None]


def _factored(covariances: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return log-volumes (..., G), log-shapes (..., G, D), unit upper triangular axes, and the mask of sound ones."""
    factor, sound = factored(covariances)
    diagonal = factor.diagonal(0, -2, -1)
    return *_split(-2 * library(diagonal).log(diagonal)), factor / diagonal[..., None, :], sound
