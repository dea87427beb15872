"""Deterministic policies: the critic's gradient moves the action, and the policy's loss does not train the critic.

Leading dimensions (*) are batches, D dimensions of an action, K critics.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from toolkit._checks import number
from toolkit._random import own_generator
from toolkit._tensors import bounded, floating, floating_alike, lengths, promoted
from toolkit.blocks import block, stop_gradient

__all__ = [
    "ACTION_TARGET",
    "CLIPPED_TARGET",
    "CRITIC",
    "dpg_loss",
    "held_critic",
    "smoothed_actions",
    "td3_critic_loss",
]

CRITIC = block(
    "policy_gradient.critic",
    "The critic judges the policy's actions: it learns from rewards, and would otherwise learn to praise.",
)
ACTION_TARGET = block(
    "policy_gradient.action_target",
    "The improved action is a label: the action moves to it, and it does not move along.",
)
CLIPPED_TARGET = block(
    "policy_gradient.clipped_target",
    "The return by the more pessimistic critic is a label for all critics, which do not move it.",
)


def held_critic(critic: nn.Module, *inputs: Tensor) -> Tensor:
    """Return ``critic(*inputs)`` with its parameters held constant, while gradients pass to the inputs.

    The loss of DDPG, TD3 and SAC for the policy is ``-held_critic(critic, states, actions).mean()``, with an entropy
    term in SAC. With the block `CRITIC` in place the policy gets the gradient of the critic by the action. Open, the
    critic gets the gradient of ``-Q`` by its parameters, which raises its values at the actions of the policy. If one
    optimiser also minimises half of the critic's squared error at the same actions, the critic's fixed point is 1 too
    high.

    Args:
        critic: A module.
        *inputs: Its inputs.

    Raises:
        ValueError: If `critic` is not a module.

    References:
        Silver, Lever, Heess, Degris, Wierstra and Riedmiller, "Deterministic policy gradient algorithms", 2014,
        equation 9.
        Lillicrap et al., "Continuous control with deep reinforcement learning", 2016.

    Example:
        >>> critic, action = torch.nn.Linear(1, 1), torch.ones(1, requires_grad=True)
        >>> held_critic(critic, action).backward()
        >>> critic.weight.grad is None, torch.equal(action.grad, critic.weight[0])
        (True, True)
    """
    if not isinstance(critic, nn.Module):
        raise ValueError(f"`critic` should be a torch.nn.Module. Found {type(critic).__name__}.")
    held: dict[str, Tensor] = {name: stop_gradient(parameter, CRITIC) for name, parameter in critic.named_parameters()}
    found: Tensor = torch.func.functional_call(critic, held, inputs)
    return found


def dpg_loss(a_t: Tensor, dqda_t: Tensor, dqda_clipping: float | None = None) -> Tensor:
    r"""Return the loss of a deterministic policy from the critic's gradient, ``(sg(a + dQ/da) - a)^2 / 2``.

    With the block `ACTION_TARGET` in place the gradient with respect to the action is ``-dQ/da``. Open, it is exactly
    0, and `dqda_t` gets itself as its gradient.

    Args:
        a_t: (\*, D), actions of the policy.
        dqda_t: (\*, D), the critic's gradient at these actions.
        dqda_clipping: Bound of the Euclidean norm of `dqda_t`. None: no bound.

    Returns:
        (\*, D), half of the squares, as in rlax; sum them over D for the gradient of the policy.

    Raises:
        ValueError: If shapes differ or the bound is not positive.

    References:
        Silver et al., "Deterministic policy gradient algorithms", 2014, equation 9.

    Example:
        >>> action = torch.zeros(2, requires_grad=True)
        >>> dpg_loss(action, torch.tensor([1.0, -2.0])).sum().backward()
        >>> action.grad
        tensor([-1.,  2.])
    """
    floating_alike(a_t=a_t, dqda_t=dqda_t)
    if dqda_clipping is not None:
        bound = number("dqda_clipping", dqda_clipping, above=0)
        norm = lengths(dqda_t)
        dqda_t = dqda_t * (bound / norm.clamp(min=bound))
    # Not sg(a + dQ/da) - a, whose sum loses a slope that is small beside the action.
    return 0.5 * (stop_gradient(dqda_t, ACTION_TARGET) - (a_t - stop_gradient(a_t, ACTION_TARGET))).square()


def td3_critic_loss(q_tm1: Tensor, r_t: Tensor, discount_t: Tensor, q_t: Tensor) -> Tensor:
    r"""Return the loss of K critics, the sum over k of the mean of ``(Q_k - sg(r + discount min_j Q'_j))^2 / 2``.

    One critic gives DDPG, two give TD3. With the block `CLIPPED_TARGET` in place the gradient with respect to ``Q_k``
    is its error e_k over N. Open, the smallest ``Q'`` gets ``-discount sum_k e_k / N`` as well.

    Args:
        q_tm1: (K, \*), values of the action that was taken.
        r_t: (\*).
        discount_t: (\*), 0 where the episode ended.
        q_t: (J, \*), values of the target networks in the next state, at an action from `smoothed_actions`.

    Returns:
        A scalar, in squared units of the reward.

    Raises:
        ValueError: If shapes do not fit.

    References:
        Fujimoto, van Hoof and Meger, "Addressing function approximation error in actor-critic methods", 2018,
        algorithm 1.

    Example:
        >>> one = torch.ones(1)
        >>> td3_critic_loss(torch.zeros(2, 1), one, 0.5 * one, torch.tensor([[2.0], [3.0]]))
        tensor(4.)
    """
    r_t = promoted(r_t, discount_t)
    floating_alike(r_t=r_t, discount_t=discount_t)
    floating(q_tm1=q_tm1, q_t=q_t)
    for name, values in (("q_tm1", q_tm1), ("q_t", q_t)):
        if values.dim() == 0 or values.shape[1:] != r_t.shape or not len(values):
            found = tuple(values.shape)
            raise ValueError(f"`{name}` should have shape (K, *), * being {tuple(r_t.shape)}. Found {found}.")
    targets = stop_gradient(torch.addcmul(r_t, discount_t, q_t.amin(0)), CLIPPED_TARGET)
    return 0.5 * len(q_tm1) * (q_tm1 - targets).square().mean()


def smoothed_actions(
    a_t: Tensor,
    *,
    noise: float = 0.2,
    clip: float = 0.5,
    low: float = -1.0,
    high: float = 1.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    r"""Return ``clip(a + clip(noise z, -c, c), low, high)``: the actions at which TD3 evaluates its target critics.

    Args:
        a_t: (\*, D), actions of the target policy.
        noise: Standard deviation of the noise, in the units of the action.
        clip: c.
        low: Lower bound of an action.
        high: Upper bound.
        generator: Draws z. None: torch's global generator.

    Returns:
        (\*, D).

    Raises:
        ValueError: If a number is out of its range.

    References:
        Fujimoto et al., "Addressing function approximation error in actor-critic methods", 2018, section 5.3.

    Example:
        >>> smoothed_actions(torch.tensor([5.0, -5.0]))
        tensor([ 1., -1.])
    """
    floating(a_t=a_t)
    noise, clip = number("noise", noise, least=0), number("clip", clip, least=0)
    low = number("low", low)
    high = number("high", high, above=low)
    source = own_generator(generator)
    z = torch.randn(a_t.shape, generator=source, dtype=a_t.dtype, device=source.device).to(a_t.device)
    return bounded(a_t + (noise * z).clamp(-clip, clip), low, high)
