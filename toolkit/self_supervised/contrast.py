r"""Momentum contrast: each query has to find its own key among a queue of other samples' keys.

N samples, Q keys in the queue, D features, sg stops the gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from toolkit._checks import integer, number
from toolkit._random import own_generator
from toolkit._tensors import exact_products, floating, floating_alike, wide
from toolkit.blocks import block, stop_gradient

__all__ = ["MOCO_KEY", "MOCO_QUEUE", "KeyQueue", "enqueue", "moco_loss"]

MOCO_KEY = block(
    "self_supervised.moco_key",
    "The positive key is a dictionary's entry: the query moves towards it, and the key encoder only follows.",
)
MOCO_QUEUE = block(
    "self_supervised.moco_queue",
    "The queue keeps values and not the graphs that made them, which belong to earlier parameters.",
)


def moco_loss(q: Tensor, k: Tensor, queue: Tensor, *, temperature: float = 0.07) -> Tensor:
    r"""Return the contrastive loss of momentum contrast (InfoNCE), the mean over samples.

    .. math:: L = -\log \frac{e^{q \cdot \operatorname{sg}(k) / \tau}}{e^{q \cdot \operatorname{sg}(k) / \tau} +
        \sum_i e^{q \cdot n_i / \tau}}

    With p the softmax over (k, n_1, ...) and K the matrix of these rows, the gradient is :math:`K^\top (p - e_0) /
    \tau` for q and 0 for k. With `MOCO_KEY` open, it is :math:`(p_0 - 1) q / \tau` for k.

    The embeddings are used as they are: normalise queries and keys to length 1 first, as the method does.

    Args:
        q: Queries, (N, D).
        k: The key of each query, from the key encoder, (N, D).
        queue: Keys n of other samples, (Q, D); see `KeyQueue`.
        temperature: tau.

    Returns:
        A scalar, in nats per sample; half precision is computed in float32.

    Raises:
        ValueError: If `temperature` is not positive, or shapes do not fit.

    References:
        He, Fan, Wu, Xie and Girshick, "Momentum contrast for unsupervised visual representation learning", 2019,
        equation 1.

    Example:
        >>> q, queue = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0], [-1.0, 0.0]])
        >>> moco_loss(q, q, queue, temperature=0.5)
        tensor(0.1429)
    """
    temperature = number("temperature", temperature, above=0)
    floating_alike(2, q=q, k=k)
    _check_queue(queue, q.shape[-1])
    scaled = wide(q) / temperature
    positive = (scaled * wide(stop_gradient(k, MOCO_KEY))).sum(-1)
    with exact_products(scaled.device):
        negatives = (scaled @ queue.to(scaled.dtype).mT).logsumexp(-1)
    margin = negatives - positive
    return torch.logaddexp(margin, torch.zeros_like(margin)).mean()


def enqueue(queue: Tensor, keys: Tensor) -> Tensor:
    r"""Return the queue after the newest keys, :math:`\operatorname{sg} k`, have pushed the oldest ones out.

    The oldest key stands first. The old queue is not changed, so a graph that holds it stays valid. With `MOCO_QUEUE`
    open, later losses have a gradient with respect to these keys, and each of them keeps the graph of all keys in the
    queue.

    Args:
        queue: (Q, D).
        keys: (N, D); of more than Q keys the last Q stay.

    Returns:
        (Q, D), in the precision of the queue.

    Raises:
        ValueError: If `keys` is not (N, D), the queue is empty, or the numbers of features differ.

    References:
        He, Fan, Wu, Xie and Girshick, "Momentum contrast for unsupervised visual representation learning", 2019,
        algorithm 1.

    Example:
        >>> enqueue(torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[4.0]])).T
        tensor([[2., 3., 4.]])
    """
    floating(keys=keys)
    if keys.ndim != 2:
        raise ValueError(f"`keys` should have shape (samples, features). Found {tuple(keys.shape)}.")
    _check_queue(queue, keys.shape[1])
    newest = stop_gradient(keys, MOCO_QUEUE).to(queue)
    return torch.cat([queue[len(newest) :], newest[-len(queue) :]])


class KeyQueue(nn.Module):
    """The last keys of a key encoder, first in first out.

    Calling it with new keys returns the keys from before them, and adds the new ones. In evaluation mode it adds none.

    Args:
        size: Number of keys in the queue, Q.
        n_features: Number of features, D.
        generator: Draws the first keys, random directions. None: torch's global generator.

    Attributes:
        keys: (Q, D), the oldest one first.

    Raises:
        ValueError: If `size` or `n_features` is not a positive integer.

    References:
        As `enqueue`.

    Example:
        >>> queue = KeyQueue(4, 2, generator=torch.Generator().manual_seed(0))
        >>> q = k = torch.tensor([[1.0, 0.0]])
        >>> loss = moco_loss(q, k, queue(k))
        >>> queue.keys[-1]
        tensor([1., 0.])
    """

    keys: Tensor

    def __init__(self, size: int, n_features: int, *, generator: torch.Generator | None = None) -> None:
        super().__init__()
        shape = integer("size", size), integer("n_features", n_features)
        draws = own_generator(generator)
        keys = torch.randn(shape, generator=draws, device=draws.device).to(torch.get_default_device())
        self.register_buffer("keys", normalize(keys))

    def forward(self, keys: Tensor) -> Tensor:
        """Return the keys (Q, D) from before these.

        Args:
            keys: New keys, (N, D).

        Raises:
            ValueError: If the number of features is not D.
        """
        before = self.keys
        if self.training:
            self.keys = enqueue(before, keys)
        return before


def _check_queue(queue: Tensor, n_features: int) -> None:
    floating(queue=queue)
    if queue.ndim != 2 or len(queue) == 0 or queue.shape[1] != n_features:
        raise ValueError(f"`queue` should have shape (keys, {n_features}). Found {tuple(queue.shape)}.")
