"""Audits of code that was not written with blocks: every ``detach``, ``no_grad`` and similar call, and its effect."""

from toolkit.gradients.audit.answer import Audit, Unopened
from toolkit.gradients.audit.losses import HIDDEN_CHANGE, audit
from toolkit.gradients.audit.steps import AuditedStep, audited

__all__ = ["HIDDEN_CHANGE", "Audit", "AuditedStep", "Unopened", "audit", "audited"]
