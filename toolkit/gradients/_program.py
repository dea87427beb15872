"""A loss function as a program that can be run any number of times, each time from the same state."""

from __future__ import annotations

import copy
import inspect
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch._C._functorch import peek_interpreter_stack
from torch.compiler import is_dynamo_compiling

from toolkit._swapped import swapped
from toolkit.blocks import gated, no_graph, opened
from toolkit.gradients._eager import without_compiled_code
from toolkit.gradients._gates import GateBoard
from toolkit.gradients._nodes import EVERY_BLOCK, gate_of, is_foreign, leaves_in, reachable_nodes
from toolkit.gradients._parts import Parts, find_parts, unique
from toolkit.gradients._snapshot import Snapshot
from toolkit.gradients.verdict import unobserved

__all__ = [
    "ALONE",
    "CONSTANT",
    "NO_PATH",
    "Answer",
    "Parameters",
    "Program",
    "checked_dense",
    "checked_function",
    "checked_loss",
    "coarsest",
    "differentiated",
    "gradients_of",
    "keeping_selected",
    "leaves_of",
    "named_parameters",
    "nodes_of",
    "others_of",
    "reached",
]

Parameters = (
    nn.Module | Tensor | Mapping[str, Tensor | nn.Module] | Iterable[Tensor | nn.Module | tuple[str, Tensor]] | None
)

CONSTANT = "`loss` should depend on a tensor that requires a gradient. Found a constant."
"""The error for a loss without a graph."""

# A hook may take a derivative that runs the hook again. Beyond 60 levels, torch goes on without end in new threads.
_MOST_NESTED_DERIVATIVES = 50

NO_PATH = "`params` should hold a tensor that `loss` depends on. Found none."
"""The error for parameters that a loss does not depend on."""

ALONE = threading.RLock()
"""Random numbers and modules belong to the whole process, so only one thread runs a program at a time."""


@dataclass(frozen=True)
class Answer:
    """The result of one run of a program.

    Attributes:
        loss: The loss.
        params: The parameters.
        gradients: Parameter -> gradient; zero without a path.
        reached: Parameters to which autograd finds a path.
        opened: Open blocks that a gradient-carrying tensor reached.
        constant: Whether the loss has no graph.
        moved: Whether the run changed the values of tensors that existed before it.
    """

    loss: float
    params: Mapping[str, Tensor]
    gradients: dict[str, Tensor]
    reached: frozenset[str]
    opened: frozenset[str]
    constant: bool
    moved: bool


class Program:
    """A loss function and its state.

    Attributes:
        parts: The objects that it reaches.
        snapshot: Its initial state.
        given: Name -> tensor for the caller's parameters; None for every leaf.
    """

    def __init__(
        self,
        loss: Callable[[], Tensor],
        params: Parameters,
        around: Callable[[Snapshot], AbstractContextManager[Any]] = nullcontext,
        *,
        everywhere: bool = False,
    ) -> None:
        """Take the state of a program; every run except the plain one is inside of `around`.

        With `everywhere`, the state includes the globals of installed packages.
        """
        checked_function("loss", loss)
        self._loss, self._around = loss, around
        if isinstance(params, nn.Module):
            self.parts = find_parts(loss, params, everywhere=everywhere)
        else:
            if isinstance(params, Iterable) and not isinstance(params, (Tensor, Mapping)):
                params = list(params)  # once: they may come from a generator
            self.parts = find_parts(loss, others=_modules_in(params), everywhere=everywhere)
        _remove_gates(self.parts)
        self.given = None if params is None else named_parameters(params, self.parts)
        _refuse_what_cannot_run_twice(self.parts)
        self._made_before = [tensor for tensor in self.parts.tensors.values() if not tensor.is_leaf]
        self.snapshot = Snapshot(self.parts, self.given or {})

    @contextmanager
    def aside(self, *, around: bool = True, runs: bool = True) -> Iterator[Any]:
        """Let the program, or a derivative of it, run alone in its process and without side effects."""
        one_thread = torch.autograd.set_multithreading_enabled(False)
        with ALONE, self.snapshot.set_aside(runs=runs) as moved, without_compiled_code(), torch.enable_grad():
            with (
                one_thread,
                _bounded_derivatives(),
                gated(None),
                self._around(self.snapshot) if around else nullcontext(),
            ):
                torch.clear_autocast_cache()  # casts of an earlier run belong to its graph
                try:
                    yield moved
                finally:
                    torch.clear_autocast_cache()

    def run(self) -> Any:
        """Run the loss function, inside of `aside`."""
        return self._loss()

    def value(self) -> Tensor:
        """Run the loss function, inside of `aside`; raise if its result is not a real number, or was there before."""
        value = self.run()
        if any(value is made for made in self._made_before):
            raise ValueError(
                "`loss` should compute the loss each time it is called. Found a tensor that was computed before: "
                "compute it inside of `loss`."
            )
        return checked_value(value)

    def answer(
        self,
        params: Mapping[str, Tensor] | None,
        open: Collection[str] = (),
        *,
        gates: GateBoard | None = None,
        around: bool = True,
        nudge: tuple[int, float] | None = None,
    ) -> Answer:
        """Run the program with these blocks really removed, and differentiate it.

        Args:
            params: The parameters; None for every leaf of the graph.
            open: The blocks.
            gates: Notes the blocks that the run reaches.
            around: Whether `around` is entered; False for a plain run.
            nudge: A seed, and the relative size of a random change of the parameters before the run.

        Raises:
            RuntimeError: If gradients reach parameters outside of the graph.
        """
        with (
            self.aside(around=around) as moved,
            gated(gates),
            opened(*open, leaves_out=True) as met,
            torch.enable_grad(),
        ):
            if nudge is not None and params is not None:
                _nudge(params.values(), *nudge)
            with nullcontext() if gates is None else gates.noting():
                value = self.value()
            params = leaves_of(value, self.parts) if params is None else params
            nodes = nodes_of(value)
            others = others_of(nodes)
            if not around and any(map(is_foreign, nodes)):  # they run in a plain ``backward()``, wherever they lead
                others = leaves_in(nodes)
            with self._refusing_hidden_gradients(nodes):
                found = derivatives(value, params, others)
            gradients = {name: torch.zeros_like(params[name]) if g is None else g for name, g in found.items()}
            paths = frozenset(name for name, gradient in found.items() if gradient is not None)
            loss = value.item()  # may be state of the program, and is restored
        return Answer(loss, params, gradients, paths, frozenset(met), not value.requires_grad, moved.values)

    def loss(self) -> float:
        """Run the program with every block in place."""
        with self.aside():
            return self.value().item()

    @contextmanager
    def _refusing_hidden_gradients(self, nodes: Iterable[Any]) -> Iterator[None]:
        """Raise RuntimeError if the derivative with respect to a parameter misses a part of its gradient."""
        if any(type(node).__name__ == "CheckpointFunctionBackward" for node in nodes):
            raise RuntimeError(
                "`loss` should checkpoint with use_reentrant=False. Found a reentrant checkpoint, which hides its "
                "graph."
            )
        before = [(leaf, leaf.grad) for leaf in self.snapshot.leaves if leaf.is_leaf]
        yield
        for leaf, gradient in before:
            if leaf.grad is not gradient:
                name = self.parts.names_of_leaves().get(id(leaf), f"a tensor of shape {tuple(leaf.shape)}")
                raise RuntimeError(
                    "`loss` should be differentiated through its graph alone. Found a function whose backward pass "
                    f"adds to the `.grad` of {name}."
                )


@contextmanager
def _bounded_derivatives() -> Iterator[None]:
    """Raise RecursionError in a derivative whose hooks take it again and again; torch would never return."""
    original, depth = torch.autograd._engine_run_backward, 0  # type: ignore[attr-defined]

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal depth
        depth += 1
        try:
            if depth > _MOST_NESTED_DERIVATIVES:
                raise RecursionError("a hook, or a function, takes a derivative that runs it again, without end")
            return original(*args, **kwargs)
        finally:
            depth -= 1

    with swapped(torch.autograd, "_engine_run_backward", run):
        yield


@contextmanager
def keeping_selected() -> Iterator[None]:
    """Let selective checkpoints return their stored values several times, not only once."""
    mode: Any = torch.utils.checkpoint._CachedTorchDispatchMode
    original, is_own = mode.__enter__, "__enter__" in vars(mode)
    kept = dict[int, tuple[dict[Any, Any], dict[Any, Any]]]()

    def enter(handing_out: Any) -> Any:
        storage = handing_out.storage
        _, values = kept.setdefault(id(storage), (storage, _copied(storage)))
        storage.update(_copied(values))
        return original(handing_out)

    mode.__enter__ = enter
    try:
        yield
    finally:
        for storage, values in kept.values():
            storage.update(values)
        if is_own:
            mode.__enter__ = original
        else:
            del mode.__enter__


def _copied(storage: Mapping[Any, Any]) -> dict[Any, Any]:
    return {operation: copy.copy(values) for operation, values in storage.items()}


def derivatives(value: Tensor, params: Mapping[str, Tensor], others: Iterable[Tensor] = ()) -> dict[str, Tensor | None]:
    """Return parameter -> gradient, None without a path. The graph is kept, and differentiated by `others` as well."""
    with unobserved():
        # Not those that were frozen on the way.
        wanted = {name: parameter for name, parameter in params.items() if parameter.requires_grad}
    found: dict[str, Tensor | None] = dict.fromkeys(params)
    if value.requires_grad and wanted:
        gradients = gradients_of(value, [*wanted.values(), *others], retain_graph=True)
        for name, gradient in zip(wanted, gradients, strict=False):
            found[name] = None if gradient is None else gradient.detach()
    return found


def gradients_of(value: Tensor, inputs: Sequence[Tensor], *, retain_graph: bool = False) -> tuple[Tensor | None, ...]:
    """Return the gradients of a loss, None without a path; raise RuntimeError if its graph is freed already."""
    try:
        return torch.autograd.grad(value, inputs, retain_graph=retain_graph, allow_unused=True)
    except RuntimeError as error:
        if not str(error).startswith("Trying to backward through the graph a second time"):
            raise
        raise RuntimeError(
            "`loss` should leave its graph alone, without `backward()` and an optimizer's step. Found it freed."
        ) from error


def others_of(nodes: Iterable[Any]) -> list[Tensor]:
    """Return the leaves to differentiate by, beside the parameters: all, or none for most graphs.

    Torch 2.13 crashes in the derivative of a group norm by its weight alone, if its input is in `channels_last`.
    """
    nodes = list(nodes)
    return leaves_in(nodes) if any(type(node).__name__ == "NativeGroupNormBackward0" for node in nodes) else []


def differentiated(value: Tensor, params: Mapping[str, Tensor], others: Iterable[Tensor] = ()) -> dict[str, Tensor]:
    """Return parameter -> gradient, zero without a path, as `derivatives`; the graph stays."""
    found = derivatives(value, params, others)
    return {name: torch.zeros_like(params[name]) if g is None else g for name, g in found.items()}


def reached(value: Tensor, params: Mapping[str, Tensor], open: Collection[str] = EVERY_BLOCK) -> frozenset[str]:
    """Return the parameters that a gradient of `value` can reach through the graph while only `open` pass."""
    return _among(() if value.grad_fn is None else reachable_nodes(value.grad_fn, open), params)


def _among(nodes: Iterable[Any], params: Mapping[str, Tensor]) -> frozenset[str]:
    found = {id(getattr(node, "variable", node)) for node in nodes}
    return frozenset(
        name
        for name, parameter in params.items()
        if id(parameter if parameter.grad_fn is None else parameter.grad_fn) in found
    )


def coarsest(nodes: Iterable[Any], params: Mapping[str, Tensor]) -> float:
    """Return the eps of the coarsest dtype in which a gradient with respect to these nodes is computed."""
    with unobserved():
        found = {parameter.dtype for parameter in params.values()}
        for node in nodes:
            if type(node).__name__ == "ToCopyBackward0":  # autocast, too, casts by it
                found.add(node._input_metadata[0].dtype)
            elif (leaf := getattr(node, "variable", None)) is not None:
                found.add(leaf.dtype)
    return max(torch.finfo(dtype).eps for dtype in found if dtype.is_floating_point or dtype.is_complex)


def _nudge(params: Iterable[Tensor], seed: int, size: float) -> None:
    """Scale every number by a random factor close to 1."""
    generator = torch.Generator().manual_seed(seed)
    with no_graph():
        for parameter in params:
            up = torch.empty(parameter.shape, dtype=torch.float64, device="cpu").bernoulli_(generator=generator)
            parameter.mul_((1 - size + 2 * size * up).to(parameter))


def nodes_of(value: Tensor | None) -> list[Any]:
    """Return the nodes of the graph of `value`."""
    return [] if value is None or value.grad_fn is None else list(reachable_nodes(value.grad_fn, EVERY_BLOCK))


def leaves_of(value: Tensor, parts: Parts) -> dict[str, Tensor]:
    """Return name -> leaf for every leaf of the graph of `value`."""
    known = parts.names_of_leaves()
    leaves = leaves_in(nodes_of(value))
    return {known.get(id(leaf), f"leaf {tuple(leaf.shape)} #{index}"): leaf for index, leaf in enumerate(leaves)}


def checked_function(name: str, function: object, arguments: Sequence[object] = ()) -> None:
    """Raise TypeError unless a function takes these arguments, RuntimeError where nothing can be differentiated."""
    if not callable(function):
        what = "returns the loss" if name == "loss" else "returns tensors"
        raise TypeError(f"`{name}` should be a function that {what}. Found {type(function).__name__}.")
    try:
        signature = inspect.signature(function.forward if isinstance(function, nn.Module) else function)
    except (TypeError, ValueError):  # a class, or a function written in C++, may have none
        signature = None
    try:
        _ = signature and signature.bind(*arguments)
    except TypeError as error:
        found = type(function).__name__ if isinstance(function, nn.Module) else "a function"
        wish = "take no arguments, as `lambda: criterion(model(x), y)` does" if name == "loss" else "take `inputs`"
        raise TypeError(f"`{name}` should {wish}. Found {found}: {error}.") from None
    if is_dynamo_compiling() or torch._C._dynamo.eval_frame.get_eval_frame_callback():
        raise RuntimeError(f"`{name}` should be called outside of torch.compile. Found a function compiled by it.")
    if torch.is_inference_mode_enabled():
        raise RuntimeError(f"`{name}` should be called outside of torch.inference_mode. Found it switched on.")
    if (transform := peek_interpreter_stack()) is not None:
        raise RuntimeError(
            f"`{name}` should be called outside of the transforms of torch.func. Found {transform.key().name}."
        )


def checked_loss(value: Any) -> Tensor:
    """Return the result of a loss function; raise unless it is a real scalar with a gradient."""
    found = checked_value(value)
    if not found.requires_grad:
        raise ValueError(CONSTANT)
    return found


def checked_value(value: Any) -> Tensor:
    """Return the result of a loss function; raise unless it is a real number."""
    if not isinstance(value, Tensor):
        raise TypeError(f"`loss` should return a tensor. Found {type(value).__name__}.")
    with unobserved() if type(value) is Tensor else nullcontext():
        if value.numel() != 1:
            raise ValueError(f"`loss` should return a scalar. Found a tensor of shape {tuple(value.shape)}.")
        if value.is_complex():
            raise ValueError(f"`loss` should return a real number. Found {value.dtype}.")
        if value.is_meta:
            raise ValueError("`loss` should have a value. Found a tensor on the meta device.")
        if value.isnan():
            raise ValueError("`loss` should return a number. Found nan.")
    return value


def checked_dense(tensors: Iterable[Tensor]) -> None:
    """Raise ValueError unless inputs are dense tensors."""
    for tensor in tensors:
        if tensor.is_nested or tensor.layout is not torch.strided:
            kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
            raise ValueError(f"`inputs` should be dense tensors. Found a {kind} one.")


def named_parameters(params: Parameters, parts: Parts) -> dict[str, Tensor]:
    """Return name -> tensor for a caller's parameters.

    Raises:
        TypeError: If `params` holds other objects than tensors and modules.
        ValueError: If no tensor requires a gradient.
    """
    named: dict[str, Tensor] = {}
    for name, parameter in _named(params, parts.names_of_leaves()):
        if named.get(name) is not parameter:
            named[unique(name, named)] = parameter
    required = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
    if not required:
        raise ValueError("`params` should hold at least one tensor that requires a gradient. Found none.")
    return required


def _named(params: Parameters, known: Mapping[int, str]) -> Iterator[tuple[str, Tensor]]:
    if isinstance(params, nn.Module):
        yield from params.named_parameters()
        return
    if isinstance(params, Tensor):
        yield known.get(id(params), "params"), params
        return
    if not isinstance(params, Iterable):
        raise TypeError(
            f"`params` should be a module, a tensor, or a dict or iterable of these. Found {type(params).__name__}."
        )
    entries = list(params.items() if isinstance(params, Mapping) else map(_with_name, params))
    for index, (given, found) in enumerate(entries):
        name, names = (f"params[{index}]", known) if given is None else (given, {})
        if isinstance(found, nn.Module):
            for key, parameter in found.named_parameters(prefix=str(name)):
                yield names.get(id(parameter), key), parameter
        elif isinstance(found, Tensor):
            yield names.get(id(found), name), found
        else:
            raise TypeError(f"`params` should hold tensors and modules. Found {type(found).__name__} at {name!r}.")


def _modules_in(params: Parameters) -> dict[str, nn.Module]:
    entries = params.items() if isinstance(params, Mapping) else enumerate(params) if isinstance(params, list) else ()
    name = str if isinstance(params, Mapping) else "params[{}]".format
    return {name(key): entry for key, entry in entries if isinstance(entry, nn.Module)}


def _with_name(entry: Any) -> tuple[str | None, Any]:
    """Return a pair as `named_parameters()` gives them as it is, and anything else without a name."""
    match entry:
        case (str(name), found):
            return name, found
    return None, entry


def _remove_gates(parts: Parts) -> None:
    """Turn tensors that still have gates of an earlier comparison into constants."""
    for tensor in parts.tensors.values():
        nodes = () if tensor.grad_fn is None or tensor._is_view() else reachable_nodes(tensor.grad_fn, EVERY_BLOCK)
        if any(map(gate_of, nodes)):
            tensor.detach_()


def _refuse_what_cannot_run_twice(parts: Parts) -> None:
    """Raise ValueError for modules whose state cannot be restored."""
    fsdp = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    for name, root in parts.modules.items():
        for module in root.modules():
            if fsdp is not None and isinstance(module, fsdp):
                raise ValueError(
                    f"`loss` should run before `fully_shard`. Found {name or 'a module'} sharded by FSDP2."
                )
            if isinstance(module, nn.modules.lazy.LazyModuleMixin) and module.has_uninitialized_params():
                raise ValueError(
                    f"`loss` should have run once before it is asked about. Found {name or 'a module'} uninitialised."
                )
