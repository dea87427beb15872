"""Questions about blocks, asked of any torch program."""

from toolkit.gradients.audit import Audit, audit
from toolkit.gradients.compare import BlockEffect, Comparison, Difference, compare
from toolkit.gradients.grad import grad
from toolkit.gradients.memory import MemoryUse, measure_memory

__all__ = [
    "Audit",
    "BlockEffect",
    "Comparison",
    "Difference",
    "MemoryUse",
    "audit",
    "compare",
    "grad",
    "measure_memory",
]
