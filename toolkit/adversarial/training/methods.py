"""Training methods as values: what a trainer minimises in each step, with the settings that belong to the method.

Every method has the same `Method.loss`; the radius and the norm of the ball come with each call, so that a schedule
may change them.

N samples, each of shape (...), C classes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypedDict

import torch
from torch import Tensor

from toolkit.adversarial.attacks.gradient import fgsm, pgd, rs_fgsm
from toolkit.adversarial.balls import Bounds, Norm
from toolkit.adversarial.training._terms import Attack, Model, cross_entropy, found_by, given
from toolkit.adversarial.training.losses import adversarial_loss
from toolkit.adversarial.training.trades import divergence_from_clean, held_trades_loss, nearby_pgd, trades_loss

__all__ = [
    "FGSM",
    "METHODS",
    "PGD",
    "RSFGSM",
    "TRADES",
    "BallArguments",
    "HeldTRADES",
    "Method",
    "Standard",
    "State",
    "Update",
]


class BallArguments(TypedDict):
    """The threat model of one step: `epsilon`, `norm` and `bounds` as the attacks take them."""

    epsilon: float | Tensor
    norm: Norm
    bounds: Bounds


# What a method keeps from one step to the next.
State = Mapping[str, Tensor]
# Differentiates a loss by the parameters (and by every leaf that it reaches), and moves the parameters.
Update = Callable[[Tensor], None]


@dataclass(frozen=True)
class Method(ABC):
    """What a trainer asks of a training method."""

    def example(
        self, model: Model, x: Tensor, labels: Tensor, *, ball: BallArguments, generator: torch.Generator
    ) -> Tensor:
        """Return the examples that the loss is taken at, (N, ...); `x` where a method needs none."""
        return x

    @abstractmethod
    def loss_at(self, model: Model, x: Tensor, labels: Tensor, example: Tensor) -> Tensor:
        """Return the loss at given examples: a scalar, in nats per sample."""

    def loss(
        self, model: Model, x: Tensor, labels: Tensor, *, ball: BallArguments, generator: torch.Generator
    ) -> Tensor:
        """Return the surrogate of this method: a scalar, in nats per sample.

        Args:
            model: Inputs (N, ...) to logits (N, C), in the mode in which it is trained.
            x: Clean inputs, (N, ...).
            labels: (N,).
            ball: ``{"epsilon": ..., "norm": ..., "bounds": ...}``.
            generator: Draws what the method draws.
        """
        return self.loss_at(model, x, labels, self.example(model, x, labels, ball=ball, generator=generator))

    def step(
        self,
        model: Model,
        x: Tensor,
        labels: Tensor,
        *,
        ball: BallArguments,
        generator: torch.Generator,
        update: Update,
        state: State,
    ) -> tuple[Tensor, State]:
        """Train on one batch, and return the loss (of the last update) and what is kept for the next batch.

        Args:
            model: As in `loss`, and so are the other arguments.
            x: Clean inputs, (N, ...).
            labels: (N,).
            ball: As in `loss`.
            generator: As in `loss`.
            update: Called with a loss as often as the method moves the parameters: it is to clear their gradients, run
                the backward pass, add up gradients of several processes and step the optimiser.
            state: What the step before returned; empty in the first.
        """
        loss = self.loss(model, x, labels, ball=ball, generator=generator)
        update(loss)
        return loss, state


@dataclass(frozen=True)
class Standard(Method):
    """Training on clean inputs: ``mean(-log p_y(x))``, for comparison."""

    def loss_at(self, model: Model, x: Tensor, labels: Tensor, example: Tensor) -> Tensor:
        """Return the mean cross entropy at the examples, which are the clean inputs."""
        return cross_entropy(model(example), labels).mean()


@dataclass(frozen=True)
class _Attacked(Method):
    """Methods that train on the examples of an attack on the label."""

    @abstractmethod
    def attack(self, ball: BallArguments, generator: torch.Generator) -> Attack:
        """Return the attack that is trained against."""

    def example(
        self, model: Model, x: Tensor, labels: Tensor, *, ball: BallArguments, generator: torch.Generator
    ) -> Tensor:
        """Return the examples that the attack finds."""
        return found_by(self.attack(ball, generator), model, x, labels)

    def loss_at(self, model: Model, x: Tensor, labels: Tensor, example: Tensor) -> Tensor:
        """Return `adversarial_loss` at given examples."""
        return adversarial_loss(model, x, labels, attack=given(example))


@dataclass(frozen=True)
class FGSM(_Attacked):
    """Adversarial training with one step of length epsilon from the clean input. Cheap, and overfits to itself.

    See `toolkit.adversarial.fgsm`.
    """

    def attack(self, ball: BallArguments, generator: torch.Generator) -> Attack:
        """Return the attack that is trained against."""
        return partial(fgsm, **ball)


@dataclass(frozen=True)
class RSFGSM(_Attacked):
    """Adversarial training with one step from a random start ("fast" adversarial training).

    See `toolkit.adversarial.rs_fgsm`.

    Attributes:
        step_size: Length of the step in units of epsilon.
    """

    step_size: float = 1.25

    def attack(self, ball: BallArguments, generator: torch.Generator) -> Attack:
        """Return the attack that is trained against."""
        return partial(rs_fgsm, **ball, step_size=times(self.step_size, ball["epsilon"]), generator=generator)


@dataclass(frozen=True)
class PGD(_Attacked):
    """Adversarial training with projected gradient ascent (Madry et al. 2018).

    See `toolkit.adversarial.pgd`.

    Attributes:
        steps: Number of gradient steps.
        step_size: Length of a step in units of epsilon. None: ``2.5 / steps``.
        random_start: Start at a random point of the ball, instead of at the clean input.
        gradient_dtype: Dtype in which the attack takes its gradients. None: as the model is.
    """

    steps: int = 10
    step_size: float | None = None
    random_start: bool = True
    gradient_dtype: torch.dtype | None = None

    def attack(self, ball: BallArguments, generator: torch.Generator) -> Attack:
        """Return the attack that is trained against."""
        return partial(
            pgd,
            **ball,
            steps=self.steps,
            step_size=step_length(self.step_size, self.steps, ball),
            gradient_dtype=self.gradient_dtype,
            generator=generator if self.random_start else None,
        )


@dataclass(frozen=True)
class TRADES(Method):
    """Cross entropy of the clean input, and `beta` times the divergence in the ball. See `trades_loss`.

    Attributes:
        beta: Weight of the divergence.
        steps: Number of gradient steps of the attack on the divergence.
        step_size: Length of a step in units of epsilon. None: ``2.5 / steps``.
        start: Standard deviation of the noise that the attack starts with, in the units of the inputs.
        gradient_dtype: Dtype in which the attack takes its gradients. None: as the model is.
    """

    beta: float = 6.0
    steps: int = 10
    step_size: float | None = None
    start: float = 1e-3
    gradient_dtype: torch.dtype | None = None

    def example(
        self, model: Model, x: Tensor, labels: Tensor, *, ball: BallArguments, generator: torch.Generator
    ) -> Tensor:
        """Return the inputs in the ball whose answer is farthest from the clean one, as found by the attack."""
        attack = partial(
            nearby_pgd,
            **ball,
            steps=self.steps,
            step_size=step_length(self.step_size, self.steps, ball),
            start=self.start,
            gradient_dtype=self.gradient_dtype,
            generator=generator,
        )
        return found_by(attack, model, x, labels, loss=divergence_from_clean(model, x))

    def loss_at(self, model: Model, x: Tensor, labels: Tensor, example: Tensor) -> Tensor:
        """Return `trades_loss` at given examples."""
        return trades_loss(model, x, labels, beta=self.beta, attack=given(example))


@dataclass(frozen=True)
class HeldTRADES(TRADES):
    """TRADES with the clean distribution held constant in the divergence. See `held_trades_loss`."""

    def loss_at(self, model: Model, x: Tensor, labels: Tensor, example: Tensor) -> Tensor:
        """Return `held_trades_loss` at given examples."""
        return held_trades_loss(model, x, labels, beta=self.beta, attack=given(example))


def times(factor: float, epsilon: float | Tensor) -> Tensor:
    """Return a length that is given in units of epsilon; one for all, or (N,)."""
    return factor * torch.as_tensor(epsilon, dtype=torch.float64)


def step_length(step_size: float | None, steps: int, ball: BallArguments) -> Tensor:
    """Return the length of a step of which `steps` are taken, float64; one for all, or (N,)."""
    return times(2.5 / steps if step_size is None else step_size, ball["epsilon"])


METHODS: dict[str, Callable[[], Method]] = {
    "standard": Standard,
    "fgsm": FGSM,
    "rs_fgsm": RSFGSM,
    "pgd": PGD,
    "trades": TRADES,
    "held_trades": HeldTRADES,
}
