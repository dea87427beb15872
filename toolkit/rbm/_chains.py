"""Gibbs chains: where negative samples come from.

N chains, V visible units, H hidden units.
"""

from __future__ import annotations

import torch
from torch import Tensor

from toolkit.rbm._joint import Joint
from toolkit.rbm._model import RBM
from toolkit.rbm._units import UNITS, Chain

__all__ = ["check_steps", "gibbs"]


def gibbs(
    rbm: RBM | Joint,
    visible: Tensor,
    *,
    steps: int,
    chain: Chain = "sampled",
    generator: torch.Generator | None = None,
) -> Tensor:
    r"""Run Gibbs chains: `steps` times :math:`h \sim p(h \mid v)`, then :math:`v \sim p(v \mid h)`.

    Args:
        rbm: The machine, or a `Joint` with other parameters.
        visible: (N, V), where the chains start.
        steps: How often both layers are updated.
        chain: What a unit passes on.

            - ``"sampled"``: a draw. Its derivative is exactly zero, as that of `torch.bernoulli` is.
            - ``"straight_through"``: the same draw, bit for bit, with the derivative of the mean (Bengio, Léonard &
              Courville, "Estimating or propagating gradients through stochastic neurons", 2013).
            - ``"mean_field"``: the mean. No random numbers, and no longer a Markov chain of the model.
        generator: Draws the units, on their device. None: torch's default one.

    Returns:
        (N, V). It carries a gradient if the parameters do; whoever takes it for a constant blocks it.

    Raises:
        ValueError: If `steps` is not positive, `chain` is unknown, or `visible` does not have V columns.
        TypeError: If `visible` does not have the type of the parameters.

    Example:
        >>> rbm = RBM(3, 2, generator=torch.Generator().manual_seed(0))
        >>> start, generator = torch.zeros(2, 3), torch.Generator().manual_seed(1)
        >>> gibbs(rbm, start, steps=1000, generator=generator).tolist()
        [[1.0, 0.0, 0.0], [1.0, 1.0, 0.0]]
    """
    check_steps(steps)
    if chain not in UNITS:
        raise ValueError(f"`chain` should be one of {', '.join(map(repr, UNITS))}. Found {chain!r}.")
    if isinstance(rbm, RBM):
        rbm.check_visible(visible)
    joint, unit = rbm.joint if isinstance(rbm, RBM) else rbm, UNITS[chain]
    for _ in range(steps):
        hidden = unit(joint.hidden, joint.to_hidden(visible), generator)
        visible = unit(joint.visible, joint.to_visible(hidden), generator)
    return visible


def check_steps(steps: int) -> None:
    """Raise unless `steps` counts Gibbs steps."""
    if not isinstance(steps, int) or steps < 1:
        raise ValueError(f"`steps` should be a positive integer. Found {steps!r}.")
