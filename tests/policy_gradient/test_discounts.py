"""A discount is a number: a flag of the end of an episode would be its opposite."""

import pytest
import torch

from toolkit import policy_gradient as pg

ONE = torch.ones(1, 3)
DONE = torch.tensor([[False, False, True]])
TRACES = {"v_tm1": ONE, "v_t": ONE, "r_t": ONE, "rho_tm1": ONE, "lambda_": 0.9}

CALLS = {
    "gae": lambda discount_t: pg.truncated_generalized_advantage_estimation(ONE, discount_t, 0.95, torch.ones(1, 4)),
    "gae_value_loss": lambda discount_t: pg.gae_value_loss(ONE, discount_t, 0.95, torch.ones(1, 4)),
    "vtrace": lambda discount_t: pg.vtrace(**TRACES, discount_t=discount_t),
    "sac": lambda discount_t: pg.sac_critic_loss(ONE, ONE, discount_t, ONE, -ONE, torch.zeros(())),
    "td3": lambda discount_t: pg.td3_critic_loss(ONE.expand(2, 1, 3), ONE, discount_t, ONE.expand(2, 1, 3)),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("flags", [DONE, DONE.long()], ids=["bool", "int"])
def test_flags_are_no_discounts(name, flags):
    CALLS[name]((~DONE).float())
    with pytest.raises(ValueError, match=r"`discount_t` should be a floating-point tensor\. Found torch"):
        CALLS[name](flags)
