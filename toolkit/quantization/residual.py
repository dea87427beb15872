"""Residual vector quantization: each codebook quantizes the residual of the codebooks before it.

M quantizers with codes e_1 ... e_M, D entries, K codes each; z an encoder output, c the cotangent at the result.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from toolkit._checks import choice, integer
from toolkit._tensors import integers
from toolkit.blocks import block, constants, stop_gradient
from toolkit.quantization.codebook import check_vectors, nearest_codes
from toolkit.quantization.vector import Estimator, Learning, VectorQuantizer, estimated, looked_up

__all__ = ["RESIDUAL", "ResidualQuantized", "ResidualVectorQuantizer"]

RESIDUAL = block(
    "quantization.residual",
    "A code is a constant of the remainders after it: it learns from the remainder that it quantizes, and not from "
    "the commitment to later codes.",
)


class ResidualQuantized(NamedTuple):
    """Vectors quantized in several stages.

    Attributes:
        codes: (..., D), the sum of the codes.
        indices: (..., M).
        loss: A scalar, the sum of the losses of all stages.
    """

    codes: Tensor
    indices: Tensor
    loss: Tensor


class ResidualVectorQuantizer(nn.Module):
    r"""Quantize vectors, then their residuals, stage by stage.

    .. math::
        r_1 = z, \qquad r_{i+1} = r_i - \operatorname{sg}(e_i), \qquad
        y = \operatorname{sg}\Bigl(\sum_i e_i\Bigr) + z - \operatorname{sg}(z)

    There is one straight-through step, around the sum. With a straight-through step in each stage, as in other
    implementations, the decoder's gradient arrives at the encoder M times. Here dy/dz is the identity, and every
    commitment loss keeps its gradient: the gradient with respect to z is :math:`c + \sum_i 2 \beta (r_i - e_i) / n`,
    for n entries. With the block `RESIDUAL` open, the later commitment losses also train a learnt code e_i, by the
    opposite of their gradients.

    Args:
        dim: Number of entries of a vector, D.
        codebook_size: Number of codes in the codebook, K.
        n_quantizers: Number of stages, M.
        commitment: As in `VectorQuantizer`, like all arguments below.
        learning: ``"average"`` or ``"loss"``.
        decay: Share of an average that is left after a batch.
        estimator: ``"straight_through"`` or ``"rotation"``, of the sum.
        restart_below: Smallest averaged count of a code that is not replaced.
        generator: Draws the first codes. None: torch's global generator.

    Raises:
        ValueError: As in `VectorQuantizer`, or if `n_quantizers` is not positive.

    References:
        Zeghidour, Luebs, Omran, Skoglund and Tagliasacchi, "SoundStream: an end-to-end neural audio codec", 2021,
        algorithm 1.

    Example:
        >>> quantizer = ResidualVectorQuantizer(2, 4, 3, generator=torch.Generator().manual_seed(0))
        >>> z = torch.randn(5, 2, requires_grad=True)
        >>> codes, indices, loss = quantizer(z)
        >>> indices.shape, torch.autograd.grad(codes.sum(), z)[0].unique()
        (torch.Size([5, 3]), tensor([1.]))
    """

    def __init__(
        self,
        dim: int,
        codebook_size: int,
        n_quantizers: int,
        *,
        commitment: float = 0.25,
        learning: Learning = "average",
        decay: float = 0.99,
        estimator: Estimator = "straight_through",
        restart_below: float = 0.0,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        choice("estimator", estimator, ("straight_through", "rotation"))
        self.dim, self.estimator = dim, estimator
        self.stages = nn.ModuleList(
            VectorQuantizer(
                dim,
                codebook_size,
                commitment=commitment,
                learning=learning,
                decay=decay,
                restart_below=restart_below,
                generator=generator,
            )
            for _ in range(integer("n_quantizers", n_quantizers))
        )

    def forward(self, z: Tensor, *, generator: torch.Generator | None = None) -> ResidualQuantized:
        """Return the sums of codes with the gradient of the encoder outputs, indices, and the loss.

        Args:
            z: (..., D).
            generator: Draws restarted codes. None: torch's global generator.

        Raises:
            ValueError: If the last dimension is not D.
        """
        check_vectors(z, self.dim)
        precise = z.to(torch.promote_types(z.dtype, self._quantizers[0].codebook.dtype))
        remainder, total, loss = precise, torch.zeros_like(precise), precise.new_zeros(())
        indices = []
        for stage in self._quantizers:
            codes, chosen, its_loss = looked_up(stage, remainder, generator)
            remainder = remainder - stop_gradient(codes, RESIDUAL)
            total, loss = total + codes, loss + its_loss
            indices.append(chosen)
        quantized = estimated(precise, total, self.estimator).to(z.dtype)
        return ResidualQuantized(quantized, torch.stack(indices, -1), loss)

    def codes_of(self, indices: Tensor) -> Tensor:
        """Return the sums of codes (..., D) with these indices (..., M); fewer indices select the first stages.

        Raises:
            ValueError: If `indices` are not integers, there is no such code, or there are more indices than quantizers.
        """
        integers(indices=indices)
        if indices.ndim == 0 or not 1 <= indices.shape[-1] <= len(self.stages):
            found = tuple(indices.shape)
            raise ValueError(f"`indices` should have shape (..., m), m from 1 to {len(self.stages)}. Found {found}.")
        return torch.stack(
            [stage.codes_of(chosen) for stage, chosen in zip(self._quantizers, indices.unbind(-1), strict=False)]
        ).sum(0)

    def start(self, z: Tensor, *, steps: int = 10, generator: torch.Generator | None = None) -> None:
        """Set each codebook to the k-means of the residuals that it quantizes.

        Args:
            z: (..., D), at least K vectors.
            steps: Number of Lloyd's steps.
            generator: As in `kmeans_codebook`.
        """
        check_vectors(z, self.dim)
        remainder = constants(z)
        for stage in self._quantizers:
            stage.start(remainder, steps=steps, generator=generator)
            remainder = remainder - constants(stage.codes_of(nearest_codes(remainder, stage.codebook)))

    @property
    def _quantizers(self) -> list[VectorQuantizer]:
        return list(self.stages)  # type: ignore[arg-type]
