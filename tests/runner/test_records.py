"""Records: complete or not there, never lost, never made twice."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest
import toy
from folders import ROOT

from toolkit.runner._records import environment, finished_seeds, read_all, results_folder, write_record

GRADIENTS = {"first/blocked/weight": np.arange(3.0)}


def _record(seed, **more):
    return {"seed": seed, "name": "toy", **more}


def test_what_is_written_is_read(tmp_path):
    folder = results_folder(tmp_path, "toy", {"steps": 3})
    write_record(folder, 4, _record(4, loss=0.25), GRADIENTS)
    (found,) = read_all(tmp_path)
    assert found.name == "toy"
    assert [record.seed for record in found.records] == [4]
    assert found.records[0].data["loss"] == 0.25
    np.testing.assert_array_equal(found.records[0].gradients["first/blocked/weight"], np.arange(3.0))


def test_seeds_come_in_order_and_an_older_record_is_replaced(tmp_path):
    folder = results_folder(tmp_path, "toy", {})
    for seed, loss in ((11, 1.0), (2, 1.0), (2, 2.0)):
        write_record(folder, seed, _record(seed, loss=loss), GRADIENTS)
    (found,) = read_all(tmp_path)
    assert [(record.seed, record.data["loss"]) for record in found.records] == [(2, 2.0), (11, 1.0)]
    assert finished_seeds(folder) == {2, 11}


def test_a_record_that_cannot_be_written_leaves_nothing_that_counts(tmp_path):
    folder = results_folder(tmp_path, "toy", {})
    with pytest.raises(ValueError, match="JSON compliant"):
        write_record(folder, 0, _record(0, loss=float("nan")), GRADIENTS)
    assert finished_seeds(folder) == set()
    assert read_all(tmp_path) == []
    write_record(folder, 0, _record(0), GRADIENTS)
    assert [path.name for path in folder.iterdir()] == ["seed-000"]


def test_the_folder_depends_on_what_changes_a_record_only(tmp_path):
    base = {"steps": 3, "seeds": 2, "title": "a", "finding": "b"}
    folder = results_folder(tmp_path, "toy", base)
    assert results_folder(tmp_path, "toy", {**base, "seeds": 9, "title": "c"}) == folder
    assert results_folder(tmp_path, "toy", {**base, "steps": 4}) != folder


def test_the_newest_values_of_a_config_are_reported(tmp_path):
    for steps in (3, 4):
        folder = results_folder(tmp_path, "toy", {"steps": steps})
        path = write_record(folder, 0, _record(0, steps=steps), GRADIENTS)
        os.utime(path / "record.json", (steps, steps))
    (found,) = read_all(tmp_path)
    assert found.records[0].data["steps"] == 4


def test_a_record_of_another_schema_is_refused(tmp_path):
    path = write_record(results_folder(tmp_path, "toy", {}), 0, _record(0), GRADIENTS) / "record.json"
    path.write_text(path.read_text().replace('"schema": 1', '"schema": 99'))
    with pytest.raises(ValueError, match=r"`schema` should be 1. Found 99"):
        read_all(tmp_path)


def test_a_damaged_record_is_named(tmp_path):
    path = write_record(results_folder(tmp_path, "toy", {}), 0, _record(0), GRADIENTS) / "record.json"
    path.write_text("junk")
    with pytest.raises(
        ValueError, match=r"toy/.*/seed-000: the record is damaged \(.*\): run its config again with --force"
    ):
        read_all(tmp_path)


def test_the_environment_says_commit_versions_and_machine():
    found = environment(threads=2)
    assert found["git"] is None or len(found["git"]["commit"]) == 40
    assert found["versions"]["torch"].startswith("2.")
    assert found["machine"]["threads"] == 2


def test_a_killed_run_goes_on_with_nothing_lost_and_nothing_twice(tmp_path):
    config = toy.install("toy_killed", tmp_path)
    sign, results = tmp_path / "in-seed-1", tmp_path / "results"
    program = textwrap.dedent(f"""
        from toolkit.runner._command import main
        main(["run", {str(config)!r}, "--results", {str(results)!r},
              "--set", "sign={sign}"])
    """)

    def start():
        return subprocess.Popen(
            [sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    run = start()
    try:
        while not sign.exists():  # in the middle of seed 1, where it waits
            assert run.poll() is None, run.communicate()[0]
            time.sleep(0.01)
    finally:
        run.send_signal(signal.SIGKILL)
    run.communicate()
    assert run.returncode == -signal.SIGKILL
    (folder,) = (results / "toy_killed").iterdir()
    assert finished_seeds(folder) == {0}
    first = (folder / "seed-000" / "record.json").stat()

    again = start()
    output, _ = again.communicate()
    assert again.returncode == 0, output
    assert "seed 1 of 2 has a record already" in output
    assert finished_seeds(folder) == {0, 1}
    assert (folder / "seed-000" / "record.json").stat().st_mtime_ns == first.st_mtime_ns
    assert sorted(path.name for path in folder.iterdir()) == ["seed-000", "seed-001"]
