"""Gaussian mixtures as a scikit-learn estimator, for arrays and for tensors.

The functional core of `toolkit.em` does the work; this module has no formula of an EM step.

N samples, D features, K components.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Self, cast, get_args

import numpy as np
import torch
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import Tags
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from toolkit._checks import choice, integer, level, number
from toolkit._data import (
    Array,
    Form,
    RandomState,
    Rows,
    choose,
    generator_of,
    is_chunked,
    read,
    read_chunks,
    read_parts,
    read_weights,
    rows_of,
)
from toolkit._progress import Progress
from toolkit.blocks import no_graph
from toolkit.em.covariance import COVARIANCE_TYPES, CovarianceType, structure_of
from toolkit.em.covariance.models import model_of, type_of
from toolkit.em.engine.acceleration import Accelerate, ClimbOptions, ranked
from toolkit.em.engine.ascent import Engine, Fit, GaussianEngine, check_resolved, climb_each, collapsed_components
from toolkit.em.engine.checks import check_callback
from toolkit.em.engine.samples import prepare
from toolkit.em.engine.starts import Init, choose_means, start_at, start_at_random
from toolkit.em.estimators._density import FEW, log_joint, log_joint_of_few
from toolkit.em.estimators._online import OnlineMixture
from toolkit.em.estimators._start import check_init_parameters
from toolkit.em.estimators.base_mixture import numbers, tensor
from toolkit.em.gaussian import GaussianParameters
from toolkit.em.information import ErrorMethod, standard_errors
from toolkit.em.mixture import Mixture
from toolkit.em.models._patterns import MissingEngine
from toolkit.em.models.missing import MissingGaussian, impute, start_missing
from toolkit.em.models.parsimonious import COVARIANCE_MODELS, Climber, CovarianceModel, n_free_parameters
from toolkit.em.models.prior import Prior

__all__ = ["CollapseWarning", "GaussianMixture"]

InitParams = Literal["kmeans", "k-means++", "random", "random_from_data"]

# Bytes of samples up to which a transposed copy is kept between the steps, which makes the steps faster.
_CACHED = 2**28

# Bytes of a memory-mapped array up to which it is read into memory as a whole.
_MAPPED = 2**26

# The most samples that a start is computed from.
_SAMPLED = 2**16


class CollapseWarning(UserWarning):
    """A component has shrunk to so few distinct samples that only regularisation keeps its variance from 0."""


def natural_parameters(mixture: GaussianParameters | MissingGaussian) -> dict[str, Tensor]:
    """Return weights, means and covariances, the parameters that the attributes hold."""
    parameters = mixture.parameters if isinstance(mixture, MissingGaussian) else mixture
    return {"weights": parameters.weights, "means": parameters.means, "covariances": parameters.covariances}


@dataclass(frozen=True)
class Data:
    """Samples to fit, (N, D) or a reader of their rows, with weights; and the samples that starts are made from."""

    x: Tensor | Rows
    weights: Tensor | None
    sampled: Tensor
    sampled_weights: Tensor | None
    form: Form
    n_samples: int

    @property
    def rows(self) -> Rows:
        """The reader of the samples, with their weights."""
        return rows_of(self.x, self.weights) if isinstance(self.x, Tensor) else self.x


class GaussianMixture(OnlineMixture):
    r"""A mixture of Gaussians, fitted by EM.

    Parameters, attributes and methods are those of ``sklearn.mixture.GaussianMixture``, with the same meaning except
    for:

    - **Convergence.** `tol` bounds the remaining gain, not the last step's gain, because steps are accelerated; its
      default is lower. ``accelerate="none", tol=1e-3, max_iter=100`` are scikit-learn's steps and its defaults.
    - **`lower_bound_`** is the log-likelihood of the returned parameters, not of the parameters one step before.
    - **Starts** from samples have the covariance of the samples near each mean; scikit-learn's have the variance
      `reg_covar`.
    - **Restarts.** The best of `n_init` fits is chosen among the fits without a degenerate component, if there are any.
      The likelihood of a component on one sample has no bound, so the highest likelihood need not be the best fit.

    New features are `sample_weight`, tensors on any device, chunks of samples, missing values, priors, mclust's
    covariance models, `partial_fit`, `icl` and `standard_errors`.

    Args:
        n_components: Number of components, K.
        covariance_type: ``"full"``, ``"tied"``, ``"diag"`` or ``"spherical"``, or one of mclust's fourteen models, such
            as ``"VEV"``. The letters say whether components differ in volume, shape and orientation (E: equal,
            V: varying, I: aligned with the axes). A model needs samples in memory, and its covariances are matrices
            (K, D, D).
        tol: The fit has converged when eight steps together gain at most `tol`, in nats per sample, or four steps at
            most a tenth of it. Steps are extrapolated, so the remaining gain is about `tol`, or more on a plateau near
            a saddle. With ``accelerate="none"``: when one step gains at most `tol`; 0 takes all `max_iter` steps.
        reg_covar: Added to every variance, in the data's units squared.
        max_iter: The most EM steps. 0 sets the attributes to the start.
        n_init: Number of starts; the best fit is kept.
        init_params: ``"kmeans"``: one M-step from the clusters of k-means. ``"k-means++"``, ``"random_from_data"``: the
            means are samples, far from each other or at random. ``"random"``: one M-step from random responsibilities.
        weights_init: (K,), which sum to 1. None: by `init_params`.
        means_init: (K, D). None: by `init_params`. The other parameters are estimated from the samples nearest to each
            mean.
        precisions_init: Inverse covariances, shaped by the type. None: by `init_params`.
        random_state: An integer, a numpy.random.RandomState, a torch.Generator, or None for NumPy's global state.
        warm_start: Whether `fit` continues from the last fit's parameters; `n_init` is then ignored.
        verbose: 1 shows progress, 2 also the time.
        verbose_interval: Steps between two lines of progress, if the output is not a terminal.
        accelerate: ``"anderson"`` or ``"squarem"``: extrapolate the steps, and take jumps that do not lower the
            likelihood. ``"none"``: plain EM. ``"auto"``: for few samples and at most 128 parameters, full or diag,
            plain steps and then Newton's; else ``"anderson"``.
        missing: Whether NaN is a missing value. Fits and predictions then use the exact density of the observed values;
            a sample without any value has no effect on the parameters. Only for the four types and samples in memory.
        prior: A `Prior`, or ``"default"`` for `Prior.default` of the samples: maximise the posterior density.
            `lower_bound_` and `history_` are then the log-likelihood plus the log-prior over N. Only for the four
            types. None: maximise the likelihood.
        learning_decay: The step of batch t in `partial_fit` is ``(t + learning_offset) ** -learning_decay``: above 0.5
            and at most 1 to converge, 0 to follow samples that drift.
        learning_offset: See `learning_decay`.
        callback: Called after each step with the number of steps and the log-likelihood.
        n_init_keep: None: each start is iterated to its end. A number, which takes effect for the four types without a
            prior or missing values: all starts are iterated together until each gains little, and only this number of
            the best continue. That is faster, but may drop the start that would have ended highest.

    Attributes:
        weights_: (K,).
        means_: (K, D).
        covariances_: Shaped by the type.
        precisions_: Inverse covariances.
        precisions_cholesky_: Upper triangular factors of the precisions.
        converged_: Whether the fit converged.
        n_iter_: EM steps that the fit took.
        lower_bound_: Log-likelihood of the attributes, nats per sample.
        history_: Log-likelihood at the start and after each step taken, (n,). It never falls. With several starts it
            begins where the others were dropped.
        lower_bounds_: `history_` without the start, as a list.
        collapsed_: Indices of the degenerate components, which are empty or would be singular without `reg_covar`. A
            `CollapseWarning` names them.
        n_features_in_: Number of features, D.
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
        covariance_type: CovarianceType | CovarianceModel = "full",
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
        accelerate: Accelerate = "auto",
        missing: bool = False,
        prior: Prior | Literal["default"] | None = None,
        learning_decay: float = 0.6,
        learning_offset: float = 1.0,
        callback: Callable[[int, float], None] | None = None,
        n_init_keep: int | None = None,
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
        self.missing = missing
        self.prior = prior
        self.learning_decay = learning_decay
        self.learning_offset = learning_offset
        self.callback = callback
        self.n_init_keep = n_init_keep

    @no_graph()
    def fit(self, X: object, y: object = None, sample_weight: object = None) -> Self:
        """Maximise the log-likelihood by EM.

        Args:
            X: (N, D), N at least 2 and K: an array, a tensor, or any object that scikit-learn reads as an array.
            y: Ignored.
            sample_weight: (N,), not negative: how often each sample counts. None: once each.

        Returns:
            The estimator.

        Warns:
            ConvergenceWarning: If the fit has not converged after `max_iter` steps.
            CollapseWarning: If a component is degenerate.

        Raises:
            TypeError: If `X` is sparse or complex.
            ValueError: If a parameter is out of range, `X` or `sample_weight` has another shape or is not finite, or a
                covariance becomes singular.
        """
        self._check_parameters()
        generator = generator_of(self.random_state)
        data = self._data(X, sample_weight, generator)
        if self.n_components > data.n_samples:
            raise ValueError(
                f"`n_components` should be at most {data.n_samples}, the number of samples. Found {self.n_components}."
            )
        engine = self._engine(data)
        if self.warm_start and hasattr(self, "converged_"):
            starts, n_failures = [self._last(data.sampled)], 0
        else:
            starts, n_failures = self._starts(data, generator)
        with Progress(verbose=int(self.verbose), interval=self.verbose_interval, callback=self.callback) as progress:
            fits, n_singular = self._climb(engine, starts, progress)
        best = self._best(fits, data.sampled.dtype)
        if isinstance(engine, GaussianEngine) and engine.prior is None:
            check_resolved(best, data.rows, engine.prepared)
        self._set(best, data.form)
        self._n_fitted = data.n_samples
        if hasattr(self, "_online"):
            del self._online
        self._warn(n_failures + n_singular)
        return self

    def standard_errors(
        self,
        X: object,
        sample_weight: object = None,
        method: ErrorMethod = "louis",
    ) -> dict[str, Array]:
        """Return the standard errors of the estimates, to first order in 1/N.

        The fit is assumed to be at a maximum of the likelihood: use a small `tol`, a small `reg_covar`, and no prior.

        Args:
            X: (N, D), the samples that were fitted.
            sample_weight: (N,), the weights that were used in the fit.
            method: ``"louis"`` or ``"sem"``, which assume that the samples come from such a mixture; or ``"sandwich"``,
                which does not assume this (see `toolkit.em.information.standard_errors`).

        Returns:
            ``weights``, ``means`` and ``covariances`` -> their standard errors, of the same shapes.

        Raises:
            NotFittedError: If the mixture is not fitted.
            ValueError: If the fit is not at a maximum, the method is unknown, or the covariance model is not one of the
                four types.

        References:
            Louis, "Finding the observed information matrix when using the EM algorithm", 1982, section 3. Meng & Rubin,
            "Using EM to obtain asymptotic variance-covariance matrices", 1991, equation 2.3.5.
        """
        check_is_fitted(self, "weights_")
        kind = type_of(self.covariance_type)
        if kind is None:
            raise ValueError(
                f"`standard_errors` should be asked of the types {', '.join(COVARIANCE_TYPES)}. "
                f"Found covariance_type={self.covariance_type!r}."
            )
        parts, form = self._read(X)
        x = torch.cat(list(parts)).to(tensor(self.weights_).device, torch.float64)
        weights = read_weights(sample_weight, len(x), x)
        parameters = self._parameters().as_type(kind)
        mixture = MissingGaussian(parameters) if bool(x.isnan().any()) else parameters
        found = standard_errors(mixture, x, method=method, sample_weight=weights, natural=natural_parameters)
        return {name: form.give(value) for name, value in found.items()}

    @no_graph()
    def impute(self, X: object) -> Array:
        """Return the samples with each missing value replaced by its expectation given the observed values.

        Args:
            X: (N, D), NaN where missing.

        Returns:
            (N, D). Observed values are unchanged.

        Raises:
            NotFittedError: If the mixture is not fitted.
            ValueError: If the samples do not have the features that were fitted, or are infinite.

        References:
            Little & Rubin, "Statistical analysis with missing data", 2002, section 11.2.
        """
        check_is_fitted(self, "weights_")
        parts, form = read_parts(self, X, missing=True)
        parameters = self._parameters()
        return form.give(torch.cat([impute(parameters, batch) for batch in self._batches(parts)]))

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = bool(self.missing)
        return tags

    @property
    def parameters_(self) -> GaussianParameters:
        """The fitted mixture as `toolkit.em` parameters, float64: for `surrogate`, `standard_errors`, `gradient_em`."""
        check_is_fitted(self, "weights_")
        return self._parameters()

    # --- hooks of the base ---

    def _read(self, x: object) -> tuple[Iterable[Tensor], Form]:
        return read_parts(self, x, missing=bool(self.missing), hint=self._hint)

    def _mixture(self) -> Mixture:
        return MissingGaussian(self._parameters()) if self.missing else self._parameters()

    def _log_joints(self, parts: Iterable[Tensor]) -> Iterator[Tensor]:
        few = not isinstance(self.weights_, Tensor) or self.weights_.device.type == "cpu"
        mixture = None
        for part in parts:
            if self.missing and bool(part.isnan().any()):
                yield from super()._log_joints([part])
                continue
            if few and part.numel() * len(self.weights_) <= FEW:
                values = (self.weights_, self.means_, self.precisions_cholesky_, part)
                weights, means, factor, array = map(np.asarray, values)
                yield torch.from_numpy(log_joint_of_few(weights, means, factor, array, self._kept_type))
                continue
            mixture = mixture or self._parameters()
            for batch in self._batches([part]):
                yield log_joint(mixture, batch)

    def _parameters(self) -> GaussianParameters:
        return GaussianParameters(
            log_weights=tensor(self.weights_).log(),
            means=tensor(self.means_),
            precisions_cholesky=tensor(self.precisions_cholesky_),
            covariance_type=self._kept_type,
        )

    def _n_parameters(self) -> int:
        if self._is_type:
            return self._parameters().n_parameters
        return n_free_parameters(cast(CovarianceModel, self.covariance_type), *self.means_.shape)

    def _draw(self, labels: Tensor, generator: torch.Generator) -> Tensor:
        mixture = self._parameters()
        shape = len(labels), mixture.n_features
        draws = torch.randn(shape, generator=generator, device=generator.device, dtype=torch.float64)
        draws = draws.to(labels.device)
        structure = structure_of(mixture.covariance_type)
        return mixture.means[labels] + structure.colour(mixture.precisions_cholesky, draws, labels)

    def _first(self, x: Tensor, weights: Tensor | None, form: Form, n_steps: int) -> GaussianParameters:
        data = Data(x, weights, x, weights, form, len(x))
        starts, _ = self._starts(data, generator_of(self.random_state))
        options = ClimbOptions(accelerate="none", tol=0.0, max_iter=n_steps)
        engine = self._engine(data)
        return self._best([engine.climb(start, options) for start in starts], x.dtype).parameters

    # --- how ---

    @property
    def _hint(self) -> str:
        """Advice for samples with NaN, if there is any for this covariance."""
        return " `missing=True` fits the observed values of each sample." if self._is_type else ""

    @property
    def _is_type(self) -> bool:
        """Whether the covariance is one of scikit-learn's types, which priors and missing values are for."""
        return self.covariance_type in COVARIANCE_TYPES

    @property
    def _kept_type(self) -> CovarianceType:
        """The type of the attributes: a model has matrices."""
        return cast(CovarianceType, self.covariance_type) if self._is_type else "full"

    @property
    def _start_type(self) -> CovarianceType:
        """The type of the mixtures that fits start from."""
        return type_of(self.covariance_type) or model_of(self.covariance_type).structure.wide.name

    def _check_parameters(self) -> None:
        """Raise a ValueError for the first parameter that is out of range."""
        check_callback(self.callback)
        least = {"n_components": 1, "n_init": 1, "max_iter": 0, "verbose_interval": 1}
        for name, smallest in least.items():
            integer(name, getattr(self, name), smallest)
        if self.n_init_keep is not None:
            integer("n_init_keep", self.n_init_keep)
        level(self.verbose)
        for name in ("tol", "reg_covar", "learning_decay", "learning_offset"):
            number(name, getattr(self, name), least=0)
        for name, choices in (
            ("covariance_type", (*COVARIANCE_TYPES, *COVARIANCE_MODELS)),
            ("init_params", get_args(InitParams)),
            ("accelerate", get_args(Accelerate)),
        ):
            choice(name, getattr(self, name), choices)
        for name in ("warm_start", "missing"):
            if not isinstance(found := getattr(self, name), int | np.bool_):
                raise ValueError(f"`{name}` should be True or False. Found {found!r}.")
        if self.prior not in (None, "default") and not isinstance(self.prior, Prior):
            raise ValueError(f"`prior` should be a Prior, 'default' or None. Found {self.prior!r}.")
        if self.covariance_type in COVARIANCE_MODELS:
            for name, default in (("prior", None), ("precisions_init", None), ("missing", False)):
                if (found := getattr(self, name)) is not default:
                    raise ValueError(
                        f"`{name}` should be {default} for the covariance model {self.covariance_type}: it is for the "
                        f"types {', '.join(COVARIANCE_TYPES)}. Found {found!r}."
                    )

    def _data(self, x: object, sample_weight: object, generator: torch.Generator) -> Data:
        """Return the samples to fit, whole or in chunks, without those of weight 0."""
        if is_chunked(x) or (isinstance(x, np.memmap) and x.nbytes > _MAPPED):
            if self.missing:
                raise ValueError("`missing` should be False for samples that come in chunks. Found True.")
            if type_of(self.covariance_type) is None:
                raise ValueError(
                    f"`covariance_type` should be one of {', '.join(COVARIANCE_TYPES)} for samples in chunks. "
                    f"Found {self.covariance_type!r}."
                )
            chunks = read_chunks(self, x, sample_weight, reset=True, missing=False)
            sampled, weights = chunks.choose(_SAMPLED, generator)
            if chunks.n_samples < 2:
                raise ValueError(f"`X` should have at least 2 samples. Found {chunks.n_samples}.")
            return Data(chunks.rows, None, sampled, weights, chunks.form, chunks.n_samples)
        x, form = read(self, x, reset=True, missing=bool(self.missing), least=2, hint=self._hint)
        weights = read_weights(sample_weight, len(x), x)
        if weights is not None and not bool(weights.all()):
            # A sample of weight 0 does not count, not even for the start.
            x, weights = x[weights > 0], weights[weights > 0]
        return Data(x, weights, *choose(x, weights, _SAMPLED, generator), form, len(x))

    def _engine(self, data: Data) -> Engine:
        n_components, reg_covar = int(self.n_components), float(self.reg_covar)
        kind = type_of(self.covariance_type)
        if kind is None:
            model = cast(CovarianceModel, self.covariance_type)
            return Climber(cast(Tensor, data.x), n_components, model, reg_covar, data.weights)
        prior = self.prior
        if prior == "default":
            prior = self._default_prior(data.sampled, data.sampled_weights)
        if isinstance(data.x, Tensor) and self.missing and bool(data.x.isnan().any()):
            return MissingEngine.of(data.x, n_components, reg_covar, data.weights, prior)
        cache = isinstance(data.x, Tensor) and data.x.nbytes <= _CACHED
        prepared = prepare(data.x, kind, n_components, sample_weight=data.weights, cache=cache)
        return GaussianEngine(prepared, reg_covar, prior)

    def _starts(self, data: Data, generator: torch.Generator) -> tuple[list[GaussianParameters], int]:
        """Return the starts, float64, and the number of singular ones; raise the last error if all were singular."""
        x, kind = data.sampled, self._start_type
        weights, means, precisions = (
            None if (value := getattr(self, name)) is None else numbers(name, value).to(x.device)
            for name in ("weights_init", "means_init", "precisions_init")
        )
        shape = int(self.n_components), x.shape[1]
        factor = check_init_parameters(weights, means, precisions, shape, kind)
        if weights is not None and means is not None and factor is not None:
            only = GaussianParameters(
                log_weights=weights.log(), means=means, precisions_cholesky=factor, covariance_type=kind
            )
            return [only], 0
        starts: list[GaussianParameters] = []
        error = None
        for make in self._makers(data, means, generator):
            try:
                found = make()
            except ValueError as singular:
                error = singular
                continue
            changed = dataclasses.replace(
                found,
                log_weights=found.log_weights if weights is None else weights.log(),
                precisions_cholesky=found.precisions_cholesky if factor is None else factor,
            )
            starts.append(changed)
        if error is not None and not starts:
            raise error
        return starts, int(self.n_init) - len(starts)

    def _makers(
        self, data: Data, means: Tensor | None, generator: torch.Generator
    ) -> list[Callable[[], GaussianParameters]]:
        """Return functions that make the starts: one M-step from the responsibilities that `init_params` names.

        A sample belongs to its nearest mean, for all `init_params` if the user gives the means, so that covariances fit
        the given means. A component with too few samples for its own covariance gets the covariance of all samples
        about their means. With a variance of `reg_covar` alone the component would stay at one sample.
        """
        x, weights, k, n_starts = data.sampled, data.sampled_weights, int(self.n_components), int(self.n_init)
        options: dict[str, Any] = {"covariance_type": self._start_type, "reg_covar": float(self.reg_covar)}
        init, seeded = cast(Init, self.init_params), means is None and self.init_params != "random"
        if bool(x.isnan().any()):
            if seeded:
                options |= {"sample_weight": weights, "init": init, "generator": generator}
                return [partial(start_missing, x, k, **options)] * n_starts
            x = torch.where(x.isnan(), x.nanmean(0), x)
        if means is not None:
            return [partial(start_at, x, weights, means, keep=True, **options)] * n_starts
        if seeded:
            found = choose_means(x, weights, k, n_starts, init, generator)
            return [partial(start_at, x, weights, one, keep=init != "kmeans", **options) for one in found]
        return [partial(start_at_random, x, weights, k, generator, **options)] * n_starts

    def _climb(self, engine: Engine, starts: list[GaussianParameters], progress: Progress) -> tuple[list[Fit], int]:
        """Return the fits from all starts or from the best ones, and the number of fits that became singular."""
        options = ClimbOptions(
            accelerate=self.accelerate,
            tol=float(self.tol),
            max_iter=int(self.max_iter),
            callback=progress.listener,
        )
        points, name = [(start, 0) for start in starts], "Start"
        together = self.accelerate == "none" or self.n_init_keep is not None
        if together and isinstance(engine, GaussianEngine) and engine.prior is None and len(starts) > 1:
            progress.begin(f"{len(starts)} starts together")
            points = engine.heats(starts, int(self.n_init_keep or 1), options)
            name = "Finalist"
        fits, errors = climb_each(engine, points, options, progress, name)
        if not fits:
            raise errors[-1]
        if isinstance(engine, Climber):
            fits = [dataclasses.replace(found, parameters=found.parameters.to_gaussian()) for found in fits]
        return fits, len(errors)

    def _last(self, x: Tensor) -> GaussianParameters:
        """Return the parameters of the last fit, for a warm start."""
        last = self._parameters().to(x.device)
        if getattr(self, "_fitted_as", self.covariance_type) != self.covariance_type:
            raise ValueError(
                f"`warm_start` should go on with the last fit's covariance_type={self._fitted_as!r}. "
                f"Found {self.covariance_type!r}."
            )
        if (last.n_components, last.n_features) != (self.n_components, x.shape[1]):
            raise ValueError(
                f"`warm_start` should go on with the last fit's n_components={last.n_components} and "
                f"{last.n_features} features. Found {self.n_components} and {x.shape[1]}."
            )
        return last.as_type(self._start_type)

    def _best(self, fits: list[Fit], dtype: torch.dtype) -> Fit:
        """Return the fit of highest likelihood without a degenerate component, if there is one."""
        if len(fits) == 1:
            return fits[0]
        sound = [not collapsed_components(found.parameters, float(self.reg_covar)) for found in fits]
        return ranked(fits, dtype, sound=sound, count=1)[0]

    def _set(self, found: Fit, form: Form) -> None:
        """Set the attributes."""
        collapsed = collapsed_components(found.parameters, float(self.reg_covar))
        parameters = found.parameters.as_type(self._kept_type)
        attributes = form.keep(
            weights_=parameters.weights,
            means_=parameters.means,
            covariances_=parameters.covariances,
            precisions_=parameters.precisions,
            precisions_cholesky_=parameters.precisions_cholesky,
        )
        for name, value in attributes.items():
            setattr(self, name, value)
        self._fitted_as = self.covariance_type
        self.collapsed_ = np.array(collapsed, dtype=np.int64)
        self.converged_ = found.converged
        # A fit without any gain has still taken the step that tests for it.
        self.n_iter_ = max(found.n_iter, min(1, int(self.max_iter)))
        self.lower_bound_ = found.history[-1]
        self.history_ = np.array(found.history)
        self.lower_bounds_ = list(found.history[1:])

    def _warn(self, n_failures: int) -> None:
        """Warn of failed starts, degenerate components and missing convergence."""
        if not self.converged_ and self.max_iter > 0:
            warnings.warn(
                f"The fit did not converge in {self.max_iter} steps: more than `tol` may be left to gain, {self.tol} "
                "nats per sample; with acceleration it takes eight steps to know. Raise `max_iter` or `tol`, try other "
                "starts, or look for degenerate data.",
                ConvergenceWarning,
                stacklevel=4,
            )
        if len(self.collapsed_):
            warnings.warn(
                f"Component {', '.join(map(str, self.collapsed_))} collapsed: it has too few distinct samples for a "
                "covariance, and the likelihood says nothing about the fit. More starts (`n_init`), fewer components, "
                f"a more restricted `covariance_type`{', a `prior`' if self._is_type else ''} or a larger `reg_covar` "
                "help.",
                CollapseWarning,
                stacklevel=4,
            )
        if n_failures:
            warnings.warn(
                f"{n_failures} of {self.n_init} starts ended in a singular covariance, and do not count.",
                CollapseWarning,
                stacklevel=4,
            )
