r"""A partial stop: the value passes unchanged, and the gradient is scaled."""

from __future__ import annotations

import torch
from torch import Tensor

from toolkit._checks import number
from toolkit._tensors import shape_of
from toolkit.blocks import block, stop_gradient

__all__ = ["PARTIAL", "scale_gradient"]

PARTIAL = block(
    "curvature.partial",
    "The value passes through a constant but for a share, so that this share of the gradient arrives.",
)


def scale_gradient(input: Tensor, scale: float) -> Tensor:
    r"""Return `input`, bit for bit, with a gradient multiplied by `scale`.

    It is :math:`\operatorname{sg}(x) + s (x - \operatorname{sg}(x))`. With the block `PARTIAL` open the factor is 1.

    Args:
        input: x, floating point, finite.
        scale: s; 0 stops the gradient, 1 leaves it as it is.

    Returns:
        Like `input`, in new memory. Entries that are not finite become NaN.

    Raises:
        ValueError: If `input` is not a floating-point tensor, or `scale` is not a finite number.

    References:
        Schrittwieser et al., "Mastering Atari, Go, chess and shogi by planning with a learned model", 2020, which
        halves the gradient that enters the dynamics function.

    Example:
        >>> x = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> torch.autograd.grad(scale_gradient(x, 0.5).sum(), x)
        (tensor([0.5000, 0.5000]),)
    """
    shape_of("input", input)
    if not (input.is_floating_point() or input.is_complex()):
        raise ValueError(f"`input` should be a floating-point tensor. Found {input.dtype}.")
    return torch.lerp(stop_gradient(input, PARTIAL), input, number("scale", scale))
