"""Random changes of training images that keep their labels.

N samples, C channels, H x W pixels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from toolkit._checks import integer
from toolkit._random import own_generator
from toolkit._tensors import tensors

__all__ = ["random_crop_flip"]


def random_crop_flip(x: Tensor, *, padding: int = 4, flip: bool = True, generator: torch.Generator | None) -> Tensor:
    """Return each image moved at random by up to `padding` pixels and, every second time, mirrored.

    The image is padded with zeros. A window of the image's size is cut out, each of the ``(2 padding + 1)^2`` windows
    with the same probability, and mirrored left to right with probability 1/2.

    Args:
        x: Images, (N, C, H, W), of any dtype.
        padding: Width of the frame, in pixels.
        flip: Whether to mirror. Not for digits, nor for other classes that a mirror image confuses.
        generator: Draws one number for each image in turn, so that the first n images do not depend on how many
            follow.

    Returns:
        Images with the shape, dtype and device of `x`.

    Raises:
        ValueError: If `x` has other than four dimensions, or `padding` is negative.

    References:
        He, Zhang, Ren & Sun, "Deep residual learning for image recognition", 2016, the augmentation for CIFAR-10.

    Example:
        >>> x = torch.arange(1.0, 4.0).reshape(1, 1, 1, 3)
        >>> random_crop_flip(x, padding=1, generator=torch.Generator().manual_seed(1))
        tensor([[[[3., 2., 1.]]]])
    """
    tensors(x=x)
    if x.dim() != 4:
        raise ValueError(f"`x` should have shape (N, C, H, W). Found {tuple(x.shape)}.")
    padding, generator = integer("padding", padding, 0), own_generator(generator)
    places = 2 * padding + 1
    chosen = torch.randint(places**2 * (2 if flip else 1), x.shape[:1], generator=generator, device=generator.device)
    chosen = chosen.to(x.device)
    mirrored, row, column = chosen // places**2, chosen // places % places, chosen % places
    # Every window is a view of the frame: an image is copied once, row by row.
    windows = F.pad(x, (padding,) * 4).unfold(2, x.shape[2], 1).unfold(3, x.shape[3], 1)
    images = windows[torch.arange(len(x), device=x.device), :, row, column]
    return torch.where(mirrored.bool()[:, None, None, None], images.flip(3), images) if flip else images
