r"""Sums over all states of one layer, exactly: the partition function, its gradient, and draws from the model.

The units of the enumerated layer are split into first units and other units. Each state is the sum of a state of the
first and a state of the others, and so is its input to the other layer: no matrix of all states is needed, and no
matrix product. If the other layer has Bernoulli units, no exponential per state is needed either, because

.. math::
    \sum_j \log(1 + e^{x_j + y_j}) = \sum_j y_j + \log \prod_j (e^{x_j} + e^{-y_j}).

L states of the first units, B states of the others, C columns of the layer that is summed out.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any, Literal, TypeAlias

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch.nn.functional import one_hot
from torch.utils.checkpoint import checkpoint

from toolkit._checks import integer
from toolkit._tensors import exact_products
from toolkit.blocks import no_graph
from toolkit.rbm.machine.joint import Joint
from toolkit.rbm.machine.layers import Bernoulli, Categorical, Layer, Rectified

__all__ = ["ENUMERABLE_UNITS", "exact_samples", "log_partition", "model_statistics"]

ENUMERABLE_UNITS = 25
"""Sums over at most 2^25 states of one layer are exact; larger layers raise ValueError."""

Side: TypeAlias = Literal["visible", "hidden"]

_CACHE = 2**20  # bytes of a chunk on a CPU
_DEVICE = 2**26  # ... on an accelerator
_BLOCK = 2**9  # states of the other units per block
_TWIN_CHUNK = 2**11  # states at a time under autograd
LARGEST_LOG = {torch.float32: 80.0, torch.float64: 700.0}
"""The largest absolute logarithm of a product, by dtype."""


def log_partition(joint: Joint) -> Tensor:
    r"""Return :math:`\log Z = \log \sum_{v, h} e^{-E(v, h)}` in nats, exactly.

    The states of the layer with fewer states are enumerated in chunks; the other layer is summed, or integrated, in
    closed form. The first derivative is `model_statistics`: neither the forward nor the backward pass needs memory that
    grows with the number of states. Higher derivatives, and those of `torch.func`, go through autograd.

    Args:
        joint: The machine, or several side by side, weights (\*, V, H).

    Returns:
        (\*), at least in float32.

    Raises:
        ValueError: If both layers have more than 2 ^ `ENUMERABLE_UNITS` states, or cannot be enumerated.

    Example:
        >>> units = Bernoulli(torch.zeros(3)), Bernoulli(torch.zeros(2))
        >>> log_partition(Joint(torch.zeros(3, 2), *units).annealed(torch.tensor([0.0, 1.0]))).exp().round()
        tensor([32., 32.])
    """
    if joint.weights.ndim > 2:
        return _side_by_side([log_partition(machine) for machine in _machines(joint)], joint)
    side = _enumerated(joint)
    tensors = joint.tensors
    with exact_products(joint.weights.device):
        if torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0:
            return _twin(joint, side)
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors.values()):
            value: Tensor = _LogPartition.apply(joint, side, *tensors.values())  # type: ignore[no-untyped-call]
            return value
        with no_graph():
            return _log_partition(_States(joint, side))


def model_statistics(joint: Joint) -> dict[str, Tensor]:
    r"""Return the gradient of `log_partition`, in closed form and without a graph: the expectations of the model.

    .. math::
        \partial_\theta \log Z = - E_{v, h}[\partial_\theta E(v, h)]

    For zeros and ones these are :math:`E[v h^\top]`, :math:`E[v]` and :math:`E[h]`.

    Args:
        joint: One machine.

    Returns:
        The names of the parameters -> values of their shapes and types.

    Raises:
        ValueError: As for `log_partition`.
    """
    with no_graph(), exact_products(joint.weights.device):
        return _model_statistics(_States(joint, _enumerated(joint)))


def exact_samples(joint: Joint, n: int, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
    r"""Draw independent visible and hidden units from the model, without a chain.

    The layer with fewer states is drawn by the probabilities of its states, in two stages so that no table of all
    states is kept. The other layer is drawn given the first.

    Args:
        joint: The machine, or several side by side, weights (\*, V, H).
        n: N, the number of draws from each machine.
        generator: Source of the draws, on the machine's device. None: torch's default generator.

    Returns:
        The visible units, (\*, N, V), and the hidden ones, (\*, N, H). No graph is built.

    Raises:
        ValueError: If `n` is not positive or the parameters are not finite, and as for `log_partition`.

    Example:
        >>> from toolkit.rbm import RBM
        >>> rbm, generator = RBM(3, 2, generator=torch.Generator().manual_seed(0)), torch.Generator().manual_seed(1)
        >>> visible, hidden = exact_samples(rbm.joint, 5, generator)
        >>> visible.shape, hidden.shape
        (torch.Size([5, 3]), torch.Size([5, 2]))
    """
    n = integer("n", n)
    with no_graph(), exact_products(joint.weights.device):
        if joint.weights.ndim > 2:
            pairs = [exact_samples(machine, n, generator) for machine in _machines(joint)]
            visible, hidden = (_side_by_side([pair[i] for pair in pairs], joint) for i in (0, 1))
            return visible, hidden
        states = _States(joint, _enumerated(joint))
        own = _draw(states, n, generator).to(joint.weights.dtype)
        if states.side == "hidden":
            return joint.sample_visible(own, generator), own
        return own, joint.sample_hidden(own, generator)


def units_of(layer: Layer) -> tuple[int, int]:
    """Return the number of states of a unit, and the number of units."""
    if isinstance(layer, Categorical):
        return layer.categories, layer.n_columns // layer.categories
    return 2, layer.n_columns


def states_of(layer: Layer, numbers: Tensor, n_units: int) -> Tensor:
    """Return states of some units of a layer by their numbers, (N, columns); the first unit changes fastest."""
    base, _ = units_of(layer)
    numbers = numbers.to(layer.bias.device)
    digits = numbers[:, None] // base ** torch.arange(n_units, device=numbers.device) % base
    if isinstance(layer, Categorical):
        digits = one_hot(digits, base).flatten(1)
    return digits.to(layer.bias.dtype)


# --- states, and the layer that is summed out ---------------------------------------------------------------------


class _States:
    """The states of the layer that is enumerated: its first units' states, and blocks of those of its other units.

    Attributes:
        summed: The other layer, summed out for each state.
        inner, outer: The first units in two groups, so that a sum over their states has the shape of a table.
    """

    def __init__(self, joint: Joint, side: Side) -> None:
        self.joint, self.side = joint, side
        cast = joint.in_full_precision()
        self.type = cast.weights.dtype
        if side == "hidden":
            self.own, other, weights = cast.hidden, cast.visible, cast.weights.mT
        else:
            self.own, other, weights = cast.visible, cast.hidden, cast.weights
        self.base, n_units = units_of(self.own)
        width = other.n_columns * (20 if isinstance(other, Rectified) else 1)
        at_a_time = (_DEVICE if weights.is_cuda else _CACHE) / (width * weights.element_size())
        n_first = min(n_units, max(1, int(math.log(max(at_a_time, 1), self.base))))
        self.n_blocks = self.base ** (n_units - n_first)
        self.inner = self._digits(torch.arange(self.base ** (n_first // 2)), n_first // 2)
        self.outer = self._digits(torch.arange(self.base ** (n_first - n_first // 2)), n_first - n_first // 2)
        self.n_last = n_units - n_first
        columns = self.inner.shape[1], self.outer.shape[1]
        w_inner, w_outer, self._w_last = weights.split([*columns, len(weights) - sum(columns)])
        b_inner, b_outer, self._b_last = self.own.bias.split([*columns, len(weights) - sum(columns)])
        x = (self.outer @ w_outer)[:, None] + self.inner @ w_inner
        self.log_weight = ((self.outer @ b_outer)[:, None] + self.inner @ b_inner).flatten()
        self.length = len(self.log_weight)
        x = x.flatten(0, 1)
        first, last = (self._range(part) for part in (torch.cat([w_inner, w_outer]), self._w_last))
        last = (last[0] + other.bias, last[1] + other.bias)
        self.summed = _products_of(other, x, first, last) or _Plain(other, x)

    def blocks(self) -> Iterator[Tensor]:
        """Yield the states of the other units, (B, columns)."""
        for first in range(0, self.n_blocks, _BLOCK):
            yield self.last(torch.arange(first, min(first + _BLOCK, self.n_blocks)))

    def last(self, numbers: Tensor) -> Tensor:
        """Return the states of the other units by their numbers, (B, columns)."""
        return self._digits(numbers, self.n_last)

    def first(self, numbers: Tensor) -> Tensor:
        """Return the states of the first units by their numbers, (N, columns)."""
        numbers = numbers.to(self.inner.device)
        length = len(self.inner)
        return torch.cat([self.inner[numbers % length], self.outer[numbers // length]], -1)

    def log_weights(self, last: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield for each row of a block its place, and the log-weights of all states with this row, (L,)."""
        self.summed.enter(last @ self._w_last)
        constant = last @ self._b_last
        for row in range(len(last)):
            log_weights: Tensor = self.summed.log_normaliser(row)
            yield row, log_weights.add_(self.log_weight).add_(constant[row])

    def _digits(self, numbers: Tensor, n_units: int) -> Tensor:
        return states_of(self.own, numbers, n_units)

    def _range(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Return the least and the largest input from the units, (C,) each."""
        if not isinstance(self.own, Categorical):
            return weights.clamp(max=0).sum(0), weights.clamp(min=0).sum(0)
        by_unit = weights.unflatten(0, (len(weights) // self.base, self.base))
        return by_unit.amin(1).sum(0), by_unit.amax(1).sum(0)


class _Plain:
    """Units of any kind, summed out by their layer's own formula: the specification of the faster classes."""

    def __init__(self, layer: Layer, x: Tensor) -> None:
        self.layer, self.x = layer, x

    def enter(self, y: Tensor) -> None:
        """Prepare for the inputs of a block of states of the other units, (B, C)."""
        self.y = y

    def log_normaliser(self, row: int) -> Tensor:
        """Return `Layer.log_normaliser` of all states with this row of the block, (L,)."""
        self.input = self.x + self.y[row]
        return self.layer.log_normaliser(self.input)

    def expectations(self, row: int, share: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return sums of the mean statistic; called after `log_normaliser`.

        Args:
            row: The same.
            share: (states of the outer units, states of the inner units).

        Returns:
            (C, states of the inner units); (C, states of the outer units); and as `Layer.normaliser_gradients`.
        """
        flat = share.flatten()
        statistic = self.layer.statistic(self.layer.mean(self.input)) * flat[:, None]
        table = statistic.unflatten(0, share.shape)
        return table.sum(0).T, table.sum(1).T, self.layer.normaliser_gradients(self.input, flat)


class _BernoulliProducts:
    r"""Bernoulli units that are summed out: :math:`\log \prod_j (e^{x_j} + e^{-y_j})`, x and y shifted."""

    def __init__(self, layer: Layer, x: Tensor, shift: Tensor, groups: list[int]) -> None:
        self.layer, self.shift = layer, shift
        self.factor = (x + shift).T.contiguous().exp_()  # (C, L)
        self.sums = torch.empty_like(self.factor)
        self.product = _Product(groups, x)

    def enter(self, y: Tensor) -> None:
        """As `_Plain` does."""
        shifted = y + (self.layer.bias - self.shift)
        self.constant, self.inverse = shifted.sum(-1), shifted.neg_().exp_()[..., None]

    def log_normaliser(self, row: int) -> Tensor:
        """As `_Plain` does."""
        torch.add(self.factor, self.inverse[row], out=self.sums)
        return self.product.log_of(self.sums).add_(self.constant[row])

    def expectations(self, row: int, share: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """As `_Plain` does."""
        table = self.sums.reciprocal_().mul_(share.flatten()).unflatten(1, share.shape)
        inverse = self.inverse[row]
        by_inner = share.sum(0) - inverse * table.sum(1)
        return by_inner, share.sum(1) - inverse * table.sum(2), {"bias": by_inner.sum(1)}


class _CategoricalProducts:
    r"""Categorical units that are summed out: :math:`\log \prod_i \sum_q e^{x_{iq}} e^{y_{iq}}`, x and y shifted."""

    def __init__(self, layer: Categorical, x: Tensor, shift: Tensor, centre: Tensor, groups: list[int]) -> None:
        self.layer, self.shift, self.centre = layer, shift, centre  # (U, Q) and (U,)
        by_unit = (len(centre), layer.categories)
        self.factor = (x + shift.flatten()).T.contiguous().exp_().unflatten(0, by_unit)  # (U, Q, L)
        self.terms = torch.empty_like(self.factor)
        self.sums = torch.empty_like(self.factor[:, 0])
        self.product = _Product(groups, x)

    def enter(self, y: Tensor) -> None:
        """As `_Plain` does."""
        by_unit = (y + self.layer.bias).unflatten(-1, self.shift.shape)
        self.other = (by_unit - self.shift - self.centre[:, None]).exp_()[..., None]

    def log_normaliser(self, row: int) -> Tensor:
        """As `_Plain` does."""
        torch.mul(self.factor, self.other[row], out=self.terms)
        torch.sum(self.terms, 1, out=self.sums)
        return self.product.log_of(self.sums).add_(self.centre.sum())

    def expectations(self, row: int, share: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """As `_Plain` does."""
        of_units = self.sums.reciprocal_().mul_(share.flatten())
        table = self.terms.mul_(of_units[:, None]).flatten(0, 1).unflatten(1, share.shape)
        by_inner = table.sum(1)
        return by_inner, table.sum(2), {"bias": by_inner.sum(1)}


class _Product:
    """The logarithm of a product over units, in groups whose products neither overflow nor vanish."""

    def __init__(self, groups: list[int], x: Tensor) -> None:
        self.ends = list(itertools.pairwise(itertools.accumulate([0, *groups])))
        self.products = x.new_empty(len(groups), len(x))

    def log_of(self, factors: Tensor) -> Tensor:
        """Return the log-product (L,) of factors (U, L)."""
        for (first, last), product in zip(self.ends, self.products, strict=True):
            torch.prod(factors[first:last], 0, out=product)
        return self.products.log_().sum(0)


def _products_of(
    layer: Layer, x: Tensor, first: tuple[Tensor, Tensor], last: tuple[Tensor, Tensor]
) -> _BernoulliProducts | _CategoricalProducts | None:
    """Return the product form of a layer; None if its units have none, or a unit's range is too wide.

    Args:
        layer: The layer.
        x: (L, C), inputs from the first units.
        first: The least and the largest inputs from the first units, (C,) each.
        last: The least and the largest inputs from the other units, bias included.
    """
    limit = LARGEST_LOG[x.dtype]
    if isinstance(layer, Bernoulli):
        # Of log(e^x + e^-y), but for log 2.
        least, most = torch.maximum(first[0], -last[1]), torch.maximum(first[1], -last[0])
        groups = _groups((most - least) / 2 + math.log(2), limit)
        return _BernoulliProducts(layer, x, -(most + least) / 2, groups) if groups else None
    if isinstance(layer, Categorical):
        by_unit = (-1, layer.categories)
        least, most = ((a + b).unflatten(0, by_unit).amax(1) for a, b in zip(first, last, strict=True))
        # With the shift, e^x ranges as far up as down, and its product with a vanishing e^y is below rounding.
        reach = ((first[1] - first[0]) / 2).unflatten(0, by_unit).amax(1)
        bounds = (most - least) / 2 + math.log(layer.categories)
        if not bool((bounds + reach + math.log(1 / torch.finfo(x.dtype).eps) <= limit).all()):
            return None
        shift = -(first[0] + first[1]).unflatten(0, by_unit) / 2
        return _CategoricalProducts(layer, x, shift, (most + least) / 2, _groups(bounds, limit))
    return None


def _groups(bounds: Tensor, limit: float) -> list[int]:
    """Return sizes of groups of units whose bounds sum to at most the limit; empty if one bound exceeds the limit."""
    groups, total = [0], 0.0
    for bound in bounds.tolist():
        if not bound <= limit:  # also if it is NaN
            return []
        if total + bound > limit:
            groups.append(0)
            total = 0.0
        groups[-1] += 1
        total += bound
    return groups


# --- sums over the states -----------------------------------------------------------------------------------------


def _log_partition(states: _States) -> Tensor:
    value: Tensor = _log_weights_of_blocks(states).logsumexp(0).to(states.type)
    return value


def _log_weights_of_blocks(states: _States) -> Tensor:
    """Return the log-weights of the states of the other units, the first ones summed out, (B,), in float64."""
    totals: Tensor = states.log_weight.new_empty(states.n_blocks, dtype=torch.float64)
    place = 0
    for last in states.blocks():
        for _, log_weights in states.log_weights(last):
            totals[place] = log_weights.logsumexp(0)
            place += 1
    return totals


def _model_statistics(states: _States) -> dict[str, Tensor]:
    shape = (len(states.outer), len(states.inner))
    totals: Tensor | None = None
    most = states.log_weight.new_full((), -torch.inf)
    shapes: dict[str, torch.Size] = {}
    for last in states.blocks():
        for row, log_weights in states.log_weights(last):
            so_far = torch.maximum(most, log_weights.max())
            share = log_weights.sub_(so_far).exp_().view(shape)
            inner, outer, more = states.summed.expectations(row, share)
            of_units = {"own_inner": share.sum(0), "own_outer": share.sum(1)}
            total = of_units["own_inner"].sum()
            parts = {
                "inner": inner,
                "outer": outer,
                "last": inner.sum(1)[:, None] * last[row],
                **of_units,
                "own_last": total * last[row],
                "total": total,
                **more,
            }
            flat = torch.cat([part.flatten() for part in parts.values()]).double()
            totals = flat if totals is None else totals.mul_((most - so_far).exp()).add_(flat)
            shapes, most = {name: part.shape for name, part in parts.items()}, so_far
    assert totals is not None
    pieces = totals.split([size.numel() for size in shapes.values()])
    found = {name: part.view(size) for (name, size), part in zip(shapes.items(), pieces, strict=True)}
    found = {name: part / found["total"] for name, part in found.items()}
    inner, outer = states.inner.double(), states.outer.double()
    pairs = torch.cat([found["inner"] @ inner, found["outer"] @ outer, found["last"]], -1)
    bias = torch.cat([found["own_inner"] @ inner, found["own_outer"] @ outer, found["own_last"]])
    other = "visible" if states.side == "hidden" else "hidden"
    statistics = {"weights": pairs if states.side == "hidden" else pairs.mT, f"{states.side}_bias": bias}
    statistics |= {f"{other}_{name}": found[name] for name in ("bias", *states.summed.layer.more_parameters)}
    return {name: statistics[name].to(tensor.dtype) for name, tensor in states.joint.tensors.items()}


def _draw(states: _States, n: int, generator: torch.Generator | None) -> Tensor:
    """Draw states, (N, columns)."""
    device = states.log_weight.device
    uniform = torch.empty(2, n, dtype=torch.float64, device=device).uniform_(generator=generator)
    log_weights = _log_weights_of_blocks(states)
    if not bool(log_weights.logsumexp(0).isfinite()):
        raise ValueError(f"The parameters should be finite. Found a log partition function of {log_weights.sum()}.")
    last = _by_weight(log_weights, uniform[0])
    blocks, place = last.unique(return_inverse=True)
    first = torch.empty_like(last)
    order = place.argsort()
    sizes = torch.bincount(place, minlength=len(blocks)).tolist()
    rows = iter(order.split(sizes))
    for some in blocks.split(_BLOCK):
        for _, weights in states.log_weights(states.last(some)):
            draws = next(rows)
            first[draws] = _by_weight(weights.double(), uniform[1, draws])
    return torch.cat([states.first(first), states.last(last)], -1)


def _by_weight(log_weights: Tensor, uniform: Tensor) -> Tensor:
    """Return indices that have these weights, one for each uniform number."""
    below = (log_weights - log_weights.max()).exp_().cumsum(0)
    return torch.searchsorted(below, uniform * below[-1], right=True).clamp_(max=len(below) - 1)


# --- derivatives --------------------------------------------------------------------------------------------------


class _LogPartition(torch.autograd.Function):
    """`log_partition`, whose gradient is `model_statistics`."""

    @staticmethod
    def forward(ctx: Any, joint: Joint, side: Side, *tensors: Tensor) -> Tensor:
        ctx.joint, ctx.side = joint, side
        ctx.save_for_backward(*tensors)
        return _log_partition(_States(joint, side))

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        names = ctx.joint.tensors
        # Saved tensors, not those of the joint: autograd detects whether they were changed in place since.
        joint = ctx.joint.with_tensors(dict(zip(names, ctx.saved_tensors, strict=True)))
        if torch.is_grad_enabled():  # a higher derivative is wanted
            with exact_products(joint.weights.device):
                value = _twin(joint, ctx.side)
            return (
                None,
                None,
                *torch.autograd.grad(value, ctx.saved_tensors, cotangent, create_graph=True, allow_unused=True),
            )
        gradients = model_statistics(joint)
        return None, None, *(gradients[name] * cotangent.to(gradients[name].dtype) for name in names)


def _twin(joint: Joint, side: Side) -> Tensor:
    """Return the log-partition function by plain formulas, which autograd can differentiate any number of times."""
    joint = joint.in_full_precision()
    layer = joint.hidden if side == "hidden" else joint.visible
    _, n_units = units_of(layer)

    def part(first: int, last: int) -> Tensor:
        states = states_of(layer, torch.arange(first, last, device=layer.bias.device), n_units)
        energy = joint.hidden_free_energy(states) if side == "hidden" else joint.free_energy(states)
        return (-energy).logsumexp(0)

    assert layer.n_states is not None
    ends = [(first, min(first + _TWIN_CHUNK, layer.n_states)) for first in range(0, layer.n_states, _TWIN_CHUNK)]
    # A transform of `torch.func` has no hooks, which a checkpoint needs.
    if len(ends) == 1 or not torch.is_grad_enabled() or torch._C._functorch.peek_interpreter_stack() is not None:
        parts = [part(*pair) for pair in ends]
    else:
        parts = [checkpoint(part, *pair, use_reentrant=False, preserve_rng_state=False) for pair in ends]
    return torch.stack(parts).logsumexp(0)


# --- machines -----------------------------------------------------------------------------------------------------


def _enumerated(joint: Joint) -> Side:
    """Return the layer with fewer states."""
    counts = {"hidden": joint.hidden.n_states, "visible": joint.visible.n_states}
    finite = {name: count for name, count in counts.items() if count is not None}
    if not finite or min(finite.values()) > 2**ENUMERABLE_UNITS:
        found = " and ".join(
            f"{name} units without number" if count is None else f"2^{math.log2(count):.4g} {name} states"
            for name, count in counts.items()
        )
        raise ValueError(
            f"One layer should have at most 2^{ENUMERABLE_UNITS} states, so that they can be enumerated. Found {found}."
        )
    return "hidden" if min(finite, key=lambda name: finite[name]) == "hidden" else "visible"


def _machines(joint: Joint) -> Iterator[Joint]:
    """Yield the machines that stand side by side, in the order of their leading dimensions."""
    leading = joint.weights.shape[:-2]
    flat = {}
    for name, tensor in joint.tensors.items():
        if name != "weights" and tensor.ndim > 1:
            tensor = tensor.squeeze(-2)  # the dimension of the samples
        size = tensor.shape[-2:] if name == "weights" else tensor.shape[-1:]
        flat[name] = tensor.expand(*leading, *size).reshape(-1, *size)
    for i in range(leading.numel()):
        yield joint.with_tensors({name: tensor[i] for name, tensor in flat.items()})


def _side_by_side(values: list[Tensor], joint: Joint) -> Tensor:
    stacked: Tensor = torch.stack(values).unflatten(0, joint.weights.shape[:-2])
    return stacked
