"""The experiment on MixStyle: its hand-written gradient, and its other methods."""

import folders
import torch
from runs import assert_methods_begin_with, assert_target_is_blocked_gradient

from experiments import mixstyle
from toolkit import weighting
from toolkit.runner._config import load_config

SMALL = ["steps=3", "evaluate_every=2", "batch_size=16", "dtype='float64'"]


def config(*overrides):
    return load_config(folders.CONFIGS / "weighting_mixstyle.toml", [*SMALL, *overrides]).config


def test_the_witness_is_the_blocked_gradient():
    assert_target_is_blocked_gradient(mixstyle.run(config(), 0))


def test_other_methods_begin_where_the_run_begins():
    assert_methods_begin_with(mixstyle.run(config(), 1))


def test_the_affine_form_of_mixed_styles_is_their_value():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 3, 4, 4, generator=generator, dtype=torch.float64)
    partners, shares = torch.tensor([1, 0, 4, 2, 3]), torch.rand(5, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(
        mixstyle._scaled_and_shifted(x, partners, shares), weighting.mixstyle(x, partners, shares)
    )
