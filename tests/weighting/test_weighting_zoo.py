"""The program of the bug zoo in this room's family, by hand and by `gradnorm_loss`."""

import pytest
import torch
from folders import ROOT

from toolkit import unblock
from toolkit.runner._zoo import read_programs
from toolkit.weighting import GRADNORM_TARGET, gradnorm_loss

BLOCKS = {"buggy": [GRADNORM_TARGET], "fixed": []}


@pytest.mark.parametrize("variant", BLOCKS)
def test_moving_goal_is_gradnorm_with_its_block_open(variant):
    (program,) = (each for each in read_programs(ROOT / "docs" / "zoo") if each.path.stem == "moving_goal")
    found = program.audit(variant).blocked
    torch.manual_seed(0)
    networks, x, targets, first = program.module.setup()
    losses = program.module.task_losses(networks, x, targets)
    norms = program.module.gradient_norms(losses, networks["trunk"].weight)
    with unblock(*BLOCKS[variant]):
        loss = gradnorm_loss(networks["weights"][0], norms, losses, first, alpha=1.5)
    names, parameters = zip(*networks.named_parameters(), strict=True)
    expected = torch.autograd.grad(loss, parameters, allow_unused=True)
    for name, gradient in zip(names, expected, strict=True):
        torch.testing.assert_close(found[name], torch.zeros_like(found[name]) if gradient is None else gradient)
