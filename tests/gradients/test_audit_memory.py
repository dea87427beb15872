"""Recorded regions keep a graph: the memory that they take is bounded, and told."""

import os
import subprocess
import sys

import pytest
import torch
from folders import ROOT
from torch import nn

from toolkit import audited, stop_recording
from toolkit.gradients import _resident
from toolkit.gradients._resident import RegionMemory

MB = 10**6

ROLLOUT = """
import torch
from torch import nn

torch.manual_seed(0)
policy, value = nn.Sequential(nn.Linear(512, 512), nn.Tanh()), nn.Linear(512, 1)
optimiser = torch.optim.Adam([*policy.parameters(), *value.parameters()])
for update in range(2):
    state = torch.randn(256, 512)
    with torch.no_grad():
        for _ in range(300):
            state = policy(state).sin()
    with torch.no_grad():
        baseline = value(state)
    scale = policy[0].weight.norm().detach()
    loss = ((value(policy(state)) - baseline - state.mean()).square() * scale).mean()
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()
"""


class _Sizes:
    """A process that grows by a number of bytes at each step of a rollout."""

    def __init__(self, monkeypatch, growth):
        self.size, self.growth = 0, growth
        monkeypatch.setattr(_resident, "_sizes", lambda: {"the process": self.size})
        monkeypatch.setattr(_resident, "_CALLS_PER_LOOK", 1)

    def step(self, policy, state):
        self.size += self.growth
        return policy(state).sin()


@pytest.fixture
def policy():
    torch.manual_seed(0)
    return nn.Linear(3, 3)


def _gradients(model):
    found = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    return found


def _audited(policy, loss, **options):
    """Return the answer for a loss, which has its plain gradients."""
    loss().backward()
    plain = _gradients(policy)
    with audited(policy, **options) as answer:
        value = loss()
        assert torch.is_grad_enabled()
        value.backward()
    assert all(map(torch.equal, _gradients(policy), plain))
    (audit,) = answer.audits
    return audit


def _rollout(sizes, policy, n_steps, region=torch.no_grad):
    state = torch.ones(2, 3)
    with region():
        for _ in range(n_steps):
            state = sizes.step(policy, state)
    return state


def _kinds(audit):
    return [effect.verdict.kind for effect in audit.effects]


@pytest.mark.slow
def test_a_rollout_is_not_recorded_beyond_the_bound(tmp_path):
    """Its 300 steps keep two tensors of 0.52 MB each, 315 MB; the heap has some of it at the start."""
    (tmp_path / "train.py").write_text(ROLLOUT)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

    def run(*options):
        command = [sys.executable, "-m", "toolkit", "audit", "train.py", "--step", "2", "--verify", *options]
        found = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
        return found.stdout

    whole, bounded = run(), run("--memory", "100")
    assert "3 stops: 3 load-bearing" in whole
    grown = int(whole.partition("the process grew by ")[2].partition(" MB")[0])
    assert 200 < grown < 400
    assert "3 stops: 2 load-bearing" in bounded
    (small,) = (line for line in bounded.splitlines() if line.startswith("train.py:13:5 "))
    assert "makes the gradient" in small, "a small region after it is still recorded"
    assert "not opened: no_grad at train.py:10:5: the process grew by 1" in bounded
    assert "in recorded regions, more than the bound `memory`, 100 MB" in bounded
    assert "`--rerun`" not in bounded, "a further run without the region would take the same memory"
    assert whole.endswith(bounded.splitlines()[-1] + "\n")
    assert "verified" in bounded


@pytest.mark.parametrize("region", [torch.no_grad, torch.inference_mode])
def test_recording_ends_inside_of_a_region(monkeypatch, policy, region):
    sizes = _Sizes(monkeypatch, 10 * MB)

    def loss():
        state = _rollout(sizes, policy, 50, region).clone()
        return (policy(state) - state.sum()).square().mean() * policy.weight.norm().detach()

    audit = _audited(policy, loss, memory=100)
    (entry,) = audit.unopened
    assert entry.reason == "the process grew by 110 MB in recorded regions, more than the bound `memory`, 100 MB"
    assert _kinds(audit) == ["partial"]
    assert audit.remarks == ["the process grew by 110 MB in recorded regions, which keep a graph"]


def test_recording_ends_inside_of_a_named_region(monkeypatch, policy):
    sizes = _Sizes(monkeypatch, 10 * MB)

    def loss():
        state = _rollout(sizes, policy, 50, lambda: stop_recording("memory.rollout"))
        return (policy(state) - state.sum()).square().mean()

    audit = _audited(policy, loss, memory=100)
    assert [entry.site for entry in audit.unopened] == ["memory.rollout"]
    assert audit.effects == []


def test_the_rest_of_an_outer_region_is_not_recorded(monkeypatch, policy):
    """The end of the inner region switches recording on again, in a plain program as well as here."""
    sizes = _Sizes(monkeypatch, 10 * MB)

    def loss():
        with torch.no_grad():
            state = _rollout(sizes, policy, 50)
            weight = policy(state).mean()
            with torch.enable_grad():
                inner = policy(state).mean()
        return (policy(state) - weight).square().mean() + inner

    audit = _audited(policy, loss, memory=100)
    assert len(audit.unopened) == 2
    assert audit.effects == []


def test_a_small_region_after_a_large_one_is_opened(monkeypatch, policy):
    sizes = _Sizes(monkeypatch, 10 * MB)

    def loss():
        state = _rollout(sizes, policy, 50)
        target = _rollout(sizes, policy, 2)  # the same place
        with torch.no_grad():
            bonus = sizes.step(policy, state).sum()
        return (policy(state) - target * bonus).square().mean()

    audit = _audited(policy, loss, memory=100)
    assert len(audit.unopened) == 1
    assert _kinds(audit) == ["partial"]


def test_regions_are_recorded_within_the_bound(monkeypatch, policy):
    sizes = _Sizes(monkeypatch, 10 * MB)

    def loss():
        state = _rollout(sizes, policy, 5)
        sizes.size += 1000 * MB  # outside
        return (policy(state) - state.sum()).square().mean()

    audit = _audited(policy, loss, memory=100)
    assert (_kinds(audit), audit.unopened, audit.remarks) == (["partial"], [], [])


def test_memory_that_is_freed_outside_does_not_count(monkeypatch):
    size = [0]
    monkeypatch.setattr(_resident, "_sizes", lambda: {"the process": size[0]})
    memory = RegionMemory(100)
    for _ in range(10):
        memory.enter()
        size[0] += 50 * MB
        memory.look()
        size[0] -= 50 * MB
    assert memory.excess == ""
    assert memory.remarks == []


def test_without_a_bound_it_is_half_of_the_free_memory(monkeypatch, tmp_path):
    monkeypatch.setattr(_resident, "_sizes", lambda: {"the process": size})
    monkeypatch.setattr(_resident, "_free", lambda _: 1000 * MB)
    size = 0
    memory = RegionMemory()
    size = 501 * MB
    memory.look()
    assert memory.excess.endswith("grew by 501 MB in recorded regions, more than half of the free memory, 500 MB")
    monkeypatch.undo()
    assert 0 < _resident._free_of_machine() < 2**50
    for name, text in {"max": "4000\n", "current": "3000\n", "stat": "anon 1\ninactive_file 500\n"}.items():
        assert _resident._free_of_group(tmp_path) == float("inf")
        (tmp_path / f"memory.{name}").write_text(text)
    assert _resident._free_of_group(tmp_path) == 1500
    (tmp_path / "memory.max").write_text("max\n")
    assert _resident._free_of_group(tmp_path) == float("inf")


def test_the_size_of_a_process_grows_with_its_tensors():
    before = _resident._resident()
    kept = torch.ones(25_000_000)
    assert 90 * MB < _resident._resident() - before < 150 * MB
    assert kept.sum() > 0


@pytest.mark.parametrize("bound", [-1, float("nan"), "much", True])
def test_a_bound_that_is_no_amount_is_refused(bound):
    with pytest.raises(ValueError, match="`memory` should be finite and not negative"), audited(memory=bound):
        pass
