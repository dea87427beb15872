r"""Q-learning of a cart that balances a pole, from random pushes, with a network for the values.

Every step with the pole up has the reward 1, so no value can be more than :math:`1 / (1 - \gamma)`. The values are
learned from a fixed set of random transitions, and judged by the number of steps for which their best pushes keep the
pole up. The cart has the equations of gymnasium's CartPole-v1.

References:
    Barto, Sutton and Anderson, "Neuronlike adaptive elements that can solve difficult learning control problems", 1983.

N carts or transitions; a state has four numbers: place (m) and speed (m/s) of the cart, angle (rad) and angular speed
of the pole. A push is 0, to the left, or 1, to the right.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn

from toolkit.runner import Event, ExperimentConfig, Objective, Run
from toolkit.value_learning import q_learning

from ._training import descend, followed, gradient_of, methods_of, perceptron

__all__ = ["Config", "balanced_steps", "fallen", "first_states", "next_states", "run"]

_GRAVITY, _CART, _POLE, _HALF_LENGTH, _FORCE, _SECONDS = 9.8, 1.0, 0.1, 0.5, 10.0, 0.02
_FARTHEST, _STEEPEST = 2.4, 12 * math.pi / 180

# Of an evaluation.
_CARTS, _LONGEST = 20, 200


class Config(ExperimentConfig):
    """Values of an experiment with a cart and a pole.

    Attributes:
        n_transitions: Number of random transitions to learn from.
        batch_size: Number of transitions in an update.
        width: Units of each of the two hidden layers.
        discount: The discount of a step.
        copy_every: Number of updates between two copies of the target network of the other method.
    """

    n_transitions: Annotated[int, Field(ge=100)] = 3000
    batch_size: Annotated[int, Field(ge=1)] = 256
    width: Annotated[int, Field(ge=1)] = 32
    discount: Annotated[float, Field(gt=0, lt=1)] = 0.98
    copy_every: Annotated[int, Field(ge=1)] = 50


class _Batch(NamedTuple):
    """Transitions: states (N, 4), pushes (N,), next states (N, 4), and discounts (N,), 0 after a fall."""

    states: Tensor
    pushes: Tensor
    following: Tensor
    discounts: Tensor


def first_states(count: int, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    """Return states (N, 4) near rest, each number uniform from -0.05 to 0.05."""
    return 0.1 * torch.rand(count, 4, generator=generator, dtype=dtype) - 0.05


def next_states(states: Tensor, pushes: Tensor) -> Tensor:
    """Return the states (N, 4) 0.02 s after pushes (N,) of 10 N, by a step of Euler's method."""
    _, speed, angle, turning = states.unbind(-1)
    cosine, sine, mass = angle.cos(), angle.sin(), _CART + _POLE
    push = (_FORCE * (2 * pushes.to(states) - 1) + _POLE * _HALF_LENGTH * turning.square() * sine) / mass
    falling = (_GRAVITY * sine - cosine * push) / (_HALF_LENGTH * (4 / 3 - _POLE * cosine.square() / mass))
    faster = push - _POLE * _HALF_LENGTH * falling * cosine / mass
    return states + _SECONDS * torch.stack([speed, faster, turning, falling], -1)


def fallen(states: Tensor) -> Tensor:
    """Say for each state (N, 4) whether the cart left the track or the pole leans by more than 12 degrees."""
    return (states[..., 0].abs() > _FARTHEST) | (states[..., 2].abs() > _STEEPEST)


def balanced_steps(network: nn.Module, states: Tensor) -> Tensor:
    """Return for how many steps, at most 200, the pushes of the highest value keep each pole up, (N,)."""
    up, steps = torch.ones(len(states), dtype=torch.bool, device=states.device), torch.zeros_like(states[:, 0])
    while len(up) and bool(up.any()) and steps.max() < _LONGEST:
        states = next_states(states, network(states).argmax(-1))
        steps, up = steps + up, up & ~fallen(states)
    return steps


def run(config: Config, seed: int) -> Run:
    """Return one seeded run of Q-learning without a target network; with one, as another method."""
    source = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, config.dtype)
    memory = _random_transitions(config, source, dtype)
    starts = first_states(_CARTS, source, dtype).to(config.device)
    sizes = [4, config.width, config.width, 2]
    network = perceptron(sizes, nn.ReLU, generator=source, dtype=dtype).to(config.device)
    begun, draws = copy.deepcopy(network), source.get_state()
    batch = _drawn(memory, config, source)

    def advance(step: int) -> None:
        nonlocal batch
        batch = _drawn(memory, config, source)

    def target() -> Mapping[str, Tensor]:
        """Return the gradient with labels from a plain `detach`."""
        label = 1 + batch.discounts * network(batch.following).detach().max(-1).values
        errors = label - network(batch.states)[torch.arange(len(label)), batch.pushes]
        return gradient_of(errors.square().mean() / 2, parameters)

    def with_target_network() -> dict[str, Sequence[float]]:
        online, held = copy.deepcopy(begun), copy.deepcopy(begun)
        optimizer = torch.optim.Adam(online.parameters(), lr=config.learning_rate, foreach=False)
        generator = torch.Generator()
        generator.set_state(draws)

        def update(step: int) -> None:
            if step % config.copy_every == 0:
                held.load_state_dict(online.state_dict())
            descend(optimizer, _loss(online, held, _drawn(memory, config, generator)))

        return followed(config, update, lambda: _judged(online, starts, config.discount))

    parameters = dict(network.named_parameters())
    return Run(
        parameters=parameters,
        loss=lambda: _loss(network, network, batch),
        objective=Objective(label="steps with the pole up", higher_is_better=True, best=float(_LONGEST)),
        evaluate=lambda: _judged(network, starts, config.discount),
        optimizer=torch.optim.Adam(parameters.values(), lr=config.learning_rate, foreach=False),
        target=target,
        after_step=advance,
        events=[
            Event(
                says="the values are larger than possible",
                metric="value of the first states, in multiples of the largest possible",
                above=1.0,
            )
        ],
        methods=methods_of(config, {"with a target network": with_target_network}),
    )


def _loss(network: nn.Module, labels: nn.Module, batch: _Batch) -> Tensor:
    rewards = torch.ones_like(batch.discounts)
    errors = q_learning(network(batch.states), batch.pushes, rewards, batch.discounts, labels(batch.following))
    return errors.square().mean() / 2


@torch.no_grad()
def _judged(network: nn.Module, starts: Tensor, discount: float) -> dict[str, float]:
    """Return for how many steps the pole stays up, and the share of the largest possible value that is expected."""
    return {
        "objective": balanced_steps(network, starts).mean().item(),
        "value of the first states, in multiples of the largest possible": (
            (1 - discount) * network(starts).amax(-1).mean().item()
        ),
    }


def _random_transitions(config: Config, source: torch.Generator, dtype: torch.dtype) -> _Batch:
    """Return the transitions of a hundred carts under random pushes; each begins again after a fall."""
    states, found = first_states(100, source, dtype), []
    for _ in range(-(-config.n_transitions // len(states))):
        pushes = torch.randint(2, (len(states),), generator=source)
        following = next_states(states, pushes)
        found.append((states, pushes, following, config.discount * (~fallen(following)).to(dtype)))
        states = torch.where(fallen(following)[:, None], first_states(len(states), source, dtype), following)
    return _Batch(*(torch.cat(part)[: config.n_transitions].to(config.device) for part in zip(*found, strict=True)))


def _drawn(memory: _Batch, config: Config, source: torch.Generator) -> _Batch:
    rows = torch.randint(len(memory.pushes), (config.batch_size,), generator=source).to(config.device)
    return _Batch(*(part[rows] for part in memory))
