"""Training methods as objects: the surrogate loss that a trainer minimises in each step, with the method's settings.

Every method has the same `Method.loss`; the radius and the norm of the ball come with each call, so that a schedule
may change them.

N samples, each of shape (...), C classes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypedDict, cast

import torch
from torch import Tensor, nn

from toolkit._checks import integer, number
from toolkit.adversarial.attacks.gradient import fgsm, pgd, rs_fgsm
from toolkit.adversarial.balls import Bounds, Norm
from toolkit.adversarial.training._terms import (
    Attack,
    Model,
    clean_and_moved,
    cross_entropy,
    found_by,
    given,
    logits_at,
)
from toolkit.adversarial.training.free import free_loss
from toolkit.adversarial.training.losses import adversarial_loss
from toolkit.adversarial.training.mart import mart_loss
from toolkit.adversarial.training.pairing import alp_loss
from toolkit.adversarial.training.smoothness import cure_loss, linearity_pgd, llr_loss
from toolkit.adversarial.training.trades import divergence_from_clean, held_trades_loss, nearby_pgd, trades_loss
from toolkit.adversarial.training.vat import (
    Direction,
    power_direction,
    vat_direction,
    virtual_divergence,
    virtual_example,
)
from toolkit.adversarial.training.weights import awp_loss

__all__ = [
    "ALP",
    "AWP",
    "CURE",
    "FGSM",
    "LLR",
    "MART",
    "METHODS",
    "PGD",
    "RSFGSM",
    "TRADES",
    "VAT",
    "BallArguments",
    "Free",
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


# Tensors that a method keeps from one step to the next.
State = Mapping[str, Tensor]
# Differentiates a loss by the parameters (and by every leaf that it reaches), and moves the parameters.
Update = Callable[[Tensor], None]


@dataclass(frozen=True)
class Method(ABC):
    """A training method: the interface that the trainer calls."""

    @property
    def least_label(self) -> int | None:
        """The least allowed label of a sample (the greatest is C - 1); None if labels are not classes."""
        return 0

    def example(
        self, model: Model, x: Tensor, labels: Tensor, *, ball: BallArguments, generator: torch.Generator
    ) -> Tensor:
        """Return the examples at which the loss is taken, (N, ...); `x` if the method needs no examples."""
        return x

    @abstractmethod
    def loss_at(self, model: Model, x: Tensor, labels: Tensor, example: Tensor, *, ball: BallArguments) -> Tensor:
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
            generator: Draws the random numbers of the method.
        """
        example = self.example(model, x, labels, ball=ball, generator=generator)
        return self.loss_at(model, x, labels, example, ball=ball)

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
        """Train on one batch, and return the loss (of the last update) and the state for the next batch.

        Args:
            model: As in `loss`.
            x: Clean inputs, (N, ...).
            labels: (N,).
            ball: As in `loss`.
            generator: As in `loss`.
            update: Called with the loss for each move of the parameters. It should clear their gradients, run the
                backward pass, add up gradients of several processes and step the optimiser.
            state: The state that the previous step returned; empty in the first step.
        """
        loss = self.loss(model, x, labels, ball=ball, generator=generator)
        update(loss)
        return loss, state


@dataclass(frozen=True)
class Standard(Method):
    """Training on clean inputs: ``mean(-log p_y(x))``, for comparison."""

    def loss_at(self, model: Model, x: Tensor, labels: Tensor, example: Tensor, *, ball: BallArguments) -> Tensor:
        """Return the mean cross entropy at given examples."""
        return cross_entropy(logits_at(model, example), labels).mean()


@dataclass(frozen=True)
class _Attacked(Method):
    """Methods whose examples an attack finds by the labels."""

    @abstractmethod
    def attack(self, ball: BallArguments, generator: torch.Generator) -> Attack:
        """Return the attack that is trained against."""

    def example(
        self, model: Model, x: Tensor, labels: Tensor, *, ball: BallArguments, generator: torch.Generator
    ) -> Tensor:
        """Return the examples that the attack finds."""
        return found_by(self.attack(ball, generator), model, x, labels)

    def loss_at(self, model: Model, x: Tensor, labels: Tensor, example: Tensor, *, ball: BallArguments) -> Tensor:
        """Return `adversarial_loss` at given examples."""
        return adversarial_loss(model, x, labels, attack=given(example))


@dataclass(frozen=True)
class FGSM(_Attacked):
    """Adversarial training with one step of length epsilon from the clean input. Cheap, but overfits to that step.

    See `toolkit.adversarial.fgsm`.
    """

    def attack(self, ball: BallArguments, generator: torch.Generator) -> Attack:
        """Return the attack that is trained against."""
        return partial(fgsm, **_checked(ball))


@dataclass(frozen=True)
class RSFGSM(_Attacked):
    """Adversarial training with one step from a random start ("fast" adversarial training).

    See `toolkit.adversarial.rs_fgsm`.

    Attributes:
        step_size: Length of the step in units of epsilon.
    """

    step_size: float = 1.25

    def __post_init__(self) -> None:
        number("step_size", self.step_size, least=0)

    def attack(self, ball: BallArguments, generator: torch.Generator) -> Attack:
        """Return the attack that is trained against."""
        return partial(rs_fgsm, **_checked(ball), step_size=times(self.step_size, ball["epsilon"]), generator=generator)


@dataclass(frozen=True)
class PGD(_Attacked):
    """Adversarial training with projected gradient ascent (Madry et al. 2018).

    See `toolkit.adversarial.pgd`.

    Attributes:
        steps: Number of gradient steps.
        step_size: Length of a step in units of epsilon. None: ``2.5 / steps``.
        random_start: Start at a random point of the ball, instead of at the clean input.
        gradient_dtype: Dtype in which the attack takes its gradients. None: the dtype of the model.
    """

    steps: int = 10
    step_size: float | None = None
    random_start: bool = True
    gradient_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        _check_steps(self)

    def attack(self, ball: BallArguments, generator: torch.Generator) -> Attack:
        """Return the attack that is trained against."""
        return _ascent(pgd, self, ball, generator=generator if self.random_start else None)


@dataclass(frozen=True)
class TRADES(Method):
    """Cross entropy of the clean input, and `beta` times the divergence in the ball. See `trades_loss`.

    Attributes:
        beta: Weight of the divergence.
        steps: Number of gradient steps of the attack on the divergence.
        step_size: Length of a step in units of epsilon. None: ``2.5 / steps``.
        start: Standard deviation of the noise that the attack starts with, in the units of the inputs.
        gradient_dtype: Dtype in which the attack takes its gradients. None: the dtype of the model.
    """

    beta: float = 6.0
    steps: int = 10
    step_size: float | None = None
    start: float = 1e-3
    gradient_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        _check_steps(self)
        number("beta", self.beta, least=0)
        number("start", self.start, least=0)

    def example(
        self, model: Model, x: Tensor, labels: Tensor, *, ball: BallArguments, generator: torch.Generator
    ) -> Tensor:
        """Return the inputs in the ball whose prediction the attack moved farthest from the clean prediction."""
        attack = _ascent(nearby_pgd, self, ball, start=self.start, generator=generator)
        return found_by(attack, model, x, labels, loss=divergence_from_clean(model, x))

    def loss_at(self, model: Model, x: Tensor, labels: Tensor, example: Tensor, *, ball: BallArguments) -> Tensor:
        """Return `trades_loss` at given examples."""
        return trades_loss(model, x, labels, beta=self.beta, attack=given(example))


@dataclass(frozen=True)
class HeldTRADES(TRADES):
    """TRADES with the clean distribution held constant in the divergence. See `held_trades_loss`."""

    def loss_at(self, model: Model, x: Tensor, labels: Tensor, example: Tensor, *, ball: BallArguments) -> Tensor:
        """Return `held_trades_loss` at given examples."""
        return held_trades_loss(model, x, labels, beta=self.beta, attack=given(example))


@dataclass(frozen=True)
class MART(PGD):
    """Boosted cross entropy at examples of PGD, and the divergence, weighted by the clean error. See `mart_loss`.

    Attributes:
        beta: Weight of the divergence.
    """

    beta: float = 5.0

    def __post_init__(self) -> None:
        super().__post_init__()
        number("beta", self.beta, least=0)

    def loss_at(self, model: Model, x: Tensor, labels: Tensor, example: Tensor, *, ball: BallArguments) -> Tensor:
        """Return `mart_loss` at given examples."""
        return mart_loss(model, x, labels, beta=self.beta, attack=given(example))


@dataclass(frozen=True)
class ALP(PGD):
    """Cross entropy of clean inputs and of examples of PGD, and the distance of their logits. See `alp_loss`.

    Attributes:
        weight: Weight of the squared distance.
    """

    weight: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        number("weight", self.weight, least=0)

    def loss_at(self, model: Model, x: Tensor, labels: Tensor, example: Tensor, *, ball: BallArguments) -> Tensor:
        """Return `alp_loss` at given examples."""
        return alp_loss(model, x, labels, weight=self.weight, attack=given(example))


@dataclass(frozen=True)
class VAT(Method):
    """Cross entropy of the labelled clean inputs, and `vat_loss` of all inputs.

    A sample without a label has the label -1.

    Attributes:
        weight: Weight of `vat_loss`: alpha of the paper.
        iterations: Number of power iterations that find the direction. None: the exact direction.
        xi: Length of the probe of power iteration; see `power_direction`.
    """

    weight: float = 1.0
    iterations: int | None = None
    xi: float | None = None

    def __post_init__(self) -> None:
        number("weight", self.weight, least=0)
        if self.iterations is not None:
            integer("iterations", self.iterations)
        if self.xi is not None:
            number("xi", self.xi, above=0)

    @property
    def least_label(self) -> int:
        """The label -1 of samples without a label."""
        return -1

    def example(
        self, model: Model, x: Tensor, labels: Tensor, *, ball: BallArguments, generator: torch.Generator
    ) -> Tensor:
        """Return the inputs moved in the virtual adversarial direction; labels do not matter."""
        direction: Direction = vat_direction
        if self.iterations is not None:
            direction = partial(power_direction, iterations=self.iterations, xi=self.xi, generator=generator)
        return virtual_example(model, x, **_checked(ball), direction=direction)

    def loss_at(self, model: Model, x: Tensor, labels: Tensor, example: Tensor, *, ball: BallArguments) -> Tensor:
        """Return the cross entropy of the labelled samples, and the smoothness of all at given examples."""
        clean, moved = clean_and_moved(model, x, example)
        labelled = labels >= 0
        supervised = cross_entropy(clean[labelled], labels[labelled]).sum() / labelled.sum().clamp(min=1)
        return supervised + self.weight * virtual_divergence(clean, moved).mean()


@dataclass(frozen=True)
class CURE(Method):
    """Cross entropy of clean inputs, and the curvature of the loss in an adversarial direction. See `cure_loss`.

    Attributes:
        h: Length of the finite difference in units of epsilon. 1 measures the curvature across the ball.
        weight: Weight of the curvature.
    """

    h: float = 1.0
    weight: float = 4.0

    def __post_init__(self) -> None:
        number("h", self.h, least=0)
        number("weight", self.weight, least=0)

    def loss_at(self, model: Model, x: Tensor, labels: Tensor, example: Tensor, *, ball: BallArguments) -> Tensor:
        """Return `cure_loss`, which finds its own direction; `example` is not used."""
        norm = _checked(ball).get("norm", "linf")
        return cure_loss(model, x, labels, h=times(self.h, ball["epsilon"]), weight=self.weight, norm=norm)


@dataclass(frozen=True)
class LLR(_Attacked):
    """Cross entropy of clean inputs, and its distance from linear in the ball. See `llr_loss`.

    Attributes:
        weight: Weight of the distance from the tangent.
        slope_weight: Weight of the change along the tangent.
        steps: Number of gradient steps of the attack on the distance.
        step_size: Length of a step in units of epsilon. None: ``2.5 / steps``.
        gradient_dtype: Dtype in which the attack takes its gradients. None: the dtype of the model.
    """

    weight: float = 4.0
    slope_weight: float = 3.0
    steps: int = 10
    step_size: float | None = None
    gradient_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        _check_steps(self)
        number("weight", self.weight, least=0)
        number("slope_weight", self.slope_weight, least=0)

    def attack(self, ball: BallArguments, generator: torch.Generator) -> Attack:
        """Return the attack that finds the point of the ball where the loss is farthest from its tangent."""
        return _ascent(linearity_pgd, self, ball, generator=generator)

    def loss_at(self, model: Model, x: Tensor, labels: Tensor, example: Tensor, *, ball: BallArguments) -> Tensor:
        """Return `llr_loss` at given examples."""
        weights = {"weight": self.weight, "slope_weight": self.slope_weight}
        return llr_loss(model, x, labels, **weights, attack=given(example))


@dataclass(frozen=True)
class Free(Standard):
    """Free adversarial training: every replay of a batch moves weights and perturbation. See `free_loss`.

    The perturbation is kept from batch to batch. An epoch costs `replays` epochs of standard training.

    Attributes:
        replays: Number of updates on every batch.
    """

    replays: int = 8

    def __post_init__(self) -> None:
        integer("replays", self.replays)

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
        """Update the weights `replays` times on one batch, and keep ``{"perturbation": (N, ...)}`` for the next.

        A smaller batch uses and updates the first rows of the perturbation; a larger batch adds rows of zeros.
        """
        ball, kept = _checked(ball), state.get("perturbation", x[:0])
        missing = max(0, len(x) - len(kept))
        perturbation = torch.cat([kept.to(x), x.new_zeros(missing, *x.shape[1:])])
        for _ in range(self.replays):
            replay = free_loss(model, x, labels, perturbation=perturbation[: len(x)], **ball)
            update(replay.loss)
            perturbation = torch.cat([replay.next_perturbation(), perturbation[len(x) :]])
        return replay.loss, {"perturbation": perturbation}


@dataclass(frozen=True)
class AWP(Method):
    """Adversarial weight perturbation for any other method: its loss at the worst weights nearby. See `awp_loss`.

    Examples are found at the unperturbed weights; the weights are then perturbed against the loss at these examples.

    Attributes:
        method: The method whose loss is taken.
        gamma: Largest length of the perturbation of a weight, relative to the length of the weight.
    """

    method: Method = field(default_factory=PGD)
    gamma: float = 5e-3

    def __post_init__(self) -> None:
        if not isinstance(self.method, Method) or isinstance(self.method, AWP | Free):
            raise TypeError(
                "`method` should have a loss of its own, at which the weights are perturbed. "
                f"Found {type(self.method).__name__}."
            )
        number("gamma", self.gamma, least=0)

    @property
    def least_label(self) -> int | None:
        """The least label of the method."""
        return self.method.least_label

    def example(
        self, model: Model, x: Tensor, labels: Tensor, *, ball: BallArguments, generator: torch.Generator
    ) -> Tensor:
        """Return the examples of the method."""
        return self.method.example(model, x, labels, ball=ball, generator=generator)

    def loss_at(self, model: Model, x: Tensor, labels: Tensor, example: Tensor, *, ball: BallArguments) -> Tensor:
        """Return `awp_loss` of the method's loss at given examples."""
        if not isinstance(model, nn.Module):
            raise TypeError(f"`model` should be a torch.nn.Module. Found {type(model).__name__}.")
        return awp_loss(
            model, lambda model: self.method.loss_at(model, x, labels, example, ball=ball), gamma=self.gamma
        )


def _checked(ball: Any) -> BallArguments:
    """Return the threat model of a step; raise TypeError if it is no mapping with its radius."""
    if not isinstance(ball, Mapping) or "epsilon" not in ball:
        found = "no `epsilon`" if isinstance(ball, Mapping) else type(ball).__name__
        raise TypeError(f"`ball` should be a mapping with `epsilon`, `norm` and `bounds`. Found {found}.")
    return cast("BallArguments", ball)


def _check_steps(method: PGD | TRADES | LLR) -> None:
    """Raise ValueError or TypeError if `steps`, `step_size` or `gradient_dtype` of the method is invalid."""
    integer("steps", method.steps)
    if method.step_size is not None:
        number("step_size", method.step_size, least=0)
    dtype = method.gradient_dtype
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"`gradient_dtype` should be a floating-point torch.dtype, or None. Found {dtype!r}.")


def _ascent(attack: Attack, method: PGD | TRADES | LLR, ball: BallArguments, **options: object) -> Attack:
    """Return an attack with the steps of a method, their length, and the dtype of their gradients."""
    return partial(
        attack,
        **_checked(ball),
        steps=method.steps,
        step_size=step_length(method.step_size, method.steps, ball),
        gradient_dtype=method.gradient_dtype,
        **options,
    )


def times(factor: float, epsilon: float | Tensor) -> Tensor:
    """Return a length that is given in units of epsilon; one for all, or (N,)."""
    return factor * torch.as_tensor(epsilon, dtype=torch.float64)


def step_length(step_size: float | None, steps: int, ball: BallArguments) -> Tensor:
    """Return the length of one of `steps` steps, float64: one number for all samples, or (N,)."""
    return times(2.5 / steps if step_size is None else float(step_size), ball["epsilon"])


METHODS: dict[str, Callable[[], Method]] = {
    "standard": Standard,
    "fgsm": FGSM,
    "rs_fgsm": RSFGSM,
    "pgd": PGD,
    "trades": TRADES,
    "held_trades": HeldTRADES,
    "mart": MART,
    "vat": VAT,
    "alp": ALP,
    "cure": CURE,
    "llr": LLR,
    "free": Free,
    "awp": AWP,
}
