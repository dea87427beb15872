"""Time of `stop_gradient` against `Tensor.detach`, and of an open block against code without a block."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from benchmarks._measure import Row, timed_row
from toolkit import block, scope, stop_gradient, stop_recording

BLOCK = block("benchmarks.block", "The quantity whose gradient is stopped while it is timed.")

_CALLS = 100  # in one timed program, so that the loop around them is a small part
_row = partial(timed_row, steps=_CALLS)


def rows() -> Iterator[Row]:
    """Measure one tensor at a time in eager mode, and the region form beside `torch.no_grad`."""
    x = torch.ones(8, requires_grad=True)
    detach = _repeated(lambda: x.detach())
    yield _row("stop_gradient, named / detach", _repeated(lambda: stop_gradient(x, BLOCK)), detach, "at most 1.5")
    yield _row("stop_gradient, unnamed / detach", _repeated(lambda: stop_gradient(x)), detach, "at most 1.5")
    stop_gradient(x, "benchmarks.adhoc")
    yield _row("stop_gradient, string / detach", _repeated(lambda: stop_gradient(x, "benchmarks.adhoc")), detach)

    def scoped() -> None:
        with scope("benchmarks"):
            named()

    named = _repeated(lambda: stop_gradient(x, BLOCK))
    yield _row("stop_gradient inside of a scope / detach", scoped, detach)
    leaves = [torch.ones(8, requires_grad=True) for _ in range(3)]
    tree = dict(zip("abc", leaves, strict=True))
    yield _row(
        "stop_gradient of a dict of 3 / detach 3 times",
        _repeated(lambda: stop_gradient(tree, BLOCK)),
        _repeated(lambda: {key: leaf.detach() for key, leaf in tree.items()}),
    )

    def region() -> None:
        with stop_recording(BLOCK):
            pass

    def no_grad() -> None:
        with torch.no_grad():
            pass

    yield _row("stop_recording / no_grad", _repeated(region), _repeated(no_grad))


def _repeated(call: Callable[[], object]) -> Callable[[], None]:
    def program() -> None:
        for _ in range(_CALLS):
            call()

    return program
