"""The leak of a mixture's responsibilities: without the block, gradient EM prefers certainty to likelihood.

A Gaussian mixture is trained by Adam on the expected complete-data log-likelihood, `toolkit.em.surrogate`. With the
responsibilities held constant its gradient is that of the log-likelihood (Fisher's identity). Without the block it is
that of the log-likelihood minus the entropy of the responsibilities, so training sharpens the clusters, moves them
apart, and may empty one of them. With ``surrogate = "evidence_lower_bound"`` the entropy is part of the surrogate, and
the same block leaks exactly nothing.

All variants start at the same point: means by k-means or k-means++, one common covariance, and optionally a few EM
steps. The objective is the log-likelihood. The surrogate would be misleading, because the leaky variant raises it
further, and so would the agreement with known classes, which sharper clusters may improve. Accelerated EM finds the
maximum that closed-form EM reaches from the same start; the gap to this maximum is the loss of a variant.

N samples, D features, K components.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from functools import lru_cache
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.distributions import Categorical, Distribution, Independent, MixtureSameFamily, MultivariateNormal, Normal

from toolkit import datasets
from toolkit.em import (
    CovarianceType,
    GaussianParameters,
    em_step,
    evidence_lower_bound,
    from_unconstrained,
    start,
    surrogate,
    to_unconstrained,
)
from toolkit.em.engine.acceleration import maximise_likelihood
from toolkit.runner import Event, ExperimentConfig, Objective, Run

from ._training import gradient_of

__all__ = ["Config", "distribution", "principal_components", "run"]

Data = Literal["iris", "wine", "digits", "two_gaussians"]

_STARTS = 5  # at most this many are drawn until EM finds a maximum

_SURROGATES = {"expected_log_joint": surrogate, "evidence_lower_bound": evidence_lower_bound}


class Config(ExperimentConfig):
    """Values of an EM experiment.

    Attributes:
        data: ``"iris"``, ``"wine"``, ``"digits"``, or the synthetic ``"two_gaussians"``.
        standardised: Whether each feature is divided by its standard deviation first.
        principal_components: Number of principal components of the data that are modelled. 0: the original features.
        n_samples: two_gaussians: the number of samples, N.
        separation: two_gaussians: distance of the means, in standard deviations.
        n_components: Number of components, K.
        covariance_type: ``"full"``, ``"tied"``, ``"diag"`` or ``"spherical"``.
        init: Choice of the initial means, as in `toolkit.em.start`.
        surrogate: The surrogate that Adam maximises: ``"expected_log_joint"`` or ``"evidence_lower_bound"``.
        reg_covar: Number added to the variances of the start. Training itself is not regularised.
        em_steps: Closed-form EM steps from these means to the common start. With enough steps, the blocked variant
            reaches the same maximum as closed-form EM.
        em_is_best: Whether EM from the start is known to reach the highest maximum (apart from degenerate components),
            so that the report can show it as the best value.
    """

    data: Data
    standardised: bool = False
    principal_components: Annotated[int, Field(ge=0)] = 0
    n_samples: Annotated[int, Field(ge=2)] = 1000
    separation: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 2.0
    n_components: Annotated[int, Field(ge=1)]
    covariance_type: CovarianceType
    init: Literal["kmeans", "k-means++"] = "kmeans"
    surrogate: Literal["expected_log_joint", "evidence_lower_bound"] = "expected_log_joint"
    reg_covar: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1e-6
    em_steps: Annotated[int, Field(ge=0)] = 0
    em_is_best: bool = False


def run(config: Config, seed: int) -> Run:
    """Return one seeded run: a mixture, its surrogate on all data, and Adam with a learning rate that falls to zero."""
    x, first, maximum = _problem(config.model_dump_json(), seed)
    options = {"dtype": getattr(torch, config.dtype), "device": torch.device(config.device)}
    x = x.to(**options)
    parameters = {
        name: value.detach().clone().to(**options).requires_grad_() for name, value in to_unconstrained(first).items()
    }
    objective = _SURROGATES[config.surrogate]
    optimizer = torch.optim.Adam(parameters.values(), lr=config.learning_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, config.steps)

    def mixture() -> GaussianParameters:
        return from_unconstrained(parameters, config.covariance_type)

    @torch.no_grad()
    def evaluate() -> Mapping[str, float]:
        now = mixture()
        log_joint = now.log_joint(x)
        entropy = torch.special.entr(log_joint.softmax(-1)).sum(-1)
        likelihood = log_joint.logsumexp(-1).mean().item()
        return {
            "objective": likelihood,
            "smallest weight": now.weights.min().item(),
            "entropy of the responsibilities (nats per sample)": entropy.mean().item(),
            "log-likelihood lost, against EM from the same start (nats per sample)": maximum - likelihood,
        }

    def target() -> Mapping[str, Tensor]:
        loss = -distribution(parameters, config.covariance_type).log_prob(x).mean()
        return gradient_of(loss, parameters)

    return Run(
        parameters=parameters,
        loss=lambda: -objective(mixture(), x),
        objective=Objective(
            label="log-likelihood (nats per sample)", higher_is_better=True, best=maximum if config.em_is_best else None
        ),
        evaluate=evaluate,
        optimizer=optimizer,
        target=target,
        after_step=lambda step: schedule.step(),
        events=[Event(says="a component died", metric="smallest weight", below=0.01)],
    )


def distribution(unconstrained: Mapping[str, Tensor], covariance_type: CovarianceType) -> Distribution:
    """Return the mixture as a torch distribution, which shares no code with `toolkit.em`: the witness.

    Args:
        unconstrained: As `toolkit.em.from_unconstrained` takes it.
        covariance_type: The type.
    """
    means, log_cholesky = unconstrained["means"], unconstrained["log_cholesky"]
    k, d = means.shape
    components: Distribution
    if covariance_type in ("full", "tied"):
        rows, columns = torch.triu_indices(d, d, 1)
        matrices = []
        for packed in log_cholesky.expand(k, -1):
            matrix = torch.diag(packed[:d].exp())
            matrices.append(matrix.index_put((rows, columns), packed[d:]))
        upper = torch.stack(matrices)
        components = MultivariateNormal(means, scale_tril=torch.linalg.inv(upper).mT, validate_args=False)
    else:
        deviations = (-log_cholesky).exp().reshape(k, -1).expand(k, d)
        components = Independent(Normal(means, deviations, validate_args=False), 1, validate_args=False)
    weights = Categorical(logits=unconstrained["log_weights"], validate_args=False)
    return MixtureSameFamily(weights, components, validate_args=False)


def principal_components(x: Tensor, count: int) -> Tensor:
    """Return the coordinates (N, count) of centred samples (N, D) along the directions of largest variance.

    Raises:
        ValueError: If there are fewer directions than `count`.
    """
    if count > min(x.shape):
        raise ValueError(f"`principal_components` should be at most {min(x.shape)} for this data. Found {count}.")
    centred = x - x.mean(0)
    directions: Tensor = torch.linalg.svd(centred, full_matrices=False)[2][:count]
    return centred @ directions.mT


@lru_cache(maxsize=1)  # one seed's runs are built again for each variant
def _problem(config_json: str, seed: int) -> tuple[Tensor, GaussianParameters, float]:
    """Return the data, the common start, and the log-likelihood of the maximum that EM reaches from there."""
    config = Config.model_validate_json(config_json)
    generator = torch.Generator().manual_seed(seed)
    if config.data == "two_gaussians":
        x = datasets.two_gaussians(config.n_samples, separation=config.separation, generator=generator).inputs
    else:
        x = getattr(datasets, config.data)().inputs
    if config.standardised:
        if (x == x[0]).all(0).any():
            raise ValueError("`standardised` should be false for data with a feature that is constant.")
        x = x / x.std(0, correction=0)
    if config.principal_components:
        x = principal_components(x, config.principal_components)
    for _ in range(_STARTS - 1):
        with contextlib.suppress(ValueError):  # a component that closes in on a few samples has no maximum
            return x, *_start_and_maximum(config, x, generator)
    return x, *_start_and_maximum(config, x, generator)


def _start_and_maximum(config: Config, x: Tensor, generator: torch.Generator) -> tuple[GaussianParameters, float]:
    first = start(
        x,
        config.n_components,
        covariance_type=config.covariance_type,
        init=config.init,
        reg_covar=config.reg_covar,
        generator=generator,
    )
    for _ in range(config.em_steps):
        first, _ = em_step(first, x)
    return first, maximise_likelihood(first, x, tol=1e-10, max_iter=10_000).log_likelihood
