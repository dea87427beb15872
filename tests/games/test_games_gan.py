"""GANs: each loss moves its own network alone, and each penalty trains the discriminator; derivatives by hand."""

import math
from functools import partial

import pytest
import torch
from contract import BlockCase
from torch import nn
from torch.func import functional_call
from torch.nn.functional import binary_cross_entropy_with_logits
from values import draw

from toolkit import unblock
from toolkit.games import (
    FAKE,
    INTERPOLATES,
    JUDGE,
    dirac_gan,
    discriminator_loss,
    generator_loss,
    gradient_penalty,
    zero_centred_penalty,
)

KINDS = ["minimax", "non_saturating", "hinge", "wasserstein"]


REAL, NOISE = draw(1, 4, 2), draw(2, 4, 3)
MIXED = torch.rand(4, 1, generator=torch.Generator().manual_seed(6), dtype=torch.float64)


class Discriminator(nn.Module):
    """The logits ``tanh(x first) second``, with given leaves as weights."""

    def __init__(self, first, second):
        super().__init__()
        self._parameters.update(first=first, second=second)

    def forward(self, x):
        return (x @ self.first).tanh() @ self.second


VALUES = {"generator": draw(3, 3, 2), "first": draw(4, 2, 5), "second": draw(5, 5)}


class Networks:
    """A generator and a discriminator with given weights."""

    def __init__(self, weights):
        self.discriminator = Discriminator(weights["first"], weights["second"])
        self.fake = NOISE.to(weights["generator"]) @ weights["generator"]
        self.real = REAL.to(self.fake)


def weights():
    return {name: value.clone().requires_grad_() for name, value in VALUES.items()}


def sums(leaves, points, cotangents):
    """Return the derivatives of ``cotangents . D(points)`` by both weights and by the points."""
    w, v = (leaves[name].detach() for name in ("first", "second"))
    t = (points @ w).tanh()
    inner = cotangents[:, None] * v * (1 - t**2)
    return points.T @ inner, t.T @ cotangents, inner @ w.T


def sigmoid(x):
    return 1 / (1 + (-x).exp())


def slopes_of_terms(kind, at_real, at_fake):
    """Return the derivatives by the logits: of the discriminator at real and fake ones, of the generator."""
    n, m = len(at_real), len(at_fake)
    if kind == "hinge":
        return -(at_real < 1).double() / n, (at_fake > -1).double() / m, -torch.ones(m).double() / m
    if kind == "wasserstein":
        return -torch.ones(n).double() / n, torch.ones(m).double() / m, -torch.ones(m).double() / m
    of_generator = -sigmoid(at_fake) if kind == "minimax" else -sigmoid(-at_fake)
    return -sigmoid(-at_real) / n, sigmoid(at_fake) / m, of_generator / m


def game(kind, opened=None):
    """Return a witness of the gradient of both losses together."""

    def witness(leaves):
        fake = Networks(leaves).fake.detach()
        with torch.no_grad():
            at_real, at_fake = map(Networks(leaves).discriminator, (REAL, fake))
        real_slope, fake_slope, judged = slopes_of_terms(kind, at_real, at_fake)
        first, second, _ = sums(leaves, REAL, real_slope)
        more_first, more_second, leak = sums(leaves, fake, fake_slope)
        first_judged, second_judged, moved = sums(leaves, fake, judged)
        if opened == FAKE:
            moved = moved + leak
        if opened == JUDGE:
            more_first, more_second = more_first + first_judged, more_second + second_judged
        return {"generator": NOISE.T @ moved, "first": first + more_first, "second": second + more_second}

    return witness


def both(kind):
    def loss(leaves):
        networks = Networks(leaves)
        of_discriminator = discriminator_loss(networks.discriminator, networks.real, networks.fake, kind=kind)
        return of_discriminator + generator_loss(networks.discriminator, networks.fake, kind=kind)

    return loss


def penalty(opened):
    def witness(leaves):
        points = MIXED * REAL + (1 - MIXED) * Networks(leaves).fake.detach()
        w, v = (leaves[name].detach() for name in ("first", "second"))
        t = (points @ w).tanh()
        slopes = (v * (1 - t**2)) @ w.T
        norms = slopes.norm(dim=1, keepdim=True)
        along = 2 * (norms - 1) * slopes / norms / len(points)
        bent = -2 * v * t * (1 - t**2) * (along @ w)
        found = {
            "first": along.T @ (v * (1 - t**2)) + points.T @ bent,
            "second": ((1 - t**2) * (along @ w)).sum(0),
            "generator": torch.zeros(3, 2).double(),
        }
        if opened:
            found["generator"] = NOISE.T @ ((1 - MIXED) * (bent @ w.T))
        return found

    return witness


def drawn_penalty(leaves):
    networks, generator = Networks(leaves), torch.Generator().manual_seed(6)
    return gradient_penalty(networks.discriminator, networks.real, networks.fake, generator=generator)


BLOCK_CASES = [
    *(
        BlockCase(
            id=f"games-{kind}-{block.name.removeprefix('games.')}",
            block=block,
            parameters=weights,
            loss=both(kind),
            blocked=game(kind),
            opened=game(kind, block),
        )
        for kind in KINDS
        for block in (FAKE, JUDGE)
    ),
    BlockCase(
        id="games-gradient-penalty",
        block=INTERPOLATES,
        parameters=weights,
        loss=drawn_penalty,
        blocked=penalty(opened=False),
        opened=penalty(opened=True),
    ),
]

PEER_CASES = {
    "non_saturating_gan": (
        VALUES,
        {"real": REAL, "noise": NOISE},
        lambda p, c: both("non_saturating")(p),
    ),
    "wgan_gp": (VALUES, {"real": REAL, "noise": NOISE, "mixed": MIXED}, lambda p, c: drawn_penalty(p)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_generator_receives_nothing_with_the_fake_samples_open(kind):
    """In a joint backward pass the leak cancels the generator's loss, but for the non-saturating one."""
    leaves = weights()
    with unblock(FAKE):
        (found,) = torch.autograd.grad(both(kind)(leaves), leaves["generator"])
    if kind == "non_saturating":
        assert found.norm() > 0.01
    elif kind == "hinge":  # the terms cancel inside of the margin alone
        networks = Networks(leaves)
        assert (found.norm() < 1e-12) == (networks.discriminator(networks.fake) > -1).all()
    else:
        assert found.norm() < 1e-12


DIRAC = [  # kind, dL_D/dpsi, dL_G/dtheta, leak dL_D/dtheta
    ("minimax", 0.3013176432, 0.1721815104, -0.1721815104),
    ("non_saturating", 0.3013176432, 0.2278184896, -0.1721815104),
    ("hinge", 0.7, 0.4, -0.4),
    ("wasserstein", 0.7, 0.4, -0.4),
]


@pytest.mark.parametrize(("kind", "of_psi", "of_theta", "leak"), DIRAC)
def test_numbers_of_the_dirac_gan(kind, of_psi, of_theta, leak):
    """The same numbers from the losses of networks, of which the Dirac-GAN is the smallest."""
    discriminator = nn.Linear(1, 1, bias=False).double()
    psi = discriminator.weight
    nn.init.constant_(psi, -0.4)
    theta = torch.tensor([[0.7]], dtype=torch.float64, requires_grad=True)
    real = torch.zeros(1, 1).double()

    def of_networks():
        return discriminator_loss(discriminator, real, theta, kind=kind), generator_loss(
            discriminator, theta, kind=kind
        )

    blocked = of_networks()
    assert torch.autograd.grad(blocked[0], psi)[0].item() == pytest.approx(of_psi, abs=1e-9)
    assert torch.autograd.grad(blocked[1], theta)[0].item() == pytest.approx(of_theta, abs=1e-9)
    with unblock(FAKE):
        of_discriminator, of_generator = of_networks()
    assert torch.autograd.grad(of_discriminator, theta, retain_graph=True)[0].item() == pytest.approx(leak, abs=1e-9)
    joint = torch.autograd.grad(of_discriminator + of_generator, theta)[0].item()
    assert joint == pytest.approx(0.0556369792 if kind == "non_saturating" else 0, abs=1e-9)
    for value, function in zip(blocked, dirac_gan(kind=kind), strict=True):
        torch.testing.assert_close(function(psi.squeeze(), theta.squeeze()), value)


@pytest.mark.parametrize("kind", KINDS)
def test_the_real_point_moves_the_equilibrium(kind):
    of_discriminator, of_generator = dirac_gan(kind=kind, real=2.0)
    psi, theta = torch.tensor(0.0).double().requires_grad_(), torch.tensor(2.0).double().requires_grad_()
    assert torch.autograd.grad(of_discriminator(psi, theta), psi)[0].item() == 0
    assert torch.autograd.grad(of_generator(psi, theta), theta)[0].item() == 0


def test_numbers_of_the_penalties_of_the_dirac_gan():
    psi = torch.tensor(-0.4, dtype=torch.float64, requires_grad=True)
    points = torch.tensor([0.0, 0.7], dtype=torch.float64)
    total = psi * 0.7 + 10 * gradient_penalty(lambda x: psi * x, points[:1], points[1:])
    assert torch.autograd.grad(total, psi)[0].item() == pytest.approx(12.7)
    penalised = torch.nn.functional.softplus(psi * 0.7) + 0.25 * zero_centred_penalty(lambda x: psi * x, points[:1])
    assert torch.autograd.grad(penalised, psi)[0].item() == pytest.approx(0.1013176432)


def test_the_losses_are_the_cross_entropies_that_programs_use():
    d, fake = Networks(weights()).discriminator, draw(7, 6, 2)
    expected = sum(
        binary_cross_entropy_with_logits(d(x), torch.full_like(d(x), target)) for x, target in ((REAL, 1), (fake, 0))
    )
    torch.testing.assert_close(discriminator_loss(d, REAL, fake, kind="non_saturating"), expected)
    expected = binary_cross_entropy_with_logits(d(fake), torch.ones(6).double())
    torch.testing.assert_close(generator_loss(d, fake, kind="non_saturating"), expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("logit", [-800.0, -25.0, 25.0, 800.0])
def test_saturated_logits(logit, dtype):
    """The tail is kept: of a logit of 25 the loss is 1.4e-11, and so is the slope."""
    point = torch.tensor([[logit]], dtype=dtype, requires_grad=True)
    loss = generator_loss(nn.Identity(), point, kind="non_saturating")
    (slope,) = torch.autograd.grad(loss, point)
    tail = math.exp(-abs(logit))
    assert loss.item() == pytest.approx(math.log1p(tail) + max(-logit, 0), rel=0.01)
    assert slope.item() == pytest.approx(-tail / (1 + tail) if logit > 0 else -1 / (1 + tail), rel=0.01)


def test_a_penalty_without_slope_has_a_finite_gradient():
    psi = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    value = gradient_penalty(lambda x: x @ psi, REAL, REAL)
    assert value.item() == 1
    assert torch.autograd.grad(value, psi)[0].tolist() == [0, 0]


def test_a_slope_whose_square_is_no_float32_keeps_its_direction():
    """The gradient by psi is ``2 (|psi| - 1) psi / |psi|``; a critic that died has such slopes."""
    psi = torch.tensor([3e-30, -4e-30], requires_grad=True)
    points = REAL.float()
    (found,) = torch.autograd.grad(gradient_penalty(lambda x: x @ psi, points, points), psi)
    torch.testing.assert_close(found, torch.tensor([-1.2, 1.6]), rtol=1e-5, atol=0)


def test_a_penalty_on_images_takes_the_norm_of_a_whole_sample():
    images = draw(8, 3, 1, 2, 2)
    weight = draw(9, 1, 2, 2).requires_grad_()
    value = gradient_penalty(lambda x: (weight * x).sum((1, 2, 3))[:, None], images, images + 1)
    torch.testing.assert_close(value, (weight.norm() - 1) ** 2)
    value = zero_centred_penalty(lambda x: (weight * x).sum((1, 2, 3)), images)
    torch.testing.assert_close(value, weight.square().sum())


def test_penalties_work_in_functional_programs():
    network = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    weights = dict(network.named_parameters())
    functional = torch.func.grad(lambda w: zero_centred_penalty(partial(functional_call, network, w), REAL))(
        {name: weight.detach() for name, weight in weights.items()}
    )
    expected = torch.autograd.grad(zero_centred_penalty(network, REAL), list(weights.values()), materialize_grads=True)
    torch.testing.assert_close(tuple(functional.values()), expected)


def test_a_discriminator_that_is_constant_has_no_slope():
    assert gradient_penalty(lambda x: torch.zeros(len(x)), REAL, REAL).item() == 1
    assert zero_centred_penalty(lambda x: torch.zeros(len(x)), REAL).item() == 0


def test_the_judge_keeps_its_gradients_and_its_statistics():
    """The generator's loss leaves no gradient at the discriminator's weights; batch normalisation still sees it."""
    discriminator = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)).double()
    fake = draw(10, 5, 2).requires_grad_()
    generator_loss(discriminator, fake, kind="hinge").backward()
    assert fake.grad is not None
    assert all(parameter.grad is None and parameter.requires_grad for parameter in discriminator.parameters())
    assert discriminator[1].num_batches_tracked == 1


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="`kind` should be one of 'minimax', 'non_saturating'"):
        discriminator_loss(nn.Identity(), REAL, REAL, kind="least_squares")
    with pytest.raises(ValueError, match="`kind` should be one of"):
        dirac_gan(kind="wgan")
    with pytest.raises(TypeError, match=r"`discriminator` should be a torch\.nn\.Module\. Found function"):
        generator_loss(lambda x: x, REAL, kind="hinge")
    with pytest.raises(ValueError, match=r"`fake` should have the shape of `real`, \(4, 2\)\. Found \(3, 2\)"):
        gradient_penalty(lambda x: x.sum(1), REAL, REAL[:3])
