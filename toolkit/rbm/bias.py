r"""The exact bias of contrastive divergence: the error of holding the end of a chain constant.

If both layers of a machine can be enumerated, no samples are needed: k Gibbs steps take the data :math:`p_0` to a
distribution :math:`p_k(\theta) = p_0 T_\theta^k` that can be computed and differentiated. So every update known as
contrastive divergence can be compared with the gradient of the likelihood:

- the usual update, with :math:`p_k` held constant;
- the gradient of the difference of two Kullback-Leibler divergences, from which Hinton started; he dropped its third
  term, the derivative through :math:`p_k`. With this term the bias is that of twice as many steps, to first order in
  the distance from the data to the model: :math:`(p_0 - p) T^{2k} \partial \log p` in place of :math:`(p_0 - p) T^k
  \partial \log p`, since the chain is in detailed balance with the model;
- the update of Du and others for deep energy-based models, with the third term *added with the opposite sign*. There
  the term stabilises the sampler; as an estimate of the gradient the update has twice the bias;
- the gradient of the surrogate without a block, which also pulls the sampler up the energy.

S visible states, N data, V columns of visible units. Distributions are (S,), in the order of `visible_states`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from toolkit._checks import choice, integer
from toolkit._tensors import tensors
from toolkit.blocks import block, no_graph, stop_gradient
from toolkit.rbm.machine.enumeration import states_of, units_of
from toolkit.rbm.machine.joint import Joint
from toolkit.rbm.machine.layers import Layer
from toolkit.rbm.machine.model import RBM, joint_of
from toolkit.rbm.surrogates.divergence import graph_if_open

__all__ = [
    "CHAIN_DISTRIBUTION",
    "CHAIN_ENERGY",
    "Bias",
    "Divergence",
    "bias",
    "chain_distribution",
    "data_distribution",
    "exact_divergence",
    "gradient_fields",
    "transition_matrix",
    "visible_states",
]

Divergence: TypeAlias = Literal["free_energy", "kullback_leibler", "improved"]

CHAIN_DISTRIBUTION = block(
    "rbm.chain_distribution",
    "Contrastive divergence holds the distribution of its chain ends constant; the derivative through it is the third "
    "term of the gradient, which Hinton derived and dropped.",
)

CHAIN_ENERGY = block(
    "rbm.chain_energy",
    "The energy that judges a sampler is held constant while the sampler moves; its own gradient would cancel the "
    "negative phase.",
)

_LARGEST_TABLE = 2**24  # numbers: 128 MiB in float64


def visible_states(rbm: RBM | Joint) -> Tensor:
    r"""Return all states of the visible layer, (S, V); the first unit changes slowest.

    Raises:
        ValueError: If the states of both layers cannot be enumerated together.

    Example:
        >>> visible_states(RBM(2, 1)).tolist()
        [[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]]
    """
    return _states(_enumerable(rbm).visible)


def data_distribution(rbm: RBM | Joint, data: Tensor) -> Tensor:
    r"""Return the share of the data in each visible state, (S,), in the order of `visible_states`.

    Args:
        rbm: The machine.
        data: (N, V).

    Raises:
        ValueError: If `data` is not (N, V) with N > 0 or a row is not a state of the visible units; and as for
            `visible_states`.

    Example:
        >>> data_distribution(RBM(2, 1), torch.tensor([[0.0, 1.0], [0.0, 1.0], [1.0, 1.0]]))
        tensor([0.0000, 0.6667, 0.0000, 0.3333])
    """
    states = visible_states(rbm)
    tensors(data=data)
    if data.ndim != 2 or data.shape[1] != states.shape[1] or not len(data):
        raise ValueError(f"`data` should have shape (N, {states.shape[1]}) with N > 0. Found {tuple(data.shape)}.")
    rows, counts = data.to(states).unique(dim=0, return_counts=True)
    exact = torch.promote_types(states.dtype, torch.float32)  # torch has no distances in half precision
    same = torch.cdist(rows.to(exact), states.to(exact), p=math.inf) == 0
    if not bool(same.any(1).all()):
        raise ValueError(f"`data` should be states of the visible units. Found {rows[~same.any(1)][0].tolist()}.")
    counted: Tensor = (same * counts[:, None]).sum(0).to(states)
    return counted / len(data)


def transition_matrix(rbm: RBM | Joint) -> Tensor:
    r"""Return the probabilities of one Gibbs step, :math:`T(v, v') = \sum_h p(h \mid v) \, p(v' \mid h)`, (S, S).

    It carries a gradient if the parameters do.

    Raises:
        ValueError: As for `visible_states`, or if the matrix would have more than 2^24 numbers.

    Example:
        >>> rbm = RBM(2, 1, dtype=torch.float64)
        >>> stationary = rbm.log_likelihood(visible_states(rbm)).exp()
        >>> torch.allclose(stationary @ transition_matrix(rbm), stationary)
        True
    """
    to_hidden, to_visible = _conditionals(_enumerable(rbm))
    if len(to_hidden) ** 2 > _LARGEST_TABLE:
        raise ValueError(f"The visible layer should have at most 2^12 states. Found {len(to_hidden)}.")
    return to_hidden @ to_visible


def chain_distribution(rbm: RBM | Joint, start: Tensor, *, steps: int) -> Tensor:
    r"""Return :math:`p_k = p_0 T^k`, (S,), the distribution of Gibbs chains after k steps.

    Args:
        rbm: The machine.
        start: :math:`p_0`, (S,), for example from `data_distribution`.
        steps: Number of Gibbs steps, k.

    Returns:
        (S,). It carries a gradient if the parameters do; no block is applied.

    Raises:
        ValueError: If `steps` is not positive or `start` is not a distribution over the states; and as for
            `visible_states`.
        TypeError: If `start` does not have the type of the parameters.
    """
    steps = integer("steps", steps)
    joint = _enumerable(rbm)
    _check_distribution(start, joint)
    to_hidden, to_visible = _conditionals(joint)
    for _ in range(steps):
        start = start @ to_hidden @ to_visible
    return start


def exact_divergence(rbm: RBM | Joint, start: Tensor, *, steps: int, divergence: Divergence) -> Tensor:
    r"""Return a surrogate of CD-k, in expectation over all chains.

    With the block :math:`\operatorname{sg}_p` of the chain's distribution, and the block :math:`\operatorname{sg}_E` of
    its energy, the surrogates are

    - ``"free_energy"``: :math:`\langle F \rangle_{p_0} - \langle F \rangle_{\operatorname{sg}_p(p_k)}`, the expectation
      of `contrastive_divergence`. With the block open the sampler is pulled up the energy:
      :math:`-\sum_v \partial p_k(v) F(v)` is added.
    - ``"kullback_leibler"``: :math:`KL(p_0 \| p) - KL(\operatorname{sg}_p(p_k) \| p)`, whose blocked gradient is the
      same, the update of CD-k. With the block open no term is dropped: Hinton's third term :math:`-\sum_v
      \partial p_k(v) [F(v) + \log p_k(v)]` is added.
    - ``"improved"``: :math:`\langle F \rangle_{p_0} - \langle F \rangle_{\operatorname{sg}_p(p_k)} +
      \langle \operatorname{sg}_E(F) + \log p_k \rangle_{p_k}`, as Du and others compute it. The third term enters with
      its opposite sign.

    Args:
        rbm: The machine.
        start: :math:`p_0`, (S,), for example from `data_distribution`.
        steps: Number of Gibbs steps, k.
        divergence: The name of the surrogate.

    Returns:
        A scalar, in nats per sample. For ``"kullback_leibler"`` it is Hinton's contrastive divergence, which is not
        negative.

    Raises:
        ValueError: If `divergence` is unknown; and as for `chain_distribution`.
        TypeError: As for `chain_distribution`.

    References:
        Hinton, "Training products of experts by minimizing contrastive divergence", 2002, equation 5.
        Du, Li, Tenenbaum & Mordatch, "Improved contrastive divergence training of energy-based models", 2021, as in
        the authors' code.

    Example:
        >>> rbm = RBM(2, 1, dtype=torch.float64)  # almost uniform, and so is where its chains end
        >>> start = data_distribution(rbm, torch.eye(2))
        >>> round(exact_divergence(rbm, start, steps=1, divergence="kullback_leibler").item(), 2)  # log 2
        0.69
    """
    choice("divergence", divergence, get_args(Divergence))
    joint = _enumerable(rbm)
    with nullcontext() if divergence == "improved" else graph_if_open(CHAIN_DISTRIBUTION):
        end = chain_distribution(joint, start, steps=steps)
    free_energy = joint.free_energy(_states(joint.visible))
    held = stop_gradient(end, CHAIN_DISTRIBUTION)
    surrogate = (start - held) @ free_energy
    match divergence:
        case "free_energy":
            return surrogate
        case "kullback_leibler":  # log Z is in both of its divergences
            return surrogate + _negative_entropy(start) - _negative_entropy(held)
        case _:
            return surrogate + end @ stop_gradient(free_energy, CHAIN_ENERGY) + _negative_entropy(end)


def gradient_fields(rbm: RBM, start: Tensor, *, steps: int) -> dict[str, dict[str, Tensor]]:
    r"""Return the exact gradient of the negative log-likelihood, and its approximations by the variants of CD-k.

    Gradients of frozen parameters (``requires_grad`` off) are returned too.

    Args:
        rbm: The machine.
        start: :math:`p_0`, (S,), for example from `data_distribution`.
        steps: Number of Gibbs steps, k.

    Returns:
        ``"likelihood"``, ``"blocked"`` (CD-k), ``"third_term"``, ``"improved"`` and ``"unblocked"`` -> the names of the
        parameters -> gradients to descend, per sample. The second, third and fourth lie on a line: ``improved - blocked
        == blocked - third_term``.

    Raises:
        ValueError: As for `chain_distribution`.
        TypeError: As for `chain_distribution`.

    Example:
        >>> rbm = RBM(4, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        >>> fields = gradient_fields(rbm, data_distribution(rbm, torch.eye(4)), steps=1)
        >>> errors = {name: bias(field, fields["likelihood"]).relative for name, field in fields.items()}
        >>> errors["third_term"] < errors["blocked"] < errors["improved"] < errors["unblocked"]
        True
    """
    joint = _enumerable(rbm)
    parameters = joint.tensors
    states = _states(joint.visible)

    def moving(tensors: dict[str, Tensor]) -> Tensor:
        return chain_distribution(joint.with_tensors(tensors), start, steps=steps)

    # The result does not depend on blocks that the caller has opened.
    with no_graph():
        free_energy = joint.free_energy(states)
        end, pull_back = torch.func.vjp(moving, parameters)  # type: ignore[misc]
        surprise = free_energy + end.clamp(min=torch.finfo(end.dtype).tiny).log()
        third, pull = (pull_back(values)[0] for values in (surprise, free_energy))
    of_start, of_end, of_model = rbm.statistics(states, start), rbm.statistics(states, end), rbm.model_statistics()
    update = {name: of_end[name] - of_start[name] for name in parameters}
    return {
        "likelihood": {name: of_model[name] - of_start[name] for name in parameters},
        "blocked": update,
        "third_term": {name: update[name] - third[name] for name in parameters},
        "improved": {name: update[name] + third[name] for name in parameters},
        "unblocked": {name: update[name] - pull[name] for name in parameters},
    }


@dataclass(frozen=True)
class Bias:
    """The distance between two gradients.

    Attributes:
        relative: The norm of the difference over all parameters, divided by the norm of the exact gradient: 0 if both
            gradients are zero, infinite if only the exact one is.
        cosine: Cosine of the angle between the two; NaN if one gradient is zero.
    """

    relative: float
    cosine: float


def bias(field: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> Bias:
    """Return the distance of a gradient from the exact one.

    Args:
        field: The names of the parameters -> a gradient.
        exact: The same names -> the exact gradient.

    Example:
        >>> bias({"weights": torch.tensor([3.0, 0.0])}, {"weights": torch.tensor([2.0, 0.0])})
        Bias(relative=0.5, cosine=1.0)
    """
    with no_graph():
        found, expected = (torch.cat([tree[name].flatten() for name in sorted(exact)]) for tree in (field, exact))
        size, own = expected.norm(), found.norm()
        distance = (found - expected).norm()
        relative = distance / size if bool(distance != 0) else distance
        return Bias(relative.item(), ((found @ expected) / (size * own)).item())


def _enumerable(rbm: RBM | Joint) -> Joint:
    """Return the machine as a function of its parameters, if the table of both layers' states can be kept."""
    joint = joint_of(rbm)
    for name, layer in (("visible", joint.visible), ("hidden", joint.hidden)):
        if layer.n_states is None:
            raise ValueError(f"The {name} units should have finitely many states. Found {type(layer).__name__} units.")
    assert joint.visible.n_states is not None
    assert joint.hidden.n_states is not None
    size = joint.visible.n_states * joint.hidden.n_states
    if size > _LARGEST_TABLE:
        raise ValueError(f"Both layers together should have at most 2^24 states. Found 2^{math.log2(size):.4g}.")
    return joint


def _check_distribution(start: Tensor, joint: Joint) -> None:
    n_states = joint.visible.n_states
    tensors(start=start)
    if start.shape != (n_states,):
        raise ValueError(f"`start` should have shape ({n_states},). Found {tuple(start.shape)}.")
    if start.dtype != joint.weights.dtype:
        raise TypeError(f"`start` should have the parameters' type {joint.weights.dtype}. Found {start.dtype}.")
    if not bool((start >= 0).all()):
        raise ValueError(f"`start` should be probabilities. Found {float(start[~(start >= 0)][0])}.")
    total = start.sum(dtype=torch.float64).item()
    if not abs(total - 1) <= max(1e-4, 4 * torch.finfo(start.dtype).eps):
        raise ValueError(f"`start` should be probabilities that add up to 1. Found a sum of {total:.6g}.")


def _states(layer: Layer) -> Tensor:
    """Return all states of a layer, (S, C)."""
    base, n_units = units_of(layer)
    states: Tensor = states_of(layer, torch.arange(base**n_units), n_units).unflatten(1, (n_units, -1))
    return states.flip(1).flatten(1)


def _conditionals(joint: Joint) -> tuple[Tensor, Tensor]:
    """Return p(h | v), a row for each visible state, and p(v | h), a row for each hidden one."""
    visible, hidden = _states(joint.visible), _states(joint.hidden)
    coupled = joint.to_hidden(visible) @ joint.hidden.statistic(hidden).mT
    to_hidden = (coupled + joint.hidden.log_weight(hidden)).softmax(1)
    to_visible = (coupled + joint.visible.log_weight(visible)[:, None]).softmax(0)
    return to_hidden, to_visible.mT


def _negative_entropy(distribution: Tensor) -> Tensor:
    r"""Return :math:`\sum p \log p`; underflowed probabilities count as the smallest positive number."""
    least = torch.finfo(distribution.dtype).tiny
    return distribution @ distribution.clamp(min=least).log()
