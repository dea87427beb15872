"""Workers, which run units: this process, or several processes side by side."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import queue
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor
from typing import Any, Protocol

from toolkit.runner._units import Answer, Message, Tell, Unit

__all__ = ["Task", "Workers", "in_processes", "in_this_process"]

Task = Callable[[Unit, Tell], Answer]


class Workers(Protocol):
    """Processes that run units."""

    @property
    def count(self) -> int:
        """The most units to submit at a time: more than run at once, so that no process waits for the next."""
        ...

    def submit(self, task: Task, unit: Unit) -> Future[Answer]:
        """Start a unit; if its process is killed, the future raises BrokenExecutor."""
        ...

    def messages(self) -> Iterator[Message]:
        """Return the messages that have come so far."""
        ...


@contextlib.contextmanager
def in_this_process(tell: Tell) -> Iterator[Workers]:
    """Yield workers that run a unit when it is submitted."""
    yield _Here(tell)


class _Here:
    count = 1

    def __init__(self, tell: Tell) -> None:
        self._tell = tell

    def submit(self, task: Task, unit: Unit) -> Future[Answer]:
        future: Future[Answer] = Future()
        future.set_result(task(unit, self._tell))
        return future

    def messages(self) -> Iterator[Message]:
        return iter(())


@contextlib.contextmanager
def in_processes(count: int) -> Iterator[Workers]:
    """Yield processes of this machine. An error, or Ctrl-C, ends them at once."""
    context = multiprocessing.get_context("spawn")
    messages = context.Queue()
    pool = ProcessPoolExecutor(count, mp_context=context, initializer=_begin, initargs=(messages,))
    try:
        yield _Processes(count, pool, messages)
    except BaseException:
        for process in multiprocessing.active_children():
            process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
        messages.close()


class _Processes:
    def __init__(self, count: int, pool: ProcessPoolExecutor, messages: Any) -> None:
        self.count, self._pool, self._messages = 2 * count, pool, messages

    def submit(self, task: Task, unit: Unit) -> Future[Answer]:
        try:
            return self._pool.submit(_run, task, unit)
        except BrokenExecutor as error:
            future: Future[Answer] = Future()
            future.set_exception(error)
            return future

    def messages(self) -> Iterator[Message]:
        with contextlib.suppress(queue.Empty):
            while True:
                yield self._messages.get_nowait()


# --- in another process ------------------------------------------------------------------------------------------

_messages: Any = None


def _begin(messages: Any) -> None:
    global _messages
    _messages = messages
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the process without a traceback
    threading.Thread(target=_end_with_the_main_process, daemon=True).start()


def _end_with_the_main_process() -> None:
    main = multiprocessing.parent_process()
    assert main is not None
    multiprocessing.connection.wait([main.sentinel])
    os._exit(1)


def _run(task: Task, unit: Unit) -> Answer:
    return task(unit, _messages.put)
