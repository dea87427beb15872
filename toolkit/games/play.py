r"""Surrogates of differentiable games: their gradient is a direction of play that is not the gradient of any loss.

Player i has parameters :math:`x_i` and a loss :math:`L_i(x_1, \ldots, x_n)`. The field of simultaneous play is
:math:`\xi = (\partial_1 L_1, \ldots, \partial_n L_n)`, and :math:`J` its Jacobian, whose antisymmetric part turns the
players around each other. Step sizes are positive: all players minimise.

n players. A player is a tensor or a tree of tensors, such as ``dict(module.named_parameters())``; each loss is called
with all players in their order and returns a scalar.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from toolkit._checks import number
from toolkit._slopes import scalar, value_and_slopes
from toolkit.blocks import block, is_blocked, map_tensors, stop_gradient

__all__ = [
    "EARLIER_MOVES",
    "FIELD",
    "OPPONENTS",
    "OPPONENT_STEP",
    "alternating_loss",
    "consensus_penalty",
    "game_field",
    "lola_loss",
    "lookahead_loss",
    "simultaneous_loss",
    "symplectic_penalty",
]

OPPONENTS = block(
    "games.opponents",
    "A player moves its own parameters: in its loss those of the others are constants, or it would move them too, "
    "against their own losses.",
)
EARLIER_MOVES = block(
    "games.earlier_moves",
    "The players that moved before are where they are: the move of a later player does not train an earlier one.",
)
FIELD = block(
    "games.field",
    "The field is the direction in which a derivative is taken; one of its two factors is held, or the derivative of "
    "the direction is added.",
)
OPPONENT_STEP = block(
    "games.opponent_step",
    "The opponents' step is a prediction: a player that differentiates it learns to shape it, which is another "
    "algorithm.",
)

Player = Any
Loss = Callable[..., Tensor]


def simultaneous_loss(losses: Sequence[Loss], players: Sequence[Player]) -> Tensor:
    r"""Return :math:`\sum_i L_i(x_i, \operatorname{sg} x_{-i})`, whose gradient is the field :math:`\xi`.

    One backward pass and one optimiser move all players at the same time. With the block `OPPONENTS` open the gradient
    is that of :math:`\sum_i L_i`: zero in a zero-sum game, in which nobody moves.

    Args:
        losses: One for each player.
        players: Their parameters.

    Returns:
        A scalar.

    Raises:
        ValueError: If `losses` and `players` differ in number, if there are fewer than two, or if a loss is not a
            scalar.

    References:
        Mescheder, Nowozin and Geiger, "The numerics of GANs", 2017, section 2. Balduzzi et al., "The mechanics of
        n-player differentiable games", 2018, section 2.

    Example:
        >>> x, y = torch.tensor(1.0, requires_grad=True), torch.tensor(2.0, requires_grad=True)
        >>> loss = simultaneous_loss([lambda x, y: x * y, lambda x, y: -x * y], [x, y])
        >>> torch.autograd.grad(loss, [x, y])
        (tensor(2.), tensor(-1.))
    """
    _check(losses, players)
    return _sum(scalar(loss(*_seen_by(i, players))) for i, loss in enumerate(losses))


def alternating_loss(losses: Sequence[Loss], players: Sequence[Player], *, learning_rate: float) -> Tensor:
    r"""Return :math:`\sum_i L_i(\operatorname{sg} x^+_1, \ldots, \operatorname{sg} x^+_{i-1}, x_i, \ldots)`.

    Here :math:`x^+_j = x_j - \alpha \partial_j L_j` is the move that player j has made already. A step of gradient
    descent on this surrogate with the same rate :math:`\alpha` is one round of alternating play: every player answers
    the moves before its own. With the block `EARLIER_MOVES` open, a later player's loss trains the earlier ones:
    :math:`+ (I - \alpha J_{jj})^T \partial_j L_i(x^+)` for player j in a game of two, with :math:`J_{jj}` the Hessian
    of :math:`L_j` in :math:`x_j`.

    Args:
        losses: As in `simultaneous_loss`, in the order of the moves.
        players: As in `simultaneous_loss`.
        learning_rate: The step size of gradient descent, :math:`\alpha`.

    Returns:
        A scalar.

    Raises:
        ValueError: As in `simultaneous_loss`, or if `learning_rate` is not positive.

    References:
        Mescheder, Geiger and Nowozin, "Which training methods for GANs do actually converge?", 2018, section 2.

    Example:
        >>> x, y = torch.tensor(1.0, requires_grad=True), torch.tensor(2.0, requires_grad=True)
        >>> loss = alternating_loss([lambda x, y: x * y, lambda x, y: -x * y], [x, y], learning_rate=0.1)
        >>> torch.autograd.grad(loss, [x, y])
        (tensor(2.), tensor(-0.8000))
    """
    rate = _checked_rate(losses, players, learning_rate)
    total: list[Tensor] = []
    moved: list[Player] = []
    for i, loss in enumerate(losses):
        earlier = map_tensors(lambda tensor: stop_gradient(tensor, EARLIER_MOVES), moved)
        value, (step,) = _with_slopes(loss, [*earlier, players[i], *_held(players[i + 1 :])], [i])
        total.append(value)
        moved.append(_minus(players[i], step, rate))
    return _sum(total)


def lookahead_loss(losses: Sequence[Loss], players: Sequence[Player], *, learning_rate: float) -> Tensor:
    r"""Return :math:`\sum_i L_i(x_i, \operatorname{sg} x_{-i} - \operatorname{sg} s_{-i})`, the surrogate of LookAhead.

    Each player answers the point to which its opponents would go in their next step,
    :math:`s_j = \alpha \partial_j L_j(x_i, \operatorname{sg} x_{-i})`. With the block `OPPONENT_STEP` open, the
    gradient of player i also has :math:`-\alpha \sum_j (\partial_i \partial_j L_j)^T \partial_j L_i`: the player shapes
    the learning of its opponents, as in LOLA (`lola_loss`).

    Args:
        losses: As in `simultaneous_loss`.
        players: As in `simultaneous_loss`.
        learning_rate: The opponents' step size, :math:`\alpha`.

    Returns:
        A scalar.

    Raises:
        ValueError: As in `alternating_loss`.

    References:
        Zhang and Lesser, "Multi-agent learning with policy prediction", 2010. Letcher, Foerster, Balduzzi, Rocktäschel
        and Whiteson, "Stable opponent shaping in differentiable games", 2019, section 2.

    Example:
        >>> x, y = torch.tensor(1.0, requires_grad=True), torch.tensor(2.0, requires_grad=True)
        >>> loss = lookahead_loss([lambda x, y: x * y, lambda x, y: -x * y], [x, y], learning_rate=0.1)
        >>> torch.autograd.grad(loss, [x, y])
        (tensor(2.1000), tensor(-0.8000))
    """
    rate = _checked_rate(losses, players, learning_rate)
    recorded = not is_blocked(OPPONENT_STEP)
    total = []
    for i, loss in enumerate(losses):
        seen, steps = _opponents_steps(losses, players, i, recorded=recorded)
        steps = map_tensors(lambda tensor: stop_gradient(tensor, OPPONENT_STEP), steps)
        total.append(scalar(loss(*_after(seen, steps, rate))))
    return _sum(total)


def lola_loss(losses: Sequence[Loss], players: Sequence[Player], *, learning_rate: float) -> Tensor:
    r"""Return :math:`\sum_i L_i(x_i, \operatorname{sg} x_{-i} - s_{-i}(x_i))`, the surrogate of LOLA.

    It has the value of `lookahead_loss`, but the opponents' steps carry a gradient: each player accounts for its
    influence on the learning of the others, which it assumes to be naive learners. The opponents themselves are held by
    the block `OPPONENTS`; with it open, the gradient is that of the whole sum, which also moves the opponents.

    Arguments, result and errors are those of `lookahead_loss`.

    References:
        Foerster, Chen, Al-Shedivat, Whiteson, Abbeel and Mordatch, "Learning with opponent-learning awareness", 2018.
        The surrogate is not expanded to first order in :math:`\alpha`, as in Letcher et al., "Stable opponent shaping
        in differentiable games", 2019.

    Example:
        >>> x, y = torch.tensor(1.0, requires_grad=True), torch.tensor(2.0, requires_grad=True)
        >>> loss = lola_loss([lambda x, y: x * y, lambda x, y: -x * y], [x, y], learning_rate=0.1)
        >>> torch.autograd.grad(loss, [x, y])
        (tensor(2.2000), tensor(-0.6000))
    """
    rate = _checked_rate(losses, players, learning_rate)
    total = []
    for i, loss in enumerate(losses):
        seen, steps = _opponents_steps(losses, players, i, recorded=True)
        total.append(scalar(loss(*_after(seen, steps, rate))))
    return _sum(total)


def consensus_penalty(losses: Sequence[Loss], players: Sequence[Player]) -> Tensor:
    r"""Return :math:`\operatorname{sg}(\xi) \cdot \xi = \lVert \xi \rVert^2`, whose gradient is :math:`J^T \xi`.

    Consensus optimisation descends ``simultaneous_loss(...) + gamma * consensus_penalty(...)``: each player also makes
    the field shorter. The gradient is that of :math:`\lVert \xi \rVert^2 / 2`; with the block `FIELD` open it is twice
    as long, so the block is a factor of two in gamma and nothing else.

    Arguments, result and errors are those of `simultaneous_loss`.

    References:
        Mescheder, Nowozin and Geiger, "The numerics of GANs", 2017, section 4, algorithm 2.

    Example:
        >>> x, y = torch.tensor(1.0, requires_grad=True), torch.tensor(2.0, requires_grad=True)
        >>> penalty = consensus_penalty([lambda x, y: x * y, lambda x, y: -x * y], [x, y])
        >>> torch.autograd.grad(penalty, [x, y])
        (tensor(1.), tensor(2.))
    """
    field = game_field(losses, players)
    return _dot(_held_field(field), field)


def symplectic_penalty(losses: Sequence[Loss], players: Sequence[Player]) -> Tensor:
    r"""Return a surrogate whose gradient is :math:`A^T \xi`, with :math:`A = (J - J^T) / 2`.

    The symplectic gradient adjustment descends ``simultaneous_loss(...) + weight * symplectic_penalty(...)``. A
    positive weight turns the field towards stable fixed points, and a negative weight turns it away from unstable ones;
    algorithm 1 of the paper chooses the sign. The surrogate is

    .. math::
        \tfrac12 \operatorname{sg}(\xi) \cdot \xi
        - \tfrac12 \sum_i \operatorname{sg}(\xi) \cdot \nabla L_i(x_i, \operatorname{sg} x_{-i}),

    where the second sum is the derivative of each player's loss along the held field, with gradient :math:`J \xi`. With
    the block `FIELD` open, the gradient is :math:`A^T \xi + (J^T \xi - \sum_i J^T \nabla L_i) / 2`.

    Arguments, result and errors are those of `simultaneous_loss`.

    References:
        Balduzzi, Racanière, Martens, Foerster, Tuyls and Graepel, "The mechanics of n-player differentiable games",
        2018, section 3 and algorithm 1.

    Example:
        >>> x, y = torch.tensor(1.0, requires_grad=True), torch.tensor(2.0, requires_grad=True)
        >>> penalty = symplectic_penalty([lambda x, y: x * y, lambda x, y: -x * y], [x, y])
        >>> torch.autograd.grad(penalty, [x, y])
        (tensor(1.), tensor(2.))
    """
    field = game_field(losses, players)
    held = _held_field(field)
    everyone = range(len(players))
    slopes = [_with_slopes(loss, _seen_by(i, players), everyone)[1] for i, loss in enumerate(losses)]
    return 0.5 * (_dot(held, field) - _sum(_dot(held, slope) for slope in slopes))


def game_field(losses: Sequence[Loss], players: Sequence[Player]) -> list[Player]:
    r"""Return the field :math:`\xi`, differentiable: the gradient of each player's loss in its own parameters.

    Arguments and errors are those of `simultaneous_loss`.

    Returns:
        The gradients, in the form of `players`; zeros where a loss does not depend on a parameter.

    References:
        Balduzzi et al., "The mechanics of n-player differentiable games", 2018, section 2.

    Example:
        >>> x, y = torch.tensor(1.0), torch.tensor(2.0)
        >>> [slope.item() for slope in game_field([lambda x, y: x * y, lambda x, y: -x * y], [x, y])]
        [2.0, -1.0]
    """
    _check(losses, players)
    return [_with_slopes(loss, players, [i])[1][0] for i, loss in enumerate(losses)]


def _opponents_steps(
    losses: Sequence[Loss], players: Sequence[Player], i: int, *, recorded: bool
) -> tuple[list[Player], list[Player]]:
    """Return the players as player i sees them, and the slopes of the opponents' losses; its own is zero."""
    seen = _seen_by(i, players)
    steps = [
        map_tensors(torch.zeros_like, player) if j == i else _with_slopes(losses[j], seen, [j], recorded=recorded)[1][0]
        for j, player in enumerate(seen)
    ]
    return seen, steps


def _seen_by(i: int, players: Sequence[Player]) -> list[Player]:
    """Return the players with all but player i held."""
    return [*_held(players[:i]), players[i], *_held(players[i + 1 :])]


def _held(players: Sequence[Player]) -> list[Player]:
    return [map_tensors(lambda tensor: stop_gradient(tensor, OPPONENTS), player) for player in players]


def _held_field(field: list[Player]) -> list[Player]:
    return [map_tensors(lambda tensor: stop_gradient(tensor, FIELD), slope) for slope in field]


def _with_slopes(
    loss: Loss, players: Sequence[Player], of: Iterable[int], *, recorded: bool = True
) -> tuple[Tensor, list[Player]]:
    """Return a loss, and its gradient with respect to some of the players."""
    chosen = list(of)
    leaves, form = tree_flatten([players[j] for j in chosen])

    def at(values: list[Tensor]) -> Tensor:
        moved = dict(zip(chosen, tree_unflatten(values, form), strict=True))
        return loss(*(moved.get(j, player) for j, player in enumerate(players)))

    value, slopes = value_and_slopes(at, leaves, recorded=recorded)
    return value, tree_unflatten(slopes, form)


def _after(players: Sequence[Player], slopes: Sequence[Player], rate: float) -> list[Player]:
    return [_minus(player, slope, rate) for player, slope in zip(players, slopes, strict=True)]


def _minus(player: Player, slope: Player, rate: float) -> Player:
    """Return a player after one step of gradient descent."""
    leaves, form = tree_flatten(player)
    return tree_unflatten([leaf - rate * s for leaf, s in zip(leaves, tree_leaves(slope), strict=True)], form)


def _dot(a: Player, b: Player) -> Tensor:
    return _sum((one * other).sum() for one, other in zip(tree_leaves(a), tree_leaves(b), strict=True))


def _sum(values: Iterable[Tensor]) -> Tensor:
    first, *others = values
    return sum(others, start=first)


def _check(losses: Sequence[Loss], players: Sequence[Player]) -> None:
    if len(losses) != len(players) or len(players) < 2:
        raise ValueError(
            f"`losses` should have one loss for each of two or more players. Found {len(losses)} losses and "
            f"{len(players)} players."
        )


def _checked_rate(losses: Sequence[Loss], players: Sequence[Player], learning_rate: float) -> float:
    _check(losses, players)
    return number("learning_rate", learning_rate, above=0)
