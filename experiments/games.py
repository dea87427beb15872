r"""Games of two players, trained by one backward pass and one optimiser.

- ``dirac``: the smallest GAN, a discriminator with one weight psi and a generator of one point theta. Its field is a
  rotation, of which no loss is the gradient. The block keeps each player's loss from the other's parameter; open, the
  losses cancel, and nobody moves. Other rules start at the same point: alternating play, consensus optimisation, the
  symplectic adjustment, LookAhead and LOLA.
- ``digits``: a GAN that learns the distribution of handwritten digits in their first two principal components. Opening
  a block trains the generator on the discriminator's loss too, or the discriminator on the generator's.

N samples of a batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from toolkit.datasets import digits
from toolkit.games import (
    alternating_loss,
    consensus_penalty,
    dirac_gan,
    discriminator_loss,
    generator_loss,
    lola_loss,
    lookahead_loss,
    simultaneous_loss,
    symplectic_penalty,
)
from toolkit.gradients import field_jacobian
from toolkit.runner import ExperimentConfig, Objective, Run, Sweep

from ._training import gradient_of, methods_of, perceptron, trained

__all__ = ["Config", "energy_distance", "principal_components", "run"]

# Factors for which the asymmetry of the corrected field is measured.
_SWEPT = (0.0, 0.25, 0.5, 1.0, 2.0)

Players = dict[str, Tensor]
Rule = Callable[[Players], Tensor]


class Config(ExperimentConfig):
    """Values of an experiment on games.

    Attributes:
        task: ``"dirac"`` or ``"digits"``; see the module.
        kind: Loss of the GAN, as in `toolkit.games.discriminator_loss`.
        weight: dirac: factor on the consensus and symplectic corrections of the other rules.
        batch_size: digits: the number of samples in a batch, N.
        width: digits: number of units in each hidden layer of both networks.
    """

    task: Literal["dirac", "digits"]
    kind: Literal["minimax", "non_saturating", "hinge", "wasserstein"]
    weight: Annotated[float, Field(gt=0)] = 0.5
    batch_size: Annotated[int, Field(ge=2)] = 128
    width: Annotated[int, Field(ge=1)] = 32


def run(config: Config, seed: int) -> Run:
    """Return one seeded run of the config's task."""
    return {"dirac": _dirac, "digits": _digits}[config.task](config, seed)


def energy_distance(x: Tensor, y: Tensor) -> float:
    """Return ``2 E|x - y| - E|x - x'| - E|y - y'|`` of two samples, zero for equal distributions.

    Args:
        x: (N, D).
        y: (M, D).

    References:
        Szekely and Rizzo, "Energy statistics: a class of statistics based on distances", 2013.
    """
    within = [torch.pdist(z).sum() * 2 / (len(z) * (len(z) - 1)) for z in (x, y)]
    return float(2 * torch.cdist(x, y).mean() - within[0] - within[1])


@lru_cache(maxsize=1)
def principal_components(dtype: torch.dtype = torch.float64) -> Tensor:
    """Return the digits in their first two principal components, each of variance 1, (1797, 2)."""
    images = digits(dtype=dtype).inputs
    left: Tensor = torch.linalg.svd(images - images.mean(0), full_matrices=False).U
    return left[:, :2] * math.sqrt(len(images))


# --- the Dirac-GAN ---------------------------------------------------------------------------------------------------


def _dirac(config: Config, seed: int) -> Run:
    losses = dirac_gan(kind=config.kind)

    def start() -> Players:
        angle = torch.rand((), generator=torch.Generator().manual_seed(seed), dtype=getattr(torch, config.dtype))
        place = 2 * torch.pi * angle.to(config.device)
        return {"psi": place.cos().requires_grad_(), "theta": place.sin().requires_grad_()}

    def simultaneous(players: Players) -> Tensor:
        return simultaneous_loss(losses, list(players.values()))

    def corrected(penalty: Callable[..., Tensor], weight: float) -> Rule:
        return lambda players: simultaneous(players) + weight * penalty(losses, list(players.values()))

    def anticipating(surrogate: Callable[..., Tensor]) -> Rule:
        return lambda players: surrogate(losses, list(players.values()), learning_rate=config.learning_rate)

    def target() -> Mapping[str, Tensor]:
        psi, theta = (value.detach() for value in players.values())
        return {"psi": theta * _slope(config.kind, psi * theta), "theta": psi * _judged(config.kind, psi * theta)}

    def sweep() -> Mapping[str, Sequence[float]]:
        origin = {name: torch.zeros_like(value).requires_grad_() for name, value in players.items()}
        penalties = {"consensus": consensus_penalty, "symplectic": symplectic_penalty}
        return {
            f"asymmetry of the field with the {name} correction": [
                _asymmetry(partial(corrected(penalty, weight), origin), origin) for weight in _SWEPT
            ]
            for name, penalty in penalties.items()
        }

    rules = {
        "alternating": anticipating(alternating_loss),
        "with the consensus correction": corrected(consensus_penalty, config.weight),
        "with the symplectic correction": corrected(symplectic_penalty, config.weight),
        "LookAhead": anticipating(lookahead_loss),
        "LOLA": anticipating(lola_loss),
    }
    players = start()
    return Run(
        parameters=players,
        loss=lambda: simultaneous(players),
        objective=Objective(label="distance from the equilibrium", higher_is_better=False, best=0.0),
        evaluate=lambda: _place(players),
        plane=("psi", "theta"),
        optimizer=torch.optim.SGD(players.values(), lr=config.learning_rate),
        target=target,
        sweep=Sweep(label="weight of the correction", values=_SWEPT, evaluate=sweep),
        methods=methods_of(config, {name: partial(_played, config, rule, start) for name, rule in rules.items()}),
    )


def _played(config: Config, rule: Rule, start: Callable[[], Players]) -> dict[str, Sequence[float]]:
    """Return the places of the players during gradient descent on the surrogate of a rule."""
    players = start()
    optimizer = torch.optim.SGD(players.values(), lr=config.learning_rate)
    return trained(config, lambda: rule(players), optimizer, lambda step: None, lambda: _place(players))


def _slope(kind: str, t: Tensor) -> Tensor:
    """Return the derivative of the discriminator's loss by ``psi * theta``."""
    if kind in ("minimax", "non_saturating"):
        return 1 / (1 + (-t).exp())
    return (t > -1).to(t) if kind == "hinge" else torch.ones_like(t)


def _judged(kind: str, t: Tensor) -> Tensor:
    """Return the derivative of the generator's loss by ``psi * theta``."""
    if kind in ("minimax", "non_saturating"):
        return -1 / (1 + ((t if kind == "non_saturating" else -t).exp()))
    return -torch.ones_like(t)


def _place(players: Players) -> dict[str, float]:
    """Return the distance from the equilibrium, and the coordinates."""
    coordinates = {name: value.item() for name, value in players.items()}
    return {"objective": math.hypot(*coordinates.values()), **coordinates}


def _asymmetry(loss: Callable[[], Tensor], players: Players) -> float:
    return field_jacobian(loss, players).asymmetry


# --- a GAN of digits -------------------------------------------------------------------------------------------------


def _digits(config: Config, seed: int) -> Run:
    source = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, config.dtype)
    points = principal_components(dtype)
    # Small outputs: the first generated points lie close together.
    generator, discriminator = (
        perceptron([2, config.width, config.width, outputs], nn.Tanh, generator=source, dtype=dtype, last=0.1)
        for outputs in (2, 1)
    )
    networks = nn.ModuleDict({"generator": generator, "discriminator": discriminator}).to(config.device)
    judged = torch.randn(500, 2, generator=source, dtype=dtype).to(config.device)
    held_out = points[torch.randperm(len(points), generator=source)[:500]].to(config.device)
    real, noise = torch.empty(0), torch.empty(0)

    def advance(step: int) -> None:
        nonlocal real, noise
        real = points[torch.randint(len(points), (config.batch_size,), generator=source)].to(config.device)
        noise = torch.randn(config.batch_size, 2, generator=source, dtype=dtype).to(config.device)

    def loss() -> Tensor:
        fake = generator(noise)
        value = discriminator_loss(discriminator, real, fake, kind=config.kind)
        return value + generator_loss(discriminator, fake, kind=config.kind)

    @torch.no_grad()
    def evaluate() -> dict[str, float]:
        fake = generator(judged)
        return {
            "objective": energy_distance(fake, held_out),
            "standard deviation of the generated points": fake.std(0).mean().item(),
        }

    def target() -> Mapping[str, Tensor]:
        """Two backward passes with a plain `detach`; each gives the gradient of one network."""
        fake = generator(noise)
        first = _terms(config.kind, discriminator(real), discriminator(fake.detach()))[0]
        second = _terms(config.kind, discriminator(real), discriminator(fake))[1]
        of_generator = gradient_of(second, dict(generator.named_parameters("generator")))
        return {**of_generator, **gradient_of(first, dict(discriminator.named_parameters("discriminator")))}

    advance(0)
    parameters = dict(networks.named_parameters())
    return Run(
        parameters=parameters,
        loss=loss,
        objective=Objective(label="energy distance from the digits", higher_is_better=False),
        evaluate=evaluate,
        # Adam divides by the size of a gradient: without a floor it would take steps along rounding errors.
        optimizer=torch.optim.Adam(
            parameters.values(), lr=config.learning_rate, betas=(0.5, 0.9), eps=1e-5, foreach=False
        ),
        target=target,
        after_step=advance,
    )


def _terms(kind: str, at_real: Tensor, at_fake: Tensor) -> tuple[Tensor, Tensor]:
    """Return the losses of both networks, written with torch's own functions."""
    cross_entropy = nn.functional.binary_cross_entropy_with_logits
    if kind == "hinge":
        margins = (1 - at_real).clamp(min=0).mean() + (1 + at_fake).clamp(min=0).mean()
        return margins, -at_fake.mean()
    if kind == "wasserstein":
        return at_fake.mean() - at_real.mean(), -at_fake.mean()
    rejected = cross_entropy(at_fake, torch.zeros_like(at_fake))
    accepted = -rejected if kind == "minimax" else cross_entropy(at_fake, torch.ones_like(at_fake))
    return cross_entropy(at_real, torch.ones_like(at_real)) + rejected, accepted
