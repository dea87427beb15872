"""Units as tasks of a Ray cluster: nothing is lost if a process or a whole node is killed. Needs the extra `ray`."""

import contextlib
import os
import re
import subprocess
import sys
import time

import pytest
import toy
from click.testing import CliRunner
from folders import ROOT

from toolkit.runner._command import main
from toolkit.runner._records import read_all

COMMAND = [sys.executable, "-c", "from toolkit.runner._command import main; main()", "run"]


def _seeds(results):
    return [record.seed for found in read_all(results) for record in found.records]


@contextlib.contextmanager
def _cluster(monkeypatch):
    """Yield a cluster without processors, whose head is this machine; nodes are added to it."""
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))  # of the nodes, which import this checkout
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        yield cluster
    finally:
        cluster.shutdown()


def _run(path, results, cluster, *options):
    """Start a run, and return its process."""
    command = [*COMMAND, path.name, "--results", str(results), "--ray", cluster.address, *options]
    return subprocess.Popen(command, cwd=path.parent, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_a_unit_whose_process_is_killed_runs_again(tmp_path, monkeypatch):
    path, results = toy.install("toy_ray_dies", tmp_path), tmp_path / "results"
    with _cluster(monkeypatch) as cluster:
        cluster.add_node(num_cpus=2)
        run = _run(path, results, cluster, "--set", "kind=dies", "--set", f"sign={tmp_path / 'sign'}")
        output, errors = run.communicate(timeout=1200)
    assert run.returncode == 0, errors
    assert (tmp_path / "sign").exists()
    assert len(re.findall(r"toy_ray_dies: seed \d \(\d of 2\) took", errors)) == 2
    assert "records of 2 of 2 seeds" in output
    assert _seeds(results) == [0, 1]


@pytest.mark.slow
def test_the_units_of_a_node_that_is_killed_run_on_another(tmp_path, monkeypatch):
    path, results, sign = toy.install("toy_ray_node", tmp_path), tmp_path / "results", tmp_path / "sign"
    with _cluster(monkeypatch) as cluster:
        node = cluster.add_node(num_cpus=2)
        run = _run(path, results, cluster, "--set", f"sign={sign}", "--set", "seeds=3")
        while not sign.exists():  # seed 1 waits in its middle, until it is killed
            assert run.poll() is None, run.communicate()
            time.sleep(0.1)
        cluster.add_node(num_cpus=1)
        cluster.remove_node(node, allow_graceful=False)
        _, errors = run.communicate(timeout=1200)
    assert run.returncode == 0, errors
    assert _seeds(results) == [0, 1, 2]


def test_without_ray_the_command_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    path = toy.install("toy_ray_missing", tmp_path)
    done = CliRunner().invoke(main, ["run", str(path), "--ray", "auto", "--results", str(tmp_path / "results")])
    assert done.exit_code == 2
    assert done.stderr == "error: `--ray` needs the package ray: pip install 'stopgrad[ray]'\n"


def test_without_a_cluster_the_command_says_where_it_looked(tmp_path, monkeypatch):
    pytest.importorskip("ray")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))  # where the clusters of this machine are noted
    path = toy.install("toy_ray_nowhere", tmp_path)
    done = CliRunner().invoke(main, ["run", str(path), "--ray", "auto", "--results", str(tmp_path / "results")])
    assert done.exit_code == 2
    assert done.stderr.splitlines()[-1].startswith(
        "error: `--ray` should be the address of a running cluster. Found 'auto': "
    )
