"""Cross entropy over a large vocabulary: what `cross_entropy` of a linear layer is, without the logits."""

import math
import os
import subprocess
import sys
from collections.abc import Callable, Mapping

import mpmath
import pytest
import torch
from accelerator import ACCELERATOR
from contract import BlockCase
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, library
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import grad, hessian, jacfwd, jacrev, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import cross_entropy as torch_cross_entropy
from torch.nn.functional import linear
from torch.utils._python_dispatch import TorchDispatchMode

from toolkit import unblock
from toolkit.gradients.memory import measure_memory
from toolkit.softmax import SHIFT, cross_entropy
from toolkit.softmax import linear_cross_entropy as exported
from toolkit.softmax.linear import _losses_in_plain_autograd, linear_cross_entropy

INF, NAN = math.inf, math.nan
EPS = torch.finfo(torch.float64).eps
DEVICES = ["cpu", pytest.param(ACCELERATOR, marks=pytest.mark.gpu)]

# N <= D: the logits wait in the gradient of the weight. N > D: they are computed again.
SHAPES = {"logits wait": (3, 5, 11), "logits again": (7, 5, 11), "one feature": (2, 1, 3), "one class": (2, 3, 1)}
OPERATOR_TESTS = ("test_schema", "test_autograd_registration", "test_faketensor")
shapes = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
chunks = pytest.mark.parametrize("chunk_size", [1, 4, 11, 100, None])
both_ways = pytest.mark.parametrize("opened", [(), (SHIFT,)], ids=["blocked", "open"])


def layer(n_samples: int, n_features: int, n_classes: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Make inputs and a layer of leaves that are symmetric in nothing."""
    generator = torch.Generator().manual_seed(n_samples)
    sizes = {"input": (n_samples, n_features), "weight": (n_classes, n_features), "bias": (n_classes,)}
    return {
        name: torch.randn(size, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for name, size in sizes.items()
    }


def labels_for(n_samples: int, n_classes: int) -> Tensor:
    return (torch.arange(n_samples) * 7 + 2) % n_classes


def naive(input: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None = None, **options: object) -> Tensor:
    """Compute what is specified, by torch, with all logits."""
    logits = linear(input, weight, bias)
    where = options.pop("where", None)
    if where is not None:
        logits = logits.masked_fill(~where, -INF)
    return torch_cross_entropy(logits, labels, **options)


def gradients(loss: Tensor, leaves: Mapping[str, Tensor], **options: object) -> dict[str, Tensor]:
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values()), **options), strict=True))


# --- what the common suite is given ----------------------------------------------------------------------------------


def on_paper(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the gradient of the mean by the probabilities; the block leaks nothing, so it is that of both ways."""
    h, w, b = (parameters[name].detach() for name in ("input", "weight", "bias"))
    labels = labels_for(len(h), len(w))
    logits = h @ w.T + b
    by_logits = logits.exp() / logits.exp().sum(1, keepdim=True)
    by_logits[range(len(h)), labels] -= 1
    by_logits /= len(h)
    return {"input": by_logits @ w, "weight": by_logits.T @ h, "bias": by_logits.sum(0)}


def case(id: str, shape: tuple[int, int, int]) -> BlockCase:
    return BlockCase(
        id=id,
        block=SHIFT,
        parameters=lambda: layer(*shape),
        loss=lambda p: linear_cross_entropy(
            p["input"], p["weight"], labels_for(shape[0], shape[2]), bias=p["bias"], chunk_size=4
        ),
        blocked=on_paper,
        opened=on_paper,
    )


BLOCK_CASES = [
    case(f"linear_cross_entropy_{name.replace(' ', '_')}", SHAPES[name]) for name in ("logits wait", "logits again")
]


# --- values and gradients --------------------------------------------------------------------------------------------


def test_is_exported():
    assert exported is linear_cross_entropy


@shapes
@chunks
@both_ways
@pytest.mark.parametrize("device", DEVICES)
def test_is_the_cross_entropy_of_a_linear_layer(shape, chunk_size, opened, device):
    leaves = {name: leaf.detach().to(device).requires_grad_() for name, leaf in layer(*shape).items()}
    labels = labels_for(shape[0], shape[2]).to(device)
    expected = naive(**leaves, labels=labels)
    with unblock(*opened if shape[2] > 1 else ()):  # one class has no others, and nothing to subtract from them
        found = linear_cross_entropy(**leaves, labels=labels, chunk_size=chunk_size)
        slopes = gradients(found, leaves)
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=1e-15)
    for name, slope in gradients(expected, leaves).items():
        torch.testing.assert_close(slopes[name], slope, rtol=1e-12, atol=8 * EPS, msg=name)


@shapes
@chunks
def test_the_fast_path_is_its_plain_twin(shape, chunk_size):
    leaves, labels = layer(*shape), labels_for(shape[0], shape[2])
    where = torch.arange(shape[2]) % 4 != 1
    fast = linear_cross_entropy(**leaves, labels=labels, where=where, reduction="none", chunk_size=chunk_size or 3)
    plain = _losses_in_plain_autograd(
        **leaves, labels=labels, where=where.expand(shape[0], -1), chunk_size=chunk_size or 3
    )
    torch.testing.assert_close(fast, plain, rtol=1e-14, atol=1e-15)
    cotangent = torch.arange(1.0, shape[0] + 1).double()
    found, expected = (gradients(losses, leaves, grad_outputs=cotangent) for losses in (fast, plain))
    for name, slope in expected.items():
        torch.testing.assert_close(found[name], slope, rtol=1e-12, atol=8 * EPS, msg=name)


@shapes
@pytest.mark.parametrize("needed", [("input",), ("weight",), ("bias",), ("input", "bias")], ids="+".join)
def test_gradients_that_nobody_needs_are_left_out(shape, needed):
    everything, labels = layer(*shape), labels_for(shape[0], shape[2])
    leaves = {name: leaf if name in needed else leaf.detach() for name, leaf in everything.items()}
    found = gradients(linear_cross_entropy(**leaves, labels=labels), {name: leaves[name] for name in needed})
    expected = gradients(naive(**everything, labels=labels), everything)
    for name in needed:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-12, atol=8 * EPS)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("ignore_index", [None, -100, 2])
@pytest.mark.parametrize("with_bias", [True, False], ids=["bias", "no bias"])
def test_reductions_are_those_of_torch(reduction, ignore_index, with_bias):
    leaves, labels = layer(7, 5, 11), labels_for(7, 11)
    if not with_bias:
        del leaves["bias"]
    ignored = {} if ignore_index is None else {"ignore_index": ignore_index}
    if ignore_index == -100:
        labels[[1, 4]] = -100
    expected = naive(**leaves, labels=labels, reduction=reduction, **ignored)
    found = linear_cross_entropy(**leaves, labels=labels, reduction=reduction, **ignored)
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=1e-15)
    for name, slope in gradients(expected.square().sum(), leaves).items():
        torch.testing.assert_close(gradients(found.square().sum(), leaves, retain_graph=True)[name], slope)


def test_ignored_samples_have_no_gradient_and_the_mean_of_none_is_not_a_number():
    leaves, labels = layer(3, 5, 11), torch.tensor([-1, 4, -1])
    loss = linear_cross_entropy(**leaves, labels=labels, ignore_index=-1, reduction="sum")
    assert (gradients(loss, leaves)["input"].abs().sum(1) > 0).tolist() == [False, True, False]
    assert linear_cross_entropy(**leaves, labels=torch.full((3,), -1), ignore_index=-1).isnan()


def test_leading_dimensions_are_samples():
    leaves = layer(6, 5, 11)
    h = leaves["input"].view(2, 3, 5)
    labels, where = labels_for(6, 11).view(2, 3), torch.rand(2, 1, 11) < 0.8
    where |= torch.nn.functional.one_hot(labels, 11).any(1, keepdim=True)
    found = linear_cross_entropy(h, leaves["weight"], labels, where=where, reduction="none")
    expected = cross_entropy(linear(h, leaves["weight"]), labels, where=where, reduction="none")
    torch.testing.assert_close(found, expected)
    one = linear_cross_entropy(h[1, 2], leaves["weight"], labels[1, 2], where=where[1, 0])
    torch.testing.assert_close(one, expected[1, 2])


@pytest.mark.slow
@shapes
def test_gradcheck_of_first_and_second_order_in_both_modes(shape):
    leaves, labels = layer(*shape), labels_for(shape[0], shape[2])

    def losses(input: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return linear_cross_entropy(input, weight, labels, bias=bias, chunk_size=4, reduction="none")

    assert torch.autograd.gradcheck(losses, tuple(leaves.values()), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(losses, tuple(leaves.values()))


@both_ways
@pytest.mark.parametrize("tie", ["rows of the weight", "function of its rows", "the weight itself", "bias as well"])
@pytest.mark.parametrize("shape", [(3, 5, 11), (7, 3, 9)], ids=["logits wait", "logits again"])
def test_a_graph_of_the_gradient_of_tied_embeddings_counts_each_path_once(opened, tie, shape):
    n_samples, _, n_classes = shape
    embedding, tokens = layer(*shape)["weight"], torch.arange(n_samples) * 5 % n_classes
    labels = labels_for(n_classes if tie == "the weight itself" else n_samples, n_classes)

    def tied(loss: Callable[..., Tensor]) -> Tensor:
        if tie == "rows of the weight":
            return loss(embedding[tokens], embedding, labels)
        if tie == "function of its rows":
            return loss(embedding[tokens].tanh(), embedding.sin(), labels)
        if tie == "the weight itself":
            return loss(embedding, embedding, labels)
        return loss(embedding[tokens], embedding, labels, bias=embedding.square().sum(1))

    def derivatives(loss: Callable[..., Tensor]) -> list[Tensor]:
        value = tied(loss)
        (first,) = torch.autograd.grad(value, embedding, create_graph=True)
        (second,) = torch.autograd.grad(first.cos().sum(), embedding, create_graph=True)
        return [first, second, *torch.autograd.grad(second.cos().sum(), embedding)]

    with unblock(*opened):
        found = derivatives(linear_cross_entropy)
        (alone,) = torch.autograd.grad(tied(linear_cross_entropy), embedding)
    expected = derivatives(naive)
    for slope, truth in zip([alone, *found], [expected[0], *expected], strict=True):
        torch.testing.assert_close(slope, truth, rtol=1e-11, atol=1e-13)


@both_ways
def test_function_transforms_agree_with_all_logits(opened):
    leaves, labels = layer(3, 4, 6), labels_for(3, 6)
    h, w = leaves["input"].detach(), leaves["weight"].detach()

    def ours(h: Tensor) -> Tensor:
        return linear_cross_entropy(h, w, labels, chunk_size=4)

    def theirs(h: Tensor) -> Tensor:
        return naive(h, w, labels)

    with unblock(*opened):
        for transform in (grad, jacrev, jacfwd, hessian):
            torch.testing.assert_close(transform(ours)(h), transform(theirs)(h), rtol=1e-12, atol=8 * EPS)
        one = vmap(grad(lambda h, label: linear_cross_entropy(h, w, label, chunk_size=4)))(h, labels)
    torch.testing.assert_close(one, 3 * grad(theirs)(h), rtol=1e-12, atol=8 * EPS)


@shapes
@both_ways
def test_several_cotangents_at_once_are_those_one_by_one(shape, opened):
    leaves, labels = layer(*shape), labels_for(shape[0], shape[2])
    with unblock(*opened if shape[2] > 1 else ()):
        losses = linear_cross_entropy(**leaves, labels=labels, reduction="none", chunk_size=4)
        g = torch.randn(2, *losses.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        found = gradients(losses, leaves, grad_outputs=g, is_grads_batched=True, retain_graph=True)
        one_by_one = [gradients(losses, leaves, grad_outputs=vector, retain_graph=True) for vector in g]
    for name, slopes in found.items():
        expected = torch.stack([slope[name] for slope in one_by_one])
        torch.testing.assert_close(slopes, expected, rtol=1e-12, atol=8 * EPS)


def test_a_traced_loss_reads_no_label():
    leaves, labels = layer(3, 5, 11), labels_for(3, 11)

    def program(labels: Tensor, *leaves: Tensor) -> list[Tensor]:
        loss = linear_cross_entropy(*leaves[:2], labels, bias=leaves[2], chunk_size=4)
        return [loss, *torch.autograd.grad(loss, leaves)]

    traced = make_fx(program)(labels, *leaves.values())
    for found, expected in zip(*(run(labels + 1, *leaves.values()) for run in (traced, program)), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=8 * EPS)
    with FakeTensorMode() as mode:
        fake = {name: mode.from_tensor(leaf) for name, leaf in leaves.items()}
        loss = linear_cross_entropy(**fake, labels=mode.from_tensor(labels))
        assert [slope.shape for slope in gradients(loss, fake).values()] == [(3, 5), (11, 5), (11,)]


def test_labels_out_of_range_under_vmap_have_no_number():
    w = torch.eye(3).double()
    losses = vmap(lambda h, label: linear_cross_entropy(h, w, label))(w, torch.tensor([0, 3, -1]))
    assert losses.isnan().tolist() == [False, True, True]


@shapes
def test_a_second_backward_pass_gives_the_same(shape):
    leaves, labels = layer(*shape), labels_for(shape[0], shape[2])
    loss = linear_cross_entropy(**leaves, labels=labels)
    first = {name: slope.clone() for name, slope in gradients(loss, leaves, retain_graph=True).items()}
    second = gradients(loss, leaves, retain_graph=True)
    assert all(first[name].equal(second[name]) for name in leaves)
    assert all(first[name].equal(gradients(loss, leaves)[name]) for name in ["input"])


def test_the_weight_may_lie_in_memory_in_any_order():
    leaves, labels = layer(3, 5, 11), labels_for(3, 11)
    columns = leaves["weight"].detach().t().contiguous().t().requires_grad_()
    found = gradients(linear_cross_entropy(leaves["input"], columns, labels), {"weight": columns})
    expected = gradients(linear_cross_entropy(leaves["input"], leaves["weight"], labels), {"weight": leaves["weight"]})
    torch.testing.assert_close(found, expected)


def test_an_input_changed_in_place_before_the_backward_pass_is_refused():
    leaves, labels = layer(3, 5, 11), labels_for(3, 11)
    h = leaves["input"] * 1
    loss = linear_cross_entropy(h, leaves["weight"], labels)
    h.mul_(2)
    with pytest.raises(RuntimeError, match="inplace"):
        loss.backward()


# --- digits ----------------------------------------------------------------------------------------------------------

logit = st.floats(-300, 300) | st.sampled_from([0.0, 1.0, -40.0, 36.7, 300.0])


@pytest.mark.slow
@settings(deadline=None, max_examples=100)
@given(st.lists(logit, min_size=2, max_size=6), st.integers(0, 5), st.integers(1, 6))
def test_every_component_is_exact_relative_to_itself(row, label, chunk_size):
    """The identity for a weight: the gradient by the input is that by the logits, component by component."""
    label %= len(row)
    h = torch.tensor([row], dtype=torch.float64, requires_grad=True)
    loss = linear_cross_entropy(h, torch.eye(len(row)).double(), torch.tensor([label]), chunk_size=chunk_size)
    (found,) = torch.autograd.grad(loss, h)
    with mpmath.workdps(400):
        e = [mpmath.exp(mpmath.mpf(x)) for x in row]
        others = mpmath.fsum(e) - e[label]
        truths = [value / (others + e[label]) for value in e]
        truths[label] = -others / (others + e[label])
        for value, truth in zip(found[0].tolist(), truths, strict=True):
            assert abs(value - truth) <= (4 * (max(row) - min(row)) + 20) * EPS * abs(truth) + 1e-300
        truth = mpmath.log1p(others / e[label])
        assert abs(loss.item() - truth) <= (4 * (max(row) - min(row)) + 20) * EPS * truth + 1e-300


def test_what_is_left_of_a_certain_label_is_kept_where_torch_has_nothing():
    h = torch.tensor([[40.0, 0.0]], dtype=torch.float64, requires_grad=True)
    loss = linear_cross_entropy(h, torch.eye(2).double(), torch.tensor([0]))
    exactly = 4.248354255291589e-18
    assert loss.item() == pytest.approx(exactly, rel=8 * EPS, abs=0)
    assert torch.autograd.grad(loss, h)[0][0].tolist() == pytest.approx([-exactly, exactly], rel=8 * EPS, abs=0)
    theirs = torch.autograd.grad(naive(h, torch.eye(2).double(), torch.tensor([0])), h)[0]
    assert theirs[0, 0] == 0


def test_the_shift_comes_before_the_label_is_subtracted():
    large = torch.full((1, 2), 1e8)
    assert linear_cross_entropy(large, torch.eye(2), torch.tensor([1])).item() == pytest.approx(math.log(2), rel=1e-7)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(3, 8, 500), (7, 5, 500), (2, 5, 501)], ids=["logits wait", "logits again", "odd"])
def test_half_precision_is_rounded_once(dtype, shape):
    leaves, labels = layer(*shape, dtype=dtype), labels_for(shape[0], shape[2])
    wide = {name: leaf.detach().double().requires_grad_() for name, leaf in leaves.items()}
    found = linear_cross_entropy(**leaves, labels=labels, chunk_size=17, reduction="sum")
    truth = linear_cross_entropy(**wide, labels=labels, reduction="sum")
    assert found.dtype == dtype
    roundoff = torch.finfo(dtype).eps / 2
    torch.testing.assert_close(found.double(), truth, rtol=1.01 * roundoff, atol=0)
    slopes, truths = gradients(found, leaves), gradients(truth, wide)
    for name, slope in slopes.items():
        assert slope.dtype == dtype
        atol = 6e-8 if dtype == torch.float16 else 1e-6  # below the smallest number; what float32 cancels
        torch.testing.assert_close(slope.double(), truths[name], rtol=1.01 * roundoff, atol=atol)


def test_autocast_does_not_lower_the_precision_and_accepts_what_layers_under_it_return():
    leaves, labels = layer(3, 8, 50, dtype=torch.float32), labels_for(3, 50)
    expected = linear_cross_entropy(**leaves, labels=labels)
    with torch.autocast("cpu", torch.bfloat16):
        found = linear_cross_entropy(**leaves, labels=labels)
        mixed = linear_cross_entropy(leaves["input"].bfloat16(), leaves["weight"], labels)
        half = linear_cross_entropy(leaves["input"].bfloat16(), leaves["weight"].bfloat16(), labels)
        slopes = gradients(found, leaves)
    assert found.equal(expected)
    assert mixed.dtype == half.dtype == torch.float32
    assert mixed.equal(linear_cross_entropy(leaves["input"].bfloat16().float(), leaves["weight"], labels))
    assert all(slope.equal(slopes[name]) for name, slope in gradients(expected, leaves).items())


# --- edges -----------------------------------------------------------------------------------------------------------


def test_no_samples_have_loss_zero_or_no_mean_and_gradient_zero():
    leaves, labels = layer(0, 5, 11), torch.zeros(0, dtype=torch.long)
    assert linear_cross_entropy(**leaves, labels=labels).isnan()
    loss = linear_cross_entropy(**leaves, labels=labels, reduction="sum")
    assert loss.item() == 0
    assert all(
        (slope == 0).all() and slope.shape == leaves[name].shape for name, slope in gradients(loss, leaves).items()
    )


def test_no_features_leave_the_bias():
    leaves, labels = layer(3, 0, 11), labels_for(3, 11)
    torch.testing.assert_close(linear_cross_entropy(**leaves, labels=labels), naive(**leaves, labels=labels))


@shapes
@pytest.mark.parametrize("how", ["bias", "where of classes", "where of samples"])
def test_classes_that_are_left_out_have_no_probability_and_no_gradient(shape, how):
    n_samples, _, n_classes = shape
    leaves, labels = layer(*shape), torch.zeros(n_samples, dtype=torch.long)
    where = torch.arange(n_classes) % 3 == 0
    options = {} if how == "bias" else {"where": where if how == "where of classes" else where.expand(n_samples, -1)}
    if how == "bias":
        leaves["bias"] = leaves["bias"].detach().masked_fill(~where, -INF).requires_grad_()
    loss = linear_cross_entropy(**leaves, labels=labels, chunk_size=4, **options)
    slopes = gradients(loss, leaves)
    kept = {"input": leaves["input"], "weight": leaves["weight"][where], "bias": leaves["bias"][where]}
    expected = naive(**kept, labels=labels)
    torch.testing.assert_close(loss, expected, rtol=1e-13, atol=1e-15)
    torch.testing.assert_close(
        slopes["input"], torch.autograd.grad(expected, leaves["input"])[0], rtol=1e-12, atol=8 * EPS
    )
    assert (slopes["weight"][~where] == 0).all()
    assert (slopes["bias"][~where] == 0).all()


@shapes
@both_ways
def test_a_label_that_is_left_out_has_an_infinite_loss_and_spoils_no_other_row(shape, opened):
    n_samples, _, n_classes = shape
    leaves, labels = layer(*shape), torch.zeros(n_samples, dtype=torch.long)
    where = torch.ones(n_samples, n_classes, dtype=torch.bool)
    where[1, 0] = False
    with unblock(*opened if n_classes > 1 else ()):
        losses = linear_cross_entropy(**leaves, labels=labels, where=where, reduction="none", chunk_size=4)
        slopes = gradients(losses.sum(), leaves)
    assert losses.isinf().tolist() == [row == 1 for row in range(n_samples)]
    assert all(slope.isfinite().all() for slope in slopes.values())
    leaves["input"].detach()[1] = 0
    theirs = cross_entropy(linear(**leaves), labels, where=where, reduction="none")
    torch.testing.assert_close(losses[0], theirs[0])
    assert theirs[1] == INF


def test_infinite_and_missing_logits_stay_in_their_rows():
    w = torch.eye(3).double()
    h = torch.tensor([[0.0, 1.0, 2.0], [NAN, 0.0, 0.0], [-INF, 0.0, 0.0]]).double()
    bias = torch.tensor([0.0, -INF, 0.0]).double()
    losses = linear_cross_entropy(h[:2], w, torch.tensor([0, 1]), reduction="none", chunk_size=2)
    assert losses.isnan().tolist() == [False, True]
    losses = linear_cross_entropy(h[:1].expand(3, 3), w, torch.tensor([0, 1, 2]), bias=bias, reduction="none")
    assert losses[1] == INF
    assert losses[[0, 2]].isfinite().all()
    positive = torch.tensor([0.0, INF, 0.0]).double()
    assert linear_cross_entropy(h[:1], w, torch.tensor([0]), bias=positive).item() == INF


def test_labels_of_every_integer_type():
    leaves = layer(3, 5, 11)
    expected = linear_cross_entropy(**leaves, labels=torch.tensor([2, 9, 4]))
    for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32):
        assert linear_cross_entropy(**leaves, labels=torch.tensor([2, 9, 4], dtype=dtype)).equal(expected)


H, W, Y = torch.zeros(3, 4), torch.zeros(5, 4), torch.zeros(3, dtype=torch.long)
MISTAKES: dict[str, tuple[type[Exception], str, tuple[object, ...], dict[str, object]]] = {
    "integer input": (TypeError, "`input` should be a floating-point tensor. Found torch.int64", (H.long(), W, Y), {}),
    "complex weight": (
        TypeError,
        "`weight` should be a floating-point tensor. Found torch.complex64",
        (H, W + 0j, Y),
        {},
    ),
    "list": (TypeError, "`input` should be a floating-point tensor. Found list", ([0.0], W, Y), {}),
    "float labels": (TypeError, "`labels` should be a tensor of integers. Found torch.float32", (H, W, Y.float()), {}),
    "boolean bias": (TypeError, "`bias` should be a floating-point", (H, W, Y), {"bias": torch.zeros(5).bool()}),
    "numeric where": (
        TypeError,
        "`where` should be a boolean tensor. Found torch.float32",
        (H, W, Y),
        {"where": W[:, 0]},
    ),
    "features": (
        ValueError,
        r"`input` should have shape \(\*, 4\), as `weight` has. Found \(3, 2\)",
        (H[:, :2], W, Y),
        {},
    ),
    "no classes": (ValueError, "at least one class", (H, W[:0], Y), {}),
    "weight": (ValueError, r"`weight` should have shape \(V, D\)", (H, W[0], Y), {}),
    "labels": (ValueError, r"`labels` should have shape \(3,\). Found \(2,\)", (H, W, Y[:2]), {}),
    "bias": (ValueError, r"`bias` should have shape \(5,\). Found \(4,\)", (H, W, Y), {"bias": torch.zeros(4)}),
    "where": (ValueError, r"broadcasts to \(3, 5\). Found \(2, 5\)", (H, W, Y), {"where": torch.ones(2, 5).bool()}),
    "reduction": (ValueError, "one of 'mean', 'sum', 'none'. Found 'max'", (H, W, Y), {"reduction": "max"}),
    "chunk size": (ValueError, "`chunk_size` should be a positive integer. Found 0", (H, W, Y), {"chunk_size": 0}),
    "label above": (ValueError, "`labels` should lie from 0 to 4. Found 5", (H, W, Y + 5), {}),
    "label below": (ValueError, "`labels` should lie from 0 to 4. Found -100", (H, W, Y - 100), {}),
    "not that one": (ValueError, "from 0 to 4. Found -1", (H, W, Y - 1), {"ignore_index": -100}),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_named(mistake):
    error, message, arguments, options = MISTAKES[mistake]
    with pytest.raises(error, match=message):
        linear_cross_entropy(*arguments, **options)


# --- compiled, exported ----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.keeps_its_sums
@pytest.mark.parametrize("shape", [SHAPES["logits again"]], ids=["logits again"])
def test_compiles_into_one_graph_and_follows_the_block(shape):
    leaves, labels = layer(*shape), labels_for(shape[0], shape[2])

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(leaves: dict[str, Tensor], labels: Tensor) -> Tensor:
        return linear_cross_entropy(**leaves, labels=labels, chunk_size=4)

    expected = linear_cross_entropy(**leaves, labels=labels, chunk_size=4)
    for opened in ((), (SHIFT,), ()):
        with unblock(*opened):
            found = compiled(leaves, labels)
            slopes = gradients(found, leaves)
        torch.testing.assert_close(found, expected, rtol=1e-14, atol=0)
        for name, slope in gradients(expected, leaves, retain_graph=True).items():
            torch.testing.assert_close(slopes[name], slope, rtol=1e-12, atol=8 * EPS)
    with pytest.raises(ValueError, match="`labels` should lie from 0 to 10"):
        compiled(leaves, labels + 11)


@pytest.mark.keeps_its_sums
@pytest.mark.parametrize("transposed", ["input", "weight"])
def test_a_compiled_layer_takes_tensors_that_lie_in_memory_in_any_order(transposed):
    leaves, labels = layer(7, 5, 11), labels_for(7, 11)
    expected = gradients(naive(**leaves, labels=labels), leaves)
    stored = leaves[transposed].detach().t().div(2).contiguous().requires_grad_()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(stored: Tensor, leaves: dict[str, Tensor]) -> Tensor:
        return linear_cross_entropy(**{**leaves, transposed: (2 * stored).t()}, labels=labels, chunk_size=4)

    others = {name: leaf for name, leaf in leaves.items() if name != transposed}
    (found,) = torch.autograd.grad(compiled(stored, others), stored)
    torch.testing.assert_close(found.t(), 2 * expected[transposed], rtol=1e-12, atol=8 * EPS)
    # And the strides that the operator has promised are those of what it returns.
    h, weight, bias = leaves.values()
    moved = {transposed: leaves[transposed].detach().t().contiguous().t().requires_grad_()}
    arguments = (*{"input": h, "weight": weight, **moved}.values(), bias, labels, None, 4)
    operators = torch.ops.stopgrad
    library.opcheck(operators.linear_cross_entropy.default, arguments, test_utils=OPERATOR_TESTS)
    kept = [tensor.detach() for tensor in operators.linear_cross_entropy(*arguments)[1:]]
    plain = [tensor.detach() for tensor in arguments[:3]]
    arguments = (*plain, labels, None, *kept, torch.ones(7).double(), 4, [True, True, True, True])
    gradients_of = operators.linear_cross_entropy_backward.default
    library.opcheck(gradients_of, arguments, test_utils=("test_schema", "test_faketensor"))
    assert all(tensor.is_contiguous() for tensor in gradients_of(*arguments))


def test_the_operator_keeps_the_rules_of_operators():
    leaves, labels = layer(7, 5, 11), labels_for(7, 11)
    arguments = (*leaves.values(), labels, None, 4)
    library.opcheck(torch.ops.stopgrad.linear_cross_entropy.default, arguments, test_utils=OPERATOR_TESTS)


def test_an_exported_program_has_no_operator_of_ours():
    class Head(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(layer(7, 5, 11)["weight"].detach())

        def forward(self, h: Tensor, labels: Tensor) -> Tensor:
            return linear_cross_entropy(h, self.weight, labels, chunk_size=4)

    h, labels = layer(7, 5, 11)["input"].detach(), labels_for(7, 11)
    program = torch.export.export(Head(), (h, labels))
    assert not any("stopgrad" in str(node.target) for node in program.graph.nodes)
    torch.testing.assert_close(program.module()(h, labels), Head()(h, labels))


# --- memory ----------------------------------------------------------------------------------------------------------


def extra(loss: Callable[[dict[str, Tensor]], Tensor], leaves: dict[str, Tensor]) -> float:
    """Return the peak of what one step allocates beside the gradients, in bytes."""
    return measure_memory(lambda: loss(leaves)).peak - sum(leaf.nbytes for leaf in leaves.values())


@pytest.mark.parametrize("shape", [(32, 64, 20_000), (256, 16, 20_000)], ids=["logits wait", "logits again"])
def test_takes_an_eighth_of_the_memory_that_all_logits_take(shape):
    leaves, labels = layer(*shape, dtype=torch.float32), labels_for(shape[0], shape[2])
    del leaves["bias"]
    ours = extra(lambda leaves: linear_cross_entropy(**leaves, labels=labels, chunk_size=500), leaves)
    theirs = extra(lambda leaves: naive(**leaves, labels=labels), leaves)
    logits = 4 * shape[0] * shape[2]
    assert theirs >= 0.99 * logits
    assert ours <= theirs / 8
    with unblock(SHIFT):
        opened = extra(lambda leaves: linear_cross_entropy(**leaves, labels=labels, chunk_size=500), leaves)
    assert opened >= logits  # what records every chunk keeps all logits


class Products(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func._schema.name in ("aten::mm", "aten::addmm", "aten::addmm_")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("shape", "needed", "products"),
    [("logits wait", ("input", "weight"), 3), ("logits again", ("input", "weight"), 4), ("logits wait", ("input",), 3)],
)
def test_the_logits_are_computed_once_where_they_can_wait(shape, needed, products):
    everything, labels = layer(*SHAPES[shape]), labels_for(SHAPES[shape][0], 11)
    leaves = {name: leaf if name in needed else leaf.detach() for name, leaf in everything.items()}
    with Products() as counted:
        linear_cross_entropy(**leaves, labels=labels, chunk_size=11).backward()
    assert counted.count == products


def test_one_loss_of_a_weight_holds_memory_for_its_gradient_and_the_others_compute_their_logits_again():
    leaves, labels = layer(*SHAPES["logits wait"]), labels_for(3, 11)
    other = layer(2, 5, 11)["weight"]
    del leaves["bias"]

    def loss(weight: Tensor = leaves["weight"]) -> Tensor:
        return linear_cross_entropy(leaves["input"], weight, labels, chunk_size=11)

    for _ in range(2):  # the backward pass has given the place back
        with Products() as counted:
            sum((loss() for _ in range(3)), loss(other)).backward()
        assert counted.count == 2 * 3 + 2 * 4
    abandoned = loss()
    abandoned = None  # noqa: F841
    with Products() as counted:
        loss().backward()
    assert counted.count == 3
    expected = gradients(naive(**leaves, labels=labels), leaves)
    found = gradients(loss() + loss() / 2, leaves)
    for name, slope in expected.items():
        torch.testing.assert_close(found[name], 1.5 * slope, rtol=1e-12, atol=8 * EPS)


def test_losses_that_wait_together_hold_one_weight():
    leaves, labels = layer(32, 64, 5_000, dtype=torch.float32), labels_for(32, 5_000)
    kept = measure_memory(lambda: sum(linear_cross_entropy(**leaves, labels=labels) for _ in range(4))).graph
    assert kept <= 1.05 * leaves["weight"].nbytes


def test_tensors_without_numbers_have_shapes():
    leaves = {name: leaf.detach().to("meta").requires_grad_() for name, leaf in layer(3, 5, 11).items()}
    loss = linear_cross_entropy(**leaves, labels=torch.zeros(3, dtype=torch.long, device="meta"), reduction="none")
    slopes = gradients(loss.sum(), leaves, create_graph=True)
    assert loss.shape == (3,)
    slopes |= {name: (slope, leaves[name]) for name, slope in slopes.items()}
    assert all(slope.shape == leaf.shape and slope.is_meta for slope, leaf in slopes.values())
    assert [slope.shape for slope in gradients(loss.sum(), leaves).values()] == [(3, 5), (11, 5), (11,)]


def test_no_large_tensor_is_kept_for_the_backward_pass():
    leaves, labels = layer(32, 64, 5_000, dtype=torch.float32), labels_for(32, 5_000)
    sizes: list[int] = []
    known = {leaf.data_ptr() for leaf in leaves.values()}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: (sizes.append(tensor.numel()) if tensor.data_ptr() not in known else None, tensor)[1],
        lambda t: t,
    ):
        linear_cross_entropy(**leaves, labels=labels).backward()
    assert max(sizes) == 32


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="the peak of a process is read from /proc")  # noqa: PTH110
def test_the_process_grows_by_the_gradients_alone():
    """The peak of a process counts what operations take inside, which tensors do not show."""
    program = """
import torch
from torch.nn.functional import cross_entropy, linear
from toolkit.softmax import linear_cross_entropy
torch.set_num_threads(1)
h, w = torch.randn(64, 128).requires_grad_(), torch.randn(30_000, 128).requires_grad_()
labels = torch.arange(64)
def read(field):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(field)) * 1024
for loss in (lambda: linear_cross_entropy(h, w, labels), lambda: cross_entropy(linear(h, w), labels)):
    for _ in range(2):  # the first time wakes up what stays
        with open("/proc/self/clear_refs", "w") as peak:
            peak.write("5")
        before = read("VmRSS")
        gradients = torch.autograd.grad(loss(), (h, w))
        grown = read("VmHWM") - before - sum(gradient.nbytes for gradient in gradients)
        del gradients
    print(grown)
"""
    # Large blocks go back to the system at once, so that the second step starts where the first did.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, check=True, capture_output=True, text=True)
    ours, theirs = map(int, done.stdout.split())
    assert theirs >= 0.9 * 4 * 64 * 30_000
    assert ours <= theirs / 4  # a megabyte of logits of a chunk, of 7.7 of all
