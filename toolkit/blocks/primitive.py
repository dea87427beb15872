"""The public functions: declare a block, put it in place, open it, ask whether it is in place, find it in a program."""

from __future__ import annotations

import contextlib
import functools
import inspect
import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.fx
from torch import Tensor, compiler
from torch.compiler import is_dynamo_compiling
from torch.fx._symbolic_trace import is_fx_symbolic_tracing
from torch.jit._trace import TracerWarning
from torch.utils._contextlib import context_decorator

from toolkit.blocks import _switch
from toolkit.blocks._compiled import leave_graph_in_forward_mode, name_in_graph, note_in_graph, stop_in_graph
from toolkit.blocks._eager import ANNOTATION, GradientFlowError, OnFlow, T, stop_eagerly
from toolkit.blocks._names import Block, full_name, known, known_name, lock, register
from toolkit.blocks._sites import caller
from toolkit.blocks._switch import (
    compiled_open,
    entered,
    note_elsewhere,
    open_region,
    opened,
    prefix_in_graph,
    set_prefix_when_compiled,
    this_thread,
)
from toolkit.blocks._tensors import without_tangents

__all__ = [
    "Block",
    "GradientFlowError",
    "block",
    "declared_blocks",
    "is_blocked",
    "scope",
    "stop_gradient",
    "stop_recording",
    "traced_blocks",
    "unblock",
]

F = TypeVar("F", bound=Callable[..., Any])

_STOP = "stop"
_PLAIN: frozenset[type] = frozenset({Tensor, torch.nn.Parameter})


def block(name: str, why: str) -> Block:
    """Declare a block, once, at module level. An ad-hoc block of the same name becomes this block.

    Args:
        name: ``"<module>.<quantity>"``.
        why: The reason to hold the quantity constant, in one sentence.

    Raises:
        ValueError: If the name is empty or taken, or the reason is empty.
        TypeError: If the name or the reason is not a string.

    Example:
        >>> from toolkit import block, stop_gradient
        >>> TARGET = block("doc.target", "The bootstrap target is a label: only the prediction moves towards it.")
        >>> stop_gradient(torch.ones(2, requires_grad=True), TARGET).requires_grad
        False
    """
    for argument, value in (("name", name), ("why", why)):
        if not isinstance(value, str):
            raise TypeError(f"`{argument}` should be a string. Found {type(value).__name__}.")
        if not value.strip():
            raise ValueError(f"`{argument}` should not be empty. Found {value!r}.")
    with lock:
        if name in known and known[name].why:
            raise ValueError(f"`name` should be new. Found {name!r}, which is declared already: choose another.")
        known[name] = declared = Block(name, why)
    return declared


def declared_blocks() -> dict[str, Block]:
    """Return every block known so far, declared or ad hoc, sorted by name.

    A module's blocks are known once it is imported, an ad-hoc block once it has run.

    Example:
        >>> _ = block("doc.declared", "An example of a reason.")
        >>> declared_blocks()["doc.declared"].why
        'An example of a reason.'
    """
    return dict(sorted(known.items()))


def stop_gradient(input: T, name: Block | str | None = None, *, on_flow: OnFlow = "stop") -> T:
    """Return `input` as a constant of every derivative: reverse mode, forward mode, any order.

    The semantics are those of ``tf.stop_gradient(input, name=None)``: same type, shape, dtype, device, layout and
    memory; no copy. Because the memory is shared, an in-place operation on the result changes `input` as well.

    Args:
        input: A tensor of any kind, or a tree of tensors: nested dicts, lists, tuples, namedtuples, deques, dataclasses
            and classes registered with `torch.utils._pytree`. Leaves without a derivative are accepted: integer and
            boolean tensors, numbers, NumPy arrays, strings, bytes, dtypes, devices, None. A `torch.nn.Parameter` comes
            back as a `Tensor`.
        name: The block. A string names a declared block, or an ad-hoc block, whose name is prefixed by `scope`. Without
            a name the block is known by its place in the source: ``file:line:column``, with the file relative to the
            current folder, or else to the folder from which Python imports it.
        on_flow: The treatment of a derivative that arrives at the block. ``"stop"`` ends it. ``"error"`` raises a
            `GradientFlowError` with the block and its place, for a path that no derivative should ever take
            (TensorFlow's ``prevent_gradient``): in the backward pass, and in forward mode as soon as a tangent arrives.
            A comparison shows the derivatives that arrive at such a block, and raises nothing. Such a block is never
            compiled: ``torch.compile`` runs it between its graphs, or refuses with ``fullgraph=True``; ``torch.export``
            refuses.

    Raises:
        TypeError: If `input` holds any other object; the message names its type.
        ValueError: If `on_flow` is neither ``"stop"`` nor ``"error"``.
        RuntimeError: If ``on_flow="error"`` is used under ``fullgraph=True`` or ``torch.export``.

    Example:
        >>> x = torch.tensor(3.0, requires_grad=True)
        >>> (x * stop_gradient(x)).backward()
        >>> x.grad
        tensor(3.)
    """
    if is_dynamo_compiling():
        return stop_in_graph(input, name, on_flow)
    if (
        _switch.quiet
        and on_flow is _STOP
        and type(input) in _PLAIN
        and (name is None or type(name) is Block or name in known or register(name, ""))
        and not compiler._is_exporting_flag  # `is_exporting()` without the call: a tenth of a `detach`
    ):
        return input.detach()  # type: ignore[attr-defined, no-any-return]
    return stop_eagerly(input, name, on_flow, stop_gradient)  # type: ignore[no-any-return]


def _region(function: Callable[[Block | str], Generator[None, None, None]]) -> Callable[[Block | str], _Region]:
    """Make a context manager of a generator function, as `contextmanager`."""

    @functools.wraps(function)
    def enter(name: Block | str) -> _Region:
        return _Region(function, (name,), {})

    return enter


class _Region(contextlib._GeneratorContextManager[None]):
    """A region of a ``with``, or of each call of a function that it decorates."""

    def __call__(self, function: F) -> F:
        if inspect.isgeneratorfunction(function):  # the region is left at each ``yield``
            return context_decorator(self._recreate_cm, function)  # type: ignore[no-any-return]
        if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
            raise TypeError(
                "`stop_recording` should decorate a function that runs when it is called. Found the coroutine "
                f"{function.__qualname__}: use `with` inside of it."
            )
        return super().__call__(function)


@_region
def stop_recording(name: Block | str) -> Generator[None, None, None]:
    """Compute a region as a constant: inside it no graph is built while the block is in place.

    The region form of `stop_gradient` (TensorFlow's ``tape.stop_recording``). The graph is never built, so the region
    also lowers the peak of memory; `stop_gradient` only frees a graph that was built. Unlike `torch.no_grad` the region
    stops forward-mode derivatives as well; `torch.compile` leaves it out of its graph in forward mode. As a decorator
    it accepts functions and generator functions; in a generator the region ends at each ``yield`` and resumes after it.

    Args:
        name: The block, as in `stop_gradient`.

    Raises:
        TypeError: If it decorates a coroutine function.

    Warns:
        torch.jit.TracerWarning: In ``torch.jit.trace`` and ``torch.fx.symbolic_trace``, whose programs have no regions:
            there the gradient passes.

    Example:
        >>> x = torch.tensor(3.0, requires_grad=True)
        >>> with stop_recording("doc.square"):
        ...     square = x * x
        >>> square.requires_grad
        False
    """
    if is_dynamo_compiling():
        key = name_in_graph(name)
        note_in_graph(key, key in _switch.open_when_compiled)
        if key in _switch.open_when_compiled:
            yield
        else:
            leave_graph_in_forward_mode()
            with torch.no_grad():
                yield
        return
    state = this_thread()
    key = register(name, state.prefix)
    if key in state.open:
        with open_region(state, key):
            yield
        return
    region = None
    if state.gates is not None:
        region = state.gates.region(key, caller(), both_modes=True)
    elif not _switch.quiet:
        note_elsewhere(key)
    _warn_in_trace(key)
    with contextlib.ExitStack() as stack:
        for context in (torch.no_grad(), without_tangents()) if region is None else (region,):
            stack.enter_context(context)
        yield


def _warn_in_trace(key: str) -> None:
    """Warn where a program is traced whose operations come out without the region that they were in."""
    symbolic = not compiler.is_compiling() and is_fx_symbolic_tracing()
    by_operator = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None  # as `func.linearize`
    if torch._C._get_tracing_state() is not None or (symbolic and not by_operator):
        warnings.warn(
            f"The region {key!r} does not stop the gradient in the traced program: a trace has no regions. Use "
            "`stop_gradient` on what the region computes, or `torch.export`.",
            TracerWarning,
            stacklevel=4,
        )


@contextmanager
def unblock(*names: Block | str) -> Iterator[None]:
    """Open blocks inside of a ``with``: there they pass the gradient as well as the value.

    Args:
        *names: Blocks or their names. Without names no block is opened, so that a list of variants needs no special
            case.

    Raises:
        ValueError: On entry, if a name is unknown; the message has the close matches.
        RuntimeError: On exit, if no tensor that carries a gradient reached one of the blocks: opening it did nothing.

    Example:
        >>> x = torch.tensor(3.0, requires_grad=True)
        >>> y = x * stop_gradient(x, "doc.factor")
        >>> with unblock("doc.factor"):
        ...     (x * stop_gradient(x, "doc.factor")).backward()
        >>> x.grad
        tensor(6.)
    """
    if is_dynamo_compiling():
        raise RuntimeError("`unblock` should be entered outside of a compiled function. Found it inside of one.")
    with opened(*names) as reached:
        yield
    unreached = {known_name(name) for name in names} - reached - compiled_open
    names_unreached = ", ".join(map(repr, sorted(unreached)))
    if unreached and reached.is_compared:
        raise RuntimeError(
            "`unblock` should not be around a function that opens and closes blocks itself, as `compare`, `audit` and "
            f"`field_jacobian` do. Found it around one, for {names_unreached}."
        )
    if unreached:
        raise RuntimeError(
            f"`unblock` should open blocks that a tensor with a gradient reaches. Found none at {names_unreached}: "
            "opening changed nothing."
        )


def is_blocked(name: Block | str) -> bool:
    """Return whether a block is in place, for code that builds a graph only if the gradient may pass.

    False while the block is open, and while `compare` replaces blocks by gates, which need the graph.

    Raises:
        ValueError: If the name is unknown.

    Example:
        >>> shift = block("doc.asked", "An example of a reason.")
        >>> w = torch.ones(2, requires_grad=True)
        >>> with unblock(shift):
        ...     opened = is_blocked(shift), stop_gradient(w, shift).requires_grad
        >>> is_blocked(shift), opened
        (True, (False, True))
    """
    if is_dynamo_compiling():
        return name_in_graph(name) not in _switch.open_when_compiled
    state = this_thread()
    key = known_name(full_name(name, state.prefix))
    return key not in state.open and (state.gates is None or state.gates.stops(key, caller()))


@contextmanager
def scope(name: str) -> Iterator[None]:
    """Prefix the names of ad-hoc blocks: inside ``scope("critic")`` the block ``"target"`` is ``"critic/target"``.

    Scopes nest. Declared blocks keep their names.

    Example:
        >>> with scope("critic"), scope("head"):
        ...     _ = stop_gradient(torch.ones(2), "doc.scoped")
        >>> "critic/head/doc.scoped" in declared_blocks()
        True
    """
    if is_dynamo_compiling():
        with prefix_in_graph(name):
            yield
        return
    if not isinstance(name, str) or not name:
        raise ValueError(f"`name` should be a non-empty string. Found {name!r}.")
    with entered(lambda state: state._replace(prefix=f"{state.prefix}{name}/")):
        token = object()
        set_prefix_when_compiled(token, this_thread().prefix)
        try:
            yield
        finally:
            set_prefix_when_compiled(token, None)


def traced_blocks(program: Any) -> dict[torch.fx.Node, Block | None]:
    """Return the nodes of a traced program that are blocks, in graph order, each with its block.

    Args:
        program: A `torch.fx.Graph`, or an object that has one: a `torch.fx.GraphModule`, a
            `torch.export.ExportedProgram`.

    Returns:
        Node -> block; None for a block without a name.

    Example:
        >>> traced = torch.fx.symbolic_trace(lambda x: x * stop_gradient(x, "doc.factor"))
        >>> [(node.name, block.name) for node, block in traced_blocks(traced).items()]
        [('doc_factor', 'doc.factor')]
    """
    graph = program if isinstance(program, torch.fx.Graph) else program.graph
    found: dict[torch.fx.Node, Block | None] = {}
    for node in graph.nodes:
        if node.target is stop_gradient:
            name = node.kwargs["name"]
        else:
            annotations = node.meta.get("custom") or {}
            if ANNOTATION not in annotations:
                continue
            name = annotations[ANNOTATION]
        found[node] = known.get(name) or (Block(name, "") if name else None)
    return found
