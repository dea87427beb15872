"""The lints: where forward and reverse mode part, and constants whose memory is written to."""

import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from toolkit import stop_gradient, stop_recording, unblock
from toolkit.gradients import AliasWarning, alias_guard, mode_lint

# torch's forward mode decomposes some operations with its own deprecated `torch.jit.script`.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")


def _line(marker: str) -> int:
    """Return the line of this file that ends with a comment."""
    lines = Path(__file__).read_text("utf-8").splitlines()
    (found,) = [number for number, line in enumerate(lines, 1) if line.endswith(f"# {marker}")]
    return found


def _x(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor([0.3, -1.2, 2.0], dtype=torch.float64).to(dtype)


# --- forward mode against reverse mode ---------------------------------------------------------------------------


def context(x):
    with torch.no_grad():  # context
        c = x.exp()
    return c * x


@torch.no_grad()  # decorator
def _average(x):
    return x.mean() * 2


def decorator(x):
    return _average(x) * x


def switched_for_a_with(x):
    with torch.set_grad_enabled(False):  # switched
        c = x.sin()
    return c * x


def switched_by_calls(x):
    torch.set_grad_enabled(False)  # calls
    c = x.sin()
    torch.set_grad_enabled(True)
    return c * x


def hook(x):
    y = x * 2
    y.register_hook(lambda gradient: -gradient)  # hook
    return y.sin()


def inside_a_region_that_records(x):
    with torch.no_grad():
        with torch.enable_grad():
            y = x.sin()
            with torch.no_grad():  # inside
                c = x.exp()
    return y * c


def in_a_function_that_takes_its_own_derivative(x):
    with torch.no_grad():  # nested
        c = x.exp()
    return torch.func.jvp(torch.sin, (x,), (torch.ones_like(x),))[1] * c


def a_step_of_power_iteration(x):
    """The weight of a spectral normalisation: its vector is held constant, by hand."""
    matrix = torch.outer(x, x) + torch.eye(3, dtype=x.dtype)
    with torch.no_grad():  # power
        u = matrix @ torch.ones(3, dtype=x.dtype)
        u = u / u.norm()
    return matrix / (u @ matrix @ u)


def only_a_view(x):
    with torch.no_grad():  # view
        c = x.view(3, 1)[:, 0]
    return c * x


DISAGREE = {
    "context": context,
    "decorator": decorator,
    "switched": switched_for_a_with,
    "calls": switched_by_calls,
    "hook": hook,
    "inside": inside_a_region_that_records,
    "nested": in_a_function_that_takes_its_own_derivative,
    "view": only_a_view,
    "power": a_step_of_power_iteration,
}


@pytest.mark.parametrize("marker", DISAGREE)
def test_the_place_is_found(marker: str) -> None:
    report = mode_lint(DISAGREE[marker], _x())
    (finding,) = report.findings
    assert re.fullmatch(rf"\S*test_lint\.py:{_line(marker)}:\d+", finding.site)
    assert finding.kind == ("hook" if marker == "hook" else "region")
    assert finding.calls == 1
    assert str(report).startswith(f"{finding.site}: ")
    assert len(report) == 1
    assert report


@pytest.mark.parametrize("marker", [marker for marker in DISAGREE if marker != "hook"])
def test_jacfwd_and_jacrev_disagree_where_something_is_found(marker: str) -> None:
    """The definition of what is looked for. (`torch.func` refuses hooks.)"""
    forward, reverse = (transform(DISAGREE[marker])(_x()) for transform in (torch.func.jacfwd, torch.func.jacrev))
    assert (forward - reverse).abs().max() > 1e-3


def mended_by_a_region(x):
    with stop_recording("lint.region"):
        c = x.exp()
    return c * x


def mended_by_a_block(x):
    with torch.no_grad():
        c = stop_gradient(x.exp(), "lint.block")
    return c * x


def detached(x):
    return x.exp().detach() * x.data


def inference(x):
    with torch.inference_mode():
        c = x.exp().tolist()
    return torch.tensor(c) * x


def no_grad_that_reaches_nothing(x):
    with torch.no_grad():
        torch.linalg.norm(x)
        c = torch.arange(3.0)
    return c * x


def no_grad_on_what_has_no_derivative(x):
    with torch.no_grad():
        sign = x.sign()
    return sign * x


def enabled_inside_of_a_block(x):
    with stop_recording("lint.outer"), torch.enable_grad():
        c = x.exp().detach()
    return c * x


def draws(x):
    return torch.randn(3, dtype=x.dtype) * x + nn.functional.dropout(x.exp())


def checkpointed(x):
    return checkpoint(torch.sin, x, use_reentrant=False)


AGREE = [
    mended_by_a_region, mended_by_a_block, detached, inference, no_grad_that_reaches_nothing,
    no_grad_on_what_has_no_derivative, enabled_inside_of_a_block, draws, checkpointed, torch.sin,
]  # fmt: skip


@pytest.mark.parametrize("program", AGREE, ids=lambda program: program.__name__)
def test_a_clean_program_has_an_empty_report(program: Callable) -> None:
    report = mode_lint(program, _x())
    assert report.findings == ()
    assert not report
    assert str(report) == "Forward and reverse mode agree."


def test_an_open_region_agrees_too() -> None:
    with unblock("lint.region"):
        assert not mode_lint(mended_by_a_region, _x())


def two_regions_and_one_that_is_unused(x):
    total = x.sum() * 0
    for power in (1, 2):
        with torch.no_grad():  # loop
            total = total + (x**power).sum()
    with torch.no_grad():
        x.exp()
    with torch.no_grad():  # last
        total = total * x.norm()
    return total * x


def test_every_place_is_found_and_no_other() -> None:
    loop, last = mode_lint(two_regions_and_one_that_is_unused, _x()).findings
    assert (int(loop.site.split(":")[-2]), loop.calls) == (_line("loop"), 2)
    assert (int(last.site.split(":")[-2]), last.calls) == (_line("last"), 1)
    assert "(2 times)" in str(loop)


def a_region_of_torch_inside_of_a_block(x):
    with torch.no_grad():  # outside
        c = x.exp()
    with stop_recording("lint.outer"):
        with torch.no_grad():
            d = x.sin()
        d = d * x.cos()
    return c * d * x


def test_what_a_block_stops_already_is_no_place() -> None:
    (finding,) = mode_lint(a_region_of_torch_inside_of_a_block, _x()).findings
    assert int(finding.site.split(":")[-2]) == _line("outside")


class _TwoDerivatives(torch.autograd.Function):
    @staticmethod
    def forward(input):
        return input * 2

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, cotangent):
        return 2 * cotangent

    @staticmethod
    def jvp(ctx, tangent):
        return 3 * tangent


def test_a_function_with_two_derivatives_has_no_place() -> None:
    (finding,) = mode_lint(_TwoDerivatives.apply, _x()).findings
    assert (finding.kind, finding.site) == ("unknown", "")
    assert "`backward` and a `jvp`" in str(finding)
    assert finding.difference == pytest.approx(1 / 5, rel=0.9)
    first, second = mode_lint(lambda x: _TwoDerivatives.apply(context(x)), _x()).findings
    assert (first.kind, second.kind) == ("region", "unknown")


def test_several_inputs_trees_and_kinds() -> None:
    def program(x, n, z, m):
        with torch.no_grad():
            c = z.exp()
        return {"a": [x.sin() * n, None], "b": (c * z, m)}

    inputs = [_x(torch.float32), torch.arange(3), _x(torch.complex128) * (1 + 2j), torch.tensor([True, False, True])]
    (finding,) = mode_lint(program, inputs).findings
    assert finding.kind == "region"
    assert not mode_lint(lambda x, n, z, m: (x.sin() * n, z.exp() * z.conj(), m), inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_rounding_is_no_disagreement(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)).to(dtype)
    assert not mode_lint(net, torch.randn(32, 64, dtype=dtype))


def test_the_program_is_left_as_it_was_found() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5)).double()
    x = torch.randn(4, 3, dtype=torch.float64)

    def state() -> list:
        buffers = [(id(buffer), buffer.tolist()) for buffer in net.buffers()]
        return [buffers, x.requires_grad, torch.get_rng_state().tolist(), torch._C._is_fwd_grad_enabled()]

    before = state()
    assert not mode_lint(net, x)
    assert mode_lint(lambda x: context(net(x)), x)
    assert state() == before
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        mode_lint(net, x.T)
    assert state() == before


def test_report_is_plain_json() -> None:
    loaded = json.loads(json.dumps(mode_lint(context, _x()).to_dict()))
    (finding,) = loaded["findings"]
    assert sorted(finding) == ["calls", "difference", "kind", "sentence", "site"]


@pytest.mark.parametrize(
    ("fn", "inputs", "error", "message"),
    [
        (torch.sin, [1.0], TypeError, "`inputs` should be tensors. Found float."),
        (torch.sin, torch.arange(3), ValueError, "`inputs` should hold at least one tensor of floating point"),
        (lambda x: x.argmax(), _x(), ValueError, "`fn` should return a tensor of floating point"),
        (lambda x: None, _x(), ValueError, "`fn` should return a tensor of floating point"),
        (lambda x: (x - x).sqrt(), _x(), ValueError, "`fn` should have finite derivatives."),
        (lambda x: torch.autograd.grad(x.sum(), x)[0] / 0, _x(), None, ""),
    ],
    ids=["float", "integers", "integer result", "no result", "infinite", "constant"],
)
def test_wrong_input_gives_one_clear_error(fn: Callable, inputs: object, error: type | None, message: str) -> None:
    if error is None:
        assert not mode_lint(fn, inputs)
        return
    with pytest.raises(error, match=re.escape(message)):
        mode_lint(fn, inputs)


# ruff: noqa: PT012, PT031 (a guard is a block of statements)
# --- constants that change ---------------------------------------------------------------------------------------


def _step(w: Tensor, target: Tensor, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    (w - target).square().sum().backward()
    optimizer.step()  # step


def _problem() -> tuple[nn.Parameter, torch.optim.Optimizer]:
    w = nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
    return w, torch.optim.SGD([w], lr=0.1, momentum=0.5)


@pytest.mark.parametrize("foreach", [False, True], ids=["one by one", "foreach"])
def test_an_optimizer_that_moves_its_constant_target(foreach: bool) -> None:
    w, _ = _problem()
    optimizer = torch.optim.Adam([w], lr=0.1, foreach=foreach)
    with pytest.warns(AliasWarning) as caught, alias_guard():
        target = stop_gradient(w, "lint.target")  # target
        w.grad = torch.ones_like(w)
        optimizer.step()  # first step
        _ = w - target  # use
    (warning,) = caught
    assert re.fullmatch(
        rf"The value that 'lint\.target' holds constant at \S*test_lint\.py:{_line('target')}:18 is used after that at "
        rf"\S*test_lint\.py:{_line('use')}:13, but its memory was changed by \S+ at "
        rf"\S*test_lint\.py:{_line('first step')}:9: .* A clone before the block would keep it\.",
        str(warning.message),
    )
    assert warning.filename == __file__
    assert warning.lineno == _line("use")


def test_a_target_that_is_kept_over_steps_is_found_in_the_second() -> None:
    w, optimizer = _problem()
    with pytest.warns(AliasWarning, match=rf"add\S* at \S*test_lint\.py:{_line('step')}:"), alias_guard():
        target = stop_gradient(w, "lint.kept")
        _step(w, target, optimizer)
        _step(w, target, optimizer)
    del target


def test_a_target_that_is_still_held_is_found_at_the_end() -> None:
    w, optimizer = _problem()
    with pytest.warns(AliasWarning, match="is still held at the end of `alias_guard`") as caught, alias_guard():
        target = stop_gradient(w, "lint.held")
        _step(w, target, optimizer)
    assert len(caught) == 1
    assert torch.equal(target, w)


def test_a_target_of_each_step_is_as_it_should_be() -> None:
    w, optimizer = _problem()
    net = nn.Linear(2, 2, dtype=torch.float64)
    with warnings.catch_warnings(), alias_guard():
        warnings.simplefilter("error")
        for _ in range(3):
            _step(w, stop_gradient(w, "lint.fresh"), optimizer)
            target = stop_gradient(net(w), "lint.output")
            _step(w, target, optimizer)
            _step(w, stop_gradient(w.clone(), "lint.clone"), optimizer)


@pytest.mark.parametrize(
    "write",
    [
        lambda w: w.data.mul_(2),
        lambda w: w.detach().zero_(),
        lambda w: torch.add(w.detach(), 1, out=w.detach()),
        lambda w: w.detach().view(-1)[:1].fill_(3),
        lambda w: w.data.__setitem__(0, 5.0),
        lambda w: torch._foreach_mul_([w.data], 2),
        lambda w: torch.nn.init.zeros_(w),
    ],
    ids=["data", "detach", "out", "part", "item", "foreach", "init"],
)
def test_every_way_to_write_in_place(write: Callable[[Tensor], object]) -> None:
    w = torch.ones(2, dtype=torch.float64, requires_grad=True)
    with pytest.warns(AliasWarning, match="is used after that"), alias_guard():
        target = stop_gradient(w, "lint.written")
        write(w)
        target.sum()


@pytest.mark.parametrize(
    "use",
    [
        lambda t: t.sum(),
        lambda t: t[0] * 2,
        lambda t: t.view(2, 1) + 1,
        lambda t: torch.stack([t, t]),
        lambda t: t[0].item(),
    ],
    ids=["itself", "element", "view", "in a list", "number"],
)
def test_every_way_to_use(use: Callable[[Tensor], object]) -> None:
    w = torch.ones(1, 2, requires_grad=True)
    with pytest.warns(AliasWarning, match="is used after that"), alias_guard():
        target = stop_gradient(w, "lint.used")[0]
        w.data.add_(1)
        use(target)


def test_the_backward_pass_uses_what_it_has_saved() -> None:
    """Through `.data` autograd does not notice: the gradient is silently that of another program."""
    w = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
    with pytest.warns(AliasWarning, match=rf"after that at \S*:{_line('backward')}:.* mul_ at \S*") as c, alias_guard():
        loss = (w * stop_gradient(w, "lint.saved")).sum()
        w.data.mul_(10)
        loss.backward()  # backward
    assert len(c) == 1
    assert w.grad.tolist() == [10, 20]


def test_reading_the_source_is_no_use_of_the_constant() -> None:
    w = torch.ones(2, requires_grad=True)
    with warnings.catch_warnings(), alias_guard():
        warnings.simplefilter("error")
        target = stop_gradient(w, "lint.source")
        w.data.add_(1)
        w.sum()
        (w * 2).sum()
        del target


def test_the_first_write_is_named() -> None:
    w = torch.ones(2, requires_grad=True)
    with pytest.warns(AliasWarning, match=rf"changed by mul_ at \S*:{_line('first write')}:"), alias_guard():
        target = stop_gradient(w, "lint.first")
        w.data.mul_(2)  # first write
        w.data.add_(1)
        target.sum()


def test_a_second_write_is_no_use() -> None:
    with warnings.catch_warnings(), alias_guard():
        warnings.simplefilter("error")
        target = stop_gradient(torch.ones(2), "lint.twice")
        target.mul_(2)
        target.add_(1)
        del target


def test_a_write_before_the_block_or_to_another_tensor_is_none() -> None:
    w, other = torch.ones(2), torch.ones(2)
    with warnings.catch_warnings(), alias_guard():
        warnings.simplefilter("error")
        w.add_(1)
        target = stop_gradient(w, "lint.before")
        other.add_(1)
        (target * other).sum()


def test_inside_of_functional_transforms() -> None:
    w = torch.tensor([1.0, 2.0], dtype=torch.float64)

    def loss(x: Tensor) -> Tensor:
        target = stop_gradient(x, "lint.func")
        x.detach().add_(1)
        return (x * target).sum()

    with pytest.warns(AliasWarning, match="is used after that"), alias_guard():
        torch.func.grad(loss)(w)


def test_blocks_that_are_open_or_compared_hold_nothing_or_are_watched() -> None:
    w = torch.ones(2, requires_grad=True)
    with warnings.catch_warnings(), alias_guard():
        warnings.simplefilter("error")
        stop_gradient(w, "lint.open")
        with unblock("lint.open"):
            target = stop_gradient(w, "lint.open")
        w.data.add_(1)
        target.sum()


def test_compiled_functions_are_watched() -> None:
    w = torch.ones(2, requires_grad=True)
    compiled = torch.compile(lambda w: stop_gradient(w, "lint.compiled"), backend="eager", fullgraph=True)
    compiled(w)
    with pytest.warns(AliasWarning, match=r"lint\.compiled"), alias_guard():
        target = compiled(w)
        w.data.add_(1)
        target.sum()


def test_nothing_is_left_behind() -> None:
    w = torch.ones(2, requires_grad=True)
    with pytest.raises(KeyError), alias_guard():
        stop_gradient(w, "lint.left")
        raise KeyError
    target = stop_gradient(w, "lint.left")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        w.data.add_(1)
        target.sum()
    from toolkit.blocks import is_quiet

    assert is_quiet()


def test_a_guard_inside_of_a_guard() -> None:
    w = torch.ones(2, requires_grad=True)
    with pytest.warns(AliasWarning) as caught, alias_guard(), alias_guard():
        target = stop_gradient(w, "lint.both")
        w.data.add_(1)
        target.sum()
    first, second = caught  # each of the two tells
    assert str(first.message) == str(second.message)


def test_a_warning_that_is_an_error_stops_the_program_at_the_use() -> None:
    w = torch.ones(2, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", AliasWarning)
        with pytest.raises(AliasWarning, match=r"lint\.error"), alias_guard():
            target = stop_gradient(w, "lint.error")
            w.data.add_(1)
            target.sum()
