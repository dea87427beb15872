"""Certificates against exact arithmetic: a margin that is negative by one rounding has no positive bound."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable

import mpmath
import pytest
import torch
from torch import Tensor, nn

from toolkit.adversarial import (
    certify_crown,
    certify_interval,
    crown_bounds,
    distance_linear,
    interval_bounds,
    verify_relu,
)

Number = mpmath.mpf
CERTIFICATES: dict[str, Callable[..., Tensor]] = {
    "crown": certify_crown,
    "interval": certify_interval,
    "relu": lambda *arguments, **options: verify_relu(*arguments, **options).lower,
}
ACTIVATIONS: dict[type[nn.Module], Callable[[nn.Module, Number], Number]] = {
    nn.ReLU: lambda _, z: max(z, Number(0)),
    nn.LeakyReLU: lambda layer, z: z if z > 0 else Number(layer.negative_slope) * z,
    nn.ELU: lambda layer, z: z if z > 0 else Number(layer.alpha) * mpmath.expm1(z),
    nn.Softplus: lambda layer, z: z if z > layer.threshold else mpmath.log1p(mpmath.exp(z)),
    nn.Sigmoid: lambda _, z: 1 / (1 + mpmath.exp(-z)),
    nn.Tanh: lambda _, z: mpmath.tanh(z),
}


def exact_margin(model: nn.Sequential, point: list[Number], label: int) -> Number:
    """The least margin of a model at a point, in 60 digits."""
    z = point
    for layer in model:
        if isinstance(layer, nn.Linear):
            rows = zip(layer.weight.tolist(), layer.bias.tolist(), strict=True)
            z = [sum((Number(w) * v for w, v in zip(row, z, strict=True)), Number(bias)) for row, bias in rows]
        elif isinstance(layer, nn.BatchNorm1d):
            parts = (layer.running_mean, layer.running_var, layer.weight, layer.bias)
            numbers = zip(z, *(part.tolist() for part in parts), strict=True)
            z = [(v - mean) / mpmath.sqrt(Number(var) + layer.eps) * w + b for v, mean, var, w, b in numbers]
        else:
            z = [ACTIVATIONS[type(layer)](layer, v) for v in z]
    return min(z[label] - other for index, other in enumerate(z) if index != label)


def drawn(seed: int, activations: list[Callable[[], nn.Module]]) -> tuple[nn.Sequential, Tensor, float]:
    """A network with or without activations and normalisation between its layers, of any scale; an input; epsilon."""
    generator = torch.Generator().manual_seed(seed)

    def pick(choices: list) -> object:
        return choices[int(torch.randint(len(choices), (), generator=generator))]

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64) * 10.0 ** pick([-3, 0, 0, 0, 2])

    width = n_features = pick([1, 2, 3])
    layers: list[nn.Module] = []
    for depth in range(pick([1, 2, 3, 4]), -1, -1):
        layer = nn.Linear(width, width := pick([2, 3, 6] if depth else [2, 3])).double()
        layer.weight.data, layer.bias.data = normal(*layer.weight.shape), normal(width)
        layers += [layer]
        if depth and pick([True, False]):
            layers += [norm := nn.BatchNorm1d(width).double().eval()]
            norm.running_mean, norm.running_var = normal(width), normal(width).square()
            norm.weight.data, norm.bias.data = normal(width), normal(width)
        if depth and pick([True, True, False]):
            layers += [pick(activations)()]
    dtype = pick([torch.float32, torch.float64])
    x = torch.rand(1, n_features, generator=generator, dtype=dtype)
    return nn.Sequential(*layers).to(dtype).requires_grad_(False), x, pick([0.0, 1e-12, 1e-3, 0.1])


CASES = [("crown", [nn.ReLU]), ("relu", [nn.ReLU]), ("interval", [nn.ReLU]), ("interval", list(ACTIVATIONS))]


@pytest.mark.parametrize(("name", "activations"), CASES, ids=["crown", "relu", "interval", "interval of any"])
def test_no_certificate_is_above_the_margin_of_any_corner(name: str, activations: list) -> None:
    """Half of the networks would break it without outward rounding."""
    with mpmath.workdps(60):
        for seed in range(25):
            model, x, epsilon = drawn(seed, activations)
            label = model(x).argmax(1)
            ends = [(Number(v) - epsilon, Number(v) + epsilon) for v in x[0].tolist()]
            worst = min(exact_margin(model, list(corner), int(label)) for corner in itertools.product(*ends))
            bound = CERTIFICATES[name](model, x, label, epsilon=epsilon, bounds=None).item()
            assert Number(bound) <= worst, seed


@pytest.mark.parametrize("name", CERTIFICATES)
def test_layers_that_cancel_are_rounded_by_the_size_of_their_terms(name: str) -> None:
    """The product of two layers is of the order of 1e-4, made of terms of the order of 1e8."""
    with mpmath.workdps(60):
        for seed in range(20):
            generator = torch.Generator().manual_seed(seed)
            first, second = (nn.Linear(*sizes).double().requires_grad_(False) for sizes in ((3, 8), (8, 2)))
            columns = torch.randn(8, 8, generator=generator, dtype=torch.float64)
            first.weight.copy_(1e8 * columns[:, :3])
            second.weight.copy_(torch.linalg.qr(columns)[0][:, 4:6].T)
            second.weight.add_(1e-12 * torch.randn(2, 8, generator=generator, dtype=torch.float64))
            model, x = nn.Sequential(first, second), torch.rand(1, 3, generator=generator, dtype=torch.float64)
            point, label = [Number(v) for v in x[0].tolist()], torch.tensor([0])
            second.bias[0] -= float(exact_margin(model, point, 0))
            bound = CERTIFICATES[name](model, x, label, epsilon=0.0).item()
            assert Number(bound) <= exact_margin(model, point, 0), seed


def test_interval_bounds_of_infinite_ends() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Tanh(), nn.Linear(2, 2)).double().eval()
    model.requires_grad_(False)
    lower = torch.tensor([[-math.inf, 0.0], [0.5, 0.5], [-math.inf, -math.inf]], dtype=torch.float64)
    upper = torch.tensor([[0.0, 1.0], [math.inf, math.inf], [math.inf, 0.0]], dtype=torch.float64)
    # So far out the hyperbolic tangent is 1, and nothing changes any more.
    expected = interval_bounds(model, lower.clamp(min=-1e6), upper.clamp(max=1e6))
    torch.testing.assert_close(interval_bounds(model, lower, upper), expected)
    sums = nn.Sequential(nn.Linear(2, 3)).double().requires_grad_(False)
    sums[0].weight.copy_(torch.tensor([[1.0, 2.0], [-1.0, 1.0], [0.0, 1.0]]))
    sums[0].bias.zero_()
    low, high = interval_bounds(sums, lower[:1], upper[:1])
    assert low.tolist() == [[-math.inf, 0.0, 0.0]]
    assert high.tolist() == [[2.0, math.inf, 1.0]]


@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
@pytest.mark.parametrize("bounds", [None, (0, 1)])
def test_the_units_of_the_logits_do_not_matter_to_a_distance(norm: str, bounds: tuple[int, int] | None) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(5, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    x = x.sigmoid()
    labels = (x @ weight.T).argmax(1)
    expected = distance_linear(weight, None, x, labels, norm=norm, bounds=bounds)
    for exponent in (-1000, -600, 600, 1000):
        scaled = weight.ldexp(torch.tensor(exponent))
        found = distance_linear(scaled, None, x, labels, norm=norm, bounds=bounds)
        torch.testing.assert_close(found, expected, rtol=1e-14, atol=0)


@pytest.mark.parametrize("bounds", [interval_bounds, crown_bounds])
def test_ends_whose_sum_is_out_of_range(bounds: Callable) -> None:
    model = nn.Sequential(nn.Linear(1, 2), nn.ReLU(), nn.Linear(2, 2)).double().requires_grad_(False)
    model[0].weight.copy_(torch.tensor([[2.0**-1000], [-(2.0**-1000)]]))
    small = copy.deepcopy(model)
    small[0].weight.mul_(2.0**1000)
    ends = torch.tensor([[1e308]], dtype=torch.float64), torch.tensor([[1.7e308]], dtype=torch.float64)
    expected = bounds(small, *(end * 2.0**-1000 for end in ends))
    torch.testing.assert_close(bounds(model, *ends), expected, rtol=1e-14, atol=0)
