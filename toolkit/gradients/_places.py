"""The place in a user's own code at which something is met that torch or this library runs."""

from __future__ import annotations

from pathlib import Path
from types import FrameType

import torch

from toolkit.blocks import Site, site_of

__all__ = ["user_site"]

_TORCH = str(Path(torch.__file__).parent) + "/"
_TOOLKIT = str(Path(__file__).parent.parent) + "/"


def user_site(frame: FrameType | None) -> Site:
    """Return the innermost place outside of torch and this library; for a decorated function, the function's place."""
    inner = frame
    while frame is not None and frame.f_code.co_filename.startswith((_TORCH, _TOOLKIT)):
        decorated = frame.f_locals.get("func") if frame.f_code.co_name == "decorate_context" else None
        code = getattr(decorated, "__code__", None)
        if code is not None and not code.co_filename.startswith((_TORCH, _TOOLKIT)):
            return Site(code.co_filename, code.co_firstlineno, 1, code.co_qualname)
        frame = frame.f_back
    found = frame or inner
    assert found is not None
    return site_of(found)
