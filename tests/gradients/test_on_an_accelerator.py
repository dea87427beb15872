"""The questions, asked of a program on an accelerator: their answers are those on the CPU."""

import copy
from collections.abc import Callable

import pytest
import torch
from accelerator import ACCELERATOR
from torch import Tensor, nn

from toolkit import audit, compare, stop_gradient, stop_recording
from toolkit.gradients import (
    audited,
    field_jacobian,
    gradcheck,
    gradgradcheck,
    graph,
    measure_memory,
    memory_ledger,
    mode_lint,
)

pytestmark = pytest.mark.gpu


def _program() -> nn.ModuleDict:
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh())
    return nn.ModuleDict({"body": body, "head": nn.Linear(4, 2)}).double()


def _loss(net: nn.ModuleDict, device: str) -> Callable[[], Tensor]:
    x = torch.linspace(-1, 2, 15, dtype=torch.float64).view(5, 3).to(device)

    def loss() -> Tensor:
        h = net["body"](x)
        with stop_recording("accelerator.region"):
            scale = net["body"](x * 2).mean()
        noise = torch.randn(5, 4, dtype=torch.float64, device=device) * 0  # a draw there
        return (net["head"](stop_gradient(h, "accelerator.h")) * net["head"](h + noise)).sum() * scale

    return loss


def _both() -> list[tuple[nn.ModuleDict, Callable[[], Tensor]]]:
    here = _program()
    there = copy.deepcopy(here).to(ACCELERATOR)
    return [(here, _loss(here, "cpu")), (there, _loss(there, ACCELERATOR))]


def test_a_comparison() -> None:
    (net, loss), (moved, elsewhere) = _both()
    here, there = compare(loss, net), compare(elsewhere, moved)
    assert [effect.verdict for effect in there.effects] == [effect.verdict for effect in here.effects]
    assert [effect.leak for effect in there.effects] == pytest.approx([effect.leak for effect in here.effects])
    for names in ([], ["accelerator.h"], ["accelerator.h", "accelerator.region"]):
        for name, gradient in there.gradient(names).items():
            assert gradient.device.type == ACCELERATOR
            torch.testing.assert_close(gradient.cpu(), here.gradient(names)[name])
    for part, gradients in there.attribution().items():
        torch.testing.assert_close(
            {name: gradient.cpu() for name, gradient in gradients.items()}, here.attribution()[part]
        )
    assert there.interaction == pytest.approx(here.interaction, abs=1e-12)
    assert "accelerator.h" in str(there)


@pytest.mark.slow
def test_audits_of_a_loss_and_of_a_step() -> None:
    (net, loss), (moved, elsewhere) = _both()
    here, there = audit(loss, net), audit(elsewhere, moved)
    with audited(moved) as step:
        elsewhere().backward()
    (stepped,) = step.audits
    found = [[(effect.site, effect.verdict) for effect in answer.effects] for answer in (here, there, stepped)]
    assert found[0] == found[1] == found[2]
    assert [effect.leak for effect in stepped.effects] == pytest.approx([effect.leak for effect in here.effects])


def test_a_field() -> None:
    def field(device: str) -> tuple[float, Tensor]:
        w = torch.tensor([0.3, -1.2, 2.0], dtype=torch.float64).to(device).requires_grad_()
        found = field_jacobian(lambda: (stop_gradient(w, "accelerator.w").roll(1) * w * w).sum(), w)
        return found.asymmetry, found.jacobian.cpu()

    (here, matrix), (there, other) = field("cpu"), field(ACCELERATOR)
    assert there == pytest.approx(here)
    torch.testing.assert_close(other, matrix)


def test_finite_differences() -> None:
    w = torch.tensor([0.3, -1.2, 2.0], dtype=torch.float64).to(ACCELERATOR).requires_grad_()
    assert gradcheck(lambda v: stop_gradient(v, "accelerator.v") * v, (w,))
    assert gradgradcheck(lambda v: stop_gradient(v, "accelerator.v") * v**3, (w,))


def test_the_graph_and_the_memory() -> None:
    (net, loss), (moved, elsewhere) = _both()
    assert graph(elsewhere, moved).reachable() == graph(loss, net).reachable()
    assert measure_memory(elsewhere).graph > 0
    assert "accelerator.region" in str(memory_ledger(elsewhere))


def test_modes() -> None:
    x = torch.tensor([0.3, -1.2], dtype=torch.float64).to(ACCELERATOR)
    assert mode_lint(lambda v: stop_gradient(v, "accelerator.m") * v, (x,)) == mode_lint(
        lambda v: stop_gradient(v, "accelerator.m") * v, (x.cpu(),)
    )
