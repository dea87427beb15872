r"""Gradients that stop inside of an inner computation, in training.

- ``sinusoids``: few-shot regression of sines by MAML (Finn, Abbeel & Levine, "Model-agnostic meta-learning for fast
  adaptation of deep networks", 2017, section 5.1). The block makes it first-order.
- ``text``: a recurrent network predicts the next character of the standard library's own source text. The block
  truncates backpropagation through time.
- ``equilibrium``: a classifier of digits whose layer is a fixed point. The block leaves the gradient of one step.

N samples or tasks, T characters, H units, C classes.
"""

from __future__ import annotations

import itertools
import math
import string
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from toolkit import unblock
from toolkit.bilevel import (
    INNER_GRADIENT,
    Solved,
    adapt,
    equilibrium,
    fixed_point,
    phantom,
    randomly_truncated_scan,
    reptile_loss,
    truncated_scan,
)
from toolkit.gradients.memory import measure_memory
from toolkit.runner import ExperimentConfig, Methods, Objective, Run, Sweep

from ._digits import Batches, digits_of
from ._training import accuracy, descend, gradient_of

__all__ = ["Config", "run"]

Parameters = dict[str, Tensor]
Positive = Annotated[int, Field(ge=1)]

_TASKS, _SHOTS = 200, 10  # tasks that judge a run, samples to adapt to and samples to judge by
_FILES = ("argparse.py", "textwrap.py", "string.py", "heapq.py", "bisect.py")
_HELD_OUT = 10_000  # characters


class Config(ExperimentConfig):
    """Values of an experiment on inner computations.

    Attributes:
        task: ``"sinusoids"``, ``"text"`` or ``"equilibrium"``; see the module.
        n_hidden: Number of hidden units, H.
        batch_size: Number of tasks, pieces of text, or images in a training step.
        inner_steps: sinusoids: number of steps of gradient descent that adapt to a task.
        inner_rate: sinusoids: step size of this descent.
        every: text: number of steps after which the state is held constant.
        length: text: number of characters in a piece of text, T.
        iterations: equilibrium: the largest number of iterations of a search for a fixed point.
        swept: Step sizes, numbers of steps, or of iterations, for which gradients are measured after training.
    """

    task: Literal["sinusoids", "text", "equilibrium"]
    n_hidden: Positive = 32
    batch_size: Positive
    inner_steps: Positive = 3
    inner_rate: Annotated[float, Field(gt=0)] = 0.02
    every: Positive = 4
    length: Positive = 32
    iterations: Positive = 30
    swept: Annotated[list[Annotated[float, Field(gt=0)]], Field(min_length=1)]


def run(config: Config, seed: int) -> Run:
    """Return one seeded run of the config's task."""
    return {"sinusoids": _sinusoids, "text": _text, "equilibrium": _equilibrium}[config.task](config, seed)


# --- sines -------------------------------------------------------------------------------------------------------


def _sinusoids(config: Config, seed: int) -> Run:
    generator = torch.Generator().manual_seed(seed)
    p = _network(config, generator)
    batch = _sines(config, config.batch_size, generator)
    judged = _sines(config, _TASKS, torch.Generator().manual_seed(-1))

    def loss() -> Tensor:
        return _query_error(_adapted(config, p, *batch), *batch).mean()

    def evaluate() -> dict[str, float]:
        return _judge(config, p, judged)

    def target() -> dict[str, Tensor]:
        return _first_order(config, p, batch, config.inner_rate)

    def after_step(step: int) -> None:
        nonlocal batch
        batch = _sines(config, config.batch_size, generator)

    def sweep() -> dict[str, list[float]]:
        found = [_directions(config, p, judged, rate) for rate in config.swept]
        return {
            "relative error of the first-order gradient": [_error(*pair) for pair in found],
            "cosine of first-order and whole gradient": [_cosine(*pair) for pair in found],
        }

    return Run(
        parameters=p,
        loss=loss,
        objective=Objective(label="squared error after adaptation", higher_is_better=False),
        evaluate=evaluate,
        optimizer=torch.optim.Adam(p.values(), lr=config.learning_rate),
        target=target,
        after_step=after_step,
        sweep=Sweep(label="inner step size", values=tuple(config.swept), evaluate=sweep),
        methods=_other_initialisations(config, seed, judged),
    )


def _sines(config: Config, n_tasks: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw inputs and outputs (N, 2 shots, 1) of sines with amplitudes in [0.1, 5] and phases in [0, pi]."""
    draw = partial(torch.rand, generator=generator, dtype=getattr(torch, config.dtype))
    amplitude, phase = 0.1 + 4.9 * draw(n_tasks, 1, 1), math.pi * draw(n_tasks, 1, 1)
    x = 10 * draw(n_tasks, 2 * _SHOTS, 1) - 5
    return x.to(config.device), (amplitude * torch.sin(x - phase)).to(config.device)


def _network(config: Config, generator: torch.Generator) -> Parameters:
    widths = [1, config.n_hidden, config.n_hidden, 1]
    p = {}
    for layer, (inputs, outputs) in enumerate(itertools.pairwise(widths)):
        p[f"weight{layer}"] = _normal(config, generator, inputs, outputs)
        p[f"bias{layer}"] = torch.zeros(1, outputs, dtype=getattr(torch, config.dtype), device=config.device)
    return {name: value.requires_grad_() for name, value in p.items()}


def _normal(config: Config, generator: torch.Generator, inputs: int, outputs: int) -> Tensor:
    weight = torch.randn(inputs, outputs, generator=generator, dtype=getattr(torch, config.dtype))
    return (weight / math.sqrt(inputs)).to(config.device)


def _errors(p: Mapping[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    """Return the mean squared error (N,) of each task."""
    for layer in (0, 1):
        x = torch.tanh(x @ p[f"weight{layer}"] + p[f"bias{layer}"])
    return (x @ p["weight2"] + p["bias2"] - y).square().mean((1, 2))


def _support_error(p: Mapping[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    return _errors(p, x[:, :_SHOTS], y[:, :_SHOTS])


def _query_error(p: Mapping[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    return _errors(p, x[:, _SHOTS:], y[:, _SHOTS:])


def _adapted(config: Config, p: Parameters, x: Tensor, y: Tensor, rate: float | None = None) -> Parameters:
    """Adapt a copy of the parameters for each task; the sum of the tasks' losses has the gradients of them all."""
    copies = _copies(p, len(x))
    rate = config.inner_rate if rate is None else rate
    return adapt(lambda q: _support_error(q, x, y).sum(), copies, steps=config.inner_steps, step_size=rate)


def _copies(p: Parameters, n_tasks: int) -> Parameters:
    return {name: value.expand(n_tasks, *value.shape) for name, value in p.items()}


def _judge(config: Config, p: Parameters, judged: tuple[Tensor, Tensor]) -> dict[str, float]:
    with torch.no_grad():
        before, after = _query_error(p, *judged), _query_error(_adapted(config, p, *judged), *judged)
    return {"objective": after.mean().item(), "squared error before adaptation": before.mean().item()}


def _first_order(config: Config, p: Parameters, batch: tuple[Tensor, Tensor], rate: float) -> Parameters:
    """Return the mean of the tasks' gradients at the adapted parameters, by plain autograd."""
    q = _copies(p, len(batch[0]))
    for _ in range(config.inner_steps):
        q = {name: value.detach().requires_grad_() for name, value in q.items()}
        slopes = gradient_of(_support_error(q, *batch).sum(), q)
        q = {name: value - rate * slopes[name] for name, value in q.items()}
    q = {name: value.detach().requires_grad_() for name, value in q.items()}
    return {name: slope.mean(0) for name, slope in gradient_of(_query_error(q, *batch).sum(), q).items()}


def _directions(
    config: Config, p: Parameters, batch: tuple[Tensor, Tensor], rate: float
) -> tuple[Parameters, Parameters]:
    """Return the first-order gradient and the whole one."""
    with unblock(INNER_GRADIENT):
        whole = gradient_of(_query_error(_adapted(config, p, *batch, rate), *batch).mean(), p)
    return _first_order(config, p, batch, rate), whole


def _other_initialisations(config: Config, seed: int, judged: tuple[Tensor, Tensor]) -> Methods:
    """Return Reptile from the same start."""

    def reptile(p: Parameters, batch: tuple[Tensor, Tensor]) -> Tensor:
        copies = _copies(p, len(batch[0]))
        adapted = _adapted(config, p, *batch)
        return reptile_loss(copies, adapted, step_size=config.inner_rate) / len(batch[0])

    def train() -> dict[str, list[float]]:
        generator = torch.Generator().manual_seed(seed)
        p = _network(config, generator)
        optimizer = torch.optim.Adam(p.values(), lr=config.learning_rate)
        for _ in range(config.steps):
            descend(optimizer, reptile(p, _sines(config, config.batch_size, generator)))
        return {name: [value] for name, value in _judge(config, p, judged).items()}

    return Methods(label="update", steps=(config.steps,), train={"Reptile": train})


# --- text --------------------------------------------------------------------------------------------------------


def _text(config: Config, seed: int) -> Run:
    generator = torch.Generator().manual_seed(seed)
    characters, n_characters = _library()
    p = _recurrent(config, n_characters, n_characters, generator)
    pieces = partial(_pieces, config, characters)
    batch = pieces(generator)
    held = characters[-_HELD_OUT:]
    held = held[: len(held) // (config.length + 1) * (config.length + 1)].view(-1, config.length + 1)

    def loss() -> Tensor:
        return _prediction_loss(p, batch, partial(truncated_scan, every=config.every))

    def target() -> dict[str, Tensor]:
        return gradient_of(_loss_in_pieces(p, batch, config.every), p)

    def after_step(step: int) -> None:
        nonlocal batch
        batch = pieces(generator)

    def sweep() -> dict[str, list[float]]:
        sample = pieces(torch.Generator().manual_seed(-1))
        whole = gradient_of(_loss_in_pieces(p, sample, config.length), p)
        cut = [gradient_of(_loss_in_pieces(p, sample, int(every)), p) for every in config.swept]
        return {
            "relative error of the truncated gradient": [_error(each, whole) for each in cut],
            "cosine of truncated and whole gradient": [_cosine(each, whole) for each in cut],
        }

    return Run(
        parameters=p,
        loss=loss,
        objective=Objective(label="cross entropy of held-out text (nats per character)", higher_is_better=False),
        evaluate=lambda: {"objective": _held_out_loss(p, held)},
        optimizer=torch.optim.Adam(p.values(), lr=config.learning_rate),
        target=target,
        after_step=after_step,
        sweep=Sweep(label="steps of a piece", values=tuple(config.swept), evaluate=sweep),
        methods=_other_truncations(config, seed, held),
    )


@cache
def _library() -> tuple[Tensor, int]:
    """Return the text of some modules of the standard library as numbers of characters, and their count."""
    folder = Path(string.__file__).parent
    text = "".join((folder / name).read_text("utf-8") for name in _FILES)
    numbers = {character: number for number, character in enumerate(sorted(set(text)))}
    return torch.tensor([numbers[character] for character in text]), len(numbers)


def _pieces(config: Config, characters: Tensor, generator: torch.Generator) -> Tensor:
    """Draw pieces (N, T + 1) of the text that is not held out."""
    last = len(characters) - _HELD_OUT - config.length
    first = torch.randint(last, (config.batch_size, 1), generator=generator)
    return characters[first + torch.arange(config.length + 1)].to(config.device)


def _prediction_loss(p: Parameters, pieces: Tensor, scan: Callable[..., tuple[Tensor, Tensor]]) -> Tensor:
    """Return the mean cross entropy of the next characters, the network being run by `scan`."""

    def step(h: Tensor, driven: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(driven + h @ p["recurrent"])
        return h, h

    driven = p["input"][pieces[:, :-1].T] + p["bias"]
    _, hidden = scan(step, torch.zeros_like(driven[0]), driven)
    return _cross_entropy(p, hidden, pieces)


def _cross_entropy(p: Parameters, hidden: Tensor, pieces: Tensor) -> Tensor:
    logits = hidden @ p["output"] + p["output_bias"]
    return F.cross_entropy(logits.flatten(0, 1), pieces[:, 1:].T.flatten())


def _loss_in_pieces(p: Parameters, pieces: Tensor, every: int) -> Tensor:
    """Return `_prediction_loss` by torch's recurrent network, piece by piece, each from a detached state."""
    inputs = F.one_hot(pieces[:, :-1].T, len(p["input"])).to(p["input"].dtype)
    weights = [p["input"].T, p["recurrent"].T, p["bias"], torch.zeros_like(p["bias"])]
    h, hidden = torch.zeros(1, len(pieces), len(p["bias"])).to(inputs), []
    for piece in inputs.split(every):
        outputs, h = torch.rnn_tanh(piece, h.detach(), weights, True, 1, 0.0, False, False, False)
        hidden.append(outputs)
    return _cross_entropy(p, torch.cat(hidden), pieces)


@torch.no_grad()
def _held_out_loss(p: Parameters, held: Tensor) -> float:
    return _loss_in_pieces(p, held.to(p["bias"].device), held.shape[1]).item()


def _other_truncations(config: Config, seed: int, held: Tensor) -> Methods:
    """Return training with a state that is held after every step, and with random cuts, from the same start."""

    def train(scan: Callable[..., tuple[Tensor, Tensor]]) -> dict[str, list[float]]:
        generator = torch.Generator().manual_seed(seed)
        characters, n_characters = _library()
        p = _recurrent(config, n_characters, n_characters, generator)
        optimizer = torch.optim.Adam(p.values(), lr=config.learning_rate)
        for _ in range(config.steps):
            descend(optimizer, _prediction_loss(p, _pieces(config, characters, generator), scan))
        return {"objective": [_held_out_loss(p, held)]}

    cuts = torch.Generator().manual_seed(seed)
    trained = {
        "a cut after every step": partial(train, partial(truncated_scan, every=1)),
        "random cuts": partial(train, partial(randomly_truncated_scan, probability=1 / config.every, generator=cuts)),
    }
    return Methods(label="update", steps=(config.steps,), train=trained)


# --- equilibrium -------------------------------------------------------------------------------------------------

Layer = Callable[[Parameters, Tensor], Solved]


def _equilibrium(config: Config, seed: int) -> Run:
    generator = torch.Generator().manual_seed(seed)
    train, test = digits_of(config)
    p = _recurrent(config, 64, 10, generator, scale=0.5)
    batches = Batches(train, config.batch_size, generator)
    layer = partial(_one_step, config.iterations)

    def loss(layer: Layer = layer) -> Tensor:
        return F.cross_entropy(_logits(p, layer(p, batches.inputs)), batches.labels)

    def memory(most: float) -> float:
        all_of_them = partial(_one_step, int(most), tolerance=0)
        return measure_memory(lambda: loss(all_of_them)).graph / 2**20

    return Run(
        parameters=p,
        loss=loss,
        objective=Objective(label="cross entropy of held-out digits (nats)", higher_is_better=False),
        evaluate=lambda: _classified(p, layer, test.inputs, test.labels),
        optimizer=torch.optim.Adam(p.values(), lr=config.learning_rate),
        target=lambda: _gradient_of_one_step(p, config.iterations, batches.inputs, batches.labels),
        after_step=batches.advance,
        sweep=Sweep(
            label="iterations",
            values=tuple(config.swept),
            evaluate=lambda: {"memory of the graph (MiB)": [memory(most) for most in config.swept]},
        ),
        methods=_other_gradients(config, seed),
    )


def _function(z: Tensor, recurrent: Tensor, driven: Tensor) -> Tensor:
    return torch.tanh(z @ recurrent + driven)


def _search(iterations: int, function: Callable[[Tensor], Tensor], start: Tensor, *, tolerance: float = 1e-3) -> Solved:
    """Iterate to three digits. Samples that are not there in time are counted by `_classified`, without a warning."""
    found = fixed_point(function, start, memory=0, tolerance=tolerance, max_steps=iterations)
    return replace(found, converged=torch.ones_like(found.converged))


def _one_step(iterations: int, p: Parameters, x: Tensor, *, tolerance: float = 1e-3) -> Solved:
    driven = x @ p["input"] + p["bias"]
    solver = partial(_search, iterations, tolerance=tolerance)
    return phantom(lambda z: _function(z, p["recurrent"], driven), torch.zeros_like(driven), solver=solver)


def _implicit(iterations: int, p: Parameters, x: Tensor) -> Solved:
    driven = x @ p["input"] + p["bias"]
    return equilibrium(_function, torch.zeros_like(driven), p["recurrent"], driven, solver=partial(_search, iterations))


def _logits(p: Parameters, found: Solved) -> Tensor:
    return found.value @ p["output"] + p["output_bias"]


@torch.no_grad()
def _classified(p: Parameters, layer: Layer, inputs: Tensor, labels: Tensor) -> dict[str, float]:
    found = layer(p, inputs)
    logits = _logits(p, found)
    near = found.residual <= 1e-3 * (1 + found.value.norm(dim=1))
    return {
        "objective": F.cross_entropy(logits, labels).item(),
        "accuracy": accuracy(logits, labels),
        "share of converged samples": near.double().mean().item(),
    }


@torch.no_grad()
def _gradient_of_one_step(p: Parameters, iterations: int, x: Tensor, labels: Tensor) -> Parameters:
    """Return the gradient of one step from the held fixed point, by hand."""
    driven = x @ p["input"] + p["bias"]
    held = _search(iterations, lambda z: _function(z, p["recurrent"], driven), torch.zeros_like(driven)).value
    z = _function(held, p["recurrent"], driven)
    residual = torch.softmax(z @ p["output"] + p["output_bias"], 1)
    residual = (residual - F.one_hot(labels, 10)) / len(x)
    slope = (residual @ p["output"].T) * (1 - z**2)
    return {
        "input": x.T @ slope,
        "recurrent": held.T @ slope,
        "bias": slope.sum(0),
        "output": z.T @ residual,
        "output_bias": residual.sum(0),
    }


def _other_gradients(config: Config, seed: int) -> Methods:
    """Return training with the implicit gradient, from the same start."""
    layer = partial(_implicit, config.iterations)

    def train() -> dict[str, list[float]]:
        generator = torch.Generator().manual_seed(seed)
        data, test = digits_of(config)
        p = _recurrent(config, 64, 10, generator, scale=0.5)
        batches = Batches(data, config.batch_size, generator)
        optimizer = torch.optim.Adam(p.values(), lr=config.learning_rate)
        for step in range(config.steps):
            descend(optimizer, F.cross_entropy(_logits(p, layer(p, batches.inputs)), batches.labels))
            batches.advance(step + 1)
        judge = partial(_one_step, config.iterations)
        return {name: [value] for name, value in _classified(p, judge, test.inputs, test.labels).items()}

    return Methods(label="update", steps=(config.steps,), train={"the implicit gradient": train})


# --- shared ------------------------------------------------------------------------------------------------------


def _recurrent(
    config: Config, inputs: int, outputs: int, generator: torch.Generator, *, scale: float = 1.0
) -> Parameters:
    """Return the parameters of a recurrent layer, its recurrent weights multiplied by `scale`, and of its readout."""
    h, dtype = config.n_hidden, getattr(torch, config.dtype)
    p = {
        "input": _normal(config, generator, inputs, h),
        "recurrent": scale * _normal(config, generator, h, h),
        "bias": torch.zeros(h, dtype=dtype, device=config.device),
        "output": _normal(config, generator, h, outputs),
        "output_bias": torch.zeros(outputs, dtype=dtype, device=config.device),
    }
    return {name: value.requires_grad_() for name, value in p.items()}


def _flat(gradient: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([gradient[name].reshape(-1) for name in sorted(gradient)])


def _error(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    return float((_flat(found) - _flat(expected)).norm() / _flat(expected).norm())


def _cosine(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    return float(F.cosine_similarity(_flat(found), _flat(expected), dim=0))
