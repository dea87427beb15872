"""Play: every surrogate has the stated direction as its gradient, in a game whose derivatives are written by hand."""

from functools import partial

import pytest
import torch
from contract import BlockCase
from torch import nn
from torch.func import functional_call

from toolkit import unblock
from toolkit.games import (
    EARLIER_MOVES,
    FIELD,
    OPPONENT_STEP,
    OPPONENTS,
    alternating_loss,
    consensus_penalty,
    dirac_gan,
    game_field,
    lola_loss,
    lookahead_loss,
    simultaneous_loss,
    symplectic_penalty,
)
from toolkit.gradients import compare, field_jacobian

RATE = 0.4


def first(x, y):
    return (0.15 * x**2 + 1.2 * x * y + 0.1 * x**3 * y).sum()


def second(x, y):
    return (-0.1 * y**2 - 0.9 * x * y + 0.2 * y**2 * x).sum()


GAME = [first, second]


class Derivatives:
    """The derivatives of both losses, by hand; ``xy_1`` is the mixed one of the first."""

    def __init__(self, x, y):
        self.x_1, self.y_1 = 0.3 * x + 1.2 * y + 0.3 * x**2 * y, 1.2 * x + 0.1 * x**3
        self.xx_1, self.xy_1 = 0.3 + 0.6 * x * y, 1.2 + 0.3 * x**2
        self.x_2, self.y_2 = -0.9 * y + 0.2 * y**2, -0.2 * y - 0.9 * x + 0.4 * x * y
        self.xy_2, self.yy_2 = -0.9 + 0.4 * y, -0.2 + 0.4 * x

    @property
    def jacobian(self):
        return torch.stack([torch.stack([self.xx_1, self.xy_1]), torch.stack([self.xy_2, self.yy_2])])

    @property
    def field(self):
        return torch.stack([self.x_1, self.y_2])


def point(x=0.7, y=-0.8):
    def leaf(value):
        return torch.tensor(value, dtype=torch.float64, requires_grad=True)

    return {"x": leaf(x), "y": leaf(y)}


def witness(formula):
    """Return a witness whose formula gets the derivatives at a point, and the derivatives elsewhere."""

    def found(parameters):
        x, y = (parameters[name].detach() for name in "xy")
        x_slope, y_slope = formula(Derivatives(x, y), lambda a=0.0, b=0.0: Derivatives(x + a, y + b))
        return {"x": x_slope, "y": y_slope}

    return found


def loss(function, **options):
    return lambda p: function(GAME, [p["x"], p["y"]], **options)


def symplectic_open(d, at):
    j, xi = d.jacobian, d.field
    losses = torch.stack([d.x_1 + d.x_2, d.y_1 + d.y_2])
    return (j.T @ xi - j @ xi) / 2 + (j.T @ xi - j.T @ losses) / 2


def symplectic_unheld(d, at):
    """With the opponents open the second sum has the full Hessians of the losses."""
    h_1 = torch.stack([torch.stack([d.xx_1, d.xy_1]), torch.stack([d.xy_1, torch.zeros_like(d.xx_1)])])
    h_2 = torch.stack([torch.stack([torch.zeros_like(d.xx_1), d.xy_2]), torch.stack([d.xy_2, d.yy_2])])
    return (d.jacobian.T @ d.field - (h_1 + h_2) @ d.field) / 2


def lookahead(d, at):
    return at(b=-RATE * d.y_2).x_1, at(a=-RATE * d.x_1).y_2


def lola(d, at):
    x, y = lookahead(d, at)
    return x - RATE * d.xy_2 * at(b=-RATE * d.y_2).y_1, y - RATE * d.xy_1 * at(a=-RATE * d.x_1).x_2


def whole_lola(d, at):
    x, y = lola(d, at)
    return (
        x + (1 - RATE * d.xx_1) * at(a=-RATE * d.x_1).x_2,
        y + (1 - RATE * d.yy_2) * at(b=-RATE * d.y_2).y_1,
    )


def alternating(d, at):
    return d.x_1, at(a=-RATE * d.x_1).y_2


def trained_by_the_later(d, at):
    x, y = alternating(d, at)
    return x + (1 - RATE * d.xx_1) * at(a=-RATE * d.x_1).x_2, y


def case(name, block, function, blocked, opened, **options):
    return BlockCase(
        id=f"games-{name}",
        block=block,
        parameters=point,
        loss=loss(function, **options),
        blocked=witness(blocked),
        opened=witness(opened),
    )


BLOCK_CASES = [
    case(
        "simultaneous",
        OPPONENTS,
        simultaneous_loss,
        lambda d, at: d.field,
        lambda d, at: (d.x_1 + d.x_2, d.y_1 + d.y_2),
    ),
    case("alternating", EARLIER_MOVES, alternating_loss, alternating, trained_by_the_later, learning_rate=RATE),
    case(
        "alternating-opponents",
        OPPONENTS,
        alternating_loss,
        alternating,
        lambda d, at: (d.x_1, at(a=-RATE * d.x_1).y_2 + d.y_1),
        learning_rate=RATE,
    ),
    case("lookahead", OPPONENT_STEP, lookahead_loss, lookahead, lola, learning_rate=RATE),
    case("lola", OPPONENTS, lola_loss, lola, whole_lola, learning_rate=RATE),
    case(
        "consensus",
        FIELD,
        consensus_penalty,
        lambda d, at: d.jacobian.T @ d.field,
        lambda d, at: 2 * d.jacobian.T @ d.field,
    ),
    case(
        "symplectic",
        FIELD,
        symplectic_penalty,
        lambda d, at: (d.jacobian.T - d.jacobian) @ d.field / 2,
        symplectic_open,
    ),
    case(
        "symplectic-opponents",
        OPPONENTS,
        symplectic_penalty,
        lambda d, at: (d.jacobian.T - d.jacobian) @ d.field / 2,
        symplectic_unheld,
    ),
]


POINT = {name: value.detach() for name, value in point().items()}


def of_players(function, **options):
    return POINT, {}, lambda p, c: function(GAME, [p["x"], p["y"]], **options)


PEER_CASES = {
    "simultaneous_play": of_players(simultaneous_loss),
    "alternating_play": of_players(alternating_loss, learning_rate=RATE),
    "lookahead_play": of_players(lookahead_loss, learning_rate=RATE),
    "corrections_of_play": (
        POINT,
        {},
        lambda p, c: consensus_penalty(GAME, [p["x"], p["y"]]) + 0.7 * symplectic_penalty(GAME, [p["x"], p["y"]]),
    ),
}


def gradient(value, p):
    return torch.stack(torch.autograd.grad(value, list(p.values())))


def exact(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)


def test_numbers_of_a_polynomial_game():
    p = point(0.5, -0.8)
    players = list(p.values())
    xi = gradient(simultaneous_loss(GAME, players), p)
    torch.testing.assert_close(xi, exact(-0.87, -0.45))
    consensus = gradient(consensus_penalty(GAME, players), p)
    torch.testing.assert_close(consensus, exact(0.4968, -1.10925))
    torch.testing.assert_close(xi + 0.1 * consensus, exact(-0.82032, -0.560925))
    symplectic = gradient(symplectic_penalty(GAME, players), p)
    torch.testing.assert_close(symplectic, exact(0.561375, -1.085325))
    torch.testing.assert_close(xi + symplectic, exact(-0.308625, -1.535325))
    assert gradient(lookahead_loss(GAME, players, learning_rate=0.4), p)[0].item() == pytest.approx(-0.6405)
    assert gradient(lola_loss(GAME, players, learning_rate=0.4), p)[0].item() == pytest.approx(-0.3416)


def test_lookahead_with_its_block_open_is_lola():
    p = point()
    players = list(p.values())
    expected = gradient(lola_loss(GAME, players, learning_rate=RATE), p)
    with unblock(OPPONENT_STEP):
        opened = gradient(lookahead_loss(GAME, players, learning_rate=RATE), p)
    torch.testing.assert_close(opened, expected, rtol=0, atol=0)


def test_a_step_on_the_alternating_surrogate_is_a_round_of_alternating_play():
    p = point()
    x, y = (value.item() for value in p.values())
    torch.optim.SGD(p.values(), lr=RATE).zero_grad()
    alternating_loss(GAME, list(p.values()), learning_rate=RATE).backward()
    torch.optim.SGD(p.values(), lr=RATE).step()
    x_next = x - RATE * (0.3 * x + 1.2 * y + 0.3 * x**2 * y)
    y_next = y - RATE * (-0.2 * y - 0.9 * x_next + 0.4 * x_next * y)
    assert [value.item() for value in p.values()] == pytest.approx([x_next, y_next])


def test_nobody_moves_in_a_zero_sum_game_without_the_block():
    p = point()
    game = [first, lambda x, y: -first(x, y)]
    verdicts = compare(lambda: simultaneous_loss(game, list(p.values())), p)
    assert all(abs(slope) < 1e-14 for slope in verdicts.gradient([OPPONENTS]).values())
    assert all(abs(slope) > 0.1 for slope in verdicts.blocked.values())


@pytest.mark.parametrize(
    ("kind", "weight", "eigenvalue"),
    [
        ("minimax", 0.0, 0.5j),
        ("non_saturating", 0.0, 0.5j),
        ("hinge", 0.0, 1j),
        ("wasserstein", 0.0, 1j),
        ("non_saturating", 0.5, -0.25 + 0.1875**0.5 * 1j),
    ],
)
def test_the_dirac_gan_circles_its_equilibrium_and_a_penalty_stops_it(kind, weight, eigenvalue):
    """The last row is R1; the field of the others is a rotation, of which no loss is the gradient."""
    of_discriminator, of_generator = dirac_gan(kind=kind)
    psi, theta = (torch.zeros((), dtype=torch.float64, requires_grad=True) for _ in range(2))
    losses = [lambda psi, theta: of_discriminator(psi, theta) + weight / 2 * psi**2, of_generator]
    field = field_jacobian(lambda: simultaneous_loss(losses, [psi, theta]), [psi, theta])
    assert complex(field.eigenvalues[0].real, abs(field.eigenvalues[0].imag)) == pytest.approx(eigenvalue, abs=1e-12)
    if not weight:
        assert field.asymmetry == pytest.approx(2.0)
        assert not field.is_gradient_field


def trajectory(surrogate, rate=0.2, steps=30):
    """Return the distances from the equilibrium of a bilinear game, squared."""
    p = {"psi": torch.tensor(1.0).double().requires_grad_(), "theta": torch.tensor(0.0).double().requires_grad_()}
    optimizer, distances = torch.optim.SGD(p.values(), lr=rate), []
    for _ in range(steps):
        distances.append(sum(value.item() ** 2 for value in p.values()))
        optimizer.zero_grad()
        surrogate(dirac_gan(kind="wasserstein"), list(p.values())).backward()
        optimizer.step()
    return distances


def test_simultaneous_steps_spiral_outwards_alternating_ones_stay_and_corrections_spiral_inwards():
    """One step of the first multiplies the squared distance by ``1 + rate^2``; the second has a conserved quantity."""
    outwards = trajectory(simultaneous_loss)
    assert outwards == pytest.approx([1.04**k for k in range(30)])
    around = trajectory(lambda losses, players: alternating_loss(losses, players, learning_rate=0.2))
    assert 0.89 < min(around) < max(around) < 1.12
    for penalty in (consensus_penalty, symplectic_penalty):
        inwards = trajectory(
            lambda losses, players, penalty=penalty: simultaneous_loss(losses, players) + penalty(losses, players)
        )
        assert inwards == pytest.approx([(0.8**2 + 0.2**2) ** k for k in range(30)])


def test_players_may_be_trees():
    networks = [nn.Linear(2, 1).double(), nn.Linear(2, 1, bias=False).double()]
    players = [dict(network.named_parameters()) for network in networks]
    inputs = torch.tensor([[0.3, -1.2], [0.8, 0.5]], dtype=torch.float64)

    def game(a, b):
        one, other = (functional_call(n, p, (inputs,)) for n, p in zip(networks, (a, b), strict=True))
        return (one * other + one.square()).sum()

    leaves = [parameter for player in players for parameter in player.values()]
    losses = [game, lambda a, b: -game(a, b)]
    found = torch.autograd.grad(simultaneous_loss(losses, players), leaves)
    field = [slope for player in game_field(losses, players) for slope in player.values()]
    naive = [*torch.autograd.grad(game(*players), leaves[:2]), *torch.autograd.grad(-game(*players), leaves[2:])]
    torch.testing.assert_close(found, tuple(naive))
    torch.testing.assert_close(tuple(field), tuple(naive))
    for surrogate in (consensus_penalty, symplectic_penalty):
        assert all(slope.isfinite().all() for slope in torch.autograd.grad(surrogate(losses, players), leaves))
    for surrogate in (alternating_loss, lookahead_loss, lola_loss):
        slopes = torch.autograd.grad(surrogate(losses, players, learning_rate=1e-9), leaves)
        torch.testing.assert_close(slopes, tuple(naive), rtol=1e-6, atol=1e-6)


def test_a_game_of_three_players():
    """Each loss is bilinear in its own player and the next one, so that the field is the next one's value."""
    values = [torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in (1.0, -2.0, 0.5)]
    losses = [lambda *p, i=i: p[i] * p[(i + 1) % 3] for i in range(3)]
    field = torch.stack(torch.autograd.grad(simultaneous_loss(losses, values), values))
    torch.testing.assert_close(field, exact(-2.0, 0.5, 1.0))
    jacobian = exact(0, 1, 0, 0, 0, 1, 1, 0, 0).view(3, 3)
    found = torch.stack(torch.autograd.grad(symplectic_penalty(losses, values), values))
    torch.testing.assert_close(found, (jacobian.T - jacobian) @ field / 2)
    ahead = torch.stack(torch.autograd.grad(lookahead_loss(losses, values, learning_rate=0.1), values))
    torch.testing.assert_close(ahead, jacobian @ (torch.stack(values).detach() - 0.1 * field))


def test_values_need_no_gradient():
    p = point()
    with torch.no_grad():
        assert simultaneous_loss(GAME, list(p.values())).item() == pytest.approx(first(**p).item() + second(**p).item())
        assert not lola_loss(GAME, list(p.values()), learning_rate=RATE).requires_grad
        assert not consensus_penalty(GAME, [value.detach() for value in p.values()]).requires_grad


SURROGATES = {
    "simultaneous": simultaneous_loss,
    "alternating": partial(alternating_loss, learning_rate=RATE),
    "lookahead": partial(lookahead_loss, learning_rate=RATE),
    "lola": partial(lola_loss, learning_rate=RATE),
    "consensus": consensus_penalty,
    "symplectic": symplectic_penalty,
}


@pytest.mark.slow
@pytest.mark.keeps_its_sums
@pytest.mark.parametrize("name", SURROGATES)
def test_many_games_at_once_and_compiled_ones_have_the_gradients_of_single_ones(name):
    """`torch.func.vmap` plays one game for each start."""

    def surrogate(x, y):
        return SURROGATES[name](GAME, [x, y])

    x, y = (point(x, y) for x, y in ((0.7, -0.8), (-0.2, 0.4)))
    expected = torch.stack([torch.stack(torch.autograd.grad(surrogate(**p), list(p.values()))) for p in (x, y)], 1)
    starts = [torch.stack([x[name], y[name]]).detach() for name in x]
    found = torch.func.vmap(torch.func.grad(surrogate, argnums=(0, 1)))(*starts)
    torch.testing.assert_close(torch.stack(found), expected)
    compiled = torch.compile(surrogate, backend="aot_eager", fullgraph=True)
    found = torch.stack(torch.autograd.grad(compiled(**x), list(x.values())))
    torch.testing.assert_close(found, expected[:, 0])


def test_a_loss_without_a_player_gives_it_no_direction():
    p = list(point().values())
    constant = [lambda x, y: y.square(), lambda x, y: torch.zeros(())]
    for players in (p, [value.detach() for value in p]):
        assert [slope.item() for slope in game_field(constant, players)] == [0, 0]
    assert lola_loss(constant, p, learning_rate=RATE).item() == pytest.approx(p[1].item() ** 2)


@pytest.mark.parametrize("name", SURROGATES)
def test_a_loss_that_is_no_scalar_is_refused(name):
    with pytest.raises(ValueError, match=r"^`loss` should return a scalar\. Found shape \(2,\)\.$"):
        SURROGATES[name]([lambda x, y: x * y, lambda x, y: -x * y], [torch.ones(2), torch.ones(2)])


@pytest.mark.parametrize("losses", [GAME[:1], [*GAME, first]])
def test_a_loss_for_each_player_is_required(losses):
    with pytest.raises(ValueError, match="`losses` should have one loss for each of two or more players"):
        simultaneous_loss(losses, list(point().values())[: max(1, len(losses) - 1)])


def test_a_learning_rate_that_is_not_positive_is_refused():
    with pytest.raises(ValueError, match="`learning_rate` should be positive"):
        lookahead_loss(GAME, list(point().values()), learning_rate=0.0)
