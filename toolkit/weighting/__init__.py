"""Weights and statistics that are held constant, and the losses that use them.

- `focal`, `circle`: weights of samples and pairs that depend on the prediction itself.
- `balancing`: weights of several losses; importance weights; the weighted Gaussian likelihood.
- `statistics`: batch renormalisation, running scales, MixStyle.
- `transport`: optimal transport, whose potentials are optimal, so that holding them changes no first derivative.
- `consistency`: consistency models, whose target is another prediction of the same network.
"""

from toolkit.weighting.balancing import (
    ADAPTIVE_WEIGHT,
    GRADNORM_TARGET,
    IMPORTANCE_WEIGHTS,
    LOSS_RATIOS,
    NLL_WEIGHTS,
    OWN_LOSSES,
    PROFILED_VARIANCES,
    adaptive_weight,
    beta_nll_loss,
    gradnorm_loss,
    importance_weighted_loss,
    profiled_uncertainty_loss,
    ratio_balanced_loss,
    self_normalized_loss,
    uncertainty_loss,
)
from toolkit.weighting.circle import (
    CIRCLE_WEIGHTS,
    circle_loss,
    circle_loss_of_similarities,
)
from toolkit.weighting.consistency import (
    CONSISTENCY_TARGET,
    consistency_function,
    consistency_loss,
    karras_times,
)
from toolkit.weighting.focal import (
    FOCAL_WEIGHT,
    focal_loss,
    held_focal_loss,
    held_sigmoid_focal_loss,
    sigmoid_focal_loss,
)
from toolkit.weighting.statistics import (
    CORRECTIONS,
    RUNNING_SCALE,
    RUNNING_STATISTICS,
    STYLE,
    BatchRenorm,
    batch_renorm,
    ema_normalize,
    mixstyle,
)
from toolkit.weighting.transport import (
    POTENTIALS,
    sinkhorn_loss,
    sinkhorn_potentials,
)

__all__ = [
    "ADAPTIVE_WEIGHT",
    "CIRCLE_WEIGHTS",
    "CONSISTENCY_TARGET",
    "CORRECTIONS",
    "FOCAL_WEIGHT",
    "GRADNORM_TARGET",
    "IMPORTANCE_WEIGHTS",
    "LOSS_RATIOS",
    "NLL_WEIGHTS",
    "OWN_LOSSES",
    "POTENTIALS",
    "PROFILED_VARIANCES",
    "RUNNING_SCALE",
    "RUNNING_STATISTICS",
    "STYLE",
    "BatchRenorm",
    "adaptive_weight",
    "batch_renorm",
    "beta_nll_loss",
    "circle_loss",
    "circle_loss_of_similarities",
    "consistency_function",
    "consistency_loss",
    "ema_normalize",
    "focal_loss",
    "gradnorm_loss",
    "held_focal_loss",
    "held_sigmoid_focal_loss",
    "importance_weighted_loss",
    "karras_times",
    "mixstyle",
    "profiled_uncertainty_loss",
    "ratio_balanced_loss",
    "self_normalized_loss",
    "sigmoid_focal_loss",
    "sinkhorn_loss",
    "sinkhorn_potentials",
    "uncertainty_loss",
]
