"""`audited`: a training step is answered as it runs, computes what it always computes, and leaves nothing behind."""

import contextlib
import copy
import functools
import gc
import itertools
import math
import pickle
import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F
from fuzzing import check_step, generate
from torch import is_grad_enabled, nn
from torch import is_grad_enabled as is_recording
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from toolkit import stop_gradient, stop_recording
from toolkit.gradients import audit, audited, field_jacobian
from toolkit.gradients.audit import _regions, variables
from toolkit.gradients.audit.page import page
from toolkit.gradients.audit.steps import Recorder, Unrecordable

# Under a dispatch mode torch itself crashes on some of the programs.
pytestmark = pytest.mark.keeps_its_sums


@pytest.mark.parametrize("chunk", [0, *(pytest.param(chunk, marks=pytest.mark.slow) for chunk in (1, 2)), 3])
def test_every_answer_and_every_step_is_that_of_the_text_without_its_stops(chunk):
    found = {seed: check_step(generate(seed)) for seed in range(15 * chunk, 15 * (chunk + 1))}
    wrong = {seed: finding.wrong for seed, finding in found.items() if finding.wrong}
    assert not wrong, "`check_step` of `tests/fuzzing.py` finds it in the program of this seed"
    assert sum(finding.answers for finding in found.values()) > 5


class _Learner:
    """A loop with an average of its weights, a memory, and a state that is carried over."""

    def __init__(self):
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
        self.target = copy.deepcopy(self.net)
        self.optimiser = torch.optim.Adam(self.net.parameters(), 1e-2)
        self.state, self.memory, self.losses = torch.zeros(16, 4), [], []

    def step(self):
        x = torch.randn(16, 4)
        with torch.no_grad():
            goal = self.target(x) + 0.1 * self.state
        scale = self.net(x).norm(dim=1, keepdim=True).detach()
        y = self.net(x + self.state) / scale
        loss = (y - goal).square().mean()
        if self.memory:
            loss = loss + (torch.stack(self.memory[-3:]).mean(0) * y).mean()
        self.optimiser.zero_grad()
        loss.backward()
        self.optimiser.step()
        self.state = y.detach()
        self.memory.append(y.detach()[:16])
        with torch.no_grad():
            for average, weight in zip(self.target.parameters(), self.net.parameters(), strict=True):
                average.lerp_(weight, 0.05)
        self.losses.append(loss.item())


def _bits(learner):
    return [*learner.losses, *(p.tolist() for p in [*learner.net.parameters(), *learner.target.parameters()])]


def test_a_run_with_an_audited_step_is_the_run_without():
    plain, watched = _Learner(), _Learner()
    for _ in range(8):
        plain.step()
    torch.manual_seed(1)
    torch.manual_seed(0)
    watched = _Learner()
    for index in range(8):
        if index in (3, 5):
            with audited(watched.net) as answer:
                watched.step()
            assert [effect.verdict.kind for effect in answer.audits[0].effects if effect.name.endswith(":17")]
        else:
            watched.step()
    assert _bits(watched) == _bits(plain)
    assert not watched.state.requires_grad
    assert not any(kept.requires_grad for kept in watched.memory)
    assert watched.state.grad_fn is None


def test_the_answer_is_that_of_an_audit_of_the_loss():
    net, x = nn.Linear(3, 3), torch.randn(5, 3)

    def loss():
        y = net(x)
        with torch.no_grad():
            t = net(y)
        return (y * y.exp().detach() - t).square().sum() + (y - y.detach()).square().sum()

    expected = audit(loss, net)
    with audited(net) as answer:
        loss().backward()
    (found,) = answer.audits
    assert found.loss == expected.loss
    assert {name: str(e.verdict) for name, e in _by_name(found).items()} == {
        name: str(e.verdict) for name, e in _by_name(expected).items()
    }
    for name, effect in _by_name(found).items():
        assert effect.leak == pytest.approx(_by_name(expected)[name].leak, rel=1e-5)
    assert all(torch.equal(found.blocked[name], expected.blocked[name]) for name in expected.blocked)
    assert all(torch.equal(parameter.grad, expected.blocked[name]) for name, parameter in net.named_parameters())


def _by_name(found):
    return {effect.name: effect for effect in found.effects}


@pytest.mark.portable
@pytest.mark.parametrize("seed", range(6))
def test_a_mean_that_is_subtracted_makes_no_gradient_of_rounding(seed):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 3))
    x = torch.randn(8, 3)
    with audited(net) as answer:  # the gradient of the last bias is zero, and comes out as rounding
        y = net(x)
        (y - y.mean(0).detach()).square().sum().backward()
    assert [str(effect.verdict) for effect in answer.audits[0].effects] == ["redundant"]


def test_each_backward_pass_has_its_answer():
    torch.manual_seed(0)
    generator, critic = nn.Linear(2, 3), nn.Linear(3, 1)
    with audited() as answer:
        fake = generator(torch.randn(4, 2))
        critic(fake.detach()).mean().backward()
        (-critic(fake).mean()).backward()
    first, second = answer.audits
    assert [effect.verdict.kind for effect in first.effects] == ["cuts"]
    assert set(first.effects[0].verdict.parameters) == {"generator.weight", "generator.bias"}
    assert not second.effects, "the stop is not on a path to the second loss"
    assert str(answer).count("blocked gradient") == 2


def test_named_blocks_are_answered_too():
    w = torch.tensor(3.0, requires_grad=True)
    with audited({"w": w}) as answer:
        with stop_recording("test.region"):
            scale = w * w
        (w * scale + stop_gradient(w, "test.value")).backward()
    leaks = {effect.name: effect.leak for effect in answer.audits[0].effects}
    assert leaks == {"test.region": 18.0, "test.value": 1.0}
    assert w.grad == 9.0


def _derived(x):
    return 3 * (x * x).detach()


def _direct(x):
    return x.exp().detach()


def _view(x):
    return (x * x).detach()[1:]


def _region(x):
    with torch.no_grad():
        return x * x * 2


def _used(x):
    held = (x * x).detach() * 1
    return held + held.sum() * x.detach()


@pytest.mark.parametrize("kept", [_derived, _direct, _view, _region, _used], ids=lambda kept: kept.__name__)
@pytest.mark.parametrize("by", ["method", "attribute"])
def test_a_leaf_that_the_step_makes_of_a_constant_gets_its_gradient(kept, by):
    def step(w, leaves, by="method"):  # without its stop, the attribute could not be set
        held = kept(w)
        if by == "method":
            held.requires_grad_()
        else:
            held.requires_grad = True
        leaves.append(held)
        return (w * held.sum() + held.square().sum()).sum()

    w = torch.tensor([3.0, 2.0], requires_grad=True)
    step(w, plain := [], by).backward()
    expected, w.grad = w.grad, None
    with audited({"w": w}) as answer:
        step(w, made := [], by).backward()
    assert torch.equal(w.grad, expected)
    assert made[0].is_leaf
    assert torch.equal(made[0].grad, plain[0].grad)
    found = {effect.name: effect.leak for effect in answer.audits[0].effects}
    again = {effect.name: effect.leak for effect in audit(lambda: step(w, []), {"w": w}).effects}
    assert found == pytest.approx(again)
    assert min(found.values()) > 1
    assert not answer.audits[0].unopened


def test_a_constant_may_be_told_that_it_requires_no_gradient():
    w = torch.tensor([3.0, 2.0], requires_grad=True)
    with audited({"w": w}) as answer:
        held = 3 * (w * w).detach()
        held.requires_grad_(False).requires_grad = False
        (w * held).sum().backward()
    assert torch.equal(w.grad, 3 * w.detach() ** 2)
    (effect,) = answer.audits[0].effects
    assert effect.leak == pytest.approx((6 * w.detach() ** 2).norm().item())
    assert not held.requires_grad


def test_a_function_behind_a_leaf_that_the_step_makes_is_not_taken_for_linear():
    class Clamped(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            return g.clamp(-1, 1)

    w = torch.tensor([3.0, 2.0], requires_grad=True)
    with audited({"w": w}) as answer:
        held = Clamped.apply(w.detach())
        early = held.sum()
        (w * held.requires_grad_() * early).sum().backward()
    assert "may not be linear" in answer.audits[0].unopened[0].reason


def test_a_counter_inside_of_a_region_keeps_nothing_blocked():
    torch.manual_seed(0)
    online = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    target, x = copy.deepcopy(online).requires_grad_(False), torch.randn(8, 4)

    def loss(teacher):
        with torch.no_grad():
            goal = teacher(x)
        return (2 * online(x) - goal).square().mean()

    with audited() as answer:
        loss(target).backward()
        loss(online).backward()
    frozen, trained = answer.audits
    (nothing,), (leak,) = frozen.effects, trained.effects
    assert (nothing.verdict.kind, leak.verdict.kind) == ("no-op", "partial")
    assert not frozen.unopened + trained.unopened


def _with_a_fast_path():
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), torch.randn(2, 3, 8)


def test_a_module_takes_its_fast_path_as_in_the_plain_step():
    online, x = _with_a_fast_path()
    target = copy.deepcopy(online).eval().requires_grad_(False)

    def goal():
        with torch.no_grad():
            return target(x)

    plain, told = goal(), audit(lambda: (online(x) - goal()).square().mean(), online)
    with audited() as answer:
        recorded = goal()
        (online(x) - recorded).square().mean().backward()
    assert torch.equal(recorded, plain)
    assert answer.audits[0].loss == told.loss
    assert [effect.verdict.kind for effect in (*answer.audits[0].effects, *told.effects)] == ["no-op"] * 2


def test_a_flag_that_is_set_inside_of_a_region_is_no_change_in_place():
    """An adapter is switched off there, so that the model without it gives the reference."""
    torch.manual_seed(0)
    net, adapter, x = nn.Linear(3, 2), nn.Linear(3, 2), torch.randn(4, 3)
    with audited(nn.ModuleList([net, adapter])) as answer:
        with torch.no_grad():
            adapter.requires_grad_(False)
            reference = net(x)
            adapter.requires_grad_(True)
        ((net(x) + adapter(x)) * reference).square().mean().backward()
    (audit,) = answer.audits
    assert [effect.verdict.kind for effect in audit.effects] == ["partial"]
    assert audit.unopened == []


def test_a_region_in_which_a_module_takes_a_fast_path_is_refused():
    net, x = _with_a_fast_path()
    net.eval()
    with pytest.raises(RuntimeError, match=r"test_audit_steps\.py:\d+:\d+: a module of torch takes a fast path"):
        with audited(), torch.no_grad():
            net(x)


def test_a_view_in_use_that_becomes_a_leaf_is_refused():
    w = torch.tensor([3.0, 2.0], requires_grad=True)
    with audited({"w": w}):
        held = (w * w).detach()[1:]
        in_use = weakref.ref(held)
        with pytest.raises(RuntimeError, match="a view of it, which is in use, becomes a leaf"):
            held.requires_grad_()
    assert in_use() is held


def test_state_that_a_function_writes_in_its_backward_pass_is_written_once():
    class Counted(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        def backward(ctx, g):
            mean.mul_(0.5).add_(1)
            mean[1:].add_(1)
            return g * mean.sum()

    w = torch.tensor([3.0, 2.0], requires_grad=True)

    def step():
        held = w.square()
        return (Counted.apply(w) * held.detach()).sum()

    mean = torch.zeros(2)
    step().backward()
    expected, plain, w.grad, mean = w.grad, mean, None, torch.zeros(2)
    with audited({"w": w}) as answer:
        step().backward()
    assert torch.equal(mean, plain)
    assert mean._version == plain._version
    assert torch.equal(w.grad, expected)
    assert torch.equal(answer.audits[0].blocked["w"], expected)


def _set_on(a, b):
    with torch.set_grad_enabled(True):
        return a * b


def _enabled(a, b):
    with torch.enable_grad(), torch.enable_grad():
        return a * b


@torch.enable_grad()
def _decorated(a, b):
    return a * b


def _on_for_good(a, b):
    torch.set_grad_enabled(True)
    return a * b


def _closed_again(a, b):
    with torch.enable_grad():
        with torch.no_grad():
            c = a * b
        return a * b + c


def _on_a_device(a, b):
    with torch.device("cpu"), torch.enable_grad():
        return a * b


@pytest.mark.parametrize(
    "inside", [_set_on, _enabled, _decorated, _on_for_good, _closed_again, _on_a_device], ids=lambda f: f.__name__
)
def test_a_region_opens_in_which_recording_is_switched_on_again(inside):
    w, v = (torch.tensor(values, requires_grad=True) for values in ([3.0, 2.0], [1.0, -2.0]))

    def loss():
        with torch.no_grad():
            a = w * w
            b = inside(a, v)
            c = b * w
        return (b * w + c * v).sum()

    expected = audit(loss, {"w": w, "v": v})
    with audited({"w": w, "v": v}) as answer:
        loss().backward()
    (found,) = answer.audits
    assert all(torch.equal(found.blocked[name], expected.blocked[name]) for name in "wv")
    assert torch.equal(w.grad, expected.blocked["w"])
    assert torch.equal(v.grad, expected.blocked["v"])
    assert not found.unopened
    assert {e.name: e.leak for e in found.effects} == pytest.approx({e.name: e.leak for e in expected.effects})


def test_a_transform_inside_of_a_region_is_refused_before_the_backward_pass():
    w = torch.tensor([3.0, 2.0], requires_grad=True)
    with audited({"w": w}):
        with torch.no_grad():
            slope = torch.func.grad(lambda x: x.pow(3).sum())(w)
        with pytest.raises(RuntimeError, match=r"a transform of torch\.func switches recording on again"):
            (w * slope).sum().backward()
    assert w.grad is None


def test_a_region_in_a_function_that_a_derivative_of_the_step_runs_again():
    class Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return held(x).clone()

        @staticmethod
        def backward(ctx, g):
            with torch.enable_grad():
                x = ctx.saved_tensors[0].clone().requires_grad_()
                y = held(x) + 2 * x
            return torch.autograd.grad(y, x, g)[0]

    @stop_recording("test.held")
    def held(x):
        return x.pow(3)

    def step():
        (slope,) = torch.autograd.grad(Again.apply(w * 1.0).square().sum(), w)
        return (w * slope).sum()

    w = torch.tensor([3.0, 2.0], requires_grad=True)
    plain = step()
    with audited({"w": w}) as answer:
        watched = step()
        watched.backward()
    assert watched.item() == plain.item()
    assert [entry.site for entry in answer.audits[0].unopened] == ["test.held"]


def test_nothing_behind_a_stop_runs():
    calls = []

    class Noted(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        def backward(ctx, g):
            calls.append(g)
            return 2 * g

    w = torch.tensor(3.0, requires_grad=True)
    with audited({"w": w}) as answer:
        loss = w * Noted.apply(w).detach()
        loss.backward()
    assert w.grad == 6.0
    assert not calls
    assert "may not be linear" in answer.audits[0].unopened[0].reason


def test_a_region_with_a_function_behind_it_is_refused_before_the_backward_pass():
    class Sqrt(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.sqrt()

        @staticmethod
        def backward(ctx, g):
            return g / (2 * ctx.saved_tensors[0].sqrt())

    w, v = torch.zeros(2, requires_grad=True), torch.ones(2, requires_grad=True)
    root = Sqrt.apply(w)
    with audited():
        root = Sqrt.apply(w)
        with torch.no_grad():
            held = root + v
        loss = (v * held).sum()
        with pytest.raises(RuntimeError, match="The step should be recorded without these places"):
            loss.backward()
    assert v.grad is None


def test_a_checkpoint_computes_the_same_again():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.BatchNorm1d(3))
    x = torch.randn(6, 3)

    def loss():
        def body(x):
            y = net(x)
            return y * y.detach()

        return checkpoint(body, x, use_reentrant=False).sum()

    state = copy.deepcopy(net.state_dict())
    torch.manual_seed(5)
    loss().backward()
    plain = {name: parameter.grad for name, parameter in net.named_parameters()}
    after, net.running = copy.deepcopy(net.state_dict()), None
    net.load_state_dict(state)
    net.zero_grad()
    torch.manual_seed(5)
    with audited(net) as answer:
        loss().backward()
    assert all(torch.equal(parameter.grad, plain[name]) for name, parameter in net.named_parameters())
    assert all(torch.equal(value, after[name]) for name, value in net.state_dict().items())
    assert [effect.verdict.kind for effect in answer.audits[0].effects] == ["partial"]


def test_low_precision_and_cached_casts():
    torch.manual_seed(0)
    net, x = nn.Linear(4, 4), torch.randn(8, 4)

    def step():
        net.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            with torch.no_grad():
                t = net(x)
            loss = (net(x) - t.tanh()).square().sum()
        loss.backward()
        return [parameter.grad.clone() for parameter in net.parameters()]

    plain = step()
    with audited(net):
        watched = step()
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))


def _refined(net, x, *, around, again):
    """Return the loss of a net times a layer that an inner loop trains, in a region with or beside autocast."""
    layer = nn.Linear(4, 4)
    layer.load_state_dict({"weight": torch.eye(4), "bias": torch.zeros(4)})
    optimizer = torch.optim.SGD(layer.parameters(), 0.5)
    cast = functools.partial(torch.autocast, "cpu", torch.bfloat16)
    with torch.no_grad(), cast() if around else contextlib.nullcontext():
        for _ in range(3):
            with torch.enable_grad(), contextlib.nullcontext() if around else cast():
                error = (layer(x).float() - 1).square().mean()
            optimizer.zero_grad()
            error.backward()
            optimizer.step()
            if not again:
                break
        held = x * layer.weight.sum() if around else layer(x)
    return (net(x) * held.float()).sum()


@pytest.mark.parametrize(("around", "again"), [(True, True), (True, False), (False, True), (False, False)])
def test_a_cast_that_autocast_keeps_past_an_update_is_not_made_anew(around, again):
    torch.manual_seed(0)
    net, x = nn.Linear(4, 4), torch.randn(8, 4)
    plain = _refined(net, x, around=around, again=again)
    if around and again:  # the plain step computes with the cast from before the first update
        with audited(net), pytest.raises(RuntimeError, match="autocast keeps the cast of a weight"):
            _refined(net, x, around=around, again=again)
        return
    with audited(net):
        assert torch.equal(_refined(net, x, around=around, again=again), plain)


def test_a_leak_that_is_rounding_in_low_precision_is_below_the_noise():
    torch.manual_seed(0)
    net, x = nn.Linear(5, 3), torch.randn(16, 5)
    with audited(net) as answer:
        with torch.autocast("cpu", torch.bfloat16):
            y = net(x)
            shift = y.detach().amax(1, keepdim=True)
            loss = ((y - shift).exp().sum(1).log() + shift.squeeze(1)).mean()
        loss.backward()
    assert [effect.verdict.kind for effect in answer.audits[0].effects] == ["noise"]


def test_copies_of_stopped_values_are_constants():
    net = nn.Linear(4, 4)
    with audited(net) as answer:
        y = net(torch.ones(2, 4)).tanh()
        copies = [copy.deepcopy(y.detach()), pickle.loads(pickle.dumps(y.detach()))]
        held = pickle.loads(pickle.dumps(y))
        average = copy.deepcopy(net)
        (y * sum(copies)).sum().backward()
    assert [copied.requires_grad for copied in copies] == [False, False]
    assert held.requires_grad
    assert all(parameter.requires_grad for parameter in average.parameters())
    assert set(answer.audits[0].blocked) == {"weight", "bias"}
    assert [escape.kind for escape in answer.audits[0].escapes] == ["deepcopy()", "pickle"]


def test_a_parameter_without_a_path_is_listed():
    net = nn.ModuleDict({"used": nn.Linear(2, 1), "unused": nn.Linear(2, 1)})
    with audited(net) as answer:
        net["used"](torch.ones(2)).sum().backward()
    assert set(answer.audits[0].unreached) == {"unused.weight", "unused.bias"}
    assert "no path to the loss: unused: bias, weight" in str(answer)


def test_a_parameter_of_the_optimizer_without_a_path_is_listed():
    net = nn.ModuleDict({"used": nn.Linear(2, 1), "unused": nn.Linear(2, 1)})
    net["scale"] = nn.Linear(1, 1, bias=False)
    other, frozen = nn.Linear(2, 1), nn.Parameter(torch.ones(1), requires_grad=False)
    optimizers = [torch.optim.SGD([*net.parameters(), frozen], lr=0.1), torch.optim.SGD(other.parameters(), lr=0.1)]
    with audited() as answer:
        (net["used"](torch.ones(2)) * net["scale"].weight.item()).sum().backward()
    assert sorted(name.split(".", 1)[-1] for name in answer.audits[0].unreached) == [
        "scale.weight", "unused.bias", "unused.weight"
    ]  # fmt: skip
    assert set(answer.audits[0].blocked) == {"net.used.weight", "net.used.bias"}
    assert len(optimizers) == 2


@pytest.mark.parametrize("hides", [False, True])
def test_parameters_are_named_by_the_variables_that_hold_them(hides, monkeypatch):
    class Agent:
        def __init__(self):
            self.temperature = torch.zeros(1, requires_grad=True)
            self.actor, self.critic = nn.Linear(2, 1), nn.Linear(2, 1)

    agent, weights, biases = Agent(), [torch.ones(1, requires_grad=True)], {"b": torch.ones(1, requires_grad=True)}
    scale = torch.ones(1, requires_grad=True)
    monkeypatch.setattr(variables, "gc", gc)
    if hides:
        gc.freeze()
    with audited() as step:
        y = (agent.critic(agent.actor.weight) * scale + weights[0]).detach() * agent.temperature.exp() + biases["b"]
        y.sum().backward()
    assert gc.get_freeze_count() == 0
    gc.freeze()
    assert set(step.audits[0].effects[0].verdict.parameters) == {
        *("agent.actor.weight", "agent.critic.bias", "agent.critic.weight", "scale", "weights[0]")
    }
    assert set(step.audits[0].blocked) >= {"agent.temperature", "biases['b']"}


def test_a_stop_inside_of_a_module_is_at_the_line_that_asks_for_it():
    net, other = nn.Linear(2, 2), nn.Linear(2, 2)
    with audited(net) as step:
        other.load_state_dict(net.state_dict())
        y = torch.func.functional_call(net, net.state_dict(), net.weight)
        nn.utils.clip_grad_norm_([net.weight], 1.0)
        (y * net.weight).sum().backward()
    (answer,) = step.audits
    first = test_a_stop_inside_of_a_module_is_at_the_line_that_asks_for_it.__code__.co_firstlineno
    lines = {answer.kinds[name] + str(site.line - first): site.file for name, site in answer.sites.items()}
    assert lines == dict.fromkeys(["detach()3", "no_grad3", "detach()4", "no_grad5"], __file__)
    assert [str(effect.verdict) for effect in answer.effects] == ["cuts all paths to [bias]", "no-op"]


def test_a_function_decorated_inside_of_a_region_leaves_the_region_closed():
    w = torch.tensor([0.3, 0.5], requires_grad=True)

    def loss():
        with torch.no_grad():

            @torch.set_grad_enabled(False)
            def held(x):
                return x.exp()

            y = w.square() + held(w)
        return (w * y).sum()

    with audited() as step:
        loss().backward()
    (answer,) = step.audits
    assert torch.equal(w.grad, (w.square() + w.exp()).detach())
    assert not answer.unopened
    (region,) = (effect for effect in answer.effects if answer.kinds[effect.name] == "no_grad")
    assert region.leak == pytest.approx((2 * w.square()).norm().item(), rel=1e-6)


def test_a_call_into_torchscript_is_listed_if_stops_are_in_it():
    compiled = torch.jit.CompilationUnit(
        "def held(x):\n    return x.detach()\ndef free(x):\n    return x.exp()\ndef idle(x):\n    return x.data\n"
    )
    w = torch.ones(2, requires_grad=True)
    with audited() as step:
        (compiled.held(w) * compiled.free(w)).sum().backward()
    (answer,) = step.audits
    assert [(entry.kind, answer.sites[entry.site].function) for entry in answer.unopened] == [
        ("TorchScript", "test_a_call_into_torchscript_is_listed_if_stops_are_in_it")
    ]
    assert not answer.effects


def test_the_scale_of_a_loss_is_said():
    w, scaler = torch.ones(2, requires_grad=True), torch.amp.GradScaler("cpu", init_scale=8.0)
    with audited() as step:
        loss = (w * w.detach()).sum()
        scaler.scale(loss).backward(retain_graph=True)
        loss.mul(8.0).backward()
    assert [[remark for remark in answer.remarks if "GradScaler" in remark] for answer in step.audits] == [
        ["a GradScaler has multiplied the loss, gradients and leaks by 8"],
        [],
    ]


def test_stops_outside_of_the_graph_are_counted_and_listed():
    """The ratio of PPO that is only logged, and a key that reaches the next loss by its values."""
    w, memory = torch.tensor([1.0, 2.0], requires_grad=True), list[float]()
    with audited({"w": w}) as step:
        kept = (w * w.detach()).sum()
        with torch.no_grad():
            memory.append((w * w).sum().item())
        logged = w.exp().detach().mean()
        (kept * memory[0]).backward()
    (answer,) = step.audits
    assert [effect.verdict.kind for effect in answer.effects] == ["partial"]
    assert [answer.kinds[place] for place in answer.off_graph] == ["no_grad", "detach()"]
    assert answer.summary() == "3 stops: 1 load-bearing (1 partial), 2 outside of the graph"
    listed = f"no_grad at {answer.off_graph[0]}, detach() at {answer.off_graph[1]}"
    assert f"ran outside of the graph of this loss: {listed}" in answer.text().splitlines()
    assert answer.to_dict()["off_graph"] == answer.off_graph
    drawn = page(answer, "step", "command")
    assert "<h2>Not opened</h2>" in drawn.partition("<h2>Outside of the graph</h2>")[0]
    assert drawn.count("It ran, and no path of this loss crosses it.") == 2
    assert f"to 1 parameters, cut by {answer.effects[0].name}<" in drawn
    assert logged > 0


def test_a_stop_of_another_loss_of_the_step_is_outside_of_the_graph():
    w = torch.tensor([1.0, 2.0], requires_grad=True)
    with audited({"w": w}) as step:
        (w * w.detach()).sum().backward()
        w.square().sum().backward()
    first, second = step.audits
    assert (first.off_graph, second.off_graph) == ([], [first.effects[0].name])
    assert second.effects == []


def test_a_later_backward_pass_says_that_it_is_answered_alone():
    """Opened in the first pass, the stop would change the weight that the second one reads."""
    w = torch.tensor([1.0, 2.0], requires_grad=True)
    with audited({"w": w}) as step:
        for _ in range(2):
            (w * w.detach()).sum().backward()
            w.data -= 0.1 * w.grad
    alone = "answered for this backward pass alone: in the earlier ones of the step every stop stays in place"
    assert [alone in answer.text().splitlines() for answer in step.audits] == [False, True]


def test_a_leak_below_the_rounding_of_bfloat16_is_that_of_single_precision():
    """The difference of two gradients in bfloat16 is mostly rounding here; the leak has a graph of its own."""
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 5)), torch.randn(32, 6)

    def loss(half, stops=lambda confidence: confidence.detach()):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half):
            y = net(x)
            confidence = y.softmax(-1).amax(-1).mean()
            return nn.functional.cross_entropy(y, x[:, :5].argmax(1)) * (1 + 1e-3 * stops(confidence))

    def leak(half):
        with audited(net) as answer:
            loss(half).backward()
        return answer.audits[0].effects[0].leak

    def removed(half):
        gradients = (torch.autograd.grad(one, net.parameters()) for one in (loss(half), loss(half, lambda one: one)))
        return torch.cat([(b - a).flatten() for a, b in zip(*gradients, strict=True)]).norm().item()

    exact = leak(half=False)
    assert removed(half=False) == pytest.approx(exact, rel=1e-3)  # a leak of 1e-3 of the gradient has four digits
    assert leak(half=True) == pytest.approx(exact, rel=2**-6)  # a few roundings of bfloat16
    assert removed(half=True) != pytest.approx(exact, rel=0.5)


def test_a_scaler_that_is_not_enabled_is_no_scaler():
    w, scaler = torch.ones(2, requires_grad=True), torch.amp.GradScaler("cpu", enabled=False)
    with audited() as step:
        scaler.scale((w * w.detach()).sum().div(torch.tensor(2.0))).backward()
    assert step.audits[0].remarks == []


def test_the_graph_is_drawn():
    w = torch.tensor(3.0, requires_grad=True)
    with audited({"w": w}) as answer:
        (w * (w * w).detach()).backward()
    assert answer.audits[0].graph().blocks == (answer.audits[0].effects[0].name,)


def test_a_step_that_raises_leaves_torch_as_it_was():
    detach, backward = torch.Tensor.detach, torch.Tensor.backward
    with pytest.raises(ZeroDivisionError), audited():
        1 / 0  # noqa: B018
    assert (torch.Tensor.detach, torch.Tensor.backward) == (detach, backward)


def test_no_tensor_keeps_a_cut():
    w = torch.ones(3, requires_grad=True)
    kept = []
    with audited({"w": w}):
        y = w * 2
        kept += [y.detach(), y.detach()[1:], y.data, y]
        y.sum().backward()
    assert [tensor.requires_grad for tensor in kept] == [False, False, False, True]
    kept[0].numpy()
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kept[1].add_(1)


def test_wrappers_of_torch_func_that_are_kept_elsewhere_do_not_disturb():
    kept = []
    w = torch.tensor(3.0, requires_grad=True)
    torch.func.vmap(torch.func.grad(lambda x: kept.append(x) or x.square().sum()))(torch.ones(2, 2))
    with audited({"w": w}) as step:
        (w * (w * w).detach()).backward()
    assert step.audits[0].effects[0].leak == 18
    assert len(kept) == 1


def test_a_stop_of_an_earlier_step_counts_only_in_the_loss():
    w = torch.tensor(3.0, requires_grad=True)
    earlier = w * w
    earlier.backward()
    with audited({"w": w}) as logging:
        shown = earlier.detach()
        float(shown + 1)
        (w * (w * w).detach()).backward()
    assert [effect.leak for effect in logging.audits[0].effects] == [18]
    assert not logging.audits[0].unopened
    with audited({"w": w}) as using:
        (w * earlier.detach()).backward()
    audit = using.audits[0]
    assert not audit.effects
    assert audit.unopened[0].reason == "it stops a tensor of an earlier backward pass, whose graph is freed"
    assert shown.grad_fn is None


def test_a_stop_of_an_earlier_step_whose_graph_is_kept_is_not_said_to_be_freed():
    w = torch.tensor(3.0, requires_grad=True)
    earlier = w * w
    earlier.backward(retain_graph=True)
    with audited({"w": w}) as answer:
        (w * earlier.detach()).backward()
    assert answer.audits[0].unopened[0].reason == "it stops a tensor from before this step"
    with audited({"w": w}):
        with torch.no_grad():
            held = earlier.sin()
        with pytest.raises(RuntimeError, match="it stops a tensor from before this step"):
            (w * held).backward()


@pytest.mark.parametrize("is_freed", [True, False])
def test_a_stop_in_front_of_a_freed_graph_of_frozen_parameters_is_not_redundant(is_freed):
    torch.manual_seed(0)
    world, actor = nn.Linear(2, 3), nn.Linear(3, 1)
    with audited() as answer:
        state = world(torch.ones(4, 2)).tanh()
        state.sum().backward(retain_graph=not is_freed)
        world.requires_grad_(False)
        actor(state.detach()).square().sum().backward()
    audit = answer.audits[1]
    assert ["whose graph is freed" in entry.reason for entry in audit.unopened] == [True] * is_freed
    assert [effect.verdict.kind for effect in audit.effects] == ["redundant"][is_freed:]


@pytest.mark.parametrize("is_kept", [True, False])
def test_gradients_are_asked_for_inside_of_the_step_while_its_graph_is_kept(is_kept):
    w = torch.tensor(3.0, requires_grad=True)
    with audited({"w": w}) as step:
        with torch.no_grad():
            scale = w.exp()
        (w * scale).backward(retain_graph=is_kept)
        (place,) = [effect.name for effect in step.audits[0].effects]
        if is_kept:
            assert step.audits[0].gradient([place])["w"] == pytest.approx(4 * math.exp(3), rel=1e-6)
        else:
            with pytest.raises(RuntimeError, match=r"graph is freed; ask inside of `audited`, after `backward\(retain"):
                step.audits[0].gradient([place])
    with pytest.raises(RuntimeError, match="the step is over"):
        step.audits[0].gradient([place])


def test_a_change_through_data_in_front_of_the_backward_pass_is_refused_with_its_place():
    w, v = (torch.tensor(number, requires_grad=True) for number in (3.0, 0.5))

    @audited({"w": w, "v": v})
    def step():
        loss = w * w.exp() * v
        w.data.mul_(0.5)
        loss.backward()

    with pytest.raises(RuntimeError, match=r"Found [\w/.]+:\d+:9: the memory is changed where autograd cannot see it"):
        step()


def test_recording_that_is_switched_off_inside_of_a_region_is_on_again_behind_it():
    w = torch.tensor(3.0, requires_grad=True)
    with audited({"w": w}) as step:
        with torch.no_grad():
            torch.set_grad_enabled(False)
            scale = w * w
        (w * scale + (w * w).detach()).backward()
    assert w.grad == 9
    assert [effect.leak for effect in step.audits[0].effects] == [0, 6]
    assert "without `with`" in step.audits[0].unopened[0].reason


@pytest.mark.parametrize(
    "is_on", [lambda: torch._C.is_grad_enabled(), lambda: is_grad_enabled(), lambda: torch.is_grad_enabled()]
)
def test_a_switch_back_inside_of_a_region_does_not_switch_recording_on(is_on):
    w = torch.tensor(3.0, requires_grad=True)
    with audited({"w": w}) as step:
        with torch.no_grad():
            before = is_on()
            torch.set_grad_enabled(False)
            torch.set_grad_enabled(before)
            scale = w * w
        (w * scale).backward()
    assert w.grad == 9
    *switches, region = step.audits[0].unopened
    assert [entry.kind for entry in switches] == ["set_grad_enabled"] * 2
    assert region.reason == "`is_grad_enabled()` answers in it as if it were closed"


@pytest.mark.parametrize("kind", ["closure", "class", "instance", "static"])
def test_a_closure_or_a_class_that_holds_the_question_gets_the_plain_answer(kind, monkeypatch):
    class Asking:
        is_on = torch.is_grad_enabled
        is_static = staticmethod(torch.is_grad_enabled)

    held, before = torch.is_grad_enabled, dict(vars(Asking))
    kinds = {"closure": lambda: held(), "class": lambda: Asking.is_on(), "instance": lambda: Asking().is_on()}
    is_on = {**kinds, "static": lambda: Asking().is_static()}[kind]
    w = torch.tensor(3.0, requires_grad=True)
    if kind == "static":
        monkeypatch.setattr(_regions, "gc", gc)
        gc.freeze()  # objects that `gc` then hides
    with audited({"w": w}) as step:
        with torch.no_grad():
            scale = w * w if is_on() else 2 * w
        (w * scale).backward()
    gc.freeze()
    assert w.grad == 6
    (region,) = step.audits[0].unopened
    assert region.reason == "`is_grad_enabled()` answers in it as if it were closed"
    assert held is torch.is_grad_enabled
    assert dict(vars(Asking)) == before


def _leaks(answer, name=""):
    """Return parameter -> leak of the block, or of the only one."""
    (effect,) = [effect for effect in answer.audits[0].effects if not name or effect.name == name]
    return {parameter: part.leak for parameter, part in effect.per_parameter.items()}


@pytest.mark.parametrize("form", ["region", "detach"])
def test_a_checkpoint_inside_of_a_checkpoint(form):
    w, u = torch.tensor([2.0, 0.5], requires_grad=True), torch.tensor([3.0, 1.0], requires_grad=True)

    def inner(x):
        if form == "detach":
            return (w * x).sin().detach() * x
        with torch.no_grad():
            scale = (w * x).sin()
        return scale * x

    def loss(inner):
        return checkpoint(lambda x: checkpoint(inner, x, use_reentrant=False).tanh(), u, use_reentrant=False).sum()

    with audited({"w": w, "u": u}) as answer:
        loss(inner).backward()
    assert w.grad is None
    plain = u.grad
    opened = torch.autograd.grad(loss(lambda x: (w * x).sin() * x), [w, u])
    expected = [opened[0].norm().item(), (opened[1] - plain).norm().item()]
    assert list(_leaks(answer).values()) == pytest.approx(expected, rel=1e-5)


def test_a_checkpoint_inside_of_hooks_on_saved_tensors():
    w, u = torch.tensor(2.0, requires_grad=True), torch.tensor(3.0, requires_grad=True)

    def inner(x):
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone), torch.no_grad():
            scale = w * x
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
            return scale * x + (w * x).detach()

    with audited({"w": w, "u": u}) as answer:
        checkpoint(inner, u, use_reentrant=False).backward()
    leaks = [[part.leak for part in effect.per_parameter.values()] for effect in answer.audits[0].effects]
    assert sorted(leaks) == [[3, 2], [9, 6]]


def test_a_checkpoint_that_writes_to_buffers():
    torch.manual_seed(0)
    nets = [nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    x = torch.randn(4, 3)
    for net in nets:
        with audited(net) if net is nets[0] else contextlib.nullcontext():
            y = checkpoint(net, x, use_reentrant=False)
            (y * y.detach()).sum().backward()
    for (name, a), b in zip(nets[0].named_parameters(), nets[1].parameters(), strict=True):
        assert torch.equal(a.grad, b.grad), name
    for a, b in zip(nets[0].buffers(), nets[1].buffers(), strict=True):
        assert torch.equal(a, b)


def test_a_stop_of_what_it_stopped_already():
    w, v = torch.tensor(3.0, requires_grad=True), torch.tensor(2.0, requires_grad=True)
    with audited({"w": w, "v": v}) as answer:
        held = stop_gradient(w, "audit_steps.twice")
        (v + (held - stop_gradient(held, "audit_steps.twice"))).backward()
    assert _leaks(answer, "audit_steps.twice") == {"w": 0, "v": 0}


def test_a_region_does_not_stop_a_tensor_that_only_passes_through_it():
    w, v = torch.tensor(3.0, requires_grad=True), torch.tensor(2.0, requires_grad=True)
    with audited({"w": w, "v": v}) as answer:
        with torch.no_grad():
            held = w.detach()
        (v * held).backward()
    leaks = [effect.per_parameter["w"].leak for effect in answer.audits[0].effects]
    assert leaks == [2], "without its detach, the line in the region is `held = w`"


def test_a_derivative_inside_of_a_checkpoint_ends_at_its_regions_when_it_is_computed_again():
    u = torch.tensor([3.0, 1.0], requires_grad=True)

    def inner(x):
        x = x * 1.0
        with torch.no_grad():
            scale = x.sin()
        (slope,) = torch.autograd.grad((scale * x * x).sum(), x, create_graph=True)
        return slope.tanh()

    checkpoint(inner, u, use_reentrant=False).sum().backward()
    plain, u.grad = u.grad, None
    with audited({"u": u}):
        checkpoint(inner, u, use_reentrant=False).sum().backward()
    assert torch.equal(u.grad, plain)


def test_recording_switched_on_in_a_region_of_a_transform():
    u = torch.tensor([3.0, 1.0], requires_grad=True)

    def f(x):
        with torch.no_grad():
            scale = x.sin()
            with torch.enable_grad():
                live = x.cos()
        return scale * live

    def loss():
        value, pull = torch.func.vjp(f, u)
        return (pull(value)[0] * u).sum()

    loss().backward()
    plain, u.grad = u.grad, None
    with audited({"u": u}) as answer:
        value = loss()
        value.backward()
    assert torch.equal(u.grad, plain)
    assert torch.equal(value, loss())
    assert answer.audits[0].valid


def test_a_region_whose_saved_values_are_overwritten_is_refused_by_name():
    v = torch.tensor([3.0, 1.0], requires_grad=True)

    def step():
        with torch.no_grad():
            buffer = torch.zeros(2)
            buffer[0] = v[0]
            held = buffer[:1].sin()
            buffer[0:] = v
        (held * v).sum().backward()

    with pytest.raises(RuntimeError, match=r"test_audit_steps\.py:\d+.*changed in place that a derivative"), audited(v):
        step()


def test_no_hook_runs_behind_a_closed_region():
    w, u = torch.tensor([2.0, 0.5], requires_grad=True), torch.tensor([3.0, 1.0], requires_grad=True)
    with audited({"w": w, "u": u}) as answer:
        doubled = w * 2
        doubled.register_hook(lambda g: g / (1 + g.norm()))
        with torch.no_grad():
            made = doubled * u
        made.requires_grad_()
        (u * made + doubled.exp() * doubled.sin().detach()).sum().backward()
    assert answer.audits[0].valid


@pytest.mark.slow
def test_a_backward_pass_that_draws_draws_the_same_for_every_answer():
    class Noisy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            return g * torch.rand(())

    w, u = torch.tensor(2.0, requires_grad=True), torch.tensor(3.0, requires_grad=True)
    for form in ("detach", "region"):
        torch.manual_seed(0)
        with audited({"w": w, "u": u}) as answer:
            if form == "region":
                with torch.no_grad():
                    held = w * u
            else:
                held = (w * u).detach()
            Noisy.apply(u * held).backward()
        torch.manual_seed(0)
        share = torch.rand(()).item()
        (effect,) = answer.audits[0].effects
        assert effect.verdict.kind == "partial" or "cuts" in str(effect.verdict)
        assert effect.per_parameter["w"].leak == pytest.approx(9 * share, rel=1e-6)


def test_the_end_of_a_stop_that_keeps_its_meaning_does_not_open_the_region_around_it():
    w, u = torch.tensor(2.0, requires_grad=True), torch.tensor(3.0, requires_grad=True)
    recorder = Recorder({"audit_steps.real": "it cannot be recorded"})
    with recorder.recording():
        with torch.no_grad():
            with stop_recording("audit_steps.real"):
                pass
            held = w * u
        loss = w * held
        with recorder.board.of_the_program():
            recorder.prepare(loss)
            loss.backward()
    assert (w.grad, u.grad) == (6, None)


# --- programs that look at what they stop ------------------------------------------------------------------------


def _asks_by_another_name(h):
    with torch.no_grad():
        return h.cos() * (2.0 if is_recording() else 0.5)


def _asks_a_guard(h):
    with torch.no_grad():
        guard = torch.set_grad_enabled(True)
        a = h.exp()
        torch.set_grad_enabled(guard.prev)
        return a + h.cos()


def _asks_a_context(h):
    with torch.no_grad():
        context = torch.enable_grad()
        with context:
            factor = 2.0 if context.prev else 0.5
        return h.cos() * factor


def _asks_a_result(h):
    with torch.no_grad():
        a = h.cos()
        return a * (2.0 if a.requires_grad else 0.5)


def _asks_a_constant(h):
    a = h.cos().detach()
    return a * (2.0 if a.requires_grad else 0.5) * (1.0 if a.is_leaf else 3.0) + (a if a.grad_fn is None else 0.0)


@pytest.mark.parametrize(
    "held", [_asks_by_another_name, _asks_a_guard, _asks_a_context, _asks_a_result, _asks_a_constant]
)
def test_a_step_that_looks_at_what_it_stops_takes_its_own_way(held):
    w = torch.tensor([1.5, 1.0, 2.0], requires_grad=True)

    def loss():
        h = w.sin()
        return (h * held(h)).sum()

    loss().backward()
    plain, w.grad = w.grad, None
    with audited({"w": w}) as step:
        loss().backward()
    assert torch.equal(w.grad, plain)
    assert torch.equal(step.audits[0].blocked["w"], plain)
    reasons = [entry.reason for entry in step.audits[0].unopened]
    assert any(reason.endswith("as if it were closed") for reason in reasons)
    assert "prev" not in vars(torch.no_grad)
    assert is_recording is torch.is_grad_enabled


# --- operations without a derivative -----------------------------------------------------------------------------


def test_an_argument_that_takes_no_gradient_is_named():
    w = torch.tensor([0.5, -1.0, 2.0], requires_grad=True)

    def loss():
        quality = w.detach().sigmoid()
        return F.binary_cross_entropy_with_logits(w, quality, weight=quality)

    with pytest.raises(
        RuntimeError, match=r"test_audit_steps.py:\d+:\d+: it enters an operation that is not differentiable in it"
    ):
        with audited({"w": w}):
            loss().backward()
    assert w.grad is None
    (entry,) = audit(loss, {"w": w}).unopened
    assert entry.reason.startswith("opened, the program fails: The function 'binary_cross_entropy_with_logits'")


def test_a_result_that_takes_no_gradient_is_named():
    w, held = torch.ones(3, requires_grad=True), torch.zeros(3)
    with pytest.raises(RuntimeError, match="it enters an operation that is not differentiable in it"):
        with audited({"w": w}):
            torch.mul(w.detach(), 2, out=held)


@pytest.mark.parametrize(
    "make",
    [
        lambda held: torch.zeros(3).set_(held),
        lambda held: torch.special.gammainc(held, torch.ones(3)),
        lambda held: held.clone().acosh_(),
        lambda held: held.resize_(3),
    ],
)
def test_an_operation_without_a_derivative_on_a_constant_is_named(make):
    w = torch.tensor([1.5, 1.0, 2.0], requires_grad=True)
    with pytest.raises(RuntimeError, match=r"s.py:\d+:\d+: it enters an operation that is not differentiable in it"):
        with audited({"w": w}):
            (w * make(w.exp().detach())).sum().backward()
    assert w.grad is None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torch's own samples
@pytest.mark.parametrize("is_region", [False, True], ids=["tensor", "region"])
def test_every_operation_takes_constants_as_in_the_plain_step(is_region):
    """Torch's own samples of all its operations: the same values, or the place is named."""
    from torch.testing._internal.common_methods_invocations import op_db  # slow to import

    w, failed = torch.tensor(1.0, requires_grad=True), []
    cases = [
        (op, variant, sample)
        for op in op_db
        if torch.float64 in op.supported_dtypes("cpu") and "empty" not in op.name and "lstsq" not in op.name  # random
        for sample in itertools.islice(op.sample_inputs("cpu", torch.float64), 1)
        for variant in (op.op, op.inplace_variant)
        if variant is not None
    ]

    def run(variant, sample, state):
        def held(value):
            if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
                return value
            if not (value.is_floating_point() or value.is_complex()):
                return value.clone()
            recorded = value * (w * 0 + 1).to(value.dtype)
            return recorded if is_region else recorded.detach()

        torch.set_rng_state(state)
        with torch.no_grad() if is_region else contextlib.nullcontext():
            given = tree_map(held, (sample.input, sample.args, sample.kwargs))
            found = tree_leaves(variant(given[0], *given[1], **given[2]))
        return [value.detach().clone() for value in found if getattr(value, "layout", None) is torch.strided]

    plainly = []
    for op, variant, sample in cases:
        state = torch.get_rng_state()
        with contextlib.suppress(Exception):  # not every operation in place takes every sample
            plainly.append((op.name, variant, sample, state, run(variant, sample, state)))
    assert len(plainly) > 500
    with audited({"w": w}):
        for name, variant, sample, state, plain in plainly:
            try:
                found = run(variant, sample, state)
            except Unrecordable:
                continue
            except Exception as error:
                failed.append((name, str(error)))
                continue
            same = (torch.allclose(a, b, rtol=0, atol=0, equal_nan=True) for a, b in zip(plain, found, strict=True))
            failed += [] if all(same) else [(name, "other values")]
    assert not failed


def test_a_constant_that_another_library_takes_is_an_escape():
    w = torch.tensor([1.5, 1.0, 2.0], requires_grad=True)
    with audited({"w": w}) as step:
        (w * torch.from_dlpack(w.exp().detach())).sum().backward()
    assert torch.equal(w.grad, w.detach().exp())
    assert [escape.kind for escape in step.audits[0].escapes] == ["__dlpack__()"]


def test_an_operation_without_a_derivative_in_a_region_is_named():
    w = torch.tensor([0.5, -1.0, 2.0], requires_grad=True)
    with audited({"w": w}):
        with torch.no_grad():
            held = torch.special.gammainc(w.exp(), torch.ones(3))
        loss = (w * held).sum()
        with pytest.raises(RuntimeError, match=r"_steps.py:\d+:\d+: an operation inside of it has no derivative"):
            loss.backward()


def test_a_custom_function_without_a_derivative_keeps_its_region_closed():
    w = torch.tensor([0.5, -1.0, 2.0], requires_grad=True)
    with audited({"w": w}) as answer:
        with torch.no_grad():
            held = Underivable.apply(w.sin())
        (w * held).sum().backward()
    assert torch.equal(w.grad, held)
    (entry,) = answer.audits[0].unopened
    assert entry.reason == "opened, the program fails: none of my business"


def test_an_error_of_the_program_itself_stays_as_it_is():
    w = torch.tensor([0.5, -1.0, 2.0], requires_grad=True)
    with audited({"w": w}):
        with torch.no_grad():
            held = Underivable.apply(w.sin())
        loss = Underivable.apply(w * held).sum()
        with pytest.raises(RuntimeError, match="none of my business"):
            loss.backward()


class Underivable(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        raise RuntimeError("none of my business")


def test_a_constant_that_is_changed_in_place_is_said_to_be():
    w = torch.tensor([0.5, -1.0, 2.0], requires_grad=True)
    with audited({"w": w}) as answer:
        held = w.sin().detach()
        held[0] = w[1]
        (held * w).sum().backward()
    (entry,) = answer.audits[0].unopened
    assert entry.reason == "its result is changed in place after it"


@pytest.mark.parametrize("region", [torch.no_grad, functools.partial(stop_recording, "audit_steps.checkpointed")])
def test_a_checkpoint_in_a_region_runs_once_as_in_the_plain_step(region):
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Tanh())
    student, x, runs = nn.Linear(3, 3), torch.randn(4, 3), []
    teacher.register_forward_hook(lambda *_: runs.append("teacher"))
    with audited() as answer:
        with region():
            held = checkpoint(teacher, x, use_reentrant=False)
        (student(x) - held).square().sum().backward()
    assert runs == ["teacher"]
    assert teacher[1].num_batches_tracked == 1
    assert answer.audits[0].effects[0].leak > 0


@pytest.mark.parametrize("changes", ["average", "count"])
def test_a_checkpoint_in_a_region_that_changes_state_is_said_to_open_in_part(changes):
    class Teacher(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3)
            self.register_buffer("average", torch.ones(()))
            self.register_buffer("count", torch.zeros((), dtype=torch.int64))

        def forward(self, x):
            buffer = getattr(self, changes)
            buffer.add_(1)
            return self.linear(x) * self.average.clone()

    torch.manual_seed(0)
    teacher, student, x = Teacher(), nn.Linear(3, 3), torch.randn(4, 3)
    with audited() as answer:
        with torch.no_grad():
            held = checkpoint(teacher, x, use_reentrant=False)
        (student(x) - held).square().sum().backward()
    told = [entry.reason for entry in answer.audits[0].unopened]
    assert ["a checkpoint in it changes a tensor in place" in reason for reason in told] == [True] * (
        changes == "average"
    )


def test_a_custom_function_in_a_region_runs_backward_only_where_it_is_open():
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, runs):
            ctx.runs = runs
            return 2 * x

        @staticmethod
        def backward(ctx, g):
            ctx.runs.append(g.item())
            return 2 * g, None

    w, v = torch.tensor(3.0, requires_grad=True), torch.tensor(2.0, requires_grad=True)
    first, last = [], []
    with audited({"w": w, "v": v}) as answer:
        with torch.no_grad():
            held = Doubled.apply(torch.sin(Doubled.apply(w, first)), last)
        (v * held).backward()
    (effect,) = answer.audits[0].effects
    assert effect.per_parameter["w"].leak == pytest.approx(abs(2 * 2 * 2 * math.cos(6)))
    assert (len(first), last) == (1, [2.0]), "for the leak alone, not in the step's own backward pass"


def test_a_declared_region_answers_whether_gradients_are_recorded_as_in_the_plain_step():
    w = torch.tensor(3.0, requires_grad=True)
    with audited({"w": w}) as answer:
        with stop_recording("audit_steps.asked"):
            held = w * (2 if torch.is_grad_enabled() else 5)
        (w * held).backward()
    assert w.grad == 15
    (entry,) = answer.audits[0].unopened
    assert entry.site == "audit_steps.asked"
    assert "as if it were closed" in entry.reason


def test_a_declared_region_in_which_a_module_takes_a_fast_path_is_refused():
    net, x = _with_a_fast_path()
    net.eval()
    with pytest.raises(RuntimeError, match=r"audit_steps\.fast: a module of torch takes a fast path"):
        with audited(), stop_recording("audit_steps.fast"):
            net(x)


def _selectively(stop):
    """A selective checkpoint, whose kept values are handed out once."""
    u, v = torch.randn(4, 3, requires_grad=True), torch.randn(4, 3, requires_grad=True)
    contexts = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.sin.default])

    def loss():
        y = checkpoint(lambda x: x.sin() * stop(x * v), 1.5 * u, use_reentrant=False, context_fn=contexts)
        return (y * stop(y)).sum()

    return loss, {"u": u, "v": v}


def test_a_selective_checkpoint_is_differentiated_as_often_as_it_takes():
    torch.manual_seed(0)
    loss, params = _selectively(torch.detach)
    loss().backward()
    plain = {name: parameter.grad for name, parameter in params.items()}
    for parameter in params.values():
        parameter.grad = None
    with audited(params) as answer:
        loss().backward()
    assert torch.equal(params["u"].grad, plain["u"])
    again = audit(loss, params)
    (step,) = answer.audits
    assert len(step.effects) == len(again.effects) == 2
    for found, expected in zip(step.effects, again.effects, strict=True):
        assert found.leak == pytest.approx(expected.leak)
    named = _selectively(functools.partial(stop_gradient, name="t.selective"))
    assert field_jacobian(*named).jacobian.shape == (24, 24)


def _from_an_edge():
    torch.manual_seed(0)
    u, v = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    t = 1.0 * u
    with torch.no_grad():
        s = (t * v).sin()
    y = t.tanh() * s * t.detach()
    (g,) = torch.autograd.grad([get_gradient_edge(y)], [t], [v], create_graph=True)
    (g * u).sum().backward()
    return u.grad, v.grad


def test_a_derivative_from_a_gradient_edge_is_one_inside_of_the_step():
    plain = _from_an_edge()
    with audited() as answer:
        found = _from_an_edge()
    assert all(map(torch.equal, found, plain))
    assert [entry.reason.partition(" reaches")[0] for entry in answer.audits[0].unopened] == [
        "a derivative inside of the step"
    ] * 2


def _adaptive_weight(w, v, a, *, stops=True):
    """Return the loss of a VQGAN in small: the weight of its second term is a ratio of gradients of the last layer."""
    y = w.sin()
    held = v * y + ((v * y).round() - v * y).detach() if stops else v * y + (v * y).round() - v * y
    first, second = (a * held).square().sum(), (a * held).tanh().sum()
    slopes = [torch.autograd.grad(term, a, retain_graph=True)[0].norm() for term in (first, second)]
    return first + (slopes[0] / slopes[1]).detach() * second


def test_a_stop_beside_the_paths_of_a_derivative_inside_of_the_step_opens():
    w, v, a = (torch.randn(3, dtype=torch.float64).requires_grad_() for _ in range(3))
    with audited({"w": w, "v": v, "a": a}) as answer:
        _adaptive_weight(w, v, a).backward()
    (step,) = answer.audits
    assert not step.unopened
    effect = next(effect for effect in step.effects if effect.verdict.kind == "makes")
    leaks = torch.autograd.grad(_adaptive_weight(w, v, a, stops=False), [w, v, a])
    expected = [leak - held.grad for leak, held in zip(leaks, (w, v, a), strict=True)]
    assert effect.leak == pytest.approx(torch.cat(expected).norm().item())


@pytest.mark.parametrize("inner", ["y", "middle"])
def test_a_stop_on_a_path_of_a_derivative_inside_of_the_step_stays_closed(inner):
    """The stopped tensor is a leaf by which the step differentiates: without the stop it is the tensor behind it."""
    w = torch.randn(3, requires_grad=True)
    with audited({"w": w}) as answer:
        y = w.sin()
        middle = y.detach().requires_grad_()
        (slope,) = torch.autograd.grad((middle * y.exp()).sum(), {"y": y, "middle": middle}[inner], create_graph=True)
        (slope * y).sum().backward()
    (entry,) = answer.audits[0].unopened
    assert entry.reason.startswith("a derivative inside of the step reaches it")


def test_a_backward_pass_by_a_gradient_edge_is_answered_and_one_from_it_refused():
    u = torch.randn(3, requires_grad=True)
    with audited() as answer:
        (u * u.detach()).sum().backward(inputs=[get_gradient_edge(u)])
    assert answer.audits[0].effects[0].leak == pytest.approx(u.detach().norm().item())
    y = (u * u.detach()).sin()
    with pytest.raises(ValueError, match="should begin at tensors"), audited():
        torch.autograd.backward([get_gradient_edge(y)], [torch.ones(3)])


class _Inside(torch.autograd.Function):
    """A function with a graph of its own, which its backward pass differentiates."""

    @staticmethod
    def forward(ctx, x):
        with torch.enable_grad():
            ctx.x = x.detach().requires_grad_()
            ctx.y = ctx.x.tanh() * ctx.x.detach()
        return ctx.y.detach()

    @staticmethod
    def backward(ctx, g):
        return torch.autograd.grad(ctx.y, ctx.x, g, retain_graph=True)[0]


def test_a_stop_in_the_graph_of_a_custom_function_is_listed():
    u = torch.randn(3, requires_grad=True)
    with audited({"u": u}) as answer:
        (_Inside.apply(1.0 * u) * u).sum().backward()
    (step,) = answer.audits
    assert [entry.reason.partition(" reaches")[0] for entry in step.unopened] == ["a derivative inside of the step"] * 2


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_with_strides_is_stopped_as_in_the_plain_step():
    def run():
        torch.manual_seed(0)
        u = torch.randn(4, 3, requires_grad=True)
        t = torch.nested.as_nested_tensor([u[:1].sin(), u[1:]])
        s = t * t.detach()
        (torch.cat(s.unbind()) * u.detach()).sum().backward()
        return u.grad

    plain = run()
    with audited() as answer:
        assert torch.equal(run(), plain)
    (entry,) = answer.audits[0].unopened
    assert entry.reason == "it stops a nested tensor, which is recorded in the layout torch.jagged alone"


def test_a_hessian_in_a_region_is_refused_in_a_sentence():
    v = torch.randn(2, 3, requires_grad=True)

    def run():
        with torch.set_grad_enabled(False):
            hessian = torch.func.hessian(lambda x: (x * x).sum())(v).sum((0, 1))
        (hessian * v).sum().backward()

    with pytest.raises(RuntimeError, match=r"transform of torch\.func switches recording on again"), audited({"v": v}):
        run()


def _by_region(net, x):
    with torch.no_grad():
        goal = net(x)
    return goal, goal


def _by_detach(net, x):
    weights = (net(x).detach() * 2).exp()
    return weights, weights


def _by_views(net, x):
    with torch.no_grad():
        goal = net(x)
    return goal.exp().chunk(2)


@pytest.mark.parametrize("made", [_by_region, _by_detach, _by_views])
def test_a_constant_that_two_backward_passes_share_is_answered_at_the_first(made):
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)), torch.randn(6, 3)

    def step():
        net.zero_grad()
        constants = made(net, x)
        for constant in constants:
            (net(x[: len(constant)]) * constant).sum().backward()
        return [parameter.grad.clone() for parameter in net.parameters()]

    def loss():
        (constant, _) = made(net, x)
        return (net(x[: len(constant)]) * constant).sum()

    plain = step()
    with audited(net) as answer:
        recorded = step()
    assert all(map(torch.equal, recorded, plain))
    first, second = answer.audits
    (effect,), (expected,) = first.effects, audit(loss, net).effects
    assert effect.verdict == expected.verdict
    assert math.isclose(effect.leak, expected.leak, rel_tol=1e-5)  # float32, a few hundred operations
    assert not first.unopened
    (left,) = second.unopened
    assert not second.effects
    assert (left.site, left.reason) == (effect.name, "an earlier backward pass has used its values, too")


def test_a_constant_of_the_past_does_not_keep_its_place_closed():
    torch.manual_seed(0)
    net, x = nn.Linear(3, 1), torch.randn(6, 3)
    with audited(net) as answer:
        for _ in range(2):
            with torch.no_grad():
                goal = net(x).exp()
            (net(x) * goal).sum().backward()
            del goal
    assert [len(found.effects) for found in answer.audits] == [1, 1]
    assert not any(found.unopened for found in answer.audits)


@pytest.mark.parametrize("combined", [torch.mul, torch.sub], ids=["saved", "not saved"])
def test_a_constant_in_two_graphs_that_are_made_before_a_backward_pass_is_named(combined):
    net, x = nn.Linear(3, 1), torch.randn(6, 3)

    def step():
        weights = (net(x).detach() * 2).exp()
        losses = [combined(net(x), weights).square().sum() for _ in range(2)]
        for loss in losses:
            loss.backward()

    with (
        pytest.raises(RuntimeError, match=r"test_audit_steps\.py:\d+:\d+: an earlier backward pass has used"),
        audited(),
    ):
        step()


def test_a_graph_that_the_program_differentiates_twice_is_its_own_error():
    net, x = nn.Linear(3, 1), torch.randn(6, 3)

    def step():
        loss = (net(x).exp() * net(x).detach().exp()).sum()
        for _ in range(2):
            loss.backward()

    with pytest.raises(RuntimeError, match="backward through the graph a second time"), audited():
        step()


def test_a_subclass_of_tensors_sets_a_leaf_inside():
    """The tool makes a constant of it without a `detach_` that is taken for one of the program."""

    class Tagged(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            made = func(*(one.plain if isinstance(one, Tagged) else one for one in args), **(kwargs or {}))
            return tag(made) if isinstance(made, torch.Tensor) else made

    def tag(tensor):
        made = tensor.as_subclass(Tagged)
        made.plain = tensor
        return made

    net, x = nn.Linear(3, 2), torch.randn(4, 3)
    with audited(net) as answer:
        y = net(x)
        held = tag(y.sin()).detach().requires_grad_()
        (slope,) = torch.autograd.grad((held * held).plain.sum(), held.plain, create_graph=True)
        (y * slope).mean().backward()
    (found,) = answer.audits
    assert [entry.kind for entry in found.unopened] == ["detach()"]


@pytest.mark.slow
def test_compiled_functions_are_told_of_where_they_ran():
    w = torch.tensor([1.5, 1.0, 2.0], requires_grad=True)
    compiled = torch.compile(lambda x: x.sin() * x.detach(), backend="eager")
    remarks = []
    for function in (compiled, torch.sin):
        with audited({"w": w}) as step:
            function(w).sum().backward()
        remarks.append(step.audits[0].remarks)
    assert remarks == [["compiled functions ran in eager mode"], []]
