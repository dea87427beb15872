"""Truncated unrolling and truncated backpropagation through time: sums over the steps that carry a gradient."""

from functools import partial

import pytest
import torch
from contract import BlockCase, finite_differences
from values import doubles

from toolkit import unblock
from toolkit.bilevel import EARLY_STEPS, STATE, randomly_truncated_scan, truncated_scan, unroll
from toolkit.gradients.memory import measure_memory

# --- ridge regression by gradient descent ------------------------------------------------------------------------

X, Y = doubles(1, 0.2, 0.3, -1, 0.5, 0.7).view(3, 2), doubles(0.4, -0.9, 1.1)
X_VAL, Y_VAL = doubles(0.8, -0.5, -0.2, 1.2).view(2, 2), doubles(0.3, 0.6)
RATE, STEPS = 0.3, 20


def _penalty():
    return {"log_penalty": torch.tensor(0.25, dtype=torch.float64, requires_grad=True)}


def _descent(log_penalty):
    return lambda w: w - RATE * (X.T @ (X @ w - Y) + log_penalty.exp() * w)


def _unrolled(attached, steps=STEPS):
    def loss(p):
        w = unroll(_descent(p["log_penalty"]), torch.zeros(2).double(), steps=steps, attached=attached)
        return 0.5 * (X_VAL @ w - Y_VAL).square().sum()

    return loss


def _hypergradient(attached, steps=STEPS):
    """Sum the contributions of the last steps: each moves w by -rate * penalty * w, which later steps contract."""

    def witness(p):
        penalty = p["log_penalty"].detach().exp()
        contraction = torch.eye(2).double() - RATE * (X.T @ X + penalty * torch.eye(2).double())
        w, slope = torch.zeros(2).double(), torch.zeros(2).double()
        for step in range(steps):
            slope = contraction @ slope if step > steps - attached else torch.zeros(2).double()
            slope = slope - RATE * penalty * w if step >= steps - attached else slope
            w = contraction @ w + RATE * X.T @ Y
        return {"log_penalty": slope @ X_VAL.T @ (X_VAL @ w - Y_VAL)}

    return witness


# --- h = tanh(a h + x) -------------------------------------------------------------------------------------------

INPUTS, FIRST = doubles(0.5, -1, 0.3, 0.9, -0.4, 0.7), doubles(0.2)[0]


def _recurrent():
    return {"a": torch.tensor(0.8, dtype=torch.float64, requires_grad=True)}


def _step(a):
    def step(h, x):
        h = torch.tanh(a * h + x)
        return h, h

    return step


def _truncated(every):
    return lambda p: _squares(truncated_scan(_step(p["a"]), FIRST, INPUTS, every=every)[1])


def _random(p, probability=0.4, seed=3):
    generator = torch.Generator().manual_seed(seed)
    scan = randomly_truncated_scan(_step(p["a"]), FIRST, INPUTS, probability=probability, generator=generator)
    return _squares(scan[1])


def _squares(outputs):
    return 0.5 * (outputs - 0.1).square().sum()


def _sensitivity(factors):
    """Carry dh/da forward; `factors` multiply it before each step."""

    def witness(p):
        a, h, dh, total = p["a"].detach(), FIRST, 0.0, 0.0
        for x, factor in zip(INPUTS, factors, strict=True):
            slope = 1 - torch.tanh(a * h + x) ** 2
            dh = slope * (h + a * factor * dh)
            h = torch.tanh(a * h + x)
            total = total + (h - 0.1) * dh
        return {"a": total}

    return witness


def _every(k):
    return [float(t % k != 0) for t in range(len(INPUTS))]


def _drawn(probability=0.4, seed=3):
    uniform = torch.rand(len(INPUTS), generator=torch.Generator().manual_seed(seed), device="cpu")
    return [0.0 if u < probability else 1 / (1 - probability) for u in uniform.tolist()]


WHOLE = _sensitivity([1.0] * len(INPUTS))

BLOCK_CASES = [
    BlockCase(
        id="last_steps_of_a_solver",
        block=EARLY_STEPS,
        parameters=_penalty,
        loss=_unrolled(3),
        blocked=_hypergradient(3),
        opened=_hypergradient(STEPS),
    ),
    BlockCase(
        id="truncated_scan",
        block=STATE,
        parameters=_recurrent,
        loss=_truncated(2),
        blocked=_sensitivity(_every(2)),
        opened=WHOLE,
    ),
    BlockCase(
        id="randomly_truncated_scan",
        block=STATE,
        parameters=_recurrent,
        loss=_random,
        blocked=_sensitivity(_drawn()),
        opened=WHOLE,
    ),
]


def _peers_unroll(p, c):
    descent = lambda w: w - RATE * (c["H"] @ w - c["c"] + p["log_penalty"].exp() * w)  # noqa: E731
    return unroll(descent, torch.zeros(2).double(), steps=5, attached=2).square().sum()


PEER_CASES = {
    "truncated_unrolling": (
        {"log_penalty": torch.tensor(0.25, dtype=torch.float64)},
        {"H": X.T @ X, "c": X.T @ Y},
        _peers_unroll,
    ),
    "truncated_scan": (
        {"a": torch.tensor(0.8, dtype=torch.float64)},
        {"x": INPUTS, "h": FIRST},
        lambda p, c: _squares(truncated_scan(_step(p["a"]), c["h"], c["x"], every=2)[1]),
    ),
}


def _gradient(loss, p, *opened):
    with unblock(*opened):
        return torch.autograd.grad(loss(p), list(p.values()))[0].item()


@pytest.mark.parametrize(("attached", "expected"), [(1, -0.0461522784), (5, -0.0595355068), (20, -0.0595941247)])
def test_truncated_hypergradients_are_the_known_ones(attached, expected):
    assert _gradient(_unrolled(attached, 100), _penalty()) == pytest.approx(expected, abs=1e-10)


def test_few_steps_have_the_known_hypergradient():
    assert _gradient(_unrolled(5, 5), _penalty()) == pytest.approx(-0.0586379284, abs=1e-10)


@pytest.mark.parametrize(("every", "expected"), [(1, -0.0587296989), (2, -0.0611897924), (3, -0.0304284586)])
def test_truncation_has_the_known_gradients_and_its_error_is_not_monotone(every, expected):
    assert _gradient(_truncated(every), _recurrent()) == pytest.approx(expected, abs=1e-10)


def test_the_open_recurrence_has_the_gradient_of_finite_differences():
    p = _recurrent()
    assert _gradient(_truncated(2), p, STATE) == pytest.approx(-0.0564165786, abs=1e-10)
    assert finite_differences(_truncated(2), p)["a"].item() == pytest.approx(-0.0564165786, abs=1e-9)


def test_random_truncation_is_right_on_average():
    """Enumerated over all cuts: each factor is 0 or 1 / (1 - c), and the gradient is multi-affine in them."""
    c, p, total = 0.4, _recurrent(), 0.0
    for cuts in torch.cartesian_prod(*[torch.tensor([0, 1])] * 5).tolist():
        factors = [1.0, *(0.0 if cut else 1 / (1 - c) for cut in cuts)]
        probability = c ** sum(cuts) * (1 - c) ** (5 - sum(cuts))
        total = total + probability * _sensitivity(factors)(p)["a"]
    assert total.item() == pytest.approx(WHOLE(p)["a"].item(), rel=1e-12)


def test_random_truncation_with_probability_0_is_exact():
    assert _gradient(lambda p: _random(p, 0.0), _recurrent()) == pytest.approx(-0.0564165786, abs=1e-10)


def test_a_state_that_is_impossible_stays_impossible():
    state = torch.tensor([-torch.inf, 0.0], requires_grad=True)
    generator = torch.Generator().manual_seed(0)
    scan = partial(randomly_truncated_scan, lambda h, x: (h + x,) * 2, state, torch.ones(5, 2))
    _, outputs = scan(probability=0.5, generator=generator)
    assert outputs.tolist() == [[-torch.inf, t] for t in (1, 2, 3, 4, 5)]


def test_a_state_that_is_a_tree_is_held_as_a_whole():
    """An LSTM of torch against its own run over pieces with both states detached."""
    torch.manual_seed(0)
    cell, x = torch.nn.LSTMCell(2, 3).double(), torch.randn(5, 4, 2).double()

    def step(state, input):
        h, c = cell(input, state)
        return (h, c), h

    zero = (torch.zeros(4, 3).double(), torch.zeros(4, 3).double())
    (h, c), outputs = truncated_scan(step, zero, x, every=2)
    found = torch.autograd.grad(outputs.square().sum(), list(cell.parameters()))
    state, pieces = zero, []
    for piece in x.split(2):
        state = (state[0].detach(), state[1].detach())
        for input in piece:
            state = cell(input, state)
            pieces.append(state[0])
    expected = torch.autograd.grad(torch.stack(pieces).square().sum(), list(cell.parameters()))
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close((h, c), state)


def test_a_counter_in_a_state_stays_a_counter():
    """Only numbers with a derivative are scaled at a cut that is not made."""

    def step(state, input):
        h, count, done, note, flag = state
        return (0.5 * h + input, count + 1, done + 1, note, ~flag), h

    first = (torch.zeros(2), torch.tensor(0), 0, None, torch.tensor(True))
    scan = partial(randomly_truncated_scan, step, first, torch.ones(6, 2), generator=torch.Generator().manual_seed(0))
    (_, count, done, note, flag), _ = scan(probability=0.5)
    assert (count.dtype, count.item(), done, note, flag.item()) == (torch.int64, 6, 6, None, True)
    assert isinstance(done, int)


def test_the_first_state_has_a_gradient():
    first = torch.tensor(0.2, dtype=torch.float64, requires_grad=True)
    _, outputs = truncated_scan(_step(0.8), first, INPUTS, every=1)
    (slope,) = torch.autograd.grad(outputs.sum(), first)
    assert slope.item() == pytest.approx(0.8 * (1 - outputs[0].item() ** 2))


def test_early_steps_cost_no_memory():
    p = _penalty()
    memory = {n: measure_memory(lambda n=n: _unrolled(2, n)(p)).graph for n in (4, 40)}
    assert memory[4] == memory[40]


def test_a_slope_that_is_not_finite_ends_at_a_cut():
    """A factor of 0 is a cut, not a product with 0."""
    a = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
    first = torch.zeros(()).double()
    _, outputs = truncated_scan(lambda h, x: ((a * h).sqrt(), a * x + h), first, doubles(1, 2), every=1)
    assert torch.autograd.grad(outputs.sum(), a)[0].item() == 3


@pytest.mark.keeps_its_sums
@pytest.mark.parametrize("opened", [(), (STATE,)])
def test_a_scan_compiles(opened):
    compiled = torch.compile(lambda a: _truncated(2)({"a": a}), backend="aot_eager", fullgraph=True)
    p = _recurrent()
    assert _gradient(lambda p: compiled(p["a"]), p, *opened) == pytest.approx(_gradient(_truncated(2), p, *opened))


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: unroll(torch.sin, FIRST, steps=3, attached=0), "`attached` should be an integer from 1 to 3. Found 0"),
        (lambda: unroll(torch.sin, FIRST, steps=3, attached=4), "`attached` should be an integer from 1 to 3. Found 4"),
        (lambda: truncated_scan(_step(1), FIRST, INPUTS, every=0), "`every` should be a positive integer"),
        (lambda: truncated_scan(_step(1), FIRST, INPUTS[:0], every=1), "`inputs` should have at least one time step"),
        (
            lambda: randomly_truncated_scan(_step(1), FIRST, INPUTS, probability=1.0),
            "`probability` should be at least 0 and less than 1",
        ),
    ],
    ids=["none", "too_many", "every", "empty", "probability"],
)
def test_wrong_arguments_are_refused(call, error):
    with pytest.raises(ValueError, match=error):
        call()
