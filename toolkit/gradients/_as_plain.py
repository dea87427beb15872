"""Functions of torch that give other bits while they record a graph: here they give those of the plain program.

In the plain program stopped values require no gradient, and a region records nothing. So singular values are computed
without vectors, and a recurrent layer keeps nothing for a backward pass. A product of a stack of matrices with one
matrix stays a stack of products instead of one product of a long matrix (`should_fold` in ATen's LinearAlgebra.cpp).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

__all__ = ["DEPENDS_ON_A_GRAPH", "PRODUCTS", "choosing", "computed_as_plain", "may_depend", "unfolded", "unrecorded"]

_MEMORY = torch._C.TensorBase.__dict__["data"].__get__
PRODUCTS = frozenset({torch.matmul, Tensor.matmul, torch.linalg.matmul, F.linear})

_NORMS = frozenset({torch.norm, Tensor.norm, torch.linalg.norm, torch.linalg.matrix_norm})

_IN_CHUNKS = getattr(F, "linear_cross_entropy", None)  # newer than torch 2.10

# Function -> the argument that it looks at to choose a path, and why a constant there is refused.
_CHOOSING: dict[Any, tuple[int, str, str]] = {
    F.scaled_dot_product_attention: (
        3,
        "attn_mask",
        "an attention takes it as a mask, and is computed in another way if a mask requires a gradient",
    ),
    _IN_CHUNKS: (
        2,
        "target",
        "a cross entropy in chunks takes it as its targets, and has no chunks if they require a gradient",
    ),
}

DEPENDS_ON_A_GRAPH = frozenset(
    {
        *PRODUCTS,
        *_NORMS,
        torch.lstm,
        torch.gru,
        torch.rnn_tanh,
        torch.rnn_relu,
        torch.linalg.svdvals,
        torch.linalg.eigvals,
        torch.linalg.eigvalsh,
        torch.linalg.cond,
        torch.linalg.lstsq,
        torch.nuclear_norm,
        F.multi_head_attention_forward,
        F.scaled_dot_product_attention,
        _IN_CHUNKS,
    }
)


def may_depend(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call of these functions may use another kernel while it records a graph."""
    if func in _NORMS:  # of singular values
        orders = [order for order in (*args[1:], *kwargs.values()) if isinstance(order, str | int | float)]
        return any(order in ("nuc", 2, -2) for order in orders)
    if func is _IN_CHUNKS:
        return kwargs.get("options") is not None
    return func not in PRODUCTS or _is_stack_with_gaps(args)


def computed_as_plain(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], is_constant: Callable[[Tensor], bool]
) -> Any:
    """Call a function whose gradients the plain program does not record: its values are those without a graph."""
    if not may_depend(func, args, kwargs):
        return func(*args, **kwargs)

    def held(leaf: Any) -> Any:
        with unrecorded():
            return torch._C.TensorBase.detach(leaf) if isinstance(leaf, Tensor) and is_constant(leaf) else leaf

    given = tree_map(held, [args, kwargs])
    with _drawing_again(given), unrecorded():
        plain = func(*given[0], **given[1])
    recorded = func(*args, **kwargs)
    with unrecorded():
        for result, value in zip(tree_leaves(recorded), tree_leaves(plain), strict=True):
            if isinstance(result, Tensor) and result.grad_fn is not None:
                _MEMORY(result).copy_(value)  # backward passes take what is there
    return recorded


def unfolded(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], is_constant: Callable[[Tensor], bool]
) -> Any:
    """Call a product with a matrix or a vector that is a constant of the plain program."""
    if func not in PRODUCTS:
        return func(*args, **kwargs)
    left, right = args[:2]
    small = left if left.ndim < right.ndim else right
    if not (small.requires_grad and small.grad_fn is not None and is_constant(small)):
        return func(*args, **kwargs)
    if func is F.linear:
        bias = args[2] if len(args) > 2 else kwargs.get("bias")
        product = torch.matmul(left, right.T.expand(*left.shape[:-2], *right.T.shape))
        return product if bias is None else product + bias
    if small is left:
        matrix = left if left.ndim > 1 else left.unsqueeze(0)
        product = torch.matmul(matrix.expand(*right.shape[:-2], *matrix.shape), right)
        return product if left.ndim > 1 else product.squeeze(-2)
    matrix = right if right.ndim > 1 else right.unsqueeze(1)
    product = torch.matmul(left, matrix.expand(*left.shape[:-2], *matrix.shape))
    return product if right.ndim > 1 else product.squeeze(-1)


def choosing(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Tensor | None, str]:
    """Return the argument whose gradient makes a function take another path, and why a constant there is refused."""
    if func not in _CHOOSING:
        return None, ""
    place, name, reason = _CHOOSING[func]
    return args[place] if len(args) > place else kwargs.get(name), reason


def _is_stack_with_gaps(args: tuple[Any, ...]) -> bool:
    """Return whether a stack of matrices meets one matrix or vector, and torch looks whether to make it one matrix."""
    if len(args) < 2 or not all(isinstance(arg, Tensor) for arg in args[:2]):
        return False
    left, right = args[:2]
    if min(left.ndim, right.ndim) > 2 or max(left.ndim, right.ndim) < 3:
        return False
    return left.ndim == 2 or not (left if left.ndim > right.ndim else right.mT).is_contiguous()


@contextmanager
def unrecorded() -> Iterator[None]:
    """Record no graph, unseen by the replacements and by modes."""
    with torch._C.DisableTorchFunction():
        outer = torch._C.is_grad_enabled()
        torch._C._set_grad_enabled(False)
    try:
        yield
    finally:
        with torch._C.DisableTorchFunction():
            torch._C._set_grad_enabled(outer)


def _drawing_again(given: Any) -> AbstractContextManager[None]:
    """Return a context after which the devices of these tensors draw the same numbers again: a layer may drop out."""
    devices = {leaf.device for leaf in tree_leaves(given) if isinstance(leaf, Tensor)} - {torch.device("cpu")}
    kinds = {device.type for device in devices} - {"meta"} or {"cuda"}
    indices = [device.index for device in devices if device.index is not None]
    return torch.random.fork_rng(indices, device_type=kinds.pop())
