"""The surrogates of adversarial training: their values and both of their gradients, from their equations on paper."""

import math
from collections.abc import Callable, Mapping
from functools import partial

import mpmath
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from contract import BlockCase
from numpy.typing import NDArray
from test_adversarial import inputs, network, network_parameters
from torch import Tensor, nn

from toolkit import Block, unblock
from toolkit.adversarial.attacks._setting import EXAMPLE
from toolkit.adversarial.attacks.gradient import pgd
from toolkit.adversarial.training._terms import cross_entropy, divergence
from toolkit.adversarial.training.free import free_loss
from toolkit.adversarial.training.mart import boosted_cross_entropy, mart_loss
from toolkit.adversarial.training.pairing import alp_loss
from toolkit.adversarial.training.smoothness import CURVATURE_DIRECTION, cure_loss, linearity_pgd, llr_loss
from toolkit.adversarial.training.trades import (
    CLEAN_DISTRIBUTION,
    divergence_from_clean,
    held_trades_loss,
    nearby_pgd,
    trades_loss,
)
from toolkit.adversarial.training.vat import (
    VIRTUAL_CLEAN,
    VIRTUAL_DIRECTION,
    power_direction,
    vat_direction,
    vat_loss,
    virtual_example,
)
from toolkit.adversarial.training.weights import WEIGHT_PERTURBATION, awp_loss

Array = NDArray[np.complex128]
Numbers = Mapping[str, Array]
# A loss on paper: parameters, and the parameters that each block's quantity is made of.
Paper = Callable[[Numbers, Mapping[str, Numbers]], complex]


# --- on paper: complex arithmetic, in which the derivative of an analytic function is its imaginary part ----------


def paper_hidden(p: Numbers, x: Array) -> Array:
    return np.tanh(x @ p["w1"].T + p["b1"])


def paper_logits(p: Numbers, x: Array) -> Array:
    return paper_hidden(p, x) @ p["w2"].T + p["b2"]


def log_softmax(z: Array) -> Array:
    z = z - z.real.max(-1, keepdims=True)
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


def slope(p: Numbers, x: Array, cotangent: Array) -> Array:
    """Derivative of ``cotangent . logits`` by the inputs."""
    return ((cotangent @ p["w2"]) * (1 - paper_hidden(p, x) ** 2)) @ p["w1"]


def one_hot(labels: Array) -> Array:
    return np.eye(3)[labels]


def entropies(p: Numbers, x: Array, labels: Array) -> Array:
    return -(log_softmax(paper_logits(p, x)) * one_hot(labels)).sum(1)


def divergences(z: Array, w: Array) -> Array:
    log_p, log_q = log_softmax(z), log_softmax(w)
    return (np.exp(log_p) * (log_p - log_q)).sum(1)


def entropy_slope(p: Numbers, x: Array, labels: Array) -> Array:
    return slope(p, x, np.exp(log_softmax(paper_logits(p, x))) - one_hot(labels))


def length(v: Array) -> Array:
    return np.sqrt((v * v).sum(-1, keepdims=True))


def direction(v: Array, norm: str) -> Array:
    return np.sign(v.real) if norm == "linf" else v / length(v)


def into_ball(offset: Array, epsilon: float, norm: str) -> Array:
    if norm == "linf":
        return np.where(np.abs(offset.real) > epsilon, epsilon * np.sign(offset.real), offset)
    return np.where(length(offset).real > epsilon, epsilon * offset / length(offset), offset)


def ascend(
    x: Array, offset: Array, slope_at: Callable[[Array], Array], *, epsilon: float, steps: int, norm: str
) -> Array:
    """Projected gradient ascent without a box, with steps of 2.5 epsilon / steps."""
    for _ in range(steps):
        step = 2.5 * epsilon / steps * direction(slope_at(x + offset), norm)
        offset = into_ball(offset + step, epsilon, norm)
    return x + offset


def as_numbers(parameters: Mapping[str, Tensor]) -> Numbers:
    return {name: value.detach().numpy().astype(np.complex128) for name, value in parameters.items()}


def complex_step(loss: Callable[[Numbers], complex], parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the gradient of `loss` to rounding: Im loss(p + ih) / h with a tiny h."""
    p = as_numbers(parameters)
    gradient = {}
    for name, value in p.items():
        slopes = np.zeros(value.size)
        for i in range(value.size):
            moved = value.copy()
            moved.reshape(-1)[i] += 1e-30j
            slopes[i] = loss({**p, name: moved}).imag / 1e-30
        gradient[name] = torch.from_numpy(slopes.reshape(value.shape))
    return gradient


def paper_case(
    id: str,
    block: Block,
    loss: Callable[[Mapping[str, Tensor]], Tensor],
    paper: Paper,
    *,
    parameters: Callable[[], dict[str, Tensor]] = network_parameters,
) -> BlockCase:
    """Both witnesses by complex steps: what a block holds is made of the parameters as they are, or as they move."""

    def gradient(parameters: Mapping[str, Tensor], *, moving: set[str]) -> dict[str, Tensor]:
        held = as_numbers(parameters)
        names = [each.name for each in BLOCKS]
        return complex_step(lambda p: paper(p, {name: p if name in moving else held for name in names}), parameters)

    PAPERS[id] = paper
    return BlockCase(
        id=id,
        block=block,
        parameters=parameters,
        loss=loss,
        blocked=partial(gradient, moving=set()),
        opened=partial(gradient, moving={block.name}),
    )


BLOCKS = [
    EXAMPLE,
    CLEAN_DISTRIBUTION,
    VIRTUAL_CLEAN,
    VIRTUAL_DIRECTION,
    CURVATURE_DIRECTION,
    WEIGHT_PERTURBATION,
]
PAPERS: dict[str, Paper] = {}
X, Y = (value.numpy() for value in inputs())


def margin_cotangent(p: Numbers, x: Array, labels: Array) -> Array:
    others = np.where(one_hot(labels) > 0, -np.inf, paper_logits(p, x))
    return np.exp(log_softmax(others)) - one_hot(labels)


def margin_slope(p: Numbers, x: Array) -> Array:
    return slope(p, x, margin_cotangent(p, x, Y))


# --- adversarial training and its relatives -----------------------------------------------------------------------

BALL = {"linf": {"epsilon": 0.2, "norm": "linf"}, "l2": {"epsilon": 0.6, "norm": "l2"}}


def paper_pgd(p: Numbers, norm: str) -> Array:
    return ascend(X, 0 * X, partial(margin_slope, p), steps=3, **BALL[norm])


def mart_on_paper(p: Numbers, of: Mapping[str, Numbers], *, norm: str) -> complex:
    example = paper_pgd(of[EXAMPLE.name], norm)
    clean, moved = paper_logits(p, X), paper_logits(p, example)
    right, wrong = np.exp(log_softmax(clean)), np.exp(log_softmax(moved))
    best_other = np.where(one_hot(Y) > 0, -np.inf, moved.real).argmax(1)
    boosted = -np.log(wrong[range(3), Y]) - np.log(1 - wrong[range(3), best_other])
    return (boosted + 5 * divergences(clean, moved) * (1 - right[range(3), Y])).mean()


def alp_on_paper(p: Numbers, of: Mapping[str, Numbers], *, norm: str) -> complex:
    example = paper_pgd(of[EXAMPLE.name], norm)
    mixed = (entropies(p, X, Y) + entropies(p, example, Y)) / 2
    return (mixed + 0.7 * ((paper_logits(p, X) - paper_logits(p, example)) ** 2).sum(1)).mean()


def attacked_case(name: str, norm: str) -> BlockCase:
    attack = partial(pgd, **BALL[norm], steps=3, bounds=None)
    losses = {"MART": partial(mart_loss, attack=attack), "ALP": partial(alp_loss, weight=0.7, attack=attack)}
    papers = {"MART": mart_on_paper, "ALP": alp_on_paper}
    return paper_case(
        f"{name} in {norm}",
        EXAMPLE,
        lambda parameters: losses[name](network(parameters), *inputs()),
        partial(papers[name], norm=norm),
    )


def foreign_case() -> BlockCase:
    """An attack of the user's own, which moves the input by what the parameters say."""

    def paper(p: Numbers, of: Mapping[str, Numbers]) -> complex:
        example = X * of[EXAMPLE.name]["b1"][0]
        mixed = (entropies(p, X, Y) + entropies(p, example, Y)) / 2
        return (mixed + 0.7 * ((paper_logits(p, X) - paper_logits(p, example)) ** 2).sum(1)).mean()

    def loss(parameters: Mapping[str, Tensor]) -> Tensor:
        attack = lambda model, x, labels: x * parameters["b1"][0]  # noqa: E731
        return alp_loss(network(parameters), *inputs(), weight=0.7, attack=attack)

    return paper_case("ALP with an attack of the user's own", EXAMPLE, loss, paper)


# --- TRADES ------------------------------------------------------------------------------------------------------


def paper_nearby(p: Numbers, norm: str) -> Array:
    """The ascent of the divergence from the clean answer of these parameters."""
    clean = np.exp(log_softmax(paper_logits(p, X)))
    start = 1e-3 * direction(margin_slope(p, X), norm)
    uphill = lambda x: slope(p, x, np.exp(log_softmax(paper_logits(p, x))) - clean)  # noqa: E731
    return ascend(X, start, uphill, steps=4, **BALL[norm])


def trades_on_paper(p: Numbers, of: Mapping[str, Numbers], *, norm: str, held: bool) -> complex:
    example = paper_nearby(of[EXAMPLE.name], norm)
    target = paper_logits(of[CLEAN_DISTRIBUTION.name] if held else p, X)
    return (entropies(p, X, Y) + 6 * divergences(target, paper_logits(p, example))).mean()


def trades_case(function: Callable[..., Tensor], block: Block, norm: str) -> BlockCase:
    attack = partial(nearby_pgd, **BALL[norm], steps=4, bounds=None)
    return paper_case(
        f"{function.__name__} in {norm}, {block.name}",
        block,
        lambda parameters: function(network(parameters), *inputs(), attack=attack),
        partial(trades_on_paper, norm=norm, held=function is held_trades_loss),
    )


# --- virtual adversarial training ---------------------------------------------------------------------------------


def dense_direction(p: Numbers, x: Array) -> Array:
    """The dominant eigenvector of the whole matrix H, (D, D), and how it turns with the parameters."""
    z = paper_logits(p, x)
    prob = np.exp(log_softmax(z))
    jacobian = p["w2"] @ ((1 - paper_hidden(p, x) ** 2)[:, None] * p["w1"])
    h = jacobian.T @ (np.diag(prob) - np.outer(prob, prob)) @ jacobian
    values, vectors = np.linalg.eigh(h.real)
    u = vectors[:, -1]
    most_likely = z.real.argmax()
    others = np.delete(prob.real, most_likely) / (1 - prob.real[most_likely])
    uphill = np.insert(others, most_likely, -1.0) @ jacobian.real
    u = u * np.sign(u @ uphill)
    turned = vectors[:, :-1] @ ((vectors[:, :-1].T @ h.imag @ u) / (values[-1] - values[:-1]))
    return u + 1j * turned


def vat_on_paper(p: Numbers, of: Mapping[str, Numbers], *, epsilon: float, norm: str) -> complex:
    towards = np.stack([dense_direction(of[VIRTUAL_DIRECTION.name], x) for x in X])
    example = X + epsilon * direction(towards, norm)
    return divergences(paper_logits(of[VIRTUAL_CLEAN.name], X), paper_logits(p, example)).mean()


def vat_case(block: Block, norm: str) -> BlockCase:
    settings = {"epsilon": 0.4, "norm": norm}
    return paper_case(
        f"VAT in {norm}, {block.name}",
        block,
        lambda parameters: vat_loss(network(parameters), inputs()[0], bounds=None, **settings),
        partial(vat_on_paper, **settings),
    )


def power_on_paper(p: Numbers, of: Mapping[str, Numbers]) -> complex:
    q = of[VIRTUAL_DIRECTION.name]
    towards = torch.randn(X.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).numpy()
    towards = towards / length(towards)
    clean = np.exp(log_softmax(paper_logits(q, X)))
    for _ in range(2):
        probe = X + 0.1 * towards
        uphill = slope(q, probe, np.exp(log_softmax(paper_logits(q, probe))) - clean)
        towards = uphill / length(uphill)
    return divergences(paper_logits(of[VIRTUAL_CLEAN.name], X), paper_logits(p, X + 0.4 * towards)).mean()


def power_case() -> BlockCase:
    def loss(parameters: Mapping[str, Tensor]) -> Tensor:
        towards = partial(power_direction, iterations=2, xi=0.1, generator=torch.Generator().manual_seed(0))
        return vat_loss(network(parameters), inputs()[0], epsilon=0.4, bounds=None, direction=towards)

    return paper_case("VAT by power iteration", VIRTUAL_DIRECTION, loss, power_on_paper)


def own_direction_case() -> BlockCase:
    """A direction of the user's own, which the parameters turn."""

    def paper(p: Numbers, of: Mapping[str, Numbers]) -> complex:
        example = X + 0.4 * direction(X * of[VIRTUAL_DIRECTION.name]["b1"][0] - 1, "l2")
        return divergences(paper_logits(of[VIRTUAL_CLEAN.name], X), paper_logits(p, example)).mean()

    def loss(parameters: Mapping[str, Tensor]) -> Tensor:
        towards = lambda model, x: x * parameters["b1"][0] - 1  # noqa: E731
        return vat_loss(network(parameters), inputs()[0], epsilon=0.4, bounds=None, direction=towards)

    return paper_case("VAT in a direction of the user's own", VIRTUAL_DIRECTION, loss, paper)


# --- smoothness --------------------------------------------------------------------------------------------------


def cure_on_paper(p: Numbers, of: Mapping[str, Numbers], *, norm: str) -> complex:
    towards = direction(entropy_slope(of[CURVATURE_DIRECTION.name], X, Y), norm)
    change = entropy_slope(p, X + 0.3 * towards, Y) - entropy_slope(p, X, Y)
    return (entropies(p, X, Y) + 2 * (change**2).sum(1)).mean()


def cure_case(norm: str) -> BlockCase:
    return paper_case(
        f"CURE in {norm}",
        CURVATURE_DIRECTION,
        lambda parameters: cure_loss(network(parameters), *inputs(), h=0.3, weight=2.0, norm=norm),
        partial(cure_on_paper, norm=norm),
    )


def llr_on_paper(p: Numbers, of: Mapping[str, Numbers], *, norm: str) -> complex:
    q = of[EXAMPLE.name]
    tangent, height = entropy_slope(q, X, Y), entropies(q, X, Y)

    def uphill(x: Array) -> Array:
        above = entropies(q, x, Y) - height - ((x - X) * tangent).sum(1)
        return np.where(above.real >= 0, 1, -1)[:, None] * (entropy_slope(q, x, Y) - tangent)

    settings = BALL[norm]
    start = 1e-3 * settings["epsilon"] * direction(margin_slope(q, X), norm)
    example = ascend(X, start, uphill, steps=3, **settings)
    along = ((example - X) * entropy_slope(p, X, Y)).sum(1)
    beyond = entropies(p, example, Y) - entropies(p, X, Y) - along
    return (entropies(p, X, Y) + 4 * beyond * np.sign(beyond.real) + 3 * along * np.sign(along.real)).mean()


def llr_case(norm: str) -> BlockCase:
    attack = partial(linearity_pgd, **BALL[norm], steps=3, bounds=None)
    return paper_case(
        f"LLR in {norm}",
        EXAMPLE,
        lambda parameters: llr_loss(network(parameters), *inputs(), attack=attack),
        partial(llr_on_paper, norm=norm),
    )


# --- perturbed weights, and free training ------------------------------------------------------------------------


class Net(nn.Module):
    """The same network as a module whose parameters are the given leaves."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        super().__init__()
        for name, value in parameters.items():
            self.register_parameter(name, value)

    def forward(self, x: Tensor) -> Tensor:
        return network(dict(self.named_parameters()))(x)


def module_parameters() -> dict[str, Tensor]:
    return {name: nn.Parameter(value.detach()) for name, value in network_parameters().items()}


def awp_on_paper(p: Numbers, of: Mapping[str, Numbers]) -> complex:
    q = of[WEIGHT_PERTURBATION.name]
    hidden = paper_hidden(q, X)
    at_logits = (np.exp(log_softmax(paper_logits(q, X))) - one_hot(Y)) / 3
    slopes = {"w2": at_logits.T @ hidden, "w1": ((at_logits @ q["w2"]) * (1 - hidden**2)).T @ X}
    size = lambda v: np.sqrt((v * v).sum())  # noqa: E731
    steps = {name: 0.2 * size(q[name]) / size(g) * g for name, g in slopes.items()}
    return entropies({**p, **{name: p[name] + step for name, step in steps.items()}}, X, Y).mean()


def awp_case() -> BlockCase:
    x, labels = inputs()
    return paper_case(
        "AWP",
        WEIGHT_PERTURBATION,
        lambda parameters: awp_loss(Net(parameters), lambda model: F.cross_entropy(model(x), labels), gamma=0.2),
        awp_on_paper,
        parameters=module_parameters,
    )


def free_on_paper(p: Numbers, of: Mapping[str, Numbers]) -> complex:
    offset = X * of[EXAMPLE.name]["b1"][0] - 0.3
    return entropies(p, X + into_ball(offset, 0.7, "l2"), Y).mean()


def free_case() -> BlockCase:
    """The perturbation still has the graph of the parameters that made it; some of it is out of the ball."""

    def loss(parameters: Mapping[str, Tensor]) -> Tensor:
        x, labels = inputs()
        settings = {"perturbation": x * parameters["b1"][0] - 0.3, "epsilon": 0.7, "norm": "l2", "bounds": None}
        return free_loss(network(parameters), x, labels, **settings).loss

    return paper_case("a replay of free training", EXAMPLE, loss, free_on_paper)


BLOCK_CASES: list[BlockCase] = [
    *(attacked_case(name, norm) for name in ("MART", "ALP") for norm in BALL),
    foreign_case(),
    *(trades_case(trades_loss, EXAMPLE, norm) for norm in BALL),
    *(trades_case(held_trades_loss, block, "l2") for block in (EXAMPLE, CLEAN_DISTRIBUTION)),
    trades_case(held_trades_loss, CLEAN_DISTRIBUTION, "linf"),
    *(vat_case(block, norm) for block in (VIRTUAL_CLEAN, VIRTUAL_DIRECTION) for norm in BALL),
    power_case(),
    own_direction_case(),
    *(cure_case(norm) for norm in BALL),
    *(llr_case(norm) for norm in BALL),
    awp_case(),
    free_case(),
]


@pytest.mark.parametrize("case", BLOCK_CASES, ids=lambda case: case.id)
def test_value_is_that_of_the_equations(case: BlockCase) -> None:
    parameters = case.parameters()
    p = as_numbers(parameters)
    expected = PAPERS[case.id](p, {block.name: p for block in BLOCKS}).real
    assert case.loss(parameters).item() == pytest.approx(expected, rel=1e-13)


# --- terms -------------------------------------------------------------------------------------------------------


def logits(scale: float, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    draw = partial(torch.randn, 20, 6, generator=generator, dtype=torch.float64)
    return (scale * draw()).to(dtype).requires_grad_(), (scale * draw()).to(dtype).requires_grad_()


def exact_softmax(row: list[float]) -> list[mpmath.mpf]:
    exponentials = [mpmath.exp(mpmath.mpf(value)) for value in row]
    return [each / sum(exponentials) for each in exponentials]


@pytest.mark.parametrize("scale", [1.0, 10.0, 60.0])
def test_divergence_and_its_gradients_keep_every_component(scale: float) -> None:
    """Against four hundred digits, also of confident answers: the softmax of most rows at scale 60 rounds to 1."""
    clean, moved = logits(scale)
    value = divergence(clean, moved)
    by_clean, by_moved = torch.autograd.grad(value.sum(), [clean, moved])
    with mpmath.workdps(400):
        for i in range(len(clean)):
            p, q = exact_softmax(clean[i].tolist()), exact_softmax(moved[i].tolist())
            expected = sum(a * mpmath.log(a / b) for a, b in zip(p, q, strict=True))
            assert abs(value[i].item() - expected) <= 1e-13 * max(expected, abs(clean[i] - moved[i]).max().item())
            for j in range(6):
                assert by_moved[i, j].item() == pytest.approx(float(q[j] - p[j]), rel=1e-10, abs=1e-300)
                slope = p[j] * (mpmath.log(p[j] / q[j]) - expected)
                size = p[j] * (abs(mpmath.log(p[j] / q[j])) + expected)
                assert abs(by_clean[i, j].item() - slope) <= 1e-12 * size


def test_divergence_has_exact_derivatives_of_both_orders() -> None:
    clean, moved = (each[:3].detach().requires_grad_() for each in logits(2.0))
    assert torch.autograd.gradcheck(divergence, (clean, moved))
    assert torch.autograd.gradgradcheck(divergence, (clean, moved))
    labels = torch.tensor([0, 5, 2])
    assert torch.autograd.gradcheck(lambda z: cross_entropy(z, labels), clean)
    assert torch.autograd.gradgradcheck(lambda z: cross_entropy(z, labels), clean)


@pytest.mark.parametrize("scale", [1.0, 60.0])
def test_entropies_keep_their_digits_where_the_model_is_sure(scale: float) -> None:
    """torch's cross entropy of a sure and right answer is 0, and so is its gradient."""
    z, _ = logits(scale)
    labels = z.argmax(1)
    labels[::2] = (labels[::2] + 1) % 6
    values, boosted = cross_entropy(z, labels), boosted_cross_entropy(z, labels)
    slopes = torch.autograd.grad(values.sum(), z)[0]
    with mpmath.workdps(400):
        for i, label in enumerate(labels.tolist()):
            p = exact_softmax(z[i].tolist())
            expected = -mpmath.log(p[label])
            assert values[i].item() == pytest.approx(float(expected), rel=1e-12, abs=0)
            best = max(each for j, each in enumerate(p) if j != label)
            assert boosted[i].item() == pytest.approx(float(expected - mpmath.log(1 - best)), rel=1e-12, abs=0)
            for j in range(6):
                assert slopes[i, j].item() == pytest.approx(float(p[j] - (j == label)), rel=1e-10, abs=0)


def test_mart_is_finite_where_naive_logarithms_are_not() -> None:
    weight = torch.tensor([[500.0, 0.0], [0.0, 500.0], [0.0, 0.0]], requires_grad=True)
    x, labels = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 0])
    loss = mart_loss(lambda x: x @ weight.T, x, labels, attack=lambda model, x, labels: x.flip(1))
    (gradient,) = torch.autograd.grad(loss, weight)
    assert loss.isfinite()
    assert gradient.isfinite().all()
    assert gradient.abs().max() > 0.1


# --- the direction of virtual adversarial training ---------------------------------------------------------------


def cosines(found: Tensor, x: Tensor, parameters: Mapping[str, Tensor]) -> Tensor:
    p = as_numbers(parameters)
    exact = torch.from_numpy(np.stack([dense_direction(p, row).real for row in x.numpy()]))
    return (found * exact).sum(1)


def many_inputs(seed: int = 0) -> Tensor:
    return torch.rand(100, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_direction_is_the_dominant_eigenvector_of_the_dense_matrix_with_its_sign() -> None:
    x, parameters = many_inputs(), network_parameters()
    found = vat_direction(network(parameters), x)
    assert cosines(found, x, parameters).min() >= 1 - 1e-9
    torch.testing.assert_close(found.norm(dim=1), torch.ones(100, dtype=torch.float64), rtol=0, atol=1e-14)


def test_direction_in_single_precision() -> None:
    x, parameters = many_inputs(), network_parameters()
    single = {name: value.float() for name, value in parameters.items()}
    assert cosines(vat_direction(network(single), x.float()).double(), x, parameters).min() >= 1 - 1e-6


def test_power_iteration_comes_close_and_is_not_exact() -> None:
    """One iteration, as in the paper, misses some samples altogether."""
    x, parameters = many_inputs(), network_parameters()
    worst = {}
    for iterations in (1, 3, 30):
        generator = torch.Generator().manual_seed(1)
        found = power_direction(network(parameters), x, iterations=iterations, xi=1e-6, generator=generator)
        worst[iterations] = cosines(found, x, parameters).abs().min()
    assert worst[1] < 0.5
    assert worst[1] < worst[3] < 0.999
    assert worst[30] > 1 - 1e-9


def test_default_probe_is_long_enough_for_single_precision() -> None:
    x, single = many_inputs().float(), {name: value.float() for name, value in network_parameters().items()}
    exact = vat_direction(network(single), x)
    settings = {"iterations": 100, "generator": torch.Generator().manual_seed(1)}
    close = (power_direction(network(single), x, **settings) * exact).sum(1).abs()
    lost = (power_direction(network(single), x, xi=1e-7, **settings) * exact).sum(1).abs()
    assert close.min() > 0.999
    assert lost.min() < 0.5


@pytest.mark.parametrize("scale", [1e2, 1e3])
def test_direction_of_a_confident_model_does_not_round_to_zero(scale: float) -> None:
    """With two classes it is the gradient of their difference, however sure the model is."""
    weight = torch.tensor([[3.0, -4.0], [0.0, 0.0]])
    found = vat_direction(lambda x: scale * x @ weight.T, torch.tensor([[1.0, 0.1], [0.1, 1.0]]))
    torch.testing.assert_close(found, torch.tensor([[-0.6, 0.8], [0.6, -0.8]]))


def test_direction_of_a_flat_model_is_zero() -> None:
    flat = lambda x: 0 * x[:, :1] + torch.tensor([1.0, 2.0, 3.0])  # noqa: E731
    x = torch.rand(4, 5)
    assert torch.equal(vat_direction(flat, x), torch.zeros(4, 5))
    assert torch.equal(power_direction(flat, x, generator=torch.Generator()), torch.zeros(4, 5))
    assert torch.equal(virtual_example(flat, x, epsilon=0.1), x)


def test_more_classes_than_features_are_differentiated_where_small_eigenvalues_tie() -> None:
    weight = torch.randn(7, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    x = torch.rand(3, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with unblock(VIRTUAL_DIRECTION):
        towards = lambda weight: vat_direction(lambda x: (x @ weight.T).sin(), x)  # noqa: E731
        assert torch.autograd.gradcheck(towards, weight, atol=1e-7)


def test_rows_of_the_direction_do_not_depend_on_each_other() -> None:
    x, model = many_inputs()[:6], network(network_parameters())
    alone = torch.cat([vat_direction(model, row[None]) for row in x])
    torch.testing.assert_close(vat_direction(model, x), alone, rtol=0, atol=1e-13)


def test_virtual_example_lies_in_ball_and_box() -> None:
    x = many_inputs().float()
    model = network({name: value.float() for name, value in network_parameters().items()})
    for norm, order in (("linf", math.inf), ("l2", 2), ("l1", 1)):
        example = virtual_example(model, x, epsilon=0.3, norm=norm)
        size = torch.linalg.vector_norm(example.double() - x.double(), order, 1)
        assert size.max() <= 0.3
        assert size.median() > 0.29
        assert 0 <= example.min() <= example.max() <= 1


# --- TRADES ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", BALL)
def test_opening_the_clean_distribution_gives_trades_to_the_bit(norm: str) -> None:
    attack = partial(nearby_pgd, **BALL[norm], steps=3)

    def gradient(function: Callable[..., Tensor]) -> list[Tensor]:
        parameters = network_parameters()
        return torch.autograd.grad(function(network(parameters), *inputs(), attack=attack), list(parameters.values()))

    with unblock(CLEAN_DISTRIBUTION):
        opened = gradient(held_trades_loss)
    for found, expected, held in zip(opened, gradient(trades_loss), gradient(held_trades_loss), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-15)
        assert not torch.allclose(held, expected, rtol=1e-3)


def test_attack_of_trades_computes_the_clean_answer_once() -> None:
    calls = []

    def model(x: Tensor) -> Tensor:
        calls.append(len(x))
        return network(network_parameters())(x)

    trades_loss(model, *inputs(), attack=partial(nearby_pgd, epsilon=0.1, steps=5))
    # The clean answer, the start, five steps, and clean inputs and examples together.
    assert calls == [3] * 7 + [6]


@pytest.mark.parametrize("norm", BALL)
@pytest.mark.parametrize("seed", [None, 0], ids=["deterministic", "noise"])
def test_nearby_start_leaves_the_point_without_a_slope(norm: str, seed: int | None) -> None:
    model, (x, labels) = network(network_parameters()), inputs()
    loss = divergence_from_clean(model, x)
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    example = nearby_pgd(model, x, labels, **BALL[norm], steps=10, loss=loss, generator=generator)
    start = x + 1e-3 * torch.randn(x.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert (loss(model(example), labels) > 100 * loss(model(start.clamp(0, 1)), labels)).all()


@pytest.mark.parametrize("attack", [nearby_pgd, linearity_pgd])
def test_a_random_start_without_a_generator_is_drawn_from_the_global_one(attack):
    run = partial(attack, network(network_parameters()), *inputs(), epsilon=0.1, steps=1, step_size=0.01)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        seeded = [run(random_start=True) for _ in range(2)]
        torch.manual_seed(0)
        again = run(random_start=True)
    assert torch.equal(again, seeded[0])
    assert not torch.equal(*seeded)
    assert torch.equal(run(), run(random_start=False, generator=torch.Generator()))


def test_noise_of_the_nearby_start_is_that_of_the_generator() -> None:
    flat = lambda x: torch.zeros(len(x), 2, dtype=x.dtype) + 0 * x.sum(1, keepdim=True)  # noqa: E731
    x = torch.full((5000, 4), 0.5, dtype=torch.float64)
    labels = torch.zeros(5000, dtype=torch.long)
    found = nearby_pgd(flat, x, labels, epsilon=0.1, steps=1, generator=torch.Generator().manual_seed(0)) - x
    expected = 1e-3 * torch.randn(x.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-15)


# --- what is refused ---------------------------------------------------------------------------------------------

REFUSED = {
    "beta": (
        lambda model, x, labels: trades_loss(model, x, labels, beta=-1.0, attack=None),
        "`beta` should be finite and not negative. Found -1.0.",
    ),
    "weight": (
        lambda model, x, labels: cure_loss(model, x, labels, h=0.1, weight=math.inf),
        "`weight` should be finite and not negative. Found inf.",
    ),
    "example": (
        lambda model, x, labels: mart_loss(model, x, labels, attack=lambda model, x, labels: x[:1]),
        r"`attack` should return examples of the shape of `x`, (3, 5). Found (1, 5).",
    ),
    "h": (
        lambda model, x, labels: cure_loss(model, x, labels, h=-0.1, weight=1.0),
        "`h` should be finite and not negative. Found -0.1.",
    ),
    "xi": (
        lambda model, x, labels: power_direction(model, x, xi=0.0, generator=torch.Generator()),
        "`xi` should be positive and finite. Found 0.0.",
    ),
    "iterations": (
        lambda model, x, labels: power_direction(model, x, iterations=0, generator=torch.Generator()),
        "`iterations` should be a positive integer. Found 0.",
    ),
    "one class": (
        lambda model, x, labels: vat_direction(lambda x: x[:, :1], x),
        "`model` should return logits (3, C) with at least two classes. Found (3, 1). One logit of two classes "
        "becomes two by `lambda z: torch.stack([0 * z, z], -1).view(-1, 2)`.",
    ),
    "one sample": (
        lambda model, x, labels: vat_direction(model, x[0]),
        "`x` should have shape (N, ...). Found (5,).",
    ),
    "start": (
        lambda model, x, labels: nearby_pgd(model, x, labels, epsilon=0.1, steps=1, start=-1.0),
        "`start` should be finite and not negative. Found -1.",
    ),
    "perturbation": (
        lambda model, x, labels: free_loss(model, x, labels, perturbation=x[:1], epsilon=0.1),
        "`perturbation` should have the shape of `x`, (3, 5). Found (1, 5).",
    ),
    "gamma": (
        lambda model, x, labels: awp_loss(nn.Linear(5, 3), lambda model: model(x).sum(), gamma=-1.0),
        "`gamma` should be finite and not negative. Found -1.0.",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_arguments_are_refused(name: str) -> None:
    call, message = REFUSED[name]
    with pytest.raises(ValueError) as error:
        call(network(network_parameters()), *inputs())
    assert str(error.value) == message


def test_weights_of_a_function_are_refused() -> None:
    with pytest.raises(TypeError, match=r"`model` should be a torch\.nn\.Module\. Found function\."):
        awp_loss(lambda x: x, lambda model: model(torch.ones(1)), gamma=0.1)


def test_next_perturbation_asks_for_the_backward_pass() -> None:
    x, labels = inputs()
    replay = free_loss(network(network_parameters()), x, labels, perturbation=0 * x, epsilon=0.1)
    with pytest.raises(RuntimeError, match="should have run before"):
        replay.next_perturbation()
