"""Random crops and mirror images, pixel by pixel."""

import itertools
import re
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from accelerator import ACCELERATOR
from torch import Tensor
from values import seeded

from toolkit.adversarial.augmentation import random_crop_flip

DEVICES = [
    "cpu",
    pytest.param(ACCELERATOR, marks=pytest.mark.gpu),
]


def every_window(image: Tensor, padding: int, flip: bool) -> list[Tensor]:
    """All that may become of one image (C, H, W), one after the other: mirrored or not, then down, then right."""
    _, height, width = image.shape
    framed = torch.zeros(len(image), height + 2 * padding, width + 2 * padding, dtype=image.dtype)
    framed[:, padding : padding + height, padding : padding + width] = image
    places = itertools.product(range(2 * padding + 1), repeat=2)
    windows = [framed[:, row : row + height, column : column + width] for row, column in places]
    return windows + [window.flip(2) for window in windows] if flip else windows


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.uint8], ids=str)
@pytest.mark.parametrize("flip", [False, True], ids=["crop", "crop and flip"])
@pytest.mark.parametrize("padding", [0, 1, 4])
@pytest.mark.parametrize("device", DEVICES)
def test_every_window_and_no_other(device, padding, flip, dtype) -> None:
    """Each comes as often as chance has it, and the first n images are the same whatever follows them."""
    image = torch.arange(1, 1 + 2 * 3 * 5).reshape(2, 3, 5).to(dtype)
    windows = {str(window.tolist()): 0 for window in every_window(image, padding, flip)}
    n = 60 * (2 * padding + 1) ** 2 * 2
    x = image.expand(n, -1, -1, -1).to(device)
    found = random_crop_flip(x, padding=padding, flip=flip, generator=seeded())
    assert (found.shape, found.dtype, found.device) == (x.shape, x.dtype, x.device)
    counts = Counter(windows) + Counter(str(row) for row in found.tolist())
    assert set(counts) == set(windows)
    # A window that is the same in several places counts for each: so do the mirror images of windows of zeros.
    same = Counter(str(window.tolist()) for window in every_window(image, padding, flip))
    expected = n / ((2 * padding + 1) ** 2 * (1 + flip))
    for window, times in same.items():
        assert abs(counts[window] - times * expected) < 5.5 * (times * expected) ** 0.5 + 1e-9


def test_images_are_moved_apart_from_each_other_and_keep_their_channels() -> None:
    x = torch.randn(40, 3, 6, 7, generator=seeded(1), dtype=torch.float64)
    found = random_crop_flip(x, padding=2, generator=seeded(2))
    chosen = []
    for before, after in zip(x, found, strict=True):
        (which,) = [i for i, window in enumerate(every_window(before, 2, True)) if torch.equal(window, after)]
        chosen.append(which)
    assert len(set(chosen)) > 20
    draws = torch.randint(50, (40,), generator=seeded(2)).tolist()
    assert chosen == draws


def test_first_images_do_not_depend_on_the_rest() -> None:
    x = torch.rand(50, 1, 8, 8, generator=seeded(1))
    whole = random_crop_flip(x, generator=seeded(3))
    for n in (0, 1, 7, 33):
        assert torch.equal(random_crop_flip(x[:n], generator=seeded(3)), whole[:n])


def test_generator_alone_decides() -> None:
    x, before = torch.rand(20, 1, 8, 8, generator=seeded(1)), torch.get_rng_state()
    copy, generator = x.clone(), seeded(3)
    first, second = (random_crop_flip(x, generator=generator) for _ in range(2))
    assert not torch.equal(first, second)
    assert torch.equal(first, random_crop_flip(x, generator=seeded(3)))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(x, copy)


def test_gradient_returns_to_the_pixels_it_came_from() -> None:
    x = torch.rand(9, 1, 4, 4, generator=seeded(1), dtype=torch.float64, requires_grad=True)
    weights = torch.rand(9, 1, 4, 4, generator=seeded(2), dtype=torch.float64)
    (random_crop_flip(x, padding=1, generator=seeded(3)) * weights).sum().backward()
    assert x.grad is not None
    # The sum over pixels that stay inside; each pixel of an image shows at most once.
    inside = random_crop_flip(torch.ones_like(x), padding=1, generator=seeded(3))
    torch.testing.assert_close(x.grad.sum((1, 2, 3)), (weights * inside).sum((1, 2, 3)), rtol=1e-13, atol=0)
    assert torch.autograd.gradcheck(lambda x: random_crop_flip(x, padding=1, generator=seeded(3)), x)


def test_constant_frame_is_zero() -> None:
    found = random_crop_flip(torch.ones(200, 1, 2, 2), padding=3, generator=seeded())
    assert set(found.flatten().tolist()) == {0.0, 1.0}
    torch.testing.assert_close(F.pad(torch.ones(1, 1, 2, 2), (3,) * 4).mean() * 1.0, torch.tensor(4 / 64))


@pytest.mark.parametrize(
    ("shape", "padding", "message"),
    [
        ((5, 64), 1, "`x` should have shape (N, C, H, W). Found (5, 64)."),
        ((1, 8, 8), 1, "`x` should have shape (N, C, H, W). Found (1, 8, 8)."),
        ((2, 1, 8, 8), -1, "`padding` should be an integer from 0. Found -1."),
    ],
)
def test_arguments_are_checked(shape, padding, message) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        random_crop_flip(torch.zeros(shape), padding=padding, generator=seeded())
