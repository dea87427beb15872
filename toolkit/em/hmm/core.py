r"""Hidden Markov models: Baum-Welch, Viterbi, posteriors, and the surrogate for gradient EM.

A path of states :math:`z_1 \ldots z_T` has the joint log-density

.. math:: a(z) = \log \pi_{z_1} + \sum_{t>1} \log A_{z_{t-1} z_t} + \sum_t \log b_{z_t}(x_t),

and a sequence the log-likelihood :math:`\ell = \log \sum_z e^{a(z)}`. The E-step returns the statistics of the
distribution of paths :math:`r = e^{a - \ell}` that the M-step needs: the posteriors :math:`\gamma_{tk}` of states, and
the expected numbers :math:`\xi_{ij}` of transitions.

The block `em.responsibilities` holds them constant. With it the gradient of `surrogate` is that of the log-likelihood
(Fisher's identity). Without it the surrogate is :math:`\ell - H(r)`, and the leak is minus the gradient of the entropy
of the *paths*: EM by gradients then seeks parameters under which the path is certain.

The differentiable functions work in logarithms, and are the specification. `posteriors`, `em_step`, `fit` and `viterbi`
are fast twins without a gradient.

Sequences stand one after the other in `x`; `lengths` says where each ends. S sequences, N steps in all, T steps of the
longest, D features, M symbols, K states.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from toolkit._checks import index, instance, number
from toolkit._random import device_of
from toolkit.blocks import no_graph, stop_recording
from toolkit.em.covariance import structure_of
from toolkit.em.engine.acceleration import Accelerate, Climb, climb
from toolkit.em.engine.coordinates import Layout, flat
from toolkit.em.engine.rounding import ROUNDING
from toolkit.em.hmm._emissions import GaussianEmissions, draw
from toolkit.em.hmm._engine import Engine
from toolkit.em.hmm._logarithms import smooth, sums_over_paths
from toolkit.em.hmm._plan import Plan
from toolkit.em.hmm._viterbi import LogProb, best_paths
from toolkit.em.hmm.parameters import DirichletPrior, HMMParameters, Posteriors, with_counts
from toolkit.em.mixture import RESPONSIBILITIES, check_shape_of_weights, expectation

__all__ = [
    "e_step",
    "em_step",
    "expected_log_joint",
    "fit",
    "log_likelihood",
    "log_likelihoods",
    "m_step",
    "posteriors",
    "sample",
    "surrogate",
    "total_log_likelihood",
    "viterbi",
]


def log_likelihoods(parameters: HMMParameters, x: Tensor, lengths: Sequence[int] | None = None) -> Tensor:
    """Return the log-likelihood of each sequence, by the forward recursion in logarithms; differentiable.

    Args:
        parameters: The model.
        x: The sequences, one after the other: (N, D), or symbols (N,).
        lengths: (S,), which sum to N. None: one sequence.

    Returns:
        (S,), nats per sequence. Minus infinity if no path is possible.

    Raises:
        ValueError: If `x` does not fit the emissions, or `lengths` do not fit `x`.

    References:
        Rabiner, "A tutorial on hidden Markov models and selected applications in speech recognition", 1989,
        equations 19 to 21.
    """
    lengths = _check(parameters, x, lengths)
    return sums_over_paths(parameters, x, lengths)


def log_likelihood(
    parameters: HMMParameters,
    x: Tensor,
    lengths: Sequence[int] | None = None,
    *,
    sequence_weight: Tensor | None = None,
) -> Tensor:
    """Return the objective of Baum-Welch: the log-likelihood of all sequences divided by their steps.

    Args:
        parameters: The model.
        x: As in `log_likelihoods`.
        lengths: As in `log_likelihoods`.
        sequence_weight: (S,), not negative: how often each sequence counts. None: once each.

    Returns:
        Scalar, nats per step.
    """
    lengths = _check(parameters, x, lengths)
    _check_weight(sequence_weight, lengths)
    values = log_likelihoods(parameters, x, lengths)
    return _per_step(values if sequence_weight is None else sequence_weight * values, lengths, sequence_weight)


def e_step(
    parameters: HMMParameters,
    x: Tensor,
    lengths: Sequence[int] | None = None,
    *,
    sequence_weight: Tensor | None = None,
) -> Posteriors:
    r"""Return posteriors of states and expected transitions, held constant by the block `em.responsibilities`.

    With the block in place no graph is built for the posteriors; the log-likelihoods are differentiable. The recursions
    run in logarithms, and take (S, K, K) of memory; `posteriors` is the fast twin. Arguments are those of
    `log_likelihood`.

    References:
        Rabiner, 1989, equations 27 and 37. Baum, Petrie, Soules & Weiss, "A maximization technique occurring in the
        statistical analysis of probabilistic functions of Markov chains", 1970.
    """
    lengths = _check(parameters, x, lengths)
    _check_weight(sequence_weight, lengths)
    with stop_recording(RESPONSIBILITIES):
        states, start, transitions = smooth(parameters, x, lengths, sequence_weight)
    return Posteriors(
        states=states,
        start=start,
        transitions=transitions,
        log_likelihoods=log_likelihoods(parameters, x, lengths),
    )


def expected_log_joint(parameters: HMMParameters, x: Tensor, posteriors: Posteriors) -> Tensor:
    r"""Return :math:`Q = \sum \bar\gamma_{1k} \log \pi_k + \bar\xi_{ij} \log A_{ij} + \bar\gamma_{tk} \log b_k(x_t)`.

    Args:
        parameters: The model.
        x: As in `log_likelihoods`.
        posteriors: From any parameters. With `posteriors(parameters, x, lengths)` the result is the blocked surrogate,
            at the speed of the fast pass.

    Returns:
        Scalar, nats, summed over the (weighted) steps.
    """
    _check(parameters, x, None)
    instance("posteriors", posteriors, Posteriors)
    return (
        expectation(posteriors.start, parameters.log_start).sum()
        + expectation(posteriors.transitions, parameters.log_transition).sum()
        + expectation(posteriors.states, parameters.emissions.log_prob(x)).sum()
    )


def surrogate(
    parameters: HMMParameters,
    x: Tensor,
    lengths: Sequence[int] | None = None,
    *,
    sequence_weight: Tensor | None = None,
) -> Tensor:
    r"""Return the expected joint log-density of paths and data, :math:`\frac1N \sum_z \bar r_z a(z)`.

    :math:`\bar r` is held constant by the block, at the posteriors of the same parameters. Then the **gradient** is
    that of the log-likelihood, at every parameter (Fisher's identity); the **value** is the log-likelihood minus the
    entropy of the paths, and the **Hessian** is short of the covariance of the paths' scores (Louis), so line
    searches and second-order methods should look at `log_likelihood`.

    With the block open the gradient is that of :math:`\ell - H(r)`. The leak,
    :math:`-\nabla H = \mathrm{Cov}_{z \sim r}(a_z, \nabla a_z)`, is zero only where the path is certain. Arguments are
    those of `log_likelihood`.

    Returns:
        Scalar, nats per step, to be maximised.

    References:
        Fisher's identity: Dempster, Laird & Rubin, "Maximum likelihood from incomplete data via the EM algorithm",
        1977, discussion. Louis, "Finding the observed information matrix when using the EM algorithm", 1982.
        The entropy of paths: Hernando, Crespi & Cybenko, "Efficient computation of the hidden Markov model entropy
        for a given observation sequence", 2005.
    """
    lengths = _check(parameters, x, lengths)
    _check_weight(sequence_weight, lengths)
    with stop_recording(RESPONSIBILITIES):
        states, start, transitions = smooth(parameters, x, lengths, sequence_weight)
    found = Posteriors(states=states, start=start, transitions=transitions, log_likelihoods=states.new_zeros(0))
    return _per_step(expected_log_joint(parameters, x, found), lengths, sequence_weight)


def m_step(
    parameters: HMMParameters,
    x: Tensor,
    posteriors: Posteriors,
    *,
    prior: DirichletPrior | None = None,
    reg_covar: float = 0.0,
) -> HMMParameters:
    """Return the parameters that maximise `expected_log_joint` under given posteriors, times the prior.

    Differentiable. Probabilities of 0 stay 0. A state that is never visited keeps its emissions, and a state that is
    never left keeps its transitions.

    Args:
        parameters: Parameters of the E-step, for the probabilities of 0 and for the states without posteriors.
        x: As in `log_likelihoods`.
        posteriors: Of all sequences.
        prior: None: maximum likelihood.
        reg_covar: Added to every variance, for Gaussian emissions.

    Raises:
        ValueError: If a covariance becomes singular.

    References:
        Rabiner, 1989, equations 40 and 52 to 54.
    """
    _check(parameters, x, None)
    instance("posteriors", posteriors, Posteriors)
    prior = _given(prior)
    new = parameters.emissions.m_step(x, posteriors.states, prior=prior.emission, reg_covar=reg_covar)
    return with_counts(parameters, posteriors.start, posteriors.transitions, new, prior)


# --- without a gradient ---


@no_graph()
def posteriors(
    parameters: HMMParameters,
    x: Tensor,
    lengths: Sequence[int] | None = None,
    *,
    sequence_weight: Tensor | None = None,
) -> Posteriors:
    """Return the result of `e_step`, fast and without a gradient.

    Probabilities are computed in the floating-point type of `x`, sums in float64.
    """
    lengths = _check(parameters, x, lengths)
    return Engine(parameters, x, lengths, sequence_weight).posteriors(parameters)


@no_graph()
def total_log_likelihood(parameters: HMMParameters, x: Tensor, lengths: Sequence[int] | None = None) -> Tensor:
    """Return the sum of `log_likelihoods`, fast and without a gradient: a float64 scalar, nats."""
    lengths = _check(parameters, x, lengths)
    return Engine(parameters, x, lengths, None).log_likelihoods(parameters).sum()


@no_graph()
def em_step(
    parameters: HMMParameters,
    x: Tensor,
    lengths: Sequence[int] | None = None,
    *,
    sequence_weight: Tensor | None = None,
    prior: DirichletPrior | None = None,
    reg_covar: float = 0.0,
) -> tuple[HMMParameters, Tensor]:
    """Return the parameters after one step of Baum-Welch, and the log-likelihood *before* it.

    The result is that of ``m_step(parameters, x, e_step(parameters, x, lengths))`` to rounding, in bounded memory:
    beside the data, the memory of an EM step does not grow with N.

    Args:
        parameters: The model.
        x: As in `log_likelihoods`.
        lengths: As in `log_likelihoods`.
        sequence_weight: (S,), not negative. None: all 1.
        prior: None: maximum likelihood.
        reg_covar: Added to every variance, for Gaussian emissions.

    Returns:
        The new model, and a float64 scalar in nats per step.
    """
    lengths, reg_covar = _check(parameters, x, lengths), number("reg_covar", reg_covar, least=0)
    engine = Engine(parameters, x, lengths, sequence_weight)
    new, values = engine.step(parameters, _given(prior), reg_covar)
    weight = engine.weight
    dtype = parameters.log_start.dtype
    return new.to(dtype), _per_step(values if weight is None else weight * values, lengths, weight)


@no_graph()
def fit(
    start: HMMParameters,
    x: Tensor,
    lengths: Sequence[int] | None = None,
    *,
    sequence_weight: Tensor | None = None,
    prior: DirichletPrior | None = None,
    reg_covar: float = 0.0,
    update: str = "ste",
    accelerate: Accelerate = "anderson",
    tol: float = 1e-6,
    max_iter: int = 1000,
    callback: Callable[[int, float], None] | None = None,
) -> Climb[HMMParameters]:
    """Maximise the likelihood, or the posterior, from a start by Baum-Welch.

    Args:
        start: The model to start from.
        x: As in `log_likelihoods`.
        lengths: As in `log_likelihoods`.
        sequence_weight: (S,), not negative. None: all 1.
        prior: None: maximum likelihood.
        reg_covar: Added to every variance, for Gaussian emissions.
        update: Parameters to estimate: ``"s"`` start, ``"t"`` transitions, ``"e"`` emissions, ``"m"`` means alone,
            ``"c"`` covariances alone.
        accelerate: As in `climb`.
        tol: As in `climb`, nats per step.
        max_iter: As in `climb`.
        callback: As in `climb`.

    Returns:
        The fit result: the model in float64, and log-likelihoods, plus the prior's log-density, in nats per step.

    Raises:
        ValueError: If an argument is out of range, or the start gives the data no probability.

    Example:
        >>> from toolkit.em.hmm import CategoricalEmissions
        >>> start = HMMParameters.of(start=torch.tensor([0.5, 0.5]), transition=torch.tensor([[0.7, 0.3], [0.3, 0.7]]),
        ...     emissions=CategoricalEmissions(log_probabilities=torch.tensor([[0.9, 0.1], [0.2, 0.8]]).log()))
        >>> found = fit(start, torch.tensor([0, 0, 0, 0, 1, 1, 1, 1]), tol=1e-9)
        >>> found.parameters.log_transition.exp().round(decimals=3)
        tensor([[0.7500, 0.2500],
                [0.0000, 1.0000]], dtype=torch.float64)
    """
    lengths, reg_covar = _check(start, x, lengths, "start"), number("reg_covar", reg_covar, least=0)
    if not isinstance(update, str) or set(update) - set("stemc"):
        raise ValueError(f"`update` should have the letters s, t, e, m, c. Found {update!r}.")
    prior = _given(prior)
    start = start.to(torch.float64)
    engine = Engine(start, x, lengths, sequence_weight)
    weight = engine.weight

    def em(parameters: HMMParameters) -> tuple[HMMParameters, float]:
        new, values = engine.step(parameters, prior, reg_covar, update)
        total = (values if weight is None else weight * values).sum() + prior.log_density(parameters)
        return new, float(_per_step(total, lengths, weight))

    pack, at = _coordinates(start)

    def unpack(position: Tensor) -> HMMParameters:
        there = at(position)
        if isinstance(there.emissions, GaussianEmissions) and set(update) & set("ec"):
            structure = structure_of(there.emissions.covariance_type)
            structure.check_least(there.emissions.precisions_cholesky, reg_covar)
        return there

    return climb(
        em,
        start,
        pack=pack,
        unpack=unpack,
        accelerate=accelerate,
        tol=tol,
        max_iter=max_iter,
        rounding=ROUNDING[engine.dtype],
        callback=callback,
    )


@no_graph()
def viterbi(parameters: HMMParameters, x: Tensor, lengths: Sequence[int] | None = None) -> tuple[Tensor, Tensor]:
    """Return the most probable path of each sequence, and the log of its joint density with the data.

    Arguments are those of `log_likelihoods`.

    Returns:
        States (N,), int64, and (S,), float64, nats.

    References:
        Viterbi, "Error bounds for convolutional codes and an asymptotically optimum decoding algorithm", 1967.
    """
    lengths = _check(parameters, x, lengths)
    model = parameters.to(torch.float64)

    if x.is_floating_point():
        x = x.double()

    def prepare(plan: Plan) -> LogProb:
        return model.emissions.prepare(x, plan).begin(model.emissions).log_prob

    return best_paths(model.log_start, model.log_transition, prepare, lengths)


@no_graph()
def sample(
    parameters: HMMParameters,
    lengths: Sequence[int],
    *,
    generator: torch.Generator | None = None,
    first: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Draw sequences of these lengths.

    Args:
        parameters: The model.
        lengths: (S,), positive.
        generator: Randomness. None is torch's global generator.
        first: (S,), int64: the first states. None: drawn from the model.

    Returns:
        Data, (N, D) or (N,), and states (N,), sequence after sequence.
    """
    instance("parameters", parameters, HMMParameters)
    lengths = check_lengths(lengths, None)
    k = parameters.n_states
    if first is None:
        first = draw(parameters.log_start.exp().expand(len(lengths), -1), generator)
    elif first.shape != (len(lengths),) or int(first.min()) < 0 or int(first.max()) >= k:
        raise ValueError(f"`first` should be {len(lengths)} states from 0 to {k - 1}. Found {first.tolist()}.")
    device = device_of(generator, first)
    uniform = torch.rand(sum(lengths), generator=generator, dtype=torch.float64, device=device).tolist()
    # A chain has to be drawn step by step; bisection of lists is the fastest way in Python.
    rows = [list(itertools.accumulate(row)) for row in parameters.log_transition.double().exp().tolist()]
    # A state of probability 0 at the end of a row is never drawn, not even by rounding.
    last = [max(i for i in range(k) if i == 0 or row[i] > row[i - 1]) for row in rows]
    path: list[int] = []
    for state, length in zip(first.tolist(), lengths, strict=True):
        path.append(state)
        for _ in range(length - 1):
            row = rows[state]
            state = min(bisect.bisect_right(row, uniform[len(path)] * row[-1]), last[state])
            path.append(state)
    states = torch.tensor(path, device=first.device)
    return parameters.emissions.sample(states, generator), states


# --- how ---


def _check(parameters: HMMParameters, x: Tensor, lengths: Sequence[int] | None, name: str = "parameters") -> list[int]:
    instance(name, parameters, HMMParameters)
    if not isinstance(x, Tensor):
        raise TypeError(f"`x` should be a tensor. Found {type(x).__name__}.")
    if len(x) == 0:
        raise ValueError("`x` should hold at least one step. Found none.")
    parameters.emissions.check(x)
    return check_lengths(lengths, len(x))


def check_lengths(lengths: Sequence[int] | None, n_steps: int | None) -> list[int]:
    """Return the lengths as Python's integers; raise a ValueError unless they are positive and sum to `n_steps`."""
    total = "" if n_steps is None else f" that sum to {n_steps}"
    each: list[int | None] = [None]
    with contextlib.suppress(TypeError):  # no sequence
        each = [n_steps or 1] if lengths is None else [index(length) for length in lengths]
    found = [length for length in each if length is not None]
    if len(found) < len(each):
        raise ValueError(f"`lengths` should be positive integers{total}. Found {lengths!r}.")
    if not found or min(found) < 1 or (n_steps is not None and sum(found) != n_steps):
        short = found if len(found) < 10 else [*found[:8], "..."]
        raise ValueError(f"`lengths` should be positive integers{total}. Found {short}, which sum to {sum(found)}.")
    return found


def _given(prior: DirichletPrior | None) -> DirichletPrior:
    """Return the prior, by default one without an effect; raise a TypeError for anything else."""
    if prior is not None:
        instance("prior", prior, DirichletPrior)
    return prior or DirichletPrior()


def _check_weight(weight: Tensor | None, lengths: Sequence[int]) -> None:
    if weight is not None:
        check_shape_of_weights(weight, (len(lengths),), "sequence_weight")


def _per_step(values: Tensor, lengths: Sequence[int], weight: Tensor | None) -> Tensor:
    if weight is None:
        return values.sum() / sum(lengths)
    return values.sum() / (weight * torch.tensor(lengths, dtype=weight.dtype, device=weight.device)).sum()


_LOG_PROBABILITIES = ("log_start", "log_transition", "log_probabilities")


def _coordinates(
    start: HMMParameters,
) -> tuple[Callable[[HMMParameters], Tensor], Callable[[Tensor], HMMParameters]]:
    """Return the maps to and from a vector of coordinates in which steps can be extrapolated.

    Coordinates of probabilities are their square roots: probabilities often go to 0, where logarithms never converge. A
    probability that is 0 at all known points is 0 at every extrapolated point.
    """
    layout = Layout(start.unconstrained())

    def pack(parameters: HMMParameters) -> Tensor:
        leaves = parameters.unconstrained().items()
        return flat({name: (leaf / 2).exp() if name in _LOG_PROBABILITIES else leaf for name, leaf in leaves})

    def unpack(position: Tensor) -> HMMParameters:
        parts = layout.leaves(position).items()
        return start.with_unconstrained(
            {name: 2 * part.abs().log() if name in _LOG_PROBABILITIES else part for name, part in parts}
        )

    return pack, unpack
