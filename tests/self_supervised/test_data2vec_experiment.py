"""The experiment on data2vec: its teacher, its hand-written gradient, and its other methods."""

import folders
import pytest
import torch

from experiments import data2vec as experiment
from toolkit.runner._config import load_config

SMALL = ["steps=3", "evaluate_every=2", "batch_size=16", "width=8", "dtype='float64'"]


def config(*overrides):
    return load_config(folders.CONFIGS / "self_supervised_data2vec.toml", [*SMALL, *overrides]).config


def test_the_teacher_sees_all_pixels_with_the_average_of_the_students_so_far():
    made = experiment._Learner(config("momentum=0.75", "n_layers=2"), 0)
    of_encoder = {name: value for name, value in made.parameters.items() if not name.startswith("predictor")}
    expected = {name: value.detach().clone() for name, value in of_encoder.items()}
    for step in range(1, 3):
        expected = {name: 0.75 * expected[name] + 0.25 * of_encoder[name].detach() for name in expected}
        _, layers = made.outputs()
        found = torch.func.functional_call(made.encoder, expected, (made.views.first,))
        torch.testing.assert_close(layers, found[-2:])
        made.advance(step)
        with torch.no_grad():
            for parameter in made.parameters.values():
                parameter += 0.1
    assert ((made.views.second == 0) | (made.views.second == made.views.first)).all()


def test_the_witness_is_the_blocked_gradient():
    run = experiment.run(config("beta=0.3"), 0)
    names = list(run.parameters)
    found = torch.autograd.grad(run.loss(), [run.parameters[name] for name in names])
    target = run.target()
    for name, slope in zip(names, found, strict=True):
        torch.testing.assert_close(slope, target[name], rtol=1e-9, atol=1e-13)


def test_other_methods_begin_where_the_run_begins():
    run = experiment.run(config(), 1)
    start = run.evaluate()
    for train in run.methods.train.values():
        assert {name: values[0] for name, values in train().items()} == pytest.approx(start)
