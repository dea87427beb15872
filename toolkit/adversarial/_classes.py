"""One check of labels and targets, for attacks, losses and certificates: a wrong kind is refused, never converted.

N samples, C classes.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["check_classes"]


def check_classes(name: str, classes: object, n: int, n_classes: int | None = None) -> Tensor:
    """Return classes of the samples, (N,), as an int64 index: torch reads bytes as a mask, and few other widths.

    Args:
        name: The name of the argument.
        classes: Its value, (N,), integers of any width.
        n: N.
        n_classes: C. None: unknown so far.

    Raises:
        TypeError: If `classes` is not a tensor of integers.
        ValueError: If there is not one entry for each sample, or an entry is not a class.
    """
    if not isinstance(classes, Tensor):
        raise TypeError(f"`{name}` should be a tensor of integers. Found {type(classes).__name__}.")
    if classes.shape != (n,):
        one_hot = f" Classes of one-hot rows: `{name}.argmax(1)`." if classes.dim() == 2 and len(classes) == n else ""
        raise ValueError(f"`{name}` should have shape ({n},). Found {tuple(classes.shape)}.{one_hot}")
    if classes.is_floating_point() or classes.is_complex() or classes.dtype == torch.bool:
        raise TypeError(f"`{name}` should be integers. Found {classes.dtype}.")
    index = classes.long()
    if n_classes is not None and n:
        least, most = (int(side) for side in index.aminmax())
        if not 0 <= least <= most < n_classes:
            raise ValueError(f"`{name}` should be from 0 to {n_classes - 1}. Found {least} to {most}.")
    return index
