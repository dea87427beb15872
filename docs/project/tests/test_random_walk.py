"""The random walk: its blocked gradient is the stated one, and opening the block changes it.

Run it in the folder of the project: `python -m pytest`, after `pip install pytest`.
"""

import sys
import tomllib
from pathlib import Path

import torch

from toolkit import compare

PROJECT = Path(__file__).parents[1]
sys.path.insert(0, str(PROJECT))

from experiments.random_walk import NEXT, Config, run  # noqa: E402


def _run(seed):
    values = tomllib.loads((PROJECT / "configs" / "random_walk.toml").read_text())
    return run(Config.model_validate(values), seed)


def test_the_blocked_gradient_is_the_update_of_temporal_differences():
    made = _run(0)
    found = compare(made.loss, made.parameters)
    torch.testing.assert_close(found.blocked["values"], made.target()["values"])


def test_the_block_matters():
    made = _run(0)
    assert compare(made.loss, made.parameters)[NEXT.name].verdict.kind == "partial"


def test_two_runs_of_a_seed_are_identical():
    one, two = _run(3), _run(3)
    assert torch.equal(one.loss(), two.loss())
