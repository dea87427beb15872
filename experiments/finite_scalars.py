"""Finite scalars as codes of digits: an autoencoder whose latent coordinates are rounded to a few levels.

Nothing is learnt but encoder and decoder: there is no codebook and no loss beside the error. Other methods: the bounded
coordinates without rounding, and a learnt codebook of as many codes, averaged, from the k-means of the latent vectors.

N images, D coordinates, K codes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from toolkit.adversarial.networks import mlp
from toolkit.quantization import FiniteScalarQuantizer, VectorQuantizer, codebook_perplexity
from toolkit.runner import ExperimentConfig, Objective, Run

from ._digits import Batches, digits_of
from ._training import learned, methods_of, run_of

__all__ = ["Config", "run"]

Quantize = Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]


class Config(ExperimentConfig):
    """Values of an experiment on finite scalar quantization.

    Attributes:
        batch_size: Number of images in a batch.
        width: Number of hidden units of encoder and decoder.
        levels: The number of levels of each coordinate, one for each.
        decay: Weight of the past in the averaged codes of the other method.
    """

    batch_size: Annotated[int, Field(ge=1)] = 128
    width: Annotated[int, Field(ge=1)] = 64
    levels: Annotated[list[Annotated[int, Field(ge=2)]], Field(min_length=1)]
    decay: Annotated[float, Field(ge=0, le=1)] = 0.9


class _Autoencoder:
    """Encoder, decoder and a way to quantize between them.

    Args:
        config: The sizes.
        seed: The seed of the run.
        kind: ``"levels"``, ``"bounds"`` (without rounding) or ``"codebook"``.
    """

    def __init__(self, config: Config, seed: int, kind: str = "levels") -> None:
        train, self.test = digits_of(config)
        generator = torch.Generator().manual_seed(seed)
        pixels, dim, widths = train.inputs.shape[1], len(config.levels), [config.width]
        self.encoder = mlp(pixels, dim, widths=widths, generator=generator).to(train.inputs)
        self.decoder = mlp(dim, pixels, widths=widths, generator=generator).to(train.inputs)
        self.batches = Batches(train, config.batch_size, generator)
        self.advance = self.batches.advance
        self.levels = FiniteScalarQuantizer(config.levels).to(train.inputs.device)
        networks = nn.ModuleDict({"encoder": self.encoder, "decoder": self.decoder})
        self.parameters: dict[str, Tensor] = dict(networks.named_parameters())
        self.optimizer = torch.optim.Adam(self.parameters.values(), lr=config.learning_rate)
        ways: dict[str, Quantize] = {"levels": self._leveled, "bounds": self._bounded, "codebook": self._coded}
        self.quantize = ways[kind]
        self.size = self.levels.codebook_size
        self.codebook = VectorQuantizer(dim, self.size, decay=config.decay, generator=generator).to(train.inputs)
        if kind == "codebook":
            self.codebook.start(self.encoder(train.inputs), generator=generator)

    def _leveled(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        codes, indices = self.levels(z)
        return codes, indices, z.new_zeros(())

    def _bounded(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        _, indices = self.levels(z)
        return torch.tanh(z), indices, z.new_zeros(())

    def _coded(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        codes, indices, loss = self.codebook(z)
        return codes, indices, loss

    def loss(self) -> Tensor:
        """Return the mean squared error, plus the loss of a codebook."""
        codes, _, loss = self.quantize(self.encoder(self.batches.inputs))
        total: Tensor = functional.mse_loss(self.decoder(codes), self.batches.inputs) + loss
        return total

    def target(self) -> Mapping[str, Tensor]:
        """Return the blocked gradient: at the coordinates on paper, autograd for the networks."""
        images = self.batches.inputs
        z = self.encoder(images)
        with torch.no_grad():
            levels = self.levels.levels.to(z.dtype)
            height = (levels - 1) * (1 + self.levels.margin) / 2
            even = (levels % 2 == 0) / 2
            bounded = torch.tanh(z + torch.atanh(even / height))
            codes = (height * bounded - even).round() / (levels // 2)
            slopes = height * (1 - bounded.square()) / (levels // 2)
        leaf = codes.requires_grad_()
        decoder = [value for name, value in self.parameters.items() if name.startswith("decoder")]
        error = functional.mse_loss(self.decoder(leaf), images)
        cotangent, *of_decoder = torch.autograd.grad(error, [leaf, *decoder])
        encoder = [value for name, value in self.parameters.items() if name.startswith("encoder")]
        of_encoder = torch.autograd.grad(z, encoder, cotangent * slopes)
        return dict(zip(self.parameters, [*of_encoder, *of_decoder], strict=True))

    @torch.no_grad()
    def judge(self) -> dict[str, float]:
        """Return the metrics on held-out images."""
        self.codebook.eval()
        codes, indices, _ = self.quantize(self.encoder(self.test.inputs))
        self.codebook.train()
        return {
            "objective": functional.mse_loss(self.decoder(codes), self.test.inputs).item(),
            "codes used": float(len(indices.unique())),
            "perplexity": codebook_perplexity(indices, self.size).item(),
        }


def run(config: Config, seed: int) -> Run:
    """Return one seeded run."""
    made = _Autoencoder(config, seed)

    def other(kind: str) -> Mapping[str, Sequence[float]]:
        return learned(config, _Autoencoder(config, seed, kind))

    others = {
        "bounded, without rounding": partial(other, "bounds"),
        "a learnt codebook of as many codes": partial(other, "codebook"),
    }
    return run_of(
        made,
        Objective(label="held-out mean squared error (squared brightness)", higher_is_better=False),
        made.target,
        methods=methods_of(config, others, "step"),
    )
