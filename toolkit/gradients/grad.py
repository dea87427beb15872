"""Derivatives that hold tensors of an existing graph constant, as ``tf.gradients`` does."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from toolkit.gradients._nodes import EVERY_BLOCK, reachable_nodes

__all__ = ["grad"]

Tensors = Tensor | Iterable[Tensor]


def grad(
    ys: Tensors,
    xs: Tensors,
    *,
    stop_gradients: Tensors = (),
    grad_ys: Sequence[Tensor | None] | Tensor | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
) -> tuple[Tensor | None, ...]:
    """Return the derivatives of the sum of `ys` with respect to `xs`, with the tensors in `stop_gradients` constant.

    The semantics are those of ``tf.gradients(ys, xs, grad_ys, stop_gradients=)``: the result is the same as if each
    tensor in `stop_gradients` had passed through `stop_gradient` when it was made, but the graph already exists. A
    tensor may be in both lists: its own derivative is taken, and the gradient ends there. With ``xs == stop_gradients``
    all derivatives are partial derivatives. Tensors are held constant in this call only; a second derivative takes its
    own list.

    Args:
        ys: Tensors of any shape.
        xs: Tensors that require a gradient, leaves or not.
        stop_gradients: Tensors of the graph between `ys` and `xs`. A tensor that requires no gradient is already
            constant.
        grad_ys: The weights of the elements of each of `ys` in the sum; None: all weights are 1.
        retain_graph: Whether to keep the graph for another call; None: the value of `create_graph`.
        create_graph: Whether to make the derivatives differentiable.

    Returns:
        For each of `xs` a tensor of its shape, or None without a path.

    Raises:
        TypeError: If an argument holds something other than tensors, or a complex tensor in `ys` has no weights.
        ValueError: If `ys` or `xs` is empty, one of `xs` requires no gradient, or `grad_ys` does not fit `ys`.
        RuntimeError: If the graph was freed by an earlier call.

    References:
        TensorFlow, ``tf.gradients``. As there, these stops add to the stops in the graph: the first stop on a path ends
        its gradient.

    Example:
        >>> x = torch.tensor(1.0, requires_grad=True)
        >>> y = 2 * x
        >>> z = x + y
        >>> grad(z, [x, y], retain_graph=True), grad(z, [x, y], stop_gradients=[x, y])
        ((tensor(3.), tensor(1.)), (tensor(1.), tensor(1.)))
    """
    outputs, inputs = _listed("ys", ys), _listed("xs", xs)
    stops = _listed("stop_gradients", stop_gradients)
    for name, tensors in (("ys", outputs), ("xs", inputs)):
        if not tensors:
            raise ValueError(f"`{name}` should have at least one tensor. Found none.")
    for i, x in enumerate(inputs):
        if not x.requires_grad:
            raise ValueError(f"`xs` should require a gradient. Found a constant of shape {tuple(x.shape)} at {i}.")
    pairs = [(y, w) for y, w in zip(outputs, _weights(outputs, grad_ys), strict=True) if y.requires_grad]
    if not pairs:
        return (None,) * len(inputs)
    with _stopped(stops):
        return torch.autograd.grad(
            [y for y, _ in pairs],
            inputs,
            [weights for _, weights in pairs],
            retain_graph=retain_graph,
            create_graph=create_graph,
            allow_unused=True,
        )


@contextmanager
def _stopped(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Stop gradients at `tensors`: none passes to their inputs."""
    outputs: defaultdict[Any, set[int]] = defaultdict(set)
    for tensor in tensors:
        if tensor.grad_fn is not None:  # a leaf has no inputs
            outputs[tensor.grad_fn].add(tensor.output_nr)
    behind = {node for stop in outputs for node in reachable_nodes(stop, EVERY_BLOCK)}
    with ExitStack() as hooks:
        for node, numbers in outputs.items():
            hooks.callback(node.register_prehook(_without(numbers)).remove)
        for node in behind:
            if isinstance(node, BackwardCFunction):
                hooks.callback(node.register_hook(_nothing_of_nothing).remove)
        yield


def _without(outputs: set[int]) -> Callable[[tuple[Tensor | None, ...]], tuple[Tensor | None, ...]]:
    """Return a hook that drops gradients at these outputs: None instead of zeros, as zero times infinity is NaN."""
    return lambda cotangents: tuple(None if i in outputs else cotangent for i, cotangent in enumerate(cotangents))


def _nothing_of_nothing(
    results: Sequence[Tensor | None], cotangents: Sequence[Tensor | None]
) -> tuple[None, ...] | None:
    """Drop the result of a custom function for zeros: autograd passes zeros in place of None."""
    return (None,) * len(results) if all(cotangent is None for cotangent in cotangents) else None


def _listed(name: str, tensors: Any) -> list[Tensor]:
    if isinstance(tensors, Tensor):
        return [tensors]
    if not isinstance(tensors, Iterable) or isinstance(tensors, str):
        raise TypeError(f"`{name}` should be a tensor or a sequence of tensors. Found {type(tensors).__name__}.")
    listed = list(tensors)
    for i, tensor in enumerate(listed):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"`{name}` should hold tensors. Found {type(tensor).__name__} at {i}.")
    return listed


def _weights(ys: Sequence[Tensor], grad_ys: Any) -> list[Tensor]:
    given = [None] * len(ys) if grad_ys is None else [grad_ys] if isinstance(grad_ys, Tensor) else list(grad_ys)
    if len(given) != len(ys):
        raise ValueError(f"`grad_ys` should have one entry for each of {len(ys)} tensors in `ys`. Found {len(given)}.")
    weights = []
    for i, (y, weight) in enumerate(zip(ys, given, strict=True)):
        if weight is None:
            if y.is_complex():
                raise TypeError(f"`grad_ys` should have weights for complex tensors in `ys`. Found None at {i}.")
            weight = torch.ones_like(y)
        if not isinstance(weight, Tensor):
            raise TypeError(f"`grad_ys` should hold tensors or None. Found {type(weight).__name__} at {i}.")
        if weight.shape != y.shape:
            raise ValueError(
                f"`grad_ys` should have the shapes of `ys`. Found {tuple(weight.shape)} for {tuple(y.shape)} at {i}."
            )
        weights.append(weight)
    return weights
