"""Tensors and trees of tensors: which carry a gradient, and how they lose it or keep it."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
import torch.autograd.forward_ad as forward_ad
import torch.fx
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_pop_interpreter_stack
from torch.compiler import is_dynamo_compiling
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import SUPPORTED_NODES, tree_map, tree_map_only

__all__ = [
    "alias",
    "carries_gradient",
    "constants",
    "has_storage",
    "map_tensors",
    "no_graph",
    "ordinary_tensors",
    "variable",
    "without_tangents",
]

# Leaves without a derivative pass. Sizes of programs with dynamic shapes are numbers, too.
_CONSTANTS = (
    int, float, complex, str, bytes, np.generic, torch.dtype, torch.device, torch.SymInt, torch.SymFloat, torch.SymBool
)  # fmt: skip

no_graph = torch.no_grad
"""For code that needs no graph at all, an estimator's ``predict`` say. Not a block: there is nothing to open."""


@contextmanager
def ordinary_tensors() -> Iterator[None]:
    """Leave inference mode, in which nothing can be differentiated, without recording more than before."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False), torch.no_grad():
            yield
    else:
        yield


@contextmanager
def without_tangents() -> Iterator[None]:
    """Switch forward mode off. Views keep their tangents even then, so theirs are dropped one by one."""
    dropped = _DropTangents() if forward_ad._current_level >= 0 else nullcontext()
    with forward_ad._set_fwd_grad_enabled(False), dropped:
        yield


class _DropTangents(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return constants(func(*args, **(kwargs or {})))


def constants(result: Any) -> Any:
    """Return the result of an operation without its gradients and tangents."""
    with forward_ad._set_fwd_grad_enabled(True):  # without forward mode `detach` is a view like any other
        return tree_map_only(Tensor, lambda tensor: tensor.detach() if carries_gradient(tensor) else tensor, result)


def variable(input: Tensor) -> Tensor:
    """Return `input` as something to differentiate by: itself if it carries a gradient, else a new leaf beside it."""
    return input if input.requires_grad else input.detach().requires_grad_()


def carries_gradient(input: Tensor) -> bool:
    """Say whether a derivative of any mode or level can flow into `input` (also through `torch.func` wrappers)."""
    tensor = input
    while not tensor.requires_grad:
        if not torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            return forward_ad._current_level >= 0 and _carries_tangent(input)
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return True


def _carries_tangent(tensor: Tensor) -> bool:
    """Say whether a tensor has a tangent of any level: it shows one of a lower level only without the levels above."""
    functorch = torch._C._functorch
    with ExitStack() as suspended:
        while True:
            while (functorch.maybe_current_level() or 0) > max(functorch.maybe_get_level(tensor), 0):
                suspended.enter_context(temporarily_pop_interpreter_stack())
            wrapped = functorch.is_functorch_wrapped_tensor(tensor)
            batched = wrapped and functorch.is_batchedtensor(tensor)
            if not batched and forward_ad.unpack_dual(tensor).tangent is not None:
                return True
            if not wrapped:
                return False
            tensor = functorch.get_unwrapped(tensor)


def has_storage(value: Any) -> bool:
    """Say whether a value is a tensor with memory of its own: strided, and no wrapper, as those of `torch.func`."""
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return False
    try:
        value.untyped_storage()
    except NotImplementedError:
        return False
    return True


def alias(input: Tensor) -> Tensor:
    """Return a new tensor on the same memory that passes the gradient: the result of an open block.

    Not `input` itself: the extra node keeps the order in which autograd adds contributions the same for an open block
    and for an open gate, so that both give the same bits.
    """
    if input.layout is not torch.strided or input.is_nested:
        return input
    return input.view_as(input)


def map_tensors(function: Callable[[Any], Any], input: Any) -> Any:
    """Rebuild a tree with `function` applied to its tensors. See `stop_gradient` for the kinds of trees."""
    if isinstance(input, (Tensor, torch.fx.Proxy)):
        return function(input)
    kind = type(input)
    if kind is dict:
        return {key: map_tensors(function, value) for key, value in input.items()}
    if kind is list or kind is tuple:
        return kind([map_tensors(function, value) for value in input])
    if input is None or isinstance(input, _CONSTANTS):
        return input
    if isinstance(input, np.ndarray):
        if is_dynamo_compiling():  # there it is a tensor
            return function(torch.from_numpy(input)).numpy()
        if not input.dtype.hasobject:
            return input
    if kind in SUPPORTED_NODES:
        return tree_map(lambda part: map_tensors(function, part), input, is_leaf=lambda part: part is not input)
    if isinstance(input, Mapping):
        mapped = {key: map_tensors(function, value) for key, value in input.items()}
        if not isinstance(input, MutableMapping):
            return kind(mapped)
        rebuilt: Any = copy.copy(input)
        rebuilt.update(mapped)
        return rebuilt
    if isinstance(input, (list, tuple)):
        values = [map_tensors(function, value) for value in input]
        return kind(*values) if hasattr(input, "_fields") else kind(values)
    if dataclasses.is_dataclass(input) and not isinstance(input, type):
        rebuilt = copy.copy(input)
        fields = {field.name: getattr(input, field.name) for field in dataclasses.fields(input)}
        beside = getattr(input, "__dict__", {})  # a cached property holds tensors that were made of the fields
        for name, value in {**beside, **fields}.items():
            object.__setattr__(rebuilt, name, map_tensors(function, value))
        return rebuilt
    raise TypeError(
        "`input` should be a tensor, number, array of numbers, string, dtype, device or None, or a dict, list, tuple, "
        "namedtuple, deque, dataclass or registered pytree of these. "
        f"Found {type(input).__module__}.{type(input).__qualname__}."
    )
