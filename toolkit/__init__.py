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

__all__ = [
    "Block",
    "block",
    "declared_blocks",
    "is_blocked",
    "scope",
    "stop_gradient",
    "stop_recording",
    "traced_blocks",
    "unblock",
]
