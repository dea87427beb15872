"""The primitive: a named place where the gradient is stopped, and the switch that opens it.

A *block* is a name and the reason why a quantity is held constant. `stop_gradient` and `stop_recording` put it in
place; `unblock` opens it, so that the same program can be differentiated with the block and without it.

How the switch is made, and why it is not simpler:

- In eager mode the set of open blocks lives in a `ContextVar`: a thread that opens a block affects no other thread.
- Dynamo cannot read a `ContextVar`, so a function under `torch.compile` reads a module global instead. Dynamo guards
  that global: opening a block recompiles, and closing it returns to the first graph.
- While nothing is open anywhere, `stop_gradient` looks at no more than one global before it detaches.
- A comparison (`toolkit.gradients`) hands in its gates through `gated`; this module knows nothing of it.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import difflib
import functools
import os
import sys
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal, NoReturn, TypeVar

import numpy as np
import torch
import torch.autograd.forward_ad as forward_ad
import torch.fx
from torch import Tensor, compiler
from torch.compiler import is_dynamo_compiling, is_exporting
from torch.fx import traceback as fx_traceback
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import SUPPORTED_NODES, tree_map, tree_map_only

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

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
OnFlow = Literal["stop", "error"]


class GradientFlowError(RuntimeError):
    """A derivative arrived at a block that was put in place with ``on_flow="error"``.

    A `RuntimeError`, as every error of a backward pass in torch is. TensorFlow's ``prevent_gradient`` has a
    `LookupError`, because there the search for a gradient function fails; in Python that means a missing key or index,
    and code around a backward pass that handles those should not swallow this one.
    """


@dataclass(frozen=True)
class Block:
    """A named place where the gradient is stopped. Made by `block`.

    Attributes:
        name: ``"<module>.<quantity>"``, for example ``"em.responsibilities"``.
        why: One sentence: what the quantity is held constant for. Empty for an ad-hoc block.
    """

    name: str
    why: str


@dataclass(frozen=True)
class Site:
    """Where in the source a block was met: file, line and column (both from 1), and the function."""

    file: str
    line: int
    column: int
    function: str

    def __str__(self) -> str:
        return f"{_short_path(self.file)}:{self.line}:{self.column}"


class Gates(ABC):
    """What a comparison puts in the place of every block while it runs (see `gated`)."""

    @abstractmethod
    def tensor(self, input: Tensor, name: str, site: Site) -> Tensor | None:
        """Return `input` behind a gate that decides at backward time; None: it is to be stopped as ever."""

    @abstractmethod
    def region(self, name: str, site: Site, *, both_modes: bool) -> AbstractContextManager[None] | None:
        """Return the context in which a body runs that is stopped later on; None: it is to be stopped as ever."""

    def stops(self, name: str, site: Site) -> bool:
        """Say whether the block itself is in place, and no gate, to code that asks."""
        return False

    def note_elsewhere(self, name: str) -> None:  # noqa: B027 - not every comparison wants to know
        """Be told of a block that another thread met."""


# Told of each tensor that `stop_gradient` gives out as a constant: the block, and where it was put in place.
Watch = Callable[[Tensor, str, Site], None]


@dataclass(frozen=True)
class _State:
    """What differs from the normal case in this thread: open blocks, gates, the prefix of ad-hoc names.

    It is made of changes, one for each ``with`` that is entered, so that any of them can be taken back: generators
    need not leave theirs in the opposite order.
    """

    open: frozenset[str] = frozenset()
    reached: tuple[set[str], ...] = ()
    gates: Gates | None = None
    compares: bool = False
    watches: tuple[Watch, ...] = ()
    prefix: str = ""
    changes: tuple[Callable[[_State], _State], ...] = ()


_NORMAL = _State()
_STOP = "stop"
_PLAIN: frozenset[type] = frozenset({Tensor, torch.nn.Parameter})

# What has no derivative and passes. Sizes of programs with dynamic shapes are numbers, too.
_CONSTANTS = (
    int, float, complex, str, bytes, np.generic, torch.dtype, torch.device, torch.SymInt, torch.SymFloat, torch.SymBool
)  # fmt: skip

_blocks: dict[str, Block] = {}
_lock = threading.Lock()
_state: ContextVar[_State] = ContextVar("toolkit.blocks", default=_NORMAL)

# True while no thread has anything but `_NORMAL`: the whole cost of the switch in a program that does not use it.
_quiet = True
_active = 0

# Of all threads, so that a block that is met in another one than its comparison does not go unnoticed.
_gates: dict[object, Gates] = {}

# What compiled code sees. Rebound, never mutated, so that Dynamo's guard notices.
_open_when_compiled: frozenset[str] = frozenset()
_prefix_when_compiled = ""
_prefixes: dict[object, str] = {}
_open_counts: Counter[str] = Counter()
# Blocks that a compiled graph holds in their open form: replaying it cannot report that they were reached.
_compiled_open: set[str] = set()


def block(name: str, why: str) -> Block:
    """Declare a block, once, at module level. A name that was only used ad hoc so far becomes this block.

    Args:
        name: ``"<module>.<quantity>"``.
        why: One sentence that says what the quantity is held constant for.

    Raises:
        ValueError: If the name is empty or taken, or the reason is empty.
        TypeError: If either is not a string.

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
    with _lock:
        if name in _blocks and _blocks[name].why:
            raise ValueError(f"`name` should be a new block's name. Found {name!r}, which is declared already.")
        _blocks[name] = declared = Block(name, why)
    return declared


def declared_blocks() -> dict[str, Block]:
    """Return every block known so far, declared or ad hoc, sorted by name.

    A module's blocks are known once it is imported, an ad-hoc block once it has run.
    """
    return dict(sorted(_blocks.items()))


def stop_gradient(input: T, name: Block | str | None = None, *, on_flow: OnFlow = "stop") -> T:
    """Return `input` as a constant of every derivative: reverse mode, forward mode, any order.

    The semantics are those of ``tf.stop_gradient(input, name=None)``: same type, shape, dtype, device, layout and
    memory; no copy. Because the memory is shared, an in-place operation on the result changes `input` as well.

    Args:
        input: A tensor of any kind, or a tree of tensors: a dict, list, tuple, namedtuple, deque, dataclass, or a class
            that is registered with `torch.utils._pytree`, of such trees. What has no derivative passes: tensors of
            integers and booleans, numbers, NumPy arrays, strings, bytes, dtypes, devices, None. A
            `torch.nn.Parameter` comes back as a `Tensor`.
        name: The block. A string names an ad-hoc block, prefixed by `scope`, or a declared one. Without a name the
            block is known by its place in the source: ``file:line:column``, with the file as seen from the current
            folder, or else from where Python imports it.
        on_flow: What a derivative meets that arrives here. ``"stop"``: it ends. ``"error"``: a `GradientFlowError` is
            raised, with the block and its place, for a path on which no derivative should ever come (TensorFlow's
            ``prevent_gradient``). It is raised in the backward pass, and in forward mode as soon as a tangent comes.
            A comparison shows what arrives at such a block, and raises nothing. Compiled code has no such block:
            ``torch.compile`` runs it in between its graphs, or refuses with ``fullgraph=True``; ``torch.export``
            refuses.

    Raises:
        TypeError: If `input` holds anything else; the message names the type.
        ValueError: If `on_flow` is neither of the two.
        RuntimeError: If ``on_flow="error"`` is met in a full graph or an export.

    Example:
        >>> x = torch.tensor(3.0, requires_grad=True)
        >>> (x * stop_gradient(x)).backward()
        >>> x.grad
        tensor(3.)
    """
    if is_dynamo_compiling():
        return _stop_in_graph(input, name, on_flow)
    if (
        _quiet
        and on_flow is _STOP
        and type(input) in _PLAIN
        and (name is None or type(name) is Block or name in _blocks)
        and not compiler._is_exporting_flag  # `is_exporting()` without the call: a tenth of a `detach`
    ):
        return input.detach()  # type: ignore[attr-defined, no-any-return]
    return _stop_eagerly(input, name, on_flow)


@contextmanager
def stop_recording(name: Block | str) -> Iterator[None]:
    """Compute a region as a constant: inside it no graph is built while the block is in place.

    The region form of `stop_gradient` (TensorFlow's ``tape.stop_recording``). Because the graph is never built, the
    peak of memory is saved too, where `stop_gradient` only frees afterwards. Unlike `torch.no_grad` it stops
    forward-mode derivatives as well.

    Args:
        name: The block, as in `stop_gradient`.

    Example:
        >>> x = torch.tensor(3.0, requires_grad=True)
        >>> with stop_recording("doc.square"):
        ...     square = x * x
        >>> square.requires_grad
        False
    """
    if is_dynamo_compiling():
        key = _name_in_graph(name)
        _note_in_graph(key, key in _open_when_compiled)
        if key in _open_when_compiled:
            yield
        else:
            with torch.no_grad():
                yield
        return
    state = _state.get()
    key = _register(name, state.prefix)
    if key in state.open:
        with _open_region(state, key):
            yield
        return
    region = None
    if state.gates is not None:
        region = state.gates.region(key, _caller(), both_modes=True)
    elif not _quiet:
        _note_elsewhere(key)
    with contextlib.ExitStack() as stack:
        for context in (torch.no_grad(), without_tangents()) if region is None else (region,):
            stack.enter_context(context)
        yield


@contextmanager
def unblock(*names: Block | str) -> Iterator[None]:
    """Open blocks for the length of a ``with``: values pass, and the gradient too.

    Args:
        *names: Blocks or their names. None at all opens nothing, so that a list of variants needs no special case.

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
    unreached = {known_name(name) for name in names} - reached - _compiled_open
    if unreached:
        raise RuntimeError(
            f"`unblock` should open blocks that a tensor with a gradient reaches. Found none at "
            f"{', '.join(repr(name) for name in sorted(unreached))}: opening changed nothing."
        )


def is_blocked(name: Block | str) -> bool:
    """Say whether a block is in place, for code that builds a graph only if the gradient may pass.

    False while the block is open, and while gates stand in the place of blocks, which need the graph (`compare`).

    Raises:
        ValueError: If the name is unknown.
    """
    if is_dynamo_compiling():
        return _name_in_graph(name) not in _open_when_compiled
    state = _state.get()
    key = known_name(_full_name(name, state.prefix))
    return key not in state.open and (state.gates is None or state.gates.stops(key, _caller()))


@contextmanager
def scope(name: str) -> Iterator[None]:
    """Prefix the names of ad-hoc blocks: inside ``scope("critic")`` the block ``"target"`` is ``"critic/target"``.

    Scopes nest. Declared blocks keep their names.
    """
    global _prefix_when_compiled
    if is_dynamo_compiling():
        outer = _prefix_when_compiled
        _prefix_when_compiled = f"{outer}{name}/"
        try:
            yield
        finally:
            _prefix_when_compiled = outer
        return
    if not isinstance(name, str) or not name:
        raise ValueError(f"`name` should be a non-empty string. Found {name!r}.")
    with _entered(lambda state: dataclasses.replace(state, prefix=f"{state.prefix}{name}/")):
        token = object()
        _set_prefix_when_compiled(token, _state.get().prefix)
        try:
            yield
        finally:
            _set_prefix_when_compiled(token, None)


def traced_blocks(program: Any) -> dict[torch.fx.Node, Block | None]:
    """Return the nodes of a traced program that are blocks, in graph order, with the block that each of them is.

    Args:
        program: A `torch.fx.Graph`, or what has one: a `torch.fx.GraphModule`, a `torch.export.ExportedProgram`.

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
            if _ANNOTATION not in annotations:
                continue
            name = annotations[_ANNOTATION]
        found[node] = _blocks.get(name) or (Block(name, "") if name else None)
    return found


# --- for this project: what other rooms may use, not re-exported -------------------------------------------------


no_graph = torch.no_grad
"""For code that needs no graph at all, an estimator's ``predict`` say. Not a block: there is nothing to open."""


@contextmanager
def ordinary_tensors() -> Iterator[None]:
    """Leave inference mode, in which nothing can be differentiated, without recording more than before."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False), torch.no_grad():
            yield
    else:
        yield


@contextmanager
def without_tangents() -> Iterator[None]:
    """Switch forward mode off. Views keep their tangents even then, so theirs are dropped one by one."""
    dropped = _DropTangents() if forward_ad._current_level >= 0 else nullcontext()
    with forward_ad._set_fwd_grad_enabled(False), dropped:
        yield


class _DropTangents(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return constants(func(*args, **(kwargs or {})))


def constants(result: Any) -> Any:
    """Return what an operation gave back, without its gradients and tangents."""
    with forward_ad._set_fwd_grad_enabled(True):  # without forward mode `detach` is a view like any other
        return tree_map_only(Tensor, lambda tensor: tensor.detach() if carries_gradient(tensor) else tensor, result)


def variable(input: Tensor) -> Tensor:
    """Return `input` as something to differentiate by: itself if it carries a gradient, else a new leaf beside it."""
    return input if input.requires_grad else input.detach().requires_grad_()


def carries_gradient(input: Tensor) -> bool:
    """Say whether a derivative of any mode or level can flow into `input` (also through `torch.func` wrappers)."""
    functorch = torch._C._functorch
    tensor = input
    while True:
        if tensor.requires_grad:
            return True
        wrapped = functorch.is_functorch_wrapped_tensor(tensor)
        dual_possible = forward_ad._current_level >= 0 and not (wrapped and functorch.is_batchedtensor(tensor))
        if dual_possible and forward_ad.unpack_dual(tensor).tangent is not None:
            return True
        if not wrapped:
            return False
        tensor = functorch.get_unwrapped(tensor)


def alias(input: Tensor) -> Tensor:
    """Return a new tensor on the same memory that passes the gradient: what an open block gives back.

    Not `input` itself: the extra node keeps the order in which autograd adds contributions the same for an open block
    and for an open gate, so that both give the same bits.
    """
    if input.layout is not torch.strided or input.is_nested:
        return input
    return input.view_as(input)


@contextmanager
def opened(*names: Block | str) -> Iterator[set[str]]:
    """Open blocks as `unblock` does, and hand out the set of those reached instead of raising for the others."""
    names_opened = frozenset(known_name(name) for name in names)
    reached: set[str] = set()

    def change(state: _State) -> _State:
        return dataclasses.replace(state, open=state.open | names_opened, reached=(*state.reached, reached))

    with _entered(change, names_opened):
        yield reached


@contextmanager
def gated(gates: Gates | None) -> Iterator[None]:
    """Put `gates`, or nothing but the block, in the place of every block, open or not: the slot for a comparison."""
    with _entered(lambda state: dataclasses.replace(state, gates=gates, open=frozenset(), compares=True)):
        token = object()
        if gates is not None:
            _gates[token] = gates
        try:
            yield
        finally:
            _gates.pop(token, None)


@contextmanager
def watched(watch: Watch) -> Iterator[None]:
    """Tell `watch` of every tensor that `stop_gradient` gives out as a constant."""
    with _entered(lambda state: dataclasses.replace(state, watches=(*state.watches, watch))):
        yield


def stop_at(input: Tensor, site: Site) -> Tensor | None:
    """Return what a place that does not call `stop_gradient` makes of a tensor; None while it is plainly blocked."""
    state, key = _state.get(), str(site)
    if key in state.open:
        return _let_pass(state, key, input)
    return None if state.gates is None else state.gates.tensor(input, key, site)


def region_at(site: Site, *, both_modes: bool) -> AbstractContextManager[None] | None:
    """Return the context of a region that does not call `stop_recording`; None while it is plainly blocked."""
    state, key = _state.get(), str(site)
    if key in state.open:
        return _open_region(state, key)
    return None if state.gates is None else state.gates.region(key, site, both_modes=both_modes)


def site_of(frame: FrameType) -> Site:
    """Return the place that a frame has reached."""
    code = frame.f_code
    positions = list(code.co_positions())[frame.f_lasti // 2]
    line, column = positions[0] or frame.f_lineno, positions[2]
    return Site(code.co_filename, line, 0 if column is None else column + 1, code.co_qualname)


def known_name(name: Block | str) -> str:
    """Return the name of a block that is known, or raise a ValueError with the close matches."""
    full = name.name if isinstance(name, Block) else name
    if not isinstance(full, str):
        raise TypeError(f"`name` should be a Block or a string. Found {type(full).__name__}.")
    if full in _blocks or _is_site(full):
        return full
    close = difflib.get_close_matches(full, _blocks, n=3, cutoff=0.5)
    suggestion = f" Did you mean {' or '.join(repr(match) for match in close)}?" if close else ""
    raise ValueError(
        f"`name` should be a known block. Found {full!r}.{suggestion} "
        "(A declared block is known once its module is imported, an ad-hoc one once it has run.)"
    )


def map_tensors(function: Callable[[Any], Any], input: Any) -> Any:
    """Rebuild a tree with `function` applied to its tensors. See `stop_gradient` for what a tree is."""
    if isinstance(input, (Tensor, torch.fx.Proxy)):
        return function(input)
    kind = type(input)
    if kind is dict:
        return {key: map_tensors(function, value) for key, value in input.items()}
    if kind is list or kind is tuple:
        return kind([map_tensors(function, value) for value in input])
    if input is None or isinstance(input, _CONSTANTS):
        return input
    if isinstance(input, np.ndarray):
        if is_dynamo_compiling():  # there it is a tensor
            return function(torch.from_numpy(input)).numpy()
        if not input.dtype.hasobject:
            return input
    if kind in SUPPORTED_NODES:
        return tree_map(lambda part: map_tensors(function, part), input, is_leaf=lambda part: part is not input)
    if isinstance(input, Mapping):
        mapped = {key: map_tensors(function, value) for key, value in input.items()}
        if not isinstance(input, MutableMapping):
            return kind(mapped)
        rebuilt: Any = copy.copy(input)
        rebuilt.update(mapped)
        return rebuilt
    if isinstance(input, (list, tuple)):
        values = [map_tensors(function, value) for value in input]
        return kind(*values) if hasattr(input, "_fields") else kind(values)
    if dataclasses.is_dataclass(input) and not isinstance(input, type):
        rebuilt = copy.copy(input)
        fields = {field.name: getattr(input, field.name) for field in dataclasses.fields(input)}
        beside = getattr(input, "__dict__", {})  # a cached property holds tensors that were made of the fields
        for name, value in {**beside, **fields}.items():
            object.__setattr__(rebuilt, name, map_tensors(function, value))
        return rebuilt
    raise TypeError(
        "`input` should be a tensor, number, array of numbers, string, dtype, device or None, or a dict, list, tuple, "
        "namedtuple, deque, dataclass or registered pytree of these. "
        f"Found {type(input).__module__}.{type(input).__qualname__}."
    )


# --- how it is done ----------------------------------------------------------------------------------------------


_ANNOTATION = "stop_gradient"
_HERE = os.path.normcase(__file__)


def _stop_eagerly(input: T, name: Block | str | None, on_flow: OnFlow) -> T:
    state = _state.get()
    label = None if name is None else _register(name, state.prefix)
    _check_on_flow(on_flow)
    if is_exporting() and label not in state.open:
        if on_flow == "error":
            raise RuntimeError("`on_flow` should be 'stop' in a program that is exported. Found 'error'.")
        with fx_traceback.preserve_node_meta(), fx_traceback.annotate({_ANNOTATION: label or ""}):
            return map_tensors(Tensor.detach, input)  # type: ignore[no-any-return]
    key, site = label or "", None
    if state.open or state.gates is not None or state.watches or on_flow == "error":
        site = _caller()
        key = label or str(site)

    def stop(tensor: Any) -> Any:
        if isinstance(tensor, torch.fx.Proxy):
            node = (label or _ANNOTATION).replace(".", "_")
            options = {"name": label} if on_flow == "stop" else {"name": label, "on_flow": on_flow}
            return tensor.tracer.create_proxy("call_function", stop_gradient, (tensor,), options, name=node)
        if key in state.open:
            return _let_pass(state, key, tensor)
        stopped = None
        if state.gates is not None:
            assert site is not None
            stopped = state.gates.tensor(tensor, key, site)
        elif not _quiet:
            _note_elsewhere(key)
        if stopped is not None:
            pass
        elif on_flow == "error" and carries_gradient(tensor) and not state.compares:
            stopped = _Refusal.apply(tensor, key, str(site))  # type: ignore[no-untyped-call]
        else:
            stopped = tensor.detach()
        for watch in state.watches:
            assert site is not None
            watch(stopped, key, site)
        return stopped

    return map_tensors(stop, input)  # type: ignore[no-any-return]


class _Refusal(torch.autograd.Function):
    """An identity that raises when it is differentiated."""

    @staticmethod
    def forward(input: Tensor, name: str, site: str) -> Tensor:
        return input.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, str, str], output: Tensor) -> None:
        _, ctx.block_name, ctx.site = inputs
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor | None) -> tuple[None, None, None]:
        if cotangent is not None:
            _Refusal._raise(ctx.block_name, ctx.site, "gradient")
        return None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> Tensor:
        return _Refusal._raise(ctx.block_name, ctx.site, "tangent")

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], input: Tensor, name: str, site: str
    ) -> tuple[Tensor, int | None]:
        return _Refusal.apply(input, name, site), in_dims[0]  # type: ignore[no-untyped-call]

    @staticmethod
    def _raise(name: str, site: str, what: str) -> NoReturn:
        where = "at" if name == site else f"{name!r} at"
        raise GradientFlowError(f"No derivative should arrive at the block {where} {site}. Found a {what}.")


def _check_on_flow(on_flow: str) -> None:
    if on_flow not in ("stop", "error"):
        raise ValueError(f"`on_flow` should be 'stop' or 'error'. Found {on_flow!r}.")


def _stop_between_graphs(input: T, name: Block | str | None, on_flow: OnFlow) -> T:
    """Put a block in place that no graph can hold: Dynamo ends one graph before it, and begins another after it."""
    return _stop_eagerly(input, name, on_flow)


def _stop_in_graph(input: T, name: Block | str | None, on_flow: OnFlow) -> T:
    _check_on_flow(on_flow)
    if name is None:
        if any(_is_site(opened) for opened in _open_when_compiled):
            raise RuntimeError("An open block should have a name inside a compiled function. Found one without.")
        key = ""
    else:
        key = _name_in_graph(name)
        _note_in_graph(key, key in _open_when_compiled)
    if key in _open_when_compiled:
        return map_tensors(alias, input)  # type: ignore[no-any-return]
    if on_flow == "error":
        _keep_out_of_graphs()
        return _stop_between_graphs(input, name, on_flow)
    with fx_traceback.annotate({_ANNOTATION: key}):
        return map_tensors(_detach, input)  # type: ignore[no-any-return]


def _detach(tensor: Tensor) -> Tensor:
    return tensor.detach()


def _name_in_graph(name: Block | str) -> str:
    return name.name if isinstance(name, Block) else _full_name_in_graph(name, _prefix_when_compiled)


def _at_trace_time(function: F) -> F:
    """Let Dynamo run a function while it traces, and take its result for a constant.

    What `torch.compiler.assume_constant_result` does, without the second that importing Dynamo takes.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@_at_trace_time
def _full_name_in_graph(name: str, prefix: str) -> str:
    """Run at trace time only: Dynamo would guard the registry, and fail as soon as the name is added to it."""
    return _register(name, prefix)


@_at_trace_time
def _note_in_graph(name: str, is_open: bool) -> bool:
    """Run at trace time only: remember which blocks a compiled graph holds open."""
    if is_open:
        _compiled_open.add(name)
    return is_open


@_at_trace_time
def _keep_out_of_graphs() -> None:
    """Run at trace time only: the wrapper that Dynamo respects imports Dynamo, which takes seconds."""
    global _stop_between_graphs
    if not hasattr(_stop_between_graphs, "_torchdynamo_disable"):
        reason = "`on_flow` should be 'stop' inside of a full graph. Found 'error'."
        _stop_between_graphs = compiler.disable(_stop_between_graphs, reason=reason)


def _register(name: Block | str, prefix: str) -> str:
    """Return the full name, and make an ad-hoc block known."""
    full = _full_name(name, prefix)
    if full not in _blocks:
        with _lock:
            _blocks.setdefault(full, name if isinstance(name, Block) else Block(full, ""))
    return full


def _full_name(name: Block | str, prefix: str) -> str:
    if isinstance(name, Block):
        return name.name
    if not isinstance(name, str) or not name:
        raise TypeError(f"`name` should be a Block or a non-empty string. Found {name!r}.")
    declared = _blocks.get(name)
    return name if declared is not None and declared.why else prefix + name


def _is_site(name: str) -> bool:
    parts = name.rsplit(":", 2)
    return len(parts) == 3 and parts[0] != "" and parts[1].isdigit() and parts[2].isdigit()


def _mark_reached(state: _State, name: str) -> None:
    for reached in state.reached:
        reached.add(name)


def _let_pass(state: _State, name: str, input: Tensor) -> Tensor:
    """Return a tensor as its open block gives it out; where nothing is recorded that is the tensor itself."""
    if carries_gradient(input):
        _mark_reached(state, name)
    # Within a comparison as if the call was not there; otherwise with the bits of an open gate.
    itself = state.compares or not (torch.is_grad_enabled() or forward_ad._current_level >= 0)
    return input if itself else alias(input)


@contextmanager
def _open_region(state: _State, name: str) -> Iterator[None]:
    """Run an open region, which counts as reached if something was recorded in it."""
    records, start = torch.is_grad_enabled(), torch._C._autograd._get_sequence_nr()
    try:
        yield
    finally:
        if forward_ad._current_level >= 0 or (records and torch._C._autograd._get_sequence_nr() > start):
            _mark_reached(state, name)


def _note_elsewhere(name: str) -> None:
    """Tell the gates of other threads of a block that they do not see."""
    for gates in tuple(_gates.values()):
        gates.note_elsewhere(name)


@contextmanager
def _entered(change: Callable[[_State], _State], opened: Collection[str] = ()) -> Iterator[None]:
    """Change this thread's state, and keep count of what is open in any thread for compiled code."""
    _count(+1, opened)
    _state.set(_changed((*_state.get().changes, change)))
    try:
        yield
    finally:
        _state.set(_changed(tuple(other for other in _state.get().changes if other is not change)))
        _count(-1, opened)


def _changed(changes: tuple[Callable[[_State], _State], ...]) -> _State:
    state = _NORMAL
    for change in changes:
        state = change(state)
    return dataclasses.replace(state, changes=changes) if changes else _NORMAL


def _set_prefix_when_compiled(token: object, prefix: str | None) -> None:
    """Let compiled code see the prefix that was entered last and is not left yet, in whatever thread and order."""
    global _prefix_when_compiled
    with _lock:
        if prefix is None:
            del _prefixes[token]
        else:
            _prefixes[token] = prefix
        _prefix_when_compiled = next(reversed(_prefixes.values()), "")


def _count(change: int, opened: Collection[str]) -> None:
    global _quiet, _active, _open_when_compiled
    with _lock:
        _active += change
        _quiet = _active == 0
        for name in opened:
            _open_counts[name] += change
        if opened:
            _open_when_compiled = frozenset(name for name, count in _open_counts.items() if count > 0)


def _caller() -> Site:
    """Return the place outside of this module from which a block was reached."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (
        os.path.normcase(frame.f_code.co_filename) == _HERE
        or frame.f_globals.get("__name__") in ("contextlib", "torch._dynamo.eval_frame")
    ):
        frame = frame.f_back
    assert frame is not None
    return site_of(frame)


def _short_path(file: str) -> str:
    return _short_path_from(file, os.getcwd())  # noqa: PTH109 - a fifth of the time, for every place that is met


@functools.cache  # besides the time it saves: a file keeps its name when `sys.path` changes later
def _short_path_from(file: str, folder: str) -> str:
    """Return a path as seen from a folder, or else from where Python imports, if no other file is found there by it."""
    path = Path(folder, file)
    if path.is_relative_to(folder):
        return str(path.relative_to(folder))
    roots = [Path(folder, entry) for entry in sys.path if isinstance(entry, str)]
    above = [root for root in roots if path.is_relative_to(root)]
    if not above:
        return str(path)
    short = path.relative_to(max(above, key=lambda root: len(root.parts)))
    others = {os.path.realpath(root / short) for root in (Path(folder), *roots)} - {os.path.realpath(path)}
    return str(path if any(map(os.path.exists, others)) else short)
