"""Stop-gradients that can be named, removed and measured."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
    from toolkit.gradients import Audit, AuditedStep, BlockEffect, Comparison, Verdict, audit, audited, compare

__all__ = [
    "Audit",
    "AuditedStep",
    "Block",
    "BlockEffect",
    "Comparison",
    "GradientFlowError",
    "Verdict",
    "audit",
    "audited",
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


def __getattr__(name: str) -> Any:
    """Import a name when it is first used: the command line can then answer before torch is there."""
    if name in ("blocks", "gradients"):
        return importlib.import_module(f"toolkit.{name}")
    if name in __all__:
        for room in (importlib.import_module("toolkit.blocks"), importlib.import_module("toolkit.gradients")):
            if hasattr(room, name):
                globals()[name] = found = getattr(room, name)
                return found
    raise AttributeError(f"module 'toolkit' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
