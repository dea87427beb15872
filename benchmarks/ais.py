"""Time of annealed importance sampling against its matrix products, and its error against a known log Z."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from benchmarks._measure import Row, timed_row
from toolkit.datasets import digits
from toolkit.rbm import (
    RBM,
    FusedTrainer,
    Sandwich,
    ais,
    base_rate_bias,
    pseudo_log_likelihood,
    sandwich,
)
from toolkit.rbm.annealing import (
    log_weights_by_definition,
)


def rows() -> Iterator[Row]:
    """Measure the time of a temperature, and errors on digits, where log Z is a sum."""
    yield from _temperature(784, 500, 1000)
    yield _pseudo_likelihood(784, 500, 500)
    yield from _errors((100, 1000), chains=500, runs=20)
    yield from _errors((1000,), chains=5000, runs=8)


def _temperature(n_visible: int, n_hidden: int, chains: int, *, steps: int = 30) -> Iterator[Row]:
    generator = torch.Generator().manual_seed(0)
    rbm = _machine(n_visible, n_hidden, generator)
    # As close as those of a thousand; the last one is far, because annealing has to end there.
    betas = torch.cat([torch.arange(steps) / 1000, torch.ones(1)])
    reference = torch.zeros(n_visible)
    visible = torch.randint(2, (chains, n_visible), generator=generator).float()
    hidden = torch.randint(2, (chains, n_hidden), generator=generator).float()
    to_hidden, to_visible, weights = torch.empty_like(hidden), torch.empty_like(visible), rbm.weights.data

    def anneal() -> None:
        ais(rbm, chains=chains, inverse_temperatures=betas, reference=reference, generator=generator)

    def products() -> None:
        for _ in range(steps):
            torch.mm(visible, weights, out=to_hidden)
            torch.mm(hidden, weights.T, out=to_visible)

    def define() -> None:
        with torch.no_grad():
            log_weights_by_definition(rbm.joint, visible, betas.tolist(), reference, generator)

    size = f"{n_visible} x {n_hidden}, {chains} chains"
    for what, theirs, goal in (
        ("its two matrix products", products, "at most 1.3"),
        ("the same by the definition", define, ""),
    ):
        yield timed_row(f"AIS, one temperature / {what}, {size}", anneal, theirs, goal, steps=steps, repeats=7)


def _pseudo_likelihood(n_visible: int, n_hidden: int, samples: int) -> Row:
    generator = torch.Generator().manual_seed(0)
    rbm = _machine(n_visible, n_hidden, generator)
    visible = torch.randint(2, (samples, n_visible), generator=generator).float()

    def flip_one_by_one() -> None:
        with torch.no_grad():
            before, changed = rbm.free_energy(visible), visible.clone()
            total = torch.zeros(samples)
            for unit in range(n_visible):
                changed[:, unit] = 1 - visible[:, unit]
                total -= torch.nn.functional.softplus(before - rbm.free_energy(changed))
                changed[:, unit] = visible[:, unit]

    what = f"exact pseudo-likelihood / a free energy for each bit, {n_visible} x {n_hidden}"
    return timed_row(what, lambda: pseudo_log_likelihood(rbm, visible), flip_one_by_one, repeats=3)


def _errors(betas: tuple[int, ...], *, chains: int, runs: int) -> Iterator[Row]:
    rbm, reference = _digits_machine()
    truth = rbm.log_partition().item()
    generator = torch.Generator().manual_seed(1)
    for temperatures in betas:

        def look(temperatures: int = temperatures) -> Sandwich:
            draws, _ = rbm.sample_exactly(chains, generator=generator)
            return sandwich(rbm, draws, inverse_temperatures=temperatures, reference=reference, generator=generator)

        found = [look() for _ in range(runs)]
        for what, errors, stated in (
            ("AIS", [one.lower.estimate - truth for one in found], [one.lower.standard_error for one in found]),
            ("reverse AIS", [one.upper.estimate - truth for one in found], [one.upper.standard_error for one in found]),
            ("both", [one.estimate - truth for one in found], []),
        ):
            spread = math.sqrt(sum(error**2 for error in errors) / runs)
            note = f"root mean square over {runs} runs, mean {sum(errors) / runs:+.4f}"
            if stated:
                note += f", stated standard error {sum(stated) / runs:.4f}"
            size = f"{chains} chains, {temperatures} temperatures"
            goal = "at most 1" if temperatures == 1000 else ""
            yield Row(f"error of log Z / 0.005 nats, digits, {size}, {what}", spread / 0.005, goal, note)


def _machine(n_visible: int, n_hidden: int, generator: torch.Generator) -> RBM:
    rbm = RBM(n_visible, n_hidden, generator=generator)
    with torch.no_grad():
        rbm.weights.mul_(5)
        rbm.visible_bias.normal_(generator=generator)
    return rbm


def _digits_machine() -> tuple[RBM, torch.Tensor]:
    data, generator = (digits().inputs >= 0.5).float(), torch.Generator().manual_seed(0)
    rbm = RBM(64, 16, generator=generator)
    rbm.start_at_base_rates(data)
    trainer = FusedTrainer(rbm, batch_size=100, steps=1, chains=torch.zeros(500, 16), generator=generator)
    epochs = 300
    for epoch in range(epochs):
        for index in torch.randperm(len(data), generator=generator).split(100):
            trainer.step(data[index], learning_rate=0.3 * (1 - epoch / epochs))
    return rbm, base_rate_bias(data)
