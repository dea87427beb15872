"""Backward passes of a program, each run inside of a context."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from toolkit._swapped import swapped
from toolkit.gradients._threads import this_thread

__all__ = ["Refused", "backward_passes", "root_of_pass"]

# Makes the context of a backward pass from its loss and the tensors it differentiates by, None for every leaf.
Begin = Callable[[Tensor, Collection[Tensor] | None], AbstractContextManager[None]]


class Refused(ValueError):
    """Raised for a step that cannot be audited; the message gives the reason in a sentence."""


@contextmanager
def backward_passes(begin: Begin) -> Iterator[None]:
    """Run every backward pass of this thread inside of the context ``begin(loss, inputs)``."""
    thread, running = this_thread(), False

    def replaced(original: Callable[..., Any], root_of: Callable[..., tuple[Tensor, Any]]) -> Callable[..., Any]:
        def backward(*args: Any, **kwargs: Any) -> Any:
            nonlocal running
            if running or this_thread() != thread:
                return original(*args, **kwargs)
            running = True
            try:
                with begin(*root_of(*args, **kwargs)):
                    return original(*args, **kwargs)
            finally:
                running = False

        return backward

    method = replaced(torch.Tensor.backward, _root_of_method)
    function = replaced(torch.autograd.backward, root_of_pass)
    with swapped(torch.Tensor, "backward", method), swapped(torch.autograd, "backward", function):
        yield


def _root_of_method(
    value: Tensor,
    gradient: Tensor | None = None,
    retain_graph: Any = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> tuple[Tensor, Collection[Tensor] | None]:
    return root_of_pass(value, gradient, inputs=inputs)


def root_of_pass(
    tensors: Any, grad_tensors: Any = None, *_: Any, inputs: Any = None, **__: Any
) -> tuple[Tensor, Collection[Tensor] | None]:
    """Return a scalar with the gradient of this backward pass, and its inputs.

    Raises:
        Refused: If the backward pass does not begin at tensors.
    """
    given = [tensors] if isinstance(tensors, Tensor | GradientEdge) else list(tensors)
    values = [value for value in given if isinstance(value, Tensor)]
    if len(values) < len(given):
        raise Refused("The backward pass should begin at tensors. Found one that begins at a gradient edge.")
    weights = [grad_tensors] if grad_tensors is None or isinstance(grad_tensors, Tensor) else list(grad_tensors)
    weights += [None] * (len(values) - len(weights))
    if len(values) == 1 and values[0].numel() == 1 and weights[0] is None:
        root = values[0]
    else:
        pairs = zip(values, weights, strict=True)
        root = torch.stack([(value if weight is None else value * weight).sum() for value, weight in pairs]).sum()
    if inputs is None:
        return root, None
    ends = [inputs] if isinstance(inputs, Tensor | GradientEdge) else inputs
    return root, [tensor for tensor in ends if isinstance(tensor, Tensor)] or None
