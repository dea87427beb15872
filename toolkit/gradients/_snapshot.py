"""The state of a program before its loss function runs, with copies to restore it."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.utils._pytree import tree_leaves

from toolkit.blocks import has_storage, no_graph
from toolkit.gradients._holders import put_back
from toolkit.gradients._parts import LARGEST_STATE, Parts

__all__ = ["Kept", "RandomState", "Snapshot"]


class Snapshot:
    """The state of a program before its loss function ran.

    It covers random numbers, modes, buffers, gradients, the values of tensors, and the contents of containers and
    attributes.
    """

    def __init__(self, parts: Parts, parameters: Mapping[str, Tensor]) -> None:
        """Take the state now."""
        self._modules = list(dict.fromkeys(m for module in parts.modules.values() for m in module.modules()))
        leaves = [p for module in self._modules for p in module._parameters.values() if p is not None]
        buffers = [buffer for _, _, buffer in self._buffers() if buffer is not None]
        tensors = {id(t): t for t in [*leaves, *buffers, *parts.tensors.values(), *parameters.values()]}
        self._tensors = [tensor for tensor in tensors.values() if not tensor.is_inference()]
        self.leaves = [tensor for tensor in self._tensors if tensor.is_leaf]
        self._parts = parts
        self._random = RandomState(parts.generators)
        self._state = [holder.taken() for holder in parts.state]
        small = {id(t) for t in [*leaves, *buffers, *parameters.values()]}
        self._data = {id(t) for t in self._tensors if id(t) not in small and _size(t) > LARGEST_STATE}
        self._names = {id(t): name for name, t in parts.tensors.items()}
        self._values: list[Kept] | None = self._kept_now()
        self._is_lent = self._is_new = self._draws_anew = False

    @contextmanager
    def session(self, *, is_new: bool = False) -> Iterator[None]:
        """Restore random numbers and state in Python at the end of a ``with``, once for all runs inside of it.

        Args:
            is_new: Whether nothing has run since this state was taken.
        """
        if self._is_lent:
            yield
            return
        now = self._random if is_new else RandomState(self._parts.generators)
        state = self._state if is_new else [taken if taken.is_held() else taken.holder.taken() for taken in self._state]
        self._is_lent, self._is_new, self._draws_anew = True, is_new, is_new or now.equals(self._random)
        try:
            with ExitStack() as stack:
                stack.callback(now.restore)
                stack.callback(put_back, state)
                yield
        finally:
            self._is_lent = False

    def _lend(self, *, runs: bool) -> None:
        """Restore random numbers and state in Python for a run, or state alone for a derivative."""
        iterators: dict[int, Any] = {}
        for taken in self._state:
            if taken.moves or not self._is_new:
                taken.lend(iterators)
        if runs and not self._draws_anew:
            self._random.restore()
        self._is_new = self._draws_anew = False

    @contextmanager
    def set_aside(self, *, runs: bool = True) -> Iterator[_Moved]:
        """Run a body on the program in its saved state, and restore everything afterwards, also after an error.

        Buffers are replaced by copies, not written back: writing to them would invalidate the graph that uses them.
        Gradients are moved aside in the same way.

        Args:
            runs: Whether the program runs; otherwise only a derivative of an earlier run is taken, which changes no
                values.
        """
        moved = _Moved()
        if self._values is None and runs:
            self._values = self._kept_now()
        initial = self._values if runs and self._values is not None else []
        values = [kept.again() for kept in initial if kept.is_touched()]
        leaves = [(leaf, leaf.grad, leaf.requires_grad) for leaf in self.leaves if leaf.is_leaf]
        outer = self._buffers()  # the copies of an outer derivative, whose checkpoints may run again after this run
        with self.session():
            self._lend(runs=runs)
            for kept in initial if values else ():
                kept.put_back()
            for leaf, gradient, _ in leaves if runs else ():
                leaf.grad = None if gradient is None else gradient.clone()
            buffers = self._buffers()
            copies = {id(buffer): None if buffer is None else buffer.clone() for _, _, buffer in buffers}
            for module, name, buffer in buffers:
                module._buffers[name] = copies[id(buffer)]
            try:
                yield moved
            finally:
                for leaf, gradient, required in leaves:
                    if not leaf.is_leaf:  # such as an average of parameters, updated inside of an open region
                        leaf.detach_()
                    if leaf.requires_grad != required:
                        leaf.requires_grad_(required)
                    leaf.grad = gradient
                for module, name, buffer in [*buffers, *outer]:
                    module._buffers[name] = buffer
                changed = [kept for kept in initial if kept.is_changed()]
                moved.values |= bool(changed)
                # Data last, which cannot be put back: that is an error, and everything else is in its place by then.
                for kept in sorted([*changed, *values], key=lambda kept: kept.values is None):
                    kept.put_back()

    def buffer_versions(self) -> list[tuple[int, int]]:
        """Return the identity and version of each buffer that a gradient may use: no counter, as batch norm has one."""
        buffers = [buffer for _, _, buffer in self._buffers() if buffer is not None]
        return [(id(b), b._version) for b in buffers if b.is_floating_point() or b.is_complex()]

    def _buffers(self) -> list[tuple[nn.Module, str, Tensor | None]]:
        return [(module, name, buffer) for module in self._modules for name, buffer in module._buffers.items()]

    def _kept_now(self) -> list[Kept]:
        return [Kept.now(tensor, self._names.get(id(tensor), ""), id(tensor) in self._data) for tensor in self._tensors]

    def storages(self) -> set[int]:
        """Return the present memory of the program's tensors, buffers included."""
        buffers = [buffer for _, _, buffer in self._buffers() if buffer is not None]
        return {tensor.untyped_storage()._cdata for tensor in [*self._tensors, *buffers] if has_storage(tensor)}

    def forget_values(self) -> None:
        """Free the copies of values; the next run takes new ones."""
        self._values = None


@dataclass
class _Moved:
    """Whether a run changed the values of tensors that existed before."""

    values: bool = False


@dataclass(frozen=True)
class Kept:
    """The state of a leaf at one time: its memory, its values, and autograd's count of their changes.

    The values of data are not copied: a program that writes into its data is refused.
    """

    leaf: Tensor
    name: str
    memory: Tensor
    values: Tensor | None
    version: int

    @classmethod
    def now(cls, leaf: Tensor, name: str, is_data: bool) -> Kept:
        """Take the state of a leaf; of data without its values."""
        memory = torch._C.TensorBase.detach(leaf)
        return cls(leaf, name, memory, None if is_data else memory.clone(), leaf._version)

    def again(self) -> Kept:
        """Return the same leaf as it is now."""
        return self.now(self.leaf, self.name, self.values is None)

    def is_touched(self) -> bool:
        """Return whether the leaf may have changed."""
        return self.leaf._version != self.version or _address(self.leaf) != _address(self.memory)

    def is_changed(self) -> bool:
        """Return whether the leaf has changed."""
        if self.values is None:
            return self.is_touched()
        return self.is_touched() or not _same(torch._C.TensorBase.detach(self.leaf), self.values)

    def put_back(self) -> None:
        """Restore the state."""
        if self.values is None:
            raise RuntimeError(
                f"`loss` should not write into its data. Found `{self.name}` changed, too large to be put back: "
                "write into a copy."
            )
        with no_graph():
            if _address(self.leaf) != _address(self.memory) or _shape(self.leaf) != _shape(self.memory):
                self.leaf.data = self.memory
            self.leaf.copy_(self.values)
        torch._C._autograd._unsafe_set_version_counter((self.leaf,), (self.version,))


def _address(tensor: Tensor) -> int:
    return 0 if tensor.layout is not torch.strided else tensor.data_ptr()


def _components(tensor: Tensor) -> list[Tensor]:
    """Return the dense tensors that a sparse or nested tensor consists of; of any other the tensor itself."""
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    if tensor.layout is torch.strided and tensor.is_nested:  # its shape cannot be asked for
        return [tensor._nested_tensor_size(), tensor.values()]
    if tensor.layout is torch.jagged:
        return [tensor.offsets(), tensor.values()]  # type: ignore[attr-defined]
    return [tensor if tensor.layout is torch.strided else tensor.to_dense()]


def _shape(tensor: Tensor) -> torch.Size | None:
    """Return the shape; None for a nested tensor with strides."""
    return None if tensor.layout is torch.strided and tensor.is_nested else tensor.shape


def _size(tensor: Tensor) -> int:
    return sum(part.nbytes for part in _components(tensor))


def _same(a: Tensor, b: Tensor) -> bool:
    if a.layout is not b.layout or a.is_nested != b.is_nested:
        return False
    if isinstance(a, FakeTensor):  # without values
        return True
    if a.layout is torch.strided and not a.is_nested:
        return _same_numbers(a, b)
    return all(map(_same_numbers, _components(a), _components(b)))


def _same_numbers(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.is_meta:  # without values
        return True
    return torch.equal(a, b) or bool(
        a.is_floating_point() and torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())
    )


class RandomState:
    """The states of the global generators and of those given, to be restored."""

    def __init__(self, generators: list[Any]) -> None:
        self._python, self._torch = random.getstate(), torch.get_rng_state()
        self._numpy: Any = np.random.get_state(legacy=False)  # noqa: NPY002 - the other form takes 100 us
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        self._generators = [(generator, _get_state(generator)) for generator in generators]

    def equals(self, other: RandomState) -> bool:
        """Return whether all draws will be the same."""
        return (
            self._python == other._python
            and all(map(np.array_equal, tree_leaves(self._numpy), tree_leaves(other._numpy)))
            and torch.equal(self._torch, other._torch)
            and not (self._cuda or other._cuda or self._generators or other._generators)
        )

    def restore(self) -> None:
        """Draw again from here."""
        random.setstate(self._python)
        np.random.set_state(self._numpy)  # noqa: NPY002
        torch.set_rng_state(self._torch)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)
        for generator, state in self._generators:
            _set_state(generator, state)


def _get_state(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)
