"""Seeded generators, values, leaves and gradients in float64, and a table, that the tests of all rooms share."""

import itertools
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor


def seeded(seed: int = 0, device: str = "cpu") -> torch.Generator:
    """Return a new generator."""
    return torch.Generator(device).manual_seed(seed)


def draw(seed: int, *shape: int) -> Tensor:
    """Return normal numbers in float64, as a constant."""
    return torch.randn(shape, generator=seeded(seed), dtype=torch.float64)


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


def summed(*trees):
    """Return the sums of values by name."""
    return {name: sum(tree[name] for tree in trees) for name in trees[0]}


def binary_states(n_units: int) -> np.ndarray:
    """Return all rows of zeros and ones, (2^n, n); the first unit changes slowest."""
    return np.array(list(itertools.product([0.0, 1.0], repeat=n_units)))


class Frame:
    """A stand-in for a table with named columns."""

    def __init__(self, x, columns):
        self.x, self.columns, self.shape = x, np.array(columns, dtype=object), x.shape

    def __array__(self, dtype=None, copy=None):
        return np.array(self.x, dtype)

    def __len__(self):
        return len(self.x)
