"""Checkpoints: one file that holds all that training depends on, and is whole or not there at all.

It is a safetensors file: tensors by name (``parameters.<name>``, ``average.<name>`` of the mean of parameters if one is
kept, ``rank<r>.<name>`` of what each rank has of its own), and all else as JSON in the metadata, under the name of the
room that wrote it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from toolkit.blocks import no_graph

__all__ = ["fingerprint", "read_checkpoint", "write_checkpoint"]

_FORMAT = 2

_PIECE_BYTES = 2**20  # of rows that are hashed at a time


def fingerprint(rows: Tensor, *, most: int = 2**28) -> str:
    """Return a hash of the type, the shape, and all bytes of rows, or of rows from all over if there are too many.

    Args:
        rows: (N, *), on any device.
        most: The most bytes that are looked at, if a row has no more.
    """
    length = max(1, rows[:1].numel() * rows.element_size())
    chosen = rows[:: max(1, -(-len(rows) * length // most))]
    found = hashlib.blake2b(f"{rows.dtype} {tuple(rows.shape)}".encode(), digest_size=16)
    with no_graph():
        for piece in chosen.split(max(1, _PIECE_BYTES // length)):
            found.update(piece.cpu().contiguous().view(torch.uint8).numpy())
    return found.hexdigest()


def write_checkpoint(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any], *, room: str) -> None:
    """Write a checkpoint in the place of the one before; a process that is killed leaves that one or this one.

    Args:
        path: The file. Beside it, for a moment, stands one whose name ends with ``.unfinished``.
        tensors: By name.
        facts: What else there is to know, as JSON.
        room: Who trains: a part of this library, such as ``"rbm"``.
    """
    unfinished = path.with_name(f"{path.name}.unfinished")
    with no_graph():
        own = {name: tensor.to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    save_file(own, unfinished, metadata={f"toolkit.{room}": json.dumps({"format": _FORMAT, **facts})})
    with unfinished.open("rb") as file:
        os.fsync(file.fileno())
    unfinished.replace(path)
    if os.name == "posix":  # the name is data of the folder
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def read_checkpoint(path: Path, *, room: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and the facts of a checkpoint.

    Args:
        path: The file.
        room: As in `write_checkpoint`.

    Raises:
        ValueError: If the file is not a checkpoint of this format.
    """
    expected = f"`checkpoint` should be a file that `train` wrote, or a new one. Found {path}"
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            if f"toolkit.{room}" not in metadata:
                raise ValueError(f"{expected}, a safetensors file of something else.")
            facts = json.loads(metadata[f"toolkit.{room}"])
            if facts.pop("format", None) != _FORMAT:
                raise ValueError(f"{expected}, of another version of this library.")
            return {name: file.get_tensor(name) for name in file.keys()}, facts  # noqa: SIM118 - it is not a dict
    except SafetensorError as error:
        raise ValueError(f"{expected}, which is none: {error}.") from None
