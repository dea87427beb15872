"""A block in place outside of compiled code: stopped, open, behind a gate, or where no derivative may come."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NoReturn, TypeVar

import torch
import torch.fx
from torch import Tensor
from torch.compiler import is_exporting
from torch.fx import traceback as fx_traceback

from toolkit.blocks import _switch
from toolkit.blocks._names import Block, register
from toolkit.blocks._sites import caller
from toolkit.blocks._switch import let_pass, note_elsewhere, this_thread
from toolkit.blocks._tensors import carries_gradient, map_tensors

T = TypeVar("T")
OnFlow = Literal["stop", "error"]

ANNOTATION = "stop_gradient"


class GradientFlowError(RuntimeError):
    """A derivative arrived at a block that was put in place with ``on_flow="error"``.

    A `RuntimeError`, as every error of a backward pass in torch is. TensorFlow's ``prevent_gradient`` has a
    `LookupError`, because there the search for a gradient function fails; in Python that means a missing key or index,
    and code around a backward pass that handles those should not swallow this one.
    """


def stop_eagerly(input: T, name: Block | str | None, on_flow: OnFlow, traced_as: Callable[..., Any] | None = None) -> T:
    """Return a tree of tensors as the block gives it out: see `stop_gradient`. A trace calls `traced_as`."""
    state = this_thread()
    label = None if name is None else register(name, state.prefix)
    check_on_flow(on_flow)
    if is_exporting() and label not in state.open:
        if on_flow == "error":
            raise RuntimeError("`on_flow` should be 'stop' in a program that is exported. Found 'error'.")
        with fx_traceback.preserve_node_meta(), fx_traceback.annotate({ANNOTATION: label or ""}):
            return map_tensors(Tensor.detach, input)  # type: ignore[no-any-return]
    key, site = label or "", None
    if state.open or state.gates is not None or state.watches or on_flow == "error":
        site = caller()
        key = label or str(site)

    def stop(tensor: Any) -> Any:
        if isinstance(tensor, torch.fx.Proxy):
            assert traced_as is not None
            return _stop_in_trace(tensor, label, on_flow, traced_as)
        if key in state.open:
            return let_pass(state, key, tensor)
        stopped = None
        if state.gates is not None:
            assert site is not None
            stopped = state.gates.tensor(tensor, key, site)
        elif not _switch.quiet:
            note_elsewhere(key)
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


def _stop_in_trace(
    proxy: torch.fx.Proxy, label: str | None, on_flow: OnFlow, function: Callable[..., Any]
) -> torch.fx.Proxy:
    node = (label or ANNOTATION).replace(".", "_")
    options = {"name": label} if on_flow == "stop" else {"name": label, "on_flow": on_flow}
    return proxy.tracer.create_proxy("call_function", function, (proxy,), options, name=node)


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
    def _raise(name: str, site: str, derivative: str) -> NoReturn:
        where = "at" if name == site else f"{name!r} at"
        raise GradientFlowError(f"No derivative should arrive at the block {where} {site}. Found a {derivative}.")


def check_on_flow(on_flow: str) -> None:
    """Raise a ValueError unless `on_flow` is one of the two."""
    if on_flow not in ("stop", "error"):
        raise ValueError(f"`on_flow` should be 'stop' or 'error'. Found {on_flow!r}.")
