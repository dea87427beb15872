"""The experiment on games: its targets, its other rules, and the distance by which it judges."""

import math

import pytest
import torch
from contract import relative_error
from folders import CONFIGS

from experiments.games import energy_distance, principal_components, run
from toolkit import compare
from toolkit.runner._config import load_config

KINDS = ["minimax", "non_saturating", "hinge", "wasserstein"]


def config(name, **values):
    overrides = [f"{key}={value}" for key, value in values.items()]
    return load_config(CONFIGS / f"{name}.toml", overrides).config


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["games_dirac", "games_digits"])
def test_target_is_the_gradient_of_every_update(name, kind):
    one = run(config(name, kind=kind, dtype="float64"), seed=1)
    for step in range(3):
        slopes = torch.autograd.grad(one.loss(), list(one.parameters.values()))
        assert relative_error(dict(zip(one.parameters, slopes, strict=True)), one.target()) < 1e-12
        one.optimizer.zero_grad()
        one.loss().backward()
        one.optimizer.step()
        one.after_step(step + 1)


def test_the_rules_turn_outwards_around_and_inwards():
    """The first multiplies the distance by ``sqrt(1 + rate^2)`` at every step, whatever the start."""
    one = run(config("games_dirac"), seed=2)
    found = {name: method()["objective"] for name, method in one.methods.train.items()}
    assert all(distances[0] == pytest.approx(1) for distances in found.values())
    assert 0.85 < min(found["alternating"]) < max(found["alternating"]) < 1.15
    ends = [found[name][-1] for name in ("LookAhead", "LOLA", "with the consensus correction")]
    assert ends == sorted(ends, reverse=True)
    assert ends[0] < 0.5
    place = one.evaluate()
    assert place["objective"] == pytest.approx(math.hypot(*(place[name] for name in one.plane)))


def test_the_correction_makes_the_field_more_of_a_gradient():
    swept = run(config("games_dirac"), seed=0).sweep.evaluate()
    for asymmetries in swept.values():
        assert asymmetries[0] == pytest.approx(2.0)
        assert asymmetries == sorted(asymmetries, reverse=True)
        # A bilinear field with weight g has the Jacobian [[g, 1], [-1, g]].
        assert asymmetries[-1] == pytest.approx(2 / math.sqrt(1 + 4))


def test_the_generator_of_a_minimax_game_gets_nothing_without_the_block():
    one = run(config("games_minimax"), seed=0)
    opened = compare(one.loss, one.parameters).gradient(["games.fake"])
    largest = max(slope.abs().max() for name, slope in opened.items() if name.startswith("generator"))
    assert largest < 1e-6 * max(slope.abs().max() for slope in opened.values())


def test_the_energy_distance_of_two_normal_distributions():
    """At their quantiles, so that nothing is left to chance."""
    x = torch.special.ndtri((torch.arange(1000).double() + 0.5) / 1000)[:, None]
    expected = 2 * _mean_distance(1.0, 2.0) - 2 * _mean_distance(0.0, 2.0)
    assert energy_distance(x, x + 1) == pytest.approx(expected, abs=0.01)
    assert energy_distance(x, x) == pytest.approx(0, abs=0.01)


def _mean_distance(mean, variance):
    """Return ``E|z|`` of a normal distribution."""
    deviation = math.sqrt(variance)
    return deviation * math.sqrt(2 / math.pi) * math.exp(-(mean**2) / 2 / variance) + mean * math.erf(
        mean / deviation / math.sqrt(2)
    )


def test_the_principal_components_are_standardised():
    points = principal_components()
    torch.testing.assert_close(points.T @ points / len(points), torch.eye(2).double())
