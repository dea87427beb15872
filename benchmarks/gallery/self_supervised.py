"""Losses of self-supervised learning beside those of lightly, forward and backward in float32, eager."""

from __future__ import annotations

import copy
import importlib
import importlib.machinery
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor, nn

from benchmarks._measure import Row, gradient, timed_row
from toolkit.self_supervised import (
    EMATeacher,
    dino_loss,
    moco_loss,
    negative_cosine_similarity,
    sinkhorn,
    swav_loss,
)

_row = partial(timed_row, goal="at most 1.1")


def lightly_module(name: str) -> ModuleType:
    """Return a module of lightly without its package, which imports a torchvision that need not load.

    Raises:
        ModuleNotFoundError: If lightly is not installed.
    """
    spec = importlib.machinery.PathFinder.find_spec("lightly")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("No module named 'lightly'", name="lightly")
    root = Path(spec.origin).parent
    for package in ("", "loss", "models", "models.modules", "utils"):
        full = f"lightly.{package}".rstrip(".")
        if full not in sys.modules:
            sys.modules[full] = bare = ModuleType(full)
            bare.__path__ = [str(root.joinpath(*package.split(".")))]
    if "torchvision" not in sys.modules:  # `lightly.models.utils` names one class of it
        sys.modules["torchvision"], vision = ModuleType("torchvision"), ModuleType("torchvision.ops")
        vision.StochasticDepth = nn.Identity  # type: ignore[attr-defined]
        sys.modules["torchvision.ops"] = vision
    return importlib.import_module(f"lightly.{name}")


def rows() -> Iterator[Row]:
    """Measure ours and theirs side by side."""
    yield _cosine(256, 2048)
    yield _dino(2, 8, 64, 4096)
    yield _dino(2, 2, 64, 65536)
    yield _swav(2, 256, 3000)
    yield _codes(256, 3000)
    yield _moco(256, 128, 4096)
    yield _teacher()


def _data(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def _cosine(n: int, d: int) -> Row:
    p, z = _data(n, d), _data(n, d, seed=1)
    theirs = lightly_module("loss.negative_cosine_similarity").NegativeCosineSimilarity()
    return _row(
        f"negative cosine similarity / lightly, {n} x {d}",
        gradient(lambda: negative_cosine_similarity(p, z), p),
        gradient(lambda: theirs(p, z.detach()), p),
    )


def _dino(n_teacher: int, n_student: int, n: int, k: int) -> Row:
    student, teacher = _data(n_student, n, k), _data(n_teacher, n, k, seed=1).detach()
    theirs, center = lightly_module("loss.dino_loss").DINOLoss(k), torch.zeros(k)
    theirs.update_center = lambda teacher: None
    return _row(
        f"DINO / lightly, {n_teacher} and {n_student} views, {n} x {k}",
        gradient(lambda: dino_loss(student, teacher, center), student),
        gradient(lambda: theirs(list(teacher), list(student)), student),
    )


def _swav(views: int, n: int, k: int) -> Row:
    scores = (_data(views, n, k) / 10).detach().requires_grad_()
    theirs = lightly_module("loss.swav_loss").SwaVLoss()
    return _row(
        f"SwAV / lightly, {views} views, {n} x {k}",
        gradient(lambda: swav_loss(scores), scores),
        gradient(lambda: theirs(list(scores), []), scores),
    )


def _codes(n: int, k: int) -> Row:
    scores = _data(n, k).detach() / 10
    theirs = lightly_module("loss.swav_loss").sinkhorn
    return _row(f"Sinkhorn codes / lightly, {n} x {k}", lambda: sinkhorn(scores), lambda: theirs(scores))


def _moco(n: int, d: int, size: int) -> Row:
    q, k = (nn.functional.normalize(_data(n, d, seed=seed)).detach().requires_grad_() for seed in (0, 1))
    queue = nn.functional.normalize(_data(size, d, seed=2)).detach()
    theirs = lightly_module("loss.ntx_ent_loss").NTXentLoss(temperature=0.07, memory_bank_size=(size, d))
    return _row(
        f"momentum contrast / lightly, {n} x {d}, {size} keys",
        gradient(lambda: moco_loss(q, k, queue), q),
        gradient(lambda: theirs(q, k.detach()), q),
    )


def _teacher() -> Row:
    student = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))
    teacher, other = EMATeacher(student, momentum=0.99), copy.deepcopy(student)
    update = lightly_module("models.utils").update_momentum
    return _row(
        "a teacher's update / lightly, 8 layers of 512 x 512",
        lambda: teacher.update(student),
        lambda: update(student, other, 0.99),
    )
