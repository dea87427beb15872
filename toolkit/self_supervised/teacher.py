r"""Teachers that are running averages of their student: parameters and buffers.

xi is the teacher's state, theta the student's, tau the momentum, sg stops the gradient.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from toolkit._checks import instance, number
from toolkit._tensors import HALF, averaged, mappings
from toolkit.blocks import block, stop_gradient

__all__ = ["EMA_STUDENT", "EMATeacher", "ema"]

EMA_STUDENT = block(
    "self_supervised.ema_student",
    "The teacher is a memory of past students: with the block open the student also learns to be a good teacher.",
)


def ema(teacher: Mapping[str, Tensor], student: Mapping[str, Tensor], *, momentum: float) -> dict[str, Tensor]:
    r"""Return the next state of a teacher, :math:`\tau \xi + (1 - \tau) \operatorname{sg} \theta`.

    Counts, such as the number of batches of batch normalisation, are the student's. With `EMA_STUDENT` open, a gradient
    g by the new state is :math:`(1 - \tau) g` by the student's. To use the result, call `torch.func.functional_call`;
    `EMATeacher` is the module that updates in place.

    Args:
        teacher: Name -> xi, float32 or float64: in half precision small steps would be rounded to zero.
        student: The same names -> theta, of the same shapes and any precision.
        momentum: tau, from 0, a copy of the student, to 1, a teacher that stays.

    Raises:
        ValueError: If `momentum` is out of its range, names or shapes differ, or the teacher has half precision.

    References:
        Tarvainen and Valpola, "Mean teachers are better role models: weight-averaged consistency targets improve
        semi-supervised deep learning results", 2017; He, Fan, Wu, Xie and Girshick, "Momentum contrast for unsupervised
        visual representation learning", 2019, equation 2.

    Example:
        >>> ema({"w": torch.tensor(1.0)}, {"w": torch.tensor(3.0)}, momentum=0.75)
        {'w': tensor(1.5000)}
    """
    momentum = number("momentum", momentum, least=0, most=1)
    return {
        name: averaged(before, held, 1 - momentum if _is_averaged(before) else 1)
        for name, before, held in _pairs(teacher, student)
    }


def _pairs(teacher: Mapping[str, Tensor], student: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield name, teacher's value and the student's as a constant, in the teacher's precision and on its device."""
    mappings(teacher=teacher, student=student)
    if teacher.keys() != student.keys():
        differ = ", ".join(sorted(teacher.keys() ^ student.keys()))
        raise ValueError(f"`student` should have the names of `teacher`. Found a difference in {differ}.")
    for name, before in teacher.items():
        if before.shape != student[name].shape:
            raise ValueError(
                f"`student` should have the shapes of `teacher`. Found {tuple(student[name].shape)} and "
                f"{tuple(before.shape)} at {name!r}."
            )
        _check_precision(name, before)
        yield name, before, stop_gradient(student[name], EMA_STUDENT).to(before)


def _is_averaged(value: Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()


def _check_precision(name: str, teacher: Tensor) -> None:
    if teacher.dtype in HALF:
        raise ValueError(
            f"`teacher` should be float32 or float64, as half precision rounds small steps to 0. Found "
            f"{teacher.dtype} at {name!r}."
        )


class EMATeacher(nn.Module):
    r"""A copy of a student whose state follows :math:`\xi \leftarrow \tau \xi + (1 - \tau) \operatorname{sg} \theta`.

    Parameters and buffers follow, the running statistics of batch normalisation too. The copy's parameters have no
    gradient, so no graph is built for it. It is called like the student. Call `update` after each step of the
    optimiser. In evaluation mode the state does not move, and `update` raises; for a teacher in training whose layers
    are in evaluation mode, call ``teacher.module.eval()``.

    Args:
        student: The module to copy as the first teacher; float32 or float64. For a student in half precision, give
            ``copy.deepcopy(student).float()``.
        momentum: tau; the attribute may be changed by a schedule.

    Attributes:
        module: The copy.

    Raises:
        ValueError: If `momentum` is not from 0 to 1, or the student has half precision.

    References:
        As `ema`.

    Example:
        >>> student = torch.nn.PReLU(init=1.0)
        >>> teacher = EMATeacher(student, momentum=0.75)
        >>> _ = torch.nn.init.constant_(student.weight, 3.0)
        >>> teacher.update(student)
        >>> teacher(torch.tensor([-1.0]))
        tensor([-1.5000])
    """

    def __init__(self, student: nn.Module, *, momentum: float) -> None:
        super().__init__()
        self.momentum = number("momentum", momentum, least=0, most=1)
        instance("student", student, nn.Module)
        self.module = _without_gradients(copy.deepcopy(student))
        for name, value in _state(student).items():
            _check_precision(name, value)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the teacher's output."""
        return self.module(*args, **kwargs)

    def update(self, student: nn.Module) -> None:
        """Move one step towards the student.

        Args:
            student: A module of the same structure.

        Raises:
            RuntimeError: In evaluation mode.
            ValueError: If the student has another structure.
        """
        instance("student", student, nn.Module)
        if not self.training:
            raise RuntimeError(
                "`update` should be called in training mode. Found evaluation mode; for layers in evaluation mode, "
                "call `teacher.train()` and then `teacher.module.eval()`."
            )
        for _, before, held in list(_pairs(_state(self.module), _state(student))):  # checked before any moves
            if self.momentum == 0 or not _is_averaged(before):
                before.copy_(held)
            elif self.momentum < 1:
                before.mul_(self.momentum).add_(held, alpha=1 - self.momentum)  # as `averaged`, in place


def _state(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _without_gradients(module: nn.Module) -> nn.Module:
    """Return the module with parameters that need no gradient; a parameter in two places stays one."""
    held = {parameter: nn.Parameter(parameter, requires_grad=False) for parameter in module.parameters()}
    for part in module.modules():
        for name, parameter in list(part.named_parameters(recurse=False, remove_duplicate=False)):
            setattr(part, name, held[parameter])
    return module
