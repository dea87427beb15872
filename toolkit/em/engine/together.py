r"""Many fits side by side, for data so small that the overhead of calls dominates a step of one fit.

`climb_together` is `toolkit.em.engine.acceleration.climb` for rows of coordinates: the same jumps, the same tests of
jumps, and the same stopping rules. One call of the EM map evaluates one point of every fit. A row leaves when its fit
ends.

B fits, P coordinates, M points remembered.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, get_args

import numpy as np
import numpy.typing as npt
import torch

from toolkit._checks import choice
from toolkit.em.engine.acceleration import CUT, FAST, FEW, MEMORY, SHALLOW, Accelerate, across
from toolkit.em.engine.rounding import ROUNDING

__all__ = ["Climbs", "EmOfRows", "Referee", "climb_together"]

_Floats: TypeAlias = npt.NDArray[np.float64]
_Ints: TypeAlias = npt.NDArray[np.int64]
_Mask: TypeAlias = npt.NDArray[np.bool_]

# Takes the indices of some fits (b,) and a point of each (b, P) to the points after an EM step (b, P), NaN where it
# fails; the log-likelihoods before it (b,), nats per sample; and bounds of their rounding errors (b,).
EmOfRows: TypeAlias = Callable[[_Ints, _Floats], tuple[_Floats, _Floats, _Floats]]


class Referee(Protocol):
    """Ends fits early, and begins others."""

    def finish(self, fits: _Ints, found: Climbs) -> _Ints:
        """Take note of the results of fits (b,) that ended, and return those to begin, (c,)."""

    def drops(self, fits: _Ints, positions: _Floats) -> _Mask:
        """Say which fits (b,) at these points (b, P) to end without convergence."""


@dataclass(frozen=True)
class Climbs:
    """The results of B fits (see `toolkit.em.engine.acceleration.Climb`).

    Attributes:
        positions: (B, P): the highest points found.
        converged: (B,).
        failed: (B,): whether an EM step of the fit failed. The other values of such a row are meaningless.
        n_iter: (B,).
        histories: The log-likelihood at the start of each fit and at each point that was taken; NaN for a fit that
            never began.
    """

    positions: _Floats
    converged: _Mask
    failed: _Mask
    n_iter: _Ints
    histories: list[list[float]]

    def log_likelihood(self, fit: int) -> float:
        """Return the log-likelihood of one fit at its highest point, nats per sample."""
        return self.histories[fit][-1]


class _Rows:
    """The state of the fits that go on: arrays whose first dimension is (b,)."""

    def __init__(
        self, ids: _Ints, position: _Floats, image: _Floats, value: _Floats, limit: _Ints, memory: int
    ) -> None:
        n, p = position.shape
        self.ids, self.limit = ids, limit
        self.n_iter = np.zeros(n, np.int64)
        self.position, self.image, self.value = position, image, value
        self.residual = image - position
        self.size = _norms(self.residual)
        self.last = value  # the highest value
        self.gained = np.concatenate([np.full((n, MEMORY), np.nan), value[:, None]], 1)  # `last`, tick by tick
        self.before = np.full((n, 2, p), np.nan)  # position and residual of the point before
        self.stuck = np.zeros(n, np.int64)  # how often neither the value nor the residual moved
        self.stepped = np.zeros(n, bool)  # whether the last move was to the image of a point
        self.refused = np.zeros(n, bool)  # whether a jump from here was not taken
        # Of the jumps:
        self.known = np.zeros(n, bool)  # whether there is a point of the last proposal
        self.proposer = np.zeros((n, 2, p))  # position and residual of that point
        self.steps, self.changes = np.zeros((n, memory, p)), np.zeros((n, memory, p))
        self.count = np.zeros(n, np.int64)
        self.patience, self.left = np.ones(n, np.int64), np.zeros(n, np.int64)
        self.by_squarem = np.zeros(n, bool)
        self.length, self.bound = np.ones(n), np.full(n, 4.0)

    def begin(self, row: int, n_steps: int) -> None:
        """Forget the jumps of one row, whose last `n_steps` steps led no higher."""
        self.gained[row] = np.append(self.gained[row, n_steps:], np.repeat(self.last[row], min(n_steps, MEMORY + 1)))
        self.before[row], self.known[row], self.by_squarem[row] = np.nan, False, False
        self.steps[row], self.changes[row], self.count[row] = 0, 0, 0
        self.patience[row], self.left[row], self.length[row], self.bound[row] = 1, 0, 1.0, 4.0

    def keep(self, mask: _Mask) -> None:
        """Drop the other rows."""
        state: dict[str, npt.NDArray[Any]] = vars(self)
        state.update({name: values[mask] for name, values in state.items()})

    def join(self, others: _Rows) -> None:
        """Add other rows after these."""
        state: dict[str, npt.NDArray[Any]] = vars(self)
        state.update({name: np.concatenate([values, vars(others)[name]]) for name, values in state.items()})

    def forget(self, mask: _Mask) -> None:
        """Forget the points that Anderson's method remembers of some rows."""
        if mask.any():
            self.steps[mask] = self.changes[mask] = 0
            self.count[mask] = 0


class _Walk:
    """Plain steps of one fit, from the image (1, P) of a point."""

    def __init__(self, em: EmOfRows, fit: _Ints, image: _Floats) -> None:
        self.em, self.fit = em, fit
        self.position, self.image, self.value, self.n_steps = image, image, math.nan, 0

    def step(self) -> float:
        """Take a step, and return the log-likelihood at its end, NaN if the next step would fail."""
        self.position, self.n_steps = self.image, self.n_steps + 1
        self.image, value, _ = self.em(self.fit, self.position)
        self.value = float(value[0]) if _are_finite(self.image, value)[0] else math.nan
        return self.value


def climb_together(
    em: EmOfRows,
    start: _Floats,
    *,
    accelerate: Accelerate,
    tol: float,
    limits: _Ints,
    allows: Callable[[_Ints, _Floats], _Mask] | None = None,
    first: _Ints | None = None,
    referee: Referee | None = None,
    rounding: float = ROUNDING[torch.float64],
) -> Climbs:
    """Maximise the likelihoods of B fits.

    Args:
        em: The EM map.
        start: (B, P).
        accelerate: As in `climb`.
        tol: As in `climb`.
        limits: (B,): the most evaluations of each fit after the one at its start.
        allows: Takes the indices of some fits (b,) and a point of each (b, P) to the mask of points that a jump may
            lead to. None: all.
        first: The fits to begin at once. None: all.
        referee: Is told of fits that ended, and asked about the others every `MEMORY` evaluations. None: no fit is
            begun later or ended early.
        rounding: As in `climb`.
    """
    choice("accelerate", accelerate, get_args(Accelerate))
    n, plain = len(start), accelerate == "none"
    found = Climbs(
        positions=start.copy(),
        converged=np.zeros(n, bool),
        failed=np.zeros(n, bool),
        n_iter=np.zeros(n, np.int64),
        histories=[[math.nan] for _ in range(n)],
    )

    def begin(ids: _Ints) -> tuple[_Rows, _Ints]:
        """Return the state of fits (b,) at their starts, and the fits that end there, (c,)."""
        image, value, _ = em(ids, start[ids])
        found.failed[ids] = ~_are_finite(image, value)
        for fit, one in zip(ids.tolist(), value.tolist(), strict=True):
            found.histories[fit] = [one]
        begun = _Rows(ids, start[ids], image, value, limits[ids], 0 if accelerate in ("none", "squarem") else MEMORY)
        going = ~found.failed[ids] & (limits[ids] > 0)
        begun.keep(going)
        return begun, ids[~going]

    rows, ended_fits = begin(np.arange(n) if first is None else first)
    tick = 0
    while True:
        while referee is not None and len(ended_fits):
            more, ended_fits = referee.finish(ended_fits, found), ended_fits[:0]
            if len(more):
                begun, ended_fits = begin(more)
                rows.join(begun)
        if not len(rows.ids):
            break
        tick += 1
        jumping, target = _propose(rows, accelerate)
        proposed, rows.n_iter = jumping | rows.refused, rows.n_iter + 1
        image, value, error = em(rows.ids, target)
        finite, residual = _are_finite(image, value), image - target
        size, gain, noise = _norms(residual), value - rows.value, rounding * (1 + np.abs(rows.value))
        taken = jumping & finite & ((gain > noise) | ((gain >= -noise) & (size < rows.size)))
        if allows is not None and taken.any():
            taken[taken] = allows(rows.ids[taken], target[taken])
        _judge(rows, jumping, taken)
        lost, fall = ~jumping & ~finite, rows.last - value
        fell = ~jumping & finite & (fall > noise) & (fall > error)
        low = fell & (fall > max(tol / MEMORY, SHALLOW))
        if low.any():
            points = target, image, value
            for row in low.nonzero()[0].tolist():
                fell[row], low[row] = _cross(rows, row, em, points, least=max(tol, float(noise[row])), plain=plain)
            residual, gain = image - target, value - rows.value
            size = _norms(residual)
        moved = (taken | ~jumping) & ~lost & ~fell
        rows.n_iter -= fell & plain
        rows.last = np.where(moved, np.fmax(value, rows.last), rows.last)
        rows.gained = np.concatenate([rows.gained[:, 1:], rows.last[:, None]], 1)
        for fit, one in zip(rows.ids[moved].tolist(), rows.last[moved].tolist(), strict=True):
            found.histories[fit].append(one)
        still = moved & proposed & (gain <= noise) & (not plain)
        rows.stuck += still & (size >= 0.5 * rows.size)
        ended = _have_gained_little(rows, tol, noise, plain) | (still & (rows.stuck == 2))
        young = np.isnan(rows.gained[:, 0])
        if young.any() and tol > 0 and not plain:
            few = young & (rows.last - rows.gained[:, -1 - FEW] <= tol)
            ended |= few & ((size * size <= noise) | _are_fast(rows.before, target, residual, size))
            rows.before = np.where(moved[:, None, None], np.stack([rows.position, rows.residual], 1), rows.before)
        for name, after in (("position", target), ("image", image), ("residual", residual)):
            setattr(rows, name, np.where(moved[:, None], after, getattr(rows, name)))
        rows.size, rows.value = np.where(moved, size, rows.size), np.where(moved, value, rows.value)
        rows.stepped, rows.refused = np.where(moved, ~jumping, rows.stepped), jumping & ~taken
        converged = (fell & ~low) | (moved & ended)
        over = converged | fell | lost | (rows.n_iter >= rows.limit)
        if referee is not None and tick % MEMORY == 0 and not over.all():
            left = ~over
            over[left] = referee.drops(rows.ids[left], rows.position[left])
        ended_fits = rows.ids[over]
        if over.any():
            found.positions[ended_fits], found.n_iter[ended_fits] = rows.position[over], rows.n_iter[over]
            found.converged[ended_fits], found.failed[ended_fits] = converged[over], lost[over]
            rows.keep(~over)
    if not plain:  # as a fit that is continued step by step; one step is plain EM
        rise = np.array([history[-1] - history[0] for history in found.histories])
        noise = rounding * (1 + np.abs([history[-1] for history in found.histories]))
        share = np.where(limits == 1, tol, tol * found.n_iter / MEMORY)
        found.converged[:] |= (found.n_iter > 0) & (found.n_iter < MEMORY) & (rise <= np.maximum(share, noise))
    return found


def _cross(
    rows: _Rows, row: int, em: EmOfRows, points: tuple[_Floats, _Floats, _Floats], *, least: float, plain: bool
) -> tuple[bool, bool]:
    """Take plain steps of one fit whose value fell, and move its point, image and value to the first that is higher.

    Returns:
        Whether the fit stays where it was, and whether it does so because its steps are used up.
    """
    position, image, value = points
    walk, limit = _Walk(em, rows.ids[row : row + 1], image[row : row + 1]), int(rows.limit[row] - rows.n_iter[row])
    stays = not across(walk.step, float(value[row]), float(rows.last[row]) + least, least, limit)
    rows.n_iter[row] += 0 if stays and plain else walk.n_steps
    if not stays:
        position[row], image[row], value[row] = walk.position[0], walk.image[0], walk.value
        rows.begin(row, walk.n_steps)
    return stays, stays and walk.n_steps == limit


def _have_gained_little(rows: _Rows, tol: float, noise: _Floats, plain: bool) -> _Mask:
    """Say which fits converged, by the gains of the last evaluations; NaN where there were not so many."""
    gains = rows.last[:, None] - rows.gained
    ended: _Mask = gains[:, -2] <= (tol if tol > 0 else -np.inf) if plain else gains[:, 0] <= np.maximum(tol, noise)
    if tol > 0 and not plain:
        ended |= gains[:, -1 - MEMORY // 2] <= np.maximum(0.1 * tol, noise)
    return ended


def _are_fast(before: _Floats, position: _Floats, residual: _Floats, size: _Floats) -> _Mask:
    """Say where EM converges fast, from the point before the last and this one (see `climb`)."""
    step, change = _norms(position - before[:, 0]), _norms(residual - before[:, 1])
    fast: _Mask = (size <= FAST * _norms(before[:, 1])) & (change >= 0.5 * step)
    return fast


def _propose(rows: _Rows, accelerate: Accelerate) -> tuple[_Mask, _Floats]:
    """Return which fits jump (b,), and the next point of each (b, P): the image of its point where it does not jump."""
    fresh, target = ~rows.refused, rows.image.copy()
    jumping = np.zeros(len(fresh), bool)
    if accelerate == "none":
        return jumping, target
    step, change = rows.position - rows.proposer[:, 0], rows.residual - rows.proposer[:, 1]
    known = fresh & rows.known
    before, before_residual = rows.proposer[:, 0], rows.proposer[:, 1]
    # SQUAREM.
    stepped = known & rows.stepped
    sizes = _norms(change)
    length = np.divide(_norms(before_residual), sizes, out=np.full(len(sizes), np.inf), where=sizes > 0)
    rows.length = np.where(stepped, np.minimum(length, rows.bound), rows.length)
    rows.by_squarem = np.where(fresh, rows.left > 0 if accelerate in ("anderson", "auto") else True, rows.by_squarem)
    leaping = stepped & rows.by_squarem & (rows.length > 1)
    if leaping.any():
        long = rows.length[leaping, None]
        target[leaping] = before[leaping] + 2 * long * before_residual[leaping] + long**2 * change[leaping]
        jumping |= leaping
    rows.known |= fresh
    if accelerate in ("anderson", "auto"):
        which = known.nonzero()[0]
        place = rows.count[which] % MEMORY
        rows.steps[which, place], rows.changes[which, place] = step[which], change[which]
        rows.count[which] += 1
        trying = (fresh & ~rows.by_squarem & (rows.count > 0)).nonzero()[0]
        if len(trying):
            leap = _extrapolate(rows.steps[trying], rows.changes[trying], rows.residual[trying])
            ahead = np.einsum("bp,bp->b", leap, rows.residual[trying]) >= 0
            rows.left[trying[~ahead]] = rows.patience[trying[~ahead]]
            target[trying[ahead]] = rows.position[trying[ahead]] + leap[ahead]
            jumping[trying[ahead]] = True
    rows.proposer = np.where(fresh[:, None, None], np.stack([rows.position, rows.residual], 1), rows.proposer)
    return jumping, target


def _extrapolate(steps: _Floats, changes: _Floats, residual: _Floats) -> _Floats:
    """Return steps to the points of least residual in the affine hulls of the points remembered, and their images.

    By normal equations with a ridge in place of a cut: columns that are 0 get the weight 0.
    """
    sizes = np.sqrt(np.einsum("bmp,bmp->bm", changes, changes))
    sizes[sizes == 0] = 1.0
    units = changes / sizes[:, :, None]
    normal = units @ units.transpose(0, 2, 1) + CUT**2 * np.eye(MEMORY)
    weights = np.linalg.solve(normal, units @ residual[:, :, None])[:, :, 0] / sizes
    found: _Floats = residual - (weights[:, None] @ (steps + changes))[:, 0]
    return found


def _judge(rows: _Rows, jumping: _Mask, taken: _Mask) -> None:
    """Learn which jumps were taken."""
    squarem, own = jumping & rows.by_squarem, jumping & ~rows.by_squarem
    rows.left = np.maximum(rows.left - squarem, 0)
    longest = squarem & (rows.length == rows.bound)
    rows.bound = np.where(longest, np.where(taken, 4 * rows.bound, np.maximum(4.0, rows.bound / 4)), rows.bound)
    refused = own & ~taken
    rows.left = np.where(refused, rows.patience, rows.left)
    shorter = np.maximum(1, rows.patience // 2)
    patience = np.where(refused, np.minimum(MEMORY, 2 * rows.patience), rows.patience)
    rows.patience = np.where(own & taken, shorter, patience)
    rows.forget(refused)


def _are_finite(image: _Floats, value: _Floats) -> _Mask:
    finite: _Mask = np.isfinite(value) & np.isfinite(image).all(1)
    return finite


def _norms(vectors: _Floats) -> _Floats:
    """Return the norms of rows (b, P)."""
    norms: _Floats = np.sqrt(np.einsum("bp,bp->b", vectors, vectors))
    return norms
