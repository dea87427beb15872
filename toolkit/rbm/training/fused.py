r"""Training without autograd: the same updates, in place, in little more than the time of their matrix products.

N data of one batch, M negative samples, T temperatures, V columns of the visible layer, H hidden units.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, all_reduce

from toolkit._checks import integer, number
from toolkit._precision import bfloat16_is_faster
from toolkit.blocks import no_graph
from toolkit.rbm.chains.tempering import rising_temperatures
from toolkit.rbm.machine.joint import checked_reference
from toolkit.rbm.machine.model import RBM
from toolkit.rbm.training._kernels import BernoulliKernel, Kernel, LayerKernel, Phases, parameters_of

__all__ = ["FusedTrainer"]

# Multiplications of one matrix product up to which a second thread may cost more than it saves: 0.2 ms of work.
_FOR_ONE_THREAD = 2**23

_FAST_DECAY = 0.95  # of the fast weights at each update, Tieleman & Hinton 2009, section 4.2


class FusedTrainer:
    r"""Stochastic gradient descent on contrastive divergence, in place: :math:`\theta \leftarrow \theta - \eta g`.

    :math:`g` is `cd_gradient`, the same gradient as by autograd of the blocked surrogate. Here both phases come from
    one product :math:`[v_-; v_+]^\top [-\tfrac1M h_-; \tfrac1N h_+]`, which is :math:`-g`, and every intermediate
    result has a buffer. Each phase is a mean over its own rows, so a smaller last batch is weighted correctly.

    The source of the negative samples:

    - Without `chains`: k Gibbs steps from the data, CD-k. It draws as `contrastive_divergence` does: the same generator
      gives the same update.
    - With `chains`: k steps from the chains' last states, persistent CD-k. The chains are carried as *hidden* states,
      so that a mean :math:`E[h \mid v_-]` serves the update and the next draw: five matrix products (V, H, batch) for
      k = 1 instead of six.
    - With `chains` and `inverse_temperatures`: parallel tempering. Each of the M chains has a copy at every
      temperature; neighbours are swapped by their joint energies after every step, and the chains at :math:`\beta = 1`
      are the negative samples.
    - With `chains` and `fast_rate`: the chains belong to a machine with additional fast weights. These learn fast and
      decay, and so make the chains mix.

    Args:
        rbm: The machine, of any kind of units; all its parameters are updated, also those without ``requires_grad``.
        batch_size: The most rows of a batch.
        steps: k, the number of Gibbs steps.
        chains: (M, H), hidden states at which persistent chains start, zeros for example; (T, M, H) with
            `inverse_temperatures`, or (M, H) for all temperatures; copied. None: the chains start at the data.
        inverse_temperatures: (T,), :math:`\beta`, increasing, the last one 1; for example evenly spaced from 0. See
            `toolkit.rbm.Joint.annealed`.
        reference: (V,), visible biases of the machine at :math:`\beta = 0`. None: 0, or those of a Gaussian machine.
        fast_rate: The learning rate of the fast weights, which lose a twentieth at every update. None: no fast weights.
        offset_rate: The weight of each batch in the offsets of centred coordinates, which are running means of both
            layers given the data; 1 for the batch alone. None: plain coordinates.
        weight_decay: :math:`\lambda` in :math:`g + \lambda W`, in the coordinates of the update; biases do not decay.
        product_dtype: The dtype of the matrix products that draw samples. ``torch.bfloat16``: zeros and ones are exact
            there, weights are rounded; the update's own product keeps the dtype of the parameters. ``"auto"``:
            bfloat16 if it takes less than 0.8 of the time for a product of this size, measured once; this holds on
            processors with AMX and on GPUs, not with AVX512-BF16 alone. None: the dtype of the parameters. Only for
            Bernoulli units.
        generator: Draws the chains, on the machine's device. None: torch's default generator.
        group: Processes that hold parts of each batch and of the chains. Each process calls `step` with its own rows,
            zero or more, and all get the same update, that of all rows together. None: this process alone.

    Raises:
        ValueError: If `batch_size` or `steps` is not positive, a rate is out of its range, inverse temperatures do not
            increase to 1, or options exclude each other. If `chains` or `reference` has the wrong shape, or has values
            that its units cannot have.

    References:
        Tieleman, "Training restricted Boltzmann machines using approximations to the likelihood gradient", 2008.
        Tieleman & Hinton, "Using fast weights to improve persistent contrastive divergence", 2009.
        Desjardins et al., "Tempered Markov chain Monte Carlo for training of restricted Boltzmann machines", 2010.
        Melchior, Fischer & Wiskott, "How to center deep Boltzmann machines", 2016, algorithm 1.

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
        inverse_temperatures: Tensor | None = None,
        reference: Tensor | None = None,
        fast_rate: float | None = None,
        offset_rate: float | None = None,
        weight_decay: float = 0.0,
        product_dtype: torch.dtype | Literal["auto"] | None = None,
        generator: torch.Generator | None = None,
        group: ProcessGroup | None = None,
    ) -> None:
        batch_size, steps = integer("batch_size", batch_size), integer("steps", steps)
        weight_decay = number("weight_decay", weight_decay, least=0)
        fast_rate = None if fast_rate is None else number("fast_rate", fast_rate, above=0)
        offset_rate = None if offset_rate is None else number("offset_rate", offset_rate, above=0, most=1)
        if chains is None and (inverse_temperatures is not None or fast_rate is not None):
            raise ValueError("`inverse_temperatures` and `fast_rate` should come with `chains`. Found none.")
        if inverse_temperatures is not None and fast_rate is not None:
            raise ValueError("`fast_rate` and `inverse_temperatures` should not both be given.")
        if reference is not None and inverse_temperatures is None:
            raise ValueError("`reference` should come with `inverse_temperatures`. Found none.")
        if product_dtype not in (None, "auto") and not getattr(product_dtype, "is_floating_point", False):
            raise ValueError(f'`product_dtype` should be a floating-point type, or "auto". Found {product_dtype!r}.')
        self.rbm, self.batch_size, self.steps, self.generator, self.group = rbm, batch_size, steps, generator, group
        self._n_columns = rbm.n_columns
        self.weight_decay, self.fast_rate, self.offset_rate = weight_decay, fast_rate, offset_rate
        betas = None
        if inverse_temperatures is not None:
            rising_temperatures(inverse_temperatures, last="1")
            betas = torch.as_tensor(inverse_temperatures)
        with no_graph():
            states = None if chains is None else _states(torch.as_tensor(chains), rbm, betas)
            if reference is not None:
                reference = checked_reference(torch.as_tensor(reference), rbm.joint).to(rbm.weights)
            bernoulli = rbm.visible_units == rbm.hidden_units == "bernoulli"
            like, n_rows = rbm.weights, batch_size + (batch_size if states is None else states.shape[:-1].numel())
            if product_dtype == "auto":
                faster = bernoulli and bfloat16_is_faster(n_rows, *like.shape, like.dtype, like.device)
                product_dtype = torch.bfloat16 if faster else None
            self.inverse_temperatures, self.reference, self.product_dtype = betas, reference, product_dtype
            if product_dtype is not None and not bernoulli:
                raise ValueError("`product_dtype` should be left out unless all units are Bernoulli units.")
            self._kernel: Kernel
            if bernoulli:
                self._kernel = BernoulliKernel(rbm, batch_size, steps, states, betas, reference, product_dtype)
            else:
                self._kernel = LayerKernel(rbm, steps, states, betas, reference)
            self._offsets = (
                None if offset_rate is None else (like.new_zeros(rbm.n_columns), like.new_zeros(rbm.n_hidden))
            )
            self._centred = False  # whether the offsets have seen data
            self._fast = None
            if fast_rate is not None:
                self._fast = {name: torch.zeros_like(parameter) for name, parameter in rbm.named_parameters()}
            # With fast weights, or on several ranks, the update is needed by itself: one buffer for all parameters.
            self._update: dict[str, Tensor] | None = None
            if self._fast is not None or group is not None:
                self._flat = like.new_empty(sum(parameter.numel() for parameter in rbm.parameters()))
                parts = self._flat.split([parameter.numel() for parameter in rbm.parameters()])
                self._update = {
                    name: part.view_as(parameter)
                    for (name, parameter), part in zip(rbm.named_parameters(), parts, strict=True)
                }
            self._is_small = not like.is_cuda and n_rows * like.numel() <= _FOR_ONE_THREAD
            self._n_negative = self._total(self._kernel.n_chains) if group is not None else self._kernel.n_chains

    @property
    def chains(self) -> Tensor | None:
        """(M, H), or (T, M, H): the hidden states that the next step starts from and overwrites, or None."""
        return self._kernel.chains

    @property
    def offsets(self) -> tuple[Tensor, Tensor] | None:
        """(V,) and (H,), the offsets of the last update's coordinates; None in plain coordinates."""
        return self._offsets

    @property
    def swap_rates(self) -> Tensor | None:
        """(T - 1,), the fraction of accepted swaps of neighbouring temperatures; None without temperatures."""
        return self._kernel.swap_rates

    def step(self, data: Tensor, *, learning_rate: float) -> None:
        """Update the parameters, and the chains.

        Args:
            data: (N, V), of any type (``uint8`` saves memory), N at most `batch_size`; values are not checked.
            learning_rate: The step size.

        Raises:
            ValueError: If `data` has no rows, more than `batch_size`, or not V columns.
        """
        learning_rate = number("learning_rate", learning_rate, least=0)
        if not isinstance(data, Tensor):
            raise TypeError(f"`data` should be a tensor. Found {type(data).__name__}.")
        n, n_columns = data.shape if data.ndim == 2 else (-1, -1)
        if n_columns != self._n_columns or not (self.group is None) <= n <= self.batch_size:
            raise ValueError(
                f"`data` should have shape (N, {self._n_columns}) with 0 < N <= {self.batch_size}. "
                f"Found {tuple(data.shape)}."
            )
        threads = torch.get_num_threads() if self._is_small else 1
        if threads == 1:
            return self._step(data, learning_rate)
        torch.set_num_threads(1)
        try:
            return self._step(data, learning_rate)
        finally:
            torch.set_num_threads(threads)

    def _step(self, data: Tensor, learning_rate: float) -> None:
        with no_graph():
            phases = self._kernel.phases(data, self._fast, self.generator)
            if self.group is not None:
                self._weigh(phases)
            if self._offsets is not None:
                self._move_offsets(phases)
            if self._update is None:
                self._descend(phases, learning_rate)
            else:
                self._collect(phases)
                self._apply(learning_rate)

    def state_dict(self) -> dict[str, Tensor]:
        """Return copies of all tensors on which the next steps depend, except for the machine's parameters."""
        state = {f"kernel.{name}": value.clone() for name, value in self._kernel.state().items()}
        if self._offsets is not None:
            state["visible_offset"], state["hidden_offset"] = (offset.clone() for offset in self._offsets)
            state["centred"] = torch.tensor(self._centred, device="cpu")
        if self._fast is not None:
            state |= {f"fast.{name}": value.clone() for name, value in self._fast.items()}
        if self.generator is not None:
            state["generator"] = self.generator.get_state()
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Resume, bit for bit, from the `state_dict` of a trainer with the same options.

        Raises:
            ValueError: If the state belongs to a trainer with other options.
        """
        own = self.state_dict()
        wrong = sorted(own.keys() ^ state.keys()) or [
            name for name in own if name != "generator" and own[name].shape != state[name].shape
        ]
        if wrong:
            raise ValueError(f"`state` should be that of a trainer with the same options. Found others: {wrong}.")
        with no_graph():
            for name, value in self._kernel.state().items():
                value.copy_(state[f"kernel.{name}"])
            if self._offsets is not None:
                for name, offset in zip(("visible_offset", "hidden_offset"), self._offsets, strict=True):
                    offset.copy_(state[name])
                self._centred = bool(state["centred"])
            if self._fast is not None:
                for name, value in self._fast.items():
                    value.copy_(state[f"fast.{name}"])
        if self.generator is not None:
            self.generator.set_state(state["generator"])

    def _weigh(self, phases: Phases) -> None:
        """Fill in the part of each row in the update: -1/M and 1/N, counted over all ranks."""
        n = self._total(len(phases.visible) - phases.n_negative)
        if not n:
            raise ValueError("`data` should have at least one row on some rank. Found none.")
        phases.share[: phases.n_negative] = -1 / (self._n_negative or n)
        phases.share[phases.n_negative :] = 1 / n

    def _move_offsets(self, phases: Phases) -> None:
        """Move the offsets towards the means of the batch, and subtract them from the rows."""
        assert self._offsets is not None
        assert self.offset_rate is not None
        share, rows = phases.positive_share, phases.positive_mT
        rate = self.offset_rate if self._centred else 1.0
        self._centred = True
        if self.group is None:
            for offset, row in zip(self._offsets, rows, strict=True):
                offset.addmv_(row, share, beta=1 - rate, alpha=rate)
        else:
            means = torch.cat([row @ share for row in rows])
            all_reduce(means, group=self.group)
            for offset, mean in zip(self._offsets, means.split([len(offset) for offset in self._offsets]), strict=True):
                offset.lerp_(mean, rate)
        phases.statistic.sub_(self._offsets[0])
        phases.hidden.sub_(self._offsets[1])

    def _weighted(self, phases: Phases) -> tuple[Tensor, Tensor]:
        """Weigh the hidden rows in place; return the weights of the statistic and of these rows for the biases.

        In centred coordinates the biases also move with the weights. With C the update of W, the updates of the plain
        biases are the updates of the centred biases less C lambda, and less C^T mu. The shares add up to 0, so the
        offsets in the rows do not change the rest.
        """
        phases.hidden.mul_(phases.share_column)
        if self._offsets is None:
            return phases.share, phases.ones
        visible_offset, hidden_offset = self._offsets
        of_statistic = torch.addmv(phases.share, phases.hidden, hidden_offset, alpha=-1)
        return of_statistic, torch.addmv(phases.ones, phases.statistic, visible_offset, alpha=-1)

    def _decay(self, learning_rate: float) -> float:
        """Move the biases with the decay of the weights in centred coordinates; return the remaining part of W."""
        if not self.weight_decay:
            return 1.0
        if self._offsets is not None:
            rate = learning_rate * self.weight_decay
            weights, visible_bias, hidden_bias = parameters_of(self.rbm)
            visible_bias.addmv_(weights, self._offsets[1], alpha=rate)
            hidden_bias.addmv_(weights.mT, self._offsets[0], alpha=rate)
        return 1 - learning_rate * self.weight_decay

    def _descend(self, phases: Phases, learning_rate: float) -> None:
        """Update the parameters without a buffer for the update."""
        for name, value in phases.other_gradients(self.rbm).items():
            getattr(self.rbm, name).add_(value, alpha=learning_rate)
        weights, visible_bias, hidden_bias = parameters_of(self.rbm)
        of_statistic, of_hidden = self._weighted(phases)
        left = self._decay(learning_rate)
        visible_bias.addmv_(phases.statistic_mT, of_statistic, alpha=learning_rate)
        hidden_bias.addmv_(phases.hidden_mT, of_hidden, alpha=learning_rate)
        weights.addmm_(phases.statistic_mT, phases.hidden, beta=left, alpha=learning_rate)

    def _collect(self, phases: Phases) -> None:
        """Write the update into its buffer."""
        assert self._update is not None
        for name, value in phases.other_gradients(self.rbm).items():
            self._update[name].copy_(value)
        of_statistic, of_hidden = self._weighted(phases)
        torch.mv(phases.statistic_mT, of_statistic, out=self._update["visible_bias"])
        torch.mv(phases.hidden_mT, of_hidden, out=self._update["hidden_bias"])
        torch.mm(phases.statistic_mT, phases.hidden, out=self._update["weights"])
        if self.group is not None:
            all_reduce(self._flat, group=self.group)

    def _apply(self, learning_rate: float) -> None:
        """Update the parameters, and the fast weights, by the buffer."""
        assert self._update is not None
        left = self._decay(learning_rate)
        self.rbm.weights.mul_(left)
        for name, parameter in self.rbm.named_parameters():
            parameter.add_(self._update[name], alpha=learning_rate)
            if self._fast is not None:
                assert self.fast_rate is not None
                self._fast[name].mul_(_FAST_DECAY).add_(self._update[name], alpha=self.fast_rate)

    def _total(self, count: int) -> int:
        total = torch.tensor(count, device=self.rbm.weights.device)
        all_reduce(total, group=self.group)
        return int(total)


def _states(chains: Tensor, rbm: RBM, betas: Tensor | None) -> Tensor:
    """Return a copy of the chains' hidden states, (M, H) or (T, M, H)."""
    shapes = ["(M, {h})"] if betas is None else ["(M, {h})", "({t}, M, {h})"]
    expected = " or ".join(shapes).format(h=rbm.n_hidden, t=0 if betas is None else len(betas))
    right = chains.ndim == 2 or (betas is not None and chains.ndim == 3 and len(chains) == len(betas))
    if not right or chains.shape[-1] != rbm.n_hidden or not chains.shape[-2]:
        raise ValueError(f"`chains` should have shape {expected}, M > 0. Found {tuple(chains.shape)}.")
    if betas is not None and chains.ndim == 2:
        chains = chains.expand(len(betas), *chains.shape)
    states = chains.to(rbm.weights, copy=True, memory_format=torch.contiguous_format)
    rbm.joint.hidden.check(states, "chains")
    return states
