r"""Products with a Hessian, and the natural gradient by conjugate gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from toolkit._checks import integer, number
from toolkit._tensors import tensors

__all__ = ["hessian_product", "natural_gradient"]


def hessian_product(value: Tensor, parameters: Iterable[Tensor], vector: Sequence[Tensor]) -> list[Tensor]:
    r"""Return :math:`\nabla^2 value \cdot v`, by two backward passes.

    For a divergence from a held point this is the product with the Gauss-Newton or Fisher matrix. With the block of the
    divergence open it is zero.

    Args:
        value: A scalar that depends on the parameters.
        parameters: The tensors to differentiate by.
        vector: v, a tensor of the same shape for each of them.

    Returns:
        Like `parameters`, without a graph.

    Raises:
        ValueError: If `vector` does not have the shapes of `parameters`, `parameters` is a tensor, or `value` is not a
            scalar with a graph.

    References:
        Pearlmutter, "Fast exact multiplication by the Hessian", 1994.

    Example:
        >>> w = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> hessian_product((w**3).sum(), [w], [torch.tensor([1.0, 10.0])])
        [tensor([  6., 120.])]
    """
    parameters, vector = tensors_of(parameters), list(vector)
    shapes = [tuple(parameter.shape) for parameter in parameters]
    if [tuple(v.shape) for v in vector] != shapes:
        raise ValueError(f"`vector` should have the shapes {shapes}. Found {[tuple(v.shape) for v in vector]}.")
    _check_graphs(value=value)
    return _products(value, parameters)(vector)


def natural_gradient(
    loss: Tensor,
    divergence: Tensor,
    parameters: Iterable[Tensor],
    *,
    damping: float = 1e-3,
    iterations: int = 20,
    tolerance: float = 1e-10,
    radius: float | None = None,
) -> list[Tensor]:
    r"""Return :math:`(F + \lambda I)^{-1} \nabla loss`, with F the Hessian of the divergence, by conjugate gradients.

    F has to be positive semi-definite: take a divergence from a held point. With the block of the divergence open F is
    zero, and the result is :math:`\nabla loss / \lambda`: plain gradient descent.

    Args:
        loss: A scalar.
        divergence: A scalar at the same parameters, for example the mean of `kl_from_held`.
        parameters: The tensors to differentiate by.
        damping: :math:`\lambda`, not negative.
        iterations: Largest number of steps of conjugate gradients. In exact arithmetic, the number of parameters
            suffices.
        tolerance: Norm of the residual, relative to that of the gradient, at which the steps end.
        radius: :math:`\delta`: the direction d is scaled to :math:`d^T F d / 2 = \delta`, the step of trust region
            policy optimisation before its line search. None: no scaling.

    Returns:
        Like `parameters`, without a graph. Subtract it to lower the loss.

    Raises:
        ValueError: If `damping` or `tolerance` is negative, `iterations` not a positive integer, `radius` not positive,
            `parameters` is a tensor, or `loss` or `divergence` is not a scalar with a graph.

    References:
        Amari, "Natural gradient works efficiently in learning", 1998. Schulman, Levine, Moritz, Jordan and Abbeel,
        "Trust region policy optimization", 2015, appendix C.

    Example:
        >>> w = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> metric = ((w - w.detach()).square() * torch.tensor([1.0, 4.0])).sum() / 2
        >>> natural_gradient((w**2).sum(), metric, [w], damping=0.0)
        [tensor([2., 1.])]
    """
    damping, tolerance = number("damping", damping, least=0), number("tolerance", tolerance, least=0)
    iterations = integer("iterations", iterations)
    radius = None if radius is None else number("radius", radius, above=0)
    parameters = tensors_of(parameters)
    _check_graphs(loss=loss, divergence=divergence)
    gradient = torch.autograd.grad(loss, parameters, retain_graph=True, materialize_grads=True)
    product = _products(divergence, parameters)

    def damped(vector: list[Tensor]) -> list[Tensor]:
        return [p + damping * v for p, v in zip(product(vector), vector, strict=True)]

    # The squares of a gradient far from 1 would be 0 or infinite.
    largest = torch.stack([slope.abs().amax() for slope in gradient if slope.numel()]).amax()
    scale = torch.where((largest > 0) & largest.isfinite(), largest, 1)
    direction = _conjugate_gradients(damped, [slope / scale for slope in gradient], iterations, tolerance)
    if radius is None:
        return [scale * d for d in direction]
    length = _dot(direction, product(direction)) / 2
    factor = torch.where(length > 0, (radius / length).sqrt(), 0)
    return [factor * d for d in direction]


def tensors_of(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return the parameters as a list.

    Raises:
        ValueError: If they are a single tensor: its rows are new tensors, on which nothing depends.
    """
    if isinstance(parameters, Tensor):
        raise ValueError(f"`parameters` should be a list of tensors. Found a tensor, {tuple(parameters.shape)}.")
    return list(parameters)


def _check_graphs(**values: Tensor) -> None:
    tensors(**values)
    for name, value in values.items():
        if value.ndim or not value.requires_grad:
            found = f"shape {tuple(value.shape)}" if value.ndim else "a tensor without a graph"
            raise ValueError(f"`{name}` should be a scalar that depends on `parameters`. Found {found}.")


def _products(value: Tensor, parameters: Sequence[Tensor]) -> Callable[[Sequence[Tensor]], list[Tensor]]:
    """Return the function that multiplies by the Hessian; its first backward pass runs once."""
    found = torch.autograd.grad(value, parameters, create_graph=True, materialize_grads=True)
    curved = [i for i, slope in enumerate(found) if slope.requires_grad]

    def product(vector: Sequence[Tensor]) -> list[Tensor]:
        if not curved:
            return [torch.zeros_like(parameter) for parameter in parameters]
        chosen, weights = [found[i] for i in curved], [vector[i] for i in curved]
        return list(torch.autograd.grad(chosen, parameters, weights, retain_graph=True, materialize_grads=True))

    return product


def _conjugate_gradients(
    product: Callable[[list[Tensor]], list[Tensor]], target: list[Tensor], iterations: int, tolerance: float
) -> list[Tensor]:
    """Solve ``A x = target`` from x = 0."""
    x = [torch.zeros_like(t) for t in target]
    residual, direction = target, target
    size = start = _dot(target, target)
    for _ in range(iterations):
        if size <= tolerance**2 * start:
            break
        image = product(direction)
        along = _dot(direction, image)
        if along <= 0:  # rounding, or a metric that is not positive: there is no further descent
            break
        x, residual = _plus(x, size / along, direction), _plus(residual, -size / along, image)
        before, size = size, _dot(residual, residual)
        direction = _plus(residual, size / before, direction)
    return x


def _dot(a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
    return torch.stack([(one * other).sum() for one, other in zip(a, b, strict=True)]).sum()


def _plus(a: Sequence[Tensor], factor: Tensor, b: Sequence[Tensor]) -> list[Tensor]:
    return [one + factor * other for one, other in zip(a, b, strict=True)]
