"""Live peers: lightly and byol-pytorch have the same values and gradients where they are right. Skipped without them.

Both import a torchvision that need not load, so their modules are loaded without it.
"""

import importlib.machinery
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

from benchmarks.gallery.self_supervised import lightly_module
from toolkit import unblock
from toolkit.self_supervised import (
    BYOL_TARGET,
    DINO_TARGET,
    MOCO_KEY,
    SIMSIAM_TARGET,
    DINOLoss,
    EMATeacher,
    byol_loss,
    moco_loss,
    negative_cosine_similarity,
    simsiam_loss,
    sinkhorn,
    swav_loss,
)

BYOL = importlib.machinery.PathFinder.find_spec("byol_pytorch")
needs_lightly = pytest.mark.skipif(
    importlib.machinery.PathFinder.find_spec("lightly") is None, reason="lightly is not installed"
)
needs_byol = pytest.mark.skipif(BYOL is None, reason="byol-pytorch is not installed")


@pytest.fixture(autouse=True)
def _bare_packages(monkeypatch):
    """Let no module of this file's outlive it: another test may want the real ones."""
    before = dict(sys.modules)
    yield
    for name in set(sys.modules) - set(before):
        if name.split(".")[0] in ("lightly", "torchvision", "einops"):
            del sys.modules[name]


def draw(*shape):
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def same(ours, theirs, *inputs, tolerance=1e-12):
    """Check a value and its gradients against a peer's."""
    torch.testing.assert_close(ours, theirs.reshape(()), rtol=tolerance, atol=tolerance)
    slopes = [torch.autograd.grad(loss.sum(), inputs, materialize_grads=True) for loss in (ours, theirs)]
    torch.testing.assert_close(*slopes, rtol=tolerance, atol=tolerance)


@needs_lightly
def test_cosines():
    """Theirs has no stop inside, as ours with the block open."""
    p, z = draw(4, 5), draw(4, 5)
    theirs = lightly_module("loss.negative_cosine_similarity").NegativeCosineSimilarity()
    same(negative_cosine_similarity(p, z), theirs(p, z.detach()), p, z)
    with unblock(SIMSIAM_TARGET):
        same(negative_cosine_similarity(p, z), theirs(p, z), p, z)


@needs_lightly
def test_the_peers_cosine_lets_a_gradient_into_the_target():
    p1, z2 = torch.tensor([[1.0, 2, -0.5]]), torch.tensor([[1.5, 0.5, -1]], requires_grad=True)
    theirs = lightly_module("loss.negative_cosine_similarity").NegativeCosineSimilarity()(p1, z2)
    (leak,) = torch.autograd.grad(theirs, z2)
    torch.testing.assert_close(leak, torch.tensor([[0.0666, -0.3666, -0.0833]]), rtol=0, atol=1e-4)
    ours = simsiam_loss(p1, p1, z2.detach(), z2)
    assert not ours.requires_grad


@needs_lightly
def test_dino_and_its_centre():
    """Theirs keeps its temperature in float32, and has no stop on the teacher, as ours with the block open."""
    student, teacher = draw(4, 3, 6), draw(2, 3, 6)
    ours, theirs = DINOLoss(6).double(), lightly_module("loss.dino_loss").DINOLoss(6).double()
    for _ in range(2):
        same(ours(student, teacher), theirs(list(teacher.detach()), list(student)), student, teacher, tolerance=1e-7)
        torch.testing.assert_close(ours.center, theirs.center.reshape(-1))
    with unblock(DINO_TARGET):
        opened = ours.eval()(student, teacher)
    same(opened, theirs(list(teacher), list(student)), student, teacher, tolerance=1e-7)


@needs_lightly
def test_the_peers_centre_moves_in_evaluation_mode():
    teacher = draw(2, 3, 6).float().detach()
    theirs, ours = lightly_module("loss.dino_loss").DINOLoss(6).eval(), DINOLoss(6).eval()
    theirs(list(teacher), list(teacher))
    ours(teacher, teacher)
    assert theirs.center.abs().max() > 0
    assert ours.center.abs().max() == 0


@needs_lightly
@pytest.mark.parametrize("small_crops", [0, 2])
def test_swav(small_crops):
    scores = (draw(2 + small_crops, 5, 4) * 0.3).detach().requires_grad_()
    theirs = lightly_module("loss.swav_loss").SwaVLoss()
    same(swav_loss(scores), theirs(list(scores[:2]), list(scores[2:])), scores)


@needs_lightly
def test_the_peers_codes_are_nan_where_ours_are_not():
    theirs = lightly_module("loss.swav_loss").sinkhorn
    scores = draw(5, 4).float().detach()
    torch.testing.assert_close(sinkhorn(scores), theirs(scores))
    for far in (scores * 50, torch.cat([scores, torch.full((1, 4), -200.0)])):
        assert theirs(far).isnan().any()
        assert sinkhorn(far).isfinite().all()


@needs_lightly
def test_momentum_contrast():
    """Theirs has no stop on the key, as ours with the block open. It normalises; ours takes unit vectors."""
    q, k = draw(4, 3), draw(4, 3)
    theirs = lightly_module("loss.ntx_ent_loss").NTXentLoss(temperature=0.2, memory_bank_size=(8, 3)).double()
    queue = theirs.memory_bank.bank.clone()
    theirs.memory_bank._dequeue_and_enqueue = lambda keys: None  # it moves the keys of a graph that still needs them

    def ours():
        return moco_loss(*[nn.functional.normalize(x, dim=1) for x in (q, k)], queue, temperature=0.2)

    same(ours(), theirs(q, k.detach()), q, k)
    with unblock(MOCO_KEY):
        same(ours(), theirs(q, k), q, k)


@needs_lightly
def test_the_peers_update_leaves_the_running_statistics_behind():
    student = nn.BatchNorm1d(3)
    teacher, other = EMATeacher(student, momentum=0.5), nn.BatchNorm1d(3)
    with torch.no_grad():
        student.weight += 1
        student.running_mean += 5
    lightly_module("models.utils").update_momentum(student, other, 0.5)
    teacher.update(student)
    torch.testing.assert_close(teacher.module.weight.data, other.weight.data)
    assert other.running_mean.tolist() == [0, 0, 0]
    assert teacher.module.running_mean.tolist() == [2.5, 2.5, 2.5]


def byol_pytorch():
    """Return its module, which needs names of torchvision and einops and, for its loss and average, none of them."""
    for name in ("torchvision", "einops"):
        sys.modules.setdefault(name, ModuleType(name))
    sys.modules["torchvision"].transforms = sys.modules["einops"].rearrange = None
    spec = importlib.util.spec_from_file_location("byol_apart", Path(BYOL.origin).parent / "byol_pytorch.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@needs_byol
def test_byol():
    q, z = draw(4, 5), draw(4, 5)
    theirs = byol_pytorch().cosine_loss_fn
    same(byol_loss(q, z), theirs(q, z.detach()).mean(), q, z)
    with unblock(BYOL_TARGET):
        same(byol_loss(q, z), theirs(q, z).mean(), q, z)


@needs_byol
def test_the_average_of_byol_pytorch_leaves_the_running_statistics_behind():
    module, student = byol_pytorch(), nn.BatchNorm1d(3)
    teacher, other = EMATeacher(student, momentum=0.5), nn.BatchNorm1d(3)
    with torch.no_grad():
        student.weight += 1
        student.running_mean += 5
    module.update_moving_average(module.EMA(0.5), other, student)
    teacher.update(student)
    torch.testing.assert_close(teacher.module.weight.data, other.weight.data)
    assert other.running_mean.tolist() == [0, 0, 0]
    assert teacher.module.running_mean.tolist() == [2.5, 2.5, 2.5]
