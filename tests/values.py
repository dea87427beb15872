"""Seeded generators, and values, leaves and gradients in float64, that the tests of all rooms share."""

from collections.abc import Callable

import torch
from torch import Tensor


def seeded(seed: int = 0, device: str = "cpu") -> torch.Generator:
    """Return a new generator."""
    return torch.Generator(device).manual_seed(seed)


def doubles(*values) -> Tensor:
    """Return numbers in float64, as a constant."""
    return torch.tensor(values, dtype=torch.float64)


def leaves(**values) -> Callable[[], dict[str, Tensor]]:
    """Return a function that makes new float64 leaves with these values."""
    return lambda: {
        name: torch.as_tensor(value, dtype=torch.float64).clone().requires_grad_() for name, value in values.items()
    }


def values_of(parameters):
    """Return the values of parameters as constants."""
    return {name: parameter.detach() for name, parameter in parameters.items()}


def witness(formula):
    """Return a witness that gives `formula` the values, and gets the gradients by name."""
    return lambda parameters: formula(**values_of(parameters))


def gradients(loss, parameters):
    """Return the gradients of a scalar by parameters, zeros where it does not depend on one."""
    found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    return {
        name: torch.zeros_like(parameter) if gradient is None else gradient
        for (name, parameter), gradient in zip(parameters.items(), found, strict=True)
    }
