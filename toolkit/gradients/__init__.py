"""Questions about blocks, asked of any torch program."""

from toolkit.gradients.compare import BlockEffect, Comparison, compare

__all__ = ["BlockEffect", "Comparison", "compare"]
