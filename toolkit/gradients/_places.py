"""The line of a user's own code that leads to a call of torch or of this library."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.utils._contextlib import context_decorator

from toolkit.blocks import Site, site_of

__all__ = ["TOOLKIT", "TORCH", "decorated", "folder_of", "is_wrapper_of_torch", "serves_toolkit", "user_site"]


def folder_of(file: str) -> str:
    """Return the folder of a file, with a separator at its end."""
    return str(Path(file).parent) + os.sep


# The folders of the code of torch and of this library.
TORCH = folder_of(torch.__file__)
TOOLKIT = folder_of(str(Path(__file__).parent))
_CONTEXTS = context_decorator.__code__.co_filename


def serves_toolkit(frame: FrameType | None) -> bool:
    """Return whether this library's own code runs in a frame, or has called torch there."""
    while frame is not None and frame.f_code.co_filename.startswith(TORCH):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(TOOLKIT)


def user_site(frame: FrameType | None) -> Site:
    """Return the innermost place outside of torch and this library; for a decorated function, the function's place."""
    inner = frame
    while frame is not None and _is_internal(frame.f_code.co_filename):
        if is_wrapper_of_torch(frame) and (site := decorated(frame.f_locals["func"], _is_internal)):
            return site
        frame = frame.f_back
    found = frame or inner
    assert found is not None
    return site_of(found)


def is_wrapper_of_torch(frame: FrameType) -> bool:
    """Return whether a frame is that of a function decorated by a context of torch, by `torch.no_grad` say.

    From torch 2.15 on the wrapper has the name of the context.
    """
    return frame.f_code.co_filename == _CONTEXTS and "func" in frame.f_locals


def decorated(function: Any, internal: Callable[[str], bool]) -> Site | None:
    """Return the place of a decorated function: the innermost that is not internal, at its first decorator.

    The wrapper of a decorator would be the same place for all functions that it wraps.
    """
    found = None
    while function is not None:
        code = getattr(function, "__code__", None)
        if code is not None and not internal(code.co_filename):
            found = Site(code.co_filename, code.co_firstlineno, 1, code.co_qualname)
        function = getattr(function, "__wrapped__", None)
    return found


def _is_internal(file: str) -> bool:
    return file.startswith((TORCH, TOOLKIT))
