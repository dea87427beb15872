r"""Parallel tempering: the same machine at many temperatures, with swaps between neighbours.

A Gibbs chain stays in one mode for a long time. At a high temperature modes are connected. Swaps move states to high
temperatures and back, and preserve the distribution at every temperature.

T temperatures, M chains at each, N data, V columns of the visible layer, H of the hidden one. Energies are in nats.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from toolkit._checks import choice, integer
from toolkit.blocks import no_graph
from toolkit.rbm.chains.state import TemperedState, check_state, new_state, swap, take
from toolkit.rbm.chains.units import UNITS, Chain, unit_of
from toolkit.rbm.machine.joint import Joint, checked_reference
from toolkit.rbm.machine.layers import Layer
from toolkit.rbm.machine.model import RBM, joint_of

__all__ = [
    "Swaps",
    "TemperingDiagnosis",
    "adapt_temperatures",
    "diagnose_tempering",
    "parallel_tempering",
    "spread_temperatures",
    "swap_probabilities",
    "tempered_start",
]

Swaps: TypeAlias = Literal["joint", "marginal"]


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
        n_temperatures: Number of temperatures, T.
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
    joint = joint_of(rbm)
    with no_graph():
        visible, hidden = _tempered_layers(joint, joint.weights.new_zeros(()), _check_reference(reference, joint))
        like = joint.weights
        hidden_start = hidden.sample(like.new_zeros(n_temperatures, n_chains, hidden.n_columns), generator)
        visible_start = visible.sample(like.new_zeros(n_temperatures, n_chains, visible.n_columns), generator)
    return new_state(visible_start, hidden_start)


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
        state: From `tempered_start`, or of the last call. Only the visible units influence the next steps.
        inverse_temperatures: (T,), :math:`\beta`, increasing, between 0 and 1. The last should be 1, so that the states
            there are draws from the model.
        steps: The number of steps.
        reference: (V,), the visible biases of the machine without weights, see `Joint.annealed`. None: 0, so that
            :math:`E_\beta` is :math:`\beta E` for zeros and ones; the machine's own biases if the units are Gaussian.
        swaps: ``"joint"``, states of both layers by their joint energies; or ``"marginal"``, visible units by the free
            energies of both temperatures, with the hidden units drawn once more at the end.
        chain: The output of a unit, as in `gibbs`, except ``"concrete"``, whose relaxed units are not a state of any
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
    joint = joint_of(rbm)
    unit = unit_of(chain, None, joint)
    betas = rising_temperatures(inverse_temperatures).to(joint.weights)
    reference = _check_reference(reference, joint)
    check_state(state, len(betas), joint)
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
        rows, state = swap(probabilities, state, generator)
        to_hidden = take(to_hidden, rows)
    if swaps == "joint":
        hidden = take(hidden, rows)
    else:
        hidden = unit(hidden_layer, per_unit * to_hidden, generator)
    swap_rates = (rates / steps).to(probabilities.dtype)
    return dataclasses.replace(state, visible=take(visible, rows), hidden=hidden), swap_rates


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
    joint = joint_of(rbm)
    betas = rising_temperatures(inverse_temperatures).to(joint.weights)
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
        expected_arrival_rate: :math:`1 / (2 + 2 \sum_i r_i / (1 - r_i))`, the arrival rate if the energies of a state
            at successive swaps were independent.
        suggested_temperatures: :math:`2 \Lambda + 1`, rounded up, the number of temperatures with the most arrivals per
            unit of work.
    """

    barrier: float
    arrival_rate: float
    expected_arrival_rate: float
    suggested_temperatures: int


def diagnose_tempering(before: TemperedState, after: TemperedState, swap_rates: Tensor) -> TemperingDiagnosis:
    """Measure how well the swaps carry fresh states from the first temperature to the last.

    If the arrival rate is far below the expected rate, the Gibbs steps between the swaps mix badly. In this case more
    steps or a better first machine help; more temperatures do not.

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
    betas = as_temperatures(inverse_temperatures).cpu()
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
        ValueError: If `rounds` is not positive or there are fewer than two temperatures; and as for
            `parallel_tempering`.

    Example:
        >>> rbm, generator = RBM(6, 4, generator=torch.Generator().manual_seed(0)), torch.Generator().manual_seed(1)
        >>> state = tempered_start(rbm, n_temperatures=4, n_chains=20, generator=generator)
        >>> betas, state = adapt_temperatures(
        ...     rbm, state, inverse_temperatures=[0, 0.1, 0.2, 1], rounds=3, steps=50, generator=generator)
        >>> bool((betas - torch.linspace(0, 1, 4)).abs().max() < 0.1)  # hardly any weights: evenly spaced
        True
    """
    rounds, steps = integer("rounds", rounds), integer("steps", steps)
    betas = as_temperatures(inverse_temperatures).cpu()
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
    difference = exact.annealed_difference(visible, hidden.to(visible), reference, to_hidden)
    return (betas.to(visible).diff()[:, None] * difference.diff(dim=0)).exp().clamp(max=1)


def _in_full_precision(
    joint: Joint, visible: Tensor, to_hidden: Tensor, reference: Tensor | None
) -> tuple[Joint, Tensor, Tensor, Tensor | None]:
    """Return the machine, states and inputs in float32 at least: half precision is too coarse for energies."""
    exact = joint.in_full_precision()
    if exact is joint:
        return joint, visible, to_hidden, reference
    visible = visible.to(exact.weights)
    return exact, visible, exact.to_hidden(visible), None if reference is None else reference.to(visible)


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


def as_temperatures(inverse_temperatures: Tensor | Sequence[float]) -> Tensor:
    """Return inverse temperatures as float64; raise a TypeError if they are not numbers."""
    try:
        return torch.as_tensor(inverse_temperatures, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError):
        found = type(inverse_temperatures).__name__
        raise TypeError(f"`inverse_temperatures` should be a tensor or a list of numbers. Found {found}.") from None


def rising_temperatures(
    inverse_temperatures: Tensor | Sequence[float], *, last: Literal["1", "1 or less"] = "1 or less"
) -> Tensor:
    """Return inverse temperatures as float64; raise a ValueError unless they increase from 0 or more to `last`."""
    betas = as_temperatures(inverse_temperatures)
    increases = betas.ndim == 1 and len(betas) > 0 and float(betas[0]) >= 0 and bool((betas.diff() > 0).all())
    if not increases or not float(betas[-1]) <= 1 or (last == "1" and float(betas[-1]) != 1):
        raise ValueError(f"`inverse_temperatures` should increase from 0 or more to {last}. Found {betas.tolist()}.")
    return betas


def _check_reference(reference: Tensor | None, joint: Joint) -> Tensor | None:
    return None if reference is None else checked_reference(reference, joint).to(joint.weights)
