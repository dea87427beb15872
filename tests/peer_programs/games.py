"""Games: two players of a polynomial game, generative adversarial networks, gradient reversal."""

from collections.abc import Callable
from typing import Any

from peer_programs._parts import Arrays, log_one_plus_exp

RATE = 0.4


def first(np: Any, x: Any, y: Any) -> Any:
    return 0.15 * x * x + 1.2 * x * y + 0.1 * x * x * x * y


def second(np: Any, x: Any, y: Any) -> Any:
    return -0.1 * y * y - 0.9 * x * y + 0.2 * y * y * x


def slopes(np: Any, grad: Any) -> tuple[Callable[[Any, Any], Any], Callable[[Any, Any], Any]]:
    """Return the derivative of each loss by its own player."""
    return (
        lambda x, y: grad(lambda z: first(np, z, y))(x),
        lambda x, y: grad(lambda z: second(np, x, z))(y),
    )


def simultaneous_play(np: Any, stop: Any, grad: Any, p: Arrays, c: Arrays) -> Any:
    x, y = p["x"], p["y"]
    return first(np, x, stop("games.opponents", y)) + second(np, stop("games.opponents", x), y)


def alternating_play(np: Any, stop: Any, grad: Any, p: Arrays, c: Arrays) -> Any:
    x, y = p["x"], p["y"]
    held = stop("games.opponents", y)
    moved = stop("games.earlier_moves", x - RATE * slopes(np, grad)[0](x, held))
    return first(np, x, held) + second(np, moved, y)


def lookahead_play(np: Any, stop: Any, grad: Any, p: Arrays, c: Arrays) -> Any:
    x, y = p["x"], p["y"]
    of_first, of_second = slopes(np, grad)
    held_x, held_y = stop("games.opponents", x), stop("games.opponents", y)
    value = first(np, x, held_y - stop("games.opponent_step", RATE * of_second(x, held_y)))
    return value + second(np, held_x - stop("games.opponent_step", RATE * of_first(held_x, y)), y)


def corrections_of_play(np: Any, stop: Any, grad: Any, p: Arrays, c: Arrays) -> Any:
    x, y = p["x"], p["y"]
    of_first, of_second = slopes(np, grad)
    field = of_first(x, y), of_second(x, y)
    along = [stop("games.field", slope) for slope in field]
    consensus = along[0] * field[0] + along[1] * field[1]
    held_x, held_y = stop("games.opponents", x), stop("games.opponents", y)
    sums = along[0] * of_first(x, held_y) + along[1] * grad(lambda z: first(np, x, z))(held_y)
    sums = sums + along[0] * grad(lambda z: second(np, z, y))(held_x) + along[1] * of_second(held_x, y)
    return consensus + 0.7 * 0.5 * (consensus - sums)


def logits(np: Any, x: Any, weights: tuple[Any, Any]) -> Any:
    return np.sum(np.tanh(np.matmul(x, weights[0])) * weights[1], axis=-1)


def non_saturating_gan(np: Any, stop: Any, grad: Any, p: Arrays, c: Arrays) -> Any:
    fake, weights = np.matmul(c["noise"], p["generator"]), (p["first"], p["second"])
    rejected = log_one_plus_exp(np, logits(np, stop("games.fake", fake), weights))
    judges = (stop("games.judge", weights[0]), stop("games.judge", weights[1]))
    accepted = log_one_plus_exp(np, -logits(np, fake, judges))
    return np.mean(log_one_plus_exp(np, -logits(np, c["real"], weights))) + np.mean(rejected) + np.mean(accepted)


def wgan_gp(np: Any, stop: Any, grad: Any, p: Arrays, c: Arrays) -> Any:
    fake, weights = np.matmul(c["noise"], p["generator"]), (p["first"], p["second"])
    points = stop("games.interpolates", c["mixed"] * c["real"] + (1 - c["mixed"]) * fake)
    slopes_of_points = grad(lambda x: np.sum(logits(np, x, weights)))(points)
    lengths = np.sqrt(np.sum(slopes_of_points * slopes_of_points, axis=-1))
    return np.mean((lengths - 1) * (lengths - 1))


def domain_adversarial(np: Any, stop: Any, grad: Any, p: Arrays, c: Arrays) -> Any:
    def of_domain(x: Any, sign: float) -> Any:
        held = stop("games.reversed", x)
        z = np.sum((held - 0.7 * (x - held)) * p["weight"], axis=-1)
        return np.sum(log_one_plus_exp(np, sign * z))

    return (of_domain(p["source"], 1.0) + of_domain(p["target"], -1.0)) / 5


PROGRAMS = {
    simultaneous_play: ("games.opponents",),
    alternating_play: ("games.opponents", "games.earlier_moves"),
    lookahead_play: ("games.opponents", "games.opponent_step"),
    corrections_of_play: ("games.field", "games.opponents"),
    non_saturating_gan: ("games.fake", "games.judge"),
    wgan_gp: ("games.interpolates",),
    domain_adversarial: ("games.reversed",),
}
