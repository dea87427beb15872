"""Contrastive divergence with negative samples by Langevin moves or parallel tempering, in place of Gibbs steps.

T temperatures, N data, M negative samples, V visible units. Losses are in nats per sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from toolkit.blocks import stop_gradient
from toolkit.rbm.chains.langevin import HiddenInMoves, gibbs_langevin
from toolkit.rbm.chains.state import TemperedState
from toolkit.rbm.chains.tempering import Swaps, as_temperatures, parallel_tempering
from toolkit.rbm.chains.units import Chain
from toolkit.rbm.machine.joint import Joint
from toolkit.rbm.machine.model import RBM
from toolkit.rbm.surrogates.divergence import (
    NEGATIVE_SAMPLES,
    PERSISTENT_CHAINS,
    checked_joint,
    energy_difference,
    graph_if_open,
    persistent_surrogate,
)

__all__ = ["langevin_contrastive_divergence", "tempered_contrastive_divergence"]


def langevin_contrastive_divergence(
    rbm: RBM | Joint,
    data: Tensor,
    chains: Tensor,
    *,
    steps: int,
    step_size: float | Sequence[float] | Tensor,
    moves: int = 1,
    hidden: HiddenInMoves = "drawn",
    adjusted: bool = False,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    r"""Return the surrogate of contrastive divergence with chains of `gibbs_langevin`, and the chains.

    .. math::
        L = \frac1N \sum_n F(v_n) - \frac1M \sum_m F(\operatorname{sg}(v_m^{(k)}))

    The chains may start at the data (contrastive divergence), at noise (as Liao and others do, so that after training
    the same number of steps from noise draws from the machine), or at the ends of the last call (persistent).

    The path from the start to the negative samples is differentiable in the parameters at every move, so the leak with
    the block open is large: the surrogate then also raises the energy by moving the samples.

    Args:
        rbm: The machine, whose visible units are Gaussian.
        data: (N, V).
        chains: (M, V), the start of the chains.
        steps: As in `gibbs_langevin`.
        step_size: As in `gibbs_langevin`.
        moves: As in `gibbs_langevin`.
        hidden: As in `gibbs_langevin`.
        adjusted: As in `gibbs_langevin`.
        generator: As in `gibbs_langevin`.

    Returns:
        The surrogate, a scalar in nats per sample, and the chains, (M, V), constants.

    Raises:
        ValueError: If `data` or `chains` has no rows or not V columns; and as for `gibbs_langevin`.
        TypeError: If `data` or `chains` does not have the type of the parameters.

    References:
        Liao, Kornblith, Ren, Fleet & Hinton, "Gaussian-Bernoulli RBMs without tears", 2022, section 3.

    Example:
        >>> rbm = RBM(3, 2, visible="gaussian", generator=torch.Generator().manual_seed(0))
        >>> generator = torch.Generator().manual_seed(1)
        >>> loss, chains = langevin_contrastive_divergence(
        ...     rbm, torch.eye(3), torch.randn(5, 3), steps=4, step_size=[2, 1, 0.5, 0.2], generator=generator)
        >>> loss.backward()
    """
    joint = checked_joint(rbm, data=data, chains=chains)
    move = partial(gibbs_langevin, joint, chains, steps=steps, step_size=step_size, moves=moves)
    return persistent_surrogate(joint, data, lambda: move(hidden=hidden, adjusted=adjusted, generator=generator)[0])


def tempered_contrastive_divergence(
    rbm: RBM | Joint,
    data: Tensor,
    state: TemperedState,
    *,
    inverse_temperatures: Tensor | Sequence[float],
    steps: int,
    reference: Tensor | None = None,
    swaps: Swaps = "joint",
    chain: Chain = "sampled",
    generator: torch.Generator | None = None,
) -> tuple[Tensor, TemperedState, Tensor]:
    r"""Return the surrogate of persistent contrastive divergence with tempered chains, and the chains.

    .. math::
        L = \frac1N \sum_n F(v_n) - \frac1M \sum_m F(\operatorname{sg}(v_{Tm}))

    :math:`v_{Tm}` are the chains at :math:`\beta = 1` after `steps` steps of `parallel_tempering`. The gradient is
    `cd_gradient` with these negative samples.

    Args:
        rbm: The machine.
        data: (N, V).
        state: From `tempered_start`, or of the last call.
        inverse_temperatures: (T,), as in `parallel_tempering`; the last is 1.
        steps: The number of steps before the update.
        reference: As in `parallel_tempering`.
        swaps: As in `parallel_tempering`.
        chain: As in `parallel_tempering`.
        generator: Draws units and swaps. None: torch's default generator.

    Returns:
        The surrogate, a scalar in nats per sample; the new state, of constants; and the mean probabilities of swaps,
        (T - 1,).

    Raises:
        ValueError: If `data` has no rows or not V columns, or the last inverse temperature is not 1; and as for
            `parallel_tempering`.
        TypeError: If `data` does not have the type of the parameters.

    References:
        Desjardins, Courville, Bengio, Vincent & Delalleau, "Tempered Markov chain Monte Carlo for training of
        restricted Boltzmann machines", 2010.

    Example:
        >>> from toolkit.rbm import tempered_start
        >>> rbm, generator = RBM(3, 2, generator=torch.Generator().manual_seed(0)), torch.Generator().manual_seed(1)
        >>> state = tempered_start(rbm, n_temperatures=2, n_chains=5, generator=generator)
        >>> loss, state, swap_rates = tempered_contrastive_divergence(
        ...     rbm, torch.eye(3), state, inverse_temperatures=[0, 1], steps=1, generator=generator)
        >>> loss.backward()
    """
    joint = checked_joint(rbm, data=data)
    betas = as_temperatures(inverse_temperatures)
    if betas.numel() and betas.flatten()[-1] != 1:
        raise ValueError(f"`inverse_temperatures` should end with 1, the model. Found {betas.flatten()[-1].item()}.")
    with graph_if_open(NEGATIVE_SAMPLES, PERSISTENT_CHAINS):
        moved, swap_rates = parallel_tempering(
            joint,
            state,
            inverse_temperatures=betas,
            steps=steps,
            reference=reference,
            swaps=swaps,
            chain=chain,
            generator=generator,
        )
    negative = stop_gradient(moved.visible[-1], NEGATIVE_SAMPLES)
    loss = energy_difference(joint, data, negative, "free")
    visible, hidden = stop_gradient((moved.visible, moved.hidden), PERSISTENT_CHAINS)
    return loss, replace(moved, visible=visible, hidden=hidden), swap_rates
