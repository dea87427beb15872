"""Held weights and statistics with their blocks open: other losses, growing activations, a collapsed generator.

- ``focal``: a classifier of digits, some of whose labels are wrong, by focal loss. The paper's loss differentiates its
  weight; programs that hold the weight minimise another loss, the cross entropy without its first terms.
- ``circle``: embeddings of digits by circle loss. Open, a pair of different digits that is less than orthogonal is
  pushed together.
- ``renorm``: a classifier with batch renormalisation on small batches. Open, its layers have the gradient of inference,
  to which normalisation is a fixed scale, and the weights grow.
- ``consistency``: a consistency model of the first two principal components of the digits, which makes a point from
  noise in one step. Open, the predictions at two noise levels move towards each other.

N images, D features, C classes, T noise levels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from toolkit import unblock
from toolkit.adversarial.networks import mlp
from toolkit.datasets import Dataset, digits
from toolkit.runner import Event, ExperimentConfig, Methods, Objective, Run
from toolkit.weighting import (
    CONSISTENCY_TARGET,
    batch_renorm,
    circle_loss,
    consistency_function,
    consistency_loss,
    held_focal_loss,
    karras_times,
)

from ._digits import Batches, digits_of, network
from ._training import accuracy, descend, gradient_of, methods_of, trained

__all__ = ["Config", "run"]

_EPSILON = 1e-3
_SPREAD = "spread of the samples over that of the data"


class Config(ExperimentConfig):
    """Values of an experiment on held weights and statistics.

    Attributes:
        task: ``"focal"``, ``"circle"``, ``"renorm"`` or ``"consistency"``; see the module.
        batch_size: Number of images in a batch.
        widths: Number of units in each hidden layer.
        gamma: focal: exponent of the weight.
        label_noise: focal: share of the training labels that are replaced by random ones.
        n_features: circle: number of features of an embedding, D.
        margin: circle: the margin m.
        scale: circle: the scale, gamma in the paper.
        momentum: renorm: share of a batch in the running statistics.
        rmax: renorm: bound of the scale.
        dmax: renorm: bound of the shift.
        n_levels: consistency: number of noise levels, T.
        highest: consistency: standard deviation of the noise from which samples are made; that of the data is 0.5.
    """

    task: Literal["focal", "circle", "renorm", "consistency"]
    batch_size: Annotated[int, Field(ge=2)]
    widths: Annotated[list[Annotated[int, Field(ge=1)]], Field(min_length=1)]
    gamma: Annotated[int, Field(ge=0)] = 2
    label_noise: Annotated[float, Field(ge=0, lt=1)] = 0.2
    n_features: Annotated[int, Field(ge=2)] = 32
    margin: Annotated[float, Field(gt=0, lt=1)] = 0.25
    scale: Annotated[float, Field(gt=0)] = 16.0
    momentum: Annotated[float, Field(gt=0, lt=1)] = 0.05
    rmax: Annotated[float, Field(ge=1)] = 3.0
    dmax: Annotated[float, Field(ge=0)] = 5.0
    n_levels: Annotated[int, Field(ge=2)] = 20
    highest: Annotated[float, Field(gt=0.002)] = 5.0


def run(config: Config, seed: int) -> Run:
    """Return one seeded run of the config's task."""
    tasks = {"focal": _focal, "circle": _circle, "renorm": _renorm, "consistency": _consistency}
    return tasks[config.task](config, seed)


def _judge(logits: Tensor, labels: Tensor) -> dict[str, float]:
    return {
        "objective": nn.functional.cross_entropy(logits, labels).item(),
        "accuracy": accuracy(logits, labels),
        "mean confidence": logits.softmax(-1).amax(-1).mean().item(),
    }


_OBJECTIVE = Objective(label="held-out cross entropy (nats per image)", higher_is_better=False)


# --- focal loss ------------------------------------------------------------------------------------------------------


def _focal(config: Config, seed: int) -> Run:
    _, test = digits_of(config)
    model, batches = _noisy_classifier(config, seed)
    parameters = dict(model.named_parameters())

    def target() -> Mapping[str, Tensor]:
        logits = model(batches.inputs)
        p = torch.softmax(logits.detach(), -1)
        own = p.gather(1, batches.labels[:, None])
        residual = p - nn.functional.one_hot(batches.labels, p.shape[1])
        cotangent = (1 - own) ** config.gamma * residual / len(p)
        return gradient_of(logits, parameters, cotangent)

    def evaluate() -> dict[str, float]:
        with torch.no_grad():
            return _judge(model(test.inputs), test.labels)

    return Run(
        parameters=parameters,
        loss=lambda: held_focal_loss(model(batches.inputs), batches.labels, gamma=config.gamma),
        objective=_OBJECTIVE,
        evaluate=evaluate,
        optimizer=torch.optim.Adam(parameters.values(), lr=config.learning_rate),
        target=target,
        after_step=batches.advance,
        methods=_other_losses(config, seed, test),
    )


def _noisy_classifier(config: Config, seed: int) -> tuple[nn.Module, Batches]:
    """Return a classifier, and batches in which some labels are random."""
    train, _ = digits_of(config)
    generator = torch.Generator().manual_seed(seed)
    wrong = torch.rand(len(train.labels), generator=generator) < config.label_noise
    drawn = torch.randint(int(train.labels.max()) + 1, wrong.shape, generator=generator)
    noisy = torch.where(wrong, drawn, train.labels.cpu()).to(train.labels.device)
    model = network("mlp", train, widths=config.widths, activation="relu", generator=generator)
    return model, Batches(Dataset(train.inputs, noisy, train.name), config.batch_size, generator)


def _without_first_terms(logits: Tensor, labels: Tensor, *, n_terms: int) -> Tensor:
    """Return the mean of ``-log p`` without the first terms of its expansion in ``1 - p``."""
    log_p = logits.log_softmax(-1).gather(1, labels[:, None])
    missed = -torch.expm1(log_p)
    return (-log_p - sum(missed**j / j for j in range(1, n_terms + 1))).mean()


def _other_losses(config: Config, seed: int, test: Dataset) -> Methods:
    """Return training by cross entropy, and by the loss whose gradient the held weight gives."""
    losses: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "cross entropy": nn.functional.cross_entropy,
        f"cross entropy without its first {config.gamma} terms": partial(_without_first_terms, n_terms=config.gamma),
    }

    def train(loss: Callable[[Tensor, Tensor], Tensor]) -> dict[str, Sequence[float]]:
        model, batches = _noisy_classifier(config, seed)

        @torch.no_grad()
        def judge() -> dict[str, float]:
            return _judge(model(test.inputs), test.labels)

        return trained(
            config,
            lambda: loss(model(batches.inputs), batches.labels),
            torch.optim.Adam(model.parameters(), lr=config.learning_rate),
            batches.advance,
            judge,
        )

    return methods_of(config, {name: partial(train, loss) for name, loss in losses.items()})


# --- circle loss -----------------------------------------------------------------------------------------------------


def _circle(config: Config, seed: int) -> Run:
    train, test = digits_of(config)
    generator = torch.Generator().manual_seed(seed)
    width = train.inputs.shape[1]
    model = mlp(width, config.n_features, widths=config.widths, generator=generator).to(train.inputs)
    parameters = dict(model.named_parameters())
    batches = Batches(train, config.batch_size, generator)

    def unit(inputs: Tensor) -> Tensor:
        return nn.functional.normalize(model(inputs), dim=1)

    def target() -> Mapping[str, Tensor]:
        cosines = unit(batches.inputs)
        cosines = cosines @ cosines.T
        same = batches.labels[:, None] == batches.labels
        cotangent = _slopes_of_circle_loss(cosines.detach(), same, m=config.margin, gamma=config.scale)
        return gradient_of(cosines, parameters, cotangent)

    def evaluate() -> dict[str, float]:
        with torch.no_grad():
            x, y = unit(train.inputs), unit(test.inputs)
        nearest = train.labels[(y @ x.T).topk(5).indices].mode(1).values
        same, cosines = test.labels[:, None] == test.labels, y @ y.T
        return {
            "objective": (nearest == test.labels).double().mean().item(),
            "mean cosine of equal digits": cosines[same].mean().item(),
            "mean cosine of different digits": cosines[~same].mean().item(),
            "share of different digits with a cosine below 0": (cosines[~same] < 0).double().mean().item(),
        }

    return Run(
        parameters=parameters,
        loss=lambda: circle_loss(model(batches.inputs), batches.labels, m=config.margin, gamma=config.scale),
        objective=Objective(label="held-out accuracy of five neighbours", higher_is_better=True),
        evaluate=evaluate,
        optimizer=torch.optim.Adam(parameters.values(), lr=config.learning_rate),
        target=target,
        after_step=batches.advance,
    )


def _slopes_of_circle_loss(cosines: Tensor, same: Tensor, *, m: float, gamma: float) -> Tensor:
    """Return the gradient with respect to the similarities, (N, N), from the formulas of the paper, equations 9 and 10.

    Every anchor needs partners of both kinds, or its row is 0.
    """
    positive = same & ~torch.eye(len(same), dtype=torch.bool, device=same.device)
    to_p, to_n = (1 + m - cosines).clamp(min=0), (cosines + m).clamp(min=0)
    pulls = (-gamma * to_p * (cosines - 1 + m)).exp() * positive
    pushes = (gamma * to_n * (cosines - m)).exp() * ~same
    product = pulls.sum(1, keepdim=True) * pushes.sum(1, keepdim=True)
    z = product / (1 + product) / (product > 0).sum()
    pull, push = (each / each.sum(1, keepdim=True).clamp(min=1e-300) for each in (pulls, pushes))
    return gamma * z * (push * to_n - pull * to_p)


# --- batch renormalisation -------------------------------------------------------------------------------------------


class _Renormalised:
    """A classifier whose hidden layers are renormalised, with running statistics that `advance` moves.

    The loss can then be computed any number of times on a batch.
    """

    def __init__(self, config: Config, data: Dataset, generator: torch.Generator) -> None:
        self.config = config
        model = network("mlp", data, widths=config.widths, activation="relu", generator=generator)
        self.layers = [layer for layer in model if isinstance(layer, nn.Linear)]  # type: ignore[attr-defined]
        self.parameters = dict(model.named_parameters())
        self.seen: list[tuple[Tensor, Tensor]] = []
        self.running: list[tuple[Tensor, Tensor]] = []
        with torch.no_grad():
            h = data.inputs
            for layer in self.layers[:-1]:
                self.running.append(_moments(layer(h)))
                h = torch.relu(_by_formula(layer(h), *self.running[-1]))

    def __call__(self, x: Tensor, normalise: Callable[..., Tensor]) -> Tensor:
        """Return logits, and remember the statistics of the layers."""
        self.seen = []
        for layer, (mean, std) in zip(self.layers[:-1], self.running, strict=True):
            x = layer(x)
            with torch.no_grad():
                self.seen.append(_moments(x))
            x = torch.relu(normalise(x, mean, std))
        logits: Tensor = self.layers[-1](x)
        return logits

    def advance(self, step: int) -> None:
        """Move the running statistics towards those of the last call."""
        self.running = [
            (torch.lerp(mean, new_mean, self.config.momentum), torch.lerp(std, new_std, self.config.momentum))
            for (mean, std), (new_mean, new_std) in zip(self.running, self.seen, strict=True)
        ]


def _moments(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.mean(0), (x.var(0, correction=0) + _EPSILON).sqrt()


def _by_formula(x: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    return (x - mean) / std


def _renorm(config: Config, seed: int) -> Run:
    train, test = digits_of(config)
    generator = torch.Generator().manual_seed(seed)
    model = _Renormalised(config, train, generator)
    batches = Batches(train, config.batch_size, generator)
    renormalised = partial(batch_renorm, rmax=config.rmax, dmax=config.dmax, eps=_EPSILON)

    def witness(x: Tensor, mean: Tensor, std: Tensor) -> Tensor:
        """Return torch's batch normalisation, scaled and shifted by numbers."""
        own_mean, own_std = _moments(x.detach())
        r = (own_std / std).clamp(1 / config.rmax, config.rmax)
        d = ((own_mean - mean) / std).clamp(-config.dmax, config.dmax)
        return nn.functional.batch_norm(x, None, None, training=True, eps=_EPSILON) * r + d

    def loss(normalise: Callable[..., Tensor]) -> Tensor:
        return nn.functional.cross_entropy(model(batches.inputs, normalise), batches.labels)

    def evaluate() -> dict[str, float]:
        seen = model.seen
        with torch.no_grad():
            found = _judge(model(test.inputs, _by_formula), test.labels)
        model.seen = seen
        return {**found, "norm of the first layer": model.layers[0].weight.norm().item()}

    def after_step(step: int) -> None:
        model.advance(step)
        batches.advance(step)

    return Run(
        parameters=model.parameters,
        loss=partial(loss, renormalised),
        objective=_OBJECTIVE,
        evaluate=evaluate,
        optimizer=torch.optim.SGD(model.parameters.values(), lr=config.learning_rate),
        target=lambda: gradient_of(loss(witness), model.parameters),
        after_step=after_step,
    )


# --- consistency model -----------------------------------------------------------------------------------------------


class _Draws:
    """Pairs of noisy points for each step."""

    def __init__(self, config: Config, data: Tensor, generator: torch.Generator) -> None:
        self.config, self.data, self.generator = config, data, generator
        self.times = karras_times(config.n_levels, sigma_max=config.highest).to(data)
        self.advance(0)

    def advance(self, step: int) -> None:
        """Draw points, their noise, and two neighbouring levels."""
        size, g = (self.config.batch_size,), self.generator
        self.x = self.data[torch.randint(len(self.data), size, generator=g).to(self.data.device)]
        self.noise = torch.randn(self.x.shape, generator=g, dtype=self.x.dtype).to(self.x)
        level = torch.randint(self.config.n_levels - 1, size, generator=g).to(self.x.device)
        self.earlier, self.t = self.times[level], self.times[level + 1]


def _principal_components(config: Config, seed: int) -> tuple[Tensor, Tensor]:
    """Return two halves of the digits' first two principal components, with standard deviation 0.5."""
    inputs = digits(dtype=getattr(torch, config.dtype)).inputs
    _, _, axes = torch.linalg.svd(inputs - inputs.mean(0), full_matrices=False)
    points = (inputs - inputs.mean(0)) @ axes[:2].T
    points = 0.5 * points / points.std(0)
    order = torch.randperm(len(points), generator=torch.Generator().manual_seed(seed))
    one, other = points[order].to(config.device).chunk(2)
    return one, other


def _energy_distance(x: Tensor, y: Tensor) -> float:
    """Return ``2 E|x - y| - E|x - x'| - E|y - y'|`` in the units of the data, without bias."""
    within = [torch.cdist(z, z).sum() / (len(z) * (len(z) - 1)) for z in (x, y)]
    return float(2 * torch.cdist(x, y).mean() - within[0] - within[1])


def _consistency(config: Config, seed: int) -> Run:
    train, test = _principal_components(config, seed)
    learner = _Learner(config, seed, train)
    parameters, draws = learner.parameters, learner.draws

    def target() -> Mapping[str, Tensor]:
        late, early = (
            0.25 / ((t - 0.002) ** 2 + 0.25) * x + 0.5 * (t - 0.002) / (0.25 + t**2) ** 0.5 * learner.raw(x, t[:, 0])
            for t in (draws.t[:, None], draws.earlier[:, None])
            for x in [draws.x + t * draws.noise]
        )
        cotangent = 2 * (late - early).detach() / len(late)
        return gradient_of(late, parameters, cotangent)

    return Run(
        parameters=parameters,
        loss=lambda: learner.loss(draws.x, draws.noise),
        objective=Objective(label="energy distance to held-out points (units of the data)", higher_is_better=False),
        evaluate=lambda: learner.judge(test),
        optimizer=torch.optim.Adam(parameters.values(), lr=config.learning_rate),
        target=target,
        after_step=draws.advance,
        events=[Event(says="the samples shrank to less than half the spread of the data", metric=_SPREAD, below=0.5)],
        methods=_exact_pairs(config, seed, train, test),
    )


class _Learner:
    """A consistency model of points in the plane, its batches, and the noise from which it makes samples."""

    def __init__(self, config: Config, seed: int, data: Tensor) -> None:
        self.config, generator = config, torch.Generator().manual_seed(seed)
        self.network = mlp(3, 2, widths=config.widths, activation=nn.SiLU, generator=generator).to(data)
        self.parameters = dict(self.network.named_parameters())
        self.draws = _Draws(config, data, generator)
        self.noise = config.highest * torch.randn(500, 2, generator=generator, dtype=data.dtype).to(data)
        self.model = consistency_function(self.raw)

    def raw(self, x: Tensor, t: Tensor) -> Tensor:
        scaled = x / (t.square() + 0.25).sqrt()[:, None]
        found: Tensor = self.network(torch.cat([scaled, t.log()[:, None] / 4], 1))
        return found

    def loss(self, x: Tensor, noise: Tensor) -> Tensor:
        return consistency_loss(self.model, x, noise, self.draws.t, self.draws.earlier).mean()

    @torch.no_grad()
    def judge(self, test: Tensor) -> dict[str, float]:
        samples = self.model(self.noise, self.noise.new_full((len(self.noise),), self.config.highest))
        return {
            "objective": _energy_distance(samples, test),
            _SPREAD: (samples.std(0).mean() / test.std(0).mean()).item(),
            "training loss": self.loss(self.draws.x, self.draws.noise).item(),
        }


def _exact_pairs(config: Config, seed: int, train: Tensor, test: Tensor) -> Methods:
    """Return training on pairs without noise: the lower level follows from the higher one by the flow of the data.

    The flow is that of the training points, ``(x - E[data | x]) / t``, as in consistency distillation with an exact
    teacher.
    """
    means: list[Tensor] = []  # the draws of a step are the same for both methods

    def learn(opened: Sequence[str]) -> dict[str, Sequence[float]]:
        learner = _Learner(config, seed, train)
        optimizer = torch.optim.Adam(learner.parameters.values(), lr=config.learning_rate)
        for step in range(config.steps):
            draws = learner.draws
            t = draws.t[:, None]
            noisy = draws.x + t * draws.noise
            if step == len(means):
                means.append(torch.softmax(-(torch.cdist(noisy, train) / t).square() / 2, -1) @ train)
            mean = means[step]
            with unblock(*opened):
                descend(optimizer, learner.loss(mean, (noisy - mean) / t))
            draws.advance(step + 1)
        return {name: [value] for name, value in learner.judge(test).items()}

    return Methods(
        label="update",
        steps=(config.steps,),
        train={
            "exact pairs, with the block": partial(learn, []),
            "exact pairs, without the block": partial(learn, [CONSISTENCY_TARGET.name]),
        },
    )
