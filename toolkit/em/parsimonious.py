r"""The fourteen parsimonious Gaussian mixtures: covariances that share volume, shape or orientation.

A covariance is :math:`\Sigma_k = \lambda_k Q_k A_k Q_k^\top`: a volume :math:`\lambda_k = |\Sigma_k|^{1/D}`, a shape
:math:`A_k`, diagonal with determinant 1, and an orientation :math:`Q_k`, orthogonal. A model is named by three letters,
for volume, shape and orientation: each is equal for all components (E), varies between them (V), or is the identity
(I). ``VVV`` is scikit-learn's ``full``, ``EEE`` its ``tied``, ``VVI`` its ``diag`` and ``VII`` its ``spherical``.

What is stored is :math:`\Sigma_k^{-1} = B_k \, \mathrm{diag}(e^{-v_k - s_k}) \, B_k^\top` with the log-volume
:math:`v`, log-shapes :math:`s` that sum to 0, and axes :math:`B`:

=======================  ====================================================================================
models                   axes
=======================  ====================================================================================
EII VII EEI VEI EVI VVI  the identity
EEV VEV EVE VVE          orthogonal: the orientation
EEE VEE EVV VVV          unit upper triangular: shape and orientation go together, so their product may be any
                         matrix of determinant 1, and this factor of it is smooth also where eigenvalues meet
=======================  ====================================================================================

N samples, D features, K components; G is K for what varies and 1 for what all components share.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from toolkit.blocks import no_graph
from toolkit.em._fit import Init, start
from toolkit.em._fused import Moments, Prepared, accumulate, prepare
from toolkit.em.acceleration import Accelerate, Climb, climb
from toolkit.em.gaussian import CovarianceType, GaussianParameters, precisions_cholesky, soft_counts

__all__ = [
    "COVARIANCE_MODELS",
    "CovarianceModel",
    "ParsimoniousCovariances",
    "ParsimoniousParameters",
    "covariances_from_scatter",
    "fit_parsimonious",
    "n_free_parameters",
]

CovarianceModel = Literal[
    "EII", "VII", "EEI", "VEI", "EVI", "VVI", "EEE", "VEE", "EVE", "VVE", "EEV", "VEV", "EVV", "VVV"
]
COVARIANCE_MODELS: tuple[CovarianceModel, ...] = get_args(CovarianceModel)

# Inner iterations of an M-step without a closed form: at most these, until nothing moves but by rounding.
_INNER_STEPS = 1000
# Under vmap nothing can be looked at, so their number is fixed.
_INNER_STEPS_UNSEEN = 100

# Starts are compared after this many EM steps.
_SHORT_RUN = 10


@dataclass(frozen=True, kw_only=True, eq=False)
class ParsimoniousCovariances:
    """Covariances of K components that share volume, shape or orientation.

    Attributes:
        model: One of the fourteen.
        log_volumes: (G,): the log of the D-th root of the determinant.
        log_shapes: (G, D), each row sums to 0.
        axes: (G, D, D) (see the module).

    Raises:
        ValueError: If the model is unknown, or the shapes do not fit together.
    """

    model: CovarianceModel
    log_volumes: Tensor
    log_shapes: Tensor
    axes: Tensor

    def __post_init__(self) -> None:
        check_model(self.model)
        d = self.log_shapes.shape[-1]
        for name, letter, value, tail in zip(
            ("log_volumes", "log_shapes", "axes"),
            self.model,
            (self.log_volumes, self.log_shapes, self.axes),
            ((), (d,), (d, d)),
            strict=True,
        ):
            groups = value.shape[:1] if letter == "V" else (1,)
            if value.shape != (*groups, *tail) or value.ndim == 0:
                wanted = ", ".join(map(str, ("K" if letter == "V" else 1, *tail)))
                raise ValueError(f"`{name}` of {self.model} should have shape ({wanted}). Found {tuple(value.shape)}.")

    @property
    def n_features(self) -> int:
        """D."""
        return self.log_shapes.shape[-1]

    @property
    def log_variances(self) -> Tensor:
        """Logs of the variances along the axes, (G, D)."""
        return self.log_volumes[:, None] + self.log_shapes

    @property
    def factors(self) -> Tensor:
        """Factors of the precisions, (G, D, D): precision = factor @ factor.T. Triangular only if the axes are."""
        return self.axes * (-0.5 * self.log_variances).exp()[:, None, :]

    @property
    def covariances(self) -> Tensor:
        """(G, D, D)."""
        if _is_triangular(self.model):
            inverse: Tensor = torch.linalg.solve_triangular(self.axes, _identity_like(self.axes), upper=True)
            roots = inverse.mT * (0.5 * self.log_variances).exp()[:, None, :]
        else:
            roots = self.axes * (0.5 * self.log_variances).exp()[:, None, :]
        return roots @ roots.mT

    def decomposed(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return volumes (G,), shapes (G, D) and orientations (G, D, D), whatever the axes are.

        The covariance is ``volume * orientation @ diag(shape) @ orientation.T``. For triangular axes the shapes ascend.
        """
        if not _is_triangular(self.model):
            return self.log_volumes.exp(), self.log_shapes.exp(), self.axes
        unit = ParsimoniousCovariances(
            model=self.model, log_volumes=torch.zeros_like(self.log_volumes), log_shapes=self.log_shapes, axes=self.axes
        )
        shapes, orientations = torch.linalg.eigh(unit.covariances)
        if self.model[1] == "E":
            shapes, orientations = shapes[:1], orientations[:1]
        return self.log_volumes.exp(), shapes, orientations

    def unconstrained(self) -> dict[str, Tensor]:
        """Return the free coordinates that the model has of these.

        ``log_volumes`` (G,); ``log_shapes`` (G, D - 1), all but the last; ``axes`` (G, D(D-1)/2): what is above the
        diagonal, of the axes if they are triangular, else of the skew-symmetric :math:`S` whose Cayley transform
        :math:`(I - S)(I + S)^{-1}` is the orientation. The sign of an orientation's column means nothing; it is chosen
        such that S exists.
        """
        coordinates = {"log_volumes": self.log_volumes}
        if self.model[1] != "I":
            coordinates["log_shapes"] = self.log_shapes[:, :-1]
        if self.model[2] != "I":
            rows, columns = _above_diagonal(self.axes)
            entries = self.axes if _is_triangular(self.model) else _to_skew(self.axes)
            coordinates["axes"] = entries[:, rows, columns]
        return coordinates

    def with_unconstrained(self, values: Mapping[str, Tensor]) -> ParsimoniousCovariances:
        """Return the covariances of this model at these coordinates: the inverse of `unconstrained`."""
        log_shapes, axes = self.log_shapes, self.axes
        if self.model[1] != "I":
            free = values["log_shapes"]
            log_shapes = torch.cat([free, -free.sum(-1, keepdim=True)], -1)
        if self.model[2] != "I":
            upper = _strictly_upper(values["axes"], self.n_features)
            identity = _identity_like(upper)
            axes = identity + upper if _is_triangular(self.model) else _cayley(upper - upper.mT)
        return dataclasses.replace(self, log_volumes=values["log_volumes"], log_shapes=log_shapes, axes=axes)


@dataclass(frozen=True, kw_only=True, eq=False)
class ParsimoniousParameters:
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

    log_weights: Tensor
    means: Tensor
    structure: ParsimoniousCovariances

    def __post_init__(self) -> None:
        if self.means.ndim != 2 or 0 in self.means.shape:
            raise ValueError(f"`means` should have shape (K, D). Found {tuple(self.means.shape)}.")
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
    def n_components(self) -> int:
        """K."""
        return self.means.shape[0]

    @property
    def n_features(self) -> int:
        """D."""
        return self.means.shape[1]

    @property
    def weights(self) -> Tensor:
        """(K,), which sum to 1."""
        return self.log_weights.exp()

    @property
    def covariances(self) -> Tensor:
        """(K, D, D)."""
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
        if x.ndim != 2 or x.shape[1] != self.n_features:
            raise ValueError(f"`x` should have shape (N, {self.n_features}). Found {tuple(x.shape)}.")
        differences = x.mT.contiguous() - self.means[:, :, None]
        if self.model[2] == "I":
            whitened = differences * (-0.5 * self.structure.log_variances).exp()[:, :, None]
        else:
            whitened = self.structure.factors.mT @ differences
        log_determinants = self.n_features * (self.structure.log_volumes + math.log(2 * math.pi))
        constant = self.log_weights - 0.5 * log_determinants
        return (constant[:, None] - 0.5 * whitened.square().sum(1)).mT

    def m_step(self, x: Tensor, responsibilities: Tensor) -> ParsimoniousParameters:
        """Return the maximum-likelihood M-step of this model (see `covariances_from_scatter`).

        Where it has no closed form it starts from these parameters, so it never ends below them.

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
        counts = soft_counts(responsibilities.sum(0))
        means = responsibilities.mT @ x / counts[:, None]
        differences = x.mT - means[:, :, None]
        weighted = responsibilities.mT[:, None] * differences
        axis_aligned = self.model[2] == "I"
        scatter = (weighted * differences).sum(-1) if axis_aligned else weighted @ differences.mT
        return ParsimoniousParameters(
            log_weights=counts.log() - counts.sum().log(),
            means=means,
            structure=covariances_from_scatter(self.model, counts, scatter, start=self.structure),
        )

    def unconstrained(self) -> dict[str, Tensor]:
        """Return free coordinates: those of the structure, ``log_weights`` (K,), free up to a constant, ``means``."""
        return {"log_weights": self.log_weights, "means": self.means, **self.structure.unconstrained()}

    def with_unconstrained(self, values: Mapping[str, Tensor]) -> ParsimoniousParameters:
        """Return the mixture of this model at these coordinates."""
        return ParsimoniousParameters(
            log_weights=values["log_weights"].log_softmax(0),
            means=values["means"],
            structure=self.structure.with_unconstrained(values),
        )

    def to(self, target: torch.dtype | torch.device) -> ParsimoniousParameters:
        """Return the parameters in another floating-point type, or on another device."""
        structure = self.structure
        return ParsimoniousParameters(
            log_weights=self.log_weights.to(target),
            means=self.means.to(target),
            structure=dataclasses.replace(
                structure,
                log_volumes=structure.log_volumes.to(target),
                log_shapes=structure.log_shapes.to(target),
                axes=structure.axes.to(target),
            ),
        )

    def to_gaussian(self) -> GaussianParameters:
        """Return the same mixture as `GaussianParameters`.

        The covariances are spherical for EII and VII, diag for the other axis-aligned models, tied for EEE, else full.
        """
        k, structure = self.n_components, self.structure
        kind = _view(self.model)
        factor: Tensor
        if self.model[1:] == "II":
            kind, factor = "spherical", (-0.5 * structure.log_volumes).exp().expand(k)
        elif kind == "diag":
            factor = (-0.5 * structure.log_variances).exp().expand(k, -1)
        elif kind == "tied":
            factor = structure.factors[0]
        else:
            factor = structure.factors
            factor = (factor if _is_triangular(self.model) else _upper_factor(factor)).expand(k, -1, -1)
        return GaussianParameters(
            log_weights=self.log_weights, means=self.means, precisions_cholesky=factor, covariance_type=kind
        )


def n_free_parameters(model: CovarianceModel, n_components: int, n_features: int) -> int:
    """Return how many parameters are free: K - 1 weights, KD means, and those of the covariances.

    Args:
        model: One of the fourteen.
        n_components: K.
        n_features: D.

    References:
        Celeux & Govaert, "Gaussian parsimonious clustering models", 1995, table 1.

    Example:
        >>> [n_free_parameters(model, 2, 4) for model in ("EII", "VEV", "VVV")]
        [10, 26, 29]
    """
    check_model(model)
    volume, shape, orientation = ({"I": 0, "E": 1, "V": n_components}[letter] for letter in model)
    free_axes = n_features * (n_features - 1) // 2
    return n_components - 1 + n_components * n_features + volume + shape * (n_features - 1) + orientation * free_axes


def covariances_from_scatter(
    model: CovarianceModel, counts: Tensor, scatter: Tensor, *, start: ParsimoniousCovariances | None = None
) -> ParsimoniousCovariances:
    r"""Return the M-step's covariances: the maximum of the expected log-joint, from sufficient statistics alone.

    With :math:`N_k = \sum_n r_{nk}` and :math:`W_k = \sum_n r_{nk} (x_n - \mu_k)(x_n - \mu_k)^\top` they minimise
    :math:`\sum_k N_k \log|\Sigma_k| + \mathrm{tr}(W_k \Sigma_k^{-1})` within the model. Closed form but for five models:

    - VEI, VEE, VEV: volumes and what is shared are improved in turn;
    - EVE, VVE: the common orientation by quasi-Newton steps over the rotations, with a line search. There may be
      several local minima: without a `start` the lowest of those from K + 1 starts is returned.

    Args:
        model: One of the fourteen.
        counts: (K,), positive.
        scatter: (K, D, D). The diagonals (K, D) are enough for axis-aligned models; the sum (1, D, D) is for EEE.
        start: Where iterations start; the result is never worse.

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
    check_model(model)
    axis_aligned = model[2] == "I"
    diagonals = axis_aligned and scatter.ndim == 2
    if counts.ndim != 1 or not (diagonals or (scatter.ndim == 3 and scatter.shape[1] == scatter.shape[2])):
        raise ValueError(
            "`counts` and `scatter` should have shapes (K,) and (K, D, D). "
            f"Found {tuple(counts.shape)} and {tuple(scatter.shape)}."
        )
    if len(scatter) != len(counts) and not (model == "EEE" and len(scatter) == 1):
        raise ValueError(f"`scatter` should be of {len(counts)} components, as `counts` are. Found {len(scatter)}.")
    if start is not None and start.model != model:
        raise ValueError(f"`start` should be of the model {model}. Found {start.model}.")
    if axis_aligned:
        spread = scatter if diagonals else scatter.diagonal(dim1=-2, dim2=-1)
        return _along(model, counts, spread, torch.diag_embed(torch.ones_like(spread[:1])), start)
    if _is_triangular(model):
        return _by_matrices(model, counts, scatter, start)
    if model[2] == "E":
        axes = _common_axes(model, counts, scatter, start)
        return _along(model, counts, (axes.mT @ scatter @ axes).diagonal(dim1=-2, dim2=-1), axes[None], start)
    # The trace is least if the eigenvalues of both are paired in order (von Neumann).
    eigenvalues, axes = torch.linalg.eigh(scatter)
    return _along(model, counts, eigenvalues, axes, start)


@no_graph()
def fit_parsimonious(
    x: Tensor,
    n_components: int,
    model: CovarianceModel,
    *,
    tol: float = 1e-6,
    max_iter: int = 1000,
    n_init: int = 1,
    init: Init | ParsimoniousParameters = "kmeans",
    reg_covar: float = 0.0,
    accelerate: Accelerate = "anderson",
    generator: torch.Generator | None = None,
) -> Climb[ParsimoniousParameters]:
    """Maximise the log-likelihood of one of the fourteen models by EM, accelerated unless told otherwise.

    Each of several starts is improved by ten EM steps; the best climbs on, and the next best if its covariances
    become singular.

    Args:
        x: (N, D), float32 or float64, finite.
        n_components: K, at most N.
        model: One of the fourteen.
        tol: As in `climb`: nats per sample.
        max_iter: As in `climb`.
        n_init: How many starts are tried.
        init: How to start (see `start`), or the start itself.
        reg_covar: A prior: `reg_covar` times the count is added to the diagonal of each component's scatter. It is the
            same as adding it to every variance in the four models that scikit-learn has, and keeps what is shared
            shared in the others. 0 is maximum likelihood.
        accelerate: As in `climb`.
        generator: Randomness of the starts. None is torch's global generator.

    Returns:
        The mixture in the data's floating-point type, and how it was found.

    Raises:
        TypeError: If `x` is not a float32 or float64 tensor.
        ValueError: If an argument is out of range, or covariances become singular from every start.

    Example:
        >>> x = torch.tensor([[0.0, 1.0], [1.0, 0.0], [8.0, 9.0], [9.0, 8.0], [10.0, 10.0]])
        >>> two = fit_parsimonious(x, 2, "EII", generator=torch.Generator().manual_seed(0))
        >>> two.parameters.means.sort(0).values
        tensor([[0.5000, 0.5000],
                [9.0000, 9.0000]])
    """
    check_model(model)
    if not isinstance(n_init, int) or isinstance(n_init, bool) or n_init < 1:
        raise ValueError(f"`n_init` should be a positive integer. Found {n_init!r}.")
    if isinstance(init, ParsimoniousParameters):
        if (init.model, init.means.shape) != (model, (n_components, x.shape[-1])):
            raise ValueError(
                f"`init` should be of the model {model}, {n_components} components and {x.shape[-1]} features. "
                f"Found {init.model}, {init.n_components} and {init.n_features}."
            )
        starts: list[GaussianParameters | ParsimoniousParameters] = [init.to(torch.float64)]
    else:
        kind = start_type(model)
        starts = [
            start(x, n_components, covariance_type=kind, init=init, reg_covar=reg_covar, generator=generator)
            for _ in range(n_init)
        ]
    climber = Climber(x, n_components, model, reg_covar)
    search = climber.search(starts, tol=tol, max_iter=max_iter, accelerate=accelerate)
    if search.best is None:
        raise ValueError(search.failures[-1])
    return dataclasses.replace(search.best, parameters=search.best.parameters.to(x.dtype))


# --- EM on prepared data ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Search:
    """What became of several starts: the best climb, None if there is none, and the errors of those that failed."""

    best: Climb[ParsimoniousParameters] | None
    failures: tuple[str, ...]


class Climber:
    """EM steps of one model on one data set, which is prepared once."""

    def __init__(self, x: Tensor, n_components: int, model: CovarianceModel, reg_covar: float) -> None:
        self.model, self.reg_covar = model, reg_covar
        self.data = prepare(x, _view(model), n_components)

    def step(self, parameters: GaussianParameters | ParsimoniousParameters) -> tuple[ParsimoniousParameters, float]:
        """Return the parameters after one EM step, and the log-likelihood before it, nats per sample.

        A mixture of another structure may be stepped from.
        """
        moments = accumulate(_viewed(parameters, _view(self.model)), self.data)
        structure = parameters.structure if isinstance(parameters, ParsimoniousParameters) else None
        return _maximise(self.model, moments, self.data, structure, self.reg_covar), float(moments.log_likelihood)

    def climb(
        self,
        start: GaussianParameters | ParsimoniousParameters,
        *,
        tol: float,
        max_iter: int,
        accelerate: Accelerate,
    ) -> Climb[ParsimoniousParameters]:
        """Climb from one start; the first step from a mixture of another structure is not counted."""
        first = start if isinstance(start, ParsimoniousParameters) else self.step(start)[0]
        leaves = first.unconstrained()
        sizes = [leaf.numel() for leaf in leaves.values()]

        def pack(parameters: ParsimoniousParameters) -> Tensor:
            return torch.cat([leaf.reshape(-1) for leaf in parameters.unconstrained().values()])

        def unpack(position: Tensor) -> ParsimoniousParameters:
            parts = zip(leaves.items(), position.split(sizes), strict=True)
            return first.with_unconstrained({name: part.view(leaf.shape) for (name, leaf), part in parts})

        return climb(
            self.step, first, pack=pack, unpack=unpack, accelerate=accelerate, tol=tol, max_iter=max_iter
        )

    def search(
        self,
        starts: Sequence[GaussianParameters | ParsimoniousParameters],
        *,
        tol: float,
        max_iter: int,
        accelerate: Accelerate,
    ) -> Search:
        """Climb from the best of several starts after a short run; from the next best if that becomes singular."""
        failures: list[str] = []
        reached: list[tuple[float, GaussianParameters | ParsimoniousParameters]] = []
        for first in starts:
            if len(starts) == 1:
                reached.append((0.0, first))
                continue
            try:
                short = self.climb(first, tol=0.0, max_iter=min(_SHORT_RUN, max_iter), accelerate="none")
            except ValueError as error:
                failures.append(str(error))
            else:
                reached.append((short.log_likelihood, short.parameters))
        for _, parameters in sorted(reached, key=lambda pair: -pair[0]):
            try:
                found = self.climb(parameters, tol=tol, max_iter=max_iter, accelerate=accelerate)
            except ValueError as error:
                failures.append(str(error))
            else:
                return Search(found, tuple(failures))
        return Search(None, tuple(failures))


def start_type(model: CovarianceModel) -> CovarianceType:
    """Return the covariance type of the mixture that fits of a model start from."""
    return "diag" if model[2] == "I" else "tied"


def _view(model: CovarianceModel) -> CovarianceType:
    """Return the covariance type whose pass over the data gives all that the M-step needs."""
    if model[1:] == "II":
        return "spherical"
    if model[2] == "I":
        return "diag"
    return "tied" if model == "EEE" else "full"


def _viewed(parameters: GaussianParameters | ParsimoniousParameters, kind: CovarianceType) -> GaussianParameters:
    if isinstance(parameters, ParsimoniousParameters):
        return parameters.to_gaussian()
    factor = parameters.precisions_cholesky.to(torch.float64)
    k = parameters.n_components
    match parameters.covariance_type, kind:
        case "tied", "full":
            factor = factor.expand(k, -1, -1)
        case "diag", "spherical":
            factor = factor.square().reciprocal().mean(-1).rsqrt()
    return GaussianParameters(
        log_weights=parameters.log_weights.double(),
        means=parameters.means.double(),
        precisions_cholesky=factor,
        covariance_type=kind,
    )


def _maximise(
    model: CovarianceModel,
    moments: Moments,
    data: Prepared,
    structure: ParsimoniousCovariances | None,
    reg_covar: float,
) -> ParsimoniousParameters:
    """Return the M-step from the moments of prepared data, float64."""
    counts = soft_counts(moments.counts)
    shifts = moments.first / counts[:, None]
    means = torch.where((moments.counts < counts)[:, None], 0.0, moments.origins + shifts)
    weighted = counts[:, None] * shifts
    n_features = means.shape[1]
    match _view(model):
        case "spherical":
            # Only the trace is known, and all that counts.
            traces = moments.second - (weighted * shifts).sum(1)
            scatter = (traces / n_features)[:, None].expand(-1, n_features)
        case "diag":
            scatter = moments.second - weighted * shifts
        case "tied":
            scatter = (moments.second - weighted.mT @ shifts)[None]
        case "full":
            scatter = moments.second - weighted[:, :, None] * shifts[:, None]
    if data.scale is not None:
        means, scatter = means @ data.scale.mT, data.scale @ scatter @ data.scale.mT
    pulled = counts.sum()[None] if model == "EEE" else counts
    if scatter.ndim == 2:
        scatter = scatter + reg_covar * pulled[:, None]
    else:
        scatter = scatter + reg_covar * pulled[:, None, None] * _identity_like(scatter)
    return ParsimoniousParameters(
        log_weights=counts.log() - counts.sum().log(),
        means=data.centre + means,
        structure=covariances_from_scatter(model, counts, scatter, start=structure),
    )


# --- M-steps ---------------------------------------------------------------------------------------------------------


def _along(
    model: CovarianceModel, counts: Tensor, spread: Tensor, axes: Tensor, start: ParsimoniousCovariances | None
) -> ParsimoniousCovariances:
    """Return the volumes and shapes that are best for these axes (G, D, D), along which the scatter is (K, D)."""
    n_features = spread.shape[1]
    total = counts.sum()
    match model[:2]:
        case "EI":
            log_volumes = (spread.sum() / (n_features * total)).log()[None]
            log_shapes = torch.zeros_like(spread[:1])
        case "VI":
            log_volumes = (spread.mean(1) / counts).log()
            log_shapes = torch.zeros_like(spread[:1])
        case "EE":
            log_volumes, log_shapes = _split((spread.sum(0, keepdim=True) / total).log())
        case "VE":
            log_volumes, log_shapes = _volumes_and_common_shape(counts, spread, start)
        case "EV":
            separate, log_shapes = _split((spread / counts[:, None]).log())
            log_volumes = ((counts * separate.exp()).sum() / total).log()[None]
        case "VV":
            log_volumes, log_shapes = _split((spread / counts[:, None]).log())
    found = ParsimoniousCovariances(model=model, log_volumes=log_volumes, log_shapes=log_shapes, axes=axes)
    # Features may have scales of their own; along axes that are mixtures of them the largest decides what is rounding.
    pooled = spread.sum(0) / total
    scale = pooled if model[2] == "I" else pooled.max()
    least = n_features * torch.finfo(spread.dtype).eps * scale
    _raise_if_singular((found.log_variances.exp() > least).all(-1))
    return found


def _volumes_and_common_shape(
    counts: Tensor, spread: Tensor, start: ParsimoniousCovariances | None
) -> tuple[Tensor, Tensor]:
    """Return log-volumes (K,) and log-shapes (1, D): each is best given the other, and together they are optimal.

    As a function of the shape's logarithm what is minimised is convex: a sum of log-sum-exps.
    """

    def shape(log_volumes: Tensor) -> Tensor:
        return _split((spread * (-log_volumes).exp()[:, None]).sum(0, keepdim=True).log())[1]

    def improve(log_volumes: Tensor) -> Tensor:
        return ((spread * (-shape(log_volumes)).exp()).mean(1) / counts).log()

    log_volumes = _iterate(improve, (spread.mean(1) / counts).log() if start is None else start.log_volumes)
    return log_volumes, shape(log_volumes)


def _by_matrices(
    model: CovarianceModel, counts: Tensor, scatter: Tensor, start: ParsimoniousCovariances | None
) -> ParsimoniousCovariances:
    """Return the covariances of the models in which shape and orientation go together, scatter (K, D, D)."""
    total = counts.sum()
    match model:
        case "EEE":
            log_volumes, log_shapes, axes = _factored(scatter.sum(0, keepdim=True) / total)
        case "VEE":
            log_volumes, unit = _volumes_and_common_matrix(counts, scatter, start)
            _, log_shapes, axes = _factored(unit[None])
        case _:
            log_volumes, log_shapes, axes = _factored(scatter / counts[:, None, None])
            if model == "EVV":
                log_volumes = ((counts * log_volumes.exp()).sum() / total).log()[None]
    return ParsimoniousCovariances(model=model, log_volumes=log_volumes, log_shapes=log_shapes, axes=axes)


def _volumes_and_common_matrix(
    counts: Tensor, scatter: Tensor, start: ParsimoniousCovariances | None
) -> tuple[Tensor, Tensor]:
    """Return log-volumes (K,) and the matrix of determinant 1 (D, D) that all covariances are multiples of."""
    n_features = scatter.shape[1]

    def matrix(log_volumes: Tensor) -> tuple[Tensor, Tensor]:
        pooled = (scatter * (-log_volumes).exp()[:, None, None]).sum(0)
        factor, _ = torch.linalg.cholesky_ex(pooled)
        return pooled, factor * (-factor.diagonal().log().mean()).exp()

    def improve(log_volumes: Tensor) -> Tensor:
        precision = torch.cholesky_inverse(matrix(log_volumes)[1])
        return ((scatter * precision).sum((1, 2)) / (n_features * counts)).log()

    first = scatter.diagonal(dim1=-2, dim2=-1).mean(1) / counts
    log_volumes = _iterate(improve, first.log() if start is None else start.log_volumes)
    pooled, factor = matrix(log_volumes)
    precisions_cholesky(pooled, "tied")  # names what is singular
    return log_volumes, factor @ factor.mT


# The steps of a line search; the last is not to move.
_FRACTIONS = (1.0, 0.5, 0.25, 0.0625, 0.00390625, 0.0)
_LONGEST_ROTATION = 0.5


def _common_axes(
    model: CovarianceModel, counts: Tensor, scatter: Tensor, start: ParsimoniousCovariances | None
) -> Tensor:
    """Return the orientation (D, D) that EVE and VVE share."""
    if start is None:
        axes = torch.linalg.eigh(torch.cat([scatter.sum(0, keepdim=True), scatter])).eigenvectors
    else:
        axes = start.axes
    unseen = _is_batched(scatter)
    settled = 100 * torch.finfo(scatter.dtype).eps
    for _ in range(_INNER_STEPS_UNSEEN if unseen else _INNER_STEPS):
        axes, moved = _rotate(model, counts, scatter, axes)
        if not unseen and not bool((moved > settled).any()):
            break
    # One Newton-Schulz step: the product of many rotations stays a rotation.
    axes = 0.5 * axes @ (3 * _identity_like(axes) - axes.mT @ axes)
    return axes[_misfit(model, counts, _spread_along(scatter, axes))[0].argmin()]


def _spread_along(scatter: Tensor, axes: Tensor) -> Tensor:
    """Return the scatter (K, D, D) along each of several systems of axes (..., D, D) as (..., K, D)."""
    return (axes[..., None, :, :] * (scatter @ axes[..., None, :, :])).sum(-2)


def _misfit(model: CovarianceModel, counts: Tensor, spread: Tensor) -> tuple[Tensor, Tensor]:
    r"""Return what a common orientation minimises, (...), given the scatter along it (..., K, D), and weights (..., K).

    It is twice the negative expected log-joint at the best volumes and shapes, up to a constant: for VVE
    :math:`\sum_k N_k \sum_j \log m_{kj}`, for EVE :math:`N D \log \sum_k \prod_j m_{kj}^{1/D}`. Its derivative is
    that of the weighted sum of :math:`\sum_j \log m_{kj}`.
    """
    logs = spread.log().sum(-1)
    if model == "VVE":
        return (counts * logs).sum(-1), counts.expand(logs.shape)
    n_features = spread.shape[-1]
    roots = logs / n_features
    return n_features * counts.sum() * roots.logsumexp(-1), counts.sum() * roots.softmax(-1)


def _rotate(model: CovarianceModel, counts: Tensor, scatter: Tensor, axes: Tensor) -> tuple[Tensor, Tensor]:
    """Return axes (R, D, D) after one quasi-Newton step each, and how far each has moved, (R,).

    The Hessian is taken as it is where the axes diagonalise every scatter: there it is diagonal in the planes of
    rotation.
    """
    rotated = axes.mT[:, None] @ scatter @ axes[:, None]
    spread = rotated.diagonal(dim1=-2, dim2=-1)
    value, weights = _misfit(model, counts, spread)
    ratios = weights[..., None] / spread
    slopes = (rotated * ratios[..., None, :]).sum(1)
    slopes = slopes - slopes.mT
    curvatures = spread.mT @ ratios
    curvatures = curvatures + curvatures.mT - 2 * weights.sum(-1)[:, None, None]
    eps = torch.finfo(scatter.dtype).eps
    turn = -slopes / curvatures.clamp(min=math.sqrt(eps) * counts.sum())
    longest = turn.abs().amax((-2, -1), keepdim=True)
    turn = turn * (_LONGEST_ROTATION / longest.clamp(min=_LONGEST_ROTATION))
    fractions = turn.new_tensor(_FRACTIONS)
    candidates = axes @ _cayley(-0.5 * fractions[:, None, None, None] * turn)
    values, _ = _misfit(model, counts, _spread_along(scatter, candidates))
    # Near the minimum differences of values are rounding, while slopes still tell the direction.
    slack = 10 * eps * scatter.shape[-1] * counts.sum()
    acceptable = (values <= value + slack) | (fractions == 0)[:, None]
    chosen = acceptable.to(torch.uint8).argmax(0)
    which = chosen[None, :, None, None].expand(1, *axes.shape)
    return candidates.gather(0, which)[0], fractions[chosen] * longest[:, 0, 0]


def _iterate(improve: Callable[[Tensor], Tensor], value: Tensor) -> Tensor:
    """Improve a value until it no longer changes."""
    unseen = _is_batched(improve(value))
    settled = 100 * torch.finfo(value.dtype).eps
    for _ in range(_INNER_STEPS_UNSEEN if unseen else _INNER_STEPS):
        before, value = value, improve(value)
        if not unseen and not bool(((value - before).abs() > settled).any()):
            break
    return value


def _split(log_variances: Tensor) -> tuple[Tensor, Tensor]:
    """Return log-volumes (G,) and log-shapes (G, D)."""
    log_volumes = log_variances.mean(-1)
    return log_volumes, log_variances - log_volumes[:, None]


def _factored(covariances: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-volumes (G,), log-shapes (G, D) and unit upper triangular axes (G, D, D)."""
    if len(covariances) == 1:
        factor = precisions_cholesky(covariances[0], "tied")[None]
    else:
        factor = precisions_cholesky(covariances, "full")
    diagonal = factor.diagonal(dim1=-2, dim2=-1)
    return *_split(-2 * diagonal.log()), factor / diagonal[:, None, :]


# --- orthogonal matrices ---------------------------------------------------------------------------------------------


def _cayley(skew: Tensor) -> Tensor:
    """Return the rotations (I - S)(I + S)^-1 of skew-symmetric matrices (..., D, D)."""
    identity = _identity_like(skew)
    rotation: Tensor = torch.linalg.solve(identity + skew, identity - skew)
    return rotation


def _to_skew(axes: Tensor) -> Tensor:
    """Return the skew-symmetric matrices whose Cayley transforms are the orthogonal `axes`, up to signs of columns.

    References:
        O'Dorney, "Minimizing the Cayley transform of an orthogonal matrix by multiplying by signature matrices", 2014:
        signs for which it exists always do.
    """
    signed = axes * _signs(axes)[..., None, :]
    identity = _identity_like(axes)
    skew: Tensor = torch.linalg.solve(identity + signed, identity - signed)
    return 0.5 * (skew - skew.mT)


@no_graph()
def _signs(axes: Tensor) -> Tensor:
    """Return signs (..., D) of the columns for which I + Q is far from singular: no pivot of it is below 1."""
    identity = _identity_like(axes)
    elimination = identity.expand(axes.shape)
    signs = []
    for j in range(axes.shape[-1]):
        column = (elimination @ axes[..., j, None])[..., 0]
        signs.append(torch.where(column[..., j] < 0, -1.0, 1.0).to(axes.dtype))
        pivoted = elimination[..., j] + signs[-1][..., None] * column
        below = (torch.arange(axes.shape[-1], device=axes.device) > j) * pivoted / pivoted[..., j, None]
        elimination = elimination - below[..., :, None] * elimination[..., j, None, :]
    return torch.stack(signs, -1)


def _upper_factor(factors: Tensor) -> Tensor:
    """Return the upper triangular U with U U^T = F F^T for factors (..., D, D): QR with both orders reversed."""
    triangular = torch.linalg.qr(factors.flip(-2).mT).R
    upper = triangular.mT.flip(-1, -2)
    return upper * upper.diagonal(dim1=-2, dim2=-1).sign()[..., None, :]


def _strictly_upper(entries: Tensor, size: int) -> Tensor:
    """Return the matrices (..., D, D) with these entries (..., D(D-1)/2) above the diagonal, row by row, else 0."""
    if entries.shape[-1] != size * (size - 1) // 2:
        raise ValueError(
            f"`axes` should have {size * (size - 1) // 2} entries in its last dimension for {size} features. "
            f"Found shape {tuple(entries.shape)}."
        )
    places = torch.full((size, size), entries.shape[-1], device=entries.device)
    rows, columns = torch.triu_indices(size, size, 1, device=entries.device)
    places[rows, columns] = torch.arange(entries.shape[-1], device=entries.device)
    return torch.cat([entries, torch.zeros_like(entries[..., :0].sum(-1, keepdim=True))], -1)[..., places]


def _above_diagonal(matrices: Tensor) -> tuple[Tensor, Tensor]:
    size = matrices.shape[-1]
    rows, columns = torch.triu_indices(size, size, 1, device=matrices.device)
    return rows, columns


def _identity_like(matrices: Tensor) -> Tensor:
    return torch.eye(matrices.shape[-1], dtype=matrices.dtype, device=matrices.device)


def _is_triangular(model: CovarianceModel) -> bool:
    return model[1] == model[2] != "I"


def _is_batched(tensor: Tensor) -> bool:
    return torch._C._functorch.is_batchedtensor(tensor)


def check_model(model: str) -> None:
    """Raise a ValueError unless the model is known."""
    if model not in COVARIANCE_MODELS:
        raise ValueError(f"`model` should be one of {', '.join(COVARIANCE_MODELS)}. Found {model!r}.")


def _raise_if_singular(sound: Tensor) -> None:
    # Under torch.func a value cannot be looked at; a singular covariance is NaN or infinite there.
    if torch._C._functorch.is_functorch_wrapped_tensor(sound) or bool(sound.all()):
        return
    components = "" if len(sound) == 1 else f" of component {', '.join(map(str, (~sound).nonzero().ravel().tolist()))}"
    raise ValueError(
        f"`scatter` should be positive definite. Found a singular one{components}: too few distinct samples, or "
        "features that depend on each other. More regularisation (`reg_covar`), fewer components or a more "
        "restricted `model` help."
    )
