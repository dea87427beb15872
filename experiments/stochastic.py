r"""Gradients through random choices, on the handwritten digits.

- ``bandit``: a linear policy names the digit and is told only whether it was right. The score function estimator with a
  learned baseline, and a small cost of certainty that depends on the policy itself.
- ``bits``: an autoencoder with a code of a few random bits. All codes can be enumerated, so the exact gradient is
  known, and with it bias and standard deviation of each estimator, at the same number of samples.
- ``importance``: an autoencoder with Gaussian codes and a bound of several importance samples. The encoder learns from
  the doubly reparameterised gradient, the decoder from the bound itself.

N images, S samples, H bits, K importance samples, L numbers of a Gaussian code.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.distributions import Distribution, Independent, Normal
from torch.nn.functional import logsigmoid, softplus

from toolkit.runner import ExperimentConfig, Objective, Run, Sweep
from toolkit.stochastic import (
    RelaxedBernoulli,
    dreg_loss,
    enumerated_loss,
    iwae_bound,
    iwae_loss,
    leave_one_out,
    path_log_prob,
    rebar_loss,
    relaxed_bernoulli,
    score_function_loss,
    straight_through,
)

from ._digits import Batches, split_digits
from ._training import accuracy, gradient_of, perceptron

__all__ = ["Config", "run"]


class Config(ExperimentConfig):
    """Values of an experiment on stochastic estimators.

    Attributes:
        task: ``"bandit"``, ``"bits"`` or ``"importance"``; see the module.
        batch_size: Number of images in a batch, N.
        samples: Number of codes drawn for each image in an update: S (bits) or K (importance).
        certainty_cost: bandit: cost of a nat of log-probability of the chosen digit, in rewards.
        n_bits: bits: the number of bits of a code, H.
        swept_samples: bits: numbers of samples for which the estimators are compared after training.
        repeats: bits: number of estimates from which standard deviations are computed.
        swept_images: bits: number of images for whose codes bias and standard deviations are computed.
        n_latent: importance: the number of entries of a Gaussian code, L.
        width: importance: number of hidden units of encoder and decoder.
    """

    task: Literal["bandit", "bits", "importance"]
    batch_size: Annotated[int, Field(ge=1)] = 64
    samples: Annotated[int, Field(ge=1)] = 2
    certainty_cost: Annotated[float, Field(ge=0)] = 0.05
    n_bits: Annotated[int, Field(ge=1, le=10)] = 6
    swept_samples: Annotated[list[Annotated[int, Field(ge=2)]], Field(default_factory=lambda: [2, 4, 8], min_length=1)]
    repeats: Annotated[int, Field(ge=2)] = 100
    swept_images: Annotated[int, Field(ge=1)] = 8
    n_latent: Annotated[int, Field(ge=1)] = 8
    width: Annotated[int, Field(ge=1)] = 64


def run(config: Config, seed: int) -> Run:
    """Return one seeded run of the config's task."""
    return {"bandit": _bandit, "bits": _bits, "importance": _importance}[config.task](config, seed)


# --- a bandit ----------------------------------------------------------------------------------------------------


def _bandit(config: Config, seed: int) -> Run:
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, config.dtype)
    train, test = split_digits(dtype)
    batches = Batches(train, config.batch_size, generator)
    policy, critic = nn.Linear(64, 10, dtype=dtype), nn.Linear(64, 1, dtype=dtype)
    for parameter in (*policy.parameters(), *critic.parameters()):
        nn.init.zeros_(parameter)
    parameters = {**dict(policy.named_parameters("policy")), **dict(critic.named_parameters("critic"))}
    actions = torch.randint(10, (config.batch_size,), generator=generator)

    def choose() -> None:
        with torch.no_grad():
            actions.copy_(torch.multinomial(policy(batches.inputs).softmax(1), 1, generator=generator).squeeze(1))

    def after_step(step: int) -> None:
        batches.advance(step)
        choose()

    def loss() -> Tensor:
        log_prob = policy(batches.inputs).log_softmax(1).gather(1, actions[:, None]).squeeze(1)
        reward = (actions == batches.labels).to(dtype)
        value = critic(batches.inputs).squeeze(1)
        cost = config.certainty_cost * log_prob - reward
        of_the_critic: Tensor = 0.5 * (value - reward).square().mean()
        return score_function_loss(log_prob, cost, baseline=-value) + of_the_critic

    @torch.no_grad()
    def target() -> dict[str, Tensor]:
        x, chosen = batches.inputs, nn.functional.one_hot(actions, 10).to(dtype)
        p, value = policy(x).softmax(1), critic(x)
        reward = (actions == batches.labels).to(dtype)[:, None]
        cost = config.certainty_cost * (p * chosen).sum(1, keepdim=True).log() - reward
        by_logits = (cost + value + config.certainty_cost) * (chosen - p) / len(x)
        by_value = (value - reward) / len(x)
        names = (("policy", by_logits), ("critic", by_value))
        return {k: v for n, g in names for k, v in ((f"{n}.weight", g.T @ x), (f"{n}.bias", g.sum(0)))}

    @torch.no_grad()
    def evaluate() -> dict[str, float]:
        log_p = policy(test.inputs).log_softmax(1)
        return {
            "objective": log_p.exp().gather(1, test.labels[:, None]).mean().item(),
            "accuracy": accuracy(log_p, test.labels),
            "entropy of the policy (nats)": -(log_p.exp() * log_p).sum(1).mean().item(),
        }

    choose()
    return Run(
        parameters=parameters,
        loss=loss,
        objective=Objective(label="expected reward on held-out digits", higher_is_better=True, best=1.0),
        evaluate=evaluate,
        optimizer=torch.optim.Adam(parameters.values(), lr=config.learning_rate),
        target=target,
        after_step=after_step,
    )


# --- a code of bits ----------------------------------------------------------------------------------------------


class BitCode(nn.Module):
    """An encoder to H independent bits, and a decoder to independent black and white pixels; the prior is uniform.

    Args:
        n_bits: Number of bits, H.
        generator: Draws the parameters.
        dtype: Floating-point type of the parameters.
    """

    def __init__(self, n_bits: int, *, generator: torch.Generator, dtype: torch.dtype) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(64, n_bits, dtype=dtype), nn.Linear(n_bits, 64, dtype=dtype)
        for layer in (self.encoder, self.decoder):
            nn.init.normal_(layer.weight, std=0.1, generator=generator)
            nn.init.zeros_(layer.bias)

    def cost(self, bits: Tensor, logits: Tensor, pixels: Tensor) -> Tensor:
        """Return ``log q(bits | x) - log p(x, bits)`` in nats, (..., N).

        Args:
            bits: (..., N, H); may carry a gradient.
            logits: Logits of the encoder, (N, H).
            pixels: (N, 64).
        """
        return (
            _log_prob(bits, logits) + bits.shape[-1] * math.log(2) - _log_likelihood(self.decoder(2 * bits - 1), pixels)
        )

    def negative_bound(self, logits: Tensor, pixels: Tensor) -> Tensor:
        """Return the exact negative evidence lower bound of each image, (N,): a mean over all codes."""
        codes = _codes(logits)
        log_q, pictures = _log_prob(codes[:, None], logits), self.decoder(2 * codes - 1)
        log_likelihood = pictures @ pixels.T - softplus(pictures).sum(1, keepdim=True)
        costs: Tensor = log_q + logits.shape[-1] * math.log(2) - log_likelihood
        return (log_q.exp() * costs).sum(0)


def _log_prob(bits: Tensor, logits: Tensor) -> Tensor:
    return (bits * logsigmoid(logits) + (1 - bits) * logsigmoid(-logits)).sum(-1)


def _log_likelihood(reconstruction: Tensor, pixels: Tensor) -> Tensor:
    """Return the log-likelihood of black and white pixels in nats, (..., N), given their logits (..., N, 64)."""
    return (reconstruction * pixels).sum(-1) - softplus(reconstruction).sum(-1)


def _bits(config: Config, seed: int) -> Run:
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, config.dtype)
    train, test = split_digits(dtype)
    batches = Batches(train, config.batch_size, generator, prepare=_black_and_white)
    held_out = _black_and_white(test.inputs)
    model = BitCode(config.n_bits, generator=generator, dtype=dtype)
    parameters = dict(model.named_parameters())
    uniform = torch.rand(config.samples, config.batch_size, config.n_bits, generator=generator, dtype=dtype)

    def after_step(step: int) -> None:
        batches.advance(step)
        uniform.copy_(torch.rand(uniform.shape, generator=generator, dtype=dtype))

    def loss() -> Tensor:
        logits = model.encoder(batches.inputs)
        bits = (uniform < logits.sigmoid()).to(dtype)
        cost = model.cost(bits, logits, batches.inputs)
        return score_function_loss(_log_prob(bits, logits), cost, baseline=leave_one_out(cost))

    def target() -> dict[str, Tensor]:
        """Multiply each sample's score by its cost above the others' mean, and add the decoder's own gradient."""
        x, s = batches.inputs, config.samples
        with torch.no_grad():
            p = model.encoder(x).sigmoid()
            bits = (uniform < p).to(dtype)
            cost = model.cost(bits, model.encoder(x), x)
            signal = (cost - cost.mean(0)) * s / (s - 1) + 1
            by_logits = (signal[..., None] * (bits - p)).sum(0) / (s * len(x))
            signs = 2 * bits - 1
            by_pixels = (model.decoder(signs).sigmoid() - x) / (s * len(x))
            return {
                "encoder.weight": by_logits.T @ x,
                "encoder.bias": by_logits.sum(0),
                "decoder.weight": torch.einsum("snp,snh->ph", by_pixels, signs),
                "decoder.bias": by_pixels.sum((0, 1)),
            }

    @torch.no_grad()
    def evaluate() -> dict[str, float]:
        logits = model.encoder(held_out)
        entropy = (softplus(logits) - logits * logits.sigmoid()).sum(1).mean()
        return {
            "objective": -model.negative_bound(logits, held_out).mean().item(),
            "entropy of the code (nats)": entropy.item(),
            "relative bias of straight-through": _bias_of_straight_through(model, held_out[: config.swept_images]),
        }

    return Run(
        parameters=parameters,
        loss=loss,
        objective=Objective(label="evidence lower bound (nats per held-out image)", higher_is_better=True),
        evaluate=evaluate,
        optimizer=torch.optim.Adam(parameters.values(), lr=config.learning_rate),
        target=target,
        after_step=after_step,
        sweep=Sweep(
            label="samples of each image",
            values=tuple(map(float, config.swept_samples)),
            evaluate=lambda: _estimators(model, held_out[: config.swept_images], config, seed),
        ),
    )


def _black_and_white(images: Tensor) -> Tensor:
    return (images > 0.5).to(images)


# --- estimators at equal samples ---------------------------------------------------------------------------------


def _score(model: BitCode, draw: RelaxedBernoulli, logits: Tensor, pixels: Tensor) -> Tensor:
    return score_function_loss(_log_prob(draw.sample, logits), model.cost(draw.sample, logits, pixels))


def _with_baseline(model: BitCode, draw: RelaxedBernoulli, logits: Tensor, pixels: Tensor) -> Tensor:
    cost = model.cost(draw.sample, logits, pixels)
    return score_function_loss(_log_prob(draw.sample, logits), cost, baseline=leave_one_out(cost))


def _through(model: BitCode, draw: RelaxedBernoulli, logits: Tensor, pixels: Tensor) -> Tensor:
    return model.cost(straight_through(draw.sample, logits.sigmoid().expand_as(draw.sample)), logits, pixels).mean()


def _rebar(model: BitCode, draw: RelaxedBernoulli, logits: Tensor, pixels: Tensor) -> Tensor:
    cost, relaxed, conditional = (
        model.cost(bits, logits, pixels)
        for bits in (draw.sample, (draw.relaxed / 0.5).sigmoid(), (draw.conditional / 0.5).sigmoid())
    )
    return rebar_loss(_log_prob(draw.sample, logits), cost, relaxed, conditional)


ESTIMATORS: dict[str, Callable[[BitCode, RelaxedBernoulli, Tensor, Tensor], Tensor]] = {
    "leave-one-out baseline": _with_baseline,
    "straight-through": _through,
    "REBAR, temperature 0.5": _rebar,
    "score function": _score,
}


def _estimators(model: BitCode, pixels: Tensor, config: Config, seed: int) -> Mapping[str, list[float]]:
    """Return each estimator's standard deviation, for the gradient of the encoder's logits, over its length."""
    generator = torch.Generator().manual_seed(seed)
    logits = model.encoder(pixels).detach()
    length = _exact_gradient(model, logits, pixels).norm()
    found: dict[str, list[float]] = {}
    for samples in config.swept_samples:
        repeated = logits.expand(config.repeats, *logits.shape).clone().requires_grad_()
        draw = relaxed_bernoulli(repeated.expand(samples, *repeated.shape), generator=generator)
        for name, estimator in ESTIMATORS.items():
            loss = config.repeats * estimator(model, draw, repeated, pixels)
            (gradients,) = torch.autograd.grad(loss, repeated, retain_graph=True)
            deviation = gradients.var(0).sum().sqrt() / length
            found.setdefault(f"relative standard deviation, {name}", []).append(float(deviation))
    return found


@torch.enable_grad()
def _bias_of_straight_through(model: BitCode, pixels: Tensor) -> float:
    """Return the distance of its mean over all codes from the exact gradient, over the length of the latter."""
    logits = model.encoder(pixels).detach().requires_grad_()
    codes = _codes(logits)[:, None].expand(-1, *logits.shape)
    costs = model.cost(straight_through(codes, logits.sigmoid().expand_as(codes)), logits, pixels)
    mean = gradient_of(enumerated_loss(_log_prob(codes, logits).T, costs.T), {"logits": logits})["logits"]
    exact = _exact_gradient(model, logits, pixels)
    return float((mean - exact).norm() / exact.norm())


def _exact_gradient(model: BitCode, logits: Tensor, pixels: Tensor) -> Tensor:
    free = logits.detach().requires_grad_()
    return gradient_of(model.negative_bound(free, pixels).mean(), {"logits": free})["logits"]


def _codes(logits: Tensor) -> Tensor:
    """Return all codes of H bits, (2^H, H)."""
    return logits.new_tensor(list(itertools.product((0.0, 1.0), repeat=logits.shape[-1])))


# --- importance samples ------------------------------------------------------------------------------------------


def _importance(config: Config, seed: int) -> Run:
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, config.dtype)
    train, test = split_digits(dtype)
    batches = Batches(train, config.batch_size, generator, prepare=_black_and_white)
    held_out = _black_and_white(test.inputs[:200])
    encoder, decoder = (
        perceptron([inputs, config.width, outputs], nn.Tanh, generator=generator, dtype=dtype)
        for inputs, outputs in ((64, 2 * config.n_latent), (config.n_latent, 64))
    )
    parameters = {**dict(encoder.named_parameters("encoder")), **dict(decoder.named_parameters("decoder"))}
    noise = torch.randn(config.samples, config.batch_size, config.n_latent, generator=generator, dtype=dtype)
    judged = torch.randn(50, len(held_out), config.n_latent, generator=generator, dtype=dtype)

    def after_step(step: int) -> None:
        batches.advance(step)
        noise.copy_(torch.randn(noise.shape, generator=generator, dtype=dtype))

    def proposal(x: Tensor) -> Distribution:
        mean, log_scale = encoder(x).chunk(2, -1)
        return Independent(Normal(mean, log_scale.exp()), 1)

    def log_joint(z: Tensor, x: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        logits: Tensor = torch.func.functional_call(decoder, dict(weights), z)
        prior: Tensor = Normal(0.0, 1.0).log_prob(z).sum(-1)
        return prior + _log_likelihood(logits, x)

    def loss() -> Tensor:
        x = batches.inputs
        q = proposal(x)
        z = q.mean + q.stddev * noise
        weights = dict(decoder.named_parameters())
        constants = {name: weight.detach() for name, weight in weights.items()}
        for_encoder = dreg_loss(log_joint(z, x, constants) - path_log_prob(q, z))
        held = z.detach()
        return for_encoder + iwae_loss(log_joint(held, x, weights) - q.log_prob(held).detach())

    def target() -> dict[str, Tensor]:
        """Differentiate the bound by the decoder; pull squared weights times slopes of each sample to the encoder."""
        x = batches.inputs
        q = proposal(x)
        z = q.mean + q.stddev * noise
        held, fixed = z.detach().requires_grad_(), Normal(q.mean.detach(), q.stddev.detach())
        log_weights = log_joint(held, x, dict(decoder.named_parameters())) - fixed.log_prob(held).sum(-1)
        (slopes,) = torch.autograd.grad(log_weights.sum(), held, retain_graph=True)
        pulled = -log_weights.softmax(0).detach().square()[..., None] * slopes / len(x)
        bound = -(log_weights.logsumexp(0)).mean()
        by_encoder = torch.autograd.grad(z, list(encoder.parameters()), grad_outputs=pulled)
        by_decoder = torch.autograd.grad(bound, list(decoder.parameters()))
        return dict(zip(parameters, (*by_encoder, *by_decoder), strict=True))

    @torch.no_grad()
    def evaluate() -> dict[str, float]:
        q = proposal(held_out)
        z = q.mean + q.stddev * judged
        log_weights = log_joint(z, held_out, dict(decoder.named_parameters())) - q.log_prob(z)
        size = (log_weights.softmax(0).square().sum(0)).reciprocal().mean() / len(judged)
        return {"objective": iwae_bound(log_weights).item(), "effective share of the samples": size.item()}

    return Run(
        parameters=parameters,
        loss=loss,
        objective=Objective(label="bound of 50 samples (nats per held-out image)", higher_is_better=True),
        evaluate=evaluate,
        optimizer=torch.optim.Adam(parameters.values(), lr=config.learning_rate),
        target=target,
        after_step=after_step,
    )
