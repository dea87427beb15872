"""Leak of an open block of CD-1 by the kind of its chain, on bars and stripes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from benchmarks._measure import Row
from toolkit import compare
from toolkit.datasets import bars_and_stripes
from toolkit.rbm import RBM, FusedTrainer, contrastive_divergence


def rows() -> Iterator[Row]:
    """Measure (leak) / (blocked gradient) in a partly trained machine, with 2,000 copies of each image."""
    images = bars_and_stripes(3, dtype=torch.float64).inputs
    rbm = RBM(9, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    trainer = FusedTrainer(rbm, batch_size=len(images), steps=1, generator=torch.Generator().manual_seed(1))
    for _ in range(1000):
        trainer.step(images, learning_rate=0.3)
    likelihood = rbm.log_likelihood(images).mean()
    ascent = _joined(torch.autograd.grad(likelihood, list(rbm.parameters())))
    reached = f"a machine of {likelihood.item():.2f} nats per image"
    data = images.repeat(2000, 1)
    for chain, temperature, steps in (
        ("sampled", None, 1),
        ("straight_through", None, 1),
        ("mean_field", None, 1),
        ("concrete", 1.0, 1),
        ("concrete", 0.5, 1),
        ("concrete", 0.1, 1),
        ("concrete", 0.1, 5),
    ):

        def loss(chain=chain, temperature=temperature, steps=steps):
            draws = torch.Generator().manual_seed(2)
            return contrastive_divergence(rbm, data, steps=steps, chain=chain, temperature=temperature, generator=draws)

        found = compare(loss, rbm)
        effect = found["rbm.negative_samples"]
        blocked = _joined(found.blocked.values())
        opened = _joined(found.gradient(["rbm.negative_samples"]).values())
        descents = " and ".join(f"{-torch.cosine_similarity(g, ascent, 0).item():.2f}" for g in (blocked, opened))
        note = f"cosine with the likelihood's gradient {descents}, in {reached}"
        at = "" if temperature is None else f", temperature {temperature}"
        yield Row(f"leak / blocked gradient, CD-{steps}, {chain}{at}", effect.leak / blocked.norm().item(), "", note)


def _joined(gradients: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.cat([gradient.flatten() for gradient in gradients])
