"""Audits of whole training scripts, which run as they are.

The script is recorded from the end of an optimiser's step on (see `steps`). Before one of the next backward passes the
question is answered; then the script ends, or goes on unchanged. If a recording fails, the script starts again, and the
place at which the recording failed keeps its meaning. A script that turns out to train by `torch.autograd.grad` starts
again too; then these calls are its backward passes.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import runpy
import sys
import threading
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from toolkit._swapped import swapped
from toolkit.gradients._eager import without_compiled_code
from toolkit.gradients._gates import replacing
from toolkit.gradients._nodes import gate_of, leaves_in, reachable_nodes
from toolkit.gradients._program import keeping_selected
from toolkit.gradients._threads import this_thread
from toolkit.gradients.audit._input import KeptInput
from toolkit.gradients.audit.answer import Audit
from toolkit.gradients.audit.passes import Refused, backward_passes, root_of_pass
from toolkit.gradients.audit.steps import Recorder, Unrecordable

__all__ = [
    "Again",
    "Digest",
    "Lessons",
    "Question",
    "RecordedRun",
    "Refused",
    "Script",
    "ScriptRun",
    "is_name",
    "key_of",
]

# The environment variable with the lessons of earlier starts of this script.
_LESSONS = "STOPGRAD_AUDIT_LESSONS"
_MOST_STARTS = 20

_NAMELESS = "a tensor of shape "

# A graph that goes back further has no beginning, such as that of a state that is never detached.
_MOST_STEPS_EARLIER = 7


@dataclass(frozen=True)
class Script:
    """A program as it is started from the shell.

    Attributes:
        target: A file, or the name of a module.
        is_module: Whether it is a module, as after ``python -m``.
        arguments: The arguments of the program.
    """

    target: str
    is_module: bool = False
    arguments: tuple[str, ...] = ()

    def run(self) -> None:
        """Run the program as ``__main__``."""
        sys.path.insert(0, str(Path.cwd() if self.is_module else Path(self.target).resolve().parent))
        sys.argv = [self.target, *self.arguments]
        if self.is_module:
            runpy.run_module(self.target, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(self.target, run_name="__main__")


@dataclass(frozen=True)
class Question:
    """The backward passes that are asked about.

    Attributes:
        step: The training step, from 1: some backward passes, and the steps of optimisers that follow them.
        backward: The backward pass of this step, from 1; None for all.
        continues: Whether the script goes on afterwards.
    """

    step: int = 1
    backward: int | None = 1
    continues: bool = False

    def __str__(self) -> str:
        which = "a backward pass" if self.backward is None else f"backward pass {self.backward}"
        return f"{which} of step {self.step}"


@dataclass(frozen=True)
class Digest:
    """The numbers of a backward pass, to compare two runs of a script bit for bit.

    Attributes:
        loss: The loss, in hexadecimal.
        gradients: A hash of each gradient, sorted; empty for a backward pass that is not asked about.
    """

    loss: str
    gradients: tuple[str, ...] = ()

    @classmethod
    def of_loss(cls, value: Tensor) -> Digest:
        """Return the digest of a backward pass that is not asked about."""
        return cls(float(value.item()).hex())

    @classmethod
    def of(cls, value: Tensor, inputs: Collection[Tensor] | None) -> Digest:
        """Return the digest of a backward pass that is asked about, and about to begin."""
        nodes = () if value.grad_fn is None else reachable_nodes(value.grad_fn, ())
        leaves = leaves_in(nodes) if inputs is None else list(inputs)
        with keeping_selected():
            gradients = torch.autograd.grad(value, leaves, retain_graph=True, allow_unused=True) if leaves else ()
        hashes = sorted(_hashed(gradient) for gradient in gradients if gradient is not None)
        return cls(float(value.item()).hex(), tuple(hashes))


class ScriptRun:
    """A plain run of a script that is asked about some of its backward passes: the witness of a recorded run.

    Attributes:
        question: The backward passes that are asked about.
        digests: One for each backward pass, if wanted.
        steps: The number of training steps that are over.
        backward_passes: The number of backward passes of the present step.
        answered: Whether a backward pass that is asked about has come.
        is_attending: Whether the program is in the step that is asked about, or in an earlier step of its recording.
        lessons: The lessons of earlier starts.
    """

    def __init__(self, question: Question, *, digests: bool = False) -> None:
        """Prepare a run."""
        self.question, self.digests, self.steps, self.answered = question, list[Digest](), 0, False
        self._takes_digests, self.backward_passes = digests, 0
        self.lessons, self._attended, self.is_attending = Lessons.read(), ExitStack(), False
        self._thread, self._is_passing, self._others = this_thread(), False, dict[str, None]()
        self._gradients = self._transforms = self._processes = self._in_step = 0
        self._steps_when_over = False

    def run(self, script: Script) -> None:
        """Run a script until the question is answered, or to its end.

        Errors of the script, ``sys.exit`` and Ctrl-C are raised as they are.
        """
        hook = register_optimizer_step_post_hook(self._count)
        try:
            with backward_passes(self._backward), self._gradients_taken(), self._processes_counted(), self._watching():
                self._started(script)
        except _Answered:
            pass
        finally:
            hook.remove()

    def _started(self, script: Script) -> None:
        with self.lessons.input.given():
            script.run()

    @property
    def progress(self) -> str:
        """How far the script has come, and the reason why it came no further if that is known."""
        come = f"{self.steps} steps and {self.backward_passes} more backward passes"
        if self._in_step:
            return f"{come}, and {self._in_step} in step {self.question.step}: `--backward` should name an earlier one"
        if self._others and not self.steps:
            return f"{come}: it trains in the thread {next(iter(self._others))}, but only the main thread is audited"
        if self._processes and not self.steps + self.backward_passes:
            return f"{come}: it starts other processes, but only the first process is audited"
        if self._transforms and not self.steps + self.backward_passes:
            return f"{come}: it trains by torch.func, and its loss can be audited as a function, FILE:FUNCTION"
        if self.question.step > 1 and not self.steps and self.backward_passes:
            return f"{come}: no optimiser of torch.optim takes a step, so `--backward` should choose, without `--step`"
        if self.steps + self.backward_passes:
            return f"{come}: `--step` should name an earlier one"
        return f"{come}: a loss that it does not train on can be audited as a function, FILE:FUNCTION"

    def attending(self) -> AbstractContextManager[None]:
        """Make the context of the step that is asked about."""
        return without_compiled_code()

    @contextmanager
    def passing(self, value: Tensor, inputs: Collection[Tensor] | None, *, is_asked: bool) -> Iterator[None]:
        """Run a backward pass."""
        yield

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """Attend to the first step from the making of the first optimiser on; a script prepares before that."""
        original = torch.optim.Optimizer.__init__

        def init(optimiser: Any, *args: Any, **kwargs: Any) -> None:
            original(optimiser, *args, **kwargs)
            if this_thread() != self._thread:
                return
            if not self.steps and not self.is_attending and self.lessons.earlier >= self.question.step - 1:
                self._start()

        with swapped(torch.optim.Optimizer, "__init__", init), self._attended:
            if self.lessons.earlier >= self.question.step:
                self._start()
            yield

    def _start(self) -> None:
        self.is_attending = True
        self._attended.enter_context(self.attending())

    def stop(self) -> None:
        """Attend no more."""
        self._attended.close()
        self.is_attending = False

    def _gradients_taken(self) -> AbstractContextManager[None]:
        """Take calls of `torch.autograd.grad` for backward passes in a script that has no others."""
        original = torch.autograd.grad

        def grad(*args: Any, **kwargs: Any) -> Any:
            if self._is_passing or this_thread() != self._thread:
                return original(*args, **kwargs)
            in_transform = torch._C._functorch.peek_interpreter_stack() is not None
            self._transforms += in_transform
            if in_transform or not _ends_a_step(*args, **kwargs):
                return original(*args, **kwargs)
            self._gradients += 1
            if not self.lessons.gradients:
                return original(*args, **kwargs)
            with self._backward(*_root_of_grad(*args, **kwargs)):
                return original(*args, **kwargs)

        return swapped(torch.autograd, "grad", replacing(original, grad))

    def _processes_counted(self) -> AbstractContextManager[None]:
        """Count the processes that a script starts: they run as without the tool."""
        original = BaseProcess.start

        def start(process: BaseProcess) -> None:
            self._processes += not process.daemon  # the workers of a loader are
            original(process)

        return swapped(BaseProcess, "start", start)

    def _count(self, *_: Any) -> None:
        if self._is_passing and torch._C._current_autograd_node() is not None:  # in a hook of the backward pass
            self._steps_when_over = True
            return
        if this_thread() != self._thread:
            self._others[threading.current_thread().name] = None
            return
        if not self.backward_passes:  # one optimiser for each parameter, say, takes one training step
            return
        if self.steps == self.question.step - 1:
            self._in_step = self.backward_passes
        self.steps, self.backward_passes = self.steps + 1, 0
        if not self.is_attending and self.steps == self.question.step - 1 - self.lessons.earlier:
            self._start()
        elif self.is_attending and self.steps == self.question.step:
            self.stop()
        if self.answered and not self.question.continues:
            raise _Answered

    @contextmanager
    def _backward(self, value: Tensor, inputs: Collection[Tensor] | None) -> Iterator[None]:
        with swapped(self, "_is_passing", True), self._counted(value, inputs):
            yield
        if self._steps_when_over:
            self._steps_when_over = False
            self._count()

    @contextmanager
    def _counted(self, value: Tensor, inputs: Collection[Tensor] | None) -> Iterator[None]:
        self.backward_passes += 1
        question = self.question
        is_asked = self.steps == question.step - 1 and question.backward in (None, self.backward_passes)
        with self.passing(value, inputs, is_asked=is_asked):
            if self._takes_digests and is_asked:
                self.digests.append(Digest.of(value, inputs))
            elif self._takes_digests and question.continues:
                self.digests.append(Digest.of_loss(value))
            self.answered |= is_asked
            if is_asked and question.backward is not None and not question.continues:
                raise _Answered
            yield
        if is_asked and question.backward is not None:
            self.stop()


class RecordedRun(ScriptRun):
    """A run that is recorded from the end of the previous step on.

    Attributes:
        audits: Number of a backward pass -> its answer.
        keys: Number of a backward pass -> key of each parameter (see `key_of`) -> its name, as far as keys are unique.
    """

    def __init__(self, question: Question, *, digests: bool = False, memory: float | None = None) -> None:
        """Prepare a run; `memory` as for `audited`."""
        super().__init__(question, digests=digests)
        self._memory = memory
        self.audits: dict[int, Audit] = {}
        self.keys: dict[int, dict[str, str]] = {}
        self._recorder: Recorder | None = None
        self._suspects = list[str]()

    def run(self, script: Script) -> None:
        """Run a script until the question is answered, or to its end.

        Raises:
            Again: If a recording fails, and the script has to start again.
        """
        try:
            super().run(script)
        except _Refusal as refusal:
            raise refusal.error from None
        except SystemExit as end:
            if end.code or not self._trains_by_gradients():
                raise
        except Exception as error:
            if not self._learn(error):
                raise
            raise Again from error
        if self._trains_by_gradients():
            self.lessons.gradients, self.lessons.earlier = True, max(self.lessons.earlier, self.question.step)
            raise Again

    def _started(self, script: Script) -> None:
        """Run a script; find the places behind an error while its tensors have their graphs."""
        try:
            super()._started(script)
        except Exception as error:
            if self._recorder is not None:
                self._suspects = _places_in(error.__traceback__, self._recorder)
            raise

    def _trains_by_gradients(self) -> bool:
        return bool(self._gradients) and not (self.steps or self.backward_passes or self.lessons.gradients)

    @contextmanager
    def passing(self, value: Tensor, inputs: Collection[Tensor] | None, *, is_asked: bool) -> Iterator[None]:
        """Answer for a backward pass if the question is about it, and run it."""
        if self._recorder is None:
            if is_asked and not self.answered:
                self._start_earlier()
            yield
            return
        with self._recorder.board.of_the_program():
            if value.grad_fn is not None and is_asked:
                if self._recorder.reaches_beyond(value) and self.lessons.earlier < _MOST_STEPS_EARLIER:
                    self._start_earlier()
                with self._heard():
                    n_before = self.backward_passes - 1
                    answer = self._recorder.answer(value, inputs, None, n_before=n_before)
                    self.audits[self.backward_passes] = answer
                    self.keys[self.backward_passes] = {key_of(*entry): entry[0] for entry in answer._parameters.items()}
            elif value.grad_fn is not None:
                with self._heard():
                    self._recorder.prepare(value)
            yield
            if self._recorder is not None:
                self._recorder.part(value)

    @contextmanager
    def _heard(self) -> Iterator[None]:
        """Raise errors of the recording past a script that goes on after any Exception of a step."""
        try:
            yield
        except Refused as error:
            raise _Refusal(error) from error
        except Unrecordable as error:
            if not self._learn(error):
                raise
            raise Again from error

    def attending(self) -> AbstractContextManager[None]:
        """Record the step that is asked about."""
        distributed = torch.distributed
        ranks = distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1
        if ranks > 1:
            raise Refused(f"The script should run in one process. Found {ranks} ranks: audit it without them.")
        self._recorder = Recorder(self.lessons.real, self._memory)
        return self._recorder.recording()

    def stop(self) -> None:
        """Record no more."""
        super().stop()
        self._recorder = None

    def _start_earlier(self) -> NoReturn:
        if self.lessons.starts >= _MOST_STARTS:
            raise Refused("The script should do the same each time it runs. Found another step each time: set a seed.")
        self.lessons.earlier = 2 * self.lessons.earlier + 1
        raise Again

    def _learn(self, error: Exception) -> bool:
        """Find the places at which a recording has failed; return whether the script should start again."""
        is_over = self.answered and self.question.backward is not None
        may_start = self.lessons.starts < _MOST_STARTS
        if isinstance(error, Refused) or self._recorder is None or is_over or not may_start:
            return False
        if isinstance(error, Unrecordable):
            self.lessons.real |= error.places
            return True
        places = self._suspects or [self._recorder.board.latest]
        reason = f"recorded, the script fails: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        learnt = {place: reason for place in places if place and place not in self.lessons.real}
        self.lessons.real |= learnt
        return bool(learnt)


class _Answered(BaseException):
    """Ends the script: its question is answered."""


class _Refusal(BaseException):
    """Ends the script, which is refused."""

    def __init__(self, error: Refused) -> None:
        self.error = error


class Again(BaseException):
    """Ends the script, which has to start again; see `Lessons.start_again`."""


@dataclass
class Lessons:
    """The lessons of earlier starts of a script.

    Attributes:
        real: Place -> the reason why it keeps its meaning.
        earlier: The number of steps by which the recording begins before the audited step; ``step - 1`` begins it with
            the first optimiser of the script, ``step`` or more with the script.
        starts: The number of starts.
        gradients: Whether calls of `torch.autograd.grad` are the backward passes.
        input: The standard input of the script, as far as it was read.
    """

    real: dict[str, str] = field(default_factory=dict)
    earlier: int = 0
    starts: int = 1
    gradients: bool = False
    input: KeptInput = field(default_factory=KeptInput)

    @classmethod
    def read(cls) -> Lessons:
        """Take the lessons from the environment."""
        told = json.loads(os.environ.pop(_LESSONS, "{}"))
        return cls(**{**told, "input": KeptInput(told.get("input", ""))})

    def environment(self) -> dict[str, str]:
        """Return the environment of a process that takes these lessons."""
        told = {**vars(self), "starts": self.starts + 1, "input": self.input.path}
        return {**os.environ, _LESSONS: json.dumps(told)}

    def start_again(self) -> NoReturn:
        """Run the command of this process again, in its place."""
        gc.collect()  # workers end with their loaders
        sys.stdout.flush()
        sys.stderr.flush()
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], self.environment())


def _places_in(trace: TracebackType | None, recorder: Recorder) -> list[str]:
    """Return the blocks behind the tensors of the innermost frames of an error, of the plain constants first."""
    frames, board, known = [], recorder.board, dict[Any, bool]()
    while trace is not None:
        frames.append(trace.tb_frame)
        trace = trace.tb_next
    for frame in reversed(frames[-8:]):
        found = [value for value in frame.f_locals.values() if isinstance(value, Tensor)]
        roots = [tensor.grad_fn for tensor in found if tensor.grad_fn is not None]
        constants = [root for root in roots if not board.leads_to_a_leaf(root, known)]
        for some in (constants, roots):
            nodes = [node for root in some for node in reachable_nodes(root, ())]
            places = {place: None for node in nodes for place in gate_of(node) | board.regions_of(node)}
            if places:
                return list(places)
    return []


def _ends_a_step(outputs: Any, inputs: Any, *_: Any, create_graph: bool = False, **__: Any) -> bool:
    """Return whether a derivative may be the last of a step: it is by leaves, and has no graph."""
    return not create_graph and all(isinstance(value, Tensor) and value.is_leaf for value in _listed(inputs))


def _listed(values: Any) -> list[Any]:
    return list(values.values() if isinstance(values, dict) else [values] if isinstance(values, Tensor) else values)


def _root_of_grad(
    outputs: Any, inputs: Any, grad_outputs: Any = None, *_: Any, **__: Any
) -> tuple[Tensor, Collection[Tensor] | None]:
    return root_of_pass(outputs, grad_outputs, inputs=_listed(inputs))


def key_of(name: str, parameter: Tensor) -> str:
    """Return the key of a parameter, the same in each run of a script: its name, or its value if it has no name.

    The number of a parameter without a name is its place in one graph alone.
    """
    return f"{_NAMELESS}{tuple(parameter.shape)}, {_hashed(parameter)}" if " #" in name else name


def is_name(key: str) -> bool:
    """Return whether a key is the name of a parameter; see `key_of`."""
    return not key.startswith(_NAMELESS)


def _hashed(tensor: Tensor) -> str:
    plain = tensor.detach().to_dense() if tensor.layout is not torch.strided else tensor.detach()
    plain = torch.view_as_real(plain.resolve_conj()) if plain.is_complex() else plain
    numbers = plain.cpu().contiguous().view(torch.uint8) if plain.dim() else plain.cpu().reshape(1).view(torch.uint8)
    return hashlib.sha256(f"{tuple(tensor.shape)} {tensor.dtype} ".encode() + numbers.numpy().tobytes()).hexdigest()
