"""The experiment on curvature: its targets, its Newton methods, and a matrix for each set of blocks."""

from itertools import pairwise

import pytest
import torch
from contract import relative_error
from folders import CONFIGS

from experiments.curvature import run
from toolkit import unblock
from toolkit.curvature import HELD_OUTPUTS, LINEAR_PART
from toolkit.runner._config import load_config

KINDS = ["huber", "cauchy", "geman_mcclure", "welsch"]


def config(name, **values):
    overrides = [f"{key}={value}" for key, value in values.items()]
    return load_config(CONFIGS / f"{name}.toml", overrides).config


def gradient(one):
    slopes = torch.autograd.grad(one.loss(), list(one.parameters.values()))
    return dict(zip(one.parameters, slopes, strict=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("surrogate", ["reweighted", "half_quadratic"])
def test_target_of_the_robust_fit(surrogate, kind):
    one = run(config("curvature_robust", surrogate=surrogate, kind=kind), seed=1)
    for _ in range(2):
        assert relative_error(gradient(one), one.target()) < 1e-11
        one.loss().backward()
        one.optimizer.step()


def test_target_of_the_classifier_before_and_after_a_newton_step():
    one = run(config("curvature_newton"), seed=1)
    assert relative_error(gradient(one), one.target()) < 1e-11
    before = one.evaluate()["objective"]
    one.optimizer.step()
    assert relative_error(gradient(one), one.target()) < 1e-11
    assert one.evaluate()["objective"] < before


def test_newton_with_the_block_is_reweighted_least_squares():
    """Its updates lower the robust loss every time; without the block the method leaves for large errors."""
    one = run(config("curvature_robust", steps=20, evaluate_every=1), seed=0)
    found = {name: method()["objective"] for name, method in one.methods.train.items()}
    with_block, without = found["Newton's method with the block"], found["Newton's method without it"]
    assert all(after <= before + 1e-12 for before, after in pairwise(with_block))
    assert without[-1] > with_block[0]


def test_a_step_without_the_outputs_held_is_gradient_descent():
    one = run(config("curvature_newton", damping=0.1), seed=1)
    before = {name: value.detach().clone() for name, value in one.parameters.items()}
    slopes = gradient(one)
    with unblock(HELD_OUTPUTS):
        one.optimizer.step()
    moved = {name: before[name] - value.detach() for name, value in one.parameters.items()}
    assert relative_error(moved, {name: slope / 0.1 for name, slope in slopes.items()}) < 1e-9


def test_the_matrix_is_not_negative_with_the_blocks_alone():
    smallest = []
    for opened in ([], [LINEAR_PART, HELD_OUTPUTS]):
        one = run(config("curvature_newton", hidden=3), seed=1)
        with unblock(*opened):
            slopes = torch.autograd.grad(one.loss(), list(one.parameters.values()), create_graph=True)
            flat = torch.cat([slope.flatten() for slope in slopes])
            rows = [torch.autograd.grad(f, list(one.parameters.values()), retain_graph=True) for f in flat]
        matrix = torch.stack([torch.cat([part.flatten() for part in row]) for row in rows])
        smallest.append(torch.linalg.eigvalsh(matrix)[0].item())
    assert smallest[0] > -1e-12
    assert smallest[1] < -0.01
