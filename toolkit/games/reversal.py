r"""Gradient reversal: two players with one loss, written as one block.

N samples, M samples of another domain, D features.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from toolkit._checks import number
from toolkit._tensors import floating
from toolkit.blocks import block, stop_gradient

__all__ = ["REVERSED", "domain_adversarial_loss", "reverse_gradient"]

REVERSED = block(
    "games.reversed",
    "The value passes through a constant, so that the gradient through its other, negative part is all that arrives.",
)


def reverse_gradient(input: Tensor, scale: float = 1.0) -> Tensor:
    r"""Return `input`, bit for bit, with the gradient :math:`-\lambda` times its cotangent.

    It is :math:`\operatorname{sg}(x) - \lambda (x - \operatorname{sg}(x))`. With the block `REVERSED` open the factor
    is 1: the layers below help the layers above, as without reversal.

    Args:
        input: x, floating point, finite.
        scale: :math:`\lambda`, not negative. At 0 nothing flows back.

    Returns:
        Like `input`, in new memory. Entries that are not finite become NaN.

    Raises:
        ValueError: If `scale` is negative or not finite.

    References:
        Ganin and Lempitsky, "Unsupervised domain adaptation by backpropagation", 2015, section 3.2.

    Example:
        >>> x = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> torch.autograd.grad(reverse_gradient(x, 0.5).sum(), x)
        (tensor([-0.5000, -0.5000]),)
    """
    floating(input=input)
    scale = number("scale", scale, least=0)
    return torch.lerp(stop_gradient(input, REVERSED), input, -scale)


def domain_adversarial_loss(
    discriminator: Callable[[Tensor], Tensor], source: Tensor, target: Tensor, *, scale: float = 1.0
) -> Tensor:
    r"""Return the mean cross entropy of a domain classifier behind a gradient reversal, in nats per sample.

    The classifier learns to tell the domains apart; the features learn, :math:`\lambda` times as fast, to prevent it.
    Add it to the loss of the task on the source domain. With the block `REVERSED` open the features help the
    classifier.

    Args:
        discriminator: Features to the logits of the target domain, (N) or (N, 1).
        source: Features of one domain, (N, D).
        target: Features of the other, (M, D).
        scale: :math:`\lambda`; the paper raises it from 0 to 1 during training.

    Returns:
        A scalar: the mean over all N + M samples.

    Raises:
        ValueError: If `scale` is negative or not finite.

    References:
        Ganin et al., "Domain-adversarial training of neural networks", 2016, section 4.2.

    Example:
        >>> x, y = torch.tensor([[-1.0]]), torch.tensor([[2.0]])
        >>> domain_adversarial_loss(lambda features: features, x, y)
        tensor(0.2201)
    """
    floating(source=source, target=target)
    if source.shape[1:] != target.shape[1:] or not source.ndim or not target.ndim:
        shapes = f"{tuple(source.shape)} and {tuple(target.shape)}"
        raise ValueError(f"`source` and `target` should have shapes (N, D) and (M, D). Found {shapes}.")
    logits = discriminator(reverse_gradient(torch.cat([source, target]), scale))
    at_source, at_target = logits.split([len(source), len(target)])
    return -torch.cat([logsigmoid(-at_source), logsigmoid(at_target)]).mean()
