"""The progress of a fit: a line that is updated in a terminal, lines one below the other elsewhere, or nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.console import Console
    from rich.status import Status

Callback = Callable[[int, float], None]


class Progress:
    """Shows the steps of one fit, and passes them on.

    Silent fits do not import the library that draws.

    Example:
        >>> with Progress(verbose=1, interval=10, callback=None) as progress:
        ...     progress.begin("Start 1 of 1")
        ...     for n in range(11):
        ...         progress(n, -2.0 + n / 10)
        ...     progress.end("converged", -1.0)
        Start 1 of 1
          step 10: -1.000000 nats per sample, +1.0e+00
          converged at -1.000000 nats per sample
    """

    def __init__(
        self,
        *,
        verbose: int,
        interval: int,
        callback: Callback | None,
        step: str = "step",
        measure: str = "nats per sample",
    ) -> None:
        self._step, self._measure = step, measure
        self._verbose, self._interval, self._callback = verbose, interval, callback
        self._console: Console | None = None
        self._status: Status | None = None
        self._what, self._shown, self._since = "", float("nan"), time.perf_counter()

    def __enter__(self) -> Self:
        if self._verbose:
            from rich.console import Console

            self._console = Console(highlight=False, soft_wrap=True)
            if self._console.is_terminal:
                self._status = self._console.status("")
                self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()

    @property
    def listener(self) -> Callback | None:
        """The callback for a fit, or None if nobody listens."""
        return self if self._verbose or self._callback is not None else None

    def begin(self, what: str) -> None:
        """Show the part of the fit that begins."""
        self._what, self._shown, self._since = what, float("nan"), time.perf_counter()
        if self._console is not None:
            self._console.print(what)

    def __call__(self, n_iter: int, log_likelihood: float) -> None:
        """Show a step, and pass it on."""
        if self._callback is not None:
            self._callback(n_iter, log_likelihood)
        if self._console is None:
            return
        if self._shown != self._shown:
            self._shown = log_likelihood
        line = (
            f"{self._step} {n_iter}: {log_likelihood:.6f} {self._measure}, "
            f"{log_likelihood - self._shown:+.1e}{self._time()}"
        )
        if self._status is not None:
            self._status.update(f"{self._what}, {line}")
        elif n_iter and n_iter % self._interval == 0:
            self._console.print(f"  {line}")
            self._shown = log_likelihood

    def end(self, how: str, log_likelihood: float) -> None:
        """Show the end of the part that began."""
        if self._console is not None:
            self._console.print(f"  {how} at {log_likelihood:.6f} {self._measure}{self._time()}")

    def say(self, what: str, seconds: float | None = None) -> None:
        """Show a message in the place of an end, and how long it took."""
        if self._console is not None:
            time = f", {seconds:.2f} s" if seconds is not None and self._verbose > 1 else ""
            self._console.print(f"  {what}{time}")

    def _time(self) -> str:
        return f", {time.perf_counter() - self._since:.2f} s" if self._verbose > 1 else ""
