"""Time of an audit against the passes that it replaces."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks._measure import Row, timed_row
from toolkit.gradients import Audit, audit

N_SITES = 5


class Residual(nn.Module):
    """Two 3 x 3 convolutions with batch normalization, beside a path that skips them."""

    def __init__(self, n_in: int, n_out: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(n_in, n_out, 3, stride, padding=1, bias=False)
        self.second = nn.Conv2d(n_out, n_out, 3, padding=1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(n_out) for _ in range(2))
        same = stride == 1 and n_in == n_out
        self.skip = nn.Identity() if same else nn.Conv2d(n_in, n_out, 1, stride, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        """Return (N, n_out, H / stride, W / stride) of (N, n_in, H, W)."""
        hidden = F.relu(self.norms[0](self.first(images)))
        return F.relu(self.norms[1](self.second(hidden)) + self.skip(images))


class ResNet18(nn.Module):
    """The 18 layers and 11 million parameters of He et al., "Deep residual learning", 2016, table 1, for small images.

    A tenth of each stage's result is added as a constant: four stops in the depth of the network.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 64, 3, padding=1, bias=False)
        widths = [64, 64, 128, 256, 512]
        self.stages = nn.ModuleList(
            nn.Sequential(Residual(n_in, n_out, 1 if i == 0 else 2), Residual(n_out, n_out, 1))
            for i, (n_in, n_out) in enumerate(itertools.pairwise(widths))
        )
        self.head = nn.Linear(512, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits, (N, 10), of (N, 3, H, W)."""
        first, second, third, fourth = self.stages
        hidden = F.relu(self.stem(images))
        hidden = 0.9 * (hidden := first(hidden)) + 0.1 * hidden.detach()
        hidden = 0.9 * (hidden := second(hidden)) + 0.1 * hidden.detach()
        hidden = 0.9 * (hidden := third(hidden)) + 0.1 * hidden.detach()
        hidden = 0.9 * (hidden := fourth(hidden)) + 0.1 * hidden.detach()
        return self.head(hidden.mean((2, 3)))


def rows() -> Iterator[Row]:
    """Measure an audit of a ResNet-18 with 5 stops, and of a small step, in float32."""
    torch.manual_seed(0)
    net, images, labels = ResNet18(), torch.randn(8, 3, 32, 32), torch.randint(10, (8,))
    parameters = list(net.parameters())

    def loss() -> Tensor:
        logits = net(images)
        with torch.no_grad():
            confidence = logits.softmax(1).amax(1)
        return (F.cross_entropy(logits, labels, reduction="none") * confidence).mean()

    def plain_passes() -> list[tuple[Tensor, ...]]:
        return [torch.autograd.grad(loss(), parameters) for _ in range(N_SITES + 2)]

    def audited() -> Audit:
        return audit(loss, net)

    def backward_passes() -> list[tuple[Tensor, ...]]:
        value = loss()
        return [torch.autograd.grad(value, parameters, retain_graph=True) for _ in range(N_SITES + 2)]

    before = attributes_of_torch()
    found = audited()
    assert attributes_of_torch() == before, "an attribute of torch stayed replaced"
    assert found.valid, found.reason
    assert len(found.effects) == N_SITES
    size = "ResNet-18, 8 images of 32 x 32"
    passes = {f"{N_SITES + 2} forward and": plain_passes, f"1 forward, {N_SITES + 2}": backward_passes}
    for name, theirs in passes.items():
        what = f"audit, {N_SITES} places / {name} backward passes, {size}"
        yield timed_row(what, audited, theirs, "at most 1.1", repeats=5)
    yield _small_step()


def _small_step() -> Row:
    """Measure the audit of a step that takes less than a millisecond: the cost beside the passes."""
    torch.manual_seed(0)
    net, inputs, targets = nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 1)), torch.randn(16, 20), 1.0

    def loss() -> Tensor:
        hidden = net[:2](inputs)
        found = net[2](0.9 * hidden + 0.1 * hidden.detach())
        weights = found.detach().abs()
        return (weights * (found - targets).square()).mean() + (found - hidden.detach().mean()).square().mean()

    def steps() -> list[tuple[Tensor, ...]]:
        return [torch.autograd.grad(loss(), list(net.parameters())) for _ in range(n_places + 1)]

    n_places = len(audit(loss, net).effects)
    assert n_places == 3
    what = f"audit, {n_places} places / {n_places + 1} steps, MLP with two layers, 16 samples"
    return timed_row(what, lambda: audit(loss, net), steps, "at most 4")


def attributes_of_torch() -> list[object]:
    """Return the attributes of torch that an audit replaces while it runs, and has to restore."""
    owners = (Tensor, nn.Parameter, torch.no_grad, torch.enable_grad, torch.inference_mode, torch.set_grad_enabled)
    return [value for owner in owners for value in vars(owner).values()] + [torch.tensor, torch.asarray, torch.detach]
