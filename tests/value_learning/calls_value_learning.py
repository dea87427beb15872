"""A small call of every public function of value learning that takes a number."""

from typing import Any

import torch
from calls import Call

from toolkit import value_learning

_R, _D, _V = torch.tensor([0.5, 1.0]), torch.tensor([0.9, 0.8]), torch.tensor([0.3, -0.2])
_QUANTILES: dict[str, Any] = {"dist_q_t_selector": torch.eye(2), "dist_q_t": torch.eye(2)}

CALLS = {
    "value_learning.incremental_update": Call(
        value_learning.incremental_update, new_tensors={"v": _V}, old_tensors={"v": _R}, step_size=0.25
    ),
    "value_learning.lambda_returns": Call(value_learning.lambda_returns, r_t=_R, discount_t=_D, v_t=_V, lambda_=0.5),
    "value_learning.n_step_bootstrapped_returns": Call(
        value_learning.n_step_bootstrapped_returns, r_t=_R, discount_t=_D, v_t=_V, n=2
    ),
    "value_learning.quantile_q_learning": Call(
        value_learning.quantile_q_learning,
        dist_q_tm1=torch.eye(2),
        tau_q_tm1=torch.tensor([0.25, 0.75]),
        a_tm1=torch.tensor(1),
        r_t=_R[0],
        discount_t=_D[0],
        **_QUANTILES,
        huber_param=1.0,
    ),
    "value_learning.quantile_regression_loss": Call(
        value_learning.quantile_regression_loss,
        dist_src=_V,
        tau_src=torch.tensor([0.25, 0.75]),
        dist_target=_R,
        huber_param=1.0,
    ),
    "value_learning.td_lambda": Call(value_learning.td_lambda, v_tm1=_V, r_t=_R, discount_t=_D, v_t=_V, lambda_=0.5),
}
