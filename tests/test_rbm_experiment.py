"""The contrastive-divergence experiment: what it trains on, that a step is what it says, and what its configs find."""

import math
from pathlib import Path

import pytest
import torch
from contract import relative_error

from experiments._config import load_config
from experiments._training import train
from experiments.rbm import Config, _images, run
from toolkit import unblock
from toolkit.rbm import (
    NEGATIVE_SAMPLES,
    PERSISTENT_CHAINS,
    RBM,
    STRAIGHT_THROUGH,
    base_rate_bias,
    persistent_contrastive_divergence,
)

CONFIGS = sorted((Path(__file__).parent.parent / "configs").glob("rbm_*.toml"))


def _config(name: str, **values) -> Config:
    file = next(file for file in CONFIGS if file.stem == f"rbm_{name}")
    return load_config(file).config.model_copy(update=values)


def _gradient(loss, parameters):
    return dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_target_is_the_gradient_of_every_update(file):
    """Also after updates: the witness makes the draws that the next loss makes, and spoils none of them."""
    config = load_config(file).config
    one = run(config, seed=1)
    for step in range(1, 4):
        target = one.target()
        one.evaluate()
        loss = one.loss()
        assert torch.equal(loss, one.loss())
        tolerance = 1e-12 if config.dtype == "float64" else 1e-5
        assert relative_error(_gradient(loss, one.parameters), target) < tolerance
        one.optimizer.zero_grad()
        one.loss().backward()
        one.optimizer.step()
        one.after_step(step)
        assert one.loss() != loss


def test_training_is_the_plain_loop():
    """Two persistent updates written out: the second goes on with the chains, and with the draws, of the first."""
    config = _config("persistent", steps=2, learning_rate=0.25)
    one = run(config, seed=3)
    train(one, config)

    generator, draws = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    images, _ = _images(config)
    rbm = RBM(9, config.n_hidden, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        rbm.visible_bias.copy_(base_rate_bias(images))
    torch.randperm(140, generator=generator)  # the order of the images, all of which are in the one batch
    chains = images[torch.randint(140, (280,), generator=generator)]
    parameters = dict(rbm.named_parameters())
    for _ in range(2):
        loss, chains = persistent_contrastive_divergence(rbm, images, chains, steps=1, generator=draws)
        gradients = _gradient(loss, parameters)
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter -= 0.25 * gradients[name]
    assert relative_error(one.parameters, parameters) < 1e-13


def test_objective_of_bars_and_stripes_is_exact_and_its_best_is_the_entropy():
    one = run(_config("mean_field"), seed=0)
    metrics = one.evaluate()
    assert one.objective.best == -math.log(14)
    # At the start all 512 images are about equally likely.
    assert metrics["objective"] == pytest.approx(-math.log(512), abs=0.02)
    assert metrics["probability of drawing a bar or stripe image"] == pytest.approx(14 / 512, rel=0.02)


def test_digits_are_held_out_zeros_and_ones():
    config = _config("digits")
    images, held_out = _images(config)
    assert (len(images), len(held_out)) == (1437, 360)
    assert set(images.unique().tolist()) == set(held_out.unique().tolist()) == {0.0, 1.0}
    rate = base_rate_bias(images).sigmoid()
    independent_pixels = (held_out * rate.log() + (1 - held_out) * (1 - rate).log()).sum(1).mean().item()
    # At the start the machine is hardly more than the base rate of each pixel.
    assert run(config, seed=0).evaluate()["objective"] == pytest.approx(independent_pixels, abs=0.02)


def test_sampled_runs_are_identical_with_and_without_the_block():
    config = _config("digits", steps=30, evaluate_every=30)
    blocked = train(run(config, seed=0), config)
    with unblock(NEGATIVE_SAMPLES):
        opened = train(run(config, seed=0), config)
    assert blocked == opened


@pytest.mark.parametrize("name", ["straight_through", "persistent"])
def test_straight_through_draws_need_the_block(name):
    config = _config(name, steps=500, evaluate_every=500)
    blocked = train(run(config, seed=0), config)
    with unblock(NEGATIVE_SAMPLES):
        opened = train(run(config, seed=0), config)
    other = [NEGATIVE_SAMPLES, STRAIGHT_THROUGH] if name == "straight_through" else [PERSISTENT_CHAINS]
    with unblock(*other):
        harmless = train(run(config, seed=0), config)
    assert blocked.metrics["objective"][-1] > opened.metrics["objective"][-1] + 0.8
    assert harmless.metrics["objective"][-1] == pytest.approx(blocked.metrics["objective"][-1], abs=1e-6)


def test_mean_field_rises_and_falls_with_the_block_and_stalls_without():
    config = _config("mean_field", steps=1000, evaluate_every=100)
    blocked = train(run(config, seed=0), config).metrics["objective"]
    with unblock(NEGATIVE_SAMPLES):
        opened = train(run(config, seed=0), config).metrics["objective"]
    assert max(blocked) > max(opened) + 0.3
    assert blocked[-1] < opened[-1] - 0.3
    assert opened[-1] - opened[5] < 0.05
