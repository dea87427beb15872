"""Time of an update of contrastive divergence against its matrix products, autograd and scikit-learn."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.neural_network import BernoulliRBM

from benchmarks._measure import Row, timed_row
from toolkit import unblock
from toolkit.gradients import measure_memory
from toolkit.rbm import NEGATIVE_SAMPLES, RBM, FusedTrainer, contrastive_divergence


def rows() -> Iterator[Row]:
    """Measure updates in float32 and float64, and the memory that an open block keeps."""
    yield _persistent_update("fused PCD-1 update", "at most 1.15")
    yield _persistent_update("centred with weight decay", "", offset_rate=0.01, weight_decay=1e-3)
    yield _persistent_update("sampling in bfloat16", "", product_dtype=torch.bfloat16)
    yield _persistent_update("sampling in the faster precision", "at most 1.15", product_dtype="auto")
    yield _persistent_update("with fast weights", "", fast_rate=0.01)
    yield _fused_beside_autograd(784, 500, 100)
    for dtype in (np.float64, np.float32):
        yield _beside_sklearn(10, 100, dtype)
    yield from _blocked_beside_open(784, 500, 100, steps=10)


def _persistent_update(what: str, goal: str, **options: Any) -> Row:
    n_visible, n_hidden, batch = 784, 500, 100
    generator = torch.Generator().manual_seed(0)
    rbm, data = _machine_and_data(n_visible, n_hidden, batch, generator)
    chains = torch.zeros(batch, n_hidden)
    trainer = FusedTrainer(rbm, batch_size=batch, steps=1, chains=chains, generator=generator, **options)
    visible, hidden = data.float(), torch.rand(batch, n_hidden, generator=generator)
    weights = rbm.weights.data.clone()
    to_hidden, to_visible, update = torch.empty_like(hidden), torch.empty_like(visible), torch.empty_like(weights)

    def five_products() -> None:
        torch.mm(hidden, weights.T, out=to_visible)  # the chains' visible units
        for _ in range(2):  # the hidden means of chains and data, and their products with the visible units
            torch.mm(visible, weights, out=to_hidden)
            torch.mm(visible.T, hidden, out=update)

    return timed_row(
        f"{what} / the five matrix products of PCD-1, {n_visible} x {n_hidden}, batch {batch}",
        lambda: trainer.step(data, learning_rate=0.01),
        five_products,
        goal,
    )


def _fused_beside_autograd(n_visible: int, n_hidden: int, batch: int) -> Row:
    generator = torch.Generator().manual_seed(0)
    rbm, data = _machine_and_data(n_visible, n_hidden, batch, generator)
    twin, visible = RBM(n_visible, n_hidden, generator=generator), data.float()
    trainer = FusedTrainer(rbm, batch_size=batch, steps=1, generator=generator)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.01)

    def descend() -> None:
        optimizer.zero_grad()
        contrastive_divergence(twin, visible, steps=1, generator=generator).backward()
        optimizer.step()

    return timed_row(
        f"fused CD-1 update / autograd on the surrogate, {n_visible} x {n_hidden}, batch {batch}",
        lambda: trainer.step(data, learning_rate=0.01),
        descend,
    )


def _beside_sklearn(batch: int, n_hidden: int, dtype: type[np.floating]) -> Row:
    pixels = (load_digits().data >= 8).astype(dtype)
    theirs = BernoulliRBM(n_hidden, learning_rate=0.01, batch_size=batch, random_state=0)
    theirs.partial_fit(pixels[:batch])
    random = np.random.RandomState(0)

    generator = torch.Generator().manual_seed(0)
    data = torch.from_numpy(pixels)
    rbm = RBM(data.shape[1], n_hidden, generator=generator, dtype=data.dtype)
    chains = torch.zeros(batch, n_hidden)
    trainer = FusedTrainer(rbm, batch_size=batch, steps=1, chains=chains, generator=generator)
    return timed_row(
        f"fused PCD-1 update / scikit-learn's, digits, {n_hidden} hidden, batch {batch}, {np.dtype(dtype).name}",
        lambda: trainer.step(data[:batch], learning_rate=0.01),
        lambda: theirs._fit(pixels[:batch], random),
        "at most 0.75" if dtype is np.float32 else "",
    )


def _blocked_beside_open(n_visible: int, n_hidden: int, batch: int, *, steps: int) -> Iterator[Row]:
    generator = torch.Generator().manual_seed(0)
    rbm, data = _machine_and_data(n_visible, n_hidden, batch, generator)
    visible = data.float()

    def surrogate() -> torch.Tensor:
        return contrastive_divergence(rbm, visible, steps=steps, generator=generator)

    def blocked() -> None:
        torch.autograd.grad(surrogate(), list(rbm.parameters()))

    def opened() -> None:
        with unblock(NEGATIVE_SAMPLES):
            blocked()

    size = f"CD-{steps}, {n_visible} x {n_hidden}, batch {batch}"
    yield timed_row(f"surrogate and gradient: blocked / open, {size}", blocked, opened)
    closed = measure_memory(surrogate).graph
    with unblock(NEGATIVE_SAMPLES):
        open_ = measure_memory(surrogate).graph
    note = f"{closed / 2**20:.1f} MiB against {open_ / 2**20:.1f} MiB"
    yield Row(f"bytes that the graph keeps: blocked / open, {size}", closed / open_, "", note)


def _machine_and_data(
    n_visible: int, n_hidden: int, batch: int, generator: torch.Generator
) -> tuple[RBM, torch.Tensor]:
    data = torch.randint(2, (batch, n_visible), generator=generator, dtype=torch.uint8)
    return RBM(n_visible, n_hidden, generator=generator), data
