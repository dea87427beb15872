r"""The two phases of an update of a fused trainer: chains move on, and both sides get their hidden means.

The kernel of Bernoulli units works in buffers; the kernel of layers takes its draws from layers of any kind. Both carry
persistent chains as hidden states.

N data of one batch, M chains, T temperatures, V columns of the visible layer, H hidden units.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from toolkit.rbm.machine.layers import Gaussian
from toolkit.rbm.machine.model import RBM

__all__ = ["BernoulliKernel", "Kernel", "LayerKernel", "Phases"]


@dataclass
class Phases:
    """Both sides of an update: rows of negative samples first, then the data. A trainer may write to all of it.

    Attributes:
        visible: (M + N, V), the visible states.
        statistic: (M + N, V), the factor of the weights in the energy; the memory of `visible` if they are equal.
        hidden: (M + N, H), the hidden means.
        share: (M + N,), the part of each row in the update.
        n_negative: M.
        to_visible: (M + N, V), the input that the hidden means give the visible units; only for Gaussian ones.
    """

    visible: Tensor
    statistic: Tensor
    hidden: Tensor
    share: Tensor
    n_negative: int
    to_visible: Tensor | None = None

    def other_gradients(self, rbm: RBM) -> dict[str, Tensor]:
        """Return the update of the visible parameters that are neither weights nor biases."""
        if self.to_visible is None:
            return {}
        layer = rbm.joint.visible
        gradients = layer.parameter_gradients(self.visible, self.to_visible, self.share)
        return {f"visible_{name}": gradients[name] for name in layer.more_parameters}


class Kernel(Protocol):
    """The interface of kernels to a trainer."""

    n_chains: int
    """M; 0 if the chains start at the data."""

    @property
    def chains(self) -> Tensor | None:
        """(M, H) or (T, M, H), or None."""

    @property
    def swap_rates(self) -> Tensor | None:
        """(T - 1,), or None."""

    def phases(self, data: Tensor, fast: Mapping[str, Tensor] | None, generator: torch.Generator | None) -> Phases:
        """Move the chains on, and return both sides of the update."""

    def state(self) -> dict[str, Tensor]:
        """Return the state on which the next phases depend, not copied."""


class Swaps:
    """Swaps of neighbouring temperatures, even and odd pairs in turn, and how often they are accepted."""

    def __init__(self, betas: Tensor, n_chains: int) -> None:
        self.betas = betas = betas.to(torch.promote_types(betas.dtype, torch.float32))
        self._chain = torch.arange(n_chains, device=betas.device)
        self._order = torch.arange(len(betas), device=betas.device)[:, None].repeat(1, n_chains)
        self._uniform = betas.new_empty(len(betas) // 2, n_chains)
        self.tried, self.accepted = (
            torch.zeros(len(betas) - 1, dtype=torch.float64, device=betas.device) for _ in range(2)
        )
        self.turn = torch.zeros((), dtype=torch.int64)

    def state(self) -> dict[str, Tensor]:
        """Return the state on which the next swaps and the rates depend, not copied."""
        return {"swaps.tried": self.tried, "swaps.accepted": self.accepted, "swaps.turn": self.turn}

    @property
    def rates(self) -> Tensor:
        """(T - 1,), the part of the swaps that were accepted."""
        return self.accepted / self.tried

    def rows(self, difference: Tensor, generator: torch.Generator | None) -> Tensor:
        r"""Return the indices of the T M rows with which the temperatures go on.

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
        accepted = uniform.log() < gap[:, None] * (difference[lower] - difference[upper])
        self.tried[lower] += accepted.shape[1]
        self.accepted[lower] += accepted.sum(1)
        order = self._order.clone()
        order[lower] += accepted
        order[upper] -= accepted.to(order.dtype)
        return (order * len(self._chain) + self._chain).flatten()


class BernoulliKernel:
    """Phases of a machine of zeros and ones, in buffers.

    The rows of a batch lie in one piece: copies of the chains at other temperatures, the chains, and the data.

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
        self._rbm, self._steps, self._persistent = rbm, steps, states is not None
        like = rbm.weights
        self._narrow = like.dtype not in (torch.float32, torch.float64)
        self.n_chains = 0 if states is None else states.shape[-2]
        self._shape = None if states is None else states.shape
        negatives = batch_size if states is None else states.shape.numel() // rbm.n_hidden
        self._others = 0 if states is None else negatives - self.n_chains
        self._states = like.new_empty(negatives, rbm.n_hidden) if states is None else states.flatten(0, -2)
        self._mean = like.new_empty(negatives, rbm.n_columns)
        self._visible = like.new_empty(negatives + batch_size, rbm.n_columns)
        self._hidden = like.new_empty(negatives + batch_size, rbm.n_hidden)
        self._views: dict[int, _Views] = {}
        self._swaps: Swaps | None = None
        if betas is not None and len(betas) > 1:
            assert states is not None
            betas = betas.to(like)
            self._swaps = Swaps(betas, self.n_chains)
            self._row_betas = betas.repeat_interleave(self.n_chains)[:, None]
            self._reference = like.new_zeros(rbm.n_columns) if reference is None else reference.to(like)
        self._low: _LowPrecision | None = None
        if product_dtype is not None and product_dtype != like.dtype:
            self._low = _LowPrecision(
                weights=torch.empty_like(like, dtype=product_dtype),
                states=torch.empty_like(self._states, dtype=product_dtype),
                mean=torch.empty_like(self._mean, dtype=product_dtype),
                visible=torch.empty_like(self._visible, dtype=product_dtype),
                hidden=torch.empty_like(self._hidden, dtype=product_dtype),
            )

    @property
    def chains(self) -> Tensor | None:
        """(M, H), or (T, M, H), moved on by `phases`; None if they start at the data."""
        return None if self._shape is None else self._states.view(self._shape)

    @property
    def swap_rates(self) -> Tensor | None:
        """(T - 1,), or None without temperatures."""
        return None if self._swaps is None else self._swaps.rates

    def state(self) -> dict[str, Tensor]:
        """Return the chains, and how often pairs were swapped; not copied."""
        state = {} if self.chains is None else {"chains": self.chains}
        return state if self._swaps is None else state | self._swaps.state()

    def phases(self, data: Tensor, fast: Mapping[str, Tensor] | None, generator: torch.Generator | None) -> Phases:
        """Move the chains on, and return both sides of the update, valid until the next call."""
        rbm, views = self._rbm, self._views.get(len(data)) or self._views_for(len(data))
        weights: Tensor = rbm.weights
        visible_bias: Tensor = rbm.visible_bias
        hidden_bias: Tensor = rbm.hidden_bias
        if fast is not None:
            weights = weights + fast["weights"]
            visible_bias, hidden_bias = visible_bias + fast["visible_bias"], hidden_bias + fast["hidden_bias"]
        low = self._low
        if low is not None:
            low.weights.copy_(weights)
        betas = None if self._swaps is None else self._row_betas

        def to_hidden(rows: slice, out: Tensor) -> Tensor:
            visible = self._visible[rows]
            if low is None:
                return torch.addmm(hidden_bias, visible, weights, out=out)
            part = low.visible[rows].copy_(visible)
            return out.copy_(torch.mm(part, low.weights, out=low.hidden[rows])).add_(hidden_bias)

        def to_visible(states: Tensor, out: Tensor) -> Tensor:
            bias = visible_bias if betas is None else visible_bias - self._reference
            if low is None:
                out = torch.addmm(bias, states, weights.mT, out=out)
            else:
                part = low.states[: len(states)].copy_(states)
                out.copy_(torch.mm(part, low.weights.mT, out=low.mean[: len(states)])).add_(bias)
            return out if betas is None else out.mul_(betas).add_(self._reference)

        def draw(mean: Tensor, out: Tensor) -> None:
            if self._narrow:  # the dtype has too few numbers between 0 and 1 to draw from
                uniform = torch.empty(out.shape, dtype=torch.float32, device=out.device).uniform_(generator=generator)
                out.copy_(uniform.lt_(mean))
            else:
                out.uniform_(generator=generator).lt_(mean)

        views.positive.copy_(data)
        if not self._persistent:
            to_hidden(views.positive_rows, out=views.hidden_positive).sigmoid_()
            draw(views.hidden_positive, out=views.states)
        for remaining in reversed(range(self._steps)):
            draw(to_visible(views.states, out=views.mean).sigmoid_(), out=views.negative)
            if not (remaining or self._persistent):
                break
            # The data's hidden means come with the last product.
            rows = views.negative_rows if remaining or fast is not None else views.all_rows
            x = to_hidden(rows, out=self._hidden[rows])[: len(views.negative)]
            if self._swaps is not None and betas is not None:
                difference = -(views.states * x).sum(1) - views.negative @ (visible_bias - self._reference)
                order = self._swaps.rows(difference.view(len(self._swaps.betas), -1), generator)
                views.negative.copy_(views.negative[order])
                x.copy_(x[order])
                if remaining:
                    draw(x.mul_(betas).sigmoid_(), out=views.states)
                else:
                    draw(torch.sigmoid(x * betas), out=views.states)
            elif remaining or fast is not None:
                draw(x.sigmoid_(), out=views.states)
        if fast is not None:  # the chains' means are those of the machine itself
            weights, visible_bias, hidden_bias = rbm.weights, rbm.visible_bias, rbm.hidden_bias
            if low is not None:
                low.weights.copy_(weights)
            to_hidden(views.all_rows, out=views.hidden)
        if self._persistent:
            views.hidden.sigmoid_()
            if self._swaps is None and fast is None:
                draw(views.hidden_negative, out=views.states)
        else:
            to_hidden(views.negative_rows, out=views.hidden_negative).sigmoid_()
        update = slice(self._others, None)
        visible, hidden = views.visible[update], views.hidden[update]
        return Phases(visible, visible, hidden, views.share, len(views.share) - len(data))

    def _views_for(self, n: int) -> _Views:
        negatives = len(self._states) if self._persistent else n
        visible, hidden = self._visible[: negatives + n], self._hidden[: negatives + n]
        m = negatives - self._others
        views = self._views[n] = _Views(
            states=self._states[:negatives],
            mean=self._mean[:negatives],
            visible=visible,
            negative=visible[:negatives],
            positive=visible[negatives:],
            hidden=hidden,
            hidden_negative=hidden[:negatives],
            hidden_positive=hidden[negatives:],
            share=torch.cat(
                [visible.new_full((m,), -1 / m if m else 0.0), visible.new_full((n,), 1 / n if n else 0.0)]
            ),
            negative_rows=slice(0, negatives),
            positive_rows=slice(negatives, negatives + n),
            all_rows=slice(0, negatives + n),
        )
        return views


class _LowPrecision(NamedTuple):
    """Copies of the factors and buffers of the products in another type."""

    weights: Tensor
    states: Tensor
    mean: Tensor
    visible: Tensor
    hidden: Tensor


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
    share: Tensor
    negative_rows: slice
    positive_rows: slice
    all_rows: slice


class LayerKernel:
    """Phases of a machine of any units, by the draws of its layers. Its arguments are as in `BernoulliKernel`."""

    def __init__(
        self,
        rbm: RBM,
        batch_size: int,
        steps: int,
        states: Tensor | None,
        betas: Tensor | None,
        reference: Tensor | None,
    ) -> None:
        self._rbm, self._steps, self._states, self._reference = rbm, steps, states, reference
        self.n_chains = 0 if states is None else states.shape[-2]
        several = betas is not None and len(betas) > 1
        self._swaps = Swaps(betas.to(rbm.weights), self.n_chains) if betas is not None and several else None

    @property
    def chains(self) -> Tensor | None:
        """(M, H), or (T, M, H), moved on by `phases`; None if they start at the data."""
        return self._states

    @property
    def swap_rates(self) -> Tensor | None:
        """(T - 1,), or None without temperatures."""
        return None if self._swaps is None else self._swaps.rates

    def state(self) -> dict[str, Tensor]:
        """Return the chains, and how often pairs were swapped; not copied."""
        state = {} if self._states is None else {"chains": self._states}
        return state if self._swaps is None else state | self._swaps.state()

    def phases(self, data: Tensor, fast: Mapping[str, Tensor] | None, generator: torch.Generator | None) -> Phases:
        """Move the chains on, and return both sides of the update, valid until the next call."""
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
        m, n = len(negative), len(data)
        share = torch.cat([rows.new_full((m,), -1 / m if m else 0.0), rows.new_full((n,), 1 / n if n else 0.0)])
        statistic = joint.visible.statistic(rows)
        to_visible = joint.to_visible(means) if isinstance(joint.visible, Gaussian) else None
        return Phases(rows, statistic, means, share, m, to_visible)
