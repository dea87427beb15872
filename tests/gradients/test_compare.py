"""Gates against real removals; the numbers of a comparison; the compared program is left as it was."""

import copy
import functools
import itertools
import json
import math
import pickle
import random
import re
import threading
import types
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from toolkit import audit, block, compare, is_blocked, scope, stop_gradient, stop_recording, unblock
from toolkit.blocks import opened
from toolkit.gradients import Comparison, Difference, Verdict
from toolkit.gradients.memory import LiveBytes

Parameters = Mapping[str, Tensor]
Program = Callable[[Parameters], Tensor]

EPS = torch.finfo(torch.float64).eps

WEIGHTS = block("test_compare.weights", "The weights of the average are labels.")


def _parameters(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Return leaves at an asymmetric point."""
    generator = torch.Generator().manual_seed(7)
    shapes = {"w": (3, 3), "v": (3,), "s": ()}
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).mul_(0.8).to(dtype).requires_grad_()
        for name, shape in shapes.items()
    }


def _removed(program: Program, parameters: Parameters, names: tuple[str, ...]) -> dict[str, Tensor]:
    """Return the gradient of the program run again, with the blocks really removed."""
    torch.manual_seed(0)
    leaves = list(parameters.values())
    with opened(*names):
        value = program(parameters)
        gradients = [None] * len(leaves)
        if value.requires_grad:
            gradients = torch.autograd.grad(value, leaves, allow_unused=True)
    return {
        name: torch.zeros_like(leaf) if gradient is None else gradient
        for (name, leaf), gradient in zip(parameters.items(), gradients, strict=True)
    }


def _subsets(names: list[str]) -> list[tuple[str, ...]]:
    return [subset for size in range(len(names) + 1) for subset in itertools.combinations(names, size)]


# --- every set of open gates is the real removal, bit for bit ----------------------------------------------------


class _Square(torch.autograd.Function):
    """Autograd's own modes do not see this one's `apply`."""

    @staticmethod
    def forward(ctx, input):
        ctx.save_for_backward(input)
        return input * input

    @staticmethod
    def backward(ctx, cotangent):
        return 2 * ctx.saved_tensors[0] * cotangent


class _StoppedInside(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(input):
        return input.sin()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, cotangent):
        (input,) = ctx.saved_tensors
        return cotangent * stop_gradient(input, "function.input").cos()


def mlp_with_four_blocks(p):
    hidden = p["v"]
    for i in range(4):
        hidden = torch.tanh(p["w"] @ hidden) + stop_gradient(torch.sin(p["w"].T @ hidden), f"mlp.{i}") * p["s"]
    return hidden.square().sum()


def shared_weights(p):
    first, second = p["w"] @ p["v"], p["w"].T @ p["v"]
    third = stop_gradient(p["w"], "shared.weight") @ first.tanh()
    fourth = p["w"] @ stop_gradient(second * p["w"].diagonal(), "shared.hidden")
    return (first * second * third * fourth).sum() + (p["w"] * stop_gradient(p["w"], "shared.weight")).sum()


def double_dipped(p):
    return (p["v"] * stop_gradient(stop_gradient(p["v"].exp(), "dip").sin() * p["s"], "dip")).sum()


def block_in_a_loop(p):
    state = p["v"]
    for _ in range(5):
        state = torch.tanh(p["w"] @ stop_gradient(state, "loop.state")) + p["s"] * state
    return state.sum()


def nested_blocks(p):
    inner = stop_gradient(p["v"].exp() * p["s"], "nested.inner")
    middle = stop_gradient(inner * p["v"].sin(), "nested.middle")
    return (stop_gradient(middle * p["s"], "nested.outer") * p["v"] + inner).sum()


def unnamed_blocks(p):
    return (p["v"] * stop_gradient(p["v"].exp()) * stop_gradient(p["v"].sin() * p["s"])).sum()


def scoped_blocks(p):
    total = p["s"] * 0
    for name in ("actor", "critic"):
        with scope(name):
            total = total + (p["v"] * stop_gradient(p["v"].exp() * p["s"], "scoped")).sum()
    return total


def tree(p):
    stopped = stop_gradient({"a": [p["v"].exp(), None], "b": (p["w"] @ p["v"], torch.arange(3))}, "tree")
    return (stopped["a"][0] * p["v"] * stopped["b"][0] * stopped["b"][1]).sum()


def region(p):
    with stop_recording("region"):
        factor = (p["w"] @ p["v"]).exp()
        other = factor.sin() * p["s"]
    return (factor * p["v"] + other).sum()


def regions_in_a_loop(p):
    kept = []
    for i in range(3):
        with stop_recording("region.loop"):
            kept.append(p["v"] ** (i + 1) * p["s"])
    return (torch.stack(kept) @ p["v"]).prod()


def nested_regions(p):
    with stop_recording("region.outer"):
        a = p["s"] * p["v"]
        with stop_recording("region.inner"):
            b = a.exp()
            c = p["v"].sin()
        d = a * b * c
    return ((b + d) * p["v"] + c).sum()


def region_and_gate(p):
    with stop_recording("region.gate"):
        factor = (p["w"] @ p["v"]).exp()
    return (p["v"] * stop_gradient(factor * p["s"], "region.gate")).sum()


def region_that_is_skipped(p):
    stop_gradient(p["s"], "region.skipped")
    factor = p["v"].detach().exp() if is_blocked("region.skipped") else p["v"].exp()
    return (p["v"] * stop_gradient(factor, "region.skipped")).sum()


def region_around_a_function(p):
    with stop_recording("region.function"):
        factor = _Square.apply(p["v"])
    return (factor * p["s"]).sum()


def region_before_a_function(p):
    with stop_recording("region.before"):
        factor = p["v"].exp()
    return (_Square.apply(factor) * p["s"]).sum()


def region_around_vmap(p):
    with stop_recording("region.vmap"):
        factor = torch.vmap(lambda row: row.exp() * p["s"])(p["v"])
    return (factor * p["v"]).sum()


def region_before_vmap(p):
    with stop_recording("region.devmap"):
        factor = p["v"].exp()
    return torch.vmap(lambda row: row * p["s"])(factor).sum()


def region_that_writes(p):
    buffer = torch.zeros(3, dtype=torch.float64)
    with stop_recording("region.writes"):
        buffer[1:] = p["v"][:2] * p["s"]
    return (buffer * p["v"]).sum()


def region_that_returns_the_loss(p):
    with stop_recording("region.loss"):
        return (p["v"] * p["s"]).sum()


def region_with_recording_inside(p):
    with stop_recording("region.pierced"):
        before = p["v"].exp()
        with torch.enable_grad():
            inside = (before * p["s"]).sin()
    return (inside * before * p["v"]).sum()


def region_with_a_gradient_inside(p):
    with stop_recording("region.attack"):
        point = p["v"].exp()
        with torch.enable_grad():
            variable = point.detach().requires_grad_()
            (slope,) = torch.autograd.grad((p["w"] @ variable).square().sum(), variable)
        moved = point + 0.1 * slope
    return (p["w"] @ moved * p["v"]).sum()


def region_with_functional_gradient(p):
    with stop_recording("region.func"):
        slope = torch.func.grad(lambda v: (p["w"] @ v).square().sum())(p["v"])
    return (slope * p["v"]).sum()


def region_crossed_by_an_inner_gradient(p):
    x = p["v"] * p["s"]
    with stop_recording("region.crossed"):
        factor = x.exp()
    (slope,) = torch.autograd.grad((x.square() * factor).sum(), x, create_graph=True)
    return (slope * p["v"]).sum()


def region_crossed_by_a_tangent(p):
    def f(v):
        with stop_recording("region.tangent"):
            factor = v.exp()
        return v * factor

    return torch.func.jvp(f, (p["v"],), (p["w"][0],))[1].square().sum()


def inner_gradient(p):
    x = p["v"] * p["s"]
    inner = (x.square() * stop_gradient(x.exp(), "inner.factor")).sum()
    (slope,) = torch.autograd.grad(inner, x, create_graph=True)
    return ((p["v"] - stop_gradient(slope, "inner.slope")).square() + slope).sum()


def vmapped(p):
    return torch.vmap(lambda row: row @ stop_gradient((row * p["s"]).exp(), "vmapped"))(p["w"]).prod()


def jacobian_reverse(p):
    return torch.func.jacrev(lambda v: v.square() * stop_gradient(v.exp(), "jacrev") * p["s"])(p["v"]).square().sum()


def jacobian_forward(p):
    return torch.func.jacfwd(lambda v: v.square() * stop_gradient(v.exp(), "jacfwd") * p["s"])(p["v"]).square().sum()


def hessian(p):
    def f(v):
        return (v.square() * stop_gradient((v * p["s"]).exp(), "hessian")).sum()

    return (torch.func.hessian(f)(p["v"]) @ p["v"]).sum()


def hessian_without_recording(p):
    """Forward mode passes `no_grad`, and the block stops it there."""

    def f(v):
        with torch.no_grad():
            factor = v.sin() * stop_gradient((v * p["s"]).exp(), "hessian.unrecorded")
        return (factor * v).sum()

    return (torch.func.hessian(f)(p["v"]) @ p["v"]).sum()


def per_sample_gradients(p):
    def f(v, row):
        return (row @ v) ** 2 * stop_gradient((row @ v).exp(), "per_sample")

    return torch.vmap(torch.func.grad(f), (None, 0))(p["v"], p["w"]).square().sum()


def checkpointed(p):
    def f(v, s):
        return v * stop_gradient(v.square() * v.exp(), "checkpoint") * s * stop_gradient(v.sin(), "checkpoint.sin")

    return checkpoint(f, p["v"], p["s"], use_reentrant=False).sum()


def checkpointed_region(p):
    def f(v, s):
        with stop_recording("checkpoint.region"):
            factor = v.square() * v.exp()
        return v * factor * s * factor

    return checkpoint(f, p["v"], p["s"], use_reentrant=False).sum()


def custom_function(p):
    return (_StoppedInside.apply(stop_gradient(p["v"] * p["s"], "function.outside")) * p["v"]).sum()


def complex_numbers(p):
    z = torch.complex(p["v"], p["w"][0])
    return (z * stop_gradient(z.exp() * p["s"], "complex")).abs().sum()


def sparse(p):
    indices = torch.tensor([[0, 2, 2], [0, 0, 1]])
    matrix = torch.sparse_coo_tensor(indices, p["v"].exp(), (3, 3), check_invariants=True)
    return (torch.sparse.mm(stop_gradient(matrix, "sparse"), p["w"]) @ p["v"]).sum()


def written_in_place(p):
    target = stop_gradient(p["w"] @ p["v"], "in_place")
    target.mul_(0.9).add_(1)
    return (p["v"] - target).square().sum()


def dropout(p):
    hidden = nn.functional.dropout(p["w"] @ p["v"].exp(), 0.4)
    (slope,) = torch.autograd.grad((hidden * stop_gradient(hidden, "dropout")).sum(), p["v"], create_graph=True)
    return slope.square().sum()


def square_root_at_zero(p):
    return p["s"] * 0 + p["s"] * stop_gradient((p["v"] - p["v"]).sqrt(), "sqrt").sum() + p["v"].sum()


PROGRAMS: list[Program] = [
    mlp_with_four_blocks,
    shared_weights,
    double_dipped,
    block_in_a_loop,
    nested_blocks,
    unnamed_blocks,
    scoped_blocks,
    tree,
    region,
    regions_in_a_loop,
    nested_regions,
    region_and_gate,
    region_that_is_skipped,
    region_around_a_function,
    region_before_a_function,
    region_around_vmap,
    region_before_vmap,
    region_that_writes,
    region_that_returns_the_loss,
    region_with_recording_inside,
    region_with_a_gradient_inside,
    region_with_functional_gradient,
    region_crossed_by_an_inner_gradient,
    region_crossed_by_a_tangent,
    inner_gradient,
    vmapped,
    jacobian_reverse,
    jacobian_forward,
    hessian,
    hessian_without_recording,
    per_sample_gradients,
    checkpointed,
    checkpointed_region,
    custom_function,
    complex_numbers,
    sparse,
    written_in_place,
    dropout,
]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_every_set_of_open_gates_is_the_real_removal_bit_for_bit(program: Program) -> None:
    parameters = _parameters()
    torch.manual_seed(0)
    comparison = compare(lambda: program(parameters), parameters)
    names = [effect.name for effect in comparison.effects]
    assert names
    torch.manual_seed(0)
    assert comparison.loss == program(parameters).item()
    for subset in _subsets(names):
        expected, found = _removed(program, parameters, subset), comparison.gradient(subset)
        assert sorted(found) == sorted(expected)
        for name in expected:
            assert torch.equal(found[name], expected[name]), (subset, name)
            assert found[name].dtype == expected[name].dtype
            assert not found[name].requires_grad
    leaks = [(effect.name, effect.leak) for effect in comparison.effects]
    assert all(math.isfinite(leak) for _, leak in leaks)
    assert any(leak > 0 for _, leak in leaks) or program is nested_regions


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("program", [mlp_with_four_blocks, shared_weights], ids=lambda program: program.__name__)
def test_low_precision_too(program: Program, dtype: torch.dtype) -> None:
    parameters = _parameters(dtype)
    comparison = compare(lambda: program(parameters), parameters)
    for subset in _subsets([effect.name for effect in comparison.effects]):
        expected, found = _removed(program, parameters, subset), comparison.gradient(subset)
        assert all(torch.equal(found[name], expected[name]) and found[name].dtype == dtype for name in expected)
    assert all(effect.leak > 0 for effect in comparison.effects)


def test_a_closed_gate_at_an_infinite_slope_gives_no_nan() -> None:
    parameters = _parameters()
    comparison = compare(lambda: square_root_at_zero(parameters), parameters)
    assert torch.equal(comparison.blocked["v"], torch.ones(3, dtype=torch.float64))
    (effect,) = comparison.effects
    assert effect.verdict.kind == "partial"
    assert math.isnan(effect.leak)
    assert json.loads(json.dumps(effect.to_dict(), allow_nan=False))["leak"] is None


@pytest.mark.portable
def test_a_leak_of_nothing_is_redundant_where_the_gradient_vanishes():
    logits = torch.tensor([0.3, -1.1, 0.7], dtype=torch.float64, requires_grad=True)
    optimum = (logits.detach() - logits.detach().logsumexp(0)).exp()

    def loss():  # the gradient of the relative entropy is rounding here, and so is the leak of the shift
        shifted = logits - stop_gradient(logits.amax(), "vanishing.shift")
        return (optimum * (optimum.log() - shifted + shifted.exp().sum().log())).sum()

    def other_loss():
        return loss() + 1e-6 * stop_gradient(logits.sum(), "vanishing.not")

    assert [effect.verdict.kind for effect in compare(loss).effects] == ["redundant"]
    assert [effect.verdict.kind for effect in compare(other_loss).effects][1] == "partial"


@pytest.mark.portable
def test_noise_is_told_from_a_leak_where_the_gradient_vanishes() -> None:
    """At the optimum the leak is a good part of the gradient at most points, and both are nothing but rounding."""
    differs = 0
    for seed in range(40):
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn(5, dtype=torch.float64, generator=generator, requires_grad=True)
        optimum = logits.detach().softmax(0)

        def loss(logits: Tensor = logits, optimum: Tensor = optimum) -> Tensor:
            shifted = logits - stop_gradient(logits.amax(), "noise.shift")
            return (optimum * (optimum.log() - shifted + shifted.exp().sum().log())).sum()

        (effect,) = compare(loss, {"logits": logits}).effects
        assert effect.verdict.kind == "redundant"
        assert effect.leak < 10 * EPS  # about ten operations on numbers below 1
        differs += effect.leak > 0 and effect.ratio != pytest.approx(1, rel=0.05)
    assert differs >= 4  # how many is up to the rounding: 33 of 40 or so


class Scaled(torch.autograd.Function):  # as an auxiliary loss: not linear in the derivative of the loss
    @staticmethod
    def forward(ctx, x, auxiliary):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g, torch.full((), 0.3)


@pytest.mark.portable
@pytest.mark.parametrize(
    ("steepness", "is_steep", "kind"),
    [
        (3e4, False, "partial"),
        (3e4, True, "partial"),
        (2e5, False, "partial"),
        (1e6, False, "noise"),
        (1e6, True, "noise"),
    ],
)
def test_a_steep_leak_is_never_called_redundant(steepness, is_steep, kind):
    """A few units in the last place move this leak: by a fifth at 2e5 and eight units, as a whole at 1e6.

    At 1e6 they move as a whole a blocked gradient that is as steep, as if it vanished.
    """
    w = torch.tensor([1.1, 0.7], requires_grad=True)

    def loss():
        angle = steepness * w
        factor = angle.cos() if is_steep else 1.0
        held = stop_gradient(angle.sin(), "steep.phase")
        return (Scaled.apply(w, w.square().mean()) * factor * held).sum()

    (effect,) = compare(loss, {"w": w}).effects
    assert effect.ratio > (0.1 if is_steep else 1e3)
    assert effect.verdict.kind == kind


@pytest.mark.parametrize("size", [1e-9, 1e-3, 1.0, 1e9])
def test_a_small_leak_into_a_gradient_that_does_not_vanish_is_a_leak(size: float) -> None:
    x, y = (torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in (0.7, -1.3))
    (effect,) = compare(lambda: x.exp() * y + size * stop_gradient(x * y, "small"), {"x": x, "y": y}).effects
    assert effect.verdict.kind == "partial"
    assert effect.leak == pytest.approx(size * math.hypot(0.7, 1.3))


def test_the_noise_of_a_program_that_is_run_again_is_that_of_its_blocked_gradient():
    weight = torch.tensor([0.3, -0.4], requires_grad=True)
    draws = torch.Generator().manual_seed(5)

    def loss():  # recording is switched on inside of a region, so every question runs the program again
        x = torch.randn(2, generator=draws)
        with stop_recording("again.step"), torch.enable_grad():
            moved = x + weight.square()
        return (weight * stop_gradient(moved, "again.step")).square().sum()

    comparison = compare(loss, weight)
    (effect,) = comparison.effects
    assert effect.verdict.kind == "partial"
    opened = comparison.gradient(["again.step"])["weight"]
    assert effect.leak == pytest.approx((opened - comparison.blocked["weight"]).norm().item(), rel=1e-6)


class _Clipped(torch.autograd.Function):
    """An identity whose cotangent is clipped: its backward pass is not linear."""

    @staticmethod
    def forward(ctx, input):
        return input.view_as(input)

    @staticmethod
    def backward(ctx, cotangent):
        return cotangent.clamp(-1, 1)


def _hooked(tensor):
    tensor.register_hook(lambda cotangent: cotangent.clamp(-1, 1))
    return tensor


@pytest.mark.parametrize("clip", [_Clipped.apply, _hooked], ids=["function", "hook"])
def test_effects_are_right_where_a_backward_pass_is_not_linear(clip):
    weight = torch.tensor([0.3, -2.0, 1.4], dtype=torch.float64, requires_grad=True)

    def loss():
        inner = clip(weight * 2)
        return (inner * stop_gradient(inner.exp(), "nonlinear.factor")).sum()

    comparison = compare(loss, weight)
    opened = comparison.gradient(["nonlinear.factor"])["weight"]
    (effect,) = comparison.effects
    assert effect.leak == pytest.approx((opened - comparison.blocked["weight"]).norm().item(), rel=1e-12)
    assert effect.ratio == pytest.approx((opened.norm() / comparison.blocked["weight"].norm()).item(), rel=1e-12)


def test_a_leak_below_the_rounding_of_the_gradient_is_measured():
    weight = torch.tensor([0.5, 2.0], requires_grad=True)  # float32
    (effect,) = compare(lambda: (weight + 1e-12 * stop_gradient(weight, "tiny.part")).sum(), weight).effects
    assert effect.verdict.kind == "redundant"
    assert effect.leak == pytest.approx(1e-12 * 2**0.5, rel=1e-5)


def test_a_block_that_is_used_twice_along_a_path_leaks_along_both():
    weight = torch.tensor([0.5, -1.2], dtype=torch.float64, requires_grad=True)

    def loss():
        first = weight * stop_gradient(weight.exp(), "twice.factor")
        return (first * stop_gradient(first.sin(), "twice.factor")).sum()

    comparison = compare(loss, weight)
    opened = comparison.gradient(["twice.factor"])["weight"]
    (effect,) = comparison.effects
    assert effect.leak == pytest.approx((opened - comparison.blocked["weight"]).norm().item(), rel=1e-12)
    assert effect.cosine == pytest.approx(
        torch.nn.functional.cosine_similarity(opened, comparison.blocked["weight"], dim=0).item(), rel=1e-12
    )


def test_a_gradient_that_is_not_a_number_is_named() -> None:
    x, y = torch.zeros(2, requires_grad=True), torch.ones(2, requires_grad=True)

    def loss() -> torch.Tensor:
        return ((x - stop_gradient(x, "itself")).abs().sqrt() + y * stop_gradient(y, "other")).sum()

    found = compare(loss, {"x": x, "y": y})
    assert found.remarks == ["the blocked gradient is not finite, its leaks cannot be measured: x"]
    assert found["other"].leak == pytest.approx(2**0.5)
    assert not compare(loss, y).remarks


def test_an_infinite_leak_is_not_called_rounding() -> None:
    x = torch.zeros((), dtype=torch.float64, requires_grad=True)
    (effect,) = compare(lambda: x + stop_gradient(x.sqrt(), "infinite"), x).effects
    assert effect.verdict.kind == "partial"
    assert (effect.leak, effect.ratio) == (math.inf, math.inf)
    assert math.isnan(effect.cosine)


def test_a_reentrant_checkpoint_is_refused_by_autograd_itself() -> None:
    x = torch.ones(2, dtype=torch.float64, requires_grad=True)

    def loss() -> Tensor:
        return checkpoint(lambda v: v * stop_gradient(v.exp(), "reentrant"), x, use_reentrant=True).sum()

    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        compare(loss, x)


@pytest.mark.keeps_its_sums
def test_compiled_parts_run_as_the_python_that_they_were_made_of() -> None:
    parameters = _parameters()
    compiled = torch.compile(block_in_a_loop, backend="eager", fullgraph=True)
    compiled(parameters)
    comparison = compare(lambda: compiled(parameters), parameters)
    for subset in [(), ("loop.state",)]:
        expected = _removed(block_in_a_loop, parameters, subset)
        assert all(torch.equal(comparison.gradient(subset)[name], expected[name]) for name in expected)
    assert comparison.effects[0].leak > 0


# --- multi-affinity ----------------------------------------------------------------------------------------------


@pytest.mark.portable
@pytest.mark.parametrize("program", [mlp_with_four_blocks, shared_weights, nested_blocks], ids=lambda p: p.__name__)
def test_attribution_splits_the_open_gradient_exactly(program: Program) -> None:
    parameters = _parameters()
    comparison = compare(lambda: program(parameters), parameters)
    names = [effect.name for effect in comparison.effects]
    parts = comparison.attribution()
    assert set(parts) == {frozenset(subset) for subset in _subsets(names)}
    assert all(torch.equal(parts[frozenset()][name], comparison.blocked[name]) for name in parameters)
    for subset in _subsets(names):
        total = comparison.gradient(subset)
        for name in parameters:
            summed = sum(part[name] for met, part in parts.items() if met <= set(subset))
            torch.testing.assert_close(summed, total[name], rtol=1e-12, atol=1e-12)


def test_attribution_is_by_paths() -> None:
    """Ten is added on the path through a, three on the path through b, seven on the path through both."""
    x = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)

    def loss() -> Tensor:
        a = stop_gradient(x, "path.a")
        return 2 * x + 10 * a + stop_gradient(7 * a + 3 * x, "path.b")

    parts = {tuple(sorted(met)): part["x"].item() for met, part in compare(loss, {"x": x}).attribution().items()}
    assert parts == {(): 2, ("path.a",): 10, ("path.b",): 3, ("path.a", "path.b"): 7}


def test_a_gradient_belongs_to_whoever_asked_for_it() -> None:
    x = torch.tensor([1.5, -0.5], dtype=torch.float64, requires_grad=True)
    comparison = compare(lambda: (x * stop_gradient(x, "test_compare.own")).sum(), {"x": x})
    for blocks, factor in (((), 1), (("test_compare.own",), 2)):
        for _ in range(2):
            found = comparison.gradient(blocks)["x"]
            assert found.equal(factor * x.detach())
            found.zero_()
    assert comparison.blocked["x"].equal(x.detach())


@pytest.mark.portable
def test_single_toggles_mislead_about_the_magic_box() -> None:
    """An enumerated expectation of DiCE (Foerster et al. 2018): sum of stopped p, times exp(l - stopped l), times f.

    With both blocks in place the gradient is that of the objective, with either open twice it or none of it, with both
    open it is right again: 1, 2, 0, 1.
    """
    logits = torch.tensor([0.3, -1.1, 0.6], dtype=torch.float64, requires_grad=True)
    values = torch.tensor([2.0, -0.5, 1.5], dtype=torch.float64)

    def loss() -> Tensor:
        log_probability = logits.log_softmax(0)
        weights = stop_gradient(log_probability.exp(), WEIGHTS)
        box = (log_probability - stop_gradient(log_probability, "dice.box")).exp()
        return (weights * box * values).sum()

    probability = logits.detach().softmax(0)
    objective = probability * (values - probability @ values)
    comparison = compare(loss, {"logits": logits})
    expected = {(): 1, (WEIGHTS,): 2, ("dice.box",): 0, (WEIGHTS, "dice.box"): 1}
    for subset, factor in expected.items():
        found = comparison.gradient(subset)["logits"]  # at most 20 operations on numbers below 2
        torch.testing.assert_close(found, factor * objective, rtol=0, atol=40 * EPS)
    assert [effect.verdict.kind for effect in comparison.effects] == ["partial", "makes"]
    assert comparison.effects[0].why == WEIGHTS.why
    together = comparison.effect([WEIGHTS, "dice.box"])
    assert together.verdict.kind == "redundant"
    assert together.name == "test_compare.weights + dice.box"


@pytest.mark.portable
def test_single_effects_that_cancel_are_warned_of() -> None:
    x = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)

    def loss() -> Tensor:
        log_probability = torch.nn.functional.logsigmoid(x)
        box = (log_probability - stop_gradient(log_probability, "dice.box")).exp()
        return stop_gradient(log_probability.exp(), WEIGHTS) * box

    comparison = compare(loss, x)
    assert comparison.interaction < 20 * EPS  # four gradients of five operations each
    assert "cancel to 0% of the largest single leak" in str(comparison)


@pytest.mark.parametrize(("scale", "share"), [(1.0, "41%"), (1e-3, "0.07%")])
def test_single_effects_that_miss_a_path_are_warned_of(scale: float, share: str) -> None:
    x = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)

    def loss() -> Tensor:  # one path crosses both blocks: opened one by one, neither shows it
        return x.exp() + scale * stop_gradient(stop_gradient(x, "nested.inner") ** 2, "nested.outer")

    comparison = compare(loss, x)
    crossing = 1.4 * scale
    assert comparison.interaction == pytest.approx(crossing / (math.exp(0.7) + crossing), rel=1e-9)
    assert f"by another {share} of its size, along paths that cross several of them" in str(comparison)


def test_effects_that_add_up_are_not_warned_of() -> None:
    x = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    comparison = compare(lambda: x * stop_gradient(x, "adds.up") + stop_gradient(x.exp(), "adds.more"), x)
    assert "mislead" not in str(comparison)


def test_attribution_of_many_blocks_is_by_pairs_and_says_so() -> None:
    x = torch.ones(2, dtype=torch.float64, requires_grad=True)
    comparison = compare(lambda: sum(stop_gradient(x.sum(), f"many.{i}") for i in range(13)) + x.sum(), x)
    with pytest.warns(UserWarning, match=r"exact for at most 12 blocks\. Found 13: only single blocks and pairs"):
        parts = comparison.attribution()
    assert len(parts) == 1 + 13 + 13 * 12 // 2
    assert torch.equal(parts[frozenset({"many.3"})]["x"], torch.ones(2, dtype=torch.float64))
    assert torch.equal(parts[frozenset({"many.3", "many.7"})]["x"], torch.zeros(2, dtype=torch.float64))


# --- verdicts and numbers ----------------------------------------------------------------------------------------


def test_verdicts() -> None:
    encoder, head = nn.Linear(3, 3), nn.Linear(3, 1)
    inputs = torch.randn(4, 3)

    def loss() -> Tensor:
        stopped_input = stop_gradient(inputs, "verdict.input")
        hidden = stop_gradient(encoder(stopped_input), "verdict.hidden")
        peak = stop_gradient(head(hidden).max(), "verdict.shift")
        shifted = head(hidden) - peak
        weight = stop_gradient(shifted.sigmoid(), "verdict.weight")
        return (weight * shifted).sum() + peak.mul(weight.sum())

    verdicts = {effect.name: str(effect.verdict) for effect in compare(loss).effects}
    assert verdicts.pop("verdict.shift") in ("redundant", "partial")
    assert verdicts == {
        "verdict.input": "no-op",
        "verdict.hidden": "cuts all paths to [encoder.bias, encoder.weight]",
        "verdict.weight": "partial",
    }


@pytest.mark.portable
def test_a_leak_that_is_exactly_zero_is_redundant() -> None:
    x = torch.tensor([0.3, -2.0, 1.1], dtype=torch.float64, requires_grad=True)

    def loss() -> Tensor:
        shift = stop_gradient(x.max(), "redundant.shift")
        return ((x - shift).exp().sum().log() + shift) * 2

    (effect,) = compare(loss, {"x": x}).effects
    assert effect.verdict.kind == "redundant"
    assert effect.leak < 20 * EPS  # ten operations on numbers up to 2
    assert effect.calls == 1


@pytest.mark.portable
def test_norms_ratio_and_cosine_are_their_definitions() -> None:
    parameters = _parameters()
    comparison = compare(lambda: shared_weights(parameters), parameters)
    for effect in comparison.effects:
        opened_gradient, blocked = comparison.gradient([effect.name]), comparison.blocked
        for name, found in [
            (None, Difference(effect.leak, effect.ratio, effect.cosine)),
            *effect.per_parameter.items(),
        ]:
            keys = list(parameters) if name is None else [name]
            a = torch.cat([opened_gradient[key].reshape(-1) for key in keys])
            b = torch.cat([blocked[key].reshape(-1) for key in keys])
            if b.norm() == 0:
                assert found.leak == pytest.approx(a.norm().item(), rel=1e-12)
                assert found.ratio == math.inf if a.norm() > 0 else math.isnan(found.ratio)
                continue
            expected = ((a - b).norm(), a.norm() / b.norm(), nn.functional.cosine_similarity(a, b, dim=0))
            assert found == pytest.approx([value.item() for value in expected], rel=1e-12)


def test_calls_are_those_of_one_forward_pass() -> None:
    parameters = _parameters()
    counts = {
        effect.name: effect.calls
        for program in (block_in_a_loop, regions_in_a_loop, checkpointed, checkpointed_region, tree)
        for effect in compare(functools.partial(program, parameters), parameters).effects
    }
    assert counts == {
        "loop.state": 5,
        "region.loop": 3,
        "checkpoint": 1,
        "checkpoint.sin": 1,
        "checkpoint.region": 1,
        "tree": 3,
    }


def test_a_checkpoint_beside_a_custom_function_counts_its_blocks_once() -> None:
    x = torch.ones(2, dtype=torch.float64, requires_grad=True)

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, input: Tensor) -> Tensor:
            return 2 * input

        @staticmethod
        def backward(ctx: Any, cotangent: Tensor) -> Tensor:
            return 2 * cotangent

    def part(x: Tensor) -> Tensor:
        return x * stop_gradient(x.sin(), "counted.sin")

    def loss() -> Tensor:
        return Double.apply(checkpoint(part, x, use_reentrant=False)).sum()  # type: ignore[no-untyped-call]

    assert compare(loss, {"x": x})["counted.sin"].calls == 1


def test_site_is_file_line_and_column_of_the_first_call() -> None:
    x = torch.ones(2, dtype=torch.float64, requires_grad=True)

    def loss() -> Tensor:
        return (x * stop_gradient(x, "site.a") * stop_gradient(x, "site.b")).sum()

    line = loss.__code__.co_firstlineno + 1
    sites = [effect.site.rpartition("/")[2] for effect in compare(loss, x).effects]
    text = '        return (x * stop_gradient(x, "site.a") * stop_gradient(x, "site.b")).sum()'
    columns = [match.start() + 1 for match in re.finditer("stop_gradient", text)]
    assert sites == [f"test_compare.py:{line}:{column}" for column in columns]


def test_only_the_blocks_that_were_asked_for() -> None:
    parameters = _parameters()
    comparison = compare(lambda: mlp_with_four_blocks(parameters), parameters, blocks=["mlp.2", "mlp.0"])
    assert [effect.name for effect in comparison.effects] == ["mlp.2", "mlp.0"]
    assert len(comparison.attribution()) == 4
    assert not torch.equal(comparison.gradient(["mlp.1"])["w"], comparison.blocked["w"])
    assert torch.equal(comparison.gradient("mlp.1")["w"], comparison.gradient(["mlp.1"])["w"])


# --- what to differentiate by ------------------------------------------------------------------------------------


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)
        self.tied = self.encoder
        self.noise = torch.Generator().manual_seed(3)
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.norm(self.encoder(inputs)) * self.frozen
        return hidden + stop_gradient(self.tied(hidden), "net.target") * torch.rand(2, generator=self.noise)


def _net() -> tuple[_Net, Tensor]:
    torch.manual_seed(2)
    return _Net(), torch.randn(5, 2)


NET_NAMES = ["encoder.weight", "encoder.bias", "norm.weight", "norm.bias"]


@pytest.mark.parametrize(
    ("choose", "names"),
    [
        (lambda net: net, NET_NAMES),
        (lambda net: dict(net.named_parameters()), NET_NAMES),
        (lambda net: {"bias": net.norm.bias}, ["bias"]),
        (lambda net: [net.norm.bias, net.encoder.bias], ["net.norm.bias", "net.encoder.bias"]),
        (lambda net: net.parameters(), [f"net.{name}" for name in NET_NAMES]),
        (lambda net: net.norm.bias, ["net.norm.bias"]),
        (lambda net: None, [f"net.{name}" for name in NET_NAMES]),
    ],
    ids=["module", "dict", "one of a dict", "list", "iterator", "tensor", "none"],
)
def test_parameters_are_found_and_named(choose: Callable, names: list[str]) -> None:
    net, inputs = _net()
    comparison = compare(lambda: net(inputs).square().sum(), choose(net))
    assert sorted(comparison.blocked) == sorted(names)


def test_leaves_have_the_names_of_the_users_code() -> None:
    weight = torch.ones(2, requires_grad=True)
    config = types.SimpleNamespace(bias=torch.ones(2, requires_grad=True))
    state = {"scale": torch.ones(2, requires_grad=True)}
    layers = {"list": [torch.ones(2), torch.ones(2, requires_grad=True)]}

    def loss(default=torch.ones(2, requires_grad=True), *, key=torch.ones(2, requires_grad=True)) -> Tensor:  # noqa: B008
        return (weight * state["scale"] * layers["list"][1] + GLOBAL_LEAF + config.bias + default * key).sum()

    names = ["GLOBAL_LEAF", "config.bias", "default", "key", "layers.list[1]", "state.scale", "weight"]
    assert sorted(compare(loss).blocked) == names


GLOBAL_LEAF = torch.ones(2, requires_grad=True)


def test_two_things_of_one_name_are_both_found() -> None:
    def make(seed: int) -> tuple[Callable[[], Tensor], nn.BatchNorm1d]:
        net = nn.BatchNorm1d(2)
        inputs = torch.randn(4, 2, generator=torch.Generator().manual_seed(seed))
        return lambda: net(inputs).square().sum(), net

    (actor, first), (critic, second) = make(0), make(1)
    comparison = compare(lambda: actor() * critic())
    assert sorted(comparison.blocked) == ["net#2.bias", "net#2.weight", "net.bias", "net.weight"]
    assert first.num_batches_tracked == second.num_batches_tracked == 0


def test_a_tensor_that_is_no_leaf() -> None:
    x = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
    hidden = x.exp()
    comparison = compare(lambda: (hidden * stop_gradient(hidden, "no_leaf")).sum(), {"hidden": hidden})
    assert torch.equal(comparison.blocked["hidden"], hidden)
    assert torch.equal(comparison.gradient(["no_leaf"])["hidden"], 2 * hidden)
    only = compare(lambda: x.sum() + stop_gradient(hidden, "only").sum(), {"hidden": hidden, "x": x})
    assert only["only"].verdict == Verdict("cuts", ("hidden",))


# --- the program is left as it was found -------------------------------------------------------------------------


class _Trainer:
    """State behind attributes and methods."""

    def __init__(self) -> None:
        self.net, self.inputs = _net()
        self.generator = torch.Generator().manual_seed(1)
        self.numpy = np.random.default_rng(1)
        self.python = random.Random(1)
        self.fail = False

    def draw(self) -> Tensor:
        noise = torch.randn(2, generator=self.generator) + torch.rand(1, generator=GENERATOR) + torch.rand(1)
        noise = noise + random.random() + self.python.random()
        return noise + np.random.rand() + self.numpy.random() + GLOBAL_NOISE.normal()  # noqa: NPY002

    def loss(self) -> Tensor:
        self.net.eval()
        self.net.train()
        self.net.encoder.requires_grad_(False)
        self.net.encoder.eval()
        value = (self.net(self.inputs) * self.draw()).square().sum()
        value.backward(retain_graph=True)
        if self.fail:
            raise ZeroDivisionError
        return value

    def state(self) -> list:
        modules = list(self.net.modules())
        return [
            [generator.get_state().tolist() for generator in (self.generator, self.net.noise, GENERATOR)],
            [torch.get_rng_state().tolist(), random.getstate(), self.python.getstate()],
            [repr(GLOBAL_NOISE.bit_generator.state), repr(self.numpy.bit_generator.state)],
            [repr(np.random.get_state())],  # noqa: NPY002
            [module.training for module in modules],
            [(id(buffer), buffer._version, buffer.tolist()) for buffer in self.net.buffers()],
            [(id(p.grad), p.grad.tolist(), p.requires_grad, p.is_leaf, p._version) for p in self.net.parameters()],
        ]


GLOBAL_NOISE = np.random.default_rng(5)
GENERATOR = torch.Generator().manual_seed(6)


@pytest.mark.parametrize("fail", [False, True], ids=["returns", "raises"])
def test_the_program_is_left_as_it_was_found(fail: bool) -> None:
    trainer = _Trainer()
    for index, parameter in enumerate(trainer.net.parameters()):
        parameter.grad = torch.full_like(parameter, index)
    trainer.net.norm.eval()
    trainer.fail = fail
    before = trainer.state()
    if fail:
        with pytest.raises(ZeroDivisionError):
            compare(trainer.loss, trainer.net)
    else:
        comparison = compare(trainer.loss, trainer.net)
        assert comparison.gradient(["net.target"])["norm.bias"].norm() > 0
        assert comparison.blocked["encoder.weight"].norm() == 0
    assert trainer.state() == before


def test_a_checkpoint_with_batch_norm_leaves_the_buffers_also_later() -> None:
    net, inputs = _net()
    comparison = compare(lambda: checkpoint(net, inputs, use_reentrant=False, preserve_rng_state=True).sum(), net)
    before = [buffer.clone() for buffer in net.buffers()]
    comparison.gradient(["net.target"])
    assert all(torch.equal(a, b) for a, b in zip(before, net.buffers(), strict=True))


def test_buffers_that_are_shared_stay_shared_while_the_program_runs() -> None:
    class Counter(nn.Module):
        def __init__(self, count: Tensor) -> None:
            super().__init__()
            self.register_buffer("count", count)

    count = torch.zeros(())
    first, second = Counter(count), Counter(count)
    x = torch.tensor(3.0, requires_grad=True)

    def loss() -> Tensor:
        first.count += 1
        return x * second.count

    comparison = compare(loss, {"x": x})
    assert comparison.loss == 3.0
    assert first.count is second.count is count
    assert count == 0


def test_a_region_may_end_where_the_numbers_of_autograd_begin() -> None:
    """In a new thread the first node has number 0: a region of a frozen network before it holds no node at all."""
    online, target, x = nn.Linear(3, 2), nn.Linear(3, 2).requires_grad_(False), torch.randn(5, 3)

    def loss() -> torch.Tensor:
        with stop_recording("target"):
            goal = target(x)
        return (online(x) - goal).square().mean()

    found: list[tuple[Comparison, tuple[Tensor, ...]]] = []
    thread = threading.Thread(
        target=lambda: found.append((compare(loss, online), torch.autograd.grad(loss(), list(online.parameters()))))
    )
    thread.start()
    thread.join()
    ((comparison, expected),) = found
    assert all(float(gradient.norm()) > 0 for gradient in expected)
    for gradient, truth in zip(comparison.blocked.values(), expected, strict=True):
        assert torch.equal(gradient, truth)


def test_an_average_that_is_updated_in_a_region_stays_a_leaf() -> None:
    online, average = nn.Linear(2, 1), nn.Linear(2, 1).requires_grad_(False)
    inputs = torch.randn(3, 2)

    def loss() -> Tensor:
        with stop_recording("average.update"):
            for target, source in zip(average.parameters(), online.parameters(), strict=True):
                target.lerp_(source, 0.1)
        return (online(inputs) - average(inputs)).square().sum()

    compare(loss, online)
    assert all(parameter.is_leaf and not parameter.requires_grad for parameter in average.parameters())


def test_what_the_methods_of_a_module_name_is_found() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self) -> Tensor:
            return (self.weight * torch.rand(2, generator=GENERATOR)).sum()

    before = GENERATOR.get_state()
    compare(Noisy())
    assert torch.equal(GENERATOR.get_state(), before)


def test_generators_in_imported_modules_are_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("users_own_module")
    module.generator = torch.Generator().manual_seed(4)
    monkeypatch.setitem(globals(), "users_own_module", module)
    x = torch.ones(2, requires_grad=True)
    before = module.generator.get_state()
    compare(lambda: (x * torch.rand(2, generator=users_own_module.generator)).sum(), x)  # noqa: F821
    assert torch.equal(module.generator.get_state(), before)


def test_a_rerun_has_the_same_draws() -> None:
    """The inner derivative decides on its block in the forward pass, so the block is opened by running again."""
    generator = torch.Generator().manual_seed(3)
    x = torch.tensor([1.0, -2.0], dtype=torch.float64, requires_grad=True)

    def loss() -> Tensor:
        noise = torch.randn(2, generator=generator, dtype=torch.float64)
        (slope,) = torch.autograd.grad((x * x * stop_gradient(noise * x, "rerun")).sum(), x, create_graph=True)
        return (slope * noise).sum()

    expected = torch.randn(2, generator=torch.Generator().manual_seed(3), dtype=torch.float64).square()
    comparison = compare(loss, {"x": x})
    for _ in range(2):
        torch.testing.assert_close(comparison.gradient(["rerun"])["x"], 6 * x.detach() * expected)
        generator.manual_seed(9)
        generator.get_state()


def test_works_inside_no_grad() -> None:
    parameters = _parameters()
    with torch.no_grad():
        comparison = compare(lambda: block_in_a_loop(parameters), parameters)
        assert not torch.is_grad_enabled()
    assert comparison.effects[0].leak > 0


def test_the_open_blocks_outside_do_not_change_a_comparison() -> None:
    parameters = _parameters()
    expected = compare(lambda: block_in_a_loop(parameters), parameters).blocked
    with opened("loop.state"):
        found = compare(lambda: block_in_a_loop(parameters), parameters)
    assert torch.equal(found.blocked["w"], expected["w"])
    assert found.effects[0].leak > 0
    alone = compare(lambda: inner_gradient(parameters), parameters).gradient(["inner.factor"])
    with opened("inner.slope"):
        beside = compare(lambda: inner_gradient(parameters), parameters).gradient(["inner.factor"])
    assert all(torch.equal(alone[name], beside[name]) for name in alone)


# --- modified parameters -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("program", [nested_blocks, inner_gradient, region], ids=lambda program: program.__name__)
def test_a_parameter_that_was_modified_since_is_noticed(program: Program) -> None:
    parameters = _parameters()
    comparison = compare(lambda: program(parameters), parameters)
    with torch.no_grad():
        parameters["v"].add_(1)
    for ask in (comparison.gradient, comparison.effect):
        with pytest.raises(RuntimeError, match="Found it modified: compare again"):
            ask([comparison.effects[0].name])


@pytest.mark.parametrize("wrap", [lambda value: value, lambda value: (value,)], ids=["tensor", "tuple"])
@pytest.mark.parametrize("call", [lambda *args: torch.cond(*args), torch.cond], ids=["by attribute", "imported"])
def test_branches_of_cond_are_compared_as_python(call: Callable[..., Any], wrap: Callable[[Tensor], Any]) -> None:
    x = torch.tensor([2.0, 3.0], dtype=torch.float64, requires_grad=True)

    def loss() -> Tensor:
        found = call(x.sum() > 0, lambda v: wrap(stop_gradient(v, "cond.v") * v), lambda v: wrap(v * 1), (x,))
        return found.sum() if isinstance(found, Tensor) else found[0].sum()

    code = torch.cond.__code__
    comparison = compare(loss, x)
    assert comparison["cond.v"].leak == pytest.approx(math.sqrt(13))
    assert torch.equal(comparison.blocked["x"], x.detach())
    assert torch.cond.__code__ is code


# --- parameters --------------------------------------------------------------------------------------------------


def _two_modules() -> tuple[nn.Module, nn.Module, Callable[[], Tensor]]:
    left, right = (nn.Linear(2, 2, dtype=torch.float64) for _ in range(2))
    x = torch.ones(3, 2, dtype=torch.float64)
    return left, right, lambda: (right(stop_gradient(left(x), "params.h")) * left(x)).sum()


@pytest.mark.parametrize(
    ("params", "names"),
    [
        (lambda a, b: [a, b], ["left.weight", "left.bias", "right.weight", "right.bias"]),
        (lambda a, b: (m for m in (a, b)), ["left.weight", "left.bias", "right.weight", "right.bias"]),
        (lambda a, b: {"a": a, "b": b.weight}, ["a.weight", "a.bias", "b"]),
        (lambda a, b: [a, b.bias, a.weight], ["left.weight", "left.bias", "right.bias"]),
        (lambda a, b: a.named_parameters(), ["weight", "bias"]),
        (lambda a, b: [*a.named_parameters(), *b.named_parameters()], ["weight", "bias", "weight#2", "bias#2"]),
    ],
    ids=["list", "generator", "dict", "module and tensors", "named", "one name twice"],
)
def test_params_may_be_modules_and_what_an_optimizer_takes(params: Callable[..., Any], names: list[str]) -> None:
    left, right, loss = _two_modules()
    whole = compare(loss, nn.ModuleList([left, right]))
    wanted = {id(p): whole.blocked[name] for name, p in nn.ModuleList([left, right]).named_parameters()}
    found = compare(loss, params(left, right))
    assert sorted(found.blocked) == sorted(names)
    every = [g for m in (left, right) for g in (wanted[id(p)] for p in m.parameters())]
    assert all(any(torch.equal(g, other) for other in every) for g in found.blocked.values())
    assert len({g.numpy().tobytes() for g in found.blocked.values()}) == len(names)


def test_a_module_in_torchscript_is_a_program_as_any() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    x = torch.randn(4, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # both are deprecated
        scripts = [torch.jit.script(net), torch.jit.trace(net, x)]
    for script in scripts:
        plain = compare(lambda: (net(x) * stop_gradient(net(x), "script.h")).sum(), net)
        state = [buffer.clone() for buffer in script.buffers()]
        found = compare(lambda script=script: (script(x) * stop_gradient(script(x), "script.h")).sum(), script)
        assert found["script.h"].leak == pytest.approx(plain["script.h"].leak, rel=1e-4)
        assert all(map(torch.equal, state, script.buffers()))


def test_a_selective_checkpoint_is_differentiated_once_a_run() -> None:
    x = torch.tensor([0.3, -1.2], dtype=torch.float64, requires_grad=True)
    matrix = torch.tensor([[1.0, 2.0], [-0.5, 0.7]], dtype=torch.float64)
    policy = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mv.default])

    def layer() -> Tensor:
        inner = matrix @ x
        return (inner * stop_gradient(inner, "selective.factor")).sum()

    found = compare(lambda: checkpoint(layer, use_reentrant=False, context_fn=policy), x)
    assert found["selective.factor"].ratio == pytest.approx(2)
    torch.testing.assert_close(found.gradient(["selective.factor"])["x"], 2 * matrix.T @ matrix @ x.detach())


@pytest.mark.parametrize("params", [None, {"w"}], ids=["all", "one"])
def test_a_group_norm_is_not_differentiated_by_its_weight_alone(params: set[str] | None) -> None:
    """In channels_last, torch 2.13 writes to a null pointer there: the process would end."""
    torch.manual_seed(0)
    leaves = {"x": torch.randn(2, 4, 3, 3).to(memory_format=torch.channels_last), "w": torch.randn(4)}
    for leaf in leaves.values():
        leaf.requires_grad_()

    def loss() -> Tensor:
        out = nn.functional.group_norm(leaves["x"], 2, leaves["w"])
        return (out * stop_gradient(out, "norm.factor")).sum()

    found = compare(loss, leaves if params is None else {name: leaves[name] for name in params})
    assert found["norm.factor"].ratio == pytest.approx(2)


def test_a_hook_that_runs_itself_without_end_is_named() -> None:
    """As in a deep equilibrium model without its detach: torch goes on in new threads, and never returns."""
    w = torch.tensor([0.3, -1.2], dtype=torch.float64, requires_grad=True)

    def loss() -> Tensor:
        state = (w * 0.5).tanh()
        constant = stop_gradient(state, "equilibrium.state")
        constant.requires_grad_()
        again = (w * constant).tanh()
        state.register_hook(lambda g: g + torch.autograd.grad(again, constant, g, retain_graph=True)[0])
        return state.sum()

    found = compare(loss, w)
    assert "takes a derivative that runs it again, without end" in found.unopened["equilibrium.state"]
    assert str(found).splitlines()[1] == "no block could be opened"


# --- wrong input -------------------------------------------------------------------------------------------------


X = torch.tensor([1.0, 2.0], requires_grad=True)


@pytest.mark.parametrize(
    ("loss", "params", "error", "message"),
    [
        (lambda: X * 2, X, ValueError, r"`loss` should return a scalar. Found a tensor of shape (2,)."),
        (lambda: torch.ones(()), X, ValueError, "`loss` should depend on a tensor that requires a gradient."),
        (lambda: X.detach().sum(), None, ValueError, "`loss` should depend on a tensor that requires a gradient."),
        (lambda: 3.0, X, TypeError, "`loss` should return a tensor. Found float."),
        (lambda: None, X, TypeError, "`loss` should return a tensor. Found NoneType."),
        (lambda: (X.sum(), 1), X, TypeError, "`loss` should return a tensor. Found tuple."),
        (lambda: X.sum() * math.nan, X, ValueError, "`loss` should return a number. Found nan."),
        (lambda: X.sum() * 1j, X, ValueError, "`loss` should return a real number. Found torch.complex64."),
        (lambda: X.sum(), [], ValueError, "`params` should hold at least one tensor that requires a gradient."),
        (lambda: X.sum(), nn.ReLU(), ValueError, "`params` should hold at least one tensor that requires a gradient."),
        (lambda: X.sum(), torch.ones(2), ValueError, "`params` should hold at least one tensor that requires"),
        (lambda: X.sum(), [X, 3.0], TypeError, "`params` should hold tensors and modules. Found float at 'params[1]'."),
        (lambda: X.sum(), {"x": "y"}, TypeError, "`params` should hold tensors and modules. Found str at 'x'."),
        (lambda: X.sum(), 3, TypeError, "`params` should be a module, a tensor, or a dict or iterable of these."),
    ],
    ids=[
        "no scalar", "constant", "detached", "float", "none", "tuple", "nan", "complex", "no params", "empty module",
        "frozen", "float among params", "str among params", "int as params",
    ],
)  # fmt: skip
def test_wrong_input_gives_one_clear_error(loss: Callable, params: object, error: type, message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        compare(loss, params)


MADE = X.square().sum()


def _stepping() -> Tensor:
    value = X.square().sum()
    value.backward()
    return value


@pytest.mark.parametrize(
    ("loss", "error", "message"),
    [
        (nn.Linear(2, 1), TypeError, "`loss` should take no arguments, as .* does. Found Linear: missing .*'input'."),
        (lambda x: x, TypeError, "`loss` should take no arguments, as .* does. Found a function: missing .*'x'."),
        (lambda: MADE, ValueError, "`loss` should compute the loss each time it is called. Found a tensor"),
        (_stepping, RuntimeError, r"`loss` should leave its graph alone, without `backward\(\)` .* Found it freed."),
        (lambda: X.to("meta").sum(), ValueError, "`loss` should have a value. Found a tensor on the meta device."),
    ],
    ids=["module", "argument", "made before", "backward inside", "meta"],
)
def test_functions_that_are_no_loss_are_refused(loss: Callable, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        compare(loss)


def test_questions_inside_of_other_modes_are_refused() -> None:
    with torch.inference_mode(), pytest.raises(RuntimeError, match=r"outside of torch\.inference_mode"):
        compare(X.square().sum)
    for transform, name in ((torch.func.grad, "Grad"), (torch.vmap, "Vmap")):
        with pytest.raises(RuntimeError, match=rf"outside of the transforms of torch\.func. Found {name}\."):
            transform(lambda x: (compare(lambda: X.square().sum()), x.sum())[1])(torch.ones(2))


@pytest.mark.filterwarnings("ignore:Dynamo does not know")
@pytest.mark.parametrize("question", [compare, audit], ids=["compare", "audit"])
def test_questions_inside_of_a_compiled_function_are_refused(question: Callable) -> None:
    @torch.compile(backend="eager")
    def compiled(x: Tensor) -> Any:
        return question(lambda: (x * X.square()).sum())

    with pytest.raises(RuntimeError, match=r"^`loss` should be called outside of torch\.compile\."):
        compiled(torch.ones(2))


def test_a_total_in_place_is_a_loss() -> None:
    total = torch.zeros(())

    def loss() -> Tensor:
        return total.zero_().add_((X * stop_gradient(X, "total.factor")).sum())

    assert compare(loss, X)["total.factor"].ratio == pytest.approx(2)


def test_blocks_that_were_not_met_are_named() -> None:
    parameters = _parameters()
    with pytest.raises(ValueError, match=r"`blocks` should be among .*\['loop.state'\]. Found 'mlp.0'."):
        compare(lambda: block_in_a_loop(parameters), parameters, blocks=["mlp.0"])
    comparison = compare(lambda: block_in_a_loop(parameters), parameters)
    with pytest.raises(ValueError, match=r"Found 'lop\.state'"):
        comparison.gradient(["lop.state"])
    with pytest.raises(ValueError, match=r"`open` should name at least one block\. Found none\."):
        comparison.effect([])


# --- how it is shown ---------------------------------------------------------------------------------------------


def test_to_dict_is_plain_json() -> None:
    parameters = _parameters()
    comparison = compare(lambda: shared_weights(parameters), parameters)
    loaded = json.loads(json.dumps(comparison.to_dict(), allow_nan=False))
    assert loaded["loss"] == comparison.loss
    assert loaded["blocked_norm"] == pytest.approx(
        math.sqrt(sum(g.square().sum() for g in comparison.blocked.values()))
    )
    for found, effect in zip(loaded["effects"], comparison.effects, strict=True):
        assert found["name"] == effect.name
        assert found["leak"] == effect.leak
        assert found["verdict"]["kind"] == effect.verdict.kind
        assert found["verdict"]["text"] == str(effect.verdict)
        assert sorted(found["per_parameter"]) == sorted(parameters)


@pytest.mark.parametrize("question", [compare, audit])
def test_answers_are_kept_as_json_and_not_pickled(question: Callable) -> None:
    found = question(lambda: (X * stop_gradient(X, "kept.factor")).sum())
    for keep in (pickle.dumps, copy.deepcopy):
        with pytest.raises(TypeError, match=r"should not be copied or pickled: .* Keep `to_dict\(\)`"):
            keep(found)
    effect = pickle.loads(pickle.dumps(found["kept.factor"]))
    assert effect == found["kept.factor"]


def test_str_is_a_table() -> None:
    x = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
    comparison = compare(lambda: x * stop_gradient(x * x, "shown.scale") + stop_gradient(X, "shown.other").sum(), x)
    head, titles, *rows = str(comparison).splitlines()
    assert head == "loss 30, blocked gradient 9"
    assert titles.split() == ["block", "verdict", "leak", "ratio", "cosine", "where"]
    assert [row.split()[:5] for row in rows] == [
        ["shown.scale", "partial", "18", "3", "1"],
        ["shown.other", "redundant", "0", "1", "1"],
    ]
    assert all(len(line) <= 100 for line in (head, titles, *rows))
    assert str(compare(lambda: x * 2, x)).splitlines()[1].startswith("no blocks were met")


def test_many_cut_parameters_do_not_stretch_the_table() -> None:
    net = nn.Sequential(*(nn.Linear(2, 2) for _ in range(12)))
    head = nn.Linear(2, 1)
    inputs = torch.randn(3, 2)
    comparison = compare(lambda: head(stop_gradient(net(inputs), "stretch")).sum())
    (effect,) = comparison.effects
    assert sum("weight" in name for name in effect.verdict.parameters) == 12
    # Beside the place, whose path is as long as it is.
    assert max(len(line.replace(effect.site, "")) for line in str(comparison).splitlines()) <= 80


def test_html_escapes_what_it_shows() -> None:
    x = torch.tensor(3.0, requires_grad=True)
    shown = compare(lambda: x * stop_gradient(x, "<script>alert(1)</script>&"), x)._repr_html_()
    assert "<script" not in shown
    assert "&lt;script&gt;alert(1)&lt;/script&gt;&amp;" in shown
    assert shown.count("<tr>") == shown.count("</tr>") == 2


@pytest.mark.parametrize("program", [shared_weights, square_root_at_zero], ids=lambda program: program.__name__)
def test_plot_is_a_figure_without_global_state(program: Program) -> None:
    parameters = _parameters()
    figure = compare(lambda: program(parameters), parameters).plot()
    ratios, cosines = figure.axes
    assert ratios.get_xlabel() == "|open| / |blocked|"
    assert cosines.get_xlim() == (-1, 1)
    figure.canvas.draw()


def test_unblock_and_compare_tell_the_same() -> None:
    """The public switch, in the same words as a user's training loop."""
    parameters = _parameters()
    comparison = compare(lambda: nested_blocks(parameters), parameters)
    with unblock("nested.inner", "nested.outer"):
        gradient = torch.autograd.grad(nested_blocks(parameters), parameters["v"])[0]
    assert torch.equal(comparison.gradient(["nested.outer", "nested.inner"])["v"], gradient)


def test_a_module_names_its_parameters_also_where_an_optimizer_is_found_first() -> None:
    model = torch.nn.Linear(2, 1, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss() -> Tensor:
        assert optimizer.param_groups
        return model(torch.ones(2, dtype=torch.float64)).sum()

    assert set(compare(loss).blocked) == {"model.weight", "model.bias"}


def test_a_comparison_holds_at_most_three_gradients_beyond_a_plain_run() -> None:
    torch.manual_seed(0)
    layers, inputs = nn.ModuleList(nn.Linear(64, 64) for _ in range(16)), torch.randn(20, 64)

    def loss(stop: Callable[[Tensor, str], Tensor]) -> Tensor:
        hidden = inputs
        for index, layer in enumerate(layers):
            hidden = layer(hidden).tanh() + stop(hidden, f"three.layer{index}")
        return hidden.square().mean()

    def peak(run: Callable[[], object]) -> int:
        with LiveBytes() as live:
            run()
        return live.peak

    beyond = peak(lambda: compare(lambda: loss(stop_gradient), layers))
    beyond -= peak(lambda: torch.autograd.grad(loss(lambda hidden, _: hidden.detach()), list(layers.parameters())))
    assert beyond <= 3 * sum(parameter.nbytes for parameter in layers.parameters())
