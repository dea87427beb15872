"""The memory cost of the autograd graph: bytes kept alive, the peak of a step, and the savings of each block."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from toolkit.blocks import Gates, Site, gated, has_storage, opened
from toolkit.gradients._nodes import EVERY_BLOCK, leaves_in, reachable_nodes
from toolkit.gradients._parts import find_parts
from toolkit.gradients._program import checked_function, checked_loss, gradients_of
from toolkit.gradients._snapshot import Snapshot
from toolkit.gradients._zeros import with_memory
from toolkit.gradients.compare import text_table

__all__ = ["Ledger", "LedgerEntry", "MemoryUse", "measure_memory", "memory_ledger"]


@dataclass(frozen=True)
class MemoryUse:
    """Bytes of tensors that one training step allocates.

    Attributes:
        graph: Bytes alive after the forward pass, kept by the graph for the backward pass.
        peak: Largest number of bytes alive at once, in forward and backward pass.
    """

    graph: int
    peak: int


def measure_memory(loss: Callable[[], Tensor]) -> MemoryUse:
    """Run `loss` and its backward pass once, and return their memory use.

    The result counts the storages of all tensors that torch makes, on any device, referenced by Python or by the graph.
    Scratch memory inside of one operation is not seen. The program's state is restored.

    Raises:
        TypeError: If `loss` does not return a tensor.
        ValueError: If the loss is not a real scalar, is NaN or has no gradient.

    Example:
        >>> x = torch.ones(256, dtype=torch.float64, requires_grad=True)
        >>> measure_memory(lambda: (x * stop_gradient(x.exp().exp(), "doc.factor")).sum()).graph  # one factor, the loss
        2056
    """
    checked_function("loss", loss)
    return _measured(loss)


@dataclass(frozen=True)
class LedgerEntry:
    """Memory use with one block open, and with the block as a region.

    Attributes:
        name: The block.
        form: ``"tensor"`` for `stop_gradient`, ``"region"`` for `stop_recording`, ``"both"``.
        site: The place where the program first reaches the block: ``file:line:column``.
        open: Memory use with this block open, and all others in place. None if the program fails then.
        as_region: Memory use with a region around all computations whose results only this block uses. None if the
            block is a region already, or if this use cannot be measured: the block gets tensors of `torch.func`, a part
            is computed for a derivative inside of the forward pass, or two runs differ.
    """

    name: str
    form: Literal["tensor", "region", "both"]
    site: str
    open: MemoryUse | None
    as_region: MemoryUse | None


@dataclass(frozen=True)
class Ledger:
    """Bytes of one training step, for every block that it reaches. Made by `memory_ledger`; ``str`` is a table.

    Attributes:
        in_place: Memory use of the unchanged program, with every block in place.
        entries: The blocks, in the order of the program.
    """

    in_place: MemoryUse
    entries: tuple[LedgerEntry, ...]

    def __str__(self) -> str:
        head = f"every block in place: graph {_readable(self.in_place.graph)}, peak {_readable(self.in_place.peak)}"
        if not self.entries:
            return f"{head}\nno blocks were met"
        title = ("block", "form", "graph open", "peak open", "graph as region", "peak as region", "where")
        return f"{head}\n{text_table([title, *map(_row, self.entries)])}"

    def to_dict(self) -> dict[str, Any]:
        """Return the bytes as plain JSON."""
        return {"in_place": asdict(self.in_place), "entries": [asdict(entry) for entry in self.entries]}


def memory_ledger(loss: Callable[[], Tensor]) -> Ledger:
    """Measure the memory of a training step in bytes, with every block in place and with each one open.

    `stop_gradient` frees the graph behind it only after the graph was recorded, so the peak is the same as without the
    block. `stop_recording` records no graph, so it lowers the peak too. For each `stop_gradient` the ledger also
    measures a `stop_recording` in its place, by a run in which the nodes that lead only to blocks keep no tensor. The
    program runs up to twice per block, and its state is restored.

    Raises:
        TypeError: If `loss` does not return a tensor.
        ValueError: If the loss is not a real scalar, is NaN or has no gradient.

    Example:
        >>> x = torch.ones(256, dtype=torch.float64, requires_grad=True)
        >>> ledger = memory_ledger(lambda: (x * stop_gradient(x.exp().exp().exp(), "doc.factor")).sum())
        >>> (entry,) = ledger.entries
        >>> ledger.in_place, entry.as_region  # three factors at once, or two
        (MemoryUse(graph=2056, peak=6144), MemoryUse(graph=2056, peak=4112))
    """
    checked_function("loss", loss)
    roll = _Roll()
    parts = find_parts(loss)
    with Snapshot(parts, {}).set_aside(), torch.enable_grad():
        roll.start = _next_number()
        with gated(roll):
            value = checked_loss(loss())
        roll.end = _next_number()
        needed = set(reachable_nodes(value.grad_fn, EVERY_BLOCK))
    alone = {name: _numbers_alone(met, needed, roll.start) for name, met in roll.met.items()}
    length = roll.end - roll.start
    forms = {name: (met.form, str(met.site)) for name, met in roll.met.items()}
    del value, needed, roll  # the nodes of a living graph are not counted, but its tensors are
    entries = []
    for name, (form, site) in forms.items():
        entries.append(LedgerEntry(name, form, site, _opened(loss, name), _as_region(loss, alone[name], length)))
    return Ledger(_measured(loss), tuple(entries))


def _opened(loss: Callable[[], Tensor], name: str) -> MemoryUse | None:
    try:
        with opened(name):
            return _measured(loss)
    except Exception:  # not every program runs without its blocks
        return None


def _measured(loss: Callable[[], Tensor], around: AbstractContextManager[Any] | None = None) -> MemoryUse:
    parts = find_parts(loss)
    live = LiveBytes()
    with Snapshot(parts, {}).set_aside(), torch.enable_grad(), live, around or nullcontext():
        value = checked_loss(loss())
        graph = live.now
        nodes = reachable_nodes(value.grad_fn, EVERY_BLOCK)
        leaves = leaves_in(nodes)
        gradients_of(value, leaves)
    return MemoryUse(graph=graph, peak=live.peak)


# --- what a region would save ------------------------------------------------------------------------------------

_next_number: Callable[[], int] = torch._C._autograd._get_sequence_nr


@dataclass
class _Met:
    form: Literal["tensor", "region", "both"]
    site: Site
    sources: list[Any] = field(default_factory=list)
    is_plain: bool = True


@dataclass
class _Roll(Gates):
    """Replaces every block, stops gradients like it, and notes the blocks and the nodes that lead to them."""

    met: dict[str, _Met] = field(default_factory=dict)
    start: int = 0
    end: int = 0

    def tensor(self, input: Tensor, name: str, site: Site) -> None:
        """Keep the node that made a tensor before it is stopped."""
        met = self._meet(name, "tensor", site)
        if torch._C._functorch.is_functorch_wrapped_tensor(input):
            met.is_plain = False
        elif input.grad_fn is not None:
            met.sources.append(input.grad_fn)

    def region(self, name: str, site: Site, *, both_modes: bool) -> None:
        """Note a region, which stays a region."""
        self._meet(name, "region", site)

    def _meet(self, name: str, form: Literal["tensor", "region"], site: Site) -> _Met:
        met = self.met.setdefault(name, _Met(form, site))
        if met.form != form:
            met.form = "both"
        return met


def _numbers_alone(met: _Met, needed: set[Any], start: int) -> frozenset[int] | None:
    """Return the numbers, since the start, of the nodes that lead only to blocks; None if they are not known."""
    if met.form == "region" or not met.is_plain:
        return None
    nodes = {node for source in met.sources for node in reachable_nodes(source, EVERY_BLOCK)} - needed
    return frozenset(node._sequence_nr() - start for node in nodes)


class _Needed(Exception):
    """The backward pass needs a tensor that a region would not have kept."""


def _as_region(loss: Callable[[], Tensor], alone: frozenset[int] | None, length: int) -> MemoryUse | None:
    """Measure a run in which these nodes keep no tensor."""
    if alone is None:
        return None
    start = _next_number()

    def keep(tensor: Tensor) -> Tensor | None:
        # A node gets its number before it saves its tensors. A view is saved, because the tensor could hold the node.
        return None if _next_number() - 1 - start in alone else tensor.detach()

    def give(kept: Tensor | None) -> Tensor:
        if kept is None:
            raise _Needed
        return kept

    def counted() -> Tensor:
        value = loss()
        if _next_number() - start != length:
            raise _Needed
        return value

    try:
        return _measured(counted, saved_tensors_hooks(keep, give))
    except (_Needed, RuntimeError):  # derivatives of `torch.func` refuse hooks on saved tensors
        return None


def _row(entry: LedgerEntry) -> tuple[str, ...]:
    sizes = [[_readable(use.graph), _readable(use.peak)] if use else ["", ""] for use in (entry.open, entry.as_region)]
    return (entry.name, entry.form, *sizes[0], *sizes[1], entry.site)


def _readable(size: int) -> str:
    scaled, units = float(size), ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while scaled >= 1024 and len(units) > 1:
        scaled, units = scaled / 1024, units[1:]
    return f"{scaled:.4g} {units[0]}"


# --- counting ----------------------------------------------------------------------------------------------------


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages made while it is active, until the last reference to each is gone."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        args, kwargs = with_memory(args, kwargs)
        result = func(*args, **kwargs)
        given = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if has_storage(leaf)}
        for leaf in tree_leaves(result):
            if has_storage(leaf):
                self._count(leaf.untyped_storage(), given)
        return result

    def _count(self, storage: torch.UntypedStorage, given: set[int]) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in given or key in self._known:
            return
        self._known.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size
