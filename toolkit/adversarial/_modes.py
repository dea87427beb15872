"""The modes an attack runs in, and how every one of them is put back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

__all__ = ["evaluation"]


@contextmanager
def evaluation(model: object) -> Iterator[None]:
    """Run every module of `model` in evaluation mode, and give each its own flag back, also after an error.

    The flags are set one by one rather than by ``model.eval()`` and ``model.train()``: a model may be partly in
    evaluation mode (frozen batch normalisation), and its ``train`` may do more than set flags.

    Args:
        model: What is not a `torch.nn.Module` has no flags and is left alone.
    """
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    flags = [module.training for module in modules]
    try:
        for module in modules:
            module.training = False
        yield
    finally:
        for module, flag in zip(modules, flags, strict=True):
            module.training = flag
