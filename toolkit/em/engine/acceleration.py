r"""Maximises a likelihood by EM steps, plain or extrapolated: SQUAREM and Anderson acceleration.

EM is a fixed-point iteration :math:`\theta \leftarrow G(\theta)` whose error shrinks at a linear rate: the largest
fraction of missing information, near 1 where components overlap. Both methods use the residuals
:math:`f = G(\theta) - \theta` of earlier points, and jump to the point where these predict a residual of 0. A jump is
taken only if the likelihood is not lower there; otherwise the EM step is taken, which is known already. So the
likelihood never falls, as in EM, wherever a jump leads.

N samples, D features, K components, P unconstrained coordinates, M points remembered.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, Protocol, TypeAlias, TypeVar, get_args

import numpy as np
import numpy.typing as npt
import torch
from scipy.linalg import lapack
from torch import Tensor

from toolkit._checks import choice, integer, number
from toolkit._data import all_weights
from toolkit.blocks import no_graph
from toolkit.em.engine.checks import check_callback, check_samples
from toolkit.em.engine.coordinates import Layout, flat
from toolkit.em.engine.rounding import ROUNDING, leaders
from toolkit.em.mixture import Family, check_mixture, e_step

__all__ = ["Accelerate", "Climb", "ClimbOptions", "climb", "maximise_likelihood"]

Accelerate = Literal["none", "squarem", "anderson", "auto"]

# The algebra of jumps has few numbers, for which NumPy's calls take less time than torch's.
_Vector: TypeAlias = npt.NDArray[np.float64]

P = TypeVar("P")
F = TypeVar("F", bound=Family)

# Points that Anderson's method remembers, and evaluations whose total gain must be at most `tol` for convergence.
# Half of them and a tenth of `tol` suffice as well: 330 fits took 3 % fewer evaluations; as many left more than `tol`.
MEMORY = 8

# After so few evaluations that gain no more than `tol` a fit may end at its beginning, if they shrink the residual to
# this share: slower problems hide directions in which much is left.
FEW = 2
FAST = 0.03

# A fall by no more nats per sample always ends a fit; after a larger one so many plain steps may lead higher again.
SHALLOW = 1e-9
VALLEY = 10000

# Singular values of Anderson's least squares below this share of the largest count as 0.
CUT = 1e-7


@dataclass(frozen=True)
class Climb(Generic[P]):
    """The result of a fit by `climb`.

    Attributes:
        parameters: The highest point found.
        log_likelihood: The log-likelihood at `parameters`, nats per sample.
        converged: Whether the fit ended because the remaining gain was too small.
        n_iter: Evaluations of the EM map after the one at the start. Jumps that were not taken are counted too.
        history: The log-likelihood at the start and at each point that was taken; it never falls.
    """

    parameters: P
    log_likelihood: float
    converged: bool
    n_iter: int
    history: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class ClimbOptions:
    """The options that a fit hands on to `climb`, where they are explained."""

    accelerate: Accelerate
    tol: float
    max_iter: int
    callback: Callable[[int, float], None] | None = None


def ranked(
    climbs: Sequence[Climb[P]], dtype: torch.dtype, *, sound: Sequence[bool] | None = None, count: int | None = None
) -> list[Climb[P]]:
    """Return the best fits, best first: sound ones before others, then by log-likelihood (see `leaders`).

    Args:
        climbs: The fits, in the order of their starts.
        dtype: Floating-point type of the data.
        sound: Whether each fit is free of degenerate components. None: all are sound.
        count: The most to return. None: all.
    """
    merits = zip(sound or [True] * len(climbs), (found.history[-1] for found in climbs), strict=True)
    return [climbs[place] for place in leaders(list(merits), dtype, len(climbs) if count is None else count)]


@no_graph()
def climb(
    em: Callable[[P], tuple[P, float]],
    start: P,
    *,
    pack: Callable[[P], Tensor],
    unpack: Callable[[Tensor], P],
    accelerate: Accelerate = "anderson",
    tol: float = 1e-6,
    max_iter: int = 1000,
    rounding: float = ROUNDING[torch.float64],
    error: Callable[[P], float] | None = None,
    callback: Callable[[int, float], None] | None = None,
) -> Climb[P]:
    r"""Maximise a likelihood by its EM map.

    Anderson's method is the fastest near a maximum, where the map is nearly linear; SQUAREM is more robust far from
    one. ``"anderson"`` falls back on SQUAREM for a while whenever a jump would lower the likelihood.

    **Convergence.** Without acceleration the fit ends when a step gains no more than `tol`; the remaining gain is then
    ``tol * rate / (1 - rate)``, often a thousand times `tol`. ``tol=0`` takes all `max_iter` steps. With acceleration
    the fit ends when the last eight evaluations together gained no more than `tol`, or nothing but rounding. It also
    ends when the last four gained no more than a tenth of `tol`. Among the first eight, two such evaluations suffice if
    a step moves by no more than the square root of rounding, or if EM itself is fast, as it is where components hardly
    overlap. If `max_iter` is less than eight, the bound is less in proportion; a single step is plain EM. A jump aims
    at the maximum, so its gain is nearly the whole remaining gain, and the rest is at most about `tol`, except on a
    plateau near a saddle.

    **Falls.** A step may lower the log-likelihood, because of `reg_covar`. A fall by no more than an eighth of `tol`
    ends the fit. After a larger one plain steps go on, until they lead higher than before, where the fit continues, or
    until eight of them change the value by no more than `tol`, or four by a tenth of it. The result is the highest
    point.

    **The last bit decides nothing.** Two log-likelihoods that differ by less than `rounding` count as equal, so that
    another processor, number of threads or order of the samples takes the same plain steps. Jumps multiply rounding
    errors: accelerated fits end at the same maximum, to `tol`, but not always after as many evaluations.

    Args:
        em: Takes parameters to those after one EM step, and the log-likelihood *before* it, nats per sample.
        start: Where to start.
        pack: Takes parameters to a flat float64 vector (P,) of coordinates in which every real value is valid.
        unpack: The inverse of `pack`. Redundant coordinates are allowed.
        accelerate: ``"none"``, ``"squarem"`` or ``"anderson"``. ``"auto"``: the method that suits the mixture, which
            is ``"anderson"`` here.
        tol: See above, nats per sample. 0: `max_iter` plain steps, or, accelerated, until rounding hides any gain.
        max_iter: The most evaluations of `em` after the one at the start. 0 returns the start.
        rounding: Difference of two log-likelihoods, in units of 1 nat and their size, below which they count as equal:
            more than its default if the log-likelihood is computed in float32.
        error: Takes parameters to the rounding error of their log-likelihood, nats per sample, where it may exceed
            `rounding`. A smaller fall does not count.
        callback: Called after each evaluation with the number of evaluations after the start, and the log-likelihood,
            which is lower than before for a jump that is not taken.

    Raises:
        ValueError: If an option is out of range, if the log-likelihood is not finite where EM leads, and whatever `em`
            raises there. Where a jump leads, a ValueError only means that it is not taken.

    References:
        Varadhan & Roland, "Simple and globally convergent methods for accelerating the convergence of any EM
        algorithm", 2008, section 3, scheme S3. Anderson, "Iterative procedures for nonlinear integral equations",
        1965, section 4. Henderson & Varadhan, "Damped Anderson acceleration with restarts and monotonicity control
        for accelerating EM and EM-like algorithms", 2019, section 3.

    Example:
        >>> slow = lambda x: (x - 0.01 * (x - 3.0), -float((x - 3.0) ** 2))
        >>> found = climb(slow, torch.zeros((), dtype=torch.float64), pack=lambda x: x[None], unpack=lambda v: v[0])
        >>> found.parameters, found.n_iter < 10
        (tensor(3.0000, dtype=torch.float64), True)
    """
    choice("accelerate", accelerate, get_args(Accelerate))
    tol, max_iter = number("tol", tol, least=0), integer("max_iter", max_iter, 0)
    rounding = number("rounding", rounding, least=0)
    check_callback(callback)

    nowhere = np.empty(0)  # plain steps need no coordinates

    def evaluate(parameters: P, position: _Vector) -> _Point[P]:
        image, value = em(parameters)
        if accelerate == "none":
            return _Point(parameters, nowhere, image, nowhere, nowhere, 0.0, value)
        return _Point.at(parameters, position, image, pack(image).cpu().numpy(), value)

    def tell(point: _Point[P]) -> None:
        if callback is not None:
            callback(n_iter, point.value)

    coordinates = pack(start) if accelerate != "none" else torch.empty(0)
    n_iter, here = 0, evaluate(start, coordinates.cpu().numpy())
    tell(here)
    _check_finite(here.value)
    method = _METHODS[accelerate]()
    history, gained = [here.value], [here.value]  # at each point moved to; after each evaluation
    recent = [here]  # the last points moved to
    stuck = 0  # how often neither the likelihood nor the residual moved
    converged = stepped = False
    there: _Point[P] | None = None

    def step() -> float:
        nonlocal there, n_iter
        assert there is not None
        n_iter += 1
        with contextlib.suppress(ValueError, torch.linalg.LinAlgError):  # type: ignore[attr-defined]
            there = evaluate(there.image, there.image_position)
            tell(there)
            return there.value
        return math.nan

    while not converged and n_iter < max_iter:
        there, noise = None, rounding * (1 + abs(here.value))
        target = method.jump(here, stepped)
        if target is not None:
            n_iter += 1
            with contextlib.suppress(ValueError, torch.linalg.LinAlgError):  # type: ignore[attr-defined]
                there = evaluate(unpack(torch.from_numpy(target).to(coordinates)), target)
            if there is not None:
                tell(there)
                there = there if _is_taken(there, here, noise) else None
            method.judge(there is not None)
            if there is None:
                gained.append(history[-1])
        stepped = there is None
        if there is None:
            if n_iter == max_iter:
                break
            n_iter += 1
            there = evaluate(here.image, here.image_position)
            tell(there)
            _check_finite(there.value)
            fall = history[-1] - there.value
            if fall > noise and (error is None or fall > error(there.parameters)):
                reached, least = n_iter - 1, max(tol, noise)
                shallow = fall <= max(tol / MEMORY, SHALLOW)
                if shallow or not across(step, there.value, history[-1] + least, least, max_iter - n_iter):
                    converged = shallow or n_iter < max_iter
                    n_iter = reached if accelerate == "none" else n_iter
                    break
                gained += [history[-1]] * (n_iter - 1 - reached)
                method, recent = _METHODS[accelerate](), []
        history.append(max(there.value, history[-1]))  # equal to rounding counts as not lower
        gained.append(history[-1])
        recent = [*recent[-FEW:], there]
        converged = _has_converged(accelerate, tol, noise, gained, recent)
        if target is not None and there.value - here.value <= noise:
            stuck += there.size >= 0.5 * here.size
            converged = converged or stuck == 2
        here = there
    if accelerate != "none" and 0 < n_iter < MEMORY:  # as a fit that is continued step by step; one step is plain EM
        share = max(tol if max_iter == 1 else tol * n_iter / MEMORY, rounding * (1 + abs(here.value)))
        converged = converged or history[-1] - history[0] <= share
    return Climb(here.parameters, history[-1], converged, n_iter, tuple(history))


def climb_family(
    em: Callable[[F], tuple[F, float]],
    start: F,
    options: ClimbOptions,
    *,
    rounding: float = ROUNDING[torch.float64],
    error: Callable[[F], float] | None = None,
    check: Callable[[F], None] | None = None,
) -> Climb[F]:
    """Maximise a likelihood in the free coordinates of a mixture.

    Args:
        em: As in `climb`.
        start: Where to start.
        options: As in `climb`.
        rounding: As in `climb`.
        error: As in `climb`.
        check: Raises a ValueError for parameters that no jump may lead to. None: all finite coordinates are allowed.
    """
    leaves = start.unconstrained()
    layout = Layout(leaves)

    def unpack(position: Tensor) -> F:
        # A weight may be 0.
        if not bool((position.isfinite() | position.isneginf()).all()):
            raise ValueError("A jump should lead to finite coordinates.")
        parts = layout.leaves(position)
        there = start.with_unconstrained({name: parts[name].to(leaf) for name, leaf in leaves.items()})
        if check is not None:
            check(there)
        return there

    return climb(
        em,
        start,
        pack=lambda mixture: flat(mixture.unconstrained()),
        unpack=unpack,
        rounding=rounding,
        error=error,
        **vars(options),
    )


@no_graph()
def maximise_likelihood(
    start: F,
    x: Tensor,
    *,
    sample_weight: Tensor | None = None,
    accelerate: Accelerate = "anderson",
    tol: float = 1e-6,
    max_iter: int = 1000,
    batch_size: int | None = None,
    callback: Callable[[int, float], None] | None = None,
) -> Climb[F]:
    """Maximise the likelihood of any mixture that has an M-step: `climb` on its E-step and M-step.

    Args:
        start: The mixture to start from.
        x: (N, D), or another shape that the mixture takes; the first dimension counts the samples.
        sample_weight: (N,), not negative, not all 0. None: all 1.
        accelerate: As in `climb`.
        tol: As in `climb`.
        max_iter: As in `climb`.
        batch_size: The most samples of one E-step, to bound its memory; the result is the same to rounding. The
            responsibilities (N, K) are kept whole for the M-step. None: all samples.
        callback: As in `climb`.

    Returns:
        The fit result.

    Raises:
        TypeError: If `x` or `sample_weight` is no tensor.
        ValueError: If an argument is out of range, the likelihood is not finite at the start, or an EM step fails
            (a singular covariance, say).

    Example:
        >>> from toolkit.em import GaussianParameters
        >>> x = torch.tensor([[0.0], [1.0], [8.0], [9.0], [10.0]])
        >>> two = GaussianParameters.from_covariances(weights=torch.tensor([0.5, 0.5]), means=x[1:3],
        ...     covariances=torch.ones(2), covariance_type="spherical")
        >>> maximise_likelihood(two, x).parameters.means.T
        tensor([[0.5000, 9.0000]])
    """
    if batch_size is not None:
        batch_size = integer("batch_size", batch_size)
    options = ClimbOptions(accelerate=accelerate, tol=tol, max_iter=max_iter, callback=callback)
    return maximise_posterior(start, x, None, options, sample_weight=sample_weight, batch_size=batch_size)


def maximise_posterior(
    start: F,
    x: Tensor,
    log_prior: Callable[[F], Tensor] | None,
    options: ClimbOptions,
    *,
    sample_weight: Tensor | None,
    batch_size: int | None = None,
) -> Climb[F]:
    """Maximise the log-likelihood plus a log-prior over N, of any mixture whose M-step knows the prior.

    Args:
        start: As in `maximise_likelihood`.
        x: As in `maximise_likelihood`.
        log_prior: The log-density of the prior, nats. None: no prior.
        options: As in `climb`.
        sample_weight: As in `maximise_likelihood`.
        batch_size: As in `maximise_likelihood`.
    """
    check_mixture(start, "start")
    check_samples(x, sample_weight)
    # Weights in float64 make a float64 mean of float32 log-densities.
    weight = all_weights(x, sample_weight)
    total = weight.sum()
    shares = weight / total
    batches = list(zip(*(whole.split(batch_size or len(x)) for whole in (x, weight, shares)), strict=True))

    def em(mixture: F) -> tuple[F, float]:
        responsibilities, value = [], 0.0 if log_prior is None else float(log_prior(mixture) / total)
        for part, weights, share in batches:
            batch, mean = e_step(mixture, part, weights)
            responsibilities.append(batch if sample_weight is None else batch * weights.to(batch.dtype)[:, None])
            value += float(mean * share.sum()) if bool(share.any()) else 0.0
        return mixture.m_step(x, torch.cat(responsibilities)), value

    rounding = ROUNDING.get(x.dtype, ROUNDING[torch.float64])
    return climb_family(em, start, options, rounding=rounding, check=getattr(type(start), "check_jump", None))


@dataclass(frozen=True)
class _Point(Generic[P]):
    """A point, and the results of one evaluation of the EM map there; positions are coordinates."""

    parameters: P
    position: _Vector
    image: P
    image_position: _Vector
    residual: _Vector
    size: float
    value: float

    @classmethod
    def at(cls, parameters: P, position: _Vector, image: P, image_position: _Vector, value: float) -> _Point[P]:
        residual = _difference(image_position, position)
        return cls(parameters, position, image, image_position, residual, _norm(residual), value)


def _difference(after: _Vector, before: _Vector) -> _Vector:
    """Return `after` - `before`; 0 where the logarithm of a weight or a rate of exactly 0 is, or becomes, infinite."""
    with np.errstate(invalid="ignore"):
        difference = after - before
    finite = math.isfinite(difference @ difference)
    return difference if finite else np.nan_to_num(difference, nan=0.0, posinf=0.0, neginf=0.0)


def _norm(vector: _Vector) -> float:
    return math.sqrt(vector @ vector)


def _is_taken(there: _Point[P], here: _Point[P], rounding: float) -> bool:
    """Say whether a jump raised the value; where rounding decides, whether it came nearer to a fixed point."""
    gain = there.value - here.value
    return math.isfinite(there.value) and (gain > rounding or (gain >= -rounding and there.size < here.size))


def _has_converged(
    accelerate: Accelerate, tol: float, noise: float, gained: Sequence[float], recent: Sequence[_Point[P]]
) -> bool:
    """Say whether the last evaluations gained little (see `climb`), given the value after each, and the last points."""
    if accelerate == "none":
        return tol > 0 and gained[-1] - gained[-2] <= tol
    if _has_gained_little(gained, MEMORY, max(tol, noise)):
        return True
    if tol == 0:
        return False
    few = len(recent) > FEW and len(gained) <= MEMORY and gained[-1] - gained[-1 - FEW] <= tol
    fast = few and (recent[-1].size ** 2 <= noise or _is_fast(recent[0], recent[-1]))
    return fast or _has_gained_little(gained, MEMORY // 2, max(0.1 * tol, noise))


def _has_gained_little(gained: Sequence[float], count: int, most: float) -> bool:
    return len(gained) > count and gained[-1] - gained[-1 - count] <= most


def across(step: Callable[[], float], value: float, above: float, least: float, limit: int) -> bool:
    """Take plain steps from a point that lies lower than one before, and say whether they lead higher.

    They end at the first higher value, where the value settles as in `climb`, or where a step fails.

    Args:
        step: Takes a plain step, and returns the value at its end, NaN if it fails.
        value: The value before the first step.
        above: The value to exceed.
        least: The smallest change of the value in eight steps that counts as a change; a tenth of it in four.
        limit: The most steps.
    """
    values = [value]
    while len(values) <= limit:
        values.append(step())
        if not values[-1] <= above:
            return math.isfinite(values[-1])
        for count, most in ((MEMORY, least), (MEMORY // 2, 0.1 * least)):
            last = values[-1 - count :]
            if len(last) > count and max(last) - min(last) <= most:
                return False
    return False


def _is_fast(before: _Point[P], now: _Point[P]) -> bool:
    """Say whether EM converges fast here: each step removes more than half of the error, so that little is left.

    The residual is the error times the share of it that a step removes.
    """
    step, change = _difference(now.position, before.position), now.residual - before.residual
    return now.size <= FAST * before.size and _norm(change) >= 0.5 * _norm(step)


class _Method(Protocol):
    """A method of acceleration, which proposes one jump at each point that was taken."""

    def jump(self, here: _Point[P], stepped: bool) -> _Vector | None:
        """Return the point to jump to, or None for the image. `stepped`: the last move was to the image of a point."""

    def judge(self, taken: bool) -> None:
        """Learn whether the last jump was taken."""


class _Plain:
    def jump(self, here: _Point[P], stepped: bool) -> _Vector | None:
        return None

    def judge(self, taken: bool) -> None:
        pass


class _Squarem:
    """Alternates EM steps with jumps along a step and its change, of a length from their ratio (scheme S3).

    The published scheme stabilises by one more EM step after each jump. Here the test of each jump does that.
    """

    def __init__(self) -> None:
        self._before: tuple[_Vector, _Vector] | None = None
        self._length = 1.0
        self._bound = 4.0

    def jump(self, here: _Point[P], stepped: bool) -> _Vector | None:
        before, self._before = self._before, (here.position, here.residual)
        if not stepped or before is None:
            return None
        position, step = before
        change = here.residual - step
        size = _norm(change)
        self._length = min(_norm(step) / size, self._bound) if size > 0 else self._bound
        if self._length <= 1:  # EM itself is as fast
            return None
        return position + 2 * self._length * step + self._length**2 * change

    def judge(self, taken: bool) -> None:
        if self._length == self._bound:
            self._bound = 4 * self._bound if taken else max(4.0, self._bound / 4)


class _Anderson:
    """Jumps to the point whose residual, taken as linear between the last few points, is smallest (type II).

    The method finds any fixed point, a saddle as well. So it forgets all points when a jump does not raise the value,
    and leaves the next jumps, twice as many each time, to SQUAREM, which only goes forward.
    """

    def __init__(self) -> None:
        self._squarem = _Squarem()
        self._last: tuple[_Vector, _Vector] | None = None
        self._steps: list[_Vector] = []
        self._changes: list[_Vector] = []
        self._patience = 1
        self._left_to_squarem = 0
        self._by_squarem = False

    def jump(self, here: _Point[P], stepped: bool) -> _Vector | None:
        self._remember(here)
        other = self._squarem.jump(here, stepped)
        self._by_squarem = self._left_to_squarem > 0
        if self._by_squarem:
            return other
        if not self._steps:
            return None
        step = self._extrapolate(here.residual)
        if float(step @ here.residual) < 0:
            self._left_to_squarem = self._patience
            return None
        return here.position + step

    def judge(self, taken: bool) -> None:
        if self._by_squarem:
            self._left_to_squarem -= 1
            self._squarem.judge(taken)
        elif taken:
            self._patience = max(1, self._patience // 2)
        else:
            self._left_to_squarem = self._patience
            self._patience = min(MEMORY, 2 * self._patience)
            self._steps.clear()
            self._changes.clear()

    def _remember(self, here: _Point[P]) -> None:
        if self._last is not None:
            self._steps.append(_difference(here.position, self._last[0]))
            self._changes.append(here.residual - self._last[1])
            del self._steps[:-MEMORY], self._changes[:-MEMORY]
        self._last = here.position, here.residual

    def _extrapolate(self, residual: _Vector) -> _Vector:
        """Return the step to the point of least residual in the affine hull of the points remembered, and its image."""
        steps, changes = np.array(self._steps), np.array(self._changes)
        sizes = np.sqrt((changes * changes).sum(1))
        sizes[sizes == 0] = 1.0
        # In proportion, so that large old changes do not hide small new ones from the cut.
        units = (changes / sizes[:, None]).T
        # LAPACK's own function takes a third of the time of NumPy's; it wants room for a solution longer than the data.
        room = np.concatenate([residual, np.zeros(max(0, len(sizes) - len(residual)))])
        solution = lapack.dgelss(units, room, CUT)[1][: len(sizes)]
        steps += changes
        step: _Vector = residual - (solution / sizes) @ steps
        return step


_METHODS: dict[str, Callable[[], _Method]] = {
    "none": _Plain,
    "squarem": _Squarem,
    "anderson": _Anderson,
    "auto": _Anderson,
}


def _check_finite(value: float) -> None:
    if not math.isfinite(value):
        impossible = "a sample that no component explains, or " if value == -math.inf else ""
        raise ValueError(f"The log-likelihood should be finite. Found {value}: {impossible}too large values.")
