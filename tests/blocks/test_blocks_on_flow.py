"""`stop_gradient(on_flow="error")`: no derivative of any kind passes, and none is stopped in silence."""

import re
from collections.abc import Callable

import pytest
import torch
import torch.export
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from toolkit import GradientFlowError, block, compare, scope, stop_gradient, traced_blocks, unblock
from toolkit.blocks import Block

GUARDED = block("test_on_flow.guarded", "No derivative should come here.")

# Dynamo reads `.grad` at a graph break.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]


def _leaf() -> Tensor:
    return torch.tensor([3.0, -2.0], dtype=torch.float64, requires_grad=True)


def _guarded(x: Tensor, name: Block | str | None = GUARDED) -> Tensor:
    return (x * stop_gradient(x * x, name, on_flow="error")).sum()


def _backward(f: Callable, x: Tensor) -> object:
    return torch.autograd.grad(f(x), x)[0]


def _inner(f: Callable, x: Tensor) -> object:
    """A derivative inside of a derivative: the block raises for the inner one already."""
    return torch.func.grad(lambda y: (y * torch.func.grad(f)(x)).sum())(x)


DERIVATIVES = {
    "backward": _backward,
    "grad": lambda f, x: torch.func.grad(f)(x),
    "vjp": lambda f, x: torch.func.vjp(f, x)[1](torch.ones((), dtype=x.dtype)),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "grad of vmap": lambda f, x: torch.func.grad(lambda y: torch.vmap(f)(y[:, None]).sum())(x),
    "vmap of grad": lambda f, x: torch.vmap(torch.func.grad(f))(x),
    "hessian": lambda f, x: torch.func.hessian(f)(x),
    "nested": _inner,
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
    "jacfwd": lambda f, x: torch.func.jacfwd(f)(x),
    "checkpoint": lambda f, x: _backward(lambda x: checkpoint(f, x, use_reentrant=False), x),
    "reentrant checkpoint": lambda f, x: checkpoint(f, x, use_reentrant=True).backward(),
}


@pytest.mark.parametrize("derivative", DERIVATIVES)
def test_a_derivative_of_any_kind_raises(derivative: str) -> None:
    with pytest.raises(GradientFlowError, match=r"the block 'test_on_flow\.guarded' at .*on_flow\.py:\d+:\d+\. Found"):
        DERIVATIVES[derivative](_guarded, _leaf())


@pytest.mark.parametrize("derivative", DERIVATIVES)
def test_opened_it_passes_what_the_whole_program_has(derivative: str) -> None:
    x, y = _leaf(), _leaf()
    with unblock(GUARDED):
        found = DERIVATIVES[derivative](_guarded, x)
    expected = DERIVATIVES[derivative](lambda y: (y * (y * y)).sum(), y)
    torch.testing.assert_close((found, x.grad), (expected, y.grad))


def test_the_value_is_as_it_is_and_shares_its_memory() -> None:
    x = nn.Parameter(torch.tensor([1.5, -0.25]))
    found = stop_gradient({"a": [x, None], "n": torch.arange(3)}, GUARDED, on_flow="error")
    assert type(found["a"][0]) is Tensor
    assert found["a"][0].data_ptr() == x.data_ptr()
    assert found["a"][1] is None
    assert not found["n"].requires_grad
    with pytest.raises(GradientFlowError):
        found["a"][0].sum().backward()


def test_what_no_derivative_reaches_raises_nothing() -> None:
    x, y = _leaf(), _leaf()
    held = stop_gradient(x.exp(), GUARDED, on_flow="error")
    assert torch.equal(torch.autograd.grad((held * y).sum(), y)[0], x.exp())  # the node is not on the way to y
    stop_gradient(held).sum().add(y.sum()).backward()  # a block behind it
    assert x.grad is None
    with torch.no_grad():
        assert not stop_gradient(x, GUARDED, on_flow="error").requires_grad
    assert torch.func.jvp(lambda y: (held * y).sum(), (y,), (y,))[1] == (held * y).sum()


class _NoDerivative(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input):
        return input.clone()

    @staticmethod
    def backward(ctx, cotangent):
        return None


def test_no_derivative_is_not_one_that_arrives() -> None:
    """A function that has none to give hands on None; the path ends before the block."""
    x = _leaf()
    value = _NoDerivative.apply(stop_gradient(x, GUARDED, on_flow="error")).sum() + x.sum()
    assert torch.equal(torch.autograd.grad(value, x)[0], torch.ones_like(x))


def test_a_zero_that_arrives_is_a_derivative() -> None:
    """Whether a path exists is a property of the program, and not of today's numbers."""
    x = _leaf()
    with pytest.raises(GradientFlowError):
        (0 * stop_gradient(x, GUARDED, on_flow="error")).sum().backward()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("adhoc", r"the block 'test_on_flow/adhoc' at \S*test_blocks_on_flow\.py:28:17\. Found a gradient"),
        (GUARDED.name, r"the block 'test_on_flow\.guarded' at \S*test_blocks_on_flow\.py:28:17\. Found a gradient"),
        (None, r"the block at \S*test_blocks_on_flow\.py:28:17\. Found a gradient"),
    ],
    ids=["ad hoc", "declared", "no name"],
)
def test_the_message_names_block_and_place(name: str | None, message: str) -> None:
    x = _leaf()
    with scope("test_on_flow"):
        value = _guarded(x, name)
    with pytest.raises(GradientFlowError, match=message):
        value.backward()
    with pytest.raises(GradientFlowError, match=r"Found a tangent\."):
        torch.func.jvp(lambda x: _guarded(x, name), (x,), (x,))


def test_a_place_can_be_opened() -> None:
    x = _leaf()
    with pytest.raises(GradientFlowError) as caught:
        _guarded(x, None).backward()
    site = re.search(r"at (\S+)\. Found", str(caught.value))[1]
    with unblock(site):
        torch.testing.assert_close(torch.autograd.grad(_guarded(x, None), x)[0], 3 * x.detach() ** 2)


def test_a_comparison_shows_what_arrives() -> None:
    x = _leaf()
    (effect,) = compare(lambda: _guarded(x), {"x": x}).effects
    assert effect.verdict.kind == "partial"
    assert effect.leak == pytest.approx((2 * x.detach() ** 2).norm().item(), rel=1e-14)


def test_only_two_ways() -> None:
    for on_flow in ("raise", None, "Error"):
        with pytest.raises(ValueError, match=rf"`on_flow` should be 'stop' or 'error'\. Found {on_flow!r}\."):
            stop_gradient(torch.ones(2), on_flow=on_flow)


def test_a_string_that_was_made_is_as_good_as_a_literal() -> None:
    x = _leaf()
    assert not stop_gradient(x, on_flow="".join(["st", "op"])).requires_grad


# --- graphs ------------------------------------------------------------------------------------------------------


@pytest.mark.keeps_its_sums
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_code_raises(backend: str) -> None:
    torch._dynamo.reset()
    compiled, x = torch.compile(_guarded, backend=backend), _leaf()
    for _ in range(2):
        with pytest.raises(GradientFlowError, match=r"'test_on_flow\.guarded' at \S*test_blocks_on_flow\.py:28:17"):
            compiled(x).backward()
        with unblock(GUARDED):
            torch.testing.assert_close(torch.autograd.grad(compiled(x), x)[0], 3 * x.detach() ** 2)


@pytest.mark.keeps_its_sums
def test_a_full_graph_refuses() -> None:
    torch._dynamo.reset()
    compiled, x = torch.compile(_guarded, backend="eager", fullgraph=True), _leaf()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="`on_flow` should be 'stop' inside of a full graph"):
        compiled(x)
    with unblock(GUARDED):
        torch.testing.assert_close(torch.autograd.grad(compiled(x), x)[0], 3 * x.detach() ** 2)


class _Model(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return _guarded(x)


def test_export_refuses() -> None:
    with pytest.raises(RuntimeError, match="`on_flow` should be 'stop' in a program that is exported"):
        torch.export.export(_Model(), (_leaf(),), strict=False)


def test_fx_keeps_it() -> None:
    traced, x = torch.fx.symbolic_trace(_Model()), _leaf()
    assert list(traced_blocks(traced).values()) == [GUARDED]
    with pytest.raises(GradientFlowError):
        traced(x).backward()
