r"""Learning from one's own answers: which collapse does a stop prevent, and which one something else?

Images of digits, each seen in two views: noise is added and pixels are removed.

- ``simsiam``: SimSiam's embeddings predict each other, with a stop on the target or without it. The spectrum of the
  embeddings shows the collapse, which batch normalisation hides from their variance.
- ``dino``: a student follows the sharpened answers of a teacher, the running average of past students. The stop stands
  in the average and on the answers. Other methods: no average, so that the student is its own teacher, with the stop
  and without it.
- ``byol``: BYOL's predictions of the embeddings of such a teacher, with the same other methods.
- ``moco``: MoCo's embeddings are to be nearer to that of the other view, the key by such a teacher, than to the keys of
  earlier batches, with the same other methods.
- ``swav``: SwAV's scores predict the codes of the other view, a balanced assignment that is held. Other methods: codes
  without balance, the softmax of the scores, with their stop and without it.
- ``fixmatch``: few labels, and pseudo-labels for the other images: the class that the model itself finds in the first
  view, once it is confident. Other methods: the labels alone, and soft pseudo-labels, with their stop and without it.

N images, K outputs, D features of an embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from toolkit import unblock
from toolkit.adversarial.networks import mlp
from toolkit.datasets import Dataset
from toolkit.runner import Event, ExperimentConfig, Objective, Run
from toolkit.self_supervised import (
    BYOL_TARGET,
    DINO_TARGET,
    EMA_STUDENT,
    MOCO_KEY,
    SOFT_LABEL,
    byol_loss,
    dino_center,
    dino_loss,
    enqueue,
    fixmatch_loss,
    moco_loss,
    simsiam_loss,
    soft_label_loss,
    swav_loss,
)

from ._digits import digits_of
from ._embeddings import COLLAPSE, NEIGHBOURS, judged, spectrum_of, unit
from ._teachers import Teacher, without_average
from ._training import accuracy, gradient_of, learned, methods_of, run_of, trained
from ._views import Views

__all__ = ["Config", "run"]


class Config(ExperimentConfig):
    """Values of an experiment on self-supervised learning.

    Attributes:
        task: ``"simsiam"``, ``"dino"``, ``"byol"``, ``"moco"``, ``"swav"`` or ``"fixmatch"``; see the module.
        batch_size: Number of images in a batch; fixmatch: of images without labels.
        n_features: All but fixmatch: number of features of an embedding, D; dino: of outputs, K.
        n_prototypes: swav: the number of prototypes, K.
        width: Number of units in each hidden layer.
        noise: Standard deviation of the noise on pixels, which lie in [0, 1].
        removed: Share of the pixels that a view lacks; fixmatch: the second view.
        momentum: dino, byol and moco: weight of the past in the teacher's running average; in dino's centre it is 0.9.
        queue_size: moco: number of keys kept from earlier batches.
        temperature: moco: the temperature tau, by which cosines are divided.
        labelled: fixmatch: number of images of each class that have a label.
        threshold: fixmatch: confidence from which a pseudo-label counts.
    """

    task: Literal["simsiam", "dino", "byol", "moco", "swav", "fixmatch"]
    batch_size: Annotated[int, Field(ge=2)] = 256
    n_features: Annotated[int, Field(ge=2)] = 32
    n_prototypes: Annotated[int, Field(ge=2)] = 30
    width: Annotated[int, Field(ge=1)] = 64
    noise: Annotated[float, Field(ge=0)] = 0.25
    removed: Annotated[float, Field(ge=0, lt=1)] = 0.2
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.99
    queue_size: Annotated[int, Field(ge=1)] = 512
    temperature: Annotated[float, Field(gt=0)] = 0.2
    labelled: Annotated[int, Field(ge=1)] = 4
    threshold: Annotated[float, Field(gt=0, lt=1)] = 0.95


def run(config: Config, seed: int) -> Run:
    """Return one seeded run of the config's task."""
    tasks = {"simsiam": _simsiam, "swav": _swav, "fixmatch": _fixmatch}
    return tasks.get(config.task, _distilled)(config, seed)


# --- SimSiam ------------------------------------------------------------------------------------------------------


def _simsiam(config: Config, seed: int) -> Run:
    train, test, generator = _data(config, seed)
    encoder, predictor = _siamese(config, train.inputs, generator)
    parameters = _named(nn.ModuleDict({"encoder": encoder, "predictor": predictor}))
    views = _views(train.inputs, config, generator)

    def answers() -> tuple[Tensor, Tensor, Tensor, Tensor]:
        z1, z2 = encoder(views.first), encoder(views.second)
        return predictor(z1), predictor(z2), z1, z2

    def target() -> dict[str, Tensor]:
        p1, p2, z1, z2 = answers()
        slopes = [-_slope_of_cosine(p, z) / (2 * len(p)) for p, z in ((p1, z2), (p2, z1))]
        return gradient_of(torch.stack([p1, p2]), parameters, torch.stack(slopes))

    return Run(
        parameters=parameters,
        loss=lambda: simsiam_loss(*answers()),
        objective=NEIGHBOURS,
        evaluate=lambda: judged(encoder, train, test),
        optimizer=torch.optim.SGD(parameters.values(), lr=config.learning_rate, momentum=0.9),
        target=target,
        after_step=views.advance,
        events=[_FEW_DIRECTIONS],
        sweep=spectrum_of(encoder, test.inputs, config.n_features),
    )


def _siamese(config: Config, like: Tensor, generator: torch.Generator) -> tuple[nn.Module, nn.Module]:
    """Return encoder and predictor, both with batch normalisation."""
    features, hidden = config.n_features, config.n_features // 2
    encoder = nn.Sequential(
        *_layers([64, config.width], generator), _norm(config.width), nn.ReLU(),
        *_layers([config.width, features], generator), _norm(features),
    )  # fmt: skip
    predictor = nn.Sequential(
        *_layers([features, hidden], generator), _norm(hidden), nn.ReLU(), *_layers([hidden, features], generator)
    )
    return encoder.to(like), predictor.to(like)


# --- DINO, BYOL and MoCo ------------------------------------------------------------------------------------------


class _Distillation:
    """A student, its teacher and their centre, in the forms that are compared.

    Args:
        config: The values.
        seed: The seed of the run.
        average: Whether the teacher is an average; else it is the student itself.
    """

    def __init__(self, config: Config, seed: int, *, average: bool = True) -> None:
        self.train, self.test, generator = _data(config, seed)
        self._config = config
        if config.task == "byol":
            self.student, self._predictor = _siamese(config, self.train.inputs, generator)
        elif config.task == "moco":
            self.student, self._predictor = _siamese(config, self.train.inputs, generator)[0], nn.Identity()
            queue = torch.randn(config.queue_size, config.n_features, generator=generator)
            self.queue = unit(queue).to(self.train.inputs)
        else:
            widths = [config.width, config.n_features]
            student = nn.Sequential(*_layers([64, widths[0]], generator), nn.ReLU(), *_layers(widths, generator))
            self.student, self._predictor = student.to(self.train.inputs), nn.Identity()
        self.views = _views(self.train.inputs, config, generator)
        self.parameters = {**_named(self.student), **dict(self._predictor.named_parameters(prefix="predictor"))}
        momentum = 0.0 if config.task == "dino" else 0.9
        self.optimizer = torch.optim.SGD(self.parameters.values(), lr=config.learning_rate, momentum=momentum)
        self._teacher = Teacher(self.student, config.momentum if average else 0.0)
        self._outputs = self.train.inputs
        self.center = self.train.inputs.new_zeros(config.n_features)

    def outputs(self) -> tuple[Tensor, Tensor]:
        """Return the outputs of student and teacher for both views, (2, N, K) each."""
        views = (self.views.first, self.views.second)
        outputs = torch.stack(list(map(self._teacher.updated(), views)))
        self._outputs = outputs.detach()
        return torch.stack([self._predictor(self.student(view)) for view in views]), outputs

    def loss(self) -> Tensor:
        """Return the surrogate."""
        student, teacher = self.outputs()
        if self._config.task == "byol":
            return byol_loss(student[0], teacher[1]) + byol_loss(student[1], teacher[0])
        if self._config.task == "moco":
            return moco_loss(
                unit(student).flatten(0, 1),
                unit(teacher).flip(0).flatten(0, 1),
                self.queue,
                temperature=self._config.temperature,
            )
        return dino_loss(student, teacher, self.center)

    def slope(self, student: Tensor, teacher: Tensor) -> Tensor:
        """Return the gradient of the loss with respect to the student's outputs, with the stops."""
        wanted = teacher.flip(0)
        if self._config.task == "byol":
            return -2 * _slope_of_cosine(student, wanted) / student.shape[1]
        if self._config.task == "moco":
            return _slope_of_contrast(student, wanted, self.queue, self._config.temperature)
        sharpened = ((wanted - self.center) / 0.04).softmax(-1)
        return ((student / 0.1).softmax(-1) - sharpened).detach() / 0.1 / student[..., 0].numel()

    def judge(self) -> dict[str, float]:
        """Return the metrics."""
        return judged(self.student, self.train, self.test)

    def advance(self, step: int) -> None:
        """Keep the teacher and the centre or the keys of the step, and draw the next views."""
        self._teacher.advance()
        self.center = dino_center(self.center, self._outputs)
        if self._config.task == "moco":
            self.queue = enqueue(self.queue, unit(self._outputs[0]))
        self.views.advance(step)


def _distilled(config: Config, seed: int) -> Run:
    made = _Distillation(config, seed)
    stops = ({"byol": BYOL_TARGET, "dino": DINO_TARGET, "moco": MOCO_KEY}[config.task].name, EMA_STUDENT.name)

    def target() -> dict[str, Tensor]:
        student, teacher = made.outputs()
        return gradient_of(student, made.parameters, made.slope(student, teacher))

    def alone(opened: Sequence[str]) -> dict[str, Sequence[float]]:
        return learned(config, _Distillation(config, seed, average=False), opened)

    return run_of(made, NEIGHBOURS, target, events=[COLLAPSE], methods=without_average(config, alone, stops))


# --- SwAV ---------------------------------------------------------------------------------------------------------


class _Prototypes:
    """An encoder, its prototypes, and the scores of two views.

    Args:
        config: The values.
        seed: The seed of the run.
    """

    def __init__(self, config: Config, seed: int) -> None:
        self.train, self.test, generator = _data(config, seed)
        self.encoder, _ = _siamese(config, self.train.inputs, generator)
        drawn = torch.randn(config.n_prototypes, config.n_features, generator=generator)
        self.prototypes = nn.Parameter(drawn.to(self.train.inputs))
        self.parameters = {**_named(self.encoder), "prototypes": self.prototypes}
        self.views = _views(self.train.inputs, config, generator)
        self.advance = self.views.advance
        self.optimizer = torch.optim.SGD(self.parameters.values(), lr=config.learning_rate, momentum=0.9)

    def scores(self) -> Tensor:
        """Return the cosines of embeddings and prototypes, (2, N, K)."""
        embeddings = torch.stack([self.encoder(view) for view in (self.views.first, self.views.second)])
        return unit(embeddings) @ unit(self.prototypes).mT

    def loss(self) -> Tensor:
        """Return the surrogate."""
        return swav_loss(self.scores())

    def unbalanced(self) -> Tensor:
        """Return SwAV's loss with codes that are not balanced: DINO's without a centre."""
        scores = self.scores()
        nothing = scores.new_zeros(len(self.prototypes))
        return dino_loss(scores, scores, nothing, student_temperature=0.1, teacher_temperature=0.05)

    def judge(self) -> dict[str, float]:
        """Return the metrics."""
        return judged(self.encoder, self.train, self.test)


def _swav(config: Config, seed: int) -> Run:
    made = _Prototypes(config, seed)

    def target() -> dict[str, Tensor]:
        scores = made.scores()
        codes = torch.stack([_balanced(view) for view in scores.detach()]).flip(0)
        slope = ((scores / 0.1).softmax(-1) - codes).detach() / 0.1 / scores[..., 0].numel()
        return gradient_of(scores, made.parameters, slope)

    def unbalanced(opened: Sequence[str]) -> dict[str, Sequence[float]]:
        itself = _Prototypes(config, seed)
        with unblock(*opened):
            return trained(config, itself.unbalanced, itself.optimizer, itself.advance, itself.judge)

    others = {
        "codes without balance, with the stop": partial(unbalanced, ()),
        "codes without balance, without the stop": partial(unbalanced, (DINO_TARGET.name,)),
    }
    return run_of(
        made,
        NEIGHBOURS,
        target,
        events=[_FEW_DIRECTIONS],
        sweep=spectrum_of(made.encoder, made.test.inputs, config.n_features),
        methods=methods_of(config, others),
    )


def _balanced(scores: Tensor) -> Tensor:
    """Return three turns of Sinkhorn's algorithm as it is written, (N, K)."""
    codes = (scores / 0.05).exp()
    for _ in range(3):
        codes = codes / codes.sum(0)
        codes = codes / codes.sum(1, keepdim=True)
    return codes


# --- FixMatch -----------------------------------------------------------------------------------------------------


def _fixmatch(config: Config, seed: int) -> Run:
    made = _FewLabels(config, seed)
    model, views, parameters = made.model, made.views, made.parameters

    def target() -> dict[str, Tensor]:
        weak, strong = model(views.first), model(views.second)
        likely = weak.detach().softmax(-1)
        slope = strong.detach().softmax(-1) - nn.functional.one_hot(likely.argmax(-1), 10)
        slope = slope * (likely.amax(-1, keepdim=True) >= config.threshold) / len(slope)
        labelled = gradient_of(made.labelled(), parameters)
        pulled = gradient_of(strong, parameters, slope)
        return {name: labelled[name] + pulled[name] for name in parameters}

    def other(loss: Callable[[_FewLabels], Tensor], opened: Sequence[str]) -> dict[str, Sequence[float]]:
        its = _FewLabels(config, seed)
        with unblock(*opened):
            return trained(config, partial(loss, its), its.optimizer, its.advance, its.judge)

    others = {
        "labels alone": partial(other, _FewLabels.labelled, ()),
        "soft labels": partial(other, _FewLabels.soft, ()),
        "soft labels, without the stop": partial(other, _FewLabels.soft, (SOFT_LABEL.name,)),
    }
    objective = Objective(label="test accuracy", higher_is_better=True)
    return run_of(made, objective, target, methods=methods_of(config, others))


class _FewLabels:
    """A classifier, a few images with labels, and the views of images without.

    Args:
        config: The values.
        seed: The seed of the run.
    """

    def __init__(self, config: Config, seed: int) -> None:
        train, self.test, generator = _data(config, seed)
        model = mlp(64, 10, widths=[config.width], activation=nn.ReLU, generator=generator)
        self.model, self._threshold = nn.Sequential(*model).to(train.inputs), config.threshold
        order = torch.randperm(len(train.labels), generator=generator).to(train.labels.device)
        chosen = torch.cat([order[train.labels[order] == label][: config.labelled] for label in range(10)])
        self._images, self._labels = train.inputs[chosen], train.labels[chosen]
        self.views = _views(train.inputs, config, generator)
        self.advance, self.parameters = self.views.advance, _named(self.model)
        self.optimizer = torch.optim.SGD(self.parameters.values(), lr=config.learning_rate, momentum=0.9)

    def labelled(self) -> Tensor:
        """Return the cross entropy of the images with labels."""
        return nn.functional.cross_entropy(self.model(self._images), self._labels)

    def loss(self) -> Tensor:
        """Return the surrogate."""
        strong, weak = self.model(self.views.second), self.model(self.views.first)
        return self.labelled() + fixmatch_loss(strong, weak, threshold=self._threshold)

    def soft(self) -> Tensor:
        """Return the loss with soft pseudo-labels."""
        return self.labelled() + soft_label_loss(self.model(self.views.second), self.model(self.views.first))

    @torch.no_grad()
    def judge(self) -> dict[str, float]:
        """Return the metrics."""
        logits = self.model(self.test.inputs)
        p = logits.softmax(-1)
        return {
            "objective": accuracy(logits, self.test.labels),
            "entropy of the answers (nats)": torch.special.entr(p).sum(-1).mean().item(),
            "share of confident answers": (p.amax(-1) >= self._threshold).double().mean().item(),
        }


# --- shared parts -------------------------------------------------------------------------------------------------

_FEW_DIRECTIONS = Event(says="fewer than four directions were left", metric="effective rank", below=4.0)


def _data(config: Config, seed: int) -> tuple[Dataset, Dataset, torch.Generator]:
    return *digits_of(config), torch.Generator().manual_seed(seed)


def _views(images: Tensor, config: Config, generator: torch.Generator) -> Views:
    """Return views that are corrupted alike; for fixmatch the first one less."""
    weak = config.task == "fixmatch"
    return Views(
        images,
        config.batch_size,
        noise=(config.noise / 2 if weak else config.noise, config.noise),
        removed=(0.0 if weak else config.removed, config.removed),
        generator=generator,
    )


def _layers(sizes: Sequence[int], generator: torch.Generator) -> nn.Sequential:
    return mlp(sizes[0], sizes[1], widths=[], generator=generator)


def _norm(width: int) -> nn.Module:
    """Return batch normalisation by the statistics of the batch, also in evaluation: it has no state."""
    return nn.BatchNorm1d(width, affine=False, track_running_stats=False)


def _named(module: nn.Module) -> dict[str, Tensor]:
    return dict(module.named_parameters())


def _slope_of_cosine(p: Tensor, z: Tensor) -> Tensor:
    """Return the gradient of the cosine of p and z with respect to p, as a constant."""
    p, z = p.detach(), z.detach()
    cosine = (unit(p) * unit(z)).sum(-1, keepdim=True)
    slope: Tensor = (unit(z) - cosine * unit(p)) / p.norm(dim=-1, keepdim=True)
    return slope


def _slope_of_contrast(q: Tensor, k: Tensor, queue: Tensor, temperature: float) -> Tensor:
    """Return the gradient of the mean cross entropy of choosing k among the queue by q, all of length 1, by q."""
    query, key = unit(q.detach()), unit(k.detach())
    cosines = torch.cat([(query * key).sum(-1, keepdim=True), query @ queue.mT], -1)
    p = (cosines / temperature).softmax(-1)
    slope = ((p[..., :1] - 1) * key + p[..., 1:] @ queue) / temperature
    across: Tensor = (slope - (slope * query).sum(-1, keepdim=True) * query) / q.detach().norm(dim=-1, keepdim=True)
    return across / q[..., 0].numel()
