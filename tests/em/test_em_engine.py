"""The Gaussian engine: weights, chunks, files, ranks, restarts, far and narrow data, each beside its plain twin."""

import dataclasses
import math
import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import warm
from folders import ROOT, TESTS
from sklearn.mixture import GaussianMixture
from test_em import (
    difference,
    mixture,
    samples,
)
from torch import Tensor
from values import seeded

from toolkit import datasets
from toolkit._data import rows_of
from toolkit.em import (
    COVARIANCE_TYPES,
    GaussianHMM,
    GaussianParameters,
    Prior,
    e_step,
    em_step,
    fit,
    log_likelihood,
    m_step,
    start,
)
from toolkit.em.covariance.matrices import FULL, quadratic_form, symmetric_products
from toolkit.em.engine import fused
from toolkit.em.engine import samples as _samples
from toolkit.em.engine.acceleration import ClimbOptions
from toolkit.em.engine.ascent import GaussianEngine
from toolkit.em.engine.restarts import NARROWEST, Mixtures, climb_starts
from toolkit.em.engine.samples import check_rows, prepare
from toolkit.em.engine.starts import nearest

F64 = torch.float64
every_type = pytest.mark.parametrize("kind", COVARIANCE_TYPES)


def counts(n: int = 60, seed: int = 5) -> Tensor:
    """Return how often each sample is there; some are not."""
    return torch.randint(4, (n,), generator=seeded(seed)).double()


# --- the pass, whichever way it goes -------------------------------------------------------------------------------


@every_type
@pytest.mark.parametrize("path", ["expansion", "about-means"])
def test_a_weight_is_a_number_of_copies(path, kind, monkeypatch):
    if path == "about-means":
        monkeypatch.setattr(fused, "_EXPANDED", {F64: 0.0})
    x, weight, before = samples(300), counts(300), mixture(kind)
    weighted, value = em_step(before, x, sample_weight=weight)
    copied, expected = em_step(before, x.repeat_interleave(weight.long(), 0))
    assert difference(weighted, copied) < 1e-12
    assert math.isclose(value, expected, rel_tol=1e-13)
    assert difference(weighted, em_step(before, x)[0]) > 1e-3


@every_type
def test_weights_of_a_likelihood_scale_out(kind):
    x, weight, before = samples(300), counts(300), mixture(kind)
    once, value = em_step(before, x, sample_weight=weight)
    scaled, same = em_step(before, x, sample_weight=1e3 * weight)
    assert difference(once, scaled) < 1e-12
    assert math.isclose(value, same, rel_tol=1e-13)
    assert math.isclose(value, log_likelihood(before, x, weight), rel_tol=1e-12)


@pytest.mark.parametrize("d", [1, 2, 3, 5, 33, 66])
def test_products_in_groups_are_the_quadratic_form(d):
    """Blocks of one, two and four rows, and more features than one group holds."""
    z = torch.randn(d, 7, generator=seeded(), dtype=F64)
    matrix = torch.randn(2, d, d, generator=seeded(1), dtype=F64)
    matrix = matrix + matrix.mT
    expansion = fused.Expansion(FULL, d, 7, like=z)
    coefficients = quadratic_form(matrix)
    sizes = expansion.sizes
    parts = [expansion.write(group, z)[:size].clone() for group, size in enumerate(sizes)]
    assert (len(sizes) > 1) == (d > 5)
    assert max(sizes) <= fused._GROUP
    found = sum(c @ part for c, part in zip(coefficients.split(sizes, 1), parts, strict=True))
    torch.testing.assert_close(found, torch.einsum("ib,kij,jb->kb", z, matrix, z), rtol=1e-12, atol=1e-12)
    products = torch.cat(parts).mT
    torch.testing.assert_close(symmetric_products(products, d), z.mT[:, :, None] * z.mT[:, None])


@pytest.mark.parametrize(("d", "k"), [(33, 9), (66, 17), (66, 3)])
def test_many_features_take_the_same_step(d, k):
    x, before = samples(800, d, k), mixture("full", d, k)
    before = dataclasses.replace(before, precisions_cholesky=torch.eye(d, dtype=F64) + 0.1 * before.precisions_cholesky)
    before = dataclasses.replace(before, precisions_cholesky=before.precisions_cholesky.triu())
    responsibilities, expected = e_step(before, x)
    plain = m_step(x, responsibilities, covariance_type="full", reg_covar=1e-2)
    one_pass, value = em_step(before, x, reg_covar=1e-2)
    assert difference(one_pass, plain) < 1e-10
    assert math.isclose(value, expected, rel_tol=1e-12)


@every_type
def test_a_sample_too_far_for_a_fixed_shift_is_weighed_all_the_same(kind):
    """Its densities vanish in float64, unless they are taken relative to the nearest component's."""
    x, before = samples(100), mixture(kind)
    x[37] = torch.tensor([3e3, -2e3, 5e3], dtype=F64)
    x[38] = -x[37]
    one_pass, value = em_step(before, x)
    responsibilities, expected = e_step(before, x)
    assert difference(one_pass, m_step(x, responsibilities, covariance_type=kind)) < 1e-9
    assert math.isclose(value, expected, rel_tol=1e-12)
    assert expected < -1e3


@pytest.mark.parametrize("shift", [1e2, 1e4, 1e6, 1e8])
@every_type
def test_an_offset_costs_nothing(kind, shift):
    x = (samples(500, 3, 2) * 2**16).round() / 2**16  # so that it keeps all digits next to the offset
    first = start(x, 2, covariance_type=kind, generator=seeded(3))
    first = dataclasses.replace(first, means=(first.means * 2**16).round() / 2**16)
    options = {"covariance_type": kind, "max_iter": 20, "tol": 0, "reg_covar": 0, "accelerate": "none"}
    there = dataclasses.replace(first, means=first.means + shift)
    moved = x + shift
    expected = fit(moved - shift, 2, init=first, **options).log_likelihood
    assert abs(fit(moved, 2, init=there, **options).log_likelihood - expected) < 1e-12
    if shift < 1e8:  # in float32 there is nothing left of the data then
        single = moved.float()
        exact = fit(single.double() - shift, 2, init=first, **options).log_likelihood
        assert abs(fit(single, 2, init=there, **options).log_likelihood - exact) < 1e-5


@pytest.mark.parametrize("scale", [1e-5, 1e-3, 1e5])
@every_type
def test_a_scale_only_shifts_the_likelihood(kind, scale):
    x = samples(500, 3, 2)
    first = start(x, 2, covariance_type=kind, reg_covar=0, generator=seeded(3))
    options = {"covariance_type": kind, "max_iter": 20, "tol": 0, "reg_covar": 0, "accelerate": "none"}
    there = dataclasses.replace(first, means=first.means * scale, precisions_cholesky=first.precisions_cholesky / scale)
    expected = fit(x, 2, init=first, **options).log_likelihood - 3 * math.log(scale)
    assert abs(fit(x * scale, 2, init=there, **options).log_likelihood - expected) < 1e-12
    assert abs(fit((x * scale).float(), 2, init=there, **options).log_likelihood - expected) < 1e-5


@pytest.mark.parametrize("kind", ["full", "diag"])
@pytest.mark.parametrize("width", [1.0, 0.1, 1e-2, 1e-3])
def test_narrow_components_keep_the_likelihood_in_float32(width, kind):
    """At width 0.01 and 16 features others stop, or lose a thousandth of a nat."""
    g = seeded(2)
    centres = 2 * torch.randn(5, 16, generator=g, dtype=F64)
    labels = torch.randint(5, (3000,), generator=g)
    widths = torch.ones(16, dtype=F64)
    widths[::2] = width
    x = (centres[labels] + widths * torch.randn(3000, 16, generator=g, dtype=F64)).float()
    first = m_step(x.double(), torch.nn.functional.one_hot(labels).double(), covariance_type=kind)
    options = {"covariance_type": kind, "init": first, "max_iter": 5, "tol": 0, "reg_covar": 0, "accelerate": "none"}
    single, double = fit(x, 5, **options), fit(x.double(), 5, **options)
    assert abs(single.log_likelihood - double.log_likelihood) < 1e-5
    assert abs(log_likelihood(single.parameters.to(F64), x.double()) - double.log_likelihood) < 1e-5


# --- where the samples are ------------------------------------------------------------------------------------------


@every_type
def test_chunks_and_no_cache_give_the_same_fit(kind):
    x, weight = samples(700), counts(700)
    first = start(x, 3, covariance_type=kind, generator=seeded())
    options = {"covariance_type": kind, "init": first, "max_iter": 15, "tol": 0, "accelerate": "none"}
    whole = fit(x, 3, sample_weight=weight, **options)
    chunks = list(zip(x.split(130), weight.split(130), strict=True))
    arrays = [(part.numpy(), share.numpy()) for part, share in chunks]
    for found in (
        fit(chunks, 3, **options),
        fit(arrays, 3, cache=False, **options),
        fit(x, 3, sample_weight=weight, cache=False, **options),
    ):
        assert difference(found.parameters, whole.parameters) < 1e-9
        assert found.log_likelihood == pytest.approx(whole.log_likelihood, abs=1e-12)


def test_a_data_loader_is_read_again_for_each_pass():
    x = samples(500)
    loader = torch.utils.data.DataLoader(x, batch_size=64)
    first = start(x, 3, covariance_type="full", generator=seeded())
    found = fit(loader, 3, init=first, cache=False, tol=1e-8)
    assert found.log_likelihood == pytest.approx(fit(x, 3, init=first, tol=1e-8).log_likelihood, abs=1e-12)


def test_chunks_choose_their_own_start():
    x = samples(500)
    found = fit(x.split(90), 3, generator=seeded())
    same = fit(x, 3, generator=seeded())
    assert found.log_likelihood == pytest.approx(same.log_likelihood, abs=1e-3)


@pytest.mark.parametrize(
    ("chunks", "error", "message"),
    [
        (lambda x: iter(x.split(9)), TypeError, r"can be read again for each pass.*Found a .*iterator"),
        (lambda x: [x[:9], x[:, :2]], ValueError, r"Every chunk should have shape \(B, 3\). Found \(60, 2\)."),
        (lambda x: [x[:9], x * math.nan], ValueError, r"`x` should be finite. Found \[nan, nan, nan\] in row 9."),
        (lambda _: [], ValueError, "`x` should have a chunk, if only an empty one. Found none."),
        (lambda x: x.numpy(), TypeError, r"`x` should be a float32 or float64 tensor, or chunks. Found ndarray."),
        (lambda _: 3, TypeError, r"`x` should be a float32 or float64 tensor, or chunks. Found int."),
        (lambda x: x.tolist(), TypeError, r"or chunks. Found list. `torch.tensor` makes a tensor of numbers."),
        (lambda x: x[:, 0].tolist(), TypeError, r"or chunks. Found list. `torch.tensor` makes a tensor of numbers."),
    ],
    ids=["iterator", "width", "nan", "none", "array", "number", "rows", "numbers"],
)
def test_chunks_that_cannot_be(chunks, error, message):
    with pytest.raises(error, match=message):
        fit(chunks(samples()), 2, generator=seeded())


@pytest.mark.parametrize(
    ("weights", "error", "message"),
    [
        (torch.arange(60), TypeError, "floating-point numbers, not labels. Found torch.int64"),
        (np.arange(60), TypeError, "floating-point numbers, not labels. Found int64"),
        (-torch.ones(60), ValueError, "`sample_weight` should be finite and not negative"),
        (torch.ones(59), ValueError, r"`sample_weight` should have shape \(60,\). Found \(59,\)"),
        (torch.zeros(60), ValueError, "at most 0, the number of samples that have a weight"),
        (torch.arange(60.0) < 1.5, TypeError, "not labels. Found torch.bool"),
    ],
    ids=["labels", "array of labels", "negative", "short", "zero", "mask"],
)
def test_weights_of_chunks_that_cannot_be(weights, error, message):
    with pytest.raises(error, match=message):
        fit([(samples(), weights)], 2, generator=seeded())


def test_more_components_than_samples_in_chunks():
    x = samples(3)
    with pytest.raises(ValueError, match="`n_components` should be at most 3"):
        fit([x[:2], x[2:]], 4, generator=seeded())


def test_a_data_loader_of_one_tensor_and_a_function_are_chunks():
    x = samples(200)
    first = start(x, 2, covariance_type="full", generator=seeded())
    expected = fit(x, 2, init=first).log_likelihood
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), batch_size=64)
    assert fit(loader, 2, init=first).log_likelihood == pytest.approx(expected, abs=1e-12)
    assert fit(lambda: iter(x.split(50)), 2, init=first).log_likelihood == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("cache", [True, False])
def test_a_source_may_fill_the_same_memory_again(cache):
    x, weight = samples(600), counts(600) + 0.5

    class Source:
        def __iter__(self):
            part, share = np.empty((100, 3)), np.empty(100)
            for begin in range(0, 600, 100):
                part[:], share[:] = x[begin : begin + 100].numpy(), weight[begin : begin + 100].numpy()
                yield part, share

    expected = fit(x, 2, sample_weight=weight, generator=seeded(), max_iter=5)
    found = fit(Source(), 2, generator=seeded(), max_iter=5, cache=cache)
    assert found.log_likelihood == pytest.approx(expected.log_likelihood, abs=1e-2)
    first = start(x, 2, covariance_type="full", generator=seeded())
    options = {"init": first, "max_iter": 5, "accelerate": "none"}
    same = fit(Source(), 2, cache=cache, **options).log_likelihood
    assert same == pytest.approx(fit(x, 2, sample_weight=weight, **options).log_likelihood, abs=1e-12)


def test_what_was_written_to_a_private_map_is_kept(tmp_path):
    np.save(tmp_path / "x.npy", samples(500).numpy())
    array = np.load(tmp_path / "x.npy", mmap_mode="c")
    array *= 1000.0
    before = np.array(array)
    fit(array, 1, generator=seeded())
    np.testing.assert_array_equal(array, before)


def test_samples_without_weight_are_not_there():
    x = torch.randn(1000, 2, generator=seeded())
    x[0] = 1e20
    weight = torch.ones(1000)
    weight[0] = 0
    first = start(x[1:], 2, covariance_type="full", generator=seeded())
    found = fit(x, 2, init=first, sample_weight=weight, max_iter=5, accelerate="none")
    expected = fit(x[1:], 2, init=first, max_iter=5, accelerate="none")
    assert found.log_likelihood == pytest.approx(expected.log_likelihood, abs=1e-6)
    few = torch.zeros(200_000, dtype=F64)
    few[:4] = 1
    x = torch.randn(200_000, 1, generator=seeded(), dtype=F64)
    seen = {fit(x, 2, sample_weight=few, max_iter=0, generator=seeded(s)).log_likelihood for s in range(8)}
    assert all(map(math.isfinite, seen))


def test_arguments_of_another_type():
    with pytest.raises(TypeError, match=r"`sample_weight` should be a tensor or None. Found ndarray"):
        fit(samples(), 2, sample_weight=np.ones(60))
    with pytest.raises(TypeError, match="Found str"):
        fit("x.npy", 2)
    with pytest.raises(TypeError, match=r"Found list. `torch.tensor` makes a tensor of numbers"):
        fit([[1.0, 2.0], [3.0, 4.0]], 1)
    with pytest.raises(TypeError, match=r"`prior` should be a Prior or None. Found 'default'"):
        fit(samples(), 2, prior="default")
    with pytest.raises(TypeError, match=r"`generator` should be a torch.Generator, or None. Found int"):
        fit(samples(), 2, generator=0)


def test_values_too_large_for_their_squares():
    with pytest.raises(ValueError, match="finite covariance"):
        fit(samples() * 1e160, 2, generator=seeded())
    with pytest.raises(ValueError, match="finite covariance"):
        start(samples() * 1e160, 2, covariance_type="diag", generator=seeded())
    with pytest.raises(ValueError, match="finite covariance"):
        GaussianHMM(2, random_state=0).fit(samples() * 1e160)


def test_integer_chunks_are_numbers():
    x = torch.randint(50, (200, 2), generator=seeded())
    first = start(x.double(), 2, covariance_type="diag", generator=seeded())
    chunks = [x[:80], x[80:]]
    found = fit(chunks, 2, covariance_type="diag", init=first)
    assert found.parameters.means.dtype == F64
    expected = fit([chunk.double() for chunk in chunks], 2, covariance_type="diag", init=first)
    assert difference(found.parameters, expected.parameters) == 0
    assert found.log_likelihood == expected.log_likelihood


def test_moments_of_the_data_are_merged_exactly():
    x, weight = samples(900) + 1e6, counts(900)
    data = prepare(check_rows(list(zip(x.split(77), weight.split(77), strict=True))), "full", 2)
    mean = np.average(x.numpy(), axis=0, weights=weight.numpy())
    covariance = np.cov(x.numpy().T, aweights=weight.numpy(), bias=True)
    np.testing.assert_allclose(data.centre, mean, rtol=1e-14)
    np.testing.assert_allclose(data.scale @ data.scatter @ data.scale.mT, covariance, rtol=1e-8)
    assert data.total_weight == float(weight.sum())


def test_memory_mapped_file(tmp_path):
    x = samples(4000)
    array = np.lib.format.open_memmap(tmp_path / "x.npy", mode="w+", dtype=np.float64, shape=(4000, 3))
    array[:] = x.numpy()
    array.flush()
    read = np.load(tmp_path / "x.npy", mmap_mode="r")
    first = start(x, 3, covariance_type="full", generator=seeded())
    found = fit(read, 3, init=first, cache=False)
    assert found.log_likelihood == pytest.approx(fit(x, 3, init=first).log_likelihood, abs=1e-12)
    assert fit(read[500:1500], 3, init=first).log_likelihood == pytest.approx(
        fit(x[500:1500], 3, init=first).log_likelihood, abs=1e-12
    )


BOUNDED = """
import sys
import numpy as np, torch
from toolkit.em import GaussianParameters, fit
torch.set_num_threads(1)
n, d, k = int(sys.argv[2]), 64, 50
if sys.argv[1] == "resident":
    x = torch.zeros(n, d, dtype=torch.float64)
    for part in x.split(10000): part.normal_()
else:
    x = np.load(sys.argv[1], mmap_mode="r")
means = torch.randn(k, d, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
first = GaussianParameters.from_covariances(weights=torch.full((k,), 1 / k, dtype=torch.float64), means=means,
    covariances=torch.eye(d, dtype=torch.float64).repeat(k, 1, 1), covariance_type="full")
small = torch.randn(2000, d, dtype=torch.float64)
fit(small, k, init=first, max_iter=1, tol=0, cache=False, reg_covar=1e-3)
def resident(name):
    line = next(line for line in open("/proc/self/status") if line.startswith(name))
    return int(line.split()[1]) / 1024
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # forget the peak so far
before = resident("VmRSS")
fit(x, k, init=first, max_iter=1, tol=0, cache=False, reg_covar=1e-3)
print(resident("VmHWM") - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="asks Linux for the peak of memory")
def test_memory_stays_bounded(tmp_path):
    """Megabytes over the data: of a tensor (51), and of a file (90), of which a chunk alone may be in memory."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    array = np.lib.format.open_memmap(tmp_path / "x.npy", mode="w+", dtype=np.float32, shape=(350_000, 64))
    for first in range(0, len(array), 50_000):
        array[first : first + 50_000] = np.random.default_rng(first).standard_normal((50_000, 64), dtype=np.float32)
    array.flush()
    del array
    for source, size, limit in (("resident", "100000", 40), (str(tmp_path / "x.npy"), "350000", 80)):
        run = subprocess.run(
            [sys.executable, "-c", BOUNDED, source, size], env=environment, capture_output=True, text=True, check=True
        )
        assert float(run.stdout) < limit


# --- ranks ----------------------------------------------------------------------------------------------------------

RANK = """
import contextlib, sys, torch, torch.distributed as dist
from toolkit.em import fit, start
from toolkit.em.engine import samples as _samples
sys.path.insert(0, sys.argv[1])
from reversed_sums import ReversedSums
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
def generator(seed=0):
    return torch.Generator().manual_seed(seed)
reductions = []
reduce_all = _samples.all_reduce
_samples.all_reduce = lambda tensor, **options: (reductions.append(tensor.numel()), reduce_all(tensor, **options))
x, weight = torch.load(f"{sys.argv[2]}/data.pt")
ends = [0, 20, 601] if world == 2 else [0, 300, 300, 301, 601]  # uneven, and a rank without samples
mine = slice(ends[rank], ends[rank + 1])
found = {}
for kind in ("full", "tied", "diag", "spherical"):
    first = start(x, 3, covariance_type=kind, generator=generator())
    reductions.clear()
    result = fit(x[mine], 3, covariance_type=kind, sample_weight=weight[mine] if len(x[mine]) else None,
                 init=first, max_iter=8, tol=0, accelerate="none", group=dist.group.WORLD)
    found[kind] = result, list(reductions)
found["own start"] = fit(x[mine], 3, n_init=2, generator=generator(rank), group=dist.group.WORLD)
found["chunks"] = fit(list(x[mine].split(50)) or [x[:0]], 3, init=first, covariance_type="spherical", max_iter=8,
                      tol=0, accelerate="none", group=dist.group.WORLD)
# Other ranks round otherwise, as other processors do: only the first decides when an accelerated climb ends.
with ReversedSums() if rank else contextlib.nullcontext():
    for n_init in (1, 5):
        found[f"other processors, {n_init}"] = fit(
            x[mine], 3, n_init=n_init, tol=0, max_iter=3000, generator=generator(), group=dist.group.WORLD
        )
errors = []
bad = x.clone()
twice = x[:4].repeat(9, 1)
def leave(n_iter, value):
    if n_iter >= 1:
        raise RuntimeError("enough")
bad[5] = float("nan")
for call in (
    lambda: fit(bad if rank == 0 else x, 2, group=dist.group.WORLD),
    lambda: fit(x, 2 + rank, group=dist.group.WORLD),
    lambda: fit(x.float() if rank else x, 2, group=dist.group.WORLD),
    lambda: fit(x[:1], 50, init="random_from_data", group=dist.group.WORLD),
    lambda: fit(x[:0] if rank else x, 2, sample_weight=weight[: 0 if rank else 601], max_iter=1,
                group=dist.group.WORLD),
    lambda: fit(twice, 4, reg_covar=0, group=dist.group.WORLD, generator=generator()),
    lambda: fit(x, 2, callback=leave, group=dist.group.WORLD),
):
    try:
        call()
        errors.append("")
    except (ValueError, RuntimeError) as error:
        errors.append(f"{type(error).__name__}: {error}")
found["errors"] = errors
torch.save(found, f"{sys.argv[2]}/{rank}.pt")
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_fit_what_one_process_fits(tmp_path, world):
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    x, weight = samples(601), torch.rand(601, generator=seeded(9), dtype=F64)
    torch.save((x, weight), tmp_path / "data.pt")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}", str(script)]
    run = subprocess.run(
        [warm.python(), *command, str(TESTS), str(tmp_path)], env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr[-3000:]
    ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(world)]
    for kind in COVARIANCE_TYPES:
        first = start(x, 3, covariance_type=kind, generator=seeded())
        options = {"covariance_type": kind, "init": first, "max_iter": 8, "tol": 0, "accelerate": "none"}
        alone = fit(x, 3, sample_weight=weight, **options)
        largest = max(1.0, float(alone.parameters.precisions_cholesky.abs().max()))
        for found, reductions in (rank[kind] for rank in ranks):
            assert difference(found.parameters, alone.parameters) < 1e-12 * largest
            assert abs(found.log_likelihood - alone.log_likelihood) < 1e-12
            # Two to know the data's moments, then one for each E-step, of the size of the sufficient statistics.
            assert len(reductions) == 2 + 1 + 8
            assert set(reductions[2:]) == {3 * (sum_width(kind) + 1) + 1}
    for number, rank in enumerate(ranks):
        nan, different, types, few, empty, singular, left = rank["errors"]
        assert re.match(r"ValueError: Rank 0: `x` should be finite. Found \[nan, .* in row 5.", nan)
        assert "All ranks should have the same `n_components`" in different
        assert "torch.float32" in types
        assert "torch.float64" in types
        assert f"at most {world}, the number of samples" in few
        assert empty == ""
        assert re.match(r"ValueError: .*positive definite", singular)
        assert left == (
            "RuntimeError: The first rank stopped: RuntimeError: enough" if number else "RuntimeError: enough"
        )
    for name in ("own start", "chunks", "other processors, 1", "other processors, 5"):
        first = ranks[0][name]
        assert all(difference(rank[name].parameters, first.parameters) == 0 for rank in ranks)
        assert all(dataclasses.replace(rank[name], parameters=first.parameters) == first for rank in ranks)
    one = fit(x, 3, covariance_type="spherical", init=first_of(x), max_iter=8, tol=0, accelerate="none")
    assert abs(ranks[0]["chunks"].log_likelihood - one.log_likelihood) < 1e-12
    assert abs(ranks[0]["own start"].log_likelihood - fit(x, 3, n_init=4, generator=seeded()).log_likelihood) < 1e-3


def sum_width(kind: str) -> int:
    """Return how many features of three features there are, without the 1: symmetric products are there once."""
    return {"full": 6 + 3, "tied": 3, "diag": 3 + 3, "spherical": 1 + 3}[kind]


def first_of(x: Tensor) -> GaussianParameters:
    return start(x, 3, covariance_type="spherical", generator=seeded())


# --- many starts ----------------------------------------------------------------------------------------------------


@every_type
@pytest.mark.parametrize("data", ["iris", "wine"])
def test_starts_together_climb_as_they_do_alone(data, kind):
    x = getattr(datasets, data)().inputs
    prepared = prepare(x, kind, 3)
    starts = [start(x, 3, covariance_type=kind, init="random_from_data", generator=seeded(seed)) for seed in range(5)]
    options = {"tol": 1e-4, "max_iter": 60, "reg_covar": 1e-3}
    found, values, steps, converged = climb_starts(Mixtures.of(starts, prepared), prepared, **options)
    for i, first in enumerate(starts):
        plain = ClimbOptions(accelerate="none", tol=options["tol"], max_iter=options["max_iter"])
        alone = GaussianEngine(prepared, options["reg_covar"], None).climb(first, plain)
        assert float(values[i]) == pytest.approx(alone.log_likelihood, abs=1e-11)
        assert (int(steps[i]), bool(converged[i])) == (alone.n_iter, alone.converged)
        assert difference(found.one(i, prepared), alone.parameters) < 1e-7


def test_a_start_that_becomes_singular_does_not_stop_the_others():
    x = samples(80, 2, 2)
    x = torch.cat([x, x[:1].expand(10, 2)])
    good = start(x, 2, covariance_type="full", generator=seeded())
    eye = 1e-3 * torch.eye(2, dtype=F64).repeat(2, 1, 1)
    half = torch.tensor([0.5, 0.5], dtype=F64)
    covariances = eye * torch.tensor([1e-3, 1e3])[:, None, None]
    bad = GaussianParameters.from_covariances(
        weights=half,
        means=x[[0, 5]],
        covariances=covariances,
        covariance_type="full",
    )
    data = prepare(x, "full", 2)
    _, values, _, converged = climb_starts(Mixtures.of([bad, good], data), data, tol=1e-6, max_iter=50, reg_covar=0)
    assert float(values[0]) == -math.inf
    assert not bool(converged[0])
    assert math.isfinite(float(values[1]))


@pytest.mark.portable
@every_type
@pytest.mark.parametrize("copies", [11, 500])
def test_copies_of_one_sample_have_no_variance_but_rounding(copies, kind):
    """What is left when the squared mean is subtracted may be positive; it says nothing about the data."""
    for seed in range(20):
        x = samples(80, 2, 2, seed)
        x = torch.cat([x[:1].expand(copies, 2), x[5:6].expand(7, 2) if kind == "tied" else x[1:]])
        variances = torch.tensor([1e-6, 1.0], dtype=F64)
        covariances = {
            "full": variances[:, None, None] * torch.eye(2, dtype=F64),
            "tied": variances[0] * torch.eye(2, dtype=F64),
            "diag": variances[:, None].expand(2, 2),
            "spherical": variances,
        }[kind]
        first = GaussianParameters.from_covariances(
            weights=torch.tensor([0.3, 0.7], dtype=F64),
            means=x[[0, -1]],
            covariances=covariances,
            covariance_type=kind,
        )
        data = prepare(x, kind, 2)
        _, values, _, _ = climb_starts(Mixtures.of([first], data), data, tol=1e-6, max_iter=50, reg_covar=0)
        assert float(values[0]) == -math.inf


@pytest.mark.slow
def test_a_spike_is_not_the_best_start():
    """Random starts on iris find one that is 0.5 nats higher than the maximum that is published."""
    x = datasets.iris().inputs
    data = prepare(x, "full", 3)
    starts = [start(x, 3, covariance_type="full", init="random_from_data", generator=seeded(s)) for s in range(60)]
    found, values, _, _ = climb_starts(Mixtures.of(starts, data), data, tol=1e-6, max_iter=200, reg_covar=1e-6)
    assert float(values.max()) > -1.19
    spiked = found.narrowest() < NARROWEST
    assert bool(spiked[values.argmax()])
    for accelerate in ("none", "anderson"):
        best = fit(x, 3, init="random_from_data", n_init=60, accelerate=accelerate, generator=seeded())
        assert best.log_likelihood == pytest.approx(-1.2012365, abs=1e-4)


@every_type
def test_narrowness_does_not_depend_on_coordinates(kind):
    before = mixture(kind)
    x = samples(200)
    data, plain = prepare(x, kind, 3), prepare(samples(50, seed=8), kind, 3)
    here, there = (Mixtures.of([before], d).narrowest() for d in (data, plain))
    torch.testing.assert_close(here, there, rtol=1e-10, atol=0)
    if kind == "full":
        average = (before.weights[:, None, None] * before.covariances).sum(0)
        generalised = [np.linalg.eigvals(np.linalg.solve(average, c)).real.min() for c in before.covariances]
        assert float(here) == pytest.approx(min(generalised), rel=1e-9)


def test_several_starts_climb_as_far_as_one():
    x = samples(400, 2, 3)
    found = fit(x, 3, n_init=3, tol=0, max_iter=5000, reg_covar=0, generator=seeded())
    again = fit(x, 3, init=found.parameters, tol=0, max_iter=5000, reg_covar=0)
    assert again.log_likelihood - found.log_likelihood < 1e-10


@pytest.mark.parametrize("accelerate", ["none", "anderson"])
def test_several_starts_know_the_prior(accelerate):
    x = samples(60, 2, 2)
    prior = Prior.default(x, 2, "full")
    options = {"prior": prior, "accelerate": accelerate, "tol": 1e-10, "max_iter": 5000}
    one, three = (fit(x, 2, n_init=n, generator=seeded(), **options) for n in (1, 3))
    assert three.log_likelihood == pytest.approx(one.log_likelihood, abs=1e-6)
    objective = log_likelihood(three.parameters, x) + prior.log_density(three.parameters) / 60
    assert three.log_likelihood == pytest.approx(float(objective), abs=1e-9)


@every_type
def test_very_narrow_components_survive_several_starts(kind):
    x = torch.cat([1e-2 * samples(100, 2, 1), 1e7 + 1e-2 * samples(100, 2, 1, seed=1)])
    one, three = (
        fit(x, 2, covariance_type=kind, n_init=n, n_init_keep=2, reg_covar=0, generator=seeded()) for n in (1, 3)
    )
    assert three.log_likelihood == pytest.approx(one.log_likelihood, abs=1e-6)


def far_and_narrow() -> tuple[Tensor, list[GaussianParameters]]:
    """Return two clusters (300, 2), ten million times as far apart as they are wide, and two starts.

    The components of the first are the same, and stay so. Those of the second find the clusters, whose variances are
    lost to rounding when starts climb together.
    """
    places = 1e7 * torch.tensor([[2.0, 0.0], [-1.0, 0.0]], dtype=F64)
    x = places.repeat_interleave(torch.tensor([100, 200]), 0) + torch.randn(300, 2, generator=seeded(), dtype=F64)
    same = GaussianParameters.from_covariances(
        weights=torch.tensor([0.5, 0.5], dtype=F64),
        means=x.mean(0).expand(2, 2),
        covariances=x.T.cov().expand(2, 2, 2),
        covariance_type="full",
    )
    return x, [same, start(x, 2, covariance_type="full", generator=seeded())]


@pytest.mark.parametrize("accelerate", ["none", "anderson"])
def test_a_start_that_together_is_lost_to_rounding_goes_on_alone(accelerate, monkeypatch):
    x, starts = far_and_narrow()
    monkeypatch.setattr("toolkit.em.engine.fit.choose_starts", lambda *_, **__: starts)
    found = fit(x, 2, n_init=2, n_init_keep=1, accelerate=accelerate)
    expected = fit(x, 2, init=starts[1], accelerate=accelerate)
    assert found.log_likelihood == pytest.approx(expected.log_likelihood, abs=1e-6)
    assert difference(found.parameters, expected.parameters) < 1e-6
    assert log_likelihood(starts[0], x) < expected.log_likelihood - 10


def test_a_weight_of_zero_is_a_start():
    x = samples(100, 2, 2)
    first = start(x, 2, covariance_type="diag", generator=seeded())
    first = dataclasses.replace(first, log_weights=torch.tensor([0.0, -math.inf], dtype=F64))
    data = prepare(x, "diag", 2)
    found, values, _, _ = climb_starts(Mixtures.of([first], data), data, tol=1e-9, max_iter=50, reg_covar=1e-6)
    plain = ClimbOptions(accelerate="none", tol=1e-9, max_iter=50)
    alone = GaussianEngine(data, 1e-6, None).climb(first, plain)
    assert float(values[0]) == pytest.approx(alone.log_likelihood, abs=1e-10)
    assert float(found.log_weights[0].exp().max()) == pytest.approx(1.0, abs=1e-12)


@every_type
def test_no_jump_leads_below_the_regularisation(kind):
    x = datasets.iris().inputs
    for seed in range(6):
        found = fit(x, 20, covariance_type=kind, generator=seeded(seed)).parameters
        covariances = found.covariances
        least = torch.linalg.eigvalsh(covariances) if kind in ("full", "tied") else covariances
        assert float(least.min()) > 0.999e-6


def test_regularisation_that_is_large_beside_a_feature():
    z = torch.randn(500, 1, generator=seeded(), dtype=F64)
    noise = torch.randn(500, 2, generator=seeded(1), dtype=F64)
    x = torch.cat([1e-12 * (z + 0.1 * noise[:, :1]), z + 0.5 * noise[:, 1:]], 1)
    found = fit(x, 1, generator=seeded()).parameters
    torch.testing.assert_close(found.covariances[0], torch.cov(x.mT, correction=0) + 1e-6 * torch.eye(2, dtype=F64))


def test_restarts_of_weighted_samples():
    x, weight = samples(200), counts(200)
    options = {"n_init": 6, "init": "random_from_data", "tol": 1e-9}
    weighted = fit(x, 3, sample_weight=weight, generator=seeded(), **options)
    copied = fit(x.repeat_interleave(weight.long(), 0), 3, generator=seeded(1), **options)
    assert weighted.log_likelihood == pytest.approx(copied.log_likelihood, abs=1e-6)


def test_a_large_sample_is_seeded_by_a_part_of_it(monkeypatch):
    from toolkit.em.engine import fit as _fit

    monkeypatch.setattr(_fit, "_SEEDING", 100)
    x = samples(2000)
    seeds, weights = _fit._seeding_sample(x, None, rows_of(x, None), prepare(x, "full", 3), seeded())
    assert seeds.shape == (100, 3)
    assert weights.shape == (100,)
    assert len({tuple(row) for row in seeds.tolist()} & {tuple(row) for row in x.tolist()}) == 100
    again, _ = _fit._seeding_sample(x.split(333), None, check_rows(x.split(333)), prepare(x, "full", 3), seeded())
    assert again.shape == (100, 3)
    assert fit(x, 3, generator=seeded()).log_likelihood == pytest.approx(
        fit(x, 3, n_init=3, generator=seeded(1)).log_likelihood, abs=0.02
    )


@pytest.mark.portable
def test_which_mean_is_nearest_does_not_hang_on_rounding():
    """Iris lies on a grid: a sample is as far from one mean as from another, or not, by the order of the features."""
    x = datasets.iris().inputs
    points = x - x.mean(0)
    ties = 0
    for seed in range(60):
        means = points[torch.randperm(150, generator=seeded(seed))[:3]]
        other = points.flip(1), means.flip(1)
        ties += not torch.equal(torch.cdist(points, means).argmin(1), torch.cdist(*other).argmin(1))
        found = nearest(points, means[None])
        assert torch.equal(found, nearest(other[0], other[1][None]))
        assert torch.equal(found, nearest(points, means[None], torch.ones_like(points)))
    assert ties > 0


def test_a_far_sample_makes_no_ties_of_the_others():
    points = torch.cat([samples(50, 2, 2), torch.full((1, 2), 1e9, dtype=F64)])
    means = points[[50, 0, 1, 7]]
    expected = (points[:, None] - means).square().sum(2).argmin(1)
    assert len(set(expected.tolist())) == 4
    assert torch.equal(nearest(points, means[None])[0], expected)
    assert torch.equal(nearest(points, means[None], torch.ones_like(points))[0], expected)


# --- beside scikit-learn --------------------------------------------------------------------------------------------


@pytest.mark.slow
@every_type
def test_the_likelihood_never_falls_in_two_hundred_problems(kind):
    """Fifty for each type: sizes, overlaps, offsets and weights at random."""
    fell, ran = [], 0
    for seed in range(50):
        g = seeded(seed)
        d, k = int(torch.randint(1, 6, (), generator=g)), int(torch.randint(1, 6, (), generator=g))
        x = samples(30 * k, d, k, seed) * 10 ** float(torch.rand((), generator=g) * 4 - 2)
        weight = counts(30 * k, seed) if seed % 3 == 0 else None
        first = start(
            x, k, covariance_type=kind, init="random_from_data", sample_weight=weight, reg_covar=0, generator=g
        )
        data = prepare(x, kind, k, sample_weight=weight)
        values, parameters = [], first
        for _ in range(25):
            moments = fused.accumulate(parameters, data)
            values.append(float(moments.log_likelihood))
            try:
                parameters = fused.maximise(moments, data, kind, 0.0)
            except ValueError:  # a spike: the likelihood has no upper bound
                break
        ran += len(values)
        fell += [after - before for before, after in pairwise(values) if after < before - 1e-12 * abs(before)]
    assert fell == []
    assert ran > 800


@every_type
def test_accelerated_climbs_end_no_lower_than_scikit_learn(kind):
    x = datasets.wine().inputs
    found = fit(x, 3, covariance_type=kind, tol=1e-9, generator=seeded(), n_init=10)
    theirs = GaussianMixture(3, covariance_type=kind, tol=1e-9, max_iter=5000, n_init=10, random_state=0).fit(x.numpy())
    assert found.log_likelihood >= theirs.score(x.numpy()) - 1e-6


def test_the_length_of_a_chunk_does_not_matter(monkeypatch):
    x, before = samples(3000), mixture("full")
    whole, _ = em_step(before, x)
    monkeypatch.setattr(_samples, "_CHUNK_BYTES", {"cpu": 1})
    assert difference(em_step(before, x)[0], whole) < 1e-12
