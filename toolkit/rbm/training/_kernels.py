r"""The positive and the negative phase of an update: chains move, and both phases get their hidden means.

`BernoulliKernel` works in buffers; `LayerKernel` draws by layers of any kind. Both carry persistent chains as hidden
states.

N data of one batch, M chains, T temperatures, V columns of the visible layer, H hidden units.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from toolkit.rbm.machine.layers import Gaussian
from toolkit.rbm.machine.model import RBM
from toolkit.rbm.machine.uniform import fill_uniform, room_for_bits

__all__ = ["BernoulliKernel", "Kernel", "LayerKernel", "Phases", "parameters_of"]


@dataclass
class Phases:
    """Both phases of an update: rows of negative samples first, then the data. A trainer may write to all tensors.

    The views of the rows are stored: in an update of a small machine, making a view takes as long as a product.

    Attributes:
        visible: (M + N, V), the visible states.
        statistic: (M + N, V), the factor of the weights in the energy; shares the memory of `visible` if it is equal.
        hidden: (M + N, H), the hidden means.
        n_negative: M.
        to_visible: (M + N, V), the input of the visible units from the hidden means; only for Gaussian units.
        share: (M + N,), the part of each row in the update: -1/M and 1/N.
    """

    visible: Tensor
    statistic: Tensor
    hidden: Tensor
    n_negative: int
    to_visible: Tensor | None = None

    def __post_init__(self) -> None:
        """Make the views."""
        m = self.n_negative
        counts = (m, -1 / max(m, 1)), (len(self.hidden) - m, 1 / max(len(self.hidden) - m, 1))
        self.share = torch.cat([self.hidden.new_full((count,), share) for count, share in counts])
        self.share_column, self.positive_share = self.share[:, None], self.share[m:]
        self.ones = torch.ones_like(self.share)
        self.statistic_mT, self.hidden_mT = self.statistic.mT, self.hidden.mT
        self.positive_mT = self.statistic[m:].mT, self.hidden[m:].mT

    def other_gradients(self, rbm: RBM) -> dict[str, Tensor]:
        """Return the gradients of the visible parameters that are neither weights nor biases."""
        if self.to_visible is None:
            return {}
        layer = rbm.joint.visible
        gradients = layer.parameter_gradients(self.visible, self.to_visible, self.share)
        return {f"visible_{name}": gradients[name] for name in layer.more_parameters}


def parameters_of(rbm: RBM) -> tuple[Tensor, Tensor, Tensor]:
    """Return weights, visible and hidden biases; saves a module's attribute lookup, 0.9 µs each."""
    found: dict[str, Any] = rbm._parameters
    return found["weights"], found["visible_bias"], found["hidden_bias"]


class Kernel(ABC):
    """The interface between kernels and a trainer."""

    def __init__(self, rbm: RBM, steps: int, states: Tensor | None, betas: Tensor | None) -> None:
        self._rbm, self._steps = rbm, steps
        self.n_chains = 0 if states is None else states.shape[-2]  # M; 0 if the chains start at the data
        several = betas is not None and len(betas) > 1
        self._swaps = Swaps(betas.to(rbm.weights), self.n_chains) if betas is not None and several else None

    @property
    @abstractmethod
    def chains(self) -> Tensor | None:
        """(M, H), or (T, M, H), moved on by `phases`; None if they start at the data."""

    @abstractmethod
    def phases(self, data: Tensor, fast: Mapping[str, Tensor] | None, generator: torch.Generator | None) -> Phases:
        """Move the chains, and return both phases of the update, valid until the next call."""

    @property
    def swap_rates(self) -> Tensor | None:
        """(T - 1,), or None without temperatures."""
        return None if self._swaps is None else self._swaps.rates

    def state(self) -> dict[str, Tensor]:
        """Return the chains and the counts of swaps, not copied."""
        state = {} if self.chains is None else {"chains": self.chains}
        return state if self._swaps is None else state | self._swaps.state()


class Swaps:
    """Swaps of neighbouring temperatures, even and odd pairs in turn, and how often they are accepted."""

    def __init__(self, betas: Tensor, n_chains: int) -> None:
        self.betas = betas = betas.to(torch.promote_types(betas.dtype, torch.float32))
        self._chain = torch.arange(n_chains, device=betas.device)
        self._order = torch.arange(len(betas), device=betas.device)[:, None].repeat(1, n_chains)
        # In float32, so that machines of every dtype draw the same numbers.
        self._uniform = betas.new_empty(len(betas) // 2, n_chains, dtype=torch.float32)
        self.tried, self.accepted = (
            torch.zeros(len(betas) - 1, dtype=torch.float64, device=betas.device) for _ in range(2)
        )
        self.turn = torch.zeros((), dtype=torch.int64, device="cpu")

    def state(self) -> dict[str, Tensor]:
        """Return the state on which the next swaps and the rates depend, not copied."""
        return {"swaps.tried": self.tried, "swaps.accepted": self.accepted, "swaps.turn": self.turn}

    @property
    def rates(self) -> Tensor:
        """(T - 1,), the fraction of accepted swaps."""
        return self.accepted / self.tried

    def rows(self, difference: Tensor, generator: torch.Generator | None) -> Tensor:
        r"""Return the indices of the T M rows from which the temperatures continue.

        A swap is accepted with probability :math:`\min(1, e^{(\beta_i - \beta_j) (D_i - D_j)})`.

        Args:
            difference: (T, M), :math:`D = E - E_0` of the joint states.
            generator: Draws the acceptances.

        Returns:
            (T M,).
        """
        first = int(self.turn) % 2
        self.turn += 1
        n_pairs = (len(self.betas) - first) // 2
        if not n_pairs:
            return (self._order * len(self._chain) + self._chain).flatten()
        lower, upper = slice(first, first + 2 * n_pairs, 2), slice(first + 1, first + 2 * n_pairs, 2)
        uniform = self._uniform[:n_pairs].uniform_(generator=generator)
        gap = self.betas[lower] - self.betas[upper]
        accepted = uniform.to(gap.dtype).log() < gap[:, None] * (difference[lower] - difference[upper])
        self.tried[lower] += accepted.shape[1]
        self.accepted[lower] += accepted.sum(1)
        order = self._order.clone()
        order[lower] += accepted
        order[upper] -= accepted.to(order.dtype)
        return (order * len(self._chain) + self._chain).flatten()


class BernoulliKernel(Kernel):
    """Phases of a machine of zeros and ones, in buffers.

    The rows of a batch are contiguous: copies of the chains at other temperatures, the chains, and the data.

    Args:
        rbm: The machine.
        batch_size: The most data of a batch.
        steps: Gibbs steps of an update.
        states: (M, H) or (T, M, H), hidden states of the chains, moved on in place. None: the chains start at the data.
        betas: (T,), inverse temperatures, or None.
        reference: (V,), the visible biases at inverse temperature 0.
        product_dtype: Dtype of the matrix products.
    """

    def __init__(
        self,
        rbm: RBM,
        batch_size: int,
        steps: int,
        states: Tensor | None,
        betas: Tensor | None,
        reference: Tensor | None,
        product_dtype: torch.dtype | None,
    ) -> None:
        super().__init__(rbm, steps, states, betas)
        self._persistent, like = states is not None, rbm.weights
        self._shape = None if states is None else states.shape
        negatives = batch_size if states is None else states.shape.numel() // rbm.n_hidden
        self._others = 0 if states is None else negatives - self.n_chains
        self._states = like.new_empty(negatives, rbm.n_hidden) if states is None else states.flatten(0, -2)
        self._mean = like.new_empty(negatives, rbm.n_columns)
        self._visible = like.new_empty(negatives + batch_size, rbm.n_columns)
        self._hidden = like.new_empty(negatives + batch_size, rbm.n_hidden)
        size = negatives * max(rbm.n_columns, rbm.n_hidden)
        self._uniform = None if like.dtype == torch.float32 else like.new_empty(size, dtype=torch.float32)
        self._bits = like.new_empty(room_for_bits(size), dtype=torch.int64) if like.is_cpu else None
        self._views: dict[int, _Views] = {}
        if betas is not None and self._swaps is not None:
            self._row_betas = betas.to(like).repeat_interleave(self.n_chains)[:, None]
            self._reference = like.new_zeros(rbm.n_columns) if reference is None else reference.to(like)
        low = product_dtype is not None and product_dtype != like.dtype
        self._products = _LowPrecisionProducts(like, self._visible, product_dtype) if low else _Products()

    @property
    def chains(self) -> Tensor | None:
        """(M, H), or (T, M, H), or None."""
        return None if self._shape is None else self._states.view(self._shape)

    def phases(self, data: Tensor, fast: Mapping[str, Tensor] | None, generator: torch.Generator | None) -> Phases:
        """Move the chains, and return both phases of the update."""
        rbm, views = self._rbm, self._views.get(data.shape[0]) or self._views_for(data.shape[0])
        to_hidden, to_visible = self._products.to_hidden, self._products.to_visible
        self._products.use(rbm, fast, None if self._swaps is None else self._reference)

        def draw(mean: Tensor, uniform: Tensor, out: Tensor) -> None:
            torch.lt(fill_uniform(uniform, generator, self._bits), mean, out=out)

        views.positive.copy_(data)
        if not self._persistent:
            draw(to_hidden(views.positive, views.hidden_positive).sigmoid_(), views.uniform_hidden, views.states)
        for remaining in reversed(range(self._steps)):
            x = to_visible(views.states, views.mean)
            if self._swaps is not None:
                x.mul_(self._row_betas).add_(self._reference)
            draw(x.sigmoid_(), views.uniform_visible, views.negative)
            if not (remaining or self._persistent):
                break
            x = views.hidden_negative
            if remaining or fast is not None:
                to_hidden(views.negative, x)
            else:  # the data's hidden means come with the last product
                to_hidden(views.visible, views.hidden)
            if self._swaps is not None:
                self._swap(views, x, generator)
                x = x.mul_(self._row_betas) if remaining else x * self._row_betas
                draw(x.sigmoid_(), views.uniform_hidden, views.states)
            elif remaining or fast is not None:
                draw(x.sigmoid_(), views.uniform_hidden, views.states)
        if fast is not None:  # the chains' means are those of the machine itself
            self._products.use(rbm, None, None)
            to_hidden(views.visible, views.hidden)
        if self._persistent:
            views.hidden.sigmoid_()
            if self._swaps is None and fast is None:
                draw(views.hidden_negative, views.uniform_hidden, views.states)
        else:
            to_hidden(views.negative, views.hidden_negative).sigmoid_()
        return views.phases

    def _swap(self, views: _Views, x: Tensor, generator: torch.Generator | None) -> None:
        """Swap temperatures: the visible states, and the input x of the hidden units."""
        assert self._swaps is not None
        bias: Tensor = self._rbm.visible_bias - self._reference
        difference = -(views.states * x).sum(1) - views.negative @ bias
        order = self._swaps.rows(difference.view(len(self._swaps.betas), -1), generator)
        views.negative.copy_(views.negative[order])
        x.copy_(x[order])

    def _views_for(self, n: int) -> _Views:
        negatives = len(self._states) if self._persistent else n
        visible, hidden = self._visible[: negatives + n], self._hidden[: negatives + n]
        states, negative = self._states[:negatives], visible[:negatives]
        views = self._views[n] = _Views(
            states=states,
            mean=self._mean[:negatives],
            visible=visible,
            negative=negative,
            positive=visible[negatives:],
            hidden=hidden,
            hidden_negative=hidden[:negatives],
            hidden_positive=hidden[negatives:],
            uniform_hidden=self._uniform_like(states),
            uniform_visible=self._uniform_like(negative),
            phases=Phases(*(visible[self._others :],) * 2, hidden[self._others :], negatives - self._others),
        )
        return views

    def _uniform_like(self, draws: Tensor) -> Tensor:
        """Return memory for the uniform numbers of draws, in float32: machines of every dtype draw the same numbers."""
        if self._uniform is None:
            return draws
        return self._uniform[: draws.numel()].view_as(draws)


class _Products:
    """Products of states with the parameters that draw, which `use` sets before every update."""

    weights: Tensor
    visible_bias: Tensor
    hidden_bias: Tensor

    def use(self, rbm: RBM, fast: Mapping[str, Tensor] | None, reference: Tensor | None) -> None:
        """Set the parameters: those of a machine, with fast weights added, or less the biases of a reference."""
        self.weights, self.visible_bias, self.hidden_bias = parameters_of(rbm)
        if fast is not None:
            self.weights = self.weights + fast["weights"]
            self.visible_bias = self.visible_bias + fast["visible_bias"]
            self.hidden_bias = self.hidden_bias + fast["hidden_bias"]
        if reference is not None:
            self.visible_bias = self.visible_bias - reference

    def to_hidden(self, visible: Tensor, out: Tensor) -> Tensor:
        """Write the input of the hidden units, (B, H), into `out`."""
        return torch.addmm(self.hidden_bias, visible, self.weights, out=out)

    def to_visible(self, hidden: Tensor, out: Tensor) -> Tensor:
        """Write the input of the visible units, (B, V), into `out`."""
        return torch.addmm(self.visible_bias, hidden, self.weights.mT, out=out)


class _LowPrecisionProducts(_Products):
    """Products whose factors are rounded to another dtype. Buffers are as long as all rows of an update, `visible`."""

    def __init__(self, weights: Tensor, visible: Tensor, dtype: torch.dtype | None) -> None:
        self._weights = torch.empty_like(weights, dtype=dtype)
        shape = len(visible), weights.shape[1]
        self._visible, self._hidden = torch.empty_like(visible, dtype=dtype), self._weights.new_empty(shape)

    def use(self, rbm: RBM, fast: Mapping[str, Tensor] | None, reference: Tensor | None) -> None:
        super().use(rbm, fast, reference)
        self._weights.copy_(self.weights)

    def to_hidden(self, visible: Tensor, out: Tensor) -> Tensor:
        factor, result = self._visible[: len(visible)].copy_(visible), self._hidden[: len(visible)]
        return out.copy_(torch.mm(factor, self._weights, out=result)).add_(self.hidden_bias)

    def to_visible(self, hidden: Tensor, out: Tensor) -> Tensor:
        factor, result = self._hidden[: len(hidden)].copy_(hidden), self._visible[: len(hidden)]
        return out.copy_(torch.mm(factor, self._weights.mT, out=result)).add_(self.visible_bias)


class _Views(NamedTuple):
    """The parts of the buffers that a batch of N rows uses: negative samples first, then data, in one piece."""

    states: Tensor
    mean: Tensor
    visible: Tensor
    negative: Tensor
    positive: Tensor
    hidden: Tensor
    hidden_negative: Tensor
    hidden_positive: Tensor
    uniform_hidden: Tensor
    uniform_visible: Tensor
    phases: Phases


class LayerKernel(Kernel):
    """Phases of a machine of any units, by the draws of its layers. The arguments are those of `BernoulliKernel`."""

    def __init__(
        self, rbm: RBM, steps: int, states: Tensor | None, betas: Tensor | None, reference: Tensor | None
    ) -> None:
        super().__init__(rbm, steps, states, betas)
        self._states, self._reference = states, reference

    @property
    def chains(self) -> Tensor | None:
        """(M, H), or (T, M, H), or None."""
        return self._states

    def phases(self, data: Tensor, fast: Mapping[str, Tensor] | None, generator: torch.Generator | None) -> Phases:
        """Move the chains, and return both phases of the update."""
        joint = drawn = self._rbm.joint
        data = data.to(joint.weights.dtype)
        if fast is not None:
            drawn = joint.shifted(fast)
        if self._swaps is not None:
            drawn = joint.annealed(self._swaps.betas, self._reference)
        hidden = drawn.sample_hidden(data, generator) if self._states is None else self._states
        for remaining in reversed(range(self._steps)):
            visible = drawn.sample_visible(hidden, generator)
            if self._swaps is not None:
                difference = joint.annealed_difference(visible, hidden, self._reference)
                order = self._swaps.rows(difference, generator)
                visible = visible.flatten(0, 1)[order].view_as(visible)
            if remaining or self._states is not None:
                hidden = drawn.sample_hidden(visible, generator)
        if self._states is not None:
            self._states.copy_(hidden)
        negative = visible[-1] if visible.ndim == 3 else visible  # at inverse temperature 1
        rows = torch.cat([negative, data])
        means = joint.hidden_mean(rows)
        statistic = joint.visible.statistic(rows)
        to_visible = joint.to_visible(means) if isinstance(joint.visible, Gaussian) else None
        return Phases(rows, statistic, means, len(negative), to_visible)
