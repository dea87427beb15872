r"""Contrastive divergence without noise: the update that drops a term, and the gradient that keeps it.

A restricted Boltzmann machine learns the images of bars and stripes. The machine is small enough to compute the
distribution of its chains after k Gibbs steps. Every update is therefore an expectation, and its only error is bias.
The block holds that distribution constant, as contrastive divergence does. The effect of opening the block depends on
the surrogate:

- ``kullback_leibler``: the difference of two divergences from which Hinton derived contrastive divergence. Open, its
  gradient has the third term, which he dropped.
- ``free_energy``: the difference of free energies that programs use. Open, the sampler is pulled up the energy.
- ``improved``: the loss of Du and others, in which the third term has its opposite sign. It has one more block, for the
  energy that judges the sampler.

Other methods start at the same parameters: the exact gradient, contrastive divergence with twice the steps, and the
improved loss. After training, the bias of each of these gradients is measured at the final parameters, for several
numbers of Gibbs steps.

References:
    Hinton, "Training products of experts by minimizing contrastive divergence", 2002, equation 5.
    Du, Li, Tenenbaum & Mordatch, "Improved contrastive divergence training of energy-based models", 2021.

S visible states.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from toolkit.datasets import bars_and_stripes
from toolkit.rbm import RBM
from toolkit.rbm.bias import (
    Divergence,
    bias,
    chain_distribution,
    data_distribution,
    exact_divergence,
    gradient_fields,
    visible_states,
)
from toolkit.runner import ExperimentConfig, Methods, Objective, Run, Sweep

from ._training import followed, gradient_of, methods_of

__all__ = ["Config", "run"]

# Below this a relative bias is rounding.
_ROUNDING = 1e-9

Update = Callable[[RBM, Tensor], Mapping[str, Tensor]]


class Config(ExperimentConfig):
    """Values of an experiment on the bias of contrastive divergence.

    Attributes:
        divergence: The surrogate that is minimised, ``"kullback_leibler"``, ``"free_energy"`` or ``"improved"``; see
            the module and `toolkit.rbm.bias.exact_divergence`.
        side: An image has side x side pixels.
        n_hidden: H; time and memory are proportional to 2^(side^2 + H).
        gibbs_steps: k, Gibbs steps of each update.
        swept_steps: Numbers of Gibbs steps for which the biases are measured after training.
    """

    divergence: Divergence
    side: Annotated[int, Field(ge=2, le=3)] = 3
    n_hidden: Annotated[int, Field(ge=1, le=10)]
    gibbs_steps: Annotated[int, Field(ge=1)]
    swept_steps: Annotated[list[Annotated[int, Field(ge=1)]], Field(min_length=1)]


def run(config: Config, seed: int) -> Run:
    """Return one seeded run: full-batch descent on an expectation, so that the seed only sets the start."""
    images = bars_and_stripes(config.side, dtype=getattr(torch, config.dtype)).inputs.to(config.device)
    rbm = _machine(config, seed)
    start = data_distribution(rbm, images)
    parameters = dict(rbm.named_parameters())
    steps = config.gibbs_steps

    def evaluate() -> dict[str, float]:
        return {**_judge(rbm, images), f"relative bias of CD-{steps}": _biases(rbm, start, steps)["blocked"]}

    @torch.no_grad()
    def target() -> Mapping[str, Tensor]:
        return _contrastive_divergence(rbm, start, steps=steps)

    def sweep() -> Mapping[str, list[float]]:
        found = [_biases(rbm, start, k) for k in config.swept_steps]
        twice = [_biases(rbm, start, 2 * k)["blocked"] for k in config.swept_steps]
        update = [each["blocked"] for each in found]
        third, improved = ([each[name] for each in found] for name in ("third_term", "improved"))
        return {
            "relative bias of CD-k": update,
            "bias with the third term, over that of CD-k": _ratios(third, update),
            "bias with its opposite sign, over that of CD-k": _ratios(improved, update),
            "bias with the third term, over that of CD-2k": _ratios(third, twice),
        }

    return Run(
        parameters=parameters,
        loss=lambda: exact_divergence(rbm, start, steps=steps, divergence=config.divergence),
        objective=Objective(
            label="log-likelihood (nats per image)", higher_is_better=True, best=-math.log(len(images))
        ),
        evaluate=evaluate,
        optimizer=torch.optim.SGD(parameters.values(), lr=config.learning_rate),
        # The improved loss has no closed form of its own: a derivative of the chain's distribution is in it.
        target=None if config.divergence == "improved" else target,
        sweep=Sweep(label="k, Gibbs steps", values=tuple(map(float, config.swept_steps)), evaluate=sweep),
        methods=_methods(config, seed, images, start),
    )


def _methods(config: Config, seed: int, images: Tensor, start: Tensor) -> Methods:
    """Return descent along other gradient fields, from the same parameters."""
    k = config.gibbs_steps
    updates: dict[str, Update] = {
        "the exact gradient": _exact,
        f"CD-{2 * k}": partial(_contrastive_divergence, steps=2 * k),
        "the third term with its opposite sign": partial(_improved, steps=k),
    }

    def train(update: Update) -> dict[str, Sequence[float]]:
        rbm = _machine(config, seed)

        def descend_along(step: int) -> None:
            found = update(rbm, start)
            with torch.no_grad():
                for name, parameter in rbm.named_parameters():
                    parameter.sub_(found[name], alpha=config.learning_rate)

        return followed(config, descend_along, lambda: _judge(rbm, images))

    return methods_of(config, {name: partial(train, update) for name, update in updates.items()})


def _machine(config: Config, seed: int) -> RBM:
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, config.dtype)
    return RBM(config.side**2, config.n_hidden, generator=generator, dtype=dtype, device=config.device)


@torch.no_grad()
def _judge(rbm: RBM, images: Tensor) -> dict[str, float]:
    return {"objective": rbm.log_likelihood(images).mean().item()}


def _exact(rbm: RBM, start: Tensor) -> dict[str, Tensor]:
    return _difference(rbm.model_statistics(), rbm.statistics(visible_states(rbm), start))


@torch.no_grad()
def _contrastive_divergence(rbm: RBM, start: Tensor, *, steps: int) -> dict[str, Tensor]:
    """Return the update of CD-k in closed form, without autograd."""
    states, end = visible_states(rbm), chain_distribution(rbm, start, steps=steps)
    return _difference(rbm.statistics(states, end), rbm.statistics(states, start))


def _improved(rbm: RBM, start: Tensor, *, steps: int) -> dict[str, Tensor]:
    loss = exact_divergence(rbm, start, steps=steps, divergence="improved")
    return gradient_of(loss, dict(rbm.named_parameters()))


def _difference(minuend: Mapping[str, Tensor], subtrahend: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: minuend[name] - subtrahend[name] for name in minuend}


def _biases(rbm: RBM, start: Tensor, steps: int) -> dict[str, float]:
    fields = gradient_fields(rbm, start, steps=steps)
    return {name: bias(field, fields["likelihood"]).relative for name, field in fields.items()}


def _ratios(values: Sequence[float], over: Sequence[float]) -> list[float]:
    """Return quotients; NaN where the denominator is only rounding."""
    return [a / b if min(a, b) > _ROUNDING else math.nan for a, b in zip(values, over, strict=True)]
