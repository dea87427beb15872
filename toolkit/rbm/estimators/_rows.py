"""Readers of a user's rows: an array, a tensor, a sparse matrix, a file, chunks.

Readers return dense blocks, in order or in a random order, and keep only one block or chunk in memory. Rows keep their
dtype, so that images of bytes do not become eight times as large.

N rows, D features, B rows of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from toolkit._checkpoint import fingerprint
from toolkit._data import Form, from_numpy, give_back_pages, is_chunked
from toolkit._run import generators_of

if TYPE_CHECKING:
    from sklearn.base import BaseEstimator

__all__ = ["Check", "Epoch", "Rows", "read_rows"]

# Bytes of a dense block, as float64.
_BLOCK_BYTES = 2**22

# The largest memory-mapped array, in bytes, that is read as an ordinary array.
_MAPPED = 2**26

# Dtypes of arrays that tensors have too; others become float64.
_KEPT = "?bBhilqfd"

Check = Callable[[Any], None]


@dataclass(frozen=True)
class _Dense:
    """Rows of a tensor, which can be read again and again; `_Sparse` and `_Chunked` have the same parts.

    Attributes:
        x: (N, D).
        streams: The generators that decide the order of the rows.
    """

    x: Tensor
    streams: tuple[torch.Generator, ...] = ()

    @property
    def n_rows(self) -> int:
        """N."""
        return len(self.x)

    @property
    def fingerprint(self) -> Callable[[], Any]:
        """A function that returns the fingerprint of all rows; None if they are not in memory."""
        return lambda: fingerprint(self.x)

    def blocks(self) -> Iterator[Tensor]:
        """Yield all rows in order, in blocks (B, D)."""
        yield from self.x.split(_block_length(self.x.shape[1], 1))

    def shuffled(self, generator: torch.Generator, batch_size: int) -> Iterator[Tensor]:
        """Yield all rows in a random order, in blocks of whole batches except for the last block of a chunk."""
        for where in _parts(self.n_rows, self.x.shape[1], generator, batch_size):
            yield self.x[where.to(self.x.device)]


@dataclass(frozen=True)
class _Sparse:
    x: sparse.csr_matrix
    streams: tuple[torch.Generator, ...] = ()

    @property
    def n_rows(self) -> int:
        return int(self.x.shape[0])

    @property
    def fingerprint(self) -> Callable[[], Any]:
        parts = attrgetter("data", "indices", "indptr")(self.x)
        return lambda: [fingerprint(from_numpy(part)) for part in parts]

    def blocks(self) -> Iterator[Tensor]:
        length = _block_length(self.x.shape[1], 1)
        for first in range(0, self.n_rows, length):
            yield from_numpy(self.x[first : first + length].toarray())

    def shuffled(self, generator: torch.Generator, batch_size: int) -> Iterator[Tensor]:
        for where in _parts(self.n_rows, self.x.shape[1], generator, batch_size):
            yield from_numpy(self.x[where.numpy()].toarray())


@dataclass(frozen=True)
class _Chunked:
    again: Callable[[torch.Generator | None], Iterator[_Dense | _Sparse]]
    n_rows: int
    streams: tuple[torch.Generator, ...]
    fingerprint: None = None

    def blocks(self) -> Iterator[Tensor]:
        for chunk in self.again(None):
            yield from chunk.blocks()

    def shuffled(self, generator: torch.Generator, batch_size: int) -> Iterator[Tensor]:
        for chunk in self.again(generator):
            yield from chunk.shuffled(generator, batch_size)


Rows: TypeAlias = _Dense | _Sparse | _Chunked


def read_rows(
    estimator: BaseEstimator, x: object, *, reset: bool, check: Check = lambda block: None, least: int = 1
) -> tuple[Rows, Form]:
    """Check all rows once; return a reader of the rows, and the form of results.

    Args:
        estimator: Stores the number and the names of the features, or provides them.
        x: (N, D): a tensor, an array, a sparse matrix, or any array-like of scikit-learn; or chunks that can be read
            again: matrices, or pairs and lists that begin with a matrix, such as a data loader's batches.
        reset: Whether to learn the features.
        check: Raises an error for values that are invalid for the estimator; called with tensors.
        least: The least number of rows.

    Raises:
        TypeError: If rows are complex, a sparse tensor, or chunks that can be read only once.
        ValueError: If there are too few rows, or rows have a wrong shape, other features, or values that are not finite
            or that `check` rejects.
    """
    if isinstance(x, np.memmap) and x.ndim == 2 and x.nbytes > _MAPPED:
        return _read_chunks(estimator, _pieces_of_file(x), reset=reset, check=check, least=least)
    if is_chunked(x):
        if hasattr(x, "__next__"):
            raise TypeError(
                "`X` should be chunks that can be read again for each epoch: a list, a DataLoader, or a function that "
                f"returns a new iterator. Found {type(x).__name__}."
            )
        source = x if callable(x) else lambda: iter(cast("Iterable[object]", x))
        streams = generators_of(x)
        return _read_chunks(estimator, lambda _: source(), reset=reset, check=check, least=least, streams=streams)
    return _read_matrix(estimator, x, reset=reset, check=check, least=least)


@dataclass(frozen=True)
class Epoch:
    """Rows in a new random order for each pass, in the coordinates of a machine.

    Attributes:
        rows: The rows.
        generator: Chooses the order.
        batch_size: Rows of a batch.
        to_machine: Function from a block of rows to a block of visible units.
    """

    rows: Rows
    generator: torch.Generator
    batch_size: int
    to_machine: Callable[[Tensor], Tensor]

    @property
    def streams(self) -> tuple[torch.Generator, ...]:
        """Further generators that decide the order of the rows."""
        return self.rows.streams

    @property
    def fingerprint(self) -> Callable[[], Any] | None:
        """A function that returns the fingerprint of all rows; None if they are not in memory."""
        return self.rows.fingerprint

    def __iter__(self) -> Iterator[Tensor]:
        """Yield blocks (B, D)."""
        return map(self.to_machine, self.rows.shuffled(self.generator, self.batch_size))


def _read_matrix(
    estimator: BaseEstimator, x: object, *, reset: bool, check: Check, least: int
) -> tuple[_Dense | _Sparse, Form]:
    from sklearn.utils.validation import validate_data

    rows: _Dense | _Sparse
    if isinstance(x, Tensor):
        if x.layout is not torch.strided or x.is_complex():
            raise TypeError(f"`X` should be a dense tensor of real numbers. Found {x.layout}, {x.dtype}.")
        if x.ndim != 2 or len(x) < least or x.shape[1] == 0:
            raise ValueError(f"`X` should have shape (N, D), at least ({least}, 1). Found {tuple(x.shape)}.")
        validate_data(estimator, x, reset=reset, skip_check_array=True)
        rows = _Dense(x)
        for block in rows.blocks() if x.is_floating_point() else ():
            if not bool(block.isfinite().all()):
                found = block[~block.isfinite()][0]
                raise ValueError(f"`X` should be finite. Found {float(found)}.")
        form = Form.of(x)
    else:
        array = validate_data(estimator, x, reset=reset, accept_sparse="csr", dtype="numeric", ensure_min_samples=least)
        form = Form.of(array)
        if array.dtype.char not in _KEPT:
            array = array.astype(np.float64)
        rows = _Sparse(array) if sparse.issparse(array) else _Dense(from_numpy(array))
    if isinstance(rows, _Sparse):
        check(from_numpy(np.array([rows.x.min(), rows.x.max()])))
    else:
        for block in rows.blocks():
            check(block)
    return rows, form


def _read_chunks(
    estimator: BaseEstimator,
    source: Callable[[torch.Generator | None], Iterator[object]],
    *,
    reset: bool,
    check: Check,
    least: int,
    streams: tuple[torch.Generator, ...] = (),
) -> tuple[_Chunked, Form]:
    form: Form | None = None
    learn = reset

    def again(generator: torch.Generator | None) -> Iterator[_Dense | _Sparse]:
        nonlocal form, learn
        for piece in source(generator):
            matrix: Any = piece[0] if isinstance(piece, list | tuple) else piece
            if hasattr(matrix, "__len__") and not sparse.issparse(matrix) and len(matrix) == 0:
                continue
            rows, found = _read_matrix(estimator, matrix, reset=learn, check=check, least=1)
            form, learn = form or found, False
            yield rows

    n_rows = sum(chunk.n_rows for chunk in again(None))
    if n_rows < least or form is None:
        raise ValueError(f"`X` should have at least {least} row{'s' * (least > 1)}. Found {n_rows} in all chunks.")
    return _Chunked(again, n_rows, streams), form


def _pieces_of_file(array: np.memmap[Any, Any]) -> Callable[[torch.Generator | None], Iterator[object]]:
    """Return an iterator over copies of parts of a file; it releases the file's pages, so that memory does not fill."""
    step = max(1, _BLOCK_BYTES // max(1, array[:1].nbytes))

    def pieces(generator: torch.Generator | None) -> Iterator[object]:
        starts = torch.arange(0, len(array), step, device="cpu")
        if generator is not None:
            starts = starts[torch.randperm(len(starts), generator=generator, device=generator.device).cpu()]
        for first in starts.tolist():
            yield np.array(array[first : first + step])
            give_back_pages(array)

    return pieces


def _block_length(n_features: int, multiple: int) -> int:
    """Return the number of rows of a dense block, a multiple of a batch."""
    return max(_BLOCK_BYTES // (8 * n_features * multiple), 1) * multiple


def _parts(n_rows: int, n_features: int, generator: torch.Generator, batch_size: int) -> Iterator[Tensor]:
    """Yield the indices of the rows of each block, in a random order."""
    order = torch.randperm(n_rows, generator=generator, device=generator.device).cpu()
    yield from order.split(_block_length(n_features, batch_size))
