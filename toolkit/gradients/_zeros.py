"""Zeros that take no memory, which forward-mode derivatives make: torch crashes on them under a dispatch mode.

Under a dispatch mode `aten.mul.Scalar` of such a tensor calls itself without end (torch 2.13, 2.14).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

__all__ = ["with_memory"]


def with_memory(args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Return the arguments of an operation, with zeros in memory in the place of those without."""
    given = (args, kwargs or {})
    if any(isinstance(leaf, Tensor) and leaf._is_zerotensor() for leaf in tree_leaves(given)):
        given = tree_map_only(Tensor, lambda leaf: leaf.clone() if leaf._is_zerotensor() else leaf, given)
    return given
