"""Warnings at the line that called this library."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from pathlib import Path

__all__ = ["warn"]

_OWN = os.path.normcase(str(Path(__file__).parents[1]) + os.sep)


def warn(message: str | Warning) -> None:
    """Warn at the line that called this library, however many of its own calls lie between."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and _is_between(frame.f_code.co_filename):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)


def _is_between(file: str) -> bool:
    return os.path.normcase(file).startswith(_OWN) or file == contextlib.__file__
