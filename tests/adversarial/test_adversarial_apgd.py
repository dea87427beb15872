"""APGD: the steps of its paper, exact where the worst case is known, and the losses without a scale."""

import contextlib
import math
from collections.abc import Mapping
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from contract import BlockCase
from test_adversarial import (
    MODES,
    NORMS,
    Array,
    fragile,
    inputs,
    network,
    network_parameters,
    paper_gradient,
    paper_projection,
    paper_slope,
    snapshot,
)
from torch import Tensor, nn

from toolkit.adversarial import EXAMPLE, adversarial_loss, difference_loss, margin_loss
from toolkit.adversarial.attacks.apgd import apgd
from toolkit.adversarial.attacks.losses import dlr_loss, targeted_dlr_loss
from toolkit.adversarial.certificates.linear import certify_linear

# --- the algorithm on paper, one sample at a time, without autograd and code of the project -----------------------

STEPS = 14
CHECKPOINTS = (4, 6, 8, 10, 12, 13, 14)  # 22, 41, 57, 70, 80, 87, 93 % of 14, rounded up


def paper_loss(p: Mapping[str, Array], x: Array, label: int) -> float:
    z = p["w2"] @ np.tanh(p["w1"] @ x + p["b1"]) + p["b2"]
    others = np.delete(z, label)
    return float(np.log(np.exp(others - others.max()).sum()) + others.max() - z[label])


def paper_apgd(p: Mapping[str, Array], clean: Array, label: int, *, epsilon: float, norm: str) -> Array:
    def step(offset: Array, length: float) -> Array:
        slope = paper_slope(p, clean + offset, label)
        direction = np.sign(slope) if norm == "linf" else slope / np.linalg.norm(slope)
        return paper_projection(offset + length * direction, clean, epsilon, norm)

    length, offset = 2 * epsilon, np.zeros_like(clean)
    points, losses = [offset], [paper_loss(p, clean, label)]
    best, greatest = offset, losses[0]
    last_checkpoint, rises, halved_before, greatest_before = 0, 0, False, -math.inf
    first_checkpoint = True
    before, now = offset, offset
    for t in range(STEPS):
        if t in CHECKPOINTS:
            stalled = not first_checkpoint and not halved_before and greatest <= greatest_before
            halved = rises < 0.75 * (t - last_checkpoint) or stalled
            first_checkpoint, last_checkpoint, rises = False, t, 0
            halved_before, greatest_before = halved, greatest
            if halved:
                length, now, losses[-1] = length / 2, best, greatest
        target = step(now, length)
        if t > 0:
            target = paper_projection(now + 0.75 * (target - now) + 0.25 * (now - before), clean, epsilon, norm)
        before, now = now, target
        points.append(now)
        losses.append(paper_loss(p, clean + now, label))
        rises += losses[-1] > losses[-2]
        if losses[-1] > greatest:
            best, greatest = now, losses[-1]
    return clean + best


def on_paper(parameters: Mapping[str, Tensor], *, epsilon: float, norm: str) -> Tensor:
    p = {name: value.detach().numpy() for name, value in parameters.items()}
    x, labels = inputs()
    rows = [
        paper_apgd(p, row, label, epsilon=epsilon, norm=norm)
        for row, label in zip(x.numpy(), labels.tolist(), strict=True)
    ]
    return torch.from_numpy(np.stack(rows))


def network_case(norm: str, epsilon: float) -> BlockCase:
    attack = partial(apgd, epsilon=epsilon, norm=norm, steps=STEPS, until="end")

    def loss(parameters: Mapping[str, Tensor]) -> Tensor:
        return adversarial_loss(network(parameters), *inputs(), attack=attack)

    def blocked(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return paper_gradient(parameters, on_paper(parameters, epsilon=epsilon, norm=norm), inputs()[1])

    return BlockCase(
        id=f"APGD in {norm}, tanh network",
        block=EXAMPLE,
        parameters=network_parameters,
        loss=loss,
        blocked=blocked,
        opened=blocked if norm == "linf" else None,  # a sign has no derivative
        tolerance=1e-10 if norm == "linf" else 1e-8,
    )


BLOCK_CASES = [network_case("linf", 0.4), network_case("l2", 0.9)]


@pytest.mark.portable
@pytest.mark.parametrize(("norm", "epsilon"), [("linf", 0.1), ("linf", 0.4), ("l2", 0.3), ("l2", 0.9), ("l2", 1.5)])
def test_example_is_that_of_the_paper(norm: str, epsilon: float) -> None:
    parameters = network_parameters()
    example = apgd(network(parameters), *inputs(), epsilon=epsilon, norm=norm, steps=STEPS, until="end")
    torch.testing.assert_close(example, on_paper(parameters, epsilon=epsilon, norm=norm), rtol=0, atol=1e-9)


def test_checkpoints_are_those_of_the_paper() -> None:
    from toolkit.adversarial.attacks.apgd import _checkpoints

    assert list(_checkpoints(100)) == [22, 41, 57, 70, 80, 87, 93, 99]
    assert tuple(_checkpoints(STEPS)) == CHECKPOINTS


@pytest.mark.parametrize("norm", NORMS)
def test_linear_model_of_two_classes_is_attacked_to_its_exact_worst_case(norm: str) -> None:
    generator = torch.Generator().manual_seed(2)
    weight, x = (torch.randn(n, 8, generator=generator, dtype=torch.float64) for n in (2, 20))
    x = x.mul(0.5).add(0.5).clamp(0, 1)
    labels = F.linear(x, weight).argmax(1)
    epsilon = {"linf": 0.15, "l2": 0.5, "l1": 1.2}[norm]
    worst = certify_linear(weight, None, x, labels, epsilon=epsilon, norm=norm)
    example = apgd(partial(F.linear, weight=weight), x, labels, epsilon=epsilon, norm=norm, steps=100, until="end")
    assert 0 < (worst < 0).sum() < 20
    reached = -difference_loss(F.linear(example, weight), labels)
    torch.testing.assert_close(reached, worst, rtol=0, atol=1e-6 if norm == "l2" else 1e-12)


# --- what it returns ---------------------------------------------------------------------------------------------


class Recording(nn.Module):
    """A network that writes down all that it is run on."""

    def __init__(self) -> None:
        super().__init__()
        self.network, self.seen = network(network_parameters()), []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x.detach().clone())
        return self.network(x)


@pytest.mark.parametrize("norm", NORMS)
def test_greatest_loss_of_all_steps_is_kept(norm: str) -> None:
    model, (x, labels) = Recording(), inputs()
    example = apgd(model, x, labels, epsilon=0.5, norm=norm, steps=20, until="end")
    assert len(model.seen) == 21
    losses = torch.stack([margin_loss(model.network(seen), labels) for seen in model.seen])
    torch.testing.assert_close(margin_loss(model.network(example), labels), losses.amax(0), rtol=0, atol=1e-12)


def test_sample_is_left_at_its_first_success() -> None:
    model, (x, _) = Recording(), inputs()
    labels = model.network(x).argmax(1)
    labels[0] = (labels[0] + 1) % 3  # wrong from the start
    example = apgd(model, x, labels, epsilon=torch.tensor([0.5, 1.0, 0.0]), steps=20)
    assert torch.equal(example[0], x[0])
    assert [len(seen) for seen in model.seen[:2]] == [3, 2]
    assert len(model.seen[-1]) == 1
    predicted = model.network(example).argmax(1)
    assert (predicted == labels).tolist() == [False, False, True]
    assert any(torch.equal(example[1], row) for seen in model.seen for row in seen)


@pytest.mark.parametrize("loss", ["margin", "dlr"])
@pytest.mark.parametrize("norm", NORMS)
def test_targets_are_reached(norm: str, loss: str) -> None:
    weight = torch.randn(5, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    x = torch.rand(20, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    model = partial(F.linear, weight=weight)
    labels = model(x).argmax(1)
    targets = (labels + 1) % 5
    epsilon = {"linf": 0.5, "l2": 1.2, "l1": 3.0}[norm]
    attack = partial(apgd, model, x, labels, epsilon=epsilon, norm=norm, steps=30, loss=loss)
    reached, away = model(attack(targets=targets)).argmax(1), model(attack()).argmax(1)
    assert (reached == targets).sum() >= 10
    assert (reached == targets).sum() > (away == targets).sum()


def test_ascents_from_random_points_keep_the_best() -> None:
    model, (x, labels) = network(network_parameters()), inputs()

    def attack(restarts: int) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        return apgd(
            model, x, labels, epsilon=0.6, norm="l2", steps=3, restarts=restarts, until="end", generator=generator
        )

    losses = [margin_loss(model(attack(restarts)), labels) for restarts in (1, 2, 6)]
    assert (losses[2] >= losses[1] - 1e-12).all()
    assert (losses[1] >= losses[0] - 1e-12).all()
    assert (losses[2] > losses[0] + 1e-6).any()


@pytest.mark.parametrize("factor", [10.0, 1e3, 1e6])
@pytest.mark.parametrize("loss", ["margin", "dlr"])
def test_factor_on_the_logits_saves_no_sample(loss: str, factor: float) -> None:
    """In single precision, where the cross entropy of the confident model has no gradient."""
    parameters = {name: value.float() for name, value in network_parameters().items()}
    model = network(parameters)
    x = torch.rand(200, 5, generator=torch.Generator().manual_seed(0))
    labels = model(x).argmax(1)
    attack = partial(apgd, x=x, labels=labels, epsilon=0.1, steps=20, loss=loss)
    doubtful = model(attack(model)).argmax(1) == labels
    confident = model(attack(lambda x: factor * model(x))).argmax(1) == labels
    saturated = model(attack(lambda x: 1e6 * model(x), loss=partial(F.cross_entropy, reduction="none")))
    assert 0 < doubtful.sum() < 200
    assert torch.equal(confident, doubtful)
    assert (saturated.argmax(1) == labels).sum() > doubtful.sum()


@pytest.mark.parametrize("norm", NORMS)
def test_rows_do_not_depend_on_each_other(norm: str) -> None:
    model, (x, labels) = network(network_parameters()), inputs()
    epsilon = torch.tensor([0.3, 0.0, 0.7])
    for until in ("success", "end"):
        attack = partial(apgd, model, norm=norm, steps=12, until=until)
        together = attack(x, labels, epsilon=epsilon)
        alone = [attack(x[i : i + 1], labels[i : i + 1], epsilon=epsilon[i].item()) for i in range(3)]
        torch.testing.assert_close(together, torch.cat(alone), rtol=0, atol=1e-13)
        assert torch.equal(together[1], x[1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("norm", NORMS)
def test_example_lies_in_ball_box_and_mask_in_exact_arithmetic(norm: str, dtype: torch.dtype) -> None:
    x = torch.rand(20, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64).mul(1.4).sub(0.2)
    x, mask = x.clamp(0, 1).to(dtype), torch.arange(9) % 3 > 0
    weight = torch.randn(4, 9, generator=torch.Generator().manual_seed(1)).to(dtype)
    epsilon, generator = 8 / 255, torch.Generator().manual_seed(1)
    attack = partial(apgd, partial(F.linear, weight=weight), x, torch.arange(20) % 4, epsilon=epsilon, norm=norm)
    example = attack(steps=8, mask=mask, until="end", restarts=2, generator=generator)
    assert example.dtype == dtype
    assert torch.equal(example[:, ~mask], x[:, ~mask])
    assert 0 <= example.min() <= example.max() <= 1
    for moved, clean in zip(example.tolist(), x.tolist(), strict=True):
        offset = [abs(Fraction(a) - Fraction(b)) for a, b in zip(moved, clean, strict=True)]
        size = {"linf": max(offset), "l1": sum(offset), "l2": sum(d * d for d in offset)}[norm]
        assert size <= Fraction(epsilon) ** (2 if norm == "l2" else 1)


def test_no_samples() -> None:
    x, labels = inputs()
    example = apgd(network(network_parameters()), x[:0], labels[:0], epsilon=0.1)
    assert example.shape == (0, 5)


# --- losses without a scale --------------------------------------------------------------------------------------

LOGITS = [[0.3, -1.2, 2.0, 0.9], [1.0, 0.2, -0.5, 3.1], [-0.4, 0.8, 0.1, -2.0]]


def test_difference_of_logits_ratio_is_that_of_the_paper() -> None:
    logits, labels = torch.tensor(LOGITS, dtype=torch.float64), torch.tensor([2, 1, 0])
    expected = [-(2.0 - 0.9) / (2.0 - 0.3), -(0.2 - 3.1) / (3.1 - 0.2), -(-0.4 - 0.8) / (0.8 + 0.4)]
    torch.testing.assert_close(dlr_loss(logits, labels), torch.tensor(expected, dtype=torch.float64))
    targets = torch.tensor([0, 3, 2])
    expected = [
        -(2.0 - 0.3) / (2.0 - (0.3 - 1.2) / 2),
        -(0.2 - 3.1) / (3.1 - (0.2 - 0.5) / 2),
        0.5 / (0.8 + (0.4 + 2) / 2),
    ]
    found = targeted_dlr_loss(logits, labels, targets)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize(("factor", "shift"), [(1e4, 0.0), (1.0, 30.0), (0.01, -7.0)])
def test_difference_of_logits_ratio_has_no_scale(factor: float, shift: float) -> None:
    logits, labels, targets = (
        torch.tensor(LOGITS, dtype=torch.float64),
        torch.tensor([2, 1, 0]),
        torch.tensor([0, 3, 2]),
    )
    moved = factor * logits + shift
    torch.testing.assert_close(dlr_loss(moved, labels), dlr_loss(logits, labels))
    torch.testing.assert_close(targeted_dlr_loss(moved, labels, targets), targeted_dlr_loss(logits, labels, targets))


def test_target_that_is_third_has_a_gradient() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]], dtype=torch.float64, requires_grad=True)
    losses = [targeted_dlr_loss(logits, torch.tensor([0]), torch.tensor([2])), dlr_loss(logits, torch.tensor([2]))]
    slopes = [torch.autograd.grad(loss.sum(), logits)[0].abs().sum() for loss in losses]
    assert slopes[0] > 0.1
    assert slopes[1] == 0  # why the denominators differ


def test_losses_have_exact_derivatives_and_none_where_all_logits_are_equal() -> None:
    logits = torch.tensor(LOGITS, dtype=torch.float64, requires_grad=True)
    labels, targets = torch.tensor([2, 1, 0]), torch.tensor([0, 3, 2])
    assert torch.autograd.gradcheck(lambda z: dlr_loss(z, labels), logits)
    assert torch.autograd.gradcheck(lambda z: targeted_dlr_loss(z, labels, targets), logits)
    equal = torch.ones(1, 4, requires_grad=True)
    for loss in (dlr_loss(equal, torch.tensor([1])), targeted_dlr_loss(equal, torch.tensor([1]), torch.tensor([0]))):
        assert loss.item() == 0
        assert torch.equal(torch.autograd.grad(loss.sum(), equal)[0], torch.zeros(1, 4))


# --- nothing is touched ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("breaks", [False, True], ids=["sound", "breaking"])
@pytest.mark.parametrize("norm", NORMS)
def test_attack_leaves_everything_as_it_was(norm: str, breaks: bool, mode: str) -> None:
    model, x, labels = fragile()
    model.calls_left = 3 if breaks else 1000
    before = snapshot(model, x, labels)
    attack = partial(apgd, model, x, labels, epsilon=0.1, norm=norm, steps=5, until="end", restarts=2)
    with pytest.raises(FloatingPointError) if breaks else contextlib.nullcontext(), MODES[mode]():
        example = attack(generator=torch.Generator())
        assert not example.requires_grad
        assert not example.is_inference()
    assert all(map(torch.equal, snapshot(model, x, labels), before))
    assert model.modes == {False}


REFUSED = {
    "steps": ({"steps": 0}, "`steps` should be a positive integer. Found 0."),
    "restarts": ({"restarts": 2, "random_start": False}, "`random_start` should be True for several restarts"),
    "loss": ({"loss": "ce"}, "`loss` should be 'margin', 'dlr' or a function. Found 'ce'."),
    "until": ({"until": "dawn"}, "`until` should be one of 'success', 'end'. Found 'dawn'."),
    "classes": (
        {"loss": "dlr", "model": nn.Linear(5, 2).double(), "labels": torch.tensor([0, 1, 0])},
        "`logits` should have at least 3 classes for this loss. Found 2.",
    ),
    "classes, targeted": (
        {"loss": "dlr", "targets": torch.tensor([0, 1, 2])},
        "`logits` should have at least 4 classes for this loss. Found 3.",
    ),
    "a mean loss": ({"loss": F.cross_entropy}, "`loss` should return one value per sample"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    changed, message = REFUSED[name]
    x, labels = inputs()
    arguments = {"model": network(network_parameters()), "x": x, "labels": labels, "epsilon": 0.1}
    with pytest.raises(ValueError) as raised:
        apgd(**(arguments | changed))
    assert message in str(raised.value)
