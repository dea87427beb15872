"""The backward recursion of returns, advantages and traces.

Leading dimensions (*) are batches, T times.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["discounted_sums"]

# Up to here one small operation for each time is faster than a few passes over all times.
_FEW = 48


def discounted_sums(x: Tensor, decay: Tensor, last: Tensor | None = None) -> Tensor:
    r"""Return ``y_t = x_t + decay_t y_{t+1}``, with ``y_{T+1} = 0``.

    Args:
        x: (\*, T), at least one time.
        decay: (\*, T); the last one does not matter.
        last: ``y_T`` in place of ``x_T``, (\*, 1). A compiled recursion is slow behind a concatenation.
    """
    if x.shape[-1] <= _FEW:
        return _one_by_one(x, decay, x[..., -1:] if last is None else last)
    return _by_doubling(x if last is None else torch.cat([x[..., :-1], last], -1), decay)


def _one_by_one(x: Tensor, decay: Tensor, last: Tensor) -> Tensor:
    xs, decays = x.unbind(-1), decay.unbind(-1)
    found = [last.squeeze(-1)]
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
