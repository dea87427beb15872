"""Compare the gradients of one program for different sets of open blocks."""

from __future__ import annotations

import html
import itertools
import math
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor

from toolkit._checks import choice
from toolkit.blocks import Block, Site, declared_blocks
from toolkit.gradients._answers import Answers, Closed, Leak, Unrepeatable, answers_of, sentence
from toolkit.gradients._gates import Meeting
from toolkit.gradients._program import Parameters
from toolkit.gradients._rounding import Rounding, RoundingOfRuns
from toolkit.gradients.verdict import (
    BlockEffect,
    Difference,
    Floats,
    Verdict,
    differences,
    finite,
    norm,
    norms,
    products,
    unobserved,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Comparison", "compare"]

# The number of subsets doubles with every block.
_MOST_BLOCKS_ATTRIBUTED = 12

# Parameters named in a table; `BlockEffect.verdict` names all.
_WIDEST_VERDICT = 40

_NO_BLOCKS = "no blocks were met: `audit` finds stops without a name"

# A table with more blocks is sorted.
_MOST_ROWS_UNSORTED = 20


class Comparison:
    """Gradients of one program for any set of open blocks. Made by `compare`.

    ``comparison["name"]`` is the effect of that block.

    Attributes:
        loss: The loss of a plain run.
        blocked: Parameter -> gradient of a plain run, with every block in place; zero without a path to the loss.
        effects: The effect of opening each block alone, in the order of the program.
        sets: Effects of blocks that change the gradient only when opened together: the smallest such sets that a search
            with one run per block finds. Most often such a set is a stop inside of another stop.
        unopened: Block -> the reason why it could not be opened.
        interaction: The part of the joint effect that single effects do not explain: ``|g(all) - g(none) - sum of the
            leaks of single blocks|``, relative to the largest of the gradients. It is not 0 if a path crosses two or
            more blocks, because opening one of them does not open the path. NaN if the blocks cannot be opened
            together.
        remarks: Further remarks for the reader.
        reason: The reason why this program cannot be compared; empty if it can.
    """

    loss: float
    blocked: dict[str, Tensor]
    effects: list[BlockEffect]
    sets: list[BlockEffect]
    unopened: dict[str, str]
    interaction: float
    remarks: list[str]
    reason: str

    def __init__(
        self,
        answers: Answers,
        blocks: Collection[Block | str] | None = None,
        *,
        nested: Mapping[str, Collection[str]] = MappingProxyType({}),
    ) -> None:
        """Compare the gradients for these blocks; see `compare`. `nested`: block -> the blocks around it."""
        self._answers = answers
        self._nested = nested
        self.loss, self.blocked = answers.plain.loss, answers.plain.gradients
        self.remarks, self.reason = answers.remarks, answers.reason
        self.effects, self.sets, self.unopened = [], [], {}
        self.interaction = 0.0
        self._together: BlockEffect | None = None
        self._measured_apart: set[str] = set()
        self._rounding = Rounding(answers, self._products_when_blocked[:, 3])
        sizes = zip(answers.params, self._norms_when_blocked, strict=True)
        if broken := [parameter for parameter, size in sizes if not math.isfinite(size)]:
            names = ", ".join(broken)
            self.remarks.append(f"the blocked gradient is not finite, its leaks cannot be measured: {names}")
        self._names = [] if self.reason else _selected(blocks, self.meetings)
        with answers.quietly() if answers.gated is not None else nullcontext():
            self._compute_effects()
            self._find_sets()
        self._note_elsewhere()

    @property
    def meetings(self) -> dict[str, Meeting]:
        """Block -> how the program reached it, in program order."""
        return self._answers.board.meetings

    @property
    def parameters(self) -> dict[str, Tensor]:
        """Name -> parameter to differentiate by."""
        return dict(self._answers.params)

    @property
    def vanishing(self) -> list[str]:
        """Parameters with a path to the loss whose gradient is exactly 0."""
        sizes = zip(self._answers.params, self._norms_when_blocked, strict=True)
        return [name for name, size in sizes if size == 0 and name in self._answers.plain.reached]

    def __getitem__(self, block: Block | str) -> BlockEffect:
        name = block.name if isinstance(block, Block) else block
        for effect in self.effects:
            if effect.name == name:
                return effect
        raise KeyError(f"`block` should be one of {[effect.name for effect in self.effects]}. Found {name!r}.")

    def gradient(self, open: Collection[Block | str]) -> dict[str, Tensor]:
        """Return parameter -> gradient while exactly the blocks in `open` are open.

        Gates need no further forward pass. Where gates do not apply, the program runs again on the same draws: for
        regions, for blocks reached by a derivative inside of the forward pass (for example the inner gradient of an
        attack), and for programs with hooks or custom autograd functions.

        Raises:
            ValueError: If the program did not reach a block.
            RuntimeError: If a parameter was modified after the comparison was made, or the repeated program gives other
                results.
        """
        return self._answers.gradient(frozenset(_selected(open, self.meetings)))

    def effect(self, open: Collection[Block | str]) -> BlockEffect:
        """Return the effect of opening these blocks *together*.

        Raises:
            ValueError: If the program did not reach a block, or `open` is empty.
            RuntimeError: As for `gradient`.
        """
        names = _selected(open, self.meetings)
        if not names:
            raise ValueError("`open` should name at least one block. Found none.")
        self._answers.check_unmodified()
        return self._effect(names, self._answers.leak(names))

    def _measured(self, sites: Mapping[str, Site], leak: Leak, noise: Floats, precision: float) -> BlockEffect:
        """Return the effect of opening blocks together from a leak that another run of the program has shown.

        Args:
            sites: Block -> its place.
            leak: The leak.
            noise: The norm of the change of each parameter's gradient under rounding, blocked and open, (2, P).
            precision: The coarsest rounding of the program, relative.
        """
        for name, site in sites.items():
            self.meetings.setdefault(name, Meeting(site, calls=1))
        names, rows = list(sites), self._products(leak)
        verdict = RoundingOfRuns(self._answers, rows[:, 3], noise, precision).verdict(names, leak, rows)
        (effect,) = self._effects([_Judged(names, verdict, rows)])
        return effect

    def _include(self, effect: BlockEffect) -> None:
        """Add an effect that another run of the program has shown."""
        self.effects.append(effect)
        self._measured_apart.add(effect.name)
        self.unopened.pop(effect.name, None)

    def _include_parameters(self, params: Mapping[str, Tensor]) -> None:
        """Add parameters to which another run of the program has shown a path, which blocks cut."""
        self._answers.include(params)
        for known in ("_indices", "_products_when_blocked", "_blocked_norm", "_norms_when_blocked"):
            self.__dict__.pop(known, None)
        self._rounding = Rounding(self._answers, self._products_when_blocked[:, 3])
        for effect in self.effects:
            effect.per_parameter.update(dict.fromkeys(params, Difference(0.0, math.nan, math.nan)))

    @property
    def _at_once(self) -> list[BlockEffect]:
        """The effects of blocks that open together, too."""
        return [effect for effect in self.effects if effect.name not in self._measured_apart]

    def attribution(self) -> dict[frozenset[str], dict[str, Tensor]]:
        """Split the gradient with all blocks open by the set of blocks that each path crosses.

        The gradient is multi-affine in the gates, so the part that crosses exactly the set S is the Moebius sum over
        its subsets, ``sum over T in S of (-1)^|S - T| gradient(T)``. The parts add up to the gradient with all blocks
        open; the part of the empty set is the blocked gradient.

        With more than 12 blocks only sets of up to two blocks are split off, with a `UserWarning`. Paths across three
        blocks or more are then in none of the parts.
        """
        opened = [effect.name for effect in self._at_once]
        largest = len(opened)
        if largest > _MOST_BLOCKS_ATTRIBUTED:
            largest = 2
            warnings.warn(
                f"`attribution` is exact for at most {_MOST_BLOCKS_ATTRIBUTED} blocks. Found {len(opened)}: only "
                "single blocks and pairs are split off.",
                stacklevel=2,
            )
        subsets = itertools.chain.from_iterable(itertools.combinations(opened, size) for size in range(largest + 1))
        parts = {frozenset(subset): self.gradient(subset) for subset in subsets}
        for block in opened:
            for subset in parts:
                if block in subset:
                    without = parts[subset - {block}]
                    parts[subset] = {name: _minus(part, without[name]) for name, part in parts[subset].items()}
        return parts

    def __reduce__(self) -> NoReturn:
        raise TypeError("A comparison should not be copied or pickled: it holds its program. Keep `to_dict()`.")

    def to_dict(self) -> dict[str, Any]:
        """Return loss, norm of the blocked gradient and effects as plain JSON."""
        return {
            "loss": finite(self.loss),
            "blocked_norm": finite(norm(self.blocked.values())),
            "effects": [effect.to_dict() for effect in self.effects],
            "sets": [effect.to_dict() for effect in self.sets],
            "unopened": dict(self.unopened),
            "interaction": finite(self.interaction),
        }

    def plot(self) -> Figure:
        """Return a figure: for every block, size and direction of its gradient relative to the blocked one."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7, 0.9 + 0.45 * len(self.effects)), layout="constrained")
        ratios, cosines = figure.subplots(1, 2, sharey=True)
        names = [effect.name for effect in self.effects]
        ratios.barh(names, [effect.ratio for effect in self.effects], color="tab:blue")
        ratios.axvline(1, color="black", linewidth=1)
        ratios.set_xlabel("|open| / |blocked|")
        cosines.barh(names, [effect.cosine for effect in self.effects], color="tab:orange")
        cosines.set_xlim(-1, 1)
        cosines.axvline(0, color="black", linewidth=1)
        cosines.set_xlabel("cosine(open, blocked)")
        ratios.invert_yaxis()
        return figure

    def __repr__(self) -> str:
        shown = [f"{effect.name!r}: {effect.verdict.label}" for effect in self.effects[:3]]
        more = [f"{len(self.effects) - 3} more"] if len(self.effects) > 3 else []
        return f"Comparison(loss {self.loss:.6g}, {len(self.blocked)} parameters, {{{', '.join(shown + more)}}})"

    def __str__(self) -> str:
        nothing = "no block could be opened" if self.unopened else _NO_BLOCKS
        table = text_table(self.rows()) if self.effects else nothing
        return "\n".join([self.head(), table, *self.warnings()])

    def _repr_html_(self) -> str:
        return html_table(self.rows()) + "".join(f"<p>{html.escape(line)}</p>" for line in self.warnings())

    def head(self) -> str:
        """Return the line above the table: loss and size of the blocked gradient."""
        return f"loss {self.loss:.6g}, blocked gradient {self._blocked_norm:.6g}"

    def warnings(self) -> list[str]:
        """Return warnings for readers of the table: blocks that did not open, and misleading single effects."""
        unopened = (f"not opened: {name}: {reason}" for name, reason in self.unopened.items())
        return [*self.misleading(), *self.remarks, *unopened]

    def misleading(self) -> list[str]:
        """Return a line for each case in which single effects mislead about the joint effect."""
        found: list[str] = []
        if self._together is None:
            return found
        if not self.interaction <= self._answers.precision**0.5:
            found.append(
                "single effects mislead: all blocks together change the gradient by another "
                f"{_percent(self.interaction)} of its size, along paths that cross several of them (see attribution)"
            )
        largest = max(effect.leak for effect in self._at_once)
        single = any(not effect.verdict.is_silent for effect in self._at_once)
        if self._together.leak < 0.1 * largest and single:
            found.append(
                f"single effects mislead: opened together, the blocks cancel to {self._together.leak / largest:.0%} of "
                "the largest single leak"
            )
        return found

    def rows(self, order: str = "auto") -> list[tuple[str, ...]]:
        """Return the table of the effects as text, the names of its columns first.

        Args:
            order: ``"program"``, ``"leak"`` for the largest first, or ``"auto"``: the largest first in a table of more
                than 20 rows.

        Raises:
            ValueError: If `order` is none of these.
        """
        choice("order", order, ("auto", "program", "leak"))
        effects = self.effects
        if order == "leak" or (order == "auto" and len(effects) > _MOST_ROWS_UNSORTED):
            effects = sorted(effects, key=lambda effect: -effect.leak if effect.leak == effect.leak else -math.inf)
        return [("block", "verdict", "leak", "ratio", "cosine", "where"), *map(_row, [*effects, *self.sets])]

    def _note_elsewhere(self) -> None:
        if self._answers.board.elsewhere:
            names = ", ".join(map(repr, sorted(self._answers.board.elsewhere)))
            remark = f"met in another thread or comparison, and not compared: {names}"
            self.remarks.append(remark)
            warnings.warn(remark, stacklevel=4)

    # --- what a block does -------------------------------------------------------------------------------------------

    def _compute_effects(self) -> None:
        total: dict[str, Tensor] = {}
        judged: list[_Judged] = []
        for name in self._names:
            try:
                leak = self._answers.leak([name])
                judged.append(self._judge([name], leak))
            except Unrepeatable as error:
                self.reason = str(error).partition(" Found ")[2].removesuffix(".")
                return
            except Exception as error:
                fails = "" if isinstance(error, Closed) else "opened, the program fails: "
                self.unopened[name] = fails + sentence(error)
                continue
            self._rounding.forget_arrivals(name)
            if len(self._names) > 1:
                _add(total, leak.parts)
            del leak
        self.effects = self._effects(judged)
        together = [effect.name for effect in self.effects]
        if len(together) < 2:
            return
        try:
            leak = self._answers.leak(together)
        except Exception as error:
            self.interaction = math.nan
            self.remarks.append(f"opened together, the program fails: {sentence(error)}")
            return
        self._together = self._effect(together, leak)
        sizes = [self._blocked_norm]
        sizes += [effect.ratio * self._blocked_norm for effect in [*self.effects, self._together]]
        with unobserved():
            for parameter, part in leak.parts.items():
                total[parameter] = total[parameter].sub_(part) if parameter in total else part
        del leak
        largest = max((size for size in sizes if size == size), default=math.nan)
        self.interaction = norm(total.values()) / largest if largest else 0.0

    def _find_sets(self) -> None:
        """Find the smallest sets of blocks that act only together."""
        silent = [effect.name for effect in self.effects if effect.verdict.is_silent]
        if len(silent) < 2:
            return
        whole = self._together if len(silent) == len(self.effects) else self._loud(silent)
        if whole is None or whole.verdict.is_silent:
            return
        for name in silent:
            around = [outer for outer in self._nested.get(name, ()) if outer in silent]
            if around and (found := self._loud([*around, name])):
                self.sets.append(found)
        rest = [name for name in silent if not any(found.name.endswith(name) for found in self.sets)]
        loudest = self._loud(rest) if self.sets else whole
        for name in rest if loudest else ():
            if len(rest) > 2 and (found := self._loud([other for other in rest if other != name])):
                rest, loudest = [other for other in rest if other != name], found
        self.sets += [loudest] if loudest else []

    def _loud(self, names: Sequence[str]) -> BlockEffect | None:
        """Return the effect of opening these blocks together, or None if there is none."""
        if len(names) < 2:
            return None
        try:
            found = self._effect(names, self._answers.leak(names))
        except Exception:  # not every set opens together
            return None
        return None if found.verdict.is_silent else found

    def _effect(self, names: Sequence[str], leak: Leak) -> BlockEffect:
        (effect,) = self._effects([self._judge(names, leak)])
        return effect

    def _judge(self, names: Sequence[str], leak: Leak) -> _Judged:
        rows = self._products(leak)
        return _Judged(names, self._rounding.verdict(names, leak, rows), rows)

    def _effects(self, judged: Sequence[_Judged]) -> list[BlockEffect]:
        """Return the effects of sets of blocks, with the numbers of all of them at once."""
        if not judged:
            return []
        known, effects = declared_blocks(), []
        rows = np.stack([entry.products for entry in judged])
        totals = iter(differences(rows.sum(1)))
        numbers = iter(differences(rows.reshape(-1, 4)))
        for names, verdict, _ in judged:
            meetings, total = [self.meetings[name] for name in names], next(totals)
            effects.append(
                BlockEffect(
                    name=" + ".join(names),
                    why=" ".join(known[name].why for name in names if name in known).strip(),
                    site=", ".join(str(meeting.site) for meeting in meetings),
                    calls=sum(meeting.calls for meeting in meetings),
                    verdict=verdict,
                    leak=total.leak,
                    ratio=total.ratio,
                    cosine=total.cosine,
                    per_parameter=dict(zip(self._answers.params, numbers, strict=False)),
                )
            )
        return effects

    def _products(self, leak: Leak) -> Floats:
        """Return (P, 4), for every parameter the products that give its `Difference`."""
        rows = self._products_when_blocked.copy()
        if leak.parts:
            index = [self._indices[name] for name in leak.parts]
            blocked = [self._answers.flat_blocked[name] for name in leak.parts]
            rows[index] = products(list(leak.parts.values()), blocked, rows[index, 3])
        return rows

    @cached_property
    def _indices(self) -> dict[str, int]:
        return {name: index for index, name in enumerate(self._answers.params)}

    @cached_property
    def _products_when_blocked(self) -> Floats:
        squares = np.square(self._norms_when_blocked)
        return np.stack([np.zeros_like(squares), squares, squares, squares], 1)

    @cached_property
    def _blocked_norm(self) -> float:
        return math.hypot(*self._norms_when_blocked)

    @cached_property
    def _norms_when_blocked(self) -> list[float]:
        return norms(self._answers.flat_blocked.values())


def compare(
    loss: Callable[[], Tensor], params: Parameters = None, *, blocks: Collection[Block | str] | None = None
) -> Comparison:
    """Compare the gradients of `loss` with every block in place and with each block open.

    The gradient with every block in place is that of a plain run. Every block that the program reaches then becomes a
    gate, an identity node that decides at backward time whether it passes the gradient. One forward pass with gates
    serves any set of open blocks, provided that it gives the loss and the gradient of the plain run bit for bit.
    Gates do not suffice for regions, hooks, custom autograd functions and derivatives inside of the forward pass: for
    these the program runs again with the blocks removed.

    Random state (also of the generators that `loss` uses), ``.grad``, training modes, buffers, values, and the contents
    of reachable containers and attributes are restored, also if `loss` raises an error. Compiled functions run in eager
    mode. Comparisons in several threads run one after another.

    Args:
        loss: Runs the program and returns its loss, a real scalar. Every run should give the same result.
        params: The parameters to differentiate by: a module, a tensor, a dict or iterable of these, or None for
            every leaf that the loss depends on.
        blocks: The blocks whose effects are computed; None for all blocks that the program reaches.

    Raises:
        TypeError: If `loss` does not return a tensor, or `params` holds other objects.
        ValueError: If the loss is not a real scalar, is NaN or has no gradient. If there is no parameter to
            differentiate by, or the loss depends on none. If the program does not reach a block in `blocks`. If a
            module is not initialised yet, or sharded by FSDP2.
        RuntimeError: If two runs of the program differ, if it checkpoints with ``use_reentrant=True``, or if the
            backward pass of a function adds to ``.grad`` itself.

    Example:
        >>> w = torch.tensor(3.0, requires_grad=True)
        >>> comparison = compare(lambda: w * stop_gradient(w * w, "doc.scale"), {"w": w})
        >>> comparison.blocked["w"], comparison.gradient(["doc.scale"])["w"]
        (tensor(9.), tensor(27.))
        >>> print(comparison["doc.scale"].verdict)
        partial
    """
    with answers_of(loss, params) as answers:
        comparison = Comparison(answers, blocks)
    if comparison.reason:
        raise RuntimeError(f"`loss` should do the same each time it runs. Found {comparison.reason}.")
    return comparison


class _Judged(NamedTuple):
    """A set of blocks, its verdict, and the products of each parameter, (P, 4)."""

    names: Sequence[str]
    verdict: Verdict
    products: Floats


def _add(total: dict[str, Tensor], parts: Mapping[str, Tensor]) -> None:
    """Add vectors to their sums in place; two of them may be one tensor."""
    with unobserved():
        known = [name for name in parts if name in total]
        if known:
            torch._foreach_add_([total[name] for name in known], [parts[name] for name in known])
        total |= {name: part.clone() for name, part in parts.items() if name not in total}


def _minus(a: Tensor, b: Tensor) -> Tensor:
    dense = a.layout is b.layout is torch.strided
    return a - b if dense else a.to_dense() - b.to_dense()


def _selected(blocks: Collection[Block | str] | None, met: Mapping[str, Meeting]) -> list[str]:
    if blocks is None:
        return list(met)
    if isinstance(blocks, (str, Block)):
        blocks = [blocks]
    if not isinstance(blocks, Collection):
        raise TypeError(f"`blocks` should be a collection of blocks or their names. Found {type(blocks).__name__}.")
    names = list(dict.fromkeys(block.name if isinstance(block, Block) else block for block in blocks))
    for name in names:
        if name not in met:
            raise ValueError(f"`blocks` should be among those that the program meets: {sorted(met)}. Found {name!r}.")
    return names


def text_table(rows: Sequence[tuple[str, ...]]) -> str:
    """Return rows of cells as lines of aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def html_table(rows: Sequence[tuple[str, ...]]) -> str:
    """Return rows of cells as an HTML table; the first row is its head."""
    lines = [
        "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row) + "</tr>"
        for tag, row in zip(("th", *("td",) * (len(rows) - 1)), rows, strict=True)
    ]
    return f"<table>{''.join(lines)}</table>"


def _row(effect: BlockEffect) -> tuple[str, ...]:
    numbers = (f"{value:.3g}" for value in (effect.leak, effect.ratio, effect.cosine))
    verdict = str(effect.verdict)
    verdict = verdict if len(verdict) <= _WIDEST_VERDICT else f"{verdict[: _WIDEST_VERDICT - 2]}…]"
    return (effect.name, verdict, *numbers, effect.site)


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.01 else f"{100 * share:.1g}%"
