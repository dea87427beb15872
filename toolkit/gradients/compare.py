"""Compare the gradients of one program for different sets of open blocks.

A plain run says what the gradient is. What a block adds to it when it is open is found in one of two ways. While the
backward pass is linear as far as anybody can see, from one more forward pass, in which every block is a gate (see
`_gates`), if that gives the loss and the gradient of the plain run bit for bit. Otherwise, and for regions, by running
the program again with the block really removed, if it then has the same loss.
"""

from __future__ import annotations

import html
import itertools
import math
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from toolkit.blocks import Block, Site, declared_blocks
from toolkit.gradients._endings import Endings
from toolkit.gradients._gates import EVERY_BLOCK, GateBoard, Meeting, reachable_nodes
from toolkit.gradients._program import (
    CONSTANT,
    Answer,
    Parameters,
    Program,
    coarsest,
    differentiated,
    leaves_of,
    reached,
)
from toolkit.gradients._snapshot import Snapshot
from toolkit.gradients.verdict import (
    BlockEffect,
    Verdict,
    are_close,
    difference,
    equal,
    finite,
    flat,
    norm,
    products,
    rounding,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Comparison", "compare"]

# The sum over subsets doubles with every block.
_MOST_BLOCKS_ATTRIBUTED = 12

# In a table; `BlockEffect.verdict` names every parameter.
_WIDEST_VERDICT = 40

# A table of more blocks is sorted.
_MOST_ROWS_UNSORTED = 20

# How often the parameters are moved by a rounding to see how far that moves a leak.
_NUDGES = 6

# One that is so many times as large as it moves is told from rounding.
_CLEAR = 30.0

# Of the loss, in a backward pass that shows rounding: no power of two, which would round alike.
_PART = 3.0

# A leak that so moves by more than a third of itself says nothing.
_MOST_NOISE = 3.0


@dataclass(frozen=True)
class _Leak:
    """What opening blocks adds to the gradient.

    Attributes:
        parts: Parameter -> what is added, as a vector; no entry where that is zero.
        reached: Parameters to which there is a path then.
        carried: Whether anything that carries a gradient reached the blocks.
    """

    parts: dict[str, Tensor]
    reached: frozenset[str]
    carried: bool


class _Unrepeatable(RuntimeError):
    """A run of the program computed something else than the first one."""


class Comparison:
    """Gradients of one program for any set of open blocks. Made by `compare`.

    ``comparison["name"]`` is the effect of that block.

    Attributes:
        loss: The loss of a plain run.
        blocked: Parameter -> gradient of a plain run, with every block in place; zero where no path is left.
        effects: What opening each block alone does, in the order of the program.
        sets: What opening blocks together does that do nothing alone: the smallest sets, as far as so many runs as
            there are blocks find them. A stop inside of another one is the commonest.
        unopened: Block -> why it could not be opened.
        interaction: How far the effects of single blocks mislead about all of them together: ``|g(all) - g(none) - sum
            of the leaks of single blocks|``, relative to the largest of the gradients. Not 0 if a path crosses two
            blocks or more: opened one by one, none of them shows it. NaN if they do not open together.
        remarks: What else a reader should know.
        reason: Why nothing can be said of this program; empty if something can.
        program: The loss function and its state.
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
        loss: Callable[[], Tensor],
        params: Parameters,
        blocks: Collection[Block | str] | None,
        *,
        around: Callable[[Snapshot], AbstractContextManager[Any]] = nullcontext,
        spare: Callable[[Collection[str]], bool] = lambda _: False,
        nested: Mapping[str, Collection[str]] = MappingProxyType({}),
    ) -> None:
        """Run `loss`; see `compare`.

        Every run of it but the plain one is made inside of `around`. When it fails with blocks open, `spare` may see to
        it that it fails no more. `nested` learns while the program runs which blocks are inside of which.
        """
        self._spare, self._nested = spare, nested
        self.program = Program(loss, params, around)
        self.effects, self.sets, self.unopened, self.remarks, self.reason = [], [], {}, [], ""
        self.interaction, self._is_quiet = 0.0, False
        self._together: BlockEffect | None = None
        self._board, value, moved = self._recorded()
        self._params = self._all_leaves(value) if self.program.given is None else self.program.given
        plain = self.program.answer(self._params, around=False)
        self.loss = self._first_loss = plain.loss
        self.blocked = plain.gradients
        self._reached_when_blocked = plain.reached
        self._versions = {name: parameter._version for name, parameter in self._params.items()}
        with self._quietly() if value is not None else nullcontext():
            # The loss with gates in its graph, while they answer.
            self._value = None if moved or plain.moved or not self._gates_agree(value) else value
            if self._value is None:
                self._board = self._noted(plain)
            del value
            if not (plain.reached or self.reason):
                self._refuse_strangers(plain)
            self._names = [] if self.reason else _selected(blocks, self._board.meetings)
            self._compute_effects()
            self._find_sets()
        self._note_elsewhere()
        if self._value is not None and not self._board.needs_rerun(self._board.meetings):
            self.program.snapshot.forget_values()

    @property
    def meetings(self) -> dict[str, Meeting]:
        """Block -> how the program met it, in its order."""
        return self._board.meetings

    @property
    def parameters(self) -> dict[str, Tensor]:
        """Name -> what is differentiated by."""
        return dict(self._params)

    def __getitem__(self, block: Block | str) -> BlockEffect:
        name = block.name if isinstance(block, Block) else block
        for effect in self.effects:
            if effect.name == name:
                return effect
        raise KeyError(f"`block` should be one of {[effect.name for effect in self.effects]}. Found {name!r}.")

    def gradient(self, open: Collection[Block | str]) -> dict[str, Tensor]:
        """Return parameter -> gradient while exactly the blocks in `open` are open.

        Gates answer without another forward pass. Where they cannot, the program is run again on the same draws: for
        regions, for blocks that a derivative inside of the forward pass met (the inner gradient of an attack, say), and
        for programs with hooks or functions of their own.

        Raises:
            ValueError: If a block was not met by the program.
            RuntimeError: If a parameter was modified since the comparison was made, or the program then computes
                something else.
        """
        names = frozenset(_selected(open, self._board.meetings))
        self._check_unmodified()
        if not names:
            return {name: gradient.clone() for name, gradient in self.blocked.items()}
        if self._value is None or self._board.needs_rerun(names):
            return self._run_again(names).gradients
        with self._passing(names):
            return differentiated(self._value, self._params)

    def effect(self, open: Collection[Block | str]) -> BlockEffect:
        """Return what opening these blocks *together* does to the gradient.

        Raises:
            ValueError: If a block was not met by the program, or none is given.
            RuntimeError: As `gradient`.
        """
        names = _selected(open, self._board.meetings)
        if not names:
            raise ValueError("`open` should name at least one block. Found none.")
        self._check_unmodified()
        return self._effect(names, self._leak(names))

    def attribution(self) -> dict[frozenset[str], dict[str, Tensor]]:
        """Split the gradient with all blocks open by the set of blocks that each path crosses.

        The gradient is multi-affine in the gates, so the part that crosses exactly the set S is the Moebius sum over
        its subsets, ``sum over T in S of (-1)^|S - T| gradient(T)``. The parts add up to the gradient with all blocks
        open; the part of the empty set is the blocked gradient.

        With more than 12 blocks only sets of up to two are split off, with a `UserWarning` that says so: what crosses
        three blocks or more is then in none of the parts.
        """
        opened = [name for name in self._names if name not in self.unopened]
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
        """Return a figure: for every block, size and direction of its gradient against the blocked one."""
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
        return f"Comparison(loss {self.loss:.6g}, {len(self._params)} parameters, {{{', '.join(shown + more)}}})"

    def __str__(self) -> str:
        table = text_table(self.rows()) if self.effects else "no blocks were met"
        return "\n".join([self.head(), table, *self.warnings()])

    def _repr_html_(self) -> str:
        return html_table(self.rows()) + "".join(f"<p>{html.escape(line)}</p>" for line in self.warnings())

    def head(self) -> str:
        """Return the line above the table: loss and size of the blocked gradient."""
        return f"loss {self.loss:.6g}, blocked gradient {self._blocked_norm:.6g}"

    def warnings(self) -> list[str]:
        """Return what a reader of the table should know: what did not open, and where single effects mislead."""
        unopened = (f"not opened: {name}: {reason}" for name, reason in self.unopened.items())
        return [*self.misleading(), *self.remarks, *unopened]

    def misleading(self) -> list[str]:
        """Return a line for each way in which the effects of single blocks mislead about all of them together."""
        found: list[str] = []
        if self._together is None:
            return found
        if not self.interaction <= self._precision**0.5:
            found.append(
                "single effects mislead: all blocks together change the gradient by another "
                f"{self.interaction:.0%} of its size, along paths that cross several of them (see attribution)"
            )
        largest = max(effect.leak for effect in self.effects)
        single = any(not effect.verdict.is_silent for effect in self.effects)
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
        if order not in ("auto", "program", "leak"):
            raise ValueError(f"`order` should be 'auto', 'program' or 'leak'. Found {order!r}.")
        effects = self.effects
        if order == "leak" or (order == "auto" and len(effects) > _MOST_ROWS_UNSORTED):
            effects = sorted(effects, key=lambda effect: -effect.leak if effect.leak == effect.leak else -math.inf)
        return [("block", "verdict", "leak", "ratio", "cosine", "where"), *map(_row, [*effects, *self.sets])]

    # --- how the program is run --------------------------------------------------------------------------------------

    def _recorded(self) -> tuple[GateBoard, Tensor | None, bool]:
        """Run the program with a gate for each block; return no loss if it fails so."""
        board = GateBoard()
        try:
            with self.program.aside() as moved, board.forward():
                value = self.program.value()
        except Exception:  # what the program raises of its own, a plain run raises again
            return board, None, False
        return board, value, moved.values

    def _all_leaves(self, value: Tensor | None) -> Mapping[str, Tensor]:
        """Return every leaf that the loss depends on, also behind blocks."""
        leaves: Mapping[str, Tensor] = {} if value is None else leaves_of(value, self.program.parts)
        if value is not None and not self._board.regions:
            return leaves
        board = self._board
        if value is None:
            board = GateBoard(puts_gates=False)
            leaves = self.program.answer(None, gates=board).params
        try:
            behind = self.program.answer(None, board.meetings).params
        except Exception:  # not every program runs without its blocks
            return leaves
        known = {id(leaf) for leaf in leaves.values()}
        return {**leaves, **{name: leaf for name, leaf in behind.items() if id(leaf) not in known}}

    def _gates_agree(self, value: Tensor | None) -> bool:
        """Say whether gates can answer: whether they give loss and gradient of the plain run."""
        if value is None or value.grad_fn is None or value.item() != self.loss:
            return False
        if not self._board.is_linear(value.grad_fn):
            return False
        self._board.arrivals = []
        try:
            with self._passing(()):
                gradients = differentiated(value, self._params)
        except RuntimeError:  # what the program changed in place behind autograd's back, autograd sees at a gate
            return False
        self._arrivals, self._board.arrivals = self._board.arrivals, None
        return all(equal(gradients[name], self.blocked[name]) for name in gradients)

    def _noted(self, plain: Answer) -> GateBoard:
        """Run the program once more and note its blocks, or why nothing can be said about it."""
        board = GateBoard(puts_gates=False)
        try:
            again = self.program.answer(self._params, gates=board)
        except Exception as error:
            self.reason = f"watched, the program fails: {sentence(error)}"
            return board
        self._first_loss = again.loss
        if found := _mismatch(again, plain):
            if _is_close(again, plain):
                self.remarks.append(f"equal to a plain run to rounding, not to the bit: {found}")
            else:
                self.reason = self._explained(found, plain)
        return board

    def _explained(self, mismatch: str, plain: Answer) -> str:
        """Say why two runs differ."""
        if self.program.parts.moving:
            names = ", ".join(f"`{name}`" if name else "one" for name in self.program.parts.moving)
            return f"each run takes what comes next from an iterator: {names}; {mismatch}"
        if _mismatch(self.plain_again(), plain):
            return f"the program is not deterministic, two plain runs differ: {mismatch}"
        return f"watched, the program computes something else: {mismatch}"

    def _run_again(self, open: Collection[str]) -> Answer:
        """Run the program with these blocks really removed; raise if it computes something else."""
        try:
            answer = self.program.answer(self._params, open)
        except Exception:
            if not self._spare(open):
                raise
            answer = self.program.answer(self._params, open)
        # A derivative inside of the program that meets one of the blocks changes values.
        if math.isclose(answer.loss, self._first_loss, rel_tol=rounding(torch.float32)):
            return answer
        if (again := self.program.loss()) != self._first_loss:
            why = self._explained(f"the loss is {self._first_loss!r}, then {again!r}", answer)
            raise _Unrepeatable(f"`loss` should do the same each time it runs. Found {why}")
        return answer

    def endings(self, caller: Callable[[], Site | None]) -> dict[str, str]:
        """Return parameter -> where its path ends, for those that have none to the loss with every block open."""
        paths = self._reached_when_blocked
        if len(paths) < len(self._params) and self._board.meetings:
            opened = [effect.name for effect in self.effects]
            try:
                paths |= self.program.answer(self._params, opened).reached
            except Exception:  # one by one, then
                paths |= {name for effect in self.effects for name in effect.verdict.parameters}
        missing = {name: parameter for name, parameter in self._params.items() if name not in paths}
        if not missing:
            return {}
        watch = Endings(missing, caller)
        with self.program.aside(around=False), watch:
            self.program.run()
        return {name: watch.found.get(name, "") for name in missing}

    def plain_again(self) -> Answer:
        """Run the program as it is once more."""
        return self.program.answer(self._params, around=False)

    def _refuse_strangers(self, plain: Answer) -> None:
        """Raise if no parameter has anything to do with the loss."""
        paths = frozenset() if self._value is None else reached(self._value, self._params)
        if not paths and self._board.meetings:
            try:
                paths = self.program.answer(self._params, self._board.meetings).reached
            except Exception:
                return
        if not paths:
            raise ValueError(
                CONSTANT if plain.constant else "`params` should hold a tensor that `loss` depends on. Found none."
            )

    def _note_elsewhere(self) -> None:
        if self._board.elsewhere:
            names = ", ".join(map(repr, sorted(self._board.elsewhere)))
            remark = f"met in another thread, and not compared: {names}"
            self.remarks.append(remark)
            warnings.warn(remark, stacklevel=4)

    @contextmanager
    def _passing(self, open: Collection[str]) -> Iterator[None]:
        """Let the gates of `open` pass in backward passes."""
        with self._quietly(), self._board.backward(open):
            yield

    @contextmanager
    def _quietly(self) -> Iterator[None]:
        """Take derivatives without leaving a trace; entered once for many."""
        if self._is_quiet:
            yield
            return
        with self.program.aside(runs=False):
            self._is_quiet = True
            try:
                yield
            finally:
                self._is_quiet = False

    def _check_unmodified(self) -> None:
        for name, parameter in self._params.items():
            if parameter._version != self._versions[name]:
                raise RuntimeError(f"`{name}` should be as it was when the comparison was made. Found it modified.")

    # --- what a block does -------------------------------------------------------------------------------------------

    def _compute_effects(self) -> None:
        total: dict[str, Tensor] = {}
        sizes = [self._blocked_norm]
        for name in self._names:
            try:
                leak = self._leak([name])
                self.effects.append(self._effect([name], leak))
            except _Unrepeatable as error:
                self.effects, self.reason = [], str(error).partition(" Found ")[2]
                return
            except Exception as error:
                self.unopened[name] = f"opened, the program fails: {sentence(error)}"
                continue
            sizes.append(self.effects[-1].ratio * self._blocked_norm)
            for parameter, part in leak.parts.items():
                if parameter in total:
                    total[parameter] += part
                else:
                    total[parameter] = part.clone() if len(self._names) > 1 else part
            del leak
        together = [effect.name for effect in self.effects]
        if len(together) < 2:
            return
        try:
            leak = self._leak(together)
        except Exception as error:
            self.interaction = math.nan
            self.remarks.append(f"opened together, the program fails: {sentence(error)}")
            return
        self._together = self._effect(together, leak)
        sizes.append(self._together.ratio * self._blocked_norm)
        for parameter, part in leak.parts.items():
            total[parameter] = total[parameter].sub_(part) if parameter in total else part
        largest = max(size for size in sizes if size == size)
        self.interaction = norm(total.values()) / largest if largest else 0.0

    def _find_sets(self) -> None:
        """Find the smallest sets of blocks that do nothing alone and something together."""
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
        """Return what opening these blocks together does, if that is something."""
        if len(names) < 2:
            return None
        try:
            found = self._effect(names, self._leak(names))
        except Exception:  # not every set opens together
            return None
        return None if found.verdict.is_silent else found

    def _leak(self, names: Sequence[str]) -> _Leak:
        """Return what opening these blocks together adds to the gradient."""
        carried = any(self._board.meetings[name].carried for name in names)
        if self._value is not None and not self._board.needs_rerun(names):
            return self._leak_of_gates(names) if carried else _Leak({}, frozenset(), carried=False)
        answer = self._run_again(names)
        parts = {
            name: flat(gradient) - self._flat_blocked[name]
            for name, gradient in answer.gradients.items()
            if not equal(gradient, self.blocked[name])
        }
        return _Leak(parts, answer.reached, carried=bool(carried or answer.opened))

    def _leak_of_gates(self, names: Sequence[str]) -> _Leak:
        """Return what the cotangents that arrived at these gates in the blocked program become further up.

        Only the graph above the gates is passed for that.
        """
        assert self._value is not None
        arrived = [(edge, cotangent) for name, edge, cotangent in self._arrivals if name in names]
        wanted = {name: parameter for name, parameter in self._params.items() if parameter.requires_grad}
        parts = {}
        if arrived and wanted:
            edges, cotangents = zip(*arrived, strict=True)
            with self._passing(names):
                leaks = torch.autograd.grad(
                    edges, list(wanted.values()), cotangents, retain_graph=True, allow_unused=True
                )
            parts = {name: flat(leak) for name, leak in zip(wanted, leaks, strict=True) if leak is not None}
        return _Leak(parts, frozenset(parts), carried=True)

    def _effect(self, names: Sequence[str], leak: _Leak) -> BlockEffect:
        meetings, known = [self._board.meetings[name] for name in names], declared_blocks()
        rows = self._products(leak)
        total = difference(rows.sum(0).tolist())
        return BlockEffect(
            name=" + ".join(names),
            why=" ".join(known[name].why for name in names if name in known).strip(),
            site=", ".join(str(meeting.site) for meeting in meetings),
            calls=sum(meeting.calls for meeting in meetings),
            verdict=self._verdict(names, leak, rows),
            leak=total.leak,
            ratio=total.ratio,
            cosine=total.cosine,
            per_parameter=dict(zip(self._params, map(difference, rows.tolist()), strict=True)),
        )

    def _products(self, leak: _Leak) -> Tensor:
        """Return (P, 4), for every parameter the products that its `Difference` is made of."""
        rows = self._products_when_blocked.clone()
        if leak.parts:
            index = [self._indices[name] for name in leak.parts]
            blocked = [self._flat_blocked[name] for name in leak.parts]
            rows[index] = products(list(leak.parts.values()), blocked, rows[index, 3])
        return rows

    @cached_property
    def _indices(self) -> dict[str, int]:
        return {name: index for index, name in enumerate(self._params)}

    @cached_property
    def _flat_blocked(self) -> dict[str, Tensor]:
        return {name: flat(gradient) for name, gradient in self.blocked.items()}

    @cached_property
    def _products_when_blocked(self) -> Tensor:
        squares = torch.tensor([norm([gradient]) ** 2 for gradient in self._flat_blocked.values()], dtype=torch.float64)
        return torch.stack([torch.zeros_like(squares), squares, squares, squares], 1)

    @cached_property
    def _blocked_norm(self) -> float:
        return norm(self.blocked.values())

    # --- what is rounding --------------------------------------------------------------------------------------------

    def _verdict(self, names: Sequence[str], leak: _Leak, rows: Tensor) -> Verdict:
        leaks, _, opened, blocked = rows.sqrt().unbind(1)
        if not (leak.carried or leaks.any()):
            return Verdict("no-op")
        if cut := leak.reached - self._reached_when_blocked:
            return Verdict("cuts", tuple(sorted(cut)))
        allowed = torch.tensor([rounding(gradient.dtype) for gradient in self.blocked.values()], dtype=leaks.dtype)
        beyond = leaks > allowed * torch.maximum(opened, blocked)
        if leaks.isfinite().all():
            if not beyond.any():
                return Verdict("redundant")
            if not self._is_clear(names, leak, rows):
                noise = self._noise(names, leak, leaks)
                told = beyond & (leaks > _MOST_NOISE * noise)
                if not told.any():
                    if self._precision <= torch.finfo(torch.float32).eps and self._vanishes[beyond].all():
                        return Verdict("redundant")
                    size = max(opened.norm().item(), blocked.norm().item())
                    return Verdict("noise", noise=_MOST_NOISE * noise.norm().item() / size)
                beyond = told
        made = beyond & (opened <= allowed * blocked)
        if made.any():
            return Verdict(
                "makes", tuple(name for name, is_made in zip(self._params, made.tolist(), strict=True) if is_made)
            )
        return Verdict("partial")

    @cached_property
    def _precision(self) -> float:
        """The coarsest rounding of the program, relative."""
        if self._value is not None:
            return coarsest(self._value, self._params)
        with self.program.aside():
            return coarsest(self.program.value(), self._params)

    def _is_clear(self, names: Sequence[str], leak: _Leak, rows: Tensor) -> bool:
        """Say whether a leak is more than rounding, as far as that can be told without another run.

        Where the gradient vanishes, as after training, its size tells nothing. While gates answer, a backward pass of a
        part of the loss tells: rounding comes out otherwise.
        """
        if not self._is_resolved:
            return False
        sizes = rows.sum(0).sqrt()
        if sizes[0] > self._precision**0.6 * max(sizes[2].item(), sizes[3].item()):
            return True
        if self._value is None or self._board.needs_rerun(names):
            return False
        whole = sizes[0].item()
        shares = {name: norm([part]) for name, part in leak.parts.items()}
        last = max((self._last_uses.get(name, 0), name) for name, share in shares.items() if share > 0.1 * whole)[1]
        arrived = [(edge, cotangent) for name, edge, cotangent in self._arrivals_of_a_part if name in names]
        edges, cotangents = zip(*arrived, strict=True)
        with self._passing(names):
            (part,) = torch.autograd.grad(edges, [self._params[last]], cotangents, retain_graph=True)
        moved = flat(part).double() * _PART - leak.parts[last].double()
        return bool(norm([moved]) <= self._precision**0.5 * shares[last])

    @cached_property
    def _is_resolved(self) -> bool:
        """Whether the blocked gradient is clearly more than rounding.

        While gates answer, a short backward pass tells: of the parameters that have a good part of the gradient, the
        one that the program used last answers for all.
        """
        if self._value is None:
            again = self._nudged(0, self._precision) or self.blocked
            moved = norm([flat(again[name]).double() - flat(g).double() for name, g in self.blocked.items()])
            return bool(moved <= self._precision**0.5 * self._blocked_norm)
        norms = {name: norm([self.blocked[name]]) for name in self._last_uses}
        large = [(use, name) for name, use in self._last_uses.items() if norms[name] > 0.1 * self._blocked_norm]
        if not large:
            return False
        _, last = max(large)
        for divisor in (_PART, 7.0):  # a few digits may come out the same by chance
            share = torch.full_like(self._value, 1 / divisor)
            with self._passing(()):
                (part,) = torch.autograd.grad(self._value, [self._params[last]], share, retain_graph=True)
            moved = norm([flat(part).double() / share.double().item() - flat(self.blocked[last]).double()])
            if not moved <= self._precision**0.5 * norms[last]:
                return False
        return True

    @cached_property
    def _arrivals_of_a_part(self) -> list[tuple[str, GradientEdge, Tensor]]:
        assert self._value is not None
        wanted = [parameter for parameter in self._params.values() if parameter.requires_grad]
        self._board.arrivals = []
        with self._passing(()):
            share = torch.full_like(self._value, 1 / _PART)
            torch.autograd.grad(self._value, wanted, share, retain_graph=True, allow_unused=True)
        found, self._board.arrivals = self._board.arrivals, None
        return found

    @cached_property
    def _last_uses(self) -> dict[str, int]:
        """Parameter -> the number of the last node that uses it, for those that the graph reaches."""
        names = {id(parameter): name for name, parameter in self._params.items()}
        uses: dict[str, int] = {}
        for node in () if self._value is None else reachable_nodes(self._value.grad_fn, EVERY_BLOCK):
            for successor, _ in node.next_functions:
                if name := names.get(id(getattr(successor, "variable", None))):
                    uses[name] = max(uses.get(name, 0), node._sequence_nr())
        return uses

    @cached_property
    def _vanishes(self) -> Tensor:
        """Say of each parameter, (P,), whether its blocked gradient is itself no more than rounding."""
        moved = torch.zeros(len(self._params), dtype=torch.float64)
        for seed in range(3):  # a few digits may come out the same by chance
            again = self._nudged(seed, self._precision) or self.blocked
            distances = [norm([flat(again[name]).double() - flat(g).double()]) for name, g in self.blocked.items()]
            moved = torch.maximum(moved, torch.tensor(distances, dtype=torch.float64))
        return moved >= 0.1 * self._products_when_blocked[:, 3].sqrt()

    def _noise(self, names: Sequence[str], leak: _Leak, leaks: Tensor) -> Tensor:
        """Return (P,): how far a leak of these sizes moves while the parameters move by a rounding."""
        noise = torch.zeros(len(self._params), dtype=torch.float64)
        # A few digits may come out the same by chance, a gradient's may not.
        low = self._precision > torch.finfo(torch.float32).eps
        for nudge in range(1 if self._is_resolved and not low else _NUDGES):
            size = _nudge(self._precision, nudge)
            open, blocked = self._nudged(nudge, size, names), self._nudged(nudge, size)
            if open is None or blocked is None:
                break
            for index, name in enumerate(self._params):
                moved = flat(open[name]).double() - flat(blocked[name]).double()
                moved = moved - leak.parts[name].double() if name in leak.parts else moved
                noise[index] = max(noise[index].item(), moved.norm().item())
            if not (leaks > _MOST_NOISE * noise).any() or (nudge and (leaks > _CLEAR * noise).any()):
                break
        return noise

    def _nudged(self, seed: int, size: float, open: Collection[str] = ()) -> dict[str, Tensor] | None:
        """Return the gradient where the parameters are moved by a part of themselves; None if that cannot be told.

        A graph that was there before does not follow.
        """
        try:
            return self.program.answer(self._params, open, nudge=(seed, size)).gradients
        except Exception:
            return None


def compare(
    loss: Callable[[], Tensor], params: Parameters = None, *, blocks: Collection[Block | str] | None = None
) -> Comparison:
    """Compare the gradients of `loss` with every block in place and with each block open.

    The gradient with every block in place is that of a plain run. Every block that the program meets then becomes an
    identity node that decides at backward time whether it passes the gradient: one forward pass answers for any set of
    them, if it gives the loss and the gradient of the plain run bit for bit. Where that is not enough the program is
    run again with blocks really removed: for regions, and for programs with hooks, functions of their own, or
    derivatives inside of the forward pass.

    The program is left as it was found: random state (also of the generators that `loss` uses), ``.grad``, training
    modes, buffers, values, and what the containers and attributes that it reaches held, also when `loss` raises.
    Compiled functions run in eager mode. Comparisons of several threads wait for each other.

    Args:
        loss: Runs the program and returns its loss, a real scalar. It should do the same each time it runs.
        params: What to differentiate by: a module, a dict, an iterable of tensors, a tensor, or None for every leaf
            that the loss depends on.
        blocks: The blocks whose effects are computed; None for all that are met.

    Raises:
        TypeError: If `loss` does not return a tensor, or `params` holds something else.
        ValueError: If the loss is not a real scalar, is not a number or has no gradient, if there is no parameter to
            differentiate by or the loss depends on none, if a block in `blocks` was not met, or for modules that are
            not initialised yet or sharded by FSDP2.
        RuntimeError: If two runs of the program differ, if it checkpoints with ``use_reentrant=True``, or if a backward
            pass adds to ``.grad`` past the graph.

    Example:
        >>> w = torch.tensor(3.0, requires_grad=True)
        >>> comparison = compare(lambda: w * stop_gradient(w * w, "doc.scale"), {"w": w})
        >>> comparison.blocked["w"], comparison.gradient(["doc.scale"])["w"]
        (tensor(9.), tensor(27.))
        >>> print(comparison["doc.scale"].verdict)
        partial
    """
    comparison = Comparison(loss, params, blocks)
    if comparison.reason:
        raise RuntimeError(f"`loss` should do the same each time it runs. Found {comparison.reason}.")
    return comparison


def sentence(error: Exception) -> str:
    """Return what an error says, without the advice after it."""
    return (str(error) or repr(error)).splitlines()[0].partition(" Hint: ")[0].partition(". ")[0].rstrip(".")


def _mismatch(found: Answer, plain: Answer) -> str:
    if found.loss != plain.loss:
        return f"the loss is {found.loss!r}, in a plain run {plain.loss!r}"
    for name, gradient in plain.gradients.items():
        if not equal(found.gradients[name], gradient):
            return f"the gradient of {name} differs from that of a plain run"
    return ""


def _is_close(found: Answer, plain: Answer) -> bool:
    """Say whether two answers are equal to rounding."""
    same_loss = math.isclose(found.loss, plain.loss, rel_tol=rounding(torch.float32))
    return same_loss and are_close(found.gradients, plain.gradients)


def _nudge(precision: float, index: int) -> float:
    """Return by which part of themselves parameters are moved: a few roundings, and more each time if those are small.

    A leak that is rounding then comes out otherwise; one that is not moves by as much, times a condition number.
    """
    return max(precision, min(precision * 2.0 ** (index + 1), 2**-10))


def _minus(a: Tensor, b: Tensor) -> Tensor:
    dense = a.layout is b.layout is torch.strided
    return a - b if dense else a.to_dense() - b.to_dense()


def _selected(blocks: Collection[Block | str] | None, met: Mapping[str, Meeting]) -> list[str]:
    if blocks is None:
        return list(met)
    if isinstance(blocks, (str, Block)):
        blocks = [blocks]
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
    """Return rows of cells as a table, the first as its head."""
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
