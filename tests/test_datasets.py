"""Data sets against what is known of them: sizes, published means, and enumeration."""

import gzip
import itertools
import math
import re
import struct

import pytest
import torch

from toolkit.datasets import bars_and_stripes, digits, idx, iris, mnist, mnist_files, two_gaussians, wine

# Type code of the format -> how `struct` writes such a number, and what it becomes.
IDX_TYPES = {
    0x08: ("B", torch.uint8),
    0x09: ("b", torch.int8),
    0x0B: ("h", torch.int16),
    0x0C: ("i", torch.int32),
    0x0D: ("f", torch.float32),
    0x0E: ("d", torch.float64),
}


@pytest.mark.parametrize(
    ("load", "shape", "counts", "means"),
    [
        # Fisher, R. A., "The use of multiple measurements in taxonomic problems", 1936, table I: the grand means.
        (iris, (150, 4), [50, 50, 50], {0: 5.843333, 1: 3.057333, 2: 3.758, 3: 1.199333}),
        # UCI wine data: mean alcohol and mean proline of all 178.
        (wine, (178, 13), [59, 71, 48], {0: 13.000618, 12: 746.893258}),
        (digits, (1797, 64), [178, 182, 177, 183, 181, 182, 181, 179, 174, 180], {0: 0.0}),
    ],
    ids=["iris", "wine", "digits"],
)
def test_bundled_data(load, shape, counts, means) -> None:
    data = load()
    assert data.inputs.shape == shape
    assert (data.inputs.dtype, data.labels.dtype) == (torch.float64, torch.int64)
    assert data.labels.bincount().tolist() == counts
    assert {column: data.inputs[:, column].mean().item() for column in means} == pytest.approx(means, abs=1e-6)
    assert torch.equal(load(dtype=torch.float32).inputs, data.inputs.float())
    assert data.name


def test_digits_are_scaled_to_the_unit_interval() -> None:
    inputs = digits().inputs
    assert (inputs.min(), inputs.max()) == (0, 1)
    assert torch.equal(inputs * 16, (inputs * 16).round())


def test_a_change_in_place_does_not_reach_the_next_caller() -> None:
    before = iris().inputs.clone()
    iris().inputs.zero_()
    assert torch.equal(iris().inputs, before)


@pytest.mark.parametrize("side", [2, 3])
def test_bars_and_stripes_are_all_of_them_once(side: int) -> None:
    data = bars_and_stripes(side)
    images = data.inputs.reshape(-1, side, side)
    found = {tuple(image.flatten().tolist()) for image in images}
    expected = set()
    for bits in itertools.product((0.0, 1.0), repeat=side * side):
        rows = [bits[i * side : (i + 1) * side] for i in range(side)]
        if all(len(set(row)) == 1 for row in rows) or all(row == rows[0] for row in rows):
            expected.add(bits)
    assert found == expected
    assert len(images) == len(found) == 2 * 2**side - 2
    for image, label in zip(images, data.labels, strict=True):
        lines = image if label == 0 else image.T
        assert torch.equal(lines, lines[:, :1].expand(side, side))


def test_bars_and_stripes_at_the_largest_size_that_is_allowed() -> None:
    assert bars_and_stripes(12).inputs.shape == (2**13 - 2, 144)
    for side in (1, 13):
        with pytest.raises(ValueError, match=rf"`side` should be between 2 and 12\. Found {side}\."):
            bars_and_stripes(side)


def test_two_gaussians_are_what_they_are_said_to_be() -> None:
    n, separation = 40_000, 3.0
    data = two_gaussians(n, separation=separation, n_features=3, generator=torch.Generator().manual_seed(0))
    assert data.inputs.shape == (n, 3)
    for label in (0, 1):
        sample = data.inputs[data.labels == label]
        assert len(sample) / n == pytest.approx(0.5, abs=4 * 0.5 / math.sqrt(n))
        error = 5 / math.sqrt(len(sample))
        assert sample.mean(0).tolist() == pytest.approx([(label - 0.5) * separation, 0, 0], abs=error)
        torch.testing.assert_close(sample.T.cov(), torch.eye(3, dtype=torch.float64), rtol=0, atol=2 * error)


def test_two_gaussians_depend_on_their_generator_alone() -> None:
    before = torch.get_rng_state()
    first, second = (
        two_gaussians(5, separation=1, generator=torch.Generator().manual_seed(seed)).inputs for seed in (1, 1)
    )
    assert torch.equal(first, second)
    assert not torch.equal(first, two_gaussians(5, separation=1, generator=torch.Generator().manual_seed(2)).inputs)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(("argument", "value"), [("n_samples", 0), ("n_features", 0), ("n_samples", -3)])
def test_sizes_are_checked(argument: str, value: int) -> None:
    sizes = {"n_samples": 5, "n_features": 2, argument: value}
    with pytest.raises(ValueError, match=rf"`{argument}` should be a positive integer\. Found {value}\."):
        two_gaussians(separation=1, generator=torch.Generator(), **sizes)


def _idx_bytes(code, shape, numbers) -> bytes:
    """Write an IDX file by its definition, with `struct` alone."""
    head = struct.pack(f">BBBB{len(shape)}I", 0, 0, code, len(shape), *shape)
    return head + struct.pack(f">{len(numbers)}{IDX_TYPES[code][0]}", *numbers)


@pytest.fixture(params=["plain", "gz"])
def write(request, tmp_path):
    """Write a file, plain or packed, and return its path."""

    def write(name, content):
        if request.param == "plain":
            (tmp_path / name).write_bytes(content)
            return tmp_path / name
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(content))
        return tmp_path / f"{name}.gz"

    return write


@pytest.mark.parametrize("code", IDX_TYPES, ids=lambda code: f"type 0x{code:02x}")
@pytest.mark.parametrize("shape", [(6,), (2, 3), (1, 3, 2), (0, 4), ()], ids=str)
def test_idx_is_what_was_written(write, code, shape) -> None:
    dtype = IDX_TYPES[code][1]
    numbers = (
        [3, 100, 5, 0, 7, 1][: math.prod(shape)] if dtype is torch.uint8 else [3, -100, 5, 0, 7, 1][: math.prod(shape)]
    )
    if dtype.is_floating_point:
        numbers = [number + 0.25 for number in numbers]
    found = idx(write("file", _idx_bytes(code, shape, numbers)))
    assert found.dtype == dtype
    assert torch.equal(found, torch.tensor(numbers, dtype=dtype).reshape(shape))


def test_bytes_are_mapped_and_a_change_stays_in_memory(tmp_path) -> None:
    path = tmp_path / "file"
    path.write_bytes(_idx_bytes(0x08, (2, 2), [1, 2, 3, 4]))
    before = idx(path)
    with path.open("r+b") as file:
        file.seek(-1, 2)
        file.write(bytes([9]))
    assert before[1, 1] == 9  # nothing had been copied
    before[0, 0] = 8
    assert idx(path).tolist() == [[1, 2], [3, 9]]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "should be an IDX file: two bytes 0, .*Found 0x(nothing)"),
        (b"\0\0\x08", "should be an IDX file: two bytes 0, .*Found 0x000008"),
        (b"PK\x03\x04more", "should be an IDX file: .*Found 0x504b0304"),
        (b"\0\0\x0a\x01\0\0\0\0", "one of 0x08, 0x09, 0x0b, 0x0c, 0x0d, 0x0e. Found 0x00000a01"),
        (b"\0\0\x08\x03\0\0\0\x01\0", "should have 16 bytes of sizes, for 3 dimensions. Found 9 bytes"),
        (
            _idx_bytes(0x0C, (2, 3), range(6))[:-1],
            "should have 36 bytes, for int32 of sizes (2, 3). Found 35: it is cut off",
        ),
        (
            _idx_bytes(0x08, (3,), range(3)) + b"\0",
            "should have 11 bytes, for uint8 of sizes (3,). Found 12: it has bytes left over",
        ),
        (_idx_bytes(0x08, (2**31, 2**31), []), "Found 12: it is cut off"),
    ],
    ids=[
        "empty",
        "short",
        "zip",
        "unknown type",
        "cut off in the sizes",
        "cut off",
        "left over",
        "sizes that overflow",
    ],
)
def test_files_that_are_not_idx(write, content, message) -> None:
    path = write("file", content)
    with pytest.raises(ValueError, match=re.escape(message).replace(r"\.\*", ".*")) as caught:
        idx(path)
    assert str(caught.value).startswith(f"`{path}` should")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "content", [b"no gzip", gzip.compress(_idx_bytes(0x08, (100,), range(100)))[:-20]], ids=["other", "cut off"]
)
def test_broken_gzip_files(tmp_path, content) -> None:
    (tmp_path / "file.gz").write_bytes(content)
    with pytest.raises(ValueError, match=r"should be a whole gzip file\. Found otherwise: "):
        idx(tmp_path / "file.gz")


def test_mnist_is_images_and_labels(write, tmp_path) -> None:
    images, held_out = torch.arange(24).reshape(3, 4, 2), torch.arange(100, 116).reshape(2, 4, 2)
    write("train-images-idx3-ubyte", _idx_bytes(0x08, (3, 4, 2), images.flatten().tolist()))
    write("train-labels.idx1-ubyte", _idx_bytes(0x08, (3,), [7, 0, 9]))
    write("t10k-images.idx3-ubyte", _idx_bytes(0x08, (2, 4, 2), held_out.flatten().tolist()))
    write("t10k-labels-idx1-ubyte", _idx_bytes(0x08, (2,), [1, 2]))
    data, test = mnist(tmp_path), mnist(str(tmp_path), train=False)
    assert torch.equal(data.inputs, images.flatten(1).to(torch.uint8))
    assert torch.equal(test.inputs, held_out.flatten(1).to(torch.uint8))
    assert (data.labels.tolist(), test.labels.tolist()) == ([7, 0, 9], [1, 2])
    assert (data.inputs.dtype, data.labels.dtype) == (torch.uint8, torch.int64)
    assert data.name == tmp_path.name
    assert mnist_files(tmp_path)[1].name.startswith("train-labels.idx1-ubyte")


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        ((3, 2, 2), (4,), "train-labels-idx1-ubyte` should have 3 labels, one an image. Found sizes (4,)."),
        ((3, 2, 2), (3, 1), "should have 3 labels, one an image. Found sizes (3, 1)."),
        ((3,), (3,), "train-images-idx3-ubyte` should have images, (N, ...). Found sizes (3,)."),
        ((0, 2, 2), (0,), "should have images, (N, ...). Found sizes (0, 2, 2)."),
    ],
    ids=["more labels", "labels in a matrix", "no pixels", "no images"],
)
def test_images_and_labels_belong_together(tmp_path, images, labels, message) -> None:
    for name, shape in (("train-images-idx3-ubyte", images), ("train-labels-idx1-ubyte", labels)):
        (tmp_path / name).write_bytes(_idx_bytes(0x08, shape, [1] * math.prod(shape)))
    with pytest.raises(ValueError, match=re.escape(message)):
        mnist(tmp_path)


def test_a_missing_file_is_named(tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match=r"should have a file t10k-images-idx3-ubyte, or t10k-.*\.gz\. Found"):
        mnist(tmp_path, train=False)
    (tmp_path / "t10k-images-idx3-ubyte").touch()
    with pytest.raises(FileNotFoundError, match="should have a file t10k-labels-idx1-ubyte, or"):
        mnist(tmp_path, train=False)
    with pytest.raises(FileNotFoundError):
        idx(tmp_path / "nothing")
