"""Data sets: bundled real data, synthetic data of known distribution, and a user's own files.

N samples, D features.
"""

from __future__ import annotations

import gzip
import lzma
import math
import mmap
import tarfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from toolkit._checks import instance, integer, number

__all__ = [
    "Dataset",
    "bars_and_stripes",
    "cifar10",
    "cifar100",
    "digits",
    "idx",
    "iris",
    "mnist",
    "mnist_files",
    "two_gaussians",
    "wine",
]

# The third byte of an IDX file is the dtype of its numbers, which are big-endian.
_IDX_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


@dataclass(frozen=True)
class Dataset:
    """Inputs and labels of one data set.

    Attributes:
        inputs: (N, D), floating point; in the file's dtype for a user's file.
        labels: (N,), int64; the class or component of each sample.
        name: Name in tables.
        classes: The names of the classes, by label; empty if the source has no names.
    """

    inputs: Tensor
    labels: Tensor
    name: str
    classes: tuple[str, ...] = ()


def iris(*, dtype: torch.dtype = torch.float64) -> Dataset:
    """Return Fisher's iris: 150 flowers, 4 lengths in centimetres, 3 species.

    Example:
        >>> iris().inputs.shape
        torch.Size([150, 4])
    """
    return _bundled("load_iris", "iris", dtype)


def wine(*, dtype: torch.dtype = torch.float64) -> Dataset:
    """Return the wine data: 178 wines, 13 chemical measurements in their original units, 3 cultivars.

    Example:
        >>> wine().inputs.shape
        torch.Size([178, 13])
    """
    return _bundled("load_wine", "wine", dtype)


def digits(*, dtype: torch.dtype = torch.float64) -> Dataset:
    """Return the handwritten digits: 1797 images of 8 x 8, flattened to 64 and scaled from 0..16 to [0, 1].

    Example:
        >>> digits().inputs.shape, digits().inputs.amax()
        (torch.Size([1797, 64]), tensor(1., dtype=torch.float64))
    """
    raw = _bundled("load_digits", "digits", dtype)
    return Dataset(raw.inputs / 16, raw.labels, raw.name)


def bars_and_stripes(side: int, *, dtype: torch.dtype = torch.float64) -> Dataset:
    """Return every distinct image of `side` x `side` pixels with constant rows or constant columns.

    There are ``2 * 2**side - 2`` images, because the empty and the full image belong to both kinds. The best
    log-likelihood of a model of these images is therefore ``-log(2 * 2**side - 2)`` nats per image (MacKay 2003,
    section 43.2).

    Returns:
        Inputs (2^(side+1) - 2, side^2) of zeros and ones; label 0 for rows and 1 for columns.

    Raises:
        ValueError: If `side` is not between 2 and 12.

    Example:
        >>> bars_and_stripes(2, dtype=torch.float32).inputs[1:3]  # the two images with one full row
        tensor([[1., 1., 0., 0.],
                [0., 0., 1., 1.]])
    """
    side = integer("side", side, 2, 12)
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
    generator: torch.Generator | None,
    dtype: torch.dtype = torch.float64,
) -> Dataset:
    """Draw from two equally likely unit Gaussians with means `separation` apart on the first axis.

    Raises:
        ValueError: If `n_samples` or `n_features` is not positive.

    Example:
        >>> data = two_gaussians(1000, separation=6.0, generator=torch.Generator().manual_seed(0))
        >>> [round(data.inputs[data.labels == label, 0].mean().item()) for label in (0, 1)]
        [-3, 3]
    """
    n_samples, n_features = integer("n_samples", n_samples), integer("n_features", n_features)
    separation = number("separation", separation)
    if generator is not None:
        instance("generator", generator, torch.Generator)
    device = None if generator is None else generator.device
    labels = torch.randint(2, (n_samples,), generator=generator, device=device)
    inputs = torch.randn(n_samples, n_features, generator=generator, dtype=dtype, device=device)
    inputs[:, 0] += separation * (labels.to(dtype) - 0.5)
    return Dataset(inputs, labels, f"two Gaussians, separation {separation:g}")


def idx(path: str | Path) -> Tensor:
    """Return the array of an IDX file, the format of MNIST.

    Numbers keep the dtype of the file. An uncompressed file stays on the disk and is mapped into memory: only the parts
    that are read take memory. The mapping is private, so that an in-place change does not reach the file. A file named
    ``*.gz`` is decompressed into memory.

    Args:
        path: The file.

    Returns:
        A tensor with the dimensions of the file: (N, 28, 28) uint8 for the images of MNIST, (N,) for its labels.

    Raises:
        FileNotFoundError: If the file does not exist.
        ValueError: If the file is not an IDX file, is truncated, or has extra bytes.

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
    packed = _is_packed(path)
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
    # Single bytes have no byte order, so this copies only if bytes are swapped.
    return torch.from_numpy(numbers.astype(dtype.newbyteorder("="), copy=False).reshape(shape))


def mnist(directory: str | Path, *, train: bool = True) -> Dataset:
    """Return images and labels from the four IDX files of MNIST, or of data in its format such as Fashion-MNIST.

    Args:
        directory: The folder of the files, with their published names ``train-images-idx3-ubyte`` and so on. Names may
            end in ``.gz``, and have a dot before ``idx``.
        train: Whether to read the training set rather than the test set (``t10k-...``).

    Returns:
        Inputs (N, D) in the file's dtype, for MNIST uint8 from 0 to 255, mapped into memory as in `idx`; labels (N,),
        int64.

    Raises:
        FileNotFoundError: If a file is missing.
        ValueError: As for `idx`; also if there are no images, images have no dimensions, or the numbers of labels and
            images differ.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for name, sizes in ("images-idx3", [1, 1, 2]), ("labels-idx1", [1]):
        ...         header = bytes([0, 0, 8, len(sizes)]) + b"".join(size.to_bytes(4) for size in sizes)
        ...         _ = Path(folder, f"train-{name}-ubyte").write_bytes(header + bytes([7, 9][: sizes[-1]]))
        ...     mnist(folder).inputs
        tensor([[7, 9]], dtype=torch.uint8)
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
    """Return the files that `mnist` reads: the images and the labels.

    Raises:
        FileNotFoundError: If one of the two is missing.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for name in ("t10k-images-idx3-ubyte.gz", "t10k-labels.idx1-ubyte"):
        ...         Path(folder, name).touch()
        ...     [path.name for path in mnist_files(folder, train=False)]
        ['t10k-images-idx3-ubyte.gz', 't10k-labels.idx1-ubyte']
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


def cifar10(path: str | Path, *, train: bool = True) -> Dataset:
    """Return images and labels of CIFAR-10 in its binary format.

    A single uncompressed file stays on the disk, mapped into memory as in `idx`. The five files of the training set are
    joined in memory, which takes 154 MB for the images, plus the size of one file.

    Args:
        path: The published archive ``cifar-10-binary.tar.gz``, which is read without unpacking it to the disk; or the
            folder with its files, ``data_batch_1.bin`` to ``data_batch_5.bin`` and ``test_batch.bin``, or its parent
            folder; or a single file, for any value of `train`. Names may end in ``.gz``. All files come from one
            folder; if both folders have them, from the parent.
        train: Whether to read the training set rather than the test set.

    Returns:
        Inputs (N, 3072), uint8 from 0 to 255: ``inputs.reshape(-1, 3, 32, 32)`` are images of red, green and blue
        planes, without a copy. Labels (N,), int64, from 0 to 9. Classes as in ``batches.meta.txt``, if this file
        exists.

    Raises:
        FileNotFoundError: If `path` does not exist, or a file of the set is missing.
        ValueError: If a file has a fractional number of images, no images, or a label above 9, is a broken archive, or
            names a wrong number of classes.

    References:
        Krizhevsky, "Learning multiple layers of features from tiny images", 2009; the files have the layout of the
        "binary version" on the page of the data set.

    Example:
        >>> import tempfile
        >>> with tempfile.NamedTemporaryFile() as file:
        ...     _ = file.write(bytes([7, *[0] * 1024, *[128] * 1024, *[255] * 1024])), file.flush()
        ...     data = cifar10(file.name)
        >>> data.labels, data.inputs.reshape(-1, 3, 32, 32)[0, :, 5, 5]
        (tensor([7]), tensor([  0, 128, 255], dtype=torch.uint8))
    """
    names = [f"data_batch_{number}.bin" for number in range(1, 6)] if train else ["test_batch.bin"]
    return _cifar(_Cifar("CIFAR-10", "cifar-10-batches-bin", {"batches.meta.txt": 10}), Path(path), names, 0)


def cifar100(path: str | Path, *, train: bool = True, coarse: bool = False) -> Dataset:
    """Return images and labels of CIFAR-100 in its binary format.

    Args:
        path: As in `cifar10`: ``cifar-100-binary.tar.gz``, the folder with ``train.bin`` and ``test.bin``, or one file.
        train: Whether to read the training set rather than the test set.
        coarse: Whether the labels are the 20 groups of classes rather than the 100 classes.

    Returns:
        As `cifar10`. Classes as in ``fine_label_names.txt`` or ``coarse_label_names.txt``, if this file exists.

    Raises:
        FileNotFoundError: As in `cifar10`.
        ValueError: As in `cifar10`; the largest labels are 19 (coarse) and 99.

    Example:
        >>> import tempfile
        >>> with tempfile.NamedTemporaryFile() as file:
        ...     _ = file.write(bytes([7, 31, *[255] * 3072])), file.flush()
        ...     cifar100(file.name).labels, cifar100(file.name, coarse=True).labels
        (tensor([31]), tensor([7]))
    """
    labels = {"coarse_label_names.txt": 20, "fine_label_names.txt": 100}
    name = "CIFAR-100, coarse" if coarse else "CIFAR-100"
    return _cifar(
        _Cifar(name, "cifar-100-binary", labels), Path(path), [f"{'train' if train else 'test'}.bin"], 1 - coarse
    )


@dataclass(frozen=True)
class _Cifar:
    """The format of one of the two data sets.

    Attributes:
        name: Its name.
        folder: The published folder of its files.
        labels: For each label byte before the pixels of an image: the file with the class names, and their number.
    """

    name: str
    folder: str
    labels: dict[str, int]

    @property
    def row(self) -> int:
        """Bytes of an image with its labels."""
        return len(self.labels) + 3 * 32 * 32


def _cifar(form: _Cifar, path: Path, names: list[str], label: int) -> Dataset:
    """Return the images of the files in order, and the labels at one place before the pixels."""
    classes_file, n_classes = list(form.labels.items())[label]
    found: dict[str, tuple[str, Any]] = {}
    if not path.exists():
        raise FileNotFoundError(
            f"`{path}` should be {form.name}: an archive, a folder with {_listed(names)}, or one such file. "
            "Found nothing there."
        )
    if path.is_dir():
        found = {name: (str(file), file) for name, file in _in_folder(path, form, names, classes_file).items()}
    elif _is_archive(path):
        found = {name: (f"{path}: {name}", content) for name, content in _in_archive(path, [*names, classes_file])}
    else:
        names, found = [path.name], {path.name: (str(path), path)}
    missing = [name for name in names if name not in found]
    if missing:
        raise FileNotFoundError(
            f"`{path}` should have the binary files of {form.name}, {_listed(names)}. Found no {missing[0]}."
        )
    classes = _class_names(*found.pop(classes_file), n_classes) if classes_file in found else ()
    parts = [(where, _cifar_rows(where, content, form)) for where, content in map(found.pop, names)]
    total, first = sum(len(rows) for _, rows in parts), len(form.labels)
    inputs = (
        torch.empty(total, form.row - first, dtype=torch.uint8, device="cpu")
        if len(parts) > 1
        else parts[0][1][:, first:]
    )
    labels, start = torch.empty(total, dtype=torch.int64, device="cpu"), 0
    while parts:  # each file is released after it is copied
        where, rows = parts.pop(0)
        end = start + len(rows)
        _check_labels(where, rows, form)
        labels[start:end] = rows[:, label]
        if end - start < total:
            inputs[start:end] = rows[:, first:]
        start = end
    return Dataset(inputs, labels, form.name, classes)


def _in_folder(path: Path, form: _Cifar, names: list[str], classes_file: str) -> dict[str, Path]:
    """Return the files of one folder, this folder or its subfolder; files of two folders may be of different data.

    The result comes from the first folder with all files, or else the first with any.
    """
    found = []
    for folder in (path, path / form.folder):
        files = [(name, folder / f"{name}{packed}") for name in (*names, classes_file) for packed in (".gz", "")]
        found.append({name: file for name, file in files if file.is_file()})
    # If a file exists both compressed and uncompressed, the uncompressed one is mapped.
    return max(found, key=lambda files: (files.keys() >= set(names), any(name in files for name in names)))


def _in_archive(path: Path, names: list[str]) -> Iterator[tuple[str, Any]]:
    """Yield the files with these names, from any folder of the archive, in one pass over it."""
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                name = PurePosixPath(member.name).name
                if name in names and member.isfile() and (file := archive.extractfile(member)):
                    # Anonymous pages return to the system after the file is copied; malloc would keep them.
                    content = np.frombuffer(_pages(max(member.size, 1)), np.uint8)[: member.size]
                    if file.readinto(content) != member.size:  # type: ignore[attr-defined]
                        raise EOFError(f"{name} is cut off")
                    yield name, content
            # The compression compares its checksum only at the very end.
            while archive.fileobj is not None and archive.fileobj.read(2**20):
                pass
    except (EOFError, gzip.BadGzipFile, lzma.LZMAError, tarfile.TarError, zlib.error) as error:
        raise ValueError(f"`{path}` should be a whole tar archive. Found otherwise: {error}") from error


def _pages(size: int) -> mmap.mmap:
    try:
        return mmap.mmap(-1, size)
    except (OSError, OverflowError) as error:  # a broken archive may state any size
        raise EOFError(f"a file of {size} bytes: {error}") from error


def _cifar_rows(where: str, source: Any, form: _Cifar) -> Tensor:
    """Return the rows of one file, (N, labels + 3072)."""
    if isinstance(source, Path):
        source = np.frombuffer(_unpacked(source), np.uint8) if _is_packed(source) else _mapped(source)
    n_images, rest = divmod(len(source), form.row)
    if rest or not n_images:
        raise ValueError(
            f"`{where}` should have {form.row} bytes for each image of {form.name}. Found {len(source)} bytes: "
            f"{n_images} images and {rest} bytes."
        )
    return torch.from_numpy(source).reshape(n_images, form.row)


def _check_labels(where: str, rows: Tensor, form: _Cifar) -> None:
    for place, n_classes in enumerate(form.labels.values()):
        wrong = (rows[:, place] >= n_classes).nonzero()
        if len(wrong):
            image = int(wrong[0, 0])
            raise ValueError(
                f"`{where}` should have labels from 0 to {n_classes - 1}. Found {rows[image, place]} at image {image}: "
                f"is it {form.name} in its binary form?"
            )


def _class_names(where: str, source: Any, n_classes: int) -> tuple[str, ...]:
    if isinstance(source, Path):
        content = bytes(_unpacked(source)) if _is_packed(source) else source.read_bytes()
    else:
        content = source.tobytes()
    names = tuple(line for line in content.decode(errors="replace").split("\n") if line.strip())
    if len(names) != n_classes:
        raise ValueError(f"`{where}` should name {n_classes} classes, one a line. Found {len(names)}.")
    return tuple(name.strip() for name in names)


def _is_packed(path: Path) -> bool:
    return path.suffix.lower() == ".gz"


def _is_archive(path: Path) -> bool:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    return ".tar" in suffixes or ".tgz" in suffixes[-1:]


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"


def _mapped(path: Path) -> Any:
    if not path.stat().st_size:  # which cannot be mapped
        return np.empty(0, np.uint8)
    # Copy on write: torch has no read-only tensors.
    return np.memmap(path, np.uint8, mode="c")


def _unpacked(path: Path) -> bytearray:
    try:
        with gzip.open(path) as file:
            return bytearray(file.read())
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"`{path}` should be a whole gzip file. Found otherwise: {error}") from error


def _bundled(loader: str, name: str, dtype: torch.dtype) -> Dataset:
    inputs, labels = _arrays(loader)
    return Dataset(torch.tensor(inputs, dtype=dtype), torch.tensor(labels, dtype=torch.int64), name)


@cache
def _arrays(loader: str) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    import sklearn.datasets

    load: Callable[..., Any] = getattr(sklearn.datasets, loader)
    inputs, labels = load(return_X_y=True)
    return inputs, labels
