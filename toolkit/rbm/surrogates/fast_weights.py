r"""Fast weights: offsets of the parameters that drive persistent chains away from the states they have visited.

N data, M chains, V columns of visible units, H hidden units.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from toolkit._checks import number
from toolkit.blocks import block, stop_gradient
from toolkit.rbm.chains.gibbs import gibbs
from toolkit.rbm.chains.units import Chain
from toolkit.rbm.machine.joint import Joint
from toolkit.rbm.machine.model import RBM
from toolkit.rbm.surrogates.divergence import Energy, checked_joint, persistent_surrogate

__all__ = ["FAST_WEIGHTS", "fast_persistent_contrastive_divergence", "updated_fast_weights"]

FAST_WEIGHTS = block(
    "rbm.fast_weights",
    "Fast weights belong to the state of the chains, not to the model; without the block they would keep the graph of "
    "all gradients that formed them.",
)


def fast_persistent_contrastive_divergence(
    rbm: RBM | Joint,
    fast: Mapping[str, Tensor],
    data: Tensor,
    chains: Tensor,
    *,
    steps: int,
    chain: Chain = "sampled",
    temperature: float | None = None,
    energy: Energy = "free",
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    r"""Return the surrogate of fast persistent CD-k, and the chains for the next update.

    .. math::
        L = \frac1N \sum_n F_\theta(v_n) - \frac1M \sum_m F_\theta(\operatorname{sg}(v_m^{(k)})), \qquad
        v_m^{(k)}: \text{k Gibbs steps of the machine } \theta + \theta_{\text{fast}}

    The surrogate is that of `persistent_contrastive_divergence`, but the chains move in an energy that fast weights
    raise at the current states. The energies in the surrogate are those of the machine without fast weights. Update the
    fast weights with the surrogate's gradient, by `updated_fast_weights`.

    Args:
        rbm: The machine, or a `Joint`, as in `contrastive_divergence`.
        fast: :math:`\theta_{\text{fast}}`: names of parameters -> offsets; zeros at first. Parameters without an entry
            have no offset.
        data: (N, V).
        chains: (M, V); the second result of the last call.
        steps: k, the number of Gibbs steps.
        chain: As in `gibbs`.
        temperature: As in `gibbs`.
        energy: As in `contrastive_divergence`.
        generator: Draws the chains. None: torch's default generator.

    Returns:
        The surrogate, a scalar in nats per sample, and the new chains, (M, V), constants.

    Raises:
        ValueError: If `data` or `chains` has no rows or not V columns, `fast` has an unknown name, `steps` is not
            positive, `energy` is unknown, or `chain` and `temperature` are invalid for `gibbs`.
        TypeError: If `data` or `chains` does not have the type of the parameters.

    References:
        Tieleman & Hinton, "Using fast weights to improve persistent contrastive divergence", 2009.

    Example:
        >>> rbm, data = RBM(3, 2, generator=torch.Generator().manual_seed(0)), torch.eye(3)
        >>> fast = {name: torch.zeros_like(value) for name, value in rbm.named_parameters()}
        >>> loss, chains = fast_persistent_contrastive_divergence(rbm, fast, data, data, steps=1)
        >>> loss.backward()
        >>> gradients = {name: parameter.grad for name, parameter in rbm.named_parameters()}
        >>> fast = updated_fast_weights(fast, gradients, learning_rate=0.1)
    """
    joint = checked_joint(rbm, data=data, chains=chains)
    known = joint.tensors
    if unknown := sorted(fast.keys() - known.keys()):
        raise ValueError(f"`fast` should have names of parameters, {', '.join(known)}. Found {', '.join(unknown)}.")
    sampler = joint.shifted(fast)
    move = partial(gibbs, sampler, chains, steps=steps, chain=chain, temperature=temperature, generator=generator)
    return persistent_surrogate(joint, data, move, energy)


def updated_fast_weights(
    fast: Mapping[str, Tensor], gradients: Mapping[str, Tensor], *, learning_rate: float, decay: float = 19 / 20
) -> dict[str, Tensor]:
    r"""Return the fast weights after one update, constants.

    .. math::
        \theta_{\text{fast}} \leftarrow \rho \, \theta_{\text{fast}} - \eta_{\text{fast}} \, g

    Fast weights follow the gradient of the parameters at their own rate, and decay.

    Args:
        fast: Names of parameters -> fast weights.
        gradients: The same names at least -> the gradient g of the surrogate, to descend.
        learning_rate: :math:`\eta_{\text{fast}}`; keep it constant while the rate of the parameters falls.
        decay: :math:`\rho`, the share that is kept in each update.

    Returns:
        The names in `fast` -> new fast weights.

    Raises:
        ValueError: If `decay` is not between 0 and 1.
        KeyError: If a gradient is missing.

    References:
        Tieleman & Hinton, "Using fast weights to improve persistent contrastive divergence", 2009.

    Example:
        >>> updated_fast_weights({"hidden_bias": torch.ones(2)}, {"hidden_bias": torch.ones(2)}, learning_rate=0.5)
        {'hidden_bias': tensor([0.4500, 0.4500])}
    """
    decay = number("decay", decay, least=0, most=1)
    learning_rate = number("learning_rate", learning_rate)
    return {
        name: stop_gradient(decay * value - learning_rate * gradients[name], FAST_WEIGHTS)
        for name, value in fast.items()
    }
