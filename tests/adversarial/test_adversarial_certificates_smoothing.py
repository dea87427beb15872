"""Randomised smoothing: against the radius of a linear classifier, which is known, and the binomial distribution."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from scipy.stats import binom, norm
from torch import Tensor, nn
from values import seeded

from toolkit.adversarial.certificates import distance_linear
from toolkit.adversarial.certificates.smoothing import certify_smoothing

WEIGHT = torch.tensor([[1.0, -2.0, 0.5], [0.0, 0.5, -1.0]], dtype=torch.float64)
BIAS = torch.tensor([0.3, 0.0], dtype=torch.float64)
LINEAR = partial(F.linear, weight=WEIGHT, bias=BIAS)
X = torch.tensor([[0.5, 0.1, 0.2], [0.1, 0.7, 0.3], [0.9, 0.2, 0.6], [0.2, 0.9, 0.1]], dtype=torch.float64)


def test_radius_of_a_linear_classifier_is_its_distance_and_the_bound_stays_below() -> None:
    """With ``m`` the distance, ``P = Phi(m / sigma)``, so ``sigma Phi^-1(P)`` is m again; the bound estimates it."""
    labels = LINEAR(X).argmax(1)
    distance = distance_linear(WEIGHT, BIAS, X, labels, norm="l2", bounds=None)
    sigma, confidence, n_seeds, samples = 0.5, 0.9, 60, 2000
    above = 0
    for seed in range(n_seeds):
        found = certify_smoothing(
            LINEAR, X, sigma=sigma, samples=samples, confidence=confidence, generator=seeded(seed), batch_size=2000
        )
        certified = found.predictions >= 0
        assert torch.equal(found.predictions[certified], labels[certified])
        above += int((found.radius > distance).sum())
        probability = norm.cdf(distance / sigma)
        spread = (probability * (1 - probability) / samples) ** 0.5
        # Five standard deviations, and less than two for the width of the bound itself.
        assert (found.probability.numpy() > probability - 7 * spread).all()
    rate, total = 1 - confidence, n_seeds * len(X)
    assert above <= binom.ppf(0.9999, total, rate)  # too many would be no confidence bound
    assert above >= binom.ppf(0.0001, total, rate)  # hardly any would be a loose one


@pytest.mark.parametrize("samples", [100, 1000])
def test_unanimous_draws_give_the_greatest_radius(samples: int) -> None:
    certain = lambda x: torch.tensor([0.0, 1.0, 0.5]).expand(len(x), 3)  # noqa: E731
    found = certify_smoothing(certain, X, sigma=0.25, samples=samples, confidence=0.99, generator=seeded())
    assert (found.predictions == 1).all()
    assert found.radius[0].item() == pytest.approx(0.25 * norm.ppf(0.01 ** (1 / samples)), rel=1e-12)


class Scripted:
    """A model that answers with given classes one after the other, whatever it is asked."""

    def __init__(self, classes: list[int]) -> None:
        self.classes = classes

    def __call__(self, x: Tensor) -> Tensor:
        now, self.classes = self.classes[: len(x)], self.classes[len(x) :]
        return F.one_hot(torch.tensor(now), 3).double()


@pytest.mark.parametrize("batch_size", [1, 7, 1000])
@pytest.mark.parametrize("agreeing", [0, 1, 30, 33, 45, 49, 50])
def test_bound_is_that_of_clopper_and_pearson(agreeing: int, batch_size: int) -> None:
    """At the bound, that many agreeing draws or more have a probability of exactly ``1 - confidence``."""
    model = Scripted([0, 2, 2, 2, 1] + [2] * agreeing + [0] * (50 - agreeing))
    found = certify_smoothing(
        model,
        X[:1],
        sigma=2.0,
        samples=50,
        samples_selection=5,
        confidence=0.95,
        generator=seeded(),
        batch_size=batch_size,
    )
    assert model.classes == []
    probability = found.probability.item()
    if agreeing == 0:
        assert probability == 0
    else:
        assert binom.sf(agreeing - 1, 50, probability) == pytest.approx(0.05, rel=1e-9)
    if probability > 0.5:
        assert found.predictions.item() == 2
        assert found.radius.item() == pytest.approx(2 * norm.ppf(probability), rel=1e-12)
    else:
        assert (found.predictions.item(), found.radius.item()) == (-1, 0)
    assert (probability > 0.5) == (agreeing >= 32)


class Counting(nn.Module):
    """Batch normalisation, dropout, a buffer that counts calls, a draw from the global generator, and the sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 3)).double()
        self.register_buffer("calls", torch.zeros(()))
        self.sizes: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        assert not torch.is_grad_enabled()
        self.calls += 1
        self.sizes.append(len(x))
        torch.rand(())
        return self.body(x)


def test_nothing_is_touched_and_memory_does_not_grow_with_the_draws() -> None:
    model = Counting()
    model.body[1].eval()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 7)
    modes = [module.training for module in model.modules()]
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    state, x = torch.get_rng_state(), X.clone()
    certify_smoothing(model, x, sigma=0.5, samples=5001, generator=seeded(), batch_size=500)
    with pytest.raises(ValueError, match="should return logits"):
        certify_smoothing(nn.Sequential(model, nn.Flatten(0)), x, sigma=0.5, samples=10, generator=seeded())
    assert max(model.sizes) == 500
    assert sum(model.sizes) == len(X) * 5101 + 100
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(value, kept[name]) for name, value in model.state_dict().items())
    assert all((parameter.grad == 7).all() for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(x, X)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_the_model_sees_the_dtype_and_shape_of_the_inputs(dtype: torch.dtype) -> None:
    def model(x: Tensor) -> Tensor:
        assert x.dtype == dtype
        assert x.shape[1:] == (1, 3)
        return LINEAR(x[:, 0].double())

    with torch.inference_mode():
        found = certify_smoothing(model, X[:, None].to(dtype), sigma=0.25, samples=200, generator=seeded())
    assert found.radius.dtype == torch.float64
    assert found.predictions.dtype == torch.int64


def test_the_seed_decides() -> None:
    def radius(seed: int) -> list[float]:
        return certify_smoothing(LINEAR, X, sigma=0.5, samples=500, generator=seeded(seed)).radius.tolist()

    assert radius(0) == radius(0)
    assert radius(0) != radius(1)


REFUSED = {
    "integers": ({"x": X.long()}, TypeError, "`x` should be floating point. Found torch.int64."),
    "array": ({"x": X.numpy()}, TypeError, "`x` should be a tensor. Found ndarray."),
    "one sample": ({"x": X[0]}, ValueError, "`x` should have shape (N, ...). Found (3,)."),
    "sigma": ({"sigma": 0.0}, ValueError, "`sigma` should be positive and finite. Found 0.0."),
    "no sigma": ({"sigma": math.nan}, ValueError, "`sigma` should be positive and finite. Found nan."),
    "samples": ({"samples": 0}, ValueError, "`samples` should be a positive integer. Found 0."),
    "batch": ({"batch_size": 0.5}, ValueError, "`batch_size` should be a positive integer. Found 0.5."),
    "selection": ({"samples_selection": -2}, ValueError, "`samples_selection` should be a positive integer. Found -2."),
    "confidence": ({"confidence": 1.0}, ValueError, "`confidence` should be between 0 and 1. Found 1.0."),
    "tuple": (
        {"model": lambda x: (LINEAR(x),)},
        TypeError,
        "`model` should return logits, a tensor (B, C). Found tuple:",
    ),
    "nothing": ({"model": lambda x: None}, TypeError, "Found NoneType:"),
    "NaN": ({"model": lambda x: x / 0 * 0}, ValueError, "`model` should return numbers. Found NaN."),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    changed, error, message = REFUSED[name]
    arguments = {"model": LINEAR, "x": X, "sigma": 0.5, "samples": 10, "generator": seeded()} | changed
    with pytest.raises(error) as raised:
        certify_smoothing(**arguments)
    assert message in str(raised.value)
