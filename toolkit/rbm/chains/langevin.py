r"""Langevin moves of Gaussian visible units, alternating with draws of the hidden ones.

A move takes a small step down the energy and adds noise. It is a differentiable path: unlike a draw of zeros and ones
it passes the gradient, at every step.

N chains, V visible units, H hidden units. Energies are in nats.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from toolkit._checks import choice, integer, number
from toolkit.blocks import no_graph
from toolkit.rbm.machine.joint import Joint
from toolkit.rbm.machine.layers import Gaussian
from toolkit.rbm.machine.model import RBM, check_units, joint_of

__all__ = ["HiddenInMoves", "gibbs_langevin"]

HiddenInMoves: TypeAlias = Literal["drawn", "summed_out"]

_LARGEST_STEP = 4.0  # beyond this step size moves overshoot by more than the distance


def gibbs_langevin(
    rbm: RBM | Joint,
    visible: Tensor,
    *,
    steps: int,
    step_size: float | Sequence[float] | Tensor,
    moves: int = 1,
    hidden: HiddenInMoves = "drawn",
    adjusted: bool = False,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    r"""Run chains of Langevin moves of Gaussian visible units, with the step size in units of their variance.

    .. math::
        v' = v + \tfrac\epsilon2 (m - v) + \sqrt\epsilon \, \sigma \xi, \qquad \xi \sim N(0, 1), \qquad m = b + W h

    is a move down the energy :math:`E(v, h)`, scaled by :math:`\sigma^2`, with hidden units :math:`h \sim p(h \mid v)`
    drawn once per step. With :math:`m = b + W E[h \mid v]` it is a move down the free energy.

    Unadjusted moves have a different stationary distribution, with an error of the order of the step size: given the
    hidden units, the variance is :math:`\sigma^2 / (1 - \epsilon / 4)`. With `adjusted` a move is accepted by the rule
    of Metropolis and Hastings, and the chain is exact at every step size. Given the hidden units the visible ones are
    independent, so each is accepted separately, with probability

    .. math::
        \min\{1, e^{-\frac\epsilon8 (d'^2 - d^2)}\}, \qquad d = (v - m) / \sigma

    while moves down the free energy are accepted for all units of a row at once.

    `gibbs` draws the visible units given the hidden ones exactly, at the same cost, and moves between modes at least as
    fast as adjusted moves with drawn hidden units. Use Langevin moves where the path matters: for samples that should
    stay close to their start, or to study the leak through a path.

    Args:
        rbm: The machine, whose visible units are Gaussian.
        visible: (N, V), the start of the chains.
        steps: The number of steps.
        step_size: :math:`\epsilon`, between 0 and 4; or a sequence of one value for each step.
        moves: The number of moves in each step.
        hidden: ``"drawn"``: Gibbs-Langevin sampling, with hidden units drawn at the start of each step.
            ``"summed_out"``: plain Langevin sampling of the free energy, without draws of hidden units.
        adjusted: Whether moves may be rejected. The derivative then follows the accepted moves; the decision itself has
            derivative zero.
        generator: In each step, draws the hidden units (N, H) if they are drawn; then for each move noise (N, V), and
            the decisions (N, V) or (N,). None: torch's default generator.

    Returns:
        (N, V), which carries a gradient if the parameters do; and the mean acceptance probability of the moves, a
        constant scalar, at least in float32; 1 if they are not adjusted.

    Raises:
        ValueError: If the visible units are not Gaussian, `visible` does not have V columns, `steps` or `moves` is not
            positive, a step size is out of range, the number of step sizes is not `steps`, or `hidden` is unknown.
        TypeError: If `visible` does not have the type of the parameters.

    References:
        Liao, Kornblith, Ren, Fleet & Hinton, "Gaussian-Bernoulli RBMs without tears", 2022, section 3.
        Roberts & Tweedie, "Exponential convergence of Langevin distributions and their discrete approximations", 1996,
        on the adjustment.

    Example:
        >>> rbm = RBM(3, 2, visible="gaussian", generator=torch.Generator().manual_seed(0))
        >>> start, generator = torch.zeros(1000, 3), torch.Generator().manual_seed(1)
        >>> draws, accepted = gibbs_langevin(
        ...     rbm, start, steps=20, step_size=1.0, adjusted=True, generator=generator)
        >>> round(draws.std().item(), 1), round(accepted.item(), 1)
        (1.0, 0.9)
    """
    steps, moves = integer("steps", steps), integer("moves", moves)
    choice("hidden", hidden, get_args(HiddenInMoves))
    sizes = _check_sizes(step_size, steps)
    joint, layer = _gaussian(rbm)
    check_units(joint.weights, visible, "visible")
    deviation = (layer.log_variance / 2).exp()
    exact = torch.promote_types(visible.dtype, torch.float32)
    # In float64: a sum of many small numbers.
    probability = visible.new_zeros((), dtype=torch.float64)
    for size in sizes:
        mean = joint.visible_mean(joint.sample_hidden(visible, generator)) if hidden == "drawn" else None
        for _ in range(moves):
            here = _mean_given_all(joint, visible) if mean is None else mean
            noise = torch.empty_like(visible, dtype=exact).normal_(generator=generator).to(visible.dtype)
            proposal = visible + (here - visible) * (size / 2) + math.sqrt(size) * deviation * noise
            if not adjusted:
                visible = proposal
                continue
            with no_graph():
                # Half precision is too coarse for a difference of energies, and for draws that depend on it.
                before, after, deviations = (tensor.to(exact) for tensor in (visible, proposal, deviation))
                if mean is None:
                    there = _mean_given_all(joint, proposal).to(exact)
                    wide = joint.in_full_precision()
                    log_ratio = _log_ratio(wide, before, after, here.to(exact), there, deviations, size)[..., None]
                else:
                    log_ratio = _log_ratio_given_hidden(before, after, mean.to(exact), deviations, size)
                accepting = log_ratio.exp().clamp(max=1)
                probability = probability + accepting.mean() / (steps * moves)
                accepted = torch.empty_like(accepting).uniform_(generator=generator) < accepting
            visible = torch.where(accepted, proposal, visible)
    return visible, (probability if adjusted else torch.ones_like(probability)).to(exact)


def _mean_given_all(joint: Joint, visible: Tensor) -> Tensor:
    """Return b + W E[h | v]: the free energy falls towards it, by the distance over the variance."""
    return joint.visible_mean(joint.hidden_mean(visible))


def _log_ratio_given_hidden(visible: Tensor, proposal: Tensor, mean: Tensor, deviation: Tensor, size: float) -> Tensor:
    """Return the log of the acceptance ratio of each unit's move, (N, V), the hidden units given.

    For normal units the log-ratio of densities, -(d'^2 - d^2) / 2, and that of the moves,
    (d'^2 - d^2) (1 / 2 - size / 8), nearly cancel.
    """
    before, after = (visible - mean) / deviation, (proposal - mean) / deviation
    return (before.square() - after.square()) * (size / 8)


def _log_ratio(
    joint: Joint, visible: Tensor, proposal: Tensor, here: Tensor, there: Tensor, deviation: Tensor, size: float
) -> Tensor:
    """Return the log of the acceptance ratio of each row's move, (N,), the hidden units summed out.

    `here` and `there` are the points towards which moves from `visible` and from `proposal` tend.
    """

    def log_density(to: Tensor, start: Tensor, mean: Tensor) -> Tensor:
        return -((to - start - (mean - start) * (size / 2)) / deviation).square().sum(-1) / (2 * size)

    back = log_density(visible, proposal, there)
    return joint.free_energy(visible) - joint.free_energy(proposal) + back - log_density(proposal, visible, here)


def _gaussian(rbm: RBM | Joint) -> tuple[Joint, Gaussian]:
    joint = joint_of(rbm)
    if not isinstance(joint.visible, Gaussian):
        raise ValueError(f"`rbm` should have Gaussian visible units. Found {type(joint.visible).__name__} units.")
    return joint, joint.visible


def _check_sizes(step_size: float | Sequence[float] | Tensor, steps: int) -> list[float]:
    given = step_size.tolist() if isinstance(step_size, Tensor) else step_size
    several = given if isinstance(given, list | tuple) else [given] * steps
    if len(several) != steps:
        raise ValueError(f"`step_size` should be one number, or {steps}, one for each step. Found {len(several)}.")
    return [number("step_size", size, above=0, below=_LARGEST_STEP) for size in several]
