"""Quantization beside torch, vector-quantize-pytorch and snntorch: forward plus backward in float32, and memory."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks._measure import Row, timed_row
from toolkit.quantization import (
    FiniteScalarQuantizer,
    ResidualVectorQuantizer,
    VectorQuantizer,
    gumbel_softmax,
    leaky_integrate_and_fire,
    rotation_trick,
)

N, D, K = 8192, 256, 1024

# A process of its own, on Linux: the growth of its largest resident set in the first step, in MiB.
_PEAK = """
import re, warnings
from pathlib import Path
import torch
warnings.simplefilter("ignore")
torch.set_num_threads(1)
def largest():
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
{make}
z = torch.randn(1, {n}, {d}, requires_grad=True)
before = largest()
codes, _, loss = quantizer(z)
(codes.square().sum() + loss.sum()).backward()
print((largest() - before) / 1024)
"""
_OURS = "from toolkit.quantization import VectorQuantizer\nquantizer = VectorQuantizer({d}, {k}{options})"
_THEIRS = "import vector_quantize_pytorch as vqp\nquantizer = vqp.VectorQuantize(dim={d}, codebook_size={k}{options})"


def rows() -> Iterator[Row]:
    """Measure the functions at the peers' sizes; the quantizer at 8192 x 256 with 1024 codes."""
    yield _gumbel()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield from _quantizers()
        yield _finite_scalars()
        yield _residual()
        yield _rotation()
        if sys.platform == "linux":
            yield from _peaks()
        yield _spikes()


def _step(module: Callable[[Tensor], tuple[Tensor, ...]], z: Tensor) -> Callable[[], object]:
    def step() -> None:
        z.grad = None
        codes, _, *loss = module(z)
        (codes.square().sum() + sum(part.sum() for part in loss)).backward()

    return step


def _quantizers() -> Iterator[Row]:
    from vector_quantize_pytorch import VectorQuantize

    z = torch.randn(1, N, D, generator=torch.Generator().manual_seed(0)).requires_grad_()
    size = f"{N} x {D}, {K} codes"
    by_loss = {"learnable_codebook": True, "ema_update": False}
    for name, ours, theirs in (
        ("averaged codes", {}, {"rotation_trick": False}),
        ("codes that learn by their loss", {"learning": "loss"}, {"rotation_trick": False, **by_loss}),
        ("rotation trick", {"estimator": "rotation"}, {"rotation_trick": True}),
    ):
        yield timed_row(
            f"VectorQuantizer / vector-quantize-pytorch, {name}, {size}",
            _step(VectorQuantizer(D, K, **ours), z),
            _step(VectorQuantize(dim=D, codebook_size=K, **theirs), z),
            "at most 0.5",
            repeats=7,
        )


def _residual() -> Row:
    from vector_quantize_pytorch import ResidualVQ

    z = torch.randn(1, 1024, D, generator=torch.Generator().manual_seed(0)).requires_grad_()
    return timed_row(
        f"ResidualVectorQuantizer / vector-quantize-pytorch, 8 stages, 1024 x {D}, {K} codes",
        _step(ResidualVectorQuantizer(D, K, 8), z),
        _step(ResidualVQ(dim=D, num_quantizers=8, codebook_size=K), z),
        "at most 1.1",
        repeats=7,
    )


def _finite_scalars() -> Row:
    from vector_quantize_pytorch import FSQ

    levels = [8, 5, 5, 5]
    z = torch.randn(1, 1024, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    return timed_row(
        "FiniteScalarQuantizer / vector-quantize-pytorch, 1024 x 4",
        _step(FiniteScalarQuantizer(levels), z),
        _step(FSQ(levels), z),
        "at most 1.1",
    )


def _rotation() -> Row:
    from vector_quantize_pytorch.vector_quantize_pytorch import rotate_to

    z, e = torch.randn(2, N, D, generator=torch.Generator().manual_seed(0)).unbind()
    z = z.clone().requires_grad_()
    return timed_row(
        f"rotation_trick / rotate_to, {N} x {D}",
        lambda: torch.autograd.grad(rotation_trick(z, e), z, e),
        lambda: torch.autograd.grad(rotate_to(z, e), z, e),
        "at most 1.1",
    )


def _gumbel() -> Row:
    logits = torch.randn(4096, 64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    cotangent = torch.randn(4096, 64)
    return timed_row(
        "gumbel_softmax / torch, hard, 4096 x 64",
        lambda: torch.autograd.grad(gumbel_softmax(logits), logits, cotangent),
        lambda: torch.autograd.grad(functional.gumbel_softmax(logits, hard=True), logits, cotangent),
        "at most 1.1",
    )


def _spikes() -> Row:
    from snntorch import Leaky

    currents = torch.randn(25, 128, 1000, generator=torch.Generator().manual_seed(0)).requires_grad_()
    neuron = Leaky(beta=0.95)

    def theirs() -> None:
        potential, spikes = neuron.init_leaky(), []
        for current in currents:
            spiked, potential = neuron(current, potential)
            spikes.append(spiked)
        torch.autograd.grad(torch.stack(spikes).sum(), currents)

    return timed_row(
        "leaky_integrate_and_fire / snntorch, 25 steps of 128 x 1000",
        lambda: torch.autograd.grad(leaky_integrate_and_fire(currents, decay=0.95).spikes.sum(), currents),
        theirs,
        "at most 1.1",
        repeats=7,
    )


def _peaks() -> Iterator[Row]:
    for name, ours, theirs in (
        ("averaged codes", "", ", rotation_trick=False"),
        ("rotation trick", ", estimator='rotation'", ""),
    ):
        peaks = [_peak(_OURS, ours), _peak(_THEIRS, theirs)]
        yield Row(
            f"VectorQuantizer / vector-quantize-pytorch, peak memory, {name}",
            peaks[0] / peaks[1],
            "at most 0.6",
            f"{peaks[0]:.0f} / {peaks[1]:.0f} MiB",
        )


def _peak(make: str, options: str) -> float:
    program = _PEAK.format(make=make.format(d=D, k=K, options=options), n=N, d=D)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path.cwd()), *filter(None, sys.path)])}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    return float(done.stdout)
