"""Attacks on every margin: exact on linear models, and on ReLU networks as far as mixed-integer programs can tell."""

import contextlib
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import partial
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from contract import BlockCase
from relu_networks import NETWORKS, relu_network
from test_adversarial import MODES, NORMS, fragile, inputs, network, network_parameters, paper_gradient, snapshot
from torch import Tensor, nn

from toolkit.adversarial import EXAMPLE, adversarial_loss, difference_loss
from toolkit.adversarial.attacks.multi_target import linearised, multi_target
from toolkit.adversarial.certificates.linear import certify_linear
from toolkit.adversarial.certificates.relu import verify_relu


def linear(n_classes: int = 5, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return weight, bias, inputs of which some lie on the box, and the classes that the model gives them."""
    generator = torch.Generator().manual_seed(5)
    draw = partial(torch.randn, generator=generator, dtype=torch.float64)
    weight, bias = draw(n_classes, 12), 0.3 * draw(n_classes)
    x = (0.5 + 0.5 * draw(30, 12)).clamp(0, 1)
    return weight.to(dtype), bias.to(dtype), x.to(dtype), F.linear(x, weight, bias).argmax(1)


def tanh_case() -> BlockCase:
    attack = partial(multi_target, epsilon=0.2, norm="l2", steps=5)

    def loss(parameters: Mapping[str, Tensor]) -> Tensor:
        x, labels = inputs()
        labels = network(parameters)(x).argmax(1)
        return adversarial_loss(network(parameters), x, labels, attack=attack)

    def blocked(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        x, _ = inputs()
        constants = {name: value.detach() for name, value in parameters.items()}
        labels = network(constants)(x).argmax(1)  # nothing is wrong from the start
        return paper_gradient(constants, attack(network(constants), x, labels), labels)

    return BlockCase(
        id="multi_target in L2, tanh network",
        block=EXAMPLE,
        parameters=network_parameters,
        loss=loss,
        blocked=blocked,
    )


BLOCK_CASES = [tanh_case()]


# --- as strong as can be -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("attack", [linearised, partial(multi_target, steps=3)], ids=["linearised", "multi_target"])
@pytest.mark.parametrize("bounds", [(0, 1), None], ids=["box", "no box"])
@pytest.mark.parametrize("norm", NORMS)
def test_linear_model_is_attacked_to_its_exact_worst_case(
    norm: str, bounds: tuple[float, float] | None, attack: Callable[..., Tensor]
) -> None:
    weight, bias, x, labels = linear()
    epsilon = torch.linspace(0, {"linf": 0.1, "l2": 0.5, "l1": 1.5}[norm], len(x), dtype=torch.float64)
    worst = certify_linear(weight, bias, x, labels, epsilon=epsilon, norm=norm, bounds=bounds)
    example = attack(partial(F.linear, weight=weight, bias=bias), x, labels, epsilon=epsilon, norm=norm, bounds=bounds)
    reached = -difference_loss(F.linear(example, weight, bias), labels)
    assert 0 < (worst < 0).sum() < len(x)
    torch.testing.assert_close(reached.clamp(min=0), worst.clamp(min=0), rtol=0, atol=1e-12)
    assert torch.equal(reached < 0, worst < 0)


SLOW = {"convolution at .1"}  # to train


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in NETWORKS]
)
def test_relu_network_is_broken_wherever_it_can_be(name: str) -> None:
    model, x, labels, epsilon = relu_network(name)
    exact = verify_relu(model, x, labels, epsilon=epsilon)
    generator = torch.Generator().manual_seed(0)
    example = multi_target(model, x, labels, epsilon=epsilon, steps=20, restarts=20, generator=generator)
    assert not exact.unknown.any()
    assert torch.equal(model(example).argmax(1) == labels, exact.robust)


@pytest.mark.parametrize(("name", "epsilon"), [("64-32-10 at .1", 1.0), ("64-32-10 at .2", 2.0)])
def test_relu_network_is_broken_in_l1_wherever_it_can_be(name: str, epsilon: float) -> None:
    model, x, labels, _ = relu_network(name)
    exact = verify_relu(model, x, labels, epsilon=epsilon, norm="l1")
    generator = torch.Generator().manual_seed(0)
    attack = partial(multi_target, norm="l1", steps=20, restarts=6, generator=generator)
    example = attack(model, x, labels, epsilon=epsilon)
    assert not exact.unknown.any()
    assert torch.equal(model(example).argmax(1) == labels, exact.robust)


@pytest.mark.parametrize("factor", [10.0, 100.0, 1000.0])
def test_factor_on_the_logits_saves_no_sample(factor: float) -> None:
    """The cross entropy of a confident model has no gradient. A margin has."""
    double, x, labels, epsilon = relu_network("64-32-10 standard")
    model = nn.Sequential(*[nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)])
    model.load_state_dict(double.state_dict())
    x = x.float()
    attack = partial(multi_target, x=x, labels=labels, epsilon=epsilon, steps=20)
    doubtful = model(attack(model)).argmax(1)
    confident = model(attack(lambda x: factor * model(x))).argmax(1)
    assert torch.equal(confident == labels, doubtful == labels)


@pytest.mark.parametrize("norm", NORMS)
def test_more_is_never_weaker(norm: str) -> None:
    """Each search contains the one before it: its best example is at least as good, where the model holds."""
    model, x, labels, _ = relu_network("64-24-24-10 at .1")
    epsilon = {"linf": 0.05, "l2": 0.3, "l1": 0.5}[norm]
    common = {"epsilon": epsilon, "norm": norm}
    draws = {"generator": torch.Generator().manual_seed(0), "restarts": 3}
    examples = [
        x,
        linearised(model, x, labels, n_targets=1, **common),
        linearised(model, x, labels, **common),
        multi_target(model, x, labels, steps=20, **common),
        multi_target(model, x, labels, steps=20, **common, **draws),
    ]
    values = [difference_loss(model(example), labels) for example in examples]
    for weaker, stronger in pairwise(values):
        assert (stronger >= torch.where(stronger > 0, 0, weaker) - 1e-9).all()
    assert (values[1] > values[0] + 1e-3).any()
    assert (values[3] > values[2] + 1e-3).any()


# --- how it searches ---------------------------------------------------------------------------------------------


class Counting(nn.Module):
    """A linear model that writes down how many samples it is run on."""

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.weight, self.bias, self.sizes = weight, bias, []

    def forward(self, x: Tensor) -> Tensor:
        self.sizes.append(len(x))
        return F.linear(x, self.weight, self.bias)


def test_samples_are_left_once_the_model_errs_and_ascents_once_they_stand_still() -> None:
    weight, bias, x, labels = linear()
    model = Counting(weight, bias)
    wrong = torch.arange(len(x)) < 10
    multi_target(model, x, torch.where(wrong, (labels + 1) % 5, labels), epsilon=0.02, steps=40)
    # Ten are wrong from the start. The others are at their worst after the linearised step, of a linear model.
    assert model.sizes == [30, 20 * 4, 20 * 4]
    assert (difference_loss(F.linear(x, weight, bias), labels) < 0).all()


@pytest.mark.parametrize("at_once", [1, 9, 1000])
def test_memory_is_bounded_and_what_it_is_bounded_by_changes_nothing(at_once: int) -> None:
    weight, bias, x, labels = linear()
    model = Counting(weight, bias)
    attack = partial(multi_target, x=x, labels=labels, epsilon=0.1, norm="l2", steps=4)
    example = attack(model, at_once=at_once)
    assert max(model.sizes[1:]) <= max(4, at_once)  # four classes of one sample stay together
    torch.testing.assert_close(example, attack(model), rtol=0, atol=1e-13)


@pytest.mark.parametrize("norm", NORMS)
def test_rows_do_not_depend_on_each_other(norm: str) -> None:
    model, x, labels, _ = relu_network("64-32-10 at .1")
    x, labels = x[:6], labels[:6]
    epsilon = torch.tensor([0.05, 0.0, 0.1, 0.2, 0.15, 0.1]) * {"linf": 1, "l2": 6, "l1": 12}[norm]
    attack = partial(multi_target, model, norm=norm, steps=8)
    together = attack(x, labels, epsilon=epsilon)
    alone = [attack(x[i : i + 1], labels[i : i + 1], epsilon=epsilon[i].item()) for i in range(6)]
    torch.testing.assert_close(together, torch.cat(alone), rtol=0, atol=1e-12)


@pytest.mark.parametrize("norm", NORMS)
def test_epsilon_zero_returns_the_values_of_the_input(norm: str) -> None:
    weight, bias, x, labels = linear()
    generator = torch.Generator().manual_seed(0)
    model = partial(F.linear, weight=weight, bias=bias)
    example = multi_target(model, x, labels, epsilon=0, norm=norm, steps=3, restarts=3, generator=generator)
    assert torch.equal(example, x)
    assert example.data_ptr() != x.data_ptr()


@pytest.mark.parametrize("shape", [(0, 5), (2, 5)], ids=["no samples", "two classes"])
def test_small_problems(shape: tuple[int, int]) -> None:
    weight = torch.tensor([[1.0, -2.0, 0.5, 0.1, 3.0], [0.0, 0.0, 0.0, 0.0, 0.0]])
    x, labels = torch.full(shape, 0.5), torch.zeros(shape[0], dtype=torch.long)
    example = multi_target(partial(F.linear, weight=weight), x, labels, epsilon=0.25)
    assert torch.equal(example, x - 0.25 * weight[0].sign())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("norm", NORMS)
def test_example_lies_in_ball_box_and_mask_in_exact_arithmetic(norm: str, dtype: torch.dtype) -> None:
    weight, bias, x, labels = linear(dtype=dtype)
    mask = torch.arange(12) % 3 > 0
    model = lambda x: torch.tanh(F.linear(x, weight, bias))  # noqa: E731
    epsilon, generator = 8 / 255 * (1 if norm == "linf" else 4), torch.Generator().manual_seed(0)
    attack = partial(multi_target, model, x, labels, epsilon=epsilon, norm=norm, steps=4)
    example = attack(mask=mask, restarts=3, generator=generator)
    assert example.dtype == dtype
    assert not torch.equal(example, x)
    assert torch.equal(example[:, ~mask], x[:, ~mask])
    assert 0 <= example.min() <= example.max() <= 1
    for moved, clean in zip(example.tolist(), x.tolist(), strict=True):
        offset = [abs(Fraction(a) - Fraction(b)) for a, b in zip(moved, clean, strict=True)]
        size = {"linf": max(offset), "l1": sum(offset), "l2": sum(d * d for d in offset)}[norm]
        assert size <= Fraction(epsilon) ** (2 if norm == "l2" else 1)


@pytest.mark.portable
def test_restarts_depend_on_the_generator_alone() -> None:
    """On a model of many hills that never errs; on a plain one the first ascent is mostly the best."""
    weight, bias, x, _ = linear()
    model = lambda x: torch.sin(8 * F.linear(x, weight, bias)) + torch.tensor([10.0, 0, 0, 0, 0])  # noqa: E731
    labels = torch.zeros(len(x), dtype=torch.long)

    def attack(seed: int) -> Tensor:
        torch.rand(3)
        generator = torch.Generator().manual_seed(seed)
        return multi_target(model, x, labels, epsilon=0.3, steps=5, restarts=3, generator=generator)

    assert torch.equal(attack(1), attack(1))
    assert (attack(1) != attack(2)).any(1).sum() > 5


def test_gradients_in_half_precision_find_the_same_errors() -> None:
    model, x, labels, epsilon = relu_network("64-32-10 standard")
    attack = partial(multi_target, model, x, labels, epsilon=epsilon, steps=20)
    wrong = [model(example).argmax(1) != labels for example in (attack(), attack(gradient_dtype=torch.bfloat16))]
    assert (wrong[0] != wrong[1]).sum() <= 1


# --- nothing is touched ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("breaks", [False, True], ids=["sound", "breaking"])
@pytest.mark.parametrize("norm", NORMS)
def test_attack_leaves_everything_as_it_was(norm: str, breaks: bool, mode: str) -> None:
    model, x, labels = fragile()
    labels = model.eval()(x).argmax(1).detach()
    model.train()
    model.layers[1].eval()
    model.modes.clear()
    model.calls_left = 3 if breaks else 1000
    before = snapshot(model, x, labels)
    attack = partial(multi_target, model, x, labels, epsilon=1e-3, norm=norm, steps=3, restarts=2)
    with pytest.raises(FloatingPointError) if breaks else contextlib.nullcontext(), MODES[mode]():
        example = attack(generator=torch.Generator())
        assert not example.requires_grad
        assert not example.is_inference()
    assert all(map(torch.equal, snapshot(model, x, labels), before))
    assert model.modes == {False}


REFUSED = {
    "steps -1": ({"steps": -1}, "`steps` should be an integer from 0. Found -1."),
    "n_targets": ({"n_targets": 0}, "`n_targets` should be a positive integer. Found 0."),
    "at_once": ({"at_once": 0}, "`at_once` should be a positive integer. Found 0."),
    "no restarts": ({"restarts": 0}, "`restarts` should be a positive integer. Found 0."),
    "norm": ({"norm": "l7"}, "`norm` should be one of 'linf', 'l2', 'l1'. Found 'l7'."),
    "labels": ({"labels": torch.tensor([0])}, "`labels` should have shape (3,). Found (1,)."),
    "one class": ({"model": nn.Linear(5, 1).double()}, "at least two classes. Found (3, 1)."),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    changed, message = REFUSED[name]
    x, labels = inputs()
    arguments = {"model": network(network_parameters()), "x": x, "labels": labels, "epsilon": 0.1}
    with pytest.raises(ValueError) as raised:
        multi_target(**(arguments | changed))
    assert message in str(raised.value)
