"""Calls of a module whose graph goes by the module's state at the call: activations are not computed again later."""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import checkpoint

__all__ = ["all_kept", "called_with", "reentrant_kept"]


def called_with(
    model: nn.Module, tensors: Mapping[str, Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None
) -> Any:
    """Return the output of a module whose parameters and buffers have other values for this call.

    Raises:
        TypeError: If `model` is scripted, or has copies of itself as `torch.nn.DataParallel` does.
    """
    if isinstance(model, nn.DataParallel | torch.jit.ScriptModule):
        raise TypeError(
            "`model` should be a module that can be called with other parameters. "
            f"Found {type(model).__name__}: give the module inside, before it is wrapped or scripted."
        )
    with all_kept():  # the backward pass would compute them again with the module's own parameters
        return torch.func.functional_call(model, dict(tensors), args, None if kwargs is None else dict(kwargs))


class _Direct:
    """Takes the place of a checkpoint whose backward pass runs a backward pass inside."""

    @staticmethod
    def apply(function: Callable[..., Any], _: bool, *args: Any) -> Any:
        return function(*args)


def _unhooked(_: object) -> AbstractContextManager[None]:
    """Take the place of the hooks by which any other checkpoint drops the activations of its forward pass."""
    return nullcontext()


_INSTEAD = {"CheckpointFunction": _Direct, "_checkpoint_hook": _unhooked}
_ORIGINALS = {name: getattr(checkpoint, name, None) for name in _INSTEAD}
_LOCK, _USERS = threading.Lock(), Counter[str]()


@contextmanager
def _instead(*names: str) -> Iterator[None]:
    with _LOCK:
        for name in names:
            _USERS[name] += 1
            setattr(checkpoint, name, _INSTEAD[name])
    try:
        yield
    finally:
        with _LOCK:
            for name in names:
                _USERS[name] -= 1
                if not _USERS[name]:
                    setattr(checkpoint, name, _ORIGINALS[name])


def all_kept() -> Any:
    """Keep all activations inside, in all threads, of models that call `torch.utils.checkpoint.checkpoint`.

    Raises:
        RuntimeError: If this release of torch computes them again nevertheless.
    """
    _check_release()
    return _instead(*_INSTEAD)


def reentrant_kept() -> Any:
    """As `all_kept`, for ``use_reentrant=True`` alone: `torch.autograd.grad` cannot pass such a checkpoint.

    Raises:
        RuntimeError: As `all_kept`.
    """
    _check_release()
    return _instead("CheckpointFunction")


@functools.cache
def _check_release() -> None:
    """Raise unless a checkpoint with kept activations calls its function once: `_INSTEAD` has private names of torch.

    In a thread of its own, which has no modes.
    """
    with ThreadPoolExecutor(1) as thread, _instead(*_INSTEAD):
        calls = [thread.submit(_calls_of_a_checkpoint, reentrant).result() for reentrant in (False, True)]
    if calls != [1, 1]:
        raise RuntimeError(
            f"torch should be a release whose checkpoints can keep their activations. Found {torch.__version__}, which "
            "computes them again: install an older one."
        )


def _calls_of_a_checkpoint(reentrant: bool) -> int:
    """Return how often a checkpoint calls its function in a forward and a backward pass."""
    calls = []

    def function(x: Tensor) -> Tensor:
        calls.append(x)
        return x.exp()

    x = torch.zeros((), requires_grad=True)
    checkpoint.checkpoint(function, x, use_reentrant=reentrant).backward()
    return len(calls)
