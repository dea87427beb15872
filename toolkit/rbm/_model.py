"""The model: energies of a restricted Boltzmann machine, and what can be summed exactly.

N samples, V visible units, H hidden units, S states of the smaller layer. Energies are in nats.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus
from torch.utils.checkpoint import checkpoint

from toolkit.blocks import no_graph
from toolkit.rbm._units import sampled

__all__ = ["ENUMERABLE_UNITS", "RBM", "base_rate_bias"]

ENUMERABLE_UNITS = 20
"""Units of the smaller layer up to which sums over its 2^20 states are exact; beyond, they raise."""

_INITIAL_SCALE = 0.01  # standard deviation of the weights, Hinton 2010, section 8
_CHUNK = 2**11  # states at a time: 1 MiB at 64 units in float64, which stays in the cache
_LINEAR_FROM = 40.0  # here softplus(x) = x to rounding also in float64; torch's default of 20 is off by 2e-9


class RBM(nn.Module):
    r"""A restricted Boltzmann machine of zeros and ones.

    .. math::
        p(v, h) = e^{-E(v, h)} / Z, \qquad E(v, h) = -v^\top b - h^\top c - v^\top W h

    Calling it gives the free energy. Training wants a surrogate such as `contrastive_divergence`.

    Args:
        n_visible: V.
        n_hidden: H.
        generator: Draws the initial weights, from a normal distribution of standard deviation 0.01; its device is
            where they are drawn. The biases start at zero (see `base_rate_bias`).
        dtype: Floating-point type of the parameters. None: torch's default.
        device: Where the parameters live. None: torch's default.

    Attributes:
        weights: W, (V, H).
        visible_bias: b, (V,).
        hidden_bias: c, (H,).

    Raises:
        ValueError: If a size is not positive, or `dtype` is not a floating-point type.

    References:
        Hinton, "Training products of experts by minimizing contrastive divergence", 2002.
        Hinton, "A practical guide to training restricted Boltzmann machines", 2010, section 8 (initial values).

    Example:
        >>> rbm = RBM(3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        >>> everything = torch.cartesian_prod(*[torch.tensor([0.0, 1.0], dtype=torch.float64)] * 3)
        >>> rbm.log_likelihood(everything).exp().sum().item()
        1.0
    """

    weights: nn.Parameter
    visible_bias: nn.Parameter
    hidden_bias: nn.Parameter

    def __init__(
        self,
        n_visible: int,
        n_hidden: int,
        *,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        for argument, size in (("n_visible", n_visible), ("n_hidden", n_hidden)):
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"`{argument}` should be a positive integer. Found {size!r}.")
        dtype = torch.get_default_dtype() if dtype is None else dtype
        if not dtype.is_floating_point:
            raise ValueError(f"`dtype` should be a floating-point type. Found {dtype}.")
        drawn_on = device if generator is None else generator.device
        weights = torch.randn(n_visible, n_hidden, generator=generator, dtype=dtype, device=drawn_on)
        self.weights = nn.Parameter(weights.mul_(_INITIAL_SCALE).to(device))
        self.visible_bias = nn.Parameter(torch.zeros(n_visible, dtype=dtype, device=device))
        self.hidden_bias = nn.Parameter(torch.zeros(n_hidden, dtype=dtype, device=device))

    @property
    def n_visible(self) -> int:
        """V."""
        return self.weights.shape[0]

    @property
    def n_hidden(self) -> int:
        """H."""
        return self.weights.shape[1]

    def forward(self, visible: Tensor) -> Tensor:
        """Return the free energy, so that `torch.func.functional_call` has something to call."""
        return self.free_energy(visible)

    def energy(self, visible: Tensor, hidden: Tensor) -> Tensor:
        r"""Return :math:`E(v, h) = -v^\top b - h^\top c - v^\top W h` in nats, per sample.

        Args:
            visible: (\*, V).
            hidden: (\*, H), with leading dimensions that broadcast with those of `visible`.

        Returns:
            (\*).
        """
        interaction = (visible @ self.weights * hidden).sum(-1)
        return -(visible @ self.visible_bias) - hidden @ self.hidden_bias - interaction

    def free_energy(self, visible: Tensor) -> Tensor:
        r"""Return :math:`F(v) = -\log \sum_h e^{-E(v, h)}` in nats, per sample, so that :math:`p(v) = e^{-F(v)} / Z`.

        .. math::
            F(v) = -v^\top b - \sum_j \log(1 + e^{c_j + (W^\top v)_j})

        Args:
            visible: (\*, V).

        Returns:
            (\*).

        Raises:
            ValueError: If `visible` does not have V columns.
            TypeError: If `visible` does not have the type of the parameters.

        References:
            Hinton, "A practical guide to training restricted Boltzmann machines", 2010, section 16.1.

        Example:
            >>> RBM(3, 2, generator=torch.Generator().manual_seed(0)).free_energy(torch.zeros(1, 3))
            tensor([-1.3863], grad_fn=<NegBackward0>)
        """
        self.check_visible(visible)
        return -_log_weight(visible, self.visible_bias, self.weights, self.hidden_bias)

    def hidden_mean(self, visible: Tensor) -> Tensor:
        r"""Return :math:`p(h_j = 1 \mid v) = \sigma(c + W^\top v)_j`, (\*, H), from `visible`, (\*, V)."""
        return torch.sigmoid(visible @ self.weights + self.hidden_bias)

    def visible_mean(self, hidden: Tensor) -> Tensor:
        r"""Return :math:`p(v_i = 1 \mid h) = \sigma(b + W h)_i`, (\*, V), from `hidden`, (\*, H)."""
        return torch.sigmoid(hidden @ self.weights.mT + self.visible_bias)

    def sample_hidden(self, visible: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        r"""Draw the hidden units given the visible ones, (\*, H), from `visible`, (\*, V)."""
        return sampled(self.hidden_mean(visible), generator)

    def sample_visible(self, hidden: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        r"""Draw the visible units given the hidden ones, (\*, V), from `hidden`, (\*, H)."""
        return sampled(self.visible_mean(hidden), generator)

    def log_partition(self) -> Tensor:
        r"""Return :math:`\log Z = \log \sum_{v, h} e^{-E(v, h)}` in nats, exactly.

        The states of the smaller layer are enumerated, in chunks; the sum over the other layer is a product. Its
        gradient recomputes the chunks: memory does not grow with the number of states.

        Returns:
            A scalar.

        Raises:
            ValueError: If both layers have more than `ENUMERABLE_UNITS` units.

        Example:
            >>> nearly_uniform = RBM(3, 2, generator=torch.Generator().manual_seed(0))
            >>> round(nearly_uniform.log_partition().exp().item())
            32
        """
        bias, weights, other_bias = self._smaller_layer()

        def part(first: int, last: int) -> Tensor:
            states = _states(first, last, like=bias)
            return _log_weight(states, bias, weights, other_bias).logsumexp(0)

        ranges = list(_ranges(len(bias)))
        if len(ranges) > 1 and torch.is_grad_enabled():
            parts = [checkpoint(part, *ends, use_reentrant=False, preserve_rng_state=False) for ends in ranges]
        else:
            parts = [part(*ends) for ends in ranges]
        return torch.stack(parts).logsumexp(0)

    def log_likelihood(self, visible: Tensor) -> Tensor:
        r"""Return :math:`\log p(v) = -F(v) - \log Z` in nats, per sample, exactly.

        Args:
            visible: (\*, V).

        Returns:
            (\*).

        Raises:
            ValueError: If `visible` does not have V columns, or both layers have more than `ENUMERABLE_UNITS` units.
            TypeError: If `visible` does not have the type of the parameters.
        """
        return -self.free_energy(visible) - self.log_partition()

    def statistics(self, visible: Tensor) -> dict[str, Tensor]:
        r"""Return the sufficient statistics with the visible units at `visible`, the mean over samples.

        :math:`E[v h^\top]`, :math:`E[v]` and :math:`E[h]`, the hidden units at their probabilities: minus the
        gradient of the mean free energy. No graph is built.

        Args:
            visible: (N, V).

        Returns:
            ``weights`` (V, H), ``visible_bias`` (V,) and ``hidden_bias`` (H,): the names of the parameters.
        """
        self.check_visible(visible)
        with no_graph():
            hidden = self.hidden_mean(visible)
            return {
                "weights": visible.mT @ hidden / len(visible),
                "visible_bias": visible.mean(0),
                "hidden_bias": hidden.mean(0),
            }

    def model_statistics(self) -> dict[str, Tensor]:
        r"""Return :math:`E[v h^\top]`, :math:`E[v]` and :math:`E[h]` of the model itself, exactly.

        They are the gradient of `log_partition`. No graph is built.

        Returns:
            As `statistics`.

        Raises:
            ValueError: If both layers have more than `ENUMERABLE_UNITS` units.
        """
        with no_graph():
            bias, weights, other_bias = self._smaller_layer()
            pairs, own, other = torch.zeros_like(weights), torch.zeros_like(bias), torch.zeros_like(other_bias)
            log_partition = bias.new_full((), -torch.inf)
            for first, last in _ranges(len(bias)):
                states = _states(first, last, like=bias)
                log_weight = _log_weight(states, bias, weights, other_bias)
                so_far = torch.logaddexp(log_partition, log_weight.logsumexp(0))
                probability = (log_weight - so_far).exp()
                mean = torch.sigmoid(states @ weights + other_bias)
                for total, part in (
                    (pairs, (probability[:, None] * states).mT @ mean),
                    (own, probability @ states),
                    (other, probability @ mean),
                ):
                    total.mul_((log_partition - so_far).exp()).add_(part)
                log_partition = so_far
        if self.n_hidden <= self.n_visible:
            return {"weights": pairs.mT, "visible_bias": other, "hidden_bias": own}
        return {"weights": pairs, "visible_bias": own, "hidden_bias": other}

    def check_visible(self, visible: Tensor) -> None:
        """Raise unless `visible` is something that this machine has an energy for."""
        if visible.ndim < 1 or visible.shape[-1] != self.n_visible:
            raise ValueError(f"`visible` should have shape (*, {self.n_visible}). Found {tuple(visible.shape)}.")
        if visible.dtype != self.weights.dtype:
            raise TypeError(f"`visible` should have the parameters' type {self.weights.dtype}. Found {visible.dtype}.")

    def extra_repr(self) -> str:
        """Return the sizes, for ``repr``."""
        return f"n_visible={self.n_visible}, n_hidden={self.n_hidden}"

    def _smaller_layer(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the smaller layer's bias, the weights from it to the other layer, and the other layer's bias."""
        units = min(self.n_visible, self.n_hidden)
        if units > ENUMERABLE_UNITS:
            raise ValueError(
                f"The smaller layer should have at most {ENUMERABLE_UNITS} units, so that its states can be "
                f"enumerated. Found {units}."
            )
        if self.n_hidden <= self.n_visible:
            return self.hidden_bias, self.weights.mT, self.visible_bias
        return self.visible_bias, self.weights, self.hidden_bias


def base_rate_bias(data: Tensor) -> Tensor:
    r"""Return the visible biases with which a machine without weights has the means of the data.

    .. math::
        b_i = \log \frac{n_i + 1}{N - n_i + 1}, \qquad n_i = \sum_n v_{ni}

    The added counts keep units that never change finite.

    Args:
        data: (N, V), zeros and ones.

    Returns:
        (V,).

    References:
        Hinton, "A practical guide to training restricted Boltzmann machines", 2010, section 8.1.

    Example:
        >>> base_rate_bias(torch.tensor([[0.0, 1.0], [0.0, 0.0], [0.0, 1.0]]))
        tensor([-1.3863,  0.4055])
    """
    count = data.sum(0)
    return ((count + 1) / (len(data) - count + 1)).log()


def _log_weight(states: Tensor, bias: Tensor, weights: Tensor, other_bias: Tensor) -> Tensor:
    """Return the log of the unnormalised probability of one layer's states, the other layer summed out."""
    return states @ bias + softplus(states @ weights + other_bias, threshold=_LINEAR_FROM).sum(-1)


def _ranges(units: int) -> Iterator[tuple[int, int]]:
    """Yield the ends of the chunks of 2^units states."""
    for first in range(0, 2**units, _CHUNK):
        yield first, min(first + _CHUNK, 2**units)


def _states(first: int, last: int, *, like: Tensor) -> Tensor:
    """Return the states first..last-1 of ``len(like)`` units, (S, units): the binary digits of their numbers."""
    numbers = torch.arange(first, last, device=like.device)
    return ((numbers[:, None] >> torch.arange(len(like), device=like.device)) & 1).to(like.dtype)
