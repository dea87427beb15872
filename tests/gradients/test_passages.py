"""Passages through recorded regions: found by the numbers of their nodes, in a time in proportion to their number."""

import random

import torch
from torch import nn

from toolkit import audited
from toolkit.gradients._passages import Passages, Region


def test_the_regions_around_a_node_are_those_that_hold_its_number(monkeypatch):
    """Any order of beginnings and ends, as of generators, held against a look at every passage."""
    draw, number = random.Random(0), 0
    monkeypatch.setattr("toolkit.gradients._passages.next_number", lambda: number)
    for _ in range(200):
        number, passages, everyone = 100, Passages(), []
        for name in "abcdefghij":
            number += draw.randrange(3)
            everyone.append(passages.begin(name))
            for region in draw.sample(passages.active, draw.randrange(len(passages.active) + 1)):
                number += draw.randrange(2)
                passages.end(region)
        for at in range(95, number + 5):
            assert passages.around(at) == {region.name for region in everyone if region.holds(at)}
        number = 50
        everyone.append(passages.begin("in another thread"))
        assert passages.around(120) == {region.name for region in everyone if region.holds(120)}


def test_many_passages_take_a_time_in_proportion(monkeypatch):
    """A rollout enters `no_grad` at each of its steps."""
    looked, holds, policy = [0], Region.holds, nn.Linear(3, 3)

    def counting(region, number):
        looked[0] += 1
        return holds(region, number)

    monkeypatch.setattr(Region, "holds", counting)

    def looks(n_steps):
        looked[0], state = 0, torch.ones(2, 3)
        with audited(policy) as answer:
            for _ in range(n_steps):
                with torch.no_grad():
                    state = policy(state)
            (policy(state) - state).square().mean().backward()
        assert len(answer.audits[0].effects) == 1
        return looked[0]

    assert looks(80) < 2.5 * looks(40)
