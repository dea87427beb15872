"""Contrastive divergence: surrogates to differentiate, and their gradients in closed form.

The surrogate is a difference of energies: descent lowers the energy at the data and raises it at negative samples. The
update rule of contrastive divergence holds the samples constant. This rule is the gradient of no function (Sutskever &
Tieleman, "On the convergence properties of contrastive divergence", 2010). The derivative through the samples depends
on the units of the chain: it is zero for draws; otherwise it pulls the sampler *up* the energy, towards improbable
samples.

N data, M negative samples, V visible units, H hidden units. Losses are in nats per sample.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor
from torch.compiler import is_compiling

from toolkit._checks import choice
from toolkit.blocks import Block, block, is_blocked, no_graph, stop_gradient
from toolkit.rbm.chains.gibbs import gibbs
from toolkit.rbm.chains.units import Chain
from toolkit.rbm.machine.joint import Joint
from toolkit.rbm.machine.model import RBM, check_units, joint_of

__all__ = [
    "HIDDEN_POSTERIORS",
    "NEGATIVE_SAMPLES",
    "PERSISTENT_CHAINS",
    "Energy",
    "cd_gradient",
    "contrastive_divergence",
    "expected_energy",
    "likelihood_gradient",
    "persistent_contrastive_divergence",
]

Energy: TypeAlias = Literal["free", "expected"]

NEGATIVE_SAMPLES = block(
    "rbm.negative_samples",
    "Negative samples stand for draws from the model, at which the energy is raised; the motion of the draws with the "
    "parameters is no part of the likelihood's gradient.",
)

PERSISTENT_CHAINS = block(
    "rbm.persistent_chains",
    "The chains of one update start the chains of the next; without the block they would keep the graph of all "
    "earlier updates.",
)

HIDDEN_POSTERIORS = block(
    "rbm.hidden_posteriors",
    "By Fisher's identity the gradient of the free energy is that of the expected energy under the hidden units' "
    "posterior, with the posterior held constant.",
)


def contrastive_divergence(
    rbm: RBM | Joint,
    data: Tensor,
    *,
    steps: int,
    chain: Chain = "sampled",
    temperature: float | None = None,
    energy: Energy = "free",
    generator: torch.Generator | None = None,
) -> Tensor:
    r"""Return the surrogate of CD-k, whose gradient is `cd_gradient`.

    .. math::
        L = \frac1N \sum_n F(v_n) - \frac1N \sum_n F(\operatorname{sg}(v_n^{(k)}))

    :math:`v_n^{(k)}` is k Gibbs steps from :math:`v_n`. The value of the surrogate is not informative; descent
    approximately raises the likelihood.

    Args:
        rbm: The machine, or a `Joint` with other parameters, such as the result of `centered`.
        data: (N, V), states of the visible units; probabilities are allowed in place of zeros and ones.
        steps: k, the number of Gibbs steps.
        chain: As in `gibbs`.
        temperature: As in `gibbs`.
        energy: The energy in the surrogate: ``"free"``, or ``"expected"`` for `expected_energy`, which has the same
            gradient while its block is in place.
        generator: Draws the chains. None: torch's default generator.

    Returns:
        A scalar, in nats per sample.

    Raises:
        ValueError: If `data` is not (N, V) with N > 0 or not finite, or has values outside of the units' range; if
            `steps` is not positive, `energy` is unknown, or `chain` and `temperature` are invalid for `gibbs`.
        TypeError: If `rbm` is not a machine, or `data` does not have the type of the parameters.

    References:
        Hinton, "Training products of experts by minimizing contrastive divergence", 2002, equation 5, whose third
        term is dropped there, and blocked here.

    Example:
        >>> rbm = RBM(3, 2, generator=torch.Generator().manual_seed(0))
        >>> loss = contrastive_divergence(rbm, torch.eye(3), steps=1, generator=torch.Generator().manual_seed(1))
        >>> loss.backward()
        >>> rbm.visible_bias.grad
        tensor([0.3333, 0.0000, 0.0000])
    """
    joint = checked_joint(rbm, data=data)
    with graph_if_open(NEGATIVE_SAMPLES):
        moved = gibbs(joint, data, steps=steps, chain=chain, temperature=temperature, generator=generator)
    negative = stop_gradient(moved, NEGATIVE_SAMPLES)
    return energy_difference(joint, data, negative, energy)


def persistent_contrastive_divergence(
    rbm: RBM | Joint,
    data: Tensor,
    chains: Tensor,
    *,
    steps: int,
    chain: Chain = "sampled",
    temperature: float | None = None,
    energy: Energy = "free",
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    r"""Return the surrogate of persistent CD-k, and the chains for the next update.

    The surrogate is that of `contrastive_divergence`, but the chains start where the last update left them. So they
    stay close to the model's distribution while the model changes slowly.

    Args:
        rbm: The machine, or a `Joint`, as in `contrastive_divergence`.
        data: (N, V).
        chains: (M, V); the second result of the last call. M need not be N.
        steps: k, the number of Gibbs steps.
        chain: As in `gibbs`.
        temperature: As in `gibbs`.
        energy: As in `contrastive_divergence`.
        generator: Draws the chains. None: torch's default generator.

    Returns:
        The surrogate, a scalar in nats per sample, and the new chains, (M, V), constants.

    Raises:
        ValueError: If `data` or `chains` has no rows or not V columns, `steps` is not positive, `energy` is unknown,
            or `chain` and `temperature` are invalid for `gibbs`.
        TypeError: If `rbm` is not a machine, or `data` or `chains` does not have the type of the parameters.

    References:
        Tieleman, "Training restricted Boltzmann machines using approximations to the likelihood gradient", 2008.

    Example:
        >>> rbm, generator = RBM(3, 2, generator=torch.Generator().manual_seed(0)), torch.Generator().manual_seed(1)
        >>> data = chains = torch.eye(3)
        >>> for _ in range(2):
        ...     loss, chains = persistent_contrastive_divergence(rbm, data, chains, steps=1, generator=generator)
        >>> chains.requires_grad
        False
    """
    joint = checked_joint(rbm, data=data, chains=chains)
    move = partial(gibbs, joint, chains, steps=steps, chain=chain, temperature=temperature, generator=generator)
    return persistent_surrogate(joint, data, move, energy)


def expected_energy(rbm: RBM | Joint, visible: Tensor) -> Tensor:
    r"""Return :math:`E_{h \sim \operatorname{sg}(p(h \mid v))}[E(v, h)]` in nats, per sample.

    .. math::
        \langle E \rangle(v) = -a(v) - (c + W^\top s(v))^\top \operatorname{sg}(E[h \mid v])

    By Fisher's identity its gradient is that of the free energy, in the parameters and in `visible`. Its value is
    larger by the entropy of the posterior (for rectified units also by terms that do not depend on the parameters). The
    leak of the block is the gradient of that entropy, :math:`-x_j \operatorname{Var}[h_j \mid v]` at the input :math:`x
    = c + W^\top s(v)` of unit j. With the block open the gradient is that of the expected energy itself, the output of
    the model of Elfwing and others.

    Args:
        rbm: The machine, or a `Joint`.
        visible: (\*, V).

    Returns:
        (\*).

    Raises:
        ValueError: If `visible` does not have V columns.
        TypeError: If `rbm` is not a machine, or `visible` does not have the type of the parameters.

    References:
        Neal & Hinton, "A view of the EM algorithm that justifies incremental, sparse, and other variants", 1998,
        section 2. Elfwing, Uchibe & Doya, "Expected energy-based restricted Boltzmann machine for classification",
        2015.

    Example:
        >>> rbm, visible = RBM(3, 2, generator=torch.Generator().manual_seed(0)), torch.eye(3)
        >>> expected, free = expected_energy(rbm, visible), rbm.free_energy(visible)
        >>> gradients = [torch.autograd.grad(each.sum(), rbm.weights)[0] for each in (expected, free)]
        >>> torch.allclose(*gradients)
        True
    """
    joint = joint_of(rbm)
    check_units(joint.weights, visible, "visible")
    x = joint.to_hidden(visible)
    # Outside of the graph if no gradient may flow: the posterior is as large as all hidden units.
    with graph_if_open(HIDDEN_POSTERIORS):
        mean = joint.hidden.mean(x)
    hidden = joint.hidden.statistic(stop_gradient(mean, HIDDEN_POSTERIORS))
    return -joint.visible.log_weight(visible) - ((x + joint.hidden.bias) * hidden).sum(-1)


def cd_gradient(rbm: RBM, data: Tensor, negative: Tensor) -> dict[str, Tensor]:
    r"""Return the update of contrastive divergence in closed form, as a gradient to descend.

    .. math::
        \partial_W = E_-[v h^\top] - E_+[v h^\top], \quad
        \partial_b = E_-[v] - E_+[v], \quad
        \partial_c = E_-[h] - E_+[h]

    The hidden units are at their probabilities. :math:`E_+` is the mean over the rows of `data` and :math:`E_-` the
    mean over the rows of `negative`; their numbers may differ.

    Args:
        rbm: The machine.
        data: (N, V).
        negative: (M, V); the negative samples.

    Returns:
        The names of the parameters -> gradients.

    Raises:
        ValueError: If `data` or `negative` has no rows or not V columns.
        TypeError: If `rbm` is not a machine, or `data` or `negative` does not have the type of the parameters.

    References:
        Hinton, "A practical guide to training restricted Boltzmann machines", 2010, sections 2 and 3.3.

    Example:
        >>> rbm = RBM(3, 2, generator=torch.Generator().manual_seed(0))
        >>> cd_gradient(rbm, torch.eye(3), torch.ones(1, 3))["visible_bias"]
        tensor([0.6667, 0.6667, 0.6667])
    """
    rbm.check_rows(data, "data")
    rbm.check_rows(negative, "negative")
    return _difference(rbm.statistics(negative), rbm.statistics(data))


def likelihood_gradient(rbm: RBM, data: Tensor) -> dict[str, Tensor]:
    """Return the exact gradient of the mean *negative* log-likelihood, which contrastive divergence approximates.

    The gradient is `cd_gradient` with the model's expectations in place of the negative samples.

    Args:
        rbm: The machine; its smaller layer is enumerated.
        data: (N, V).

    Returns:
        The names of the parameters -> gradients.

    Raises:
        ValueError: If `data` has no rows or not V columns, or both layers are too large to enumerate.
        TypeError: If `rbm` is not a machine, or `data` does not have the type of the parameters.

    Example:
        >>> from toolkit.rbm import RBM
        >>> rbm = RBM(3, 2, generator=torch.Generator().manual_seed(0))
        >>> {name: tuple(g.shape) for name, g in likelihood_gradient(rbm, torch.eye(3)).items()}
        {'weights': (3, 2), 'visible_bias': (3,), 'hidden_bias': (2,)}
    """
    rbm.check_rows(data, "data")
    return _difference(rbm.model_statistics(), rbm.statistics(data))


def _difference(minuend: dict[str, Tensor], subtrahend: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: minuend[name] - subtrahend[name] for name in minuend}


def checked_joint(rbm: RBM | Joint, **rows: Tensor) -> Joint:
    """Return the machine as a function of its parameters; raise unless all `rows` fit its visible units.

    The values of `data` are checked as well, except in compiled code, where reading them would break the graph.
    """
    joint = joint_of(rbm)
    for argument, value in rows.items():
        check_units(joint.weights, value, argument, rows=True)
    if "data" in rows and not is_compiling():
        with no_graph():
            joint.visible.check(rows["data"], "data")
    return joint


def persistent_surrogate(
    joint: Joint, data: Tensor, move: Callable[[], Tensor], energy: Energy = "free"
) -> tuple[Tensor, Tensor]:
    """Return the surrogate with the chains that `move` returns as negative samples; and these chains, as constants."""
    with graph_if_open(NEGATIVE_SAMPLES, PERSISTENT_CHAINS):
        moved = move()
    negative = stop_gradient(moved, NEGATIVE_SAMPLES)
    return energy_difference(joint, data, negative, energy), stop_gradient(moved, PERSISTENT_CHAINS)


def energy_difference(joint: Joint, data: Tensor, negative: Tensor, energy: Energy) -> Tensor:
    """Return the mean energy of the data minus that of the negative samples: a scalar, in nats per sample."""
    choice("energy", energy, get_args(Energy))
    if energy == "free":
        return joint.free_energy(data).mean() - joint.free_energy(negative).mean()
    return expected_energy(joint, data).mean() - expected_energy(joint, negative).mean()


def graph_if_open(*blocks: Block) -> AbstractContextManager[object]:
    """Build no graph while all of `blocks` are in place, because no gradient could flow through it."""
    return no_graph() if all(map(is_blocked, blocks)) else nullcontext()
