"""The assertions: what passes, what fails with a table, what is refused, and that the program is left as it was."""

import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from toolkit import audit, block, scope, stop_gradient, stop_recording
from toolkit.testing import assert_blocked, assert_flows, assert_load_bearing, assert_redundant

TARGET = block("test_testing.target", "The target is a label.")


class _Learner:
    """Two networks and a loss that a test chooses: the target is a label, or it is forgotten that it is one."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.online, self.target = nn.Linear(3, 1).double(), nn.Linear(3, 1).double()
        self.x = torch.randn(5, 3, dtype=torch.float64)
        self.unused = nn.Parameter(torch.ones(2))

    def right(self) -> Tensor:
        return (self.online(self.x) - stop_gradient(self.target(self.x), TARGET)).square().mean()

    def bare(self) -> Tensor:
        return (self.online(self.x) - self.target(self.x).detach()).square().mean()

    def region(self) -> Tensor:
        with stop_recording(TARGET):
            label = self.target(self.x)
        return (self.online(self.x) - label).square().mean()

    def forgotten(self) -> Tensor:
        stop_gradient(self.target(self.x), TARGET)
        return (self.online(self.x) - self.target(self.x)).square().mean()

    def misplaced(self) -> Tensor:
        return (stop_gradient(self.online(self.x), TARGET) - self.target(self.x)).square().mean()


@pytest.fixture
def learner() -> _Learner:
    return _Learner()


# --- blocked, flows ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", ["right", "bare", "region"])
def test_the_target_gets_nothing_and_the_online_network_does(learner: _Learner, loss: str) -> None:
    program = getattr(learner, loss)
    for target, online in [
        (learner.target, learner.online),
        (learner.target.weight, learner.online.bias),
        ("target.weight", "online.weight"),
        ("target", "online"),
    ]:
        assert_blocked(program, target)
        assert_flows(program, online)
        with pytest.raises(AssertionError, match=r"`param` should get a gradient. Found no path to 'target"):
            assert_flows(program, target)
        with pytest.raises(AssertionError, match=r"`param` should be blocked: .* Found a path to 'online"):
            assert_blocked(program, online)


def test_a_forgotten_block_fails_with_the_table(learner: _Learner) -> None:
    (gradient,) = torch.autograd.grad(learner.forgotten(), learner.target.bias)
    with pytest.raises(AssertionError) as caught:
        assert_blocked(learner.forgotten, learner.target.bias)
    head, _, titles, row = str(caught.value).splitlines()
    assert head == (
        "`param` should be blocked: no gradient should reach it. "
        f"Found a path to 'target.bias', gradient {gradient.norm():.3g}."
    )
    assert titles.split() == ["block", "verdict", "leak", "ratio", "cosine", "where"]
    assert row.split()[:2] == ["test_testing.target", "redundant"]


def test_a_misplaced_block_fails_with_the_block_that_cuts(learner: _Learner) -> None:
    with pytest.raises(AssertionError, match=r"no path to 'online\.weight'; no path to 'online\.bias'\.") as e:
        assert_flows(learner.misplaced, learner.online)
    assert "cuts all paths to [online.bias" in str(e.value)


def test_a_module_flows_only_as_a_whole(learner: _Learner) -> None:
    both = nn.ModuleList([learner.online, learner.target])
    with pytest.raises(AssertionError, match=r"Found no path to '\S*target\.weight'; no path to '\S*target\.bias'\."):
        assert_flows(learner.right, both)
    with pytest.raises(AssertionError, match=r"a path to '\S*online\.weight', .*; a path to '\S*online\.bias', "):
        assert_blocked(learner.right, both)


def test_a_path_whose_gradient_is_zero_neither_is_blocked_nor_flows() -> None:
    w = torch.tensor([1.0, 2.0], requires_grad=True)
    with pytest.raises(AssertionError, match=r"Found a path to 'w', gradient 0\."):
        assert_blocked(lambda: (0 * w).sum(), w)
    with pytest.raises(AssertionError, match="Found a path to 'w' on which the gradient is zero"):
        assert_flows(lambda: (0 * w).sum(), w)
    assert_flows(lambda: (w * torch.tensor([0.0, 1.0])).sum(), w)


def test_a_gradient_that_is_not_finite_does_not_flow() -> None:
    w = torch.zeros(2, requires_grad=True)
    with pytest.raises(AssertionError, match="Found a gradient that is not finite at 'w'"):
        assert_flows(lambda: w.sqrt().sum(), w)


# --- redundant, load-bearing -------------------------------------------------------------------------------------


def _log_sum_exp(x: Tensor) -> Tensor:
    shift = stop_gradient(x.max(), "test_testing.shift")
    return (x - shift).exp().sum().log() + shift


def test_a_shift_is_redundant_and_a_target_bears_load(learner: _Learner) -> None:
    x = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64, requires_grad=True)
    assert_redundant(lambda: _log_sum_exp(x), "test_testing.shift")
    with pytest.raises(AssertionError, match=r"be load-bearing: .* Found 'test_testing.shift': redundant\.\nloss 1\.5"):
        assert_load_bearing(lambda: _log_sum_exp(x), "test_testing.shift")
    for name in (TARGET, TARGET.name):
        assert_load_bearing(learner.right, name)
        with pytest.raises(AssertionError, match=r"be redundant: .* Found 'test_testing.target': cuts all paths to \["):
            assert_redundant(learner.right, name)


def test_a_block_that_changes_a_part_bears_load() -> None:
    x = torch.tensor([1.0, -2.0], dtype=torch.float64, requires_grad=True)
    with scope("test_testing"):

        def loss() -> Tensor:
            return (x * stop_gradient(x.exp(), "factor")).sum()

        assert_load_bearing(loss, "test_testing/factor")
        with pytest.raises(AssertionError, match="Found 'test_testing/factor': partial"):
            assert_redundant(loss, "test_testing/factor")


def test_a_block_that_no_gradient_reaches_is_neither() -> None:
    x, y = torch.ones(2, requires_grad=True), torch.ones(2)

    def loss() -> Tensor:
        return (x * stop_gradient(y, TARGET)).sum()

    for assertion in (assert_redundant, assert_load_bearing):
        with pytest.raises(AssertionError, match=r"'test_testing.target': no-op, nothing that carries a gradient"):
            assertion(loss, TARGET)


def test_a_block_without_a_name_is_known_by_its_place() -> None:
    x = torch.tensor(2.0, requires_grad=True)

    def loss() -> Tensor:
        return x * stop_gradient(x)

    with pytest.raises(ValueError, match="Found 'nowhere'") as caught:
        assert_load_bearing(loss, "nowhere")
    assert_load_bearing(loss, re.search(r"\['(.*?)'\]", str(caught.value))[1])


# --- bare places -------------------------------------------------------------------------------------------------


class _Bare:
    def __init__(self) -> None:
        self.w = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64, requires_grad=True)

    def shifted(self) -> Tensor:
        shift = (
            self.w.max()
            .detach()
        )  # fmt: skip
        return (self.w - shift).exp().sum().log() + shift

    @torch.no_grad()
    def factor(self) -> Tensor:
        return self.w.exp().detach() + torch.ones(3).detach()

    def scaled(self) -> Tensor:
        return (self.w * self.factor()).sum()

    def idle(self) -> Tensor:
        return (self.w * torch.ones(3).detach()).sum()


def _line(text: str) -> str:
    lines = Path(__file__).read_text("utf-8").splitlines()
    (number,) = (number for number, line in enumerate(lines, 1) if line.strip().startswith(text))
    return f"{Path(__file__).name}:{number}"


def test_lines_functions_and_classes_are_places() -> None:
    bare = _Bare()
    for place in (
        _line("self.w.max()"),
        _line(".detach()"),
        f"tests/{_line('.detach()')}",
        _Bare.shifted,
        bare.shifted,
    ):
        with pytest.raises(AssertionError, match=r"`self.w.max\(\).detach\(\)` in _Bare.shifted: redundant"):
            assert_load_bearing(bare.shifted, place)
        assert_redundant(bare.shifted, place)
        assert_blocked(bare.shifted, place)
    for place in (_Bare.factor, _Bare):
        assert_load_bearing(bare.scaled, place)
        assert_blocked(bare.scaled, place)
        with pytest.raises(AssertionError, match=r"`@torch.no_grad\(\)` in _Bare.factor; .*: partial"):
            assert_redundant(bare.scaled, place)


def test_a_column_tells_stops_of_a_line_apart() -> None:
    w = torch.tensor(2.0, requires_grad=True)

    def loss() -> Tensor:
        return w * w.detach() + w.detach() - w.detach() * torch.ones(()).detach()

    place = _line("return w * w.detach() +")
    columns = [int(effect.name.rpartition(":")[2]) for effect in audit(loss).effects]
    assert_load_bearing(loss, f"{place}:{columns[0]}")
    with pytest.raises(AssertionError, match="no-op, nothing that carries a gradient reaches it"):
        assert_load_bearing(loss, f"{place}:{columns[-1]}")
    with pytest.raises(AssertionError, match=r"no stop at .*:99: `return w \* w"):
        assert_load_bearing(loss, f"{place}:99")


def test_a_place_without_a_stop_tells_the_nearest() -> None:
    bare, here = _Bare(), re.escape(_line("return (self.w * torch.ones(3).detach())"))
    other = _line("self.w = ")
    for assertion in (assert_blocked, assert_redundant, assert_load_bearing):
        with pytest.raises(AssertionError) as caught:
            assertion(bare.idle, other)
        text = str(caught.value)
        assert f"Found no stop at {other}: `self.w = torch.tensor([1.0, -2.0, 0.5]," in text
        assert re.search(rf"The nearest stops:\n  \S*{here}:\d+ `torch.ones\(3\).detach\(\)` in _Bare.idle", text)
    with pytest.raises(AssertionError, match=r"Found no stop at _Bare.shifted\.\nloss"):
        assert_blocked(lambda: bare.w.sum(), _Bare.shifted)


def test_a_stop_without_a_gradient_blocks_nothing() -> None:
    with pytest.raises(AssertionError, match="nothing that carries a gradient reaches it"):
        assert_blocked(_Bare().idle, _Bare.idle)


def test_places_that_cannot_be_asked_about() -> None:
    w, clock = torch.ones(2, requires_grad=True), random.SystemRandom()
    with pytest.raises(ValueError, match=r"A place should have a source\. Found <built-in function"):
        assert_blocked(lambda: (w * w.detach()).sum(), len)
    with pytest.raises(RuntimeError, match=r"`loss` should do the same each time it runs\. Found the program is not"):
        assert_blocked(lambda: (w * w.detach()).sum() * clock.random(), _Bare)

    def switched() -> torch.Tensor:
        torch._C._set_grad_enabled(False)
        held = w.tanh()
        torch._C._set_grad_enabled(True)
        return (w * held).sum()

    with pytest.raises(AssertionError, match=r"_set_grad_enabled\(False\)` in .* not opened: a call without `with`"):
        assert_redundant(switched, test_places_that_cannot_be_asked_about)


# --- misuse ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("assertion", [assert_blocked, assert_flows])
def test_what_is_no_parameter_of_the_program_is_refused(learner: _Learner, assertion: Callable) -> None:
    frozen = nn.Linear(2, 2).requires_grad_(False)
    for param, error, message in [
        (nn.Parameter(torch.ones(3)), ValueError, "`param` should be one that `loss` uses. Found 'param'"),
        (nn.Linear(2, 2), ValueError, "`param` should be one that `loss` uses. Found 'weight'"),
        ("onlin.weight", ValueError, "Found 'onlin.weight'. Did you mean 'online.weight'"),
        ("onlin", ValueError, "Found 'onlin'."),
        ("zzz", ValueError, "Found 'zzz'. It has ['online.bias', 'online.weight'"),
        ("x", ValueError, "`param` should require a gradient. Found a constant."),
        (frozen, ValueError, "`param` should require a gradient. Found a constant."),
        (3, TypeError, "`param` should be a parameter, a module or a name. Found int."),
    ]:
        with pytest.raises(error, match=re.escape(message)):
            assertion(learner.right, param)


def test_a_parameter_that_the_program_holds_but_does_not_use_is_blocked(learner: _Learner) -> None:
    assert_blocked(learner.right, learner.unused)
    with pytest.raises(AssertionError, match=r"no path to 'unused'"):
        assert_flows(learner.right, "unused")


@pytest.mark.parametrize("assertion", [assert_redundant, assert_load_bearing])
def test_what_is_no_block_of_the_program_is_refused(learner: _Learner, assertion: Callable) -> None:
    with pytest.raises(ValueError, match=r"those that the program meets: \['test_testing.target'\]. Found 'targt'."):
        assertion(learner.right, "targt")
    with pytest.raises(TypeError, match=r"`block` should be a Block, its name or a place. Found list\."):
        assertion(learner.right, [TARGET])


@pytest.mark.parametrize("assertion", [assert_blocked, assert_flows, assert_redundant, assert_load_bearing])
@pytest.mark.parametrize(
    ("loss", "error", "message"),
    [
        (lambda x: x.detach().sum(), ValueError, "should depend on a tensor that requires a gradient"),
        (lambda x: 1.0, TypeError, "should return a tensor. Found float."),
    ],
    ids=["constant", "float"],
)
def test_a_loss_that_is_none_is_refused(assertion: Callable, loss: Callable, error: type, message: str) -> None:
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(error, match=message):
        assertion(lambda: loss(x), "x" if assertion in (assert_blocked, assert_flows) else TARGET)


@pytest.mark.parametrize("fails", [False, True], ids=["passes", "fails"])
def test_the_program_is_left_as_it_was_found(fails: bool) -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))
    x = torch.randn(4, 3)
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)

    def loss() -> Tensor:
        return (net(x) * stop_gradient(net(x), TARGET)).sum()

    def state() -> list:
        buffers = [(id(buffer), buffer.tolist()) for buffer in net.buffers()]
        return [buffers, [(id(p.grad), p.grad.tolist()) for p in net.parameters()], torch.get_rng_state().tolist()]

    before = state()
    for assertion, subject in [
        (assert_blocked if fails else assert_flows, net[0].weight),
        (assert_redundant if fails else assert_load_bearing, TARGET),
    ]:
        if fails:
            with pytest.raises(AssertionError):
                assertion(loss, subject)
        else:
            assertion(loss, subject)
        assert state() == before
