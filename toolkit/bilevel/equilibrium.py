r"""Equilibrium models: layers whose output is a fixed point :math:`z^* = f(z^*)`, and three gradients for them.

With the Jacobian :math:`J = \partial f / \partial z` at the fixed point, the exact gradient with respect to a parameter
is :math:`(\partial f / \partial \theta)^\top (I - J^\top)^{-1} \bar z`. The block `FIXED_POINT` holds the found point
constant:

- `phantom` with one step replaces :math:`(I - J^\top)^{-1}` by I: Jacobian-free backpropagation. With K steps and
  damping :math:`\tau` it is :math:`\tau \sum_{j < K} ((1 - \tau) I + \tau J^\top)^j`. With the block open, the gradient
  is that of all iterations.
- `equilibrium` solves the linear equation. Its block is redundant, and saves the graph of all iterations.

N samples; ``*`` the shape of one sample.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from toolkit._checks import integer, number
from toolkit.bilevel.implicit import attached
from toolkit.bilevel.solvers import (
    FixedPointSolver,
    LinearSolver,
    Operator,
    Solved,
    fixed_point,
    lengths,
    warn_unless_converged,
)
from toolkit.blocks import block, stop_recording

__all__ = ["FIXED_POINT", "equilibrium", "phantom"]

FIXED_POINT = block(
    "bilevel.fixed_point",
    "The found equilibrium: the gradient is computed beside it, from a few steps or a linear equation, and the memory "
    "does not grow with the number of iterations.",
)


def phantom(
    function: Operator, start: Tensor, *, steps: int = 1, damping: float = 1.0, solver: FixedPointSolver = fixed_point
) -> Solved:
    r"""Return a fixed point of f after K attached steps :math:`z \leftarrow (1 - \tau) z + \tau f(z)`.

    With the block `FIXED_POINT` in place and K = 1, :math:`\tau = 1`, the gradient with respect to a parameter is
    :math:`(\partial f / \partial \theta)^\top \bar z`: one-step or Jacobian-free. With the block open it is that of all
    iterations, which is nearly exact.

    Args:
        function: f: (N, \*) to (N, \*); it may use any tensors with a gradient.
        start: The first iterate, (N, \*).
        steps: Number of attached steps, which have a graph, K.
        damping: :math:`\tau`, above 0 and at most 1.
        solver: Finds the fixed point: `fixed_point`, its arguments set with `functools.partial`.

    Returns:
        `value` is the point after the attached steps, with a gradient; the other fields describe the point before these
        steps.

    Raises:
        ValueError: If a number is out of range, or as `fixed_point`.

    Warns:
        ConvergenceWarning: If the solver did not converge for each sample.

    References:
        Fung et al., "JFB: Jacobian-free backpropagation for implicit networks", 2022. Geng, Zhang, Bai, Wang and Lin,
        "On training implicit models", 2021, for K steps.

    Example:
        >>> a = torch.tensor(0.5, requires_grad=True)
        >>> phantom(lambda z: a * z + 1, torch.full((1, 1), 2.0), steps=2).value.sum().backward()
        >>> a.grad  # 4 with the block open
        tensor(3.)
    """
    steps, damping = integer("steps", steps), number("damping", damping, above=0, most=1)
    found = _solved(function, start, solver)
    z = found.value
    for _ in range(steps):
        z = function(z) if damping == 1 else torch.lerp(z, function(z), damping)
    return replace(found, value=z)


def equilibrium(
    function: Callable[..., Tensor], start: Tensor, *args: Tensor, solver: FixedPointSolver = fixed_point
) -> Solved:
    r"""Return a fixed point of :math:`f(z, a_1, a_2, \ldots)` with its implicit gradient, of any order.

    The backward pass solves :math:`u = J^\top u + \bar z` with the same solver, for each sample, and needs the memory
    of one evaluation of f. Second and further derivatives are right as well. The block `FIXED_POINT` is redundant: it
    saves the graph of the iterations.

    Args:
        function: f, called as ``f(z, *args)``: (N, \*) to (N, \*). Every tensor with a gradient has to be among the
            arguments; `torch.func.functional_call` passes the parameters of a module.
        start: The first iterate, (N, \*).
        *args: Inputs and parameters.
        solver: Finds the fixed point, and solves the linear equation of the backward pass.

    Returns:
        `value` has the gradient.

    Raises:
        ValueError: As `fixed_point`, or if f uses a tensor with a gradient that is not among its arguments.

    Warns:
        ConvergenceWarning: If the solver did not converge for each sample, in the forward or in the backward pass.

    References:
        Bai, Kolter and Koltun, "Deep equilibrium models", 2019, theorem 1.

    Example:
        >>> a = torch.tensor(0.5, requires_grad=True)
        >>> equilibrium(lambda z, a: a * z + 1, torch.zeros(1, 1), a).value.sum().backward()
        >>> a.grad.round(decimals=4)
        tensor(4.)
    """
    found = _solved(lambda z: function(z, *args), start, solver)

    def residual(z: Tensor, *args: Tensor) -> Tensor:
        return z - function(z, *args)

    return replace(found, value=attached(residual, found.value, *args, solver=_for_adjoint(solver)))


def _solved(function: Operator, start: Tensor, solver: FixedPointSolver) -> Solved:
    with stop_recording(FIXED_POINT):
        found = solver(function, start)
    warn_unless_converged(found, "The search for a fixed point")
    return found


def _for_adjoint(solver: FixedPointSolver) -> LinearSolver:
    """Solve ``u - J^T u = b`` as a fixed point. Each sample is scaled, for tolerances are absolute where u is small."""

    def solve(operator: Operator, b: Tensor) -> Solved:
        scale = lengths(b.flatten(1)).view(-1, *[1] * (b.dim() - 1))
        unit = b / scale
        found = solver(lambda u: u - operator(u) + unit, unit)
        return replace(found, value=found.value * scale)

    return solve
