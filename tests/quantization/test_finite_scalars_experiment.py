"""The experiment on finite scalars: its hand-written gradient, and its other methods."""

import folders
import pytest
from runs import assert_target_is_blocked_gradient

from experiments import finite_scalars as experiment
from toolkit.runner._config import load_config

SMALL = ["steps=3", "evaluate_every=2", "batch_size=16", "width=8", "dtype='float64'"]


def config(*overrides):
    return load_config(folders.CONFIGS / "quantization_levels.toml", [*SMALL, *overrides]).config


@pytest.mark.parametrize("levels", ["[5, 3]", "[4, 7, 2]"])
def test_the_witness_is_the_blocked_gradient(levels):
    assert_target_is_blocked_gradient(experiment.run(config(f"levels={levels}"), 0), rtol=1e-10)


def test_bounded_coordinates_use_the_same_codes_before_training():
    run = experiment.run(config(), 1)
    start = run.evaluate()
    bounded, learnt = (train() for train in run.methods.train.values())
    for name in ("codes used", "perplexity"):
        assert bounded[name][0] == start[name]
    assert bounded["objective"][0] != start["objective"]
    assert learnt["codes used"][0] > start["codes used"]
