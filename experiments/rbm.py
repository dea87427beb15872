"""Contrastive divergence with its negative samples held constant, and differentiated through the chain that drew them.

A restricted Boltzmann machine learns by lowering the energy of the data and raising that of negative samples, which a
Gibbs chain draws from the machine itself. The chain uses the parameters, so a program can be differentiated through
it; the block keeps the gradient out.

- ``digits``: handwritten digits, pixels rounded to 0 and 1. Judged by the held-out images.
- ``bars_and_stripes``: every image of bars or of stripes, so that the best likelihood is known.

Both are judged by the exact log-likelihood: the states of the smaller layer are enumerated.

N images, V pixels, H hidden units, M persistent chains.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from experiments._config import ExperimentConfig
from experiments._training import Objective, Run
from toolkit.datasets import bars_and_stripes, digits
from toolkit.rbm import (
    RBM,
    Chain,
    base_rate_bias,
    cd_gradient,
    contrastive_divergence,
    gibbs,
    persistent_contrastive_divergence,
)

__all__ = ["Config", "run"]


class Config(ExperimentConfig):
    """Values of a contrastive-divergence experiment.

    Attributes:
        data: ``"digits"`` or ``"bars_and_stripes"``; see the module.
        side: bars_and_stripes: an image has side x side pixels.
        copies: bars_and_stripes: how often each image is used in an epoch, each time with a chain of its own.
        n_hidden: H; the exact likelihood takes time proportional to 2^H, or 2^V if that is less.
        chain: What a unit of the chain passes on; see `toolkit.rbm.gibbs`.
        gibbs_steps: Gibbs steps of each update.
        persistent_chains: M chains that go on from one update to the next. None: the chains start at the data.
        batch_size: Images of a training step. None: all of them.
    """

    data: Literal["digits", "bars_and_stripes"]
    side: Annotated[int, Field(ge=2, le=4)] = 3
    copies: Annotated[int, Field(ge=1)] = 1
    n_hidden: Annotated[int, Field(ge=1, le=20)]
    chain: Chain
    gibbs_steps: Annotated[int, Field(ge=1)]
    persistent_chains: Annotated[int, Field(ge=1)] | None = None
    batch_size: Annotated[int, Field(ge=1)] | None = None


def run(config: Config, seed: int) -> Run:
    """Return one seeded run of contrastive divergence."""
    generator = torch.Generator().manual_seed(seed)
    train, test = (images.to(config.device) for images in _images(config))
    rbm = RBM(train.shape[1], config.n_hidden, generator=generator, dtype=train.dtype, device=config.device)
    with torch.no_grad():
        rbm.visible_bias.copy_(base_rate_bias(train))
    parameters = dict(rbm.named_parameters())

    draws = torch.Generator(config.device).manual_seed(seed)
    batches = _batches(len(train), config.batch_size or len(train), generator)
    batch = next(batches)
    # What an update starts from; `loss` leaves it alone, `next_update` goes on.
    random_state = draws.get_state()
    chains = following = None
    if config.persistent_chains:
        chains = train[torch.randint(len(train), (config.persistent_chains,), generator=generator)]

    def loss() -> Tensor:
        nonlocal following
        draws.set_state(random_state)
        data, chain, steps = train[batch], config.chain, config.gibbs_steps
        if chains is None:
            return contrastive_divergence(rbm, data, steps=steps, chain=chain, generator=draws)
        surrogate, following = persistent_contrastive_divergence(
            rbm, data, chains, steps=steps, chain=chain, generator=draws
        )
        return surrogate

    def next_update(step: int) -> None:
        nonlocal batch, random_state, chains
        batch, random_state, chains = next(batches), draws.get_state(), following

    @torch.no_grad()
    def target() -> Mapping[str, Tensor]:
        draws.set_state(random_state)
        start = train[batch] if chains is None else chains
        negative = gibbs(rbm, start, steps=config.gibbs_steps, chain=config.chain, generator=draws)
        return cd_gradient(rbm, train[batch], negative)

    @torch.no_grad()
    def evaluate_digits() -> dict[str, float]:
        log_partition = rbm.log_partition()
        return {
            "objective": -(rbm.free_energy(test).mean() + log_partition).item(),
            "training log-likelihood (nats per image)": -(rbm.free_energy(train).mean() + log_partition).item(),
        }

    @torch.no_grad()
    def evaluate_bars_and_stripes() -> dict[str, float]:
        log_likelihood = rbm.log_likelihood(test)
        return {
            "objective": log_likelihood.mean().item(),
            "probability of drawing a bar or stripe image": log_likelihood.exp().sum().item(),
        }

    if config.data == "digits":
        objective = Objective(label="held-out log-likelihood (nats per image)", higher_is_better=True)
    else:
        best = -math.log(len(test))
        objective = Objective(label="log-likelihood (nats per image)", higher_is_better=True, best=best)
    return Run(
        parameters=parameters,
        loss=loss,
        objective=objective,
        evaluate=evaluate_digits if config.data == "digits" else evaluate_bars_and_stripes,
        optimizer=torch.optim.SGD(parameters.values(), lr=config.learning_rate),
        target=target,
        after_step=next_update,
    )


def _images(config: Config) -> tuple[Tensor, Tensor]:
    """Return the images to train on and those to judge by: the same where there is no more than the training set."""
    dtype = getattr(torch, config.dtype)
    if config.data == "bars_and_stripes":
        images = bars_and_stripes(config.side, dtype=dtype).inputs
        return images.repeat(config.copies, 1), images
    images = (digits(dtype=dtype).inputs >= 0.5).to(dtype)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train, test = order.split([1437, 360])
    return images[train], images[test]


def _batches(n_images: int, size: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Yield batches of indices for ever; an epoch's last batch may be smaller."""
    while True:
        yield from torch.randperm(n_images, generator=generator).split(size)
