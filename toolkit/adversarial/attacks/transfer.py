"""Transfer attacks, whose examples also fool other models: momentum, and smoothed, look-ahead or averaged gradients.

N samples, each of shape (...), or images of C channels, H rows and W columns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from toolkit._checks import integer, number
from toolkit._random import own_generator, starts_at_random
from toolkit.adversarial.attacks._setting import GradientOptions, Setting, setting
from toolkit.adversarial.attacks.losses import Loss
from toolkit.adversarial.balls.box import sum_of, wide
from toolkit.blocks import no_graph

__all__ = ["di_fgsm", "mi_fgsm", "ni_fgsm", "ti_fgsm", "vmi_fgsm"]

# An example and the running sum of gradients, to the point to step from and its gradient.
_Slope = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def mi_fgsm(
    model: Callable[[Tensor], Tensor],
    x: Tensor,
    labels: Tensor | None = None,
    *,
    steps: int = 10,
    step_size: float | Tensor | None = None,
    momentum: float = 1.0,
    loss: Loss | None = None,
    random_start: bool | None = None,
    generator: torch.Generator | None = None,
    **options: Unpack[GradientOptions],
) -> Tensor:
    """Ascend along a running sum of gradients: the iterative fast gradient method with momentum.

    ``g_{t+1} = momentum * g_t + grad / |grad|_1``, then a step as in `pgd` with g in the place of the gradient. The sum
    keeps the directions of earlier steps, so its examples also fool other models.

    Args:
        model: Inputs (N, ...) to logits (N, C).
        x: Clean inputs, (N, ...), inside of `bounds`.
        labels: (N,). None: the model's predictions at `x`.
        steps: Number of gradient steps.
        step_size: Length of a step in the norm; one for all, or (N,). None: ``epsilon / steps``, as in the paper.
        momentum: The part of the sum that is kept, at least 0; 0 is a plain ascent.
        loss: As in `pgd`.
        random_start: As in `pgd`.
        generator: As in `pgd`.
        **options: `epsilon`, `norm`, `bounds`, `mask` or `ball`; `targets`, `logits`, `gradient_dtype`.

    Returns:
        Adversarial examples with the shape, dtype and device of `x`; a constant while the block `EXAMPLE` is in place.

    Raises:
        TypeError: As in `pgd`.
        ValueError: As in `pgd`, or if `momentum` is negative or not finite.

    References:
        Dong et al., "Boosting adversarial attacks with momentum", 2018, algorithm 1.

    Example:
        >>> weight = torch.tensor([[1.0, -2.0], [0.0, 0.0]])
        >>> x = torch.full((1, 2), 0.5)
        >>> mi_fgsm(lambda x: x @ weight.T, x, torch.tensor([0]), epsilon=0.25, steps=5)
        tensor([[0.2500, 0.7500]])
    """
    steps = integer("steps", steps)
    momentum = number("momentum", momentum, least=0)
    draws = own_generator(generator) if starts_at_random(random_start, generator) else None
    with setting(model, x, labels, **options) as attack:
        return _ascend(attack, lambda example, _: attack.gradient(example, loss)[:2], steps, step_size, momentum, draws)


def ni_fgsm(
    model: Callable[[Tensor], Tensor],
    x: Tensor,
    labels: Tensor | None = None,
    *,
    steps: int = 10,
    step_size: float | Tensor | None = None,
    momentum: float = 1.0,
    **options: Unpack[GradientOptions],
) -> Tensor:
    """Ascend with momentum by gradients at a look-ahead point: Nesterov's accelerated gradient.

    As `mi_fgsm`, with the gradient at ``x_t + momentum * step_size * D g_t``, where g_t is the running sum of
    gradients divided by their L1 norm, and D the number of features. The factor D is that of the authors' code, which
    divides gradients by their mean absolute value. The arguments are those of `mi_fgsm`.

    Returns:
        As in `mi_fgsm`.

    Raises:
        TypeError: As in `pgd`.
        ValueError: As in `mi_fgsm`.

    References:
        Lin, Song, He, Wang and Hopcroft, "Nesterov accelerated gradient and scale invariance for adversarial attacks",
        2020, equations 6 and 7.

    Example:
        >>> weight = torch.tensor([[1.0, -2.0], [0.0, 0.0]])
        >>> ni_fgsm(lambda x: x @ weight.T, torch.full((1, 2), 0.5), torch.tensor([0]), epsilon=0.25)
        tensor([[0.2500, 0.7500]])
    """
    steps, momentum = integer("steps", steps), number("momentum", momentum, least=0)
    with setting(model, x, labels, **options) as attack:
        stride = attack.stride(1 / steps, step_size)

        def ahead(example: Tensor, heading: Tensor) -> tuple[Tensor, Tensor]:
            _, gradient, _ = attack.gradient(example + momentum * heading[:1].numel() * stride * heading)
            return example, gradient

        return _ascend(attack, ahead, steps, step_size, momentum)


def di_fgsm(
    model: Callable[[Tensor], Tensor],
    x: Tensor,
    labels: Tensor | None = None,
    *,
    steps: int = 10,
    step_size: float | Tensor | None = None,
    momentum: float = 1.0,
    resize: float = 0.9,
    probability: float = 0.5,
    generator: torch.Generator | None,
    **options: Unpack[GradientOptions],
) -> Tensor:
    """Ascend with momentum by gradients at images that are shrunk and padded at random: diverse inputs.

    Before each gradient, with some probability, the images are scaled by a random factor between `resize` and 1, and
    padded with zeros to their old size, at a random place.

    Args:
        model: Inputs (N, C, H, W) to logits (N, C).
        x: Clean images, (N, C, H, W), inside of `bounds`.
        labels: (N,). None: the model's predictions at `x`.
        steps: Number of gradient steps.
        step_size: Length of a step in the norm; one for all, or (N,). None: ``epsilon / steps``.
        momentum: As in `mi_fgsm`.
        resize: The smallest scale, above 0 and at most 1.
        probability: Probability that the images are transformed, from 0 to 1.
        generator: Draws the transformations. None: torch's global generator.
        **options: `epsilon`, `norm`, `bounds`, `mask` or `ball`; `targets`, `logits`, `gradient_dtype`.

    Returns:
        As in `mi_fgsm`.

    Raises:
        TypeError: As in `pgd`.
        ValueError: As in `mi_fgsm`, or if `resize` or `probability` is out of its range, or `x` is not images.

    References:
        Xie, Zhang, Zhou, Bai, Wang, Ren and Yuille, "Improving transferability of adversarial examples with input
        diversity", 2019, algorithm 1.

    Example:
        >>> model, x = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 2)), torch.full((1, 1, 4, 4), 0.5)
        >>> example = di_fgsm(model, x, torch.tensor([0]), epsilon=0.1, generator=torch.Generator().manual_seed(0))
        >>> round((example - x).abs().max().item(), 4)
        0.1
    """
    steps, momentum = integer("steps", steps), number("momentum", momentum, least=0)
    resize = number("resize", resize, above=0, most=1)
    probability = number("probability", probability, least=0, most=1)
    draws = own_generator(generator)
    with setting(model, x, labels, **options) as attack:
        _check_images(attack.x)

        def diverse(example: Tensor, heading: Tensor) -> tuple[Tensor, Tensor]:
            drawn = torch.rand(5, generator=draws, device=draws.device).tolist()
            varied = replace(attack, slopes=lambda x: attack.slopes(_shrunk(x, resize, drawn)))
            return (varied if drawn[0] < probability else attack).gradient(example)[:2]

        return _ascend(attack, diverse, steps, step_size, momentum)


def ti_fgsm(
    model: Callable[[Tensor], Tensor],
    x: Tensor,
    labels: Tensor | None = None,
    *,
    steps: int = 10,
    step_size: float | Tensor | None = None,
    momentum: float = 1.0,
    kernel: int = 15,
    sigma: float | None = None,
    **options: Unpack[GradientOptions],
) -> Tensor:
    """Ascend with momentum by blurred gradients, an approximation of the mean gradient at many shifted images.

    ``g_{t+1} = momentum * g_t + (W * grad) / |W * grad|_1`` with a Gaussian kernel W.

    Args:
        model: Inputs (N, C, H, W) to logits (N, C).
        x: Clean images, (N, C, H, W), inside of `bounds`.
        labels: (N,). None: the model's predictions at `x`.
        steps: Number of gradient steps.
        step_size: Length of a step in the norm; one for all, or (N,). None: ``epsilon / steps``.
        momentum: As in `mi_fgsm`.
        kernel: Rows and columns of the kernel, odd.
        sigma: Standard deviation of the kernel, in pixels. None: a sixth of its width, as in the authors' code.
        **options: `epsilon`, `norm`, `bounds`, `mask` or `ball`; `targets`, `logits`, `gradient_dtype`.

    Returns:
        As in `mi_fgsm`.

    Raises:
        TypeError: As in `pgd`.
        ValueError: As in `mi_fgsm`, or if `kernel` is even, `sigma` is not positive, or `x` is not images.

    References:
        Dong, Pang, Su and Zhu, "Evading defenses to transferable adversarial examples by translation-invariant
        attacks", 2019, equation 7.

    Example:
        >>> model, x = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 2)), torch.full((1, 1, 4, 4), 0.5)
        >>> example = ti_fgsm(model, x, torch.tensor([0]), epsilon=0.1, kernel=3)
        >>> round((example - x).abs().max().item(), 4)
        0.1
    """
    steps, momentum = integer("steps", steps), number("momentum", momentum, least=0)
    kernel = integer("kernel", kernel)
    sigma = max(1, kernel - 1) / 6 if sigma is None else number("sigma", sigma, above=0)
    if kernel % 2 == 0:
        raise ValueError(f"`kernel` should be odd. Found {kernel}.")
    with setting(model, x, labels, **options) as attack:
        _check_images(attack.x)
        weight = _gaussian(kernel, sigma, attack.x)

        def blurred(example: Tensor, heading: Tensor) -> tuple[Tensor, Tensor]:
            point, gradient, _ = attack.gradient(example)
            blurred = F.conv2d(gradient, weight, padding=kernel // 2, groups=gradient.shape[1])
            return point, blurred

        return _ascend(attack, blurred, steps, step_size, momentum)


def vmi_fgsm(
    model: Callable[[Tensor], Tensor],
    x: Tensor,
    labels: Tensor | None = None,
    *,
    steps: int = 10,
    step_size: float | Tensor | None = None,
    momentum: float = 1.0,
    neighbours: int = 5,
    radius: float = 1.5,
    generator: torch.Generator | None,
    **options: Unpack[GradientOptions],
) -> Tensor:
    """Ascend with momentum by gradients corrected by the mean gradient nearby: variance tuning.

    ``g_{t+1} = momentum * g_t + (grad + v_t) / |grad + v_t|_1``, where ``v_{t+1}`` is the mean gradient at points drawn
    around x_t, minus the gradient at x_t.

    Args:
        model: Inputs (N, ...) to logits (N, C).
        x: Clean inputs, (N, ...), inside of `bounds`.
        labels: (N,). None: the model's predictions at `x`.
        steps: Number of gradient steps.
        step_size: Length of a step in the norm; one for all, or (N,). None: ``epsilon / steps``.
        momentum: As in `mi_fgsm`.
        neighbours: Number of points that are drawn in each step. Each costs a gradient.
        radius: Radius of the ball around x_t from which the points are drawn, in units of epsilon.
        generator: Draws the points. None: torch's global generator.
        **options: `epsilon`, `norm`, `bounds`, `mask` or `ball`; `targets`, `logits`, `gradient_dtype`.

    Returns:
        As in `mi_fgsm`.

    Raises:
        TypeError: As in `pgd`.
        ValueError: As in `mi_fgsm`, or if `neighbours` is not positive, or `radius` is negative.

    References:
        Wang and He, "Enhancing the transferability of adversarial attacks through variance tuning", 2021, algorithm 1.

    Example:
        >>> weight = torch.tensor([[1.0, -2.0], [0.0, 0.0]])
        >>> options = {"epsilon": 0.25, "generator": torch.Generator().manual_seed(0)}
        >>> vmi_fgsm(lambda x: x @ weight.T, torch.full((1, 2), 0.5), torch.tensor([0]), **options)
        tensor([[0.2500, 0.7500]])
    """
    steps, momentum = integer("steps", steps), number("momentum", momentum, least=0)
    neighbours, radius = integer("neighbours", neighbours), number("radius", radius, least=0)
    draws = own_generator(generator)
    with setting(model, x, labels, **options) as attack:
        size = (attack.stride(radius) * attack.sign).flatten(1)[:, 0]
        around = replace(attack.threat, epsilon=size, bounds=None, mask=None)
        correction = torch.zeros_like(attack.x)

        def tuned(example: Tensor, heading: Tensor) -> tuple[Tensor, Tensor]:
            nonlocal correction
            point, gradient, _ = attack.gradient(example)
            with no_graph():
                ball = around.around(example)
            nearby = sum(attack.gradient(ball.sample(draws))[1] for _ in range(neighbours))
            corrected, correction = gradient + correction, nearby / neighbours - gradient
            return point, corrected

        return _ascend(attack, tuned, steps, step_size, momentum)


def _ascend(
    attack: Setting,
    slope: _Slope,
    steps: int,
    step_size: float | Tensor | None,
    momentum: float,
    generator: torch.Generator | None = None,
) -> Tensor:
    stride, example = attack.stride(1 / steps, step_size), attack.start(generator)
    heading = torch.zeros_like(example)
    for _ in range(steps):
        point, gradient = slope(example, heading)
        heading = momentum * heading + _of_unit_sum(gradient)
        example = attack.ball.step(point, heading, stride)
    return attack.ball.settle(example)


def _check_images(x: Tensor) -> None:
    if x.dim() != 4:
        raise ValueError(f"`x` should be images, (N, C, H, W). Found shape {tuple(x.shape)}.")


def _shrunk(x: Tensor, resize: float, drawn: list[float]) -> Tensor:
    """Return images that are scaled, then padded with zeros at a random place to their size."""
    height, width = x.shape[2:]
    scale = resize + (1 - resize) * drawn[1]
    rows, columns = max(1, int(scale * height)), max(1, int(scale * width))
    top, left = int(drawn[2] * (height - rows + 1)), int(drawn[3] * (width - columns + 1))
    small = F.interpolate(x, size=(rows, columns), mode="bilinear", align_corners=False)
    return F.pad(small, (left, width - columns - left, top, height - rows - top))


def _gaussian(side: int, sigma: float, like: Tensor) -> Tensor:
    """Return a kernel for each channel, (C, 1, side, side), of sum 1."""
    place = torch.arange(side, device=like.device, dtype=torch.float64) - side // 2
    row = (-place.square() / (2 * sigma**2)).exp()
    kernel = torch.outer(row, row) / row.sum().square()
    return kernel.to(like.dtype).expand(like.shape[1], 1, side, side)


def _of_unit_sum(gradient: Tensor) -> Tensor:
    """Return the gradient divided by the sum of its absolute values; zero where it is zero."""
    total = sum_of(gradient.to(wide(gradient)).abs())
    return (gradient / total.masked_fill(total == 0, 1)).to(gradient.dtype)
