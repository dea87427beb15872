"""Temporal-difference learning of values: targets held constant as labels, and the residual gradient with blocks open.

The functions have the names and arguments of rlax, and take batches. As in rlax, some return temporal-difference
errors, whose loss is half of the square, and the others return one loss per sample.
"""

from toolkit.value_learning.distributional import (
    CATEGORICAL_TARGET,
    QUANTILE_TARGET,
    categorical_double_q_learning,
    categorical_l2_project,
    categorical_q_learning,
    categorical_td_learning,
    quantile_q_learning,
    quantile_regression_loss,
)
from toolkit.value_learning.gradient_td import (
    ESTIMATED_ERROR,
    GTD2_ESTIMATE,
    TDC_ERROR,
    TDC_ESTIMATE,
    error_estimate_loss,
    gtd2_loss,
    tdc_loss,
)
from toolkit.value_learning.multi_step import (
    LAMBDA_RETURNS,
    N_STEP_RETURNS,
    lambda_returns,
    n_step_bootstrapped_returns,
    td_lambda,
)
from toolkit.value_learning.one_step import (
    DOUBLE_Q_TARGET,
    EXPECTED_SARSA_TARGET,
    Q_TARGET,
    SARSA_TARGET,
    TD_TARGET,
    double_q_learning,
    expected_sarsa,
    q_learning,
    sarsa,
    td_learning,
)
from toolkit.value_learning.target_networks import TARGET_PARAMETERS, incremental_update

__all__ = [
    "CATEGORICAL_TARGET",
    "DOUBLE_Q_TARGET",
    "ESTIMATED_ERROR",
    "EXPECTED_SARSA_TARGET",
    "GTD2_ESTIMATE",
    "LAMBDA_RETURNS",
    "N_STEP_RETURNS",
    "QUANTILE_TARGET",
    "Q_TARGET",
    "SARSA_TARGET",
    "TARGET_PARAMETERS",
    "TDC_ERROR",
    "TDC_ESTIMATE",
    "TD_TARGET",
    "categorical_double_q_learning",
    "categorical_l2_project",
    "categorical_q_learning",
    "categorical_td_learning",
    "double_q_learning",
    "error_estimate_loss",
    "expected_sarsa",
    "gtd2_loss",
    "incremental_update",
    "lambda_returns",
    "n_step_bootstrapped_returns",
    "q_learning",
    "quantile_q_learning",
    "quantile_regression_loss",
    "sarsa",
    "td_lambda",
    "td_learning",
    "tdc_loss",
]
