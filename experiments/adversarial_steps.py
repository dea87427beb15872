r"""The number of attack steps from which it pays to hold the examples constant.

For each number of steps k a network trained on clean digits is made robust, all of them side by side: the loss is the
sum over k, the networks share no parameter, and the optimiser treats every parameter separately, so each network trains
as if it were alone. The attack steps along the normalised gradient, so an example moves with the model.

The target is the gradient of the worst case: by Danskin's theorem the gradient at the worst examples, held constant.
Long ascents from many starts search for these examples. Both variants approximate the target. With the block, the
gradient is taken at the example of a few steps. With the block open, it also contains the derivative of these steps.
After one step, far from the worst case, the open gradient is the better approximation; after many steps it is the worse
one, because the map from parameters to examples is chaotic until it converges.

References:
    Danskin, "The theory of max-min, with applications", 1966. Madry, Makelov, Schmidt, Tsipras & Vladu, "Towards deep
    learning models resistant to adversarial attacks", 2018, section 2.1.

K numbers of steps, N samples, D features.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from toolkit.adversarial import adversarial_loss, pgd
from toolkit.adversarial.balls import Ball
from toolkit.datasets import Dataset
from toolkit.gradients.memory import measure_memory
from toolkit.runner import ExperimentConfig, Objective, Run, Sweep

from ._digits import Activation, Batches, digits_of, network, train_cleanly
from ._training import accuracy, gradient_of

__all__ = ["Config", "run", "worst_examples"]

_TIMED = 5  # runs, of which the fastest counts

Parameters = dict[str, Tensor]
Attack = Callable[..., Tensor]


class Config(ExperimentConfig):
    """Values of an experiment on the number of steps of an attack.

    Attributes:
        attack_steps: The numbers of steps; each has its own network.
        epsilon: Radius of the ball in Euclidean distance. Pixels lie in [0, 1].
        widths: Units of the hidden layers.
        activation: The activation between the layers.
        clean_steps: Steps of ordinary training before the run.
        batch_size: Number of samples in a training step.
        evaluation_steps: Steps of the attack that judges the models.
        worst_starts: Starts of the search for the worst examples.
        worst_steps: Steps of the ascent from each start.
    """

    attack_steps: Annotated[list[Annotated[int, Field(ge=1)]], Field(min_length=1)]
    epsilon: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    widths: list[Annotated[int, Field(ge=1)]]
    activation: Activation = "tanh"
    clean_steps: Annotated[int, Field(ge=0)] = 0
    batch_size: Annotated[int, Field(ge=1)] = 128
    evaluation_steps: Annotated[int, Field(ge=1)] = 40
    worst_starts: Annotated[int, Field(ge=1)] = 6
    worst_steps: Annotated[int, Field(ge=1)] = 300


def run(config: Config, seed: int) -> Run:
    """Return one seeded run: a network for each number of steps, the sum of their losses, and Adam."""
    networks = _Networks(config, seed)
    return Run(
        parameters=networks.parameters,
        loss=networks.loss,
        objective=Objective(
            label=f"robust accuracy on held-out digits (L2 {config.epsilon:g}), mean over the numbers of steps",
            higher_is_better=True,
        ),
        evaluate=networks.evaluate,
        optimizer=torch.optim.Adam(networks.parameters.values(), lr=config.learning_rate, foreach=False),
        target=networks.target,
        after_step=networks.batches.advance,
        sweep=Sweep(
            label="steps of the attack",
            values=tuple(map(float, config.attack_steps)),
            evaluate=networks.sweep,
            times={"processor time of a gradient (ms)": networks.milliseconds},
        ),
    )


class _Networks:
    """A network for each number of steps, all with the same start, and the batches that they share.

    Args:
        config: The values.
        seed: The seed of the run.
    """

    def __init__(self, config: Config, seed: int) -> None:
        self._config = config
        self._train, self._test, self._first, self._worst = _problem(config.model_dump_json(), seed)
        self._template = _network(config, self._train, seed)
        self._networks = {steps: self._start() for steps in config.attack_steps}
        self.parameters = {
            _name(steps, name): value for steps, own in self._networks.items() for name, value in own.items()
        }
        self.batches = Batches(self._train, config.batch_size, torch.Generator().manual_seed(seed))

    def _start(self) -> Parameters:
        return {name: value.clone().requires_grad_() for name, value in self._first.items()}

    def _attack(self, steps: int) -> Attack:
        return partial(pgd, epsilon=self._config.epsilon, norm="l2", steps=steps)

    def _loss_of(self, parameters: Parameters, steps: int, data: Dataset | Batches) -> Tensor:
        model = _model(self._template, parameters)
        return adversarial_loss(model, data.inputs, data.labels, attack=self._attack(steps))

    def loss(self) -> Tensor:
        """Return the sum of the surrogates."""
        losses = [self._loss_of(parameters, steps, self.batches) for steps, parameters in self._networks.items()]
        return torch.stack(losses).sum()

    def target(self) -> Parameters:
        """Return the blocked gradient: that of the cross entropy at examples without a graph."""
        images, labels, found = self.batches.inputs, self.batches.labels, {}
        for steps, parameters in self._networks.items():
            model = _model(self._template, parameters)
            with torch.no_grad():
                example = self._attack(steps)(model, images, labels)
            gradient = gradient_of(F.cross_entropy(model(example), labels), parameters)
            found.update({_name(steps, name): value for name, value in gradient.items()})
        return found

    def evaluate(self) -> dict[str, float]:
        """Return the metrics."""
        accuracies = self._robust_accuracies()
        return {"objective": sum(accuracies) / len(accuracies)}

    @torch.no_grad()
    def _robust_accuracies(self) -> list[float]:
        images, labels = self._test.inputs, self._test.labels
        attack, found = self._attack(self._config.evaluation_steps), []
        for parameters in self._networks.values():
            model = _model(self._template, parameters)
            found.append(accuracy(model(attack(model, images, labels)), labels))
        return found

    def sweep(self) -> dict[str, list[float]]:
        """Return for each number of steps the accuracy now, and error and memory of a gradient at the start."""
        start, losses = self._losses_at_the_start()
        stated = gradient_of(F.cross_entropy(_model(self._template, start)(self._worst), self._train.labels), start)
        return {
            "robust accuracy after training": self._robust_accuracies(),
            "relative error of the first gradient to that of the worst case": [
                _error(gradient_of(loss(), start), stated) for loss in losses
            ],
            "peak of memory of a gradient (MiB)": [measure_memory(loss).peak / 2**20 for loss in losses],
        }

    def milliseconds(self) -> list[float]:
        """Return for each number of steps the time of a gradient at the start."""
        start, losses = self._losses_at_the_start()
        return [1e3 * _seconds_of_gradient(loss, start) for loss in losses]

    def _losses_at_the_start(self) -> tuple[Parameters, list[Callable[[], Tensor]]]:
        start = self._start()
        return start, [partial(self._loss_of, start, steps, self._train) for steps in self._config.attack_steps]


def worst_examples(
    model: Callable[[Tensor], Tensor],
    data: Dataset,
    *,
    epsilon: float,
    starts: int,
    steps: int,
    generator: torch.Generator,
) -> Tensor:
    """Return for every sample the example of greatest loss that long ascents find, (N, D).

    The first ascent starts at the sample, the others at random points of the ball. The steps shrink to zero, so that
    each ascent ends at a local maximum.
    """
    ball = Ball(epsilon, "l2").around(data.inputs)
    best, greatest = data.inputs, torch.full_like(data.inputs[:, 0], -torch.inf)
    for start in range(starts):
        example = data.inputs if start == 0 else ball.sample(generator)
        for step in range(steps):
            point = example.detach().requires_grad_()
            losses = F.cross_entropy(model(point), data.labels, reduction="none")
            (slope,) = torch.autograd.grad(losses.sum(), point)
            example = ball.step(example, slope, torch.tensor(epsilon * (1 - step / steps)).to(point))
        with torch.no_grad():
            losses = F.cross_entropy(model(example), data.labels, reduction="none")
        better = losses > greatest
        best, greatest = torch.where(better[:, None], example, best), torch.where(better, losses, greatest)
    return best


@lru_cache(maxsize=1)  # one seed's runs are built again for each variant
def _problem(config_json: str, seed: int) -> tuple[Dataset, Dataset, Parameters, Tensor]:
    """Return training data, held-out data, the parameters after clean training, and the worst examples there."""
    config = Config.model_validate_json(config_json)
    train, test = digits_of(config)
    model = _network(config, train, seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, foreach=False)
    batches = Batches(train, config.batch_size, torch.Generator().manual_seed(seed))
    train_cleanly(model, batches, optimizer, config.clean_steps)
    worst = worst_examples(
        model,
        train,
        epsilon=config.epsilon,
        starts=config.worst_starts,
        steps=config.worst_steps,
        generator=torch.Generator().manual_seed(seed),
    )
    return train, test, {name: value.detach() for name, value in model.named_parameters()}, worst


def _network(config: Config, data: Dataset, seed: int) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    return network("mlp", data, widths=config.widths, activation=config.activation, generator=generator)


def _model(template: nn.Module, parameters: Parameters) -> Callable[[Tensor], Tensor]:
    def model(x: Tensor) -> Tensor:
        logits: Tensor = torch.func.functional_call(template, parameters, (x,))
        return logits

    return model


def _name(steps: int, name: str) -> str:
    return f"{steps} steps, {name}"


def _error(found: Parameters, stated: Parameters) -> float:
    error = sum(float((found[name] - stated[name]).square().sum()) for name in stated)
    return float((error / sum(float(value.square().sum()) for value in stated.values())) ** 0.5)


def _seconds_of_gradient(loss: Callable[[], Tensor], parameters: Parameters) -> float:
    taken = []
    for _ in range(_TIMED):
        start = time.process_time()
        gradient_of(loss(), parameters)
        taken.append(time.process_time() - start)
    return min(taken)
