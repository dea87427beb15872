"""The frame that all attacks share: the batch under attack, the set of allowed examples, and the state to restore.

N samples, each of shape (...), C classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from toolkit._checks import function
from toolkit.adversarial._classes import check_classes
from toolkit.adversarial._functional import called_with
from toolkit.adversarial._untouched import untouched
from toolkit.adversarial.attacks.losses import Loss, difference_loss, margin_slope
from toolkit.adversarial.balls import Ball, BallOptions, Region, ball_of, per_sample
from toolkit.adversarial.balls.box import wide, width_remarked_on
from toolkit.blocks import block, no_graph, ordinary_tensors, stop_recording, variable

__all__ = [
    "EXAMPLE",
    "AttackOptions",
    "CommonOptions",
    "GradientOptions",
    "NoGradientError",
    "Pick",
    "Setting",
    "at_a_copy",
    "check_logits",
    "differentiate",
    "ordinary",
    "picked",
    "setting",
    "untargeted",
]

# The place of the logits in the output of a model: an index, a key or an attribute; or a function of the output.
Pick = str | int | Callable[[Any], Tensor]

EXAMPLE = block(
    "adversarial.example",
    "The adversarial example is an input to train on: the loss moves the model, not the attack that made the input.",
)


class NoGradientError(RuntimeError):
    """A model cannot be differentiated with respect to its input."""

    def __init__(self, found: str = "logits that, for autograd, do not depend on it") -> None:
        text = f"`model` should be differentiable with respect to its input. Found {found}."
        super().__init__(f"{text} `square` needs no gradient.")


@dataclass(frozen=True)
class Setting:
    """One batch under attack, as `setting` prepares it.

    Attributes:
        model: Inputs (N, ...) to logits (N, C), in evaluation mode. It gets copies: it may write into its input.
        x: Clean inputs, (N, ...).
        labels: (N,), integers.
        targets: (N,), the classes to move towards; None moves away from `labels`.
        threat: The ball.
        ball: The ball around the clean inputs, in which examples have to lie.
        slopes: The model whose gradients are taken: `model`, or its copy in another dtype.
        checked: "logits" once they have been checked, "writes" once the model was seen to write into its input.
    """

    model: Callable[[Tensor], Tensor]
    x: Tensor
    labels: Tensor
    targets: Tensor | None
    threat: Ball
    ball: Region
    slopes: Callable[[Tensor], Tensor]
    checked: set[str] = field(default_factory=set)

    @property
    def goal(self) -> Tensor:
        """The classes of the loss, (N,): `targets` if given, else `labels`."""
        return self.labels if self.targets is None else self.targets

    @property
    def sign(self) -> int:
        """1 if the loss of `goal` is to be raised, -1 if it is to be lowered."""
        return 1 if self.targets is None else -1

    def logits(self, example: Tensor) -> Tensor:
        """Return the logits (N, C) at an example, as constants."""
        with no_graph():
            return self.inspected(self.model(example.clone()))

    def gradient(
        self, example: Tensor, loss: Loss | None = None, slope: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the point, the gradient of every sample's loss by its own input there, and the logits.

        The point is `example`, to take the next step from. Autograd records gradient and logits only while the block of
        the attack is open.

        Args:
            example: Inputs to differentiate at, (N, ...).
            loss: Function of logits and `goal` that returns losses (N,). None: the loss of this `slope`.
            slope: Derivative of the loss by the logits, (N, C). None: that of `margin_loss`, in closed form.

        Raises:
            NoGradientError: If the logits cannot be differentiated with respect to the input.
            TypeError: If `loss` is not callable.
            ValueError: If `loss` does not return one value per sample.
        """
        if not (loss is None or callable(loss)):
            raise TypeError(f"`loss` should be a function of logits and labels. Found {type(loss).__name__}.")
        recorded = torch.is_grad_enabled()
        point = variable(example)
        with torch.enable_grad():
            given, logits = self.slopes_at(point)
            logits = self.inspected(logits)
            losses = None if loss is None else loss(logits, self.goal)
        if losses is None:
            outputs, slope = logits, margin_slope(logits, self.goal) if slope is None else slope
        elif losses.shape == point.shape[:1]:
            outputs, slope = losses, torch.ones_like(losses)
        else:
            raise ValueError(
                f"`loss` should return one value per sample, ({len(point)},) (torch's losses: reduction='none'). "
                f"Found shape {tuple(losses.shape)}."
            )
        return point, differentiate(outputs, given, slope, recorded=recorded), logits

    def slopes_at(self, point: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tensor to differentiate by, and the logits at a copy of a point, as the model may write into it.

        The copy is a leaf, because Dynamo warns of any other, unless the model writes into it as autograd records.
        """
        if "writes" in self.checked or not point.is_leaf:
            return point, self.slopes(point.clone())
        given, logits = at_a_copy(self.slopes, point)
        if given is point:
            self.checked.add("writes")
        return given, logits

    def inspected(self, logits: Tensor) -> Tensor:
        """Return the logits; the first time, raise if they are not (N, C) or a class is out of range."""
        if "logits" not in self.checked:
            check_logits(logits, len(self.x))
            check_classes("labels", self.labels, len(self.x), logits.shape[1])
            if self.targets is not None:
                check_classes("targets", self.targets, len(self.x), logits.shape[1])
            self.checked.add("logits")
        return logits

    def succeeds(self, logits: Tensor) -> Tensor:
        """Return whether the attack succeeds, (N,) Boolean: the prediction is not the label, or is the target."""
        predicted = logits.argmax(1)
        return predicted != self.labels if self.targets is None else predicted == self.targets

    def stride(self, factor: float = 1.0, value: float | Tensor | None = None, *, name: str = "step_size") -> Tensor:
        """Return the length of a step, (N or 1, 1, ...), negative if the loss is to be lowered.

        Args:
            factor: The length in units of epsilon.
            value: The length itself; one for all, or (N,). None: `factor` times epsilon.
            name: The name of `value` in an error.

        Raises:
            ValueError: If `value` is negative, not finite or of another shape.
        """
        if value is None:
            name, value = "epsilon", self.threat.epsilon
        else:
            factor = 1.0
        return (self.sign * factor * per_sample(name, value, self.x, by_feature=self.threat.has_features)).to(
            self.x.dtype
        )

    def strength(self, logits: Tensor) -> Tensor:
        """Return the margin of success, (N,): best other class over label, or target over best other class."""
        return self.sign * difference_loss(logits.to(wide(logits)), self.goal)

    def start(self, generator: torch.Generator | None) -> Tensor:
        """Return the clean inputs, or with a generator points drawn from the ball, (N, ...)."""
        return self.x.clone() if generator is None else self.ball.sample(generator)

    def rows(self, index: Tensor) -> Setting:
        """Return the setting of some samples, by their indices or a Boolean tensor, (N,)."""
        targets = None if self.targets is None else self.targets[index]
        return replace(
            self,
            x=self.x[index],
            labels=self.labels[index],
            targets=targets,
            threat=self.threat.rows(index, self.x),
            ball=self.ball.rows(index),
        )


class CommonOptions(BallOptions, total=False):
    """The keywords of every attack.

    Attributes:
        ball: The threat model; or in short its fields `epsilon`, `norm`, `bounds` and `mask`.
        logits: The logits in the model's output: an index into a tuple, a key of a dictionary, the name of an
            attribute (``"logits"`` of a `ModelOutput`), or a function of the output. None: the output itself.
    """

    logits: Pick | None


class AttackOptions(CommonOptions, total=False):
    """The keywords of every attack that moves away from the labels, or towards classes of the caller's choice.

    Attributes:
        targets: (N,); the classes to move towards. None moves away from the labels.
    """

    targets: Tensor | None


class GradientOptions(AttackOptions, total=False):
    """The keywords of attacks that ascend a loss by its gradient.

    Attributes:
        gradient_dtype: `torch.bfloat16` runs the model in it where gradients are taken: on much hardware several times
            faster, and the steps need little more than signs. Examples, projection and bounds stay in the dtype of the
            inputs. None: the model's own dtype.
    """

    gradient_dtype: torch.dtype | None


def untargeted(options: CommonOptions) -> CommonOptions:
    """Return the keywords of an attack that tries all classes; raise TypeError if there are `targets` among them."""
    if options.get("targets") is not None:
        raise TypeError("`targets` should be left out of an attack that tries all classes. `pgd` and `apgd` take them.")
    return options


@contextmanager
def setting(
    model: Callable[[Tensor], Tensor],
    x: Tensor,
    labels: Tensor | None,
    *,
    targets: Tensor | None = None,
    gradient_dtype: torch.dtype | None = None,
    logits: Pick | None = None,
    **ball: Unpack[BallOptions],
) -> Iterator[Setting]:
    """Prepare an attack whose only effect is the value it returns; the arguments are those of `pgd`.

    While the block `EXAMPLE` is in place, autograd records nothing inside.

    Raises:
        TypeError: As in `Ball.around`; if `model` cannot be called, `labels` or `targets` are not integers, or
            `gradient_dtype` is given for a model that is not a `torch.nn.Module`.
        ValueError: As in `Ball.around`, or if there is not one label, or target, per sample.
    """
    function("model", model)
    threat = ball_of(**ball)
    with ordinary_tensors(), stop_recording(EXAMPLE), untouched(model):
        x, labels, targets = (ordinary(tensor) for tensor in (x, labels, targets))
        region = threat.around(x)
        labels = check_classes("labels", _answers(picked(model, logits), x) if labels is None else labels, len(x))
        targets = None if targets is None else check_classes("targets", targets, len(x))
        slopes = picked(model, logits) if gradient_dtype is None else _in_dtype(model, gradient_dtype, logits)
        with width_remarked_on(threat.epsilon, threat.norm, threat.bounds, x[:1].numel()):
            yield Setting(picked(model, logits), x, labels, targets, threat, region, slopes)


def picked(model: Callable[[Tensor], Any], logits: Pick | None) -> Callable[[Tensor], Tensor]:
    """Return the function of the inputs that gives the logits in the output of a model."""
    if logits is None:
        return model
    pick = _pick(logits)
    return lambda x: pick(model(x))


def _pick(logits: Pick) -> Callable[[Any], Tensor]:
    return logits if callable(logits) else partial(_entry, logits)


def _entry(name: str | int, output: Any) -> Any:
    """Return the entry of an output: its attribute, or its item.

    Raises:
        TypeError: If there is none.
    """
    if isinstance(name, str) and hasattr(output, name):
        return getattr(output, name)
    try:
        return output[name]
    except (IndexError, KeyError, TypeError):
        raise TypeError(
            f"`logits` should name an entry of the model's output, {type(output).__name__}. Found {name!r}."
        ) from None


def at_a_copy(model: Callable[[Tensor], Tensor], point: Tensor) -> tuple[Tensor, Tensor]:
    """Return the tensor to differentiate by, and the output of the model for a copy of a point: see `slopes_at`."""
    function("model", model)
    if point.is_leaf:
        with no_graph():
            copy = point.clone()
        leaf = variable(copy)
        try:
            return leaf, model(leaf)
        except RuntimeError as error:
            if "Inference tensors cannot be saved for backward" in str(error):
                raise NoGradientError("tensors that were made in `torch.inference_mode`: copy the model") from error
            if "leaf Variable that requires grad is being used in an in-place" not in str(error):
                raise
    return point, model(point.clone())


def differentiate(outputs: Tensor, point: Tensor, slope: Tensor, *, recorded: bool, kept: bool = False) -> Tensor:
    """Return ``slope . d outputs / d point``, in the shape of `point`; `kept` retains the graph for further calls.

    Raises:
        NoGradientError: If autograd finds no path from `outputs` to `point`.
    """
    if not outputs.requires_grad:
        raise NoGradientError
    gradient: Tensor | None
    (gradient,) = torch.autograd.grad(
        outputs, point, slope, retain_graph=recorded or kept, create_graph=recorded, allow_unused=True
    )
    if gradient is None:
        raise NoGradientError
    return gradient


def ordinary(tensor: Any) -> Any:
    """Return a copy of a tensor of inference mode, which cannot be differentiated; anything else as it is."""
    return tensor.clone() if isinstance(tensor, Tensor) and tensor.is_inference() else tensor


def _answers(model: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    logits = model(x.clone())
    check_logits(logits, len(x))
    return logits.argmax(1)


def check_logits(logits: object, n: int) -> None:
    """Raise unless the answer of a model is floating-point logits, (N, C), of two classes or more."""
    if not isinstance(logits, Tensor):
        raise TypeError(
            f"`model` should return logits, a tensor (N, C). Found {type(logits).__name__}: pick the logits from it, "
            "as in `logits=0`."
        )
    if not logits.is_floating_point():
        raise TypeError(f"`model` should return floating-point logits. Found {logits.dtype}.")
    if logits.dim() != 2 or len(logits) != n or logits.shape[1] < 2:
        found = f"{tuple(logits.shape)}."
        if logits.shape in {(n,), (n, 1)}:
            found += " One logit of two classes becomes two by `lambda z: torch.stack([0 * z, z], -1).view(-1, 2)`."
        raise ValueError(f"`model` should return logits ({n}, C) with at least two classes. Found {found}")


def _in_dtype(model: Callable[[Tensor], Tensor], dtype: torch.dtype, logits: Pick | None) -> Callable[[Tensor], Tensor]:
    """Return the model in another dtype, with images in the memory format that suits half-precision convolutions."""
    if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"`gradient_dtype` should be a floating-point torch.dtype. Found {dtype!r}.")
    if not isinstance(model, nn.Module):
        raise TypeError(f"`model` should be a torch.nn.Module to be run in {dtype}. Found {type(model).__name__}.")

    def converted(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        layout = torch.channels_last if tensor.dim() == 4 else torch.preserve_format
        return tensor.to(dtype, memory_format=layout)

    tensors = {name: converted(tensor) for name, tensor in [*model.named_parameters(), *model.named_buffers()]}

    def call(point: Tensor) -> Tensor:
        output = called_with(model, tensors, (converted(point),))
        found: Tensor = output if logits is None else _pick(logits)(output)
        return found.to(point.dtype) if isinstance(found, Tensor) else found

    return call
