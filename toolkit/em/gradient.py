r"""Generalised EM by gradient steps: any torch optimiser in place of the M-step, on all samples or on minibatches.

An E-step fixes the responsibilities :math:`\bar r`. Then the optimiser raises the expected log-joint

.. math:: Q(\theta) = \frac{1}{\sum_n w_n} \sum_{nk} w_n \bar r_{nk} \log \pi_k f_k(x_n)

by one or several steps, and the next E-step follows. At the parameters of the E-step the gradient of Q is that of the
log-likelihood (Fisher), because the block `em.responsibilities` holds :math:`\bar r`. With the block open the gradient
is that of the conditional classification likelihood, which has its maximum elsewhere.

N samples, D features, K components, B samples of a batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Generic, TypeVar

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from toolkit._checks import integer
from toolkit._data import all_weights
from toolkit._random import device_of
from toolkit.blocks import is_blocked, no_graph, variable
from toolkit.em.engine.acceleration import Climb
from toolkit.em.engine.checks import check_callback, check_samples
from toolkit.em.mixture import (
    RESPONSIBILITIES,
    Family,
    check_mixture,
    expectation,
    log_density,
    log_responsibilities,
)

__all__ = ["gradient_em"]

F = TypeVar("F", bound=Family)


def gradient_em(
    start: F,
    x: Tensor,
    *,
    optimizer: Callable[[list[Tensor]], Optimizer],
    steps: int,
    sample_weight: Tensor | None = None,
    batch_size: int | None = None,
    generator: torch.Generator | None = None,
    inner_steps: int = 1,
    callback: Callable[[int, float], None] | None = None,
) -> Climb[F]:
    """Maximise the likelihood of a mixture by an optimiser's steps on the blocked surrogate.

    Use it for a model without a known M-step, for minibatches, or for a mixture inside a model that is trained by
    gradients. Where the M-step is known, `climb` is faster by orders of magnitude.

    **Second-order methods.** Q has the gradient of the log-likelihood, but neither its value nor its Hessian (Louis),
    and every E-step defines a new Q. All evaluations of one optimiser step therefore use the same responsibilities. So
    L-BFGS with its line search does the M-step: it maximises one fixed Q. The next E-step clears its curvature
    estimate. L-BFGS needs all samples. A Newton method for the likelihood itself should differentiate `log_likelihood`.

    Args:
        start: The mixture to start from. Neither it nor any ``.grad`` is changed.
        x: (N, D), or another shape that the mixture takes; the first dimension counts the samples.
        optimizer: Returns an optimiser for a list of leaves: ``lambda leaves: torch.optim.Adam(leaves, lr=0.05)``.
        steps: Number of E-steps.
        sample_weight: (N,), not negative, not all 0. None: all 1.
        batch_size: B, samples of one E-step and its inner steps, drawn without replacement in each pass. None: all
            samples.
        generator: Randomness of the batches. None is torch's global generator.
        inner_steps: Steps of the optimiser for each E-step.
        callback: Called with the number of E-steps done and the log-likelihood of all samples: after every E-step, or
            with minibatches every N / B E-steps; and at the end.

    Returns:
        The fit result, with the mixture of the highest log-likelihood evaluated on all samples. ``n_iter`` is `steps`;
        ``history`` has all these log-likelihoods and may fall; ``converged`` is always False, as convergence is not
        tested.

    Raises:
        TypeError: If `start` is not a mixture, `x` or `sample_weight` not a tensor, or `optimizer` not a function.
        ValueError: If an argument is out of range, L-BFGS is given minibatches, or the log-likelihood becomes
            non-finite because the steps are too long.

    References:
        Dempster, Laird & Rubin, "Maximum likelihood from incomplete data via the EM algorithm", 1977, section 3
        (generalised EM). Lange, "A gradient algorithm locally equivalent to the EM algorithm", 1995, section 2. Louis,
        "Finding the observed information matrix when using the EM algorithm", 1982, equation 3.1.

    Example:
        >>> from toolkit.em import GaussianParameters
        >>> x = torch.tensor([[0.0], [1.0], [8.0], [9.0], [10.0]])
        >>> two = GaussianParameters.from_covariances(weights=torch.tensor([0.5, 0.5]), means=x[1:3],
        ...     covariances=torch.ones(2), covariance_type="spherical")
        >>> gradient_em(two, x, optimizer=lambda leaves: torch.optim.Adam(leaves, lr=0.1), steps=300).parameters.means.T
        tensor([[0.5000, 9.0000]])
    """
    check_mixture(start, "start")
    check_samples(x, sample_weight)
    check_callback(callback)
    if not callable(optimizer):
        raise TypeError(
            "`optimizer` should be a function of the leaves, `lambda leaves: torch.optim.Adam(leaves)` say. "
            f"Found an object of type {type(optimizer).__name__}."
        )
    steps, inner_steps = integer("steps", steps, 0), integer("inner_steps", inner_steps)
    batch_size = None if batch_size is None else integer("batch_size", batch_size)
    training = _Training(start, x, _relative(x, sample_weight), batch_size, callback)
    owner = optimizer(list(training.leaves.values()))
    if isinstance(owner, LBFGS) and batch_size is not None:
        raise ValueError(f"`batch_size` should be None for L-BFGS, which needs all samples. Found {batch_size}.")
    batches = _batches(x, batch_size, generator)
    for step in range(steps):
        rows, is_first = next(batches)
        if batch_size is not None and is_first:
            training.note(step, training.evaluate())
        closure = training.e_step(step, rows)
        if isinstance(owner, LBFGS):
            owner.state.clear()  # differences between the gradients of two Q are not curvature
        for _ in range(inner_steps):
            owner.step(closure)  # type: ignore[arg-type]  # a tensor, as every example of torch has it
    training.note(steps, training.evaluate())
    return Climb(training.best, training.highest, False, steps, tuple(training.history))


class _Training(Generic[F]):
    """The leaves that an optimiser moves, its objective, and the best point so far."""

    def __init__(
        self,
        start: F,
        x: Tensor,
        weights: Tensor,
        batch_size: int | None,
        callback: Callable[[int, float], None] | None,
    ) -> None:
        self._start, self._x, self._weights, self._callback = start, x, weights, callback
        self._batch_size = batch_size or len(x)
        self.leaves = {name: variable(leaf) for name, leaf in _copies(start.unconstrained()).items()}
        self.best, self.highest = start, -math.inf
        self.history: list[float] = []

    def e_step(self, step: int, rows: Tensor | None) -> Callable[[], Tensor]:
        """Return the closure of minus Q for an optimiser; the first evaluation is the E-step."""
        x, weights = (self._x, self._weights) if rows is None else (self._x[rows], self._weights[rows])
        held: Tensor | None = None

        def closure() -> Tensor:
            nonlocal held
            log_joint = self._mixture().log_joint(x)
            responsibilities = held
            if responsibilities is None:
                responsibilities = log_responsibilities(log_joint).exp()
                # An open block asks for the gradient through each E-step, so each evaluation has its own.
                held = responsibilities if is_blocked(RESPONSIBILITIES) else None
                if rows is None and len(self.history) == step:
                    self.note(step, _mean(log_joint.logsumexp(-1), weights))
            expected = expectation(responsibilities, log_joint)
            loss = -(weights.to(expected.dtype) * expected).mean()
            self._differentiate(loss)
            return loss

        return closure

    @no_graph()
    def evaluate(self) -> float:
        """Return the log-likelihood of all samples, nats per sample."""
        parts = zip(self._x.split(self._batch_size), self._weights.split(self._batch_size), strict=True)
        mixture = self._mixture()
        return sum(_mean(log_density(mixture, x), weights) * len(x) for x, weights in parts) / len(self._x)

    def note(self, step: int, log_likelihood: float) -> None:
        """Remember the log-likelihood at the leaves, and the leaves if it is the highest."""
        if not math.isfinite(log_likelihood):
            raise ValueError(
                f"The log-likelihood should be finite. Found {log_likelihood} after {step} steps; shorter steps of the "
                "optimiser help."
            )
        self.history.append(log_likelihood)
        if self._callback is not None:
            self._callback(step, log_likelihood)
        if log_likelihood > self.highest:
            self.highest = log_likelihood
            self.best = self._start.with_unconstrained(_copies(self.leaves))

    def _mixture(self) -> F:
        return self._start.with_unconstrained(self.leaves)

    def _differentiate(self, loss: Tensor) -> None:
        """Set the gradients of the leaves, and of no other tensor that the loss may depend on."""
        leaves = list(self.leaves.values())
        for leaf, slope in zip(leaves, torch.autograd.grad(loss, leaves, allow_unused=True), strict=True):
            leaf.grad = slope


def _batches(
    x: Tensor, batch_size: int | None, generator: torch.Generator | None
) -> Iterator[tuple[Tensor | None, bool]]:
    """Yield the rows of each batch, each sample once in a pass, and whether a pass begins."""
    device = device_of(generator, x)
    while True:
        if batch_size is None:
            yield None, True
        else:
            order = torch.randperm(len(x), generator=generator, device=device).to(x.device)
            for i, rows in enumerate(order.split(batch_size)):
                yield rows, i == 0


def _relative(x: Tensor, sample_weight: Tensor | None) -> Tensor:
    """Return the weights over their mean, float64; the weights of a batch need not have mean 1."""
    weights = all_weights(x, sample_weight)
    return weights / weights.mean()


@no_graph()
def _mean(values: Tensor, weights: Tensor) -> float:
    return float((weights * values).mean())


@no_graph()
def _copies(leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: leaf.clone() for name, leaf in leaves.items()}
