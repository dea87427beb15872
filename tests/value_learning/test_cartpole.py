"""The cart and the pole: the equations of motion, gymnasium's states, and an episode's length."""

import math
import tomllib

import pytest
import torch
from folders import ROOT
from torch import nn

from experiments.cartpole import Config, balanced_steps, fallen, first_states, next_states, run


def states(count=50):
    scale = torch.tensor([1.0, 2.0, 0.15, 2.0], dtype=torch.float64)
    return scale * torch.randn(count, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def pushes(count=50):
    return torch.randint(2, (count,), generator=torch.Generator().manual_seed(4))


def test_a_step_solves_the_equations_of_motion():
    """Two equations for the accelerations, of the forces on the whole and of the torque about the pole's foot."""
    mass, pole, half, gravity = 1.0, 0.1, 0.5, 9.8
    before, force = states(), 10.0 * (2 * pushes() - 1).double()
    after = next_states(before, pushes())
    speed, angle, turning = before[:, 1], before[:, 2], before[:, 3]
    lever = pole * half * angle.cos()
    whole, alone = torch.full_like(lever, mass + pole), torch.full_like(lever, 4 / 3 * pole * half**2)
    matrix = torch.stack([whole, lever, lever, alone], -1).view(-1, 2, 2)
    forces = torch.stack([force + pole * half * turning**2 * angle.sin(), pole * half * gravity * angle.sin()], -1)
    faster, falling = torch.linalg.solve(matrix, forces).unbind(-1)
    expected = before + 0.02 * torch.stack([speed, faster, turning, falling], -1)
    torch.testing.assert_close(after, expected)


def test_states_and_falls_are_those_of_gymnasium():
    gymnasium = pytest.importorskip("gymnasium")
    world = gymnasium.make("CartPole-v1").unwrapped
    world.reset(seed=0)
    for state, push in zip(states(), pushes(), strict=True):
        if fallen(state):
            continue
        world.state, world.steps_beyond_terminated = tuple(state.tolist()), None
        _, _, terminated, *_ = world.step(push.item())
        after = next_states(state[None], push[None])[0]
        torch.testing.assert_close(after, torch.tensor(world.state, dtype=torch.float64))
        assert bool(fallen(after)) == terminated


class _Towards(nn.Module):
    """Pushes in the direction in which the pole falls."""

    def forward(self, states):
        lean = states[:, 2] + 0.5 * states[:, 3] + 0.05 * states[:, 0] + 0.1 * states[:, 1]
        return torch.stack([-lean, lean], -1)


class _Left(nn.Module):
    def forward(self, states):
        return torch.tensor([1.0, 0.0]).expand(len(states), 2)


def test_steps_are_counted_up_to_the_fall():
    starts = first_states(20, torch.Generator().manual_seed(0), torch.float64)
    assert balanced_steps(_Towards(), starts).tolist() == [200] * 20
    for start in starts:
        state, steps = start[None], 0
        while not fallen(state):
            state, steps = next_states(state, torch.tensor([0])), steps + 1
        assert balanced_steps(_Left(), start[None]).item() == steps
    assert balanced_steps(_Left(), starts[:0]).shape == (0,)


def _config(**values):
    text = tomllib.loads((ROOT / "configs/value_learning_cartpole.toml").read_text())
    base = {key: text[key] for key in ("experiment", "title", "finding", "open", "seeds", "learning_rate")}
    return Config(**base, **values)


def test_the_memory_begins_again_after_a_fall_and_the_target_is_the_gradient():
    one = run(_config(steps=2, n_transitions=300, batch_size=50, dtype="float64"), seed=1)
    for step in range(3):
        found = torch.autograd.grad(one.loss(), list(one.parameters.values()))
        torch.testing.assert_close(found, tuple(one.target().values()))
        one.after_step(step + 1)
    (trained,) = one.methods.train.values()
    ends = trained()
    assert len(ends["objective"]) == len(one.methods.steps)
    assert all(math.isfinite(value) for values in ends.values() for value in values)
    assert one.evaluate()["objective"] == ends["objective"][0]
