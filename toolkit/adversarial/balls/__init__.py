"""Threat models: the inputs within epsilon of a clean one in some norm, and inside a box.

The points of every set here satisfy its bounds in exact arithmetic: rounding moves no coordinate and no norm beyond.

N samples, each of shape (...) with D features in all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypedDict, Unpack

import torch
from torch import Tensor

from toolkit._checks import choice
from toolkit.adversarial.balls.box import Bounds, box, check_inputs, free, per_sample, sizes_of
from toolkit.adversarial.balls.l1 import L1Ball
from toolkit.adversarial.balls.l2 import L2Ball
from toolkit.adversarial.balls.linf import LinfBall
from toolkit.adversarial.balls.region import Region, RoundRegion
from toolkit.blocks import no_graph

__all__ = [
    "Ball",
    "BallFields",
    "BallOptions",
    "Bounds",
    "L1Ball",
    "L2Ball",
    "LinfBall",
    "Norm",
    "Region",
    "RoundRegion",
    "ball_of",
    "box",
    "per_sample",
]

Norm = Literal["linf", "l2", "l1"]


_REGIONS: dict[str, type[LinfBall] | type[L2Ball] | type[L1Ball]] = {"linf": LinfBall, "l2": L2Ball, "l1": L1Ball}


@dataclass(frozen=True)
class Ball:
    """A threat model: the inputs within a radius of a clean one, in a norm and inside of a box.

    Attacks take a ball as ``ball=Ball(0.1, "l2")``, or for short its fields, ``epsilon=0.1, norm="l2"``.

    Attributes:
        epsilon: Radius; one for all, or (N,). In Linf also one for each feature, with as many dimensions as the inputs
            and broadcast to them. None: the whole box.
        norm: ``"linf"``, ``"l2"`` or ``"l1"``.
        bounds: Least and greatest value of an input, each a number or broadcast to the inputs; None for no box. A clean
            value that exceeds them by rounding alone is allowed.
        mask: True where an input may change, broadcast to the inputs as torch broadcasts: a mask of shape (N,) is not
            one for each sample. None: everywhere.

    Raises:
        TypeError: If `epsilon` is not a number, nor a tensor of numbers.
        ValueError: If `norm` is unknown, or `epsilon` is negative or infinite.

    Warns:
        UserWarning: Where it is used, if the ball around any point holds the whole box, as with an epsilon of 8 in
            Linf for pixels between 0 and 1.

    Example:
        >>> ball = Ball(0.1, "l2", bounds=(-1, 1))
        >>> ball.around(torch.zeros(2, 3)).upper[0]
        tensor([1., 1., 1.])
    """

    epsilon: float | Tensor | None
    norm: Norm = "linf"
    bounds: Bounds = (0, 1)
    mask: Tensor | None = None

    def __post_init__(self) -> None:
        """Raise if `norm` is unknown, or `epsilon` no size."""
        choice("norm", self.norm, _REGIONS)
        if self.epsilon is not None:
            sizes_of("epsilon", self.epsilon)

    @property
    def has_features(self) -> bool:
        """Whether the radius may differ between features, as it may in Linf."""
        return self.norm == "linf"

    def around(self, x: Tensor) -> Region:
        """Return the ball around clean inputs, (N, ...).

        Raises:
            TypeError: If `x` is not floating point, or `mask` not Boolean.
            ValueError: If `x` is not a batch of samples or lies outside of `bounds`, `epsilon` is neither one for all
                nor one for each, or `mask` does not broadcast to `x`.
        """
        check_inputs("x", x)
        # A finite radius beyond any difference of two inputs: infinity minus infinity would be NaN.
        epsilon = torch.finfo(x.dtype).max / 4 if self.epsilon is None else self.epsilon
        radius = per_sample("epsilon", epsilon, x, by_feature=self.has_features)
        with no_graph():
            lower, upper = box(x, self.bounds)
            change = free(x, self.mask)
            if change is not None:
                lower, upper = torch.where(change > 0, lower, x), torch.where(change > 0, upper, x)
        return _REGIONS[self.norm].around(x, radius, lower, upper, change)

    def rows(self, index: Tensor, x: Tensor) -> Ball:
        """Return the ball of some samples of the inputs `x`, by their indices or a Boolean tensor, (N,)."""

        def rows_of(value: Any, shape: torch.Size) -> Any:
            if isinstance(value, tuple | list):
                return tuple(rows_of(side, shape) for side in value)
            has_rows = isinstance(value, Tensor) and value.dim() > 0
            return value.to(x.device).expand(shape)[index] if has_rows else value

        plain = self.epsilon is None or isinstance(self.epsilon, int | float | Tensor)
        radius = self.epsilon if plain else sizes_of("epsilon", self.epsilon)
        has_features = isinstance(radius, Tensor) and radius.dim() > 1
        rows = (
            rows_of(radius, x.shape if has_features else x.shape[:1]),
            rows_of(self.bounds, x.shape),
            rows_of(self.mask, x.shape),
        )
        return Ball(rows[0], self.norm, *rows[1:])


class BallFields(TypedDict, total=False):
    """The fields of a `Ball` that have a default."""

    norm: Norm
    bounds: Bounds
    mask: Tensor | None


class BallOptions(BallFields, total=False):
    """The keywords of every attack that name its threat model: a `Ball`, or for short its fields."""

    ball: Ball
    epsilon: float | Tensor | None


def ball_of(**options: Unpack[BallOptions]) -> Ball:
    """Return the ball that the keywords of an attack name.

    Raises:
        TypeError: If there is neither a ball nor an `epsilon`, if there are both a ball and a field of a ball, or if
            there is another keyword.
    """
    unknown = sorted({*options} - BallOptions.__annotations__.keys())
    if unknown:
        raise TypeError(
            "The threat model should be named by `epsilon`, `norm`, `bounds` and `mask`, or by `ball`. "
            f"Found `{'`, `'.join(unknown)}`."
        )
    if "ball" not in options:
        if "epsilon" not in options:
            raise TypeError("`epsilon` should be given, or a `ball`. Found neither.")
        return Ball(**options)  # type: ignore[misc]
    if len(options) > 1:
        raise TypeError(
            f"`ball` should be given without its fields. Found `{'`, `'.join(sorted({*options} - {'ball'}))}`."
        )
    if not isinstance(options["ball"], Ball):
        raise TypeError(f"`ball` should be a Ball. Found {type(options['ball']).__name__}.")
    return options["ball"]
