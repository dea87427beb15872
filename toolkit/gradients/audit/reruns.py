"""Further runs of a script, for the stops that its recorded step cannot open.

These runs are not recorded. The first keeps every stop in place, and has to give the recorded gradients bit for bit.
Each other run removes one stop, in the audited step alone. The leak is the difference of its gradient from the first.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from toolkit.blocks import Reached, is_site, opened, register
from toolkit.gradients._answers import Leak, sentence
from toolkit.gradients._cuts import WRITES_STAY_BLOCKED
from toolkit.gradients._eager import without_compiled_code
from toolkit.gradients._nodes import leaves_in
from toolkit.gradients._parts import Parts
from toolkit.gradients._program import coarsest, keeping_selected, nodes_of
from toolkit.gradients._resident import takes_memory
from toolkit.gradients.audit.answer import Audit
from toolkit.gradients.audit.places import BareBlocks
from toolkit.gradients.audit.replaced import replaced
from toolkit.gradients.audit.scripts import Digest, Question, RecordedRun, Script, ScriptRun, is_name, key_of
from toolkit.gradients.audit.steps import EARLIER, Storages, shaken
from toolkit.gradients.audit.variables import modules_by_name, objects_of, parameters_of, scopes_of
from toolkit.gradients.verdict import BlockEffect, equal, flat, norm

__all__ = ["Found", "OpenedRun", "answer_by_reruns", "left_for_reruns"]

_DIFFERS = "`--rerun` opens nothing: when it runs again, the script computes another gradient"
_CHANGES = "opened, it changes an earlier backward pass"
_LATER = "it opens from the end of the backward pass before this one on: earlier, it changes that pass"
_NEVER_COMES = "opened, the script does not come to this backward pass"
_ELSEWHERE = "a further run of the script comes to it in another thread, too, where it stays in place"
_ONE_NAME = "`--rerun` opens nothing: two parameters have no name, and equal values"

# A removal changes nothing here: the graph is freed, or the writes of a region into older tensors are state.
_FINAL = frozenset({EARLIER, WRITES_STAY_BLOCKED})

# Random changes of the cotangents, which show how far rounding moves a gradient.
_NUDGES = 3


class Pass(NamedTuple):
    """A backward pass that is asked about.

    Attributes:
        n_before: The number of attended backward passes before it.
        gradients: Key of a parameter (see `key_of`) -> gradient, None without a path.
        noise: Key -> norm of the change of this gradient under rounding.
        precision: The coarsest rounding, relative.
    """

    n_before: int
    gradients: dict[str, Tensor | None]
    noise: dict[str, float]
    precision: float


@dataclass
class Found:
    """The results of a run.

    Attributes:
        passes: Number of a backward pass that is asked about -> its gradients.
        digests: The loss and the gradients of each attended backward pass.
        reached: The open places that a gradient-carrying tensor reached.
        met: The places that the step came to.
        elsewhere: Calls in other threads, with their places, and the names of open blocks.
        nested: Place -> the regions around it.
        closed: Place -> the reason why it stayed closed.
        partly: Place -> the parts that stayed blocked.
        error: The error with which the script ended.
    """

    passes: dict[int, Pass] = field(default_factory=dict)
    digests: list[Digest] = field(default_factory=list)
    reached: frozenset[str] = frozenset()
    met: frozenset[str] = frozenset()
    elsewhere: frozenset[str] = frozenset()
    nested: dict[str, tuple[str, ...]] = field(default_factory=dict)
    closed: dict[str, str] = field(default_factory=dict)
    partly: dict[str, str] = field(default_factory=dict)
    error: str = ""


class OpenedRun(ScriptRun):
    """A run in which some places are removed from the step that is asked about.

    Attributes:
        found: The results.
    """

    def __init__(self, question: Question, places: Collection[str], after: int = 0) -> None:
        """Prepare a run that removes the places after this number of backward passes of the step."""
        super().__init__(replace(question, continues=False))
        self.found, self._places, self._after = Found(), places, after
        self._opening, self._reached = ExitStack(), Reached()

    def run(self, script: Script) -> None:
        """Run a script until the question is answered, or to its end."""
        try:
            super().run(script)
        except Exception as error:
            self.found.error = f"{type(error).__name__}: {sentence(error)}"
            if not self._places:  # else it is an answer, and no error of the script
                raise

    @contextmanager
    def attending(self) -> Iterator[None]:
        """Remove the places from the step that is asked about."""
        for place in self._places:
            if not is_site(place):  # the name of a block that may not have run yet
                register(place, "")
        bare = BareBlocks()
        with without_compiled_code(), replaced(bare, Storages()), self._opening:
            if not self._after:
                self._open()
            try:
                yield
            finally:
                self.found.reached |= self._reached
                self.found.met |= bare.sites.keys()
                self.found.elsewhere |= bare.elsewhere.keys() | self._reached.elsewhere
                self.found.nested |= bare.nested
                self.found.closed |= bare.real
                self.found.partly |= bare.partly

    @contextmanager
    def passing(self, value: Tensor, inputs: Collection[Tensor] | None, *, is_asked: bool) -> Iterator[None]:
        """Run a backward pass, and keep its numbers."""
        if self.is_attending and value.grad_fn is not None:
            if is_asked:
                self.found.passes[self.backward_passes] = _pass_of(value, inputs, len(self.found.digests))
            self.found.digests.append(Digest.of(value, inputs))
        yield
        if self.is_attending and self.steps == self.question.step - 1 and self.backward_passes == self._after:
            self._open()

    def _open(self) -> None:
        self._reached = self._opening.enter_context(opened(*self._places, leaves_out=True))


def left_for_reruns(audit: Audit) -> list[str]:
    """Return the places that are not open in any part, for which a run without them is of use."""
    known = {effect.name for effect in audit.effects}
    closed = [entry.site for entry in audit.unopened if entry.site not in known and not _is_final(entry.reason)]
    return closed if audit.valid else []


def _is_final(reason: str) -> bool:
    return reason in _FINAL or takes_memory(reason)  # a further run would take as much


class Rerun(Protocol):
    """Runs a script once more."""

    def __call__(self, places: Sequence[str], after: int = 0) -> Found:
        """Return the results without some places, after this number of backward passes of the step."""


def answer_by_reruns(run: RecordedRun, again: Rerun) -> None:
    """Add the effects of the stops that the answers of a run leave closed.

    Args:
        run: The run; its answers are changed.
        again: Runs its script once more.
    """
    places = dict.fromkeys(place for audit in run.audits.values() for place in left_for_reruns(audit))
    if not places:
        return
    plain = again(())
    entries = [_Entry(number, audit, run.keys[number], plain) for number, audit in run.audits.items()]
    entries = [entry for entry in entries if entry.holds()]
    for place in places if entries else ():
        found = again([place])
        for entry in entries:
            if place in left_for_reruns(entry.audit):
                entry.add(place, found, again)
    for entry in entries:
        entry.find_set(again)


class _Closed(Exception):
    """Places that do not open in a further run either; the message is the reason."""


class _Changed(_Closed):
    """Places that change an earlier backward pass."""


class _Entry(NamedTuple):
    """An answer of a recorded run, and the further run in which every stop is in place.

    Attributes:
        number: The number of the backward pass.
        audit: The answer.
        keys: Key of a parameter (see `key_of`) -> its name in the answer.
        plain: The results of the further run.
    """

    number: int
    audit: Audit
    keys: dict[str, str]
    plain: Found

    def holds(self) -> bool:
        """Return whether the further run gives the gradient of the answer, bit for bit; if not, remark on it."""
        audit, plain = self.audit, self.plain.passes.get(self.number)
        if len(self.keys) < len(audit.blocked):
            remark = _ONE_NAME
        elif plain is None or plain.gradients.keys() - self.keys.keys() or not all(map(self._is_plain, self.keys)):
            remark = _DIFFERS
        else:
            return True
        audit.remarks.append(remark)
        return False

    def add(self, place: str, found: Found, again: Rerun) -> None:
        """Add the effect of a place to the answer, or the reason why there is none."""
        try:
            try:
                effect, closed = self._effect([place], found), found.partly.get(place, "")
            except _Changed:
                effect, closed = self._effect([place], self._later([place], again)), _LATER
            self.audit._include(effect, closed)
        except _Closed as error:
            self.audit._close(place, str(error))

    def _later(self, places: Sequence[str], again: Rerun) -> Found:
        """Return the results of a run that removes places after the backward pass before the one of this answer.

        Raises:
            _Changed: If the answer is for the first backward pass, or the program does not come to a place any more.
        """
        found = again(places, self.number - 1) if self.number > 1 else Found()
        if not found.reached.issuperset(places):
            raise _Changed(_CHANGES)
        return found

    def find_set(self, again: Rerun) -> None:
        """Add a smallest set of places that act only together, if one of them needs a further run."""
        rest = [effect.name for effect in self.audit.effects if effect.verdict.is_silent]
        rest += self._unlisted(set(rest) & set(self.audit.reruns))
        try:
            loudest = self._loud(rest, again)
        except _Closed as error:
            self.audit.remarks.append(f"not opened together: {' + '.join(rest)}: {error}")
            return
        for name in rest if loudest and len(rest) > 2 else ():
            with suppress(_Closed):
                if found := self._loud([other for other in rest if other != name], again):
                    rest, loudest = [other for other in rest if other != name], found
        self.audit.sets += [loudest] if loudest else []

    def _unlisted(self, places: Collection[str]) -> list[str]:
        """Return the regions around these places, and the stops inside of them, that the recorded graph lacks."""
        nested = self.plain.nested
        around = {region for place in places for region in nested.get(place, ())}
        inside = {place for place, regions in nested.items() if not set(places).isdisjoint(regions)}
        listed = {effect.name for effect in self.audit.effects} | {entry.site for entry in self.audit.unopened}
        return sorted((around | inside) - listed)

    def _loud(self, places: Sequence[str], again: Rerun) -> BlockEffect | None:
        """Return the effect of opening places together; None if it is zero, or needs no further run.

        Raises:
            _Closed: If they did not open.
        """
        if len(places) < 2 or not set(places) & set(self.audit.reruns):
            return None
        try:
            effect = self._effect(places, again(places))
        except _Changed:
            effect = self._effect(places, self._later(places, again))
        return None if effect.verdict.is_silent else effect

    def _effect(self, places: Sequence[str], found: Found) -> BlockEffect:
        """Return the effect of places that a further run has opened.

        Raises:
            _Closed: If they did not open.
        """
        before, after = self.plain.passes[self.number], found.passes.get(self.number)
        for place in places:
            if reason := found.closed.get(place):
                raise _Closed(reason)
            if any(call == place or call.endswith(f" at {place}") for call in found.elsewhere):
                raise _Closed(_ELSEWHERE)
            if is_site(place) and not found.error and place not in found.met:
                raise _Closed("a further run of the script does not come to it")
        if after is None:
            raise _Closed(f"opened, the script fails: {found.error}" if found.error else _NEVER_COMES)
        if found.digests[: after.n_before] != self.plain.digests[: before.n_before]:
            raise _Changed(_CHANGES)
        self._include_parameters(after)
        leak = self._leak(after, carried=not found.reached.isdisjoint(places))
        noise = [[run.noise.get(key, 0.0) for key in self.keys] for run in (before, after)]
        return self.audit._measured(places, leak, np.array(noise), max(before.precision, after.precision))

    def _include_parameters(self, after: Pass) -> None:
        """Add the parameters to which the recorded step has no path, and a further run has one.

        Raises:
            _Closed: If one has no name, perhaps because another has taken it.
        """
        found = {key: gradient for key, gradient in after.gradients.items() if gradient is not None}
        further = {key: found[key] for key in sorted(found.keys() - self.keys.keys())}
        if nameless := ", ".join(key for key in further if not is_name(key)):
            raise _Closed(f"opened, it gives a gradient to {nameless}, which the recorded step does not reach")
        if further:
            self.keys.update(zip(further, further, strict=True))
            self.audit._include_parameters(further)

    def _leak(self, after: Pass, *, carried: bool) -> Leak:
        """Return the difference between two runs.

        A constant that the step makes a leaf is none without the stop; its gradient counts as unchanged.
        """
        parts = dict[str, Tensor]()
        for key, name in self.keys.items():
            found, blocked = after.gradients.get(key), self.audit.blocked[name]
            if found is not None and not equal(found, blocked.cpu()):
                parts[name] = flat(found).to(flat(blocked)) - flat(blocked)
            elif found is None and blocked.any() and isinstance(self.audit._parameters[name], nn.Parameter):
                parts[name] = -flat(blocked)
        reached = frozenset(name for key, name in self.keys.items() if after.gradients.get(key) is not None)
        return Leak(parts, reached, carried=carried)

    def _is_plain(self, key: str) -> bool:
        found, blocked = self.plain.passes[self.number].gradients.get(key), self.audit.blocked[self.keys[key]]
        return not blocked.any() if found is None else equal(found, blocked.cpu())


# --- in the further run -----------------------------------------------------------------------------------------------


def _pass_of(value: Tensor, inputs: Collection[Tensor] | None, n_before: int) -> Pass:
    """Return the gradients of a backward pass that is about to begin, and how far rounding moves them."""
    scopes, nodes = scopes_of(sys._getframe(1)), nodes_of(value)
    parts = Parts(modules=modules_by_name(objects_of(nn.Module), scopes))
    leaves = leaves_in(nodes) if inputs is None else list(inputs)
    params = parameters_of(leaves, parts, scopes)
    keys = {name: key_of(name, parameter) for name, parameter in params.items()}
    gradients, precision = _gradients(value, params), coarsest(nodes, params)
    noise = dict.fromkeys(keys.values(), 0.0)
    for seed in range(_NUDGES):
        with shaken(nodes, seed, precision):
            moved = _gradients(value, params)
        for name, gradient in gradients.items():
            if gradient is not None and (other := moved[name]) is not None:
                noise[keys[name]] = max(noise[keys[name]], norm([flat(other) - flat(gradient)]))
    kept = {keys[name]: None if gradient is None else gradient.detach().cpu() for name, gradient in gradients.items()}
    return Pass(n_before, kept, noise, precision)


def _gradients(value: Tensor, params: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
    with keeping_selected():
        found = torch.autograd.grad(value, list(params.values()), retain_graph=True, allow_unused=True)
    return dict(zip(params, found, strict=True))
