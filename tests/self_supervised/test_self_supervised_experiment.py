"""The experiment on self-supervised learning: its measures, its teacher, and the other methods."""

import folders
import pytest
import torch
from runs import assert_target_is_blocked_gradient

from experiments import self_supervised as experiment
from experiments._embeddings import effective_rank, neighbour_accuracy
from experiments.self_supervised import Config
from toolkit import unblock
from toolkit.runner._config import load_config
from toolkit.self_supervised import BYOL_TARGET, DINO_TARGET, EMA_STUDENT

SMALL = ["steps=3", "evaluate_every=2", "batch_size=16", "width=8"]


def config_of(task, *overrides) -> Config:
    return load_config(folders.CONFIGS / f"self_supervised_{task}.toml", [*SMALL, *overrides]).config


def test_the_effective_rank_counts_directions_of_equal_variance():
    corners = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0])] * 3)
    assert effective_rank(corners) == pytest.approx(3, rel=1e-5)
    assert effective_rank(corners * torch.tensor([1, 1e-4, 0])) == pytest.approx(1, abs=1e-5)
    shares = torch.tensor([4.0, 1, 0]) / 5
    expected = torch.exp(-(shares[:2] * shares[:2].log()).sum()).item()
    assert effective_rank(corners * torch.tensor([2.0, 1, 0]) + 7) == pytest.approx(expected, rel=1e-5)


def test_neighbours_vote_by_angle():
    known = torch.tensor([[1.0, 0], [5, 0.1], [0, 1], [0.1, 1], [0, 9]])
    labels = torch.tensor([0, 0, 1, 1, 1])
    asked = torch.tensor([[9.0, 1], [0.1, 0.2]])
    assert neighbour_accuracy(known, labels, asked, torch.tensor([0, 1]), k=2) == 1
    assert neighbour_accuracy(known, labels, asked, torch.tensor([1, 1]), k=2) == 0.5


def test_the_teacher_is_the_average_of_the_students_so_far():
    made = experiment._Distillation(config_of("dino", "momentum=0.75"), 0)
    expected = {name: value.detach().clone() for name, value in made.parameters.items()}
    for step in range(1, 4):
        expected = {name: 0.75 * expected[name] + 0.25 * made.parameters[name].detach() for name in expected}
        _, teacher = made.outputs()
        views = torch.stack([made.views.first, made.views.second])
        found = torch.func.functional_call(made.student, expected, (views,))
        torch.testing.assert_close(teacher.detach(), found.detach())
        made.advance(step)
        with torch.no_grad():
            for parameter in made.parameters.values():
                parameter += 0.1


def test_without_an_average_the_teacher_is_the_student():
    made = experiment._Distillation(config_of("dino"), 0, average=False)
    student, teacher = made.outputs()
    torch.testing.assert_close(student, teacher)


def test_only_both_stops_together_hold_the_teacher():
    made = experiment._Distillation(config_of("dino"), 0)
    names = list(made.parameters)

    def gradient(*blocks):
        with unblock(*blocks):
            return torch.autograd.grad(made.loss(), [made.parameters[name] for name in names])

    closed, opened = gradient(), gradient(DINO_TARGET, EMA_STUDENT)
    assert all(torch.equal(a, b) for a, b in zip(closed, gradient(EMA_STUDENT), strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(closed, opened, strict=True))


def test_the_teacher_of_byol_averages_the_encoder_alone():
    """Its predictor has no average, and learns with and without the stop."""
    made = experiment._Distillation(config_of("byol"), 0)
    with unblock(BYOL_TARGET, EMA_STUDENT):
        opened = torch.autograd.grad(made.loss(), list(made.parameters.values()))
    blocked = torch.autograd.grad(made.loss(), list(made.parameters.values()))
    same = {name: torch.equal(a, b) for name, a, b in zip(made.parameters, opened, blocked, strict=True)}
    assert {name.startswith("predictor") for name, equal in same.items() if equal} == {True}
    assert {name.startswith("predictor") for name, equal in same.items() if not equal} == {False}


@pytest.mark.parametrize("task", ["byol", "moco", "swav"])
def test_the_witness_is_the_blocked_gradient(task):
    assert_target_is_blocked_gradient(experiment.run(config_of(task, "dtype='float64'"), 0), rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("task", ["byol", "dino", "fixmatch", "moco", "swav"])
def test_other_methods_begin_where_the_run_begins(task):
    config = config_of(task)
    run = experiment.run(config, 1)
    start = run.evaluate()
    for train in run.methods.train.values():
        found = train()
        assert {name: values[0] for name, values in found.items()} == pytest.approx(start)
        assert {len(values) for values in found.values()} == {len(run.methods.steps)}


def test_an_untrained_model_is_sure_of_nothing():
    run = experiment.run(config_of("fixmatch", "threshold=0.999"), 0)
    before = run.evaluate()
    assert before["share of confident answers"] == 0
    assert 0 <= before["objective"] <= 0.4


def test_the_spectrum_begins_with_the_largest_value():
    run = experiment.run(config_of("simsiam"), 0)
    (values,) = run.sweep.evaluate().values()
    assert values[0] == 1
    assert values == sorted(values, reverse=True)
    assert len(values) == len(run.sweep.values) == 32
