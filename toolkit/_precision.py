"""Choice of the precision of matrix products, by a short timing for each size."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["bfloat16_is_faster"]

_REPEATS = 5
_WORTH = 0.8  # of the time: a smaller gain is not worth the digits, nor sure


@functools.cache
def bfloat16_is_faster(n_rows: int, n_inputs: int, n_outputs: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether a matrix product with rounding to bfloat16 takes less than 0.8 of the time of one in `dtype`.

    A processor with AMX, or a GPU with tensor cores, is faster; one with AVX512-BF16 alone is not.

    Args:
        n_rows: N of the product (N, D) (D, H).
        n_inputs: Number of inputs, D.
        n_outputs: Number of outputs, H.
        dtype: Floating-point type of the factors and of the product.
        device: Their device.
    """
    factor = torch.ones(n_rows, n_inputs, dtype=dtype, device=device)
    weights = torch.ones(n_inputs, n_outputs, dtype=dtype, device=device)
    rounded = weights.bfloat16()
    return _seconds(lambda: (factor.bfloat16() @ rounded).to(dtype)) < _WORTH * _seconds(lambda: factor @ weights)


def _seconds(run: Callable[[], Tensor]) -> float:
    """Return the shortest time of a few runs, after a warm-up."""
    times = []
    for _ in range(_REPEATS + 1):
        begun = time.perf_counter()
        float(run()[0, 0])  # an accelerator is waited for
        times.append(time.perf_counter() - begun)
    return min(times[1:])
