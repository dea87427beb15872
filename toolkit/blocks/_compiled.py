"""A block in code that Dynamo traces, which cannot read a `ContextVar` and guards module globals instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.autograd.forward_ad as forward_ad
from torch import Tensor, compiler
from torch.fx import traceback as fx_traceback

from toolkit.blocks import _switch
from toolkit.blocks._eager import ANNOTATION, OnFlow, check_on_flow, stop_eagerly
from toolkit.blocks._names import Block, is_site, register
from toolkit.blocks._switch import compiled_open
from toolkit.blocks._tensors import alias, map_tensors

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


def stop_in_graph(input: T, name: Block | str | None, on_flow: OnFlow) -> T:
    """Return a tree of tensors as the block gives it out: see `stop_gradient`."""
    check_on_flow(on_flow)
    if name is None:
        if any(is_site(opened) for opened in _switch.open_when_compiled):
            raise RuntimeError("`name` should be given to a block that is open in a compiled function. Found None.")
        key = ""
    else:
        key = name_in_graph(name)
        note_in_graph(key, key in _switch.open_when_compiled)
    if key in _switch.open_when_compiled:
        return map_tensors(alias, input)  # type: ignore[no-any-return]
    if on_flow == "error":
        _keep_out_of_graphs()
        return _stop_between_graphs(input, name, on_flow)
    with fx_traceback.annotate({ANNOTATION: key}):
        return map_tensors(_detach, input)  # type: ignore[no-any-return]


def _stop_between_graphs(input: T, name: Block | str | None, on_flow: OnFlow) -> T:
    """Put a block in place that no graph can hold: Dynamo ends one graph before it, and begins another after it."""
    return stop_eagerly(input, name, on_flow)


def _detach(tensor: Tensor) -> Tensor:
    return tensor.detach()


def name_in_graph(name: Block | str) -> str:
    """Return the full name, and make an ad-hoc block known."""
    return name.name if isinstance(name, Block) else _full_name_in_graph(name, _switch.prefix_when_compiled)


def _at_trace_time(function: F) -> F:
    """Let Dynamo run a function while it traces, and take its result for a constant.

    As `torch.compiler.assume_constant_result`, without the second that importing Dynamo takes.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@_at_trace_time
def _full_name_in_graph(name: str, prefix: str) -> str:
    """Run at trace time only: Dynamo would guard the registry, and fail as soon as the name is added to it."""
    return register(name, prefix)


@_at_trace_time
def note_in_graph(name: str, is_open: bool) -> bool:
    """Run at trace time only: remember which blocks a compiled graph holds open."""
    if is_open:
        compiled_open.add(name)
    return is_open


def leave_graph_in_forward_mode() -> None:
    """Compute a region without a graph where it has to drop tangents: a graph has no way to do so for views."""
    if _is_forward_mode():
        _between_graphs()


def _between_graphs() -> None:
    """Do nothing where Dynamo cannot follow."""


@_at_trace_time
def _is_forward_mode() -> bool:
    """Run at trace time only: Dynamo would guard the level, which it changes itself."""
    global _between_graphs
    if forward_ad._current_level >= 0:
        reason = "A full graph should have no forward-mode derivative of a region. Found one: use `stop_gradient`."
        _between_graphs = _kept_out(_between_graphs, reason)
    return forward_ad._current_level >= 0


@_at_trace_time
def _keep_out_of_graphs() -> None:
    """Run at trace time only."""
    global _stop_between_graphs
    _stop_between_graphs = _kept_out(
        _stop_between_graphs, "`on_flow` should be 'stop' inside of a full graph. Found 'error'."
    )


def _kept_out(function: F, reason: str) -> F:
    """Return a function that no graph holds. Not before it is needed: this imports Dynamo, which takes seconds."""
    return function if hasattr(function, "_torchdynamo_disable") else compiler.disable(function, reason=reason)
