"""Four rooms: a gridworld that is small enough to answer every question about a policy exactly.

References:
    Sutton, Precup and Singh, "Between MDPs and semi-MDPs: a framework for temporal abstraction in reinforcement
    learning", 1999.

S cells, 4 moves.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Gridworld", "four_rooms"]

_MAP = """
#############
#     #     #
#     #     #
#           #
#     #     #
#     #     #
## ####     #
#     ### ###
#     #     #
#     #     #
#           #
#     #     #
#############
"""

_MOVES = ((-1, 0), (0, 1), (1, 0), (0, -1))


@dataclass(frozen=True)
class Gridworld:
    """A discounted problem in which every question has an exact answer.

    Attributes:
        transitions: (4, S, S), the probability of the next cell; the rows of the goal are 0, for the episode is over.
        rewards: (S, 4), the expected reward of a move.
        start: (S,), the probability of the first cell.
        discount: The discount of a step.
    """

    transitions: Tensor
    rewards: Tensor
    start: Tensor
    discount: float

    def action_values(self, policy: Tensor) -> Tensor:
        """Return the values (S, 4) of all moves under a policy (S, 4)."""
        inner = torch.einsum("sa,ast->st", policy, self.transitions)
        identity = torch.eye(len(inner), dtype=inner.dtype, device=inner.device)
        values = torch.linalg.solve(identity - self.discount * inner, (policy * self.rewards).sum(-1))
        later: Tensor = torch.einsum("ast,t->sa", self.transitions, values)
        return self.rewards + self.discount * later

    def visits(self, policy: Tensor) -> Tensor:
        """Return the expected discounted number of visits (S,) of each cell under a policy (S, 4)."""
        inner = torch.einsum("sa,ast->st", policy, self.transitions)
        identity = torch.eye(len(inner), dtype=inner.dtype, device=inner.device)
        found: Tensor = torch.linalg.solve(identity - self.discount * inner.T, self.start)
        return found

    def expected_return(self, policy: Tensor) -> Tensor:
        """Return the expected discounted return of a policy (S, 4), differentiable by it."""
        return self.start @ (policy * self.action_values(policy)).sum(-1)

    def best_return(self) -> float:
        """Return the highest expected discounted return, by policy iteration."""
        policy = torch.full_like(self.rewards, 1 / 4)
        for _ in range(100):
            best = self.action_values(policy).argmax(-1)
            before, policy = policy, torch.nn.functional.one_hot(best, 4).to(self.rewards)
            if torch.equal(before, policy):
                break
        return self.expected_return(policy).item()


def four_rooms(
    generator: torch.Generator, *, discount: float, slip: float, dtype: torch.dtype, device: str
) -> Gridworld:
    """Return four rooms with a goal at a random cell, which gives a reward of 1 and ends the episode.

    Args:
        generator: Draws the goal. Every other cell is as likely a start.
        discount: The discount of a step.
        slip: Probability that a random move is made in place of the chosen one.
        dtype: Floating-point type of the tables.
        device: The device of the tables.
    """
    cells = [(i, j) for i, row in enumerate(_MAP.strip().splitlines()) for j, c in enumerate(row) if c == " "]
    index = {cell: number for number, cell in enumerate(cells)}
    goal = int(torch.randperm(len(cells), generator=generator)[0])
    moves = torch.zeros(4, len(cells), len(cells), dtype=dtype)
    for (i, j), s in index.items():
        for a, (down, right) in enumerate(_MOVES):
            moves[a, s, index.get((i + down, j + right), s)] = 1
    transitions = (1 - slip) * moves + slip * moves.mean(0)
    transitions[:, goal] = 0
    rewards = transitions[:, :, goal].T.contiguous()
    start = torch.full((len(cells),), 1 / (len(cells) - 1), dtype=dtype)
    start[goal] = 0
    return Gridworld(transitions.to(device), rewards.to(device), start.to(device), discount)
