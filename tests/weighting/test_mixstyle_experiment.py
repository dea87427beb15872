"""The experiment on MixStyle: its hand-written gradient, and its other methods."""

import folders
import pytest
import torch

from experiments import mixstyle
from toolkit import weighting
from toolkit.runner._config import load_config

SMALL = ["steps=3", "evaluate_every=2", "batch_size=16", "dtype='float64'"]


def config(*overrides):
    return load_config(folders.CONFIGS / "weighting_mixstyle.toml", [*SMALL, *overrides]).config


def test_the_witness_is_the_blocked_gradient():
    run = mixstyle.run(config(), 0)
    names = list(run.parameters)
    found = torch.autograd.grad(run.loss(), [run.parameters[name] for name in names])
    target = run.target()
    for name, slope in zip(names, found, strict=True):
        torch.testing.assert_close(slope, target[name], rtol=1e-9, atol=1e-13)


def test_other_methods_begin_where_the_run_begins():
    run = mixstyle.run(config(), 1)
    start = run.evaluate()
    for train in run.methods.train.values():
        assert {name: values[0] for name, values in train().items()} == pytest.approx(start)


def test_the_affine_form_of_mixed_styles_is_their_value():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 3, 4, 4, generator=generator, dtype=torch.float64)
    partners, shares = torch.tensor([1, 0, 4, 2, 3]), torch.rand(5, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(
        mixstyle._scaled_and_shifted(x, partners, shares), weighting.mixstyle(x, partners, shares)
    )
