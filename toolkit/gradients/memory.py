"""What the autograd graph costs in memory: bytes it keeps alive, and the peak of a training step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from toolkit.gradients._gates import EVERY_BLOCK, reachable_nodes
from toolkit.gradients._snapshot import Snapshot, find_parts
from toolkit.gradients.compare import checked_loss

__all__ = ["MemoryUse", "measure_memory"]


@dataclass(frozen=True)
class MemoryUse:
    """Bytes of tensors that one training step makes, beyond what existed before it.

    Attributes:
        graph: Alive when the loss is known, because the graph needs them for the backward pass.
        peak: Alive at once at most, forward and backward pass together.
    """

    graph: int
    peak: int


def measure_memory(loss: Callable[[], Tensor]) -> MemoryUse:
    """Run `loss` and its backward pass once, and return what they allocate.

    Counts the storages of every tensor that torch makes, on any device, whether Python or the graph holds it; scratch
    memory inside of one operation is not seen. The program is left as it was found.

    Raises:
        TypeError: If `loss` does not return a tensor.
        ValueError: If the loss is not a real scalar, is not a number or has no gradient.

    Example:
        >>> x = torch.ones(256, dtype=torch.float64, requires_grad=True)
        >>> measure_memory(lambda: (x * stop_gradient(x.exp().exp(), "doc.factor")).sum()).graph  # one factor, the loss
        2056
    """
    parts = find_parts(loss)
    live = _LiveBytes()
    with Snapshot(parts, {}).set_aside(), torch.enable_grad(), live:
        value = checked_loss(loss())
        graph = live.now
        nodes = reachable_nodes(value.grad_fn, EVERY_BLOCK)
        leaves = [node.variable for node in nodes if hasattr(node, "variable")]
        torch.autograd.grad(value, leaves, allow_unused=True)
    return MemoryUse(graph=graph, peak=live.peak)


class _LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages made while it is active, until the last reference to each is gone."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
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


def has_storage(leaf: Any) -> bool:
    """Say whether something is a tensor whose memory can be told: strided, and no wrapper of `torch.func`."""
    return (
        isinstance(leaf, Tensor)
        and leaf.layout is torch.strided
        and not torch._C._functorch.is_functorch_wrapped_tensor(leaf)
    )
