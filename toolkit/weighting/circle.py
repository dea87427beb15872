r"""Circle loss: pair similarities weighted by their distance from the optimum.

The weights are detached, and the paper's gradient is the blocked gradient. It is not the gradient of any loss: the
weight of a pair changes with its own similarity, and the softmax couples the pairs.

N embeddings of D features, K positive and L negative similarities; ``*`` leading dimensions.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from toolkit._checks import number
from toolkit._tensors import exact_products, floating, tensors, unit, wide
from toolkit.blocks import block, stop_gradient

__all__ = ["CIRCLE_WEIGHTS", "circle_loss", "circle_loss_of_similarities"]

CIRCLE_WEIGHTS = block(
    "weighting.circle_weights",
    "How far each similarity is from its optimum sets its pace; differentiated, the weights would move the optimum "
    "from the margins to 0 and 1.",
)


def circle_loss(embeddings: Tensor, labels: Tensor, *, m: float = 0.4, gamma: float = 80.0) -> Tensor:
    r"""Return the mean circle loss of all anchors that have a positive and a negative partner.

    Every embedding is an anchor; its similarities are the cosines with all others (see `circle_loss_of_similarities`).

    Args:
        embeddings: (N, D), of any length.
        labels: (N,); equal labels are positive pairs.
        m: Relaxation of the margin.
        gamma: Scale of the similarities.

    Returns:
        A scalar, in nats per anchor; 0, with gradient 0, if no anchor has both partners. Half precision is computed in
        float32. An embedding 0 has the cosine 0 with all others and gets no gradient.

    Raises:
        ValueError: If the shapes do not fit, or `m` or `gamma` is not positive.

    References:
        Sun, Cheng, Zhang, Zhang, Zheng, Wang and Wei, "Circle loss: a unified perspective of pair similarity
        optimization", 2020, also for the gradients with respect to each similarity.

    Example:
        >>> e = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [-0.6, 0.8]])
        >>> circle_loss(e, torch.tensor([0, 0, 1, 1]), m=0.25, gamma=8)
        tensor(1.6027)
    """
    floating(embeddings=embeddings)
    tensors(labels=labels)
    if embeddings.ndim != 2 or labels.shape != embeddings.shape[:1]:
        raise ValueError(
            "`embeddings` and `labels` should have shapes (N, D) and (N,). "
            f"Found {tuple(embeddings.shape)} and {tuple(labels.shape)}."
        )
    directions = unit(wide(embeddings))
    same = labels[:, None] == labels
    with exact_products(directions.device):
        logits = _logits(directions @ directions.T, same, m, gamma)
    positive = same & ~torch.eye(len(labels), dtype=torch.bool, device=labels.device)
    by_sign = [torch.logsumexp(logits.masked_fill(~mask, -torch.inf), -1) for mask in (positive, ~same)]
    complete = positive.any(-1) & ~same.all(-1)
    losses = _softplus(torch.where(complete, by_sign[0] + by_sign[1], -torch.inf))
    return losses.sum() / complete.sum().clamp(min=1)


def circle_loss_of_similarities(positive: Tensor, negative: Tensor, *, m: float = 0.25, gamma: float = 256.0) -> Tensor:
    r"""Return :math:`\log(1 + \sum e^{\gamma \alpha_n (s_n - m)} \sum e^{-\gamma \alpha_p (s_p - 1 + m)})`, in nats.

    The weights :math:`\alpha_p = [1 + m - s_p]_+` and :math:`\alpha_n = [s_n + m]_+` are held constant by the block
    `CIRCLE_WEIGHTS`. With :math:`Z = 1 - e^{-L}` and the softmax of its group, each similarity then has the gradient
    :math:`Z\, \mathrm{softmax} \cdot \gamma (s_n + m)` or :math:`-Z\, \mathrm{softmax} \cdot \gamma (1 + m - s_p)`.
    Opened, the last factors are :math:`2 \gamma s_n` and :math:`2 \gamma (1 - s_p)`: a negative similarity below 0 is
    pushed up. The blocked gradient is not the gradient of any loss.

    Args:
        positive: Similarities with the same class, (\*, K).
        negative: Similarities with other classes, (\*, L).
        m: Relaxation of the margin.
        gamma: Scale of the similarities.

    Returns:
        (\*); 0, with gradient 0, if K or L is 0. Half precision is computed in float32.

    Raises:
        ValueError: If the leading dimensions differ, or `m` or `gamma` is not positive.

    References:
        As `circle_loss`.

    Example:
        >>> s = torch.tensor([0.3, -0.1, 0.5], requires_grad=True)
        >>> circle_loss_of_similarities(torch.tensor([0.8, 0.6]), s, m=0.25, gamma=8).backward()
        >>> s.grad
        tensor([0.8163, 0.1174, 4.0037])
    """
    floating(positive=positive, negative=negative)
    if 0 in (positive.ndim, negative.ndim) or positive.shape[:-1] != negative.shape[:-1]:
        raise ValueError(
            "`positive` and `negative` should have the same leading dimensions. "
            f"Found {tuple(positive.shape)} and {tuple(negative.shape)}."
        )
    similarities = torch.cat([wide(positive), wide(negative)], -1)
    same = torch.arange(similarities.shape[-1], device=positive.device) < positive.shape[-1]
    by_sign = _logits(similarities, same, m, gamma).split([positive.shape[-1], negative.shape[-1]], -1)
    return _softplus(torch.logsumexp(by_sign[0], -1) + torch.logsumexp(by_sign[1], -1))


def _logits(similarities: Tensor, same: Tensor, m: float, gamma: float) -> Tensor:
    """Return ``gamma alpha_n (s - m)`` of negative pairs, ``-gamma alpha_p (s - 1 + m)`` of positive ones."""
    m, gamma = number("m", m, above=0), number("gamma", gamma, above=0)
    from_optimum = torch.where(same, (1 + m) - similarities, similarities + m)
    weights = stop_gradient(from_optimum.clamp(min=0), CIRCLE_WEIGHTS)
    return gamma * weights * torch.where(same, (1 - m) - similarities, similarities - m)


def _softplus(x: Tensor) -> Tensor:
    """Return ``log(1 + exp(x))``, exact to rounding in every dtype."""
    return functional.softplus(x, threshold=50)
