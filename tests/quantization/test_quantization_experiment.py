"""The parts of the experiments on quantization: the step in each stage, and the hand-written gradients."""

import math

import pytest
import torch

from experiments.quantization import Autoencoder, Config, SpikingClassifier, run, step_in_each_stage
from toolkit import unblock
from toolkit.datasets import Dataset
from toolkit.quantization import RESET


def config(task, **values) -> Config:
    given = {"experiment": "quantization", "title": "T", "finding": "F", "open": [[]], "steps": 1}
    return Config(**{**given, "learning_rate": 0.01, "task": task, "batch_size": 8, **values})


def images() -> torch.Tensor:
    return torch.rand(40, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def autoencoder(**values) -> Autoencoder:
    sizes = {"dim": 3, "codebook_size": 5, "width": 6, **values}
    return Autoencoder(config("autoencode_digits", **sizes), images(), torch.Generator().manual_seed(0)).eval()


@pytest.mark.parametrize("stages", [1, 3])
def test_a_step_in_each_stage_multiplies_the_gradient_of_the_encoder(stages):
    model = autoencoder(n_quantizers=stages)
    z = model.encoder(images()).detach().requires_grad_()
    right, indices, loss = model.quantizer(z)
    assert indices.shape == (40, stages)
    found, its_loss = step_in_each_stage(model.quantizer, z)
    torch.testing.assert_close(found, right)
    torch.testing.assert_close(its_loss, loss)
    c = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    (slope,) = torch.autograd.grad((found @ c).sum(), z)
    torch.testing.assert_close(slope, (stages * c).expand(40, 3))


def test_the_factor_of_the_stages_is_a_divided_commitment():
    """``M c + 2 beta d`` is M times ``c + 2 (beta / M) d``: Adam sees no difference."""
    one, other = (autoencoder(n_quantizers=4, commitment=beta) for beta in (0.8, 0.2))
    z = one.encoder(images())
    codes, loss = step_in_each_stage(one.quantizer, z)
    in_each_stage = torch.nn.functional.mse_loss(one.decoder(codes), images()) + loss
    found = torch.autograd.grad(in_each_stage, list(one.encoder.parameters()))
    expected = torch.autograd.grad(other.loss(images()), list(other.encoder.parameters()))
    for slope, its_slope in zip(found, expected, strict=True):
        torch.testing.assert_close(slope, 4 * its_slope)


def test_codebooks_start_at_the_k_means_of_the_latent_vectors():
    model = autoencoder()
    assert len(model.quantizer(model.encoder(images())).indices.unique()) == 5
    assert [codebook.shape for codebook in model.codebooks] == [(5, 3)]


@pytest.mark.parametrize("surrogate", ["sigmoid", "arctan", "fast sigmoid"])
def test_the_gradient_through_time_is_the_blocked_one(surrogate):
    made = run(config("spike_digits", width=5, surrogate=surrogate, steepness=3.0, time_steps=4), 0)
    found = torch.autograd.grad(made.loss(), list(made.parameters.values()))
    for slope, expected in zip(found, made.target().values(), strict=True):
        torch.testing.assert_close(slope, expected)
    with unblock(RESET):
        opened = torch.autograd.grad(made.loss(), list(made.parameters.values()))
    assert not torch.allclose(opened[0], found[0])


def test_a_spiking_classifier_reads_rates():
    data = Dataset(images(), torch.arange(40) % 4, "images")
    model = SpikingClassifier(config("spike_digits", width=5, time_steps=3), data, torch.Generator().manual_seed(0))
    spikes, _ = model.activity(data.inputs)
    assert spikes.shape == (3, 40, 5)
    torch.testing.assert_close(model(data.inputs), model.readout(spikes.mean(0)))


def test_the_swept_ratio_exists_only_while_the_block_is_in_place():
    made = run(config("spike_digits", width=5, time_steps=3, swept_steepness=(1.0, 5.0)), 0)
    assert all(ratio > 0 for ratios in made.sweep.evaluate().values() for ratio in ratios)
    with unblock(RESET):
        made.loss()
        assert all(math.isnan(ratio) for ratios in made.sweep.evaluate().values() for ratio in ratios)
