"""The block cases of this room on a GPU: the same witnesses, computed there."""

import importlib.util
from pathlib import Path

import pytest
import torch
from accelerator import ACCELERATOR
from contract import relative_error

from toolkit import unblock

FILES = ["test_bilevel", "test_bilevel_unrolling", "test_bilevel_equilibrium"]


def _cases(name):
    """Import a test file anew, so that its constants are on the default device."""
    spec = importlib.util.spec_from_file_location(f"{name}_on_a_device", Path(__file__).with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.BLOCK_CASES


def _check(case):
    for opened, witness in (((), case.blocked), ((case.block,), case.opened)):
        p = case.parameters()
        with unblock(*opened):
            found = dict(zip(p, torch.autograd.grad(case.loss(p), list(p.values())), strict=True))
        if witness is not None:
            assert relative_error(found, witness(p)) <= case.tolerance, (case.id, opened)


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            ACCELERATOR,
            marks=pytest.mark.gpu,
        ),
    ],
)
def test_block_cases_on_a_device(device, name):
    with torch.device(device):
        for case in _cases(name):
            _check(case)
