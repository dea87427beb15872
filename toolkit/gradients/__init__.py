"""Measure the effect of blocks and bare stops in any torch program."""

from toolkit.gradients.aliases import AliasWarning, alias_guard
from toolkit.gradients.audit import Audit, AuditedStep, audit, audited
from toolkit.gradients.check import gradcheck, gradgradcheck
from toolkit.gradients.compare import Comparison, compare
from toolkit.gradients.field import Field, field_jacobian
from toolkit.gradients.grad import grad
from toolkit.gradients.graph import Graph, graph
from toolkit.gradients.memory import Ledger, LedgerEntry, MemoryUse, measure_memory, memory_ledger
from toolkit.gradients.modes import ModeFinding, ModeReport, mode_lint
from toolkit.gradients.verdict import BlockEffect, Difference, Verdict

__all__ = [
    "AliasWarning",
    "Audit",
    "AuditedStep",
    "BlockEffect",
    "Comparison",
    "Difference",
    "Field",
    "Graph",
    "Ledger",
    "LedgerEntry",
    "MemoryUse",
    "ModeFinding",
    "ModeReport",
    "Verdict",
    "alias_guard",
    "audit",
    "audited",
    "compare",
    "field_jacobian",
    "grad",
    "gradcheck",
    "gradgradcheck",
    "graph",
    "measure_memory",
    "memory_ledger",
    "mode_lint",
]
