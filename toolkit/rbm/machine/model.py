"""The model: energies of a restricted Boltzmann machine, and its exact sums.

N samples, V visible units, H hidden units, Q states of a categorical unit.
Where visible units are categorical each has Q columns, and tensors of visible units have V Q columns. Energies are in
nats.
"""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn

from toolkit._checks import choice, integer
from toolkit._random import check_generator
from toolkit._tensors import dense
from toolkit.blocks import no_graph
from toolkit.rbm.machine.enumeration import ENUMERABLE_UNITS, exact_samples, log_partition, model_statistics
from toolkit.rbm.machine.joint import Joint
from toolkit.rbm.machine.layers import Bernoulli, Categorical, Gaussian, Layer, Rectified

__all__ = ["ENUMERABLE_UNITS", "RBM", "HiddenUnits", "VisibleUnits", "base_rate_bias"]

VisibleUnits: TypeAlias = Literal["bernoulli", "gaussian", "categorical"]
HiddenUnits: TypeAlias = Literal["bernoulli", "rectified"]

_INITIAL_SCALE = 0.01  # standard deviation of the weights, Hinton 2010, section 8


class RBM(nn.Module):
    r"""A restricted Boltzmann machine.

    .. math::
        p(v, h) = e^{-E(v, h)} / Z, \qquad E(v, h) = -v^\top b - h^\top c - v^\top W h

    for units that are 0 or 1. Categorical visible units (Potts units) have the same energy, with Q columns for each
    unit, one of which is 1. Real visible units, normal given the hidden ones, have

    .. math::
        E(v, h) = \sum_i \frac{(v_i - b_i)^2}{2 \sigma_i^2} - h^\top c - \sum_i \frac{v_i}{\sigma_i^2} (W h)_i

    with variances :math:`\sigma_i^2 = e^{z_i}` that are learned. Rectified hidden units count: each is infinitely many
    copies of a hidden unit with biases c - 1/2, c - 3/2, ..., so that its mean is close to :math:`\log(1 + e^x)`.
    Together with real visible units, a distribution is guaranteed only while all singular values of :math:`W_{ij} /
    \sigma_i` are below 1: otherwise the energy may have no lower bound. Training does not check this condition.

    Calling the module returns the free energy. To train, use a surrogate such as `contrastive_divergence`, or a
    `FusedTrainer`.

    Args:
        n_visible: Number of visible units, V.
        n_hidden: Number of hidden units, H.
        visible: Kind of the visible units: ``"bernoulli"``, ``"gaussian"`` or ``"categorical"``.
        hidden: Kind of the hidden units: ``"bernoulli"`` or ``"rectified"``.
        categories: Q, for categorical visible units only.
        generator: Draws the initial weights on its device, from a normal distribution of standard deviation 0.01. All
            other parameters start at zero (see `start_at_base_rates`).
        dtype: Floating-point type of the parameters. None: torch's default.
        device: Device of the parameters. None: torch's default.

    Attributes:
        weights: W, (V, H); (V Q, H) for categorical units.
        visible_bias: b, (V,) or (V Q,).
        hidden_bias: c, (H,).
        visible_log_variance: z, (V,); only for Gaussian units.

    Raises:
        ValueError: If a size is not positive, units are unknown, `categories` is missing, too small or not applicable,
            or `dtype` is not a floating-point type.

    References:
        Hinton, "Training products of experts by minimizing contrastive divergence", 2002.
        Hinton, "A practical guide to training restricted Boltzmann machines", 2010, sections 8 and 13.
        Cho, Ilin & Raiko, "Improved learning of Gaussian-Bernoulli restricted Boltzmann machines", 2011, equation 3.
        Nair & Hinton, "Rectified linear units improve restricted Boltzmann machines", 2010.

    Example:
        >>> rbm = RBM(3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        >>> everything = torch.cartesian_prod(*[torch.tensor([0.0, 1.0], dtype=torch.float64)] * 3)
        >>> round(rbm.log_likelihood(everything).exp().sum().item(), 12)
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
        visible: VisibleUnits = "bernoulli",
        hidden: HiddenUnits = "bernoulli",
        categories: int | None = None,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        n_visible, n_hidden = integer("n_visible", n_visible), integer("n_hidden", n_hidden)
        for argument, units, known in (("visible", visible, VisibleUnits), ("hidden", hidden, HiddenUnits)):
            choice(argument, units, get_args(known))
        if visible != "categorical" and categories is not None:
            raise ValueError(f"`categories` should be None unless units are categorical. Found {visible!r}.")
        if visible == "categorical":
            categories = integer("categories", categories, 2)
        dtype = torch.get_default_dtype() if dtype is None else dtype
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise ValueError(f"`dtype` should be a floating-point type. Found {dtype!r}.")
        check_generator(generator)
        self.visible_units, self.hidden_units, self.categories = visible, hidden, categories
        self.n_visible = n_visible
        n_columns = n_visible * (categories or 1)
        device = torch.get_default_device() if device is None else torch.device(device)
        drawn_on = device if generator is None else generator.device
        # In float64, so that machines of every dtype start alike.
        weights = torch.randn(n_columns, n_hidden, generator=generator, dtype=torch.float64, device=drawn_on)
        self.weights = nn.Parameter(weights.mul_(_INITIAL_SCALE).to(device, dtype))
        self.visible_bias = nn.Parameter(torch.zeros(n_columns, dtype=dtype, device=device))
        self.hidden_bias = nn.Parameter(torch.zeros(n_hidden, dtype=dtype, device=device))
        if visible == "gaussian":
            self.visible_log_variance = nn.Parameter(torch.zeros(n_visible, dtype=dtype, device=device))

    @property
    def n_columns(self) -> int:
        """Columns of a tensor of visible units: V, or V Q for categorical ones."""
        return self.weights.shape[0]

    @property
    def n_hidden(self) -> int:
        """H."""
        return self.weights.shape[1]

    @property
    def joint(self) -> Joint:
        """The machine as a function of its current parameters."""
        visible: Layer
        match self.visible_units:
            case "bernoulli":
                visible = Bernoulli(self.visible_bias)
            case "gaussian":
                visible = Gaussian(self.visible_bias, self.visible_log_variance)
            case "categorical":
                assert self.categories is not None
                visible = Categorical(self.visible_bias, self.categories)
        hidden = Bernoulli(self.hidden_bias) if self.hidden_units == "bernoulli" else Rectified(self.hidden_bias)
        return Joint(self.weights, visible, hidden)

    def start_at_base_rates(self, data: Tensor) -> None:
        r"""Set the visible parameters, in place, so that a machine without weights has the frequencies of the data.

        Zeros and ones are treated as in `base_rate_bias`; so are categories, with one added count each. Real units get
        the mean and variance of the data.

        Args:
            data: (N, V) or (N, V Q).

        Raises:
            ValueError: If `data` has no rows, other columns or values that the units cannot have.
            TypeError: If `data` does not have the type of the parameters.

        References:
            Hinton, "A practical guide to training restricted Boltzmann machines", 2010, section 8.1.
        """
        self.check_rows(data, "data")
        with no_graph():
            self.joint.visible.check(data, "data")
            for name, values in self.joint.visible.base_rates(data).items():
                getattr(self, f"visible_{name}").copy_(values)

    def forward(self, visible: Tensor) -> Tensor:
        """Return the free energy; `forward` exists for `torch.func.functional_call`."""
        return self.free_energy(visible)

    def energy(self, visible: Tensor, hidden: Tensor) -> Tensor:
        r"""Return :math:`E(v, h)` in nats, per sample.

        Args:
            visible: (\*, V) or (\*, V Q).
            hidden: (\*, H), with leading dimensions that broadcast with those of `visible`.

        Returns:
            (\*).
        """
        self.check_visible(visible)
        check_units(self.weights, hidden, "hidden", side=-1)
        return self.joint.energy(visible, hidden)

    def free_energy(self, visible: Tensor) -> Tensor:
        r"""Return :math:`F(v) = -\log \sum_h e^{-E(v, h)}` in nats, per sample, so that :math:`p(v) = e^{-F(v)} / Z`.

        For zeros and ones

        .. math::
            F(v) = -v^\top b - \sum_j \log(1 + e^{c_j + (W^\top v)_j})

        Args:
            visible: (\*, V) or (\*, V Q).

        Returns:
            (\*).

        Raises:
            ValueError: If `visible` has other columns.
            TypeError: If `visible` does not have the type of the parameters.

        References:
            Hinton, "A practical guide to training restricted Boltzmann machines", 2010, section 16.1.

        Example:
            >>> rbm = RBM(3, 2, generator=torch.Generator().manual_seed(0))
            >>> [round(energy, 4) for energy in rbm.free_energy(torch.eye(3)).tolist()]
            [-1.3926, -1.3783, -1.3739]
        """
        self.check_visible(visible)
        return self.joint.free_energy(visible)

    def hidden_mean(self, visible: Tensor) -> Tensor:
        r"""Return :math:`E[h \mid v]`, (\*, H), from `visible`, (\*, V): for zeros and ones, probabilities."""
        self.check_visible(visible)
        return self.joint.hidden_mean(visible)

    def visible_mean(self, hidden: Tensor) -> Tensor:
        r"""Return :math:`E[v \mid h]`, (\*, V), from `hidden`, (\*, H): for zeros and ones, probabilities."""
        check_units(self.weights, hidden, "hidden", side=-1)
        return self.joint.visible_mean(hidden)

    def sample_hidden(self, visible: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        r"""Draw the hidden units given the visible ones, (\*, H), from `visible`, (\*, V)."""
        self.check_visible(visible)
        return self.joint.sample_hidden(visible, generator)

    def sample_visible(self, hidden: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        r"""Draw the visible units given the hidden ones, (\*, V), from `hidden`, (\*, H)."""
        check_units(self.weights, hidden, "hidden", side=-1)
        return self.joint.sample_visible(hidden, generator)

    def log_partition(self) -> Tensor:
        r"""Return :math:`\log Z = \log \sum_{v, h} e^{-E(v, h)}` in nats, exactly.

        The states of the layer with fewer states are enumerated in chunks; the other layer is summed in closed form.
        The gradient is `model_statistics`: memory does not grow with the number of states.

        Returns:
            A scalar, at least in float32.

        Raises:
            ValueError: If both layers have more than 2 ^ `ENUMERABLE_UNITS` states, or cannot be enumerated.

        Example:
            >>> nearly_uniform = RBM(3, 2, generator=torch.Generator().manual_seed(0))
            >>> round(nearly_uniform.log_partition().exp().item())
            32
        """
        return log_partition(self.joint)

    def log_likelihood(self, visible: Tensor) -> Tensor:
        r"""Return :math:`\log p(v) = -F(v) - \log Z` in nats, per sample, exactly; a density if v is real.

        The values of `visible` are not checked. For invalid values, such as 16 for a Bernoulli unit, the formula is
        still evaluated, but the result is not a log-probability.

        Args:
            visible: (\*, V) or (\*, V Q), states of the visible units.

        Returns:
            (\*).

        Raises:
            ValueError: If `visible` has other columns; and as for `log_partition`.
            TypeError: If `visible` does not have the type of the parameters.
        """
        return -self.free_energy(visible) - self.log_partition()

    def statistics(self, visible: Tensor, share: Tensor | None = None) -> dict[str, Tensor]:
        r"""Return minus the gradient of the mean free energy, the positive phase of learning, in closed form.

        For zeros and ones these are the sufficient statistics :math:`E[v h^\top]`, :math:`E[v]` and :math:`E[h]`, the
        hidden units at their means. No graph is built.

        Args:
            visible: (N, V) or (N, V Q).
            share: (N,), the weight of each sample in the sum. None: 1 / N each.

        Returns:
            The names of the parameters -> values of their shapes.

        Raises:
            ValueError: If `visible` has other columns, or no rows to take the mean of.
            TypeError: If `visible` does not have the type of the parameters.
        """
        if share is None:
            self.check_rows(visible, "visible")
        else:
            self.check_visible(visible)
        with no_graph():
            if share is None:
                share = visible.new_full((len(visible),), 1 / len(visible))
            joint = self.joint
            x = joint.to_hidden(visible)
            hidden = joint.hidden.mean(x)
            statistic = joint.visible.statistic(visible)
            to_visible = joint.to_visible(hidden) if joint.visible.more_parameters else visible
            statistics = {
                "weights": statistic.mT @ (hidden * share[:, None]),
                **_named("visible", joint.visible.parameter_gradients(visible, to_visible, share)),
                **_named("hidden", joint.hidden.parameter_gradients(hidden, x, share)),
            }
            return {name: statistics[name] for name, _ in self.named_parameters()}

    def model_statistics(self) -> dict[str, Tensor]:
        r"""Return the exact expectation of `statistics` under the model: the gradient of `log_partition`.

        No graph is built.

        Returns:
            As `statistics`.

        Raises:
            ValueError: As for `log_partition`.
        """
        return model_statistics(self.joint)

    def sample_exactly(self, n: int, *, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        r"""Draw independent visible and hidden units from the model, without a chain.

        Args:
            n: N, the number of draws.
            generator: Source of the draws, on the machine's device. None: torch's default generator.

        Returns:
            The visible units, (N, V) or (N, V Q), and the hidden ones, (N, H). No graph is built.

        Raises:
            ValueError: If `n` is not positive or the parameters are not finite, and as for `log_partition`.

        Example:
            >>> rbm = RBM(3, 2, generator=torch.Generator().manual_seed(0))
            >>> visible, hidden = rbm.sample_exactly(1000, generator=torch.Generator().manual_seed(1))
            >>> visible.shape, hidden.shape
            (torch.Size([1000, 3]), torch.Size([1000, 2]))
        """
        return exact_samples(self.joint, n, generator)

    def check_visible(self, visible: Tensor) -> None:
        """Raise unless `visible` has the columns and dtype of this machine; its values are not checked."""
        check_units(self.weights, visible, "visible")

    def check_rows(self, rows: Tensor, argument: str) -> None:
        """Raise unless `rows` is a matrix of visible units, with at least one row; its values are not checked."""
        check_units(self.weights, rows, argument, rows=True)

    def extra_repr(self) -> str:
        """Return the sizes and the units, for ``repr``."""
        units = [f"{side}={kind!r}" for side, kind in (("visible", self.visible_units), ("hidden", self.hidden_units))]
        categories = [] if self.categories is None else [f"categories={self.categories}"]
        sizes = [f"n_visible={self.n_visible}", f"n_hidden={self.n_hidden}"]
        return ", ".join(sizes + [unit for unit in units if "bernoulli" not in unit] + categories)


def base_rate_bias(data: Tensor) -> Tensor:
    r"""Return the visible biases for which a machine without weights has the means of the data.

    .. math::
        b_i = \log \frac{n_i + 1}{N - n_i + 1}, \qquad n_i = \sum_n v_{ni}

    The added counts keep the biases of constant units finite.

    Args:
        data: (N, V), zeros and ones.

    Returns:
        (V,).

    Raises:
        ValueError: If `data` has no rows, is not a matrix, or has values outside of 0 to 1.
        TypeError: If `data` is not a tensor.

    References:
        Hinton, "A practical guide to training restricted Boltzmann machines", 2010, section 8.1.

    Example:
        >>> base_rate_bias(torch.tensor([[0.0, 1.0], [0.0, 0.0], [0.0, 1.0]]))
        tensor([-1.3863,  0.4055])
    """
    _check_tensor(data, "data")
    dense(data=data)
    if data.ndim != 2 or not len(data):
        raise ValueError(f"`data` should have shape (N, V) with N > 0. Found {tuple(data.shape)}.")
    layer = Bernoulli(data[0])
    layer.check(data, "data")
    return layer.base_rates(data)["bias"]


def joint_of(rbm: RBM | Joint) -> Joint:
    """Return the machine as a `Joint`; raise a TypeError if it is none."""
    if isinstance(rbm, Joint):
        return rbm
    if not isinstance(rbm, RBM):
        raise TypeError(f"`rbm` should be an RBM or a Joint. Found an object of type {type(rbm).__name__}.")
    return rbm.joint


def check_units(weights: Tensor, units: Tensor, argument: str, *, side: int = -2, rows: bool = False) -> None:
    r"""Raise unless `units` have the columns of one layer and the dtype of `weights`; values are not checked.

    Args:
        weights: (\*, V, H).
        units: (\*, V) or (\*, H).
        argument: Their name.
        side: The dimension of `weights` with the columns: -2 for visible units, -1 for hidden ones.
        rows: Whether `units` should be a matrix with at least one row.
    """
    _check_tensor(units, argument)
    if rows:
        dense(**{argument: units})
    columns = weights.shape[side]
    if units.ndim < 1 or units.shape[-1] != columns or (rows and (units.ndim != 2 or not len(units))):
        expected = f"(N, {columns}) with N > 0" if rows else f"(*, {columns})"
        raise ValueError(f"`{argument}` should have shape {expected}. Found {tuple(units.shape)}.")
    if units.dtype != weights.dtype:
        raise TypeError(f"`{argument}` should have the parameters' type {weights.dtype}. Found {units.dtype}.")


def _check_tensor(value: object, argument: str) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"`{argument}` should be a tensor. Found {type(value).__name__}.")


def _named(layer: str, values: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"{layer}_{name}": value for name, value in values.items()}
