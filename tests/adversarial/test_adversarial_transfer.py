"""Attacks with momentum are their published steps, written out; and agree with torchattacks where it is installed."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from toolkit import adversarial as adv

EPSILON, STEPS, SIZE = 0.1, 4, 0.03
X = torch.rand(3, 3, 6, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def _model() -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    return nn.Sequential(nn.Flatten(), *adv.mlp(108, 4, widths=[16], generator=generator).double())


MODEL = _model()
LABELS = MODEL(X).argmax(1)
SETTINGS = {"epsilon": EPSILON, "steps": STEPS, "step_size": SIZE}


def _slope(x: Tensor) -> Tensor:
    point = x.clone().requires_grad_()
    F.cross_entropy(MODEL(point), LABELS, reduction="sum").backward()
    return point.grad


def _written_out(slope) -> Tensor:
    """Momentum of gradients divided by the mean of their absolute values, as in the authors' code."""
    x, heading = X.clone(), torch.zeros_like(X)
    for _ in range(STEPS):
        gradient = slope(x, heading)
        heading = 0.7 * heading + gradient / gradient.abs().mean((1, 2, 3), keepdim=True)
        x = (x + SIZE * heading.sign()).clamp(X - EPSILON, X + EPSILON).clamp(0, 1)
    return x


def _blurred(x: Tensor, heading: Tensor) -> Tensor:
    """The sum of the gradient, shifted by up to a pixel, with the weights of a Gaussian of width 2."""
    place = torch.arange(-1.0, 2.0, dtype=torch.float64)
    row = (-(place**2) / 8).exp()
    weight = row[:, None] * row / (row[:, None] * row).sum()
    padded = F.pad(_slope(x), (1, 1, 1, 1))
    return sum(weight[i, j] * padded[:, :, i : i + 6, j : j + 6] for i in range(3) for j in range(3))


def _tuned():
    draws, correction = torch.Generator().manual_seed(5), torch.zeros_like(X)

    def slope(x: Tensor, heading: Tensor) -> Tensor:
        nonlocal correction
        gradient = _slope(x)
        noise = [torch.rand(X.shape, generator=draws, dtype=X.dtype) * 2 - 1 for _ in range(2)]
        nearby = sum(_slope(x + 1.5 * EPSILON * each) for each in noise) / 2
        corrected, correction = gradient + correction, nearby - gradient
        return corrected

    return slope


ATTACKS = {
    "mi": (partial(adv.mi_fgsm, momentum=0.7), lambda: lambda x, _: _slope(x)),
    "ni": (partial(adv.ni_fgsm, momentum=0.7), lambda: lambda x, heading: _slope(x + 0.7 * SIZE * heading)),
    "ti": (partial(adv.ti_fgsm, momentum=0.7, kernel=3, sigma=2.0), lambda: _blurred),
    "vmi": (
        lambda *args, **options: adv.vmi_fgsm(
            *args, momentum=0.7, neighbours=2, generator=torch.Generator().manual_seed(5), **options
        ),
        _tuned,
    ),
    "di that never transforms": (
        lambda *args, **options: adv.di_fgsm(
            *args, momentum=0.7, probability=0, generator=torch.Generator().manual_seed(5), **options
        ),
        lambda: lambda x, _: _slope(x),
    ),
}


@pytest.mark.parametrize(("attack", "slope"), ATTACKS.values(), ids=ATTACKS)
def test_steps_are_those_of_the_paper(attack, slope):
    # Signs of gradients: those at 1e-16 from zero could differ, and there are none here.
    torch.testing.assert_close(attack(MODEL, X, LABELS, **SETTINGS), _written_out(slope()), rtol=0, atol=1e-12)


def test_diverse_inputs_are_scaled_and_padded_at_random():
    """Seen by a model that records its inputs: each is a smaller image inside of zeros, at places that differ."""
    seen = []

    def recording(x: Tensor) -> Tensor:
        seen.append((x[0, 0] != 0).nonzero())
        return MODEL(x)

    options = {**SETTINGS, "steps": 40, "probability": 1.0, "resize": 0.4}
    x = X.clamp(min=0.2)
    adv.di_fgsm(recording, x, LABELS, **options, generator=torch.Generator().manual_seed(0))
    boxes = {(*place.amin(0).tolist(), *place.amax(0).tolist()) for place in seen}
    sides = {bottom - top + 1 for top, _, bottom, _ in boxes}
    assert sides == {2, 3, 4, 5}  # from 0.4 x 6 to less than 6
    assert len({box[:2] for box in boxes}) > 5


def test_targets_are_moved_to():
    targets = (LABELS + 1) % 4
    for attack in (adv.ni_fgsm, partial(adv.ti_fgsm, kernel=3)):
        found = attack(MODEL, X, LABELS, epsilon=0.3, targets=targets)
        assert (MODEL(found).gather(1, targets[:, None]) > MODEL(X).gather(1, targets[:, None])).all()


WRONG = {
    "kernel": (partial(adv.ti_fgsm, kernel=4), "`kernel` should be odd. Found 4."),
    "vectors": (lambda *args, **options: adv.ti_fgsm(args[0], X.flatten(1), **options), "`x` should be images"),
    "resize": (partial(adv.di_fgsm, resize=1.5, generator=None), "`resize` should be above 0 and at most 1"),
}


@pytest.mark.parametrize(("attack", "error"), WRONG.values(), ids=WRONG)
def test_a_wrong_argument_is_named(attack, error):
    with pytest.raises(ValueError, match=error):
        attack(MODEL, X, epsilon=0.1)


PEERS = {
    "MIFGSM": (adv.mi_fgsm, {}),
    "NIFGSM": (adv.ni_fgsm, {}),
    "TIFGSM": (adv.ti_fgsm, {"diversity_prob": 0.0}),
}


@pytest.mark.parametrize("name", PEERS)
def test_torchattacks_takes_the_same_steps(name):
    torchattacks = pytest.importorskip("torchattacks")
    attack, options = PEERS[name]
    model, x = _model().float(), X.float()
    peer = getattr(torchattacks, name)(model, eps=EPSILON, alpha=SIZE, steps=STEPS, decay=1.0, **options)
    found, theirs = attack(model, x, LABELS, **SETTINGS), peer(x, LABELS)
    assert ((found - theirs).abs() > 1e-5).float().mean() < 0.01  # signs of gradients that round to zero
