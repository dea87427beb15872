"""A loss and its gradient inside of a larger computation, in eager code, `torch.func` and `torch.compile`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.compiler import is_compiling

from toolkit.blocks import constants, no_graph, ordinary_tensors, variable

__all__ = ["scalar", "value_and_slopes"]


def value_and_slopes(
    loss: Callable[[list[Tensor]], Tensor], inputs: Sequence[Tensor], *, recorded: bool = True
) -> tuple[Tensor, list[Tensor]]:
    """Return a loss and its gradient with respect to each input; where it does not depend on an input, zeros.

    Both can be differentiated again if `recorded` and if gradients are enabled. Gradients are computed in any case.

    Raises:
        ValueError: If `loss` does not return a scalar.
    """
    recorded = recorded and torch.is_grad_enabled()
    if is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None:
        with nullcontext() if recorded else no_graph():
            slopes, value = torch.func.grad_and_value(lambda values: scalar(loss(values)))(list(inputs))
            return value, slopes
    with ordinary_tensors(), torch.enable_grad():  # two thirds of the time of `torch.func`
        ordinary = [value.clone() if value.is_inference() else value for value in inputs]
        leaves = [variable(value) for value in (ordinary if recorded else constants(ordinary))]
        value = scalar(loss(leaves))
        if not value.requires_grad:
            return value, [torch.zeros_like(leaf) for leaf in leaves]
        slopes = torch.autograd.grad(value, leaves, create_graph=recorded, retain_graph=True, materialize_grads=True)
    return value, list(slopes)


def scalar(value: Tensor) -> Tensor:
    """Return the value of a loss; raise ValueError unless it is a scalar tensor."""
    if not isinstance(value, Tensor):
        raise ValueError(f"`loss` should return a tensor. Found {type(value).__name__}.")
    if value.dim():
        raise ValueError(f"`loss` should return a scalar. Found shape {tuple(value.shape)}.")
    return value
