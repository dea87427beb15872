"""The gradient of one program for any set of open blocks, by the cheapest correct computation.

A plain run gives the blocked gradient. The leak of open blocks is found in one of two ways. Gates are used if no step
of the backward pass is known to be nonlinear: one more forward pass has a gate for every block (see `_gates`), and must
give the loss and the gradient of the plain run bit for bit. Otherwise, and for regions, the program runs again with the
blocks really removed, and must give the same loss.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from toolkit._swapped import swapped
from toolkit.gradients._gates import GateBoard, Meeting
from toolkit.gradients._nodes import is_foreign
from toolkit.gradients._program import (
    ALONE,
    CONSTANT,
    NO_PATH,
    Answer,
    Parameters,
    Program,
    coarsest,
    differentiated,
    keeping_selected,
    leaves_of,
    nodes_of,
    others_of,
    reached,
)
from toolkit.gradients._snapshot import Snapshot
from toolkit.gradients.verdict import are_close, equal, flat, rounding, unobserved

__all__ = ["Answers", "Closed", "Leak", "ProgramAnswers", "Unrepeatable", "answers_of", "sentence"]

_MOVED = "state in the globals of a package was found only after some runs, and has changed since before them"

_GENERATED = "<eval_with_key>"  # the file of a module of torch.fx, with a new number for each

# Blocks -> a context in which the cause of their failure is exempt; its value is whether there is such a cause.
Sparing = Callable[[Collection[str]], AbstractContextManager[bool]]


@dataclass(frozen=True)
class Leak:
    """The leak of open blocks.

    Attributes:
        parts: Parameter -> leak, as a vector; no entry for a zero leak.
        reached: Parameters with a path to the loss while the blocks are open.
        carried: Whether a tensor with a gradient reached the blocks.
    """

    parts: dict[str, Tensor]
    reached: frozenset[str]
    carried: bool


class Closed(RuntimeError):
    """Blocks that cannot be opened; the message is the reason."""


class Unrepeatable(RuntimeError):
    """A run of the program differs from the first run."""


class Answers(ABC):
    """Computes a program's gradient for sets of open blocks.

    Attributes:
        params: Name -> parameter to differentiate by.
        plain: The result of a plain run.
        board: The blocks that the program reaches.
        remarks: Remarks for the reader.
        reason: The reason why this program cannot be analysed; empty if it can.
    """

    params: Mapping[str, Tensor]
    plain: Answer
    board: GateBoard
    remarks: list[str]
    reason: str
    _versions: Mapping[str, int]
    _is_quiet: bool = False

    @property
    @abstractmethod
    def gated(self) -> Tensor | None:
        """The loss with a gate for each block in its graph; None if gates cannot answer."""

    @property
    @abstractmethod
    def precision(self) -> float:
        """The coarsest rounding of the program, relative."""

    @abstractmethod
    def gradient(self, open: Collection[str]) -> dict[str, Tensor]:
        """Return parameter -> gradient while exactly these blocks are open."""

    @abstractmethod
    def leak(self, names: Sequence[str]) -> Leak:
        """Return the leak of these blocks, opened together."""

    @abstractmethod
    def answers_at_once(self, open: Collection[str]) -> bool:
        """Return whether gates can answer for these blocks."""

    @abstractmethod
    def arrivals(self, share: float) -> list[tuple[str, GradientEdge, Tensor]]:
        """Return the cotangents that arrive at the gates of the blocked program, for a part of the loss."""

    @abstractmethod
    def nudged(self, seed: int, size: float, open: Collection[str] = ()) -> dict[str, Tensor] | None:
        """Return the gradient with parameters, or cotangents, scaled by about 1; None if it is not available."""

    def elsewhere(self, seed: int, size: float, open: Collection[str] = ()) -> dict[str, Tensor] | None:
        """Return the gradient at parameters scaled by about 1; None if the program does not run again."""
        return None

    @contextmanager
    def quietly(self) -> Iterator[None]:
        """Take derivatives without side effects; entered once for many."""
        if self._is_quiet:
            yield
        else:
            with self._aside(), swapped(self, "_is_quiet", True):
                yield

    @abstractmethod
    def _aside(self) -> AbstractContextManager[Any]:
        """Set aside what a derivative may change."""

    @cached_property
    def nodes(self) -> list[Any]:
        """The nodes behind the loss with gates; none if gates cannot answer."""
        return nodes_of(self.gated)

    @cached_property
    def others(self) -> list[Tensor]:
        """The leaves to differentiate by, beside the parameters; see `others_of`."""
        return others_of(self.nodes)

    @cached_property
    def flat_blocked(self) -> dict[str, Tensor]:
        """Parameter -> gradient with every block in place, as a vector."""
        with unobserved():
            return {name: flat(gradient) for name, gradient in self.plain.gradients.items()}

    def include(self, params: Mapping[str, Tensor]) -> None:
        """Differentiate by further tensors, which have no path to the loss with every block in place."""
        self.params = {**self.params, **params}
        self.plain.gradients.update({name: torch.zeros_like(parameter) for name, parameter in params.items()})
        self._versions = {**self._versions, **{name: parameter._version for name, parameter in params.items()}}
        self.__dict__.pop("flat_blocked", None)

    @contextmanager
    def passing(self, open: Collection[str]) -> Iterator[None]:
        """Let the gates of `open` pass in backward passes."""
        with self.quietly(), keeping_selected(), self.board.backward(open):
            yield

    def check_unmodified(self) -> None:
        """Raise RuntimeError if a parameter was modified since the plain run."""
        for name, parameter in self.params.items():
            if parameter._version != self._versions[name]:
                raise RuntimeError(f"`{name}` should be as it was in the comparison. Found it modified: compare again.")


class ProgramAnswers(Answers):
    """Answers for a program that can be run again.

    Attributes:
        program: The loss function and its state.
        differs: Whether two plain runs were seen to differ.
    """

    def __init__(self, program: Program, sparing: Sparing, quiet: ExitStack) -> None:
        """Run the program.

        Args:
            program: The program.
            sparing: May exempt the cause if a run with open blocks fails.
            quiet: Keeps `quietly` entered after the gates were checked, as their answers are asked for next.
        """
        self.program, self._sparing, self._quiet = program, sparing, quiet
        self._spared: set[frozenset[str]] = set()  # blocks that only open together if the cause is exempt
        self.remarks: list[str] = []
        self.reason, self.differs = "", False
        self.board, value, moved = self._recorded()
        self._first_meetings = {} if value is None else dict(self.board.meetings)
        self._first_unrecorded = 0 if value is None else self.board.unrecorded
        self._first_value = None if value is None else value.item()
        self.params = self._all_leaves(value) if program.given is None else program.given
        self.plain = program.answer(self.params, around=False)
        self._first_loss = self.plain.loss
        self._versions = {name: parameter._version for name, parameter in self.params.items()}
        # The loss with gates in its graph, while they answer.
        if moved or self.plain.moved:
            value = None
        self.nodes = nodes_of(value)
        self._gated = value if self._gates_agree(value) else None
        if self._gated is None:
            meets_nothing, self.nodes = self._meets_nothing(value), []
            self.board = self.board if meets_nothing else self._noted()
        if not (self.plain.reached or self.reason):
            self.leave_quiet()
            self._refuse_strangers()
        if self.answers_at_once(self.board.meetings):  # the program may never run again
            program.snapshot.forget_values()

    @property
    def gated(self) -> Tensor | None:
        """The loss with a gate for each block in its graph; None if gates cannot answer."""
        return self._gated

    @cached_property
    def precision(self) -> float:
        """The coarsest rounding of the program, relative."""
        if self._gated is not None:
            return coarsest(self.nodes, self.params)
        with self.program.aside():
            return coarsest(nodes_of(self.program.value()), self.params)

    def gradient(self, open: Collection[str]) -> dict[str, Tensor]:
        """Return parameter -> gradient while exactly these blocks are open."""
        self.check_unmodified()
        if not open:
            return {name: gradient.clone() for name, gradient in self.plain.gradients.items()}
        if self._gated is not None and self.answers_at_once(open):
            with self._once_only(), self.passing(open):
                return differentiated(self._gated, self.params, self.others)
        return self._run_again(open).gradients

    def answers_at_once(self, open: Collection[str]) -> bool:
        """Return whether gates can answer for these blocks."""
        return self._gated is not None and not self.board.needs_rerun(open)

    def arrivals(self, share: float) -> list[tuple[str, GradientEdge, Tensor]]:
        """Return the cotangents that arrive at the gates of the blocked program, for a part of the loss."""
        assert self._gated is not None
        wanted = [parameter for parameter in self.params.values() if parameter.requires_grad]
        self.board.arrivals = []
        with self.passing(()):
            weight = torch.full_like(self._gated, share)
            torch.autograd.grad(self._gated, [*wanted, *self.others], weight, retain_graph=True, allow_unused=True)
        found, self.board.arrivals = self.board.arrivals, None
        return found

    # --- how it is done ----------------------------------------------------------------------------------------------

    def _recorded(self) -> tuple[GateBoard, Tensor | None, bool]:
        """Run the program with a gate for each block; return None if this run fails."""
        board = GateBoard()
        try:
            with self.program.aside() as moved, board.forward():
                value = self.program.value()
        except Exception:  # an error of the program itself is raised again by a plain run
            return board, None, False
        return board, value, moved.values

    def _all_leaves(self, value: Tensor | None) -> Mapping[str, Tensor]:
        """Return every leaf that the loss depends on, also behind blocks."""
        leaves: Mapping[str, Tensor] = {} if value is None else leaves_of(value, self.program.parts)
        if value is not None and not self.board.regions:
            return leaves
        board = self.board
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
        """Return whether gates give loss and gradient of the plain run."""
        if value is None or value.grad_fn is None or value.item() != self.plain.loss:
            return False
        if not self.board.is_linear(self.nodes):
            return False
        self.board.arrivals = []
        try:
            self._quiet.enter_context(self.quietly())
            versions = self.program.snapshot.buffer_versions()
            with self.passing(()):
                gradients = differentiated(value, self.params, self.others)
            if self.program.snapshot.buffer_versions() != versions:  # a checkpoint would begin its next run with others
                gradients = {}
        except Exception:  # autograd sees changes in place that the program hid from it, or a hook lost what it kept
            gradients = {}
        self._arrivals, self.board.arrivals = self.board.arrivals, None
        agree = bool(gradients) and all(equal(gradients[name], self.plain.gradients[name]) for name in gradients)
        if not agree:
            self.leave_quiet()
        return agree

    def _meets_nothing(self, value: Tensor | None) -> bool:
        """Return whether neither the program nor a function or hook of its backward pass has a block."""
        if value is None or value.grad_fn is None or value.item() != self.plain.loss or self.board.meetings:
            return False
        return self.board.linear and not any(map(is_foreign, self.nodes))

    def _noted(self) -> GateBoard:
        """Run the program once more and note its blocks, or the reason why it cannot be analysed."""
        board = GateBoard(puts_gates=False)
        try:
            again = self.program.answer(self.params, gates=board)
        except Exception as error:
            self.reason = f"watched, the program fails: {sentence(error)}"
            return board
        self._first_loss = again.loss
        if lost := self._lost_since(board.meetings):
            self.reason = lost
        elif found := _mismatch(again, self.plain):
            if _is_close(again, self.plain):
                self.remarks.append(f"equal to a plain run to rounding, not to the bit: {found}")
            else:
                self.reason = self._explained(found)
        elif self._is_first_apart():
            self.reason = f"its first run alone gives another loss: {self._first_value!r}, then {self.plain.loss!r}"
        for name in [name for name, meeting in board.meetings.items() if not meeting.calls]:
            if not self._meets(name):
                del board.meetings[name]
        return board

    def _is_first_apart(self) -> bool:
        """Return whether the first run gave another loss than a run that is watched in the same way gives now."""
        if self._first_value in (None, self.plain.loss):
            return False
        again = self._recorded()[1]
        return again is not None and again.item() == self.plain.loss

    def _lost_since(self, meetings: Mapping[str, Meeting]) -> str:
        """Return the reason if a run met these blocks alone because the program kept the results of an earlier one."""
        return self._kept_blocks if _fewer(meetings, self._first_meetings) else ""

    @cached_property
    def _kept_blocks(self) -> str:
        """The reason why runs after the first may lack blocks, from another run that is watched as the first was."""
        again = self._recorded()[0]
        met = ", ".join(map(repr, _fewer(again.meetings, self._first_meetings)))
        if not met and again.unrecorded < self._first_unrecorded:
            met = "some operations inside of regions"
        return f"its first run alone meets {met}, and keeps the result where it is not restored" if met else ""

    def _meets(self, name: str) -> bool:
        """Return whether the program reaches a block that it asks about (`is_blocked`) once this block is open."""
        try:
            return name in self._run_again([name]).opened
        except Exception:  # opening the block shows this too
            return True

    def _explained(self, mismatch: str) -> str:
        """Return the reason why two runs differ."""
        if self.program.parts.moving:
            names = ", ".join(f"`{name}`" if name else "one" for name in self.program.parts.moving)
            return f"each run advances an iterator: {names}; {mismatch}"
        if _mismatch(self.program.answer(self.params, around=False), self.plain):
            self.differs = True
            return f"the program is not deterministic, two plain runs differ: {mismatch}"
        return f"watched, the program computes something else: {mismatch}"

    def _run_again(self, open: Collection[str]) -> Answer:
        """Run the program with these blocks really removed; raise if it computes something else."""
        answer, met = self._opened(open), [name for name in open if name in self.board.meetings]
        is_missed = not answer.opened and any(self.board.meetings[name].carried for name in met)
        is_missed |= self._first_unrecorded > 0 and not self.board.regions.isdisjoint(met)
        if is_missed and self._kept_blocks:
            raise Unrepeatable(f"`loss` should do the same each time it runs. Found {self._kept_blocks}.")
        # A derivative inside of the program that reaches one of the blocks changes values.
        if math.isclose(answer.loss, self._first_loss, rel_tol=self._loss_rounding):
            return answer
        if (again := self.program.loss()) != self._first_loss:
            why = self._explained(f"the loss is {self._first_loss!r}, then {again!r}")
            raise Unrepeatable(f"`loss` should do the same each time it runs. Found {why}.")
        return answer

    def _opened(self, open: Collection[str], nudge: tuple[int, float] | None = None) -> Answer:
        """Run the program with these blocks really removed, the cause of a failure exempt if that is possible."""
        blocks = frozenset(open)
        if blocks not in self._spared:
            try:
                return self.program.answer(self.params, blocks, nudge=nudge)
            except Exception:
                with self._sparing(blocks) as spares:
                    if not spares:
                        raise
        with self._sparing(blocks):
            answer = self.program.answer(self.params, blocks, nudge=nudge)
        self._spared.add(blocks)
        return answer

    def _refuse_strangers(self) -> None:
        """Raise ValueError if the loss depends on no parameter."""
        paths = frozenset() if self._gated is None else reached(self._gated, self.params)
        if not paths and self.board.meetings:
            try:
                paths = self.program.answer(self.params, self.board.meetings).reached
            except Exception:
                return
        if not paths:
            raise ValueError(CONSTANT if self.plain.constant else NO_PATH)

    def _aside(self) -> AbstractContextManager[Any]:
        return self.program.aside(runs=False)

    def leave_quiet(self) -> None:
        """Put gradients and buffers back, before the program runs again: they were set aside to check the gates."""
        self._quiet.close()

    def leak(self, names: Sequence[str]) -> Leak:
        """Return the leak of these blocks, opened together."""
        carried = any(self.board.meetings[name].carried for name in names)
        if self.answers_at_once(names):
            if not carried:
                return Leak({}, frozenset(), carried=False)
            with self._once_only():
                return self._leak_of_gates(names)
        answer = self._run_again(names)
        parts = {
            name: flat(gradient) - self.flat_blocked[name]
            for name, gradient in answer.gradients.items()
            if not equal(gradient, self.plain.gradients[name])
        }
        return Leak(parts, answer.reached, carried=bool(carried or answer.opened))

    @contextmanager
    def _once_only(self) -> Iterator[None]:
        """Give up the gates if their graph is differentiated only once, as that of a selective checkpoint is."""
        try:
            yield
        except Exception:  # of a hook that unpacks what it kept, too
            self._gated = None

    def _leak_of_gates(self, names: Sequence[str]) -> Leak:
        """Return the leak from the cotangents that arrived at these gates in the blocked program.

        The backward pass only covers the graph behind the gates.
        """
        assert self._gated is not None
        arrived = [(edge, cotangent) for name, edge, cotangent in self._arrivals if name in names]
        with unobserved():
            wanted = {name: parameter for name, parameter in self.params.items() if parameter.requires_grad}
        parts = {}
        if arrived and wanted:
            edges, cotangents = zip(*arrived, strict=True)
            with self.passing(names):
                leaks = torch.autograd.grad(
                    edges, [*wanted.values(), *self.others], cotangents, retain_graph=True, allow_unused=True
                )
            with unobserved():
                parts = {name: flat(leak) for name, leak in zip(wanted, leaks, strict=False) if leak is not None}
        return Leak(parts, frozenset(parts), carried=True)

    def nudged(self, seed: int, size: float, open: Collection[str] = ()) -> dict[str, Tensor] | None:
        """Return the gradient at parameters scaled by about 1; None if it is not available.

        A graph that existed before the program ran does not change with the parameters.
        """
        try:
            return self._opened(open, (seed, size)).gradients
        except Exception:
            return None

    def elsewhere(self, seed: int, size: float, open: Collection[str] = ()) -> dict[str, Tensor] | None:
        """Return the gradient at parameters scaled by about 1; None if the program fails there."""
        return self.nudged(seed, size, open)

    @cached_property
    def _loss_rounding(self) -> float:
        return min(rounding(parameter.dtype) for parameter in self.params.values())


@contextmanager
def answers_of(
    loss: Callable[[], Tensor],
    params: Parameters,
    around: Callable[[Snapshot], AbstractContextManager[Any]] = nullcontext,
    sparing: Sparing = lambda _: nullcontext(False),
) -> Iterator[ProgramAnswers]:
    """Run a loss function and return its answers, which are cheapest inside of the ``with``.

    Every run except the plain one is inside of `around`. If a run with open blocks fails, `sparing` may exempt the
    cause.
    """
    with ALONE, ExitStack() as session:

        def begun(*, everywhere: bool = False) -> ProgramAnswers:
            program = Program(loss, params, around, everywhere=everywhere)
            session.enter_context(program.snapshot.session(is_new=True))
            return ProgramAnswers(program, sparing, session.enter_context(ExitStack()))

        answers = begun()
        if answers.differs:  # by state in the globals of a package, perhaps
            session.close()
            again = begun(everywhere=True)
            answers = answers if again.reason else again
            answers.remarks += [] if again.reason else [_MOVED]
        yield answers


def sentence(error: Exception) -> str:
    """Return the sentence of an error, without the advice after it."""
    line = (str(error) or repr(error)).splitlines()[0].partition(" Hint: ")[0]
    return re.split(r"(?<!\.)\. ", line)[0].rstrip(".")  # dots of an ellipsis do not end it


def _fewer(found: Mapping[str, Meeting], first: Mapping[str, Meeting]) -> list[str]:
    """Return the blocks that were met less often than at first; places in code that torch generates do not count."""
    known = {name: meeting.calls for name, meeting in first.items() if not name.startswith(_GENERATED)}
    return [name for name, calls in known.items() if name not in found or found[name].calls < calls]


def _mismatch(found: Answer, plain: Answer) -> str:
    if found.loss != plain.loss:
        return f"the loss is {found.loss!r}, in a plain run {plain.loss!r}"
    for name, gradient in plain.gradients.items():
        if not equal(found.gradients[name], gradient):
            return f"the gradient of {name} differs from that of a plain run"
    return ""


def _is_close(found: Answer, plain: Answer) -> bool:
    """Return whether two answers are equal up to rounding."""
    same_loss = math.isclose(found.loss, plain.loss, rel_tol=rounding(torch.float32))
    return same_loss and are_close(found.gradients, plain.gradients)
