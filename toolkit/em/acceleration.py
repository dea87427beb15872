r"""Climbs to a maximum of the likelihood by EM steps, plain or extrapolated: SQUAREM and Anderson acceleration.

EM is a fixed-point iteration :math:`\theta \leftarrow G(\theta)` whose error shrinks at a linear rate, the largest
fraction of missing information. Both methods look at residuals :math:`f = G(\theta) - \theta` of points they have been
at, and jump to where these predict it to vanish. A jump is taken only if the likelihood is not lower there; otherwise
the EM step is. So the likelihood never falls, as in EM, whatever a jump does.

N samples, K components, P coordinates without constraints.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Literal, Protocol, TypeVar, get_args

import torch
from torch import Tensor

from toolkit.blocks import no_graph
from toolkit.em.mixture import Family, e_step

__all__ = ["Accelerate", "Climb", "climb", "maximise_likelihood"]

Accelerate = Literal["none", "squarem", "anderson"]

P = TypeVar("P")
F = TypeVar("F", bound=Family)


@dataclass(frozen=True)
class Climb(Generic[P]):
    """Where a climb ended.

    Attributes:
        parameters: The highest point found.
        log_likelihood: There, nats per sample.
        converged: Whether nothing worth `tol` was left to gain.
        n_iter: Evaluations of the EM map after that at the start.
        history: The log-likelihood at the start and at each point moved to; it never falls.
    """

    parameters: P
    log_likelihood: float
    converged: bool
    n_iter: int
    history: tuple[float, ...]


@dataclass(frozen=True)
class _Point(Generic[P]):
    """A point, its coordinates, and what one evaluation of the EM map says about it."""

    parameters: P
    position: Tensor
    image: P
    residual: Tensor
    value: float


class _Method(Protocol):
    """What proposes jumps, and is told of every point that is moved to."""

    def jump(self, position: Tensor, residual: Tensor) -> Tensor | None:
        """Return where to go from the current point. None: to its image."""

    def judge(self, accepted: bool) -> None:
        """Learn whether the last jump was taken."""


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
    callback: Callable[[int, float], None] | None = None,
) -> Climb[P]:
    """Maximise a likelihood by an EM map."""
    _check_options(accelerate, tol, max_iter)
    n_iter = 0

    def evaluate(parameters: P, position: Tensor) -> _Point[P]:
        image, value = em(parameters)
        if callback is not None:
            callback(n_iter, value)
        return _Point(parameters, position, image, pack(image) - position, value)

    point = evaluate(start, pack(start))
    _check_finite(point.value)
    method: _Method | None = {"none": lambda: None, "squarem": _Squarem, "anderson": _Anderson}[accelerate]()
    history = [point.value]
    converged = False
    while not converged and n_iter < max_iter:
        here = point
        target = method.jump(here.position, here.residual) if method is not None else None
        candidate = None
        if method is not None and target is not None:
            n_iter += 1
            try:
                candidate = evaluate(unpack(target), target)
            except ValueError:
                candidate = None
            accepted = candidate is not None and candidate.value >= here.value - _ROUNDING * abs(here.value)
            method.judge(accepted)
            if not accepted:
                candidate = None
                if n_iter == max_iter:
                    break
        if candidate is None:
            n_iter += 1
            candidate = evaluate(here.image, here.position + here.residual)
            _check_finite(candidate.value)
            if candidate.value < here.value:
                n_iter -= method is None
                converged = True
                break
        gain = candidate.value - here.value
        history.append(max(candidate.value, here.value))
        point = candidate
        converged = gain <= tol
    return Climb(point.parameters, history[-1], converged, n_iter, tuple(history))


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
        x: (N, D), or what else the mixture takes; the first dimension counts the samples.
        sample_weight: (N,), not negative, not all 0. None: all 1.
        accelerate: As in `climb`.
        tol: As in `climb`.
        max_iter: As in `climb`.
        batch_size: The most samples of one E-step, to bound its memory; the result is the same to rounding. The
            responsibilities (N, K) are kept whole for the M-step. None: all samples.
        callback: As in `climb`.

    Returns:
        The mixture found, and how.

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
    _check_samples(x, sample_weight)
    if batch_size is not None:
        _check_integer("batch_size", batch_size, 1)
    leaves = start.unconstrained()
    sizes = [leaf.numel() for leaf in leaves.values()]
    weight = None if sample_weight is None else sample_weight.double()
    total = float(len(x)) if weight is None else float(weight.sum())

    def em(mixture: F) -> tuple[F, float]:
        responsibilities, value = [], 0.0
        for rows in torch.arange(len(x), device=x.device).split(batch_size or len(x)):
            part = x[int(rows[0]) : int(rows[-1]) + 1]
            weights = None if weight is None else weight[rows]
            share, mean = e_step(mixture, part, weights)
            count = float(len(part)) if weights is None else float(weights.sum())
            if weights is not None:
                share = share * weights[:, None].to(share.dtype)
            responsibilities.append(share)
            value += float(mean) * count / total if count > 0 else 0.0
        whole = responsibilities[0] if len(responsibilities) == 1 else torch.cat(responsibilities)
        return mixture.m_step(x, whole), value

    def pack(mixture: F) -> Tensor:
        return torch.cat([leaf.reshape(-1).double() for leaf in mixture.unconstrained().values()])

    def unpack(position: Tensor) -> F:
        parts = zip(leaves.items(), position.split(sizes), strict=True)
        return start.with_unconstrained({name: part.view(leaf.shape).to(leaf.dtype) for (name, leaf), part in parts})

    return climb(
        em, start, pack=pack, unpack=unpack, accelerate=accelerate, tol=tol, max_iter=max_iter, callback=callback
    )


def _check_integer(name: str, value: int, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(
            f"`{name}` should be {'a positive integer' if least else 'an integer from 0'}. Found {value!r}."
        )


def _check_options(accelerate: str, tol: float, max_iter: int) -> None:
    if accelerate not in get_args(Accelerate):
        raise ValueError(f"`accelerate` should be one of {', '.join(get_args(Accelerate))}. Found {accelerate!r}.")
    if not 0 <= tol < math.inf:
        raise ValueError(f"`tol` should be finite and not negative. Found {tol!r}.")
    _check_integer("max_iter", max_iter, 0)


def _check_samples(x: Tensor, sample_weight: Tensor | None) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"`x` should be a tensor. Found {type(x).__name__}.")
    if x.ndim == 0 or len(x) == 0:
        raise ValueError(f"`x` should hold at least one sample. Found shape {tuple(x.shape)}.")
    if sample_weight is None:
        return
    if not isinstance(sample_weight, Tensor):
        raise TypeError(f"`sample_weight` should be a tensor or None. Found {type(sample_weight).__name__}.")
    if sample_weight.shape != (len(x),):
        raise ValueError(f"`sample_weight` should have shape {(len(x),)}. Found {tuple(sample_weight.shape)}.")
    sound = bool((sample_weight.isfinite() & (sample_weight >= 0)).all())
    if not sound or not bool((sample_weight > 0).any()):
        raise ValueError(
            f"`sample_weight` should be finite, not negative and not all 0. Found a minimum of "
            f"{float(sample_weight.min())} and a sum of {float(sample_weight.sum())}."
        )


_ROUNDING = 1e-14


def _check_finite(value: float) -> None:
    if not math.isfinite(value):
        raise ValueError(f"The log-likelihood should be finite. Found {value}: the data are too large for their type.")


class _Squarem:
    def __init__(self) -> None:
        self.before: tuple[Tensor, Tensor] | None = None
        self.jumped = False

    def jump(self, position: Tensor, residual: Tensor) -> Tensor | None:
        if self.before is None:
            self.before = position, residual
            return None
        start, r = self.before
        self.before = None
        v = residual - r
        alpha = float(r.norm() / v.norm())
        if not math.isfinite(alpha) or alpha <= 1:
            return None
        return start + 2 * alpha * r + alpha**2 * v

    def judge(self, accepted: bool) -> None:
        pass


class _Anderson:
    """Type II: the point whose residual, linear between the points known, is smallest."""

    order = 8
    least = 1e-14

    def __init__(self) -> None:
        self.positions: Tensor | None = None
        self.last: tuple[Tensor, Tensor] | None = None
        self.steps: list[Tensor] = []
        self.changes: list[Tensor] = []
        self.ridge = self.least

    def jump(self, position: Tensor, residual: Tensor) -> Tensor | None:
        if self.last is not None:
            self.steps.append(position - self.last[0])
            self.changes.append(residual - self.last[1])
            del self.steps[: -self.order], self.changes[: -self.order]
        self.last = position, residual
        if not self.steps:
            return None
        changes, steps = torch.stack(self.changes, 1), torch.stack(self.steps, 1)
        sizes = changes.norm(dim=0)
        u, s, vh = torch.linalg.svd(changes / sizes, full_matrices=False)
        weights = (vh.mT @ (s / (s.square() + self.ridge * s[0] ** 2) * (u.mT @ residual))) / sizes
        target: Tensor = position + residual - (steps + changes) @ weights
        return target

    def judge(self, accepted: bool) -> None:
        if not accepted:
            self.ridge = min(1.0, self.ridge * 100)
        else:
            self.ridge = max(self.least, self.ridge / 10)
