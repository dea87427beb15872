"""Training without autograd: the same updates, in place, at little more than the time of their matrix products.

N data of one batch, M negative samples, V visible units, H hidden units.
"""

from __future__ import annotations

import torch
from torch import Tensor

from toolkit.blocks import no_graph
from toolkit.rbm._chains import check_steps
from toolkit.rbm._model import RBM

__all__ = ["FusedTrainer"]


class FusedTrainer:
    r"""Stochastic gradient descent on contrastive divergence, in place: :math:`\theta \leftarrow \theta - \eta g`.

    :math:`g` is `cd_gradient`, which is what autograd gives for the blocked surrogate; here both sides of it come
    from one product :math:`[v_-; v_+]^\top [-\tfrac{\eta}{M} h_-; \tfrac{\eta}{N} h_+]`, and every intermediate
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

    Attributes:
        chains: (M, H), the hidden states that the next step starts from, or None.

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
            self.chains = None if chains is None else chains.to(like, copy=True)
            # Negative samples first, then the data: a smaller batch leaves both in one piece.
            self._visible = like.new_empty(negatives + batch_size, rbm.n_visible)
            self._hidden = like.new_empty(negatives + batch_size, rbm.n_hidden)
            self._scale = like.new_empty(negatives + batch_size)
            self._states = like.new_empty(negatives, rbm.n_hidden) if self.chains is None else self.chains
            self._mean = like.new_empty(negatives, rbm.n_visible)

    def step(self, data: Tensor, *, learning_rate: float) -> None:
        """Update the parameters, and the chains.

        Args:
            data: (N, V), zeros and ones of any type (``uint8`` saves memory), N at most `batch_size`.
            learning_rate: The step size.

        Raises:
            ValueError: If `data` has no rows, more than `batch_size`, or not V columns.
        """
        rbm, n = self.rbm, len(data)
        if data.ndim != 2 or data.shape[1] != rbm.n_visible or not 0 < n <= self.batch_size:
            raise ValueError(
                f"`data` should have shape (N, {rbm.n_visible}) with 0 < N <= {self.batch_size}. "
                f"Found {tuple(data.shape)}."
            )
        m = n if self.chains is None else len(self.chains)
        visible, hidden, scale = self._visible[: m + n], self._hidden[: m + n], self._scale[: m + n]
        states, mean = self._states[:m], self._mean[:m]
        with no_graph():
            visible[m:].copy_(data)
            if self.chains is None:
                self._hidden_mean(visible[m:], out=hidden[m:])
                self._draw(hidden[m:], out=states)
            for remaining in reversed(range(self.steps)):
                torch.addmm(rbm.visible_bias, states, rbm.weights.mT, out=mean).sigmoid_()
                self._draw(mean, out=visible[:m])
                if remaining:
                    self._hidden_mean(visible[:m], out=hidden[:m])
                    self._draw(hidden[:m], out=states)
            if self.chains is None:
                self._hidden_mean(visible[:m], out=hidden[:m])
            else:
                self._hidden_mean(visible, out=hidden)
                self._draw(hidden[:m], out=states)
            scale[:m], scale[m:] = -learning_rate / m, learning_rate / n
            hidden.mul_(scale[:, None])
            rbm.weights.addmm_(visible.mT, hidden)
            rbm.visible_bias.addmv_(visible.mT, scale)
            rbm.hidden_bias.add_(hidden.sum(0))

    def _hidden_mean(self, visible: Tensor, *, out: Tensor) -> None:
        torch.addmm(self.rbm.hidden_bias, visible, self.rbm.weights, out=out).sigmoid_()

    def _draw(self, mean: Tensor, *, out: Tensor) -> None:
        out.uniform_(generator=self.generator).lt_(mean)
