r"""Mixtures of any `torch.distributions`, fitted by generalised EM: the M-step ascends the surrogate by its gradient.

The user defines the map from unconstrained parameters to a distribution; everything else follows from its ``log_prob``.
The M-step maximises each component's mean log-density by BFGS, at fixed responsibilities; with few parameters BFGS
starts from the exact Hessian. No step lowers this objective, so the likelihood never falls, even if the M-step stops
before the maximum.

N samples, K components, P parameters of one component.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.distributions import Distribution

from toolkit._checks import function, integer
from toolkit._random import device_of
from toolkit.blocks import carries_gradient, constants, no_graph
from toolkit.em.components import Components
from toolkit.em.models._common import (
    check_start,
    clamp_coordinates,
    is_wrapped,
    log_weights_of,
    partition,
    shares,
)

__all__ = ["Build", "DistributionMixture"]

Build = Callable[[dict[str, Tensor]], Distribution]

_BACKTRACKS = 15
_ARMIJO = 1e-4

# The most parameters of a component for which BFGS begins with the exact second derivatives.
_EXACT = 16


@dataclass(frozen=True, kw_only=True, eq=False)
class DistributionMixture(Components):
    r"""A mixture of K distributions of one kind, made by a function of unconstrained parameters.

    Attributes:
        log_weights: (K,), nats; the weights sum to 1.
        parameters: By name, (K, ...): every real value should give a valid distribution.
        build: Returns the K distributions of the parameters: a `torch.distributions.Distribution` with ``batch_shape``
            (K,). Its ``event_shape`` is (D,), or () for one feature. Pass ``validate_args=False`` where the samples are
            known to be in the support, for use under `torch.func.vmap`.
        max_steps: The most quasi-Newton steps of one M-step. A few are enough: each M-step continues from the last one.

    Raises:
        ValueError: If the shapes do not fit together.

    References:
        Dempster, Laird & Rubin, "Maximum likelihood from incomplete data via the EM algorithm", 1977, section 2
        (generalised EM). Nocedal & Wright, "Numerical optimization", 2006, equation 6.17 (BFGS).

    Example:
        >>> from toolkit.em.models import DistributionMixture
        >>> two = DistributionMixture(
        ...     log_weights=torch.tensor([0.5, 0.5]).log(), parameters={"log_rate": torch.tensor([0.0, 1.0])},
        ...     build=lambda p: torch.distributions.Exponential(p["log_rate"].exp()))
        >>> two.log_joint(torch.tensor([[1.0]]))
        tensor([[-1.6931, -2.4114]])
    """

    parameters: Mapping[str, Tensor]
    build: Build
    max_steps: int = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_fields()
        integer("max_steps", self.max_steps)
        function("build", self.build, "the parameters")
        if not self.parameters or "log_weights" in self.parameters:
            raise ValueError(f"`parameters` should have names, not 'log_weights'. Found {sorted(self.parameters)}.")
        for name, value in self.parameters.items():
            if value.shape[:1] != (self.n_components,):
                raise ValueError(
                    f"`parameters` should have shapes ({self.n_components}, ...). Found {tuple(value.shape)} for "
                    f"{name!r}."
                )
        found = self.distribution
        if found.batch_shape != (self.n_components,) or len(found.event_shape) > 1:
            raise ValueError(
                f"`build` should return a distribution of batch shape ({self.n_components},) and event shape () or "
                f"(D,). Found {tuple(found.batch_shape)} and {tuple(found.event_shape)}."
            )

    @classmethod
    @no_graph()
    def start(
        cls,
        x: Tensor,
        n_components: int,
        *,
        build: Build,
        guess: Callable[[Tensor], dict[str, Tensor]],
        max_steps: int = 20,
        sample_weight: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Self:
        """Split the samples by a few steps of k-means, and guess the parameters of each part.

        Args:
            x: (N, D), floating point.
            n_components: Number of components, K; at most N.
            build: As in the class.
            guess: Returns parameters of one component from samples (n, D) that are assigned to it; estimates by moments
                are enough. As n may be 1, keep a variance, say, away from 0.
            max_steps: As in the class.
            sample_weight: (N,), not negative. None: all 1. `guess` does not use it.
            generator: Randomness. None is torch's global generator.

        Raises:
            TypeError: If `x` is not a real tensor.
            ValueError: If an argument is out of range, or the shapes do not fit together.
        """
        check_start(x, n_components, sample_weight)
        function("guess", guess, "the samples of one component")
        x = x if x.is_floating_point() else x.double()
        if not bool(x.isfinite().all()):
            raise ValueError("`x` should be finite. Found infinite or missing values.")
        labels, weights = partition(x, n_components, sample_weight, generator)
        counts = torch.zeros_like(x[:n_components, 0]).index_add(0, labels, weights)
        # A part can be empty if samples are equal; all samples then stand in for it.
        parts = [x[labels == k] if bool((labels == k).any()) else x for k in range(n_components)]
        guesses = [guess(part) for part in parts]
        return cls(
            log_weights=shares(counts.clamp(min=1e-3 * float(counts.mean()))),
            parameters={name: torch.stack([one[name] for one in guesses]) for name in guesses[0]},
            build=build,
            max_steps=max_steps,
        )

    @property
    def distribution(self) -> Distribution:
        """The K distributions, of batch shape (K,)."""
        return self.build(dict(self.parameters))

    @property
    def n_features(self) -> int:
        """D; 1 for scalar distributions."""
        return self.distribution.event_shape.numel()

    @property
    def n_parameters(self) -> int:
        """Number of free parameters: K - 1 weights and every number in `parameters`."""
        return self.n_components - 1 + sum(value.numel() for value in self.parameters.values())

    def to(self, target: torch.dtype | torch.device) -> Self:
        """Return the mixture in another floating-point type, or on another device."""
        moved = {name: value.to(target) for name, value in self.parameters.items()}
        return dataclasses.replace(self, log_weights=self.log_weights.to(target), parameters=moved)

    def check(self, x: Tensor) -> None:
        """Raise a ValueError unless `x` (N, D) is in the support of every component."""
        samples = self._samples(x)
        support = self.distribution.support
        if support is None:
            return
        inside = support.check(samples).reshape(len(x), -1).all(1)
        if not bool(inside.all()):
            row = int((~inside).nonzero()[0])
            raise ValueError(f"`x` should be in the support {support}. Found {x[row].tolist()} in row {row}.")

    def log_joint(self, x: Tensor) -> Tensor:
        """Return the log of weight times density, (N, K), nats.

        Args:
            x: (N, D); with one feature (N,) will do.

        Raises:
            ValueError: If `x` does not have the features of the distribution, or the distribution raises one.
        """
        return self.log_weights + self._log_prob(self.parameters, self._samples(x))

    def m_step(self, x: Tensor, responsibilities: Tensor) -> Self:
        r"""Return parameters with :math:`\sum_n r_{nk} \log f_k(x_n)` at least as high as before, for each k.

        The result is differentiable in the responsibilities, by the implicit function theorem: if they require a
        gradient, one more Newton step is taken, which does not move a maximum.

        Args:
            x: (N, D); with one feature (N,) will do.
            responsibilities: (N, K).

        Raises:
            ValueError: If the shapes do not fit together.
        """
        samples, counts = self._samples(x), responsibilities.sum(0)
        share = responsibilities / torch.where(counts > 0, counts, 1.0)
        flat = self._flat(self.parameters)
        found = _climb(lambda point: self._mean_log_prob(point, samples, constants(share)), flat, self.max_steps)
        if carries_gradient(share):
            found = found + _newton(
                lambda point: self._mean_log_prob(point, samples, share), constants(found), counts > 0
            )
        return dataclasses.replace(self, log_weights=shares(counts), parameters=self._tree(found))

    def unconstrained(self) -> dict[str, Tensor]:
        """Return ``log_weights`` (K,) and the parameters."""
        return {"log_weights": clamp_coordinates(self.log_weights), **self.parameters}

    def with_unconstrained(self, values: Mapping[str, Tensor]) -> Self:
        """Return the mixture at these coordinates."""
        parameters = {name: values[name] for name in self.parameters}
        return dataclasses.replace(self, log_weights=log_weights_of(values), parameters=parameters)

    @no_graph()
    def sample(self, n: int, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Draw `n` samples (n, D), and their components (n,).

        Distributions draw from torch's global generators. These are seeded from `generator` and restored afterwards;
        with None they are used as they are.
        """
        labels, n = self._labels(n, generator), int(n)
        if generator is None:
            draws = self.distribution.sample((n,))
        else:
            seed = torch.randint(2**62, (), generator=generator, device=device_of(generator, labels))
            devices = [self.log_weights.device] if self.log_weights.is_cuda else []
            with torch.random.fork_rng(devices):
                torch.manual_seed(int(seed))
                draws = self.distribution.sample((n,))
        return draws[torch.arange(n, device=labels.device), labels].reshape(n, -1), labels

    def _samples(self, x: Tensor) -> Tensor:
        """Return the samples in the shape that the distributions take: (N, 1) or (N, 1, D)."""
        event = self.distribution.event_shape
        if not event and (x.ndim == 1 or x.shape[1:] == (1,)):
            return x.reshape(-1, 1).to(self.log_weights.dtype)
        if not event or x.ndim != 2 or x.shape[1:] != event:
            raise ValueError(f"`x` should have shape (N, {event.numel()}). Found {tuple(x.shape)}.")
        return x[:, None].to(self.log_weights.dtype)

    def _log_prob(self, parameters: Mapping[str, Tensor], samples: Tensor) -> Tensor:
        log_prob: Tensor = self.build(dict(parameters)).log_prob(samples)
        return log_prob

    def _mean_log_prob(self, flat: Tensor, samples: Tensor, share: Tensor) -> Tensor:
        """Return each component's mean log-density, (K,): the objective of the M-step."""
        log_prob = self._log_prob(self._tree(flat), samples)
        return (share * log_prob.masked_fill(share == 0, 0.0)).sum(0)

    def _flat(self, parameters: Mapping[str, Tensor]) -> Tensor:
        return torch.cat([value.reshape(self.n_components, -1) for value in parameters.values()], 1)

    def _tree(self, flat: Tensor) -> dict[str, Tensor]:
        sizes = [value.numel() // self.n_components for value in self.parameters.values()]
        parts = zip(self.parameters.items(), flat.split(sizes, 1), strict=True)
        return {name: part.reshape(value.shape) for (name, value), part in parts}


Objective = Callable[[Tensor], Tensor]


def _gradient(objective: Objective, point: Tensor) -> tuple[Tensor, Tensor]:
    """Return the values (K,) and the gradients (K, P) of K functions, each of its own row of the point (K, P)."""

    def total(point: Tensor) -> tuple[Tensor, Tensor]:
        values = objective(point)
        return values.sum(), values

    gradient, values = torch.func.grad(total, has_aux=True)(point)
    return values, gradient


def _newton(objective: Objective, point: Tensor, alive: Tensor) -> Tensor:
    """Return a Newton step (K, P), differentiable in everything that the objective depends on."""
    _, gradient = _gradient(objective, point)
    identity = torch.eye(point.shape[1], dtype=point.dtype, device=point.device)
    hessian = torch.where(alive[:, None, None], _hessian(objective, point), identity)
    step: Tensor = torch.linalg.solve(hessian, gradient[..., None])[..., 0]
    return -step


def _hessian(objective: Objective, point: Tensor) -> Tensor:
    """Return the second derivatives of K functions (K, P, P); each depends on its own row of the point alone."""
    hessian: Tensor = torch.func.jacrev(lambda p: _gradient(objective, p)[1].sum(0))(point)
    return hessian.permute(1, 0, 2)


@no_graph()
def _climb(objective: Objective, point: Tensor, max_steps: int) -> Tensor:
    """Maximise K functions at once by BFGS, each with its own inverse Hessian and step length; none ever falls."""
    k, p = point.shape
    identity = torch.eye(p, dtype=point.dtype, device=point.device).expand(k, p, p)
    inverse, fresh = identity, torch.ones(k, dtype=torch.bool, device=point.device)
    if p <= _EXACT:
        # Near the maximum Newton's step is best; where the function is not concave, it is useless.
        root, failed = torch.linalg.cholesky_ex(-_hessian(objective, point))
        fresh = (failed != 0) | ~root.isfinite().all(-1).all(-1)
        inverse = torch.cholesky_inverse(torch.where(fresh[:, None, None], identity, root))
    eps = torch.finfo(point.dtype).eps
    values, gradient = _gradient(objective, point)
    for _ in range(max_steps):
        direction = (inverse @ gradient[..., None])[..., 0]
        slope = (direction * gradient).sum(1)
        target, new_values, new_gradient = _line_search(objective, point, values, gradient, direction, slope, fresh)
        step, change = target - point, gradient - new_gradient
        moved = (step != 0).any(1)
        # Gains below the rounding of a mean are not looked for.
        if not is_wrapped(moved) and not bool((moved & (slope > eps * (1 + values.abs()))).any()):
            return target
        inverse, fresh = _updated(inverse, fresh, step, change, identity)
        point, values, gradient = target, new_values, new_gradient
    return point


def _line_search(
    objective: Objective,
    point: Tensor,
    values: Tensor,
    gradient: Tensor,
    direction: Tensor,
    slope: Tensor,
    fresh: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return point, values and gradient after a step of each component that raises its value, or stays."""
    # The first step knows no curvature: its length is at most 1.
    length = torch.where(fresh, direction.norm(dim=1).clamp(min=1.0).reciprocal(), 1.0)
    best, best_values, best_gradient = point, values, gradient
    waiting = (slope > 0) & slope.isfinite()
    # The remaining gain may be less than the rounding of the values: a smaller gradient then decides.
    slack = 8 * torch.finfo(point.dtype).eps * (1 + values.abs())
    for _ in range(_BACKTRACKS):
        target = point + torch.where(waiting, length, 0.0)[:, None] * direction
        found, slopes = _gradient(objective, target)
        higher = found >= values + _ARMIJO * length * slope
        flatter = (found >= values - slack) & (slopes.norm(dim=1) < 0.5 * gradient.norm(dim=1)) & (slope < slack)
        taken = waiting & (higher | flatter) & slopes.isfinite().all(1) & found.isfinite()
        best = torch.where(taken[:, None], target, best)
        best_values = torch.where(taken, found, best_values)
        best_gradient = torch.where(taken[:, None], slopes, best_gradient)
        waiting = waiting & ~taken
        if not is_wrapped(waiting) and not bool(waiting.any()):
            break
        length = length / 4
    return best, best_values, best_gradient


def _updated(inverse: Tensor, fresh: Tensor, step: Tensor, change: Tensor, identity: Tensor) -> tuple[Tensor, Tensor]:
    """Return the inverse Hessians of minus the objectives after a step (K, P) changed minus the gradients so."""
    product = (step * change).sum(1)
    sound = product > 1e-12 * step.norm(dim=1) * change.norm(dim=1)
    rho = torch.where(sound, product, 1.0).reciprocal()[:, None, None]
    # Before the first update: the size that the curvature along the step shows.
    size = product / torch.where(sound, change.square().sum(1), 1.0)
    inverse = torch.where((fresh & sound)[:, None, None], size[:, None, None] * identity, inverse)
    left = identity - rho * step[:, :, None] * change[:, None, :]
    new = left @ inverse @ left.mT + rho * step[:, :, None] * step[:, None, :]
    return torch.where(sound[:, None, None], new, inverse), fresh & ~sound
