"""Every call in the migration table of attacks runs, and gives examples in the ball where it gives examples."""

import re

import pytest
import torch
from folders import ROOT

PAGE = (ROOT / "docs" / "coming_from_attacks.md").read_text("utf-8")
ROWS = re.findall(r"^\| (.+) \| `(.+)` \|$", PAGE, re.MULTILINE)


@pytest.fixture(scope="module")
def names():
    found = {}
    exec(re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)[1], found)
    return found


def test_every_row_has_a_call():
    headings = re.findall(r"^\| \w+ \| here \|$", PAGE, re.MULTILINE)
    rules = PAGE.count("|---|---|")
    assert len(headings) == rules == 4
    assert len(ROWS) + len(headings) + rules == len(re.findall(r"^\|", PAGE, re.MULTILINE))


@pytest.mark.parametrize("call", dict.fromkeys(call for _, call in ROWS))
def test_a_row_runs(call, names):
    found = eval(call, {**names, "generator": torch.Generator().manual_seed(0)})
    images = names["images"]
    if isinstance(found, torch.Tensor):
        assert found.shape == images.shape
        assert 0 <= found.min() <= found.max() <= 1
        assert found.isfinite().all()
    if "epsilon=eps" in call and isinstance(found, torch.Tensor):
        assert (found - images).abs().max() <= names["eps"] + 1e-7
    if isinstance(found, float):
        assert 0 <= found <= 1
