"""The peers' own test suites on our estimators: every test passes, or is in the list of differences in the docs."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve()
DOCS = HERE.parents[2] / "docs"
SUITES = {"scikit-learn": ("sklearn", 40), "hmmlearn": ("hmmlearn", 35)}


def listed(suite: str) -> set[str]:
    """Return the tests in the first column of the page's table of differences."""
    text = (DOCS / f"coming_from_{suite.replace('-', '_')}.md").read_text()
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `test_")]
    return {name for row in rows for name in re.findall(r"`(test_\w+)`", row)}


@pytest.mark.slow
@pytest.mark.parametrize("suite", SUITES)
def test_every_test_passes_or_is_a_difference_with_a_reason(suite, tmp_path):
    package, n_passing = SUITES[suite]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    report = tmp_path / "report.json"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [sys.executable, HERE.with_name("peer_suites.py"), suite, report],
        env=environment,
        cwd=tmp_path,
        check=True,
        capture_output=True,
    )
    found = json.loads(report.read_text())
    failed = {re.search(r"(test_\w+)(\[|$)", name)[1] for name, outcome in found.items() if outcome == "failed"}
    assert failed - listed(suite) == set()
    if suite == "scikit-learn":
        assert listed(suite) - failed == set()  # nothing in the list passes by now
    assert sum(outcome == "passed" for outcome in found.values()) >= n_passing
