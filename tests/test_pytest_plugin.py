"""The plugin for pytest: its option, its fixture, the tables it writes, and the torch that it leaves alone."""

import os
import subprocess
import sys
import tomllib

import pytest
import warm
from folders import ROOT

MODEL = """
import torch

torch.manual_seed(0)
online, target = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
x = torch.ones(3, 2)


def loss():
    return (online(x) - target(x).detach()).square().mean()
"""

TEST = """
import pytest


class TestLoss:
    @pytest.mark.parametrize("scale", [1, 2])
    def test_stops(self, stops, scale):
        from model import loss

        found = stops(lambda: scale * loss())
        assert len(found.effects) == 1
        stops(lambda: loss() + loss().detach())
"""

TABLE = """\
file = "test_model.py"
function = "TestLoss.test_stops.<locals>.<lambda>"
source = "loss().detach()"
verdict = "partial"
"""


@pytest.fixture
def suite(tmp_path):
    """A folder with a model and its test, where the plugin is installed as from a wheel."""
    installed = tmp_path / "installed" / "stopgrad-0.1.0.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: stopgrad\nVersion: 0.1.0\n")
    plugins = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["entry-points"]["pytest11"]
    lines = "".join(f"{name} = {module}\n" for name, module in plugins.items())
    (installed / "entry_points.txt").write_text(f"[pytest11]\n{lines}")
    (tmp_path / "pytest.ini").write_text("[pytest]\npythonpath = .\n")
    (tmp_path / "conftest.py").write_text(
        "import sys\n\n\ndef pytest_unconfigure():\n    print('torch is there:', 'torch' in sys.modules)\n"
    )
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "test_model.py").write_text(TEST)
    return tmp_path


def _pytest(folder, *arguments, python=None):
    return subprocess.run(
        [python or warm.python(), "-m", "pytest", "-p", "no:cacheprovider", *arguments],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(folder / "installed"), str(ROOT)]),
            "PYTHONDONTWRITEBYTECODE": "1",  # sources of the same second and size would count as unchanged
            "PYTEST_ADDOPTS": "",
        },
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


@pytest.mark.parametrize("argument", ["--help", "--collect-only"])
def test_torch_is_not_imported_before_the_fixture_is_used(suite, argument):
    done = _pytest(suite, argument, python=sys.executable)
    assert done.returncode == 0, done.stdout
    assert "torch is there: False" in done.stdout
    if argument == "--help":
        assert "--stops={check,update}" in done.stdout


def test_a_table_is_written_and_held(suite):
    path = suite / "test_model.stops.toml"
    done = _pytest(suite)
    assert done.returncode == 1
    assert "The stops of 'TestLoss::test_stops[1]' should be in test_model.stops.toml. `pytest --stops=u" in done.stdout
    assert not path.exists()
    done = _pytest(suite, "--stops=update")
    assert done.returncode == 0, done.stdout
    assert f"stops: 6 in {path}" in done.stdout
    tables = tomllib.loads(path.read_text("utf-8"))
    assert list(tables) == [f"TestLoss::test_stops[{scale}]{again}" for scale in (1, 2) for again in ("", " (2)")]
    assert path.read_text("utf-8").endswith(TABLE)
    assert _pytest(suite).returncode == 0
    (suite / "model.py").write_text("# Lines move.\n" + MODEL)
    assert _pytest(suite).returncode == 0
    (suite / "model.py").write_text(MODEL.replace("target(x).detach()", "target(x)"))
    done = _pytest(suite, "-k", "2")
    assert done.returncode == 1
    assert "model.py: `target(x).detach()` in loss: the stop is gone; expected cuts target.*" in done.stdout


def test_an_update_keeps_the_tables_of_other_tests(suite):
    path = suite / "test_model.stops.toml"
    assert _pytest(suite, "--stops=update", "-k", "test_stops and 1").returncode == 0
    first = path.read_text("utf-8")
    assert _pytest(suite, "--stops=update", "-k", "test_stops and 2").returncode == 0
    assert path.read_text("utf-8").startswith(first)


def test_a_loss_that_differs_between_runs_fails(suite):
    (suite / "model.py").write_text(
        "import random\n" + MODEL.replace("return (", "return random.SystemRandom().random() * (")
    )
    done = _pytest(suite, "--stops=update")
    assert done.returncode == 1
    assert "`loss` should do the same each time it runs. Found the program is not deterministic" in done.stdout


def test_tables_are_not_written_from_several_processes(suite):
    pytest.importorskip("xdist")
    done = _pytest(suite, "--stops=update", "-n", "2")
    assert done.returncode == 4
    assert "`--stops=update` should run in one process. Found `--numprocesses`." in done.stderr
