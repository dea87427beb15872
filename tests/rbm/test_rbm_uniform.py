"""Uniform numbers of draws: each is uniform, two are independent, with and without shared bits."""

import math

import pytest
import torch

from toolkit.rbm.machine.uniform import fill_uniform

N = 2**17


def _draw(seed, *shape):
    return fill_uniform(torch.empty(shape or N), torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("n", [1000, N, N + 3], ids=["few", "many", "many-and-a-part-of-a-word"])
def test_numbers_are_multiples_of_the_same_fraction_from_zero_to_below_one(n):
    u = _draw(0, n)
    assert torch.equal(u * 2**24, (u * 2**24).round())
    assert u.min() >= 0
    assert u.max() < 1


def test_numbers_are_uniform():
    """The Kolmogorov-Smirnov distance is above 2 / sqrt(N) once in 1,500 times; the mean is within 4 errors."""
    u = _draw(0).double()
    place = torch.arange(N, dtype=torch.float64) / N
    assert (u.sort().values - place).abs().max() < 2.0 / math.sqrt(N)
    assert abs(u.mean() - 0.5) < 4 / math.sqrt(12 * N)


def test_the_last_bits_are_uniform_over_calls_and_the_first_ones_over_numbers():
    """Of 256 calls, values of 8 bits: 162 differ on average, with a standard deviation of 5."""
    last = [_draw(seed, 2**14)[0].mul(2**24).long().item() % 2**8 for seed in range(256)]
    assert len(set(last)) > 162 - 25
    first = (_draw(0) * 2**8).long().bincount(minlength=2**8).double()
    assert ((first - N / 2**8).square() / (N / 2**8)).sum() < 255 + 4 * math.sqrt(2 * 255)  # chi squared


def test_neighbours_do_not_depend_on_each_other():
    u = _draw(0).double() - 0.5
    for lag in (1, 2, 3, 4, 5):
        assert abs((u[lag:] * u[:-lag]).mean()) < 4 / (12 * math.sqrt(N))


def test_a_rare_event_has_its_probability():
    """It is rarer than the 16 bits of a number; the shared ones add a part of 2^-6 to the variance of the count."""
    count = sum(int((_draw(seed, 2**10, 2**10) < 2**-18).sum()) for seed in range(64))
    assert abs(count - 256) < 4 * math.sqrt(256)


def test_only_a_row_shares_its_last_bits():
    last = (_draw(0, 2**8, 2**8) * 2**24).long() % 2**8
    assert torch.equal(last, last[:, :1].expand_as(last))
    assert len(set(last[:, 0].tolist())) > 100


def test_narrow_rows_share_nothing():
    last = (_draw(0, 2**12, 4) * 2**24).long() % 2**8
    assert (last != last[:, :1]).any()


def test_memory_for_bits_changes_nothing():
    bits = torch.ones(N, dtype=torch.int64)
    assert torch.equal(fill_uniform(torch.empty(N), torch.Generator().manual_seed(0), bits), _draw(0))


def test_draws_and_their_seed_belong_together():
    assert torch.equal(_draw(3), _draw(3))
    assert not torch.equal(_draw(3), _draw(4))
