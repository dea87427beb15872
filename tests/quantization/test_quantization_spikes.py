"""Surrogate slopes of spikes, and the reset with and without a gradient."""

import math
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from accelerator import ACCELERATOR
from contract import BlockCase
from torch import Tensor
from torch.func import grad, vmap

from toolkit import unblock
from toolkit.quantization import (
    RESET,
    SPIKES,
    arctan_slope,
    fast_sigmoid_slope,
    leaky_integrate_and_fire,
    sigmoid_slope,
    spike,
)

CURRENTS = torch.tensor([0.9, 0.6, 0.8, 0.3], dtype=torch.float64)
X, C = (torch.tensor(row, dtype=torch.float64) for row in ([-0.4, 0.0, 0.1, 1.3], [1.0, -2.0, 0.5, 0.7]))
WEIGHT, DECAY = 1.3, 0.8


def cauchy_slope(x):
    """Return the slope of ``arctan(pi x) / pi``, in Python's numbers or tensors."""
    return 1 / (math.pi * (1 + (math.pi * x) ** 2))


def fire(parameters, reset="subtract", slope=cauchy_slope) -> Tensor:
    """Return the number of spikes plus the last potential."""
    currents = parameters["weight"] * CURRENTS.to(parameters["weight"])
    spikes, potentials = leaky_integrate_and_fire(currents, decay=DECAY, reset=reset, slope=slope)
    return spikes.sum() + potentials[-1]


def derivative(weight: float, *, reset: str, opened: bool, slope=cauchy_slope) -> float:
    """Return the derivative of `fire` by its weight: the recursion of the potential's derivative, on numbers."""
    u = du = total = 0.0
    for step, current in enumerate(CURRENTS.tolist()):
        spiked, dspike = float(u > 1), slope(u - 1) * du if opened else 0.0
        if step == 0:
            u, du = weight * current, current
        elif reset == "subtract":
            u, du = DECAY * u + weight * current - spiked, DECAY * du + current - dspike
        else:
            u, du = (
                DECAY * u * (1 - spiked) + weight * current,
                DECAY * du * (1 - spiked) + current - DECAY * u * dspike,
            )
        total += slope(u - 1) * du
    return total + du


def weights() -> dict[str, Tensor]:
    return {"weight": torch.tensor([WEIGHT], dtype=torch.float64, requires_grad=True)}


def reset_case(reset: str) -> BlockCase:
    def witness(opened):
        return lambda p: {"weight": torch.tensor([derivative(WEIGHT, reset=reset, opened=opened)], dtype=torch.float64)}

    return BlockCase(
        id=f"quantization_reset_{reset}",
        block=RESET,
        parameters=weights,
        loss=partial(fire, reset=reset),
        blocked=witness(False),
        opened=witness(True),
    )


BLOCK_CASES = [
    BlockCase(
        id="quantization_spikes",
        block=SPIKES,
        parameters=lambda: {"x": X.clone().requires_grad_()},
        loss=lambda p: spike(p["x"], cauchy_slope) @ C,
        blocked=lambda p: {"x": C * cauchy_slope(X)},
        opened=lambda p: {"x": torch.zeros_like(X)},
    ),
    reset_case("subtract"),
    reset_case("zero"),
]
PEER_CASES = {
    "spiking_neuron": (
        {"weight": torch.tensor([WEIGHT], dtype=torch.float64)},
        {"currents": CURRENTS},
        lambda p, c: fire(p),
    )
}


def slope_of(loss, weight: float = WEIGHT) -> float:
    w = torch.tensor(weight, dtype=torch.float64, requires_grad=True)
    return torch.autograd.grad(loss({"weight": w}), w)[0].item()


@pytest.mark.parametrize(
    ("slope", "blocked", "opened"),
    [(cauchy_slope, 2.649941804, 2.123561243), (arctan_slope, 4.502723136, 2.533240901)],
    ids=["paper", "alpha 2"],
)
def test_known_numbers(slope, blocked, opened):
    loss = partial(fire, slope=slope)
    assert loss({"weight": torch.tensor(WEIGHT, dtype=torch.float64)}).item() == pytest.approx(2.68024)
    assert slope_of(loss) == pytest.approx(blocked, rel=1e-9)
    with unblock(RESET):
        assert slope_of(loss) == pytest.approx(opened, rel=1e-9)


@pytest.mark.parametrize(
    ("reset", "after"),
    [
        ("subtract", lambda u, spiked: DECAY * u - spiked),
        ("zero", lambda u, spiked: 0.0 if spiked else DECAY * u),
        ("none", lambda u, spiked: DECAY * u),
    ],
)
def test_potentials_follow_their_recursion(reset, after):
    spikes, potentials = leaky_integrate_and_fire(WEIGHT * CURRENTS, decay=DECAY, reset=reset)
    u, expected = 0.0, []
    for current in (WEIGHT * CURRENTS).tolist():
        u = after(u, u > 1) + current
        expected.append(u)
    assert potentials.tolist() == pytest.approx(expected)
    assert spikes.tolist() == [float(u > 1) for u in expected]
    assert 0 < spikes.sum() < 4 or reset == "none"


@pytest.mark.parametrize(
    ("slope", "area"),
    [
        (arctan_slope, 1.0),
        (partial(arctan_slope, alpha=5.0), 1.0),
        (fast_sigmoid_slope, 2 / 25),
        (partial(fast_sigmoid_slope, beta=2.0), 1.0),
        (sigmoid_slope, 1.0),
        (partial(sigmoid_slope, beta=3.0), 1.0),
    ],
    ids=["arctan", "steep arctan", "fast_sigmoid", "flat fast_sigmoid", "sigmoid", "flat sigmoid"],
)
def test_slopes_are_even_and_finite_and_have_their_area(slope, area):
    """The area is the rise of the primitive: 1, but for the fast sigmoid ``x / (1 + b|x|)`` it is 2 / b."""
    # x = tan(a): the whole line by an interval
    angles = torch.linspace(-math.pi / 2, math.pi / 2, 200_001, dtype=torch.float64)[1:-1]
    x = angles.tan()
    found = torch.trapezoid(slope(x) * (1 + x.square()), angles)
    assert found.item() == pytest.approx(area, rel=1e-3)
    torch.testing.assert_close(slope(x), slope(-x))
    extreme = torch.tensor([-3e38, -1e4, 0.0, 1e4, 3e38])
    assert slope(extreme).isfinite().all()
    assert (slope(extreme) >= 0).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_spike_is_exactly_zero_or_one(dtype):
    x = (torch.randn(10_000, generator=torch.Generator().manual_seed(0)) * 5).to(dtype)
    for slope in (arctan_slope, fast_sigmoid_slope, sigmoid_slope):
        y = spike(x, slope)
        assert y.dtype == dtype
        assert torch.equal(y, (x > 0).to(dtype))


def test_a_missing_value_stays_one():
    assert spike(torch.tensor([math.nan])).isnan().all()


def test_the_second_derivative_is_zero():
    x = torch.tensor(0.2, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(spike(x) ** 2, x, create_graph=True)
    (second,) = torch.autograd.grad(slope, x)
    assert second.item() == pytest.approx(2 * arctan_slope(torch.tensor(0.2)).item() ** 2)


def test_neurons_are_independent_and_functions_map():
    weights = torch.tensor([0.7, 1.3, 1.9], dtype=torch.float64)
    each = [fire({"weight": w}) for w in weights]
    spikes, potentials = leaky_integrate_and_fire(CURRENTS[:, None] * weights, decay=DECAY, slope=cauchy_slope)
    torch.testing.assert_close(spikes.sum(0) + potentials[-1], torch.stack(each))
    slopes = vmap(grad(lambda w: fire({"weight": w})))(weights)
    assert slopes.tolist() == pytest.approx([slope_of(fire, w) for w in weights.tolist()])


@pytest.mark.parametrize("opened", [False, True])
@pytest.mark.parametrize("reset", ["subtract", "zero", "none"])
def test_a_start_continues_a_sequence(reset, opened):
    """Cut anywhere, also after a spike, whose reset then belongs to the second part."""
    currents = CURRENTS.clone().requires_grad_()
    run = partial(leaky_integrate_and_fire, decay=DECAY, reset=reset)
    with unblock(RESET) if opened and reset != "none" else nullcontext():
        whole = run(currents)
        assert whole.spikes.any()
        for cut in range(1, len(currents)):
            first = run(currents[:cut])
            rest = run(currents[cut:], start=first.potentials[-1])
            assert torch.equal(torch.cat([first.potentials, rest.potentials]), whole.potentials)
            assert torch.equal(torch.cat([first.spikes, rest.spikes]), whole.spikes)
            slopes = [torch.autograd.grad(out.potentials[-1], currents, retain_graph=True)[0] for out in (rest, whole)]
            torch.testing.assert_close(*slopes)


def test_a_decay_can_be_learnt():
    decay = torch.tensor([0.8, 0.5], dtype=torch.float64, requires_grad=True)
    _, potentials = leaky_integrate_and_fire(CURRENTS[:, None].expand(4, 2), decay=decay, reset="none")
    (found,) = torch.autograd.grad(potentials[1].sum(), decay)
    assert found.tolist() == pytest.approx([0.9, 0.9])


@pytest.mark.slow
@pytest.mark.keeps_its_sums
def test_compiled_code_gives_the_same_blocked_and_open():
    compiled = torch.compile(fire, backend="aot_eager", fullgraph=True)
    for opened in ((), (RESET,), (SPIKES, RESET), ()):
        with unblock(*opened):
            assert slope_of(compiled) == pytest.approx(slope_of(fire))


@pytest.mark.parametrize("device", [pytest.param(ACCELERATOR, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("opened", [(), (RESET,)], ids=["blocked", "open"])
def test_gradients_on_a_device(device, opened):
    with unblock(*opened):
        w = torch.tensor([WEIGHT], dtype=torch.float64, device=device, requires_grad=True)
        (found,) = torch.autograd.grad(fire({"weight": w}).sum(), w)
        assert found.item() == pytest.approx(slope_of(fire))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"decay": 1.5}, "`decay` should be from 0 to 1. Found 1.5."),
        ({"decay": 0.5, "threshold": 0}, "`threshold` should be positive and finite. Found 0."),
        ({"decay": 0.5, "reset": "none "}, "`reset` should be one of 'subtract', 'zero', 'none'. Found 'none '."),
        ({"decay": 0.5, "currents": torch.zeros(0, 3)}, r"`currents` should have shape \(T, ...\) with T >= 1."),
        (
            {"decay": 0.5, "currents": torch.zeros(2, 3), "start": torch.zeros(3, 1)},
            r"`start` should broadcast to \(3,\). Found \(3, 1\).",
        ),
        (
            {"decay": torch.full((2,), 0.5), "currents": torch.zeros(2, 3)},
            r"`decay` should broadcast to \(3,\). Found \(2,\).",
        ),
    ],
)
def test_wrong_input_is_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        leaky_integrate_and_fire(**{"currents": CURRENTS, **arguments})
