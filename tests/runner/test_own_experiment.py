"""A mistake in an experiment of a user's own is told in one sentence, or the records would mislead."""

import itertools
import re

import folders
import pytest

from toolkit.runner._comparison import record_of
from toolkit.runner._config import load_config
from toolkit.runner._findings import doubts
from toolkit.runner._records import Record
from toolkit.runner._units import measured, trained, units_of

PROJECT = folders.ROOT / "docs" / "project"
NUMBERS = itertools.count()

END = "        target=target,\n    )"
METRICS = '{"objective": (values - truth).square().mean().sqrt().item()}'
LOSS = "return 0.5 * (target"


def _with(part, arguments):
    """Return the end of `run` with a further part."""
    made = f"__import__('toolkit.runner').runner.{part}(label='x', {arguments})"
    return END.replace("\n", f" {part.lower()}={made},\n")


def _install(folder, *edits):
    """Write the project of `stopgrad init`, with edits, under a name that no other test uses."""
    name = f"own_{next(NUMBERS)}"
    for room, ending in (("experiments", "py"), ("configs", "toml")):
        text = (PROJECT / room / f"random_walk.{ending}").read_text()
        for old, new in edits:
            assert old in text or ending == "toml"
            text = text.replace(old, new) if ending == "py" else text
        (folder / room).mkdir()
        (folder / room / f"{name}.{ending}").write_text(text.replace("random_walk", name))
    return load_config(folder / "configs" / f"{name}.toml", ["steps=4", "seeds=2", "evaluate_every=2", "samples=50"])


def _error(config):
    """Return the error of the first seed."""
    answer = trained(units_of(config)[0], lambda message: None)
    return answer.error or measured(units_of(config)[0], lambda message: None).error


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("SGD([values]", "SGD([values.detach().clone()]", "`optimizer` .* Found no 'values' and 1 other tensor"),
        ("SGD([values]", "SGD([values, truth]", "`optimizer` should hold the tensors .* Found 1 other tensor"),
        ("optim.SGD([values], lr=config.learning_rate)", "optim.SGD", "`optimizer` should be a torch.optim.Optimizer"),
        ('parameters={"values": values}', "parameters=[values]", "`parameters` should map names .* Found list"),
        ('parameters={"values": values}', "parameters={}", "`parameters` should map names .* Found none"),
        ('{"values": values},', '{"values": truth},', "`parameters` .* requires_grad. Found a tensor without it"),
        ('{"values": values},', '{"values": values * 1},', "`parameters` .* Found the result of an operation"),
        ('{"values": values},', '{"values": 1.0},', "`parameters` .* Found float as 'values'"),
        ("loss=loss,", "loss=loss(),", "`loss` should be a function. Found Tensor"),
        ("objective=Objective(", "objective=dict(", "`objective` should be of the class Objective. Found dict"),
        (METRICS, "1.0", "`evaluate` should return a dict of metrics. Found float"),
        (METRICS, '{"objective": values}', r"one number a metric. Found a tensor of shape \(5,\) as 'objective'"),
        (METRICS, '{"objective": "good"}', "one number a metric. Found 'good' as 'objective'"),
        (METRICS, '{"objective": float("nan")}', "The objective should be finite before training. Found nan"),
        (METRICS, METRICS + ' | dict.fromkeys("x" * (values.grad is None), 1)', "same metrics .* after step 2"),
        (
            METRICS,
            METRICS + ' | {"z": values.mul_(0.9)[0]}',
            "`evaluate` should not change a parameter. Found .*'values'",
        ),
        (METRICS, METRICS + ' | {"z": torch.rand(())}', "`evaluate` should return the same .* another 'z'"),
        (
            LOSS,
            "values.data.mul_(0.9)\n        " + LOSS,
            "`loss` should not change a parameter. Found another 'values'",
        ),
        (
            METRICS,
            '{"objective": (values + torch.rand(5, generator=generator)).norm().item()}',
            "`evaluate` should return the same when it is called again. Found another 'objective'",
        ),
        ("optim.SGD([values], lr=config.learning_rate)", "optim.LBFGS([values])", "without a closure. Found LBFGS"),
        (
            "higher_is_better=False",
            "higher_is_better=False) and Objective(label=3, higher_is_better=False",
            "`label` should be of the type str. Found 3",
        ),
        ("is_better=False", "is_better='no'", "`higher_is_better` should be of the type bool. Found 'no'"),
        (END, END.replace("\n", " plane='x',\n"), "`plane` should be the names of two metrics. Found 'x'"),
        (END, END.replace("\n", " events=1,\n"), "`events` should be a list of Event. Found 1"),
        (END, _with("Sweep", "values=(1.0, 2.0), evaluate=lambda: {'a': [1]}"), "have 2 values of 'a'. Found 1"),
        (END, _with("Sweep", "values=(1.0, 2.0), evaluate=lambda: {'a': 1}"), "a list of numbers as 'a'. Found 1"),
        (END, _with("Sweep", "values=(1.0, 2.0), evaluate=lambda: [1]"), "dict of lists of numbers. Found list"),
        (END, _with("Methods", "steps=(1,), train={'m': lambda: {'a': [1]}}"), "should have values of 'objective'"),
        (LOSS, "return torch.rand(()) + 0.5 * (target", "Two runs .* another loss after 0 updates"),
        (
            END,
            END.replace("\n", " after_step=lambda _: reward.uniform_(),\n"),
            "Two runs .* another loss after 1 updates",
        ),
        (END, END.replace("\n", ' plane=("x", "y"),\n'), "`plane` .* metrics of `evaluate`: objective. Found 'x'"),
        ("generator=generator, dtype", "dtype", "Two runs .* take each draw from a torch.Generator"),
    ],
)
def test_a_mistake_ends_the_run_with_a_sentence(tmp_path, old, new, says):
    error = _error(_install(tmp_path, (old, new)))
    assert re.search(says, error), error
    assert "\n" not in error


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("-error / config", "error / config", "The blocked gradient should be `target`. .* as of its negative."),
        ("manual_seed(seed)", "manual_seed(0)", "The seeds should differ. Found 2 identical trainings"),
        (METRICS, METRICS + ' | {"z": float("nan")}', "The metric 'z' should be a number .* Found none"),
    ],
)
def test_a_mistake_that_only_the_records_show_is_told_with_them(tmp_path, old, new, says):
    config = _install(tmp_path, (old, new))
    (doubt,) = doubts([Record(seed, record_of(config, seed)[0], {}) for seed in range(2)])
    assert re.search(says, doubt), doubt


def test_the_project_itself_has_no_mistake(tmp_path):
    config = _install(tmp_path)
    assert not _error(config)
    assert doubts([Record(seed, record_of(config, seed)[0], {}) for seed in range(2)]) == []
