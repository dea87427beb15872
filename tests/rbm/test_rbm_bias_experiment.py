"""The experiment on the bias of contrastive divergence: its updates, its other methods, and what its config finds."""

import math
import statistics

import pytest
import torch
from contract import relative_error
from folders import CONFIGS

from experiments.rbm_bias import Config, run
from toolkit import unblock
from toolkit.datasets import bars_and_stripes
from toolkit.rbm import RBM
from toolkit.rbm.bias import CHAIN_DISTRIBUTION, CHAIN_ENERGY, data_distribution, gradient_fields
from toolkit.runner._config import ConfigError, load_config
from toolkit.runner._training import train, train_methods

CONFIG = CONFIGS / "rbm_bias.toml"
TERM, OPPOSITE = "bias with the third term, over that of CD-k", "bias with its opposite sign, over that of CD-k"
TWICE = "bias with the third term, over that of CD-2k"


def config(**values) -> Config:
    return load_config(CONFIG).config.model_copy(update=values)


def short(**values) -> Config:
    return config(
        **{
            "n_hidden": 5,
            "steps": 400,
            "learning_rate": 0.5,
            "evaluate_every": 200,
            "swept_steps": [1, 4, 16],
            **values,
        }
    )


def gradient(one) -> dict[str, torch.Tensor]:
    found = torch.autograd.grad(one.loss(), list(one.parameters.values()))
    return dict(zip(one.parameters, found, strict=True))


@pytest.mark.parametrize("divergence", ["kullback_leibler", "free_energy"])
def test_target_is_the_gradient_of_every_update(divergence):
    one = run(short(divergence=divergence, gibbs_steps=2), seed=1)
    for _ in range(3):
        assert relative_error(gradient(one), one.target()) < 1e-12
        one.evaluate()
        one.optimizer.zero_grad()
        one.loss().backward()
        one.optimizer.step()


@pytest.mark.parametrize(
    ("divergence", "opened", "field"),
    [
        ("kullback_leibler", [CHAIN_DISTRIBUTION], "third_term"),
        ("free_energy", [CHAIN_DISTRIBUTION], "unblocked"),
        ("improved", [], "improved"),
    ],
)
def test_what_is_descended(divergence, opened, field):
    one = run(short(divergence=divergence, gibbs_steps=2, learning_rate=1.0), seed=1)
    train(one, short(steps=150))
    with unblock(*opened):
        found = gradient(one)
    rbm = RBM(*one.parameters["weights"].shape, dtype=torch.float64)
    rbm.load_state_dict(dict(one.parameters))
    start = data_distribution(rbm, bars_and_stripes(3).inputs)
    assert relative_error(found, gradient_fields(rbm, start, steps=2)[field]) < 1e-10


@pytest.fixture(scope="module")
def trained() -> dict[str, list[float]]:
    """The objective along every way of training from one start."""
    values = short(n_hidden=8, steps=600, evaluate_every=300, swept_steps=[1])
    found = {name: each["metrics"]["objective"] for name, each in train_methods(run(values, 0).methods).items()}
    found["blocked"] = train(run(values, 0), values).metrics["objective"]
    with unblock(CHAIN_DISTRIBUTION):
        found["open"] = train(run(values, 0), values).metrics["objective"]
    return found


@pytest.mark.slow
def test_all_ways_start_at_the_same_point(trained):
    assert len({round(curve[0], 12) for curve in trained.values()}) == 1
    assert all(len(curve) == 3 for curve in trained.values())


@pytest.mark.slow
def test_order_of_the_ends(trained):
    order = ["the third term with its opposite sign", "blocked", "open", "CD-2", "the exact gradient"]
    ends = [trained[name][-1] for name in order]
    assert ends == sorted(ends)
    assert ends[-1] < -math.log(14)


def test_sweep_after_training():
    values = short()
    found = train(run(values, 0), values).sweep
    assert all(value < 1 for value in found[TERM])
    assert all(value > 1 for value in found[OPPOSITE])
    assert found[OPPOSITE][-1] == pytest.approx(2, abs=0.01)
    assert all(1 < value < 1.25 for value in found[TWICE])


def test_what_is_rounding_has_no_ratio():
    values = short(steps=0, swept_steps=[1, 50])
    found = run(values, 0).sweep.evaluate()
    assert not math.isnan(found[TERM][0])
    assert math.isnan(found[TERM][1])


def test_biases_are_the_same_whatever_is_open():
    one = run(short(), 0)
    expected = one.evaluate(), one.sweep.evaluate()
    with unblock(CHAIN_DISTRIBUTION):
        assert (one.evaluate(), one.sweep.evaluate()) == expected
        one.loss()  # `unblock` wants to be reached


def test_without_the_second_block_the_improved_loss_has_no_negative_phase():
    values = short(divergence="improved", steps=60, evaluate_every=60)
    blocked = train(run(values, 0), values).metrics["objective"]
    with unblock(CHAIN_ENERGY):
        opened = train(run(values, 0), values).metrics["objective"]
    assert opened[-1] < blocked[-1] - 1


@pytest.mark.slow
def test_the_finding_of_the_config():
    values = config(swept_steps=[1], evaluate_every=360)  # only the ends are looked at
    ends: dict[str, list[float]] = {"blocked": [], "open": []}
    for seed in range(values.seeds):
        ends["blocked"].append(train(run(values, seed), values).metrics["objective"][-1])
        with unblock(CHAIN_DISTRIBUTION):
            ends["open"].append(train(run(values, seed), values).metrics["objective"][-1])
        methods = run(values, seed).methods
        del methods.train["the exact gradient"]
        for name, each in train_methods(methods).items():
            ends.setdefault(name, []).append(each["metrics"]["objective"][-1])
    medians = {name: statistics.median(found) for name, found in ends.items()}
    # The finding's two decimals, to a step more than their rounding.
    expected = {"blocked": -3.51, "open": -3.30, "CD-2": -3.30}
    assert {name: medians[name] for name in expected} == pytest.approx(expected, abs=0.015)
    assert max(ends["the third term with its opposite sign"]) < -3.95
    assert all(0.19 < b - a < 0.23 for a, b in zip(ends["blocked"], ends["open"], strict=True))


BAD = {
    "divergence='kl'": "divergence",
    "n_hidden=11": "less than or equal to 10",
    "swept_steps=[]": "at least 1 item",
    "swept_steps=[0]": "greater than or equal to 1",
    "side=4": "less than or equal to 3",
}


@pytest.mark.parametrize("override", BAD)
def test_bad_values_are_refused_in_one_line(override):
    with pytest.raises(ConfigError, match=BAD[override]) as caught:
        load_config(CONFIG, [override])
    assert len(str(caught.value).splitlines()) == 1
