r"""Blocks that choose the curvature: robust regression by reweighted squares, and Newton's method on a surrogate.

Both tasks use the chemical measurements of wines.

- ``robust``: one measurement is predicted from the others by a linear model, after some of its values were spoilt. The
  surrogate is a weighted square (``reweighted``), or the half-quadratic form of the robust loss, in which holding the
  weights changes nothing but the curvature. Newton's method on the same surrogate starts at the same point.
- ``newton``: a small network tells the cultivars apart. Each update is a damped Newton step on one surrogate, by
  conjugate gradients. Its blocks leave the gradient alone and choose the matrix: the Gauss-Newton matrix with both in
  place, none with `HELD_OUTPUTS` open, the full Hessian with both open.

N samples, D features, C classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from toolkit import unblock
from toolkit.curvature import (
    MAJORISER,
    WEIGHTS,
    gauss_newton_loss,
    half_quadratic_loss,
    natural_gradient,
    reweighted_loss,
    robust_loss,
)
from toolkit.datasets import wine
from toolkit.runner import Event, ExperimentConfig, Objective, Run

from ._training import accuracy, followed, methods_of

__all__ = ["Config", "DampedNewton", "run"]


class Config(ExperimentConfig):
    """Values of an experiment on curvature.

    Attributes:
        task: ``"robust"`` or ``"newton"``; see the module.
        surrogate: robust: ``"reweighted"`` or ``"half_quadratic"``.
        kind: robust: the robust loss, as in `toolkit.curvature.robust_loss`.
        scale: robust: the residual from which a sample loses influence, in standard deviations of the measurement.
        spoilt: robust: share of the values that are spoilt.
        shift: robust: the error of a spoilt value, in standard deviations of the measurement.
        hidden: newton: number of units in the hidden layer.
        damping: newton: added to the diagonal of the matrix.
        iterations: newton: number of steps of conjugate gradients in an update.
    """

    task: Literal["robust", "newton"]
    surrogate: Literal["reweighted", "half_quadratic"] = "reweighted"
    kind: Literal["huber", "cauchy", "geman_mcclure", "welsch"] = "welsch"
    scale: Annotated[float, Field(gt=0)] = 1.5
    spoilt: Annotated[float, Field(ge=0, lt=0.5)] = 0.2
    shift: float = 6.0
    hidden: Annotated[int, Field(ge=1)] = 8
    damping: Annotated[float, Field(gt=0)] = 0.1
    iterations: Annotated[int, Field(ge=1)] = 20


def run(config: Config, seed: int) -> Run:
    """Return one seeded run of the config's task."""
    return {"robust": _robust, "newton": _newton}[config.task](config, seed)


class DampedNewton(torch.optim.Optimizer):
    r"""Subtract :math:`\eta (H + \lambda I)^{-1} g` of a surrogate, by conjugate gradients.

    Args:
        params: The parameters to update.
        loss: Computes the surrogate.
        lr: The step size, :math:`\eta`.
        damping: Added to the diagonal of the matrix, :math:`\lambda`.
        iterations: The largest number of steps of conjugate gradients.
    """

    def __init__(
        self, params: Sequence[Tensor], loss: Callable[[], Tensor], *, lr: float, damping: float, iterations: int
    ) -> None:
        super().__init__(params, {"lr": lr})
        self._loss, self._damping, self._iterations = loss, damping, iterations

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the parameters."""
        (group,) = self.param_groups
        value = self._loss()
        directions = natural_gradient(value, value, group["params"], damping=self._damping, iterations=self._iterations)
        with torch.no_grad():
            for parameter, direction in zip(group["params"], directions, strict=True):
                parameter.sub_(direction, alpha=group["lr"])


def _standardised(dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """Return the measurements, each of mean 0 and variance 1, and the cultivars."""
    data = wine(dtype=dtype)
    inputs = (data.inputs - data.inputs.mean(0)) / data.inputs.std(0)
    return inputs.to(device), data.labels.to(device)


# --- robust regression -----------------------------------------------------------------------------------------------


def _robust(config: Config, seed: int) -> Run:
    source = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, config.dtype)
    values, _ = _standardised(dtype, config.device)
    clean, inputs = values[:, 0], torch.cat([values[:, 1:], torch.ones_like(values[:, :1])], 1)
    spoilt = torch.rand(len(clean), generator=source).to(config.device) < config.spoilt
    outputs = clean + config.shift * spoilt
    surrogate, block = {"reweighted": (reweighted_loss, WEIGHTS), "half_quadratic": (half_quadratic_loss, MAJORISER)}[
        config.surrogate
    ]
    weights = torch.zeros(inputs.shape[1], dtype=dtype, device=config.device, requires_grad=True)

    def loss(at: Tensor) -> Tensor:
        return surrogate(outputs - inputs @ at, kind=config.kind, scale=config.scale).mean()

    def judge(at: Tensor) -> dict[str, float]:
        residuals = outputs - inputs @ at
        return {
            "objective": robust_loss(residuals, kind=config.kind, scale=config.scale).mean().item(),
            "mean absolute error at the sound samples": (clean - inputs @ at)[~spoilt].abs().mean().item(),
        }

    def evaluate() -> dict[str, float]:
        with torch.no_grad():
            return judge(weights)

    def target() -> Mapping[str, Tensor]:
        residuals = outputs - inputs @ weights.detach()
        u = (residuals / config.scale).square()
        influence = {
            "huber": residuals.clamp(-config.scale, config.scale),
            "cauchy": residuals / (1 + u),
            "geman_mcclure": residuals / (1 + u) ** 2,
            "welsch": residuals * (-u).exp(),
        }[config.kind]
        return {"weights": -inputs.T @ influence / len(inputs)}

    def newton(*opened: Any) -> dict[str, Sequence[float]]:
        at = torch.zeros_like(weights)

        def update(step: int) -> None:
            with unblock(*opened):
                slope = torch.autograd.functional.jacobian(loss, at)
                matrix = torch.autograd.functional.hessian(loss, at)
            at.sub_(torch.linalg.lstsq(matrix, slope[:, None]).solution[:, 0])

        return followed(config, update, lambda: judge(at))

    return Run(
        parameters={"weights": weights},
        loss=lambda: loss(weights),
        objective=Objective(label="robust loss (squared standard deviations per sample)", higher_is_better=False),
        evaluate=evaluate,
        optimizer=torch.optim.SGD([weights], lr=config.learning_rate),
        target=target,
        methods=methods_of(
            config, {"Newton's method with the block": newton, "Newton's method without it": partial(newton, block)}
        ),
    )


# --- Newton's method on a surrogate ----------------------------------------------------------------------------------


def _newton(config: Config, seed: int) -> Run:
    source = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, config.dtype)
    inputs, labels = _standardised(dtype, config.device)
    shapes = {"first": (inputs.shape[1], config.hidden), "bias": (config.hidden,), "second": (config.hidden, 3)}
    parameters = {
        name: (torch.randn(shape, generator=source, dtype=dtype) / shape[0] ** 0.5).to(config.device).requires_grad_()
        for name, shape in shapes.items()
    }

    def hidden() -> Tensor:
        return torch.tanh(inputs @ parameters["first"] + parameters["bias"])

    def cross_entropy(logits: Tensor) -> Tensor:
        value: Tensor = torch.nn.functional.cross_entropy(logits, labels)
        return value

    def loss() -> Tensor:
        return gauss_newton_loss(cross_entropy, hidden() @ parameters["second"], parameters.values())

    def evaluate() -> dict[str, float]:
        with torch.no_grad():
            logits = hidden() @ parameters["second"]
            return {"objective": cross_entropy(logits).item(), "accuracy": accuracy(logits, labels)}

    @torch.no_grad()
    def target() -> Mapping[str, Tensor]:
        """Backpropagation by hand."""
        h = hidden()
        residual = (h @ parameters["second"]).softmax(-1)
        residual[torch.arange(len(labels)), labels] -= 1
        residual /= len(labels)
        back = (residual @ parameters["second"].T) * (1 - h**2)
        return {"first": inputs.T @ back, "bias": back.sum(0), "second": h.T @ residual}

    return Run(
        parameters=parameters,
        loss=loss,
        objective=Objective(label="cross entropy of the training samples (nats)", higher_is_better=False, best=0.0),
        evaluate=evaluate,
        optimizer=DampedNewton(
            list(parameters.values()),
            loss,
            lr=config.learning_rate,
            damping=config.damping,
            iterations=config.iterations,
        ),
        target=target,
        events=[Event(says="some wines are still taken for another cultivar", metric="accuracy", below=0.9999)],
    )
