"""Every public function on an accelerator, and on the CPU where the accelerator is the default device."""

import functools
import importlib
import sys
from unittest import mock

import calls
import pytest
import torch
from accelerator import ACCELERATOR
from each import each
from torch.utils._pytree import tree_leaves

# Their calls make tensors or modules of their own, on the default device.
MAKERS = {
    *("adversarial.Normalize", "adversarial.mlp", "adversarial.preactivation_resnet18", "adversarial.small_cnn"),
    *("datasets.bars_and_stripes", "datasets.two_gaussians", "rbm.BernoulliRBM", "rbm.FusedTrainer", "rbm.RBM"),
    *("rbm.adapt_temperatures", "rbm.spread_temperatures", "rbm.train", "self_supervised.DINOLoss"),
    *("quantization.ResidualVectorQuantizer", "quantization.ResidualVectorQuantizer.forward"),
    *(
        "quantization.ResidualVectorQuantizer.start",
        "quantization.VectorQuantizer",
        "quantization.VectorQuantizer.start",
    ),
    *("quantization.VectorQuantizer.forward", "self_supervised.KeyQueue", "stochastic.relaxed_bernoulli"),
    *("quantization.FiniteScalarQuantizer", "weighting.BatchRenorm", "weighting.karras_times"),
}

pytestmark = pytest.mark.gpu
every_call = each("name", [name for name in calls.CALLS if name not in MAKERS])


@functools.cache
def _calls_there():
    """Return the module of calls, made anew on the accelerator."""
    here = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split("_")[0] == "calls"}
    try:
        with torch.device(ACCELERATOR):
            return importlib.import_module("calls")
    finally:
        sys.modules.update(here)


def _seeded(device):
    return torch.Generator(device).manual_seed(0)


def _devices(result):
    """Return the kinds of devices of the tensors in a result."""
    if not isinstance(result, torch.Tensor) and hasattr(result, "__dict__"):
        result = vars(result)
    return {leaf.device.type for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)}


@every_call
def test_what_is_on_an_accelerator_stays_there(name):
    there = _calls_there()
    with mock.patch.object(there, "_generator", functools.partial(_seeded, ACCELERATOR)):
        assert _devices(there.CALLS[name]()) <= {ACCELERATOR}


@every_call
def test_what_is_on_the_cpu_stays_there(name):
    with torch.device(ACCELERATOR), mock.patch.object(calls, "_generator", functools.partial(_seeded, "cpu")):
        assert _devices(calls.CALLS[name]()) <= {"cpu"}
