"""Blocks in compiled and exported programs: an opened block recompiles or raises, and is never a stale graph."""

import dataclasses
import itertools
import threading
from collections import OrderedDict, deque, namedtuple
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.export
from torch import Tensor, nn
from torch.utils._pytree import register_pytree_node

from toolkit import block, declared_blocks, is_blocked, scope, stop_gradient, stop_recording, traced_blocks, unblock

TARGET = block("test_compiled.target", "The target is a label.")
OTHER = block("test_compiled.other", "Another quantity that is held constant.")

# Warnings of torch about itself.
pytestmark = [
    # Dynamo reads `.grad` of what crosses a graph break; strict export tells of the prefix that `scope` sets.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects:UserWarning"),
]


@pytest.fixture(autouse=True)
def _no_graphs_from_before() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _counter() -> Any:
    from torch._dynamo.testing import CompileCounter  # whose import takes longer than to collect a room

    return CompileCounter()


def _leaf() -> Tensor:
    return torch.tensor([3.0, -2.0], dtype=torch.float64, requires_grad=True)


def _check(f: Callable[[Tensor], Tensor], compiled: Callable[[Tensor], Tensor], *names: object) -> None:
    """Compare value and gradient with those of the same program in eager mode, with the same blocks open."""
    with unblock(*names):
        x, y = _leaf(), _leaf()
        value, expected = compiled(x), f(y)
        torch.testing.assert_close(value, expected, rtol=1e-14, atol=0)
    found, wanted = torch.autograd.grad(value.sum(), x)[0], torch.autograd.grad(expected.sum(), y)[0]
    torch.testing.assert_close(found, wanted, rtol=1e-13, atol=0)


# --- the programs ------------------------------------------------------------------------------------------------

Pair = namedtuple("Pair", ["left", "right"])


@dataclasses.dataclass(frozen=True)
class Frozen:
    left: Tensor
    right: Tensor


def named(x: Tensor) -> Tensor:
    return x * stop_gradient(x.exp(), TARGET)


def region(x: Tensor) -> Tensor:
    with stop_recording(TARGET):
        factor = x.exp() * x
    return x * factor


def region_and_gate(x: Tensor) -> Tensor:
    with stop_recording(TARGET):
        factor = x.exp() * x
    return x * stop_gradient(factor, TARGET)


def asked(x: Tensor) -> Tensor:
    factor = x.detach().exp() if is_blocked(TARGET) else x.exp()
    return x * stop_gradient(factor, TARGET)


def dict_of_lists(x: Tensor) -> Tensor:
    stopped = stop_gradient({"a": [x.exp(), None], "b": (x.sin(), torch.arange(2))}, TARGET)
    return x * stopped["a"][0] * stopped["b"][0] + stopped["b"][1]


def ordered_dict(x: Tensor) -> Tensor:
    stopped = stop_gradient(OrderedDict(b=x.sin(), a=x.exp()), TARGET)
    return x * stopped["a"] * stopped["b"]


def named_tuple(x: Tensor) -> Tensor:
    stopped = stop_gradient(Pair(x.exp(), x.sin()), TARGET)
    return x * stopped.left * stopped.right


def frozen_dataclass(x: Tensor) -> Tensor:
    stopped = stop_gradient(Frozen(x.exp(), x.sin()), TARGET)
    return x * stopped.left * stopped.right


class Registered:
    def __init__(self, left: object, right: object, note: str) -> None:
        self.left, self.right, self.note = left, right, note


register_pytree_node(
    Registered, lambda tree: ([tree.left, tree.right], tree.note), lambda parts, note: Registered(*parts, note)
)


def registered_class(x: Tensor) -> Tensor:
    stopped = stop_gradient(Registered(x.exp(), (3, x.sin()), "note"), TARGET)
    return x * stopped.left * stopped.right[1]


def bounded_deque(x: Tensor) -> Tensor:
    stopped = stop_gradient(deque([x.exp(), 3, x.sin()], maxlen=2), TARGET)
    return x * stopped[0] * stopped[1]


def constants(x: Tensor) -> Tensor:
    tree = [x.exp(), 2.0, 3, True, 1j, "text", b"bytes", np.ones(2), torch.float64, x.device, x.shape, x.shape[0]]
    stopped = stop_gradient(tree, TARGET)
    return x.to(stopped[8]) * stopped[0] * stopped[1] * torch.from_numpy(stopped[7]) ** stopped[11]


PROGRAMS = [
    named, region, region_and_gate, asked, dict_of_lists, ordered_dict, named_tuple, frozen_dataclass,
    registered_class, bounded_deque, constants,
]  # fmt: skip


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_closed_open_closed_open(program: Callable, backend: str) -> None:
    compiled = torch.compile(program, backend=backend, fullgraph=True)
    for names in ((), (TARGET,), (), (TARGET,)):
        _check(program, compiled, *names)


@pytest.mark.slow
@pytest.mark.parametrize("program", [named, region], ids=lambda program: program.__name__)
def test_inductor(program: Callable) -> None:
    compiled = torch.compile(program, backend="inductor", fullgraph=True)
    for names in ((TARGET,), (), (TARGET,), ()):
        _check(program, compiled, *names)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_state_that_was_seen_is_not_compiled_again(program: Callable) -> None:
    counter = _counter()
    compiled = torch.compile(program, backend=counter, fullgraph=True)
    for names in ((), (TARGET,), (), (TARGET,), (TARGET,), ()):
        _check(program, compiled, *names)
    assert counter.frame_count == 2


def test_compiled_numpy_has_a_gradient_that_is_stopped() -> None:
    """In a graph an array is a tensor."""

    def program(x: np.ndarray) -> np.ndarray:
        return x * stop_gradient({"a": np.exp(x)}, TARGET)["a"]

    compiled = torch.compile(torch.compiler.wrap_numpy(program), backend="eager", fullgraph=True)
    for names in ((), (TARGET,), ()):
        _check(named, compiled, *names)


def test_two_blocks_have_four_states() -> None:
    def program(x: Tensor) -> Tensor:
        return x * stop_gradient(x.exp(), TARGET) * stop_gradient(x.sin(), OTHER)

    counter = _counter()
    compiled = torch.compile(program, backend=counter, fullgraph=True)
    states = [(), (TARGET,), (OTHER,), (TARGET, OTHER)]
    for names in [*states, *reversed(states), *states]:
        _check(program, compiled, *names)
    assert counter.frame_count == 4


def test_a_replayed_graph_counts_as_reached() -> None:
    compiled = torch.compile(named, backend="eager", fullgraph=True)
    for _ in range(3):
        with unblock(TARGET):
            compiled(_leaf())


def test_a_block_that_is_not_in_the_graph_is_not_reached() -> None:
    compiled = torch.compile(lambda x: x * stop_gradient(x, "compiled.there"), backend="eager", fullgraph=True)
    stop_gradient(_leaf(), "compiled.elsewhere")
    compiled(_leaf())
    with pytest.raises(RuntimeError, match=r"Found none at 'compiled\.elsewhere'"), unblock("compiled.elsewhere"):
        compiled(_leaf())


@pytest.mark.slow
def test_more_states_than_dynamo_keeps() -> None:
    """With a full graph Dynamo gives up with an error, without one it runs the Python: both are right."""
    names = [f"compiled.many.{i}" for i in range(4)]

    def program(x: Tensor) -> Tensor:
        for name in names:
            x = x * stop_gradient(x.cos(), name)
        return x

    program(_leaf())
    compiled = torch.compile(program, backend="eager")
    with torch._dynamo.config.patch(recompile_limit=3):
        for size in range(5):
            for subset in itertools.combinations(names, size):
                _check(program, compiled, *subset)
        torch._dynamo.reset()
        full = torch.compile(program, backend="eager", fullgraph=True)
        for name in names[:3]:
            _check(program, full, name)
        with pytest.raises(Exception, match=r"recompile_limit|Hard failure"):
            _check(program, full)


def test_dynamic_shapes() -> None:
    counter = _counter()
    compiled = torch.compile(named, backend=counter, fullgraph=True, dynamic=True)
    for names, size in itertools.product([(), (TARGET,), ()], [2, 5, 9]):
        x = torch.linspace(-1, 2, size, dtype=torch.float64, requires_grad=True)
        with unblock(*names):
            compiled(x).sum().backward()
        expected = x.exp() * (1 + x) if names else x.exp()
        torch.testing.assert_close(x.grad, expected.detach())
    assert counter.frame_count == 2


def test_a_name_that_is_first_met_in_a_compiled_function() -> None:
    def program(x: Tensor) -> Tensor:
        return x * stop_gradient(x.exp(), "compiled.adhoc")

    counter = _counter()
    compiled = torch.compile(program, backend=counter, fullgraph=True)
    assert "compiled.adhoc" not in declared_blocks()
    for names in ((), ("compiled.adhoc",), ()):
        _check(program, compiled, *names)
    assert counter.frame_count == 2


def test_a_scope_inside_and_outside() -> None:
    def program(x: Tensor) -> Tensor:
        with scope("inside"):
            return x * stop_gradient(x.exp(), "compiled.scoped")

    compiled = torch.compile(program, backend="eager", fullgraph=True)
    for prefix in ("", "outside/"):

        def run(f: Callable, prefix: str = prefix) -> Callable:
            def scoped(x: Tensor) -> Tensor:
                if not prefix:
                    return f(x)
                with scope("outside"):
                    return f(x)

            return scoped

        full = f"{prefix}inside/compiled.scoped"
        for names in ((), (full,), (), (full,)):
            _check(run(program), run(compiled), *names)
    assert {"inside/compiled.scoped", "outside/inside/compiled.scoped"} <= declared_blocks().keys()


def test_an_outer_scope_is_back_when_the_inner_one_is_left() -> None:
    def program(x: Tensor) -> Tensor:
        return x * stop_gradient(x.exp(), "compiled.back")

    compiled = torch.compile(program, backend="eager", fullgraph=True)
    with scope("outer"):
        with scope("inner"):
            compiled(_leaf())
        compiled(_leaf())
        for names in ((), ("outer/compiled.back",)):
            _check(program, compiled, *names)
    compiled(_leaf())
    assert {"outer/inner/compiled.back", "outer/compiled.back", "compiled.back"} <= declared_blocks().keys()


def test_a_block_without_a_name_stays_closed_and_is_refused_when_a_place_is_open() -> None:
    def program(x: Tensor) -> Tensor:
        return x * stop_gradient(x.exp())

    compiled = torch.compile(program, backend="eager", fullgraph=True)
    _check(program, compiled)
    with unblock(TARGET):
        stop_gradient(_leaf(), TARGET)
        x = _leaf()
        torch.testing.assert_close(torch.autograd.grad(compiled(x).sum(), x)[0], x.detach().exp())
    stop_gradient(_leaf(), "with: colon")
    with unblock("with: colon"):
        stop_gradient(_leaf(), "with: colon")
        compiled(_leaf())
    with pytest.raises(Exception, match="`name` should be given to a block that is open in a compiled function"):
        with unblock(f"{__file__}:1:1"):
            compiled(_leaf())


def test_unblock_inside_a_full_graph_raises() -> None:
    def program(x: Tensor) -> Tensor:
        with unblock(TARGET):
            return named(x)

    with pytest.raises(Exception, match=r"`unblock` should be entered outside|Observed exception"):
        torch.compile(program, backend="eager", fullgraph=True)(_leaf())
    _check(program, torch.compile(program, backend="eager"))
    _check(named, torch.compile(named, backend="eager", fullgraph=True))


@pytest.mark.slow
def test_graph_breaks() -> None:
    def program(x: Tensor) -> Tensor:
        x = x * stop_gradient(x.exp(), TARGET)
        torch._dynamo.graph_break()
        return x * stop_gradient(x.sin(), OTHER)

    compiled = torch.compile(program, backend="aot_eager")
    for names in [(), (TARGET,), (OTHER,), (TARGET, OTHER), (), (OTHER,)]:
        _check(program, compiled, *names)


def test_a_module_and_second_order() -> None:
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()

    def program(x: Tensor) -> Tensor:
        return (net(x) * stop_gradient(net(x.cos()), TARGET)).sum()

    compiled = torch.compile(program, backend="eager", fullgraph=True)
    for names in ((), (TARGET,), ()):
        slopes = []
        with unblock(*names):
            for f in (program, compiled):
                x = _leaf()
                (slope,) = torch.autograd.grad(f(x), x, create_graph=True)
                slopes.append(torch.autograd.grad(slope.square().sum(), [x, *net.parameters()], allow_unused=True))
        for a, b in zip(*slopes, strict=True):
            assert (a is None) == (b is None)
            assert a is None or torch.allclose(a, b, rtol=1e-12)


def test_functional_transforms_inside() -> None:
    def program(x: Tensor) -> Tensor:
        return torch.func.grad(lambda v: (v.square() * stop_gradient(v.exp(), TARGET)).sum())(x)

    compiled = torch.compile(program, backend="eager", fullgraph=True)
    for names in ((), (TARGET,), ()):
        _check(program, compiled, *names)


@pytest.mark.parametrize("transform", [torch.func.jacfwd, torch.func.hessian], ids=lambda transform: transform.__name__)
@pytest.mark.parametrize("inside", [False, True], ids=["transform compiled", "function compiled"])
def test_a_region_in_forward_mode_is_left_out_of_the_graph(transform: Callable, inside: bool) -> None:
    def loss(x: Tensor) -> Tensor:
        with stop_recording(TARGET):
            factor = x.square().view(-1)  # a view keeps its tangent where only forward mode is switched off
        return (x.exp() * factor).sum()

    compiled = transform(torch.compile(loss, backend="aot_eager"))
    if not inside:
        compiled = torch.compile(transform(loss), backend="aot_eager")
        with pytest.raises(Exception, match="should have no forward-mode derivative of a region"):
            torch.compile(transform(loss), backend="aot_eager", fullgraph=True)(_leaf().detach())
    x = _leaf().detach()
    slope = x.exp() * x.square()
    expected = slope if transform is torch.func.jacfwd else slope.diag()
    for _ in range(2):
        torch.testing.assert_close(compiled(x), expected, rtol=1e-13, atol=0)
        with unblock(TARGET):
            torch.testing.assert_close(compiled(x), transform(loss)(x), rtol=1e-13, atol=0)


def test_a_thread_that_compiles_while_another_opens_gets_a_right_graph_afterwards() -> None:
    """Compiled code shares what is open among threads; when the block is closed it is closed again."""
    compiled = torch.compile(named, backend="eager", fullgraph=True)
    _check(named, compiled)
    opened, done = threading.Event(), threading.Event()

    def work() -> None:
        with unblock(TARGET):
            named(_leaf())
            opened.set()
            done.wait()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    while not opened.wait(0.1):
        assert thread.is_alive()
    try:
        compiled(_leaf())
    finally:
        done.set()
        thread.join()
    _check(named, compiled)


# --- torch.export ------------------------------------------------------------------------------------------------


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2).double()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x)
        with scope("export"):
            target = stop_gradient(hidden.exp(), "target")
        return hidden * target + stop_gradient(hidden.sin(), TARGET) * stop_gradient(hidden)


@pytest.mark.parametrize("strict", [False, True], ids=["non-strict", "strict"])
def test_export_shows_the_node_and_its_name(strict: bool) -> None:
    model, x = _Model(), torch.tensor([[0.3, -1.2]], dtype=torch.float64)
    program = torch.export.export(model, (x,), strict=strict)
    found = traced_blocks(program)
    assert [block and block.name for block in found.values()] == ["export/target", "test_compiled.target", None]
    assert list(found.values())[1] is TARGET
    assert [node.args[0].target.name() for node in found][:2] == ["aten::exp", "aten::sin"]
    assert traced_blocks(program.graph) == traced_blocks(program.graph_module) == found
    exported, plain = program.module(), model(x)
    torch.testing.assert_close(exported(x), plain)
    slopes = [
        torch.autograd.grad(value.sum(), list(net.parameters()))
        for net, value in ((model, plain), (exported, exported(x)))
    ]
    for a, b in zip(*slopes, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("strict", [False, True], ids=["non-strict", "strict"])
def test_an_open_block_is_no_block_in_the_export(strict: bool) -> None:
    model, x = _Model(), torch.tensor([[0.3, -1.2]], dtype=torch.float64)
    model(x)
    with unblock("export/target", TARGET):
        program = torch.export.export(model, (x,), strict=strict)
        expected = torch.autograd.grad(model(x).sum(), model.linear.weight)[0]
    assert list(traced_blocks(program).values()) == [None]
    exported = program.module()
    found = torch.autograd.grad(exported(x).sum(), exported.linear.weight)[0]
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("strict", [False, True], ids=["non-strict", "strict"])
def test_export_keeps_a_region_constant(strict: bool) -> None:
    class Region(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return region(x)

    program = torch.export.export(Region(), (torch.tensor([0.3, -1.2], dtype=torch.float64),), strict=strict)
    _check(region, program.module())
