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

from toolkit.gradients._bare import BareBlocks, Escape
from toolkit.gradients._snapshot import Parts, Snapshot, find_parts
from toolkit.gradients.compare import BlockEffect, Comparison, Parameters, html_table, text_table

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
    one_mode: list[str]

    def __init__(self, loss: Callable[[], Tensor], params: Parameters) -> None:
        """Run `loss`; see `audit`."""
        parts = find_parts(loss, params)
        bare = BareBlocks()
        self._comparison = _compare_with_retries(loss, params, parts, bare)
        plain_loss, plain = _plain_run(loss, parts, self._comparison.parameters)
        self.reason = _mismatch(self._comparison, plain_loss, plain)
        if self.reason and _mismatch_of_two(loss, parts, self._comparison.parameters, plain_loss, plain):
            self.reason = "the program is not deterministic: two plain runs differ"
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

    def gradient(self, open: list[str]) -> dict[str, Tensor]:
        """Return parameter -> gradient while exactly these places are open, as `Comparison.gradient`."""
        return self._comparison.gradient(open)

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the gradients as plain JSON."""
        return {
            "valid": self.valid,
            "reason": self.reason,
            **self._comparison.to_dict(),
            "loss": self.loss if math.isfinite(self.loss) else None,
            "kinds": self.kinds,
            "unopened": [vars(entry) for entry in self.unopened],
            "escapes": [vars(entry) for entry in self.escapes],
            "one_mode": self.one_mode,
        }

    def plot(self) -> Figure:
        """Return a figure: for every place, size and direction of its gradient against the blocked one."""
        return self._comparison.plot()

    def __str__(self) -> str:
        lines = [] if self.valid else [f"INVALID: {self.reason}"]
        table = text_table(self.rows()) if self.effects else "nothing stops a gradient"
        return "\n".join([*lines, self._comparison.head(), table, *self.notes()])

    def _repr_html_(self) -> str:
        head = "" if self.valid else f"<p><strong>Invalid:</strong> {html.escape(self.reason)}</p>"
        return head + html_table(self.rows()) + "".join(f"<p>{html.escape(note)}</p>" for note in self.notes())

    def rows(self) -> list[tuple[str, ...]]:
        """Return the table of the effects as text, the names of its columns first."""
        head, *rows = self._comparison.rows()
        named = [(name, self.kinds[name], *cells) for name, *cells in rows]
        return [tuple(row[:-1]) for row in [("where", "what", *head[1:]), *named]]

    def notes(self) -> list[str]:
        """Return a line for everything that could not be opened."""
        notes = [f"not opened: {entry.kind} at {entry.site}: {entry.reason}" for entry in self.unopened]
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

    With everything closed the loss and every gradient must equal those of a plain run, bit for bit; otherwise the
    result says that it is not valid, and why. The program is left as it was found: parameters, buffers, ``.grad``,
    modes, random state; and torch's attributes, which are replaced while it runs. Compiled functions run in eager mode.

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


def _compare_with_retries(loss: Callable[[], Tensor], params: Parameters, parts: Parts, bare: BareBlocks) -> Comparison:
    """Compare with every place a block; a place at which the program then fails keeps its original meaning."""
    while True:
        bare.recent.clear()
        try:
            with _values_kept(parts):
                return Comparison(loss, params, None, around=bare.replaced)
        except Exception as error:
            with _values_kept(parts), Snapshot(parts, {}).set_aside(), torch.enable_grad():
                loss()  # the program's own error, if it has one, is the one to see
            suspect = next((site for site in reversed(bare.recent) if site not in bare.real), None)
            if suspect is None:
                raise
            bare.real[suspect] = f"opened, the program fails: {(str(error) or repr(error)).splitlines()[0]}"


def _plain_run(
    loss: Callable[[], Tensor], parts: Parts, parameters: Mapping[str, Tensor]
) -> tuple[float, dict[str, Tensor]]:
    with _values_kept(parts), Snapshot(parts, parameters).set_aside(), torch.enable_grad():
        value = loss()
        wanted = [parameter for parameter in parameters.values() if parameter.requires_grad]
        found = torch.autograd.grad(value, wanted, allow_unused=True) if value.requires_grad else [None] * len(wanted)
    gradients = dict(zip([id(parameter) for parameter in wanted], found, strict=True))
    return value.item(), {
        name: torch.zeros_like(parameter) if (g := gradients.get(id(parameter))) is None else g
        for name, parameter in parameters.items()
    }


def _mismatch(comparison: Comparison, loss: float, gradients: Mapping[str, Tensor]) -> str:
    if comparison.loss != loss:
        return f"with everything closed the loss is {comparison.loss!r}, in a plain run {loss!r}"
    for name, expected in gradients.items():
        if not torch.equal(comparison.blocked[name], expected) and not _both_nan(comparison.blocked[name], expected):
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
    return second_loss != first_loss or any(not torch.equal(first[name], second[name]) for name in first)


def _both_nan(a: Tensor, b: Tensor) -> bool:
    return bool(torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num()))


@contextmanager
def _values_kept(parts: Parts) -> Iterator[None]:
    """Give every leaf that a program changes in place its values back."""
    leaves = {id(leaf): leaf for leaf in parts.leaves() if leaf.is_leaf}.values()
    kept = [(leaf, leaf._version, leaf.detach().clone()) for leaf in leaves]
    try:
        yield
    finally:
        for leaf, version, values in kept:
            if leaf._version != version:
                with torch.no_grad():
                    leaf.copy_(values)
