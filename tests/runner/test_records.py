"""Records: complete or not there, never lost, never made twice."""

import json
import re
import signal
import subprocess
import textwrap
import time

import numpy as np
import pytest
import toy
import warm
from click.testing import CliRunner
from folders import ROOT

from toolkit.runner import _records
from toolkit.runner._command import main
from toolkit.runner._records import (
    claimed,
    damaged_records,
    environment,
    is_finished,
    overrides_of,
    read_all,
    read_records,
    read_zoo,
    results_folder,
    write_record,
)

GRADIENTS = {"first/blocked/weight": np.arange(3.0)}


def _record(seed, **more):
    return {"seed": seed, "name": "toy", **{part: {} for part in _records._PARTS}, **more}


def _seeds(folder):
    return [record.seed for record in read_records(folder)]


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
    assert _seeds(folder) == [2, 11]


def test_a_record_that_cannot_be_written_leaves_nothing_that_counts(tmp_path):
    folder = results_folder(tmp_path, "toy", {})
    with pytest.raises(ValueError, match="JSON compliant"):
        write_record(folder, 0, _record(0, loss=float("nan")), GRADIENTS)
    assert _seeds(folder) == []
    assert read_all(tmp_path) == []
    write_record(folder, 0, _record(0), GRADIENTS)
    assert [path.name for path in folder.iterdir()] == ["seed-000"]


def test_the_folder_depends_on_what_changes_a_record_only(tmp_path):
    base = {"steps": 3, "seeds": 2, "title": "a", "finding": "b"}
    folder = results_folder(tmp_path, "toy", base)
    assert results_folder(tmp_path, "toy", {**base, "seeds": 9, "title": "c"}) == folder
    assert results_folder(tmp_path, "toy", {**base, "steps": 4}) != folder


def _written(root, steps, finished, *, path="toy.toml", overrides=(), title="Toy"):
    """Write one seed of a config with this number of steps."""
    config = {"steps": steps, "title": title}
    data = _record(0, config=config, source=f"steps = {steps}\ntitle = '{title}'", path=str(path))
    folder = results_folder(root, "toy", config)
    write_record(folder, 0, {**data, "finished": finished, "overrides": list(overrides)}, GRADIENTS)


def test_records_that_agree_with_the_config_are_reported_however_old_they_are(tmp_path):
    config = tmp_path / "toy.toml"
    config.write_text("# a remark\nsteps = 3\ntitle = 'Toy'\n")
    for steps, finished in ((3, "2026-01-01"), (4, "2026-01-02")):
        _written(tmp_path, steps, finished, path=config)
    (found,) = read_all(tmp_path)
    assert found.records[0].data["config"]["steps"] == 3
    config.unlink()
    (found,) = read_all(tmp_path)
    assert found.records[0].data["config"]["steps"] == 4, "the newest where there is no file"


def test_overridden_values_stand_beside_the_config_and_do_not_hide_it(tmp_path):
    _written(tmp_path, 3, "2026-01-01")
    _written(tmp_path, 9, "2026-01-02", overrides=["steps=9", "seeds=1"])
    (found,) = read_all(tmp_path)
    assert found.records[0].data["config"]["steps"] == 3
    assert [overrides_of(records) for records in (found.records, *found.overridden)] == [[], ["steps=9"]]


def test_two_configs_of_one_file_name_are_both_reported(tmp_path):
    _written(tmp_path, 3, "2026-01-01", path="a/toy.toml")
    _written(tmp_path, 4, "2026-01-02", path="b/toy.toml", title="Another toy")
    assert sorted(found.records[0].data["config"]["steps"] for found in read_all(tmp_path)) == [3, 4]


def test_a_folder_under_another_name_is_no_record(tmp_path):
    folder = results_folder(tmp_path, "toy", {})
    write_record(folder, 0, _record(0), GRADIENTS).rename(folder / "seed-old")
    assert read_all(tmp_path) == []
    assert damaged_records(tmp_path) == []


def _without_gradients(seed):
    (seed / "gradients.safetensors").unlink()


def _with_junk_for_gradients(seed):
    (seed / "gradients.safetensors").write_bytes(b"junk")


def _without_a_record(seed):
    (seed / "record.json").unlink()


def _with_half_a_record(seed):
    path = seed / "record.json"
    path.write_text(path.read_text()[:20])


def _of_another_schema(seed):
    path = seed / "record.json"
    path.write_text(path.read_text().replace('"schema": 1', '"schema": 99'))


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (_without_gradients, "gradients.safetensors is missing: run its config again"),
        (_with_junk_for_gradients, "the record is damaged ("),
        (_without_a_record, "record.json is missing: run its config again"),
        (_with_half_a_record, "the record is damaged ("),
        (_of_another_schema, "`schema` should be 1. Found 99: run its config again"),
    ],
)
def test_a_damaged_record_is_left_out_and_named_and_is_made_again(tmp_path, damage, says):
    folder = results_folder(tmp_path, "toy", {})
    for seed in (0, 1):
        path = write_record(folder, seed, _record(seed), GRADIENTS)
    damage(path)
    assert _seeds(folder) == [0]
    (found,) = read_all(tmp_path)
    (sentence,) = found.damaged
    assert damaged_records(tmp_path) == [sentence]
    assert sentence.startswith(f"{path}: {says}")
    assert sentence.endswith("run its config again")
    assert [is_finished(folder, seed) for seed in (0, 1, 2)] == [True, False, False]


def test_a_seed_is_claimed_once_and_a_claim_leaves_nothing(tmp_path):
    with claimed(tmp_path, 0) as mine, claimed(tmp_path, 0) as again, claimed(tmp_path, 1) as other:
        assert (mine, again, other) == (True, False, True)
    with claimed(tmp_path, 0) as mine:
        assert mine
    assert list(tmp_path.iterdir()) == []


def test_the_environment_says_commit_versions_and_machine():
    found = environment(threads=2)
    assert found["git"] is None or len(found["git"]["commit"]) == 40
    assert found["versions"]["torch"].startswith("2.")
    assert found["machine"]["threads"] == 2


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_killed_run_goes_on_with_nothing_lost_and_nothing_twice(tmp_path, jobs):
    config = toy.install("toy_killed", tmp_path)
    sign, results = tmp_path / "in-seed-1", tmp_path / "results"
    program = textwrap.dedent(f"""
        from toolkit.runner._command import main
        main(["run", {str(config)!r}, "--results", {str(results)!r},
              "--set", "sign={sign}", "--jobs", "{jobs}"])
    """)

    def start():
        return subprocess.Popen(
            [warm.python(), "-c", program], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    run = start()
    try:
        while not sign.exists() or not list(results.glob("toy_killed/*/seed-000")):  # seed 1 waits in its middle
            assert run.poll() is None, run.communicate()[0]
            time.sleep(0.01)
    finally:
        run.send_signal(signal.SIGKILL)
    run.communicate()
    assert run.returncode == -signal.SIGKILL
    (folder,) = (results / "toy_killed").iterdir()
    assert _seeds(folder) == [0]
    first = json.loads((folder / "seed-000" / "record.json").read_text())

    again = start()
    output, _ = again.communicate()
    assert again.returncode == 0, output
    assert "seed 0 (1 of 2) has a record already" in output
    assert _seeds(folder) == [0, 1]
    now = json.loads((folder / "seed-000" / "record.json").read_text())
    for data in (first, now):  # which the second run may have measured
        for variant in data["variants"].values():
            del variant["seconds_per_step"]
    assert now == first
    assert sorted(path.name for path in folder.iterdir()) == ["seed-000", "seed-001"]


def test_all_records_are_read_once(tmp_path, monkeypatch):
    for values in ({}, {"steps": 3}):
        for seed in range(2):
            write_record(results_folder(tmp_path, "toy", values), seed, _record(seed), GRADIENTS)
    read, read_one = [], _records._read
    monkeypatch.setattr(_records, "_read", lambda folder: [read.append(folder), read_one(folder)][1])
    assert [len(found.records) for found in read_all(tmp_path)] == [2]
    assert len(read) == len(set(read)) == 4


@pytest.mark.parametrize("command", ["report", "run"])
def test_a_record_without_a_part_is_named_and_not_drawn(tmp_path, command):
    config, results = toy.install(f"toy_part_{command}", tmp_path), tmp_path / "results"
    run = ["run", str(config), "--jobs", "1", "--results", str(results)]
    assert CliRunner().invoke(main, run).exit_code == 0
    path, whole = sorted(results.rglob("record.json"))
    data = json.loads(path.read_text())
    path.write_text(json.dumps({name: part for name, part in data.items() if name != "variants"}))
    if command == "report":
        done = CliRunner().invoke(main, ["report", "--results", str(results)])
        assert done.exit_code == 1
        assert done.stderr == (
            f"error: {path.parent}: the record is damaged (it has no variants): run its config again\n"
        )
    else:
        assert CliRunner().invoke(main, run).exit_code == 0
        assert json.loads(path.read_text())["variants"].keys() == json.loads(whole.read_text())["variants"].keys()


@pytest.mark.parametrize("text", ["[]", "3", '{"schema": 1}', '{"a": 1}', '{"a": '])
def test_a_file_of_another_shape_is_a_damaged_record(tmp_path, text):
    seed = tmp_path / "em" / "values" / "seed-000"
    seed.mkdir(parents=True)
    (seed / "gradients.safetensors").write_bytes(b"")
    (seed / "record.json").write_text(text)
    (tmp_path / "zoo.json").write_text(text)
    assert read_zoo(tmp_path) == []
    assert read_records(seed.parent) == []
    one, other = damaged_records(tmp_path)
    assert re.match(rf"{seed}: (the record is damaged \(|`schema` should be 1)", one)
    assert re.match(rf"{tmp_path}/zoo.json: the record is damaged .*: run `stopgrad zoo` again$", other)
