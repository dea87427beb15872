r"""The separation at which both of two Gaussians are found, with the responsibilities held constant and without.

Half of the samples are drawn about :math:`-d/2`, half about :math:`+d/2` on the first axis, with unit variances. A
mixture of two Gaussians with free weights, means and covariances is trained by gradient ascent on
`toolkit.em.surrogate`, for several separations :math:`d` side by side: the loss is the sum over the separations, which
share no parameter, and the optimiser, Rprop (Riedmiller & Braun), treats every parameter separately, so each separation
is trained as if it were alone. Rprop uses only the sign of a gradient: without noise it converges to all digits.

With the block the gradient is that of the log-likelihood :math:`\ell`. Without it, it is that of :math:`\ell - H`, the
log-likelihood minus the entropy of the responsibilities: the conditional classification likelihood (Baudry). Its
entropy term is the overlap penalty of the integrated completed likelihood (Biernacki and others). Its maximum is
another estimate, with a bias that more samples do not remove.

``data = "population"``: expectations over all possible samples, in one dimension, by the trapezoidal rule, whose error
falls exponentially with the number of nodes for an integrand like this one. Training starts near the truth. With
infinitely many samples the truth is the maximum of the likelihood, so any further movement is due to the leak. ``data =
"samples"``: one sample per seed; for each separation the same draws are moved apart. Training starts from k-means.

References:
    Baudry, "Estimation and model selection for model-based clustering with the conditional classification likelihood",
    2015, section 2. Biernacki, Celeux & Govaert, "Assessing a mixture model for clustering with the integrated
    completed likelihood", 2000, section 3. Riedmiller & Braun, "A direct adaptive method for faster backpropagation
    learning: the RPROP algorithm", 1993. Trefethen & Weideman, "The exponentially convergent trapezoidal rule", 2014,
    theorem 5.1.

S separations, N samples or nodes, D features, 2 components.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor
from torch.distributions import Categorical, MixtureSameFamily, MultivariateNormal

from toolkit import datasets
from toolkit.em import GaussianParameters, from_unconstrained, log_density, start, surrogate, to_unconstrained
from toolkit.em.engine.acceleration import maximise_likelihood
from toolkit.runner import Event, ExperimentConfig, Objective, Run, Sweep

from ._training import gradient_of

__all__ = ["Config", "Measure", "log_likelihoods", "population", "run"]

# Beyond so many standard deviations outside of the means lies less than 1e-18 of the probability.
_TAIL = 9.0

_DEAD = 0.01

# A logit or a log-width that moves further in one step could pass by everything.
_STEP_SIZES = (1e-9, 0.3)

Separation = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Config(ExperimentConfig):
    """Values of an experiment on the separation of two Gaussians.

    Attributes:
        data: ``"population"``: all possible samples, by quadrature, starting at the truth; or ``"samples"``: one sample
            per seed, starting from k-means.
        separations: Distances of the means, in standard deviations.
        n_features: samples: the number of features, D. The population has one feature.
        n_samples: samples: the number of samples, N.
        n_nodes: population: number of nodes of the trapezoidal rule. The narrowest component must span several nodes.
        nudge: population: standard deviation of the noise added to the coordinates of the truth, so that training
            leaves an unstable point. The noise depends on the seed.
    """

    data: Literal["population", "samples"]
    separations: Annotated[list[Separation], Field(min_length=1)]
    n_features: Annotated[int, Field(ge=1)] = 1
    n_samples: Annotated[int, Field(ge=2)] = 1000
    n_nodes: Annotated[int, Field(ge=3)] = 241
    nudge: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1e-5

    @model_validator(mode="after")
    def _population_has_one_feature(self) -> Self:
        if self.data == "population" and self.n_features > 1:
            raise ValueError("n_features should be 1 for the population")
        return self


@dataclass(frozen=True, eq=False)
class Measure:
    """The data of every separation: points (S, N, D) and their probabilities (S, N), which sum to 1."""

    points: Tensor
    probabilities: Tensor

    def expectation(self, values: Tensor) -> Tensor:
        """Return the expectations (S,) of values (S, N)."""
        return (self.probabilities * values).sum(-1)


def run(config: Config, seed: int) -> Run:
    """Return one seeded run: a mixture for each separation, the sum of their surrogates, and Rprop."""
    options = {"dtype": getattr(torch, config.dtype), "device": torch.device(config.device)}
    data, check, first, best = _problem(config.model_dump_json(), seed)
    data, check = (Measure(part.points.to(**options), part.probabilities.to(**options)) for part in (data, check))
    parameters = {name: value.detach().clone().to(**options).requires_grad_() for name, value in first.items()}
    count = len(config.separations)

    @torch.no_grad()
    def evaluate() -> Mapping[str, float]:
        likelihoods, entropies = log_likelihoods(parameters, data)
        return {
            "objective": likelihoods.mean().item(),
            "entropy of the responsibilities (nats per sample), mean over the separations": entropies.mean().item(),
        }

    @torch.no_grad()
    def sweep() -> Mapping[str, list[float]]:
        likelihoods, entropies = log_likelihoods(parameters, data)
        on_check, _ = log_likelihoods(parameters, check)
        curves = {
            "log-likelihood lost (nats per sample)": best.to(likelihoods) - likelihoods,
            "entropy of the responsibilities (nats per sample)": entropies,
            **_describe(parameters, config.separations),
        }
        if config.data == "population":
            curves["error of the quadrature (nats per sample)"] = (likelihoods - on_check).abs()
        return {name: values.tolist() for name, values in curves.items()}

    def target() -> Mapping[str, Tensor]:
        loss = -data.expectation(_witness(parameters).log_prob(data.points)).sum()
        return gradient_of(loss, parameters)

    return Run(
        parameters=parameters,
        # The surrogate is the mean over the separations.
        loss=lambda: -count * surrogate(_Separate(parameters), data.points, data.probabilities),
        objective=Objective(
            label="log-likelihood, mean over the separations (nats per sample)",
            higher_is_better=True,
            best=best.mean().item() if config.data == "population" else None,
        ),
        evaluate=evaluate,
        optimizer=torch.optim.Rprop(parameters.values(), lr=config.learning_rate, step_sizes=_STEP_SIZES),
        target=target,
        events=[Event(says="a component died", metric="smallest weight", below=_DEAD)],
        sweep=Sweep(
            label="separation of the means (standard deviations)", values=tuple(config.separations), evaluate=sweep
        ),
    )


@dataclass(frozen=True, eq=False)
class _Separate:
    """Mixtures without common parameters, one per separation, as one `toolkit.em.Mixture` of (S, N) samples."""

    unconstrained: Mapping[str, Tensor]

    def log_joint(self, x: Tensor) -> Tensor:
        """Return the log-joint (S, N, 2) of samples (S, N, D)."""

        def one(unconstrained: dict[str, Tensor], points: Tensor) -> Tensor:
            return from_unconstrained(unconstrained, "full").log_joint(points)

        joint: Tensor = torch.vmap(one)(dict(self.unconstrained), x)
        return joint


def log_likelihoods(unconstrained: Mapping[str, Tensor], data: Measure) -> tuple[Tensor, Tensor]:
    """Return the expected log-likelihood, and the expected entropy of the responsibilities, (S,) each, in nats."""
    mixtures = _Separate(unconstrained)
    entropy = torch.special.entr(mixtures.log_joint(data.points).softmax(-1)).sum(-1)
    return data.expectation(log_density(mixtures, data.points)), data.expectation(entropy)


def population(separations: list[float], n_nodes: int) -> Measure:
    """Return the trapezoidal rule for expectations under two unit Gaussians, for each distance of their means.

    The nodes lie evenly from 9 standard deviations before the first mean to 9 after the second, where the density is
    below 1e-18, so that the two end points need no weights of their own.
    """
    d = torch.tensor(separations, dtype=torch.float64)[:, None]
    nodes = torch.linspace(-1, 1, n_nodes, dtype=torch.float64) * (d / 2 + _TAIL)
    density = (torch.exp(-0.5 * (nodes - d / 2) ** 2) + torch.exp(-0.5 * (nodes + d / 2) ** 2)) / 2
    return Measure(nodes[..., None], density / density.sum(1, keepdim=True))


def _describe(unconstrained: Mapping[str, Tensor], separations: list[float]) -> dict[str, Tensor]:
    """Return summaries of the mixtures, (S,) each. A dead component has no position, so its distance is NaN."""
    mixtures = [
        from_unconstrained({name: value[index] for name, value in unconstrained.items()}, "full")
        for index in range(len(separations))
    ]
    smallest = torch.stack([mixture.weights.min() for mixture in mixtures])
    distance = torch.stack([(mixture.means[0] - mixture.means[1]).norm() for mixture in mixtures])
    stretch = distance / torch.tensor(separations).to(distance)
    width = torch.stack([mixture.covariances[mixture.weights.argmax(), 0, 0].sqrt() for mixture in mixtures])
    return {
        "smallest weight": smallest,
        "distance of the means, over the true one": stretch.where(smallest >= _DEAD, math.nan),
        "standard deviation of the heavier component, along the first axis": width,
    }


def _witness(unconstrained: Mapping[str, Tensor]) -> MixtureSameFamily:
    """Return the mixtures as torch distributions of shape (S, 1), which share no code with `toolkit.em`."""
    means, packed = unconstrained["means"], unconstrained["log_cholesky"]
    d = means.shape[-1]
    rows, columns = torch.triu_indices(d, d, 1)
    upper = torch.diag_embed(packed[..., :d].exp()).clone()
    upper[..., rows, columns] = packed[..., d:]
    lower = torch.linalg.inv(upper).mT[:, None]
    components = MultivariateNormal(means[:, None], scale_tril=lower, validate_args=False)
    weights = Categorical(logits=unconstrained["log_weights"][:, None], validate_args=False)
    return MixtureSameFamily(weights, components, validate_args=False)


@lru_cache(maxsize=1)  # one seed's runs are made anew for each variant
def _problem(config_json: str, seed: int) -> tuple[Measure, Measure, dict[str, Tensor], Tensor]:
    """Return the data, the data on twice as many nodes, the common start, and the highest log-likelihoods (S,).

    For the population this is the truth's log-likelihood, for a sample that of the maximum that EM reaches from the
    same start.
    """
    config = Config.model_validate_json(config_json)
    if config.data == "population":
        data, check = (population(config.separations, n) for n in (config.n_nodes, 2 * config.n_nodes - 1))
        generator = torch.Generator().manual_seed(seed)
        truth = _stack([_truth(separation) for separation in config.separations])
        first = {
            name: value + config.nudge * torch.randn(value.shape, generator=generator, dtype=value.dtype)
            for name, value in truth.items()
        }
        return data, check, first, log_likelihoods(truth, data)[0]
    data = _samples(config, seed)
    starts = [
        start(x, 2, covariance_type="full", generator=torch.Generator().manual_seed(seed)) for x in data.points.unbind()
    ]
    climbs = [
        maximise_likelihood(first, x, tol=1e-10, max_iter=10_000)
        for first, x in zip(starts, data.points.unbind(), strict=True)
    ]
    return data, data, _stack(starts), torch.tensor([climb.log_likelihood for climb in climbs], dtype=torch.float64)


def _samples(config: Config, seed: int) -> Measure:
    points = [
        datasets.two_gaussians(
            config.n_samples,
            separation=separation,
            n_features=config.n_features,
            generator=torch.Generator().manual_seed(seed),
        ).inputs
        for separation in config.separations
    ]
    shape = (len(points), config.n_samples)
    return Measure(torch.stack(points), torch.full(shape, 1 / config.n_samples, dtype=torch.float64))


def _truth(separation: float) -> GaussianParameters:
    return GaussianParameters.from_covariances(
        weights=torch.tensor([0.5, 0.5], dtype=torch.float64),
        means=torch.tensor([[-separation / 2], [separation / 2]], dtype=torch.float64),
        covariances=torch.ones(2, 1, 1, dtype=torch.float64),
        covariance_type="full",
    )


def _stack(mixtures: list[GaussianParameters]) -> dict[str, Tensor]:
    coordinates = [to_unconstrained(mixture) for mixture in mixtures]
    return {name: torch.stack([each[name] for each in coordinates]) for name in coordinates[0]}
