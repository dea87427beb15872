r"""Estimates of log Z by annealed importance sampling, from below and from above.

Chains move from a machine without weights, :math:`f_0`, whose Z is known, to the machine itself, or back, through the
intermediate machines :math:`f_\beta(v) = \sum_h e^{-E_\beta(v, h)}`. Each chain accumulates an importance weight, whose
expectation is the ratio of Z at the two ends. The hidden units are summed out of the weights.

N chains, V visible units, H hidden units, K inverse temperatures. Where visible units are categorical each has Q
columns, and tensors of visible units have V Q columns. All is in nats.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from toolkit._checks import index, instance, integer
from toolkit.blocks import no_graph
from toolkit.rbm.machine.joint import Joint, checked_reference
from toolkit.rbm.machine.layers import Bernoulli, Gaussian, log_one_plus_exp
from toolkit.rbm.machine.model import RBM

__all__ = ["LogPartition", "Sandwich", "ais", "reverse_ais", "salakhutdinov_schedule", "sandwich"]

_CHUNK = 2**18  # numbers of a layer per chunk, so that three buffers stay in the cache beside the weights


@dataclass(frozen=True, eq=False)
class LogPartition:
    r"""An estimate of log Z, from below or from above.

    Forward, the mean of the N weights w is an unbiased estimate of :math:`Z / Z_0`; in reverse, of :math:`Z_0 / Z`. The
    logarithm is concave, so two numbers are bounds **in expectation**, lower bounds forward and upper bounds in
    reverse:

    - `bound`, from the mean of log w. More temperatures make it tighter, more chains do not; its standard error is that
      of a plain mean.
    - `estimate`, from the log of the mean of w. It is tighter and converges to log Z as N grows; its standard error is
      valid only if the sample contains the rare chains of large weight.

    A single run can be on the wrong side of log Z; the probability of an error of b nats is at most :math:`e^{-b}`
    (Markov).

    Attributes:
        log_weights: (N,), log w of each chain, float64.
        log_reference: The exact :math:`\log Z_0` of the machine without weights.
        direction: ``"forward"`` or ``"reverse"``.

    References:
        Neal, "Annealed importance sampling", 2001, equations 11 and 12 and section 3.
        Grosse, Ghahramani & Adams, "Sandwiching the marginal likelihood using bidirectional Monte Carlo", 2015,
        section 3.
    """

    log_weights: Tensor
    log_reference: float
    direction: Literal["forward", "reverse"]

    @property
    def estimate(self) -> float:
        r""":math:`\log Z_0 \pm \log \tfrac1N \sum_n w_n`."""
        return self.log_reference + self._sign * (float(self.log_weights.logsumexp(0)) - math.log(self.chains))

    @property
    def standard_error(self) -> float:
        r"""Standard error of `estimate`, by the delta method: :math:`\mathrm{sd}(w) / (\bar w \sqrt N)`.

        The standard error is reliable while it is small, for example below 0.3. If a few chains carry all the weight,
        it is an underestimate; `effective_sample_size` shows this case.
        """
        return math.sqrt(max(0.0, self.chains / self.effective_sample_size - 1) / (self.chains - 1))

    @property
    def bound(self) -> float:
        r""":math:`\log Z_0 \pm \tfrac1N \sum_n \log w_n`."""
        return self.log_reference + self._sign * float(self.log_weights.mean())

    @property
    def bound_standard_error(self) -> float:
        """Standard error of `bound`: that of a mean of N independent numbers."""
        return float(self.log_weights.std()) / math.sqrt(self.chains)

    @property
    def effective_sample_size(self) -> float:
        r""":math:`(\sum_n w_n)^2 / \sum_n w_n^2`, between 1 and N."""
        return float((2 * self.log_weights.logsumexp(0) - (2 * self.log_weights).logsumexp(0)).exp())

    @property
    def chains(self) -> int:
        """N."""
        return len(self.log_weights)

    @property
    def _sign(self) -> int:
        return 1 if self.direction == "forward" else -1

    def __str__(self) -> str:
        name, side = ("AIS", "lower") if self.direction == "forward" else ("reverse AIS", "upper")
        return (
            f"log Z = {self.estimate:.4f} ± {self.standard_error:.4f} ({name}, {side} bound in expectation; effective "
            f"chains {self.effective_sample_size:.1f} of {self.chains}; mean of log w {self.bound:.4f} ± "
            f"{self.bound_standard_error:.4f})"
        )


@dataclass(frozen=True, eq=False)
class Sandwich:
    """Estimates of log Z from both sides.

    The distance between the two shows whether the chains were long enough. A single estimate cannot show this, because
    a wrong estimate can have a small standard error.

    Attributes:
        lower: The estimate by AIS.
        upper: The estimate by reverse AIS.
    """

    lower: LogPartition
    upper: LogPartition

    @property
    def width(self) -> float:
        """Upper estimate minus lower estimate. For good chains it can be slightly negative, by chance."""
        return self.upper.estimate - self.lower.estimate

    @property
    def standard_error(self) -> float:
        """Standard error of `width`."""
        return math.hypot(self.lower.standard_error, self.upper.standard_error)

    @property
    def estimate(self) -> float:
        r"""The estimate of log Z from both directions: Bennett's acceptance ratio.

        Let u be the N log-weights of the forward chains, and -r the M log-weights of the reverse ones. Bisection solves

        .. math::
            \sum_{n=1}^N \sigma(u_n - s) = \sum_{m=1}^M \sigma(s - r_m), \qquad s = \log Z - \log Z_0 - \log \tfrac MN

        The solution is the maximum-likelihood estimate of log Z, given the direction of each log-weight. Among
        estimates from both sets of weights it has the least asymptotic variance. It is not a bound.

        References:
            Bennett, "Efficient estimation of free energy differences from Monte Carlo data", 1976, equations 12a, 12b.
            Shirts, Bair, Hooker & Pande, "Equilibrium free energies from nonequilibrium measurements using
            maximum-likelihood methods", 2003, equation 8.
        """
        forward, reverse = self.lower.log_weights, -self.upper.log_weights
        low = float(torch.minimum(forward.min(), reverse.min())) - 1e3
        high = float(torch.maximum(forward.max(), reverse.max())) + 1e3
        while low < (middle := (low + high) / 2) < high:
            excess = torch.sigmoid(middle - reverse).sum() - torch.sigmoid(forward - middle).sum()
            low, high = (low, middle) if float(excess) > 0 else (middle, high)
        return self.lower.log_reference + middle + math.log(self.upper.chains / self.lower.chains)

    def __str__(self) -> str:
        lower, upper = self.lower, self.upper
        return (
            f"log Z = {self.estimate:.4f}, from AIS {lower.estimate:.4f} ± {lower.standard_error:.4f} (lower bound in "
            f"expectation, effective chains {lower.effective_sample_size:.1f} of {lower.chains}) to reverse AIS "
            f"{upper.estimate:.4f} ± {upper.standard_error:.4f} (upper bound in expectation, effective chains "
            f"{upper.effective_sample_size:.1f} of {upper.chains})"
        )


@no_graph()
def ais(
    rbm: RBM,
    *,
    chains: int,
    inverse_temperatures: int | Tensor,
    reference: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> LogPartition:
    r"""Estimate log Z by annealed importance sampling, from a machine without weights to this one.

    .. math::
        \log w = \sum_{k=1}^{K-1} \log f_{\beta_k}(v_{k-1}) - \log f_{\beta_{k-1}}(v_{k-1}), \qquad
        \log Z \approx \log Z_0 + \log \tfrac1N \sum_n w_n

    with :math:`v_0 \sim f_0` and :math:`v_k` one Gibbs step at :math:`\beta_k` after :math:`v_{k-1}`. All kinds of
    units are supported, and no graph is built. With Bernoulli hidden units a temperature costs little more than its two
    matrix products (N, V, H): the weight and the draw of the hidden units share one product. Machines in half precision
    are annealed in float32.

    The estimate is a lower bound in expectation. If the chains miss a mode of the machine, the estimate is too low, and
    its standard error does not show the error; use `sandwich` to estimate from above as well. Real visible units with
    rectified hidden units have no finite Z if the weights are large; the estimate is then meaningless.

    Args:
        rbm: The machine.
        chains: N, at least 2.
        inverse_temperatures: K, evenly spaced from 0 to 1 with both ends; or the :math:`\beta` themselves, (K,), such
            as `salakhutdinov_schedule`.
        reference: (V,), the visible biases of the machine without weights. `base_rate_bias` of the data is a good
            choice. None: the biases of this machine; the result is then exact for a machine without weights.
        generator: Draws the chains, on the machine's device. None: torch's default generator.

    Raises:
        ValueError: If `chains` or `inverse_temperatures` is too small, the :math:`\beta` do not rise from 0 to 1,
            `reference` does not have the shape (V,), or `reference` or a parameter is not finite.
        TypeError: If `reference` is not a tensor.

    References:
        Neal, "Annealed importance sampling", 2001, section 2.
        Salakhutdinov & Murray, "On the quantitative analysis of deep belief networks", 2008, section 4.1.

    Example:
        >>> rbm = RBM(3, 2, generator=torch.Generator().manual_seed(0))
        >>> found = ais(rbm, chains=100, inverse_temperatures=10, generator=torch.Generator().manual_seed(1))
        >>> abs(found.estimate - rbm.log_partition().item()) < 1e-2
        True
    """
    chains = integer("chains", chains, 2)  # so that they have a standard error
    betas, joint = _inverse_temperatures(inverse_temperatures), joint_in_full_precision(rbm)
    joint, reference, _ = _centred(joint, _reference(joint, reference))
    start, log_reference = _without_weights(joint, reference)
    visible = start.visible.sample(start.weights.new_zeros(chains, start.visible.n_columns), generator)
    log_weights = _log_weights(joint, visible, betas, reference, generator)
    return LogPartition(log_weights, log_reference, "forward")


@no_graph()
def reverse_ais(
    rbm: RBM,
    visible: Tensor,
    *,
    inverse_temperatures: int | Tensor,
    reference: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> LogPartition:
    r"""Estimate log Z by reverse annealed importance sampling, from draws of this machine to a machine without weights.

    .. math::
        \log w = \sum_{k=K-1}^{1} \log f_{\beta_{k-1}}(v_k) - \log f_{\beta_k}(v_k), \qquad
        \log Z \approx \log Z_0 - \log \tfrac1N \sum_n w_n

    with :math:`v_{K-1}` drawn from the machine and :math:`v_k` one Gibbs step at :math:`\beta_k` after
    :math:`v_{k+1}`; a Gibbs step is its own reversal.

    The estimate is an upper bound in expectation **if the starts are draws from the machine**; the standard error needs
    independent draws. If the chains that made the draws have not mixed, the estimate can be too low, as by AIS. Data
    in place of draws show the distance between data and model, and give no bound.

    Args:
        rbm: The machine.
        visible: (N, V) or (N, V Q), the starts of the chains; N at least 2. Not modified.
        inverse_temperatures: As in `ais`.
        reference: As in `ais`.
        generator: As in `ais`.

    Raises:
        ValueError: As for `ais`; also if `visible` has fewer than two rows, other columns, or invalid states of the
            units.
        TypeError: As for `ais`; also if `visible` does not have the type of the parameters.

    References:
        Burda, Grosse & Salakhutdinov, "Accurate and conservative estimates of MRF log-likelihood using reverse
        annealing", 2015, section 3.
        Grosse, Ghahramani & Adams, "Sandwiching the marginal likelihood using bidirectional Monte Carlo", 2015,
        section 3.

    Example:
        >>> rbm = RBM(3, 2, generator=torch.Generator().manual_seed(0))
        >>> draws, _ = rbm.sample_exactly(100, generator=torch.Generator().manual_seed(1))
        >>> found = reverse_ais(rbm, draws, inverse_temperatures=10, generator=torch.Generator().manual_seed(2))
        >>> abs(found.estimate - rbm.log_partition().item()) < 1e-2
        True
    """
    check_states(rbm, visible)
    if len(visible) < 2:
        raise ValueError("`visible` should have at least 2 rows, so that there is a standard error. Found 1.")
    betas, joint = _inverse_temperatures(inverse_temperatures), joint_in_full_precision(rbm)
    joint, reference, origin = _centred(joint, _reference(joint, reference))
    _, log_reference = _without_weights(joint, reference)
    states = (visible.clone() if origin is None else visible - origin).to(joint.weights)
    log_weights = _log_weights(joint, states, betas[::-1], reference, generator)
    return LogPartition(log_weights, log_reference, "reverse")


def sandwich(
    rbm: RBM,
    visible: Tensor,
    *,
    chains: int | None = None,
    inverse_temperatures: int | Tensor,
    reference: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Sandwich:
    r"""Estimate log Z from both sides, by `ais` and `reverse_ais`.

    Args:
        rbm: The machine.
        visible: (N, V) or (N, V Q), draws from the machine that start the reverse chains: from long chains, or from
            `RBM.sample_exactly` if the machine is small enough for an exact log Z.
        chains: As in `ais`. None: the number of rows of `visible`.
        inverse_temperatures: As in `ais`, for both.
        reference: As in `ais`, for both. It should not depend on `visible`.
        generator: As in `ais`, first for AIS, then for reverse AIS.

    Raises:
        ValueError: As for `ais` and `reverse_ais`.
        TypeError: As for `reverse_ais`.

    References:
        Grosse, Ghahramani & Adams, "Sandwiching the marginal likelihood using bidirectional Monte Carlo", 2015.

    Example:
        >>> rbm = RBM(3, 2, generator=torch.Generator().manual_seed(0))
        >>> draws, _ = rbm.sample_exactly(100, generator=torch.Generator().manual_seed(1))
        >>> found = sandwich(rbm, draws, inverse_temperatures=10, generator=torch.Generator().manual_seed(2))
        >>> abs(found.width) < 1e-2
        True
    """
    betas, chains = inverse_temperatures, len(visible) if chains is None else chains
    lower = ais(rbm, chains=chains, inverse_temperatures=betas, reference=reference, generator=generator)
    upper = reverse_ais(rbm, visible, inverse_temperatures=betas, reference=reference, generator=generator)
    return Sandwich(lower, upper)


def salakhutdinov_schedule() -> Tensor:
    r"""Return 14,501 inverse temperatures: 0 to .5 by 1e-3, on to .9 by 1e-4, and on to 1 by 1e-5; (14501,), float64.

    References:
        Salakhutdinov & Murray, "On the quantitative analysis of deep belief networks", 2008, section 6.

    Example:
        >>> salakhutdinov_schedule()[[0, 1, 500, 501, 4500, 4501, -1]].tolist()
        [0.0, 0.001, 0.5, 0.5001, 0.9, 0.90001, 1.0]
    """
    count = torch.arange(10001, dtype=torch.float64)
    return torch.cat([count[:500] / 1000, (5000 + count[:4000]) / 10_000, (90_000 + count) / 100_000])


def _log_weights(
    joint: Joint, visible: Tensor, betas: list[float], reference: Tensor, generator: torch.Generator | None
) -> Tensor:
    """Return the log-weights of chains, (N,), float64, that go through `betas` from `visible`, which is overwritten."""
    if isinstance(joint.hidden, Bernoulli):
        return _FastChains(joint, visible, reference, generator).run(betas)
    return log_weights_by_definition(joint, visible, betas, reference, generator)


def log_weights_by_definition(
    joint: Joint, visible: Tensor, betas: list[float], reference: Tensor, generator: torch.Generator | None
) -> Tensor:
    """Return the log-weights by their definition, for all kinds of units: the specification of the fast chains."""
    log_weights = torch.zeros(len(visible), dtype=torch.float64, device=visible.device)
    before = joint.annealed(betas[0], reference)
    for k, beta in enumerate(betas[1:], start=2):
        after = joint.annealed(beta, reference)
        log_weights += before.free_energy(visible) - after.free_energy(visible)
        if k < len(betas):
            visible = after.sample_visible(after.sample_hidden(visible, generator), generator)
        before = after
    return log_weights


class _FastChains:
    r"""Chains through the temperatures with Bernoulli hidden units: two matrix products per temperature, in place.

    With :math:`a = W^\top s(v) + c`, the change of the log-weight from :math:`\beta` to :math:`\beta'` is

    .. math::
        (\beta' - \beta) (s(v) - \bar s)^\top (b - b_0)
        - \sum_j \log(1 + \sigma(\beta' a_j) (e^{(\beta - \beta') a_j} - 1)),

    where the hidden units are drawn next with probabilities :math:`\sigma(\beta' a)`, and :math:`\bar s` is 0, or
    :math:`s((b_\beta + b_{\beta'}) / 2)` if the visible units are Gaussian. The small difference of two large sums is
    never formed, so float32 suffices for small steps of the temperature.
    """

    def __init__(self, joint: Joint, visible: Tensor, reference: Tensor, generator: torch.Generator | None) -> None:
        self.joint, self.reference, self.generator = joint, reference, generator
        scale = joint.visible.statistic(torch.ones_like(joint.visible.bias))
        self.weights = scale[:, None] * joint.weights
        # The slope of the log-weight a(v) of the visible units with the temperature; linear in v.
        self.slope = scale * (joint.visible.bias - reference)
        self.slopes = bool(self.slope.any())
        self.steepest = self._steepest()
        self.visible = visible
        self.hidden = visible.new_empty(len(visible), joint.hidden.n_columns)
        self.size = max(1, _CHUNK // max(joint.weights.shape)) if visible.device.type == "cpu" else len(visible)
        rows = min(self.size, len(visible))
        self.inputs = visible.new_empty(rows, joint.hidden.n_columns)
        self.hidden_mean = visible.new_empty(rows, joint.hidden.n_columns)
        self.visible_mean = visible.new_empty(rows, joint.visible.n_columns)
        self.log_weights = torch.zeros(len(visible), dtype=torch.float64, device=visible.device)
        self.bits: Tensor | None = None
        if visible.dtype == torch.float32 and visible.device.type == "cpu":
            self.bits = torch.empty((rows * max(joint.weights.shape) + 1) // 2, dtype=torch.int64, device="cpu")
            self.least = torch.tensor(-(2.0**31), device="cpu")

    def run(self, betas: list[float]) -> Tensor:
        for k, (before, after) in enumerate(itertools.pairwise(betas), start=2):
            for rows in self._chunks():
                self._weigh_and_draw_hidden(rows, before, after)
            if k < len(betas):
                for rows in self._chunks():
                    self._draw_visible(rows, after)
        return self.log_weights

    def _weigh_and_draw_hidden(self, rows: slice, before: float, after: float) -> None:
        visible, hidden = self.visible[rows], self.hidden[rows]
        inputs, mean = self.inputs[: len(visible)], self.hidden_mean[: len(visible)]
        torch.addmm(self.joint.hidden.bias, visible, self.weights, out=inputs)
        torch.mul(inputs, after, out=mean).sigmoid_()
        if abs(after - before) * self.steepest <= 1:  # else 1 + p (e^x - 1) is a difference of nearly equal numbers
            # The next hidden units' memory serves as scratch.
            torch.mul(inputs, before - after, out=hidden).expm1_().mul_(mean).log1p_()
            change = -hidden.sum(-1)
        else:
            change = (log_one_plus_exp(inputs * after) - log_one_plus_exp(inputs * before)).sum(-1)
        self.log_weights[rows] += change
        if self.slopes:
            self.log_weights[rows] += (after - before) * self._slope_of(visible, (before + after) / 2)
        self._draw(mean, out=hidden)

    def _draw_visible(self, rows: slice, beta: float) -> None:
        visible, hidden, weights = self.visible[rows], self.hidden[rows], self.joint.weights
        mean = self.visible_mean[: len(visible)]
        layer = self.joint.visible.with_bias(self._bias(beta))
        if isinstance(layer, Bernoulli):
            torch.addmm(layer.bias, hidden, weights.mT, alpha=beta, out=mean).sigmoid_()
            self._draw(mean, out=visible)
        else:
            visible.copy_(layer.sample(torch.mm(hidden, weights.mT, out=mean).mul_(beta), self.generator))

    def _draw(self, mean: Tensor, out: Tensor) -> None:
        """Write draws of zeros and ones to `out`; `mean` is overwritten."""
        if self.bits is None:
            uniform = torch.empty(out.shape, dtype=torch.float32, device=out.device).uniform_(generator=self.generator)
            torch.lt(uniform, mean, out=out)
            return
        # Uniform numbers are most of what comes on top of the products. Halves of integers of 64 bits cost less than
        # floats, and are not coarser: between -2^31 and 2^31, they are compared with p 2^32 - 2^31.
        words = self.bits[: (mean.numel() + 1) // 2].random_(-(2**63), None, generator=self.generator)
        threshold = torch.add(self.least, mean, alpha=2.0**32, out=mean)
        out.copy_(words.view(torch.int32)[: mean.numel()].view_as(mean)).lt_(threshold)

    def _chunks(self) -> Iterator[slice]:
        # One layer at a time for all chunks, so that the draws do not depend on their size.
        for first in range(0, len(self.visible), self.size):
            yield slice(first, first + self.size)

    def _bias(self, beta: float) -> Tensor:
        return self.reference + beta * (self.joint.visible.bias - self.reference)

    def _slope_of(self, visible: Tensor, beta: float) -> Tensor:
        """Return the slope of a(v) with the temperature, (N,); for Gaussian units, exact at the middle of a step."""
        if isinstance(self.joint.visible, Gaussian):
            # From the bias of the moment on: the squares of v and of the bias are large numbers that nearly cancel.
            visible = torch.sub(visible, self._bias(beta), out=self.visible_mean[: len(visible)])
        return visible @ self.slope

    def _steepest(self) -> float:
        """Return the largest possible magnitude of an input of a hidden unit; no visible unit exceeds 1."""
        if isinstance(self.joint.visible, Gaussian):
            return math.inf
        ends = [part.sum(0) + self.joint.hidden.bias for part in (self.weights.clamp(min=0), self.weights.clamp(max=0))]
        return float(torch.stack(ends).abs().max())


def _without_weights(joint: Joint, reference: Tensor) -> tuple[Joint, float]:
    """Return the machine where annealing starts, and its log Z."""
    start = joint.annealed(0.0, reference)
    exact = start.to_type(torch.float64)
    layers = (exact.visible, exact.hidden)
    return start, sum(layer.log_normaliser(torch.zeros_like(layer.bias)).item() for layer in layers)


def _centred(joint: Joint, reference: Tensor) -> tuple[Joint, Tensor, Tensor | None]:
    r"""Return the machine with Gaussian visible units as distances from the reference; that is then 0.

    With :math:`v = b_0 + u` it has the visible biases :math:`b - b_0`, the hidden ones :math:`c + W^\top s(b_0)`, and
    the same machines between. Far from 0 the input of the hidden units and the log-weights would otherwise be small
    differences of large numbers.

    Returns:
        The machine, its reference, and the shift to subtract from visible units, float64; None if they are not
        Gaussian.
    """
    if not isinstance(joint.visible, Gaussian):
        return joint, reference.to(joint.weights), None
    exact, origin = joint.to_type(torch.float64), reference.double()
    by = {"visible_bias": -origin, "hidden_bias": exact.to_hidden(origin)}
    return exact.shifted(by).to_type(joint.weights.dtype), torch.zeros_like(joint.visible.bias), origin


def check_states(rbm: RBM, visible: Tensor) -> None:
    """Raise unless the rows of `visible` are states of the units; means are refused."""
    instance("rbm", rbm, RBM)
    rbm.check_rows(visible, "visible")
    rbm.joint.visible.check(visible, "visible")
    between = (visible != 0) & (visible != 1)
    if not isinstance(rbm.joint.visible, Gaussian) and bool(between.any()):
        raise ValueError(f"`visible` should be zeros and ones. Found {float(visible[between][0])}.")


def joint_in_full_precision(rbm: RBM) -> Joint:
    """Return the machine's joint distribution in float32 at least, or raise if it is not finite."""
    instance("rbm", rbm, RBM)
    for name, parameter in rbm.named_parameters():
        if not bool(parameter.isfinite().all()):
            wrong = parameter[~parameter.isfinite()][0]
            raise ValueError(f"`rbm` should have finite parameters. Found {float(wrong)} in `{name}`.")
    return rbm.joint.in_full_precision()


def _reference(joint: Joint, reference: Tensor | None) -> Tensor:
    return joint.visible.bias if reference is None else checked_reference(reference, joint)


def _inverse_temperatures(inverse_temperatures: int | Tensor) -> list[float]:
    name = "`inverse_temperatures`"
    if index(inverse_temperatures) is not None:
        count = integer("inverse_temperatures", inverse_temperatures, 2)  # 0 and 1
        return [k / (count - 1) for k in range(count)]
    if not isinstance(inverse_temperatures, Tensor) or inverse_temperatures.ndim != 1:
        raise ValueError(f"{name} should be an integer or a tensor (K,). Found {inverse_temperatures!r}.")
    betas: list[float] = inverse_temperatures.tolist()
    rising = all(first < second for first, second in itertools.pairwise(betas))
    if len(betas) < 2 or betas[0] != 0 or betas[-1] != 1 or not rising:
        raise ValueError(f"{name} should rise from 0 to 1. Found {betas if len(betas) < 8 else inverse_temperatures}.")
    return betas
