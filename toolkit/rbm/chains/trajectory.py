r"""Trajectory tempering: the same machine at many ages, with swaps between neighbours.

A Gibbs chain stays in one mode for a long time. Early in training modes are connected. Swaps move states to early
machines and back, and preserve the distribution of every machine.

T machines, M chains of each. Energies are in nats.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from toolkit._checks import integer
from toolkit.blocks import no_graph
from toolkit.rbm.chains.state import TemperedState, check_state, swap, take
from toolkit.rbm.machine.joint import Joint
from toolkit.rbm.machine.layers import Layer
from toolkit.rbm.machine.model import RBM, joint_of

__all__ = ["TrajectoryRatios", "trajectory_tempering"]

_MOST_ITERATIONS = 1000  # of a fixed-point iteration, each of which reduces the error to the share of rejected swaps


@dataclass(frozen=True)
class TrajectoryRatios:
    r"""Estimates of `trajectory_tempering` about neighbouring machines.

    Attributes:
        swap_rates: (T - 1,), the mean probability of a swap of each pair.
        log_ratios: (T - 1,), estimates of :math:`\log Z_{i+1} - \log Z_i`, in nats.
        error: The standard error of the sum of `log_ratios`, from M chains that started independently; NaN for a single
            chain. It is valid once the chains have forgotten their start.
    """

    swap_rates: Tensor
    log_ratios: Tensor
    error: float


def trajectory_tempering(
    machines: Sequence[RBM | Joint],
    state: TemperedState,
    *,
    steps: int,
    generator: torch.Generator | None = None,
) -> tuple[TemperedState, TrajectoryRatios]:
    r"""Take steps of trajectory tempering: a Gibbs step of each machine, then swaps of neighbouring machines.

    Machines saved during training take the place of temperatures, from a machine that is easy to sample to the last
    machine. A model with a phase transition in its temperature often has no transition along its training. The visible
    units of two machines are exchanged with the probability

    .. math::
        \min\{1, e^{F_i(v_i) + F_j(v_j) - F_i(v_j) - F_j(v_i)}\}

    in the *free* energies of both machines, with their hidden units summed out. Hidden units are drawn again before
    they are used, so these swaps preserve :math:`\prod_i p_i(v_i)`, and are accepted more often than swaps with joint
    energies. The hidden units `TemperedState.hidden` are drawn after the swaps.

    The same free energies give the ratios of neighbouring partition functions, from the states of both machines
    (Bennett's acceptance ratio). The partition function of a first machine without weights is known, :math:`\log Z_0 =
    \sum \log \sum_v e^{a(v)} + \sum \log \sum_h e^{a(h)}` (`Layer.log_normaliser` of 0). Plus the sum of the log-ratios
    it is log Z of the last machine.

    Machines that differ only in temperature, ``[joint.annealed(beta) for beta in betas]``, are possible too.

    No graph is built: draws from the last machine, ``state.visible[-1]``, are constants.

    Args:
        machines: T machines of the same units and sizes.
        state: From `tempered_start`, or of the last call.
        steps: The number of steps.
        generator: Draws units and swaps, in the order of `parallel_tempering`, with the hidden units once more at the
            end. None: torch's default generator.

    Returns:
        The new state, and estimates of the ratios of partition functions from these steps. The call keeps 2 (T - 1) M
        numbers for each step until it ends.

    Raises:
        ValueError: If there are no machines, they differ in their units or sizes, `state` does not have the number or
            the sizes of the machines, or `steps` is not positive.

    References:
        Béreux, Decelle, Furtlehner, Rosset & Seoane, "Fast training and sampling of restricted Boltzmann machines",
        2024, on swaps between machines saved during training. Bennett, "Efficient estimation of free energy differences
        from Monte Carlo data", 1976, equations 8 and 12.

    Example:
        >>> from toolkit.rbm import tempered_start
        >>> rbm, generator = RBM(3, 2, generator=torch.Generator().manual_seed(0)), torch.Generator().manual_seed(1)
        >>> machines = [rbm.joint.annealed(0.0), rbm]
        >>> state = tempered_start(rbm, n_temperatures=2, n_chains=100, generator=generator)
        >>> state, ratios = trajectory_tempering(machines, state, steps=10, generator=generator)
        >>> abs(5 * math.log(2) + ratios.log_ratios.item() - rbm.log_partition().item()) < 4 * ratios.error
        True
    """
    steps = integer("steps", steps)
    with no_graph():
        joint = _side_by_side(machines)
        check_state(state, len(machines), joint)
        exact = joint.in_full_precision()
        lower, upper = _part(exact, slice(None, -1)), _part(exact, slice(1, None))
        visible, up, down = state.visible, [], []
        rates = joint.weights.new_zeros(len(machines) - 1, dtype=torch.float64)
        for _ in range(steps):
            hidden = joint.sample_hidden(visible, generator)
            visible = joint.sample_visible(hidden, generator)
            judged = visible.to(exact.weights)
            own = exact.free_energy(judged)
            up.append(upper.free_energy(judged[:-1]) - own[:-1])
            down.append(lower.free_energy(judged[1:]) - own[1:])
            probabilities = (-up[-1] - down[-1]).exp().clamp(max=1)
            rates += probabilities.mean(1)
            rows, state = swap(probabilities, state, generator)
            visible = take(visible, rows)
        hidden = joint.sample_hidden(visible, generator)
        log_ratios, error = _acceptance_ratios(torch.stack(up), torch.stack(down))
        moved = dataclasses.replace(state, visible=visible, hidden=hidden)
    return moved, TrajectoryRatios((rates / steps).to(exact.weights.dtype), log_ratios, error)


def _acceptance_ratios(up: Tensor, down: Tensor) -> tuple[Tensor, float]:
    r"""Return the log-ratios of partition functions (P,), and the standard error of their sum.

    Args:
        up: (S, P, M), :math:`F_{i+1}(v_i) - F_i(v_i)` at S steps for P pairs.
        down: (S, P, M), :math:`F_i(v_{i+1}) - F_{i+1}(v_{i+1})`.
    """
    up, down = up.double(), down.double()
    ratio = up.new_zeros(up.shape[1], 1)
    log_number = math.log(up.shape[0] * up.shape[2])
    for _ in range(_MOST_ITERATIONS):
        accepted_up = logsigmoid(-up - ratio).logsumexp((0, 2))[:, None] - log_number
        accepted_down = logsigmoid(-down + ratio).logsumexp((0, 2))[:, None] - log_number
        change = accepted_up - accepted_down
        ratio = ratio + change
        if bool((change.abs() < 1e-10).all()):
            break
    accepted_up, accepted_down = (-up - ratio).sigmoid(), (-down + ratio).sigmoid()
    slope = (accepted_up * (1 - accepted_up) + accepted_down * (1 - accepted_down)).mean((0, 2))
    influence = ((accepted_up - accepted_down).mean(0) / slope[:, None]).sum(0)
    error = influence.std() / math.sqrt(len(influence)) if len(influence) > 1 else math.nan
    return ratio[:, 0], float(error)


def _side_by_side(machines: Sequence[RBM | Joint]) -> Joint:
    """Return the machines as one, with a leading dimension."""
    joints = [joint_of(machine) for machine in machines]
    if not joints:
        raise ValueError("`machines` should hold at least one machine. Found none.")
    kinds = [
        (joint.weights.shape, type(joint.visible), type(joint.hidden), joint.visible.n_states, joint.weights.dtype)
        for joint in joints
    ]
    if len(set(kinds)) > 1:
        found = next(kind for kind in kinds if kind != kinds[0])
        raise ValueError(
            f"`machines` should all have the units, sizes and type of the first, {_described(kinds[0])}. "
            f"Found {_described(found)}."
        )
    stacked = {name: torch.stack([joint.tensors[name] for joint in joints]) for name in joints[0].tensors}
    # Parameters of units have one more dimension, that of the chains.
    return joints[0].with_tensors(
        {name: tensor if name == "weights" else tensor[:, None] for name, tensor in stacked.items()}
    )


def _described(kind: tuple[torch.Size, type[Layer], type[Layer], int | None, torch.dtype]) -> str:
    shape, visible, hidden, n_states, dtype = kind
    states = "" if n_states is None else f" with {n_states} states"
    return f"{visible.__name__} units{states} and {hidden.__name__} units, weights {tuple(shape)}, {dtype}"


def _part(joint: Joint, machines: slice) -> Joint:
    """Return a part of the machines in the leading dimension."""
    return joint.with_tensors({name: tensor[machines] for name, tensor in joint.tensors.items()})
