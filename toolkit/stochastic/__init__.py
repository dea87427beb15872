"""Stochastic estimators: gradients of an expectation whose distribution depends on the parameters.

`score` has the score function and DiCE, `path` the gradients along the path of a sample, `importance` the bounds with
several samples, `control` relaxed control variates and the straight-through estimator.

Tensors are floating point; costs, baselines and draws may be integers or flags. Any other argument raises a ValueError
that names it.
"""

from toolkit.stochastic.control import (
    REBAR_SIGNAL,
    STRAIGHT_THROUGH,
    RelaxedBernoulli,
    rebar_loss,
    relaxed_bernoulli,
    straight_through,
)
from toolkit.stochastic.importance import (
    DREG_WEIGHTS,
    IWAE_WEIGHTS,
    VIMCO_SIGNAL,
    WAKE_SAMPLES,
    WAKE_WEIGHTS,
    dreg_loss,
    iwae_bound,
    iwae_loss,
    vimco_loss,
    wake_loss,
    wake_proposal_loss,
)
from toolkit.stochastic.path import (
    DENSITY_PARAMETERS,
    IMPLICIT_CDF,
    IMPLICIT_DENSITY,
    IMPLICIT_POINT,
    IMPLICIT_SAMPLE,
    implicit_sample,
    path_log_prob,
)
from toolkit.stochastic.score import (
    BASELINE,
    MAGIC_BOX,
    SAMPLING_WEIGHTS,
    SCORE_COST,
    dice_loss,
    enumerated_loss,
    leave_one_out,
    magic_box,
    score_function_loss,
)

__all__ = [
    "BASELINE",
    "DENSITY_PARAMETERS",
    "DREG_WEIGHTS",
    "IMPLICIT_CDF",
    "IMPLICIT_DENSITY",
    "IMPLICIT_POINT",
    "IMPLICIT_SAMPLE",
    "IWAE_WEIGHTS",
    "MAGIC_BOX",
    "REBAR_SIGNAL",
    "SAMPLING_WEIGHTS",
    "SCORE_COST",
    "STRAIGHT_THROUGH",
    "VIMCO_SIGNAL",
    "WAKE_SAMPLES",
    "WAKE_WEIGHTS",
    "RelaxedBernoulli",
    "dice_loss",
    "dreg_loss",
    "enumerated_loss",
    "implicit_sample",
    "iwae_bound",
    "iwae_loss",
    "leave_one_out",
    "magic_box",
    "path_log_prob",
    "rebar_loss",
    "relaxed_bernoulli",
    "score_function_loss",
    "straight_through",
    "vimco_loss",
    "wake_loss",
    "wake_proposal_loss",
]
