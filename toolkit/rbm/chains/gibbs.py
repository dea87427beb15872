"""Gibbs chains, the source of negative samples.

N chains, V visible units, H hidden units.
"""

from __future__ import annotations

import torch
from torch import Tensor

from toolkit._checks import integer
from toolkit.rbm.chains.units import Chain, unit_of
from toolkit.rbm.machine.joint import Joint
from toolkit.rbm.machine.model import RBM, check_units, joint_of

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
        visible: (N, V), the start of the chains.
        steps: Number of updates of both layers.
        chain: The output of a unit in the chain.

            - ``"sampled"``: a draw. Its derivative is exactly zero, as for `torch.bernoulli`. A Gaussian draw is its
              mean plus noise, and has the derivative of the mean.
            - ``"straight_through"``: the same draw, bit for bit, with the derivative of the mean (Bengio, Léonard &
              Courville, "Estimating or propagating gradients through stochastic neurons", 2013).
            - ``"mean_field"``: the mean. It uses no random numbers and is not a Markov chain of the model.
            - ``"concrete"``: a relaxed draw, between the states of the units, with a true derivative (Maddison, Mnih &
              Teh, "The concrete distribution", 2017). Real units are drawn. It is not a chain of the model.
            - ``"noisy_rectified"``: max(0, x + noise) in place of counts (Nair & Hinton, "Rectified linear units
              improve restricted Boltzmann machines", 2010). All other units are drawn. It is only roughly a chain of
              the model.
        temperature: Temperature of concrete units; None for all others. Near 0 the units are close to draws, and their
            derivatives are large.
        generator: Draws the units, on their device. None: torch's default generator.

    Returns:
        (N, V). It carries a gradient if the parameters do; a surrogate that holds it constant needs a block.

    Raises:
        ValueError: If `steps` is not positive, `chain` is unknown or does not fit the units of the machine,
            `temperature` is missing or not applicable, or `visible` does not have V columns.
        TypeError: If `visible` does not have the type of the parameters.

    Example:
        >>> rbm = RBM(3, 2, generator=torch.Generator().manual_seed(0))
        >>> start, generator = torch.zeros(2, 3), torch.Generator().manual_seed(1)
        >>> gibbs(rbm, start, steps=1000, generator=generator).tolist()
        [[1.0, 0.0, 0.0], [1.0, 1.0, 0.0]]
    """
    steps = integer("steps", steps)
    joint = joint_of(rbm)
    unit = unit_of(chain, temperature, joint)
    check_units(joint.weights, visible, "visible")
    for _ in range(steps):
        hidden = unit(joint.hidden, joint.to_hidden(visible), generator)
        visible = unit(joint.visible, joint.to_visible(hidden), generator)
    return visible
