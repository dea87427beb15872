"""The findings of the configs are claims in numbers, and their records bear them out."""

import math
import re

import folders
import pytest
from each import each

from toolkit.runner._comparison import _Gradients, run_config
from toolkit.runner._config import ConfigError, load_config
from toolkit.runner._findings import broken_claims, doubts, verdicts
from toolkit.runner._records import BLOCKED, Record, read_all

CONFIGS = sorted(folders.CONFIGS.glob("*.toml"))

# Of these the first gradient does not depend on the length of a search.
WITHOUT_SEARCH = {"adversarial_steps": ["worst_starts=1", "worst_steps=1"]}

# Whole runs of these take seconds.
SHORT = ["em_wine", "rbm_persistent", "softmax_half_blocked"]


def _record(seed, claim, *, kind="partial", angle=30.0, ratio=2.0, ends=(1.0, 0.5)):
    """Return the record of a run whose objective should be high."""
    effect = {"verdict": {"kind": kind}, "cosine": math.cos(math.radians(angle)), "ratio": ratio}
    empty = dict.fromkeys(("verdict", "training", "gain", "angle", "ratio"))
    variants = {
        name: {"diverged_at": None, "metrics": {"objective": [0.1 * seed, end]}}
        for name, end in zip((BLOCKED, "open"), ends, strict=True)
    }
    data = {
        "config": {"dtype": "float64", "expect": {"open": {**empty, **claim}}},
        "comparison": {
            "first": {"effects": {"open": effect}, "target_error": {BLOCKED: None}},
            "last": {"effects": {"open": {**effect, "verdict": {"kind": kind, "label": kind}}}},
        },
        "objective": {"label": "score", "higher_is_better": True},
        "variants": variants,
    }
    return Record(seed, data, {})


@pytest.mark.parametrize(
    ("claim", "broken"),
    [
        ({"verdict": "partial", "training": "better", "gain": [0.4, 0.6], "angle": [29, 31], "ratio": [2, 2]}, None),
        ({"verdict": "redundant"}, "open: the verdict should be redundant. Found partial."),
        ({"training": "worse"}, "open: training with the block should end worse. Found better."),
        ({"gain": [0.6, 1.0]}, "open: gain should be in 0.6 to 1. Found 0.5."),
        ({"angle": [0, 29]}, "open: angle should be in 0 to 29. Found 30."),
        ({"ratio": [0, 1]}, "open: ratio should be in 0 to 1. Found 2."),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_a_claim_that_the_records_contradict_is_named(claim, broken):
    records = [_record(seed, claim, ends=(1.0, 0.5 + 0.001 * seed)) for seed in range(1)]
    records += [_record(seed, claim, ends=(1.0, 0.5)) for seed in range(1, 6)]
    assert broken_claims(records) == ([] if broken is None else [broken])


def test_few_seeds_that_leave_training_undecided_contradict_no_claim():
    for ends, broken in (
        ((0.5, 0.9), []),
        ((0.5, 0.501), ["open: training with the block should end better. Found worse."]),
    ):
        records = [_record(seed, {"training": "better"}, ends=(0.0, end)) for seed, end in enumerate(ends)]
        assert broken_claims(records) == broken
    assert (
        len(broken_claims([_record(seed, {"training": "better"}, ends=(0.0, (-1) ** seed)) for seed in range(5)])) == 1
    )


@pytest.mark.parametrize(
    ("ends", "says"),
    [
        ((1.0, 0.5), "with the block, training ends better by 0.5 in the score (6 of 6 seeds)"),
        ((0.5, 1.0), "with the block, training ends worse by 0.5 in the score (6 of 6 seeds)"),
        ((1.0, 1.0), "with the block, training ends at the same value"),
        ((1.0, math.nan), "with the block, training ends well; without the block, every run broke off"),
        ((math.nan, 1.0), "with the block, every run broke off"),
        ((math.nan, math.nan), "with the block, every run broke off"),
    ],
)
def test_a_verdict_is_a_sentence(ends, says):
    records = [_record(seed, {}, ends=ends) for seed in range(6)]
    for record in records:
        record.data["comparison"]["first"]["effects"]["open"]["verdict"]["label"] = "partial"
    assert verdicts(records) == [f"open is partial at the first and the last step; {says}"]


def test_a_verdict_that_is_a_verb_needs_no_other():
    records = [_record(seed, {}, ends=(1.0, 1.0)) for seed in range(2)]
    for record, label in zip(records, ("makes the gradient", "redundant"), strict=True):
        record.data["comparison"]["first"]["effects"]["open"]["verdict"]["label"] = label
    (line,) = verdicts(records)
    assert line.startswith("open makes the gradient or is redundant at the first step and is partial at the last; ")


def test_a_blocked_run_that_broke_off_has_no_verdict_at_the_last_step():
    records = [_record(seed, {}, ends=(None, 1.0)) for seed in range(5)]
    for record in records:
        record.data["comparison"]["first"]["effects"]["open"]["verdict"]["label"] = "partial"
        record.data["variants"][BLOCKED]["diverged_at"] = 3
    assert verdicts(records) == ["open is partial at the first step; with the block, every run broke off"]


def test_blocks_that_are_opened_together_are_plural():
    records = [_record(seed, {}) for seed in range(5)]
    for record in records:
        effects = record.data["comparison"]
        for when in ("first", "last"):
            effects[when]["effects"]["a + b"] = {"verdict": {"kind": "partial", "label": "partial"}}
        record.data["variants"]["a + b"] = record.data["variants"].pop("open")
    assert verdicts(records)[0].startswith(
        "a + b is partial at the first and the last step; with the blocks, training ends b"
    )


def test_records_of_a_sound_experiment_are_not_doubtful():
    assert doubts([_record(seed, {}) for seed in range(5)]) == []


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (
            lambda data: data["comparison"]["first"]["target_error"].update({BLOCKED: 2.0}),
            "The blocked gradient should be `target`. Found a distance of 2 times its length, as of its negative.",
        ),
        (
            lambda data: data["comparison"]["first"]["target_error"].update({BLOCKED: 1e-5}),
            "The blocked gradient should be `target`. Found a distance of 1e-05 times its length.",
        ),
        (
            lambda data: [variant["metrics"].update(more=[1.0, None]) for variant in data["variants"].values()],
            "The metric 'more' should be a number after training. Found none in any run.",
        ),
        (
            lambda data: data["variants"][BLOCKED].update(metrics={"objective": [0.0, 1.0]}),
            "The seeds should differ. Found 5 identical trainings, which count as independent ones.",
        ),
        (
            lambda data: data["objective"].update(higher_is_better=False),
            "Training should improve the objective. Found it worse than at the start in all 5 seeds, by "
            "`higher_is_better` False.",
        ),
    ],
    ids=["sign", "target", "nan", "seeds", "direction"],
)
def test_records_that_give_reason_to_doubt_say_so(spoil, says):
    records = [_record(seed, {}) for seed in range(5)]
    for record in records:
        spoil(record.data)
    assert doubts(records) == [says]


@pytest.mark.parametrize("claim", [{"training": "worse"}, {"gain": [-3.0, -1.0]}])
def test_an_objective_that_gets_worse_under_a_claim_on_it_is_not_doubtful(claim):
    assert doubts([_record(seed, claim, ends=(-1.0, 1.0)) for seed in range(5)]) == []


@each("path", CONFIGS, ids=lambda path: path.stem)
def test_a_config_makes_claims_and_those_on_training_have_seeds_enough(path):
    """That both variants end the same, to the bit, is no matter of chance. The first gradients have a test below."""
    config = load_config(path).config
    assert config.expect
    for claim in config.expect.values():
        assert claim.verdict is not None
        if claim.gain or claim.training not in (None, "same"):
            assert config.seeds >= 5


def test_a_config_of_few_seeds_says_why():
    for path in CONFIGS:
        (seeds,) = re.findall(r"^seeds = (\d+)(  # .{20})?", path.read_text(), re.MULTILINE)
        assert int(seeds[0]) >= 5 or seeds[1], path.name


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_first_gradients_are_as_claimed(path):
    """They need no training, so that a config that trains few seeds is checked at five starts too."""
    loaded = load_config(path, WITHOUT_SEARCH.get(path.stem, []))
    expect = {
        name: {**claim.model_dump(), "training": None, "gain": None} for name, claim in loaded.config.expect.items()
    }
    records = []
    for seed in range(3 if loaded.config.seeds >= 5 else 5):
        run = loaded.module.run(loaded.config, seed)
        variants = {name: {"diverged_at": 0} for name in (BLOCKED, *expect)}
        data = {
            "config": {"dtype": loaded.config.dtype, "expect": expect},
            "comparison": {"first": _Gradients(run, loaded.config.variants).to_dict()},
            "objective": {"label": "score", "higher_is_better": True},
            "variants": variants,
        }
        records.append(Record(seed, data, {}))
    assert broken_claims(records) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", SHORT)
def test_whole_runs_are_as_claimed(name, tmp_path):
    run_config(load_config(folders.CONFIGS / f"{name}.toml"), tmp_path)
    (found,) = read_all(tmp_path)
    assert broken_claims(found.records) == []


def test_a_claim_about_a_variant_that_is_not_trained_is_refused(tmp_path):
    text = (folders.CONFIGS / "em_wine.toml").read_text().replace('[expect."em.', '[expect."rm.')
    (tmp_path / "wine.toml").write_text(text)
    with pytest.raises(ConfigError, match=r"unknown variant 'rm\.responsibilities'; did you mean 'em\.resp"):
        load_config(tmp_path / "wine.toml")
