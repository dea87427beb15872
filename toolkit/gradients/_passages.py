"""Passages through recorded regions: which nodes of the graph were made in which regions."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

__all__ = ["Passages", "Region", "next_number"]

next_number: Callable[[], int] = torch._C._autograd._get_sequence_nr


class Passages:
    """The passages through regions, in the order of their beginnings.

    Attributes:
        active: Those that are not over.
    """

    def __init__(self) -> None:
        self.active: list[Region] = []
        self._all, self._starts, self._is_sorted = list[Region](), list[int](), True

    def __bool__(self) -> bool:
        return bool(self._all)

    def begin(self, name: str) -> Region:
        """Begin a passage through a region."""
        region = Region(name, next_number(), outer=tuple(self.active))
        self._is_sorted &= not self._starts or self._starts[-1] <= region.start
        self._all.append(region)
        self._starts.append(region.start)
        self.active.append(region)
        return region

    def end(self, region: Region) -> int:
        """End a passage, and return the number of nodes made in it; one without nodes is forgotten."""
        region.end = next_number()
        self.active.remove(region)
        if not region.size:
            at = next(index for index in reversed(range(len(self._all))) if self._all[index] is region)
            del self._all[at], self._starts[at]
        return region.size

    def around(self, number: int) -> frozenset[str]:
        """Return the regions in which the node with this number was made."""
        if not self._is_sorted:  # another thread counts, too
            return frozenset(region.name for region in self._all if region.holds(number))
        if not (n_begun := bisect_right(self._starts, number)):
            return frozenset()
        latest = self._all[n_begun - 1]  # any other one that holds the node was active at the beginning of this one
        return frozenset(region.name for region in (latest, *latest.outer) if region.holds(number))

    def mend(self, switch: object) -> None:
        """Note the end of a context that may have switched recording on."""
        for gap in (region.gaps[-1] for region in self.active if region.gaps):
            if gap.end is None and gap.switch is switch:
                gap.end = next_number()


@dataclass(eq=False)
class Region:
    """The numbers that autograd gave to the nodes made in one passage through a region: ``start <= number < end``.

    Attributes:
        name: The block.
        start: See above.
        outer: The passages that were active at its beginning.
        end: See above; None before it.
        views: The nodes made inside because autograd makes views of the outside late.
        gaps: The parts in which recording is switched on.
        level: The transform of `torch.func` around it.
    """

    name: str
    start: int
    outer: tuple[Region, ...]
    end: int | None = None
    views: set[int] = field(default_factory=set)
    gaps: list[_Gap] = field(default_factory=list)
    level: int | None = field(default_factory=torch._C._functorch.maybe_current_level)

    @property
    def size(self) -> int:
        """The number of nodes made inside of a passage that is over."""
        end = self.start if self.end is None else self.end
        gaps = sum((end if gap.end is None else gap.end) - gap.start for gap in self.gaps)
        return end - self.start - len(self.views) - gaps

    @property
    def is_pierced(self) -> bool:
        """Whether recording is switched on now."""
        return bool(self.gaps) and self.gaps[-1].end is None

    @property
    def is_of_this_level(self) -> bool:
        """Whether no transform of `torch.func` has begun or ended since."""
        return self.level == torch._C._functorch.maybe_current_level()

    def pierce(self, switch: object) -> bool:
        """Note that recording is switched on; return False if the nodes made meanwhile are not known."""
        if self.is_of_this_level:
            self.gaps.append(_Gap(next_number(), switch))
        return self.is_of_this_level

    def holds(self, number: int) -> bool:
        """Return whether the node with this number was made inside; autograd counts from 0 in each thread."""
        is_inside = self.start <= number and (self.end is None or number < self.end)
        return is_inside and number not in self.views and not any(gap.holds(number) for gap in self.gaps)


@dataclass(eq=False)
class _Gap:
    """The numbers of the nodes made while recording is switched on inside of a region: they belong to the outside."""

    start: int
    switch: object
    end: int | None = None

    def holds(self, number: int) -> bool:
        """Return whether the node with this number was made meanwhile."""
        return self.start <= number and (self.end is None or number < self.end)
