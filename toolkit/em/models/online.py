r"""Gaussian mixtures fitted batch by batch: online EM, which forgets, and incremental EM, which keeps each batch.

Both keep expected sufficient statistics instead of samples: the count, the mean and the scatter of each component.
Statistics are merged without a difference of raw moments, so an offset of the data costs no accuracy. A batch is
reduced to its statistics by the same pass as in `em_step`.

==================  =========================================  ========================================================
algorithm           statistics after a batch                   for
==================  =========================================  ========================================================
`online_step`       averaged with the batch's, by the step     data too large to be read twice, or data that drift
                    size
`incremental_step`  those of the batch are replaced, the rest  data read several times: each batch improves the mixture
                    are kept                                   at once, and the free energy never falls
==================  =========================================  ========================================================

B samples of a batch, D features, K components.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from toolkit._checks import instance, integer, number
from toolkit.blocks import no_graph
from toolkit.em.engine.checks import check_finite, check_floats, check_prior, check_weights
from toolkit.em.engine.fused import accumulate, statistics_of
from toolkit.em.engine.samples import prepare
from toolkit.em.engine.statistics import Statistics
from toolkit.em.gaussian import GaussianParameters, check_features
from toolkit.em.models.prior import Prior

__all__ = [
    "IncrementalState",
    "OnlineState",
    "Statistics",
    "incremental_start",
    "incremental_step",
    "online_start",
    "online_step",
]


# --- online EM -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class OnlineState:
    """The state of online EM, returned by `online_start` and by each `online_step`.

    Attributes:
        parameters: The mixture, float64.
        statistics: The statistics of the stream so far, for a total count of 1.
        n_steps: Batches seen.
        total_weight: Samples seen, or the sum of their weights.
        log_likelihood: The log-likelihood of the last batch under the parameters before its step, nats per sample; NaN
            before the first batch.
        averaged: The mixture with the mean weights, means and covariances of the last `n_averaged` steps; None before
            `average_from`.
        n_averaged: Number of averaged steps.
        exponent, offset, least_step, burn_in, average_from, reg_covar, prior: The options (see `online_start`).
    """

    parameters: GaussianParameters
    statistics: Statistics
    n_steps: int
    total_weight: float
    log_likelihood: float
    averaged: GaussianParameters | None
    n_averaged: int
    exponent: float
    offset: float
    least_step: float
    burn_in: float
    average_from: int | None
    reg_covar: float
    prior: Prior | None

    @property
    def estimate(self) -> GaussianParameters:
        """The averaged mixture if there is one, else the current one."""
        return self.parameters if self.averaged is None else self.averaged


@no_graph()
def online_start(
    parameters: GaussianParameters,
    *,
    exponent: float = 0.6,
    offset: float = 1.0,
    least_step: float = 0.0,
    burn_in: float = 0.0,
    average_from: int | None = None,
    reg_covar: float = 1e-6,
    prior: Prior | None = None,
) -> OnlineState:
    r"""Return the state before the first batch.

    Args:
        parameters: The mixture to start from; a few EM steps on the first samples make a good start.
        exponent: The step size of batch t = 1, 2, ... is :math:`(t + \text{offset})^{-\text{exponent}}`. Convergence
            needs a value in (1/2, 1]; a value near 1/2 forgets a bad start faster.
        offset: See `exponent`; not negative. 0 lets the first batch replace the start. A large offset keeps the step
            size small from the beginning, for a trusted start.
        least_step: Lower bound of the step size. 0 for convergence; a small positive bound, :math:`\gamma`, follows
            data that drift, with a memory of about :math:`1 / \gamma` batches.
        burn_in: The parameters stay as they are, and only the statistics are updated, until this many samples have
            been seen. For small batches: twenty samples or more for each component.
        average_from: Average the parameters over the steps after this one (Polyak and Ruppert). Choose a step at which
            the start is forgotten, such as half of all steps. None: no averaging.
        reg_covar: Added to every variance.
        prior: A prior for the M-step (MAP); its weight is relative to all samples seen so far.

    Raises:
        ValueError: If an argument is out of range.

    References:
        Cappé & Moulines, "On-line expectation-maximization algorithm for latent data models", 2009. On step size,
        averaging and burn-in: Cappé, "Online expectation-maximisation", 2011, sections 3.2 and 3.3.

    Example:
        >>> from toolkit.em import m_step
        >>> x = torch.tensor([[0.0], [2.0], [5.0], [9.0]])
        >>> two = m_step(x, torch.eye(2).repeat_interleave(2, 0), covariance_type="diag")
        >>> online_step(online_start(two, exponent=1.0), x).parameters.means.mT
        tensor([[0.9928, 6.9541]], dtype=torch.float64)
    """
    instance("parameters", parameters, GaussianParameters)
    exponent = number("exponent", exponent, least=0, most=1)
    least_step = number("least_step", least_step, least=0, most=1)
    offset, burn_in = number("offset", offset, least=0), number("burn_in", burn_in, least=0)
    reg_covar = number("reg_covar", reg_covar, least=0)
    check_prior(prior)
    average_from = None if average_from is None else integer("average_from", average_from, 0)
    parameters = parameters.to(torch.float64)
    return OnlineState(
        parameters=parameters,
        statistics=Statistics.implied_by(parameters),
        n_steps=0,
        total_weight=0.0,
        log_likelihood=math.nan,
        averaged=None,
        n_averaged=0,
        exponent=exponent,
        offset=offset,
        least_step=least_step,
        burn_in=burn_in,
        average_from=average_from,
        reg_covar=reg_covar,
        prior=prior,
    )


@no_graph()
def online_step(state: OnlineState, x: Tensor, *, sample_weight: Tensor | None = None) -> OnlineState:
    r"""Return the state after one batch.

    With the batch's mean statistics :math:`\bar s(x; \theta)` under the current parameters, and the step size
    :math:`\gamma_t`: :math:`s \leftarrow (1 - \gamma_t) s + \gamma_t \bar s(x; \theta)`, and :math:`\theta` is the
    M-step of :math:`s`. Memory holds only the parameters and a part of the batch.

    A batch of :math:`\rho` times the average weight so far has the step size :math:`1 - (1 - \gamma_t)^\rho`, as if it
    came in :math:`\rho` batches of average weight. So a small last batch does no harm, and a batch of weight 0 changes
    nothing.

    Args:
        state: The state before the batch.
        x: (B, D), float32 or float64, finite.
        sample_weight: (B,), finite, not negative. None: all 1.

    Raises:
        TypeError: If `x` is not a float32 or float64 tensor.
        ValueError: If `x` is not finite or does not have the features of the means, or a covariance becomes singular.

    References:
        Cappé & Moulines, "On-line expectation-maximization algorithm for latent data models", 2009. Cappé, "Online
        expectation-maximisation", 2011, section 3.1.

    Example:
        >>> two = GaussianParameters.from_covariances(weights=torch.tensor([0.5, 0.5]),
        ...     means=torch.tensor([[1.0], [8.0]]), covariances=torch.ones(2), covariance_type="spherical")
        >>> state = online_start(two, offset=0)
        >>> online_step(state, torch.tensor([[0.0], [1.0], [6.0], [8.0]])).parameters.means.mT
        tensor([[0.5001, 7.0000]], dtype=torch.float64)
    """
    instance("state", state, OnlineState)
    batch, weight, log_likelihood = _reduce(state.parameters, x, sample_weight)
    if weight == 0:
        return state
    n_steps, total_weight = state.n_steps + 1, state.total_weight + weight
    step_size = max((n_steps + state.offset) ** -state.exponent, state.least_step)
    step_size = 1 - (1 - step_size) ** (weight * n_steps / total_weight)
    statistics = state.statistics.scaled(1 - step_size).merged(batch.scaled(step_size / weight))
    parameters = state.parameters
    if total_weight >= state.burn_in:
        # Relative to the prior, the statistics count as all samples that they represent.
        whole = statistics if state.prior is None else statistics.scaled(total_weight)
        parameters = whole.maximise(reg_covar=state.reg_covar, prior=state.prior)
    averaged, n_averaged = state.averaged, state.n_averaged
    if state.average_from is not None and n_steps > state.average_from:
        n_averaged += 1
        averaged = parameters if averaged is None else _between(averaged, parameters, 1 / n_averaged)
    return dataclasses.replace(
        state,
        parameters=parameters,
        statistics=statistics,
        n_steps=n_steps,
        total_weight=total_weight,
        log_likelihood=log_likelihood,
        averaged=averaged,
        n_averaged=n_averaged,
    )


def _between(one: GaussianParameters, other: GaussianParameters, share: float) -> GaussianParameters:
    """Return the mixture with the weights, means and covariances of two mixtures interpolated."""
    return GaussianParameters.from_covariances(
        weights=one.weights.lerp(other.weights, share),
        means=one.means.lerp(other.means, share),
        covariances=one.covariances.lerp(other.covariances, share),
        covariance_type=one.covariance_type,
    )


# --- incremental EM --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class IncrementalState:
    """The state of incremental EM, returned by `incremental_start` and by each `incremental_step`.

    Attributes:
        parameters: The mixture, float64.
        batches: By the key of each batch, its latest statistics, and the entropy of its responsibilities in nats,
            summed over its samples.
        total_weight: Samples in `batches`, or the sum of their weights.
        free_energy: Expected complete-data log-likelihood plus entropy, and the log-prior if there is one; nats per
            sample. A lower bound of the log-likelihood (plus log-prior) of these batches, which never falls once each
            batch has been seen, if `reg_covar` is 0.
        burn_in, reg_covar, prior: The options (see `incremental_start`).
    """

    parameters: GaussianParameters
    batches: Mapping[Hashable, tuple[Statistics, float, float]]
    total_weight: float
    free_energy: float
    burn_in: float
    reg_covar: float
    prior: Prior | None


@no_graph()
def incremental_start(
    parameters: GaussianParameters, *, burn_in: float = 0.0, reg_covar: float = 0.0, prior: Prior | None = None
) -> IncrementalState:
    """Return the state before the first batch.

    Args:
        parameters: The mixture to start from.
        burn_in: The parameters stay as they are until the batches hold this many samples. With too few samples in the
            first M-step, components degenerate.
        reg_covar: Added to every variance.
        prior: A prior for the M-step (MAP).

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> from toolkit.em import m_step
        >>> x = torch.tensor([[0.0], [2.0], [5.0], [9.0]])
        >>> two = m_step(x, torch.eye(2).repeat_interleave(2, 0), covariance_type="diag")
        >>> incremental_step(incremental_start(two), "first batch", x).parameters.means.mT
        tensor([[0.9854, 6.9090]], dtype=torch.float64)
    """
    instance("parameters", parameters, GaussianParameters)
    burn_in, reg_covar = number("burn_in", burn_in, least=0), number("reg_covar", reg_covar, least=0)
    check_prior(prior)
    return IncrementalState(
        parameters=parameters.to(torch.float64),
        batches={},
        total_weight=0.0,
        free_energy=math.nan,
        burn_in=burn_in,
        reg_covar=reg_covar,
        prior=prior,
    )


@no_graph()
def incremental_step(
    state: IncrementalState, key: Hashable, x: Tensor, *, sample_weight: Tensor | None = None
) -> IncrementalState:
    """Return the state after the E-step of one batch, and the M-step of all batches seen.

    The earlier statistics of this batch are replaced. So repeated passes over the same batches raise the likelihood of
    all of them, with an M-step after each batch instead of each pass.

    Args:
        state: The state before the batch.
        key: The key of the batch: the same samples must come with the same key.
        x: (B, D), float32 or float64, finite.
        sample_weight: (B,), finite, not negative. None: all 1.

    Raises:
        TypeError: If `x` is not a float32 or float64 tensor.
        ValueError: If `x` is not finite or does not have the features of the means, or a covariance becomes singular.

    References:
        Neal & Hinton, "A view of the EM algorithm that justifies incremental, sparse, and other variants", 1998,
        section 4.

    Example:
        >>> two = GaussianParameters.from_covariances(weights=torch.tensor([0.5, 0.5]),
        ...     means=torch.tensor([[1.0], [8.0]]), covariances=torch.ones(2), covariance_type="spherical")
        >>> state = incremental_step(incremental_start(two), "first", torch.tensor([[0.0], [1.0], [6.0], [8.0]]))
        >>> state.parameters.means.mT
        tensor([[0.5001, 7.0000]], dtype=torch.float64)
    """
    instance("state", state, IncrementalState)
    batch, weight, log_likelihood = _reduce(state.parameters, x, sample_weight)
    if weight == 0:
        return state
    # The bound touches at the batch's own parameters: there the likelihood is the expectation plus the entropy.
    entropy = weight * log_likelihood - float(batch.expected_log_joint(state.parameters))
    batches = {**state.batches, key: (batch, weight, entropy)}
    merged: Statistics | None = None
    for statistics, _, _ in batches.values():
        merged = statistics if merged is None else merged.merged(statistics)
    assert merged is not None
    total_weight = math.fsum(weight for _, weight, _ in batches.values())
    parameters = state.parameters
    if total_weight >= state.burn_in:
        parameters = merged.maximise(reg_covar=state.reg_covar, prior=state.prior)
    energy = float(merged.expected_log_joint(parameters)) + math.fsum(entropy for _, _, entropy in batches.values())
    if state.prior is not None:
        energy += float(state.prior.log_density(parameters))
    return dataclasses.replace(
        state,
        parameters=parameters,
        batches=batches,
        total_weight=total_weight,
        free_energy=energy / total_weight,
    )


# --- a batch ---------------------------------------------------------------------------------------------------------


def _reduce(parameters: GaussianParameters, x: Tensor, sample_weight: Tensor | None) -> tuple[Statistics, float, float]:
    """Return the statistics of a batch, its weight, and its log-likelihood in nats per sample, in one pass."""
    _check(parameters, x, sample_weight)
    weight = float(len(x)) if sample_weight is None else float(sample_weight.sum(dtype=torch.float64))
    kind = parameters.covariance_type
    if weight == 0:
        return Statistics.implied_by(parameters), 0.0, math.nan
    data = prepare(x, kind, parameters.n_components, sample_weight=sample_weight)
    moments = accumulate(parameters, data)
    return statistics_of(moments, data, kind), weight, float(moments.log_likelihood)


def _check(parameters: GaussianParameters, x: Tensor, sample_weight: Tensor | None) -> None:
    check_floats(x)
    check_features(parameters, x)
    check_finite(x)
    check_weights(sample_weight, len(x), allow_zeros=True)
