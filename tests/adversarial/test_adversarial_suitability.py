"""Models for which an attack measures nothing are named; the mean of a random model; logits inside other outputs."""

import functools
import math
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from toolkit import adversarial as adv

X = torch.rand(12, 6, generator=torch.Generator().manual_seed(1))
NET = adv.mlp(6, 3, widths=[8], generator=torch.Generator().manual_seed(0)).eval()
LABELS = NET(X).argmax(1)


class Noisy(nn.Module):
    """A model with noise on its inputs."""

    def __init__(self, model: nn.Module, scale: float) -> None:
        super().__init__()
        self.model, self.scale = model, scale

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x + self.scale * torch.randn_like(x))


UNSUITED = {
    "random": (Noisy(NET, 0.3), r"`model` should give the same logits each time. Found .* `EOT\(model, samples=20\)`"),
    "mixed": (lambda x: NET(x - x.mean(0)), "`model` should answer each sample alone. Found logits that depend"),
    "probabilities": (lambda x: NET(x).softmax(1), "`model` should return logits. Found probabilities"),
    "flat": (lambda x: NET(x + 0 * x.round()) * (x[:, :1] > 0.5), "Found a zero gradient for [1-9]"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("model", "message"), UNSUITED.values(), ids=UNSUITED)
def test_an_unsuited_model_is_named(model, message):
    with pytest.warns(UserWarning, match=message):
        adv.robust_accuracy(model, X, LABELS, epsilon=0.05)


def test_a_single_sample_shows_that_a_model_depends_on_the_batch():
    with pytest.warns(UserWarning, match="depend on the rest of the batch"):
        adv.robust_accuracy(lambda x: NET(x) * x.sum(), X[:1], LABELS[:1], epsilon=0.05)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_an_honest_model_is_not_named(dtype):
    network = adv.mlp(6, 3, widths=[8], generator=torch.Generator().manual_seed(0)).to(dtype)
    assert 0 <= adv.robust_accuracy(network, X.to(dtype), LABELS, epsilon=0.05) <= 1


def test_the_mean_answer_is_the_mean_of_the_draws():
    x = X.double().requires_grad_()
    noisy = Noisy(adv.mlp(6, 3, widths=[8], generator=torch.Generator().manual_seed(0)).double(), 0.3)
    torch.manual_seed(0)
    found = adv.EOT(noisy, samples=3)(x)
    torch.manual_seed(0)
    mean = sum(noisy(x).softmax(1) for _ in range(3)) / 3
    torch.testing.assert_close(found.exp(), mean)
    weight = torch.randn(mean.shape, dtype=torch.float64)
    torch.testing.assert_close(
        torch.autograd.grad((found * weight).sum(), x), torch.autograd.grad((mean.log() * weight).sum(), x)
    )


def test_the_mean_answer_converges_to_the_integral_over_the_noise():
    """``E sigmoid(m + s n)`` by Gauss-Hermite quadrature; the bound is five standard errors of the mean."""
    margins, scale, samples = torch.tensor([-2.0, 0.3, 1.0], dtype=torch.float64), 1.5, 4000

    def noisy(x: Tensor) -> Tensor:
        shifted = x[:, :1] + scale * torch.randn(x[:, :1].shape, generator=generator, dtype=x.dtype)
        return torch.cat([shifted, torch.zeros_like(shifted)], 1)

    generator = torch.Generator().manual_seed(0)
    grid = torch.linspace(-9, 9, 20001, dtype=torch.float64)
    density = (-(grid**2) / 2).exp() / math.sqrt(2 * math.pi)
    expected = torch.trapezoid((margins[:, None] + scale * grid).sigmoid() * density, grid, dim=1)
    found = adv.EOT(noisy, samples=samples)(margins[:, None]).exp()[:, 0]
    assert ((found - expected).abs() < 5 * 0.5 / math.sqrt(samples)).all()


@pytest.mark.slow
def test_the_mean_of_a_random_model_is_attacked_without_luck():
    """The reported accuracy is that of many fresh draws together on the examples, up to a sample at the boundary."""
    model = Noisy(NET, 0.3)
    found = adv.evaluate_robustness(adv.EOT(model, samples=100), X, LABELS, epsilon=0.02)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(3)
        again = (adv.EOT(model, samples=3000)(found.examples).argmax(1) == LABELS).float().mean().item()
    assert abs(again - found.robust_accuracy) <= 2 / len(X)


@dataclass
class Output:
    logits: Tensor
    hidden: Tensor


OUTPUTS = {
    "tuple": (lambda x: (NET(x), x), 0),
    "last of a list": (lambda x: [x, NET(x)], -1),
    "dictionary": (lambda x: {"y": NET(x)}, "y"),
    "attribute": (lambda x: Output(NET(x), x), "logits"),
    "function": (lambda x: {"y": (x, NET(x))}, lambda output: output["y"][1]),
}
ATTACKS = {
    "fgsm": partial(adv.fgsm, epsilon=0.1),
    "apgd": partial(adv.apgd, epsilon=0.1, steps=5),
    "multi_target": partial(adv.multi_target, epsilon=0.1, steps=5),
    "deepfool": adv.deepfool,
    "fab": partial(adv.fab, steps=3),
    "square": lambda *args, **options: adv.square(
        *args, epsilon=0.1, queries=9, generator=torch.Generator().manual_seed(0), **options
    ),
    "ensemble": partial(adv.ensemble, epsilon=0.1),
}


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
@pytest.mark.parametrize(("model", "logits"), OUTPUTS.values(), ids=OUTPUTS)
def test_logits_are_picked_from_any_output(attack, model, logits):
    assert torch.equal(attack(model, X, LABELS, logits=logits), attack(NET, X, LABELS))


def test_logits_are_picked_where_gradients_have_another_dtype():
    class Paired(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = NET

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x, self.net(x)

    options = {"epsilon": 0.1, "gradient_dtype": torch.bfloat16}
    assert torch.equal(adv.pgd(Paired(), X, LABELS, logits=1, **options), adv.pgd(NET, X, LABELS, **options))


@pytest.mark.parametrize("logits", ["missing", 7])
def test_what_the_output_lacks_is_refused(logits):
    with pytest.raises(TypeError, match=f"`logits` should name an entry of .*, tuple. Found {logits!r}"):
        adv.pgd(lambda x: (NET(x),), X, LABELS, epsilon=0.1, logits=logits)


class Counting(nn.Module):
    """A network with batch normalisation that counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3))
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.body(x)

    def answer(self, x: Tensor) -> Tensor:
        return self(x)


COUNTING = Counting()


def _closure(model: nn.Module):
    return lambda x: model(x) + 0


def _nested(model: nn.Module):
    def outer(x: Tensor) -> Tensor:
        return (lambda: model(x))()

    return outer


WRAPPERS = {
    "closure": _closure,
    "nested": _nested,
    "partial": lambda model: functools.partial(lambda model, x: model(x), model),
    "method": lambda model: model.answer,
    "default": lambda model: lambda x, model=model: model(x),
    "list": lambda model: (lambda models: lambda x: models[0](x))([model]),
    "global name": lambda model: lambda x: COUNTING(x),
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_a_module_inside_of_a_function_is_as_it_was(wrap):
    COUNTING.train()
    COUNTING.body[1].eval()
    before = {name: tensor.clone() for name, tensor in COUNTING.state_dict().items()}
    found = adv.pgd(wrap(COUNTING), X, LABELS, epsilon=0.1)
    assert [module.training for module in COUNTING.modules()] == [True, True, True, False]
    assert all(torch.equal(tensor, before[name]) for name, tensor in COUNTING.state_dict().items())
    assert torch.equal(found, adv.pgd(COUNTING, X, LABELS, epsilon=0.1))


@pytest.mark.parametrize("shape", [(-1,), (-1, 1)], ids=str)
def test_a_single_logit_is_taken_as_its_refusal_says(shape):
    weight = torch.randn(6, generator=torch.Generator().manual_seed(0))
    single = lambda x: (x @ weight - 0.3).view(shape)  # noqa: E731
    with pytest.raises(ValueError, match="One logit of two classes") as refused:
        adv.fgsm(single, X, epsilon=0.1)
    logits = eval(str(refused.value).split("`")[3])
    labels = (single(X).flatten() > 0).long()
    found = adv.pgd(single, X, labels, epsilon=0.1, logits=logits)
    uphill = weight.sign() * (1 - 2 * labels[:, None])
    torch.testing.assert_close(found, (X + 0.1 * uphill).clamp(0, 1))
