"""Evaluation of machines whose partition function cannot be summed: estimates, bounds, and proxies.

N samples, V visible units, H hidden units, Q states of a categorical unit. Where visible units are categorical each has
Q columns, and tensors of visible units have V Q columns. All values except reconstruction errors are in nats.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from toolkit._checks import instance
from toolkit.blocks import no_graph
from toolkit.rbm.annealing import Sandwich, check_states, joint_in_full_precision
from toolkit.rbm.machine.enumeration import LARGEST_LOG
from toolkit.rbm.machine.joint import Joint
from toolkit.rbm.machine.layers import Bernoulli, Categorical
from toolkit.rbm.machine.model import RBM

__all__ = ["EstimatedLogLikelihood", "estimated_log_likelihood", "pseudo_log_likelihood", "reconstruction_error"]


class EstimatedLogLikelihood(NamedTuple):
    """The log-likelihood from a sandwich of log Z, per sample in nats.

    Errors of log Z shift all samples equally, so a mean over samples has the standard errors of the sandwich.

    Attributes:
        lower: (N,), from the estimate of log Z from above: a lower bound in expectation.
        estimate: (N,), from the estimate of log Z that uses both sides.
        upper: (N,), from the estimate of log Z from below: an upper bound in expectation. AIS alone reports this
            number; it is too high if its chains miss a mode.
    """

    lower: Tensor
    estimate: Tensor
    upper: Tensor


@no_graph()
def estimated_log_likelihood(rbm: RBM, visible: Tensor, log_partition: Sandwich) -> EstimatedLogLikelihood:
    r"""Return a lower bound, an estimate and an upper bound of :math:`\log p(v) = -F(v) - \log Z`, per sample in nats.

    No graph is built. Where log Z can be summed, `RBM.log_likelihood` is exact.

    Args:
        rbm: The machine.
        visible: (N, V) or (N, V Q).
        log_partition: The result of `sandwich` for the same machine.

    Returns:
        Three tensors (N,).

    Raises:
        ValueError: If `visible` has no rows, other columns or invalid states of the units, or a parameter is not
            finite.
        TypeError: If `visible` does not have the type of the parameters, or `log_partition` is not a `Sandwich`.

    References:
        Salakhutdinov & Murray, "On the quantitative analysis of deep belief networks", 2008, section 4.

    Example:
        >>> from toolkit.rbm.annealing import sandwich
        >>> rbm, generator = RBM(3, 2, generator=torch.Generator().manual_seed(0)), torch.Generator().manual_seed(1)
        >>> draws, _ = rbm.sample_exactly(100, generator=generator)
        >>> log_partition = sandwich(rbm, draws, inverse_temperatures=10, generator=generator)
        >>> found = estimated_log_likelihood(rbm, draws, log_partition)
        >>> bool((found.estimate - rbm.log_likelihood(draws)).abs().max() < 0.01)
        True
    """
    _check_sandwich(log_partition)
    rbm.check_rows(visible, "visible")
    rbm.joint.visible.check(visible, "visible")
    joint = joint_in_full_precision(rbm)
    log_weight = -joint.free_energy(visible.to(joint.weights))
    ends = (log_partition.upper.estimate, log_partition.estimate, log_partition.lower.estimate)
    return EstimatedLogLikelihood(*(log_weight - end for end in ends))


@no_graph()
def pseudo_log_likelihood(rbm: RBM, visible: Tensor) -> Tensor:
    r"""Return :math:`\sum_i \log p(v_i \mid v_{-i})`, per sample in nats, exactly.

    Each term is the log-probability of one unit given all others, with the hidden units summed out. The result is
    deterministic. log Z cancels,

    .. math::
        p(v_i \mid v_{-i}) = \frac{e^{-F(v)}}{\sum_q e^{-F(v_{-i}, q)}}

    over the states q of the unit, with N V H terms in place of the N H of a free energy. Machines are ranked
    differently than by likelihood: each unit is predicted from the other units, so modes far from all data are not
    penalised. No graph is built.

    Args:
        rbm: The machine, with Bernoulli or categorical visible units.
        visible: (N, V) or (N, V Q), zeros and ones.

    Returns:
        (N,).

    Raises:
        ValueError: If `visible` has no rows, other columns or other numbers than zeros and ones, or a parameter is not
            finite. If the visible units are Gaussian: their conditional density has no closed form once the hidden
            units are summed out.
        TypeError: If `visible` does not have the type of the parameters.

    References:
        Besag, "Statistical analysis of non-lattice data", 1975.
        Marlin, Swersky, Chen & de Freitas, "Inductive principles for restricted Boltzmann machine learning", 2010,
        section 3.

    Example:
        >>> pseudo_log_likelihood(RBM(3, 2, generator=torch.Generator().manual_seed(0)), torch.zeros(1, 3))
        tensor([-2.0724])
    """
    instance("rbm", rbm, RBM)
    if not isinstance(rbm.joint.visible, Bernoulli | Categorical):
        raise ValueError(
            "`rbm` should have Bernoulli or categorical visible units, whose states can be summed. "
            f"Found {rbm.visible_units} units, whose conditional density has no closed form."
        )
    check_states(rbm, visible)
    joint = joint_in_full_precision(rbm)
    size = max(1, (2**24 if visible.is_cuda else 2**18) // rbm.n_hidden)
    return torch.cat([_pseudo_log_likelihood(joint, part) for part in visible.to(joint.weights).split(size)])


@no_graph()
def reconstruction_error(rbm: RBM, visible: Tensor) -> Tensor:
    r"""Return the mean over the columns of :math:`(v - E[v \mid E[h \mid v]])^2`, per sample: a poor proxy.

    The error measures how well one step to the hidden units and back preserves a sample. Training does not optimise it:
    it falls when weights grow and chains stop moving, even while the likelihood falls. Use it to check that training
    did not break; compare machines by `RBM.log_likelihood`, or by `estimated_log_likelihood`. No graph is built.

    Args:
        rbm: The machine, with any kind of units.
        visible: (N, V) or (N, V Q).

    Returns:
        (N,), in squared units of the data.

    Raises:
        ValueError: If `visible` has no rows or other columns.
        TypeError: If `visible` does not have the type of the parameters.

    References:
        Hinton, "A practical guide to training restricted Boltzmann machines", 2010, section 5.

    Example:
        >>> reconstruction_error(RBM(3, 2, generator=torch.Generator().manual_seed(0)), torch.zeros(1, 3))
        tensor([0.2488])
    """
    rbm.check_rows(visible, "visible")
    return (visible - rbm.visible_mean(rbm.hidden_mean(visible))).square().mean(-1)


def _pseudo_log_likelihood(joint: Joint, visible: Tensor) -> Tensor:
    x = joint.to_hidden(visible)
    change = _Change(joint, x)
    total = visible.new_zeros(len(visible))
    for log_weights, inputs in _other_states(joint, visible):
        others = [weight + change(d) for weight, d in zip(log_weights, inputs, strict=True)]
        total -= torch.stack([torch.zeros_like(total), *others]).logsumexp(0)
    return total


def _other_states(joint: Joint, visible: Tensor) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Yield for each visible unit the changes of a(v), (N,), and of the hidden input, (N, H), by its other states."""
    layer, weights = joint.visible, joint.weights
    if not isinstance(layer, Categorical):
        for unit in range(layer.n_columns):
            sign = 1 - 2 * visible[:, unit]
            yield [sign * layer.bias[unit]], [sign[:, None] * weights[unit]]
        return
    for first in range(0, layer.n_columns, layer.categories):
        columns = slice(first, first + layer.categories)
        now = visible[:, columns]
        biases, rows = [], []
        for turn in range(1, layer.categories):  # by cyclic shifts of the columns: all states except the present one
            to = now.roll(turn, dims=-1) - now
            biases.append(to @ layer.bias[columns])
            rows.append(to @ weights[columns])
        yield biases, rows


def _check_sandwich(log_partition: object) -> None:
    if not isinstance(log_partition, Sandwich):
        found = type(log_partition).__name__
        raise TypeError(f"`log_partition` should be a Sandwich, estimates from both sides. Found {found}.")


class _Change:
    r"""The change of the log of the sum over the hidden units, (N,), if their input changes from x to x + d.

    For Bernoulli units, :math:`\sum_j \log(\sigma(-a_j) + \sigma(a_j) e^{d_j})` with :math:`a = x + c`. Terms that only
    depend on x are computed once. Units are grouped so that their products do not overflow, with one logarithm per
    group.
    """

    def __init__(self, joint: Joint, x: Tensor) -> None:
        self.hidden, self.x = joint.hidden, x
        self.group = self._group(joint)
        if self.group:
            self.on, self.off = torch.sigmoid(x + joint.hidden.bias), torch.sigmoid(-x - joint.hidden.bias)
        else:
            self.before = joint.hidden.log_normaliser(x)

    def __call__(self, d: Tensor) -> Tensor:
        """Return the change; `d`, (N, H), is overwritten."""
        if not self.group:
            return self.hidden.log_normaliser(self.x + d) - self.before
        factors = torch.addcmul(self.off, self.on, d.mul_(1 / math.log(2)).exp2_())  # twice as fast as `exp`
        return torch.stack([part.prod(-1).log() for part in factors.split(self.group, dim=-1)]).sum(0)

    @staticmethod
    def _group(joint: Joint) -> int:
        """Return the number of factors that can be multiplied, each from e^-|d| to e^|d|; 0 if even one overflows."""
        if not isinstance(joint.hidden, Bernoulli):
            return 0
        steps = joint.weights.abs() * (2 if isinstance(joint.visible, Categorical) else 1)
        size = joint.hidden.n_columns
        while size and max(float(part.sum(-1).max()) for part in steps.split(size, dim=-1)) > LARGEST_LOG[steps.dtype]:
            size //= 2
        return size
