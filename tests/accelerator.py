"""An accelerator on every machine: CUDA, or else an imitation, on which the tests of the GPU run without one.

The imitation keeps its numbers in the memory of the CPU, and behaves as another device does: an operation takes no
tensor of the CPU beside its own (but numbers, and indices), NumPy cannot read it, and it draws from generators of its
own. It knows nothing of kernels, streams and memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_IMITATED = torch.device("lazy", 0)  # backward passes on this device need no thread of their own
_CPU = torch.device("cpu")

ACCELERATOR = "cuda" if torch.cuda.is_available() else _IMITATED.type

_aten = torch.ops.aten
_INDEXING = {_aten.index, _aten.index_put, _aten.index_put_, _aten._index_put_impl_}


@contextmanager
def accelerator() -> Iterator[str]:
    """Have the accelerator, and be told which it is."""
    with ExitStack() as stack:
        if _IMITATED.type == ACCELERATOR:
            for name, instead in _INSTEAD.items():
                stack.enter_context(mock.patch(name, instead))
            stack.enter_context(_Imitation())
        yield ACCELERATOR


class _There(Tensor):
    """A tensor of the imitated device."""

    held: Tensor

    def _exchange(self, other: _There) -> None:
        Tensor.data.__set__(self, other)  # type: ignore[attr-defined]
        self.held = other.held

    data = property(Tensor.data.__get__, _exchange)  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, held: Tensor) -> _There:
        if held._is_zerotensor():  # which has no memory: that is known on the CPU alone
            held = torch.zeros(held.shape, dtype=held.dtype, device=_CPU)
        tensor: _There = Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype,
            device=_IMITATED,
        )  # fmt: skip
        tensor.held = held
        return tensor

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{self.held}, imitated"


class _Imitation(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _made_on_the_cpu(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function that makes a tensor of Python's numbers on the CPU and moves it: a mode hears of no other."""

    def made(data: Any, *, device: Any = None, requires_grad: bool = False, **options: Any) -> Tensor:
        if isinstance(data, Tensor):
            return make(data, device=device, **options)
        found = make(data, device=_CPU, **options).to(device or torch.empty(0).device)
        return found.requires_grad_(requires_grad)

    return made


def _new_tensor(self: Tensor, data: Any, **options: Any) -> Tensor:
    return torch.tensor(data, **{"dtype": self.dtype, "device": self.device, **options})


def _tolist(self: Tensor, as_it_is: Callable[[Tensor], Any] = Tensor.tolist) -> Any:
    return as_it_is(self.cpu())


_Plain = torch.Generator


# An operation is told of a generator without its class.
_generators: WeakValueDictionary[int, torch.Generator] = WeakValueDictionary()


class _ImitatedGenerator(_Plain):
    """A generator of the imitated device."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return _IMITATED


class _OfTheDevice(type(_Plain)):  # type: ignore[misc]
    def __call__(cls, device: Any = "cpu") -> torch.Generator:
        if torch.device(device).type != _IMITATED.type:
            return _Plain(device)
        made = _ImitatedGenerator()
        _generators[made._cdata] = made
        return made

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, _Plain)


class _Generator(_Plain, metaclass=_OfTheDevice):
    """`torch.Generator`, for the imitated device as well."""


_INSTEAD = {
    "torch.Generator": _Generator,
    "torch.tensor": _made_on_the_cpu(torch.tensor),
    "torch.as_tensor": _made_on_the_cpu(torch.as_tensor),
    "torch.asarray": _made_on_the_cpu(torch.asarray),
    "torch.Tensor.new_tensor": _new_tensor,
    "torch.Tensor.tolist": _tolist,
}


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = list[Tensor]()
    held = _mapped(lambda tensor: _noted(tensor, tensors), args)
    options = {name: _mapped(lambda tensor: _noted(tensor, tensors), value) for name, value in kwargs.items()}
    there = any(isinstance(tensor, _There) for tensor in tensors)
    if there and any(map(_is_elsewhere, tensors)) and not _may_cross(func.overloadpacket, args):
        found = [f"{tuple(tensor.shape)} on {tensor.device}" for tensor in tensors]
        raise RuntimeError(f"Expected all tensors to be on the same device. Found {', '.join(found)} in {func}.")
    if kwargs.get("device") is not None:
        there = torch.device(kwargs["device"]).type == _IMITATED.type
        options["device"] = _CPU if there else kwargs["device"]
    elif func.overloadpacket is _aten.copy_:
        there = isinstance(args[0], _There)
    drawn = kwargs.get("generator")
    if drawn is not None and (drawn._cdata in _generators) != there:
        raise RuntimeError(f"Expected a generator of the device of {func}. Found one of {drawn.device}.")
    result = func(*held, **options)
    if not there:
        return result
    if torch.Tag.inplace_view in func.tags:
        args[0].data = _There(args[0].held)  # of its new shape
    known = {id(tensor.held): tensor for tensor in tensors if isinstance(tensor, _There)}
    return _mapped(lambda tensor: known[id(tensor)] if id(tensor) in known else _There(tensor), result)


def _mapped(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Map the tensors among the arguments or the results of an operation, and in lists of them."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, (list, tuple)):
        mapped = [_mapped(function, each) for each in value]
        return mapped if isinstance(value, list) else tuple(mapped)
    return value


def _noted(tensor: Tensor, tensors: list[Tensor]) -> Tensor:
    """Add a tensor to a list, and return the one of the CPU that holds its numbers."""
    tensors.append(tensor)
    return tensor.held if isinstance(tensor, _There) else tensor


def _may_cross(operation: Any, args: Any) -> bool:
    """Say whether an operation copies from one device to another, or takes indices of the CPU."""
    return operation in (_aten.copy_, _aten._to_copy) or (operation in _INDEXING and isinstance(args[0], _There))


def _is_elsewhere(tensor: Tensor) -> bool:
    return not isinstance(tensor, _There) and tensor.dim() > 0
