"""The words for what a block does: the rule on constructed gradients, the text of every kind, and its JSON."""

import json
import math

import pytest
import torch
from torch import nn

from toolkit import compare, stop_gradient
from toolkit.gradients import Verdict
from toolkit.gradients.verdict import equal, rounding
from toolkit.testing import assert_load_bearing, assert_redundant

ALL = [
    (Verdict("no-op"), "no-op", "no-op"),
    (Verdict("redundant"), "redundant", "redundant"),
    (Verdict("noise", noise=170.0), "below the noise of over 100 %", "below the noise of over 100 %"),
    (Verdict("noise", noise=0.0051), "below the noise of 0.51 %", "below the noise of 0.51 %"),
    (Verdict("partial"), "partial", "partial"),
    (Verdict("cuts", ("a.weight", "ws[1]")), "cuts all paths", "cuts all paths to [a.weight, ws[1]]"),
    (Verdict("makes", ("w",)), "makes the gradient", "makes the gradient of [w]"),
]


# --- as text, as JSON --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("verdict", "label", "text"), ALL, ids=[verdict.kind for verdict, _, _ in ALL])
def test_every_kind_has_a_text_a_label_and_json(verdict, label, text):
    assert (verdict.label, str(verdict)) == (label, text)
    loaded = json.loads(json.dumps(verdict.to_dict(), allow_nan=False))
    assert loaded.pop("noise", verdict.noise) == verdict.noise
    parameters = list(verdict.parameters)
    assert loaded == {"kind": verdict.kind, "parameters": parameters, "label": label, "text": text}


def test_verdicts_are_values():
    assert Verdict("cuts", ("w",)) == Verdict("cuts", ("w",)) != Verdict("makes", ("w",))
    assert len({verdict for verdict, _, _ in ALL} | {Verdict("partial")}) == len(ALL)
    with pytest.raises(AttributeError):
        Verdict("partial").kind = "noise"


def test_a_name_with_brackets_stays_whole():
    ws = [torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)]
    (effect,) = compare(lambda: (ws[0] * stop_gradient(ws[1], "test_verdict.brackets")).sum(), ws).effects
    assert effect.verdict == Verdict("cuts", ("ws[1]",))
    assert effect.to_dict()["verdict"]["parameters"] == ["ws[1]"]


# --- the numbers under them --------------------------------------------------------------------------------------


def _given(leak, blocked):
    """Return the effect of a block that keeps `leak` from a gradient `blocked`."""
    w = torch.tensor([0.7, -1.3], dtype=torch.float64, requires_grad=True)
    leak, blocked = (torch.tensor(numbers, dtype=torch.float64) for numbers in (leak, blocked))
    return compare(lambda: (blocked * w + leak * stop_gradient(w, "test_verdict.given")).sum(), {"w": w}).effects[0]


@pytest.mark.parametrize(
    ("leak", "blocked", "ratio", "cosine", "kind"),
    [
        ([3.0, 0.0], [0.0, 4.0], 5 / 4, 4 / 5, "partial"),
        ([0.0, -4.0], [0.0, 4.0], 0.0, math.nan, "makes"),
        ([0.0, -8.0], [0.0, 4.0], 1.0, -1.0, "partial"),
        ([1.0, 0.0], [0.0, 0.0], math.inf, math.nan, "partial"),
        ([0.0, 0.0], [0.0, 0.0], math.nan, math.nan, "redundant"),
        ([0.0, 0.0], [3.0, 4.0], 1.0, 1.0, "redundant"),
        ([0.0, 1e-20], [3.0, 4.0], 1.0, 1.0, "redundant"),
    ],
)
def test_norms_ratio_and_cosine(leak, blocked, ratio, cosine, kind):
    found = _given(leak, blocked)
    expected = (math.hypot(*leak), ratio, cosine)
    assert (found.leak, found.ratio, found.cosine) == pytest.approx(expected, nan_ok=True, rel=1e-12, abs=0)
    assert found.per_parameter["w"] == pytest.approx(expected, nan_ok=True, rel=1e-12, abs=0)
    assert found.verdict.kind == kind


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_rounding_is_more_than_eps_and_never_a_leak_of_a_thousandth(dtype):
    assert min(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps) < rounding(dtype) < 1e-5


def test_equal_gradients_may_be_sparse_or_no_numbers():
    dense = torch.tensor([[0.0, 1.0], [math.nan, 0.0]])
    assert equal(dense, dense.clone())
    assert equal(dense.to_sparse(), dense.to_sparse())
    assert not equal(dense, dense.nan_to_num())
    assert not equal(dense, dense[0])


# --- the rule: each parameter by itself --------------------------------------------------------------------------


def _leaking(**sizes):
    """Return a loss and its parameters, each with (blocked, leak, dtype): the block keeps `leak` from a `blocked`."""
    params = {name: torch.tensor([0.7, -1.3], dtype=dtype).requires_grad_() for name, (_, _, dtype) in sizes.items()}

    def loss():
        total = 0.0
        for name, (blocked, leak, _) in sizes.items():
            w = params[name].double()
            total = total + (blocked * w + leak * stop_gradient(w, "test_verdict.leak")).sum()
        return total

    return loss, params


def _verdict(**sizes):
    (effect,) = compare(*_leaking(**sizes)).effects
    return effect.verdict


SINGLE, DOUBLE = torch.float32, torch.float64


@pytest.mark.parametrize("size", [1e-30, 1e-8, 1.0, 1e8, 1e30])
@pytest.mark.parametrize("dtype", [SINGLE, DOUBLE])
def test_the_rule_does_not_know_the_units_of_the_loss(size, dtype):
    assert _verdict(w=(size, 1e-3 * size, dtype)).kind == "partial"
    assert _verdict(w=(size, 0.0, dtype)).kind == "redundant"


@pytest.mark.parametrize("other", [1.0, 1e6, 1e12, 1e30])
def test_a_leak_is_not_judged_by_the_gradient_of_another_parameter(other):
    assert _verdict(small=(1.0, 0.01, DOUBLE), large=(other, 0.0, DOUBLE)).kind == "partial"
    assert _verdict(small=(1.0, 0.01, SINGLE), large=(other, 0.0, DOUBLE)).kind == "partial"
    assert _verdict(small=(1.0, 0.01, DOUBLE), large=(other, 0.0, SINGLE)).kind == "partial"


def test_each_parameter_has_its_own_dtype():
    half = torch.bfloat16
    assert _verdict(fine=(1.0, 0.01, DOUBLE), coarse=(1.0, 0.0, half)).kind == "partial"
    assert _verdict(fine=(1.0, 0.0, DOUBLE), coarse=(1.0, 0.5, half)).kind == "partial"


def test_what_is_cut_or_made_is_named_and_nothing_else():
    a, b, c = (torch.tensor([0.7, -1.3], dtype=DOUBLE, requires_grad=True) for _ in range(3))
    params = {"a": a, "b": b, "c": c}
    stop = lambda value: stop_gradient(value, "test_verdict.named")  # noqa: E731
    cut = compare(lambda: (a * stop(b) + c).sum(), params)["test_verdict.named"]
    made = compare(lambda: (a.sin() + b + stop(c * b - b)).sum(), params)["test_verdict.named"]
    assert cut.verdict == Verdict("cuts", ("b",))
    assert made.verdict == Verdict("cuts", ("c",))  # what is cut says more than what is made
    only = compare(lambda: (a.sin() + b + stop(-b)).sum(), params)["test_verdict.named"]
    assert only.verdict == Verdict("makes", ("b",))


def test_a_cut_path_is_never_redundant_even_if_its_gradient_is_zero_or_tiny():
    net, gate = nn.Linear(2, 2), nn.Linear(2, 2)
    for size in (0.0, 1e-30, 1e-12):
        loss = lambda size=size: 1e12 * net.weight.sum() + size * stop_gradient(gate.weight, "test_verdict.tiny").sum()  # noqa: E731
        (effect,) = compare(loss, {"net": net.weight, "gate": gate.weight}).effects
        assert effect.verdict == Verdict("cuts", ("gate",))
        assert_load_bearing(loss, "test_verdict.tiny")


def _at_the_minimum(stop):
    """Return the cross-entropy of a softmax with itself, with a shift: its gradient and its leak are zero."""
    w = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)).requires_grad_()
    labels = w.detach().double().softmax(1).float()

    def loss():
        shift = stop(w.amax(1, keepdim=True))
        return ((w - shift).exp().sum(1).log() + shift[:, 0] - (labels * w).sum(1)).mean()

    return loss, w


def test_a_gradient_that_vanishes_does_not_make_rounding_a_leak():
    effect = compare(*_at_the_minimum(lambda value: stop_gradient(value, "test_verdict.vanishing"))).effects[0]
    assert 0 < effect.leak < 1e-6
    assert effect.verdict.kind == "redundant"


def test_a_leak_beside_a_gradient_that_vanishes_is_a_leak():
    loss, w = _at_the_minimum(torch.detach)
    found = compare(lambda: loss() + 1e-3 * stop_gradient(w.sin().sum(), "test_verdict.beside"), w)
    assert found.effects[0].verdict.kind == "partial"


def test_a_leak_beside_a_gradient_that_is_exactly_zero_is_a_leak():
    w = torch.tensor([0.7, -1.3], dtype=DOUBLE, requires_grad=True)

    def loss():
        return ((w - w) + 1e-9 * w * stop_gradient(w, "test_verdict.zero")).sum() - 1e-9 * (w * w.detach()).sum()

    effect = compare(loss, w)["test_verdict.zero"]
    assert effect.leak == pytest.approx(1e-9 * w.norm().item())
    assert effect.verdict.kind == "partial"


def test_what_is_not_a_number_is_partial():
    w = torch.tensor([0.0, 1.0], requires_grad=True)
    effect = compare(lambda: (w + stop_gradient(w.sqrt(), "test_verdict.infinite")).sum(), w).effects[0]
    assert effect.verdict.kind == "partial"
    with pytest.raises(AssertionError, match="partial"):
        assert_redundant(lambda: (w + stop_gradient(w.sqrt(), "test_verdict.infinite")).sum(), "test_verdict.infinite")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1e-30, 1e-17, 1.0, 1e17, 1e30])
def test_no_leak_is_lost_because_its_square_is_too_small_or_too_large(dtype, size):
    w = torch.full((3,), size, dtype=dtype, requires_grad=True)
    held = torch.ones(3, dtype=dtype, requires_grad=True)
    comparison = compare(lambda: (held * stop_gradient(w.detach() * held, "verdict.size")).sum(), {"held": held})
    assert comparison["verdict.size"].leak == pytest.approx(size * 3**0.5, rel=1e-2)
    assert comparison["verdict.size"].verdict.kind == "partial"


def test_a_small_leak_that_two_hundred_parameters_share_gets_a_verdict():
    """No parameter has a tenth of the leak, so that no single one can show whether it is rounding."""
    weights = {f"w{index}": torch.tensor(1.0 + index / 100, requires_grad=True) for index in range(200)}
    large = torch.tensor(3.0, requires_grad=True)

    def loss():
        total = torch.stack(list(weights.values())).sum()
        return large * 1e3 + total * 1e-2 + 1e-9 * (total * stop_gradient(total, "test_verdict.shared"))

    effect = compare(loss, {"large": large, **weights})["test_verdict.shared"]
    assert effect.verdict.kind == "partial"


def test_blocks_are_answered_for_where_no_gradient_is_a_number():
    w = torch.tensor([0.0, 2.0], dtype=torch.float64, requires_grad=True)

    def loss():
        root = (w * 0).sqrt().sum()  # an infinite slope, times zero
        return root + (stop_gradient(w, "test_verdict.one") * stop_gradient(w * 2, "test_verdict.two") * w).sum()

    found = compare(loss, {"w": w})
    assert found.blocked["w"].isnan().all()
    assert [effect.name for effect in found.effects] == ["test_verdict.one", "test_verdict.two"]
    assert not any(effect.verdict.kind in ("redundant", "no-op") for effect in found.effects)
    assert "test_verdict.one" in str(found)


def test_a_gradient_that_nearly_vanishes_with_the_block_open_keeps_its_direction():
    # Opened, it is a thousandth of the blocked one, in the same direction up to rounding: an angle below 1e-3.
    torch.manual_seed(0)
    w = torch.randn(1000, requires_grad=True)
    target = torch.randn(1000)
    effect = compare(lambda: (w * target).sum() - 0.999 * (stop_gradient(w, "vanishing.w") * target).sum(), w).effects[
        0
    ]
    assert effect.ratio == pytest.approx(1e-3, rel=1e-3)
    assert effect.cosine == pytest.approx(1, abs=1e-6)
