"""Properties that the runs of several experiments share."""

import pytest
import torch

from toolkit.runner import Run


def assert_target_is_blocked_gradient(run: Run, rtol: float = 1e-9, atol: float = 1e-13) -> None:
    """Compare the gradient of the loss with the one that the experiment has written by hand."""
    assert run.target is not None
    found = torch.autograd.grad(run.loss(), list(run.parameters.values()))
    target = run.target()
    for name, slope in zip(run.parameters, found, strict=True):
        torch.testing.assert_close(slope, target[name], rtol=rtol, atol=atol)


def assert_methods_begin_with(run: Run) -> None:
    """Compare the first metrics of every other method with those of the run."""
    assert run.methods is not None
    start = run.evaluate()
    for train in run.methods.train.values():
        assert {name: values[0] for name, values in train().items()} == pytest.approx(start)
