"""A codebook and its training: nearest codes, moving averages, initialisation by k-means, restarts, and perplexity.

N vectors with D entries, K codes. Functions take vectors (..., D) and the codebook (K, D).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from toolkit._checks import integer, number
from toolkit._random import own_generator
from toolkit._tensors import exact_products, floating, in_range, integers, shape_of, wide
from toolkit.blocks import block, constants, no_graph, stop_gradient, stop_recording

__all__ = [
    "AVERAGES",
    "RESTARTS",
    "averaged_codebook",
    "codebook_perplexity",
    "kmeans_codebook",
    "nearest_codes",
    "restarted_codebook",
]

AVERAGES = block(
    "quantization.averages",
    "Averaged codes are state of the training, not a function of this batch's parameters: with the block open, they "
    "would keep the graph of every batch that formed them.",
)
RESTARTS = block(
    "quantization.restarts",
    "A restarted code is a copy of an encoder output: held constant, it does not make that output follow the code's "
    "later use.",
)

# Scores of this many vectors and codes are computed at a time: they stay in the processor's cache.
_SCORES_AT_A_TIME = 2**20


def nearest_codes(z: Tensor, codebook: Tensor) -> Tensor:
    """Return the indices ``argmin_k |z - e_k|`` of the nearest codes.

    They maximise ``z.e'_k - |e'_k|^2 / 2 - m.e'_k`` with codes ``e' = e - m`` relative to their mean m, so that a
    common offset of data and codes costs no precision. Indices have no gradient. Half precision is computed in float32.

    Args:
        z: (..., D).
        codebook: (K, D).

    Returns:
        Indices (...), of dtype int64.

    Raises:
        ValueError: If `codebook` is not a matrix, or the last dimensions differ.

    References:
        van den Oord, Vinyals and Kavukcuoglu, "Neural discrete representation learning", 2017, equation 1.

    Example:
        >>> nearest_codes(torch.tensor([[0.4, 1.1], [0.9, 0.2]]), torch.tensor([[0.0, 1.0], [1.0, 0.5]]))
        tensor([0, 1])
    """
    _check_sizes(z, codebook)
    with no_graph(), exact_products(z.device):
        codebook = wide(codebook)
        mean = codebook.mean(0)
        centred = codebook - mean
        offset = -(centred @ mean + centred.square().sum(1) / 2)
        rows = max(1, _SCORES_AT_A_TIME // len(codebook))
        parts = z.reshape(-1, z.shape[-1]).to(codebook.dtype).split(rows)
        found = [torch.addmm(offset, part, centred.T).argmax(1) for part in parts]
        return torch.cat(found).reshape(z.shape[:-1])


def averaged_codebook(
    codebook: Tensor, counts: Tensor, z: Tensor, indices: Tensor, *, decay: float
) -> tuple[Tensor, Tensor]:
    r"""Return codes that moved towards the means of the vectors they stand for, and their averaged counts.

    .. math::
        N_k' = \gamma N_k + (1 - \gamma) n_k, \qquad
        e_k' = e_k + \frac{1 - \gamma}{N_k'} \sum_{i : k_i = k} (z_i - e_k)

    Here n counts the vectors of this batch. The codes equal the ratio of averaged sums to averaged counts, without
    stored sums: a code that no vector chose does not move, and ``decay=0`` is a step of Lloyd's algorithm. With the
    block in place the results are constants; with the block open the gradient of a code with respect to each of its
    vectors is :math:`(1 - \gamma) / N_k'`.

    Args:
        codebook: e, (K, D).
        counts: N, (K,): averaged numbers of vectors per batch.
        z: (..., D).
        indices: (...), as `nearest_codes` finds them.
        decay: :math:`\gamma`, from 0 to 1.

    Raises:
        ValueError: If `decay` is not between 0 and 1, `codebook` has less than 24 bits of precision, which would round
            small steps to zero, or shapes do not fit.

    References:
        van den Oord, Vinyals and Kavukcuoglu, "Neural discrete representation learning", 2017, appendix A.1.

    Example:
        >>> z, codebook = torch.tensor([[0.0], [1.0], [4.0]]), torch.tensor([[0.0], [3.0]])
        >>> averaged_codebook(codebook, torch.ones(2), z, torch.tensor([0, 0, 1]), decay=0.5)
        (tensor([[0.3333],
                [3.5000]]), tensor([1.5000, 1.0000]))
    """
    _check_sizes(z, codebook)
    _check_counts(counts, codebook)
    decay = number("decay", decay, least=0, most=1)
    integers(indices=indices)
    if indices.shape != z.shape[:-1]:
        raise ValueError(f"`indices` should have shape {tuple(z.shape[:-1])}. Found {tuple(indices.shape)}.")
    if codebook.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"`codebook` should be of float32 or float64 to be averaged. Found {codebook.dtype}.")
    with stop_recording(AVERAGES):
        rows = z.reshape(-1, z.shape[-1]).to(codebook.dtype)
        n = _counted(indices, counts)
        sums = torch.zeros_like(codebook).index_add(0, indices.reshape(-1).long(), rows)
        averaged = decay * counts + (1 - decay) * n
        rate = (1 - decay) / averaged.clamp(min=torch.finfo(counts.dtype).tiny)
        return codebook + rate[:, None] * (sums - n[:, None] * codebook), averaged


def restarted_codebook(
    codebook: Tensor, counts: Tensor, z: Tensor, *, below: float, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """Return the codebook with rare codes replaced by random vectors, and the counts with `below` in their place.

    With the block in place the new codes are constants; with the block open the cotangent of a new code arrives at the
    vector that was copied.

    Args:
        codebook: (K, D).
        counts: (K,): averaged numbers of vectors per batch, as of `averaged_codebook`.
        z: (..., D): the vectors to draw from, with repetition.
        below: Codes with a smaller count are replaced. Counts of all codes add up to the size of a batch.
        generator: Draws the vectors on the CPU. None: torch's global generator.

    Raises:
        ValueError: If `below` is negative, `z` has no vectors, or shapes do not fit.

    References:
        Dhariwal, Jun, Payne, Kim, Radford and Sutskever, "Jukebox: a generative model for music", 2020, section 3.1.

    Example:
        >>> codebook, counts = torch.tensor([[0.0], [9.0]]), torch.tensor([3.0, 0.1])
        >>> restarted_codebook(codebook, counts, torch.tensor([[0.5]]), below=1.0)
        (tensor([[0.0000],
                [0.5000]]), tensor([3., 1.]))
    """
    _check_sizes(z, codebook)
    _check_counts(counts, codebook)
    below = number("below", below, least=0)
    dead = counts < below
    drawn = _drawn(z, len(codebook), generator).to(codebook.dtype)
    codes = torch.where(dead[:, None], stop_gradient(drawn, RESTARTS), codebook)
    return codes, torch.where(dead, below, counts)


def kmeans_codebook(
    z: Tensor, codebook_size: int, *, steps: int = 10, generator: torch.Generator | None = None
) -> Tensor:
    """Return an initial codebook (K, D): k-means of the vectors, by Lloyd's algorithm from random vectors among them.

    A code that no vector chooses stays where it is. The result is a constant.

    Args:
        z: (..., D), at least K vectors.
        codebook_size: Number of codes in the codebook, K.
        steps: Number of Lloyd's steps.
        generator: Draws K different vectors on the CPU. None: torch's global generator.

    Raises:
        ValueError: If `z` is not a tensor of vectors, there are fewer vectors than codes, or `steps` is negative.

    References:
        Lloyd, "Least squares quantization in PCM", 1982.

    Example:
        >>> z = torch.tensor([[0.0], [1.0], [10.0], [12.0]])
        >>> kmeans_codebook(z, 2, generator=torch.Generator().manual_seed(0)).sort(0).values
        tensor([[ 0.5000],
                [11.0000]])
    """
    shape = shape_of("z", z)
    if 0 in (*shape[-1:], len(shape)):
        raise ValueError(f"`z` should have shape (..., D) with D >= 1. Found {tuple(shape)}.")
    z = constants(z).reshape(-1, z.shape[-1])
    steps = integer("steps", steps, 0)
    codebook_size = integer("codebook_size", codebook_size, 1, len(z))
    z = z.to(torch.promote_types(z.dtype, torch.float32))
    draws = own_generator(generator)
    order = torch.randperm(len(z), generator=draws, device=draws.device)
    codebook = z[order[:codebook_size].to(z.device)]
    counts = z.new_zeros(codebook_size)
    for _ in range(steps):
        codebook, _ = averaged_codebook(codebook, counts, z, nearest_codes(z, codebook), decay=0)
    return codebook


def codebook_perplexity(indices: Tensor, codebook_size: int) -> Tensor:
    """Return ``exp(-sum_k p_k log p_k)`` of the shares p of the codes: K if all are used alike, 1 for a single one.

    Args:
        indices: Of any shape.
        codebook_size: Number of codes in the codebook, K.

    Returns:
        A scalar; NaN without indices.

    Raises:
        ValueError: If `indices` are not a tensor of integers, or `codebook_size` is not a positive integer.

    References:
        van den Oord, Vinyals and Kavukcuoglu, "Neural discrete representation learning", 2017.

    Example:
        >>> codebook_perplexity(torch.tensor([0, 0, 3, 3]), 8)
        tensor(2.)
    """
    size = integer("codebook_size", codebook_size)
    integers(indices=indices)
    # Counted in integers: float32 stops at 2^24.
    counts = torch.zeros(size, dtype=torch.int64, device=indices.device)
    shares = _counted(indices, counts) / indices.numel()
    perplexity: Tensor = torch.special.entr(shares).sum().exp()
    return perplexity


def averaged_counts(counts: Tensor, indices: Tensor, *, decay: float) -> Tensor:
    """Return the averaged counts of `averaged_codebook`, (K,)."""
    return decay * counts + (1 - decay) * _counted(indices, counts)


def check_vectors(z: Tensor, dim: int) -> None:
    """Raise a ValueError unless `z` is (..., dim)."""
    floating(z=z)
    if z.ndim == 0 or z.shape[-1] != dim:
        raise ValueError(f"`z` should have shape (..., {dim}). Found {tuple(z.shape)}.")


def first_codes(codebook_size: int, dim: int, generator: torch.Generator | None) -> Tensor:
    """Return random codes (K, D) with norms around 1."""
    draws = own_generator(generator)
    codes = torch.randn(codebook_size, dim, generator=draws, device=draws.device) / math.sqrt(dim)
    return codes.to(torch.get_default_device())


def _check_sizes(z: Tensor, codebook: Tensor) -> None:
    floating(codebook=codebook)
    if codebook.ndim != 2 or codebook.numel() == 0:
        raise ValueError(f"`codebook` should have shape (K, D). Found {tuple(codebook.shape)}.")
    check_vectors(z, codebook.shape[1])


def _check_counts(counts: Tensor, codebook: Tensor) -> None:
    floating(counts=counts)
    if counts.shape != codebook.shape[:1]:
        raise ValueError(f"`counts` should have shape ({len(codebook)},). Found {tuple(counts.shape)}.")


def _counted(indices: Tensor, counts: Tensor) -> Tensor:
    """Return n, how often each code was chosen, like `counts`."""
    chosen = indices.reshape(-1).long()
    try:
        return torch.zeros_like(counts).index_add(0, chosen, counts.new_ones(()).expand(len(chosen)))
    except (IndexError, RuntimeError):
        in_range("indices", chosen, len(counts))
        raise


def _drawn(z: Tensor, number_of_rows: int, generator: torch.Generator | None) -> Tensor:
    """Return random rows of `z`, (K, D)."""
    rows = z.reshape(-1, z.shape[-1])
    if len(rows) == 0:
        raise ValueError(f"`z` should have vectors. Found {tuple(z.shape)}.")
    draws = own_generator(generator)
    chosen = torch.randint(len(rows), (number_of_rows,), generator=draws, device=draws.device)
    return rows[chosen.to(rows.device)]
