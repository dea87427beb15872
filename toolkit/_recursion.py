"""The backward recursion of returns, advantages and traces.

Leading dimensions (*) are batches, T times.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["discounted_sums"]

# Up to here one small operation for each time is faster than a few passes over all times.
_FEW = 48


def discounted_sums(x: Tensor, decay: Tensor) -> Tensor:
    r"""Return ``y_t = x_t + decay_t y_{t+1}``, with ``y_{T+1} = 0``.

    Args:
        x: (\*, T), at least one time.
        decay: (\*, T); the last one does not matter.
    """
    return _one_by_one(x, decay) if x.shape[-1] <= _FEW else _by_doubling(x, decay)


def _one_by_one(x: Tensor, decay: Tensor) -> Tensor:
    xs, decays = x.unbind(-1), decay.unbind(-1)
    found = [xs[-1]]
    for t in range(len(xs) - 2, -1, -1):
        found.append(torch.addcmul(xs[t], decays[t], found[-1]))
    found.reverse()
    return torch.stack(found, -1)


def _by_doubling(x: Tensor, decay: Tensor) -> Tensor:
    """Return the same in log2 T passes: a sum over 2 s times is one over s times and a decayed one over the next s."""
    step, length = 1, x.shape[-1]
    while step < length:
        decay = decay[..., : length - step]
        x = torch.cat([torch.addcmul(x[..., :-step], decay, x[..., step:]), x[..., -step:]], -1)
        decay = decay[..., :-step] * decay[..., step:] if 2 * step < length else decay
        step *= 2
    return x
