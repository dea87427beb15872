"""Attacks and adversarial training: exact examples, nothing left behind, and what is differentiated through them."""

import contextlib
import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from contract import BlockCase, finite_differences, relative_error
from each import each
from numpy.typing import NDArray
from scipy.optimize import brentq
from torch import Tensor, nn

from toolkit import stop_gradient, unblock
from toolkit.adversarial import EXAMPLE, adversarial_loss, fgsm, margin_loss, mi_fgsm, pgd
from toolkit.gradients import compare
from toolkit.gradients.memory import measure_memory

NORMS = ["linf", "l2", "l1"]
Array = NDArray[np.float64]


# --- a network, and everything about it on paper: no autograd, no code of the project -----------------------------


def network(parameters: Mapping[str, Tensor]) -> Callable[[Tensor], Tensor]:
    """Three classes behind one layer of tanh."""
    return lambda x: torch.tanh(x @ parameters["w1"].T + parameters["b1"]) @ parameters["w2"].T + parameters["b2"]


def network_parameters() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = {"w1": (4, 5), "b1": (4,), "w2": (3, 4), "b2": (3,)}
    return {
        name: (1.5 * torch.randn(shape, generator=generator, dtype=torch.float64)).requires_grad_()
        for name, shape in shapes.items()
    }


def inputs() -> tuple[Tensor, Tensor]:
    """Some coordinates start on the box, so that the attack is stopped there."""
    x = [[0.1, 0.0, 0.9, 0.55, 1.0], [0.3, 0.8, 0.02, 1.0, 0.4], [0.0, 0.35, 0.6, 0.97, 0.0]]
    return torch.tensor(x, dtype=torch.float64), torch.tensor([2, 0, 1])


def paper_slope(p: Mapping[str, Array], x: Array, label: int) -> Array:
    """Derivative of ``logsumexp_{j != y} z_j - z_y`` by one input."""
    hidden = np.tanh(p["w1"] @ x + p["b1"])
    z = p["w2"] @ hidden + p["b2"]
    share = np.exp(np.delete(z, label) - np.delete(z, label).max())
    cotangent = np.insert(share / share.sum(), label, -1.0)
    return p["w1"].T @ ((1 - hidden**2) * (p["w2"].T @ cotangent))


def paper_projection(offset: Array, x: Array, epsilon: float, norm: str) -> Array:
    if norm == "linf":
        return np.clip(np.clip(offset, -epsilon, epsilon), -x, 1 - x)
    excess = lambda s: np.linalg.norm(np.clip(s * offset, -x, 1 - x)) - epsilon  # noqa: E731
    scale = 1.0 if excess(1.0) <= 0 else brentq(excess, 0.0, 1.0, xtol=1e-15, rtol=1e-15)
    return np.clip(scale * offset, -x, 1 - x)


def paper_pgd(
    parameters: Mapping[str, Tensor], x: Tensor, labels: Tensor, *, epsilon: float, steps: int, size: float, norm: str
) -> Tensor:
    p = {name: value.detach().numpy() for name, value in parameters.items()}
    rows = []
    for clean, label in zip(x.numpy(), labels.tolist(), strict=True):
        offset = np.zeros_like(clean)
        for _ in range(steps):
            slope = paper_slope(p, clean + offset, label)
            direction = np.sign(slope) if norm == "linf" else slope / np.linalg.norm(slope)
            offset = paper_projection(offset + size * direction, clean, epsilon, norm)
        rows.append(clean + offset)
    return torch.from_numpy(np.stack(rows))


def paper_gradient(parameters: Mapping[str, Tensor], x: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Gradient of the mean cross entropy by the parameters, at given inputs."""
    p = {name: value.detach() for name, value in parameters.items()}
    hidden = torch.tanh(x @ p["w1"].T + p["b1"])
    z = hidden @ p["w2"].T + p["b2"]
    at_logits = (torch.softmax(z, 1) - F.one_hot(labels, 3)) / len(x)
    at_hidden = (at_logits @ p["w2"]) * (1 - hidden**2)
    return {"w1": at_hidden.T @ x, "b1": at_hidden.sum(0), "w2": at_logits.T @ hidden, "b2": at_logits.sum(0)}


ATTACKS = {
    "PGD in L2": {"norm": "l2", "epsilon": 0.6, "steps": 4},
    "PGD in Linf": {"norm": "linf", "epsilon": 0.2, "steps": 4},
    "FGSM in L2": {"norm": "l2", "epsilon": 0.4, "steps": 1, "step_size": 0.4},
}


def on_paper(name: str, parameters: Mapping[str, Tensor]) -> Tensor:
    settings = dict(ATTACKS[name])
    size = settings.pop("step_size", 2.5 * settings["epsilon"] / settings["steps"])
    return paper_pgd(parameters, *inputs(), size=size, **settings)


def network_case(name: str) -> BlockCase:
    def loss(parameters: Mapping[str, Tensor]) -> Tensor:
        return adversarial_loss(network(parameters), *inputs(), attack=partial(pgd, **ATTACKS[name]))

    def blocked(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return paper_gradient(parameters, on_paper(name, parameters), inputs()[1])

    leaks_nothing = ATTACKS[name]["norm"] == "linf"
    return BlockCase(
        id=f"{name}, tanh network",
        block=EXAMPLE,
        parameters=network_parameters,
        loss=loss,
        blocked=blocked,
        opened=blocked if leaks_nothing else None,
    )


# --- a linear classifier: the attack reaches the maximum, and Danskin's theorem gives the gradient ---------------


def linear_parameters() -> dict[str, Tensor]:
    weight = torch.tensor([[0.7, -1.1, 0.4, 0.3, -0.2], [-0.5, 0.6, 0.1, -0.9, 0.8]], dtype=torch.float64)
    bias = torch.tensor([0.2, -0.3], dtype=torch.float64)
    return {"weight": weight.requires_grad_(), "bias": bias.requires_grad_()}


def danskin(parameters: Mapping[str, Tensor], *, epsilon: float, norm: str) -> dict[str, Tensor]:
    """Gradient of ``E softplus(eps |u|_* - margin)`` with ``u = w_other - w_y``, without a box."""
    x, labels = inputs()[0], torch.tensor([1, 0, 1])
    weight, bias = (parameters[name].detach() for name in ("weight", "bias"))
    at_weight, at_bias = torch.zeros_like(weight), torch.zeros_like(bias)
    for row, label in zip(x, labels.tolist(), strict=True):
        other = 1 - label
        u = weight[other] - weight[label]
        at_largest = u.sign() * (u.abs() == u.abs().max())
        size, slope = {
            "linf": (u.abs().sum(), u.sign()),
            "l2": (u.norm(), u / u.norm()),
            "l1": (u.abs().max(), at_largest),
        }[norm]
        loss_slope = torch.sigmoid(epsilon * size + u @ row + bias[other] - bias[label]) / len(x)
        for index, sign in ((other, 1.0), (label, -1.0)):
            at_weight[index] += sign * loss_slope * (row + epsilon * slope)
            at_bias[index] += sign * loss_slope
    return {"weight": at_weight, "bias": at_bias}


def linear_case(norm: str, steps: int) -> BlockCase:
    attack = partial(pgd, epsilon=0.3, norm=norm, steps=steps, bounds=None)

    def loss(parameters: Mapping[str, Tensor]) -> Tensor:
        model = partial(F.linear, **parameters)
        return adversarial_loss(model, inputs()[0], torch.tensor([1, 0, 1]), attack=attack)

    witness = partial(danskin, epsilon=0.3, norm=norm)
    return BlockCase(
        id=f"PGD-{steps} in {norm}, linear classifier: Danskin",
        block=EXAMPLE,
        parameters=linear_parameters,
        loss=loss,
        blocked=witness,
        opened=witness,
    )


# --- an attack that is not ours: it moves the input by what the parameters say ------------------------------------


def foreign_case() -> BlockCase:
    def loss(parameters: Mapping[str, Tensor]) -> Tensor:
        return adversarial_loss(network(parameters), *inputs(), attack=lambda model, x, labels: x * parameters["b1"][0])

    def blocked(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        x, labels = inputs()
        return paper_gradient(parameters, x * parameters["b1"][0].detach(), labels)

    return BlockCase(
        id="a differentiable attack of the user's own",
        block=EXAMPLE,
        parameters=network_parameters,
        loss=loss,
        blocked=blocked,
    )


BLOCK_CASES: list[BlockCase] = [
    *(network_case(name) for name in ATTACKS),
    *(linear_case(norm, steps) for norm in NORMS for steps in (1, 6)),
    foreign_case(),
]


# --- the examples ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ATTACKS)
def test_example_is_that_of_the_equations(name: str) -> None:
    parameters = network_parameters()
    example = pgd(network(parameters), *inputs(), **ATTACKS[name])
    torch.testing.assert_close(example, on_paper(name, parameters), rtol=0, atol=1e-13)


@pytest.mark.parametrize("norm", NORMS)
def test_fgsm_is_one_step_of_length_epsilon(norm: str) -> None:
    model = network(network_parameters())
    one_step = pgd(model, *inputs(), epsilon=0.2, norm=norm, steps=1, step_size=0.2)
    assert torch.equal(fgsm(model, *inputs(), epsilon=0.2, norm=norm), one_step)


@pytest.mark.parametrize("random_start", [False, True], ids=["from x", "random start"])
@each("epsilon", [0.1, 8 / 255, 0.5])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_example_lies_in_ball_and_box_in_exact_arithmetic(
    dtype: torch.dtype, norm: str, epsilon: float, random_start: bool
) -> None:
    x = torch.rand(40, 17, generator=torch.Generator().manual_seed(0), dtype=torch.float64).mul(1.4).sub(0.2)
    x = x.clamp(0, 1).to(dtype)
    model = nn.Linear(17, 3).to(dtype)
    generator = torch.Generator().manual_seed(1) if random_start else None
    labels = torch.arange(40) % 3
    example = pgd(model, x, labels, epsilon=epsilon, norm=norm, steps=3, generator=generator)
    assert example.dtype == dtype
    assert 0 <= example.min() <= example.max() <= 1
    for moved, clean in zip(example.tolist(), x.tolist(), strict=True):
        offset = [Fraction(a) - Fraction(b) for a, b in zip(moved, clean, strict=True)]
        if norm == "linf":
            assert max(map(abs, offset)) <= Fraction(epsilon)
        else:
            assert sum(d * d for d in offset) <= Fraction(epsilon) ** 2


def test_half_precision_takes_norms_whose_squares_overflow() -> None:
    x = torch.full((2, 12), 100.0, dtype=torch.float16)
    example = pgd(nn.Linear(12, 2).half(), x, torch.tensor([0, 1]), epsilon=300, norm="l2", steps=5, bounds=None)
    distance = (example.double() - x.double()).norm(dim=1)
    assert ((distance > 299) & (distance <= 300)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("norm", NORMS)
def test_epsilon_zero_returns_the_values_of_the_input(norm: str, dtype: torch.dtype) -> None:
    x = inputs()[0].to(dtype)
    for generator in (None, torch.Generator().manual_seed(0)):
        example = pgd(nn.Linear(5, 3).to(dtype), x, inputs()[1], epsilon=0, norm=norm, steps=3, generator=generator)
        assert torch.equal(example, x)
        assert example.data_ptr() != x.data_ptr()


@pytest.mark.parametrize("norm", NORMS)
def test_rows_do_not_depend_on_each_other(norm: str) -> None:
    model, (x, labels) = network(network_parameters()), inputs()
    epsilon = torch.tensor([0.3, 0.0, 0.7])
    together = pgd(model, x, labels, epsilon=epsilon, norm=norm, steps=5)
    alone = [
        pgd(model, x[i : i + 1], labels[i : i + 1], epsilon=epsilon[i].item(), norm=norm, steps=5) for i in range(3)
    ]
    torch.testing.assert_close(together, torch.cat(alone), rtol=0, atol=1e-14)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("opened", [(), (EXAMPLE,)], ids=["blocked", "open"])
def test_sample_without_a_gradient_stays(norm: str, opened: tuple[()]) -> None:
    """The first row sees a dead unit: its gradient is exactly zero, and so is its part in what is differentiated."""
    weight = torch.ones(2, 5, dtype=torch.float64, requires_grad=True)
    model = lambda x: torch.relu(x @ weight.T - 3.5) * torch.tensor([1.0, 2.0])  # noqa: E731
    x = torch.tensor([[0.1] * 5, [0.9] * 5], dtype=torch.float64)
    with unblock(*opened):
        example = pgd(model, x, torch.tensor([0, 0]), epsilon=0.1, norm=norm, steps=2)
        gradient = torch.autograd.grad(F.cross_entropy(model(example), torch.tensor([0, 0])), weight)[0]
    assert torch.equal(example[0], x[0])
    assert (example[1] >= x[1]).all()
    moves = example[1] > x[1]
    assert moves.any() if norm == "l1" else moves.all()  # in L1 as few coordinates as can
    assert gradient.isfinite().all()


@pytest.mark.parametrize("scale", [1e-200, 1e200], ids=["squares vanish", "squares overflow"])
def test_direction_does_not_depend_on_the_size_of_the_gradient(scale: float) -> None:
    loss = lambda logits, labels: scale * margin_loss(logits, labels)  # noqa: E731
    attack = partial(pgd, network(network_parameters()), *inputs(), epsilon=0.3, norm="l2", steps=3)
    torch.testing.assert_close(attack(loss=loss), attack(), rtol=0, atol=1e-14)


@pytest.mark.parametrize("norm", NORMS)
def test_targets_are_approached(norm: str) -> None:
    """To lower the loss of a class is to raise its negative, written out."""
    model, (x, labels) = network(network_parameters()), inputs()
    targets = torch.tensor([0, 1, 2])
    attack = partial(pgd, model, x, epsilon=0.3, norm=norm, steps=3)
    example = attack(labels, targets=targets)
    raised = attack(targets, loss=lambda logits, labels: -margin_loss(logits, labels))
    torch.testing.assert_close(example, raised, rtol=0, atol=1e-14)
    assert (margin_loss(model(example), targets) < margin_loss(model(x), targets)).all()


@pytest.mark.parametrize("norm", NORMS)
def test_fast_gradient_is_that_of_the_loss(norm: str) -> None:
    attack = partial(pgd, network(network_parameters()), *inputs(), epsilon=0.3, norm=norm, steps=4)
    torch.testing.assert_close(attack(loss=margin_loss), attack(), rtol=0, atol=1e-14)


# --- the loss of the attack --------------------------------------------------------------------------------------


def test_margin_loss_is_the_log_odds_against_the_label() -> None:
    logits = torch.tensor([[0.3, -1.2, 2.0], [1.0, 0.2, -0.5]], dtype=torch.float64)
    p = torch.softmax(logits, 1)[[0, 1], [2, 1]]
    torch.testing.assert_close(margin_loss(logits, torch.tensor([2, 1])), ((1 - p) / p).log(), rtol=1e-14, atol=0)


@pytest.mark.parametrize("norm", NORMS)
def test_margin_loss_makes_the_attack_of_the_cross_entropy(norm: str) -> None:
    """Their gradients differ by a factor per sample, 1 - p_y, which neither the sign nor the norm keeps."""
    attack = partial(pgd, network(network_parameters()), *inputs(), epsilon=0.3, norm=norm, steps=4)
    torch.testing.assert_close(attack(), attack(loss=partial(F.cross_entropy, reduction="none")), rtol=0, atol=1e-13)


@pytest.mark.parametrize("confidence", [10.0, 1e3, 1e30])
@pytest.mark.parametrize("norm", NORMS)
def test_confident_model_is_attacked_as_well_as_a_doubtful_one(norm: str, confidence: float) -> None:
    parameters = {name: value.float() for name, value in linear_parameters().items()}
    x, labels = inputs()[0].float(), torch.tensor([1, 0, 1])
    attack = partial(pgd, x=x, labels=labels, epsilon=0.1, norm=norm, steps=3)
    doubtful = attack(model=lambda x: F.linear(x, **parameters))
    confident = attack(model=lambda x: confidence * F.linear(x, **parameters))
    torch.testing.assert_close(confident, doubtful, rtol=0, atol=1e-6)


def test_cross_entropy_loses_sight_of_a_confident_model() -> None:
    """Why it is not the default: where the softmax rounds to 1, its gradient is zero."""
    x = torch.full((1, 2), 0.5)
    model = lambda x: 1e3 * x @ torch.tensor([[1.0, 0.0], [1.0, 0.0]])  # noqa: E731
    attack = partial(fgsm, model, x, torch.tensor([0]), epsilon=0.1)
    assert torch.equal(attack(loss=partial(F.cross_entropy, reduction="none")), x)
    assert torch.equal(attack(), torch.tensor([[0.4, 0.4]]))


@pytest.mark.parametrize("n_classes", [2, 4])
def test_margin_loss_and_its_fast_slope_have_exact_derivatives(n_classes: int) -> None:
    from toolkit.adversarial.attacks.losses import margin_slope

    logits = torch.randn(3, n_classes, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([1, 0, 1])
    torch.testing.assert_close(
        torch.autograd.grad(margin_loss(logits, labels).sum(), logits)[0], margin_slope(logits, labels)
    )
    assert torch.autograd.gradcheck(lambda z: margin_loss(z, labels), logits)
    assert torch.autograd.gradcheck(lambda z: margin_slope(z, labels), logits)


# --- random starts -----------------------------------------------------------------------------------------------


def flat(x: Tensor) -> Tensor:
    """A model without a slope: an attack on it ends where it starts."""
    return torch.zeros(len(x), 2, dtype=x.dtype) + 0 * x.sum(1, keepdim=True)


@pytest.mark.parametrize(("norm", "dimensions"), [("linf", 1), ("l2", 3)])
def test_start_is_uniform_in_the_ball(norm: str, dimensions: int) -> None:
    x = torch.full((20_000, 3), 0.5, dtype=torch.float64)
    attack = partial(pgd, flat, x, torch.zeros(len(x), dtype=torch.long), epsilon=0.25, norm=norm, steps=1)
    offset = (attack(generator=torch.Generator().manual_seed(0)) - x) / 0.25
    share = offset[:, 0].abs() if norm == "linf" else offset.norm(dim=1) ** dimensions
    below = torch.linspace(0, 1, len(x), dtype=torch.float64)
    assert (share.sort().values - below).abs().max() < 1.63 / math.sqrt(len(x))  # Kolmogorov's bound at 1 %
    assert offset.mean(0).abs().max() < 4 / math.sqrt(len(x))


@pytest.mark.parametrize("norm", NORMS)
def test_start_depends_on_the_generator_alone(norm: str) -> None:
    def attack(seed: int) -> Tensor:
        torch.rand(7)
        return pgd(
            network(network_parameters()),
            *inputs(),
            epsilon=0.2,
            norm=norm,
            steps=2,
            generator=torch.Generator().manual_seed(seed),
        )

    assert torch.equal(attack(1), attack(1))
    assert not torch.equal(attack(1), attack(2))


# --- nothing is touched ------------------------------------------------------------------------------------------


class Fragile(nn.Module):
    """Batch normalisation, dropout, a frozen part, and an error on demand."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)
        )
        self.head = nn.Linear(16, 3)
        self.calls_left = 1000
        self.modes: set[bool] = set()

    def forward(self, x: Tensor) -> Tensor:
        self.modes |= {module.training for module in self.modules()}
        self.calls_left -= 1
        if self.calls_left < 0:
            raise FloatingPointError("the model broke")
        return self.head(self.layers(x).flatten(1))


def fragile() -> tuple[Fragile, Tensor, Tensor]:
    model = Fragile().train()
    model.layers[1].eval()  # batch normalisation frozen by its user
    model.layers[4].weight.requires_grad_(False)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 7.0)
    return model, torch.rand(5, 1, 6, 6), torch.tensor([0, 1, 2, 0, 1])


def snapshot(model: Fragile, *tensors: Tensor) -> list[Tensor]:
    flags = [module.training for module in model.modules()] + [p.requires_grad for p in model.parameters()]
    flags += [tensor.requires_grad for tensor in tensors]
    gradients = [parameter.grad for parameter in model.parameters()]
    state = [*model.state_dict().values(), *gradients, *tensors, torch.tensor(flags), torch.get_rng_state()]
    return [value.detach().clone() for value in state]


MODES = {"recording": torch.enable_grad, "no_grad": torch.no_grad, "inference_mode": torch.inference_mode}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("breaks", [False, True], ids=["sound", "breaking"])
@pytest.mark.parametrize("opened", [(), (EXAMPLE,)], ids=["blocked", "open"])
@pytest.mark.parametrize("norm", NORMS)
def test_attack_leaves_everything_as_it_was(norm: str, opened: tuple[()], breaks: bool, mode: str) -> None:
    model, x, labels = fragile()
    model.calls_left = 2 if breaks else 1000
    before = snapshot(model, x, labels)
    attack = partial(pgd, model, x, labels, epsilon=0.1, norm=norm, steps=3, generator=torch.Generator())
    unreached = contextlib.nullcontext()
    if opened and mode != "recording" and not breaks:
        unreached = pytest.raises(RuntimeError, match="opening changed nothing")
    broken = pytest.raises(FloatingPointError) if breaks else contextlib.nullcontext()
    with unreached, broken, unblock(*opened), MODES[mode]():
        attack()
    assert all(map(torch.equal, snapshot(model, x, labels), before))
    assert x.grad is None
    assert model.modes == {False}


@pytest.mark.parametrize("created_in_it", [False, True])
def test_attack_in_inference_mode_is_the_same(created_in_it: bool) -> None:
    model, x, labels = fragile()
    attack = partial(pgd, model, epsilon=0.1, norm="l2", steps=3, loss=partial(F.cross_entropy, reduction="none"))
    expected = attack(x, labels)
    with torch.inference_mode():
        found = attack(x.clone(), labels.clone()) if created_in_it else attack(x, labels)
        assert torch.is_inference_mode_enabled()
    assert torch.equal(found, expected)
    assert not found.is_inference()
    assert not found.requires_grad


def test_input_that_carries_a_gradient_is_not_touched() -> None:
    x, labels = inputs()
    x = x.requires_grad_()
    x.register_hook(lambda gradient: pytest.fail("the attack ran the hook of its input"))
    example = pgd(network(network_parameters()), x, labels, epsilon=0.1, norm="l2", steps=2)
    assert x.grad is None
    assert not example.requires_grad
    assert example.is_leaf


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "expanded"])
def test_memory_layout_of_the_input_does_not_matter(layout: str) -> None:
    x = torch.rand(4, 5, dtype=torch.float64)
    view = {"contiguous": x, "transposed": x.T.contiguous().T, "expanded": x[:1].expand(4, 5)}[layout]
    attack = partial(
        pgd, network(network_parameters()), labels=torch.tensor([0, 1, 2, 0]), epsilon=0.1, norm="l2", steps=2
    )
    assert torch.equal(attack(x=view), attack(x=view.contiguous()))


def test_training_forward_runs_in_the_mode_of_the_model() -> None:
    model, x, labels = fragile()
    adversarial_loss(model, x, labels, attack=partial(pgd, epsilon=0.1, steps=4))
    assert model.layers[1].num_batches_tracked == 0
    assert model.layers[5].num_batches_tracked == 1


# --- with the block and without ----------------------------------------------------------------------------------


def test_loss_is_the_cross_entropy_at_the_example() -> None:
    parameters, (x, labels) = network_parameters(), inputs()
    attack = partial(pgd, epsilon=0.3, steps=3)
    z = network(parameters)(attack(network(parameters), x, labels))
    expected = (z.logsumexp(1) - z[torch.arange(3), labels]).mean()
    torch.testing.assert_close(adversarial_loss(network(parameters), x, labels, attack=attack), expected)


def test_attack_of_the_users_own_is_blocked_as_well() -> None:
    parameters, (x, labels) = network_parameters(), inputs()
    loss = adversarial_loss(network(parameters), x, labels, attack=lambda model, x, labels: x + parameters["b1"][0])
    found = dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))
    assert relative_error(found, paper_gradient(parameters, x + parameters["b1"][0].detach(), labels)) < 1e-13


def gradient_through(norm: str, *, steps: int, opened: tuple[()] = ()) -> dict[str, Tensor]:
    parameters = network_parameters()
    attack = partial(pgd, epsilon=0.5, norm=norm, steps=steps)
    with unblock(*opened):
        loss = adversarial_loss(network(parameters), *inputs(), attack=attack)
        return dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))


@pytest.mark.parametrize("steps", [1, 10])
def test_linf_leaks_nothing_to_the_bit(steps: int) -> None:
    blocked, opened = gradient_through("linf", steps=steps), gradient_through("linf", steps=steps, opened=(EXAMPLE,))
    assert all(torch.equal(opened[name], blocked[name]) for name in blocked)


@pytest.mark.parametrize("steps", [1, 10])
def test_l2_leaks(steps: int) -> None:
    blocked, opened = gradient_through("l2", steps=steps), gradient_through("l2", steps=steps, opened=(EXAMPLE,))
    assert relative_error(opened, blocked) > 1e-3


@pytest.mark.parametrize("momentum", [0.0, 0.3, 1.0])
def test_momentum_is_that_of_the_paper(momentum: float) -> None:
    """Dong et al., 2018, equations 6 and 7, with their step in L2: epsilon / steps, which never leaves the ball."""
    (x, labels), model = inputs(), network({name: value.detach() for name, value in network_parameters().items()})
    found = mi_fgsm(model, x, labels, epsilon=0.6, norm="l2", steps=4, momentum=momentum, bounds=None)
    example, heading = x.clone(), torch.zeros_like(x)
    for _ in range(4):
        point = example.clone().requires_grad_()
        (slope,) = torch.autograd.grad(torch.nn.functional.cross_entropy(model(point), labels, reduction="sum"), point)
        heading = momentum * heading + slope / slope.abs().sum(1, keepdim=True)
        example = example + 0.15 * heading / heading.norm(dim=1, keepdim=True)
    torch.testing.assert_close(found, example, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("generator_seed", [None, 0], ids=["from x", "random start"])
@pytest.mark.parametrize("steps", [1, 8])
def test_open_attack_is_differentiated_through_its_steps(steps: int, generator_seed: int | None) -> None:
    parameters, (x, labels) = network_parameters(), inputs()

    def loss(parameters: Mapping[str, Tensor]) -> Tensor:
        start = None if generator_seed is None else torch.Generator().manual_seed(generator_seed)
        return F.cross_entropy(
            network(parameters)(
                pgd(network(parameters), x, labels, epsilon=0.5, norm="l2", steps=steps, generator=start)
            ),
            labels,
        )

    with unblock(EXAMPLE):
        found = dict(zip(parameters, torch.autograd.grad(loss(parameters), list(parameters.values())), strict=True))
    assert relative_error(found, finite_differences(loss, parameters, step=1e-5)) < 1e-7


@pytest.mark.parametrize("norm", NORMS)
def test_open_attack_is_differentiated_by_its_input(norm: str) -> None:
    """Also where the example is held by the ball (it follows the input) and by the box (it does not)."""
    parameters, (x, labels) = network_parameters(), inputs()
    x = (0.9 * x + 0.05).requires_grad_()  # off the box, where the derivative exists
    epsilon = {"linf": 0.3, "l2": 0.6, "l1": 1.0}[norm]
    attack = partial(pgd, network(parameters), epsilon=epsilon, norm=norm, steps=3)
    cotangent = torch.randn(x.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with unblock(EXAMPLE):
        example = attack(x, labels)
        (found,) = torch.autograd.grad((cotangent * example).sum(), x)
    numerical = finite_differences(lambda p: (cotangent * attack(p["x"], labels)).sum(), {"x": x}, step=1e-5)
    assert relative_error({"x": found}, numerical) < 1e-7
    on_box = (example < 1e-14) | (example > 1 - 1e-14)
    assert on_box.any()
    assert not on_box.all()


def test_comparison_sees_the_block_of_an_attack_on_its_own() -> None:
    parameters, (x, labels) = network_parameters(), inputs()
    model = network(parameters)
    attack = partial(pgd, model, x, labels, epsilon=0.5, norm="l2", steps=3)
    comparison = compare(lambda: F.cross_entropy(model(attack()), labels), parameters)
    blocked, opened = gradient_through("l2", steps=3), gradient_through("l2", steps=3, opened=(EXAMPLE,))
    for name in parameters:
        assert torch.equal(comparison.blocked[name], blocked[name])
        assert torch.equal(comparison.gradient([EXAMPLE])[name], opened[name])
    assert comparison.effects[0].verdict.kind == "partial"


def test_blocks_of_the_model_stay_in_place_in_the_attack() -> None:
    """The attack follows the model's own gradient, blocks included: nothing moves along a blocked input."""
    model = lambda x: torch.stack([stop_gradient(x[:, 0], "test.first") + x[:, 1], x[:, 2]], 1)  # noqa: E731
    x = torch.full((1, 3), 0.5)
    assert torch.equal(fgsm(model, x, torch.tensor([0]), epsilon=0.25), torch.tensor([[0.5, 0.25, 0.75]]))


@pytest.mark.parametrize("activation", [nn.SiLU(), nn.GELU(), nn.GroupNorm(2, 8)], ids=lambda module: str(module))
def test_examples_agree_to_rounding_where_torch_has_two_backward_formulas(activation: nn.Module) -> None:
    model = nn.Sequential(nn.Linear(5, 8), activation, nn.Linear(8, 3)).double()
    attack = partial(pgd, model, *inputs(), epsilon=0.3, norm="l2", steps=4)
    closed = attack()
    with unblock(EXAMPLE):
        torch.testing.assert_close(attack(), closed, rtol=0, atol=1e-13)


def test_blocked_memory_is_flat_in_the_number_of_steps_and_open_memory_is_not() -> None:
    model = nn.Sequential(nn.Linear(40, 60), nn.Tanh(), nn.Linear(60, 5))
    x, labels = torch.rand(32, 40), torch.arange(32) % 5

    def peak(steps: int) -> int:
        return measure_memory(
            lambda: adversarial_loss(model, x, labels, attack=partial(pgd, epsilon=0.1, norm="l2", steps=steps))
        ).peak

    assert peak(40) <= 1.2 * peak(1)
    with unblock(EXAMPLE):
        assert peak(40) > 8 * peak(1)


def test_open_attack_is_differentiated_by_the_statistics_that_it_ran_with() -> None:
    """The training pass moves the statistics of batch normalisation in place, unseen by autograd."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)).double()
    with torch.no_grad():
        for tensor in (*model.parameters(), model[1].running_mean):
            tensor.copy_(0.5 * torch.randn(tensor.shape, generator=generator))
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    x, labels = torch.rand(6, 4, generator=generator, dtype=torch.float64), torch.arange(6) % 3
    parameters = {"weight": model[3].weight}

    def loss(_: Mapping[str, Tensor]) -> Tensor:
        model.load_state_dict(buffers, strict=False)
        return adversarial_loss(model, x, labels, attack=partial(pgd, epsilon=0.5, norm="l2", steps=3))

    with unblock(EXAMPLE):
        (found,) = torch.autograd.grad(loss(parameters), parameters["weight"])
    numerical = finite_differences(loss, parameters, step=1e-4)
    assert relative_error({"weight": found}, numerical) < 1e-6


# --- what is refused ---------------------------------------------------------------------------------------------

REFUSED = {
    "steps 0": ({"steps": 0}, ValueError, "`steps` should be a positive integer. Found 0."),
    "steps 2.5": ({"steps": 2.5}, ValueError, "`steps` should be a positive integer. Found 2.5."),
    "norm": ({"norm": "l7"}, ValueError, "`norm` should be one of 'linf', 'l2', 'l1'. Found 'l7'."),
    "epsilon": ({"epsilon": -0.1}, ValueError, "`epsilon` should be finite and not negative. Found -0.1."),
    "infinite epsilon": ({"epsilon": math.inf}, ValueError, "`epsilon` should be finite and not negative. Found inf."),
    "epsilons": (
        {"epsilon": torch.tensor([0.1, -1.0, 0.2])},
        ValueError,
        "`epsilon` should be finite and not negative. Found a smallest value of -1.",
    ),
    "epsilon's shape": (
        {"epsilon": torch.ones(2)},
        ValueError,
        r"`epsilon` should be one number or one per sample, (3,). Found shape (2,).",
    ),
    "step_size": ({"step_size": -1.0}, ValueError, "`step_size` should be finite and not negative. Found -1."),
    "out of the box": (
        {"bounds": (0, 0.5)},
        ValueError,
        "`x` should lie within `bounds`, 0 to 0.5. Found values from 0 to 1.",
    ),
    "integer input": ({"x": torch.ones(3, 5, dtype=torch.uint8)}, TypeError, "`x` should be floating point. Found"),
    "one sample": ({"x": torch.ones(5)}, ValueError, "`x` should have shape (N, ...). Found (5,)."),
    "a mean loss": (
        {"loss": F.cross_entropy},
        ValueError,
        "`loss` should return one value per sample, (3,) (torch's losses: reduction='none'). Found shape ().",
    ),
    "labels": ({"labels": torch.tensor([0, 1])}, ValueError, "`labels` should have shape (3,). Found (2,)."),
    "float labels": ({"labels": torch.ones(3)}, TypeError, "`labels` should be integers. Found torch.float32."),
    "one class": (
        {"model": nn.Linear(5, 1).double()},
        ValueError,
        "`model` should return logits (3, C) with at least two classes. Found (3, 1). One logit of two",
    ),
    "whole logits": (
        {"model": lambda x: (4 * x[:, :2]).long()},
        TypeError,
        "`model` should return floating-point logits. Found torch.int64.",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    changed, error, message = REFUSED[name]
    x, labels = inputs()
    arguments = {"model": network(network_parameters()), "x": x, "labels": labels, "epsilon": 0.1, "steps": 2}
    with pytest.raises(error) as raised:
        pgd(**(arguments | changed))
    assert message in str(raised.value)
