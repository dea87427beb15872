"""Gibbs chains: where negative samples come from.

N chains, V visible units, H hidden units.
"""

from __future__ import annotations

import torch
from torch import Tensor

from toolkit._checks import integer
from toolkit.rbm.chains.units import Chain, unit_of
from toolkit.rbm.machine.joint import Joint
from toolkit.rbm.machine.model import RBM

__all__ = ["gibbs"]


def gibbs(
    rbm: RBM | Joint,
    visible: Tensor,
    *,
    steps: int,
    chain: Chain = "sampled",
    temperature: float | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    r"""Run Gibbs chains: `steps` times :math:`h \sim p(h \mid v)`, then :math:`v \sim p(v \mid h)`.

    Args:
        rbm: The machine, or a `Joint` with other parameters.
        visible: (N, V), where the chains start.
        steps: How often both layers are updated.
        chain: What a unit passes on.

            - ``"sampled"``: a draw. Its derivative is exactly zero, as that of `torch.bernoulli` is; a Gaussian draw is
              its mean and noise, and has the derivative of the mean.
            - ``"straight_through"``: the same draw, bit for bit, with the derivative of the mean (Bengio, Léonard &
              Courville, "Estimating or propagating gradients through stochastic neurons", 2013).
            - ``"mean_field"``: the mean. No random numbers, and no longer a Markov chain of the model.
            - ``"concrete"``: a relaxed draw, between the states of the units, with a true derivative (Maddison, Mnih &
              Teh, "The concrete distribution", 2017); real units are drawn. No longer a chain of the model.
            - ``"noisy_rectified"``: max(0, x + noise) in the place of counts (Nair & Hinton, "Rectified linear units
              improve restricted Boltzmann machines", 2010); all others are drawn. Only roughly a chain of the model.
        temperature: That of concrete units, and of no others. Near 0 they are close to draws, and their derivatives
            large.
        generator: Draws the units, on their device. None: torch's default one.

    Returns:
        (N, V). It carries a gradient if the parameters do; whoever takes it for a constant blocks it.

    Raises:
        ValueError: If `steps` is not positive, `chain` is unknown or one that the units of the machine do not have,
            `temperature` is missing or out of place, or `visible` does not have V columns.
        TypeError: If `visible` does not have the type of the parameters.

    Example:
        >>> rbm = RBM(3, 2, generator=torch.Generator().manual_seed(0))
        >>> start, generator = torch.zeros(2, 3), torch.Generator().manual_seed(1)
        >>> gibbs(rbm, start, steps=1000, generator=generator).tolist()
        [[1.0, 0.0, 0.0], [1.0, 1.0, 0.0]]
    """
    steps = integer("steps", steps)
    joint = rbm.joint if isinstance(rbm, RBM) else rbm
    unit = unit_of(chain, temperature, joint)
    if isinstance(rbm, RBM):
        rbm.check_visible(visible)
    for _ in range(steps):
        hidden = unit(joint.hidden, joint.to_hidden(visible), generator)
        visible = unit(joint.visible, joint.to_visible(hidden), generator)
    return visible
