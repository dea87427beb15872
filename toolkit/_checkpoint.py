"""Checkpoints: one file with the whole state of training, which is complete or not there at all.

It is a safetensors file: tensors by name (``parameters.<name>``, ``average.<name>`` for a mean of the parameters,
``rank<r>.<name>`` for the tensors of one rank), and all else as JSON in the metadata, under the name of the room that
wrote it.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from toolkit.blocks import no_graph

__all__ = ["alike", "as_json", "fingerprint", "read_checkpoint", "write_checkpoint"]

_FORMAT = 4

_PIECE_BYTES = 2**20  # of rows that are looked at together
_SEED = 2718281828  # of weights; from a seed such as 0 data are drawn, too, and the signs have to know nothing of them


def fingerprint(rows: Tensor, *, most: int = 2**28) -> dict[str, Any]:
    r"""Return the fingerprint of rows, as JSON, for `alike`: of all rows, or of some from all over if there are many.

    For floating-point rows it holds their type, their shape, the places of entries that are not finite, and two sums
    :math:`\sum_i w_i x_i` over all entries. The weights, :math:`1/2 \le |w_i| \le 1` of either sign, are drawn from a
    fixed seed: a changed entry moves both sums by half of its change or more, and rows that change places move them,
    too. Rows of another type are hashed.

    Args:
        rows: (N, *), on any device.
        most: The most bytes to read, if a row has no more.
    """
    length = max(1, rows[:1].numel() * rows.element_size())
    chosen = rows[:: max(1, -(-len(rows) * length // most))]
    exact = hashlib.blake2b(f"{rows.dtype} {tuple(rows.shape)}".encode(), digest_size=16)
    generator = torch.Generator().manual_seed(_SEED)
    sums, norm = torch.zeros(2, dtype=torch.float64, device="cpu"), 0.0
    with no_graph():
        for number, piece in enumerate(chosen.split(max(1, _PIECE_BYTES // length))):
            own = piece.cpu().contiguous()
            if not rows.is_floating_point():
                exact.update(own.view(torch.uint8).numpy())
                continue
            x = own.to(torch.float64).flatten()
            if not x.isfinite().all():  # which NaN it is depends on the processor
                kinds = x.masked_fill(x.isfinite(), 0).nan_to_num(2, 1, -1).to(torch.int8)
                exact.update(b"%d " % number + kinds.numpy().tobytes())
                x = x.nan_to_num(0, 0, 0)
            weights = torch.rand(2, len(x), generator=generator, dtype=torch.float64, device="cpu")
            weights.add_(weights.round()).sub_(1)
            sums += weights.mul_(x).sum(1)
            norm = math.hypot(norm, torch.linalg.vector_norm(x).item())
    if not rows.is_floating_point():
        return {"exact": exact.hexdigest(), "sums": [], "within": 0.0}
    return {"exact": exact.hexdigest(), "sums": sums.tolist(), "within": _rounding(rows.dtype) * norm}


def as_json(value: Any) -> Any:
    """Return a setting as JSON, to compare by `alike`; a small tensor with its values, so that they can be read."""
    if isinstance(value, Tensor):
        return fingerprint(value) | ({"values": value.tolist()} if value.numel() <= 100 else {})
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, tuple):
        return list(value)
    return value if isinstance(value, int | float | str | list | None) else str(value)


def alike(a: Any, b: Any) -> bool:
    """Return whether two JSON values are equal up to rounding: fingerprints, numbers, and containers of both.

    All other values, integers too, have to be equal.
    """
    if isinstance(a, float) and isinstance(b, float):
        return a == b or math.isclose(a, b, rel_tol=_rounding(torch.float64))
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(alike, a, b))
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        if "within" not in a:
            return all(alike(a[name], b[name]) for name in a)
        within = max(a["within"], b["within"])
        return a["exact"] == b["exact"] and all(
            x == y or abs(x - y) <= within < math.inf for x, y in zip(a["sums"], b["sums"], strict=True)
        )
    return bool(a == b)


def _rounding(dtype: torch.dtype) -> float:
    r"""Return the greatest change of a fingerprint's sum by rounding, in units of the norm of the data.

    Changes of up to 16 ulps in every entry, one of the last operation and some of matrix products before it, have at
    most :math:`16 \epsilon` times the norm of the data. With weights of random sign, none above 1, a sum moves by more
    than 8 times the norm of the changes with a probability below :math:`2 e^{-8^2/2} < 10^{-13}` (Hoeffding). How its
    own terms are added, in double precision, moves it by less. Numbers in half precision are results in single
    precision, rounded: an ulp of these takes a share of :math:`\epsilon_{32} / \epsilon` of all entries to a neighbour,
    by :math:`\epsilon`, which makes a norm of :math:`\sqrt{\epsilon_{32} \epsilon}`.
    """
    eps = torch.finfo(dtype).eps
    return 8 * 16 * math.sqrt(eps * min(eps, torch.finfo(torch.float32).eps))


def write_checkpoint(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any], *, room: str) -> None:
    """Replace a checkpoint by a new one; a process that is killed leaves the old one or the new one, complete.

    Args:
        path: The file. While it is written, a file whose name ends with ``.unfinished`` stands beside it.
        tensors: Tensors by name.
        facts: All other state, as JSON.
        room: The part of this library that trains, such as ``"rbm"``.
    """
    unfinished = path.with_name(f"{path.name}.unfinished")
    with no_graph():
        own = {name: tensor.to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    save_file(own, unfinished, metadata={f"toolkit.{room}": json.dumps({"format": _FORMAT, **facts})})
    with unfinished.open("r+b") as file:  # Windows writes out no file that is open for reading alone
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
        raise ValueError(f"{expected}, which is not a safetensors file: {error}.") from None
