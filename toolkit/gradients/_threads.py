"""The thread that runs now, as it is known to code that watches one thread alone."""

from __future__ import annotations

import os
import threading

__all__ = ["this_thread"]


def this_thread() -> tuple[int, int]:
    """Return the process and the thread that run now: a forked child has the same thread in another process."""
    return os.getpid(), threading.get_ident()
