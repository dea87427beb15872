"""Restricted Boltzmann machines, and the contrastive divergence that trains them."""

from toolkit.rbm._chains import gibbs
from toolkit.rbm._divergence import (
    NEGATIVE_SAMPLES,
    PERSISTENT_CHAINS,
    cd_gradient,
    contrastive_divergence,
    likelihood_gradient,
    persistent_contrastive_divergence,
)
from toolkit.rbm._fused import FusedTrainer
from toolkit.rbm._model import ENUMERABLE_UNITS, RBM, base_rate_bias
from toolkit.rbm._units import STRAIGHT_THROUGH, Chain

__all__ = [
    "ENUMERABLE_UNITS",
    "NEGATIVE_SAMPLES",
    "PERSISTENT_CHAINS",
    "RBM",
    "STRAIGHT_THROUGH",
    "Chain",
    "FusedTrainer",
    "base_rate_bias",
    "cd_gradient",
    "contrastive_divergence",
    "gibbs",
    "likelihood_gradient",
    "persistent_contrastive_divergence",
]
