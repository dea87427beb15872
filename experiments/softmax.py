"""The leak of a softmax's shift: exactly zero, unless only one of its two uses is blocked.

- ``calibrate_digits``: a classifier of handwritten digits is overconfident; vector scaling (Guo, Pleiss, Sun &
  Weinberger, "On calibration of modern neural networks", 2017, section 4.2) gives each class a scale and a bias. The
  loss is `toolkit.softmax.cross_entropy`, on logits whose exponential overflows.
- ``fit_synthetic``: softmax regression by maximum likelihood, on data drawn from a known model, with a log-sum-exp that
  has one block for each use of its maximum. Opening only one of the two leaks.

N samples, D features, C classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Annotated, Any, Literal

import numpy as np
import scipy.optimize
import scipy.special
import torch
from pydantic import Field
from torch import Tensor

from toolkit import block, stop_gradient
from toolkit.datasets import Dataset, digits
from toolkit.runner import ExperimentConfig, Objective, Run
from toolkit.softmax import cross_entropy

from ._training import accuracy, descend

__all__ = ["INNER", "OUTER", "Config", "calibration_error", "half_blocked_logsumexp", "maximum_likelihood", "run"]

INNER = block(
    "softmax.inner_shift",
    "The maximum subtracted inside the log-sum-exp: the maximum added outside undoes it, so either both carry a "
    "gradient or neither does.",
)
OUTER = block(
    "softmax.outer_shift",
    "The maximum added back outside the log-sum-exp: it undoes the one subtracted inside, so either both carry a "
    "gradient or neither does.",
)


class Config(ExperimentConfig):
    """Values of a softmax experiment.

    Attributes:
        task: ``"calibrate_digits"`` or ``"fit_synthetic"``; see the module.
        overconfidence: calibrate_digits: factor on the classifier's logits; from about 100 on, naive exponentials
            overflow in float64.
        copies: calibrate_digits: the number of uses of each calibration image, each with new noise.
        noise: calibrate_digits: standard deviation of the noise on the copies' pixels, which lie in [0, 1].
        n_samples: fit_synthetic: the number of samples, N.
        n_features: fit_synthetic: the number of features, D.
        n_classes: fit_synthetic: the number of classes, C.
    """

    task: Literal["calibrate_digits", "fit_synthetic"]
    overconfidence: Annotated[float, Field(ge=1)] = 100.0
    copies: Annotated[int, Field(ge=1)] = 20
    noise: Annotated[float, Field(ge=0)] = 0.1
    n_samples: Annotated[int, Field(ge=2)] = 500
    n_features: Annotated[int, Field(ge=1)] = 4
    n_classes: Annotated[int, Field(ge=2)] = 5


def run(config: Config, seed: int) -> Run:
    """Return one seeded run of the config's task."""
    return {"calibrate_digits": _calibrate_digits, "fit_synthetic": _fit_synthetic}[config.task](config, seed)


def half_blocked_logsumexp(logits: Tensor) -> Tensor:
    r"""Return :math:`m_{outer} + \log \sum_c e^{x_c - m_{inner}}` over the last dimension, in nats.

    Both shifts are the maximum m, each behind its own block. With ``p = softmax(x)`` and e the indicator of the
    maximum (shared evenly between ties), the gradient is p while both are in place or both are open, ``p - e`` with
    only the inner one open and ``p + e`` with only the outer one.

    Args:
        logits: (\*, C).

    Returns:
        (\*).

    Example:
        >>> from toolkit import unblock
        >>> x = torch.tensor([1.0, 2.0, 2.0], requires_grad=True)
        >>> with unblock(INNER):
        ...     half_blocked_logsumexp(x).backward()
        >>> x.grad
        tensor([ 0.1554, -0.0777, -0.0777])
    """
    maximum = logits.amax(-1, keepdim=True)
    z = logits - stop_gradient(maximum, INNER)
    return (stop_gradient(maximum, OUTER) + z.exp().sum(-1, keepdim=True).log()).squeeze(-1)


def maximum_likelihood(inputs: Tensor, labels: Tensor, n_classes: int) -> float:
    """Return the lowest mean cross entropy of softmax regression, in nats per sample, by L-BFGS on its formulas.

    Args:
        inputs: (N, D).
        labels: (N,).
        n_classes: C.
    """
    x, onehot = inputs.double().numpy(), np.eye(n_classes)[labels.numpy()]
    weights = (x.shape[1], n_classes)

    def loss_and_gradient(flat: np.ndarray[Any, Any]) -> tuple[float, np.ndarray[Any, Any]]:
        weight, bias = flat[: -weights[1]].reshape(weights), flat[-weights[1] :]
        log_p = scipy.special.log_softmax(x @ weight + bias, axis=1)
        residual = (np.exp(log_p) - onehot) / len(x)
        return -(log_p * onehot).sum() / len(x), np.concatenate([(x.T @ residual).ravel(), residual.sum(0)])

    start = np.zeros((x.shape[1] + 1) * n_classes)
    options = {"maxiter": 10_000, "gtol": 1e-9, "ftol": 1e-15}
    return float(scipy.optimize.minimize(loss_and_gradient, start, jac=True, method="L-BFGS-B", options=options).fun)


def calibration_error(logits: Tensor, labels: Tensor, *, n_bins: int = 15) -> float:
    """Return the expected calibration error: mean over bins of ``|accuracy - confidence|``, weighted by their size.

    Args:
        logits: (N, C).
        labels: (N,).
        n_bins: Bins of equal width in confidence.

    References:
        Guo, Pleiss, Sun & Weinberger, "On calibration of modern neural networks", 2017, equation 3.
    """
    confidence, prediction = torch.softmax(logits, -1).max(-1)
    excess = (prediction == labels).double() - confidence.double()
    bins = (confidence * n_bins).long().clamp(max=n_bins - 1)
    return float(torch.zeros(n_bins, dtype=torch.float64).index_add(0, bins, excess).abs().sum() / len(labels))


def _calibrate_digits(config: Config, seed: int) -> Run:
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, config.dtype)
    data = digits(dtype=dtype)
    _, calibrate, test = _parts(data, generator)

    classifier = _trained_classifier(dtype, seed)
    images = data.inputs[calibrate].repeat(config.copies, 1)
    images = images + config.noise * torch.randn(images.shape, generator=generator, dtype=dtype)
    device = torch.device(config.device)
    logits = (config.overconfidence * classifier(images)).to(device)
    labels = data.labels[calibrate].repeat(config.copies).to(device)
    test_logits = (config.overconfidence * classifier(data.inputs[test])).to(device)
    test_labels = data.labels[test].to(device)

    scale = torch.ones(10, dtype=dtype, device=device, requires_grad=True)
    bias = torch.zeros(10, dtype=dtype, device=device, requires_grad=True)

    def evaluate() -> dict[str, float]:
        with torch.no_grad():
            scaled = test_logits * scale + bias
            return {
                "objective": torch.nn.functional.cross_entropy(scaled, test_labels).item(),
                "accuracy": accuracy(scaled, test_labels),
                "calibration error": calibration_error(scaled.cpu(), test_labels.cpu()),
            }

    def target() -> dict[str, Tensor]:
        residual = _residual(logits * scale + bias, labels)
        return {"scale": (residual * logits).sum(0), "bias": residual.sum(0)}

    optimizer = torch.optim.Adam([scale, bias], lr=config.learning_rate)
    return Run(
        parameters={"scale": scale, "bias": bias},
        loss=lambda: cross_entropy(logits * scale + bias, labels),
        objective=Objective(label="held-out cross entropy (nats per sample)", higher_is_better=False),
        evaluate=evaluate,
        optimizer=optimizer,
        target=target,
        after_step=_cosine_schedule(optimizer, config),
    )


def _fit_synthetic(config: Config, seed: int) -> Run:
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, config.dtype)
    device = torch.device(config.device)
    inputs, labels = _synthetic(config.n_samples, config.n_features, config.n_classes, dtype, generator)
    best = _best(config.n_samples, config.n_features, config.n_classes, dtype, seed)
    inputs, labels = inputs.to(device), labels.to(device)

    # Not zeros, which would tie all classes: a tie hides which class the maximum's gradient goes to.
    weight = 0.1 * torch.randn(config.n_features, config.n_classes, generator=generator, dtype=dtype)
    weight = weight.to(device).requires_grad_()
    bias = torch.zeros(config.n_classes, dtype=dtype, device=device, requires_grad=True)

    def loss() -> Tensor:
        logits = inputs @ weight + bias
        return (half_blocked_logsumexp(logits) - logits.gather(1, labels[:, None]).squeeze(1)).mean()

    def evaluate() -> dict[str, float]:
        with torch.no_grad():
            logits = inputs @ weight + bias
            return {
                "objective": torch.nn.functional.cross_entropy(logits, labels).item(),
                "accuracy": accuracy(logits, labels),
                "mean logit": logits.mean().item(),
            }

    def target() -> dict[str, Tensor]:
        residual = _residual(inputs @ weight + bias, labels)
        return {"weight": inputs.T @ residual, "bias": residual.sum(0)}

    return Run(
        parameters={"weight": weight, "bias": bias},
        loss=loss,
        objective=Objective(label="cross entropy (nats per sample)", higher_is_better=False, best=best),
        evaluate=evaluate,
        optimizer=torch.optim.SGD([weight, bias], lr=config.learning_rate),
        target=target,
    )


def _synthetic(
    n_samples: int, n_features: int, n_classes: int, dtype: torch.dtype, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(n_samples, n_features, generator=generator, dtype=dtype)
    truth = torch.randn(n_features, n_classes, generator=generator, dtype=dtype)
    return inputs, torch.multinomial(torch.softmax(inputs @ truth, -1), 1, generator=generator).squeeze(-1)


@lru_cache(maxsize=1)  # every variant builds its run again
def _best(n_samples: int, n_features: int, n_classes: int, dtype: torch.dtype, seed: int) -> float:
    generator = torch.Generator().manual_seed(seed)
    return maximum_likelihood(*_synthetic(n_samples, n_features, n_classes, dtype, generator), n_classes)


def _parts(data: Dataset, generator: torch.Generator) -> tuple[Tensor, ...]:
    """Return the indices of the images to train the classifier, to calibrate it, and to test it."""
    train, calibrate, test = torch.randperm(len(data.labels), generator=generator).split([797, 500, 500])
    return train, calibrate, test


@lru_cache(maxsize=1)  # every variant builds its run again
def _trained_classifier(dtype: torch.dtype, seed: int) -> Callable[[Tensor], Tensor]:
    """Return the logits of softmax regression after full-batch training; plain torch."""
    data = digits(dtype=dtype)
    train, *_ = _parts(data, torch.Generator().manual_seed(seed))
    inputs, labels = data.inputs[train], data.labels[train]
    weight = torch.zeros(inputs.shape[1], 10, dtype=inputs.dtype, requires_grad=True)
    bias = torch.zeros(10, dtype=inputs.dtype, requires_grad=True)
    optimizer = torch.optim.Adam([weight, bias], lr=0.1)
    for _ in range(100):
        descend(optimizer, torch.nn.functional.cross_entropy(inputs @ weight + bias, labels))
    return lambda images: (images @ weight + bias).detach()


def _residual(logits: Tensor, labels: Tensor) -> Tensor:
    """Return ``(softmax(logits) - onehot) / N`` by scipy, the gradient of the mean cross entropy."""
    values = logits.detach().cpu().numpy()
    residual = scipy.special.softmax(values, axis=1)
    residual[np.arange(len(residual)), labels.cpu().numpy()] -= 1
    return torch.from_numpy(residual / len(residual)).to(logits)


def _cosine_schedule(optimizer: torch.optim.Optimizer, config: Config) -> Callable[[int], None]:
    def after_step(step: int) -> None:
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate * 0.5 * (1 + math.cos(math.pi * step / config.steps))

    return after_step
