"""Units: side by side they leave the same records, none is lost, none runs twice, and no failure ends the others."""

import contextlib
import ctypes
import errno
import json
import os
import re
import signal
import subprocess
import time
from concurrent.futures import BrokenExecutor, Future

import pytest
import toy
import warm
from click.testing import CliRunner
from folders import ROOT

from toolkit.runner import _command, _jobs, _site, _units
from toolkit.runner._choice import _products
from toolkit.runner._command import main
from toolkit.runner._comparison import folder_of
from toolkit.runner._config import ConfigError, load_config
from toolkit.runner._jobs import _in_order
from toolkit.runner._progress import Progress
from toolkit.runner._records import MEASURED_SEEDS, claimed, overrides_of, read_all, read_records
from toolkit.runner._units import Answer, units_of

# A shell starts its background jobs with Ctrl-C ignored, and they hand that on.
MAIN = (
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "from toolkit.runner._command import main; main()"
)


def _run(path, results, *options, code=0):
    done = CliRunner().invoke(main, ["run", str(path), "--results", str(results), *options])
    assert done.exit_code == code, done.output
    return done


def _records(results):
    return [record for found in read_all(results) for record in found.records]


def _outcome(record):
    variants = {name: (v["first_loss"], v["metrics"]) for name, v in record.data["variants"].items()}
    return variants, record.data["comparison"]


@pytest.mark.keeps_its_sums  # the processes of several jobs have those of torch
def test_side_by_side_leaves_the_same_records_as_one_after_the_other(tmp_path):
    path = toy.install("toy_jobs", tmp_path)
    for jobs in ("1", "2"):
        done = _run(path, tmp_path / jobs, "--jobs", jobs, "--set", "seeds=4")
        assert re.search(r"toy_jobs: seed 3 \(4 of 4\) took \d+\.\d s", done.stderr)
    one, other = (_records(tmp_path / jobs) for jobs in ("1", "2"))
    assert [record.seed for record in other] == [0, 1, 2, 3]
    assert list(map(_outcome, one)) == list(map(_outcome, other))
    for record in (*one, *other):  # the time of a step does not depend on the seed
        seconds = [variant["seconds_per_step"] for variant in record.data["variants"].values()]
        assert all(value > 0 for value in seconds) if record.seed < MEASURED_SEEDS else seconds == [None] * 4


def test_a_record_without_times_is_completed_by_the_next_run(tmp_path):
    path = toy.install("toy_untimed", tmp_path)
    _run(path, tmp_path, "--jobs", "1")
    (file,) = tmp_path.glob("toy_untimed/*/seed-000/record.json")
    data = json.loads(file.read_text())
    data["variants"]["blocked"]["seconds_per_step"] = None
    file.write_text(json.dumps(data))
    assert "toy_untimed: all 2 seeds have records already" in _run(path, tmp_path).stderr
    assert json.loads(file.read_text())["variants"]["blocked"]["seconds_per_step"] > 0


def test_times_of_a_sweep_and_of_methods_are_measured_for_the_first_seed_alone(tmp_path):
    _run(toy.install("toy_timed", tmp_path), tmp_path, "--jobs", "2", "--set", "kind=timed")
    first, second = _records(tmp_path)
    for name, variant in first.data["variants"].items():
        assert variant["sweep"]["lap (s)"] == [1.0, 2.0, 4.0 if "target" in name else 5.0]
    timed = [
        [way["seconds_per_step"] for way in found.data["methods"]["trained"].values()] for found in (first, second)
    ]
    assert timed == [[0.25, None], [None, None]]
    assert all(variant["sweep"]["lap (s)"] == [None] * 3 for variant in second.data["variants"].values())
    assert "lap (s)" in (tmp_path / "pages" / "toy_timed.html").read_text()


class _Slowly:
    """Workers whose units end when they are asked for messages; they note how many units run beside each."""

    count = 2

    def __init__(self):
        self.running, self.begun = [], []

    def submit(self, task, unit):
        self.begun.append((task.__name__, unit.seed, len(self.running)))
        self.running.append(Future())
        return self.running[-1]

    def messages(self):
        if self.running:
            self.running.pop(0).set_result(Answer(error="no record"))
        return iter(())


def test_nothing_runs_beside_a_measurement(tmp_path, monkeypatch):
    monkeypatch.setattr(_jobs, "lacks_seconds", lambda folder, seed: True)
    units = units_of(load_config(toy.install("toy_alone", tmp_path), ["seeds=5"]))
    crew = _Slowly()
    with Progress() as progress:
        run = _jobs._Run(tmp_path, False, progress, lambda unit: None)
        run._unmeasured.append(units[4])
        run._keep = lambda unit, answer, write: write is _jobs.write_record and unit.seed == 2
        assert run._killed(units[:4], crew) == []
    assert crew.begun[:3] == [("measured", 4, 0), ("trained", 0, 0), ("trained", 1, 1)]
    assert max(beside for _, _, beside in crew.begun) == 1
    assert {beside for task, _, beside in crew.begun if task == "measured"} == {0}


def test_units_that_ended_are_kept_when_the_process_of_another_is_killed(tmp_path, monkeypatch):
    class Killed(_Slowly):
        def messages(self):
            for number, future in enumerate(self.running):
                if number % 2:
                    future.set_result(Answer((), ""))
                else:
                    future.set_exception(BrokenExecutor())
            self.running = []
            return iter(())

    monkeypatch.setattr(_jobs, "write_record", lambda *_: None)
    crew, units = Killed(), units_of(load_config(toy.install("toy_kept", tmp_path), ["seeds=8"]))
    crew.count, kept = 6, []
    with Progress() as progress:
        run = _jobs._Run(tmp_path, False, progress, lambda unit: kept.append(unit.seed))
        assert [unit.seed for unit in run._killed(units, crew)] == [0, 2, 4, 6, 7]
    assert sorted(kept) == [1, 3, 5]


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_a_unit_that_fails_does_not_end_the_others(tmp_path, jobs):
    one, other = (toy.install(f"toy_fails_{jobs}_{number}", tmp_path) for number in "ab")
    done = _run(other, tmp_path / "results", str(one), "--set", "kind=fails", "--jobs", jobs, code=1)
    lines = sorted(line for line in done.stderr.splitlines() if line.startswith("error:"))
    assert len(lines) == 2
    for path, line in zip((one, other), lines, strict=True):
        assert line.startswith(f"error: {path}: seed 0: ArithmeticError: no toy (at {tmp_path}")
    assert [record.seed for record in _records(tmp_path / "results")] == [1, 1]
    assert f"; records of 2 of 4 seeds in {tmp_path}/results/" in done.stdout


def test_the_place_of_an_error_inside_of_torch_is_that_in_the_experiment(tmp_path):
    done = _run(
        toy.install("toy_misfits", tmp_path), tmp_path / "results", "--jobs", "1", "--set", "kind=misfits", code=1
    )
    experiment = tmp_path / "experiments" / "toy_misfits.py"
    lines = experiment.read_text().splitlines()
    (number,) = (number for number, line in enumerate(lines, 1) if "# the place of this error" in line)
    assert done.stderr.splitlines()[-1].endswith(f" (at {experiment}:{number})")


def test_the_place_of_an_error_outside_of_the_experiment_is_that_in_the_library(tmp_path, monkeypatch):
    monkeypatch.setattr(_units, "record_of", lambda *_, **__: {}["missing"])
    done = _run(toy.install("toy_place", tmp_path), tmp_path / "results", "--jobs", "1", code=1)
    assert re.search(
        rf"seeds 0, 1: KeyError: 'missing' \(at {ROOT}/toolkit/runner/_units\.py:\d+\)$", done.stderr.strip()
    )


def test_a_run_without_any_record_says_so_and_draws_no_page(tmp_path):
    done = _run(
        toy.install("toy_nothing", tmp_path), tmp_path / "results", "--jobs", "1", "--set", "kind=misfits", code=1
    )
    assert re.fullmatch(rf"1 config in \d+ s; records of 0 of 2 seeds in {tmp_path}/results/\n", done.stdout)
    assert not (tmp_path / "results" / "index.html").exists()


def test_the_seeds_of_one_error_stand_in_their_order():
    errors = [f"toy.toml: seed {seed}: it failed" for seed in (10, 0, 2)]
    assert _jobs._merged([*errors, "other.toml: no config"]) == [
        "toy.toml: seeds 0, 2, 10: it failed",
        "other.toml: no config",
    ]


def test_a_full_disk_is_one_line(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("toolkit.runner._jobs.write_record", full)
    path = toy.install("toy_full", tmp_path)
    done = _run(path, tmp_path / "results", "--jobs", "1", code=1)
    assert [line for line in done.stderr.splitlines() if line.startswith("error")] == [
        f"error: {path}: seeds 0, 1: the record cannot be written: [Errno 28] No space left on device"
    ]


def test_a_folder_that_cannot_be_written_is_found_before_the_training(tmp_path):
    (tmp_path / "file").touch()
    results = tmp_path / "file" / "results"
    done = _run(toy.install("toy_unwritable", tmp_path), results, code=2)
    found = f"Found {results} (Not a directory): name another."
    assert done.stderr == f"error: `--results` should be a folder that can be written to. {found}\n"


@contextlib.contextmanager
def _obeying_permissions():
    """Give up the right of root to read and write any file, in this thread; skip if that is not possible.

    `capset` takes three sets of capabilities, of which the first is in effect, each of two words.
    """
    if os.geteuid() != 0:
        yield
        return
    library, header, sets = ctypes.CDLL(None), (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    if library.capget(header, sets):
        pytest.skip("root's rights cannot be read")
    in_effect = sets[0]
    sets[0] &= ~0b110  # CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH
    if library.capset(header, sets):
        pytest.skip("root's rights cannot be given up")
    try:
        yield
    finally:
        sets[0] = in_effect
        library.capset(header, sets)


@pytest.fixture
def locked():
    """Return a function that takes permissions from a path, until the end of the test."""
    changed = []

    def lock(path, mode):
        changed.append((path, path.stat().st_mode))
        path.chmod(mode)

    with _obeying_permissions():
        yield lock
    for path, mode in reversed(changed):
        path.chmod(mode)


def _invoked(*words, code):
    done = CliRunner().invoke(main, [*map(str, words)])
    assert done.exit_code == code, done.output
    assert done.exception is None or isinstance(done.exception, SystemExit)
    return [line for line in done.stderr.splitlines() if line.startswith("error")]


def test_a_read_only_folder_is_found_before_the_training(tmp_path, locked):
    (results := tmp_path / "results").mkdir()
    locked(results, 0o555)
    path, says = toy.install("toy_read_only", tmp_path), "`--results` should be a folder that can be written to"
    for command in (["run", path], ["zoo"]):
        assert _invoked(*command, "--results", results, code=2) == [
            f"error: {says}. Found {results} (Permission denied): name another."
        ]
    assert not list(results.iterdir())


@pytest.mark.parametrize(("name", "depth", "mode"), [("toy_closed", 0, 0o555), ("toy_sealed", 1, 0)])
def test_a_folder_of_records_that_cannot_be_written_does_not_end_the_others(tmp_path, locked, name, depth, mode):
    paths = [toy.install(f"{name}_not", tmp_path), toy.install(name, tmp_path)]
    folder = folder_of(load_config(paths[1]), tmp_path)
    folder.mkdir(parents=True)
    locked([folder, folder.parent][depth], mode)
    options = ["--jobs", "1", "--results", tmp_path, "--set", "seeds=1"]
    (error,) = _invoked("run", *paths, *options, code=1)
    assert error.startswith(f"error: {paths[1]}: seed 0: the record cannot be written: [Errno 13] Permission denied")
    assert [record.data["name"] for record in _records(tmp_path)] == [f"{name}_not"]


def test_records_in_a_read_only_folder_are_reported_elsewhere(tmp_path, locked):
    _run(toy.install("toy_archive", tmp_path), results := tmp_path / "results", "--jobs", "1")
    locked(results / "pages", 0o555)
    assert _invoked("report", "--results", results, code=1) == [
        f"error: {results}: the report cannot be written: Permission denied; `--single FILE` writes to another place"
    ]
    assert not _invoked("report", "--results", results, "--single", tmp_path / "one.html", code=0)


def test_a_record_that_may_not_be_read_is_named_and_not_called_missing(tmp_path, locked):
    for name in ("toy_public", "toy_secret"):
        _run(toy.install(name, tmp_path), results := tmp_path / "results", "--jobs", "1", "--set", "seeds=1")
    for part in ("*/seed-000/gradients.safetensors", "*/seed-000/record.json", "*/seed-000", "*", ""):
        (path,) = (results / "toy_secret").glob(part) if part else [results / "toy_secret"]
        locked(path, 0)
        (error,) = _invoked("report", "--results", results, code=1)
        assert error.startswith(f"error: {path}")
        assert error.endswith(": cannot be read: Permission denied")
        assert [record.data["name"] for record in _records(results)] == ["toy_public"]


def test_other_users_may_read_a_record_if_new_files_are_theirs_to_read(tmp_path):
    old = os.umask(0o022)
    try:
        _run(toy.install("toy_shared", tmp_path), tmp_path, "--jobs", "1", "--set", "seeds=1")
    finally:
        os.umask(old)
    (seed,) = tmp_path.glob("toy_shared/*/seed-000")
    assert {file.name: file.stat().st_mode & 0o777 for file in seed.iterdir()} == {
        "gradients.safetensors": 0o644,
        "record.json": 0o644,
    }


def test_a_full_disk_ends_the_zoo_with_a_line(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("toolkit.runner._zoo.read_programs", lambda folder: [])
    monkeypatch.setattr("toolkit.runner._records.write_zoo", full)
    (error,) = _invoked("zoo", "--results", tmp_path, code=1)
    assert error == f"error: {tmp_path}: the record and the page cannot be written: No space left on device"


def test_a_unit_whose_process_is_killed_runs_again(tmp_path):
    path = toy.install("toy_dies", tmp_path)
    done = _run(path, tmp_path, "--jobs", "2", "--set", "kind=dies", "--set", f"sign={tmp_path / 'sign'}")
    assert "a process was killed" in done.stderr
    assert [record.seed for record in _records(tmp_path)] == [0, 1]


def test_a_unit_that_another_run_has_is_left_to_it(tmp_path):
    path = toy.install("toy_claimed", tmp_path)
    with claimed(folder_of(load_config(path), tmp_path), 0) as mine:
        assert mine
        done = _run(path, tmp_path, "--jobs", "1")
    assert "toy_claimed: seed 0 (1 of 2) is left to another run" in done.stderr
    assert [record.seed for record in _records(tmp_path)] == [1]


def test_ctrl_c_ends_all_processes_and_keeps_what_is_finished(tmp_path):
    path, sign = toy.install("toy_stopped", tmp_path), tmp_path / "sign"
    options = ["run", str(path), "--results", str(tmp_path), "--jobs", "2", "--set", f"sign={sign}"]
    run = subprocess.Popen(
        [warm.python(), "-c", MAIN, *options],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        while not sign.exists() or not list(tmp_path.glob("toy_stopped/*/seed-000")):  # seed 1 waits in its middle
            assert run.poll() is None
            time.sleep(0.01)
        run.send_signal(signal.SIGINT)
        _, error = run.communicate(timeout=600)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)
    assert run.returncode == 130
    assert error.splitlines()[-1] == (
        f"error: stopped; finished seeds are kept in {tmp_path}/, and the same command runs the others"
    )
    assert "Traceback" not in error
    (folder,) = (tmp_path / "toy_stopped").iterdir()
    assert [record.seed for record in read_records(folder)] == [0]


def test_the_longest_units_come_first_after_the_shortest(tmp_path):
    short, long, unknown = (toy.install(f"toy_{name}", tmp_path) for name in ("short", "long", "unknown"))
    for path, seconds in ((short, 1.0), (long, 9.0)):
        folder = tmp_path / path.stem / "0123" / "seed-000"
        folder.mkdir(parents=True)
        (folder / "record.json").write_text(json.dumps({"seconds": seconds}))
    toy.rewrite(short, tmp_path / "toy_stated.toml", ["experiment='toy_short'", "seconds=5"])
    paths = (short, unknown, tmp_path / "toy_stated.toml", long)
    units = [units_of(load_config(path))[0] for path in paths]
    assert [unit.label for unit in _in_order(units, tmp_path)] == ["toy_unknown", "toy_long", "toy_stated", "toy_short"]


def test_a_sweep_runs_every_combination_and_the_report_shows_them_side_by_side(tmp_path):
    path = toy.install("toy_sweep", tmp_path)
    _run(path, tmp_path)
    done = _run(path, tmp_path, "--sweep", "learning_rate=0.05,0.2", "--set", "seeds=3")
    assert "toy_sweep learning_rate=0.05: toy_sweep.shift is redundant" in done.stdout
    (found,) = read_all(tmp_path)
    assert len(found.records) == 2
    values = [(overrides_of(records), len(records)) for records in found.overridden]
    assert sorted(values) == [(["learning_rate=0.05"], 3), (["learning_rate=0.2"], 3)]
    page = (tmp_path / "pages" / "toy_sweep.html").read_text().replace("<wbr>", "")
    assert page.count("<h3>With other values</h3>") == 1
    assert '<th scope="row">learning_rate=0.2</th>' in page


@pytest.mark.parametrize(
    ("sweeps", "expected"),
    [
        ((), [()]),
        (("a=1,2", "b=x"), [("a=1", "b=x"), ("a=2", "b=x")]),
        (("a=[1, 2],[3]",), [("a=[1, 2]",), ("a=[3]",)]),
        (("a='x,y',z",), [("a='x,y'",), ("a=z",)]),
        (("a=1,2,1",), [("a=1",), ("a=2",)]),
    ],
)
def test_swept_values_make_a_product(sweeps, expected):
    assert _products(sweeps) == expected


@pytest.mark.parametrize("sweep", ["learning_rate=0.1,0.10", "seeds=1,2"])
def test_a_record_that_two_swept_values_share_is_made_once(tmp_path, sweep):
    path = toy.install(f"toy_shares_{sweep[0]}", tmp_path)
    done = _run(path, tmp_path, "--sweep", sweep, "--jobs", "1")
    assert "another run" not in done.stderr
    assert done.stderr.count(" runs\n") == done.stderr.count(" took ") == 2
    assert [record.seed for record in _records(tmp_path)] == [0, 1]


def test_a_sweep_without_values_is_refused():
    with pytest.raises(ConfigError, match=r"--sweep a: should be key=value,value,..."):
        _products(("a",))


def test_two_configs_of_one_name_are_refused(tmp_path):
    one = toy.install("toy_twice", tmp_path)
    other = tmp_path / "other" / one.name
    other.parent.mkdir()
    other.write_text(one.read_text())
    done = _run(one, tmp_path / "results", str(other), code=2)
    assert f"{other}: the file name should differ from that of {one}" in done.stderr


def test_a_run_ends_with_its_verdicts_the_page_and_the_next_command(tmp_path):
    done = _run(toy.install("toy_ends", tmp_path), tmp_path / "results", "--jobs", "1")
    *_, count, page, following = done.stdout.splitlines()
    assert "toy_ends: toy_ends.shift is redundant at the first and the last step; with the block" in done.stdout
    assert count.startswith("1 config in ")
    assert page == f"page: {tmp_path}/results/index.html"
    assert (tmp_path / "results" / "index.html").is_file()
    command = f"stopgrad report --results {tmp_path}/results --single report.html"
    assert following == f"next: {command}, for one file to send"


def test_the_first_page_is_drawn_before_the_last_unit_has_run(tmp_path, monkeypatch):
    one, other = (toy.install(f"toy_page_{name}", tmp_path) for name in "ab")
    seen = []

    def watched(*arguments, **more):
        seen.append((tmp_path / "results" / "index.html").exists())
        return record_of(*arguments, **more)

    record_of = _units.record_of
    monkeypatch.setattr(_units, "record_of", watched)
    _run(one, tmp_path / "results", str(other), "--jobs", "1")
    assert seen == [False, True, True, True]


def test_pages_are_drawn_no_more_often_than_they_are_looked_at(tmp_path, monkeypatch):
    paths = [toy.install(f"toy_often_{name}", tmp_path) for name in "abc"]
    drawn = []

    def counted(*arguments, **more):
        drawn.append(arguments)
        return write_site(*arguments, **more)

    write_site = _site.write_site
    monkeypatch.setattr(_site, "write_site", counted)
    _run(paths[0], tmp_path / "results", *map(str, paths[1:]), "--jobs", "1")
    assert len(drawn) == 2  # the first record, and the end
    assert {page.stem for page in (tmp_path / "results" / "pages").glob("*.html")} == {path.stem for path in paths}

    drawn.clear()
    monkeypatch.setattr(_command, "_DRAWN_EVERY", 0)
    _run(paths[0], tmp_path / "results", *map(str, paths[1:]), "--jobs", "1", "--force")
    assert len(drawn) == 1 + len(paths) + 1


def test_damage_is_told_on_the_page_and_by_the_command_and_the_other_pages_are_drawn(tmp_path):
    one, other = (toy.install(f"toy_damage_{name}", tmp_path) for name in "ab")
    results = tmp_path / "results"
    _run(one, results, str(other), "--jobs", "1", "--set", "steps=1")
    (seed,) = results.glob("toy_damage_a/*/seed-001")
    (seed / "gradients.safetensors").unlink()
    (results / "zoo.json").write_text('{"schema": 1, "programs":')
    for page in results.glob("pages/*"):
        page.unlink()

    done = CliRunner().invoke(main, ["report", "--results", str(results)])
    assert done.exit_code == 1
    assert done.stdout.startswith("report of 2 configs: ")
    sentence = f"{seed}: gradients.safetensors is missing: run its config again"
    assert done.stderr.splitlines()[0] == f"error: {sentence}"
    assert re.fullmatch(
        rf"error: {results}/zoo.json: the record is damaged \(.*\): run `stopgrad zoo` again",
        done.stderr.splitlines()[1],
    )
    assert sentence in (results / "pages" / "toy_damage_a.html").read_text()
    assert "A seed is left out" not in (results / "pages" / "toy_damage_b.html").read_text()

    untouched = results / "pages" / "toy_damage_b.html"
    untouched.write_text("as it was")
    again = _run(one, results, "--jobs", "1", "--set", "steps=1")
    assert untouched.read_text() == "as it was", "a run draws its own configs again"
    assert "seed 0 (1 of 2) has a record already" in again.stderr
    assert "seed 1 (2 of 2) took" in again.stderr
    assert "A seed is left out" not in (results / "pages" / "toy_damage_a.html").read_text()
