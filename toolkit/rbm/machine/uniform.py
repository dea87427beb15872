"""Uniform numbers for draws of binary units, the same for machines of every dtype."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["fill_uniform", "room_for_bits"]

# Numbers, and those of a row, from which on four of them from 64 random bits take less time than torch's own on a CPU.
_MANY, _WIDE = 2**13, 8


def fill_uniform(out: Tensor, generator: torch.Generator | None, bits: Tensor | None = None) -> Tensor:
    r"""Fill a tensor with uniform numbers from [0, 1), multiples of 2^-24, and return it.

    Random bits are most of the time of a large draw. So 64 of them give 16 bits to each of four numbers, and the C
    numbers of a row share their last 8 bits. Each number is uniform. Of two draws of zeros and ones in a row the
    covariance is at most 2^-34; the number of ones in it has at most 1 + C / 2^16 times the variance of independent
    draws.

    Args:
        out: (\*, C), float32, contiguous.
        generator: On the same device. None: torch's default generator.
        bits: int64, at least a quarter as long as `out`: memory that is overwritten. None: new memory.
    """
    n = out.numel()
    if not out.is_cpu or n < _MANY or out.shape[-1] < _WIDE:
        return out.uniform_(generator=generator)
    if bits is None:
        bits = torch.empty(room_for_bits(n), dtype=torch.int64, device=out.device)
    halves = bits[: room_for_bits(n)].random_(-(2**63), None, generator=generator).view(torch.int16)[:n]
    last = torch.randint(2**23, 2**23 + 2**8, (*out.shape[:-1], 1), generator=generator, device=out.device)
    return torch.add(last.to(out.dtype).mul_(2**-24), out.copy_(halves.view_as(out)), alpha=2**-16, out=out)


def room_for_bits(n: int) -> int:
    """Return the number of integers of 64 bits for n numbers."""
    return -(-n // 4)
