"""Batches of data in memory, in a file, or given chunk by chunk.

An epoch goes through the chunks, and through the rows of each in a random order; rows that do not fill a batch wait for
the next chunk. Data in memory are one chunk. So memory holds at most one chunk and one batch, and data keep their type.

N rows in all, B rows of a chunk, C columns of the visible layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from toolkit._checkpoint import fingerprint
from toolkit._data import from_numpy, give_back_pages
from toolkit._distributed import exchange, raise_together, rank_of
from toolkit._run import generators_of
from toolkit.rbm.machine.model import RBM

__all__ = ["NO_ROWS", "Chunks", "Data", "batches", "check_data", "chunks_of"]

Data: TypeAlias = Tensor | np.ndarray[Any, Any] | Iterable[Any] | Callable[[], Iterable[Any]]

NO_ROWS = "`data` should have at least one row. Found none."

_CHUNK_BYTES = 2**21  # of a file at a time,
_BLOCK_BYTES = 2**16  # in pieces from all over it: neighbours in a file are often alike
_GATHERED = 2**17  # numbers of batches that are gathered together
_CHECKED_AT_ONCE = 2**18  # numbers: their copies in the machine's type stay small
_PLACES, _ROWS_AT_EACH = 64, 16  # all over a file, for its fingerprint


@dataclass(frozen=True, kw_only=True)
class Chunks:
    """Data as chunks.

    Attributes:
        read: Yields the chunks (B, C) of an epoch. A generator chooses their order, where there is a choice; the second
            argument says whether to check the values.
        n_rows: N; None if it is not known.
        streams: Further generators from which the source draws.
        fingerprint: Returns the fingerprint of the data, as JSON; None if it would take another pass over data that are
            not in memory.
    """

    read: Callable[[torch.Generator, bool], Iterator[Tensor]]
    n_rows: int | None
    streams: tuple[torch.Generator, ...] = ()
    fingerprint: Callable[[], Any] | None = None


def chunks_of(data: Data, rbm: RBM, *, n_rows: int | None = None, once: bool = False) -> Chunks:
    """Return data as chunks. Values in memory are checked here, others when they are first read.

    Args:
        data: As in `train`.
        rbm: The machine to train on the data.
        n_rows: N, if it is known.
        once: Whether there is only one epoch, so that an iterator is enough.

    Raises:
        TypeError: If `data` has none of the types of `train`, or can be read only once and has to be read more often.
        ValueError: If data in memory do not fit the machine, or do not have N rows.
    """
    if isinstance(data, np.memmap | np.ndarray | Tensor) and n_rows not in (None, len(data) if data.ndim else 0):
        raise ValueError(f"`n_rows` should be how many rows there are, or None. Found {n_rows}, and {len(data)} rows.")
    if isinstance(data, np.memmap):
        return _chunks_of_file(data, rbm)
    if isinstance(data, np.ndarray):
        data = _tensor_of(data)
    if isinstance(data, Tensor):
        tensor = data
        check_data(tensor, rbm)
        return Chunks(
            read=lambda order, check: iter([tensor]), n_rows=len(tensor), fingerprint=lambda: fingerprint(tensor)
        )
    source, n_rows = data, None if n_rows is None else int(n_rows)
    no_chunks = isinstance(source, str | bytes | Mapping) or hasattr(source, "toarray")
    if no_chunks or (not callable(source) and not isinstance(source, Iterable)):
        hint = " `toarray()` makes an array of it, or of some of its rows." if hasattr(source, "toarray") else ""
        raise TypeError(
            "`data` should be a tensor, an array, or give chunks: an iterable, or a function that returns one. "
            f"Found a {type(source).__name__}.{hint}"
        )
    if not once and not callable(source) and iter(source) is source:
        raise TypeError(
            "`data` should be something that can be read again for each epoch, such as a list or a DataLoader, unless "
            f"`epochs` is 1. Found a {type(source).__name__}, which can be read once."
        )
    sampler = getattr(source, "sampler", None)  # of a DataLoader: on several ranks it knows the part of this rank
    if n_rows is None and isinstance(sampler, Sized):
        n_rows, size = len(sampler), getattr(source, "batch_size", None)
        if getattr(source, "drop_last", False) and size:
            n_rows -= n_rows % size

    def read(order: torch.Generator, check: bool) -> Iterator[Tensor]:
        row = 0

        def looked_at(piece: Any) -> Tensor:
            nonlocal row
            rows = _rows_of(piece)
            check_data(rows, rbm, row, values=check)
            row += len(rows)
            return rows

        return map(looked_at, source() if callable(source) else source)  # which keeps no chunk that it has given

    return Chunks(
        read=read,
        n_rows=n_rows,
        streams=(torch.default_generator, *generators_of(source)),
        fingerprint=getattr(source, "fingerprint", None),  # of an estimator's rows
    )


def batches(
    chunks: Chunks, rbm: RBM, *, batch_size: int, order: torch.Generator, check: bool, group: ProcessGroup | None
) -> Iterator[tuple[Tensor, int]]:
    """Yield the batches of an epoch, each with the number of its rows on all ranks.

    All ranks yield the same number of batches. A rank with too few rows to fill its batches of a chunk spreads the rows
    over the batches, and a rank without rows yields empty batches.

    Args:
        chunks: This rank's data.
        rbm: The machine to train on the data.
        batch_size: The most rows of a batch, on each rank.
        order: Draws the order of chunks, and of the rows of each.
        check: Whether to check values that have not been checked in memory.
        group: The ranks.

    Raises:
        ValueError: If no rank has any rows, or a chunk does not fit the machine.
        RuntimeError: If another rank has raised.
    """
    reader = chunks.read(order, check)
    held = rbm.weights.new_empty(0, rbm.n_columns)
    # Small batches are gathered several at a time, which is faster.
    together = max(1, _GATHERED // (batch_size * rbm.n_columns))
    seen, ended = 0, False
    while not ended:
        chunk = where = error = None  # before the next one comes
        try:
            chunk = next(reader, None)
        except Exception as found:
            error = found
        n = len(held) if chunk is None else len(held) + len(chunk)
        ranks = exchange((n, chunk is None, error is not None), group, rbm.weights.device)
        if any(failed for _, _, failed in ranks):
            raise_together(error, group)
        ended = all(no_chunk for _, no_chunk, _ in ranks)
        most = max(n for n, _, _ in ranks)
        if ended and not most:
            break
        n_batches = -(-most // batch_size) if ended else most // batch_size
        if chunk is not None:
            where = torch.randperm(len(chunk), generator=order, device=order.device).to(chunk.device)
        taken = 0
        for first in range(0, n_batches, together):
            numbers = range(first, min(first + together, n_batches))
            sizes = [[_size(rows, number, n_batches, batch_size) for number in numbers] for rows, _, _ in ranks]
            own, all_ranks = sizes[rank_of(group)], list(map(sum, zip(*sizes, strict=True)))
            start, taken = taken, taken + sum(own)
            seen += sum(all_ranks)
            yield from zip(_take(held, chunk, where, start, taken).split(own), all_ranks, strict=True)
        held = _take(held, chunk, where, taken, n)
    if not seen:
        raise ValueError(NO_ROWS)


def check_data(rows: Tensor, rbm: RBM, start: int = 0, *, values: bool = True) -> None:
    """Raise unless these rows, counted from `start`, have the shape and the values of the machine's visible units.

    Args:
        rows: (B, C), of any real type. Zeros and ones may be probabilities in a floating-point type.
        rbm: The machine.
        start: Number of rows before these.
        values: Whether to check the values, in bounded memory.

    Raises:
        TypeError: If the numbers are complex.
        ValueError: If the shape or a value does not fit the machine.
    """
    if rows.layout is not torch.strided:
        raise TypeError(f"`data` should be a dense tensor. Found {rows.layout}.")
    _check_kind(rows.shape, rows.dtype, rbm)
    if not values or not len(rows) or (rows.dtype == torch.bool and rbm.visible_units != "categorical"):
        return
    for part in rows.split(max(1, _CHECKED_AT_ONCE // rbm.n_columns)):
        error = _error(part, rbm)
        if error is not None:
            row = next(i for i in range(len(part)) if _error(part[i : i + 1], rbm) is not None)
            raise ValueError(f"{_error(part[row : row + 1], rbm)} It is in row {start + row}.")
        start += len(part)


def _check_kind(shape: tuple[int, ...], dtype: torch.dtype, rbm: RBM) -> None:
    if len(shape) != 2 or shape[1] != rbm.n_columns:
        raise ValueError(f"`data` should have shape (N, {rbm.n_columns}). Found {tuple(shape)}.")
    if dtype.is_complex:
        raise TypeError(f"`data` should be real numbers. Found {dtype}.")


def _error(rows: Tensor, rbm: RBM) -> str | None:
    """Return the error in the values, or None if they are valid."""
    if rbm.visible_units == "bernoulli" and not rows.is_floating_point():
        low, high = (int(value) for value in rows.aminmax())
        if low >= 0 and high <= 1:
            return None
        return (
            f"`data` should be 0 or 1 if they are integers. Found {low if low < 0 else high}. Compare with a threshold "
            "(`data >= 128`), or divide by the largest value to have probabilities."
        )
    try:
        rbm.joint.visible.check(rows.to(rbm.weights), "data")
    except ValueError as error:
        return str(error)
    return None


def _size(n: int, number: int, n_batches: int, batch_size: int) -> int:
    """Return the number of n rows in a batch: `batch_size`, or a share of rows too few to fill the batches."""
    return batch_size if n >= n_batches * batch_size else n // n_batches + (number < n % n_batches)


def _take(held: Tensor, chunk: Tensor | None, where: Tensor | None, first: int, last: int) -> Tensor:
    """Return rows first..last-1 of those held followed by those of a chunk in their order."""
    n_held = len(held)
    if first == last:
        return held[:0]
    if chunk is None or where is None:
        return held[first:last]
    if first >= n_held:
        return chunk.index_select(0, where[first - n_held : last - n_held])
    return torch.cat([held[first:last], chunk.index_select(0, where[: max(0, last - n_held)])])


def _rows_of(piece: Any) -> Tensor:
    """Return the rows of a piece: an array or a tensor, alone or as the only part of a tuple."""
    if isinstance(piece, tuple | list) and len(piece) and isinstance(piece[0], Tensor | np.ndarray):
        if len(piece) > 1:
            raise ValueError(f"A chunk should be one array or tensor, without labels. Found {len(piece)} parts.")
        piece = piece[0]
    return _tensor_of(piece)


def _tensor_of(piece: Any) -> Tensor:
    """Return a piece, of any type, as a tensor."""
    try:
        return (
            from_numpy(piece)
            if isinstance(piece, np.ndarray)
            else torch.as_tensor(piece, device=getattr(piece, "device", "cpu"))
        )
    except (TypeError, ValueError, RuntimeError):
        kind = f"an array of {piece.dtype}" if isinstance(piece, np.ndarray) else f"a {type(piece).__name__}"
        raise TypeError(f"`data` should be numbers, or chunks of them. Found {kind}.") from None


def _chunks_of_file(array: np.memmap[Any, Any], rbm: RBM) -> Chunks:
    """Return the chunks of a file, each made of blocks from all over the file, whose pages are given back."""
    dtype = array.dtype.newbyteorder("=")
    _check_kind(array.shape, _tensor_of(np.empty(0, dtype)).dtype, rbm)
    n_rows, row_bytes = len(array), array.itemsize * rbm.n_columns
    length = max(1, _BLOCK_BYTES // row_bytes)
    n_blocks, together = -(-n_rows // length), max(1, _CHUNK_BYTES // (length * row_bytes))

    def chunk(blocks: list[int], check: bool) -> Tensor:
        sizes = [min(length, n_rows - block * length) for block in blocks]
        rows = torch.from_numpy(np.empty((sum(sizes), rbm.n_columns), dtype))
        for block, part in zip(blocks, rows.split(sizes), strict=True):
            np.copyto(part.numpy(), array[block * length : block * length + len(part)])
            give_back_pages(array)
            check_data(part, rbm, block * length, values=check)
        return rows

    def read(order: torch.Generator, check: bool) -> Iterator[Tensor]:
        blocks = torch.randperm(n_blocks, generator=order, device=order.device).tolist()
        return (chunk(blocks[first : first + together], check) for first in range(0, n_blocks, together))

    def known() -> list[Any]:
        rows = []
        for place in range(_PLACES):
            first = max(0, n_rows - _ROWS_AT_EACH) * place // (_PLACES - 1)
            rows.append(np.array(array[first : first + _ROWS_AT_EACH]))
            give_back_pages(array)
        return [n_rows, fingerprint(from_numpy(np.concatenate(rows)))]

    return Chunks(read=read, n_rows=n_rows, fingerprint=known)
