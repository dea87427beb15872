r"""The most probable paths of many sequences at once, or of one long sequence in blocks.

Scores are logarithms, and sums of probabilities are maxima. A long sequence is cut: each block's transfer matrix has
the score of the best path from each state before the block to each state at its end. The states at the ends are chosen
from right to left by these matrices, so that blocks agree also where paths tie. Then all blocks are traced side by
side, each between its two ends.

S sequences, N steps in all, R rows, K states.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from toolkit.blocks import no_graph
from toolkit.em.hmm._plan import Chunk, Plan, plan

__all__ = ["LogProb", "best_paths"]

# Takes a chunk's number and a range of its slots, and returns the logs of their emissions (K, n).
LogProb = Callable[[int, int, int], Tensor]

# Additions and comparisons a second, and numbers of emissions that are computed at a time.
_RATE = 6e8
_TILE = 2**16


@no_graph()
def best_paths(
    log_start: Tensor,
    log_transition: Tensor,
    prepare: Callable[[Plan], LogProb],
    lengths: Sequence[int],
    *,
    block: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the best states (N,), int64, and their scores (S,), nats.

    Args:
        log_start: (K,), float64.
        log_transition: (K, K).
        prepare: Takes a plan, and returns a function of the logs of emissions of its chunks.
        lengths: (S,), positive.
        block: As in `plan`.
    """
    k, device = len(log_start), log_start.device
    whole = plan(lengths, k, device=device, block=block, rate=_RATE)
    log_prob = prepare(whole)
    states = torch.empty(sum(lengths), dtype=torch.int64, device=device)
    scores = log_start.new_zeros(len(lengths))
    before = torch.full((whole.n_blocks,), -1, device=device)
    ends = before.clone()
    if whole.chains:
        transfer = log_start.new_empty(whole.n_blocks, k, k)
        for number, chunk in enumerate(whole.chunks):
            if chunk.is_cut:
                b = _emissions(number, chunk, log_prob, log_start)
                transfer[chunk.blocks] = _transfer(chunk, b, log_transition)
        for sequence, begin, end in whole.chains:
            scores[sequence] = _choose_ends(transfer[begin:end], log_start, ends[begin:end], before[begin:end])
    for number, chunk in enumerate(whole.chunks):
        b = _emissions(number, chunk, log_prob, log_start)
        # A row that begins a sequence has no state before it; others follow the last state of the block before.
        entering = torch.where(chunk.is_first, log_start[:, None], log_transition[before[chunk.blocks]].mT)
        best = _walk(chunk.times(b, k), entering, log_transition)
        found, last = _trace(chunk, best, log_transition, ends[chunk.blocks] if chunk.is_cut else None)
        states[chunk.steps] = found
        if not chunk.is_cut:
            scores[chunk.sequences] = last
    return states, scores


def _emissions(number: int, chunk: Chunk, log_prob: LogProb, like: Tensor) -> Tensor:
    """Return the logs of a chunk's emissions, K for each slot, as (n_times, K, n_rows) of each segment."""
    k = len(like)
    flat = like.new_empty(k * chunk.n_slots)
    for segment, part in zip(chunk.segments, chunk.split(flat, k), strict=True):
        n_times = max(1, _TILE // (k * segment.n_rows))
        for t in range(0, segment.n_times, n_times):
            values = part[t : t + n_times]
            begin = segment.offset + t * segment.n_rows
            found = log_prob(number, begin, begin + len(values) * segment.n_rows)
            values.copy_(found.view(k, len(values), segment.n_rows).transpose(0, 1))
    return flat


def _walk(b: list[Tensor], entering: Tensor, log_transition: Tensor) -> list[Tensor]:
    """Turn emissions, in place, into the scores of the best paths to each state, (K, R) at each time."""
    b[0].add_(entering)
    k = len(entering)
    sums = entering.new_empty(k, k, entering.shape[1])
    by_row, largest = log_transition[:, :, None], entering.new_empty(entering.shape)
    for before, now in itertools.pairwise(b):
        n = now.shape[1]
        if n < sums.shape[2]:
            sums, largest = sums.new_empty(k, k, n), largest.new_empty(k, n)
        torch.add(before[:, None, :n], by_row, out=sums)
        torch.amax(sums, 0, out=largest)
        now.add_(largest)
    return b


def _trace(chunk: Chunk, best: list[Tensor], log_transition: Tensor, ends: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the states in each slot, (N,), from the last time to the first, and the scores at the rows' ends (R,)."""
    into = log_transition.mT.contiguous()
    states: list[Tensor] = []
    state = torch.empty(0, dtype=torch.int64, device=chunk.steps.device)
    score = best[0].new_empty(0)
    for t in range(len(best) - 1, -1, -1):
        n, n_after = best[t].shape[1], len(state)
        if n_after:
            # `max` of a first dimension is far faster than `argmax`.
            state = (best[t][:, :n_after] + into.index_select(0, state).mT).max(0).indices
        if n > n_after:
            largest, at = best[t][:, n_after:].max(0)
            state = torch.cat([state, at if ends is None else ends[n_after:n]])
            score = torch.cat([score, largest])
        states.append(state)
    return torch.cat(states[::-1]), score


def _transfer(chunk: Chunk, flat_b: Tensor, log_transition: Tensor) -> Tensor:
    """Return the score of the best path through each row between each two states, (R, K before it, K at its end).

    The matrix of a first block begins with the block's own first state.
    """
    k, b = len(log_transition), chunk.times(flat_b, len(log_transition))
    own = torch.full_like(log_transition, -math.inf).fill_diagonal_(0.0)
    scores = torch.where(chunk.is_first, own[..., None], log_transition.mT[..., None]) + b[0][:, None]
    done = []
    for now in b[1:]:
        n = now.shape[1]
        if n < scores.shape[2]:
            done.append(scores[:, :, n:])
            scores = scores[:, :, :n].contiguous()
        reached = scores[0] + log_transition[0][:, None, None]
        for i in range(1, k):
            reached = torch.maximum(reached, scores[i] + log_transition[i][:, None, None])
        scores = reached.add_(now[:, None])
    return torch.cat([part.permute(2, 1, 0) for part in [scores, *reversed(done)]])


def _choose_ends(transfer: Tensor, log_start: Tensor, ends: Tensor, before: Tensor) -> Tensor:
    """Write the state at which each block of a sequence ends, and the one before it; return the best score."""
    matrices = transfer.cpu().numpy()
    reaching = [log_start.cpu().numpy()]
    for matrix in matrices:
        reaching.append((reaching[-1][:, None] + matrix).max(0))
    chosen = [int(reaching[-1].argmax())]
    for matrix, score in zip(matrices[:0:-1], reaching[-2:0:-1], strict=True):
        chosen.append(int((score + matrix[:, chosen[-1]]).argmax()))
    ends.copy_(torch.tensor(chosen[::-1], device="cpu"))
    before[1:] = ends[:-1]
    return log_start.new_tensor(reaching[-1].max())
