"""Stop-gradients that can be named, removed and measured."""

from toolkit.blocks import (
    Block,
    block,
    declared_blocks,
    is_blocked,
    scope,
    stop_gradient,
    stop_recording,
    traced_blocks,
    unblock,
)
from toolkit.gradients import BlockEffect, Comparison, compare

__all__ = [
    "Block",
    "BlockEffect",
    "Comparison",
    "block",
    "compare",
    "declared_blocks",
    "is_blocked",
    "scope",
    "stop_gradient",
    "stop_recording",
    "traced_blocks",
    "unblock",
]
