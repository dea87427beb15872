r"""The units of one layer: their weights, and their moments and draws given the other layer.

A machine couples two layers by :math:`s(v)^\top W h`. Given one layer, the units of the other are independent, with
weights :math:`e^{a(u) + x \cdot s(u)}`, where the *input* x comes from the coupling. All methods are functions of x and
of the machine's parameters; a layer holds no state of its own.

U units, C columns that represent them (more than U only for categorical units), Q states of a categorical unit.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor
from torch.nn.functional import one_hot, softplus

from toolkit._checks import integer, number
from toolkit.blocks import carries_gradient, no_graph
from toolkit.rbm.machine.uniform import fill_uniform

__all__ = ["Bernoulli", "Categorical", "Gaussian", "Layer", "Rectified", "log_one_plus_exp"]

_LIKELY = 20  # counts of a rectified unit that are not impossible to rounding
_DECAY = math.exp(-1)
_ROWS = 2**22  # numbers that are copied at a time
_LINEAR_FROM = 40.0  # here softplus(x) = x to rounding also in float64; torch's default of 20 is off by 2e-9


def log_one_plus_exp(x: Tensor) -> Tensor:
    """Return ``log(1 + e^x)`` to rounding, everywhere."""
    return softplus(x, threshold=_LINEAR_FROM)


@dataclass(frozen=True)
class Layer:
    r"""One layer of a machine, as functions of its input.

    Attributes:
        bias: (\*, C).
    """

    bias: Tensor

    # Endings of the names of its parameters, beside ``bias``.
    more_parameters: ClassVar[tuple[str, ...]] = ()
    # Whether a draw is a differentiable function of the input, rather than one of finitely or countably many states.
    draws_carry_gradients: ClassVar[bool] = False

    @property
    def n_columns(self) -> int:
        """C."""
        return self.bias.shape[-1]

    @property
    def n_states(self) -> int | None:
        """Number of states of the whole layer; None if they cannot be counted."""
        return None

    @property
    def reference(self) -> Tensor:
        r"""The bias at which an annealed layer starts, (\*, C)."""
        return torch.zeros_like(self.bias)

    def with_bias(self, bias: Tensor) -> Self:
        """Return the layer with another bias."""
        return dataclasses.replace(self, bias=bias)

    def statistic(self, units: Tensor) -> Tensor:
        r"""Return the statistic s(u) that the coupling weights multiply, (\*, C)."""
        return units

    def log_weight(self, units: Tensor) -> Tensor:
        r"""Return a(u), summed over the units, (\*)."""
        return _dot(units, self.bias)

    def log_normaliser(self, x: Tensor) -> Tensor:
        r"""Return :math:`\log \sum_u e^{a(u) + x \cdot s(u)}`, (\*): an integral if the units are continuous."""
        raise NotImplementedError

    def mean(self, x: Tensor) -> Tensor:
        r"""Return :math:`E[u \mid x]`, (\*, C)."""
        raise NotImplementedError

    def sample(self, x: Tensor, generator: torch.Generator | None) -> Tensor:
        r"""Draw the units given their input, (\*, C).

        A draw from finitely or countably many states stays in the graph with derivative zero, as `torch.bernoulli`
        does.
        """
        raise NotImplementedError

    def relaxed_sample(self, x: Tensor, temperature: float, generator: torch.Generator | None) -> Tensor:
        r"""Draw relaxed units, a differentiable function of their input, for a chain of concrete units, (\*, C).

        Args:
            x: (\*, C), the input.
            temperature: Near 0 the units are close to a draw, and their derivatives are large.
            generator: Draws the noise.

        Raises:
            ValueError: If units of this kind have no relaxed form.
        """
        raise ValueError(f"`chain` should not be 'concrete' for {type(self).__name__.lower()} units. Found 'concrete'.")

    def check(self, units: Tensor, argument: str) -> None:
        """Raise ValueError unless all units are in a valid state.

        The check reads all values, so it is made where data are read, not in the machine.
        """
        if not bool(units.isfinite().all()):
            raise ValueError(f"`{argument}` should be finite. Found {_first(units, ~units.isfinite())}.")

    def parameter_gradients(self, units: Tensor, x: Tensor, share: Tensor) -> dict[str, Tensor]:
        r"""Return :math:`\sum_n share_n \, \partial (a(u_n) + x_n \cdot s(u_n)) / \partial \theta`, x held constant.

        Args:
            units: (N, C).
            x: (N, C), the input; used only by layers whose statistic has parameters.
            share: (N,).

        Returns:
            Endings of the parameters' names, ``bias`` and `more_parameters` -> (C,) or (U,).
        """
        return {"bias": share @ units}

    def normaliser_gradients(self, x: Tensor, share: Tensor) -> dict[str, Tensor]:
        r"""Return :math:`\sum_n share_n \, \partial \log \sum_u e^{a(u) + x_n \cdot s(u)} / \partial \theta`.

        This is the expectation of `parameter_gradients` over the units.

        Args:
            x: (N, C), held constant.
            share: (N,).

        Returns:
            As `parameter_gradients`.
        """
        return {"bias": share @ self.mean(x)}

    def base_rates(self, units: Tensor) -> dict[str, Tensor]:
        r"""Return the parameters for which units without input have the frequencies of `units`.

        Args:
            units: (N, C).

        Returns:
            As `parameter_gradients`.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Bernoulli(Layer):
    r"""Units that are 0 or 1: :math:`a(u) = b u`, :math:`s(u) = u`; values in between are probabilities."""

    @property
    def n_states(self) -> int:
        """2^U."""
        return 1 << self.n_columns

    def log_normaliser(self, x: Tensor) -> Tensor:
        r"""Return :math:`\sum_i \log(1 + e^{x_i + b_i})`, (\*)."""
        return log_one_plus_exp(x + self.bias).sum(-1)

    def mean(self, x: Tensor) -> Tensor:
        r"""Return the probabilities :math:`\sigma(x + b)`, (\*, C)."""
        return torch.sigmoid(x + self.bias)

    def sample(self, x: Tensor, generator: torch.Generator | None) -> Tensor:
        r"""Draw zeros and ones, each 1 with probability :math:`\sigma(x + b)`, (\*, C); the derivative is zero."""
        mean = x + self.bias
        return draw_bernoulli(mean.sigmoid() if carries_gradient(mean) else mean.sigmoid_(), generator)

    def relaxed_sample(self, x: Tensor, temperature: float, generator: torch.Generator | None) -> Tensor:
        r"""Draw binary concrete units, :math:`\sigma((x + b + \log u - \log(1 - u)) / \tau)` with uniform u, (\*, C).

        References:
            Maddison, Mnih & Teh, "The concrete distribution: a continuous relaxation of discrete random variables",
            2017, section 3.3, equation 18 (appendix B).
        """
        temperature = number("temperature", temperature, above=0)
        uniform = _uniform(x, x.shape, generator)
        return torch.sigmoid((x + self.bias + uniform.logit_().to(x.dtype)) / temperature)

    def check(self, units: Tensor, argument: str) -> None:
        """Raise ValueError unless all units are between 0 and 1."""
        if units.numel():
            least, most = units.aminmax()
            if bool((least >= 0) & (most <= 1)):  # neither holds for NaN
                return
        super().check(units, argument)
        outside = (units < 0) | (units > 1)
        if bool(outside.any()):
            raise ValueError(f"`{argument}` should be between 0 and 1. Found {_first(units, outside)}.")

    def base_rates(self, units: Tensor) -> dict[str, Tensor]:
        r"""Return :math:`b_i = \log (n_i + 1) / (N - n_i + 1)`, where n of N rows are 1; never infinite."""
        count = _count(units)
        return {"bias": ((count + 1) / (len(units) - count + 1)).log().to(_floating(units))}


@dataclass(frozen=True)
class Gaussian(Layer):
    r"""Real units, normal given the other layer, with mean :math:`b + x` and a variance for each unit.

    .. math::
        a(u) = -\frac{(u - b)^2}{2 \sigma^2}, \qquad s(u) = \frac{u}{\sigma^2}, \qquad \sigma^2 = e^z

    Attributes:
        bias: The means b where the input is 0, (\*, C).
        log_variance: z, (\*, C).

    References:
        Cho, Ilin & Raiko, "Improved learning of Gaussian-Bernoulli restricted Boltzmann machines", 2011, equations 3
        to 7.
    """

    log_variance: Tensor

    more_parameters: ClassVar[tuple[str, ...]] = ("log_variance",)
    draws_carry_gradients: ClassVar[bool] = True

    @property
    def reference(self) -> Tensor:
        """The bias itself: annealing changes only the coupling of a Gaussian layer."""
        return self.bias

    @property
    def variance(self) -> Tensor:
        r""":math:`\sigma^2`, (\*, C)."""
        return self.log_variance.exp()

    def statistic(self, units: Tensor) -> Tensor:
        r"""Return :math:`u / \sigma^2`, (\*, C)."""
        return units * (-self.log_variance).exp()

    def log_weight(self, units: Tensor) -> Tensor:
        r"""Return :math:`-\sum_i (u_i - b_i)^2 / (2 \sigma_i^2)`, (\*)."""
        return -((units - self.bias).square() * (-self.log_variance).exp()).sum(-1) / 2

    def log_normaliser(self, x: Tensor) -> Tensor:
        r"""Return :math:`\sum_i x_i (b_i + x_i / 2) / \sigma_i^2 + \log(2 \pi \sigma_i^2) / 2`, (\*)."""
        exponent = x * (self.bias + x / 2) * (-self.log_variance).exp()
        return (exponent + (self.log_variance + math.log(2 * math.pi)) / 2).sum(-1)

    def mean(self, x: Tensor) -> Tensor:
        r"""Return :math:`b + x`, (\*, C)."""
        return self.bias + x

    def sample(self, x: Tensor, generator: torch.Generator | None) -> Tensor:
        """Draw the units given their input, as mean plus noise: a differentiable function of the input."""
        mean = self.mean(x)
        dtype = torch.promote_types(mean.dtype, torch.float32)
        # In the order of the indices, however `mean` lies in memory.
        noise = torch.empty(mean.shape, dtype=dtype, device=mean.device)
        noise = noise.normal_(generator=generator).to(mean.dtype)
        return mean + noise * (self.log_variance / 2).exp()

    def relaxed_sample(self, x: Tensor, temperature: float, generator: torch.Generator | None) -> Tensor:
        """Draw the units given their input, as `sample`, which is differentiable without a temperature."""
        number("temperature", temperature, above=0)
        return self.sample(x, generator)

    def parameter_gradients(self, units: Tensor, x: Tensor, share: Tensor) -> dict[str, Tensor]:
        r"""Return the derivatives of `log_weight` and of the coupling, whose statistic depends on the variance.

        .. math::
            \partial_b = \frac{u - b}{\sigma^2}, \qquad
            \partial_z = \frac{(u - b)^2 / 2 - x u}{\sigma^2}
        """
        precision = (-self.log_variance).exp()
        distance = units - self.bias
        return {
            "bias": precision * (share @ distance),
            "log_variance": precision * (share @ (distance.square() / 2 - x * units)),
        }

    def normaliser_gradients(self, x: Tensor, share: Tensor) -> dict[str, Tensor]:
        r"""Return :math:`\partial_b = x / \sigma^2` and :math:`\partial_z = 1/2 - x (b + x / 2) / \sigma^2`, summed."""
        precision = (-self.log_variance).exp()
        slope = share.sum() / 2 - precision * (share @ (x * (self.bias + x / 2)))
        return {"bias": precision * (share @ x), "log_variance": slope}

    def base_rates(self, units: Tensor) -> dict[str, Tensor]:
        """Return the mean and the logarithm of the variance, (C,) each; 0 for a unit that never changes."""
        mean = _count(units) / len(units)
        parts = units.split(max(1, _ROWS // self.n_columns))  # avoids a float64 copy of all rows
        variance = sum((_count((part - mean).square_()) for part in parts), torch.zeros_like(mean)) / len(units)
        # A unit that never changes keeps a positive variance, so that all values stay finite.
        log_variance = torch.where((units != units[0]).any(0) & (variance > 0), variance, 1.0).log()
        return {"bias": mean.to(units.dtype), "log_variance": log_variance.to(units.dtype)}


@dataclass(frozen=True)
class Categorical(Layer):
    r"""Potts units: each is in one of Q states, as Q columns of which one is 1. :math:`a(u) = b \cdot u`.

    Attributes:
        bias: b, (\*, C) with C = U Q.
        categories: Number of states of a unit, Q.
    """

    categories: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "categories", integer("categories", self.categories, 2))

    @property
    def n_states(self) -> int:
        """Q^U."""
        return int(self.categories ** (self.n_columns // self.categories))

    def log_normaliser(self, x: Tensor) -> Tensor:
        r"""Return :math:`\sum_i \log \sum_q e^{x_{iq} + b_{iq}}`, (\*)."""
        return self._grouped(x + self.bias).logsumexp(-1).sum(-1)

    def mean(self, x: Tensor) -> Tensor:
        r"""Return the probabilities :math:`e^{x_{iq} + b_{iq}} / \sum_r e^{x_{ir} + b_{ir}}`, (\*, C)."""
        return self._grouped(x + self.bias).softmax(-1).flatten(-2)

    def sample(self, x: Tensor, generator: torch.Generator | None) -> Tensor:
        r"""Draw a state of each unit, as Q columns of which one is 1, (\*, C); the derivative is zero."""
        mean = self._grouped(self.mean(x))
        # As for the uniform numbers: half precision has too few values between 0 and 1.
        below = mean.to(torch.promote_types(mean.dtype, torch.float32)).cumsum(-1)
        uniform = _uniform(below, below[..., :1].shape, generator)
        # Scaled by the running sum's last entry, so that its rounding leaves no gap.
        state = (below <= uniform * below[..., -1:]).sum(-1)
        draw = one_hot(state.clamp_(max=self.categories - 1), self.categories).to(mean.dtype)
        return with_derivative_zero(draw, mean).flatten(-2)

    def relaxed_sample(self, x: Tensor, temperature: float, generator: torch.Generator | None) -> Tensor:
        r"""Draw concrete units (Gumbel-softmax), :math:`e^{(x_q + b_q + g_q) / \tau}` normalised to sum 1, (\*, C).

        :math:`g_q = -\log e_q` with exponential :math:`e_q`.

        References:
            Maddison, Mnih & Teh, "The concrete distribution: a continuous relaxation of discrete random variables",
            2017, equation 10.
            Jang, Gu & Poole, "Categorical reparameterization with Gumbel-softmax", 2017, equation 2.
        """
        temperature = number("temperature", temperature, above=0)
        dtype = torch.promote_types(x.dtype, torch.float32)
        exponential = torch.empty(x.shape, dtype=dtype, device=x.device).exponential_(generator=generator)
        logits = (x + self.bias - exponential.log_().to(x.dtype)) / temperature
        return self._grouped(logits).softmax(-1).flatten(-2)

    def check(self, units: Tensor, argument: str) -> None:
        """Raise ValueError unless the columns of each unit are not negative and sum to 1."""
        super().check(units, argument)
        groups = self._grouped(units)
        wrong = (groups < 0).any(-1) | ((groups.sum(-1) - 1).abs() > 1e-3)
        if bool(wrong.any()):
            found = groups[wrong][0].tolist()
            raise ValueError(f"`{argument}` should have one 1 in each group of {self.categories}. Found {found}.")

    def base_rates(self, units: Tensor) -> dict[str, Tensor]:
        r"""Return :math:`b_{iq} = \log (n_{iq} + 1) / (N + Q)`, where n of N rows are in state q."""
        rate = (_count(units) + 1) / (len(units) + self.categories)
        return {"bias": rate.log().to(_floating(units))}

    def _grouped(self, columns: Tensor) -> Tensor:
        return columns.reshape(*columns.shape[:-1], columns.shape[-1] // self.categories, self.categories)


@dataclass(frozen=True)
class Rectified(Layer):
    r"""Units that count: each is infinitely many copies of a Bernoulli unit with biases b - 1/2, b - 3/2, ...

    The value of the unit is the number of copies that are on. Its mean is close to :math:`\log(1 + e^x)`, the smooth
    form of max(0, x). The weight of the value n, summed over all choices of n copies, is by Euler's identity with
    :math:`q = e^{-1}`

    .. math::
        a(n) = b n - \frac{n^2}{2} - \sum_{m=1}^n \log(1 - q^m), \qquad s(n) = n

    so that the machine has an energy. The noisy rectified unit, max(0, x + noise of variance :math:`\sigma(x)`),
    approximates a draw (see `noisy_sample`).

    References:
        Nair & Hinton, "Rectified linear units improve restricted Boltzmann machines", 2010, sections 2 and 3.
    """

    def log_weight(self, units: Tensor) -> Tensor:
        r"""Return :math:`\sum_i a(n_i)`, (\*)."""
        return _dot(units, self.bias) - (units.square() / 2 + _log_ways(units)).sum(-1)

    def log_normaliser(self, x: Tensor) -> Tensor:
        r"""Return :math:`\sum_i \sum_{m=1}^\infty \log(1 + e^{x_i + b_i - m + 1/2})`, (\*), from the sum over n."""
        x, dtype = self._biased(x)
        least, _, log_weight = self._likely_counts(x)
        return (least * (x - least / 2) + log_weight.logsumexp(0)).sum(-1).to(dtype)

    def mean(self, x: Tensor) -> Tensor:
        r"""Return :math:`\sum_{m=1}^\infty \sigma(x + b - m + 1/2)`, (\*, C), close to :math:`\log(1 + e^{x + b})`."""
        x, dtype = self._biased(x)
        least, above, log_weight = self._likely_counts(x)
        return (least + (log_weight.softmax(0) * above).sum(0)).to(dtype)

    def sample(self, x: Tensor, generator: torch.Generator | None) -> Tensor:
        r"""Draw counts, (\*, C), from their exact distribution; the derivative is zero."""
        x, dtype = self._biased(x)
        with no_graph():
            count, below = self._sums_of_weights(x)
            bound = _uniform(x, x.shape, generator).mul_(below[-1])
            for sums in below:
                count += sums <= bound
        return with_derivative_zero(count, x).to(dtype)

    def noisy_sample(self, x: Tensor, generator: torch.Generator | None) -> Tensor:
        r"""Draw noisy rectified units, :math:`\max(0, y + \sqrt{\sigma(y)} \, \epsilon)` at y = x + b, (\*, C).

        Noisy units are real numbers, not counts; their conditional mean and variance only approximate those of counts.
        A chain of noisy units is therefore not a Markov chain of the machine.

        References:
            Nair & Hinton, "Rectified linear units improve restricted Boltzmann machines", 2010, section 2, which also
            computes the variance from the mean.
        """
        x, dtype = self._biased(x)
        noise = torch.empty(x.shape, dtype=x.dtype, device=x.device).normal_(generator=generator)
        return torch.relu(x + noise * torch.sigmoid(x).sqrt()).to(dtype)

    def check(self, units: Tensor, argument: str) -> None:
        """Raise ValueError unless all units are counts."""
        super().check(units, argument)
        wrong = (units < 0) | (units != units.round())
        if bool(wrong.any()):
            raise ValueError(f"`{argument}` should be counts 0, 1, 2, ... Found {_first(units, wrong)}.")

    def _biased(self, x: Tensor) -> tuple[Tensor, torch.dtype]:
        """Return the sum of input and bias, and the dtype of both: half precision cannot count, so it is in float32."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        return x.to(dtype) + self.bias, torch.promote_types(x.dtype, self.bias.dtype)

    @staticmethod
    def _likely_counts(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        r"""Return the counts whose probability is not rounding: the least, the offsets from it, and their log-weights.

        Around x the weight of n is close to :math:`e^{-(n - x)^2 / 2}`.

        Returns:
            (\*, U); (20,) and as many dimensions as needed; and (20, \*, U), relative to :math:`n (x - n / 2)` at the
            least.
        """
        least = (x.floor() - 9).clamp(min=0)
        above = torch.arange(_LIKELY, dtype=x.dtype, device=x.device).view(_LIKELY, *[1] * x.ndim)
        ways = _table_of_log_ways().to(x).gather(1, _place(least).flatten().expand(_LIKELY, -1)).view(_LIKELY, *x.shape)
        return least, above, above * ((x - least) - above / 2) - ways

    @staticmethod
    def _sums_of_weights(x: Tensor) -> tuple[Tensor, Tensor]:
        r"""Return the least likely count, and running sums of the weights: one exponential per unit, not 20.

        The weight of n + 1 is that of n times :math:`e^{x - n - 1/2} / (1 - e^{-n - 1})`.

        Returns:
            (\*, U) and (20, \*, U), relative to the weight of the least.
        """
        least = (x.floor() - 9).clamp(min=0)
        sums = x.new_empty(_LIKELY, *x.shape)
        sums[0] = 1
        weight, ratio, rare = sums[0].clone(), (x - least - 0.5).exp_(), (-1 - least).exp_()
        for i in range(1, _LIKELY):
            weight.mul_(ratio).div_(1 - rare)
            torch.add(sums[i - 1], weight, out=sums[i])
            ratio.mul_(_DECAY)
            rare.mul_(_DECAY)
        return least, sums


@functools.cache
def _table_of_log_ways() -> Tensor:
    r"""Return :math:`\sum_{m=1}^n \log(1 - e^{-m})` for n = k + l, (20, 48); it is constant after some 40 terms."""
    m = torch.arange(1, 48 + _LIKELY, dtype=torch.float64, device="cpu")
    return torch.cat([m.new_zeros(1), torch.log1p(-(-m).exp()).cumsum(0)]).unfold(0, 48, 1)[:_LIKELY].contiguous()


def _place(counts: Tensor) -> Tensor:
    """Return the columns of the table for counts. NaN has a column too, so that a NaN count gives NaN."""
    return counts.nan_to_num(0.0).clamp(0, 47).long()


def _log_ways(counts: Tensor) -> Tensor:
    return _table_of_log_ways()[0].to(counts)[_place(counts)]


def draw_bernoulli(mean: Tensor, generator: torch.Generator | None) -> Tensor:
    """Return a draw: 1 with probability `mean`, else 0. Its derivative is zero, as for `torch.bernoulli`.

    The uniform numbers are multiples of 2^-24 in every dtype, so that a generator draws the same for all dtypes.
    """
    uniform = fill_uniform(torch.empty(mean.shape, dtype=torch.float32, device=mean.device), generator)
    if not carries_gradient(mean):
        return (uniform < mean).to(mean.dtype)
    # In the graph, with a derivative of zero: the ceiling of a number in (-1, 1] is 1 if it is positive. -0 + 0 = 0.
    return (torch.ceil(mean - uniform) + 0.0).to(mean.dtype)


def _uniform(like: Tensor, shape: torch.Size, generator: torch.Generator | None) -> Tensor:
    """Return uniform numbers, at least in float32: half precision has too few values between 0 and 1."""
    dtype = torch.promote_types(like.dtype, torch.float32)
    return torch.empty(shape, dtype=dtype, device=like.device).uniform_(generator=generator)


def with_derivative_zero(draw: Tensor, mean: Tensor) -> Tensor:
    """Return a draw in the graph of its source, with derivative zero."""
    return draw + torch.ceil(mean - mean) if carries_gradient(mean) else draw


def _dot(units: Tensor, bias: Tensor) -> Tensor:
    return units @ bias if bias.ndim == 1 else (units * bias).sum(-1)


def _count(units: Tensor) -> Tensor:
    """Return the sum over the rows, in float64: half precision stops counting at 256 or 2048."""
    return units.sum(0, dtype=torch.float64)


def _floating(units: Tensor) -> torch.dtype:
    return units.dtype if units.is_floating_point() else torch.get_default_dtype()


def _first(units: Tensor, where: Tensor) -> float:
    return float(units[where][0])
