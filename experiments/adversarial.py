"""Adversarial training with the attack held constant, and with the loss differentiated through the attack.

A model is trained on adversarial inputs: an attack moves each input, inside a small ball, to the point where the model
errs most. The attack follows the model's gradient, so the adversarial input depends on the parameters. The block holds
the adversarial input constant.

- ``digits``: handwritten digits, a network, PGD. The objective is the share of held-out digits recognised under a
  stronger attack; the target is the gradient at the same examples as plain data.
- ``two_gaussians``: a linear classifier, whose worst case is known in closed form. The objective is the exact robust
  loss; the target is its gradient.

N samples, D features, C classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Annotated, Any, Literal

import numpy as np
import scipy.optimize
import scipy.special
import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from toolkit.adversarial import adversarial_loss, certify_linear, pgd, robust_loss_linear
from toolkit.datasets import Dataset, two_gaussians
from toolkit.runner import ExperimentConfig, Objective, Run

from ._digits import BALLS, Activation, Batches, Kind, digits_of, network, on_device, train_cleanly
from ._training import accuracy, gradient_of

__all__ = ["Config", "best_robust_loss", "run"]


Model = Callable[[Tensor], Tensor]


class Config(ExperimentConfig):
    """Values of an adversarial-training experiment.

    Attributes:
        data: ``"digits"`` or ``"two_gaussians"``; see the module.
        network: ``"linear"``, ``"mlp"`` (fully connected) or ``"cnn"`` (3 x 3 convolutions with stride 2).
        widths: Units, or channels, of the hidden layers.
        activation: The activation between the layers.
        norm: Norm of the ball.
        epsilon: Radius of the ball. Pixels lie in [0, 1].
        attack_steps: Number of steps of the attack in training.
        attack_step_size: Length of an attack step. None: 2.5 epsilon / steps.
        random_start: Whether the attack in training starts at a random point of the ball instead of the clean input.
        evaluation_steps: digits: steps of the attack that judges the model.
        clean_steps: Steps of ordinary training before the run, so that the run makes a trained model robust.
        batch_size: Number of samples in a training step.
        weight_decay: Weight decay of the optimiser.
        n_samples: two_gaussians: the number of samples, N.
        n_features: two_gaussians: the number of features, D.
        separation: two_gaussians: distance between the means, in standard deviations.
    """

    data: Literal["digits", "two_gaussians"]
    network: Kind
    widths: list[Annotated[int, Field(ge=1)]] = Field(default_factory=list)
    activation: Activation = "relu"
    norm: Literal["linf", "l2"]
    epsilon: Annotated[float, Field(ge=0)]
    attack_steps: Annotated[int, Field(ge=1)]
    attack_step_size: Annotated[float, Field(gt=0)] | None = None
    random_start: bool = False
    evaluation_steps: Annotated[int, Field(ge=1)] = 20
    clean_steps: Annotated[int, Field(ge=0)] = 0
    batch_size: Annotated[int, Field(ge=1)] = 128
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    n_samples: Annotated[int, Field(ge=2)] = 400
    n_features: Annotated[int, Field(ge=1)] = 2
    separation: Annotated[float, Field(ge=0)] = 4.0

    @model_validator(mode="after")
    def _closed_form_is_of_linear_models(self) -> Config:
        if self.data == "two_gaussians" and self.network != "linear":
            raise ValueError(f"`network` should be 'linear' for two Gaussians. Found {self.network!r}.")
        return self


def run(config: Config, seed: int) -> Run:
    """Return one seeded run of adversarial training."""
    return {"digits": _digits, "two_gaussians": _two_gaussians}[config.data](config, seed)


def _digits(config: Config, seed: int) -> Run:
    """Train a network; the target is the gradient at the examples as plain data, in a program without blocks."""
    test, model, batches = _after_clean_training(config, seed)
    attack = _Attack(config, seed, batches, (0.0, 1.0))

    def at_constants() -> Mapping[str, Tensor]:
        with torch.no_grad():
            example = attack(model, batches.inputs, batches.labels)
        return gradient_of(F.cross_entropy(model(example), batches.labels), dict(model.named_parameters()))

    @torch.no_grad()
    def under_attack() -> Mapping[str, float]:
        logits = model(attack.of_steps(config.evaluation_steps)(model, test.inputs, test.labels))
        return {
            "objective": accuracy(logits, test.labels),
            "robust loss (nats per sample)": F.cross_entropy(logits, test.labels).item(),
            "clean accuracy": accuracy(model(test.inputs), test.labels),
        }

    ball = f"{BALLS[config.norm]} {config.epsilon:g}, PGD-{config.evaluation_steps}"
    return Run(
        parameters=dict(model.named_parameters()),
        loss=lambda: adversarial_loss(model, batches.inputs, batches.labels, attack=attack),
        objective=Objective(label=f"robust accuracy on held-out digits ({ball})", higher_is_better=True),
        evaluate=under_attack,
        optimizer=_optimizer(model, config),
        target=at_constants,
        after_step=batches.advance,
    )


def _two_gaussians(config: Config, seed: int) -> Run:
    """Train a linear classifier; the target is the gradient of its exact robust loss, by Danskin's theorem."""
    data, model, batches = _after_clean_training(config, seed)
    attack = _Attack(config, seed, batches, None)
    parameters = dict(model.named_parameters())
    weight, bias = parameters.values()
    exact = partial(robust_loss_linear, weight, bias, epsilon=config.epsilon, norm=config.norm, bounds=None)

    @torch.no_grad()
    def exactly() -> Mapping[str, float]:
        margins = certify_linear(
            weight, bias, data.inputs, data.labels, epsilon=config.epsilon, norm=config.norm, bounds=None
        )
        return {
            "objective": exact(data.inputs, data.labels).item(),
            "exact robust accuracy": (margins > 0).double().mean().item(),
        }

    return Run(
        parameters=parameters,
        loss=lambda: adversarial_loss(model, batches.inputs, batches.labels, attack=attack),
        objective=Objective(
            label=f"exact robust loss (nats per sample, {BALLS[config.norm]} {config.epsilon:g})",
            higher_is_better=False,
            best=_best(config.model_dump_json(), seed),
        ),
        evaluate=exactly,
        optimizer=_optimizer(model, config),
        target=lambda: gradient_of(exact(batches.inputs, batches.labels), parameters),
        after_step=batches.advance,
    )


@lru_cache(maxsize=1)  # one seed's runs are built again for each variant
def _best(config_json: str, seed: int) -> float:
    config = Config.model_validate_json(config_json)
    data, *_ = _problem(config, seed)
    return best_robust_loss(data, epsilon=config.epsilon, norm=config.norm)


def best_robust_loss(data: Dataset, *, epsilon: float, norm: str) -> float:
    """Return the least robust loss of any linear classifier of two classes on `data`, in nats per sample.

    Without a box it is ``E softplus(epsilon |w|_* - s (w . x + b))``, s = 1 or -1 and ``|.|_*`` the dual norm: convex
    in (w, b). In Linf that norm is a sum of absolute values; w is split into its positive and its negative part, so
    that the sum is smooth. L-BFGS minimises these formulas.
    """
    x, sign = data.inputs.double().cpu().numpy(), 2.0 * data.labels.cpu().numpy() - 1
    split = norm == "linf"
    features = np.hstack([x, -x]) if split else x

    def loss_and_gradient(flat: np.ndarray[Any, Any]) -> tuple[float, np.ndarray[Any, Any]]:
        weight, bias = flat[:-1], flat[-1]
        size = weight.sum() if split else np.linalg.norm(weight)
        slope = np.ones_like(weight) if split else weight / max(size, 1e-300)
        excess = epsilon * size - sign * (features @ weight + bias)
        share = scipy.special.expit(excess) / len(x)
        gradient = share.sum() * epsilon * slope - features.T @ (share * sign)
        return np.logaddexp(0, excess).mean(), np.append(gradient, -(share * sign).sum())

    least = 0.0 if split else -math.inf
    start = np.append((features.T @ sign / len(x)).clip(least), 0.0)
    bounds = [(least, math.inf)] * features.shape[1] + [(-math.inf, math.inf)]
    options = {"maxiter": 10_000, "gtol": 1e-10, "ftol": 1e-15}
    found = scipy.optimize.minimize(
        loss_and_gradient, start, jac=True, bounds=bounds, method="L-BFGS-B", options=options
    )
    return float(found.fun)


class _Attack:
    """The attack of a config. A random start depends on the seed and the step alone, so that a loss can be repeated."""

    def __init__(self, config: Config, seed: int, batches: Batches, bounds: tuple[float, float] | None) -> None:
        self._ball: dict[str, Any] = {"epsilon": config.epsilon, "norm": config.norm, "bounds": bounds}
        self._config, self._seed, self._batches = config, seed, batches

    def __call__(self, model: Model, x: Tensor, labels: Tensor) -> Tensor:
        """Return the examples to train on."""
        config = self._config
        start = torch.Generator().manual_seed(1_000_003 * self._seed + self._batches.step)
        return pgd(
            model,
            x,
            labels,
            **self._ball,
            steps=config.attack_steps,
            step_size=config.attack_step_size,
            generator=start if config.random_start else None,
        )

    def of_steps(self, steps: int) -> Callable[[Model, Tensor, Tensor], Tensor]:
        """Return the attack that judges models: with another number of steps, from the clean input."""
        return partial(pgd, **self._ball, steps=steps)


def _after_clean_training(config: Config, seed: int) -> tuple[Dataset, nn.Module, Batches]:
    """Return the data that judge a model, the model after `clean_steps`, and the batches that follow."""
    data, model, batches = _problem(config, seed)
    model.load_state_dict(_clean_training(config.model_dump_json(), seed))
    for _ in range(config.clean_steps):
        batches.advance(0)
    return data, model, batches


@lru_cache(maxsize=1)  # one seed's runs are built again for each variant
def _clean_training(config_json: str, seed: int) -> dict[str, Tensor]:
    """Return the parameters of a model after `clean_steps` of ordinary training."""
    config = Config.model_validate_json(config_json)
    _, model, batches = _problem(config, seed)
    train_cleanly(model, batches, _optimizer(model, config), config.clean_steps)
    return model.state_dict()


def _problem(config: Config, seed: int) -> tuple[Dataset, nn.Module, Batches]:
    """Return the data that judge a model, the model at its start, and the batches of training data."""
    generator = torch.Generator().manual_seed(seed)
    if config.data == "digits":
        train, judged = digits_of(config)
    else:
        drawn = two_gaussians(
            config.n_samples,
            separation=config.separation,
            n_features=config.n_features,
            generator=generator,
            dtype=getattr(torch, config.dtype),
        )
        train = judged = on_device(drawn, config.device)
    model = network(config.network, train, widths=config.widths, activation=config.activation, generator=generator)
    return judged, model, Batches(train, config.batch_size, generator)


def _optimizer(model: nn.Module, config: Config) -> torch.optim.Optimizer:
    return torch.optim.Adam(
        model.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay, foreach=False
    )
