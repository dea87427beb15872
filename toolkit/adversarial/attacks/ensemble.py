"""An ensemble of attacks to measure robustness: each attack runs on the rows that no attack before it broke.

Attacks fail for different reasons, and each attack here answers one. The gradient is wrong over the length of a step:
`linearised` and `multi_target`. The steps get stuck: `apgd`, which adapts their length, with two losses. The steepest
way is not the shortest: `fab`. The model is flat around the input: `random_directions`. The gradient is masked
altogether: `square`, which uses no gradient. The share that no attack breaks is an upper bound of the robust accuracy;
`verify_relu` and `certify_linear` are exact.

N samples, each of shape (...), C classes.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Unpack

import torch
from torch import Tensor

from toolkit._checks import integer, level, number
from toolkit._progress import Progress
from toolkit._random import seeded_generator
from toolkit.adversarial._classes import check_classes
from toolkit.adversarial._warnings import warn
from toolkit.adversarial.attacks._random_directions import random_directions
from toolkit.adversarial.attacks._setting import CommonOptions, NoGradientError, Pick, Setting, setting, untargeted
from toolkit.adversarial.attacks._suitability import warn_of_unsuited_models
from toolkit.adversarial.attacks.apgd import apgd
from toolkit.adversarial.attacks.fab import fab
from toolkit.adversarial.attacks.losses import difference_loss
from toolkit.adversarial.attacks.multi_target import linearised, multi_target
from toolkit.adversarial.attacks.square import square
from toolkit.adversarial.balls import Ball, BallFields
from toolkit.adversarial.balls._rounding import laid_out_as
from toolkit.adversarial.balls.box import check_inputs, sizes_of

__all__ = ["Evaluation", "ensemble", "evaluate_robustness", "robust_accuracy", "robustness_curve", "standard_attacks"]

# Called as attack(model, x, labels, epsilon=, norm=, bounds=, mask=, generator=), without a generator if it takes none.
Attack = Callable[..., Tensor]
# The linearisation is tried towards so many classes at most: each takes a gradient.
_MOST_TARGETS = 99

# Forms of one attack, each of which is run if the one before it broke a row.
Stages = tuple[Attack, ...]


@dataclass(frozen=True)
class Evaluation:
    """The robustness of a model as measured by an ensemble of attacks.

    Attributes:
        correct: (N,) Boolean; whether the clean input gets its label.
        robust: (N,) Boolean; whether the clean input gets its label, and no attack broke it.
        examples: (N, ...); where a row was broken, the example that broke it; else the strongest example tried.
        broken: Name of each attack, in order, to the number of rows that it broke first.
        seconds: Name of each attack to its processor time.
        skipped: Names of the attacks that could not be run, because the model has no gradient with respect to its
            input.
    """

    correct: Tensor
    robust: Tensor
    examples: Tensor
    broken: Mapping[str, int]
    seconds: Mapping[str, float]
    skipped: tuple[str, ...] = ()

    @property
    def clean_accuracy(self) -> float:
        """The share of rows whose clean input is classified correctly; NaN without rows."""
        return self.correct.double().mean().item()

    @property
    def robust_accuracy(self) -> float:
        """The share of rows that are correct and that no attack broke; NaN without rows."""
        return self.robust.double().mean().item()

    def __str__(self) -> str:
        standing = int(self.correct.sum())
        rows = [f"{'clean':<36} {self.clean_accuracy:8.4f}"]
        for name, count in self.broken.items():
            standing -= count
            share, seconds = standing / max(1, len(self.correct)), self.seconds[name]
            is_skipped = name in self.skipped
            rows.append(
                f"{'without ' + name:<36} {'no gradient':>8}"
                if is_skipped
                else f"{'after ' + name:<36} {share:8.4f} {seconds:8.2f} s"
            )
        return "\n".join(rows)


def standard_attacks(n_classes: int, at_once: int = 1000) -> dict[str, Stages]:
    """Return the attacks of an ensemble by name, the cheap ones first.

    Most attacks come with a longer form. It runs only if the short form has broken a row that no attack before it had
    broken: a sign that this kind of attack can break more. A model without gradient masking never costs thousands of
    queries; a model with masked gradients does.

    Raises:
        ValueError: If `n_classes` is less than 2, or `at_once` is not positive.

    References:
        Croce and Hein, "Reliable evaluation of adversarial robustness with an ensemble of diverse parameter-free
        attacks", 2020.

    Example:
        >>> list(standard_attacks(2))
        ['linearised', 'multi-target', 'multi-target, random starts', 'APGD', 'FAB', 'random directions', 'Square']
    """
    n_classes, at_once = integer("n_classes", n_classes, 2), integer("at_once", at_once)
    every_class = partial(linearised, n_targets=min(n_classes - 1, _MOST_TARGETS), at_once=at_once)
    random = partial(multi_target, steps=20, n_targets=3, at_once=at_once)
    attacks: dict[str, Stages] = {
        "linearised": (every_class,),
        "multi-target": (partial(multi_target, at_once=at_once),),
        "multi-target, random starts": (partial(random, restarts=4), partial(random, restarts=10)),
        "APGD": (partial(apgd, steps=30), apgd),
        "APGD, DLR": (partial(apgd, steps=30, loss="dlr"), partial(apgd, loss="dlr", restarts=5)),
        "FAB": (partial(fab, steps=3, n_classes=4), partial(fab, restarts=5)),
        "random directions": (partial(random_directions, draws=150), partial(random_directions, draws=1000)),
        "Square": (partial(square, queries=60), square),
    }
    if n_classes < 3:
        del attacks["APGD, DLR"]
    return attacks


def evaluate_robustness(
    model: Callable[[Tensor], Tensor],
    x: Tensor,
    labels: Tensor | None = None,
    *,
    attacks: Mapping[str, Attack | Stages] | None = None,
    batch_size: int = 1000,
    generator: torch.Generator | int | None = 0,
    verbose: int = 0,
    **options: Unpack[CommonOptions],
) -> Evaluation:
    """Run attacks one after the other, each on the rows that are still classified correctly.

    The examples of an attack are projected into the ball and the box, rounded inwards, and classified there by the
    model in evaluation mode, so only an example inside of both can break a row. A NaN among the logits breaks a row
    too. Gradient attacks are skipped if the model has no gradient with respect to its input, and are then listed in
    `Evaluation.skipped`; random directions and `square` are then run with all their queries.

    Args:
        model: Inputs (N, ...) to logits (N, C). A `torch.nn.Module` is run in evaluation mode, module by module.
        x: Clean inputs, (N, ...), inside of `bounds`.
        labels: (N,). None: the model's predictions at `x`.
        attacks: Name to attack, in order; each is called as ``attack(model, x, labels, epsilon=, norm=, bounds=,
            mask=, generator=)`` with the rows not broken yet. In a tuple of attacks, each runs only if the one before
            it broke a row. None: `standard_attacks`.
        batch_size: Rows, or pairs of a row and a class, at once.
        generator: Draws all random numbers. An integer seeds a new one: by default the same call gives the same result.
            None: torch's global generator.
        verbose: 1 prints a line after each attack on each batch; 2 also the processor time.
        **options: `epsilon`, `norm`, `bounds`, `mask` or `ball`; `logits`.

    Returns:
        The robust rows, the examples, and the count of rows that each attack broke.

    Raises:
        TypeError: As in `pgd`, or if `attacks` is not a mapping of names to functions.
        ValueError: As in `pgd`, or if `batch_size` is not positive.

    Warns:
        UserWarning: If the ball is as wide as the box, as with an epsilon of 8 for pixels between 0 and 1; if attacks
            could not be run, because the model has no gradient with respect to its input; or if the model is random,
            depends on the batch, has no gradient at some inputs, or returns probabilities. For a random model, attack
            its mean prediction: `EOT`.

    References:
        Croce and Hein, "Reliable evaluation of adversarial robustness with an ensemble of diverse parameter-free
        attacks", 2020.

    Example:
        >>> weight = torch.tensor([[3.0, 0.0], [0.0, 3.0]])
        >>> x = torch.tensor([[0.9, 0.1], [0.6, 0.5]])
        >>> found = evaluate_robustness(lambda x: x @ weight.T, x, torch.tensor([0, 0]), epsilon=0.2)
        >>> found.robust.tolist(), found.broken["linearised"]
        ([True, False], 1)
    """
    batch_size, verbose = integer("batch_size", batch_size), level(verbose)
    if attacks is not None and not (isinstance(attacks, Mapping) and attacks):
        found = "none" if isinstance(attacks, Mapping) else type(attacks).__name__
        raise TypeError(f"`attacks` should be a mapping of names to attacks, at least one. Found {found}.")
    draws = seeded_generator(generator)
    with (
        setting(model, x, labels, **untargeted(options)) as whole,
        Progress(verbose=verbose, interval=1, callback=None) as progress,
    ):
        parts = [
            _Standing(whole.rows(rows), draws)
            for rows in torch.arange(len(whole.x), device=whole.x.device).split(batch_size)
        ]
        if parts:
            warn_of_unsuited_models(parts[0].batch, parts[0].logits)
        broken: dict[str, int] = {}
        seconds: dict[str, float] = {}
        skipped: dict[str, None] = {}
        for number, part in enumerate(parts, 1):
            progress.begin(
                f"Batch {number} of {len(parts)}: {len(part.correct)} rows, {int(part.correct.sum())} correct"
            )
            for name, attack in (standard_attacks(part.n_classes, batch_size) if attacks is None else attacks).items():
                start = time.process_time()
                try:
                    # Where other attacks could not be run, the remaining ones run in full.
                    count = part.attack_in(_stages(name, attack), until_in_vain=not skipped)
                except NoGradientError:
                    count = 0
                    skipped.setdefault(name)
                spent = time.process_time() - start
                broken[name] = broken.get(name, 0) + count
                seconds[name] = seconds.get(name, 0.0) + spent
                progress.say(f"{name}: {count} broken, {int(part.robust.sum())} left", spent)
        if skipped:
            warn(
                "`model` should be differentiable with respect to its input. Found that it is not: these attacks could "
                f"not be run, and the robust accuracy may be too high: {', '.join(skipped)}."
            )
        return Evaluation(
            correct=torch.cat([part.correct for part in parts]),
            robust=torch.cat([part.robust for part in parts]),
            examples=laid_out_as(whole.x, torch.cat([part.examples for part in parts])),
            broken=broken,
            seconds=seconds,
            skipped=tuple(skipped),
        )


def robust_accuracy(
    model: Callable[[Tensor], Tensor],
    x: Tensor,
    labels: Tensor | None = None,
    *,
    attacks: Mapping[str, Attack | Stages] | None = None,
    batch_size: int = 1000,
    generator: torch.Generator | int | None = 0,
    verbose: int = 0,
    **options: Unpack[CommonOptions],
) -> float:
    """Return the share of rows that an ensemble of attacks leaves correctly classified, from 0 to 1.

    An upper bound of the true robust accuracy, and equal to it for linear models of up to 100 classes. The arguments
    are those of `evaluate_robustness`, which returns more.

    Args:
        model: As in `evaluate_robustness`.
        x: Clean inputs, (N, ...).
        labels: (N,). None: the model's predictions at `x`.
        attacks: Name to attack.
        batch_size: Rows at once.
        generator: As in `evaluate_robustness`.
        verbose: As in `evaluate_robustness`.
        **options: `epsilon`, `norm`, `bounds`, `mask` or `ball`; `logits`.

    Raises:
        TypeError: As in `evaluate_robustness`.
        ValueError: As in `evaluate_robustness`.

    References:
        Croce and Hein, "Reliable evaluation of adversarial robustness with an ensemble of diverse parameter-free
        attacks", 2020.

    Example:
        >>> weight = torch.tensor([[3.0, 0.0], [0.0, 3.0]])
        >>> x = torch.tensor([[0.9, 0.1], [0.6, 0.5]])
        >>> robust_accuracy(lambda x: x @ weight.T, x, torch.tensor([0, 0]), epsilon=0.2)
        0.5
    """
    return evaluate_robustness(
        model, x, labels, attacks=attacks, batch_size=batch_size, generator=generator, verbose=verbose, **options
    ).robust_accuracy


def robustness_curve(
    model: Callable[[Tensor], Tensor],
    x: Tensor,
    labels: Tensor | None = None,
    *,
    epsilons: Sequence[float],
    attacks: Mapping[str, Attack | Stages] | None = None,
    batch_size: int = 1000,
    generator: torch.Generator | int | None = 0,
    logits: Pick | None = None,
    **fields: Unpack[BallFields],
) -> dict[float, float]:
    """Return the robust accuracy for each of several radii, which never rises with the radius.

    The radii `epsilons`, in any order, are tried from the smallest on. An example that breaks a row breaks it for every
    larger radius too, so each radius is tried only on the rows that are left. The other arguments are those of
    `evaluate_robustness`.

    Returns:
        Radius to robust accuracy, from 0 to 1, in the order of `epsilons`.

    Raises:
        TypeError: As in `pgd`.
        ValueError: As in `evaluate_robustness`, or if there are no `epsilons`.

    References:
        Croce and Hein, "Reliable evaluation of adversarial robustness with an ensemble of diverse parameter-free
        attacks", 2020.

    Example:
        >>> weight = torch.tensor([[3.0, 0.0], [0.0, 3.0]])
        >>> x = torch.tensor([[0.9, 0.1], [0.6, 0.5]])
        >>> robustness_curve(lambda x: x @ weight.T, x, torch.tensor([0, 0]), epsilons=[0.0, 0.2, 0.5])
        {0.0: 1.0, 0.2: 0.5, 0.5: 0.0}
    """
    if not isinstance(epsilons, Iterable):
        raise TypeError(f"`epsilons` should be radii, as in [0.1, 0.2]. Found {type(epsilons).__name__}.")
    radii = [number("epsilons", epsilon, least=0) for epsilon in epsilons]
    if not radii:
        raise ValueError("`epsilons` should be radii, at least one. Found none.")
    check_inputs("x", x)
    labels = None if labels is None else check_classes("labels", labels, len(x))
    draws = seeded_generator(generator)
    standing = torch.ones(len(x), dtype=torch.bool, device=x.device)
    shares = {}
    for epsilon in sorted(radii):
        rows = standing.nonzero()[:, 0]
        found = evaluate_robustness(
            model,
            x[rows],
            None if labels is None else labels[rows],
            ball=Ball(epsilon, **fields).rows(rows, x),
            logits=logits,
            attacks=attacks,
            batch_size=batch_size,
            generator=draws,
        )
        standing[rows] = found.robust
        shares[epsilon] = standing.double().mean().item()
    return {epsilon: shares[epsilon] for epsilon in radii}


def ensemble(
    model: Callable[[Tensor], Tensor],
    x: Tensor,
    labels: Tensor | None = None,
    *,
    attacks: Mapping[str, Attack | Stages] | None = None,
    batch_size: int = 1000,
    generator: torch.Generator | int | None = 0,
    verbose: int = 0,
    **options: Unpack[CommonOptions],
) -> Tensor:
    """Return the adversarial examples of an ensemble of attacks: `evaluate_robustness` as an attack like the others.

    The arguments are those of `evaluate_robustness`.

    Returns:
        Examples with the shape, dtype and device of `x`: where a row was broken, the example that broke it; else the
        strongest example tried. A constant while the block `EXAMPLE` is in place.

    Raises:
        TypeError: As in `evaluate_robustness`.
        ValueError: As in `evaluate_robustness`.

    Example:
        >>> weight = torch.tensor([[3.0, 0.0], [0.0, 3.0]])
        >>> x = torch.tensor([[0.6, 0.5]])
        >>> ensemble(lambda x: x @ weight.T, x, torch.tensor([0]), epsilon=0.25)
        tensor([[0.3500, 0.7500]])
    """
    return evaluate_robustness(
        model, x, labels, attacks=attacks, batch_size=batch_size, generator=generator, verbose=verbose, **options
    ).examples


class _Standing:
    """A batch under one attack after the other, and which of its rows still stand."""

    def __init__(self, batch: Setting, generator: torch.Generator) -> None:
        self.batch, self._generator = batch, generator
        self.logits = logits = batch.logits(batch.x)
        self.n_classes = logits.shape[1]
        self.correct = ~_errs(logits, batch.labels)
        self.robust = self.correct.clone()
        self.examples = batch.x.clone()
        self._strength = difference_loss(logits, batch.labels)

    def attack_in(self, stages: Stages, *, until_in_vain: bool) -> int:
        """Attack the standing rows in stages, up to the first in vain if so asked; return the number of broken rows."""
        total = 0
        for stage in stages:
            fallen = self.attack(stage)
            total += fallen
            if until_in_vain and not fallen:
                break
        return total

    def attack(self, attack: Attack) -> int:
        """Attack the standing rows, and return the number of broken ones."""
        rows = self.robust.nonzero()[:, 0]
        if not len(rows):
            return 0
        left = self.batch.rows(rows)
        threat = left.threat
        epsilon = sizes_of("epsilon", threat.epsilon, left.x.device)
        epsilon = epsilon if epsilon.dim() > 1 else epsilon.expand(len(left.x))
        own = {"epsilon": epsilon, "norm": threat.norm, "bounds": threat.bounds, "mask": threat.mask}
        draws = {"generator": self._generator} if _draws(attack) else {}
        found = attack(left.model, left.x, left.labels, **own, **draws)
        found = torch.where(found.isnan(), left.x, found).clamp(left.ball.lower, left.ball.upper)
        found = left.ball.settle(found)
        logits = left.logits(found)
        fallen = _errs(logits, left.labels)
        strength = difference_loss(logits, left.labels)
        better = rows[fallen | (strength > self._strength[rows])]
        self.examples = self.examples.index_copy(0, better, found[torch.isin(rows, better)])
        self._strength[rows] = strength.maximum(self._strength[rows])
        self.robust[rows[fallen]] = False
        return int(fallen.sum())


def _draws(attack: Attack) -> bool:
    """Return whether an attack takes a generator; the options of an attack of this project do not have one."""
    try:
        parameters = inspect.signature(attack).parameters
    except ValueError:  # of a function in C
        return True
    inner: Any = attack
    while isinstance(inner, partial):
        inner = inner.func
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    is_own = (getattr(inner, "__module__", None) or "").startswith("toolkit.adversarial.")
    return "generator" in parameters or (takes_any and not is_own)


def _stages(name: str, attack: Attack | Stages) -> Stages:
    stages = attack if isinstance(attack, tuple) else (attack,)
    for stage in stages:
        if not callable(stage):
            raise TypeError(f"`attacks` should be functions by their names. Found {stage!r} as {name!r}.")
    return stages


def _errs(logits: Tensor, labels: Tensor) -> Tensor:
    return (logits.argmax(1) != labels) | logits.isnan().any(1)
