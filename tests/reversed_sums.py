"""Sums in reverse: the last bits that another processor, another BLAS or another number of threads would give.

Below autograd, each sum, mean, norm, softmax and matrix product adds its terms in the reverse order. Every result is as
correct as before, so a test that fails under `ReversedSums` hangs on how a sum was rounded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten

# Operation -> positions of the tensors that are turned round, each with the dimension that is summed over.
_PRODUCTS: dict[Any, tuple[tuple[int, int], tuple[int, int]]] = {
    operation: places
    for name, places in {
        "mm": ((0, -1), (1, -2)),
        "bmm": ((0, -1), (1, -2)),
        "mv": ((0, -1), (1, -1)),
        "dot": ((0, -1), (1, -1)),
        "addmm": ((1, -1), (2, -2)),
        "baddbmm": ((1, -1), (2, -2)),
        "addmv": ((1, -1), (2, -1)),
    }.items()
    for overload in ("default", "out")
    if (operation := getattr(getattr(aten, name), overload, None)) is not None
} | {aten.addmm_.default: ((1, -1), (2, -2)), aten.baddbmm_.default: ((1, -1), (2, -2))}

# Operations on one tensor, and which argument names the dimensions; None: all of them.
_REDUCTIONS: dict[Any, int | None] = {
    aten.sum.default: None,
    aten.sum.dim_IntList: 1,
    aten.sum.IntList_out: 1,
    aten.mean.default: None,
    aten.mean.dim: 1,
    aten.mean.out: 1,
    aten.var.correction: 1,
    aten.var_mean.correction: 1,
    aten.std.correction: 1,
    aten.logsumexp.default: 1,
    aten.logsumexp.out: 1,
    aten.linalg_vector_norm.default: 2,
    aten.linalg_vector_norm.out: 2,
    aten.norm.Scalar: None,
    aten.norm.ScalarOpt_dim: 2,
}

_SOFTMAXES = (aten._softmax.default, aten._log_softmax.default)


class ReversedSums(TorchDispatchMode):
    """While it is on, operations of this thread add their terms from the last to the first."""

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _PRODUCTS:
            places = _PRODUCTS[func]
            if all(_is_plain(args[i]) for i, _ in places):
                args = _replaced(args, {i: args[i].flip(dim) for i, dim in places})
        elif func in _REDUCTIONS:
            if _is_plain(args[0]):
                args = _replaced(args, {0: args[0].flip(_dimensions(args, _REDUCTIONS[func]))})
        elif func in _SOFTMAXES and _is_plain(args[0]) and args[0].ndim:
            dim = args[1]
            return func(args[0].flip(dim), *args[1:], **kwargs).flip(dim)
        elif torch.is_inference_mode_enabled() and _is_composed(func):  # of operations above, and left whole
            with self:
                return func.decompose(*args, **kwargs)
        return func(*args, **kwargs)


@functools.cache
def _is_composed(func: Any) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"))


def _is_plain(x: Tensor) -> bool:
    sound = type(x) in (Tensor, torch.nn.Parameter) and x.layout == torch.strided and x.is_floating_point()
    return sound and not x._is_zerotensor()  # type: ignore[attr-defined]


def _dimensions(args: tuple[Any, ...], place: int | None) -> list[int]:
    found = args[place] if place is not None and len(args) > place else None
    if isinstance(found, int):
        return [found]
    return list(found) if found else list(range(args[0].ndim))


def _replaced(args: tuple[Any, ...], new: dict[int, Tensor]) -> tuple[Any, ...]:
    return tuple(new.get(i, arg) for i, arg in enumerate(args))


@contextmanager
def reversed_sums() -> Iterator[None]:
    """Add in reverse, and cut the data of EM into other chunks."""
    from toolkit.em.engine import samples as _samples

    length = dict(_samples._CHUNK_BYTES)
    _samples._CHUNK_BYTES.update(cpu=2**15)
    try:
        with ReversedSums():
            yield
    finally:
        _samples._CHUNK_BYTES.update(length)
