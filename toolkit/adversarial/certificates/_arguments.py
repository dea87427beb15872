"""The check of labels, common to all certificates: a wrong kind raises an error and is never converted.

N samples, C classes.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["class_labels"]


def class_labels(labels: object, x: Tensor, n_classes: int) -> Tensor:
    """Return the labels as an int64 index: torch reads bytes as a mask, and rejects most other widths.

    Args:
        labels: (N,), integers of any width.
        x: (N, ...).
        n_classes: C.

    Raises:
        TypeError: If `labels` is not a tensor of integers.
        ValueError: If `labels` does not have one entry for each sample, or an entry is not a class.
    """
    if not isinstance(labels, Tensor):
        raise TypeError(f"`labels` should be a tensor of integers. Found {type(labels).__name__}.")
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise TypeError(f"`labels` should be integers. Found {labels.dtype}.")
    if labels.shape != x.shape[:1]:
        raise ValueError(f"`labels` should have shape ({len(x)},). Found {tuple(labels.shape)}.")
    index = labels.long()
    if len(index) and not (index.min() >= 0 and index.max() < n_classes):
        raise ValueError(f"`labels` should be from 0 to {n_classes - 1}. Found {index.min()} to {index.max()}.")
    return index
