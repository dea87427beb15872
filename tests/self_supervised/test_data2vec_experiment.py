"""The experiment on data2vec: its teacher, its hand-written gradient, and its other methods."""

import folders
import torch
from runs import assert_methods_begin_with, assert_target_is_blocked_gradient

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
    assert_target_is_blocked_gradient(experiment.run(config("beta=0.3"), 0))


def test_other_methods_begin_where_the_run_begins():
    assert_methods_begin_with(experiment.run(config(), 1))
