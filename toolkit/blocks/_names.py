"""Blocks and their names: which are known, and how a name that a caller gives becomes a full one."""

from __future__ import annotations

import difflib
import threading
from dataclasses import dataclass

__all__ = ["Block", "full_name", "is_site", "known", "known_name", "lock", "register"]


@dataclass(frozen=True)
class Block:
    """A named place where the gradient is stopped. Made by `block`.

    Attributes:
        name: ``"<module>.<quantity>"``, for example ``"em.responsibilities"``.
        why: The reason to hold the quantity constant, in one sentence. Empty for an ad-hoc block.
    """

    name: str
    why: str


known: dict[str, Block] = {}
lock = threading.Lock()


def register(name: Block | str, prefix: str) -> str:
    """Return the full name, and make an ad-hoc block known."""
    full = full_name(name, prefix)
    if full not in known:
        with lock:
            known.setdefault(full, name if isinstance(name, Block) else Block(full, ""))
    return full


def full_name(name: Block | str, prefix: str) -> str:
    """Return the name with its prefix, which a declared block has not."""
    if isinstance(name, Block):
        return name.name
    if not isinstance(name, str) or not name:
        raise TypeError(f"`name` should be a Block or a non-empty string. Found {name!r}.")
    declared = known.get(name)
    return name if declared is not None and declared.why else prefix + name


def known_name(name: Block | str) -> str:
    """Return the name of a block that is known, or raise a ValueError with the close matches."""
    full = name.name if isinstance(name, Block) else name
    if not isinstance(full, str):
        raise TypeError(f"`name` should be a Block or a string. Found {type(full).__name__}.")
    if full in known or is_site(full):
        return full
    close = difflib.get_close_matches(full, known, n=3, cutoff=0.5)
    suggestion = f" Did you mean {' or '.join(repr(match) for match in close)}?" if close else ""
    raise ValueError(
        f"`name` should be a known block. Found {full!r}.{suggestion} "
        "(A declared block is known once its module is imported, an ad-hoc one once it has run.)"
    )


def is_site(name: str) -> bool:
    """Say whether a name is a place, ``file:line:column``."""
    parts = name.rsplit(":", 2)
    return len(parts) == 3 and parts[0] != "" and parts[1].isdigit() and parts[2].isdigit()
