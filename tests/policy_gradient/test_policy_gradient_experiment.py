"""The worlds of the experiment, and its findings where they are exact."""

import folders
import pytest
import torch

from experiments._gridworld import four_rooms
from experiments.policy_gradient import _weights_of_images
from toolkit.gradients import compare
from toolkit.runner._config import load_config


def world(seed=3, slip=0.1):
    generator = torch.Generator().manual_seed(seed)
    return four_rooms(generator, discount=0.95, slip=slip, dtype=torch.float64, device="cpu")


def test_a_move_leads_somewhere_unless_it_ends_the_episode():
    rooms = world()
    assert rooms.start.shape == (104,)
    torch.testing.assert_close(rooms.start.sum().item(), 1.0)
    goal = int(rooms.start.argmin())
    leaves = rooms.transitions.sum(-1)
    assert (leaves[:, goal] == 0).all()
    others = torch.arange(104) != goal
    torch.testing.assert_close(leaves[:, others], torch.ones(4, 103, dtype=torch.float64))
    assert ((rooms.rewards > 0).sum(0) > 0).all()


def test_values_visits_and_returns_agree_with_a_long_sum():
    rooms = world()
    policy = torch.randn(104, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64).softmax(-1)
    inner = torch.einsum("sa,ast->st", policy, rooms.transitions)
    here, visits = rooms.start, torch.zeros_like(rooms.start)
    for t in range(800):
        visits += 0.95**t * here
        here = here @ inner
    torch.testing.assert_close(rooms.visits(policy), visits)
    expected = (visits[:, None] * policy * rooms.rewards).sum()
    torch.testing.assert_close(rooms.expected_return(policy), expected)


def test_the_best_return_is_that_of_value_iteration():
    rooms = world()
    values = torch.zeros(104, dtype=torch.float64)
    for _ in range(800):
        later = rooms.rewards + 0.95 * torch.einsum("ast,t->sa", rooms.transitions, values)
        values = later.amax(-1)
    assert rooms.best_return() == pytest.approx((rooms.start @ values).item())


def test_an_open_weight_turns_the_first_gradient_of_the_policy_round():
    """At equal probabilities each term is multiplied by ``1 - log 4``."""
    loaded = load_config(folders.CONFIGS / "policy_gradient_gridworld.toml")
    run = loaded.module.run(loaded.config, 0)
    found = compare(run.loss, run.parameters)
    opened = found.gradient(["policy_gradient.importance_weights"])["logits"]
    factor = 1 - torch.tensor(4.0, dtype=torch.float64).log()
    torch.testing.assert_close(opened, factor * found.blocked["logits"], rtol=1e-10, atol=1e-16)


def test_a_critic_that_the_policy_moves_is_pulled_up_by_the_entropy():
    """Its gradient is the visits times ``v - J`` with the block, and times ``v - J - H`` without it."""
    loaded = load_config(folders.CONFIGS / "policy_gradient_gridworld.toml")
    run = loaded.module.run(loaded.config, 0)
    logits = run.parameters["logits"]
    with torch.no_grad():
        logits += torch.randn(logits.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        run.parameters["values"].fill_(1.0)
        of_one = run.target()["values"]
        run.parameters["values"].zero_()
        visits = of_one - run.target()["values"]
    policy = logits.detach().softmax(-1)
    entropy = -(policy * policy.log()).sum(-1)
    found = compare(run.loss, run.parameters)
    opened = found.gradient(["policy_gradient.advantage"])
    torch.testing.assert_close(opened["logits"], found.blocked["logits"])
    torch.testing.assert_close(opened["values"], found.blocked["values"] - visits * entropy)


def test_each_standard_of_comparison_has_its_weight():
    found = list(_weights_of_images((0.01, 0.5, 0.9), 4).values())
    assert found[0] == pytest.approx([1.0] * 3)
    assert found[1] == pytest.approx([0.75] * 3)
    assert max(found[2]) / min(found[2]) < 1.08
    assert max(found[3]) / min(found[3]) > 1.8
