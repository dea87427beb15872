r"""Target networks: a second set of parameters that follows the online parameters and is not trained itself.

With a target network the label of a temporal-difference error has its own parameters. No optimiser updates them, so the
block of the target is redundant for the network that learns. The block on the copy matters: a copy with its graph is a
function of the online parameters, which brings back a part of the residual gradient.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from toolkit._checks import number
from toolkit._tensors import HALF, averaged, mappings
from toolkit.blocks import block, stop_gradient

__all__ = ["TARGET_PARAMETERS", "incremental_update"]

TARGET_PARAMETERS = block(
    "value_learning.target_parameters",
    "The target network is a copy and no function of the online network: else the labels learn through it.",
)


def incremental_update(
    new_tensors: Mapping[str, Tensor], old_tensors: Mapping[str, Tensor], step_size: float
) -> dict[str, Tensor]:
    r"""Return new parameters of a target network, :math:`\operatorname{sg}((1 - \tau) \text{old} + \tau \text{new})`.

    Use them with `torch.func.functional_call`. Neither mapping is changed, and no tensor is shared with `new_tensors`.
    With `TARGET_PARAMETERS` open the online parameters get :math:`\tau` times the gradient of the target parameters
    from this update, and :math:`\tau (1 - \tau)^k` times from the update k steps earlier: the graphs of all updates are
    kept.

    Args:
        new_tensors: Name -> online parameter or buffer, for example ``dict(network.named_parameters())``.
        old_tensors: Name -> target parameter or buffer, of the same shape and dtype.
        step_size: :math:`\tau`, from 0 to 1; 1 copies. Integer tensors, such as batch counters, are copied.

    Returns:
        Name -> tensor.

    Raises:
        ValueError: If `step_size` is not from 0 to 1, names or shapes differ, or averages would have half precision.

    References:
        Mnih et al., "Human-level control through deep reinforcement learning", 2015 (copies at intervals); Lillicrap et
        al., "Continuous control with deep reinforcement learning", 2016 (averages).

    Example:
        >>> online, target = {"weight": torch.tensor([1.0, 2.0])}, {"weight": torch.tensor([0.0, 0.0])}
        >>> incremental_update(online, target, 0.25)
        {'weight': tensor([0.2500, 0.5000])}
    """
    tau = number("step_size", step_size, least=0, most=1)
    mappings(new_tensors=new_tensors, old_tensors=old_tensors)
    if new_tensors.keys() != old_tensors.keys():
        difference = sorted(new_tensors.keys() ^ old_tensors.keys())
        raise ValueError(f"`old_tensors` should have the names of `new_tensors`. Found a difference in {difference}.")
    updated = {}
    for name, new in new_tensors.items():
        old = old_tensors[name]
        if old.shape != new.shape or old.dtype != new.dtype:
            raise ValueError(
                f"`old_tensors[{name!r}]` should have shape {tuple(new.shape)} and the dtype {new.dtype}. "
                f"Found {tuple(old.shape)} and {old.dtype}."
            )
        if old.dtype in HALF and 0 < tau < 1:
            raise ValueError(
                f"`old_tensors[{name!r}]` should be float32 or float64, as half precision rounds small steps to 0. "
                f"Found {old.dtype}."
            )
        share = tau if new.is_floating_point() or new.is_complex() else 1
        updated[name] = stop_gradient(averaged(old, new, share), TARGET_PARAMETERS)
    return updated
