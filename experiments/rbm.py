"""Contrastive divergence with its negative samples held constant, and differentiated through the chain that drew them.

A restricted Boltzmann machine learns by lowering the energy of the data and raising that of negative samples, which a
Gibbs chain draws from the machine itself. The chain uses the parameters, so a program can be differentiated through
it; the block keeps the gradient out.

- ``digits``: handwritten digits, pixels rounded to 0 and 1. Judged by the held-out images.
- ``bars_and_stripes``: every image of bars or of stripes, so that the best likelihood is known.
- ``idx``: your own images, in two files of MNIST's format. Judged by the held-out images.

The objective of the first two is the exact log-likelihood, by enumerating the states of the smaller layer. Machines of
your own images may be too large for enumeration. Then log Z is estimated by annealing from below (AIS), which
overestimates the likelihood, and from above (reverse AIS), which does not. Only the two together are informative.

Autograd trains the variants. Other methods can be trained beside them without autograd, for more updates, and
scikit-learn estimators can be fitted.

N images, V pixels, H hidden units, M persistent chains.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
import torch
from pydantic import Field, field_validator, model_validator
from torch import Tensor

from toolkit.datasets import bars_and_stripes, digits, idx
from toolkit.rbm import (
    RBM,
    ais,
    base_rate_bias,
    cd_gradient,
    centered,
    centered_gradient,
    centering_offsets,
    contrastive_divergence,
    gibbs,
    persistent_contrastive_divergence,
    reverse_ais,
)
from toolkit.runner import ExperimentConfig, Objective, Run

from ._rbm_methods import Estimator, Measure, Method, batches, methods
from ._training import steps_of

__all__ = ["Config", "run"]

_EXACT = 20  # hidden units whose states are enumerated again and again


class Config(ExperimentConfig):
    """Values of a contrastive-divergence experiment.

    Attributes:
        data: ``"digits"``, ``"bars_and_stripes"`` or ``"idx"``; see the module.
        side: bars_and_stripes: an image has side x side pixels.
        copies: bars_and_stripes: the number of uses of each image in an epoch, each with its own chain.
        images: idx: the file of training images, in MNIST's format; it may be compressed (``.gz``).
        held_out: idx: the file of held-out images.
        threshold: idx: a pixel from this value on is 1, below it 0.
        n_hidden: Number of hidden units, H; at most 20 where the likelihood is exact, which takes time proportional to
            2^H, or 2^V if that is less.
        chain: The output of a unit in the chain, ``"sampled"``, ``"straight_through"`` or ``"mean_field"``; see
            `toolkit.rbm.gibbs`.
        gibbs_steps: Number of Gibbs steps in each update.
        persistent_chains: M, the number of chains that continue from one update to the next. None: chains start at the
            data.
        centered: Whether the variants take their steps in centred coordinates; see `toolkit.rbm.centered`.
        batch_size: Number of images in a training step. None: all images.
        annealing_chains: idx: number of chains that estimate log Z, from each side.
        inverse_temperatures: idx: number of temperatures of these chains.
        sampling_steps: idx: Gibbs steps, from images, after which the chains from above start.
        methods: Other methods, each a table; see `experiments._rbm_methods.Method`.
        updates_per_step: Updates of these methods per training step of the variants.
        estimators: scikit-learn estimators, fitted to the same images with H components and their own defaults:
            ``"toolkit.rbm.BernoulliRBM"`` or ``"sklearn.neural_network.BernoulliRBM"``.
    """

    data: Literal["digits", "bars_and_stripes", "idx"]
    side: Annotated[int, Field(ge=2, le=4)] = 3
    copies: Annotated[int, Field(ge=1)] = 1
    images: str | None = None
    held_out: str | None = None
    threshold: Annotated[int, Field(ge=1, le=255)] = 128
    n_hidden: Annotated[int, Field(ge=1)]
    chain: Literal["sampled", "straight_through", "mean_field"]
    gibbs_steps: Annotated[int, Field(ge=1)]
    persistent_chains: Annotated[int, Field(ge=1)] | None = None
    centered: bool = False
    batch_size: Annotated[int, Field(ge=1)] | None = None
    annealing_chains: Annotated[int, Field(ge=2)] = 100
    inverse_temperatures: Annotated[int, Field(ge=2)] = 1000
    sampling_steps: Annotated[int, Field(ge=1)] = 1000
    methods: list[Method] = Field(default_factory=list)
    updates_per_step: Annotated[int, Field(ge=1)] = 1
    estimators: list[Estimator] = Field(default_factory=list)

    @field_validator("images", "held_out")
    @classmethod
    def _is_an_idx_file(cls, path: str | None) -> str | None:
        if path is not None:
            if not Path(path).is_file():
                raise ValueError("should be a file" + (", not a folder" if Path(path).is_dir() else " that exists"))
            pixels = _pixels(path)
            if not pixels.numel():
                raise ValueError("the file should have at least one image; it has none")
            if pixels.dtype != torch.uint8:
                raise ValueError(f"the file should have pixels of one byte; it has {pixels.dtype}")
        return path

    @model_validator(mode="after")
    def _has_what_its_data_need(self) -> Self:
        if self.data == "idx":
            if self.images is None or self.held_out is None:
                raise ValueError('`images` and `held_out` should be given with data = "idx"')
            if _pixels(self.images).shape[1] != _pixels(self.held_out).shape[1]:
                raise ValueError("images and held_out should have the same number of pixels")
            brightest = int(_pixels(self.images).max())
            if brightest < self.threshold:
                raise ValueError(
                    f"threshold should be at most the brightest pixel of images, {brightest}; it is {self.threshold}, "
                    "so that every image would be black"
                )
        elif self.n_hidden > _EXACT:
            raise ValueError(f"n_hidden should be at most {_EXACT}, so that the likelihood is exact")
        names = [method.name for method in self.methods]
        if len(set(names)) < len(names):
            raise ValueError("methods should have different names")
        return self


def run(config: Config, seed: int) -> Run:
    """Return one seeded run of contrastive divergence."""
    train, test = (images.to(config.device) for images in _images(config))
    learner = _Learner(config, train, seed)
    measure = _MEASURES[config.data](config, train, test, seed)
    return Run(
        parameters=dict(learner.rbm.named_parameters()),
        loss=learner.loss,
        objective=_objective(config, test),
        evaluate=lambda: measure(learner.rbm),
        optimizer=torch.optim.SGD(learner.rbm.parameters(), lr=config.learning_rate),
        target=learner.target,
        after_step=learner.advance,
        methods=methods(
            config.methods,
            config.estimators,
            images=train,
            batch_size=config.batch_size,
            points=[config.updates_per_step * step for step in steps_of(config)],
            start=lambda: _start(config, train, torch.Generator().manual_seed(seed)),
            measure=measure,
            seed=seed,
        ),
    )


def _start(config: Config, images: Tensor, generator: torch.Generator) -> RBM:
    """Return a machine with random weights whose visible biases are those of the images."""
    dtype = getattr(torch, config.dtype)
    rbm = RBM(images.shape[1], config.n_hidden, generator=generator, dtype=dtype, device=config.device)
    with torch.no_grad():
        rbm.visible_bias.copy_(base_rate_bias(images))
    return rbm


class _Learner:
    """A machine, its batches and its chains; `loss` and `target` take the draws of the update, which `advance` ends.

    Args:
        config: The values.
        images: (N, V).
        seed: The seed of the run.
    """

    def __init__(self, config: Config, images: Tensor, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._config, self._images = config, images
        self.rbm = _start(config, images, generator)
        self._draws = torch.Generator(config.device).manual_seed(seed)
        self._random_state = self._draws.get_state()
        self._gibbs: dict[str, Any] = {"steps": config.gibbs_steps, "chain": config.chain, "generator": self._draws}
        self._batches = batches(len(images), config.batch_size or len(images), generator)
        self._batch = self._images_of(next(self._batches))
        self._chains: Tensor | None = None
        self._following: Tensor | None = None
        if config.persistent_chains:
            chosen = torch.randint(len(images), (config.persistent_chains,), generator=generator)
            self._chains = self._images_of(chosen)

    def _images_of(self, rows: Tensor) -> Tensor:
        return self._images[rows].to(self.rbm.weights.dtype)

    def loss(self) -> Tensor:
        """Return the surrogate."""
        self._draws.set_state(self._random_state)
        rbm, data = self.rbm, self._batch
        machine = centered(rbm, centering_offsets(rbm, data)) if self._config.centered else rbm
        if self._chains is None:
            return contrastive_divergence(machine, data, **self._gibbs)
        surrogate, self._following = persistent_contrastive_divergence(machine, data, self._chains, **self._gibbs)
        return surrogate

    @torch.no_grad()
    def target(self) -> Mapping[str, Tensor]:
        """Return the blocked gradient: the rule of contrastive divergence."""
        self._draws.set_state(self._random_state)
        first = self._batch if self._chains is None else self._chains
        gradient = cd_gradient(self.rbm, self._batch, gibbs(self.rbm, first, **self._gibbs))
        if not self._config.centered:
            return gradient
        return centered_gradient(gradient, centering_offsets(self.rbm, self._batch))

    def advance(self, step: int) -> None:
        """Keep the chains of the update, and take the next batch."""
        self._chains, self._random_state = self._following, self._draws.get_state()
        self._batch = self._images_of(next(self._batches))


def _objective(config: Config, test: Tensor) -> Objective:
    label = {
        "digits": "held-out log-likelihood (nats per image)",
        "bars_and_stripes": "log-likelihood (nats per image)",
        "idx": "held-out log-likelihood by AIS (nats per image)",
    }[config.data]
    best = -math.log(len(test)) if config.data == "bars_and_stripes" else None
    return Objective(label=label, higher_is_better=True, best=best)


def _measure_digits(config: Config, train: Tensor, test: Tensor, seed: int) -> Measure:
    @torch.no_grad()
    def measure(rbm: RBM) -> dict[str, float]:
        log_partition = rbm.log_partition()
        return {
            "objective": -(rbm.free_energy(test).mean() + log_partition).item(),
            "training log-likelihood (nats per image)": -(rbm.free_energy(train).mean() + log_partition).item(),
        }

    return measure


def _measure_bars_and_stripes(config: Config, train: Tensor, test: Tensor, seed: int) -> Measure:
    @torch.no_grad()
    def measure(rbm: RBM) -> dict[str, float]:
        log_likelihood = rbm.log_likelihood(test)
        return {
            "objective": log_likelihood.mean().item(),
            "probability of drawing a bar or stripe image": log_likelihood.exp().sum().item(),
        }

    return measure


def _measure_idx(config: Config, train: Tensor, test: Tensor, seed: int) -> Measure:
    """Return a measure by annealing, with the same random numbers each time."""
    reference = base_rate_bias(train)

    @torch.no_grad()
    def measure(rbm: RBM) -> dict[str, float]:
        draws = torch.Generator(config.device).manual_seed(seed)
        annealing: dict[str, Any] = {
            "inverse_temperatures": config.inverse_temperatures,
            "reference": reference.to(rbm.weights.dtype),
            "generator": draws,
        }
        energies = [rbm.free_energy(part.to(rbm.weights.dtype)).sum(dtype=torch.float64) for part in test.split(1000)]
        energy = float(torch.stack(energies).sum()) / len(test)
        lower = ais(rbm, chains=config.annealing_chains, **annealing)
        rows = torch.arange(config.annealing_chains, device=train.device) % len(train)
        samples = gibbs(rbm, train[rows].to(rbm.weights.dtype), steps=config.sampling_steps, generator=draws)
        upper = reverse_ais(rbm, samples, **annealing)
        return {
            "objective": -energy - lower.estimate,
            "held-out log-likelihood by reverse AIS (nats per image)": -energy - upper.estimate,
            "standard error of log Z by AIS (nats)": lower.standard_error,
        }

    return measure


_MEASURES: dict[str, Callable[[Config, Tensor, Tensor, int], Measure]] = {
    "digits": _measure_digits,
    "bars_and_stripes": _measure_bars_and_stripes,
    "idx": _measure_idx,
}


def _images(config: Config) -> tuple[Tensor, Tensor]:
    """Return the training images and the held-out images; they are the same where only a training set exists.

    Pixels are zeros and ones; images from files are bytes, to save memory.
    """
    dtype = getattr(torch, config.dtype)
    if config.data == "bars_and_stripes":
        images = bars_and_stripes(config.side, dtype=dtype).inputs
        return images.repeat(config.copies, 1), images
    if config.data == "idx":
        assert config.images is not None
        assert config.held_out is not None
        train, test = (_pixels(path).ge(config.threshold).to(torch.uint8) for path in (config.images, config.held_out))
        return train, test
    images = (digits(dtype=dtype).inputs >= 0.5).to(dtype)
    train, test = torch.from_numpy(np.random.RandomState(0).permutation(len(images))).split([1437, 360])
    return images[train], images[test]


@lru_cache(maxsize=2)  # the images and the held-out ones; every variant makes its run anew
def _pixels(path: str) -> Tensor:
    """Return the bytes (N, V) of a file of images."""
    images = idx(path)
    if images.ndim < 2:
        raise ValueError(f"the file should have images, of two dimensions or more; its sizes are {tuple(images.shape)}")
    return images.flatten(1)
