"""The standard input of a script, kept so that further runs of the script read the same."""

from __future__ import annotations

import io
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from toolkit._swapped import swapped

__all__ = ["KeptInput"]


class KeptInput:
    """The bytes that a script reads from `sys.stdin`: kept in its first run, and given to each later one.

    Attributes:
        path: The file with these bytes; empty before the first one.
    """

    def __init__(self, path: str = "") -> None:
        """Begin with the bytes of an earlier run, if there are any."""
        self.path = path

    @contextmanager
    def given(self) -> Iterator[None]:
        """Let a program read; a terminal is asked again in each run."""
        original = sys.stdin
        if original is not sys.__stdin__ or not isinstance(original, io.TextIOWrapper) or original.isatty():
            yield
            return
        reader = io.BufferedReader(_Reader(self, original.fileno()))
        with swapped(sys, "stdin", io.TextIOWrapper(reader, original.encoding, original.errors)):
            yield

    def add(self, found: bytes) -> None:
        """Keep further bytes."""
        if not self.path:
            number, self.path = tempfile.mkstemp(prefix="stopgrad-input-")
            os.close(number)
        with Path(self.path).open("ab") as file:
            file.write(found)

    def forget(self) -> None:
        """Remove the file."""
        if self.path:
            Path(self.path).unlink(missing_ok=True)


class _Reader(io.RawIOBase):
    """Reads the kept bytes first, then the file descriptor, and keeps these bytes too."""

    def __init__(self, kept: KeptInput, number: int) -> None:
        self._kept, self._number = kept, number
        self._earlier = io.BytesIO(Path(kept.path).read_bytes() if kept.path else b"")

    def readable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._number

    def readinto(self, buffer: Any) -> int:
        if n_earlier := self._earlier.readinto(buffer):
            return n_earlier
        if found := os.read(self._number, len(buffer)):
            buffer[: len(found)] = found
            self._kept.add(found)
        return len(found)
