"""A small call of every public function of the room that takes a number or a generator."""

from collections.abc import Callable
from typing import Any

import torch
from calls import Call

from toolkit import policy_gradient as pg

TWO = torch.tensor([[0.3, -0.2], [1.0, 0.5]])
ONE = torch.ones(2, 2)
TIMES = {"r_t": TWO, "discount_t": 0.9 * ONE, "lambda_": 0.7}
VALUES = torch.tensor([[0.1, 0.4, -0.2], [0.0, 0.3, 0.6]])
TRACES = {"v_tm1": TWO, "v_t": ONE, "r_t": TWO, "discount_t": 0.9 * ONE, "rho_tm1": ONE, "lambda_": 0.7}
ACTIONS = torch.tensor([1, 0])

RESULTS = {"policy_gradient.VTraceOutput"}

CALLS: dict[str, Callable[..., Any]] = {
    "policy_gradient.actor_critic_loss": Call(
        pg.actor_critic_loss, logits_t=TWO, a_t=ACTIONS, v_t=TWO[0], g_t=TWO[1], critic_weight=0.5
    ),
    "policy_gradient.clipped_surrogate_pg_loss": Call(
        pg.clipped_surrogate_pg_loss, prob_ratios_t=ONE, adv_t=TWO, epsilon=0.2, epsilon_high=0.3
    ),
    "policy_gradient.dpg_loss": Call(pg.dpg_loss, a_t=TWO, dqda_t=ONE, dqda_clipping=0.5),
    "policy_gradient.gae_value_loss": Call(pg.gae_value_loss, **TIMES, values=VALUES),
    "policy_gradient.group_advantages": Call(pg.group_advantages, rewards=TWO, baseline="mean", scale="std"),
    "policy_gradient.grpo_loss": Call(
        pg.grpo_loss,
        log_prob_t=-ONE,
        adv=TWO[0],
        reference_log_prob_t=-2 * ONE,
        epsilon=0.2,
        epsilon_high=0.3,
        beta=0.1,
    ),
    "policy_gradient.off_policy_pg_loss": Call(
        pg.off_policy_pg_loss, log_prob_t=-ONE, behaviour_log_prob_t=-ONE, adv_t=TWO, clip_rho=1.5
    ),
    "policy_gradient.sac_temperature_loss": Call(
        pg.sac_temperature_loss, log_alpha=torch.tensor(0.1), log_prob_t=TWO, target_entropy=-1.0
    ),
    "policy_gradient.smoothed_actions": Call(pg.smoothed_actions, a_t=TWO),
    "policy_gradient.squashed_gaussian_sample": Call(pg.squashed_gaussian_sample, mean_t=TWO, log_std_t=-ONE),
    "policy_gradient.truncated_generalized_advantage_estimation": Call(
        pg.truncated_generalized_advantage_estimation, **TIMES, values=VALUES
    ),
    "policy_gradient.vtrace": Call(pg.vtrace, **TRACES),
    "policy_gradient.vtrace_td_error_and_advantage": Call(pg.vtrace_td_error_and_advantage, **TRACES),
}
