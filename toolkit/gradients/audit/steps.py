"""Audits of training steps as they run, without a second forward pass.

While a step is recorded, every place that stops a gradient becomes a cut (see `_cuts`). The gradients of the step's own
backward passes stay the same. Before a backward pass the answer is taken from the step's own graph.
"""

from __future__ import annotations

import functools
import gc
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.multiprocessing.reductions import StorageWeakRef

from toolkit.blocks import has_storage
from toolkit.gradients._answers import Answers, Closed, Leak
from toolkit.gradients._cuts import NO_DERIVATIVE, WRITES_STAY_BLOCKED, CutBoard, Unrecordable
from toolkit.gradients._eager import without_compiled_code
from toolkit.gradients._nodes import (
    EVERY_BLOCK,
    gate_of,
    is_cut,
    is_foreign,
    is_freed,
    leaves_in,
    reachable_nodes,
    regions_of,
    roots_in,
    source_of,
    successors,
)
from toolkit.gradients._parts import Parts
from toolkit.gradients._program import Answer, Parameters, coarsest, named_parameters
from toolkit.gradients._snapshot import RandomState, Snapshot
from toolkit.gradients.audit.answer import Audit
from toolkit.gradients.audit.losses import HIDDEN_CHANGE
from toolkit.gradients.audit.passes import Refused, backward_passes
from toolkit.gradients.audit.places import BareBlocks
from toolkit.gradients.audit.replaced import replaced
from toolkit.gradients.audit.variables import modules_by_name, objects_of, parameters_of, scopes_of
from toolkit.gradients.compare import Comparison
from toolkit.gradients.graph import graph_of_recorded
from toolkit.gradients.verdict import equal, flat

__all__ = ["EARLIER", "AuditedStep", "Recorder", "Storages", "Unrecordable", "audited", "shaken"]

EARLIER = "it stops a tensor of an earlier backward pass, whose graph is freed"
"""The reason why a place stays closed whose tensors lead to a graph that is gone."""

_BEFORE = "it stops a tensor from before this step"
_NESTED = "it stops a nested tensor, which is recorded in the layout torch.jagged alone"
_INNER = "a derivative inside of the step reaches it, so opening it would change values of the step, too"
_NOT_DERIVED = "an operation inside of it has no derivative"
_REWRITTEN = "its result is changed in place after it"
_BLURRED = "a transform of torch.func switches recording on again inside of it"
_ASKED = "the program asks whether its result carries a gradient, and is answered as if it were closed"
_SHARED = "an earlier backward pass has used its values, too"
_OVERWRITTEN = "a tensor is changed in place that a derivative of the region needs"
_EAGER = "compiled functions ran in eager mode"
_OVER = "the step is over, or its graph is freed; ask inside of `audited`, after `backward(retain_graph=True)`"
_ALONE = "answered for this backward pass alone: in the earlier ones of the step every stop stays in place"
_BEYOND = "the loss reaches a graph from before the recording, whose places are unknown"


class Recorder:
    """Records a program, and answers for its backward passes.

    Attributes:
        bare: The places that stop a gradient.
        board: Their cuts.
    """

    def __init__(self, real: Mapping[str, str], memory: float | None = None) -> None:
        """Record every place except those in `real`, place -> reason; `memory` as for `audited`."""
        self.board = CutBoard(real, memory)
        self._parted: list[tuple[weakref.ref[Tensor], set[str]]] = []
        self._compiled: list[object] = []
        self.bare = BareBlocks(
            real=dict(real),
            spares=EVERY_BLOCK,
            is_constant=self.board.is_constant,
            close_regions=self.board.close_regions,
            open_regions=self.board.open_regions,
            regions_without_casts=self.board.regions_without_casts,
        )

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the body of a ``with``; afterwards no tensor leads to a cut."""
        storages = Storages()
        try:
            with without_compiled_code(self._compiled), replaced(self.bare, storages), self.board.forward():
                yield
        finally:
            self._forget()

    def answer(
        self, value: Tensor, inputs: Collection[Tensor] | None, params: Parameters, *, n_before: int = 0
    ) -> Audit:
        """Return the answer for a backward pass from `value` that is about to begin.

        Args:
            value: The loss.
            inputs: The tensors that the backward pass differentiates by; None for every leaf.
            params: As for `audit`.
            n_before: The number of backward passes of the step before this one.

        Raises:
            Unrecordable: If the recorded gradient may differ from that of the plain step.
            Refused: If the graph of the step cannot be differentiated a second time.
        """
        scopes = scopes_of(sys._getframe(1))
        alive = objects_of(nn.Module, torch.amp.GradScaler, torch.optim.Optimizer)
        parts = Parts(modules=modules_by_name(alive, scopes))
        given = None if params is None else named_parameters(params, parts)
        if given is None and inputs is not None:
            given = parameters_of(list(inputs), parts, scopes)
        answers = self._answers_for(value, given, parts, scopes, alive)
        comparison = Comparison(answers, answers.names(self.bare.partly), nested=self.bare.nested)
        return Audit(
            comparison,
            self.bare,
            is_recorded=True,
            graph=lambda: graph_of_recorded(value, answers.params, answers.parts, self.board),
            remarks=[
                *[_ALONE] * bool(n_before),
                *[_BEYOND] * self.reaches_beyond(value),
                *[_EAGER] * bool(self._compiled),
                *_scaling_of(value, alive),
                *self.board.memory.remarks,
            ],
            closed=self._closed(answers, comparison),
            unreached=dict.fromkeys(sorted(answers.unreached), ""),
            off_graph=answers.off_graph(self.bare.partly),
        )

    def _answers_for(
        self,
        value: Tensor,
        params: Mapping[str, Tensor] | None,
        parts: Parts,
        scopes: Sequence[Mapping[str, Any]],
        alive: Iterable[object],
    ) -> StepAnswers:
        try:
            return StepAnswers(value, self.board, self.bare, params, parts, scopes, alive)
        except RuntimeError as error:  # torch refuses a graph that has saved a constant before `part` made it one
            if self._parted and "detached in-place" in str(error):
                places = set[str]().union(*(places for _, places in self._parted))
                raise Unrecordable(dict.fromkeys(sorted(places), _SHARED)) from error
            raise

    def _closed(self, answers: StepAnswers, comparison: Comparison) -> dict[str, str]:
        """Return the blocks that stayed closed, or opened only in part, with reasons."""
        earlier = {
            name: answers.why_earlier([name]) for name in sorted(answers.earlier.difference(comparison.unopened))
        }
        nested = dict.fromkeys(sorted(self.board.nested.difference(comparison.unopened)), _NESTED)
        if any(tensor() is not None for tensor, _ in self._parted):
            gc.collect()  # the graph of an earlier pass may end in a cycle, and keeps its values until then
        alive = [places for tensor, places in self._parted if tensor() is not None]
        shared = dict.fromkeys(sorted(set[str]().union(*alive).difference(comparison.unopened)), _SHARED)
        asked = dict.fromkeys(sorted(self.board.asked), _ASKED)
        return (
            asked
            | earlier
            | nested
            | shared
            | self.board.too_large
            | dict.fromkeys(sorted(self.board.written), WRITES_STAY_BLOCKED)
        )

    def reaches_beyond(self, value: Tensor) -> bool:
        """Return whether the graph of a loss goes back to before the recording."""
        return any(map(self.board.is_earlier, reachable_nodes(value.grad_fn, EVERY_BLOCK)))

    def prepare(self, value: Tensor) -> None:
        """Close the regions behind a backward pass from `value` that is about to begin.

        Raises:
            Unrecordable: As `answer`.
        """
        if value.grad_fn is not None:
            self.board.close_regions(roots_in(value))
            refuse_strays(value, self.board)

    def part(self, value: Tensor) -> None:
        """Detach the tensors that are constants of the plain program and whose graph a backward pass has freed.

        In the recorded program such constants have a graph. The backward pass from `value` runs and frees its nodes, so
        the next backward pass could not run them again.
        """
        board, known = self.board, dict[Any, bool]()
        nodes = _plainly_behind([] if value.grad_fn is None else [value.grad_fn])
        freed = {node for node in nodes if not board.leads_to_a_leaf(node, known) and is_freed(node)}
        for tensor, node in self._constants(known) if freed else ():
            if not freed.isdisjoint([node, *_plainly_behind([node])]):
                _make_constant(tensor)  # which takes no tensor with a weak reference
                self._parted.append((weakref.ref(tensor), board.making([node])))

    def _forget(self) -> None:
        """Make constants of the tensors that are constants of the plain program."""
        self.board.forget_leaves()
        for tensor, _ in self._constants({}):
            _make_constant(tensor)

    def _constants(self, known: dict[Any, bool]) -> list[tuple[Tensor, Any]]:
        """Return the tensors that are constants of the plain program, each with its node."""
        board, found = self.board, ((tensor, tensor.grad_fn) for tensor in objects_of(Tensor))
        return [
            (tensor, node)
            for tensor, node in found
            if not (node is None or board.is_earlier(node) or board.leads_to_a_leaf(node, known))
        ]


class StepAnswers(Answers):
    """Answers for one backward pass of a recorded step, from the step's own graph.

    Attributes:
        parts: The modules that name the parameters.
        unreached: Parameters without a path to the loss, even through blocks: given ones, or without any given,
            parameters of an optimiser that also holds parameters of this step.
        earlier: Blocks that stopped a tensor of an earlier graph, which may be freed.
    """

    board: CutBoard

    def __init__(
        self,
        value: Tensor,
        board: CutBoard,
        bare: BareBlocks,
        params: Mapping[str, Tensor] | None,
        parts: Parts,
        scopes: Sequence[Mapping[str, Any]],
        alive: Iterable[object],
    ) -> None:
        """Differentiate `value` by `params`, or by every leaf, with every block in place."""
        self._value, self.board, self._bare = value, board, bare
        self.remarks, self.reason = [], ""
        board.close_regions(roots_in(value))
        if any(type(node).__name__ == "CheckpointFunctionBackward" for node in self.nodes):
            raise Refused(
                "The step should checkpoint with use_reentrant=False. Found a checkpoint that hides its graph."
            )
        self.parts = parts
        leaves = leaves_in(self.nodes)
        self.params = parameters_of(leaves, parts, scopes) if params is None else params
        known = {id(leaf) for leaf in leaves}
        wanted = parameters_of(_beside(leaves, alive), parts, scopes) if params is None else params
        self.unreached = {name for name, parameter in wanted.items() if id(parameter) not in known}
        refuse_strays(value, board)
        self._cuts = [node for node in self.nodes if is_cut(node)]
        self.earlier = {node.block_name for node in self._cuts if node.source is None}
        self._made_leaves = [node for node in self.nodes if source_of(node) and not is_cut(node)]
        self._snapshot = Snapshot(self.parts, self.params)
        self._snapshot.forget_values()
        self._random = RandomState(parts.generators)
        self._versions = {name: parameter._version for name, parameter in self.params.items()}
        with self.passing(()):
            found, self._arrived = self._closed_derivatives()
        gradients = {name: torch.zeros_like(self.params[name]) if g is None else g for name, g in found.items()}
        paths = frozenset(name for name, gradient in found.items() if gradient is not None)
        self.plain = Answer(value.item(), self.params, gradients, paths, frozenset(), constant=False, moved=False)
        self.board.overwritten.update(
            gate for cut in self._cuts if cut.input._version != cut.version for gate in gate_of(cut)
        )
        self.board.inner |= self.board.overwritten

    def _closed_derivatives(self) -> tuple[dict[str, Tensor | None], dict[Any, Tensor]]:
        """Return the gradient of the step, and the cotangents at its cuts."""
        try:
            return self._derivatives([self._value], None, self._cuts)
        except Closed as error:  # the graph is freed: torch says so
            if shared := self._shared():
                raise Unrecordable(dict.fromkeys(sorted(shared), _SHARED)) from error
            raise error.__cause__ or error from None
        except Exception as error:  # the first nodes of a closed region run, and need what they saved
            is_changed = "modified by an inplace operation" in str(error)
            places, is_inside = self._failing()
            if places:
                reason = _OVERWRITTEN if is_changed else _NOT_DERIVED if is_inside else NO_DERIVATIVE
                raise Unrecordable(dict.fromkeys(sorted(places), reason)) from error
            if hidden := self._bare.through_data() if is_changed else ():
                raise Unrecordable(dict.fromkeys(hidden, HIDDEN_CHANGE)) from error
            raise

    def _shared(self) -> set[str]:
        """Return the blocks that make freed constants of the plain program; none if its own graph is freed, too."""
        known = dict[Any, bool]()
        freed = [node for node in self.nodes if is_freed(node)]
        constants = [node for node in freed if not self.board.leads_to_a_leaf(node, known)]
        own = set(reachable_nodes(self._value.grad_fn, ())).difference(constants)
        return self.board.making(constants) if own.isdisjoint(freed) else set()

    def _failing(self) -> tuple[Collection[str], bool]:
        """Return the closed blocks due to which a node runs that fails in a derivative, and whether they are regions.

        These are all regions if the plain step never runs the node.
        """
        started = list[Any]()
        handles = [node.register_prehook(functools.partial(_note, started, node)) for node in self.nodes]
        try:
            with suppress(Exception):
                self._derivatives([self._value], None, self._cuts)
        finally:
            for handle in handles:
                handle.remove()
        if not started:
            return (), False
        node = started[-1]
        if node in reachable_nodes(self._value.grad_fn, ()) and not regions_of(node):
            is_constant = not self.board.leads_to_a_leaf(node, {})
            return self.board.making([node]) if is_constant else (), False
        return regions_of(node) or frozenset().union(*map(regions_of, self.nodes)), True

    @contextmanager
    def passing(self, open: Collection[str]) -> Iterator[None]:
        """Let the cuts of `open` pass in derivatives."""
        with super().passing(open), self.board.keeping_hooks(self.nodes), self._bare.undoing():
            yield

    def names(self, partly: Collection[str]) -> list[str]:
        """Return the blocks in the graph of the loss, and those that stop nothing; of `partly` this is not known."""
        unseen = self._unseen(partly)
        meetings = self.board.meetings.items()
        return [name for name, meeting in meetings if name in self._met or not (meeting.carried or name in unseen)]

    def off_graph(self, partly: Collection[str]) -> list[str]:
        """Return the blocks that stopped a gradient, and are not in the graph of the loss; `partly` as for `names`."""
        known = self._unseen(partly) | self._met
        return [name for name, meeting in self.board.meetings.items() if meeting.carried and name not in known]

    def _unseen(self, partly: Collection[str]) -> set[str]:
        """Return the blocks of which it is not known whether they are in the graph."""
        return self.board.written.union(partly, self._bare.real, self.board.too_large)

    @cached_property
    def _met(self) -> set[str]:
        """The blocks in the graph of the loss, or behind a derivative inside of the step."""
        return self.board.inner.union(*(gate_of(node) | regions_of(node) for node in self.nodes))

    @property
    def gated(self) -> Tensor:
        """The loss."""
        return self._value

    @cached_property
    def precision(self) -> float:
        """The coarsest relative rounding of the step."""
        return coarsest(self.nodes, self.params)

    def gradient(self, open: Collection[str]) -> dict[str, Tensor]:
        """Return parameter -> gradient while exactly these blocks are open."""
        self.check_unmodified()
        leaks, _ = self._leaks(open)
        plain = self.plain.gradients
        return {name: _sum(plain[name], leaks[name]) if name in leaks else plain[name].clone() for name in plain}

    def leak(self, names: Sequence[str]) -> Leak:
        """Return the leak of these blocks, opened together."""
        carried = any(self.board.meetings[name].carried for name in names)
        leaks, reached = self._leaks(names) if carried else ({}, self.plain.reached)
        if carried and not leaks and self._leads_to_freed(names):
            raise Closed(EARLIER)
        return Leak({name: flat(leak) for name, leak in leaks.items()}, reached, carried=carried)

    def why_earlier(self, names: Iterable[str]) -> str:
        """Return the reason why blocks stay closed that stop tensors from before the recording."""
        with self.quietly():
            return _earlier(node for name in names for node in reachable_nodes(self.board.before[name], EVERY_BLOCK))

    def _leads_to_freed(self, open: Collection[str]) -> bool:
        """Return whether a gradient would come to a freed graph, which may end at parameters that are frozen by now."""
        sources = [cut.source for cut in self._arrived if cut.source is not None and gate_of(cut) <= frozenset(open)]
        return any(is_freed(node) for source in sources for node in reachable_nodes(source.node, open))

    def answers_at_once(self, open: Collection[str]) -> bool:
        """Return whether cuts alone can answer for these blocks."""
        return not set(open) & (self.board.regions | self.board.inner)

    def arrivals(self, share: float) -> list[tuple[str, GradientEdge, Tensor]]:
        """Return the cotangents that arrive at the cuts, for a part of the loss."""
        with self.passing(()):
            _, arrived = self._derivatives([self._value], [torch.full_like(self._value, share)], self._cuts)
        return [(cut.block_name, cut.source, cotangent) for cut, cotangent in arrived.items() if cut.source is not None]

    def nudged(self, seed: int, size: float, open: Collection[str] = ()) -> dict[str, Tensor] | None:
        """Return the gradient with the cotangents of every node scaled by about 1, in place of a second run."""
        plain, arrived = self.plain, self._arrived
        try:
            with self.passing(()), shaken(self.nodes, seed, size):
                found, self._arrived = self._derivatives([self._value], None, self._cuts)
                moved = {name: plain.gradients[name] if g is None else g for name, g in found.items()}
                self.plain = replace(plain, gradients=moved)
                return self.gradient(open)
        except Closed:
            return None
        finally:
            self.plain, self._arrived = plain, arrived

    @contextmanager
    def _aside(self) -> Iterator[None]:
        one_thread = torch.autograd.set_multithreading_enabled(False)
        aside = self._snapshot.set_aside(runs=False)
        with aside, self.board.of_the_program(), torch.enable_grad(), one_thread:
            buffers = [buffer for module in self.parts.modules.values() for buffer in module.buffers()]
            with self._bare.copied(buffers):  # a checkpoint computes again with them
                yield

    def _leaks(self, open: Collection[str]) -> tuple[dict[str, Tensor], frozenset[str]]:
        """Return parameter -> leak of these blocks, and the parameters with a path to the loss while they are open."""
        opened = frozenset(open)
        if large := sorted(opened & self.board.too_large.keys()):
            raise Closed(self.board.too_large[large[0]])
        if opened & self.board.inner:
            raise Closed(_INNER if opened & self.board.inner - self.board.overwritten else _REWRITTEN)
        if opened & self.board.nested:
            raise Closed(_NESTED)
        if opened & self.earlier.difference(*(gate_of(cut) for cut in self._cuts if cut.source is not None)):
            raise Closed(self.why_earlier(opened & self.earlier))
        if opened & self._bent:
            raise Closed("a hook or a custom function behind it may not be linear")
        leaks, reached = dict[str, Tensor](), set(self.plain.reached)
        with self.passing(opened):
            arrived = self._arrived
            if opened & self.board.regions:
                self._refuse_strays(opened)
                found, arrived = self._derivatives([self._value], None, self._cuts)
                reached.update(name for name, gradient in found.items() if gradient is not None)
                leaks = {
                    name: gradient - self.plain.gradients[name]
                    for name, gradient in found.items()
                    if gradient is not None and not equal(gradient, self.plain.gradients[name])
                }
            while arrived := {cut: cotangent for cut, cotangent in arrived.items() if self._passes(cut, opened)}:
                sources = [cut.source for cut in arrived]
                found, arrived = self._derivatives(sources, list(arrived.values()), self._cuts_behind(sources))
                _add(leaks, found.items())
                reached.update(name for name, leak in found.items() if leak is not None)
        return leaks, frozenset(reached)

    def _refuse_strays(self, opened: frozenset[str]) -> None:
        try:
            refuse_strays(self._value, self.board, opened)
        except Unrecordable as error:
            raise Closed(f"inside of another stop, {next(iter(error.places.values()))}") from error

    def _derivatives(
        self, outputs: Sequence[Any], cotangents: Sequence[Tensor] | None, cuts: Sequence[Any]
    ) -> tuple[dict[str, Tensor | None], dict[Any, Tensor]]:
        """Return parameter -> gradient, None without a path, and cut -> the cotangent that arrives at it."""
        wanted = {name: parameter for name, parameter in self.params.items() if parameter.requires_grad}
        ends = [*cuts, *self._made_leaves]
        inputs: list[Any] = [*wanted.values(), *(GradientEdge(node, 0) for node in ends)]
        found: dict[str, Tensor | None] = dict.fromkeys(self.params)
        arrived: dict[Any, Tensor] = {}
        while inputs and outputs:
            self._random.restore()  # a backward pass may draw
            try:
                with self.board.keeping_hooks(self.nodes), self._bare.undoing():
                    gradients = torch.autograd.grad(outputs, inputs, cotangents, retain_graph=True, allow_unused=True)
            except RuntimeError as error:
                if "second time" not in str(error) and not self._is_forgotten(error):
                    raise
                over = self._is_forgotten(error) or any(map(is_freed, reachable_nodes(self._value.grad_fn, ())))
                raise Closed(_OVER if over else EARLIER) from error
            _add(found, zip(wanted, gradients, strict=False))
            at_ends = dict(zip(ends, gradients[len(wanted) :], strict=True))
            _add(arrived, ((cut, at_ends[cut]) for cut in cuts))
            further = {
                leaf: cotangent
                for leaf in self._made_leaves
                if (cotangent := at_ends[leaf]) is not None and self._goes_on(leaf)
            }
            outputs, cotangents = [source_of(leaf) for leaf in further], list(further.values())
        return found, arrived

    def _is_forgotten(self, error: RuntimeError) -> bool:
        """Return whether a derivative fails because the recording is over, which makes constants of some tensors."""
        return not self._bare.is_active and "detached in-place" in str(error)

    def _passes(self, cut: Any, opened: frozenset[str]) -> bool:
        return gate_of(cut) <= opened and self._goes_on(cut)

    def _goes_on(self, node: Any) -> bool:
        """Return whether a derivative goes on behind a cut or a made leaf: else hooks there would run, with None."""
        source = source_of(node)
        return source is not None and all(name in self.board.opened for name in regions_of(source.node))

    def _cuts_behind(self, sources: Sequence[GradientEdge]) -> list[Any]:
        nodes = [source.node for source in sources]
        return [node for node in {*nodes, *_plainly_behind(nodes)} if is_cut(node)]

    @cached_property
    def _bent(self) -> set[str]:
        """The blocks with a hook or a custom function behind them, which may not be linear."""
        bent = set[str]()
        for node in [*self._cuts, *self._made_leaves]:
            source = source_of(node)
            behind = [] if source is None else list(reachable_nodes(source.node, EVERY_BLOCK))
            if not (self.board.linear and all(map(self._is_plain, behind))):
                bent |= gate_of(node) or frozenset().union(*map(_blocks_of, behind))
        return bent

    def _is_plain(self, node: Any) -> bool:
        return not (is_foreign(node) or self.board.is_hooked(node))


class AuditedStep:
    """The answers for the backward passes of a step; see `audited`.

    Attributes:
        audits: One for each backward pass, in the order of the step.
    """

    audits: list[Audit]

    def __init__(self) -> None:
        """Wait for the first backward pass."""
        self.audits = []

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.audits)) or "no backward pass"

    def __repr__(self) -> str:
        return f"AuditedStep({len(self.audits)} backward passes)"

    def _repr_html_(self) -> str:
        return "".join(audit._repr_html_() for audit in self.audits)


@contextmanager
def audited(params: Parameters = None, *, memory: float | None = None) -> Iterator[AuditedStep]:
    """Audit the step inside of a ``with``, at each of its backward passes.

    The step runs as it does without the audit: its loss and its gradients are the same, bit for bit. Places whose
    opening would change more than one gradient, for example because the step differentiates inside of its forward
    pass, are listed as not opened; `audit` can run a loss function again and may open them. Compiled functions run in
    eager mode. An answer can be printed later; its gradients can be asked for only inside of the step.

    Args:
        params: The parameters to differentiate by: a module, a tensor, a dict or iterable of these, or None for
            every leaf that the loss depends on.
        memory: The most memory in MB that recorded regions, such as a rollout in a ``no_grad``, may take; None for half
            of the memory that is free. Beyond it they are not recorded, and are listed as not opened.

    Raises:
        RuntimeError: If another audit is running in this process, or if the step would have another gradient while it
            is recorded. The error is raised before the backward pass, and names the place.
        ValueError: If the step checkpoints with ``use_reentrant=True``, or if `memory` is negative.

    Example:
        >>> net = torch.nn.Linear(3, 1)
        >>> with audited(net) as answer:
        ...     y = net(torch.ones(2, 3))
        ...     (y * y.detach()).sum().backward()
        >>> [str(effect.verdict) for effect in answer.audits[0].effects]
        ['partial']
    """
    step, recorder = AuditedStep(), Recorder({}, memory)

    @contextmanager
    def begin(value: Tensor, inputs: Collection[Tensor] | None) -> Iterator[None]:
        with recorder.board.of_the_program():
            if value.grad_fn is not None:
                step.audits.append(recorder.answer(value, inputs, params, n_before=len(step.audits)))
            yield
            recorder.part(value)

    with recorder.recording(), backward_passes(begin):
        yield step


def refuse_strays(value: Tensor, board: CutBoard, open: Collection[str] = ()) -> None:
    """Raise Unrecordable if a closed region does not stop everything that would run without it.

    A region is closed by a hook on each of its nodes. The nodes behind these still run, without a gradient: a custom
    function may return numbers even so, and a node of an earlier step is freed.
    """
    reached, opened = set(reachable_nodes(value.grad_fn, open)), frozenset(open)
    entries = [node for node in reached if regions_of(node) - opened]
    found: dict[str, str] = {}

    def strays(node: Any) -> bool:
        """Return whether a node should not run without a gradient: it is hooked, custom, or of an earlier step."""
        closed = bool(regions_of(node) - opened)
        if board.is_hooked(node):
            return node not in reached or closed
        return node not in reached and not closed and (is_foreign(node) or board.is_earlier(node))

    some_stray = any(map(strays, [*entries, *_plainly_behind(entries)]))
    for node in entries:
        regions = regions_of(node) - opened
        found.update(dict.fromkeys(regions & board.blurred, _BLURRED))
        strange = list(filter(strays, [node, *_plainly_behind([node])])) if some_stray else []
        if earlier := list(filter(board.is_earlier, strange)):
            found.update(dict.fromkeys(regions, _earlier(earlier)))
        elif strange:
            found.update(dict.fromkeys(regions, "a hook or a custom function behind it would run"))
    if found:
        raise Unrecordable(found)


def _earlier(nodes: Iterable[Any]) -> str:
    """Return the reason why a place stays closed that stops a tensor with these nodes, from before the recording."""
    return EARLIER if any(map(is_freed, nodes)) else _BEFORE


@contextmanager
def shaken(nodes: Sequence[Any], seed: int, size: float) -> Iterator[None]:
    """Scale the cotangents that come to each node by random factors, the same each time.

    A node rounds several numbers beside its cotangent, also in the forward pass. So each factor differs from 1 by four
    times the size, as long as that is small.
    """
    size = max(size, min(4 * size, 2**-10))
    handles = [node.register_prehook(_scaling(f"{seed} {index}", size)) for index, node in enumerate(nodes)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _scaling(seed: str, size: float) -> Callable[[tuple[Tensor | None, ...]], tuple[Tensor | None, ...]]:
    """Return a hook that scales cotangents by random factors, which depend on the seed and the shape alone."""

    def scaled(cotangents: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        generator = torch.Generator().manual_seed(int.from_bytes(seed.encode()) % 2**63)
        return tuple(
            cotangent
            if cotangent is None or cotangent.layout is not torch.strided
            else cotangent
            * (1 + size * torch.randn(cotangent.shape, generator=generator, device=generator.device)).to(cotangent)
            for cotangent in cotangents
        )

    return scaled


def _scaling_of(value: Tensor, alive: Iterable[object]) -> list[str]:
    """Return a remark if the loss is multiplied by the scale of a `GradScaler`."""
    factor = getattr(value.grad_fn, "_saved_other", None)
    if not isinstance(factor, Tensor):
        return []
    scalers = (scaler for scaler in alive if isinstance(scaler, torch.amp.GradScaler))
    scales = [getattr(scaler, "_scale", None) for scaler in scalers]  # one that is not enabled has none
    is_scaled = any(scale is not None and scale.data_ptr() == factor.data_ptr() for scale in scales)
    return [f"a GradScaler has multiplied the loss, gradients and leaks by {factor.item():g}"] * is_scaled


def _beside(leaves: Sequence[Tensor], alive: Iterable[object]) -> list[Tensor]:
    """Return the other parameters of the optimisers that hold one of these leaves, and wait for a gradient."""
    known, beside = {id(leaf) for leaf in leaves}, dict[int, Tensor]()
    for optimizer in (found for found in alive if isinstance(found, torch.optim.Optimizer)):
        held = [held for group in getattr(optimizer, "param_groups", ()) for held in group["params"]]
        if any(id(parameter) in known for parameter in held):
            beside |= {id(one): one for one in held if one.requires_grad and id(one) not in known}
    return list(beside.values())


def _note(started: list[Any], node: Any, _: Any) -> None:
    started.append(node)


def _blocks_of(node: Any) -> frozenset[str]:
    return gate_of(node) | regions_of(node)


def _add(sums: dict[Any, Any], terms: Iterable[tuple[Any, Tensor | None]]) -> None:
    """Add gradients to the sums, key by key."""
    for key, term in terms:
        if term is not None:
            sums[key] = term if sums.get(key) is None else _sum(sums[key], term)


def _sum(a: Tensor, b: Tensor) -> Tensor:
    """Return a sum of gradients, dense if one of them is."""
    return a + b if a.layout is b.layout else a.to_dense() + b.to_dense()


class Storages:
    """The memory of the tensors that exist now, as long as they do."""

    def __init__(self) -> None:
        kept = [tensor.untyped_storage() for tensor in objects_of(Tensor) if has_storage(tensor)]
        self._alive = {storage._cdata: StorageWeakRef(storage) for storage in kept}

    def storages(self) -> Storages:
        """Return itself: the places ask whether it contains the memory of a tensor."""
        return self

    def __contains__(self, memory: object) -> bool:
        found = self._alive.get(memory)
        return found is not None and not found.expired()


def _make_constant(tensor: Tensor) -> None:
    if not tensor._is_view():
        tensor.detach_()
        return
    with suppress(RuntimeError):  # it is in use: then it keeps its graph, which ends at the cut
        torch.utils.swap_tensors(tensor, tensor.detach())


def _plainly_behind(nodes: Sequence[Any]) -> Iterator[Any]:
    """Yield the nodes that autograd runs after these ones, whether or not regions drop the gradient on the way."""
    stack, seen = list(nodes), set(nodes)
    while stack:
        node = stack.pop()
        for behind in () if is_cut(node) else successors(node):
            if behind not in seen:
                seen.add(behind)
                stack.append(behind)
                yield behind
