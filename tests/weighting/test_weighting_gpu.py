"""All blocks of this room on a GPU: the cases of the other files, made again with their constants there."""

import runpy

import pytest
import torch
from accelerator import ACCELERATOR
from contract import flatten
from folders import TESTS

from toolkit import unblock

FILES = [
    path
    for path in sorted((TESTS / "weighting").glob("test_weighting_*.py"))
    if "\nBLOCK_CASES = [" in path.read_text("utf-8")
]


def _gradient(case):
    parameters = case.parameters()
    gradients = torch.autograd.grad(case.loss(parameters), list(parameters.values()), allow_unused=True)
    return {
        name: torch.zeros_like(parameter) if gradient is None else gradient
        for (name, parameter), gradient in zip(parameters.items(), gradients, strict=True)
    }


@pytest.mark.gpu
@pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem)
def test_gradients_are_those_of_the_witnesses(file):
    check_on(ACCELERATOR, file)


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem)
def test_the_cases_can_be_made_again(file):
    check_on("cpu", file)


def check_on(device, file):
    with torch.device(device):
        for case in runpy.run_path(str(file))["BLOCK_CASES"]:
            found = _gradient(case)
            assert {gradient.device.type for gradient in found.values()} == {device}
            torch.testing.assert_close(flatten(found), flatten(case.blocked(case.parameters())))
            if case.opened:
                with unblock(case.block):
                    torch.testing.assert_close(flatten(_gradient(case)), flatten(case.opened(case.parameters())))
