"""Gradient checks for programs with blocks: finite differences with the values of the blocks held constant.

A gradient check compares derivatives with differences of values at perturbed inputs. The value of a block changes with
the inputs, although its derivative is left out by design, so a plain check rejects a correct program with blocks. Here
the program runs once at the inputs, and the values of its blocks are kept. Runs at the perturbed inputs reuse these
values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn
from torch._C import DisableTorchFunction
from torch._C._functorch import TransformType, is_functorch_wrapped_tensor, peek_interpreter_stack
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from toolkit.blocks import Gates, Site, carries_gradient, gated, has_storage
from toolkit.gradients._eager import without_compiled_code
from toolkit.gradients._parts import find_parts
from toolkit.gradients._program import checked_dense, checked_function
from toolkit.gradients._snapshot import Snapshot

__all__ = ["gradcheck", "gradgradcheck"]

Program = Callable[..., Any]


def gradcheck(fn: Program, inputs: Tensor | Sequence[Any], **tolerances: Any) -> bool:
    """Check the derivatives of a program with blocks against finite differences, the values of its blocks held.

    This is `torch.autograd.gradcheck` of the program in which every block, open or closed, is constant at its value for
    `inputs`. Random numbers, buffers and modes are the same in every run, and are restored afterwards.

    A block inside of a backward pass, in a custom function or in the recomputation of a checkpoint, is reached after
    the program has returned. Its value is not held; a second derivative detects that.

    Args:
        fn: Takes `inputs`, returns a tensor or a tuple of tensors.
        inputs: Inputs in double precision that require a gradient are checked.
        **tolerances: ``eps``, ``atol``, ``rtol``, ``check_forward_ad`` and the others of `torch.autograd.gradcheck`.

    Returns:
        True; False if the derivatives differ and ``raise_exception=False`` is among `tolerances`.

    Raises:
        torch.autograd.gradcheck.GradcheckError: If the derivatives differ.
        TypeError: If `fn` does not take `inputs`, or returns other objects than tensors.
        ValueError: If none of `inputs` requires a gradient, or one that does is sparse or nested.
        RuntimeError: If the program reaches other blocks at a perturbed point than at `inputs`, gives other values or
            derivatives when it runs again, or takes a derivative of `torch.func` inside of a region.

    Example:
        >>> x = torch.tensor([0.3, -1.2], dtype=torch.float64, requires_grad=True)
        >>> program = lambda x: x * stop_gradient(x.exp(), "doc.factor")
        >>> gradcheck(program, x), torch.autograd.gradcheck(program, x, raise_exception=False)
        (True, False)
    """
    with torch.enable_grad():
        held = _Held(fn, inputs)
        return torch.autograd.gradcheck(held, held.inputs, **tolerances)


def gradgradcheck(fn: Program, inputs: Tensor | Sequence[Any], **tolerances: Any) -> bool:
    """Check second derivatives as `gradcheck` does the first, by `torch.autograd.gradgradcheck`.

    The values are held at both orders. For blocks that are open at second order see `field_jacobian`.

    Args:
        fn: As for `gradcheck`.
        inputs: As for `gradcheck`.
        **tolerances: As for `gradcheck`, and ``grad_outputs``.

    Returns:
        As `gradcheck`.

    Raises:
        torch.autograd.gradcheck.GradcheckError: If the derivatives differ.
        TypeError: As for `gradcheck`.
        ValueError: If none of `inputs` requires a gradient, if one that does is sparse or nested, or if only blocks
            depend on them.
        RuntimeError: As for `gradcheck`.

    Example:
        >>> x = torch.tensor([0.3, -1.2], dtype=torch.float64, requires_grad=True)
        >>> gradgradcheck(lambda x: x**3 * stop_gradient(x.exp(), "doc.factor"), x)
        True
    """
    with torch.enable_grad():
        held = _Held(fn, inputs)
        if held.is_constant:
            raise ValueError("`fn` should depend on `inputs` beside its blocks. Found a constant.")
        return torch.autograd.gradgradcheck(held, held.inputs, **tolerances)


class _Held:
    """A program with the values of its blocks held constant at `inputs`."""

    def __init__(self, fn: Program, inputs: Tensor | Sequence[Any]) -> None:
        if not isinstance(inputs, Iterable) or isinstance(inputs, (Mapping, str, nn.Module)):
            raise TypeError(f"`inputs` should be a tensor or a sequence of arguments. Found {type(inputs).__name__}.")
        self.inputs = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
        if not any(isinstance(entry, Tensor) and entry.requires_grad for entry in self.inputs):
            raise ValueError("`inputs` should have a tensor that requires a gradient. Found none.")
        checked_dense(entry for entry in self.inputs if isinstance(entry, Tensor) and entry.requires_grad)
        checked_function("fn", fn, self.inputs)
        self._fn = fn
        self._snapshot = Snapshot(find_parts(fn), {})
        self._tape = _Tape()
        results = self._run(self._tape, self.inputs)
        for result in results if isinstance(results, (list, tuple)) else [results]:
            if not isinstance(result, Tensor):
                raise TypeError(f"`fn` should return a tensor or a tuple of tensors. Found {type(result).__name__}.")
        self.is_constant = not any(result.requires_grad for result in tree_leaves(results))
        self._tape.replays = True
        plain, held = (self._values_and_slopes(gates) for gates in (None, self._tape))
        if len(plain) != len(held) or not all(map(_same, plain, held)):
            raise RuntimeError(
                "`fn` should give the same values and derivatives when it runs again with the values of its blocks in "
                "place. Found others: it is random beyond torch, numpy and its generators, or writes into memory "
                "that a block shares."
            )

    def _values_and_slopes(self, gates: _Tape | None) -> list[Any]:
        values = tree_leaves(self._run(gates, self.inputs))
        roots = [value for value in values if isinstance(value, Tensor) and value.requires_grad]
        leaves = [entry for entry in self.inputs if isinstance(entry, Tensor) and entry.requires_grad]
        if not roots:
            return values
        weights = [torch.ones_like(root) for root in roots]
        return values + list(torch.autograd.grad(roots, leaves, weights, allow_unused=True))

    def __call__(self, *inputs: Any) -> Any:
        return self._run(self._tape, inputs)

    def _run(self, gates: _Tape | None, inputs: tuple[Any, ...]) -> Any:
        with self._snapshot.set_aside(), without_compiled_code(), gated(gates):
            if gates is None:
                return self._fn(*inputs)
            with gates.played():
                return self._fn(*inputs)


@dataclass
class _Tape(Gates):
    """The values of blocks in the order of the program: recorded by the first run, reused by the others."""

    replays: bool = False
    _entries: list[tuple[str, Any]] = field(default_factory=list)
    _position: int = 0

    @contextmanager
    def played(self) -> Iterator[None]:
        """Start the tape from the beginning; raise if a replaying run does not reach its end."""
        self._position = 0
        yield
        if self.replays and self._position != len(self._entries):
            name, value = self._entries[self._position]
            raise RuntimeError(_other_block(None, (name, value)))

    def tensor(self, input: Tensor, name: str, site: Site) -> Tensor:
        """Return a constant that has the value of `input` at the recorded point."""
        return self.held(input, name)

    def region(self, name: str, site: Site, *, both_modes: bool) -> AbstractContextManager[None]:
        """Return a context in which every result is a constant that has its value at the recorded point."""
        return self._region(name)

    @contextmanager
    def _region(self, name: str) -> Iterator[None]:
        with torch.no_grad(), forward_ad._set_fwd_grad_enabled(False), _Region(self, name):
            yield

    def held(self, input: Tensor, name: str) -> Tensor:
        """Return a copy of `input` with the recorded value."""
        with DisableTorchFunction():
            if is_functorch_wrapped_tensor(input):
                return _HeldInside.apply(input, self, name)  # type: ignore[no-untyped-call, no-any-return]
            value: Tensor = self.value(input.detach(), name)
            return value.clone()

    def value(self, found: Any, name: str) -> Any:
        """Record the value found, or return the recorded value in its place."""
        if not self.replays:
            self._entries.append((name, found.clone() if isinstance(found, Tensor) else found))
            return found
        kept = self._entries[self._position] if self._position < len(self._entries) else None
        if kept is None or kept[0] != name or _kind(kept[1]) != _kind(found):
            raise RuntimeError(_other_block((name, found), kept))
        self._position += 1
        return kept[1]


class _HeldInside(torch.autograd.Function):
    """Unwraps a tensor of `torch.func`, holds it, and wraps it again."""

    @staticmethod
    def forward(input: Tensor, tape: _Tape, name: str) -> Tensor:
        return tape.held(input, name)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, _Tape, str], output: Tensor) -> None:
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor | None) -> tuple[None, None, None]:
        return None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> Tensor:
        return torch.zeros_like(tangent)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], input: Tensor, tape: _Tape, name: str
    ) -> tuple[Tensor, int | None]:
        return _HeldInside.apply(input, tape, name), in_dims[0]  # type: ignore[no-untyped-call]


class _Region(TorchFunctionMode):
    """Holds all results and writes of the calls inside of a region, except where they record a gradient."""

    def __init__(self, tape: _Tape, name: str) -> None:
        super().__init__()
        self._tape = tape
        self._name = name
        self._level = _level()
        self._memory: dict[int, Any] = {}  # of tensors made here; kept alive so that no other tensor reuses the address

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _level() != self._level and _differentiates():
            raise RuntimeError(
                f"`fn` should take no derivative of torch.func inside of region {self._name!r}. Found one: its value "
                "cannot be held. Stop its result by `stop_gradient` instead."
            )
        given = {id(leaf): leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        versions = {key: leaf._version for key, leaf in given.items()}
        result = func(*args, **kwargs)
        for key, leaf in given.items():
            if leaf._version != versions[key] and not _records(leaf):
                leaf.copy_(self._tape.held(leaf, self._name))
        return tree_map(lambda leaf: leaf if id(leaf) in given else self._hold(leaf), result)

    def _hold(self, leaf: Any) -> Any:
        if isinstance(leaf, (bool, int, float, complex)):
            return self._tape.value(leaf, self._name)
        if not isinstance(leaf, Tensor) or _records(leaf) or _address(leaf) in self._memory:
            return leaf
        held = self._tape.held(leaf, self._name)
        if (address := _address(held)) is not None:
            self._memory[address] = held
        return held


def _records(tensor: Tensor) -> bool:
    """Return whether a gradient is recorded in spite of the region; a view of a leaf always claims to record one."""
    return torch.is_grad_enabled() and carries_gradient(tensor)


def _address(tensor: Tensor) -> int | None:
    """Return the identity of a tensor's memory; None if it has no memory of its own."""
    if not has_storage(tensor) or tensor.is_nested:
        return None
    address: int = tensor.untyped_storage()._cdata
    return address


def _level() -> int:
    interpreter = peek_interpreter_stack()
    return 0 if interpreter is None else interpreter.level()


def _differentiates() -> bool:
    interpreter = peek_interpreter_stack()
    return interpreter is not None and interpreter.key() in (TransformType.Grad, TransformType.Jvp)


def _kind(value: Any) -> Any:
    return (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else type(value)


def _same(one: Any, other: Any) -> bool:
    if not (isinstance(one, Tensor) and isinstance(other, Tensor)):
        return bool(one == other)
    return one.shape == other.shape and torch.allclose(one, other, rtol=1e-12, atol=0, equal_nan=True)


def _other_block(found: tuple[str, Any] | None, kept: tuple[str, Any] | None) -> str:
    def text(entry: tuple[str, Any] | None) -> str:
        if entry is None:
            return "no more"
        name, value = entry
        return f"{name!r} with shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"{name!r} with a number"

    return (
        f"`fn` should meet the same blocks at every point. Found {text(found)} where it met {text(kept)} at `inputs`."
    )
