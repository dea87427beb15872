"""Forward-backward in logarithms, step by step and differentiable: the specification of the fast pass.

S sequences, N steps in all, T steps of the longest, K states.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from toolkit.em.hmm.parameters import HMMParameters

__all__ = ["smooth", "sums_over_paths"]


def sums_over_paths(parameters: HMMParameters, x: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return the log-likelihood of each sequence, (S,), nats."""
    log_prob, alive = _side_by_side(parameters.emissions.log_prob(x), lengths)
    return _forward(parameters, log_prob, alive)[1].sum(0)


def smooth(
    parameters: HMMParameters, x: Tensor, lengths: Sequence[int], weight: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return posteriors (N, K), of first steps (K,), and expected transitions (K, K), weighted."""
    log_prob, alive = _side_by_side(parameters.emissions.log_prob(x), lengths)
    forward, shares = _forward(parameters, log_prob, alive)
    per_sequence = log_prob.new_ones(len(lengths)) if weight is None else weight.to(log_prob.dtype)
    now = torch.zeros_like(forward[0])
    backward = [now]
    transitions = torch.zeros_like(parameters.log_transition)
    for t in range(len(forward) - 1, 0, -1):
        step = parameters.log_transition + (now + log_prob[t] - _finite(shares[t])[:, None])[:, None]
        pairs = torch.where(alive[t, :, None], forward[t - 1][:, :, None] + step, -math.inf)
        transitions = transitions + (per_sequence[:, None, None] * pairs.exp()).sum(0)
        now = torch.where(alive[t], _logsumexp(step, -1), now)
        backward.append(now)
    joint = (torch.stack(forward) + torch.stack(backward[::-1])).exp() * per_sequence[:, None]
    by_sequence = joint.transpose(0, 1)
    states = torch.cat([steps[:length] for steps, length in zip(by_sequence, lengths, strict=True)])
    return states, joint[0].sum(0), transitions


def _side_by_side(values: Tensor, lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the steps (N, K) as (T, S, K), ended sequences repeating the last one, and which are alive (T, S, 1)."""
    device = values.device
    sizes = torch.tensor(lengths, device=device)
    times = torch.arange(max(lengths), device=device)[:, None]
    return values[sizes.cumsum(0) - sizes + torch.minimum(times, sizes - 1)], (times < sizes)[..., None]


def _forward(parameters: HMMParameters, log_prob: Tensor, alive: Tensor) -> tuple[list[Tensor], Tensor]:
    """Return normalised log forward variables, T times (S, K), and the log of each step's share of ell, (T, S)."""
    forward: list[Tensor] = []
    shares = []
    for t in range(len(log_prob)):
        if t:
            reached = _logsumexp(forward[-1][:, :, None] + parameters.log_transition, 1)
        else:
            reached = parameters.log_start
        joint = reached + log_prob[t]
        share = _logsumexp(joint, -1)
        shares.append(torch.where(alive[t, :, 0], share, 0.0))
        now = joint - _finite(share)[:, None]
        forward.append(torch.where(alive[t], now, forward[-1]) if t else now)
    return forward, torch.stack(shares)


def _logsumexp(values: Tensor, dim: int) -> Tensor:
    """Return the log of summed exponentials, with slopes that are 0, not NaN, where all are minus infinity."""
    largest = values.amax(dim, keepdim=True)
    largest = torch.where(largest.isfinite(), largest, 0.0)
    total = (values - largest).exp().sum(dim)
    positive = total > 0
    return torch.where(positive, torch.where(positive, total, 1.0).log() + largest.squeeze(dim), -math.inf)


def _finite(values: Tensor) -> Tensor:
    return torch.where(values.isfinite(), values, 0.0)
