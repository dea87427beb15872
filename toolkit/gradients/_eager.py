"""Compiled code is run as Python: a compiled graph has no gates."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch

from toolkit._swapped import swapped

__all__ = ["without_compiled_code"]


@contextmanager
def without_compiled_code(ran: list[object] | None = None) -> Iterator[None]:
    """Run compiled functions and branches of `torch.cond` as Python, because a compiled graph has no gates.

    Args:
        ran: Gets the compiler of each compiled function that is called.
    """
    branches, compile = torch.cond.__code__, torch.compile
    with ExitStack() as stack:

        def eager() -> None:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(nullcontext() if ran is None else _noting_calls(ran))

        def compiled(*args: Any, **kwargs: Any) -> Any:
            """Compile for the first time: the import of the compiler, which takes a second, waits until here."""
            if torch.compile is compiled:
                torch.compile = compile
                eager()
            return compile(*args, **kwargs)

        torch.cond.__code__ = _branch.__code__  # for every name that the function has, as of `from torch import cond`
        if "torch._dynamo" in sys.modules:
            eager()
        else:
            torch.compile = compiled
        try:
            yield
        finally:
            torch.cond.__code__, torch.compile = branches, compile


def _noting_calls(ran: list[object]) -> AbstractContextManager[None]:
    """Keep the compiler of each compiled function that is called."""
    frames: Any = sys.modules["torch._dynamo.eval_frame"]
    original = frames._callback_from_stance

    def noted(compiler: Any) -> Any:
        ran.extend([compiler] if callable(compiler) else [])
        return original(compiler)

    return swapped(frames, "_callback_from_stance", noted)


def _branch(pred: Any, true_fn: Callable[..., Any], false_fn: Callable[..., Any], operands: Sequence[Any] = ()) -> Any:
    return (true_fn if pred else false_fn)(*operands)
