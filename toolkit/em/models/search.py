"""Searches for the best fits of parsimonious mixtures: short runs from many starts, then long runs from the best.

N samples, D features, K components.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from toolkit._checks import integer, number
from toolkit.blocks import no_graph
from toolkit.em.covariance.models import CovarianceModel, model_of
from toolkit.em.engine.acceleration import MEMORY, Accelerate, Climb, ClimbOptions, ranked
from toolkit.em.engine.rounding import leaders
from toolkit.em.engine.starts import Init, start
from toolkit.em.engine.together import Climbs, climb_together
from toolkit.em.models._fits import Cell, Fits, Pass, problem_of
from toolkit.em.models.parsimonious import Climber, ParsimoniousParameters, check_samples, problem_of_constants

__all__ = ["Cell", "Search", "fit_parsimonious", "search"]

_Floats: TypeAlias = npt.NDArray[np.float64]
_Ints: TypeAlias = npt.NDArray[np.int64]

# Starts are compared after this many EM steps, and the best are iterated to convergence; of starts with the same
# likelihood one is enough.
_SHORT_RUN = 10
_FOLLOWED = 3
_SAME = 1e-7

# A fit is given up once its narrowest variance is this part of the least of a sound fit. On data of R none came back.
_FAR_TOO_NARROW = 0.01

# The most samples times starts, and the most numbers that Anderson's method remembers, of fits that are iterated side
# by side. With more, arithmetic and memory dominate a step.
_SAMPLES = 2**19
_REMEMBERED = 2**24


@no_graph()
def fit_parsimonious(
    x: Tensor,
    n_components: int,
    model: CovarianceModel,
    *,
    sample_weight: Tensor | None = None,
    tol: float = 1e-6,
    max_iter: int = 1000,
    n_init: int = 1,
    init: Init | ParsimoniousParameters = "kmeans",
    reg_covar: float = 0.0,
    accelerate: Accelerate = "anderson",
    generator: torch.Generator | None = None,
) -> Climb[ParsimoniousParameters]:
    """Maximise the log-likelihood of one of the fourteen models by EM, accelerated by default.

    Each of several starts is improved by ten EM steps. The best three are iterated further; a run with a singular
    covariance is replaced by the next best start. The fit of the highest likelihood is returned.

    Args:
        x: (N, D), float32 or float64, finite. Arithmetic is in float64.
        n_components: Number of components, K; at most N.
        model: One of the fourteen `COVARIANCE_MODELS`, ``"VEV"`` for example.
        sample_weight: (N,), not negative, not all 0. None: all 1.
        tol: As in `climb`: nats per sample.
        max_iter: As in `climb`.
        n_init: Number of starts.
        init: How to start (see `start`), or the start itself.
        reg_covar: A prior: `reg_covar` times the count is added to the diagonal of each component's scatter. In the
            four models of scikit-learn this equals adding `reg_covar` to every variance; in the others it keeps the
            constraints. 0 is maximum likelihood.
        accelerate: As in `climb`.
        generator: Randomness of the starts. None is torch's global generator.

    Returns:
        The fit result, with the mixture in the data's floating-point type.

    Raises:
        TypeError: If `x` is not a float32 or float64 tensor, or `sample_weight` no tensor.
        ValueError: If an argument is out of range, or covariances become singular from every start.

    Example:
        >>> x = torch.tensor([[0.0, 1.0], [1.0, 0.0], [8.0, 9.0], [9.0, 8.0], [10.0, 10.0]])
        >>> two = fit_parsimonious(x, 2, "EII", generator=torch.Generator().manual_seed(0))
        >>> two.parameters.means.sort(0).values
        tensor([[0.5000, 0.5000],
                [9.0000, 9.0000]])
    """
    kind = model_of(model).start.name
    check_samples(x, sample_weight)
    n_components, n_init = integer("n_components", n_components), integer("n_init", n_init)
    tol, max_iter = number("tol", tol, least=0), integer("max_iter", max_iter, 0)
    reg_covar = number("reg_covar", reg_covar, least=0)
    options = ClimbOptions(accelerate=accelerate, tol=tol, max_iter=max_iter)
    if isinstance(init, ParsimoniousParameters):
        if (init.model, init.means.shape) != (model, (n_components, x.shape[-1])):
            raise ValueError(
                f"`init` should be of the model {model}, {n_components} components and {x.shape[-1]} features. "
                f"Found {init.model}, {init.n_components} and {init.n_features}."
            )
        climber = Climber(x, n_components, model, reg_covar, sample_weight)
        best = climber.climb(init.to(torch.float64), options)
    else:
        starts = [
            start(x, n_components, covariance_type=kind, init=init, reg_covar=reg_covar, generator=generator)
            for _ in range(n_init)
        ]
        cells = [Cell(model_of(model), n_components, starts)]
        (found,) = search(x, cells, options, reg_covar=reg_covar, sample_weight=sample_weight)
        if found.best is None and found.refused is None:
            raise ValueError(found.failures[-1])
        best = cast(Climb[ParsimoniousParameters], found.best or found.refused)
    return dataclasses.replace(best, parameters=best.parameters.to(x.dtype))


@dataclass(frozen=True)
class Search:
    """The results of several starts.

    Attributes:
        best: The highest fit that was not refused. None if there is none.
        refused: The highest fit that was refused.
        failures: The errors of starts from which covariances became singular.
        n_refused: Number of fits that were refused or failed.
    """

    best: Climb[ParsimoniousParameters] | None
    refused: Climb[ParsimoniousParameters] | None
    failures: tuple[str, ...]
    n_refused: int


def search(
    x: Tensor,
    cells: Sequence[Cell],
    options: ClimbOptions,
    *,
    reg_covar: float,
    sample_weight: Tensor | None,
    narrowest: float = 0.0,
) -> Iterator[Search]:
    """Fit each cell from its best starts after a short run; singular and refused fits make room for the next start.

    Args:
        x: (N, D).
        cells: The fits.
        options: As in `climb`.
        reg_covar: As in `fit_parsimonious`.
        sample_weight: (N,). None: all 1.
        narrowest: As in `spikes`: a fit with a narrower component is refused.

    Yields:
        The result of each cell, in order.
    """
    # In float32 the likelihood's rounding would end a fit where EM is slow.
    x = x.to(torch.float64)
    most = max((cell.n_components for cell in cells), default=1)
    passes = {
        structure: Pass(x, structure, most, sample_weight, reg_covar)
        for structure in dict.fromkeys(cell.model.structure.wide for cell in cells)
    }
    for group in _groups(cells, len(x), x.shape[1]):
        data = {cell.model: passes[cell.model.structure.wide].prepared for cell in group}
        problems = [problem_of_constants(data[cell.model], cell.model, reg_covar) for cell in group]
        sound = [cell for cell, problem in zip(group, problems, strict=True) if not problem]
        found = iter(_race(Fits(sound, passes, x), options, narrowest) if sound else ())
        yield from (Search(None, None, (problem,), 0) if problem else next(found) for problem in problems)


def _groups(cells: Sequence[Cell], n_samples: int, n_features: int) -> Iterator[list[Cell]]:
    """Yield the cells in parts that are iterated side by side."""
    group: list[Cell] = []
    samples = remembered = 0
    for cell in cells:
        size = cell.n_components * (1 + n_features + n_features * (n_features + 1) // 2)
        samples += len(cell.starts) * n_samples
        remembered += 2 * MEMORY * _FOLLOWED * size
        if group and (samples > _SAMPLES or remembered > _REMEMBERED):
            yield group
            group, samples, remembered = [], len(cell.starts) * n_samples, 2 * MEMORY * _FOLLOWED * size
        group.append(cell)
    if group:
        yield group


@dataclass
class _Lane:
    """The fits of one cell: indices of those that wait, best first, the number that go on, and the results."""

    waiting: list[int]
    failures: list[str]
    going: int = 0
    found: list[int] = field(default_factory=list)
    refused: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, rows: _Ints, short: Climbs, problems: Mapping[int, str]) -> _Lane:
        """Return the lane of these fits after their short runs."""
        alive = [fit for fit in rows.tolist() if not short.failed[fit]]
        order = leaders([(True, short.log_likelihood(fit)) for fit in alive], torch.float64, len(alive))
        waiting: list[int] = []
        for fit in (alive[place] for place in order):
            if not waiting or short.log_likelihood(waiting[-1]) - short.log_likelihood(fit) >= _SAME:
                waiting.append(fit)
        return cls(waiting, [problems.get(fit, problem_of(None)) for fit in rows.tolist() if short.failed[fit]])

    def next(self) -> list[int]:
        """Return the fits to begin now."""
        chosen = self.waiting[: _FOLLOWED - len(self.found) - self.going]
        del self.waiting[: len(chosen)]
        self.going += len(chosen)
        return chosen


class _Race:
    """A `Referee` that follows the best starts of each cell and replaces refused fits."""

    def __init__(self, fits: Fits, short: Climbs, narrowest: float) -> None:
        self._fits, self._narrowest = fits, narrowest
        self.lanes = [_Lane.of(rows, short, fits.problems) for rows in fits.rows]
        self._lane_of = {fit: lane for rows, lane in zip(fits.rows, self.lanes, strict=True) for fit in rows.tolist()}

    def finish(self, fits: _Ints, found: Climbs) -> _Ints:
        """Take note of the results, and return the next start of each cell with a refused fit."""
        least = np.full(len(fits), math.nan)
        ended = ~found.failed[fits]
        least[ended] = self._fits.narrowest(fits[ended], found.positions[fits[ended]])
        lanes = [self._lane_of[fit] for fit in fits.tolist()]
        for fit, lane, one in zip(fits.tolist(), lanes, least.tolist(), strict=True):
            lane.going -= 1
            if found.failed[fit]:
                lane.failures.append(self._fits.problems.get(fit, problem_of(None)))
            elif one >= self._narrowest:
                lane.found.append(fit)
            else:
                lane.refused.append(fit)
        return self.next(lanes)

    def next(self, lanes: Sequence[_Lane]) -> _Ints:
        """Return the fits of some lanes to begin now, sorted."""
        return np.array(sorted(fit for lane in lanes for fit in lane.next()), np.int64)

    def drops(self, fits: _Ints, positions: _Floats) -> npt.NDArray[np.bool_]:
        """Give up fits on the way to a degenerate component: Anderson's method may follow one for a thousand steps."""
        if self._narrowest == 0:
            return np.zeros(len(fits), bool)
        far: npt.NDArray[np.bool_] = self._fits.narrowest(fits, positions) < _FAR_TOO_NARROW * self._narrowest
        return far


@np.errstate(all="ignore")  # a fit that is not finite is marked, whatever a caller has NumPy do
def _race(fits: Fits, options: ClimbOptions, narrowest: float) -> list[Search]:
    """Fit the cells from the best of their starts."""
    limits = np.empty(len(fits.start), np.int64)
    for rows in fits.rows:
        limits[rows] = min(_SHORT_RUN, options.max_iter) if len(rows) > 1 else 0
    short = climb_together(fits.em, fits.start, accelerate="none", tol=options.tol, limits=limits)
    race = _Race(fits, short, narrowest)
    rest = climb_together(
        fits.em,
        short.positions,
        accelerate=options.accelerate,
        tol=options.tol,
        limits=options.max_iter - short.n_iter,
        allows=fits.allows if fits.reg_covar > 0 else None,
        first=race.next(race.lanes),
        referee=race,
    )

    def highest(chosen: Sequence[int]) -> Climb[ParsimoniousParameters] | None:
        if not chosen:
            return None
        climbs = [
            Climb(
                parameters=fit,
                log_likelihood=rest.log_likelihood(fit),
                converged=bool(rest.converged[fit]),
                n_iter=int(short.n_iter[fit] + rest.n_iter[fit]),
                history=(*short.histories[fit], *rest.histories[fit][1:]),
            )
            for fit in chosen
        ]
        best = ranked(climbs, torch.float64, count=1)[0]
        return Climb(
            fits.mixture(best.parameters, rest.positions[best.parameters]),
            best.log_likelihood,
            best.converged,
            best.n_iter,
            best.history,
        )

    return [
        Search(
            highest(sorted(lane.found)),
            highest(sorted(lane.refused)),
            tuple(lane.failures),
            len(lane.refused) + len(lane.failures),
        )
        for lane in race.lanes
    ]
