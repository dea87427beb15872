"""Stop-gradients that can be named, removed and measured."""

from toolkit.blocks import (
    Block,
    GradientFlowError,
    block,
    declared_blocks,
    is_blocked,
    scope,
    stop_gradient,
    stop_recording,
    traced_blocks,
    unblock,
)
from toolkit.gradients import Audit, BlockEffect, Comparison, audit, compare

__all__ = [
    "Audit",
    "Block",
    "BlockEffect",
    "Comparison",
    "GradientFlowError",
    "audit",
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
