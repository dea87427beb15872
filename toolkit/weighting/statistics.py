r"""Normalisation by statistics that are held constant: batch renormalisation, running scales, MixStyle.

A layer that divides by a statistic of its own input has a gradient through the statistic, and holding the statistic
constant makes another layer. Batch renormalisation needs both: its output is that of inference, its gradient that of
batch normalisation.

N samples, C channels; ``*`` any further dimensions.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from toolkit._checks import integer, number
from toolkit._tensors import floating, in_range, integers, wide
from toolkit.blocks import block, stop_gradient

__all__ = [
    "CORRECTIONS",
    "RUNNING_SCALE",
    "RUNNING_STATISTICS",
    "STYLE",
    "BatchRenorm",
    "batch_renorm",
    "ema_normalize",
    "mixstyle",
]

CORRECTIONS = block(
    "weighting.renorm_corrections",
    "Scale and shift bring a batch to the running statistics; differentiated, they undo the gradient of normalisation "
    "and training is free to let activations grow.",
)
RUNNING_STATISTICS = block(
    "weighting.running_statistics",
    "Running statistics describe earlier batches, whose graph should not be kept alive.",
)
RUNNING_SCALE = block(
    "weighting.running_scale",
    "The scale only sets the unit of its input; differentiated, an entry would be paid for enlarging the scale.",
)
STYLE = block(
    "weighting.style",
    "Mean and deviation of each channel are the style that is exchanged, noise that no weight should learn to remove.",
)


def batch_renorm(
    input: Tensor,
    running_mean: Tensor,
    running_std: Tensor,
    *,
    rmax: float = 3.0,
    dmax: float = 5.0,
    eps: float = 1e-3,
) -> Tensor:
    r"""Return :math:`\frac{x - \mu_B}{\sigma_B} \mathrm{sg}(r) + \mathrm{sg}(d)` for every channel of a batch.

    :math:`\mu_B` and :math:`\sigma_B = \sqrt{\mathrm{var} + \epsilon}` are those of the batch, :math:`r =
    \sigma_B / \sigma` and :math:`d = (\mu_B - \mu) / \sigma` clipped to ``[1 / rmax, rmax]`` and ``[-dmax, dmax]``.
    Without clipping the value is :math:`(x - \mu) / \sigma`, as in inference. With the block `CORRECTIONS` in place the
    gradient is :math:`r` times that of batch normalisation, for a cotangent c
    :math:`(c - \bar c - \hat x\, \overline{c \hat x}) / \sigma`. Opened and unclipped, it is :math:`c / \sigma`.

    Args:
        input: x, (N, C, \*).
        running_mean: :math:`\mu`, (C,).
        running_std: :math:`\sigma`, (C,), positive.
        rmax: Bound of the scale, at least 1; 1 with ``dmax=0`` is batch normalisation.
        dmax: Bound of the shift.
        eps: Added to the variance of the batch.

    Returns:
        (N, C, \*), in the precision of `input`; the statistics of half precision are computed in float32.

    Raises:
        ValueError: If a shape does not fit, `rmax` is below 1, `dmax` is negative, or `eps` is not positive.

    References:
        Ioffe, "Batch renormalization: towards reducing minibatch dependence in batch-normalized models", 2017,
        algorithm 1.

    Example:
        >>> x = torch.tensor([[0.5], [-1.0], [2.0], [0.1]])
        >>> batch_renorm(x, torch.tensor([0.2]), torch.tensor([1.5])).T
        tensor([[ 0.2000, -0.8000,  1.2000, -0.0667]])
    """
    mean, std = _moments(input, eps)
    return _fused(input, *_corrections(mean, std, running_mean, running_std, rmax, dmax), eps)


class BatchRenorm(nn.Module):
    r"""Batch renormalisation with running statistics, for inputs (N, C, \*).

    In training mode `batch_renorm` uses the running statistics of earlier batches, which then move towards those of
    this batch by `momentum`; the block `RUNNING_STATISTICS` holds them constant. In evaluation mode the output is
    :math:`(x - \mu) / \sigma`, and the statistics do not change. `rmax` and `dmax` are attributes: the paper begins at
    1 and 0, which is batch normalisation, and raises them.

    Args:
        num_features: Number of channels, C.
        eps: Added to the variance of a batch.
        momentum: Share of the batch in the running statistics.
        affine: Whether a learned scale and shift of each channel follow.
        rmax: Bound of the scale, as in `batch_renorm`.
        dmax: Bound of the shift.
        device: Of parameters and statistics.
        dtype: Of parameters and statistics. In half precision small steps of the statistics are rounded to zero.

    Raises:
        ValueError: If `num_features` is not positive, `momentum` is not from 0 to 1, or as in `batch_renorm`.

    References:
        As `batch_renorm`.

    Example:
        >>> layer = BatchRenorm(1, rmax=3, dmax=5)
        >>> layer(torch.tensor([[1.0], [3.0]])).T, layer.running_mean
        (tensor([[1., 3.]], grad_fn=<...>), tensor([0.0200]))
    """

    running_mean: Tensor
    running_std: Tensor

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-3,
        momentum: float = 0.01,
        affine: bool = True,
        *,
        rmax: float = 3.0,
        dmax: float = 5.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        n = integer("num_features", num_features)
        self.eps, self.momentum = number("eps", eps, above=0), number("momentum", momentum, least=0, most=1)
        self.rmax, self.dmax = number("rmax", rmax, least=1), number("dmax", dmax, least=0)
        self.register_buffer("running_mean", torch.zeros(n, device=device, dtype=dtype))
        self.register_buffer("running_std", torch.ones(n, device=device, dtype=dtype))
        self.weight = nn.Parameter(torch.ones(n, device=device, dtype=dtype)) if affine else None
        self.bias = nn.Parameter(torch.zeros(n, device=device, dtype=dtype)) if affine else None

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalised input, of the same shape."""
        if not self.training:
            scale, shift = self._with_affine(1 / self.running_std, torch.zeros_like(self.running_std))
            shape = _of_channels(input, self.running_mean)
            output = (input - self.running_mean.view(shape)) * scale.view(shape) + shift.view(shape)
            return output.to(input.dtype)
        mean, std = _moments(input, self.eps)
        r, d = _corrections(mean, std, self.running_mean, self.running_std, self.rmax, self.dmax)
        mean, std = stop_gradient((mean, std), RUNNING_STATISTICS)
        # New tensors: the old ones may be saved for a backward pass.
        self.running_mean = torch.lerp(self.running_mean, mean.to(self.running_mean.dtype), self.momentum)
        self.running_std = torch.lerp(self.running_std, std.to(self.running_std.dtype), self.momentum)
        return _fused(input, *self._with_affine(r, d), self.eps)

    def _with_affine(self, scale: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
        if self.weight is None or self.bias is None:
            return scale, shift
        return scale * self.weight, shift * self.weight + self.bias

    def extra_repr(self) -> str:
        """Return the sizes for the printed form."""
        return f"{len(self.running_mean)}, eps={self.eps}, momentum={self.momentum}, rmax={self.rmax}, dmax={self.dmax}"


def ema_normalize(input: Tensor, scale: Tensor, *, decay: float) -> tuple[Tensor, Tensor]:
    r"""Return :math:`x / \mathrm{sg}(s)` and the new scale :math:`s = \beta s' + (1 - \beta)\, \mathrm{mean}\,|x|`.

    With the block `RUNNING_SCALE` in place the gradient for a cotangent c is :math:`c / s`. Opened,
    :math:`(1 - \beta) \langle c, x \rangle \mathrm{sign}(x) / (n s^2)` is subtracted, n the number of entries.

    Args:
        input: x, of any shape.
        scale: The previous scale :math:`s'`, a tensor without dimensions; a start at 0 makes the first scales small.
        decay: :math:`\beta`, from 0 to 1.

    Returns:
        The normalised input and the new scale, a constant for the next call, in float32 or more precisely. An input of
        zeros stays zeros.

    Raises:
        ValueError: If `scale` has dimensions, `input` is empty, or `decay` is not from 0 to 1.

    References:
        Hafner, Pasukonis, Ba and Lillicrap, "Mastering diverse domains through world models", 2023, divide returns by a
        running scale, there a range of percentiles.

    Example:
        >>> ema_normalize(torch.tensor([0.5, -1.0, 2.0, 0.1]), torch.tensor(2.0), decay=0.9)
        (tensor([ 0.2646, -0.5291,  1.0582,  0.0529]), tensor(1.8900))
    """
    decay = number("decay", decay, least=0, most=1)
    floating(input=input, scale=scale)
    if scale.ndim:
        raise ValueError(f"`scale` should have no dimensions. Found shape {tuple(scale.shape)}.")
    if input.numel() == 0:  # the mean of nothing, NaN, would stay in the scale
        raise ValueError(f"`input` should have entries. Found shape {tuple(input.shape)}.")
    mean = wide(input).abs().mean()
    dtype = torch.promote_types(mean.dtype, scale.dtype)
    held = stop_gradient(torch.lerp(mean.to(dtype), scale.to(dtype), decay), RUNNING_SCALE)
    return (input / held.clamp(min=torch.finfo(dtype).tiny)).to(input.dtype), held


def mixstyle(input: Tensor, permutation: Tensor, mixing: Tensor | float, *, eps: float = 1e-6) -> Tensor:
    r"""Give each image a mixture of its own style and that of another image: :math:`\hat x \sigma_{mix} + \mu_{mix}`.

    :math:`\mu` and :math:`\sigma` are mean and standard deviation of each channel of each image,
    :math:`\hat x = (x - \mu) / \sigma`, :math:`\sigma_{mix} = \lambda \sigma + (1 - \lambda) \sigma_\pi`, and
    :math:`\mu_{mix}` likewise. With the block `STYLE` in place the gradient for a cotangent c is
    :math:`c\, \sigma_{mix} / \sigma`. Opened, that of the statistics is added.

    Args:
        input: x, (N, C, \*), with at least two entries in each channel.
        permutation: The partner of each image, (N,) integers.
        mixing: :math:`\lambda`, a number, or (N,): the share of an image's own style. The paper draws it from a beta
            distribution for half of the batches.
        eps: Added to the variances.

    Returns:
        (N, C, \*), in the precision of `input`; half precision is computed in float32.

    Raises:
        ValueError: If a shape does not fit, `permutation` has other numbers than the integers below N, a number
            `mixing` is not from 0 to 1, or `eps` is not positive.

    References:
        Zhou, Yang, Qiao and Xiang, "Domain generalization with MixStyle", 2021.

    Example:
        >>> x = torch.tensor([[[0.5, -1.0, 2.0, 0.1]], [[3.0, 1.0, -0.4, 0.8]]])
        >>> mixstyle(x, torch.tensor([1, 0]), 0.7)[0]
        tensor([[ 0.7141, -0.8470,  2.2752,  0.2978]])
    """
    eps = number("eps", eps, above=0)
    floating(input=input)
    integers(permutation=permutation)
    if input.ndim < 3 or permutation.shape != input.shape[:1] or math.prod(input.shape[2:]) < 2 or not input.numel():
        raise ValueError(
            "`input` and `permutation` should have shapes (N, C, ...) and (N,), with two entries in each channel. "
            f"Found {tuple(input.shape)} and {tuple(permutation.shape)}."
        )
    x, partner = wide(input), permutation.long()  # bytes would be a mask
    var, mean = torch.var_mean(x, tuple(range(2, x.ndim)), keepdim=True)
    mean, std = stop_gradient((mean, (var + eps).sqrt()), STYLE)
    if isinstance(mixing, Tensor):
        floating(mixing=mixing)
        if mixing.numel() not in (1, len(input)):
            raise ValueError(f"`mixing` should have shape ({len(input)},). Found {tuple(mixing.shape)}.")
        own: Tensor | float = mixing.view(-1, *[1] * (input.ndim - 1))
    else:
        own = number("mixing", mixing, least=0, most=1)
    try:
        partners = [each.index_select(0, partner) for each in (mean, std)]  # a negative number is not one from the end
    except (IndexError, RuntimeError):
        in_range("permutation", partner, len(input))
        raise
    mixed_mean, mixed_std = (own * a + (1 - own) * b for a, b in zip((mean, std), partners, strict=True))
    return ((x - mean) / std * mixed_std + mixed_mean).to(input.dtype)


def _moments(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the mean and the deviation of each channel, (C,)."""
    floating(input=x)
    if x.ndim < 2 or x.numel() == 0:
        raise ValueError(f"`input` should have shape (N, C, ...), not empty. Found {tuple(x.shape)}.")
    eps = number("eps", eps, above=0)
    var, mean = torch.var_mean(wide(x), (0, *range(2, x.ndim)), correction=0)
    return mean, (var + eps).sqrt()


def _corrections(
    mean: Tensor, std: Tensor, running_mean: Tensor, running_std: Tensor, rmax: float, dmax: float
) -> tuple[Tensor, Tensor]:
    """Return scale and shift of each channel, (C,)."""
    rmax, dmax = number("rmax", rmax, least=1), number("dmax", dmax, least=0)
    floating(running_mean=running_mean, running_std=running_std)
    for name, running in (("running_mean", running_mean), ("running_std", running_std)):
        if running.shape != mean.shape:
            raise ValueError(
                f"`{name}` should have one value for each of the {len(mean)} channels. Found {tuple(running.shape)}."
            )
    r = (std / running_std).clamp(1 / rmax, rmax)
    d = ((mean - running_mean) / running_std).clamp(-dmax, dmax)
    return stop_gradient((r, d), CORRECTIONS)


def _fused(x: Tensor, scale: Tensor, shift: Tensor, eps: float) -> Tensor:
    """Return the normalised batch, scaled and shifted, by torch's kernel, which takes a batch of one too."""
    cudnn = torch.backends.cudnn.enabled
    dtype = torch.promote_types(x.dtype, torch.float32)
    return torch.batch_norm(x, scale.to(dtype), shift.to(dtype), None, None, True, 0.0, float(eps), cudnn)


def _of_channels(x: Tensor, values: Tensor) -> tuple[int, ...]:
    """Return the shape in which a value of each channel broadcasts to the input."""
    floating(input=x)
    if x.ndim < 2 or values.shape != x.shape[1:2]:
        raise ValueError(f"`input` should have {len(values)} channels in dimension 1. Found {tuple(x.shape)}.")
    return (1, -1, *[1] * (x.ndim - 2))
