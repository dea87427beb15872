"""Turns the calls that stop gradients in code without blocks into blocks, for the length of an audit.

``x.detach()`` becomes ``stop_gradient(x, <file:line:column>)``, ``with torch.no_grad():`` becomes ``stop_recording``,
and so on. The attributes of torch's classes are replaced for that, because a `TorchFunctionMode` does not see calls
inside of functions of `torch.nn.functional`. The replacements act in one thread, and only on calls from user code,
third-party packages, `torch.nn` and `torch.distributions`; torch's own internals keep the originals. All attributes are
restored, also after an error.
"""

from __future__ import annotations

import threading
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from types import BuiltinFunctionType, CellType
from typing import Any, Protocol

import torch
from torch import Tensor

from toolkit.gradients.audit._regions import RegionStops
from toolkit.gradients.audit._tensors import TensorStops
from toolkit.gradients.audit._watch import Watch, watching
from toolkit.gradients.audit.places import BareBlocks, Replacement

__all__ = ["HasStorages", "refuse_another", "replaced"]

# Functions that user code may have bound to a name before the replacement: then only a mode sees the call.
_BOUND_EARLIER: tuple[tuple[Any, Any, str], ...] = (
    (torch._C.TensorBase.detach, Tensor, "detach"),
    (torch.detach, Tensor, "detach"),
    (torch.ops.aten.detach, Tensor, "detach"),
    (torch.ops.aten.detach.default, Tensor, "detach"),
    (torch._C.TensorBase.detach_, Tensor, "detach_"),
    (torch.detach_, Tensor, "detach_"),
    (torch.ops.aten.detach_, Tensor, "detach_"),
    (torch.ops.aten.detach_.default, Tensor, "detach_"),
    (torch.tensor, torch, "tensor"),
    (torch._C.TensorBase.new_tensor, Tensor, "new_tensor"),
    (torch.asarray, torch, "asarray"),
)

# One audit at a time: the replaced attributes are those of the whole process.
_one_audit = threading.Lock()
_ANOTHER = "`audit` should run once at a time in a process. Found another one running."


class HasStorages(Protocol):
    """A program that knows the memory of its tensors."""

    def storages(self) -> Container[int]:
        """Return the memory, by the address of each storage."""


def refuse_another() -> None:
    """Raise RuntimeError if another audit is running in this process."""
    if _one_audit.locked():
        raise RuntimeError(_ANOTHER)


@contextmanager
def replaced(bare: BareBlocks, program: HasStorages | None = None) -> Iterator[None]:
    """Replace torch's attributes for the length of a ``with`` that runs a program, so that its stops are `bare`.

    Raises:
        RuntimeError: If another audit is running in this process.
    """
    outer = bare.region, bare.here, bare.state
    bare.region, bare.here, bare.state = None, None, program.storages() if program else frozenset()
    bare.closed = ()
    if bare.is_active:  # a run of the program between derivatives of an earlier one
        try:
            yield
        finally:
            bare.region, bare.here, bare.state = outer
        return
    if not _one_audit.acquire(blocking=False):
        raise RuntimeError(_ANOTHER)
    bare.is_active = True
    try:
        with _attributes([*TensorStops(bare).replacements(), *RegionStops(bare).replacements(), *watching(bare)]):
            bare.bound_earlier = {original: getattr(owner, name) for original, owner, name in _BOUND_EARLIER}
            with Watch(bare):
                yield
    finally:
        bare.is_active = False
        _one_audit.release()


@contextmanager
def _attributes(attributes: Iterable[Replacement]) -> Iterator[None]:
    """Replace attributes of owners by functions of their values; restore them at the end."""
    originals = []
    try:
        for owner, name, make in attributes:
            original = getattr(owner, name) if isinstance(owner, CellType) else owner.__dict__.get(name)
            if owner is Tensor and name == "data":
                inherited = torch._C.TensorBase.__dict__["data"]
            else:
                inherited = original.__func__ if isinstance(original, staticmethod) else getattr(owner, name, None)
            originals.append((owner, name, original))
            new = make(inherited)
            is_unbound = isinstance(owner, type) and isinstance(original, (BuiltinFunctionType, staticmethod))
            setattr(owner, name, staticmethod(new) if is_unbound else new)
        yield
    finally:
        for owner, name, original in reversed(originals):
            if original is not None:
                setattr(owner, name, original)
            elif name in owner.__dict__:
                delattr(owner, name)
