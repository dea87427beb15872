"""The methods of adversarial training side by side, and the effect of the blocks of one of them.

One method is trained update by update, with its blocks in place and with some of them open. Others are trained on the
same data from the same start by `toolkit.adversarial.train`, for as many epochs. All are judged by the share of
held-out images that they recognise: clean, after one step of an attack (FGSM), after many (PGD), after attacks towards
every other class (the objective), and at the end after an ensemble of attacks. Each attack runs on the images that
withstood the attacks before it. If a model resists one step and fails under many, it has learned the attack rather than
the task: catastrophic overfitting.

- ``digits``: scikit-learn's handwritten digits, 8 x 8, 30 % of them held out.
- ``mnist``: files in the format of MNIST. ``cifar10``: CIFAR-10 in its binary format. The user provides both, by path.

References:
    Wong, Rice & Kolter, "Fast is better than free: revisiting adversarial training", 2020, on catastrophic overfitting.

N images, C classes.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache, partial
from typing import Annotated, Literal, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator
from torch import Tensor, nn

from toolkit.adversarial import (
    evaluate_robustness,
    fgsm,
    mlp,
    multi_target,
    pgd,
    preactivation_resnet18,
    random_crop_flip,
    robust_accuracy,
    small_cnn,
)
from toolkit.adversarial import train as train_method
from toolkit.adversarial.balls import Norm
from toolkit.adversarial.training.methods import AWP, METHODS, BallArguments, Free, Method
from toolkit.adversarial.training.schedules import one_cycle
from toolkit.datasets import Dataset, cifar10, mnist
from toolkit.runner import ExperimentConfig, Methods, Objective, Run, Sweep

from ._adversarial_training_targets import TARGETS, Examples
from ._digits import BALLS, Batches, on_device, split_digits
from ._training import gradient_of

__all__ = ["Choice", "Config", "run"]

_ENSEMBLE = "accuracy under the ensemble"
_ONCE, _OFTEN = "accuracy after one step (FGSM)", "accuracy after many steps, too (PGD)"

_TARGETED_STEPS = 10  # on digits its accuracy is at most one point above the ensemble's, at the cost of PGD

_READERS: dict[str, Callable[..., Dataset]] = {"mnist": mnist, "cifar10": cifar10}

# Pixels attacked at once when models are judged; bounds the memory of large networks.
_PIXELS_AT_ONCE = 2**19

Name = Literal[
    "standard", "fgsm", "rs_fgsm", "pgd", "trades", "held_trades", "mart", "vat", "alp", "cure", "llr", "free", "awp"
]


class Choice(BaseModel):
    """One method of training, and its settings.

    Attributes:
        name: Its name in the report.
        method: The method, as named by `toolkit.adversarial.train`.
        settings: Arguments of the method that differ from their defaults.
        around: awp: the method whose loss is taken at the perturbed weights.
        average: Decay of a running mean of the parameters, which is judged in their place. None: no mean.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: Annotated[str, Field(min_length=1)]
    method: Name
    settings: dict[str, int | float | bool] = Field(default_factory=dict)
    around: Name = "pgd"
    average: Annotated[float, Field(gt=0, lt=1)] | None = None

    @model_validator(mode="after")
    def _takes_a_step(self) -> Self:
        x, labels, generator = torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64), torch.Generator()
        ball: BallArguments = {"epsilon": 0.1, "norm": "linf", "bounds": (0.0, 1.0)}
        model = mlp(2, 2, widths=[], generator=generator)
        try:
            self.make().step(model, x, labels, ball=ball, generator=generator, update=Tensor.backward, state={})
        except (TypeError, ValueError) as error:
            raise ValueError(f"{self.method}: {error}") from None
        return self

    @property
    def replays(self) -> int:
        """Updates on each batch."""
        method = self.make()
        return method.replays if isinstance(method, Free) else 1

    def make(self) -> Method:
        """Return the method.

        Raises:
            TypeError: If it has no such setting.
        """
        made: Method = (
            AWP(METHODS[self.around](), **self.settings)
            if self.method == "awp"
            else METHODS[self.method](**self.settings)
        )
        return made


class Config(ExperimentConfig):
    """Values of an experiment on the methods of adversarial training.

    Attributes:
        data: ``"digits"``, ``"mnist"`` or ``"cifar10"``; see the module.
        path: mnist, cifar10: the place of the files, as `toolkit.datasets.mnist` and `toolkit.datasets.cifar10` take
            it.
        held_out: The largest number of images that judge the models.
        network: ``"mlp"`` (fully connected), ``"cnn"`` (two 3 x 3 convolutions) or ``"resnet18"`` (pre-activation).
        widths: Units or channels of the hidden layers; for ``"resnet18"`` one number, the channels before they double.
        norm: Norm of the ball.
        epsilon: Radius of the ball. Pixels lie in [0, 1].
        trained: The method whose blocks are opened.
        batch_size: Number of images in an update.
        augment: Whether images are shifted by up to an eighth of their side, and in CIFAR-10 mirrored.
        evaluation_steps: Steps of PGD when the models are judged.
        ensemble: Radii of the balls in which the ensemble of attacks judges the trained model at the end. The other
            methods are judged by the ensemble in the ball of radius `epsilon`, unless there are no radii.
        methods: The other methods. They are trained for the number of whole epochs nearest to `steps` updates, at least
            one, and judged at the epochs nearest to `evaluate_every` updates.
    """

    data: Literal["digits", "mnist", "cifar10"]
    path: str | None = None
    held_out: Annotated[int, Field(ge=1)] = 1000
    network: Literal["mlp", "cnn", "resnet18"]
    widths: list[Annotated[int, Field(ge=1)]]
    norm: Literal["linf", "l2", "l1"] = "linf"
    epsilon: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    trained: Choice
    batch_size: Annotated[int, Field(ge=1)] = 128
    augment: bool = False
    evaluation_steps: Annotated[int, Field(ge=1)] = 20
    ensemble: list[Annotated[float, Field(gt=0, allow_inf_nan=False)]] = Field(default_factory=list)
    methods: list[Choice] = Field(default_factory=list)

    @field_validator("path")
    @classmethod
    def _is_there(cls, path: str | None, info: ValidationInfo) -> str | None:
        if path is not None and info.data.get("data") in _READERS:
            try:
                for train in (True, False):
                    _images(info.data["data"], path, train)
            except (OSError, ValueError) as error:
                raise ValueError(str(error).rstrip(".")) from None
        return path

    @field_validator("trained")
    @classmethod
    def _has_a_loss(cls, trained: Choice) -> Choice:
        if trained.method == "free":
            raise ValueError("'free' should stand among the other methods: it has no loss of its own")
        if trained.average is not None:
            raise ValueError("`average` should be left out here: parameters are averaged in the other methods alone")
        return trained

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        sizes = {"resnet18": 1, "cnn": 2}.get(self.network, len(self.widths))
        if len(self.widths) != sizes:
            raise ValueError(f"widths of {self.network!r} should be a list of {sizes}, found {len(self.widths)}")
        names = [method.name for method in self.methods]
        if len(set(names)) < len(names):
            raise ValueError("methods should have different names")
        if (self.data == "digits") != (self.path is None):
            raise ValueError("path should be given for data of your own, and for no other")
        return self


def run(config: Config, seed: int) -> Run:
    """Return one seeded run: a method of training, and the others beside it."""
    data, test = _data(config)
    ball: BallArguments = {"epsilon": config.epsilon, "norm": config.norm, "bounds": (0.0, 1.0)}
    model = _network(config, data, seed)
    method = config.trained.make()
    batches = _batches(data, config, seed)
    rate = one_cycle()
    optimizer = torch.optim.Adam(model.parameters(), lr=config.learning_rate * rate(0.0), foreach=False)

    def draws() -> torch.Generator:
        """Return the generator of a loss; it depends only on the seed and the step, so that a loss can be repeated."""
        return torch.Generator().manual_seed(1_000_003 * seed + batches.step)

    def loss() -> Tensor:
        model.train()
        return method.loss(model, batches.inputs, batches.labels, ball=ball, generator=draws())

    def after_step(step: int) -> None:
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate * rate(step / config.steps)
        batches.advance(step)

    def target() -> Mapping[str, Tensor]:
        model.train()
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        x, labels = batches.inputs, batches.labels
        with torch.no_grad():
            example = method.example(model, x, labels, ball=ball, generator=draws())
        stated = TARGETS[type(method)](Examples(method, model, x, labels, example, ball))
        gradients = gradient_of(stated, dict(model.named_parameters()))
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(buffers[name])
        return gradients

    def by_radius() -> Mapping[str, Sequence[float]]:
        return {_ENSEMBLE: [_under_the_ensemble(model, test, radius, config.norm) for radius in config.ensemble]}

    sweep = Sweep(label="radius of the ball", values=tuple(config.ensemble), evaluate=by_radius)
    scores = partial(_scores, test=test, ball=ball, steps=config.evaluation_steps)
    where = f"{BALLS[config.norm]} {config.epsilon:.3g}"
    return Run(
        parameters=dict(model.named_parameters()),
        loss=loss,
        objective=Objective(label=f"robust accuracy on held-out images, {where}", higher_is_better=True),
        evaluate=partial(scores, model),
        optimizer=optimizer,
        target=target,
        after_step=after_step,
        sweep=sweep if config.ensemble else None,
        methods=_methods(config, seed, data, test, scores) if config.methods else None,
    )


def _methods(
    config: Config,
    seed: int,
    data: Dataset,
    test: Dataset,
    scores: Callable[[nn.Module], dict[str, float]],
) -> Methods:
    """Return the other methods of a config, ready to be trained."""
    updates = -(-len(data.inputs) // config.batch_size)
    epochs, every = (max(1, round(number / updates)) for number in (config.steps, config.evaluate_every))

    def train(model: nn.Module, choice: Choice, epochs: int, judge: Callable[[nn.Module], None]) -> None:
        # A replay is one update: the method gets as many updates as the others, and is judged at its end.
        replays = choice.replays

        def evaluate(model: nn.Module) -> dict[str, float]:
            judge(model)
            return {}

        train_method(
            model,
            data.inputs,
            data.labels,
            method=choice.make(),
            epsilon=config.epsilon,
            norm=config.norm,
            epochs=max(1, round(epochs / replays)),
            batch_size=config.batch_size,
            learning_rate=config.learning_rate,
            average=choice.average,
            augment=_augmentation(config),
            generator=torch.Generator().manual_seed(seed),
            evaluate=evaluate,
            evaluate_every=every if replays == 1 else epochs,
        )

    @cache
    def at_the_start() -> dict[str, float]:
        return scores(_network(config, data, seed))

    def trained(choice: Choice) -> dict[str, Sequence[float]]:
        model, found = _network(config, data, seed), [at_the_start()]
        train(model, choice, epochs, lambda model: found.append(scores(model)))
        kept = found if choice.replays == 1 else found[-1:]
        values: dict[str, Sequence[float]] = {name: [each[name] for each in kept] for name in kept[0]}
        if config.ensemble:
            values[_ENSEMBLE] = [_under_the_ensemble(model, test, config.epsilon, config.norm)]
        return values

    def seconds(choice: Choice) -> float:
        model, count = _network(config, data, seed), choice.replays
        begin = time.perf_counter()
        train(model, choice, count, lambda model: None)
        return (time.perf_counter() - begin) / count

    return Methods(
        label="epoch",
        steps=tuple(dict.fromkeys([*range(0, epochs, every), epochs])),
        train={choice.name: partial(trained, choice) for choice in config.methods},
        times={choice.name: partial(seconds, choice) for choice in config.methods},
    )


def _scores(model: nn.Module, *, test: Dataset, ball: BallArguments, steps: int) -> dict[str, float]:
    """Return the share of held-out images that a model recognises, clean and after more and more attacks."""
    attacks = {
        _ONCE: _drawing_nothing(fgsm),
        _OFTEN: _drawing_nothing(pgd, steps=steps),
        "objective": _drawing_nothing(multi_target, steps=_TARGETED_STEPS),
    }
    with _also_without_gradients():
        found = evaluate_robustness(
            model, test.inputs, test.labels, **ball, attacks=attacks, batch_size=_images_at_once(test)
        )
    standing = int(found.correct.sum())
    counts = {"clean accuracy": standing}
    for name in attacks:
        standing -= found.broken[name]
        counts[name] = standing
    return {name: count / len(test.inputs) for name, count in reversed(counts.items())}


def _drawing_nothing(attack: Callable[..., Tensor], **settings: int) -> Callable[..., Tensor]:
    def attacked(*arguments: object, generator: torch.Generator, **options: object) -> Tensor:
        return attack(*arguments, **options, **settings)

    return attacked


def _under_the_ensemble(model: nn.Module, test: Dataset, epsilon: float, norm: Norm) -> float:
    size = _images_at_once(test)
    with _also_without_gradients():
        return robust_accuracy(model, test.inputs, test.labels, epsilon=epsilon, norm=norm, batch_size=size)


@contextmanager
def _also_without_gradients() -> Iterator[None]:
    """Allow a model whose units died in training: it is constant, and its accuracy is right."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`model` should have a gradient")
        yield


def _images_at_once(data: Dataset) -> int:
    return max(1, _PIXELS_AT_ONCE // data.inputs[0].numel())


def _batches(data: Dataset, config: Config, seed: int) -> Batches:
    generator, augment, dtype = torch.Generator().manual_seed(seed), _augmentation(config), getattr(torch, config.dtype)

    def prepare(images: Tensor) -> Tensor:
        pixels = _as_pixels(images, dtype)
        return pixels if augment is None else augment(pixels, generator=generator)

    return Batches(data, config.batch_size, generator, prepare)


def _augmentation(config: Config) -> Callable[..., Tensor] | None:
    if not config.augment:
        return None
    padding = {"digits": 1, "mnist": 2, "cifar10": 4}[config.data]
    return partial(random_crop_flip, padding=padding, flip=config.data == "cifar10")


def _data(config: Config) -> tuple[Dataset, Dataset]:
    """Return training images, and held-out images as pixels in [0, 1]: (N, channels, side, side)."""
    data, test = (_images(config.data, config.path, part) for part in (True, False))
    dtype = getattr(torch, config.dtype)
    inputs = data.inputs if data.inputs.dtype == torch.uint8 else data.inputs.to(dtype)
    held_out = _as_pixels(test.inputs[: config.held_out], dtype)
    parts = Dataset(inputs, data.labels, data.name), Dataset(held_out, test.labels[: config.held_out], test.name)
    return on_device(parts[0], config.device), on_device(parts[1], config.device)


@lru_cache(maxsize=2)  # both parts; every variant builds its run again
def _images(name: str, path: str | None, train: bool) -> Dataset:
    """Return one part of the data, (N, channels, side, side): bytes where files have bytes, else pixels in [0, 1].

    Raises:
        OSError: If a file is missing or cannot be read.
        ValueError: If a file has the wrong format.
    """
    if path is None:
        part = split_digits()[0 if train else 1]
        return Dataset(part.inputs.reshape(-1, 1, 8, 8), part.labels, part.name)
    data = _READERS[name](path, train=train)
    if data.inputs.dtype != torch.uint8:
        raise ValueError(f"images should have pixels of one byte; they have {data.inputs.dtype}")
    channels = 3 if name == "cifar10" else 1
    side = round((data.inputs.shape[1] / channels) ** 0.5)
    if channels * side**2 != data.inputs.shape[1]:
        raise ValueError(f"images should be square; they have {data.inputs.shape[1]} pixels")
    return Dataset(data.inputs.reshape(-1, channels, side, side), data.labels, data.name)


def _as_pixels(images: Tensor, dtype: torch.dtype) -> Tensor:
    return images.to(dtype) / 255 if images.dtype == torch.uint8 else images.to(dtype)


def _network(config: Config, data: Dataset, seed: int) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    classes, (channels, side) = int(data.labels.max()) + 1, data.inputs.shape[1:3]
    model: nn.Module
    if config.network == "mlp":
        features = data.inputs[0].numel()
        model = nn.Sequential(nn.Flatten(), *mlp(features, classes, widths=config.widths, generator=generator))
    elif config.network == "cnn":
        model = small_cnn(classes, channels, image_size=side, widths=config.widths, generator=generator)
    else:
        model = preactivation_resnet18(classes, channels, width=config.widths[0], generator=generator)
    return model.to(config.device, getattr(torch, config.dtype))
