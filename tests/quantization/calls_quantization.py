"""A small call of every public function and method of the room that takes a number or a generator."""

import torch
from calls import Call

from toolkit import quantization
from toolkit.quantization import ResidualVectorQuantizer, VectorQuantizer

RESULTS = {
    *("quantization.FiniteScalars", "quantization.Quantized", "quantization.ResidualQuantized"),
    "quantization.SpikeTrains",
}

POINTS = torch.linspace(-1, 1, 16).sin().view(8, 2)
INDICES = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])
QUANTIZER = {"dim": 2, "codebook_size": 3}
CODES = {"codebook": POINTS[:3], "counts": torch.ones(3), "z": POINTS}


def _forward(kind, **sizes):
    """Return a module's pass in training mode, which draws restarted codes, by a new module each time."""

    def forward(z, generator=None):
        made = kind(**sizes, restart_below=2.0, generator=torch.Generator().manual_seed(1))
        return [*made(z, generator=generator), *made.state_dict().values()]

    return forward


def _start(kind, **sizes):
    def start(z, steps=2, generator=None):
        made = kind(**sizes, generator=torch.Generator().manual_seed(1))
        made.start(z, steps=steps, generator=generator)
        return list(made.state_dict().values())

    return start


CALLS = {
    "quantization.FiniteScalarQuantizer": Call(quantization.FiniteScalarQuantizer, levels=[4, 3], margin=1e-3),
    "quantization.ResidualVectorQuantizer": Call(ResidualVectorQuantizer, **QUANTIZER, n_quantizers=2),
    "quantization.ResidualVectorQuantizer.forward": Call(
        _forward(ResidualVectorQuantizer, **QUANTIZER, n_quantizers=2), z=POINTS
    ),
    "quantization.ResidualVectorQuantizer.start": Call(
        _start(ResidualVectorQuantizer, **QUANTIZER, n_quantizers=2), z=POINTS, steps=2
    ),
    "quantization.VectorQuantizer": Call(VectorQuantizer, **QUANTIZER),
    "quantization.VectorQuantizer.forward": Call(_forward(VectorQuantizer, **QUANTIZER), z=POINTS),
    "quantization.VectorQuantizer.start": Call(_start(VectorQuantizer, **QUANTIZER), z=POINTS, steps=2),
    "quantization.arctan_slope": Call(quantization.arctan_slope, x=POINTS),
    "quantization.averaged_codebook": Call(quantization.averaged_codebook, **CODES, indices=INDICES, decay=0.5),
    "quantization.codebook_perplexity": Call(quantization.codebook_perplexity, indices=INDICES, codebook_size=3),
    "quantization.fast_sigmoid_slope": Call(quantization.fast_sigmoid_slope, x=POINTS),
    "quantization.gumbel_softmax": Call(quantization.gumbel_softmax, logits=POINTS, temperature=0.7),
    "quantization.kmeans_codebook": Call(quantization.kmeans_codebook, z=POINTS, codebook_size=3, steps=2),
    "quantization.leaky_integrate_and_fire": Call(
        quantization.leaky_integrate_and_fire, currents=POINTS, decay=0.9, threshold=1.0
    ),
    "quantization.one_hot_ste": Call(quantization.one_hot_ste, probabilities=POINTS.softmax(-1)),
    "quantization.restarted_codebook": Call(quantization.restarted_codebook, **CODES, below=2.0),
    "quantization.sigmoid_slope": Call(quantization.sigmoid_slope, x=POINTS),
    "quantization.top_k_ste": Call(quantization.top_k_ste, x=POINTS, k=1),
}
