"""Data sets against what is known of them: sizes, published means, and enumeration."""

import itertools
import math

import pytest
import torch

from toolkit.datasets import bars_and_stripes, digits, iris, two_gaussians, wine


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
