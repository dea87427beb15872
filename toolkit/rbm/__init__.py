"""Restricted Boltzmann machines and their training by contrastive divergence."""

from typing import TYPE_CHECKING

from toolkit._distributed import rank_generator, shard
from toolkit._divergence import DivergenceError
from toolkit._lazy import lazy
from toolkit.rbm import bias
from toolkit.rbm.annealing import (
    LogPartition,
    Sandwich,
    ais,
    reverse_ais,
    salakhutdinov_schedule,
    sandwich,
)
from toolkit.rbm.chains.gibbs import gibbs
from toolkit.rbm.chains.langevin import HiddenInMoves, gibbs_langevin
from toolkit.rbm.chains.state import TemperedState
from toolkit.rbm.chains.tempering import (
    Swaps,
    TemperingDiagnosis,
    adapt_temperatures,
    diagnose_tempering,
    parallel_tempering,
    spread_temperatures,
    swap_probabilities,
    tempered_start,
)
from toolkit.rbm.chains.trajectory import TrajectoryRatios, trajectory_tempering
from toolkit.rbm.chains.units import STRAIGHT_THROUGH, Chain
from toolkit.rbm.evaluation import (
    EstimatedLogLikelihood,
    estimated_log_likelihood,
    pseudo_log_likelihood,
    reconstruction_error,
)
from toolkit.rbm.machine.enumeration import exact_samples
from toolkit.rbm.machine.joint import Joint
from toolkit.rbm.machine.layers import (
    Bernoulli,
    Categorical,
    Gaussian,
    Layer,
    Rectified,
)
from toolkit.rbm.machine.model import (
    ENUMERABLE_UNITS,
    RBM,
    HiddenUnits,
    VisibleUnits,
    base_rate_bias,
)
from toolkit.rbm.surrogates.centering import (
    CENTERED_COORDINATES,
    CENTERING_OFFSETS,
    Offsets,
    centered,
    centered_contrastive_divergence,
    centered_gradient,
    centering_offsets,
)
from toolkit.rbm.surrogates.divergence import (
    HIDDEN_POSTERIORS,
    NEGATIVE_SAMPLES,
    PERSISTENT_CHAINS,
    Energy,
    cd_gradient,
    contrastive_divergence,
    expected_energy,
    likelihood_gradient,
    persistent_contrastive_divergence,
)
from toolkit.rbm.surrogates.fast_weights import (
    FAST_WEIGHTS,
    fast_persistent_contrastive_divergence,
    updated_fast_weights,
)
from toolkit.rbm.surrogates.samplers import langevin_contrastive_divergence, tempered_contrastive_divergence
from toolkit.rbm.training.fused import FusedTrainer
from toolkit.rbm.training.loop import train
from toolkit.rbm.training.schedules import Schedule, cosine_decay, linear_decay

if TYPE_CHECKING:
    from toolkit.rbm.estimators import BernoulliRBM, GaussianRBM

__all__ = [
    "CENTERED_COORDINATES",
    "CENTERING_OFFSETS",
    "ENUMERABLE_UNITS",
    "FAST_WEIGHTS",
    "HIDDEN_POSTERIORS",
    "NEGATIVE_SAMPLES",
    "PERSISTENT_CHAINS",
    "RBM",
    "STRAIGHT_THROUGH",
    "Bernoulli",
    "BernoulliRBM",
    "Categorical",
    "Chain",
    "DivergenceError",
    "Energy",
    "EstimatedLogLikelihood",
    "FusedTrainer",
    "Gaussian",
    "GaussianRBM",
    "HiddenInMoves",
    "HiddenUnits",
    "Joint",
    "Layer",
    "LogPartition",
    "Offsets",
    "Rectified",
    "Sandwich",
    "Schedule",
    "Swaps",
    "TemperedState",
    "TemperingDiagnosis",
    "TrajectoryRatios",
    "VisibleUnits",
    "adapt_temperatures",
    "ais",
    "base_rate_bias",
    "bias",
    "cd_gradient",
    "centered",
    "centered_contrastive_divergence",
    "centered_gradient",
    "centering_offsets",
    "contrastive_divergence",
    "cosine_decay",
    "diagnose_tempering",
    "estimated_log_likelihood",
    "exact_samples",
    "expected_energy",
    "fast_persistent_contrastive_divergence",
    "gibbs",
    "gibbs_langevin",
    "langevin_contrastive_divergence",
    "likelihood_gradient",
    "linear_decay",
    "parallel_tempering",
    "persistent_contrastive_divergence",
    "pseudo_log_likelihood",
    "rank_generator",
    "reconstruction_error",
    "reverse_ais",
    "salakhutdinov_schedule",
    "sandwich",
    "shard",
    "spread_temperatures",
    "swap_probabilities",
    "tempered_contrastive_divergence",
    "tempered_start",
    "train",
    "trajectory_tempering",
    "updated_fast_weights",
]

# scikit-learn takes as long to import as the rest of this package.
__getattr__ = lazy(__name__, "toolkit.rbm.estimators", {"BernoulliRBM", "GaussianRBM"})


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
