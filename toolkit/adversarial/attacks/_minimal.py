"""Shared parts of minimum-norm attacks: the nearest example found so far, and its refinement.

N samples, each of shape (...), C classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple, Unpack

import torch
from torch import Tensor

from toolkit._checks import integer
from toolkit.adversarial.attacks._hyperplane import ORDER, inner, shortest_move
from toolkit.adversarial.attacks._setting import AttackOptions, Pick, Setting, differentiate, setting
from toolkit.adversarial.attacks.losses import without_label
from toolkit.adversarial.balls import Ball, BallOptions, Norm, Region, ball_of, per_sample
from toolkit.adversarial.balls._rounding import laid_out_as
from toolkit.adversarial.balls.box import by_row, column, norm_of, wide, width_remarked_on
from toolkit.blocks import no_graph, variable

__all__ = ["MinimalOptions", "Nearest", "Planes", "Search", "check_only_l2", "minimal_search"]


@dataclass(frozen=True)
class Nearest:
    """The nearest adversarial example so far of every sample, or the strongest point so far if none was found.

    Attributes:
        example: The example or point, (N, ...).
        distance: Distance from the clean input, (N,), float64; infinite where no adversarial example was found.
        strength: Margin by which the attack succeeds at `example`, in logits, (N,).
    """

    example: Tensor
    distance: Tensor
    strength: Tensor

    @property
    def is_found(self) -> Tensor:
        """Whether an adversarial example was found, (N,)."""
        return self.distance < torch.inf

    def rows(self, index: Tensor) -> Nearest:
        """Return the record of some samples."""
        return Nearest(self.example[index], self.distance[index], self.strength[index])

    def put(self, index: Tensor, some: Nearest) -> Nearest:
        """Return the record with the entries of some samples replaced."""
        return Nearest(
            self.example.index_copy(0, index, some.example),
            self.distance.index_copy(0, index, some.distance),
            self.strength.index_copy(0, index, some.strength),
        )


class Planes(NamedTuple):
    """K boundaries of the model as linearised at a point.

    Attributes:
        point: Point of the linearisation, (N, ...).
        logits: Logits there, (N, C).
        values: K times (N,), each above 0 beyond its boundary.
        slopes: Gradients of the values, K times (N, ...).
    """

    point: Tensor
    logits: Tensor
    values: list[Tensor]
    slopes: list[Tensor]


@dataclass(frozen=True)
class Search:
    """A search in the whole box for the nearest adversarial example.

    Attributes:
        attack: The setting, whose ball is the box.
        norm: Norm of the distance to minimise.
        ball: The ball in which the result has to lie.
        radius: Radius of `ball`, (N,), float64; infinite if the distance has no limit.
        n_classes: Number of classes to consider, the label included.
        scale: Units of the distance if the radius in Linf differs between features: these radii, float64, broadcast to
            the inputs, and `radius` is 1. None: all units are 1.
    """

    attack: Setting
    norm: Norm
    ball: Region
    radius: Tensor
    n_classes: int
    scale: Tensor | None = None

    def rows(self, index: Tensor) -> Search:
        """Return the search of some samples."""
        scale = None if self.scale is None else self.scale.expand(self.attack.x.shape)[index]
        attack, ball = self.attack.rows(index), self.ball.rows(index)
        return replace(self, attack=attack, ball=ball, radius=self.radius[index], scale=scale)

    def start(self) -> tuple[Nearest, Tensor]:
        """Return the record that holds only the clean inputs, and their logits (N, C)."""
        attack = self.attack
        logits = attack.inspected(attack.model(attack.x.clone()))
        with no_graph():
            distance = torch.where(attack.succeeds(logits), 0.0, torch.inf).double()
        return Nearest(attack.x, distance, attack.strength(logits)), logits

    def rivals(self, logits: Tensor) -> Tensor | None:
        """Return the K classes (N, K) other than the label with the largest logits; None if there are targets."""
        if self.attack.targets is not None:
            return None
        others = without_label(logits, self.attack.labels)
        return others.topk(max(1, min(self.n_classes, logits.shape[1]) - 1), 1).indices

    def length(self, offset: Tensor) -> Tensor:
        """Return the norm of every sample in the units of `scale`, (N,), float64."""
        if self.scale is not None:
            offset = offset / self.scale.masked_fill(self.scale == 0, 1)
        size: Tensor = torch.linalg.vector_norm(offset.flatten(1), ORDER[self.norm], 1, dtype=torch.float64)
        return size

    def offer(self, nearest: Nearest, example: Tensor, logits: Tensor | None = None) -> Nearest:
        """Return the record with `example` in the place of worse entries."""
        attack = self.attack
        logits = attack.model(example.clone()) if logits is None else logits
        found = attack.strength(logits)
        with no_graph():
            distance = self.length(example.double() - attack.x.double())
            distance = distance.masked_fill(~attack.succeeds(logits), torch.inf)
            neither = ~nearest.is_found & distance.isinf()
            better = torch.where(neither, found > nearest.strength, distance < nearest.distance)
        return Nearest(
            by_row(better, example, nearest.example),
            torch.where(better, distance, nearest.distance),
            torch.where(better, found, nearest.strength),
        )

    def move(self, point: Tensor, offset: Tensor) -> Tensor:
        """Return ``point + offset`` in the box and in the dtype of the inputs."""
        ball = self.attack.ball
        moved = point.to(offset.dtype) + offset
        return torch.clamp(moved.to(ball.x.dtype), ball.lower, ball.upper)

    def to_plane(self, point: Tensor, slope: Tensor, gain: Tensor) -> Tensor:
        """Return the shortest move from `point` that gains this much along `slope`, inside of the box."""
        box = self.attack.ball
        return shortest_move(self.norm, point, slope, gain, box.lower, box.upper, self.scale)

    def threat(self, radius: Tensor) -> Ball:
        """Return the ball with another radius for each sample, (N,)."""
        x, threat = self.attack.x, self.attack.threat
        return replace(threat, epsilon=radius if self.scale is None else column(radius, x) * self.scale.expand(x.shape))

    def margin(self, logits: Tensor, slope: Tensor, point: Tensor) -> Tensor:
        """Return the smallest logit margin (N,) to aim at beyond a boundary, so as to be beyond it after rounding."""
        with no_graph():
            rounding = torch.finfo(point.dtype).eps
            spread = norm_of(slope.to(wide(slope)) * point.to(wide(slope))).flatten()
            return 4 * rounding * (logits.abs().amax(1).to(spread.dtype) + spread)

    def bring_closer(self, nearest: Nearest, classes: Tensor | None = None) -> Nearest:
        """Return the record after the last stretch: to the boundary, and along it.

        The way from the clean input to the example is shortened until it just crosses the boundary. Then the clean
        input is projected onto the boundary as linearised there: for a linear model the exact optimum. The first
        projection is onto the nearest of the boundaries to all `classes`, (N, K), if given, because a descent may have
        gone to another; the next two are onto the crossed one. A point is taken only if it is adversarial and nearer.
        """
        for rivals in (None, None) if classes is None else (classes, None, None):
            nearest = self._shorten(nearest)
            planes = self.planes(nearest.example, rivals)
            move, _, _ = self.to_nearest_plane(self.attack.x, planes)
            nearest = self.offer(nearest, self.move(self.attack.x, move))
        return nearest

    def planes(self, example: Tensor, classes: Tensor | None) -> Planes:
        """Return the boundaries to `classes`, (N, K), as linearised at `example`.

        Args:
            example: Point of the linearisation, (N, ...).
            classes: Classes beyond the boundaries. None: only the boundary at which the attack succeeds.
        """
        if classes is None:
            point, slope, logits, value = self.linearise(example)
            return Planes(point, logits, [value], [slope])
        recorded = torch.is_grad_enabled()
        point = variable(example)
        given, logits, values = self._leads(point, classes)

        def slope_of(value: Tensor, given: Tensor, *, kept: bool) -> Tensor:
            slope = differentiate(value, given, torch.ones_like(value), recorded=recorded, kept=kept)
            return slope.to(wide(slope))

        try:
            slopes = [slope_of(value, given, kept=k + 1 < len(values)) for k, value in enumerate(values)]
        except RuntimeError:
            if recorded or len(values) == 1:
                raise
            # A compiled model gives its buffers away in the first backward pass, so each pass has a graph of its own.
            graphs = (self._leads(point, classes) for _ in values)
            slopes = [slope_of(leads[k], given, kept=False) for k, (given, _, leads) in enumerate(graphs)]
        return Planes(point, logits, values, slopes)

    def _leads(self, point: Tensor, classes: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Return the tensor to differentiate by, the logits, and the lead of each class over the label, (N,) each."""
        with torch.enable_grad():
            given, logits = self.attack.slopes_at(point)
            wide_logits = logits.to(wide(logits))
            label = wide_logits.gather(1, self.attack.labels[:, None])
            return given, logits, list((wide_logits.gather(1, classes) - label).unbind(1))

    def to_nearest_plane(self, start: Tensor, planes: Planes) -> tuple[Tensor, Tensor, Tensor]:
        """Return the shortest move from `start` to one of the boundaries, its slope and its gain, (N,).

        Boundaries that `start` seems to be beyond already are left out. If no boundary remains, the move is zero.
        """
        best = torch.full_like(self.radius, torch.inf)
        move, slope, gain = torch.zeros_like(planes.slopes[0]), planes.slopes[0], torch.zeros_like(planes.values[0])
        away = start.to(move.dtype) - planes.point.to(move.dtype)
        for value, candidate in zip(planes.values, planes.slopes, strict=True):
            need = self.margin(planes.logits, candidate, planes.point) - value - inner(candidate, away)
            way = self.to_plane(start, candidate, need.clamp(min=0))
            with no_graph():
                share = inner(candidate, way) / need
                # Boundaries out of the box's reach come last, the nearest of them first.
                size = torch.where(share < 0.999, 1e30 * (2 - share), self.length(way))
                shorter = (size < best) & (need > 0)
                best = torch.where(shorter, size, best)
            move = by_row(shorter, way, move)
            slope = by_row(shorter, candidate, slope)
            gain = torch.where(shorter, need, gain)
        return move, slope, gain

    def linearise(
        self, example: Tensor, loss: Callable[[Tensor, Tensor], Tensor] | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return point, slope (N, ...), logits (N, C) and value (N,) of the function to raise above 0.

        Args:
            example: Point of the linearisation, (N, ...).
            loss: Function of logits and `goal` that returns values (N,). None: `Setting.strength`.
        """
        attack = self.attack
        loss = loss or (lambda logits, _: attack.strength(logits))
        point, slope, logits = attack.gradient(example, loss)
        return point, slope.to(wide(slope)), logits, loss(logits, attack.goal)

    def finish(self, nearest: Nearest) -> Tensor:
        """Return the examples, each projected into its ball if outside."""
        example = nearest.example
        if self.radius.isinf().all():
            return laid_out_as(self.attack.x, example)
        projected = self.ball.settle(self.ball.project(example))
        with no_graph():
            size = self.length(example.double() - self.ball.x.double())
            slack = (example[:1].numel() + 8) * torch.finfo(torch.float64).eps  # rounding of the norm itself
            inside = size <= self.radius * (1 - slack)
        return laid_out_as(self.attack.x, by_row(inside, example, projected))

    def _shorten(self, nearest: Nearest) -> Nearest:
        """Look for the boundary between the clean input and the example, by secants that aim a little beyond it."""
        x, end = self.attack.x.to(wide(self.attack.x)), nearest.example
        way = end.to(x.dtype) - x
        low, high = torch.zeros_like(nearest.strength), torch.ones_like(nearest.strength)
        below, above = self.attack.strength(self.attack.model(self.attack.x.clone())), nearest.strength
        for _ in range(5):
            with no_graph():
                crosses = (above > 0) & (below < 0)
            share = torch.where(crosses, below / torch.where(crosses, below - above, 1), 0.5)
            position = low + (high - low) * (0.97 * share + 0.03)
            example = self.move(self.attack.x, column(position, x).to(x.dtype) * way)
            logits = self.attack.model(example.clone())
            nearest = self.offer(nearest, example, logits)
            value = self.attack.strength(logits)
            with no_graph():
                beyond = self.attack.succeeds(logits)
            low, below = torch.where(beyond, low, position), torch.where(beyond, below, value)
            high, above = torch.where(beyond, position, high), torch.where(beyond, value, above)
        return nearest


class MinimalOptions(AttackOptions, total=False):
    """The keywords of attacks that look for the nearest adversarial example.

    Attributes:
        epsilon: Radius of the ball in which the result has to lie; examples that are farther are projected. With a
            radius for each feature, the distance is measured in these radii. None, the default: no limit.
        norm: Norm of the distance and of the ball.
        n_classes: Number of classes to consider, 10 by default: those with the largest logits, the label included.
    """

    n_classes: int


@contextmanager
def minimal_search(
    model: Callable[[Tensor], Tensor],
    x: Tensor,
    labels: Tensor | None,
    *,
    default_norm: Norm = "l2",
    targets: Tensor | None = None,
    n_classes: int = 10,
    logits: Pick | None = None,
    **options: Unpack[BallOptions],
) -> Iterator[Search]:
    """Prepare a search in the whole box, as `setting` prepares an attack in a ball.

    The arguments are those of `deepfool`. The options name the ball of the result; `default_norm` is its norm if they
    name none.

    Raises:
        TypeError: As in `setting`.
        ValueError: As in `setting`, or if `n_classes` is less than 2.
    """
    n_classes = integer("n_classes", n_classes, 2)
    if "ball" not in options:
        options = {"epsilon": None, "norm": default_norm, **options}
    threat = ball_of(**options)
    with setting(model, x, labels, targets=targets, logits=logits, ball=replace(threat, epsilon=None)) as attack:
        radius = torch.full(attack.x.shape[:1], torch.inf, dtype=torch.float64, device=attack.x.device)
        scale = None
        if threat.epsilon is not None:
            sizes = per_sample("epsilon", threat.epsilon, attack.x, by_feature=threat.has_features)
            if sizes[:1].numel() > 1:
                scale, sizes = sizes, sizes.new_ones(())
                still, box = scale == 0, attack.ball
                lower, upper = (torch.where(still, box.x, side) for side in (box.lower, box.upper))
                attack = replace(attack, ball=replace(box, lower=lower, upper=upper))
            radius = sizes.flatten().expand_as(radius)
        ball = attack.ball if threat.epsilon is None else threat.around(attack.x)
        with width_remarked_on(threat.epsilon, threat.norm, threat.bounds, attack.x[:1].numel()):
            yield Search(attack, threat.norm, ball, radius, n_classes, scale)


def check_only_l2(attack: str, norm: str) -> None:
    """Raise ValueError unless `norm` is ``"l2"``: the attack minimises no other norm."""
    if norm != "l2":
        raise ValueError(
            f"`norm` should be 'l2' for `{attack}`, which minimises the Euclidean distance. Found {norm!r}."
        )
