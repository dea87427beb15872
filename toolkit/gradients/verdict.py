"""The effect of opening a block on the gradient, in numbers and as a verdict."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

__all__ = ["BlockEffect", "Difference", "Verdict"]

# Vectors of up to this many numbers are summed at once.
_SMALL = 2**14

Kind = Literal["no-op", "redundant", "noise", "partial", "cuts", "makes"]


@dataclass(frozen=True)
class Verdict:
    """The effect of a block in a word, and the only source of this text.

    Attributes:
        kind: ``"no-op"``: no gradient-carrying tensor reaches the block. ``"redundant"``: the leak is zero up to the
            rounding of every parameter's gradient. ``"noise"``: the leak cannot be told from zero in the program's low
            precision. ``"partial"``: the block changes the gradient. ``"cuts"``: some parameters have a gradient only
            while the block is open. ``"makes"``: the gradient of some parameters is zero without the block, as in a
            straight-through estimator.
        parameters: The names of these parameters, for ``"cuts"`` and ``"makes"``.
        noise: For ``"noise"``, the possible size of rounding relative to the gradient.
    """

    kind: Kind
    parameters: tuple[str, ...] = ()
    noise: float = 0.0

    @property
    def label(self) -> str:
        """The verdict without the names of parameters."""
        labels = {"cuts": "cuts all paths", "makes": "makes the gradient"}
        labels["noise"] = f"below the noise of {100 * self.noise:.2g} %"
        return labels.get(self.kind, self.kind)

    @property
    def is_silent(self) -> bool:
        """Whether opening the block has no effect."""
        return self.kind in ("no-op", "redundant")

    def __str__(self) -> str:
        names = ", ".join(self.parameters)
        return self.label + {"cuts": f" to [{names}]", "makes": f" of [{names}]"}.get(self.kind, "")

    def to_dict(self) -> dict[str, Any]:
        """Return the verdict as plain JSON, with its text."""
        return {"kind": self.kind, "parameters": list(self.parameters), "label": self.label, "text": str(self)}


class Difference(NamedTuple):
    """The difference between the gradient with a block open and the gradient with every block in place.

    Attributes:
        leak: ``|open - blocked|``, the Euclidean norm.
        ratio: ``|open| / |blocked|``; infinite if only the blocked gradient is 0, NaN if both are.
        cosine: Cosine of the angle between the two; NaN if either is 0.
    """

    leak: float
    ratio: float
    cosine: float


@dataclass(frozen=True)
class BlockEffect:
    """The effect of opening one block alone on the gradient.

    Attributes:
        name: The block.
        why: The reason of the block.
        site: The place where the program first reaches the block: ``file:line:column``.
        calls: The number of tensors or regions that the block was applied to.
        verdict: The effect in a word.
        leak: Norm of the difference over all parameters.
        ratio: Norm of the gradient with the block open over the norm with it in place.
        cosine: Cosine of the angle between the two.
        per_parameter: Leak, ratio and cosine of every parameter.
    """

    name: str
    why: str
    site: str
    calls: int
    verdict: Verdict
    leak: float
    ratio: float
    cosine: float
    per_parameter: dict[str, Difference]

    def to_dict(self) -> dict[str, Any]:
        """Return the effect as plain JSON; values that are not finite become None."""
        return {
            "name": self.name,
            "why": self.why,
            "site": self.site,
            "calls": self.calls,
            "verdict": self.verdict.to_dict(),
            **plain(Difference(self.leak, self.ratio, self.cosine)),
            "per_parameter": {name: plain(difference) for name, difference in self.per_parameter.items()},
        }


def products(leaks: Sequence[Tensor], blocked: Sequence[Tensor], squares: Tensor) -> Tensor:
    """Return (P, 4): ``|leak|^2, a . b, |a|^2, |b|^2`` for the vectors b and a = b + leak of P parameters.

    Args:
        leaks: P vectors.
        blocked: The P vectors b, of the same sizes.
        squares: ``|b|^2``, (P,), float64.
    """
    added = _squares(leaks)
    small = [index for index, leak in enumerate(leaks) if leak.numel() <= _SMALL]
    opened = torch.empty_like(added)
    opened[small] = _squares([blocked[index] + leaks[index] for index in small])
    for index in set(range(len(leaks))).difference(small):  # one at a time: together they take a gradient's memory
        opened[index] = _squares([blocked[index] + leaks[index]])[0]
    return torch.stack([added, (opened + squares - added) / 2, opened, squares], 1)


def _squares(vectors: Sequence[Tensor]) -> Tensor:
    if not vectors:
        return torch.empty(0, dtype=torch.float64)
    single = all(vector.dtype is torch.float32 for vector in vectors)
    norms = [norm.item() for norm in torch._foreach_norm(list(vectors), 2, None if single else torch.float64)]
    # Squares outside of the range of float32 are summed in float64.
    lost = [not (1e-15 < norm < 1e15) and bool(vector.any()) for norm, vector in zip(norms, vectors, strict=True)]
    if single and any(lost):
        return _squares([vector.double() for vector in vectors])
    return torch.tensor(norms, dtype=torch.float64).square()


def difference(products: Iterable[float]) -> Difference:
    """Return the difference of two gradients from their four products."""
    leak, dot, open, blocked = products
    if blocked:
        ratio = math.sqrt(open / blocked)
    else:
        ratio = math.inf if open else math.nan
    lengths = math.sqrt(open) * math.sqrt(blocked)
    cosine = dot / lengths if lengths else math.nan
    return Difference(math.sqrt(leak), ratio, cosine if math.isnan(cosine) else min(1.0, max(-1.0, cosine)))


def flat(tensor: Tensor) -> Tensor:
    """Return all numbers of a tensor of any layout, real and imaginary parts apart, as one vector."""
    tensor = tensor.to_dense() if tensor.layout is not torch.strided else tensor
    tensor = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return tensor.reshape(-1)


def norm(tensors: Iterable[Tensor]) -> float:
    """Return the Euclidean norm of all numbers of some tensors together."""
    return math.hypot(*(flat(tensor).double().norm().item() for tensor in tensors))


def equal(a: Tensor, b: Tensor) -> bool:
    """Return whether two gradients have the same numbers; NaN equals NaN here."""
    if a.layout is not b.layout or a.shape != b.shape:
        return False
    a, b = (tensor if tensor.layout is torch.strided else tensor.to_dense() for tensor in (a, b))
    return torch.equal(a, b) or bool(torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num()))


def are_close(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> bool:
    """Return whether the gradients by all parameters together are equal up to the rounding of float32."""
    distance = norm([flat(found[name]).double() - flat(gradient).double() for name, gradient in expected.items()])
    return bool(distance <= rounding(torch.float32) * norm(expected.values()))


def rounding(dtype: torch.dtype) -> float:
    """Return the relative bound of rounding in a gradient of this dtype, with room for long sums.

    It is eps to the power of 3/4; a dtype coarser than float32 gets the bound of float32, because a larger one could
    hide a leak.
    """
    return float(min(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps) ** 0.75)


def plain(difference: Difference) -> dict[str, float | None]:
    """Return a difference as plain JSON."""
    return {key: finite(value) for key, value in difference._asdict().items()}


def finite(value: float) -> float | None:
    """Return a number that JSON can hold, or None."""
    return value if math.isfinite(value) else None
