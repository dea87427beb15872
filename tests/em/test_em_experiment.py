"""The experiments on gradient EM: where training ends with the block and without it, from every kind of start."""

import folders
import pytest
import torch
from contract import relative_error

from experiments.em import Config, run
from toolkit import datasets, unblock
from toolkit.em import fit, from_unconstrained, start
from toolkit.runner._config import load_config
from toolkit.runner._training import train

CONFIGS = sorted(folders.CONFIGS.glob("em_*.toml"))
TRAINED = [path for path in CONFIGS if load_config(path).config.experiment == "em"]
BLOCK = "em.responsibilities"
LOST = "log-likelihood lost, against EM from the same start (nats per sample)"

every_config = pytest.mark.parametrize("path", TRAINED, ids=lambda path: path.stem)


def config(**values: object) -> Config:
    common = {"experiment": "em", "title": "t", "finding": "f", "open": [BLOCK], "steps": 1, "learning_rate": 0.05}
    return Config(**{**common, "n_components": 3, "covariance_type": "full", "data": "iris", **values})


def finals(config: Config, *opened: str, seed: int = 0) -> dict[str, float]:
    with unblock(*opened):
        metrics = train(run(config, seed), config).metrics
    return {name: values[-1] for name, values in metrics.items()}


def test_training_on_samples_has_the_seeds_that_an_interval_for_the_median_needs():
    counts = {path.stem: load_config(path).config.seeds for path in CONFIGS}
    del counts["em_population"]  # an integral: there are no samples to draw
    assert min(counts.values()) >= 6
    assert len(counts) >= 6


@every_config
def test_blocked_training_ends_where_em_ends_and_open_training_below(path):
    values = load_config(path).config
    blocked, opened = finals(values), finals(values, BLOCK)
    assert abs(blocked[LOST]) < 3e-5
    if values.surrogate == "expected_log_joint":
        assert opened["objective"] < blocked["objective"]
        assert opened[LOST] > 1e-3
        assert (
            opened["entropy of the responsibilities (nats per sample)"]
            < 0.9 * blocked["entropy of the responsibilities (nats per sample)"]
        )
    else:
        # The same gradient in exact arithmetic: two sums that are rounded otherwise, in each of the steps.
        assert opened["objective"] == pytest.approx(blocked["objective"], abs=1e-12)
        assert opened[LOST] == pytest.approx(blocked[LOST], abs=1e-12)


def test_a_start_from_which_a_component_closes_in_on_a_few_samples_is_drawn_again():
    """The first start of this seed gives a component four of the flowers."""
    values = load_config(folders.CONFIGS / "em_iris.toml").config
    found = run(values, seed=7).evaluate()
    assert found["smallest weight"] > 0.05


@pytest.mark.slow
@every_config
def test_seeds_differ(path):
    values = load_config(path).config.model_copy(update={"steps": 1})
    assert len({finals(values, seed=seed)["objective"] for seed in range(6)}) > 1


def test_overlapping_component_dies_and_is_counted():
    values = load_config(next(path for path in CONFIGS if path.stem == "em_overlapping")).config
    (event,) = run(values, 0).events
    weights = [finals(values, *opened)[event.metric] for opened in ((), (BLOCK,))]
    assert event.says == "a component died"
    assert weights[0] > event.below > weights[1]


def test_what_is_lost_is_counted_from_the_maximum_of_closed_form_em():
    one = run(config(init="k-means++", em_steps=2), seed=4)
    x = datasets.iris().inputs
    parameters = from_unconstrained(one.parameters, "full")
    found = fit(x, 3, covariance_type="full", init=parameters, tol=1e-12, max_iter=5000, reg_covar=0.0)
    metrics = one.evaluate()
    assert metrics["objective"] + metrics[LOST] == pytest.approx(found.log_likelihood, abs=1e-8)


def test_start_follows_its_settings():
    x = datasets.wine().inputs
    x = (x - x.mean(0)) / x.std(0, correction=0)
    expected = start(x, 3, covariance_type="diag", init="k-means++", generator=torch.Generator().manual_seed(2))
    one = run(config(data="wine", standardised=True, covariance_type="diag", init="k-means++"), seed=2)
    # Centring does not change densities, nor what k-means++ draws.
    found = from_unconstrained(one.parameters, "diag")
    shift = datasets.wine().inputs.mean(0) / datasets.wine().inputs.std(0, correction=0)
    assert relative_error({"means": found.means - shift}, {"means": expected.means}) < 1e-12
    torch.testing.assert_close(found.weights, expected.weights)


def test_constant_features_cannot_be_standardised():
    with pytest.raises(ValueError, match="`standardised` should be false for data with a feature that is constant"):
        run(config(data="digits", standardised=True), seed=0)


def test_learning_rate_falls_to_zero():
    values = config(steps=8)
    one = run(values, seed=0)
    rates = []
    for step in range(8):
        rates.append(one.optimizer.param_groups[0]["lr"])
        one.optimizer.zero_grad()
        one.loss().backward()
        one.optimizer.step()
        one.after_step(step + 1)
    assert rates[0] == 0.05
    assert rates == sorted(rates, reverse=True)
    assert rates[4] == pytest.approx(0.025)
    assert one.optimizer.param_groups[0]["lr"] == pytest.approx(0.0, abs=1e-12)
