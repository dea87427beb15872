"""Random calls with every option, in every mode of differentiation, beside compositions of torch in float64.

The accuracy of single components is the subject of other files. Here a wrong option, place, type or path would show.
C classes, last in a reference; each leaf of a call may carry a gradient.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from each import each
from torch import Tensor
from torch.func import jacfwd, jacrev, jvp, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint
from values import seeded

from toolkit import unblock
from toolkit.blocks import watched
from toolkit.softmax import SHIFT, _kernels, cross_entropy, linear_cross_entropy, log_softmax, logsumexp, softmax

pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by a compiler

Leaves = dict[str, Tensor]
HALF = (torch.float16, torch.bfloat16)
TYPES = [torch.float64, torch.float64, torch.float32, torch.bfloat16, torch.float16]


@dataclass
class Call:
    """A call, its twin, and the sign of a sum with its twin."""

    text: str
    leaves: Leaves
    ours: Callable[[Leaves], Tensor]
    theirs: Callable[[Leaves], Tensor]
    sign: tuple[Callable[[Leaves], Tensor], Callable[[Leaves], Tensor]] | None = None


class Draw:
    """The choices of a seed: a shape, numbers of a type, their order in memory, a mask."""

    def __init__(self, seed: int, least: int) -> None:
        self.choose, self.generator = np.random.default_rng(seed), seeded(seed)
        self.shape = [int(self.choose.integers(1, 5)) for _ in range(self.choose.integers(least, 5))]
        if self.maybe(0.05) and len(self.shape) > 1:
            self.shape[0] = 0
        self.dtype = self.one_of(TYPES)
        self.order = self.one_of(
            ["plain", "transposed", "gaps", "expanded"] if self.shape and self.shape[0] else ["plain"]
        )
        x = self.one_of([0.3, 1.0, 4.0, 20.0]) * self.normal(*self.shape)
        x = (x + self.one_of([0.0, 30.0, -1000.0])) if self.dtype == torch.float64 else x.to(self.dtype)
        self.x = x[:1].clone() if self.order == "expanded" else x

    def maybe(self, chance: float) -> bool:
        return self.choose.random() < chance

    def one_of(self, values):
        return values[self.choose.integers(len(values))]

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=self.generator)

    def flags(self, *shape: int, chance: float = 0.7) -> Tensor:
        return torch.rand(shape, generator=self.generator) < chance

    def part(self, shape: list[int]) -> list[int]:
        """Return a shape that broadcasts to this one."""
        return [size if self.maybe(0.7) else 1 for size in shape][self.choose.integers(len(shape) + 1) :]

    def laid(self, x: Tensor) -> Tensor:
        """Return a leaf in the call's shape and order."""
        if self.order == "transposed":
            return x.transpose(0, -1).clone(memory_format=torch.contiguous_format).transpose(0, -1)
        if self.order == "gaps":
            return x.unsqueeze(-1).expand(*x.shape, 2).clone()[..., 1]
        return x.expand(self.shape) if self.order == "expanded" else x


def normaliser(name: str, seed: int) -> Call:
    """Draw a call of softmax, log-softmax or log-sum-exp over one or several dimensions."""
    draw = Draw(seed, 0)
    count, shape = max(len(draw.shape), 1), draw.shape
    places = [int(place) for place in draw.choose.permutation(count)[: draw.choose.integers(1, count + 1)]]
    dims = [place - count * draw.maybe(0.5) for place in places]
    dim = dims[0] if len(dims) == 1 and draw.maybe(0.8) else tuple(dims)
    where = draw.flags(*draw.part(shape)) if draw.maybe(0.3) else None
    leaves, b = {"x": draw.x}, None
    if weighted := name == "weighted logsumexp":
        b = draw.normal(*draw.part(shape))
        b = b.abs() + 0.1 if draw.maybe(0.5) else b
        b = b.masked_fill(draw.flags(*b.shape, chance=0.3), 0.0) if draw.maybe(0.5) else b
        b = (3 * b).round().long() if draw.maybe(0.1) else b.to(draw.one_of([draw.dtype, torch.float32]))
        leaves |= {"b": b} if b.is_floating_point() else {}
    keepdim, signed = draw.maybe(0.5), draw.maybe(0.5)

    def rows(x: Tensor) -> Tensor:
        x = x.expand(shape) if shape else x.reshape(1)
        return x.movedim(places, list(range(-len(places), 0))).flatten(-len(places))

    def back(x: Tensor) -> Tensor:
        if not shape:
            return x.reshape(())
        return x.unflatten(-1, [shape[p] for p in places]).movedim(list(range(-len(places), 0)), places)

    def kept(x: Tensor) -> Tensor:
        for place in sorted(places) if keepdim and shape else ():
            x = x.unsqueeze(place)
        return x if shape else x.reshape(())

    def masked(x: Tensor) -> tuple[Tensor, Tensor]:
        x = rows(draw.laid(x))
        mask = torch.ones_like(x, dtype=torch.bool) if where is None else rows(where)
        return torch.where(mask.any(-1, keepdim=True), x.masked_fill(~mask, -math.inf), 0.0), mask

    def weighted_sum(leaves: Leaves) -> tuple[Tensor, Tensor]:
        x, mask = masked(leaves["x"])
        factors = rows(leaves["b"] if "b" in leaves else b.double()) if weighted else torch.ones_like(x)
        reached = x.masked_fill(~mask | (factors == 0), -math.inf)
        peak = reached.amax(-1, keepdim=True) if x.numel() else x.sum(-1, keepdim=True)
        shift = torch.where(peak.isfinite(), peak, 0.0).detach()
        return torch.where(mask, factors * (x - shift).exp(), 0.0).sum(-1), shift[..., 0]

    def theirs(leaves: Leaves) -> Tensor:
        if name in ("softmax", "log_softmax"):
            x, mask = masked(leaves["x"])
            return back(getattr(torch, name)(x, -1).masked_fill(~mask, 0.0))
        total, shift = weighted_sum(leaves)
        bad = (total == 0) | ((total < 0) & (not signed))
        return kept(torch.where(bad, 0.0, torch.where(bad, 1.0, total).abs().log() + shift))

    def whole(leaves: Leaves) -> tuple[Tensor, Tensor]:
        options = {"b": leaves.get("b", b)} if weighted else {}
        found = logsumexp(draw.laid(leaves["x"]), dim, keepdim, where=where, return_sign=signed, **options)
        return found if signed else (found, found)

    def ours(leaves: Leaves) -> Tensor:
        if name == "softmax":
            return softmax(draw.laid(leaves["x"]), dim, where=where)
        y = log_softmax(draw.laid(leaves["x"]), dim, where=where) if name == "log_softmax" else whole(leaves)[0]
        return torch.where(y.isfinite(), y, 0.0)  # -inf where nothing is left, NaN of a negative sum

    has_sign = name.endswith("logsumexp") and signed
    sign = (lambda leaves: whole(leaves)[1], lambda leaves: kept(weighted_sum(leaves)[0].sign())) if has_sign else None
    text = f"dim={dim} {where=} {keepdim=} {signed=} {b=}"
    return Call(f"{name} {shape} {draw.dtype} {draw.order} {text}", leaves, ours, theirs, sign)


def loss(name: str, seed: int) -> Call:
    """Draw a call of cross entropy of labels or of probabilities."""
    draw = Draw(seed, 1)
    shape, dim = draw.shape, int(draw.choose.integers(-len(draw.shape), len(draw.shape)))
    shape[dim] = n_classes = max(shape[dim], 1)
    if draw.order == "expanded" or draw.x.shape != tuple(shape):
        draw.order, draw.x = "plain", draw.normal(*shape).to(draw.dtype)
    place = dim % len(shape)
    options = {
        "reduction": draw.one_of(["mean", "sum", "none"]),
        "label_smoothing": draw.one_of([0.0, 0.0, 0.1, 1.0]),
        "ignore_index": draw.one_of([-100, 0, 255]),
    }
    mask = draw.flags(*shape) if draw.maybe(0.3) else torch.ones(shape, dtype=torch.bool)
    scores = torch.rand(shape, generator=draw.generator).masked_fill(~mask, -1)
    own = scores.argmax(dim, keepdim=True)
    mask = mask.scatter(dim, own, True)
    options["where"] = None if mask.all() else mask
    leaves = {"x": draw.x}
    weight = (
        draw.normal(n_classes).abs().to(draw.one_of([draw.dtype, torch.float32])) + 0.1 if draw.maybe(0.5) else None
    )
    if weight is not None and draw.maybe(0.5):
        leaves["weight"] = weight
    if name == "cross_entropy":
        ignored = draw.flags(*own.shape, chance=0.2)
        target = own.masked_fill(ignored, options["ignore_index"]).squeeze(dim)
        types = [torch.int64] if options["ignore_index"] < 0 else [torch.int64, torch.int32, torch.uint8]
        target = target.to(draw.one_of(types))
    else:
        target = (scores.double().clamp(min=0) * draw.flags(*shape)).to(draw.one_of(TYPES))
        leaves |= {"q": target} if draw.maybe(0.5) else {}

    def ours(leaves: Leaves) -> Tensor:
        q = leaves.get("q", target)
        return cross_entropy(draw.laid(leaves["x"]), q, dim, weight=leaves.get("weight", weight), **options)

    def theirs(leaves: Leaves) -> Tensor:
        m = mask.movedim(place, -1)
        log_y = draw.laid(leaves["x"]).movedim(place, -1).masked_fill(~m, -math.inf).log_softmax(-1).where(m, 0.0)
        w = torch.ones(n_classes).double() if weight is None else leaves.get("weight", weight.double())
        kept = torch.ones(m.shape[:-1], dtype=torch.bool)
        if name == "cross_entropy":
            kept = target.long() != options["ignore_index"]
            q = F.one_hot(target.long().where(kept, 0), n_classes).double()
            counts = (w * q).sum(-1) * kept
        else:
            q = leaves.get("q", target.double()).movedim(place, -1)
            counts = kept.double()
        epsilon = options["label_smoothing"]
        q = (1 - epsilon) * q + epsilon * m.double() / m.double().sum(-1, keepdim=True)
        losses = torch.where(kept, -(w * q * log_y).sum(-1), 0.0)
        if options["reduction"] == "mean":
            return losses.sum() / counts.sum()
        return losses.sum() if options["reduction"] == "sum" else losses

    text = f"{dim=} {target.dtype} {target=} {weight=} {options}"
    return Call(f"{name} {shape} {draw.dtype} {draw.order} {text}", leaves, ours, theirs)


def linear(seed: int) -> Call:
    """Draw a call of the loss of a linear layer; its input may be rows of the weight."""
    draw = Draw(seed, 1)
    shape, n_classes = draw.shape, int(draw.choose.integers(1, 9))
    options = {
        "reduction": draw.one_of(["mean", "sum", "none"]),
        "ignore_index": draw.one_of([None, -100]),
        "chunk_size": draw.one_of([None, 1, 2, 3, 100]),
    }
    leaves = {"x": draw.x, "weight": draw.normal(n_classes, shape[-1]).to(draw.one_of([draw.dtype, *TYPES]))}
    if draw.maybe(0.5):
        leaves["bias"] = draw.normal(n_classes).to(draw.one_of([draw.dtype, torch.float32]))
    labels = torch.randint(n_classes, shape[:-1], generator=draw.generator)
    where = F.one_hot(labels, n_classes).bool() if labels.numel() else torch.ones(*shape[:-1], n_classes).bool()
    where = where | draw.flags(*where.shape) if draw.maybe(0.3) else None
    if options["ignore_index"] is not None:
        labels = labels.masked_fill(draw.flags(*labels.shape, chance=0.2), options["ignore_index"])
    rows = torch.randint(n_classes, shape[:-1], generator=draw.generator) if draw.maybe(0.2) else None
    if rows is not None:
        del leaves["x"]
    columns = draw.maybe(0.3)

    def hidden(leaves: Leaves) -> Tensor:
        return draw.laid(leaves["x"]) if rows is None else leaves["weight"][rows]

    def ours(leaves: Leaves) -> Tensor:
        weight = leaves["weight"]
        weight = weight.t().clone(memory_format=torch.contiguous_format).t() if columns else weight
        return linear_cross_entropy(hidden(leaves), weight, labels, bias=leaves.get("bias"), where=where, **options)

    def theirs(leaves: Leaves) -> Tensor:
        logits = hidden(leaves) @ leaves["weight"].T + leaves.get("bias", 0.0)
        logits = logits if where is None else logits.masked_fill(~where, -math.inf)
        kept = labels != -100
        losses = -logits.log_softmax(-1).gather(-1, labels.where(kept, 0).unsqueeze(-1)).squeeze(-1)
        losses = losses.where(kept, 0.0)
        if options["reduction"] == "mean":
            return losses.sum() / kept.sum()
        return losses.sum() if options["reduction"] == "sum" else losses

    text = f"{n_classes=} {labels=} {where=} {rows=} {columns=} {options}"
    return Call(f"linear {shape} {draw.dtype} {draw.order} {text}", leaves, ours, theirs)


CALLS: dict[str, Callable[[int], Call]] = {
    **{name: partial(normaliser, name) for name in ("softmax", "log_softmax", "logsumexp", "weighted logsumexp")},
    **{name: partial(loss, name) for name in ("cross_entropy", "probabilities")},
    "linear": linear,
}

# --- derivatives -------------------------------------------------------------------------------------------------


class Truth:
    """The value, the product of a cotangent with the Jacobian, its derivative along tangents, and their product."""

    def __init__(self, call: Call, seed: int) -> None:
        self.names, self.starts = list(call.leaves), tuple(call.leaves.values())
        exact = {name: leaf.double().requires_grad_() for name, leaf in call.leaves.items()}
        self.value, dtype = call.theirs(exact), call.ours(call.leaves).dtype
        generator = seeded(seed)
        self.cotangent = torch.randn(self.value.shape, generator=generator).to(dtype)
        self.tangents = tuple(torch.randn(leaf.shape, generator=generator).to(leaf.dtype) for leaf in self.starts)
        leaves = list(exact.values())
        options = {"allow_unused": True, "materialize_grads": True}
        self.gradients = torch.autograd.grad(
            self.value, leaves, self.cotangent.double(), create_graph=True, **options
        )  # fmt: skip
        along = sum((g * t.double()).sum() for g, t in zip(self.gradients, self.tangents, strict=True))
        if along.requires_grad:
            self.curvatures = torch.autograd.grad(along, leaves, **options)
        else:
            self.curvatures = [torch.zeros_like(leaf) for leaf in leaves]
        self.slope = along.detach()
        self.largest = max([1.0, *(leaf.abs().max().item() for leaf in self.starts if leaf.numel())])
        self.eps = max(torch.finfo(leaf.dtype).eps for leaf in (*self.starts, self.cotangent))

    def leaves(self) -> Leaves:
        return {name: leaf.clone().requires_grad_() for name, leaf in zip(self.names, self.starts, strict=True)}


class Subclass(Tensor):
    """A tensor whose values no kernel looks at."""


Found = Iterator[tuple[str, Tensor, Tensor]]


def named(what: str, truth: Truth, found, expected) -> Found:
    for name, one, exact in zip(truth.names, found, expected, strict=True):
        yield f"{what} of {name}", torch.zeros_like(exact) if one is None else one, exact


def pulled(value: Tensor, leaves: Leaves, truth: Truth, **options) -> list[Tensor | None]:
    if not value.requires_grad:
        return [None] * len(leaves)
    return torch.autograd.grad(value, list(leaves.values()), truth.cotangent, allow_unused=True, **options)


def backward(call: Call, truth: Truth, leaves: Leaves | None = None) -> Found:
    leaves = truth.leaves() if leaves is None else leaves
    value = call.ours(leaves)
    yield "value", value, truth.value
    yield from named("gradient", truth, pulled(value, leaves, truth), truth.gradients)


def two_backward(call: Call, truth: Truth) -> Found:
    leaves = truth.leaves()
    first = pulled(call.ours(leaves), leaves, truth, create_graph=True)
    yield from named("gradient", truth, first, truth.gradients)
    along = [(g.double() * t).sum() for g, t in zip(first, truth.tangents, strict=True) if g is not None]
    if along and (total := sum(along)).requires_grad:
        second = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
        yield from named("curvature", truth, second, truth.curvatures)


def with_duals(truth: Truth) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    leaves = truth.leaves()
    tangents = zip(leaves.items(), truth.tangents, strict=True)
    return leaves, {name: forward_ad.make_dual(leaf, t) for (name, leaf), t in tangents}


def forward_over_backward(call: Call, truth: Truth) -> Found:
    with forward_ad.dual_level():
        _, duals = with_duals(truth)
        found = [
            forward_ad.unpack_dual(g) if g is not None else (None, None) for g in pulled(call.ours(duals), duals, truth)
        ]
        primals, tangents = zip(*found, strict=True)
        yield from named("gradient", truth, primals, truth.gradients)
        yield from named("curvature", truth, tangents, truth.curvatures)


def backward_over_forward(call: Call, truth: Truth) -> Found:
    with forward_ad.dual_level():
        leaves, duals = with_duals(truth)
        value, tangent = forward_ad.unpack_dual(call.ours(duals))
        yield "value", value, truth.value
        if tangent is not None:
            yield "slope", (tangent.double() * truth.cotangent).sum(), truth.slope
            yield from named("curvature", truth, pulled(tangent, leaves, truth), truth.curvatures)


def transforms(call: Call, truth: Truth) -> Found:
    def ours(*leaves: Tensor) -> Tensor:
        return call.ours(dict(zip(truth.names, leaves, strict=True)))

    def along(*leaves: Tensor) -> Tensor:
        return jvp(ours, leaves, truth.tangents)[1]

    def against(*leaves: Tensor) -> tuple[Tensor, ...]:
        return vjp(ours, *leaves)[1](truth.cotangent)

    slope, pull = vjp(along, *truth.starts)
    yield "slope", (slope.double() * truth.cotangent).sum(), truth.slope
    yield from named("curvature, backward over forward", truth, pull(truth.cotangent), truth.curvatures)
    gradients, curvatures = jvp(against, truth.starts, truth.tangents)
    yield from named("gradient", truth, gradients, truth.gradients)
    yield from named("curvature, forward over backward", truth, curvatures, truth.curvatures)
    bend = (jvp(along, truth.starts, truth.tangents)[1].double() * truth.cotangent).sum()
    twice = sum((c * t).sum() for c, t in zip(truth.curvatures, truth.tangents, strict=True))
    yield "curvature along the tangents", bend, twice


def total(products: Tensor, n_dimensions: int) -> Tensor:
    """Return the sum over the last dimensions, of which there may be none."""
    return products.flatten(products.dim() - n_dimensions).sum(-1) if n_dimensions else products


def matrices(call: Call, truth: Truth) -> Found:
    def scalar(*leaves: Tensor) -> Tensor:
        return (call.ours(dict(zip(truth.names, leaves, strict=True))) * truth.cotangent).sum()

    if all(leaf.numel() for leaf in truth.starts):  # which torch's Jacobians need
        every = tuple(range(len(truth.starts)))
        for outer, inner in ((jacfwd, jacrev), (jacrev, jacfwd)):
            blocks = outer(inner(scalar, every), every)(*truth.starts)
            for i, name in enumerate(truth.names):
                found = sum(
                    total(block.double() * t, t.dim()) for block, t in zip(blocks[i], truth.tangents, strict=True)
                )
                yield f"curvature of {name}", found, truth.curvatures[i]


def mapped(call: Call, truth: Truth) -> Found:
    def gradients(scale: Tensor) -> tuple[Tensor, ...]:
        ours, pull = vjp(lambda *leaves: call.ours(dict(zip(truth.names, leaves, strict=True))), *truth.starts)
        return ours, *pull(truth.cotangent * scale)

    scales = torch.tensor([1.0, -2.0], dtype=truth.cotangent.dtype)
    value, *found = vmap(gradients)(scales)
    yield "value", value if value.dim() == truth.value.dim() else value[0], truth.value
    yield from named("gradient", truth, [g[1] / -2 for g in found], truth.gradients)
    moved = {name: torch.stack([leaf, leaf]) for name, leaf in zip(truth.names, truth.starts, strict=True)}
    yield "mapped value", vmap(call.ours)(moved)[1], truth.value
    leaves = truth.leaves()
    if (value := call.ours(leaves)).requires_grad:
        several = torch.stack([truth.cotangent, -2 * truth.cotangent])
        options = {"is_grads_batched": True, "allow_unused": True}
        found = torch.autograd.grad(value, list(leaves.values()), several, **options)
        yield from named("one of several", truth, [g if g is None else g[1] / -2 for g in found], truth.gradients)


def regions(call: Call, truth: Truth) -> Found:
    value = call.ours(call.leaves)
    with torch.inference_mode():
        yield "value in inference mode", call.ours(call.leaves), value
    with torch.no_grad():
        constant = call.ours(truth.leaves())
        assert not constant.requires_grad
        yield "value without a graph", constant, value
    with torch.autocast("cpu", dtype=torch.bfloat16):
        yield "value under autocast", call.ours(call.leaves), truth.value
    yield "value again", call.ours(call.leaves), value
    leaves = truth.leaves()
    ours = lambda *leaves: call.ours(dict(zip(truth.names, leaves, strict=True)))  # noqa: E731
    value = checkpoint(ours, *leaves.values(), use_reentrant=False)
    yield from named("gradient", truth, pulled(value, leaves, truth), truth.gradients)


def the_block(call: Call, truth: Truth) -> Found:
    """The block leaks nothing, and its shift changes no bit."""
    value = call.ours(call.leaves)
    with watched(lambda *_: None):
        leaves = truth.leaves()
        recorded = call.ours(leaves)
        assert recorded.equal(value)
        yield from named("gradient", truth, pulled(recorded, leaves, truth), truth.gradients)
    reached = []
    with watched(lambda shift, name, site: reached.append(shift.numel())):
        call.ours(truth.leaves())
    if sum(reached) and call.text.split()[0] != "linear":
        with unblock(SHIFT):
            leaves = truth.leaves()
            opened = call.ours(leaves)
            assert opened.equal(value)
            yield from named("gradient", truth, pulled(opened, leaves, truth), truth.gradients)


def other_tensors(call: Call, truth: Truth) -> Found:
    leaves = {name: leaf.detach().as_subclass(Subclass).requires_grad_() for name, leaf in truth.leaves().items()}
    for what, found, expected in backward(call, truth, leaves):
        yield what, found.as_subclass(Tensor), expected
    yield from backward(call, truth, {name: torch.nn.Parameter(leaf.detach()) for name, leaf in truth.leaves().items()})


def traced(call: Call, truth: Truth) -> Found:
    def program(*leaves: Tensor) -> list[Tensor]:
        call_leaves = dict(zip(truth.names, leaves, strict=True))
        value = call.ours(call_leaves)
        found = pulled(value, call_leaves, truth)
        return [value, *(torch.zeros_like(leaf) if g is None else g for g, leaf in zip(found, leaves, strict=True))]

    leaves = list(truth.leaves().values())
    value, *found = make_fx(program)(*leaves)(*leaves)
    yield "traced value", value, truth.value
    yield from named("traced gradient", truth, found, truth.gradients)


def compiled(call: Call, truth: Truth, backend: str) -> Found:
    torch.compiler.reset()
    run = torch.compile(call.ours, backend=backend, fullgraph=True)
    yield from backward(Call(call.text, call.leaves, run, call.theirs), truth)


MODES = {
    "backward": backward,
    "backward over backward": two_backward,
    "forward over backward": forward_over_backward,
    "backward over forward": backward_over_forward,
    "transforms": transforms,
    "matrices": matrices,
    "mapped": mapped,
    "regions": regions,
    "the block": the_block,
    "other tensors": other_tensors,
}


def check(name: str, mode: Callable[[Call, Truth], Found], seed: int) -> None:
    call = CALLS[name](seed)
    truth = Truth(call, seed)
    if truth.value.isnan().any():  # the mean of no sample
        return
    if call.sign is not None:
        ours, theirs = call.sign
        found, expected = ours(call.leaves), theirs({name: leaf.double() for name, leaf in call.leaves.items()})
        assert torch.equal(found.double(), expected), f"sign, {call.text}"
    for what, found, expected in mode(call, truth):
        found, expected = found.detach(), expected.detach().double()
        assert found.shape == expected.shape, f"{what}, {call.text}"
        size = 1 + (expected.abs().amax().item() if expected.numel() else 0)
        # Some thousand roundoffs of the type of the computation, float32 at least, as logits have the size of their
        # leaves; and in half precision those of stored numbers: an operand, its tangent, a gradient, the result.
        inner = 2.0**-52 if truth.eps < 1e-15 else 2.0**-23
        bound = (3000 * inner * truth.largest + (8 * truth.eps if truth.eps > 1e-6 else 0)) * size + 1e-10
        beyond = expected.abs() > torch.finfo(found.dtype).max / 2
        error = (found.double() - expected).abs()
        assert (beyond | (error <= bound)).all(), f"{what}: {found} instead of {expected}, {call.text}"


@pytest.fixture
def few_and_many(monkeypatch):
    """Return a check that takes the paths of many numbers for odd seeds, of few for even ones."""

    def checked(name: str, mode: Callable[[Call, Truth], Found], seed: int) -> None:
        with monkeypatch.context() as patch:
            for limit, value in {"_SHORT": 0, "_SMALL": 1, "_LONG": 1, "_PIECE": 4}.items() if seed % 2 else ():
                patch.setattr(_kernels, limit, value)
            check(name, mode, seed)

    return checked


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize("name", CALLS)
@each("seed", range(2))
def test_random_calls_are_those_of_torch(name, mode, seed, few_and_many):
    few_and_many(name, mode, seed)


@pytest.mark.slow
@pytest.mark.parametrize("mode", [*MODES.values(), traced], ids=[*MODES, "traced"])
@pytest.mark.parametrize("name", CALLS)
@each("seed", range(2, 42))
def test_more_random_calls_are_those_of_torch(name, mode, seed, few_and_many):
    few_and_many(name, mode, seed)


@pytest.mark.slow
@pytest.mark.keeps_its_sums
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo asks for it
@pytest.mark.parametrize(("backend", "seeds"), [("aot_eager", 10), ("inductor", 2)], ids=["aot_eager", "inductor"])
@pytest.mark.parametrize("name", CALLS)
def test_random_calls_compile_into_one_graph(name, backend, seeds):
    for seed in range(seeds):
        check(name, partial(compiled, backend=backend), seed)
