"""Quantization: values on a grid or in a codebook, with the gradient of the continuous values that they replace.

- `rounding`: straight-through round, sign, top-k and one-hot; Gumbel-softmax.
- `finite_scalar`: coordinates rounded to a few levels.
- `codebook`: the nearest code, averaged codes, k-means, restarts.
- `vector`: vector quantization with its losses and estimators.
- `residual`: vector quantization in stages.
- `spikes`: spiking neurons with surrogate slopes and a reset without a gradient.
"""

from toolkit.quantization.codebook import (
    AVERAGES,
    RESTARTS,
    averaged_codebook,
    codebook_perplexity,
    kmeans_codebook,
    nearest_codes,
    restarted_codebook,
)
from toolkit.quantization.finite_scalar import FINITE_SCALAR, FiniteScalarQuantizer, FiniteScalars
from toolkit.quantization.residual import RESIDUAL, ResidualQuantized, ResidualVectorQuantizer
from toolkit.quantization.rounding import (
    ONE_HOT,
    ROUND,
    SIGN,
    TOP_K,
    gumbel_softmax,
    one_hot_ste,
    round_ste,
    sign_ste,
    top_k_ste,
)
from toolkit.quantization.spikes import (
    RESET,
    SPIKES,
    Reset,
    SpikeTrains,
    arctan_slope,
    fast_sigmoid_slope,
    leaky_integrate_and_fire,
    sigmoid_slope,
    spike,
)
from toolkit.quantization.vector import (
    CODEBOOK_TARGETS,
    COMMITMENT_TARGETS,
    ROTATION,
    STRAIGHT_THROUGH,
    Estimator,
    Learning,
    Metric,
    Quantized,
    VectorQuantizer,
    codebook_loss,
    commitment_loss,
    rotation_trick,
    straight_through,
)

__all__ = [
    "AVERAGES",
    "CODEBOOK_TARGETS",
    "COMMITMENT_TARGETS",
    "FINITE_SCALAR",
    "ONE_HOT",
    "RESET",
    "RESIDUAL",
    "RESTARTS",
    "ROTATION",
    "ROUND",
    "SIGN",
    "SPIKES",
    "STRAIGHT_THROUGH",
    "TOP_K",
    "Estimator",
    "FiniteScalarQuantizer",
    "FiniteScalars",
    "Learning",
    "Metric",
    "Quantized",
    "Reset",
    "ResidualQuantized",
    "ResidualVectorQuantizer",
    "SpikeTrains",
    "VectorQuantizer",
    "arctan_slope",
    "averaged_codebook",
    "codebook_loss",
    "codebook_perplexity",
    "commitment_loss",
    "fast_sigmoid_slope",
    "gumbel_softmax",
    "kmeans_codebook",
    "leaky_integrate_and_fire",
    "nearest_codes",
    "one_hot_ste",
    "restarted_codebook",
    "rotation_trick",
    "round_ste",
    "sigmoid_slope",
    "sign_ste",
    "spike",
    "straight_through",
    "top_k_ste",
]
