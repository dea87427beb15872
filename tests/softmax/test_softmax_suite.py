"""The tests of softmax and log-sum-exp of the installed scipy; docs/coming_from_scipy.md has the exceptions."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from toolkit import softmax as ours

theirs = pytest.importorskip("scipy.special.tests.test_logsumexp", reason="scipy was installed without its tests")

PAGE = Path(__file__).parents[2] / "docs" / "coming_from_scipy.md"
DIFFERENCES = dict(re.findall(r"^\| `(test_[^`]+)` \| (.+) \|$", PAGE.read_text("utf-8"), re.MULTILINE))

# pytest accepts no iterator as the values of a parameter.
for mark in theirs.TestLogSumExp.test_gh22601_infinite_elements.pytestmark:
    object.__setattr__(mark, "args", (mark.args[0], list(mark.args[1])))
pytest.mark.slow(theirs.TestLogSumExp.test_gh22601_infinite_elements)  # 324 times


def tensor(a):
    """Return an array-like as a tensor; integers become floating-point numbers, as in scipy."""
    a = np.asarray(a)
    return torch.from_numpy(np.array(a if np.issubdtype(a.dtype, np.inexact) else a.astype(np.float64)))


def dims(x, axis):
    """Return scipy's axis, None for all, as torch's dimensions."""
    return tuple(range(max(x.dim(), 1))) if axis is None else axis


def logsumexp(a, axis=None, b=None, keepdims=False, return_sign=False):
    x = tensor(a)
    if b is not None:
        b = tensor(b)
        dtype = torch.promote_types(x.dtype, b.dtype)
        x, b = (part.to(dtype) for part in torch.broadcast_tensors(x, b))
    found = ours.logsumexp(x, dims(x, axis), keepdims, b=b, return_sign=return_sign)
    return tuple(part.numpy()[()] for part in found) if return_sign else found.numpy()[()]


def softmax(x, axis=None):
    x = tensor(x)
    return ours.softmax(x, dims(x, axis)).numpy()[()]


def log_softmax(x, axis=None):
    x = tensor(x)
    return ours.log_softmax(x, dims(x, axis)).numpy()[()]


@pytest.fixture
def xp():
    return theirs.xp_default_dtype.__globals__["np_compat"]


@pytest.fixture
def devices():
    return ["cpu"]


@pytest.fixture(autouse=True)
def as_theirs(request, monkeypatch):
    for function in (logsumexp, softmax, log_softmax):
        monkeypatch.setattr(theirs, function.__name__, function)
    for pattern, reason in DIFFERENCES.items():
        if re.fullmatch(re.escape(pattern).replace(r"\*", ".*"), request.node.name):
            # Whether rounding passes a bound depends on the processor.
            request.applymarker(pytest.mark.xfail(reason=reason, strict="rounding" not in reason))


class TestLogSumExp(theirs.TestLogSumExp):
    """Theirs."""


class TestSoftmax(theirs.TestSoftmax):
    """Theirs."""


class TestLogSoftmax(theirs.TestLogSoftmax):
    """Theirs."""
