"""The room of curvature as a whole: its blocks on a GPU, and its exports."""

import importlib

import pytest
import torch
from accelerator import ACCELERATOR
from contract import block_cases, relative_error

from toolkit import unblock
from toolkit.curvature import (
    ANCHOR,
    HELD_POLICY,
    MAJORISER,
    WEIGHTS,
    gaussian_kl_from_held,
    half_quadratic_loss,
    kl_from_held,
    proximal_penalty,
    reweighted_loss,
)

CASES = [case for case in block_cases() if case.block.name.startswith("curvature.")]


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_blocked_gradient_on_a_gpu(case):
    leaves = {name: value.detach().to(ACCELERATOR).requires_grad_() for name, value in case.parameters().items()}
    found = torch.autograd.grad(case.loss(leaves), list(leaves.values()), allow_unused=True, materialize_grads=True)
    found = {name: slope.cpu() for name, slope in zip(leaves, found, strict=True)}
    assert relative_error(found, case.blocked(case.parameters())) < 1e-10


PROGRAMS = {
    "reweighted": (lambda x: reweighted_loss(x, kind="welsch", scale=1.0).sum(), WEIGHTS),
    "half-quadratic": (lambda x: half_quadratic_loss(x, kind="cauchy", scale=1.0).sum(), MAJORISER),
    "trust region": (lambda x: (kl_from_held(x, x.sin()) + gaussian_kl_from_held(x, x, x + 1, x)).sum(), HELD_POLICY),
    "proximal": (lambda x: proximal_penalty(x, x.sin(), step=0.5), ANCHOR),
}


@pytest.mark.keeps_its_sums
@pytest.mark.parametrize(("program", "block"), PROGRAMS.values(), ids=PROGRAMS)
def test_compiled_and_vectorised(program, block):
    x = torch.tensor([[0.3, -1.2, 2.0], [0.8, 0.5, -0.1]], dtype=torch.float64, requires_grad=True)
    compiled = torch.compile(program, backend="eager", fullgraph=True)
    for blocks in ((), (block,), ()):
        with unblock(*blocks):
            (expected,) = torch.autograd.grad(program(x), x)
            torch.testing.assert_close(torch.autograd.grad(compiled(x), x)[0], expected)
            torch.testing.assert_close(torch.func.vmap(torch.func.grad(program))(x.detach()), expected)


def test_the_room_exports_its_parts():
    room = importlib.import_module("toolkit.curvature")
    names = ("divergences", "majorisation", "products", "scaling")
    parts = [importlib.import_module(f"toolkit.curvature.{part}") for part in names]
    assert sorted(room.__all__) == sorted(name for part in parts for name in part.__all__)
