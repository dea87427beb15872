"""Every config: it runs, its variants differ by nothing but the block, and its blocked gradient is the target."""

import dataclasses
import functools
import json
import math
import os
import time
import tomllib
from types import SimpleNamespace

import folders
import pytest
import torch
import toy
from click.testing import CliRunner

from toolkit import compare, stop_gradient, unblock
from toolkit.runner import _comparison
from toolkit.runner._command import main
from toolkit.runner._comparison import RunError, _target, run_config
from toolkit.runner._config import load_config
from toolkit.runner._findings import doubts
from toolkit.runner._records import BLOCKED, read_all, read_records
from toolkit.runner._rounding import OF_ONE_PASS
from toolkit.runner._training import train

CONFIGS = sorted(folders.CONFIGS.glob("*.toml"))


def _load(path, tmp_path, **values):
    """Load a config with other values, and the same name."""
    overrides = [f"{key}={value}" for key, value in values.items()]
    return load_config(path, overrides)


@pytest.fixture(scope="module")
def record(two_steps):
    """Return the record of two steps of a config, made when it is asked for: no test has to wait for all."""

    @functools.cache
    def of(path):
        (found,) = read_records(two_steps(path))
        return found

    return of


def _gradients(run, variant):
    with unblock(*variant):
        found = torch.autograd.grad(run.loss(), list(run.parameters.values()), allow_unused=True)
    return {
        name: torch.zeros_like(parameter) if gradient is None else gradient
        for (name, parameter), gradient in zip(run.parameters.items(), found, strict=True)
    }


def test_there_is_a_config_for_every_algorithm():
    experiments = {tomllib.loads(path.read_text())["experiment"] for path in CONFIGS}
    assert experiments >= {"softmax", "em", "rbm", "adversarial"}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_two_steps_leave_a_whole_record(path, record):
    data = record(path).data
    assert data["config"]["steps"] == 2
    assert next(iter(data["variants"])) == BLOCKED
    for variant in data["variants"].values():
        assert variant["steps"] == [0, 1, 2]
        assert all(value is not None for value in variant["metrics"]["objective"])
        assert variant["seconds_per_step"] > 0
        assert variant["peak_bytes"] >= variant["graph_bytes"] > 0
    parameters = {key.split("/")[-1] for key in record(path).gradients if key.startswith(f"first/{BLOCKED}/")}
    assert doubts([record(path)]) == []
    assert parameters == set(data["comparison"]["first"]["effects"][list(data["variants"])[1]]["per_parameter"])


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_first_loss_does_not_depend_on_a_block(path, record):
    data = record(path).data
    losses = [variant["first_loss"] for variant in data["variants"].values()]
    assert losses == pytest.approx([losses[0]] * len(losses), rel=OF_ONE_PASS[data["config"]["dtype"]])


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_blocked_gradient_is_the_target(path, record):
    comparison = record(path).data["comparison"]
    tolerance = {"float64": 1e-10, "float32": 1e-4}[record(path).data["config"]["dtype"]]
    for when in ("first", "last"):
        error = comparison[when]["target_error"][BLOCKED]
        if error is not None:
            assert error <= tolerance


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_gates_and_real_removal_agree_bit_for_bit(path):
    loaded = load_config(path, toy.two_steps(path))
    run = loaded.module.run(loaded.config, 0)
    comparison = compare(run.loss, run.parameters)
    for variant in loaded.config.variants:
        removed = _gradients(loaded.module.run(loaded.config, 0), variant)
        found = comparison.gradient(variant)
        assert all(torch.equal(found[name], removed[name]) for name in removed)


def test_the_last_step_is_evaluated_too(tmp_path):
    run_config(load_config(toy.install("toy_last", tmp_path), ["seeds=1", "steps=5"]), tmp_path / "results")
    ((record,),) = (found.records for found in read_all(tmp_path / "results"))
    assert record.data["variants"][BLOCKED]["steps"] == [0, 2, 4, 5]


@pytest.mark.parametrize(
    "target",
    [{"w": torch.ones(3)}, {"v": torch.tensor(1.0)}, {"w": 1.0}, torch.tensor(1.0)],
    ids=["shape", "name", "number", "tensor"],
)
def test_a_target_that_does_not_fit_the_parameters_is_an_error(target):
    """A target of another shape would be broadcast, and its distance from the gradient would mean nothing."""
    with pytest.raises(RunError, match=r"`target` should return .*, {'w': \(\)}\. Found (Tensor|{.*})\."):
        _target(target, {"w": torch.tensor(1.0)})


def test_variants_with_another_first_loss_are_an_error(tmp_path, monkeypatch):
    loaded = load_config(toy.install("toy_unfair", tmp_path), ["kind=unfair"])
    with pytest.raises(RunError, match="The first loss should not depend on a block"):
        run_config(loaded, tmp_path / "results")
    assert read_all(tmp_path / "results") == []


def test_variants_whose_first_losses_are_rounded_otherwise_are_compared(tmp_path, monkeypatch):
    loaded = load_config(toy.install("toy_rounds", tmp_path), ["kind=rounds", "seeds=1"])
    run_config(loaded, tmp_path / "results")
    (found,) = read_all(tmp_path / "results")
    assert len({variant["first_loss"] for variant in found.records[0].data["variants"].values()}) == 2


def test_a_block_that_these_values_do_not_meet_ends_the_command_line_with_a_line(tmp_path):
    overrides = ["--set", 'open=["rbm.straight_through"]', "--set", "steps=1", "--set", "seeds=1"]
    done = CliRunner().invoke(main, ["run", "configs/rbm_digits.toml", *overrides, "--results", str(tmp_path)])
    assert done.exit_code == 1
    assert done.stderr.splitlines()[-1] == (
        "error: configs/rbm_digits.toml: seed 0: `open` should name blocks that the program meets with these values: "
        "rbm.negative_samples. Found rbm.straight_through."
    )


def test_an_unfair_run_ends_the_command_line_with_code_1(tmp_path, monkeypatch):
    path = toy.install("toy_unfair_cli", tmp_path)
    done = CliRunner().invoke(main, ["run", str(path), "--set", "kind=unfair", "--results", str(tmp_path / "results")])
    assert done.exit_code == 1
    assert "a difference would not be due to the block" in done.stderr


@pytest.mark.parametrize(
    ("name", "line", "other", "says"),
    [
        ("ends_without_run", "    return Run(", "    Run(", "`run` of the experiment should return a Run. Found None."),
        (
            "ends_without_objective",
            '{"objective": weight',
            '{"loss": weight',
            "`evaluate` should return a metric 'objective'. Found ['first weight', 'loss'].",
        ),
        (
            "ends_by_exit",
            "    def loss():",
            '    raise SystemExit("enough")\n\n    def loss():',
            "SystemExit: enough (at ",
        ),
    ],
)
def test_an_experiment_that_fails_ends_the_command_line_with_its_reason(tmp_path, name, line, other, says):
    path = toy.install(f"toy_{name}", tmp_path)
    module = tmp_path / "experiments" / f"{path.stem}.py"
    module.write_text(module.read_text().replace(line, other))
    done = CliRunner().invoke(main, ["run", str(path), "--jobs", "1", "--results", str(tmp_path / "results")])
    assert done.exit_code == 1
    errors = [found for found in done.stderr.splitlines() if found.startswith("error: ")]
    assert errors
    assert all(says in found and str(path) in found for found in errors)
    assert read_all(tmp_path / "results") == []


def test_a_run_that_diverges_is_recorded_as_one(tmp_path, monkeypatch):
    loaded = load_config(toy.install("toy_diverges", tmp_path), ["kind=diverges", "seeds=1"])
    run_config(loaded, tmp_path / "results")
    ((record,),) = (found.records for found in read_all(tmp_path / "results"))
    assert record.data["variants"][BLOCKED]["diverged_at"] is None
    assert record.data["variants"]["toy_diverges.target"]["diverged_at"] == 1


def test_an_infinite_loss_ends_training_as_one_that_is_no_number_does(tmp_path):
    loaded = load_config(toy.install("toy_infinite", tmp_path))
    run = loaded.module.run(loaded.config, 0)
    losses = iter([1.0, math.inf, 1.0])
    found = train(dataclasses.replace(run, loss=lambda: run.loss() * next(losses)), loaded.config)
    assert (found.diverged_at, found.steps) == (1, [0])


def test_the_same_config_and_seed_give_the_same_record(tmp_path, monkeypatch):
    path = toy.install("toy_again", tmp_path)
    for root in ("one", "two"):
        run_config(load_config(path, ["seeds=1"]), tmp_path / root)
    one, two = (read_all(tmp_path / root)[0].records[0] for root in ("one", "two"))

    def outcome(record):
        return {name: (v["first_loss"], v["metrics"]) for name, v in record.data["variants"].items()}

    assert outcome(one) == outcome(two)
    assert one.data["comparison"] == two.data["comparison"]


def test_the_time_of_a_seed_begins_after_the_first_use_of_its_program(tmp_path, monkeypatch):
    """The first seed of a process imports whatever the program needs."""
    loaded = load_config(toy.install("toy_begins", tmp_path), ["seeds=2"])
    now, make = [0.0], loaded.module.run

    def imports(config, seed):
        now[0] += 100 if now[0] == 0 else 0
        run = make(config, seed)
        step = run.optimizer.step
        run.optimizer.step = lambda: now.__setitem__(0, now[0] + 1) or step()
        return run

    monkeypatch.setattr(loaded.module, "run", imports)
    monkeypatch.setattr(_comparison, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    steps = loaded.config.steps * len(loaded.config.variants)
    assert [_comparison.record_of(loaded, seed)[0]["seconds"] for seed in (0, 1)] == [steps, steps]


def test_the_variant_with_the_block_is_plain_training(tmp_path, monkeypatch):
    loaded = load_config(toy.install("toy_plain", tmp_path), ["seeds=1"])
    run_config(loaded, tmp_path / "results")
    ((record,),) = (found.records for found in read_all(tmp_path / "results"))
    run = loaded.module.run(loaded.config, 0)
    for _ in range(loaded.config.steps):
        run.optimizer.zero_grad()
        run.loss().backward()
        run.optimizer.step()
    assert record.data["variants"][BLOCKED]["metrics"]["objective"][-1] == run.evaluate()["objective"]


def test_other_methods_are_trained_once_a_seed_and_recorded(tmp_path, monkeypatch):
    loaded = load_config(toy.install("toy_methods", tmp_path), ["kind=methods"])
    told = []
    run_config(loaded, tmp_path / "results", on_method=told.append)
    (found,) = read_all(tmp_path / "results")
    assert told == ["walk <b>on</b>", "jump"] * 2
    for seed, record in enumerate(found.records):
        methods = record.data["methods"]
        assert (methods["label"], methods["steps"]) == ("lap", [0, 5, 10])
        walk, jump = methods["trained"].values()
        assert walk["metrics"] == {"objective": [3.0, 1.0 + seed, 2.0], "first weight": [0.5, 0.25, seed / 8]}
        assert jump["metrics"] == {"objective": [0.5], "first weight": [None]}
        assert (walk["seconds_per_step"], jump["seconds_per_step"]) == (None, None)


def test_a_method_has_a_value_for_every_step_or_one(tmp_path, monkeypatch):
    loaded = load_config(toy.install("toy_stumbles", tmp_path), ["kind=stumbles"])
    with pytest.raises(RunError, match=r"'stumble' should have 3 values of 'objective', or 1\. Found 2\."):
        run_config(loaded, tmp_path / "results")


def test_a_method_is_told_on_the_way(tmp_path, monkeypatch):
    path = toy.install("toy_tells", tmp_path)
    options = ["--set", "kind=methods", "--jobs", "1", "--results", str(tmp_path / "results")]
    done = CliRunner().invoke(main, ["run", str(path), *options])
    for seed in (0, 1):
        told = f"toy_tells: seed {seed} ({seed + 1} of 2) runs\ntoy_tells: walk <b>on</b>\ntoy_tells: jump\n"
        assert told in done.stderr


def test_references_are_no_reason_to_run_again(tmp_path, monkeypatch):
    path = toy.install("toy_refers", tmp_path)
    one, two = (
        run_config(load_config(path, ["seeds=1", *more]), tmp_path) for more in ([], ["references={a=1.0, b=2}"])
    )
    assert one == two


def test_force_runs_finished_seeds_again(tmp_path, monkeypatch):
    path = toy.install("toy_force", tmp_path)
    results = tmp_path / "results"
    arguments = ["run", str(path), "--results", str(results)]
    assert CliRunner().invoke(main, arguments).exit_code == 0
    (record,) = results.glob("toy_force/*/seed-000/record.json")
    before = record.stat().st_mtime_ns
    assert CliRunner().invoke(main, arguments).stderr.count("toy_force: all 2 seeds have records already\n") == 1
    module = tmp_path / "experiments" / "toy_force.py"
    os.utime(module, ns=(before + 1, before + 1))
    older = f"already, older than {module}; renew with `--force`\n"
    assert older in CliRunner().invoke(main, arguments).stderr
    assert record.stat().st_mtime_ns == before
    assert CliRunner().invoke(main, [*arguments, "--force"]).exit_code == 0
    assert record.stat().st_mtime_ns > before


def test_a_record_that_is_older_than_a_shared_module_says_so(tmp_path):
    path = toy.install("toy_shares", tmp_path)
    module = tmp_path / "experiments" / "toy_shares.py"
    helper, beside = module.with_name("_toy_shared.py"), tmp_path / "toy_beside.py"
    helper.write_text("from toy_beside import NUMBER\n")
    beside.write_text("NUMBER = 1\n")
    module.write_text(module.read_text() + "\nfrom ._toy_shared import NUMBER\n")
    run_config(load_config(path), tmp_path / "results")
    arguments = ["run", str(path), "--results", str(tmp_path / "results")]
    assert "all 2 seeds have records already\n" in CliRunner().invoke(main, arguments).stderr
    for file in (beside, helper):
        future = time.time_ns() + 10**9
        os.utime(file, ns=(future, future))
        older = f"all 2 seeds have records already, older than {file}; renew with `--force`\n"
        assert older in CliRunner().invoke(main, arguments).stderr


def test_list_shows_experiments_blocks_and_configs():
    stop_gradient(
        torch.ones(()), "a.block.that.some.program.named.while.it.ran.and.declared.nowhere.so.that.it.is.not.listed"
    )
    done = CliRunner().invoke(main, ["list"])
    assert done.exit_code == 0
    for text in ("softmax.shift", "em.responsibilities", "rbm.negative_samples", "adversarial.example"):
        assert text in done.stdout
    assert all(path.name in done.stdout for path in CONFIGS)
    assert "own_data/rbm_mnist.toml" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_records_are_plain_json(path, record):
    data = record(path).data
    assert json.loads(json.dumps(data, allow_nan=False)) == data
