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

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from toolkit.blocks import no_graph
from toolkit.em.hmm._plan import Chunk, Plan

__all__ = ["LARGEST", "Consume", "Emit", "ForwardBackward", "Workspace", "forward_backward", "smallest_exponent"]

# Bytes of emissions that are kept between two passes over blocks.
_KEPT_BYTES = {"cpu": 2**26, "cuda": 2**29}

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
