r"""Values of a Markov chain by temporal differences: the label held constant, and the residual gradient.

- ``random_walk``: the walk of Sutton and Barto, whose values are known. TD(lambda) on the same episodes in every step.
  The next state is uncertain, so the squared error of a sample is not only an error of the values: the residual
  gradient also lowers the spread of the next values. Without a model, two independent samples of the next state repair
  it; that is the method "two samples". The fixed point of every lambda is computed exactly.
- ``baird``: Baird's star. Every transition is certain and all rewards are 0, but the states are not visited as often as
  the policy that is judged would visit them. TD(0) diverges. The residual gradient, and the methods GTD2 and TDC, which
  have a second vector of weights, do not.
- ``cliff``: Q-learning beside a cliff, with all steps in every update. The world is certain, so the true values are a
  minimum of the residual gradient's loss too. Labels come from a target network, and two blocks guard the same path:
  one on the copy of the parameters, one on the label.
- ``distribution``: the random walk with a distribution of returns on fixed atoms for each state, as in C51.
- ``quantiles``: the same with the quantiles of the returns of each state, as in QR-DQN.

References:
    Sutton and Barto, "Reinforcement learning: an introduction", 2018, examples 6.2, 6.6 and 7.1, sections 11.2,
    11.7.
    Baird, "Residual algorithms: reinforcement learning with function approximation", 1995.

S states, E episodes of at most T steps, N transitions, K atoms or quantiles.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from toolkit.runner import Event, ExperimentConfig, Objective, Run, Sweep
from toolkit.value_learning import (
    categorical_td_learning,
    error_estimate_loss,
    gtd2_loss,
    incremental_update,
    q_learning,
    quantile_q_learning,
    td_lambda,
    td_learning,
    tdc_loss,
)

from ._training import followed, methods_of

__all__ = ["Config", "Walk", "run", "true_values"]


class Config(ExperimentConfig):
    """Values of an experiment on temporal differences.

    Attributes:
        task: ``"random_walk"``, ``"baird"``, ``"cliff"``, ``"distribution"`` or ``"quantiles"``; see the module.
        n_states: random_walk, distribution, quantiles: number of states, S, which is odd: episodes begin in the middle.
        n_episodes: random_walk, distribution, quantiles: number of episodes, E.
        lambda_: random_walk: the lambda of the training.
        swept_lambdas: random_walk: the lambdas for which the fixed point is computed.
        n_atoms: distribution: number of atoms from 0 to 1; quantiles: number of quantiles.
        discount: baird, cliff: the discount of a step.
        batch_size: baird: number of transitions of an update.
        estimate_rate: baird: step size of the second weights of GTD2 and TDC, in multiples of the learning rate.
        target_rate: cliff: step size of the target network towards the online one; 1 is a copy in every update.
    """

    task: Literal["random_walk", "baird", "cliff", "distribution", "quantiles"]
    n_states: Annotated[int, Field(ge=3)] = 5
    n_episodes: Annotated[int, Field(ge=1)] = 100
    lambda_: Annotated[float, Field(ge=0, le=1)] = 0.0
    swept_lambdas: Annotated[list[Annotated[float, Field(ge=0, le=1)]], Field(default_factory=list)]
    n_atoms: Annotated[int, Field(ge=2)] = 11
    discount: Annotated[float, Field(gt=0, lt=1)] = 0.99
    batch_size: Annotated[int, Field(ge=1)] = 32
    estimate_rate: Annotated[float, Field(gt=0)] = 5.0
    target_rate: Annotated[float, Field(gt=0, le=1)] = 1.0


def run(config: Config, seed: int) -> Run:
    """Return one seeded run of the config's task."""
    tasks = {
        "random_walk": _random_walk,
        "baird": _baird,
        "cliff": _cliff,
        "distribution": _distribution,
        "quantiles": _quantiles,
    }
    return tasks[config.task](config, seed)


@dataclass(frozen=True)
class Walk:
    """Episodes of a random walk; state S is the end. After the end nothing happens, and no reward is given.

    Attributes:
        states: (E, T + 1).
        rewards: (E, T), 1 for the step beyond the right end.
        discounts: (E, T), 0 for the step to the end and for all later ones.
    """

    states: Tensor
    rewards: Tensor
    discounts: Tensor

    @classmethod
    def sampled(cls, n_states: int, n_episodes: int, generator: torch.Generator, dtype: torch.dtype) -> Walk:
        """Return episodes that begin in the middle and go left or right with the same probability."""
        states, rewards = [torch.full((n_episodes,), n_states // 2)], []
        while bool((states[-1] < n_states).any()):
            to_right = torch.randint(2, (n_episodes,), generator=generator) == 1
            following = torch.where(to_right, states[-1] + 1, states[-1] - 1)
            rewards.append((following == n_states) & (states[-1] < n_states))
            over = (states[-1] == n_states) | (following < 0)
            states.append(torch.where(over, n_states, following))
        path = torch.stack(states, 1)
        return cls(path, torch.stack(rewards, 1).to(dtype), (path[:, 1:] < n_states).to(dtype))

    def transitions(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return states (N,), rewards, discounts and next states of all steps before the end."""
        n_states = int(self.states.max())
        before = self.states[:, :-1] < n_states
        return self.states[:, :-1][before], self.rewards[before], self.discounts[before], self.states[:, 1:][before]


def true_values(n_states: int) -> Tensor:
    """Return the probability of every state of a walk to end at the right, (S,)."""
    return torch.arange(1, n_states + 1, dtype=torch.float64) / (n_states + 1)


def _walked(config: Config, seed: int) -> tuple[Walk, Tensor, torch.Generator, torch.dtype]:
    """Return the episodes, the true values, and the generator for further draws."""
    generator, dtype = torch.Generator().manual_seed(seed), getattr(torch, config.dtype)
    walk = Walk.sampled(config.n_states, config.n_episodes, generator, dtype)
    return walk, true_values(config.n_states).to(dtype), generator, dtype


def _random_walk(config: Config, seed: int) -> Run:
    walk, truth, generator, dtype = _walked(config, seed)
    states, rewards, discounts, following = walk.transitions()
    start = torch.rand(config.n_states, generator=generator, dtype=dtype)
    values = start.clone().requires_grad_()

    def loss(lambda_: float = config.lambda_, at: Tensor = values) -> Tensor:
        v = torch.cat([at, at.new_zeros(1)])[walk.states]
        errors = td_lambda(v[:, :-1], walk.rewards, walk.discounts, v[:, 1:], lambda_)
        return errors.square().sum() / (2 * len(states))

    @torch.no_grad()
    def target() -> dict[str, Tensor]:
        """Return the update of tabular TD(0), counted over the transitions."""
        v = torch.cat([values, values.new_zeros(1)])
        errors = rewards + discounts * v[following] - v[states]
        return {"values": -torch.zeros_like(values).index_add(0, states, errors) / len(states)}

    def sweep() -> Mapping[str, list[float]]:
        fixed_points = [
            _fixed_point(partial(loss, lambda_), config.n_states, dtype) for lambda_ in config.swept_lambdas
        ]
        return {"error of the fixed point": [_rms(point - truth) for point in fixed_points]}

    return Run(
        parameters={"values": values},
        loss=loss,
        objective=Objective(label="error of the values (root mean square)", higher_is_better=False),
        evaluate=lambda: {"objective": _rms(values - truth), "value of the first state": float(values[0].detach())},
        optimizer=torch.optim.SGD([values], lr=config.learning_rate),
        target=target if config.lambda_ == 0 else None,
        sweep=Sweep(label="lambda", values=tuple(config.swept_lambdas), evaluate=sweep),
        methods=methods_of(config, {"two samples": partial(_two_samples, config, walk, start, seed)}),
    )


def _two_samples(config: Config, walk: Walk, start: Tensor, seed: int) -> dict[str, Sequence[float]]:
    """Return the errors of descent on the product of two errors with independent next states.

    Every transition is paired with another one from the same state, drawn anew for each step.
    """
    generator = torch.Generator().manual_seed(seed)
    before, rewards, discounts, following = walk.transitions()
    truth = true_values(config.n_states).to(start)
    values, order = start.clone().requires_grad_(), before.argsort(stable=True)

    def update(step: int) -> None:
        # A random order of the transitions of each state.
        shuffled = torch.rand(len(before), generator=generator).argsort()
        shuffled = shuffled[before[shuffled].argsort(stable=True)]
        v = torch.cat([values, values.new_zeros(1)])
        errors = rewards + discounts * v[following] - v[before]
        (slope,) = torch.autograd.grad(0.5 * (errors[order] * errors[shuffled]).mean(), values)
        with torch.no_grad():
            values.sub_(slope, alpha=config.learning_rate)

    return followed(config, update, lambda: {"objective": _rms(values - truth)})


def _fixed_point(loss: Callable[[Tensor], Tensor], n_states: int, dtype: torch.dtype) -> Tensor:
    """Return the zero of a gradient that is affine in the values, from its values at 0 and at the unit vectors."""
    slopes = []
    for point in (torch.zeros(n_states, dtype=dtype), *torch.eye(n_states, dtype=dtype)):
        slopes += torch.autograd.grad(loss(leaf := point.clone().requires_grad_()), leaf)
    solution: Tensor = torch.linalg.solve(torch.stack(slopes[1:], 1) - slopes[0][:, None], -slopes[0])
    return solution


def _rms(errors: Tensor) -> float:
    return errors.detach().square().mean().sqrt().item()


def _baird(config: Config, seed: int) -> Run:
    features = _star(getattr(torch, config.dtype))
    batch = _Batch(features, config, seed)
    weights = _first_weights(features).requires_grad_()

    def loss() -> Tensor:
        errors = td_learning(batch.before @ weights, batch.rewards, batch.discounts, batch.after @ weights)
        squares: Tensor = batch.ratios * errors.square()
        return squares.mean() / 2

    @torch.no_grad()
    def target() -> dict[str, Tensor]:
        errors = batch.discounts * (batch.after @ weights) - batch.before @ weights
        return {"weights": -batch.before.T @ (batch.ratios * errors) / config.batch_size}

    return Run(
        parameters={"weights": weights},
        loss=loss,
        objective=Objective(label="error of the values (root mean square)", higher_is_better=False, best=0.0),
        evaluate=lambda: _judge_star(features, weights, config.discount),
        optimizer=torch.optim.SGD([weights], lr=config.learning_rate),
        target=target,
        after_step=lambda step: batch.draw(),
        events=[Event(says="the weights grew tenfold", metric="norm of the weights", above=100.0)],
        methods=methods_of(
            config,
            {
                name: partial(_gradient_td, config, seed, loss_of_values)
                for name, loss_of_values in (("TDC", tdc_loss), ("GTD2", gtd2_loss))
            },
        ),
    )


def _star(dtype: torch.dtype) -> Tensor:
    """Return the features of the seven states: ``2 w_s + w_8`` for the first six, ``w_7 + 2 w_8`` for the last."""
    features = torch.zeros(7, 8, dtype=dtype)
    features[range(6), range(6)], features[:6, 7] = 2.0, 1.0
    features[6, 6], features[6, 7] = 1.0, 2.0
    return features


def _first_weights(features: Tensor) -> Tensor:
    weights = torch.ones_like(features[0])
    weights[6] = 10.0
    return weights


class _Batch:
    """Steps of the behaviour, from and to any state; the policy to be judged always goes to the last one."""

    def __init__(self, features: Tensor, config: Config, seed: int) -> None:
        self.features, self.size, self.generator = features, config.batch_size, torch.Generator().manual_seed(seed)
        self.rewards = features.new_zeros(self.size)
        self.discounts = torch.full_like(self.rewards, config.discount)
        self.draw()

    def draw(self) -> None:
        """Draw steps anew; the ratio of their probabilities is 7 for those to the last state and 0 for others."""
        before, after = torch.randint(7, (2, self.size), generator=self.generator)
        self.before, self.after = self.features[before], self.features[after]
        self.ratios = 7.0 * (after == 6).to(self.features)


def _judge_star(features: Tensor, weights: Tensor, discount: float) -> dict[str, float]:
    values = features @ weights.detach()
    return {
        "objective": _rms(values),
        "error of a step of the policy (root mean square)": _rms(discount * values[6] - values),
        "norm of the weights": weights.detach().norm().item(),
    }


def _gradient_td(config: Config, seed: int, loss_of_values: Callable[..., Tensor]) -> dict[str, Sequence[float]]:
    """Return the metrics of GTD2 or TDC on the same transitions."""
    features = _star(getattr(torch, config.dtype))
    batch = _Batch(features, config, seed)
    weights = _first_weights(features).requires_grad_()
    second = torch.zeros_like(weights).requires_grad_()

    def update(step: int) -> None:
        h = batch.before @ second
        arguments = (batch.before @ weights, batch.rewards, batch.discounts, batch.after @ weights, h, batch.ratios)
        total = loss_of_values(*arguments) + error_estimate_loss(*arguments)
        by_weights, by_second = torch.autograd.grad(total.mean(), [weights, second])
        with torch.no_grad():
            weights.sub_(by_weights, alpha=config.learning_rate)
            second.sub_(by_second, alpha=config.estimate_rate * config.learning_rate)
        batch.draw()

    return followed(config, update, lambda: _judge_star(features, weights, config.discount))


def _cliff(config: Config, seed: int) -> Run:
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, config.dtype)
    before, actions, rewards, after = _cliff_steps(dtype)
    discounts = config.discount * (after < _GOAL).to(dtype)
    values = torch.randn(_GOAL, 4, generator=generator, dtype=dtype).requires_grad_()
    held = {"values": values.detach().clone()}
    best = _best_values(before, actions, rewards, discounts, after)

    def loss() -> Tensor:
        target = incremental_update({"values": values}, held, config.target_rate)["values"]
        following = torch.cat([target, torch.zeros_like(target[:1])])[after]
        errors = q_learning(values[before], actions, rewards, discounts, following)
        return errors.square().sum() / 2

    @torch.no_grad()
    def target() -> dict[str, Tensor]:
        labels = (1 - config.target_rate) * held["values"] + config.target_rate * values
        highest = torch.cat([labels.max(1).values, values.new_zeros(1)])[after]
        errors = rewards + discounts * highest - values[before, actions]
        return {"values": torch.zeros_like(values).index_put((before, actions), -errors)}

    @torch.no_grad()
    def follow(step: int) -> None:
        held["values"].lerp_(values, config.target_rate)

    def evaluate() -> dict[str, float]:
        chosen = best.gather(1, values.detach().argmax(1, keepdim=True))[before, 0]
        as_good = (chosen - best.max(1).values[before]).abs() < 1e-9
        return {
            "objective": _rms(values.detach()[before, actions] - best[before, actions]),
            "states with the best action": as_good.double().mean().item(),
        }

    return Run(
        parameters={"values": values},
        loss=loss,
        objective=Objective(label="error of the values (root mean square)", higher_is_better=False, best=0.0),
        evaluate=evaluate,
        optimizer=torch.optim.SGD([values], lr=config.learning_rate),
        target=target,
        after_step=follow,
    )


# Four rows of twelve, the start at the lower left. The goal at the lower right ends the episode.
_ROWS, _COLUMNS, _GOAL = 4, 12, 47


def _cliff_steps(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return states, actions, rewards and next states of all possible steps."""
    steps = []
    for state in range(37):
        row, column = divmod(state, _COLUMNS)
        for action, (down, right) in enumerate(((-1, 0), (0, 1), (1, 0), (0, -1))):
            at = (min(max(row + down, 0), _ROWS - 1), min(max(column + right, 0), _COLUMNS - 1))
            fell = at[0] == _ROWS - 1 and 0 < at[1] < _COLUMNS - 1
            following = 36 if fell else at[0] * _COLUMNS + at[1]
            steps.append((state, action, -100 if fell else -1, following))
    before, actions, rewards, after = torch.tensor(steps).unbind(1)
    return before, actions, rewards.to(dtype), after


def _best_values(before: Tensor, actions: Tensor, rewards: Tensor, discounts: Tensor, after: Tensor) -> Tensor:
    """Return the values of the best policy by value iteration, (47, 4)."""
    values = rewards.new_zeros(_GOAL + 1, 4)
    for _ in range(1000):
        values[before, actions] = rewards + discounts * values[after].max(1).values
    return values[:_GOAL]


def _distribution(config: Config, seed: int) -> Run:
    walk, truth, generator, dtype = _walked(config, seed)
    before, rewards, discounts, after, shares = _counted(walk)
    atoms = torch.linspace(0, 1, config.n_atoms, dtype=dtype)
    logits = (0.1 * torch.randn(config.n_states, config.n_atoms, generator=generator, dtype=dtype)).requires_grad_()

    def loss() -> Tensor:
        following = torch.cat([logits, torch.zeros_like(logits[:1])])[after]
        return (shares * categorical_td_learning(atoms, logits[before], rewards, discounts, atoms, following)).sum()

    @torch.no_grad()
    def target() -> dict[str, Tensor]:
        """Return the update without a projection: a return is that of the next state, or the reward at the end."""
        probs = logits.softmax(-1)
        ends = torch.nn.functional.one_hot((rewards * (config.n_atoms - 1)).long(), config.n_atoms).to(dtype)
        labels = torch.where(discounts[:, None] > 0, torch.cat([probs, probs[:1]])[after], ends)
        return {"logits": torch.zeros_like(logits).index_add(0, before, shares[:, None] * (probs[before] - labels))}

    def evaluate() -> dict[str, float]:
        log_probs = logits.detach().log_softmax(-1)
        probs = log_probs.exp()
        return {
            "objective": _rms(probs @ atoms - truth),
            "entropy of the distributions (nats)": -(probs * log_probs).sum(-1).mean().item(),
            "mass between 0 and 1": probs[:, 1:-1].sum(-1).mean().item(),
        }

    return Run(
        parameters={"logits": logits},
        loss=loss,
        objective=Objective(label="error of the means (root mean square)", higher_is_better=False),
        evaluate=evaluate,
        optimizer=torch.optim.Adam([logits], lr=config.learning_rate),
        target=target,
        events=[Event(says="the distributions became narrow", metric="entropy of the distributions (nats)", below=0.3)],
    )


def _quantiles(config: Config, seed: int) -> Run:
    walk, truth, generator, dtype = _walked(config, seed)
    before, rewards, discounts, after, shares = _counted(walk)
    probabilities = (torch.arange(config.n_atoms, dtype=dtype) + 0.5) / config.n_atoms
    quantiles = torch.rand(config.n_states, config.n_atoms, generator=generator, dtype=dtype).requires_grad_()

    def loss() -> Tensor:
        following = torch.cat([quantiles, torch.zeros_like(quantiles[:1])])[after][..., None]  # the only action
        losses = quantile_q_learning(
            quantiles[before][..., None],
            probabilities,
            torch.zeros_like(before),
            rewards,
            discounts,
            following,
            following,
            huber_param=0.0,
        )
        return (shares * losses).sum()

    @torch.no_grad()
    def target() -> dict[str, Tensor]:
        """Return the share of the labels below each quantile, less its probability."""
        labels = torch.where(discounts[:, None] > 0, torch.cat([quantiles, quantiles[:1]])[after], rewards[:, None])
        below = (labels[:, None] < quantiles[before][..., None]).to(dtype).mean(-1)
        slopes = shares[:, None] * (below - probabilities)
        return {"quantiles": torch.zeros_like(quantiles).index_add(0, before, slopes)}

    def evaluate() -> dict[str, float]:
        return {
            "objective": _rms(quantiles.detach().mean(-1) - truth),
            "spread of the quantiles (standard deviation)": quantiles.detach().std(-1, correction=0).mean().item(),
        }

    return Run(
        parameters={"quantiles": quantiles},
        loss=loss,
        objective=Objective(label="error of the means (root mean square)", higher_is_better=False),
        evaluate=evaluate,
        optimizer=torch.optim.Adam([quantiles], lr=config.learning_rate),
        target=target,
        events=[
            Event(
                says="the quantiles met in one point",
                metric="spread of the quantiles (standard deviation)",
                below=0.03,
            )
        ],
    )


def _counted(walk: Walk) -> tuple[Tensor, ...]:
    """Return the different transitions, as of `Walk.transitions`, and the share of each."""
    columns = torch.stack([column.double() for column in walk.transitions()], 1)
    rows, counts = columns.unique(dim=0, return_counts=True)
    before, rewards, discounts, after = rows.unbind(1)
    dtype = walk.rewards.dtype
    shares = counts.to(dtype) / counts.sum()
    return before.long(), rewards.to(dtype), discounts.to(dtype), after.long(), shares
