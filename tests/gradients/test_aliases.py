"""`alias_guard`: constants whose memory is written to."""

# ruff: noqa: PT012, PT031 (a guard is a block of statements)

import re
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from toolkit import stop_gradient, unblock
from toolkit.gradients import AliasWarning, alias_guard


def _line(marker: str) -> int:
    """Return the line of this file that ends with a comment."""
    lines = Path(__file__).read_text("utf-8").splitlines()
    (found,) = [number for number, line in enumerate(lines, 1) if line.endswith(f"# {marker}")]
    return found


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
        rf"The value that 'lint\.target' holds constant at \S*test_aliases\.py:{_line('target')}:18 is used after that "
        rf"at \S*test_aliases\.py:{_line('use')}:13, but its memory was changed by \S+ at "
        rf"\S*test_aliases\.py:{_line('first step')}:9: .* A clone before the block would keep it\.",
        str(warning.message),
    )
    assert warning.filename == __file__
    assert warning.lineno == _line("use")


def test_a_target_that_is_kept_over_steps_is_found_in_the_second() -> None:
    w, optimizer = _problem()
    with pytest.warns(AliasWarning, match=rf"add\S* at \S*test_aliases\.py:{_line('step')}:"), alias_guard():
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


@pytest.mark.keeps_its_sums
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
