"""Random models of the kinds that users have, random balls, and what each public attack has to hold on them.

    python tests/adversarial/model_fuzzing.py [--models 300] [--seed 0]

The answers are held against copies of the model that were made before, and against exact arithmetic.
"""

from __future__ import annotations

import argparse
import copy
import random
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from toolkit import adversarial as adv

N, C = 5, 3
ALL, ROUND = ("linf", "l2", "l1"), ("l2",)

# Name -> attack in few steps, the norms it knows (none: a box alone), and whether it draws.
ATTACKS: dict[str, tuple[Callable[..., Tensor], tuple[str, ...], bool]] = {
    "fgsm": (adv.fgsm, ALL, False),
    "rs_fgsm": (adv.rs_fgsm, ALL, True),
    "pgd": (partial(adv.pgd, steps=3), ALL, False),
    "pgd, restarts": (partial(adv.pgd, steps=2, restarts=2), ALL, True),
    "mi_fgsm": (partial(adv.mi_fgsm, steps=2), ALL, False),
    "ni_fgsm": (partial(adv.ni_fgsm, steps=2), ALL, False),
    "vmi_fgsm": (partial(adv.vmi_fgsm, steps=2), ALL, True),
    "apgd": (partial(adv.apgd, steps=4), ALL, False),
    "linearised": (adv.linearised, ALL, False),
    "multi_target": (partial(adv.multi_target, steps=3), ALL, False),
    "deepfool": (partial(adv.deepfool, steps=2), ALL, False),
    "fab": (partial(adv.fab, steps=2), ALL, False),
    "ddn": (partial(adv.ddn, steps=3), ROUND, False),
    "carlini_wagner": (partial(adv.carlini_wagner, steps=3, searches=2), ROUND, False),
    "square": (partial(adv.square, queries=6), ALL, True),
    "spsa": (partial(adv.spsa, steps=2, directions=4), ALL, True),
    "jsma": (partial(adv.jsma, share=0.4), (), False),
    "sparsefool": (partial(adv.sparsefool, steps=2), (), False),
    "one_pixel": (partial(adv.one_pixel, steps=2, population=5), (), True),
}
SHORT = {
    "multi-target": partial(adv.multi_target, steps=2),
    "APGD": partial(adv.apgd, steps=4),
    "FAB": partial(adv.fab, steps=2),
    "Square": partial(adv.square, queries=4),
}


class Cube(torch.autograd.Function):
    """A function with a derivative of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x + x**3 / 3

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return slope * (1 + x * x)


class Layer(nn.Module):
    """A layer with two parts that keep one weight, and an integer buffer that counts calls."""

    calls: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.second.weight = self.first.weight
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.second(Cube.apply(self.first(x).tanh()))


class Checkpointed(nn.Module):
    """A layer that computes its activations again in the backward pass."""

    def __init__(self, layer: nn.Module, *, reentrant: bool) -> None:
        super().__init__()
        self.layer, self.reentrant = layer, reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.layer, x, use_reentrant=self.reentrant)


class Drawing(nn.Module):
    """A layer that advances torch's generator without an effect."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 0 * torch.rand_like(x)


class Attention(nn.Module):
    """Self-attention over the features, each a token."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed, self.attend = nn.Linear(1, 4), nn.MultiheadAttention(4, 2, dropout=0.2, batch_first=True)
        self.last = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.embed(x[:, :, None])
        return self.last(self.attend(tokens, tokens, tokens, need_weights=False)[0].flatten(1))


class Recurrent(nn.Module):
    """A recurrent layer over the features."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.GRU(1, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x[:, :, None])[0][:, -1]


class Shifted(nn.Module):
    """A layer that writes into its input."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sub_(0.5)


class Cast(nn.Module):
    """A model that is run under autocast."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.layer(x).to(x.dtype)


class Wrapped(nn.Module):
    """A model whose output holds the logits among other things."""

    def __init__(self, layer: nn.Module, kind: str) -> None:
        super().__init__()
        self.layer, self.kind = layer, kind

    def forward(self, x: Tensor) -> Any:
        logits = self.layer(x)
        match self.kind:
            case "tuple":
                return logits, x
            case "dict":
                return {"hidden": x, "logits": logits}
            case "object":
                return Output(logits)
        return logits.t().contiguous().t()


@dataclass
class Output:
    """What `Wrapped` returns as an object."""

    logits: Tensor


PICKS: dict[str, Any] = {"tuple": 0, "dict": "logits", "object": "logits", "strided": None}


@dataclass
class Case:
    """A model, how it is called, and a batch.

    Attributes:
        module: The module, with modes, gradients and buffers of any kind.
        call: What the attacks get.
        logits: The place of the logits in the output.
        rounded: Whether the model rounds, so that a batch and its halves may differ.
        x: Clean inputs.
        labels: Their labels.
        ball: Fields of the ball.
        kinds: What was drawn.
    """

    module: nn.Module
    call: Callable[[Tensor], Any]
    logits: Any
    rounded: bool
    x: Tensor
    labels: Tensor
    ball: dict[str, Any]
    kinds: list[str]

    def answers(self, module: nn.Module, x: Tensor) -> Tensor:
        """Return the logits of a module in evaluation mode, without any attack."""
        with torch.no_grad(), torch.random.fork_rng():
            output = module.eval()(x.clone())
        return output if isinstance(output, Tensor) else output[0] if isinstance(output, tuple) else _named(output)


def _named(output: Any) -> Tensor:
    return output["logits"] if isinstance(output, dict) else output.logits


def drawn(seed: int) -> Case:
    """Return a random case."""
    pick, kinds = random.Random(seed), []
    generator = torch.Generator().manual_seed(seed)

    def some(*names: str) -> str:
        kinds.append(pick.choice(names))
        return kinds[-1]

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        is_image = some("vectors", "images") == "images"
        shape = (2, 3, 3) if is_image else (6,)
        module = _module(some, pick, is_image=is_image)
    dtype = torch.float32 if "autocast" in kinds else pick.choice([torch.float64, torch.float64, torch.float32])
    module = module.to(dtype)
    with torch.no_grad():
        for buffer in module.buffers():  # statistics that are none of a fresh layer
            if buffer.is_floating_point():
                buffer.add_(0.1 * torch.rand(buffer.shape, generator=generator, dtype=dtype))
    for one in module.modules():
        one.training = pick.random() < 0.5
    for parameter in module.parameters():
        parameter.requires_grad_(pick.random() < 0.8)
        if pick.random() < 0.5:
            parameter.grad = torch.full_like(parameter, 7.0)
    x = torch.rand(N, *shape, generator=generator, dtype=dtype)
    x[0].mul_(2).round_().div_(2)  # on the box
    norm = pick.choice(ALL)
    ball: dict[str, Any] = {"norm": norm, "bounds": (0, 1)}
    size = pick.choice([0.0, 0.05, 0.3]) * {"linf": 1, "l2": 2, "l1": 4}[norm]
    ball["epsilon"] = pick.choice([size, size * torch.rand(N, generator=generator, dtype=torch.float64)])
    if pick.random() < 0.3:
        ball["mask"] = torch.rand(shape, generator=generator) < 0.7
    kind = pick.choice(["strided", "tuple", "dict", "object"])
    module = Wrapped(module, kind)
    module.training = pick.random() < 0.5
    kinds += [kind, norm, str(dtype)]
    case = Case(module, module, PICKS[kind], "autocast" in kinds, x, torch.zeros(N).long(), ball, kinds)
    calls = {
        "module": lambda: module,
        "function": lambda: lambda x: module(x),
        "method": lambda: module.forward,
        "functional": lambda: partial(_functional, module),
    }
    if "checkpoint" in kinds:  # a backward pass of torch's would compute them again with the module's own parameters
        del calls["functional"]
    case.call = calls[some(*calls)]()
    case.labels = case.answers(copy.deepcopy(module), x).argmax(1)
    case.labels[-1] = (case.labels[-1] + 1) % C
    if some("int64", "int32") == "int32":
        case.labels = case.labels.int()
    return case


def _functional(module: nn.Module, x: Tensor) -> Any:
    tensors = {name: tensor.detach() for name, tensor in module.named_parameters()}
    return torch.func.functional_call(module, tensors, (x,))


def _module(some: Callable[..., str], pick: random.Random, *, is_image: bool) -> nn.Module:
    width = 4
    layers: list[nn.Module] = [Shifted()] if some("in place", "copied") == "in place" else []
    if is_image:
        layers += [nn.Conv2d(2, 2, 2), {"norm": nn.BatchNorm2d(2), "none": nn.Identity()}[some("norm", "none")]]
        layers += [nn.SiLU(), nn.Flatten(), nn.Linear(8, width)]
    else:
        layers += [nn.Linear(6, width)]
    for _ in range(pick.choice([1, 2])):
        layer: nn.Module = {
            "normalised": lambda: nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU(inplace=True)),
            "counting": lambda: Layer(width),
            "dropout": lambda: nn.Sequential(nn.Tanh(), nn.Dropout(0.5), nn.Linear(width, width)),
            "drawing": Drawing,
            "attention": lambda: Attention(width),
            "recurrent": lambda: Recurrent(width),
            "weight norm": lambda: parametrizations.weight_norm(nn.Linear(width, width)),
            "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(width, width)),
        }[
            some(
                "normalised",
                "counting",
                "dropout",
                "drawing",
                "attention",
                "recurrent",
                "weight norm",
                "spectral norm",
            )
        ]()
        match some("plain", "plain", "checkpoint", "reentrant", "hooks"):
            case "checkpoint":
                layer = Checkpointed(layer, reentrant=False)
            case "reentrant":
                layer = Checkpointed(layer, reentrant=True)
            case "hooks":
                layer.register_forward_hook(lambda _, __, output: output * 1.5)
                layer.register_full_backward_hook(lambda _, slopes, __: tuple(2 * slope for slope in slopes))
        layers.append(layer)
    module: nn.Module = nn.Sequential(*layers, nn.Linear(width, C))
    return Cast(module) if some("exact", "exact", "exact", "autocast") == "autocast" else module


def traces(case: Case) -> list[Any]:
    """Return all that an attack could leave behind, by value, and buffers also by identity."""
    module = case.module
    state = np.random.get_state()[1]  # noqa: NPY002 - of users
    values: list[Any] = [torch.get_rng_state(), random.getstate(), torch.as_tensor(state.copy()), case.x.clone()]
    for parameter in module.parameters():
        values += [id(parameter), parameter.detach().clone(), parameter.requires_grad]
        values += [None if parameter.grad is None else parameter.grad.clone(), id(parameter.grad)]
    for buffer in module.buffers():
        values += [id(buffer), buffer.clone()]
    values += [case.labels.clone(), torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")]
    for one in module.modules():
        values += [one.training, len(one._forward_hooks), len(one._backward_hooks), sorted(vars(one))]
    return values


def same(one: list[Any], other: list[Any]) -> bool:
    """Return whether two `traces` are equal, bit for bit."""
    return len(one) == len(other) and all(
        torch.equal(a, b) if isinstance(a, Tensor) else bool(a == b) for a, b in zip(one, other, strict=True)
    )


def excess(case: Case, example: Tensor) -> bool:
    """Return whether an example is out of its ball, by exact arithmetic, or out of the box or the mask."""
    sizes = torch.as_tensor(case.ball["epsilon"], dtype=torch.float64).expand(N).tolist()
    for clean, moved, size in zip(case.x.flatten(1).tolist(), example.flatten(1).tolist(), sizes, strict=True):
        ways = [abs(Fraction(b) - Fraction(a)) for a, b in zip(clean, moved, strict=True)]
        length = {"linf": max(ways), "l1": sum(ways), "l2": sum(way * way for way in ways)}[case.ball["norm"]]
        if length > Fraction(size) ** (2 if case.ball["norm"] == "l2" else 1):
            return True
    return _out_of_the_box(case, example)


def _out_of_the_box(case: Case, example: Tensor) -> bool:
    mask = case.ball.get("mask")
    stays = mask is None or torch.equal(example[:, ~mask], case.x[:, ~mask])
    return not stays or not bool(((example >= 0) & (example <= 1)).all())


MODES = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def check(seed: int) -> list[str]:
    """Return what does not hold, a sentence each, for some of the attacks."""
    case, wrong, pick = drawn(seed), [], random.Random(seed)
    fresh = copy.deepcopy(case.module)
    for name in pick.sample(sorted(ATTACKS), 6):
        attack, norms, draws = ATTACKS[name]
        if norms and case.ball["norm"] not in norms:
            continue
        fields = ("epsilon", "norm", "bounds", "mask") if norms else ("bounds", "mask")
        options = {key: case.ball[key] for key in fields if key in case.ball}

        def run(x: Tensor, labels: Tensor, **changes: Any) -> Tensor:
            own = {"generator": torch.Generator().manual_seed(3)} if draws else {}  # noqa: B023
            return attack(case.call, x, labels, logits=case.logits, **(options | own | changes))  # noqa: B023

        before, found = traces(case), {}
        for mode in pick.sample(sorted(MODES), 2):
            try:
                with _quiet(), MODES[mode]():
                    found[mode] = run(case.x, case.labels)
            except Exception as error:
                wrong.append(f"{seed} {name} {mode}: {type(error).__name__}: {error}")
                continue
            if not same(traces(case), before):
                wrong.append(f"{seed} {name} {mode}: something was left behind")
            if found[mode].requires_grad or found[mode].dtype != case.x.dtype:
                wrong.append(f"{seed} {name} {mode}: not a constant in the dtype of the inputs")
            if excess(case, found[mode]) if norms else _out_of_the_box(case, found[mode]):
                wrong.append(f"{seed} {name} {mode}: out of ball, box or mask")
        if len(found) == 2 and not torch.equal(*found.values()):
            difference = (next(iter(found.values())) - list(found.values())[1]).abs().max()
            wrong.append(f"{seed} {name}: two runs differ by {difference:.2g}")
        if found and not draws and not case.rounded and case.x.dtype == torch.float64:
            halves = []
            for rows in (slice(0, 2), slice(2, N)):
                epsilon = options.get("epsilon")
                changes = {"epsilon": epsilon[rows]} if isinstance(epsilon, Tensor) else {}
                with _quiet():
                    halves.append(run(case.x[rows], case.labels[rows], **changes))
            difference = (torch.cat(halves) - next(iter(found.values()))).abs().max()
            if difference > 1e-6:
                wrong.append(f"{seed} {name}: the halves of the batch differ by {difference:.2g}")
    return wrong + _evaluated(seed, case, fresh, pick)


def _evaluated(seed: int, case: Case, fresh: nn.Module, pick: random.Random) -> list[str]:
    """Hold the reported robustness against the examples, on a copy of the model that no attack has seen."""
    before, wrong, mode = traces(case), [], pick.choice(sorted(MODES))
    try:
        with _quiet(), MODES[mode]():
            run = partial(adv.evaluate_robustness, case.call, case.x, case.labels, attacks=SHORT, logits=case.logits)
            found = run(**case.ball, batch_size=pick.choice([2, 1000]))
            share = adv.robust_accuracy(
                case.call, case.x, case.labels, attacks=SHORT, logits=case.logits, **case.ball, batch_size=1000
            )
    except Exception as error:
        return [f"{seed} evaluate_robustness {mode}: {type(error).__name__}: {error}\n{traceback.format_exc()}"]
    if not same(traces(case), before):
        wrong.append(f"{seed} evaluate_robustness {mode}: something was left behind")
    if excess(case, found.examples):
        wrong.append(f"{seed} evaluate_robustness {mode}: out of ball, box or mask")
    clean, moved = (case.answers(fresh, x).argmax(1) == case.labels for x in (case.x, found.examples))
    exact = (torch.equal(clean, found.correct), torch.equal(moved & clean, found.robust))
    if not case.rounded and not all(exact):
        wrong.append(f"{seed} evaluate_robustness {mode}: rows {exact} are not those of the model")
    if found.correct.sum() - found.robust.sum() != sum(found.broken.values()):
        wrong.append(f"{seed} evaluate_robustness {mode}: the counts do not add up")
    if not 0 <= share <= found.clean_accuracy:
        wrong.append(f"{seed} robust_accuracy {mode}: {share}")
    return wrong


def main() -> None:
    """Check many models, and print what does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    start, count = time.monotonic(), 0
    for seed in range(given.seed, given.seed + given.models):
        for line in check(seed):
            count += 1
            print(line, drawn(seed).kinds, flush=True)
    print(f"{given.models} models, {count} defects, {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
