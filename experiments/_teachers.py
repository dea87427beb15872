"""Teachers that are running averages of their student, which experiments on self-supervised learning share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from torch import Tensor, nn
from torch.func import functional_call

from toolkit.runner import ExperimentConfig, Methods
from toolkit.self_supervised import ema

from ._training import methods_of

__all__ = ["Teacher", "without_average"]


class Teacher:
    """The running average of past students.

    Args:
        student: The network; it has no buffers.
        momentum: Weight of the past in the average. 0: the teacher is the student itself.
    """

    def __init__(self, student: nn.Module, momentum: float) -> None:
        self._student, self._momentum = student, momentum
        self._past = {name: value.detach().clone() for name, value in student.named_parameters()}
        self._next = self._past

    def updated(self) -> Callable[[Tensor], Tensor]:
        """Return the average that includes the present student; the next one is of this, after `advance`."""
        average = ema(self._past, dict(self._student.named_parameters()), momentum=self._momentum)
        self._next = {name: value.detach() for name, value in average.items()}
        return lambda images: functional_call(self._student, average, (images,))

    def advance(self) -> None:
        """Keep the average of the step."""
        self._past = self._next


def without_average(
    config: ExperimentConfig,
    train: Callable[[Sequence[str]], Mapping[str, Sequence[float]]],
    stops: Sequence[str],
) -> Methods:
    """Return training in which the student is its own teacher, with the stops and without them.

    Args:
        config: The number of steps and the steps of evaluation.
        train: Trains with some blocks open, and returns the metrics.
        stops: Names of the blocks to open in the second method.
    """
    return methods_of(
        config,
        {"no average, with the stop": partial(train, ()), "no average, without the stop": partial(train, stops)},
    )
