"""The experiment on the number of steps: what is measured for each, and against what."""

import tomllib

import pytest
import torch
import torch.nn.functional as F
from contract import relative_error
from folders import CONFIGS

from experiments.adversarial_steps import Config, run, worst_examples
from toolkit import unblock
from toolkit.adversarial import EXAMPLE, certify_linear
from toolkit.datasets import Dataset, digits
from toolkit.runner._training import train

FILE = CONFIGS / "adversarial_steps.toml"


def config(**changes: object) -> Config:
    values = tomllib.loads(FILE.read_text())
    small = {"attack_steps": [1, 8], "clean_steps": 60, "worst_starts": 2, "worst_steps": 60, "steps": 2, "widths": [8]}
    return Config(**(values | small | changes))


def test_worst_examples_of_a_linear_model_are_exact() -> None:
    """With two classes the cross entropy is largest where the margin is least, and that is known."""
    data = digits(dtype=torch.float64)
    rows = data.labels < 2
    pair = Dataset(data.inputs[rows][:40], data.labels[rows][:40], "0 and 1")
    weight = torch.randn(2, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    worst = worst_examples(
        lambda x: x @ weight.T, pair, epsilon=0.5, starts=2, steps=200, generator=torch.Generator().manual_seed(1)
    )
    margin = certify_linear(weight, None, pair.inputs, pair.labels, epsilon=0.5, norm="l2")
    found = F.cross_entropy(worst @ weight.T, pair.labels, reduction="none")
    torch.testing.assert_close(found, F.softplus(-margin), rtol=0, atol=1e-6)
    assert ((worst - pair.inputs).norm(dim=1) <= 0.5 + 1e-12).all()


@pytest.mark.slow
def test_runs_of_a_seed_are_the_same() -> None:
    settings = config()
    state = torch.get_rng_state()
    first, second = (train(run(settings, seed=1), settings).metrics for _ in range(2))
    assert first == second
    assert torch.equal(torch.get_rng_state(), state)
    assert first != train(run(settings, seed=2), settings).metrics


def test_blocked_gradient_is_the_target_and_the_open_one_is_not() -> None:
    experiment = run(config(), seed=0)
    names, leaves = list(experiment.parameters), list(experiment.parameters.values())
    target = experiment.target()
    blocked = dict(zip(names, torch.autograd.grad(experiment.loss(), leaves), strict=True))
    with unblock(EXAMPLE):
        opened = dict(zip(names, torch.autograd.grad(experiment.loss(), leaves), strict=True))
    assert relative_error(blocked, target) < 1e-13
    assert relative_error(opened, target) > 0.05


@pytest.mark.slow
def test_networks_of_other_numbers_of_steps_do_not_meet() -> None:
    """A network is trained as if it were alone."""
    both, alone = (run(config(attack_steps=steps), seed=0) for steps in ([1, 8], [8]))
    for experiment, settings in ((both, config()), (alone, config(attack_steps=[8]))):
        train(experiment, settings)
    assert alone.parameters
    for name, value in alone.parameters.items():
        assert torch.equal(both.parameters[name], value)


@pytest.mark.slow
def test_many_steps_need_the_block_and_one_does_not() -> None:
    """The finding, at the start of training on one seed: relative errors to the gradient of the worst case, memory."""
    settings = config(attack_steps=[1, 20], clean_steps=600, widths=[32], worst_starts=4, worst_steps=200)
    blocked = run(settings, seed=0).sweep.evaluate()
    with unblock(EXAMPLE):
        opened = run(settings, seed=0).sweep.evaluate()
    error, peak = "relative error of the first gradient to that of the worst case", "peak of memory of a gradient (MiB)"
    assert opened[error][0] < blocked[error][0]
    assert blocked[error][1] < opened[error][1]
    assert blocked[peak][1] == pytest.approx(blocked[peak][0], rel=0.2)
    assert opened[peak][1] > 8 * blocked[peak][1]
