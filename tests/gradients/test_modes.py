"""`mode_lint`: where forward and reverse mode part."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from toolkit import stop_gradient, stop_recording, unblock
from toolkit.gradients import mode_lint


def _line(marker: str) -> int:
    """Return the line of this file that ends with a comment."""
    lines = Path(__file__).read_text("utf-8").splitlines()
    (found,) = [number for number, line in enumerate(lines, 1) if line.endswith(f"# {marker}")]
    return found


def _x(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor([0.3, -1.2, 2.0], dtype=torch.float64).to(dtype)


def context(x):
    with torch.no_grad():  # context
        c = x.exp()
    return c * x


@torch.no_grad()  # decorator
def _average(x):
    return x.mean() * 2


def decorator(x):
    return _average(x) * x


@torch.no_grad()  # generator
def _averages(x):
    yield x.mean() * 2


def generator(x):
    return next(_averages(x)) * x


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
    "generator": generator,
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
    assert re.fullmatch(rf"\S*test_modes\.py:{_line(marker)}:\d+", finding.site)
    assert finding.kind == ("hook" if marker == "hook" else "region")
    assert finding.calls == (2 if marker == "generator" else 1)  # once up to the `yield`, once to be closed
    times = "" if finding.calls == 1 else f" ({finding.calls} times)"
    assert str(report).startswith(f"{finding.site}{times}: ")
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
    mended_by_a_region(_x())  # an ad-hoc block is known once it has run
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
        (lambda x, y: x + y, _x(), TypeError, "`fn` should take `inputs`. Found a function: missing a required"),
        (3, _x(), TypeError, "`fn` should be a function that returns tensors. Found int."),
        (lambda x: torch.autograd.grad(x.sum(), x)[0] / 0, _x(), None, ""),
    ],
    ids=["float", "integers", "integer result", "no result", "infinite", "arguments", "no function", "constant"],
)
def test_wrong_input_gives_one_clear_error(fn: Callable, inputs: object, error: type | None, message: str) -> None:
    if error is None:
        assert not mode_lint(fn, inputs)
        return
    with pytest.raises(error, match=re.escape(message)):
        mode_lint(fn, inputs)


@pytest.mark.parametrize("found", [None, 3])
def test_inputs_that_are_no_tensors_are_refused(found):
    with pytest.raises(TypeError, match=f"a tensor or a sequence of tensors. Found {type(found).__name__}"):
        mode_lint(torch.sin, found)


def test_inputs_that_are_not_dense_are_refused():
    with pytest.raises(ValueError, match=r"`inputs` should be dense tensors. Found a sparse_coo one"):
        mode_lint(lambda x: x.to_dense().sin(), torch.eye(2, dtype=torch.float64).to_sparse())
