"""Batches of images and labels for the trainer: from memory, or from an iterable that gives them.

N samples, each of shape (...), B of them in a batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from toolkit._checkpoint import fingerprint
from toolkit._distributed import rank_of, world_of
from toolkit._run import generators_of, seed_of
from toolkit.adversarial._classes import check_classes
from toolkit.adversarial.training.methods import BallArguments
from toolkit.blocks import constants

__all__ = ["Batches", "Part", "as_input", "batches_of", "check_scale", "pair_of"]

# Called with the first inputs and labels of an epoch, as they come.
First = Callable[[Tensor, Tensor], None]


@dataclass(frozen=True)
class Part:
    """The rows of a batch on this rank.

    Attributes:
        x: Inputs, (B, ...).
        labels: Labels, (B,).
        total: Number of rows of the joined batch; rank r has the rows r, r + ranks, r + 2 ranks and so on. None:
            unknown, because each rank has its own batches.
        ends: The least and the greatest label, of the batch or of all data; empty if the labels were not read.
    """

    x: Tensor
    labels: Tensor
    total: int | None
    ends: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Batches:
    """The batches of an epoch, which can be read once more from the same seed.

    Attributes:
        read: Yields the batches in the order that a generator chooses. The first one of data not in memory is passed to
            its second argument.
        n_batches: Number of batches of an epoch.
        streams: Further generators from which the source draws.
        known: Fingerprint of the data. None: the data are not in memory.
    """

    read: Callable[[torch.Generator, First], Iterator[Part]]
    n_batches: int
    streams: tuple[torch.Generator, ...]
    known: list[dict[str, Any]] | None


def batches_of(
    data: object,
    labels: Tensor | None,
    *,
    batch_size: int,
    model: nn.Module,
    ball: BallArguments,
    augment: Callable[..., Tensor] | None,
    group: ProcessGroup | None,
    noted: bool,
) -> Batches:
    """Return the batches of the data of `train`, whose arguments these are; `noted` data get a fingerprint.

    Raises:
        TypeError: If `data` has none of the types of `train`.
        ValueError: If there is not one label per sample, there are no samples, or not one for each rank, or bytes come
            with the ball of inputs to 255.
    """
    pair = pair_of(data, labels)
    if pair is not None:
        check_scale("data", pair[0], ball, augment)
        known = [fingerprint(part) for part in pair] if noted else None
        return _in_memory(*pair, batch_size=batch_size, model=model, augment=augment, group=group, known=known)
    if isinstance(data, str | bytes | dict | np.ndarray) or not isinstance(data, Iterable):
        raise TypeError(
            "`data` should be a tensor with `labels`, a Dataset, or an iterable of batches (inputs, labels). "
            f"Found {type(data).__name__}."
        )
    if labels is not None:
        raise TypeError("`labels` should be None where `data` gives batches of inputs and labels. Found a tensor.")
    if not isinstance(data, Sized) or hasattr(data, "__next__"):
        raise TypeError(
            "`data` should know how many batches it has, and give them anew for every epoch, as a list or a DataLoader "
            f"does. Found {type(data).__name__}."
        )
    n_batches = len(data)
    if n_batches == 0:
        raise ValueError("`data` should have at least one batch. Found none.")
    return Batches(
        read=lambda order, first: _from_iterable(data, order, first, model, ball, augment, group),
        n_batches=n_batches,
        streams=generators_of(data),
        known=None,
    )


def pair_of(data: object, labels: object) -> tuple[Tensor, Tensor] | None:
    """Return inputs and labels if they are in memory, else None.

    Raises:
        TypeError: If inputs or labels in memory have another type.
        ValueError: If there are no samples or not one label for each.
    """
    if labels is None and isinstance(getattr(data, "inputs", None), Tensor):
        data, labels = getattr(data, "inputs"), getattr(data, "labels", None)  # noqa: B009 - of any type
    if isinstance(data, tuple) and len(data) == 2 and labels is None and all(isinstance(d, Tensor) for d in data):
        data, labels = data
    if not isinstance(data, Tensor):
        return None
    if not (data.is_floating_point() or data.dtype == torch.uint8):
        raise TypeError(f"`data` should be floating point, or bytes from 0 to 255 (uint8). Found {data.dtype}.")
    if data.dim() < 2 or len(data) == 0:
        raise ValueError(f"`data` should have shape (N, ...) with at least one sample. Found {tuple(data.shape)}.")
    return data, check_classes("labels", labels, len(data))


def check_scale(name: str, inputs: Tensor, ball: BallArguments, augment: Callable[..., Tensor] | None = None) -> None:
    """Raise ValueError if inputs are bytes, which are scaled to [0, 1], but the ball is in units of 0 to 255.

    The inputs that `augment` returns may have another scale.
    """
    if inputs.dtype != torch.uint8 or augment is not None:
        return
    if ball["norm"] == "linf" and torch.as_tensor(ball["epsilon"]).amax() > 1:
        raise ValueError(
            f"`epsilon` should be at most 1 where `{name}` is bytes, which are divided by 255: give the radius in "
            f"these units, as 8 / 255. Found {ball['epsilon']!r}."
        )
    upper = ball["bounds"][1] if isinstance(ball["bounds"], tuple) and len(ball["bounds"]) == 2 else 1
    if isinstance(upper, int | float | Tensor) and (torch.as_tensor(upper) == 255).any():
        raise ValueError(
            f"`bounds` should be (0, 1) where `{name}` is bytes, which are divided by 255, and `epsilon` in these "
            f"units, as 8 / 255. Found {ball['bounds']!r}."
        )


def as_input(raw: Tensor, model: nn.Module) -> Tensor:
    """Return raw inputs as the model takes them: constants in its dtype and on its device, bytes divided by 255."""
    raw = constants(raw)
    parameter = next((p for p in model.parameters() if p.is_floating_point()), None)
    device = raw.device if parameter is None else parameter.device
    dtype = torch.get_default_dtype() if parameter is None else parameter.dtype
    scaled = raw.to(device)
    return scaled.to(dtype).div_(255) if raw.dtype == torch.uint8 else scaled.to(dtype)


def _in_memory(
    inputs: Tensor,
    labels: Tensor,
    *,
    batch_size: int,
    model: nn.Module,
    augment: Callable[..., Tensor] | None,
    group: ProcessGroup | None,
    known: list[dict[str, Any]] | None,
) -> Batches:
    rank, world = rank_of(group), world_of(group)
    n_batches = -(-len(inputs) // batch_size)
    ends = int(labels.min()), int(labels.max())
    if len(inputs) // n_batches < world:
        raise ValueError(
            f"`batch_size` should leave a row of every batch to each of {world} ranks. "
            f"Found {n_batches} batches of {len(inputs)} rows."
        )
    last = torch.channels_last
    layout = (
        last
        if inputs.dim() == 4 and inputs.is_contiguous(memory_format=last) and not inputs.is_contiguous()
        else torch.preserve_format
    )

    def read(order: torch.Generator, _: First) -> Iterator[Part]:
        rows = torch.randperm(len(inputs), generator=order, device=order.device)
        seeds = [seed_of(order) for _ in range(n_batches)]
        # Batches of nearly equal sizes: a last one of a few rows would be a noisy step as long as the others.
        for chosen, seed in zip(rows.tensor_split(n_batches), seeds, strict=True):
            total, own = len(chosen), slice(rank, None, world)
            chosen = chosen.to(inputs.device)
            # The draws for a row must not depend on its rank, so every rank augments all rows.
            x = as_input(constants(inputs)[chosen if augment is not None else chosen[own]], model)
            if augment is not None:
                x = augment(x, generator=torch.Generator(order.device).manual_seed(seed))[own]
            y = labels[chosen[own].to(labels.device)].to(x.device).long()
            yield Part(x.contiguous(memory_format=layout) if layout is last else x, y, total, ends)

    return Batches(read=read, n_batches=n_batches, streams=(), known=known)


def _from_iterable(
    source: Iterable[Any],
    order: torch.Generator,
    first: First,
    model: nn.Module,
    ball: BallArguments,
    augment: Callable[..., Tensor] | None,
    group: ProcessGroup | None,
) -> Iterator[Part]:
    """Yield the batches of an iterable. Torch's global generator gets a new seed for each batch."""
    torch.default_generator.manual_seed(seed_of(order))
    reader = iter(source)
    for number in itertools.count():
        seed = seed_of(order)
        torch.default_generator.manual_seed(seed)
        batch = next(reader, None)
        if batch is None:
            return
        x, labels = _pair_of_batch(batch)
        if not number:
            first(x, labels)
        check_scale("data", x, ball, augment)
        # Reading labels on a device waits for the device, so it happens once an epoch.
        ends = (int(labels.min()), int(labels.max())) if labels.device.type == "cpu" or not number else ()
        x = as_input(x, model)
        if augment is not None:
            x = augment(x, generator=torch.Generator(order.device).manual_seed(seed + rank_of(group)))
        yield Part(x, labels.to(x.device).long(), len(x) if group is None else None, ends)


def _pair_of_batch(batch: object) -> tuple[Tensor, Tensor]:
    if isinstance(batch, tuple | list) and len(batch) == 2:
        pair = pair_of(batch[0], batch[1])
        if pair is not None:
            return pair
    raise TypeError(f"`data` should give batches (inputs, labels), a pair of tensors. Found {type(batch).__name__}.")
