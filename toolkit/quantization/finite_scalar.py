"""Finite scalar quantization: each coordinate is rounded to a few levels, and no codebook is learnt.

D coordinates with L_1 ... L_D levels, c the cotangent at the result.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from toolkit._checks import integer, number
from toolkit._tensors import integers
from toolkit.blocks import block, stop_gradient
from toolkit.quantization.codebook import check_vectors

__all__ = ["FINITE_SCALAR", "FiniteScalarQuantizer", "FiniteScalars"]

FINITE_SCALAR = block(
    "quantization.finite_scalar",
    "Rounding to a level has slope zero: with the rounding error held constant, the encoder receives the gradient of "
    "the bounded coordinate.",
)


class FiniteScalars(NamedTuple):
    """Quantized coordinates.

    Attributes:
        codes: (..., D), each in [-1, 1].
        indices: (...), below the product of the levels; -1 where a coordinate is NaN.
    """

    codes: Tensor
    indices: Tensor


class FiniteScalarQuantizer(nn.Module):
    r"""Bound each coordinate and round it to one of its levels.

    .. math::
        b = h \tanh(z + s) - o, \qquad y = \bigl(b + \operatorname{sg}(\operatorname{round}(b) - b)\bigr)
        / \lfloor L / 2 \rfloor

    Here :math:`h = (L - 1)(1 + \epsilon) / 2`, :math:`o = 1/2` for an even number of levels and 0 otherwise, and
    :math:`s = \operatorname{artanh}(o / h)`, so that :math:`b = 0` at :math:`z = 0`. An even number of levels has one
    more level on the negative side: 4 levels are -1, -1/2, 0, 1/2.

    With the block in place the gradient is :math:`c\, h (1 - \tanh^2(z + s)) / \lfloor L / 2 \rfloor`, with the block
    open 0. The module has no parameters. Inputs of half precision are bounded in float32.

    Args:
        levels: L_1 ... L_D, each at least 2.
        margin: :math:`\epsilon`, the relative distance of the bounds from the outermost levels.

    Raises:
        ValueError: If `levels` is empty, has an entry below 2 or a product from 2^63, or `margin` is not positive.

    References:
        Mentzer, Minnen, Agustsson and Tschannen, "Finite scalar quantization: VQ-VAE made simple", 2023; the ``tan`` in
        its code is meant to be ``artanh``.

    Example:
        >>> quantizer = FiniteScalarQuantizer([8, 5, 4])
        >>> codes, indices = quantizer(torch.tensor([[0.3, -1.2, 0.8]]))
        >>> codes, indices
        (tensor([[ 0.2500, -1.0000,  0.5000]]), tensor([125]))
        >>> torch.equal(quantizer.codes_of(indices), codes)
        True
    """

    levels: Tensor
    strides: Tensor

    def __init__(self, levels: Sequence[int], *, margin: float = 1e-3) -> None:
        super().__init__()
        if len(levels) == 0:
            raise ValueError("`levels` should have an entry for each coordinate. Found none.")
        counts = [integer("levels", level, 2) for level in levels]
        self.margin = number("margin", margin, above=0)
        *strides, self.codebook_size = itertools.accumulate(counts, operator.mul, initial=1)
        if self.codebook_size >= 2**63:
            raise ValueError(f"`levels` should have a product below 2^63. Found {self.codebook_size}.")
        self.register_buffer("levels", torch.tensor(counts), persistent=False)
        self.register_buffer("strides", torch.tensor(strides), persistent=False)

    def forward(self, z: Tensor) -> FiniteScalars:
        """Return codes and their indices.

        Args:
            z: (..., D).

        Raises:
            ValueError: If the last dimension is not D, or `z` is not floating point.
        """
        check_vectors(z, len(self.levels))
        bounded = self._bounded(z.to(torch.promote_types(z.dtype, torch.float32)))
        half = self.levels // 2
        # With hundreds of levels the margin reaches beyond the outermost ones by more than half a step.
        nearest = bounded.round().clamp(-half, self.levels - 1 - half)
        rounded = bounded + stop_gradient(nearest - bounded, FINITE_SCALAR)
        indices = ((rounded.long() + half) * self.strides).sum(-1)
        known = torch.where(rounded.isnan().any(-1), -1, indices)
        return FiniteScalars((rounded / half).to(z.dtype), known)

    def codes_of(self, indices: Tensor) -> Tensor:
        """Return the codes (..., D) with these indices (...), in torch's default dtype; NaN where there is no code.

        Raises:
            ValueError: If `indices` are not integers.
        """
        integers(indices=indices)
        places = indices[..., None] // self.strides % self.levels
        half = self.levels // 2
        exists = (indices >= 0) & (indices < self.codebook_size)
        return torch.where(exists[..., None], (places - half) / half, torch.nan)

    def _bounded(self, z: Tensor) -> Tensor:
        """Return b."""
        levels = self.levels.to(z.dtype)
        height = (levels - 1) * ((1 + self.margin) / 2)
        offset = 0.5 * (1 - levels % 2)
        return (z + (offset / height).atanh()).tanh() * height - offset
