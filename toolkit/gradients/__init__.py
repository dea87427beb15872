"""Questions about blocks, asked of any torch program."""

from toolkit.gradients.audit import Audit, audit
from toolkit.gradients.compare import BlockEffect, Comparison, Difference, compare
from toolkit.gradients.grad import grad
from toolkit.gradients.graph import Graph, graph
from toolkit.gradients.memory import MemoryUse, measure_memory

__all__ = [
    "Audit",
    "BlockEffect",
    "Comparison",
    "Difference",
    "Graph",
    "MemoryUse",
    "audit",
    "compare",
    "grad",
    "graph",
    "measure_memory",
]
