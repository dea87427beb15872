"""Parameters as one flat vector: the leaves of a mixture, side by side.

P coordinates.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

__all__ = ["Layout", "flat"]


class Layout:
    """The places of named leaves in a flat vector (P,)."""

    def __init__(self, leaves: Mapping[str, Tensor]) -> None:
        self._shapes = {name: leaf.shape for name, leaf in leaves.items()}
        self._sizes = [leaf.numel() for leaf in leaves.values()]

    def leaves(self, position: Tensor) -> dict[str, Tensor]:
        """Return the leaves, by name, as views of a vector (P,)."""
        parts = zip(self._shapes.items(), position.split(self._sizes), strict=True)
        return {name: part.view(shape) for (name, shape), part in parts}


def flat(leaves: Mapping[str, Tensor]) -> Tensor:
    """Return leaves as a vector (P,), float64."""
    return torch.cat([leaf.reshape(-1) for leaf in leaves.values()]).double()
