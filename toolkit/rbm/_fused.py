"""Training without autograd: the same updates, in place, at little more than the time of their matrix products.

N data of one batch, M negative samples, V visible units, H hidden units.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from toolkit.blocks import no_graph
from toolkit.rbm._chains import check_steps
from toolkit.rbm._model import RBM

__all__ = ["FusedTrainer"]


class FusedTrainer:
    r"""Stochastic gradient descent on contrastive divergence, in place: :math:`\theta \leftarrow \theta - \eta g`.

    :math:`g` is `cd_gradient`, which is what autograd gives for the blocked surrogate; here both sides of it come
    from one product :math:`[v_-; v_+]^\top [-\tfrac1M h_-; \tfrac1N h_+]`, which is :math:`-g`, and every intermediate
    result has its buffer. Each side is a mean over its own rows, so a last, smaller batch is weighted right.

    Without `chains` it is CD-k and draws as `contrastive_divergence` does: the same generator gives the same update.
    With them it is persistent CD-k. Its chains are carried as *hidden* states, so that a mean :math:`E[h \mid v_-]`
    serves the update and the next draw: five matrix products (V, H, batch) for k = 1 instead of six.

    Args:
        rbm: The machine; its parameters are updated.
        batch_size: The most rows that `step` will see.
        steps: k, the number of Gibbs steps.
        chains: (M, H), hidden states at which persistent chains start, zeros for example; copied. None: the chains
            start at the data.
        generator: Draws the chains, on the machine's device. None: torch's default one.

    Raises:
        ValueError: If `batch_size` or `steps` is not positive, or `chains` does not have the shape (M, H).

    References:
        Tieleman, "Training restricted Boltzmann machines using approximations to the likelihood gradient", 2008.

    Example:
        >>> rbm = RBM(3, 2, generator=torch.Generator().manual_seed(0))
        >>> trainer = FusedTrainer(rbm, batch_size=3, steps=1, generator=torch.Generator().manual_seed(1))
        >>> trainer.step(torch.eye(3, dtype=torch.uint8), learning_rate=0.1)
        >>> [round(bias, 4) for bias in rbm.visible_bias.tolist()]
        [-0.0333, 0.0, 0.0]
    """

    def __init__(
        self,
        rbm: RBM,
        *,
        batch_size: int,
        steps: int,
        chains: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        if not isinstance(batch_size, int) or batch_size < 1:
            raise ValueError(f"`batch_size` should be a positive integer. Found {batch_size!r}.")
        check_steps(steps)
        if chains is not None and (chains.ndim != 2 or chains.shape[1] != rbm.n_hidden or not len(chains)):
            raise ValueError(f"`chains` should have shape (M, {rbm.n_hidden}), M > 0. Found {tuple(chains.shape)}.")
        self.rbm, self.batch_size, self.steps, self.generator = rbm, batch_size, steps, generator
        negatives = batch_size if chains is None else len(chains)
        with no_graph():
            like = rbm.weights
            self._persistent = chains is not None
            self._states = like.new_empty(negatives, rbm.n_hidden) if chains is None else chains.to(like, copy=True)
            self._mean = like.new_empty(negatives, rbm.n_columns)
            self._visible = like.new_empty(negatives + batch_size, rbm.n_columns)
            self._hidden = like.new_empty(negatives + batch_size, rbm.n_hidden)
        self._views: dict[torch.Size, _Views] = {}

    @property
    def chains(self) -> Tensor | None:
        """(M, H), the hidden states that the next step starts from and overwrites; None without persistent chains."""
        return self._states if self._persistent else None

    def step(self, data: Tensor, *, learning_rate: float) -> None:
        """Update the parameters, and the chains.

        Args:
            data: (N, V), zeros and ones of any type (``uint8`` saves memory), N at most `batch_size`.
            learning_rate: The step size.

        Raises:
            ValueError: If `data` has no rows, more than `batch_size`, or not V columns.
        """
        views = self._views.get(data.shape)
        if views is None:
            views = self._views[data.shape] = self._views_for(data.shape)
        weights, visible_bias, hidden_bias = self.rbm.weights, self.rbm.visible_bias, self.rbm.hidden_bias

        def hidden_mean(visible: Tensor, out: Tensor) -> None:
            torch.addmm(hidden_bias, visible, weights, out=out).sigmoid_()

        def draw(mean: Tensor, out: Tensor) -> None:
            out.uniform_(generator=self.generator).lt_(mean)

        with no_graph():
            views.positive.copy_(data)
            if not self._persistent:
                hidden_mean(views.positive, out=views.hidden_positive)
                draw(views.hidden_positive, out=views.states)
            for remaining in reversed(range(self.steps)):
                torch.addmm(visible_bias, views.states, weights.mT, out=views.mean).sigmoid_()
                draw(views.mean, out=views.negative)
                if remaining:
                    hidden_mean(views.negative, out=views.hidden_negative)
                    draw(views.hidden_negative, out=views.states)
            if self._persistent:
                hidden_mean(views.visible, out=views.hidden)
                draw(views.hidden_negative, out=views.states)
            else:
                hidden_mean(views.negative, out=views.hidden_negative)
            visible_bias.addmv_(views.visible.mT, views.share, alpha=learning_rate)
            hidden_bias.addmv_(views.hidden.mT, views.share, alpha=learning_rate)
            weights.addmm_(views.visible.mT, views.hidden.mul_(views.share[:, None]), alpha=learning_rate)

    def _views_for(self, shape: torch.Size) -> _Views:
        n_visible = self.rbm.n_columns
        if len(shape) != 2 or shape[1] != n_visible or not 0 < shape[0] <= self.batch_size:
            raise ValueError(
                f"`data` should have shape (N, {n_visible}) with 0 < N <= {self.batch_size}. Found {tuple(shape)}."
            )
        n = shape[0]
        m = len(self._states) if self._persistent else n
        visible, hidden = self._visible[: m + n], self._hidden[: m + n]
        with no_graph():
            share = torch.cat([visible.new_full((m,), -1 / m), visible.new_full((n,), 1 / n)])
        return _Views(
            states=self._states[:m],
            mean=self._mean[:m],
            visible=visible,
            negative=visible[:m],
            positive=visible[m:],
            hidden=hidden,
            hidden_negative=hidden[:m],
            hidden_positive=hidden[m:],
            share=share,
        )


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
    share: Tensor  # -1/M and 1/N: the part of each row in the update
