"""The notebooks of the documentation run, and end as they say: each asserts its own finding."""

import runpy

import pytest
from folders import ROOT

NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.py"))


def test_each_algorithm_has_one():
    assert [path.stem.split("_", 2)[2] for path in NOTEBOOKS] == ["softmax", "em", "rbm", "adversarial"]


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_draws(path, monkeypatch):
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    shown = []
    monkeypatch.setattr(plt, "show", lambda: (shown.append(plt.gcf()), plt.close("all")))
    runpy.run_path(str(path))
    assert shown
    assert all(figure.axes for figure in shown)
