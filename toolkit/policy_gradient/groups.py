"""Advantages of several samples from one state, relative to the other samples.

Leading dimensions (*) are states, K samples of one group.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from toolkit._checks import choice, number
from toolkit._tensors import floating, lengths, promoted

__all__ = ["group_advantages"]


def group_advantages(
    rewards: Tensor,
    *,
    baseline: Literal["mean", "leave_one_out"],
    scale: Literal["std", "none"] = "none",
    epsilon: float = 1e-4,
) -> Tensor:
    r"""Return rewards minus a baseline of their group, as constants for a policy's loss.

    - ``"leave_one_out"`` (RLOO): the mean of the other rewards. The policy gradient is unbiased.
    - ``"mean"``: the mean of all rewards. A sample's own reward is part of its baseline, so the advantage and the
      expected policy gradient are exactly ``(K - 1) / K`` of those of ``"leave_one_out"``: 3/4 for four samples.
    - ``scale="std"`` (GRPO): the advantage is divided by ``std + epsilon``, where the standard deviation has K - 1 in
      its denominator. The expected gradient is then not a multiple of that of the expected reward.

    The block `ADVANTAGE` of the loss holds the result constant.

    Args:
        rewards: (\*, K), at least two samples in a group.
        baseline: See above.
        scale: See above.
        epsilon: Added to the standard deviation, in the units of the rewards; groups of equal rewards get advantages of
            0.

    Returns:
        (\*, K).

    Raises:
        ValueError: If `rewards` is not a tensor with groups of at least two, or `baseline` or `scale` is unknown.

    References:
        Kool, van Hoof and Welling, "Buy 4 REINFORCE samples, get a baseline for free!", 2019.
        Shao et al., "DeepSeekMath: pushing the limits of mathematical reasoning in open language models", 2024.

    Example:
        >>> group_advantages(torch.tensor([1.0, 0.0, 0.0, 0.0]), baseline="leave_one_out")
        tensor([ 1.0000, -0.3333, -0.3333, -0.3333])
        >>> group_advantages(torch.tensor([1.0, 0.0, 0.0, 0.0]), baseline="mean")
        tensor([ 0.7500, -0.2500, -0.2500, -0.2500])
    """
    choice("baseline", baseline, ("mean", "leave_one_out"))
    choice("scale", scale, ("std", "none"))
    epsilon = number("epsilon", epsilon, above=0)
    rewards = promoted(rewards)
    floating(rewards=rewards)
    if rewards.dim() == 0 or rewards.shape[-1] < 2:
        raise ValueError(f"`rewards` should have groups of at least two. Found shape {tuple(rewards.shape)}.")
    k = rewards.shape[-1]
    # The mean of equal numbers may be rounded to another one, and divided by epsilon the difference counts.
    offsets = rewards - rewards[..., :1]
    centred = offsets - offsets.mean(-1, keepdim=True)
    advantages = centred * (k / (k - 1)) if baseline == "leave_one_out" else centred
    if scale == "none":
        return advantages
    deviation: Tensor = lengths(centred) / (k - 1) ** 0.5
    return advantages / (deviation + epsilon)
