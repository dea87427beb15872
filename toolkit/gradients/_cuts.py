"""Cuts: blocks of a program that runs only once, and goes on afterwards as if nobody had watched."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from toolkit.blocks import Site, carries_gradient
from toolkit.gradients._gates import EVERY_BLOCK, Cut, GateBoard, Meeting, gate_of, next_number, reachable_nodes

__all__ = ["CutBoard"]

_HOOKED = "toolkit.gradients.hooked"


class CutBoard(GateBoard):
    """Cuts instead of gates, for a program that runs once and goes on afterwards.

    Nothing behind a cut runs in the program's own backward passes, as nothing runs behind a detached tensor. Regions
    are recorded.

    Attributes:
        earlier: Blocks that stopped a tensor of an earlier graph, which may be freed, and were left in place.
        first: The number of the first node.
        latest: The block met last.
    """

    def __init__(self) -> None:
        """Record from now on."""
        super().__init__(records=True)
        self.earlier: set[str] = set()
        self.first, self.latest = next_number(), ""
        self._anchor = torch.empty((), requires_grad=True)

    def tensor(self, input: Tensor, name: str, site: Site) -> Tensor | None:
        """Return `input` behind a cut; None if it should be stopped."""
        carries = carries_gradient(input)
        if self._in_forward:
            meeting = self.meetings.setdefault(name, Meeting(site))
            meeting.calls += 1
            meeting.carried += carries
        if not carries or not torch.is_grad_enabled():
            return None
        if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
            self.inner.add(name)
            return None
        if self.is_earlier(get_gradient_edge(input).node):
            self.earlier.add(name)
            return None
        self.latest = name
        return super(torch.autograd.Function, Cut).apply(self._anchor, (input,), name)  # type: ignore[no-any-return, no-untyped-call]

    def is_earlier(self, node: Any) -> bool:
        """Return whether a node was made before the recording, and may be freed."""
        return not hasattr(node, "variable") and node._sequence_nr() < self.first

    def hook(self, tensor: Tensor) -> None:
        """Note that a tensor gets a hook, which may act nonlinearly on cotangents."""
        node: Any = get_gradient_edge(tensor).node
        node.metadata[_HOOKED] = True

    def is_hooked(self, node: Any) -> bool:
        """Return whether the program has set a hook on the result of this node."""
        return _HOOKED in node.metadata

    @contextmanager
    def of_the_program(self) -> Iterator[None]:
        """Let the program take a backward pass of its own."""
        outer, self._in_forward = self._in_forward, False
        try:
            with self.backward(()):
                yield
        finally:
            self._in_forward = outer

    def derive(self, *roots: Tensor) -> None:
        """Prepare for a derivative that the program takes: blocks that it meets are `inner`."""
        super().derive(*roots)
        if self._in_forward:
            for root in roots:
                for node in () if root.grad_fn is None else reachable_nodes(root.grad_fn, EVERY_BLOCK):
                    self.inner |= gate_of(node)

    def region(self, name: str, site: Site, *, both_modes: bool) -> AbstractContextManager[None] | None:
        """Record a region."""
        self.latest = name
        return super().region(name, site, both_modes=both_modes)
