"""The room of curvature as a whole: its blocks on a GPU, and its exports."""

import importlib

import pytest
import torch
from contract import block_cases, relative_error

CASES = [case for case in block_cases() if case.block.name.startswith("curvature.")]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_blocked_gradient_on_a_gpu(case):
    leaves = {name: value.detach().cuda().requires_grad_() for name, value in case.parameters().items()}
    found = torch.autograd.grad(case.loss(leaves), list(leaves.values()), allow_unused=True, materialize_grads=True)
    found = {name: slope.cpu() for name, slope in zip(leaves, found, strict=True)}
    assert relative_error(found, case.blocked(case.parameters())) < 1e-10


def test_the_room_exports_its_parts():
    room = importlib.import_module("toolkit.curvature")
    names = ("divergences", "majorisation", "products", "scaling")
    parts = [importlib.import_module(f"toolkit.curvature.{part}") for part in names]
    assert sorted(room.__all__) == sorted(name for part in parts for name in part.__all__)
