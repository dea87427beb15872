"""Asks of unmodified code what every `detach`, `no_grad` and the like in it does to the gradient."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from toolkit.blocks import Site
from toolkit.gradients._bare import BareBlocks, Escape
from toolkit.gradients._snapshot import Parts, Snapshot, find_parts
from toolkit.gradients.compare import BlockEffect, Comparison, Parameters, html_table, text_table
from toolkit.gradients.graph import Graph, graph

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["HIDDEN_CHANGE", "Audit", "Unopened", "audit"]

HIDDEN_CHANGE = "the memory is changed where autograd cannot see it: the gradient is that of other values"
"""Why a ``.data`` is not opened through which a change in place has made the gradient of the plain program wrong."""


@dataclass(frozen=True)
class Unopened:
    """A place that stops the gradient and had to keep doing so.

    Attributes:
        kind: What stops it, ``"no_grad"`` say.
        site: Where.
        reason: Why it could not be opened.
    """

    kind: str
    site: str
    reason: str


class Audit:
    """What every place of a program that stops a gradient does. Made by `audit`.

    Attributes:
        valid: Whether the audited program, with everything closed, gave the loss and every gradient of the plain one
            bit for bit. If not, nothing else here should be believed.
        reason: Why it is not valid; empty if it is.
        loss: The loss of the plain program.
        blocked: Parameter -> gradient of the plain program.
        effects: What opening each place alone does, in the order of the program. A place is known as
            ``file:line:column``; blocks with names are here as well.
        kinds: Place -> what stops the gradient there.
        unopened: Places that had to keep stopping the gradient, and why.
        escapes: Places where a value leaves the graph for good (``.item()``, ``.numpy()``): nothing can be opened.
        sites: Place -> its file, line, column and function; also of what could not be opened.
        remarks: What else a reader should know.
        one_mode: Places that stop reverse mode alone, although a forward-mode derivative comes by: `torch.no_grad`.
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

    def __init__(self, loss: Callable[[], Tensor], params: Parameters) -> None:
        """Run `loss`; see `audit`."""
        parts = find_parts(loss, params)
        bare = BareBlocks()
        self._comparison, self._left = _compare_with_retries(loss, params, parts, bare)
        plain_loss, plain = _plain_run(loss, parts, self._comparison.parameters)
        self.reason = _mismatch(self._comparison, plain_loss, plain)
        if self.reason and _mismatch_of_two(loss, parts, self._comparison.parameters, plain_loss, plain):
            self.reason = "the program is not deterministic: two plain runs differ"
        elif self.reason and _found_what_cannot_be_recorded(loss, params, parts, bare, (plain_loss, plain)):
            self.reason = ""
            self._comparison, self._left = _compare_with_retries(loss, params, parts, bare)
        self.remarks = []
        if self.reason and torch.backends.mha.get_fastpath_enabled():
            with _without_fast_path():
                slow_loss, slow = _plain_run(loss, parts, self._comparison.parameters)
            if not _mismatch(self._comparison, slow_loss, slow):
                plain_loss, plain, self.reason = slow_loss, slow, ""
                self.remarks = ["attention takes its fast path in a plain run, which is left out here: other rounding"]
        self.valid = not self.reason
        self.loss, self.blocked, self.effects = plain_loss, plain, self._comparison.effects
        self.kinds = {**{effect.name: "stop_gradient" for effect in self.effects}, **bare.kinds}
        self._explain_hidden_changes(loss, parts, bare)
        self.unopened = [Unopened(bare.kinds[site], site, reason) for site, reason in bare.real.items()]
        self.unopened += [
            Unopened(bare.kinds[site], site, reason) for site, reason in bare.partly.items() if site not in bare.real
        ]
        self.escapes = list(bare.escapes)
        self.one_mode = list(bare.one_mode)
        self.sites = {name: meeting.site for name, meeting in self._comparison.meetings.items()} | bare.sites
        self._loss_function, self._parts, self._bare = loss, parts, bare

    def gradient(self, open: list[str]) -> dict[str, Tensor]:
        """Return parameter -> gradient while exactly these places are open, as `Comparison.gradient`."""
        with self._left.again():
            return self._comparison.gradient(open)

    def graph(self) -> Graph:
        """Return the autograd graph with these places as its cuts. The program is run once more."""
        with _Values(self._parts).kept(), self._bare.replaced():
            return graph(self._loss_function, self._comparison.parameters)

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
        }

    def plot(self) -> Figure:
        """Return a figure: for every place, size and direction of its gradient against the blocked one."""
        return self._comparison.plot()

    def __str__(self) -> str:
        lines = [] if self.valid else [f"INVALID: {self.reason}"]
        table = text_table(self.rows()) if self.effects else "nothing stops a gradient"
        return "\n".join([*lines, self._comparison.head(), table, *self._comparison.warnings(), *self.notes()])

    def _repr_html_(self) -> str:
        head = "" if self.valid else f"<p><strong>Invalid:</strong> {html.escape(self.reason)}</p>"
        return head + html_table(self.rows()) + "".join(f"<p>{html.escape(note)}</p>" for note in self.notes())

    def rows(self) -> list[tuple[str, ...]]:
        """Return the table of the effects as text, the names of its columns first."""
        head, *rows = self._comparison.rows()
        partly = {entry.site for entry in self.unopened}
        named = [(name, self.kinds[name] + ", in part" * (name in partly), *cells) for name, *cells in rows]
        return [tuple(row[:-1]) for row in [("where", "what", *head[1:]), *named]]

    def notes(self) -> list[str]:
        """Return a line for everything that could not be opened."""
        notes = self.remarks + [f"not opened: {entry.kind} at {entry.site}: {entry.reason}" for entry in self.unopened]
        notes += [f"leaves the graph: {escape.kind} at {escape.site}" for escape in self.escapes]
        return notes + [
            f"stops reverse mode alone: {self.kinds[site]} at {site}: a forward-mode derivative passes"
            for site in self.one_mode
        ]

    def _explain_hidden_changes(self, loss: Callable[[], Tensor], parts: Parts, bare: BareBlocks) -> None:
        """Find out whether changes in place through ``.data`` have made the plain gradient wrong."""
        suspects = [site for site in bare.real if bare.kinds[site] == ".data"]
        if not suspects or not self.valid:
            return
        try:
            with bare.changes_counted():
                _plain_run(loss, parts, self._comparison.parameters)
        except RuntimeError:
            for site in suspects:
                bare.real[site] = HIDDEN_CHANGE


def audit(loss: Callable[[], Tensor], params: Parameters = None) -> Audit:
    """Find every place in unmodified code that stops a gradient, and say what it does, as `compare` does of blocks.

    Found are ``detach``, ``detach_``, ``.data``, ``torch.tensor(x)``, ``new_tensor``, ``no_grad`` and
    ``inference_mode`` (also as decorators), ``set_grad_enabled``, in your code, in third-party packages and inside
    `torch.nn`. From one forward pass each is opened alone. What cannot be opened is listed with its place.

    With everything closed the loss and every gradient must equal those of a plain run, bit for bit. A place that
    changes them as soon as it is recorded keeps its meaning and is listed; if that does not help, the result says that
    it is not valid, and why. The program is left as it was found: parameters, buffers, ``.grad``, modes, random state;
    and torch's attributes, which are replaced while it runs. Compiled functions run in eager mode.

    Args:
        loss: Runs the program and returns its loss, a real scalar. It should not update parameters.
        params: What to differentiate by: a module, a dict, an iterable of tensors, a tensor, or None for every leaf
            that the loss depends on.

    Raises:
        TypeError: As `compare`.
        ValueError: As `compare`.
        RuntimeError: If another audit is running in this process.

    Example:
        >>> w = torch.tensor(3.0, requires_grad=True)
        >>> found = audit(lambda: w * (w * w).detach() + w.detach(), {"w": w})
        >>> found.valid, [effect.verdict for effect in found.effects]
        (True, ['partial', 'partial'])
    """
    return Audit(loss, params)


def _compare_with_retries(
    loss: Callable[[], Tensor], params: Parameters, parts: Parts, bare: BareBlocks, blocks: list[str] | None = None
) -> tuple[Comparison, _Values]:
    """Compare with every place a block; a place because of which the program then fails keeps its original meaning."""
    failed: list[str] = []
    while True:
        bare.recent.clear()
        values = _Values(parts)
        try:
            with values.kept():
                comparison = Comparison(loss, params, blocks, around=bare.replaced)
            break
        except Exception as error:
            with _Values(parts).kept(), Snapshot(parts, {}).set_aside(), torch.enable_grad():
                loss()  # the program's own error, if it has one, is the one to see
            suspect = next((site for site in reversed(bare.recent) if site not in bare.real), None)
            if suspect is None:
                raise
            bare.real[suspect] = f"opened, the program fails: {_sentence(error)}"
            failed.append(suspect)
    for suspect in failed[:-1]:  # the last one was needed; those before it may have been suspected without reason
        reason = bare.real.pop(suspect)
        again = _Values(parts)
        try:
            with again.kept():
                comparison, values = Comparison(loss, params, blocks, around=bare.replaced), again
        except Exception:
            bare.real[suspect] = reason
    return comparison, values


def _sentence(error: Exception) -> str:
    """Return what an error says, without the advice after it."""
    return (str(error) or repr(error)).splitlines()[0].partition(" Hint: ")[0].rstrip(".")


def _found_what_cannot_be_recorded(
    loss: Callable[[], Tensor],
    params: Parameters,
    parts: Parts,
    bare: BareBlocks,
    plain: tuple[float, Mapping[str, Tensor]],
) -> bool:
    """Let the places keep their meaning that change the program as soon as they are recorded, and no others.

    A fast path that torch takes while nothing is recorded, say, or code that asks whether its result needs a gradient.
    """
    suspects = [site for site in bare.kinds if site not in bare.real]
    if not suspects:
        return False

    def mismatch() -> str:
        try:
            return _mismatch(_compare_with_retries(loss, params, parts, bare, [])[0], *plain)
        except Exception as error:
            return _sentence(error)

    bare.real.update(dict.fromkeys(suspects, "recorded, it changes the program"))
    if mismatch():
        for site in suspects:
            del bare.real[site]
        return False
    for site in suspects:
        reason = bare.real.pop(site)
        if found := mismatch():
            bare.real[site] = f"{reason}: {found}"
    return True


def _plain_run(
    loss: Callable[[], Tensor], parts: Parts, parameters: Mapping[str, Tensor]
) -> tuple[float, dict[str, Tensor]]:
    with _Values(parts).kept(), Snapshot(parts, parameters).set_aside(), torch.enable_grad():
        value = loss()
        wanted = [parameter for parameter in parameters.values() if parameter.requires_grad]
        found = torch.autograd.grad(value, wanted, allow_unused=True) if value.requires_grad else [None] * len(wanted)
    gradients = dict(zip([id(parameter) for parameter in wanted], found, strict=True))
    return value.item(), {
        name: torch.zeros_like(parameter) if (g := gradients.get(id(parameter))) is None else g
        for name, parameter in parameters.items()
    }


@contextmanager
def _without_fast_path() -> Iterator[None]:
    """Let attention take the path on which it can be recorded, as it does whenever calls are watched."""
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def _mismatch(comparison: Comparison, loss: float, gradients: Mapping[str, Tensor]) -> str:
    if comparison.loss != loss:
        return f"with everything closed the loss is {comparison.loss!r}, in a plain run {loss!r}"
    for name, expected in gradients.items():
        if not _equal(comparison.blocked[name], expected):
            return f"with everything closed the gradient of {name} differs from that of a plain run"
    return ""


def _mismatch_of_two(
    loss: Callable[[], Tensor],
    parts: Parts,
    parameters: Mapping[str, Tensor],
    first_loss: float,
    first: Mapping[str, Tensor],
) -> bool:
    second_loss, second = _plain_run(loss, parts, parameters)
    return second_loss != first_loss or any(not _equal(first[name], second[name]) for name in first)


def _equal(a: Tensor, b: Tensor) -> bool:
    """Say whether two gradients have the same numbers; two that are not a number are the same here."""
    if a.layout is not b.layout or a.shape != b.shape:
        return False
    a, b = (tensor if tensor.layout is torch.strided else tensor.to_dense() for tensor in (a, b))
    return torch.equal(a, b) or bool(torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num()))


@dataclass(frozen=True)
class _Kept:
    """What a leaf was at one time: its memory, the values in it, and how often autograd saw them change."""

    leaf: Tensor
    memory: Tensor
    values: Tensor
    version: int

    @classmethod
    def now(cls, leaf: Tensor) -> _Kept:
        return cls(leaf, leaf.detach(), leaf.detach().clone(), leaf._version)

    def is_changed(self) -> bool:
        moved = self.leaf.data_ptr() != self.memory.data_ptr()
        return moved or self.leaf._version != self.version or not _equal(self.leaf.detach(), self.values)

    def put_back(self) -> None:
        with torch.no_grad():
            if self.leaf.data_ptr() != self.memory.data_ptr():
                self.leaf.data = self.memory
            self.leaf.copy_(self.values)
        torch._C._autograd._unsafe_set_version_counter((self.leaf,), (self.version,))


class _Values:
    """The values of every leaf, for a program that changes them: before it ran, and as it left them."""

    def __init__(self, parts: Parts) -> None:
        """Take the values now."""
        leaves = {id(leaf): leaf for leaf in parts.leaves() if leaf.is_leaf and not leaf.is_inference()}.values()
        self._before = [_Kept.now(leaf) for leaf in leaves]
        self._after: list[_Kept] = []

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Give every leaf that a body changes its memory and its values back, also those that autograd cannot see."""
        try:
            yield
        finally:
            changed = [before for before in self._before if before.is_changed()]
            self._after = [_Kept.now(before.leaf) for before in changed]
            for before in changed:
                before.put_back()

    @contextmanager
    def again(self) -> Iterator[None]:
        """Let the leaves be what the body left them: its graph refers to their memory."""
        now = [_Kept.now(after.leaf) for after in self._after]
        try:
            for after in self._after:
                after.put_back()
            yield
        finally:
            for kept in now:
                kept.put_back()
