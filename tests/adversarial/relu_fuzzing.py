"""Random small ReLU networks at the edge of robustness, and their exact worst margins in rational arithmetic.

    python tests/adversarial/relu_fuzzing.py [--networks 3000] [--seed 0] [--ensemble]

Two inputs are free, so that ball and box are a polygon. Each rectifier cuts a polygon into the part where it is on and
the part where it is off. In the last parts the margins are affine, so their least value stands at a corner. In L2 the
polygon lies inside of the disc, with most of its corners close to the worst point: its margin is an upper bound.

K units of a layer, C classes.
"""

from __future__ import annotations

import argparse
import copy
import math
import random
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from fractions import Fraction
from typing import Any
from unittest.mock import patch

import mpmath
import torch
from torch import Tensor, nn

from toolkit.adversarial import Normalize, Verification, evaluate_robustness, verify_relu

Point = tuple[Fraction, Fraction]
Affine = tuple[Fraction, Fraction, Fraction]  # the slopes by the free inputs, and the constant


@dataclass
class Case:
    """A network, one sample, its label, and the arguments of `verify_relu`."""

    model: nn.Sequential
    x: Tensor
    label: int
    free: tuple[int, int]
    options: dict[str, Any]


def drawn(seed: int, *, edge: bool = True) -> Case:
    """Return a random network whose worst margin, at the edge, is most often 0 or close to 0."""
    pick = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    dtype = pick.choice([torch.float64, torch.float64, torch.float32])
    n_classes = pick.choice([2, 2, 3, 4])
    shape, layers = _layers(pick, n_classes)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Sequential(*(layer() for layer in layers)).double().eval().requires_grad_(False)
    _draw(model, pick, generator)
    _rescale(model, pick)
    unit = 10.0 ** torch.tensor([pick.uniform(-6, 6) for _ in range(math.prod(shape))], dtype=torch.float64)
    unit = unit.reshape(shape) if pick.random() < 0.5 and isinstance(model[0], nn.Linear) else torch.ones(shape)
    if isinstance(model[0], nn.Linear):
        model[0].weight.div_(unit)
    if pick.random() < 0.2:  # classes that tie everywhere
        model[-1].weight[1], model[-1].bias[1] = model[-1].weight[0], model[-1].bias[0]
    x = (torch.rand(1, *shape, generator=generator, dtype=torch.float64) * unit).to(dtype)
    model, unit = model.to(dtype), unit.to(dtype)
    free = sorted(pick.sample(range(x.numel()), 2)) if x.numel() > 1 else [0, 0]
    mask = torch.zeros(x.numel(), dtype=torch.bool)
    mask[free] = True
    # The ball is about as large as the range of one of the two; the box cuts the other.
    epsilon = pick.choice([0.0, 0.01, 0.1, 0.3, 0.9]) * float(unit.flatten()[pick.choice(free)])
    bounds = pick.choice([None, (torch.zeros_like(unit), unit)])
    if bounds is not None:
        x = torch.minimum(x.clamp(min=0), unit)
    label = int(model.double()(x.double()).argmax(1))
    model.to(dtype)
    norm = pick.choice(["linf", "l1", "l2"])
    options = {"epsilon": epsilon, "norm": norm, "bounds": bounds, "mask": mask.reshape(shape)}
    case = Case(model, x, label, (free[0], free[1]), options)
    if edge and pick.random() < 0.8:
        _to_the_edge(case, pick)
    return case


def _layers(pick: random.Random, n_classes: int) -> tuple[tuple[int, ...], list[Any]]:
    """Return the shape of an input, and a function for each layer that makes it."""

    def linear(before: int, after: int) -> Any:
        return lambda: nn.Linear(before, after)

    kind = pick.choice(["mlp", "mlp", "conv1d", "conv2d"])
    layers: list[Any] = []
    if kind == "mlp":
        shape: tuple[int, ...] = (pick.choice([1, 2, 2, 3, 5]),)
        width = shape[0]
        if pick.random() < 0.1:
            mean, std = [pick.uniform(-1, 1) for _ in range(width)], [pick.uniform(0.1, 3) for _ in range(width)]
            layers += [lambda: Normalize(mean, std)]
    elif kind == "conv1d":
        length, channels, size = pick.choice([3, 4]), pick.choice([1, 2]), pick.choice([1, 2, 3])
        shape, out = (channels, length), pick.choice([1, 2])
        layers += [lambda: nn.Conv1d(channels, out, size), nn.ReLU, nn.Flatten]
        width = out * (length - size + 1)
    else:
        shape, out, padding = (1, 3, 2), pick.choice([1, 2]), pick.choice([0, 1])
        layers += [lambda: nn.Conv2d(1, out, 2, stride=1 + padding, padding=padding)]
        rows, columns = (2, 1) if not padding else (2, 2)
        if pick.random() < 0.5:
            layers += [lambda: nn.BatchNorm2d(out)]
        layers += [nn.ReLU]
        if pick.random() < 0.3 and columns == 2:
            layers, columns, rows = [*layers, lambda: nn.AvgPool2d(2)], 1, 1
        layers += [nn.Flatten]
        width = out * rows * columns
    for _ in range(pick.choice([1, 1, 2, 3]) if kind == "mlp" else pick.choice([0, 1])):
        after = pick.choice([1, 2, 3, 4, 5])
        layers += [linear(width, after)]
        if pick.random() < 0.15:
            layers += [lambda after=after: nn.BatchNorm1d(after)]
        layers += [nn.ReLU]
        width = after
    return shape, [*layers, linear(width, n_classes)]


def _draw(model: nn.Sequential, pick: random.Random, generator: torch.Generator) -> None:
    """Draw the parameters, some of them with units that are dead or twice there."""
    spread = 10.0 ** pick.choice([-3, 0, 0, 0, 2])

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    for layer in model:
        if isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d):
            layer.weight.copy_(normal(*layer.weight.shape) * pick.choice([1.0, 1.0, spread]))
            layer.bias.copy_(normal(len(layer.bias)) * pick.choice([0.0, 0.3, 1.0]))
            for unit in range(len(layer.bias)):
                if pick.random() < 0.07:
                    layer.bias[unit] = -1e3
                if unit and pick.random() < 0.1:
                    layer.weight[unit], layer.bias[unit] = layer.weight[unit - 1], layer.bias[unit - 1]
                if pick.random() < 0.05:
                    layer.weight[unit] = 0
        elif isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d):
            width = layer.num_features
            layer.running_mean, layer.running_var = normal(width), normal(width).square() + 0.01
            layer.weight.copy_(normal(width))
            layer.bias.copy_(normal(width))


def _rescale(model: nn.Sequential, pick: random.Random) -> None:
    """Scale each unit of a layer over 14 decades, and back in the next layer."""
    kinds = (nn.Linear, nn.Conv1d, nn.Conv2d)
    for index, layer in enumerate(model[:-1]):
        after = next(
            other for other in model[index + 1 :] if not isinstance(other, nn.ReLU | nn.Flatten | nn.AvgPool2d)
        )
        if not isinstance(layer, kinds) or not isinstance(after, kinds) or pick.random() < 0.4:
            continue
        scale = 10.0 ** torch.tensor([pick.uniform(-7, 7) for _ in layer.bias], dtype=torch.float64)
        layer.weight.mul_(scale.reshape(-1, *[1] * (layer.weight.dim() - 1)))
        layer.bias.mul_(scale)
        after.weight.div_(scale.repeat_interleave(after.weight.shape[1] // len(scale)).reshape(
            1, -1, *[1] * (after.weight.dim() - 2)
        ))  # fmt: skip


def _to_the_edge(case: Case, pick: random.Random) -> None:
    """Shift the label's bias until the worst margin is about 0."""
    bias = case.model[-1].bias
    for _ in range(2):
        worst = exact_worst_margin(case)
        bias[case.label] -= float(worst)
    if pick.random() < 0.7:
        size = bias.abs().max() * 10.0 ** pick.uniform(-17, -3)
        bias[case.label] += pick.choice([-1, 1]) * size


# --- the exact answer --------------------------------------------------------------------------------------------


def exact_layers(case: Case) -> list[tuple[list[list[Fraction]], list[Fraction]] | None]:
    """Return the weights and biases of each affine layer, and None for each rectifier."""
    layers: list[tuple[list[list[Fraction]], list[Fraction]] | None] = []
    shape = case.x.shape[1:]
    for layer in case.model:
        n = math.prod(shape)
        if isinstance(layer, nn.ReLU):
            layers.append(None)
            continue
        with torch.no_grad():
            zero = torch.zeros(1, *shape, dtype=torch.float64)
            after = layer.double()(zero) if not isinstance(layer, Normalize) else zero
            layer.to(case.x.dtype)
            if isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d):
                # For a unit vector all other terms of a product are 0: nothing is rounded.
                double, bias = layer.double(), layer.bias.clone()
                layer.bias.zero_()
                weight = double(torch.eye(n, dtype=torch.float64).reshape(n, *shape)).flatten(1).T.tolist()
                layer.bias.copy_(bias)
                shift = bias.reshape(-1, *[1] * (after.dim() - 2)).expand(after.shape[1:]).flatten().tolist()
                layer.to(case.x.dtype)
                layers.append(([[Fraction(w) for w in row] for row in weight], [Fraction(b) for b in shift]))
            elif isinstance(layer, nn.AvgPool2d):
                weight = layer(torch.eye(n, dtype=torch.float64).reshape(n, *shape)).flatten(1).T
                rows = [[Fraction(int(w > 0), layer.kernel_size**2) for w in row] for row in weight.tolist()]
                layers.append((rows, [Fraction(0)] * len(rows)))
            elif not isinstance(layer, nn.Flatten):
                layers.append(_diagonal(layer, n))
        shape = after.shape[1:]
    return layers


def _diagonal(layer: nn.Module, n: int) -> tuple[list[list[Fraction]], list[Fraction]]:
    """Return a normalisation, whose square root is taken in 60 digits."""
    if isinstance(layer, Normalize):
        scales = [1 / Fraction(v) for v in layer.std.tolist()]
        shifts = [-Fraction(mean) * scale for mean, scale in zip(layer.mean.tolist(), scales, strict=True)]
    else:
        scales, shifts = [], []
        parts = (layer.running_mean, layer.running_var, layer.weight, layer.bias)
        for mean, variance, weight, bias in zip(*(part.tolist() for part in parts), strict=True):
            with mpmath.workdps(60):
                root = mpmath.sqrt(mpmath.mpf(variance) + mpmath.mpf(layer.eps))
                scale = Fraction(weight) / Fraction(mpmath.nstr(root, 60))
            scales.append(scale)
            shifts.append(Fraction(bias) - Fraction(mean) * scale)
    each = n // len(scales)
    scales, shifts = [s for s in scales for _ in range(each)], [s for s in shifts for _ in range(each)]
    return [[scales[i] if i == j else Fraction(0) for j in range(n)] for i in range(n)], shifts


def _value(function: Affine, point: Point) -> Fraction:
    return function[0] * point[0] + function[1] * point[1] + function[2]


def _cut(polygon: Sequence[Point], function: Affine) -> list[Point]:
    """Return the part of a convex polygon where the function is not negative."""
    values = [_value(function, corner) for corner in polygon]
    kept: list[Point] = []
    for k, (corner, value) in enumerate(zip(polygon, values, strict=True)):
        before, previous = polygon[k - 1], values[k - 1]
        if previous * value < 0:
            share = previous / (previous - value)
            kept.append((before[0] + share * (corner[0] - before[0]), before[1] + share * (corner[1] - before[1])))
        if value >= 0:
            kept.append(corner)
    return kept


def _least(polygon: Sequence[Point], state: list[Affine], layers: Sequence[Any], label: int) -> tuple[Fraction, Point]:
    """Return the least margin on a polygon, and where it is reached."""
    if not layers:
        margins = [tuple(a - b for a, b in zip(state[label], other, strict=True)) for j, other in enumerate(state)]
        del margins[label]
        return min((_value(margin, corner), corner) for margin in margins for corner in polygon)  # type: ignore[arg-type]
    if layers[0] is None:
        for unit, function in enumerate(state):
            values = [_value(function, corner) for corner in polygon]
            if min(values) < 0 < max(values):
                negative = tuple(-part for part in function)
                parts = (_cut(polygon, function), _cut(polygon, negative))  # type: ignore[arg-type]
                return min(_least(part, state, layers, label) for part in parts)
            if max(values) <= 0:
                state = [*state[:unit], (Fraction(0),) * 3, *state[unit + 1 :]]
        return _least(polygon, state, layers[1:], label)
    weight, bias = layers[0]
    after = []
    for row, shift in zip(weight, bias, strict=True):
        terms = [(w, function) for w, function in zip(row, state, strict=True) if w]
        sums = [sum((w * function[part] for w, function in terms), Fraction(0)) for part in range(3)]
        after.append((sums[0], sums[1], sums[2] + shift))
    return _least(polygon, after, layers[1:], label)


def _region(case: Case, tangents: Iterable[Fraction] = ()) -> list[Point]:
    """Return the corners of ball and box; in L2 of a polygon inside, with corners at tangents of half the angle."""
    radius, norm = Fraction(case.options["epsilon"]), case.options["norm"]
    clean = [Fraction(case.x.flatten()[index].item()) for index in case.free]
    if norm == "linf":
        ball = [(a * radius, b * radius) for a, b in ((-1, -1), (1, -1), (1, 1), (-1, 1))]
    elif norm == "l1":
        ball = [(radius, Fraction(0)), (Fraction(0), radius), (-radius, Fraction(0)), (Fraction(0), -radius)]
    else:
        circle = {((1 - t * t) / (1 + t * t), 2 * t / (1 + t * t)) for t in tangents} | {(Fraction(-1), Fraction(0))}
        ball = [(radius * a, radius * b) for a, b in sorted(circle, key=lambda p: math.atan2(p[1], p[0]))]
    polygon: list[Point] = [(clean[0] + a, clean[1] + b) for a, b in ball]
    if case.free[0] == case.free[1]:
        polygon = [(clean[0] - radius, Fraction(0)), (clean[0] + radius, Fraction(0))]
    if case.options["bounds"] is not None:
        for axis, index in enumerate(dict.fromkeys(case.free)):
            least, most = (Fraction(end.flatten()[index].item()) for end in case.options["bounds"])
            slope = [Fraction(int(axis == 0)), Fraction(int(axis == 1))]
            polygon = _cut(polygon, (slope[0], slope[1], -least))
            polygon = _cut(polygon, (-slope[0], -slope[1], most))
    return polygon


def exact_worst_margin(case: Case) -> Fraction:
    """Return the exact worst margin; in L2 the exact margin of a point of the ball that is about the worst."""
    layers = exact_layers(case)
    state: list[Affine] = []
    for index, value in enumerate(case.x.flatten().tolist()):
        axis = case.free.index(index) if index in case.free else None
        fixed = Fraction(0) if axis is not None else Fraction(value)
        state.append((Fraction(int(axis == 0)), Fraction(int(axis == 1)), fixed))
    tangents = {Fraction(math.tan(angle * math.pi / 24)) for angle in range(-11, 12)}
    worst, corner = _least(_region(case, tangents), state, layers, case.label)
    if case.options["norm"] == "l2" and case.options["epsilon"]:
        for scale in (0.04, 6e-3, 1e-3, 1.6e-4, 3e-5, 5e-6, 8e-7, 1.3e-7, 2e-8):
            clean = [case.x.flatten()[index].item() for index in case.free]
            angle = math.atan2(float(corner[1]) - clean[1], float(corner[0]) - clean[0])
            tangents |= {Fraction(math.tan((angle + k * scale) / 2)) for k in range(-6, 7)}
            found, at = _least(_region(case, sorted(tangents)), state, layers, case.label)
            if found < worst:
                worst, corner = found, at
            near = sorted(tangents, key=lambda t: abs(2 * math.atan(float(t)) - angle))
            tangents = {*near[:4], *(Fraction(math.tan(angle * math.pi / 12)) for angle in range(-5, 6))}
    return worst


def exact_margin(case: Case, point: Iterable[float]) -> Fraction:
    """Return the exact margin at a point."""
    state = [(Fraction(0), Fraction(0), Fraction(value)) for value in point]
    return _least([(Fraction(0), Fraction(0))], state, exact_layers(case), case.label)[0]


# --- the comparison ----------------------------------------------------------------------------------------------


def complaints(case: Case, found: Verification, worst: Fraction) -> list[str]:
    """Return a sentence for each claim that is false."""
    wrong = []
    if found.lower.item() != -math.inf and Fraction(found.lower.item()) > worst:
        wrong.append(f"proved {found.lower.item()}, but the worst margin is {float(worst)}")
    example, clean = found.examples.flatten().tolist(), case.x.flatten().tolist()
    change = [Fraction(a) - Fraction(b) for a, b in zip(example, clean, strict=True)]
    radius, norm = Fraction(case.options["epsilon"]), case.options["norm"]
    size = sum((d * d for d in change), Fraction(0)), radius**2
    if norm != "l2":
        size = (sum(map(abs, change), Fraction(0)) if norm == "l1" else max(map(abs, change))), radius
    if size[0] > size[1]:
        wrong.append(f"an example outside of the ball by {float(size[0] - size[1])}")
    if any(d for index, d in enumerate(change) if index not in case.free):
        wrong.append("an example that changes a masked input")
    if case.options["bounds"] is not None:
        ends = zip(*(end.flatten().tolist() for end in case.options["bounds"]), strict=True)
        if not all(low <= value <= high for value, (low, high) in zip(example, ends, strict=True)):
            wrong.append("an example outside of the box")
    logits = case.model.double()(found.examples)[0].tolist()
    case.model.to(case.x.dtype)
    margin = min(logits[case.label] - other for j, other in enumerate(logits) if j != case.label)
    if margin != found.upper.item():
        wrong.append(f"an example of margin {margin}, not {found.upper.item()}")
    return wrong


def check(seed: int) -> tuple[list[str], str, float]:
    """Return the false claims about a random network, the verdict, and the seconds that it took."""
    case = drawn(seed)
    worst = exact_worst_margin(case)
    with ExitStack() as stack:
        if seed % 2:  # proofs by linear programs, which small networks do not need
            stack.enter_context(patch.dict(verify_relu.__globals__, {"_CASES": 0}))
        goal = "margin" if seed % 5 == 0 else "verdict"
        begin = time.perf_counter()
        label = torch.tensor([case.label])
        found = verify_relu(case.model, case.x, label, **case.options, goal=goal, time_limit=20.0)
        seconds = time.perf_counter() - begin
    verdict = "robust" if found.robust else "broken" if found.broken else "unknown"
    if verdict == "unknown" and case.options["norm"] != "l2" and abs(worst) > 1e-9 * _size(case, found.examples):
        verdict = "unknown, and not for rounding"
    return complaints(case, found, worst), verdict, seconds


def _size(case: Case, point: Tensor) -> float:
    """Return the largest number of the network at a point, or of its last bias."""
    sizes = [float(case.model[-1].bias.abs().max())]
    for layer in copy.deepcopy(case.model).double():
        point = layer(point)
        sizes.append(float(point.abs().max()))
    return max(sizes)


def is_missed(seed: int) -> bool | None:
    """Return whether the ensemble of attacks misses an adversarial example in float64; None if there is none."""
    case = drawn(seed, edge=False)
    x, options = case.x.double(), dict(case.options)
    if not options["epsilon"] or not exact_worst_margin(case) < -1e-5 * _size(case, x):
        return None
    model = case.model.double()  # the exact margin leaves it in the dtype of the sample
    if options["bounds"] is not None:
        options["bounds"] = tuple(end.double() for end in options["bounds"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of flat networks
        found = evaluate_robustness(model, x, torch.tensor([case.label]), **options)
    return bool(found.robust)


def main() -> None:
    """Check networks, and print false claims, counts of verdicts, and the time of `verify_relu`.

    With ``--ensemble`` print how many adversarial examples the ensemble of attacks misses.
    """
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--networks", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ensemble", action="store_true")
    arguments = parser.parse_args()
    seeds = range(arguments.seed, arguments.seed + arguments.networks)
    if arguments.ensemble:
        missed = [missed for seed in seeds if (missed := is_missed(seed)) is not None]
        print(f"{sum(missed)} missed of {len(missed)}")
        return
    counts, seconds = Counter[str](), []
    for seed in seeds:
        wrong, verdict, spent = check(seed)
        counts[verdict] += 1
        counts["false"] += bool(wrong)
        seconds.append(spent)
        if wrong or "," in verdict:
            print(f"seed {seed}: {verdict} {'; '.join(wrong)}", flush=True)
    seconds.sort()
    median, most = seconds[len(seconds) // 2], seconds[-1]
    print(f"{dict(counts)}, median {median * 1e3:.0f} ms, at most {most * 1e3:.0f} ms")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
