"""Quantization: values on a grid or in a codebook, spikes, and the steps around them. Chosen indices are constants."""

from typing import Any

from peer_programs._parts import Arrays


def values_on_grids(np: Any, stop: Any, grad: Any, p: Arrays, c: Arrays) -> Any:
    x = p["round"]
    y = x + stop("quantization.round", np.floor(x + 0.5) - x)
    value = np.sum((y - c["t"]) ** 2) / 2
    clipped = np.clip(p["sign"], -1.0, 1.0)
    value = value + np.sum(c["c"] * (clipped + stop("quantization.sign", np.sign(p["sign"]) - clipped)))
    x = p["top_k"]
    y = x + stop("quantization.top_k", x * c["kept"] - x)
    value = value + np.sum((y - c["t"]) ** 2) / 2
    e = np.exp((p["logits"] + c["g"]) / 0.7)
    soft = e / np.sum(e)
    value = value + np.sum(c["v"] * (soft + stop("quantization.one_hot", c["chosen"] - soft)))
    half = np.floor(c["levels"] / 2)
    height, offset = (c["levels"] - 1) * 1.001 / 2, 0.5 - 0.5 * (c["levels"] - 2 * half)
    bounded = np.tanh(p["z"] + np.arctanh(offset / height)) * height - offset
    rounded = bounded + stop("quantization.finite_scalar", np.floor(bounded + 0.5) - bounded)
    weights = np.stack([c["one"], -2 * c["one"], c["one"] / 2])
    return value + np.sum(weights * rounded / half)


def vector_quantizer(np: Any, stop: Any, grad: Any, p: Arrays, c: Arrays) -> Any:
    z, e = p["z"], p["codebook"][0]
    y = z + stop("quantization.straight_through", -z) + stop("quantization.straight_through", e)
    codebook = np.sum((stop("quantization.codebook_targets", z) - e) ** 2)
    commitment = np.sum((z - stop("quantization.commitment_targets", e)) ** 2)
    return np.sum((y - c["goal"]) ** 2) + codebook + 0.25 * commitment


def rotated_codes(np: Any, stop: Any, grad: Any, p: Arrays, c: Arrays) -> Any:
    z, e = p["z"], p["e"]
    origin, ends = stop("quantization.rotation", z), stop("quantization.rotation", e)
    scale = np.sqrt(np.sum(ends * ends) / np.sum(origin * origin))
    unit_z, unit_e = origin / np.sqrt(np.sum(origin * origin)), ends / np.sqrt(np.sum(ends * ends))
    middle = unit_z + unit_e
    step = z - origin
    mirrored = step - 2 * middle * np.sum(middle * step) / np.sum(middle * middle)
    return np.sum(c["c"] * (ends + scale * (mirrored + 2 * unit_e * np.sum(unit_z * step))))


def averaged_codes(np: Any, stop: Any, grad: Any, p: Arrays, c: Arrays) -> Any:
    z, chosen = p["z"], np.transpose(c["chosen"])
    counts = 0.9 * c["counts"] + 0.1 * np.sum(chosen, axis=-1)
    sums = 0.9 * np.expand_dims(c["counts"], -1) * c["codebook"] + 0.1 * np.matmul(chosen, z)
    averaged = stop("quantization.averages", sums / np.expand_dims(counts, -1))
    drawn = stop("quantization.restarts", np.matmul(c["drawn"], z))
    restarted = c["dead"] * drawn + (1 - c["dead"]) * p["first"]
    return np.sum(c["weights"] * (averaged + restarted)) + np.sum(z * z)


def residual_codes(np: Any, stop: Any, grad: Any, p: Arrays, c: Arrays) -> Any:
    z, value, total = p["z"], 0.0, 0.0
    remainder = z
    for name in ("codebook_0", "codebook_1"):
        e = p[name][0]
        codebook = np.sum((stop("quantization.codebook_targets", remainder) - e) ** 2)
        commitment = np.sum((remainder - stop("quantization.commitment_targets", e)) ** 2)
        value, total = value + codebook + 0.25 * commitment, total + e
        remainder = remainder - stop("quantization.residual", e)
    y = z + stop("quantization.straight_through", -z) + stop("quantization.straight_through", total)
    return value + np.sum(c["c"] * y)


def spiking_neuron(np: Any, stop: Any, grad: Any, p: Arrays, c: Arrays) -> Any:
    weight, u, s, spikes = p["weight"], 0.0, 0.0, 0.0
    for step in range(4):
        u = 0.8 * u + weight * c["currents"][step] - stop("quantization.reset", s)
        held = stop("quantization.spikes", u - 1)
        slope = 1 / (np.pi * (1 + (np.pi * held) ** 2))
        s = np.where(u > 1, 1.0, 0.0) + slope * (u - 1 - held)
        spikes = spikes + s
    return np.sum(spikes + u)


PROGRAMS = {
    values_on_grids: (
        "quantization.round",
        "quantization.sign",
        "quantization.top_k",
        "quantization.one_hot",
        "quantization.finite_scalar",
    ),
    vector_quantizer: (
        "quantization.straight_through",
        "quantization.codebook_targets",
        "quantization.commitment_targets",
    ),
    rotated_codes: ("quantization.rotation",),
    averaged_codes: ("quantization.averages", "quantization.restarts"),
    residual_codes: ("quantization.residual", "quantization.codebook_targets", "quantization.commitment_targets"),
    spiking_neuron: ("quantization.spikes", "quantization.reset"),
}
