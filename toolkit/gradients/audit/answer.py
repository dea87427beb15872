"""The answer of an audit: the effect of every place that stops a gradient, as numbers, text and a table."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn

from torch import Tensor

from toolkit.blocks import Block, Site
from toolkit.gradients._answers import Leak
from toolkit.gradients._endings import by_module
from toolkit.gradients.audit.places import BareBlocks, Escape
from toolkit.gradients.compare import Comparison, html_table, text_table
from toolkit.gradients.graph import Graph
from toolkit.gradients.verdict import BlockEffect, Floats

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Audit", "Unopened"]


# The verdicts as a summary counts them, in its order.
_BEARING = "load-bearing"
_SUMMARY = {
    **dict.fromkeys(("partial", "cuts", "makes"), _BEARING),
    "noise": "below the noise",
    "redundant": "redundant",
    "no-op": "carry nothing",
}


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
    """The effect of every place of a program that stops a gradient. Made by `audit` and `audited`.

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
        unreached: Parameter -> the end of its path, for example ``argmax`` or ``requires_grad_(False)``, or empty if it
            is unknown; for parameters without a path to the loss even with every place open. In a script these are
            parameters of an optimiser that also holds trained parameters; without `params`, parameters of modules that
            the program computes with.
        vanishing: Parameters with a path to the loss whose gradient is exactly 0: for example behind ``round``, or
            behind a function whose backward pass returns zeros.
        sets: Effects of places that change the gradient only when opened together, as `Comparison.sets`.
        off_graph: Places in a recorded step that stopped a gradient outside of the graph of this loss, for example
            around a value that is only logged. No path of this loss crosses them.
        is_recorded: Whether the answer was taken from a step while it ran, and not from a program that runs again.
        one_mode: Places that stop reverse mode alone and pass forward-mode derivatives, as `torch.no_grad` does.
        reruns: Places that were opened in a run of their own, because the recorded step could not open them.
    """

    valid: bool
    reason: str
    is_recorded: bool
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
    vanishing: list[str]
    sets: list[BlockEffect]
    off_graph: list[str]
    reruns: list[str]

    def __init__(
        self,
        comparison: Comparison,
        bare: BareBlocks,
        *,
        graph: Callable[[], Graph],
        is_recorded: bool = False,
        remarks: Iterable[str] = (),
        closed: Mapping[str, str] = MappingProxyType({}),
        unreached: Mapping[str, str] = MappingProxyType({}),
        off_graph: Iterable[str] = (),
    ) -> None:
        """Report a comparison of places.

        Args:
            comparison: The comparison.
            bare: The places.
            graph: Draws the graph.
            is_recorded: See `Audit`.
            remarks: Remarks for the reader beside those of the comparison.
            closed: Place -> the reason why it was left closed, in addition to the reasons in `bare`.
            unreached: See `Audit`.
            off_graph: See `Audit`.
        """
        self._comparison, self._graph, self.is_recorded = comparison, graph, is_recorded
        self.reason, self.valid = comparison.reason, not comparison.reason
        self.loss, self.blocked, self.effects = comparison.loss, comparison.blocked, comparison.effects
        self.kinds = {**dict.fromkeys(comparison.meetings, "stop_gradient"), **bare.kinds}
        self.remarks = list(comparison.remarks)
        if bare.elsewhere:
            self.remarks.append(f"in another thread, and not looked into: {', '.join(bare.elsewhere)}")
        self.remarks += [*bare.chains(), *remarks]
        reasons = {**comparison.unopened, **bare.real, **closed}
        reasons |= {place: reason for place, reason in bare.partly.items() if place not in reasons}
        self.unopened = [Unopened(self.kinds[place], place, reason) for place, reason in reasons.items()]
        self.escapes = list(bare.escapes)
        self.one_mode = list(bare.one_mode)
        self.sets, self.reruns = comparison.sets, []
        self.unreached, self.vanishing = dict(unreached), comparison.vanishing
        self.off_graph = [place for place in off_graph if place not in reasons]
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

    @property
    def _parameters(self) -> dict[str, Tensor]:
        """Name -> parameter that the program was differentiated by."""
        return self._comparison.parameters

    def _measured(self, places: Iterable[str], leak: Leak, noise: Floats, precision: float) -> BlockEffect:
        """Return the effect of places that were open together in another run; see `Comparison._measured`."""
        return self._comparison._measured({place: self.sites[place] for place in places}, leak, noise, precision)

    def _include(self, effect: BlockEffect, closed: str = "") -> None:
        """Add the effect of a place that was open in another run, but for the part that `closed` tells of."""
        self._comparison._include(effect)
        order, place = list(self.kinds), effect.name
        self.effects.sort(key=lambda effect: order.index(effect.name))
        if closed:
            self._close(place, closed)
        else:
            self.unopened = [entry for entry in self.unopened if entry.site != place]
        self.reruns.append(place)

    def _include_parameters(self, params: Mapping[str, Tensor]) -> None:
        """Add parameters to which another run has shown a path, which stops cut."""
        self._comparison._include_parameters(params)
        self.unreached = {name: end for name, end in self.unreached.items() if name not in params}

    def _close(self, place: str, reason: str) -> None:
        """Change the reason why a place could not be opened."""
        self.unopened = [replace(entry, reason=reason) if entry.site == place else entry for entry in self.unopened]

    def __getitem__(self, place: Block | str) -> BlockEffect:
        return self._comparison[place]

    def graph(self) -> Graph:
        """Return the autograd graph with these places as its cuts; the program of a loss function runs once more."""
        return self._graph()

    def __reduce__(self) -> NoReturn:
        raise TypeError("An audit should not be copied or pickled: it holds its program. Keep `to_dict()`.")

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the gradients as plain JSON."""
        return {
            "valid": self.valid,
            "reason": self.reason,
            **self._comparison.to_dict(),
            "kinds": self.kinds,
            "unopened": [vars(entry) for entry in self.unopened],
            "remarks": self.remarks,
            "off_graph": self.off_graph,
            "escapes": [vars(entry) for entry in self.escapes],
            "one_mode": self.one_mode,
            "reruns": self.reruns,
            "unreached": self.unreached,
            "vanishing": self.vanishing,
        }

    def plot(self) -> Figure:
        """Return a figure: for every place, size and direction of its gradient relative to the blocked one."""
        return self._comparison.plot()

    def __str__(self) -> str:
        return self.text()

    def text(self, *, silent: bool = True) -> str:
        """Return the answer as text.

        Args:
            silent: Whether the table lists the places that no gradient-carrying tensor reaches; otherwise it counts
                them.
        """
        lines = [] if self.valid else [f"INVALID: {self.reason}"]
        head, *rows = self.rows()
        quiet = {effect.name for effect in self.effects if effect.verdict.kind == "no-op"} if not silent else set()
        shown = [row for row in rows if row[0] not in quiet]
        nothing = "nothing stops a gradient"
        if self.unreached or self.vanishing or self.unopened:
            nothing = "nothing that could be opened stops a gradient"
        table = text_table([head, *shown]) if shown else nothing
        notes = [*self._comparison.misleading(), *self.notes()]
        return "\n".join([*lines, self._comparison.head(), self.summary(), table, *notes])

    def summary(self) -> str:
        """Return the number of stops by their verdict, in a line."""
        verdicts = [effect.verdict for effect in self.effects]
        kinds = Counter(_SUMMARY[verdict.kind] for verdict in verdicts)
        bearing = Counter(verdict.label for verdict in verdicts if _SUMMARY[verdict.kind] == _BEARING)
        counted = [f"{kinds[kind]} {kind}" for kind in dict.fromkeys(_SUMMARY.values()) if kinds[kind]]
        if bearing:
            counted[0] += f" ({', '.join(f'{n} {label}' for label, n in bearing.items())})"
        closed = len({entry.site for entry in self.unopened} - {effect.name for effect in self.effects})
        n_places = len(self.effects) + closed + len(self.off_graph)
        counted += [f"{closed} not opened"] if closed else []
        counted += [f"{len(self.off_graph)} outside of the graph"] if self.off_graph else []
        return f"{n_places} {'stop' if n_places == 1 else 'stops'}{': ' if counted else ''}{', '.join(counted)}"

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
        kinds |= {name: f"{kinds[name]}, in part" for name in partly & kinds.keys()}
        kinds |= {name: f"{kinds[name]}, rerun" for name in self.reruns}
        named = [(name, kinds[name], *cells) for name, *cells in rows]
        return [tuple(row[:-1]) for row in [("where", "what", *head[1:]), *named]]

    def notes(self) -> list[str]:
        """Return a line for each place that could not be opened, and for each effect without a place."""
        notes = self.remarks + [f"not opened: {entry.kind} at {entry.site}: {entry.reason}" for entry in self.unopened]
        if self.off_graph:
            listed = ", ".join(f"{self.kinds[place]} at {place}" for place in self.off_graph)
            notes.append(f"ran outside of the graph of this loss: {listed}")
        notes += [f"leaves the graph: {escape.kind} at {escape.site}" for escape in self.escapes]
        notes += by_module(self.unreached, self.blocked)
        notes += by_module(dict.fromkeys(self.vanishing, ""), self.blocked, "a path to the loss, and a gradient of 0")
        return notes + [
            f"stops reverse mode alone: {self.kinds[site]} at {site}: a forward-mode derivative passes"
            for site in self.one_mode
        ]
