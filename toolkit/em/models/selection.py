r"""Chooses the number of components and the covariance model of a Gaussian mixture, by BIC, AIC or ICL.

All criteria are to be minimised, as in scikit-learn; mclust's BIC and ICL are minus these. With p free parameters,
N samples and the log-likelihood :math:`\ell` in nats per sample:

=====  ==============================================================================
AIC    :math:`-2 N \ell + 2 p`
BIC    :math:`-2 N \ell + p \log N`
ICL    BIC :math:`- 2 \sum_n \log \max_k r_{nk}`: overlapping components cost extra
=====  ==============================================================================

The likelihood of a Gaussian mixture has no maximum: it grows without bound as a component shrinks onto a few samples,
or onto values that were rounded alike. Such *degenerate components* (spikes) win any search by likelihood alone. Here a
fit whose covariance becomes singular, or far narrower than the others, is not chosen, and is marked in the table.

N samples, D features, K components.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from toolkit._checks import choice, function, instance, integer, number
from toolkit._data import rows_of
from toolkit.blocks import no_graph
from toolkit.em.covariance import CovarianceType, structure_of
from toolkit.em.covariance.models import COVARIANCE_MODELS, CovarianceModel, model_of, n_free_parameters
from toolkit.em.engine.acceleration import Accelerate, ClimbOptions
from toolkit.em.engine.ascent import lost_value
from toolkit.em.engine.restarts import NARROWEST
from toolkit.em.engine.starts import Init, start
from toolkit.em.gaussian import GaussianParameters
from toolkit.em.mixture import Mixture, check_mixture
from toolkit.em.models._agglomeration import Agglomeration
from toolkit.em.models.parsimonious import ParsimoniousParameters, check_samples
from toolkit.em.models.search import Cell, Search, search

__all__ = ["Candidate", "Criterion", "Selection", "aic", "bic", "icl", "select", "spikes"]

Criterion = Literal["bic", "aic", "icl"]
Verdict = Literal["sound", "spike", "singular"]


def aic(log_likelihood: float, n_parameters: int, n_samples: float) -> float:
    r"""Return Akaike's criterion :math:`-2 N \ell + 2 p`, to be minimised.

    Args:
        log_likelihood: Nats per sample.
        n_parameters: p, the number of free parameters.
        n_samples: N, or the sum of the weights.

    References:
        Akaike, "A new look at the statistical model identification", 1974, section V.

    Example:
        >>> aic(log_likelihood=-1.5, n_parameters=5, n_samples=100)
        310.0
    """
    log_likelihood, n_samples, n_parameters = _checked(log_likelihood, n_samples, n_parameters)
    return -2 * n_samples * log_likelihood + 2 * n_parameters


def bic(log_likelihood: float, n_parameters: int, n_samples: float) -> float:
    r"""Return the Bayesian information criterion :math:`-2 N \ell + p \log N`, to be minimised.

    Args:
        log_likelihood: Nats per sample.
        n_parameters: p, the number of free parameters.
        n_samples: N, or the sum of the weights.

    References:
        Schwarz, "Estimating the dimension of a model", 1978. The sign here is scikit-learn's; mclust's is the opposite.

    Example:
        >>> round(bic(-215.726 / 150, 26, 150), 4)
        561.7285
    """
    log_likelihood, n_samples, n_parameters = _checked(log_likelihood, n_samples, n_parameters)
    return -2 * n_samples * log_likelihood + n_parameters * math.log(n_samples)


def _checked(log_likelihood: float, n_samples: float, n_parameters: int) -> tuple[float, float, int]:
    return (
        number("log_likelihood", log_likelihood),
        number("n_samples", n_samples, above=0),
        integer("n_parameters", n_parameters, 0),
    )


def icl(mixture: Mixture, x: Tensor, n_parameters: int, *, sample_weight: Tensor | None = None) -> float:
    r"""Return the integrated completed likelihood, to be minimised: BIC with each sample in its likeliest component.

    ICL is BIC :math:`- 2 \sum_n \log \max_k r_{nk}`, at least BIC, and grows with the overlap of the components.

    Args:
        mixture: At the maximum of its likelihood.
        x: (N, D).
        n_parameters: p, the number of free parameters.
        sample_weight: (N,). None: all 1.

    References:
        Biernacki, Celeux & Govaert, "Assessing a mixture model for clustering with the integrated completed
        likelihood", 2000, equation 8.

    Example:
        >>> from toolkit.em import log_likelihood, m_step
        >>> x, r = torch.tensor([[0.0], [2.0], [5.0], [9.0]]), torch.eye(2).repeat_interleave(2, 0)
        >>> two = m_step(x, r, covariance_type="diag")
        >>> icl(two, x, n_parameters=5) > bic(log_likelihood(two, x).item(), 5, 4)
        True
    """
    check_mixture(mixture)
    log_joint = mixture.log_joint(x)
    weights = torch.ones_like(log_joint[:, 0]) if sample_weight is None else sample_weight.to(log_joint)
    completed = float(weights @ log_joint.amax(1))
    total = float(weights.sum())
    return bic(completed / total, n_parameters, total)


def spikes(parameters: ParsimoniousParameters, narrowest: float = NARROWEST) -> tuple[int, ...]:
    r"""Return the degenerate components: those far narrower in some direction than the average component.

    The variance in each direction is measured in units of the average covariance :math:`\sum_k \pi_k \Sigma_k`, so the
    answer is the same for any linear transformation of the data. Components that share shape and volume are not
    degenerate.

    Args:
        parameters: The mixture.
        narrowest: The least relative variance of a sound component. 1e-3 is a width of 3 %.

    Returns:
        Their indices, in order.

    References:
        McLachlan & Peel, "Finite mixture models", 2000, section 3.10.

    Example:
        >>> from toolkit.em import ParsimoniousParameters, covariances_from_scatter
        >>> two = ParsimoniousParameters(log_weights=torch.tensor([0.5, 0.5]).log(), means=torch.tensor([[0.], [3.]]),
        ...     structure=covariances_from_scatter("VII", torch.ones(2), torch.tensor([[1.0], [1e-4]])))
        >>> spikes(two)
        (1,)
    """
    instance("parameters", parameters, ParsimoniousParameters)
    narrowest = number("narrowest", narrowest, least=0)
    gaussian = parameters.to_gaussian().to(torch.float64)
    least = structure_of(gaussian.covariance_type).narrowest(gaussian.weights, gaussian.precisions_cholesky)
    return tuple((~(least >= narrowest)).nonzero().ravel().tolist())


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """The fit of one model with one number of components.

    Attributes:
        model: The covariance model.
        n_components: Number of components, K.
        n_parameters: Number of free parameters.
        verdict: ``"sound"``; ``"spike"``: the best fit has a degenerate component, and no start led to a sound fit;
            ``"singular"``: a covariance became singular from every start.
        log_likelihood: Nats per sample. NaN if singular.
        bic: To be minimised, as `aic` and `icl`. NaN if singular.
        aic: See `bic`.
        icl: See `bic`.
        converged: Whether the fit converged before `max_iter` steps.
        n_iter: Evaluations of the EM map.
        n_refused: Number of fits with a degenerate component or a singular covariance, of those iterated to the end.
        note: The problem, in words. Empty for a sound fit.
        parameters: The mixture. None if singular.
    """

    model: CovarianceModel
    n_components: int
    n_parameters: int
    verdict: Verdict
    log_likelihood: float = math.nan
    bic: float = math.nan
    aic: float = math.nan
    icl: float = math.nan
    converged: bool = False
    n_iter: int = 0
    n_refused: int = 0
    note: str = ""
    parameters: ParsimoniousParameters | None = None

    def to_dict(self) -> dict[str, str | int | float | bool | None]:
        """Return all fields but the mixture, in JSON types; None for NaN."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        del values["parameters"]
        return {
            name: None if isinstance(value, float) and math.isnan(value) else value for name, value in values.items()
        }


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The result of `select`; it prints as a table.

    Attributes:
        candidates: The candidates, by number of components, then by model.
        criterion: The criterion that `best` minimises.
        n_samples: N, or the sum of the weights.
    """

    candidates: tuple[Candidate, ...]
    criterion: Criterion
    n_samples: float

    @property
    def ranked(self) -> tuple[Candidate, ...]:
        """The sound candidates, best first."""
        sound = [candidate for candidate in self.candidates if candidate.verdict == "sound"]
        return tuple(sorted(sound, key=self._value))

    @property
    def best(self) -> Candidate:
        """The sound candidate that minimises the criterion.

        Raises:
            ValueError: If there is none.
        """
        ranked = self.ranked
        if not ranked:
            raise ValueError("A candidate should have a fit without singular or far too narrow components. Found none.")
        return ranked[0]

    @property
    def table(self) -> dict[tuple[CovarianceModel, int], float]:
        """The criterion of each (model, K), sound or not; NaN if singular."""
        return {(candidate.model, candidate.n_components): self._value(candidate) for candidate in self.candidates}

    def to_dict(self) -> dict[str, object]:
        """Return the criterion, N and the candidates without their mixtures, in JSON types."""
        return {
            "criterion": self.criterion,
            "n_samples": self.n_samples,
            "best": {"model": self.best.model, "n_components": self.best.n_components} if self.ranked else None,
            "candidates": [candidate.to_dict() for candidate in self.candidates],
        }

    def __str__(self) -> str:
        models = list(dict.fromkeys(candidate.model for candidate in self.candidates))
        cells = {(candidate.n_components, candidate.model): self._cell(candidate) for candidate in self.candidates}
        rows = list(dict.fromkeys(candidate.n_components for candidate in self.candidates))
        width = max(len(cell) for cell in cells.values()) + 1
        lines = [f"{self.criterion.upper()}, lower is better", "  K" + "".join(f"{model:>{width}}" for model in models)]
        lines += [f"{k:3}" + "".join(f"{cells[k, model]:>{width}}" for model in models) for k in rows]
        for candidate in self.ranked[:3]:
            lines.append(f"{candidate.model},{candidate.n_components}: {self._value(candidate):.2f}")
        verdicts = {candidate.verdict for candidate in self.candidates}
        if "spike" in verdicts:
            lines.append("*: a component is far narrower than the others, onto too few distinct samples: not chosen")
        if "singular" in verdicts:
            lines.append("-: a covariance became singular from every start")
        return "\n".join(lines)

    def _value(self, candidate: Candidate) -> float:
        value: float = getattr(candidate, self.criterion)
        return value

    def _cell(self, candidate: Candidate) -> str:
        if candidate.verdict == "singular":
            return "- "
        return f"{self._value(candidate):.2f}" + ("*" if candidate.verdict == "spike" else " ")


@no_graph()
def select(
    x: Tensor,
    n_components: Iterable[int] = range(1, 10),
    models: Sequence[CovarianceModel] | None = None,
    *,
    criterion: Criterion = "bic",
    n_init: int = 5,
    init: Sequence[Init] = ("k-means++", "kmeans"),
    narrowest: float = NARROWEST,
    sample_weight: Tensor | None = None,
    reg_covar: float = 0.0,
    tol: float = 1e-6,
    max_iter: int = 1000,
    accelerate: Accelerate = "anderson",
    generator: torch.Generator | None = None,
    callback: Callable[[Candidate], None] | None = None,
) -> Selection:
    """Fit every model with every number of components, and compare them.

    Starts are three partitions by Ward's method (of the features as they are, standardised, and whitened), and `n_init`
    random ones. Each is improved by ten EM steps, and the best three are iterated to the maximum. Each that ends with a
    degenerate component or a singular covariance is replaced by the next best. A fit is ended early, not converged,
    once a component is a hundred times narrower than `narrowest` allows. All models use the same starts.

    Args:
        x: (N, D), float32 or float64, finite.
        n_components: The numbers of components to try, each at most N.
        models: The covariance models to try. None: all fourteen; for a single feature only EII and VII (mclust's E and
            V), to which the others are then equal.
        criterion: ``"bic"``, ``"aic"`` or ``"icl"``.
        n_init: Number of random starts for each candidate, from 0.
        init: The ways to choose random starts, in turn (see `start`).
        narrowest: As in `spikes`. 0: only singular covariances are refused.
        sample_weight: (N,), not negative, not all 0: how often each sample counts. None: all 1.
        reg_covar: As in `fit_parsimonious`.
        tol: As in `climb`.
        max_iter: As in `climb`.
        accelerate: As in `climb`.
        generator: Randomness of the starts. None is torch's global generator.
        callback: Called with each finished candidate. Candidates for small data are fitted side by side, so that many
            finish at once.

    Returns:
        All candidates; `best` is the choice of the criterion.

    Raises:
        TypeError: If `x` is not a float32 or float64 tensor, `sample_weight` no tensor, `n_components` a single number,
            or `models` a single name.
        ValueError: If an argument is out of range.

    References:
        Fraley & Raftery, "Model-based clustering, discriminant analysis, and density estimation", 2002, section 2.4.
        Biernacki, Celeux & Govaert, "Choosing starting values for the EM algorithm for getting the highest likelihood
        in multivariate Gaussian mixture models", 2003, section 3.

    Example:
        >>> x = torch.tensor([[0.0], [1.0], [2.0], [20.0], [21.0], [22.0], [41.0], [40.0], [43.0]])
        >>> found = select(x, range(1, 4), generator=torch.Generator().manual_seed(0))
        >>> found.best.model, found.best.n_components
        ('EII', 3)
    """
    check_samples(x, sample_weight)
    if not isinstance(n_components, Iterable):
        raise TypeError(f"`n_components` should be several numbers, range(1, 10) say. Found {n_components!r}.")
    if isinstance(models, str):
        raise TypeError(f"`models` should be a sequence of names, ({models!r},) say. Found {models!r}.")
    numbers = sorted({integer("n_components", k, 1, len(x)) for k in n_components})
    if models is None:
        models = COVARIANCE_MODELS if x.shape[1] > 1 else ("EII", "VII")
    n_init, init = integer("n_init", n_init, 0), tuple(init)
    narrowest, reg_covar = number("narrowest", narrowest, least=0), number("reg_covar", reg_covar, least=0)
    options = ClimbOptions(
        accelerate=accelerate, tol=number("tol", tol, least=0), max_iter=integer("max_iter", max_iter, 0)
    )
    if not numbers:
        raise ValueError("`n_components` should be at least one number. Found none.")
    if not models:
        raise ValueError("`models` should name at least one model. Found none.")
    kinds = dict.fromkeys(model_of(model).start.name for model in models)
    choice("criterion", criterion, get_args(Criterion))
    if callback is not None:
        function("callback", callback, "a candidate")
    if not init or not set(init) <= set(get_args(Init)):
        raise ValueError(f"`init` should be a sequence of {', '.join(get_args(Init))}. Found {init!r}.")
    choice("accelerate", accelerate, get_args(Accelerate))
    trees = Agglomeration.of(x, generator) if max(numbers) > 1 else None

    def starts_of(k: int, kind: CovarianceType) -> list[GaussianParameters] | str:
        """Return the starts of all models of one kind, or the reason why there are none."""
        try:
            found = trees.starts(k, kind, reg_covar) if trees is not None and k > 1 else []
            for i in range(1 if k == 1 else n_init):
                way = init[i % len(init)]
                found.append(start(x, k, covariance_type=kind, init=way, reg_covar=reg_covar, generator=generator))
        except ValueError as error:
            return str(error)
        return found or "there are fewer distinct samples than components"

    starts = {(k, kind): starts_of(k, kind) for k in numbers for kind in kinds}
    cells, problems = [], {}
    for k, model in itertools.product(numbers, models):
        own = starts[k, model_of(model).start.name]
        if isinstance(own, str):
            problems[k, model] = own
        else:
            cells.append(Cell(model_of(model), k, own))
    searches = search(x, cells, options, reg_covar=reg_covar, sample_weight=sample_weight, narrowest=narrowest)
    candidates = []
    n_samples = float(len(x) if sample_weight is None else sample_weight.to(torch.float64).sum())
    for k, model in itertools.product(numbers, models):
        problem = problems.get((k, model))
        found = next(searches) if problem is None else Search(None, None, (problem,), 0)
        candidates.append(_candidate(x, sample_weight, n_samples, k, model, found, narrowest))
        if callback is not None:
            callback(candidates[-1])
    return Selection(candidates=tuple(candidates), criterion=criterion, n_samples=n_samples)


def _candidate(
    x: Tensor,
    sample_weight: Tensor | None,
    n_samples: float,
    n_components: int,
    model: CovarianceModel,
    found: Search,
    narrowest: float,
) -> Candidate:
    """Return the result of one model with one number of components."""
    n_parameters = n_free_parameters(model, n_components, x.shape[1])
    singular = Candidate(model=model, n_components=n_components, n_parameters=n_parameters, verdict="singular")
    fit = found.best or found.refused
    if fit is None:
        return dataclasses.replace(singular, n_refused=found.n_refused, note=found.failures[-1])
    mixture = fit.parameters
    if lost_value(fit, rows_of(x, sample_weight)) is not None:
        note = "the differences of samples are lost to rounding beside an outlier: remove it"
        return dataclasses.replace(singular, n_refused=found.n_refused, note=note)
    narrow = spikes(mixture, narrowest)
    return Candidate(
        model=model,
        n_components=n_components,
        n_parameters=n_parameters,
        verdict="spike" if narrow else "sound",
        log_likelihood=fit.log_likelihood,
        bic=bic(fit.log_likelihood, n_parameters, n_samples),
        aic=aic(fit.log_likelihood, n_parameters, n_samples),
        icl=icl(mixture, x.to(torch.float64), n_parameters, sample_weight=sample_weight),
        converged=fit.converged,
        n_iter=fit.n_iter,
        n_refused=found.n_refused,
        note=f"far narrower than the others: component {', '.join(map(str, narrow))}" if narrow else "",
        parameters=mixture.to(x.dtype),
    )
