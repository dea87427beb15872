"""The division of sequences into blocks and chunks, by which the fast recursions run.

S sequences, N steps in all, R rows, K states. The N slots of a chunk are ordered by time, then by row.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

__all__ = ["Chunk", "Plan", "Segment", "pass_seconds", "plan"]

# Overhead of a call in seconds, and multiply-adds a second of small matrices. Rough values are enough.
_CALL = 1.5e-6
_RATE = 4e9

# Bytes of one of the four arrays of a chunk: of whole sequences, whose number of calls does not depend on how many they
# are, and of blocks.
_CHUNK_BYTES = {"cpu": 2**25, "cuda": 2**28}
_CUT_BYTES = {"cpu": 2**22, "cuda": 2**28}

# Bytes of one array of a sequence above which the sequence is always cut, to bound the memory.
_WHOLE_BYTES = 2**29


@dataclass(frozen=True)
class Segment:
    """Times with the same active rows: slots ``offset`` to ``offset + n_times * n_rows``."""

    offset: int
    n_times: int
    n_rows: int

    @property
    def end(self) -> int:
        """Slot after the last one."""
        return self.offset + self.n_times * self.n_rows


@dataclass(frozen=True, eq=False)
class Chunk:
    """Rows that are processed side by side, longest first.

    Attributes:
        blocks: (R,): the block of the plan in each row.
        lengths: Steps of each row, never rising.
        sequences: (R,): the sequence of each row.
        is_first: (R,): whether a row is the first block of its sequence.
        steps: (N,): the step of the data in each slot.
        segments: Where the slots of each time lie.
        is_cut: Whether rows are parts of sequences.
    """

    blocks: Tensor
    lengths: tuple[int, ...]
    sequences: Tensor
    is_first: Tensor
    steps: Tensor
    segments: tuple[Segment, ...]
    is_cut: bool

    @property
    def n_rows(self) -> int:
        """R."""
        return len(self.lengths)

    @property
    def n_slots(self) -> int:
        """N."""
        return len(self.steps)

    @cached_property
    def slot_sequences(self) -> Tensor:
        """(N,): the sequence in each slot."""
        return torch.cat([self.sequences[: s.n_rows].repeat(s.n_times) for s in self.segments])

    def split(self, flat: Tensor, n_states: int) -> list[Tensor]:
        """Return the segments (n_times, K, n_rows) of an array that has K entries for each slot."""
        return [flat[n_states * s.offset : n_states * s.end].view(s.n_times, n_states, s.n_rows) for s in self.segments]

    def times(self, flat: Tensor, n_states: int) -> list[Tensor]:
        """Return the times (K, n_rows) of an array that has K entries for each slot."""
        return [time for part in self.split(flat, n_states) for time in part.unbind(0)]


@dataclass(frozen=True, eq=False)
class Plan:
    """The division of sequences into blocks, and of blocks into chunks.

    Attributes:
        chunks: The chunks, which together hold each step once.
        chains: The blocks of each sequence that is cut, in order: (sequence, first block, block after the last).
        n_blocks: Blocks in all.
        n_sequences: Number of sequences, S.
    """

    chunks: tuple[Chunk, ...]
    chains: tuple[tuple[int, int, int], ...]
    n_blocks: int
    n_sequences: int


def plan(
    lengths: Sequence[int],
    n_states: int,
    *,
    device: torch.device | str = "cpu",
    item_size: int = 8,
    block: int | None = None,
    only: Sequence[int] | None = None,
    rate: float = _RATE,
) -> Plan:
    """Return the plan for sequences of these lengths.

    Args:
        lengths: (S,), positive.
        n_states: Number of states, K.
        device: Device of the indices.
        item_size: Bytes of a number.
        block: Steps of a block; longer sequences are cut. 0: no sequence is cut. None: the length that is estimated to
            be fastest.
        only: The sequences to include. None: all.
        rate: Multiply-adds per second of small matrices.
    """
    starts = [0, *itertools.accumulate(lengths)]
    chosen = sorted(range(len(lengths)) if only is None else only, key=lambda s: -lengths[s])
    if block is None:
        costs = _costs([lengths[s] for s in chosen], n_states, rate)
    size = min(costs, key=costs.__getitem__) if block is None else block
    kind = torch.device(device).type
    most, most_cut = (
        max(1, table.get(kind, table["cpu"]) // (n_states * item_size)) for table in (_CHUNK_BYTES, _CUT_BYTES)
    )
    long = [s for s in chosen if lengths[s] > (size if block else 2 * size)] if size else []
    short = chosen[len(long) :]
    rows: list[tuple[int, int, int, bool]] = []  # sequence, first step, length, is its first block
    chains = []
    for s in long:
        begin = len(rows)
        for t in range(0, lengths[s], size):
            rows.append((s, starts[s] + t, min(size, lengths[s] - t), t == 0))
        chains.append((s, begin, len(rows)))
    n_cut = len(rows)
    rows += [(s, starts[s], lengths[s], True) for s in short]
    chunks = [_chunk(rows, ids, device, is_cut=True) for ids in _fill(rows, range(n_cut), most_cut)]
    chunks += [_chunk(rows, ids, device, is_cut=False) for ids in _fill(rows, range(n_cut, len(rows)), most)]
    return Plan(tuple(chunks), tuple(chains), len(rows), len(lengths))


def pass_seconds(lengths: Sequence[int], n_states: int) -> float:
    """Return the estimated seconds of a pass over sequences of these lengths."""
    return min(_costs(sorted(lengths, reverse=True), n_states, _RATE).values())


def _costs(lengths: Sequence[int], n_states: int, rate: float) -> dict[int, float]:
    """Return the estimated seconds of a pass by the length of blocks, 0 if no sequence is cut. Lengths fall."""
    longest = lengths[0] if lengths else 0
    costs = {0: 8 * _CALL * longest if 8 * longest * n_states <= _WHOLE_BYTES else math.inf}
    for size in (2**i for i in range(4, 12)):
        n_cut = sum(length for length in lengths if length > 2 * size)
        rest = next((length for length in lengths if length <= 2 * size), 0)
        if n_cut:
            products = n_cut * n_states**3 * (1 + 4 / size) / rate
            costs[size] = _CALL * (11 * size + 8 * rest + 30 * len(lengths[:1])) + products + 1e-6 * n_cut / size
    return costs


def _fill(rows: list[tuple[int, int, int, bool]], ids: range, most: int) -> Iterator[list[int]]:
    """Yield chunks of rows, of at most `most` slots or of one row."""
    part: list[int] = []
    size = 0
    for i in ids:
        if part and size + rows[i][2] > most:
            yield part
            part, size = [], 0
        part.append(i)
        size += rows[i][2]
    if part:
        yield part


def _chunk(
    rows: list[tuple[int, int, int, bool]], ids: list[int], device: torch.device | str, *, is_cut: bool
) -> Chunk:
    ids = sorted(ids, key=lambda i: -rows[i][2])
    sequences, firsts, lengths, is_first = zip(*(rows[i] for i in ids), strict=True)
    begins, segments, steps = torch.tensor(firsts, device="cpu"), [], []
    time = offset = 0
    n_rows = len(ids)
    while n_rows:
        until = lengths[n_rows - 1]
        segments.append(Segment(offset, until - time, n_rows))
        steps.append((torch.arange(time, until, device="cpu")[:, None] + begins[:n_rows]).reshape(-1))
        offset, time = segments[-1].end, until
        while n_rows and lengths[n_rows - 1] == until:
            n_rows -= 1
    return Chunk(
        blocks=torch.tensor(ids, device=device),
        lengths=lengths,
        sequences=torch.tensor(sequences, device=device),
        is_first=torch.tensor(is_first, device=device),
        steps=torch.cat(steps).to(device),
        segments=tuple(segments),
        is_cut=is_cut,
    )
