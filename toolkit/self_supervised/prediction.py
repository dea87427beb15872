r"""Losses that predict the embedding of one view from that of another: SimSiam, BYOL, data2vec.

No term keeps the embeddings apart: a constant embedding minimises each loss. Training does not find it because of the
stop on the target.

N samples, D features, L layers, sg stops the gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import layer_norm, smooth_l1_loss

from toolkit._checks import number
from toolkit._tensors import floating_alike, wide, with_norms
from toolkit.blocks import block, stop_gradient

__all__ = [
    "BYOL_TARGET",
    "DATA2VEC_TARGET",
    "SIMSIAM_TARGET",
    "byol_loss",
    "data2vec_loss",
    "negative_cosine_similarity",
    "simsiam_loss",
]

SIMSIAM_TARGET = block(
    "self_supervised.simsiam_target",
    "The other view's embedding is a label: were it pulled towards the prediction as well, all embeddings would meet.",
)
BYOL_TARGET = block(
    "self_supervised.byol_target",
    "The target network's projection is a label: only the online network's prediction moves towards it.",
)
DATA2VEC_TARGET = block(
    "self_supervised.data2vec_target",
    "The teacher's layers are the data to be predicted: the loss would else make them easy to predict.",
)


def negative_cosine_similarity(p: Tensor, z: Tensor) -> Tensor:
    r"""Return SimSiam's loss of one view, the mean over samples.

    .. math:: D(p, \operatorname{sg} z) = -\frac{p}{\lVert p \rVert} \cdot \frac{\operatorname{sg} z}{\lVert z \rVert}

    With c the cosine and hats for unit vectors, the gradient is :math:`-(\hat z - c \hat p) / \lVert p \rVert` for p
    and 0 for z. With `SIMSIAM_TARGET` open, that for z is :math:`-(\hat p - c \hat z) / \lVert z \rVert`. A vector
    without a direction, 0, has similarity 0 and gets no gradient.

    Args:
        p: Predictions, (\*, D).
        z: Embeddings of the other view, (\*, D).

    Returns:
        A scalar from -1 to 1; half precision is computed in float32.

    Raises:
        ValueError: If the shapes differ.

    References:
        Chen and He, "Exploring simple Siamese representation learning", 2020, equation 3.

    Example:
        >>> p, z = torch.tensor([[3.0, 4.0]]), torch.tensor([[1.0, 0.0]])
        >>> negative_cosine_similarity(p, z)
        tensor(-0.6000)
    """
    floating_alike(1, z=z, p=p)
    return -_cosine(p, stop_gradient(z, SIMSIAM_TARGET)).mean()


def simsiam_loss(p1: Tensor, p2: Tensor, z1: Tensor, z2: Tensor) -> Tensor:
    r"""Return SimSiam's symmetric loss, ``(D(p1, sg(z2)) + D(p2, sg(z1))) / 2``, the mean over samples.

    D and its gradients are those of `negative_cosine_similarity`. With the block in place the update is the gradient of
    no function: its Jacobian is not symmetric.

    Args:
        p1: Predictions from the first view, (\*, D).
        p2: Predictions from the second view, (\*, D).
        z1: Embeddings of the first view, (\*, D).
        z2: Embeddings of the second view, (\*, D).

    Returns:
        A scalar from -1 to 1.

    Raises:
        ValueError: If the shapes of a prediction and its target differ.

    References:
        Chen and He, "Exploring simple Siamese representation learning", 2020, equation 4.

    Example:
        >>> p1, p2 = torch.tensor([[3.0, 4.0]]), torch.tensor([[0.0, 2.0]])
        >>> z1, z2 = torch.tensor([[0.0, 1.0]]), torch.tensor([[1.0, 0.0]])
        >>> simsiam_loss(p1, p2, z1, z2)
        tensor(-0.8000)
    """
    floating_alike(1, z2=z2, p1=p1)
    floating_alike(1, z1=z1, p2=p2)
    return (negative_cosine_similarity(p1, z2) + negative_cosine_similarity(p2, z1)) / 2


def byol_loss(prediction: Tensor, projection: Tensor) -> Tensor:
    r"""Return BYOL's loss of one view, the mean over samples.

    .. math:: L = \lVert \hat q - \operatorname{sg} \hat z \rVert^2 = 2 - 2 \cos(q, \operatorname{sg} z)

    q is the prediction of the online network and z the projection of the target network, an `EMATeacher`. With c
    the cosine, the gradient for q is :math:`-2 (\hat z - c \hat q) / \lVert q \rVert`. With the block open, z gets
    :math:`-2 (\hat q - c \hat z) / \lVert z \rVert`. This acts on the online network only as far as the target network
    depends on it: not at all for an `EMATeacher`, by a factor 1 - momentum for averages of `ema` with `EMA_STUDENT`
    open, and fully for the online network itself. For BYOL's symmetric loss add the same with the views swapped.

    Args:
        prediction: (\*, D).
        projection: (\*, D).

    Returns:
        A scalar from 0 to 4; half precision is computed in float32.

    Raises:
        ValueError: If the shapes differ.

    References:
        Grill et al., "Bootstrap your own latent: a new approach to self-supervised learning", 2020, equation 2.

    Example:
        >>> byol_loss(torch.tensor([[3.0, 4.0]]), torch.tensor([[1.0, 0.0]]))
        tensor(0.8000)
    """
    floating_alike(1, projection=projection, prediction=prediction)
    return 2 - 2 * _cosine(prediction, stop_gradient(projection, BYOL_TARGET)).mean()


def data2vec_loss(prediction: Tensor, layers: Sequence[Tensor] | Tensor, *, beta: float = 1.0) -> Tensor:
    r"""Return data2vec's loss, the mean over entries of the smooth absolute error of a prediction y.

    .. math:: t = \operatorname{sg} \frac1L \sum_l \frac{h_l - \bar h_l}{\sqrt{\operatorname{var} h_l + 10^{-5}}}, \quad
        d = y - t, \quad
        \ell(d) = \begin{cases} d^2 / 2\beta & |d| \le \beta \\ |d| - \beta / 2 & \text{else} \end{cases}

    Mean and variance are over the features of one layer h. The gradient with respect to y is :math:`\min(1, \max(-1, d
    / \beta))` over the number of entries. With the block open the layers get its negative, pulled back through mean and
    normalisation.

    Args:
        prediction: The student's predictions y at the masked positions, (\*, D).
        layers: The teacher's hidden states h of its top L layers at these positions: L tensors (\*, D), or (L, \*, D).
        beta: Errors up to beta are squared; 0 is the absolute error.

    Returns:
        A scalar; half precision is computed in float32.

    Raises:
        ValueError: If there is no layer, a layer has another shape than the prediction, or `beta` is negative.

    References:
        Baevski et al., "data2vec: a general framework for self-supervised learning in speech, vision and language",
        2022.

    Example:
        >>> layers = [torch.tensor([1.0, -1.0]), torch.tensor([3.0, 1.0])]
        >>> data2vec_loss(torch.tensor([1.0, 0.5]), layers)
        tensor(0.5000)
    """
    beta = number("beta", beta, least=0)
    if (isinstance(layers, Tensor) and layers.ndim == 0) or len(layers) == 0:
        raise ValueError("`layers` should be one layer or more. Found none.")
    for layer in layers:
        floating_alike(1, prediction=prediction, layers=layer)
    stacked = torch.stack([wide(layer) for layer in layers])
    target = layer_norm(stop_gradient(stacked, DATA2VEC_TARGET), stacked.shape[-1:]).mean(0)
    return smooth_l1_loss(wide(prediction), target, beta=beta)


def _cosine(x: Tensor, y: Tensor) -> Tensor:
    """Return the cosine of each pair of vectors, 0 where one of them is 0: torch's, with a finite gradient there."""
    x, of_x, _ = with_norms(wide(x))
    y, of_y, _ = with_norms(wide(y))
    norms = (of_x * of_y).squeeze(-1)
    none = norms == 0
    return torch.where(none, 0, (x * y).sum(-1) / torch.where(none, 1, norms))
