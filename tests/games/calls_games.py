"""A call of every public function of the games that takes a number or a generator."""

import torch
from calls import Call

from toolkit import games

POINTS = torch.tensor([[0.3, -1.2], [0.8, 0.5]])
GAME = {
    "losses": [lambda x, y: (x * y).sum(), lambda x, y: -(x * y).sum()],
    "players": [torch.ones(2, requires_grad=True), torch.zeros(2, requires_grad=True)],
    "learning_rate": 0.1,
}

CALLS = {
    "games.alternating_loss": Call(games.alternating_loss, **GAME),
    "games.dirac_gan": Call(games.dirac_gan, kind="hinge", real=1.0),
    "games.domain_adversarial_loss": Call(
        games.domain_adversarial_loss, discriminator=lambda x: x.sum(1), source=POINTS, target=POINTS, scale=0.5
    ),
    "games.gradient_penalty": Call(
        games.gradient_penalty, discriminator=lambda x: x.square().sum(1), real=POINTS, fake=-POINTS
    ),
    "games.lola_loss": Call(games.lola_loss, **GAME),
    "games.lookahead_loss": Call(games.lookahead_loss, **GAME),
    "games.reverse_gradient": Call(games.reverse_gradient, input=POINTS, scale=0.5),
}
