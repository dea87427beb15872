"""Two corrupted views of each image: noise is added and pixels are removed. N images, D pixels."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["Views"]


class Views:
    """Two views of the current batch, and of the next ones by a seeded source.

    Args:
        images: (N, D).
        batch_size: Number of images in a batch.
        noise: Standard deviation of the noise, for each of the views.
        removed: Share of the pixels that are removed, for each of the views.
        generator: Draws the batches and the corruption.
    """

    def __init__(
        self,
        images: Tensor,
        batch_size: int,
        *,
        noise: tuple[float, float],
        removed: tuple[float, float],
        generator: torch.Generator,
    ) -> None:
        self._images, self._batch_size, self._generator = images, batch_size, generator
        self._noise, self._removed = noise, removed
        self.advance(0)

    def advance(self, step: int) -> None:
        """Draw the views of the next batch."""
        chosen = torch.randint(len(self._images), (self._batch_size,), generator=self._generator)
        images = self._images[chosen.to(self._images.device)]
        self.first, self.second = (
            self._corrupted(images, removed, noise) for removed, noise in zip(self._removed, self._noise, strict=True)
        )

    def _corrupted(self, images: Tensor, removed: float, noise: float) -> Tensor:
        drawn = torch.randn(images.shape, generator=self._generator, dtype=images.dtype)
        kept = torch.rand(images.shape, generator=self._generator) >= removed
        return (images + noise * drawn.to(images)) * kept.to(images)
