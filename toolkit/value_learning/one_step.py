r"""Temporal-difference errors of one step: TD(0), Sarsa, expected Sarsa, Q-learning, double Q-learning.

Each function returns the error :math:`\delta = \operatorname{sg}(y) - x` of a prediction x and its target y. Half of
its square is the loss. With the block of the target in place the gradient of that loss is :math:`-\delta \nabla x`: one
step of regression onto a label that is computed from the same values. In general it is not the gradient of any
function. With the block open it is :math:`\delta (\nabla y - \nabla x)`, the residual gradient of Baird (1995). This is
the gradient of the mean squared error of the samples, which has another minimum unless transitions are deterministic.

``*`` the dimensions of the batch, A actions; time t-1 is ``tm1``. A ``discount_t`` is 0 at the end of an episode. The
value of an illegal action may be ``-inf``: times a discount or a probability of 0 it counts as 0.

References:
    Sutton and Barto, "Reinforcement learning: an introduction", 2018.
    Baird, "Residual algorithms: reinforcement learning with function approximation", 1995.
"""

from __future__ import annotations

from torch import Tensor

from toolkit._tensors import floating_alike
from toolkit.blocks import block, stop_gradient
from toolkit.value_learning._arguments import (
    bootstrapped,
    chosen,
    expected,
    floating,
    of_actions,
    of_shape,
)

__all__ = [
    "DOUBLE_Q_TARGET",
    "EXPECTED_SARSA_TARGET",
    "Q_TARGET",
    "SARSA_TARGET",
    "TD_TARGET",
    "double_q_learning",
    "expected_sarsa",
    "q_learning",
    "sarsa",
    "td_learning",
]

TD_TARGET = block(
    "value_learning.td_target",
    "The bootstrapped value is a label: the value before the step moves towards it, and it does not move back.",
)
SARSA_TARGET = block(
    "value_learning.sarsa_target",
    "The value of the next action is a label: it is not lowered because the value before it was too low.",
)
EXPECTED_SARSA_TARGET = block(
    "value_learning.expected_sarsa_target",
    "The mean value of the next actions is a label: neither these values nor the policy bend to make it come true.",
)
Q_TARGET = block(
    "value_learning.q_target",
    "The value of the best next action is a label: it is not lowered because the value before it was too low.",
)
DOUBLE_Q_TARGET = block(
    "value_learning.double_q_target",
    "The value of the action that the other network prefers is a label for this one, and no prediction.",
)


def td_learning(v_tm1: Tensor, r_t: Tensor, discount_t: Tensor, v_t: Tensor) -> Tensor:
    r"""Return the error of TD(0), :math:`\delta = \operatorname{sg}(r_t + \gamma_t v_t) - v_{t-1}`.

    With `TD_TARGET` open the gradient of :math:`\delta^2 / 2` is the residual gradient,
    :math:`\delta (\gamma_t \nabla v_t - \nabla v_{t-1})`.

    Args:
        v_tm1: Values before the step, (\*).
        r_t: Rewards of the step, (\*).
        discount_t: Discounts, (\*); 0 where the episode ends.
        v_t: Values after the step, (\*).

    Returns:
        (\*), in units of the reward.

    Raises:
        ValueError: If an argument is not a floating-point tensor, or has another shape than `v_tm1`.

    References:
        Sutton, "Learning to predict by the methods of temporal differences", 1988; Sutton and Barto, 2018, section 6.1.
        The residual gradient: Baird, "Residual algorithms: reinforcement learning with function approximation", 1995.

    Example:
        >>> v = torch.tensor([0.5, 2.0], requires_grad=True)
        >>> error = td_learning(v[0], torch.tensor(1.0), torch.tensor(0.5), v[1])
        >>> torch.autograd.grad(0.5 * error.square(), v)
        (tensor([-1.5000,  0.0000]),)
    """
    floating_alike(v_tm1=v_tm1, r_t=r_t, discount_t=discount_t, v_t=v_t)
    return stop_gradient(bootstrapped(r_t, discount_t, v_t), TD_TARGET) - v_tm1


def sarsa(q_tm1: Tensor, a_tm1: Tensor, r_t: Tensor, discount_t: Tensor, q_t: Tensor, a_t: Tensor) -> Tensor:
    r"""Return the error of Sarsa, :math:`\delta = \operatorname{sg}(r_t + \gamma_t q_t[a_t]) - q_{t-1}[a_{t-1}]`.

    With `SARSA_TARGET` open the gradient of :math:`\delta^2 / 2` has the additional term
    :math:`\delta \gamma_t \nabla q_t[a_t]`.

    Args:
        q_tm1: Values of the actions before the step, (\*, A).
        a_tm1: Actions taken, (\*).
        r_t: Rewards of the step, (\*).
        discount_t: Discounts, (\*); 0 where the episode ends.
        q_t: Values of the actions after the step, (\*, A).
        a_t: Actions taken next, (\*).

    Returns:
        (\*), in units of the reward.

    Raises:
        ValueError: If values are not floating-point tensors, actions no integers below A, or a shape does not fit.

    References:
        Rummery and Niranjan, "On-line Q-learning using connectionist systems", 1994; Sutton and Barto, 2018, section
        6.4.

    Example:
        >>> q_tm1, q_t = torch.tensor([0.0, 1.0]), torch.tensor([3.0, 2.0])
        >>> sarsa(q_tm1, torch.tensor(1), torch.tensor(0.5), torch.tensor(0.5), q_t, torch.tensor(1))
        tensor(0.5000)
    """
    _check(q_tm1, a_tm1, r_t, discount_t, q_t=q_t)
    of_actions(r_t.shape, "of `r_t`", a_t=a_t)
    target = bootstrapped(r_t, discount_t, chosen(q_t, a_t, name="a_t"))
    return stop_gradient(target, SARSA_TARGET) - chosen(q_tm1, a_tm1)


def expected_sarsa(
    q_tm1: Tensor, a_tm1: Tensor, r_t: Tensor, discount_t: Tensor, q_t: Tensor, probs_a_t: Tensor
) -> Tensor:
    r"""Return the error of expected Sarsa, whose target has the mean value of the next actions.

    :math:`\delta = \operatorname{sg}(r_t + \gamma_t p_t \cdot q_t) - q_{t-1}[a_{t-1}]`.

    With `EXPECTED_SARSA_TARGET` open the gradient of :math:`\delta^2 / 2` leaks to two places:
    :math:`\delta \gamma_t p_t` to the values and :math:`\delta \gamma_t q_t` to the probabilities, so that the policy
    learns to make the prediction right.

    Args:
        q_tm1: Values of the actions before the step, (\*, A).
        a_tm1: Actions taken, (\*).
        r_t: Rewards of the step, (\*).
        discount_t: Discounts, (\*); 0 where the episode ends.
        q_t: Values of the actions after the step, (\*, A).
        probs_a_t: Probabilities of the next actions under the policy to be evaluated, (\*, A).

    Returns:
        (\*), in units of the reward.

    Raises:
        ValueError: As in `sarsa`.

    References:
        Van Seijen, van Hasselt, Whiteson and Wiering, "A theoretical and empirical analysis of expected Sarsa", 2009;
        Sutton and Barto, 2018, section 6.6.

    Example:
        >>> q_tm1, q_t, half = torch.tensor([0.0, 1.0]), torch.tensor([3.0, 2.0]), torch.tensor([0.5, 0.5])
        >>> expected_sarsa(q_tm1, torch.tensor(1), torch.tensor(0.5), torch.tensor(0.5), q_t, half)
        tensor(0.7500)
    """
    _check(q_tm1, a_tm1, r_t, discount_t, q_t=q_t, probs_a_t=probs_a_t)
    target = bootstrapped(r_t, discount_t, expected(probs_a_t, q_t))
    return stop_gradient(target, EXPECTED_SARSA_TARGET) - chosen(q_tm1, a_tm1)


def q_learning(q_tm1: Tensor, a_tm1: Tensor, r_t: Tensor, discount_t: Tensor, q_t: Tensor) -> Tensor:
    r"""Return the error of Q-learning, whose target has the value of the best next action.

    :math:`\delta = \operatorname{sg}(r_t + \gamma_t \max_a q_t[a]) - q_{t-1}[a_{t-1}]`.

    DQN is this error with `q_t` from a target network (`toolkit.value_learning.incremental_update`). The target network
    has its own parameters, which no optimiser updates: the block is then redundant for the network that learns, and
    only saves the backward pass through the target network.

    With `Q_TARGET` open the gradient of :math:`\delta^2 / 2` has the additional term :math:`\delta \gamma_t` at the
    best next action, shared evenly between ties.

    Args:
        q_tm1: Values of the actions before the step, (\*, A).
        a_tm1: Actions taken, (\*).
        r_t: Rewards of the step, (\*).
        discount_t: Discounts, (\*); 0 where the episode ends.
        q_t: Values of the actions after the step, (\*, A).

    Returns:
        (\*), in units of the reward.

    Raises:
        ValueError: As in `sarsa`.

    References:
        Watkins and Dayan, "Q-learning", 1992; Sutton and Barto, 2018, section 6.5. With a network: Mnih et al.,
        "Human-level control through deep reinforcement learning", 2015.

    Example:
        >>> q_tm1, q_t = torch.tensor([0.0, 1.0]), torch.tensor([3.0, 2.0])
        >>> q_learning(q_tm1, torch.tensor(1), torch.tensor(0.5), torch.tensor(0.5), q_t)
        tensor(1.)
    """
    _check(q_tm1, a_tm1, r_t, discount_t, q_t=q_t)
    return stop_gradient(bootstrapped(r_t, discount_t, q_t.amax(-1)), Q_TARGET) - chosen(q_tm1, a_tm1)


def double_q_learning(
    q_tm1: Tensor, a_tm1: Tensor, r_t: Tensor, discount_t: Tensor, q_t_value: Tensor, q_t_selector: Tensor
) -> Tensor:
    r"""Return the error of double Q-learning: one network chooses the next action, another network evaluates it.

    :math:`\delta = \operatorname{sg}(r_t + \gamma_t q_t^{value}[a^*]) - q_{t-1}[a_{t-1}]` with :math:`a^*` the best
    action by the selector. With `DOUBLE_Q_TARGET` open the gradient of :math:`\delta^2 / 2` has the additional term
    :math:`\delta \gamma_t` at the chosen action of `q_t_value`. The selector gets no gradient in either case.

    Args:
        q_tm1: Values of the actions before the step, (\*, A).
        a_tm1: Actions taken, (\*).
        r_t: Rewards of the step, (\*).
        discount_t: Discounts, (\*); 0 where the episode ends.
        q_t_value: Values of the actions after the step, which enter the target, (\*, A).
        q_t_selector: Values that choose the action after the step, (\*, A).

    Returns:
        (\*), in units of the reward.

    Raises:
        ValueError: As in `sarsa`.

    References:
        Van Hasselt, "Double Q-learning", 2010; van Hasselt, Guez and Silver, "Deep reinforcement learning with double
        Q-learning", 2016; Sutton and Barto, 2018, section 6.7.

    Example:
        >>> q_tm1, value, selector = torch.tensor([0.0, 1.0]), torch.tensor([3.0, 2.0]), torch.tensor([0.0, 1.0])
        >>> double_q_learning(q_tm1, torch.tensor(1), torch.tensor(0.5), torch.tensor(0.5), value, selector)
        tensor(0.5000)
    """
    _check(q_tm1, a_tm1, r_t, discount_t, q_t_value=q_t_value, q_t_selector=q_t_selector)
    target = bootstrapped(r_t, discount_t, chosen(q_t_value, q_t_selector.argmax(-1)))
    return stop_gradient(target, DOUBLE_Q_TARGET) - chosen(q_tm1, a_tm1)


def _check(q_tm1: Tensor, a_tm1: Tensor, r_t: Tensor, discount_t: Tensor, **values: Tensor) -> None:
    floating(q_tm1=q_tm1)
    if q_tm1.ndim == 0 or q_tm1.shape[-1] == 0:
        raise ValueError(f"`q_tm1` should have a last dimension of actions. Found shape {tuple(q_tm1.shape)}.")
    of_shape(q_tm1.shape[:-1], "of `q_tm1` without its actions", r_t=r_t, discount_t=discount_t)
    of_shape(q_tm1.shape, "of `q_tm1`", **values)
    of_actions(r_t.shape, "of `r_t`", a_tm1=a_tm1)
