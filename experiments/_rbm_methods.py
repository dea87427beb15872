"""Ways to train a restricted Boltzmann machine without autograd, beside the variants of an experiment.

N images, V pixels, H hidden units, M persistent chains, T temperatures.
"""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import Annotated, Literal, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from toolkit.rbm import RBM, FusedTrainer
from toolkit.runner import Methods

__all__ = ["Estimator", "Measure", "Method", "batches", "methods"]

_DECAYS: dict[str, Callable[[float], float]] = {
    "none": lambda part: 1.0,
    "linear": lambda part: 1 - part,
    "cosine": lambda part: (1 + math.cos(math.pi * part)) / 2,
}

_TIMED_UPDATES = 50

_ROOMS = {
    "toolkit.rbm.BernoulliRBM": "toolkit.rbm.estimators",
    "sklearn.neural_network.BernoulliRBM": "sklearn.neural_network",
}

Estimator = Literal["toolkit.rbm.BernoulliRBM", "sklearn.neural_network.BernoulliRBM"]

Measure = Callable[[RBM], Mapping[str, float]]


class Method(BaseModel):
    """One way to train, by `toolkit.rbm.FusedTrainer`, with the same updates as autograd.

    Attributes:
        name: Its name in the report.
        learning_rate: Step size of the first update.
        decay: Decay of the step size until the last update: ``"none"``, or to 0 by ``"linear"`` or ``"cosine"``.
        gibbs_steps: Number of Gibbs steps in each update.
        chains: M, the number of chains that continue from one update to the next. None: chains start at the data.
        temperatures: T, the number of copies of each chain, at evenly spaced inverse temperatures from 0 to 1, which
            are swapped. 1: no tempering.
        fast_rate: Learning rate of the fast weights. None: no fast weights.
        offset_rate: The weight of each batch in the running means on which both layers are centred. None: no centring.
        weight_decay: Factor of the weight decay.
        average_from: The fraction of the updates from which on the mean of all parameters is judged. None: no
            averaging.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: Annotated[str, Field(min_length=1)]
    learning_rate: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    decay: Literal["none", "linear", "cosine"] = "none"
    gibbs_steps: Annotated[int, Field(ge=1)] = 1
    chains: Annotated[int, Field(ge=1)] | None = None
    temperatures: Annotated[int, Field(ge=1)] = 1
    fast_rate: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    offset_rate: Annotated[float, Field(gt=0, le=1)] | None = None
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    average_from: Annotated[float, Field(ge=0, lt=1)] | None = None

    @model_validator(mode="after")
    def _has_chains(self) -> Self:
        if self.chains is None and (self.temperatures > 1 or self.fast_rate is not None):
            raise ValueError("`chains` should be given beside `temperatures` or `fast_rate`")
        if self.temperatures > 1 and self.fast_rate is not None:
            raise ValueError("`fast_rate` should be left out beside several `temperatures`")
        return self


def methods(
    chosen: Sequence[Method],
    estimators: Sequence[Estimator],
    *,
    images: Tensor,
    batch_size: int | None,
    points: Sequence[int],
    start: Callable[[], RBM],
    measure: Measure,
    seed: int,
) -> Methods | None:
    """Return the methods of a config, ready to be trained; None if there are none.

    Args:
        chosen: Methods that make updates.
        estimators: scikit-learn estimators, fitted with their default settings.
        images: (N, V), zeros and ones of any type.
        batch_size: Images of an update. None: all images.
        points: The updates at which the metrics are computed; the last point is the number of updates.
        start: Returns the machine that each method starts from.
        measure: Computes the metrics of a machine.
        seed: Seeds all draws.
    """
    if not chosen and not estimators:
        return None
    train: dict[str, Callable[[], Mapping[str, Sequence[float]]]] = {
        method.name: partial(_train, method, images, batch_size, points, start, measure, seed) for method in chosen
    }
    times = {method.name: partial(_seconds, method, images, batch_size, start, seed) for method in chosen}
    for name in estimators:
        train[f"{name} at its defaults"] = partial(_fit, name, images, start, measure, seed)
    return Methods(label="update", steps=tuple(points), train=train, times=times)


def batches(n_images: int, size: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Yield batches of indices for ever; an epoch's last batch may be smaller."""
    while True:
        yield from torch.randperm(n_images, generator=generator).split(size)


def _train(
    method: Method,
    images: Tensor,
    batch_size: int | None,
    points: Sequence[int],
    start: Callable[[], RBM],
    measure: Measure,
    seed: int,
) -> dict[str, list[float]]:
    rbm = start()
    device = rbm.weights.device
    order, draws = torch.Generator().manual_seed(seed), torch.Generator(device).manual_seed(seed)
    chains = inverse_temperatures = None
    if method.chains is not None:
        chains = torch.randint(2, (method.chains, rbm.n_hidden), generator=order)
    if method.temperatures > 1:
        inverse_temperatures = torch.linspace(0, 1, method.temperatures, dtype=rbm.weights.dtype, device=device)
    trainer = FusedTrainer(
        rbm,
        batch_size=batch_size or len(images),
        steps=method.gibbs_steps,
        chains=chains,
        inverse_temperatures=inverse_temperatures,
        fast_rate=method.fast_rate,
        offset_rate=method.offset_rate,
        weight_decay=method.weight_decay,
        generator=draws,
    )
    following = batches(len(images), batch_size or len(images), order)
    average, averaged = deepcopy(rbm), 0
    updates = points[-1]
    found: dict[str, list[float]] = {}
    for update in range(updates + 1):
        if update in points:
            for name, value in measure(average if averaged else rbm).items():
                found.setdefault(name, []).append(value)
        if update == updates:
            break
        batch = images if batch_size is None else images[next(following)]
        part = update / updates
        trainer.step(batch, learning_rate=method.learning_rate * _DECAYS[method.decay](part))
        if method.average_from is not None and part >= method.average_from:
            averaged += 1
            with torch.no_grad():
                for mean, parameter in zip(average.parameters(), rbm.parameters(), strict=True):
                    mean.lerp_(parameter, 1 / averaged)
    return found


def _seconds(method: Method, images: Tensor, batch_size: int | None, start: Callable[[], RBM], seed: int) -> float:
    """Return the seconds of an update."""
    begin = 0.0

    def measure(rbm: RBM) -> dict[str, float]:
        nonlocal begin
        begin, since = time.perf_counter(), begin
        return {"seconds": (begin - since) / _TIMED_UPDATES}

    return _train(method, images, batch_size, (0, _TIMED_UPDATES), start, measure, seed)["seconds"][-1]


def _fit(
    name: Estimator, images: Tensor, start: Callable[[], RBM], measure: Measure, seed: int
) -> dict[str, list[float]]:
    rbm = start()
    make = importlib.import_module(_ROOMS[name]).BernoulliRBM
    fitted = make(n_components=rbm.n_hidden, random_state=seed, verbose=0).fit(images.cpu().numpy())
    with torch.no_grad():
        rbm.weights.copy_(torch.as_tensor(fitted.components_).mT)
        rbm.visible_bias.copy_(torch.as_tensor(fitted.intercept_visible_))
        rbm.hidden_bias.copy_(torch.as_tensor(fitted.intercept_hidden_))
    return {metric: [value] for metric, value in measure(rbm).items()}
