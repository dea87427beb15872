"""The effect of every `detach`, `no_grad` and similar call in unmodified code on the gradient."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from toolkit.blocks import Block, Site
from toolkit.gradients._endings import by_module
from toolkit.gradients._program import Parameters
from toolkit.gradients.audit.places import BareBlocks, Escape
from toolkit.gradients.compare import Comparison, html_table, text_table
from toolkit.gradients.graph import Graph, graph_of
from toolkit.gradients.verdict import BlockEffect, are_close

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["HIDDEN_CHANGE", "Audit", "Unopened", "audit"]

HIDDEN_CHANGE = "the memory is changed where autograd cannot see it: the gradient is that of other values"
"""The reason to leave a ``.data`` closed if an in-place change through it made the plain gradient wrong."""


@dataclass(frozen=True)
class Unopened:
    """A place that stops the gradient and could not be opened.

    Attributes:
        kind: The call, for example ``"no_grad"``.
        site: The place.
        reason: The reason why it could not be opened.
    """

    kind: str
    site: str
    reason: str


class Audit:
    """The effect of every place of a program that stops a gradient. Made by `audit`.

    Attributes:
        valid: Whether the audited program, with every place closed, gave the loss and all gradients of the plain
            program bit for bit. If not, all other results are unreliable.
        reason: The reason why the audit is not valid; empty if it is.
        loss: The loss of the plain program.
        blocked: Parameter -> gradient of the plain program.
        effects: The effect of opening each place alone, in the order of the program. A place is named
            ``file:line:column``; named blocks are included.
        kinds: Place -> the call that stops the gradient.
        unopened: Places that could not be opened, with reasons.
        escapes: Places where a value leaves the graph for good (``.item()``, ``.numpy()``) and cannot be opened.
        sites: Place -> its file, line, column and function; also for places that could not be opened.
        remarks: Further remarks for the reader.
        unreached: Parameter -> the end of its path, for parameters without a path to the loss even with every place
            open, for example ``argmax`` or ``requires_grad_(False)``; empty if the end cannot be seen.
        sets: Effects of places that act only together, as `Comparison.sets`.
        one_mode: Places that only stop reverse mode while a forward-mode derivative passes: `torch.no_grad`.
    """

    valid: bool
    reason: str
    loss: float
    blocked: dict[str, Tensor]
    effects: list[BlockEffect]
    kinds: dict[str, str]
    unopened: list[Unopened]
    escapes: list[Escape]
    sites: dict[str, Site]
    remarks: list[str]
    one_mode: list[str]
    unreached: dict[str, str]
    sets: list[BlockEffect]

    def __init__(self, loss: Callable[[], Tensor], params: Parameters) -> None:
        """Run `loss`; see `audit`."""
        bare = BareBlocks()
        with bare.replaced():  # raises an error inside of another audit
            pass
        self._comparison = comparison = Comparison(
            loss, params, None, around=bare.replaced, spare=bare.spare, nested=bare.nested
        )
        self.reason, self.valid = comparison.reason, not comparison.reason
        self.loss, self.blocked, self.effects = comparison.loss, comparison.blocked, comparison.effects
        self.kinds = {**dict.fromkeys(comparison.meetings, "stop_gradient"), **bare.kinds}
        self.remarks = list(comparison.remarks)
        if bare.elsewhere:
            self.remarks.append(f"in another thread, and not looked into: {', '.join(bare.elsewhere)}")
        if kept := self._kept_from_earlier_calls():
            self.remarks.append(f"kept from an earlier call, and not audited: {', '.join(kept)}")
        reasons = {**comparison.unopened, **bare.real}
        self._explain_hidden_changes(reasons)
        reasons |= {place: reason for place, reason in bare.partly.items() if place not in reasons}
        self.unopened = [Unopened(self.kinds[place], place, reason) for place, reason in reasons.items()]
        self.escapes = list(bare.escapes)
        self.one_mode = list(bare.one_mode)
        self.sets = comparison.sets
        self.unreached = {} if self.reason else comparison.endings(bare.user_site)
        self.sites = {name: meeting.site for name, meeting in comparison.meetings.items()} | bare.sites

    def gradient(self, open: Collection[Block | str]) -> dict[str, Tensor]:
        """Return parameter -> gradient while exactly these places are open, as `Comparison.gradient`."""
        return self._comparison.gradient(open)

    def effect(self, open: Collection[Block | str]) -> BlockEffect:
        """Return the effect of opening these places together, as `Comparison.effect`."""
        return self._comparison.effect(open)

    def attribution(self) -> dict[frozenset[str], dict[str, Tensor]]:
        """Split the gradient by the places that each path crosses, as `Comparison.attribution`."""
        return self._comparison.attribution()

    def __getitem__(self, place: Block | str) -> BlockEffect:
        return self._comparison[place]

    def graph(self) -> Graph:
        """Return the autograd graph with these places as its cuts. The program is run once more."""
        return graph_of(self._comparison.program, self._comparison.parameters)

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the gradients as plain JSON."""
        return {
            "valid": self.valid,
            "reason": self.reason,
            **self._comparison.to_dict(),
            "loss": self.loss if math.isfinite(self.loss) else None,
            "kinds": self.kinds,
            "unopened": [vars(entry) for entry in self.unopened],
            "remarks": self.remarks,
            "escapes": [vars(entry) for entry in self.escapes],
            "one_mode": self.one_mode,
            "unreached": self.unreached,
        }

    def plot(self) -> Figure:
        """Return a figure: for every place, size and direction of its gradient relative to the blocked one."""
        return self._comparison.plot()

    def __str__(self) -> str:
        lines = [] if self.valid else [f"INVALID: {self.reason}"]
        nothing = "nothing that could be opened stops a gradient" if self.unreached else "nothing stops a gradient"
        table = text_table(self.rows()) if self.effects else nothing
        return "\n".join([*lines, self._comparison.head(), table, *self._comparison.misleading(), *self.notes()])

    def _repr_html_(self) -> str:
        head = "" if self.valid else f"<p><strong>Invalid:</strong> {html.escape(self.reason)}</p>"
        notes = [*self._comparison.misleading(), *self.notes()]
        return head + html_table(self.rows()) + "".join(f"<p>{html.escape(note)}</p>" for note in notes)

    def __repr__(self) -> str:
        state = "valid" if self.valid else f"INVALID: {self.reason}"
        return f"Audit({state}, loss {self.loss:.6g}, {len(self.effects)} places, {len(self.unopened)} not opened)"

    def rows(self, order: str = "auto") -> list[tuple[str, ...]]:
        """Return the table of the effects as text, the names of its columns first; `order` as `Comparison.rows`."""
        head, *rows = self._comparison.rows(order)
        partly = {entry.site for entry in self.unopened}
        kinds = {**self.kinds, **dict.fromkeys((found.name for found in self.sets), "together")}
        named = [(name, kinds[name] + ", in part" * (name in partly), *cells) for name, *cells in rows]
        return [tuple(row[:-1]) for row in [("where", "what", *head[1:]), *named]]

    def notes(self) -> list[str]:
        """Return a line for each place that could not be opened, and for each effect without a place."""
        notes = self.remarks + [f"not opened: {entry.kind} at {entry.site}: {entry.reason}" for entry in self.unopened]
        notes += [f"leaves the graph: {escape.kind} at {escape.site}" for escape in self.escapes]
        return [*notes, *by_module(self.unreached, self.blocked)] + [
            f"stops reverse mode alone: {self.kinds[site]} at {site}: a forward-mode derivative passes"
            for site in self.one_mode
        ]

    def _kept_from_earlier_calls(self) -> list[str]:
        """Name the values that were computed from parameters before this run, with stops that nobody saw.

        They are tensors that the program reads: with a graph, or in the memory of a parameter, without its gradient.
        """
        program, parameters = self._comparison.program, self._comparison.parameters.values()
        cached = [f"the results of {name}" for name in program.parts.cached]
        memory = {_memory(parameter) for parameter in parameters} - {None}
        suspects = {
            name: tensor
            for name, tensor in program.parts.tensors.items()
            if tensor.grad_fn is not None or (not tensor.requires_grad and _memory(tensor) in memory)
        }
        if not suspects or self.reason:
            return cached
        with program.aside(around=False), _Reads(suspects) as reads:
            program.run()
        return [*cached, *(f"`{name}`" for name in reads.found)]

    def _explain_hidden_changes(self, reasons: dict[str, str]) -> None:
        """Find out whether changes in place through ``.data`` have made the plain gradient wrong."""
        suspects = [place for place in reasons if self.kinds[place] == ".data"]
        if not suspects or not self.valid:
            return
        # As if each saved value had not changed since it was saved.
        with saved_tensors_hooks(lambda tensor: tensor.clone(), lambda kept: kept):
            honest = self._comparison.program.answer(self._comparison.parameters, around=False).gradients
        if not are_close(honest, self.blocked):
            reasons |= dict.fromkeys(suspects, HIDDEN_CHANGE)


class _Reads(TorchFunctionMode):
    """Sees which of some tensors a program computes with.

    Attributes:
        found: Their names.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.found: dict[str, None] = {}
        self._names = {id(tensor): name for name, tensor in tensors.items()}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(isinstance(leaf, Tensor) for leaf in tree_leaves(result)):  # and not a shape, say
            read = (self._names.get(id(leaf)) for leaf in tree_leaves((args, kwargs)))
            self.found.update(dict.fromkeys(name for name in read if name is not None))
        return result


def _memory(tensor: Tensor) -> int | None:
    """Return where a tensor keeps its numbers; None if they are not in one place."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else None


def audit(loss: Callable[[], Tensor], params: Parameters = None) -> Audit:
    """Find every place in unmodified code that stops a gradient, and measure its effect, as `compare` does for blocks.

    These places are ``detach``, ``detach_``, ``.data``, ``torch.tensor(x)``, ``new_tensor``, ``no_grad`` and
    ``inference_mode`` (also as decorators), ``set_grad_enabled``, in your code, in third-party packages and inside
    `torch.nn`. One forward pass opens each place separately. Places that cannot be opened are listed.

    With every place closed the loss and all gradients must equal those of a plain run, bit for bit. If recording a
    place changes them, the place keeps its meaning and is listed. If they still differ, the result is marked as not
    valid, with the reason. Parameters, buffers, ``.grad``, modes and random state are restored, and so are torch's
    attributes, which are replaced while the program runs. Compiled functions run in eager mode.

    Args:
        loss: Runs the program and returns its loss, a real scalar. It should not update parameters.
        params: The parameters to differentiate by: a module, a dict, an iterable of tensors, a tensor, or None for
            every leaf that the loss depends on.

    Raises:
        TypeError: As for `compare`.
        ValueError: As for `compare`.
        RuntimeError: If another audit is running in this process.

    Example:
        >>> w = torch.tensor(3.0, requires_grad=True)
        >>> found = audit(lambda: w * (w * w).detach() + w.detach(), {"w": w})
        >>> found.valid, [str(effect.verdict) for effect in found.effects]
        (True, ['partial', 'partial'])
    """
    return Audit(loss, params)
