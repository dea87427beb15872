"""Config files: what is read, and the one line that each mistake ends with."""

import itertools
import re
from pathlib import Path

import pytest
import toy
from click.testing import CliRunner
from folders import CONFIGS

from toolkit.runner._choice import chosen_configs
from toolkit.runner._command import main
from toolkit.runner._config import ConfigError, load_config
from toolkit.runner._discovery import experiment_folders
from toolkit.runner._listing import keys_of

NUMBERS = itertools.count()


@pytest.fixture
def config(tmp_path):
    return toy.install(f"toy_config_{next(NUMBERS)}", tmp_path)


def _edited(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    return path


def _message(path, *overrides):
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value)


def test_values_and_defaults_are_resolved(config):
    loaded = load_config(config)
    assert loaded.name == config.stem
    assert loaded.config.resolved()["steps"] == 6
    assert loaded.config.resolved()["noise"] == 0.1
    assert loaded.config.resolved()["dtype"] == "float64"


def test_variants_start_with_the_blocked_run(config):
    name = config.stem
    target, shift = f"{name}.target", f"{name}.shift"
    expected = [frozenset(), frozenset({target}), frozenset({shift}), frozenset({target, shift})]
    assert load_config(config).config.variants == expected


def test_overrides_win_and_are_typed(config):
    loaded = load_config(config, ["steps=9", "learning_rate=1e-3", "kind=unfair", f"open=['{config.stem}.shift']"])
    assert (loaded.config.steps, loaded.config.learning_rate, loaded.config.kind) == (9, 1e-3, "unfair")
    assert loaded.config.open == [f"{config.stem}.shift"]


def test_an_unknown_key_is_named_with_its_line_and_the_nearest_one(config):
    _edited(config, "learning_rate", "learning_rat")
    assert f"{config}:8: learning_rat: unknown key; did you mean 'learning_rate'?" in _message(config)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("steps = 6", 'steps = "many"', ":6: steps: should be a valid integer, found 'many'"),
        ("steps = 6", 'steps = "6"', ":6: steps: should be a valid integer, found '6'"),
        ("steps = 6", "steps = 0", ":6: steps: should be greater than or equal to 1, found 0"),
        ("learning_rate = 0.1", "learning_rate = -1", ":8: learning_rate: should be greater than 0, found -1"),
        ("learning_rate = 0.1", "learning_rate = nan", ":8: learning_rate: should be"),
        ("steps = 6", 'steps = 6\ndtype = "float46"', "found 'float46'; did you mean 'float64'?"),
        (
            "steps = 6",
            'steps = 6\ndevice = "gpu"',
            ":7: device: should be cpu, cuda, or cuda:N with a number N, f",
        ),
        ("steps = 6\n", "", ": steps: missing"),
        (".target", ".targte", ":4: open: unknown block"),
        ("steps = 6", "steps = = 6", "not valid TOML"),
    ],
    ids=["word", "text", "zero", "negative", "nan", "choice", "device", "missing", "block", "syntax"],
)
def test_a_bad_value_is_one_line_with_file_and_key(config, old, new, says):
    message = _message(_edited(config, old, new))
    assert "\n" not in message
    assert message.startswith(str(config))
    assert says in message


@pytest.mark.parametrize(
    ("tables", "says"),
    [
        ("[[parts]]\nsize = 1\n[[parts]]\nsiez = 1\nsize = 2", ":12: parts.siez: unknown key; did you mean 'size'?"),
        ("[[parts]]\nsize = 1\n[[parts]]\nsize = 0", ":12: parts.size: should be greater than or equal to 1"),
        ("[[parts]]\n[[parts]]\nsize = 1", ":9: parts.size: missing"),
        ("[[parts]]\nsize = 1\n[[parts]]", ":11: parts.size: missing"),
        ("parts = [3]", ":9: parts: should be a valid dictionary"),
        ("parts = [{size = 2}, {sise = 1, size = 1}]", ":9: parts.sise: unknown key; did you mean 'size'?"),
        ("[references]\na = 'b'", ": references: should be a valid number, found 'b'"),
    ],
    ids=["unknown", "value", "missing in the first", "missing in the last", "no table", "inline", "within a value"],
)
def test_a_bad_value_in_a_table_is_one_line_too(config, tables, says):
    config.write_text(config.read_text() + tables)
    message = _message(config)
    assert "\n" not in message
    assert message.startswith(f"{config}{says}")


def test_a_bad_value_in_a_table_of_an_override(config):
    message = _message(config, "parts=[{size=1}, {}]")
    assert message == "--set parts=[{size=1}, {}]: parts.size: missing"


@pytest.mark.parametrize(
    ("count", "device", "says"),
    [
        (0, "cuda", "`device` should be cpu, as torch finds no CUDA device here. Found 'cuda'."),
        (0, "cuda:0", "`device` should be cpu, as torch finds no CUDA device here. Found 'cuda:0'."),
        (2, "cuda:2", "`device` should be one of cpu, cuda:0, cuda:1. Found 'cuda:2'."),
    ],
)
def test_a_device_that_is_not_here_is_one_line(config, monkeypatch, count, device, says):
    monkeypatch.setattr("torch.cuda.device_count", lambda: count)
    assert _message(config, f"device={device}") == f"--set device={device}: {says}"
    done = CliRunner().invoke(main, ["run", str(config), "--set", f"device={device}"])
    assert (done.exit_code, done.stderr) == (2, f"error: --set device={device}: {says}\n")


@pytest.mark.parametrize(("count", "device"), [(0, "cpu"), (1, "cuda"), (2, "cuda:1")])
def test_a_device_that_is_here_is_accepted(config, monkeypatch, count, device):
    monkeypatch.setattr("torch.cuda.device_count", lambda: count)
    assert load_config(config, [f"device={device}"]).config.device == device


def test_a_byte_order_mark_is_no_part_of_a_config(config):
    text = config.read_text()
    config.write_text(text, encoding="utf-8-sig")
    assert config.read_bytes().startswith(b"\xef\xbb\xbf")
    assert load_config(config).source == text
    _edited(config, "steps = 6", "steps = 0")
    assert ":6: steps: should be greater than" in _message(config)


def test_keys_are_listed_of_experiments_and_a_config_is_told_from_one():
    done = CliRunner().invoke(main, ["list", "em_iris"])
    assert done.exit_code == 2
    assert done.stderr.endswith("Found 'em_iris', a config of the experiment em: `stopgrad list em`.\n")
    done = CliRunner().invoke(main, ["list", "sofmax"])
    assert done.exit_code == 2
    assert done.stderr.endswith("Found 'sofmax'; did you mean `stopgrad list softmax`?\n")
    assert CliRunner().invoke(main, ["list", "nothing"]).stderr.endswith("Found 'nothing'.\n")
    assert CliRunner().invoke(main, ["list", "em"]).stdout.startswith("Keys of a config with experiment = 'em'\n")


def test_keys_are_listed_with_whole_values_in_lines_of_a_terminal():
    lines = [line for name in sorted(experiment_folders(CONFIGS / "any.toml")) for line in _keys(name)]
    # A path is as long as it is.
    assert [line for line in lines if len(line) > 80 and not line.startswith("The module: ")] == []
    assert "'toolkit.rbm.BernoulliRBM'" in "\n".join(_keys("rbm"))  # without its module it is refused


def _keys(name):
    return keys_of(name, CONFIGS).splitlines()


def test_an_unknown_block_is_named_with_the_nearest_one(config):
    _edited(config, f'"{config.stem}.shift"]', f'"{config.stem}.shfit"]')
    assert f"did you mean '{config.stem}.shift'?" in _message(config)


def test_an_unknown_experiment_is_named_with_the_nearest_one(config):
    _edited(config, f'experiment = "{config.stem}"', 'experiment = "softmaxx"')
    assert f"{config}:1: experiment: unknown experiment 'softmaxx'; did you mean 'softmax'?" in _message(config)


@pytest.mark.parametrize(
    ("line", "other", "says"),
    [
        (
            "class Config(ExperimentConfig)",
            "class Konfig(ExperimentConfig)",
            ": `Config` should be a class derived from",
        ),
        ("class Config(ExperimentConfig)", "class Config(BaseModel)", ": `Config` should be a class derived from"),
        ("def run(", "def walk(", ": `run` should be a function of a config and a seed. Found None."),
        ("import signal", "import signals", ":7: ModuleNotFoundError: No module named 'signals'"),
    ],
    ids=["no-config", "another-class", "no-run", "no-import"],
)
def test_an_experiment_that_is_not_whole_is_one_line_with_its_file(tmp_path, line, other, says):
    name = f"toy_broken_{next(NUMBERS)}"
    path, module = toy.install(name, tmp_path), tmp_path / "experiments" / f"{name}.py"
    module.write_text(module.read_text().replace(line, other))
    assert _message(path).startswith(f"{module}{says}")
    listed = CliRunner().invoke(main, ["list", name, "--configs", str(tmp_path)])
    assert (listed.exit_code, len(listed.stderr.splitlines())) == (2, 1)
    assert says in listed.stderr


def test_list_shows_the_experiments_and_blocks_of_ones_own_project(tmp_path):
    name, broken = f"toy_own_{next(NUMBERS)}", f"toy_broken_{next(NUMBERS)}"
    configs = toy.install(name, tmp_path).parent
    module = tmp_path / "experiments" / f"{name}.py"
    module.with_name(f"{broken}.py").write_text("from signals import Config, run\n")
    module.with_name("script.py").write_text("raise SystemExit('a script that is no experiment has run')\n")
    listed = CliRunner().invoke(main, ["list", "--configs", str(configs)])
    assert listed.exit_code == 0, listed.output
    experiments, _, rest = listed.stdout.partition("\nBlocks\n")
    assert f"  {name}\n      " in experiments
    assert f"  {broken}\n      cannot be run: " in experiments
    assert "  softmax\n" in experiments
    assert "script" not in experiments.split()
    assert f"  {name}.shift\n      A shift that cancels.\n" in rest


def test_a_missing_experiment_lists_all(config):
    _edited(config, f'experiment = "{config.stem}"', "")
    assert ", ".join(experiment_folders(config)) in _message(config)


def test_several_mistakes_are_one_line_each(config):
    _edited(config, "steps = 6", "steps = 0\nsteppes = 3")
    assert len(_message(config).splitlines()) == 2


def test_a_misspelt_required_key_is_one_line(config):
    _edited(config, "steps = 6", "stepz = 6")
    assert re.fullmatch(r".*:\d+: stepz: unknown key; did you mean 'steps'\?", _message(config))


def test_a_missing_key_is_reported_beside_a_key_that_is_not_like_it(config):
    _edited(config, "steps = 6", "colour = 6")
    assert [line.rsplit(": ", 2)[1] for line in _message(config).splitlines()] == ["steps", "colour"]


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("em_iriss", "; did you mean `stopgrad run em_iris` or `stopgrad run em_digits`?"),
        ("softmax", "; did you mean `stopgrad run softmax_digits` or `stopgrad run softmax_half_blocked`?"),
        ("em_iris.tml", "; did you mean `stopgrad run em_iris`?"),
        ("nowhere/em_iris.toml", "; did you mean `stopgrad run em_iris`?"),
        ("trades", "; did you mean `stopgrad run adversarial_trades`?"),
        ("walc", "; did you mean `stopgrad run walk`?"),
        ("confgs", "; did you mean `stopgrad run configs`?"),
        ("onw", "; did you mean `stopgrad run own`?"),
        ("own/tin.toml", "; did you mean `stopgrad run own/tiny.toml`?"),
        ("pyproject", "; `stopgrad list` shows the bundled configs"),
    ],
)
def test_a_missing_file_is_named_with_the_nearest_configs(tmp_path, monkeypatch, word, says):
    for file in ("pyproject.toml", "configs/walk.toml", "own/tiny.toml"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        chosen_configs([Path(word)], [], [])
    assert str(caught.value) == f"{word}: no such file or config{says}"


@pytest.mark.parametrize("word", ["em_iris", "em_iris.toml", "configs/em_iris.toml"])
def test_a_bundled_config_is_found_by_its_name_from_any_folder(tmp_path, monkeypatch, word):
    monkeypatch.chdir(tmp_path)
    assert [config.path for config in chosen_configs([Path(word)], [], [])] == [CONFIGS / "em_iris.toml"]


def test_a_config_here_comes_before_a_bundled_one_of_its_name(config, tmp_path, monkeypatch):
    (tmp_path / "configs").mkdir()
    own = config.rename(tmp_path / "configs" / "em_iris.toml")
    monkeypatch.chdir(tmp_path)
    assert [one.path.resolve() for one in chosen_configs([Path("em_iris")], [], [])] == [own]


def test_a_key_that_is_given_as_an_option_is_told_how_to_be_set():
    done = CliRunner().invoke(main, ["run", "--learning-rate", "0.1"])
    assert done.exit_code == 2
    assert "'--learning-rate': keys of a config are set by --set learning_rate=VALUE." in done.stderr
    assert "--set" not in CliRunner().invoke(main, ["run", "--colour"]).stderr


def test_the_list_of_commands_has_no_sentence_cut_off():
    assert "..." not in CliRunner().invoke(main, ["--help"]).stdout.partition("Commands:")[2]


def test_a_config_that_is_named_twice_is_chosen_once(config):
    assert len(chosen_configs([config, config.parent], [], [])) == 1


def test_a_folder_in_place_of_a_file_cannot_be_read(tmp_path):
    assert _message(tmp_path) == f"{tmp_path}: cannot be read: Is a directory"


def test_a_file_that_is_no_text_cannot_be_read(config):
    config.write_bytes(b"\xff\xfe\x00")
    assert _message(config) == f"{config}: cannot be read: not UTF-8 text"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('[expect."{t}"]\nverdict = "cut"', ":10: expect.{t}.verdict: should be 'no-op', .*, found 'cut'; .* 'cuts'"),
        ('[expect."{t}"]\ngain = [2, 1]', r":10: expect.{t}.gain: should be \[low, high\], found \[2, 1\]"),
        ('[expect."{t}"]\nseeds = 9\nnoise = 1.0', r":10: seeds, noise: should stand above the first \[table\]"),
        ("[references]\na = 1.0\nthreads = 2", r":11: references.threads: should stand above the first \[table\]"),
        ("[expect.{t}]\nratio = [1, 2]", 'expect.{t}: unknown key; a name with a dot needs quotes: .expect."{t}".'),
    ],
    ids=["choice", "interval", "misplaced", "swallowed", "unquoted"],
)
def test_a_mistake_in_a_claim_is_one_line_with_its_line_and_variant(config, text, says):
    text, says = (part.replace("{t}", f"{config.stem}.target") for part in (text, says))
    config.write_text(config.read_text() + text)
    message = _message(config)
    assert "\n" not in message
    assert re.search(says, message), message


def test_an_experiment_that_is_no_name_and_a_block_that_nothing_declares_are_told(config):
    _edited(config, f'experiment = "{config.stem}"', f'experiment = ["{config.stem}"]')
    assert f"{config}:1: experiment: unknown experiment ['{config.stem}']" in _message(config)
    _edited(config, f'experiment = ["{config.stem}"]', f'experiment = "{config.stem}"')
    _edited(config, f'"{config.stem}.shift", [', '"nowhere.near.any.name", [')
    assert "; a module declares it outside of `run`: block('nowhere.near.any.name', why)" in _message(config)


def test_keys_below_a_claim_are_misplaced_and_not_missing(config):
    first, *others = config.read_text().splitlines()
    config.write_text("\n".join([f'[expect."{config.stem}.target"]', *others, first]))
    assert re.search(r":9: .*experiment: should stand above the first \[table\]", _message(config))
    config.write_text("\n".join([first, f'[expect."{config.stem}.target"]', *others]))
    keys = "title, finding, open, seeds, steps, evaluate_every, learning_rate"
    assert f":3: {keys}: should stand above" in _message(config)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("steps", "--set steps: should be key=value"),
        ("steps=no", "--set steps=no: should be a valid integer, found 'no'"),
        ("step=3", "--set step=3: unknown key; did you mean 'steps'?"),
    ],
    ids=["no-value", "word", "unknown"],
)
def test_a_bad_override_names_the_option(config, override, says):
    assert says in _message(config, override)


@pytest.mark.parametrize(
    ("overrides", "sweeps", "says"),
    [
        (["steps=1", "steps=2"], [], "--set steps=2: `steps` should be set once. Found --set steps=1 before it."),
        ([], ["steps=1", "steps=2"], "--sweep steps=2: `steps` should be set once. Found --sweep steps=1 before it."),
        (["steps=1"], ["steps=2,3"], "--sweep steps=2: `steps` should be set once. Found --set steps=1 before it."),
        ([], ["steps=no"], "--sweep steps=no: should be a valid integer, found 'no'"),
        ([], ["step=3"], "--sweep step=3: unknown key; did you mean 'steps'?"),
        ([], ["=3"], "--sweep =3: should be key=value"),
    ],
    ids=["set", "swept", "both", "word", "unknown", "no-key"],
)
def test_a_bad_sweep_names_the_option(config, overrides, sweeps, says):
    with pytest.raises(ConfigError) as caught:
        chosen_configs([config], overrides, sweeps)
    assert str(caught.value) == says


def test_the_same_blocks_twice_are_refused(config):
    _edited(config, f'"{config.stem}.shift", [', f'"{config.stem}.target", [')
    assert "the same blocks are opened twice" in _message(config)


def test_the_command_line_ends_with_code_2_and_writes_nothing(config, tmp_path):
    bad = _edited(config, "steps = 6", "steps = -6")
    results = tmp_path / "results"
    done = CliRunner().invoke(main, ["run", str(bad), "--results", str(results)])
    assert done.exit_code == 2
    assert done.stderr.startswith(f"error: {bad}:6: steps:")
    assert len(done.stderr.splitlines()) == 1
    assert not results.exists()


def test_one_bad_config_among_good_ones_starts_no_run(config, tmp_path):
    bad = config.with_name("bad.toml")
    bad.write_text(config.read_text().replace("steps = 6", "steps = -6"))
    worse = config.with_name("worse.toml")
    worse.write_text(config.read_text().replace("steps = 6", "steps = 6.5"))
    results = tmp_path / "results"
    done = CliRunner().invoke(main, ["run", str(bad), str(config), str(worse), "--results", str(results)])
    assert done.exit_code == 2
    assert not results.exists()
    first, second = done.stderr.splitlines()
    assert first.startswith(f"error: {bad}:6: steps: should be greater than or equal to 1")
    assert second.startswith(f"error: {worse}:6: steps: should be a valid integer")


def test_a_mistake_on_the_command_line_is_told_once(config):
    other = config.with_name("other.toml")
    other.write_text(config.read_text())
    with pytest.raises(ConfigError) as caught:
        chosen_configs([config, other], ["steps=no"], [])
    assert str(caught.value) == "--set steps=no: should be a valid integer, found 'no'"


def test_a_folder_of_configs_that_is_not_there_is_named(tmp_path):
    done = CliRunner().invoke(main, ["list", "--configs", str(tmp_path / "none")])
    assert done.exit_code == 2
    assert done.stderr == f"error: `--configs` should be a folder. Found none at {tmp_path}/none: check the path\n"
