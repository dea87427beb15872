"""Sums in reverse: the last bits that another processor, another BLAS or another number of threads would give.

On the CPU, each sum, mean, norm, softmax and matrix product adds its terms in the reverse order. Every result is as
correct as before, so a test that fails under `ReversedSums` hangs on how a sum was rounded.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.library import Library, get_kernel

# Operation -> positions of the tensors that are turned round, each with the dimension that is summed over.
_PRODUCTS: dict[str, tuple[tuple[int, int], tuple[int, int]]] = {
    f"{name}{overload}": places
    for name, places in {
        "mm": ((0, -1), (1, -2)),
        "bmm": ((0, -1), (1, -2)),
        "mv": ((0, -1), (1, -1)),
        "dot": ((0, -1), (1, -1)),
        "addmm": ((1, -1), (2, -2)),
        "baddbmm": ((1, -1), (2, -2)),
        "addmv": ((1, -1), (2, -1)),
    }.items()
    for overload in ("", ".out", *(["_"] if "add" in name else []))
}

# Operations on one tensor, and which argument names the dimensions; None: all of them.
_REDUCTIONS: dict[str, int | None] = {
    "sum": None,
    "sum.dim_IntList": 1,
    "sum.IntList_out": 1,
    "mean": None,
    "mean.dim": 1,
    "mean.out": 1,
    "var.correction": 1,
    "var_mean.correction": 1,
    "std.correction": 1,
    "logsumexp": 1,
    "logsumexp.out": 1,
    "linalg_vector_norm": 2,
    "linalg_vector_norm.out": 2,
    "norm.Scalar": None,
    "norm.ScalarOpt_dim": 2,
}

_SOFTMAXES = ("_softmax", "_log_softmax")

Kernel = Callable[..., Any]


class _Inside(threading.local):
    """Whether a kernel of this module is running, in which a sum that is part of its own is not turned round again."""

    now = False


_inside = _Inside()


class ReversedSums:
    """While it is on, sums on the CPU add their terms from the last to the first.

    It replaces the kernels of these operations: all others are called by torch as ever.
    """

    def __enter__(self) -> None:
        self._library = Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "(?s)Warning only once for all operators.*overrid", UserWarning)
            for name, reverse in _REVERSED.items():
                kernel = _in_reverse(get_kernel(f"aten::{name}", "CPU").call_boxed, reverse)
                self._library.impl(name, kernel, "CPU", with_keyset=True, allow_override=True)

    def __exit__(self, *raised: object) -> None:
        self._library._destroy()


def _in_reverse(plain: Kernel, reverse: Callable[[Kernel, Any], Any]) -> Kernel:
    """Return a kernel that hands its arguments to another one in reverse."""

    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        if _inside.now or not args[0].is_floating_point():
            return plain(keys, *args, **kwargs)
        _inside.now = True
        try:
            return reverse(lambda *args: plain(keys, *args, **kwargs), args)
        finally:
            _inside.now = False

    return kernel


def _product(places: tuple[tuple[int, int], tuple[int, int]]) -> Callable[[Kernel, Any], Any]:
    def reverse(plain: Kernel, args: Any) -> Any:
        turned = list(args)
        for i, dim in places:
            turned[i] = turned[i].flip(dim)
        return plain(*turned)

    return reverse


def _reduction(place: int | None) -> Callable[[Kernel, Any], Any]:
    def reverse(plain: Kernel, args: Any) -> Any:
        found = args[place] if place is not None and len(args) > place else None
        dims = [found] if isinstance(found, int) else list(found or range(args[0].ndim))
        return plain(args[0].flip(dims), *args[1:])

    return reverse


def _softmax(plain: Kernel, args: Any) -> Any:
    if not args[0].ndim:
        return plain(*args)
    return plain(args[0].flip(args[1]), *args[1:]).flip(args[1])


_REVERSED = {
    **{name: _product(places) for name, places in _PRODUCTS.items()},
    **{name: _reduction(place) for name, place in _REDUCTIONS.items()},
    **dict.fromkeys(_SOFTMAXES, _softmax),
}


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
