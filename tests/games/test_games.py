"""The room of games as a whole: its blocks on a GPU, and one program of everyday use."""

import importlib

import pytest
import torch
from accelerator import ACCELERATOR
from contract import block_cases, relative_error
from torch import nn

from toolkit import compare, unblock
from toolkit.games import FAKE, JUDGE, discriminator_loss, generator_loss

CASES = [case for case in block_cases() if case.block.name.startswith("games.")]


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_blocked_gradient_on_a_gpu(case):
    leaves = {name: value.detach().to(ACCELERATOR).requires_grad_() for name, value in case.parameters().items()}
    found = torch.autograd.grad(case.loss(leaves), list(leaves.values()), allow_unused=True, materialize_grads=True)
    found = {name: slope.cpu() for name, slope in zip(leaves, found, strict=True)}
    assert relative_error(found, case.blocked(case.parameters())) < 1e-10


def test_one_backward_pass_serves_both_networks():
    """The gradient of the sum is that of two passes, each of which discards the gradient of the other network."""
    torch.manual_seed(0)
    generator, discriminator = nn.Linear(3, 2), nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
    real, noise = torch.randn(6, 2), torch.randn(6, 3)

    def joint():
        fake = generator(noise)
        of_discriminator = discriminator_loss(discriminator, real, fake, kind="non_saturating")
        return of_discriminator + generator_loss(discriminator, fake, kind="non_saturating")

    networks = nn.ModuleDict({"generator": generator, "discriminator": discriminator})
    comparison = compare(joint, networks)
    assert {effect.name for effect in comparison.effects} == {FAKE.name, JUDGE.name}
    softplus = nn.functional.softplus
    first = softplus(-discriminator(real)).mean() + softplus(discriminator(generator(noise).detach())).mean()
    second = softplus(-discriminator(generator(noise))).mean()
    own = (
        *torch.autograd.grad(second, list(generator.parameters())),
        *torch.autograd.grad(first, list(discriminator.parameters())),
    )
    torch.testing.assert_close(tuple(comparison.blocked.values()), own)


@pytest.mark.slow
@pytest.mark.keeps_its_sums
def test_compiled_losses_of_a_gan_without_a_break():
    """Closed and open: opening a block recompiles."""
    torch.manual_seed(0)
    discriminator, real = nn.Linear(2, 1), torch.randn(6, 2)
    fake = torch.randn(6, 2, requires_grad=True)

    def joint(fake):
        of_discriminator = discriminator_loss(discriminator, real, fake, kind="hinge")
        return of_discriminator + generator_loss(discriminator, fake, kind="hinge")

    compiled = torch.compile(joint, backend="eager", fullgraph=True)
    leaves, found = [fake, *discriminator.parameters()], []
    for blocks in ((), (FAKE,), (JUDGE,), ()):
        with unblock(*blocks):
            found.append(torch.autograd.grad(compiled(fake), leaves))
            torch.testing.assert_close(found[-1], torch.autograd.grad(joint(fake), leaves))
    assert not torch.equal(found[0][0], found[1][0])
    assert not torch.equal(found[0][1], found[2][1])


def test_the_room_exports_its_parts():
    room = importlib.import_module("toolkit.games")
    parts = [importlib.import_module(f"toolkit.games.{part}") for part in ("gan", "play", "reversal")]
    assert sorted(room.__all__) == sorted(name for part in parts for name in part.__all__)
