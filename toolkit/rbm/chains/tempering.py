r"""Tempered chains: the same machine at many temperatures, or at many ages, with swaps between neighbours.

A Gibbs chain stays in one mode for a long time. At a high temperature, or early in training, modes are connected. Swaps
move states there and back, and preserve the distribution of every machine.

T temperatures or machines, M chains at each, N data, V columns of the visible layer, H of the hidden one. Energies are
in nats.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from toolkit._checks import choice, integer
from toolkit.blocks import no_graph
from toolkit.rbm.chains.units import UNITS, Chain, unit_of
from toolkit.rbm.machine.joint import Joint
from toolkit.rbm.machine.layers import Layer
from toolkit.rbm.machine.model import RBM

__all__ = [
    "Swaps",
    "TemperedState",
    "TemperingDiagnosis",
    "TrajectoryRatios",
    "adapt_temperatures",
    "diagnose_tempering",
    "parallel_tempering",
    "spread_temperatures",
    "swap_probabilities",
    "tempered_start",
    "trajectory_tempering",
]

Swaps: TypeAlias = Literal["joint", "marginal"]

_MOST_ITERATIONS = 1000  # of a fixed-point iteration, each of which reduces the error to the share of rejected swaps


@dataclass(frozen=True)
class TemperedState:
    """The state of tempered chains: made by `tempered_start`, then passed from call to call.

    Attributes:
        visible: (T, M, V), the visible units at each temperature; the last is that of the model.
        hidden: (T, M, H), the hidden units from which `visible` was drawn.
        replica: (T, M), the index of the temperature at which the state at this place started.
        fresh: (T, M), whether this state has visited the first temperature since its last visit to the last
            temperature.
        arrivals: (M,), the number of fresh states that arrived at the last temperature.
        steps: Number of steps taken; even steps swap the pairs (0, 1), (2, 3), ..., odd steps (1, 2), (3, 4), ...
    """

    visible: Tensor
    hidden: Tensor
    replica: Tensor
    fresh: Tensor
    arrivals: Tensor
    steps: int


def tempered_start(
    rbm: RBM | Joint,
    *,
    n_temperatures: int,
    n_chains: int,
    reference: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> TemperedState:
    """Return chains that start from the machine without weights: exact draws at an inverse temperature of 0.

    Args:
        rbm: The machine.
        n_temperatures: T.
        n_chains: M, chains at each temperature.
        reference: As in `parallel_tempering`.
        generator: Draws the units. None: torch's default generator.

    Raises:
        ValueError: If a number is not positive, or `reference` does not have the shape (V,).
        TypeError: If `reference` is not a tensor.

    Example:
        >>> from toolkit.rbm import RBM
        >>> rbm, generator = RBM(3, 2, generator=torch.Generator().manual_seed(0)), torch.Generator().manual_seed(1)
        >>> state = tempered_start(rbm, n_temperatures=3, n_chains=4, generator=generator)
        >>> state.visible.shape, state.hidden.shape
        (torch.Size([3, 4, 3]), torch.Size([3, 4, 2]))
    """
    n_temperatures, n_chains = integer("n_temperatures", n_temperatures), integer("n_chains", n_chains)
    joint = _joint_of(rbm)
    with no_graph():
        visible, hidden = _tempered_layers(joint, joint.weights.new_zeros(()), _check_reference(reference, joint))
        like = joint.weights
        hidden_start = hidden.sample(like.new_zeros(n_temperatures, n_chains, hidden.n_columns), generator)
        visible_start = visible.sample(like.new_zeros(n_temperatures, n_chains, visible.n_columns), generator)
    return _new_state(visible_start, hidden_start)


def parallel_tempering(
    rbm: RBM | Joint,
    state: TemperedState,
    *,
    inverse_temperatures: Tensor | Sequence[float],
    steps: int,
    reference: Tensor | None = None,
    swaps: Swaps = "joint",
    chain: Chain = "sampled",
    generator: torch.Generator | None = None,
) -> tuple[TemperedState, Tensor]:
    r"""Take steps of parallel tempering: a Gibbs step at every temperature, then swaps of neighbouring temperatures.

    The machine at :math:`\beta` lies between a machine without weights and this one, :math:`E_\beta = E_0 + \beta D`.
    States at two temperatures are exchanged with the probability

    .. math::
        \min\{1, e^{(\beta_i - \beta_j) (D(v_i, h_i) - D(v_j, h_j))}\}, \qquad D = E - E_0

    which preserves :math:`\prod_i p_{\beta_i}(v_i, h_i)`, because D is the difference of *joint* energies. The free
    energy of the model is no substitute: :math:`\beta F(v)` is not the free energy of the machine at :math:`\beta`.
    Swaps of the visible units alone, with the free energies :math:`F_\beta` of the machines at both temperatures,
    preserve :math:`\prod_i p_{\beta_i}(v_i)`. More of these swaps are accepted, at the cost of three more sums over
    hidden units.

    Each step draws, in this order: the hidden units at all temperatures, (T, M, H); the visible units, (T, M, V); one
    uniform number for each pair that is tried, (T // 2, M) after an even number of steps, ((T - 1) // 2, M) after an
    odd one. With a single temperature of 1 this is `gibbs`, bit for bit.

    All temperatures share one matrix product, because its result is scaled in place of the weights.

    Args:
        rbm: The machine, with any kind of units.
        state: From `tempered_start`, or of the last call. Only its visible units influence the next steps.
        inverse_temperatures: (T,), :math:`\beta`, increasing, between 0 and 1. The last should be 1, so that its states
            are draws from the model.
        steps: The number of steps.
        reference: (V,), the visible biases of the machine without weights, see `Joint.annealed`. None: 0, so that
            :math:`E_\beta` is :math:`\beta E` for zeros and ones; the machine's own biases if the units are Gaussian.
        swaps: ``"joint"``, states of both layers by their joint energies; or ``"marginal"``, visible units by the free
            energies of both temperatures, with the hidden units drawn once more at the end.
        chain: The output of a unit, as in `gibbs`, except ``"concrete"``, whose relaxed units are no state of any
            machine. A derivative follows its state through swaps; the acceptance of a swap has derivative zero.
        generator: Draws units and swaps. None: torch's default generator.

    Returns:
        The new state, and the mean probability of a swap of each neighbouring pair, (T - 1,), a constant; it is
        computed for all pairs at every step, also for pairs that are not tried. Energies and probabilities are computed
        in float32 at least.

    Raises:
        ValueError: If `inverse_temperatures` is not as stated, `state` does not have T temperatures or the machine's
            sizes, `reference` does not have the shape (V,), `steps` is not positive, or `chain` or `swaps` is not as
            stated.
        TypeError: If `reference` is not a tensor, or `state` does not have the type of the parameters.

    References:
        Desjardins, Courville, Bengio, Vincent & Delalleau, "Tempered Markov chain Monte Carlo for training of
        restricted Boltzmann machines", 2010, section 3. Cho, Raiko & Ilin, "Parallel tempering is efficient for
        learning restricted Boltzmann machines", 2010. Syed, Bouchard-Côté, Deligiannidis & Doucet, "Non-reversible
        parallel tempering: a scalable highly parallel MCMC scheme", 2022, on alternating even and odd pairs.

    Example:
        >>> rbm, generator = RBM(3, 2, generator=torch.Generator().manual_seed(0)), torch.Generator().manual_seed(1)
        >>> state = tempered_start(rbm, n_temperatures=3, n_chains=4, generator=generator)
        >>> state, swap_rates = parallel_tempering(
        ...     rbm, state, inverse_temperatures=[0, 0.5, 1], steps=10, generator=generator)
        >>> state.visible[-1].shape, bool((swap_rates > 0.9).all())
        (torch.Size([4, 3]), True)
    """
    steps = integer("steps", steps)
    choice("chain", chain, (name for name in UNITS if name != "concrete"))
    choice("swaps", swaps, get_args(Swaps))
    joint = _joint_of(rbm)
    unit = unit_of(chain, None, joint)
    betas = _check_temperatures(inverse_temperatures, joint)
    reference = _check_reference(reference, joint)
    _check_state(state, len(betas), joint)
    visible_layer, hidden_layer = _tempered_layers(joint, betas, reference)
    per_unit = betas[:, None, None]
    to_hidden = joint.to_hidden(state.visible)
    rates = betas.new_zeros(len(betas) - 1, dtype=torch.float64)
    for _ in range(steps):
        hidden = unit(hidden_layer, per_unit * to_hidden, generator)
        visible = unit(visible_layer, per_unit * joint.to_visible(hidden), generator)
        to_hidden = joint.to_hidden(visible)
        with no_graph():
            if swaps == "joint":
                probabilities = _joint_probabilities(joint, betas, visible, hidden, to_hidden, reference)
            else:
                probabilities = _marginal_probabilities(joint, betas, visible, to_hidden, reference)
            rates += probabilities.mean(1)
        rows, state = _swap(probabilities, state, generator)
        to_hidden = _take(to_hidden, rows)
    if swaps == "joint":
        hidden = _take(hidden, rows)
    else:
        hidden = unit(hidden_layer, per_unit * to_hidden, generator)
    swap_rates = (rates / steps).to(probabilities.dtype)
    return dataclasses.replace(state, visible=_take(visible, rows), hidden=hidden), swap_rates


def swap_probabilities(
    rbm: RBM | Joint,
    visible: Tensor,
    hidden: Tensor,
    *,
    inverse_temperatures: Tensor | Sequence[float],
    reference: Tensor | None = None,
) -> Tensor:
    """Return the probability with which `parallel_tempering` swaps each pair of neighbours, (T - 1, M), a constant.

    Args:
        rbm: The machine.
        visible: (T, M, V).
        hidden: (T, M, H).
        inverse_temperatures: As in `parallel_tempering`.
        reference: As in `parallel_tempering`.

    Raises:
        ValueError: If `inverse_temperatures` is not increasing from 0 or more to 1 or less, or `reference` does not
            have the shape (V,).
        TypeError: If `reference` is not a tensor.

    Example:
        >>> from toolkit.rbm import RBM
        >>> rbm, generator = RBM(3, 2, generator=torch.Generator().manual_seed(0)), torch.Generator().manual_seed(1)
        >>> state = tempered_start(rbm, n_temperatures=3, n_chains=4, generator=generator)
        >>> swap_probabilities(rbm, state.visible, state.hidden, inverse_temperatures=[0, 0.5, 1]).shape
        torch.Size([2, 4])
    """
    joint = _joint_of(rbm)
    betas = _check_temperatures(inverse_temperatures, joint)
    reference = _check_reference(reference, joint)
    with no_graph():
        return _joint_probabilities(joint, betas, visible, hidden, joint.to_hidden(visible), reference)


# --- temperatures: how good they are, and better ones -------------------------------------------------------------


@dataclass(frozen=True)
class TemperingDiagnosis:
    r"""The result of `diagnose_tempering`.

    Attributes:
        barrier: :math:`\Lambda = \sum_i r_i`, with the rejection rates :math:`r_i` of the swaps. With enough
            temperatures it hardly depends on their choice, and measures the distance between the machines at both ends.
        arrival_rate: Fresh states that arrive at the last temperature per step and chain: 1 / the return time.
        expected_arrival_rate: :math:`1 / (2 + 2 \sum_i r_i / (1 - r_i))`, the arrival rate if every state forgot its
            energy between two swaps.
        suggested_temperatures: :math:`2 \Lambda + 1`, rounded up, the number of temperatures that gives the most
            arrivals for the work.
    """

    barrier: float
    arrival_rate: float
    expected_arrival_rate: float
    suggested_temperatures: int


def diagnose_tempering(before: TemperedState, after: TemperedState, swap_rates: Tensor) -> TemperingDiagnosis:
    """Measure how well the swaps carry fresh states from the first temperature to the last.

    If the arrival rate is far below the expected rate, the Gibbs steps between the swaps mix badly. Then more steps, or
    a better first machine, help; more temperatures do not.

    Args:
        before: The state at which counting begins, after the chains have forgotten their start.
        after: A later state of the same chains.
        swap_rates: (T - 1,), the mean probability of a swap of each pair between the two states.

    Raises:
        ValueError: If `after` is not later than `before`, they differ in the number of temperatures or chains, there is
            only one temperature, or `swap_rates` are not T - 1 probabilities.

    References:
        Syed, Bouchard-Côté, Deligiannidis & Doucet, "Non-reversible parallel tempering: a scalable highly parallel
        MCMC scheme", 2022, theorem 1 and section 5.

    Example:
        >>> rbm, generator = RBM(3, 2, generator=torch.Generator().manual_seed(0)), torch.Generator().manual_seed(1)
        >>> before = tempered_start(rbm, n_temperatures=3, n_chains=100, generator=generator)
        >>> after, swap_rates = parallel_tempering(
        ...     rbm, before, inverse_temperatures=[0, 0.5, 1], steps=100, generator=generator)
        >>> round(diagnose_tempering(before, after, swap_rates).arrival_rate, 1)
        0.5
    """
    steps = after.steps - before.steps
    if steps < 1:
        raise ValueError(f"`after` should be later than `before`. Found {after.steps} and {before.steps} steps.")
    if before.replica.shape != after.replica.shape:
        found = f"{tuple(before.replica.shape)} and {tuple(after.replica.shape)}"
        raise ValueError(f"`before` and `after` should have as many temperatures and chains, (T, M). Found {found}.")
    n_pairs = len(after.replica) - 1
    if not n_pairs:
        raise ValueError("`after` should have at least two temperatures. Found 1.")
    swap_rates = _check_rates(swap_rates, n_pairs)
    rejected = 1 - swap_rates
    return TemperingDiagnosis(
        barrier=float(rejected.sum()),
        arrival_rate=float((after.arrivals - before.arrivals).double().mean()) / steps,
        expected_arrival_rate=float(1 / (2 + 2 * (rejected / swap_rates).sum())),
        suggested_temperatures=max(2, math.ceil(2 * float(rejected.sum()) + 1)),
    )


def spread_temperatures(
    inverse_temperatures: Tensor | Sequence[float], swap_rates: Tensor, *, n_temperatures: int | None = None
) -> Tensor:
    r"""Return inverse temperatures with the same ends and equal swap probabilities between neighbours.

    The rejection rates add up to a barrier :math:`\Lambda(\beta)`, which is interpolated and divided into equal parts.

    Args:
        inverse_temperatures: (T,), as in `parallel_tempering`, T > 1.
        swap_rates: (T - 1,), the mean probability of a swap of each pair of these temperatures.
        n_temperatures: The number of temperatures to return. None: T.

    Returns:
        (n_temperatures,), in float64.

    Raises:
        ValueError: If `swap_rates` are not T - 1 probabilities, or there are fewer than two temperatures.

    References:
        Syed, Bouchard-Côté, Deligiannidis & Doucet, "Non-reversible parallel tempering: a scalable highly parallel
        MCMC scheme", 2022, algorithm 2.

    Example:
        >>> spread_temperatures([0, 0.5, 1], torch.tensor([0.9, 0.7]))
        tensor([0.0000, 0.6667, 1.0000], dtype=torch.float64)
    """
    betas = torch.as_tensor(inverse_temperatures, dtype=torch.float64).cpu()
    if betas.ndim != 1 or len(betas) < 2:
        raise ValueError(f"`inverse_temperatures` should be at least two. Found {betas.tolist()}.")
    rejected = 1 - _check_rates(swap_rates, len(betas) - 1)
    n_temperatures = len(betas) if n_temperatures is None else integer("n_temperatures", n_temperatures, 2)
    # A small multiple of the distance is added, so that the barrier increases also where every swap is accepted.
    barrier = torch.cat([betas.new_zeros(1), (rejected + 1e-6 * betas.diff()).cumsum(0)])
    marks = torch.linspace(0, float(barrier[-1]), n_temperatures, dtype=betas.dtype, device=betas.device)
    above = torch.searchsorted(barrier, marks[1:-1]).clamp(1, len(betas) - 1)
    below = above - 1
    part = (marks[1:-1] - barrier[below]) / (barrier[above] - barrier[below])
    return torch.cat([betas[:1], betas[below] + part * (betas[above] - betas[below]), betas[-1:]])


def _check_rates(swap_rates: Tensor | Sequence[float], n_pairs: int) -> Tensor:
    """Return the mean probabilities of swaps, (T - 1,), float64, on the CPU; raise ValueError if they are invalid."""
    rates = torch.as_tensor(swap_rates, dtype=torch.float64).cpu()
    if rates.shape != (n_pairs,) or not bool(((rates >= 0) & (rates <= 1)).all()):
        raise ValueError(f"`swap_rates` should be {n_pairs} probabilities, one for each pair. Found {rates.tolist()}.")
    return rates


def adapt_temperatures(
    rbm: RBM | Joint,
    state: TemperedState,
    *,
    inverse_temperatures: Tensor | Sequence[float],
    rounds: int,
    steps: int,
    reference: Tensor | None = None,
    swaps: Swaps = "joint",
    generator: torch.Generator | None = None,
) -> tuple[Tensor, TemperedState]:
    """Find inverse temperatures with equal swap probabilities between neighbours, in rounds of doubling length.

    Args:
        rbm: The machine.
        state: The start of the chains.
        inverse_temperatures: (T,), initial values; the two ends are kept.
        rounds: The number of rounds; each ends with `spread_temperatures`.
        steps: Steps of `parallel_tempering` in the first round.
        reference: As in `parallel_tempering`.
        swaps: As in `parallel_tempering`.
        generator: Draws units and swaps. None: torch's default generator.

    Returns:
        (T,), the inverse temperatures, and the state of the chains.

    Raises:
        ValueError: If `rounds` is not positive, there are fewer than two temperatures; and as for `parallel_tempering`.

    Example:
        >>> rbm, generator = RBM(6, 4, generator=torch.Generator().manual_seed(0)), torch.Generator().manual_seed(1)
        >>> state = tempered_start(rbm, n_temperatures=4, n_chains=20, generator=generator)
        >>> betas, state = adapt_temperatures(
        ...     rbm, state, inverse_temperatures=[0, 0.1, 0.2, 1], rounds=3, steps=50, generator=generator)
        >>> bool((betas - torch.linspace(0, 1, 4)).abs().max() < 0.1)  # hardly any weights: evenly spaced
        True
    """
    rounds, steps = integer("rounds", rounds), integer("steps", steps)
    betas = torch.as_tensor(inverse_temperatures, dtype=torch.float64).cpu()
    with no_graph():
        for length in (steps << doubled for doubled in range(rounds)):
            state, swap_rates = parallel_tempering(
                rbm,
                state,
                inverse_temperatures=betas,
                steps=length,
                reference=reference,
                swaps=swaps,
                generator=generator,
            )
            betas = spread_temperatures(betas, swap_rates)
    return betas, state


# --- machines along a training ------------------------------------------------------------------------------------


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

    Machines saved during training take the place of temperatures, from a machine that is easy to sample to the last. A
    model with a phase transition in its temperature often has none along its training. The visible units of two
    machines are exchanged with the probability

    .. math::
        \min\{1, e^{F_i(v_i) + F_j(v_j) - F_i(v_j) - F_j(v_i)}\}

    in the *free* energies of both machines, with their hidden units summed out. Hidden units are drawn again before
    they are used, so these swaps preserve :math:`\prod_i p_i(v_i)`, and are accepted more often than swaps with joint
    energies. The hidden units `TemperedState.hidden` are drawn after the swaps.

    The same free energies give the ratios of neighbouring partition functions, from the states of both machines
    (Bennett's acceptance ratio). That of a first machine without weights is known, :math:`\log Z_0 = \sum \log \sum_v
    e^{a(v)} + \sum \log \sum_h e^{a(h)}` (`Layer.log_normaliser` of 0), and with the sum of the log-ratios it gives log
    Z of the last machine.

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
        ValueError: If there are no machines, they differ in their units or sizes, `state` does not have their number or
            sizes, or `steps` is not positive.

    References:
        Béreux, Decelle, Furtlehner, Rosset & Seoane, "Fast training and sampling of restricted Boltzmann machines",
        2024, on swaps between machines saved during training. Bennett, "Efficient estimation of free energy differences
        from Monte Carlo data", 1976, equations 8 and 12.

    Example:
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
        _check_state(state, len(machines), joint)
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
            rows, state = _swap(probabilities, state, generator)
            visible = _take(visible, rows)
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
    joints = [_joint_of(machine) for machine in machines]
    if not joints:
        raise ValueError("`machines` should be at least one. Found none.")
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

    def together(layers: Sequence[Layer]) -> Layer:
        fields = ("bias", *layers[0].more_parameters)
        values = {field: torch.stack([getattr(layer, field) for layer in layers])[:, None] for field in fields}
        return dataclasses.replace(layers[0], **values)

    return Joint(
        torch.stack([joint.weights for joint in joints]),
        together([joint.visible for joint in joints]),
        together([joint.hidden for joint in joints]),
    )


def _described(kind: tuple[torch.Size, type[Layer], type[Layer], int | None, torch.dtype]) -> str:
    shape, visible, hidden, n_states, dtype = kind
    states = "" if n_states is None else f" with {n_states} states"
    return f"{visible.__name__} units{states} and {hidden.__name__} units, weights {tuple(shape)}, {dtype}"


def _part(joint: Joint, machines: slice) -> Joint:
    """Return a part of the machines in the leading dimension."""
    layers = [
        dataclasses.replace(
            layer, **{field: getattr(layer, field)[machines] for field in ("bias", *layer.more_parameters)}
        )
        for layer in (joint.visible, joint.hidden)
    ]
    return Joint(joint.weights[machines], *layers)


# --- swaps --------------------------------------------------------------------------------------------------------


def _tempered_layers(joint: Joint, betas: Tensor, reference: Tensor | None) -> tuple[Layer, Layer]:
    """Return both layers at each temperature. The inputs are scaled in place of the weights."""
    annealed = dataclasses.replace(joint, weights=joint.weights.new_zeros(())).annealed(betas, reference)
    return annealed.visible, annealed.hidden


def _joint_probabilities(
    joint: Joint, betas: Tensor, visible: Tensor, hidden: Tensor, to_hidden: Tensor, reference: Tensor | None
) -> Tensor:
    """Return the probability to swap the states of each pair of neighbours, (T - 1, M), at least in float32."""
    exact, visible, to_hidden, reference = _in_full_precision(joint, visible, to_hidden, reference)
    difference = _difference(exact, visible, hidden.to(visible), to_hidden, reference)
    return _swap_probabilities(betas.to(visible), difference)


def _in_full_precision(
    joint: Joint, visible: Tensor, to_hidden: Tensor, reference: Tensor | None
) -> tuple[Joint, Tensor, Tensor, Tensor | None]:
    """Return the machine, states and inputs in float32 at least: half precision is too coarse for energies."""
    exact = joint.in_full_precision()
    if exact is joint:
        return joint, visible, to_hidden, reference
    visible = visible.to(exact.weights)
    return exact, visible, exact.to_hidden(visible), None if reference is None else reference.to(visible)


def _difference(joint: Joint, visible: Tensor, hidden: Tensor, to_hidden: Tensor, reference: Tensor | None) -> Tensor:
    """Return `Joint.annealed_difference`, (T, M), from a known input of the hidden layer."""
    reference = joint.visible.reference if reference is None else reference
    at_zero = joint.visible.with_bias(reference).log_weight(visible)
    interaction = ((to_hidden + joint.hidden.bias) * joint.hidden.statistic(hidden)).sum(-1)
    return at_zero - joint.visible.log_weight(visible) - interaction


def _marginal_probabilities(
    joint: Joint, betas: Tensor, visible: Tensor, to_hidden: Tensor, reference: Tensor | None
) -> Tensor:
    """Return the probability to swap the visible units of each pair of neighbours, (T - 1, M), at least in float32."""
    exact, visible, to_hidden, reference = _in_full_precision(joint, visible, to_hidden, reference)
    betas = betas.to(visible)
    layers, per_unit = _tempered_layers(exact, betas, reference), betas[:, None, None]

    def free_energy(machines: slice, states: slice) -> Tensor:
        of_visible, of_hidden = (layer.with_bias(layer.bias[machines]) for layer in layers)
        input = per_unit[machines] * to_hidden[states]
        return -of_visible.log_weight(visible[states]) - of_hidden.log_normaliser(input)

    every, lower, upper = slice(None), slice(None, -1), slice(1, None)
    own = free_energy(every, every)
    return (own[lower] + own[upper] - free_energy(lower, upper) - free_energy(upper, lower)).exp().clamp(max=1)


def _swap_probabilities(betas: Tensor, difference: Tensor) -> Tensor:
    """Return the probability to swap each pair of neighbours, (T - 1, M), from D at each temperature, (T, M)."""
    return (betas.diff()[:, None] * difference.diff(dim=0)).exp().clamp(max=1)


def _swap(
    probabilities: Tensor, state: TemperedState, generator: torch.Generator | None
) -> tuple[Tensor, TemperedState]:
    """Draw the swaps of the even or the odd pairs.

    Returns:
        (T, M), the row of (T M, ...) that moves to each place; and the state after the swaps, without its units.
    """
    n_temperatures, n_chains = state.replica.shape
    first = state.steps % 2
    tried = probabilities[first::2]
    place = torch.arange(n_temperatures * n_chains, device=tried.device).view(n_temperatures, n_chains)
    if len(tried):
        exchanged = n_chains * (torch.empty_like(tried).uniform_(generator=generator) < tried)
        place[first : n_temperatures - 1 : 2] += exchanged
        place[first + 1 :: 2] -= exchanged
    replica, fresh, arrivals = _take(state.replica, place), _take(state.fresh, place), state.arrivals
    if n_temperatures > 1:
        arrivals = arrivals + fresh[-1]
        fresh[-1] = False
        fresh[0] = True
    moved = dataclasses.replace(state, replica=replica, fresh=fresh, arrivals=arrivals, steps=state.steps + 1)
    return place, moved


def _take(units: Tensor, rows: Tensor) -> Tensor:
    """Return the rows of (T, M, ...) that were drawn by `_swap`."""
    return units.flatten(0, 1).index_select(0, rows.flatten()).view_as(units)


def _new_state(visible: Tensor, hidden: Tensor) -> TemperedState:
    n_temperatures, n_chains = visible.shape[:2]
    device = visible.device
    replica = torch.arange(n_temperatures, device=device)[:, None].expand(-1, n_chains)
    fresh = replica == (0 if n_temperatures > 1 else -1)
    return TemperedState(visible, hidden, replica, fresh, torch.zeros_like(replica[0]), 0)


def _joint_of(rbm: RBM | Joint) -> Joint:
    return rbm.joint if isinstance(rbm, RBM) else rbm


def _check_temperatures(inverse_temperatures: Tensor | Sequence[float], joint: Joint) -> Tensor:
    betas = torch.as_tensor(inverse_temperatures, dtype=torch.float64)
    increases = betas.ndim == 1 and len(betas) > 0 and bool((betas.diff() > 0).all())
    if not increases or not float(betas[0]) >= 0 or not float(betas[-1]) <= 1:
        raise ValueError(f"`inverse_temperatures` should increase from 0 or more to 1 or less. Found {betas.tolist()}.")
    return betas.to(joint.weights)


def _check_reference(reference: Tensor | None, joint: Joint) -> Tensor | None:
    if reference is None:
        return None
    if not isinstance(reference, Tensor):
        raise TypeError(f"`reference` should be a tensor. Found {type(reference).__name__}.")
    shape = (joint.visible.n_columns,)
    if reference.shape != shape:
        raise ValueError(f"`reference` should have shape {shape}. Found {tuple(reference.shape)}.")
    return reference.to(joint.weights)


def _check_state(state: TemperedState, n_temperatures: int, joint: Joint) -> None:
    n_visible, n_hidden = joint.weights.shape[-2:]
    for name, units, columns in (("visible", state.visible, n_visible), ("hidden", state.hidden, n_hidden)):
        if units.ndim != 3 or len(units) != n_temperatures or units.shape[2] != columns or not units.shape[1]:
            raise ValueError(
                f"`state.{name}` should have shape ({n_temperatures}, M, {columns}), M > 0. Found {tuple(units.shape)}."
            )
        if units.dtype != joint.weights.dtype:
            raise TypeError(
                f"`state.{name}` should have the parameters' type {joint.weights.dtype}. Found {units.dtype}."
            )
