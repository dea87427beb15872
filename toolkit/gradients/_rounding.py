"""The decision whether a leak is more than rounding.

Each parameter is judged by its own gradient: a leak below eps^(3/4) times this gradient is rounding. This bound does
not decide if the gradient vanishes or the program computes in low precision. Then the parameters are moved by a few
units in the last place; a leak that is rounding changes with them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.graph import GradientEdge

from toolkit.gradients._answers import Answers, Leak
from toolkit.gradients.verdict import Floats, Verdict, flat, norm, rounding, unobserved

__all__ = ["Rounding", "RoundingOfRuns"]

# The number of random changes of the parameters that show how far rounding moves a leak.
_NUDGES = 6

# Factor of the loss, in a backward pass that shows rounding: no power of two, which would round alike.
_PART = 3.0

# A leak that moves by more than a third of itself is undecided; one that moves by less than a thirtieth is clear.
_MOST_NOISE, _CLEAR = 3.0, 30.0

# A leak beyond this multiple of a gradient's rounding is not rounding of that gradient.
_FAR = 100.0

# The relative change of the parameters that leads away from a point where the gradient vanishes.
_ELSEWHERE = 0.1


class Rounding:
    """Distinguishes the leaks of one program from rounding."""

    def __init__(self, answers: Answers, squares: Floats) -> None:
        """Judge by these answers; `squares`: the squared norm of each parameter's blocked gradient, (P,)."""
        self._answers, self._squares = answers, squares
        self._params, self._blocked = answers.params, answers.plain.gradients
        self._arrived: list[tuple[str, GradientEdge, Tensor]] | None = None
        self._forgotten = set[str]()

    def verdict(self, names: Sequence[str], leak: Leak, rows: Floats) -> Verdict:
        """Return the verdict of these blocks from their leak and the products of each parameter."""
        leaks, opened, blocked = _norms(rows)
        if not (leak.carried or leaks.any()):
            return Verdict("no-op")
        if cut := leak.reached - self._answers.plain.reached:
            return Verdict("cuts", tuple(sorted(cut)))
        # Written so that a leak beside a gradient that is NaN is beyond it: nothing is known to be rounding there.
        beyond = (leaks > 0) & ~(leaks <= self._allowed * np.maximum(opened, blocked))
        if np.isfinite(leaks).all():
            if not beyond.any():
                return Verdict("redundant")
            if not self._is_clear(names, leak, rows):
                noise = self._noise(names, leak, rows)
                told = beyond & (leaks > _MOST_NOISE * noise)
                if not told.any():
                    if self._precision <= torch.finfo(torch.float32).eps and self._vanishes(names, leaks)[beyond].all():
                        return Verdict("redundant")
                    size = max(math.hypot(*opened), math.hypot(*blocked))
                    return Verdict("noise", noise=_MOST_NOISE * math.hypot(*noise) / size)
                beyond = told
        made = beyond & (opened <= self._allowed * blocked)
        if made.any():
            return Verdict(
                "makes",
                tuple(name for name, is_made in zip(self._params, made.tolist(), strict=True) if is_made),
            )
        return Verdict("partial")

    def _is_clear(self, names: Sequence[str], leak: Leak, rows: Floats) -> bool:
        """Return whether a leak is more than rounding, as far as known without another run.

        If the gradient vanishes, as after training, its size does not decide. While gates apply, a backward pass of a
        part of the loss decides: rounding changes with the part.
        """
        if not self._is_resolved:
            return False
        whole, _, opened, blocked = rows.sum(0).tolist()
        whole, opened, blocked = math.sqrt(whole), math.sqrt(opened), math.sqrt(blocked)
        if whole > self._answers.precision**0.6 * max(opened, blocked):
            return True
        if not self._answers.answers_at_once(names):
            return False
        shares = {name: norm([part]) for name, part in leak.parts.items()}
        large = [(self._last_uses.get(name, 0), name) for name, share in shares.items() if share > 0.1 * whole]
        if not large:  # more than a hundred parameters, with a small share each
            return False
        last = max(large)[1]
        edges, cotangents = zip(*self._arrivals_of_a_part(names), strict=True)
        with self._answers.passing(names):
            part = self._derivative(edges, last, cotangents)
        moved = flat(part).double() * _PART - leak.parts[last].double()
        return bool(norm([moved]) <= self._answers.precision**0.5 * shares[last])

    @property
    def _precision(self) -> float:
        return self._answers.precision

    @cached_property
    def _allowed(self) -> Floats:
        """Return for each parameter, (P,), the largest relative leak that is rounding."""
        with unobserved():
            return np.array([rounding(gradient.dtype) for gradient in self._blocked.values()])

    @cached_property
    def _is_resolved(self) -> bool:
        """Whether the blocked gradient is clearly more than rounding.

        While gates apply, a short backward pass decides. It checks one parameter: the last that the program uses, among
        those with a large share of the gradient.
        """
        if self._answers.gated is None:
            again = self._answers.nudged(0, self._answers.precision) or self._blocked
            moved = norm([flat(again[name]).double() - flat(g).double() for name, g in self._blocked.items()])
            return bool(moved <= self._answers.precision**0.5 * self._blocked_norm)
        norms = dict(zip(self._params, np.sqrt(self._squares).tolist(), strict=True))
        large = [(use, name) for name, use in self._last_uses.items() if norms[name] > 0.1 * self._blocked_norm]
        if not large:
            return False
        _, last = max(large)
        for divisor in (_PART, 7.0):  # a few digits may come out the same by chance
            with unobserved():
                share = torch.full_like(self._answers.gated, 1 / divisor)
            with self._answers.passing(()):
                part = self._derivative(self._answers.gated, last, share)
            with unobserved():
                moved = norm([flat(part).double() / share.item() - self._answers.flat_blocked[last].double()])
            if not moved <= self._answers.precision**0.5 * norms[last]:
                return False
        return True

    def _derivative(
        self, outputs: Tensor | Sequence[GradientEdge], name: str, cotangents: Tensor | Sequence[Tensor]
    ) -> Tensor:
        """Return the derivative with respect to one parameter."""
        inputs = [self._params[name], *self._answers.others]
        return torch.autograd.grad(outputs, inputs, cotangents, retain_graph=True, allow_unused=True)[0]

    @cached_property
    def _last_uses(self) -> dict[str, int]:
        """Parameter -> the number of the last node that uses it, for those that the graph reaches."""
        names = {id(parameter): name for name, parameter in self._params.items()}
        uses: dict[str, int] = {}
        for node in self._answers.nodes:
            for successor, _ in node.next_functions:
                if name := names.get(id(getattr(successor, "variable", None))):
                    uses[name] = max(uses.get(name, 0), node._sequence_nr())
        return uses

    def _vanishes(self, names: Sequence[str], leaks: Floats) -> NDArray[np.bool_]:
        """Return for each parameter, (P,), whether its blocked gradient is only rounding, and its leak too.

        The gradient of a steep function also moves as a whole under rounding, and so does its leak. Where the program
        can run elsewhere, the leak has to be rounding beside the gradient there.
        """
        vanishes = (self._moved >= 0.1 * np.sqrt(self._squares)) & (leaks <= _FAR * self._moved)
        for seed in range(2 if vanishes.any() else 0):
            blocked, opened = (self._answers.elsewhere(seed, _ELSEWHERE, open) for open in ((), names))
            if blocked is None or opened is None:
                return vanishes
            pairs = [(flat(blocked[name]).double(), flat(opened[name]).double()) for name in self._params]
            sizes = np.array([max(norm([before]), norm([after])) for before, after in pairs])
            vanishes &= np.array([norm([after - before]) for before, after in pairs]) <= self._allowed * sizes
        return vanishes

    @cached_property
    def _moved(self) -> Floats:
        """Return for each parameter, (P,), the change of its blocked gradient under rounding."""
        moved = np.zeros(len(self._params))
        for seed in range(3):  # a few digits may come out the same by chance
            again = self._answers.nudged(seed, self._answers.precision) or self._blocked
            distances = [norm([flat(again[name]).double() - flat(g).double()]) for name, g in self._blocked.items()]
            moved = np.maximum(moved, distances)
        return moved

    def _noise(self, names: Sequence[str], leak: Leak, rows: Floats) -> Floats:
        """Return (P,), the change of a leak under a rounding of the parameters.

        If neither is available, it is the rounding of the gradient itself.
        """
        leaks, opened, blocked = _norms(rows)
        noise = np.zeros(len(self._params))
        # A few digits may come out the same by chance, a gradient's may not.
        low = self._answers.precision > torch.finfo(torch.float32).eps
        for nudge in range(1 if self._is_resolved and not low else _NUDGES):
            size = _nudge(self._answers.precision, nudge)
            open, without = self._answers.nudged(nudge, size, names), self._answers.nudged(nudge, size)
            if open is None or without is None:
                return np.maximum(noise, self._answers.precision * np.maximum(opened, blocked))
            for index, name in enumerate(self._params):
                moved = flat(open[name]).double() - flat(without[name]).double()
                moved = moved - leak.parts[name].double() if name in leak.parts else moved
                noise[index] = max(noise[index], moved.norm().item())
            if not (leaks > _MOST_NOISE * noise).any() or (nudge and (leaks > _CLEAR * noise).any()):
                break
        return noise

    def _arrivals_of_a_part(self, names: Sequence[str]) -> list[tuple[GradientEdge, Tensor]]:
        """Return the cotangents of a part of the loss that arrive at these blocks, with the edges behind the blocks."""
        if self._arrived is None or not self._forgotten.isdisjoint(names):
            self._arrived, self._forgotten = self._answers.arrivals(1 / _PART), set()
        return [(edge, cotangent) for name, edge, cotangent in self._arrived if name in names]

    def forget_arrivals(self, block: str) -> None:
        """Free the cotangents at a block that has its verdict."""
        if self._arrived is not None:
            self._arrived = [arrival for arrival in self._arrived if arrival[0] != block]
            self._forgotten.add(block)

    @cached_property
    def _blocked_norm(self) -> float:
        return math.sqrt(self._squares.sum())


class RoundingOfRuns(Rounding):
    """Distinguishes a leak from rounding that is the difference between two runs of a program."""

    def __init__(self, answers: Answers, squares: Floats, noise: Floats, precision: float) -> None:
        """Judge by the noise of each parameter's gradient in the blocked run and in the open one, (2, P)."""
        super().__init__(answers, squares)
        self._measured, self._coarsest = noise, precision

    @property
    def _precision(self) -> float:
        return self._coarsest

    def _is_clear(self, names: Sequence[str], leak: Leak, rows: Floats) -> bool:
        return False

    @cached_property
    def _moved(self) -> Floats:
        blocked: Floats = self._measured[0]
        return blocked

    def _noise(self, names: Sequence[str], leak: Leak, rows: Floats) -> Floats:
        both: Floats = self._measured.sum(0)
        return both


def _norms(rows: Floats) -> tuple[Floats, Floats, Floats]:
    """Return the norms of leaks, open and blocked gradients from their products."""
    leaks, _, opened, blocked = rows.T
    return np.sqrt(leaks), np.sqrt(opened), np.sqrt(blocked)


def _nudge(precision: float, index: int) -> float:
    """Return the relative change of the parameters: two roundings, then four, then eight, if these are small.

    A leak that is rounding then changes; any other leak moves by this relative size, times a condition number.
    """
    return max(precision, min(precision * 2.0 ** min(index + 1, 3), 2**-10))
