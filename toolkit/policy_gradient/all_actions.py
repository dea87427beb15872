"""Policy gradients as sums over all actions, without sampling noise, and policy gradients by regret.

Leading dimensions (*) are batches and times, A actions. Losses are sums over actions and means over the rest. An
illegal action has logit -inf; its value is ignored and may be -inf.
"""

from __future__ import annotations

from torch import Tensor

from toolkit._tensors import floating, floating_alike
from toolkit.blocks import block, stop_gradient
from toolkit.policy_gradient._shapes import one_for_each_row
from toolkit.policy_gradient.sampled import ADVANTAGE

__all__ = ["ACTION_VALUES", "SAMPLING", "expected_policy_gradient_loss", "qpg_loss", "rm_loss", "rpg_loss"]

SAMPLING = block(
    "policy_gradient.sampling",
    "The probabilities stand for the frequencies of draws, which carry no gradient: the score alone does.",
)
ACTION_VALUES = block(
    "policy_gradient.action_values",
    "The values of the actions are measurements: a regret falls by a better policy, not by values that are equal.",
)

# A masked action has the logit -inf, and 0 * -inf is NaN. Below this, probabilities are 0 in every floating type.
_LOG_OF_ZERO = -1e4


def expected_policy_gradient_loss(logits_t: Tensor, q_t: Tensor, baseline_t: Tensor | None = None) -> Tensor:
    r"""Return the expectation of REINFORCE's surrogate, the mean of ``-sum_a sg(pi_a) log pi_a sg(q_a - b)``.

    With both blocks in place the gradient with respect to a row of logits is ``-pi_a (q_a - J) / N``, ``J = sum_a pi_a
    q_a``: the gradient of ``-J``, whatever the baseline. With `SAMPLING` open each term is multiplied by ``1 + log
    pi_a``, so an action less likely than ``1 / e`` = 37 % is pushed in the wrong direction. With `ADVANTAGE` open and
    the baseline ``b = J`` the gradient is ``(1 + H(pi))`` times the right one.

    Args:
        logits_t: (\*, A).
        q_t: (\*, A), the value of each action.
        baseline_t: (\*), b. None: 0.

    Returns:
        A scalar, in nats times the units of the reward.

    Raises:
        ValueError: If shapes differ.

    References:
        Williams, "Simple statistical gradient-following algorithms for connectionist reinforcement learning", 1992.
        Ciosek and Whiteson, "Expected policy gradients", 2018.

    Example:
        >>> logits = torch.zeros(1, 2, requires_grad=True)
        >>> loss = expected_policy_gradient_loss(logits, torch.tensor([[1.0, 0.0]]))
        >>> torch.autograd.grad(loss, logits)
        (tensor([[-0.2500,  0.2500]]),)
    """
    floating_alike(logits_t=logits_t, q_t=q_t)
    log_prob = logits_t.log_softmax(-1)
    policy = log_prob.exp()
    advantages = _of_legal(q_t, policy)
    if baseline_t is not None:
        floating(baseline_t=baseline_t)
        one_for_each_row(logits_t=logits_t, baseline_t=baseline_t)
        advantages = advantages - baseline_t.unsqueeze(-1)
    weights = stop_gradient(policy, SAMPLING) * stop_gradient(advantages, ADVANTAGE)
    return -(weights * log_prob.clamp(min=_LOG_OF_ZERO)).sum(-1).mean()


def qpg_loss(logits_t: Tensor, q_t: Tensor) -> Tensor:
    r"""Return the loss of the Q-based policy gradient, the mean of ``-sum_a pi_a sg(q_a - sum_b pi_b q_b)``.

    Its value is always 0. With the block `ADVANTAGE` in place the gradient with respect to a row of logits is that of
    ``-sum_a pi_a q_a``; open it is exactly 0, for logits and values.

    Args:
        logits_t: (\*, A).
        q_t: (\*, A), the value of each action.

    Returns:
        A scalar, in the units of the reward.

    Raises:
        ValueError: If shapes differ.

    References:
        Srinivasan, Lanctot, Zambaldi, Perolat, Tuyls, Munos and Bowling, "Actor-critic policy optimization in partially
        observable multiagent environments", 2018.

    Example:
        >>> logits = torch.zeros(1, 2, requires_grad=True)
        >>> torch.autograd.grad(qpg_loss(logits, torch.tensor([[1.0, 0.0]])), logits)
        (tensor([[-0.2500,  0.2500]]),)
    """
    policy, advantages = _policy_and_advantages(logits_t, q_t)
    return -(policy * stop_gradient(advantages, ADVANTAGE)).sum(-1).mean()


def rm_loss(logits_t: Tensor, q_t: Tensor) -> Tensor:
    r"""Return the loss of the regret-matching policy gradient, the mean of ``-sum_a pi_a sg(max(q_a - J, 0))``.

    J is ``sum_b pi_b q_b``. With the block `ADVANTAGE` in place the gradient with respect to a row of logits is
    ``-pi_a (m_a - sum_b pi_b m_b) / N`` with the positive advantages m, and the values get no gradient. Open, with
    ``P = sum of pi_b over the actions with a positive advantage``, the value of an action gets
    ``-pi_a ([q_a > J] - P) / N``.

    Arguments, result and errors are those of `qpg_loss`.

    References:
        Srinivasan et al., "Actor-critic policy optimization in partially observable multiagent environments", 2018.

    Example:
        >>> rm_loss(torch.zeros(1, 2), torch.tensor([[1.0, 0.0]]))
        tensor(-0.2500)
    """
    policy, advantages = _policy_and_advantages(logits_t, q_t)
    return -(policy * stop_gradient(advantages.relu(), ADVANTAGE)).sum(-1).mean()


def rpg_loss(logits_t: Tensor, q_t: Tensor) -> Tensor:
    r"""Return the loss of the regret policy gradient, the mean of ``sum_a max(sg(q_a) - J, 0)``: the summed regret.

    J is ``sum_b pi_b sg(q_b)``. Here the advantage carries the gradient of the policy. With the block `ACTION_VALUES`
    in place the gradient with respect to a row of logits is ``-n pi_a (q_a - J) / N``, n being the number of actions
    with a positive advantage. Open, the value of an action gets ``([q_a > J] - n pi_a) / N``, which makes all values
    equal.

    Arguments, result and errors are those of `qpg_loss`.

    References:
        Srinivasan et al., "Actor-critic policy optimization in partially observable multiagent environments", 2018.

    Example:
        >>> rpg_loss(torch.zeros(1, 2), torch.tensor([[1.0, 0.0]]))
        tensor(0.5000)
    """
    floating_alike(logits_t=logits_t, q_t=q_t)
    q, policy = stop_gradient(q_t, ACTION_VALUES), logits_t.softmax(-1)
    regrets = (q - (policy * _of_legal(q, policy)).sum(-1, keepdim=True)).relu()
    return regrets.masked_fill(logits_t.isneginf(), 0.0).sum(-1).mean()


def _policy_and_advantages(logits_t: Tensor, q_t: Tensor) -> tuple[Tensor, Tensor]:
    floating_alike(logits_t=logits_t, q_t=q_t)
    policy = logits_t.softmax(-1)
    values = _of_legal(q_t, policy)
    return policy, values - (policy * values).sum(-1, keepdim=True)


def _of_legal(q_t: Tensor, policy: Tensor) -> Tensor:
    """Return the values with 0 for illegal actions, of probability 0 and value -inf: 0 * -inf is NaN."""
    return q_t.masked_fill((policy == 0) & q_t.isneginf(), 0.0)
