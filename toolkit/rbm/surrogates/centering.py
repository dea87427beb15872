r"""Centring: the gradient in coordinates that are invariant to flips and shifts of the data.

The energy of a centred machine subtracts offsets from the units, :math:`(s(v) - \mu)^\top W (h - \lambda)`. With biases
:math:`b' = b + W \lambda` and :math:`c' = c + W^\top \mu` its distribution is that of the machine with b and c, but a
gradient step in :math:`(W, b', c')` differs. Here the surrogate's gradient is this step; the machine keeps its own
parameters.

N data, V columns of visible units, H hidden units.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from toolkit._checks import instance, number
from toolkit.blocks import block, stop_gradient
from toolkit.rbm.chains.units import Chain
from toolkit.rbm.machine.joint import Joint
from toolkit.rbm.machine.model import RBM, joint_of
from toolkit.rbm.surrogates.divergence import Energy, checked_joint, contrastive_divergence

__all__ = [
    "CENTERED_COORDINATES",
    "CENTERING_OFFSETS",
    "Offsets",
    "centered",
    "centered_contrastive_divergence",
    "centered_gradient",
    "centering_offsets",
]

CENTERING_OFFSETS = block(
    "rbm.centering_offsets",
    "Offsets choose the coordinates of a step; their dependence on the parameters is no part of the likelihood's "
    "gradient.",
)

CENTERED_COORDINATES = block(
    "rbm.centered_coordinates",
    "The biases of the centred machine are independent coordinates while the weights move; without the block the step "
    "is the ordinary, uncentred one.",
)


@dataclass(frozen=True)
class Offsets:
    r"""The offsets that are subtracted from the units before they are coupled.

    Attributes:
        visible: :math:`\mu`, (V,), of the visible units' statistic: v itself, or :math:`v / \sigma^2` if Gaussian.
        hidden: :math:`\lambda`, (H,), of the hidden units.
    """

    visible: Tensor
    hidden: Tensor


def centering_offsets(rbm: RBM | Joint, data: Tensor, *, previous: Offsets | None = None, rate: float = 1.0) -> Offsets:
    r"""Return the means of both layers over the data, or running means over batches.

    .. math::
        \mu \leftarrow (1 - \nu) \mu + \nu \, \frac1N \sum_n s(v_n), \qquad
        \lambda \leftarrow (1 - \nu) \lambda + \nu \, \frac1N \sum_n E[h \mid v_n]

    Args:
        rbm: The machine.
        data: (N, V).
        previous: The previous offsets. None: return the means of these data.
        rate: :math:`\nu`, the weight of the new means; only with `previous`.

    Returns:
        Constants.

    Raises:
        ValueError: If `data` is not (N, V) with N > 0, or `rate` is not between 0 and 1.
        TypeError: If `data` does not have the type of the parameters.

    References:
        Montavon & Müller, "Deep Boltzmann machines and the centering trick", 2012.
        Melchior, Fischer & Wiskott, "How to center deep Boltzmann machines", 2016.

    Example:
        >>> rbm = RBM(3, 2, generator=torch.Generator().manual_seed(0))
        >>> centering_offsets(rbm, torch.eye(3)[:2]).visible
        tensor([0.5000, 0.5000, 0.0000])
    """
    rate = number("rate", rate, least=0, most=1)
    joint = checked_joint(rbm, data=data)
    visible = joint.visible.statistic(data).mean(0)
    hidden = joint.hidden.statistic(joint.hidden_mean(data)).mean(0)
    if previous is not None:
        instance("previous", previous, Offsets)
        visible, hidden = previous.visible.lerp(visible, rate), previous.hidden.lerp(hidden, rate)
    return Offsets(*stop_gradient((visible, hidden), CENTERING_OFFSETS))


def centered(rbm: RBM | Joint, offsets: Offsets) -> Joint:
    r"""Return the same machine, bit for bit, with centred gradients.

    A gradient :math:`(G_W, G_b, G_c)` of any function of this machine arrives at the parameters as

    .. math::
        C = G_W - G_b \lambda^\top - \mu G_c^\top, \qquad G_b - C \lambda, \qquad G_c - C^\top \mu

    so that plain descent takes the step of descent on :math:`(W, b', c')`. This step is invariant if units are flipped
    together with the data (or Gaussian units shifted). The gradient of a log-variance is unchanged. Call this function
    again for every update, because the result depends on the current parameters.

    Args:
        rbm: The machine.
        offsets: From `centering_offsets`, or any tensors of the right sizes; with zeros the gradient is not centred.

    Raises:
        ValueError: If the offsets do not have the shapes (V,) and (H,).

    References:
        Montavon & Müller, "Deep Boltzmann machines and the centering trick", 2012.
        Melchior, Fischer & Wiskott, "How to center deep Boltzmann machines", 2016.

    Example:
        >>> rbm, data = RBM(3, 2, generator=torch.Generator().manual_seed(0)), torch.eye(3)
        >>> machine = centered(rbm, centering_offsets(rbm, data))
        >>> loss = contrastive_divergence(machine, data, steps=1, generator=torch.Generator().manual_seed(1))
        >>> loss.backward()
    """
    joint = joint_of(rbm)
    instance("offsets", offsets, Offsets)
    for name, layer in (("visible", joint.visible), ("hidden", joint.hidden)):
        found = getattr(offsets, name).shape
        if found != (layer.n_columns,):
            raise ValueError(f"`offsets.{name}` should have shape ({layer.n_columns},). Found {tuple(found)}.")
    weights, b, c, mu, lam = joint.weights, joint.visible.bias, joint.hidden.bias, offsets.visible, offsets.hidden
    held_b, held_c, shift_b, shift_c = stop_gradient((b, c, weights @ lam, weights.mT @ mu), CENTERED_COORDINATES)
    # Differences that are exactly zero, with a derivative: a step of the biases b' and c' moves W, and W moves both.
    moved = weights - torch.outer(b - held_b, lam) - torch.outer(mu, c - held_c)
    visible = joint.visible.with_bias(b + (shift_b - moved @ lam))
    hidden = joint.hidden.with_bias(c + (shift_c - moved.mT @ mu))
    return Joint(moved, visible, hidden)


def centered_contrastive_divergence(
    rbm: RBM | Joint,
    data: Tensor,
    *,
    steps: int,
    offsets: Offsets | None = None,
    chain: Chain = "sampled",
    temperature: float | None = None,
    energy: Energy = "free",
    generator: torch.Generator | None = None,
) -> Tensor:
    r"""Return the surrogate of centred CD-k: `contrastive_divergence` of the `centered` machine.

    Its gradient is `centered_gradient` of `cd_gradient`. For persistent chains::

        persistent_contrastive_divergence(centered(rbm, offsets), data, chains, steps=1)

    Args:
        rbm: The machine.
        data: (N, V).
        steps: k, the number of Gibbs steps.
        offsets: None: the `centering_offsets` of these data.
        chain: As in `gibbs`.
        temperature: As in `gibbs`.
        energy: As in `contrastive_divergence`.
        generator: Draws the chains. None: torch's default generator.

    Returns:
        A scalar, in nats per sample.

    Raises:
        ValueError: As for `contrastive_divergence` and `centered`.
        TypeError: If `data` does not have the type of the parameters.

    References:
        Melchior, Fischer & Wiskott, "How to center deep Boltzmann machines", 2016.

    Example:
        >>> rbm = RBM(3, 2, generator=torch.Generator().manual_seed(0))
        >>> draws = torch.Generator().manual_seed(1)
        >>> centered_contrastive_divergence(rbm, torch.eye(3), steps=1, generator=draws).backward()
    """
    offsets = centering_offsets(rbm, data) if offsets is None else offsets
    checked_joint(rbm, data=data)
    return contrastive_divergence(
        centered(rbm, offsets),
        data,
        steps=steps,
        chain=chain,
        temperature=temperature,
        energy=energy,
        generator=generator,
    )


def centered_gradient(gradient: Mapping[str, Tensor], offsets: Offsets) -> dict[str, Tensor]:
    r"""Return the centred form of a gradient in closed form, for updates without autograd; see `centered`.

    Args:
        gradient: The names of the parameters -> an ordinary gradient, from `cd_gradient` or `likelihood_gradient`.
        offsets: As in `centered`.

    Returns:
        The same names -> the centred gradient.

    References:
        Melchior, Fischer & Wiskott, "How to center deep Boltzmann machines", 2016.

    Example:
        >>> rbm, data = RBM(3, 2, generator=torch.Generator().manual_seed(0)), torch.eye(3)
        >>> plain = {name: torch.ones_like(value) for name, value in rbm.named_parameters()}
        >>> centered_gradient(plain, Offsets(torch.ones(3), torch.zeros(2)))["hidden_bias"]
        tensor([1., 1.])
    """
    b, c, mu, lam = gradient["visible_bias"], gradient["hidden_bias"], offsets.visible, offsets.hidden
    weights = gradient["weights"] - torch.outer(b, lam) - torch.outer(mu, c)
    changed = {"weights": weights, "visible_bias": b - weights @ lam, "hidden_bias": c - weights.mT @ mu}
    return {**gradient, **changed}
