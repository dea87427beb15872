r"""Forward-backward of few steps: two solves of a triangular band, in compiled code.

The forward recursion :math:`\alpha_t = b_t \circ A^\top \alpha_{t-1}` of all sequences is a linear system
:math:`(I - M) \alpha = \beta` with K by K blocks below the diagonal. Its transpose is the backward recursion. So a
solve of BLAS stands for a loop of T steps, whose calls would take longer than their arithmetic.

Variables are not divided by their sum at each step but every 64 steps, which then share one scale. As in
`toolkit.em.hmm._recursions`, backward variables within a bound prove that no relevant path was lost.

S sequences, N steps in all, K states.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided
from scipy.linalg import blas
from torch import Tensor

from toolkit.blocks import no_graph
from toolkit.em.hmm._plan import pass_seconds
from toolkit.em.hmm._recursions import LARGEST, Consume, Emit, ForwardBackward

__all__ = ["Chain", "is_short"]

# Steps that share one scale: with 30 states that explain all steps alike, their sum falls to 1e-94.
_PIECE = 64

# Seconds of one row of the triangular matrix, forwards and backwards, and of one of its entries; rough values.
_ROW, _ENTRY = 6e-8, 1.2e-9

# The most entries of the triangular matrix.
_ENTRIES = 2**22


def is_short(lengths: Sequence[int], n_states: int) -> bool:
    """Return whether a chain of sequences of these lengths is estimated to be faster than steps side by side."""
    rows = sum(lengths) * n_states
    seconds = rows * (_ROW + _ENTRY * 2 * n_states)
    return rows * 2 * n_states <= _ENTRIES and seconds < pass_seconds(lengths, n_states)


class Chain:
    """The triangular system of sequences, one after the other, and its memory.

    Args:
        lengths: (S,), positive.
        n_states: Number of states, K.
    """

    def __init__(self, lengths: Sequence[int], n_states: int) -> None:
        n, k = sum(lengths), n_states
        self.lengths = tuple(lengths)
        self._firsts = np.array([0, *itertools.accumulate(lengths[:-1])])
        self._lasts = np.append(self._firsts[1:], n) - 1
        firsts = set(self._firsts.tolist())
        # Each piece, and whether the sequence of its first step began before.
        self._pieces = [(p, min(n, p + _PIECE), p not in firsts) for p in range(0, n, _PIECE)]
        self._joints = np.array([p for p, _, goes_on in self._pieces if goes_on], np.int64)
        # Column (t, i) holds 1, not read, and the entries below it: -A_ij b_(t+1)j in row (t+1, j).
        band = np.zeros((n * k, 2 * k))
        size = band.itemsize
        strides = (2 * k * k * size, (2 * k - 1) * size, size)
        self._band, self._blocks = band, as_strided(band.reshape(-1)[k:], (n - 1, k, k), strides)
        self._forward, self._backward = np.empty((n, k)), np.empty((n, k))

    @no_graph()
    def forward_backward(
        self, log_start: Tensor, log_transition: Tensor, emit: Emit, *, consume: Consume | None, weights: Tensor | None
    ) -> ForwardBackward:
        """Return the result of `toolkit.em.hmm._recursions.forward_backward`, sound for all sequences or for none.

        Args:
            log_start: (K,), float64.
            log_transition: (K, K).
            emit: Emissions; the chain is chunk 0.
            consume: Called with the weighted posteriors. None: only log-likelihoods are needed.
            weights: (S,). None: all 1.
        """
        n, k = self._forward.shape
        start, transition = log_start.exp().numpy(), log_transition.exp().numpy()
        emissions = torch.empty(n, k, 1, dtype=torch.float64, device="cpu")
        shares = emit(0, 0, emissions).numpy()  # of the log-likelihood
        b: Any = emissions[:, :, 0].numpy()
        with np.errstate(all="ignore"):
            scales = self._walk_forward(start, transition, b)
            shares[self._lasts] += np.log(self._forward[self._lasts].sum(1))
            shares[self._joints - 1] += np.log(scales)
            self._walk_backward(transition, b)
            values = np.add.reduceat(shares, self._firsts)
            is_sound = bool(self._backward.max() < LARGEST[torch.float64] and np.isfinite(values).all())
            found = ForwardBackward(
                log_likelihoods=torch.from_numpy(values),
                start=torch.zeros(k, dtype=torch.float64, device="cpu"),
                transitions=torch.zeros(k, k, dtype=torch.float64, device="cpu"),
                sound=torch.full((len(self.lengths),), is_sound, device="cpu"),
            )
            if consume is None or not is_sound:
                return found
            each = None if weights is None else np.repeat(weights.numpy(), self.lengths)[:, None]
            pairs = self._pairs(b, scales, each) * transition
            posteriors = self._forward * self._backward
        if each is not None:
            posteriors *= each
        found.start.copy_(torch.from_numpy(posteriors[self._firsts].sum(0)))
        found.transitions.copy_(torch.from_numpy(pairs))
        consume(0, torch.from_numpy(posteriors).mT)
        return found

    def _walk_forward(self, start: Any, transition: Any, b: Any) -> Any:
        """Fill in the forward variables (N, K), and return the divisors of those from which pieces go on."""
        forward, scales = self._forward, []
        np.multiply(-transition, b[1:, None], out=self._blocks)
        self._blocks[self._firsts[1:] - 1] = 0.0
        forward[:] = 0.0
        forward[self._firsts] = start * b[self._firsts]
        for begin, end, goes_on in self._pieces:
            if goes_on:
                scales.append(forward[begin - 1].sum())
                forward[begin] = (forward[begin - 1] / scales[-1]) @ transition * b[begin]
            self._solve(forward, begin, end, transposed=False)
        return np.array(scales)

    def _walk_backward(self, transition: Any, b: Any) -> None:
        """Fill in the backward variables (N, K); at each step, times the forward variables they sum to 1."""
        forward, backward = self._forward, self._backward
        backward[:] = 0.0
        backward[self._lasts] = 1 / forward[self._lasts].sum(1, keepdims=True)
        follows = False
        for begin, end, goes_on in reversed(self._pieces):
            if follows:
                reached = transition @ (b[end] * backward[end])
                backward[end - 1] = reached / (reached @ forward[end - 1])
            self._solve(backward, begin, end, transposed=True)
            follows = goes_on

    def _solve(self, variables: Any, begin: int, end: int, *, transposed: bool) -> None:
        k = variables.shape[1]
        band = self._band[begin * k : end * k].T
        x = variables[begin:end].reshape(-1)
        blas.dtbsv(2 * k - 1, band, x, lower=1, diag=1, trans=transposed, overwrite_x=1)

    def _pairs(self, b: Any, scales: Any, weights: Any) -> Any:
        """Return the sum of products of forward variables with emission times backward of the next step, (K, K)."""
        left = self._forward[:-1].copy() if weights is None else self._forward[:-1] * weights[:-1]
        left[self._joints - 1] /= scales[:, None]
        left[self._firsts[1:] - 1] = 0.0
        return left.T @ (b[1:] * self._backward[1:])
