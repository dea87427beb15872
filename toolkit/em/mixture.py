r"""The core of every finite mixture: the E-step, the log-likelihood, and the surrogates that gradient EM ascends.

With the joint log-density :math:`a_{nk} = \log \pi_k f_k(x_n)`, its normaliser over the components is the
log-density :math:`\ell_n = \log \sum_k e^{a_{nk}}`, and its softmax the responsibilities :math:`r_{nk}`.

The block `em.responsibilities` holds the output of the E-step constant. Its effect depends on the surrogate:

==========================  ==========================  ======================================================
program                     gradient with the block     leak with the block open
==========================  ==========================  ======================================================
`surrogate`                 of the log-likelihood       minus the gradient of the entropy of the responsibilities
`evidence_lower_bound`      of the log-likelihood       exactly zero
an M-step after `e_step`    none: a new constant        the Jacobian of the EM map, whose largest eigenvalue is
                                                        the rate of convergence
==========================  ==========================  ======================================================

N samples, D features, K components.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, Self

from torch import Tensor

from toolkit._checks import number
from toolkit.blocks import block, stop_gradient

__all__ = [
    "RESPONSIBILITIES",
    "Family",
    "Mixture",
    "e_step",
    "evidence_lower_bound",
    "log_density",
    "log_likelihood",
    "surrogate",
]

RESPONSIBILITIES = block(
    "em.responsibilities",
    "The E-step's output is a fixed weighting of the samples for the M-step: with it constant the surrogate has the "
    "gradient of the log-likelihood, otherwise the surrogate is raised by making the responsibilities more certain.",
)


class Mixture(Protocol):
    """A finite mixture at one value of its parameters."""

    def log_joint(self, x: Tensor) -> Tensor:
        """Return the log of weight times density of each component, (N, K), in nats."""


class Family(Mixture, Protocol):
    """A mixture that can be fitted: it has a closed-form M-step and unconstrained coordinates.

    Every method returns new parameters. Parameters that are not estimated (given degrees of freedom, say) are kept.
    """

    def m_step(self, x: Tensor, responsibilities: Tensor) -> Self:
        """Return the parameters that maximise the expected log-joint under `responsibilities` (N, K).

        Weighted samples: multiply the responsibilities by the weights.
        """

    def unconstrained(self) -> dict[str, Tensor]:
        """Return unconstrained coordinates: all real values of them define a mixture."""

    def with_unconstrained(self, values: Mapping[str, Tensor]) -> Self:
        """Return the mixture at these coordinates."""


def check_mixture(mixture: object, argument: str = "mixture") -> None:
    """Raise TypeError unless `mixture` has a log-joint density; the result of a fit holds a mixture but is not one."""
    if not hasattr(mixture, "log_joint"):
        held = [name for name in ("parameters", "parameters_") if hasattr(getattr(mixture, name, None), "log_joint")]
        hint = f" Pass its `{held[0]}`." if held else ""
        raise TypeError(f"`{argument}` should be a mixture. Found an object of type {type(mixture).__name__}.{hint}")


def log_density(mixture: Mixture, x: Tensor) -> Tensor:
    r"""Return :math:`\ell_n = \log \sum_k \pi_k f_k(x_n)`.

    Args:
        mixture: The parameters.
        x: (N, D).

    Returns:
        (N,), nats.

    Raises:
        TypeError: If `mixture` is not a mixture.

    Example:
        >>> from toolkit.em import m_step
        >>> x, r = torch.tensor([[0.0], [2.0], [5.0], [9.0]]), torch.eye(2).repeat_interleave(2, 0)
        >>> two = m_step(x, r, covariance_type="diag")
        >>> log_density(two, x)
        tensor([-2.1103, -2.0765, -2.8041, -2.8052])
    """
    check_mixture(mixture)
    return mixture.log_joint(x).logsumexp(-1)


def log_likelihood(mixture: Mixture, x: Tensor, sample_weight: Tensor | None = None) -> Tensor:
    r"""Return the objective of EM, :math:`\frac1N \sum_n \log \sum_k \pi_k f_k(x_n)`.

    Args:
        mixture: The parameters.
        x: (N, D).
        sample_weight: (N,), not negative: weights of the mean over the samples. None: all 1.

    Returns:
        Scalar, nats per sample.

    Raises:
        TypeError: If `mixture` is not a mixture.
        ValueError: If `sample_weight` has another shape.

    Example:
        >>> from toolkit.em import m_step
        >>> x, r = torch.tensor([[0.0], [2.0], [5.0], [9.0]]), torch.eye(2).repeat_interleave(2, 0)
        >>> two = m_step(x, r, covariance_type="diag")
        >>> log_likelihood(two, x)
        tensor(-2.4490)
    """
    return mean(log_density(mixture, x), sample_weight)


def e_step(mixture: Mixture, x: Tensor, sample_weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
    r"""Return responsibilities :math:`r_{nk} = \pi_k f_k(x_n) / \sum_j \pi_j f_j(x_n)`, blocked, and log-likelihood.

    Args:
        mixture: The parameters.
        x: (N, D).
        sample_weight: (N,): weighs the log-likelihood, not the responsibilities. None: all 1.

    Returns:
        Responsibilities (N, K), which sum to 1 over the components and are held constant by `em.responsibilities`; and
        the log-likelihood, a differentiable scalar in nats per sample.

    Raises:
        TypeError: If `mixture` is not a mixture.
        ValueError: If `sample_weight` has another shape.

    References:
        Dempster, Laird & Rubin, "Maximum likelihood from incomplete data via the EM algorithm", 1977, section 4.3.

    Example:
        >>> from toolkit.em import m_step
        >>> x, r = torch.tensor([[0.0], [2.0], [5.0], [9.0]]), torch.eye(2).repeat_interleave(2, 0)
        >>> two = m_step(x, r, covariance_type="diag")
        >>> responsibilities, _ = e_step(two, x)
        >>> responsibilities.round(decimals=2)
        tensor([[1.0000, 0.0000],
                [0.9700, 0.0300],
                [0.0000, 1.0000],
                [0.0000, 1.0000]])
    """
    check_mixture(mixture)
    log_joint = mixture.log_joint(x)
    return log_responsibilities(log_joint).exp(), mean(log_joint.logsumexp(-1), sample_weight)


def surrogate(mixture: Mixture, x: Tensor, sample_weight: Tensor | None = None) -> Tensor:
    r"""Return the expected complete-data log-likelihood :math:`\frac1N \sum_{nk} \bar r_{nk} \log \pi_k f_k(x_n)`.

    :math:`\bar r` is held constant by the block, at the responsibilities of the same parameters. Then

    - the **gradient** is that of the log-likelihood :math:`\ell`, at all parameters (Fisher's identity);
    - the **value** is not :math:`\ell` but :math:`\ell` minus the entropy of the responsibilities, so a line search
      or early stopping must use `log_likelihood`;
    - the **Hessian** is not that of :math:`\ell` either:
      :math:`\nabla^2 Q = \nabla^2 \ell - \frac1N \sum_n \mathrm{Cov}_{k \sim r_n}(\nabla a_{nk})` (Louis). Newton's
      method, L-BFGS and other second-order methods should differentiate `log_likelihood`.

    With the block open the gradient is that of :math:`\ell - H(r)`, the conditional classification likelihood, whose
    maximum is a different, biased estimate (Baudry). The leak is
    :math:`\frac1N \sum_n \mathrm{Cov}_{k \sim r_n}(a_{nk}, \nabla a_{nk})`.

    Args:
        mixture: The parameters.
        x: (N, D).
        sample_weight: (N,): weights of the mean over the samples. None: all 1.

    Returns:
        Scalar, nats per sample, to be maximised.

    Raises:
        TypeError: If `mixture` is not a mixture.
        ValueError: If `sample_weight` has another shape.

    References:
        Fisher's identity: Dempster, Laird & Rubin, "Maximum likelihood from incomplete data via the EM algorithm",
        1977, discussion. Louis, "Finding the observed information matrix when using the EM algorithm", 1982,
        equation 3.1. Baudry, "Estimation and model selection for model-based clustering with the conditional
        classification likelihood", 2015, section 2.

    Example:
        >>> from toolkit.em import m_step
        >>> x, r = torch.tensor([[0.0], [2.0], [5.0], [9.0]]), torch.eye(2).repeat_interleave(2, 0)
        >>> two = m_step(x, r, covariance_type="diag")
        >>> bool(surrogate(two, x) < log_likelihood(two, x))  # by the entropy of the responsibilities
        True
    """
    check_mixture(mixture)
    log_joint = mixture.log_joint(x)
    return mean(expectation(log_responsibilities(log_joint).exp(), log_joint), sample_weight)


def evidence_lower_bound(
    mixture: Mixture, x: Tensor, sample_weight: Tensor | None = None, *, inverse_temperature: float = 1.0
) -> Tensor:
    r"""Return :math:`\frac1N \sum_{nk} \bar r_{nk} (\log \pi_k f_k(x_n) - \log \bar r_{nk})`, the evidence lower bound.

    At the exact responsibilities the bound touches the log-likelihood, and is stationary in the responsibilities. So
    its value *and* its gradient are those of the log-likelihood, and the leak of an open block is exactly zero. The
    bound is `surrogate` plus the entropy of the responsibilities.

    Softened responsibilities do leak. At an inverse temperature :math:`\beta`, as in annealing, the responsibilities
    are :math:`q \propto (\pi_k f_k)^\beta`. The bound then lies below the log-likelihood, and the leak is
    :math:`\beta (1 - \beta) \frac1N \sum_n \mathrm{Cov}_{k \sim q_n}(a_{nk}, \nabla a_{nk})`.

    Args:
        mixture: The parameters.
        x: (N, D).
        sample_weight: (N,): weights of the mean over the samples. None: all 1.
        inverse_temperature: 1 for the exact responsibilities, less for softer ones.

    Returns:
        Scalar, nats per sample.

    Raises:
        TypeError: If `mixture` is not a mixture.
        ValueError: If `sample_weight` has another shape.

    References:
        Neal & Hinton, "A view of the EM algorithm that justifies incremental, sparse, and other variants", 1998,
        lemma 1. Ueda & Nakano, "Deterministic annealing EM algorithm", 1998, section 3.

    Example:
        >>> from toolkit.em import m_step
        >>> x, r = torch.tensor([[0.0], [2.0], [5.0], [9.0]]), torch.eye(2).repeat_interleave(2, 0)
        >>> two = m_step(x, r, covariance_type="diag")
        >>> bool((evidence_lower_bound(two, x) - log_likelihood(two, x)).abs() < 1e-5)
        True
        >>> bool(evidence_lower_bound(two, x, inverse_temperature=0.5) < log_likelihood(two, x))
        True
    """
    inverse_temperature = number("inverse_temperature", inverse_temperature, least=0)
    check_mixture(mixture)
    log_joint = mixture.log_joint(x)
    log_r = log_responsibilities(inverse_temperature * log_joint)
    return mean(expectation(log_r.exp(), log_joint - log_r), sample_weight)


def log_responsibilities(log_joint: Tensor) -> Tensor:
    """Return the logarithms of the responsibilities (N, K), blocked, from the log-joint (N, K)."""
    return stop_gradient(log_joint.log_softmax(-1), RESPONSIBILITIES)


def expectation(probabilities: Tensor, values: Tensor) -> Tensor:
    """Return the expectation over the last dimension; values of probability 0 may be infinite."""
    return (probabilities * values.masked_fill(probabilities == 0, 0.0)).sum(-1)


def check_shape_of_weights(weights: Tensor, shape: tuple[int, ...], name: str = "sample_weight") -> None:
    """Raise an error unless weights are a tensor of this shape; values are not read, so it works under `torch.func`."""
    if not isinstance(weights, Tensor):
        raise TypeError(f"`{name}` should be a tensor or None. Found {type(weights).__name__}.")
    if weights.shape != shape:
        raise ValueError(f"`{name}` should have shape {shape}. Found {tuple(weights.shape)}.")


def mean(values: Tensor, weights: Tensor | None) -> Tensor:
    """Return the weighted mean over the samples (N,); None: all weights are 1."""
    if weights is None:
        return values.mean()
    check_shape_of_weights(weights, tuple(values.shape))
    return (weights * values).sum() / weights.sum()
