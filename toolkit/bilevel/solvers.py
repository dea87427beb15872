r"""Solvers for fixed points and linear equations that report whether they converged.

The solvers have no blocks: the functions that use them hold their results constant.

N samples; ``*`` the shape of one sample.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from toolkit._checks import integer, number
from toolkit._tensors import floating, tensors
from toolkit.blocks import constants

__all__ = [
    "ConvergenceWarning",
    "FixedPointSolver",
    "LinearSolver",
    "Operator",
    "Solved",
    "conjugate_gradient",
    "fixed_point",
    "lengths",
    "neumann_series",
    "warn_unless_converged",
]

Operator = Callable[[Tensor], Tensor]


class ConvergenceWarning(RuntimeWarning):
    """A solver stopped before it reached its tolerance: values and gradients are those of an unconverged iterate."""


@dataclass(frozen=True)
class Solved:
    r"""The result of a solver.

    Attributes:
        value: The best iterate found, (N, \*), or the shape of the right side of a linear equation.
        residual: Its error as the solver measures it: (N,), or a scalar.
        steps: Evaluations of the function until the best iterate: (N,), or a scalar.
        converged: Whether the error is within the tolerance: (N,), or a scalar.
    """

    value: Tensor
    residual: Tensor
    steps: Tensor
    converged: Tensor


FixedPointSolver = Callable[[Operator, Tensor], Solved]
LinearSolver = Callable[[Operator, Tensor], Solved]


def fixed_point(
    function: Operator, start: Tensor, *, memory: int = 5, tolerance: float | None = None, max_steps: int = 100
) -> Solved:
    r"""Find ``z = f(z)`` for each sample, by iteration with Anderson's acceleration.

    With the residuals :math:`g_k = f(z_k) - z_k`, the next iterate is

    .. math::
        z_{k+1} = f(z_k) - \sum_i \gamma_i \, (f(z_{i+1}) - f(z_i)), \qquad
        \gamma = \arg\min \Bigl| g_k - \sum_i \gamma_i \, (g_{i+1} - g_i) \Bigr|

    with sums over the last `memory` differences. Samples are solved independently; a sample that has converged, or
    whose residual is not finite, no longer changes. The iterate with the smallest residual is returned.

    Args:
        function: f: (N, \*) to (N, \*); the samples must not depend on each other.
        start: (N, \*), floating point.
        memory: Number of differences. 0: plain iteration ``z = f(z)``.
        tolerance: A sample has converged if ``|f(z) - z| <= tolerance * (1 + |z|)`` in the Euclidean norm. None: the
            roundoff of the dtype to the power 2/3, which is 3.7e-11 in float64 and 2.4e-5 in float32.
        max_steps: Number of evaluations of `function` after which the search ends.

    Raises:
        ValueError: If `start` has no dimension of samples and one more, `function` returns another shape or dtype, or a
            number is out of range.

    References:
        Walker and Ni, "Anderson acceleration for fixed-point iterations", 2011.

    Example:
        >>> found = fixed_point(torch.cos, torch.zeros(1, 1))
        >>> found.value, bool(found.converged)
        (tensor([[0.7391]]), True)
    """
    memory, max_steps = integer("memory", memory, 0), integer("max_steps", max_steps)
    if not isinstance(start, Tensor) or start.dim() < 2 or not start.is_floating_point():
        found = f"{start.dtype} {tuple(start.shape)}" if isinstance(start, Tensor) else type(start).__name__
        raise ValueError(
            f"`start` should be a floating-point tensor (N, ...) of at least two dimensions. Found {found}."
        )
    limit = _tolerance(tolerance, start)
    z, history = start.flatten(1), _History(memory)
    best, done = z, torch.zeros(len(z), dtype=torch.bool, device=z.device)
    least = torch.full((len(z),), torch.inf, dtype=z.dtype, device=z.device)
    steps = torch.zeros(len(z), dtype=torch.int64, device=z.device)
    for step in range(1, max_steps + 1):
        f = _checked("function", function(z.view_as(start)), start).flatten(1)
        residual = torch.linalg.vector_norm(constants(f - z), dim=1)
        better = residual < least  # false for NaN
        least, steps = torch.where(better, residual, least), torch.where(better, step, steps)
        done = done | (residual <= limit * _size(z)) | ~residual.isfinite()
        best = torch.where(better[:, None], z, best)
        if step == max_steps or bool(done.all()):
            break
        z = torch.where(done[:, None], z, history.accelerated(f, f - z))
    return Solved(best.view_as(start), least, steps, least <= limit * _size(best))


def _checked(name: str, value: Tensor, like: Tensor) -> Tensor:
    tensors(**{f"{name}(x)": value})
    if value.shape != like.shape or value.dtype != like.dtype:
        raise ValueError(
            f"`{name}` should return the shape and dtype of its input, {tuple(like.shape)} and {like.dtype}. "
            f"Found {tuple(value.shape)} and {value.dtype}."
        )
    return value


def _size(z: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(constants(z), dim=1)
    return 1 + norm


class _History:
    """The last iterates of Anderson's acceleration."""

    def __init__(self, memory: int) -> None:
        self._memory = memory
        self._values: list[Tensor] = []
        self._residuals: list[Tensor] = []

    def accelerated(self, f: Tensor, g: Tensor) -> Tensor:
        """Return the next iterate (N, D) after values f and residuals g."""
        self._values = [*self._values, f][-self._memory - 1 :]
        self._residuals = [*self._residuals, g][-self._memory - 1 :]
        if len(self._values) < 2:
            return f
        df, dg = (torch.stack(each, -1).diff(dim=-1) for each in (self._values, self._residuals))
        return f - (df @ _least_squares(dg, g)).squeeze(-1)


def _least_squares(columns: Tensor, target: Tensor) -> Tensor:
    """Return the minimiser (N, m, 1) of ``|columns @ x - target|``, with a ridge of some roundoffs.

    The columns are scaled to length 1, for they shrink from step to step; their scale does not change the result.
    """
    exact = torch.promote_types(columns.dtype, torch.float32)
    length = torch.linalg.vector_norm(constants(columns), dim=1, keepdim=True)
    scale = torch.where(length > 0, length, 1).to(exact)
    unit = columns.to(exact) / scale
    ridge = 100 * torch.finfo(exact).eps * torch.eye(unit.shape[-1], dtype=exact, device=unit.device)
    gram = unit.mT @ unit + ridge
    solution, _ = torch.linalg.solve_ex(gram, unit.mT @ target.to(exact)[..., None])
    result: Tensor = (solution / scale.mT).to(columns.dtype)
    return result


def conjugate_gradient(
    operator: Operator, b: Tensor, *, tolerance: float | None = None, max_steps: int | None = None
) -> Solved:
    r"""Solve ``A x = b`` for a symmetric, positive definite A, by conjugate gradients.

    The search ends, without convergence, at a direction p with :math:`p^\top A p \leq 0`: A is not positive definite.

    Args:
        operator: x to A x, both of the shape of `b`. All entries of `b` are one vector.
        b: Any shape.
        tolerance: The search has converged if ``|A x - b| <= tolerance * |b|``. None: as in `fixed_point`.
        max_steps: Number of products with A after which the search ends. None: the number of entries of `b`, enough in
            exact arithmetic, and ten more.

    Raises:
        ValueError: If a number is out of range, or `operator` returns another shape or dtype.

    References:
        Hestenes and Stiefel, "Methods of conjugate gradients for solving linear systems", 1952.

    Example:
        >>> diagonal = torch.tensor([1.0, 4.0])
        >>> conjugate_gradient(lambda x: diagonal * x, torch.tensor([1.0, 1.0])).value
        tensor([1.0000, 0.2500])
    """
    floating(b=b)
    max_steps = b.numel() + 10 if max_steps is None else integer("max_steps", max_steps)
    limit = _tolerance(tolerance, b)
    scale = lengths(b.reshape(1, -1)).squeeze(0)
    b = b / scale
    x, r, p = torch.zeros_like(b), b, b
    square, steps = _inner(r, r), 0
    while steps < max_steps and bool(square.sqrt() > limit):
        product = _checked("operator", operator(p), b)
        steps, curvature = steps + 1, _inner(p, product)
        if not bool(curvature > 0):
            break
        x, r = x + square / curvature * p, r - square / curvature * product
        square, last = _inner(r, r), square
        p = r + square / last * p
    residual = square.sqrt()
    return Solved(scale * x, scale * residual, torch.tensor(steps, device=b.device), residual <= limit)


def lengths(vectors: Tensor) -> Tensor:
    """Return the norms (N,) of vectors (N, D), 1 of zeros; squares of entries far from 1 would be 0 or infinite."""
    peaks = torch.cat([vectors.abs(), vectors.new_zeros(len(vectors), 1)], 1).amax(1)
    peaks = torch.where((peaks > 0) & peaks.isfinite(), peaks, 1)
    norms = torch.linalg.vector_norm(vectors / peaks[:, None], dim=1)
    return peaks * torch.where(norms > 0, norms, 1)


def _inner(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum()


def neumann_series(operator: Operator, b: Tensor, *, steps: int, step_size: float) -> Solved:
    r"""Return the first terms of a series for the inverse, :math:`\alpha \sum_{j < k} (I - \alpha A)^j b`.

    They converge to :math:`A^{-1} b` if all eigenvalues of :math:`I - \alpha A` are below 1 in absolute value. For a
    Hessian A, the k terms are the gradient through the last k steps of gradient descent with step size :math:`\alpha`,
    at a minimum: see `unroll`.

    Args:
        operator: x to A x, both of the shape of `b`.
        b: Any shape.
        steps: k, at least 1.
        step_size: :math:`\alpha`.

    Returns:
        `converged` is false only if the residual is larger than that of 0, `b` itself: then the series diverges. A
        truncated sum counts as converged, because it is the result asked for.

    Raises:
        ValueError: If a number is out of range, or `operator` returns another shape or dtype.

    References:
        Lorraine, Vicol and Duvenaud, "Optimizing millions of hyperparameters by implicit differentiation", 2020.

    Example:
        >>> [neumann_series(lambda x: 0.5 * x, torch.ones(1), steps=k, step_size=1.0).value.item() for k in (1, 2, 3)]
        [1.0, 1.5, 1.75]
    """
    floating(b=b)
    steps, step_size = integer("steps", steps), number("step_size", step_size, above=0)
    x = step_size * b
    for _ in range(steps - 1):
        x = x - step_size * (_checked("operator", operator(x), b) - b)
    residual = torch.linalg.vector_norm(constants(operator(x) - b))
    return Solved(x, residual, torch.tensor(steps, device=b.device), residual <= torch.linalg.vector_norm(constants(b)))


def warn_unless_converged(solved: Solved, search: str) -> None:
    """Warn if the solver did not converge for every sample."""
    if bool(solved.converged.all()):
        return
    count, total = int((~solved.converged).sum()), solved.converged.numel()
    which = f" for {count} of {total} samples" if solved.converged.dim() else ""
    largest, steps = float(solved.residual.max()), int(solved.steps.max())
    text = f"{search} did not converge{which}: the largest residual is {largest:.3g}, after {steps} steps."
    warnings.warn(text, ConvergenceWarning, stacklevel=3)


def _tolerance(tolerance: float | None, like: Tensor) -> float:
    if tolerance is None:
        return float(torch.finfo(like.dtype).eps ** (2 / 3))
    return number("tolerance", tolerance, least=0)
