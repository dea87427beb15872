"""Policy gradients: surrogates whose gradient is that of the expected return, and the losses of their critics.

- `sampled`: REINFORCE with a baseline, and actor-critic, from sampled actions.
- `all_actions`: policy gradients as a sum over all actions, and policy gradients by regret.
- `groups`: advantages of several samples from one state.
- `ratios`: PPO, GRPO, off-policy weights, and penalties on the divergence from a reference policy.
- `temporal`: generalised advantages and V-trace.
- `soft`: the three losses of soft actor-critic.
- `deterministic`: DPG, DDPG and TD3.

Tensors are floating point, but actions are integers; rewards, returns, advantages, weights and masks may be integers or
flags. Any other argument raises a ValueError that names it.
"""

from toolkit.policy_gradient.all_actions import (
    ACTION_VALUES,
    SAMPLING,
    expected_policy_gradient_loss,
    qpg_loss,
    rm_loss,
    rpg_loss,
)
from toolkit.policy_gradient.deterministic import (
    ACTION_TARGET,
    CLIPPED_TARGET,
    CRITIC,
    dpg_loss,
    held_critic,
    smoothed_actions,
    td3_critic_loss,
)
from toolkit.policy_gradient.groups import group_advantages
from toolkit.policy_gradient.ratios import (
    IMPORTANCE_WEIGHTS,
    LOG_RATIO,
    OLD_POLICY,
    REFERENCE_POLICY,
    clipped_surrogate_pg_loss,
    grpo_loss,
    importance_ratios,
    kl_penalty,
    off_policy_pg_loss,
    reverse_kl_loss,
)
from toolkit.policy_gradient.sampled import (
    ACTION,
    ADVANTAGE,
    VALUE_TARGET,
    actor_critic_loss,
    gaussian_log_prob,
    policy_gradient_loss,
)
from toolkit.policy_gradient.soft import (
    ENTROPY_GAP,
    SOFT_TARGET,
    TEMPERATURE,
    sac_actor_loss,
    sac_critic_loss,
    sac_temperature_loss,
    squashed_gaussian_sample,
)
from toolkit.policy_gradient.temporal import (
    VTRACE_TARGET,
    VTraceOutput,
    gae_value_loss,
    truncated_generalized_advantage_estimation,
    vtrace,
    vtrace_td_error_and_advantage,
)

__all__ = [
    "ACTION",
    "ACTION_TARGET",
    "ACTION_VALUES",
    "ADVANTAGE",
    "CLIPPED_TARGET",
    "CRITIC",
    "ENTROPY_GAP",
    "IMPORTANCE_WEIGHTS",
    "LOG_RATIO",
    "OLD_POLICY",
    "REFERENCE_POLICY",
    "SAMPLING",
    "SOFT_TARGET",
    "TEMPERATURE",
    "VALUE_TARGET",
    "VTRACE_TARGET",
    "VTraceOutput",
    "actor_critic_loss",
    "clipped_surrogate_pg_loss",
    "dpg_loss",
    "expected_policy_gradient_loss",
    "gae_value_loss",
    "gaussian_log_prob",
    "group_advantages",
    "grpo_loss",
    "held_critic",
    "importance_ratios",
    "kl_penalty",
    "off_policy_pg_loss",
    "policy_gradient_loss",
    "qpg_loss",
    "reverse_kl_loss",
    "rm_loss",
    "rpg_loss",
    "sac_actor_loss",
    "sac_critic_loss",
    "sac_temperature_loss",
    "smoothed_actions",
    "squashed_gaussian_sample",
    "td3_critic_loss",
    "truncated_generalized_advantage_estimation",
    "vtrace",
    "vtrace_td_error_and_advantage",
]
