"""Networks to attack and to train: multilayer perceptrons, a small convolutional network and a residual network.

Parameters are drawn from an explicit generator, on the CPU, so that a seed makes the same network on every device.

N samples, D features, C channels, H x W pixels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from toolkit._checks import integer
from toolkit._random import own_generator
from toolkit.blocks import no_graph

__all__ = ["Normalize", "mlp", "preactivation_resnet18", "small_cnn"]

Activation = Callable[[], nn.Module]


class Normalize(nn.Module):
    """Scale every channel as a network expects it: ``(x - mean) / std``.

    Put in front of a network, it is part of the attacked model. The radius of the ball and the bounds of the box are
    then in units of pixels in [0, 1], the same for every channel.

    Args:
        mean: Mean to subtract from each channel, (C,); one number for all.
        std: Standard deviation to divide each channel by, (C,), positive.

    Attributes:
        mean: (C,), a buffer: it moves with the module, and no optimiser sees it.
        std: (C,), a buffer as well.

    Raises:
        ValueError: If the sizes differ, a number is not finite, or a `std` is not positive.

    Example:
        >>> model = nn.Sequential(Normalize([0.5, 0.25], [0.5, 0.25]), nn.Flatten())
        >>> model(torch.tensor([[[[1.0]], [[1.0]]]]))
        tensor([[1., 3.]])
    """

    mean: Tensor
    std: Tensor

    def __init__(self, mean: float | Sequence[float], std: float | Sequence[float]) -> None:
        super().__init__()
        for name, value in (("mean", mean), ("std", std)):
            numbers = torch.as_tensor(value, dtype=torch.get_default_dtype(), device="cpu").reshape(-1)
            if not numbers.isfinite().all() or (name == "std" and not (numbers > 0).all()):
                wanted = "positive and finite" if name == "std" else "finite"
                raise ValueError(f"`{name}` should be {wanted}. Found {numbers.tolist()}.")
            self.register_buffer(name, numbers.clone())
        if len(self.mean) != len(self.std) or not len(self.mean):
            raise ValueError(
                f"`mean` and `std` should have one number for each channel. Found {len(self.mean)} and {len(self.std)}."
            )

    def forward(self, x: Tensor) -> Tensor:
        """Return ``(x - mean) / std`` of inputs (N, C, ...).

        Raises:
            ValueError: If `x` has another number of channels.
        """
        n_channels = len(self.mean)
        if n_channels > 1 and (x.dim() < 2 or x.shape[1] != n_channels):
            raise ValueError(f"`x` should have shape (N, {n_channels}, ...). Found {tuple(x.shape)}.")
        shape = (n_channels, *[1] * (x.dim() - 2))
        return (x - self.mean.reshape(shape)) / self.std.reshape(shape)

    def extra_repr(self) -> str:
        """Return the mean and the standard deviation in words."""
        return f"mean={self.mean.tolist()}, std={self.std.tolist()}"


def mlp(
    n_features: int,
    n_classes: int,
    *,
    widths: Sequence[int] = (128, 128),
    activation: Activation = nn.ReLU,
    generator: torch.Generator | None,
) -> nn.Sequential:
    """Return a multilayer perceptron: linear layers with an activation between them.

    Args:
        n_features: Number of features, D.
        n_classes: Number of logits.
        widths: Units of the hidden layers. An empty sequence makes a linear classifier.
        activation: Makes the module that follows each hidden layer.
        generator: Draws weights and biases uniformly from ``[-1, 1] / sqrt(inputs of a unit)``, as torch's layers do.
            None: torch's global generator.

    Returns:
        A model from (N, D) to logits.

    Raises:
        ValueError: If a size is not positive.

    Example:
        >>> mlp(64, 10, widths=[32], generator=torch.Generator().manual_seed(0))
        Sequential(
          (0): Linear(in_features=64, out_features=32, bias=True)
          (1): ReLU()
          (2): Linear(in_features=32, out_features=10, bias=True)
        )
    """
    n_features, n_classes = integer("n_features", n_features), integer("n_classes", n_classes)
    widths = [integer("widths", width) for width in widths]
    layers: list[nn.Module] = []
    with torch.device("meta"):
        for width in widths:
            layers += [nn.Linear(n_features, width), activation()]
            n_features = width
        layers.append(nn.Linear(n_features, n_classes))
    model = _drawn(nn.Sequential(*layers), own_generator(generator))
    return model.to(torch.get_default_device())


def small_cnn(
    n_classes: int,
    in_channels: int = 1,
    *,
    image_size: int,
    widths: Sequence[int] = (32, 64),
    strides: Sequence[int] = (1, 2),
    activation: Activation = nn.ReLU,
    generator: torch.Generator | None,
) -> nn.Sequential:
    """Return a convolutional network for small images, such as digits: 3 x 3 convolutions and a linear layer.

    Args:
        n_classes: Number of logits.
        in_channels: Number of channels of the images, C.
        image_size: H, which is also W.
        widths: Channels of the convolutions. Each pads its input with one ring of zeros.
        strides: Strides of the convolutions, as many as `widths`.
        activation: Makes the module that follows each convolution.
        generator: As in `mlp`.

    Returns:
        A model from (N, C, H, W) to logits.

    Raises:
        ValueError: If a size is not positive, or there are not as many strides as widths.

    Example:
        >>> model = small_cnn(10, image_size=8, generator=torch.Generator().manual_seed(0))
        >>> model(torch.zeros(5, 1, 8, 8)).shape, sum(parameter.numel() for parameter in model.parameters())
        (torch.Size([5, 10]), 29066)
    """
    n_classes, in_channels = integer("n_classes", n_classes), integer("in_channels", in_channels)
    image_size = integer("image_size", image_size)
    widths = [integer("widths", width) for width in widths]
    strides = [integer("strides", stride) for stride in strides]
    if len(widths) != len(strides):
        raise ValueError(f"`strides` should be {len(widths)}, one for each of `widths`. Found {len(strides)}.")
    layers: list[nn.Module] = []
    with torch.device("meta"):
        for width, stride in zip(widths, strides, strict=True):
            layers += [nn.Conv2d(in_channels, width, 3, stride, padding=1), activation()]
            in_channels, image_size = width, (image_size - 1) // stride + 1
        layers += [nn.Flatten(), nn.Linear(in_channels * image_size**2, n_classes)]
    model = _drawn(nn.Sequential(*layers), own_generator(generator))
    return model.to(torch.get_default_device())


def preactivation_resnet18(
    n_classes: int = 10,
    in_channels: int = 3,
    *,
    width: int = 64,
    activation: Activation = nn.ReLU,
    generator: torch.Generator | None,
) -> nn.Sequential:
    """Return the pre-activation ResNet-18 for small images.

    A convolution, four stages of two blocks, the last activation, the mean over the pixels and a linear layer. A block
    is ``x + conv(a(norm(conv(a(norm(x))))))``. The first block of a stage but the first halves height and width and
    doubles the channels; the identity is then a convolution of size 1 of the activated input. The stem differs from the
    network for large images: it is one 3 x 3 convolution that keeps the size.

    Args:
        n_classes: Number of logits.
        in_channels: Number of channels of the images, C.
        width: Channels of the first stage: 64 makes the network of the literature, 11 million parameters.
        activation: Makes each activation.
        generator: Draws the convolutions from a normal distribution of variance 2 / fan-out, and the linear layer as in
            `mlp`, with biases of zero. None: torch's global generator.

    Returns:
        A model from (N, C, H, W) to logits. Images may have any size.

    Raises:
        ValueError: If a size is not positive.

    References:
        He, Zhang, Ren & Sun, "Identity mappings in deep residual networks", 2016, where it is "full pre-activation".
        He, Zhang, Ren & Sun, "Delving deep into rectifiers", 2015, for the variance.
        Rice, Wong & Kolter, "Overfitting in adversarially robust deep learning", 2020, which trains this network.

    Example:
        >>> model = preactivation_resnet18(width=4, generator=torch.Generator().manual_seed(0))
        >>> model(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """
    n_classes, in_channels = integer("n_classes", n_classes), integer("in_channels", in_channels)
    width = integer("width", width)
    with torch.device("meta"):
        blocks: list[nn.Module] = []
        channels = width
        for stage in range(4):
            for stride in (1 if stage == 0 else 2, 1):
                blocks.append(_PreactivationBlock(channels, width * 2**stage, stride, activation))
                channels = width * 2**stage
        model = nn.Sequential(
            nn.Conv2d(in_channels, width, 3, padding=1, bias=False),
            *blocks,
            nn.BatchNorm2d(channels),
            activation(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(channels, n_classes),
        )
    generator = own_generator(generator)
    model = _drawn(model, generator)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu", generator=generator)
    last = model[-1]
    assert isinstance(last, nn.Linear)
    nn.init.zeros_(last.bias)
    return model.to(torch.get_default_device())


class _PreactivationBlock(nn.Module):
    """``x + conv(a(norm(conv(a(norm(x))))))``, (N, C, H, W) to (N, `width`, H / `stride`, W / `stride`) rounded up."""

    def __init__(self, channels: int, width: int, stride: int, activation: Activation) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.BatchNorm2d(channels), activation())
        self.rest = nn.Sequential(
            nn.Conv2d(channels, width, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(width),
            activation(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
        )
        same = channels == width and stride == 1
        self.shortcut = None if same else nn.Conv2d(channels, width, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        activated = self.first(x)
        shortcut = x if self.shortcut is None else self.shortcut(activated)
        total: Tensor = self.rest(activated) + shortcut
        return total


def _drawn(model: nn.Sequential, generator: torch.Generator) -> nn.Sequential:
    """Return a model that was made on the meta device, where layers draw nothing, with initial values drawn."""
    model.to_empty(device=generator.device)
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            bound = 1 / math.sqrt(module.weight[0].numel())
            for parameter in module.parameters():
                with no_graph():  # `uniform_(-bound, bound)` fuses the last two on some processors: other last bits
                    parameter.uniform_(generator=generator).mul_(2 * bound).sub_(bound)
        elif isinstance(module, nn.BatchNorm2d):
            module.reset_parameters()
        elif callable(reset := getattr(module, "reset_parameters", None)):  # an activation that has some
            with torch.random.fork_rng([]):
                torch.manual_seed(int(torch.randint(2**31, (), generator=generator, device=generator.device)))
                reset()
    return model
