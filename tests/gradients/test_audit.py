"""Audits of code that was not written with blocks: found, named, opened one by one, and never a lie."""

import contextlib
import functools
import itertools
import json
import sys
import types
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from folders import ROOT
from torch import nn
from torch.utils.checkpoint import checkpoint

from toolkit import stop_gradient
from toolkit.gradients import _parts, audit, compare
from toolkit.gradients.audit import _regions

ORIGINALS = [
    (owner, name, owner.__dict__.get(name))
    for owner, names in (
        (
            torch.Tensor,
            ("detach", "detach_", "data", "new_tensor", "item", "tolist", "numpy", "__array__", "__float__"),
        ),
        (torch, ("detach", "detach_", "tensor", "is_grad_enabled")),
        (nn.Parameter, ("__new__",)),
        (torch.autograd.Variable, ("__new__",)),
        (torch.no_grad, ("__enter__", "__exit__")),
        (torch.enable_grad, ("__enter__", "__exit__")),
        (torch.inference_mode, ("__enter__", "__exit__")),
        (torch.set_grad_enabled, ("__init__", "__enter__", "__exit__")),
    )
    for name in names
]

HERE = Path(__file__).relative_to(ROOT)


@pytest.fixture(autouse=True)
def _nothing_stays_replaced():
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(default)
    for owner, name, original in ORIGINALS:
        assert owner.__dict__.get(name) is original, f"{owner}.{name} stayed replaced"


def _line() -> int:
    return sys._getframe(1).f_lineno


class Pair:
    """Two layers and some data."""

    def __init__(self):
        self.a, self.b = nn.Linear(4, 3), nn.Linear(4, 3)
        self.x, self.y = torch.randn(6, 4), torch.randn(6, 4)


@pytest.fixture
def pair():
    torch.manual_seed(3)
    return Pair()


def _plain(loss, parameters):
    return torch.autograd.grad(loss(), list(parameters), allow_unused=True)


# --- every kind of stop, with the gradient that it has when it is opened -----------------------------------------


@torch.no_grad()
def _decorated(pair):
    return pair.b(pair.x).exp()


def _context(stop):
    def hold(pair):
        with stop():
            return pair.b(pair.x).exp()

    return hold


def _detach_in_functional_form(pair):
    return torch.detach(pair.b(pair.x).exp())


KINDS = {
    "detach": ("detach()", lambda pair: pair.b(pair.x).exp().detach()),
    "torch.detach": ("detach()", _detach_in_functional_form),
    "data": (".data", lambda pair: pair.b(pair.x).exp().data),
    "Variable": ("Variable()", lambda pair: torch.autograd.Variable(pair.b(pair.x).exp())),
    "torch.tensor": ("torch.tensor()", lambda pair: torch.tensor(pair.b(pair.x).exp())),
    "new_tensor": ("new_tensor()", lambda pair: pair.x.new_tensor(pair.b(pair.x).exp())),
    "no_grad": ("no_grad", _context(torch.no_grad)),
    "no_grad-decorator": ("no_grad", _decorated),
    "inference_mode": ("inference_mode", _context(torch.inference_mode)),
    "set_grad_enabled": ("set_grad_enabled", _context(lambda: torch.set_grad_enabled(False))),
}
LAMBDAS_OPEN_ELSEWHERE = {"set_grad_enabled"}


@pytest.mark.keeps_its_sums
@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
@pytest.mark.parametrize("name", [name for name in KINDS if name not in LAMBDAS_OPEN_ELSEWHERE])
def test_every_kind_is_found_and_opened(pair, name):
    kind, hold = KINDS[name]

    def loss():
        held = hold(pair)
        held = held.clone() if held.is_inference() else held
        return (pair.a(pair.x) * held).sum()

    def open_loss():
        return (pair.a(pair.x) * pair.b(pair.x).exp()).sum()

    parameters = [*pair.a.parameters(), *pair.b.parameters()]
    found = audit(loss, parameters)
    assert found.valid, found.reason
    (effect,) = found.effects
    assert found.kinds[effect.name] == kind
    assert effect.verdict.kind == "cuts"
    assert {"pair.b.weight", "pair.b.bias"} <= set(found.blocked)
    opened = found.gradient([effect.name])
    for expected, gradient in zip(_plain(open_loss, parameters), opened.values(), strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=0)


def test_values_written_through_data_leave_the_graph(pair):
    bank, mean = torch.zeros(2, *pair.a(pair.x).shape), torch.zeros(())

    def loss():
        y = pair.a(pair.x)
        bank.data[1] = y
        mean.data.mul_(0.9).add_(pair.x.mean())
        torch.autograd.Variable(y.exp(), requires_grad=True)
        return (y * bank[1].clone()).sum() + mean

    found = audit(loss, pair.a)
    assert found.valid, found.reason
    first = test_values_written_through_data_leave_the_graph.__code__.co_firstlineno
    assert [(entry.kind, found.sites[entry.site].line - first) for entry in found.escapes] == [
        ("write through .data", 5),
        ("Variable()", 7),
    ]


def test_set_grad_enabled_with_a_region_is_opened(pair):
    def loss():
        with torch.set_grad_enabled(False):
            held = pair.a(pair.x).exp()
        return (pair.a(pair.x) * held).sum()

    found = audit(loss, pair.a)
    assert found.valid
    assert [found.kinds[effect.name] for effect in found.effects] == ["set_grad_enabled"]
    open_loss = compare(lambda: (pair.a(pair.x) * pair.a(pair.x).exp()).sum(), pair.a)
    opened = found.gradient([found.effects[0].name])
    torch.testing.assert_close(opened["weight"], open_loss.blocked["weight"], rtol=1e-12, atol=0)


def test_set_grad_enabled_without_a_region_is_opened_by_another_run(pair):
    def loss(call=torch.set_grad_enabled):
        call(False)
        held = pair.a(pair.x).exp()
        torch.set_grad_enabled(True)
        return (pair.a(pair.x) * held).sum()

    found = audit(loss, pair.a)
    assert found.valid
    _is_without(found, "set_grad_enabled", loss(lambda mode: None), pair.a)


@pytest.mark.parametrize(
    "detach", [torch.detach_, torch.Tensor.detach_, torch.ops.aten.detach_, lambda held: torch.detach_(held)]
)
def test_detach_in_place_is_opened_by_another_run(pair, detach):
    def loss(*, stops=True):
        held = pair.a(pair.x).exp()
        if stops:
            detach(held)
        return (pair.a(pair.x) * held).sum()

    found = audit(loss, pair.a)
    assert found.valid
    _is_without(found, "detach_()", loss(stops=False), pair.a)


def test_stops_of_a_chain_open_together_and_the_audit_says_so(pair):
    def loss():
        a = pair.a(pair.x)
        for _ in range(2):  # one stop, however often it runs
            a = a * a.cos().detach()
        return (a * a.exp().detach().sin().detach() * a.tanh().data.sin().data).sum()

    found = audit(loss, pair.a)
    line = f"{HERE}:{loss.__code__.co_firstlineno + 4}"
    chain = "stands for 2 stops, which open together: their expressions begin there"
    assert found.remarks == [f"{line}:21 {chain}", f"{line}:55 {chain}"]

    def opened():
        a = pair.a(pair.x)
        for _ in range(2):
            a = a * a.cos().detach()
        return (a * a.exp().sin() * a.tanh().sin().detach()).sum()

    expected = torch.autograd.grad(opened(), list(pair.a.parameters()))
    for gradient, name in zip(expected, dict(pair.a.named_parameters()), strict=True):
        torch.testing.assert_close(found.gradient([f"{line}:21"])[name], gradient)


def _is_without(found, kind, value, net):
    (effect,) = found.effects
    assert (found.kinds[effect.name], found.unopened) == (kind, [])
    expected = torch.autograd.grad(value, list(net.parameters()))
    for gradient, name in zip(expected, dict(net.named_parameters()), strict=True):
        torch.testing.assert_close(found.gradient([effect.name])[name], gradient)


# --- names, places, verdicts -------------------------------------------------------------------------------------


def test_places_have_file_line_and_column(pair):
    def loss():
        a = pair.a(pair.x)
        return (a * a.detach() + 2 * a * a.detach().exp()).sum(), _line()

    found = audit(lambda: loss()[0], pair.a)
    line = loss()[1]
    assert [effect.site for effect in found.effects] == [
        f"{HERE}:{line}:21",
        f"{HERE}:{line}:42",
    ]


def test_regions_of_one_with_are_places_of_their_own(pair):
    def loss():
        a = pair.a(pair.x)
        with torch.no_grad(), contextlib.nullcontext(), torch.inference_mode():
            b, line = a.exp(), _line()
        return (a * b.clone()).sum(), line

    found, line = audit(lambda: loss()[0], pair.a), loss()[1] - 1
    first = 9 if sys.version_info < (3, 13) else 14  # of the `with`, or of its expression
    places = {f"{HERE}:{line}:{first}": "no_grad", f"{HERE}:{line}:57": "inference_mode"}
    assert found.kinds == places
    assert [effect.verdict.kind for effect in found.effects] == ["no-op", "no-op"]
    assert [effect.name for effect in found.sets] == [" + ".join(places)]
    assert not found.remarks


def test_a_critic_with_three_detaches_gets_three_verdicts(pair):
    reward = torch.randn(6)

    def loss():
        value = pair.a(pair.x).sum(1)
        next_value = pair.a(pair.y).sum(1).detach()
        zero = (value - value).detach()
        return ((reward + 0.9 * next_value - value) ** 2 + value * zero + reward.detach()).mean()

    found = audit(loss, pair.a)
    assert found.valid
    assert [effect.verdict.kind for effect in found.effects] == ["partial", "redundant", "no-op"]


def test_a_detach_inside_of_torch_is_found():
    torch.manual_seed(0)
    layer, x = nn.Linear(5, 3), torch.randn(4, 5)

    def loss():
        return (F.gumbel_softmax(layer(x), hard=True) * torch.arange(3.0)).sum()

    found = audit(loss, layer)
    assert found.valid
    (effect,) = found.effects
    assert "functional.py:" in effect.site
    assert effect.ratio < 1e-12  # opened, the straight-through estimator passes nothing


def test_blocks_with_names_are_audited_as_well(pair):
    def loss():
        a = pair.a(pair.x)
        return (a * stop_gradient(a.exp(), "audited.factor") * a.detach()).sum()

    found = audit(loss, pair.a)
    assert [found.kinds[effect.name] for effect in found.effects] == ["stop_gradient", "detach()"]


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True")
def test_escapes_are_listed_with_their_places(pair):
    def loss():
        a = pair.a(pair.x)
        scale = a.mean().item() + float(a.sum()) + a.detach().numpy().sum() + a.sum().tolist()
        return (a * scale).sum()

    found = audit(loss, pair.a)
    assert found.valid
    assert [escape.kind for escape in found.escapes] == ["item()", "float()", "numpy()", "tolist()"]
    assert all(escape.site.startswith(f"{HERE}:") for escape in found.escapes)


def test_a_parameter_made_of_a_result_is_listed(pair):
    found = audit(lambda: (pair.a(pair.x) * nn.Parameter(pair.a(pair.x).exp())).sum(), pair.a)
    assert [escape.kind for escape in found.escapes] == ["nn.Parameter()"]


# --- it never lies -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", [torch.Tensor.detach, stop_gradient])
@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_a_program_that_looks_at_what_it_stopped_is_opened_as_without_the_stop(pair, stop, what):
    def loss(stop=stop):
        a = pair.a(pair.x)
        held = stop(a.exp())
        value = (a * held * a.sin().detach()).sum()
        if held.requires_grad:
            value = 2 * value if what == "loss" else value + (a - a.detach()).sum()
        return value

    found = audit(loss, pair.a)
    assert found.valid, found.reason
    removed = _plain(lambda: loss(lambda input: input), pair.a.parameters())
    for gradient, expected in zip(found.gradient([found.effects[0].name]).values(), removed, strict=True):
        torch.testing.assert_close(gradient, expected)


def test_a_program_that_differs_from_itself_is_invalid(pair):
    clock = (number for number in itertools.count(1))
    found = audit(lambda: (pair.a(pair.x) * pair.a(pair.x).detach()).sum() * next(clock), pair.a)
    assert not found.valid
    assert found.reason.startswith("each run advances an iterator: `clock`; the loss is ")
    assert str(found).startswith("INVALID: ")
    assert found.effects == found.unopened == []


def test_valid_audits_report_the_plain_run(pair):
    def loss():
        return (pair.a(pair.x) * pair.a(pair.x).exp().detach()).sum()

    found = audit(loss, pair.a)
    assert found.loss == loss().item()
    for expected, gradient in zip(_plain(loss, pair.a.parameters()), found.blocked.values(), strict=True):
        assert torch.equal(gradient, expected)


# --- what is known to be hard ------------------------------------------------------------------------------------


def test_an_average_of_parameters_keeps_its_state(pair):
    before = [parameter.detach().clone() for parameter in pair.b.parameters()]

    def loss():
        value = ((pair.a(pair.x) - pair.b(pair.x).detach()) ** 2).mean()
        with torch.no_grad():
            for average, parameter in zip(pair.b.parameters(), pair.a.parameters(), strict=True):
                average.mul_(0.9).add_(parameter, alpha=0.1)
        return value

    found = audit(loss, [*pair.a.parameters(), *pair.b.parameters()])
    assert found.valid
    assert [effect.verdict.kind for effect in found.effects] == ["cuts", "no-op"]
    assert "updates older tensors in place" in found.unopened[0].reason
    for parameter, value in zip(pair.b.parameters(), before, strict=True):
        assert parameter.is_leaf
        assert torch.equal(parameter, value)


def test_a_change_in_place_of_a_stopped_value_is_opened(pair):
    def loss():
        a = pair.a(pair.x)
        held = (2 * a).detach()
        held.clamp_(max=1.0)
        return (a * held).sum()

    found = audit(loss, pair.a)
    assert found.valid
    assert [effect.verdict.kind for effect in found.effects] == ["partial"]
    direct = compare(lambda: (pair.a(pair.x) * (2 * pair.a(pair.x)).clamp(max=1.0)).sum(), pair.a).blocked
    opened = found.gradient([found.effects[0].name])
    torch.testing.assert_close(opened["weight"], direct["weight"], rtol=1e-12, atol=0)


def test_a_stopped_value_whose_source_cannot_do_without_it_is_listed(pair):
    def loss():
        a = pair.a(pair.x)
        held = a.exp().detach()  # autograd keeps this very memory for the derivative of exp
        held.clamp_(max=1.0)
        return (a * held).sum()

    found = audit(loss, pair.a)
    assert found.valid
    assert "modified by an inplace operation" in found.unopened[0].reason


def test_a_result_written_to_out_is_left_alone_or_opened(pair):
    buffer = torch.empty(6, 3)

    def loss():
        with torch.no_grad():
            torch.exp(pair.a(pair.x), out=buffer)
        return (pair.a(pair.x) * buffer).sum()

    found = audit(loss, pair.a)
    assert found.valid
    assert "updates older tensors in place" in found.unopened[0].reason


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_checkpoints_are_right_or_refused(pair, reentrant):
    def body(x):
        a = pair.a(x)
        return a * a.exp().detach()

    def loss():
        x = pair.x.clone().requires_grad_() if reentrant else pair.x
        return checkpoint(body, x, use_reentrant=reentrant).sum()

    if reentrant:
        with pytest.raises(RuntimeError, match="should checkpoint with use_reentrant=False"):
            audit(loss, pair.a)
        return
    found = audit(loss, pair.a)
    assert found.valid
    assert [effect.verdict.kind for effect in found.effects] == ["partial"]
    direct = audit(lambda: body(pair.x).sum(), pair.a)
    names = [found.effects[0].name]
    assert torch.equal(found.gradient(names)["weight"], direct.gradient(names)["weight"])


def test_spectral_norm_is_audited():
    torch.manual_seed(0)
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(5, 3))
    x, vector = torch.randn(4, 5), None
    vector = layer.parametrizations.weight[0]._u.clone()
    found = audit(lambda: layer(x).square().sum(), layer)
    assert found.valid
    assert torch.equal(layer.parametrizations.weight[0]._u, vector)


def test_a_compiled_model_runs_in_eager_mode(pair):
    torch._dynamo.reset()
    compiled = torch.compile(pair.a, backend="eager")

    def loss():
        return (compiled(pair.x) * compiled(pair.x).exp().detach()).sum()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loss()
        found = audit(loss, pair.a)
    assert found.valid
    assert [effect.verdict.kind for effect in found.effects] == ["partial"]


@pytest.mark.parametrize("transform", ["vmap", "grad", "functional_call"])
def test_function_transforms(pair, transform):
    def body(x):
        return (pair.a(x) * pair.a(x).exp().detach()).sum()

    losses = {
        "vmap": lambda: torch.func.vmap(body)(pair.x).sum(),
        "grad": lambda: torch.func.grad(body)(pair.x).square().sum(),
        "functional_call": lambda: (
            torch.func.functional_call(pair.a, dict(pair.a.named_parameters()), pair.x) * pair.a(pair.x).detach()
        ).sum(),
    }
    found = audit(losses[transform], pair.a)
    assert found.valid, found.reason
    (effect,) = found.effects
    assert effect.leak > 0


def test_data_that_makes_the_gradient_wrong_is_told_from_data_that_does_not(pair):
    def wrong():
        a = pair.a(pair.x).sigmoid()
        a.data.clamp_(max=0.5)  # the derivative of the sigmoid is made of its result
        return a.square().sum()

    def harmless():
        held = pair.a(pair.x).sigmoid().data
        held.clamp_(max=0.5)
        return (pair.a(pair.x) * held).sum()

    (found,) = audit(wrong, pair.a).unopened
    assert found.reason == "the memory is changed where autograd cannot see it: the gradient is that of other values"
    assert torch.autograd.grad(wrong(), pair.a.weight)[0].isfinite().all()
    (found,) = audit(harmless, pair.a).unopened
    assert found.reason.startswith("opened, the program fails: one of the variables needed for gradient computation")


def test_a_checkpoint_leaves_the_buffers_of_its_modules_alone():
    net, x = nn.BatchNorm1d(3), torch.randn(4, 3, requires_grad=True)
    before = {name: buffer.clone() for name, buffer in net.named_buffers()}

    def body(x):
        with torch.no_grad():  # needs a run of its own, between two derivatives of the recorded run
            held = net(x)
        return held * x.detach() * x

    assert audit(lambda: checkpoint(body, x, use_reentrant=False).sum(), {"x": x}).valid
    assert all(torch.equal(buffer, before[name]) for name, buffer in net.named_buffers())


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_a_checkpoint_that_records_nothing_is_listed(pair):
    def loss(x):
        held = checkpoint(lambda x: pair.b(x).exp(), x, use_reentrant=True)
        return (pair.a(pair.x) * held).sum(), _line()

    found = audit(lambda: loss(pair.x)[0], [*pair.a.parameters(), *pair.b.parameters()])
    assert found.valid
    assert found.blocked["pair.b.weight"].eq(0).all()
    (escape,) = found.escapes
    assert escape.kind == "checkpoint(use_reentrant=True)"
    assert escape.site == f"{HERE}:{loss(pair.x)[1] - 1}:16"


def _scale_in_no_grad(x):
    with torch.no_grad():
        return x.square().sum()


def _scale_in_set_grad_enabled(x):
    with torch.set_grad_enabled(False):
        return x.square().sum()


def _scale_in_inference_mode(x):
    with torch.inference_mode():
        return x.square().sum()


@pytest.mark.parametrize(
    ("scale", "passes"),
    [(_scale_in_no_grad, True), (_scale_in_set_grad_enabled, True), (_scale_in_inference_mode, False)],
    ids=["no_grad", "set_grad_enabled", "inference_mode"],
)
def test_a_region_that_a_tangent_crosses_is_told(pair, scale, passes):
    def scaled(x):
        return pair.a(x) * scale(x).clone()

    def loss():
        _, slope = torch.func.jvp(scaled, (pair.x,), (pair.y,))
        return slope.square().sum()

    found = audit(loss, pair.a)
    assert found.valid, found.reason
    assert found.one_mode == [effect.name for effect in found.effects if passes]
    assert ("stops reverse mode alone" in str(found)) is passes
    held = pair.x.square().sum()
    slope_of_scale = 2 * (pair.x * pair.y).sum()
    expected = pair.y @ pair.a.weight.T * held + passes * pair.a(pair.x) * slope_of_scale
    assert found.loss == pytest.approx(expected.square().sum().item(), rel=1e-12)


def test_a_region_without_tangents_is_not_told(pair):
    def noisy(x):
        with torch.no_grad():
            mask = pair.y > 0
        return pair.a(x) * mask[:, :3]

    found = audit(lambda: torch.func.jvp(noisy, (pair.x,), (pair.y,))[1].square().sum(), pair.a)
    assert found.valid
    assert found.one_mode == []


def test_dropout_draws_are_the_same_in_every_run(pair):
    dropout = nn.Dropout(0.5)
    state = torch.get_rng_state()

    def loss():
        return (dropout(pair.a(pair.x)) * dropout(pair.a(pair.x)).detach()).sum()

    assert audit(loss, pair.a).valid
    assert torch.equal(torch.get_rng_state(), state)


# --- wrong input -------------------------------------------------------------------------------------------------


def test_an_error_of_the_program_is_its_own(pair):
    def loss():
        held = pair.a(pair.x).detach()
        raise KeyError(f"mine {held.shape}")

    with pytest.raises(KeyError, match="mine"):
        audit(loss, pair.a)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda pair: pair.a(pair.x), ValueError, "`loss` should return a scalar"),
        (lambda pair: torch.ones(()), ValueError, "should depend on a tensor that requires a gradient"),
        (lambda pair: pair.a(pair.x).sum().item(), TypeError, "`loss` should return a tensor"),
        (lambda pair: pair.a(pair.x).sum() * torch.nan, ValueError, "should return a number"),
    ],
    ids=["vector", "constant", "float", "nan"],
)
def test_wrong_losses_are_one_clear_error(pair, make, error, message):
    with pytest.raises(error, match=message):
        audit(lambda: make(pair), pair.a)


def test_text_page_and_json(pair):
    def loss():
        a = pair.a(pair.x)
        return (a * a.exp().detach()).sum() * a.mean().item()

    found = audit(loss, pair.a)
    assert str(found).splitlines()[1] == "1 stop: 1 load-bearing (1 partial)"
    assert "where" in str(found).splitlines()[2]
    assert "leaves the graph: item()" in str(found)
    assert "<table>" in found._repr_html_()
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["valid"] is True


# --- stops that act together, and parameters without a path -------------------------------------------------------


def test_a_stop_inside_of_another_one_gets_a_row_with_it(pair):
    def loss(stop=torch.Tensor.detach, region=torch.no_grad):
        with region():
            first, second = stop(pair.b(pair.x)), stop(pair.a(pair.x))
        return ((pair.a(pair.x) - first) ** 2).mean() + (pair.a(pair.x) * second).sum()

    found = audit(loss, {"a": pair.a.weight, "b": pair.b.weight})
    assert all(effect.verdict.is_silent for effect in found.effects)
    assert [str(together.verdict) for together in found.sets] == ["cuts all paths to [b]", "partial"]
    assert all(together.name.count(" + ") == 1 for together in found.sets)
    assert sum("together" in row for row in found.rows()) == 2
    passed = lambda input: input  # noqa: E731
    truth = _plain(lambda: loss(passed, contextlib.nullcontext), [pair.a.weight, pair.b.weight])
    both = found.gradient([effect.name for effect in found.effects])
    for gradient, expected in zip(both.values(), truth, strict=True):
        torch.testing.assert_close(gradient, expected)


def test_data_inside_of_a_region_gets_a_row_with_it(pair):
    def loss():
        with torch.no_grad():
            target = pair.b(pair.x).data
        return ((pair.b(pair.x) - target) ** 2).mean() + (pair.a(pair.x) * target).sum()

    found = audit(loss, {"a": pair.a.weight, "b": pair.b.weight})
    assert [found.kinds[effect.name] for effect in found.effects] == ["no_grad", ".data"]
    assert all(effect.verdict.is_silent for effect in found.effects)
    (together,) = found.sets
    expected = _plain(
        lambda: (pair.a(pair.x) * pair.b(pair.x)).sum() + 0 * pair.b(pair.x).sum(), [pair.a.weight, pair.b.weight]
    )
    for gradient, truth in zip(found.gradient(together.name.split(" + ")).values(), expected, strict=True):
        torch.testing.assert_close(gradient, truth)


def test_blocks_behind_each_other_that_act_together_are_a_set(pair):
    def loss():
        inner = stop_gradient(pair.b(pair.x), "set.inner")
        return (pair.a(pair.x).detach() * stop_gradient(inner * 2, "set.outer")).sum() + pair.a(pair.x).sum()

    comparison = compare(loss, {"b": pair.b.weight, "a": pair.a.weight})
    assert all(effect.verdict.is_silent for effect in comparison.effects)
    (together,) = comparison.sets
    assert str(together.verdict) == "cuts all paths to [b]"
    assert comparison.rows()[-1][0] == "set.inner + set.outer"


def test_the_parts_of_places_add_up(pair):
    found = audit(lambda: (pair.a(pair.x) * pair.a(pair.x).detach() * pair.b(pair.x).detach()).sum(), pair.a)
    parts = found.attribution()
    everything = found.gradient([effect.name for effect in found.effects])
    for name, gradient in everything.items():
        torch.testing.assert_close(sum(part[name] for part in parts.values()), gradient)


def _frozen(pair):
    pair.b.requires_grad_(False)
    value = pair.b(pair.a(pair.x)[:, :1].expand(-1, pair.x.shape[1])).sum()
    pair.b.requires_grad_(True)
    return value


def _looked_up(pair):
    return (pair.a.weight[pair.b(pair.x).argmax()]).sum()


def _never_used(pair):
    return pair.a(pair.x).sum()


def _looked_up_by_one_of_two_results(pair):
    return (pair.a.weight[pair.b(pair.x).flatten().max(0).indices]).sum()


def _looked_up_in_a_region(pair):
    with torch.no_grad():
        index = pair.b(pair.x).argmax()
    return pair.a.weight[index].sum()


def _unused_in_a_region(pair):
    with torch.no_grad():
        pair.b(pair.x)
    return pair.a(pair.x).sum()


def _stopped_and_unused(pair):
    pair.b(pair.x).data  # noqa: B018
    return pair.a(pair.x).sum()


def _as_a_number(pair):
    return pair.a(pair.x).sum() * pair.b(pair.x).sum().item()


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        (_frozen, "requires_grad_() at "),
        (_looked_up, "argmax() at "),
        (_looked_up_by_one_of_two_results, "max() at "),
        (_looked_up_in_a_region, "argmax() at "),
        (_never_used, ""),
        (_unused_in_a_region, ""),
        (_stopped_and_unused, ".data at "),
        (_as_a_number, "item() at "),
    ],
)
def test_parameters_without_a_path_are_listed_with_where_it_ends(pair, program, reason):
    nets = nn.ModuleDict({"a": pair.a, "b": pair.b})
    found = audit(lambda: program(pair), nets)
    missing = {name for name in found.unreached if name.startswith("b.")}
    assert missing == {"b.weight", "b.bias"}
    assert all(found.unreached[name].startswith(reason) for name in missing)
    assert all((found.unreached[name] == "") == (reason == "") for name in missing)
    (note,) = [note for note in found.notes() if note.startswith("no path to the loss: b: ")]
    assert "weight, bias" in note
    assert pair.b.weight.requires_grad


def test_modules_without_any_path_are_named_as_a_whole(pair):
    deep = nn.Sequential(pair.b, nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    some = nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 3)])
    nets = nn.ModuleDict({"a": pair.a, "deep": deep, "some": some})

    def loss():
        return (some[1](pair.x) * pair.a(pair.x)).sum() + pair.a.weight[deep(pair.x).argmax() % 3].sum()

    notes = [note.partition(": it ends in ")[0] for note in audit(loss, nets).notes()]
    assert notes == ["no path to the loss: deep: all 6 parameters", "no path to the loss: some.0: weight, bias"]


class _Unlearnable(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, cotangent):
        return torch.zeros_like(cotangent)


@pytest.mark.parametrize("quantised", [torch.round, _Unlearnable.apply], ids=["round", "function"])
def test_a_gradient_of_zero_is_listed(quantised):
    encoder, head, x = nn.Linear(4, 3), nn.Linear(3, 1), torch.randn(6, 4)
    found = audit(lambda: head(quantised(encoder(x))).square().mean())
    assert found.vanishing == ["encoder.weight", "encoder.bias"]
    assert str(found).splitlines()[-2:] == [
        "nothing that could be opened stops a gradient",
        "a path to the loss, and a gradient of 0: encoder: weight, bias",
    ]


def test_parameters_that_the_loss_does_not_depend_on_are_listed_if_none_are_given():
    encoder, head, idle, x = nn.Linear(4, 3), nn.Linear(3, 1), nn.Linear(2, 2), torch.randn(6, 4)

    def loss():
        return head((encoder(x) > 0).to(x)).square().mean() + idle.weight.shape[0]

    found = audit(loss)
    assert set(found.blocked) == {"head.weight", "head.bias"}
    assert set(found.unreached) == {"encoder.weight", "encoder.bias"}
    assert found.notes()[0].startswith("no path to the loss: encoder: weight, bias: it ends in gt() at ")


def test_a_parameter_that_only_a_stop_cuts_off_is_not_listed(pair):
    found = audit(lambda: (pair.a(pair.x) * pair.b(pair.x).detach()).sum(), nn.ModuleDict({"a": pair.a, "b": pair.b}))
    assert found.unreached == {}


def test_a_container_of_a_package_is_named_by_its_caller(pair, tmp_path, monkeypatch):
    (tmp_path / "container_of_tensors.py").write_text(
        "class Box:\n    def __init__(self, t): self.t = t\n"
        "    def detach(self): return self._each(lambda t: t.detach())\n"
        "    def _each(self, f): return Box(f(self.t))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys.modules["toolkit.gradients.audit._frames"], "INSTALLED", (str(tmp_path),))
    import container_of_tensors as package

    found = audit(lambda: (pair.a(pair.x) * package.Box(pair.a(pair.x)).detach().t).sum(), pair.a)
    (effect,) = found.effects
    assert effect.site.startswith(f"{HERE}:")


def _twice(function):
    @functools.wraps(function)
    def wrapper(x):
        return 2 * function(x)

    return wrapper


@torch.no_grad()
@_twice
def _behind_one_decorator(x):
    return x.exp()


@torch.no_grad()
@_twice
def _behind_it_too(x):
    return x.sin()


def test_functions_behind_one_decorator_are_places_of_their_own():
    x = torch.tensor([0.3, 0.7], requires_grad=True)
    answer = audit(lambda: (x * _behind_one_decorator(x) + x * _behind_it_too(x)).sum(), {"x": x})
    functions = [function.__wrapped__.__wrapped__ for function in (_behind_one_decorator, _behind_it_too)]
    lines = [function.__code__.co_firstlineno for function in functions]
    assert [effect.site.rsplit(":", 2)[1] for effect in answer.effects] == [str(line) for line in lines]
    leaks = [effect.leak for effect in answer.effects]
    expected = [(2 * x * slope).norm().item() for slope in (x.exp(), x.cos())]
    assert leaks == pytest.approx(expected, rel=1e-6)


def test_a_container_whose_method_is_decorated_is_named_by_its_caller(pair, tmp_path, monkeypatch):
    (tmp_path / "decorated_container.py").write_text(
        "def cached(f): return lambda *args: f(*args)\n"
        "class Box:\n    def __init__(self, t): self.t = t\n"
        "    @cached\n    def detach(self): return Box(self.t.detach())\n"
        "    def stopped(self): return self.detach()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys.modules["toolkit.gradients.audit._frames"], "INSTALLED", (str(tmp_path),))
    from decorated_container import Box

    found = audit(lambda: (pair.a(pair.x) * Box(pair.a(pair.x)).detach().t).sum(), pair.a)
    assert "test_audit.py:" in found.effects[0].site
    found = audit(lambda: (pair.a(pair.x) * Box(pair.a(pair.x)).stopped().t).sum(), pair.a)
    assert found.effects[0].site.startswith("decorated_container.py:6:")


def test_packages_are_installed_wherever_pip_puts_them(tmp_path, monkeypatch):
    (tmp_path / "target" / "package-1.0.dist-info").mkdir(parents=True)
    monkeypatch.setattr(sys, "path", ["", str(tmp_path), str(tmp_path / "target")])
    folders = _parts._installed()
    assert str(tmp_path / "target") in folders
    assert not {"", str(tmp_path)}.intersection(folders)


def test_what_a_cache_kept_of_an_earlier_call_is_told(pair):
    @functools.cache
    def held():
        return [parameter.detach() for parameter in pair.b.parameters()]

    def loss():
        return (pair.b(pair.x) * held()[1]).sum()

    cold = audit(loss, pair.b)
    assert [effect.verdict.kind for effect in cold.effects] == ["partial"]
    assert cold.remarks == []
    loss()
    warm = audit(loss, pair.b)
    assert warm.effects == []
    (remark,) = warm.remarks
    assert remark.startswith("kept from an earlier call, and not audited: the results of ")
    assert "<locals>.held" in remark


def _in_an_attribute(net, x, kept):
    if not hasattr(net, "held"):
        net.held = net.weight.detach()
    return (net(x) @ net.held).sum()


def _in_a_dict(net, x, kept):
    if "held" not in kept:
        kept["held"] = [net.bias.data]
    return (net(x) * kept["held"][0]).sum()


def _with_its_graph(net, x, kept):
    if "held" not in kept:
        kept["held"] = net(x).detach() * net.bias
    return (net(x) * kept["held"]).sum()


def _only_its_shape(net, x, kept):
    if not hasattr(net, "held"):
        net.held = net.weight.detach()
    return net(x).sum() / net.held.shape[0]


@pytest.mark.parametrize(
    ("program", "name"),
    [
        (_in_an_attribute, "held"),
        (_in_a_dict, "kept.held[0]"),
        (_with_its_graph, "kept.held"),
        (_only_its_shape, ""),
    ],
)
def test_parameters_that_an_earlier_call_kept_are_told(program, name):
    net, x, kept = nn.Linear(3, 3), torch.randn(2, 3), {}
    cold = audit(lambda: program(net, x, kept), net)
    assert len(cold.effects) == 1
    assert cold.remarks == []
    program(net, x, kept)
    warm = audit(lambda: program(net, x, kept), net)
    assert warm.effects == []
    assert warm.remarks == ([f"kept from an earlier call, and not audited: `{name}`"] if name else [])


class _Caching(nn.Module):
    """Keeps a detached weight in a private dict that is empty at first, as objectives of torchrl do."""

    def __init__(self):
        super().__init__()
        self._cache = {}
        self.weight = nn.Parameter(torch.tensor([0.3, -1.1]))

    def forward(self, x):
        if "weight" not in self._cache:
            self._cache["weight"] = self.weight.detach()
        with torch.no_grad():
            scale = self.weight.square().sum()
        return (self.weight * self._cache["weight"] * x).sum() * scale


def test_an_empty_private_dict_of_a_module_is_put_back():
    net, x = _Caching(), torch.tensor([2.0, 0.7])
    found = audit(lambda: net(x), net)
    assert net._cache == {}
    names = [effect.name for effect in found.effects]
    assert len(names) == 2
    w = net.weight.detach().clone().requires_grad_()
    (expected,) = torch.autograd.grad((w * w * x).sum() * w.square().sum(), w)
    torch.testing.assert_close(found.gradient(names)["weight"], expected)


def test_a_place_answers_as_its_row_after_others_failed_together_with_it():
    """A failure of two places together blocks writes of one of them for that question alone."""
    w = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64, requires_grad=True)
    mean = torch.zeros(3, dtype=torch.float64)

    def loss():
        with torch.no_grad():
            mean.mul_(0.9).add_(w, alpha=0.1)
        with torch.no_grad():
            scale = w.sin()
        if mean.requires_grad and scale.requires_grad:
            raise RuntimeError("together they fail")
        return (w * scale - mean).sum()

    found = audit(loss, {"w": w})
    writes, _ = (effect.name for effect in found.effects)
    (row,) = (effect for effect in found.effects if effect.name == writes)
    assert row.leak == pytest.approx(0.1 * 3**0.5)
    for _ in range(2):
        torch.testing.assert_close(found.gradient([writes])["w"], found.blocked["w"] - 0.1)
        assert found.effect([writes]).leak == row.leak
        found.gradient([effect.name for effect in found.effects])


@pytest.mark.parametrize(
    ("kind", "take"),
    [
        ("nested_tensor()", lambda w: torch.nested.nested_tensor([w], layout=torch.jagged).values()),
        ("_make_subclass()", lambda w: torch.Tensor._make_subclass(torch.Tensor, w * 2)),
        ("linspace()", lambda w: torch.linspace(0, w[0], 3)),
        ("logspace()", lambda w: torch.logspace(0, w[0], 3)),
        ("nn.Parameter()", lambda w: torch.nn.Parameter(w * 2)),
    ],
)
def test_a_function_that_leaves_the_gradient_behind_is_listed(kind, take):
    w = torch.tensor([0.5, 1.0, 2.0], requires_grad=True)
    found = audit(lambda: (w * take(w)).sum(), {"w": w})
    assert found.valid
    assert [escape.kind for escape in found.escapes] == [kind]


def test_installed_modules_are_searched_again_only_after_an_import(pair, monkeypatch):
    def loss():
        return (pair.a(pair.x) * pair.a(pair.x).detach()).square().mean()

    audit(loss, pair.a)
    before = _regions._naming_later.cache_info().misses
    assert audit(loss, pair.a).effects[0].verdict.kind == "partial"
    assert _regions._naming_later.cache_info().misses == before
    module = types.ModuleType("imported_after_an_audit")
    module.is_grad_enabled = torch.is_grad_enabled
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert (module, "is_grad_enabled") in _regions._naming(torch.is_grad_enabled, by_any_name=False)


def test_a_module_of_the_user_is_searched_each_time(monkeypatch):
    module = types.ModuleType("of_the_user")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert (module, "is_grad_enabled") not in _regions._naming(torch.is_grad_enabled, by_any_name=False)
    module.is_grad_enabled = torch.is_grad_enabled
    assert (module, "is_grad_enabled") in _regions._naming(torch.is_grad_enabled, by_any_name=False)


def test_nothing_stays_replaced_after_the_refusal_of_parameters_without_a_path(pair):
    with pytest.raises(ValueError, match="should hold a tensor that `loss` depends on"):
        audit(lambda: pair.a(pair.x).detach().sum() + pair.a(pair.x).sum(), pair.b)
