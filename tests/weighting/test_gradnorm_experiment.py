"""The experiment on GradNorm: its tasks, its hand-written gradient, and its other methods."""

import folders
import pytest
import torch
from runs import assert_methods_begin_with, assert_target_is_blocked_gradient

from experiments import gradnorm
from toolkit import unblock
from toolkit.runner._config import load_config
from toolkit.weighting import GRADNORM_TARGET

SMALL = ["steps=3", "evaluate_every=2", "batch_size=16", "dtype='float64'"]


def config(*overrides):
    return load_config(folders.CONFIGS / "weighting_gradnorm.toml", [*SMALL, *overrides]).config


def test_the_witness_is_the_blocked_gradient():
    assert_target_is_blocked_gradient(gradnorm.run(config(), 0))


def test_other_methods_begin_where_the_run_begins():
    assert_methods_begin_with(gradnorm.run(config(), 1))


def test_the_centre_of_a_single_pixel_is_its_place():
    image = torch.zeros(2, 4, 4)
    image[0, 1, 3], image[1, 0, 0], image[1, 3, 0] = 2.0, 1.0, 3.0
    torch.testing.assert_close(gradnorm._centre(image.flatten(1)), torch.tensor([[0.375, 0.875], [0.6875, 0.125]]))


def test_divided_weights_keep_their_mean():
    for divided in (True, False):
        made = gradnorm._Learner(config("weight_rate=0.2"), 0, divided=divided)
        made.optimizer.zero_grad()
        made.loss().backward()
        made.optimizer.step()
        made.advance(1)
        assert len(made.weights.unique()) > 1
        assert (made.weights.mean().item() == pytest.approx(1)) == divided


def test_open_goals_lower_all_weights_together():
    """The open gradient is the blocked one less a share of each norm; its product with the weights is the loss itself.

    The loss is homogeneous in the weights, so a step against the open gradient shrinks them.
    """
    made = gradnorm._Learner(config(), 0)
    with unblock(GRADNORM_TARGET):
        loss = made.loss()
        (slope,) = torch.autograd.grad(loss, made.weights)
    of_networks = (made.weights.detach() * made.losses(made.batches.inputs, made.batches.labels)).sum()
    torch.testing.assert_close((slope * made.weights).sum(), loss - of_networks)
