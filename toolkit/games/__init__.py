"""Games: several players, each with its own loss, and the blocks that keep a loss from moving the other players.

- `gan`: losses of a discriminator and a generator (minimax, non-saturating, hinge, Wasserstein), penalties on the
  discriminator's gradient, and the Dirac-GAN, the smallest of them.
- `play`: surrogates of n-player differentiable games, whose gradient is the field of simultaneous or alternating play,
  of LookAhead or LOLA, and the consensus and symplectic corrections of that field.
- `reversal`: gradient reversal, and domain-adversarial training with it.
"""

from toolkit.games.gan import (
    FAKE,
    INTERPOLATES,
    JUDGE,
    dirac_gan,
    discriminator_loss,
    generator_loss,
    gradient_penalty,
    zero_centred_penalty,
)
from toolkit.games.play import (
    EARLIER_MOVES,
    FIELD,
    OPPONENT_STEP,
    OPPONENTS,
    alternating_loss,
    consensus_penalty,
    game_field,
    lola_loss,
    lookahead_loss,
    simultaneous_loss,
    symplectic_penalty,
)
from toolkit.games.reversal import REVERSED, domain_adversarial_loss, reverse_gradient

__all__ = [
    "EARLIER_MOVES",
    "FAKE",
    "FIELD",
    "INTERPOLATES",
    "JUDGE",
    "OPPONENTS",
    "OPPONENT_STEP",
    "REVERSED",
    "alternating_loss",
    "consensus_penalty",
    "dirac_gan",
    "discriminator_loss",
    "domain_adversarial_loss",
    "game_field",
    "generator_loss",
    "gradient_penalty",
    "lola_loss",
    "lookahead_loss",
    "reverse_gradient",
    "simultaneous_loss",
    "symplectic_penalty",
    "zero_centred_penalty",
]
