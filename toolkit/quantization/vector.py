"""Vector quantization: each vector is replaced by its nearest code, and the encoder gets the gradient of the code.

N vectors with D entries, K codes; z an encoder output, e its code, c the cotangent that arrives at the result.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from toolkit._checks import choice, integer, number
from toolkit._tensors import common_dtype, floating_alike, in_range, integers, lengths, unit, wide
from toolkit.blocks import block, no_graph, stop_gradient
from toolkit.quantization.codebook import (
    averaged_codebook,
    averaged_counts,
    check_vectors,
    first_codes,
    kmeans_codebook,
    nearest_codes,
    restarted_codebook,
)

__all__ = [
    "CODEBOOK_TARGETS",
    "COMMITMENT_TARGETS",
    "ROTATION",
    "STRAIGHT_THROUGH",
    "Estimator",
    "Learning",
    "Metric",
    "Quantized",
    "VectorQuantizer",
    "codebook_loss",
    "commitment_loss",
    "rotation_trick",
    "straight_through",
]

STRAIGHT_THROUGH = block(
    "quantization.straight_through",
    "The index of a code has no slope: with code and encoder output held constant, their difference is a step that "
    "passes the decoder's gradient to the encoder.",
)
ROTATION = block(
    "quantization.rotation",
    "The rotation that takes an encoder output to its code is held constant, so that the gradient of the code comes "
    "back rotated by the same angle.",
)
CODEBOOK_TARGETS = block(
    "quantization.codebook_targets",
    "Encoder outputs are the data of the codebook's loss: codes move towards them, and they do not move towards codes.",
)
COMMITMENT_TARGETS = block(
    "quantization.commitment_targets",
    "Codes are the targets of the commitment loss: the encoder moves towards them, and they do not move towards the "
    "encoder.",
)

Estimator = Literal["straight_through", "rotation"]
Learning = Literal["average", "loss"]
Metric = Literal["euclidean", "cosine"]


class Quantized(NamedTuple):
    """Quantized vectors.

    Attributes:
        codes: (..., D).
        indices: (...).
        loss: A scalar: the commitment loss, plus the codebook loss if the codes learn by it.
    """

    codes: Tensor
    indices: Tensor
    loss: Tensor


def straight_through(z: Tensor, codes: Tensor) -> Tensor:
    """Return ``sg(e) + (z - sg(z))``: the codes, with the gradient of the encoder outputs.

    The value is exactly e, unlike the usual ``z + sg(e - z)``. With the block in place, z gets the gradient c of the
    result and e gets 0; with the block open it is the other way round.

    Args:
        z: (..., D), finite.
        codes: e, of the same shape.

    Raises:
        ValueError: If the shapes differ.

    References:
        van den Oord, Vinyals and Kavukcuoglu, "Neural discrete representation learning", 2017, section 3.2.

    Example:
        >>> z, e = torch.tensor([0.4, 1.1], requires_grad=True), torch.tensor([0.0, 1.0], requires_grad=True)
        >>> straight_through(z, e).square().sum().backward()
        >>> z.grad, e.grad
        (tensor([0., 2.]), None)
    """
    floating_alike(z=z, codes=codes)
    return stop_gradient(codes, STRAIGHT_THROUGH) + (z - stop_gradient(z, STRAIGHT_THROUGH))


def rotation_trick(z: Tensor, codes: Tensor) -> Tensor:
    r"""Return the codes, with a gradient that is rotated and scaled as the codes are from the encoder outputs.

    .. math::
        \operatorname{sg}(e) + \operatorname{sg}(\lambda R)\,(z - \operatorname{sg}(z)), \qquad
        \lambda = \frac{|e|}{|z|}, \quad R = I - 2 r r^\top + 2 \hat e \hat z^\top, \quad
        r = \frac{\hat z + \hat e}{|\hat z + \hat e|}

    :math:`\lambda R z = e`. With the block in place the gradient is :math:`\lambda R^\top c` for z and 0 for e; with
    the block open it is 0 for z and c for e. Where the rotation is not determined, because z is 0 beside e or points
    away from it, the gradient is that of `straight_through`.

    Args:
        z: (..., D), finite.
        codes: e, of the same shape.

    Raises:
        ValueError: If the shapes differ.

    References:
        Fifty, Junkins, Duan, Iyengar, Liu, Amid, Thrun and Ré, "Restructuring vector quantization with the rotation
        trick", 2024, section 4.2.

    Example:
        >>> z, e = torch.tensor([2.0, 0.0], requires_grad=True), torch.tensor([0.0, 1.0])
        >>> (rotation_trick(z, e) * torch.tensor([4.0, 6.0])).sum().backward()
        >>> z.grad
        tensor([ 3., -2.])
    """
    floating_alike(z=z, codes=codes)
    precise = wide(z)
    origin, ends = stop_gradient(precise, ROTATION), stop_gradient(wide(codes), ROTATION)
    return (ends + _rotated(precise - origin, origin, ends)).to(common_dtype(z, codes))


def _rotated(step: Tensor, origin: Tensor, ends: Tensor) -> Tensor:
    """Return ``lambda R step``, from row products alone: no matrix."""
    precision = torch.finfo(origin.dtype)
    reaches, radii = lengths(ends), lengths(origin)
    origin, ends = origin / radii.clamp(min=precision.tiny), ends / reaches.clamp(min=precision.tiny)
    opening = 1 + _product(origin, ends)  # 1 + cosine
    is_determined = (opening > precision.eps**0.5) & (radii > precision.eps * reaches)
    along_origin, along_ends = _product(step, origin), _product(step, ends)
    both = (along_origin + along_ends) / opening.clamp(min=precision.eps)
    turned = step - both * origin + (2 * along_origin - both) * ends
    return torch.where(is_determined, reaches / radii.clamp(min=precision.tiny) * turned, step)


def _product(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(-1, keepdim=True)


def codebook_loss(z: Tensor, codes: Tensor) -> Tensor:
    """Return the mean of ``(sg(z) - e)^2`` over all entries, which pulls codes towards the encoder outputs.

    With the block in place the gradient with respect to e is ``2 (e - z) / n``, n entries; with the block open z
    receives the opposite.

    Args:
        z: (..., D).
        codes: e, of the same shape.

    Raises:
        ValueError: If the shapes differ.

    References:
        van den Oord, Vinyals and Kavukcuoglu, "Neural discrete representation learning", 2017, equation 3, second term,
        there a sum over D.

    Example:
        >>> codebook_loss(torch.tensor([0.4, 1.2]), torch.tensor([0.0, 1.0]))
        tensor(0.1000)
    """
    floating_alike(z=z, codes=codes)
    return functional.mse_loss(codes, stop_gradient(z, CODEBOOK_TARGETS))


def commitment_loss(z: Tensor, codes: Tensor) -> Tensor:
    """Return the mean of ``(z - sg(e))^2`` over all entries, which pulls encoder outputs towards their codes.

    With the block in place the gradient with respect to z is ``2 (z - e) / n``, n entries; with the block open e
    receives the opposite.

    Args:
        z: (..., D).
        codes: e, of the same shape.

    Raises:
        ValueError: If the shapes differ.

    References:
        van den Oord, Vinyals and Kavukcuoglu, "Neural discrete representation learning", 2017, equation 3, third term,
        there a sum over D.

    Example:
        >>> commitment_loss(torch.tensor([0.4, 1.2]), torch.tensor([0.0, 1.0]))
        tensor(0.1000)
    """
    floating_alike(z=z, codes=codes)
    return functional.mse_loss(z, stop_gradient(codes, COMMITMENT_TARGETS))


class VectorQuantizer(nn.Module):
    r"""Replace vectors by their nearest codes, and learn the codes.

    .. math::
        L = \beta \, \operatorname{mean} (z - \operatorname{sg}(e))^2
        \; [ + \operatorname{mean} (\operatorname{sg}(z) - e)^2 \text{ if the codes learn by their loss}]

    Add the loss to that of the decoder. The codes are ``codebook`` (K, D), a parameter that learns by its loss or a
    buffer that is averaged; set it with ``codebook.copy_``. ``counts`` (K,) are averaged numbers of vectors per batch.
    In training mode a forward pass updates the averages; in evaluation mode nothing changes, and the gradient is the
    same. Inputs of lower precision than the codebook are quantized in its precision.

    Args:
        dim: Number of entries of a vector, D.
        codebook_size: Number of codes in the codebook, K.
        commitment: :math:`\beta`.
        learning: ``"average"``: codes are moving averages of their vectors. ``"loss"``: the optimiser trains them.
        decay: Share of an average that is left after a batch.
        estimator: ``"straight_through"`` or ``"rotation"``, the gradient of the encoder outputs.
        metric: ``"euclidean"``, or ``"cosine"``: vectors and codes are divided by their norms first.
        restart_below: Codes with a smaller averaged count are replaced by random vectors of the batch. 0: none.
        generator: Draws the first codes. None: torch's global generator.

    Raises:
        ValueError: If a number is out of its range or a choice unknown.

    References:
        van den Oord, Vinyals and Kavukcuoglu, "Neural discrete representation learning", 2017, equation 3 and
        appendix A.1.
        Yu et al., "Vector-quantized image modeling with improved VQGAN", 2021, for the cosine.

    Example:
        >>> quantizer = VectorQuantizer(dim=2, codebook_size=3, generator=torch.Generator().manual_seed(0))
        >>> codes, indices, loss = quantizer(torch.randn(4, 5, 2, requires_grad=True))
        >>> codes.shape, indices.shape, loss.requires_grad
        (torch.Size([4, 5, 2]), torch.Size([4, 5]), True)
    """

    codebook: Tensor
    counts: Tensor

    def __init__(
        self,
        dim: int,
        codebook_size: int,
        *,
        commitment: float = 0.25,
        learning: Learning = "average",
        decay: float = 0.99,
        estimator: Estimator = "straight_through",
        metric: Metric = "euclidean",
        restart_below: float = 0.0,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        choice("learning", learning, ("average", "loss"))
        choice("estimator", estimator, ("straight_through", "rotation"))
        choice("metric", metric, ("euclidean", "cosine"))
        self.dim, self.codebook_size = integer("dim", dim), integer("codebook_size", codebook_size)
        self.commitment = number("commitment", commitment, least=0)
        self.decay = number("decay", decay, least=0, most=1)
        self.restart_below = number("restart_below", restart_below, least=0)
        self.learning, self.estimator, self.metric = learning, estimator, metric
        codes = first_codes(self.codebook_size, self.dim, generator)
        if learning == "loss":
            self.codebook = nn.Parameter(codes)
        else:
            self.register_buffer("codebook", codes)
        self.register_buffer("counts", torch.ones(self.codebook_size))

    def forward(self, z: Tensor, *, generator: torch.Generator | None = None) -> Quantized:
        """Return codes with the gradient of the encoder outputs, indices, and the loss.

        Args:
            z: (..., D).
            generator: Draws restarted codes. None: torch's global generator.

        Raises:
            ValueError: If the last dimension is not D.
        """
        check_vectors(z, self.dim)
        precise = self._directions(z.to(torch.promote_types(z.dtype, self.codebook.dtype)))
        codes, indices, loss = looked_up(self, precise, generator)
        return Quantized(estimated(precise, codes, self.estimator).to(z.dtype), indices, loss)

    def codes_of(self, indices: Tensor) -> Tensor:
        """Return the codes (..., D) with these indices (...)."""
        integers(indices=indices)
        try:
            return functional.embedding(indices.long(), self._directions(self.codebook))
        except (IndexError, RuntimeError):
            in_range("indices", indices, self.codebook_size)
            raise

    def start(self, z: Tensor, *, steps: int = 10, generator: torch.Generator | None = None) -> None:
        """Set the codebook to the k-means of vectors, as `kmeans_codebook`.

        Args:
            z: (..., D), at least K vectors.
            steps: Number of Lloyd's steps.
            generator: As in `kmeans_codebook`.
        """
        check_vectors(z, self.dim)
        codes = kmeans_codebook(self._directions(z), self.codebook_size, steps=steps, generator=generator)
        with no_graph():
            self.codebook.copy_(codes)
            self.counts.fill_(1.0)

    def extra_repr(self) -> str:
        """Return the sizes and choices."""
        return f"{self.dim}, {self.codebook_size}, learning={self.learning!r}, estimator={self.estimator!r}"

    def _directions(self, x: Tensor) -> Tensor:
        return unit(x) if self.metric == "cosine" else x

    def _learn(self, z: Tensor, indices: Tensor, generator: torch.Generator | None) -> None:
        """Move averages and counts, and restart codes."""
        if self.learning == "average":
            codebook, counts = averaged_codebook(self.codebook, self.counts, z, indices, decay=self.decay)
            self.codebook.copy_(codebook)
        else:
            counts = averaged_counts(self.counts, indices, decay=self.decay)
        self.counts.copy_(counts)
        if self.restart_below:
            with no_graph() if self.learning == "loss" else nullcontext():
                codebook, counts = restarted_codebook(
                    self.codebook, self.counts, z, below=self.restart_below, generator=generator
                )
                self.codebook.copy_(codebook)
            self.counts.copy_(counts)


def looked_up(quantizer: VectorQuantizer, z: Tensor, generator: torch.Generator | None) -> Quantized:
    """Return plain codes, without an estimator; in training mode, let the quantizer learn."""
    # A copy where a restart writes into the parameter, whose directions remember it for the backward pass.
    codebook = quantizer._directions(quantizer.codebook.clone() if quantizer.restart_below else quantizer.codebook)
    indices = nearest_codes(z, codebook)
    codes = functional.embedding(indices, codebook).to(z.dtype)
    loss = quantizer.commitment * commitment_loss(z, codes)
    if quantizer.learning == "loss":
        loss = loss + codebook_loss(z, codes)
    if quantizer.training and indices.numel():
        quantizer._learn(z, indices, generator)
    return Quantized(codes, indices, loss)


def estimated(z: Tensor, codes: Tensor, estimator: Estimator) -> Tensor:
    """Return codes with the gradient of an estimator."""
    return straight_through(z, codes) if estimator == "straight_through" else rotation_trick(z, codes)
