"""The experiment on stochastic estimators: its exact gradient, and the estimators that are compared with it."""

import math

import folders
import pytest
import torch

from experiments.stochastic import ESTIMATORS, BitCode, _estimators, _log_prob
from toolkit.runner._config import load_config

BITS = folders.CONFIGS / "stochastic_bits.toml"


def _model(n_bits=3):
    return BitCode(n_bits, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_the_exact_bound_is_the_mean_over_all_codes():
    model, generator = _model(), torch.Generator().manual_seed(1)
    pixels = (torch.rand(5, 64, generator=generator) > 0.7).double()
    logits = torch.randn(5, 3, generator=generator, dtype=torch.float64)
    expected = torch.zeros(5, dtype=torch.float64)
    for code in range(8):
        bits = torch.tensor([code >> i & 1 for i in range(3)]).double().expand(5, 3)
        expected += _log_prob(bits, logits).exp() * model.cost(bits, logits, pixels)
    torch.testing.assert_close(model.negative_bound(logits, pixels), expected)


def test_of_the_estimators_only_straight_through_is_biased():
    config = load_config(BITS, ["n_bits=3", "swept_samples=[2]", "repeats=2000"]).config
    model, generator = _model(), torch.Generator().manual_seed(2)
    with torch.no_grad():
        model.decoder.weight.mul_(10)
    pixels = (torch.rand(2, 64, generator=generator) > 0.7).double()
    found = _estimators(model, pixels, config, seed=0)
    unbiased = [name for name in ESTIMATORS if math.isnan(found[f"relative bias, {name}"][0])]
    assert unbiased == [name for name in ESTIMATORS if name != "straight-through"]
    assert found["relative bias, straight-through"][0] > 0.1
    spread = {name: found[f"relative standard deviation, {name}"][0] for name in ESTIMATORS}
    assert spread["leave-one-out baseline"] < 0.5 * spread["score function"]


@pytest.mark.parametrize("task", ["bandit", "bits", "importance"])
def test_the_same_seed_makes_the_same_run(task):
    loaded = load_config(folders.CONFIGS / f"stochastic_{task}.toml")
    losses = []
    for _ in range(2):
        run = loaded.module.run(loaded.config, 3)
        for step in range(2):
            run.optimizer.zero_grad()
            loss = run.loss()
            loss.backward()
            run.optimizer.step()
            run.after_step(step + 1)
        losses.append(loss.item())
    assert losses[0] == losses[1]
