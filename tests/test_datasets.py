"""Data sets against what is known of them: sizes, published means, and enumeration."""

import gzip
import io
import itertools
import math
import re
import struct
import tarfile
import weakref

import pytest
import torch

from toolkit import datasets
from toolkit.datasets import (
    bars_and_stripes,
    cifar10,
    cifar100,
    digits,
    idx,
    iris,
    mnist,
    mnist_files,
    two_gaussians,
    wine,
)

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
        with pytest.raises(ValueError, match=rf"`side` should be an integer from 2 to 12\. Found {side}\."):
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


# --- CIFAR -------------------------------------------------------------------------------------------------------


def _rows(labels, *, seed=0) -> bytes:
    """Write images of noise after their labels, one or several bytes each, by the definition of the files."""
    pixels = torch.randint(256, (len(labels), 3072), generator=torch.Generator().manual_seed(seed)).tolist()
    return b"".join(
        bytes(label if isinstance(label, tuple) else (label,)) + bytes(row)
        for label, row in zip(labels, pixels, strict=True)
    )


NAMES = b"airplane\nautomobile\nbird\ncat\ndeer\ndog\nfrog\nhorse\nship\ntruck\n\n"
BATCHES = {number: [number, 9, 0][: 1 + number % 3] for number in range(1, 6)}  # of different sizes


def _files() -> dict[str, bytes]:
    batches = {f"data_batch_{number}.bin": _rows(labels, seed=number) for number, labels in BATCHES.items()}
    return {**batches, "test_batch.bin": _rows([3, 8], seed=9), "batches.meta.txt": NAMES}


def _archive(path, files, mode="w:gz"):
    with tarfile.open(path, mode) as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


@pytest.fixture(
    params=[
        "folder",
        "folder around it",
        "packed files",
        "all packed",
        "TAR.GZ",
        "tar.gz",
        "tgz",
        "TGZ",
        "tar",
        "backwards",
    ]
)
def published(request, tmp_path):
    """Write the files of CIFAR-10 in one of the forms in which people have them, and return where."""
    files = _files()
    if request.param == "backwards":
        return _archive(tmp_path / "cifar.tar.xz", dict(reversed(files.items())), "w:xz")
    if request.param.lower() in ("tar", "tar.gz", "tgz"):
        return _archive(tmp_path / f"cifar-10-binary.{request.param}", files, "w" if request.param == "tar" else "w:gz")
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    for name, content in files.items():
        packed = request.param == "all packed" or (request.param == "packed files" and name.endswith(".bin"))
        (folder / f"{name}.gz" if packed else folder / name).write_bytes(gzip.compress(content) if packed else content)
    return tmp_path if request.param == "folder around it" else folder


def test_cifar10_is_what_was_written(published) -> None:
    data, test = cifar10(published), cifar10(str(published), train=False)
    files = _files()
    expected = [files[f"data_batch_{number}.bin"] for number in BATCHES]
    for found, contents in ((data, expected), (test, [files["test_batch.bin"]])):
        rows = [content[start : start + 3073] for content in contents for start in range(0, len(content), 3073)]
        assert found.labels.tolist() == [row[0] for row in rows]
        assert found.inputs.tolist() == [list(row[1:]) for row in rows]
        assert (found.inputs.dtype, found.labels.dtype) == (torch.uint8, torch.int64)
        assert found.classes == tuple(NAMES.decode().split())
        assert found.name == "CIFAR-10"
    assert data.labels.tolist() == [1, 9, 2, 9, 0, 3, 4, 9, 5, 9, 0]


@pytest.mark.parametrize(
    ("outer", "inner", "expected"),
    [
        ((1, 2, 3, 4, 5), (1, 2, 3), 1),
        ((1, 2, 3, 4, 5), (1, 2, 3, 4, 5), 1),
        ((3,), (1, 2, 3, 4, 5), 2),
        ((), (1, 2, 3, 4, 5), 2),
    ],
    ids=["a part inside", "both", "one file outside", "inside"],
)
def test_files_of_two_folders_are_not_mixed(tmp_path, outer, inner, expected) -> None:
    folders = {1: tmp_path, 2: tmp_path / "cifar-10-batches-bin"}
    folders[2].mkdir()
    for label, numbers in ((1, outer), (2, inner)):
        for number in numbers:
            (folders[label] / f"data_batch_{number}.bin").write_bytes(_rows([label], seed=number))
    (folders[3 - expected] / "batches.meta.txt").write_bytes(NAMES)
    data = cifar10(tmp_path)
    assert data.labels.tolist() == [expected] * 5
    assert data.classes == ()  # they are those of the other folder


def test_a_set_in_parts_of_two_folders_is_missing_files(tmp_path) -> None:
    inner = tmp_path / "cifar-10-batches-bin"
    inner.mkdir()
    for number in range(1, 6):
        (tmp_path if number < 3 else inner).joinpath(f"data_batch_{number}.bin").write_bytes(_rows([1]))
    with pytest.raises(FileNotFoundError, match=r"Found no data_batch_3\.bin"):
        cifar10(tmp_path)


def test_what_lies_there_unpacked_is_not_unpacked_again(tmp_path) -> None:
    (tmp_path / "test_batch.bin").write_bytes(_rows([3]))
    (tmp_path / "test_batch.bin.gz").write_bytes(gzip.compress(_rows([4])))
    assert cifar10(tmp_path, train=False).labels.tolist() == [3]


def test_endings_may_be_in_capitals(tmp_path) -> None:
    (tmp_path / "x.BIN.GZ").write_bytes(gzip.compress(_rows([4])))
    assert cifar10(tmp_path / "x.BIN.GZ").labels.tolist() == [4]
    (tmp_path / "X-IDX1.GZ").write_bytes(gzip.compress(bytes([0, 0, 8, 1, 0, 0, 0, 2, 5, 6])))
    assert idx(tmp_path / "X-IDX1.GZ").tolist() == [5, 6]


def test_planes_of_an_image_are_red_green_and_blue(tmp_path) -> None:
    image = torch.zeros(3, 32, 32, dtype=torch.uint8)
    image[0, 1, 2], image[1, 30, 4], image[2, 5, 31] = 10, 20, 30
    (tmp_path / "some.bin").write_bytes(bytes([6, *image.flatten().tolist()]) * 2)
    data = cifar10(tmp_path / "some.bin")
    images = data.inputs.reshape(-1, 3, 32, 32)
    assert torch.equal(images, image.expand(2, 3, 32, 32))
    assert images.data_ptr() == data.inputs.data_ptr()  # nothing was copied
    assert (data.labels.tolist(), data.classes) == ([6, 6], ())


def test_one_file_is_mapped_and_a_change_stays_in_memory(tmp_path) -> None:
    path = tmp_path / "test_batch.bin"
    path.write_bytes(_rows([1, 2]))
    before = cifar10(tmp_path, train=False)
    with path.open("r+b") as file:
        file.seek(-1, 2)
        file.write(bytes([before.inputs[1, -1] ^ 255]))
    assert before.inputs[1, -1] == path.read_bytes()[-1]  # nothing had been copied
    before.inputs[0, 0] ^= 255
    assert path.read_bytes()[1] == before.inputs[0, 0] ^ 255


@pytest.mark.parametrize("packed", [False, True], ids=["folder", "archive"])
def test_files_are_joined_without_a_second_copy_of_all(tmp_path, monkeypatch, packed) -> None:
    """Each is let go of when it has been copied: what is joined and what is left are one set, and the file in hand."""
    files = {name: content for name, content in _files().items() if name.startswith("data")}
    if packed:
        _archive(tmp_path / "cifar.tar", files, "w")
    else:
        for name, content in files.items():
            (tmp_path / name).write_bytes(content)
    read, left = [], []

    def noted(make):
        def wrapped(*arguments):
            memory = make(*arguments)
            read.append(weakref.ref(memory))
            return memory

        return wrapped

    def check(*arguments):
        left.append(sum(memory() is not None for memory in read))
        return check_labels(*arguments)

    check_labels = datasets._check_labels
    for name in ("_pages", "_mapped"):
        monkeypatch.setattr(datasets, name, noted(getattr(datasets, name)))
    monkeypatch.setattr(datasets, "_check_labels", check)  # which is asked of each file before it is copied
    data = cifar10(tmp_path / "cifar.tar" if packed else tmp_path)
    assert data.labels.tolist() == [label for labels in BATCHES.values() for label in labels]
    assert left == [5, 4, 3, 2, 1]
    assert [memory() for memory in read] == [None] * 5


@pytest.mark.parametrize("coarse", [False, True])
def test_cifar100_has_two_labels(tmp_path, coarse) -> None:
    content = _rows([(4, 99), (19, 0), (0, 57)])
    (tmp_path / "train.bin").write_bytes(content)
    (tmp_path / "test.bin").write_bytes(content[:3074])
    (tmp_path / "coarse_label_names.txt").write_text("".join(f"group {i}\n" for i in range(20)))
    data = cifar100(tmp_path, coarse=coarse)
    assert data.labels.tolist() == ([4, 19, 0] if coarse else [99, 0, 57])
    assert data.inputs.tolist() == [list(content[i * 3074 + 2 : (i + 1) * 3074]) for i in range(3)]
    assert data.classes == (tuple(f"group {i}" for i in range(20)) if coarse else ())
    assert len(cifar100(tmp_path, train=False, coarse=coarse).labels) == 1
    assert data.name == ("CIFAR-100, coarse" if coarse else "CIFAR-100")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "should have 3073 bytes for each image of CIFAR-10. Found 0 bytes: 0 images and 0 bytes."),
        (_rows([1, 2])[:-1], "Found 6145 bytes: 1 images and 3072 bytes."),
        (_rows([1]) + b"\0", "Found 3074 bytes: 1 images and 1 bytes."),
        (_rows([1, 9, 10, 3]), "should have labels from 0 to 9. Found 10 at image 2: is it CIFAR-10 in its binary"),
        (_rows([255]), "should have labels from 0 to 9. Found 255 at image 0"),
    ],
    ids=["empty", "cut off", "left over", "label 10", "label 255"],
)
@pytest.mark.parametrize("form", ["plain", "gz", "tar"])
def test_files_that_are_not_cifar(tmp_path, form, content, message) -> None:
    path = tmp_path / {"plain": "test_batch.bin", "gz": "test_batch.bin.gz", "tar": "c.tar"}[form]
    if form == "tar":
        _archive(path, {"test_batch.bin": content}, "w")
    else:
        path.write_bytes(gzip.compress(content) if form == "gz" else content)
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        cifar10(path, train=False)
    where = f"{path}: test_batch.bin" if form == "tar" else str(path)
    assert str(caught.value).startswith(f"`{where}` should have ")


def test_either_label_of_cifar100_is_checked(tmp_path) -> None:
    for row, message in (((20, 3), "from 0 to 19. Found 20"), ((3, 100), "from 0 to 99. Found 100")):
        (tmp_path / "x.bin").write_bytes(_rows([(1, 1), row]))
        with pytest.raises(ValueError, match=re.escape(message)):
            cifar100(tmp_path / "x.bin")


@pytest.mark.parametrize("missing", ["data_batch_3.bin", "test_batch.bin"])
@pytest.mark.parametrize("packed", [False, True], ids=["folder", "archive"])
def test_a_missing_batch_is_named(tmp_path, packed, missing) -> None:
    files = {name: content for name, content in _files().items() if name != missing}
    path = tmp_path
    if packed:
        path = _archive(tmp_path / "cifar.tar.gz", files)
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    train = missing != "test_batch.bin"
    names = "data_batch_1.bin to data_batch_5.bin" if train else "test_batch.bin"
    with pytest.raises(FileNotFoundError) as caught:
        cifar10(path, train=train)
    assert str(caught.value) == f"`{path}` should have the binary files of CIFAR-10, {names}. Found no {missing}."
    assert len(cifar10(path, train=not train).inputs)


def test_nothing_at_the_path(tmp_path) -> None:
    with pytest.raises(
        FileNotFoundError, match=r"should be CIFAR-10: an archive, a folder with .*Found nothing there\."
    ):
        cifar10(tmp_path / "nothing")


def _flipped(content: bytes, place: int) -> bytes:
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


@pytest.mark.parametrize(
    "broken",
    [lambda whole: b"no archive", lambda whole: whole[:-40], lambda whole: _flipped(whole, len(whole) // 2)],
    ids=["other", "cut off", "one bit"],
)
@pytest.mark.parametrize("mode", ["gz", "xz"])
def test_broken_archives(tmp_path, mode, broken) -> None:
    path = _archive(tmp_path / f"cifar.tar.{mode}", _files(), f"w:{mode}")
    path.write_bytes(broken(path.read_bytes()))
    with pytest.raises(ValueError, match=r"should be a whole tar archive\. Found otherwise: "):
        cifar10(path)


def test_an_archive_cut_off_in_a_file(tmp_path) -> None:
    path = _archive(tmp_path / "cifar.tar", _files(), "w")
    path.write_bytes(path.read_bytes()[: 3 * 512 + 100])
    with pytest.raises(ValueError, match=r"should be a whole tar archive\. Found otherwise: "):
        cifar10(path)


@pytest.mark.parametrize("bits", [33, 50, 70])
def test_an_archive_that_says_it_has_more_than_there_is(tmp_path, bits) -> None:
    member = tarfile.TarInfo("test_batch.bin")
    member.size = 2**bits
    path = tmp_path / "cifar.tar"
    path.write_bytes(member.tobuf(tarfile.GNU_FORMAT) + bytes(1024))
    with pytest.raises(ValueError, match=r"should be a whole tar archive\. Found otherwise: "):
        cifar10(path, train=False)


def test_names_of_classes_are_counted(tmp_path) -> None:
    for name, content in {**_files(), "batches.meta.txt": b"cat\ndog\n"}.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=r"batches\.meta\.txt` should name 10 classes, one a line\. Found 2\."):
        cifar10(tmp_path)
