"""Data sets: bundled real ones, synthetic ones whose truth is known exactly, and a user's own files.

N samples, D features.
"""

from __future__ import annotations

import gzip
import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["Dataset", "bars_and_stripes", "digits", "idx", "iris", "mnist", "mnist_files", "two_gaussians", "wine"]

# The third byte of an IDX file says what its numbers are, the highest byte of each first.
_IDX_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


@dataclass(frozen=True)
class Dataset:
    """Inputs and labels of one data set.

    Attributes:
        inputs: (N, D), floating point; as the file has them, where they come from a user's file.
        labels: (N,), int64; which class or component each sample comes from.
        name: What to call it in a table.
    """

    inputs: Tensor
    labels: Tensor
    name: str


def iris(*, dtype: torch.dtype = torch.float64) -> Dataset:
    """Return Fisher's iris: 150 flowers, 4 lengths in centimetres, 3 species."""
    return _bundled("load_iris", "iris", dtype)


def wine(*, dtype: torch.dtype = torch.float64) -> Dataset:
    """Return the wine data: 178 wines, 13 chemical measurements in their original units, 3 cultivars."""
    return _bundled("load_wine", "wine", dtype)


def digits(*, dtype: torch.dtype = torch.float64) -> Dataset:
    """Return the handwritten digits: 1797 images of 8 x 8, flattened to 64 and scaled from 0..16 to [0, 1]."""
    raw = _bundled("load_digits", "digits", dtype)
    return Dataset(raw.inputs / 16, raw.labels, raw.name)


def bars_and_stripes(side: int, *, dtype: torch.dtype = torch.float64) -> Dataset:
    """Return every distinct image of `side` x `side` whose rows are constant, or whose columns are.

    There are ``2 * 2**side - 2`` (the empty and the full image are both), so the best log-likelihood of a model of
    them is ``-log(2 * 2**side - 2)`` nats per image (MacKay 2003, section 43.2).

    Returns:
        Inputs (2^(side+1) - 2, side^2) of zeros and ones; label 0 for rows and 1 for columns.

    Raises:
        ValueError: If `side` is not between 2 and 12.
    """
    if not 2 <= side <= 12:
        raise ValueError(f"`side` should be between 2 and 12. Found {side}.")
    codes = (torch.arange(2**side)[:, None] >> torch.arange(side)) & 1
    rows = codes[:, :, None].expand(-1, side, side).reshape(-1, side**2)
    columns = codes[1:-1, None, :].expand(-1, side, side).reshape(-1, side**2)
    labels = torch.cat([torch.zeros(len(rows)), torch.ones(len(columns))]).long()
    return Dataset(torch.cat([rows, columns]).to(dtype), labels, f"bars and stripes {side}x{side}")


def two_gaussians(
    n_samples: int,
    *,
    separation: float,
    n_features: int = 2,
    generator: torch.Generator,
    dtype: torch.dtype = torch.float64,
) -> Dataset:
    """Draw from two equally likely unit Gaussians whose means lie `separation` apart on the first axis.

    Raises:
        ValueError: If `n_samples` or `n_features` is not positive.
    """
    for argument, value in (("n_samples", n_samples), ("n_features", n_features)):
        if value < 1:
            raise ValueError(f"`{argument}` should be a positive integer. Found {value}.")
    labels = torch.randint(2, (n_samples,), generator=generator)
    inputs = torch.randn(n_samples, n_features, generator=generator, dtype=dtype)
    inputs[:, 0] += separation * (labels.to(dtype) - 0.5)
    return Dataset(inputs, labels, f"two Gaussians, separation {separation:g}")


def idx(path: str | Path) -> Tensor:
    """Return the array of an IDX file, the format of MNIST.

    Numbers are of the type that the file has. Where they are bytes and the file is not compressed they stay on the
    disk: the file is mapped into memory, privately, so that a change in place changes no file and only what is read
    takes memory. A file that is named ``*.gz`` is unpacked into memory.

    Args:
        path: The file.

    Returns:
        A tensor with the dimensions of the file: (N, 28, 28) uint8 for the images of MNIST, (N,) for its labels.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is no IDX file, is cut off, or has bytes left over.

    References:
        LeCun, Cortes & Burges, "The MNIST database of handwritten digits", 1998, section "File formats".

    Example:
        >>> import tempfile
        >>> with tempfile.NamedTemporaryFile() as file:
        ...     _ = file.write(bytes([0, 0, 0x0B, 1, 0, 0, 0, 2, 0, 1, 255, 255])), file.flush()
        ...     idx(file.name)
        tensor([ 1, -1], dtype=torch.int16)
    """
    path = Path(path)
    packed = path.suffix == ".gz"
    content: Any = _unpacked(path) if packed else _mapped(path)
    head = bytes(content[:4])
    if len(head) < 4 or head[:2] != b"\0\0" or head[2] not in _IDX_TYPES:
        raise ValueError(
            f"`{path}` should be an IDX file: two bytes 0, then the type of its numbers, one of "
            f"{', '.join(f'0x{code:02x}' for code in _IDX_TYPES)}. Found 0x{head.hex() or '(nothing)'}."
        )
    dtype, first = np.dtype(_IDX_TYPES[head[2]]), 4 + 4 * head[3]
    if len(content) < first:
        raise ValueError(
            f"`{path}` should have {first} bytes of sizes, for {head[3]} dimensions. Found {len(content)} bytes."
        )
    shape = tuple(int(size) for size in np.frombuffer(bytes(content[4:first]), ">u4"))
    expected = first + dtype.itemsize * math.prod(shape)
    if len(content) != expected:
        wrong = "is cut off" if len(content) < expected else "has bytes left over"
        raise ValueError(
            f"`{path}` should have {expected} bytes, for {dtype.name} of sizes {shape}. Found "
            f"{len(content)}: it {wrong}."
        )
    numbers = np.frombuffer(content, dtype, offset=first) if packed else content[first:].view(dtype)
    # Bytes have no order, so that this copies nothing where there is nothing to turn round.
    return torch.from_numpy(numbers.astype(dtype.newbyteorder("="), copy=False).reshape(shape))


def mnist(directory: str | Path, *, train: bool = True) -> Dataset:
    """Return images and labels from the four IDX files of MNIST, or of data in its form such as Fashion-MNIST.

    Args:
        directory: Where the files are, by the names they were published under: ``train-images-idx3-ubyte`` and so on.
            They may end in ``.gz``, and have a dot before ``idx``.
        train: Whether to read the training set rather than the test set (``t10k-...``).

    Returns:
        Inputs (N, D) as the file has them, for MNIST uint8 from 0 to 255, mapped into memory as in `idx`; labels (N,),
        int64.

    Raises:
        FileNotFoundError: If a file is missing.
        ValueError: As `idx`, or if there are no images, they have no dimensions beside their number, or there are not
            as many labels as images.
    """
    images_file, labels_file = mnist_files(directory, train=train)
    images, labels = idx(images_file), idx(labels_file)
    if images.ndim < 2 or not images.numel():
        raise ValueError(f"`{images_file}` should have images, (N, ...). Found sizes {tuple(images.shape)}.")
    if labels.shape != images.shape[:1]:
        raise ValueError(
            f"`{labels_file}` should have {len(images)} labels, one an image. Found sizes {tuple(labels.shape)}."
        )
    return Dataset(images.flatten(1), labels.long(), Path(directory).name)


def mnist_files(directory: str | Path, *, train: bool = True) -> tuple[Path, Path]:
    """Return the files that `mnist` would read: the images and the labels.

    Raises:
        FileNotFoundError: If one of them is missing.
    """
    part, found = "train" if train else "t10k", []
    for kind in ("images-idx3", "labels-idx1"):
        names = [
            f"{part}-{form}-ubyte{packed}" for form in (kind, kind.replace("-idx", ".idx")) for packed in ("", ".gz")
        ]
        paths = [path for name in names if (path := Path(directory, name)).is_file()]
        if not paths:
            raise FileNotFoundError(f"`{directory}` should have a file {names[0]}, or {names[0]}.gz. Found neither.")
        found.append(paths[0])
    return found[0], found[1]


def _mapped(path: Path) -> Any:
    if not path.stat().st_size:  # which cannot be mapped
        return np.empty(0, np.uint8)
    # Copy on write: torch knows no arrays that must not be written to.
    return np.memmap(path, np.uint8, mode="c")


def _unpacked(path: Path) -> bytearray:
    try:
        with gzip.open(path) as file:
            return bytearray(file.read())
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"`{path}` should be a whole gzip file. Found otherwise: {error}") from error


def _bundled(loader: str, name: str, dtype: torch.dtype) -> Dataset:
    import sklearn.datasets

    load: Callable[..., Any] = getattr(sklearn.datasets, loader)
    inputs, labels = load(return_X_y=True)
    return Dataset(torch.from_numpy(inputs).to(dtype), torch.from_numpy(labels).long(), name)
