"""Quantized networks with their blocks open: codebooks that collapse, and spikes that avoid their threshold.

- ``autoencode_digits``: an autoencoder of handwritten digits whose latent vectors are replaced by codes, of one
  codebook or of several in a row. Codebooks start at the k-means of the latent vectors and learn by their loss. Other
  methods start alike: with one codebook the rotation trick and averaged codes; with several, a straight-through step in
  each stage, as in other programs, and the one step with a commitment divided by the number of stages.
- ``spike_digits``: a classifier of handwritten digits with a layer of leaky integrate-and-fire neurons. After training,
  the gradient with an open reset is compared with the blocked one for surrogates of several steepnesses.

N images, D entries of a latent vector, K codes, M stages, T time steps, H neurons.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from toolkit import is_blocked, unblock
from toolkit.adversarial.networks import mlp
from toolkit.datasets import Dataset
from toolkit.quantization import (
    RESET,
    Learning,
    ResidualVectorQuantizer,
    arctan_slope,
    codebook_perplexity,
    commitment_loss,
    fast_sigmoid_slope,
    leaky_integrate_and_fire,
    nearest_codes,
    rotation_trick,
    sigmoid_slope,
)
from toolkit.runner import Event, ExperimentConfig, Methods, Objective, Run, Sweep

from ._digits import Batches, digits_of
from ._training import accuracy, methods_of, trained

__all__ = ["Autoencoder", "Config", "SpikingClassifier", "run", "step_in_each_stage"]

Surrogate = Literal["arctan", "fast sigmoid", "sigmoid"]
_SLOPES: dict[Surrogate, Callable[..., Tensor]] = {
    "arctan": arctan_slope,
    "fast sigmoid": fast_sigmoid_slope,
    "sigmoid": sigmoid_slope,
}
# One whose height grows with its steepness, and one whose height is 1.
_SWEPT: tuple[Surrogate, ...] = ("sigmoid", "fast sigmoid")


class Config(ExperimentConfig):
    """Values of an experiment on quantized networks.

    Attributes:
        task: ``"autoencode_digits"`` or ``"spike_digits"``; see the module.
        batch_size: Number of images in a batch.
        width: Number of hidden units of encoder and decoder, or of spiking neurons, H.
        dim: autoencode_digits: the number of entries of a latent vector, D.
        codebook_size: autoencode_digits: the number of codes in a codebook, K.
        n_quantizers: autoencode_digits: the number of stages, M.
        commitment: autoencode_digits: weight of the commitment loss.
        surrogate: spike_digits: the slope of a spike.
        steepness: spike_digits: its steepness, in inverse units of the threshold.
        time_steps: spike_digits: the number of time steps, T. The same image is shown in each.
        decay: spike_digits: share of the potential that is left after a time step.
        swept_steepness: spike_digits: the steepnesses of the comparison after training.
    """

    task: Literal["autoencode_digits", "spike_digits"]
    batch_size: Annotated[int, Field(ge=1)] = 128
    width: Annotated[int, Field(ge=1)] = 64
    dim: Annotated[int, Field(ge=1)] = 8
    codebook_size: Annotated[int, Field(ge=1)] = 32
    n_quantizers: Annotated[int, Field(ge=1)] = 1
    commitment: Annotated[float, Field(ge=0)] = 0.25
    surrogate: Surrogate = "sigmoid"
    steepness: Annotated[float, Field(gt=0)] = 25.0
    time_steps: Annotated[int, Field(ge=1)] = 10
    decay: Annotated[float, Field(ge=0, le=1)] = 0.9
    swept_steepness: Annotated[tuple[Annotated[float, Field(gt=0)], ...], Field(min_length=1, strict=False)] = (
        1.0,
        5.0,
        25.0,
    )


def run(config: Config, seed: int) -> Run:
    """Return one seeded run of the config's task."""
    return {"autoencode_digits": _autoencode_digits, "spike_digits": _spike_digits}[config.task](config, seed)


# --- an autoencoder with codes ---------------------------------------------------------------------------------------


class Autoencoder(nn.Module):
    """Encoder, quantizer and decoder of flat images.

    Args:
        config: The sizes.
        images: (N, pixels), whose latent vectors are the start of the codebooks.
        generator: Draws all parameters.
        learning: As in `ResidualVectorQuantizer`, and so are the other arguments.
        commitment: None: that of the config.
    """

    def __init__(
        self,
        config: Config,
        images: Tensor,
        generator: torch.Generator,
        *,
        learning: Learning = "loss",
        commitment: float | None = None,
    ) -> None:
        super().__init__()
        pixels, widths = images.shape[1], [config.width]
        self.encoder = mlp(pixels, config.dim, widths=widths, generator=generator).to(images)
        self.decoder = mlp(config.dim, pixels, widths=widths, generator=generator).to(images)
        self.quantizer = ResidualVectorQuantizer(
            config.dim,
            config.codebook_size,
            config.n_quantizers,
            commitment=config.commitment if commitment is None else commitment,
            learning=learning,
            generator=generator,
        ).to(images)
        self.quantizer.start(self.encoder(images), generator=generator)

    def loss(self, images: Tensor) -> Tensor:
        """Return the mean squared error plus the loss of the quantizer."""
        codes, _, loss = self.quantizer(self.encoder(images))
        total: Tensor = functional.mse_loss(self.decoder(codes), images) + loss
        return total

    @property
    def codebooks(self) -> list[Tensor]:
        """The codebooks, each (K, D)."""
        values: dict[str, Tensor] = self.quantizer.state_dict(keep_vars=True)
        return [value for name, value in values.items() if name.endswith("codebook")]


def step_in_each_stage(quantizer: ResidualVectorQuantizer, z: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes and loss of averaged codebooks with a straight-through step in each stage, as in other programs.

    The gradient of the encoder outputs is M times that of the codes.

    Args:
        quantizer: The codebooks. They learn by their loss.
        z: (..., D).
    """
    remainder, total, loss = z, torch.zeros_like(z), z.new_zeros(())
    for stage in quantizer.stages:
        codes, _, its_loss = stage(remainder)
        remainder, total, loss = remainder - codes.detach(), total + codes, loss + its_loss
    return total, loss


def _autoencode_digits(config: Config, seed: int) -> Run:
    train, test = digits_of(config)
    generator = torch.Generator().manual_seed(seed)
    model = Autoencoder(config, train.inputs, generator).eval()
    batches = Batches(train, config.batch_size, generator)
    parameters = dict(model.named_parameters())
    return Run(
        parameters=parameters,
        loss=lambda: model.loss(batches.inputs),
        objective=Objective(label="held-out mean squared error (squared brightness)", higher_is_better=False),
        evaluate=partial(_judge, model, test.inputs),
        optimizer=torch.optim.Adam(parameters.values(), lr=config.learning_rate),
        target=lambda: _witness(model, batches.inputs, config.commitment),
        after_step=batches.advance,
        events=[
            Event(
                says="fewer than half of the codes were used",
                metric="codes used",
                below=config.codebook_size * config.n_quantizers / 2,
            )
        ],
        methods=_methods(config, seed),
    )


@torch.no_grad()
def _judge(model: Autoencoder, images: Tensor) -> dict[str, float]:
    was_training = model.training
    z = model.eval().encoder(images)
    codes, indices, _ = model.quantizer(z)
    model.train(was_training)
    used = [len(stage.unique()) for stage in indices.unbind(-1)]
    perplexities = [
        codebook_perplexity(stage, len(codebook)).item()
        for stage, codebook in zip(indices.unbind(-1), model.codebooks, strict=True)
    ]
    return {
        "objective": functional.mse_loss(model.decoder(codes), images).item(),
        "codes used": float(sum(used)),
        "perplexity (mean of the codebooks)": sum(perplexities) / len(perplexities),
        "standard deviation of latent vectors": z.std().item(),
    }


def _witness(model: Autoencoder, images: Tensor, commitment: float) -> dict[str, Tensor]:
    """Return the blocked gradient: the cotangents of latent vectors and codes on paper, autograd for the networks."""
    latent = model.encoder(images)
    remainder, slopes, pull = latent.detach(), {}, torch.zeros_like(latent)
    for number, codebook in enumerate(map(Tensor.detach, model.codebooks)):
        chosen = nearest_codes(remainder, codebook)
        remainder = remainder - codebook[chosen]
        pull = pull + 2 * commitment * remainder / remainder.numel()
        slopes[f"quantizer.stages.{number}.codebook"] = torch.zeros_like(codebook).index_add(
            0, chosen, -2 * remainder / remainder.numel()
        )
    codes = (latent.detach() - remainder).requires_grad_()
    error = functional.mse_loss(model.decoder(codes), images)
    decoder = dict(model.decoder.named_parameters(prefix="decoder"))
    cotangent, *of_decoder = torch.autograd.grad(error, [codes, *decoder.values()])
    encoder = dict(model.encoder.named_parameters(prefix="encoder"))
    of_encoder = torch.autograd.grad(latent, list(encoder.values()), cotangent + pull)
    return slopes | dict(zip([*decoder, *encoder], [*of_decoder, *of_encoder], strict=True))


def _methods(config: Config, seed: int) -> Methods:
    """Return other ways to train the same autoencoder."""

    def of_rotation(model: Autoencoder, images: Tensor) -> Tensor:
        z = model.encoder(images)
        (codebook,) = model.codebooks
        codes = codebook[nearest_codes(z, codebook)]
        its_loss = config.commitment * commitment_loss(z, codes) + functional.mse_loss(codes, z.detach())
        return functional.mse_loss(model.decoder(rotation_trick(z, codes)), images) + its_loss

    def of_stages(model: Autoencoder, images: Tensor) -> Tensor:
        codes, loss = step_in_each_stage(model.quantizer, model.encoder(images))
        return functional.mse_loss(model.decoder(codes), images) + loss

    train = partial(_trained, config, seed)
    methods: dict[str, Callable[[], Mapping[str, Sequence[float]]]] = {
        "the rotation trick": partial(train, of_rotation),
        "averaged codes": partial(train, Autoencoder.loss, learning="average"),
    }
    if config.n_quantizers > 1:
        methods = {
            "a step in each stage": partial(train, of_stages),
            "one step, commitment divided by the stages": partial(
                train, Autoencoder.loss, commitment=config.commitment / config.n_quantizers
            ),
        }
    return methods_of(config, methods, "step")


def _trained(
    config: Config,
    seed: int,
    loss: Callable[[Autoencoder, Tensor], Tensor],
    *,
    learning: Learning = "loss",
    commitment: float | None = None,
) -> dict[str, Sequence[float]]:
    """Return the metrics of an autoencoder that starts as the run's, trained with another loss."""
    train, test = digits_of(config)
    generator = torch.Generator().manual_seed(seed)
    model = Autoencoder(config, train.inputs, generator, learning=learning, commitment=commitment)
    batches = Batches(train, config.batch_size, generator)
    optimizer = torch.optim.Adam(model.parameters(), lr=config.learning_rate)
    judge = partial(_judge, model, test.inputs)
    return trained(config, lambda: loss(model, batches.inputs), optimizer, batches.advance, judge)


# --- a classifier with spikes ----------------------------------------------------------------------------------------


class SpikingClassifier(nn.Module):
    """A layer of leaky integrate-and-fire neurons between two linear layers; their rates are read out.

    Args:
        config: The sizes.
        data: Images (N, pixels) and labels.
        generator: Draws the parameters.
    """

    def __init__(self, config: Config, data: Dataset, generator: torch.Generator) -> None:
        super().__init__()
        self.config = config
        layers = mlp(data.inputs.shape[1], int(data.labels.max()) + 1, widths=[config.width], generator=generator)
        self.hidden, self.readout = (layer for layer in layers.to(data.inputs) if isinstance(layer, nn.Linear))

    def forward(self, images: Tensor, slope: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Return logits, (N, classes).

        Args:
            images: (N, pixels).
            slope: The surrogate. None: that of the config.
        """
        return self.readout(self.activity(images, slope)[0].mean(0))  # type: ignore[no-any-return]

    def activity(self, images: Tensor, slope: Callable[[Tensor], Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """Return spikes and potentials, (T, N, H)."""
        current = self.hidden(images)
        return leaky_integrate_and_fire(
            current.expand(self.config.time_steps, *current.shape),
            decay=self.config.decay,
            slope=slope or _slope(self.config.surrogate, self.config.steepness),
        )


def _slope(surrogate: Surrogate, steepness: float) -> Callable[[Tensor], Tensor]:
    function = _SLOPES[surrogate]
    return lambda x: function(x, steepness)


def _spike_digits(config: Config, seed: int) -> Run:
    train, test = digits_of(config)
    generator = torch.Generator().manual_seed(seed)
    model = SpikingClassifier(config, train, generator)
    batches = Batches(train, config.batch_size, generator)
    parameters = dict(model.named_parameters())

    @torch.no_grad()
    def evaluate() -> dict[str, float]:
        spikes, _ = model.activity(test.inputs)
        logits = model(test.inputs)
        return {
            "objective": functional.cross_entropy(logits, test.labels).item(),
            "accuracy": accuracy(logits, test.labels),
            "spikes per neuron and step": spikes.mean().item(),
        }

    def sweep() -> dict[str, list[float]]:
        return {
            f"open gradient over the blocked one, {surrogate}": [
                _length_ratio(model, batches, _slope(surrogate, steepness)) for steepness in config.swept_steepness
            ]
            for surrogate in _SWEPT
        }

    return Run(
        parameters=parameters,
        loss=lambda: functional.cross_entropy(model(batches.inputs), batches.labels),
        objective=Objective(label="held-out cross entropy (nats per image)", higher_is_better=False),
        evaluate=evaluate,
        optimizer=torch.optim.Adam(parameters.values(), lr=config.learning_rate),
        target=lambda: _backward_through_time(model, batches.inputs, batches.labels),
        after_step=batches.advance,
        sweep=Sweep(
            label="steepness of the surrogate (1 / threshold)",
            values=tuple(config.swept_steepness),
            evaluate=sweep,
        ),
    )


def _length_ratio(model: SpikingClassifier, data: Batches, slope: Callable[[Tensor], Tensor]) -> float:
    """Return the length of the hidden layer's gradient with an open reset over the blocked one's; NaN if it is open."""
    if not is_blocked(RESET):
        return math.nan
    lengths = []
    for opened in ((), (RESET,)):
        with unblock(*opened):
            loss = functional.cross_entropy(model(data.inputs, slope), data.labels)
            lengths.append(torch.autograd.grad(loss, model.hidden.weight)[0].norm().item())
    return lengths[1] / lengths[0] if lengths[0] else math.nan


@torch.no_grad()
def _backward_through_time(model: SpikingClassifier, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Return the blocked gradient on paper: ``d_t = sigma'(u_t - 1) c_t + decay d_{t+1}``, c the spikes' cotangent."""
    spikes, potentials = model.activity(images)
    rates = spikes.mean(0)
    residual = torch.softmax(model.readout(rates), 1)
    residual[torch.arange(len(labels)), labels] -= 1
    residual /= len(labels)
    of_spikes = residual @ model.readout.weight / len(spikes)
    slope = _slope(model.config.surrogate, model.config.steepness)
    later = total = torch.zeros_like(rates)
    for potential in reversed(potentials.unbind()):
        later = slope(potential - 1) * of_spikes + model.config.decay * later
        total = total + later
    return {
        "hidden.weight": total.T @ images,
        "hidden.bias": total.sum(0),
        "readout.weight": residual.T @ rates,
        "readout.bias": residual.sum(0),
    }
