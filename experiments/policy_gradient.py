r"""Policy gradients with a block open: the policy learns the opposite, or nothing, or the critic praises it.

- ``gridworld``: a policy and a critic for four rooms, both tables. Nothing is drawn: the loss is an expectation over
  cells, as often as the policy visits them, and moves of a uniformly random driver, corrected by importance weights.
  The witness is the derivative of the exact return through a linear solve.
- ``digits``: a contextual bandit. A linear policy names the digit in an image, several times, and is told which names
  were right. The samples of one image are judged by each other, as in RLOO and GRPO. The sweep shows by enumeration
  how strongly an image counts in the expected gradient, against the probability that its name is right.
- ``doses``: soft actor-critic in one step. A Gaussian policy gives each diabetes patient a dose, which should match the
  progress of the disease. The losses of critic, actor and temperature are summed for one optimiser, so that the blocks
  decide which part of the agent each of them moves.

References:
    Sutton, McAllester, Singh and Mansour, "Policy gradient methods for reinforcement learning with function
    approximation", 2000.

S cells, N images, K samples of each, D features of a patient.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Literal

import torch
from pydantic import Field
from sklearn.datasets import load_diabetes
from torch import Tensor, nn

from toolkit.policy_gradient import (
    group_advantages,
    grpo_loss,
    held_critic,
    off_policy_pg_loss,
    sac_actor_loss,
    sac_critic_loss,
    sac_temperature_loss,
)
from toolkit.runner import Event, ExperimentConfig, Objective, Run, Sweep

from ._digits import Batches, digits_of
from ._gridworld import four_rooms
from ._training import accuracy, methods_of, trained

__all__ = ["Config", "run"]

Advantages = Literal["leave_one_out", "mean", "mean over deviation"]


class Config(ExperimentConfig):
    """Values of a policy gradient experiment.

    Attributes:
        task: ``"gridworld"``, ``"digits"`` or ``"doses"``; see the module.
        discount: gridworld: the discount of a step.
        slip: gridworld: probability of a random move.
        batch_size: digits, doses: number of images or patients in a step.
        n_samples: digits: number of names drawn for each image, K.
        advantages: digits: how samples are judged.
        target_entropy: doses: the wanted entropy of the policy, in nats.
    """

    task: Literal["gridworld", "digits", "doses"]
    discount: Annotated[float, Field(gt=0, lt=1)] = 0.95
    slip: Annotated[float, Field(ge=0, le=1)] = 0.1
    batch_size: Annotated[int, Field(ge=1)] = 64
    n_samples: Annotated[int, Field(ge=2)] = 4
    advantages: Advantages = "leave_one_out"
    target_entropy: float = -1.0


def run(config: Config, seed: int) -> Run:
    """Return one seeded run of the config's task."""
    return {"gridworld": _gridworld, "digits": _digits, "doses": _doses}[config.task](config, seed)


# --- gridworld -------------------------------------------------------------------------------------------------------


def _gridworld(config: Config, seed: int) -> Run:
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, config.dtype)
    world = four_rooms(generator, discount=config.discount, slip=config.slip, dtype=dtype, device=config.device)
    logits = torch.zeros_like(world.rewards, requires_grad=True)
    values = torch.zeros_like(world.start, requires_grad=True)
    driver = torch.full_like(world.rewards, 1 / 4)

    @torch.no_grad()
    def exact() -> tuple[Tensor, Tensor, Tensor]:
        policy = logits.softmax(-1)
        return policy, world.visits(policy), world.action_values(policy)

    def loss() -> Tensor:
        policy, visits, q = exact()
        advantages = q - values[:, None]
        how_often = visits[:, None] * driver * driver.numel()
        actor = off_policy_pg_loss(logits.log_softmax(-1), driver.log(), how_often * advantages)
        return actor + 0.5 * (visits[:, None] * policy * advantages.square()).sum()

    def target() -> dict[str, Tensor]:
        """Return the derivative of the exact return, and that of the critic's squared error."""
        with torch.enable_grad():
            theta = logits.detach().requires_grad_()
            (of_logits,) = torch.autograd.grad(-world.expected_return(theta.softmax(-1)), theta)
        policy, visits, q = exact()
        return {"logits": of_logits, "values": visits * (values.detach() - (policy * q).sum(-1))}

    def evaluate() -> dict[str, float]:
        policy, visits, q = exact()
        weights = visits / visits.sum()
        surprise = -(policy * policy.log()).sum(-1)
        error = values.detach() - (policy * q).sum(-1)
        return {
            "objective": world.expected_return(policy).item(),
            "overestimate of the critic": (weights @ error).item(),
            "entropy of the policy (nats)": (weights @ surprise).item(),
        }

    return Run(
        parameters={"logits": logits, "values": values},
        loss=loss,
        objective=Objective(label="expected return", higher_is_better=True, best=world.best_return()),
        evaluate=evaluate,
        optimizer=torch.optim.Adam([logits, values], lr=config.learning_rate),
        target=target,
        events=[Event(says="the policy learned to stay away from the goal", metric="objective", below=0.01)],
    )


# --- digits ----------------------------------------------------------------------------------------------------------


class _Bandit:
    """A linear policy that names digits, its current images, and the names that it drew for them."""

    def __init__(self, config: Config, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        train, self.test = digits_of(config)
        self.draws, self.n_samples = generator, config.n_samples
        self.batches = Batches(train, config.batch_size, generator)
        self.weight = torch.zeros(10, train.inputs.shape[1], dtype=train.inputs.dtype, device=config.device)
        self.bias = torch.zeros(10, dtype=train.inputs.dtype, device=config.device)
        self.parameters = {"weight": self.weight.requires_grad_(), "bias": self.bias.requires_grad_()}
        self.draw()

    def draw(self, step: int = 0) -> None:
        """Take the next images, and draw K names for each from the policy."""
        if step:
            self.batches.advance(step)
        with torch.no_grad():
            policy = self.log_policy(self.batches.inputs).exp().cpu()
            self.names = policy.multinomial(self.n_samples, True, generator=self.draws).to(self.weight.device)
            self.rewards = (self.names == self.batches.labels[:, None]).to(self.weight)

    def log_policy(self, images: Tensor) -> Tensor:
        return (images @ self.weight.T + self.bias).log_softmax(-1)

    def loss(self, advantages: Advantages) -> Tensor:
        log_prob = self.log_policy(self.batches.inputs).gather(-1, self.names)
        return grpo_loss(log_prob[..., None], _judged(self.rewards, advantages))

    def target(self, advantages: Advantages) -> dict[str, Tensor]:
        """Return the score of the drawn names, weighted by their advantages, by hand."""
        with torch.no_grad():
            policy = self.log_policy(self.batches.inputs).exp()
            weights = _judged(self.rewards, advantages) / self.rewards.numel()
            slope = policy * weights.sum(-1, keepdim=True)
            slope.scatter_add_(-1, self.names, -weights)
            return {"weight": slope.T @ self.batches.inputs, "bias": slope.sum(0)}

    @torch.no_grad()
    def judge(self) -> dict[str, float]:
        log_policy = self.log_policy(self.test.inputs)
        right = log_policy.gather(-1, self.test.labels[:, None]).exp()
        return {
            "objective": right.mean().item(),
            "accuracy": accuracy(log_policy, self.test.labels),
        }


def _judged(rewards: Tensor, advantages: Advantages) -> Tensor:
    if advantages == "leave_one_out":
        return group_advantages(rewards, baseline="leave_one_out")
    return group_advantages(rewards, baseline="mean", scale="none" if advantages == "mean" else "std")


def _digits(config: Config, seed: int) -> Run:
    bandit = _Bandit(config, seed)

    def train(advantages: Advantages) -> dict[str, Sequence[float]]:
        other = _Bandit(config, seed)
        optimizer = torch.optim.Adam(other.parameters.values(), lr=config.learning_rate)
        return trained(config, partial(other.loss, advantages), optimizer, other.draw, other.judge)

    others: dict[str, Advantages] = {
        "a mean that includes the own sample": "mean",
        "the same, divided by the deviation": "mean over deviation",
    }
    shares = (0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9)
    return Run(
        parameters=bandit.parameters,
        loss=lambda: bandit.loss(config.advantages),
        objective=Objective(label="share of right names", higher_is_better=True, best=1.0),
        evaluate=bandit.judge,
        optimizer=torch.optim.Adam(bandit.parameters.values(), lr=config.learning_rate),
        target=lambda: bandit.target(config.advantages),
        after_step=bandit.draw,
        sweep=Sweep(
            label="probability that the policy's name is right",
            values=shares,
            evaluate=partial(_weights_of_images, shares, config.n_samples),
        ),
        methods=methods_of(config, {name: partial(train, advantages) for name, advantages in others.items()}),
    )


def _weights_of_images(shares: Sequence[float], n_samples: int) -> Mapping[str, list[float]]:
    """Return, for each probability p of a right name, the expected gradient as a multiple of that of p.

    The sum is over the numbers of right samples in a group. The score of a right one is ``1 / p``, of a wrong one
    ``-1 / (1 - p)``, in units of the gradient of p.
    """
    found: dict[str, list[float]] = {}
    for name, k, advantages in (
        ("judged by the others", n_samples, "leave_one_out"),
        ("judged by a mean that includes the own sample", n_samples, "mean"),
        ("the same, divided by the deviation", n_samples, "mean over deviation"),
        (f"the same, of {4 * n_samples} samples", 4 * n_samples, "mean over deviation"),
    ):
        right = torch.ones(k + 1, k, dtype=torch.float64).tril(-1)
        judged = _judged(right, advantages)  # type: ignore[arg-type]
        ways = torch.tensor([math.comb(k, count) for count in range(k + 1)], dtype=torch.float64)
        chances = [ways * (p**right * (1 - p) ** (1 - right)).prod(-1) for p in shares]
        weights = [chance @ (judged * _scores(right, p)).mean(-1) for chance, p in zip(chances, shares, strict=True)]
        found[f"weight in the gradient, {name}"] = [round(weight.item(), 12) for weight in weights]  # no curve of noise
    return found


def _scores(right: Tensor, p: float) -> Tensor:
    return right / p - (1 - right) / (1 - p)


# --- doses -----------------------------------------------------------------------------------------------------------


class _Critic(nn.Module):
    """A function of a patient and a dose that is quadratic in the dose and linear in the patient."""

    def __init__(self, n_features: int, *, dtype: torch.dtype, device: str) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(2 * n_features + 1, dtype=dtype, device=device))

    def forward(self, patients: Tensor, doses: Tensor) -> Tensor:
        dose = doses[:, None]
        return torch.cat([patients, dose * patients, dose.square()], -1) @ self.weights


def _doses(config: Config, seed: int) -> Run:
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, config.dtype)
    patients, needs = (each.to(config.device) for each in _patients(dtype))
    best = torch.linalg.lstsq(patients, needs).solution
    critic = _Critic(patients.shape[1], dtype=dtype, device=config.device)
    gains = torch.zeros_like(best, requires_grad=True)
    log_std = torch.zeros((), dtype=dtype, device=config.device, requires_grad=True)
    log_alpha = torch.full_like(log_std, -2.0, requires_grad=True)
    batch: dict[str, Tensor] = {}

    def draw(step: int = 0) -> None:
        chosen = torch.randint(len(needs), (config.batch_size,), generator=generator).to(config.device)
        normal = torch.randn(2, config.batch_size, generator=generator, dtype=dtype).to(config.device)
        batch.update(patients=patients[chosen], needs=needs[chosen], given=1.5 * normal[0], normal=normal[1])

    def loss() -> Tensor:
        seen, given = batch["patients"], batch["given"]
        own, log_prob = _act(seen, batch["normal"], gains, log_std)
        rewards = -(given - batch["needs"]).square()
        over = torch.zeros_like(rewards)  # a patient is seen once
        of_critic = sac_critic_loss(critic(seen, given), rewards, over, over, over, log_alpha)
        of_actor = sac_actor_loss(log_alpha, log_prob, held_critic(critic, seen, own))
        return of_critic + of_actor + sac_temperature_loss(log_alpha, log_prob, target_entropy=config.target_entropy)

    @torch.no_grad()
    def target() -> dict[str, Tensor]:
        """Return the three gradients by hand, each of its own part."""
        seen, given = batch["patients"], batch["given"][:, None]
        own, log_prob = _act(seen, batch["normal"], gains, log_std)
        features = torch.cat([seen, given * seen, given.square()], -1)
        errors = features @ critic.weights + (batch["given"] - batch["needs"]).square()
        n = seen.shape[1]
        slope = -(seen @ critic.weights[n : 2 * n] + 2 * own * critic.weights[-1])
        alpha, noise = log_alpha.exp(), log_std.exp() * batch["normal"]
        return {
            "critic": features.T @ errors / len(errors),
            "gains": seen.T @ slope / len(slope),
            "log_std": (slope * noise).mean() - alpha,
            "log_alpha": -alpha * (log_prob.mean() + config.target_entropy),
        }

    @torch.no_grad()
    def evaluate() -> dict[str, float]:
        entropy = log_std.item() + 0.5 * math.log(2 * math.pi * math.e)
        doses = patients @ gains
        promised = critic(patients, doses).mean().item()
        received = -(doses - needs).square().mean().item()
        return {
            "objective": abs(entropy - config.target_entropy),
            "reward of the mean dose": received,
            "overestimate of the critic": promised - received,
            "log of the temperature": log_alpha.item(),
        }

    draw()
    parameters = {"critic": critic.weights, "gains": gains, "log_std": log_std, "log_alpha": log_alpha}
    return Run(
        parameters=parameters,
        loss=loss,
        objective=Objective(label="distance to the wanted entropy (nats)", higher_is_better=False, best=0.0),
        evaluate=evaluate,
        optimizer=torch.optim.Adam(parameters.values(), lr=config.learning_rate),
        target=target,
        after_step=draw,
    )


def _patients(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return measurements of patients (N, D) with a constant, and the progress of their diabetes, all standardised."""
    found = load_diabetes()
    inputs, progress = (torch.tensor(each, dtype=dtype) for each in (found.data, found.target))
    inputs, progress = ((each - each.mean(0)) / each.std(0) for each in (inputs, progress))
    return torch.cat([inputs, torch.ones_like(inputs[:, :1])], -1), progress


def _act(patients: Tensor, normal: Tensor, gains: Tensor, log_std: Tensor) -> tuple[Tensor, Tensor]:
    """Return reparameterised doses and their log-probabilities."""
    log_prob = -0.5 * normal.square() - log_std - 0.5 * math.log(2 * math.pi)
    return patients @ gains + log_std.exp() * normal, log_prob
