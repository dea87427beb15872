"""The effect of opening a block on the gradient, in numbers and as a verdict."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["BlockEffect", "Difference", "Verdict"]

Floats = NDArray[np.float64]

# Sums and norms of results are no calls for modes to observe, an audit's say, which would take longer than the sums.
unobserved = torch._C.DisableTorchFunction

# Under another name than that of `Tensor`, which an audit replaces by a function in Python.
_number = torch._C.TensorBase.item

# Of other vectors the products are taken in float64.
_DOTTED = frozenset({torch.float32, torch.float64})

# Vectors are summed in pieces of this many numbers.
_PIECE = 2**16

Kind = Literal["no-op", "redundant", "noise", "partial", "cuts", "makes"]


@dataclass(frozen=True)
class Verdict:
    """The effect of a block in a word. All reports take this word from here.

    Attributes:
        kind: ``"no-op"``: no gradient-carrying tensor reaches the block. ``"redundant"``: the leak is zero up to the
            rounding of every parameter's gradient. ``"noise"``: the leak cannot be told from zero at the program's
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
        share = "over 100" if self.noise > 1 else f"{100 * self.noise:.2g}"
        labels["noise"] = f"below the noise of {share} %"
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


_as_difference = functools.partial(tuple.__new__, Difference)


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


def products(leaks: Sequence[Tensor], blocked: Sequence[Tensor], squares: Floats) -> Floats:
    """Return (P, 4): ``|leak|^2, a . b, |a|^2, |b|^2`` for the vectors b and a = b + leak of P parameters.

    Args:
        leaks: P vectors.
        blocked: The P vectors b, of the same sizes.
        squares: ``|b|^2``, (P,).
    """
    with unobserved():
        return np.array(list(map(_products, leaks, blocked, squares.tolist())))


def _products(leak: Tensor, blocked: Tensor, square: float) -> tuple[float, float, float, float]:
    added, crossed = _dot(leak, leak), _dot(blocked, leak)
    # Float32 can hold the squares of the numbers of a vector, as far as the sum of these squares tells.
    if not (1e-30 < added < 1e30 or not leak.any()) or not (1e-30 < square < 1e30 or not square):
        leak, blocked = leak.double(), blocked.double()
        added, crossed = _dot(leak, leak), _dot(blocked, leak)
    opened, dot = square + 2 * crossed + added, square + crossed
    if not opened > 0.1 * (square + added):  # the digits that are left are those of rounding
        whole = (b + change for b, change in zip(_pieces(blocked), _pieces(leak), strict=True))
        parts = [(_dot(a, a), _dot(b, a)) for a, b in zip(whole, _pieces(blocked), strict=True)]
        opened, dot = (sum(part) for part in zip(*parts, strict=True))
    return added, dot, opened, square


def _dot(a: Tensor, b: Tensor) -> float:
    if a.numel() > _PIECE:
        return sum(map(_dot, _pieces(a), _pieces(b)))
    if a.dtype not in _DOTTED:
        a, b = a.double(), b.double()
    return _number(torch.dot(a, b))


def _pieces(vector: Tensor) -> Sequence[Tensor]:
    """Return a vector in pieces whose sums in float32 are exact to about six digits, and whose copies are small."""
    return vector.split(_PIECE)  # type: ignore[no-any-return]


def differences(products: Floats) -> list[Difference]:
    """Return the differences of pairs of gradients from their four products, (..., 4)."""
    leak, dot, open, blocked = products.T
    with np.errstate(all="ignore"):  # no gradient with the block: infinite, or not a number
        ratio, lengths = np.sqrt(open / blocked), np.sqrt(open) * np.sqrt(blocked)
        cosine = np.where(lengths > 0, (dot / lengths).clip(-1, 1), math.nan)
        # A named tuple makes its entries in Python, at three times the cost: there is one for each parameter and block.
        return list(map(_as_difference, zip(np.sqrt(leak).tolist(), ratio.tolist(), cosine.tolist(), strict=True)))


def flat(tensor: Tensor) -> Tensor:
    """Return all numbers of a tensor of any layout, real and imaginary parts apart, as one vector."""
    tensor = tensor.to_dense() if tensor.layout is not torch.strided else tensor
    tensor = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return tensor if tensor.ndim == 1 else tensor.reshape(-1)


def norm(tensors: Iterable[Tensor]) -> float:
    """Return the Euclidean norm of all numbers of some tensors together."""
    return math.hypot(*norms(tensors))


def norms(tensors: Iterable[Tensor]) -> list[float]:
    """Return the Euclidean norm of the numbers of each tensor."""
    with unobserved():
        return [_number(torch.linalg.vector_norm(flat(tensor), dtype=torch.float64)) for tensor in tensors]


def equal(a: Tensor, b: Tensor) -> bool:
    """Return whether two gradients have the same numbers; NaN equals NaN here."""
    with unobserved():
        if a.layout is not b.layout or a.shape != b.shape:
            return False
        if a.layout is not torch.strided:
            a, b = a.to_dense(), b.to_dense()
        if torch.equal(a, b):
            return True
        return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


def are_close(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> bool:
    """Return whether the gradients with respect to all parameters together are equal up to the rounding of float32."""
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
