"""The promises of `stop_gradient` and the switch: unchanged values, no derivative of any kind, and the way back."""

import contextlib
import contextvars
import copy
import dataclasses
import functools
import gc
import itertools
import pickle
import threading
import warnings
import weakref
from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from each import each
from torch import Tensor, nn
from torch.utils._pytree import register_pytree_node
from torch.utils.checkpoint import checkpoint

from toolkit import (
    Block,
    block,
    compare,
    declared_blocks,
    is_blocked,
    scope,
    stop_gradient,
    stop_recording,
    traced_blocks,
    unblock,
)
from toolkit.blocks import _sites

TARGET = block("test_blocks.target", "The target is a label.")
OTHER = block("test_blocks.other", "Another quantity that is held constant.")

pytestmark = [
    pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node:UserWarning"),  # torch.func.linearize's own
]


def _leaf(*values: float, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(values if len(values) > 1 else values[0], dtype=dtype, requires_grad=True)


class _Tagged(Tensor):
    """A subclass that `__torch_function__` keeps."""


# --- as it is ----------------------------------------------------------------------------------------------------


def _kinds() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(3, 4, generator=generator)
    made = {
        str(dtype).removeprefix("torch."): base.to(dtype).requires_grad_()
        for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128)
    }
    return made | {
        "zero-size": torch.zeros(2, 0, 3, requires_grad=True),
        "scalar": torch.tensor(2.0, requires_grad=True),
        "parameter": nn.Parameter(base.clone()),
        "non-leaf": base.clone().requires_grad_() * 2,
        "transposed": base.clone().requires_grad_().T,
        "every other column": base.clone().requires_grad_()[:, ::2],
        "expanded": torch.ones(3, 1, requires_grad=True).expand(3, 4),
        "channels last": torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last).requires_grad_(),
        "conjugate view": torch.randn(3, dtype=torch.complex64, generator=generator).requires_grad_().conj(),
        "negative view": torch.randn(3, dtype=torch.complex64, generator=generator).requires_grad_().conj().imag,
        "meta": torch.empty(3, 4, device="meta", requires_grad=True),
        "subclass": base.clone().as_subclass(_Tagged).requires_grad_(),
    }


@pytest.mark.parametrize("is_open", [False, True], ids=["closed", "open"])
@pytest.mark.parametrize("kind", _kinds())
def test_the_value_is_as_it_is(kind: str, is_open: bool) -> None:
    input = _kinds()[kind]
    with unblock(TARGET) if is_open else contextlib.nullcontext():
        output = stop_gradient(input, TARGET)
    assert output.requires_grad is is_open
    assert type(output) is (Tensor if kind == "parameter" else type(input))
    for attribute in ("shape", "dtype", "device", "layout"):
        assert getattr(output, attribute) == getattr(input, attribute)
    assert output.stride() == input.stride()
    assert output.storage_offset() == input.storage_offset()
    assert (output.is_conj(), output.is_neg()) == (input.is_conj(), input.is_neg())
    assert output._version == input._version
    assert output is not input
    if kind != "meta":
        assert output.untyped_storage().data_ptr() == input.untyped_storage().data_ptr()
        assert torch.equal(output, input)


@pytest.mark.parametrize("is_open", [False, True], ids=["closed", "open"])
@pytest.mark.parametrize("layout", ["coo", "coalesced coo", "csr", "csc", "nested", "jagged"])
def test_other_layouts(layout: str, is_open: bool) -> None:
    dense = torch.tensor([[0.0, 2.0, 0.0], [3.0, 0.0, 5.0]], dtype=torch.float64, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls these layouts a beta
        if layout in ("nested", "jagged"):
            kind = torch.strided if layout == "nested" else torch.jagged
            input = torch.nested.as_nested_tensor([dense[0], dense[1, :2]], layout=kind)
        else:
            make = {"csr": dense.to_sparse_csr, "csc": dense.to_sparse_csc}.get(layout, dense.to_sparse)
            input = make()
            if layout == "coo":
                input = torch.sparse_coo_tensor(input.indices(), input.values(), input.shape, check_invariants=True)
        with unblock(TARGET) if is_open else contextlib.nullcontext():
            output = stop_gradient(input, TARGET)
    assert output.requires_grad is is_open
    assert (output.layout, output.dtype, output.is_nested) == (input.layout, input.dtype, input.is_nested)
    if layout in ("coo", "coalesced coo"):
        assert output.is_coalesced() == input.is_coalesced()
        assert output._values().data_ptr() == input._values().data_ptr()
    elif layout in ("nested", "jagged"):
        assert all(torch.equal(a, b) for a, b in zip(output.unbind(), input.unbind(), strict=True))
    else:
        assert output.values().data_ptr() == input.values().data_ptr()


@pytest.mark.parametrize("is_open", [False, True], ids=["closed", "open"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.bool], ids=str)
def test_tensors_without_a_derivative_pass(dtype: torch.dtype, is_open: bool) -> None:
    input = torch.tensor([1, 0, 1], dtype=dtype)
    x = _leaf(1.0, 2.0, 3.0)
    with unblock(TARGET) if is_open else contextlib.nullcontext():
        integers, floats = stop_gradient((input, x), TARGET)
    assert torch.equal(integers, input)
    assert integers.dtype == dtype
    assert floats.requires_grad is is_open


CONSTANTS = [
    None,
    3.0,
    3,
    True,
    1j,
    "text",
    b"bytes",
    np.float32(1),
    np.int64(2),
    np.bool_(True),
    np.complex64(1j),
    np.datetime64("2020-01-01"),
    np.ones(2),
    np.array(["a", "b"]),
    torch.float32,
    torch.device("cpu"),
]


@pytest.mark.parametrize("constant", CONSTANTS, ids=lambda value: f"{type(value).__name__} {value}")
def test_what_has_no_derivative_passes_at_any_depth(constant: object) -> None:
    x = _leaf(1.0)
    assert stop_gradient(constant) is constant
    assert stop_gradient(constant, TARGET, on_flow="error") is constant
    with unblock(TARGET):
        found = stop_gradient({"a": [x, constant], "b": (Plain(x, constant), constant)}, TARGET)
        assert found["a"][0].requires_grad
        assert stop_gradient(constant, TARGET) is constant
    assert all(part is constant for part in (found["a"][1], found["b"][0].right, found["b"][1]))


def test_memory_is_shared_and_a_change_in_place_is_noticed() -> None:
    x = _leaf(1.0, 2.0)
    y = x * x
    stop_gradient(x).add_(1)
    assert x.tolist() == [2, 3]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_the_result_keeps_no_graph_alive() -> None:
    hidden = _leaf(1.0, 2.0).exp()
    alive, result = weakref.ref(hidden), stop_gradient(hidden)
    del hidden
    gc.collect()
    assert (result.grad_fn, result._base) == (None, None)
    assert alive() is None


def test_hooks_on_the_source_are_not_called() -> None:
    x, calls = _leaf(2.0), []
    hidden = x * 3
    hidden.register_hook(calls.append)
    (stop_gradient(hidden) * x).backward()
    assert calls == []
    with pytest.raises(RuntimeError, match="doesn't require gradient"):
        stop_gradient(hidden).register_hook(calls.append)
    with unblock(TARGET):
        (stop_gradient(hidden, TARGET) * x).backward()
    assert calls == [x]


# --- no derivative, of any kind ----------------------------------------------------------------------------------

# Of at most 20 rounded operations, whose terms cancel at most sixfold: cos^2 - sin^2 at 0.7.
ROUNDING = 6 * 20 * torch.finfo(torch.float64).eps

EXPRESSIONS = {  # each is f(x, stopped x), and its derivatives with respect to the first argument
    "x sg(x)": (lambda x, y: x * y, lambda x: x, lambda x: 0 * x),
    "x sg(exp x)": (lambda x, y: x * y.exp(), lambda x: x.exp(), lambda x: 0 * x),
    "sg(x) + 0 x": (lambda x, y: y + 0 * x, lambda x: 0 * x, lambda x: 0 * x),
    "x^2 sg(x)": (lambda x, y: x**2 * y, lambda x: 2 * x**2, lambda x: 2 * x),
    "sin(x) cos(sg x)": (
        lambda x, y: x.sin() * y.cos(),
        lambda x: x.cos() * x.cos(),
        lambda x: -x.sin() * x.cos(),
    ),
}
ORDERS = {
    "grad": lambda f, x: torch.autograd.grad(f(x), x)[0],
    "func.grad": lambda f, x: torch.func.grad(f)(x),
    "func.vjp": lambda f, x: torch.func.vjp(f, x)[1](torch.ones_like(x))[0],
    "func.jvp": lambda f, x: torch.func.jvp(f, (x,), (torch.ones_like(x),))[1],
    "func.jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "func.jacfwd": lambda f, x: torch.func.jacfwd(f)(x),
    "func.linearize": lambda f, x: torch.func.linearize(f, x)[1](torch.ones_like(x)),
    "dual numbers": lambda f, x: _dual(f, x),
    "vmap of grad": lambda f, x: torch.vmap(torch.func.grad(f))(x[None])[0],
    "grad of vmap": lambda f, x: torch.func.grad(lambda v: torch.vmap(f)(v[None])[0])(x),
    "functional.jacobian": lambda f, x: torch.autograd.functional.jacobian(f, x),
}
SECOND_ORDERS = {
    "grad of grad": lambda f, x: torch.autograd.grad(torch.autograd.grad(f(x), x, create_graph=True)[0], x)[0],
    "func.grad of func.grad": lambda f, x: torch.func.grad(torch.func.grad(f))(x),
    "func.hessian": lambda f, x: torch.func.hessian(f)(x),
    "forward over forward": lambda f, x: torch.func.jacfwd(torch.func.jacfwd(f))(x),
    "reverse over forward": lambda f, x: torch.func.jacrev(torch.func.jacfwd(f))(x),
}


def _dual(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(f(forward_ad.make_dual(x.detach(), torch.ones_like(x)))).tangent


def _region(expression: Callable[[Tensor, Tensor], Tensor], x: Tensor) -> Tensor:
    with stop_recording(TARGET):
        y = x * 1
    return expression(x, y)


FORMS = {"stop_gradient": lambda f, x: f(x, stop_gradient(x, TARGET)), "stop_recording": _region}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("form", FORMS)
@each("expression", EXPRESSIONS)
def test_first_derivatives(expression: str, form: str, order: str) -> None:
    f, slope, _ = EXPRESSIONS[expression]
    x = _leaf(0.7)

    def loss(x: Tensor) -> Tensor:
        return FORMS[form](f, x)

    torch.testing.assert_close(ORDERS[order](loss, x), slope(x.detach()), rtol=ROUNDING, atol=0)
    with unblock(TARGET):
        opened = ORDERS[order](loss, x)
    total = torch.autograd.grad(f(x, x), x)[0]
    torch.testing.assert_close(opened, total, rtol=ROUNDING, atol=0)
    torch.testing.assert_close(ORDERS[order](loss, x), slope(x.detach()), rtol=ROUNDING, atol=0)


@pytest.mark.parametrize("order", SECOND_ORDERS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("expression", ["x^2 sg(x)", "sin(x) cos(sg x)"])
def test_second_derivatives(expression: str, form: str, order: str) -> None:
    f, _, curvature = EXPRESSIONS[expression]
    x = _leaf(0.7)

    def loss(x: Tensor) -> Tensor:
        return FORMS[form](f, x)

    torch.testing.assert_close(SECOND_ORDERS[order](loss, x), curvature(x.detach()), rtol=ROUNDING, atol=0)
    with unblock(TARGET):
        opened = SECOND_ORDERS[order](loss, x)
    total = torch.func.hessian(lambda x: f(x, x))(x)
    torch.testing.assert_close(opened, total.detach(), rtol=ROUNDING, atol=0)


def test_higher_derivatives_are_those_of_the_partial_function() -> None:
    """As a Taylor mode would have them: sin(x) cos(sg x), differentiated four times, is sin(x) cos(x)."""
    x = _leaf(0.4)
    derivative = lambda x: x.sin() * stop_gradient(x.cos())  # noqa: E731
    for expected in (x.cos() * x.cos(), -x.sin() * x.cos(), -x.cos() * x.cos(), x.sin() * x.cos()):
        derivative = torch.func.grad(derivative)
        torch.testing.assert_close(derivative(x), expected)


def test_an_inner_block_stops_every_level() -> None:
    def inner(x: Tensor) -> Tensor:
        return torch.func.grad(lambda y: stop_gradient(y, TARGET) * y)(x)

    x = _leaf(3.0)
    assert torch.func.grad(inner)(x) == 0
    with unblock(TARGET):
        assert torch.func.grad(inner)(x) == 2


@pytest.mark.parametrize("size", [16], ids=lambda size: f"{size} x {size}")
def test_any_subset_that_is_stopped_is_the_partial_derivative(size: int) -> None:
    """After TensorFlow's testStopGradients: every subset of four operands, stopped or opened, against four leaves."""
    values = [0.5, -1.3, 2.1, 0.9]
    subsets = [set(itertools.compress(range(4), bits)) for bits in itertools.product([0, 1], repeat=4)]
    assert len(subsets) == size

    def program(operands: list[Tensor]) -> Tensor:
        a, b, c, d = operands
        return a * b.sin() + (c * d).exp() * a + b * c**2 * d

    def chained(x: Tensor) -> list[Tensor]:
        return [x * values[0], (x + values[1]).tanh(), x**2 - values[2], x.exp() * values[3]]

    x = _leaf(0.8)
    slopes = [torch.autograd.grad(operand, x)[0] for operand in chained(x)]
    leaves = [operand.detach().requires_grad_() for operand in chained(x)]
    partials = torch.autograd.grad(program(leaves), leaves)
    names = [f"subset.{i}" for i in range(4)]

    def stopped(x: Tensor, subset: set[int]) -> Tensor:
        return program([stop_gradient(v, names[i]) if i in subset else v for i, v in enumerate(chained(x))])

    stopped(x, {0, 1, 2, 3})
    for built, opened in itertools.product(subsets, subsets):
        with unblock(*(names[i] for i in built & opened)):
            value = stopped(x, built)
            (found,) = torch.autograd.grad(value, x, allow_unused=True) if value.requires_grad else (None,)
        passing = [i for i in range(4) if i not in built or i in opened]
        assert (found is None) == (not passing)
        if passing:
            torch.testing.assert_close(found, sum(slopes[i] * partials[i] for i in passing), rtol=1e-13, atol=1e-15)


def test_partial_derivatives_of_a_chain() -> None:
    x = _leaf(3.0)
    y = 2 * x
    assert torch.autograd.grad(x + y, [x, y], retain_graph=True) == (3, 1)
    constant = stop_gradient(y).requires_grad_()
    assert torch.autograd.grad(x + constant, [x, constant]) == (1, 1)


def test_a_cut_path_gives_none_and_not_zero() -> None:
    x = _leaf(1.0, 2.0)
    first, second = x.split(1)
    kept = stop_gradient(first) + second
    assert torch.autograd.grad(kept, [first, second], allow_unused=True) == (None, 1)
    assert not stop_gradient(x).sum().requires_grad
    assert torch.equal(torch.func.grad(lambda x: stop_gradient(x).sum())(x), torch.zeros(2))


def test_only_the_operand_that_is_stopped() -> None:
    x, y = _leaf(2.0), _leaf(5.0)
    (x * y + stop_gradient(x * y)).backward()
    assert (x.grad, y.grad) == (5, 2)


def test_a_frozen_slope_at_a_pole_is_no_nan() -> None:
    x = _leaf(0.0)
    (x + stop_gradient(x.sqrt())).backward()
    assert x.grad == 1


def test_complex_derivatives() -> None:
    z = torch.tensor([1 + 2j, -0.5 + 0.3j], dtype=torch.complex128, requires_grad=True)
    (z * stop_gradient(z.exp(), TARGET)).abs().square().sum().backward()
    expected = 2 * z * z.exp().abs().square()
    torch.testing.assert_close(z.grad, expected.detach())


def test_inside_a_custom_function() -> None:
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx, cotangent):
            (x,) = ctx.saved_tensors
            return cotangent * 2 * stop_gradient(x, TARGET) / x

    x = _leaf(3.0)
    for is_open, expected in ((False, -2 / 3), (True, 0.0)):
        with unblock(TARGET) if is_open else contextlib.nullcontext():
            (slope,) = torch.autograd.grad(Scaled.apply(x), x, create_graph=True)
            (curvature,) = torch.autograd.grad(slope, x)
        assert slope == 2
        assert curvature.item() == pytest.approx(expected, abs=1e-15)


def test_under_autocast() -> None:
    weight = torch.randn(3, 3, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = weight @ weight
        stopped = stop_gradient(hidden)
        assert stopped.dtype == hidden.dtype == torch.bfloat16
        assert not stopped.requires_grad
        with unblock(TARGET):
            assert stop_gradient(hidden, TARGET).requires_grad


@pytest.mark.parametrize("is_open", [False, True], ids=["closed", "open"])
@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@pytest.mark.parametrize("form", FORMS)
def test_in_a_checkpoint(form: str, reentrant: bool, is_open: bool) -> None:
    f = EXPRESSIONS["x^2 sg(x)"][0]
    x = _leaf(0.7)
    with unblock(TARGET) if is_open else contextlib.nullcontext():
        checkpoint(lambda x: FORMS[form](f, x) * x, x, use_reentrant=reentrant).backward()
    assert x.grad.item() == pytest.approx((4 if is_open else 3) * 0.7**3, rel=1e-14)


def test_under_no_grad_and_inference_mode() -> None:
    x = _leaf(1.0, 2.0)
    with torch.no_grad():
        assert torch.equal(stop_gradient(x), x)
    with torch.inference_mode():
        y = stop_gradient(torch.ones(2), TARGET)
        assert y.is_inference()


# --- trees -------------------------------------------------------------------------------------------------------

Pair = namedtuple("Pair", ["left", "right"])


class Point(NamedTuple):
    x: Tensor
    y: Tensor


@dataclasses.dataclass
class Plain:
    left: Tensor
    right: Tensor


@dataclasses.dataclass(frozen=True)
class Frozen:
    left: Tensor
    right: Tensor


@dataclasses.dataclass(slots=True)
class Slotted:
    left: Tensor
    right: Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenSlotted:
    left: Tensor
    right: Tensor


@dataclasses.dataclass
class Derived:
    left: Tensor
    right: Tensor = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.right = self.left * 2


class Registered:
    """Only pytrees know what it holds; the note is no part of the tree."""

    def __init__(self, left: object, right: object, note: object) -> None:
        self.left, self.right, self.note = left, right, note


class Output(OrderedDict):
    """After the outputs of transformers, which refuse to be updated."""

    def update(self, *_: object) -> None:
        raise RuntimeError("cannot be updated")


register_pytree_node(
    Registered, lambda tree: ([tree.left, tree.right], tree.note), lambda parts, note: Registered(*parts, note)
)
register_pytree_node(
    Output, lambda tree: (list(tree.values()), list(tree)), lambda values, keys: Output(zip(keys, values, strict=True))
)


TREES: dict[str, Callable[[Tensor, Tensor], object]] = {
    "dict": lambda a, b: {"left": a, "right": b},
    "ordered dict": lambda a, b: OrderedDict(right=b, left=a),
    "user dict": lambda a, b: UserDict(left=a, right=b),
    "read-only dict": lambda a, b: MappingProxyType({"left": a, "right": b}),
    "default dict": lambda a, b: defaultdict(list, left=a, right=b),
    "dict that is registered": lambda a, b: Output(left=a, right=b),
    "registered": lambda a, b: Registered(a, b, note=object()),
    "deque": lambda a, b: deque([a, b]),
    "size": lambda a, b: (a, b.shape),
    "list": lambda a, b: [a, b],
    "tuple": lambda a, b: (a, b),
    "namedtuple": Pair,
    "typed namedtuple": Point,
    "dataclass": Plain,
    "frozen dataclass": Frozen,
    "slotted dataclass": Slotted,
    "frozen slotted dataclass": FrozenSlotted,
    "field that is not an argument": lambda a, b: Derived(a),
    "nested": lambda a, b: {"a": [(a, None), Frozen(b, torch.arange(3))], "b": {}},
    "nested in others": lambda a, b: deque([Registered([a], {"b": b}, note="b"), OrderedDict(n=3, b=b)]),
    "empty": lambda a, b: [],
    "packed sequence": lambda a, b: nn.utils.rnn.pack_sequence([a, b[:2]]),
    "return type": lambda a, b: torch.max(torch.stack([a, b]), dim=0),
}


def _tensors(tree: object) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        yield from itertools.chain.from_iterable(map(_tensors, tree.values()))
    elif isinstance(tree, (list, tuple, deque)):
        yield from itertools.chain.from_iterable(map(_tensors, tree))
    elif isinstance(tree, Registered):
        yield from itertools.chain(_tensors(tree.left), _tensors(tree.right))
    elif dataclasses.is_dataclass(tree):
        for field in dataclasses.fields(tree):
            yield from _tensors(getattr(tree, field.name))


@pytest.mark.parametrize("is_open", [False, True], ids=["closed", "open"])
@each("tree", TREES)
def test_trees_keep_their_type_and_structure(tree: str, is_open: bool) -> None:
    input = TREES[tree](_leaf(1.0, 2.0, 3.0), _leaf(0.5, 0.25, 7.0))
    reached = any(tensor.requires_grad for tensor in _tensors(input))
    assert reached or tree == "empty"
    with unblock(TARGET) if is_open and reached else contextlib.nullcontext():
        output = stop_gradient(input, TARGET)
    assert type(output) is type(input)
    assert output is not input
    if isinstance(input, dict):
        assert list(output) == list(input)
    for before, after in zip(_tensors(input), _tensors(output), strict=True):
        assert after is not before
        assert torch.equal(after, before)
        assert after.data_ptr() == before.data_ptr()
        assert after.requires_grad is (before.requires_grad and is_open)


def test_a_default_dict_keeps_its_default() -> None:
    output = stop_gradient(defaultdict(list, {1: _leaf(1.0)}))
    assert output["new"] == []
    assert not output[1].requires_grad


@pytest.mark.parametrize("size", [None, 3])
def test_a_deque_keeps_its_bound(size: int | None) -> None:
    input = deque([_leaf(1.0), 5], maxlen=size)
    output = stop_gradient(input)
    assert (type(output), output.maxlen, output[1]) == (deque, size, 5)
    assert not output[0].requires_grad


def test_what_is_beside_the_tree_of_a_registered_class_stays() -> None:
    note = object()
    assert stop_gradient(Registered(_leaf(1.0), 2, note=note)).note is note
    with pytest.raises(TypeError, match=r"Found builtins\.set\."):
        stop_gradient(Registered(_leaf(1.0), {2}, note=note))


def test_an_array_that_may_hold_tensors_is_refused() -> None:
    input = np.empty(1, dtype=object)
    input[0] = _leaf(1.0)
    with pytest.raises(TypeError, match=r"array of numbers.* Found numpy\.ndarray\."):
        stop_gradient([input])


def test_a_cached_property_does_not_keep_the_gradient() -> None:
    @dataclasses.dataclass
    class Cached:
        mean: Tensor

        @functools.cached_property
        def square(self) -> Tensor:
            return self.mean**2

    input = Cached(_leaf(2.0))
    assert input.square.requires_grad
    assert not stop_gradient(input).square.requires_grad
    assert input.square.requires_grad


def test_the_input_tree_is_not_changed() -> None:
    input = {"a": [_leaf(1.0)]}
    stop_gradient(input)
    assert input["a"][0].requires_grad


@pytest.mark.parametrize(
    ("input", "name"),
    [
        (nn.Linear(1, 1), "torch.nn.modules.linear.Linear"),
        ({1, 2}, "builtins.set"),
        (iter([]), "builtins.list_iterator"),
        (torch.relu, "builtins.builtin_function_or_method"),
        (Plain, "builtins.type"),
        (bytearray(b"bytes"), "builtins.bytearray"),
        ({"a": [len]}, "builtins.builtin_function_or_method"),
        (MappingProxyType({"a": {2}}), "builtins.set"),
        (deque([object()]), "builtins.object"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
@pytest.mark.parametrize("is_open", [False, True], ids=["closed", "open"])
def test_anything_else_is_a_type_error_that_names_the_type(input: object, name: str, is_open: bool) -> None:
    with pytest.raises(TypeError, match=rf"`input` should be a tensor.* Found {name}\."):
        with unblock(TARGET) if is_open else contextlib.nullcontext():
            stop_gradient(input, TARGET)


@pytest.mark.parametrize("name", [3, 1.5, "", ("a",), TARGET.name.encode()], ids=repr)
@pytest.mark.parametrize("call", [lambda name: stop_gradient(torch.ones(2), name), lambda name: _enter(name)])
def test_a_name_is_a_block_or_a_string(call: Callable, name: object) -> None:
    with pytest.raises(TypeError, match="`name` should be a Block or a non-empty string"):
        call(name)


def _enter(name: object) -> None:
    with stop_recording(name):
        pass


# --- blocks and their names --------------------------------------------------------------------------------------


def test_a_declared_block_is_a_name_and_a_reason() -> None:
    assert declared_blocks()["test_blocks.target"] is TARGET
    assert (TARGET.name, TARGET.why) == ("test_blocks.target", "The target is a label.")
    assert list(declared_blocks()) == sorted(declared_blocks())
    with pytest.raises(dataclasses.FrozenInstanceError):
        TARGET.name = "other"


def test_the_registry_cannot_be_changed_through_its_copy() -> None:
    declared_blocks().clear()
    assert "test_blocks.target" in declared_blocks()


@pytest.mark.parametrize(
    ("name", "why", "error", "message"),
    [
        ("test_blocks.target", "Again.", ValueError, "Found 'test_blocks.target', which is declared already"),
        ("", "Why.", ValueError, "`name` should not be empty"),
        ("test_blocks.new", " ", ValueError, "`why` should not be empty"),
        (3, "Why.", TypeError, "`name` should be a string. Found int"),
        ("test_blocks.new", None, TypeError, "`why` should be a string. Found NoneType"),
    ],
    ids=["declared twice", "no name", "no reason", "int", "none"],
)
def test_a_declaration_is_checked(name: object, why: object, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        block(name, why)
    assert "test_blocks.new" not in declared_blocks()


def test_a_name_that_was_used_before_can_be_declared() -> None:
    """A string means the declared block; it must not matter that the module that declares it is imported later."""
    x = _leaf(2.0)
    stop_gradient(x, "test_blocks.late")
    assert declared_blocks()["test_blocks.late"].why == ""
    late = block("test_blocks.late", "Declared after its first use.")
    assert declared_blocks()["test_blocks.late"] is late
    with unblock(late):
        assert stop_gradient(x, "test_blocks.late").requires_grad


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda b: pickle.loads(pickle.dumps(b))])
def test_a_copy_of_a_block_is_the_block(copied: Callable[[Block], Block]) -> None:
    other = copied(TARGET)
    assert other == TARGET
    assert hash(other) == hash(TARGET)
    with unblock(other):
        assert stop_gradient(_leaf(1.0), TARGET).requires_grad


def test_a_string_names_an_ad_hoc_block() -> None:
    x = _leaf(2.0)
    stop_gradient(x, "adhoc.one")
    assert declared_blocks()["adhoc.one"] == Block("adhoc.one", "")
    with unblock("adhoc.one"):
        assert stop_gradient(x, "adhoc.one").requires_grad
        assert not stop_gradient(x, TARGET).requires_grad
        assert not stop_gradient(x).requires_grad


def test_a_string_can_name_a_declared_block() -> None:
    with unblock("test_blocks.target"):
        assert stop_gradient(_leaf(1.0), TARGET).requires_grad
        assert stop_gradient(_leaf(1.0), "test_blocks.target").requires_grad


def test_blocks_without_a_name_are_known_by_line_and_column() -> None:
    x = _leaf(3.0)

    def product() -> Tensor:
        return stop_gradient(x) * stop_gradient(x) * x

    line = product.__code__.co_firstlineno + 1
    first = "        return stop_gradient(x) * stop_gradient(x) * x".index("stop")
    sites = [f"{__file__}:{line}:{column + 1}" for column in (first, first + len("stop_gradient(x) * "))]
    sites = [site.removeprefix(f"{Path.cwd()}/") for site in sites]
    assert torch.autograd.grad(product(), x) == (9,)
    for opened, expected in (([], 9), (sites[:1], 18), (sites[1:], 18), (sites, 27)):
        with unblock(*opened):
            assert torch.autograd.grad(product(), x) == (expected,)
    with pytest.raises(RuntimeError, match="opening changed nothing"), unblock(f"{sites[0]}0"):
        product()


# Both stop a gradient at the same line and column, in files of the same name.
SAME_PLACE = "from toolkit import stop_gradient\n\ndef square(x):\n    return x * stop_gradient(x)\n"


def _place_of(file: Path) -> tuple[str, Callable[[Tensor], Tensor]]:
    """Write a program that stops a gradient into a file, and return its place's name, and the program."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(SAME_PLACE)
    names: dict[str, Callable] = {}
    exec(compile(SAME_PLACE, str(file), "exec"), names)
    x = _leaf(3.0)
    (effect,) = compare(lambda: names["square"](x), {"x": x}).effects
    return effect.name.removesuffix(":4:16"), names["square"]


def test_places_outside_of_the_current_folder_are_known_by_where_they_are_imported_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work, site = tmp_path / "work", tmp_path / "site"
    monkeypatch.syspath_prepend(site)
    monkeypatch.syspath_prepend(site / "vendored")
    work.mkdir()
    monkeypatch.chdir(work)
    first, square = _place_of(site / "first" / "ops.py")
    second, _ = _place_of(site / "second" / "ops.py")
    assert (first, second) == ("first/ops.py", "second/ops.py")
    x = _leaf(3.0)
    with unblock("first/ops.py:4:16"):
        assert torch.autograd.grad(square(x), x)[0] == 6
    with pytest.raises(RuntimeError, match="opening changed nothing"), unblock("second/ops.py:4:16"):
        square(x)
    assert _place_of(site / "vendored" / "third" / "ops.py")[0] == "third/ops.py"  # the longest entry has it
    assert _place_of(tmp_path / "elsewhere" / "ops.py")[0] == str(tmp_path / "elsewhere" / "ops.py")
    assert _place_of(work / "lib" / "ops.py")[0] == "lib/ops.py"


def test_the_places_of_code_that_is_made_anew_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_sites, "_MOST_KNOWN", 8)
    for spaces in range(30):
        names: dict[str, Callable] = {"stop_gradient": stop_gradient}
        exec(f"square = lambda x: {' ' * spaces}x * stop_gradient(x)", names)
        x = _leaf(3.0)
        (effect,) = compare(functools.partial(names["square"], x), x).effects
        assert effect.name == f"<string>:1:{24 + spaces}"
        assert len(_sites._known) <= 8


def test_a_place_keeps_its_name_when_the_import_path_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    file = tmp_path / "site" / "kept" / "ops.py"
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert _place_of(file)[0] == "kept/ops.py"
    monkeypatch.syspath_prepend(tmp_path / "site" / "kept")
    assert _place_of(file)[0] == "kept/ops.py"


@pytest.mark.parametrize("other", ["here/ops.py", "site/ops.py"])
def test_a_path_that_could_be_two_files_is_written_out(
    other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for folder in ("site", "src"):
        monkeypatch.syspath_prepend(tmp_path / folder)
    (tmp_path / "also src").symlink_to("src")  # no second file
    monkeypatch.syspath_prepend(tmp_path / "also src")
    assert _place_of(tmp_path / "src" / "alone.py")[0] == "alone.py"
    assert _place_of(tmp_path / "also src" / "alone.py")[0] == "alone.py"
    (tmp_path / "src" / "ops.py").touch()
    assert _place_of(tmp_path / other)[0] == ("ops.py" if other == "here/ops.py" else str(tmp_path / other))
    assert _place_of(tmp_path / "src" / "ops.py")[0] == str(tmp_path / "src" / "ops.py")


def test_code_without_a_file_keeps_its_name() -> None:
    names: dict[str, Callable] = {}
    exec(compile(SAME_PLACE, "<made up>", "exec"), names)
    x = _leaf(3.0)
    (effect,) = compare(lambda: names["square"](x), {"x": x}).effects
    assert effect.name == "<made up>:4:16"


# --- open and closed ---------------------------------------------------------------------------------------------


def _slope(x: Tensor, *names: Block | str | None) -> float:
    """Return the derivative of x times the product of x stopped under each name: 1 plus the number that are open."""
    value = x
    for name in names:
        value = value * stop_gradient(x, name) / x.detach()
    return torch.autograd.grad(value, x)[0].item()


def test_open_and_closed_again() -> None:
    x = _leaf(3.0)
    for _ in range(2):
        assert _slope(x, TARGET) == 1
        with unblock(TARGET):
            assert _slope(x, TARGET) == 2
            assert not is_blocked(TARGET)
        assert is_blocked(TARGET)
    assert _slope(x, TARGET) == 1


def test_several_blocks_and_nested_ones() -> None:
    x = _leaf(3.0)
    with unblock(TARGET, OTHER):
        assert _slope(x, TARGET, OTHER) == 3
    with unblock(TARGET):
        assert _slope(x, TARGET, OTHER) == 2
        with unblock(OTHER):
            assert _slope(x, TARGET, OTHER) == 3
        with unblock(TARGET):  # entered again
            assert _slope(x, TARGET, OTHER) == 2
        assert _slope(x, TARGET, OTHER) == 2
    assert _slope(x, TARGET, OTHER) == 1


def test_no_block_at_all_may_be_opened() -> None:
    with unblock():
        assert _slope(_leaf(3.0), TARGET) == 1


def test_unblock_as_a_decorator() -> None:
    @unblock(TARGET)
    def slope() -> float:
        return _slope(_leaf(3.0), TARGET)

    assert slope() == slope() == 2
    assert _slope(_leaf(3.0), TARGET) == 1


def test_an_exception_closes_the_block_and_is_not_replaced() -> None:
    with pytest.raises(ZeroDivisionError), unblock(TARGET):
        raise ZeroDivisionError  # before the block was reached: the body's own error is the one to see
    assert is_blocked(TARGET)
    assert _slope(_leaf(3.0), TARGET) == 1


def test_an_unknown_name_fails_on_entry_with_the_close_matches() -> None:
    entered = False
    with pytest.raises(ValueError, match=r"Found 'test_block\.targt'\. Did you mean .*'test_blocks\.target'"):
        with unblock("test_block.targt"):
            entered = True
    assert not entered
    with pytest.raises(ValueError, match=r"Found 'zzzzzzzzz'\. \(A declared block"), unblock("zzzzzzzzz"):
        pass
    with pytest.raises(ValueError, match="known block"), unblock(TARGET, Block("nobody.declared", "this")):
        pass
    with pytest.raises(TypeError, match=r"should be a Block or a string\. Found NoneType"), unblock(None):
        pass
    assert is_blocked(TARGET)
    with pytest.raises(ValueError, match="known block"):
        is_blocked("zzzzzzzzz")


@pytest.mark.parametrize(
    "body",
    [
        lambda: None,
        lambda: stop_gradient(torch.ones(2), TARGET),
        lambda: stop_gradient(torch.arange(3), TARGET),
        lambda: stop_gradient(None, TARGET),
        lambda: stop_gradient([3.0, "text"], TARGET),
        lambda: stop_gradient([], TARGET),
        lambda: stop_gradient(_leaf(1.0), OTHER),
        lambda: stop_gradient(_leaf(1.0)),
        lambda: torch.no_grad()(lambda: stop_gradient(_leaf(1.0) * 2, TARGET))(),
    ],
    ids=["nothing", "constant", "integer", "none", "number", "empty", "another block", "unnamed", "no graph"],
)
def test_a_block_that_no_gradient_reaches_fails_on_exit(body: Callable[[], object]) -> None:
    with pytest.raises(RuntimeError, match=r"Found none at 'test_blocks\.target': opening changed nothing"):
        with unblock(TARGET):
            body()
    assert is_blocked(TARGET)


def test_the_message_names_only_the_blocks_that_were_not_reached() -> None:
    with pytest.raises(RuntimeError, match=r"Found none at 'test_blocks\.other'"), unblock(TARGET, OTHER):
        stop_gradient(_leaf(1.0), TARGET)


def test_an_inner_unblock_counts_for_the_outer_one() -> None:
    with unblock(TARGET), unblock(TARGET):
        stop_gradient(_leaf(1.0), TARGET)


@pytest.mark.parametrize(
    "transform",
    [
        lambda f: torch.func.jvp(f, (torch.ones(()),), (torch.ones(()),)),
        lambda f: torch.func.grad(f)(torch.ones(())),
        lambda f: torch.vmap(torch.func.grad(f))(torch.ones(3)),
        lambda f: torch.func.jacfwd(f)(torch.ones(())),
        lambda f: _dual(f, torch.ones(())),
        lambda f: torch.vmap(f)(torch.ones(3, requires_grad=True)),
    ],
    ids=["jvp", "grad", "vmap of grad", "jacfwd", "dual numbers", "vmap over a leaf"],
)
def test_a_derivative_of_any_kind_reaches_a_block(transform: Callable) -> None:
    with unblock(TARGET):
        transform(lambda x: x * stop_gradient(x, TARGET))


def test_vmap_alone_reaches_nothing() -> None:
    with pytest.raises(RuntimeError, match="opening changed nothing"), unblock(TARGET):
        torch.vmap(lambda x: stop_gradient(x, TARGET))(torch.ones(3))


# --- scopes ------------------------------------------------------------------------------------------------------


def test_a_scope_prefixes_ad_hoc_names() -> None:
    x = _leaf(3.0)

    def slope() -> float:
        with scope("critic"):
            outer = _slope(x, "scoped")
            with scope("online"):
                return outer * 10 + _slope(x, "scoped", TARGET, None)

    assert slope() == 11
    assert {"critic/scoped", "critic/online/scoped"} <= declared_blocks().keys()
    assert "scoped" not in declared_blocks()
    with unblock("critic/scoped"):
        assert slope() == 21
    with unblock("critic/online/scoped"):
        assert slope() == 12
    with unblock(TARGET):  # a declared block keeps its name
        assert slope() == 12


def test_is_blocked_has_the_names_of_its_scope() -> None:
    x = _leaf(3.0)
    with scope("is_blocked"):
        stop_gradient(x, "here")
        assert is_blocked("here")
        assert is_blocked(TARGET)
        with unblock("is_blocked/here"):
            assert not is_blocked("here")
            stop_gradient(x, "here")
    with pytest.raises(ValueError, match="known block"):
        is_blocked("here")


def test_a_scope_ends_with_an_exception() -> None:
    with pytest.raises(ZeroDivisionError), scope("broken"):
        raise ZeroDivisionError
    stop_gradient(_leaf(1.0), "after.broken")
    assert "after.broken" in declared_blocks()


@pytest.mark.parametrize("name", ["", None, 3, TARGET])
def test_the_name_of_a_scope_is_checked(name: object) -> None:
    with pytest.raises(ValueError, match="`name` should be a non-empty string"), scope(name):
        pass


# --- regions -----------------------------------------------------------------------------------------------------


def test_a_region_stops_its_part_alone() -> None:
    """After TensorFlow's testTapeStopRecording: what follows the region is recorded again."""
    x = _leaf(3.0)
    with stop_recording(TARGET):
        constant = x * x
        assert not torch.is_grad_enabled()
    assert torch.is_grad_enabled()
    (constant * x).backward()
    assert not constant.requires_grad
    assert x.grad == 9
    with unblock(TARGET):
        with stop_recording(TARGET):
            opened = x * x
        assert torch.autograd.grad(opened * x, x) == (27,)


def test_a_region_ends_with_an_exception() -> None:
    with pytest.raises(ZeroDivisionError), stop_recording(TARGET):
        raise ZeroDivisionError
    assert torch.is_grad_enabled()
    assert forward_ad._is_fwd_grad_enabled()


def test_a_region_as_a_decorator() -> None:
    @stop_recording("region.decorated")
    def square(x: Tensor) -> Tensor:
        return x * x

    x = _leaf(3.0)
    assert not square(x).requires_grad
    with unblock("region.decorated"):
        assert square(x).requires_grad
    assert not square(x).requires_grad


def test_a_region_as_a_decorator_of_a_generator_function() -> None:
    w = _leaf(2.0)

    @stop_recording("region.generator")
    def squares() -> Iterator[Tensor]:
        factor = yield w * w
        yield w * factor

    def values() -> list[Tensor]:
        made = squares()
        first = next(made)
        assert torch.is_grad_enabled()  # the region ends where the generator waits
        return [first, made.send(3 * w)]

    assert [value.requires_grad for value in values()] == [False, False]
    with unblock("region.generator"):
        assert [value.requires_grad for value in values()] == [True, True]
    found = compare(lambda: torch.stack(values()).sum() * w, {"w": w})
    assert found.blocked["w"] == 16  # w^2 + 3 w w, held, times w
    assert found.gradient(["region.generator"])["w"] == 48
    assert found["region.generator"].site.startswith("tests/blocks/test_blocks.py:")


@pytest.mark.parametrize("is_generator", [False, True])
def test_a_region_refuses_to_decorate_a_coroutine(is_generator: bool) -> None:
    async def later() -> None:
        pass

    async def series() -> AsyncIterator[None]:
        yield

    with pytest.raises(TypeError, match=r"Found the coroutine .*: use `with` inside of it"):
        stop_recording("region.later")(series if is_generator else later)


def test_a_region_inside_of_a_region() -> None:
    x = _leaf(3.0)

    def value() -> Tensor:
        with stop_recording("region.outer"):
            with stop_recording("region.inner"):
                inside = x * x
            return inside * x

    assert not value().requires_grad
    with unblock("region.inner"):
        assert not value().requires_grad  # the outer region is still in place
        with stop_recording("region.inner"):
            assert (x * x).requires_grad
    with unblock("region.outer"):
        assert torch.autograd.grad(value(), x) == (9,)
    with unblock("region.outer", "region.inner"):
        assert torch.autograd.grad(value(), x) == (27,)


def test_a_region_leaves_no_grad_as_it_was() -> None:
    x = _leaf(3.0)
    with torch.no_grad():
        with stop_recording(TARGET):
            pass
        assert not torch.is_grad_enabled()
    with pytest.raises(RuntimeError, match="opening changed nothing"), unblock(TARGET), torch.no_grad():
        with stop_recording(TARGET):
            assert not (x * x).requires_grad


def test_what_is_skipped_while_blocked_is_built_when_open() -> None:
    """The pattern of an expensive graph: no graph while the block is in place, all of it when it is open."""
    x = _leaf(3.0)

    def value() -> Tensor:
        with stop_recording(TARGET):
            expensive = x.exp() * x
        return x * stop_gradient(expensive, TARGET)

    expected = x.exp() * x
    assert torch.autograd.grad(value(), x) == (expected,)
    with unblock(TARGET):
        found = torch.autograd.grad(value(), x)[0]
    torch.testing.assert_close(found, (expected * (2 + x)).detach())


# --- threads, generators and contexts ----------------------------------------------------------------------------


def test_a_thread_that_opens_a_block_affects_no_other() -> None:
    barrier, found, errors = threading.Barrier(2), {}, []

    def work(name: str, opens: bool) -> None:
        try:
            x = _leaf(3.0)
            barrier.wait()
            with unblock(TARGET) if opens else contextlib.nullcontext():
                barrier.wait()  # open in one thread
                found[name] = [_slope(x, TARGET) for _ in range(50)]
                barrier.wait()
            found[name] += [_slope(x, TARGET)]
        except BaseException as error:  # the main thread has to see it
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=work, args=args) for args in (("open", True), ("closed", False))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert found == {"open": [2.0] * 50 + [1.0], "closed": [1.0] * 51}


def test_many_threads_leave_nothing_behind() -> None:
    errors = []

    def work(seed: int) -> None:
        try:
            x = _leaf(3.0)
            for i in range(100):
                with scope(f"thread{seed}"), unblock(*([TARGET] if (seed + i) % 2 else [])):
                    assert _slope(x, TARGET) == (2 if (seed + i) % 2 else 1)
        except BaseException as error:  # the main thread has to see it
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    _assert_nothing_is_left()


def _assert_nothing_is_left() -> None:
    from toolkit.blocks import _switch

    assert _switch.quiet
    assert _switch.current.get() == _switch.NORMAL
    assert _switch.open_when_compiled == frozenset()
    assert _switch.prefix_when_compiled == ""


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_generators_may_leave_in_any_order(order: tuple[int, ...]) -> None:
    x = _leaf(3.0)

    def opening(name: Block) -> Iterator[None]:
        with unblock(name):
            stop_gradient(x, name)
            yield

    def scoping() -> Iterator[None]:
        with scope("generator"):
            yield

    running = [opening(TARGET), opening(OTHER), scoping()]
    for generator in running:
        next(generator)
    assert _slope(x, TARGET, OTHER) == 3
    left = set()
    for index in order:
        assert next(running[index], None) is None
        left.add(index)
        assert _slope(x, TARGET) == (1 if 0 in left else 2)
        assert _slope(x, OTHER) == (1 if 1 in left else 2)
        stop_gradient(x, f"name{order}{index}")
        assert (f"name{order}{index}" in declared_blocks()) is (2 in left)
    _assert_nothing_is_left()


def test_a_block_that_is_left_in_another_context_is_left() -> None:
    x = _leaf(3.0)

    def opening() -> Iterator[None]:
        with unblock(TARGET):
            stop_gradient(x, TARGET)
            yield

    generator, context = opening(), contextvars.copy_context()
    next(generator)
    assert context.run(_slope, x, TARGET) == 1
    assert context.run(next, generator, "ended") == "ended"
    with unblock(OTHER):
        assert _slope(x, OTHER) == 2


# --- torch.fx ----------------------------------------------------------------------------------------------------


def test_fx_shows_the_node_and_its_name() -> None:
    def f(x: Tensor) -> Tensor:
        with scope("fx"):
            return x * stop_gradient(x.exp(), "target") + stop_gradient(x, TARGET) + stop_gradient(x)

    graph = torch.fx.symbolic_trace(f)
    found = traced_blocks(graph)
    assert [block and block.name for block in found.values()] == ["fx/target", "test_blocks.target", None]
    assert list(found.values())[1] is TARGET
    assert next(iter(found)).args[0].target == "exp"
    assert traced_blocks(graph.graph) == found
    x = _leaf(0.5)
    (slope,) = torch.autograd.grad(graph(x), x)
    torch.testing.assert_close(slope, x.detach().exp())
    with unblock("fx/target", TARGET):
        (slope,) = torch.autograd.grad(graph(x), x)
    torch.testing.assert_close(slope, (x.exp() * (1 + x) + 1).detach())


def test_fx_traces_trees() -> None:
    graph = torch.fx.symbolic_trace(lambda x: sum(stop_gradient({"a": x, "b": [x * 2]}, "fx.tree")["b"]) * x)
    assert [block.name for block in traced_blocks(graph).values()] == ["fx.tree", "fx.tree"]
    x = _leaf(3.0)
    assert torch.autograd.grad(graph(x), x) == (6,)


def _jit_trace(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit.trace` is deprecated")
        return torch.jit.trace(f, _leaf(0.5))


def test_a_trace_of_a_new_name_has_the_stop() -> None:
    traced = _jit_trace(lambda x: x * stop_gradient(x.exp(), "trace.new"))  # runs it twice and compares
    x = _leaf(0.5)
    torch.testing.assert_close(torch.autograd.grad(traced(x), x)[0], x.exp().detach())


@pytest.mark.parametrize("trace", [_jit_trace, torch.fx.symbolic_trace])
def test_a_trace_says_that_it_has_no_regions(trace: Callable[..., object]) -> None:
    def f(x: Tensor) -> Tensor:
        with stop_recording("trace.region"):
            square = x * x
        return x * square

    with pytest.warns(torch.jit.TracerWarning, match="'trace.region' does not stop the gradient in the traced") as said:
        trace(f)
    assert said[0].filename == __file__
    f(_leaf(0.5))


def test_a_graph_without_blocks_has_none() -> None:
    assert traced_blocks(torch.fx.symbolic_trace(lambda x: x * 2)) == {}


@pytest.mark.parametrize("view", [lambda v: v[0], lambda v: v.view(3) * 2, lambda v: v.unbind()[1]])
def test_a_view_made_in_a_region_has_no_tangent(view: Callable[[Tensor], Tensor]) -> None:
    point = torch.tensor([2.0, 3.0, 5.0], dtype=torch.float64)

    def function(v: Tensor) -> Tensor:
        with stop_recording("regions.view"):
            held = view(v)
        return held * v

    expected = torch.diag(view(point).expand(3))
    assert torch.equal(torch.func.jacfwd(function)(point), expected)
    assert torch.equal(torch.func.jacrev(function)(point), expected)
    with unblock("regions.view"):
        assert torch.equal(torch.func.jacfwd(function)(point), torch.func.jacrev(function)(point))
        assert not torch.equal(torch.func.jacfwd(function)(point), expected)
