"""Runs a function in a process of its own, from which only its result comes back."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

__all__ = ["Failure", "in_a_process"]


class Failure(Exception):
    """A process that gave no result; the message is a sentence."""


def in_a_process(function: Callable[..., Any], *args: Any, seconds: float = 900) -> Any:
    """Return ``function(*args)``, computed in a copy of this process.

    Raises:
        Failure: If the function raises an error, or takes longer than `seconds`.
    """
    forking = multiprocessing.get_context("fork")
    here, there = forking.Pipe(duplex=False)
    process = forking.Process(target=_send, args=(there, function, args))
    process.start()
    there.close()
    try:
        if not here.poll(seconds):
            raise Failure(f"It took more than {seconds:g} seconds.")
        error, result = here.recv()
    except EOFError:
        process.join()
        raise Failure(f"The process died with code {process.exitcode}.") from None
    finally:
        process.kill()
        process.join()
    if error:
        raise Failure(error)
    return result


def _send(there: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        answer = ("", function(*args))
    except BaseException as error:
        told = str(error) if isinstance(error, Failure) else f"{type(error).__name__}: {error}"
        answer = (told.strip().partition("\n")[0][:300], None)
    there.send(answer)
