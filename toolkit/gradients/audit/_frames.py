"""The frame of the user's code that called an attribute of torch which an audit replaces."""

from __future__ import annotations

import copy
import dis
import itertools
import os
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from toolkit.gradients._parts import INSTALLED
from toolkit.gradients._places import TOOLKIT, TORCH, folder_of

__all__ = [
    "calling_frame",
    "is_decorating",
    "is_machinery",
    "is_standard",
    "opens_with",
    "outside_of_wrapper",
    "passes_on",
    "span",
]

# The folder of the standard library; installed packages may lie in it.
_STANDARD = folder_of(copy.__file__)

# Parts of torch that are models, not internals: their stops concern the user.
_MODELS = tuple(
    TORCH + part.replace("/", os.sep)
    for part in ("nn/functional.py", "nn/modules/", "nn/utils/", "distributions/", "ao/")
)

# Parts of torch whose stops belong to the line that calls them: `load_state_dict`, `state_dict`, `clip_grad_norm_`.
_OF_THE_CALLER = tuple(TORCH + part.replace("/", os.sep) for part in ("nn/modules/module.py", "nn/utils/clip_grad.py"))

# The files of the replaced attributes.
_FILES = ("_frames", "_regions", "_tensors", "_watch", "places", "replaced")
_REPLACED = frozenset(str(Path(__file__).with_name(f"{name}.py")) for name in _FILES)


def calling_frame() -> FrameType:
    """Return the frame that called a replaced attribute, by its name or by an earlier binding."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (frame.f_code.co_filename in _REPLACED or passes_on(frame)):
        frame = frame.f_back
    assert frame is not None
    return frame


def is_machinery(file: str) -> bool:
    """Return whether code in a file is an internal of torch or of this library."""
    return file.startswith((TOOLKIT, TORCH)) and not file.startswith(_MODELS)


def is_standard(frame: FrameType) -> bool:
    """Return whether a frame runs code of Python's standard library, not of a file of the user with such a name."""
    return frame.f_code.co_filename.startswith(_STANDARD) and _package(frame) in sys.stdlib_module_names


def outside_of_wrapper(frame: FrameType, kind: str) -> FrameType:
    """Return the frame that called a package's function of the same name, for example a container's ``detach()``."""
    if frame.f_code.co_filename in _OF_THE_CALLER:
        while frame.f_back is not None and frame.f_code.co_filename.startswith(TORCH):
            frame = frame.f_back
    if not frame.f_code.co_filename.startswith(INSTALLED):
        return frame
    name, package = kind.strip(".()"), _package(frame)
    found, inside = frame, frame
    while inside.f_back is not None and _package(inside) == package:
        decorates = inside is found is not frame and name not in inside.f_code.co_names
        if inside.f_code.co_name == name or decorates:
            found = inside.f_back
        inside = inside.f_back
    return found


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def span(frame: FrameType) -> Any:
    """Return where the expression that a frame has reached begins and ends in the source."""
    return next(itertools.islice(frame.f_code.co_positions(), frame.f_lasti // 2, None))


def passes_on(frame: FrameType) -> bool:
    """Return whether a call only passes through this frame, by modes or by the names of `torch.ops`."""
    code = frame.f_code
    mode = code.co_name == "__torch_function__" and code.co_filename.startswith(TOOLKIT)
    return mode or code.co_filename == TORCH + "_ops.py"


def is_decorating(frame: FrameType) -> bool:
    """Return whether torch enters a context for a function decorated with it."""
    return frame.f_code.co_filename.startswith(TORCH) and frame.f_code.co_name != "<module>"


def opens_with(frame: FrameType) -> bool:
    """Return whether a frame's current call is the subject of a ``with`` statement."""
    code = frame.f_code.co_code
    step = frame.f_lasti + 2
    while step < len(code) and code[step] == 0:  # inline caches
        step += 2
    return dis.opname[code[step]] in ("BEFORE_WITH", "LOAD_SPECIAL", "COPY")
