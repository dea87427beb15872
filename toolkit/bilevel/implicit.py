r"""Gradients of minima and roots by the implicit function theorem, without the graph of the solver.

A solution w of :math:`F(w, \theta) = 0` moves with :math:`\theta` by

.. math::
    \frac{dw}{d\theta} = -\Bigl(\frac{\partial F}{\partial w}\Bigr)^{-1} \frac{\partial F}{\partial \theta}

for any solver that finds it. So the block `SOLUTION`, which holds the found solution constant, is redundant: opened,
the gradient through the solver is multiplied by :math:`I - (\partial F / \partial w)^{-1} \partial F / \partial w = 0`.
It saves the graph of the solver. The approximations of `toolkit.bilevel.equilibrium` and `toolkit.bilevel.unrolling`
are not redundant in this way.

D entries of a solution; ``*`` its shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch as functorch

from toolkit._slopes import scalar
from toolkit._tensors import floating, tensors, wide
from toolkit.bilevel.solvers import LinearSolver, Operator, conjugate_gradient, warn_unless_converged
from toolkit.blocks import block, carries_gradient, constants, no_graph, stop_gradient

__all__ = [
    "JACOBIAN",
    "SOLUTION",
    "attached",
    "implicit_minimum",
    "implicit_root",
    "newton_step",
    "slope_of",
]

SOLUTION = block(
    "bilevel.solution",
    "The solution of an inner problem, wherever the solver found it: the implicit step beside it has the whole "
    "derivative, so the graph of the solver is needed for nothing.",
)
JACOBIAN = block(
    "bilevel.jacobian",
    "The matrix of an implicit step: the residual is zero at the solution, so the derivative of the matrix is "
    "multiplied by zero; at an unfinished solution it adds a term of the size of the residual.",
)

Residual = Callable[..., Tensor]


def newton_step(residual: Operator, solution: Tensor) -> Tensor:
    r"""Return :math:`\bar w - J^{-1} F(\bar w)`, a Newton step from a solution that is held constant.

    F may use other tensors that carry a gradient. With the blocks in place the gradient with respect to these tensors
    is :math:`-J^{-1} \partial F / \partial \theta`, that of the implicit function theorem. The block `SOLUTION` is
    redundant with this J. Opening `JACOBIAN` adds :math:`J^{-1} (dJ) J^{-1} F`, which is zero at an exact solution
    only. For small problems: J is computed and solved as a dense matrix.

    Args:
        residual: F: (D,) to (D,).
        solution: (D,), close to a root of F.

    Returns:
        (D,), a better approximation of the root; a matrix of half precision is solved in float32.

    Raises:
        ValueError: If `solution` is not a vector, or `residual` returns another shape.

    References:
        Bolte, Pauwels and Vaiter, "One-step differentiation of iterative algorithms", 2023.

    Example:
        >>> a = torch.tensor([4.0], requires_grad=True)
        >>> newton_step(lambda w: w**2 - a, torch.tensor([2.0])).backward()
        >>> a.grad  # of the square root
        tensor([0.2500])
    """
    floating(solution=solution)
    if solution.dim() != 1:
        raise ValueError(f"`solution` should be a vector (D,). Found shape {tuple(solution.shape)}.")
    held = stop_gradient(solution, SOLUTION)
    jacobian = stop_gradient(torch.func.jacrev(residual)(held), JACOBIAN)
    error = residual(held)
    if error.shape != held.shape:
        shapes = f"{tuple(held.shape)}. Found {tuple(error.shape)}"
        raise ValueError(f"`residual` should return the shape of `solution`, {shapes}.")
    step: Tensor = torch.linalg.solve(wide(jacobian), wide(error))
    return held - step.to(held.dtype)


def implicit_root(residual: Residual, solution: Tensor, *args: Tensor, solver: LinearSolver) -> Tensor:
    r"""Return a root of :math:`F(w, a_1, a_2, \ldots)`, differentiable in the arguments a, to any order.

    The backward pass solves :math:`(\partial F / \partial w)^\top u = \bar w` without forming the matrix, and returns
    :math:`-(\partial F / \partial a)^\top u`. This pass is differentiated in the same way, so derivatives of every
    order are those of the theorem. Backward passes need the memory of one evaluation of F. Under `torch.func.vmap` and
    `jacrev` the solver runs once per batch entry.

    Args:
        residual: F, called as ``F(w, *args)``; returns the shape of w. Every tensor with a gradient has to be among the
            arguments.
        solution: w, found by any solver, (\*).
        *args: The tensors that w depends on.
        solver: Solves :math:`(\partial F / \partial w)^\top u = b`, called as ``solver(operator, b)``:
            `conjugate_gradient` if the Jacobian is symmetric and positive definite, `neumann_series`, or your own.

    Returns:
        The value of `solution`.

    Raises:
        ValueError: If `residual` uses a tensor with a gradient, or one that `torch.func.vmap` maps over, that is not
            among its arguments.
        NotImplementedError: In forward mode, and in a backward pass with ``is_grads_batched=True``.

    Warns:
        ConvergenceWarning: In a backward pass whose linear solver did not converge.

    References:
        Blondel et al., "Efficient and modular implicit differentiation", 2022.

    Example:
        >>> a = torch.tensor([4.0], requires_grad=True)
        >>> w = implicit_root(lambda w, a: w**2 - a, torch.tensor([2.0]), a, solver=conjugate_gradient)
        >>> torch.autograd.grad(w, a)
        (tensor([0.2500]),)
    """
    return attached(residual, stop_gradient(solution, SOLUTION), *args, solver=solver)


def implicit_minimum(
    loss: Residual, solution: Tensor, *args: Tensor, solver: LinearSolver = conjugate_gradient
) -> Tensor:
    r"""Return a minimum over w of :math:`L(w, a_1, a_2, \ldots)`, differentiable in the arguments a, to any order.

    `implicit_root` for the slope :math:`\partial L / \partial w`, whose Jacobian is the Hessian:

    .. math::
        \frac{dw}{da} = -\Bigl(\frac{\partial^2 L}{\partial w^2}\Bigr)^{-1} \frac{\partial^2 L}{\partial w\,\partial a}

    Args:
        loss: L, called as ``L(w, *args)``; returns a scalar. Every tensor with a gradient has to be an argument.
        solution: w, found by any solver, (\*).
        *args: The tensors that w depends on, for example hyperparameters.
        solver: Solves linear equations with the Hessian, called as ``solver(operator, b)``.

    Returns:
        The value of `solution`.

    Raises:
        ValueError: As `implicit_root`, or if `loss` does not return a scalar.

    Warns:
        ConvergenceWarning: As `implicit_root`; also if the Hessian is not positive definite.

    References:
        Lorraine, Vicol and Duvenaud, "Optimizing millions of hyperparameters by implicit differentiation", 2020.

    Example:
        >>> a = torch.tensor([3.0], requires_grad=True)
        >>> w = implicit_minimum(lambda w, a: ((w - a) ** 2 + w**2).sum(), torch.tensor([1.5]), a)
        >>> torch.autograd.grad(w, a)
        (tensor([0.5000]),)
    """
    return implicit_root(slope_of(loss), solution, *args, solver=solver)


def slope_of(loss: Callable[..., Tensor]) -> Callable[..., Any]:
    """Return `torch.func.grad` of a loss, which has to be a scalar."""
    return torch.func.grad(lambda *args: scalar(loss(*args)))


def attached(residual: Residual, solution: Tensor, *args: Tensor, solver: LinearSolver) -> Tensor:
    """Return `implicit_root` without its block, for a solution that is already held constant."""
    tensors(solution=solution)
    if not torch.is_grad_enabled():
        return solution
    found = residual(*map(_unmapped, constants((solution, *args))))
    if _is_mapped(found):
        raise ValueError(
            "`args` should have every tensor of the function that `torch.func.vmap` maps over. Found a result that "
            "depends on another one."
        )
    if carries_gradient(found):
        raise ValueError(
            "`args` should have every tensor with a gradient that the function uses. Found a result that depends on "
            "another one, whose gradient would be lost; `torch.func.functional_call` passes the parameters of a module."
        )
    return _implicit(residual, solver, solution, *args)


def _is_mapped(tensor: Tensor) -> bool:
    while functorch.is_functorch_wrapped_tensor(tensor):
        if functorch.is_batchedtensor(tensor):
            return True
        tensor = functorch.get_unwrapped(tensor)
    return False


def _unmapped(tensor: Tensor) -> Tensor:
    """Return the first entry of a tensor that `torch.func.vmap` maps over, any other tensor unchanged."""
    while functorch.is_functorch_wrapped_tensor(tensor):
        dim = functorch.maybe_get_bdim(tensor)
        tensor = functorch.get_unwrapped(tensor)
        if dim >= 0:
            tensor = tensor.select(dim, 0)
    return tensor


def _implicit(residual: Residual, solver: LinearSolver, solution: Tensor, *args: Tensor) -> Tensor:
    value: Tensor = _Implicit.apply(residual, solver, solution, *args)  # type: ignore[no-untyped-call]
    return value


class _Implicit(torch.autograd.Function):
    """The identity on a solution, with the gradient of the implicit function theorem by the arguments."""

    @staticmethod
    def forward(residual: Residual, solver: LinearSolver, solution: Tensor, *args: Tensor) -> Tensor:
        return solution.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.residual, ctx.solver, _, *args = inputs
        # The solution with its derivative, not the one that is held: a second derivative needs it.
        ctx.save_for_backward(output, *args)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        solution, *args = ctx.saved_tensors
        _, _, of_solution, *needed = ctx.needs_input_grad
        u = _adjoint(ctx.residual, ctx.solver, solution, args, cotangent)
        through = cotangent - _transposed(ctx.residual, solution, args)(u) if of_solution else None
        return None, None, through, *_by_arguments(ctx.residual, solution, args, needed, -u)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor:
        raise NotImplementedError("An implicit gradient has no forward mode: use `torch.func.jacrev` or `vjp`.")

    @staticmethod
    def vmap(info: Any, in_dims: Any, residual: Residual, solver: LinearSolver, *inputs: Tensor) -> tuple[Tensor, int]:
        return _one_by_one(info, in_dims[2:], lambda *inputs: _implicit(residual, solver, *inputs), inputs)


class _Adjoint(torch.autograd.Function):
    """The solution u of ``(dF/dw)^T u = b``, without a gradient; solvers look at values, so each b has its own turn."""

    @staticmethod
    def forward(residual: Residual, solver: LinearSolver, b: Tensor, solution: Tensor, *args: Tensor) -> Tensor:
        found = solver(_transposed(residual, solution, args), b)
        warn_unless_converged(found, "The linear solver of an implicit gradient")
        return found.value

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.set_materialize_grads(False)

    @staticmethod
    def vmap(info: Any, in_dims: Any, residual: Residual, solver: LinearSolver, *inputs: Tensor) -> tuple[Tensor, int]:
        return _one_by_one(info, in_dims[2:], lambda *inputs: _solved(residual, solver, *inputs), inputs)


def _solved(residual: Residual, solver: LinearSolver, b: Tensor, solution: Tensor, *args: Tensor) -> Tensor:
    u: Tensor = _Adjoint.apply(residual, solver, b, solution, *args)  # type: ignore[no-untyped-call]
    return u


def _one_by_one(
    info: Any, in_dims: Sequence[int | None], function: Callable[..., Tensor], inputs: Sequence[Tensor]
) -> tuple[Tensor, int]:
    """Return the results for each entry of a mapped dimension, and their dimension."""
    paired = list(zip(inputs, in_dims, strict=True))
    rows = [[x if dim is None else x.select(dim, i) for x, dim in paired] for i in range(info.batch_size)]
    return torch.stack([function(*row) for row in rows]), 0


def _adjoint(residual: Residual, solver: LinearSolver, solution: Tensor, args: Sequence[Tensor], b: Tensor) -> Tensor:
    """Solve ``(dF/dw)^T u = b``. While a graph is recorded, u is the root of this equation with its own gradient."""

    def equation(u: Tensor, b: Tensor, solution: Tensor, *args: Tensor) -> Tensor:
        return _transposed(residual, solution, args)(u) - b

    if functorch.is_legacy_batchedtensor(b):
        raise NotImplementedError(
            "An implicit gradient takes no `is_grads_batched=True` or `vectorize=True`: use `torch.func.jacrev`."
        )
    with no_graph():
        found = _solved(residual, solver, b, solution, *args)
    if not torch.is_grad_enabled():
        return found
    return _implicit(equation, solver, found, b, solution, *args)


def _transposed(residual: Residual, solution: Tensor, args: Sequence[Tensor]) -> Operator:
    """Return the function ``u -> (dF/dw)^T u``."""
    pull = torch.func.vjp(lambda w: residual(w, *args), solution)[1]
    return lambda u: pull(u)[0]


def _by_arguments(
    residual: Residual, solution: Tensor, args: Sequence[Tensor], needed: Sequence[bool], u: Tensor
) -> list[Tensor | None]:
    """Return ``(dF/da)^T u`` for each argument whose gradient is needed, None for the others."""
    chosen = [i for i, need in enumerate(needed) if need]
    if not chosen:
        return [None] * len(args)

    def of_chosen(*values: Tensor) -> Tensor:
        replaced = dict(zip(chosen, values, strict=True))
        return residual(solution, *(replaced.get(i, value) for i, value in enumerate(args)))

    pull = torch.func.vjp(of_chosen, *(args[i] for i in chosen))[1]
    gradients = dict(zip(chosen, pull(u), strict=True))
    return [gradients.get(i) for i in range(len(args))]
