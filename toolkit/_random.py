"""The source of random numbers: one meaning of `generator` in every room."""

from __future__ import annotations

from typing import Any

import torch

from toolkit._checks import index

__all__ = ["check_generator", "device_of", "own_generator", "seeded_generator", "starts_at_random"]


def own_generator(generator: torch.Generator | None) -> torch.Generator:
    """Return the generator to draw from.

    None: a new one, whose seed is drawn from torch's global generator. `torch.manual_seed` then decides, every call
    draws anew, and a function that restores the global random state after it ran a model still moves it on.

    Raises:
        TypeError: If `generator` is anything else.
    """
    if generator is None:
        return torch.Generator().manual_seed(int(torch.randint(2**62, (), device="cpu")))
    check_generator(generator)
    return generator


def check_generator(generator: object) -> None:
    """Raise a TypeError unless `generator` is a torch.Generator or None."""
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(f"`generator` should be a torch.Generator, or None. Found {type(generator).__name__}.")


def device_of(generator: torch.Generator | None, like: Any) -> torch.device:
    """Return the device on which random numbers are drawn: that of the generator, or of a tensor or an array."""
    check_generator(generator)
    found: torch.device = like.device if generator is None else generator.device
    return found


def seeded_generator(generator: torch.Generator | int | None) -> torch.Generator:
    """Return the generator to draw from, a new one for an integer, for functions whose default is a seed."""
    seed = index(generator)
    return own_generator(generator) if seed is None else torch.Generator().manual_seed(seed)  # type: ignore[arg-type]


def starts_at_random(random_start: bool | None, generator: torch.Generator | None, restarts: int = 1) -> bool:
    """Return `random_start` if given, else whether there are several restarts or a generator.

    Raises:
        ValueError: If several restarts would all start at the same point.
    """
    if random_start is False and restarts > 1:
        raise ValueError(
            "`random_start` should be True for several restarts, which else would be the same. Found False."
        )
    return generator is not None or restarts > 1 if random_start is None else random_start
