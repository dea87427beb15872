"""Programs in the style of published code: each answer is compared with the program whose stop is removed.

Each program is a function of its stops. The truth is `backward` with `torch.detach`, or with the identity in its place;
`compare` gets the program with `stop_gradient`, `audit` with `torch.detach`.
"""

import array
import collections
import contextvars
import copy
import functools
import importlib
import io
import itertools
import math
import os
import queue
import subprocess
import sys
import threading
import types
import weakref
from contextlib import nullcontext, suppress

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import warm
from torch import nn
from torch._subclasses import FakeTensorMode

from toolkit import audit, block, compare, is_blocked, stop_gradient, stop_recording, unblock
from toolkit.blocks import opened
from toolkit.gradients import field_jacobian, grad, graph
from toolkit.gradients.audit import HIDDEN_CHANGE, audited
from toolkit.testing import assert_blocked, assert_flows, assert_load_bearing, assert_redundant

block("everybody.own", "A block that its program opens itself.")
block("everybody.asked", "A block that its program asks about.")
block("everybody.asked_alone", "A block that its program asks about, and never meets.")

# What stands where a program stops a tensor, or a region: for `compare`, in truth, and removed.
TENSOR = (stop_gradient, torch.detach, lambda input: input)
REGION = (lambda: stop_recording("everybody.region"), torch.no_grad, nullcontext)


def _named(params):
    return dict(params.named_parameters()) if isinstance(params, nn.Module) else params


def _backward(program, *stops):
    """Return parameter -> what ``backward()`` finds."""
    loss, params = program(*stops)
    loss().backward()
    found = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in _named(params).items()}
    return {name: gradient.to_dense() if gradient.is_sparse else gradient for name, gradient in found.items()}


def _truth(program, stops, open):
    return _backward(program, *(stop[2 if i in open else 1] for i, stop in enumerate(stops)))


def _norm(gradients):
    return math.hypot(*(gradient.norm().item() for gradient in gradients))


def _ask(program, *stops):
    """Return what `compare` and what `audit` say, after each of their gradients was found to be the true one."""
    return [_asked(which, program, stops) for which in (compare, audit)]


def _asked(which, program, stops):
    found = which(*program(*(stop[which is audit] for stop in stops)))
    assert not found.reason
    assert not found.unopened
    names = [effect.name for effect in found.effects]
    assert len(names) == len(stops)
    truths = {}
    for size in range(len(stops) + 1):
        for open in itertools.combinations(range(len(stops)), size):
            truths[open] = _truth(program, stops, open)
            for name, gradient in found.gradient([names[i] for i in open]).items():
                gradient = gradient.to_dense() if gradient.is_sparse else gradient
                torch.testing.assert_close(gradient, truths[open][name], rtol=1e-6, atol=0, equal_nan=True, msg=name)
    _check_effects(found, truths)
    return found


def _check_effects(found, truths):
    """Hold leak, ratio and verdict of every single block against the gradients with and without it."""
    blocked = truths[()]
    for i, effect in enumerate(found.effects):
        opened = truths[(i,)]
        leaks = {name: _norm([opened[name] - blocked[name]]) for name in blocked}
        sizes = {name: max(_norm([opened[name]]), _norm([blocked[name]])) for name in blocked}
        for name, leak in leaks.items():
            assert effect.per_parameter[name].leak == pytest.approx(leak, rel=1e-4, abs=1e-2 * sizes[name], nan_ok=True)
        if any(leak > 1e-2 * sizes[name] for name, leak in leaks.items()):
            assert effect.verdict.kind in ("partial", "cuts", "makes"), effect.verdict


def _numbers(seed, *shape, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def _leaf(seed, *shape, dtype=torch.float64):
    return _numbers(seed, *shape, dtype=dtype).requires_grad_()


def _double(*layers):
    """Return a network with numbers of its own."""
    net = layers[0] if len(layers) == 1 else nn.Sequential(*layers)
    for index, parameter in enumerate(net.double().parameters()):
        parameter.data = 0.5 * _numbers(index, *parameter.shape)
    return net


# --- low precision -----------------------------------------------------------------------------------------------


def consistency(weight):
    def program(stop):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 10))
        x, y = torch.randn(64, 32), torch.randint(10, (64,))

        def loss():
            with torch.autocast("cpu", dtype=torch.bfloat16):
                z = net(x)
                target = stop(net(x + 0.3).softmax(1))
                return F.cross_entropy(z, y) + weight * (z.softmax(1) - target).square().sum(1).mean()

        return loss, net

    return program


@pytest.mark.parametrize(("weight", "least"), [(0.3, 0.003), (1.0, 0.01), (3.0, 0.03), (10.0, 0.1), (30.0, 0.4)])
def test_a_leak_under_autocast_is_never_redundant(weight, least):
    program = consistency(weight)
    blocked, opened = (list(_backward(program, stop).values()) for stop in TENSOR[1:])
    leak = _norm([o - b for o, b in zip(opened, blocked, strict=True)])
    assert leak > least * _norm(blocked)
    for found in (compare(*program(stop_gradient)), audit(*program(torch.detach))):
        (effect,) = found.effects
        assert effect.verdict.kind in ("partial", "noise")[: 1 if least > 0.01 else 2]
        assert effect.leak == pytest.approx(leak, abs=0.005 * _norm(blocked))
    loss, _ = program(lambda input: stop_gradient(input, "everybody.consistency"))
    with pytest.raises(AssertionError, match="should be redundant"):
        assert_redundant(loss, "everybody.consistency")


def half_of_a_square(stop):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 8))
    x = torch.randn(32, 16)

    def loss():
        with torch.autocast("cpu", torch.bfloat16):
            y = net(x)
            return (y**2 + 0.5 * y * stop(y) - y).mean()

    return loss, net


def test_a_leak_under_autocast_behind_a_batch_norm_is_partial():
    blocked, opened = (_backward(half_of_a_square, stop) for stop in TENSOR[1:])
    for found in (compare(*half_of_a_square(stop_gradient)), audit(*half_of_a_square(torch.detach))):
        (effect,) = found.effects
        assert effect.verdict.kind == "partial"
        leak = _norm([opened[name] - blocked[name] for name in blocked])
        assert effect.leak == pytest.approx(leak, rel=0.05)


def _shifted(depth, seed):
    torch.manual_seed(seed)
    hidden = [layer for _ in range(depth - 1) for layer in (nn.Linear(16, 16), nn.Tanh())]
    net, x = nn.Sequential(*hidden, nn.Linear(16, 8)), torch.randn(32, 16)

    def loss():
        with torch.autocast("cpu", torch.bfloat16):
            z = net(x)
            shift = stop_gradient(z.amax(1, keepdim=True), "everybody.shift")
            return ((z - shift).exp().sum(1).log() + shift[:, 0] - z[:, 0]).mean()

    return loss, net


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_a_shift_under_autocast_is_noise_or_nothing(depth):
    effects = [compare(*_shifted(depth, seed))["everybody.shift"] for seed in range(10)]
    assert {effect.verdict.kind for effect in effects if effect.leak} <= {"noise", "redundant"}
    assert all(effect.verdict.kind == "redundant" for effect in effects if not effect.leak)
    noisy = [effect.verdict.noise for effect in effects if effect.verdict.kind == "noise"]
    assert noisy
    assert 0 < min(noisy) <= max(noisy) < 0.02


def test_nothing_is_asserted_of_what_is_below_the_noise():
    loss, _ = _shifted(1, 0)
    for assertion in (assert_redundant, assert_load_bearing):
        with pytest.raises(AssertionError, match=r"below the noise of .+ %"):
            assertion(loss, "everybody.shift")


# --- hooks that clip ---------------------------------------------------------------------------------------------


def clamped(stop):
    w = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64, requires_grad=True)

    def loss():
        h = w * 1.0
        h.register_hook(lambda g: g.clamp(-1, 1))
        return (h * 3).sum() * 0.1 + (w * stop(w * w)).sum()

    return loss, {"w": w}


def clamped_on_both_paths(first, second):
    w = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64, requires_grad=True)

    def loss():
        h = w * 1.0
        h.register_hook(lambda g: g.clamp(-0.05, 0.05))
        return (h * first(h * h)).sum() + (w * second(w * w)).sum()

    return loss, {"w": w}


def clipped_by_norm(stop):
    w = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64, requires_grad=True)

    def loss():
        h = F.linear(w[None], torch.eye(3, dtype=torch.float64) * 2)
        h.register_hook(lambda g: g / g.norm() if g.norm() > 1 else g)
        return (h * stop(h * w)).sum()

    return loss, {"w": w}


def clipped_parameter(stop):
    w = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64, requires_grad=True)
    w.register_hook(lambda g: g.clamp(-3, 3))
    return lambda: (w * stop(w * w)).sum(), {"w": w}


@pytest.mark.parametrize("program", [clamped, clamped_on_both_paths, clipped_by_norm, clipped_parameter])
def test_clipping_hooks_do_not_hide_a_leak(program):
    for found in _ask(program, *[TENSOR] * program.__code__.co_argcount):
        blocked = list(found.blocked.values())
        for effect in found.effects:
            assert (effect.verdict.kind == "redundant") == (effect.leak == 0) != (effect.leak > 1e-3 * _norm(blocked))


# --- each parameter by itself ------------------------------------------------------------------------------------


def router(dtype, size):
    def program(stop):
        torch.manual_seed(0)
        net, gate, x = nn.Linear(64, 64).to(dtype), nn.Linear(64, 1).to(dtype), torch.randn(128, 64).to(dtype)

        def loss():
            h = net(x)
            a = stop(gate(h.detach()).sigmoid()) if stop is not torch.detach else gate(h).sigmoid().detach()
            return size * h.float().square().sum() + (a * h.detach()).float().mean()

        return loss, nn.ModuleDict({"net": net, "gate": gate})

    return program


@pytest.mark.parametrize(("dtype", "size"), [(torch.bfloat16, 0.01), (torch.float32, 0.01), (torch.float32, 1e4)])
def test_a_router_whose_only_path_is_cut_is_never_redundant(dtype, size):
    loss, nets = router(dtype, size)(lambda input: stop_gradient(input, "everybody.router"))
    effect = compare(loss, nets)["everybody.router"]
    assert (effect.verdict.kind, effect.verdict.parameters) == ("cuts", ("gate.bias", "gate.weight"))
    opened = _backward(router(dtype, size), lambda input: input)
    assert effect.per_parameter["gate.weight"].leak == pytest.approx(_norm([opened["gate.weight"]]), rel=0.01)
    with pytest.raises(AssertionError, match="cuts all paths to"):
        assert_redundant(loss, "everybody.router")


def test_a_router_with_one_parameter_in_bfloat16():
    torch.manual_seed(0)
    net, gate, x = nn.Linear(8, 8), nn.Linear(8, 1), torch.randn(16, 8)
    coarse = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))

    def loss():
        h = net(x) * coarse
        return 1e3 * h.square().sum() + (stop_gradient(gate(x).sigmoid(), "everybody.router") * x).mean()

    found = compare(loss, {"coarse": coarse, "gate": gate.weight, "net": net.weight})
    assert (found.effects[0].verdict.kind, found.effects[0].verdict.parameters) == ("cuts", ("gate",))


@pytest.mark.parametrize("size", [1e3, 1e8, 1e12])
def test_a_small_leak_beside_a_huge_gradient_is_partial(size):
    def program(stop):
        small, huge = _leaf(0, 3), _leaf(1, 3)
        return lambda: size * huge.sin().sum() + (small * stop(1e-3 * small)).sum(), {"small": small, "huge": huge}

    for found in _ask(program, TENSOR):
        assert found.effects[0].verdict.kind == "partial"
        assert found.effects[0].per_parameter["small"].ratio == pytest.approx(2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_bias_before_a_batch_norm_does_not_make_a_shift_partial(dtype):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 5)).to(dtype)
    x = torch.randn(32, 6, dtype=dtype)

    def loss():
        z = net(x)
        shift = stop_gradient(z.amax(1, keepdim=True), "everybody.shift")
        return ((z - shift).exp().sum(1).log() + shift[:, 0] - z[:, 0]).mean()

    effect = compare(loss, net)["everybody.shift"]
    assert effect.leak > 0
    assert effect.verdict.kind == "redundant"
    assert_redundant(loss, "everybody.shift")


def test_a_straight_through_estimator_makes_the_gradient():
    def program(stop):
        w, other = torch.tensor([0.3, -1.1, 0.9], requires_grad=True), torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
        return lambda: (w + stop(w.round() - w)).square().sum() + other.sum(), {"w": w, "other": other}

    for found in _ask(program, TENSOR):
        (effect,) = found.effects
        assert (effect.verdict.kind, effect.verdict.parameters) == ("makes", ("w",))
        assert effect.per_parameter["w"].ratio == 0
        assert "makes the gradient of [w]" in str(found)


# --- functions that users wrote, and hooks -----------------------------------------------------------------------


class AuxLossAutoScaler(torch.autograd.Function):
    """As in Megatron-LM, core/transformer/moe/moe_utils.py."""

    @staticmethod
    def forward(ctx, output, aux_loss):
        ctx.save_for_backward(aux_loss)
        return output

    @staticmethod
    def backward(ctx, cotangent):
        (aux_loss,) = ctx.saved_tensors
        return cotangent, torch.ones_like(aux_loss)


def mixture_of_experts(stop):
    nets = nn.ModuleDict({name: _double(nn.Linear(4, 4)) for name in ("student", "teacher", "router")})
    x = _numbers(5, 8, 4)

    def loss():
        aux = nets["router"](x).softmax(1).mean(0).square().sum()
        return (nets["student"](x) - stop(AuxLossAutoScaler.apply(nets["teacher"](x), aux))).square().mean()

    return loss, nets


class Sqrt(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input):
        ctx.save_for_backward(input)
        return input.sqrt()

    @staticmethod
    def backward(ctx, cotangent):
        return cotangent / (2 * ctx.saved_tensors[0].sqrt())


def square_root_at_zero(stop):
    w = torch.tensor([0.0, 2.0], dtype=torch.float64, requires_grad=True)
    return lambda: (w * stop(Sqrt.apply(w))).sum(), {"w": w}


def square_root_at_zero_in_a_region(region):
    w = torch.tensor([0.0, 2.0], dtype=torch.float64, requires_grad=True)

    def loss():
        with region():
            root = Sqrt.apply(w)
        return (w * root).sum()

    return loss, {"w": w}


class Rematerialised(torch.autograd.Function):
    """Runs its forward pass again in the backward pass, as reversible networks do."""

    @staticmethod
    def forward(ctx, function, x, v):
        ctx.function = function
        ctx.save_for_backward(x, v)
        return function(x, v)

    @staticmethod
    def backward(ctx, cotangent):
        inputs = [saved.detach().requires_grad_() for saved in ctx.saved_tensors]
        with torch.enable_grad():
            output = ctx.function(*inputs)
        return None, *torch.autograd.grad(output, inputs, cotangent)


def reversible(stop):
    w, v = _leaf(0, 3), _leaf(1, 3)
    return lambda: Rematerialised.apply(lambda x, v: (x * v).tanh() * stop(x * x * v), w * 1, v).sum(), {"w": w, "v": v}


def test_a_function_that_runs_its_forward_again():
    comparison = _asked(compare, reversible, [TENSOR])
    found = audit(*reversible(torch.detach))
    outer, inner = found.effects  # the function has a detach of its own, which does nothing
    assert inner.leak == 0
    assert outer.leak == pytest.approx(comparison.effects[0].leak)
    assert outer.verdict.kind == comparison.effects[0].verdict.kind == "partial"


def rounding_of_its_own(stop):
    class Round(torch.autograd.Function):
        @staticmethod
        def forward(ctx, input):
            return input.round()

        @staticmethod
        def backward(ctx, cotangent):
            return cotangent

    w = _leaf(0, 4)
    return lambda: (Round.apply(3 * w) * stop(Round.apply(2 * w))).sum(), {"w": w}


def reversed_gradient(stop):
    class Reverse(torch.autograd.Function):
        @staticmethod
        def forward(ctx, input):
            return input.view_as(input)

        @staticmethod
        def backward(ctx, cotangent):
            return -cotangent / cotangent.norm()

    w = _leaf(0, 4)
    return lambda: (Reverse.apply(w).sin() * stop(w)).sum(), {"w": w}


@pytest.mark.parametrize("program", [mixture_of_experts, square_root_at_zero, rounding_of_its_own, reversed_gradient])
def test_functions_that_users_wrote(program):
    _ask(program, TENSOR)


def test_a_function_of_an_inner_derivative_makes_no_path_of_zeros_behind_a_block():
    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, y):
            ctx.save_for_backward(x, y)
            return x * y

        @staticmethod
        def backward(ctx, cotangent):
            x, y = ctx.saved_tensors
            return cotangent * y, cotangent * x

    u, v, w = _leaf(0, 3), _leaf(1, 3), _leaf(2, 3)

    def loss():
        x, y = w * 1.0, u * stop_gradient(v.sin(), "everybody.scale")
        output = x + y.detach() * stop_gradient(Product.apply(x, y), "everybody.product")
        (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        return (w + slope).sum()

    for found in (compare(loss, {"u": u, "v": v, "w": w}), audit(loss, {"u": u, "v": v, "w": w})):
        assert found.effects[0].verdict.kind in ("redundant", "no-op")
        assert not found.effects[0].leak


def test_an_auxiliary_loss_behind_a_block_trains_nothing():
    loss, nets = mixture_of_experts(lambda input: stop_gradient(input, "everybody.teacher"))
    found = compare(loss, nets)
    assert not found.blocked["router.weight"].any()
    assert set(found.effects[0].verdict.parameters) == {n for n in found.blocked if not n.startswith("student")}
    assert_blocked(loss, nets["router"])


def test_a_function_behind_a_region_gives_no_nan():
    for found in _ask(square_root_at_zero_in_a_region, REGION):
        assert found.blocked["w"].isfinite().all()


def node_hook(stop):
    w = _leaf(0, 3)

    def loss():
        h = w.sin()
        h.grad_fn.register_hook(lambda inputs, _: tuple(g.clamp(-0.3, 0.3) for g in inputs))
        return (h * stop(h * w)).sum()

    return loss, {"w": w}


def node_prehook(stop):
    w = _leaf(0, 3)

    def loss():
        h = w.sin()
        h.grad_fn.register_prehook(lambda cotangents: tuple(g.clamp(-0.1, 0.1) for g in cotangents))
        return (h * stop(h * w)).sum()

    return loss, {"w": w}


def hook_that_was_there_before(stop):
    w = _leaf(0, 3)
    h = w.sin() * 1.0
    h.register_hook(lambda g: g.clamp(-0.1, 0.1))
    return lambda: (h * stop(h * w)).sum(), {"w": w}


def node_hook_that_was_there_before(stop):
    w = _leaf(0, 3)
    h = w.sin() * 1.0
    h.grad_fn.register_hook(lambda inputs, _: (inputs[0].clamp(-0.1, 0.1), *inputs[1:]))
    return lambda: (h * stop(h * w)).sum(), {"w": w}


def module_hook(stop):
    net = _double(nn.Linear(3, 3))
    net.register_full_backward_pre_hook(lambda module, cotangents: tuple(g / g.norm() for g in cotangents))
    x = _numbers(4, 5, 3)
    return lambda: (net(x).tanh() * stop(net(x + 1))).sum(), net


def global_module_hook(stop):
    net, x = _double(nn.Linear(3, 3)), _numbers(4, 5, 3)

    def loss():
        clip = lambda module, cotangents: tuple(g.clamp(-0.1, 0.1) for g in cotangents)  # noqa: E731
        handle = nn.modules.module.register_module_full_backward_pre_hook(clip)
        try:
            return (net(x).tanh() * stop(net(x + 1))).sum()
        finally:
            handle.remove()

    return loss, net


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize(
    "program",
    [
        node_hook,
        node_prehook,
        hook_that_was_there_before,
        node_hook_that_was_there_before,
        module_hook,
        global_module_hook,
    ],
)
def test_hooks_of_every_kind_act_as_in_a_plain_run(program):
    _ask(program, TENSOR)


def logged_leaves(log, stop):
    nets = nn.ModuleDict({"online": _double(nn.Linear(4, 4)), "target": _double(nn.Linear(4, 4))})
    x = _numbers(6, 8, 4)
    for name, parameter in nets.named_parameters():
        parameter.register_hook(lambda g, name=name: log.append((name, g.norm().item())))
    return lambda: (nets["online"](x) - stop(nets["target"](x + 1))).square().mean(), nets


def logged_activations(log, stop):
    net, w, x = _double(nn.Linear(4, 4), nn.ReLU()), _leaf(0, 4), _numbers(6, 8, 4)

    def watch(module, inputs, output):
        if output.requires_grad:
            output.register_hook(lambda g: log.append(("activation", g.norm().item())))

    net[0].register_forward_hook(watch)
    return lambda: (x.sum() * w - stop(net(x))).square().mean(), {"w": w, **dict(net.named_parameters())}


def logged_modules(log, stop):
    net, w, x = _double(nn.Linear(4, 4), nn.ReLU()), _leaf(0, 4), _numbers(6, 8, 4)
    net[0].register_full_backward_hook(lambda module, inputs, outputs: log.append(("module", outputs[0].norm().item())))
    return lambda: (w * x - stop(net(x * 2))).square().mean(), {"w": w, **dict(net.named_parameters())}


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("program", [logged_leaves, logged_activations, logged_modules])
def test_hooks_that_log_see_only_the_gradients_of_plain_runs(program):
    blocked, opened, seen = [], [], []
    for log, stop in ((blocked, TENSOR[1]), (opened, TENSOR[2])):
        _backward(functools.partial(program, log), stop)
    _ask(functools.partial(program, seen), TENSOR)
    assert set(seen) <= {*blocked, *opened}


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("program", [logged_leaves, logged_activations, logged_modules])
def test_hooks_that_log_run_behind_a_region(program):
    log = []

    def region(input):
        with stop_recording("everybody.region"):
            return input * 1.0

    loss, params = program(log, region)
    found = compare(loss, params)
    for name, gradient in _backward(functools.partial(program, log), torch.detach).items():
        assert torch.equal(found.blocked[name], gradient)


def per_sample(stop):
    """Layers that keep what comes forward until it is wanted backward, as opacus does."""
    net, kept, found = _double(nn.Linear(3, 3)), [], {}
    net.register_forward_hook(lambda module, inputs, output: kept.append(inputs[0].detach()))

    def sample(module, inputs, outputs):
        found["weight"] = torch.einsum("ni,nj->nij", outputs[0], kept.pop())

    net.register_full_backward_hook(sample)
    x = _numbers(4, 5, 3)
    return lambda: (net(x).tanh() * stop(net(x).sin())).sum(), net


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_layers_that_use_up_what_they_kept_are_right_or_one_sentence():
    found = audit(*per_sample(torch.detach))
    assert found.valid or "\n" not in found.reason
    assert isinstance(str(found), str)
    truth = _backward(per_sample, torch.detach)
    assert all(torch.equal(found.blocked[name], gradient) for name, gradient in truth.items())


def branching(stop):
    w = _leaf(0, 3)

    def loss():
        t = stop(w.sin())
        return (w * t * (3 if t.requires_grad else 2)).sum()

    return loss, {"w": w}


class Choosy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a * b

    @staticmethod
    def backward(ctx, cotangent):
        a, b = ctx.saved_tensors
        return cotangent * b * (2 if all(ctx.needs_input_grad) else 1), cotangent * a


def choosy(stop):
    w = _leaf(0, 3)
    return lambda: Choosy.apply(w.sin(), stop(w.cos())).sum(), {"w": w}


def packed(stop):
    w = _leaf(0, 3)

    def loss():
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.half(), lambda t: t.double()):
            return (w.sin() * stop(w.exp())).sum()

    return loss, {"w": w}


def unrolled(stop):
    net, x = _double(nn.LSTM(4, 4)), _numbers(0, 3, 2, 4)

    def loss():
        state, total = None, 0
        for step in x.split(1):
            y, state = net(step, state)
            state = (stop(state[0]), state[1])
            total = total + y.square().sum()
        return total

    return loss, net


def frozen_on_the_way(stop):
    nets, x = nn.ModuleDict({"g": _double(nn.Linear(4, 8)), "d": _double(nn.Linear(8, 1))}), _numbers(9, 16, 4)

    def loss():
        nets["d"].requires_grad_(False)
        generated = F.softplus(-nets["d"](nets["g"](x))).mean()
        nets["d"].requires_grad_(True)
        return generated + F.softplus(nets["d"](stop(nets["g"](x)))).mean()

    return loss, nets


def complex_numbers(stop):
    w = torch.complex(_numbers(0, 3), _numbers(1, 3)).requires_grad_()
    return lambda: (w * stop(w.conj() * w)).sum().abs(), {"w": w}


def rounded_on_the_way(stop):
    w, x = _leaf(0, 5, 4), _numbers(1, 16, 4, dtype=torch.float32)
    return lambda: (x @ w.float().T * stop((x @ w.float().T).sin())).sum(), {"w": w}


def ensemble(stop):
    nets = [_double(nn.Linear(3, 2)) for _ in range(3)]
    params = {name: value.requires_grad_() for name, value in torch.func.stack_module_state(nets)[0].items()}
    skeleton, x = copy.deepcopy(nets[0]).to("meta"), _numbers(0, 4, 3)

    def member(weights):
        y = torch.func.functional_call(skeleton, weights, (x,))
        return (y * stop(y.sin())).sum()

    return lambda: torch.func.vmap(member)(params).sum(), params


def kept_elsewhere(stop):
    w, store = _leaf(0, 4), {}

    def pack(tensor):
        store[len(store)] = tensor.clone()
        return len(store) - 1

    def loss():
        with torch.autograd.graph.saved_tensors_hooks(pack, store.__getitem__):
            return (w.sin() * stop(w.exp())).sum()

    return loss, {"w": w}


@pytest.mark.parametrize(
    "program",
    [
        *(branching, choosy, packed, unrolled, frozen_on_the_way, complex_numbers, rounded_on_the_way),
        *(ensemble, kept_elsewhere),
    ],
)
def test_programs_of_many_kinds(program):
    _ask(program, TENSOR)


# --- autocast, views, changes in place ---------------------------------------------------------------------------


def teacher_first(region):
    torch.manual_seed(0)
    net, x = nn.Linear(16, 10), torch.randn(8, 16)

    def loss():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with region():
                target = net(x)
            return (net(x + 1) - target).float().square().sum()

    return loss, net


def test_the_weight_cache_of_autocast_is_that_of_a_plain_run():
    truth = _backward(teacher_first, torch.no_grad)
    for found in (compare(*teacher_first(REGION[0])), audit(*teacher_first(torch.no_grad))):
        assert all(torch.equal(found.blocked[name], gradient) for name, gradient in truth.items())
        assert truth["weight"].norm() > 1
        opened = _backward(teacher_first, nullcontext)
        for name, gradient in found.gradient([found.effects[0].name]).items():
            torch.testing.assert_close(gradient, opened[name], rtol=1e-6, atol=0)


def test_what_trains_under_autocast_is_not_blocked():
    loss, net = teacher_first(REGION[0])
    with pytest.raises(AssertionError, match=r"Found a path to 'net\.weight', gradient"):
        assert_blocked(loss, net)
    assert_flows(loss, net)
    assert graph(loss, net).reachable() == {"weight", "bias"}


def view_of_a_buffer(region):
    w = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64, requires_grad=True)

    def loss():
        x = torch.zeros(2, 4, dtype=torch.float64)
        x[0] = w
        row = x[0]
        x[1] = w * 2
        with region():
            mean, std = row.mean(), row.std()
        return (((row - mean) / std) ** 3).sum() + (x * x).sum()

    return loss, {"w": w}


def test_a_view_of_a_buffer_that_is_first_read_in_a_region():
    _ask(view_of_a_buffer, REGION)


def _jacobian_by_differences(program, stop, size=1e-6):
    """Return J by central differences of the blocked gradient of ``program(stop)`` by its only parameter."""
    rows = []
    for index in range(program(stop)[1]["w"].numel()):
        sides = []
        for step in (size, -size):
            loss, params = program(stop)
            params["w"].data[index] += step
            sides.append(torch.autograd.grad(loss(), params["w"])[0])
        rows.append((sides[0] - sides[1]) / (2 * size))
    return torch.stack(rows, 1)


def changed_in_place(stop):
    w = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)

    def loss():
        x = w * 1
        y = stop(x)
        y.mul_(2)
        return (x * y).sum()

    return loss, {"w": w}


def sigmoid_in_a_region(region):
    w = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)

    def loss():
        with region():
            scale = (3 * w).sigmoid()
        return (w * scale).square().sum()

    return loss, {"w": w}


@pytest.mark.parametrize(
    ("program", "kind", "may_be_refused"),
    [(view_of_a_buffer, REGION, True), (changed_in_place, TENSOR, True), (sigmoid_in_a_region, REGION, False)],
)
def test_a_field_is_right_or_refused(program, kind, may_be_refused):
    with suppress(ValueError) if may_be_refused else nullcontext():
        found = field_jacobian(*program(kind[0])).jacobian
        torch.testing.assert_close(found, _jacobian_by_differences(program, kind[1]), rtol=1e-6, atol=1e-6)


def test_a_blocked_value_that_is_changed_in_place():
    _ask(changed_in_place, TENSOR)
    found = compare(*changed_in_place(stop_gradient))
    assert found.gradient([found.effects[0].name])["w"].tolist() == [8.0, 16.0]


# --- programs that ask -------------------------------------------------------------------------------------------


def _asking_program():
    """A loss that is another number while its block is open; another block is asked about alone."""
    x = torch.linspace(-1, 2, 5)
    w = torch.linspace(1, 3, 5).requires_grad_()

    def loss():
        hidden = x * w
        hidden.register_hook(lambda gradient: gradient.clamp(-4, 4))
        is_closed = is_blocked("everybody.asked")
        with torch.no_grad() if is_closed else nullcontext():
            target = hidden * (1 if is_blocked("everybody.asked_alone") else 2)
        return (hidden * stop_gradient(target, "everybody.asked")).sum() + (0 if is_closed else 1e-3)

    return loss, {"w": w}


def test_a_program_that_asks_for_its_blocks_is_compared_with_its_plain_run():
    found = compare(*_asking_program())
    assert list(found.meetings) == ["everybody.asked"]
    assert torch.equal(found.blocked["w"], _backward(_asking_program)["w"])
    with unblock("everybody.asked"):
        truth = _backward(_asking_program)["w"]
    assert torch.equal(found.gradient(["everybody.asked"])["w"], truth)
    assert found["everybody.asked"].leak > 0.1


# --- reruns ------------------------------------------------------------------------------------------------------

TASKS = [_numbers(i, 5, 3) for i in range(9)]


def adapted(draw):
    """A step of first-order meta-learning, whose derivative inside of the program meets the block."""

    def program(stop):
        w, following = _leaf(1, 3), draw()

        def loss():
            x = following()
            inner = (x @ w - 1).square().mean() + stop(x @ w).mean() * w.sum()
            (g,) = torch.autograd.grad(inner, w, create_graph=True)
            return (x @ (w - 0.1 * g) - 1).square().mean()

        return loss, {"w": w}

    return program


class Steps:
    def __init__(self):
        self.done = 0

    def task(self):
        self.done += 1
        return TASKS[self.done] * self.done


def _attribute():
    return Steps().task


def _nonlocal():
    done = 0

    def task():
        nonlocal done
        done += 1
        return TASKS[done] * done

    return task


done_so_far = 0


def _task_by_a_global():
    global done_so_far
    done_so_far += 1
    return TASKS[done_so_far] * done_so_far


def _global():
    global done_so_far
    done_so_far = 0
    return _task_by_a_global


def _list_iterator():
    tasks = iter(TASKS)
    return lambda: next(tasks)


def _count():
    steps = itertools.count(1)

    def task():
        step = next(steps)
        return TASKS[step] * step

    return task


def _deque():
    tasks = collections.deque(TASKS)
    return lambda: tasks.popleft()


def _dict():
    seen = {"steps": 0}

    def task():
        seen["steps"] += 1
        return TASKS[seen["steps"]] * seen["steps"]

    return task


def _array():
    steps = np.zeros(1, dtype=int)

    def task():
        steps[0] += 1
        return TASKS[steps[0]] * int(steps[0])

    return task


RESTORED = [_attribute, _nonlocal, _global, _list_iterator, _count, _deque, _dict, _array]


@pytest.mark.parametrize("draw", RESTORED)
def test_reruns_take_the_same_data(draw):
    for found in _ask(adapted(draw), TENSOR):
        assert found.effects[0].verdict.kind == "partial"


@pytest.mark.parametrize("draw", RESTORED)
@pytest.mark.parametrize("ask", [compare, audit])
def test_what_counts_on_stands_where_it_stood(draw, ask):
    first, following = draw()(), draw()
    program = adapted(lambda: following)
    ask(*program(stop_gradient if ask is compare else torch.detach))
    assert torch.equal(following(), first)


def _generator():
    def drawn():
        for i in range(1, 9):
            yield TASKS[i] * i

    tasks = drawn()
    return lambda: next(tasks)


def _map_of_a_generator():
    def drawn():
        for i in range(1, 9):
            yield TASKS[i] * i

    tasks = map(torch.sin, drawn())
    return lambda: next(tasks)


def _enumerate():
    tasks = enumerate(TASKS, 1)
    return lambda: torch.mul(*next(tasks)[::-1])


def _loader():
    tasks = iter(torch.utils.data.DataLoader(TASKS, batch_size=None))
    return lambda: next(tasks)


def _shuffled_loader():
    tasks = iter(torch.utils.data.DataLoader(TASKS, batch_size=None, shuffle=True))
    return lambda: next(tasks)


class Reader:
    def __init__(self, file):
        self.file = file

    def __next__(self):
        return TASKS[int(next(self.file))] * 1.0

    def __iter__(self):
        return self


def _file():
    tasks = Reader(io.StringIO("\n".join(map(str, range(9)))))
    return lambda: next(tasks)


def _generator_expression():
    tasks = (task for task in TASKS)
    return lambda: next(tasks)


def _map():
    tasks = map(torch.clone, TASKS)
    return lambda: next(tasks)


def _zip():
    tasks = zip(TASKS, TASKS, strict=True)
    return lambda: next(tasks)[1]


def _cycle():
    tasks = itertools.cycle(TASKS)
    return lambda: next(tasks)


MOVING = [_generator, _map_of_a_generator, _shuffled_loader, _file]


@pytest.mark.parametrize("draw", MOVING)
def test_what_no_one_can_set_back_is_named(draw):
    with pytest.raises(RuntimeError, match=r"`loss` should do the same each time it runs\. Found .*`tasks"):
        compare(*adapted(draw)(stop_gradient))
    found = audit(*adapted(draw)(torch.detach))
    assert not found.valid
    assert "`tasks" in found.reason
    assert found.reason in str(found)


@pytest.mark.parametrize("draw", [_generator_expression, _map, _zip, _cycle, _enumerate, _loader])
def test_iterators_over_a_list_are_set_back_or_named(draw):
    try:
        _ask(adapted(draw), TENSOR)
    except RuntimeError as error:
        assert "`tasks`" in str(error)  # noqa: PT017


def test_an_iterator_that_comes_to_its_end_is_no_silence():
    def program(stop):
        w, tasks = _leaf(0, 3), iter(TASKS)

        def loss():
            return sum((x @ w * stop(w.sum())).sum() for x in tasks) + w.sum()

        return loss, {"w": w}

    _ask(program, TENSOR)


def _labels():
    yield from range(9)


@pytest.mark.parametrize(
    "pairs",
    [
        lambda: zip(itertools.count(), TASKS, strict=False),
        lambda: zip(_labels(), TASKS, strict=True),
        lambda: enumerate(TASKS),
        lambda: ((label, task) for task, label in zip(TASKS, _labels(), strict=True)),
        lambda: map(lambda *pair: pair, _labels(), TASKS),
    ],
    ids=["count", "generator", "enumerate", "generator expression", "map"],
)
@pytest.mark.parametrize("is_used", [False, True])
def test_pairs_stay_pairs(pairs, is_used):
    w, tasks = _leaf(0, 3), pairs()

    def loss():
        label, x = next(tasks)
        return (x @ w * stop_gradient(x @ w, "everybody.pairs")).sum() * (1 + label * is_used)

    with suppress(RuntimeError):
        compare(loss, {"w": w})
    label, x = next(tasks)
    assert torch.equal(x, TASKS[label])


def test_what_is_left_of_a_slice_is_left():
    w, tasks = _leaf(0, 3), itertools.islice(TASKS, 5)
    with suppress(RuntimeError):
        compare(lambda: (next(tasks) @ w * stop_gradient(w.sum(), "everybody.slice")).sum(), {"w": w})
    left = list(tasks)
    assert torch.equal(left[-1], TASKS[4])


def _tensor_attribute():
    steps = torch.zeros(1, requires_grad=True)
    steps.done = 0

    def task():
        steps.done += 1
        return TASKS[steps.done] * steps.done

    return task


def _average_on_a_tensor():
    steps = torch.zeros(1, requires_grad=True)
    steps.average = torch.ones(())
    return lambda: TASKS[0] * steps.average.mul_(0.5)


def _object_array():
    steps = np.array([0, None], dtype=object)

    def task():
        steps[0] += 1
        return TASKS[steps[0]] * steps[0]

    return task


def _typed_array():
    steps = array.array("i", [0])

    def task():
        steps[0] += 1
        return TASKS[steps[0]] * steps[0]

    return task


def _bytes():
    steps = bytearray(1)

    def task():
        steps[0] += 1
        return TASKS[steps[0]] * steps[0]

    return task


def _thread_local():
    steps = threading.local()
    steps.done = 0

    def task():
        steps.done += 1
        return TASKS[steps.done] * steps.done

    return task


def _queue():
    tasks = queue.SimpleQueue()
    for task in TASKS:
        tasks.put(task)
    return tasks.get_nowait


@pytest.mark.parametrize(
    "draw", [_tensor_attribute, _average_on_a_tensor, _object_array, _typed_array, _bytes, _thread_local, _queue]
)
def test_rarer_state_is_restored_or_the_answer_refused(draw):
    try:
        found = _asked(compare, adapted(draw), [TENSOR])
    except RuntimeError as error:
        assert str(error).startswith("`loss` should do the same each time it runs. Found ")  # noqa: PT017
        return
    assert found.effects[0].verdict.kind == "partial"


# --- what is refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ask", [compare, audit])
def test_a_module_that_is_not_in_the_loss_is_refused(ask):
    net, other, x = nn.Linear(3, 1), nn.Linear(3, 1), torch.randn(4, 3)
    with pytest.raises(ValueError, match=r"`params` should hold a tensor that `loss` depends on\. Found none"):
        ask(lambda: (net(x) * stop_gradient(net(x), "everybody.stranger")).mean(), other)
    with pytest.raises(ValueError, match=r"`params` should hold a tensor that `loss` depends on\. Found none"):
        ask(lambda: net(x).mean(), other)


@pytest.mark.parametrize("ask", [compare, audit, graph])
def test_lazy_modules_are_refused_and_left_lazy(ask):
    net, x = nn.Sequential(nn.LazyLinear(2), nn.ReLU()), torch.randn(4, 3)
    with pytest.raises(ValueError, match="uninitialised"):
        ask(lambda: net(x).mean())
    assert net[0].has_uninitialized_params()


FSDP2 = """
import os, torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from toolkit import audit, compare, stop_gradient
os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
net, x = nn.Linear(3, 1), torch.ones(2, 3)
fully_shard(net, mesh=init_device_mesh("cpu", (1,)))
for ask in (compare, audit):
    try:
        ask(lambda: (net(x) * stop_gradient(net(x), "sharded")).mean(), net)
    except ValueError as error:
        print(error)
dist.destroy_process_group()
"""


def test_a_module_sharded_by_fsdp2_is_refused_in_one_sentence():
    ran = subprocess.run([warm.python(), "-c", FSDP2], capture_output=True, text=True, timeout=600)
    sentences = [f"`loss` should run before `fully_shard`. Found {it} sharded by FSDP2." for it in ("net", "a module")]
    assert len(ran.stdout.splitlines()) == 2, ran.stderr
    assert set(ran.stdout.splitlines()) <= set(sentences)


@pytest.mark.parametrize("ask", [compare, audit, graph, field_jacobian])
def test_a_tensor_is_no_program(ask):
    w = torch.ones(2, requires_grad=True)
    if ask is graph:
        assert graph(w.sum()).reachable()
        return
    with pytest.raises(TypeError, match=r"^`loss` should be a function that returns the loss\. Found Tensor\.$"):
        ask(w.sum(), w)


class HiddenWrite(torch.autograd.Function):
    @staticmethod
    def forward(ctx, function, x):
        ctx.function = function
        ctx.save_for_backward(x)
        return function(x).detach()

    @staticmethod
    def backward(ctx, cotangent):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.function(x)
        torch.autograd.backward(y, cotangent)
        return None, x.grad


def test_gradients_past_the_graph_are_refused():
    net, w = nn.Linear(3, 3), torch.ones(3, requires_grad=True)
    loss = lambda: HiddenWrite.apply(net, stop_gradient(w, "everybody.w") * w).square().mean()  # noqa: E731
    for ask in (compare, audit):
        with pytest.raises(RuntimeError, match=r"adds to the `\.grad` of net\.(weight|bias)"):
            ask(loss, {"w": w, **dict(net.named_parameters())})
    with pytest.raises(RuntimeError, match=r"adds to the `\.grad` of net\.(weight|bias)"):
        assert_blocked(loss, net)
    assert all(parameter.grad is None for parameter in [w, *net.parameters()])


# --- threads -----------------------------------------------------------------------------------------------------


def _dropped_out(net):
    z = torch.ones(3, 5, dtype=torch.float64)

    def loss():
        y = net(z)
        inner = (y * stop_gradient(y, "everybody.dropped")).sum()
        (q,) = torch.autograd.grad(inner, net[0].weight, create_graph=True)
        return q.square().sum()

    return loss


def test_threads_with_dropout_and_an_inner_derivative_do_not_disturb_each_other():
    nets = [
        nn.Sequential(nn.Linear(5, 5, bias=False), nn.Dropout(0.5), nn.Linear(5, 1, bias=False)).double()
        for _ in range(3)
    ]
    found, interval = [], sys.getswitchinterval()

    def job(net):
        # By Euler's theorem, as each gradient is homogeneous in both weights, whatever was dropped.
        for _ in range(8):
            comparison = compare(_dropped_out(net), {"first": net[0].weight, "last": net[2].weight})
            for open, first, last in (((), 0, 2), (("everybody.dropped",), 8, 16)):
                gradient = comparison.gradient(open)
                found.append(((net[0].weight * gradient["first"]).sum().item(), first * comparison.loss))
                found.append(((net[2].weight * gradient["last"]).sum().item(), last * comparison.loss))

    try:
        sys.setswitchinterval(1e-4)
        threads = [threading.Thread(target=job, args=(net,)) for net in nets]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert len(found) == 3 * 8 * 4
    assert all(value == pytest.approx(expected, rel=1e-9, abs=1e-12) for value, expected in found)


def in_workers(stop, w):
    def loss():
        parts = {}

        def work(index):
            parts[index] = w[index] * stop(w[index].exp())

        threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return parts[0] + parts[1]

    return loss


def test_blocks_in_worker_threads_are_named_in_a_warning():
    w = _leaf(0, 2)
    loss = in_workers(lambda input: stop_gradient(input, "everybody.worker"), w)
    with pytest.warns(UserWarning, match=r"in another thread or comparison, and not compared: 'everybody\.worker'"):
        found = compare(loss, w)
    assert "'everybody.worker'" in str(found)
    assert torch.equal(found.blocked["w"], w.detach().exp())
    told = audit(in_workers(lambda input: input.detach(), w), w)
    assert "in another thread" in str(told)


def test_a_region_at_the_first_number_of_a_thread_ends():
    torch.manual_seed(0)
    online, target, x, found = nn.Linear(8, 4), nn.Linear(8, 4).requires_grad_(False), torch.randn(16, 8), []

    def loss():
        with stop_recording("everybody.frozen"):
            goal = target(x)
        return (online(x) - goal).square().mean()

    def job():
        assert_flows(loss, online)
        with pytest.raises(AssertionError, match="Found a path to"):
            assert_blocked(loss, online)
        found.append(graph(loss, online).reachable())

    thread = threading.Thread(target=job)
    thread.start()
    thread.join()
    assert found == [{"weight", "bias"}]


# --- state -------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(3), nn.Linear(3, 1)

    def forward(self, x):
        return self.linear(self.norm(x))


class Agent:
    def __init__(self, size):
        self.replay = [(torch.zeros(3), 0.0) for _ in range(size)]
        self.algorithm = types.SimpleNamespace(net=Net(), generator=torch.Generator().manual_seed(0))

    def loss(self):
        x = torch.randn(8, 3, generator=self.algorithm.generator)
        y = self.algorithm.net(x)
        return (y * stop_gradient(y, "everybody.agent")).mean()


@pytest.mark.slow
def test_a_replay_buffer_before_the_network_does_not_keep_it_from_being_restored():
    agent = Agent(30_000)
    state = {name: value.clone() for name, value in agent.algorithm.net.state_dict().items()}
    random = agent.algorithm.generator.get_state()
    compare(agent.loss)
    assert all(torch.equal(value, state[name]) for name, value in agent.algorithm.net.state_dict().items())
    assert torch.equal(agent.algorithm.generator.get_state(), random)


class Slots:
    __slots__ = ("net",)

    def __init__(self, net):
        self.net = net


def _in_a_class(net):
    return type("Holder", (), {"net": net})


def _in_a_property(net):
    return type("Holder", (), {"net": property(lambda self: net)})()


HOLDERS = {
    "deque": lambda net: (holder := collections.deque([net])) and (lambda: holder[0]),
    "cache": lambda net: functools.cache(lambda: net),
    "class": lambda net: (holder := _in_a_class(net)) and (lambda: holder.net),
    "instance": lambda net: (holder := _in_a_class(net)()) and (lambda: holder.net),
    "property": lambda net: (holder := _in_a_property(net)) and (lambda: holder.net),
    "slots": lambda net: (holder := Slots(net)) and (lambda: holder.net),
    "defaultdict": lambda net: (holder := collections.defaultdict(list, {"a": [net]})) and (lambda: holder["a"][0]),
    "namespace": lambda net: (holder := types.SimpleNamespace(net=net)) and (lambda: holder.net),
    "values": lambda net: (holder := {"a": net}.values()) and (lambda: next(iter(holder))),
    "mapping": lambda net: (holder := types.MappingProxyType({"a": net})) and (lambda: holder["a"]),
    "chain": lambda net: (holder := collections.ChainMap({}, {"a": net})) and (lambda: holder["a"]),
    "partial": lambda net: functools.partial(lambda net: net, net),
    "named tuple": lambda net: (holder := collections.namedtuple("Holder", "net")(net)) and (lambda: holder.net),
}


@pytest.mark.parametrize("kind", HOLDERS)
@pytest.mark.parametrize("ask", [compare, audit])
def test_networks_are_found_wherever_they_are_kept(kind, ask):
    net, x = Net(), torch.randn(8, 3)
    get = HOLDERS[kind](net)
    state = {name: value.clone() for name, value in net.state_dict().items()}

    def loss():
        y = get()(x)
        return (y * y.detach() * stop_gradient(y, "everybody.held")).mean()

    ask(loss)
    assert all(torch.equal(value, state[name]) for name, value in net.state_dict().items())


class CrossBatchMemory(nn.Module):
    """A queue of older embeddings, its place an integer in Python."""

    def __init__(self, stop):
        super().__init__()
        self.net, self.stop = _double(nn.Linear(3, 2)), stop
        self.register_buffer("queue", 0.1 * _numbers(8, 6, 2))
        self.labels, self.place, self.is_full = torch.zeros(6), 0, False

    def forward(self, x):
        embedded = self.net(x)
        self.queue[self.place : self.place + 2] = self.stop(embedded)
        self.labels[self.place : self.place + 2] = self.place
        self.place = (self.place + 2) % 6
        self.is_full |= self.place == 0
        return (embedded @ self.queue.clone().T).logsumexp(1).mean() + self.place


@pytest.mark.parametrize("ask", [compare, audit])
def test_a_queue_is_where_it_was(ask):
    memory, x = CrossBatchMemory(stop_gradient if ask is compare else torch.detach), _numbers(3, 2, 3)
    queue, labels = memory.queue.clone(), memory.labels.clone()
    found = ask(lambda: memory(x), memory.net)
    assert not found.reason
    assert (memory.place, memory.is_full) == (0, False)
    assert torch.equal(memory.queue, queue)
    assert torch.equal(memory.labels, labels)
    plain = CrossBatchMemory(torch.detach)
    truth = torch.autograd.grad(plain(x), list(plain.net.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(found.blocked.values(), truth, strict=True))


def decaying_baseline(stop):
    w, averages = _leaf(0, 3), {}

    def loss():
        cost = w.exp().sum()
        baseline = averages.get("cost", torch.zeros(()))
        averages["cost"] = 0.9 * baseline + 0.1 * stop(cost)
        averages["calls"] = averages.get("calls", 0) + 1
        return (cost - averages["cost"]) ** 2 * averages["calls"]

    return loss, {"w": w}


def test_averages_in_a_dict_do_not_move_on():
    for found in _ask(decaying_baseline, TENSOR):
        assert found.effects[0].verdict.kind == "partial"
    loss, params = decaying_baseline(stop_gradient)
    compare(loss, params)
    assert loss().item() == decaying_baseline(torch.detach)[0]().item()


class _Kept:
    pass


def in_a_context_variable(make):
    kept = contextvars.ContextVar("kept", default=None)

    def get():
        if kept.get() is None:
            kept.set(make())
        return kept.get()

    return get


def by_a_weak_key(make):
    owner, kept = _Kept(), weakref.WeakKeyDictionary()
    return lambda: kept[owner] if owner in kept else kept.setdefault(owner, make())


def in_a_new_attribute_of_a_class(make):
    kind = type("Kind", (), {})

    def get():
        if not hasattr(kind, "value"):
            kind.value = make()
        return kind.value

    return get


def in_an_array_of_objects(make):
    kept = np.array([None], dtype=object)

    def get():
        if kept[0] is None:
            kept[0] = make()
        return kept[0]

    return get


UNSEEN = [in_a_context_variable, by_a_weak_key, in_a_new_attribute_of_a_class, in_an_array_of_objects]


@pytest.mark.parametrize("keep", UNSEEN)
@pytest.mark.parametrize("ask", [compare, audit])
@pytest.mark.parametrize("is_inner", [False, True], ids=["hook", "inner derivative"])
def test_a_block_that_only_the_first_run_meets_is_no_silence(ask, keep, is_inner):
    stop = torch.detach if ask is audit else functools.partial(stop_gradient, name="t.kept")
    u, v = _leaf(0, 3), _leaf(1, 3)
    kept = keep(lambda: stop(u.tanh()))

    def loss():
        y = 1.0 * v
        if is_inner:
            (y,) = torch.autograd.grad((y * u.sin() * kept()).sum(), u, create_graph=True)
        else:
            y.register_hook(lambda g: g.clamp(-0.5, 0.5))
        return (kept() * y + u).sum()

    if ask is audit:
        assert "its first run alone meets" in audit(loss, {"u": u, "v": v}).reason
    else:
        with pytest.raises(RuntimeError, match=r"should do the same .* its first run alone meets 't.kept'"):
            compare(loss, {"u": u, "v": v})


@pytest.mark.parametrize("keep", UNSEEN)
@pytest.mark.parametrize("ask", [compare, audit])
@pytest.mark.parametrize("is_all", [False, True], ids=["in part", "all of it"])
def test_what_the_first_run_alone_computes_in_a_region_is_no_silence(ask, keep, is_all):
    u, v = _leaf(0, 3), _leaf(1, 3)
    kept = keep(lambda: u.tanh())

    def loss():
        with torch.no_grad() if ask is audit else stop_recording("t.kept_inside"):
            held = kept() if is_all else kept() * u
        return (held * v * u).sum()

    reason = "its first run alone meets some operations inside of regions"
    if ask is audit:
        assert reason in audit(loss, {"u": u, "v": v}).reason
    else:
        with pytest.raises(RuntimeError, match=rf"should do the same .* {reason}, .* not restored\.$"):
            compare(loss, {"u": u, "v": v})


@pytest.mark.parametrize("ask", [compare, audit])
def test_a_first_run_of_another_loss_is_no_silence(ask, monkeypatch):
    monkeypatch.setenv("STOPGRAD_IS_WARM", "")
    u = _leaf(0, 3)

    def loss():
        held = u.exp() if os.environ.get("STOPGRAD_IS_WARM") else u.sin()
        os.environ["STOPGRAD_IS_WARM"] = "1"
        return (u * (held.detach() if ask is audit else stop_gradient(held, "t.warm"))).sum()

    reason = "its first run alone gives another loss"
    if ask is audit:
        assert reason in audit(loss, {"u": u}).reason
    else:
        with pytest.raises(RuntimeError, match=reason):
            compare(loss, {"u": u})


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")
def test_code_that_each_run_writes_anew_is_no_lost_block():
    u, v = _leaf(0, 3), _leaf(1, 3)

    def loss():
        y = 1.0 * v
        y.register_hook(lambda g: g.clamp(-0.5, 0.5))
        value, push = torch.func.linearize(lambda x: x.sin() * x.detach(), u)
        return (value * y + push(y)).sum()

    assert not audit(loss, {"u": u, "v": v}).reason


def test_entries_that_a_comparison_has_made_in_a_cache_are_gone():
    w = _leaf(0, 3)

    @functools.cache
    def features(index):
        return w.sin() * index

    found = compare(lambda: (w * stop_gradient(features(2), "everybody.cached")).sum(), {"w": w})
    assert features.cache_info().currsize == 0
    torch.testing.assert_close(found.gradient(["everybody.cached"])["w"], 2 * (w.sin() + w * w.cos()).detach())


def test_entries_that_were_in_a_cache_before_stay():
    @functools.cache
    def layer(index):
        return _double(nn.Linear(3, 3))

    first, x = layer(0), _numbers(1, 2, 3)
    compare(lambda: (layer(0)(x) * stop_gradient(layer(1)(x), "everybody.cached")).sum(), first)
    assert layer(0) is first


BOUNDED_CACHE = """
import functools, torch
from toolkit import compare, stop_gradient

@functools.lru_cache(maxsize=2)
def factor(index):
    return float(index)

w = torch.tensor([0.3, 0.5], requires_grad=True)
factor(0), factor(1)
for _ in range(3):
    compare(lambda: sum((w * stop_gradient(w, "cached") * factor(i)).sum() for i in (2, 3, 4, 0)), w)
    assert [factor(i) for i in (0, 1, 2, 3, 4, 0, 1)] == [0, 1, 2, 3, 4, 0, 1]
"""


def test_a_bounded_cache_stays_whole():
    ran = subprocess.run([warm.python(), "-c", BOUNDED_CACHE], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


def reading_a_gradient(stop):
    w = _leaf(0, 3)
    w.grad = torch.ones_like(w)

    def loss():
        penalty = 0 if w.grad is None else (w.cos() * w.grad).sum()
        return (w.sin() * stop(w)).sum() + penalty

    return loss, {"w": w}


@pytest.mark.parametrize("ask", [compare, audit])
def test_a_program_that_reads_a_gradient_finds_it(ask):
    loss, params = reading_a_gradient(stop_gradient if ask is compare else torch.detach)
    w, before = params["w"], params["w"].grad
    found = ask(loss, params)
    assert found.loss == loss().item()
    torch.testing.assert_close(found.blocked["w"], (w.cos() * w - w.sin()).detach())
    torch.testing.assert_close(found.gradient([found.effects[0].name])["w"], (w.cos() * w).detach())
    assert w.grad is before
    assert before.tolist() == [1, 1, 1]


def test_an_optimiser_in_the_loss_steps_and_steps_back():
    torch.manual_seed(0)
    net, x = nn.Linear(3, 1), torch.randn(8, 3)
    optimizer = torch.optim.Adam(net.parameters())

    def loss():
        optimizer.zero_grad()
        (net(x) * stop_gradient(net(x), "everybody.inner")).mean().backward()
        optimizer.step()
        return net(x).square().mean()

    weight, bias = net.weight.detach().clone(), net.bias.detach().clone()
    compare(loss, net)
    assert torch.equal(net.weight, weight)
    assert torch.equal(net.bias, bias)
    assert not optimizer.state


# --- audits ------------------------------------------------------------------------------------------------------


class Tracked(torch.Tensor):
    """Takes itself apart, as pyro.ops.provenance.ProvenanceTensor does."""

    def __new__(cls, data):
        tracked = data.as_subclass(cls)
        tracked._inner = data
        return tracked

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        out = func(*[arg._inner if isinstance(arg, Tracked) else arg for arg in args], **(kwargs or {}))
        return cls(out) if isinstance(out, torch.Tensor) else out


@pytest.mark.parametrize(
    "stop", [lambda c: c.detach(), lambda c: c.data, torch.detach, torch.Tensor.detach, lambda c: c.clone().detach()]
)
def test_a_subclass_of_tensors_is_audited_as_what_it_is(stop):
    def program(stop):
        w = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
        return lambda: (w * stop(Tracked(w * w)))._inner, {"w": w}

    found = audit(*program(stop))
    assert found.valid
    assert torch.equal(found.blocked["w"], _backward(program, stop)["w"])
    assert torch.equal(found.gradient([found.effects[0].name])["w"], _backward(program, lambda c: c)["w"])
    assert found.effects[0].verdict.kind == "partial"


def test_a_subclass_of_tensors_that_is_stopped_in_place_has_one_place():
    w = torch.tensor(3.0, requires_grad=True)

    def loss():
        held = Tracked(w * w)
        held.detach_()
        return w * held._inner

    found = audit(loss, {"w": w})
    assert found.valid
    ((place, kind),) = found.kinds.items()
    assert (kind, found.sites[place].function.split(".")[-1]) == ("detach_()", "loss")
    assert found[place].leak == 18


@pytest.mark.parametrize("hook", [False, True])
def test_a_detach_inside_of_no_grad_has_one_meaning(hook):
    def program(stop):
        w = torch.tensor(2.0, requires_grad=True)

        def loss():
            with torch.no_grad():
                c = stop(w)
            v = w * c
            if hook:
                v.register_hook(lambda g: None)
            return v

        return loss, {"w": w}

    found = audit(*program(torch.detach))
    (place,) = (name for name, kind in found.kinds.items() if kind == "detach()")
    truth = {stop: _backward(program, stop)["w"] for stop in TENSOR[1:]}
    gradient = found.gradient([place])["w"]
    assert torch.equal(gradient, truth[TENSOR[2]])
    assert torch.equal(found.blocked["w"], truth[TENSOR[1]])
    assert found[place].ratio == (gradient / found.blocked["w"]).item()


@pytest.mark.parametrize("ask", [compare, audit])
def test_a_hook_that_removes_itself_leaves_one_gradient(ask):
    w = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
    stop = stop_gradient if ask is compare else torch.detach

    def loss():
        y = w.tanh()

        def hook(g):
            handle.remove()
            return 5 * g

        handle = y.register_hook(hook)
        return y + 1e-3 * stop(w) * w

    found = ask(loss, {"w": w})
    slope = 5 * (1 - torch.tensor(1.0, dtype=torch.float64).tanh() ** 2)
    torch.testing.assert_close(found.blocked["w"], slope + 1e-3)
    assert torch.equal(found.gradient([])["w"], found.blocked["w"])
    torch.testing.assert_close(found.gradient([found.effects[0].name])["w"], slope + 2e-3)
    assert found.effects[0].leak == pytest.approx(1e-3)


@torch.no_grad()
def _assigned(score):
    with torch.no_grad():
        q = score.exp()
        q /= q.sum()
    a = score.sigmoid()
    t = a * a
    a *= 2
    return t + a + q


def test_places_that_open_one_by_one_but_not_together_are_printed():
    w = nn.Parameter(torch.rand(4))
    found = audit(lambda: (w * _assigned(w.detach())).sum(), {"w": w})
    assert found.valid
    for text in (str(found), repr(found), found._repr_html_()):
        assert text
    found.to_dict()
    found.plot()


class UncheckedAssign(torch.autograd.Function):
    """As in torchdiffeq/_impl/rk_common.py."""

    @staticmethod
    def forward(ctx, scratch, value, index):
        ctx.index = index
        scratch.data[index] = value
        return scratch

    @staticmethod
    def backward(ctx, cotangent):
        return cotangent, cotangent[ctx.index], None


def _solved(y, step):
    """Return a step of Kutta's method, whose slopes are written into one buffer while views of it are saved."""
    slopes = torch.empty(len(y), 3, dtype=y.dtype)
    for index, weights in enumerate(([], [0.5], [-1.0, 2.0])):
        at = y + slopes[:, :index] @ (step * torch.tensor(weights, dtype=y.dtype))
        slopes = UncheckedAssign.apply(slopes, -at * at, (..., index))
    return (y + slopes @ (step * torch.tensor([1, 4, 1], dtype=y.dtype) / 6)).square().sum()


def test_a_change_through_data_that_the_gradient_survives_is_not_blamed():
    y, step = _leaf(0, 5), torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(_solved, (y, step))
    found = audit(lambda: _solved(y, step), {"y": y, "step": step})
    assert found.valid
    assert torch.equal(found.blocked["y"], torch.autograd.grad(_solved(y, step), y)[0])
    assert "of other values" not in str(found)


@pytest.mark.parametrize("is_read", [False, True])
def test_a_change_through_data_is_blamed_exactly_if_it_makes_the_gradient_wrong(is_read):
    def value(w):
        y = w.exp()  # its derivative is what stands in its memory
        z = y.sin()
        (y if is_read else z).data.add_(1.0)
        return (z * w).sum()

    w = torch.tensor([0.5, 1.5], dtype=torch.float64, requires_grad=True)
    found = audit(lambda: value(w), {"w": w})
    assert found.valid
    assert torch.equal(found.blocked["w"], torch.autograd.grad(value(w), w)[0])
    is_right = torch.autograd.gradcheck(value, (w,), raise_exception=False)
    assert is_right != is_read
    assert any(entry.reason == HIDDEN_CHANGE for entry in found.unopened) == is_read


def test_a_sum_in_another_order_is_equal_to_rounding():
    w, orders = torch.rand(999, requires_grad=True), queue.SimpleQueue()
    total = lambda order: sum(w[order].split(9)).sum()  # noqa: E731
    shuffles = [torch.randperm(999) for _ in range(20)]
    different = {total(order).item(): order for order in shuffles}
    for order in [*different.values()][:2] * 20:  # as on a processor whose threads add as they come
        orders.put(order)

    def loss():
        value = total(orders.get())
        return value * value * value.detach()

    found = audit(loss, {"w": w})
    assert found.valid, found.reason
    assert "equal to a plain run to rounding, not to the bit" in str(found)
    assert found.effects[0].ratio == pytest.approx(1.5, rel=1e-4)


def test_nothing_is_left_behind_in_what_the_program_keeps():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.kept = nn.Linear(4, 4), {}

        def forward(self, x):
            h = self.linear(x)
            self.features = self.kept["features"] = h.detach()
            return h

    net, x, log, last = Model(), torch.randn(2, 4), [], np.zeros(1)

    def loss():
        value = net(x).pow(2).mean()
        log.append(value.detach())
        last[0] = value.detach().numpy()
        return value

    loss()
    for _ in range(2):
        audit(loss, net)
        for kept in (net.features, net.kept["features"], *log):
            assert (kept.requires_grad, kept.grad_fn) == (False, None)
            kept.numpy()
    assert len(log) == 1


def test_nothing_is_left_behind_in_what_the_program_did_not_keep_yet():
    net, x, memory = nn.Linear(4, 4), torch.randn(2, 4), {}

    def loss():
        h = net(x)
        memory.setdefault("first", h.detach())
        net.seen = h.detach()
        return (h * memory["first"]).mean()

    audit(loss, net)
    for kept in [*memory.values(), *([net.seen] if hasattr(net, "seen") else [])]:
        assert (kept.requires_grad, kept.grad_fn) == (False, None)


@torch.no_grad()
def _codes(q):
    q = q.exp()
    q /= q.sum()
    return q


@pytest.mark.parametrize("normalise", [False, True])
def test_a_region_inside_that_cannot_open_does_not_close_the_one_around_it(normalise):
    def program(region):
        w = nn.Parameter(torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))

        def loss():
            if normalise:
                with torch.no_grad():
                    w.div_(w.norm())
            with region():
                q = _codes(2 * w) + w.sin()
            return (q * w.exp()).sum()

        return loss, {"w": w}

    found = audit(*program(torch.no_grad))
    assert found.valid
    (place,) = (effect.name for effect in found.effects if effect.verdict.kind == "partial")
    torch.testing.assert_close(found.gradient([place]), _backward(program, nullcontext), rtol=1e-12, atol=0)


# --- sparse gradients --------------------------------------------------------------------------------------------


def tied_embedding(stop):
    table, i = nn.Embedding(5, 3, sparse=True), torch.tensor([0, 2, 2])
    table.weight.data = _numbers(0, 5, 3)
    return lambda: (table(i) @ stop(table.weight).T).logsumexp(-1).sum(), table


def sparse_alone(stop):
    table, i = nn.Embedding(5, 3, sparse=True), torch.tensor([0, 2, 2])
    table.weight.data = _numbers(0, 5, 3)
    return lambda: (table(i) * stop(table(i + 1))).sum(), table


def dense_beside_sparse(stop):
    table, i = nn.Embedding(5, 3, sparse=True), torch.tensor([0, 2, 2])
    table.weight.data = _numbers(0, 5, 3)
    return lambda: (table(i) @ table.weight.T * stop(table(i) @ table.weight.T)).sum(), table


SPARSE = [tied_embedding, sparse_alone, dense_beside_sparse]


def _dense(gradient):
    return gradient.to_dense() if gradient.is_sparse else gradient


@pytest.mark.parametrize("program", SPARSE)
def test_sparse_gradients_are_compared(program):
    for found in _ask(program, TENSOR):
        assert found.effects[0].verdict.kind == "partial"
        parts = found.attribution().values()
        total = sum(_dense(part["weight"]) for part in parts)
        torch.testing.assert_close(total, _backward(program, TENSOR[2])["weight"])
        assert str(found)
        found.to_dict()


@pytest.mark.parametrize("program", SPARSE)
def test_sparse_gradients_are_differentiated_by_grad(program):
    loss, table = program(lambda input: input)
    (found,) = grad(loss(), table.weight)
    torch.testing.assert_close(_dense(found), _backward(program, TENSOR[2])["weight"])
    value = loss()
    (partial,) = grad(value, table.weight, stop_gradients=[table.weight])
    torch.testing.assert_close(_dense(partial), _backward(program, TENSOR[2])["weight"])


@pytest.mark.parametrize("program", SPARSE)
def test_sparse_gradients_have_a_field(program):
    def flattened(stop):
        loss, table = program(stop)
        return loss, {"w": table.weight}

    loss, params = flattened(stop_gradient)
    columns = []
    for index in range(15):
        sides = []
        for step in (1e-6, -1e-6):
            other, there = flattened(torch.detach)
            there["w"].data.view(-1)[index] += step
            sides.append(_dense(torch.autograd.grad(other(), there["w"])[0]).flatten())
        columns.append((sides[0] - sides[1]) / 2e-6)
    found = field_jacobian(loss, params)
    expected, vector = torch.stack(columns, 1), torch.linspace(-1, 1, 15, dtype=torch.float64)
    torch.testing.assert_close(found.jacobian, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found.jvp(vector), expected @ vector, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found.vjp(vector), expected.T @ vector, rtol=1e-6, atol=1e-6)


def constants():
    """Return kind -> a tensor that is no plain one."""
    dense = torch.eye(4, dtype=torch.float64).roll(1, 0) * 1.5
    rows = [_numbers(7, 1, 4), _numbers(8, 3, 4)]
    return {
        "coo": dense.to_sparse(),
        "csr": dense.to_sparse_csr(),
        "csc": dense.to_sparse_csc(),
        "bsr": dense.to_sparse_bsr((2, 2)),
        "bsc": dense.to_sparse_bsc((2, 2)),
        "nested": torch.nested.nested_tensor(rows),
        "jagged": torch.nested.nested_tensor(rows, layout=torch.jagged),
        "mkldnn": dense.float().to_mkldnn(),
    }


def _rows_of(constant):
    return torch.cat(constant.unbind()) if constant.is_nested else constant.to_dense().double()


KINDS = ["coo", "csr", "csc", "bsr", "bsc", "nested", "jagged", "mkldnn"]


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support", "ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_written", [False, True])
def test_a_constant_of_any_layout_is_kept_and_put_back(kind, is_written):
    def program(stop):
        constant, w = constants()[kind], _leaf(0, 4, 4)

        def loss():
            if is_written:
                constant.mul_(2.0)
            return (_rows_of(constant) @ w * stop(w.sin())).sum()

        return loss, {"w": w}

    for found in _ask(program, TENSOR):
        assert found.effects[0].verdict.kind == "partial"
    loss, params = program(stop_gradient)
    compare(loss, params)
    torch.testing.assert_close(loss(), program(stop_gradient)[0](), rtol=0, atol=0)
    if not is_written:
        assert field_jacobian(loss, params).size == 16
        assert graph(loss, params).reachable() == {"w"}


def test_values_of_a_sparse_constant_that_are_written_past_its_version_are_put_back():
    constant, w = torch.eye(4, dtype=torch.float64).to_sparse(), _leaf(0, 4, 4)

    def loss():
        constant._values().mul_(2.0)
        return (constant.to_dense() @ w * stop_gradient(w.sin(), "everybody.past")).sum()

    compare(loss, {"w": w})
    assert constant._values().eq(1).all()


def test_a_fake_tensor_beside_a_program_is_no_obstacle():
    shape, w = FakeTensorMode().from_tensor(torch.ones(3, 2)), _leaf(0, 4)
    loss = lambda: (w * stop_gradient(w, "everybody.fake")).sum() * shape.shape[0]  # noqa: E731
    assert compare(loss, {"w": w})["everybody.fake"].verdict.kind == "partial"


# --- how it is shown ---------------------------------------------------------------------------------------------


def _actor(runs):
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)), torch.randn(32, 8)

    def loss():
        runs[0] += 1
        y = net(x)
        return (y * stop_gradient(y.exp() * stop_gradient(y, "everybody.b"), "everybody.a")).mean()

    return loss, net, x


# An array of one number would be set back.
class Runs(list):
    def __setitem__(self, index, value):
        super().__setitem__(index, value)
        COUNTED.append(value)


COUNTED = []


@pytest.mark.parametrize("ask", [compare, audit])
def test_printing_runs_nothing_and_says_the_same_after_a_step(ask):
    loss, net, x = _actor(Runs([0]))
    found = ask(loss, net)
    before, shown = len(COUNTED), (str(found), repr(found), found._repr_html_(), found.to_dict())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    torch.autograd.backward(net(x).mean())
    optimizer.step()
    x.normal_()
    assert (str(found), repr(found), found._repr_html_(), found.to_dict()) == shown
    assert len(COUNTED) == before


def test_warnings_stand_in_the_page_as_well():
    loss, net, _ = _actor([0])
    found = compare(loss, net)
    (line,) = found.misleading()
    assert line in str(found)
    assert "single effects mislead" in found._repr_html_()


def _many(count):
    w = torch.tensor([1.0, -0.5], requires_grad=True)
    order = [(7 * i) % count for i in range(count)]

    def loss():
        return sum(((i + 1) * w * stop_gradient(w, f"everybody.{i}")).sum() for i in order)

    return loss, w, order


def test_long_tables_have_the_largest_leak_first():
    loss, w, order = _many(25)
    found = compare(loss, w)
    in_order, by_leak = [f"everybody.{i}" for i in order], [f"everybody.{i}" for i in range(24, -1, -1)]
    assert [effect.name for effect in found.effects] == in_order
    assert [row[0] for row in found.rows()[1:]] == by_leak
    assert [row[0] for row in found.rows(order="leak")[1:]] == by_leak
    assert [row[0] for row in found.rows(order="program")[1:]] == in_order
    assert [line.split()[0] for line in str(found).splitlines()[2:27]] == by_leak
    with pytest.raises(ValueError, match=r"`order` should be one of 'auto', 'program', 'leak'\. Found 'name'"):
        found.rows(order="name")


def test_short_tables_have_the_order_of_the_program():
    loss, w, order = _many(20)
    assert [row[0] for row in compare(loss, w).rows()[1:]] == [f"everybody.{i}" for i in order]


def test_an_effect_is_found_by_name_and_everything_has_a_repr():
    loss, net, _ = _actor([0])
    found = compare(loss, net)
    assert found["everybody.b"] is found.effects[[e.name for e in found.effects].index("everybody.b")]
    with pytest.raises(KeyError, match=r"Found 'everybody\.c'"):
        found["everybody.c"]
    w = torch.tensor([0.5], dtype=torch.float64, requires_grad=True)
    for shown in (found, audit(loss, net), graph(loss, net), field_jacobian(lambda: (w * w).sum(), w)):
        assert repr(shown).startswith(type(shown).__name__)
        assert " object at 0x" not in repr(shown)
        assert len(repr(shown)) < 500


# --- what is not state ---------------------------------------------------------------------------------------------


class _File(collections.abc.MutableMapping):
    """A mapping whose items are somewhere else: asking for them is slow, and clearing it deletes them."""

    def __init__(self):
        self.asked = queue.SimpleQueue()

    def __getitem__(self, key):
        self.asked.put(key)
        return torch.ones(3)

    def __setitem__(self, key, value):
        self.asked.put(key)

    def __delitem__(self, key):
        self.asked.put(key)

    def __iter__(self):
        self.asked.put("all")
        return iter(["rows"])

    def __len__(self):
        return 1


def test_a_mapping_that_is_a_file_is_neither_read_nor_cleared():
    w, file = _leaf(0, 3), _File()
    runs = itertools.repeat(None)

    def loss():
        next(runs)
        return (w * stop_gradient(w * file["rows"], "everybody.file")).sum()

    compare(loss, {"w": w})
    assert {file.asked.get() for _ in range(file.asked.qsize())} == {"rows"}


class _Saved(dict):
    """A dict that does more than one when it is cleared."""

    def clear(self):
        raise AssertionError("the disk would be cleared")

    def update(self, *others):
        raise AssertionError("the disk would be written to")


def test_methods_of_a_subclass_are_not_called():
    w, saved, log = _leaf(0, 3), _Saved(steps=0), collections.OrderedDict()

    def loss():
        saved["steps"] += 1
        log[saved["steps"]] = None
        return (w * stop_gradient(w, "everybody.saved")).sum() * saved["steps"]

    assert compare(loss, {"w": w}).loss == loss().item()
    assert (dict(saved), list(log)) == ({"steps": 1}, [1])


@pytest.mark.parametrize("installed", [False, True])
def test_state_in_the_globals_of_a_module_is_found_in_a_package_when_runs_differ(tmp_path, monkeypatch, installed):
    (tmp_path / "package_with_a_baseline.py").write_text(
        "import torch\nSTORE = {'mean': torch.zeros(())}\n"
        "def centred(value):\n"
        "    STORE['mean'] = 0.9 * STORE['mean'] + 0.1 * value.detach()\n"
        "    return value - STORE['mean']\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("toolkit.gradients._parts.INSTALLED", (str(tmp_path),) if installed else ())
    monkeypatch.delitem(sys.modules, "package_with_a_baseline", raising=False)
    package = importlib.import_module("package_with_a_baseline")

    w = torch.randn(3, requires_grad=True)
    found = audit(lambda: package.centred(w.square().sum()) * w.sum(), {"w": w})
    assert found.valid, found.reason
    assert ["state in the globals of a package" in remark for remark in found.remarks] == [True] * installed
    assert installed or package.STORE["mean"] == 0
    (effect,) = found.effects
    assert effect.verdict.kind == "partial"
    mean = package.STORE["mean"]
    centred = w.square().sum() - (0.9 * mean + 0.1 * w.square().sum())
    assert found.loss == pytest.approx((centred * w.sum()).item())
    (opened,) = torch.autograd.grad(centred * w.sum(), w)
    torch.testing.assert_close(found.gradient([effect.name])["w"], opened)
    assert package.STORE["mean"] is mean
    assert not mean.requires_grad


def test_the_sentence_of_an_error_is_whole():
    net, out = nn.Linear(2, 2), torch.empty(4, 2)
    x = torch.randn(2, 2)

    def loss():
        means = net(x)
        torch.cat([means.detach(), x], out=out)
        return (means * out[:2].sum()).sum()

    (entry,) = audit(loss, net).unopened
    assert entry.reason.startswith("opened, the program fails: cat(): functions with out=... arguments don't support ")


def test_keys_of_a_dict_are_not_printed():
    class Key:
        def __repr__(self):
            raise AssertionError("a tensor as key, as in the state of an optimiser, would take long")

    kept = {Key(): torch.ones(3)}
    w = torch.ones(3, requires_grad=True)
    assert audit(lambda: sum((w * value).sum() for value in kept.values()), {"w": w}).valid


def test_data_are_not_copied_and_may_not_be_written_to(monkeypatch):
    monkeypatch.setattr("toolkit.gradients._snapshot.LARGEST_STATE", 1000)
    w, small, large = _leaf(0, 3), torch.zeros(3, dtype=torch.float64), torch.ones(200, 3, dtype=torch.float64)
    cloned = []
    monkeypatch.setattr(torch.Tensor, "clone", lambda self: cloned.append(self.shape) or torch.clone(self))

    def loss():
        small.add_(1)
        return ((large * w).sum(0) * stop_gradient(w, "everybody.data") * small).sum()

    assert compare(loss, {"w": w})["everybody.data"].verdict.kind == "partial"
    assert small.eq(0).all()
    assert (200, 3) not in cloned
    monkeypatch.undo()
    monkeypatch.setattr("toolkit.gradients._snapshot.LARGEST_STATE", 1000)

    def writing():
        large.mul_(2)
        return loss()

    random_state, grad = torch.get_rng_state(), w.grad
    with pytest.raises(RuntimeError, match=r"`loss` should not write into its data. Found `large` changed, too large"):
        compare(writing, {"w": w})
    assert small.eq(0).all()
    assert torch.equal(torch.get_rng_state(), random_state)
    assert w.grad is grad


def test_a_loss_that_is_itself_state_is_told_as_it_was():
    w, total = _leaf(0, 3), torch.zeros((), dtype=torch.float64)

    def loss():
        total.zero_()
        total.add_((w * stop_gradient(w, "everybody.total")).sum())
        return total

    comparison = compare(loss, {"w": w})
    assert comparison.loss == w.detach().square().sum().item()
    assert comparison["everybody.total"].verdict.kind == "partial"
    assert total == 0


# --- programs that open blocks themselves -------------------------------------------------------------------------


def opens_a_block(stop):
    u = _leaf(1, 50, dtype=torch.float32)

    def loss():
        y = u.sin()
        with unblock("everybody.own"):  # its result is another tensor, whose gradients are summed before those of y
            opened = stop_gradient(y, "everybody.own")
        return (1.7 * y * stop(y) + opened.exp() * opened.cos() / 3 + y.square()).sum()

    return loss, {"u": u}


def test_blocks_that_a_program_opens_itself_give_the_bits_of_a_plain_run():
    plain = _backward(opens_a_block, torch.detach)["u"]
    for stop, ask in ((stop_gradient, compare), (torch.detach, audit)):
        found = ask(*opens_a_block(stop))
        assert torch.equal(found.blocked["u"], plain)
        assert len(found.effects) == 1
    loss, params = opens_a_block(torch.detach)
    with audited(params) as step:
        loss().backward()
    assert torch.equal(params["u"].grad, plain)
    assert torch.equal(step.audits[0].blocked["u"], plain)


def test_a_block_that_is_opened_meanwhile_does_not_change_those_left_out():
    x = _leaf(0, 2)
    with opened("everybody.asked", leaves_out=True), opened("everybody.own"):
        assert stop_gradient(x, "everybody.asked") is x
        assert stop_gradient(x, "everybody.own") is not x


# --- hooks on every node as it is made ------------------------------------------------------------------------------

new_in_2_14 = pytest.mark.skipif(
    not hasattr(torch.autograd.graph, "node_creation_hook"), reason="newer than torch 2.13"
)


def _clip(node):
    if not hasattr(node, "variable"):  # `torch.autograd.grad` does not come to leaves
        node.register_prehook(lambda gradients: tuple(g if g is None else g.clamp(-0.1, 0.1) for g in gradients))


def clipped_at_every_node(stop):
    u = _leaf(2, 6)

    def loss():
        with torch.autograd.graph.node_creation_hook(_clip):
            y = u.sin()
            return (y * stop(y) + y.exp()).sum()

    return loss, {"u": u}


@new_in_2_14
def test_hooks_on_every_node_are_no_linear_steps():
    _ask(clipped_at_every_node, TENSOR)
    loss, params = clipped_at_every_node(torch.detach)
    plain = _backward(clipped_at_every_node, torch.detach)["u"]
    with audited(params) as step:
        loss().backward()
    assert torch.equal(params["u"].grad, plain)
    assert [entry.reason for entry in step.audits[0].unopened] == [
        "a hook or a custom function behind it may not be linear"
    ]
    with pytest.raises(ValueError, match=r"second derivative\. Found a hook"):
        field_jacobian(*clipped_at_every_node(stop_gradient))


@new_in_2_14
def test_hooks_on_every_node_that_the_caller_has_set_are_no_linear_steps():
    plain = {i: _truth(clipped_at_every_node, [TENSOR], open)["u"] for i, open in enumerate([(), (0,)])}
    u = _leaf(2, 6)

    def loss():
        y = u.sin()
        return (y * stop_gradient(y, "everybody.asked") + y.exp()).sum()

    with torch.autograd.graph.node_creation_hook(_clip):
        found = compare(loss, {"u": u})
        assert torch.equal(found.blocked["u"], plain[0])
        assert found.effects[0].leak == pytest.approx((plain[1] - plain[0]).norm().item())


@new_in_2_14
def test_a_hook_that_logs_every_node_sees_no_gradient_that_is_none():
    u, norms = _leaf(2, 6), []

    def log(node):
        node.register_hook(lambda _, gradients: norms.append(gradients[0].norm()))

    with audited({"u": u}):
        with torch.autograd.graph.node_creation_hook(log):
            loss = (u.sin() * u.exp().detach()).sum()
        loss.backward()
    assert norms
