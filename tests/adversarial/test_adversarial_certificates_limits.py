"""Where certificates could say too much or cost too much: hooks, roundings, half precision, memory, shapes."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
from each import each
from relu_networks import make
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from toolkit.adversarial.certificates import _linear_relaxation as relaxation
from toolkit.adversarial.certificates import (
    certify_crown,
    certify_interval,
    crown_bounds,
    interval_bounds,
    interval_loss,
    verify_relu,
)

CERTIFICATES = [verify_relu, certify_crown, certify_interval, interval_loss]
BOUNDS = [crown_bounds, interval_bounds]
names = pytest.mark.parametrize


def rows(n_samples: int, *shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.rand(n_samples, *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def margins_at(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    """The least margin at the inputs themselves, in float64, (N,)."""
    with torch.no_grad():
        logits = copy.deepcopy(model).double().eval()(x.double())
    margins = logits.gather(1, labels[:, None]) - logits
    return margins.scatter(1, labels[:, None], math.inf).amin(1)


# --- what a model may do beside its layers -----------------------------------------------------------------------


def hooked(place: str, layer: nn.Module) -> nn.Sequential:
    """Return a network that subtracts 0.45 from what goes through a layer that does nothing else."""
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), layer, nn.Linear(4, 2)).eval()
    if place == "before":
        layer.register_forward_pre_hook(lambda _, inputs: inputs[0] - 0.45)
    elif place == "after":
        layer.register_forward_hook(lambda _, __, output: output - 0.45)
    else:
        layer.forward = lambda input: input - 0.45
    return model


@names("function", [*CERTIFICATES, *BOUNDS])
@names("place", ["before", "after", "forward"])
@each("layer", [nn.Identity, nn.Dropout, nn.AlphaDropout, nn.ReLU, nn.Sequential])
def test_what_a_hook_does_is_not_left_out(function: Callable, place: str, layer: type[nn.Module]) -> None:
    inner = layer()
    model, plain = hooked(place, inner), nn.Sequential(nn.Linear(3, 4), nn.ReLU(), layer(), nn.Linear(4, 2)).eval()
    plain.load_state_dict(model.state_dict())
    x = rows(2, 3, dtype=torch.float32)
    assert not torch.allclose(model(x), plain(x))
    arguments = {} if function in BOUNDS else {"epsilon": 0.1}
    with pytest.raises(TypeError, match=rf"^`model` should have .* Found .* on {layer.__name__}\.$"):
        function(model, x, x if function in BOUNDS else torch.tensor([0, 1]), **arguments)


def test_a_hook_on_the_model_itself_or_inside_of_it_is_found() -> None:
    inner = nn.Sequential(nn.Identity())
    model = nn.Sequential(nn.Linear(3, 2), nn.Sequential(inner))
    for module in (model, inner, inner[0]):
        handle = module.register_forward_hook(lambda *_: None)
        with pytest.raises(TypeError, match="no forward hooks"):
            verify_relu(model, rows(1, 3), torch.tensor([0]), epsilon=0.1)
        handle.remove()
    assert len(verify_relu(model, rows(1, 3), torch.tensor([0]), epsilon=0.1).lower) == 1


@names("layer", [nn.ReLU, nn.LeakyReLU, nn.ELU])
def test_layers_that_write_into_their_input_leave_the_bounds_alone(layer: type[nn.Module]) -> None:
    linear = nn.Linear(4, 2).double()
    lower, upper = -rows(3, 2, 2), rows(3, 2, 2, seed=1) - 0.5
    upper = torch.maximum(lower, upper)
    given = lower.clone(), upper.clone()
    # Flattened they share the memory of what was given.
    found = interval_bounds(nn.Sequential(nn.Flatten(), layer(inplace=True), linear), lower, upper)
    assert torch.equal(lower, given[0])
    assert torch.equal(upper, given[1])
    expected = interval_bounds(nn.Sequential(nn.Flatten(), layer(), linear), lower, upper)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    once, _ = interval_bounds(nn.Sequential(nn.Flatten(), layer(inplace=True), linear), lower, lower)
    torch.testing.assert_close(once, linear(layer()(lower).flatten(1)))


def test_layers_that_write_into_their_input_leave_the_examples_alone() -> None:
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 3)).double()
    x, labels = rows(6, 4) - 0.5, torch.arange(6) % 3
    given = x.clone()
    found = verify_relu(model, x, labels, epsilon=0.2, bounds=(-1, 1))
    expected = verify_relu(nn.Sequential(nn.ReLU(), model[1]), x, labels, epsilon=0.2, bounds=(-1, 1))
    assert torch.equal(x, given)
    assert (found.examples < 0).any()
    assert torch.equal(found.examples, expected.examples)


# --- roundings ---------------------------------------------------------------------------------------------------


@names("norm", ["linf", "l2", "l1"])
def test_examples_are_in_the_ball_and_the_box_exactly(norm: str) -> None:
    generator = torch.Generator().manual_seed(3)
    beyond = broken = 0
    for seed in range(6):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).double()
        x = 0.3 + 0.4 * rows(40, 6, seed=seed)
        epsilon = {"linf": 0.2, "l2": 0.4, "l1": 0.6}[norm] * (0.5 + torch.rand(40, generator=generator).double())
        found = verify_relu(model, x, model(x).argmax(1), epsilon=epsilon, norm=norm, bounds=(0.3 - 1e-3, 0.77))
        broken += int(found.broken.sum())
        assert (found.upper == margins_at(model, found.examples, model(x).argmax(1))).all()
        for example, clean, radius in zip(found.examples.tolist(), x.tolist(), epsilon.tolist(), strict=True):
            sizes = [abs(Fraction(a) - Fraction(b)) for a, b in zip(example, clean, strict=True)]
            limit = Fraction(radius)
            inside = {
                "linf": max(sizes) <= limit,
                "l2": sum(size**2 for size in sizes) <= limit**2,
                "l1": sum(sizes) <= limit,
            }
            beyond += not inside[norm]
            assert min(example) >= 0.3 - 1e-3
            assert max(example) <= 0.77
    assert broken > 30
    assert beyond == 0


@names("certify", [certify_interval, certify_crown])
@names("kind", [(32,), "convolution"], ids=str)
def test_no_certificate_is_above_the_margin_by_a_rounding_of_single_precision(certify: Callable, kind: object) -> None:
    model, x = make(kind, seed=2, dtype=torch.float32), rows(300, 64, dtype=torch.float32)
    with torch.no_grad():
        labels = model(x).argmax(1)
    truth = margins_at(model, x, labels)
    plain = certify(model, x, labels, epsilon=0.0)
    with torch.autocast("cpu", torch.bfloat16):
        cast = certify(model, x, labels, epsilon=0.0)
    assert plain.dtype == torch.float64
    assert torch.equal(plain, cast)
    assert (plain <= truth).all()
    torch.testing.assert_close(plain, truth, rtol=0, atol=1e-12)  # rounded outward: 300 times 1e-16 of terms of 10
    assert (certify(model, x, labels, epsilon=1e-3) < truth).all()


@names("certify", CERTIFICATES)
def test_clean_inputs_on_the_box_stay_inside_in_single_precision(certify: Callable) -> None:
    """In single precision 0.7 is a little less than 0.7."""
    model, x = nn.Sequential(nn.Linear(3, 2)), torch.full((1, 3), 0.7)
    certify(model, x, torch.tensor([0]), epsilon=0.1, bounds=(0.7, 1))
    with pytest.raises(ValueError, match="within `bounds`"):
        certify(model, x - 1e-6, torch.tensor([0]), epsilon=0.1, bounds=(0.7, 1))


def test_loss_stays_in_the_dtype_of_the_inputs() -> None:
    model, x = make((32,), dtype=torch.float32), rows(5, 64, dtype=torch.float32)
    assert interval_loss(model, x, torch.arange(5), epsilon=0.01).dtype == torch.float32
    exact = interval_loss(copy.deepcopy(model).double(), x.double(), torch.arange(5), epsilon=0.01)
    assert exact.dtype == torch.float64
    torch.testing.assert_close(interval_loss(model, x, torch.arange(5), epsilon=0.01).double(), exact)


# --- memory ------------------------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """Remembers how many numbers the largest tensor had that any operation made."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):  # an expanded one takes no more than its storage
                self.numbers = max(self.numbers, tensor.untyped_storage().nbytes() // tensor.element_size())
        return result


@names("norm", ["linf", "l2", "l1"])
@names("limit", [1, 500, 20_000, 100_000])
def test_pieces_are_what_is_found_at_once(norm: str, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Down to one objective of one row at a time."""
    model, x = make((12, 9)), rows(7, 64)
    labels = torch.arange(7)
    whole = certify_crown(model, x, labels, epsilon=0.05, norm=norm)
    bounds = crown_bounds(model, x - 0.05, x + 0.05)
    monkeypatch.setattr(relaxation, "_NUMBERS", limit)
    torch.testing.assert_close(certify_crown(model, x, labels, epsilon=0.05, norm=norm), whole, rtol=0, atol=1e-12)
    torch.testing.assert_close(crown_bounds(model, x - 0.05, x + 0.05), bounds, rtol=0, atol=1e-12)
    assert certify_crown(model, x[:0], labels[:0], epsilon=0.05, norm=norm).shape == (0,)


@names("limit", [None, 5000, 200])
def test_bounds_in_pieces_are_differentiable(limit: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if limit is not None:
        monkeypatch.setattr(relaxation, "_NUMBERS", limit)
    model, x = make((6, 5), seed=1), rows(4, 64)
    parameters = list(model.parameters())

    def spread() -> Tensor:
        lower, upper = crown_bounds(model, x - 0.05, x + 0.05)
        return (upper - 1.5 * lower).square().sum()

    slopes = torch.autograd.grad(spread(), parameters)
    generator = torch.Generator().manual_seed(1)
    directions = [torch.randn(p.shape, generator=generator, dtype=torch.float64) for p in parameters]
    step, found = 1e-6, []
    for sign in (1, -1):
        with torch.no_grad():
            for parameter, direction in zip(parameters, directions, strict=True):
                parameter.add_(sign * step * direction)
            found.append(spread())
            for parameter, direction in zip(parameters, directions, strict=True):
                parameter.sub_(sign * step * direction)
    expected = sum((a * b).sum() for a, b in zip(slopes, directions, strict=True))
    torch.testing.assert_close((found[0] - found[1]) / (2 * step), expected, rtol=1e-6, atol=1e-8)


@pytest.mark.slow
@names("norm", ["linf", "l2", "l1"])
@names(("widths", "limit", "allowed"), [((96, 80), 2 * 80 * 96, 2 * 80 * 96), ((120, 8, 100), 4000, 2 * 120 * 64)])
def test_memory_does_not_grow_with_the_samples(
    widths: tuple[int, ...], limit: int, allowed: int, norm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most a row's bounds of the second layer, or, where one row's bounds are too many, the weights of the first."""
    monkeypatch.setattr(relaxation, "_NUMBERS", limit)
    model, x = make(widths), rows(40, 64)
    with Largest() as largest:
        certify_crown(model, x, torch.arange(40) % 10, epsilon=0.05, norm=norm)
    assert largest.numbers <= allowed
    monkeypatch.setattr(relaxation, "_NUMBERS", 2**40)
    with Largest() as largest:
        certify_crown(model, x, torch.arange(40) % 10, epsilon=0.05, norm=norm)
    assert largest.numbers >= 40 * 2 * 80 * 96


# --- shapes ------------------------------------------------------------------------------------------------------


@names("certify", CERTIFICATES)
def test_model_that_returns_images_is_refused(certify: Callable) -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3))
    with pytest.raises(ValueError, match=r"^`model` should return logits of shape \(N, C\)\. Found \(N, 2, 4, 4\)\.$"):
        certify(model, rows(3, 1, 8, 8, dtype=torch.float32), torch.tensor([0, 1, 0]), epsilon=0.1)


@names("certify", CERTIFICATES)
def test_model_that_returns_sequences_is_refused(certify: Callable) -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2))
    with pytest.raises(ValueError, match=r"^`model` should return logits of shape \(N, C\)\. Found \(N, 3, [52]\)\.$"):
        certify(model, rows(2, 3, 4, dtype=torch.float32), torch.tensor([0, 1]), epsilon=0.1)


# --- soundness ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1e-200, 1e-160, 1.0, 1e160, 1e200])
def test_the_units_of_the_logits_do_not_matter_in_l2(scale: float) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)).double()
    scaled = copy.deepcopy(plain)
    for parameter in scaled[2].parameters():
        parameter.data.mul_(scale)
    x = torch.rand(4, 5, dtype=torch.float64)
    labels = plain(x).argmax(1)
    for certify in (certify_crown, lambda *arguments, **options: verify_relu(*arguments, **options).lower):
        expected, found = (certify(model, x, labels, epsilon=0.4, norm="l2") for model in (plain, scaled))
        # Bisection ends at a displacement that is right to the rounding of 64 halvings.
        torch.testing.assert_close(found / scale, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("beta", "threshold"), [(1.0, 20.0), (1.0, 1.0), (5.0, 2.0), (-1.0, 3.0), (2.0, -3.0)])
def test_softplus_steps_down_at_its_threshold(beta: float, threshold: float) -> None:
    model = nn.Sequential(nn.Softplus(beta, threshold))
    edge = torch.tensor(threshold / beta, dtype=torch.float64)
    for width in (1e-9, 0.1, 5.0):
        ends = (edge - width).reshape(1, 1), (edge + 0.7 * width).reshape(1, 1)
        lower, upper = interval_bounds(model, *ends)
        values = model(torch.linspace(ends[0].item(), ends[1].item(), 2001, dtype=torch.float64)[:, None])
        assert lower <= values.min() + 1e-14 * values.abs().max()
        assert upper >= values.max() - 1e-14 * values.abs().max()


def test_a_pool_that_divides_by_a_negative_number_is_refused() -> None:
    model = nn.Sequential(nn.AvgPool2d(2, divisor_override=-3), nn.Flatten(), nn.Linear(4, 2))
    with pytest.raises(ValueError, match="`divisor_override` should be positive"):
        certify_interval(model, rows(1, 1, 4, 4, dtype=torch.float32), torch.tensor([0]), epsilon=0.1)


@pytest.mark.slow
def test_an_affine_model_whose_margin_is_rounding() -> None:
    """Without a rectifier there are no cases, and the linear bound is all that is known."""
    for seed in range(60):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 2)).double()
        x = torch.rand(1, 3, dtype=torch.float64)
        label = model(x).argmax(1)
        worst = verify_relu(model, x, label, epsilon=0.1, goal="margin").lower
        with torch.no_grad():
            model[0].bias[label] -= worst
        found = verify_relu(model, x, label, epsilon=0.1)
        assert abs(found.lower.item()) < 1e-12  # rounded outward, some units of 2e-16 for each operation
