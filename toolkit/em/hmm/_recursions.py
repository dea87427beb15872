r"""Forward-backward over many sequences at once, or over one long sequence in parallel, in bounded memory.

The plain recursions are in `hmm.e_step`; this is the fast twin. Reasons for its speed:

- **Rows side by side.** A row is a sequence, or a block of one. The rows are sorted by length and walk together: a
  step of all of them is one (K, K) @ (K, R) product. Rows that have ended drop out, so nothing is padded.
- **Blocks.** A long sequence is cut. One pass carries the K one-hot vectors through all blocks together, which gives
  each block's transfer matrix. A tree of products gives the variables that enter each block from both sides. Then the
  blocks are rows like others, and can be computed chunk by chunk. So only one chunk is in memory at a time.
- **Probabilities, not logarithms.** Emissions are divided by the largest of their step, forward variables by their
  sum, and backward variables by the same sums.

Exactness is checked: scaled probabilities lose a path whose share falls below the smallest number. If that path becomes
likely again, its backward variable is as large as its forward variable was small. So backward variables within a bound
(`LARGEST`) prove that no relevant path was lost, and blocks whose ends meet prove the same of the tree. A sequence
without that proof is reported as unsound, for the caller to repeat in logarithms.

S sequences, N steps in all, R rows, K states. The N slots of a chunk are ordered by time, then by row.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from toolkit.blocks import no_graph

__all__ = [
    "LARGEST",
    "Chunk",
    "Emit",
    "ForwardBackward",
    "Plan",
    "Segment",
    "Workspace",
    "forward_backward",
    "pass_seconds",
    "plan",
    "smallest_exponent",
]

# Overhead of a call in seconds, and multiply-adds a second of small matrices. Rough values are enough.
_CALL = 1.5e-6
_RATE = 4e9

# Bytes of one of the four arrays of a chunk: of whole sequences, whose number of calls does not depend on how many they
# are, and of blocks. And bytes of emissions that are kept between two passes over blocks.
_CHUNK_BYTES = {"cpu": 2**25, "cuda": 2**28}
_CUT_BYTES = {"cpu": 2**22, "cuda": 2**28}
_KEPT_BYTES = {"cpu": 2**26, "cuda": 2**29}

# Bytes of one array of a sequence above which the sequence is always cut, to bound the memory.
_WHOLE_BYTES = 2**29

# Largest backward variable that proves forward variables complete, and how far the ends of blocks may be apart.
LARGEST = {torch.float32: 1e28, torch.float64: 1e280}
_GAP = {torch.float32: 1e-3, torch.float64: 1e-9}

# Steps of a one-hot vector between two divisions by its largest entry.
_RESCALE = {torch.float32: 2, torch.float64: 8}

# Steps between two corrections of the backward variables' rounding errors, which multiply.
_CORRECT = 64

# Below these exponents the exponential is denormal, and slow.
_SMALLEST_EXPONENT = {torch.float32: -87.0, torch.float64: -700.0}


def smallest_exponent(dtype: torch.dtype) -> float:
    """Return the log of about the smallest emission, relative to its step's largest, that is not rounded to 0."""
    return _SMALLEST_EXPONENT[dtype]


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
        n_sequences: S.
    """

    chunks: tuple[Chunk, ...]
    chains: tuple[tuple[int, int, int], ...]
    n_blocks: int
    n_sequences: int


class Workspace:
    """Memory that is reused between chunks and steps, as allocation costs as much as filling it.

    The result of `take` is valid until the same name is taken again.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def take(self, name: str, size: int, like: Tensor) -> Tensor:
        """Return an uninitialised vector of the type and on the device of another tensor."""
        buffer = self._buffers.get(name)
        if buffer is None or len(buffer) < size or buffer.dtype != like.dtype or buffer.device != like.device:
            self._buffers[name] = buffer = like.new_empty(size)
        return buffer[:size]


@dataclass(frozen=True, eq=False)
class ForwardBackward:
    """The result of `forward_backward`.

    Attributes:
        log_likelihoods: (S,), float64, nats per sequence.
        start: (K,), float64: sum of the first steps' posteriors.
        transitions: (K, K), float64: expected numbers of transitions.
        sound: (S,), bool. With any unsound sequence the other fields are invalid.
    """

    log_likelihoods: Tensor
    start: Tensor
    transitions: Tensor
    sound: Tensor


# Fills (n_times, K, n_rows) with emission probabilities divided by the largest of each step, for slots from `begin` of
# chunk `chunk`, and returns the logs of the divisors, (n_times, n_rows).
Emit = Callable[[int, int, Tensor], Tensor]
# Takes a chunk's number and its posteriors (K, N).
Consume = Callable[[int, Tensor], None]


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
        n_states: K.
        device: Device of the indices.
        item_size: Bytes of a number.
        block: Steps of a block; longer sequences are cut. 0: no sequence is cut. None: the length that is estimated to
            be fastest.
        only: The sequences to include. None: all.
        rate: Multiply-adds a second of small matrices.
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


@no_graph()
def forward_backward(
    log_start: Tensor,
    log_transition: Tensor,
    plan: Plan,
    emit: Emit,
    *,
    consume: Consume | None = None,
    weights: Tensor | None = None,
    workspace: Workspace | None = None,
) -> ForwardBackward:
    """Run through all chunks of a plan.

    Args:
        log_start: (K,), in the floating-point type to compute in.
        log_transition: (K, K), rows sum to 1.
        plan: The sequences.
        emit: The emissions.
        consume: Called with the weighted posteriors, which the next chunk overwrites. None: only log-likelihoods are
            computed.
        weights: (S,). None: all 1.
        workspace: The workspace of an earlier call, for reuse.
    """
    start, transition = log_start.exp(), log_transition.exp()
    k, dtype, device = len(start), start.dtype, start.device
    workspace = workspace or Workspace()
    emissions = _Emissions(plan, emit, start, workspace)
    ends = _Ends.of(plan, start, transition, emissions)
    # Where every transition is likelier than this, no lost path becomes relevant again.
    forgets = bool(transition.min() > LARGEST[dtype] ** -0.25)
    totals = ForwardBackward(
        log_likelihoods=torch.zeros(plan.n_sequences, dtype=torch.float64, device=device),
        start=torch.zeros(k, dtype=torch.float64, device=device),
        transitions=torch.zeros(k, k, dtype=torch.float64, device=device),
        sound=torch.ones(plan.n_sequences, dtype=torch.bool, device=device),
    )
    for number, chunk in enumerate(plan.chunks):
        walk = _Walk(chunk, k, *emissions.of(number, last=True), transition, workspace)
        before = ends.enter(chunk)
        walk.forward(torch.where(chunk.is_first, start[:, None], transition.mT @ before))
        ends.leave(chunk, walk)
        _add_per_sequence(totals.log_likelihoods, chunk, walk.log_scales())
        if consume is None and not chunk.is_cut and forgets:
            _mark(totals.sound, chunk, walk.scales, 1)
            continue
        walk.backward(ends.after(chunk, walk), before.masked_fill(chunk.is_first, 0.0), weights)
        ends.meet(chunk, walk)
        if not bool(walk.flat_backward.amax() < LARGEST[dtype]):
            _mark(totals.sound, chunk, walk.flat_backward, k)
        if consume is not None:
            posteriors = walk.posteriors()
            if weights is not None:
                posteriors *= weights[chunk.slot_sequences].to(dtype)
            totals.start.add_(posteriors[:, : chunk.n_rows][:, chunk.is_first].sum(1, dtype=torch.float64))
            totals.transitions.add_(walk.pairs.double().mul_(transition))
            consume(number, posteriors)
    ends.mark(totals.sound)
    return totals


def _add_per_sequence(totals: Tensor, chunk: Chunk, values: Tensor) -> None:
    """Add (N,) values of a chunk's slots to their sequences' totals."""
    for segment in chunk.segments:
        part = values[segment.offset : segment.end].view(segment.n_times, segment.n_rows).sum(0, dtype=totals.dtype)
        totals.index_add_(0, chunk.sequences[: segment.n_rows], part)


def _mark(sound: Tensor, chunk: Chunk, flat: Tensor, n_states: int) -> None:
    """Mark sequences as unsound if a variable is too large or NaN, or a scale is not positive."""
    largest = LARGEST[flat.dtype]
    for segment, part in zip(chunk.segments, chunk.split(flat, n_states), strict=True):
        fine = part < largest if n_states > 1 else (part > 0) & (part < largest)
        bad = ~fine.flatten(0, 1).all(0)
        sound[chunk.sequences[: segment.n_rows][bad]] = False


class _Emissions:
    """A chunk's emissions; if they are few, they are kept from the pass that makes the blocks' ends to the next."""

    def __init__(self, plan: Plan, emit: Emit, start: Tensor, workspace: Workspace) -> None:
        self._chunks, self._emit, self._k = plan.chunks, emit, len(start)
        self._like, self._workspace = start, workspace
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}
        n_cut = sum(chunk.n_slots for chunk in plan.chunks if chunk.is_cut)
        kind = start.device.type
        self._keep = n_cut * self._k * start.dtype.itemsize <= _KEPT_BYTES.get(kind, _KEPT_BYTES["cpu"])

    def of(self, number: int, *, last: bool) -> tuple[Tensor, Tensor]:
        """Return a chunk's scaled emissions (K of each slot) and the logs of their scales (N,)."""
        if number in self._kept:
            return self._kept.pop(number)
        chunk = self._chunks[number]
        name = f"{number}" if chunk.is_cut and self._keep else ""
        flat = self._workspace.take(f"b{name}", self._k * chunk.n_slots, self._like)
        shift = self._workspace.take(f"shift{name}", chunk.n_slots, self._like)
        for segment, part in zip(chunk.segments, chunk.split(flat, self._k), strict=True):
            # A part of a chunk at a time, so that intermediate results stay in the cache.
            n_times = max(1, 2**16 // (self._k * segment.n_rows))
            for t in range(0, segment.n_times, n_times):
                values = part[t : t + n_times]
                begin = segment.offset + t * segment.n_rows
                shift[begin : begin + len(values) * segment.n_rows] = self._emit(number, begin, values).view(-1)
        if not last and self._keep:
            self._kept[number] = flat, shift
        return flat, shift


class _Walk:
    """One chunk's recursions. `b` scaled emissions, `a` forward variables, `c` their sums, `w` emission times backward.

    The arrays have K entries for each slot: time after time a (K, rows) matrix.
    """

    def __init__(
        self, chunk: Chunk, k: int, flat_b: Tensor, shift: Tensor, transition: Tensor, workspace: Workspace
    ) -> None:
        self.chunk, self.k, self.shift, self.transition = chunk, k, shift, transition
        self.flat_b, self.flat_a = flat_b, workspace.take("a", len(flat_b), flat_b)
        self.flat_backward = workspace.take("backward", len(flat_b), flat_b)
        self.scales = workspace.take("scales", len(shift), shift)
        self.b, self.a = chunk.times(flat_b, k), chunk.times(self.flat_a, k)
        self.counts = [n for segment in chunk.segments for n in [segment.n_rows] * segment.n_times]

    def forward(self, entering: Tensor) -> None:
        """Run forwards. `entering` (K, R): the distribution of the first step's state given all steps before it."""
        transposed = self.transition.mT.contiguous()
        mm, total = torch.mm, torch.sum
        before: Tensor | None = None
        for a, b, c in zip(self.a, self.b, self.chunk.times(self.scales, 1), strict=True):
            if before is None:
                torch.mul(entering, b, out=a)
            else:
                mm(transposed, before if before.shape == a.shape else before[:, : a.shape[1]], out=a)
                a.mul_(b)
            total(a, 0, keepdim=True, out=c)
            a.div_(c)
            before = a

    def log_scales(self) -> Tensor:
        """Return the log-density of each slot's step given those before it, (N,)."""
        return self.scales.log().add_(self.shift)

    def last(self) -> Tensor:
        """Return the forward variables of each row's last step, (K, R)."""
        return self._at_last(self.a)

    def _at_last(self, times: list[Tensor]) -> Tensor:
        parts, end = [], 0
        for time, following in zip(reversed(times), [0, *reversed(self.counts[1:])], strict=True):
            if time.shape[1] > end:
                assert following == end
                parts.append(time[:, end:])
                end = time.shape[1]
        return torch.cat(parts, 1)

    def backward(self, after: Tensor, before: Tensor, weights: Tensor | None) -> None:
        """Run backwards.

        `after` (K, R) are the backward variables of the last steps, `before` (K, R) the forward variables of the step
        before the first one, 0 where there is none. Emissions are overwritten.
        """
        for part, scale in zip(self.chunk.split(self.flat_b, self.k), self.chunk.split(self.scales, 1), strict=True):
            part.div_(scale)
        backward = self.chunk.times(self.flat_backward, self.k)
        self.pairs = torch.zeros_like(self.transition)
        weight = None if weights is None else weights[self.chunk.sequences].to(after.dtype)
        mm, pairs, transition = torch.mm, self.pairs, self.transition
        n_after = 0
        for t in range(len(backward) - 1, -1, -1):
            now, w, n = backward[t], self.b[t], self.counts[t]
            if n > n_after:
                now[:, n_after:] = after[:, n_after:n]
                n_after = n
            if t % _CORRECT == 0:
                now.div_((self.a[t] * now).sum(0, keepdim=True))
            w.mul_(now)
            previous = self.a[t - 1] if t else before
            if previous.shape[1] > n:
                previous = previous[:, :n]
            pairs.addmm_(previous, (w if weight is None else w * weight[:n]).mT)
            if t:
                to = backward[t - 1]
                mm(transition, w, out=to if to.shape[1] == n else to[:, :n])

    def posteriors(self) -> Tensor:
        """Return the posteriors (K, N), in the place of the emissions."""
        found = self.flat_b.view(self.k, self.chunk.n_slots)
        for segment, a, backward in zip(
            self.chunk.segments,
            self.chunk.split(self.flat_a, self.k),
            self.chunk.split(self.flat_backward, self.k),
            strict=True,
        ):
            out = found[:, segment.offset : segment.end].view(self.k, segment.n_times, segment.n_rows)
            torch.mul(a.transpose(0, 1), backward.transpose(0, 1), out=out)
        return found


class _Ends:
    """Variables that enter each block of a cut sequence from both sides; few, and so kept in logarithms."""

    def __init__(self, plan: Plan, before: Tensor, after: Tensor) -> None:
        self._plan = plan
        self._before, self._after = before, after  # (blocks, K): forward variables, and log backward variables
        self._left = torch.zeros_like(before)  # forward variables as each block leaves them
        self._used = torch.ones_like(before)  # backward variables with which each block was entered
        self._back = torch.ones_like(before)  # those that each block hands to the one before it

    @classmethod
    def of(cls, plan: Plan, start: Tensor, transition: Tensor, emissions: _Emissions) -> _Ends:
        k = len(start)
        before = start.new_zeros(plan.n_blocks, k)
        after = torch.zeros_like(before, dtype=torch.float64)
        if plan.chains:
            # Logarithms grow with the blocks, and single precision would lose their differences.
            log_transfer = start.new_empty((plan.n_blocks, k, k), dtype=torch.float64)
            for number, chunk in enumerate(plan.chunks):
                if chunk.is_cut:
                    log_transfer[chunk.blocks] = _log_transfer(chunk, emissions.of(number, last=False)[0], transition)
            for _, begin, end in plan.chains:
                reaching, ahead = _reach(log_transfer[begin:end], start.double().log())
                before[begin:end] = reaching.softmax(1).to(before.dtype)
                after[begin:end] = ahead
        return cls(plan, before, after)

    def enter(self, chunk: Chunk) -> Tensor:
        return self._before[chunk.blocks].mT

    def leave(self, chunk: Chunk, walk: _Walk) -> None:
        if chunk.is_cut:
            self._left[chunk.blocks] = walk.last().mT

    def after(self, chunk: Chunk, walk: _Walk) -> Tensor:
        """Return the backward variables of the rows' last steps, (K, R); times the forward variables they sum to 1."""
        if not chunk.is_cut:
            return walk.shift.new_ones(walk.k, chunk.n_rows)
        left, ahead = self._left[chunk.blocks], self._after[chunk.blocks]
        log_total = (left.log() + ahead).logsumexp(1, keepdim=True)
        used = (ahead - log_total).exp().to(left.dtype)
        self._used[chunk.blocks] = used
        return used.mT.contiguous()

    def meet(self, chunk: Chunk, walk: _Walk) -> None:
        if chunk.is_cut:
            self._back[chunk.blocks] = (walk.transition @ walk.b[0]).mT

    def mark(self, sound: Tensor) -> None:
        """Mark the sequences in which two blocks do not meet."""
        for sequence, begin, end in self._plan.chains:
            left, used = self._left[begin : end - 1], self._used[begin : end - 1]
            forward_gap = ((left - self._before[begin + 1 : end]).abs() * used).sum(1).amax()
            backward_gap = (left * (used - self._back[begin + 1 : end]).abs()).sum(1).amax()
            if not bool(torch.maximum(forward_gap, backward_gap) < _GAP[left.dtype]):
                sound[sequence] = False


def _log_transfer(chunk: Chunk, flat_b: Tensor, transition: Tensor) -> Tensor:
    """Return the log of the transfer matrix of each row: (R, K from, K to).

    The matrix of a first block begins with the state of the block's own first step.
    """
    k, every = len(transition), _RESCALE[flat_b.dtype]
    b = chunk.times(flat_b, k)
    first = torch.where(
        chunk.is_first, torch.eye(k, dtype=b[0].dtype, device=b[0].device)[..., None], transition.mT[..., None]
    )
    vectors = first * b[0][:, None]  # to, from, row
    spare = torch.empty_like(vectors)
    log_scale = torch.zeros_like(vectors[0], dtype=torch.float64)
    transposed = transition.mT.contiguous()
    done = []
    for t in range(1, len(b)):
        n = b[t].shape[1]
        if n < vectors.shape[2]:
            done.append((vectors[:, :, n:], log_scale[:, n:]))
            vectors, log_scale = vectors[:, :, :n].contiguous(), log_scale[:, :n].contiguous()
            spare = torch.empty_like(vectors)
        torch.mm(transposed, vectors.view(k, -1), out=spare.view(k, -1))
        torch.mul(spare, b[t][:, None], out=vectors)
        if t % every == 0:
            largest = vectors.amax(0).clamp_(min=torch.finfo(vectors.dtype).tiny)
            vectors.div_(largest)
            log_scale += largest.log()
    parts = [(v.log() + s).permute(2, 1, 0) for v, s in [(vectors, log_scale), *reversed(done)]]
    return torch.cat(parts)


def _reach(log_transfer: Tensor, log_start: Tensor) -> tuple[Tensor, Tensor]:
    """Return the variables that enter each block from the left and from the right, by a tree of products.

    Args:
        log_transfer: (n, K, K).
        log_start: (K,).

    Returns:
        Log forward and backward variables (n, K), each up to a constant.
    """
    levels = [log_transfer]
    while len(levels[-1]) > 1:
        nodes = levels[-1]
        pairs = _log_product(nodes[:-1:2], nodes[1::2])
        levels.append(torch.cat([pairs, nodes[-1:]]) if len(nodes) % 2 else pairs)
    reaching, ahead = log_start[None], torch.zeros_like(log_start)[None]
    for nodes in reversed(levels[:-1]):
        left, right = nodes[:-1:2], nodes[1::2]
        half = len(right)
        forwards, backwards = nodes.new_empty(nodes.shape[:2]), nodes.new_empty(nodes.shape[:2])
        forwards[::2], backwards[-1:] = reaching, ahead[-1:]
        forwards[1::2] = _level((reaching[:half, :, None] + left).logsumexp(1))
        backwards[1::2] = ahead[:half]
        backwards[: 2 * half : 2] = _level((right + ahead[:half, None]).logsumexp(2))
        reaching, ahead = forwards, backwards
    return reaching, ahead


def _log_product(left: Tensor, right: Tensor) -> Tensor:
    """Return the logs of the products of matrices (n, K, K), from the logs of the matrices.

    Each row has its own scale, so that only entries that are small in their row underflow.
    """
    scale = _finite(right.amax(2, keepdim=True))
    weights = left + scale.mT
    largest = _finite(weights.amax(2, keepdim=True))
    return ((weights - largest).exp() @ (right - scale).exp()).log() + largest


def _level(values: Tensor) -> Tensor:
    return values - _finite(values.amax(-1, keepdim=True))


def _finite(values: Tensor) -> Tensor:
    return values.clamp(min=torch.finfo(values.dtype).min / 4)
