r"""Meta-learning an initialisation that adapts to a task in a few steps of gradient descent.

The inner loss of a task adapts the shared parameters, and the outer loss evaluates the result. The exact gradient of
the outer loss needs second derivatives of the inner one. First-order MAML holds the inner gradients constant, Reptile
the adapted parameters as well. Batches of tasks: `torch.func.vmap` over `adapt`, or a loop.

Parameters are a dict of tensors, as `torch.func.functional_call` takes them; parameters left out are not adapted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from toolkit._checks import broadcasts, integer, number
from toolkit._slopes import value_and_slopes
from toolkit._tensors import floating, mappings
from toolkit.bilevel.implicit import SOLUTION, attached, slope_of
from toolkit.bilevel.solvers import LinearSolver, conjugate_gradient
from toolkit.blocks import block, is_blocked, stop_gradient, stop_recording

__all__ = ["ADAPTED", "INNER_GRADIENT", "adapt", "implicit_adapt", "reptile_loss"]

INNER_GRADIENT = block(
    "bilevel.inner_gradient",
    "First-order MAML takes each inner gradient for a constant step, as if it did not depend on the initialisation: no "
    "second derivatives are needed.",
)
ADAPTED = block(
    "bilevel.adapted",
    "Reptile's adapted parameters are a place to move to: if they moved along with the initialisation, the distance to "
    "them would hardly depend on it.",
)

Parameters = Mapping[str, Tensor]
Loss = Callable[[dict[str, Tensor]], Tensor]


def adapt(
    loss: Loss, parameters: Parameters, *, steps: int, step_size: float | Tensor | Mapping[str, Tensor]
) -> dict[str, Tensor]:
    r"""Return parameters after k steps of gradient descent on a task, :math:`\theta \leftarrow \theta - \alpha \bar g`.

    With the block `INNER_GRADIENT` in place an outer loss of the result has the gradient :math:`g' = \nabla
    L_{outer}(\theta_k)`, that of first-order MAML. Open, it is that of MAML,

    .. math::
        \prod_{i=0}^{k-1} (I - \alpha H_i) \, g'

    with the Hessians :math:`H_i` of the inner loss at the iterates. A step size that is a tensor gets its gradient
    either way, as in Meta-SGD. `adapt` also works under `torch.no_grad` and `torch.inference_mode`.

    Args:
        loss: The inner loss: parameters to a scalar.
        parameters: :math:`\theta`, the initialisation.
        steps: k; 0 returns the parameters as they are.
        step_size: :math:`\alpha`: a number, a tensor that broadcasts to each parameter, or a tensor for each.

    Returns:
        Name -> adapted parameter.

    Raises:
        ValueError: If `steps` is not an integer from 0, or `loss` does not return a scalar. If a step size is a number
            that is not positive and finite, or a tensor that would change the shape of a parameter. If a parameter has
            no step size.

    References:
        Finn, Abbeel and Levine, "Model-agnostic meta-learning for fast adaptation of deep networks", 2017, section 5.2
        for the first-order form. Li, Zhou, Chen and Li, "Meta-SGD", 2017, for learned step sizes.

    Example:
        >>> w = {"w": torch.tensor(1.0, requires_grad=True)}
        >>> adapt(lambda p: 2 * p["w"] ** 2, w, steps=1, step_size=0.1)["w"].backward()
        >>> w["w"].grad  # 1 - 0.1 * 4 with the block open
        tensor(1.)
    """
    steps = integer("steps", steps, 0)
    _check_parameters(parameters)
    rates = _step_sizes(step_size, parameters)
    adapted = dict(parameters)
    for _ in range(steps):
        gradient = _inner_gradient(loss, adapted)
        adapted = {name: value - rates[name] * gradient[name] for name, value in adapted.items()}
    return adapted


def _inner_gradient(loss: Loss, parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    names, values = list(parameters), list(parameters.values())
    recorded = not is_blocked(INNER_GRADIENT)
    _, slopes = value_and_slopes(lambda leaves: loss(dict(zip(names, leaves, strict=True))), values, recorded=recorded)
    return {name: stop_gradient(slope, INNER_GRADIENT) for name, slope in zip(names, slopes, strict=True)}


def _step_sizes(step_size: float | Tensor | Mapping[str, Tensor], parameters: Parameters) -> dict[str, float | Tensor]:
    if not isinstance(step_size, Mapping):
        return {name: _step_size("step_size", step_size, value) for name, value in parameters.items()}
    if missing := sorted(parameters.keys() - step_size.keys()):
        raise ValueError(f"`step_size` should have a value for each parameter. Found none for {missing}.")
    return {name: _step_size(f"step_size[{name!r}]", step_size[name], value) for name, value in parameters.items()}


def _step_size(name: str, step_size: float | Tensor, parameter: Tensor) -> float | Tensor:
    if not isinstance(step_size, Tensor):
        return number(name, step_size, above=0)
    if not broadcasts(step_size.shape, parameter.shape):
        shapes = f"{tuple(parameter.shape)} of its parameter. Found {tuple(step_size.shape)}"
        raise ValueError(f"`{name}` should broadcast to the shape {shapes}.")
    return step_size


def reptile_loss(parameters: Parameters, adapted: Parameters, *, step_size: float) -> Tensor:
    r"""Return :math:`|\theta - \bar\theta_k|^2 / (2 \alpha)`, whose gradient is the direction of Reptile.

    With the block `ADAPTED` in place the gradient is :math:`(\theta - \theta_k) / \alpha`, the sum of the inner
    gradients. With only `ADAPTED` open it is exactly 0 after `adapt`: the adapted parameters follow at the same speed.
    With `INNER_GRADIENT` open as well it is :math:`(I - \prod_i (I - \alpha H_i)) (\theta - \theta_k) / \alpha`.

    Args:
        parameters: :math:`\theta`.
        adapted: :math:`\theta_k`, of the same names and shapes.
        step_size: :math:`\alpha` of the inner steps.

    Returns:
        A scalar.

    Raises:
        ValueError: If `step_size` is not positive and finite, or names or shapes differ.

    References:
        Nichol, Achiam and Schulman, "On first-order meta-learning algorithms", 2018.

    Example:
        >>> w = {"w": torch.tensor(1.0, requires_grad=True)}
        >>> adapted = adapt(lambda p: 2 * p["w"] ** 2, w, steps=2, step_size=0.1)
        >>> reptile_loss(w, adapted, step_size=0.1).backward()
        >>> w["w"].grad  # 4 + 0.6 * 4
        tensor(6.4000)
    """
    step_size = number("step_size", step_size, above=0)
    _check_parameters(parameters)
    mappings(adapted=adapted)
    shapes, found = ({name: tuple(value.shape) for name, value in sorted(p.items())} for p in (parameters, adapted))
    if shapes != found:
        raise ValueError(f"`adapted` should have the names and shapes of `parameters`, {shapes}. Found {found}.")
    held = {name: stop_gradient(value, ADAPTED) for name, value in adapted.items()}
    squares = [(value - held[name]).square().sum() for name, value in parameters.items()]
    return torch.stack(squares).sum() / (2 * step_size)


def implicit_adapt(
    loss: Loss,
    parameters: Parameters,
    *,
    strength: float,
    minimise: Callable[[Loss, Parameters], Parameters],
    solver: LinearSolver = conjugate_gradient,
) -> dict[str, Tensor]:
    r"""Return :math:`\phi^* = \arg\min_\phi L(\phi) + \frac{\lambda}{2} |\phi - \theta|^2` with its implicit gradient.

    An outer loss of the result has the gradient :math:`(I + H / \lambda)^{-1} g'`, for any minimiser that finds
    :math:`\phi^*`; H is the Hessian of L there. The block `SOLUTION` is redundant, as in `implicit_minimum`: it saves
    the graph of the minimiser, and changes the gradient only by the error of `solver`.

    Args:
        loss: L, the inner loss: parameters to a scalar. It should use no other tensor with a gradient.
        parameters: :math:`\theta`.
        strength: :math:`\lambda`, positive. H / :math:`\lambda` should have no eigenvalue of -1 or below.
        minimise: Called as ``minimise(proximal_loss, parameters)``; returns the minimum. For example
            ``partial(adapt, steps=50, step_size=0.1)``. Its error becomes an error of the gradient.
        solver: Solves linear equations with :math:`H + \lambda I` for all parameters as one vector.

    Returns:
        Name -> adapted parameter.

    Raises:
        ValueError: If `strength` is not positive and finite, or `loss` uses another tensor with a gradient.

    Warns:
        ConvergenceWarning: In a backward pass whose linear solver did not converge.

    References:
        Rajeswaran, Finn, Kakade and Levine, "Meta-learning with implicit gradients", 2019, the implicit Jacobian and
        algorithm 2.

    Example:
        >>> from functools import partial
        >>> w = {"w": torch.tensor(1.0, requires_grad=True)}
        >>> minimise = partial(adapt, steps=50, step_size=0.2)
        >>> implicit_adapt(lambda p: p["w"] ** 2, w, strength=2.0, minimise=minimise)["w"].backward()
        >>> w["w"].grad
        tensor(0.5000)
    """
    strength = number("strength", strength, above=0)
    _check_parameters(parameters)

    def proximal(phi: Parameters, theta: Parameters) -> Tensor:
        squares = [(value - theta[name]).square().sum() for name, value in phi.items()]
        return loss(dict(phi)) + 0.5 * strength * torch.stack(squares).sum()

    def of_vectors(phi: Tensor, theta: Tensor) -> Tensor:
        return proximal(_as_dict(phi, parameters), _as_dict(theta, parameters))

    with stop_recording(SOLUTION):
        found = minimise(lambda phi: proximal(phi, parameters), parameters)
    vectors = (_as_vector({name: each[name] for name in parameters}) for each in (found, parameters))
    return _as_dict(attached(slope_of(of_vectors), *vectors, solver=solver), parameters)


def _check_parameters(parameters: Parameters) -> None:
    mappings(parameters=parameters)
    if not parameters:
        raise ValueError("`parameters` should have at least one tensor. Found none.")
    floating(**{f"parameters[{name!r}]": value for name, value in parameters.items()})


def _as_vector(parameters: Parameters) -> Tensor:
    return torch.cat([value.reshape(-1) for value in parameters.values()])


def _as_dict(vector: Tensor, like: Parameters) -> dict[str, Tensor]:
    parts = zip(vector.split([value.numel() for value in like.values()]), like.items(), strict=True)
    return {name: part.view(value.shape).to(value.dtype) for part, (name, value) in parts}
